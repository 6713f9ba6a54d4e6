"""Which clients share masks, where every pair would be too many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedtail.secure import Session


@dataclass(frozen=True)
class SparseGraph:
    """Each client shares masks with few random others instead of all: for cohorts of a hundred to ten thousand.

    As few neighbours (k) as suffice by the bounds of Bell et al. 2020, as exact tails: where up to a share `corrupted` (gamma) of
    the cohort is on the side of a server that follows the protocol, and up to a share `dropped` (delta) drops out, rows stay
    secret but for a probability of 2^-security_bits in a session, and no sum is lost but for one of 2^-correctness_bits. Where
    more drop out, the round is lost. In small cohorts, where that takes everybody, every pair shares a mask.
    """

    corrupted: float
    dropped: float
    security_bits: int = 40
    correctness_bits: int = 20

    def __post_init__(self) -> None:
        for name, least, most in (("corrupted", 0.0, 1.0), ("dropped", 0.0, 0.5)):
            if not least <= getattr(self, name) < most:
                raise ValueError(f"{name} must be in [{least:g}, {most:g}), got {getattr(self, name):g}. It is a share of the "
                                 "clients.")
        for name in ("security_bits", "correctness_bits"):
            if not 1 <= getattr(self, name) <= 256:
                raise ValueError(f"{name} must be in 1..256, got {getattr(self, name)}.")

    def session(self, name: bytes, round: int, members: tuple[int, ...], threshold: int, queries: int = 1) -> Session:
        """A session of these members, whose sums are over `threshold` or more, and over all but the share of `dropped`."""
        from fedtail.secure import sparse_session

        return sparse_session(name, round, members, threshold, self.corrupted, self.dropped, queries, self.security_bits,
                              self.correctness_bits)

    def threshold(self, clients: int, threshold: int) -> int:
        """Over how many of so many clients sums are released."""
        return self.session(b"threshold", 0, tuple(range(clients)), threshold).threshold
