"""Secure summation: the server learns the sum over those who stayed, and no single row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtail.channel.base import Channel, Encoder, RoundLost
from fedtail.channel.integer import check_modulus, fixed_point
from fedtail.draws import hashed, uniform
from fedtail.fleet import Broadcast, Fleet
from fedtail.sampling import Cohort

RUN = b"fedtail simulation"
WORDS = (1 << 64) - 1


@dataclass(frozen=True)
class SecureChannel(Channel):
    """Rows of integers modulo 2^`modulus_bits`, masked by the clients so that only the sum of many can be read.

    A sum is released over at least `threshold` clients, and more than half of those asked; where fewer stay, the round is lost.
    Smaller cohorts are not asked, and integer noise may count on so many shares. A tail hides a client among those who count,
    not among all: a risk that trains fewer than `hides_among` is refused.

    Over a `RemoteFleet` every node masks the sum of its own clients' rows, and so many nodes must stay that any of them hold
    `threshold` clients. In the simulator all clients are in one process: `masks` "real" runs the whole protocol of
    `fedtail.secure` between them; "none" adds the same integers without masks, for speed, and says so in what is recorded.
    `dropout` is how likely a client vanishes there after it was asked and before its row arrives, to see what that does.
    """

    reveals_rows: ClassVar[bool] = False
    threshold: int
    hides_among: int = 10
    modulus_bits: int = 62
    masks: Literal["real", "none"] = "real"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_modulus(self.modulus_bits)
        if self.threshold < 2:
            raise ValueError(f"threshold must be at least 2, got {self.threshold}: the sum over one client is its row.")
        if self.hides_among < 2:
            raise ValueError(f"hides_among must be at least 2, got {self.hides_among}: a tail of one client is that client.")
        if self.masks not in ("real", "none"):
            raise ValueError(f"masks must be real or none, got {self.masks!r}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout:g}. It is how likely a client vanishes.")

    @property
    def minimum(self) -> int:
        return self.threshold

    @property
    def minimum_contributors(self) -> int:
        return self.hides_among

    @property
    def label(self) -> str:
        seen = f"sums over at least {self.threshold} clients"
        return f"{seen}, masked, all in one process" if self.masks == "real" else f"simulated: {seen} as integers, without masks"

    def described(self, fleet: Fleet) -> str:
        return self.label if fleet.in_one_process else f"sums over at least {self.threshold} clients, masked by the nodes"

    def encoding(self, clients: int, mass: float) -> Encoder:
        return fixed_point(clients, mass, self.modulus_bits)

    def collect(self, questions: tuple[Any, ...], encoding: Encoder, fleet: Fleet, cohort: Cohort, broadcast: Broadcast,
                again: Callable[[], None]) -> list[Tensor]:
        if not fleet.in_one_process:
            return fleet.collect_masked(questions, encoding, self.threshold, again)
        if self.masks == "none" and not self.dropout:
            return fleet.collect(questions, encoding)
        rows = fleet.collect(tuple(replace(one, gather=True) for one in questions), encoding)      # each client's own, here
        gone = [self._vanished(cohort, broadcast, one.number) for one in questions]
        if self.masks == "none":
            return [self._unmasked(mine, lost) for mine, lost in zip(rows, gone, strict=True)]
        return self._masked(questions, rows, gone, cohort, broadcast)

    def refuse_fleet(self, cohort_size: float, fleet: Fleet) -> Iterator[str]:
        if cohort_size < self.threshold:
            yield (f"about {cohort_size:g} clients are drawn a round, and sums are released over {self.threshold} or more. Lower "
                   "threshold, or draw more clients.")
        if fleet.in_one_process:
            return
        if not fleet.masks_rows:
            yield (f"{type(fleet).__name__} holds clients who cannot mask their own rows. Use IntegerChannel, or a LocalFleet or "
                   "RemoteFleet.")
            return
        if self.masks == "none" or self.dropout:
            yield ('nodes mask their rows and drop out by themselves: masks = "none" and dropout are for the simulator. '
                   "Leave them out.")
        if fleet.population.nodes < 2:
            yield (f"{fleet.population.nodes} node holds all clients, and a sum over one node is that node's. Secure sums need "
                   "two or more.")

    def _vanished(self, cohort: Cohort, broadcast: Broadcast, number: int) -> Tensor:
        """Who is gone before a row arrives, (clients,) bool."""
        return uniform(hashed(broadcast.seed, "dropout", broadcast.round, cohort.key, number)) < self.dropout

    def _unmasked(self, rows: Tensor, gone: Tensor) -> Tensor:
        stayed = int((~gone).sum())
        if stayed < self._threshold(len(gone)):
            raise RoundLost(f"{stayed} of {len(gone)} clients stayed, and sums are released over {self._threshold(len(gone))}.")
        return rows[~gone].sum(0) % (1 << self.modulus_bits)

    def _masked(self, questions: tuple[Any, ...], rows: list[Tensor], gone: list[Tensor], cohort: Cohort,
                broadcast: Broadcast) -> list[Tensor]:
        """The protocol between clients who know the round, the model, the question and each other."""
        from fedtail.secure import ROW, LocalClients, Rounds, Session, TooFew

        names, totals = [int(key) & WORDS for key in cohort.key.tolist()], []
        for question, mine, lost in zip(questions, rows, gone, strict=True):
            session = Session(RUN, broadcast.round, tuple(sorted(names)), self._threshold(len(names)))
            vanish = {name: range(ROW, ROW + 9) for name, left in zip(names, lost.tolist(), strict=True) if left}
            clients = LocalClients(names, RUN, self.threshold, vanish)
            clients.rows = dict(zip(names, mine.numpy(), strict=True))
            clients.context = told(question, broadcast, names)
            rounds = Rounds(clients)
            try:
                rounds.open(session)
                total = rounds.sum(mine.shape[1], self.modulus_bits, clients.context).total
            except TooFew as reason:
                raise RoundLost(str(reason)) from reason
            totals.append(torch.from_numpy(total))
        return totals

    def _threshold(self, clients: int) -> int:
        return max(self.threshold, clients // 2 + 1)


def told(question: Any, broadcast: Broadcast, names: list[int]) -> bytes:
    """A digest of everything the clients of a question were told: masks of clients who were told other things do not cancel."""
    from fedtail.wire import pack

    everything = pack((broadcast.round, broadcast.seed, broadcast.params, question, tuple(map(str, sorted(names)))))
    return hashlib.sha256(everything).digest()
