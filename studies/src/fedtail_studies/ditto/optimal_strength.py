"""Ditto's best lambda in closed form: figures 5.1 and 5.2 of [Li23], Theorems 10 to 13, and the steps of Theorem 14."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedtail.theory import ditto_error, ditto_strength
from fedtail_studies.ditto.gaussian_devices import (
    POINTS,
    PROBLEMS,
    bayes_estimates,
    estimated_models,
    gaps_by_round,
    squared_errors,
    true_models,
)
from fedtail_studies.ditto.strength_figures import STEPS, figures
from fedtail_studies.judging import all_of, at_most, difference, interval, lower, within
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Measure, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table

FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)      # of lambda*, at which errors are drawn
RELATED = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)            # 1 / tau of figure 5.2
BAYES = "Bayes estimator"
SAME = 0.01                                              # relative: Monte Carlo beside closed form
RATE = -0.85                                             # slope of log gap over log round that is taken for 1 / t


@dataclass(frozen=True)
class TheoryPlan:
    """How many draws of all devices there are, and how long Algorithm 7 is followed."""

    seeds: int = 5
    draws: int = 400_000
    rounds: int = 3000
    repeats: int = 100
    participation: float = 0.5
    strength: float = 0.5


def name_of(factor: float) -> str:
    """The name of a multiple of lambda*: "0" for local models, "infinity" for the global one."""
    return "infinity" if math.isinf(factor) else f"{100 * factor:g}%"


def drawn_errors(cell: Cell, name: str) -> Numbers:
    """Mean and variance of squared errors over draws and benign devices, at multiples of lambda*."""
    problem = PROBLEMS[name]
    best = ditto_strength(problem)
    draws = cell.plan.draws if problem.gram is None else max(1, cell.plan.draws // 4)
    found = squared_errors(problem, [factor * best for factor in FACTORS], draws, cell.seed)
    return {name_of(factor): {"mean": float(errors.mean()), "variance": float(errors.var())}
            for factor, errors in zip(FACTORS, found.values(), strict=True)}


def distance_to_bayes(cell: Cell) -> Numbers:
    """How far Ditto at lambda* is from the Bayes estimator, at most over devices and a thousand draws."""
    random = np.random.default_rng(cell.seed)
    own = estimated_models(POINTS, true_models(POINTS, 1000, random), random)
    pull = ditto_strength(POINTS) / (1 + ditto_strength(POINTS))
    ditto = (1 - pull) * own + pull * own.mean(1, keepdims=True)
    return {"distance": float(np.abs(ditto - bayes_estimates(POINTS, own)).max())}


def followed(cell: Cell) -> Numbers:
    """Distances to the optima by round, and their slopes over the last nine tenths on logarithmic scales."""
    plan: TheoryPlan = cell.plan
    read = sorted({round(10 ** power) for power in np.linspace(0, math.log10(plan.rounds), 25)})
    shared, own = gaps_by_round(plan.rounds, 10, plan.participation, plan.strength, plan.repeats, cell.seed, read)
    late = [k for k, one in enumerate(read) if one >= plan.rounds / 30]
    slopes = {key: float(np.polyfit(np.log([read[k] for k in late]), np.log([gaps[k] for k in late]), 1)[0])
              for key, gaps in (("shared", shared), ("own", own))}
    return {"round": read, "shared": shared, "own": own, "slope": slopes}


def cells(plan: TheoryPlan, seed: int) -> dict[str, Measure]:
    """Draws of every problem, the Bayes estimator, and Algorithm 7."""
    return {**{name: partial(drawn_errors, name=name) for name in PROBLEMS}, BAYES: distance_to_bayes, STEPS: followed}


# the page


def exact_table() -> Table:
    """lambda* and the error there, in closed form."""
    rows = [Row(name, {"lambda*": [ditto_strength(problem)], "mean error": [best.mean], "variance": [best.variance]})
            for name, problem in PROBLEMS.items() for best in (ditto_error(problem, ditto_strength(problem)),)]
    return Table("The best lambda in closed form", ("lambda*", "mean error", "variance"), tuple(rows), digits=4, head="problem")


def drawn_table(results: Results, name: str) -> Table:
    """Errors over draws beside the closed form, at multiples of lambda*."""
    problem, best = PROBLEMS[name], ditto_strength(PROBLEMS[name])
    rows = []
    for factor in FACTORS:
        exact, place = ditto_error(problem, factor * best if factor else 0.0), name_of(factor)
        rows.append(Row(place, {"mean error": results.values(name, f"{place}.mean"), "in closed form": [exact.mean],
                                "variance": results.values(name, f"{place}.variance"), "its closed form": [exact.variance]}))
    return Table(f"Error of benign devices, {name}", tuple(rows[0].ours), tuple(rows), digits=4, head="lambda over lambda*")


def related_table() -> Table:
    """Local, global and Ditto's error as devices become more alike: figure 5.2, in closed form."""
    rows = []
    for related in RELATED:
        problem = replace(POINTS, spread=1 / related)
        best = ditto_strength(problem)
        found = {key: ditto_error(problem, at) for key, at in (("local", 0.0), ("global", math.inf), ("Ditto", best))}
        rows.append(Row(f"{related:g}", {"lambda*": [best], **{key: [one.mean] for key, one in found.items()},
                                         **{f"{key}, variance": [one.variance] for key, one in found.items()}}))
    return Table("Figure 5.2: errors by relatedness", tuple(rows[0].ours), tuple(rows), digits=4, head="1 / tau")


def tables(results: Results) -> list[Table]:
    """Closed forms, draws beside them, and the slopes of Theorem 14."""
    slopes = Row("slope", {key: results.values(STEPS, f"slope.{key}") for key in ("shared", "own")})
    return [exact_table(), *(drawn_table(results, name) for name in PROBLEMS), related_table(),
            Table("Theorem 14: slope of the squared distance to the optimum, log over log of rounds", ("shared", "own"),
                  (slopes,), head="")]


# claims


def minimises_both(results: Results) -> Finding:
    """Whether lambda* has the smallest mean error and the smallest variance of a fine grid, in closed form."""
    findings = []
    for name, problem in PROBLEMS.items():
        best = ditto_strength(problem)
        grid = best * np.exp(np.linspace(-3, 3, 1201))
        for key in ("mean", "variance"):
            found = grid[int(np.argmin([getattr(ditto_error(problem, float(one)), key) for one in grid]))]
            findings.append(at_most(abs(math.log(found / best)), 0.0051, f"{name}, {key}, log of the minimiser over lambda*"))
    return all_of(*findings)


def draws_agree(results: Results) -> Finding:
    """Whether means and variances over draws are those of the closed form at lambda*, to `SAME`."""
    findings = []
    for name, problem in PROBLEMS.items():
        exact = ditto_error(problem, ditto_strength(problem))
        for key in ("mean", "variance"):
            ratio = interval([value / getattr(exact, key) - 1 for value in results.values(name, f"{name_of(1.0)}.{key}")])
            findings.append(within(ratio, SAME, True, f"{name}, {key}, draws over closed form less 1,"))
    return all_of(*findings)


def neighbours_are_worse(results: Results) -> Finding:
    """Whether half and twice lambda*, local models and the global one have larger errors and variances over draws."""
    def values(name: str, factor: float, key: str) -> list[float]:
        """A number at a multiple of lambda*, for each seed."""
        return results.values(name, f"{name_of(factor)}.{key}")

    return all_of(*(lower(difference(values(name, 1.0, key), values(name, factor, key)), True,
                          what=f"{name}, {key}, lambda* less {name_of(factor)},")
                    for name in PROBLEMS for key in ("mean", "variance") for factor in (0.0, 0.5, 2.0, math.inf)))


def crossing(results: Results) -> Finding:
    """Whether local models win where devices differ, the global one where they are alike, and Ditto everywhere: closed form."""
    found = {related: [ditto_error(replace(POINTS, spread=1 / related), at).mean
                       for at in (0.0, math.inf, ditto_strength(replace(POINTS, spread=1 / related)))] for related in RELATED}
    first, last = found[RELATED[0]], found[RELATED[-1]]
    least = all(ditto < min(local, shared) for local, shared, ditto in found.values())
    agrees = first[0] < first[1] and last[1] < last[0] and least
    texts = [f"1 / tau {related:g}: local {local:.3f}, global {shared:.3f}, Ditto {ditto:.3f}"
             for related, (local, shared, ditto) in found.items()]
    return Finding(Verdict.AGREES if agrees else Verdict.DISAGREES, "; ".join(texts))


def strength_moves(results: Results) -> Finding:
    """Whether lambda* falls with more samples, less related devices, more adversaries and stronger ones: closed form."""
    attacked = PROBLEMS["point estimation, 3 adversaries"]
    ways = {"samples 5, 10": (POINTS, replace(POINTS, examples=10)), "tau 0.5, 1": (POINTS, replace(POINTS, spread=1.0)),
            "adversaries 3, 5": (attacked, replace(attacked, adversaries=5)),
            "tau_a 3, 6": (attacked, replace(attacked, adversary_spread=6.0))}
    found = {way: [ditto_strength(problem) for problem in pair] for way, pair in ways.items()}
    agrees = all(after < before for before, after in found.values())
    return Finding(Verdict.AGREES if agrees else Verdict.DISAGREES,
                   "; ".join(f"{way}: {before:.3f}, {after:.3f}" for way, (before, after) in found.items()))


def is_bayes(results: Results) -> Finding:
    """Whether Ditto at lambda* is the Bayes estimator, up to rounding."""
    return at_most(max(results.values(BAYES, "distance")), 1e-12, "largest distance of Ditto at lambda* and the posterior mean")


def as_fast(results: Results) -> Finding:
    """Whether shared and personal models both come nearer at least as fast as 1 / t."""
    findings = []
    for key, what in (("shared", "shared model"), ("own", "personal models")):
        found = interval([slope - RATE for slope in results.values(STEPS, f"slope.{key}")])
        findings.append(lower(found, True, what=f"{what}, slope less {RATE:g},"))
    return all_of(*findings)


def notes(results: Results) -> Sequence[str]:
    """What the thesis leaves open and how it was set."""
    plan = results.plan
    return [
        "The thesis does not give K, n, sigma and tau of figures 5.1 and 5.2: here K = 10, n = 5, sigma = 1, tau = 0.5, and 3 "
        "adversaries with tau_a = 3. Losses are half the squared error, as (5.23) and lambda* need; (5.21) prints them without "
        "the half, for which the best lambda is twice as large.",
        f"{plan['draws']} draws of all devices for each seed, a quarter of that for regression; inputs have orthogonal columns.",
        f"Algorithm 7: 10 devices, each with probability {plan['participation']:g} in a round, lambda {plan['strength']:g}, "
        f"{plan['repeats']} runs a seed. Slopes are fitted from round {plan['rounds'] // 30} on.",
        "The claims and their rules were fixed before any result was seen; draws were raised from 200,000, and from a tenth for "
        "regression, after a quick run could not tell 1%.",
    ]


DITTO_THEORY = Study(
    name="ditto_theory", paper="Li23", item="figures 5.1, 5.2, Theorems 10 to 14", title="Ditto's best lambda in closed form",
    cost=Cost(3000, 2), full=TheoryPlan(), quick=TheoryPlan(seeds=3, draws=100_000, rounds=600, repeats=40), cells=cells,
    tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("One lambda minimises the mean error and its variance at the same time, and it is lambda*.",
              "[Li23, Theorems 10 to 13]", minimises_both),
        Claim(f"Draws of the devices have the closed form's mean and variance at lambda*, to {100 * SAME:g}%.",
              "[Li23, Theorems 10 to 13]", draws_agree),
        Claim("Over draws, half and twice lambda*, local models and the global model all have larger errors and variances.",
              "[Li23, figure 5.1]", neighbours_are_worse),
        Claim("Local models are better than the global one where devices differ, worse where they are alike, and Ditto is better "
              "than both.", "[Li23, figure 5.2]", crossing),
        Claim("lambda* falls with more samples, less related devices, more adversaries and stronger ones.",
              "[Li23, section 5.2.1]", strength_moves),
        Claim("Without adversaries Ditto at lambda* is the Bayes estimator.", "[Li23, Theorem 10]", is_bayes),
        Claim("With the steps of Lemma 20 personal models converge like 1 / t, as the shared model does.", "[Li23, Theorem 14]",
              as_fast),
    ),
)
