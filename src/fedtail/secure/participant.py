"""A client of secure aggregation over many rounds: it answers the messages of an exchange, whichever session they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedtail.secure.all_or_nothing import AllOrNothingClient, AllOrNothingState
from fedtail.secure.encoding import U16, U32, U64, Blob, Refused, decode, decode_first, encode
from fedtail.secure.frames import decode_bundle, decode_invitation, encode_bundle, frame_class_and_session
from fedtail.secure.identity import Identity, checked_identity
from fedtail.secure.messages import Ask, Confirm, KeyList, Run, RunKeyList, Session, Unmask
from fedtail.secure.primitives import Randomness, system
from fedtail.secure.sparse_graph import CORRUPTED, SECURITY_BITS
from fedtail.secure.sparse_messages import Neighbours, SparseAsk, SparseSession, SparseUnmask
from fedtail.secure.sum_client import Client, ClientState, SparseState

RowFor = Callable[..., tuple[Any, bytes]]      # (round, ask), of a retry also its number -> (the row, the context)
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
        """Client number `me` of the run called `name`, in no session yet; draws keys from `random` when it joins one.

        It refuses sessions with a threshold below `minimum`, and sparse ones in which its row may be disclosed with a
        probability above 2^-security_bits if a fraction `corrupted` of the clients colludes. With an `identity` it joins signed
        sessions and runs only. `repetitions` is how many retries of an all-or-nothing query it answers, whose rows must then
        carry fresh noise.
        """
        self.me, self.name, self.minimum, self.repetitions = me, name, minimum, repetitions
        self.corrupted, self.security_bits = corrupted, security_bits
        self._identity, self._random, self._next_round = identity, random, 0
        self.fewest_members = 0                         # over which the sum that `row_for` is called for may be
        self._clients: dict[bytes, Client] = {}
        self._all_or_nothing: dict[bytes, AllOrNothingClient] = {}

    @classmethod
    def restore(cls, saved: bytes, identity: Identity | None = None, random: Randomness = system, corrupted: float = CORRUPTED,
                security_bits: int = SECURITY_BITS) -> Participant:
        """The participant whose state `save` wrote as `saved`; raises `Refused` where that does not decode.

        `identity`, `random`, `corrupted` and `security_bits` are not saved and are given anew. Sessions and runs that it may
        not be in with this identity (or without one) are dropped. Keep one copy only: an older one would answer again what was
        answered already.
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
        """The state as bytes, for `restore`, with secrets but without the identity: store it where only this client reads."""
        clients = self._clients.values()
        sparse = tuple(one.save() for one in clients if isinstance(one.state, SparseState))
        state = ParticipantState(self.me, self.name, self.minimum, self.repetitions, self._next_round,
                                 tuple(one.state for one in clients if not isinstance(one.state, SparseState)),
                                 tuple(one.state for one in self._all_or_nothing.values()))
        return encode(state) + (encode(SparseStates(sparse)) if sparse else b"")

    def answer(self, content: bytes, row_for: RowFor) -> tuple[bytes, list[Refused]]:
        """(answer, refused): the answers to the messages in `content`, as one bundle, and a `Refused` for each it did not answer.

        `content` is the bundle of one exchange. `row_for(round, ask)`, with the number of the attempt as a third argument for a
        retry, returns the row (a vector of integers) and the context (bytes) for a query; it is called only for queries that
        may be answered. A message that needs no answer adds nothing to either. Raises `Refused` only where `content` is no
        bundle.
        """
        answers, refused = [], []
        for message in decode_bundle(content):
            try:
                answers.append(self._answer_message(message, row_for))
            except Refused as why:
                refused.append(why)
        return encode_bundle([one for one in answers if one]), refused

    def _answer_message(self, message: bytes, row_for: RowFor) -> bytes:
        """The answer to one framed message, b"" where none is due; an invitation makes this participant join the session or run.

        `row_for` gives the row and the context for a query. Raises `Refused` for a message of a session or run that this
        participant is not in, and where the step itself refuses.
        """
        kind, session = frame_class_and_session(message)
        if kind in (Session, SparseSession):
            return self._join_session(decode_invitation(kind, message))
        if kind is Run:
            return self._join_run(decode_invitation(Run, message))
        if session in self._all_or_nothing:
            return self._answer_in_run(self._all_or_nothing[session], kind, message, row_for)
        if session not in self._clients:
            raise Refused("a message belongs to a session that this client is not in, or no longer.")
        return self._answer_in_session(self._clients[session], kind, message, row_for)

    def _answer_in_session(self, client: Client, kind: type, message: bytes, row_for: RowFor) -> bytes:
        """The answer of `client`, in its session, to a message of class `kind`: keys, a query, or lists to sign or unmask.

        `row_for` gives the row and the context for a query; once one is answered, invitations to its round or an earlier one
        are refused (`_next_round`). Raises `Refused` for a class that no server sends, and where the client refuses.
        """
        session = client.state.session
        if kind in (Ask, SparseAsk):
            self.fewest_members = session.threshold
            answer = client.masked_row(message, *row_for(session.round, client.checked_query(message)))
            self._next_round = max(self._next_round, session.round + 1)
            return answer
        steps: dict[type, Callable[[bytes], bytes]] = {KeyList: client.shares, Neighbours: client.shares, Confirm: client.confirm,
                                                       Unmask: client.unmask, SparseUnmask: client.unmask}
        if kind not in steps:
            raise Refused(f"{kind.__name__} is no message of a server.")
        return steps[kind](message)

    def _answer_in_run(self, client: AllOrNothingClient, kind: type, message: bytes, row_for: RowFor) -> bytes:
        """The answer of `client`, in an all-or-nothing run: the masked row to a query, b"" to the list of keys, which is stored.

        `kind` is the class of `message`. `row_for` gives the row and the context; for a retry it is also passed the number of
        the attempt. Raises `Refused` where the client refuses.
        """
        if kind is RunKeyList:
            client.store_key_list(message)
            return b""
        asked = client.checked_query(message)
        self.fewest_members = len(asked.ask.members)
        attempt = (asked.attempt,) if asked.attempt else ()
        return client.masked_row(message, *row_for(asked.round, asked.ask, *attempt))

    def _join_session(self, session: Session) -> bytes:
        """Join `session` and return the message with this client's public keys for it; new secrets are drawn.

        An older session of the same round is dropped, and so are finished ones and the oldest beyond `LIVE`. Raises `Refused`
        for another run, for a session it is in, for a round in which it sent a row already, and where `Client` refuses the
        session.
        """
        if session.name != self.name or session.id in self._clients or session.round < self._next_round:
            raise Refused(f"an invitation to round {session.round} is for another run, came already, or is for a round in which "
                          "this client has sent a row.")
        client = Client(session, self.me, self.minimum, self._identity, self._random, self.corrupted, self.security_bits)
        kept = {key: one for key, one in self._clients.items() if one.state.session.round != session.round and not one.is_done}
        self._clients = dict([*kept.items(), (session.id, client)][-LIVE:])
        return client.keys()

    def _join_run(self, run: Run) -> bytes:
        """Join an all-or-nothing run, one at most, and return the message with this client's public key for it.

        Invited again before the list of keys arrived, it returns the same key. Raises `Refused` for a run of another name, for
        a second one, and where `AllOrNothingClient` refuses it. With an identity it will answer no retries.
        """
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
    """Whether a client with `identity`, None being without one, may take part in a session or run.

    With an identity it must be signed and, with up to `identity.colluding` dishonest members, still safe; without one,
    unsigned.
    """
    try:
        checked_identity(session, identity)
    except Refused:
        return False
    return True
