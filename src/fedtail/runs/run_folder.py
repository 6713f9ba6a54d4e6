"""Read what a run left in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSION = "fedtail run", 1
DEPLOYED = "fedtail deployed run"            # on nodes: no client was ever evaluated here
LEDGER = "ledger.jsonl"                      # every release, written before it was made
COMPARISON = "comparison.json"               # what `fedtail compare` leaves beside its runs
TESTED = ("test", "held_out", "train")      # whose clients a report is about: the first of these there is


@dataclass(frozen=True)
class RunFolder:
    """One method or family, one seed, on disk. Files are read on first use."""

    path: Path
    about: dict[str, Any]                       # run.json

    @classmethod
    def open(cls, path: str | Path, also_deployed: bool = False) -> RunFolder:
        """The run in a folder; one on a deployment, which has no clients to report on, only with `also_deployed`."""
        place = Path(path) / "run.json"
        if not place.is_file():
            raise FileNotFoundError(f"{path} is not a run: it has no run.json. Runs are written by `fedtail run` and "
                                    "`fedtail compare`.")
        about = _json(place)
        deployed = isinstance(about, dict) and about.get("format") == DEPLOYED
        if deployed and not also_deployed:
            raise ValueError(f"{path} is a run on a deployment, whose clients were not evaluated here: there is nothing to "
                             "report. log.txt and answers.jsonl say how it went, `fedtail privacy` what it has cost.")
        if not isinstance(about, dict) or about.get("format") not in (FORMAT, DEPLOYED):
            raise ValueError(f"{place} does not describe a run.")
        if about.get("version") != VERSION:
            raise ValueError(f"{path} has format version {about.get('version')!r}; this fedtail reads {VERSION}.")
        return cls(Path(path), about)

    @property
    def name(self) -> str:
        """The name of the method, or of the family."""
        return self.about["name"]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.about["seed"]

    @property
    def members(self) -> list[str]:
        """The names of its models: several for a family."""
        return self.about["members"]

    @property
    def finished(self) -> bool:
        """Whether the run ended and left its result."""
        return (self.path / "result.json").is_file() and (self.deployed or (self.path / "clients.parquet").is_file())

    @property
    def deployed(self) -> bool:
        """Whether it ran on nodes that keep their data."""
        return self.about["format"] == DEPLOYED

    @property
    def tested(self) -> str:
        """The split a report is about."""
        return next(split for split in TESTED if split in self.about["splits"])

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """A line for each evaluated round."""
        return list(_lines(self.path / "metrics.jsonl"))

    @cached_property
    def result(self) -> dict[str, Any]:
        """What a finished run ended with."""
        if not self.finished:
            raise FileNotFoundError(f"{self.path} is not finished. Go on with `fedtail run ... --resume`.")
        return _json(self.path / "result.json")

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """What the run has cost, as it was when it was last saved."""
        place = self.path / "privacy.json"
        return _json(place) if place.is_file() else {}

    @property
    def promise(self) -> str | None:
        """The privacy statement in a line; None where there is no guarantee."""
        found = self.privacy
        if not found.get("private"):
            return None
        from fedtail.privacy.accounting import in_words  # here: reading other runs needs no torch

        simulated = "simulated: " if found["guarantee"].startswith("simulated") else ""
        parts = (found[name] for name in ("epsilon", "delta", "adjacency", "sampling", "against_server"))
        return simulated + in_words(*parts)

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """A line for each round: who was sampled and who contributed; empty where that was not recorded."""
        return list(read_rounds(self.path / "rounds.jsonl"))

    @cached_property
    def clients(self) -> dict[str, np.ndarray]:
        """The columns of the table over clients; missing numbers are NaN, other missing values None."""
        import pyarrow.parquet as parquet

        if not (self.path / "clients.parquet").is_file():
            raise FileNotFoundError(f"{self.path} has no clients.parquet yet: the run is not finished. Go on with "
                                    "`fedtail run ... --resume`.")
        table = parquet.read_table(self.path / "clients.parquet")
        return {name: table[name].to_numpy() for name in table.column_names}

    def of_clients(self, split: str, member: int = 0) -> dict[str, np.ndarray]:
        """The columns for one split and one model, a row for each client."""
        rows = (self.clients["split"] == split) & (self.clients["member"] == member)
        return {name: values[rows] for name, values in self.clients.items()}

    @property
    def models(self) -> list[Path]:
        """The files of its models, in the order of `members`."""
        if len(self.members) == 1:
            return [self.path / "model.safetensors"]
        return [self.path / f"model-{k}.safetensors" for k in range(len(self.members))]


def find_runs(places: str | Path | Sequence[str | Path]) -> list[RunFolder]:
    """The runs in a folder, or in several: each a run itself, or a folder with runs somewhere in it.

    Those of a comparison come in its order, its baseline first; others by the names of their folders.
    """
    found: list[RunFolder] = []
    for place in map(Path, [places] if isinstance(places, (str, Path)) else places):
        here = [place] if (place / "run.json").is_file() else sorted(path.parent for path in place.rglob("run.json"))
        order = _json(place / COMPARISON)["methods"] if (place / COMPARISON).is_file() else []
        here.sort(key=lambda path: order.index(path.parent.name) if path.parent.name in order else len(order))
        if not here:
            raise FileNotFoundError(f"there is no run in {place}: no run.json in it or below it.")
        found += [RunFolder.open(path) for path in here if path not in {run.path for run in found}]
    return found


def read_rounds(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of `rounds.jsonl` after the first, with the positions of all clients where all were sampled or contributed."""
    lines = _lines(path)
    everyone = np.arange(next(lines, {"clients": 0})["clients"])
    for line in lines:
        cohort = everyone if line["asked"] is None else line["asked"]
        members = [{**member, "counted": cohort if member["counted"] is None else member["counted"]}
                   for member in line["members"]]
        yield {**line, "asked": cohort, "members": members}


def _json(path: Path) -> Any:
    """The contents of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is not readable json.") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a run that is being written may end in half of one."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
