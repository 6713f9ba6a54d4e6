"""Runs in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedtail.loggers.base import LoggedRun, member_tags, missing_client

LONGEST = 500             # characters of a setting
AT_ONCE = 100             # settings in one message


@dataclass(frozen=True)
class MLflow:
    """Writes settings and metrics of a run to MLflow, by its own client.

    `tracking_uri` is MLflow's: the address of a server, or "sqlite:///mlflow.db" for a file here, which needs no network; by
    default MLflow's own choice (MLFLOW_TRACKING_URI). `experiment` is made where it does not exist. A run on disk that is resumed
    goes on in its MLflow run.
    """

    experiment: str = "fedtail"
    tracking_uri: str | None = None

    def check_client(self) -> None:
        """Raise ImportError, with what to install, where MLflow is not installed."""
        _client()

    def open_log(self, run: LoggedRun) -> MLflowLog:
        """Begin an MLflow run, or go on with that of an earlier part. Raises ImportError where MLflow is not installed."""
        return MLflowLog(self, run)


class MLflowLog:
    """The open MLflow run of one run."""

    def __init__(self, logger: MLflow, run: LoggedRun):
        """Begin it with the settings of `run`, or go on. Raises ImportError where MLflow is not installed."""
        mlflow = _client()
        self._run, self._metric = run, mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=logger.tracking_uri)
        if run.id is not None:
            self.id: str | None = run.id
            self._client.set_terminated(run.id, "RUNNING")
            return
        found = self._client.get_experiment_by_name(logger.experiment)
        experiment = self._client.create_experiment(logger.experiment) if found is None else found.experiment_id
        self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in run.flat_settings().items()]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(self.id, params=params[first:first + AT_ONCE])

    def write(self, round: int, model: int, numbers: Mapping[str, float], values: Mapping[str, Tensor]) -> None:
        """Write numbers as metrics of step `round`; MLflow has no histograms."""
        now = int(1000 * time.time())
        metrics = [self._metric(tag, value, now, round) for tag, value in member_tags(self._run, model, numbers).items()]
        if metrics:
            self._client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self.id)


def _client() -> Any:
    """The package `mlflow` with its entities. Raises ImportError where MLflow is not installed."""
    try:
        import mlflow
        import mlflow.entities
    except ImportError as reason:
        raise missing_client("MLflow", "mlflow") from reason
    return mlflow
