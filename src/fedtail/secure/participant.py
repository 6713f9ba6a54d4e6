"""A client of secure aggregation over many rounds: it answers the messages of an exchange, whichever session they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedtail.secure.all_or_nothing import AllOrNothingClient, AllOrNothingState
from fedtail.secure.encoding import U16, U32, U64, Blob, Refused, decode, decode_first, encode
from fedtail.secure.frames import bundled, invitation, peek, unbundled
from fedtail.secure.identity import Identity, checked_identity
from fedtail.secure.messages import Ask, Confirm, KeyList, Run, RunKeyList, Session, Unmask
from fedtail.secure.primitives import Randomness, system
from fedtail.secure.sparse_graph import CORRUPTED, SECURITY_BITS
from fedtail.secure.sparse_messages import Neighbours, SparseAsk, SparseSession, SparseUnmask
from fedtail.secure.sum_client import Client, ClientState, SparseState

RowFor = Callable[[int, Ask], tuple[Any, bytes]]      # (round, ask) -> (the row, the context)
LIVE = 3                                              # unfinished sessions: this round's, one that was lost, and the next one's


@dataclass(frozen=True)
class ParticipantState:
    """The state of a participant."""

    me: U64
    name: Blob
    minimum: U32
    repetitions: U16
    next_round: U64                                   # the first round in which it has not sent a row
    clients: tuple[ClientState, ...]
    all_or_nothing: tuple[AllOrNothingState, ...]


@dataclass(frozen=True)
class SparseStates:
    """The clients of a participant in sessions with few neighbours, as they are saved; behind its state, where there are any."""

    clients: tuple[Blob, ...]


class Participant:
    """One client of the run `name`. It agrees to thresholds of `minimum` or more, and never twice to one round.

    In sessions with few neighbours it requires that its row stays secret but for a probability of 2^-security_bits where a share
    of `corrupted` clients is on the server's side. With an `identity` it joins signed sessions and runs only, and gives no
    retries: a server that calls a row missing which came would learn the row, by the difference of two sums.
    """

    def __init__(self, me: int, name: bytes, minimum: int = 2, repetitions: int = 0, identity: Identity | None = None,
                 random: Randomness = system, corrupted: float = CORRUPTED, security_bits: int = SECURITY_BITS):
        self.me, self.name, self.minimum, self.repetitions = me, name, minimum, repetitions
        self.corrupted, self.security_bits = corrupted, security_bits
        self._identity, self._random, self._next_round = identity, random, 0
        self._clients: dict[bytes, Client] = {}
        self._all_or_nothing: dict[bytes, AllOrNothingClient] = {}

    @classmethod
    def restore(cls, saved: bytes, identity: Identity | None = None, random: Randomness = system, corrupted: float = CORRUPTED,
                security_bits: int = SECURITY_BITS) -> Participant:
        """A participant that was saved. Restoring an older state would forget what was answered: keep only one copy.

        Sessions that it may not be in with this identity, or without one, are left.
        """
        state, rest = decode_first(ParticipantState, saved)
        one = cls(state.me, state.name, state.minimum, state.repetitions, identity, random, corrupted, security_bits)
        one._next_round = state.next_round
        kept = [encode(client) for client in state.clients if may_join(client.session, identity)]
        sparse = decode(SparseStates, rest).clients if rest and identity is None else ()      # they are never signed
        restored = [Client.restore(client, identity, random) for client in (*kept, *sparse)]
        one._clients = {client.state.session.id: client for client in restored}
        one._all_or_nothing = {client.run.id: AllOrNothingClient.restore(encode(client), identity)
                               for client in state.all_or_nothing if may_join(client.run, identity)}
        return one

    def save(self) -> bytes:
        """The whole state, secrets included: for a place that only this client reads."""
        clients = self._clients.values()
        sparse = tuple(one.save() for one in clients if isinstance(one.state, SparseState))
        state = ParticipantState(self.me, self.name, self.minimum, self.repetitions, self._next_round,
                                 tuple(one.state for one in clients if not isinstance(one.state, SparseState)),
                                 tuple(one.state for one in self._all_or_nothing.values()))
        return encode(state) + (encode(SparseStates(sparse)) if sparse else b"")

    def answer(self, content: bytes, row_for: RowFor) -> tuple[bytes, list[Refused]]:
        """The answer to one exchange, and what was refused; a refused message does not keep the others from an answer."""
        answers, refused = [], []
        for message in unbundled(content):
            try:
                answers.append(self._step(message, row_for))
            except Refused as why:
                refused.append(why)
        return bundled([one for one in answers if one]), refused

    def _step(self, message: bytes, row_for: RowFor) -> bytes:
        """The answer to one message, empty where none is due; what is not for this participant is refused."""
        kind, session = peek(message)
        if kind in (Session, SparseSession):
            return self._invited(invitation(kind, message))
        if kind is Run:
            return self._invited_to_run(invitation(Run, message))
        if session in self._all_or_nothing:
            return self._step_all_or_nothing(self._all_or_nothing[session], kind, message, row_for)
        if session not in self._clients:
            raise Refused("a message belongs to a session that this client is not in, or no longer.")
        return self._step_dropout_tolerant(self._clients[session], kind, message, row_for)

    def _step_dropout_tolerant(self, client: Client, kind: type, message: bytes, row_for: RowFor) -> bytes:
        """The answer to a message of a session: to a query the masked row, whose round is then over for other sessions."""
        session = client.state.session
        if kind in (Ask, SparseAsk):
            answer = client.masked(message, *row_for(session.round, client.checked_query(message)))
            self._next_round = max(self._next_round, session.round + 1)
            return answer
        steps: dict[type, Callable[[bytes], bytes]] = {KeyList: client.shares, Neighbours: client.shares, Confirm: client.confirm,
                                                       Unmask: client.unmask, SparseUnmask: client.unmask}
        if kind not in steps:
            raise Refused(f"{kind.__name__} is no message of a server.")
        return steps[kind](message)

    def _step_all_or_nothing(self, client: AllOrNothingClient, kind: type, message: bytes, row_for: RowFor) -> bytes:
        """The answer to a message of a run: to a query the masked row, to the list of keys nothing."""
        if kind is RunKeyList:
            client.hear(message)
            return b""
        asked = client.asked(message)
        return client.masked(message, *row_for(asked.round, asked.ask))

    def _invited(self, session: Session) -> bytes:
        """Join a session and give the keys for it. One of the same round is forgotten, and the oldest beyond LIVE."""
        if session.name != self.name or session.id in self._clients or session.round < self._next_round:
            raise Refused(f"an invitation to round {session.round} is for another run, came already, or is for a round in which "
                          "this client has sent a row.")
        client = Client(session, self.me, self.minimum, self._identity, self._random, self.corrupted, self.security_bits)
        kept = {key: one for key, one in self._clients.items() if one.state.session.round != session.round and not one.done}
        self._clients = dict([*kept.items(), (session.id, client)][-LIVE:])
        return client.keys()

    def _invited_to_run(self, run: Run) -> bytes:
        """Join an all-or-nothing run, one at most, and give the key for it; the same key where the list of keys never came."""
        known = self._all_or_nothing.get(run.id)
        if known is not None and not known.state.key_list.entries:      # it was never completed: these keys again
            return known.keys()
        if run.name != self.name or self._all_or_nothing:
            raise Refused("an invitation is to another run, or came already.")
        repetitions = self.repetitions if self._identity is None else 0
        client = AllOrNothingClient(run, self.me, self.minimum, repetitions, self._identity, self._random)
        self._all_or_nothing[run.id] = client
        return client.keys()


def may_join(session: Session | Run, identity: Identity | None) -> bool:
    """Whether a client with this identity, or without one, may be in a session or run, by `checked_identity`."""
    try:
        checked_identity(session, identity)
    except Refused:
        return False
    return True
