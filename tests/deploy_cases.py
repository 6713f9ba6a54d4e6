"""A deployment of real processes on this machine, and what its runs leave."""

from __future__ import annotations

import json
from dataclasses import replace

from safetensors.torch import load_file

from fedtail import Everyone, IntegerChannel, train
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.flower.example import compare_with_simulator, node_names, write_example
from fedtail.deployment.flower.loopback import Loopback, read_text_or_empty

ENOUGH = 400.0      # seconds a run may take on a busy machine
SAME = 1e-8         # nodes compute their clients in other batches than the simulator: the last bits of a float32 differ


class Deployment:
    """`nodes` written, `started` of them registered and running."""

    def __init__(self, path, nodes, rounds=2, started=None, **settings):
        self.folder, self.people = write_example(path, nodes, rounds, **settings)
        self.names, self.loopback = node_names(nodes), Loopback(self.folder)
        self.started = self.names[:started]

    def __enter__(self):
        self.loopback.__enter__()
        self.loopback.start_superlink()
        for name in self.started:
            self.loopback.register_node(name)
            self.loopback.start_node(name)
        return self

    def __exit__(self, *reason):
        self.loopback.__exit__(*reason)

    def out(self, name):
        return self.folder.path / "runs" / name

    def run(self, name, method="Delta-FL", **settings):
        self.loopback.submit_run(**{"method": method, "out": str(self.out(name)), "nodes": len(self.started), **settings})

    def finish(self, name, patience=ENOUGH):
        self.loopback.wait_for_result(self.out(name), patience)

    def after_exchange(self, name, number, patience=ENOUGH):
        self.loopback.wait_for_log(self.out(name), lambda log: f"exchange {number}:" in log, patience)

    def log(self, name):
        return read_text_or_empty(self.out(name) / "log.txt")

    def answers(self, name):
        return [json.loads(line) for line in (self.out(name) / "answers.jsonl").read_text().splitlines()]

    def compare(self, name, method="Delta-FL"):
        return compare_with_simulator(self.folder, self.people, method, self.out(name))

    def difference_from(self, name, people, method="Delta-FL"):
        """The largest difference from what these clients alone would train, all of them in every round."""
        experiment = deployed_experiment(self.folder.path / "experiment.toml", method)
        algorithm = replace(experiment.algorithm, sample=Everyone())
        ours = train(algorithm, experiment.task.make(0), people, rounds=experiment.rounds, channel=IntegerChannel()).module.state_dict()
        theirs = load_file(self.out(name) / "model.safetensors")
        return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
