"""`fedtail deploy`: the same experiment on nodes that keep their data, over Flower or NVFlare."""

from __future__ import annotations

import importlib.util
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli import options
from fedtail.cli.deploy_life import add_commands
from fedtail.cli.node import node
from fedtail.cli.plain_help import PlainCommand
from fedtail.cli.terminal import print_errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail.experiment import Experiment

deploy = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run an experiment on nodes that keep their data.")
deploy.add_typer(node, name="node")
add_commands(deploy)
MISSING = {"flower": "fedtail deploy needs Flower. Install it with: pip install 'fedtail[flower]'",
           "nvflare": "this transport needs NVFlare. Install it with: pip install 'fedtail[nvflare]'"}


class Transports(StrEnum):
    """What carries the messages of a deployment."""

    flower = "flower"
    nvflare = "nvflare"


CARRIED = typer.Option(Transports.flower, help="flower: SuperLink and SuperNodes; nvflare: resident nodes, fast rounds.")


@deploy.command(short_help="Write the folder of a deployment, with its keys.", cls=PlainCommand)
@print_errors_as_sentences
def init(
    folder: Path = typer.Argument(..., help="A new folder."),
    experiment: Path = typer.Option(..., "--experiment", help="The experiment file; what it says of data is not used."),
    nodes: str = typer.Option("3", help="How many nodes, or their names: 5, or north,south,east."),
    host: str = typer.Option("127.0.0.1", help="The server's name or address, as nodes reach it."),
    port: int = typer.Option(8000, min=1, max=65535, help="Its port."),
    minimum: int = typer.Option(3, min=2, help="Nodes among which a row is masked, at least; each node refuses fewer."),
    transport: Transports = CARRIED,
) -> None:
    """Write a folder with certificates for TLS, for each node its settings and its key, and for Flower an app for `flwr run`.

    Copy nodes/NAME to each node, name its data in node.toml, and follow the commands that are printed. Nothing that the
    experiment names is imported here; code that is not fedtail's, each node allows in its node.toml (trust), and the server in
    app/pyproject.toml or, with NVFlare, server/run.toml.
    """
    from fedtail.deployment.deployed_experiment import deployed_experiments
    from fedtail.deployment.flower.folder import startup_commands, write_deployment_folder
    from fedtail.deployment.nvflare.folder import cell_commands, write_cell_folder
    from fedtail.experiment import AS_WRITTEN

    held_out = any(evaluates_test_examples(one) for one in deployed_experiments(experiment, trust=AS_WRITTEN))
    names = [f"node-{k}" for k in range(1, int(nodes) + 1)] if nodes.isdigit() else [one.strip() for one in nodes.split(",")]
    over_flower = transport is Transports.flower
    write = write_deployment_folder if over_flower else write_cell_folder
    made = write(folder, experiment, names, host, port, minimum=min(minimum, len(names)), test_share=0.2 if held_out else 0.0)
    typer.echo(startup_commands(made, names, host, port) if over_flower else cell_commands(made, host, port))


@deploy.command(short_help="Run a node, which connects to the server.", cls=PlainCommand)
@print_errors_as_sentences
def join(folder: Path = typer.Argument(..., help="The node's own folder, with node.toml.")) -> None:
    """Run a node of a deployment until Ctrl-C or SIGTERM: it connects to the server and listens nowhere on the network.

    It stays, and connects again where the connection ends or the server is restarted. It runs the app that is installed here; no
    code comes from the server.
    """
    from fedtail.deployment.node_process import run_node

    _require("flower" if _is_over_flower(folder) else "nvflare")
    run_node(folder)


@deploy.command(short_help="Run the server, which nodes connect to.", cls=PlainCommand)
@print_errors_as_sentences
def serve(
    folder: Path = typer.Argument(..., help="The server's folder."),
    method: str | None = typer.Option(None, help="Over NVFlare: which [[method]], where the experiment has several."),
    out: Path | None = typer.Option(None, help="Over NVFlare: the run's folder."),
    seed: int | None = typer.Option(None, help="Over NVFlare: the seed of the run."),
    resume: bool = typer.Option(False, "--resume", help="Over NVFlare: go on from the last round of a run that was ended."),
) -> None:
    """Listen for the nodes of a deployment.

    Over NVFlare, run its experiment on them, and return when it is finished; what is not said here is in run.toml. Over Flower,
    stay until Ctrl-C or SIGTERM: a gate on the network, which admits the nodes, and behind it a SuperLink on 127.0.0.1, to which
    `flwr run` submits runs from this machine.
    """
    given = {"method": method, "out": out and str(out.resolve()), "seed": seed, "resume": resume or None}
    given = {name: value for name, value in given.items() if value is not None}
    if _is_over_flower(folder):
        _require("flower")
        if given:
            raise ValueError(f"over Flower, serve has no option {', '.join('--' + name for name in given)}. Say it of the run: "
                             "flwr run ... --run-config '...'.")
        from fedtail.deployment.flower.process import serve as serve_gate

        serve_gate(folder)
        return
    _require("nvflare")
    from fedtail.deployment.nvflare.process import serve

    serve(folder, **given)


def _is_over_flower(folder: Path) -> bool:
    """Whether the folder of a server or a node is of a deployment over Flower, which has the address of a gate in it."""
    return (folder / "gate.toml").is_file()


@deploy.command(short_help="Print the audit log of a run, or verify it.", cls=PlainCommand)
@print_errors_as_sentences
def log(
    folder: Path = typer.Argument(..., help="The run's folder on the server."),
    verify: bool = typer.Option(False, "--verify", help="Say what was cut, changed, moved or left out, and nothing else."),
    last: int = typer.Option(20, min=1, help="How many lines."),
    node_logs: list[Path] = typer.Option([], "--node", metavar="FILE", help="A node's audit.jsonl, to compare."),
) -> None:
    """Print the last lines of a run's audit log: what was asked of whom, what was answered and what was not, without data.

    With --verify the whole log is checked, against its digests and the lines that answers.jsonl names. With --node, a node's log
    is checked too, and compared: what the node answered must have been asked in this run. The exit code is 1 otherwise.
    """
    from fedtail.cli.node import print_log
    from fedtail.deployment.node_status import compare_logs, read_log, run_log

    entries, problems = run_log(folder)
    for path in node_logs:
        other, found = read_log(path)
        problems += [f"{path}: {one}" for one in (*found, *compare_logs(entries, other))]
    print_log(entries, problems, verify=verify, last=last)


@deploy.command(short_help="Make the identity of a node, with which it signs.", cls=PlainCommand)
@print_errors_as_sentences
def identity(folder: Path = typer.Argument(..., help="The node's own folder, on the node.")) -> None:
    """Make the identity key of a node and print its public key, which all nodes pin in their node.toml.

    Run it on the node itself: it is there against a server that departs from the protocol, which must not have had the key.
    """
    from fedtail.deployment.keys import make_identity

    typer.echo(make_identity(folder))


@deploy.command(short_help="Attack one's own deployment, and say what is open.", cls=PlainCommand)
@print_errors_as_sentences
def doctor(
    target: str = typer.Argument(..., metavar="FOLDER|HOST:PORT", help="Of a deployment, its server or a node; or an address."),
    ca: Path | None = typer.Option(None, "--ca", metavar="FILE", help="For an address: the deployment's public ca.crt."),
    at: str = typer.Option("", "--at", metavar="HOST:PORT", help="For a folder: the address to attack instead of its own.",
                           show_default=False),
    as_json: bool = options.JSON,
) -> None:
    """Try what strangers and holders of a node's key could, against one's own deployment, and look at its files.

    Everything goes to that one address, takes seconds, and changes nothing there. The exit code is 1 where anything is open or
    could not be tested. Run it on the server, on every node, and from a machine that has nothing to do with them.
    """
    from dataclasses import asdict

    from fedtail.cli.terminal import show_table
    from fedtail.deployment.doctor import NOT_TESTED, OPEN, examine_address, examine_folder
    from fedtail.deployment.doctor.targets import parse_address
    from fedtail.escaping import one_line

    if Path(target).is_dir():
        found = examine_folder(Path(target), parse_address(at) if at else None)
    else:
        found = examine_address(*parse_address(target), ca)
    bad = [one for one in found if one.result in (OPEN, NOT_TESTED)]
    if as_json:
        print_json({"open": sum(one.result == OPEN for one in found), "findings": list(map(asdict, found)),
                    "not_tested": sum(one.result == NOT_TESTED for one in found)})
    else:
        show_table(f"What is open at {target}", ["attack", "result", "what was found"],
                   [[one.check, one.result, one_line(one.text)] for one in found], flush_left=True)
        typer.echo(f"{len(bad)} of {len(found)} are open or not tested." if bad else f"Nothing is open, of {len(found)} attacks.")
    raise typer.Exit(1 if bad else 0)


def evaluates_test_examples(experiment: Experiment) -> bool:
    """Whether clients of a deployment evaluate models on test examples that they hold out; False where they evaluate nothing.

    `experiment` may be one whose parts were read but not made.
    """
    from fedtail.experiment.part_tables import PartPlan

    plan: Any = experiment.evaluate.on_nodes
    if plan is None:
        return False
    return (plan.arguments.get("split", "test") if isinstance(plan, PartPlan) else plan.split) == "test"


@deploy.command(short_help="A whole deployment on this machine, next to the simulator.", cls=PlainCommand)
@print_errors_as_sentences
def local(
    nodes: int = typer.Option(5, min=3, help="Nodes, each with 8 clients."),
    rounds: int = typer.Option(3, min=1, help="Rounds of each method."),
    folder: Path | None = typer.Option(None, help="A new folder to keep everything in; by default a temporary one."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
    transport: Transports = CARRIED,
) -> None:
    """Start a server and nodes here, with TLS and node authentication, and run FedAvg and Delta-FL with secure sums.

    Then train both in the simulator on the same cohorts, and print how far the models are apart. Takes about five minutes on
    two cores over Flower, and half a minute over NVFlare. Every process is ended, however it goes.
    """
    _require(transport.value)
    with tempfile.TemporaryDirectory(prefix="fedtail-deploy-", ignore_cleanup_errors=True) as temporary:
        _run_local_deployment(folder or Path(temporary) / "deployment", nodes, rounds, as_json, transport)


def _require(transport: str) -> None:
    """Raise ImportError, which says what to install, where the package of a transport is not there; it is not imported."""
    if importlib.util.find_spec({"flower": "flwr", "nvflare": "nvflare"}[transport]) is None:
        raise ImportError(MISSING[transport])


def _run_local_deployment(folder: Path, nodes: int, rounds: int, as_json: bool, transport: Transports) -> None:
    """Run the example deployment of `nodes` nodes for `rounds` rounds of each method, with all its files in `folder`.

    Prints how far its models are from the simulator's, as a table or, with `as_json`, as JSON; progress goes to stderr. Raises
    RuntimeError where a run fails.
    """
    from dataclasses import asdict

    from fedtail.cli.terminal import show_table
    from fedtail.deployment.flower.example import run_example
    from fedtail.deployment.nvflare.loopback import run_cell_example

    run = run_example if transport is Transports.flower else run_cell_example
    found = run(folder, nodes, rounds, lambda text: typer.echo(text, err=True))
    if as_json:
        print_json({"rows": [asdict(one) for one in found]})
        return
    cells = [[one.method, f"{one.difference:.3g}", f"{one.moved:.3g}", _percent_text(one.error), _percent_text(one.worst10),
              str(one.exchanges), f"{one.seconds:.3g}"] for one in found]
    show_table(f"{nodes} nodes and the simulator after {rounds} rounds on the same cohorts",
               ["method", "largest difference", "largest step", "error %", "worst tenth %", "exchanges", "s each"], cells)
    typer.echo("Errors are over the clients of the last cohort, on examples they hold out; the server got a histogram.")
    typer.echo(f"What the server saw: {found[0].channel}.")


def _percent_text(error: float | None) -> str:
    """An error rate in [0, 1] as percent with one decimal, "12.5"; "" for None."""
    return "" if error is None else f"{100 * error:.1f}"
