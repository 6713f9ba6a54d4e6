"""Clients that judge the models of a run while it trains, and nothing else: for its history, its best model and its end."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedtail.data.population import Population
from fedtail.data.population_kind import check_is_population
from fedtail.directions import bad_percentile_name, wrong_percentile_text
from fedtail.divergence import DivergedWarning
from fedtail.engine.engine import Engine
from fedtail.evaluation.best_by import BestBy, check_whole_number
from fedtail.evaluation.evaluate import evaluate

if TYPE_CHECKING:
    from fedtail.trained import Trained

CALLED = "validation"


@dataclass(frozen=True)
class Validation:
    """For `train(validation=...)`: evaluates the models every so many rounds on the validation clients of `population`.

    The statistics go into `result.history`, `result.best` is the run at its best by `statistic` ("loss.mean", "error.worst10",
    ...; of a family, each model at its own best), and with a `patience` the run ends after so many evaluations in a row without
    a better value. `every` counts the rounds of the whole run, also of a resumed one. `engine` says how it is computed.

    It sees single clients' losses, in the simulator, off the ledger. The clients that choose are `result.selected_on`, by key,
    and `result.selected_names`, where they have names: results of the chosen model on them are too good, and no promise about
    new clients may use them.
    """

    population: Population
    every: int = 1
    statistic: str = "loss.mean"
    patience: int | None = None
    engine: Engine = field(default=Engine(), repr=False)

    def __post_init__(self) -> None:
        """Raise TypeError where `population` is none; FieldError for an unknown statistic, or `every` or `patience` below 1."""
        check_is_population(self.population)
        check_whole_number("every", self.every)
        BestBy.named(self.statistic, self.patience)

    @property
    def best_by(self) -> BestBy:
        """How evaluations are compared."""
        return BestBy.named(self.statistic, self.patience)

    def numbers(self, trained: Trained) -> list[dict[str, Any]]:
        """The statistics of every model of a run on the validation clients, called "validation.error.mean" and so on.

        They are the mean, 90th percentile (10th where higher is better) and worst tenth of every metric, and the statistic by
        which the best is chosen. Raises KeyError where that is of a metric which is not evaluated.
        """
        by, found = self.best_by, []
        for module in trained.modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergedWarning)      # training says it once, at its end
                evaluation = evaluate(module, self.population, trained.task, engine=self.engine)
            shown = {f"{CALLED}.{metric}.{name}": one.statistic(name) for metric, one in evaluation.distributions.items()
                     for name in ("mean", bad_percentile_name(one.better), "worst10")}
            found.append({**shown, f"{CALLED}.{by.name}": by.value(evaluation)})
        return found

    def better(self, trained: Trained) -> str:
        """Which values of the chosen metric are better, "lower" or "higher"; raises ValueError where it is not a metric.

        Also where the statistic is a percentile of the clients who do well.
        """
        kinds = {metric.name: metric.better for metric in trained.task.all_metrics}
        if self.best_by.metric not in kinds:
            raise ValueError(f"statistic is about {self.best_by.metric}, which is not evaluated. There are {', '.join(kinds)}.")
        better = kinds[self.best_by.metric]
        if refusal := wrong_percentile_text(self.best_by.metric, self.best_by.statistic, better):
            raise ValueError(f"statistic: {refusal}")
        return better

    @property
    def column(self) -> str:
        """The column of the history by which the best is chosen, such as "validation.loss.mean"."""
        return f"{CALLED}.{self.best_by.name}"
