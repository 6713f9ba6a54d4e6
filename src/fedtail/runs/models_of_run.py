"""The trained models of a run on disk, as modules: for `RunFolder.module`, `fedtail predict`, `export` and `choose`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.data.scaling import SCALING, ScaledModule, Scaling
from fedtail.errors import nearest_hint
from fedtail.experiment.source import Source, Trusted
from fedtail.experiment.task_section import plan_task
from fedtail.modules import call_module, cast_inputs
from fedtail.runs.files import RunError
from fedtail.runs.run_folder import RunFolder, find_runs
from fedtail.task import Task
from fedtail.types import Examples

AT_ONCE = 4096            # examples in one call of a module


def finished_run(place: str | Path) -> RunFolder:
    """The finished run in the folder `place`, which may also hold one somewhere below it.

    Raises FileNotFoundError where there is none, ValueError where there are several, or where it is not finished.
    """
    found = find_runs([place])
    if len(found) > 1:
        raise ValueError(f"{place} holds {len(found)} runs, one is needed: {', '.join(str(run.path) for run in found[:4])}.")
    if not found[0].is_finished:
        raise ValueError(f"{found[0].path} is not finished, so it has no models yet. Go on with `fedtail run ... --resume`.")
    return found[0]


def load_models(run: RunFolder, trust: Trusted = (), best: bool = False) -> tuple[Task, list[nn.Module]]:
    """The task of a finished run, and its trained modules, in evaluation mode, in the order of `run.members`.

    Where the run's inputs were scaled, the modules scale theirs first (`ScaledModule`), and so take inputs as they are. With
    `best` they are those that `keep_best` kept. The user's own modules are imported only from the folders and packages in
    `trust`. Raises ValueError where the run kept no best models, RunError where a model file is missing or damaged.

    This is the only place where the model files of a run become modules that people call: whatever a run does to inputs before
    its module sees them belongs around the module here, so that prediction, export and choice all have it.
    """
    from safetensors.torch import load_file

    places = model_files(run, best)
    plan = plan_task(Source.read(run.path / "experiment.toml", trust=trust))
    tasks = [plan.make(run.seed) for _ in run.members]
    for task, path in zip(tasks, places, strict=True):
        try:
            task.module.load_state_dict(load_file(path))
        except Exception as reason:      # whatever a damaged file makes the reader say
            raise RunError(f"{path} is missing or damaged ({str(reason).splitlines()[0][:100]}). `fedtail run ... --resume` "
                           "writes it again from the last checkpoint.") from reason
    scaling = Scaling.load(run.path) if (run.path / SCALING).is_file() else None
    modules = [task.module if scaling is None else scaling.before(task.module) for task in tasks]
    return tasks[0], [module.eval() for module in modules]


def model_files(run: RunFolder, best: bool = False) -> list[Path]:
    """The paths of the model files of a run, in the order of its members; with `best`, of those that `keep_best` kept.

    Raises ValueError where it kept none.
    """
    if not best:
        return run.models
    places = [place.with_name(place.name.replace("model", "best", 1)) for place in run.models]
    if not all(place.is_file() for place in places):
        raise ValueError(f"{run.path} kept no best models. Write keep_best = \"worst10\" below [evaluate] and run it again, or "
                         "take the last ones.")
    return places


def array_names(run: RunFolder) -> tuple[str | list[str], str]:
    """The names of inputs and of targets in the data that the run was trained on, "x" and "y" where its data have no names.

    Files with further examples are read by them unless others are given.
    """
    data = run.about["experiment"].get("data", {})
    return data.get("x", "x"), data.get("y", "y")


def input_width(run: RunFolder) -> int | None:
    """How many numbers an example has, where the run's inputs are one vector; None for others, and where it is not known."""
    shapes = [one["shape"] for one in (run.about.get("inputs") or {}).values()]
    return shapes[0][0] if len(shapes) == 1 and len(shapes[0]) == 1 else None


def member_index(run: RunFolder, model: int | str | None) -> int:
    """The position of a model of the run, from its position or name; None is the only one.

    Raises ValueError where the run has several and none was named, or none is called so.
    """
    if isinstance(model, int) and 0 <= model < len(run.members):
        return model
    if model is None and len(run.members) == 1:
        return 0
    if isinstance(model, str) and model in run.members:
        return run.members.index(model)
    came = f"{run.path} holds {len(run.members)} models" if model is None else f"{run.path} has no model {model!r}"
    hint = nearest_hint(model, run.members) if isinstance(model, str) else f"Name one of them: {', '.join(run.members)}."
    raise ValueError(f"{came}. {hint}")


def model_outputs(module: nn.Module, inputs: Examples) -> Tensor:
    """The outputs of a module in evaluation mode for all examples, on the CPU, computed in blocks of a few thousand."""
    if not isinstance(module, ScaledModule):                # which casts what it has scaled
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        inputs = cast_inputs(inputs, dtype)
    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
    blocks = [slice(first, first + AT_ONCE) for first in range(0, count, AT_ONCE)] or [slice(0, 0)]
    with torch.inference_mode():
        return torch.cat([call_module(module, _rows(inputs, block)) for block in blocks])


def predictions(outputs: Tensor, classes: bool) -> dict[str, Any]:
    """What outputs predict, as columns by name: `prediction` and, for `classes`, the `probability` of the predicted class.

    Classes are the largest of several outputs, whose probability is the softmax, or the sign of a single one, whose probability
    is the logistic function. Otherwise the prediction is the number itself; several are `prediction_0`, `prediction_1`, ...
    """
    from fedtail.losses import has_one_logit

    if classes and has_one_logit(outputs):
        logit = outputs.reshape(len(outputs)).double()
        chance = logit.sigmoid()
        return {"prediction": (logit > 0).long().numpy(), "probability": torch.where(logit > 0, chance, 1 - chance).numpy()}
    if classes:
        chance, place = outputs.double().softmax(-1).max(-1)
        return {"prediction": place.numpy(), "probability": chance.numpy()}
    if has_one_logit(outputs):
        return {"prediction": outputs.reshape(len(outputs)).numpy()}
    return {f"prediction_{k}": column.numpy() for k, column in enumerate(outputs.flatten(1).unbind(1))}


def named_predictions(columns: dict[str, Any], classes: list[str] | None) -> dict[str, Any]:
    """The columns of `predictions` with the names of the predicted `classes` in place of their numbers, where they have names."""
    import numpy as np

    if classes is None or "probability" not in columns:
        return columns
    return {**columns, "prediction": np.array(classes)[columns["prediction"].clip(max=len(classes) - 1)]}


def _rows(inputs: Examples, rows: slice) -> Examples:
    """The examples in these rows."""
    return {name: one[rows] for name, one in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
