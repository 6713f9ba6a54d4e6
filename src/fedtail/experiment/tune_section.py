"""The tune section: which fields to search, and what to choose by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedtail.errors import FieldError
from fedtail.evaluation import Distribution
from fedtail.experiment.experiment import METHOD, Experiment, build_experiment, method_names, pick_method
from fedtail.experiment.part_tables import PartPlan, checked_arguments
from fedtail.experiment.source import ExperimentError, Source, Trusted, nearest_hint

if TYPE_CHECKING:
    from fedtail.privacy.noise import Noise

Better = Literal["lower", "higher"]
SPREADS = ("std", "variance")               # better small, whichever way the metric points
TAIL: dict[Better, str] = {"lower": "p90", "higher": "p10"}      # a percentile of those who do worst
SEARCHED = (*METHOD, "task", "rounds")      # what a trial may change; its data and seeds are those of all trials


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones where both ends are."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        """Raise FieldError unless low < high, and both are positive on a logarithmic scale."""
        if not self.low < self.high or (self.log and self.low <= 0):
            needed = "less than high, and positive with log = true"
            raise FieldError("low", needed, self.low, text=f"low must be {needed}, got {self.low:g} and {self.high:g}.")

    def ends(self) -> list[Any]:
        """Both ends of the range, each of which must give an experiment when the file is checked."""
        return [self.low, self.high]

    def suggest(self, trial: Any, name: str) -> Any:
        """A number of the range that an optuna trial chooses for the field `name`; whole where both ends are."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return (trial.suggest_int if whole else trial.suggest_float)(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choices:
    """One of a list of values."""

    values: tuple[Any, ...]

    def ends(self) -> list[Any]:
        """All values, each of which must give an experiment when the file is checked."""
        return list(self.values)

    def suggest(self, trial: Any, name: str) -> Any:
        """One of the values, which an optuna trial chooses for the field `name`."""
        return trial.suggest_categorical(name, self.values)


@dataclass(frozen=True)
class TuneSettings:
    """How to search: by which statistic of which metric over the held-out clients, and how long.

    By default the statistic is the 90th percentile, or the 10th of a metric where higher is better: a percentile is that of the
    numbers as they are, as in every table, so those who do worst are at its low end. Held-out clients are those of the data's
    validation split; without one, a fraction `holdout` of the training clients. Test clients are never evaluated.

    A search over private trials has a guarantee of its own with `private`: "composition" makes `trials` trials and charges for
    all; "poisson", "geometric" and "logarithmic" make a random number, `trials` on average, and release the best only. With
    `noise` held-out clients are covered too: they release a noisy histogram of their errors instead of exact results.
    """

    trials: int = 20
    metric: str = "error"
    statistic: str | None = None        # mean, std, p90, worst10, best5, ...
    holdout: float = 0.2
    private: Literal["composition", "poisson", "geometric", "logarithmic"] | None = None
    noise: Noise | None = None

    def __post_init__(self) -> None:
        """Raise FieldError for a value out of range, an unknown statistic, or noise without a private search."""
        if self.trials < 1:
            raise FieldError("trials", "at least 1", self.trials)
        if not 0 < self.holdout < 1:
            raise FieldError("holdout", "in (0, 1)", self.holdout)
        if self.statistic is not None:
            Distribution(torch.zeros(1)).statistic(self.statistic)      # refused here if there is none of that name
        if self.noise is not None and self.private is None:
            raise FieldError("noise", "without use unless the search is private", self.noise, 'Write private = "poisson" too.')


@dataclass(frozen=True)
class Search:
    """The tune section of a file, checked: every end and every choice gives an experiment."""

    source: Source
    name: str
    settings: TuneSettings
    space: dict[str, Range | Choices]

    @cached_property
    def metrics(self) -> dict[str, Better]:
        """The metrics that may be chosen by, and whether lower or higher values of each are better."""
        return {metric.name: metric.better for metric in self.first().task.make(0).all_metrics}

    @property
    def statistic(self) -> str:
        """The statistic to choose by: as written, or the percentile at the end of the clients who do worst."""
        return self.settings.statistic or TAIL[self.metrics[self.settings.metric]]

    @property
    def better(self) -> Better:
        """Whether "lower" or "higher" values of the statistic are better; a spread is better lower."""
        return "lower" if self.statistic in SPREADS else self.metrics[self.settings.metric]

    def experiment(self, chosen: dict[str, Any]) -> Experiment:
        """The experiment with chosen values of the searched fields, by dotted name.

        An ExperimentError names the field at fault.
        """
        source = self.source
        for name, value in chosen.items():
            by = f"{self.source.location('tune', 'search')}, {name} = {value!r}"
            source = source.with_value(tuple(name.split(".")), value, by)
        return build_experiment(source, self.name)

    def first(self) -> Experiment:
        """The experiment with the first value of every searched field; data, metrics and device are those of all trials."""
        return self.experiment({name: field.ends()[0] for name, field in self.space.items()})

    def combinations(self) -> list[dict[str, Any]] | None:
        """All settings there are, by field name, where every field has choices and they are no more than the trials.

        Else None.
        """
        if not all(isinstance(field, Choices) for field in self.space.values()):
            return None
        if math.prod(len(field.ends()) for field in self.space.values()) > self.settings.trials:
            return None
        values = itertools.product(*(field.ends() for field in self.space.values()))
        return [dict(zip(self.space, chosen, strict=True)) for chosen in values]


def read_search(path: str | Path, settings: Sequence[str] = (), method: str | None = None, trust: Trusted = ()) -> Search:
    """The checked [tune] section of a file; where it has several methods, for the one called `method`.

    `settings` are changes as with `--set`, `trust` allows code of your own as for `read_experiment`. An ExperimentError names the
    key at fault, also where an end of a range gives no experiment.
    """
    source, name = Source.read(path, settings, trust), Path(path).stem
    if method is not None:
        source = pick_method(source, method)
    elif names := method_names(source):
        raise ExperimentError(f"{source.name} holds {len(names)} methods: {', '.join(names)}. Tune one of them with --method.")
    if "family" in source.tables:
        raise source.refuse(("family",), "a family is several models; one is tuned at a time. Remove [family], or use a copy.")
    table = source.table("tune")
    found = dict(_searched_fields(source, table.pop("search", None)))
    given = checked_arguments(source, ("tune",), table, TuneSettings, "[tune]")
    search = Search(source, name, PartPlan("[tune]", TuneSettings, given, source, ("tune",)).make(), found)
    if search.settings.metric not in search.metrics:
        raise source.refuse(("tune", "metric"), f"there is no metric {search.settings.metric!r}. "
                                                f"{nearest_hint(search.settings.metric, [*search.metrics])}")
    _check_percentile_side(search)
    for field, values in found.items():
        for value in values.ends():
            search.experiment({field: value})           # refused here, not in the middle of the search
    return search


def _check_percentile_side(search: Search) -> None:
    """Raise ExperimentError where the search would choose by a percentile of the clients who do well."""
    metric, statistic, better = search.settings.metric, search.statistic, search.better
    percent = float(statistic[1:]) if statistic[0] == "p" else 50.0
    if (percent < 50 and better == "lower") or (percent > 50 and better == "higher"):
        raise search.source.refuse(
            ("tune", "statistic"), f"{better} values of the {metric} are better, so {statistic} is about clients who do well. "
            f"For those who do worst write p{100 - percent:g}, or worst10 for their mean; for the best write best10.")


def _searched_fields(source: Source, table: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, Range | Choices]]:
    """The fields below [tune.search] by dotted name, a list as choices and a table with low and high as a range.

    `key` is the table that `table` is; an ExperimentError where it is empty, or names what all trials share.
    """
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
            checked = checked_arguments(source, (*at, name), value, Range, "a range")
            yield ".".join((*key, name)), PartPlan("range", Range, {**checked, **ends}, source, (*at, name)).make()
        else:
            yield from _searched_fields(source, value, (*key, name))
