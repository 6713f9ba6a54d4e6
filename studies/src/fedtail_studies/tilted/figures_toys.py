"""Tilted solutions as a function of t on three small problems [Li23, figures 7.1, 7.3 and 7.18, Theorems 24 and 25].

(a) A point for points with outliers, (b) a line for points with outliers, (c) a logistic regression for a common and a rare
class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog

import fedtail
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, difference, lower
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table
from fedtail_studies.tilted.figures_problems import (
    CENTRE,
    LINE,
    Problem,
    classes,
    geometric_median,
    line,
    outlier_weight,
    points,
    solutions,
    tilted_loss,
)

POINT, LINES, CLASSES = "point estimation", "linear regression", "logistic regression"
TILTS = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.3, -0.2, -0.15, -0.1, -0.07, -0.05, -0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05,
         0.1,
         0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
LOGISTIC_TILTS = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.1, -0.01, 0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
TOP = 5                                          # samples with the largest weights, figure 7.18


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    inliers: int = 50
    outliers: int = 5
    common: int = 100
    rare: int = 12
    steps: int = 300                             # of L-BFGS, for each tilt


def made(plan: Plan, name: str, seed: int) -> Problem:
    """The problem of a seed."""
    if name == CLASSES:
        return classes(seed, plan.common, plan.rare)
    return (points if name == POINT else line)(seed, plan.inliers, plan.outliers)


def tilts_of(name: str) -> tuple[float, ...]:
    return LOGISTIC_TILTS if name == CLASSES else TILTS


def path(cell: Cell, name: str) -> Numbers:
    """For each tilt: parameters, optimal tilted loss, mean, largest and variance of losses, weight and mean loss of outliers."""
    problem = made(cell.plan, name, cell.seed)
    tilts = tilts_of(name)
    numbers: Numbers = {what: [] for what in ("params", "value", "mean", "largest", "variance", "outlier_weight", "outlier_loss",
                                              "clean_loss")}
    for _ in cell.steps(1):
        found = solutions(problem, tilts, cell.plan.steps)
    for tilt, params in zip(tilts, found, strict=True):
        losses = problem.losses(params)
        for what, value in (("params", params.tolist()), ("value", tilted_loss(problem, params, tilt)),
                            ("mean", float(losses.mean())),
                            ("largest", float(losses.max())), ("variance", float(losses.var(correction=0))),
                            ("outlier_weight", outlier_weight(problem, params, tilt)),
                            ("outlier_loss", float(losses[problem.outlier].mean())),
                            ("clean_loss", float(losses[~problem.outlier].mean()))):
            numbers[what].append(value)
    return numbers | {POINT: _about_points, LINES: _about_line, CLASSES: _about_classes}[name](problem, found, tilts)


def _about_points(problem: Problem, found: Sequence[torch.Tensor], tilts: Sequence[float]) -> Numbers:
    """Distances to the centre of the inliers and to the geometric median, and the least of the largest loss."""
    x = problem.x.numpy()
    median = geometric_median(x)
    every = np.stack([params.numpy() for params in found])
    return {"error": np.linalg.norm(every - CENTRE, axis=1).tolist(),
            "to_median": np.linalg.norm(every - median, axis=1).tolist(),
            "min_max": _smallest_circle(x)}


def _about_line(problem: Problem, found: Sequence[torch.Tensor], tilts: Sequence[float]) -> Numbers:
    """The root mean squared distance to the clean line over x in [-2, 2], and the least of the largest loss."""
    every = np.stack([params.numpy() for params in found]) - LINE
    return {"error": np.sqrt(every[:, 0] ** 2 + every[:, 1] ** 2 * 4 / 3).tolist(), "min_max": _chebyshev(problem)}


def _about_classes(problem: Problem, found: Sequence[torch.Tensor], tilts: Sequence[float]) -> Numbers:
    """Accuracy by class, the direction of the boundary, and how many samples with the largest weights are misclassified."""
    numbers: Numbers = {"rare": [], "common": [], "degrees": [], "top_wrong": [], "top_rare": []}
    for tilt, params in zip(tilts, found, strict=True):
        right = (params[0] + problem.x @ params[1:]).sign() == problem.y
        top = fedtail.Tilted(tilt).weights(problem.losses(params)).topk(TOP).indices
        numbers["rare"].append(float(right[problem.outlier].double().mean()))
        numbers["common"].append(float(right[~problem.outlier].double().mean()))
        numbers["degrees"].append(math.degrees(math.atan2(float(params[2]), float(params[1]))))
        numbers["top_wrong"].append(float((~right[top]).double().mean()))
        numbers["top_rare"].append(float(problem.outlier[top].double().mean()))
    return numbers


def _smallest_circle(x: np.ndarray) -> float:
    """The least over centres of the largest squared distance, a convex problem: descent on the worst loss, from the best tilt."""
    from scipy.optimize import minimize

    start = (x.max(0) + x.min(0)) / 2
    found = minimize(lambda centre: ((x - centre) ** 2).sum(1).max(), start, method="Nelder-Mead",
                     options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 5000})
    return float(found.fun)


def _chebyshev(problem: Problem) -> float:
    """The least over lines of the largest squared error, a linear program."""
    x, y = problem.x.numpy(), problem.y.numpy()
    sides = np.column_stack([np.ones_like(x), x])
    ones = -np.ones((len(x), 1))
    found = linprog([0, 0, 1], A_ub=np.vstack([np.hstack([sides, ones]), np.hstack([-sides, ones])]),
                    b_ub=np.concatenate([y, -y]),
                    bounds=[(None, None), (None, None), (0, None)])
    return float(found.fun) ** 2


def cells(plan: Plan, seed: int) -> dict:
    return {name: partial(path, name=name) for name in (POINT, LINES, CLASSES)}


def at(results: Results, name: str, what: str, tilt: float) -> list[float]:
    """A number of the solution at a tilt, for each seed."""
    return [values[tilts_of(name).index(tilt)] for values in results.lists(name, what)]


def tables(results: Results) -> list[Table]:
    shown = (-10.0, -2.0, -0.1, 0.0, 0.1, 2.0, 50.0)
    titles = {"error": "distance to the clean solution", "mean": "mean loss", "largest": "largest loss",
              "variance": "variance of losses",
              "outlier_weight": "weight of outliers"}
    listed = [Table(f"{name.capitalize()}, by t", tuple(titles.values()),
                    tuple(Row(f"{tilt:g}", {title: at(results, name, what, tilt) for what, title in titles.items()})
                          for tilt in shown),
                    digits=3, head="t") for name in (POINT, LINES)]
    titles = {"rare": "accuracy, rare class", "common": "accuracy, common class",
              "degrees": "direction of the boundary's normal, degrees",
              "mean": "mean loss", "largest": "largest loss", "top_wrong": f"misclassified among the {TOP} largest weights"}
    listed.append(Table("Logistic regression, by t", tuple(titles.values()), tuple(
        Row(f"{tilt:g}", {title: at(results, CLASSES, what, tilt) for what, title in titles.items()}) for tilt in shown),
        digits=3, head="t"))
    return listed


def _shades(tilts: Sequence[float]) -> list[Any]:
    """Blue for negative tilts, red for positive ones, black at zero, darker the larger."""
    from matplotlib import colormaps

    size = [math.log10(abs(t) / 0.01) / math.log10(50 / 0.01) if t else 0.0 for t in tilts]
    return [colormaps["Blues" if t < 0 else "Reds"](0.3 + 0.7 * s) if t else "#222222" for t, s in zip(tilts, size, strict=True)]


def figures(results: Results, folder: Path) -> list[Figure]:
    plan, seed = Plan(**results.plan), results.seeds[0]
    with drawn(folder / "figure1.png", columns=3, width=4.2, height=4.0) as axes:
        for axis, name in zip(axes, (POINT, LINES, CLASSES), strict=True):
            _draw_problem(axis, name, made(plan, name, seed), np.array(results.numbers(name, seed)["params"]))
        axes[0].legend(loc="upper left")
    with drawn(folder / "figure3.png", columns=4, width=3.2, height=3.2) as axes:
        for axis, (name, tilt) in zip(axes, ((LINES, -2.0), (LINES, 2.0), (CLASSES, -10.0), (CLASSES, 10.0)), strict=True):
            _draw_weights(axis, name, made(plan, name, seed), results.numbers(name, seed)["params"][tilts_of(name).index(tilt)],
                          tilt)
    with drawn(folder / "losses.png", columns=3, width=4.2, height=3.2) as axes:
        for axis, name in zip(axes, (POINT, LINES, CLASSES), strict=True):
            found = results.numbers(name, seed)
            places = range(len(tilts_of(name)))
            for what, colour in zip(("value", "mean", "largest"), COLOURS, strict=False):
                axis.plot(places, found[what], "o-", markersize=3, color=colour,
                          label={"value": "optimal tilted loss"}.get(what, f"{what} loss"))
            some = list(places)[:: max(1, len(places) // 7)]
            axis.set(title=name, xlabel="t", yscale="log", xticks=some, xticklabels=[f"{tilts_of(name)[k]:g}" for k in some])
        axes[0].legend()
    return [Figure("figure1.png", "Figure 7.1: solutions from t = -20 (dark blue) over t = 0 (black) to t = 50 (dark red)."),
            Figure("figure3.png", "Figures 7.3 and 7.18: the area of a sample is its weight at the solution; outliers and the "
                                  "rare class orange."),
            Figure("losses.png", "The optimal tilted loss grows with t, from the least single loss to the least largest loss; "
                                 "the mean is least at t = 0.")]


def _scatter(axis: Any, name: str, problem: Problem, sizes: Any = 12) -> None:
    """The examples, outliers in orange."""
    first, second = (problem.x, problem.y) if name == LINES else (problem.x[:, 0], problem.x[:, 1])
    colours = [COLOURS[1] if far else COLOURS[3] for far in problem.outlier.tolist()]
    axis.scatter(first, second, s=sizes, c=colours, alpha=0.7, linewidths=0)


def _draw_line(axis: Any, name: str, params: Any, **style: Any) -> None:
    """A fitted line, or the boundary between two classes."""
    ends = np.array(axis.get_xlim())
    slope, height = (params[1], params[0]) if name == LINES else (-params[1] / params[2], -params[0] / params[2])
    axis.plot(ends, height + slope * ends, linewidth=1, **style)


def _draw_problem(axis: Any, name: str, problem: Problem, params: np.ndarray) -> None:
    """Examples and the solutions of all tilts."""
    _scatter(axis, name, problem)
    tilts, shades = tilts_of(name), _shades(tilts_of(name))
    ends = axis.get_xlim(), axis.get_ylim()
    for tilt, colour, solution in zip(tilts, shades, params, strict=True):
        label = f"t = {tilt:g}" if tilt in (min(tilts), 0.0, max(tilts)) else None
        if name == POINT:
            axis.plot(*solution, "o", markersize=5, color=colour, label=label)
        else:
            axis.set(xlim=ends[0])
            _draw_line(axis, name, solution, color=colour, label=label)
    axis.set(title=name, xlim=ends[0], ylim=ends[1])


def _draw_weights(axis: Any, name: str, problem: Problem, params: list[float], tilt: float) -> None:
    """Examples as large as their weights, and the solution."""
    solution = torch.tensor(params, dtype=torch.float64)
    weights = fedtail.Tilted(tilt).weights(problem.losses(solution)).numpy()
    _scatter(axis, name, problem, sizes=3 + 200 * weights / weights.max() * min(1.0, 20 * weights.max()))
    ends = axis.get_xlim(), axis.get_ylim()
    _draw_line(axis, name, params, color="#222222")
    axis.set(title=f"{name}, t = {tilt:g}", xlim=ends[0], ylim=ends[1])


def _suppressed(results: Results, name: str) -> Finding:
    """t = -2 is nearer to the clean solution than t = 0, and t = 2 farther away."""
    error = {tilt: at(results, name, "error", tilt) for tilt in (-2.0, 0.0, 2.0)}
    return all_of(lower(difference(error[-2.0], error[0.0]), True, what="distance to the clean solution, t = -2 less t = 0:"),
                  lower(difference(error[0.0], error[2.0]), True, what="t = 0 less t = 2:"))


def _weights_follow(results: Results) -> Finding:
    """Outliers have less than their share of weight at t = -2, and more at t = 2."""
    share = results.plan["outliers"] / (results.plan["inliers"] + results.plan["outliers"])
    findings = []
    for name in (POINT, LINES):
        least, most = max(at(results, name, "outlier_weight", -2.0)), min(at(results, name, "outlier_weight", 2.0))
        findings.append(Finding(Verdict.AGREES if least < share < most else Verdict.DISAGREES,
                                f"{name}: weight of outliers at most {least:.2g} at t = -2, at least {most:.2g} at t = 2; their "
                                f"share is {share:.2g}"))
    return all_of(*findings)


def _median_is_met(results: Results) -> Finding:
    """How near the path comes to the geometric median, as a share of how far the mean is from it."""
    ratios, where = [], []
    for found in results.lists(POINT, "to_median"):
        below = [(value, tilt) for value, tilt in zip(found, TILTS, strict=True) if tilt < 0]
        nearest, tilt = min(below)
        ratios.append(nearest / found[TILTS.index(0.0)])
        where.append(tilt)
    return at_most(max(ratios), 0.2, f"nearest solution, at t from {min(where):g} to {max(where):g}: its distance to the "
                                     "geometric median, of that of the mean, at most")


def _min_max_is_met(results: Results, name: str) -> Finding:
    last = max(TILTS)
    excess = [largest / least - 1 for largest, least in zip(at(results, name, "largest", last), results.values(name, "min_max"),
                                                            strict=True)]
    return at_most(max(excess), 0.01, f"largest loss at t = {last:g} above the least possible, as a share of it")


def _grows(results: Results) -> Finding:
    drops = [before - after for name in (POINT, LINES, CLASSES) for values in results.lists(name, "value")
             for before, after in pairwise(values)]
    return at_most(max(drops), 1e-6, "largest fall of the optimal tilted loss from one t to the next")


def _variance_falls(results: Results) -> Finding:
    return all_of(*(lower(difference(at(results, name, "variance", 0.01), at(results, name, "variance", 0.0)), True,
                          what=f"{name}, variance at t = 0.01 less at 0:") for name in (POINT, LINES, CLASSES)))


def _rare_gain(results: Results) -> Finding:
    return lower(difference(at(results, CLASSES, "outlier_loss", 2.0), at(results, CLASSES, "outlier_loss", 0.0)), True,
                 what="mean loss of the rare class, t = 2 less t = 0:")


def _boundary_turns(results: Results) -> Finding:
    turned = [abs(a - b) for a, b in zip(at(results, CLASSES, "degrees", 10.0), at(results, CLASSES, "degrees", 0.0),
                                         strict=True)]
    mean = sum(turned) / len(turned)
    return Finding(Verdict.AGREES if mean >= 5 else Verdict.DISAGREES,
                   f"the boundary at t = 10 is turned by {mean:.1f} degrees on average from t = 0 (at least {min(turned):.1f})")


def _largest_weights(results: Results) -> Finding:
    """At t = 50 most of the largest weights are on misclassified samples, at t = -10 none."""
    above, below = (sum(values) / len(values) for values in (at(results, CLASSES, "top_wrong", t) for t in (50.0, -10.0)))
    return Finding(Verdict.AGREES if above > 0.5 and below == 0 else Verdict.DISAGREES,
                   f"misclassified among the {TOP} largest weights: {above:.0%} at t = 50, {below:.0%} at t = -10")


def notes(results: Results) -> list[str]:
    plan = results.plan
    return [f"The thesis prints no sizes. Points: {plan['inliers']} from N((1, 1), 0.3^2) and {plan['outliers']} from N((4, 4), "
            f"0.3^2). Line: {plan['inliers']} at y = 1 + x/2, noise 0.2, and {plan['outliers']} at y = 4, x in [-2, -1]. "
            f"Classes: {plan['common']} and {plan['rare']}, logistic losses with a ridge of 0.001, without which losses have no "
            "least value for t < 0.",
            "Solutions begin at the mean's and follow t outwards (L-BFGS), as in section 7.5."]


FIGURES_TOYS = Study(
    name="figures_toys", paper="Li23", item="figures 7.1, 7.3, 7.18", title="Tilted solutions on three small problems",
    cost=Cost(0, 1),
    full=Plan(), quick=Plan(seeds=2), cells=cells, tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("Point estimation: t < 0 suppresses outliers, t > 0 magnifies them.", "[Li23, figure 7.1a]",
              partial(_suppressed, name=POINT)),
        Claim("Linear regression: t < 0 suppresses outliers, t > 0 magnifies them.", "[Li23, figure 7.1b]",
              partial(_suppressed, name=LINES)),
        Claim("Gradient weights: outliers have less than their share for t = -2, and more for t = 2.", "[Li23, figure 7.3]",
              _weights_follow),
        Claim("A specific t < 0 approximately recovers the geometric median: to a fifth of the mean's distance.",
              "[Li23, section 7.1.2]",
              _median_is_met),
        Claim("Point estimation: as t grows, the solution with the least largest loss is recovered.", "[Li23, Lemma 25]",
              partial(_min_max_is_met, name=POINT)),
        Claim("Linear regression: as t grows, the solution with the least largest loss is recovered.", "[Li23, Lemma 25]",
              partial(_min_max_is_met, name=LINES)),
        Claim("The optimal tilted loss never falls as t grows.", "[Li23, Theorem 24]", _grows),
        Claim("The variance of losses falls as t grows from 0.", "[Li23, Theorem 25]", _variance_falls),
        Claim("Logistic regression: t > 0 serves the rare class better.", "[Li23, figure 7.1c]", _rare_gain),
        Claim("Logistic regression: the slope of the boundary changes with t, not only its intercept.", "[Li23, section 7.1.2]",
              _boundary_turns),
        Claim("For large t misclassified samples have the largest weights; for t towards -infinity those with the smallest "
              "losses.",
              "[Li23, figure 7.18]", _largest_weights),
    ))
