"""What one exchange carries to a node and back. Nothing in here needs torch.

A letter holds what the node is told (packed `Open` and `Close`), a question (a packed `Ask`), and messages of the secure sum. The
reply says by a digest which letter it answers, so that an answer that comes late is not taken for one to another letter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fedtail.secure.encoding import U64, Blob, Key, Refused, decode, encode


@dataclass(frozen=True)
class Letter:
    """From the server to one node."""

    run: Blob                           # another name is another run: the node begins afresh
    to: U64                             # which node it is in this run
    number: U64                         # letters are counted: no two are the same
    told: tuple[Blob, ...] = ()
    ask: Blob = b""
    secure: Blob = b""                  # where it is not empty, the answer crosses under masks only


@dataclass(frozen=True)
class Reply:
    """From the node."""

    about: Key                          # digest of the letter
    answer: Blob = b""                  # sums in the clear, packed
    secure: Blob = b""
    problem: Blob = b""                 # what went wrong or was refused, in words without data


def replied(letter: bytes, reply: bytes) -> Reply:
    """The reply to a letter; refused where it is none, or answers another."""
    read = decode(Reply, reply)
    if read.about != digest(letter):
        raise Refused("an answer to another letter came, too late.")
    return read


def digest(letter: bytes) -> bytes:
    return hashlib.sha256(letter).digest()


def written(value: Letter | Reply) -> bytes:
    return encode(value)


def read_letter(content: bytes) -> Letter:
    return decode(Letter, content)
