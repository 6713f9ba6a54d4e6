"""`fedtail tune`: search settings by how held-out training clients do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.run import existing_numbered_folders, first_unused_folder, folder_name, resume_command
from fedtail.cli.terminal import FAILED, INTERRUPTED, Watcher, exit_with_message, print_errors_as_sentences, print_json

SHOWN = 10


@print_errors_as_sentences
def tune(
    experiment: Path = options.EXPERIMENT,
    settings: list[str] = options.SET,
    out: Path | None = options.OUT,
    seeds: str | None = options.SEEDS,
    method: str | None = options.METHOD,
    trials: int | None = typer.Option(None, "--trials", min=1, help="How many settings to try.", show_default=False),
    resume: bool = options.RESUME,
    device: str | None = options.DEVICE,
    trust: list[str] = options.TRUST,
    as_json: bool = options.JSON,
) -> None:
    """Search the fields named in [tune.search], choosing by a statistic over held-out training clients.

    The papers choose by the 90th percentile of the error, which is the default; of a metric where higher is better it is the
    10th. Spreads (std, variance) are better small. Every setting is trained with each of the file's seeds, and compared by the
    mean. Test clients are never evaluated. The best experiment is written to best.toml, ready for `fedtail run`.
    """
    from fedtail.experiment.tune_section import read_search
    from fedtail.runs.tuning import tune as search_all

    changes = [*options.settings_with_device(settings, device), *([] if trials is None else [f"tune.trials={trials}"])]
    search = read_search(experiment, changes, method, trust)
    numbers = options.chosen_seeds(seeds, search.first_experiment().seeds)
    place = Path("runs") / f"{folder_name(search.name)}-tune"
    folder = out or (([*existing_numbered_folders(place)] or [place])[-1] if resume else first_unused_folder(place))
    watcher = Watcher(quiet=as_json)
    with watcher.show_progress():
        result = search_all(search, numbers, folder, watcher, resume)
    if as_json:
        print_json(result)
    else:
        show_trials(result)
    if result["finished"] and not result["best"] and not result["trials"] and result.get("privacy") and not result["failed"]:
        exit_with_message("the random number of trials was zero: nothing was tried, and nothing is released. To search again in "
                          "another folder costs as much again.", FAILED)
    if result["finished"] and not result["best"]:
        exit_with_message("no trial gave a number: all diverged, or the metric is defined for no held-out client. Check the "
                          "data, the metric and the learning rates.", FAILED)
    if not result["finished"]:
        exit_with_message(f"stopped after {len(result['trials'])} trials.\nGo on with:  {resume_command(folder)}", INTERRUPTED)


def show_trials(result: dict[str, Any]) -> None:
    """Print the SHOWN best trials of a search as a table, then, if one succeeded, the file of the best experiment.

    `result` is what `fedtail.runs.tuning.tune` returns. For a private search the guarantee is printed too.
    """
    from fedtail.cli.terminal import show_table

    names = list(result["trials"][0]["settings"]) if result["trials"] else []
    best = result["trials"][:SHOWN]
    cells = [[_cell_text(trial["value"]), *(_cell_text(trial["settings"][name]) for name in names)] for trial in best]
    lost = f" and {result['failed']} that diverged" if result["failed"] else ""
    title = (f"{len(result['trials'])} trials{lost}, the best by {result['statistic']} of the {result['metric']} over held-out "
             "clients")
    unit = f", {result['unit']}" if result["unit"] else ""
    how = f" ({result['better']} is better{_seeds_note(result['seeds'])})"
    show_table(title + unit + how, [result["statistic"], *names], cells)
    if result.get("privacy") and result["best"]:
        typer.echo(f"The best is in {result['file']}, and its model in model.safetensors beside it: release that one. A run of "
                   "the file would be charged beside the search.")
        typer.echo(f"{result['privacy']['statement']}\n{result['privacy']['guarantee']}")
    elif result["best"]:
        typer.echo(f"The best is in {result['file']}.  Run it:  fedtail run {result['file']}")


def _seeds_note(seeds: list[int]) -> str:
    """The end of the table's title, ", mean over 3 seeds"; "" for one seed."""
    return f", mean over {len(seeds)} seeds" if len(seeds) > 1 else ""


def _cell_text(value: Any) -> str:
    """The text of a setting or a value in the table; floats have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
