"""What a server and a node say on their terminals while they run: read from the files that they write, so that both say the same.

A run's `log.txt` and a node's `audit.jsonl` hold everything; what is said is a line a second at most about rounds, and all else.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtail.escaping import one_line

Say = Callable[[str], None]
POLL = 0.5                # seconds between two looks at a file
OFTEN = 1.0               # seconds between two lines about rounds
SLOW = 5.0                # an exchange that took so many seconds is told: rounds do not tell enough then
ROUND = re.compile(r"\S+ round (\d+) of (\d+): ")
TRACEBACK = " Traceback (most recent call last):"
EXCHANGE = re.compile(r"\S+ exchange \d+: .* ([\d.]+) s$")


def say_on_terminal(text: str) -> None:
    """Write a line to stderr at once, escaped; nothing where nobody reads it any more."""
    with suppress(OSError, ValueError):
        print(one_line(text), file=sys.stderr, flush=True)


def say_now(text: str) -> None:
    """Write a line to stderr after the local time, as the log of a run has it."""
    say_on_terminal(f"{datetime.now().isoformat(timespec='seconds')} {text}")


class SeldomSaid:
    """Lets a text pass where the last one passed a second or more ago; a text that is the last must be let pass by its caller."""

    def __init__(self, seconds: float = OFTEN, clock: Callable[[], float] = time.monotonic):
        """`seconds` is the least time between two texts, by `clock`."""
        self._seconds, self._clock, self._last = seconds, clock, -float("inf")

    def may(self, always: bool = False) -> bool:
        """Whether a text may be said now; True with `always`, which counts too."""
        now = self._clock()
        if not always and now - self._last < self._seconds:
            return False
        self._last = now
        return True


class RunNews:
    """What is said of the lines of a run's log: a round each second, the last round, exchanges that are slow, and all else."""

    def __init__(self, seldom: SeldomSaid | None = None):
        """`seldom` says how often rounds are told."""
        self._rounds = seldom or SeldomSaid()

    def lines(self, line: str) -> Iterator[str]:
        """Yields the text of a line of the log where it is to be said; of a traceback only its end, the error itself."""
        found = ROUND.match(line)
        if found and not self._rounds.may(always=found[1] == found[2]):
            return
        slow = EXCHANGE.match(line)
        if (slow and float(slow[1]) < SLOW) or line.startswith("   "):
            return
        yield f"{line.split(' ', 1)[0]} ended by an error:" if line.endswith(TRACEBACK) else line


class NodeNews:
    """What is said of the lines of a node's audit log: when the server asked who it is, each round in one line, and refusals."""

    def __init__(self, seldom: SeldomSaid | None = None):
        """`seldom` says how often rounds and refusals are told."""
        self._rounds, self._answers, self._untold = seldom or SeldomSaid(), 0, 0

    def lines(self, line: str) -> Iterator[str]:
        """Yields texts about a line of the log; a line that is none of a log is passed over."""
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield from (f"{_local_time(entry)} {text}" for text in self._texts(entry))

    def _texts(self, entry: dict[str, Any]) -> Iterator[str]:
        """Yields what is said of one entry."""
        what = entry.get("what")
        if what == "info sent":
            yield "the server asked who this node is, and was told"
        elif what == "opened":
            self._answers = 0
        elif what == "answered":
            self._answers += 1
        elif what == "closed":
            lost = "" if entry.get("finished") else ", and the round was lost"
            if self._rounds.may(always=bool(lost)):
                yield f"round {int(entry['round']) + 1} is over: {self._answers} questions answered{lost}"
        elif what == "refused":
            self._untold += 1
            if self._rounds.may():
                more = f" (and {self._untold - 1} before it)" if self._untold > 1 else ""
                yield f"refused: {entry.get('why')}{more}"
                self._untold = 0


class Follower:
    """Reads what is appended to files, and says what `news` makes of it; a file that is cut is read from its beginning."""

    def __init__(self, files: Callable[[], Iterable[Path]], news: Callable[[], RunNews | NodeNews], say: Say = say_on_terminal):
        """`files` names the files at each look; what they hold now is passed over, and of new ones everything is read.

        `news` makes what each file is told by.
        """
        self._files, self._news, self._say = files, news, say
        self._read = {path: (_size(path), news()) for path in files()}

    def look(self) -> None:
        """Say what was appended since the last look: whole lines only."""
        for path in self._files():
            begun, news = self._read.get(path) or (0, self._news())
            begun = begun if begun <= _size(path) else 0
            with suppress(OSError), path.open("rb") as file:
                file.seek(begun)
                content = file.read()
                whole = content[: content.rfind(b"\n") + 1]
                self._read[path] = begun + len(whole), news
                for line in whole.decode(errors="replace").split("\n")[:-1]:
                    for text in news.lines(line):
                        self._say(text)


@contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Within the block, a thread looks twice a second; at the end of it, once more."""
    over = threading.Event()

    def look() -> None:
        """Look until it is over."""
        while not over.wait(POLL):
            follower.look()

    thread = threading.Thread(target=look, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
        follower.look()


def run_follower(*folders: Path, say: Say = say_on_terminal) -> Follower:
    """A follower of the logs of runs in these folders, and in folders directly in them."""
    def files() -> list[Path]:
        """The logs that are there now."""
        return [path for folder in folders for path in (folder / "log.txt", *folder.glob("*/log.txt")) if path.is_file()]

    return Follower(files, RunNews, say)


def node_follower(audit: Path, say: Say = say_on_terminal) -> Follower:
    """A follower of a node's audit log."""
    return Follower(lambda: [audit], NodeNews, say)


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _local_time(entry: dict[str, Any]) -> str:
    """The time of an entry of an audit log, in this machine's time zone; the text of it where it is no time."""
    try:
        return datetime.fromisoformat(str(entry.get("time"))).astimezone().replace(tzinfo=None).isoformat(timespec="seconds")
    except ValueError:
        return str(entry.get("time", "?"))
