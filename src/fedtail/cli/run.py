"""`fedtail run`: one method of one file, for some seeds."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli import options
from fedtail.cli.terminal import FAILED, INTERRUPTED, Watcher, exit_with_message, print_errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail.experiment import Experiment
    from fedtail.runs import RunFolder
    from fedtail.runs.loaded_data import LoadedData

    Job = tuple[Experiment, int, Path]      # an experiment, a seed, and where its run goes


@print_errors_as_sentences
def run(
    experiment: Path = options.EXPERIMENT,
    settings: list[str] = options.SET,
    out: Path | None = options.OUT,
    seeds: str | None = options.SEEDS,
    method: str | None = options.METHOD,
    resume: bool = options.RESUME,
    device: str | None = options.DEVICE,
    engine: str | None = options.ENGINE,
    address: str | None = options.ADDRESS,
    trust: list[str] = options.TRUST,
    metric: str | None = options.METRIC,
    as_json: bool = options.JSON,
) -> None:
    """Train the method of an experiment file and keep everything in a run folder.

    One seed is one run, in the folder itself; several are in seed-0, seed-1, ... below it. A run can be killed at any moment
    and goes on with --resume as if it had not been. Ctrl-C finishes the round, saves, and says how to go on. The exit code is 1
    where a trained model has diverged.
    """
    from fedtail.experiment import read_experiment

    changes = options.settings_with_engine(options.settings_with_device(settings, device), engine, address)
    wanted = read_experiment(experiment, changes, method, trust)
    check_metric([wanted], metric)
    numbers = options.chosen_seeds(seeds, wanted.seeds)

    def jobs(folder: Path) -> list[Job]:
        """A job (experiment, seed, folder of its run) for each seed: in `folder` itself for one seed, else in seed-K below it."""
        return [(wanted, seed, folder if len(numbers) == 1 else folder / f"seed-{seed}") for seed in numbers]

    folder = out or output_folder(Path("runs") / folder_name(wanted.name), jobs, resume)
    runs = run_jobs(jobs(folder), folder, resume, as_json)
    show_runs(runs, folder, as_json, metric=metric)
    fail_if_diverged(runs)


def run_jobs(jobs: list[Job], folder: Path, resume: bool, quiet: bool) -> list[RunFolder]:
    """Run jobs (experiment, seed, folder) one after another, and return the folders of the finished runs, in that order.

    Everything that can be refused is refused before the first begins. `folder` is that of all jobs; with `resume` unfinished runs
    continue; `quiet` shows no progress bar. After a Ctrl-C it says how to resume and raises `typer.Exit` with code 130.
    """
    from fedtail.runs import Interrupted
    from fedtail.runs import run as run_one
    from fedtail.runs.loaded_data import LoadedData

    watcher, runs, loaded = Watcher(len(jobs), quiet), [], LoadedData()
    check_jobs(jobs, folder, loaded)
    if resume and not any((place / "run.json").exists() for _, _, place in jobs):
        watcher.note(f"there is nothing to resume in {folder}: starting at round 0")
    with watcher.show_progress():
        for watcher.job, (wanted, seed, place) in enumerate(jobs, start=1):
            try:
                runs.append(run_one(wanted, seed, place, watcher, resume, loaded.loader_for(wanted, seed)))
                watcher.ended(runs[-1])
            except Interrupted as stopped:
                exit_with_message(f"{stopped}.\nGo on with:  {resume_command(folder)}", INTERRUPTED)
            if watcher.stop and len(runs) < len(jobs):
                exit_with_message(f"stopped after {len(runs)} of {len(jobs)} runs.\nGo on with:  {resume_command(folder)}",
                                  INTERRUPTED)
    return runs


def check_jobs(jobs: list[Job], folder: Path, loaded: LoadedData) -> None:
    """Raise, before any job begins, the error for which one of them would be refused.

    Each method is checked on the data of its first unfinished seed, which are loaded into `loaded`. RunRefused where `folder`,
    which several jobs share, is a run itself or holds other files.
    """
    from fedtail.runs.execution import check_experiment_can_run
    from fedtail.runs.files import RunRefused, refuse_foreign_folder

    several = [place for _, _, place in jobs if place != folder]
    if several and (folder / "run.json").exists():
        raise RunRefused(f"{folder} is a run itself; others are not put inside it. Choose another folder with --out.")
    if several:
        refuse_foreign_folder(folder, {"comparison.json", *(place.relative_to(folder).parts[0] for place in several)})
    checked = set()
    for wanted, seed, place in jobs:
        if wanted.name not in checked and not (place / "result.json").exists():
            check_experiment_can_run(wanted, seed, loaded.loader_for(wanted, seed)())
            checked.add(wanted.name)


def check_metric(wanted: Sequence[Experiment], metric: str | None) -> None:
    """Raise ExperimentError, before anything is trained, where an experiment does not have the metric of --metric."""
    from fedtail.experiment import ExperimentError

    for one in wanted if metric is not None else ():
        known = one.task.metric_names
        if metric not in known:
            raise ExperimentError(f"{one.name} has no metric {metric!r}; it has {', '.join(known)}. Write metrics = "
                                  "[\"roc_auc\"] below [task] for more.")


def fail_if_diverged(runs: Sequence[RunFolder]) -> None:
    """Print to stderr which models have diverged, and raise `typer.Exit` with code 1; do nothing where none has."""
    from fedtail.runs.diverged import is_diverged
    from fedtail.runs.evaluated_models import evaluated_models

    lost = list(dict.fromkeys(f"{run.name}, seed {run.seed}" for run in runs for model in evaluated_models(run)
                              if is_diverged(run, model)))
    if lost:
        exit_with_message(f"the model has diverged ({'; '.join(lost)}). Lower local.learning_rate.", FAILED)


def show_runs(runs: list[RunFolder], folder: Path, as_json: bool, more: dict[str, Any] | None = None,
              metric: str | None = None) -> None:
    """Print tables of the runs' metrics, what limits those of personal models, and their privacy guarantees.

    There is a table for `metric`, or without one for the error and every further metric; fewer than 20 clients are shown by name.
    What is wrong with a model is in red. With `as_json`, one JSON object instead, to which the entries of `more` are added. The
    line with `folder` is printed only where `more` is None.
    """
    from fedtail.cli.answers import show_promises
    from fedtail.cli.terminal import show_alarms
    from fedtail.runs.comparison import constant_row, rows_by_method, shown_metrics
    from fedtail.runs.diverged import divergence_sentences
    from fedtail.runs.evaluated_models import personal_sentences

    limits, alarms, metrics = personal_sentences(runs), divergence_sentences(runs), shown_metrics(runs, metric)
    if as_json:
        notes = ({"notes": limits} if limits else {}) | ({"diverged": alarms} if alarms else {})
        print_json({"rows": rows_by_method(runs, metrics[0]), "constant": constant_row(runs, metrics[0]), **(more or {}), **notes,
                    "metrics": {name: rows_by_method(runs, name) for name in metrics[1:]},
                    "runs": [str(run.path) for run in runs]})
        return
    for name in metrics:
        show_metric_tables(runs, name)
        if more is None:
            show_promises(runs, name)
    show_alarms(alarms)
    for line in (*limits, *privacy_lines(runs)):
        typer.echo(line)
    if more is None:
        show_saved_folder(folder)


def show_metric_tables(runs: list[RunFolder], metric: str) -> None:
    """Print the tables about one metric of runs: by method beside the constant prediction, by client where those are few.

    After fine-tuning too, where there was some.
    """
    from fedtail.cli.answers import show_noise
    from fedtail.cli.terminal import show_clients_by_name, show_finetuned_errors, show_statistics
    from fedtail.runs.comparison import are_clients_named, constant_row, metric_direction, metric_unit, rows_by_method

    table, constant = rows_by_method(runs, metric), constant_row(runs, metric)
    clients = " or ".join(dict.fromkeys(map(evaluated_clients, runs)))
    unit = f", {metric_unit(runs[0], metric)}" if metric_unit(runs[0], metric) else ""
    over = f", +- std over {len(table[0]['seeds'])} seeds" if len(table[0]["seeds"]) > 1 else ""
    rounds = " or ".join(map(str, dict.fromkeys(run.result["round"] for run in runs)))
    better = "" if metric_direction(runs[0], metric) == "lower" else ", higher is better"
    few = are_clients_named(runs[0])
    title = f"{metric_title(runs[0], metric)} on {clients} after {rounds} rounds{unit}{better}{over}"
    show_statistics([*table, *([constant] if constant else [])], title, few)
    show_noise(table)
    if few:
        show_clients_by_name(runs, metric)
    show_finetuned_errors(runs, metric, few)


def metric_title(run: RunFolder, metric: str) -> str:
    """A metric as the title of a table: "Error", or "Squared error (squared units of y)" for the default error of numbers."""
    from fedtail.runs.metric_bounds import metric_name

    if metric_name(run.about, metric) == "squared error":
        return "Squared error (squared units of y)"
    return metric.capitalize() if metric in ("loss", "error") else metric


def evaluated_clients(run: RunFolder) -> str:
    """Which clients a run's statistics are over: "40 test clients" or, under an attack, "28 benign of 40 test clients"."""
    split, benign = run.tested_split, run.about.get("benign")
    some = "" if benign is None else f"{benign[split]} benign of "
    return f"{some}{run.about['splits'][split]} {split.replace('_', '-')} clients"


def privacy_lines(runs: list[RunFolder]) -> list[str]:
    """A line for each different privacy guarantee among the runs; runs without privacy have none.

    Runs of one method whose guarantees are equal, such as several seeds, share a line, which names the first run's folder.
    """
    lines = [f"{run.name}: {run.privacy_line}; fedtail privacy {shlex.quote(str(run.path))}" for run in runs if run.privacy_line]
    by_cost: dict[str, str] = {}
    for line in lines:
        by_cost.setdefault(line.partition(";")[0], line)
    return list(by_cost.values())


def show_saved_folder(folder: Path) -> None:
    """Print that the runs were saved in `folder`, and the command that writes a report about them."""
    typer.echo(f"Saved in {folder}.  A page to look at:  fedtail report {shlex.quote(str(folder))}")


def folder_name(name: str) -> str:
    """A folder's name made from `name`: in lower case, with "-" for other characters than letters, digits, "_", "." and "-".

    "-" and "." are dropped at its ends, and it is cut to 80 characters; "run" where nothing is left.
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.").lower()[:80] or "run"


def output_folder(place: Path, jobs: Callable[[Path], list[Job]], resume: bool) -> Path:
    """The folder for a command's runs: the first of `place`, `place-2`, `place-3`, ... that does not exist yet.

    With `resume`, the last of those that exist and hold a run of one of the jobs, if any, or else one with fewer rounds. `jobs`
    gives the jobs in a folder. Nothing is created.
    """
    from fedtail.runs.execution import folder_holds_run

    taken = existing_numbered_folders(place)
    for shorter in (False, True) if resume else ():
        ours = [folder for folder in taken if any(folder_holds_run(*job, shorter) for job in jobs(folder))]
        if ours:
            return ours[-1]
    return first_unused_folder(place)


def folder_and_split(place: Path, out: Path | None, resume: bool, redrawn: Callable[[Path], list[Job]],
                     as_written: Callable[[Path], list[Job]]) -> tuple[Path, bool]:
    """The folder for the runs of several seeds, and whether the split of the clients is drawn anew for every seed.

    `redrawn` and `as_written` give the jobs in a folder, with and without that. They are resumed with one split where an earlier
    version began them so, which is told to stderr. The folder is `out`, or one called `place`.
    """
    from fedtail.runs.execution import folder_holds_run

    folder = out or output_folder(place, redrawn, resume)
    if resume and not any(folder_holds_run(*job) for job in redrawn(folder)):
        earlier = out or output_folder(place, as_written, resume)
        if any(folder_holds_run(*job) for job in as_written(earlier)):
            typer.echo(f"{earlier} was begun with one split for all seeds, and goes on with it.", err=True)
            return earlier, False
    return folder, True


def first_unused_folder(place: Path) -> Path:
    """The first of `place`, `place-2`, `place-3`, ... that does not exist; it is not created."""
    taken = existing_numbered_folders(place)
    return place.with_name(f"{place.name}-{len(taken) + 1}") if taken else place


def existing_numbered_folders(place: Path) -> list[Path]:
    """Those of `place`, `place-2`, `place-3`, ... before the first that does not exist; [] where `place` does not."""
    taken = [place] if place.exists() else []
    while taken and (following := place.with_name(f"{place.name}-{len(taken) + 1}")).exists():
        taken.append(following)
    return taken


def resume_command(folder: Path) -> str:
    """The shell command that continues this one: the words of `sys.argv` with `--out FOLDER` and `--resume` added, quoted."""
    words = ["fedtail", *sys.argv[1:]]
    words += [] if any(word == "--out" or word.startswith("--out=") for word in words) else ["--out", str(folder)]
    return shlex.join([*words, *([] if "--resume" in words else ["--resume"])])
