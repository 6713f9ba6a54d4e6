"""AdaDPS and DP2 for clients: figure 6.7 of [Li23], on generated questions by device that stand in for StackOverflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedtail
from fedtail.data import Population
from fedtail.models import SoftmaxRegression
from fedtail.private_optim import frequency_divisor
from fedtail.server import SGD, Adam
from fedtail_studies.adaptive_private.pages import below, claim, draw_courses, missing, scores_table
from fedtail_studies.adaptive_private.training import Samples, error_percent, finite
from fedtail_studies.adaptive_private.tuning import Settings, chosen_note, lowest, search_name, tried_settings
from fedtail_studies.adaptive_private.words import zipf
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table
from fedtail_studies.tilted.classes_data import generator

WORDS, TOKENS, CLASSES = 500, 12.0, 20
TOPICAL, OFTEN = 12, 0.15                              # words of each class, and how often they occur in its sentences
MOMENTUM = 0.9                                         # of the server, without privacy
LOCAL, SERVER, DELAYED = "AdaDPS, in clients", "AdaDPS, at the server", "DP2 for clients"


@dataclass(frozen=True)
class DevicesPlan:
    """400 devices of which 20 are sampled, with noise 0.3, as in section 6.4.2."""

    seeds: int = 5
    devices: int = 400
    sentences: int = 100
    cohort: int = 20
    noise: float = 0.3
    delta: float = 0.0025
    rounds: int = 41
    local_batch: int = 25
    trials: int = 12
    evaluations: int = 8


@dataclass(frozen=True, eq=False)
class Fleet:
    """Devices to train on, sentences of other devices to validate and to test, and how often words occur."""

    train: Population
    validation: Samples
    test: Samples
    frequencies: Tensor


@lru_cache(maxsize=1)
def fleet(seed: int, devices: int, sentences: int) -> Fleet:
    """Sentences with Zipf's words, and words of their class, which are rare; devices have classes by Dir(1)."""
    random_ = generator(seed, 67)
    expected = zipf(WORDS, TOKENS).repeat(CLASSES, 1)
    for k in range(CLASSES):
        own = 50 + torch.randperm(WORDS - 50, generator=random_)[:TOPICAL]      # none of the fifty most frequent
        expected[k, own] += OFTEN

    def written(count: int) -> tuple[Samples, Tensor]:
        prior = torch.distributions.Dirichlet(torch.ones(CLASSES))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=random_)))
            shares = prior.sample((count,))
        labels = torch.multinomial(shares, sentences, replacement=True, generator=random_).flatten()
        x = torch.poisson(expected[labels], generator=random_)
        return Samples(x, labels), torch.arange(count).repeat_interleave(sentences)

    train, owner = written(devices)
    population = Population.from_arrays(train.x, train.y, owner, mass=torch.ones(devices))
    validation, test, open_ = (written(max(2, devices // part))[0] for part in (20, 10, 20))
    return Fleet(population, validation, test, open_.x.mean(0))


# methods


def task() -> fedtail.Task:
    return fedtail.Task(SoftmaxRegression(WORDS, CLASSES))


Make = Callable[[Settings, DevicesPlan, Tensor], fedtail.FederatedAlgorithm]
RATES = {"rate": (0.3, 1.0, 3.0, 10.0), "clip": (0.5, 1.0, 2.0)}


def _local(s: Settings, plan: DevicesPlan) -> dict[str, Any]:
    return {"learning_rate": s["rate"], "batch_size": plan.local_batch, "epochs": 1}


def averaging(s: Settings, plan: DevicesPlan, divisor: Tensor) -> fedtail.FederatedAlgorithm:
    return fedtail.dp_fedavg(plan.devices, s["clip"], plan.noise, plan.cohort, **_local(s, plan))


def adaptive_server(s: Settings, plan: DevicesPlan, divisor: Tensor) -> fedtail.FederatedAlgorithm:
    return replace(averaging(s, plan, divisor), server=Adam(s["server_rate"]))


def in_clients(s: Settings, plan: DevicesPlan, divisor: Tensor) -> fedtail.FederatedAlgorithm:
    return fedtail.fed_adadps(plan.devices, s["clip"], plan.noise, divisor, plan.cohort, **_local(s, plan))


def at_server(s: Settings, plan: DevicesPlan, divisor: Tensor) -> fedtail.FederatedAlgorithm:
    made = averaging(s, plan, divisor)
    return replace(made, aggregate=replace(made.aggregate, divisor=fedtail.FixedDivisor(divisor)))      # type: ignore[type-var]


def delayed(s: Settings, plan: DevicesPlan, divisor: Tensor) -> fedtail.FederatedAlgorithm:
    return fedtail.fed_dp2(plan.devices, s["clip"], plan.noise, int(s["phase"]), s["delayed_clip"], plan.cohort,
                           delayed_rate=s["delayed_rate"], epsilon=1e-4, **_local(s, plan))


def free(s: Settings, plan: DevicesPlan, divisor: Tensor, divided: bool = False,
         adam: bool = False) -> fedtail.FederatedAlgorithm:
    """Without clipping and noise; the server has momentum, or Adam."""
    more = {"divisor": fedtail.FixedDivisor(divisor)} if divided else {}
    made = fedtail.fedavg(plan.cohort, **_local(s, plan), **more)
    return replace(made, server=Adam(s["server_rate"]) if adam else SGD(1.0, MOMENTUM))


PRIVATE: dict[str, tuple[Make, Mapping[str, Sequence[float]]]] = {
    "DP-FedAvg": (averaging, RATES),
    "DP-FedAdam": (adaptive_server, {"rate": (0.3, 1.0, 3.0), "clip": (0.5,), "server_rate": (0.003, 0.01, 0.03, 0.1)}),
    LOCAL: (in_clients, {"rate": (0.01, 0.03, 0.1, 0.3), "clip": (0.5, 1.0, 4.0)}),
    SERVER: (at_server, {"rate": (0.1, 0.3, 1.0, 3.0), "clip": (0.5, 1.0, 4.0)}),
    DELAYED: (delayed, {"rate": (1.0, 3.0), "clip": (2.0,), "phase": (3, 6), "delayed_clip": (2.0,),
                        "delayed_rate": (0.03, 0.1, 0.3)}),
}
FREE: dict[str, tuple[Make, Mapping[str, Sequence[float]]]] = {
    "FedAvg": (free, {"rate": (0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)}),
    "FedAdam": (partial(free, adam=True), {"rate": (0.1, 0.3, 1.0), "server_rate": (0.01, 0.03, 0.1, 0.3)}),
    "AdaS, in clients": (partial(free, divided=True),
                         {"rate": (0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)}),
}
EVERY = {**PRIVATE, **FREE}


# cells


def run(cell: Cell, name: str, settings: Settings, part: str) -> Numbers:
    """Train, with the error on validation or test sentences along the way."""
    plan: DevicesPlan = cell.plan
    found = fleet(cell.seed, plan.devices, plan.sentences)
    made, samples = task(), getattr(found, part)
    algorithm = EVERY[name][0](settings, plan, frequency_divisor(made.module, found.frequencies, 0.01))
    rounds, scores, every = [], [], max(1, plan.rounds // plan.evaluations)

    def look(progress: fedtail.Progress) -> None:
        if progress.round % every == 0 or progress.round == plan.rounds:
            rounds.append(progress.round)
            scores.append(finite(error_percent(progress.module, samples)))

    trained = cell.train(algorithm, made, found.train, plan.rounds, look)
    spent = trained.ledger.guarantee(plan.delta).epsilon if name in PRIVATE else None
    return {"step": rounds, "course": scores, "test": scores[-1], "spent": spent}


def searched(cell: Cell, name: str) -> Numbers:
    """The settings with the lowest error on validation sentences."""
    tried = tried_settings(name, EVERY[name][1], cell.plan.trials)
    return lowest(tried, [run(cell, name, one, "validation")["test"] for one in tried])


def measured(cell: Cell, name: str) -> Numbers:
    """The error on test sentences with the settings that were found."""
    return run(cell, name, cell.numbers(search_name(name), seed=0)["chosen"], "test")


def cells(plan: DevicesPlan, seed: int) -> dict[str, Measure]:
    made: dict[str, Measure] = {}
    for name in EVERY:
        if seed == 0:
            made[search_name(name)] = partial(searched, name=name)
        made[name] = partial(measured, name=name)
    return made


# pages


def tables(results: Results) -> list[Table]:
    """Errors and epsilon."""
    spent = [Row(name, {"epsilon": results.values(name, "spent")}) for name in PRIVATE]
    return [scores_table(results, "With privacy for clients", list(PRIVATE), "error, %", {}),
            scores_table(results, "Without privacy", list(FREE), "error, %", {}),
            Table(f"Epsilon at delta {results.plan['delta']:g}", ("epsilon",), tuple(spent))]


def figures(results: Results, folder: Path) -> list[Figure]:
    return [draw_courses(results, folder, "private.png", list(PRIVATE), "test error, %",
                         "With privacy, by round, mean over seeds; as the right part of figure 6.7.", along="rounds"),
            draw_courses(results, folder, "without_privacy.png", list(FREE), "test error, %",
                         "Without privacy, by round, mean over seeds; as the left part of figure 6.7.", along="rounds")]


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    return [
        f"{plan['devices']} devices with {plan['sentences']} sentences of {TOKENS:g} words with Zipf's frequencies, out of "
        f"{WORDS}, and of words of their class: {CLASSES} classes, each with {TOPICAL} rare words that occur {OFTEN:g} times in "
        "a sentence. StackOverflow has 500 classes and 10,000 words.",
        f"{plan['cohort']} devices a round by Poisson sampling, noise multiplier {plan['noise']}, {plan['rounds']} rounds, one "
        f"local epoch in batches of {plan['local_batch']}, server learning rate 1. Noise is added once, to the sum (Algorithm 10 "
        "prints it on every device). The thesis does not print its rounds; epsilon, printed as 34, is in the table.",
        "AdaDPS divides by the frequencies of words in sentences of other devices, plus 0.01: every local step, or the whole "
        f"update before it is clipped. Without privacy the server has momentum {MOMENTUM}.",
        f"Settings by search in the first seed, {plan['trials']} for every method (all, or drawn at random), by the error on "
        "sentences of devices that are in no other part. Ranges were set after a first run with fewer settings.",
        chosen_note(results, list(EVERY)),
    ]


CLAIMS: tuple[Claim, ...] = (
    claim("AdaDPS in clients has a lower error than DP-FedAvg and DP-FedAdam.", "figure 6.7", below,
          ((LOCAL, "DP-FedAvg"), (LOCAL, "DP-FedAdam"))),
    claim("Dividing every local step is better than dividing updates.", "section 6.4.2", below, ((LOCAL, SERVER),)),
    claim("Without privacy, dividing by frequencies in clients has a lower error than FedAvg.", "figure 6.7", below,
          (("AdaS, in clients", "FedAvg"),)),
    Claim("DP2, over rounds and without side information, has a lower error than DP-FedAvg.",
          "[ours; future work in Li23, section 6.10.3]", partial(below, pairs=((DELAYED, "DP-FedAvg"),))),
    missing("Accuracies on StackOverflow are as drawn, and AdaDPS gains 5 points.", "figure 6.7", "StackOverflow is not at hand; "
            "generated sentences stand in"),
)
ADADPS_FEDERATED = Study(
    name="adadps_federated", paper="Li23", item="figure 6.7 (a stand-in for StackOverflow)", title="AdaDPS for clients",
    cost=Cost(41, 5), full=DevicesPlan(),
    quick=DevicesPlan(seeds=3, devices=100, sentences=30, cohort=10, rounds=12, trials=3, evaluations=4),
    cells=cells, tables=tables, figures=figures, notes=notes, claims=CLAIMS)
