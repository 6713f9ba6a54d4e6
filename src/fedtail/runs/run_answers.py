"""What a finished run says about its tail and about new clients: noise floors and promises, for result.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtail.data import Population
from fedtail.evaluation.evaluate import gives_rates
from fedtail.evaluation.example_values import ExampleValues, example_values
from fedtail.experiment.experiment import Experiment
from fedtail.runs.client_noise import PooledExamples, noise_of_columns, variance_column
from fedtail.runs.evaluated_models import personal_column
from fedtail.runs.held_out_promises import Identities, client_identities, held_out_promise, no_promise
from fedtail.runs.keep_best import selection_split
from fedtail.runs.measurements import ClientColumns
from fedtail.runs.metric_bounds import RATES, UNKNOWN, Bounds
from fedtail.task import Metric
from fedtail.training import Trained

Rows = dict[tuple[str, int], ClientColumns]      # by (split, position of the model)
ATTACKED = "a simulated attack corrupted some of the clients"


class RunAnswers:
    """Adds what floors need to the table over clients of a run, and makes the entries of `result.json` about its tail."""

    def __init__(self, experiment: Experiment, splits: dict[str, Population], tested: str, within: tuple[str, ...],
                 attacked: bool):
        """For the run of `experiment` on `splits`, judged on the split `tested`; `within` names splits of training clients.

        `attacked` says that a simulated attack corrupted some clients, who are marked in the table.
        """
        self.experiment, self.splits, self.tested, self.attacked = experiment, splits, tested, attacked
        self.within = within
        self._examples: dict[tuple[int, str], ExampleValues] = {}          # by position of the model and column

    @property
    def used_splits(self) -> dict[str, str]:
        """What each split that has a part in making the models did, by its name: it trained them, or chose the best."""
        used = {"train": "trained the model"}
        if self.experiment.evaluate.keep_best is not None:
            used[selection_split(self.splits, self.tested)] = "chose the best model (keep_best)"
        return used

    def add_variances(self, rows: Rows, trained: Trained) -> None:
        """Add how each metric varies over each tested client's examples, in place: the columns "loss_variance" and so on.

        The values of single examples are remembered for `result_entries`, and not written.
        """
        for member in range(len(trained.modules)):
            for personal in (False, True) if self._is_personal(trained, member) else (False,):
                found = example_values(trained, self.splits[self.tested], self.experiment.evaluation_engine, member, personal)
                for name, examples in found.items():
                    column = personal_column(name) if personal else name
                    rows[self.tested, member] |= {variance_column(column): examples.variance.numpy()}
                    self._examples[member, column] = examples

    def result_entries(self, rows: Rows, trained: Trained) -> dict[str, Any]:
        """The entries of `result.json`, lists over models of dicts by metric: `noise`, `personal_noise` and `promises`.

        See `noise_of_columns` and `held_out_promise`. `personal_noise` is there where personal models were evaluated.
        """
        tables = [self._benign_rows(rows[self.tested, member]) for member in range(len(trained.modules))]
        metrics = {metric.name: metric.better for metric in trained.task.all_metrics}
        bounds = {metric.name: metric.bounds for metric in trained.task.all_metrics}
        rates = gives_rates(trained.task, self.splits[self.tested])
        bounds["error"] = RATES if rates else UNKNOWN

        def noise_of(member: int, column: str, name: str) -> dict[str, Any]:
            """The noise of the metric `name`, whose values for one model are in this column."""
            return noise_of_columns(tables[member], column, rates and name == "error", metrics[name],
                                    self._pooled_examples(rows[self.tested, member], member, column))

        def noise(personal: bool) -> list[dict[str, Any]]:
            """For each model, the noise of each metric; {} for a model without personal ones, where those are wanted."""
            return [{name: noise_of(member, personal_column(name) if personal else name, name) for name in metrics}
                    if not personal or self._is_personal(trained, member) else {} for member in range(len(tables))]

        own = [self._is_personal(trained, member) for member in range(len(tables))]
        who = client_identities(self.experiment.data, self.splits)
        return {"noise": noise(False), **({"personal_noise": noise(True)} if any(own) else {}),
                "promises": [{metric.name: self._promise(metric, table, who, bounds[metric.name])
                              for metric in trained.task.all_metrics} for table in tables]}

    def _promise(self, metric: Metric, table: ClientColumns, who: Identities, bounds: Bounds) -> dict[str, Any]:
        """What the values of the tested clients under one model promise about new clients, or why they do not.

        `table` has them in columns, and `who` says which client each is. A metric of whole clients is not defined for those who
        have a loss and no value.
        """
        if self.attacked:
            return no_promise(ATTACKED)
        values = table[metric.name]
        defined = np.isfinite(values) | ~np.isfinite(table["loss"]) if metric.per == "client" else np.ones(len(values), bool)
        return held_out_promise(values.tolist(), self.tested, who, self.used_splits, bounds, metric.better, defined.tolist())

    def _is_personal(self, trained: Trained, member: int) -> bool:
        """Whether personal models beside the model at position `member` were evaluated on the tested split."""
        return self.tested in self.within and trained.algorithm.members[member].personal.trains

    def _pooled_examples(self, columns: ClientColumns, member: int, column: str) -> PooledExamples | None:
        """A metric of single examples of benign clients, whose rows follow each other; None for a metric per client."""
        found = self._examples.get((member, column))
        if found is None:
            return None
        values, owner = found.values.numpy(), found.owner.numpy()
        benign = ~columns["corrupted"].astype(bool) if self.attacked else np.ones(len(columns["size"]), bool)
        kept = benign[owner]
        return PooledExamples(values[kept], (np.cumsum(benign) - 1)[owner[kept]])

    def _benign_rows(self, columns: ClientColumns) -> ClientColumns:
        """The columns without corrupted clients."""
        if not self.attacked:
            return columns
        benign = ~columns["corrupted"].astype(bool)
        return {name: values[benign] for name, values in columns.items()}
