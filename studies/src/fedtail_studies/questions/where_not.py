"""Where training for the tail does not help: the setting of `fedtail demo`, and three changes to it that take the gain away.

The figures of `docs/ideas/where_it_does_not_help.md`. The last change but one resembles `flipped_labels`, whose flipped clients
all make one mistake that a model can learn; here their labels are drawn at random, and no model fits them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import fedtail
from fedtail.data import Population
from fedtail_studies.compared.methods import quiet_about_small_tails
from fedtail_studies.judging import all_of, difference, interval, lower, not_above
from fedtail_studies.questions import settings
from fedtail_studies.questions.settings import TITLES, Setting, less, method_name
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

TAIL_FRACTIONS = (0.5, 0.25, 0.1)
TAIL = settings.STATISTICS[1:]
MISLABELLED = 0.1
FEW_CLIENTS = 8
LITTLE, SMALL = 0.25, 1.0                        # points of error: that a mean may rise by, that are no gain to speak of


def demo(cell: Cell, **concentrations: float) -> Setting:
    """As `fedtail demo`, which sets validation clients aside."""
    return settings.generated_clients(cell, validation_clients=cell.plan.train_clients // 5, **concentrations)


def alike(cell: Cell) -> Setting:
    return demo(cell, train_concentration=1000.0, test_concentration=1000.0)


def noisy_tail(cell: Cell) -> Setting:
    where = demo(cell)
    return replace(where, train=mislabelled(where.train, where.classes, cell.seed))


def few_clients(cell: Cell) -> Setting:
    return replace(demo(cell), cohort=FEW_CLIENTS)


def is_mislabelled(clients: int, seed: int, fraction: float) -> torch.Tensor:
    """Which of the clients `mislabelled` takes, (clients,) bool."""
    return torch.rand(clients, generator=torch.Generator().manual_seed(seed)) < fraction


def mislabelled(population: Population, classes: int, seed: int, fraction: float = MISLABELLED) -> Population:
    """A tenth of the clients get labels drawn at random: hopeless for any model, and so the worst off."""
    random = torch.Generator().manual_seed(seed)
    bad = torch.rand(len(population), generator=random) < fraction
    labels = torch.randint(classes, population.targets.shape, generator=random)
    owner, rows = population.example_clients_and_rows()
    targets, wrong = population.targets.clone(), rows[bad[owner]]
    targets[wrong] = labels[wrong]
    return replace(population, targets=targets)


DEMO, ALIKE, NOISY, FEW = "demo", "clients alike", "a tenth mislabelled", "few a round"
PLACES: dict[str, settings.Place] = {DEMO: demo, NOISY: noisy_tail, FEW: few_clients, ALIKE: alike}      # three share clients
SAID = {
    DEMO: "Clients differ, 100 a round, as in `fedtail demo`",
    ALIKE: "Clients are alike, 100 a round",
    NOISY: "Clients differ, a tenth of the training clients mislabelled, 100 a round",
    FEW: f"Clients differ, {FEW_CLIENTS} a round",
}


def measured(cell: Cell, place: settings.Place) -> Numbers:
    """FedAvg and every tail fraction over the same cohorts."""
    where, thetas = place(cell), (1.0, *TAIL_FRACTIONS)
    with quiet_about_small_tails():              # the last setting is about it
        trained = cell.train(fedtail.Family(tuple(map(where.method, thetas))), where.task, where.train, where.rounds)
    engine = fedtail.Engine(device=cell.device)
    return {settings.key(theta): settings.percent(fedtail.evaluate(module, where.test, engine=engine).error)
            for theta, module in zip(thetas, trained.modules, strict=True)}


def cells(plan: settings.Plan, seed: int) -> dict[str, Measure]:
    return {name: partial(measured, place=place) for name, place in PLACES.items()}


def values(results: Results, name: str, theta: float, statistic: str) -> list[float]:
    return results.values(name, f"{settings.key(theta)}.{statistic}")


def gaps(results: Results, name: str, theta: float, statistic: str, other: float = 1.0) -> list[float]:
    """One tail fraction less another, FedAvg by default, seed by seed."""
    return less(values(results, name, theta, statistic), values(results, name, other, statistic))


def tables(results: Results) -> list[Table]:
    return [Table(f"{said}: error of test clients, %", tuple(TITLES.values()), tuple(_rows(results, name)))
            for name, said in SAID.items()]


def _rows(results: Results, name: str) -> list[Row]:
    def row(title: str, theta: float, of: Callable) -> Row:
        return Row(title, {TITLES[s]: of(results, name, theta, s) for s in settings.STATISTICS})
    rows = [row("FedAvg", 1.0, values)]
    for theta in TAIL_FRACTIONS:
        rows += [row(method_name(theta), theta, values), row("less FedAvg", theta, gaps)]
    return rows


def _below(results: Results, name: str, pairs: Sequence[tuple[float, float]], statistics: Sequence[str]) -> Finding:
    """The first tail fraction of each pair has the lower error."""
    return all_of(*(lower(interval(gaps(results, name, one, s, other)), True, what=_what(s, one, other))
                    for s in statistics for one, other in pairs))


def _what(statistic: str, one: float, other: float) -> str:
    return f"{TITLES[statistic]}, {method_name(one)} less {method_name(other)},"


def _gain(name: str, thetas: Sequence[float], statistics: Sequence[str] = TAIL) -> Callable[[Results], Finding]:
    return partial(_below, name=name, pairs=[(theta, 1.0) for theta in thetas], statistics=statistics)


def _loss(name: str, thetas: Sequence[float], statistics: Sequence[str] = ("mean",)) -> Callable[[Results], Finding]:
    return partial(_below, name=name, pairs=[(1.0, theta) for theta in thetas], statistics=statistics)


def _mean_at_half(results: Results) -> Finding:
    return not_above(interval(gaps(results, DEMO, 0.5, "mean")), LITTLE, True, _what("mean", 0.5, 1.0))


def _more_than_half(results: Results, statistic: str) -> Finding:
    halves = [0.5 * gap for gap in gaps(results, DEMO, 0.25, statistic)]
    return lower(difference(gaps(results, DEMO, 0.5, statistic), halves), True,
                 what=f"{TITLES[statistic]} less FedAvg, theta 0.5 less half of theta 0.25,")


def _nothing_gained(results: Results) -> Finding:
    return all_of(*(not_above(interval(gaps(results, ALIKE, 1.0, s, theta)), SMALL, True, _what(s, 1.0, theta))
                    for s in TAIL for theta in TAIL_FRACTIONS))


def _gain_shrinks(results: Results) -> Finding:
    return all_of(*(lower(difference(gaps(results, DEMO, 0.25, s), gaps(results, FEW, 0.25, s)), True,
                          what=f"{TITLES[s]} less FedAvg, theta 0.25, 100 a round less {FEW_CLIENTS},") for s in TAIL))


HERE, SAME = "In the demo's setting", "Where clients are alike"
WRONG, EIGHT = "With a tenth of the training clients mislabelled", f"With {FEW_CLIENTS} clients a round"
WORDS: dict[str, Callable[[Results], Finding]] = {
    f"{HERE} the tail gains at every theta.": _gain(DEMO, TAIL_FRACTIONS),
    f"{HERE} the mean pays at theta = 0.25 and 0.1.": _loss(DEMO, (0.25, 0.1)),
    f"{HERE} the mean pays nothing to speak of at theta = 0.5.": _mean_at_half,
    f"{HERE} theta = 0.5 has over half of what 0.25 gains in the 90th percentile.": partial(_more_than_half, statistic="p90"),
    f"{HERE} theta = 0.5 has over half of what 0.25 gains in the worst 10%.": partial(_more_than_half, statistic="worst10"),
    f"{HERE} theta = 0.1 costs the mean more than 0.25.": partial(_below, name=DEMO, pairs=[(0.25, 0.1)], statistics=("mean",)),
    f"{HERE} theta = 0.1 gains the tail more than 0.25.": partial(_below, name=DEMO, pairs=[(0.1, 0.25)], statistics=TAIL),
    f"{SAME}, the mean pays at every theta.": _loss(ALIKE, TAIL_FRACTIONS),
    f"{SAME}, the tail loses at every theta.": _loss(ALIKE, TAIL_FRACTIONS, TAIL),
    f"{SAME}, the tail gains less than a point at any theta.": _nothing_gained,
    f"{WRONG}, the mean pays at every theta.": _loss(NOISY, TAIL_FRACTIONS),
    f"{WRONG}, the tail still gains at theta = 0.5 and 0.25.": _gain(NOISY, (0.5, 0.25)),
    f"{WRONG}, the tail loses at theta = 0.1.": _loss(NOISY, (0.1,), TAIL),
    f"{EIGHT}, the tail gains less at theta = 0.25 than with 100.": _gain_shrinks,
    f"{EIGHT}, the tail gains at theta = 0.25.": _gain(FEW, (0.25,)),
    f"{EIGHT}, the tail gains at theta = 0.1.": _gain(FEW, (0.1,)),
    f"{EIGHT}, the mean pays at theta = 0.25 and 0.1.": _loss(FEW, (0.25, 0.1)),
}


def notes(results: Results) -> list[str]:
    return [
        f"As in `fedtail demo`: {results.plan['train_clients']} training clients and a fifth as many to test, a linear model, "
        f"one full-gradient step of 0.1, {results.plan['rounds']} rounds. Rows \"less FedAvg\" are differences on the same "
        "clients and cohorts.",
        "A client has 100 examples, so that its error is a whole percent, and so nearly is a percentile over clients.",
        "Clients that are alike have label proportions from Dir(1000). Mislabelled clients, a tenth on average, have labels "
        "drawn uniformly; none of them is tested. A mistake that a model can learn: `fedtail reproduce flipped_labels`.",
        settings.AFTERWARDS,
    ]


WHERE_NOT = Study(
    name="where_not", paper="", item="where it does not help", title="Where training for the tail does not help",
    cost=Cost(1000, 6), full=settings.GENERATED, quick=replace(settings.GENERATED, seeds=3), cells=cells, tables=tables,
    notes=notes, claims=tuple(Claim(text, "[docs/ideas/where_it_does_not_help.md]", judge) for text, judge in WORDS.items()))
