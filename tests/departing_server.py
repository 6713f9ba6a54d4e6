"""Nodes in folders, as their operators have them, and a server that departs from the protocol: it sends what it likes.

Each attack on a node is tried twice: against nodes as they are, and with the defence that stops it switched off, where it succeeds.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import fedtail
from fedtail.channel.base import row_bound_for, server_noise_source
from fedtail.channel.integer import FixedPoint
from fedtail.channel.plain import PlainChannel
from fedtail.client_memory import NodeMemory
from fedtail.deployment import RemoteFleet
from fedtail.deployment.consent import accept, experiment_digest
from fedtail.deployment.node import Open
from fedtail.deployment.policy_example import write_policy
from fedtail.deployment.settings import NodeSettings
from fedtail.engine.local_fleet import LocalFleet
from fedtail.fleet import Broadcast
from fedtail.sampling import Cohort
from fedtail.wire import pack

from remote_cases import PEOPLE, TASK, registry_of

HEAD = """\
name = "{name}"
rounds = 3
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[local]
learning_rate = 0.2
batch_size = 4
"""
BARE = HEAD.format(name="bare") + "[sample]\ncohort_size = 30\n"
PRIVATE = HEAD.format(name="private") + """\
[sample]
part = "Poisson"
rate = 0.5
population = 30
[aggregate]
part = "PrivateMean"
clip_norm = 10.0
total = 30.0
noise = { part = "DiscreteNoise", noise_multiplier = 2.0, planned_clients = 12 }
"""
TAIL = BARE + """\
[risk]
part = "Superquantile"
tail_fraction = 0.5
"""
WEIGHT = -1                     # the last entry of a mean's row


class Nodes:
    """Three nodes of ten clients, from their own files; what leaves them is masked, and their policy allows one training."""

    def __init__(self, place: Path, file: str = BARE, more: str = "", **policy: int):
        self.registry, self.settings = registry_of(PEOPLE, 3), {}
        for k, name in enumerate(("north", "south", "east")):
            folder = place / name
            folder.mkdir(parents=True)
            (folder / "experiment.toml").write_text(file)
            PEOPLE.select(self.registry.node == k).save(folder / "people")
            (folder / "node.toml").write_text(f'name = "{name}"\nexperiment = "experiment.toml"\ndata = "people"\nminimum = 2\nkeys = "data"\n'
                                              f"{more}")
            self.settings[k] = NodeSettings.read(folder / "node.toml")
            written = write_policy(self.settings[k], **policy)      # each attack meets one defence: cohorts may be of any size
            written.write_text(re.sub(r"smallest_cohort = \d+", "smallest_cohort = 2", written.read_text()))
            accept(self.settings[k], experiment_digest(self.settings[k].read_experiments()))
        self.method = self.settings[0].read_experiments()[0].algorithm
        self.restart()

    def restart(self) -> None:
        """New processes of all nodes, with what is on their disks."""
        self.sites = {k: one.make_site() for k, one in self.settings.items()}

    def exchange(self, letters):
        return {node: self.sites[node].handle(letter) for node, letter in letters.items()}


class DepartingServer(RemoteFleet):
    """A server that may forge each node's part of the cohort, and asks whatever question it likes in a round it began."""

    def __init__(self, nodes: Nodes, training: bytes = b"a training, 16 b", schedule: str = "simple"):
        super().__init__(nodes.exchange, nodes.registry, schedule=schedule)
        self._nodes = NodeMemory(training)
        self.forged: Callable[[int, Cohort], Cohort] = lambda node, cohort: cohort

    def begin(self, round: int, seed: int = 0, params: Tensor | None = None, ids: Tensor | None = None) -> None:
        """Begin a round with everybody, or the clients `ids`, whose parts of the cohort are forged."""
        cohort = everybody(ids)
        self.open_round(cohort, Broadcast(round, seed, TASK.params()[None] if params is None else params[None]))
        parts = {node: self.forged(node, self.population.cohort_at(cohort, node)) for node in self._counts}
        self._counts = {node: len(part.ids) for node, part in parts.items()}
        self._members = torch.tensor(list(self._counts.items()))
        for node, part in parts.items():
            self._unsent[node][-1] = pack(Open(part, self._broadcast, self._nodes.training, self._nodes.lost, self._members))

    def read(self, question, mass: float | None = None) -> Tensor | None:
        """The sum that the nodes release for a question about the open round, decoded; None where they release none."""
        count = sum(self._counts.values())
        encoding = FixedPoint(count, everybody().mass_bound if mass is None else mass, 62)
        try:
            total, = self.collect_masked((question,), encoding, 2, lambda: None)
        except fedtail.channel.RoundLost:
            return None
        sums = encoding.decode(total, row_bound_for(question, len(total), encoding))
        return question.mechanism.on_server(sums, server_noise_source(self._broadcast, question.number))

    @property
    def said(self) -> str:
        """What nodes say about the last question that they did not answer."""
        return " ".join(self.reports[-1].problems.values()) if self.reports else ""


def everybody(ids: Tensor | None = None) -> Cohort:
    """A cohort of the clients `ids`, all by default, each of mass one."""
    ids = torch.arange(len(PEOPLE)) if ids is None else ids
    return Cohort(ids, PEOPLE.key[ids], torch.ones(len(ids), dtype=torch.float64), 1.0)


def train_question(method) -> object:
    """The question to train, with which a round of a mean ends."""
    conversation = method.conversation(method.initial_state(TASK.params(), 0), 0, everybody())
    return next(conversation)


def truth(question, ids: list[int], round: int = 0, seed: int = 0, params: Tensor | None = None) -> Tensor:
    """The sum of these clients' rows, computed from their data by nobody's node; by default at the model of zeros."""
    chosen = torch.tensor(ids)
    with LocalFleet(PEOPLE, TASK, workers=1) as fleet:
        fleet.open_round(everybody(chosen), Broadcast(round, seed, TASK.params()[None] if params is None else params[None]))
        found, = fleet.collect((question,), PlainChannel().encoding(len(ids), 1.0))
        fleet.close_round(False)
    return found.double()


def alike(one: Tensor | None, other: Tensor) -> bool:
    """Whether a sum was released and is the other one, but for rounding."""
    return one is not None and torch.allclose(one, other, atol=1e-5)


@contextlib.contextmanager
def without(*defences: str) -> Iterator[None]:
    """Switch methods off, by "module:Class.method" or "module:function": nothing is refused by them."""
    with contextlib.ExitStack() as stack:
        for one in defences:
            stack.enter_context(mock.patch(one.replace(":", "."), return_value=None))
        yield


@contextlib.contextmanager
def nodes(file: str = BARE, more: str = "", **policy: int) -> Iterator[Nodes]:
    """Three nodes in a temporary folder."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Nodes(Path(place), file, more, **policy)


def noiseless(question):
    """The same question, answered by a plain mean."""
    return replace(question, aggregate=fedtail.WeightedMean())


def averaged_noise(sums: list[Tensor], exact: Tensor) -> float:
    """The noise in the mean of noisy sums over that in one of them, by the root of the mean square: 1 for equal sums, else n^-1/2.

    Of 12 sums with independent noise in 18 entries it is above 0.5 with a probability below 1e-3, by Fisher's F with 18 and 216.
    """
    noise = torch.stack(sums) - exact
    return float(noise.mean(0).square().mean().sqrt() / noise.square().mean().sqrt())
