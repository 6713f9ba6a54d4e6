"""A process that holds its own clients and answers bytes with bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtail.aggregation import AdaptiveClip, CurvatureMean, PrivateMean, WeightedMean
from fedtail.channel.integer import FixedPoint
from fedtail.channel.plain import Plain
from fedtail.clients import Broadcast
from fedtail.data.population import Population
from fedtail.engine.fleet import LocalFleet
from fedtail.local import Constant, Cosine, FullWork, LocalSGD, NoPenalty, Proximal, StepDecay, Stragglers
from fedtail.privacy import DiscreteNoise, GaussianNoise, NoisySum, NoPrivacy
from fedtail.quantiles import ExactQuantile, MajoriseMinimise, NoisyHistogram
from fedtail.quantiles.majorise import MassAbove, PinballStep
from fedtail.quantiles.radix import Digit
from fedtail.questions import Statistic, Train
from fedtail.risk import (
    Ascent,
    Binned,
    GroupAscent,
    Mean,
    PowerFair,
    QuadraticSuperquantile,
    Refreshed,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    Tilted,
    Worst,
)
from fedtail.risk.ascent import Surplus
from fedtail.sampling import Cohort
from fedtail.task import Task
from fedtail.wire import named, pack, unpack


@dataclass(frozen=True)
class Open:
    """A round begins: who of this node's clients is drawn, and what they are told."""

    cohort: Cohort
    broadcast: Broadcast


@dataclass(frozen=True)
class Ask:
    """Questions about the round that is open, and the code for their answers."""

    round: int
    questions: tuple[Any, ...]
    encoding: Any


@dataclass(frozen=True)
class Close:
    """The round is over, held to its end or not."""

    finished: bool


@dataclass(frozen=True)
class Failure:
    """What went wrong on the node, in words."""

    reason: str


PARTS: tuple[type, ...] = (                         # what a node is willing to build; give it your own parts as well
    Open, Ask, Close, Failure, Cohort, Broadcast, Statistic, Train, Plain, FixedPoint,
    LocalSGD, NoPenalty, Proximal, Constant, StepDecay, Cosine, FullWork, Stragglers,
    Mean, Superquantile, TailFilter, SmoothedSuperquantile, QuadraticSuperquantile, Tilted, PowerFair, Worst,
    Ascent, GroupAscent, Surplus, Refreshed, ExactQuantile, Digit, MajoriseMinimise, PinballStep, MassAbove,
    WeightedMean, CurvatureMean, PrivateMean, AdaptiveClip,
    Binned, NoisyHistogram, NoPrivacy, NoisySum, GaussianNoise, DiscreteNoise,
)


class Node:
    """Answers for its own population: `handle(message) -> reply`, bytes both ways, no transport in here.

    `parts` are classes beside fedtail's own that questions may hold, a user's risk for example.
    """

    def __init__(self, population: Population, task: Task, parts: Iterable[type] = (), dtype: torch.dtype | None = None):
        task.check(population)
        self.fleet = LocalFleet(population, task, dtype=dtype)
        self.round = -1                                 # no round is open
        self.given: dict[bytes, tuple[Tensor, ...]] = {}      # what was answered in this round, by what was asked
        self.types = named((*PARTS, *parts))

    def handle(self, message: bytes) -> bytes:
        try:
            return pack(self._reply(unpack(message, self.types)))
        except Exception as reason:
            return pack(Failure(f"{type(reason).__name__}: {reason}"))

    def _reply(self, message: Any) -> tuple[Tensor, ...]:
        if isinstance(message, Open):
            told = replace(message.broadcast, noise_seed=None)      # noise from this machine, never from a seed of the server
            self.fleet.open(message.cohort, told)
            self.round, self.given = told.round, {}
        elif isinstance(message, Ask):
            if message.round != self.round:
                raise ValueError(f"round {message.round} is asked about, but round {self.round} is open (-1: none).")
            return self._answer(message)
        elif isinstance(message, Close):
            self.fleet.close(message.finished)
            self.round = -1
        else:
            raise TypeError(f"a node cannot be sent a {type(message).__name__}.")
        return ()

    def _answer(self, message: Ask) -> tuple[Tensor, ...]:
        """A question asked again is answered as before: fresh noise could be averaged away."""
        asked = pack(message)
        if asked not in self.given:
            self.given[asked] = tuple(self.fleet.collect(message.questions, message.encoding))
        return self.given[asked]
