"""The methods of [PLMH23, section 7.2] by the names they have in the tables, and what is said of a distribution of errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fedtail
from fedtail.algorithm import FederatedAlgorithm
from fedtail.evaluation import Distribution

STATISTICS = ("mean", "std", "p10", "p50", "p90", "worst10", "worst5", "best10")


def recipe(name: str, cohort: int, settings: dict[str, Any], strength: float = 0.0) -> FederatedAlgorithm:
    """A method by its name: "FedAvg-Sub 0.5", "q-FFL 0.1", "Delta-FL 0.8", "Delta-FL 0.5, every 10 rounds" (T_eta), ..."""
    if ", every " in name:
        return fedtail.delta_fl(0.5, cohort, form="filter", refresh_every=int(name.split()[-2]), **settings)
    kind, _, number = name.partition(" ")
    made: dict[str, Callable[[], FederatedAlgorithm]] = {
        "FedAvg": lambda: fedtail.fedavg(cohort, **settings),
        "FedAvg-Sub": lambda: fedtail.fedavg_sub(float(number), cohort, **settings),
        "FedProx": lambda: fedtail.fedprox(strength, cohort, **settings),
        "q-FFL": lambda: fedtail.q_ffl(float(number), cohort, **settings),
        "Tilted-ERM": lambda: fedtail.term(float(number), cohort, **settings),
        "Delta-FL": lambda: fedtail.delta_fl(float(number), cohort, **settings)}
    return made[kind]()


def methods(plan: Any) -> tuple[str, ...]:
    return ("FedAvg", *subs(plan), "FedProx", *powers(plan), *tilts(plan), *tails(plan))


def models(plan: Any) -> tuple[str, ...]:
    """FedAvg and Delta-FL, which the figures show."""
    return ("FedAvg", *tails(plan))


def subs(plan: Any) -> tuple[str, ...]:
    return tuple(f"FedAvg-Sub {theta:g}" for theta in get(plan, "tail_fractions"))


def powers(plan: Any) -> tuple[str, ...]:
    return tuple(f"q-FFL {power:g}" for power in get(plan, "powers"))


def tilts(plan: Any) -> tuple[str, ...]:
    return tuple(f"Tilted-ERM {tilt:g}" for tilt in get(plan, "tilts"))


def tails(plan: Any) -> tuple[str, ...]:
    return tuple(f"Delta-FL {theta:g}" for theta in get(plan, "tail_fractions"))


def periods(plan: Any) -> tuple[str, ...]:
    return tuple(f"Delta-FL 0.5, every {period} rounds" for period in get(plan, "periods"))


def get(plan: Any, name: str) -> Any:
    """A field of a plan, or of the table it was saved as."""
    return plan[name] if isinstance(plan, dict) else getattr(plan, name)


def percent(distribution: Distribution, names: Sequence[str]) -> dict[str, float]:
    return {name: 100 * distribution.statistic(name) for name in names}


@contextmanager
def quiet_about_small_tails() -> Iterator[None]:
    """theta = 0.1 of few clients is what some cells are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.SmallTailWarning)
        yield
