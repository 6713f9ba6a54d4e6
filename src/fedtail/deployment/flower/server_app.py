"""The ServerApp: it waits for nodes, registers their clients, and runs an experiment in a folder; nodes may join meanwhile."""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.common import Context
from flwr.serverapp import Grid, ServerApp

from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun, append_to_log
from fedtail.deployment.flower.transport import FlowerTransport, wait_until
from fedtail.deployment.registry import ClientRegistry, NodeInfo, read_node_info
from fedtail.deployment.remote import RemoteFleet
from fedtail.runs.files import write_atomically

app = ServerApp()
TRIES = 3              # to get the node info of a node while rounds go on: each may take as long as an exchange


class Nodes:
    """The nodes of a run: a client registry that grows when nodes join, with their names; Flower's ids are in `transport.ids`."""

    def __init__(self, transport: FlowerTransport, log: Any):
        """Begin without nodes. `transport` reaches them and holds Flower's ids; `log` is called with a line for the run's log."""
        self.transport, self.log = transport, log
        self.registry, self.names = ClientRegistry.empty(), list[str]()
        self._tried = Counter[int]()                # how often each was asked for its node info, while rounds went on

    def wait_for_nodes(self, count: int, seconds: float) -> None:
        """Wait until `count` nodes are registered: up to `seconds` for them to connect, then as long again for their node info.

        Raises RuntimeError where fewer are registered after that.
        """
        wait_until(lambda: len(self.transport.online_nodes()) >= count, seconds)
        end = time.monotonic() + seconds
        self.register_new_nodes()
        while len(self.names) < count and time.monotonic() < end:
            time.sleep(1)
            self.register_new_nodes()
        if len(self.names) < count:
            raise RuntimeError(f"{len(self.names)} nodes have joined in {seconds:g} s, and {count} are waited for. Start more, "
                               "or lower nodes.")

    def register_new_nodes(self, tries: int | None = None) -> None:
        """Ask connected nodes that are not registered for their node info, and register those that answer, in order of name.

        A node whose info is not valid, or that cannot be added, is logged and left out. With `tries`, a node that was asked so
        many times by such calls is not asked again; None: always ask.
        """
        fresh = self.transport.online_nodes() - set(self.transport.ids.values())
        if tries is not None:
            fresh = {one for one in fresh if self._tried[one] < tries}
            self._tried.update(fresh)
        found = []
        for theirs, said in (self.transport.request_node_info(sorted(fresh)) if fresh else {}).items():
            try:
                found.append((read_node_info(said), theirs))
            except Exception as why:
                self.log(f"node {theirs} is left out: {why}")
        for info, theirs in sorted(found, key=lambda one: one[0].name):
            self._register_node(info, theirs)

    def _register_node(self, info: NodeInfo, theirs: int) -> None:
        """Register the node that `info` describes under Flower's id `theirs`, with the next number.

        A node of a known name that was away gets this id instead. Where a node of that name is connected already, or the registry
        refuses its clients, that is logged and nothing is added.
        """
        if info.name in self.names:                           # it was away, and has come back with another number
            number = self.names.index(info.name)
            if self.transport.ids[number] in self.transport.online_nodes():
                self.log(f"node {theirs} is left out: it calls itself {info.name}, and {info.name} is here.")
                return
            self.transport.ids[number] = theirs
            self.log(f"{info.name} is back")
            return
        try:
            self.registry = self.registry.with_node(len(self.names), info.key, info.mass, info.group)
        except ValueError as why:
            self.log(f"{info.name} is left out: {why}")
            return
        self.transport.ids[len(self.names)] = theirs
        self.names.append(info.name)
        self.log(f"{info.name} has joined, with {len(info.key)} clients")


def run_on_grid(grid: Any, settings: Mapping[str, Any]) -> None:
    """Run an experiment on the nodes of a Flower grid, in the folder `out`, and return when the run is finished.

    `settings` are those of `flwr run`: `experiment` and `out` are needed; `timeout` (seconds to wait for an answer, by default
    60) and others have defaults. An exception is written to the run's log with its traceback, and raised.
    """
    out = Path(str(settings["out"]))
    try:
        _run_experiment(FlowerTransport(grid, float(settings.get("timeout", 60.0)), partial(append_to_log, out)), settings, out)
    except BaseException:
        append_to_log(out, traceback.format_exc())
        raise


def _run_experiment(transport: FlowerTransport, settings: Mapping[str, Any], out: Path) -> None:
    """Wait for nodes, register their clients, and run the experiment in the folder `out`; more nodes may join between rounds.

    `transport` reaches the nodes. `settings` are those of `flwr run`: `experiment`, the path of its file, is needed; `method`,
    `trust` (names with commas), `seed`, `resume`, `schedule`, `nodes` (how many to wait for) and `wait` (seconds) have defaults.
    Raises RuntimeError where too few nodes join.
    """
    trust = [one.strip() for one in str(settings.get("trust", "")).split(",") if one.strip()]
    experiment = deployed_experiment(str(settings["experiment"]), str(settings.get("method", "")), trust)
    run = DeployedRun(experiment, int(settings.get("seed", 0)), out, bool(settings.get("resume", False)))
    nodes, schedule = Nodes(transport, run.log), settings.get("schedule", "ahead")
    nodes.wait_for_nodes(int(settings.get("nodes", 2)), float(settings.get("wait", 300.0)))
    fleet = RemoteFleet(transport.exchange, nodes.registry, schedule=schedule)

    def let_nodes_join() -> None:
        """Register nodes that have joined, and write the seconds of each exchange to seconds.json in the run's folder."""
        nodes.register_new_nodes(TRIES)
        fleet.population = nodes.registry
        write_atomically(out / "seconds.json", json.dumps([round(one, 3) for one in transport.seconds]))

    run.run(fleet, let_nodes_join)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The entry of Flower's ServerApp: run the experiment named in `context.run_config` on the nodes of `grid`."""
    run_on_grid(grid, context.run_config)
