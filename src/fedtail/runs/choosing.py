"""Which model of a run suits one client, computed where the client's data are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.data import Population
from fedtail.data.tables import checked_suffix
from fedtail.evaluation import choose
from fedtail.experiment.source import Trusted
from fedtail.runs.models_of_run import finished_run, load_models


def choose_model(place: str | Path, data: str | Path, x: str | Sequence[str] = "x", y: str = "y",
                 trust: Trusted = ()) -> dict[str, Any]:
    """The error of every model of a finished run on one client's examples, and which model has the smallest.

    `place` is the run's folder, or one with a single run in it. `data` is an `.npz` or `.parquet` file, in which `x` and `y`
    name the arrays. Returns a dict: `chosen` (name), `index`, `examples` (their number), `unit`, `models` (each with its
    error, in percent for rates) and `file`, the chosen model's path. The user's own modules are imported only from the
    folders and packages in `trust`.

    Raises ValueError where the run is not finished or there are several, FileNotFoundError where a run or the data are
    missing, RunError where a model file is damaged.
    """
    run = finished_run(place)
    task, modules = load_models(run, trust)
    if not Path(data).is_file():
        raise FileNotFoundError(f"there is no file {data}.")
    read = Population.from_parquet if checked_suffix(data) == ".parquet" else Population.from_npz
    mine = read(data, x, y, None)                       # one client: this one
    picked = choose(modules, mine.client(0), task)
    scale = 100.0 if run.about["rates"] else 1.0
    models = [{"model": name, "error": scale * error, "chosen": k == picked.index}
              for k, (name, error) in enumerate(zip(run.members, picked.errors, strict=True))]
    return {"chosen": run.members[picked.index], "index": picked.index, "examples": mine.num_examples,
            "unit": "%" if run.about["rates"] else "", "models": models, "file": str(run.models[picked.index])}
