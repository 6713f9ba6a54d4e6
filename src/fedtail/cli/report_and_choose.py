"""`fedtail report` and `fedtail choose`: commands about finished runs and their models."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtail.cli import options
from fedtail.cli.terminal import print_errors_as_sentences, print_json, show_table


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
    open_page: bool = typer.Option(False, "--open", help="Open the page in a browser."),
    as_json: bool = options.JSON,
) -> None:
    """Write one page about runs that works offline: tables, distributions over clients, the tail, who chooses which model."""
    from fedtail.report import write_page
    from fedtail.runs import find_runs

    found = find_runs(runs)
    page = write_page(found, out or runs[0] / "report.html", title, baseline, metric)
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
    mine: Path = typer.Option(..., "--data", metavar="FILE", show_default=False,
                              help="One client's examples: .npz, .parquet, .csv."),
    x: list[str] = typer.Option(["x"], "--x", metavar="NAME", help="The array (or columns) of inputs."),
    y: str = typer.Option("y", "--y", metavar="NAME", help="The array of targets."),
    trust: list[str] = options.TRUST,
    metric: str = typer.Option("error", "--metric", metavar="NAME", help="What to choose by: error, loss, or one of the file's."),
    as_json: bool = options.JSON,
) -> None:
    """Say which model of a family suits the client whose data these are. Everything is computed here; nothing is sent."""
    from fedtail.runs.choosing import choose_model

    picked = choose_model(run, mine, x[0] if len(x) == 1 else x, y, trust, metric)
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
