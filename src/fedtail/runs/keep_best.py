"""The best models of a run, kept beside the last ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedtail.directions import better_statistic_values, is_better
from fedtail.evaluation.distribution import parse_keep_best
from fedtail.model_file import model_bytes, training_record
from fedtail.runs.files import RunError, write_atomically, write_json
from fedtail.runs.measurements import SplitEvaluations
from fedtail.training import Trained


class KeepBest:
    """Saves, beside the last models of a run, those that were best by one statistic over clients, such as `error.worst10`."""

    def __init__(self, folder: Path, statistic: str, members: list[str]):
        """Keep the best models by `statistic`, which is "metric.statistic", or a statistic of the error, such as "p90".

        `members` are the names of the models. What an interrupted run found best so far is read from `best.json` in `folder`.
        Raises FieldError for an unknown statistic.
        """
        self.folder, self.members = folder, members
        self.metric, self.statistic = parse_keep_best(statistic)
        place = folder / "best.json"
        self.found: list[dict[str, Any] | None] = json.loads(place.read_text()) if place.is_file() else [None] * len(members)

    def keep_better_models(self, trained: Trained, found: list[SplitEvaluations], tested: str) -> None:
        """Write the file of each model whose statistic is finite and better than at any earlier evaluation, and `best.json`.

        `found` has the evaluations by split for each model of `trained`. The statistic is over the split "validation", or
        `tested` without one. Raises RunError where the metric is not evaluated.
        """
        modules = None
        for k, evaluations in enumerate(found):
            split = evaluations["validation" if "validation" in evaluations else tested]
            if self.metric not in split.distributions:
                raise RunError(f"keep_best is about {self.metric}, which is not evaluated. There are "
                               f"{', '.join(split.distributions)}.")
            distribution = split[self.metric]
            value, before = distribution.statistic(self.statistic), self.found[k]
            better = better_statistic_values(self.statistic, distribution.better)
            if math.isfinite(value) and (before is None or is_better(value, before["value"], better)):
                modules = modules or trained.modules
                record = training_record(trained.ledger, trained.rounds)
                write_atomically(self.best_model_file(k), model_bytes(modules[k], record))
                self.found[k] = {"round": trained.rounds, "statistic": f"{self.metric}.{self.statistic}", "value": value}
                write_json(self.folder / "best.json", self.found)

    def best_model_file(self, member: int) -> Path:
        """The path of the best model of the member at position `member`; the file may not exist yet."""
        return self.folder / ("best.safetensors" if len(self.members) == 1 else f"best-{member}.safetensors")

    def best_model_files(self) -> list[Path]:
        """The paths of the best models that exist, in the order of the members."""
        return [place for k in range(len(self.members)) if (place := self.best_model_file(k)).is_file()]
