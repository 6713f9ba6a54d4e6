"""What a server may ask. A question is frozen data; a client answers with a row, the server gets the sum of the rows.

This file imports no part: a question holds parts by Protocol, and the wire form is given the types it may build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fedtail.base_part import Part, unsent
from fedtail.client_statistics import ClientStatistics, WeightedClients
from fedtail.devices import sent
from fedtail.privacy.events import NonPrivateRelease, Release
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy

if TYPE_CHECKING:
    from fedtail.clients import Clients, Shard

T = TypeVar("T")
Conversation = Generator[Any, Any, T]      # yields questions, is sent sums, ends in a T


class StatisticPart(Part):
    """Something that can be asked about the losses."""

    reads_memory: ClassVar[bool] = False      # rows depend on what the risk keeps on its clients

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: one row per client, linear in its mass: (clients, width)."""
        raise NotImplementedError

    def row_bound(self, clients: int, mass: float) -> float:
        """Largest absolute entry of a row, for so many clients of at most so much mass; most rows are shares of the mass."""
        return mass

    def row_width(self, trial: Tensor) -> int:
        """Entries of a row: by default from the row of a client without mass."""
        none = torch.zeros(1, dtype=torch.float64)
        return self.statistic(ClientStatistics(torch.ones_like(none), none, torch.zeros(1, dtype=torch.int64)), trial).shape[1]


class Question(Protocol):
    """Anything a client answers with one row."""

    @property
    def name(self) -> str:
        """The class of the part that asks, for words about the question."""
        ...

    @property
    def model(self) -> int:
        """Which of the broadcast models it is about."""
        ...

    @property
    def trains(self) -> bool:
        """Whether clients train to answer it, which takes long; other rows are a few numbers from the losses."""
        ...

    @property
    def gather(self) -> bool:
        """Asks for the rows themselves, not their sum."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """What happens to the rows before they are sent, and to their sum after."""
        ...

    @property
    def number(self) -> int:
        """Which of the round's questions it is; the channel says so, and noise is drawn by it."""
        ...

    @property
    def last_share(self) -> int | None:
        """The largest key of the clients that add a share of integer noise, where not all do; known to a simulator only."""
        ...

    @property
    def divisor(self) -> int | None:
        """The entry of the sum, a weight, that the others will be divided by; None where none is."""
        ...

    @property
    def objective(self) -> Any:
        """The number of a client that risks see: None is its mean loss."""
        ...

    def needs_losses(self, shard: Shard) -> bool:
        """Whether the losses of the clients have to be known before rows are made."""
        ...

    def rows(self, clients: Clients) -> Tensor: ...

    def width(self, dim: int) -> int:
        """Entries of a row, for a model with `dim` parameters."""
        ...

    def release(self, dim: int) -> Release:
        """What the answer reveals, for the ledger, of a model with `dim` parameters."""
        ...

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """Largest absolute entries of a row, for so many clients of at most so much mass: (width,), or one for all."""
        ...

    def fewest_contributors(self, mass: float) -> float | None:
        """At least how many clients, of at most so much mass each, have a row other than zero; None: unknown until counted."""
        ...

    def count(self) -> Question:
        """The question how many clients would have a row other than zero."""
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
    last_share: int | None = unsent()

    def __post_init__(self) -> None:
        if not isinstance(self.part, StatisticPart):
            raise TypeError(f"a Statistic is answered by a StatisticPart, got {self.part!r}. Write class "
                            f"{type(self.part).__name__}(StatisticPart).")

    @property
    def name(self) -> str:
        return type(self.part).__name__

    def needs_losses(self, shard: Shard) -> bool:
        return True

    def rows(self, clients: Clients) -> Tensor:
        memory = f"risk {self.model}" if self.part.reads_memory else None
        return self.part.statistic(clients.statistics(self.model, memory=memory, objective=self.objective), self.trial)

    def width(self, dim: int) -> int:
        return self.part.row_width(self.trial)

    def release(self, dim: int) -> Release:
        return _release(self, self.width(dim) if self.mechanism.private else 0, f"what {self.name} asks about the losses")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        return torch.tensor([self.part.row_bound(clients, mass)], dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float:
        return math.inf                 # everybody in the cohort answers

    def count(self) -> Question:
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
    last_share: int | None = unsent()

    @property
    def name(self) -> str:
        return type(self.aggregate).__name__

    @property
    def mechanism(self) -> Mechanism:
        return self.aggregate.declares.mechanism

    @property
    def reads_losses(self) -> bool:
        """Whether weights depend on the losses."""
        return bool(self.risk.declares.reads_losses)

    @property
    def weighed_by(self) -> str:
        """The class of the part that says who contributes."""
        return type(self.risk).__name__

    def needs_losses(self, shard: Shard) -> bool:
        return self.reads_losses and not self.first_gradient_tells_loss(shard)

    def width(self, dim: int) -> int:
        return dim + int(self.aggregate.declares.columns)

    def release(self, dim: int) -> Release:
        return _release(self, self.width(dim), f"the updates, by {self.name}")

    def weighted(self, clients: Clients, losses: Tensor | None = None) -> tuple[WeightedClients, Tensor]:
        """The clients with their weights, and who contributes: has a weight and takes a step."""
        declared = self.risk.declares
        memory = f"risk {self.model}" if declared.keeps else None
        known = clients.statistics(self.model, declared.reads_losses, memory, losses, self.objective)
        weighted = known.weighted(self.risk.density(known, self.dual))
        return weighted, (weighted.weight > 0) & (self.local.steps(clients) > 0)

    def contributes(self, clients: Clients) -> Tensor:
        """Who has a row other than zero: has a weight, and takes a step."""
        return self.weighted(clients)[1]

    def rows(self, clients: Clients) -> Tensor:
        at_once = self.first_gradient_tells_loss(clients.shard)
        losses, gradients = self.local.losses_and_first_gradients(clients, self.model) if at_once else (None, None)
        weighted, chosen = self.weighted(clients, losses)
        if self.risk.declares.keeps:
            clients.remember(f"risk {self.model}", self.risk.remember(weighted, self.dual))
        clients.shard.contributed[self.model, clients.place] |= chosen
        if bool(chosen.all()) and len(clients):
            return self.aggregate.rows(self.local.updates(clients, self.model, gradients), weighted, self, clients)
        where = chosen.nonzero().flatten()
        if not len(where):
            return torch.zeros(len(clients), self.width(clients.kernel.dim), dtype=torch.float64)
        few = clients.take(chosen)
        updates = self.local.updates(few, self.model, None if gradients is None else gradients[sent(where, gradients.device)])
        trained = self.aggregate.rows(updates, weighted.take(chosen), self, few)
        rows = trained.new_zeros(len(clients), trained.shape[1])
        return rows.index_copy_(0, sent(where, rows.device), trained)

    def first_gradient_tells_loss(self, shard: Shard) -> bool:
        """Whether losses that are not known yet come with the first gradients."""
        known = shard.knows(self.model, self.objective) or not self.risk.declares.reads_losses
        return not known and self.objective is None and self.local.first_gradient_tells_loss(shard.kernel)

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        return self.aggregate.bound(width, self.risk.weight_bound(clients, mass))

    def fewest_contributors(self, mass: float) -> float | None:
        return self.risk.fewest_contributors(self.dual, mass) if self.local.declares.everyone_trains else None

    def count(self) -> Question:
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
    last_share: int | None = unsent()

    @property
    def name(self) -> str:
        return type(self.part).__name__

    @property
    def weighed_by(self) -> str:
        """The class of the part that says who contributes."""
        return self.name

    @property
    def objective(self) -> Any:
        return self.part                # its numbers are computed, shared out and kept for the round as losses are

    def needs_losses(self, shard: Shard) -> bool:
        return True

    def rows(self, clients: Clients) -> Tensor:
        return self.part.rows(self._values(clients))

    def contributes(self, clients: Clients) -> Tensor:
        """Who has a row other than zero: has examples, and finite metrics."""
        return self._values(clients).isfinite().all(1)

    def _values(self, clients: Clients) -> Tensor:
        return clients.shard.losses(self.model, self.part)[clients.place]

    def width(self, dim: int) -> int:
        return int(self.part.row_width)

    def release(self, dim: int) -> Release:
        return _release(self, self.width(dim), f"an evaluation, by {self.name}")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        return torch.ones(1, dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> None:
        return None                     # some clients may have nothing to evaluate on: they are counted first

    def count(self) -> Question:
        return Count(self, self.model)


@dataclass(frozen=True)
class Count:
    """How many clients would contribute to a sum? Asked first where that is unknown and a sum over few would reveal each."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    last_share: ClassVar[None] = None
    question: Train | Evaluate
    model: int = 0
    gather: bool = False
    number: int = 0

    @property
    def name(self) -> str:
        return self.question.name

    @property
    def mechanism(self) -> Mechanism:
        return NoPrivacy()

    @property
    def objective(self) -> Any:
        return self.question.objective

    def needs_losses(self, shard: Shard) -> bool:
        return self.question.reads_losses

    def rows(self, clients: Clients) -> Tensor:
        return self.question.contributes(clients).double()[:, None]

    def width(self, dim: int) -> int:
        return 1

    def release(self, dim: int) -> Release:
        return NonPrivateRelease(f"how many clients contribute under {self.question.weighed_by}")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        return torch.ones(1, dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float:
        return math.inf                 # everybody in the cohort answers

    def count(self) -> Question:
        raise TypeError("everybody answers a Count: there is nothing to count.")


def _release(question: Question, width: int, what: str) -> Release:
    return NonPrivateRelease(f"single rows of {what}") if question.gather else question.mechanism.release(width, what)


@dataclass(frozen=True)
class Joint:
    """Several questions in one message, joint ones among them; the answer is a tuple of sums."""

    questions: tuple[Any, ...]


def changing(conversation: Conversation[T], **fields: Any) -> Conversation[T]:
    """A conversation whose questions have other values in some fields: about another model, or another number of each client."""
    reply = None
    try:
        while True:
            reply = yield changed(conversation.send(reply), **fields)
    except StopIteration as end:
        return end.value


def changed(question: Any, **fields: Any) -> Any:
    """A question, or every single one of a joint question, with other values in some fields."""
    if isinstance(question, Joint):
        return Joint(tuple(changed(one, **fields) for one in question.questions))
    return replace(question, **fields)


def single_questions(question: Any) -> Iterator[Question]:
    """The single questions of a message, in order."""
    if isinstance(question, Joint):
        for one in question.questions:
            yield from single_questions(one)
    else:
        yield question


def arranged(question: Any, answers: Iterator[Tensor]) -> Any:
    """Answers to the single questions, arranged as they were joined."""
    return tuple(arranged(one, answers) for one in question.questions) if isinstance(question, Joint) else next(answers)


class Encoding(Protocol):
    """How rows are encoded before they are sent."""

    @property
    def clients(self) -> int:
        """How many rows are summed, at most."""
        ...

    @property
    def mass(self) -> float:
        """The largest mass of one of them."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether it needs the bound of a row; where not, it is given an empty one."""
        ...

    @property
    def modulus_bits(self) -> int | None:
        """Sums are integers modulo 2 to this; None where they are floating-point numbers."""
        ...

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """Rows as they are sent; a positive weight, the entry at `divisor`, never becomes zero."""
        ...

    def missing_bits(self, bound: float) -> int:
        """How many more bits it takes to send and add whole numbers up to `bound` as they are; 0 where it does."""
        ...


def bound_for(question: Question, width: int, encoding: Encoding) -> Tensor:
    """The bound of the rows that are sent, where the encoding needs it."""
    if not encoding.bounded:
        return torch.zeros(0, dtype=torch.float64)
    own = question.mechanism.bound(width)
    return question.bound(width, encoding.clients, encoding.mass) if own is None else torch.tensor([own], dtype=torch.float64)


def answer(question: Question, clients: Clients, encoding: Encoding) -> Tensor:
    """The client's only entry point. A client whose row is not finite answers zeros, and its share of the noise."""
    rows = question.rows(clients)
    if not bool(rows.sum(1).isfinite().all()):                     # a finite sum has finite terms; the other way round, look
        finite = rows.isfinite().all(1)
        clients.shard.failed[clients.place] |= ~finite.cpu()
        rows = rows.where(finite[:, None], 0.0)
    if question.mechanism.private and not question.mechanism.reveals_exact_sum:
        refuse_coarse(question, rows.shape[1], encoding)
    rows = _noised(question, rows, clients)
    return encoding.encode(rows, bound_for(question, rows.shape[1], encoding), question.divisor)


def refuse_coarse(question: Question, width: int, encoding: Encoding) -> None:
    """Refuse an encoding that would round rows of integers once more after their noise: the sum would not be what is priced."""
    bound = question.mechanism.bound(width)
    missing = encoding.missing_bits(bound) if bound is not None else 0
    if missing > 0:
        raise ValueError(f"{question.name} would be rounded once more after its noise, which is not what is charged: integers of "
                         f"up to {bound:.4g} from up to {encoding.clients} clients take {missing} more bits. Raise modulus_bits "
                         "(at most 62), or write a smaller scale in DiscreteNoise.")


def _noised(question: Question, rows: Tensor, clients: Clients) -> Tensor:
    """Rows with every client's share of the noise or, where the number of shares is fixed, those of the clients it falls to."""
    mechanism: Any = question.mechanism
    if question.last_share is None:
        return mechanism.on_client(rows, clients.noise(question.number))
    adding = clients.keys <= question.last_share
    return mechanism.on_client(rows, clients.take(adding).noise(question.number), adding)


def converse(conversation: Conversation[T], ask: Callable[[Any], Any]) -> T:
    """Hold a conversation to its end: ask every question it yields, send the sums back.

    What goes wrong with a question is raised where it was asked: a conversation may go on without the answer.
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


def side_by_side(conversations: list[Conversation[T]]) -> Conversation[list[T]]:
    """Several conversations with their questions joined: together they cost the messages of the longest."""
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
