"""Availability as it was recorded: when each client was there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.client_tables import client_labels, find_clients, read_client_table
from fedtail.sampling.availability import Availability


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Availability):
    """Client `client[i]` is there from round `start[i]` up to, and without, round `end[i]`; it may have several such intervals.

    Clients are named as the data call them (text), or by `population.key` (whole numbers), which also a server knows whose
    clients are at nodes; whoever is not named is never there. Rounds are counted from 0. With a `period` the trace repeats itself
    every so many rounds; without, everybody is away after its end. For hours on a clock and rounds of ten minutes, write
    start=6 * hours.
    """

    client: Any                         # (intervals,) text or int64
    start: Any                          # (intervals,) rounds, float64
    end: Any                            # (intervals,)
    period: int | None = None           # rounds

    def __post_init__(self) -> None:
        """Turn lists into arrays; raises a ValueError unless there are intervals, each with a client and start < end.

        Raises a TypeError for clients that are neither text nor whole numbers, a ValueError for a period below 1.
        """
        labels = client_labels(self.client, "client of a Trace")
        start, end = np.asarray(self.start, dtype=np.float64), np.asarray(self.end, dtype=np.float64)
        if not labels.shape == start.shape == end.shape:
            raise ValueError(f"a Trace has {len(labels)} clients, starts of shape {start.shape} and ends of shape {end.shape}. "
                             "Give one of each for every interval.")
        if not (np.isfinite(start) & np.isfinite(end) & (start < end)).all():
            raise ValueError("every interval of a Trace must end after it starts, at finite rounds. Leave out empty ones.")
        if self.period is not None and self.period < 1:
            raise ValueError(f"period of a Trace must be at least 1 round, got {self.period}.")
        for name, values in (("client", labels), ("start", start), ("end", end)):
            object.__setattr__(self, name, values)

    def __repr__(self) -> str:
        """The numbers of clients and intervals, such as "Trace(2 clients, 5 intervals)"."""
        return f"Trace({len(self._clients[0])} clients, {len(self.client)} intervals)"

    @cached_property
    def _clients(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct clients in ascending order, and which of them each interval is of, (intervals,) int64."""
        ranked, which = np.unique(self.client, return_inverse=True)
        return ranked, which

    @property
    def cycle(self) -> int:
        """The period or, without one, the round in which the last interval ends."""
        return self.period or max(1, math.ceil(self.end.max()))

    def available(self, population: Any, round: int) -> Tensor:
        """Which clients of the population are there in a round, (clients,) bool: those in one of whose intervals it is.

        Raises a ValueError where the trace is by names and the clients have none.
        """
        ranked, which = self._clients
        now = round if self.period is None else round % self.period
        there = np.zeros(len(ranked) + 1, dtype=bool)                    # the last place is of clients that are not named
        there[which[(self.start <= now) & (now < self.end)]] = True
        return torch.from_numpy(there[find_clients(ranked, population.key, population.names)])

    def check(self, population: Any) -> None:
        """Raise a ValueError where the trace is by names and the clients have none."""
        find_clients(self._clients[0], population.key, population.names)


@dataclass(frozen=True)
class TraceFile(Availability):
    """A trace from a file, for experiment files; `read_trace` says what it holds. It is read when the part is made."""

    file: Path
    period: int | None = None           # rounds after which it repeats itself

    def __post_init__(self) -> None:
        """Read the file; raises what `read_trace` raises."""
        _ = self.trace

    @cached_property
    def trace(self) -> Trace:
        """The trace that the file held when the part was made."""
        return read_trace(self.file, self.period)

    @property
    def cycle(self) -> int:
        """The period or, without one, the round in which the last interval ends."""
        return self.trace.cycle

    def available(self, population: Any, round: int) -> Tensor:
        """Which clients of the population are there in a round, (clients,) bool, by the trace of the file."""
        return self.trace.available(population, round)

    def check(self, population: Any) -> None:
        """Raise a ValueError where the trace is by names and the clients have none."""
        self.trace.check(population)


def read_trace(file: str | Path, period: int | None = None) -> Trace:
    """The trace in a CSV file with a header, an `.npz` or a parquet file, one row for each interval.

    Its columns `start` and `end` are rounds, counted from 0; its column `client` has the names of the clients, or its column
    `key` their keys. With a `period` it repeats itself every so many rounds. Raises Unreadable for a damaged file, FieldError for
    a missing column, ValueError for an interval that does not end after it starts.
    """
    clients, columns = read_client_table(file, ["start", "end"])
    return Trace(clients, columns["start"], columns["end"], period)
