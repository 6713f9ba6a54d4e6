"""The data section: where the clients come from, and how they are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail import data as generators
from fedtail.data import Population, Splits, partition
from fedtail.errors import FieldError
from fedtail.experiment import data_sources
from fedtail.experiment.data_sources import SplitPlan
from fedtail.experiment.part_tables import PartPlan, arguments, import_function, toml_value, unread_part
from fedtail.experiment.source import Key, Source, nearest

READERS: dict[str, Callable[..., Any]] = {
    "arrays": data_sources.arrays, "leaf": data_sources.leaf, "saved": data_sources.saved,
    "huggingface": data_sources.huggingface}
GENERATORS = ("digits", "label_shift", "synthetic", "synthetic_hybrid", "synthetic_iid", "three_gaussians")
PARTITIONS = ("by_column", "dirichlet", "label_shards", "quantity_skew")
FROM_DATA = ("labels", "examples", "values")      # what a partitioner takes from the data, not from the file
RUN = "run"                                       # seed = "run": another draw of the data for every seed of a run
COMMON = ("kind", "split", "at_least", "test_path")


@dataclass(frozen=True)
class DataPlan:
    """Everything it takes to load the data, checked before anything is read."""

    reader: PartPlan
    partition: PartPlan | None
    split: SplitPlan | None                 # None: the reader gives the splits itself
    at_least: int
    test_path: Path | None
    follows: frozenset[str]                 # which of the seeds are the run's

    @property
    def same_for_all_seeds(self) -> bool:
        """Whether all seeds of a run have the same data and splits."""
        return not self.follows

    def __str__(self) -> str:
        """The data in a few words, for a reader."""
        place = self.reader.arguments.get("path") or self.reader.arguments.get("dataset")
        dealt = f", dealt out by {self.partition.name}" if self.partition else ""
        return f"{self.reader.name}{f', {Path(place).name}' if place else ''}{dealt}"

    def load(self, seed: int) -> dict[str, Population]:
        """The clients to train on, to choose with (`validation`), to report (`test`), and what was held out."""
        population = self._read_population(seed)
        if isinstance(population, Splits):
            return {name: self._filtered(part) for name, part in population._asdict().items()}
        if not isinstance(population, Population):
            raise self.reader.source.refuse(("data", "kind"), f"{self.reader.name} must give a Population or Splits, got "
                                                              f"{type(population).__name__}.")
        split_seed = seed if "split.seed" in self.follows or self.split is None else self.split.seed
        try:
            splits = (self.split or SplitPlan(1.0))(self._filtered(population), split_seed)
        except FieldError as reason:
            file = "Write at_least = 2 below [data]." if reason.field == "at_least" else reason.write      # what helps in a file
            raise self.reader.source.refuse(("data", "split"), str(reason).removesuffix(reason.write) + file) from reason
        except ValueError as reason:
            raise self.reader.source.refuse(("data", "split"), reason) from reason
        if self.test_path is not None:
            splits |= {"held_out": splits["test"]} if "test" in splits else {}      # kept back within clients
            splits["test"] = self._filtered(self._read_population(seed, path=self.test_path))
        return splits

    def table(self) -> dict[str, Any]:
        """As a table with every field, as it would be written in a file."""
        own = {("kind" if name == "part" else name): value for name, value in self.reader.table().items()}
        if self.partition is not None:
            own["client"] = self._seeded(self.partition.table(), "client.seed")
        if self.split is not None:
            split = {name: value for name, value in toml_value(self.split).items() if name != "part" and value != "none"}
            own["split"] = self._seeded(split, "split.seed")
        if self.test_path is not None:
            own["test_path"] = str(self.test_path)
        own = {name: value for name, value in own.items() if value != "none"}
        return self._seeded({**own, "at_least": self.at_least}, "seed")

    def _read_population(self, seed: int, **more: Any) -> Any:
        """Read or generate the clients, with the seeds that follow the run."""
        if "seed" in self.follows:
            more["seed"] = seed
        if self.partition is not None:
            with_seed = {"seed": seed} if "client.seed" in self.follows else {}
            more["client"] = _dealer(replace(self.partition, arguments={**self.partition.arguments, **with_seed}))
        return replace(self.reader, arguments={**self.reader.arguments, **more}).make()

    def _filtered(self, population: Population) -> Population:
        """The clients with at least `at_least` examples."""
        return population if self.at_least <= 1 else population.at_least(self.at_least)

    def _seeded(self, table: dict[str, Any], name: str) -> dict[str, Any]:
        """A table whose seed is written "run" where it follows the run."""
        return {**table, "seed": RUN} if name in self.follows else table


def data_plan(source: Source) -> DataPlan:
    """The data section of a file, checked."""
    table, follows = source.table("data"), set()
    for name, inner in (("", table), ("client.", table.get("client")), ("split.", table.get("split"))):
        if isinstance(inner, dict) and inner.get("seed") == RUN:
            follows.add(f"{name}seed")
            if name:
                table[name[:-1]] = {**inner, "seed": 0}
            else:
                table["seed"] = 0
    reader = _reader(source, table)
    client = table.get("client")
    dealt = _partition(source, client, reader.name) if isinstance(client, dict) else None
    own = {name: value for name, value in table.items() if name not in COMMON and not (dealt and name == "client")}
    given = arguments(source, ("data",), own, reader.target, reader.name, skip=("client",) if dealt else ())
    if "path" in given:
        given["path"] = _existing_path(source, ("data", "path"), given["path"])
    if reader.name == "leaf" and ":" in str(given.get("encode")):
        given["encode"] = import_function(source, ("data", "encode"), given["encode"])
    if reader.name == "huggingface" and (source.folder / given["dataset"]).exists():
        given["dataset"] = source.folder / given["dataset"]
    at_least = table.get("at_least", 1)
    if type(at_least) is not int or at_least < 1:
        raise source.refuse(("data", "at_least"), FieldError("at_least", "a whole number from 1", at_least))
    test = table.get("test_path")
    test_path = None if test is None else _existing_path(source, ("data", "test_path"), test)
    return DataPlan(replace(reader, arguments=given), dealt, _split(source, table, reader.name), at_least, test_path,
                    frozenset(follows))


def _reader(source: Source, table: dict[str, Any]) -> PartPlan:
    """The kind of data that a file names: a reader, a generator, or a user's own function."""
    kind = table.get("kind")
    known = [*READERS, *GENERATORS]
    if not isinstance(kind, str):
        raise source.refuse(("data",), f"[data] needs a kind: {', '.join(known)}, or your own as \"module:function\".")
    if ":" in kind:
        return PartPlan(kind, unread_part(import_function(source, ("data", "kind"), kind)), {}, source, ("data",))
    if kind not in known:
        raise source.refuse(("data", "kind"), f"there is no kind of data {kind!r}. {nearest(kind, known)}")
    target = READERS[kind] if kind in READERS else getattr(generators, kind)
    return PartPlan(kind, target, {}, source, ("data",))


def _partition(source: Source, table: dict[str, Any], kind: str) -> PartPlan:
    """Who deals the examples out: one of ours, or for a Hugging Face data set one of Flower's."""
    name, key = table.get("part"), ("data", "client")
    fields = {field: value for field, value in table.items() if field != "part"}
    if kind == "huggingface" and isinstance(name, str) and name.endswith("Partitioner"):
        return PartPlan(name, _flower, fields, source, key)
    if name not in PARTITIONS:
        raise source.refuse((*key, "part"), f"client must name an array or be dealt out by a part, got {name!r}. "
                                            f"{nearest(str(name), PARTITIONS)}")
    target = getattr(partition, name)
    named = ("values",) if name == "by_column" else ()
    given = arguments(source, key, fields, target, name, skip=tuple(n for n in FROM_DATA if n not in named))
    return PartPlan(name, target, given, source, key)


def _flower(**settings: Any) -> Any:
    """Stands for one of Flower's partitioners, which are made where the data set is."""
    return settings


def _dealer(plan: PartPlan) -> data_sources.Deal:
    """What a reader calls to have its examples dealt out to clients."""
    def deal(y: str, read: data_sources.Read, dataset: Any) -> np.ndarray:
        if plan.target is _flower:
            from fedtail.data.hub import partition_ids
            return partition_ids(dataset, plan.name, plan.arguments)
        if plan.name == "by_column":
            return partition.by_column(read(plan.arguments["values"]))
        labels = read(y)
        return plan.make(**({"examples": len(labels)} if plan.name == "quantity_skew" else {"labels": labels}))
    return deal


def _split(source: Source, table: dict[str, Any], kind: str) -> SplitPlan | None:
    """How clients are split, from the file or by default; None where the data come split."""
    split = table.get("split")
    if kind == "label_shift":
        if split is not None:
            raise source.refuse(("data", "split"), "label_shift gives its own training, validation and test clients. Remove "
                                                   "split, or set train_clients, validation_clients and test_clients.")
        return None
    if split is None:
        return SplitPlan(1.0) if "test_path" in table else SplitPlan(0.8, test=0.2)
    if not isinstance(split, dict):
        raise source.refuse(("data", "split"), f"split must be a table, got {split!r}. Write "
                                               "split = { train = 0.8, test = 0.2, seed = 0 }.")
    given = arguments(source, ("data", "split"), split, SplitPlan, "split")
    if "test_path" in table and given.get("test") is not None:
        raise source.refuse(("data", "split"), "test clients are those of test_path. Remove split's test, or test_path.")
    if "train" not in given:
        shares = [given.get(name) or 0 for name in ("validation", "test")]
        given["train"] = 1 - sum(share for share in shares if isinstance(share, (int, float)))
    return PartPlan("split", SplitPlan, given, source, ("data", "split")).make()


def _existing_path(source: Source, key: Key, value: Any) -> Path:
    """A path beside the experiment file, refused where there is nothing."""
    path = source.folder / str(value)
    if not path.exists():
        raise source.refuse(key, f"there is no {path}. Paths are relative to the experiment file.")
    return path
