"""Run what is left of a study, cell by cell, and write its page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtail.runs.files import RunRefused, hold_folder_lock
from fedtail_studies.machine import made_by
from fedtail_studies.page import judged, write_page
from fedtail_studies.results import FILE, Results
from fedtail_studies.study import Cell, Data, Measure, Stopped, Study, Watch

__all__ = ["Silent", "Stopped", "reproduce"]


class Silent:
    """Nobody looks on."""

    stop = False
    jobs = job = 1

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None: ...

    def round(self, round: int) -> None: ...


def reproduce(study: Study, plan: Any, folder: Path, data: Data | None = None, quick: bool = False, device: str = "cpu",
              watch: Any = None, command: str = "") -> Results:
    """Run the cells that are not in the folder yet, save each as it ends, write the page; the complete seeds.

    Without `data` a folder in which nothing is left to do only gets its page anew.
    """
    found = begun(study, plan, folder, data, quick)
    left = cells_left(study, plan, found)
    with hold_folder_lock(folder):
        if left:
            found = recorded(found, command or f"fedtail reproduce {study.name}", device)
            found = run_cells(left, found, folder, Cell("", 0, plan, data, device, watch or Silent()))
        complete = found.complete(study, plan, max([plan.seeds, *(seed + 1 for seed in found.seeds)]))
        found.write(folder, judged(study, complete))
        write_page(study, complete, folder)
    (folder / ".lock").unlink(missing_ok=True)      # the folder may be committed
    return complete


def begun(study: Study, plan: Any, folder: Path, data: Data | None, quick: bool) -> Results:
    """What the folder holds of this study and plan, or nothing yet; refused where it holds something else."""
    fresh = Results.begin(study, plan, quick, data)
    if not (folder / FILE).exists():
        return fresh
    there = Results.read(folder)
    wanted = fresh if data else replace(fresh, data=there.data)
    if not there.same_kind(wanted):
        kind = f"{there.study}{' --quick' if there.quick else ''}"
        raise RunRefused(f"{folder} holds results of {kind} with other settings or data. Choose another folder with --out.")
    return replace(there, plan=fresh.plan, data=wanted.data)


def cells_left(study: Study, plan: Any, found: Results) -> list[tuple[int, str, Measure]]:
    """What is still to be measured, seed by seed."""
    return [(seed, name, measure) for seed in range(plan.seeds) for name, measure in study.cells(plan, seed).items()
            if not found.has(name, seed)]


def run_cells(left: list[tuple[int, str, Measure]], found: Results, folder: Path, cell: Cell,
              said: Callable[[str], None] = lambda line: None) -> Results:
    """Measure them one by one, each saved as it ends and said in a line."""
    watch: Watch = cell.watch
    for place, (seed, name, measure) in enumerate(left, start=1):
        watch.jobs, watch.job = len(left), place      # type: ignore[attr-defined]
        finished = {s: {n: c["numbers"] for n, c in cells.items()} for s, cells in found.cells.items()}
        begin = time.perf_counter()
        numbers = measure(replace(cell, name=name, seed=seed, finished=finished))
        cell.stop_if_asked()
        seconds = time.perf_counter() - begin
        found = found.adding(name, seed, seconds, numbers)
        found.write(folder)
        said(f"seed {seed}, {name}: {seconds:.1f} s")
    return found


def command_of(study: Study, plan: Any, quick: bool, device: str, settings: Sequence[str]) -> str:
    """What to write to get this again: folders are the reader's own, and how the seeds were shared does not matter."""
    words = ["fedtail", "reproduce", study.name, *(["--quick"] if quick else []), "--seeds", str(plan.seeds)]
    words += [*(["--data", "DIR"] if study.data else []), *(["--device", device] if device != "cpu" else [])]
    return shlex.join([*words, *(word for one in settings if not one.startswith("seeds=") for word in ("--set", one))])


def recorded(found: Results, command: str, device: str) -> Results:
    """With what makes the cells to come: one entry for each day, kind of machine and version; of commands there, the last."""
    run = made_by(command, device)
    return replace(found, runs=(*(one for one in found.runs if {**one, "command": ""} != {**run, "command": ""}), run))
