"""The front of a node: it reads messages, holds the secrets of secure aggregation, and loads the part that computes when it must.

Nothing in here needs torch: of the exchanges of a secure round only those that ask for a row do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fedtail.deployment.node_messages import NodeMessage, Reply, digest, message_bytes, read_message, silence
from fedtail.secure.encoding import U64, Blob, Refused, decode, encode
from fedtail.secure.identity import Identity
from fedtail.secure.messages import Ask
from fedtail.secure.participant import Participant
from fedtail.secure.sparse_graph import CORRUPTED

log = logging.getLogger("fedtail.node")
MOST_BROADCASTS = 4    # beginnings and ends of rounds that wait for the computing part; each beginning holds a model


class Computing(Protocol):
    """The part of a node that computes: see `Node`."""

    def tell(self, message: bytes) -> None:
        """Receive the packed beginning or end of a round."""
        ...

    def answer(self, ask: bytes) -> bytes:
        """The packed answer to a packed question, in the clear; Refused where it may not be answered."""
        ...

    def row(self, ask: bytes, modulus_bits: int) -> tuple[Any, bytes]:
        """The answer to a packed question as a row of integers modulo 2 ** modulus_bits, and the context digest of its mask."""
        ...

    def silent(self, ask: bytes) -> int:
        """How many of its clients sent zeros in that row although they were to contribute to the sum."""
        ...

    def save(self) -> bytes:
        """The state as bytes, for another process."""
        ...

    def recall(self, saved: bytes) -> None:
        """Take over a saved state; b"" is a fresh start."""
        ...


@dataclass(frozen=True)
class SiteState:
    """The state of a node between two messages."""

    run: Blob = b""
    me: U64 = 0
    broadcasts: tuple[Blob, ...] = ()   # what the computing part has not received yet
    participant: Blob = b""
    node: Blob = b""


class Site:
    """One node of a deployment: `handle(message) -> reply`, bytes both ways, whatever the transport.

    `node` makes the part that holds the data, when it is first needed. A row is summed over `minimum` nodes or more. Nothing is
    answered in the clear, unless `masked_only` is off. Between messages the state can be saved and given to a new process; keep
    only one copy, where only this node reads it. Where nodes share masks with few others, rows must stay secret with a share of
    `corrupted` nodes on the server's side. An error is reported to the server by its type only, and logged here in full.
    With an `identity` it answers signed sums only. Clients with weight take longer than those without: with `answer_after` every
    reply leaves so many seconds after its message came, or a multiple of them where it takes longer, so that the time does not
    tell the weight.
    """

    def __init__(self, node: Callable[[], Computing], minimum: int = 2, masked_only: bool = True,
                 identity: Identity | None = None, repetitions: int = 1, corrupted: float = CORRUPTED, answer_after: float = 0.0):
        if not 0 <= answer_after < math.inf:
            raise ValueError(f"answer_after must be 0 or more seconds, got {answer_after:g}. 0 answers at once.")
        self._make, self._identity = node, identity
        self._node: Computing | None = None
        self.minimum, self.masked_only, self.repetitions, self.corrupted = minimum, masked_only, repetitions, corrupted
        self.answer_after = answer_after
        self._run, self._me = b"", 0
        self._broadcasts: list[bytes] = []
        self._participant: Participant | None = None
        self._saved_node = b""
        self._silent = 0                                     # of its clients in the row it is about to send

    def save(self) -> bytes:
        """The whole state as bytes, secrets included: for a place that only this node reads."""
        participant = self._participant.save() if self._participant else b""
        return encode(SiteState(self._run, self._me, tuple(self._broadcasts), participant,
                                self._node.save() if self._node is not None else self._saved_node))

    def recall(self, saved: bytes) -> Site:
        """Take over a saved state in place of the present one, and give this site.

        The computing part is loaded again when needed.
        """
        state = decode(SiteState, saved)
        self._run, self._me, self._broadcasts, self._saved_node = state.run, state.me, list(state.broadcasts), state.node
        self._participant = (Participant.restore(state.participant, self._identity, corrupted=self.corrupted)
                             if state.participant else None)
        self._node = None
        return self

    def handle(self, content: bytes, began: float | None = None, keep: Callable[[bytes], None] | None = None) -> bytes:
        """The reply to a message of the server; an error becomes a reply too.

        `began` is when the message came, by `time.monotonic()`; now, where it is left out. `keep` takes the state afterwards, for
        another process, within the time after which the reply is given.
        """
        began = time.monotonic() if began is None else began
        reply = self._reply(content)
        if keep is not None:
            keep(self.save())
        if self.answer_after:
            wait_for_multiple(began, self.answer_after)
        return reply

    def _reply(self, content: bytes) -> bytes:
        """The reply, as soon as it is computed."""
        about = digest(content)
        try:
            message = read_message(content)
            self._begin(message)
            self._broadcasts = [*self._broadcasts, *message.broadcasts][-MOST_BROADCASTS:]
            if message.secure:
                return message_bytes(self._answer_masked(about, message))
            return message_bytes(Reply(about, self._answer_in_the_clear(message)))
        except Exception as why:
            return message_bytes(Reply(about, problem=error_text(why).encode()))

    def _begin(self, message: NodeMessage) -> None:
        """Begin afresh where the message is of another run; Refused where it is for another node."""
        if message.run != self._run:
            self._run, self._me, self._broadcasts = message.run, message.to, []      # what clients keep is of a training
            self._participant = None
        if message.to != self._me:
            raise Refused(f"a message is for node {message.to}, and this is node {self._me}.")

    def _answer_in_the_clear(self, message: NodeMessage) -> bytes:
        """The packed answer to the message's question, b"" without one; Refused where this node answers under masks only."""
        if not message.ask:
            if message.broadcasts:                           # how the last round of a training ended
                self._loaded_node()
            return b""
        if self.masked_only:
            raise Refused("this node answers under masks only (masked_only).")
        return self._loaded_node().answer(message.ask)

    def _answer_masked(self, about: bytes, message: NodeMessage) -> Reply:
        """The reply to the message's part of a secure sum; what was refused in it is reported as its problem."""
        if self._participant is None:
            self._participant = Participant(self._me, self._run, self.minimum, self.repetitions, self._identity,
                                            corrupted=self.corrupted)
        self._silent = 0
        answer, refused = self._participant.answer(message.secure, lambda _, ask: self._row(message, ask))
        return Reply(about, silence(self._silent), answer, "; ".join(map(str, refused)).encode())

    def _row(self, message: NodeMessage, ask: Ask) -> tuple[Any, bytes]:
        """The integer row and context digest for a masked question; any error becomes Refused, in words without data."""
        if not message.ask:
            raise Refused("a row is asked for without a question.")
        try:
            row = self._loaded_node().row(message.ask, ask.modulus_bits)
            self._silent = self._loaded_node().silent(message.ask)
            return row
        except Refused:
            raise
        except Exception as why:
            raise Refused(error_text(why)) from why

    def _loaded_node(self) -> Computing:
        """The computing part, made and recalled at the first call, after it has received the broadcasts that waited for it."""
        if self._node is None:
            node = self._make()
            node.recall(self._saved_node)
            self._node = node
        while self._broadcasts:
            self._node.tell(self._broadcasts.pop(0))
        return self._node


def wait_for_multiple(began: float, seconds: float) -> None:
    """Sleep until the next positive multiple of `seconds` after `began`; where it is not the first, that is logged."""
    taken = time.monotonic() - began
    multiple = max(1, math.ceil(taken / seconds))
    if multiple > 1:
        log.warning("an answer took %.3g s, longer than answer_after = %g s, and leaves after %g s, which tells in part how long "
                    "it took. Raise answer_after.", taken, seconds, multiple * seconds)
    time.sleep(max(0.0, began + multiple * seconds - time.monotonic()))


def error_text(why: Exception) -> str:
    """What the server may be told of an error: the text of a refusal, which is about its message; of others only the type.

    Any other error could hold data; it is logged here in full.
    """
    if isinstance(why, Refused):
        return str(why)
    log.error("a message could not be answered", exc_info=why)
    return f"{type(why).__name__} on the node; its own log says more."
