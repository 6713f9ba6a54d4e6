"""Every method of [PLMH23, section 7.2] with its tuning, one cell for each, on any clients and model.

As printed the power of q-FFL, the tilt and the fraction of FedAvg-Sub are chosen on test clients; so every value is run to the
end, and beside it on half of the training clients, judged on the other half, by which they should be chosen. lambda and mu are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fedtail
from fedtail.data import Population
from fedtail.evaluation.finetune import FineTuned
from fedtail.training import Trained
from fedtail_studies.compared import courses
from fedtail_studies.compared.courses import Sides
from fedtail_studies.compared.methods import (
    methods,
    models,
    percent,
    periods,
    powers,
    quiet_about_small_tails,
    recipe,
    subs,
    tails,
    tilts,
)
from fedtail_studies.study import Cell, Measure, Numbers

PERSONAL_EPOCHS = 10
POWERS = (0.001, 0.01, 0.1, 1.0, 10.0)           # the grids as printed, section C.2
TILTS = (0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 200.0)
PROXIMAL = (1.0, 0.1, 0.01, 0.001)
LAMBDAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


@dataclass(frozen=True)
class Plan:
    """`visits` is how often a training client takes part on average."""

    seeds: int = 5
    visits: float = 100.0
    cohort: int = 100
    batch: int = 10
    learning_rates: tuple[float, ...] = (0.1,)
    decay: float = 1.0                           # of the rate, every so often
    decay_every: float = 1.0                     # share of the rounds
    tail_fractions: tuple[float, ...] = (0.8, 0.5, 0.1)
    powers: tuple[float, ...] = (0.1, 1.0, 10.0)               # q-FFL; the last is also AFL
    tilts: tuple[float, ...] = (0.1, 1.0, 5.0)
    proximal: tuple[float, ...] = (1.0, 0.1, 0.01)             # mu
    lambdas: tuple[float, ...] = ()                            # l2 regularisation, for linear models
    periods: tuple[int, ...] = ()                              # rounds between two thresholds at theta = 0.5, T_eta
    rate_share: float = 0.25                                   # of the visits, when the learning rate is chosen
    tuning_share: float = 0.25                                 # of the visits, when other settings are
    clients: int = 865                                         # to train on and to test on, at most
    looks: int = 20                                            # at a run on its way


@dataclass(frozen=True)
class Field:
    """Where methods are compared: the clients of a cell, the model, whose clients are kept one by one besides those of FedAvg and
    Delta-FL, and whether to personalise."""

    sides: Callable[[Cell], Sides]
    task: Callable[[Cell], fedtail.Task]
    also_drawn: tuple[str, ...] = ()
    personal: bool = False

    def cells(self, plan: Plan, seed: int) -> dict[str, Measure]:
        """The learning rate, for the first seed; for every seed its tuning on half of the training clients, then every method."""
        made: dict[str, Measure] = {}
        if seed == 0:
            made |= {f"learning rate {rate:g}": partial(try_rate, self, rate=rate) for rate in plan.learning_rates}
        made |= {tuning(name, "lambda", decay): partial(tune, self, method=name, decay=decay)
                 for name in models(plan) for decay in plan.lambdas}
        made |= {tuning("FedProx", "mu", mu): partial(tune, self, method="FedProx", strength=mu) for mu in plan.proximal}
        made |= {f"tuning {name}": partial(tune, self, method=name) for name in (*powers(plan), *tilts(plan), *subs(plan))}
        return made | {name: partial(final, self, method=name) for name in (*methods(plan), *periods(plan))}


def tuning(method: str, what: str, value: float) -> str:
    return f"tuning {method}, {what} {value:g}"


def rounds_of(plan: Plan, clients: int, cohort: int, share: float = 1.0) -> int:
    """As many as give every client its visits; FedAvg-Sub, with fewer clients a round, gets no more."""
    return max(1, round(share * plan.visits * clients / cohort))


def local(plan: Plan, rate: float, rounds: int, decay: float = 0.0) -> dict[str, Any]:
    schedule = fedtail.StepDecay(plan.decay, max(1, round(plan.decay_every * rounds)))
    return {"learning_rate": rate, "batch_size": plan.batch, "schedule": schedule, "weight_decay": decay}


def try_rate(at: Field, cell: Cell, rate: float) -> Numbers:
    """The mean training loss FedAvg ends with, by which the paper chooses the learning rate of all methods."""
    train = at.sides(cell).train
    cohort = min(cell.plan.cohort, len(train))
    rounds = rounds_of(cell.plan, len(train), cohort, cell.plan.rate_share)
    return courses.last_loss(cell, recipe("FedAvg", cohort, local(cell.plan, rate, rounds)), at.task(cell), train, rounds)


def tune(at: Field, cell: Cell, method: str, decay: float | None = None, strength: float = 0.0) -> Numbers:
    """Train on one half of the training clients, look at the error on the other [PLMH23, section C.2]."""
    train, held = at.sides(cell).train.split((0.5, 0.5), cell.seed)
    cohort = min(-(-cell.plan.cohort // 2), len(train))
    rounds = rounds_of(cell.plan, len(train), cohort, cell.plan.tuning_share)
    decay = best_decay(cell, "FedAvg") if decay is None else decay
    algorithm = recipe(method, cohort, local(cell.plan, best_rate(cell), rounds, decay), strength)
    with quiet_about_small_tails():
        trained = cell.train(algorithm, at.task(cell), train, rounds)
    error = fedtail.evaluate(trained, held, engine=fedtail.Engine(device=cell.device)).error
    return {"validation": percent(error, ("p90", "mean"))}


def final(at: Field, cell: Cell, method: str) -> Numbers:
    """Train with the chosen settings, look at the test clients, on the way too."""
    sides, rate, decay = at.sides(cell), best_rate(cell), best_decay(cell, method)
    strength = best_strength(cell) if method == "FedProx" else 0.0
    cohort = min(cell.plan.cohort, len(sides.train))
    rounds = rounds_of(cell.plan, len(sides.train), cohort)
    algorithm = recipe(method, cohort, local(cell.plan, rate, rounds, decay), strength)
    drawn = method in (*models(cell.plan), *at.also_drawn)
    trained, seen = courses.followed(cell, algorithm, at.task(cell), sides, rounds, max(1, rounds // cell.plan.looks), drawn)
    found = {"settings": {"learning_rate": rate, "lambda": decay, "mu": strength, "rounds": rounds}, **seen}
    if at.personal and method in models(cell.plan):
        found["personal"] = personal(trained, sides.test, cell, rounds)
    return found


def personal(trained: Trained, test: Population, cell: Cell, rounds: int) -> Numbers:
    """Ten epochs on half of a client's examples, judged on the other half [PLMH23, section 7.5].

    At the last rate, as printed; where that is a smaller one than the first, at the first too.
    """
    local = trained.algorithm.members[0].local
    if not isinstance(local, fedtail.LocalSGD):
        raise TypeError(f"these methods train by LocalSGD, got {type(local).__name__}.")
    first, last = local.learning_rate, local.rate(rounds - 1)

    def tuned(rate: float) -> FineTuned:
        way = replace(local, learning_rate=rate, epochs=PERSONAL_EPOCHS, schedule=fedtail.Constant())
        return fedtail.finetune(trained, test, way, seed=cell.seed, engine=fedtail.Engine(device=cell.device))
    own = tuned(last)
    found = {when: percent(getattr(own, when).error, ("mean", "p90")) for when in ("before", "after")}
    return found | ({"first_rate": percent(tuned(first).after.error, ("mean", "p90"))} if first != last else {})


def best_rate(cell: Cell) -> float:
    """The learning rate with which FedAvg ended lowest, on the first seed."""
    return min(cell.plan.learning_rates, key=lambda rate: _or_infinity(cell.numbers(f"learning rate {rate:g}", 0)["loss"]))


def best_decay(cell: Cell, method: str) -> float:
    """lambda of FedAvg, and of Delta-FL by theta; other methods take FedAvg's."""
    if not cell.plan.lambdas:
        return 0.0
    name = method.partition(",")[0]
    name = name if name in tails(cell.plan) else "FedAvg"
    return min(cell.plan.lambdas, key=lambda decay: score(cell, tuning(name, "lambda", decay)))


def best_strength(cell: Cell) -> float:
    return min(cell.plan.proximal, key=lambda mu: score(cell, tuning("FedProx", "mu", mu)))


def score(cell: Cell, name: str) -> tuple[float, float]:
    found = cell.numbers(name)["validation"]
    return _or_infinity(found["p90"]), _or_infinity(found["mean"])


def _or_infinity(value: float | None) -> float:
    return float("inf") if value is None else value
