"""How far a run is: a bar in a terminal or a notebook, one line at its end elsewhere."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

REFRESH = 0.1             # seconds between two drawings, and before the first: short runs draw nothing


class Bar(Protocol):
    """Where a run's progress is drawn."""

    def draw(self, done: int, rounds: int, text: str) -> None:
        """Show that `done` of `rounds` rounds are done; `text` is what was evaluated last, or empty."""
        ...

    def close(self) -> None:
        """Called once, when the run ends."""
        ...


class ProgressBar:
    """Tells how far a run is, at most ten times a second, so that rounds cost no more for it.

    In a terminal and in a notebook it is a bar, elsewhere one line at the end of the run, all on stderr. Where `shown` is False
    nothing is written.
    """

    def __init__(self, rounds: int, shown: bool = True):
        """A bar for `rounds` rounds; nothing is drawn before the first tenth of a second has passed."""
        self.rounds, self.shown, self._done, self._text = rounds, shown, 0, ""
        self._began = time.monotonic()
        self._next = self._began + REFRESH if shown else float("inf")
        self._bar: Bar | None = None

    def advance(self, done: int, numbers: Mapping[str, Any] | None = None) -> None:
        """Note that `done` rounds are done, and the `numbers` that were evaluated last, where any were."""
        self._done = done
        if numbers:
            self._text = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        now = time.monotonic()
        if now >= self._next:
            self._bar = self._bar or make_bar()
            self._next = now + REFRESH
            if self._bar is not None:
                self._bar.draw(done, self.rounds, self._text)

    def close(self, ended: str = "") -> None:
        """End the bar; where there is none, write the line of the run, with how it `ended` if that was early."""
        if self._bar is not None:
            self._bar.draw(self._done, self.rounds, self._text)
            self._bar.close()
        elif self.shown and self.rounds and not _is_screen():
            seconds = time.monotonic() - self._began
            of = f" of {self.rounds}" if self._done < self.rounds else ""
            text = "".join(f"; {one}" for one in (self._text, ended) if one)
            sys.stderr.write(f"trained {self._done}{of} rounds in {seconds:.1f} s{text}\n")


def make_bar() -> Bar | None:
    """A bar for where this process writes: a notebook's, a terminal's, or None where stderr is neither."""
    if _notebook() is not None:
        return NotebookBar()
    return TerminalBar() if sys.stderr.isatty() else None


class TerminalBar:
    """A bar in a terminal, on stderr, that is erased at its end. It is drawn by this thread alone."""

    def __init__(self) -> None:
        """Start the bar; nothing is drawn yet."""
        self._bars = progress_bars(auto_refresh=False)
        self._task: Any = None
        self._bars.start()

    def draw(self, done: int, rounds: int, text: str) -> None:
        """Show that `done` of `rounds` rounds are done, with `text` beside the bar."""
        if self._task is None:
            self._task = self._bars.add_task("training", total=rounds, speed="", now="")
        self._bars.update(self._task, completed=done, now=text)
        speed = self._bars.tasks[-1].speed
        self._bars.update(self._task, speed=f"{speed:.3g}/s" if speed else "")
        self._bars.refresh()

    def close(self) -> None:
        """Erase the bar."""
        self._bars.stop()


class NotebookBar:
    """A bar in the output of a notebook's cell, by IPython's own display; it stays there at its end."""

    def __init__(self) -> None:
        """Show an empty output, to be filled by `draw`."""
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(""), display_id=True)

    def draw(self, done: int, rounds: int, text: str) -> None:
        """Replace the output by a bar that is `done` of `rounds` full, with `text` beside it."""
        beside = f"&nbsp; {html.escape(text)}" if text else ""
        self._handle.update(self._html(f'<progress value="{done}" max="{rounds}"></progress> {done}/{rounds} rounds{beside}'))

    def close(self) -> None:
        """Leave the bar as it was drawn last."""


def progress_bars(auto_refresh: bool = True) -> Any:
    """A `rich.progress.Progress` on stderr, not started, that is erased at its end; its tasks need fields `speed` and `now`.

    With `auto_refresh` a thread draws it ten times a second; else `refresh` does.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True),
               TextColumn("{task.fields[now]}", markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True, auto_refresh=auto_refresh)


def _is_screen() -> bool:
    """Whether a bar is drawn where this process writes, so that a line would only add to it."""
    return _notebook() is not None or sys.stderr.isatty()


def _notebook() -> Any:
    """The IPython shell of the notebook that this process is the kernel of; None elsewhere. IPython is not imported for it."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None else None
    return found if found is not None and type(found).__name__ == "ZMQInteractiveShell" else None
