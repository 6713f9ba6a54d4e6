"""A run's metrics as TensorBoard event files: tags by metric and split, one log folder for each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtail.runs.files import RunError
from fedtail.runs.looking import Look

SHOWN = ("mean", "p50", "p90", "worst10")


class TensorBoard:
    """Writes beside the run's other files. A resumed run purges what came after its checkpoint, as TensorBoard does."""

    def __init__(self, folder: Path, members: list[str], following: int):
        """Go on with the round `following`: what an earlier process wrote of it or of later ones is purged."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError("[evaluate] tensorboard = true needs TensorBoard. Install it with pip install "
                           "'fedtail[tensorboard]', or write tensorboard = false.") from None
        places = [folder / "tensorboard"] if len(members) == 1 else [folder / "tensorboard" / name for name in members]
        self._writers: list[Any] = [SummaryWriter(str(place), purge_step=following) for place in places]

    def write(self, round: int, looks: list[Look]) -> None:
        for writer, member in zip(self._writers, looks, strict=True):
            for split, evaluation in member.items():
                for metric, found in evaluation.distributions.items():
                    summary = found.summary()
                    for name in SHOWN:
                        writer.add_scalar(f"{metric}/{split}/{name}", summary[name], round)
                    writer.add_histogram(f"{metric}/{split}", found.values, round)
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
