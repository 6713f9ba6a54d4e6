"""Search settings by how the tail of held-out training clients does."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedtail.data import Population
from fedtail.evaluation import Distribution, evaluate
from fedtail.evaluation.evaluate import gives_rates
from fedtail.experiment.experiment import Experiment, experiment_of, method_names, pick_method
from fedtail.experiment.parts import Plan, arguments
from fedtail.experiment.source import ExperimentError, Key, Source, nearest
from fedtail.runs.files import RunError, only_writer, write_json, write_whole
from fedtail.runs.recording import Watch, warnings_to
from fedtail.training import Progress, train

_STATISTIC = re.compile(r"(p|worst|best)(\d+(?:\.\d+)?)")


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
        statistic_of(Distribution(torch.zeros(1)), self.statistic)      # refused here if there is none of that name


@dataclass(frozen=True)
class Search:
    """The [tune] section of a file, checked: every end and choice gives an experiment."""

    source: Source
    name: str
    settings: TuneSettings
    space: dict[str, Range | Choices]

    def experiment(self, chosen: dict[str, Any]) -> Experiment:
        source = self.source
        for name, value in chosen.items():
            source = source.changed(tuple(name.split(".")), value, f"{self.source.where('tune', 'search')}, {name} = {value!r}")
        return experiment_of(source, self.name)

    @property
    def combinations(self) -> int | None:
        """How many there are, where all fields have choices."""
        sizes = [len(field.values) for field in self.space.values() if isinstance(field, Choices)]
        return math.prod(sizes) if len(sizes) == len(self.space) else None


def read_search(path: str | Path, settings: Sequence[str] = (), method: str | None = None) -> Search:
    """The search of a file; where it has several methods, of the one called `method`."""
    source, name = Source.read(path, settings), Path(path).stem
    if method is not None:
        source = pick_method(source, method)
    elif names := method_names(source):
        raise ExperimentError(f"{source.name} holds {len(names)} methods: {', '.join(names)}. Tune one of them with --method.")
    if "family" in source.tables:
        raise source.refuse(("family",), "a family is several models; one is tuned at a time. Remove [family], or use a new file.")
    table = source.table("tune")
    found = dict(_fields(source, table.pop("search", None)))
    given = arguments(source, ("tune",), table, TuneSettings, "[tune]")
    search = Search(source, name, Plan("[tune]", TuneSettings, given, source, ("tune",)).make(), found)
    for field, values in found.items():
        for value in values.ends():
            search.experiment({field: value})           # refused here, not in the middle of the search
    return search


def statistic_of(distribution: Distribution, name: str) -> float:
    """A statistic by its name: mean, std, variance, p90, worst10, best5, ..."""
    if name in ("mean", "std", "variance"):
        return getattr(distribution, name)()
    known = _STATISTIC.fullmatch(name)
    if not known or not 0 < float(known[2]) <= 100:
        raise ValueError(f"there is no statistic {name!r}. Write mean, std, variance, or p90, worst10, best10 with any percent.")
    return distribution.percentile(float(known[2])) if known[1] == "p" else getattr(distribution, known[1])(float(known[2]) / 100)


def tune(search: Search, seeds: tuple[int, ...], folder: Path, watch: Watch, resume: bool = False) -> dict[str, Any]:
    """Search; every trial is kept in the folder, and the best experiment is written to `best.toml`."""
    import tomli_w

    if (folder / "trials.log").exists() and not resume:
        raise RunError(f"{folder} holds a search. Go on with --resume, or choose another folder with --out.")
    with only_writer(folder), warnings_to(watch.note):
        study = _study(search, folder)
        held_out = {seed: _held_out(search, seed) for seed in seeds}
        wanted = min(search.settings.trials, search.combinations or search.settings.trials)
        while len(done := _finished(study)) < wanted and not watch.stop:
            trial = study.ask()
            chosen = {name: field.suggest(trial, name) for name, field in search.space.items()}
            value = _value(search, chosen, held_out, watch, len(done) + 1)
            if value is not None:
                study.tell(trial, value)
        ranked = sorted(_finished(study), key=lambda t: t.value if study.direction.name == "MINIMIZE" else -t.value)
        unit, scale = _unit(search, next(iter(held_out.values()))[1])
        result: dict[str, Any] = {
            "statistic": search.settings.statistic, "metric": search.settings.metric, "unit": unit,
            "finished": len(ranked) >= wanted,
            "trials": [{"settings": trial.params, "value": scale * trial.value} for trial in ranked]}
        if ranked:
            write_whole(folder / "best.toml", tomli_w.dumps(search.experiment(ranked[0].params).table()))
        write_json(folder / "trials.json", result)
    return {**result, "best": result["trials"][0] if ranked else None, "file": str(folder / "best.toml")}


def _value(search: Search, chosen: dict[str, Any], held_out: dict[int, tuple[Population, Population]], watch: Watch,
           number: int) -> float | None:
    """The statistic over held-out clients, mean over seeds; None where somebody asked to stop."""
    wanted, values = search.experiment(chosen), []
    for seed, (people, judges) in held_out.items():
        watch.begin(f"trial {number}", seed, 0, wanted.rounds)
        trained = train(wanted.algorithm, wanted.task.make(seed), people, rounds=wanted.rounds, seed=seed, device=wanted.device,
                        channel=wanted.channel, on_round=partial(_look_on, watch))
        if watch.stop:
            return None
        found = evaluate(trained, judges, device=wanted.device)[search.settings.metric]
        values.append(statistic_of(found, search.settings.statistic))
    return sum(values) / len(values)


def _look_on(watch: Watch, progress: Progress) -> bool:
    watch.round(progress.round)
    return watch.stop


def _held_out(search: Search, seed: int) -> tuple[Population, Population]:
    """Clients to train on, and clients to judge by; never the test clients."""
    splits = search.experiment(_first(search)).data.load(seed)
    if "validation" in splits:
        return splits["train"], splits["validation"]
    keep = 1 - search.settings.holdout
    people, judges = splits["train"].split((keep, search.settings.holdout), seed)
    return people, judges


def _unit(search: Search, people: Population) -> tuple[str, float]:
    """Error rates are told in percent, as everywhere."""
    rates = search.settings.metric == "error" and gives_rates(search.experiment(_first(search)).task.make(0), people)
    return ("%", 100.0**(1 + (search.settings.statistic == "variance"))) if rates else ("", 1.0)


def _study(search: Search, folder: Path) -> Any:
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise RunError("fedtail tune needs optuna. Install it with pip install 'fedtail[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "trials.log")))
    better = {metric.name: metric.better for metric in search.experiment(_first(search)).task.make(0).all_metrics}
    if search.settings.metric not in better:
        raise search.source.refuse(("tune", "metric"), f"there is no metric {search.settings.metric!r}. "
                                                       f"{nearest(search.settings.metric, better)}")
    study = optuna.create_study(storage=storage, study_name="fedtail", load_if_exists=True,
                                direction="minimize" if better[search.settings.metric] == "lower" else "maximize")
    about = repr((search.settings, search.space, search.experiment(_first(search)).table()))
    if study.user_attrs.get("search", about) != about:
        raise RunError(f"{folder} holds another search. Choose another folder with --out.")
    study.set_user_attr("search", about)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))      # a resumed search does not repeat its first draws
    _enqueue_all(search, study)
    return study


def _enqueue_all(search: Search, study: Any) -> None:
    """Where there are few combinations, try each once."""
    if search.combinations is None or search.combinations > search.settings.trials:
        return
    names = list(search.space)
    waiting = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "WAITING"]
    known = [trial.params for trial in _finished(study)] + [trial.system_attrs.get("fixed_params") for trial in waiting]
    for values in itertools.product(*(field.ends() for field in search.space.values())):
        chosen = dict(zip(names, values, strict=True))
        if chosen not in known:
            study.enqueue_trial(chosen)


def _finished(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]


def _first(search: Search) -> dict[str, Any]:
    return {name: field.ends()[0] for name, field in search.space.items()}


def _fields(source: Source, table: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, Range | Choices]]:
    """The fields to search, by dotted name."""
    at: Key = ("tune", "search", *key)
    if not isinstance(table, dict) or not table:
        raise source.refuse(at, "what is to be searched? Write [tune.search] and below it local.learning_rate = { low = 0.01, "
                                "high = 1.0, log = true } or risk.tail_fraction = [0.3, 0.5, 0.8].")
    for name, value in table.items():
        if isinstance(value, list) and value:
            yield ".".join((*key, name)), Choices(tuple(value))
        elif isinstance(value, dict) and "low" in value:
            given = {field: v for field, v in value.items() if field in ("low", "high")}
            rest = arguments(source, (*at, name), value, Range, "a range")
            yield ".".join((*key, name)), Plan("range", Range, {**rest, **given}, source, (*at, name)).make()
        else:
            yield from _fields(source, value, (*key, name))
