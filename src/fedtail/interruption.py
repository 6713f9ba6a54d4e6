"""Ctrl-C while a run trains: the first ends it after its round, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interruption:
    """Whether a Ctrl-C has asked a run to end; `requested` is read after every round."""

    def __init__(self) -> None:
        """Begin with nothing requested."""
        self.requested = False

    def request(self, *_: Any) -> None:
        """Handle a SIGINT: the first sets `requested` and writes a line to stderr, a second raises KeyboardInterrupt."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, b"\nfinishing this round; once more to stop at once\n")      # safe within a signal


@contextmanager
def watch_for_interrupt() -> Iterator[Interruption]:
    """A context in which a first Ctrl-C (SIGINT) only requests an end, where it would raise KeyboardInterrupt.

    Nothing changes in other threads than the main one, which get no signals, and where the program has a handler of its own.
    Python's handler is restored at the end.
    """
    found = Interruption()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield found
        return
    signal.signal(signal.SIGINT, found.request)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
