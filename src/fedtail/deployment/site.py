"""The front of a node: it reads messages, holds the secrets of secure aggregation, and loads the part that computes when it must.

Nothing in here needs torch: of the exchanges of a secure round only those that ask for a row do.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fedtail.deployment.audit_log import AuditLog
from fedtail.deployment.node_messages import NodeMessage, Reply, encode_message, message_digest, read_message
from fedtail.deprecated import with_old_names
from fedtail.escaping import escaped_lines
from fedtail.secure.encoding import U64, Blob, Refused, decode, encode
from fedtail.secure.identity import Identity
from fedtail.secure.messages import Ask
from fedtail.secure.participant import Participant
from fedtail.secure.sparse_graph import CORRUPTED

log = logging.getLogger("fedtail.node")
MOST_REFUSALS, MINUTE = 100, 60.0      # lines about refusals in so many seconds
MOST_BROADCASTS = 4    # beginnings and ends of rounds that wait for the computing part; each beginning holds a model


class Computing(Protocol):
    """The part of a node that holds data and a model and computes answers; `fedtail.deployment.Node` is the implementation."""

    def receive_broadcast(self, message: bytes, number: int | None = None) -> None:
        """Receive `message`, the serialised broadcast that begins a round (`Open`) or ends one (`Close`).

        `number` is that of this node in the run. Raises Refused for any other message.
        """
        ...

    def answer(self, ask: bytes) -> bytes:
        """The serialised answer to a serialised question, without masks: sums over this node's clients, or gathered rows.

        Raises Refused where the question is malformed or is not about the round that is open.
        """
        ...

    def integer_row(self, ask: bytes, modulus_bits: int, attempt: int = 0,
                    summed: tuple[Iterable[int], int] | None = None) -> tuple[Any, bytes]:
        """The pair (row, context digest): the answer to a serialised question as one vector of integers modulo 2 ** modulus_bits.

        Its last entry is the number of clients that sent only zeros. The mask that hides the row is bound to the context digest,
        a hash of what the node received with the question. `summed` has the nodes whose rows are asked for and the fewest of them
        that the sum may be over. Raises Refused where the question may not be answered under masks, or is of another `attempt`
        (0 for a first one, 1 for a retry).
        """
        ...

    def save(self) -> bytes:
        """The state of this part as bytes, which `restore` takes in another process."""
        ...

    def keep_memory(self) -> None:
        """Write what clients remember to this node's own folder, if there is one; nothing where they remember nothing."""
        ...

    def restore(self, saved: bytes) -> None:
        """Replace the state of this part by `saved`, which `save` returned; b"" begins without any state."""
        ...


@dataclass(frozen=True)
class SiteState:
    """The saved state of a `Site` between two messages."""

    run: Blob = b""
    me: U64 = 0
    broadcasts: tuple[Blob, ...] = ()   # what the computing part has not received yet
    participant: Blob = b""
    node: Blob = b""


@with_old_names
class Site:
    """One node of a deployment, as a transport sees it: `handle(message) -> reply`, bytes both ways.

    `node` makes the part that holds the data, when it is first needed. A row is revealed only in a sum over `minimum` nodes or
    more, and nothing is answered without masks unless `masked_only` is off. Where each node shares masks with few others, rows
    must stay secret even if a share of `corrupted` nodes is on the server's side. With an `identity` only signed sums are
    answered. Of an error that is not a refusal, the server is sent only the type; it is logged here in full.

    Clients with weight take longer to answer than those without. With `answer_after` every reply is therefore sent that many
    seconds after its message came, or a multiple of it, so that the time does not reveal who has weight. Between messages the
    state can be saved and restored in another process; store one copy only, where only this node reads it.
    """

    def __init__(self, node: Callable[[], Computing], minimum: int = 2, masked_only: bool = True,
                 identity: Identity | None = None, repetitions: int = 1, corrupted: float = CORRUPTED, answer_after: float = 0.0,
                 log: AuditLog | None = None, note: Callable[[NodeMessage], None] | None = None):
        """Store the settings; nothing is loaded or computed yet.

        `node` returns the part that computes; it is called when the data are first needed, and again after `restore`. A row is
        revealed only in a sum over `minimum` nodes or more. `repetitions` is how often the server may repeat an all-or-nothing
        sum over fewer nodes, `corrupted` the share of nodes that may be on the server's side. What is refused is written to
        `log`, and `note` is called with every message whose question is answered, before the answer leaves, if they are given.
        Raises ValueError unless 0 <= `answer_after` < infinity, and for an `identity` where `masked_only` is off.
        """
        if not 0 <= answer_after < math.inf:
            raise ValueError(f"answer_after must be 0 or more seconds, got {answer_after:g}. 0 answers at once.")
        if identity is not None and not masked_only:
            raise ValueError("a node with an identity answers signed sums only; with masked_only=False it would answer in the "
                             "clear. Leave one of the two out.")
        self._make, self._identity = node, identity
        self._node: Computing | None = None
        self.minimum, self.masked_only, self.repetitions, self.corrupted = minimum, masked_only, repetitions, corrupted
        self.answer_after, self._log, self._note = answer_after, log, note
        self._refusals = Refusals()
        self._run, self._me = b"", 0
        self._broadcasts: list[bytes] = []
        self._participant: Participant | None = None
        self._saved_node = b""

    def save(self) -> bytes:
        """The whole state of this node as bytes, for `restore`. It holds secrets: store it where only this node reads."""
        participant = self._participant.save() if self._participant else b""
        return encode(SiteState(self._run, self._me, tuple(self._broadcasts), participant,
                                self._node.save() if self._node is not None else self._saved_node))

    def restore(self, saved: bytes) -> Site:
        """Replace this node's state by one that `save` returned, and return this same object.

        The part that computes is dropped; it is made again, and given its own saved state, when a message next needs it. Raises
        Refused where the bytes are malformed.
        """
        state = decode(SiteState, saved)
        self._run, self._me, self._broadcasts, self._saved_node = state.run, state.me, list(state.broadcasts), state.node
        self._participant = (Participant.restore(state.participant, self._identity, corrupted=self.corrupted)
                             if state.participant else None)
        self._node = None
        return self

    def keep_memory(self) -> None:
        """Have the computing part write what clients remember, for a node that stays in memory and may be killed."""
        if self._node is not None:
            self._node.keep_memory()

    def handle(self, content: bytes, began: float | None = None, keep: Callable[[bytes], None] | None = None) -> bytes:
        """The reply, as bytes, to the server's message `content`. A bad message does not raise: the reply then holds a `problem`.

        `began` is the time by `time.monotonic()` at which the message came; None: now. If `keep` is given, it is called with the
        saved state after the reply is computed. Then this sleeps until a multiple of `answer_after` seconds after `began`, unless
        that is 0.
        """
        began = time.monotonic() if began is None else began
        reply = self._reply_or_problem(content)
        if keep is not None:
            keep(self.save())
        if self.answer_after:
            sleep_to_next_multiple(began, self.answer_after)
        return reply

    def _reply_or_problem(self, content: bytes) -> bytes:
        """The reply to the message `content`, without the wait of `answer_after`; what it refuses is written to the log first."""
        reply = self._reply(content)
        if self._log is None or not reply.problem:
            return encode_message(reply)
        try:
            self._refusals.write(self._log, reply.problem.decode())
        except Exception as why:
            log.error("the audit log could not be written: %s", escaped_lines("".join(traceback.format_exception(why))))
        return encode_message(reply)

    def _reply(self, content: bytes) -> Reply:
        """The reply to the message `content`; an exception becomes a reply with its text.

        Changes the state: a new run begins afresh, and the message's broadcasts join those that wait for the part that computes.
        Only the newest MOST_BROADCASTS of them are kept. The text of an exception is its `error_text`.
        """
        about = message_digest(content)
        try:
            message = read_message(content)
            self._begin_run(message)
            self._broadcasts = [*self._broadcasts, *message.broadcasts][-MOST_BROADCASTS:]
            if message.secure:
                return self._masked_reply(about, message)
            return Reply(about, self._unmasked_answer(message))
        except Exception as why:
            return Reply(about, problem=error_text(why).encode())

    def _begin_run(self, message: NodeMessage) -> None:
        """If the message belongs to another run than the last one, forget that run and take this node's number from the message.

        Waiting broadcasts and the secrets of secure sums are dropped with the old run. Raises Refused where the message is for a
        node of another number.
        """
        if message.run != self._run:
            self._run, self._me, self._broadcasts = message.run, message.to, []      # what clients keep is of a training
            self._participant = None
        if message.to != self._me:
            raise Refused(f"a message is for node {message.to}, and this is node {self._me}.")

    def _unmasked_answer(self, message: NodeMessage) -> bytes:
        """The serialised answer to the message's question, without masks; b"" where it asks none.

        Broadcasts that the part that computes has not received yet are given to it first. Raises Refused for a question where
        `masked_only` is on.
        """
        if not message.ask:
            if message.broadcasts:                           # how the last round of a training ended
                self._loaded_node()
            return b""
        if self.masked_only:
            raise Refused("this node answers under masks only (masked_only).")
        sums = self._loaded_node().answer(message.ask)
        self._note_answer(message)
        return sums

    def _note_answer(self, message: NodeMessage) -> None:
        """Note, where that is asked for, that the question of `message` is answered; the answer leaves after that."""
        if self._note is not None:
            self._note(message)

    def _masked_reply(self, about: bytes, message: NodeMessage) -> Reply:
        """The reply to the message's part of a secure sum: key exchange, masked row or unmasking, whichever the server asks for.

        `about` is the digest of the message. Texts of what was refused are joined into the reply's `problem`; the rest is still
        answered.
        """
        if self._participant is None:
            self._participant = Participant(self._me, self._run, self.minimum, self.repetitions, self._identity,
                                            corrupted=self.corrupted)
        answer, refused = self._participant.answer(
            message.secure, lambda _, ask, attempt=0: self._integer_row(message, ask, attempt))
        return Reply(about, b"", answer, "; ".join(map(str, refused)).encode())

    def _integer_row(self, message: NodeMessage, ask: Ask, attempt: int) -> tuple[Any, bytes]:
        """The pair (row of integers, context digest) for the question in `message`, to be masked before it is sent.

        `ask` is the message of the secure sum, which says the modulus and the nodes, and `attempt` is 1 for a retry, else 0.
        Raises Refused where the message holds no question. Any other error becomes Refused as well, with a text that holds no
        data.
        """
        if not message.ask:
            raise Refused("a row is asked for without a question.")
        try:
            assert self._participant is not None
            summed = (ask.members, self._participant.fewest_members)
            row = self._loaded_node().integer_row(message.ask, ask.modulus_bits, attempt, summed)
            self._note_answer(message)
            return row
        except Refused:
            raise
        except Exception as why:
            raise Refused(error_text(why)) from why

    def _loaded_node(self) -> Computing:
        """The part that computes, after it received all waiting broadcasts; the first call makes it and restores its state."""
        if self._node is None:
            node = self._make()
            node.restore(self._saved_node)
            self._node = node
        while self._broadcasts:
            self._node.receive_broadcast(self._broadcasts.pop(0), self._me)
        return self._node


class Refusals:
    """Writes what is refused to an audit log: at most `MOST_REFUSALS` lines a minute, so that who sends much fills no disk."""

    def __init__(self) -> None:
        """Nothing is written yet."""
        self._began, self._written, self._passed_over = -math.inf, 0, 0

    def write(self, log: AuditLog, why: str) -> None:
        """Write that a message was refused, and `why`; beyond the most of a minute it is counted, and the next line says so."""
        now = time.monotonic()
        if now - self._began >= MINUTE:
            self._began, self._written = now, 0
        if self._written >= MOST_REFUSALS:
            self._passed_over += 1
            return
        log.write_once("refused", why=why, **({"not_written_before": self._passed_over} if self._passed_over else {}))
        self._written, self._passed_over = self._written + 1, 0


def sleep_to_next_multiple(began: float, seconds: float) -> None:
    """Sleep until 1, 2, 3, ... times `seconds` after `began` (by `time.monotonic()`), whichever of these times comes next.

    Logs a warning where it is not the first, because the multiple reveals roughly how long the answer took.
    """
    taken = time.monotonic() - began
    multiple = max(1, math.ceil(taken / seconds))
    if multiple > 1:
        log.warning("an answer took %.3g s, longer than answer_after = %g s, and leaves after %g s, which tells in part how long "
                    "it took. Raise answer_after.", taken, seconds, multiple * seconds)
    time.sleep(max(0.0, began + multiple * seconds - time.monotonic()))


def error_text(why: Exception) -> str:
    """The text about the error `why` that may be sent to the server: all of a Refused, of any other exception only its type.

    A Refused is about the server's own message; any other error could hold data, so it is logged here in full instead.
    """
    if isinstance(why, Refused):
        return str(why)
    log.error("a message could not be answered: %s", escaped_lines("".join(traceback.format_exception(why))))
    return f"{type(why).__name__} on the node; its own log says more."
