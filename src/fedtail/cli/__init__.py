"""The command line. Commands that need no tensor import none; each imports what it needs when it runs."""

from __future__ import annotations

import typer

from fedtail.cli.demo import demo
from fedtail.version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None,
                  help="Federated learning that serves every client: train for the tail of the distribution over clients.")
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedtail {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Federated learning that serves every client: train for the tail of the distribution over clients."""


def main() -> None:
    app()
