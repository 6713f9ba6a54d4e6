"""The task section: the model, its loss and error, and further metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedtail.errors import FieldError, nearest_hint
from fedtail.experiment.part_tables import SLOTS, PartPlan, checked_arguments, parameters_by_name, plan_part, toml_value
from fedtail.experiment.source import Source
from fedtail.metrics import ready_made
from fedtail.modules import set_precision
from fedtail.task import Metric, Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TaskPlan:
    """The checked [task] section: a task whose module is made anew for every seed."""

    module: PartPlan
    rest: dict[str, Any]
    dtype: str = "float32"

    @property
    def metric_names(self) -> list[str]:
        """The names of all metrics of the task: "loss", "error" and those of the section."""
        return ["loss", "error", *(metric.name for metric in self.rest.get("metrics", ()))]

    def make(self, seed: int) -> Task:
        """The task with a new module, initialised by `seed` and in the precision of the section.

        All methods with one seed start from equal modules. PyTorch's global generators are seeded for this; that of the CPU
        is restored afterwards. Raises ExperimentError where the module's part returns no torch.nn.Module, or where the module
        or task cannot be made.
        """
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            module = self.module.make()
        if not isinstance(module, torch.nn.Module):
            raise self.module.source.error_at(self.module.key, f"{self.module.name} gives a {type(module).__name__}, a "
                                                               "torch.nn.Module is needed.")
        whole = {"module": set_precision(module, DTYPES[self.dtype]), **self.rest}
        return PartPlan("Task", Task, whole, self.module.source, ("task",)).make()

    def as_table(self) -> dict[str, Any]:
        """The [task] section with every field, defaults included, as a dict that can be written to an experiment file."""
        rest = {"loss": "default_loss", "error": "default_error", "buffers": "refused"}      # which follow module and targets
        rest |= {name: toml_value(value) for name, value in self.rest.items() if name != "metrics"}
        metrics = [_metric_in_file(metric) for metric in self.rest.get("metrics", ())]
        return {"dtype": self.dtype, **rest, **({"metrics": metrics} if metrics else {}), "module": self.module.as_table()}


def plan_task(source: Source) -> TaskPlan:
    """The `TaskPlan` of the [task] section of `source`, checked; the module is made later, for each seed.

    Raises ExperimentError, which names the key at fault, for an unknown field, a missing module or a value that does not fit.
    """
    table = source.section_table("task")
    for name in table:
        if name not in ("dtype", *parameters_by_name(Task)):
            hint = nearest_hint(name, ["dtype", *parameters_by_name(Task)])
            raise source.error_at(("task", name), f"[task] has no field {name!r}. {hint}")
    module = table.pop("module", None)
    if module is None:
        raise source.error_at(("task",), "which model? Write [task.module] and below it part = \"SoftmaxRegression\", "
                                         f"features = 64, classes = 10. There are {', '.join(SLOTS['module'].candidates())}; "
                                         "your own is written \"module:Class\".")
    dtype = table.pop("dtype", "float32")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise source.error_at(("task", "dtype"), FieldError("dtype", f"one of {', '.join(DTYPES)}", dtype))
    listed = table.pop("metrics", [])
    if not isinstance(listed, list):
        raise source.error_at(("task", "metrics"), FieldError("metrics", "a list of names and tables", listed,
                                                              'Write metrics = ["roc_auc"].'))
    metrics = tuple(_build_metric(source, index, entry) for index, entry in enumerate(listed))
    rest = checked_arguments(source, ("task",), table, Task, "[task]", skip=("module", "metrics"))
    return TaskPlan(plan_part(source, ("task", "module"), module, SLOTS["module"]), {**rest, "metrics": metrics}, dtype)


def _metric_in_file(metric: Metric) -> Any:
    """A metric as a file has it: the name of a ready-made one, else a table."""
    known = ready_made()
    if metric.name in known and metric == known[metric.name]():
        return metric.name
    return {name: value for name, value in toml_value(metric).items() if name != "part"}


def _build_metric(source: Source, index: int, table: Any) -> Metric:
    """The `Metric` described by `table`, entry number `index` of the list `metrics` in [task] of `source`.

    It is the name of a metric of `fedtail.metrics`, or a table with the fields of a `Metric`. Raises ExperimentError, which names
    the key at fault, where it is neither or a field does not fit.
    """
    known = ready_made()
    if isinstance(table, str) and table in known:
        return known[table]()
    if isinstance(table, str):
        raise source.error_at(("task", "metrics"), f"fedtail.metrics has no {table!r}. {nearest_hint(table, known)} Your own is "
                                                   f'{{ name = "{table}", function = "mine:{table}", per = "client" }}.')
    if not isinstance(table, dict):
        raise source.error_at(("task", "metrics"), f"a metric is a name or a table, got {table!r}. Write \"roc_auc\", or "
                                                   '{ name = "auc", function = "mine:auc", per = "client", better = "higher" }.')
    key = ("task", "metrics", index)
    return PartPlan("Metric", Metric, checked_arguments(source, key, table, Metric, "a metric"), source, key).make()
