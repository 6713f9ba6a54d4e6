"""`fedtail node`: what the operator of a node does on the node itself."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtail.cli import options
from fedtail.cli.plain_help import PlainCommand
from fedtail.cli.terminal import print_errors_as_sentences, print_json

node = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Commands for the operator of a node, on the node itself.")


@node.callback()
def node_commands() -> None:
    """Commands for the operator of a node, on the node itself. They read the node's own files, and send nothing."""


SETTINGS = typer.Argument(..., metavar="NODE.toml", help="The node's settings.", show_default=False)


@node.command(short_help="Write a policy for the node, from its experiment.", cls=PlainCommand)
@print_errors_as_sentences
def init(settings: Path = SETTINGS) -> None:
    """Write policy.toml: what this node allows, whatever a server says, just enough for one training of its experiment.

    Read it, and change it: what it does not allow, the node refuses. A policy that exists is not replaced.
    """
    from fedtail.deployment.policy_example import write_policy
    from fedtail.deployment.settings import NodeSettings

    path = write_policy(NodeSettings.read(settings))
    typer.echo(path.read_text(encoding="utf-8"))
    typer.echo(f"Written to {path}.", err=True)


@node.command(short_help="Say in words what the node takes part in and allows.", cls=PlainCommand)
@print_errors_as_sentences
def check(settings: Path = SETTINGS) -> None:
    """Read the node's settings, data, experiment and policy, and say what it answers and what that may cost.

    The exit code is 1, with the reason, where one of them is missing or not valid.
    """
    from fedtail.deployment.settings import NodeSettings
    from fedtail.deployment.told import node_sentences

    for line in node_sentences(NodeSettings.read(settings)):
        typer.echo(line)


@node.command(short_help="Say what the node's data have answered so far.", cls=PlainCommand)
@print_errors_as_sentences
def budget(settings: Path = SETTINGS) -> None:
    """Say what the node's data have answered over all runs and servers, and what its policy allows."""
    from fedtail.deployment.settings import NodeSettings

    found = NodeSettings.read(settings).data_budget()
    typer.echo(f"{found.spent_text()}.\nRecorded in {found.folder}.")


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
