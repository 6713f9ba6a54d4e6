"""Which model of a run suits one client, computed where the client's data are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.data import Population, Scaling
from fedtail.data.scaling import SCALING, ScaledModule
from fedtail.data.tables import read_file
from fedtail.evaluation import choose
from fedtail.experiment.source import Trusted
from fedtail.runs.comparison import metric_direction, metric_unit
from fedtail.runs.models_of_run import finished_run, load_models


def choose_model(place: str | Path, data: str | Path, x: str | Sequence[str] = "x", y: str = "y",
                 trust: Trusted = (), metric: str = "error") -> dict[str, Any]:
    """A metric, by default the error, of every model of a finished run on one client's examples, and which model is the best.

    `place` is the run's folder, or one with a single run in it. `data` is an `.npz`, `.parquet` or `.csv` file, in which
    `x` and `y` name the arrays; inputs are scaled as those of the run were. Returns a dict: `chosen` (name), `index`, `examples`
    (their number), `metric`, `better`, `unit`, `models` (each with its `value`, which is also under the name of the metric, in
    percent for error rates) and `file`, the chosen model's path. The user's own modules are imported only from the folders and
    packages in `trust`.

    Raises ValueError where the run is not finished or there are several, FileNotFoundError where a run or the data are
    missing, RunError where a model file is damaged.
    """
    run = finished_run(place)
    task, modules = load_models(run, trust)
    if not Path(data).is_file():
        raise FileNotFoundError(f"there is no file {data}.")
    mine = Population.from_arrays(**read_file(data, x, y, None))                       # one client: this one
    if (run.path / SCALING).is_file():                                     # once for all models
        mine, modules = Scaling.load(run.path)(mine), [one.module for one in modules if isinstance(one, ScaledModule)]
    picked, unit = choose(modules, mine.client(0), task, metric), metric_unit(run, metric)
    scale = 100.0 if unit else 1.0
    models = [{"model": name, metric: scale * value, "value": scale * value, "chosen": k == picked.index}
              for k, (name, value) in enumerate(zip(run.members, picked.errors, strict=True))]
    return {"chosen": run.members[picked.index], "index": picked.index, "examples": mine.num_examples, "metric": metric,
            "better": metric_direction(run, metric), "unit": unit, "models": models, "file": str(run.models[picked.index])}
