"""Ditto beside other personal models, on FEMNIST by writer: table 5.2 of [Li23], and Delta-FL as in table 4 of [PLMH23].

Every method with a strength to choose takes, of a few, that with the best validation accuracy of benign devices, for each seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fedtail
from fedtail.local import EWC, SymmetrisedKL
from fedtail.personal import APFL, FineTuning, Mapper, PersonalModels
from fedtail.training import Trained
from fedtail_studies.ditto.attacked import (
    PARTICIPATION,
    attack_in,
    averaging,
    benign,
    beside,
    fine_tuned,
    local_steps,
    over_devices,
    participation_cell,
    personal_models,
    shared_accuracies,
)
from fedtail_studies.ditto.devices import Devices, writers
from fedtail_studies.ditto.several_models import client_accuracies
from fedtail_studies.study import Cell, Measure, Numbers

COLUMNS = ("clean", "A1 50%")
AVERAGED, TAILED, MEANED, META = "FedAvg", "Delta-FL", "L2SGD", "Per-FedAvg"


@dataclass(frozen=True)
class PersonalPlan:
    """Half of the writers and rounds of `ditto_femnist`, its steps, and what the methods choose from."""

    seeds: int = 3
    devices: int = 20
    rounds: int = 100
    cohort: int = 10
    learning_rate: float = 0.1
    batch: int = 32
    local_steps: int = 10
    strengths: tuple[float, ...] = (0.1, 1.0, 2.0)     # of Ditto
    mean_strengths: tuple[float, ...] = (0.1, 1.0)     # of L2SGD
    fisher_strengths: tuple[float, ...] = (0.1, 1.0)   # of EWC; with 10 its steps diverge on a third of the devices
    divergence_strengths: tuple[float, ...] = (0.1, 1.0)      # of SKL
    tuning_epochs: int = 50
    meta_rates: tuple[float, ...] = (0.01, 0.03, 0.1)  # learning rates of Per-FedAvg, which "requires additional tuning"
    meta_epochs: int = 5                               # of fine-tuning after Per-FedAvg, beside a single step
    tail_fractions: tuple[float, ...] = (0.8, 0.5, 0.1)


def whole_epochs(plan: Any, epochs: int) -> fedtail.LocalSGD:
    """Steps of a device that goes through all of its samples so many times."""
    return replace(local_steps(plan), local_steps=None, epochs=epochs)


def joint_parts(plan: Any) -> dict[str, PersonalModels]:
    """Personal models that are trained beside FedAvg's model."""
    local = local_steps(plan)
    return {"local": fedtail.Ditto(0.0, local), **{f"Ditto, lambda {one:g}": fedtail.Ditto(one, local) for one in plan.strengths},
            "APFL": APFL(0.5, local), "mapper": Mapper(local=local)}


def tuned_parts(plan: Any) -> dict[str, PersonalModels]:
    """Personal models that are made of FedAvg's last model by fine-tuning: without a penalty, with EWC and with SKL."""
    local = whole_epochs(plan, plan.tuning_epochs)
    penalties = {**{f"EWC, lambda {one:g}": EWC(one) for one in plan.fisher_strengths},
                 **{f"SKL, lambda {one:g}": SymmetrisedKL(one) for one in plan.divergence_strengths}}
    return {"fine-tuning": FineTuning(local),
            **{name: FineTuning(replace(local, penalty=penalty)) for name, penalty in penalties.items()}}


# cells


def with_tail(test: Tensor, validation: Tensor, chosen: Tensor) -> Numbers:
    """What is reported of accuracies of the `chosen` devices, and the 90th percentile of their errors in percent."""
    return {**over_devices(test, validation, chosen), "p90": float(torch.quantile(100 - test[chosen], 0.9))}


def shared_and_personal(trained: Trained, devices: Devices, chosen: Tensor, device: str, shared: str,
                        parts: Mapping[str, Any]) -> Numbers:
    """What is reported of the shared model of a run, under the name `shared`, and of the personal models beside it."""
    found = {shared: with_tail(*shared_accuracies(trained, devices, device), chosen)}
    return found | {name: with_tail(one.test, one.validation, chosen)
                    for name, one in personal_models(trained, parts, devices, device).items()}


def averaged(cell: Cell, column: str) -> Numbers:
    """FedAvg, the personal models beside it, and those that are fine-tuned from its last model."""
    plan, devices = cell.plan, writers(cell)
    attack, parts = attack_in(column, plan.cohort, cell.seed), joint_parts(plan)
    trained = cell.train(beside(averaging(plan), parts, devices), devices.task, devices.train, plan.rounds, attack=attack)
    chosen, made = benign(devices, attack), tuned_parts(plan)
    tuned = fine_tuned(cell, trained, devices, made)
    found = shared_and_personal(tuned, devices, chosen, cell.device, "after fine-tuning", made)
    found.pop("after fine-tuning")
    return {**shared_and_personal(trained, devices, chosen, cell.device, "global", parts), **found}


def mean_regularised(cell: Cell, column: str, strength: float) -> Numbers:
    """L2SGD with this strength."""
    plan, devices = cell.plan, writers(cell)
    attack = attack_in(column, plan.cohort, cell.seed)
    algorithm = fedtail.l2sgd(strength, plan.cohort, learning_rate=plan.learning_rate, batch_size=plan.batch,
                              local_steps=plan.local_steps)
    trained = cell.train(algorithm, devices.task, devices.train, plan.rounds, attack=attack)
    engine = fedtail.Engine(device=cell.device)
    test, validation = (client_accuracies(fedtail.evaluate_personal(trained, part, engine=engine).personal)
                        for part in (devices.test, devices.validation))
    return {f"L2SGD, lambda {strength:g}": with_tail(test, validation, benign(devices, attack))}


def meta_learned(cell: Cell, column: str, rate: float) -> Numbers:
    """Per-FedAvg (HF) with this learning rate: its model after one full-gradient step on each device, and after some epochs."""
    plan, devices = cell.plan, writers(cell)
    attack = attack_in(column, plan.cohort, cell.seed)
    algorithm = replace(fedtail.per_fedavg(plan.cohort, learning_rate=rate, inner_learning_rate=plan.learning_rate,
                                           batch_size=plan.batch, local_steps=plan.local_steps),
                        personal=fedtail.NoPersonalModels())
    trained = cell.train(algorithm, devices.task, devices.train, plan.rounds, attack=attack)
    step = fedtail.LocalSGD(plan.learning_rate, batch_size=None, local_steps=1)
    parts = {f"{META}, rate {rate:g}, one step": FineTuning(step),
             f"{META}, rate {rate:g}, {plan.meta_epochs} epochs": FineTuning(whole_epochs(plan, plan.meta_epochs))}
    tuned = fine_tuned(cell, trained, devices, parts)
    found = personal_models(tuned, parts, devices, cell.device)
    return {name: with_tail(one.test, one.validation, benign(devices, attack)) for name, one in found.items()}


def tail_name(tail_fraction: float) -> str:
    """The name of Delta-FL with this tail fraction (theta), as table 4 has it."""
    return f"{TAILED} {tail_fraction:g}"


def tailed(cell: Cell, tail_fraction: float) -> Numbers:
    """Delta-FL, with Ditto beside it, and its last model fine-tuned."""
    plan, devices = cell.plan, writers(cell)
    local, chosen = local_steps(plan), benign(devices, None)
    algorithm = replace(fedtail.delta_fl(tail_fraction, plan.cohort), local=local)
    parts = {f"Ditto, lambda {one:g}": fedtail.Ditto(one, local) for one in plan.strengths}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.SmallTailWarning)
        trained = cell.train(beside(algorithm, parts, devices), devices.task, devices.train, plan.rounds)
    made = {"fine-tuning": FineTuning(whole_epochs(plan, plan.tuning_epochs))}
    tuned = personal_models(fine_tuned(cell, trained, devices, made), made, devices, cell.device)
    return {**shared_and_personal(trained, devices, chosen, cell.device, "global", parts),
            **{name: with_tail(one.test, one.validation, chosen) for name, one in tuned.items()}}


def cells(plan: PersonalPlan, seed: int) -> dict[str, Measure]:
    """FedAvg with what is made of it, L2SGD and Per-FedAvg in both columns, and Delta-FL without attacks."""
    made: dict[str, Measure] = {PARTICIPATION: partial(participation_cell, network=writers)}
    for column in COLUMNS:
        made[f"{column}: {AVERAGED}"] = partial(averaged, column=column)
        made |= {f"{column}: {MEANED} {one:g}": partial(mean_regularised, column=column, strength=one)
                 for one in plan.mean_strengths}
        made |= {f"{column}: {META} {one:g}": partial(meta_learned, column=column, rate=one) for one in plan.meta_rates}
    return made | {tail_name(one): partial(tailed, tail_fraction=one) for one in plan.tail_fractions}
