"""Somebody who watches a run from a terminal: a bar with rounds per second, the current mean and tail, the time left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

LONGEST = 24      # of a name, so that the bar fits beside it in 80 columns


class Watcher:
    """Draws a bar on stderr where that is a terminal; elsewhere only notes are written, a line each."""

    def __init__(self, jobs: int = 1, quiet: bool = False):
        self.jobs, self.job, self.stop = jobs, 1, False
        self._quiet = quiet or not sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        if self._bars is None:
            return
        place = f"{self.job}/{self.jobs} " if self.jobs > 1 else ""
        if self._task is not None:
            self._bars.remove_task(self._task)
        short = name if len(name) <= LONGEST else f"{name[:LONGEST - 1]}…"
        self._task = self._bars.add_task(f"{place}{short}, seed {seed}", total=rounds, completed=round, speed="", now="")

    def round(self, round: int) -> None:
        if self._bars is not None:
            speed = self._bars.tasks[-1].speed
            self._bars.update(self._task, completed=round, speed=f"{speed:.3g}/s" if speed else "")

    def look_on(self, progress: Any) -> bool:
        """For `train(on_round=...)`: advance, and stop where it was asked for."""
        self.round(progress.round)
        return self.stop

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        if self._bars is None:
            return
        error = line["members"][-1].get(tested, {}).get("error", {})
        if error.get("mean") is not None:
            self._bars.update(self._task, now=f"mean {error['mean']:.3g} tail {error['worst10']:.3g}")

    def note(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            typer.echo(text, err=True)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Show the bar, and let Ctrl-C (or a scheduler's TERM) finish the round and save; a second one ends at once."""
        handlers = {kind: signal.signal(kind, self._asked_to_stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self._quiet:
                yield self
                return
            with _bars() as self._bars:
                yield self
        finally:
            self._bars = None
            for kind, handler in handlers.items():
                signal.signal(kind, handler)

    def _asked_to_stop(self, *_: Any) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        os.write(2, b"\nfinishing this round, then saving; once more to stop at once\n")      # safe within a signal


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True),
               TextColumn("{task.fields[now]}", markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
