"""What privacy costs the tail where clients are few: the setting of `docs/howto/private-training.md`.

A thousand clients and a hundred rounds, settings fixed beforehand. The papers' setting, with settings that were searched for, is
`private_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import fedtail
from fedtail_studies.judging import all_of, at_most, difference, lower, not_above
from fedtail_studies.private.runs import Budget, Clients, Settings
from fedtail_studies.questions import settings
from fedtail_studies.questions.settings import TITLES, less
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

BINS = 32
ALL, TAIL = settings.STATISTICS, settings.STATISTICS[1:]
SMALL = 1.0                                      # point of error by which an advantage may shrink and is kept


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    rounds: int = 100
    train_clients: int = 1000
    pool: int = 160_000
    tail_fraction: float = 0.5
    epsilon: float = 5.0
    delta: float = 1e-4
    clip_norm: float = 0.1
    other_clip_norms: tuple[float, ...] = (0.05, 0.2, 1.0)
    quantile_ratio: float = 0.25
    loss_bound: float = 4.0

    @property
    def budget(self) -> Budget:
        return Budget(self.epsilon, self.delta)

    def delta_fl(self, clip_norm: float) -> Settings:
        return Settings(self.tail_fraction, clip_norm, self.quantile_ratio, self.loss_bound, BINS)


FEDAVG, DELTA_FL, DP_FEDAVG, DP_DELTA_FL = "FedAvg", "Delta-FL", "DP-FedAvg", "DP-Delta-FL"


def with_norm(clip_norm: float) -> str:
    return f"{DP_DELTA_FL} with C = {clip_norm:g}"


def measured(cell: Cell, made: Settings, budget: Budget) -> Numbers:
    """Error over the test clients; what the ledger says the run has cost."""
    where = settings.generated_clients(cell)
    clients = Clients(len(where.train), len(where.test), where.cohort, cell.plan.pool)
    trained = cell.train(made.algorithm(budget, clients, where.rounds), where.task, where.train, where.rounds)
    engine = fedtail.Engine(device=cell.device)
    found: Numbers = {"test": settings.percent(fedtail.evaluate(trained, where.test, engine=engine).error)}
    return found | {"spent": trained.ledger.guarantee(budget.delta).epsilon} if budget.private else found


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    free = {FEDAVG: Settings(1.0), DELTA_FL: Settings(plan.tail_fraction)}
    private = {DP_FEDAVG: Settings(1.0, plan.clip_norm), DP_DELTA_FL: plan.delta_fl(plan.clip_norm),
               **{with_norm(norm): plan.delta_fl(norm) for norm in plan.other_clip_norms}}
    return {**{name: partial(measured, made=made, budget=Budget()) for name, made in free.items()},
            **{name: partial(measured, made=made, budget=plan.budget) for name, made in private.items()}}


def tables(results: Results) -> list[Table]:
    plan = results.plan
    theta, epsilon = f"θ = {plan['tail_fraction']:g}", f"ε = {plan['epsilon']:g}"
    methods = {FEDAVG: FEDAVG, f"{DELTA_FL}, {theta}": DELTA_FL, f"{DP_FEDAVG}, {epsilon}": DP_FEDAVG,
               f"{DP_DELTA_FL}, {theta}, {epsilon}": DP_DELTA_FL}
    norms = {plan["clip_norm"]: DP_DELTA_FL, **{norm: with_norm(norm) for norm in plan["other_clip_norms"]}}
    return [_table(results, "What it costs", methods, "error, %"),
            _table(results, f"{DP_DELTA_FL} with other clip norms C", {f"{norm:g}": norms[norm] for norm in sorted(norms)}, "C"),
            _differences(results, ((DELTA_FL, FEDAVG), (DP_DELTA_FL, DP_FEDAVG), (DP_FEDAVG, FEDAVG), (DP_DELTA_FL, DELTA_FL),
                                   *((with_norm(norm), DP_DELTA_FL) for norm in plan["other_clip_norms"])))]


def _table(results: Results, title: str, names: dict[str, str], head: str) -> Table:
    rows = [Row(said, {TITLES[s]: results.values(name, f"test.{s}") for s in ALL}) for said, name in names.items()]
    return Table(title, tuple(TITLES.values()), tuple(rows), digits=1, head=head)


def _differences(results: Results, pairs: Sequence[tuple[str, str]]) -> Table:
    rows = [Row(f"{one} less {other}", {TITLES[s]: gaps(results, one, other, s) for s in ALL}) for one, other in pairs]
    return Table("Differences on the same seeds, points", tuple(TITLES.values()), tuple(rows), digits=1, head="difference")


def gaps(results: Results, one: str, other: str, statistic: str) -> list[float]:
    """One cell less another, seed by seed."""
    return less(results.values(one, f"test.{statistic}"), results.values(other, f"test.{statistic}"))


def _lower(results: Results, one: str, other: str, statistics: Sequence[str]) -> Finding:
    """One cell has the lower error."""
    return all_of(*(lower(results.difference(one, other, f"test.{s}"), True, what=f"{TITLES[s]}, {one} less {other},")
                    for s in statistics))


def _both(results: Results, statistics: Sequence[str]) -> Finding:
    return all_of(*(_lower(results, free, f"DP-{free}", statistics) for free in (FEDAVG, DELTA_FL)))


def _advantage_is_kept(results: Results, statistic: str) -> Finding:
    free, private = (gaps(results, f"{noise}{DELTA_FL}", f"{noise}{FEDAVG}", statistic) for noise in ("", "DP-"))
    what = f"{TITLES[statistic]}, Delta-FL less FedAvg, with noise less without,"
    return not_above(difference(private, free), SMALL, True, what)


def _promise_is_kept(results: Results) -> Finding:
    private = [name for name in results.cells[results.seeds[0]] if name.startswith("DP-")]
    spent = max(value for name in private for value in results.values(name, "spent"))
    return at_most(spent, results.plan["epsilon"], "the most that a run has spent")


def _claim(text: str, judge: Callable[..., Finding], **given: Any) -> Claim:
    return Claim(text, "[docs/howto/private-training.md]", partial(judge, **given))


CLAIMS = (
    _claim("At epsilon 5 the tail at theta = 0.5 is below that of FedAvg.", _lower, one=DP_DELTA_FL, other=DP_FEDAVG,
           statistics=TAIL),
    _claim("The advantage in the 90th percentile is kept: it is no smaller with noise.", _advantage_is_kept, statistic="p90"),
    _claim("The advantage in the worst 10% is kept: it is no smaller with noise.", _advantage_is_kept, statistic="worst10"),
    _claim("The tail at theta = 0.5 and epsilon 5 is below that of FedAvg without noise.", _lower, one=DP_DELTA_FL, other=FEDAVG,
           statistics=TAIL),
    _claim("Privacy costs both methods: mean and tail are higher with noise.", _both, statistics=ALL),
    _claim("A clip norm of 0.05 is too small: mean and tail are higher than with 0.1.", _lower, one=DP_DELTA_FL,
           other=with_norm(0.05), statistics=ALL),
    _claim("A clip norm of 1 is too large: the mean is higher than with 0.1.", _lower, one=DP_DELTA_FL, other=with_norm(1.0),
           statistics=("mean",)),
    _claim("A clip norm of 1 is too large: the tail is higher than with 0.1.", _lower, one=DP_DELTA_FL, other=with_norm(1.0),
           statistics=TAIL),
    _claim("No run spends more than was promised.", _promise_is_kept),
)


def notes(results: Results) -> list[str]:
    plan = results.plan
    return [
        f"Clients as in appendix D.2 of [PLMH23], {plan['train_clients']} to train and a fifth as many to test, drawn anew for "
        f"every seed; a linear model, one full-gradient step of 0.1, {plan['rounds']} rounds, 100 clients a round (on average, "
        "with noise). Deviations are mostly those of the clients drawn, which all methods of a seed share.",
        f"Delta = {plan['delta']:g}, Poisson sampling, zero-out adjacency, priced by privacy loss distributions; the histogram "
        f"of losses, up to {plan['loss_bound']:g}, costs {plan['quantile_ratio']:g} of what the update costs (r). Noise comes "
        "from the seed: a simulated guarantee. No guarantee of one run covers the table of clip norms.",
        settings.AFTERWARDS,
        "The papers' setting, 2500 clients and 1000 rounds at several epsilons: `fedtail reproduce private_training`.",
    ]


PRIVATE_COST = Study(
    name="private_cost", paper="", item="what privacy costs", title="What privacy costs, on a thousand clients",
    cost=Cost(100, 1), full=Plan(), quick=Plan(seeds=3), cells=cells, tables=tables, notes=notes, claims=CLAIMS)
