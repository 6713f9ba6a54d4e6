"""The values of held-out clients under each trial of a search, kept beside it so that trials can be compared client by client."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from fedtail.runs.files import write_atomically
from fedtail.runs.values_by_client import ByClient

FOLDER = "trials"
Values = dict[int, tuple[np.ndarray, np.ndarray]]      # by seed: keys and values of its held-out clients


def save_trial_values(folder: Path, number: int, values: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> None:
    """Write the keys and values of held-out clients under trial `number`, by seed, to `trials/NUMBER.npz` in `folder`."""
    (folder / FOLDER).mkdir(exist_ok=True)
    arrays = {f"{what} {seed}": array for seed, both in values.items()
              for what, array in zip(("key", "value"), both, strict=True)}
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / FOLDER / f"{number}.npz", content.getvalue())


def read_trial_values(folder: Path, number: int, seeds: tuple[int, ...], sign: float,
                      shared: bool) -> tuple[ByClient, ...] | None:
    """The values of held-out clients under trial `number`, times `sign`, by client key for each seed; None without the file.

    With `shared`, equal keys are the same client in all seeds; else keys hold the seed.
    """
    place = folder / FOLDER / f"{number}.npz"
    try:
        with np.load(place, allow_pickle=False) as found:
            both = [(found[f"key {seed}"].tolist(), (sign * found[f"value {seed}"]).tolist()) for seed in seeds]
    except (OSError, ValueError, KeyError, BadZipFile):  # an earlier version kept none; a damaged one is as good as none
        return None
    return tuple(dict(zip(keys if shared else [(seed, key) for key in keys], values, strict=True))
                 for seed, (keys, values) in zip(seeds, both, strict=True))
