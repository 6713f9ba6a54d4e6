"""`fedtail node`: what the operator of a node does on the node itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.plain_help import PlainCommand
from fedtail.cli.terminal import print_errors_as_sentences, print_json

node = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Commands for the operator of a node, on the node itself.")


@node.callback()
def node_commands() -> None:
    """Commands for the operator of a node, on the node itself. They read the node's own files, and send nothing."""


SETTINGS = typer.Argument(..., metavar="NODE.toml", help="The node's settings.", show_default=False)

TRUST = typer.Option(False, "--trust", help="Run the code that the settings allow (trust); read it first.", show_default=False)


@node.command(short_help="Write a policy for the node, from its experiment.", cls=PlainCommand)
@print_errors_as_sentences
def init(settings: Path = SETTINGS, trust: bool = TRUST) -> None:
    """Write policy.toml: what this node allows, whatever a server says, just enough for one training of its experiment.

    Read it, and change it: what it does not allow, the node refuses. A policy that exists is not replaced. The experiment is not
    accepted by this: `fedtail node accept` says in words what it asks. Settings that allow code to run (trust) need --trust.
    """
    from dataclasses import replace

    from fedtail.deployment.policy_example import own_masses, write_policy
    from fedtail.deployment.settings import NodeSettings
    from fedtail.deployment.told import tail_sentences

    read = replace(NodeSettings.read(settings), allow_code=trust)
    path = write_policy(read)
    typer.echo(path.read_text(encoding="utf-8"))
    for line in tail_sentences(read.read_experiments(), read.read_policy(), own_masses(read)):
        typer.echo(line.strip(), err=True)
    typer.echo(f"Written to {path}. Then: fedtail node accept {settings}{' --trust' if trust else ''}", err=True)


@node.command(short_help="Say what the experiment asks; with its digest: accept it.", cls=PlainCommand)
@print_errors_as_sentences
def accept(
    settings: Path = SETTINGS,
    digest: str = typer.Argument("", metavar="[DIGEST]", help="Of the experiment, as this prints it.", show_default=False),
    trust: bool = TRUST,
) -> None:
    """Say in words what the node's experiment asks, what that costs, and what changed since it was accepted last.

    With the digest that is printed, the experiment is accepted: without that, and after every change of its file, its code or
    the data, the node answers nothing. Settings that allow code to run (trust) need --trust, at first and when it changed.
    """
    from dataclasses import replace

    from fedtail.deployment.consent import accept as give_consent
    from fedtail.deployment.consent import experiment_digest
    from fedtail.deployment.settings import NodeSettings
    from fedtail.deployment.told import asked_sentences

    read = replace(NodeSettings.read(settings), allow_code=trust)
    if digest:
        give_consent(read, digest)
        typer.echo(f"{read.name} takes part in {read.experiment}. A node that is running must be started again.")
        return
    for line in asked_sentences(read):
        typer.echo(line)
    typer.echo(f"To accept this: fedtail node accept {settings}{' --trust' if trust else ''} "
               f"{experiment_digest(read.read_experiments())}")


@node.command(short_help="Say in words what the node takes part in and allows.", cls=PlainCommand)
@print_errors_as_sentences
def check(settings: Path = SETTINGS) -> None:
    """Read the node's settings, data, experiment, policy and consent, and say what it answers and what that may cost.

    The exit code is not 0, with the reason, where one of them is missing or not valid: then the node would not start.
    """
    from fedtail.deployment.consent import check_readiness
    from fedtail.deployment.settings import NodeSettings
    from fedtail.deployment.told import node_sentences

    read = NodeSettings.read(settings)
    for line in node_sentences(read):
        typer.echo(line)
    check_readiness(read)
    typer.echo("The experiment is accepted, and the node may start.")


@node.command(short_help="Run the node, after the checks.", cls=PlainCommand)
@print_errors_as_sentences
def run(
    settings: Path = SETTINGS,
    server: str = typer.Option("", "--server", metavar="HOST:PORT", help="Instead of that in the folder.", show_default=False),
) -> None:
    """Check the node as `fedtail node check` does, and run it until Ctrl-C or SIGTERM; it connects to the server by itself.

    Over Flower it starts a flower-supernode and the way to the server's gate. Which transport it is, and where the server is,
    says gate.toml (Flower) or server.toml (NVFlare) in the folder.
    """
    from fedtail.deployment.node_process import run_node

    run_node(settings.resolve().parent, settings.name, server)


@node.command(short_help="Say what the node has answered and refused, and what is left.", cls=PlainCommand)
@print_errors_as_sentences
def status(settings: Path = SETTINGS) -> None:
    """Say, from the node's own files, what it takes part in, when it answered last, what it refused, and what is left.

    The node may be running. The exit code is 1 where its audit log was cut or changed.
    """
    from fedtail.deployment.node_status import node_log, status_sentences
    from fedtail.deployment.settings import NodeSettings

    read = NodeSettings.read(settings)
    for line in status_sentences(read):
        typer.echo(line)
    if node_log(read)[1]:
        raise typer.Exit(1)


@node.command(short_help="Print the node's audit log, or verify it.", cls=PlainCommand)
@print_errors_as_sentences
def log(
    settings: Path = SETTINGS,
    verify: bool = typer.Option(False, "--verify", help="Say what was cut, changed, moved or left out, and nothing else."),
    last: int = typer.Option(20, min=1, help="How many lines."),
) -> None:
    """Print the last lines of the node's audit log: what was accepted, asked, refused, charged and answered, without data.

    With --verify the whole log is checked, against its digests and the line that the operator's consent names; the exit code is
    1 where it is not what was written.
    """
    from fedtail.deployment.node_status import node_log
    from fedtail.deployment.settings import NodeSettings

    read = NodeSettings.read(settings)
    print_log(*node_log(read), verify=verify, last=last)


def print_log(entries: list[dict[str, Any]], problems: list[str], verify: bool, last: int) -> None:
    """Print the last lines of an audit log, or with `verify` only how many there are, and its problems; exit 1 for any."""
    from fedtail.deployment.node_status import entry_text
    from fedtail.escaping import one_line

    for one in () if verify else entries[-last:]:
        typer.echo(entry_text(one))
    for problem in problems:
        typer.echo(f"NOT WHAT WAS WRITTEN: {one_line(problem)}.", err=True)
    if problems:
        raise typer.Exit(1)
    if verify:
        typer.echo(f"{len(entries)} lines, none cut, changed, moved or left out.")


@node.command(short_help="Say what the node's data have answered so far.", cls=PlainCommand)
@print_errors_as_sentences
def budget(settings: Path = SETTINGS) -> None:
    """Say what the node's data have answered over all runs and servers, what its policy allows, and what is left."""
    from fedtail.deployment.settings import NodeSettings
    from fedtail.deployment.told import left_sentences

    read = NodeSettings.read(settings)
    found = read.data_budget()
    typer.echo(f"{found.spent_text()}.")
    for line in left_sentences(read.read_experiments(), found):
        typer.echo(line)
    typer.echo(f"Recorded in {found.folder}.")


@node.command(short_help="Predict by a client's personal model, on the node.", cls=PlainCommand)
@print_errors_as_sentences
def predict(
    settings: Path = typer.Argument(..., metavar="NODE.toml", help="The node's settings.", show_default=False),
    data: Path = typer.Option(..., "--data", metavar="FILE", help="Examples: .npz, .parquet, .csv.", show_default=False),
    client: str = typer.Option("", "--client", metavar="NAME", help="Whose model, where there are several.", show_default=False),
    x: list[str] = typer.Option(["x"], "--x", metavar="NAME", help="The array (or columns) of inputs."),
    method: str = typer.Option("", "--method", metavar="NAME", help="Of several in the experiment file.", show_default=False),
    member: int = typer.Option(0, "--member", min=0, help="The position of a model in a family."),
    received: bool = typer.Option(False, "--received", help="Predict by the shared model received last instead."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE.npz", help="Write predictions there.", show_default=False),
    as_json: bool = options.JSON,
) -> None:
    """Predict by the personal model of a client of this node, one line for each example. Nothing is sent.

    The model is read from the folder memory beside the settings, while the node may be running. A client that has none is an
    error: with --received, and only then, the shared model that the node received last predicts.
    """
    import numpy as np

    from fedtail.deployment.own_models import predict as predict_by_own_model
    from fedtail.deployment.settings import NodeSettings

    inputs = x[0] if len(x) == 1 else x
    model, found = predict_by_own_model(NodeSettings.read(settings), data, inputs, client, method, member, received)
    which = f"the personal model of client {model.client}" if model.kind == "personal" else "the shared model received last"
    if out is not None:
        np.savez(out, prediction=found.numpy())
    if as_json:
        print_json({"client": model.client, "model": model.kind, "predictions": found.tolist()})
    elif out is None:
        typer.echo("\n".join(map(_prediction_text, found.tolist())))
    typer.echo(f"{len(found)} predictions by {which}{'' if out is None else f', in {out}'}.", err=True)


def _prediction_text(value: int | float | list[float]) -> str:
    """One example's prediction as text: a class "3", a number "0.25", or several numbers with spaces between them."""
    if isinstance(value, list):
        return " ".join(map(_prediction_text, value))
    return str(value) if isinstance(value, int) else f"{value:.6g}"
