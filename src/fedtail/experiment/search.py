"""The tune section: which fields to search, and what to choose by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtail.evaluation import Distribution
from fedtail.experiment.experiment import METHOD, Experiment, experiment_of, method_names, pick_method
from fedtail.experiment.parts import Plan, arguments
from fedtail.experiment.source import ExperimentError, Source, nearest

SEARCHED = (*METHOD, "task", "rounds")      # what a trial may change; its data and seeds are those of all trials


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones where both ends are."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low must be less than high, and positive with log = true, got {self.low:g} and {self.high:g}.")

    def ends(self) -> list[Any]:
        return [self.low, self.high]

    def suggest(self, trial: Any, name: str) -> Any:
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return (trial.suggest_int if whole else trial.suggest_float)(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choices:
    """One of a list of values."""

    values: tuple[Any, ...]

    def ends(self) -> list[Any]:
        return list(self.values)

    def suggest(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)


@dataclass(frozen=True)
class TuneSettings:
    """How to search: by which statistic of which metric over the held-out clients, and how long.

    Held-out clients are those of the data's validation split; without one, a fraction `holdout` of the training clients.
    Test clients are never looked at.
    """

    trials: int = 20
    metric: str = "error"
    statistic: str = "p90"              # mean, std, p90, worst10, best5, ...
    holdout: float = 0.2

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}.")
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be in (0, 1), got {self.holdout:g}.")
        Distribution(torch.zeros(1)).statistic(self.statistic)      # refused here if there is none of that name


@dataclass(frozen=True)
class Search:
    """The tune section of a file, checked: every end and every choice gives an experiment."""

    source: Source
    name: str
    settings: TuneSettings
    space: dict[str, Range | Choices]

    def experiment(self, chosen: dict[str, Any]) -> Experiment:
        source = self.source
        for name, value in chosen.items():
            source = source.changed(tuple(name.split(".")), value, f"{self.source.where('tune', 'search')}, {name} = {value!r}")
        return experiment_of(source, self.name)

    def first(self) -> Experiment:
        """One of the experiments: data, metrics and device are those of all."""
        return self.experiment({name: field.ends()[0] for name, field in self.space.items()})

    def combinations(self) -> list[dict[str, Any]] | None:
        """All settings there are, where every field has choices and they are no more than the trials."""
        if not all(isinstance(field, Choices) for field in self.space.values()):
            return None
        if math.prod(len(field.ends()) for field in self.space.values()) > self.settings.trials:
            return None
        values = itertools.product(*(field.ends() for field in self.space.values()))
        return [dict(zip(self.space, chosen, strict=True)) for chosen in values]


def read_search(path: str | Path, settings: Sequence[str] = (), method: str | None = None) -> Search:
    """The search of a file; where it has several methods, of the one called `method`."""
    source, name = Source.read(path, settings), Path(path).stem
    if method is not None:
        source = pick_method(source, method)
    elif names := method_names(source):
        raise ExperimentError(f"{source.name} holds {len(names)} methods: {', '.join(names)}. Tune one of them with --method.")
    if "family" in source.tables:
        raise source.refuse(("family",), "a family is several models; one is tuned at a time. Remove [family], or use a copy.")
    table = source.table("tune")
    found = dict(_fields(source, table.pop("search", None)))
    given = arguments(source, ("tune",), table, TuneSettings, "[tune]")
    search = Search(source, name, Plan("[tune]", TuneSettings, given, source, ("tune",)).make(), found)
    metrics = [metric.name for metric in search.first().task.make(0).all_metrics]
    if search.settings.metric not in metrics:
        raise source.refuse(("tune", "metric"), f"there is no metric {search.settings.metric!r}. "
                                                f"{nearest(search.settings.metric, metrics)}")
    for field, values in found.items():
        for value in values.ends():
            search.experiment({field: value})           # refused here, not in the middle of the search
    return search


def _fields(source: Source, table: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, Range | Choices]]:
    """The fields to search, by dotted name."""
    at = ("tune", "search", *key)
    if not isinstance(table, dict) or not table:
        raise source.refuse(at, "what is to be searched? Write [tune.search] and below it local.learning_rate = { low = 0.01, "
                                "high = 1.0, log = true } or risk.tail_fraction = [0.3, 0.5, 0.8].")
    for name, value in table.items():
        if not key and name not in SEARCHED:
            raise source.refuse((*at, name), f"{name} is the same for all trials. Search the fields of {', '.join(SEARCHED)}.")
        if isinstance(value, list) and value:
            yield ".".join((*key, name)), Choices(tuple(value))
        elif isinstance(value, dict) and "low" in value:
            ends = {field: number for field, number in value.items() if field in ("low", "high")}      # whole ones stay whole
            checked = arguments(source, (*at, name), value, Range, "a range")
            yield ".".join((*key, name)), Plan("range", Range, {**checked, **ends}, source, (*at, name)).make()
        else:
            yield from _fields(source, value, (*key, name))
