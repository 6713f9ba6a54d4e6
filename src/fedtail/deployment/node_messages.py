"""The message that one exchange sends to a node, its reply, and the report of what became of it. Nothing in here needs torch.

A message holds what was broadcast (packed `Open` and `Close`), a question (a packed `Ask`), and messages of secure aggregation.
The reply names by a digest the message it answers, so that a late answer is not taken for one to another message. Both begin with
the header of their wire version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedtail.deployment.wire_version import with_version, without_version
from fedtail.deprecated import with_old_names
from fedtail.secure.encoding import U64, Blob, Key, Refused, decode, encode

NAME_BYTES = 64                         # of a run, and of a training


@dataclass(frozen=True)
class NodeMessage:
    """A message from the server to one node."""

    run: Blob                           # another name is another run: the node begins afresh
    to: U64                             # which node it is in this run
    number: U64                         # messages are numbered: no two are equal
    broadcasts: tuple[Blob, ...] = ()   # beginnings and ends of rounds that the node has not received yet
    ask: Blob = b""
    secure: Blob = b""                  # where it is not empty, the answer is sent under masks only
    training: Blob = b""                # which training the question is of, the same when the server is started again
    round: U64 = 0                      # and of which of its rounds


@dataclass(frozen=True)
class Reply:
    """A node's reply to one message."""

    about: Key                          # digest of the message
    answer: Blob = b""                  # sums in the clear, packed; b"" with a masked row
    secure: Blob = b""
    problem: Blob = b""                 # what went wrong or was refused, in words without data


def read_reply(message: bytes, reply: bytes) -> Reply:
    """The `Reply` to `message`, decoded from the bytes `reply`.

    Raises Refused where it is malformed, of another wire version, or names the digest of another message.
    """
    read = decode(Reply, without_version(reply, "node"))
    if read.about != message_digest(message):
        raise Refused("an answer to another message came, too late.")
    return read


def message_digest(message: bytes) -> bytes:
    """The SHA-256 digest (32 bytes) by which a reply names the message it answers."""
    return hashlib.sha256(message).digest()


def encode_message(value: NodeMessage | Reply) -> bytes:
    """Encode `value`, a message or a reply, as bytes, which `read_message` or `read_reply` decodes."""
    return with_version(encode(value))


def read_message(content: bytes) -> NodeMessage:
    """Decode the bytes `content` of a server's message to a `NodeMessage`.

    Raises Refused where they are malformed or of another wire version, or name the run or the training by more than 64 bytes:
    nodes write these names to their disks.
    """
    message = decode(NodeMessage, without_version(content, "server"))
    for what, name in (("run", message.run), ("training", message.training)):
        if len(name) > NAME_BYTES:
            raise Refused(f"a {what} is named by {len(name)} bytes, and {NAME_BYTES} are the most.")
    return message


@with_old_names
@dataclass(frozen=True)
class AnswerReport:
    """How many clients answered one question, and why nodes did not. It is a report only: privacy accounting does not use it."""

    round: int
    question: int                       # which question of the round, from 0
    sampled: int                        # clients of the cohort
    answered: int                       # clients of the nodes whose answer was used; 0 where nothing was released
    problems: Mapping[int, str]         # by node: what it reported, or why its answer was not used
    exchanges: int = 1                  # with the nodes, keys and unmasking included
    nodes: int = 0                      # whose answers were used
    asked_nodes: int = 0                # with clients in the cohort

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict of plain values for answers.jsonl, in which `sampled` is called "asked" and nodes are texts."""
        return {"round": self.round, "question": self.question, "asked": self.sampled, "answered": self.answered,
                "exchanges": self.exchanges, "problems": {str(node): why for node, why in self.problems.items()}}
