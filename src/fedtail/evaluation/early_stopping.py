"""Stopping a run where its model no longer gets better on validation examples."""

from __future__ import annotations

import math

from fedtail.data.population import Population
from fedtail.engine.engine import Engine
from fedtail.evaluation.best_by import BestBy, check_whole_number
from fedtail.evaluation.evaluate import evaluate
from fedtail.training import Progress, Trained


class EarlyStopping:
    """For `on_round`: stops a run after `patience` evaluations without a better value, and keeps the run as it was at its best.

    The shared model is evaluated every so many rounds (`every`) on `population`, the clients' validation examples, by one
    statistic over clients: "loss.mean", "error.worst10", ... `best` is then the run at its best evaluation, to be evaluated,
    fine-tuned or resumed, and `value` its statistic. It sees single clients' losses, in the simulator, off the ledger.
    `train(validation=Validation(...))` does this too, for families as well, and writes it into the history.
    """

    def __init__(self, population: Population, patience: int = 5, every: int = 1, statistic: str = "loss.mean",
                 engine: Engine = Engine()):
        """Set what is evaluated, how often, and by which statistic; `engine` says how.

        Raises FieldError for an unknown statistic, and where `patience` or `every` is not a whole number, at least 1.
        """
        for name, value in (("patience", patience), ("every", every)):
            check_whole_number(name, value)
        self.population, self.every, self.engine = population, every, engine
        self.best_by = BestBy.named(statistic, patience)
        self.best: Trained | None = None
        self.value, self.waited = math.nan, 0

    def __call__(self, progress: Progress) -> bool:
        """Evaluate the run after a round where it is time to; True where it is to stop."""
        if progress.round % self.every:
            return False
        found = evaluate(progress.trained, self.population, engine=self.engine)
        value, before = self.best_by.value(found), None if self.best is None else self.value
        if self.best_by.is_better(value, before, found[self.best_by.metric].better):
            self.best, self.value, self.waited = progress.trained, value, 0
        else:
            self.waited += 1
        return self.best_by.patience is not None and self.waited >= self.best_by.patience
