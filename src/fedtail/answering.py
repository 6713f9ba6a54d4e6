"""How a client answers a question: its row is computed, clipped, noised and encoded, in one function for every fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedtail.devices import to_device

if TYPE_CHECKING:
    from fedtail.clients import Clients, Shard
    from fedtail.questions import Question


class Encoding(Protocol):
    """How rows of real numbers are encoded before they are sent and summed."""

    @property
    def clients(self) -> int:
        """The largest number of rows that may be summed."""
        ...

    @property
    def mass(self) -> float:
        """The largest mass, times the sampler's importance, that a client in the sum can have."""
        ...

    @property
    def needs_bound(self) -> bool:
        """Whether `encode` needs a bound on the entries of the rows; where it does not, it is given an empty tensor."""
        ...

    @property
    def modulus_bits(self) -> int | None:
        """The number of bits b where sums are integers modulo 2^b; None where they are floating-point numbers."""
        ...

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """The rows in the form in which they are sent, (clients, width); `bound` limits their absolute entries.

        A positive entry at the position `divisor`, a weight, never becomes zero by rounding.
        """
        ...

    def missing_bits(self, bound: float) -> int:
        """How many more bits it takes to send and add integers up to `bound` without rounding; 0 where no more are needed."""
        ...


def row_bound_for(question: Question, width: int, encoding: Encoding) -> Tensor:
    """The bound on the absolute entries of the rows as they are sent, float64: the mechanism's own, (1,), where it has one.

    Otherwise the question's, (width,) or (1,). An empty tensor where the encoding needs no bound.
    """
    if not encoding.needs_bound:
        return torch.zeros(0, dtype=torch.float64)
    own = question.mechanism.bound(width)
    return question.bound(width, encoding.clients, encoding.mass) if own is None else torch.tensor([own], dtype=torch.float64)


def answer(question: Question, clients: Clients, encoding: Encoding) -> Tensor:
    """The client's only entry point: its answer to `question`, one encoded row per client, (clients, width), in their order.

    Rows are computed, clipped, noised and encoded. A client whose row is not finite is marked as failed in the shard, and its row
    becomes zero before noise is added. In a sum of updates without noise, a client that was to contribute is also marked as
    failed if its row is all zeros. In a simulated attack, corrupted clients may send other rows. Raises ValueError where the
    encoding would round rows after integer noise was added.
    """
    rows = question.rows(clients)
    sums = rows.sum(1)
    if not bool((sums.isfinite() & (sums != 0)).all()):
        rows = _zero_failed_rows(question, rows, sums, clients)
    if question.mechanism.private and not question.mechanism.reveals_exact_sum:
        refuse_rounding_after_noise(question, rows.shape[1], encoding)
    rows = _apply_mechanism(question, rows, clients)
    if not question.gather or encoding.modulus_bits is not None:      # a row that is not added up keeps its precision
        rows = encoding.encode(rows, row_bound_for(question, rows.shape[1], encoding), question.divisor)
    attack = clients.shard.attack
    return rows if attack is None or not question.trains else attack.as_sent(rows, clients, encoding.modulus_bits)


def _zero_failed_rows(question: Question, rows: Tensor, sums: Tensor, clients: Clients) -> Tensor:
    """The rows with those that are not finite replaced by zeros; their clients are marked as failed in the shard.

    `sums`, (clients,), are the sums of the rows' entries, which show cheaply whether there is any such row. For training without
    noise, clients that were to contribute and whose row is all zeros are marked as failed too.
    """
    if not bool(sums.isfinite().all()):
        finite = rows.isfinite().all(1)
        clients.shard.failed[clients.place] |= ~finite.cpu()
        rows = rows.where(finite[:, None], 0.0)
    if question.trains and not question.mechanism.private:
        train: Any = question
        empty = (sums == 0).cpu() & train.was_to_contribute(clients)
        if bool(empty.any()):
            clients.shard.failed[clients.place[empty]] |= ~rows[to_device(empty, rows.device)].any(1).cpu()
    return rows


def count_silent_clients(questions: Iterable[Any], shard: Shard) -> int:
    """How many clients of a shard failed, and so answered zeros, though they are taken to contribute to one of these questions.

    All clients are taken to contribute to a `Statistic`, and those with a positive weight and a step to a `Train`. An `Evaluate`
    adds none, since its contributors are counted exactly.
    """
    silent = torch.zeros_like(shard.failed)
    for one in questions:
        silent |= one.failed_contributors(shard)
    return int(silent.sum())


def refuse_rounding_after_noise(question: Question, width: int, encoding: Encoding) -> None:
    """Raise a ValueError where the encoding would round a question's rows of `width` integers after their noise was added.

    The privacy cost on the ledger is that of the sum without such rounding.
    """
    bound = question.mechanism.bound(width)
    missing = encoding.missing_bits(bound) if bound is not None else 0
    if missing > 0:
        raise ValueError(f"{question.name} would be rounded once more after its noise, which is not what is charged: integers of "
                         f"up to {bound:.4g} from up to {encoding.clients} clients take {missing} more bits. Raise modulus_bits "
                         "(at most 62), or write a smaller scale in DiscreteNoise.")


def _apply_mechanism(question: Question, rows: Tensor, clients: Clients) -> Tensor:
    """The rows after the mechanism's client half: clipped, and with each client's share of the noise, (clients, width).

    Noise is drawn from the clients' noise source for this question's number. Where `last_share` is set, only clients with keys up
    to it add a share.
    """
    mechanism: Any = question.mechanism
    if question.last_share is None:
        return mechanism.on_client(rows, clients.noise_source(question.number))
    adding = clients.keys <= question.last_share
    return mechanism.on_client(rows, clients.take(adding).noise_source(question.number), adding)
