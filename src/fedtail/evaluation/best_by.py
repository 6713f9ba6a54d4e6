"""Which of a run's evaluations is its best, by one statistic over clients, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from fedtail.directions import better_statistic_values, is_better
from fedtail.errors import FieldError
from fedtail.evaluation.distribution import parse_keep_best


@dataclass(frozen=True)
class BestBy:
    """Compares the evaluations of a run by one statistic over clients, such as the error of the worst tenth.

    `patience` is the number of evaluations in a row without a better value after which a run may end; None: it never does.
    """

    metric: str
    statistic: str
    patience: int | None = None

    def __post_init__(self) -> None:
        """Raise FieldError where `patience` is neither None nor a whole number, at least 1."""
        if self.patience is not None:
            check_whole_number("patience", self.patience)

    @classmethod
    def named(cls, name: str, patience: int | None = None) -> BestBy:
        """The comparison by "metric.statistic", such as "loss.mean", or by a statistic of the error, such as "worst10".

        Raises FieldError for an unknown statistic, and for a `patience` below 1.
        """
        return cls(*parse_keep_best(name), patience)

    @property
    def name(self) -> str:
        """The metric and the statistic, such as "error.worst10"."""
        return f"{self.metric}.{self.statistic}"

    def value(self, evaluation: Any) -> float:
        """The statistic of an evaluation; raises KeyError, which lists the metrics there are, where it has not the metric."""
        return evaluation[self.metric].statistic(self.statistic)

    def is_better(self, value: float, than: float | None, better: str) -> bool:
        """Whether `value` is finite and strictly better than the best so far, None where there is none.

        `better`, "lower" or "higher", says which values of the metric are better.
        """
        return math.isfinite(value) and (than is None or is_better(value, than, better_statistic_values(self.statistic, better)))

    def evaluations_since_best(self, values: Iterable[float], better: str) -> int:
        """How many evaluations, given their values in order, followed the best one; all of them where none was finite."""
        best, waited = None, 0
        for value in values:
            found = self.is_better(value, best, better)
            best, waited = (value, 0) if found else (best, waited + 1)
        return waited

    def is_over(self, of_models: Sequence[Sequence[float]], better: str) -> bool:
        """Whether waiting has ended for every model, given the values of its evaluations in order."""
        return self.patience is not None and all(
            self.evaluations_since_best(values, better) >= self.patience for values in of_models)

    @property
    def reason(self) -> str:
        """Why a run ended that waited in vain, as a phrase."""
        return f"{self.name} was no better in {self.patience} evaluations in a row"


def check_whole_number(name: str, value: Any) -> None:
    """Raise FieldError about the field `name` unless `value` is a whole number, at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise FieldError(name, "a whole number, at least 1", value)
