"""What a node answers, written down before the answer leaves, so that a server restored from a backup learns what it forgot.

    asked.jsonl     in the node's folder: a line for every question answered: its training, its round, and the run that asked

A run is one start of a server. The server's ledger holds every question too, before it is sent; where nodes were asked more
than it holds, the difference is charged before the next round (see `fedtail.deployment.forgotten_rounds`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedtail.deployment.node_messages import NodeMessage

FILE = "asked.jsonl"
MOST = 1_000_000        # rounds of one training that a node lists: more are refused by a server
Asked = tuple[int, bytes, int]      # a round, the run that asked, and how many questions it asked in it


def note_asked(folder: Path, message: NodeMessage) -> None:
    """Append a line about the question in the server's `message` to the file in the node's `folder`; on disk at return.

    A question that is refused is not noted: the file would grow with every message of a server that sends what it likes.
    """
    line = json.dumps({"training": message.training.hex(), "round": message.round, "run": message.run.hex()}).encode() + b"\n"
    with os.fdopen(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_asked(folder: Path, training: bytes) -> tuple[Asked, ...]:
    """What was asked in `training`, by round and run, in the order of the first question of each; () where there is no file."""
    found = Counter[tuple[int, bytes]]()
    for line in _lines(folder / FILE):
        if line.get("training") == training.hex():
            found[int(line["round"]), bytes.fromhex(str(line["run"]))] += 1
    return tuple((round, run, count) for (round, run), count in found.items())


def _lines(path: Path) -> Iterator[dict[str, str | int]]:
    """The lines of the file at `path`; one that a crash has cut, or that is damaged, was not answered and is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and {"training", "round", "run"} <= found.keys():
                    yield found
