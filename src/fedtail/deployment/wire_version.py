"""The version of what servers and nodes send each other, and which versions this one reads: decided here, nowhere else.

Every message, every reply, every request for node info and every node info begins with a header of four bytes: b"FT" and the
number of the wire version. What was sent before there was a header is version 1. A message of a version that this one does not
read is refused with a sentence that says who must upgrade, before anything behind the header is decoded.

The number is raised with every change after which a message is read otherwise, or means something else: a field of `NodeMessage`,
`Reply`, `NodeInfo`, `Open`, `Ask`, `Close` or of a message of secure sums that is added, removed or reordered; another encoding,
digest or signature; a question that is computed otherwise under the same name. New parts (a risk, an aggregator) do not raise it:
a node that does not have one refuses it by name.
"""

from __future__ import annotations

from typing import Literal

from fedtail.secure.encoding import Refused
from fedtail.version import __version__

WIRE_VERSION = 2                # 1: up to fedtail 0.2; 2: headers, the round of a message, what node info says of the node
READABLE = frozenset({2})       # versions whose messages this one reads, and which read those of this one
MAGIC = b"FT"
HEADER = 4                      # bytes
BEFORE_HEADERS = 1
Side = Literal["node", "server"]


def with_version(content: bytes) -> bytes:
    """`content` behind the header of this wire version."""
    return MAGIC + WIRE_VERSION.to_bytes(2, "big") + content


def without_version(content: bytes, sender: Side) -> bytes:
    """`content` without its header; raises Refused, with who must upgrade, where `sender` wrote it in another wire version."""
    theirs = wire_version_of(content)
    if theirs not in READABLE:
        raise Refused(other_version_text(theirs, sender))
    return content[HEADER:]


def wire_version_of(content: bytes) -> int:
    """The wire version in which bytes were written, by their header; 1 where they have none, as everything before version 2."""
    return int.from_bytes(content[2:HEADER], "big") if content[:2] == MAGIC and len(content) >= HEADER else BEFORE_HEADERS


def other_version_text(theirs: int, sender: Side) -> str:
    """A sentence about a message of wire version `theirs` that `sender` wrote: which versions, and who must upgrade."""
    here: Side = "server" if sender == "node" else "node"
    older = sender if theirs < WIRE_VERSION else here
    return (f"the {sender} speaks wire version {theirs}, and this {here} (fedtail {__version__}) version {WIRE_VERSION}: install "
            f"{'at least this' if older == sender else 'a newer'} fedtail on the {older}.")
