"""Where a run on disk is logged besides its folder: what `[log]` and `[evaluate] tensorboard` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from fedtail.directions import bad_percentile_name
from fedtail.evaluation.distribution import Distribution
from fedtail.experiment.experiment import Experiment
from fedtail.loggers.base import LoggedRun, RunLog
from fedtail.loggers.tensorboard import TensorBoard
from fedtail.reading import read_json
from fedtail.runs.evaluated_models import personal_column
from fedtail.runs.files import RunError, write_json
from fedtail.runs.measurements import SplitEvaluations

IDS = "log.json"                             # of the logs of a run, by logger, so that a resumed run finds them again


def open_logs(experiment: Experiment, seed: int, folder: Path, table: dict[str, Any], first_round: int) -> list[RunLog]:
    """The open logs of a run of `experiment` with `seed` in `folder`; those of an earlier part of the run are continued.

    `table` has the settings, and numbers will be written from `first_round` on, 0 for a new run. Raises RunError where a client
    is not installed.
    """
    place = folder / IDS
    ids: dict[str, Any] = read_json(place) if place.is_file() and first_round else {}
    logs: list[RunLog] = []
    for logger in _loggers(experiment).values():
        name = type(logger).__name__
        run = LoggedRun(f"{experiment.name}, seed {seed}", tuple(experiment.members), table, folder, first_round, ids.get(name))
        try:
            logs.append(logger.open_log(run))
        except ImportError as reason:
            raise RunError(f"[log] part = \"{name}\": {reason}") from reason
        if logs[-1].id is not None:
            ids[name] = logs[-1].id
            write_json(place, ids)
    return logs


def check_loggers(experiment: Experiment) -> None:
    """Raise ExperimentError, with the line of the file and what to install, where the client of a logger is not there."""
    for key, logger in _loggers(experiment).items():
        try:
            getattr(logger, "check_client", lambda: None)()      # a logger of one's own may have none
        except ImportError as reason:
            raise experiment.source.error_at(key, reason) from reason


def _loggers(experiment: Experiment) -> dict[tuple[str, str], Any]:
    """The loggers of an experiment, by the key (section, key) that asks for them."""
    board = {("evaluate", "tensorboard"): TensorBoard()} if experiment.evaluate.tensorboard else {}
    return board | ({("log", "part"): experiment.log} if experiment.log else {})


def logged_numbers(member: SplitEvaluations) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What is logged of an evaluation of one model, by tag: statistics over clients, and the values of single clients.

    `member` has its evaluations by split. Tags are "error/test/mean" and "error/test"; those of personal models begin with
    "personal_error". Of a metric where higher is better there is p10 in place of p90. Where only sums over clients are known,
    there are no values.
    """
    numbers: dict[str, float] = {}
    values: dict[str, Tensor] = {}
    for split, evaluation in member.items():
        own = {} if evaluation.personal is None else evaluation.personal.distributions
        for metric, found in (*evaluation.distributions.items(), *((personal_column(m), one) for m, one in own.items())):
            shown = ("mean", "p50", bad_percentile_name(found.better), "worst10")
            numbers |= {f"{metric}/{split}/{name}": found.statistic(name) for name in shown}
            values |= {f"{metric}/{split}": found.values[~found.values.isnan()]} if isinstance(found, Distribution) else {}
    return numbers, values
