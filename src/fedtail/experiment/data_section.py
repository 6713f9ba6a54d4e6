"""The data section: where the clients come from, and how they are split."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail import data as generators
from fedtail.data import Population, Scaling, Splits, partition
from fedtail.data.class_names import with_classes, with_number_targets
from fedtail.data.scaling import By, scale_splits
from fedtail.errors import FieldError, nearest_hint
from fedtail.experiment import data_sources
from fedtail.experiment.data_sources import SplitPlan
from fedtail.experiment.part_tables import PartPlan, checked_arguments, import_function, plan_target, toml_value
from fedtail.experiment.source import Key, Source
from fedtail.experiment.values import NONE

READERS: dict[str, Callable[..., Any]] = {
    "arrays": data_sources.read_array_file, "leaf": data_sources.read_leaf, "saved": data_sources.open_saved_population,
    "huggingface": data_sources.read_huggingface}
GENERATORS = ("digits", "label_shift", "synthetic", "synthetic_hybrid", "synthetic_iid", "three_gaussians")
PARTITIONS = ("by_column", "dirichlet", "label_shards", "quantity_skew")
FROM_DATA = ("labels", "examples", "values")      # what a partitioner takes from the data, not from the file
RUN = "run"                                       # seed = "run": another draw of the data for every seed of a run
COMMON = ("kind", "split", "at_least", "test_path", "scale", "classes", "targets")
NUMBERS = "numbers"                               # targets = "numbers": whole numbers are numbers to predict


@dataclass(frozen=True)
class DataPlan:
    """The checked [data] section: what to read or generate, and how to split it; nothing is read before `load`."""

    reader: PartPlan
    partition: PartPlan | None
    split: SplitPlan | None                 # None: the reader gives the splits itself
    at_least: int
    test_path: Path | None
    follows: frozenset[str]                 # which of the seeds are the run's
    scale: Any = None                       # "columns", "pixels", "channels", or a table of a public shift and scale
    classes: tuple[Any, ...] | None = None  # the labels as the data have them, in the order of their numbers
    targets: str | None = None              # "numbers": whole numbers are numbers to predict, not classes

    @property
    def is_same_for_all_seeds(self) -> bool:
        """Whether runs with different seeds have the same data and splits: no seed in the section is "run"."""
        return not self.follows

    def redrawn_by_seed(self) -> DataPlan:
        """The plan with a split that is drawn anew for every seed of a run, unless the file gives its seed.

        Where the data come split (label_shift), they are drawn anew. What a file says stays: seed = 0 is one split for all seeds.
        """
        table, name = self.reader.source.section_table("data"), "seed" if self.split is None else "split.seed"
        given = table if self.split is None else table.get("split") or {}
        return self if "seed" in given else replace(self, follows=self.follows | {name})

    @property
    def splits_within_clients(self) -> tuple[str, ...]:
        """The names of the splits that hold other examples of the training clients: "test" or "held_out", or none of them.

        Other splits have clients of their own, also where they have equal keys.
        """
        if self.split is None or self.split.within is None:
            return ()
        return ("held_out",) if self.split.test is not None or self.test_path is not None else ("test",)

    def __str__(self) -> str:
        """A short text on the data: their kind, file or data set, and partitioner, "arrays, mine.npz, dealt out by dirichlet"."""
        place = self.reader.arguments.get("path") or self.reader.arguments.get("dataset")
        dealt = f", dealt out by {self.partition.name}" if self.partition else ""
        return f"{self.reader.name}{f', {Path(place).name}' if place else ''}{dealt}"

    def load(self, seed: int) -> dict[str, Population]:
        """Read or generate the data; returns populations by split: "train" and, as configured, "validation", "test", "held_out".

        Clients with fewer than `at_least` examples are dropped. With `scale`, inputs are scaled by numbers that are fitted on
        the training clients, or given; each population's `scaling` says by what. `seed`, the run's, replaces each seed that the
        section gives as "run". With `test_path`, "test" is read from there, and examples held out within training clients are
        "held_out". Raises ExperimentError, which names the key, where the data cannot be read or split.
        """
        splits = self._load_unscaled(seed)
        if self.scale is None:
            return splits
        try:
            return scale_splits(splits, Scaling.public(**self.scale) if isinstance(self.scale, dict) else self.scale)
        except (ValueError, TypeError) as reason:
            raise self.reader.source.error_at(("data", "scale"), reason) from reason

    def _load_unscaled(self, seed: int) -> dict[str, Population]:
        """The populations by split, as they are read, for the run's `seed`; `load` says which. Raises ExperimentError."""
        population = self._read_population(seed)
        if isinstance(population, Splits):
            return {name: self._drop_small_clients(part) for name, part in population._asdict().items()}
        if not isinstance(population, Population):
            raise self.reader.source.error_at(("data", "kind"), f"{self.reader.name} must give a Population or Splits, got "
                                                                f"{type(population).__name__}.")
        split_seed = seed if "split.seed" in self.follows or self.split is None else self.split.seed
        try:
            splits = (self.split or SplitPlan(1.0))(self._drop_small_clients(population), split_seed)
        except FieldError as reason:
            file = "Write at_least = 2 below [data]." if reason.field == "at_least" else reason.write      # what helps in a file
            raise self.reader.source.error_at(("data", "split"), str(reason).removesuffix(reason.write) + file) from reason
        except ValueError as reason:
            raise self.reader.source.error_at(("data", "split"), reason) from reason
        if self.test_path is not None:
            splits |= {"held_out": splits["test"]} if "test" in splits else {}      # kept back within clients
            splits["test"] = self._drop_small_clients(self._read_population(seed, path=self.test_path))
        return self._with_targets(splits)

    def _with_targets(self, splits: dict[str, Population]) -> dict[str, Population]:
        """The splits with labels numbered by `classes`, or as numbers; splits of one file share their examples before and after.

        Names of a test file are numbered as those of the training file. Raises ExperimentError for a label that is not listed.
        """
        classes, done = self.classes or splits["train"].classes, {}
        if classes is None and self.targets is None:
            return splits
        try:
            for name, population in splits.items():
                if id(population.targets) not in done:
                    done[id(population.targets)] = (with_number_targets(population) if self.targets else
                                                    with_classes(population, classes or ()))
                made = done[id(population.targets)]
                splits[name] = population.with_columns(targets=made.targets, classes=made.classes, folder=None)
        except (ValueError, TypeError) as reason:
            raise self.reader.source.error_at(("data", "targets" if self.targets else "classes"), reason) from reason
        return splits

    def as_table(self) -> dict[str, Any]:
        """The [data] section as a dict that can be written to an experiment file, with defaults; unset fields are left out."""
        own = {("kind" if name == "part" else name): value for name, value in self.reader.as_table().items()}
        if self.partition is not None:
            own["client"] = self._with_run_seed(self.partition.as_table(), "client.seed")
        if self.split is not None:
            split = {name: value for name, value in toml_value(self.split).items() if name != "part" and value != "none"}
            own["split"] = self._with_run_seed(split, "split.seed")
        if self.test_path is not None:
            own["test_path"] = str(self.test_path)
        if self.scale is not None:
            own["scale"] = self.scale
        if self.classes is not None:
            own["classes"] = list(self.classes)
        if self.targets is not None:
            own["targets"] = self.targets
        own = {name: value for name, value in own.items() if value != "none"}
        return self._with_run_seed({**own, "at_least": self.at_least}, "seed")

    def _read_population(self, seed: int, **more: Any) -> Any:
        """Call the reader or generator; returns what it gives, a Population or Splits.

        `seed`, the run's, replaces the seeds that the section gives as "run"; `more` replaces arguments of the reader. Raises
        ExperimentError where it fails.
        """
        if "seed" in self.follows:
            more["seed"] = seed
        if self.partition is not None:
            with_seed = {"seed": seed} if "client.seed" in self.follows else {}
            more["client"] = _partition_function(replace(self.partition, arguments={**self.partition.arguments, **with_seed}))
        return replace(self.reader, arguments={**self.reader.arguments, **more}).make()

    def _drop_small_clients(self, population: Population) -> Population:
        """The population without the clients that have fewer than `at_least` examples; itself where `at_least` is 1."""
        return population if self.at_least <= 1 else population.at_least(self.at_least)

    def _with_run_seed(self, table: dict[str, Any], name: str) -> dict[str, Any]:
        """A copy of `table` with seed = "run" where the seed called `name` follows the run; else `table` itself.

        `name` is "seed", "client.seed" or "split.seed".
        """
        return {**table, "seed": RUN} if name in self.follows else table


def plan_data(source: Source) -> DataPlan:
    """Check the [data] section of `source`: kind, fields, partitioner, split, and that paths exist; returns the plan to load it.

    No data are read. The user's own functions are imported where they are trusted. Raises ExperimentError, which names the key at
    fault.
    """
    table, follows = source.section_table("data"), set()
    for name, inner in (("", table), ("client.", table.get("client")), ("split.", table.get("split"))):
        if isinstance(inner, dict) and inner.get("seed") == RUN:
            follows.add(f"{name}seed")
            if name:
                table[name[:-1]] = {**inner, "seed": 0}
            else:
                table["seed"] = 0
    reader = _plan_reader(source, table)
    client = table.get("client")
    dealt = _plan_partition(source, client, reader.name) if isinstance(client, dict) else None
    own = {name: value for name, value in table.items() if name not in COMMON and not (dealt and name == "client")}
    given = checked_arguments(source, ("data",), own, reader.target, reader.name, skip=("client",) if dealt else ())
    if "path" in given:
        given["path"] = _existing_path(source, ("data", "path"), given["path"])
    if reader.name == "leaf" and ":" in str(given.get("encode")):
        given["encode"] = import_function(source, ("data", "encode"), given["encode"])
    if reader.name == "huggingface" and (source.folder / given["dataset"]).exists():
        given["dataset"] = source.folder / given["dataset"]
    at_least = table.get("at_least", 1)
    if type(at_least) is not int or at_least < 1:
        raise source.error_at(("data", "at_least"), FieldError("at_least", "a whole number from 1", at_least))
    test = table.get("test_path")
    test_path = None if test is None else _existing_path(source, ("data", "test_path"), test)
    return DataPlan(replace(reader, arguments=given), dealt, _plan_split(source, table, reader.name), at_least, test_path,
                    frozenset(follows), _plan_scale(source, table.get("scale")), *_plan_targets(source, table))


def _plan_targets(source: Source, table: dict[str, Any]) -> tuple[tuple[Any, ...] | None, str | None]:
    """`classes` and `targets` of the [data] `table`, checked: a list of labels, and "numbers"; None where they are not given."""
    classes, targets = (None if table.get(name) == NONE else table.get(name) for name in ("classes", "targets"))
    if classes is not None and (not isinstance(classes, list) or len(set(map(str, classes))) < max(1, len(classes))):
        needed = "a list of the labels as the data have them, each once"
        raise source.error_at(("data", "classes"), FieldError("classes", needed, classes, 'Write classes = ["no", "yes"].'))
    if targets not in (None, NUMBERS):
        needed = '"numbers", for whole numbers that are no classes'
        raise source.error_at(("data", "targets"), FieldError("targets", needed, targets))
    if classes is not None and targets is not None:
        raise source.error_at(("data", "targets"), 'targets = "numbers" and classes exclude each other. Remove one of them.')
    return None if classes is None else tuple(classes), targets


def _plan_scale(source: Source, scale: Any) -> Any:
    """`scale` of the [data] section, checked: None, the name of what has numbers of its own, or a table of `shift` and `scale`.

    Raises ExperimentError for anything else.
    """
    if scale is None or scale == NONE:
        return None
    if isinstance(scale, dict):
        given = checked_arguments(source, ("data", "scale"), scale, public_numbers, "scale")
        PartPlan("scale", Scaling.public, given, source, ("data", "scale")).make()
        return {name: toml_value(value) for name, value in given.items()}
    if scale not in typing.get_args(By):
        needed = '"columns", "pixels", "channels", or { shift = 0.0, scale = 255.0 } with public numbers'
        raise source.error_at(("data", "scale"), FieldError("scale", needed, scale))
    return scale


def public_numbers(shift: float | list[float] = 0.0, scale: float | list[float] = 1.0) -> None:
    """The fields of `scale = { shift = ..., scale = ... }`: numbers, or one for each column, that are known without the data."""


def _plan_reader(source: Source, table: dict[str, Any]) -> PartPlan:
    """The plan, without arguments yet, of what `kind` in the [data] `table` names: a reader, a generator or "module:function".

    The last is a function of the user's own. `source` is the experiment file, for errors and imports. Raises ExperimentError
    where `kind` is missing or unknown, or the function cannot be imported or is not trusted.
    """
    kind = table.get("kind")
    known = [*READERS, *GENERATORS]
    if not isinstance(kind, str):
        raise source.error_at(("data",), f"[data] needs a kind: {', '.join(known)}, or your own as \"module:function\".")
    if ":" in kind:
        return PartPlan(kind, plan_target(import_function(source, ("data", "kind"), kind)), {}, source, ("data",))
    if kind not in known:
        raise source.error_at(("data", "kind"), f"there is no kind of data {kind!r}. {nearest_hint(kind, known)}")
    target = READERS[kind] if kind in READERS else getattr(generators, kind)
    return PartPlan(kind, target, {}, source, ("data",))


def _plan_partition(source: Source, table: dict[str, Any], kind: str) -> PartPlan:
    """The plan of the partitioner that assigns examples to clients, from `table`, the `client` table of [data].

    It is one of fedtail's or, for `kind` "huggingface" and a name that ends in "Partitioner", one of Flower's, whose fields are
    checked only when the data are read. Raises ExperimentError for an unknown name or field. `source` is the experiment file, for
    errors.
    """
    name, key = table.get("part"), ("data", "client")
    fields = {field: value for field, value in table.items() if field != "part"}
    if kind == "huggingface" and isinstance(name, str) and name.endswith("Partitioner"):
        return PartPlan(name, _flower_partitioner_settings, fields, source, key)
    if name not in PARTITIONS:
        raise source.error_at((*key, "part"), f"client must name an array or be dealt out by a part, got {name!r}. "
                                              f"{nearest_hint(str(name), PARTITIONS)}")
    target = getattr(partition, name)
    named = ("values",) if name == "by_column" else ()
    given = checked_arguments(source, key, fields, target, name, skip=tuple(n for n in FROM_DATA if n not in named))
    return PartPlan(name, target, given, source, key)


def _flower_partitioner_settings(**settings: Any) -> Any:
    """The keyword arguments as a dict: stands in a plan for a Flower partitioner, which can be made only with the data set."""
    return settings


def _partition_function(plan: PartPlan) -> data_sources.Deal:
    """The function (y, read, dataset) -> client ids that a reader calls to have its examples assigned to clients.

    The planned partitioner assigns them.
    """
    def assign_clients(y: str, read: data_sources.Read, dataset: Any) -> np.ndarray:
        """The client of each example, (examples,) int, as the partitioner assigns them.

        `read` returns a column by name, `y` names the labels, and `dataset` is the Hugging Face data set, which only Flower's
        partitioners use.
        """
        if plan.target is _flower_partitioner_settings:
            from fedtail.data.hub import partition_ids
            return partition_ids(dataset, plan.name, plan.arguments)
        if plan.name == "by_column":
            return partition.by_column(read(plan.arguments["values"]))
        labels = read(y)
        return plan.make(**({"examples": len(labels)} if plan.name == "quantity_skew" else {"labels": labels}))
    return assign_clients


def _plan_split(source: Source, table: dict[str, Any], kind: str) -> SplitPlan | None:
    """How clients are split, from `split` in the [data] `table`; by default 80% train and 20% test.

    With a `test_path`, by default all train. A split without `train` gives it the rest. None for `kind` "label_shift", whose data
    come split. Raises ExperimentError, about the line in `source`, for invalid fractions, or for test clients given twice.
    """
    split = table.get("split")
    if kind == "label_shift":
        if split is not None:
            raise source.error_at(("data", "split"), "label_shift gives its own training, validation and test clients. Remove "
                                                     "split, or set train_clients, validation_clients and test_clients.")
        return None
    if split is None:
        return SplitPlan(1.0) if "test_path" in table else SplitPlan(0.8, test=0.2)
    if not isinstance(split, dict):
        raise source.error_at(("data", "split"), f"split must be a table, got {split!r}. Write "
                                                 "split = { train = 0.8, test = 0.2, seed = 0 }.")
    given = checked_arguments(source, ("data", "split"), split, SplitPlan, "split")
    if "test_path" in table and given.get("test") is not None:
        raise source.error_at(("data", "split"), "test clients are those of test_path. Remove split's test, or test_path.")
    if "train" not in given:
        shares = [given.get(name) or 0 for name in ("validation", "test")]
        given["train"] = 1 - sum(share for share in shares if isinstance(share, (int, float)))
    return PartPlan("split", SplitPlan, given, source, ("data", "split")).make()


def _existing_path(source: Source, key: Key, value: Any) -> Path:
    """`value` as a path relative to the folder of the experiment file `source`.

    Raises ExperimentError about `key` where nothing is there.
    """
    path = source.folder / str(value)
    if not path.exists():
        raise source.error_at(key, f"there is no {path}. Paths are relative to the experiment file.")
    return path
