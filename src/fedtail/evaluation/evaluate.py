"""Losses, errors and metrics of every client under one model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from fedtail.data.arrays import input_tensors
from fedtail.data.population import Population
from fedtail.data.population_kind import check_is_population
from fedtail.divergence import (
    DivergedWarning,
    LossGap,
    WorseThanConstantWarning,
    constant_text,
    exploded_text,
    has_exploded,
    large_targets_text,
    loss_gap,
    not_finite_text,
)
from fedtail.engine.engine import Engine, resolve_engine
from fedtail.engine.kernel_choice import evaluation_kernel
from fedtail.evaluation.client_values import client_values_in_blocks
from fedtail.evaluation.constant import constant_values
from fedtail.evaluation.distribution import Distribution
from fedtail.evaluation.views import evaluation_frame, evaluation_html, evaluation_table, evaluation_text, worst_profiles
from fedtail.losses import default_error, misclassification, wrong_labels
from fedtail.task import Metric, Task
from fedtail.training import Trained

if TYPE_CHECKING:
    import pandas

    from fedtail.evaluation.client_profiles import ClientProfiles


@dataclass(frozen=True, repr=False)
class Evaluation:
    """A distribution over clients for the loss, the error and each metric: `evaluation["error"].worst(0.1)`.

    Weights are those that `evaluate` was told; `by_client` and `by_example` have all clients, or all examples, count the same:
    `1 - evaluation.by_example.error.mean()` is the accuracy over data points, with `by_client` it is that over devices.
    """

    distributions: Mapping[str, Any]      # Distribution; ClientHistogram where only sums over clients are known
    personal: Evaluation | None = None    # of personal models, on the same examples of the same clients; None: there are none
    has_model: Tensor | None = field(default=None, compare=False)      # of personal models, (clients,) bool: who has one
    constant: Evaluation | None = None    # of a constant prediction, fitted to training clients; None where it is not known
    population: Population | None = field(default=None, compare=False)      # its clients; None where they are not known

    def __getitem__(self, name: str) -> Distribution:
        """The distribution of the metric `name` over clients.

        A `Distribution`, or a `ClientHistogram` after a federated evaluation. Raises KeyError, which lists the metrics there
        are, for another name.
        """
        if name not in self.distributions:
            raise KeyError(f"no metric {name!r}; there are {', '.join(self.distributions)}.")
        return self.distributions[name]

    @property
    def loss(self) -> Distribution:
        """The distribution of the loss over clients; raises KeyError where the loss was not evaluated."""
        return self["loss"]

    @property
    def error(self) -> Distribution:
        """The distribution of the error over clients; raises KeyError where the error was not evaluated."""
        return self["error"]

    @property
    def by_client(self) -> Evaluation:
        """An evaluation with these values and equal weight for every client: over devices, as [Li23, table 4.7] says."""
        return self._with_each(lambda one: one.by_client())

    @property
    def by_example(self) -> Evaluation:
        """An evaluation with these values and clients weighted by their number of examples: means are over all data points.

        Raises ValueError where these numbers are not known, as after an evaluation on nodes.
        """
        return self._with_each(lambda one: one.by_example())

    def of_clients(self, chosen: Tensor) -> Evaluation:
        """The evaluation of some of the clients: `chosen` is a mask, (clients,) bool, or positions.

        With the mask ~attack.corrupted(population) it is that of benign clients. Raises TypeError after a federated evaluation,
        which knows no single client.
        """
        if not all(isinstance(one, Distribution) for one in self.distributions.values()):
            raise TypeError("a federated evaluation knows sums over clients only, so that none can be left out.")
        own = None if self.personal is None else self.personal.of_clients(chosen)
        has = None if self.has_model is None else self.has_model[chosen]
        constant = None if self.constant is None else self.constant.of_clients(chosen)
        some = None if self.population is None else self.population.select(chosen)
        return Evaluation({name: one.of_clients(chosen) for name, one in self.distributions.items()}, own, has, constant, some)

    def _with_each(self, change: Callable[[Any], Any]) -> Evaluation:
        """A copy in which every distribution, those of personal models too, is what `change` makes of it."""
        own, constant = (None if one is None else one._with_each(change) for one in (self.personal, self.constant))
        made = {name: change(one) for name, one in self.distributions.items()}
        return Evaluation(made, own, self.has_model, constant, self.population)

    def table(self) -> str:
        """Aligned text: one line for each metric, one column for each statistic over clients.

        Metrics of personal models follow in lines of their own. The columns are mean, std, p10, p50, p90, worst10, worst5 and
        best10, and where the numbers of examples are known the mean over all examples. The corner says how many clients there
        are, by the first metric; a metric that is not defined for all of them says for how many. The column `constant` has the
        mean of a constant prediction, where that is known. Of fewer than 20 clients there are the worst and the best instead of
        percentiles and tails, and below them every client by name, worst first. Below an error rate of clients of equal weight is
        its noise floor: what its tail would be if all clients had the same error.
        """
        return evaluation_table(self)

    def worst_clients(self, count: int = 5, metric: str = "error") -> ClientProfiles:
        """The clients that do worst by a metric, the worst first, and what is special about each: size, labels, features.

        Clients whose value is NaN come first; those for whom the metric is not defined are left out. Raises ValueError where only
        sums over clients are known.
        """
        return worst_profiles(self, count, metric)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with a row for each client: its name, number of examples, and value of every metric.

        Values of personal models are in "personal_error" and so on. Raises ImportError, with what to install, where pandas is
        missing, and ValueError where only sums over clients are known.
        """
        return evaluation_frame(self)

    def __repr__(self) -> str:
        """The number of clients, and the mean and worst tenth of every metric, in one line."""
        return evaluation_text(self)

    def _repr_html_(self) -> str:
        """The statistics over clients as a table, for notebooks."""
        return evaluation_html(self)


def evaluate(model: Trained | nn.Module, population: Population, task: Task | None = None, weighted: bool = False,
             engine: Engine = Engine(), **old: Any) -> Evaluation:
    """Evaluate a trained model on every client of a population: the distribution of loss, error and metrics over clients.

    `weighted` weights clients by mass, as in training; by default all have equal weight, as for test clients. `task` gives
    the loss, the error and the metrics, by default those of training. `engine` sets device, dtype and workers; its `kernel`
    is not used here. `old` takes the engine's settings as keywords, which is deprecated. Raises what `Task.check` raises
    where model and data do not fit.

    Beside a `Trained` model of a simulation, `constant` of the result is the evaluation of the prediction that ignores the
    inputs (majority class, mean), fitted to the training clients. Warns (`DivergedWarning`) where the loss of a client is not
    finite or the mean loss is more than 1000 times that of the constant prediction, and (`WorseThanConstantWarning`) where it is
    above it by more than 1% and beyond chance: 2 standard errors of the difference over clients, more for few of them.
    """
    engine = resolve_engine(engine, old, "evaluate")
    check_is_population(population)
    task = task_with_model(model, task)
    check_task_once(task, population)
    params = task.params().to(engine.device, engine.dtype)
    kernel = evaluation_kernel(task, params.device, params.dtype, population, engine.precision)
    values = client_values_in_blocks(kernel, params, population, task.all_metrics, engine.workers)
    found = evaluation_from_values(task, values, population, weighted)
    if isinstance(model, Trained) and model.constant is not None:
        found = replace(found, constant=evaluate_constant(task, model.constant, population, weighted))
    _warn_of_divergence(found)
    return found


def evaluate_constant(task: Task, constant: Tensor, population: Population, weighted: bool = False) -> Evaluation:
    """The evaluation of constant outputs on every client of a population; `constant` is that of `Trained`.

    `weighted` weights clients by mass, else all have equal weight.
    """
    return evaluation_from_values(task, constant_values(task, constant, population), population, weighted)


def _warn_of_divergence(found: Evaluation) -> None:
    """Warn the caller of `evaluate` where a client's loss is not finite, or the mean loss is above that of the constant."""
    lost, loss = int((~found.loss.values.isfinite()).sum()), found.loss.mean()
    constant = None if found.constant is None else found.constant.loss.mean()
    if lost:
        text = f"{not_finite_text(lost, len(found.loss))}{large_targets_text(constant)}"
        warnings.warn(text, DivergedWarning, stacklevel=3)
    elif constant is not None and has_exploded(loss, constant):
        warnings.warn(f"{exploded_text(loss, constant)}{large_targets_text(constant)}", DivergedWarning, stacklevel=3)
    elif found.constant is not None and constant is not None and gap_to_constant(found, found.constant).is_a_finding(constant):
        tail = (found.loss.worst(0.1), found.constant.loss.worst(0.1))
        warnings.warn(constant_text(loss, constant, tail), WorseThanConstantWarning, stacklevel=3)


def gap_to_constant(found: Evaluation, constant: Evaluation) -> LossGap:
    """How far the mean loss of an evaluation is above that of a `constant` prediction, paired by client.

    Both are of the same clients in the same order, and have the weights of `found`.
    """
    mass = None if found.loss.mass is None else found.loss.mass.cpu().numpy()
    return loss_gap(found.loss.values.cpu().numpy(), constant.loss.values.cpu().numpy(), mass)


def task_with_model(model: Trained | nn.Module, task: Task | None) -> Task:
    """A copy of `task` with the model as its module.

    Without a task: a copy of the one the `Trained` model was trained with, or a plain `Task` around the module.
    """
    if isinstance(model, Trained):
        return replace(task or model.task, module=model.module)
    return Task(model) if task is None else replace(task, module=model)


_CHECKED: WeakKeyDictionary[Population, tuple[Any, ...] | None] = WeakKeyDictionary()      # the form of the task checked last


def check_task_once(task: Task, population: Population) -> None:
    """Check that the task fits the population, and raise what `task.check` raises.

    The check is skipped where the last one on this population was of a task of the same form (classes, shapes and functions)
    on unchanged data. A task that passes is remembered until the population is garbage-collected.
    """
    check_is_population(population)
    form = _task_form(task, population)
    if form is None or _CHECKED.get(population) != form:
        task.check(population)
        _CHECKED[population] = form


def _task_form(task: Task, population: Population) -> tuple[Any, ...] | None:
    """A tuple that changes whenever the outcome of `task.check` may change.

    It holds the module's classes and the shapes of its parameters, the metrics, and the version counters of the population's
    tensors, which PyTorch raises at every write in place. Classes and functions are held by weak references; None where one
    does not allow that, or a lazy module has no shapes yet.
    """
    module, data = task.module, (*input_tensors(population.inputs), population.targets)
    try:
        return (*(ref(type(part)) for part in module.modules()),
                *((name, t.shape, t.dtype, t.requires_grad) for name, t in (*module.named_parameters(), *module.named_buffers())),
                *((m.name, m.per, ref(m.function)) for m in task.all_metrics),
                *(0 if t.is_inference() else t._version for t in data))
    except (TypeError, RuntimeError):      # an object without weak references; a module that has no shapes yet
        return None


def evaluation_from_values(task: Task, values: dict[str, Tensor], population: Population, weighted: bool = False) -> Evaluation:
    """An evaluation from the values of the clients of `population`, `values[name]` (clients,), for every metric of the task.

    `weighted` weights clients by their mass, else all have equal weight. A metric per client is not defined for those whose value
    is NaN while their loss is a number: they are left out of it.
    """
    mass = population.mass if weighted else None
    rates = gives_rates(task, population)
    return Evaluation({m.name: Distribution(values[m.name], mass, m.better, rates and m.name == "error", population.size,
                                            _defined_clients(m, values)) for m in task.all_metrics}, population=population)


def _defined_clients(metric: Metric, values: Mapping[str, Tensor]) -> Tensor | None:
    """For which clients a metric is defined, (clients,) bool, by its and the loss's `values`; None where it is for all."""
    if metric.per == "example":
        return None
    undefined = values[metric.name].isnan() & ~values["loss"].isnan()
    return ~undefined if bool(undefined.any()) else None


def gives_rates(task: Task, population: Population) -> bool:
    """Whether the task's error on this population is a misclassification rate in [0, 1], whose accuracy is 1 - error.

    So it is where the error is `misclassification`, `wrong_labels` of one label for each example, or the default error and the
    population's targets are integers.
    """
    classes = task.error is default_error and not population.targets.is_floating_point()
    one_label = task.error is wrong_labels and population.targets[:1].numel() == 1
    return classes or one_label or task.error is misclassification
