"""Which model of a run suits one client, computed where the client's data are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedtail.data import Population, Scaling
from fedtail.data.scaling import SCALING
from fedtail.data.tables import read_file
from fedtail.evaluation import choose
from fedtail.experiment.source import Source, Trusted
from fedtail.experiment.task_section import plan_task
from fedtail.runs.comparison import metric_direction, metric_unit
from fedtail.runs.files import RunError
from fedtail.runs.run_folder import RunFolder, find_runs
from fedtail.task import Task


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
    found = find_runs([place])
    if len(found) > 1:
        raise ValueError(f"{place} holds {len(found)} runs, one is needed: {', '.join(str(run.path) for run in found[:4])}.")
    run = found[0]
    if not run.is_finished:
        raise ValueError(f"{run.path} is not finished, so it has no models yet. Go on with `fedtail run ... --resume`.")
    task, modules = load_models(run, trust)
    if not Path(data).is_file():
        raise FileNotFoundError(f"there is no file {data}.")
    mine = Population.from_arrays(**read_file(data, x, y, None))                       # one client: this one
    mine = Scaling.load(run.path)(mine) if (run.path / SCALING).is_file() else mine
    picked, unit = choose(modules, mine.client(0), task, metric), metric_unit(run, metric)
    scale = 100.0 if unit else 1.0
    models = [{"model": name, metric: scale * value, "value": scale * value, "chosen": k == picked.index}
              for k, (name, value) in enumerate(zip(run.members, picked.errors, strict=True))]
    return {"chosen": run.members[picked.index], "index": picked.index, "examples": mine.num_examples, "metric": metric,
            "better": metric_direction(run, metric), "unit": unit, "models": models, "file": str(run.models[picked.index])}


def load_models(run: RunFolder, trust: Trusted = ()) -> tuple[Task, list[nn.Module]]:
    """The task of a finished run, and its trained modules, in evaluation mode, in the order of `run.members`.

    The user's own modules are imported only from the folders and packages in `trust`. Raises RunError where a model file is
    missing or damaged.
    """
    from safetensors.torch import load_file

    plan = plan_task(Source.read(run.path / "experiment.toml", trust=trust))
    tasks = [plan.make(run.seed) for _ in run.members]
    for task, path in zip(tasks, run.models, strict=True):
        try:
            task.module.load_state_dict(load_file(path))
        except Exception as reason:      # whatever a damaged file makes the reader say
            raise RunError(f"{path} is missing or damaged ({str(reason).splitlines()[0][:100]}). `fedtail run ... --resume` "
                           "writes it again from the last checkpoint.") from reason
    return tasks[0], [task.module.eval() for task in tasks]
