"""Three squared losses of one number: shapes of the tilted objective and convergence with t [Li23, figures 7.2, 7.5 and 7.17].

The losses are those of the released notebook: (w + 0.2)^2, (w - 0.2)^2 + 0.1 and (w - 1.2)^2; the thesis prints none. Figure 7.17
compares one mini-batch with two, on point estimation.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtail
from fedtail.solvers import minimise, minimise_stochastic
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, difference, within
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table
from fedtail_studies.tilted.figures_problems import points, tilted_loss

CENTRES, HEIGHTS = torch.tensor([-0.2, 0.2, 1.2], dtype=torch.float64), torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64)
SHAPES = (-100.0, -20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 20.0, 100.0)
DESCENTS = (-20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 20.0, 100.0, 500.0)
CURVATURES = (-100.0, -20.0, -5.0, -1.0, -0.1, 0.0, 1.0, 5.0, 20.0, 100.0, 500.0, 2500.0)
SMOOTHEST = 2.0                                  # the second derivative of each loss: beta_max
APART = 0.1                                      # descents begin this far below the solution, as in the released notebook
ONE, TWO = "one mini-batch", "two mini-batches"
LOOKS = 40                                       # evaluations of a stochastic run


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    grid: int = 226                              # values of w in [-0.75, 1.5]
    gap: float = 1e-9                            # of the tilted loss, at which a descent has converged
    most_steps: int = 400
    stochastic_steps: int = 4000
    stochastic_step_size: float = 0.002
    stochastic_tilts: tuple[float, ...] = (-1.0, 0.1)


def losses(params: torch.Tensor) -> torch.Tensor:
    """The three losses of one number."""
    return (params - CENTRES).square() + HEIGHTS


def curves(cell: Cell) -> Numbers:
    """The tilted objective on a grid of w for each tilt, with the least, middle and largest loss; curvature by tilt."""
    grid = torch.linspace(-0.75, 1.5, cell.plan.grid, dtype=torch.float64)
    every = (grid[:, None] - CENTRES).square() + HEIGHTS                         # (grid, 3)
    ranked = every.sort(1).values
    numbers: Numbers = {"grid": grid.tolist(), "least": ranked[:, 0].tolist(), "middle": ranked[:, 1].tolist(),
                        "largest": ranked[:, 2].tolist(), "objective": [], "second": []}
    for tilt in SHAPES:
        numbers["objective"].append(fedtail.Tilted(tilt).value(every).tolist())
    for tilt in CURVATURES:
        second = curvature(grid, tilt)
        numbers["second"].append([float(second.min()), float(second.max())])
    for _ in cell.steps(1):
        pass
    return numbers


def curvature(grid: torch.Tensor, tilt: float) -> torch.Tensor:
    """The second derivative of the tilted objective: t Var_w(f') + E_w(f''), under the tilted weights."""
    weights = fedtail.Tilted(tilt).weights((grid[:, None] - CENTRES).square() + HEIGHTS)
    slopes = 2 * (grid[:, None] - CENTRES)
    mean = (weights * slopes).sum(1, keepdim=True)
    return tilt * (weights * (slopes - mean).square()).sum(1) + SMOOTHEST


def descents(cell: Cell) -> Numbers:
    """For each tilt: how many steps gradient descent takes from a tenth below the solution.

    The step is one over the largest second derivative between start and solution: the step of [Li23, Theorems 29 and 31], with
    the smoothness in the vicinity.
    """
    plan: Plan = cell.plan
    numbers: Numbers = {"steps": [], "step_size": [], "gaps": []}
    middle = minimise(losses, torch.full((1,), 0.25, dtype=torch.float64), fedtail.Tilted(0.0), method="lbfgs", steps=100).params
    for place in cell.steps(len(DESCENTS)):
        tilt = DESCENTS[place]
        side = [t for t in DESCENTS if t * tilt > 0 and abs(t) < abs(tilt)]
        best = minimise(losses, middle, fedtail.Tilted(tilt), method="lbfgs", steps=200,
                        through=tuple(fedtail.Tilted(t) for t in sorted(side, key=abs)))
        between = best.params + torch.linspace(-APART, 0, 1001, dtype=torch.float64)
        size, gaps = _descend(plan, tilt, best.params, best.value, 1 / float(curvature(between, tilt).max()))
        numbers["steps"].append(len(gaps) - 1)
        numbers["step_size"].append(size)
        numbers["gaps"].append([max(gap, 1e-16) for gap in gaps])
    return numbers


def _descend(plan: Plan, tilt: float, solution: torch.Tensor, least: float, size: float) -> tuple[float, list[float]]:
    """(step size, gaps): the tilted loss above its least value at the start and after each step, until it has converged."""
    found = minimise(losses, solution - APART, fedtail.Tilted(tilt), steps=plan.most_steps, step_size=size,
                     on_step=lambda progress: progress.value - least <= plan.gap)
    return size, (found.values - least).tolist()


def stochastic(cell: Cell) -> Numbers:
    """Gaps of the tilted loss of point estimation by steps with one example each: one mini-batch, and two, for each tilt."""
    plan: Plan = cell.plan
    problem = points(cell.seed)
    numbers: Numbers = {}
    every = max(1, plan.stochastic_steps // LOOKS)
    for place in cell.steps(len(plan.stochastic_tilts)):
        tilt = plan.stochastic_tilts[place]
        middle = problem.x.mean(0)
        least = minimise(problem.losses, middle, fedtail.Tilted(tilt), method="lbfgs", steps=200).value
        for name in (ONE, TWO):
            gaps: list[float] = [tilted_loss(problem, problem.start(), tilt) - least]

            def look(progress: Any, gaps: list[float] = gaps, tilt: float = tilt, least: float = least) -> None:
                """Note the gap now and then."""
                if progress.step % every == 0:
                    gaps.append(max(tilted_loss(problem, progress.params, tilt) - least, 1e-12))

            minimise_stochastic(lambda params, rows: (problem.x[rows] - params).square().sum(1), len(problem.x), problem.start(),
                                tilt,
                                batch_size=1, steps=plan.stochastic_steps, step_size=plan.stochastic_step_size,
                                two_batches=name == TWO,
                                seed=cell.seed, on_step=look)
            tail = gaps[-max(1, len(gaps) // 4) :]
            numbers[f"{name}, tilt {place}"] = {"gaps": gaps, "end": statistics.fmean(math.log10(gap) for gap in tail)}
    return numbers


def cells(plan: Plan, seed: int) -> dict:
    drawn_once = {"shapes": curves, "descent": descents} if seed == 0 else {}      # nothing in them depends on the seed
    return drawn_once | {"stochastic": stochastic}


def tables(results: Results) -> list[Table]:
    found = results.numbers("descent", results.seeds[0])
    bends = results.numbers("shapes", results.seeds[0])["second"]
    speed = tuple(Row(f"{tilt:g}", {"steps": [found["steps"][k]], "step size": [found["step_size"][k]]}) for k,
                  tilt in enumerate(DESCENTS))
    bent = tuple(Row(f"{tilt:g}", {"least": [bends[k][0]], "largest": [bends[k][1]]}) for k, tilt in enumerate(CURVATURES))
    ends = tuple(Row(f"{name}, t = {tilt:g}", {"log10 of the gap": results.values("stochastic", f"{name}, tilt {k}.end")})
                 for k, tilt in enumerate(results.plan["stochastic_tilts"]) for name in (ONE, TWO))
    return [Table("Second derivative of the tilted objective, w in [-0.75, 1.5]", ("least", "largest"), bent, head="t"),
            Table(f"Steps of descent to a gap of {results.plan['gap']:g}", ("steps", "step size"), speed,
                  digits=3, head="t"),
            Table("Point estimation, one example a step: gap in the last quarter", ("log10 of the gap",), ends, head="solver")]


def figures(results: Results, folder: Path) -> list[Figure]:
    from matplotlib import colormaps

    found = results.numbers("shapes", results.seeds[0])

    def shade(tilt: float) -> Any:
        """Blue below zero, red above, black at zero."""
        return colormaps["Blues" if tilt < 0 else "Reds"](0.35 + 0.3 * math.log10(max(abs(tilt), 1.0))) if tilt else "#222222"

    with drawn(folder / "figure2.png", columns=2, width=5.0, height=4.0) as axes:
        for tilt, values in zip(SHAPES, found["objective"], strict=True):
            axes[0].plot(found["grid"], values, color=shade(tilt), linewidth=1.2, label=f"t = {tilt:g}")
        axes[0].plot(found["grid"], found["middle"], ":", color=COLOURS[5], linewidth=1.6, label="median loss")
        axes[0].set(xlabel="w", ylabel="tilted loss", ylim=(-0.05, 1.6), xlim=(-0.75, 2.9), title="objectives")
        axes[0].legend(loc="right")
        descent = results.numbers("descent", results.seeds[0])
        for tilt, gaps in zip(DESCENTS, descent["gaps"], strict=True):
            axes[1].semilogy(gaps, color=shade(tilt), linewidth=1.2, label=f"t = {tilt:g}")
        axes[1].set(xlabel="steps", ylabel="tilted loss above its least value", title="convergence",
                    ylim=(results.plan["gap"] / 3, 1), xlim=(-1, 2 + min(100, max(descent["steps"]))))
        axes[1].legend(ncols=2)
    tilts = results.plan["stochastic_tilts"]
    with drawn(folder / "figure17.png", columns=len(tilts), width=4.6, height=3.4, squeeze=False) as axes:
        for axis, (place, tilt) in zip(axes[0], enumerate(tilts), strict=True):
            for name, colour in zip((ONE, TWO), COLOURS, strict=False):
                runs = np.log10(results.lists("stochastic", f"{name}, tilt {place}.gaps"))
                steps = np.linspace(0, results.plan["stochastic_steps"], runs.shape[1])
                axis.semilogy(steps, 10 ** runs.mean(0), color=colour, label=name)
                axis.fill_between(steps, 10 ** runs.min(0), 10 ** runs.max(0), color=colour, alpha=0.15, linewidth=0)
            axis.set(title=f"point estimation, t = {tilt:g}", xlabel="steps of one example",
                     ylabel="tilted loss above its least value")
            axis.legend()
    return [Figure("figure2.png", "Figures 7.2 and 7.5: from the least loss (dark blue) over the mean (black) to the largest "
                                  "(dark red)."),
            Figure("figure17.png", "Figure 7.17: geometric mean and range over seeds.")]


def _limits(results: Results) -> Finding:
    """At t = 100 and -100 the objective is within log(3) / 100 of the largest and the least loss."""
    found = results.numbers("shapes", results.seeds[0])
    worst = max(max(abs(np.array(found["objective"][0]) - found["least"])),
                max(abs(np.array(found["objective"][-1]) - found["largest"])))
    return at_most(float(worst), math.log(3) / 100 + 1e-4, "largest distance to them at t = -100 and t = 100")


def _monotone(results: Results) -> Finding:
    found = np.array(results.numbers("shapes", results.seeds[0])["objective"])
    return at_most(float((found[:-1] - found[1:]).max()), 1e-6, "largest fall from one t to the next, at any w")


def _convex(results: Results) -> Finding:
    """Convex for t >= 0, and not for the most negative t."""
    bends = results.numbers("shapes", results.seeds[0])["second"]
    positive = min(low for tilt, (low, _) in zip(CURVATURES, bends, strict=True) if tilt >= 0)
    negative = min(low for tilt, (low, _) in zip(CURVATURES, bends, strict=True) if tilt < 0)
    return Finding(Verdict.AGREES if positive >= 0 > negative else Verdict.DISAGREES,
                   f"least second derivative {positive:.3g} for t >= 0, {negative:.3g} for t < 0")


def _smooth(results: Results) -> Finding:
    """beta(t) is at most beta_max for t <= 0, and grows in proportion to t."""
    bends = dict(zip(CURVATURES, results.numbers("shapes", results.seeds[0])["second"], strict=True))
    below = max(high for tilt, (_, high) in bends.items() if tilt <= 0)
    ratio = (bends[500.0][1] / 500) / (bends[100.0][1] / 100)
    return all_of(at_most(below, SMOOTHEST + 1e-6, "largest second derivative for t <= 0"),
                  at_most(abs(ratio - 1), 0.1, f"beta(t)/t at 500 is {ratio:.3f} of that at 100; apart from 1 by"))


def _slower(results: Results) -> Finding:
    """More steps for each larger t > 0; for t < 0 no more than for t = 1."""
    steps = dict(zip(DESCENTS, results.numbers("descent", results.seeds[0])["steps"], strict=True))
    above = [steps[t] for t in DESCENTS if t >= 1]
    grows = all(a <= b for a, b in pairwise(above)) and above[-1] > above[0]
    said = ", ".join(f"{count} at {tilt:g}" for tilt, count in steps.items())
    return Finding(Verdict.AGREES if grows else Verdict.DISAGREES, f"steps: {said}")


def _fast_below(results: Results) -> Finding:
    steps = dict(zip(DESCENTS, results.numbers("descent", results.seeds[0])["steps"], strict=True))
    return at_most(max(steps[t] for t in DESCENTS if t < 0), min(steps[t] for t in DESCENTS if t >= 20),
                   "most steps for t < 0, against the fewest for t >= 20")


def _alike(results: Results) -> Finding:
    return all_of(*(within(difference(*(results.values("stochastic", f"{name}, tilt {k}.end") for name in (ONE, TWO))), 0.5, True,
                           f"t = {tilt:g}, log10 of the gap at the end, one less two:")
                    for k, tilt in enumerate(results.plan["stochastic_tilts"])))


def notes(results: Results) -> list[str]:
    plan = results.plan
    return ["Shapes and descents draw nothing. Descents begin 0.1 below the solution, as in the released notebook, which tunes "
            "step sizes by hand; here a step is one over the largest second derivative between start and solution.",
            f"Figure 7.17: batches of one example, {plan['stochastic_steps']} steps of {plan['stochastic_step_size']:g} from "
            "zero, smoothing 0.2; the thesis prints neither t nor the step size. Two mini-batches read two examples a step."]


FIGURES_SHAPES = Study(
    name="figures_shapes", paper="Li23", item="figures 7.2, 7.5, 7.17",
    title="Shapes of the tilted objective, and convergence with t",
    cost=Cost(0, 2), full=Plan(), quick=Plan(seeds=2, stochastic_steps=800), cells=cells, tables=tables, figures=figures,
    notes=notes,
    claims=(
        Claim("As t moves from -infinity to infinity, the tilted loss goes from the least to the largest loss.",
              "[Li23, Lemma 25]", _limits),
        Claim("The tilted loss never falls as t grows.", "[Li23, Theorem 23]", _monotone),
        Claim("It is convex for t > 0, and may not be for t < 0.", "[Li23, figure 7.2]", _convex),
        Claim("Its smoothness is that of the losses for t < 0, and grows in proportion to t for large t.", "[Li23, Lemma 24]",
              _smooth),
        Claim("For larger t > 0 descent converges more slowly.", "[Li23, figure 7.5]", _slower),
        Claim("For negative t descent converges fast.", "[Li23, figure 7.5]", _fast_below),
        Claim("One mini-batch a step does as well as two.", "[Li23, figure 7.17]", _alike),
    ))
