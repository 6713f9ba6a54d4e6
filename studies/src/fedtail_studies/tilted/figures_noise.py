"""Lines and classes under random and structured noise: where a negative tilt helps, and where it cannot.

[Li23, figures 7.6 to 7.8 and 7.19]. A share of the samples of a line is noise: (i) with another mean than the clean ones, (ii)
with the same mean, (iii) on a line of its own, which is fitted in place of the clean one. Figure 7.19 has two classes, with
samples that have random labels.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtail
from fedtail.solvers import minimise
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, difference, lower, within
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table
from fedtail_studies.tilted.figures_problems import Problem, line_problem

CLEAN_LINE = np.array([1.0, 1.0])                # intercept and slope
OTHER, SAME, STRUCTURED = "another mean", "the same mean", "structured"
KINDS = {OTHER: "figure 7.6", SAME: "figure 7.7", STRUCTURED: "figure 7.8"}
ZERO, CONTINUED, ERM, ABOVE = "t = -2, from zero", "t = -2, continued from ERM", "ERM", "t = 2"
METHODS = (ZERO, CONTINUED, ERM, ABOVE)
LABELS, GCE = "random labels", "GCE"
CLASSIFIERS = (ERM, "t = -2", GCE)
FIT = 0.3                                        # a line this near to the clean one (root mean square over x) fits it


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    samples: int = 200
    shares: tuple[float, ...] = (0.0, 0.2, 0.4, 0.8)
    steps: int = 1500
    step_size: float = 0.02
    through: tuple[float, ...] = (-0.05, -0.1, -0.2, -0.5, -1.0)
    gce_power: float = 0.7                       # q of the generalised cross-entropy


def noisy_line(kind: str, share: float, samples: int, seed: int) -> Problem:
    """Samples near y = 1 + x, the first of them noise."""
    random = np.random.default_rng([seed, list(KINDS).index(kind)])
    x = random.uniform(-2, 2, samples)
    y = CLEAN_LINE[0] + CLEAN_LINE[1] * x + random.normal(0, 0.2, samples)
    noisy = round(share * samples)
    if kind == STRUCTURED:
        x[:noisy] = random.uniform(-4, 4, noisy)
        y[:noisy] = -0.5 * x[:noisy] + random.normal(0, 0.02, noisy)
    else:
        y[:noisy] = random.normal(5.0 if kind == OTHER else 1.0, 2, noisy)
    return line_problem(x, y, np.arange(samples) < noisy)


def from_clean(params: torch.Tensor) -> float:
    """The root mean squared distance of a line to the clean one, over x in [-2, 2]."""
    apart = params.numpy() - CLEAN_LINE
    return float(np.sqrt(apart[0] ** 2 + apart[1] ** 2 * 4 / 3))


def lines(cell: Cell, kind: str) -> Numbers:
    """For each share and method: the line, and its distance to the clean one."""
    plan: Plan = cell.plan
    numbers: Numbers = {}
    for place in cell.steps(len(plan.shares)):
        problem = noisy_line(kind, plan.shares[place], plan.samples, cell.seed)
        for name, params in fitted_lines(problem, plan).items():
            numbers[f"{name}, share {place}"] = {"params": params.tolist(), "error": from_clean(params)}
    return numbers


def fitted_lines(problem: Problem, plan: Plan) -> dict[str, torch.Tensor]:
    """The lines of all methods: descent from zero and continuation at t = -2, least squares, and t = 2."""
    tilts = {tilt: fedtail.Tilted(tilt) for tilt in (-2.0, 0.0, 2.0, *plan.through)}
    erm = minimise(problem.losses, problem.start(), tilts[0.0], method="lbfgs", steps=100).params
    return {ZERO: minimise(problem.losses, problem.start(), tilts[-2.0], steps=plan.steps, step_size=plan.step_size).params,
            CONTINUED: minimise(problem.losses, erm, tilts[-2.0], method="lbfgs", steps=200,
                                through=tuple(tilts[tilt] for tilt in plan.through)).params,
            ERM: erm, ABOVE: minimise(problem.losses, erm, tilts[2.0], method="lbfgs", steps=300).params}


def noisy_classes(share: float, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(inputs, signs, noisy): two classes around (1, 1) and (-1, -1); a share of the samples is anywhere, with random labels."""
    random = np.random.default_rng([seed, 7])
    sign = random.choice([-1.0, 1.0], samples)
    x = sign[:, None] + random.normal(0, 0.6, (samples, 2))
    noisy = round(share * samples)
    x[:noisy] = random.uniform(-3, 3, (noisy, 2))
    sign[:noisy] = random.choice([-1.0, 1.0], noisy)
    return torch.from_numpy(x), torch.from_numpy(sign), torch.arange(samples) < noisy


def classifiers(cell: Cell) -> Numbers:
    """For each share: boundaries of ERM, TERM and GCE, and the share of clean test samples that are classified right."""
    plan: Plan = cell.plan
    test_x, test_sign, _ = noisy_classes(0.0, 2000, cell.seed + 1000)
    numbers: Numbers = {}
    for place in cell.steps(len(plan.shares)):
        x, sign, _ = noisy_classes(plan.shares[place], 2 * plan.samples, cell.seed)
        for name, params in fitted_classifiers(x, sign, plan).items():
            right = (params[0] + test_x @ params[1:]).sign() == test_sign
            numbers[f"{name}, share {place}"] = {"params": params.tolist(), "accuracy": float(right.double().mean())}
    return numbers


def fitted_classifiers(x: torch.Tensor, sign: torch.Tensor, plan: Plan) -> dict[str, torch.Tensor]:
    """Logistic regression with a ridge of 0.001, by ERM, a tilt of -2 through smaller ones, and GCE from ERM."""
    def margins(params: torch.Tensor) -> torch.Tensor:
        """y (b + w.x)."""
        return sign * (params[0] + x @ params[1:])

    def logistic(params: torch.Tensor) -> torch.Tensor:
        """Logistic losses with a small ridge."""
        return torch.nn.functional.softplus(-margins(params)) + 1e-3 * params.square().sum()

    def generalised(params: torch.Tensor) -> torch.Tensor:
        """(1 - p^q) / q, with p the probability of the label, with the same ridge."""
        return (1 - margins(params).sigmoid() ** plan.gce_power) / plan.gce_power + 1e-3 * params.square().sum()

    erm = minimise(logistic, torch.zeros(3, dtype=torch.float64), fedtail.Tilted(0.0), method="lbfgs", steps=200).params
    through = tuple(fedtail.Tilted(tilt) for tilt in plan.through)
    return {ERM: erm, "t = -2": minimise(logistic, erm, fedtail.Tilted(-2.0), method="lbfgs", steps=200, through=through).params,
            GCE: minimise(generalised, erm, fedtail.Tilted(0.0), method="lbfgs", steps=200).params}


def cells(plan: Plan, seed: int) -> dict:
    return {**{kind: partial(lines, kind=kind) for kind in KINDS}, LABELS: classifiers}


def _error(results: Results, kind: str, name: str, share: float) -> list[float]:
    return results.values(kind, f"{name}, share {results.plan['shares'].index(share)}.error")


def _accuracy(results: Results, name: str, share: float) -> list[float]:
    return results.values(LABELS, f"{name}, share {results.plan['shares'].index(share)}.accuracy")


def tables(results: Results) -> list[Table]:
    shares = {f"{share:.0%} noise": share for share in results.plan["shares"]}
    made = [Table(f"Noise of {kind} ({figure}): distance to the clean line" if kind != STRUCTURED else
                  f"Structured noise ({figure}): distance to the clean line", tuple(shares),
                  tuple(Row(name, {title: _error(results, kind, name, share) for title, share in shares.items()})
                        for name in METHODS))
            for kind, figure in KINDS.items()]
    rows = tuple(Row(name, {title: _accuracy(results, name, share) for title, share in shares.items()}) for name in CLASSIFIERS)
    return [*made, Table("Random labels (figure 7.19): accuracy on clean test samples", tuple(shares), rows, digits=3)]


def figures(results: Results, folder: Path) -> list[Figure]:
    plan, seed = results.plan, results.seeds[0]
    styles = {ZERO: (COLOURS[0], "-"), CONTINUED: (COLOURS[0], ":"), ERM: (COLOURS[2], "-"), ABOVE: (COLOURS[6], "-")}
    with drawn(folder / "lines.png", columns=len(plan["shares"]), rows=3, width=3.0, height=2.6, squeeze=False) as axes:
        for row, kind in zip(axes, KINDS, strict=True):
            for place, (axis, share) in enumerate(zip(row, plan["shares"], strict=True)):
                problem = noisy_line(kind, share, plan["samples"], seed)
                axis.scatter(problem.x, problem.y, s=6, c=[COLOURS[5] if far else COLOURS[3] for far in problem.outlier.tolist()])
                ends, heights = np.array(axis.get_xlim()), axis.get_ylim()
                for name, (colour, style) in styles.items():
                    params = results.numbers(kind, seed)[f"{name}, share {place}"]["params"]
                    axis.plot(ends, params[0] + params[1] * ends, style, color=colour, linewidth=1.4, label=name)
                axis.set(title=f"{kind}, {share:.0%}", xlim=ends, ylim=heights)
        axes[0][0].legend(fontsize=7)
    with drawn(folder / "classes.png", columns=len(plan["shares"]), width=3.0, height=2.9, squeeze=False) as axes:
        for place, (axis, share) in enumerate(zip(axes[0], plan["shares"], strict=True)):
            _draw_classes(axis, results, place, share)
        axes[0][0].legend(fontsize=7, loc="lower right")
    return [Figure("lines.png", "Figures 7.6 to 7.8: clean samples green, noise brown."),
            Figure("classes.png", "Figure 7.19: the two classes, crosses are samples with random labels.")]


def _draw_classes(axis: Any, results: Results, place: int, share: float) -> None:
    """Samples and the boundaries of the three classifiers."""
    seed = results.seeds[0]
    x, sign, noisy = noisy_classes(share, 2 * results.plan["samples"], seed)
    for label, colour in ((1.0, COLOURS[3]), (-1.0, COLOURS[1])):
        for which, marker in ((noisy, "x"), (~noisy, ".")):
            here = (sign == label) & which
            axis.scatter(x[here, 0], x[here, 1], s=12, marker=marker, color=colour, alpha=0.6, linewidths=0.8)
    ends, heights = np.array(axis.get_xlim()), axis.get_ylim()
    for name, colour, style in zip(CLASSIFIERS, (COLOURS[2], COLOURS[0], "#222222"), ("-", "-", "--"), strict=True):
        params = results.numbers(LABELS, seed)[f"{name}, share {place}"]["params"]
        axis.plot(ends, -(params[0] + params[1] * ends) / params[2], style, color=colour, linewidth=1.4, label=name)
    axis.set(title=f"{LABELS}, {share:.0%}", xlim=ends, ylim=heights)


def _fits(results: Results, kind: str, name: str = ZERO) -> Finding:
    """Whether the line is near the clean one at every share of noise, on average."""
    return all_of(*(at_most(statistics.fmean(_error(results, kind, name, share)), FIT,
                            f"{share:.0%} noise, distance to the clean line")
                    for share in results.plan["shares"]))


def _below_erm(results: Results, kind: str) -> Finding:
    return all_of(*(lower(difference(_error(results, kind, ZERO, share), _error(results, kind, ERM, share)), True,
                          what=f"{share:.0%} noise, t = -2 less ERM:") for share in results.plan["shares"] if share))


def _above_overfits(results: Results) -> Finding:
    return all_of(*(lower(difference(_error(results, kind, ZERO, share), _error(results, kind, ABOVE, share)), True,
                          what=f"{kind}, {share:.0%} noise, t = -2 less t = 2:") for kind in (OTHER, SAME)
                          for share in (0.2, 0.4)))


def _fails(results: Results) -> Finding:
    """On structured noise of 40 and 80% no start comes near the clean line, in the mean over seeds, and the noise is fitted."""
    findings = []
    for share in results.plan["shares"]:
        if share >= 0.4:
            errors = {name: statistics.fmean(_error(results, STRUCTURED, name, share)) for name in (ZERO, CONTINUED, ERM)}
            failed = min(errors[ZERO], errors[CONTINUED]) > 3 * FIT
            findings.append(Finding(Verdict.AGREES if failed else Verdict.DISAGREES,
                                    f"{share:.0%} noise, distance to the clean line: "
                                    + ", ".join(f"{name} {value:.2f}" for name, value in errors.items())))
    return all_of(*findings)


def _right_classifier(results: Results) -> Finding:
    clean = statistics.fmean(_accuracy(results, ERM, 0.0))
    return all_of(*(at_most(clean - statistics.fmean(_accuracy(results, "t = -2", share)), 0.02,
                            f"{share:.0%} noise, accuracy below that of ERM without noise by")
                            for share in results.plan["shares"] if share))


def _as_good_as_gce(results: Results) -> Finding:
    return all_of(*(within(difference(_accuracy(results, GCE, share), _accuracy(results, "t = -2", share)), 0.02, True,
                           f"{share:.0%} noise, accuracy, GCE less t = -2:") for share in results.plan["shares"] if share))


def notes(results: Results) -> list[str]:
    plan = results.plan
    return [f"The thesis prints no sizes. Here {plan['samples']} samples, clean ones at y = 1 + x with deviation 0.2, x in [-2, "
            "2]; noise (i) is y from N(5, 2^2), (ii) y from N(1, 2^2), the mean of the clean ones, (iii) points at y = -x/2 with "
            "deviation 0.02, x in [-4, 4].",
            f"From zero is gradient descent, {plan['steps']} steps of {plan['step_size']:g}; continued is L-BFGS from least "
            f"squares through t = {', '.join(f'{tilt:g}' for tilt in plan['through'])}. Claims are about the former, as in table "
            "7.2; with 80% noise of another mean the latter stays with the noise.",
            "The structured noise was chosen so that it fools the tilt, which is what the figure is about: near zero, far out in "
            "x, and tighter around its line than the clean samples are around theirs.",
            f"Random labels: {2 * plan['samples']} samples, clean ones around (1, 1) and (-1, -1), noise anywhere in [-3, 3]^2; "
            f"GCE has q = {plan['gce_power']:g}; logistic losses with a ridge of 0.001, from ERM."]


FIGURES_NOISE = Study(
    name="figures_noise", paper="Li23", item="figures 7.6, 7.7, 7.8, 7.19", title="Random and structured noise", cost=Cost(0, 2),
    full=Plan(), quick=Plan(seeds=2, samples=100, steps=600), cells=cells, tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("Noise of another mean: TERM (t = -2) fits the clean data at all noise levels.", "[Li23, figure 7.6]",
              partial(_fits, kind=OTHER)),
        Claim("Noise of another mean: its error is below that of ERM.", "[Li23, figure 7.6]", partial(_below_erm, kind=OTHER)),
        Claim("Noise of the same mean: TERM's error is much lower than ERM's at all noise levels.", "[Li23, figure 7.7]",
              partial(_below_erm, kind=SAME)),
        Claim("ERM and positive tilts overfit to corrupted data: t = 2 is farther from the clean line than t = -2.",
              "[Li23, figures 7.6 and 7.7]", _above_overfits),
        Claim("Structured noise of 40 and 80%: TERM cannot fit the clean data.", "[Li23, figure 7.8]", _fails),
        Claim("Random labels: TERM converges to the correct classifier under 20, 40 and 80% noise.", "[Li23, figure 7.19]",
              _right_classifier),
        Claim("Random labels: GCE is as good as TERM on this problem.", "[Li23, figure 7.19]", _as_good_as_gce),
        Claim("Noise of another mean: TERM fits the clean data at all noise levels when it is continued from ERM.",
              "[Li23, section 7.5]",
              partial(_fits, kind=OTHER, name=CONTINUED)),
    ))
