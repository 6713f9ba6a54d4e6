"""How fast q-FedAvg, q-FedSGD and a tuned FedSGD solve q-FFL: figures 4.4 and 4.10 of [Li23] on three synthetic data sets.

q-FedAvg and q-FedSGD use steps that were tuned at q = 0; FedSGD descends on the same objective with one fixed step, tuned for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedtail
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.data import Population, synthetic, synthetic_hybrid, synthetic_iid
from fedtail.questions import Train
from fedtail.training import Progress
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.fair.protocol import Parts, by_size, objective, three_parts
from fedtail_studies.fair.synthetic import logistic_task
from fedtail_studies.judging import all_of, difference, interval, lower, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

SETS = ("IID", "hybrid", "(1, 1)")
METHODS = ("q-FedAvg", "q-FedSGD", "FedSGD")
DIVERGED = 100.0                                       # an objective far above that of zero, which is ln(10)^2 / 2 for q = 1
SIMILAR = 1.1                                          # times the objective: similar, or better


@dataclass(frozen=True)
class Plan:
    """How much is run, and which steps are tried."""

    seeds: int = 5
    devices: int = 100
    power: float = 1.0
    cohort: int = 10
    batch: int = 10
    rounds: int = 300
    every: int = 20
    steps: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)      # tried: FedSGD at q, the others at q = 0
    tuning_rounds: int = 100


@dataclass(frozen=True)
class MeanGradient(fedtail.WeightedMean):
    """sum_k mass_k F_k^q update_k / sum_k mass_k: a fixed step along the gradient of the q-FFL objective, eq. (4.1).

    A client whose loss is zero does not train, and is left out of both sums.
    """

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (mass, mass F^q update), (clients, dim + 1) float64.

        The density of `PowerFair` is (F / largest)^q, and the largest loss is its dual.
        """
        mass = weighted.mass.to(updates.device).double()[:, None]
        lifted = weighted.density.double() * float(train.dual[0]) ** train.risk.power
        return torch.cat([mass, mass * lifted.to(updates.device)[:, None] * updates.double()], 1)


@lru_cache(maxsize=3)
def drawn_parts(kind: str, devices: int, seed: int) -> Parts:
    """One of figure 4.10's data sets, drawn and split by the seed."""
    made: dict[str, Any] = {"IID": synthetic_iid, "hybrid": partial(synthetic_hybrid, 1.0, 1.0),
                            "(1, 1)": partial(synthetic, 1.0, 1.0)}
    people: Population = made[kind](clients=devices, seed=seed, sizes="moderate")
    return three_parts(people, seed)


def algorithm(plan: Plan, method: str, power: float, step: float) -> fedtail.FederatedAlgorithm:
    """A solver of q-FFL; `step` is that of local work or of a gradient, and 1 / L."""
    if method == "q-FedAvg":
        return by_size(power, plan.cohort, learning_rate=step, batch_size=plan.batch, epochs=1)
    one = by_size(power, plan.cohort, learning_rate=step, batch_size=None, local_steps=1)
    return one if method == "q-FedSGD" else replace(one, aggregate=MeanGradient())


def tuned(cell: Cell, kind: str, method: str, power: float) -> Numbers:
    """The objective after some rounds for each step of the grid, and the step with the lowest."""
    plan, found = cell.plan, {}
    parts = drawn_parts(kind, plan.devices, cell.seed)
    for step in plan.steps:
        trained = cell.train(algorithm(plan, method, power, step), logistic_task(), parts.train, plan.tuning_rounds)
        found[_key(step)] = objective(trained, parts.train, power, cell.device)
    return {"objective": found, "best": min(plan.steps, key=lambda step: shown(found[_key(step)]))}


def _key(step: float) -> str:
    """A step as a name in results, which may hold no dot."""
    return f"{step:g}".replace(".", "_")


def solved(cell: Cell, kind: str, method: str) -> Numbers:
    """The course of the q-FFL objective on the training samples."""
    plan: Plan = cell.plan
    parts = drawn_parts(kind, plan.devices, cell.seed)
    step = cell.numbers(f"{kind}, step of {method}", 0)["best"]
    rounds: list[int] = []
    values: list[float] = []

    def look(progress: Progress) -> None:
        """Read the objective where a reading is due."""
        if progress.round % plan.every == 0:
            rounds.append(progress.round)
            values.append(objective(progress.trained, parts.train, plan.power, cell.device))

    cell.train(algorithm(plan, method, plan.power, step), logistic_task(), parts.train, plan.rounds, look)
    return {"step": step, "round": rounds, "objective": values, "last": values[-1], "area": float(np.mean(np.log(values)))}


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """Steps on the first seed; then every solver."""
    made: dict[str, Measure] = {}
    for kind in SETS:
        if seed == 0:
            made |= {f"{kind}, step of {method}": partial(tuned, kind=kind, method=method,
                                                          power=plan.power if method == "FedSGD" else 0.0) for method in METHODS}
        made |= {f"{kind}, {method}": partial(solved, kind=kind, method=method) for method in METHODS}
    return made


# the page


def tables(results: Results) -> list[Table]:
    """The objective in the end by solver, and what each step tried came to."""
    plan, columns = results.plan, {"objective in the end": "last", "step": "step"}
    rows = [Row(f"{kind}, {method}", {title: results.values(f"{kind}, {method}", key) for title, key in columns.items()})
            for kind in SETS for method in METHODS]
    tried = {f"{kind}, {method}": results.numbers(f"{kind}, step of {method}", 0) for kind in SETS for method in METHODS}
    steps = [Row(name, {f"step {step:g}": [shown(found["objective"][_key(step)])] for step in plan["steps"]})
             for name, found in tried.items()]
    return [Table("The q-FFL objective over training devices", tuple(columns), tuple(rows), digits=3, head="solver"),
            Table(f"Steps: the objective after {plan['tuning_rounds']} rounds on the first seed; that of q = 0 but for FedSGD",
                  tuple(f"step {step:g}" for step in plan["steps"]), tuple(steps), digits=3, head="solver")]


def shown(value: float | None) -> float:
    """An objective for a table: infinite where a run has diverged."""
    return value if value is not None and value <= DIVERGED else math.inf


def ratio(results: Results, kind: str, method: str, other: str) -> list[float]:
    """The objective in the end by one solver over that by another, seed by seed."""
    ends = (results.values(f"{kind}, {name}", "last") for name in (method, other))
    return [first / second for first, second in zip(*ends, strict=True)]


def local_work_is_faster(results: Results, kind: str) -> Finding:
    """On data of this kind q-FedAvg is ahead of q-FedSGD on the way and in the end."""
    return _ahead(results, kind, "q-FedAvg", "q-FedSGD")


def local_work_is_slower(results: Results, kind: str) -> Finding:
    """On data of this kind q-FedAvg is behind q-FedSGD on the way and in the end."""
    return _ahead(results, kind, "q-FedSGD", "q-FedAvg")


def _ahead(results: Results, kind: str, first: str, second: str) -> Finding:
    """Whether a solver has the smaller objective in the end, and the smaller mean of its logarithm over the rounds."""
    ends = interval([float(np.log(value)) for value in ratio(results, kind, first, second)])
    way = results.difference(f"{kind}, {first}", f"{kind}, {second}", "area")
    return all_of(lower(ends, True, what=f"{kind}, logarithm of the objective in the end, {first} less {second},"),
                  lower(way, True, what=f"{kind}, its mean over the rounds,"))


def transfer_is_as_good(results: Results) -> Finding:
    """q-FedSGD with the step of q = 0 ends as low as FedSGD with its own best step, to a tenth."""
    return all_of(*(not_above(interval(ratio(results, kind, "q-FedSGD", "FedSGD")), SIMILAR, True,
                              f"{kind}, objective in the end, q-FedSGD over FedSGD,") for kind in SETS))


def heterogeneity_hurts(results: Results) -> Finding:
    """q-FedAvg's lead over q-FedSGD shrinks from IID to hybrid to (1, 1)."""
    leads = {kind: [float(np.log(value)) for value in ratio(results, kind, "q-FedAvg", "q-FedSGD")] for kind in SETS}
    return all_of(*(lower(difference(leads[less], leads[more]), True,
                          what=f"log ratio of the objectives, q-FedAvg over q-FedSGD, {less} less {more},")
                    for less, more in pairwise(SETS)))


def figures(results: Results, folder: Path) -> list[Figure]:
    """The objective by round, a panel for each data set."""
    with drawn(folder / "solvers.png", columns=len(SETS), width=4.2) as axes:
        for axis, kind in zip(axes, SETS, strict=True):
            for method, colour in zip(METHODS, COLOURS, strict=False):
                found = np.asarray(results.lists(f"{kind}, {method}", "objective"))
                rounds = results.numbers(f"{kind}, {method}", results.seeds[0])["round"]
                axis.plot(rounds, found.mean(0), color=colour, label=method)
                axis.fill_between(rounds, found.min(0), found.max(0), color=colour, alpha=0.15, linewidth=0)
            axis.set(title=f"Synthetic, {kind}", xlabel="rounds", yscale="log")
        axes[0].set_ylabel("q-FFL objective, training devices")
        axes[0].legend()
    return [Figure("solvers.png", "The objective round by round, mean and range over seeds, as figures 4.4 and 4.10.")]


def _at_the_edge(results: Results) -> str:
    """The solvers whose step is the smallest or the largest that was tried, by data set."""
    ends = (min(results.plan["steps"]), max(results.plan["steps"]))
    names = [f"{kind}, {method}" for kind in SETS for method in METHODS]
    return "; ".join(name for name in names if results.numbers(name, results.seeds[0])["step"] in ends)


def notes(results: Results) -> Sequence[str]:
    """What the solvers are."""
    plan = results.plan
    return [
        f"q = {plan['power']:g}, {plan['cohort']} of {plan['devices']} devices a round, drawn by size, {plan['rounds']} "
        f"rounds; q-FedAvg takes an epoch of batches of {plan['batch']}, the others one full gradient. All see the same "
        "cohorts. Steps were chosen on the first seed, those of q-FedAvg and q-FedSGD at q = 0 (0.1 is printed for q-FedAvg on "
        "Synthetic).",
        "A first run gave q-FedAvg the printed step on every data set and tried FedSGD with no step below 0.1, with which it "
        "diverges on heterogeneous devices; that comparison said nothing, and steps are now chosen for all three. "
        "Two of the seeds were added after the results of the others.",
        f"At an end of the grid: {_at_the_edge(results) or 'none'}.",
        "FedSGD is `MeanGradient`, an aggregator of this study: the plain gradient of eq. (4.1) over the cohort times one "
        "step.",
        "The figures have the loss on four data sets; Vehicle, Sent140 and Shakespeare are not drawn here.",
    ]


FAIR_EFFICIENCY = Study(
    name="fair_efficiency", paper="Li23", item="figures 4.4 and 4.10", title="How fast q-FFL is solved", cost=Cost(300, 4),
    full=Plan(),
    quick=Plan(seeds=2, rounds=100, tuning_rounds=40, steps=(0.01, 0.1, 1.0)), cells=cells, tables=tables, figures=figures,
    notes=notes,
    claims=(
        Claim("On IID data q-FedAvg is faster in rounds than q-FedSGD.", "[Li23, figure 4.10]",
              partial(local_work_is_faster, kind="IID")),
        Claim("On Synthetic(1, 1) q-FedAvg is slower in rounds than q-FedSGD.", "[Li23, figures 4.4 and 4.10]",
              partial(local_work_is_slower, kind="(1, 1)")),
        Claim("As data become more heterogeneous q-FedAvg loses ground to q-FedSGD.", "[Li23, figure 4.10]", heterogeneity_hurts),
        Claim("q-FedSGD with the step of q = 0 does as well as FedSGD with its own best step, to a tenth.",
              "[Li23, figures 4.4 and 4.10]", transfer_is_as_good),
    ),
)
