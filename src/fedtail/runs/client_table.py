"""The table over clients that a finished run leaves: a row for each split, client and model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data import Population
from fedtail.evaluation import evaluate_family, finetune
from fedtail.local import LocalSGD
from fedtail.runs.files import write_whole
from fedtail.runs.looking import Look, Splits, statistics
from fedtail.runs.reading import read_rounds
from fedtail.training import Trained

Rows = dict[str, np.ndarray]
KINDS = {"split": "string", "client": "int64", "name": "string", "size": "int64", "mass": "float64", "group": "int64",
         "member": "int32", "asked": "int64", "in_tail": "int64", "picks": "bool"}      # others are float64
FIRST = ("split", "client", "name", "size", "mass", "group", "member")


def client_rows(looks: list[Look], splits: Splits) -> dict[tuple[str, int], Rows]:
    """Loss, error and metrics of every client, by split and model."""
    rows = {}
    for member, evaluations in enumerate(looks):
        for split, evaluation in evaluations.items():
            people = splits[split]
            values = {metric: found.values.numpy() for metric, found in evaluation.distributions.items()}
            rows[split, member] = {**_who(people, split, member), **values}
    return rows


def add_tail_counts(rows: dict[tuple[str, int], Rows], rounds: Path) -> None:
    """How often each training client was asked, and how often it counted, from the lines of `rounds.jsonl`."""
    members = sorted(member for split, member in rows if split == "train")
    clients = len(rows["train", 0]["client"])
    asked, counted = np.zeros(clients, np.int64), np.zeros((len(members), clients), np.int64)
    for line in read_rounds(rounds):
        asked[line["asked"]] += 1
        for member in members:
            counted[member][line["members"][member]["counted"]] += 1
    for member in members:
        rows["train", member] |= {"asked": asked, "in_tail": counted[member]}


def add_picks(rows: dict[tuple[str, int], Rows], trained: Trained, split: str, people: Population) -> None:
    """Which model of a family each client picks by one half of its examples, and each model's error on the other half."""
    able = people.size.numpy() >= 2
    if not able.any():
        return
    judged = evaluate_family(trained, people.select(able))
    for member, errors in enumerate(judged.members):
        rows[split, member]["picks"] = _spread(able, (judged.choice == member).numpy().astype(object), None)
        rows[split, member]["judged"] = _spread(able, errors.values.numpy(), np.nan)


def add_finetuned(rows: dict[tuple[str, int], Rows], trained: Trained, split: str, people: Population, local: LocalSGD,
                  **computing: Any) -> list[dict[str, Any]]:
    """Error on one half of each client's examples, before and after a copy of the model trained on the other half.

    Returns the statistics of both for each model.
    """
    able, told = people.size.numpy() >= 2, []
    for member, module in enumerate(trained.modules if able.any() else ()):
        tuned = finetune(module, people.select(able), local, trained.task, **computing)
        told.append({"before": statistics(tuned.before.error), "after": statistics(tuned.after.error)})
        rows[split, member]["before_finetuning"] = _spread(able, tuned.before.error.values.numpy(), np.nan)
        rows[split, member]["after_finetuning"] = _spread(able, tuned.after.error.values.numpy(), np.nan)
    return told


def write_clients(path: Path, rows: dict[tuple[str, int], Rows], name: str) -> None:
    """Parquet, whole or not there. Its schema says that only a simulator can see all of this."""
    import pyarrow as arrow
    from pyarrow import parquet

    columns = list(dict.fromkeys([*FIRST, *(column for part in rows.values() for column in part)]))
    table = arrow.table({column: arrow.concat_arrays([_array(part, column) for part in rows.values()]) for column in columns})
    content = io.BytesIO()
    parquet.write_table(table.replace_schema_metadata({"simulator_only": "true", "experiment": name}), content)
    write_whole(path, content.getvalue())


def _who(people: Population, split: str, member: int) -> Rows:
    count = len(people)
    names = np.arange(count).astype(str) if people.names is None else people.names.astype(str)
    who = {"split": np.full(count, split), "client": np.arange(count), "name": names,
           "size": people.size.numpy(), "mass": people.mass.numpy(), "member": np.full(count, member, np.int32)}
    return who if people.group is None else {**who, "group": people.group.numpy()}


def _spread(able: np.ndarray, values: np.ndarray, missing: Any) -> np.ndarray:
    """Values of some clients among all."""
    spread = np.full(len(able), missing, values.dtype if missing is not None else object)
    spread[able] = values
    return spread


def _array(part: Rows, column: str) -> Any:
    import pyarrow as arrow

    kind = arrow.type_for_alias(KINDS.get(column, "float64"))
    if column not in part:
        return arrow.nulls(len(part["client"]), kind)
    return arrow.array(part[column], kind)
