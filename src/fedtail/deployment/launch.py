"""The server's side of a deployment over any transport: wait for nodes, then train on them; more nodes may join meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.nodes import TRIES, Nodes
from fedtail.deployment.remote import RemoteFleet
from fedtail.deployment.signed_info import read_node_keys
from fedtail.deployment.transport import Transport
from fedtail.runs.files import write_atomically


def run_on_transport(transport: Transport, settings: Mapping[str, Any], out: Path) -> None:
    """Wait for nodes, register their clients, and run the experiment in the folder `out`; more nodes may join between rounds.

    `transport` reaches the nodes. Of `settings`, `experiment`, the path of its file, and `node_keys`, the folder with a public
    key NAME.pub for each node, are needed; `method`, `trust` (names with commas), `seed`, `resume`, `schedule`, `nodes` (how many
    to wait for) and `wait` (seconds) have defaults.
    Raises RuntimeError where too few nodes join.
    """
    trust = [one.strip() for one in str(settings.get("trust", "")).split(",") if one.strip()]
    experiment = deployed_experiment(str(settings["experiment"]), str(settings.get("method", "")), trust)
    run = DeployedRun(experiment, int(settings.get("seed", 0)), out, bool(settings.get("resume", False)))
    keys = partial(read_node_keys, Path(str(settings["node_keys"])))
    nodes, schedule = Nodes(transport, run.log, keys), settings.get("schedule", "ahead")
    nodes.wait_for_nodes(int(settings.get("nodes", 2)), float(settings.get("wait", 300.0)))
    fleet = RemoteFleet(transport.exchange, nodes.registry, schedule=schedule)

    def let_nodes_join() -> None:
        """Register nodes that have joined, and write the seconds of each exchange to seconds.json in the run's folder."""
        nodes.register_new_nodes(TRIES)
        fleet.population = nodes.registry
        write_atomically(out / "seconds.json", json.dumps([round(one, 3) for one in transport.seconds]))

    run.run(fleet, let_nodes_join)
