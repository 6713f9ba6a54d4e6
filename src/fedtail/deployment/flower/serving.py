"""The server's side of a run over Flower: who is there, then rounds in a folder, and whoever comes meanwhile."""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedtail.deployment.experiment import deployed_experiment
from fedtail.deployment.flower.carrier import Carrier, wait_for
from fedtail.deployment.remote import RemoteFleet
from fedtail.deployment.roster import Roster
from fedtail.deployment.running import DeployedRun, write_log
from fedtail.deployment.who import read_who
from fedtail.runs.files import write_whole

TRIES = 3              # to find out who a node is while rounds go on: each may take as long as an exchange


class Nodes:
    """Who is there: a roster that grows when nodes come, and the numbers Flower knows them by."""

    def __init__(self, carrier: Carrier, log: Any):
        self.carrier, self.log = carrier, log
        self.roster, self.names = Roster.empty(), list[str]()
        self._tried = Counter[int]()                # how often each was asked who it is, while rounds went on

    def wait(self, count: int, seconds: float) -> None:
        """Until so many nodes have said who they are."""
        wait_for(lambda: len(self.carrier.online()) >= count, seconds)
        end = time.monotonic() + seconds
        self.look()
        while len(self.names) < count and time.monotonic() < end:
            time.sleep(1)
            self.look()
        if len(self.names) < count:
            raise RuntimeError(f"{len(self.names)} nodes have come in {seconds:g} s, and {count} are waited for. Start more, "
                               "or lower nodes.")

    def look(self, tries: int | None = None) -> None:
        """Ask nodes that are new who they are, each so often. One that cannot be added is told of in the log and left out."""
        fresh = self.carrier.online() - set(self.carrier.ids.values())
        if tries is not None:
            fresh = {one for one in fresh if self._tried[one] < tries}
            self._tried.update(fresh)
        found = []
        for theirs, said in (self.carrier.who(sorted(fresh)) if fresh else {}).items():
            try:
                found.append((read_who(said), theirs))
            except Exception as why:
                self.log(f"node {theirs} is left out: {why}")
        for who, theirs in sorted(found, key=lambda one: one[0].name):
            self._add(who, theirs)

    def _add(self, who: Any, theirs: int) -> None:
        if who.name in self.names:                           # it was away, and has come back with another number
            number = self.names.index(who.name)
            if self.carrier.ids[number] in self.carrier.online():
                self.log(f"node {theirs} is left out: it calls itself {who.name}, and {who.name} is here.")
                return
            self.carrier.ids[number] = theirs
            self.log(f"{who.name} is back")
            return
        try:
            self.roster = self.roster.joined(len(self.names), who.key, who.mass, who.group)
        except ValueError as why:
            self.log(f"{who.name} is left out: {why}")
            return
        self.carrier.ids[len(self.names)] = theirs
        self.names.append(who.name)
        self.log(f"{who.name} has come, with {len(who.key)} clients")


def serve(grid: Any, settings: Mapping[str, Any]) -> None:
    """Run an experiment; what goes wrong is in the run's log too."""
    out = Path(str(settings["out"]))
    try:
        _serve(Carrier(grid, float(settings.get("timeout", 60.0)), partial(write_log, out)), settings, out)
    except BaseException:
        write_log(out, traceback.format_exc())
        raise


def _serve(carrier: Carrier, settings: Mapping[str, Any], out: Path) -> None:
    experiment = deployed_experiment(str(settings["experiment"]), str(settings.get("method", "")))
    run = DeployedRun(experiment, int(settings.get("seed", 0)), out, bool(settings.get("resume", False)))
    nodes, schedule = Nodes(carrier, run.log), settings.get("schedule", "ahead")
    nodes.wait(int(settings.get("nodes", 2)), float(settings.get("wait", 300.0)))
    fleet = RemoteFleet(carrier.exchange, nodes.roster, schedule=schedule)

    def between() -> None:
        nodes.look(TRIES)
        fleet.population = nodes.roster
        write_whole(out / "seconds.json", json.dumps([round(one, 3) for one in carrier.seconds]))

    run.run(fleet, between)
