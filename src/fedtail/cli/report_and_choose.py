"""`fedtail report` and `fedtail choose`: commands about finished runs and their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.terminal import number_text, print_errors_as_sentences, print_json, show_table, text_with_spread


@print_errors_as_sentences
def report(
    runs: list[Path] = typer.Argument(..., metavar="RUN...", show_default=False,
                                      help="Run folders, or folders with runs somewhere in them."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE", show_default=False,
                                    help="Where to write the page; by default report.html in the first folder."),
    baseline: str | None = typer.Option(None, "--baseline", metavar="NAME", show_default=False,
                                        help="The method to compare with; by default the first."),
    title: str | None = typer.Option(None, "--title", help="What the page is called.", show_default=False),
    metric: str = typer.Option("error", "--metric", metavar="NAME", help="The metric that the page opens with."),
    tail: str | None = typer.Option(None, "--tail", metavar="STATISTIC", show_default=False,
                                    help="What the verdicts are about: worst25, p90, ...; by default that of the comparison."),
    price: float | None = typer.Option(None, "--price", metavar="NUMBER", min=0.0, show_default=False,
                                       help="The most that the mean may pay for each unit that the tail gains; likewise."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in a browser."),
    as_json: bool = options.JSON,
) -> None:
    """Write one page about runs that works offline: tables, distributions over clients, the tail, who chooses which model."""
    from fedtail.report import write_page
    from fedtail.runs import find_runs
    from fedtail.runs.comparison import asked_of_comparison

    found = find_runs(runs)
    asked = asked_of_comparison(runs[0])
    page = write_page(found, out or runs[0] / "report.html", title, baseline, metric, tail or asked[0],
                      asked[1] if price is None else price)
    if as_json:
        print_json({"page": str(page), "runs": [str(run.path) for run in found]})
    else:
        many = "s" if len(found) > 1 else ""
        typer.echo(f"Wrote {page} ({page.stat().st_size / 1e6:.1f} MB), about {len(found)} run{many}.")
    if open_page:
        typer.launch(str(page))


@print_errors_as_sentences
def choose(
    run: Path = typer.Argument(..., metavar="RUN", help="The run folder of a family.", show_default=False),
    mine: Path | None = typer.Option(None, "--data", metavar="FILE", show_default=False,
                                     help="One client's examples, .npz, .parquet or .csv; without it, one model for all."),
    statistic: str | None = typer.Option(None, "--statistic", metavar="STATISTIC", show_default=False,
                                         help="Over validation clients, without --data: mean, worst10; by default p90, of "
                                              "fewer than 20 clients the mean."),
    x: list[str] | None = options.RUN_X,
    y: str | None = typer.Option(None, "--y", metavar="NAME", help="The array of targets; by default that of the run.",
                                 show_default=False),
    trust: list[str] = options.TRUST,
    metric: str = typer.Option("error", "--metric", metavar="NAME", help="What to choose by: error, loss, or one of the file's."),
    as_json: bool = options.JSON,
) -> None:
    """Say which model of a family suits the client whose data these are. Everything is computed here; nothing is sent.

    Without --data, which model to give to all clients, by the family's validation clients: the best, or one closer to plain
    averaging within one standard error of it. Fewer than 20 of them are shown by name.
    """
    from fedtail.runs.choosing import choose_for_everybody, choose_model

    if mine is None:
        show_choice(choose_for_everybody(run, statistic, metric), as_json)
        return
    picked = choose_model(run, mine, options.name_or_names(x), y, trust, metric)
    if as_json:
        print_json(picked)
        return
    unit = " (%)" if picked["unit"] else ""
    show = "{:.2f}" if unit else "{:.4g}"
    cells = [[row["model"], show.format(row["value"]), "<- this one" if row["chosen"] else ""] for row in picked["models"]]
    better = ", higher is better" if picked["better"] == "higher" else ""
    named = metric.capitalize() if metric in ("loss", "error") else metric
    show_table(f"{named} on {picked['examples']} examples{unit}{better}", ["model", metric, ""], cells)
    typer.echo(f"Its parameters are in {picked['file']}.")


def show_choice(found: dict[str, Any], as_json: bool) -> None:
    """Print which model of a family is chosen for all clients, as `choose_for_everybody` found, and why."""
    if as_json:
        print_json(found)
        return
    from fedtail.runs.answer_words import statistic_words

    unit = " (%)" if found["unit"] else ""
    seeds = f", +- std over {len(found['seeds'])} seeds" if len(found["seeds"]) > 1 else ""
    cells = [[row["model"], _value(row, found["unit"]), _difference(row, found["unit"]),
              "<- this one" if row["chosen"] else ""] for row in found["models"]]
    words = statistic_words(found["statistic"], found["metric"])
    show_table(f"{words} over {found['clients']} validation clients{unit}{seeds}",
               ["model", "worst client" if found["statistic"] == "p100" else found["statistic"],
                "minus the best (95% for new clients)", ""], cells)
    _show_validation_clients(found)
    for name in found["left_out"]:
        typer.secho(f"left out: {name}, which has diverged or has no value for two clients.", fg=typer.colors.YELLOW)
    for text in found["warnings"]:
        typer.secho(f"warning: {text}", fg=typer.colors.YELLOW)
    for text in dict.fromkeys(row["note"] for row in found["models"] if row["note"] and None in (row["low"], row["high"])):
        typer.echo(f"No interval: {text}.")
    typer.echo(found["reason"][0].upper() + found["reason"][1:])
    typer.echo(f"Its parameters are in {', '.join(found['files'])}.")


def _show_validation_clients(found: dict[str, Any]) -> None:
    """Print each of few validation clients by name with its metric under every model; nothing of 20 or more."""
    if not found["by_client"]:
        return
    names = [row["model"] for row in found["models"]]

    def cell(value: float | None) -> str:
        """A client's value; a dash where the metric is not defined for it."""
        return "-" if value is None else number_text(value, found["unit"])

    cells = [[row["client"], str(row["size"]), *(cell(row["values"][name]) for name in names)] for row in found["by_client"]]
    unit = " (%)" if found["unit"] else ""
    show_table(f"{found['metric']} of each validation client{unit}, worst first", ["client", "examples", *names], cells)


def _value(row: dict[str, Any], unit: str) -> str:
    """The statistic of a model, with its deviation over seeds where there are several."""
    return number_text(row["value"], unit) if row["std"] is None else text_with_spread(row["value"], row["std"], unit)


def _difference(row: dict[str, Any], unit: str) -> str:
    """The difference of a model to the best with its interval; "" for the best itself."""
    if row["difference"] == 0 and row["error"] == 0:
        return ""
    signed = "+.2f" if unit else "+.3g"
    ends = "no interval" if row["low"] is None or row["high"] is None else f"{row['low']:{signed}} to {row['high']:{signed}}"
    return f"{row['difference']:{signed}} ({ends})"
