"""The values of held-out clients under each trial of a search, kept beside it so that trials can be compared client by client."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fedtail.data import Population
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


def rows_of_held_out(held_out: Mapping[int, Population], chosen: tuple[ByClient, ...] | None, best: tuple[ByClient, ...] | None,
                     better: str, unit: str) -> list[dict[str, Any]] | None:
    """Held-out clients by name, worst first: `client`, `size` (examples), and their metric under the `chosen` and `best` trial.

    The values of both are those of `read_trial_values` for the seeds of `held_out`, which has the clients of each; a client's
    value is the mean over the seeds in which it was held out, in the metric's own direction (`better`) and unit, None where the
    metric is not defined for it. None where trials have kept no values.
    """
    if chosen is None or best is None:
        return None
    sign, scale = (-1.0 if better == "higher" else 1.0), (100.0 if unit else 1.0)
    rows: dict[Any, dict[str, Any]] = {}
    for (seed, population), *both in zip(held_out.items(), chosen, best, strict=True):
        for place, key in enumerate(population.key.tolist()):
            known = key if key in both[0] else (seed, key)
            row = rows.setdefault(known, {"client": population.name_of(place), "size": int(population.size[place]),
                                          "chosen": [], "best": []})
            for name, values in zip(("chosen", "best"), both, strict=True):
                row[name].append(sign * scale * values[known])
    for row in rows.values():
        for name in ("chosen", "best"):
            finite = [value for value in row[name] if math.isfinite(value)]
            row[name] = sum(finite) / len(finite) if finite else None
    return sorted(rows.values(), key=lambda row: math.inf if row["chosen"] is None else -sign * row["chosen"])
