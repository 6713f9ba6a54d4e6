"""The state of a node between two messages, which Flower holds: sealed for this node's own processes, and the newest one only.

A process ends with each message, and the SuperNode hands the state to the next one over a port of 127.0.0.1. In it are secrets
of secure sums and results of single clients. So Flower is given a box, encrypted and authenticated by ChaCha20-Poly1305 under a
key that is made anew whenever the node starts, in the node's folder, for its owner only. Which box is the last one is written
there too: from an older state the node would answer again what it has answered.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from fedtail.deployment.keys import write_secret
from fedtail.deployment.node_process import is_running
from fedtail.secure.encoding import Refused
from fedtail.secure.primitives import KEY, derive_key, digest, seal, system, unseal

HOME, FOLDER = "flower", "state"     # Flower's files in the node's folder, and in them ours
KEY_FILE, LAST = "key", ".last"      # RUN.last: the digest of the last box of a run
MANY = 64                            # runs whose last box is known
LABEL = "fedtail: the state of a node between two messages"
STARTS = "This node goes on as after a restart, without the secrets of the round under way."


def make_state_key(home: Path) -> None:
    """Make a new key in the folder `home` of Flower's files of a node; what was sealed under an older key does not open again."""
    place = home / FOLDER
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    write_secret(place / KEY_FILE, system(KEY))


class SealedState:
    """Seals and opens the state of the node `name` in the run `run`; the key is in `home`, where `make_state_key` made it."""

    def __init__(self, home: Path, name: str, run: int):
        """Read the key. Raises ValueError where there is none, or the node does not run by `fedtail node run`."""
        self._folder = home / FOLDER
        if not is_running(home.parent) or not (self._folder / KEY_FILE).is_file():
            raise ValueError("a node over Flower answers only where `fedtail node run node.toml` started it, which keeps its "
                             "state and its tasks from other accounts of its machine. Do not start flower-supernode by hand.")
        self._secret = (self._folder / KEY_FILE).read_bytes()
        self._about = digest(LABEL, name.encode(), str(run).encode())
        self._last = self._folder / f"{run}{LAST}"

    def seal(self, state: bytes) -> bytes:
        """The box that Flower is given, and the only one of the run that opens from now on."""
        salt = system(KEY)                                 # a key of its own for each box
        box = salt + seal(self._box_key(salt), 0, state, self._about)
        self._write_last(hashlib.sha256(box).digest())
        return box

    def open(self, box: bytes) -> bytes:
        """The state in `box`, which is what Flower gave; b"" where it gave b"", nothing, and nothing was sealed in this run yet.

        Raises Refused where it is not the last box of this run and node.
        """
        last = self._last.read_bytes() if self._last.is_file() else b""
        if not box and not last:
            return b""
        if hashlib.sha256(box).digest() != last:
            raise Refused("the state that Flower gave back is not the last one that this node sealed: it is an older one, was "
                          f"replaced, or was lost with the process that had it. {STARTS}")
        try:
            return unseal(self._box_key(box[:KEY]), 0, box[KEY:], self._about)
        except Refused:
            raise Refused("the state that Flower gave back does not open: it was sealed for another node, run or start of the "
                          f"node. {STARTS}") from None

    def _box_key(self, salt: bytes) -> bytes:
        """The key of the box with this salt, by HKDF from the node's."""
        return derive_key(self._secret, salt, LABEL.encode())

    def _write_last(self, found: bytes) -> None:
        """Write which box is the last one of the run. It need not survive a power cut, with which the boxes are lost."""
        if not self._last.exists():
            others = sorted(self._folder.glob(f"*{LAST}"), key=lambda path: path.stat().st_mtime_ns)
            for path in others[: max(0, len(others) + 1 - MANY)]:
                path.unlink(missing_ok=True)
        beside = self._last.with_name(f".{self._last.name}.{os.getpid()}")
        beside.write_bytes(found)
        beside.replace(self._last)
