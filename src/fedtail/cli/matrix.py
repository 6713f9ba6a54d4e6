"""`fedtail matrix`: every combination of protections and attacks, from one file."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli import options
from fedtail.cli.run import check_metric, folder_and_split, folder_name, resume_command
from fedtail.cli.terminal import FAILED, INTERRUPTED, Watcher, exit_with_message, print_errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail.cli.run import Job
    from fedtail.experiment.matrix_section import Matrix, MatrixCell
    from fedtail.runs.loaded_data import LoadedData
    from fedtail.runs.matrix import CellRuns
    from fedtail.runs.matrix_columns import Column

LONGEST = 70      # characters of a refusal in the terminal; the page and matrix.json have all


@print_errors_as_sentences
def matrix(
    file: Path = typer.Argument(..., metavar="FILE", show_default=False, help="An experiment file with a [matrix] section."),
    example: bool = typer.Option(False, "--example", help="Write a commented example to FILE instead, of 144 combinations."),
    settings: list[str] = options.SET,
    out: Path | None = options.OUT,
    seeds: str | None = options.SEEDS,
    resume: bool = options.RESUME,
    device: str | None = options.DEVICE,
    trust: list[str] = options.TRUST,
    metric: str | None = options.METRIC,
    as_json: bool = options.JSON,
) -> None:
    """Train every combination of the axes in [matrix]: fairness x robustness x privacy x personal models x attack, say.

    Each seed draws its own split of the clients, the same for every combination (of label_shift, the data), unless the file fixes
    it (split = { ..., seed = 0 }).
    Shows mean, worst tenth and spread of the error, and of every other metric of the file, over benign clients for each, and
    what every value costs the others. The page opens with --metric, and any other can be chosen on it. A combination that cannot
    be composed is shown with the reason. Everything is checked before the first one trains; each is a run folder of its own, so
    that --resume does only what is missing. Writes matrix.json, matrix.csv and matrix.html. The exit code is 1 where a
    combination failed or diverged.
    """
    from fedtail.experiment.matrix_section import read_matrix
    from fedtail.report.matrix_page import PAGE, write_matrix_page
    from fedtail.runs.loaded_data import LoadedData
    from fedtail.runs.matrix import check_cells, check_matrix_folder
    from fedtail.runs.matrix_results import matrix_result, result_of_metric, write_matrix_files

    if example:
        write_example(file)
        return
    wanted = read_matrix(file, options.settings_with_device(settings, device), trust)
    check_value_names(wanted)
    check_metric([cell.experiment for cell in wanted.cells if cell.experiment is not None][:1], metric)
    numbers, loaded = options.chosen_seeds(seeds, wanted.seeds), LoadedData()
    wanted, folder = _with_split_and_folder(wanted, numbers, out, resume)
    wanted = check_cells(wanted, numbers[0], loaded)
    check_matrix_folder(folder, resume)
    found = _run_all(wanted, numbers, folder, resume, as_json, loaded)
    result = matrix_result(wanted, found, numbers, lambda cell: cell_folder(Path(), cell))
    write_matrix_files(folder, result)
    page = write_matrix_page(result, folder / PAGE, metric=metric or "error")
    if as_json:
        print_json({**result, "page": str(page)})
    else:
        for name in [metric] if metric else [name for name in result["metrics"] if name != "loss"]:
            show_matrix(result_of_metric(result, name))
        typer.echo(f"Saved in {folder}: matrix.json, matrix.csv, and a page to look at, {page}")
    if any(cell["state"] == "failed" for cell in result["cells"]):
        exit_with_message(f"some runs failed; --resume tries them again:  {resume_command(folder)}", FAILED)
    diverged = [", ".join(cell["values"].values()) for cell in result["cells"] if cell["state"] == "diverged"]
    if diverged:
        exit_with_message(f"{len(diverged)} of {len(result['cells'])} combinations diverged ({'; '.join(diverged)}). Lower "
                          "local.learning_rate, or clip updates.", FAILED)


def write_example(file: Path) -> None:
    """Write a commented matrix file to `file`. Raises FileExistsError where there is one."""
    from fedtail.experiment.matrix_starter import matrix_example

    if file.exists():
        raise FileExistsError(f"{file} is there already. Choose another name.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(matrix_example(file.name), encoding="utf-8")
    typer.echo(f"Wrote {file}.  Look at it, then:  fedtail matrix {file}")


def check_value_names(wanted: Matrix) -> None:
    """Raise ExperimentError where two values of an axis have the same name as folders, such as "a b" and "a-b"."""
    for axis, values in wanted.axes.items():
        for place, count in Counter(map(folder_name, values)).items():
            if count > 1:
                raise wanted.source.error_at(("matrix", axis), f"two values of {axis} are both {place!r} as a folder. Give one "
                                                               "another name.")


def cell_folder(folder: Path, cell: MatrixCell) -> Path:
    """The folder of a cell's runs below `folder`, one level for each axis: tail-0.5/median/none."""
    return folder.joinpath(*map(folder_name, cell.values.values()))


def _with_split_and_folder(wanted: Matrix, seeds: tuple[int, ...], out: Path | None, resume: bool) -> tuple[Matrix, Path]:
    """The matrix whose split follows the seed unless the file fixes it, and the folder of its runs: `out`, or a numbered one.

    A matrix that an earlier version began with one split for all seeds is resumed with that one.
    """
    redrawn, place = wanted.redrawn_by_seed(), Path("runs") / folder_name(wanted.name)
    folder, anew = folder_and_split(place, out, resume, *(partial(_jobs, one, seeds) for one in (redrawn, wanted)))
    return redrawn if anew else wanted, folder


def _jobs(wanted: Matrix, seeds: tuple[int, ...], folder: Path) -> list[Job]:
    """A job (experiment, seed, folder of its run) for each seed and each combination that is not refused, below `folder`."""
    return [(cell.experiment, seed, cell_folder(folder, cell) / f"seed-{seed}") for seed in seeds for cell in wanted.cells
            if cell.experiment is not None and not cell.refused]


def _run_all(wanted: Matrix, seeds: tuple[int, ...], folder: Path, resume: bool, quiet: bool, loaded: LoadedData) -> CellRuns:
    """Run all combinations that are not refused with a progress bar (none where `quiet`), and return their runs by cell.

    After a Ctrl-C it says how to resume and raises `typer.Exit` with code 130.
    """
    from fedtail.runs import Interrupted
    from fedtail.runs.matrix import run_cells

    jobs = _jobs(wanted, seeds, folder)
    watcher = Watcher(len(jobs), quiet)
    with watcher.show_progress():
        try:
            found = run_cells(wanted, seeds, lambda cell: cell_folder(folder, cell), watcher, resume, loaded)
        except Interrupted as stopped:
            exit_with_message(f"{stopped}.\nGo on with:  {resume_command(folder)}", INTERRUPTED)
    done = sum(map(len, found.values()))
    if done < len(jobs):
        exit_with_message(f"stopped after {done} of {len(jobs)} runs.\nGo on with:  {resume_command(folder)}", INTERRUPTED)
    return found


def show_matrix(result: dict[str, Any]) -> None:
    """Print a table of all combinations with the statistics of a metric, and one of what each value costs.

    `result` is what `result_of_metric` gives. Refusals are shortened.
    """
    from fedtail.cli.terminal import show_table
    from fedtail.runs.matrix_columns import defined_text, shown_columns

    columns, metric = shown_columns(result), result["metric"]
    private = any(cell["epsilon"] is not None for cell in result["cells"])
    rows = [[", ".join(cell["values"].values()), *(_number_text(column, cell) for column in columns),
             *([_epsilon_text(cell)] if private else []), _note_text(cell) or defined_text(cell, result["clients"])]
            for cell in result["cells"]]
    show_table(_table_title(result), [", ".join(result["axes"]), *(column.title for column in columns),
                                      *(["epsilon"] if private else []), ""], rows)
    costs = [[f"{cost['axis']}: {cost['value']} less {cost['baseline']}", *(" +- ".join(filter(None, column.cost_texts(cost)))
                                                                          for column in columns), str(cost["pairs"])]
             for cost in result["costs"]]
    if costs:
        show_table(f"What each value costs in {metric} ({result['better']} is better): difference to the first of its axis, "
                   "mean +- deviation over the other axes", ["value", *(column.title for column in columns), "pairs"], costs)


def _table_title(result: dict[str, Any]) -> str:
    """What the table of all combinations is about: the metric, the clients, its unit, its better end, and the seeds.

    Of several seeds, it says whether each has a split of its own.
    """
    metric = result["metric"]
    name = metric[0].upper() + metric[1:] if metric in ("error", "loss") else metric
    unit = f", {result['unit']}" if result["unit"] else ""
    higher = ", higher is better" if result["better"] == "higher" else ""
    over = f", +- over {len(result['seeds'])} seeds (split {result['split_of_seeds']})" if len(result["seeds"]) > 1 else ""
    return f"{name} over benign {result['split'].replace('_', '-')} clients after {result['rounds']} rounds{unit}{higher}{over}"


def _number_text(column: Column, cell: dict[str, Any]) -> str:
    """A statistic of a combination as "1.23 +- 0.04"; "1.23" without a deviation, "" where it has no such number."""
    return "" if column.cell(cell) is None else " +- ".join(filter(None, column.texts(cell)))


def _epsilon_text(cell: dict[str, Any]) -> str:
    """The epsilon of a cell's privacy guarantee with two digits, and its unit where that is an example; "" where it has none."""
    if cell["epsilon"] is None:
        return ""
    return f"{cell['epsilon']:.2g}" + (" (example-level)" if cell["privacy_unit"] == "example" else "")


def _note_text(cell: dict[str, Any]) -> str:
    """Why a cell has no numbers, its state and the shortened reason; "" where it has some."""
    if cell["state"] == "done":
        return ""
    text = f"{cell['state']}: {' '.join(cell['text'].split())}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST - 1]}…"
