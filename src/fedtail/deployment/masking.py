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
from fedtail.secure.exchanges import AllOrNothingRounds, Check, Exchange, Rounds, accept_any_members
from fedtail.secure.messages import MOST_QUERIES, Run, Session
from fedtail.secure.sum_server import Server, Sum

if TYPE_CHECKING:
    from fedtail.channel.graph import Graph

Counts = Mapping[int, int]              # clients by node
USUAL = 2                               # questions a round, until it is known


class Masking(Protocol):
    """Secure sums over nodes: `open_round` once for each round, then `sum_rows` for each question."""

    def open_round(self, counts: Counts, threshold: int, upcoming: Counts | None, graph: Graph | None = None) -> None:
        """Begin a round whose sums are over `threshold` clients or more. `counts` has the sampled clients of each node.

        `upcoming` has those of the next round, None where they are not sampled yet. `graph` says which nodes share masks; None:
        every pair does.
        """
        ...

    def sum_rows(self, width: int, modulus_bits: int, context: bytes, again: Callable[[], bytes] | None,
                 check: Check = accept_any_members) -> Sum:
        """The sum of the nodes' rows, `width` integers modulo 2 ** modulus_bits, and the nodes in it; TooFew if few answer.

        `context` is the digest that masks are bound to. `check` is called with the nodes that answered, before their sum is
        unmasked, and raises to refuse it. `again` is called before a retry: it charges for it and returns the context digest of
        the retry. None: the rows have no noise, and there must be no retry.
        """
        ...

    def pop_refused_messages(self) -> list[tuple[int, Refused]]:
        """The pairs (node, Refused) of messages that were refused since the last call; the list here is emptied."""
        ...


class DropoutTolerant:
    """Dropout-tolerant secure sums, which continue without nodes that fail; `ahead` exchanges a round's keys one earlier."""

    def __init__(self, exchange: Exchange, name: bytes, ahead: bool):
        """`exchange` sends messages to nodes and returns their replies by node; `name` is the run's, to which masks are bound.

        With `ahead` the keys of the next round are exchanged together with the first question of a round.
        """
        self._rounds, self._name, self._ahead = Rounds(exchange), name, ahead
        self._number = 0                                            # of sessions in this run
        self.minimum_nodes = 2                                      # that the strictest node demands in a sum
        self._asked, self._most = 0, USUAL                          # questions of this round, and of the longest so far
        self._session: Session | None = None
        self._left = 0                                              # queries that the session still has
        self._prepared: Session | None = None                       # set up with the last round
        self._cohort: tuple[Counts, int, Counts | None] = ({}, 0, None)
        self._graph: Graph | None = None

    def open_round(self, counts: Counts, threshold: int, upcoming: Counts | None, graph: Graph | None = None) -> None:
        """Begin a round: store its cohort, threshold and graph. Nothing is sent; keys are exchanged with the first question.

        `counts` has the sampled clients of each node, `upcoming` those of the next round if known, and sums are over `threshold`
        clients or more. The number of questions in the last round, if any, becomes the number of sums that new sessions are made
        for.
        """
        if self._asked:
            self._most = self._asked
        self._cohort, self._asked, self._session, self._left = (counts, threshold, upcoming), 0, None, 0
        self._graph = graph

    def sum_rows(self, width: int, modulus_bits: int, context: bytes, again: Callable[[], bytes] | None,
                 check: Check = accept_any_members) -> Sum:
        """The sum of the rows of the nodes that answer, `width` integers modulo 2 ** modulus_bits, and these nodes' numbers.

        Masks are bound to the digest `context`. `check` is called with the nodes that answered, before their sum is unmasked, and
        raises to refuse it; there is no retry, so `again` is unused. Exchanges keys first where the round's session is not open
        or its sums are used up. With `ahead`, the first sum of a round also exchanges the keys of the next. Raises TooFew where
        too few nodes or clients answer.
        """
        counts, threshold, upcoming = self._cohort
        if not self._left:
            self._open_session(counts, threshold)
        ahead = self._next_session(upcoming, threshold) if self._ahead and upcoming and not self._asked else None
        self._asked, self._left, self._prepared = self._asked + 1, self._left - 1, ahead or self._prepared
        return self._rounds.sum(width, modulus_bits, context, ahead, check)

    def pop_refused_messages(self) -> list[tuple[int, Refused]]:
        """The pairs (node, Refused) of messages that were refused since the last call; the list here is emptied."""
        return pop_refused_messages(self._rounds.server)

    def _open_session(self, counts: Counts, threshold: int) -> None:
        """Open a session for the cohort `counts`: the one prepared in the round before if it fits, else a new one.

        A prepared one must also have enough keys. A new one takes two exchanges. A prepared session is used only for the first
        question of a round. Raises TooFew where the cohort has fewer than `threshold` clients or 2 nodes, or too few nodes send
        keys.
        """
        prepared, self._prepared = (self._prepared, None) if not self._asked else (None, self._prepared)
        if prepared is not None and self._session_fits(prepared, counts, threshold):
            try:
                self._rounds.open(prepared)
                self._session, self._left = prepared, prepared.queries
                return
            except TooFew:
                pass                                                # more nodes may be there by now
        fresh = self._next_session(counts, threshold)
        if fresh is None:
            raise TooFew(f"{sum(counts.values())} clients at {len(counts)} nodes are sampled; needed are {threshold} or more "
                         f"clients at {self.minimum_nodes} or more nodes.")
        self._rounds.open(fresh)
        self._session, self._left = fresh, fresh.queries

    def _session_fits(self, prepared: Session, counts: Counts, threshold: int) -> bool:
        """Whether a session that was prepared in the round before has the nodes and the threshold that this round needs.

        `counts` has the round's sampled clients of each node, and sums are over `threshold` clients or more.
        """
        same = prepared.members == tuple(sorted(counts))
        return same and prepared == self._session_with_number(prepared.round, counts, threshold, prepared.queries)

    def _next_session(self, counts: Counts, threshold: int) -> Session | None:
        """A new session under the next number, for as many sums as the round is expected to need; nothing is sent.

        `counts` has the sampled clients of each node. None where they are fewer than `threshold` clients or 2 nodes, or the graph
        has no session for them.
        """
        if len(counts) < self.minimum_nodes or sum(counts.values()) < threshold:
            return None
        self._number += 1
        more = max(self._most, 4 * self._asked)                     # where a round has more questions than were expected
        try:
            return self._session_with_number(self._number, counts, threshold, min(more, MOST_QUERIES))
        except TooFew:
            return None

    def _session_with_number(self, number: int, counts: Counts, threshold: int, queries: int) -> Session:
        """The session under this number over the nodes in `counts`, for `queries` sums, with the masks of the round's graph.

        The threshold asked of it is the least number n of nodes such that any n of them hold `threshold` clients or more, but at
        least a majority, and what the strictest node demands. Without a graph every pair of nodes shares masks; a graph raises
        TooFew where it has no session for these nodes.
        """
        make = Session if self._graph is None else self._graph.session
        needed = max(self.minimum_nodes, nodes_needed(counts, threshold))
        return make(self._name, number, tuple(sorted(counts)), needed, queries)


class AllOrNothing:
    """All-or-nothing secure sums. Keys are exchanged once, with the nodes there at the first round; later ones are left out."""

    def __init__(self, exchange: Exchange, name: bytes):
        """`exchange` sends messages to nodes and returns their replies by node; `name` is the run's, to which keys are bound."""
        self._exchange, self._name = exchange, name
        self._rounds: AllOrNothingRounds | None = None
        self._number, self._threshold = 0, 0
        self._counts: Counts = {}

    def open_round(self, counts: Counts, threshold: int, upcoming: Counts | None, graph: Graph | None = None) -> None:
        """Begin a round: store `counts`, the sampled clients of each node, and `threshold`, the fewest clients in a sum.

        `upcoming` and `graph` are ignored: every pair of nodes shares masks.
        """
        self._counts, self._threshold = counts, threshold

    def exchange_keys(self, nodes: tuple[int, ...]) -> None:
        """Exchange keys with these nodes, in one exchange, at the first call of a run; later calls do nothing."""
        if self._rounds is None:
            self._rounds = AllOrNothingRounds(self._exchange, Run(self._name, nodes))

    def sum_rows(self, width: int, modulus_bits: int, context: bytes, again: Callable[[], bytes] | None,
                 check: Check = accept_any_members) -> Sum:
        """The sum over all nodes of the round that have keys, `width` integers modulo 2 ** modulus_bits, and these nodes.

        Masks are bound to the digest `context`. Where some nodes do not answer, there is one retry over the others: `again`
        charges for it and returns its context digest. None: the rows have no noise, and TooFew is raised instead. `check` is
        called with the nodes before each attempt and again after the rows came, and raises to refuse the sum. TooFew also where
        too few are left or the retry fails.
        """
        assert self._rounds is not None
        known = set(self._rounds.server.members_with_keys)
        members, self._number = tuple(one for one in sorted(self._counts) if one in known), self._number + 1
        self._check_enough_clients(members, check)
        try:
            found = self._rounds.sum(self._number, 0, width, modulus_bits, context, members)
        except Missing as why:
            if again is None:
                raise TooFew(f"no row came from nodes {', '.join(map(str, why.missing))}, and all are needed: nothing is "
                             "released. Without noise there is no retry: a late row would be the difference of the two sums. "
                             "Use the schedule ahead or simple where nodes drop out.") from why
            self._check_enough_clients(tuple(one for one in members if one not in why.missing), check)
            found = self._rounds.retry(again())
        check(found.survivors)                                      # with what came along with the rows
        return found

    def pop_refused_messages(self) -> list[tuple[int, Refused]]:
        """The pairs (node, Refused) of messages refused since the last call, [] before `exchange_keys`; the list is emptied."""
        return pop_refused_messages(self._rounds.server if self._rounds else None)

    def _check_enough_clients(self, members: tuple[int, ...], check: Check) -> None:
        """Raise TooFew where the nodes `members` are fewer than 2 or hold fewer clients than the threshold; then call `check`."""
        clients = sum(self._counts[one] for one in members)
        if len(members) < 2 or clients < self._threshold:
            raise TooFew(f"{clients} clients at {len(members)} nodes are left; needed are {self._threshold} or more at 2 or more "
                         "nodes.")
        check(members)


def pop_refused_messages(server: Server | AllOrNothingServer | None) -> list[tuple[int, Refused]]:
    """A server's list of refused messages as pairs (node, Refused); it is emptied there. [] where `server` is None."""
    if server is None:
        return []
    found, server.refused = server.refused, []
    return found


def nodes_needed(counts: Counts, threshold: int) -> int:
    """The threshold in nodes: the least n such that any n of these nodes hold `threshold` clients or more; at least a majority.

    It is at least 2, and more than half of the nodes, so that any two such groups overlap. `counts` has the clients of each node.
    Where all nodes together hold fewer than `threshold` clients, it is their number.
    """
    held, needed = 0, 0
    for few in sorted(counts.values()):
        if held >= threshold:
            break
        held, needed = held + few, needed + 1
    return max(2, needed, len(counts) // 2 + 1)

