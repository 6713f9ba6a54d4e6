"""Two ways to solve Ditto, on skewed FEMNIST: figures 5.6 to 5.8 and rows of table 5.10 of [Li23].

Jointly, personal models are trained beside the shared one (Algorithm 7). By fine-tuning, the shared model is trained first, until
the last round or until an earlier stop, and each device then minimises F_k(v) + lambda / 2 |v - w|^2 from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

import fedtail
from fedtail.personal import FineTuning
from fedtail.training import Progress, Trained
from fedtail_studies.ditto.attacked import (
    attack_in,
    averaging,
    benign,
    beside,
    ditto_name,
    fine_tuned,
    local_steps,
    personal_models,
    robust,
    share_in,
    shared_numbers,
)
from fedtail_studies.ditto.devices import Devices, skewed
from fedtail_studies.ditto.several_models import client_accuracies
from fedtail_studies.study import Cell, Measure, Numbers

CLEAN, ATTACKED = "clean", "A3 20%"
PLAIN, PULLED = "fine-tuning", "fine-tuning of Ditto's objective"


@dataclass(frozen=True)
class SolverPlan:
    """Devices with five classes each, the strengths of table 5.10, where the shared model may stop, and epochs after it."""

    seeds: int = 3
    columns: tuple[str, ...] = (CLEAN, "A1 50%", ATTACKED)
    rounds: int = 80
    cohort: int = 10
    devices: int = 20
    each_class: int = 24
    learning_rate: float = 0.1
    batch: int = 16
    local_steps: int = 10
    strengths: tuple[float, ...] = (0.01, 0.1, 1.0)
    pull: float = 0.1                                  # lambda of the two solvers
    stops: tuple[int, ...] = (5, 10, 20, 40, 80)
    epochs: tuple[int, ...] = (5, 20, 50)


def pulled_name(epochs: int) -> str:
    """The name of fine-tuning on Ditto's objective for so many epochs."""
    return f"{PULLED}, {epochs} epochs"


def tuning_parts(plan: Any) -> dict[str, FineTuning]:
    """Fine-tuning without a pull for the most epochs, and on Ditto's objective for each number of them."""
    local = replace(local_steps(plan), local_steps=None)
    pulled = replace(local, penalty=fedtail.Proximal(plan.pull))
    return {PLAIN: FineTuning(replace(local, epochs=max(plan.epochs))),
            **{pulled_name(one): FineTuning(replace(pulled, epochs=one)) for one in plan.epochs}}


@dataclass
class Stops:
    """What is kept of a run at each stop: the run, and what a server sees of all devices, corrupted ones included."""

    cell: Cell
    devices: Devices
    attack: Any
    kept: dict[int, tuple[Trained, Numbers]]

    def look(self, progress: Progress) -> None:
        """Keep the run where a stop is."""
        if progress.round in self.cell.plan.stops:
            self.kept[progress.round] = (progress.trained, self.seen(progress.trained))

    def seen(self, trained: Trained) -> Numbers:
        """Mean training loss and validation accuracy over all devices; labels of corrupted devices are the poisoned ones."""
        parts = [self.devices.train, self.devices.validation]
        if self.attack is not None:
            whole = self.attack.on_population(self.devices.train)
            parts = [whole.poisoned(part) for part in parts]
        train, validation = (fedtail.evaluate(trained, part, engine=fedtail.Engine(device=self.cell.device)) for part in parts)
        return {"loss": float(train.loss.values.mean()), "validation": float(client_accuracies(validation).mean())}


def mean_accuracies(trained: Trained, names: Sequence[str], devices: Devices, chosen: Tensor, device: str) -> dict[str, float]:
    """Mean test accuracy of the `chosen` devices by each kind of personal model of a run, by name."""
    found = personal_models(trained, dict.fromkeys(names), devices, device)
    return {name: float(one.test[chosen].mean()) for name, one in found.items()}


def solved(cell: Cell, column: str) -> Numbers:
    """Global, local and Ditto's accuracies of benign devices, at every stop, and fine-tuning from there.

    Only the attack of figures 5.6 to 5.8 is stopped early; in the other columns the last round is all there is.
    """
    plan, devices = cell.plan, skewed(cell)
    attack = attack_in(column, plan.cohort, cell.seed)
    chosen, stops = benign(devices, attack), Stops(cell, devices, attack, {})
    parts = {"local": fedtail.Ditto(0.0, local_steps(plan)),
             **{ditto_name(one): fedtail.Ditto(one, local_steps(plan)) for one in plan.strengths}}
    cell.train(beside(averaging(plan), parts, devices), devices.task, devices.train, plan.rounds, stops.look, attack)
    found: Numbers = {}
    for stop, (trained, seen) in stops.kept.items():
        if column != ATTACKED and stop != max(plan.stops):
            continue
        tuned = fine_tuned(cell, trained, devices, tuning_parts(plan))
        found[str(stop)] = {**seen, "global": shared_numbers(trained, devices, chosen, cell.device)["test"],
                            "joint": mean_accuracies(trained, list(parts), devices, chosen, cell.device),
                            "tuned": mean_accuracies(tuned, list(tuning_parts(plan)), devices, chosen, cell.device)}
    return found


def ruled(cell: Cell, column: str, rule: str) -> Numbers:
    """The accuracy of benign devices with a robust rule."""
    plan, devices = cell.plan, skewed(cell)
    attack = attack_in(column, plan.cohort, cell.seed)
    trained = cell.train(robust(plan, rule, share_in(column)), devices.task, devices.train, plan.rounds, attack=attack)
    return {"test": shared_numbers(trained, devices, benign(devices, attack), cell.device)["test"]}


def cells(plan: SolverPlan, seed: int) -> dict[str, Measure]:
    """Every column with both solvers, and two robust rules in each."""
    return {**{column: partial(solved, column=column) for column in plan.columns},
            **{f"{column}: {rule}": partial(ruled, column=column, rule=rule) for column in plan.columns
               for rule in ("median", "clipping")}}
