"""Robust regression on drug discovery data with random targets [Li23, table 7.2].

A share of the training targets is drawn from N(5, 5^2); errors are on clean test examples. TERM has the tilt -2. Where it starts
decides: from zero, as in the released code, and from least squares by smaller tilts, as section 7.5 describes, are both run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, lower, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Printed, Row, Table
from fedtail_studies.tilted.regression_data import QSAR, Sides, noisy_targets
from fedtail_studies.tilted.regression_methods import (
    Descent,
    consistent_robust,
    genie_with_ridge,
    huber,
    least_absolute,
    least_squares,
    tilted,
    truncated_reweighted,
)

SOURCE = "[Li23, table 7.2]"
SPLITS = 5                                       # of the thesis, which prints standard errors over them
TRAINED = 3268                                   # examples that the printed parameters of CRR are for
TERM, CONTINUED, GENIE, RIDGED = "TERM", "TERM, continued from ERM", "Genie ERM", "Genie ERM, ridge"
BASELINES = ("ERM", "L1", "Huber", "STIR", "CRR")
PRINTED = {                                      # mean and standard error at 20, 40 and 80% noise
    "ERM": ((1.87, 0.05), (2.83, 0.06), (4.74, 0.06)), "L1": ((1.15, 0.07), (1.70, 0.12), (4.78, 0.08)),
    "Huber": ((1.16, 0.07), (1.78, 0.11), (4.74, 0.07)), "STIR": ((1.16, 0.07), (1.75, 0.12), (4.74, 0.06)),
    "CRR": ((1.10, 0.07), (1.51, 0.08), (4.07, 0.06)), TERM: ((1.08, 0.05), (1.10, 0.04), (1.68, 0.03)),
    GENIE: ((1.02, 0.04), (1.07, 0.04), (1.04, 0.03))}
AIMS = (1.25, 1.30, 1.75)                        # TERM's errors at 20, 40 and 80% noise are to be at most this
NEAR = 0.15                                      # how near ERM's are to be to the printed ones
COMPETITIVE = 0.1                                # "competitive": above the best by no more


@dataclass(frozen=True)
class Plan:
    seeds: int = SPLITS
    shares: tuple[float, ...] = (0.2, 0.4, 0.8)
    corrupted: tuple[int, ...] = (500, 1000, 3000)      # k of CRR, of 3268 training examples
    threshold: float = 1.0                       # delta of Huber's loss
    tilt: float = -2.0
    steps: int = 10_000
    step_size: float = 0.05                      # 0.1 in the released code, whose gradient leaves out the factor 2
    through: tuple[float, ...] = (-0.1, -0.25, -0.5, -1.0)
    continued_steps: int = 200                   # of L-BFGS, for each of these tilts


def fitted(cell: Cell, fit: Callable[[Sides, Plan, float], tuple[np.ndarray, float | None]]) -> Numbers:
    """Test errors by share of noise, and for TERM the tilted loss that was reached."""
    plan: Plan = cell.plan
    numbers: Numbers = {}
    for place in cell.steps(len(plan.shares)):
        sides = noisy_targets(cell.data, plan.shares[place], cell.seed)
        params, objective = fit(sides, plan, plan.shares[place])
        numbers[key(plan.shares[place])] = {"rmse": sides.rmse(params)} | ({} if objective is None else {"objective": objective})
    return numbers


def key(share: float) -> str:
    return f"noise {share:.0%}"


def _crr(sides: Sides, plan: Plan, share: float) -> tuple[np.ndarray, None]:
    corrupted = plan.corrupted[plan.shares.index(share)]
    return consistent_robust(sides.x, sides.y, round(corrupted * len(sides.y) / TRAINED)), None


def _term(sides: Sides, plan: Plan, share: float) -> tuple[np.ndarray, float]:
    return tilted(sides.x, sides.y, plan.tilt, Descent(plan.steps, plan.step_size))


def _continued(sides: Sides, plan: Plan, share: float) -> tuple[np.ndarray, float]:
    return tilted(sides.x, sides.y, plan.tilt, Descent(plan.continued_steps), least_squares(sides.x, sides.y), plan.through)


METHODS: dict[str, Callable[[Sides, Plan, float], tuple[np.ndarray, float | None]]] = {
    "ERM": lambda sides, plan, share: (least_squares(sides.x, sides.y), None),
    "L1": lambda sides, plan, share: (least_absolute(sides.x, sides.y), None),
    "Huber": lambda sides, plan, share: (huber(sides.x, sides.y, plan.threshold), None),
    "STIR": lambda sides, plan, share: (truncated_reweighted(sides.x, sides.y), None),
    "CRR": _crr,
    TERM: _term,
    CONTINUED: _continued,
    GENIE: lambda sides, plan, share: (least_squares(*sides.clean()), None),
    RIDGED: lambda sides, plan, share: (genie_with_ridge(sides), None),
}


def cells(plan: Plan, seed: int) -> dict:
    return {name: partial(fitted, fit=fit) for name, fit in METHODS.items()}


def printed(name: str, place: int) -> Printed:
    """As printed, with the standard deviation over the five splits that the printed standard error stands for."""
    mean, error = PRINTED[name][place]
    return Printed(mean, error * math.sqrt(SPLITS))


def _shares(results: Results) -> list[float]:
    return list(results.plan["shares"])


def _rmse(results: Results, name: str, share: float) -> list[float]:
    return results.values(name, f"{key(share)}.rmse")


def tables(results: Results) -> list[Table]:
    shares = _shares(results)
    columns = tuple(f"{share:.0%} noise" for share in shares)
    rows = [Row(name, {column: _rmse(results, name, share) for column, share in zip(columns, shares, strict=True)},
                {column: printed(name, place) for place, column in enumerate(columns)} if name in PRINTED else {})
            for name in METHODS]
    reached = [Row(name, {column: results.values(name, f"{key(share)}.objective")
                          for column, share in zip(columns, shares, strict=True)}) for name in (TERM, CONTINUED)]
    return [Table("Test RMSE", columns, tuple(rows), SOURCE),
            Table("Tilted loss of the training examples that was reached, t = -2", columns, tuple(reached), digits=3)]


def figures(results: Results, folder: Path) -> list[Figure]:
    shares = _shares(results)
    with drawn(folder / "errors.png", width=7.0) as axis:
        for place, name in enumerate(METHODS):
            values = [_rmse(results, name, share) for share in shares]
            spots = np.arange(len(shares)) + 0.08 * (place - len(METHODS) / 2)
            axis.errorbar(spots, [statistics.fmean(found) for found in values],
                          [statistics.stdev(found) if len(found) > 1 else 0 for found in values], fmt="o", markersize=4,
                          color=(*COLOURS, "#000000")[place], label=name)
            if name in PRINTED:
                axis.plot(spots, [PRINTED[name][k][0] for k in range(len(shares))], "_", color="#222222", markersize=9)
        axis.set(xticks=range(len(shares)), xticklabels=[f"{share:.0%} noise" for share in shares], ylabel="test RMSE",
                 ylim=(0, None))
        axis.legend(ncols=2)
    return [Figure("errors.png", "Test RMSE, mean and standard deviation over splits; a dash is the printed mean.")]


def _keeps_to(results: Results, name: str) -> Finding:
    return all_of(*(at_most(statistics.fmean(_rmse(results, name, share)), aim, f"{share:.0%} noise, test RMSE")
                    for share, aim in zip(_shares(results), AIMS, strict=True)))


def _near_print(results: Results, name: str) -> Finding:
    findings = []
    for place, share in enumerate(_shares(results)):
        mean = statistics.fmean(_rmse(results, name, share))
        findings.append(at_most(abs(mean - PRINTED[name][place][0]), NEAR, f"{share:.0%} noise: {mean:.2f}, printed "
                                f"{PRINTED[name][place][0]:.2f}; difference"))
    return all_of(*findings)


def _below(results: Results, baseline: str) -> Finding:
    """TERM less a baseline at 40 and 80% noise."""
    findings = []
    for place, share in enumerate(_shares(results)):
        if share >= 0.4:
            found = results.difference(TERM, baseline, f"{key(share)}.rmse")
            findings.append(lower(found, results.papers_data, printed(TERM, place).less(printed(baseline, place)),
                                  f"{share:.0%} noise:"))
    return all_of(*findings)


def _competitive(results: Results) -> Finding:
    share = _shares(results)[0]
    best = min(BASELINES, key=lambda name: statistics.fmean(_rmse(results, name, share)))
    return not_above(results.difference(TERM, best, f"{key(share)}.rmse"), COMPETITIVE, results.papers_data,
                     f"{share:.0%} noise, TERM less {best}, the best baseline:")


def _limit(results: Results, genie: str) -> Finding:
    return all_of(*(not_above(results.difference(genie, TERM, f"{key(share)}.rmse"), 0.05, results.papers_data,
                              f"{share:.0%} noise, {genie} less TERM:") for share in _shares(results)))


def _continuation_works(results: Results) -> Finding:
    finding = _keeps_to(results, CONTINUED)
    share = _shares(results)[-1]
    zero, continued = (statistics.fmean(results.values(name, f"{key(share)}.objective")) for name in (TERM, CONTINUED))
    return finding._replace(reason=f"{finding.reason}; its tilted loss there is {continued:.3f}, from zero {zero:.3f}")


def _zero_is_better(results: Results) -> Finding:
    share = _shares(results)[-1]
    return lower(results.difference(TERM, CONTINUED, f"{key(share)}.rmse"), results.papers_data,
                 what=f"{share:.0%} noise, from zero less continued:")


def _not_stated(results: Results) -> Finding:
    return Finding(Verdict.NOT_TESTABLE, "the tilts that were tried are not stated")


def notes(results: Results) -> list[str]:
    plan = results.plan
    return [
        "Splits and noise are those of the released code, by its generator and seeds: ERM comes out as printed, to two digits.",
        "Errors in print are standard errors over five splits; here they are multiplied by the root of five, to stand beside "
        "ours.",
        f"TERM is gradient descent from zero at t = {plan['tilt']:g}, {plan['steps']} steps of {plan['step_size']:g} with the "
        "exact gradient of squared losses that are not halved: what the released script does. \"Continued\" begins at least "
        f"squares and goes through the tilts {', '.join(f'{tilt:g}' for tilt in plan['through'])} with L-BFGS. N(5, 5) has "
        "standard deviation 5.",
        "The thesis defines neither CRR nor STIR; both are ours, after the definitions of the papers it cites. CRR has the "
        "printed k; why it is better in print at 40 and 80% noise is not known. STIR has the first truncation and growth of the "
        "released code. L1 is solved exactly as a linear program, Huber by L-BFGS.",
        "With 80% noise 654 clean examples are left for 411 features: plain least squares on them is far from the printed 1.04. "
        "With a ridge from the thesis's list, chosen on validation examples, it is near.",
    ]


REGRESSION_QSAR = Study(
    name="regression_qsar", paper="Li23", item="table 7.2", title="Robust regression under random targets", cost=Cost(0, 6),
    full=Plan(), quick=Plan(seeds=2, steps=1500, continued_steps=60), cells=cells, tables=tables, figures=figures, notes=notes,
    data=QSAR,
    claims=(
        Claim("TERM (t = -2) is robust at every noise level: test RMSE at most 1.25, 1.30 and 1.75 (printed 1.08, 1.10, 1.68).",
              SOURCE, partial(_keeps_to, name=TERM)),
        Claim("ERM has test RMSE 1.87, 2.83 and 4.74, to 0.15.", SOURCE, partial(_near_print, name="ERM")),
        *(Claim(f"At 40 and 80% noise TERM has a lower error than {name}.", SOURCE, partial(_below, baseline=name))
          for name in BASELINES),
        Claim("At 20% noise TERM is competitive with the baselines.", "[Li23, section 7.7.1.1]", _competitive),
        Claim("Genie ERM sets the limit of performance: nothing is better.", "[Li23, section 7.7.1.1]",
              partial(_limit, genie=GENIE)),
        Claim("Genie ERM, with a ridge chosen on validation examples, sets it.", "[ours, the reading that agrees with the print]",
              partial(_limit, genie=RIDGED)),
        Claim("For negative t, solving for smoothly decreasing t from 0 gives effective solutions: errors as low as the first "
              "claim's.",
              "[Li23, section 7.5]", _continuation_works),
        Claim("At 80% noise descent from zero finds a better model than continuation from ERM.", "[ours]", _zero_is_better),
        Claim("RMSE changes by only 0.08 on average across t.", "[Li23, section 7.12.2.2]", _not_stated),
    ))
