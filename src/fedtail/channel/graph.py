"""Which clients share masks, and whether they sign, against a server that departs from the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedtail.deprecated import with_old_names

if TYPE_CHECKING:
    from fedtail.secure import Session


@with_old_names
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
        """Raise a ValueError where `corrupted` is not in [0, 1), `dropped` not in [0, 0.5), or a number of bits not in 1..256."""
        for name, least, most in (("corrupted", 0.0, 1.0), ("dropped", 0.0, 0.5)):
            if not least <= getattr(self, name) < most:
                raise ValueError(f"{name} must be in [{least:g}, {most:g}), got {getattr(self, name):g}. It is a share of the "
                                 "clients.")
        for name in ("security_bits", "correctness_bits"):
            if not 1 <= getattr(self, name) <= 256:
                raise ValueError(f"{name} must be in 1..256, got {getattr(self, name)}.")

    @property
    def label(self) -> str:
        """A text for the ledger: few neighbours share masks, and which shares of clients may be corrupted or drop out."""
        return f"with few neighbours (up to {self.corrupted:.0%} corrupted, {self.dropped:.0%} dropped)"

    def client_arguments(self, names: Sequence[int]) -> dict[str, Any]:
        """Keyword arguments for `LocalClients`: {"corrupted": ..., "security_bits": ...}, which clients require of a session.

        `names`, the clients, are not used here.
        """
        return {"corrupted": self.corrupted, "security_bits": self.security_bits}

    def session(self, name: bytes, round: int, members: tuple[int, ...], threshold: int, queries: int = 1) -> Session:
        """A `SparseSession` of these members with as few neighbours as suffice; a `Session` where every pair must share a mask.

        `name` is that of the run, `round` the number of the round, and `queries` the number of sums in the session. A sparse
        session releases sums over at least `threshold` members, and over all but a share of `dropped` of them; a complete one
        over at least `threshold`, and more than a share of `corrupted`.
        """
        from fedtail.secure import sparse_session

        return sparse_session(name, round, members, threshold, self.corrupted, self.dropped, queries, self.security_bits,
                              self.correctness_bits)

    def threshold(self, clients: int, threshold: int) -> int:
        """The fewest of `clients` clients over which a sum is released: `threshold`, or more where the graph requires it.

        The graph requires all but a share of `dropped`; where every pair shares a mask, more than a share of `corrupted`.
        """
        return self.session(b"threshold", 0, tuple(range(clients)), threshold).threshold


@with_old_names
@dataclass(frozen=True)
class SignedGraph:
    """Every pair of participants shares a mask, and all sign: against a server that departs from the protocol.

    Their identities are pinned, and up to `colluding` (c) of them may be on the server's side. Of n participants more than
    (n + c)/2 must stay (Bonawitz et al. 2017), or the round is lost; a question takes one exchange more. Over nodes participants
    are nodes, each with its own `Identity`. In the simulator they are the clients, whose identities are made for the round.
    """

    colluding: int = 0

    def __post_init__(self) -> None:
        """Raise a ValueError where `colluding` is negative."""
        if self.colluding < 0:
            raise ValueError(f"colluding must be 0 or more, got {self.colluding}. It is a number of participants.")

    @property
    def label(self) -> str:
        """A text that says how the sums are protected, for the ledger: signatures, and how many participants may collude."""
        return f"signed against a server that departs from the protocol with up to {self.colluding} colluding participants"

    def client_arguments(self, names: Sequence[int]) -> dict[str, Any]:
        """Keyword arguments for `LocalClients`: {"identities": dict from each client in `names` to a new `Identity`}.

        Each identity has a new secret key from the operating system's randomness, and holds the public keys of all. For
        simulations.
        """
        from fedtail.secure import Identity
        from fedtail.secure.primitives import KEY, system

        made = {one: Identity(system(KEY), ()) for one in names}
        pinned = {one: identity.public_key for one, identity in made.items()}
        return {"identities": {one: Identity(identity.secret, pinned, self.colluding) for one, identity in made.items()}}

    def session(self, name: bytes, round: int, members: tuple[int, ...], threshold: int, queries: int = 1) -> Session:
        """A signed `Session` of n `members`, whose sums are over at least `threshold` and more than (n + colluding) / 2 of them.

        `name` is that of the run, `round` the number of the round, and `queries` the number of sums in the session. Raises
        `TooFew` where `colluding` is n - 1 or more: then no sum would hide anybody.
        """
        from fedtail.secure import Session, TooFew

        if self.colluding > len(members) - 2:
            raise TooFew(f"{self.colluding} of {len(members)} participants may collude: nobody is left to hide among.")
        return Session(name, round, members, self.threshold(len(members), threshold), queries, signed=1)

    def threshold(self, clients: int, threshold: int) -> int:
        """The fewest of `clients` clients over which a sum is released.

        It is the larger of `threshold` and (clients + colluding) // 2 + 1.
        """
        from fedtail.secure import signed_threshold

        return max(threshold, signed_threshold(clients, self.colluding))


Graph = SparseGraph | SignedGraph
