"""Runs in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fedtail.loggers.base import LoggedRun, member_tags, missing_client


@dataclass(frozen=True)
class WandB:
    """Writes settings and numbers of a run to Weights & Biases, by its own client.

    `mode` "offline" writes to `folder` (by default that of the run, or the current one) and needs no account and no network:
    `wandb sync` sends it later. By default W&B decides (WANDB_MODE). A run on disk that is resumed goes on under its id.
    """

    project: str = "fedtail"
    mode: Literal["online", "offline", "disabled"] | None = None
    folder: str | None = None
    entity: str | None = None

    def check_client(self) -> None:
        """Raise ImportError, with what to install, where wandb is not installed."""
        _client()

    def open_log(self, run: LoggedRun) -> WandBLog:
        """Begin a W&B run, or go on with that of an earlier part. Raises ImportError where wandb is not installed."""
        return WandBLog(self, run)


class WandBLog:
    """The open W&B run of one run."""

    def __init__(self, logger: WandB, run: LoggedRun):
        """Begin it with the settings of `run`, or go on. Raises ImportError where wandb is not installed."""
        self._logged, self._wandb = run, _client()
        self._run: Any = self._wandb.init(project=logger.project, entity=logger.entity, name=run.name, mode=logger.mode,
                                          id=run.id, resume="allow" if run.id else None, config=run.flat_settings(),
                                          dir=str(Path(logger.folder) if logger.folder else run.folder or Path()))
        self.id: str | None = str(self._run.id)

    def write(self, round: int, model: int, numbers: Mapping[str, float], values: Mapping[str, Tensor]) -> None:
        """Write numbers and histograms over clients at step `round`."""
        finite = {tag: one[one.isfinite()] for tag, one in values.items()}
        prefix = f"{self._logged.members[model]}/" if len(self._logged.members) > 1 else ""
        shown = {prefix + tag: self._wandb.Histogram(one.tolist()) for tag, one in finite.items() if len(one)}
        self._run.log({**member_tags(self._logged, model, numbers), **shown}, step=round)

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


def _client() -> Any:
    """The package `wandb`. Raises ImportError where it is not installed, or a folder of that name is found in its place."""
    try:
        import wandb
        if not hasattr(wandb, "init"):
            raise ImportError("wandb is a folder, not the package")
    except ImportError as reason:
        raise missing_client("Weights & Biases", "wandb") from reason
    return wandb
