"""How commands end: texts on stderr and exit codes that scripts can use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
REFUSALS = (ValueError, TypeError, FileNotFoundError, FileExistsError, PermissionError, ImportError, ConnectionError)
P = ParamSpec("P")


def told(command: Callable[P, Any]) -> Callable[P, None]:
    """A command whose errors are sentences: 2 where it was refused before any work, 1 where a run failed."""
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:                             # which is a RuntimeError
            raise
        except REFUSALS as reason:
            leave(str(reason), REFUSED)
        except (RuntimeError, OSError) as reason:      # RunError, and what torch says when memory or a device fails
            leave(str(reason), FAILED)
        except KeyboardInterrupt:
            leave("interrupted; what was saved at the last checkpoint is kept.", INTERRUPTED)
    return run


def leave(text: str, code: int) -> None:
    typer.echo(f"Error: {text}" if code != INTERRUPTED else text, err=True)
    raise typer.Exit(code)
