"""Secure aggregation with all clients in one process and the real cryptography: for tests, and for the simulator."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from fedtail.secure.encoding import Refused
from fedtail.secure.exchanges import Rounds
from fedtail.secure.identity import Identity
from fedtail.secure.messages import Ask, Session
from fedtail.secure.participant import Participant
from fedtail.secure.primitives import Randomness, system
from fedtail.secure.sparse_graph import CORRUPTED, SECURITY_BITS
from fedtail.secure.sparse_messages import sparse_session
from fedtail.secure.sum_server import Contents, Sum

KEYS, SHARES, ROW, UNMASK = range(4)      # the exchanges of a round with one query
Absent = Mapping[int, Container[int]]     # client -> the exchanges, counted from 0, that it misses


class LocalClients:
    """Clients that all live in this process, callable as the `exchange` of `Rounds` and `AllOrNothingRounds`.

    Before each query set `rows`, the integer vector of each client, and `context`, the bytes that were broadcast. `vanish` maps
    a client to the exchanges that do not reach it, `lose` to those that reach it but whose answers are lost; both are counted
    from 0.
    """

    def __init__(self, names: Any, name: bytes, minimum: int = 2, vanish: Absent | None = None, lose: Absent | None = None,
                 repetitions: int = 0, identities: Mapping[int, Identity] | None = None, random: Randomness = system,
                 corrupted: float = CORRUPTED, security_bits: int = SECURITY_BITS):
        """Make a `Participant` of the run called `name` for each client number in `names`; nothing is exchanged yet.

        `vanish` and `lose` map a client to the numbers of the exchanges that do not reach it, or whose answers are lost.
        `identities` maps a client to its signing identity; a client that is not in it has none. `minimum`, `repetitions`,
        `random`, `corrupted` and `security_bits` are passed to every participant.
        """
        known = identities or {}
        self.participants = {one: Participant(one, name, minimum, repetitions, known.get(one), random, corrupted, security_bits)
                             for one in names}
        self.vanish, self.lose = vanish or {}, lose or {}
        self.rows: Mapping[int, Any] = {}
        self.context = b""
        self.exchanges = 0
        self.refused: list[tuple[int, Refused]] = []

    def __call__(self, contents: Contents) -> Contents:
        """Hold one exchange: give each client its message in `contents` and return the answers; both are bytes by client.

        A client in `vanish` does not receive its message, and the answer of one in `lose` is left out. Adds one to `exchanges`,
        and appends each refusal of a client to `refused`.
        """
        now, self.exchanges = self.exchanges, self.exchanges + 1
        heard = {one: self._answer(one, content) for one, content in contents.items() if now not in self.vanish.get(one, ())}
        return {one: answer for one, answer in heard.items() if now not in self.lose.get(one, ())}

    def _answer(self, one: int, content: bytes) -> bytes:
        """The answer of client `one` to `content`; both are bundles, the bytes of one exchange with one or more framed messages.

        For each message that the client refuses, (client, `Refused`) is appended to `self.refused`.
        """
        answer, refused = self.participants[one].answer(content, lambda round, ask, attempt=0: self._row_and_context(one, ask))
        self.refused += [(one, why) for why in refused]
        return answer

    def _row_and_context(self, one: int, ask: Ask) -> tuple[Any, bytes]:
        """The row and the context with which client `one` answers a query: `self.rows[one]` and `self.context`.

        `ask` is not used.
        """
        return self.rows[one], self.context


def secure_sum(rows: Any, threshold: int, modulus_bits: int = 62, vanish: Absent | None = None, lose: Absent | None = None,
               context: bytes = b"", random: Randomness = system, corrupted: float | None = None, dropped: float = 0.1) -> Sum:
    """The sum of integer rows, (clients, width), modulo 2^modulus_bits, by the whole protocol in one process; returns a `Sum`.

    `vanish` maps a client to the exchanges it misses, of KEYS, SHARES, ROW and UNMASK; `lose` maps it to those whose answer is
    lost. The sum is over the clients whose row arrived; `TooFew` is raised where fewer than `threshold` answer at any step. Where
    `corrupted` (a fraction of the clients) is given, each client shares masks with a few random others instead of with all, and
    the number of these is chosen for a fraction `dropped` of clients that drop out. Keys and seeds are drawn from `random`.
    `context` is what was broadcast with the query, to which masks are bound.

    >>> secure_sum([[1, 2], [3, 4], [5, 6]], threshold=2, vanish={1: range(ROW, 9)})
    Sum(total=array([6, 8]), survivors=(0, 2))
    """
    rows = [np.asarray(row) for row in rows]
    names = tuple(range(len(rows)))
    session = (Session(b"secure_sum", 0, names, threshold) if corrupted is None
               else sparse_session(b"secure_sum", 0, names, threshold, corrupted, dropped))
    clients = LocalClients(names, session.name, threshold, vanish, lose, random=random, corrupted=corrupted or 0.0)
    clients.rows, clients.context = dict(enumerate(rows)), context
    rounds = Rounds(clients)
    rounds.open(session)
    return rounds.sum(len(rows[0]), modulus_bits, context)
