"""The command line. Commands that need no tensor import none; each imports what it needs when it runs."""

from __future__ import annotations

import signal
from importlib.metadata import entry_points
from operator import attrgetter

import typer

from fedtail.cli.compare import compare
from fedtail.cli.data import data
from fedtail.cli.demo import demo
from fedtail.cli.deploy import deploy
from fedtail.cli.experiment_file import init, show
from fedtail.cli.export import export
from fedtail.cli.matrix import matrix
from fedtail.cli.node import node
from fedtail.cli.plain_help import PlainCommand
from fedtail.cli.predict import predict
from fedtail.cli.privacy import privacy
from fedtail.cli.quantile import quantile
from fedtail.cli.report_and_choose import choose, report
from fedtail.cli.run import run
from fedtail.cli.tune import tune
from fedtail.version import __version__

HELP = "Federated learning that serves every client: train for the tail of the distribution over clients."
MANUAL = """\
From nothing to a page:

\b
  fedtail init experiment.toml          a commented file to start from (--data mine.npz: for your data)
  fedtail run experiment.toml           train, in a run folder that survives a crash
  fedtail compare experiment.toml       its [[method]] entries, on the same cohorts and batches
  fedtail report runs/experiment        one page about the runs

Exit codes: 0 done; 1 a run failed; 2 refused, nothing was done; 130 interrupted, saved, --resume goes on."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=HELP, epilog=MANUAL)
COMMANDS = (
    (init, "Write a commented experiment file to start from."), (show, "Print an experiment with every default."),
    (run, "Train a method, in a folder that survives a crash."), (compare, "Train several methods on the same cohorts."),
    (matrix, "Train every combination of protections."), (tune, "Search settings by how held-out clients do."),
    (report, "Write a page about runs."),
    (predict, "Write what a run's model says of examples."), (export, "Write a run's model and its model card."),
    (choose, "Say which model of a family suits a client."), (quantile, "Private quantiles of one number per client."),
    (demo, "Train FedAvg and Delta-FL on an example."), (privacy, "Say which noise a privacy guarantee takes."))
for command, brief in COMMANDS:
    app.command(short_help=brief, cls=PlainCommand)(command)
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")
app.add_typer(node, name="node")
for added in sorted(entry_points(group="fedtail.commands"), key=attrgetter("name")):      # by packages beside this one
    app.command(name=added.name, cls=PlainCommand)(added.load())


def _print_version(wanted: bool) -> None:
    """If `wanted` (--version was given), print the version and raise `typer.Exit` with code 0; otherwise do nothing."""
    if wanted:
        typer.echo(f"fedtail {__version__}")
        raise typer.Exit


@app.callback(help=HELP, epilog=MANUAL)
def global_options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that stand before a command. Each acts in a callback of its own, so nothing is left to do here."""


def main() -> None:
    """Run the command line on `sys.argv`. Until a run begins, Ctrl-C ends the process at once, as there is nothing to save."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)      # before a run is watched there is nothing to save
    app()
