"""Read what a run left in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.deprecated import fields_with_new_names, tables_with_new_names, with_old_names
from fedtail.reading import Unreadable, json_lines, read_json, refuse_damaged, short_text
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.run_checks import (
    MOST_CLIENTS,
    RESULT,
    RESULT_MORE,
    check_client_columns,
    check_round,
    check_run_json,
    checked_line,
    first_misfit_phrase,
    is_text,
    list_check,
    whole_number_check,
)

FORMAT, VERSION = "fedtail run", 1
DEPLOYED = "fedtail deployed run"            # on nodes, of whose clients only sums are known
LEDGER = "ledger.jsonl"                      # every release, written before it was made
COMPARISON = "comparison.json"               # what `fedtail compare` leaves beside its runs
EXACT = ("the simulator's evaluations of all clients (metrics.jsonl, result.json, clients.parquet and pages made of them) are "
         "exact: do not release them")
PERSONAL = ("personal models (the folder memory) are trained without noise, each on one client's data, and whoever has one took "
            "part: do not release them")
CHOSEN = "the best models ({files}) were chosen by exact results of clients: release {models} instead"
TESTED = ("test", "held_out", "train")      # whose clients a report is about: the first of these there is


@with_old_names
@dataclass(frozen=True)
class RunFolder:
    """The files of one run (one method or family, one seed). They are read at first use, and kept in memory then."""

    path: Path
    about: dict[str, Any]                       # run.json
    unwritten: dict[str, Any] | None = None     # what result.json will hold, where the run has just ended

    @classmethod
    def open(cls, path: str | Path, also_deployed: bool = False) -> RunFolder:
        """The run in the folder `path`, whose `run.json` is read and checked.

        A deployed run that evaluated nothing, so that there is nothing to report, is refused (ValueError) unless `also_deployed`
        is True. Raises FileNotFoundError where there is no `run.json`, and ValueError where it is damaged or of another format
        version.
        """
        place = Path(path) / "run.json"
        if not place.is_file():
            raise FileNotFoundError(f"{path} is not a run: it has no run.json. Runs are written by `fedtail run` and "
                                    "`fedtail compare`.")
        about = read_json(place)
        deployed = isinstance(about, dict) and about.get("format") == DEPLOYED
        if deployed and not also_deployed and not about.get("splits"):
            raise ValueError(f"{path} is a run on a deployment whose clients evaluated nothing: there is nothing to report. "
                             "Write [evaluate.on_nodes] in its experiment. log.txt and answers.jsonl say how it went, "
                             "`fedtail privacy` what it has cost.")
        if not isinstance(about, dict) or about.get("format") not in (FORMAT, DEPLOYED):
            raise ValueError(f"{place} does not describe a run.")
        if about.get("version") != VERSION:
            raise ValueError(f"{path} has format version {short_text(repr(about.get('version')))}; this fedtail reads {VERSION}.")
        check_run_json(place, about, TESTED if not deployed else tuple(about.get("splits") or ()))
        return cls(Path(path), tables_with_new_names(about))

    def __repr__(self) -> str:
        """Its path, method and seed, and whether it is finished, in one line."""
        ended = "finished" if self.is_finished else "not finished"
        return f"RunFolder({str(self.path)!r}: {self.name}, seed {self.seed}, {ended})"

    @property
    def name(self) -> str:
        """The name of the experiment's method or family, from `run.json`."""
        return self.about["name"]

    @property
    def seed(self) -> int:
        """The seed that the run was trained with, from `run.json`."""
        return self.about["seed"]

    @property
    def members(self) -> list[str]:
        """The names of the run's models, in order: one for a method, several for a family."""
        return self.about["members"]

    @property
    def personal(self) -> list[str]:
        """For each model, whether clients have personal models beside it: "none", "evaluated" or "not evaluated".

        They are evaluated where the tested split holds examples of the training clients that none was trained on.
        """
        return self.about.get("personal") or ["none"] * len(self.members)

    @property
    def is_finished(self) -> bool:
        """Whether the run ended; read from disk at every call.

        That is where `result.json` exists and, for a simulated run, `clients.parquet` too.
        """
        return (self.path / "result.json").is_file() and (self.is_deployed or (self.path / "clients.parquet").is_file())

    @property
    def has_result(self) -> bool:
        """Whether `result` is known: the run is finished, or has just ended and will be once the file is written."""
        return self.unwritten is not None or self.is_finished

    @property
    def has_client_table(self) -> bool:
        """Whether the run is finished and has `clients.parquet`, the table over clients, which simulated runs write."""
        return self.is_finished and (self.path / "clients.parquet").is_file()

    @property
    def is_deployed(self) -> bool:
        """Whether the run trained on nodes that keep their clients' data, so that only sums over clients are known."""
        return self.about["format"] == DEPLOYED

    @property
    def tested_split(self) -> str:
        """The split that reports are about: the first of "test", "held_out" and "train" that the run has."""
        return next(split for split in TESTED if split in self.about["splits"])

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one dict for each evaluated round; an empty list without the file.

        A line has `round`, and `members`: for each model the statistics over clients by split and metric. Raises Unreadable
        where a line is damaged.
        """
        place, members = self.path / "metrics.jsonl", len(self.members) if "members" in self.about else None
        return [checked_line(place, line, members) for line in json_lines(place)]

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of `result.json`: the last line of metrics, the number of failed answers, and digests of the other files.

        Raises FileNotFoundError where the run is not finished, and Unreadable where the file is damaged.
        """
        if self.unwritten is not None:
            return self.unwritten
        if not self.is_finished:
            raise FileNotFoundError(f"{self.path} is not finished. Go on with `fedtail run ... --resume`.")
        place = self.path / "result.json"
        return checked_line(place, read_json(place), len(self.members), RESULT, RESULT_MORE)

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """The content of `privacy.json`, the privacy statement when the run was last saved; an empty dict without the file.

        Raises Unreadable where it is damaged.
        """
        place = self.path / "privacy.json"
        found = read_json(place) if place.is_file() else {}
        if not isinstance(found, dict):
            raise Unreadable(f"{place} is no privacy statement.")
        return fields_with_new_names("Guarantee", found)

    @property
    def privacy_line(self) -> str | None:
        """The privacy guarantee of the run in one line, with "simulated: " before it where noise came from a seed.

        None where the run has no guarantee. Raises Unreadable where `privacy.json` is damaged.
        """
        found = self.privacy
        if not found.get("private"):
            return None
        from fedtail.privacy.accounting import guarantee_in_words  # here: reading other runs needs no torch

        with refuse_damaged(str(self.path / "privacy.json"), "`fedtail privacy` states it again from the ledger."):
            simulated = "simulated: " if found["guarantee"].startswith("simulated") else ""
            epsilon, delta, adjacency, sampling, without = (
                found[name] for name in ("epsilon", "delta", "adjacency", "sampling", "without_amplification"))
            return simulated + guarantee_in_words(epsilon, delta, adjacency, sampling, without, found.get("only", ""),
                                                  found.get("unit", "client"))

    @property
    def not_charged_sentences(self) -> list[str]:
        """Sentences on what was computed from the same clients without being charged to the ledger; empty for a deployed run.

        In a simulated run that is the exact evaluation, personal models and, with `keep_best`, the best models, which were chosen
        by exact results.
        """
        if self.is_deployed:
            return []
        best = "best.safetensors" if len(self.members) == 1 else "best-*.safetensors"
        kept = self.about["experiment"].get("evaluate", {}).get("keep_best")
        models = ", ".join(path.name for path in self.models)
        own = [PERSONAL] if any(found != "none" for found in self.personal) else []
        return [EXACT, *own, *([CHOSEN.format(files=best, models=models)] if kept else [])]

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """One dict per round of `rounds.jsonl`; an empty list where the file was not written.

        Each dict has `round`; `asked`, the positions of the sampled clients; and `members`, with `counted`, the positions of the
        clients that contributed to each model, and `threshold`, the loss at which its tail begins or None. Raises Unreadable
        where lines do not fit the run.
        """
        found = list(read_rounds(self.path / "rounds.jsonl", self.about.get("splits", {}).get("train")))
        for line in found:
            if line["round"] > self.about["rounds"] or len(line["members"]) != len(self.members):
                raise Unreadable(f"{self.path / 'rounds.jsonl'} is not about the {self.about['rounds']} rounds and "
                                 f"{len(self.members)} models of the run.")
        return found

    @cached_property
    def clients(self) -> dict[str, np.ndarray]:
        """The columns of `clients.parquet` as arrays by name, with a row for each client, split and model.

        Missing numbers are NaN, other missing values None. Raises FileNotFoundError where the run is not finished, and
        Unreadable where the file is damaged or does not fit `run.json`.
        """
        place = self.path / "clients.parquet"
        if not place.is_file():
            raise FileNotFoundError(f"{self.path} has no clients.parquet yet: the run is not finished. Go on with "
                                    "`fedtail run ... --resume`.")
        from fedtail.parquet_files import column_kind, open_parquet, read_columns

        with open_parquet(place) as file:
            table = read_columns(file, place, file.schema_arrow.names)
        with refuse_damaged(str(place), "`fedtail run ... --resume` writes it again from the last checkpoint."):
            columns = {name: table[name].to_numpy() for name in table.column_names}
        kinds = {name: column_kind(table[name].type) for name in table.column_names}
        check_client_columns(place, kinds, columns, len(self.members), self.about.get("splits", {}))
        return columns

    def values_from_histogram(self, metric: str, model: EvaluatedModel = EvaluatedModel(0)) -> np.ndarray:
        """Values that stand for those of the clients of a finished deployed run, reconstructed from its histogram of `metric`.

        Each bin gives as many values as its count, rounded, spread evenly within it. `model` says which of the run's models.
        An empty array where there is no such histogram. Raises FileNotFoundError where the run is not finished.
        """
        found = self.result.get("personal_histograms" if model.personal else "histograms") or []
        if model.member >= len(found) or metric not in found[model.member]:
            return np.zeros(0)
        histogram = found[model.member][metric]
        edges, counts = np.array(histogram["edges"]), np.rint(histogram["counts"]).astype(int)
        spread = [low + (high - low) * (np.arange(count) + 0.5) / count
                  for low, high, count in zip(edges, edges[1:], counts, strict=False) if count]
        return np.concatenate([np.zeros(0), *spread])

    def client_columns(self, split: str, member: int = 0) -> dict[str, np.ndarray]:
        """The columns of `clients.parquet` by name, restricted to one split and one model: arrays with a row for each client.

        Under an attack, corrupted clients are left out. `member` is the position of the model. The arrays are empty for a split
        that the file does not have. Raises FileNotFoundError where the run is not finished, and Unreadable where the file is
        damaged.
        """
        rows = (self.clients["split"] == split) & (self.clients["member"] == member)
        if "corrupted" in self.clients:
            rows &= ~self.clients["corrupted"].astype(bool)
        return {name: values[rows] for name, values in self.clients.items()}

    def module(self, model: int | str | None = None, best: bool = False, trust: str | Path | Sequence[str | Path] = ()) -> Any:
        """A trained model of a finished run as a `torch.nn.Module` in evaluation mode, ready to be called.

        `model` is its position or name, which is needed for a family only. With `best` it is the one that `keep_best` kept, in
        place of the last. The user's own module is imported only from the folders and packages in `trust`, such as ".". Raises
        ValueError where the run is not finished or has no such model, RunError where its file is missing or damaged.
        """
        from fedtail.runs.models_of_run import finished_run, load_models, member_index  # here: reading runs needs no torch

        run = finished_run(self.path)
        return load_models(run, trust, best)[1][member_index(run, model)]

    @property
    def models(self) -> list[Path]:
        """The paths of the model files, in the order of `members`. The files exist once the run is finished."""
        if len(self.members) == 1:
            return [self.path / "model.safetensors"]
        return [self.path / f"model-{k}.safetensors" for k in range(len(self.members))]


def find_runs(places: str | Path | Sequence[str | Path]) -> list[RunFolder]:
    """The runs in one or several places, opened; a place is the folder of a run, or a folder with runs at any depth below it.

    Within a comparison, methods come in its order, the baseline first; other runs come sorted by path. A run found twice is
    listed once. Raises FileNotFoundError where a place holds no run, and ValueError where a run is damaged.
    """
    found: list[RunFolder] = []
    for place in map(Path, [places] if isinstance(places, (str, Path)) else places):
        here = [place] if (place / "run.json").is_file() else sorted(path.parent for path in place.rglob("run.json"))
        order = _method_order(place / COMPARISON)
        here.sort(key=lambda path: order.index(path.parent.name) if path.parent.name in order else len(order))
        if not here:
            raise FileNotFoundError(f"there is no run in {place}: no run.json in it or below it.")
        found += [RunFolder.open(path) for path in here if path not in {run.path for run in found}]
    return found


def read_rounds(path: Path, clients: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield a dict for each round of the file `rounds.jsonl` at `path`, in order; nothing where there is no file.

    The first line of the file, which gives the number of clients, is not yielded. A null in the file stands for all clients
    (`asked`) or the whole cohort (`counted`): it is replaced by their positions. `clients` is the number of clients expected,
    None where unknown. Raises Unreadable where the file is damaged or about another number of clients.
    """
    lines = json_lines(path)
    head = next(lines, {"clients": 0})
    needed = {"clients": whole_number_check(0, MOST_CLIENTS)}
    problem = first_misfit_phrase(head, needed) if isinstance(head, dict) else "no table"
    if problem or (clients is not None and head["clients"] not in (0, clients)):
        raise Unreadable(f"{path} does not say how many clients it is about, {clients} in run.json.")
    everyone = np.arange(head["clients"])
    for number, line in enumerate(lines, start=2):
        check_round(path.with_name(f"{path.name}, line {number}"), line, head["clients"])
        cohort = everyone if line["asked"] is None else line["asked"]
        members = [{**member, "counted": cohort if member["counted"] is None else member["counted"]}
                   for member in line["members"]]
        yield {**line, "asked": cohort, "members": members}


def _method_order(place: Path) -> list[str]:
    """The folder names of the methods in the `comparison.json` at `place`, in its order; an empty list without the file.

    Raises Unreadable where the file is damaged.
    """
    if not place.is_file():
        return []
    found = read_json(place)
    if not isinstance(found, dict) or not list_check(is_text)(found.get("methods")):
        raise Unreadable(f"{place} does not describe a comparison.")
    return found["methods"]
