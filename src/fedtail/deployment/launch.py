"""The server's side of a deployment over any transport: wait for nodes, then train on them; nodes may join and leave."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.enough_nodes import reason_to_pause
from fedtail.deployment.nodes import Nodes
from fedtail.deployment.remote import RemoteFleet
from fedtail.deployment.signed_info import read_node_keys
from fedtail.deployment.transport import Transport
from fedtail.runs.files import write_atomically
from fedtail.runs.logs import check_loggers
from fedtail.version import __version__

PRESENCE, SECONDS = "nodes.json", "seconds.json"      # in the run's folder: who is there, and how long each exchange took
POLL = 1.0                                            # seconds between two looks at who is there, while a run pauses


def run_on_transport(transport: Transport, settings: Mapping[str, Any], out: Path) -> list[str]:
    """Wait for nodes, register their clients, and run the experiment in the folder `out`; they may join and leave between rounds.

    `transport` reaches the nodes. Of `settings`, `experiment`, the path of its file, and `node_keys`, the folder with a public
    key NAME.pub for each node, are needed; `method`, `trust` (names with commas), `seed`, `resume`, `schedule`, `nodes` (how many
    to wait for) and `wait` (seconds) have defaults. Returns why models are of no use, as where every round was lost; the run's
    log has what to do. Raises ExperimentError, before the folder is made, where the client of a logger is not installed, and
    RuntimeError where too few nodes join.
    """
    trust = [one.strip() for one in str(settings.get("trust", "")).split(",") if one.strip()]
    experiment = deployed_experiment(str(settings["experiment"]), str(settings.get("method", "")), trust)
    check_loggers(experiment)
    run = DeployedRun(experiment, int(settings.get("seed", 0)), out, bool(settings.get("resume", False)))
    keys = partial(read_node_keys, Path(str(settings["node_keys"])))
    nodes, schedule = Nodes(transport, run.log, keys, run.training_name()), settings.get("schedule", "ahead")
    nodes.wait_for_nodes(int(settings.get("nodes", 2)), float(settings.get("wait", 300.0)))
    fleet = RemoteFleet(transport.exchange, nodes.registry, schedule=schedule)
    attendance = Attendance(run, nodes, fleet)
    run.run(fleet, attendance.follow, lambda: nodes.asked().values())
    attendance.write()                                    # with the exchanges of the last round
    return run.models_of_no_use()


class Attendance:
    """Between rounds: who joins and who leaves, and a pause while too few are left for a round."""

    def __init__(self, run: DeployedRun, nodes: Nodes, fleet: RemoteFleet):
        """Write who is there at the start of `run` into its folder; `nodes` are those of `fleet`."""
        self.run, self.nodes, self.fleet, self._first = run, nodes, fleet, nodes.registry
        self.write()

    def follow(self) -> None:
        """Register nodes that joined, remove those that left, and return when a round may succeed; the log says who is missed."""
        said = ""
        while True:
            self.nodes.update()
            self.fleet.change_population(self.nodes.registry, self.nodes.minimum)
            channel = self.run.channel(self.fleet.population)
            changed = self.nodes.registry is not self._first
            why = reason_to_pause(self.run.experiment.algorithm, channel, self.fleet, self.nodes, changed)
            self.write(why)
            if not why:
                break
            if why != said:
                self.run.log(f"paused: {why}")
            said = why
            time.sleep(POLL)
        if said:
            self.run.log("goes on: enough nodes are there")

    def write(self, paused: str = "") -> None:
        """Write who is there, and whether the run pauses and why, into the run's folder, with the seconds of each exchange."""
        about = {"time": time.time(), "fedtail": __version__, "paused": paused, "nodes": self.nodes.presence(),
                 "left_out": {str(one): why for one, why in self.nodes.left_out.items()}}
        write_atomically(self.run.folder / PRESENCE, json.dumps(about))
        write_atomically(self.run.folder / SECONDS, json.dumps([round(one, 3) for one in self.nodes.transport.seconds]))
