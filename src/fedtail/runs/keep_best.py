"""The best models of a run, kept beside the last ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedtail.evaluation.distribution import parse_keep_best
from fedtail.model_file import how_made, model_bytes
from fedtail.runs.files import RunError, write_json, write_whole
from fedtail.runs.measurements import SplitEvaluations
from fedtail.training import Trained


class KeepBest:
    """Keeps, beside the last models, those that were best by one statistic over clients: `error.worst10`, say, or `p90`."""

    def __init__(self, folder: Path, statistic: str, members: list[str]):
        self.folder, self.members = folder, members
        self.metric, self.statistic = parse_keep_best(statistic)
        place = folder / "best.json"
        self.found: list[dict[str, Any] | None] = json.loads(place.read_text()) if place.is_file() else [None] * len(members)

    def judge(self, trained: Trained, found: list[SplitEvaluations], tested: str) -> None:
        """Keep the models that are better than what was found before."""
        modules = None
        for k, evaluations in enumerate(found):
            split = evaluations["validation" if "validation" in evaluations else tested]
            if self.metric not in split.distributions:
                raise RunError(f"keep_best is about {self.metric}, which is not evaluated. There are "
                               f"{', '.join(split.distributions)}.")
            distribution = split[self.metric]
            value, before = distribution.statistic(self.statistic), self.found[k]
            if math.isfinite(value) and (before is None or _better(value, before["value"], distribution.better)):
                modules = modules or trained.modules
                write_whole(self.place(k), model_bytes(modules[k], how_made(trained.ledger, trained.rounds)))
                self.found[k] = {"round": trained.rounds, "statistic": f"{self.metric}.{self.statistic}", "value": value}
                write_json(self.folder / "best.json", self.found)

    def place(self, member: int) -> Path:
        """The file of the best model."""
        return self.folder / ("best.safetensors" if len(self.members) == 1 else f"best-{member}.safetensors")

    def files(self) -> list[Path]:
        """What it has written."""
        return [place for k in range(len(self.members)) if (place := self.place(k)).is_file()]


def _better(value: float, before: float, which: str) -> bool:
    return value < before if which == "lower" else value > before
