"""An experiment: everything a run needs, from a file, checked before any work starts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedtail.algorithm import Family, FederatedAlgorithm
from fedtail.attacks import ClientAttack
from fedtail.channel import Channel
from fedtail.data.population import Population
from fedtail.deprecated import with_old_names
from fedtail.devices import checked_device
from fedtail.engine.engine import Engine
from fedtail.engine.local_fleet import LocalFleet
from fedtail.errors import FieldError, nearest_hint
from fedtail.evaluation.best_by import BestBy
from fedtail.evaluation.federated import FederatedEvaluation
from fedtail.experiment.data_section import DataPlan, plan_data
from fedtail.experiment.engine_section import UNSET, EnginePlan
from fedtail.experiment.noise_section import with_noise_from_budget
from fedtail.experiment.part_tables import SLOTS, PartPlan, build_part, checked_arguments, own_code_file, toml_value
from fedtail.experiment.source import ExperimentError, Source, Trusted
from fedtail.experiment.task_section import TaskPlan, plan_task
from fedtail.local import LocalSGD
from fedtail.privacy.ledger import PrivacyBudget
from fedtail.task import Task

METHOD = tuple(f.name for f in fields(FederatedAlgorithm) if f.name != "budget")      # sample, local, risk, ... (not [privacy])
SECTIONS = ("data", "task", *METHOD, "channel", "privacy", "family", "attack", "engine", "evaluate", "log", "tune", "matrix")
SETTINGS = ("name", "rounds", "seeds", "device")
DEFAULTS = {name: SLOTS[name].default for name in (*METHOD, "channel")}
OWN = (*METHOD, "name", "rounds", "task", "channel", "privacy", "family")         # what a [[method]] may set for itself
NOT_YET = {
    "personalise": "the section of personal models is [personal], and below it part = \"Ditto\", strength = 0.1, say",
}
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class EvaluationPlan:
    """The [evaluate] section: what is evaluated and recorded, and when.

    Every `every` rounds (by default a twentieth of the run), and at the end, the splits are evaluated and a checkpoint is
    written. `tail` records who was sampled and who contributed in every round. `finetune` trains a copy for each test client
    at the end, on half of its examples. `tensorboard` writes event files too. `keep_best` names a statistic over clients by
    which the best models are saved beside the last ones, over validation clients where there are any; with `patience` the run
    ends after so many evaluations in a row without a better value. `on_nodes` is what the clients of a deployment evaluate; the
    simulator ignores it.
    """

    every: int | None = None
    train: bool = True                  # evaluate the training clients too
    tail: bool = True
    finetune: LocalSGD | None = None
    tensorboard: bool = False
    keep_best: str | None = None        # a statistic over clients: "worst10" of the error, or "loss.p90"
    patience: int | None = None         # evaluations without a better value of it, after which the run ends
    on_nodes: FederatedEvaluation | None = None

    def __post_init__(self) -> None:
        """Raise FieldError for an unknown `keep_best`, `every` or `patience` below 1, and patience without keep_best."""
        if self.keep_best is not None:
            BestBy.named(self.keep_best, self.patience)
        elif self.patience is not None:
            raise FieldError("patience", "the patience of a keep_best", self.patience, 'Write keep_best = "worst10" too.',
                             text="patience says how long to wait for a better value, but of what? Write keep_best = "
                                  '"worst10" below [evaluate] too.')
        if self.every is not None and self.every < 1:
            raise FieldError("every", "at least 1 round", self.every)


@dataclass(frozen=True)
class FamilyPlan:
    """The field that the models of a family differ in, and its value for each model."""

    field: str                          # "risk.tail_fraction"
    values: tuple[Any, ...]


@with_old_names
@dataclass(frozen=True)
class Experiment:
    """A checked experiment: one method or family on one population, with the seeds to run it for."""

    name: str
    rounds: int
    seeds: tuple[int, ...]
    device: str
    data: DataPlan
    task: TaskPlan
    algorithm: FederatedAlgorithm | Family
    channel: Channel
    privacy: PrivacyBudget
    family: FamilyPlan | None
    engine: EnginePlan
    evaluate: EvaluationPlan
    source: Source = field(repr=False)
    attack: ClientAttack | None = None
    log: Any = None                     # a logger of fedtail.loggers; None: the folder of the run is all

    @property
    def members(self) -> list[str]:
        """The names of the experiment's models: its own, or for a family the field and value of each, "tail_fraction 0.5"."""
        if self.family is None:
            return [self.name]
        return [f"{self.family.field.rpartition('.')[2]} {value}" for value in self.family.values]

    @property
    def training_engine(self) -> Engine:
        """The device, workers, kernel and precision that the experiment trains with, for `train(engine=...)`."""
        plan = self.engine
        return Engine(self.device, workers=plan.workers, kernel=plan.kernel, precision=plan.precision)

    def attack_for_seed(self, seed: int) -> ClientAttack | None:
        """The attack of a run with this seed, which draws the corrupted clients unless the file gives another; None without."""
        attack = self.attack
        return replace(attack, seed=seed) if attack is not None and attack.seed is None else attack

    def fleet(self, task: Task, population: Population, memory: Path | None = None, seed: int = 0) -> AbstractContextManager[Any]:
        """The fleet that trains `task` on the clients of `population`, in this process and its workers or in Ray actors.

        To be used in a `with` block. `memory` is the folder where clients keep large memory between rounds, None for a temporary
        one; `seed`, the run's, draws the corrupted clients of an attack. Raises ExperimentError where the engine is Ray and the
        device is not the CPU.
        """
        attack = self.attack_for_seed(seed)
        if self.engine.kind == "ray" and self.device != "cpu":
            raise self.source.error_at(("engine", "kind"), f"Ray's actors compute on cores, but device is {self.device}. Write "
                                                           "device = \"cpu\", or kind = \"local\" below [engine]; one GPU "
                                                           "for each actor is RayFleet(..., device=\"cuda\") in Python.")
        if self.engine.kind == "local":
            at = self.training_engine
            return LocalFleet(population, task, at.device, workers=at.workers, kernel=at.kernel, precision=at.precision,
                              folder=memory, attack=attack)
        return self.engine.ray_fleet(task, population, self.source.folder, memory, attack)

    @property
    def evaluation_engine(self) -> Engine:
        """The engine for evaluation and fine-tuning: the experiment's device and workers, always in full precision."""
        return Engine(self.device, workers=self.engine.workers)

    @property
    def evaluate_every(self) -> int:
        """The number of rounds between evaluations; by default a twentieth of all rounds, rounded down, and at least 1."""
        return self.evaluate.every or max(1, self.rounds // 20)

    def as_table(self, seed: int | None = None) -> dict[str, Any]:
        """The whole experiment as nested dicts with every default, which read back as the same experiment.

        With `seed`, its seeds are that one alone. The experiment's folder is included where it uses files of the user's own
        code.
        """
        method = {name: toml_value(part) for name, part in _parts_of_first_model(self.algorithm).items()}
        family = {}
        if self.family is not None:
            varied: Any = [toml_value(value) for value in self.family.values]
            for name in reversed(self.family.field.split(".")):
                varied = {name: varied}
            family = {"family": varied}
        evaluate = {k: v for k, v in toml_value(self.evaluate).items() if k != "part" and v != "none"}
        engine = {k: v for k, v in toml_value(self.engine).items() if k != "part" and (k, v) not in UNSET}
        privacy = {k: v for k, v in toml_value(self.privacy).items() if k != "part" and v != "none"}
        sections = {"data": self.data.as_table(), "task": self.task.as_table(), **method, "channel": toml_value(self.channel),
                    "privacy": privacy, **family, "engine": engine, "evaluate": {**evaluate, "every": self.evaluate_every}}
        if self.attack is not None:
            attack = {name: value for name, value in toml_value(self.attack).items() if value != "none"}
            sections["attack"] = attack
        if self.log is not None:
            sections["log"] = {name: value for name, value in toml_value(self.log).items() if value != "none"}
        folder = {"folder": str(self.source.folder)} if own_code_files(sections, self.source.folder) else {}
        return {"name": self.name, "rounds": self.rounds, "seeds": [seed] if seed is not None else list(self.seeds),
                "device": self.device, **folder, **sections}

    def own_code_digests(self) -> dict[str, str]:
        """Hexadecimal digests, by file name, of the user's own code files that the experiment names; read at every call."""
        files = own_code_files(self.as_table(), self.source.folder)
        return {path.name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in sorted(files)}


def read_experiment(path: str | Path, settings: Sequence[str] = (), method: str | None = None,
                    trust: Trusted = ()) -> Experiment:
    """Read and check the experiment in the file at `path`; of a file with several methods, the one called `method`.

    `settings` are changes as with `--set`, such as "risk.tail_fraction=0.3". The user's own code is imported only from the
    folders and packages in `trust`, such as ".", "torch". Raises ExperimentError, which names the line, where the file is
    invalid, names code that is not trusted, or has several methods but no `method` is given.
    """
    if method is not None:
        return build_experiment(pick_method(Source.read(path, settings, trust), method), Path(path).stem)
    found = read_experiments(path, settings, trust)
    if len(found) > 1:
        raise ExperimentError(f"{path} holds {len(found)} methods: {', '.join(e.name for e in found)}. Compare them with "
                              "`fedtail compare`, or pick one with --method.")
    return found[0]


def read_experiments(path: str | Path, settings: Sequence[str] = (), trust: Trusted = ()) -> list[Experiment]:
    """Read and check all methods of the file at `path`: one experiment for each `[[method]]` entry, or a single one without.

    `settings` are changes as with `--set`, such as "risk.tail_fraction=0.3". The user's own code is imported only from the
    folders and packages in `trust`. Raises ExperimentError, which names the line, where the file is invalid or names code that is
    not trusted.
    """
    return build_experiments(Source.read(path, settings, trust), Path(path).stem)


def build_experiments(source: Source, name: str) -> list[Experiment]:
    """Check a source and build its experiments: one for each `[[method]]` entry, or a single one without entries.

    `name` is the name of an experiment that gives none. Raises ExperimentError, which names the line at fault.
    """
    names = method_names(source)
    views = [source.for_method(index, DEFAULTS) for index in range(len(names))] if names else [source]
    return [build_experiment(view, name) for view in views]


def pick_method(source: Source, method: str) -> Source:
    """The source for the `[[method]]` entry called `method`: its own sections merged over the common ones.

    Raises ExperimentError, with the nearest name, where there is no such method.
    """
    names = method_names(source)
    if method not in names:
        hint = nearest_hint(method, names) if names else "It has one only, without a name."
        raise ExperimentError(f"{source.name} has no method {method!r}. {hint}")
    return source.for_method(names.index(method), DEFAULTS)


def method_names(source: Source) -> list[str]:
    """The names of the `[[method]]` entries of `source`, in order; an empty list where it describes a single method without them.

    Raises ExperimentError for an unknown key at the top of the file or in an entry, and for missing or equal names.
    """
    _check_keys(source, source.tables, (*SETTINGS, *SECTIONS, "method"), ())
    entries = source.tables.get("method", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise source.error_at(("method",), "methods are written [[method]], each with a name and what it changes.")
    for index, entry in enumerate(entries):
        _check_keys(source, entry, OWN, ("method", index))
        if not isinstance(entry.get("name"), str):
            raise source.error_at(("method", index), "a method needs a name. Write name = \"Delta-FL\".")
    names = [entry["name"] for entry in entries]
    if len(set(names)) < len(names):
        raise source.error_at(("method",), f"methods need different names, got {', '.join(names)}.")
    return names


def own_code_files(table: Any, folder: Path) -> set[Path]:
    """The user's code files that an experiment's `table` names: a set of paths in `folder`, the experiment's own.

    Names are texts "module:name" at any depth of the table; those of installed packages are left out.
    """
    if isinstance(table, dict):
        return set().union(*(own_code_files(value, folder) for value in table.values()))
    if isinstance(table, list):
        return set().union(*(own_code_files(value, folder) for value in table))
    beside = own_code_file(folder, table) if isinstance(table, str) and re.fullmatch(r"[\w.]+:[\w.]+", table) else None
    return {beside} if beside else set()


def parse_seeds(value: Any) -> tuple[int, ...]:
    """The distinct seeds, in order, that `value` stands for: 3, [0, 1], "0..4" (both ends included) or "0,1,7".

    Raises FieldError, a ValueError, for anything else, for negative seeds, and for no seed or more than 10,000.
    """
    if isinstance(value, str):
        low, dots, high = value.partition("..")
        try:
            seeds: Any = range(int(low), int(high) + 1) if dots else [int(part) for part in value.split(",")]
        except ValueError:
            seeds = []
    else:
        seeds = [value] if isinstance(value, int) else value
    count = len(seeds) if isinstance(seeds, (list, range)) else 0
    if not 0 < count <= MOST_SEEDS or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise FieldError("seeds", f"whole numbers from 0, {MOST_SEEDS} at most", value, "Write 0..4, or 0,1,2.")
    return tuple(dict.fromkeys(seeds))


def build_experiment(source: Source, name: str) -> Experiment:
    """Check every section of a source and build its experiment. The data are not read yet.

    `name` is used where the file gives no name. Raises ExperimentError, which names the line at fault.
    """
    rounds = source.tables.get("rounds")
    if type(rounds) is not int or rounds < 1:
        came = "nothing" if rounds is None else repr(rounds)
        text = f"rounds must be a whole number from 1, got {came}. Write rounds = 100 at the top."
        raise source.error_at(("rounds",), FieldError("rounds", "a whole number from 1", rounds, "rounds = 100", text=text))
    try:
        seeds = parse_seeds(source.tables.get("seeds", [0]))
    except ValueError as reason:
        raise source.error_at(("seeds",), reason) from None
    given = source.tables.get("name", name)
    if not isinstance(given, str) or not given.strip():
        raise source.error_at(("name",), FieldError("name", "text", given))
    channel = build_part(source, ("channel",), source.section_table("channel"), SLOTS["channel"])
    budget = _build_section(source, "privacy", PrivacyBudget)
    source = with_noise_from_budget(source, budget, rounds, channel, lambda one: _build_algorithm(one)[0])
    algorithm, family = _build_algorithm(source)
    return Experiment(given, rounds, seeds, _checked_device(source), plan_data(source), plan_task(source), algorithm, channel,
                      budget, family, _build_section(source, "engine", EnginePlan),
                      _build_section(source, "evaluate", EvaluationPlan), source, _build_optional_part(source, "attack"),
                      _build_optional_part(source, "log"))


def _build_algorithm(source: Source) -> tuple[FederatedAlgorithm | Family, FamilyPlan | None]:
    """The method of a source and None or, where it has [family], the family of methods and its `FamilyPlan`.

    A `PartPlan` takes the place of the method or family where the user's code was not imported. Raises ExperimentError where
    [family] does not list two or more different values of one field of a part.
    """
    if "family" not in source.tables:
        return _build_method(source), None
    varied = list(_leaf_values(source.section_table("family")))
    if len(varied) != 1 or varied[0][0][0] not in METHOD or not isinstance(varied[0][1], list) or len(varied[0][1]) < 2:
        raise source.error_at(("family",), "a family varies one field of a part over two values or more. Write "
                                           "[family] and below it risk.tail_fraction = [1.0, 0.5, 0.2].")
    key, values = varied[0]
    if len(set(map(repr, values))) < len(values):
        raise source.error_at(("family",), f"the models of a family differ, got {values}. Name each value once.")
    by = source.location("family", *key)
    members = tuple(_build_method(source.with_value(key, value, by)) for value in values)
    family = PartPlan("family", Family, {"members": members}, source, ("family",)).part_or_plan()
    return family, FamilyPlan(".".join(key), tuple(values))


def _build_optional_part(source: Source, name: str) -> Any:
    """The part of section [name], a `PartPlan` in its place where the user's code was not imported; None without the section.

    Raises ExperimentError, which names the line at fault.
    """
    return build_part(source, (name,), source.section_table(name), SLOTS[name]) if name in source.tables else None


def _leaf_values(table: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (key, value) for every value of nested tables that is no table: (("risk", "tail_fraction"), [1.0, 0.5])."""
    for name, value in table.items():
        yield from _leaf_values(value, (*key, name)) if isinstance(value, dict) else [((*key, name), value)]


def _build_method(source: Source) -> FederatedAlgorithm:
    """The `FederatedAlgorithm` of a source, with each part built from its section; [sample] is required, others have defaults.

    A `PartPlan` in its place where the user's code was not imported. Raises ExperimentError, which names the line at fault.
    """
    parts = {}
    for name in METHOD:
        table = source.section_table(name)
        if name == "sample" and not table:
            raise source.error_at(("sample",), "who takes part in a round? Write [sample] and below it cohort_size = 100, or "
                                               "part = \"Everyone\".")
        parts[name] = build_part(source, (name,), table, SLOTS[name])
    return PartPlan("method", FederatedAlgorithm, parts, source, ()).part_or_plan()


def _parts_of_first_model(algorithm: Any) -> dict[str, Any]:
    """The parts of a method, or of the first model of a family, by section name.

    Parts, and `algorithm` itself, are `PartPlan`s where the user's code was not imported.
    """
    if isinstance(algorithm, PartPlan) and "members" in algorithm.arguments:
        algorithm = algorithm.arguments["members"][0]
    if isinstance(algorithm, PartPlan):
        return {name: algorithm.arguments[name] for name in METHOD}
    return {name: getattr(algorithm.members[0], name) for name in METHOD}


def _build_section(source: Source, name: str, kind: type) -> Any:
    """An instance of the dataclass `kind` from section [name] of the file `source`, whose keys are the fields of `kind`.

    Raises ExperimentError for an unknown key or a value that does not fit.
    """
    given = checked_arguments(source, (name,), source.section_table(name), kind, f"[{name}]")
    plan = PartPlan(name, kind, given, source, (name,))
    return kind(**given) if plan.has_unimported_code else plan.make()      # parts as names only are not used


def _checked_device(source: Source) -> str:
    """The device that the file `source` names, "cpu" by default.

    Raises ExperimentError where it is neither a CPU nor a CUDA device, or where PyTorch sees no GPU for the latter.
    """
    device = source.tables.get("device", "cpu")
    if not isinstance(device, str) or device.partition(":")[0] not in ("cpu", "cuda"):
        raise source.error_at(("device",), FieldError("device", "cpu or cuda", device))
    try:
        return str(checked_device(device))
    except FieldError as reason:
        raise source.error_at(("device",), reason) from None


def _check_keys(source: Source, table: dict[str, Any], known: tuple[str, ...], key: tuple[str | int, ...]) -> None:
    """Raise ExperimentError for the first key of `table` that is not in `known`, with the nearest that is.

    `key` is where the table is in the file `source`. Sections that this version does not support yet have a text of their own.
    """
    for name in table:
        if name in NOT_YET:
            raise source.error_at((*key, name), f"{NOT_YET[name]}. Remove [{name}].")
        if name not in known:
            raise source.error_at((*key, name), f"there is no section or setting {name!r}. {nearest_hint(name, known)}")
