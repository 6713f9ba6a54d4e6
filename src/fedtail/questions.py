"""What a server may ask. A question is frozen data; a client answers with a row, the server gets the sum of the rows.

This file imports no part: a question holds parts by Protocol, and the wire form is given the types it may build.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fedtail.clients import Clients, Seen, Shard
from fedtail.data.arrays import sent
from fedtail.privacy.events import NonPrivateRelease, Release
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy

T = TypeVar("T")
Conversation = Generator[Any, Any, T]      # yields questions, is sent sums, ends in a T


@runtime_checkable
class Part(Protocol):
    """Something that can be asked about the losses."""

    def statistic(self, seen: Seen, trial: Tensor) -> Tensor:
        """One row per client, linear in its mass: (clients, width)."""
        ...


class Question(Protocol):
    """Anything a client answers with one row."""

    @property
    def gather(self) -> bool:
        """Asks for the rows themselves, not their sum."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """What happens to the rows before they cross, and to their sum after."""
        ...

    @property
    def number(self) -> int:
        """Which of the round's questions it is; the channel says so, and noise is drawn by it."""
        ...

    @property
    def divisor(self) -> int | None:
        """The entry of the sum, a weight, that the others will be divided by; None where none is."""
        ...

    def rows(self, clients: Clients) -> Tensor: ...

    def release(self, dim: int) -> Release:
        """What the answer reveals, for the ledger, of a model with `dim` parameters."""
        ...

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """Largest absolute entries of a row, for so many clients of at most so much mass: (width,), or one for all."""
        ...


@dataclass(frozen=True)
class Statistic:
    """How are the losses distributed? The row is computed by `part` at the trial numbers."""

    divisor: ClassVar[int | None] = None
    part: Part
    trial: Tensor
    model: int = 0                      # which of the broadcast models
    gather: bool = False
    mechanism: Mechanism = NoPrivacy()
    number: int = 0

    def rows(self, clients: Clients) -> Tensor:
        memory = f"risk {self.model}" if getattr(self.part, "remembers", False) else None
        return self.part.statistic(clients.seen(self.model, memory=memory), self.trial)

    def release(self, dim: int) -> Release:
        what = f"what {type(self.part).__name__} asks about the losses"
        return _release(self, getattr(self.part, "width", 0), what)

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        own = getattr(self.part, "row_bound", None)      # most rows are shares of the mass; a part whose are not says so
        return torch.tensor([own(clients, mass) if own else mass], dtype=torch.float64)


@dataclass(frozen=True)
class Train:
    """Train, if you count: the row is made by `aggregate` from the update, w_k - w, and the client's weight."""

    local: Any
    risk: Any
    dual: Tensor
    aggregate: Any
    model: int = 0
    gather: bool = False
    kept: Tensor | None = None          # what the aggregator kept of the round before
    number: int = 0
    divisor: int | None = None          # the entry of the sum that the aggregator will divide the others by

    @property
    def mechanism(self) -> Mechanism:
        return getattr(self.aggregate, "mechanism", NoPrivacy())

    def release(self, dim: int) -> Release:
        return _release(self, self.aggregate.width(dim), f"the updates, by {type(self.aggregate).__name__}")

    def rows(self, clients: Clients) -> Tensor:
        memory = f"risk {self.model}" if self.risk.remembers else None
        losses, gradients = self.local.first_pass(clients, self.model) if self.in_one_pass(clients.shard) else (None, None)
        seen = clients.seen(self.model, self.risk.reads_losses, memory, losses)
        if memory:
            clients.remember(memory, self.risk.remember(seen, self.dual))
        weight = seen.mass * self.risk.density(seen, self.dual)
        chosen = (weight > 0) & (self.local.steps(clients) > 0)
        clients.shard.counted[self.model, clients.place] |= chosen
        if not bool(chosen.any()):
            return torch.zeros(len(clients), self.aggregate.width(clients.kernel.dim), dtype=torch.float64)
        few = clients.take(chosen) if not bool(chosen.all()) else clients
        where = chosen.nonzero().flatten()
        updates = self.local.updates(few, self.model, None if gradients is None else gradients[sent(where, gradients.device)])
        trained = self.aggregate.rows(updates, seen.take(chosen), self, few)
        if len(few) == len(clients):
            return trained
        rows = trained.new_zeros(len(clients), trained.shape[1])
        return rows.index_copy_(0, sent(where, rows.device), trained)

    def in_one_pass(self, shard: Shard) -> bool:
        """Whether losses that are not known yet come with the first gradients."""
        known = self.model in shard.memo or not self.risk.reads_losses
        return not known and self.local.in_one_pass(shard.kernel)

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        return self.aggregate.bound(width, self.risk.weight_bound(clients, mass))


def _release(question: Question, width: int, what: str) -> Release:
    return NonPrivateRelease(f"single rows of {what}") if question.gather else question.mechanism.release(width, what)


@dataclass(frozen=True)
class Joint:
    """Several questions in one message, joint ones among them; the answer is a tuple of sums."""

    questions: tuple[Any, ...]


def about(question: Any, model: int) -> Any:
    """The same question, about another of the broadcast models."""
    if isinstance(question, Joint):
        return Joint(tuple(about(one, model) for one in question.questions))
    return replace(question, model=model)


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
    """How rows become what crosses."""

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

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """Rows as they cross; a positive weight, the entry at `divisor`, never becomes zero."""
        ...


def bound_for(question: Question, width: int, encoding: Encoding) -> Tensor:
    """The bound of what crosses, where the encoding needs it."""
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
    rows = question.mechanism.on_client(rows, clients.noise(question.number))
    return encoding.encode(rows, bound_for(question, rows.shape[1], encoding), question.divisor)


def converse(conversation: Conversation[T], ask: Callable[[Any], Any]) -> T:
    """Hold a conversation to its end: ask every question it yields, send the sums back."""
    try:
        question = next(conversation)
        while True:
            question = conversation.send(ask(question))
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
