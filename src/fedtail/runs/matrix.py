"""Run every combination of a matrix, each a run folder for every seed, on the same data; refused combinations keep their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.experiment.experiment import Experiment
from fedtail.experiment.matrix_section import Matrix, MatrixCell
from fedtail.experiment.source import ExperimentError
from fedtail.runs.execution import check_experiment_can_run, folder_holds_run, is_run_finished_and_intact, run
from fedtail.runs.files import RunError, RunRefused, refuse_foreign_folder
from fedtail.runs.loaded_data import LoadedData
from fedtail.runs.recording import Watch
from fedtail.runs.run_folder import RunFolder

MATRIX = "matrix.json"                       # what `fedtail matrix` leaves beside its runs


@dataclass(frozen=True)
class CellRun:
    """What one combination gave with one seed: its finished run, or the text of a failure."""

    seed: int
    run: RunFolder | None
    failure: str = ""


CellRuns = dict[int, list[CellRun]]          # by position of the cell in the matrix


def check_cells(matrix: Matrix, seed: int, loaded: LoadedData) -> Matrix:
    """The matrix with every combination composed on the data of `seed`; those that are refused have the text that says why.

    The text is that of the module which refuses, without the line of the file. Nothing is trained or written. Raises
    ExperimentError where no combination can run, with the text of the first.
    """
    checked = tuple(_checked_cell(cell, seed, loaded) for cell in matrix.cells)
    if all(cell.refused for cell in checked):
        raise ExperimentError(f"none of the {len(checked)} combinations can run. The first, {checked[0].name}: "
                              f"{checked[0].refused}")
    return replace(matrix, cells=checked)


def _checked_cell(cell: MatrixCell, seed: int, loaded: LoadedData) -> MatrixCell:
    """The cell itself where its experiment can run on the data of `seed`; else a copy with the text that refuses it."""
    if cell.experiment is None:
        return cell
    try:
        check_experiment_can_run(cell.experiment, seed, loaded.loader_for(cell.experiment, seed)())
    except ExperimentError as reason:
        return replace(cell, refused=str(reason.__cause__ or reason))
    return cell


def run_cells(matrix: Matrix, seeds: Sequence[int], folders: Callable[[MatrixCell], Path], watch: Any, resume: bool,
              loaded: LoadedData) -> CellRuns:
    """Run every combination that is not refused with every seed, all combinations of a seed before the next seed.

    Returns the runs by position of the cell in the matrix, in the order of the seeds; fewer where `watch` asks to stop between
    two runs. A run is in the folder seed-K of that of its cell, which `folders` gives. With `resume`, finished runs stay and
    others go on from their last checkpoint. A run that fails is a failure of its cell, and the others go on. `watch.job` is set
    to the number of the run, from 1. Raises Interrupted where `watch` stopped a run, and RunRefused as `run` does.
    """
    found: CellRuns = {place: [] for place, cell in enumerate(matrix.cells) if not cell.refused}
    jobs = [(place, seed) for seed in seeds for place in found]
    for watch.job, (place, seed) in enumerate(jobs, start=1):
        if watch.stop:
            break
        cell = matrix.cells[place]
        assert cell.experiment is not None
        found[place].append(_run_cell(cell.experiment, seed, folders(cell) / f"seed-{seed}", watch, resume, loaded))
    return found


def _run_cell(experiment: Experiment, seed: int, folder: Path, watch: Watch, resume: bool, loaded: LoadedData) -> CellRun:
    """The finished run of an experiment with one seed in `folder`, trained now unless it is there and whole.

    With `resume`, an unfinished run goes on. A RunError, which a run raises that fails, gives a `CellRun` with its text, and so
    does an ExperimentError about the data of this seed. Raises RunRefused for a folder with another run, and Interrupted where
    `watch` stopped it.
    """
    load = loaded.loader_for(experiment, seed)
    try:
        if resume and folder_holds_run(experiment, seed, folder) and is_run_finished_and_intact(folder):
            done = RunFolder.open(folder)
        else:
            done = run(experiment, seed, folder, watch, resume, load)
        return CellRun(seed, done)
    except RunRefused:
        raise
    except (RunError, ExperimentError) as reason:      # the latter where the split of a later seed does not fit
        return CellRun(seed, None, failure=str(reason))


def check_matrix_folder(folder: Path, resume: bool) -> None:
    """Raise RunRefused where `folder` cannot hold the runs of a matrix.

    That is where it is a run itself or, unless `resume`, holds runs or other files.
    """
    if (folder / "run.json").exists():
        raise RunRefused(f"{folder} is a run itself; others are not put inside it. Choose another folder with --out.")
    if resume:
        return
    if next(folder.rglob("run.json"), None) is not None:
        raise RunRefused(f"{folder} holds runs already. Go on with --resume, or choose another folder with --out.")
    refuse_foreign_folder(folder, set())
