"""Stragglers on five data sets: figures 3.1, 3.7, 3.8, 3.9 and 3.10 of [Li23], direction only on the data at hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedtail_studies.judging import Difference, all_of, interval, lower
from fedtail_studies.prox import claims
from fedtail_studies.prox.courses import followed
from fedtail_studies.prox.methods import BEST, DROPS, KEEPS, LEVELS, run_name, runs, straggling
from fedtail_studies.prox.networks import SETS, Network, synthetic_network
from fedtail_studies.prox.pages import HOW, Panels, caption, course_grid, course_table, loss_and_accuracy
from fedtail_studies.prox.real_data import FEMNIST, MNIST, REAL, SENT140, SHAKESPEARE, WRITERS, network
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study, Verdict
from fedtail_studies.tables import Printed, Row, Table

SYNTHETIC = SETS[-1]
FIVE = (SYNTHETIC, MNIST, FEMNIST, SHAKESPEARE, SENT140)      # of figure 3.1
PRINTED = Printed(22.0)                          # points of accuracy, with 90% stragglers, averaged over the five
HIGH = 0.9
DEALT, TEXTS = (MNIST, FEMNIST), (SHAKESPEARE, SENT140)


@dataclass(frozen=True)
class Plan:
    """Rounds of each data set; the figures show 200, 200, 400, 40 and 800 or so."""

    seeds: int = 3
    sets: tuple[str, ...] = (SYNTHETIC, MNIST, WRITERS, FEMNIST, SHAKESPEARE, SENT140)
    cohort: int = 10
    epochs: int = 20
    rounds: int = 50                             # Synthetic(1,1) and FEMNIST
    digit_rounds: int = 40                       # MNIST
    role_rounds: int = 8                         # Shakespeare
    tweet_rounds: int = 25                       # Sent140
    devices: int = 30                            # Synthetic(1,1)
    most: int = 1000                             # samples of one of them, at most
    mnist_devices: int = 1000
    femnist_devices: int = 200
    roles: int = 143
    windows: int = 25                            # of a role
    hidden: int = 16                             # units of the recurrent models
    spread_every: int = 20                       # rounds between measurements of the gradient variance


def network_of(cell: Cell, where: str) -> Network:
    """The data set of that name for the cell's seed."""
    return synthetic_network(cell, where) if where == SYNTHETIC else network(cell, where)


def rounds_of(plan: Plan, where: str) -> int:
    """How many rounds a data set is trained for."""
    others = {MNIST: plan.digit_rounds, WRITERS: plan.digit_rounds, SHAKESPEARE: plan.role_rounds, SENT140: plan.tweet_rounds}
    return others.get(where, plan.rounds)


def runs_of(where: str, epochs: int) -> list[tuple[str, float]]:
    """Methods and shares of stragglers: all three methods with E epochs, without a penalty for one epoch.

    All shares, and one epoch, for MNIST and FEMNIST as the thesis deals them out; else 0% and 90%. Of Synthetic(1,1), which
    `prox_synthetic` is about, only 90%.
    """
    levels = LEVELS if where in DEALT else (HIGH,) if where == SYNTHETIC else (0.0, HIGH)
    if epochs == 1:
        return runs(levels, (DROPS, KEEPS)) if where in DEALT else []
    return runs(levels)


def measured(cell: Cell, where: str, method: str, level: float, epochs: int) -> Numbers:
    """One method at one share of stragglers; without stragglers the gradient variance too."""
    net, plan = network_of(cell, where), cell.plan
    every = min(plan.spread_every, max(1, rounds_of(plan, where) // 5)) if not level and epochs > 1 else 0
    return followed(cell, straggling(net, method, level, epochs, plan.cohort), net, rounds_of(plan, where), every)


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """Set by set: all methods and shares of stragglers with 20 epochs, then with one."""
    return {run_name(where, method, level, epochs): partial(measured, where=where, method=method, level=level, epochs=epochs)
            for where in plan.sets for epochs in (plan.epochs, 1) for method, level in runs_of(where, epochs)}


def tables(results: Results) -> list[Table]:
    """The gain at 90% stragglers, then what each run ends with."""
    made = [gains(results)]
    for where in results.plan["sets"]:
        names = [run_name(where, method, level, epochs) for epochs in (20, 1) for method, level in runs_of(where, epochs)]
        made.append(course_table(results, where, names))
    return made


def gain(results: Results, where: str, path: str) -> list[float]:
    """Points of accuracy that FedProx with the best mu is above FedAvg with 90% stragglers, one for each seed."""
    prox, drops = (results.values(run_name(where, method, HIGH), path) for method in (BEST, DROPS))
    return [a - b for a, b in zip(prox, drops, strict=True)]


def gains(results: Results) -> Table:
    """The gain on each data set, where the thesis reads runs off and over the last fifth of the rounds."""
    titles = {"read off, points": "stop.accuracy", "last fifth, points": "accuracy"}
    rows = [Row(where, {title: gain(results, where, path) for title, path in titles.items()}) for where in results.plan["sets"]]
    five = [where for where in FIVE if where in results.plan["sets"]]
    means = {title: [statistics.fmean(values) for values in zip(*(gain(results, where, path) for where in five), strict=True)]
             for title, path in titles.items()}
    average = Row(f"average of {', '.join(five)}", means, {"read off, points": PRINTED} if len(five) == len(FIVE) else {})
    return Table("Accuracy with 90% stragglers, FedProx with the best mu less FedAvg", tuple(titles), (*rows, average),
                 "[Li23, section 3.4.3.2]: one number, for its five data sets", digits=1, head="data set")


def drawn(results: Results, folder: Path) -> Sequence[Figure]:
    """Loss and accuracy for all sets and shares of stragglers; the variance without stragglers."""
    three, made = {"FedAvg, drops": DROPS, "FedProx, mu 0": KEEPS, "FedProx, best mu": BEST}, []
    sets = [where for where in results.plan["sets"] if where != SYNTHETIC]
    for stem, many, epochs, like in (("datasets", 3, 20, ("figure 3.1", "figure 3.7")),
                                     ("one_epoch", 2, 1, ("figure 3.9", "figure 3.10"))):
        panels = [[(f"{where}, {level:.0%} stragglers",
                    {name: run_name(where, three[name], level, epochs) for name in list(three)[:many]})
                   for where in sets if runs_of(where, epochs)] for level in (LEVELS if epochs == 1 else (0.0, HIGH))]
        made += loss_and_accuracy(results, folder, stem, panels, like)
    spreads = [(where, {"mu 0": run_name(where, DROPS, 0.0), "best mu": run_name(where, BEST, 0.0)})
               for where in sets]
    course_grid(results, folder / "variance.png", [Panels("spread.variance", "gradient variance", spreads)])
    return [*made, Figure("variance.png", caption("Variance of gradients without stragglers", "figure 3.8"))]


def average_gain(results: Results) -> Finding:
    """The average over five data sets of the gain with 90% stragglers; one number is printed, for other data."""
    missing = [where for where in FIVE if where not in results.plan["sets"]]
    if missing:
        return Finding(Verdict.NOT_TESTABLE, f"{', '.join(missing)} not run")
    each = {where: interval(gain(results, where, "stop.accuracy")) for where in FIVE}
    found: Difference = interval([-statistics.fmean(values) for values in
                                  zip(*(gain(results, where, "stop.accuracy") for where in FIVE), strict=True)])
    judged = lower(found, results.papers_data, Printed(-PRINTED.mean), "points of accuracy, FedAvg less FedProx, mean of five,")
    gains_of = ", ".join(f"{name} {one.mean:+.1f}" for name, one in each.items())
    last = statistics.fmean(value for where in FIVE for value in gain(results, where, "accuracy"))
    return judged._replace(reason=f"{judged.reason}; gains of FedProx: {gains_of}; over the last fifth of the rounds {last:+.1f}")


def on_sets(results: Results, judge: Callable[[Results, str], Finding], sets: Sequence[str]) -> Finding:
    """One verdict over those of some data sets that were run."""
    found = [judge(results, where) for where in sets if where in results.plan["sets"]]
    return all_of(*found) if found else Finding(Verdict.NOT_TESTABLE, f"{', '.join(sets)} not run")


def variance_follows(results: Results, where: str) -> Finding:
    """Without stragglers, the best mu changes variance and loss in the same direction."""
    first, second = run_name(where, BEST, 0.0), run_name(where, DROPS, 0.0)
    variance, loss = (results.difference(first, second, path) for path in ("variance", "loss"))
    told = f"{where}: best mu less mu 0, variance {variance}, loss {loss}"
    if not variance.sign or not loss.sign:
        return Finding(Verdict.NOT_TESTABLE, f"{told}: these seeds do not tell")
    return Finding(Verdict.AGREES if variance.sign == loss.sign else Verdict.DISAGREES, told)


def notes(results: Results) -> Sequence[str]:
    """What was reduced, set by set."""
    plan = results.plan
    return [HOW,
            "Claims were split by share of stragglers, by measure (loss or stability) and by data set after first results, and a "
            "few were added; intervals do not account for it.",
            f"Rounds: {plan['rounds']}, MNIST {plan['digit_rounds']}, Shakespeare {plan['role_rounds']}, Sent140 "
            f"{plan['tweet_rounds']}. Learning rates and best mu are the printed ones; they were tuned for other data and, for "
            "the texts, other models. Every seed deals data out anew, splits each device's samples into 80% and 20%, and draws "
            "cohorts, stragglers and batches, the same for all methods. Without stragglers mu = 0 is FedAvg, and is run once.",
            f"MNIST: 70,000 images, {plan['mnist_devices']} devices with two digits each. FEMNIST: the letters a to j of the "
            f"writers at hand, {plan['femnist_devices']} devices with five letters each, about 16 images (the thesis: 92). Sizes "
            "are lognormal. Softmax regression on pixels scaled to mean 0 and deviation 1.",
            f"Shakespeare: {plan['roles']} roles, at most {plan['windows']} windows of 20 characters each, a GRU with "
            f"{plan['hidden']} units (the thesis: 3,616 windows of 80 on average, two LSTM layers of 100). In so few rounds its "
            "accuracy stays near that of always answering the most frequent class.",
            f"Sent140: 50 dimensions of GloVe, an LSTM with {plan['hidden']} units (the thesis: 300, two layers of 256), "
            f"accounts with three tweets or more.{_coin(results)}",
            f"Synthetic(1,1): sizes are cut at {plan['most']}, and only 90% stragglers are run; `prox_synthetic` has more draws "
            "and the other shares."]


def _coin(results: Results) -> str:
    """A sentence for data of two classes where no method ends with a loss below that of a coin."""
    names = [run_name(SENT140, method, level) for method, level in runs_of(SENT140, 20)]
    if SENT140 not in results.plan["sets"] or min(results.mean(name, "loss") for name in names) < math.log(2):
        return ""
    return (f" All runs end with a loss above {math.log(2):.2f}, that of a coin: at the printed rate this model does not learn "
            "from so few tweets, and only who is more or less unstable can be told.")


def claim(text: str, source: str, judge: Callable[[Results, str], Finding], sets: Sequence[str]) -> Claim:
    """A claim about several data sets."""
    return Claim(text, source, partial(on_sets, judge=judge, sets=sets))


IMAGES = (MNIST, WRITERS, FEMNIST)
PROX_DATASETS = Study(
    name="prox_datasets", paper="Li23", item="figures 3.1, 3.7, 3.8, 3.9, 3.10", title="FedProx and stragglers",
    cost=Cost(50, 15), full=Plan(),
    quick=Plan(seeds=2, sets=FIVE, rounds=10, digit_rounds=10, role_rounds=2, tweet_rounds=3, most=80, windows=12),
    cells=cells, tables=tables, data=REAL, figures=drawn, notes=notes,
    claims=(
        Claim("With 90% stragglers FedProx with the best mu is 22 points more accurate than FedAvg, on average of five sets.",
              "[Li23, section 3.4.3.2, figure 3.7]", average_gain),
        claim("FedAvg converges worse when it drops 90% stragglers than without stragglers, on images.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.worse_with_stragglers, low=0.0, high=HIGH), IMAGES),
        claim("FedAvg converges worse when it drops 90% stragglers than without stragglers, on texts.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.worse_with_stragglers, low=0.0, high=HIGH), TEXTS),
        claim("Keeping the partial work of 50% stragglers (mu = 0) gives a smaller loss than dropping it, on images.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.keeping_helps, path="loss", level=0.5), DEALT),
        claim("Keeping the partial work of 90% stragglers (mu = 0) gives a smaller loss than dropping it, on images.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.keeping_helps, path="loss", level=HIGH), IMAGES),
        claim("Keeping the partial work of 90% stragglers (mu = 0) gives a smaller loss than dropping it, on texts.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.keeping_helps, path="loss", level=HIGH), TEXTS),
        claim("Keeping the partial work of 90% stragglers (mu = 0) is more stable than dropping it, on images.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.keeping_helps, path="rough", level=HIGH), IMAGES),
        claim("mu = 1 is more stable than mu = 0, without stragglers and with 90%, on images.",
              "[Li23, section 3.4.3.2, figure 3.1]", partial(claims.penalty_helps, path="rough", levels=(0.0, HIGH)), IMAGES),
        claim("mu = 1 gives a smaller loss than mu = 0, without stragglers and with 90%, on images.",
              "[Li23, section 3.4.3.2, figure 3.1]", partial(claims.penalty_helps, path="loss", levels=(0.0, HIGH)), IMAGES),
        claim("Without stragglers, the variance of gradients changes with the loss.", "[Li23, figure 3.8]",
              variance_follows, (*IMAGES, *TEXTS)),
        claim("With one epoch, keeping the work of 50% stragglers still gives a smaller loss than dropping it, on images.",
              "[Li23, figure 3.9]", partial(claims.keeping_helps, path="loss", level=0.5, epochs=1), DEALT),
        claim("With one epoch, keeping the work of 90% stragglers still gives a smaller loss than dropping it, on images.",
              "[Li23, figure 3.9]", partial(claims.keeping_helps, path="loss", level=HIGH, epochs=1), DEALT),
    ),
)
