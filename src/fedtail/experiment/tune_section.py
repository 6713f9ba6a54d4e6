"""The tune section: which fields to search, and what to choose by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedtail.directions import FEW_CLIENTS, Better, bad_percentile_name, better_statistic_values, wrong_percentile_text
from fedtail.errors import FieldError, nearest_hint
from fedtail.evaluation import Distribution
from fedtail.experiment.experiment import METHOD, Experiment, build_experiment, method_names, pick_method
from fedtail.experiment.part_tables import PartPlan, checked_arguments
from fedtail.experiment.source import ExperimentError, Source, Trusted

if TYPE_CHECKING:
    from fedtail.privacy.noise import Noise

SEARCHED = (*METHOD, "task", "rounds")      # what a trial may change; its data and seeds are those of all trials


@dataclass(frozen=True)
class Range:
    """A searched field with numbers from `low` to `high`, both included: whole numbers where both ends are.

    With `log`, optuna draws them on a logarithmic scale.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        """Raise FieldError unless `low` is below `high` and, with `log`, positive."""
        if not self.low < self.high or (self.log and self.low <= 0):
            needed = "less than high, and positive with log = true"
            raise FieldError("low", needed, self.low, text=f"low must be {needed}, got {self.low:g} and {self.high:g}.")

    def values_to_test(self) -> list[Any]:
        """[low, high]: the values that are tested when the file is read, since each must give a valid experiment."""
        return [self.low, self.high]

    def suggest(self, trial: Any, name: str) -> Any:
        """The number in the range that the optuna `trial` suggests for the field `name`: an int where both ends are ints."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return (trial.suggest_int if whole else trial.suggest_float)(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choices:
    """A searched field that takes one of a list of values."""

    values: tuple[Any, ...]

    def values_to_test(self) -> list[Any]:
        """All values as a list: each is tested when the file is read, since it must give a valid experiment."""
        return list(self.values)

    def suggest(self, trial: Any, name: str) -> Any:
        """The value that the optuna `trial` suggests for the field `name`."""
        return trial.suggest_categorical(name, self.values)


@dataclass(frozen=True)
class TuneSettings:
    """The [tune] section: how many trials to make, and by which statistic of which metric over held-out clients to choose.

    By default the statistic is the 90th percentile, or the 10th of a metric where higher is better: in both cases that of
    clients who do badly. Of fewer than 20 held-out clients, who have no percentiles, it is the mean. Held-out clients are the
    validation split of the data; without one, a fraction `holdout` of the training clients. Test clients are never evaluated.

    With `models` "personal", trials are judged by the clients' personal models, which held-out clients do not have: on a fraction
    `holdout` of the examples of every training client, which is then not trained on.

    With `private`, the choice among private trials has a guarantee of its own: "composition" makes `trials` trials and
    charges for all; "poisson", "geometric" and "logarithmic" make a random number, `trials` on average, and release the best
    only. With `noise` held-out clients are covered too: they release a noisy histogram of their errors instead of exact
    results.
    """

    trials: int = 20
    metric: str = "error"
    statistic: str | None = None        # mean, std, p90, worst10, best5, ...
    holdout: float = 0.2
    private: Literal["composition", "poisson", "geometric", "logarithmic"] | None = None
    noise: Noise | None = None
    models: Literal["shared", "personal"] = "shared"

    def __post_init__(self) -> None:
        """Raise FieldError for `trials` below 1, `holdout` outside (0, 1), an unknown statistic, or noise without `private`.

        Also for a private search by personal models, whose evaluation no held-out client covers.
        """
        if self.trials < 1:
            raise FieldError("trials", "at least 1", self.trials)
        if not 0 < self.holdout < 1:
            raise FieldError("holdout", "in (0, 1)", self.holdout)
        if self.statistic is not None:
            Distribution(torch.zeros(1)).statistic(self.statistic)      # refused here if there is none of that name
        if self.noise is not None and self.private is None:
            raise FieldError("noise", "without use unless the search is private", self.noise, 'Write private = "poisson" too.')
        if self.models == "personal" and self.private is not None:
            raise FieldError("private", "left out where personal models judge", self.private, "They are judged by exact results "
                             "of the clients that train them.")


@dataclass(frozen=True)
class Search:
    """The checked [tune] section of an experiment file: settings of the search, and the fields to search by dotted name.

    Each end of a range and each choice is known to give a valid experiment.
    """

    source: Source
    name: str
    settings: TuneSettings
    space: dict[str, Range | Choices]

    @cached_property
    def metrics(self) -> dict[str, Better]:
        """The metrics of the task by name, each with "lower" or "higher", whichever values are better."""
        return {metric.name: metric.better for metric in self.first_experiment().task.make(0).all_metrics}

    @property
    def statistic(self) -> str:
        """The name of the statistic to choose by: that of `[tune]`, by default p90, or p10 of a metric where higher is better."""
        return self.settings.statistic or bad_percentile_name(self.metrics[self.settings.metric])

    @property
    def better(self) -> Better:
        """Which values of the statistic are better, "lower" or "higher". Lower for std and variance, else as for the metric."""
        return better_statistic_values(self.statistic, self.metrics[self.settings.metric])

    def for_held_out(self, clients: int) -> Search:
        """The search where so many clients judge: of fewer than 20, by the mean, unless the file names a statistic.

        A private search keeps its statistic, which its noise is planned for.
        """
        if clients >= FEW_CLIENTS or self.settings.statistic is not None or self.settings.private is not None:
            return self
        return replace(self, settings=replace(self.settings, statistic="mean"))

    def experiment_with(self, chosen: dict[str, Any]) -> Experiment:
        """The experiment of the file with the searched fields set to the values `chosen`, by dotted name ("risk.tail_fraction").

        Raises ExperimentError, which names the field, where a value gives no valid experiment.
        """
        source = self.source
        for name, value in chosen.items():
            by = f"{self.source.location('tune', 'search')}, {name} = {value!r}"
            source = source.with_value(tuple(name.split(".")), value, by)
        return build_experiment(source, self.name)

    def with_one_split(self, seed: int) -> Search:
        """The search with one split, and one way to deal out examples, for all seeds: those of `seed` where the file says "run".

        With other splits for other seeds, every client would train or judge trials, so that none is left to judge the chosen one.
        """
        source, follows = self.source, self.first_experiment().data.follows
        for name in ("client.seed", "split.seed"):
            if name in follows:
                source = source.with_value(("data", *name.split(".")), seed, f'seed = "run" in {self.source.location("data")}')
        return replace(self, source=source)

    def first_experiment(self) -> Experiment:
        """The experiment with the first value of every searched field (`low` of a range). Built anew at every call.

        Its data, metrics, device and privacy budget are those of all trials.
        """
        return self.experiment_with({name: field.values_to_test()[0] for name, field in self.space.items()})

    def combinations(self) -> list[dict[str, Any]] | None:
        """All combinations of the searched values, each a dict by field name; None where there are too many or infinitely many.

        That is where a field is a range, or where there are more combinations than `trials`.
        """
        if not all(isinstance(field, Choices) for field in self.space.values()):
            return None
        if math.prod(len(field.values_to_test()) for field in self.space.values()) > self.settings.trials:
            return None
        values = itertools.product(*(field.values_to_test() for field in self.space.values()))
        return [dict(zip(self.space, chosen, strict=True)) for chosen in values]


def read_search(path: str | Path, settings: Sequence[str] = (), method: str | None = None, trust: Trusted = ()) -> Search:
    """Read and check the [tune] section of the experiment file at `path`; with several methods, for the one called `method`.

    `settings` are changes such as "risk.tail_fraction=0.3", and `trust` names the folders and packages from which the user's own
    code may be imported. Raises ExperimentError, which names the key at fault, also where the file has a family, several methods
    but no `method` is given, or where an end of a range or a choice gives no valid experiment.
    """
    source, name = Source.read(path, settings, trust), Path(path).stem
    if method is not None:
        source = pick_method(source, method)
    elif names := method_names(source):
        raise ExperimentError(f"{source.name} holds {len(names)} methods: {', '.join(names)}. Tune one of them with --method.")
    if "family" in source.tables:
        raise source.error_at(("family",), "a family is several models; one is tuned at a time. Remove [family], or use a copy.")
    table = source.section_table("tune")
    found = dict(_searched_fields(source, table.pop("search", None)))
    given = checked_arguments(source, ("tune",), table, TuneSettings, "[tune]")
    search = Search(source, name, PartPlan("[tune]", TuneSettings, given, source, ("tune",)).make(), found)
    if search.settings.metric not in search.metrics:
        raise source.error_at(("tune", "metric"), f"there is no metric {search.settings.metric!r}. "
                                                  f"{nearest_hint(search.settings.metric, [*search.metrics])}")
    _check_percentile_side(search)
    _check_judged_models(search)
    for field, values in found.items():
        for value in values.values_to_test():
            search.experiment_with({field: value})           # refused here, not in the middle of the search
    return search


def _check_percentile_side(search: Search) -> None:
    """Raise ExperimentError where the search's statistic is a percentile of the clients who do well: p10 of an error, say.

    The median and other statistics pass.
    """
    metric, statistic, better = search.settings.metric, search.statistic, search.better
    if refusal := wrong_percentile_text(metric, statistic, better):
        raise search.source.error_at(("tune", "statistic"), refusal)


def _check_judged_models(search: Search) -> None:
    """Raise ExperimentError where personal models are to judge and there are none, or are searched and do not judge.

    A field of the personal models changes nothing of the shared model, so that all its trials would be equal.
    """
    [member] = search.first_experiment().algorithm.members
    if search.settings.models == "personal" and not member.personal.trains:
        raise search.source.error_at(("tune", "models"), "the method trains no personal models. Write [personal] and below it "
                                                         'part = "Ditto", say, or remove models.')
    searched = [name for name in search.space if name.split(".")[0] == "personal"]
    if searched and search.settings.models == "shared":
        raise search.source.error_at(("tune", "search", *searched[0].split(".")), f"{searched[0]} does not change the shared "
                                     'model, by which trials are judged. Write models = "personal" below [tune].')


def _searched_fields(source: Source, table: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, Range | Choices]]:
    """Yield each searched field below [tune.search] with its dotted name: `Choices` for a list, `Range` for a table with `low`.

    `key` is the path of `table` below [tune.search], empty at the top, and `source` the file, for errors. Raises ExperimentError
    where a table is empty, where a range is invalid, or where a field is the same for all trials, such as the data.
    """
    at = ("tune", "search", *key)
    if not isinstance(table, dict) or not table:
        raise source.error_at(at, "what is to be searched? Write [tune.search] and below it local.learning_rate = { low = 0.01, "
                                  "high = 1.0, log = true } or risk.tail_fraction = [0.3, 0.5, 0.8].")
    for name, value in table.items():
        if not key and name not in SEARCHED:
            raise source.error_at((*at, name), f"{name} is the same for all trials. Search the fields of {', '.join(SEARCHED)}.")
        if isinstance(value, list) and value:
            yield ".".join((*key, name)), Choices(tuple(value))
        elif isinstance(value, dict) and "low" in value:
            ends = {field: number for field, number in value.items() if field in ("low", "high")}      # whole ones stay whole
            checked = checked_arguments(source, (*at, name), value, Range, "a range")
            yield ".".join((*key, name)), PartPlan("range", Range, {**checked, **ends}, source, (*at, name)).make()
        else:
            yield from _searched_fields(source, value, (*key, name))
