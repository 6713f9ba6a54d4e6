"""A deployment over NVFlare of real processes on this machine, slow enough that something can happen to it between two rounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.deployment.flower.example import node_names, write_example
from fedtail.deployment.flower.loopback import read_text_or_empty
from fedtail.deployment.membership import remove_node
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.nvflare.loopback import CellLoopback

PATIENCE = 300.0      # of a busy machine; a sound one needs a tenth


class Life:
    """`nodes` with data written, of which the first `admitted` have keys; each answer takes `pace` seconds."""

    def __init__(self, path, nodes=4, admitted=None, rounds=400, pace=0.05, share=0.4, **settings):
        self.folder, self.people = write_example(path, nodes, rounds, share=share, write=write_cell_folder, **settings)
        self.names, self.out = node_names(nodes), self.folder.path / "runs" / "run"
        for name in self.names:
            path = self.folder.node_folder(name) / "node.toml"
            path.write_text(path.read_text() + f"answer_after = {pace}\ntell_budget = true\n")
        self.loopback = CellLoopback(self.folder, self.names)
        for name in self.names[admitted or nodes:]:
            remove_node(self.folder, name)
        self.admitted = self.names[:admitted]

    def __enter__(self):
        self.loopback.__enter__()
        return self

    def __exit__(self, *reason):
        self.loopback.__exit__(*reason)

    def start(self, **settings):
        for name in self.admitted:
            self.loopback.start_node(name)
        self.serve(**settings)

    def serve(self, out=None, **settings):
        self.loopback.start_server(out or self.out, **{"method": "FedAvg", "nodes": len(self.admitted), "timeout": 60.0, **settings})

    def end_server(self):
        """As Ctrl-C or a service manager would, after the round under way; all of the server's files are whole."""
        process = self.loopback.processes.pop("server")
        process.terminate()
        process.wait(PATIENCE)

    def until(self, *texts, patience=PATIENCE):
        """Until the run's log holds these texts, each after the one before."""
        def reached(log):
            at = 0
            for text in texts:
                at = log.find(text, at)
                if at < 0:
                    return False
            return True
        self.loopback.wait_for_log(self.out, reached, patience)

    def rounds_more(self, count, patience=PATIENCE):
        done = self.rounds_done()
        self.loopback.wait_for_log(self.out, lambda _: self.rounds_done() >= done + count, patience)

    def rounds_done(self):
        return sum(" round " in line and " exchanges" in line for line in self.log().splitlines())

    def log(self):
        return read_text_or_empty(self.out / "log.txt")

    def answers(self):
        return self.lines("answers.jsonl")

    def lines(self, name):
        return [json.loads(line) for line in read_text_or_empty(self.out / name).splitlines() if line.endswith("}")]

    def command(self, *words):
        done = CliRunner().invoke(app, ["deploy", *map(str, words)])
        assert done.exit_code == 0, done.output
        return done.output

    def backup(self, path):
        """A copy of the server's machine: the deployment's folder without the nodes'."""
        return Path(shutil.copytree(self.folder.path, path, ignore=shutil.ignore_patterns("nodes-of-others", "logs", ".lock")))
