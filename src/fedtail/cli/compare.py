"""`fedtail compare`: several methods on the same clients, cohorts and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtail.cli import options
from fedtail.cli.run import check_metric, fail_if_diverged, folder_and_split, folder_name, run_jobs, show_runs, show_saved_folder
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
    tail: str = typer.Option("worst10", "--tail", metavar="STATISTIC",
                             help="What the verdict is about: worst10, worst25, p90, ..."),
    price: float = typer.Option(1.0, "--price", metavar="NUMBER", min=0.0,
                                help="The most that the mean may pay for each unit that the tail gains."),
    metric: str | None = options.METRIC,
    as_json: bool = options.JSON,
) -> None:
    """Train several methods on the same clients, cohorts and batches, and say which to take.

    Ends in a verdict for each method against the first: what the tail gains and the mean pays, with 95% intervals for new
    clients, and "take it", "do not" or "this data cannot tell". The split of the clients is drawn anew for every seed, unless the
    file fixes it (split = { ..., seed = 0 }). Every method and seed is a run folder of its own, METHOD/seed-K, so that --resume
    does only what is missing.
    """
    from fedtail.cli.answers import show_answers
    from fedtail.cli.terminal import show_differences
    from fedtail.experiment import read_experiments
    from fedtail.inference.statistics import statistic_named
    from fedtail.runs.comparison import are_clients_named, comparison_entries, shown_metrics
    from fedtail.runs.files import write_json
    from fedtail.runs.run_folder import COMPARISON

    statistic_named(tail)                        # refused here, not after the training
    changes = options.settings_with_device(settings, device)
    wanted = [one for file in experiments for one in read_experiments(file, changes, trust)]
    check_methods_comparable(wanted)
    check_metric(wanted, metric)
    numbers = options.chosen_seeds(seeds, common_seeds(wanted, seeds is None))
    place = Path("runs") / folder_name(experiments[0].stem)
    jobs, folder = comparison_jobs(wanted, numbers, place, out, resume)
    runs = run_jobs(jobs, folder, resume, as_json)
    found = comparison_entries(runs, tail, price)
    write_json(folder / COMPARISON, {"methods": [folder_name(one.name) for one in wanted], **found})
    less = {name: found["metrics"][name]["differences"] for name in shown_metrics(runs, metric)}
    first, *others = less
    more = {"differences": less[first], "metric_differences": {name: less[name] for name in others},
            "answers": found["answers"], "split": found["split"]}
    show_runs(runs, folder, as_json, more, metric)
    if not as_json:
        alike = len({repr(one.algorithm.sample) for one in wanted}) == 1
        few = are_clients_named(runs[0])
        for rows in less.values():
            show_differences(rows, "on the same cohorts and batches" if alike else "on the same seeds (other cohorts)", few)
        show_answers(found["answers"], found["split"], less)
        show_saved_folder(folder)
    fail_if_diverged(runs)


def comparison_jobs(wanted: Sequence[Experiment], seeds: Sequence[int], place: Path, out: Path | None,
                    resume: bool) -> tuple[list[Job], Path]:
    """A job (experiment, seed, folder of its run) for each seed and method, in METHOD/seed-K below the folder returned with them.

    The split of the clients follows the run's seed unless the file fixes it. A comparison that an earlier version began with one
    split for all seeds is resumed with that one. The folder is `out`, or one called `place`.
    """
    def jobs_of(plans: Sequence[Experiment]) -> Callable[[Path], list[Job]]:
        """A function from a folder to the jobs of `plans` in it."""
        return lambda folder: [(one, seed, folder / folder_name(one.name) / f"seed-{seed}") for seed in seeds for one in plans]

    redrawn, as_written = jobs_of([replace(one, data=one.data.redrawn_by_seed()) for one in wanted]), jobs_of(wanted)
    folder, anew = folder_and_split(place, out, resume, redrawn, as_written)
    return (redrawn if anew else as_written)(folder), folder


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
