"""Rounds on demand: a program waits for `go 5` on its standard input, runs five rounds, and writes how long each took.

This lets `run.py` interleave programs that live in different environments, each keeping its data and compiled code. Short
rounds go in bursts, since the first after a pause finds its caches cold, which no real run does. By hand:

    yes go | python benchmarks/naive.py W2 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from time import perf_counter
from typing import Any

from workloads import WORKLOADS, Workload


class Laps:
    """The clock of a program that runs `rounds` rounds."""

    def __init__(self, rounds: int):
        self.left, self.burst, self._began = rounds, 0, 0.0
        self._seconds: list[float] = []
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)                          # whatever a library prints goes to the log

    def start(self) -> None:
        """Set-up is over: wait for the first round."""
        self._say(ready=True)
        self._wait()

    def lap(self) -> None:
        """A round is over: go on with the burst, or say how it went and wait for the next if there is one."""
        self._seconds.append(perf_counter() - self._began)
        self.left, self.burst = self.left - 1, self.burst - 1
        if self.burst <= 0 or not self.left:
            self._say(seconds=self._seconds)
            self._seconds = []
            if self.left:
                self._wait()
        self._began = perf_counter()

    def done(self, loss: float, **more: Any) -> None:
        """All rounds are over: the loss of the model, and the memory that the program and its children needed at most."""
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        self._say(loss=loss, peak_mib=peak / 1024, **more)

    def _wait(self) -> None:
        words = sys.stdin.readline().split()
        if words[:1] != ["go"]:
            os._exit(1)                        # whoever asked has gone; libraries' threads must not keep us
        self.burst = int(words[1]) if words[1:] else 1
        self._began = perf_counter()

    def _say(self, **values: Any) -> None:
        print(json.dumps(values), file=self._out, flush=True)


def arguments(**more: dict[str, Any]) -> tuple[argparse.Namespace, Workload]:
    """The command line that all programs share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    given = parser.parse_args()
    return given, WORKLOADS[given.workload]
