"""`fedtail compare`: several methods on the same clients, cohorts and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtail.cli import options
from fedtail.cli.run import check_metric, fail_if_diverged, folder_name, output_folder, run_jobs, show_runs, show_saved_folder
from fedtail.cli.terminal import print_errors_as_sentences

if TYPE_CHECKING:
    from fedtail.cli.run import Job
    from fedtail.experiment import Experiment


@print_errors_as_sentences
def compare(
    experiments: list[Path] = typer.Argument(..., metavar="EXPERIMENT.toml...", show_default=False,
                                             help="Files with one method each, or one file with [[method]] entries."),
    settings: list[str] = options.SET,
    out: Path | None = options.OUT,
    seeds: str | None = options.SEEDS,
    resume: bool = options.RESUME,
    device: str | None = options.DEVICE,
    trust: list[str] = options.TRUST,
    metric: str | None = options.METRIC,
    as_json: bool = options.JSON,
) -> None:
    """Train several methods on the same clients, cohorts and batches, and compare them.

    Prints error over test clients, mean +- deviation over seeds, and each method's paired difference to the first with its
    standard error. Every method and seed is a run folder of its own, METHOD/seed-K, so that --resume does only what is missing.
    """
    from fedtail.cli.terminal import show_differences
    from fedtail.experiment import read_experiments
    from fedtail.runs.comparison import FEW_CLIENTS, number_of_tested_clients, paired_differences, rows_by_method, shown_metrics
    from fedtail.runs.files import write_json
    from fedtail.runs.run_folder import COMPARISON

    changes = options.settings_with_device(settings, device)
    wanted = [one for file in experiments for one in read_experiments(file, changes, trust)]
    check_methods_comparable(wanted)
    check_metric(wanted, metric)
    numbers = options.chosen_seeds(seeds, common_seeds(wanted, seeds is None))

    def jobs(folder: Path) -> list[Job]:
        """A job (experiment, seed, folder of its run) for each seed and method, in METHOD/seed-K below `folder`."""
        return [(one, seed, folder / folder_name(one.name) / f"seed-{seed}") for seed in numbers for one in wanted]

    folder = out or output_folder(Path("runs") / folder_name(experiments[0].stem), jobs, resume)
    runs = run_jobs(jobs(folder), folder, resume, as_json)
    every = {name: {"rows": rows_by_method(runs, name), "differences": paired_differences(runs, name)}
             for name in dict.fromkeys((*shown_metrics(runs), "loss"))}
    write_json(folder / COMPARISON, {"methods": [folder_name(one.name) for one in wanted], **every["error"], "metrics": every})
    less = {name: every[name]["differences"] for name in shown_metrics(runs, metric)}
    first, *others = less
    more = {"differences": less[first], "metric_differences": {name: less[name] for name in others}}
    show_runs(runs, folder, as_json, more, metric)
    if not as_json:
        alike = len({repr(one.algorithm.sample) for one in wanted}) == 1
        few = number_of_tested_clients(runs[0]) < FEW_CLIENTS and runs[0].has_client_table
        for rows in less.values():
            show_differences(rows, "on the same cohorts and batches" if alike else "on the same seeds (other cohorts)", few)
        show_saved_folder(folder)
    fail_if_diverged(runs)


def common_seeds(wanted: Sequence[Experiment], from_files: bool) -> tuple[int, ...]:
    """The seeds of the first experiment in `wanted`, a list of at least one.

    With `from_files` (no --seeds was given) it raises ExperimentError where the experiments name different seeds.
    """
    from fedtail.experiment import ExperimentError

    if from_files and len({one.seeds for one in wanted}) > 1:
        named = "; ".join(f"{one.name} {list(one.seeds)}" for one in wanted)
        raise ExperimentError(f"the methods name different seeds: {named}. Say which with --seeds 0..4.")
    return wanted[0].seeds


def check_methods_comparable(wanted: Sequence[Experiment]) -> None:
    """Raise ExperimentError unless `wanted` are at least two methods, all on the same data and with the same error.

    Their names must differ too, also as names of folders.
    """
    from fedtail.experiment import ExperimentError

    if len(wanted) < 2:
        raise ExperimentError(f"a comparison needs two methods or more, got {len(wanted)}. Give several files, or one with "
                              "[[method]] entries.")
    for one in wanted[1:]:
        if one.data.as_table() != wanted[0].data.as_table():
            raise ExperimentError(f"{one.name} and {wanted[0].name} do not have the same [data], so their difference would not "
                                  "be one of method.")
        if one.task.as_table().get("error") != wanted[0].task.as_table().get("error"):
            raise ExperimentError(f"{one.name} and {wanted[0].name} do not measure the same error.")
    places = [folder_name(one.name) for one in wanted]
    for one, place in zip(wanted, places, strict=True):
        if places.count(place) > 1:
            raise ExperimentError(f"two methods are called {one.name!r} (or nearly so). Give each file another name = \"...\".")
