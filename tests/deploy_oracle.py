"""What a deployed run must have computed, by the simulator: the clients of each node in a fleet of their own, and for each question
the sum over the nodes whose answers the run's own reports say were in it."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace

import torch
from safetensors.torch import load_file

from fedtail import Everyone, IntegerChannel, train
from fedtail.algorithm import RoundLostWarning
from fedtail.channel.base import RoundLost
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.engine import LocalFleet
from fedtail.engine.simulated_fleet import SimulatedFleet

CLIENTS = 8             # at each node of the example


class FleetOfNodes(SimulatedFleet):
    """Question k of round r is answered by the nodes in `stayed[r, k]`; where that is empty, the round is lost.

    The sums of nodes in `times` are multiplied by that.
    """

    in_one_process = True
    loses_clients = True

    def __init__(self, people, home, task, stayed, times=None):
        super().__init__(people)
        self.home, self.stayed, self.times = home, stayed, times or {}
        self.fleets = {node: LocalFleet(people.select(home == node), task, workers=1) for node in home.unique().tolist()}
        self.place = torch.zeros(len(people), dtype=torch.int64)
        for node in self.fleets:
            here = home == node
            self.place[here] = torch.arange(int(here.sum()))

    def open_round(self, cohort, broadcast):
        self.round, self.question = broadcast.round, itertools.count()
        for node, fleet in self.fleets.items():
            here = self.home[cohort.ids] == node
            fleet.open_round(replace(cohort, ids=self.place[cohort.ids[here]], key=cohort.key[here],
                                     importance=cohort.importance[here]), broadcast)

    def collect(self, questions, encoding):
        stayed = self.stayed[self.round, next(self.question)]
        if not stayed:
            raise RoundLost("the run's own report says so.")
        sums = [self.fleets[node].collect(questions, encoding) for node in sorted(stayed)]
        sums = [[one * self.times.get(node, 1) for one in mine] for node, mine in zip(sorted(stayed), sums, strict=True)]
        return [encoding.sum(torch.stack(parts)) for parts in zip(*sums, strict=True)]

    def close_round(self, finished):
        for fleet in self.fleets.values():
            fleet.close_round(finished)

    def round_view(self):
        return None


def nodes_that_stayed(answers, names):
    """By (round, question) the nodes whose rows were in the sum: all but those with a problem, by the last report of each.

    The server numbers nodes in the order of their names as texts; here they are numbered as they were written.
    """
    stayed, nodes = {}, len(names)
    number = [names.index(name) for name in sorted(names)]
    for line in answers:
        missing = {number[int(node)] for node in line["problems"]}
        expected = nodes - line["answered"] // CLIENTS if line["answered"] else nodes
        if line["answered"] and len(missing) != expected:
            raise AssertionError(f"{line} does not say which nodes were missing")
        stayed[line["round"], line["question"]] = set(range(nodes)) - missing if line["answered"] else set()
    return stayed


def models_apart(deployment, name, method="Delta-FL", zero=(), times=None):
    """The largest difference between the run's model and the simulator's over the clients that stayed; and how far that moved.

    Of nodes in `zero` rows are zeros, of those in `times` multiples.
    """
    experiment = deployed_experiment(deployment.folder.path / "experiment.toml", method)
    nodes, people = len(deployment.names), deployment.people
    stayed = nodes_that_stayed(deployment.answers(name), deployment.names)
    stayed = {key: here - set(zero) for key, here in stayed.items()}
    task = experiment.task.make(0)
    fleet = FleetOfNodes(people, torch.arange(len(people)) % nodes, task, stayed, times)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundLostWarning)
        simulated = train(replace(experiment.algorithm, sample=Everyone()), task, rounds=experiment.rounds, fleet=fleet,
                          channel=IntegerChannel(), progress=False)
    theirs = load_file(deployment.out(name) / "model.safetensors")
    ours = simulated.module.state_dict()
    return max(float((ours[one] - theirs[one]).abs().max()) for one in ours), float((simulated.state.params - task.params()).abs().max())


def releases_on_ledger(deployment, name):
    """How many releases the run's ledger holds, over all rounds, repeated ones too."""
    from fedtail.privacy.ledger import Ledger

    return sum(len(event.releases) * count for event, count in Ledger(path=deployment.out(name) / "ledger.jsonl").rounds)


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
