"""Secure summation: the server learns the sum over those who stayed, and no single row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtail.channel.base import Channel, Encoder, RoundLost
from fedtail.channel.graph import SignedGraph, SparseGraph
from fedtail.channel.integer import check_modulus_bits, fixed_point_encoding
from fedtail.deprecated import with_old_names
from fedtail.draws import hash_bits, uniform_numbers
from fedtail.fleet import Broadcast, Fleet, SimulatedPopulation
from fedtail.sampling import Cohort

if TYPE_CHECKING:
    from fedtail.secure import Session

RUN = b"fedtail simulation"
WORDS = (1 << 64) - 1


@with_old_names
@dataclass(frozen=True)
class SecureChannel(Channel):
    """Rows of integers modulo 2^`modulus_bits`, masked by the clients so that only the sum of many can be read.

    A sum is released over at least `threshold` clients, and more than half of the cohort; where fewer stay, the round is lost.
    Rounds with smaller cohorts are not held, and integer noise may rely on so many shares. A sum over a tail hides a client
    among those who contribute, not among the cohort: a risk by which fewer than `minimum_contributors` do is refused, and a sum
    is not unmasked where so many clients have dropped out that fewer may be left.

    Over a `RemoteFleet` every node masks the sum of its own clients' rows, and so many nodes must stay that any of them hold
    `threshold` clients. In the simulator all clients are in one process: `masks` "real" runs the whole protocol of
    `fedtail.secure` between them; "none" adds the same integers without masks, for speed, and says so in what is recorded.
    `dropout` is how likely a client vanishes there after it was sampled and before its row arrives, to see what that does.

    Every pair of clients shares a mask; with `graph=SparseGraph(...)` each client and few others, and more of them have to stay.
    With `graph=SignedGraph(...)` every pair does, and clients sign, against a server that departs from the protocol.
    """

    reveals_rows: ClassVar[bool] = False
    threshold: int
    minimum_contributors: int = 10
    modulus_bits: int = 62
    masks: Literal["real", "none"] = "real"
    dropout: float = 0.0
    graph: SparseGraph | SignedGraph | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a setting out of range.

        `modulus_bits` must be in 8..62, `threshold` and `minimum_contributors` at least 2, `masks` "real" or "none", and
        `dropout` in [0, 1).
        """
        check_modulus_bits(self.modulus_bits)
        if self.threshold < 2:
            raise ValueError(f"threshold must be at least 2, got {self.threshold}: the sum over one client is its row.")
        if self.minimum_contributors < 2:
            raise ValueError(f"minimum_contributors must be at least 2, got {self.minimum_contributors}: "
                             "a tail of one client is that client.")
        if self.masks not in ("real", "none"):
            raise ValueError(f"masks must be real or none, got {self.masks!r}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout:g}. It is how likely a client vanishes.")

    @property
    def minimum(self) -> int:
        """The smallest cohort with which a round is held: `threshold`."""
        return self.threshold

    @property
    def label(self) -> str:
        """A text that says what the server sees in a simulation, for ledgers: sums, and by which threshold, graph and masks.

        It begins with "simulated" where `masks` is "none".
        """
        seen = f"sums over at least {self.threshold} clients{self._graph_label()}"
        return f"{seen}, masked, all in one process" if self.masks == "real" else f"simulated: {seen} as integers, without masks"

    def label_for_fleet(self, fleet: Fleet) -> str:
        """A text that says what the server sees in a round over this fleet, for the ledger.

        It is `label` where all clients are in one process; else it says that the nodes mask their sums.
        """
        seen = f"sums over at least {self.threshold} clients{self._graph_label()}"
        return self.label if fleet.in_one_process else f"{seen}, masked by the nodes"

    def _graph_label(self) -> str:
        """The part of `label` that names the graph, with a space before it; an empty text where `graph` is None."""
        return "" if self.graph is None else f" {self.graph.label}"

    def all_answer(self, fleet: Fleet | SimulatedPopulation) -> bool:
        """Whether every client that is sampled from `fleet` is certain to answer.

        False where `dropout` is positive or the fleet may lose clients.
        """
        return not self.dropout and super().all_answer(fleet)

    def encoding(self, clients: int, mass: float) -> Encoder:
        """The fixed-point encoding for a round of at most `clients` clients with a mass of at most `mass` each.

        Raises a ValueError where fewer than 12 bits are left for an entry of a row.
        """
        return fixed_point_encoding(clients, mass, self.modulus_bits)

    def collect(self, questions: tuple[Any, ...], encoding: Encoder, fleet: Fleet, cohort: Cohort, broadcast: Broadcast,
                again: Callable[[], None], needed: int = 0) -> list[Tensor]:
        """For each question the sum over the clients of `cohort` that did not drop out, int64, (width,), still encoded.

        `encoding` encodes rows as integers; masks are bound to `broadcast`. Over a fleet of nodes, these mask their own sums, and
        `again`, which charges the ledger, is called before they are asked a second time. Where all clients are in one process,
        secure aggregation is simulated, with `masks` and `dropout`. Raises `RoundLost` where fewer clients stayed than the
        threshold of secure aggregation, or than `needed` plus the number of those that failed and answered with zeros.
        """
        if not fleet.in_one_process:
            return fleet.collect_masked(questions, encoding, self.threshold, again, self.graph, needed)
        if self.masks == "none" and not self.dropout:
            sums = fleet.collect(questions, encoding)
            self._needed_with_silent_clients(len(cohort.key), needed, questions, fleet)
            return sums
        rows = fleet.collect(tuple(replace(one, gather=True) for one in questions), encoding)      # each client's own, here
        needed = self._needed_with_silent_clients(len(cohort.key), needed, questions, fleet)
        gone = [self._draw_dropouts(cohort, broadcast, one.number) for one in questions]
        if self.masks == "none":
            return [self._sum_without_masks(mine, lost, needed) for mine, lost in zip(rows, gone, strict=True)]
        return self._sums_with_masks(questions, rows, gone, cohort, broadcast, needed)

    def fleet_refusals(self, cohort_size: float, fleet: Fleet) -> Iterator[str]:
        """Yields texts, each a reason why sums over `fleet` cannot be secure with these settings; none where they can.

        Reasons are, for example, that `cohort_size` (the expected number of clients in a round) is below the threshold, that
        clients cannot mask their rows, that one node holds all clients, or that `masks` or `dropout` is set for nodes.
        """
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
        if self.graph is not None and fleet.schedule == "all-or-nothing":
            yield ("in all-or-nothing sums a server may call a node missing and retry without it, which signatures do not "
                   "prevent. Use the schedule ahead or simple."
                   if isinstance(self.graph, SignedGraph) else
                   "all-or-nothing sums are over few nodes, of which every pair shares a mask; few neighbours are for nodes that "
                   "drop out. Leave graph out, or use the schedule ahead or simple.")
        if fleet.population.num_nodes < 2:
            yield (f"{fleet.population.num_nodes} node holds all clients, and a sum over one node is that node's. Secure sums "
                   "need two or more.")

    def _needed_with_silent_clients(self, clients: int, needed: int, questions: tuple[Any, ...], fleet: Any) -> int:
        """How many clients must answer: `needed`, plus one for each client that should have contributed but answered with zeros.

        `fleet` counts the latter for these `questions`. Raises `RoundLost` where the number exceeds `clients`, the size of the
        cohort. Where `needed` is 0 the result is 0.
        """
        silent = fleet.count_silent_clients(questions) if needed else 0
        if clients < needed + silent:
            raise RoundLost(f"{silent} of {clients} clients answered with zeros (a loss or an update that is not finite, or an "
                            f"empty row), and {needed} must answer otherwise: fewer than minimum_contributors may be left.")
        return needed + silent

    def _draw_dropouts(self, cohort: Cohort, broadcast: Broadcast, number: int) -> Tensor:
        """Which clients of the cohort drop out of question `number` before they send their row, (clients,) bool.

        Each does with probability `dropout`, by a hash of the seed and round of `broadcast`, its key and the number: the same at
        every call.
        """
        return uniform_numbers(hash_bits(broadcast.seed, "dropout", broadcast.round, cohort.key, number)) < self.dropout

    def _sum_without_masks(self, rows: Tensor, gone: Tensor, needed: int = 0) -> Tensor:
        """The sum of `rows` over the clients that are not `gone`, modulo 2^modulus_bits, without masks: int64, (width,).

        `rows` is (clients, width), `gone` (clients,) bool. Raises `RoundLost` where fewer stayed than `needed`, or than secure
        aggregation with masks would need.
        """
        stayed, needed = int((~gone).sum()), max(needed, self._session_threshold(len(gone)))
        if stayed < needed:
            raise RoundLost(f"{stayed} of {len(gone)} clients stayed, and sums are released over {needed}.")
        return rows[~gone].sum(0) % (1 << self.modulus_bits)

    def _sums_with_masks(self, questions: tuple[Any, ...], rows: list[Tensor], gone: list[Tensor], cohort: Cohort,
                         broadcast: Broadcast, needed: int) -> list[Tensor]:
        """The sum for each question, int64, (width,), by the whole protocol of secure aggregation, run in this process.

        `rows` (clients, width) and `gone` (clients,), which says who drops out before it sends its row, are given for each
        question. Masks are bound to the round and model in `broadcast`, the question and the cohort. Raises `RoundLost`, without
        unmasking the sum, where fewer rows arrived than the session's threshold or than `needed`.
        """
        from fedtail.secure import ROW, LocalClients, Rounds, TooFew
        from fedtail.secure.exchanges import refuse_few_clients

        names, totals = [int(key) & WORDS for key in cohort.key.tolist()], []
        enough = partial(refuse_few_clients, dict.fromkeys(names, 1), needed)
        requires = {} if self.graph is None else self.graph.client_arguments(names)
        for question, mine, lost in zip(questions, rows, gone, strict=True):
            vanish = {name: range(ROW, ROW + 9) for name, left in zip(names, lost.tolist(), strict=True) if left}
            clients = LocalClients(names, RUN, self.threshold, vanish, **requires)
            clients.rows = dict(zip(names, mine.numpy(), strict=True))
            clients.context = context_digest(question, broadcast, names)
            rounds = Rounds(clients)
            try:
                rounds.open(self._make_session(broadcast.round, tuple(sorted(names))))
                total = rounds.sum(mine.shape[1], self.modulus_bits, clients.context, check=enough).total
            except TooFew as reason:
                raise RoundLost(str(reason)) from reason
            totals.append(torch.from_numpy(total))
        return totals

    def _make_session(self, round: int, names: tuple[int, ...]) -> Session:
        """The `Session` of a simulated round: which clients (`names`, in increasing order) take part, and its threshold.

        The threshold is the larger of `self.threshold` and a majority, or more where `graph` requires it. Raises `TooFew` where a
        `SignedGraph` allows all but one of the clients to collude.
        """
        from fedtail.secure import Session

        threshold = max(self.threshold, len(names) // 2 + 1)
        make = Session if self.graph is None else self.graph.session
        return make(RUN, round, names, threshold)

    def _session_threshold(self, clients: int) -> int:
        """The fewest of `clients` clients that must stay for a sum to be released.

        It is the larger of `self.threshold` and a majority, or more where there is a `graph` that requires it.
        """
        threshold = max(self.threshold, clients // 2 + 1)
        return threshold if self.graph is None else self.graph.threshold(clients, threshold)


def context_digest(question: Any, broadcast: Broadcast, names: list[int]) -> bytes:
    """The SHA-256 digest (32 bytes) of what all clients were sent: `broadcast`, `question`, and the cohort's `names`.

    Of the broadcast it covers round, seed and models. Masks are bound to the digest: if it differs between two clients, their
    masks do not cancel.
    """
    from fedtail.wire import pack

    everything = pack((broadcast.round, broadcast.seed, broadcast.params, question, tuple(map(str, sorted(names)))))
    return hashlib.sha256(everything).digest()
