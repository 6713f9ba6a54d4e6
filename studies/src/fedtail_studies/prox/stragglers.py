"""Stragglers on synthetic data: figures 3.1, 3.5, 3.7, 3.9 and 3.10 of [Li23] for Synthetic(1,1) and Synthetic-IID."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedtail_studies.judging import all_of
from fedtail_studies.prox import claims
from fedtail_studies.prox.courses import followed
from fedtail_studies.prox.methods import BEST, DROPS, KEEPS, LEVELS, run_name, runs, straggling
from fedtail_studies.prox.networks import BEST as PRINTED_BEST
from fedtail_studies.prox.networks import SETS, synthetic_network
from fedtail_studies.prox.pages import HOW, course_table, loss_and_accuracy
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Table

IID, HARD = SETS[0], SETS[-1]
LITTLE = 2.0                                     # points of accuracy: "not much effect" of figure 3.5


@dataclass(frozen=True)
class Plan:
    """Printed are 200 rounds (in the figures) of 10 of 30 devices; the sizes of devices are not."""

    seeds: int = 5
    rounds: int = 50
    devices: int = 30
    cohort: int = 10
    epochs: int = 20
    most: int = 1000                             # samples of a device, at most
    grid: tuple[float, ...] = (0.001, 0.01, 0.1)      # mu beside the printed best one, for the first seed


def measured(cell: Cell, where: str, method: str, level: float, epochs: int, strength: float | None = None) -> Numbers:
    """One method at one share of stragglers."""
    network = synthetic_network(cell, where)
    return followed(cell, straggling(network, method, level, epochs, cell.plan.cohort, strength), network, cell.plan.rounds)


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """Synthetic(1,1) with all methods, and with mu = 0 for one epoch; IID with mu = 0; the grid of mu on the first seed."""
    made: dict[str, Measure] = {}
    for where, methods, epochs in ((HARD, (DROPS, KEEPS, BEST), plan.epochs), (HARD, (DROPS, KEEPS), 1),
                                   (IID, (DROPS, KEEPS), plan.epochs)):
        made |= {run_name(where, method, level, epochs): partial(measured, where=where, method=method, level=level, epochs=epochs)
                 for method, level in runs(LEVELS, methods)}
    if seed == 0:
        made |= {tried(mu): partial(measured, where=HARD, method=BEST, level=0.9, epochs=plan.epochs, strength=mu)
                 for mu in plan.grid}
    return made


def tried(mu: float) -> str:
    """How a run with another mu than the printed best one is called."""
    return f"{HARD}: FedProx, mu {mu:g}, 90% stragglers"


def tables(results: Results) -> list[Table]:
    """What each run ends with: 20 epochs, one epoch, and identical devices."""
    hard = [run_name(HARD, method, level) for method, level in runs()]
    once = [run_name(HARD, method, level, 1) for method, level in runs(LEVELS, (DROPS, KEEPS))]
    alike = [run_name(IID, method, level) for method, level in runs(LEVELS, (DROPS, KEEPS))]
    return [course_table(results, "Synthetic(1,1), 20 epochs", hard), course_table(results, "Synthetic(1,1), one epoch", once),
            course_table(results, "Synthetic-IID, 20 epochs", alike)]


def drawn(results: Results, folder: Path) -> Sequence[Figure]:
    """Loss and accuracy against rounds, a panel for each share of stragglers."""
    three = {"FedAvg, drops": DROPS, "FedProx, mu 0": KEEPS, f"FedProx, mu {PRINTED_BEST:g}": BEST}
    two = {name: three[name] for name in list(three)[:2]}
    panels = [[(f"{title}, {level:.0%} stragglers", {name: run_name(where, method, level, epochs)
                                                    for name, method in methods.items()}) for level in LEVELS]
              for title, where, methods, epochs in ((HARD, HARD, three, 20), (f"{HARD}, E = 1", HARD, two, 1),
                                                     (IID, IID, two, 20))]
    return loss_and_accuracy(results, folder, "stragglers", panels,
                             ("figures 3.1, 3.9 (first columns) and 3.5", "figures 3.7 and 3.10 (first columns) and 3.5"))


def keeping_is_steadier(results: Results) -> Finding:
    """With mu = 0, the loss rises less from round to round where the work of stragglers is kept than where it is dropped."""
    return all_of(*(claims.keeping_helps(results, HARD, "rough", level) for level in (0.5, 0.9)))


def steadier_with_one_epoch(results: Results) -> Finding:
    """With one epoch instead of twenty the loss of FedAvg rises less from round to round."""
    return all_of(*(claims.smaller(results, run_name(HARD, DROPS, level, 1), run_name(HARD, DROPS, level), "rough")
                    for level in LEVELS))


def notes(results: Results) -> Sequence[str]:
    """What was reduced, and what the grid of mu gave."""
    plan = results.plan
    mus = ", ".join(f"{mu:g}: loss {results.numbers(name, 0)['loss']:.2f}, accuracy {results.numbers(name, 0)['accuracy']:.1f}%"
                    for mu, name in [*((mu, tried(mu)) for mu in plan["grid"]), (PRINTED_BEST, run_name(HARD, BEST, 0.9))])
    return [HOW,
            f"{plan['rounds']} rounds; the figures show 200. Sizes of devices are 50 and a lognormal number with parameters 4 "
            f"and 2, cut at {plan['most']} samples: the thesis prints \"a power law\" alone, and its largest devices would cost "
            "most of the time. Every seed draws the data, the split into 80% and 20%, cohorts, stragglers and batches anew; "
            "these are the same for all methods of a seed.",
            "Exactly 5 or 9 of the 10 devices of a round are stragglers and do 1 to 20 epochs, each number equally likely, as "
            "the text says; the published code leaves out 20. With one epoch a straggler does a uniform number of its batches. "
            "Without stragglers mu = 0 is FedAvg.",
            f"mu = 1 is the printed best. With 90% stragglers, on the first seed, by mu: {mus}.",
            "Claims were split by share of stragglers, by measure (loss or stability) and by data set after first results, and a "
            "few were added; intervals do not account for it."]


PROX_SYNTHETIC = Study(
    name="prox_synthetic", paper="Li23", item="figures 3.1, 3.5, 3.7, 3.9, 3.10 (synthetic data)",
    title="FedProx and stragglers on synthetic data", cost=Cost(50, 8), full=Plan(),
    quick=Plan(seeds=2, rounds=20, most=100, grid=(0.1,)), cells=cells, tables=tables, figures=drawn, notes=notes,
    claims=(
        Claim("FedAvg converges worse when it drops 50% stragglers than without stragglers, on Synthetic(1,1).",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.worse_with_stragglers, where=HARD, low=0.0, high=0.5)),
        Claim("It converges worse still when it drops 90%.", "[Li23, section 3.4.2, figure 3.1]",
              partial(claims.worse_with_stragglers, where=HARD, low=0.5, high=0.9)),
        Claim("Keeping the partial work of 50% stragglers (mu = 0) gives a smaller loss than dropping it.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.keeping_helps, where=HARD, path="loss", level=0.5)),
        Claim("Keeping the partial work of 90% stragglers (mu = 0) gives a smaller loss than dropping it.",
              "[Li23, section 3.4.2, figure 3.1]", partial(claims.keeping_helps, where=HARD, path="loss", level=0.9)),
        Claim("Keeping partial work (mu = 0) is more stable than dropping it, with 50% and 90% stragglers.",
              "[Li23, section 3.4.2, figure 3.1]", keeping_is_steadier),
        Claim("mu = 1 improves the loss further, with and without stragglers.", "[Li23, section 3.4.3.2, figure 3.1]",
              partial(claims.penalty_helps, where=HARD, path="loss")),
        Claim("mu = 1 is more stable than mu = 0, with and without stragglers.", "[Li23, section 3.4.3.2, figure 3.1]",
              partial(claims.penalty_helps, where=HARD, path="rough")),
        Claim("With 90% stragglers FedProx with mu = 1 is more accurate than FedAvg.", "[Li23, figure 3.7]",
              partial(claims.penalty_is_more_accurate, where=HARD)),
        Claim("With one epoch, keeping the work of 50% stragglers still gives a smaller loss than dropping it.",
              "[Li23, figure 3.9]", partial(claims.keeping_helps, where=HARD, path="loss", level=0.5, epochs=1)),
        Claim("With one epoch, keeping the work of 90% stragglers still gives a smaller loss than dropping it.",
              "[Li23, figure 3.9]", partial(claims.keeping_helps, where=HARD, path="loss", level=0.9, epochs=1)),
        Claim("With one epoch, heterogeneous data disturb FedAvg less than with twenty.", "[Li23, figure 3.9]",
              steadier_with_one_epoch),
        Claim("On identically distributed data FedAvg is robust to dropping 50% stragglers.", "[Li23, figure 3.5]",
              partial(claims.dropping_changes_little, where=IID, level=0.5, reach=LITTLE)),
        Claim("On identically distributed data FedAvg is robust to dropping 90% stragglers.", "[Li23, figure 3.5]",
              partial(claims.dropping_changes_little, where=IID, level=0.9, reach=LITTLE)),
        Claim("On identically distributed data, keeping the work of 50% stragglers changes little.", "[Li23, figure 3.5]",
              partial(claims.keeping_changes_little, where=IID, level=0.5, reach=LITTLE)),
        Claim("On identically distributed data, keeping the work of 90% stragglers changes little.", "[Li23, figure 3.5]",
              partial(claims.keeping_changes_little, where=IID, level=0.9, reach=LITTLE)),
    ),
)
