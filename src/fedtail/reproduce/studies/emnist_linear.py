"""The linear model on FEMNIST: every method of [PLMH23, section 7.2] with its tuning, one cell for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fedtail
from fedtail.algorithm import FederatedAlgorithm
from fedtail.data import Population
from fedtail.evaluation import Distribution
from fedtail.models import SoftmaxRegression
from fedtail.reproduce.studies.femnist import classes, writers
from fedtail.reproduce.study import Cell, Measure, Numbers

STATISTICS = ("mean", "std", "p10", "p50", "p90", "worst10", "worst5", "best10")
SMALL = 200                                      # images: fewer is a data-poor client, section 7.4
PERSONAL_EPOCHS = 10
DRAWN = ("FedAvg", "Delta-FL", "Tilted-ERM 1", "q-FFL 1")      # whose clients are kept one by one, for the figures


@dataclass(frozen=True)
class Plan:
    """`visits` is how often a training client takes part on average; printed are 3000 rounds of 100 of 865, 347 visits.

    With fewer visits a constant rate that gets anywhere is too large for a tail of few clients to settle; so it falls along a
    `cosine` to zero. As printed is visits = 347, cosine = False.
    """

    seeds: int = 5
    visits: float = 30.0
    cosine: bool = True
    cohort: int = 100
    batch: int = 10
    learning_rates: tuple[float, ...] = (0.03, 0.1, 0.3)
    tail_fractions: tuple[float, ...] = (0.8, 0.5, 0.1)
    powers: tuple[float, ...] = (0.1, 1.0, 10.0)               # q-FFL; the last is also AFL
    tilts: tuple[float, ...] = (0.5, 1.0, 5.0)
    proximal: tuple[float, ...] = (0.1, 0.01)                  # mu
    decays: tuple[float, ...] = (1e-3, 1e-5)                   # lambda
    tuning_share: float = 0.25                                 # of the visits, when lambda, mu, q and tilt are chosen


def recipe(name: str, cohort: int, settings: dict[str, Any], strength: float = 0.0) -> FederatedAlgorithm:
    """A method by its name in the tables: "FedAvg-Sub 0.5", "q-FFL 0.1", "Delta-FL 0.8", ..."""
    kind, _, number = name.partition(" ")
    made: dict[str, Callable[[], FederatedAlgorithm]] = {
        "FedAvg": lambda: fedtail.fedavg(cohort, **settings), "AFL": lambda: fedtail.q_ffl(10.0, cohort, **settings),
        "FedAvg-Sub": lambda: fedtail.fedavg_sub(float(number), cohort, **settings),
        "FedProx": lambda: fedtail.fedprox(strength, cohort, **settings),
        "q-FFL": lambda: fedtail.q_ffl(float(number), cohort, **settings),
        "Tilted-ERM": lambda: fedtail.term(float(number), cohort, **settings),
        "Delta-FL": lambda: fedtail.delta_fl(float(number), cohort, **settings)}
    return made[kind]()


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """The learning rate, for the first seed; for every seed its tuning on half of the training writers, then every method."""
    made: dict[str, Measure] = {}
    if seed == 0:
        made |= {f"learning rate {rate:g}": partial(try_rate, rate=rate) for rate in plan.learning_rates}
    made |= {tuning(name, "lambda", decay): partial(tune, method=name, decay=decay)
             for name in ("FedAvg", *tails(plan)) for decay in plan.decays}
    made |= {tuning("FedProx", "mu", mu): partial(tune, method="FedProx", strength=mu) for mu in plan.proximal}
    made |= {f"tuning {name}": partial(tune, method=name) for name in (*powers(plan), *tilts(plan), *subs(plan))}
    return made | {name: partial(final, method=name) for name in methods(plan)}


def methods(plan: Any) -> tuple[str, ...]:
    return ("FedAvg", *subs(plan), "FedProx", *powers(plan), *tilts(plan), *tails(plan))


def subs(plan: Any) -> tuple[str, ...]:
    return tuple(f"FedAvg-Sub {theta:g}" for theta in get(plan, "tail_fractions"))


def powers(plan: Any) -> tuple[str, ...]:
    return tuple(f"q-FFL {power:g}" for power in get(plan, "powers"))


def tilts(plan: Any) -> tuple[str, ...]:
    return tuple(f"Tilted-ERM {tilt:g}" for tilt in get(plan, "tilts"))


def tails(plan: Any) -> tuple[str, ...]:
    return tuple(f"Delta-FL {theta:g}" for theta in get(plan, "tail_fractions"))


def get(plan: Any, name: str) -> Any:
    """A field of a plan, or of the table it was saved as."""
    return plan[name] if isinstance(plan, dict) else getattr(plan, name)


def tuning(method: str, what: str, value: float) -> str:
    return f"tuning {method}, {what} {value:g}"


def try_rate(cell: Cell, rate: float) -> Numbers:
    """The mean training loss FedAvg ends with, by which the paper chooses the learning rate (for all methods)."""
    train, _ = writers(cell.data, cell.seed)
    cohort = min(cell.plan.cohort, len(train))
    trained = fit(cell, recipe("FedAvg", cohort, _local(cell.plan, rate)), train, cohort)
    return {"loss": fedtail.evaluate(trained, train, weighted=True, device=cell.device).loss.mean()}


def tune(cell: Cell, method: str, decay: float | None = None, strength: float = 0.0) -> Numbers:
    """Train on one half of the training writers, look at the 90th percentile of error on the other [PLMH23, section C.2]."""
    train, held = writers(cell.data, cell.seed)[0].split((0.5, 0.5), cell.seed)
    decay = best_decay(cell, "FedAvg") if decay is None else decay
    cohort = min(-(-cell.plan.cohort // 2), len(train))
    algorithm = recipe(method, cohort, _local(cell.plan, best_rate(cell), decay), strength)
    trained = fit(cell, algorithm, train, cohort, cell.plan.tuning_share)
    error = fedtail.evaluate(trained, held, device=cell.device).error
    return {"validation": {"p90": 100 * error.percentile(90), "mean": 100 * error.mean()}}


def final(cell: Cell, method: str) -> Numbers:
    """Train with the chosen settings, look at the test writers."""
    train, test = writers(cell.data, cell.seed)
    decay = best_decay(cell, method if method.startswith("Delta-FL") else "FedAvg")
    strength = best_strength(cell) if method == "FedProx" else 0.0
    local, cohort = _local(cell.plan, best_rate(cell), decay), min(cell.plan.cohort, len(train))
    trained = fit(cell, recipe(method, cohort, local, strength), train, cohort)
    settings = {"learning_rate": best_rate(cell), "lambda": decay, "mu": strength, "rounds": trained.state.round}
    found = {"settings": settings, **described(cell, trained, train, test, method)}
    if method == "FedAvg" or method.startswith("Delta-FL"):
        longer = replace(trained.algorithm.local, epochs=PERSONAL_EPOCHS, learning_rate=personal_rate(cell),
                         schedule=fedtail.Constant())
        own = fedtail.finetune(trained, test, longer, seed=cell.seed, device=cell.device)
        found["personal"] = {when: percent(getattr(own, when).error, ("mean", "p90")) for when in ("before", "after")}
    return found


def described(cell: Cell, trained: Any, train: Population, test: Population, method: str) -> Numbers:
    """What sections 7.3, 7.4 and C.4 report of a model."""
    error = fedtail.evaluate(trained, test, device=cell.device).error
    loss = fedtail.evaluate(trained, train, weighted=True, device=cell.device).loss
    poor = test.size < poor_below(test)
    found: Numbers = {"test": percent(error, STATISTICS), "train": {"mean": loss.mean(), **loss.percentiles()},
             "poor": percent(Distribution(error.values[poor]), ("mean", "std", "p90")) if bool(poor.any()) else {},
             "rich": percent(Distribution(error.values[~poor]), ("mean", "std", "p90")) if bool((~poor).any()) else {}}
    found["poor_below"] = poor_below(test)
    if method.startswith(DRAWN) and "Sub" not in method:
        found["clients"] = {"error": [round(e, 2) for e in (100 * error.values).tolist()],
                            "loss": [round(x, 3) for x in loss.values.tolist()]}
    if method == "FedAvg":
        found["clients"] |= {"test_size": test.size.tolist(), "train_size": train.size.tolist()}
    return found


def poor_below(test: Population) -> int:
    """Fewer images than this is data-poor: 200 as printed, where that divides the clients; else the median."""
    share = float((test.size < SMALL).double().mean())
    return SMALL if 0.1 <= share <= 0.9 else int(test.size.median()) + 1


def personal_rate(cell: Cell) -> float:
    """The rate at the end of training, section 7.5; where it falls to zero, a tenth of the one it began with."""
    return best_rate(cell) * (0.1 if cell.plan.cosine else 1.0)


def fit(cell: Cell, algorithm: FederatedAlgorithm, train: Population, cohort: int, share: float = 1.0) -> Any:
    """Train for as many rounds as give every client its visits; FedAvg-Sub, with fewer clients a round, for no more."""
    rounds = max(1, round(share * cell.plan.visits * len(train) / cohort))
    if cell.plan.cosine:
        algorithm = replace(algorithm, local=replace(algorithm.local, schedule=fedtail.Cosine(rounds)))
    with quiet_about_small_tails():
        return cell.train(algorithm, linear_task(cell), train, rounds)


def linear_task(cell: Cell) -> fedtail.Task:
    """Softmax regression without intercept, from zero: w in R^{62 x 784} of section C.1."""
    return fedtail.Task(SoftmaxRegression(28 * 28, classes(cell.data), bias=False))


@contextmanager
def quiet_about_small_tails() -> Iterator[None]:
    """theta = 0.1 of few clients is what some cells are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.SmallTailWarning)
        yield


def best_rate(cell: Cell) -> float:
    """The learning rate with which FedAvg ended lowest, on the first seed."""
    return min(cell.plan.learning_rates, key=lambda rate: or_infinity(cell.numbers(f"learning rate {rate:g}", 0)["loss"]))


def best_decay(cell: Cell, method: str) -> float:
    return min(cell.plan.decays, key=lambda decay: score(cell, tuning(method, "lambda", decay)))


def best_strength(cell: Cell) -> float:
    return min(cell.plan.proximal, key=lambda mu: score(cell, tuning("FedProx", "mu", mu)))


def score(cell: Cell, name: str) -> tuple[float, float]:
    found = cell.numbers(name)["validation"]
    return or_infinity(found["p90"]), or_infinity(found["mean"])


def or_infinity(value: float | None) -> float:
    return float("inf") if value is None else value


def _local(plan: Plan, rate: float, decay: float = 0.0) -> dict[str, Any]:
    return {"learning_rate": rate, "batch_size": plan.batch, "weight_decay": decay}


def percent(distribution: Distribution, names: Sequence[str]) -> dict[str, float]:
    return {name: 100 * distribution.statistic(name) for name in names}
