"""The best models of a run, kept beside the last ones, and the end of a run that finds no better ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtail.directions import wrong_percentile_text
from fedtail.evaluation.best_by import BestBy
from fedtail.model_file import model_bytes, training_record
from fedtail.runs.files import RunError, write_atomically, write_json
from fedtail.runs.measurements import SplitEvaluations
from fedtail.trained import Trained

FOUND, EVALUATED = "best.json", "keep_best.json"


class KeepBest:
    """Saves, beside the last models of a run, those that were best by one statistic over clients, such as `error.worst10`.

    With a patience it also says when the run is over: after so many evaluations in a row without a better value of any model.
    """

    def __init__(self, folder: Path, statistic: str, members: list[str], patience: int | None = None, round: int | None = None):
        """Keep the best models by `statistic`, which is "metric.statistic", or a statistic of the error, such as "p90".

        `members` are the names of the models. What an interrupted run found best so far is read from `best.json` in `folder`, and
        its evaluations up to `round`, that of the checkpoint (None: all), from `keep_best.json`. Raises FieldError for an unknown
        statistic and for a patience below 1.
        """
        self.folder, self.members = folder, members
        self.best_by = BestBy.named(statistic, patience)
        self.found: list[dict[str, Any] | None] = _read_list(folder / FOUND) or [None] * len(members)
        self.evaluated = [one for one in _read_list(folder / EVALUATED) if round is None or one["round"] <= round]

    def keep_better_models(self, trained: Trained, found: list[SplitEvaluations], tested: str) -> None:
        """Write the file of each model whose statistic is finite and better than at any earlier evaluation, and `best.json`.

        `found` has the evaluations by split for each model of `trained`. The statistic is over the split `selection_split` names.
        Raises RunError where the metric is not evaluated, or the statistic is a percentile of the clients who do well.
        """
        modules, values = None, []
        for k, evaluations in enumerate(found):
            split = evaluations[selection_split(evaluations, tested)]
            if self.best_by.metric not in split.distributions:
                raise RunError(f"keep_best is about {self.best_by.metric}, which is not evaluated. There are "
                               f"{', '.join(split.distributions)}.")
            value, before, better = self.best_by.value(split), self.found[k], split[self.best_by.metric].better
            if refusal := wrong_percentile_text(self.best_by.metric, self.best_by.statistic, better):
                raise RunError(f"keep_best: {refusal}")
            values.append(value)
            if self.best_by.is_better(value, None if before is None else before["value"], better):
                modules = modules or trained.modules
                record = training_record(trained.ledger, trained.rounds)
                write_atomically(self.best_model_file(k), model_bytes(modules[k], record))
                self.found[k] = {"round": trained.rounds, "statistic": self.best_by.name, "value": value}
                write_json(self.folder / FOUND, self.found)
        if self.best_by.patience is not None:
            self.evaluated.append({"round": trained.rounds, "values": values, "better": better})
            write_json(self.folder / EVALUATED, self.evaluated)

    @property
    def is_over(self) -> bool:
        """Whether the run has evaluated its models often enough without a better value."""
        if not self.evaluated:
            return False
        of_models = list(zip(*(map(_number, one["values"]) for one in self.evaluated), strict=True))
        return self.best_by.is_over(of_models, self.evaluated[-1]["better"])

    @property
    def kept_sentence(self) -> str:
        """Of which rounds the best models are, and that results are about the last; "" where none was kept."""
        rounds = sorted({one["round"] for one in self.found if one is not None})
        if not rounds:
            return ""
        kept = f"The best model, of round {rounds[0]}, is" if len(self.found) == 1 else \
            f"The best models, of round {' and '.join(map(str, rounds))}, are"
        return f"{kept} kept beside the last, which the tables are about; `fedtail export` and `predict` take --best."

    def best_model_file(self, member: int) -> Path:
        """The path of the best model of the member at position `member`; the file may not exist yet."""
        return self.folder / ("best.safetensors" if len(self.members) == 1 else f"best-{member}.safetensors")

    def best_model_files(self) -> list[Path]:
        """The paths of the best models that exist, in the order of the members."""
        return [place for k in range(len(self.members)) if (place := self.best_model_file(k)).is_file()]

    def selection(self, splits: list[str], tested: str) -> dict[str, Any]:
        """What `result.json` says of the clients by which the best models, and perhaps the end of the run, were chosen.

        A dict with their `split` among `splits`, the statistic (`by`), and what was chosen (`for`). Results on them are too good.
        """
        chosen = ["best models", *(["end of the run"] if self.best_by.patience is not None else [])]
        return {"split": selection_split(splits, tested), "by": self.best_by.name, "for": chosen}


def selection_split(splits: Any, tested: str) -> str:
    """The split by which models are chosen: "validation" where `splits` has it, else `tested`."""
    return "validation" if "validation" in splits else tested


def _read_list(place: Path) -> list[Any]:
    """The list in the JSON file at `place`; an empty one without the file."""
    return json.loads(place.read_text()) if place.is_file() else []


def _number(value: float | None) -> float:
    """A number as JSON holds it, where null stands for one that was not finite."""
    return float("nan") if value is None else value
