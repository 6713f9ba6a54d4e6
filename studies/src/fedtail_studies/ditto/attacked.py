"""Methods of chapter 5 of [Li23] on devices of which some are corrupted: what is trained, and what is reported of it.

A column of tables 5.7 to 5.12 is an attack and a share of corrupted devices ("A1 20%"). For each there is one run of FedAvg
beside which all personal models are trained, a run of TERM for each tilt and one of each robust rule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fedtail
from fedtail.attacks import ClientAttack, LabelPoisoning, ModelReplacement, RandomUpdates
from fedtail.data import Population
from fedtail.personal import FineTuning, PersonalModels
from fedtail.training import Trained
from fedtail_studies.ditto.devices import Devices, participation
from fedtail_studies.ditto.printed import DYNAMIC
from fedtail_studies.ditto.several_models import SeveralPersonalModels, choosing, client_accuracies
from fedtail_studies.study import Cell, Measure, Numbers

CLEAN, AVERAGED, FINE_TUNED = "clean", "FedAvg", "fine-tuning"
PARTICIPATION = "participation"                       # the cell that says how often devices take part
WEAK, STRONG = (0.1, 1.0, 2.0), (0.05, 0.1, 0.2)      # lambda to choose from [Li23, section 5.7.2]
FIXED = {False: 1.0, True: 0.1}                       # with few validation samples, by whether attacks are strong
FEW = 4                                               # validation samples
RULES = ("median", "Krum", "multi-Krum", "clipping", "k-norm", "k-loss", "FedMGDA+")


@dataclass(frozen=True)
class AttackPlan:
    """How much is run; the step and the batches are those of section 5.6 of the thesis."""

    seeds: int = 3
    columns: tuple[str, ...] = (CLEAN,)
    rounds: int = 100
    cohort: int = 10
    learning_rate: float = 0.1
    batch: int = 32
    local_steps: int = 10
    strengths: tuple[float, ...] = (0.1, 1.0, 2.0)
    tilts: tuple[float, ...] = (1.0, 2.0, 5.0)
    rules: tuple[str, ...] = RULES
    with_ditto: tuple[str, ...] = ("clipping",)        # rules beside whose model Ditto is trained too [Li23, table 5.6]
    direction_step: float = 1.0                        # length of a server step of FedMGDA+
    tuning_epochs: int = 0                             # of fine-tuning; 0: none
    devices: int = 20                                  # writers of FEMNIST


def attack_in(column: str, cohort: int, seed: int) -> ClientAttack | None:
    """The attack of a column such as "A3 20%", on devices drawn by `seed`; None for "clean". A3 multiplies by the cohort size."""
    if column == CLEAN:
        return None
    kind, share = column.split()
    fraction = float(share.removesuffix("%")) / 100
    made: dict[str, Callable[..., ClientAttack]] = {"A1": LabelPoisoning, "A2": RandomUpdates,
                                                    "A3": partial(ModelReplacement, scale=float(cohort))}
    return made[kind](fraction, seed=seed)


def share_in(column: str) -> float:
    """The share of corrupted devices in a column."""
    return 0.0 if column == CLEAN else float(column.split()[1].removesuffix("%")) / 100


def is_strong(column: str) -> bool:
    """Whether devices are told that the attack is strong: all A3, and others with more than half of the devices corrupted."""
    return column.startswith("A3") or share_in(column) > 0.5


def local_steps(plan: Any) -> fedtail.LocalSGD:
    """The steps of a device in a round, for shared and personal models alike."""
    return fedtail.LocalSGD(learning_rate=plan.learning_rate, batch_size=plan.batch, local_steps=plan.local_steps)


def averaging(plan: Any) -> fedtail.FederatedAlgorithm:
    """FedAvg: the plain mean over devices drawn uniformly."""
    return replace(fedtail.fedavg(plan.cohort), local=local_steps(plan))


def robust(plan: Any, rule: str, share: float) -> fedtail.FederatedAlgorithm:
    """FedAvg with another rule of aggregation, which is told the `share` of corrupted devices.

    Krum and multi-Krum have a meaning for less than half: they are told the largest f with 2f + 3 devices in a cohort at most.
    """
    most = min(share, max(0, (plan.cohort - 3) // 2) / plan.cohort)
    rules = {"median": fedtail.CoordinateMedian(), "Krum": fedtail.Krum(most), "multi-Krum": fedtail.MultiKrum(most),
             "clipping": fedtail.ClippedMean(), "k-norm": fedtail.NormFilter(share), "k-loss": fedtail.LossFilter(share),
             "FedMGDA+": fedtail.MinimumNormDirection(0.1)}
    server = fedtail.SGD(plan.direction_step) if rule == "FedMGDA+" else fedtail.SGD(1.0)
    return replace(averaging(plan), aggregate=rules[rule], server=server)


def ditto_name(strength: float) -> str:
    """The name of Ditto with this strength (lambda), as the tables have it."""
    return f"Ditto {strength:g}"


def ditto_models(plan: Any, column: str) -> dict[str, PersonalModels]:
    """Ditto with every strength of the plan, and with those that devices choose from under this attack; "local" is strength 0."""
    strengths = sorted({*plan.strengths, *(STRONG if is_strong(column) else WEAK)})
    return {"local": fedtail.Ditto(0.0, local_steps(plan)),
            **{ditto_name(one): fedtail.Ditto(one, local_steps(plan)) for one in strengths}}


def beside(algorithm: fedtail.FederatedAlgorithm, parts: Mapping[str, PersonalModels],
           devices: Devices) -> fedtail.FederatedAlgorithm:
    """The method with all these personal models beside its shared one; each begins with the initial model."""
    return replace(algorithm, personal=SeveralPersonalModels(tuple(parts.values()), start=devices.task.params()))


# what is reported


def benign(devices: Devices, attack: ClientAttack | None) -> Tensor:
    """Which devices are not corrupted, (devices,) bool."""
    return torch.ones(len(devices.train), dtype=torch.bool) if attack is None else ~attack.corrupted(devices.train)


def over_devices(test: Tensor, validation: Tensor, chosen: Tensor) -> Numbers:
    """The mean test accuracy of the `chosen` devices, its standard deviation over them, and their mean validation accuracy."""
    return {"test": float(test[chosen].mean()), "std": float(test[chosen].std(correction=0)),
            "validation": float(validation[chosen].mean())}


def shared_numbers(trained: Trained, devices: Devices, chosen: Tensor, device: str) -> Numbers:
    """What is reported of the shared model of a run."""
    return over_devices(*shared_accuracies(trained, devices, device), chosen)


def shared_accuracies(trained: Trained, devices: Devices, device: str) -> tuple[Tensor, Tensor]:
    """Test and validation accuracies of all devices by the shared model of a run, in percent, (devices,) each."""
    engine = fedtail.Engine(device=device)
    test, validation = (fedtail.evaluate(trained, part, engine=engine) for part in (devices.test, devices.validation))
    return client_accuracies(test), client_accuracies(validation)


@dataclass(frozen=True)
class OnDevices:
    """Personal models of one kind on all devices: test and validation accuracies in percent and validation losses, (devices,)."""

    test: Tensor
    validation: Tensor
    loss: Tensor


def personal_models(trained: Trained, names: Mapping[str, Any], devices: Devices, device: str) -> dict[str, OnDevices]:
    """How the personal models of each kind do, by name; the names are in the order of the run's parts."""
    engine, found = fedtail.Engine(device=device), {}
    for place, name in enumerate(names):
        run = choosing(trained, place)
        test, validation = (fedtail.evaluate_personal(run, part, engine=engine).personal
                            for part in (devices.test, devices.validation))
        found[name] = OnDevices(client_accuracies(test), client_accuracies(validation), torch.as_tensor(validation.loss.values))
    return found


def dynamic(found: Mapping[str, OnDevices], validation: Population, strong: bool) -> OnDevices:
    """Every device takes the strength with its lowest validation loss; with fewer than four validation samples a fixed one."""
    tried = [found[ditto_name(one)] for one in (STRONG if strong else WEAK)]
    best = torch.stack([one.loss for one in tried]).nan_to_num(nan=math.inf).argmin(0)
    best = best.where(validation.size >= FEW, (STRONG if strong else WEAK).index(FIXED[strong]))
    every = torch.arange(len(best))
    return OnDevices(*(torch.stack([getattr(one, key) for one in tried])[best, every] for key in ("test", "validation", "loss")))


def reported(found: Mapping[str, OnDevices], chosen: Tensor, suffix: str = "") -> Numbers:
    """What is reported of personal models of every kind, by name and `suffix`."""
    return {f"{name}{suffix}": over_devices(one.test, one.validation, chosen) for name, one in found.items()}


# cells


def averaged_cell(cell: Cell, column: str, network: Callable[[Cell], Devices]) -> Numbers:
    """FedAvg, the personal models beside it, and copies of its model that are fine-tuned in the end."""
    plan, devices = cell.plan, network(cell)
    attack, parts = attack_in(column, plan.cohort, cell.seed), ditto_models(plan, column)
    trained = cell.train(beside(averaging(plan), parts, devices), devices.task, devices.train, plan.rounds, attack=attack)
    chosen = benign(devices, attack)
    found = personal_models(trained, parts, devices, cell.device)
    found[DYNAMIC] = dynamic(found, devices.validation, is_strong(column))
    numbers = {"global": shared_numbers(trained, devices, chosen, cell.device), **reported(found, chosen)}
    if plan.tuning_epochs:
        whole = replace(local_steps(plan), local_steps=None, epochs=plan.tuning_epochs)
        tuned = fine_tuned(cell, trained, devices, {FINE_TUNED: FineTuning(whole)})
        numbers |= reported(personal_models(tuned, {FINE_TUNED: None}, devices, cell.device), chosen)
    return numbers


def fine_tuned(cell: Cell, trained: Trained, devices: Devices, parts: Mapping[str, PersonalModels]) -> Trained:
    """One more round, of all devices, in which each trains personal models from the model that a run ended with."""
    once = replace(averaging(cell.plan), sample=fedtail.Everyone(), personal=SeveralPersonalModels(tuple(parts.values())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.NoContributionWarning)      # where an attack made the model infinite
        return cell.train(once, replace(devices.task, module=trained.module), devices.train, 1)


def robust_cell(cell: Cell, column: str, network: Callable[[Cell], Devices], rule: str) -> Numbers:
    """One robust rule and, for some, Ditto beside it."""
    plan, devices = cell.plan, network(cell)
    attack, algorithm = attack_in(column, plan.cohort, cell.seed), robust(plan, rule, share_in(column))
    parts = {ditto_name(one): fedtail.Ditto(one, local_steps(plan)) for one in plan.strengths} if rule in plan.with_ditto else {}
    if parts:
        algorithm = beside(algorithm, parts, devices)
    trained = cell.train(algorithm, devices.task, devices.train, plan.rounds, attack=attack)
    chosen = benign(devices, attack)
    numbers = {rule: shared_numbers(trained, devices, chosen, cell.device)}
    if parts:
        numbers |= reported(personal_models(trained, parts, devices, cell.device), chosen, f" + {rule}")
    return numbers


def fair_cell(cell: Cell, column: str, network: Callable[[Cell], Devices], tilt: float) -> Numbers:
    """TERM over devices with this tilt (t)."""
    plan, devices = cell.plan, network(cell)
    attack = attack_in(column, plan.cohort, cell.seed)
    algorithm = replace(fedtail.term(tilt, plan.cohort), local=local_steps(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.SmallTailWarning)
        trained = cell.train(algorithm, devices.task, devices.train, plan.rounds, attack=attack)
    return {fair_name(tilt): shared_numbers(trained, devices, benign(devices, attack), cell.device)}


def fair_name(tilt: float) -> str:
    """The name of TERM with this tilt."""
    return f"TERM {tilt:g}"


def participation_cell(cell: Cell, network: Callable[[Cell], Devices]) -> Numbers:
    """How often devices take part."""
    return participation(cell, network(cell))


def cells_of(plan: AttackPlan, network: Callable[[Cell], Devices]) -> dict[str, Measure]:
    """Every column: FedAvg with personal models, TERM (all tilts where labels are poisoned or nothing is), each robust rule."""
    made: dict[str, Measure] = {PARTICIPATION: partial(participation_cell, network=network)}
    for column in plan.columns:
        made[f"{column}: {AVERAGED}"] = partial(averaged_cell, column=column, network=network)
        tilts = plan.tilts if column == CLEAN or column.startswith("A1") else plan.tilts[:1]
        made |= {f"{column}: {fair_name(one)}": partial(fair_cell, column=column, network=network, tilt=one) for one in tilts}
        made |= {f"{column}: {rule}": partial(robust_cell, column=column, network=network, rule=rule) for rule in plan.rules}
    return made
