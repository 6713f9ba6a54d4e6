"""What the page's runs were made with: every setting as an experiment file, the size of the model, and when they ended."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from fedtail.runs import RunFolder

LONGEST_HEADER = 2**24                       # bytes of a model file that are read to learn the shapes of its tensors


def method_settings(runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """For each name among the runs, in order, a dict of its `name` and its experiment as the text of a TOML file, `toml`.

    The seeds of the file are those of all its runs, so that `fedtail run` with it makes them again. Runs that did not write down
    their experiment, or as no experiment file can be, are left out.
    """
    by_name: dict[str, list[RunFolder]] = {}
    for run in runs:
        if isinstance(run.about.get("experiment"), dict):
            by_name.setdefault(run.name, []).append(run)
    found = [(name, toml_text({**own[0].about["experiment"], "seeds": sorted({run.seed for run in own})}))
             for name, own in by_name.items()]
    return [{"name": name, "toml": text} for name, text in found if text]


def toml_text(table: dict[str, Any]) -> str:
    """A table as the text of a TOML file; "" where it holds what TOML has no words for, as a damaged `run.json` may."""
    try:
        return tomli_w.dumps(table)
    except (TypeError, ValueError, RecursionError):
        return ""


def model_size_line(runs: Sequence[RunFolder]) -> str:
    """The module of the runs and its number of parameters, as "ConvNet, 582,026 parameters, buffers included"; "" if not known.

    Where methods have other modules, their texts are joined by semicolons.
    """
    return "; ".join(dict.fromkeys(text for run in runs if (text := _size_of_run(run))))


def end_dates(runs: Sequence[RunFolder]) -> str:
    """The day on which the runs' results were written, in UTC, as "2026-11-18" or "2026-11-17 to 2026-11-18".

    "" where none is finished. It is read from the time of the files, so that a copy that does not keep times has its own.
    """
    times = [place.stat().st_mtime for run in runs if (place := run.path / "result.json").is_file()]
    days = sorted({datetime.fromtimestamp(time, UTC).date().isoformat() for time in times})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def _size_of_run(run: RunFolder) -> str:
    """The module of a run and its number of parameters as text; "" where its initial model file cannot be read."""
    experiment: dict[str, Any] = run.about.get("experiment") or {}
    part = str(experiment.get("task", {}).get("module", {}).get("part", "module"))
    numbers = _numbers_in_file(run.path / "initial.safetensors")
    return f"{part}, {numbers:,} parameters, buffers included" if numbers else ""


def _numbers_in_file(path: Path) -> int:
    """How many numbers the tensors of a safetensors file hold, read from its header; 0 where there is no such file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= LONGEST_HEADER else {}
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError):
        return 0
