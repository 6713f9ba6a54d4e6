"""The front of a node: it reads letters, keeps the secrets of secure sums, and wakes the part that computes when it must.

Nothing in here needs torch: of the exchanges of a secure round only those that ask for a row do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fedtail.deployment.letters import Letter, Reply, digest, read_letter, written
from fedtail.secure.encoding import U64, Blob, Refused, decode, encode
from fedtail.secure.identity import Identity
from fedtail.secure.messages import Ask
from fedtail.secure.participant import Participant

log = logging.getLogger("fedtail.node")
MOST_TOLD = 4          # beginnings and ends of rounds that are kept for the computing part; each beginning holds a model


class Computing(Protocol):
    """What a site wakes: see `Node`."""

    def tell(self, message: bytes) -> None: ...

    def answer(self, ask: bytes) -> bytes: ...

    def row(self, ask: bytes, modulus_bits: int) -> tuple[Any, bytes]: ...

    def save(self) -> bytes: ...

    def recall(self, saved: bytes) -> None: ...


@dataclass(frozen=True)
class SiteState:
    """All that has to survive between two letters."""

    run: Blob = b""
    me: U64 = 0
    told: tuple[Blob, ...] = ()         # what the computing part has not heard yet
    participant: Blob = b""
    node: Blob = b""


class Site:
    """One node of a deployment: `handle(letter) -> reply`, bytes both ways, no transport in here.

    `node` makes the part that holds the data, when it is first needed. A row is masked among `minimum` nodes or more; with
    `masked_only` nothing is answered in the clear. Between letters everything can be saved and given to a new process; keep
    one copy, where only this node reads it. What goes wrong here is told by its kind only, and logged here in full.
    """

    def __init__(self, node: Callable[[], Computing], minimum: int = 2, masked_only: bool = False,
                 identity: Identity | None = None, repetitions: int = 1):
        self._make, self._identity = node, identity
        self._node: Computing | None = None
        self.minimum, self.masked_only, self.repetitions = minimum, masked_only, repetitions
        self._run, self._me = b"", 0
        self._told: list[bytes] = []
        self._participant: Participant | None = None
        self._saved_node = b""

    def save(self) -> bytes:
        """Everything to go on with, secrets included: for a place that only this node reads."""
        participant = self._participant.save() if self._participant else b""
        return encode(SiteState(self._run, self._me, tuple(self._told), participant,
                                self._node.save() if self._node is not None else self._saved_node))

    def recall(self, saved: bytes) -> Site:
        """Go on from what was saved."""
        state = decode(SiteState, saved)
        self._run, self._me, self._told, self._saved_node = state.run, state.me, list(state.told), state.node
        self._participant = Participant.restore(state.participant, self._identity) if state.participant else None
        self._node = None
        return self

    def handle(self, content: bytes) -> bytes:
        about = digest(content)
        try:
            letter = read_letter(content)
            self._begin(letter)
            self._told = [*self._told, *letter.told][-MOST_TOLD:]
            if letter.secure:
                return written(self._masked(about, letter))
            return written(Reply(about, self._in_the_clear(letter)))
        except Exception as why:
            return written(Reply(about, problem=in_words(why).encode()))

    def _begin(self, letter: Letter) -> None:
        if letter.run != self._run:
            self._run, self._me, self._told = letter.run, letter.to, []      # what clients keep is of a training, not of a run
            self._participant = None
        if letter.to != self._me:
            raise Refused(f"a letter is for node {letter.to}, and this is node {self._me}.")

    def _in_the_clear(self, letter: Letter) -> bytes:
        if not letter.ask:
            if letter.told:                                  # how the last round of a training ended
                self._awake()
            return b""
        if self.masked_only:
            raise Refused("this node answers under masks only.")
        return self._awake().answer(letter.ask)

    def _masked(self, about: bytes, letter: Letter) -> Reply:
        if self._participant is None:
            self._participant = Participant(self._me, self._run, self.minimum, self.repetitions, self._identity)
        answer, refused = self._participant.answer(letter.secure, lambda _, ask: self._row(letter, ask))
        return Reply(about, b"", answer, "; ".join(map(str, refused)).encode())

    def _row(self, letter: Letter, ask: Ask) -> tuple[Any, bytes]:
        if not letter.ask:
            raise Refused("a row is asked for without a question.")
        try:
            return self._awake().row(letter.ask, ask.modulus_bits)
        except Refused:
            raise
        except Exception as why:
            raise Refused(in_words(why)) from why

    def _awake(self) -> Computing:
        if self._node is None:
            node = self._make()
            node.recall(self._saved_node)
            self._node = node
        while self._told:
            self._node.tell(self._told.pop(0))
        return self._node


def in_words(why: Exception) -> str:
    """What may be told of an error: a refusal is about the letter; anything else could hold data, and only its kind is told."""
    if isinstance(why, Refused):
        return str(why)
    log.error("a letter could not be answered", exc_info=why)
    return f"{type(why).__name__} on the node; its own log says more."
