"""`fedtail init` and `fedtail show`: experiment files."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtail.cli import options
from fedtail.cli.terminal import print_errors_as_sentences, print_json


@print_errors_as_sentences
def init(
    file: Path = typer.Argument(Path("experiment.toml"), metavar="FILE", help="Where to write it."),
    data: Path | None = typer.Option(None, "--data", metavar="DATA", show_default=False,
                                     help="Your data (.npz, .parquet, .csv, a folder): the file is written for them."),
    x: list[str] | None = options.X,
    y: str | None = options.Y,
    client: str | None = options.CLIENT,
    force: bool = typer.Option(False, "--force", help="Overwrite a file that is there."),
) -> None:
    """Write a commented experiment file to start from; with --data, one that fits your data."""
    from fedtail.experiment.starter import starter_text

    if file.exists() and not force:
        raise FileExistsError(f"{file} is there already. Choose another name, or write --force.")
    text = starter_text(file, data, options.name_or_names(x), y, client)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if 'part = "mine:Net"' in text:
        typer.echo(f"Wrote {file}.  No model of fedtail fits these inputs and targets: write mine.py beside it, with a "
                   f"torch.nn.Module called Net, then:  fedtail run {file} --trust {file.parent}")
        return
    typer.echo(f"Wrote {file}.  Look at it, then:  fedtail run {file}")


@print_errors_as_sentences
def show(
    experiment: Path = options.EXPERIMENT,
    settings: list[str] = options.SET,
    method: str | None = options.METHOD,
    as_json: bool = options.JSON,
) -> None:
    """Print an experiment fully resolved: every part with every field, defaults included.

    Reads no data, and imports nothing that the file names: code of your own is shown as it is written.
    """
    import tomli_w

    from fedtail.experiment import AS_WRITTEN, read_experiment, read_experiments

    chosen = ([read_experiment(experiment, settings, method, AS_WRITTEN)] if method
              else read_experiments(experiment, settings, AS_WRITTEN))
    if as_json:
        tables = [one.as_table() for one in chosen]
        print_json(tables[0] if len(tables) == 1 else {"methods": tables})
        return
    typer.echo("\n\n".join((f"# {one.name}\n" if len(chosen) > 1 else "") + tomli_w.dumps(one.as_table()).strip()
                           for one in chosen))
