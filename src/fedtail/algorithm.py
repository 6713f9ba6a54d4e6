"""One loop for every method: a round is a few questions, each answered by a sum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor

from fedtail.aggregation.base import Aggregated, Aggregator
from fedtail.channel.base import Channel, RoundLost
from fedtail.fleet import Broadcast, Fleet, SimulatedPopulation
from fedtail.iterates import Iterate, LastIterate
from fedtail.local.base import LocalTraining, RoundStart
from fedtail.privacy.events import NonPrivateRelease, PoissonSampling, Release, RoundEvent, with_constant_noise
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism
from fedtail.privacy.minimum_cohort import reveal_probability
from fedtail.questions import Conversation, Train, changing, converse, side_by_side
from fedtail.risk.base import Risk
from fedtail.sampling import Sampler
from fedtail.server import OptimizerState, ServerOptimizer


class RoundLostWarning(UserWarning):
    """Too few clients stayed, or contributed, for a sum that may be released."""


@dataclass(frozen=True)
class State:
    """Where a run stands: the model, the round, and what each part of the method keeps on the server, by the part's name."""

    params: Tensor                              # (dim,) the model
    round: int = 0
    parts: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def of(self, part: str) -> Tensor | None:
        """What a part keeps, where that is one tensor: the dual of "risk", say; None where it keeps nothing."""
        kept = self.parts.get(part, ())
        return kept[0] if kept else None

    def keeping(self, part: str, *kept: Tensor | None) -> State:
        """The state with what a part keeps instead of what it kept; nothing where that is None."""
        tensors = tuple(tensor for tensor in kept if tensor is not None)
        if not tensors and part not in self.parts:
            return self
        others = {name: before for name, before in self.parts.items() if name != part}
        return replace(self, parts={**others, part: tensors} if tensors else others)

    @property
    def dual(self) -> Tensor | None:
        """The risk's public numbers of the last round."""
        return self.of("risk")

    @property
    def optimizer(self) -> OptimizerState:
        """What the server optimiser keeps."""
        return self.parts.get("server", ())


def states_of(state: Any) -> tuple[State, ...]:
    """The states of a family, or of one method as a family of one."""
    return state if isinstance(state, tuple) else (state,)


@dataclass(frozen=True)
class FederatedAlgorithm:
    """A method, as its parts. Change one with `dataclasses.replace`."""

    sample: Sampler                             # population -> cohort
    local: LocalTraining                        # clients -> one update per client
    risk: Risk                                  # losses -> dual -> how much each client contributes
    aggregate: Aggregator                       # client half makes rows of (update, weight); server half asks
    server: ServerOptimizer                     # (params, update, state) -> (params, state)
    iterate: Iterate = field(default_factory=LastIterate)

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, type):
                raise TypeError(f"{part.name} is the class {value.__name__}, a part is needed. Write {value.__name__}(...).")
        for name in ("local", "risk", "aggregate"):
            if getattr_static(getattr(self, name), "declares", None) is None:      # an error within it would look the same
                kind = type(getattr(self, name)).__name__
                raise TypeError(f"{name} is a {kind}, which declares nothing. Give it a property declares: what it needs, "
                                "reveals, keeps and bounds (fedtail.declarations; an example is in docs/howto/risk.md).")

    @property
    def members(self) -> tuple[FederatedAlgorithm, ...]:
        """A family of one."""
        return (self,)

    def start(self, params: Tensor, seed: int) -> State:
        state = State(params).keeping("server", *self.server.start(params))
        return state.keeping("iterate", self.iterate.keep(None, params, 0, seed))

    def broadcast(self, state: State, seed: int) -> Broadcast:
        return Broadcast(state.round, seed, state.params[None])

    def conversation(self, state: State, seed: int) -> Conversation[State]:
        fitting, objective = self.risk.fit(state.dual), self.local.objective
        dual = yield from fitting if objective is None else changing(fitting, objective=objective)
        train = Train(self.local, self.risk, dual, self.aggregate, kept=state.of("aggregate"), objective=objective)
        local, kept_local = yield from self.local.prepare(self._round_start(state, train))
        if local is not self.local:
            self._refuse_undeclared_memory(local)
            train = replace(train, local=local)
        found = yield from self.aggregate.fit(train)
        update, kept = found if isinstance(found, Aggregated) else (found, state.of("aggregate"))
        after = state.keeping("aggregate", kept).keeping("local", kept_local)
        if update is None:                      # no client contributed: keep the model
            return self.skip(after.keeping("risk", self.risk.unused(dual)), seed)
        params, optimizer = self.server(state.params, update.to(state.params), state.optimizer)
        after = replace(after, params=params, round=state.round + 1)
        return self._next(after.keeping("risk", dual).keeping("server", *optimizer), seed)

    def skip(self, state: State, seed: int) -> State:
        """A round in which nobody could be sampled keeps the model."""
        return self._next(replace(state, round=state.round + 1), seed)

    def lost(self, state: State, seed: int) -> State:
        """A round whose sums were not released keeps the model; a dual that was used again is not used once more."""
        return self.skip(state if state.dual is None else state.keeping("risk", self.risk.unused(state.dual)), seed)

    def result(self, state: State) -> Tensor:
        """The model to hand out: the last one, or the average or draw that `iterate` keeps."""
        return self.iterate.result(state.of("iterate"), state.params)

    @property
    def mechanism(self) -> Mechanism:
        """What happens to the updates before they are sent."""
        return self.aggregate.declares.mechanism

    @property
    def minimum(self) -> int:
        """The smallest cohort a round may have."""
        return max(self.mechanism.minimum, self.risk.declares.mechanism.minimum)

    def releases(self, dim: int) -> tuple[Release, ...]:
        """What a round reveals, at most, of a model with `dim` parameters."""
        gathers, losses = self.aggregate.declares.gathers, self.risk.declares.releases
        if losses is None:
            losses = (NonPrivateRelease(f"what {type(self.risk).__name__} asks about the losses"),)
        updates = Train(self.local, self.risk, torch.zeros(0), self.aggregate, gather=gathers).release(dim)
        return (*losses, *[updates] * (1 + self.local.declares.mean_updates))

    def _round_start(self, state: State, train: Train) -> RoundStart:
        """What the server half of local training is given; it may have the cohort train by another part first."""
        def mean_update(local: LocalTraining) -> Conversation[Tensor | None]:
            found = yield from self.aggregate.fit(replace(train, local=local))
            return found.update if isinstance(found, Aggregated) else found
        return RoundStart(state.round, state.params, state.of("local"), mean_update)

    def _refuse_undeclared_memory(self, local: LocalTraining) -> None:
        """Refuse a part that `local.prepare` gave and that keeps rows where `local` itself declares that it keeps none."""
        if local.declares.keeps is not None and self.local.declares.keeps is None:
            given, kind = type(local).__name__, type(self.local).__name__
            raise TypeError(f"{kind}.prepare gave a {given}, whose clients keep rows, and {kind} declares that they keep none: "
                            f"nobody checked whether they last. Declare keeps={local.declares.keeps!r} in {kind} too.")

    def _next(self, state: State, seed: int) -> State:
        return state.keeping("iterate", self.iterate.keep(state.of("iterate"), state.params, state.round, seed))


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
        own = [changing(m.conversation(s, seed), model=k) for k, (m, s) in enumerate(zip(self.members, states, strict=True))]
        return tuple((yield from side_by_side(own)))

    def skip(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        return tuple(m.skip(s, seed) for m, s in zip(self.members, states, strict=True))

    def lost(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        return tuple(m.lost(s, seed) for m, s in zip(self.members, states, strict=True))

    @property
    def minimum(self) -> int:
        return max(member.minimum for member in self.members)

    def releases(self, dim: int) -> tuple[Release, ...]:
        return tuple(release for member in self.members for release in member.releases(dim))


Method = FederatedAlgorithm | Family


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


def run_round(algorithm: FederatedAlgorithm | Family, state: Any, fleet: Fleet, channel: Channel, seed: int,
              ledger: Ledger) -> Any:
    """The only training loop's body: sample a cohort, broadcast the model, hold the conversation.

    Where the privacy budget says so, cohort and noise come from the operating system; batches and dropout always from the seed.
    """
    private_seed = seed if ledger.budget.replayable else None
    broadcast = replace(algorithm.broadcast(state, seed), noise_seed=private_seed)
    cohort = fleet.draw(partial(algorithm.sample, fleet.population, private_seed), broadcast.round)
    ids = cohort.ids.numpy()
    if not (ids[1:] > ids[:-1]).all() and len(set(ids.tolist())) < len(ids):      # most samplers name them in order: be quick
        raise ValueError(f"{type(algorithm.sample).__name__} named a client more than once in a cohort, so that it would move a "
                         "sum more than once. Name each client once, and give it an importance.")
    if len(cohort.ids) < fewest(algorithm, channel):
        fleet.close(finished=False)
        ledger.skip(broadcast.round)
        return algorithm.skip(state, seed)
    planned = planned_round(algorithm, fleet, channel, broadcast.params.shape[-1])
    try:
        with channel.open(fleet, cohort, broadcast, ledger, planned) as ask:
            return converse(algorithm.conversation(state, seed), ask)
    except RoundLost as reason:
        warnings.warn(f"round {broadcast.round} is lost, and the model stays as it was: {reason}", RoundLostWarning, stacklevel=2)
        return algorithm.lost(state, seed)


def fewest(algorithm: FederatedAlgorithm | Family, channel: Channel) -> int:
    """The smallest cohort of a round that is held: below, the model stays as it was."""
    return max(channel.minimum, algorithm.minimum)


def planned_round(algorithm: FederatedAlgorithm | Family, fleet: Fleet | SimulatedPopulation, channel: Channel,
                  dim: int) -> RoundEvent:
    """What a round releases at most, and how its cohort is drawn, given that it is large enough for the round to be held.

    Where clients may fail to answer, which rounds hang on one of them depends on who fails, and no amplification is claimed.
    """
    event, releases, population = algorithm.sample.event(fleet.population), algorithm.releases(dim), fleet.population
    noised = not any(isinstance(release, NonPrivateRelease) for release in releases)
    all_answer = channel.all_answer(fleet)
    if all_answer:
        releases = tuple(map(with_constant_noise, releases))
    if isinstance(event, PoissonSampling) and noised:
        revealed = reveal_probability(event.rate, len(population), fewest(algorithm, channel)) if all_answer else 1.0
        event = replace(event, revealed=revealed)
    return RoundEvent(releases, event)
