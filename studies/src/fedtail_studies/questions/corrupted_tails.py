"""Tails that survive corruption: which way of leaving clients out keeps the gain of training for the tail?

The clients of `where_not`, of whom some have labels drawn at random. Delta-FL at theta = 0.1 then trains for them alone. Compared
are a fixed trimmed mass (`IntervalSuperquantile`), a trimmed mass that follows the gap in the losses (`FencedSuperquantile`),
k-loss, TERM with two signs, and Ditto's models of clients' own. No method is told who is corrupted, or how many. Test clients,
whose errors are shown, are all benign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import fedtail
from fedtail.aggregation import LossFilter
from fedtail.data import Population
from fedtail_studies.compared.methods import quiet_about_small_tails
from fedtail_studies.judging import difference, lower, not_above
from fedtail_studies.questions import settings
from fedtail_studies.questions.settings import TITLES, Setting, less
from fedtail_studies.questions.where_not import demo, is_mislabelled, mislabelled
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

THETA, LABELS = 0.1, 10
FEDAVG, DELTA, HALF, FENCED = "FedAvg", "Delta-FL 0.1", "Delta-FL 0.5", "fenced"
TENTH, FIFTH, K_LOSS, TERM = "without the worst 0.1", "without the worst 0.2", "k-loss 0.2", "TERM -2 within, +2 across labels"
MOST, FEW = (0.0, 0.1), (0.05, 0.2)              # corrupted: where all methods are compared, and where the three that matter are
MEAN_MARGIN = 2.0                                # points of mean error that a robust tail may cost against FedAvg
RISKS = {FEDAVG: fedtail.Mean(), DELTA: fedtail.Superquantile(THETA), HALF: fedtail.Superquantile(0.5),
         TENTH: fedtail.IntervalSuperquantile(0.1, 0.9 - THETA), FIFTH: fedtail.IntervalSuperquantile(0.2, 0.8 - THETA),
         FENCED: fedtail.FencedSuperquantile(THETA),
         TERM: fedtail.Hierarchical(fedtail.Tilted(-2.0), fedtail.Tilted(2.0), LABELS)}
ROBUST = (TENTH, FIFTH, FENCED, K_LOSS, TERM)
METHODS = (FEDAVG, DELTA, HALF, *ROBUST)
PERSONAL = (FEDAVG, DELTA, FENCED)               # what Ditto's shared model is trained by
DITTO, HELD_OUT = 0.1, 0.2                       # its strength; of a client's examples, those to evaluate on


def method(name: str, where: Setting) -> fedtail.FederatedAlgorithm:
    """A method by its name, with the local training of the setting."""
    shared = where.method(1.0)
    return replace(shared, aggregate=LossFilter(0.2)) if name == K_LOSS else replace(shared, risk=RISKS[name])


def by_most_frequent_label(population: Population) -> Population:
    """The population with clients grouped by the label that most of their examples have, wrong labels included."""
    owner, rows = population.example_clients_and_rows()
    counts = torch.zeros(len(population), LABELS, dtype=torch.int64)
    counts.index_put_((owner, population.targets[rows].long()), torch.ones_like(owner), accumulate=True)
    return replace(population, group=counts.argmax(1))


def measured(cell: Cell, name: str, corrupted: float) -> Numbers:
    """The error over test clients after training with a share `corrupted` of the training clients mislabelled."""
    where = demo(cell)
    train = by_most_frequent_label(mislabelled(where.train, where.classes, cell.seed, corrupted))
    with quiet_about_small_tails():
        trained = cell.train(method(name, where), where.task, train, where.rounds)
    return settings.percent(fedtail.evaluate(trained, where.test, engine=fedtail.Engine(device=cell.device)).error)


def measured_personal(cell: Cell, name: str, corrupted: float) -> Numbers:
    """Errors of Ditto's shared and own models over benign training clients, on examples of theirs that were held out."""
    where = demo(cell)
    kept, held_out = where.train.split_examples(within=HELD_OUT, seed=cell.seed)
    algorithm = replace(method(name, where), personal=fedtail.Ditto(DITTO, fedtail.LocalSGD(**where.local)))
    with quiet_about_small_tails():
        trained = cell.train(algorithm, where.task, mislabelled(kept, where.classes, cell.seed, corrupted), where.rounds)
    found = fedtail.evaluate_personal(trained, held_out, engine=fedtail.Engine(device=cell.device))
    benign = ~is_mislabelled(len(kept), cell.seed, corrupted)
    return {"shared": settings.percent(found.shared.of_clients(benign).error),
            "own": settings.percent(found.personal.of_clients(benign).error)}


def cell_name(name: str, corrupted: float) -> str:
    return f"{name}, {100 * corrupted:g}% corrupted"


def ditto_name(name: str, corrupted: float) -> str:
    return f"Ditto over {cell_name(name, corrupted)}"


def cells(plan: settings.Plan, seed: int) -> dict[str, Measure]:
    compared = [*((name, share) for share in MOST for name in METHODS), *((name, share) for share in FEW for name in PERSONAL)]
    return {**{cell_name(*one): partial(measured, name=one[0], corrupted=one[1]) for one in compared},
            **{ditto_name(name, MOST[1]): partial(measured_personal, name=name, corrupted=MOST[1]) for name in PERSONAL}}


def values(results: Results, name: str, corrupted: float, statistic: str) -> list[float]:
    return results.values(cell_name(name, corrupted), statistic)


def gaps(results: Results, name: str, corrupted: float, statistic: str, other: str = FEDAVG) -> list[float]:
    """One method less another, FedAvg by default, seed by seed."""
    return less(values(results, name, corrupted, statistic), values(results, other, corrupted, statistic))


def tables(results: Results) -> list[Table]:
    shares = sorted((*MOST, *FEW))
    made = [Table(f"{100 * share:g}% of the training clients mislabelled: error of test clients, %", tuple(TITLES.values()),
                  tuple(_row(name, results, cell_name(name, share)) for name in (METHODS if share in MOST else PERSONAL)))
            for share in shares]
    rows = [_row(f"{name}, {title}", results, ditto_name(name, MOST[1]), f"{group}.") for name in PERSONAL
            for group, title in (("shared", "shared model"), ("own", "Ditto's own models"))]
    return [*made, Table("10% mislabelled: error of benign training clients on held-out examples, %", tuple(TITLES.values()),
                         tuple(rows))]


def _row(title: str, results: Results, cell: str, prefix: str = "") -> Row:
    return Row(title, {TITLES[s]: results.values(cell, f"{prefix}{s}") for s in settings.STATISTICS})


def _mean_kept(results: Results, name: str, corrupted: float) -> Finding:
    found = difference(values(results, name, corrupted, "mean"), values(results, FEDAVG, corrupted, "mean"))
    return not_above(found, MEAN_MARGIN, True, f"mean, {name} less FedAvg,")


def _tail_gains(results: Results, name: str, corrupted: float, other: str = FEDAVG) -> Finding:
    found = difference(values(results, name, corrupted, "worst10"), values(results, other, corrupted, "worst10"))
    return lower(found, True, what=f"worst 10%, {name} less {other},")


def _half_kept(results: Results, name: str) -> Finding:
    halves = [0.5 * gap for gap in gaps(results, DELTA, 0.0, "worst10")]
    return lower(difference(gaps(results, name, 0.0, "worst10"), halves), True,
                 what=f"worst 10% less FedAvg, {name} less half of {DELTA},")


def _claims() -> tuple[Claim, ...]:
    said: list[tuple[str, Callable[[Results], Finding]]] = []
    for name in ROBUST:
        said += [(f"{name}: with a tenth corrupted, the mean is within 2 points of FedAvg's.",
                  partial(_mean_kept, name=name, corrupted=0.1)),
                 (f"{name}: with a tenth corrupted, the worst 10% are better off than with FedAvg.",
                  partial(_tail_gains, name=name, corrupted=0.1)),
                 (f"{name}: with nobody corrupted, over half of what {DELTA} gains the worst 10% is kept.",
                  partial(_half_kept, name=name))]
    said += [(f"{FENCED}: with a tenth corrupted, the worst 10% are better off than with {HALF}.",
              partial(_tail_gains, name=FENCED, corrupted=0.1, other=HALF))]
    for share in FEW:
        said += [(f"{FENCED}: with {100 * share:g}% corrupted, the mean is within 2 points of FedAvg's.",
                  partial(_mean_kept, name=FENCED, corrupted=share)),
                 (f"{FENCED}: with {100 * share:g}% corrupted, the worst 10% are better off than with FedAvg.",
                  partial(_tail_gains, name=FENCED, corrupted=share))]
    return tuple(Claim(text, "[a target of ours]", judge) for text, judge in said)


def notes(results: Results) -> Sequence[str]:
    return [
        f"The clients, model and local training of `where_not`: {results.plan['train_clients']} training clients, 100 a round, "
        f"{results.plan['rounds']} rounds. Who is mislabelled is drawn by the seed; 5%, 10% and 20% are on average.",
        "\"Fenced\" is `FencedSuperquantile(0.1)`: the worst tenth of the clients whose loss is at most m + 4 (m - d), m the "
        "median and d the first decile of the cohort's losses. \"Without the worst a\" is the mean of the next tenth, "
        "`IntervalSuperquantile(a, 0.9 - a)`. k-loss is `LossFilter(0.2)` under the mean, which takes the update of one client.",
        "Mislabelled clients are in no group of their own, so that TERM with two signs has nothing natural to sum over: clients "
        "are grouped by their most frequent label, tilted by -2 within a group and by +2 across.",
        "Ditto's models are those of training clients, so they are evaluated on a fifth of each client's examples that was held "
        "out; clients that were never sampled use the shared model.",
        "The fence's 4 was chosen after a look at the losses of seed 0 with and without corrupted clients, after 300 rounds of "
        "FedAvg and Delta-FL; with 10% corrupted, seed 0 was also run at 6. The other seeds were not looked at.",
    ]


CORRUPTED_TAILS = Study(
    name="corrupted_tails", paper="", item="tails that survive corruption", title="Tails that survive corrupted clients",
    cost=Cost(1000, 15), full=settings.GENERATED, quick=settings.GENERATED_QUICK, cells=cells, tables=tables, claims=_claims(),
    notes=notes)
