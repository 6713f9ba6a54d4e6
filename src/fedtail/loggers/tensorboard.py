"""Runs in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtail.loggers.base import LoggedRun, finite_numbers, missing_client


@dataclass(frozen=True)
class TensorBoard:
    """Writes event files for TensorBoard: scalars, and histograms over clients; for a family one subfolder for each model.

    `folder` is where; by default "tensorboard" in the folder of the run, or in the current one. What an earlier process wrote for
    rounds that a resumed run trains again is purged.
    """

    folder: str | None = None

    def check_client(self) -> None:
        """Raise ImportError, with what to install, where TensorBoard is not installed."""
        _writer()

    def open_log(self, run: LoggedRun) -> TensorBoardLog:
        """Open the event files of a run. Raises ImportError where TensorBoard is not installed."""
        return TensorBoardLog(Path(self.folder) if self.folder else (run.folder or Path()) / "tensorboard", run)


class TensorBoardLog:
    """The open event files of one run."""

    id = None

    def __init__(self, folder: Path, run: LoggedRun):
        """Open the files below `folder`. Raises ImportError where TensorBoard is not installed."""
        make = _writer()
        places = [folder] if len(run.members) == 1 else [folder / name for name in run.members]
        _wait_for_a_later_second(places)
        self._writers: list[Any] = [make(str(place), purge_step=run.first_round) for place in places]

    def write(self, round: int, model: int, numbers: Mapping[str, float], values: Mapping[str, Tensor]) -> None:
        """Write scalars and histograms of a model at step `round`."""
        for tag, value in finite_numbers(numbers).items():
            self._writers[model].add_scalar(tag, value, round)
        for tag, of_clients in values.items():
            self._writers[model].add_histogram(tag, of_clients, round)
        self._writers[model].flush()

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers:
            writer.close()


def _writer() -> Any:
    """PyTorch's class of writers. Raises ImportError where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as reason:
        raise missing_client("TensorBoard", "tensorboard") from reason
    return SummaryWriter


def _wait_for_a_later_second(places: list[Path]) -> None:
    """Wait, for a second at most, until new event files in the folders `places` sort after those that are there.

    TensorBoard reads files in the order of their names, which begin with the second of their making, and goes on with the
    number of a writer, of which 10 comes before 9: read in that order, a resumed run's rounds would be purged in place of the
    earlier ones.
    """
    made = [path.name.split(".")[3] for place in places for path in place.glob("events.out.tfevents.*")]
    latest = max((int(second) for second in made if second.isdecimal()), default=0)
    if 0 <= time.time() - latest < 1:
        time.sleep(latest + 1 - time.time())
