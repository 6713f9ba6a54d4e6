"""`fedtail tune`: search settings by how held-out training clients do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.run import existing_numbered_folders, first_unused_folder, folder_name, resume_command
from fedtail.cli.terminal import FAILED, INTERRUPTED, Watcher, exit_with_message, print_errors_as_sentences, print_json


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
    10th. Fewer than 20 held-out clients have no percentiles: the default is their mean, and each is shown by name. Spreads
    (std, variance) are better small. Every setting is trained with each of the file's seeds, and compared by the mean; a
    simpler one (a larger tail fraction) within one standard error of the best is preferred. Test clients are never evaluated.
    The chosen experiment is written to best.toml, ready for `fedtail run`.
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
        done = len(result["trials"]) + result["failed"]
        exit_with_message(f"stopped after {done} trials.\nGo on with:  {resume_command(folder)}", INTERRUPTED)


def show_trials(result: dict[str, Any]) -> None:
    """Print every trial of a search with its spread, which one is chosen and why, what to be warned of, and its file.

    `result` is what `fedtail.runs.tuning.tune` returns. For a private search the guarantee is printed too.
    """
    from fedtail.cli.terminal import show_table

    every = [*result["trials"], *result["diverged"]]
    names = list(every[0]["settings"]) if every else []
    less, stable = result.get("differences", []), " among those whose loss does not diverge" if result["left_out"] else ""
    cells = [[_value_cell(trial), _difference_cell(less[k] if k < len(less) else None),
              *(_cell_text(trial["settings"][name]) for name in names)] for k, trial in enumerate(every)]
    title = f"{len(every)} trials, the best by {judged_words(result)}{stable}"
    unit = f", {result['unit']}" if result["unit"] else ""
    how = f" ({result['better']} is better{_seeds_note(result['seeds'])})"
    head = "minus the best (95% for new clients)"
    first = "worst client" if result["statistic"] == "p100" else result["statistic"]
    show_table(title + unit + how, [first, head, *names] if less else [first, *names],
               cells if less else [[cell[0], *cell[2:]] for cell in cells])
    show_held_out(result)
    for text in dict.fromkeys(one["note"] for one in less if one["note"] and None in (one["low"], one["high"])):
        typer.echo(f"No interval: {text}.")
    for text in result["warnings"]:
        typer.secho(f"warning: {text}", fg=typer.colors.YELLOW)
    if result.get("reason"):
        typer.echo(result["reason"][0].upper() + result["reason"][1:])
    if result.get("privacy") and result["best"]:
        typer.echo(f"The best is in {result['file']}, and its model in model.safetensors beside it: release that one. A run of "
                   "the file would be charged beside the search.")
        typer.echo(f"{result['privacy']['statement']}\n{result['privacy']['guarantee']}")
    elif result["best"]:
        typer.echo(f"It is in {result['file']}.  Run it:  fedtail run {result['file']}")


def judged_words(result: dict[str, Any]) -> str:
    """What the trials of a search are compared by, and over how many held-out clients, in words.

    >>> judged_words({"statistic": "p90", "metric": "error", "clients": 60, "models": "shared"})
    'p90 of the error over 60 held-out clients'
    >>> judged_words({"statistic": "p100", "metric": "error", "clients": 2, "models": "personal"})
    'error of the worst client over the held-out examples of 2 clients'
    """
    from fedtail.runs.answer_words import statistic_words

    plural = "" if result["clients"] == 1 else "s"
    who = f"{result['clients']} held-out client{plural}" if result["models"] == "shared" else \
        f"the held-out examples of {result['clients']} client{plural}"
    who += " of each seed" if len(result.get("by_client") or ()) > result["clients"] else ""
    return f"{statistic_words(result['statistic'], result['metric'])} over {who}"


def show_held_out(result: dict[str, Any]) -> None:
    """Print each of few held-out clients by name with its metric under the chosen trial, and under the best if another.

    Nothing is printed of 20 clients or more, and of a private search.
    """
    from fedtail.cli.terminal import show_table

    rows = result["by_client"]
    if not rows:
        return
    names = ["chosen", *(["best"] if any(row["chosen"] != row["best"] for row in rows) else [])]
    unit = f", {result['unit']}" if result["unit"] else ""
    cells = [[row["client"], str(row["size"]), *("-" if row[name] is None else _cell_text(row[name]) for name in names)]
             for row in rows]
    show_table(f"{result['metric']} of each held-out client{unit}, worst first", ["client", "examples", *names], cells)


def _value_cell(trial: dict[str, Any]) -> str:
    """The value of a trial with its standard deviation over seeds, "12.3 +- 0.4", or "diverged" with how many seeds did."""
    if trial["value"] is None:
        by_seed = trial["by_seed"] or []
        gone = sum(one is None for one in by_seed)
        return f"diverged ({gone} of {len(by_seed)} seeds)" if len(by_seed) > 1 else "diverged"
    spread = "" if trial["std"] is None else f" +- {trial['std']:.2g}"
    return _cell_text(trial["value"]) + spread + (", loss diverges" if trial["unstable"] else "")


def _difference_cell(less: dict[str, Any] | None) -> str:
    """A difference to the best with its interval, "+1.2 (-0.3 to 2.7)"; "" for the best itself and for a diverged trial."""
    if less is None or (less["estimate"] == 0 and less["error"] == 0):
        return ""
    ends = "no interval" if less["low"] is None or less["high"] is None else f"{less['low']:+z.3g} to {less['high']:+z.3g}"
    return f"{less['estimate']:+z.3g} ({ends})"


def _seeds_note(seeds: list[int]) -> str:
    """The end of the table's title, ", mean over 3 seeds, +- their deviation"; "" for one seed."""
    return f", mean over {len(seeds)} seeds, +- their standard deviation" if len(seeds) > 1 else ""


def _cell_text(value: Any) -> str:
    """The text of a setting or a value in the table; floats have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
