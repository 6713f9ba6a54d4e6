"""Value at risk and what bounds it: VaR, TiVaR, CVaR and EVaR against alpha, and how well their solutions solve VaR.

[Li23, figures 7.4 and 7.16, Theorems 28 and 37], on point estimation and a line with outliers. The least VaR is exact: the disc
that holds k points is determined by two or three of them, and the strip that holds k points is parallel to a line through two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize

import fedtail
from fedtail.solvers import minimise
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, difference, lower
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table
from fedtail_studies.tilted.figures_problems import Problem, line, points, solutions, tilted_loss

POINT, LINES = "point estimation", "linear regression"
ROUNDING = 1e-4                                  # relative; six digits are kept
DIRECT = (8, 20, 32)                             # tails at which TiVaR is minimised from ERM
STARTS = 4                                       # samples from which negative tilts start too


@dataclass(frozen=True)
class Plan:
    seeds: int = 3
    inliers: int = 36
    outliers: int = 4
    tilts: int = 20                              # of each sign, from 0.02 to 200
    tails: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 38)      # alpha times the number of samples


def made(plan: Plan, name: str, seed: int) -> Problem:
    return (points if name == POINT else line)(seed, plan.inliers, plan.outliers)


def least_quantiles(problem: Problem, name: str) -> np.ndarray:
    """For k = 1 to n: the least over parameters of the k-th smallest loss, exact."""
    return _smallest_discs(problem.x.numpy()) if name == POINT else _thinnest_strips(problem.x.numpy(), problem.y.numpy())


def _smallest_discs(x: np.ndarray) -> np.ndarray:
    """The squared radius of the smallest disc that holds k points, for each k: centres are midpoints and circumcentres."""
    first, second = np.triu_indices(len(x), 1)
    centres = [x, (x[first] + x[second]) / 2]
    triples = np.array(list(itertools.combinations(range(len(x)), 3)))
    sides = 2 * (x[triples[:, 1:]] - x[triples[:, :1]])                          # (triples, 2, 2)
    proper = np.abs(np.linalg.det(sides)) > 1e-12
    squares = (x[triples] ** 2).sum(2)
    heights = (squares[:, 1:] - squares[:, :1])[proper]
    centres.append(np.linalg.solve(sides[proper], heights[:, :, None])[:, :, 0])
    return np.min([np.sort(((x[None] - part[:, None]) ** 2).sum(2), 1).min(0) for part in centres], axis=0)


def _thinnest_strips(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The squared half height of the thinnest strip that holds k points, for each k, over the slopes of all pairs of points."""
    first, second = np.triu_indices(len(x), 1)
    slopes = (y[second] - y[first]) / (x[second] - x[first])
    heights = np.sort(y[None] - slopes[:, None] * x[None], 1)                    # (pairs, n)
    return np.array([((heights[:, k:] - heights[:, : len(x) - k]).min() / 2) ** 2 for k in range(len(x))])


def tilts_of(plan: Plan) -> list[float]:
    sizes = np.geomspace(0.02, 200, plan.tilts)
    return [*(-sizes[::-1]).tolist(), 0.0, *sizes.tolist()]


def path(plan: Plan, problem: Problem, seed: int) -> list[torch.Tensor]:
    """The best solution found for each tilt: continuation from the mean, and for negative tilts a few other starts."""
    tilts = tilts_of(plan)
    found = solutions(problem, tilts, 200)
    random = np.random.default_rng([seed, 11])
    for place, tilt in enumerate(tilts):
        if tilt < -0.1:
            for _ in range(STARTS):
                start = torch.from_numpy(_through_samples(problem, random))
                other = minimise(problem.losses, start, fedtail.Tilted(tilt), method="lbfgs", steps=60).params
                found[place] = min(found[place], other, key=lambda params: tilted_loss(problem, params, tilt))
    return found


def _through_samples(problem: Problem, random: np.random.Generator) -> np.ndarray:
    """A sample, or a line through two samples that are not close."""
    if problem.x.ndim == 2:
        return problem.x.numpy()[random.integers(len(problem.x))]
    x, y = problem.x.numpy(), problem.y.numpy()
    low, high = random.choice(np.argsort(x)[: len(x) // 2]), random.choice(np.argsort(x)[len(x) // 2 :])
    slope = (y[high] - y[low]) / (x[high] - x[low])
    return np.array([y[low] - slope * x[low], slope])


def compared(cell: Cell, name: str) -> Numbers:
    """For each alpha: the least of each risk, and VaR at each risk's solution."""
    plan: Plan = cell.plan
    problem = made(plan, name, cell.seed)
    samples = len(problem.outlier)
    exact = least_quantiles(problem, name)
    found = path(plan, problem, cell.seed)
    numbers: Numbers = {what: [] for what in ("VaR", "TiVaR", "CVaR", "EVaR", "VaR1", "VaR2", "at_CVaR", "at_EVaR", "at_inverse",
                                              "order", "direct")}
    for place in cell.steps(len(plan.tails)):
        alpha = plan.tails[place] / samples
        solved = solved_risks(problem, found, alpha)
        var = {what: quantile(problem, params, alpha) for what, params in solved.items()}
        row = {"VaR": float(exact[samples - plan.tails[place] - 1]),
               "VaR1": min(quantile(problem, params, alpha) for params in (*found, solved["TiVaR"])),
               "VaR2": var["TiVaR"], "at_CVaR": var["CVaR"], "at_EVaR": var["EVaR"], "at_inverse": var["inverse"],
               "order": out_of_order(problem, solved, alpha),
               **{what: float(risk.value(problem.losses(solved[what]))) for what, risk in risks(alpha).items()},
               "direct": directly(problem, alpha) if plan.tails[place] in DIRECT else None}
        for what, value in row.items():
            numbers[what].append(value)
    return numbers


def risks(alpha: float) -> dict[str, fedtail.Risk]:
    """The three risks that bound VaR."""
    return {"TiVaR": fedtail.TiltedValueAtRisk(alpha), "CVaR": fedtail.Superquantile(alpha),
            "EVaR": fedtail.EntropicValueAtRisk(alpha)}


def value_at(problem: Problem, risk: fedtail.Risk, params: torch.Tensor) -> float:
    """A risk of the losses of these parameters."""
    return float(risk.value(problem.losses(params)))


def quantile(problem: Problem, params: torch.Tensor, alpha: float) -> float:
    """VaR(1 - alpha; params)."""
    return float(fedtail.ValueAtRisk(alpha).value(problem.losses(params)))


def solved_risks(problem: Problem, found: list[torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """The minimiser of each risk.

    TiVaR and EVaR are least at a tilted solution; they are minimised from the best one of the path. CVaR is convex: from the
    mean's solution, by quasi-Newton steps and then by a simplex. Inverse CVaR: mean and best samples in turn, from all.
    """
    solved: dict[str, torch.Tensor] = {}
    for what, risk in risks(alpha).items():
        if what == "CVaR":
            near = minimise(problem.losses, found[len(found) // 2], risk, method="lbfgs", steps=50).best
            solved[what] = _simplex(partial(value_at, problem, risk), near)
        else:
            start = min(found, key=partial(value_at, problem, risk))
            solved[what] = minimise(problem.losses, start, risk, method="lbfgs", steps=25).best
    inverse = fedtail.InverseSuperquantile(alpha)
    solved["inverse"] = min((_best_samples(problem, params, alpha) for params in found),
                            key=lambda params: float(inverse.value(problem.losses(params))))
    return solved


def _simplex(objective: Callable[..., float], start: torch.Tensor) -> torch.Tensor:
    """Nelder and Mead's search, for two parameters and a convex objective with kinks."""
    found = minimize(lambda point: objective(torch.from_numpy(point)), start.numpy(), method="Nelder-Mead",
                     options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 300})
    return torch.from_numpy(found.x)


def _best_samples(problem: Problem, params: torch.Tensor, alpha: float) -> torch.Tensor:
    """Least squares on the samples with the smallest losses, all but a share alpha, in turn, until these stay the same."""
    kept = len(problem.outlier) - round(alpha * len(problem.outlier))
    x, y = problem.x.numpy(), problem.y.numpy()
    before: set[int] = set()
    for _ in range(30):
        best = problem.losses(params).argsort()[:kept].numpy()
        if set(best.tolist()) == before:
            break
        before = set(best.tolist())
        params = torch.from_numpy(x[best].mean(0) if x.ndim == 2 else
                                  np.linalg.lstsq(np.column_stack([np.ones(kept), x[best]]), y[best], rcond=None)[0])
    return params


def out_of_order(problem: Problem, solved: dict[str, torch.Tensor], alpha: float) -> float:
    """The largest violation of VaR <= TiVaR <= EVaR and VaR <= CVaR <= EVaR at the same parameters, over all solutions."""
    worst = -math.inf
    for params in solved.values():
        value = {what: float(risk.value(problem.losses(params))) for what, risk in risks(alpha).items()}
        var = quantile(problem, params, alpha)
        worst = max(worst, *(max(var - value[what], value[what] - value["EVaR"]) for what in ("TiVaR", "CVaR")))
    return worst


def directly(problem: Problem, alpha: float) -> float:
    """TiVaR where L-BFGS on it ends that begins at the mean's solution."""
    middle = minimise(problem.losses, problem.start(), fedtail.Mean(), method="lbfgs", steps=50).params
    return float(minimise(problem.losses, middle, fedtail.TiltedValueAtRisk(alpha), method="lbfgs", steps=40).values.min())


def cells(plan: Plan, seed: int) -> dict:
    return {name: partial(compared, name=name) for name in (POINT, LINES)}


def _alphas(results: Results) -> np.ndarray:
    return np.array(results.plan["tails"]) / (results.plan["inliers"] + results.plan["outliers"])


def _at(results: Results, name: str, what: str) -> np.ndarray:
    """(seeds, alphas); NaN where there is none."""
    return np.array([[math.nan if value is None else value for value in values] for values in results.lists(name, what)])


def tables(results: Results) -> list[Table]:
    alphas, made_tables = _alphas(results), []
    for name in (POINT, LINES):
        columns = {"VaR": "VaR", "TiVaR": "TiVaR", "CVaR": "CVaR", "EVaR": "EVaR", "VaR1": "VaR1", "VaR2, at TiVaR's": "VaR2",
                   "VaR at CVaR's": "at_CVaR", "at EVaR's": "at_EVaR", "at inverse CVaR's": "at_inverse"}
        rows = tuple(Row(f"{alpha:g}", {title: _at(results, name, what)[:, k].tolist() for title, what in columns.items()})
                     for k, alpha in enumerate(alphas))
        made_tables.append(Table(f"{name.capitalize()}: the least of each risk, and VaR at its solution", tuple(columns), rows,
                                 digits=3, head="alpha"))
    return made_tables


def figures(results: Results, folder: Path) -> list[Figure]:
    alphas = _alphas(results)
    drawings = ({"VaR": "VaR", "TiVaR": "TiVaR", "CVaR": "CVaR", "EVaR": "EVaR"},
                {"VaR⁰": "VaR", "VaR¹": "VaR1", "VaR², at TiVaR's solution": "VaR2", "at CVaR's": "at_CVaR",
                 "at EVaR's": "at_EVaR",
                 "at inverse CVaR's": "at_inverse"})
    names = ("figure4.png", "figure16.png")
    for file, shown in zip(names, drawings, strict=True):
        with drawn(folder / file, columns=2, width=4.6) as axes:
            for axis, name in zip(axes, (POINT, LINES), strict=True):
                for (label, what), colour, style in zip(shown.items(), ("#222222", *COLOURS), ("-", "-", "-", "--", "--", ":"),
                                                        strict=False):
                    values = _at(results, name, what)[0]
                    axis.plot(alphas, np.maximum(values, 1e-6), style, color=colour, label=label, marker=".")
                axis.set(title=name, xlabel="alpha", yscale="log", ylim=(1e-4, None))
            axes[0].set_ylabel("least value of the risk" if file == names[0] else "VaR(1 - alpha) at solutions")
            axes[0].legend()
    return [Figure(names[0], "Figure 7.4: the least value of each risk (first seed)."),
            Figure(names[1], "Figure 7.16: how well solutions of each risk solve VaR (first seed).")]


def _excess(low: np.ndarray, high: np.ndarray) -> float:
    """The largest excess of `low` over `high`, relative to the latter where it is above one."""
    return float(((low - high) / np.maximum(1, np.abs(high))).max())


def _ordered(results: Results) -> Finding:
    worst = max(float(_at(results, name, "order").max()) for name in (POINT, LINES))
    return at_most(worst, 1e-6, "largest violation at any solution")


def _minima_ordered(results: Results) -> Finding:
    """For the least values over parameters."""
    pairs = (("VaR", "TiVaR"), ("TiVaR", "EVaR"), ("VaR", "CVaR"), ("CVaR", "EVaR"))
    return all_of(*(at_most(max(_excess(_at(results, name, low), _at(results, name, high)) for name in (POINT, LINES)), ROUNDING,
                            f"{low} above {high} by") for low, high in pairs))


def _tighter_near_one(results: Results) -> Finding:
    """TiVaR is below CVaR at every alpha from 0.8 on, and above it somewhere."""
    near = _alphas(results) >= 0.8
    findings = []
    for name in (POINT, LINES):
        tilted, conditional = (_at(results, name, what) for what in ("TiVaR", "CVaR"))
        below = bool((tilted[:, near] < conditional[:, near]).all())
        first = [float(_alphas(results)[row].min()) if row.any() else math.nan for row in tilted < conditional]
        findings.append(Finding(Verdict.AGREES if below else Verdict.DISAGREES,
                                f"{name}: TiVaR over CVaR from alpha 0.8 on at most {(tilted / conditional)[:, near].max():.2f}; "
                                f"below it from alpha {min(first):.2g} to {max(first):.2g} on"))
    return all_of(*findings)


def _theorem37(results: Results) -> Finding:
    pairs = (("VaR", "VaR1"), ("VaR1", "VaR2"), ("VaR2", "TiVaR"))
    return all_of(*(at_most(max(_excess(_at(results, name, low), _at(results, name, high)) for name in (POINT, LINES)), 1e-3,
                            f"{low} above {high} by") for low, high in pairs))


def _close(results: Results, what: str) -> Finding:
    """The mean excess over the least VaR, against that of the bound, TiVaR itself."""
    findings = []
    for name in (POINT, LINES):
        least = _at(results, name, "VaR")
        excess, bound = (_at(results, name, one) - least for one in (what, "TiVaR"))
        worst = _alphas(results)[excess.mean(0).argmax()]
        said = (f"{name}: mean excess over the least VaR {excess.mean():.3f}, of TiVaR itself {bound.mean():.3f}, largest at "
                f"alpha {worst:g}; ratio")
        findings.append(at_most(float(excess.mean() / bound.mean()), 0.5, said))
    return all_of(*findings)


def _better_than(results: Results, what: str) -> Finding:
    """VaR at TiVaR's solutions less that at another's, mean over alphas of at least 0.3."""
    rest = _alphas(results) >= 0.3
    return all_of(*(lower(difference(*(_at(results, name, one)[:, rest].mean(1).tolist() for one in ("VaR2", what))), True,
                          what=f"{name}, mean over alpha >= 0.3:") for name in (POINT, LINES)))


def _beats_inverse(results: Results) -> Finding:
    ours, theirs = (_at(results, LINES, what) for what in ("VaR2", "at_inverse"))
    share = float((ours < theirs * (1 - ROUNDING)).mean())
    return Finding(Verdict.AGREES if share > 0 else Verdict.DISAGREES, f"smaller in {share:.0%} of alphas and seeds")


def _direct(results: Results) -> Finding:
    """Minimising TiVaR from ERM ends near the least value that was found."""
    excess = {(name, seed, float(alpha)): float(value) for name in (POINT, LINES)
              for seed, row in enumerate(_at(results, name, "direct") / _at(results, name, "TiVaR") - 1)
              for alpha, value in zip(_alphas(results), row, strict=True) if not math.isnan(value)}
    name, _, alpha = worst = max(excess, key=lambda case: excess[case])
    near = sum(value <= 0.05 for value in excess.values())
    return at_most(excess[worst], 0.05, f"{near} of {len(excess)} runs do; the farthest, {name} at alpha {alpha:g}, is above it "
                                        "by, as a share")


def notes(results: Results) -> list[str]:
    plan = results.plan
    return [f"The thesis prints no sizes. Problems as in `figures_toys`, with {plan['inliers']} samples and {plan['outliers']} "
            "outliers. F(-infinity) is 0: some point or line has a loss of zero.",
            "VaR(1 - alpha) of n losses is the (n - alpha n)-th smallest. VaR1 is the least VaR of tilted solutions over all t; "
            f"VaR2 is VaR at TiVaR's solution. Tilts are {2 * plan['tilts'] + 1} from -200 to 200, negative ones from several "
            "starts, as they are not convex.",
            "Inverse CVaR is minimised by least squares on the best samples, in turn, from all tilted solutions; it bounds "
            "nothing."]


FIGURES_RISKS = Study(
    name="figures_risks", paper="Li23", item="figures 7.4, 7.16", title="Value at risk, and the risks that bound it",
    cost=Cost(0, 3),
    full=Plan(), quick=Plan(seeds=1, tilts=10), cells=cells, tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("At any parameters VaR <= TiVaR <= EVaR, and VaR <= CVaR <= EVaR.", "[Li23, Theorem 28]", _ordered),
        Claim("So are their least values: TiVaR and CVaR are between VaR and EVaR.", "[Li23, figure 7.4]", _minima_ordered),
        Claim("TiVaR is tighter than CVaR where alpha is close to 1.", "[Li23, figure 7.4]", _tighter_near_one),
        Claim("VaR0 <= VaR1 <= VaR2 <= TiVaR.", "[Li23, Theorem 37]", _theorem37),
        Claim("VaR1, the best tilted solution's, is close to the least VaR: nearer than half of TiVaR's gap.",
              "[Li23, figure 7.16]", partial(_close, what="VaR1")),
        Claim("VaR2, at TiVaR's solution, is close to the least VaR: nearer than half of TiVaR's gap.", "[Li23, figure 7.16]",
              partial(_close, what="VaR2")),
        Claim("VaR at TiVaR's solutions is below that at EVaR's where alpha is not small.", "[Li23, figure 7.16]",
              partial(_better_than, what="at_EVaR")),
        Claim("VaR at TiVaR's solutions can be smaller than at inverse CVaR's, on linear regression.", "[Li23, section 7.10]",
              _beats_inverse),
        Claim("Minimising TiVaR from ERM finds its least value, to a twentieth.", "[ours]", _direct),
    ))
