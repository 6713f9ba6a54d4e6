"""What a run does with each of its rounds once it is trained: history, validation, log, progress bar, the caller's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedtail.algorithm import member_states
from fedtail.directions import bad_percentile_name
from fedtail.history import History, Row, round_rows
from fedtail.interruption import Interruption, watch_for_interrupt
from fedtail.progress_bar import ProgressBar
from fedtail.trained import Progress, Trained

if TYPE_CHECKING:
    from fedtail.evaluation.best_by import BestBy
    from fedtail.fleet import RoundView
    from fedtail.loggers.base import LoggedRun, Logger, RunLog

OnRound = Callable[[Progress], bool | None]


class RunValidation(Protocol):
    """How the models of a run are evaluated on clients of their own: see `fedtail.evaluation.Validation`."""

    @property
    def population(self) -> Any:
        """The validation clients; at least their `key`."""
        ...

    @property
    def every(self) -> int:
        """The number of rounds from one evaluation to the next."""
        ...

    @property
    def best_by(self) -> BestBy:
        """How evaluations are compared."""
        ...

    @property
    def column(self) -> str:
        """The column of the history by which the best is chosen."""
        ...

    def numbers(self, trained: Trained) -> list[dict[str, Any]]:
        """The statistics of every model, by column of the history."""
        ...

    def better(self, trained: Trained) -> str:
        """Which values of the chosen metric are better, "lower" or "higher"; raises ValueError where it is not evaluated."""
        ...


@dataclass(frozen=True)
class Followed:
    """Who follows a run: the arguments of `train` that have no part in how it computes."""

    validation: RunValidation | None = None
    logger: Logger | None = None
    progress: bool = True
    on_round: OnRound | None = None

    def check(self, first: Trained, rounds: int) -> None:
        """Raise ValueError where the validation is by a metric that the task of the run `first` has not.

        Also where the run, with `rounds` more than `first`, would end before the first evaluation.
        """
        if self.validation is None:
            return
        self.validation.better(first)
        last = first.rounds + rounds
        if rounds and last < self.validation.every:
            raise ValueError(f"validation evaluates every {self.validation.every} rounds, and the run would end after {last}, "
                             f"without a best model. Write Validation(..., every={last}) or less, or train for longer.")

    @contextmanager
    def open(self, first: Trained, rounds: int) -> Iterator[RoundObserver]:
        """A context with the observer of a run of `rounds` rounds after `first`: log and bar are open, Ctrl-C is caught."""
        log = None if self.logger is None else self.logger.open_log(_logged_run(first, rounds))
        bar, ended = ProgressBar(rounds, self.progress), "failed"
        try:
            with watch_for_interrupt() as interruption:
                observer = RoundObserver(bar, interruption, self.validation, log, self.on_round)
                yield observer
            ended = observer.ended
        finally:
            bar.close(ended)
            if log is not None:
                log.close()


def _logged_run(first: Trained, rounds: int) -> LoggedRun:
    """What a logger is told of a run of `rounds` rounds after `first`."""
    from fedtail.loggers.base import LoggedRun

    members = first.algorithm.members
    names = tuple(f"model {k}" for k in range(len(members))) if len(members) > 1 else (type(first.task.module).__name__,)
    settings = {"rounds": first.rounds + rounds, "seed": first.seed, "parameters": len(first.task.params()),
                **{f"{name}.method": repr(one) for name, one in zip(names, members, strict=True)}}
    return LoggedRun(f"{type(first.task.module).__name__}, seed {first.seed}", names, settings, first_round=first.rounds)


class RoundObserver:
    """Takes each round of a run when it is trained, and says whether the run is to end."""

    def __init__(self, bar: ProgressBar, interruption: Interruption, validation: RunValidation | None = None,
                 log: RunLog | None = None, on_round: OnRound | None = None):
        """Set who is told: `bar` and `log` of the numbers, `on_round` of the whole run; `validation` evaluates."""
        self.bar, self.interruption, self.validation, self.log, self.on_round = bar, interruption, validation, log, on_round
        self.ended = ""                 # how the run ended, where that was early

    def after_round(self, trained: Trained, done: int, rounds: int, view: RoundView | None,
                    before: Trained) -> tuple[Trained, bool]:
        """The run after round `done` of `rounds`, with its history, best and end; and whether it is to end here.

        `trained` is the run as the round left it, `before` as it was before, with what this round's cohort found of its models,
        and `view` what the simulator sees of the round.
        """
        rows = round_rows(trained.algorithm, trained.state, view)
        due = self.validation is not None and trained.rounds % self.validation.every == 0
        if due and self.validation is not None:
            rows = [{**row, **found} for row, found in zip(rows, self.validation.numbers(trained), strict=True)]
        trained = replace(trained, history=self.history_with(before, cohort_rows(before)).with_rows(rows))
        if due and self.validation is not None:
            trained = with_best(trained, self.validation, last=done == rounds)
        self._tell(done, rows, due)
        asked = self.on_round is not None and self.on_round(Progress(done, rounds, trained, view, before))
        if self.interruption.requested and done < rounds:
            self.ended = "interrupted"
            return replace(trained, interrupted=True), True
        self.ended = trained.stopped
        return trained, bool(asked or trained.stopped)

    def history_with(self, trained: Trained, rows: Sequence[Row]) -> History:
        """The history of the run with `rows` about its last round added, which are logged too."""
        if self.log is not None:
            write_rows(self.log, rows)
        return trained.history.with_rows(rows) if rows else trained.history

    def _tell(self, done: int, rows: Sequence[Row], evaluated: bool) -> None:
        """Give the rows of a round to the log and the bar, where they are wanted."""
        if self.log is not None:
            write_rows(self.log, rows)
        column = self.validation.column if self.validation is not None else ""
        self.bar.advance(done, {column: rows[-1][column]} if evaluated else None)


def with_best(trained: Trained, validation: RunValidation, last: bool = False) -> Trained:
    """The run with its `best` as its history now has it, and `stopped` where it has waited long enough for a better one.

    A run whose `last` round this was did not stop early. The clients of `validation` are added to those that it was selected on.
    """
    by, better, count = validation.best_by, validation.better(trained), len(trained.algorithm.members)
    values = [trained.history.of_model(k)[validation.column] for k in range(count)]
    newest = [by.evaluations_since_best(one, better) == 0 for one in values]
    best = _joined_best(trained, newest) if any(newest) else trained.best
    stopped = by.reason if not last and by.is_over(values, better) else ""
    keys, names = _joined_clients(trained, validation.population)
    return replace(trained, best=best, stopped=stopped, selected_on=keys, selected_names=names)


def _joined_best(trained: Trained, newest: Sequence[bool]) -> Trained:
    """The run with the state of each model as it is now where `newest` says so, else as it was at its best before."""
    now = replace(trained, best=None)
    if all(newest) or trained.best is None:
        return now
    states = zip(newest, member_states(trained.state), member_states(trained.best.state), strict=True)
    return replace(now, state=tuple(new if better else old for better, new, old in states))


def _joined_clients(trained: Trained, judges: Any) -> tuple[Tensor, tuple[str, ...] | None]:
    """The keys of all clients that the run was selected on, sorted, with the clients `judges`; and the names in that order.

    Names are None where no client has one; where only some have, the others are called by their keys.
    """
    before, names = trained.selected_on, dict[int, str]()
    if before is not None and bool(torch.isin(judges.key, before).all()):
        return before, trained.selected_names
    if before is not None and trained.selected_names is not None:
        names.update(zip(before.tolist(), trained.selected_names, strict=True))
    if getattr(judges, "names", None) is not None:
        names.update((key, judges.name_of(place)) for place, key in enumerate(judges.key.tolist()))
    keys = (judges.key if before is None else torch.cat([before, judges.key])).unique()
    return keys, tuple(names.get(key, str(key)) for key in keys.tolist()) if names else None


def cohort_rows(trained: Trained) -> list[Row]:
    """Rows of a history with what a cohort of the fleet found of the run's models, as "cohort.error.mean" and so on.

    None where nothing was found, or where it is no evaluation of metrics, as with gradient dissimilarity.
    """
    evaluations = trained.evaluation or ()
    if not evaluations:
        return []
    from fedtail.evaluation.evaluate import Evaluation

    known = evaluations if all(isinstance(one, Evaluation) for one in evaluations) else ()
    return [{"round": trained.rounds, **({"model": k} if len(known) > 1 else {}),
             **{f"cohort.{metric}.{name}": found.statistic(name) for metric, found in one.distributions.items()
                for name in ("mean", bad_percentile_name(found.better), "worst10")}}
            for k, one in enumerate(known)]


def write_rows(log: RunLog, rows: Sequence[Row]) -> None:
    """Write the rows of a history to a log, under tags such as "error/validation/mean"."""
    from fedtail.loggers.base import scalar_tag

    for row in rows:
        numbers = {scalar_tag(name): value for name, value in row.items() if name not in ("round", "model")}
        log.write(row["round"], row.get("model", 0), numbers, {})
