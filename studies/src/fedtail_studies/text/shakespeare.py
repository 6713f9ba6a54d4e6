"""Shakespeare by role: tables 2 and 3 and figures 11, 13, 15 of [LPMH21] for its recurrent model.

A client is a role, an example a window of 20 characters and the one that follows, of 53 classes (a-z, A-Z, anything else). As in
[LPMH21, Algorithm 2] clients below the quantile are filtered out. A role's windows may be thinned: the plan says to how many,
spread evenly over its text. What it weighs is the number it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

import fedtail
from fedtail.data import Population
from fedtail.models import CharacterGRU
from fedtail.training import Method
from fedtail_studies.compared import claims, courses, figures, pages
from fedtail_studies.compared.courses import Sides
from fedtail_studies.compared.methods import models
from fedtail_studies.compared.printed import as_table, beside, less
from fedtail_studies.compared.protocol import best_rate
from fedtail_studies.compared.rows import rows_of
from fedtail_studies.judging import all_of, lower, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Data, Finding, Measure, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table
from fedtail_studies.text.roles import CLASSES, ROLES, SHAKESPEARE_DATA, thinned

POOR = 1000                                      # windows; the paper names no number for Shakespeare
CLOSE = 0.5                                      # points of error: table 3 has 0.03 and 0.23

# Tables 2 and 3: 90th percentile and mean of the test error, %, with deviations over five seeds.
PRINTED = as_table({
    "FedAvg": ((46.45, 0.11), (42.90, 0.04)), "Delta-FL 0.8": ((46.33, 0.10), (42.93, 0.05)),
    "Delta-FL 0.5": ((46.32, 0.13), (43.13, 0.05)), "Delta-FL 0.1": ((47.17, 0.14), (44.18, 0.12)),
}, columns=("p90", "mean"))
HEAD = {"90th percentile": "test.p90", "mean": "test.mean"}
MORE = {"deviation over clients": "test.std", "10th percentile": "test.p10", "median": "test.p50", "worst 10%": "test.worst10",
        "worst 5%": "test.worst5", "best 10%": "test.best10"}


@dataclass(frozen=True)
class Plan:
    """Printed are 600 rounds with every window of a role; the rate is halved (or so) twice on the way."""

    seeds: int = 5
    rounds: int = 400
    cohort: int = 100
    batch: int = 16
    windows: int = 480                           # of a role at most
    hidden: int = 128
    roles: int = ROLES                           # at most
    learning_rates: tuple[float, ...] = (0.5, 1.0)
    decay: float = 0.5                           # of the rate, after every third of the rounds
    tuning_share: float = 0.25                   # of the rounds, when the rate is chosen
    tail_fractions: tuple[float, ...] = (0.8, 0.5, 0.1)
    look_every: int = 25


@lru_cache(maxsize=1)
def halves(data: Data, most_roles: int, most_windows: int, device: str) -> Sides:
    """The roles to train on and to test on, the same for every seed as in the paper, with thinned windows."""
    people: Population = data.population
    people = people if len(people) <= most_roles else people.split((most_roles / len(people),), 0)[0]
    train, test = (thinned(half, most_windows) for half in people.split((0.5, 0.5), 0))
    return Sides(train, test, POOR).to(device)


def sides_of(cell: Cell) -> Sides:
    assert cell.data is not None
    return halves(cell.data, cell.plan.roles, cell.plan.windows, cell.device)


def task_of(cell: Cell) -> fedtail.Task:
    torch.manual_seed(cell.seed)
    return fedtail.Task(CharacterGRU(CLASSES, cell.plan.hidden))


def recipe(name: str, cohort: int, local: dict[str, Any]) -> Method:
    if name == "FedAvg":
        return fedtail.fedavg(cohort, **local)
    return fedtail.delta_fl(float(name.removeprefix("Delta-FL ")), cohort, form="filter", **local)


def local(plan: Plan, rate: float, rounds: int) -> dict[str, Any]:
    schedule = fedtail.StepDecay(plan.decay, max(1, -(-rounds // 3)))
    return {"learning_rate": rate, "batch_size": plan.batch, "schedule": schedule}


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """The learning rate on the first seed, by FedAvg alone; then every method."""
    made: dict[str, Measure] = {}
    if seed == 0:
        made |= {f"learning rate {rate:g}": partial(try_rate, rate=rate) for rate in plan.learning_rates}
    return made | {name: partial(final, name=name) for name in models(plan)}


def try_rate(cell: Cell, rate: float) -> Numbers:
    plan: Plan = cell.plan
    train, rounds = sides_of(cell).train, max(1, round(plan.tuning_share * plan.rounds))
    algorithm = recipe("FedAvg", min(plan.cohort, len(train)), local(plan, rate, rounds))
    return courses.last_loss(cell, algorithm, task_of(cell), train, rounds)


def final(cell: Cell, name: str) -> Numbers:
    plan: Plan = cell.plan
    sides, rate = sides_of(cell), best_rate(cell)
    algorithm = recipe(name, min(plan.cohort, len(sides.train)), local(plan, rate, plan.rounds))
    _, seen = courses.followed(cell, algorithm, task_of(cell), sides, plan.rounds, plan.look_every, one_by_one=True)
    return {"settings": {"learning_rate": rate}, **seen}


def tables(results: Results) -> list[Table]:
    names = models(results.plan)
    return [Table("Error of test roles, %", tuple(HEAD), beside(rows_of(results, names, HEAD), PRINTED, HEAD),
                  "[LPMH21, tables 2 and 3]"), seed_by_seed(results),
            Table("More statistics of the same errors, %", tuple(MORE), rows_of(results, names, MORE)),
            pages.losses(results, "roles", names)]


def seed_by_seed(results: Results) -> Table:
    columns = tuple(f"seed {seed}" for seed in results.seeds)
    rows = tuple(Row(name, {column: [value] for column, value in zip(columns, results.values(name, "test.p90"), strict=True)})
                 for name in models(results.plan))
    return Table("The 90th percentile, seed by seed, %", columns, rows)


def mean_is_close(results: Results) -> Finding:
    """Not higher by more than a little: where it falls, so much the better."""
    return all_of(*(not_above(results.difference(f"Delta-FL {theta}", "FedAvg", "test.mean"), CLOSE, results.papers_data,
                              f"mean, theta {theta} less FedAvg,") for theta in ("0.8", "0.5")))


def small_theta_loses(results: Results) -> Finding:
    if 0.1 not in results.plan["tail_fractions"]:
        return Finding(Verdict.NOT_TESTABLE, "theta = 0.1 was not run")
    return all_of(*(lower(results.difference("FedAvg", "Delta-FL 0.1", path), results.papers_data,
                          less(PRINTED, "FedAvg", "Delta-FL 0.1", path.removeprefix("test.")), f"{what}, FedAvg less theta 0.1,")
                    for what, path in HEAD.items()))


def thinner_tail(results: Results) -> Finding:
    return all_of(*(lower(results.difference("Delta-FL 0.5", "FedAvg", path), results.papers_data, None,
                          f"{what}, theta 0.5 less FedAvg,")
                    for path, what in (("test.std", "deviation of the error over roles"), ("test.worst10", "worst 10%"))))


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    tried = ", ".join(f"{rate:g} ({pages.text(results.numbers(f'learning rate {rate:g}', 0)['loss'])})"
                      for rate in plan["learning_rates"])
    rate = pages.with_edge(results.numbers("FedAvg", results.seeds[0])["settings"]["learning_rate"], plan["learning_rates"])
    lost = [str(seed) for seed in results.seeds if results.numbers("FedAvg", seed)["test"]["mean"] > 70]
    made = [f"{plan['rounds']} rounds of {plan['cohort']} roles; printed are 600 of 100. A role has at most {plan['windows']} "
            "windows here, spread evenly over its text, and weighs as many as it had; the paper uses all of them. Errors are "
            "therefore higher than printed.",
            f"Learning rate {rate}, times {plan['decay']:g} after every third of the rounds, for all methods; chosen on the "
            f"first seed by the training loss of FedAvg after a share {plan['tuning_share']:g} of the rounds: {tried}. The "
            "paper's grid is not printed; its decay is one of 1/8, 1/4, 1/2, 1.",
            "The halves of the roles are the same for every seed, as in the paper; seeds differ in the start, cohorts and "
            "batches, so that intervals are about training, not about roles."]
    if plan["roles"] < ROLES:
        made.append(f"At most {plan['roles']} of the roles are used, drawn at random.")
    if lost:
        made.append(f"Seed {', '.join(lost)}: training fell apart early, for FedAvg and the others alike, at the rate that "
                    "was chosen on the first seed. It is kept, and makes most intervals so wide that nothing can be told.")
    return made


SHAKESPEARE = Study(
    name="shakespeare", paper="LPMH21", item="tables 2, 3, figures 11, 13, 15 (Shakespeare)",
    title="A recurrent model for Shakespeare", cost=Cost(400, 2400, 45), full=Plan(),
    quick=Plan(seeds=3, rounds=40, cohort=20, windows=160, hidden=32, roles=200, learning_rates=(2.0,), look_every=10),
    cells=cells, tables=tables, data=SHAKESPEARE_DATA, notes=notes,
    figures=partial(figures.figures, unit="windows that were used", sources=(
        "figure 13 of [LPMH21]", "figure 15 of [LPMH21]", "figure 11 of [LPMH21]", "figure 16 of [LPMH21] has it for EMNIST")),
    claims=(
        Claim("The 90th percentile falls with theta = 0.8.", "[LPMH21, table 2]",
              partial(claims.p90_falls, method="Delta-FL 0.8", printed=PRINTED)),
        Claim("The 90th percentile falls with theta = 0.5.", "[LPMH21, table 2]",
              partial(claims.p90_falls, method="Delta-FL 0.5", printed=PRINTED)),
        Claim("The mean is on par at theta = 0.8 and 0.5, or better.", "[LPMH21, table 3]", mean_is_close),
        Claim("theta = 0.1 is worse than FedAvg in both.", "[LPMH21, tables 2 and 3]", small_theta_loses),
        Claim("The distribution over test roles has a thinner upper tail.", "[LPMH21, figure 13]", thinner_tail),
        Claim("The loss varies less over training roles.", "[LPMH21, figure 15]", claims.loss_varies_less),
        Claim("Delta-FL is not slower than FedAvg by rounds.", "[LPMH21, figures 6 and 11]",
              partial(claims.as_fast, reach=CLOSE)),
        Claim("The number of clients that pass the filter is stable.", "[LPMH21, figure 16, for EMNIST]", claims.stable_count),
    ),
)
