"""Random methods, modules, kernels, channels, workers and interruptions against a textbook of federated training.

    python tests/fuzz_core.py --seconds 3600 --seed 1      # make fuzz-core
    python tests/fuzz_core.py --case 1000123               # one case again, as a failure says

A case is a pure function of its number. In each, models after some rounds must agree with `textbook.py` to rounding; any number of
workers, and a run that stops and goes on, must give the same bits; and risks on random losses must agree with their definitions.

How near is near: the textbook is run again with rounding errors put in on purpose, of the precision of the case, of a risk's own
search and of a channel's integers. A result may be `FACTOR` times as far from the textbook as that. Where a risk jumps, rounding
may decide who is in the tail: a case that disagrees, and in which losses moved by rounding give other weights, is undecided. Undecided
cases are counted, and more than `UNDECIDED` of all is a failure too.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor, nn

import fedtail
import textbook
from fedtail import Engine, Family, FederatedAlgorithm, Population, Task, Trained, resume, train
from fedtail.algorithm import RoundLostWarning, member_states
from fedtail.client_statistics import ClientStatistics
from fedtail.composition import SmallTailWarning
from fedtail.engine import LocalFleet, blocks, workers
from fedtail.experiment import Experiment, Source
from fedtail.experiment.experiment import build_experiments
from fedtail.models import CharacterGRU, LeastSquares, LogisticRegression, LSTMClassifier, SoftmaxRegression
from fedtail.risk.base import fit_locally
from fedtail.runs import Interrupted, run
from fedtail.runs.checkpoint import Checkpoints
from fedtail.training import NoContributionWarning, result_params

from run_cases import Onlooker, digests

FACTOR = 20.0         # of the errors put in on purpose, which are drawn, and may cancel
UNDECIDED = 0.03      # share of cases in which rounding decides who counts
SEARCHED = {"SmoothedSuperquantile": 1e-6, "QuadraticSuperquantile": 1e-6, "Ascent": 1e-7}      # what a risk's own search may leave
EXPECTED = (SmallTailWarning, RoundLostWarning, NoContributionWarning)      # small cohorts are the rule here
GRAIN = 2.0**-44      # of the largest entry of a sum of integers: 61 bits less those of the bound on updates and of the clients
WILD = 100.0          # an update or a loss from which on a channel of integers, whose rows are bounded, may refuse it
BLOCK = 50            # examples times parameters in a block, so that small cases have several


class Disagreement(AssertionError):
    """The package and the textbook differ."""


class Refused(Exception):
    """A channel of integers cannot carry what training that diverges makes."""


class Undecided(Exception):
    """They differ where rounding decides."""


# Cases


@dataclass(frozen=True)
class Case:
    """All there is to a case, as plain values but for the data and the module."""

    number: int
    module: str
    methods: list[textbook.Method]
    channel: textbook.Part
    kernel: str
    dtype: torch.dtype
    workers: int
    chunk: int | None               # clients computed side by side, at most
    rounds: int
    stop: int                       # after so many rounds the run is interrupted,
    resumed: str                    # and goes on: with `start=`, from a checkpoint, in a run folder, or not at all
    seed: int
    population: Population
    task: Task
    loss: str
    numeric: bool                   # dropout draws from streams a textbook does not have

    @property
    def algorithm(self) -> FederatedAlgorithm | Family:
        members = tuple(FederatedAlgorithm(**{name: made(part) for name, part in m.items()}) for m in self.methods)
        return members[0] if len(members) == 1 else Family(members)

    def labels(self) -> Iterator[tuple[str, str]]:
        """What the case covers, for the table."""
        yield "module", self.module
        yield "kernel", self.kernel
        yield "channel", self.channel[0]
        yield "dtype", str(self.dtype).removeprefix("torch.")
        yield "workers", str(self.workers)
        yield "resumed", self.resumed
        yield "models", str(len(self.methods))
        for method in self.methods:
            yield from ((name, part[0]) for name, part in method.items() if name != "local")
            yield "local", "plain" if len(method["local"][1]) <= 3 else "with more"


def made(part: Any) -> Any:
    """A part of the package from its name and settings."""
    if not isinstance(part, tuple):
        return part
    name, settings = part
    return getattr(fedtail, name)(**{key: made(value) for key, value in settings.items()})


def case_of(number: int) -> Case:
    rng = random.Random(f"case {number}")
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    module = rng.choice(MODULES if dtype == torch.float64 else [m for m in MODULES if m not in ("relu", "convolution")])
    channel = rng.choice(["PlainChannel"] * 5 + ["IntegerChannel"] * 2 + ["SecureChannel"])
    huge = rng.random() < 0.06 and module in ("least squares", "regression") and channel == "PlainChannel"
    population, task, loss = problem_of(rng, module, dtype, huge, equal_mass=channel == "SecureChannel")
    sampler = sampler_of(rng, len(population), channel)
    count = rng.choice([1] * 5 + [2, 3])
    methods = [method_of(rng, sampler, population, channel, huge) for _ in range(count)]
    settings = {"threshold": 2, "minimum_contributors": 2, "masks": rng.choice(["none", "none", "real"])} if channel == "SecureChannel" else {}
    if settings.get("masks") == "real":
        methods, rounds = methods[:1], 1
    else:
        rounds = rng.choice([1, 2, 3, 4])
    return Case(number, module, methods, (channel, settings), kernel_of(rng, module), dtype, rng.choice([1, 1, 1, 0, 2]),
                rng.choice([None, None, 1, 3]), rounds,
                rng.randint(0, rounds), resumed_of(rng, module, population, settings), rng.randrange(10**6), population, task,
                loss, module != "dropout")


def kernel_of(rng: random.Random, module: str) -> str:
    if module in ("softmax", "logistic", "least squares", "linear"):
        return rng.choice(["auto", "closed", "stacked", "module"])
    return rng.choice(["auto", "module"] if module in ("dropout", "tied") else ["auto", "stacked", "module"])


def resumed_of(rng: random.Random, module: str, population: Population, settings: dict[str, Any]) -> str:
    """A file names the package's own modules only, and a run needs clients to test on."""
    if module in IN_FILES and len(population) >= 5 and not settings and rng.random() < 0.2:
        return "folder"
    return rng.choice(["never", "never", "start=", "checkpoint"])


def sampler_of(rng: random.Random, clients: int, channel: str) -> textbook.Part:
    some = rng.randint(min(3, clients), clients)
    kinds = ["Everyone", "Everyone", "Uniform", "Uniform", "Poisson", "ByMass", "EqualClients", "BySize"]
    name = rng.choice(kinds[:4] if channel == "SecureChannel" else kinds)      # a secure channel is not asked for fewer than two
    sized = {"cohort_size": some} | ({"weighted": rng.random() < 0.5} if name == "BySize" else {})
    return name, {"Everyone": {}, "Poisson": {"rate": rng.choice([0.2, 0.6, 1.0])}}.get(name, sized)


def method_of(rng: random.Random, sampler: textbook.Part, population: Population, channel: str, huge: bool) -> textbook.Method:
    risk = risk_of(rng, sampler, population, channel, huge)
    inner, local = inner_risk({"risk": risk}), local_of(rng)
    aggregate: textbook.Part = ("WeightedMean", {})
    if sloped(inner) and rng.random() < (0.7 if inner[0] in ("PowerFair", "AlphaFair") else 0.3):
        aggregate = ("CurvatureMean", rng.choice([{}, {"lipschitz": rng.choice([0.5, 10.0])}]))
    return {"sample": sampler, "risk": risk, "local": ("LocalSGD", local), "aggregate": aggregate, "server": server_of(rng),
            "iterate": rng.choice([("LastIterate", {})] * 3 + [("AveragedIterate", {"contraction": 1.0}), ("RandomIterate", {}),
                                                               ("AveragedIterate", {"contraction": rng.choice([0.5, 0.97])})])}


def sloped(risk: textbook.Part) -> bool:
    """Risks whose density has a slope, and never a falling one."""
    name, settings = risk
    return name in ("Mean", "PowerFair", "AlphaFair") or (name == "Tilted" and settings["tilt"] > 0) or (
        name == "SmoothedSuperquantile" and settings["tail_fraction"] < 1)


def risk_of(rng: random.Random, sampler: textbook.Part, population: Population, channel: str, huge: bool) -> textbook.Part:
    names = ["Mean", "Superquantile", "Superquantile", "TailFilter", "SmoothedSuperquantile", "QuadraticSuperquantile", "Tilted",
             "PowerFair", "AlphaFair", "Worst", "Refreshed"]
    drawn = sampler[1].get("cohort_size", len(population))
    if population.group is not None and (channel != "SecureChannel" or 2 * len(population) <= drawn * int(population.group.unique(return_counts=True)[1].min())):
        names += ["GroupAscent"] * 2                   # a group of one client in a round is refused there
    if sampler[0] == "Everyone" and not huge:
        names += ["Ascent"] * 2
    if channel == "SecureChannel":                     # a tail of one client is refused there
        names = [n for n in names if n != "Worst"]
    name = rng.choice(names)
    if name == "Refreshed":
        inner = plain_risk(rng, rng.choice(["Superquantile", "TailFilter", "SmoothedSuperquantile", "Tilted", "PowerFair", "AlphaFair", *(["Worst"] if channel != "SecureChannel" else [])]),
                           unique=True)
        return name, {"risk": enough(inner, sampler, population, channel), "every": rng.choice([2, 3])}
    if name == "GroupAscent":
        return name, {"groups": int(population.group.max()) + 1 + rng.choice([0, 0, 1]), "step": rng.choice([0.01, 0.1, 1.0])}
    return enough(plain_risk(rng, name), sampler, population, channel)


def enough(risk: textbook.Part, sampler: textbook.Part, population: Population, channel: str) -> textbook.Part:
    """The risk with a tail of two clients at least, where these must hide each other."""
    if channel == "SecureChannel" and "tail_fraction" in risk[1]:
        drawn = sampler[1].get("cohort_size", len(population))
        risk[1]["tail_fraction"] = max(risk[1]["tail_fraction"], min(1.0, (2 + 1e-9) / drawn))
    return risk


def plain_risk(rng: random.Random, name: str, unique: bool = False) -> textbook.Part:
    """A risk without memory; with `unique`, one whose dual no plateau leaves open."""
    theta = rng.choice([0.1, 0.25, 0.3, 0.5, 0.8, 1.0, rng.uniform(0.02, 1), rng.uniform(0.02, 1)])
    if name in ("Superquantile", "TailFilter"):
        coarse = {"quantile": ("ExactQuantile", {"bits": 12})} if rng.random() < 0.15 else {}
        return name, {"tail_fraction": theta, **coarse}
    if name in ("SmoothedSuperquantile", "QuadraticSuperquantile"):
        return name, {"tail_fraction": rng.uniform(0.05, 0.95) if unique else theta, "smoothing": rng.choice([0.03, 0.3, 3.0])}
    if name == "Tilted":
        bound = rng.choice([None, None, 4.0])
        return name, {"tilt": rng.choice([-1.0, 0.1, 1.0, 3.0]), **({} if bound is None else {"loss_bound": bound})}
    if name == "AlphaFair":
        return name, {"alpha": rng.choice([0.0, 0.5, 1.0, 2.0, 3.0]), "loss_bound": rng.choice([8.0, 50.0])}
    return name, {"power": rng.choice([0.0, 0.1, 1.0, 2.0, 5.0])} if name == "PowerFair" else \
        {"step": rng.choice([0.01, 0.1, 1.0])} if name == "Ascent" else {}


def local_of(rng: random.Random) -> dict[str, Any]:
    local: dict[str, Any] = {"learning_rate": rng.choice([0.01, 0.05, 0.2]), "batch_size": rng.choice([None, 1, 3, 4, 10, 64])}
    local |= rng.choice([{}, {"epochs": 2}, {"local_steps": 1}, {"local_steps": 4}, {"epochs": 1}])
    if local["batch_size"] == 1:
        local |= {"epochs": None, "local_steps": 3}
    if rng.random() < 0.25:
        local["momentum"] = rng.choice([0.5, 0.9])
    if rng.random() < 0.25:
        local["weight_decay"] = rng.choice([0.01, 0.5])
    if rng.random() < 0.3:
        local["penalty"] = ("Proximal", {"strength": rng.choice([0.0, 0.1, 2.0])})
    if rng.random() < 0.3:
        local["schedule"] = rng.choice([("StepDecay", {"factor": 0.5, "every": rng.choice([1, 2])}),
                                        ("Cosine", {"num_rounds": rng.choice([3, 8]), "final": rng.choice([0.0, 0.2])})])
    if rng.random() < 0.25:
        local["work"] = ("Stragglers", {"fraction": rng.choice([0.5, 0.9]), "drop": rng.random() < 0.5})
    return local


def server_of(rng: random.Random) -> textbook.Part:
    name = rng.choice(["SGD", "SGD", "SGD", "Adam", "Yogi", "Adagrad"])
    if name == "SGD":
        return name, {"learning_rate": rng.choice([1.0, 1.0, 0.5]), "momentum": rng.choice([0.0, 0.0, 0.9])}
    return name, {"learning_rate": rng.choice([0.01, 0.1]), "first_decay": rng.choice([0.0, 0.9]), "second_decay": rng.choice([0.9, 0.99]),
                  "adaptivity": rng.choice([1e-3, 1e-1])}


# Data and modules


IN_FILES = ("softmax", "logistic", "least squares")
MODULES = ("softmax", "softmax", "logistic", "least squares", "least squares", "linear", "tanh", "tanh", "relu", "layer norm", "regression",
           "convolution", "characters", "positions", "words", "embedding", "tied", "frozen", "by name", "dropout")


class Named(nn.Module):
    """Takes two inputs by name."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.left, self.right = nn.Linear(width, classes), nn.Linear(2, classes, bias=False)

    def forward(self, main: Tensor, side: Tensor) -> Tensor:
        return torch.tanh(self.left(main)) + self.right(side)


class Tied(nn.Module):
    """One table reads tokens and scores them."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.score = nn.Linear(width, vocabulary)
        self.score.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.table(tokens).mean(1))


def built(kind: str, rng: random.Random, width: int, classes: int) -> nn.Module:
    bias = rng.random() < 0.7
    match kind:
        case "softmax":
            return SoftmaxRegression(width, classes, bias)
        case "logistic":
            return LogisticRegression(width, bias)
        case "least squares":
            return LeastSquares(width, rng.choice([1, 1, 2]), bias)
        case "linear":
            return nn.Linear(width, rng.choice([1, classes]), bias)
        case "tanh":
            return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, classes))
        case "relu":
            return nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, classes, bias))
        case "layer norm":
            return nn.Sequential(nn.Linear(width, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, classes))
        case "regression":
            return nn.Sequential(nn.Linear(width, 3), nn.Softplus(), nn.Linear(3, 1))
        case "convolution":
            return nn.Sequential(nn.Unflatten(1, (1, 5, 5)), nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
                                 nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, classes))
        case "characters" | "positions":
            return CharacterGRU(classes, 3, every_position=kind == "positions")
        case "words":
            return LSTMClassifier((6, 3), 3, classes, frozen_embedding=rng.random() < 0.5)
        case "embedding":
            return nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(12, classes))
        case "tied":
            return Tied(classes, 3)
        case "frozen":
            module = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, classes))
            module[0].requires_grad_(False)
            return module
        case "by name":
            return Named(width, classes)
    return nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, classes))


def problem_of(rng: random.Random, kind: str, dtype: torch.dtype, huge: bool, equal_mass: bool) -> tuple[Population, Task, str]:
    """A population with all that makes trouble, a module for it, and the kind of its loss."""
    width, classes = 25 if kind == "convolution" else rng.choice([1, 1, 2, 3, 5, 8]), rng.choice([2, 3, 4])
    with torch.random.fork_rng([]):
        torch.manual_seed(rng.randrange(2**31))
        module = built(kind, rng, width, classes).to(dtype)
        if kind in ("softmax", "logistic", "least squares") and rng.random() < 0.5:      # else they start at zero, all losses equal
            textbook.put(module, torch.randn(sum(p.numel() for p in module.parameters())))
        loss = loss_of(kind, module)
        count = rng.choice([2 if equal_mass else 1, 2, 3, 5, 6, 8, 12])
        people = [person(rng, kind, module, width, classes, loss) for _ in range(count)]
    for k in range(1, count):
        if rng.random() < 0.15:
            people[k] = people[k - 1]                  # the same data under another name
    if huge:
        people = [(inputs, targets.to(dtype)) for inputs, targets in people]
        inputs, targets = people[-1]
        people[-1] = inputs, torch.full_like(targets, 1e30 if dtype == torch.float32 else 1e200)      # its square is infinite
    mass = [1.0] * count if equal_mass else rng.choice([None, None, [1.0] * count, [10 ** rng.uniform(-2, 2) for _ in range(count)]])
    group = [rng.randrange(3) for _ in range(count)] if rng.random() < 0.4 else None
    population = Population.from_clients([(numbers(x), y.numpy()) for x, y in people], mass=mass, group=group)
    if rng.random() < 0.3:                             # clients keep the names of their streams wherever they stand
        population = population.select(rng.sample(range(count), count))
    return population, Task(module), loss


def loss_of(kind: str, module: nn.Module) -> str:
    if kind in ("least squares", "regression"):
        return "numbers"
    if kind == "logistic" or (kind == "linear" and module.out_features == 1):
        return "one logit"
    return "positions" if kind == "positions" else "classes"


def person(rng: random.Random, kind: str, module: nn.Module, width: int, classes: int, loss: str) -> tuple[Any, Tensor]:
    """One client's examples, of a distribution of its own."""
    size = rng.choice([1, 1, 2, 3, 3, 4, 5, 7, 8, 11, 30])
    shift, scale = rng.gauss(0, 1), rng.choice([0.3, 1.0, 1.0, 5.0])
    x: Any = (shift + scale * torch.randn(size, width, dtype=torch.float64)).float()
    if kind in ("embedding", "tied"):
        x = torch.randint(0, 6 if kind == "embedding" else classes, (size, 4))
    elif kind in ("characters", "positions", "words"):
        x = {"sequence": torch.randint(0, 6 if kind == "words" else classes, (size, 4)), "lengths": torch.randint(0, 5, (size,))}
    elif kind == "by name":
        x = {"main": x, "side": torch.randn(size, 2)}
    if loss == "numbers":
        outputs = module.linear.out_features if kind == "least squares" else 1
        return x, (shift + torch.randn(size, outputs)).float().reshape((size,) if outputs == 1 else (size, outputs))
    if loss == "positions":
        targets = torch.randint(0, classes, (size, 4))
        return x, targets.masked_fill(torch.arange(4) >= x["lengths"][:, None], -100)
    return x, torch.randint(0, 2 if loss == "one logit" else classes, (size,))


def numbers(inputs: Any) -> Any:
    return {name: values.numpy() for name, values in inputs.items()} if isinstance(inputs, dict) else inputs.numpy()


def textbook_problem(case: Case) -> textbook.Problem:
    """The data and the module of a case, one client after the other."""
    population, clients = case.population, []
    for k in range(len(population)):
        inputs, targets = population.client(k)
        inputs = {name: wide(v) for name, v in inputs.items()} if isinstance(inputs, dict) else wide(inputs)
        group = -1 if population.group is None else int(population.group[k])
        clients.append(textbook.Client(int(population.key[k]), float(population.mass[k]), group, inputs, wide(targets)))
    return textbook.Problem(clients, copy.deepcopy(case.task.module).double(), case.loss, torch.finfo(case.dtype).max)


def wide(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


# Checks


@contextmanager
def small_blocks() -> Iterator[None]:
    """Blocks and jobs so small that a case is shared between processes; which blocks there are changes bits, who does them none."""
    before = blocks.GRAIN, blocks.OVERHEAD, blocks.TOGETHER, workers.WORTH_STARTING, workers.WORTH_SHARING
    blocks.GRAIN, blocks.OVERHEAD, blocks.TOGETHER, workers.WORTH_STARTING, workers.WORTH_SHARING = BLOCK, 1, 2, 0.0, 0.0
    try:
        yield
    finally:
        blocks.GRAIN, blocks.OVERHEAD, blocks.TOGETHER, workers.WORTH_STARTING, workers.WORTH_SHARING = before


def trained(case: Case, rounds: int, start: Trained | None = None, workers: int = 1, views: list | None = None) -> Trained:
    with LocalFleet(case.population, case.task, dtype=case.dtype, chunk=case.chunk, kernel=case.kernel, workers=workers) as fleet:
        engine, watch = Engine(dtype=case.dtype), None if views is None else lambda progress: views.append(progress.view)
        settings = {"rounds": rounds, "engine": engine, "fleet": fleet, "channel": made(case.channel), "on_round": watch}
        if start is not None:
            return resume(start, case.population, **settings)
        return train(case.algorithm, case.task, case.population, seed=case.seed, **settings)


def check(case: Case) -> None:
    """Everything that must hold of a case."""
    with warnings.catch_warnings(record=True) as said, small_blocks():
        for expected in EXPECTED:
            warnings.simplefilter("always" if expected is RoundLostWarning else "ignore", expected)
        views: list[Any] = []
        try:
            whole = trained(case, case.rounds, views=views)
        except ValueError as refused:
            check_refused(case, refused)
            return
        check_workers(case, whole)
        check_folder(case) if case.resumed == "folder" else check_resumed(case, whole)
        check_risks(case)
        lost = len(case.methods) > 1 and any(one.category is RoundLostWarning for one in said)      # for all, if by one of them
        if case.numeric and not lost:
            check_models(case, whole, views)


def check_refused(case: Case, refused: ValueError) -> None:
    """Channels of integers refuse rows beyond their bound, as training that diverges makes, and every run data without a target;
    nothing else is refused."""
    empty = "every target is padding" in str(refused) and bool((case.population.targets == -100).all())
    runs = [textbook.Run(textbook_problem(case), method, case.seed).go(case.rounds) for method in case.methods] if case.numeric and not empty else []
    most = [1.0 if run.method["aggregate"][0] == "CurvatureMean" else WILD for run in runs]      # a curvature is the square of an update
    wild = any(played.largest > limit or max(played.losses, default=0.0) > WILD for run, limit in zip(runs, most, strict=True) for played in run.rounds)
    if not empty and ("beyond its bound" not in str(refused) or case.channel[0] == "PlainChannel" or not wild):
        raise refused
    raise Refused(str(refused))


def check_workers(case: Case, whole: Trained) -> None:
    if case.workers != 1:
        same_bits(whole, trained(case, case.rounds, workers=case.workers), f"with {case.workers} workers")


def check_resumed(case: Case, whole: Trained) -> None:
    """Stopped after some rounds, perhaps none or all, and gone on."""
    if case.resumed == "never":
        return
    first = trained(case, case.stop)
    if case.resumed == "checkpoint":
        with tempfile.TemporaryDirectory() as folder:
            Checkpoints(Path(folder)).save(first, {})
            checkpoint, _ = Checkpoints(Path(folder)).load()
        first = checkpoint.to_trained(case.algorithm, case.task, case.seed)
    same_bits(whole, trained(case, case.rounds - case.stop, start=first), f"stopped after round {case.stop}, resumed by {case.resumed}")


def check_folder(case: Case) -> None:
    """The same in a run folder, by an experiment that is written as a file: interrupted and resumed, its files have the same bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder, rounds = Path(name), case.rounds + 1
        made_up = experiment_of(case, folder, rounds)
        whole = run(made_up, case.seed, folder / "whole", Onlooker())
        with suppress(Interrupted):
            run(made_up, case.seed, folder / "cut", Onlooker(case.stop + 1))
        cut = run(made_up, case.seed, folder / "cut", Onlooker(), resume=True)
        if digests(whole.path) != digests(cut.path):
            raise Disagreement(f"a run folder has other bytes, interrupted after round {case.stop + 1} of {rounds} and resumed")


def experiment_of(case: Case, folder: Path, rounds: int) -> Experiment:
    """The first method of a case, on most of its clients."""
    population, method = case.population, case.methods[0]
    owner, rows = population.example_clients_and_rows()
    arrays = {"x": population.inputs[rows], "y": population.targets[rows], "client": owner, "mass": population.mass[owner]}
    arrays |= {} if population.group is None else {"group": population.group[owner]}
    np.savez(folder / "clients.npz", **{name: values.numpy() for name, values in arrays.items()})
    sampler = ("Everyone", {}) if method["sample"][0] == "Uniform" else method["sample"]      # some clients are for tests
    parts = {name: in_a_file(part) for name, part in method.items() if name != "local"} | {"sample": in_a_file(sampler)}
    linear = case.task.module.linear
    shape = {"classes": linear.out_features} if case.module == "softmax" else {"outputs": linear.out_features} if \
        case.module == "least squares" else {}
    module = {"part": type(case.task.module).__name__, "features": linear.in_features, "bias": linear.bias is not None, **shape}
    data = {"kind": "arrays", "path": str(folder / "clients.npz"), "mass": "mass", "split": {"train": 0.7, "test": 0.3}}
    local = {name: in_a_file(value) for name, value in method["local"][1].items() if value is not None or name == "batch_size"}
    local["batch_size"] = local["batch_size"] or "none"
    text = tomli_w.dumps({"rounds": rounds, "data": data | ({} if population.group is None else {"group": "group"}), "task": {"module": module},
                          "local": local, "engine": {"kernel": case.kernel, "workers": 1}, **parts})
    return build_experiments(Source.parse(text, "case.toml", folder), "case")[0]


def in_a_file(part: Any) -> Any:
    """A part as a table of a file."""
    return {"part": part[0], **{key: in_a_file(value) for key, value in part[1].items()}} if isinstance(part, tuple) else part


def same_bits(one: Trained, other: Trained, how: str) -> None:
    for name, mine in bits(one).items():
        theirs = bits(other).get(name)
        if mine != theirs:
            raise Disagreement(f"{name} has other bits {how}")
    if bits(one).keys() != bits(other).keys() or one.failed != other.failed:
        raise Disagreement(f"something else is remembered {how}")


def bits(run: Trained) -> dict[str, bytes]:
    """All that a run leaves."""
    tensors: dict[str, Any] = dict(run.memory.kept)
    for k, state in enumerate(member_states(run.state)):
        tensors |= {f"{k} model": state.params, f"{k} dual": state.dual, f"{k} iterate": state.part_state("iterate")}
        tensors |= {f"{k} optimizer {i}": tensor for i, tensor in enumerate(state.optimizer_state)}
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items() if tensor is not None}


def check_models(case: Case, whole: Trained, views: list[Any]) -> None:
    """Models, cohorts and who counted, against the textbook."""
    problem, fewest, hides = textbook_problem(case), case.channel[1].get("threshold", 1), case.channel[1].get("minimum_contributors", 0)
    handed_out = result_params(case.algorithm, whole.state)
    runs = [textbook.Run(problem, method, case.seed, fewest=fewest, hides=hides).go(case.rounds) for method in case.methods]
    if len(runs) > 1 and any(played.lost for one in runs for played in one.rounds):
        return                                             # a family loses the rounds that any of its members loses
    for k, (method, state, exact) in enumerate(zip(case.methods, member_states(whole.state), runs, strict=True)):
        try:
            same_people(method, exact, views, k)
            same_models(case, method, problem, exact, state.params, handed_out[k])
        except Disagreement as what:
            if undecided(case, method, exact):
                raise Undecided(str(what)) from what
            raise Disagreement(f"{what} (model {k}: {method})") from what


def same_people(method: textbook.Method, run: textbook.Run, views: list[Any], model: int) -> None:
    """The same cohorts, and the same clients who count, but for those whose weight is within a search's error of zero."""
    slight = 1e-9 + 10 * SEARCHED.get(inner_risk(method)[0], 0.0)
    for number, (played, view) in enumerate(zip(run.rounds, views, strict=True)):
        if view.sampled.tolist() != played.cohort:
            raise Disagreement(f"round {number} drew {view.sampled.tolist()}, not {played.cohort}")
        counted, least = set(view.contributors_of(model).tolist()), slight * max(played.weights.values(), default=0.0)
        wrong = {k for k in counted ^ played.counted if played.weights.get(k, 0.0) > least or slight < 1e-8}
        if len(view.trained) == 1 and wrong:           # with several models, a client that fails under one is left out of all views
            raise Disagreement(f"in round {number} {sorted(counted)} count, not {sorted(played.counted)}")


def inner_risk(method: textbook.Method) -> textbook.Part:
    return method["risk"][1]["risk"] if method["risk"][0] == "Refreshed" else method["risk"]


def same_models(case: Case, method: textbook.Method, problem: textbook.Problem, run: textbook.Run, params: Tensor, result: Tensor) -> None:
    """To the last bits; else, how far do errors put in on purpose move it?"""
    apart = max(size_of(params.double() - run.models[-1]), size_of(result.double() - run.result))
    rounding = torch.finfo(case.dtype).eps
    if apart <= 4 * rounding * max(size_of(run.models[-1]), size_of(run.result)):
        return
    grain = 0.0 if case.channel[0] == "PlainChannel" else GRAIN
    noises = [textbook.Noise(rounding, SEARCHED.get(inner_risk(method)[0], 0.0), grain, seed) for seed in range(3 if len(params) < 8 else 1)]
    shaken = [textbook.Run(problem, method, case.seed, noise, run.fewest, run.hides).go(case.rounds) for noise in noises]
    allowed = FACTOR * max(max(size_of(s.models[-1] - run.models[-1]), size_of(s.result - run.result)) for s in shaken)
    if not apart <= allowed and not same_where_not_finite(params, run.models[-1]):
        raise Disagreement(f"the model is {apart:.3g} from the textbook's, where rounding explains {allowed:.3g}")


def size_of(values: Tensor) -> float:
    return float(values.abs().max())


def same_where_not_finite(mine: Tensor, theirs: Tensor) -> bool:
    return not bool(mine.isfinite().all()) and not bool((theirs.abs() <= torch.finfo(mine.dtype).max).all())


def undecided(case: Case, method: textbook.Method, run: textbook.Run) -> bool:
    """Whether losses moved by rounding would change who counts, in any round."""
    risk = inner_risk(method)
    if risk[0] in ("Mean", "Ascent", "GroupAscent"):
        return False
    if any(loss * 2.0**-52 > risk[1].get("smoothing", math.inf) for played in run.rounds for loss in played.losses):
        return True                                        # the smoothing is lost in the rounding of such losses
    slack, rng = 30 * torch.finfo(case.dtype).eps, random.Random(0)
    for played in run.rounds:
        if not played.losses:
            continue
        exact = jumps(risk, played.losses, played.mass)
        searched = SEARCHED.get(risk[0], 0.0) * risk[1].get("smoothing", 0.0)      # how far off the dual may be
        for shift in (searched, -searched) if searched else ():
            found = jumps(risk, played.losses, played.mass, shift)
            if any(abs(a - b) > 1e-3 * max(abs(a), 1.0) for a, b in zip(exact, found, strict=True)):
                return True
        for _ in range(20):
            moved = [textbook.rounded(f * (1 + slack * rng.choice([-1, 1])) + slack * rng.choice([-1, 0, 1])) for f in played.losses]
            if any(abs(a - b) > 1e-3 * max(abs(a), 1.0) for a, b in zip(exact, jumps(risk, moved, played.mass), strict=True)):
                return True
    return False


def jumps(risk: textbook.Part, losses: list[float], mass: list[float], shift: float = 0.0) -> list[float]:
    dual = textbook.dual_of(risk, losses, mass)
    dual = dual + shift if shift else dual
    return [f(risk, loss, dual) for loss in losses for f in (textbook.density, textbook.slope)]


def check_risks(case: Case) -> None:
    """A random risk on random losses with ties: weights alone, weights by questions, value and gradient."""
    rng = random.Random(f"risk {case.number}")
    name = rng.choice(["Mean", "Superquantile", "TailFilter", "SmoothedSuperquantile", "QuadraticSuperquantile", "Tilted", "PowerFair",
                       "AlphaFair", "Worst"])
    part = plain_risk(rng, name)
    part = (name, {k: v for k, v in part[1].items() if k not in ("quantile", *(["loss_bound"] if name == "Tilted" else []))})
    count = rng.choice([1, 2, 3, 7, 20])
    losses = [float(np.float32(rng.choice([rng.uniform(0.01, 5), 0.0, 0.5, 1.0, 2.0]))) for _ in range(count)]
    mass = rng.choice([[1.0] * count, [float(rng.randint(1, 30)) for _ in range(count)], [rng.uniform(0.1, 5) for _ in range(count)]])
    if count > 1 and rng.random() < 0.2:
        mass[rng.randrange(count)] = 0.0               # as if absent
    risk, exact = made(part), textbook.weights_of(part, losses, mass)
    given, masses = torch.tensor(losses, dtype=torch.float64, requires_grad=True), torch.tensor(mass, dtype=torch.float64)
    seen = ClientStatistics(given.detach(), masses)
    asked = masses * risk.density(seen, fit_locally(risk.fit(None), seen))
    near(risk.weights(given, masses), exact, 1e-9, f"{part}: weights of {losses}, masses {mass}")
    near(asked / asked.sum(), exact, 1e-9 + 3 * SEARCHED.get(name, 0.0), f"{part}: weights by questions of {losses}, masses {mass}")
    value = risk.value(given, masses)
    near(value[None].detach(), [textbook.value_of(part, losses, mass)], 1e-9, f"{part}: value of {losses}, masses {mass}")
    if name == "PowerFair":                            # its weights are normalised, its gradient is not
        total = math.fsum(mass)
        exact = [m / total * f ** part[1]["power"] for f, m in zip(losses, mass, strict=True)]
    if name == "AlphaFair":
        total, bound = math.fsum(mass), part[1]["loss_bound"]
        shared = bound - textbook.value_of(part, losses, mass)
        exact = [m / total * (shared / (bound - f)) ** part[1]["alpha"] for f, m in zip(losses, mass, strict=True)]
    gradient, = torch.autograd.grad(value, given)
    near(gradient, exact, 1e-9, f"{part}: gradient at {losses}, masses {mass}")


def near(mine: Tensor, theirs: list[float], within: float, what: str) -> None:
    exact = torch.tensor(theirs, dtype=torch.float64)
    if not bool(((mine - exact).abs() <= within * (1 + exact.abs())).all()):
        raise Disagreement(f"{what}: {mine.tolist()}, not {theirs}")


# Many cases


def fuzz(numbers: Any, seconds: float = math.inf, report: float = math.inf) -> Counter:
    """Try cases until time is up; raises `Disagreement` with the command that shows it again. Counts what was covered."""
    counts: Counter = Counter()
    began = told = time.perf_counter()
    for number in numbers:
        try:
            one(number, counts)
        except Disagreement as what:
            raise Disagreement(f"case {number}: {what}\npython tests/fuzz_core.py --case {number}") from what
        now = time.perf_counter()
        if now - told >= report:
            told = now
            print(f"{now - began:6.0f} s  {counts['cases']} cases, {counts['undecided']} undecided, {counts['refused']} refused", flush=True)
        if now - began >= seconds:
            break
    if counts["undecided"] > max(2, UNDECIDED * counts["cases"]):
        raise Disagreement(f"{counts['undecided']} of {counts['cases']} cases are undecided, at most {UNDECIDED:.0%} may be")
    return counts


def one(number: int, counts: Counter) -> None:
    case = case_of(number)
    counts["cases"] += 1
    for label in set(case.labels()):
        counts[label] += 1
    try:
        check(case)
    except (Undecided, Refused) as what:
        counts[type(what).__name__.lower()] += 1
    except Disagreement:
        raise
    except Exception as what:
        raise Disagreement(f"{type(what).__name__}: {what}") from what


def table(counts: Counter) -> str:
    """How many cases had what."""
    lines: dict[str, list[str]] = {}
    for label, number in sorted((item for item in counts.items() if isinstance(item[0], tuple)), key=lambda item: -item[1]):
        lines.setdefault(label[0], []).append(f"{label[1]} {number}")
    return "\n".join(f"{name:10s} {', '.join(values)}" for name, values in lines.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10**6)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first = given.seed * 10**6
    numbers = [given.case] if given.case is not None else range(first, first + given.cases)
    began = time.perf_counter()
    try:
        counts = fuzz(numbers, given.seconds, report=10.0)
    except Disagreement as what:
        print(f"DISAGREEMENT after {time.perf_counter() - began:.0f} s: {what}", file=sys.stderr)
        return 1
    print(f"{table(counts)}\n{counts['cases']} cases in {time.perf_counter() - began:.0f} s, {counts['undecided']} undecided, "
          f"{counts['refused']} refused: no disagreement.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
