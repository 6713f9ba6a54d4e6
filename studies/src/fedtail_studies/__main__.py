"""Run the cells of a study where only torch and numpy are installed, on a machine with a GPU, say; the page is made elsewhere.

    python -m fedtail_studies emnist_convnet --data DIR --out OUT --device cuda --only 0 2
    python -m fedtail_studies emnist_convnet --merge OUT OTHER --out experiments/emnist_convnet
    python -m fedtail_studies emnist_convnet --page --out experiments/emnist_convnet

`fedtail reproduce` does all of it in one go. `--only` runs some of the seeds, so that several processes can share a study, each
with an `--out` of its own; where settings are chosen on the first seed, `--until` a cell goes first, and `--from` takes over what
another folder holds. `--set NAME=JSON` changes a field of the plan. `--page` makes the page anew, for the plan the results have.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedtail_studies.plans import with_fields, with_settings
from fedtail_studies.results import FILE, Results
from fedtail_studies.running import Silent, begun, cells_left, command_of, recorded, run_cells
from fedtail_studies.study import Cell, Study


def main() -> None:
    from fedtail_studies.catalogue import study_called

    asked = _parser().parse_args()
    study = study_called(asked.name)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.merge:
        merged(asked.merge).write(asked.out)
    elif asked.page:
        make_page(study, asked.out)
    else:
        if asked.start:
            shutil.copy(asked.start / FILE, asked.out / FILE)
        plan = with_settings(study.quick if asked.quick else study.full, asked.set)
        measure(study, plan, asked)


def make_page(study: Study, folder: Path) -> None:
    """The page and the verdicts anew, from the seeds that are complete under the plan the results have."""
    from fedtail_studies.page import judged, write_page

    there = Results.read(folder)
    complete = there.complete(study, with_fields(study.full, there.plan), 1 + max(there.seeds))
    there.write(folder, judged(study, complete))
    write_page(study, complete, folder)


def measure(study: Study, plan: Any, asked: argparse.Namespace) -> None:
    """Run the cells that are asked for and not there yet, saving each as it ends."""
    data = study.data.read(asked.data) if study.data and asked.data else None
    found = begun(study, plan, asked.out, data, asked.quick)
    left = [one for one in cells_left(study, plan, found) if not asked.only or one[0] in asked.only]
    names = [name for _, name, _ in left]
    if asked.until in names:
        left = left[: names.index(asked.until) + 1]
    run_cells(left, recorded(found, command_of(study, plan, asked.quick, asked.device, asked.set), asked.device), asked.out,
              Cell("", 0, plan, data, asked.device, Silent()), partial(print, flush=True))


def merged(folders: list[Path]) -> Results:
    """Cells of all folders, which must be of one study and plan."""
    parts = [Results.read(folder) for folder in folders]
    if not all(part.same_kind(parts[0]) for part in parts):
        raise ValueError(f"{', '.join(map(str, folders))} hold results of several studies, plans or data, which do not mix.")
    cells: dict[int, dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []
    for part in parts:
        runs += [run for run in part.runs if run not in runs]
        for seed, found in part.cells.items():
            cells[seed] = {**cells.get(seed, {}), **found}
    return replace(parts[0], cells=cells, runs=tuple(runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedtail_studies", description="Run cells of a study without its page.")
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON", help="other values for fields of the plan")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these seeds")
    parser.add_argument("--until", metavar="CELL", help="stop after this cell")
    parser.add_argument("--from", dest="start", type=Path, metavar="DIR", help="results to go on from, in --out")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="DIR", help="results to join in --out; nothing is run")
    parser.add_argument("--page", action="store_true", help="make the page anew; nothing is run")
    return parser


if __name__ == "__main__":
    main()
