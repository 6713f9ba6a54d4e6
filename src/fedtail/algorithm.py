"""One loop for every method: a round is a few questions, each answered by a sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtail.aggregation.adaptive_clip import AdaptiveClip
from fedtail.aggregation.base import Aggregated, Aggregator
from fedtail.aggregation.private_mean import PrivateMean
from fedtail.channel.base import Channel, Fleet, RoundLost
from fedtail.clients import Broadcast
from fedtail.data.population import Population
from fedtail.iterates import Iterate, LastIterate
from fedtail.local.sgd import LocalSGD
from fedtail.privacy.events import NonPrivateRelease, PoissonSampling, Release, RoundEvent
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy
from fedtail.privacy.minimum_cohort import decisive_share
from fedtail.questions import Conversation, Train, about, converse, side_by_side
from fedtail.risk.base import Risk
from fedtail.sampling import Cohort, Sampler
from fedtail.server import OptimizerState, ServerOptimizer

ENOUGH_IN_TAIL = 10
RESOLVED = 15.0      # exp(-15) of a weight still leaves updates a few digits in 62 bits


class SmallTailWarning(UserWarning):
    """Few clients count in a round: what the cohort optimises is far from the risk over all clients."""


class RoundLostWarning(UserWarning):
    """Too few clients stayed, or counted, for a sum that may be released."""


@dataclass(frozen=True)
class State:
    """Where a run stands."""

    params: Tensor                              # (dim,) the model
    dual: Tensor | None = None                  # the risk's public numbers of the last round
    optimizer: OptimizerState = ()
    round: int = 0
    kept: Tensor | None = None                  # what the iterate keeps
    aggregate: Tensor | None = None             # what the aggregator keeps


def states_of(state: Any) -> tuple[State, ...]:
    """The states of a family, or of one method as a family of one."""
    return state if isinstance(state, tuple) else (state,)


@dataclass(frozen=True)
class FederatedAlgorithm:
    """A method, as its parts. Change one with `dataclasses.replace`."""

    sample: Sampler                             # population -> cohort
    local: LocalSGD                             # clients -> one update per client
    risk: Risk                                  # losses -> dual -> how much each client counts
    aggregate: Aggregator                       # client half makes rows of (update, weight); server half asks
    server: ServerOptimizer                     # (params, update, state) -> (params, state)
    iterate: Iterate = field(default_factory=LastIterate)

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, type):
                raise TypeError(f"{part.name} is the class {value.__name__}, a part is needed. Write {value.__name__}(...).")

    @property
    def members(self) -> tuple[FederatedAlgorithm, ...]:
        """A family of one."""
        return (self,)

    def start(self, params: Tensor, seed: int) -> State:
        return State(params, None, self.server.start(params), 0, self.iterate.keep(None, params, 0, seed))

    def broadcast(self, state: State, seed: int) -> Broadcast:
        return Broadcast(state.round, seed, state.params[None])

    def conversation(self, state: State, seed: int) -> Conversation[State]:
        dual = yield from self.risk.fit(state.dual)
        train = Train(self.local, self.risk, dual, self.aggregate, kept=state.aggregate)
        found = yield from self.aggregate.fit(train)
        update, kept = found if isinstance(found, Aggregated) else (found, None)
        if update is None:                      # nobody counted: keep the model
            return replace(self.skip(state, seed), dual=self.risk.unused(dual), aggregate=kept)
        params, optimizer = self.server(state.params, update.to(state.params), state.optimizer)
        return self._next(State(params, dual, optimizer, state.round + 1, state.kept, kept), seed)

    def skip(self, state: State, seed: int) -> State:
        """A round in which nobody could be asked keeps the model."""
        return self._next(replace(state, round=state.round + 1), seed)

    def result(self, state: State) -> Tensor:
        """The model to hand out: the last one, or the average or draw that `iterate` keeps."""
        return self.iterate.result(state.kept, state.params)

    def check(self, population: Population, channel: Channel, fleet: Fleet) -> None:
        """Refuse, before any work starts, parts that do not fit each other, the data, the channel or the fleet."""
        self.sample.check(population)
        self.risk.check(population, self.sample)
        risk = type(self.risk).__name__
        channel.refuse(self.mechanism, self.aggregate.gathers, type(self.aggregate).__name__)
        channel.refuse(self.risk.mechanism, False, risk)
        if self.mechanism.private and self.risk.not_private:
            raise ValueError(f"{risk} cannot be trained privately: {self.risk.not_private}. Use Binned(Superquantile(...), "
                             "...), or WeightedMean without privacy.")
        if isinstance(self.aggregate, (PrivateMean, AdaptiveClip)):
            self.aggregate.check(self.risk, self.sample.expected_size(population))
        if getattr(self.aggregate, "needs_slope", False) and not self.risk.has_slope:
            raise ValueError(f"{type(self.aggregate).__name__} needs the slope of the density, which {risk} does not give. "
                             "Use WeightedMean, or PowerFair as the risk.")
        if not channel.reveals_rows and self.risk.dynamic_range > RESOLVED:
            raise ValueError(f"with {self.risk} every weight may be as small as exp(-{self.risk.dynamic_range:g}), which the "
                             f"integers of {type(channel).__name__} do not resolve (limit {RESOLVED:g}). Lower tilt, tighten "
                             "loss_bound or leave it out; or raise tail_fraction (theta), or use Worst.")
        if fleet.forgets and not self.risk.survives_lost_memory:
            raise ValueError(f"{risk} cannot run on a fleet that may lose its clients' memory: {self.risk.lost_memory}.")
        expected = self.sample.expected_size(population)
        channel.refuse_parts(self.risk, expected, fleet)
        tail = self.risk.expected_tail(expected)
        if tail < min(ENOUGH_IN_TAIL, expected) and not self.sample.takes_everyone(population):
            warnings.warn(f"{risk} counts about {tail:g} of {expected:g} clients a round; what such a cohort optimises is far "
                          "from the risk over all clients (theta * m should be 10 or more). Draw more clients.",
                          SmallTailWarning, stacklevel=4)

    @property
    def mechanism(self) -> Mechanism:
        """What happens to the updates before they cross."""
        return getattr(self.aggregate, "mechanism", NoPrivacy())

    @property
    def minimum(self) -> int:
        """The fewest clients a round may be asked of."""
        return max(self.mechanism.minimum, self.risk.mechanism.minimum)

    def releases(self, dim: int) -> tuple[Release, ...]:
        """What a round reveals, at most, of a model with `dim` parameters."""
        updates = Train(self.local, self.risk, torch.zeros(0), self.aggregate, gather=self.aggregate.gathers)
        return (*self.risk.releases(), updates.release(dim))

    def _next(self, state: State, seed: int) -> State:
        return replace(state, kept=self.iterate.keep(state.kept, state.params, state.round, seed))


@dataclass(frozen=True)
class Family:
    """Several methods over one cohort: as many models, the messages of the longest conversation."""

    members: tuple[FederatedAlgorithm, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("a Family needs at least one algorithm.")
        if not all(same_parts(m.sample, self.sample) for m in self.members):
            raise ValueError("the members of a Family are trained on one cohort, so they must have the same sampler, got "
                             f"{', '.join(sorted({repr(m.sample) for m in self.members}))}.")

    @property
    def sample(self) -> Sampler:
        return self.members[0].sample

    def start(self, params: Tensor, seed: int) -> tuple[State, ...]:
        return tuple(m.start(params, seed) for m in self.members)

    def broadcast(self, states: tuple[State, ...], seed: int) -> Broadcast:
        return Broadcast(states[0].round, seed, torch.stack([s.params for s in states]))

    def conversation(self, states: tuple[State, ...], seed: int) -> Conversation[tuple[State, ...]]:
        own = [_about(k, m.conversation(s, seed)) for k, (m, s) in enumerate(zip(self.members, states, strict=True))]
        return tuple((yield from side_by_side(own)))

    def skip(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        return tuple(m.skip(s, seed) for m, s in zip(self.members, states, strict=True))

    @property
    def minimum(self) -> int:
        return max(member.minimum for member in self.members)

    def releases(self, dim: int) -> tuple[Release, ...]:
        return tuple(release for member in self.members for release in member.releases(dim))

    def check(self, population: Population, channel: Channel, fleet: Fleet) -> None:
        for member in self.members:
            member.check(population, channel, fleet)


def same_parts(one: Any, other: Any) -> bool:
    """Whether two parts or methods are alike, field by field; tensors by their values, which a printed form would abbreviate."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if is_dataclass(one):
        return all(same_parts(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same_parts, one, other))
    return bool(one == other)


def _about(model: int, conversation: Conversation[State]) -> Conversation[State]:
    """The same conversation, about another of the broadcast models."""
    reply = None
    try:
        while True:
            reply = yield about(conversation.send(reply), model)
    except StopIteration as end:
        return end.value


def run_round(algorithm: FederatedAlgorithm | Family, state: Any, fleet: Fleet, channel: Channel, seed: int,
              ledger: Ledger) -> Any:
    """The only training loop's body: draw a cohort, tell it the model, hold the conversation.

    Where the ledger's terms say so, cohort and noise come from the operating system; batches and dropout always from the seed.
    """
    private_seed = seed if ledger.terms.replayable else None
    broadcast = replace(algorithm.broadcast(state, seed), noise_seed=private_seed)
    cohort = drawn(fleet, partial(algorithm.sample, fleet.population, private_seed), broadcast.round)
    if len(cohort.ids) < fewest(algorithm, channel):
        fleet.close(finished=False)
        return algorithm.skip(state, seed)
    planned = planned_round(algorithm, fleet.population, channel, broadcast.params.shape[-1])
    try:
        with channel.open(fleet, cohort, broadcast, ledger, planned) as ask:
            return converse(algorithm.conversation(state, seed), ask)
    except RoundLost as reason:
        warnings.warn(f"round {broadcast.round} is lost, and the model stays as it was: {reason}", RoundLostWarning, stacklevel=2)
        return algorithm.skip(state, seed)


def drawn(fleet: Fleet, draw: Callable[[int], Cohort], round: int) -> Cohort:
    """The cohort of a round; a fleet whose keys travel ahead has drawn it with the round before."""
    ahead = getattr(fleet, "draw", None)
    return draw(round) if ahead is None else ahead(draw, round)


def fewest(algorithm: FederatedAlgorithm | Family, channel: Channel) -> int:
    """The smallest cohort that is asked: below, the round keeps the model."""
    return max(channel.minimum, algorithm.minimum)


def planned_round(algorithm: FederatedAlgorithm | Family, population: Any, channel: Channel, dim: int) -> RoundEvent:
    """What a round releases at most, and how its cohort is drawn, given that it is large enough to be asked."""
    event, releases = algorithm.sample.event(population), algorithm.releases(dim)
    noised = not any(isinstance(release, NonPrivateRelease) for release in releases)
    if isinstance(event, PoissonSampling) and noised:
        event = replace(event, decisive=decisive_share(event.rate, len(population), fewest(algorithm, channel)))
    return RoundEvent(releases, event)
