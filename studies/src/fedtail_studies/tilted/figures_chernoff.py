"""A Chernoff bound for variables that are never negative, with tilts of either sign [Li23, Theorem 27 and figure 7.15]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import norm

from fedtail.theory import chernoff_bound, classic_chernoff_bound
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table

UNIFORM, FOLDED = "uniform on [0, 2]", "absolute value of N(0, π/2)"
SMALL = 1.0                                      # deviations up to the mean, which is 1 for both, are small


def uniform_log_moment(tilt: float) -> float:
    """log E exp(t X) for X uniform on [0, 2]."""
    return max(2 * tilt, 0.0) + math.log(-math.expm1(-2 * abs(tilt)) / (2 * abs(tilt))) if tilt else 0.0


def folded_log_moment(tilt: float) -> float:
    """log E exp(t X) for X = |Z|, Z normal with variance pi/2: log 2 + t^2 s^2 / 2 + log Phi(t s)."""
    scaled = tilt * math.sqrt(math.pi / 2)
    return math.log(2) + scaled**2 / 2 + float(norm.logcdf(scaled))


CASES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    UNIFORM: (uniform_log_moment, lambda threshold: max(0.0, 1 - threshold / 2)),
    FOLDED: (folded_log_moment, lambda threshold: 2 * float(norm.sf(threshold / math.sqrt(math.pi / 2))))}


@dataclass(frozen=True)
class Plan:
    seeds: int = 1                               # nothing is drawn
    thresholds: int = 40
    largest: float = 4.0                         # of the folded normal; the uniform ends at 2


def bounds(cell: Cell, case: str) -> Numbers:
    """The probability of X >= gamma, its bound with tilts of either sign, and Chernoff's, for a grid of gamma."""
    plan: Plan = cell.plan
    moment, tail = CASES[case]
    thresholds = np.linspace(0, 2.0 if case == UNIFORM else plan.largest, plan.thresholds + 2)[1:-1].tolist()
    numbers: Numbers = {"thresholds": thresholds, "exact": [], "improved": [], "classic": []}
    for place in cell.steps(len(thresholds)):
        numbers["exact"].append(tail(thresholds[place]))
        numbers["improved"].append(chernoff_bound(moment, thresholds[place]))
        numbers["classic"].append(classic_chernoff_bound(moment, thresholds[place]))
    return numbers


def cells(plan: Plan, seed: int) -> dict:
    return {case: partial(bounds, case=case) for case in CASES}


def _at(results: Results, case: str, what: str) -> np.ndarray:
    return np.array(results.lists(case, what)[0])


def tables(results: Results) -> list[Table]:
    made = []
    for case in CASES:
        thresholds = _at(results, case, "thresholds")
        shown = [int(np.abs(thresholds - wanted).argmin()) for wanted in (0.3, 0.6, 1.0, 1.5, 1.9)]
        columns = {"P[X >= gamma]": "exact", "improved": "improved", "Chernoff": "classic"}
        rows = tuple(Row(f"{thresholds[k]:.3f}", {title: [float(_at(results, case, what)[k])] for title, what in columns.items()})
                     for k in shown)
        made.append(Table(f"X is {case}", tuple(columns), rows, digits=4, head="gamma"))
    return made


def figures(results: Results, folder: Path) -> list[Figure]:
    with drawn(folder / "chernoff.png", columns=2, width=4.4, sharey=True) as axes:
        for axis, case in zip(axes, CASES, strict=True):
            thresholds = _at(results, case, "thresholds")
            for what, label, colour, style in (("exact", "P[X ≥ gamma]", COLOURS[4], "-"),
                                               ("improved", "improved, any t", COLOURS[0], "-"),
                                               ("classic", "Chernoff, t > 0", COLOURS[1], "--")):
                axis.plot(thresholds, _at(results, case, what), style, color=colour, label=label)
            axis.set(title=f"X is {case}", xlabel="gamma", ylim=(0, 1.05))
        axes[0].set_ylabel("probability, and bounds on it")
        axes[0].legend()
    return [Figure("chernoff.png", "The probability that X is at least gamma, Chernoff's bound, and the improved one.")]


def _holds(results: Results) -> Finding:
    worst = max(float((_at(results, case, "exact") - _at(results, case, "improved")).max()) for case in CASES)
    return at_most(worst, 1e-9, "largest excess of the probability over the bound")


def _never_above(results: Results) -> Finding:
    worst = max(float((_at(results, case, "improved") - _at(results, case, "classic")).max()) for case in CASES)
    return at_most(worst, 1e-9, "largest excess of the improved bound over Chernoff's")


def _tighter(results: Results) -> Finding:
    """Whether the gap to the probability is smaller by at least a tenth, on average, where deviations are small."""
    findings = []
    for case in CASES:
        small = _at(results, case, "thresholds") <= SMALL
        ours, theirs = ((_at(results, case, what) - _at(results, case, "exact"))[small].mean()
                        for what in ("improved", "classic"))
        findings.append(at_most(float(ours / theirs), 0.9, f"{case}: gap {ours:.3f}, Chernoff's {theirs:.3f}, up to gamma "
                                                           f"{SMALL:g}; ratio"))
    return all_of(*findings)


def _especially_small(results: Results) -> Finding:
    """Whether the relative gain is larger where deviations are small than in the largest quarter of them."""
    findings = []
    for case in CASES:
        thresholds = _at(results, case, "thresholds")
        gain = 1 - _at(results, case, "improved") / _at(results, case, "classic")
        small, large = gain[thresholds <= SMALL].mean(), gain[-len(gain) // 4 :].mean()
        findings.append(Finding(Verdict.AGREES if small > large else Verdict.DISAGREES,
                                f"{case}: the bound is lower by {small:.1%} on average up to gamma {SMALL:g}, by {large:.1%} in "
                                f"the largest quarter, and by {gain.max():.1%} at most, at gamma "
                                f"{thresholds[gain.argmax()]:.2f}"))
    return all_of(*findings)


FIGURES_CHERNOFF = Study(
    name="figures_chernoff", paper="Li23", item="figure 7.15, Theorem 27", title="A Chernoff bound with tilts of either sign",
    cost=Cost(0, 0.1), full=Plan(), quick=Plan(thresholds=10), cells=cells, tables=tables, figures=figures,
    notes=lambda results: ["N(0, π/2) is read with variance π/2, so that both variables have mean 1. Moments are closed forms; "
                           "tilts are searched for by `fedtail.theory.chernoff_bound`."],
    claims=(
        Claim("The bound with tilts of either sign holds.", "[Li23, eq. (7.60)]", _holds),
        Claim("It is never above Chernoff's bound.", "[Li23, eq. (7.60)]", _never_above),
        Claim("It is significantly tighter where deviations are small.", "[Li23, figure 7.15]", _tighter),
        Claim("It gains more where deviations are small than where they are large.", "[Li23, figure 7.15]", _especially_small),
    ))
