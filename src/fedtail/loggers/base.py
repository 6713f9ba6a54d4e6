"""What every logger does: a description that is opened for a run, and a log that takes its numbers round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of a run when it begins or goes on."""

    name: str
    members: tuple[str, ...]                                        # names of its models
    settings: Mapping[str, Any] = field(default_factory=dict)       # by name; tables may hold tables
    folder: Path | None = None                                      # of a run on disk
    first_round: int = 0                                            # from which on numbers will be written
    id: str | None = None                                           # of the log that an earlier part of the run has written

    def flat_settings(self) -> dict[str, Any]:
        """The settings without nested tables: {"risk.tail_fraction": 0.5}."""
        return dict(_leaves(self.settings))


class RunLog(Protocol):
    """The open log of one run."""

    @property
    def id(self) -> str | None:
        """By which a later part of the run finds this log again; None where it does not need to."""
        ...

    def write(self, round: int, model: int, numbers: Mapping[str, float], values: Mapping[str, Tensor]) -> None:
        """Write `numbers`, by tag, of the model at position `model` after `round` rounds.

        `values` has one number for each client, by tag, for logs that can show a histogram.
        """
        ...

    def close(self) -> None:
        """End the log; nothing is written afterwards."""
        ...


class Logger(Protocol):
    """A place where runs are logged, for `train(logger=...)` and `[log]` in an experiment file.

    Where it has a method `check_client` too, without arguments, that is called before anything of a run on disk is written; it
    raises ImportError where a package is missing.
    """

    def open_log(self, run: LoggedRun) -> RunLog:
        """Begin or continue the log of a run. Raises ImportError, with what to install, where its client is missing."""
        ...


def scalar_tag(name: str) -> str:
    """The tag of a number that a history calls "validation.error.mean": "error/validation/mean", as runs on disk are logged.

    >>> scalar_tag("validation.error.worst10"), scalar_tag("contributors")
    ('error/validation/worst10', 'round/contributors')
    """
    who, dot, rest = name.partition(".")
    metric, _, statistic = rest.rpartition(".")
    return f"{metric}/{who}/{statistic}" if dot and metric else f"round/{name}"


def finite_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are finite; a log has no place for others."""
    return {tag: float(value) for tag, value in numbers.items() if math.isfinite(value)}


def member_tags(run: LoggedRun, model: int, numbers: Mapping[str, float]) -> dict[str, float]:
    """The finite numbers by tags that begin with the name of the model, where the run has several."""
    before = f"{run.members[model]}/" if len(run.members) > 1 else ""
    return {before + tag: value for tag, value in finite_numbers(numbers).items()}


def missing_client(package: str, extra: str) -> ImportError:
    """The error for a logger whose client is not installed."""
    return ImportError(f"this logger needs {package}. Install it with pip install 'fedtail[{extra}]', or leave the logger out.")


def _leaves(table: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Pairs of a dotted name and a value for every value of nested tables that is no table."""
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        found += _leaves(value, f"{before}{name}.") if isinstance(value, Mapping) else [(before + name, value)]
    return found
