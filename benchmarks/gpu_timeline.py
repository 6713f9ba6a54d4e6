"""Where the seconds of a run on a GPU go while it runs: hundreds of rounds, recordings, evaluations, and other machines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fedtail
from fedtail.engine.gpu.cuda_graphs import Replayed

EVERY = 100


class Timeline:
    """Watches one run, from `with` to the end of the block."""

    def __init__(self) -> None:
        self.hundreds: list[float] = []
        self.recordings, self.recording, self.evaluating = 0, 0.0, 0.0
        self.stolen = 0.0

    def __enter__(self) -> Timeline:
        self._plain = Replayed._record_shape
        timeline, plain = self, self._plain

        def recorded(self: Replayed, *given: Any) -> Any:
            began = time.perf_counter()
            step = plain(self, *given)
            timeline.recordings += 1
            timeline.recording += time.perf_counter() - began
            return step

        Replayed._record_shape = recorded      # type: ignore[method-assign]
        self._began, self._taken = time.perf_counter(), taken_by_others()
        return self

    def __exit__(self, *_: object) -> None:
        Replayed._record_shape = self._plain      # type: ignore[method-assign]
        self.stolen = taken_by_others() - self._taken

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.evaluating += time.perf_counter() - began

    def watch(self, progress: fedtail.Progress) -> None:
        if progress.round % EVERY == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.hundreds.append(now - self._began)
            self._began = now

    def row(self) -> dict[str, Any]:
        return {"hundreds": self.hundreds, "recordings": self.recordings, "recording": self.recording,
                "evaluating": self.evaluating, "stolen": self.stolen, "load": os.getloadavg()[0]}


def taken_by_others() -> float:
    """Core seconds that the host gave to other machines while this one wanted them."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")
