"""Stopping a run where its model no longer gets better on validation examples."""

from __future__ import annotations

import math
from numbers import Integral

from fedtail.data.population import Population
from fedtail.directions import better_statistic_values, is_better
from fedtail.engine.engine import Engine
from fedtail.errors import FieldError
from fedtail.evaluation.distribution import parse_keep_best
from fedtail.evaluation.evaluate import evaluate
from fedtail.training import Progress, Trained


class EarlyStopping:
    """For `on_round`: stops a run after `patience` evaluations without a better value, and keeps the run as it was at its best.

    The shared model is evaluated every so many rounds (`every`) on `population`, the clients' validation examples, by one
    statistic over clients: "loss.mean", "error.worst10", ... `best` is then the run at its best evaluation, to be evaluated,
    fine-tuned or resumed, and `value` its statistic. It sees single clients' losses, in the simulator, off the ledger.
    """

    def __init__(self, population: Population, patience: int = 5, every: int = 1, statistic: str = "loss.mean",
                 engine: Engine = Engine()):
        """Set what is evaluated, how often, and by which statistic; `engine` says how.

        Raises FieldError for an unknown statistic, and where `patience` or `every` is not a whole number, at least 1.
        """
        for name, value in (("patience", patience), ("every", every)):
            if not isinstance(value, Integral) or value < 1:
                raise FieldError(name, "a whole number, at least 1", value)
        self.population, self.patience, self.every, self.engine = population, patience, every, engine
        self.metric, self.statistic = parse_keep_best(statistic)
        self.best: Trained | None = None
        self.value, self.waited = math.nan, 0

    def __call__(self, progress: Progress) -> bool:
        """Evaluate the run after a round where it is time to; True where it is to stop."""
        if progress.round % self.every:
            return False
        distribution = evaluate(progress.trained, self.population, engine=self.engine)[self.metric]
        value = distribution.statistic(self.statistic)
        better = is_better(value, self.value, better_statistic_values(self.statistic, distribution.better))
        if math.isfinite(value) and (self.best is None or better):
            self.best, self.value, self.waited = progress.trained, value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience
