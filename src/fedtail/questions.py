"""What a server may ask. A question is frozen data; a client answers with a row, the server gets the sum of the rows.

This file imports no part: a question holds parts by Protocol, and the wire form is given the types it may build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fedtail.base_part import Part, unsent_field
from fedtail.client_statistics import ClientStatistics, WeightedClients
from fedtail.deprecated import old_names
from fedtail.devices import to_device
from fedtail.privacy.events import NonPrivateRelease, Release
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy

if TYPE_CHECKING:
    from fedtail.clients import Clients, Shard

T = TypeVar("T")
Conversation = Generator[Any, Any, T]      # yields questions, is sent sums, ends in a T


class StatisticPart(Part):
    """Something that can be asked about the losses."""

    reads_memory: ClassVar[bool] = False      # rows depend on what the risk keeps on its clients
    by_group: ClassVar[bool] = False          # rows are read group by group; without it a part is not given the clients' groups

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client half: one row per client, linear in its mass, (clients, width), at the server's `trial` numbers."""
        raise NotImplementedError

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry a row can have, where at most `clients` clients of at most `mass` each answer.

        By default `mass`: most rows are shares of the client's mass.
        """
        return mass

    def row_width(self, trial: Tensor) -> int:
        """Entries of a row at these trial numbers; by default found by computing the row of one client without mass."""
        none = torch.zeros(1, dtype=torch.float64)
        return self.statistic(ClientStatistics(torch.ones_like(none), none, torch.zeros(1, dtype=torch.int64)), trial).shape[1]


class Question(Protocol):
    """Anything a client answers with one row."""

    @property
    def name(self) -> str:
        """The class name of the part that asks, for error texts and the ledger."""
        ...

    @property
    def model(self) -> int:
        """The position among the broadcast models of the one it is about; 0 unless a family is trained."""
        ...

    @property
    def trains(self) -> bool:
        """Whether clients train to answer it, which takes long; other rows are a few numbers from the losses."""
        ...

    @property
    def gather(self) -> bool:
        """Whether the server gets every client's row; otherwise only their sum."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """The privacy mechanism: what it does to the rows before they are sent, and to their sum after."""
        ...

    @property
    def number(self) -> int:
        """Its position among the questions of the round, set by the channel; a client's noise is drawn by it."""
        ...

    @property
    def last_share(self) -> int | None:
        """The largest key of the clients that add a share of integer noise; None where all do. Known to a simulator only."""
        ...

    @property
    def divisor(self) -> int | None:
        """The entry of the sum, a weight, that the server will divide the others by; None where it divides by none."""
        ...

    @property
    def objective(self) -> Any:
        """The part that computes the number of a client which risks read as its loss; None is the mean loss over its examples."""
        ...

    @property
    def by_group(self) -> bool:
        """Whether its rows are read group by group: then a group of few clients is left out where sums hide single ones."""
        ...

    def needs_losses(self, shard: Shard) -> bool:
        """Whether the losses of the shard's clients have to be computed before `rows` is called."""
        ...

    def rows(self, clients: Clients) -> Tensor:
        """Client half: one row per client, (clients, width), before clipping, noise and encoding; rows may hold NaN."""
        ...

    def width(self, dim: int) -> int:
        """Entries of a row, for a model with `dim` parameters."""
        ...

    def release(self, dim: int) -> Release:
        """What the answer reveals about clients, as an entry of the ledger, for a model with `dim` parameters."""
        ...

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """Largest absolute entries of a row, (width,) or (1,) for all, for at most `clients` clients of at most `mass` each."""
        ...

    def fewest_contributors(self, mass: float) -> float | None:
        """A lower bound on how many clients, of at most `mass` each, have a row other than zero.

        Infinite where the whole cohort has one, None where it is not known before they are counted.
        """
        ...

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Who of a shard was taken to contribute to the sum and answered with zeros, (clients,) bool."""
        ...

    def count_question(self) -> Question:
        """The question that counts the clients whose row would not be zero; a TypeError where every client has one."""
        ...


@dataclass(frozen=True)
class Statistic:
    """How are the losses distributed? The row is computed by `part` at the trial numbers."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    part: StatisticPart
    trial: Tensor
    model: int = 0                      # which of the broadcast models
    gather: bool = False
    mechanism: Mechanism = NoPrivacy()
    number: int = 0
    objective: Any = None               # what a client's loss is: None is the mean over its examples
    left_out_groups: tuple[int, ...] = ()      # groups of too few clients to be told of: they answer zeros
    last_share: int | None = unsent_field()
    smallest_group: int | None = unsent_field()      # clients in the smallest group that is told of; None: rows are not by group

    def __post_init__(self) -> None:
        """Refuse, with a TypeError, a part that does not derive from `StatisticPart`."""
        if not isinstance(self.part, StatisticPart):
            raise TypeError(f"a Statistic is answered by a StatisticPart, got {self.part!r}. Write class "
                            f"{type(self.part).__name__}(StatisticPart).")

    @property
    def name(self) -> str:
        """The class name of the part that asks."""
        return type(self.part).__name__

    @property
    def by_group(self) -> bool:
        """Whether the part reads its rows group by group."""
        return self.part.by_group

    def needs_losses(self, shard: Shard) -> bool:
        """Always true: a statistic is computed from the losses."""
        return True

    def rows(self, clients: Clients) -> Tensor:
        """The part's rows for these clients, (clients, width); with what the risk keeps on them, where the part reads it."""
        memory = f"risk {self.model}" if self.part.reads_memory else None
        known = clients.statistics(self.model, memory=memory, objective=self.objective)
        if not self.part.by_group:
            return self.part.statistic(replace(known, group=None), self.trial)
        rows = self.part.statistic(known, self.trial)
        if known.group is None or not self.left_out_groups:
            return rows
        return rows.masked_fill(torch.isin(known.group, torch.tensor(self.left_out_groups))[:, None], 0.0)

    def width(self, dim: int) -> int:
        """Entries of a row, as the part gives them for these trial numbers; `dim` does not matter."""
        return self.part.row_width(self.trial)

    def release(self, dim: int) -> Release:
        """What the part's sum reveals about the losses; its width is needed only where there is noise to price."""
        return _release(self, self.width(dim) if self.mechanism.private else 0, f"what {self.name} asks about the losses")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """One bound for all entries, (1,) float64: the part's `row_bound`."""
        return torch.tensor([self.part.row_bound(clients, mass)], dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float:
        """Infinite, since all of the cohort answer; of a question by group, the size of the smallest group that is told of."""
        return math.inf if self.smallest_group is None else self.smallest_group

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Whoever failed, (clients,) bool: everybody is taken to contribute."""
        return shard.failed

    def count_question(self) -> Question:
        """Raises a TypeError: the whole cohort answers, so there is nothing to count."""
        raise TypeError("everybody answers a Statistic: there is nothing to count.")


@dataclass(frozen=True)
class Train:
    """Train, if you contribute: the row is made by `aggregate` from the update, w_k - w, and the client's weight."""

    trains: ClassVar[bool] = True
    local: Any
    risk: Any
    dual: Tensor
    aggregate: Any
    model: int = 0
    gather: bool = False
    kept: Tensor | None = None          # what the aggregator kept of the round before
    number: int = 0
    divisor: int | None = None          # the entry of the sum that the aggregator will divide the others by
    objective: Any = None               # the number of a client that the dual was fitted to; None is its mean loss
    by_group: ClassVar[bool] = False
    last_share: int | None = unsent_field()

    @property
    def name(self) -> str:
        """The class name of the aggregator."""
        return type(self.aggregate).__name__

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that the aggregator declares for its rows."""
        return self.aggregate.declares.mechanism

    @property
    def reads_losses(self) -> bool:
        """Whether the risk's weights depend on the losses."""
        return bool(self.risk.declares.reads_losses)

    @property
    def weighting_part_name(self) -> str:
        """The class name of the part that decides who contributes: the risk."""
        return type(self.risk).__name__

    def needs_losses(self, shard: Shard) -> bool:
        """Whether weights depend on losses that do not come with the first gradients."""
        return self.reads_losses and not self.first_gradient_tells_loss(shard)

    def width(self, dim: int) -> int:
        """One entry for each of the `dim` parameters, and the aggregator's own columns."""
        return dim + int(self.aggregate.declares.columns)

    def release(self, dim: int) -> Release:
        """What the sum of the updates reveals, for the ledger; every single row, without a mechanism, where it gathers."""
        return _release(self, self.width(dim), f"the updates, by {self.name}")

    def weigh_clients(self, clients: Clients, losses: Tensor | None = None) -> tuple[WeightedClients, Tensor]:
        """The clients' statistics with their weights, and who contributes, (clients,) bool: has a weight and takes a step.

        `losses`, (clients,), spares computing them where they are known already.
        """
        declared = self.risk.declares
        memory = f"risk {self.model}" if declared.keeps else None
        known = clients.statistics(self.model, declared.reads_losses, memory, losses, self.objective)
        weighted = known.with_density(self.risk.density(known, self.dual))
        return weighted, (weighted.weight > 0) & (self.local.steps(clients) > 0)

    def contributes(self, clients: Clients) -> Tensor:
        """Which clients have a row other than zero, (clients,) bool: those with a weight that take at least one step."""
        return self.weigh_clients(clients)[1]

    def rows(self, clients: Clients) -> Tensor:
        """Train the clients that contribute and make their rows by the aggregator, (clients, width); all others have zero rows.

        Notes in the shard who contributed, and has the risk's memory of each client stored for the next round.
        """
        at_once = self.first_gradient_tells_loss(clients.shard)
        losses, gradients = self.local.losses_and_first_gradients(clients, self.model) if at_once else (None, None)
        weighted, chosen = self.weigh_clients(clients, losses)
        if self.risk.declares.keeps:
            clients.remember(f"risk {self.model}", self.risk.remember(weighted, self.dual))
        clients.shard.contributed[self.model, clients.place] |= chosen
        if bool(chosen.all()) and len(clients):
            return self.aggregate.rows(self.local.updates(clients, self.model, gradients), weighted, self, clients)
        where = chosen.nonzero().flatten()
        if not len(where):
            return torch.zeros(len(clients), self.width(clients.kernel.dim), dtype=torch.float64)
        few, first = clients.take(chosen), None if gradients is None else gradients[to_device(where, gradients.device)]
        updates = self.local.updates(few, self.model, first)
        trained = self.aggregate.rows(updates, weighted.take(chosen), self, few)
        rows = trained.new_zeros(len(clients), trained.shape[1])
        return rows.index_copy_(0, to_device(where, rows.device), trained)

    def first_gradient_tells_loss(self, shard: Shard) -> bool:
        """Whether the losses are needed, not known yet, and come for free with the first gradients of local training."""
        known = shard.knows_losses(self.model, self.objective) or not self.risk.declares.reads_losses
        return not known and self.objective is None and self.local.first_gradient_tells_loss(shard.kernel)

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """The aggregator's bound on the entries of a row, from the largest weight that the risk can give: (width,) or (1,)."""
        return self.aggregate.bound(width, self.risk.weight_bound(clients, mass))

    def fewest_contributors(self, mass: float) -> float | None:
        """The risk's lower bound under this dual; None where it has none, or where clients may take no step."""
        return self.risk.fewest_contributors(self.dual, mass) if self.local.declares.everyone_trains else None

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Whoever has a weight and takes a step, and failed, (clients,) bool."""
        return shard.contributed[self.model] & shard.failed

    def count_question(self) -> Question:
        """A `Count` of the clients that would train and contribute."""
        return Count(self, self.model)


@dataclass(frozen=True)
class Evaluate:
    """How good is a model? The row is made by `part` from the client's own metrics, none of which is sent by itself."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    reads_losses: ClassVar[bool] = True      # numbers that take the place of losses
    part: Any                           # which metrics, on which examples, over which public ranges
    model: int = 0
    gather: bool = False
    mechanism: Mechanism = NoPrivacy()
    number: int = 0
    by_group: ClassVar[bool] = False
    last_share: int | None = unsent_field()

    @property
    def name(self) -> str:
        """The class name of the part that computes the metrics."""
        return type(self.part).__name__

    @property
    def weighting_part_name(self) -> str:
        """The class name of the part that decides who contributes: the one that computes the metrics."""
        return self.name

    @property
    def objective(self) -> Any:
        """The part itself: its metrics are computed, shared among processes and kept for the round as losses are."""
        return self.part                # its numbers are computed, shared out and kept for the round as losses are

    def needs_losses(self, shard: Shard) -> bool:
        """Always true: metrics take the place of losses."""
        return True

    def rows(self, clients: Clients) -> Tensor:
        """The part's rows, made of the metrics of these clients: (clients, row_width)."""
        return self.part.rows(self._metric_values(clients))

    def contributes(self, clients: Clients) -> Tensor:
        """Which clients have a row other than zero, (clients,) bool: those with examples to evaluate on and finite metrics."""
        return self._metric_values(clients).isfinite().all(1)

    def _metric_values(self, clients: Clients) -> Tensor:
        """The metrics of these clients, (clients, metrics) float64, from the round's memo or computed; NaN without examples."""
        return clients.shard.losses(self.model, self.part)[clients.place]

    def width(self, dim: int) -> int:
        """Entries of a row, as the part gives them; the model's `dim` does not matter."""
        return int(self.part.row_width)

    def release(self, dim: int) -> Release:
        """What the sum of the evaluations reveals, for the ledger; every single row, without a mechanism, where it gathers."""
        return _release(self, self.width(dim), f"an evaluation, by {self.name}")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """One for every entry, (1,): values are scaled to [0, 1], and bins hold zero or one."""
        return torch.ones(1, dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float | None:
        """None: clients may have nothing to evaluate on, so they are counted first."""
        return None                     # some clients may have nothing to evaluate on: they are counted first

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Nobody, (clients,) bool: those who contribute are counted exactly."""
        return torch.zeros_like(shard.failed)

    def count_question(self) -> Question:
        """A `Count` of the clients that have something to evaluate on."""
        return Count(self, self.model)


@dataclass(frozen=True)
class Count:
    """How many clients would contribute to a sum? Asked first where that is unknown and a sum over few would reveal each."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    by_group: ClassVar[bool] = False
    last_share: ClassVar[None] = None
    question: Train | Evaluate
    model: int = 0
    gather: bool = False
    number: int = 0

    @property
    def name(self) -> str:
        """The class name of the part whose question is counted for."""
        return self.question.name

    @property
    def mechanism(self) -> Mechanism:
        """No privacy: counts are exact, and the ledger records them as non-private."""
        return NoPrivacy()

    @property
    def objective(self) -> Any:
        """The objective of the question that is counted for, so that both read the same losses."""
        return self.question.objective

    def needs_losses(self, shard: Shard) -> bool:
        """Whether the question that is counted for decides by losses who contributes."""
        return self.question.reads_losses

    def rows(self, clients: Clients) -> Tensor:
        """One for each client that would contribute and zero for the others: (clients, 1) float64."""
        return self.question.contributes(clients).double()[:, None]

    def width(self, dim: int) -> int:
        """One: each client's row is a zero or a one."""
        return 1

    def release(self, dim: int) -> Release:
        """An exact count, which the ledger records as released without a mechanism."""
        return NonPrivateRelease(f"how many clients contribute under {self.question.weighting_part_name}")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """One for the only entry, (1,)."""
        return torch.ones(1, dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float:
        """Infinite: the whole cohort answers."""
        return math.inf                 # everybody in the cohort answers

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Nobody, (clients,) bool: those who contribute are counted exactly."""
        return torch.zeros_like(shard.failed)

    def count_question(self) -> Question:
        """Raises a TypeError: the whole cohort answers, so there is nothing to count."""
        raise TypeError("everybody answers a Count: there is nothing to count.")


def _release(question: Question, width: int, what: str) -> Release:
    """The ledger's entry for a sum of rows of this width; single rows (`gather`) are non-private whatever the mechanism."""
    return NonPrivateRelease(f"single rows of {what}") if question.gather else question.mechanism.release(width, what)


@dataclass(frozen=True)
class Joint:
    """Several questions in one message, joint ones among them; the answer is a tuple of sums."""

    questions: tuple[Any, ...]


def with_question_fields(conversation: Conversation[T], **fields: Any) -> Conversation[T]:
    """A conversation that yields the questions of another with some of their fields replaced, in joint questions too.

    `model=1` makes it a conversation about the second broadcast model, `objective=...` about another number of each client.
    """
    reply = None
    try:
        while True:
            reply = yield replace_fields(conversation.send(reply), **fields)
    except StopIteration as end:
        return end.value


def replace_fields(question: Any, **fields: Any) -> Any:
    """A copy of a question with these fields replaced; of a joint question, a copy in which every single one has them."""
    if isinstance(question, Joint):
        return Joint(tuple(replace_fields(one, **fields) for one in question.questions))
    return replace(question, **fields)


def single_questions(question: Any) -> Iterator[Question]:
    """The single questions of a message in the order they were joined, nested joint questions included."""
    if isinstance(question, Joint):
        for one in question.questions:
            yield from single_questions(one)
    else:
        yield question


def arrange_answers(question: Any, answers: Iterator[Tensor]) -> Any:
    """The answers to the single questions, taken from the iterator in order, nested in tuples as the questions were joined."""
    return tuple(arrange_answers(one, answers) for one in question.questions) if isinstance(question, Joint) else next(answers)


class Encoding(Protocol):
    """How rows are encoded before they are sent."""

    @property
    def clients(self) -> int:
        """How many rows are summed, at most."""
        ...

    @property
    def mass(self) -> float:
        """The largest mass times importance that a client in the sum can have."""
        ...

    @property
    def needs_bound(self) -> bool:
        """Whether `encode` needs the bound of a row; where not, it is given an empty one."""
        ...

    @property
    def modulus_bits(self) -> int | None:
        """Sums are integers modulo 2 to this power; None where they are floating-point numbers."""
        ...

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """Rows as they are sent, (clients, width); a positive weight, the entry at `divisor`, never becomes zero."""
        ...

    def missing_bits(self, bound: float) -> int:
        """How many more bits it would take to send and add whole numbers up to `bound` without rounding; 0 where it can."""
        ...


def row_bound_for(question: Question, width: int, encoding: Encoding) -> Tensor:
    """The bound on the entries of the rows that are sent, (width,) or (1,): the mechanism's own, else the question's.

    Empty where the encoding needs none.
    """
    if not encoding.needs_bound:
        return torch.zeros(0, dtype=torch.float64)
    own = question.mechanism.bound(width)
    return question.bound(width, encoding.clients, encoding.mass) if own is None else torch.tensor([own], dtype=torch.float64)


def answer(question: Question, clients: Clients, encoding: Encoding) -> Tensor:
    """The client's only entry point: rows computed, clipped, noised and encoded, (clients, width), in the order of `clients`.

    A client whose row is not finite is marked as failed, and its row is zero before its share of the noise is added; so is one
    that was to contribute to a sum without noise and whose row is nothing but zeros.
    """
    rows = question.rows(clients)
    sums = rows.sum(1)
    if not bool((sums.isfinite() & (sums != 0)).all()):
        rows = _without_failed(question, rows, sums, clients)
    if question.mechanism.private and not question.mechanism.reveals_exact_sum:
        refuse_rounding_after_noise(question, rows.shape[1], encoding)
    rows = _apply_mechanism(question, rows, clients)
    return encoding.encode(rows, row_bound_for(question, rows.shape[1], encoding), question.divisor)


def _without_failed(question: Question, rows: Tensor, sums: Tensor, clients: Clients) -> Tensor:
    """Rows with zeros for those that are not finite; their clients, and contributors with nothing but zeros, are noted as failed.

    `sums` are those of the rows: a finite one has finite terms, and one other than zero has a term other than zero.
    """
    if not bool(sums.isfinite().all()):
        finite = rows.isfinite().all(1)
        clients.shard.failed[clients.place] |= ~finite.cpu()
        rows = rows.where(finite[:, None], 0.0)
    if question.trains and not question.mechanism.private:
        empty = (sums == 0).cpu() & clients.shard.contributed[question.model, clients.place]
        if bool(empty.any()):
            clients.shard.failed[clients.place[empty]] |= ~rows[to_device(empty, rows.device)].any(1).cpu()
    return rows


def silent_clients(questions: Iterable[Any], shard: Shard) -> int:
    """How many clients of a shard answered one of these questions with zeros although they were taken to contribute to its sum.

    Their loss or update was not finite, or an aggregator made nothing but zeros of it. Everybody is taken to contribute to a
    `Statistic`, whoever has a weight and takes a step to a `Train`; of an `Evaluate` those who do are counted exactly.
    """
    silent = torch.zeros_like(shard.failed)
    for one in questions:
        silent |= one.failed_contributors(shard)
    return int(silent.sum())


def refuse_rounding_after_noise(question: Question, width: int, encoding: Encoding) -> None:
    """Raise a ValueError where the encoding would round rows of integers once more after their noise.

    The ledger prices the sum as it is before such rounding.
    """
    bound = question.mechanism.bound(width)
    missing = encoding.missing_bits(bound) if bound is not None else 0
    if missing > 0:
        raise ValueError(f"{question.name} would be rounded once more after its noise, which is not what is charged: integers of "
                         f"up to {bound:.4g} from up to {encoding.clients} clients take {missing} more bits. Raise modulus_bits "
                         "(at most 62), or write a smaller scale in DiscreteNoise.")


def _apply_mechanism(question: Question, rows: Tensor, clients: Clients) -> Tensor:
    """Rows clipped and with the clients' shares of the noise; where `last_share` is set, only clients with keys up to it add one.

    Noise is drawn from the clients' own source for this question's number.
    """
    mechanism: Any = question.mechanism
    if question.last_share is None:
        return mechanism.on_client(rows, clients.noise_source(question.number))
    adding = clients.keys <= question.last_share
    return mechanism.on_client(rows, clients.take(adding).noise_source(question.number), adding)


def converse(conversation: Conversation[T], ask: Callable[[Any], Any]) -> T:
    """Hold a conversation to its end: ask every question it yields, send the sums back, return its result.

    An exception of `ask` is thrown into the conversation where it asked, which may catch it and go on without the answer.
    """
    try:
        question = next(conversation)
        while True:
            try:
                sums = ask(question)
            except Exception as reason:
                question = conversation.throw(reason)
            else:
                question = conversation.send(sums)
    except StopIteration as end:
        return end.value


def join_conversations(conversations: list[Conversation[T]]) -> Conversation[list[T]]:
    """Several conversations as one whose messages join their questions: as many messages as the longest takes.

    Ends in the list of their results, in their order.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Any] = {}
    replies: dict[int, Any] = dict.fromkeys(range(len(conversations)))
    while len(results) < len(conversations):
        for k, reply in replies.items():
            try:
                waiting[k] = conversations[k].send(reply)
            except StopIteration as end:
                results[k] = end.value
        asked, waiting = waiting, {}
        sums = (yield Joint(tuple(asked.values()))) if asked else ()
        replies = dict(zip(asked, sums, strict=True))
    return [results[k] for k in range(len(conversations))]


__getattr__ = old_names(__name__)
