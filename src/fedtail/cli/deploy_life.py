"""`fedtail deploy add | remove | rotate | status | dashboard`: what whoever runs a deployment's server does while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtail.cli import options
from fedtail.cli.plain_help import PlainCommand
from fedtail.cli.terminal import print_errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail.deployment.flower.folder import DeploymentFolder

FOLDER = typer.Argument(..., help="The deployment's folder.")
NAME = typer.Argument(..., help="The node's name.")


@print_errors_as_sentences
def add(folder: Path = FOLDER, name: str = NAME) -> None:
    """Make the folder of a new node, with its keys, and admit it at the server, which need not be restarted.

    A run that is under way samples its clients from the next round on. Copy the folder to the node over a way you trust, and
    delete its key here.
    """
    from fedtail.cli.deploy import evaluates_test_examples
    from fedtail.deployment.deployed_experiment import deployed_experiments
    from fedtail.deployment.membership import add_node, is_over_flower, open_deployment
    from fedtail.experiment import AS_WRITTEN

    place = open_deployment(folder)
    held_out = any(map(evaluates_test_examples, deployed_experiments(place.path / "experiment.toml", trust=AS_WRITTEN)))
    made = add_node(place, name, 0.2 if held_out else 0.0)
    typer.echo(f"{name} is admitted. Copy {made} to the node, delete the secrets key and key.pem here, and there name its "
               "data in node.toml.")
    if is_over_flower(place):
        typer.echo(_flower_text(place, name, None, register=True))
    typer.echo("Then on the node:\n  fedtail node init node.toml\n  fedtail node accept node.toml\n  fedtail node run node.toml")


@print_errors_as_sentences
def remove(folder: Path = FOLDER, name: str = NAME) -> None:
    """Exclude a node for good, also from a run that is under way: its keys open nothing any more.

    From the next round on its clients are not sampled. Where too few nodes are left for a round, the run pauses and says so.
    """
    from fedtail.deployment.membership import is_over_flower, open_deployment, remove_node

    place = open_deployment(folder)
    number = _number_at_flower(place, name)
    left = remove_node(place, name)
    typer.echo(f"{name} is removed; {left} nodes are left.")
    if is_over_flower(place):
        typer.echo(_flower_text(place, name, number))


@print_errors_as_sentences
def rotate(
    folder: Path = FOLDER,
    name: str = typer.Option("", "--node", metavar="NAME", help="Make new keys for this node.", show_default=False),
    server: bool = typer.Option(False, "--server", help="Make a new certificate for the server, and a new authority."),
    finish: bool = typer.Option(False, "--finish", help="With --server: the second step, when all nodes have the new ca.crt."),
    at_once: bool = typer.Option(False, "--at-once", help="With --server: both steps now, where the server's key was stolen."),
) -> None:
    """Replace secrets: the keys of one node (--node), or the certificates of the server (--server), without a restart.

    The old keys of a node are dead at once, and it is away until it has the new ones. The server's certificate changes in two
    steps: first nodes get a ca.crt that trusts the old and the new authority, then (--finish) the new one only.
    """
    from fedtail.deployment.membership import is_over_flower, open_deployment
    from fedtail.deployment.rotation import finish_authority, prepare_authority, rotate_node

    if bool(name) == server or ((finish or at_once) and not server) or (finish and at_once):
        raise ValueError("say what to replace: --node NAME, or --server with --finish, --at-once or neither.")
    place = open_deployment(folder)
    if name:
        number = _number_at_flower(place, name)
        made = rotate_node(place, name)
        typer.echo(f"The old keys of {name} are dead. Copy key, key.pub, key.pem and node.crt of {made} to the node, and delete "
                   "the secrets key and key.pem here.")
        if is_over_flower(place):
            typer.echo(_flower_text(place, name, number, register=True))
            typer.echo("Then on the node, end fedtail node run, which has the old key in memory, and start it again:\n"
                       "  fedtail node run node.toml")
        return
    if not finish:
        prepare_authority(place)
    if finish or at_once:
        finish_authority(place)
        typer.echo("The server has its new certificate. Copy ca.crt of each nodes/NAME, or of server, to its node: nodes without "
                   "it do not connect any more.")
        typer.echo("A server that is running shows it from the next connection on.")
        if is_over_flower(place):
            typer.echo("Its SuperLink, which listens on 127.0.0.1 only, has the old one until fedtail deploy serve is started "
                       "again, and `flwr` does not reach it until then.")
    else:
        typer.echo("Copy ca.crt of each nodes/NAME (or server/next/ca-both.crt) to its node: it trusts the old and the new "
                   f"certificate. Then:\n  fedtail deploy rotate {folder} --server --finish")


def _number_at_flower(place: DeploymentFolder, name: str) -> int | str | None:
    """Flower's number of the node `name`, before its key is replaced or deleted; None where Flower does not know it.

    "NUMBER" where its database cannot be read.
    """
    from fedtail.deployment.flower.link_database import supernode_number

    key = place.node_keys / f"{name}.pub"
    try:
        return supernode_number(place.server_folder, key) if key.is_file() else None
    except ValueError as why:
        typer.echo(f"{why} Look for the node's number in the list of: flwr supernode list fedtail", err=True)
        return "NUMBER"


def _flower_text(place: DeploymentFolder, name: str, number: int | str | None, register: bool = False) -> str:
    """What is to be done at Flower, in commands: its `number` of the node is refused, the key that is here now is registered."""
    from fedtail.deployment.flower.folder import LINK, environment_command, register_command

    commands = [f"flwr supernode unregister {number} {LINK}"] if number is not None else []
    commands += [register_command(place, name)] if register else []
    if not commands:
        return "Flower does not know its key: nothing is to be done there."
    return "\n  ".join(["On the server, where fedtail deploy serve runs, for Flower:", environment_command(place), *commands])


@print_errors_as_sentences
def status(folder: Path = FOLDER, as_json: bool = options.JSON) -> None:
    """Say how a deployment is: its runs, who is there, what went wrong last, and when certificates expire."""
    from fedtail.deployment.deployment_state import DeploymentState, status_lines
    from fedtail.deployment.membership import open_deployment

    found = DeploymentState(open_deployment(folder)).read()
    if as_json:
        print_json(found)
        return
    for line in status_lines(found):
        typer.echo(line)


@print_errors_as_sentences
def dashboard(
    folder: Path = FOLDER,
    port: int = typer.Option(8050, min=0, max=65535, help="The port on this machine; 0: any that is free."),
) -> None:
    """Serve a page about the deployment to a browser on this machine, live, until Ctrl-C. Nothing on it can change anything.

    It listens on 127.0.0.1 only: every account on this machine can read it, and nobody on the network. From elsewhere:
    ssh -L 8050:127.0.0.1:8050 SERVER
    """
    from fedtail.deployment.dashboard import DashboardServer
    from fedtail.deployment.membership import open_deployment

    with DashboardServer(open_deployment(folder), port) as server:
        typer.echo(f"http://127.0.0.1:{server.port}/   (Ctrl-C ends it)")
        server.serve()


def add_commands(deploy: typer.Typer) -> None:
    """Add the commands of this module to `deploy`."""
    briefs: dict[Callable[..., None], str] = {add: "Admit a new node, without a restart.", remove: "Exclude a node for good.",
              rotate: "Replace the keys of a node, or the server's.", status: "Say how the deployment is.",
              dashboard: "A live page about the deployment."}
    for command, brief in briefs.items():
        deploy.command(short_help=brief, cls=PlainCommand)(command)
