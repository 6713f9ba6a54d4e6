"""DP-FTRL against amplified DP-FedAvg over epsilon: which to take where cohorts can, or cannot, be drawn in secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import fedtail
from fedtail.data import Splits, label_shift
from fedtail.models import SoftmaxRegression
from fedtail.privacy.calibration import noise_for
from fedtail.privacy.events import NoSampling, PoissonSampling
from fedtail.server import SGD
from fedtail_studies.adaptive_private.pages import below, draw_lines
from fedtail_studies.adaptive_private.training import finite
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

AMPLIFIED, CORRELATED, INDEPENDENT = "DP-FedAvg, amplified", "DP-FTRL", "DP-FedAvg, without amplification"
METHODS = (AMPLIFIED, CORRELATED, INDEPENDENT)
CLIP, RATE = 0.1, 0.1                                  # of updates, which are one full-gradient step of this length


@dataclass(frozen=True)
class TurnsPlan:
    """A thousand clients, a hundred a round; with turns each takes part in every tenth round."""

    seeds: int = 5
    clients: int = 1000
    pool: int = 200_000
    cohort: int = 100
    rounds: int = 200
    epsilons: tuple[float, ...] = (0.5, 2.0, 8.0, 32.0)
    delta: float = 1e-4
    server_rates: tuple[float, ...] = (0.5, 1.5, 5.0, 15.0)


@lru_cache(maxsize=1)
def clients(seed: int, count: int, pool: int) -> Splits:
    """[PLMH23, appendix D.2], with other clients to validate and to test."""
    return label_shift(seed, count, max(10, count // 10), max(10, count // 5), pool_size=pool)


@lru_cache(maxsize=64)
def noise(method: str, epsilon: float, plan: TurnsPlan) -> float:
    """The noise multiplier: of a round where cohorts are sampled in secret, else that of the whole run."""
    if method == AMPLIFIED:
        return noise_for(epsilon, plan.delta, plan.rounds, PoissonSampling(plan.cohort / plan.clients)).update
    return noise_for(epsilon, plan.delta, 1, NoSampling()).update


def algorithm(method: str, epsilon: float, plan: TurnsPlan, server_rate: float) -> fedtail.FederatedAlgorithm:
    """FedAvg with clipped updates and the noise of the method; a band of one round is independent noise."""
    local: dict[str, Any] = {"learning_rate": RATE, "batch_size": None}
    found = noise(method, epsilon, plan)
    if method == AMPLIFIED:
        made = fedtail.dp_fedavg(plan.clients, CLIP, found, plan.cohort, **local)
    else:
        made = fedtail.dp_ftrl(plan.clients, CLIP, found, plan.rounds, plan.cohort, 1 if method == INDEPENDENT else None, **local)
    return replace(made, server=SGD(server_rate))


def name_of(method: str, epsilon: float) -> str:
    return f"{method}, epsilon {epsilon:g}"


def run(cell: Cell, method: str, epsilon: float, server_rate: float, part: str) -> Numbers:
    """The mean error of clients, in percent, and epsilon on the ledger."""
    plan: TurnsPlan = cell.plan
    splits = clients(cell.seed, plan.clients, plan.pool)
    task = fedtail.Task(SoftmaxRegression(20, 10))
    trained = cell.train(algorithm(method, epsilon, plan, server_rate), task, splits.train, plan.rounds)
    error = fedtail.evaluate(trained, getattr(splits, part))["error"].mean()
    return {"test": finite(100 * float(error)), "spent": trained.ledger.guarantee(plan.delta).epsilon}


def searched(cell: Cell, method: str, epsilon: float) -> Numbers:
    """The server's learning rate with the lowest error of validation clients."""
    scores = [run(cell, method, epsilon, rate, "validation")["test"] for rate in cell.plan.server_rates]
    best = min(range(len(scores)), key=scores.__getitem__)
    return {"rate": cell.plan.server_rates[best], "scores": scores}


def measured(cell: Cell, method: str, epsilon: float) -> Numbers:
    """The error of test clients with the rate that was found."""
    rate = cell.numbers(f"settings: {name_of(method, epsilon)}", seed=0)["rate"]
    return run(cell, method, epsilon, rate, "test")


def cells(plan: TurnsPlan, seed: int) -> dict[str, Measure]:
    made: dict[str, Measure] = {}
    for epsilon in plan.epsilons:
        for method in METHODS:
            if seed == 0:
                made[f"settings: {name_of(method, epsilon)}"] = partial(searched, method=method, epsilon=epsilon)
            made[name_of(method, epsilon)] = partial(measured, method=method, epsilon=epsilon)
    return made


def tables(results: Results) -> list[Table]:
    """Errors, server rates and noise by epsilon."""
    epsilons = results.plan["epsilons"]
    titles = tuple(f"epsilon {epsilon:g}" for epsilon in epsilons)

    def rows(path: str, prefix: str = "") -> tuple[Row, ...]:
        return tuple(Row(method, {title: results.values(prefix + name_of(method, epsilon), path) if not prefix else
                                  [results.numbers(prefix + name_of(method, epsilon), 0)[path]]
                                  for title, epsilon in zip(titles, epsilons, strict=True)}) for method in METHODS)

    return [Table("Mean error of test clients, percent", titles, rows("test")),
            Table("Epsilon on the ledger", titles, rows("spent")),
            Table("Server learning rate chosen", titles, rows("rate", "settings: "))]


def figures(results: Results, folder: Path) -> list[Figure]:
    lines = {method: {epsilon: name_of(method, epsilon) for epsilon in results.plan["epsilons"]} for method in METHODS}
    return [draw_lines(results, folder, "epsilon.png", lines, ("epsilon", "mean error of test clients, %"),
                       "Bars are standard deviations over seeds.")]


def amplified_at_the_smallest(results: Results) -> Finding:
    epsilon = results.plan["epsilons"][0]
    return below(results, ((name_of(AMPLIFIED, epsilon), name_of(CORRELATED, epsilon)),), papers=True)


def correlated_at_the_largest(results: Results) -> Finding:
    epsilon = results.plan["epsilons"][-1]
    return below(results, ((name_of(CORRELATED, epsilon), name_of(AMPLIFIED, epsilon)),), papers=True)


def correlation_helps(results: Results) -> Finding:
    """At the two smallest epsilons, where noise matters."""
    return below(results, tuple((name_of(CORRELATED, epsilon), name_of(INDEPENDENT, epsilon))
                                for epsilon in results.plan["epsilons"][:2]), papers=True)


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    return [
        f"{plan['clients']} clients of [PLMH23, appendix D.2], a linear model, one full-gradient step of {RATE:g}, updates "
        f"clipped to {CLIP:g}, {plan['rounds']} rounds of {plan['cohort']} clients; delta {plan['delta']:g}, for a whole client.",
        "Amplified: Poisson sampling, whose cohorts must stay secret. The other two: clients take turns, each in every "
        f"{plan['clients'] // plan['cohort']}th round, and nothing is secret; noise is correlated over rounds by banded matrix "
        "factorisation, or independent. The server adds the noise in all three.",
        f"The server's learning rate is the best of {', '.join(f'{one:g}' for one in plan['server_rates'])} for clients to "
        "validate of the first seed, for each method and epsilon. A first run of 60 rounds had too little noise to tell.",
    ]


FTRL_AMPLIFIED = Study(
    name="ftrl_amplified", paper="", item="DP-FTRL and amplification", title="DP-FTRL against amplified DP-FedAvg",
    cost=Cost(200, 4), full=TurnsPlan(),
    quick=TurnsPlan(seeds=3, clients=300, pool=60_000, cohort=30, rounds=60, epsilons=(2.0, 32.0)), cells=cells,
    tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("At the smallest epsilon amplified DP-FedAvg has a lower error than DP-FTRL.", "[ours]", amplified_at_the_smallest),
        Claim("At the largest epsilon DP-FTRL has a lower error than amplified DP-FedAvg.", "[ours]", correlated_at_the_largest),
        Claim("Without amplification correlated noise has a lower error than independent noise.", "[ours]", correlation_helps),
    ),
)
