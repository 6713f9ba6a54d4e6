"""Values of single clients out of run folders, by client key and seed, so that runs can be paired client by client. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.run_folder import RunFolder

RUN = "run"                                  # seed = "run" in [data]: other clients for every seed
Compared = tuple[RunFolder, EvaluatedModel]      # a run, and which of its models
ByClient = dict[Hashable, float]


def values_by_client(found: Sequence[Compared], metric: str, split: str | None = None) -> list[ByClient]:
    """The values of `metric` of the clients of a split, by client key: a mapping for each (run, model) pair, in order.

    `split` is by default that which reports are about. A key is the same in two runs only where it is the same client: keys hold
    the seed where every seed has clients of its own. Corrupted clients are left out; values that are not defined are NaN, and all
    of them where a run has no such metric.
    """
    same = are_clients_shared([run for run, _ in found])
    return [_values_of_run(run, model, metric, split or run.tested_split, same) for run, model in found]


def are_clients_shared(runs: Sequence[RunFolder]) -> bool:
    """Whether equal keys mean the same client in all `runs`: their seeds draw from the same clients, if not the same of them.

    That is not so where the clients themselves are made from the run's seed. Runs of earlier versions have no keys, but numbers
    within a split: there, only where the data are the same to the bit.
    """
    if any(_makes_clients_by_seed(run.about) for run in runs):
        return False
    if all("key" in run.clients for run in runs):
        return True
    return len(_digests(runs)) == 1


def is_split_redrawn(runs: Sequence[RunFolder]) -> bool:
    """Whether seeds test different clients or, where they test training clients, different data. False for one seed."""
    with_table = [run for run in runs if run.has_client_table]
    if len({run.seed for run in with_table}) < 2:
        return False
    if not are_clients_shared(with_table):
        return True
    tested = {tuple(sorted(run.client_columns(run.tested_split).get("key", ()))) for run in with_table}
    return len(tested) > 1 or (tests_training_clients(with_table[0]) and len(_digests(with_table)) > 1)


def tests_training_clients(run: RunFolder) -> bool:
    """Whether the clients that a run is tested on are its training clients, with other examples or with the same."""
    data = run.about.get("experiment", {}).get("data", {})
    split = data.get("split")
    within = isinstance(split, dict) and "within" in split and "test" not in split and "test_path" not in data
    return run.tested_split != "test" or within


def _digests(runs: Sequence[RunFolder]) -> set[str]:
    """The distinct digests of the runs' data."""
    return {run.about.get("fingerprint", "") for run in runs}


def _values_of_run(run: RunFolder, model: EvaluatedModel, metric: str, split: str, same: bool) -> ByClient:
    """The values of one run by client key, in the order of keys; with `same`, keys do not hold the seed."""
    rows = run.client_columns(split, model.member)
    keys = rows.get("key", rows["client"]).tolist()
    column = rows.get(model.column(metric))
    values = np.full(len(keys), np.nan) if column is None else np.array([np.nan if v is None else v for v in column], float)
    ranked = sorted(zip(keys, values.tolist(), strict=True))
    return {key if same else (run.seed, key): value for key, value in ranked}


def _makes_clients_by_seed(about: Mapping[str, Any]) -> bool:
    """Whether the [data] section in a run's `run.json` makes other clients for every seed: seed = "run", or below client."""
    data = about.get("experiment", {}).get("data", {})
    client = data.get("client")
    return data.get("seed") == RUN or (isinstance(client, dict) and client.get("seed") == RUN)
