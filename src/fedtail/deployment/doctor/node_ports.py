"""Attacks on what a node over Flower has open on its own machine, at 127.0.0.1: what another account there can do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from fedtail.deployment.doctor.doors import PATIENCE, Door, stranger_context
from fedtail.deployment.doctor.findings import NOT_TESTED, Finding, found
from fedtail.deployment.node_process import is_running
from fedtail.reading import TOML_BYTES, read_text, toml_tables

CHECK, HERE = "node's tasks", "127.0.0.1"
PORTS = Path("flower", "ports.toml")         # which the node writes at its start
CLAIM = "/v1/runtime/acquire-task"           # of no kind of task, so that none is taken
PULL = "/v1/fleet/pull-messages"             # of no node, so that none is pulled
REFUSED, AWAY = (401, 403), 503
NOT_RUNNING = "The node does not run now, so nothing of it listens on this machine. Examine it again while it runs."
UNKNOWN = "The node runs, and does not say where it listens on this machine. Start it anew by `fedtail node run`, and try again."


def attacks_on_node_ports(node: Path) -> Iterator[Finding]:
    """Try to claim a task of the node in the folder `node`, as any account of its machine may, and to speak in its name.

    Yields what was found; nothing for a node over NVFlare, which listens nowhere.
    """
    if not (node / "gate.toml").is_file():
        return
    if not is_running(node):
        yield found(CHECK, [], NOT_RUNNING)
        return
    ports = _ports(node / PORTS)
    if len(ports) != 2 or not all(map(_listens, ports.values())):
        yield Finding(CHECK, NOT_TESTED, UNKNOWN)
        return
    claimed = _answered(ports["tasks"], CLAIM)
    in_its_name = _answered(ports["forwarder"], PULL)
    problems = [] if claimed in REFUSED else [
        f"acquire-task without the node's secret is answered with {claimed}: whoever has an account here claims this node's "
        "tasks, reads their messages and answers them. Start the node by `fedtail node run`."]
    problems += [] if in_its_name in (*REFUSED, AWAY) else [
        f"A call of a node without its signature is answered with {in_its_name}: whoever has an account here speaks for this "
        "node. Start the server by `fedtail deploy serve`."]
    away = ", as no server is reached" if in_its_name == AWAY else ""
    yield found(CHECK, problems, f"acquire-task without the node's secret is refused ({claimed}), and so is a call in its name "
                                 f"({in_its_name}{away}).")


def _answered(port: int, path: str) -> int:
    """The status with which an empty call of Flower's is answered at this port, over TLS or else in plain text; 0: by none."""
    doors = (Door(HERE, port, "", stranger_context()), Door(HERE, port, ""))
    return next((status for one in doors if (status := one.call(path)[0])), 0)


def _ports(path: Path) -> dict[str, int]:
    """The ports that the file at `path` names, by name; {} where there is no such file."""
    said = toml_tables(read_text(path, TOML_BYTES, "the ports of a node"), path.name) if path.is_file() else {}
    return {name: said[name] for name in ("tasks", "forwarder") if type(said.get(name)) is int and 0 < said[name] < 1 << 16}


def _listens(port: int) -> bool:
    """Whether somebody listens at this port of 127.0.0.1."""
    try:
        socket.create_connection((HERE, port), PATIENCE).close()
    except OSError:
        return False
    return True
