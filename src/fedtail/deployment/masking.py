"""Masking schedules: which exchanges with the nodes a secure sum takes.

"simple"          dropout-tolerant: keys and shares before the round's first question, two exchanges; then two for each question
"ahead"           dropout-tolerant: keys and shares of the next round travel with the first question, two exchanges for each one
"all-or-nothing"  one exchange for each question; if a node is missing there is no sum, and with integer noise one retry with the
                  rest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from fedtail.secure.all_or_nothing import AllOrNothingServer, Missing
from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.exchanges import AllOrNothingRounds, Check, Exchange, Rounds, accept_any
from fedtail.secure.messages import MOST_QUERIES, Run, Session
from fedtail.secure.sum_server import Server, Sum

if TYPE_CHECKING:
    from fedtail.channel.graph import Graph

Counts = Mapping[int, int]              # clients by node
USUAL = 2                               # questions a round, until it is known


class Masking(Protocol):
    """Secure sums over nodes, question by question."""

    def open(self, counts: Counts, threshold: int, upcoming: Counts | None, graph: Graph | None = None) -> None:
        """Begin a round whose sums are over `threshold` clients or more; `counts` are its sampled clients by node.

        `upcoming` is the next round's cohort, None where it is not known. Each node shares masks with those that `graph` says, or
        all.
        """
        ...

    def sum(self, width: int, modulus_bits: int, context: bytes, again: Callable[[], bytes] | None,
            check: Check = accept_any) -> Sum:
        """The sum of the nodes' rows: `width` integers modulo 2 ** modulus_bits, masked in `context`; TooFew where few answer.

        `check` is called with the nodes that answered, before their sum is unmasked, and may refuse it too. Before a retry
        `again` is called: it charges for it, and gives the new context; None where the rows have no noise and there may be none.
        """
        ...

    def take_refused(self) -> list[tuple[int, Refused]]:
        """Messages refused since the last call, each with the node it came from; they are then forgotten."""
        ...


class DropoutTolerant:
    """Dropout-tolerant secure sums, which go on without nodes that vanish; with `ahead`, keys travel with the round before."""

    def __init__(self, exchange: Exchange, name: bytes, ahead: bool):
        """`exchange` sends messages to nodes and gives their replies; `name` is the run's, which sessions are bound to."""
        self._rounds, self._name, self._ahead = Rounds(exchange), name, ahead
        self._number = 0                                            # of sessions in this run
        self._asked, self._most = 0, USUAL                          # questions of this round, and of the longest so far
        self._session: Session | None = None
        self._left = 0                                              # queries that the session still has
        self._prepared: Session | None = None                       # set up with the last round
        self._cohort: tuple[Counts, int, Counts | None] = ({}, 0, None)
        self._graph: Graph | None = None

    def open(self, counts: Counts, threshold: int, upcoming: Counts | None, graph: Graph | None = None) -> None:
        """Begin a round. Its session is set up with the first question, unless that was done with the round before."""
        if self._asked:
            self._most = self._asked
        self._cohort, self._asked, self._session, self._left = (counts, threshold, upcoming), 0, None, 0
        self._graph = graph

    def sum(self, width: int, modulus_bits: int, context: bytes, again: Callable[[], bytes] | None,
            check: Check = accept_any) -> Sum:
        """The sum over the nodes that stay, unmasked where `check` lets it; there are no retries.

        The first sum of a round sets up the next session where keys go ahead.
        """
        counts, threshold, upcoming = self._cohort
        if not self._left:
            self._begin(counts, threshold)
        ahead = self._new_session(upcoming, threshold) if self._ahead and upcoming and not self._asked else None
        self._asked, self._left, self._prepared = self._asked + 1, self._left - 1, ahead or self._prepared
        return self._rounds.sum(width, modulus_bits, context, ahead, check)

    def take_refused(self) -> list[tuple[int, Refused]]:
        """Messages refused since the last call, each with the node it came from; they are then forgotten."""
        return take_refused(self._rounds.server)

    def _begin(self, counts: Counts, threshold: int) -> None:
        """Open the session that was set up ahead, if it is for this cohort and complete, else a new one.

        TooFew where the cohort is too small.
        """
        prepared, self._prepared = (self._prepared, None) if not self._asked else (None, self._prepared)
        if prepared is not None and self._fits(prepared, counts, threshold):
            try:
                self._rounds.open(prepared)
                self._session, self._left = prepared, prepared.queries
                return
            except TooFew:
                pass                                                # more nodes may be there by now
        fresh = self._new_session(counts, threshold)
        if fresh is None:
            raise TooFew(f"{sum(counts.values())} clients at {len(counts)} nodes are sampled; needed are {threshold} or more "
                         "clients at 2 or more nodes.")
        self._rounds.open(fresh)
        self._session, self._left = fresh, fresh.queries

    def _fits(self, prepared: Session, counts: Counts, threshold: int) -> bool:
        """Whether a session that was set up ahead is the one this cohort and threshold would have."""
        same = prepared.members == tuple(sorted(counts))
        return same and prepared == self._make_session(prepared.round, counts, threshold, prepared.queries)

    def _new_session(self, counts: Counts, threshold: int) -> Session | None:
        """A new session with a number of its own; None where the cohort has fewer than `threshold` clients or 2 nodes."""
        if len(counts) < 2 or sum(counts.values()) < threshold:
            return None
        self._number += 1
        more = max(self._most, 4 * self._asked)                     # where a round has more questions than were expected
        try:
            return self._make_session(self._number, counts, threshold, min(more, MOST_QUERIES))
        except TooFew:
            return None

    def _make_session(self, number: int, counts: Counts, threshold: int, queries: int) -> Session:
        """The session with this number over the cohort's nodes, for so many queries, by the round's graph if it has one."""
        make = Session if self._graph is None else self._graph.session
        return make(self._name, number, tuple(sorted(counts)), nodes_needed(counts, threshold), queries)


class AllOrNothing:
    """All-or-nothing secure sums. Keys are agreed once, with the first nodes; a node that joins later does not participate."""

    def __init__(self, exchange: Exchange, name: bytes):
        """`exchange` sends messages to nodes and gives their replies; `name` is the run's, which keys are bound to."""
        self._exchange, self._name = exchange, name
        self._rounds: AllOrNothingRounds | None = None
        self._number, self._threshold = 0, 0
        self._counts: Counts = {}

    def open(self, counts: Counts, threshold: int, upcoming: Counts | None, graph: Graph | None = None) -> None:
        """Begin a round over these nodes; every pair of them shares a mask, so `upcoming` and `graph` are not used."""
        self._counts, self._threshold = counts, threshold

    def begin(self, nodes: tuple[int, ...]) -> None:
        """Agree on keys with these nodes at the first call of a run; later calls change nothing."""
        if self._rounds is None:
            self._rounds = AllOrNothingRounds(self._exchange, Run(self._name, nodes))

    def sum(self, width: int, modulus_bits: int, context: bytes, again: Callable[[], bytes] | None,
            check: Check = accept_any) -> Sum:
        """The sum over all nodes of the round that have keys, with one retry over the rest where some are missing.

        Without noise (`again` is None) there is no retry. TooFew where the rest are too few, or the retry fails too.
        """
        assert self._rounds is not None
        known = set(self._rounds.server.known)
        members, self._number = tuple(one for one in sorted(self._counts) if one in known), self._number + 1
        self._check_enough(members, check)
        try:
            found = self._rounds.sum(self._number, 0, width, modulus_bits, context, members)
        except Missing as why:
            if again is None:
                raise TooFew(f"no row came from nodes {', '.join(map(str, why.missing))}, and all are needed: nothing is "
                             "released. Without noise there is no retry: a late row would be the difference of the two sums. "
                             "Use the schedule ahead or simple where nodes drop out.") from why
            self._check_enough(tuple(one for one in members if one not in why.missing), check)
            found = self._rounds.again(again())
        check(found.survivors)                                      # with what came along with the rows
        return found

    def take_refused(self) -> list[tuple[int, Refused]]:
        """Messages refused since the last call, each with the node it came from; they are then forgotten."""
        return take_refused(self._rounds.server if self._rounds else None)

    def _check_enough(self, members: tuple[int, ...], check: Check) -> None:
        """Raise TooFew where these nodes hold fewer clients than the threshold, are fewer than 2, or `check` refuses them."""
        clients = sum(self._counts[one] for one in members)
        if len(members) < 2 or clients < self._threshold:
            raise TooFew(f"{clients} clients at {len(members)} nodes are left; needed are {self._threshold} or more at 2 or more "
                         "nodes.")
        check(members)


def take_refused(server: Server | AllOrNothingServer | None) -> list[tuple[int, Refused]]:
    """Take a server's list of refused messages, (node, why), and leave it empty; [] without a server."""
    if server is None:
        return []
    found, server.refused = server.refused, []
    return found


def nodes_needed(counts: Counts, threshold: int) -> int:
    """The threshold in nodes: any so many hold `threshold` clients, and are more than half, so that two groups overlap."""
    held, needed = 0, 0
    for few in sorted(counts.values()):
        if held >= threshold:
            break
        held, needed = held + few, needed + 1
    return max(2, needed, len(counts) // 2 + 1)

