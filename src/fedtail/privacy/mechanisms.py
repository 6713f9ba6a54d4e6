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
        """Whether the release has a finite epsilon."""
        ...

    @property
    def minimum(self) -> int:
        """The smallest cohort it may be used for."""
        ...

    @property
    def reveals_exact_sum(self) -> bool:
        """Whether the server receives the sum before noise is added."""
        ...

    def bound(self, width: int) -> float | None:
        """The largest absolute entry that is sent; None where only the rows can say."""
        ...

    def on_client(self, rows: Tensor, random: Randomness) -> Tensor:
        """The rows that are sent, (clients, width)."""
        ...

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """The released sum, from the sum of what was sent."""
        ...

    def release(self, width: int, what: str) -> Release:
        """What the release of a sum of `width` entries costs, for the ledger; `what` names it."""
        ...


@dataclass(frozen=True)
class NoPrivacy(Part):
    """Rows are sent as they are, and the sum is on the ledger as non-private: epsilon is infinite."""

    @property
    def private(self) -> bool:
        """False."""
        return False

    @property
    def minimum(self) -> int:
        """One client is enough."""
        return 1

    @property
    def reveals_exact_sum(self) -> bool:
        """True."""
        return True

    def bound(self, width: int) -> float | None:
        """None: only the rows can say."""
        return None

    def on_client(self, rows: Tensor, random: Randomness) -> Tensor:
        """The rows as they are."""
        return rows

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """The sum as it is."""
        return total

    def release(self, width: int, what: str) -> Release:
        """A non-private release."""
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
        """True."""
        return True

    @property
    def minimum(self) -> int:
        """The smallest cohort that the noise allows."""
        return self.noise.minimum

    @property
    def reveals_exact_sum(self) -> bool:
        """Whether the noise is added by the server only."""
        return self.noise.reveals_exact_sum

    def on_client(self, rows: Tensor, random: Randomness, adding: Tensor | None = None) -> Tensor:
        """Clip the rows, and add the clients' shares of the noise, or the shares of those at `adding`, (clients,) bool."""
        kept = rows.where(rows.norm(dim=1, keepdim=True) <= self.clip_norm * (1 + 1e-12), 0.0) if self.whole else self.clip(rows)
        more: Any = {} if adding is None else {"adding": adding}
        return self.noise.on_client(kept, self.clip_norm, self.whole, random, **more)

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """Add the server's part of the noise, and undo the scaling to integers."""
        return self.noise.on_server(total, self.clip_norm, self.whole, random)

    def clip(self, rows: Tensor) -> Tensor:
        """Rows longer than the clip norm, shortened to it; in float64, and never a rounding error longer."""
        rows = rows.double()
        norms = rows.norm(dim=1, keepdim=True)
        return torch.where(norms > self.clip_norm, rows * (self.clip_norm * (1 - 1e-12) / norms.clamp(min=1e-300)), rows)

    def bound(self, width: int) -> float | None:
        """The largest absolute entry of a clipped row with its share of noise."""
        return self.noise.bound(width, self.clip_norm, self.whole)

    def release(self, width: int, what: str) -> Release:
        """The release of such a sum, for the ledger."""
        return self.noise.release(width, self.clip_norm, self.whole, self.exchange, what)
