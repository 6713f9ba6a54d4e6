"""The best models of a run, kept beside the last ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedtail.evaluation.distribution import parse_keep_best
from fedtail.model_file import model_bytes, training_record
from fedtail.runs.files import RunError, write_json, write_whole
from fedtail.runs.measurements import SplitEvaluations
from fedtail.training import Trained


class KeepBest:
    """Keeps, beside the last models, those that were best by one statistic over clients: `error.worst10`, say, or `p90`."""

    def __init__(self, folder: Path, statistic: str, members: list[str]):
        """`statistic` is `metric.name` or a name for the error; what an interrupted run had found is read from `best.json`."""
        self.folder, self.members = folder, members
        self.metric, self.statistic = parse_keep_best(statistic)
        place = folder / "best.json"
        self.found: list[dict[str, Any] | None] = json.loads(place.read_text()) if place.is_file() else [None] * len(members)

    def keep_if_better(self, trained: Trained, found: list[SplitEvaluations], tested: str) -> None:
        """Write the models whose statistic over validation (else `tested`) clients is better than any before.

        `found` has the evaluations by model. Raises RunError where the metric is not evaluated.
        """
        modules = None
        for k, evaluations in enumerate(found):
            split = evaluations["validation" if "validation" in evaluations else tested]
            if self.metric not in split.distributions:
                raise RunError(f"keep_best is about {self.metric}, which is not evaluated. There are "
                               f"{', '.join(split.distributions)}.")
            distribution = split[self.metric]
            value, before = distribution.statistic(self.statistic), self.found[k]
            if math.isfinite(value) and (before is None or _is_better(value, before["value"], distribution.better)):
                modules = modules or trained.modules
                write_whole(self.model_file(k), model_bytes(modules[k], training_record(trained.ledger, trained.rounds)))
                self.found[k] = {"round": trained.rounds, "statistic": f"{self.metric}.{self.statistic}", "value": value}
                write_json(self.folder / "best.json", self.found)

    def model_file(self, member: int) -> Path:
        """The path for the best model of a member (by position), whether it is there or not."""
        return self.folder / ("best.safetensors" if len(self.members) == 1 else f"best-{member}.safetensors")

    def model_files(self) -> list[Path]:
        """The files of best models that were written, in the order of the members."""
        return [place for k in range(len(self.members)) if (place := self.model_file(k)).is_file()]


def _is_better(value: float, before: float, which: str) -> bool:
    """Whether a value is better than the one before, by whether "lower" or "higher" is; equal ones are not."""
    return value < before if which == "lower" else value > before
