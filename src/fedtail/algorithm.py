"""One loop for every method: a round is a few questions, each answered by a sum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from inspect import getattr_static
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.aggregation.base import Aggregated, Aggregator
from fedtail.channel.base import Channel, RoundLost
from fedtail.conversations import Conversation, converse, join_conversations, with_changed_questions, with_question_fields
from fedtail.deprecated import with_old_names
from fedtail.fleet import Broadcast, Fleet, SimulatedPopulation
from fedtail.iterates import Iterate, LastIterate
from fedtail.local.base import LocalTraining, RoundStart
from fedtail.personal.base import NoPersonalModels, PersonalModels
from fedtail.privacy.events import NonPrivateRelease, NoSampling, PoissonSampling, Release, RoundEvent, Unit, with_constant_noise
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism
from fedtail.privacy.minimum_cohort import reveal_probability
from fedtail.privacy.planned_budget import PlannedBudget, strictest_plan
from fedtail.questions import Train
from fedtail.risk.base import Risk
from fedtail.sampling import Cohort, Sampler
from fedtail.server import OptimizerState, ServerOptimizer


class RoundLostWarning(UserWarning):
    """A round was lost, and the model kept: too few clients answered or contributed for a sum that may be released."""


@with_old_names
@dataclass(frozen=True)
class State:
    """Where a run stands: the model, the round, and what each part of the method keeps on the server, by the part's name."""

    params: Tensor                              # (dim,) the model
    round: int = 0
    parts: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def part_state(self, part: str) -> Tensor | None:
        """The tensor that a part keeps on the server, by the part's name ("risk", "server", ...); None where it keeps nothing.

        Where a part keeps several tensors, as a server optimiser may, this is the first.
        """
        kept = self.parts.get(part, ())
        return kept[0] if kept else None

    def with_part_state(self, part: str, *kept: Tensor | None) -> State:
        """A copy of the state in which the named part keeps these tensors in place of its former ones; each None is dropped.

        Without any tensor the part's entry is removed; the state itself is returned where it had none.
        """
        tensors = tuple(tensor for tensor in kept if tensor is not None)
        if not tensors and part not in self.parts:
            return self
        others = {name: before for name, before in self.parts.items() if name != part}
        return replace(self, parts={**others, part: tensors} if tensors else others)

    @property
    def dual(self) -> Tensor | None:
        """The dual, a flat tensor of a few public numbers, that the risk's `fit` is given in the next round.

        That is the dual of the last round as a rule. None before the first round, or where the risk has dropped it.
        """
        return self.part_state("risk")

    @property
    def optimizer_state(self) -> OptimizerState:
        """The tensors that the server optimiser keeps between rounds, in its own order; an empty tuple where it keeps none."""
        return self.parts.get("server", ())


def member_states(state: Any) -> tuple[State, ...]:
    """The state as a tuple: that of a family is one already (one `State` per member), a single state becomes `(state,)`."""
    return state if isinstance(state, tuple) else (state,)


@with_old_names
@dataclass(frozen=True)
class FederatedAlgorithm:
    """A federated method, made of parts that are frozen and can be exchanged one by one, with `dataclasses.replace`."""

    sample: Sampler                             # population -> cohort
    local: LocalTraining                        # clients -> one update per client
    risk: Risk                                  # losses -> dual -> how much each client contributes
    aggregate: Aggregator                       # client half makes rows of (update, weight); server half asks
    server: ServerOptimizer                     # (params, update, state) -> (params, state)
    iterate: Iterate = field(default_factory=LastIterate)
    personal: PersonalModels = field(default_factory=NoPersonalModels)      # models of clients' own, which stay with them
    budget: PlannedBudget | None = None         # for which the noise was found; a run without a budget of its own keeps to it

    def __post_init__(self) -> None:
        """Raise a TypeError where a part is a class and not an instance, or has no `declares` (local, risk, ...).

        Also where the budget is neither a `PlannedBudget` nor None.
        """
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, type):
                raise TypeError(f"{part.name} is the class {value.__name__}, a part is needed. Write {value.__name__}(...).")
        for name in ("local", "risk", "aggregate", "personal"):
            if getattr_static(getattr(self, name), "declares", None) is None:      # an error within it would look the same
                kind = type(getattr(self, name)).__name__
                raise TypeError(f"{name} is a {kind}, which declares nothing. Give it a property declares: what it needs, "
                                "reveals, keeps and bounds (fedtail.declarations; an example is in docs/howto/risk.md).")
        if not isinstance(self.budget, PlannedBudget | None):
            raise TypeError(f"budget is what the noise of a method was found for, a PlannedBudget, got a "
                            f"{type(self.budget).__name__}. A PrivacyBudget is given to the run: train(..., privacy=...).")

    @property
    def members(self) -> tuple[FederatedAlgorithm, ...]:
        """A tuple of this method alone, so that code can iterate over members whether it has a method or a `Family`."""
        return (self,)

    def initial_state(self, params: Tensor, seed: int) -> State:
        """The state before round 0: the flat model `params`, (dim,), with the first tensors of server optimiser and iterate.

        `seed` is for an iterate that draws at random.
        """
        state = State(params).with_part_state("server", *self.server.start(params))
        return state.with_part_state("iterate", self.iterate.keep(None, params, 0, seed))

    def broadcast(self, state: State, seed: int) -> Broadcast:
        """What clients are sent in the round after `state`: the round's number, the seed, and the model as (1, dim).

        `noise_seed`, the seed of simulated noise, is left None.
        """
        return Broadcast(state.round, seed, state.params[None])

    def conversation(self, state: State, seed: int, cohort: Cohort) -> Conversation[State]:
        """One round on the server: a generator that yields questions, is sent sums of answers, and returns the next state.

        It fits the risk's dual, prepares local training, aggregates the updates of the clients, and steps the server optimiser.
        Where no client contributed, the model and the optimiser's tensors stay as they are and the round is counted. `seed` is
        that of the clients' draws, and of an iterate that draws at random; `cohort` are the clients that answer. Raises TypeError
        where the prepared local training keeps rows on clients and `local` does not declare that.
        """
        risk, objective = self.risk.for_cohort(len(cohort.ids)), self.local.objective
        fitting = risk.fit(state.dual)
        dual = yield from fitting if objective is None else with_question_fields(fitting, objective=objective)
        train = Train(self.local, risk, dual, self.aggregate, kept=state.part_state("aggregate"), objective=objective,
                      round=state.round)
        preparing = self.local.prepare(self._round_start(state, train, seed, cohort))
        local, kept_local = yield from preparing if objective is None else with_question_fields(preparing, objective=objective)
        if local is not self.local:
            self._refuse_undeclared_memory(local)
            train = replace(train, local=local)
        found = yield from self._with_personal_training(self.aggregate.fit(train))
        update, kept = found if isinstance(found, Aggregated) else (found, state.part_state("aggregate"))
        after = state.with_part_state("aggregate", kept).with_part_state("local", kept_local)
        if update is None:                      # no client contributed: keep the model
            return self.after_skipped_round(after.with_part_state("risk", self.risk.unused(dual)), seed)
        params, optimizer = self.server(state.params, update.to(state.params), state.optimizer_state)
        after = replace(after, params=params, round=state.round + 1)
        return self._with_updated_iterate(after.with_part_state("risk", dual).with_part_state("server", *optimizer), seed)

    def after_skipped_round(self, state: State, seed: int) -> State:
        """The state after a round that leaves the model as it is, because too few clients were sampled or none contributed.

        The round is counted, and the iterate is given the unchanged model as that of the new round; `seed` is for its random
        draw.
        """
        return self._with_updated_iterate(replace(state, round=state.round + 1), seed)

    def after_lost_round(self, state: State, seed: int) -> State:
        """The state after a round whose sums were not released: the model stays as it is, and the round is counted.

        The risk decides, by `unused`, what its next `fit` is given as the previous dual; a risk that reuses its dual for several
        rounds then fits a new one. The iterate is given the unchanged model; `seed` is for its random draw.
        """
        if state.dual is not None:
            state = state.with_part_state("risk", self.risk.unused(state.dual))
        return self.after_skipped_round(state, seed)

    def result(self, state: State) -> Tensor:
        """The flat model that a run returns, (dim,): the last one, or the average or random draw that `iterate` keeps."""
        return self.iterate.result(state.part_state("iterate"), state.params)

    @property
    def mechanism(self) -> Mechanism:
        """The privacy mechanism of the updates, as the aggregator declares it; the risk declares its own for the losses."""
        return self.aggregate.declares.mechanism

    @property
    def unit(self) -> Unit:
        """The unit of privacy of its rounds: the example where local training adds noise inside clients, else the client."""
        return self.local.declares.unit

    @property
    def minimum_cohort(self) -> int:
        """The smallest cohort that the noise on updates and on the risk's sums allows; a smaller round is skipped.

        It is 0 where the server adds the noise of all sums: an empty cohort's round is held too, as a skipped one would reveal
        that nobody was sampled. A sum without noise needs a client. Where local training lets some clients answer a question in
        place of training, one more is needed, to train.
        """
        risk, local = self.risk.declares, self.local.declares
        exact = any(isinstance(release, NonPrivateRelease) for release in local.releases)
        return max(self.mechanism.minimum, risk.mechanism.minimum if risk.releases != () else 0, int(exact),
                   local.answers_only + 1 if local.answers_only else 0)

    def releases(self, dim: int) -> tuple[Release, ...]:
        """The most that one round releases, as ledger entries, for a model with `dim` parameters.

        First come those of the risk's questions (one non-private entry where the risk does not declare them), then those that
        local training declares, then one of the updates for each time that the aggregator asks for them in the round.
        """
        gathers, losses = self.aggregate.declares.gathers, self.risk.declares.releases
        if losses is None:
            losses = (NonPrivateRelease(f"what {type(self.risk).__name__} asks about the losses"),)
        updates = Train(self.local, self.risk, torch.zeros(0), self.aggregate, gather=gathers).release(dim)
        local = self.local.declares
        return (*losses, *local.releases, *[updates] * (self.aggregate.declares.questions * (1 + local.mean_updates)))

    def _round_start(self, state: State, train: Train, seed: int, cohort: Cohort) -> RoundStart:
        """The argument of `local.prepare`: round, flat model, what local training kept, `mean_update`, seed and cohort.

        `mean_update(local)` is a conversation in which the cohort trains by the part `local`, with the risk, dual and aggregator
        of `train`.
        """
        def mean_update(local: LocalTraining) -> Conversation[Tensor | None]:
            """The cohort trains by `local`; returns the aggregated update, (dim,), or None where no client contributed."""
            found = yield from self.aggregate.fit(replace(train, local=local, marks_contributors=False))
            return found.update if isinstance(found, Aggregated) else found
        return RoundStart(state.round, state.params, state.part_state("local"), mean_update, seed, cohort.key)

    def _with_personal_training(self, fitting: Conversation[Any]) -> Conversation[Any]:
        """The aggregator's conversation `fitting`, in whose first question clients train their personal models too.

        An aggregator may ask several times in a round; personal models are trained once. Without any, it is `fitting` itself.
        """
        if not self.personal.trains:
            return fitting
        once = iter([self.personal])
        return with_changed_questions(fitting, lambda question: replace(question, personal=next(once, None)))

    def _refuse_undeclared_memory(self, local: LocalTraining) -> None:
        """Raise a TypeError where `local` declares that it keeps rows on its clients and `self.local` does not.

        `local` is the part that `self.local.prepare` returned for this round.
        """
        if local.declares.keeps is not None and self.local.declares.keeps is None:
            given, kind = type(local).__name__, type(self.local).__name__
            raise TypeError(f"{kind}.prepare gave a {given}, whose clients keep rows, and {kind} declares that they keep none: "
                            f"nobody checked whether they last. Declare keeps={local.declares.keeps!r} in {kind} too.")

    def _with_updated_iterate(self, state: State, seed: int) -> State:
        """A copy of the state in which `iterate` has been given the state's model and round, and keeps what it needs of them.

        An iterate that draws at random draws by (seed, round).
        """
        return state.with_part_state("iterate", self.iterate.keep(state.part_state("iterate"), state.params, state.round, seed))


@with_old_names
@dataclass(frozen=True)
class Family:
    """Several methods that are trained on the same cohorts: one model each, and as many messages a round as the longest needs."""

    members: tuple[FederatedAlgorithm, ...]

    def __post_init__(self) -> None:
        """Raise a ValueError for a family without members, or whose members differ in their sampler or unit of privacy."""
        if not self.members:
            raise ValueError("a Family needs at least one algorithm.")
        if not all(parts_are_equal(m.sample, self.sample) for m in self.members):
            raise ValueError("the members of a Family are trained on one cohort, so they must have the same sampler, got "
                             f"{', '.join(sorted({repr(m.sample) for m in self.members}))}.")
        if len({member.unit for member in self.members}) > 1:
            raise ValueError("some members of this Family protect clients and others single examples (ExamplePrivateSGD), and no "
                             "one epsilon is about both. Train them apart.")

    @property
    def sample(self) -> Sampler:
        """The sampler of the first member, to which those of all others are equal."""
        return self.members[0].sample

    @property
    def budget(self) -> PlannedBudget | None:
        """The strictest budget for which the noise of a member was found; it is one for the releases of all members together.

        None where no member has one.
        """
        return strictest_plan(member.budget for member in self.members)

    def initial_state(self, params: Tensor, seed: int) -> tuple[State, ...]:
        """The states before round 0, one for each member in their order, all with the flat model `params`, (dim,).

        `seed` is for iterates that draw at random.
        """
        return tuple(m.initial_state(params, seed) for m in self.members)

    def broadcast(self, states: tuple[State, ...], seed: int) -> Broadcast:
        """What clients are sent in the round after these states: the round's number, the seed, and all models, (members, dim)."""
        return Broadcast(states[0].round, seed, torch.stack([s.params for s in states]))

    def conversation(self, states: tuple[State, ...], seed: int, cohort: Cohort) -> Conversation[tuple[State, ...]]:
        """One round of all members as one generator; each `Joint` it yields holds the questions of members that still have one.

        It is sent a tuple of sums for each, and returns the next states in the order of the members. `seed` is that of the
        clients' draws, and of iterates that draw at random; `cohort` are the clients that answer.
        """
        own = [with_question_fields(m.conversation(s, seed, cohort), model=k)
               for k, (m, s) in enumerate(zip(self.members, states, strict=True))]
        return tuple((yield from join_conversations(own)))

    def after_skipped_round(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        """The members' states after a round without questions, in order: models as they were, the round counted.

        `seed` is for iterates that draw at random.
        """
        return tuple(m.after_skipped_round(s, seed) for m, s in zip(self.members, states, strict=True))

    def after_lost_round(self, states: tuple[State, ...], seed: int) -> tuple[State, ...]:
        """The members' states after a round whose sums were not released, in order: models as they were, the round counted.

        Each member's risk decides what its next `fit` is given as the previous dual. `seed` is for iterates that draw at random.
        """
        return tuple(m.after_lost_round(s, seed) for m, s in zip(self.members, states, strict=True))

    @property
    def unit(self) -> Unit:
        """The unit of privacy of its rounds, which all members share."""
        return self.members[0].unit

    @property
    def minimum_cohort(self) -> int:
        """The smallest cohort that the noise of every member allows; a round with fewer clients is skipped."""
        return max(member.minimum_cohort for member in self.members)

    def releases(self, dim: int) -> tuple[Release, ...]:
        """The most that one round releases about models of `dim` parameters, as ledger entries: those of each member in turn."""
        return tuple(release for member in self.members for release in member.releases(dim))


Method = FederatedAlgorithm | Family


def parts_are_equal(one: Any, other: Any) -> bool:
    """Whether two parts or methods have the same type and equal fields, compared recursively.

    Tensors and arrays are equal if their dtype, shape and values are; tuples and lists are compared entry by entry, other values
    by ==.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one):
        return all(parts_are_equal(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(parts_are_equal, one, other))
    return bool(one == other)


def run_round(algorithm: FederatedAlgorithm | Family, state: Any, fleet: Fleet, channel: Channel, seed: int,
              ledger: Ledger) -> Any:
    """Run one round of `algorithm` on `fleet`, and return the next state (of a family, a tuple of states).

    The round samples a cohort, broadcasts the model and holds the method's conversation over the channel. A cohort that is too
    small is not asked anything, and a round whose sums may not be released is lost with a `RoundLostWarning`; the model stays as
    it was in both cases. Every release is charged to `ledger` before clients are asked; `BudgetSpent` where the privacy budget
    does not cover it. Cohort and noise come from the operating system unless the budget allows a seed; batches and dropout come
    from `seed`. Raises ValueError where the sampler names a client twice.
    """
    private_seed = seed if ledger.budget.replayable else None
    broadcast = replace(algorithm.broadcast(state, seed), noise_seed=private_seed)
    cohort = fleet.draw_cohort(partial(algorithm.sample, fleet.population, private_seed), broadcast.round)
    ids = cohort.ids.numpy()
    if not (ids[1:] > ids[:-1]).all() and len(set(ids.tolist())) < len(ids):      # most samplers name them in order: be quick
        raise ValueError(f"{type(algorithm.sample).__name__} named a client more than once in a cohort, so that it would move a "
                         "sum more than once. Name each client once, and give it an importance.")
    if len(cohort.ids) < smallest_cohort(algorithm, channel):
        fleet.close_round(finished=False)
        ledger.skip(broadcast.round)
        return algorithm.after_skipped_round(state, seed)
    planned = planned_round(algorithm, fleet, channel, broadcast.params.shape[-1])
    try:
        with channel.open(fleet, cohort, broadcast, ledger, planned) as ask:
            return converse(algorithm.conversation(state, seed, cohort), ask)
    except RoundLost as reason:
        warnings.warn(f"round {broadcast.round} is lost, and the model stays as it was: {reason}", RoundLostWarning, stacklevel=2)
        return algorithm.after_lost_round(state, seed)


def smallest_cohort(algorithm: FederatedAlgorithm | Family, channel: Channel) -> int:
    """The fewest clients with which a round is held: the larger of the channel's minimum and that of the algorithm's noise.

    A round with fewer is skipped.
    """
    return max(channel.minimum, algorithm.minimum_cohort)


def planned_round(algorithm: FederatedAlgorithm | Family, fleet: Fleet | SimulatedPopulation, channel: Channel,
                  dim: int) -> RoundEvent:
    """The ledger's event for a round of `algorithm`: the most that it releases, and how its cohort is sampled.

    `dim` is the number of parameters of the model. Where every sampled client of the fleet answers over the channel, sums with
    discrete noise are entered as having a constant number of noise shares. For Poisson sampling with noise on every release, the
    event has the probability that the minimum-cohort rule reveals that a client participates; where clients may fail to answer it
    is 1, so that no amplification is claimed. Where the unit is an example, nothing is amplified by the sampling of clients: the
    other examples of a client may show that it was sampled.
    """
    releases, population = algorithm.releases(dim), fleet.population
    event = algorithm.sample.event(population) if algorithm.unit == "client" else NoSampling()
    noised = not any(isinstance(release, NonPrivateRelease) for release in releases)
    all_answer = channel.all_answer(fleet)
    if all_answer:
        releases = tuple(map(with_constant_noise, releases))
    if isinstance(event, PoissonSampling) and noised:
        revealed = reveal_probability(event.rate, len(population), smallest_cohort(algorithm, channel)) if all_answer else 1.0
        event = replace(event, revealed=revealed)
    return RoundEvent(releases, event, algorithm.unit)
