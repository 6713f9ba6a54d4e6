"""What the private training study runs: every method with given settings at every budget, on the test clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedtail_studies.private.runs import Budget, Clients, Settings, trained_errors
from fedtail_studies.study import Cell, Numbers

THETAS = (1.0, 0.5, 0.25)
FIRST = 5.0                                      # the epsilon of the papers' texts
OTHER_DELTA = 1e-5

# Chosen on validation clients, one setting after another: theta; r, B, b at epsilon 5; C at epsilon 3, 5, 10, 15, 20.
ONE_BY_ONE = (
    (1.0, (), (0.15, 0.15, 0.18, 0.27, 0.22)),
    (0.5, (0.25, 1.5, 16), (0.11, 0.13, 0.13, 0.15, 0.15)),
    (0.25, (0.25, 1.3, 16), (0.11, 0.13, 0.11, 0.13, 0.09)),
)


@dataclass(frozen=True)
class Size:
    """How much is trained: the paper's clients and rounds."""

    seeds: int = 5
    rounds: int = 1000
    epsilons: tuple[float, ...] = (3.0, 5.0, 10.0, 15.0, 20.0)
    train_clients: int = 2500
    other_clients: int = 500
    cohort: int = 100
    pool: int = 500_000

    @property
    def clients(self) -> Clients:
        return Clients(self.train_clients, self.other_clients, self.cohort, self.pool)

    @property
    def delta(self) -> float:
        """1/n, as printed."""
        return 1 / self.train_clients


@dataclass(frozen=True)
class Plan(Size):
    other_delta_at: tuple[float, ...] = (3.0, 5.0, 10.0, 15.0, 20.0)
    settings_at: tuple[float, ...] = (3.0, 5.0, 10.0, 15.0, 20.0)
    settings: tuple[tuple[float, tuple[float, ...], tuple[float, ...]], ...] = ONE_BY_ONE

    def chosen(self, theta: float, epsilon: float) -> Settings:
        histogram, clip_norms = next((rest, norms) for of, rest, norms in self.settings if of == theta)
        ratio, bound, bins = histogram or (None, float("inf"), 0)
        return Settings(theta, clip_norms[self.settings_at.index(epsilon)], ratio, bound, int(bins))


def method_name(theta: float) -> str:
    return "FedAvg" if theta == 1 else f"Delta-FL {theta:g}"


def cell_name(theta: float, epsilon: float | None = None, delta: float | None = None, histogram: str | None = None) -> str:
    words = [method_name(theta), f"epsilon {epsilon:g}" if epsilon else "", f"delta {delta:g}" if delta else "", histogram or ""]
    return ", ".join(filter(None, words))


def cells(plan: Plan, seed: int) -> dict[str, Callable[[Cell], Numbers]]:
    """Every method without noise, at every epsilon, and at the other delta; flat and tree histograms at one epsilon."""
    found: dict[str, Callable[[Cell], Numbers]] = {}
    for theta in THETAS:
        found[cell_name(theta)] = partial(measured, settings=Settings(theta), budget=Budget())
        for epsilon in plan.epsilons:
            found[cell_name(theta, epsilon)] = partial(
                measured, settings=plan.chosen(theta, epsilon), budget=Budget(epsilon, plan.delta))
        for epsilon in plan.other_delta_at:
            found[cell_name(theta, epsilon, OTHER_DELTA)] = partial(
                measured, settings=plan.chosen(theta, epsilon), budget=Budget(epsilon, OTHER_DELTA))
    for kind in ("flat", "tree"):
        settings = plan.chosen(0.25, FIRST).with_histogram(kind)
        found[cell_name(0.25, FIRST, None, kind)] = partial(measured, settings=settings, budget=Budget(FIRST, plan.delta))
    return found


def measured(cell: Cell, settings: Settings, budget: Budget) -> Numbers:
    """One method on the test clients of one seed."""
    plan: Size = cell.plan
    cell.watch.begin(cell.name, cell.seed, 0, plan.rounds)

    def look_on(progress: Any) -> bool:
        cell.watch.round(progress.round)
        return cell.watch.stop

    return trained_errors(settings, budget, plan.clients, plan.rounds, cell.seed, "test", look_on)
