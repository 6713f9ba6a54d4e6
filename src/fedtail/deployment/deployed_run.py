"""A deployed run in a folder on the server: it can be killed at any moment and resumes from its last round.

    run.json, experiment.toml   the resolved experiment   ledger.jsonl, privacy.json   the releases, and what they cost
    checkpoint-*.safetensors    after every round         answers.jsonl                which clients answered which question
    model.safetensors           the final model           result.json                  written last
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtail.algorithm import states_of
from fedtail.deployment.deployed_experiment import channel_for, deployed_table
from fedtail.deployment.remote import RemoteFleet
from fedtail.experiment.experiment import Experiment
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.statement import statement
from fedtail.runs.checkpoint import Checkpoint, Checkpoints
from fedtail.runs.files import Lines, RunError, RunRefused, only_writer, plain, refuse_strangers, write_json, write_whole
from fedtail.runs.recording import module_bytes, versions, warnings_to
from fedtail.runs.run_folder import DEPLOYED, LEDGER, VERSION
from fedtail.training import Progress, Trained, train

PATIENCE = 90.0        # seconds to wait for another writer: what is left of a server that was killed


@dataclass(frozen=True)
class DeployedRun:
    """One method, one seed, on the nodes of a fleet."""

    experiment: Experiment
    seed: int
    folder: Path
    resume: bool = False

    def run(self, fleet: RemoteFleet, between: Callable[[], None] = lambda: None) -> Trained:
        """Run to the end. `between` is called after every round, to find nodes that have joined."""
        refuse_strangers(self.folder, {"run.json", "log.txt"})
        _wait_for_writer(self.folder)
        with only_writer(self.folder), warnings_to(self.log):
            return self._run(fleet, between)

    def _run(self, fleet: RemoteFleet, between: Callable[[], None]) -> Trained:
        channel = channel_for(self.experiment, fleet.population)
        checkpoints, ledger = Checkpoints(self.folder), Ledger(self.experiment.privacy, self.folder / LEDGER)
        start, kept = self._start(checkpoints, deployed_table(self.experiment, channel, self.seed))
        answers, began = Lines(self.folder / "answers.jsonl", kept.get("answers.jsonl", (0, ""))), time.monotonic()
        done = states_of(start.state)[0].round

        def after_round(progress: Progress) -> None:
            nonlocal began
            now = time.monotonic()
            for report in fleet.reports:
                answers.write(report.line())
            round = states_of(progress.trained.state)[0].round
            self.log(f"round {round} of {self.experiment.rounds}: {now - began:.1f} s, "
                     f"{sum(report.exchanges for report in fleet.reports)} exchanges")
            self._save(progress.trained, checkpoints, ledger, {"answers.jsonl": answers.flush()})
            between()
            began = time.monotonic()

        try:
            trained = train(self.experiment.algorithm, start.task, fleet=fleet, rounds=self.experiment.rounds - done, start=start,
                            channel=channel, on_round=after_round, privacy=ledger)
        finally:
            answers.close()
        fleet.finish()
        self._finish(trained, ledger)
        return trained

    def _start(self, checkpoints: Checkpoints, table: dict[str, Any]) -> tuple[Trained, dict[str, Any]]:
        task, checkpoint = self.experiment.task.make(self.seed), self._earlier(checkpoints, table)
        if checkpoint is not None:
            self.log(f"resumed after round {checkpoint.round} of {self.experiment.rounds}")
            return checkpoint.trained(self.experiment.algorithm, task, self.seed), dict(checkpoint.lines)
        import tomli_w

        about = {"format": DEPLOYED, "version": VERSION, "name": self.experiment.name, "seed": self.seed,
                 "rounds": self.experiment.rounds, "members": self.experiment.members, "versions": versions()}
        write_json(self.folder / "run.json", {**about, "experiment": table})
        write_whole(self.folder / "experiment.toml", tomli_w.dumps(table))
        self.log(f"started, {self.experiment.rounds} rounds")
        state = self.experiment.algorithm.start(task.params(), self.seed)
        return Trained(self.experiment.algorithm, task, state, self.seed), {}

    def _earlier(self, checkpoints: Checkpoints, table: dict[str, Any]) -> Checkpoint | None:
        import json

        place = self.folder / "run.json"
        if not place.is_file():
            return None
        if not self.resume:
            raise RunRefused(f"{self.folder} holds a run. Go on with resume=true, or choose another folder with out.")
        if json.loads(place.read_text())["experiment"] != plain(table):
            raise RunRefused(f"the experiment is not the one {self.folder} began with. Undo the change, or choose another folder "
                             "with out.")
        checkpoint, problems = checkpoints.load()
        for problem in problems:
            self.log(problem)
        return checkpoint

    def _save(self, trained: Trained, checkpoints: Checkpoints, ledger: Ledger, lines: dict[str, Any]) -> None:
        checkpoints.save(trained, lines)
        write_json(self.folder / "privacy.json", statement(ledger, states_of(trained.state)[0].round))

    def _finish(self, trained: Trained, ledger: Ledger) -> None:
        for number, module in enumerate(trained.modules):
            name = "model.safetensors" if len(trained.modules) == 1 else f"model-{number}.safetensors"
            write_whole(self.folder / name, module_bytes(module))
        round = states_of(trained.state)[0].round
        write_json(self.folder / "privacy.json", statement(ledger, round))
        write_json(self.folder / "result.json", {"round": round, "stopped": trained.stopped, "channel": list(ledger.channels)})
        self.log("finished")

    def log(self, text: str) -> None:
        """Add a line to the run's log."""
        write_log(self.folder, text)


def write_log(folder: Path, text: str) -> None:
    """Add a line, with the time, to log.txt in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")


def _wait_for_writer(folder: Path) -> None:
    """Wait until nobody else writes the folder, or PATIENCE is over."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with only_writer(folder):
                return
        except RunError:
            time.sleep(1)
