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
from fedtail.deprecated import with_old_names
from fedtail.fleet import Broadcast, Fleet, SimulatedPopulation
from fedtail.iterates import Iterate, LastIterate
from fedtail.local.base import LocalTraining, RoundStart
from fedtail.privacy.events import NonPrivateRelease, PoissonSampling, Release, RoundEvent, with_constant_noise
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism
from fedtail.privacy.minimum_cohort import reveal_probability
from fedtail.questions import Conversation, Train, converse, join_conversations, with_question_fields
from fedtail.risk.base import Risk
from fedtail.sampling import Sampler
from fedtail.server import OptimizerState, ServerOptimizer


class RoundLostWarning(UserWarning):
    """Too few clients stayed, or contributed, for a sum that may be released."""


@with_old_names
@dataclass(frozen=True)
class State:
    """Where a run stands: the model, the round, and what each part of the method keeps on the server, by the part's name."""

    params: Tensor                              # (dim,) the model
    round: int = 0
    parts: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def part_state(self, part: str) -> Tensor | None:
        """The tensor that a part keeps on the server: the dual of "risk", say; None where it keeps nothing.

        Of a part that keeps several (a server optimiser) the first.
        """
        kept = self.parts.get(part, ())
        return kept[0] if kept else None

    def with_part_state(self, part: str, *kept: Tensor | None) -> State:
        """A copy in which a part keeps these tensors in place of its former ones; each that is None is left out."""
        tensors = tuple(tensor for tensor in kept if tensor is not None)
        if not tensors and part not in self.parts:
            return self
        others = {name: before for name, before in self.parts.items() if name != part}
        return replace(self, parts={**others, part: tensors} if tensors else others)

    @property
    def dual(self) -> Tensor | None:
        """The risk's dual, a few public numbers, of the last round; None before the first, or where the risk keeps none."""
        return self.part_state("risk")

    @property
    def optimizer(self) -> OptimizerState:
        """The tensors that the server optimiser keeps; empty where it keeps none."""
        return self.parts.get("server", ())


def states_of(state: Any) -> tuple[State, ...]:
    """The states of a family, or of one method as a tuple of one."""
    return state if isinstance(state, tuple) else (state,)


@with_old_names
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
        """Refuse, with a TypeError, a class in place of a part, and a part that does not declare what it needs and reveals."""
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
        """The method as a family of one, so that code written for families runs it."""
        return (self,)

    def start(self, params: Tensor, seed: int) -> State:
        """The state before round 0: these flat parameters, and what the server optimiser and the iterate keep at first."""
        state = State(params).with_part_state("server", *self.server.start(params))
        return state.with_part_state("iterate", self.iterate.keep(None, params, 0, seed))

    def broadcast(self, state: State, seed: int) -> Broadcast:
        """What clients are sent in the round that follows this state: its number, the seed, and the model as (1, dim)."""
        return Broadcast(state.round, seed, state.params[None])

    def conversation(self, state: State, seed: int) -> Conversation[State]:
        """One round on the server, as a generator of questions: fit the risk's dual, prepare local training, aggregate, step.

        Ends in the next state. Where no client contributed, the model stays as it is and the round is counted.
        """
        fitting, objective = self.risk.fit(state.dual), self.local.objective
        dual = yield from fitting if objective is None else with_question_fields(fitting, objective=objective)
        train = Train(self.local, self.risk, dual, self.aggregate, kept=state.part_state("aggregate"), objective=objective)
        local, kept_local = yield from self.local.prepare(self._round_start(state, train))
        if local is not self.local:
            self._refuse_undeclared_memory(local)
            train = replace(train, local=local)
        found = yield from self.aggregate.fit(train)
        update, kept = found if isinstance(found, Aggregated) else (found, state.part_state("aggregate"))
        after = state.with_part_state("aggregate", kept).with_part_state("local", kept_local)
        if update is None:                      # no client contributed: keep the model
            return self.after_skipped_round(after.with_part_state("risk", self.risk.unused(dual)), seed)
        params, optimizer = self.server(state.params, update.to(state.params), state.optimizer)
        after = replace(after, params=params, round=state.round + 1)
        return self._with_iterate(after.with_part_state("risk", dual).with_part_state("server", *optimizer), seed)

    def after_skipped_round(self, state: State, seed: int) -> State:
        """The state after a round without any question, for lack of clients: the model as it was, the round counted."""
        return self._with_iterate(replace(state, round=state.round + 1), seed)

    def after_lost_round(self, state: State, seed: int) -> State:
        """The state after a round whose sums were not released: the model as it was, the round counted.

        A risk that reuses its dual for some rounds fits it anew in the next.
        """
        if state.dual is not None:
            state = state.with_part_state("risk", self.risk.unused(state.dual))
        return self.after_skipped_round(state, seed)

    def result(self, state: State) -> Tensor:
        """The flat model to hand out: the last one, or the average or random draw that `iterate` keeps."""
        return self.iterate.result(state.part_state("iterate"), state.params)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that clips and noises the updates; that of the losses is the risk's own."""
        return self.aggregate.declares.mechanism

    @property
    def minimum(self) -> int:
        """The smallest cohort that its mechanisms' noise needs; a round with fewer clients is skipped."""
        return max(self.mechanism.minimum, self.risk.declares.mechanism.minimum)

    def releases(self, dim: int) -> tuple[Release, ...]:
        """What a round reveals, at most, of a model with `dim` parameters: about the losses, then once for each training."""
        gathers, losses = self.aggregate.declares.gathers, self.risk.declares.releases
        if losses is None:
            losses = (NonPrivateRelease(f"what {type(self.risk).__name__} asks about the losses"),)
        updates = Train(self.local, self.risk, torch.zeros(0), self.aggregate, gather=gathers).release(dim)
        return (*losses, *[updates] * (1 + self.local.declares.mean_updates))

    def _round_start(self, state: State, train: Train) -> RoundStart:
        """What the server half of local training is given at the start of a round.

        Its `mean_update(local)` has the cohort train by another part first, and gives the aggregated update, or None.
        """
        def mean_update(local: LocalTraining) -> Conversation[Tensor | None]:
            found = yield from self.aggregate.fit(replace(train, local=local))
            return found.update if isinstance(found, Aggregated) else found
        return RoundStart(state.round, state.params, state.part_state("local"), mean_update)

    def _refuse_undeclared_memory(self, local: LocalTraining) -> None:
        """Raise a TypeError for a part that `local.prepare` gave and that keeps rows where `local` itself declares none."""
        if local.declares.keeps is not None and self.local.declares.keeps is None:
            given, kind = type(local).__name__, type(self.local).__name__
            raise TypeError(f"{kind}.prepare gave a {given}, whose clients keep rows, and {kind} declares that they keep none: "
                            f"nobody checked whether they last. Declare keeps={local.declares.keeps!r} in {kind} too.")

    def _with_iterate(self, state: State, seed: int) -> State:
        """A copy of the state in which the iterate has taken this state's model into what it keeps; draws come from `seed`."""
        return state.with_part_state("iterate", self.iterate.keep(state.part_state("iterate"), state.params, state.round, seed))


@with_old_names
@dataclass(frozen=True)
class Family:
    """Several methods over one cohort: as many models, the messages of the longest conversation."""

    members: tuple[FederatedAlgorithm, ...]

    def __post_init__(self) -> None:
        """Refuse, with a ValueError, a family without members, or whose members have different samplers."""
        if not self.members:
            raise ValueError("a Family needs at least one algorithm.")
        if not all(parts_are_equal(m.sample, self.sample) for m in self.members):
            raise ValueError("the members of a Family are trained on one cohort, so they must have the same sampler, got "
                             f"{', '.join(sorted({repr(m.sample) for m in self.members}))}.")

    @property
    def sample(self) -> Sampler:
        """The sampler, which all members share."""
        return self.members[0].sample

    def start(self, params: Tensor, seed: int) -> tuple[State, ...]:
        """The members' states before round 0, all from the same parameters."""
        return tuple(m.start(params, seed) for m in self.members)

    def broadcast(self, states: tuple[State, ...], seed: int) -> Broadcast:
        """What clients are sent in the round that follows these states: all models at once, (members, dim)."""
        return Broadcast(states[0].round, seed, torch.stack([s.params for s in states]))

    def conversation(self, states: tuple[State, ...], seed: int) -> Conversation[tuple[State, ...]]:
        """One round of all members with their questions joined; ends in the members' next states."""
        own = [with_question_fields(m.conversation(s, seed), model=k)
               for k, (m, s) in enumerate(zip(self.members, states, strict=True))]
        return tuple((yield from join_conversations(own)))

    def after_skipped_round(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        """The members' states after a round without any question: models as they were, the round counted."""
        return tuple(m.after_skipped_round(s, seed) for m, s in zip(self.members, states, strict=True))

    def after_lost_round(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        """The members' states after a round whose sums were not released: models as they were, the round counted."""
        return tuple(m.after_lost_round(s, seed) for m, s in zip(self.members, states, strict=True))

    @property
    def minimum(self) -> int:
        """The smallest cohort that every member's noise allows."""
        return max(member.minimum for member in self.members)

    def releases(self, dim: int) -> tuple[Release, ...]:
        """What a round reveals, at most, about all members' models of `dim` parameters, in the order of the members."""
        return tuple(release for member in self.members for release in member.releases(dim))


Method = FederatedAlgorithm | Family


def parts_are_equal(one: Any, other: Any) -> bool:
    """Whether two parts or methods are alike, field by field; tensors by dtype and values, which a printed form abbreviates."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if is_dataclass(one):
        return all(parts_are_equal(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(parts_are_equal, one, other))
    return bool(one == other)


def run_round(algorithm: FederatedAlgorithm | Family, state: Any, fleet: Fleet, channel: Channel, seed: int,
              ledger: Ledger) -> Any:
    """One round, the body of the only training loop: sample a cohort, broadcast the model, hold the conversation. The next state.

    A cohort below the smallest allowed is asked nothing, and a round whose sums may not be released is lost with a
    `RoundLostWarning`; both keep the model. Where the privacy budget says so, cohort and noise come from the operating
    system; batches and dropout always from the seed. What is released is recorded in `ledger` before it is asked for.
    """
    private_seed = seed if ledger.budget.replayable else None
    broadcast = replace(algorithm.broadcast(state, seed), noise_seed=private_seed)
    cohort = fleet.draw(partial(algorithm.sample, fleet.population, private_seed), broadcast.round)
    ids = cohort.ids.numpy()
    if not (ids[1:] > ids[:-1]).all() and len(set(ids.tolist())) < len(ids):      # most samplers name them in order: be quick
        raise ValueError(f"{type(algorithm.sample).__name__} named a client more than once in a cohort, so that it would move a "
                         "sum more than once. Name each client once, and give it an importance.")
    if len(cohort.ids) < smallest_cohort(algorithm, channel):
        fleet.close(finished=False)
        ledger.skip(broadcast.round)
        return algorithm.after_skipped_round(state, seed)
    planned = planned_round(algorithm, fleet, channel, broadcast.params.shape[-1])
    try:
        with channel.open(fleet, cohort, broadcast, ledger, planned) as ask:
            return converse(algorithm.conversation(state, seed), ask)
    except RoundLost as reason:
        warnings.warn(f"round {broadcast.round} is lost, and the model stays as it was: {reason}", RoundLostWarning, stacklevel=2)
        return algorithm.after_lost_round(state, seed)


def smallest_cohort(algorithm: FederatedAlgorithm | Family, channel: Channel) -> int:
    """The fewest clients with which a round is held, by the method's noise and by the channel; with fewer it is skipped."""
    return max(channel.minimum, algorithm.minimum)


def planned_round(algorithm: FederatedAlgorithm | Family, fleet: Fleet | SimulatedPopulation, channel: Channel,
                  dim: int) -> RoundEvent:
    """The ledger's event for a round: what it releases at most, and how its cohort is drawn, if that is large enough.

    Where clients may fail to answer, no amplification by sampling is claimed: one of them may decide whether a round is held.
    """
    event, releases, population = algorithm.sample.event(fleet.population), algorithm.releases(dim), fleet.population
    noised = not any(isinstance(release, NonPrivateRelease) for release in releases)
    all_answer = channel.all_answer(fleet)
    if all_answer:
        releases = tuple(map(with_constant_noise, releases))
    if isinstance(event, PoissonSampling) and noised:
        revealed = reveal_probability(event.rate, len(population), smallest_cohort(algorithm, channel)) if all_answer else 1.0
        event = replace(event, revealed=revealed)
    return RoundEvent(releases, event)
