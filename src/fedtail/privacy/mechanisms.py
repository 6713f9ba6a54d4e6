"""Mechanisms: what happens to a row before it is sent, and to the sum before it is released: nothing, or clipping and noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.privacy.events import NonPrivateRelease, Release
from fedtail.privacy.noise import Noise
from fedtail.privacy.randomness import Randomness


@runtime_checkable
class Mechanism(Protocol):
    """The client half and the server half of one release, and what it costs."""

    @property
    def private(self) -> bool:
        """Whether the release has a finite epsilon, because its rows are clipped and noise is added."""
        ...

    @property
    def minimum(self) -> int:
        """The fewest clients whose rows may be summed; a round with a smaller cohort is skipped."""
        ...

    @property
    def reveals_exact_sum(self) -> bool:
        """Whether the server receives the sum before noise is added."""
        ...

    def bound(self, width: int) -> float | None:
        """The largest absolute entry that a row of `width` entries has when it is sent; None where rows are not clipped."""
        ...

    def on_client(self, rows: Tensor, random: Randomness) -> Tensor:
        """The rows that are sent in place of `rows`, both (clients, width): clipped, and with the clients' noise.

        That noise, if there is any, is drawn from `random`.
        """
        ...

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """The released sum, (width,), from `total`, the sum of the rows that were sent.

        Noise that the server adds is drawn from `random`.
        """
        ...

    def release(self, width: int, what: str) -> Release:
        """The event by which accountants price the release of a sum of `width` entries; `what` names it on the ledger."""
        ...


@dataclass(frozen=True)
class NoPrivacy(Part):
    """Rows are sent as they are, and the sum is on the ledger as non-private: epsilon is infinite."""

    @property
    def private(self) -> bool:
        """False: a sum without noise has no finite epsilon."""
        return False

    @property
    def minimum(self) -> int:
        """1: a cohort of any size may be summed."""
        return 1

    @property
    def reveals_exact_sum(self) -> bool:
        """True: no noise is added, so the server receives the exact sum."""
        return True

    def bound(self, width: int) -> float | None:
        """None: rows are not clipped, so their entries have no known bound. `width` is not used."""
        return None

    def on_client(self, rows: Tensor, random: Randomness) -> Tensor:
        """`rows`, (clients, width), unchanged; `random` is not used."""
        return rows

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """`total`, (width,), unchanged; `random` is not used."""
        return total

    def release(self, width: int, what: str) -> Release:
        """A non-private release named `what`, which makes epsilon infinite; `width` is not used."""
        return NonPrivateRelease(what)


@dataclass(frozen=True)
class NoisySum(Part):
    """Rows are clipped to L2 norm `clip_norm` (C), and noise is added to their sum.

    If a client's data are exchanged the sum moves by at most `exchange` times as much as if its row were zeroed. `whole` rows
    are whole numbers already, and within the norm by construction: one that is not is zeroed.
    """

    clip_norm: float
    noise: Noise
    exchange: float = 2.0
    whole: bool = False

    @property
    def private(self) -> bool:
        """True: rows are clipped and noise is added to their sum."""
        return True

    @property
    def minimum(self) -> int:
        """The fewest clients whose rows may be summed, as the noise demands; a round with a smaller cohort is skipped."""
        return self.noise.minimum

    @property
    def reveals_exact_sum(self) -> bool:
        """Whether the server receives the sum without noise, because it adds the noise itself."""
        return self.noise.reveals_exact_sum

    def on_client(self, rows: Tensor, random: Randomness, adding: Tensor | None = None) -> Tensor:
        """The rows that are sent in place of `rows`, (clients, width): clipped, and with the clients' shares of noise, if any.

        With `whole` a row above the clip norm is zeroed instead of clipped. Noise is drawn from `random`. With `adding`,
        (clients,) bool, only those clients add a share; the noise must accept that, as `DiscreteNoise` does.
        """
        kept = rows.where(rows.norm(dim=1, keepdim=True) <= self.clip_norm * (1 + 1e-12), 0.0) if self.whole else self.clip(rows)
        more: Any = {} if adding is None else {"adding": adding}
        return self.noise.on_client(kept, self.clip_norm, self.whole, random, **more)

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """The released sum, (width,), in the units of the rows, from `total`, the sum of the rows that were sent.

        Noise that the server adds is drawn from `random`.
        """
        return self.noise.on_server(total, self.clip_norm, self.whole, random)

    def clip(self, rows: Tensor) -> Tensor:
        """`rows`, (clients, width), in float64, each row longer than `clip_norm` in L2 norm scaled down to just below it.

        Shorter rows are returned as they are.
        """
        rows = rows.double()
        norms = rows.norm(dim=1, keepdim=True)
        return torch.where(norms > self.clip_norm, rows * (self.clip_norm * (1 - 1e-12) / norms.clamp(min=1e-300)), rows)

    def bound(self, width: int) -> float | None:
        """A bound on the absolute entries of a row of `width` entries as it is sent: clipped, with the client's noise if any."""
        return self.noise.bound(width, self.clip_norm, self.whole)

    def release(self, width: int, what: str) -> Release:
        """The event by which accountants price a noisy sum of `width` entries; `what` names it on the ledger."""
        return self.noise.release(width, self.clip_norm, self.whole, self.exchange, what)
