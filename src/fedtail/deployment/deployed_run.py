"""A deployed run in a folder on the server: it can be killed at any moment and resumes from its last round.

    run.json, experiment.toml   the resolved experiment   ledger.jsonl, privacy.json   the releases, and what they cost
    checkpoint-*.safetensors    after every round         answers.jsonl                which clients answered which question
    model.safetensors           the final model           metrics.jsonl                what clients found in evaluations
    best.safetensors            the best by keep_best     result.json                  written last
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtail.deployment.deployed_experiment import channel_for, deployed_table
from fedtail.deployment.remote import RemoteFleet
from fedtail.evaluation.evaluate import Evaluation
from fedtail.experiment.experiment import Experiment
from fedtail.losses import default_error, misclassification
from fedtail.privacy.ledger import Ledger
from fedtail.runs.checkpoint import Checkpoints
from fedtail.runs.execution import earlier_checkpoint
from fedtail.runs.files import Lines, RunError, only_writer, refuse_foreign_folder
from fedtail.runs.measurements import SplitEvaluations
from fedtail.runs.recording import Recorder, redirect_warnings, write_log
from fedtail.runs.run_folder import DEPLOYED, LEDGER
from fedtail.task import Task
from fedtail.training import Progress, Trained, resume

PATIENCE = 90.0        # seconds to wait for another writer: what is left of a server that was killed


@dataclass(frozen=True)
class DeployedRun:
    """One method, one seed, on the nodes of a fleet."""

    experiment: Experiment
    seed: int
    folder: Path
    resume: bool = False

    def run(self, fleet: RemoteFleet, between: Callable[[], None] = lambda: None) -> Trained:
        """Train to the end, recording everything in the folder, and give the trained models; `resume` goes on from a checkpoint.

        `between` is called after every round, to find nodes that have joined. Waits up to PATIENCE for an earlier writer of the
        folder, and refuses a folder that holds something else.
        """
        refuse_foreign_folder(self.folder, {"run.json", "log.txt"})
        _wait_for_writer(self.folder)
        with only_writer(self.folder), redirect_warnings(self.log):
            return self._run(fleet, between)

    def _run(self, fleet: RemoteFleet, between: Callable[[], None]) -> Trained:
        """Train from the newest checkpoint or the start, with the folder locked; a checkpoint is written after every round."""
        channel, checkpoints = channel_for(self.experiment, fleet.population), Checkpoints(self.folder)
        table = deployed_table(self.experiment, channel, self.seed)
        checkpoint, problems = earlier_checkpoint(checkpoints, table, self.resume, "resume=true", "out")
        task, privacy = self.experiment.task.make(self.seed), self.experiment.privacy
        ledger = Ledger(privacy, self.folder / LEDGER, unrecorded=privacy.randomness)
        records = DeploymentRecords(self.experiment, task, fleet, self.log)

        def after_round(progress: Progress) -> bool:
            """Record the round, let new nodes join, and start the clock of the next; returns whether to stop."""
            stop = recorder.after_round(progress)
            between()
            records.began = time.monotonic()
            return stop

        with Recorder(self.experiment, self.seed, self.folder, records, Unwatched(), ledger, checkpoints) as recorder:
            for problem in problems:
                recorder.log(problem)
            start = recorder.open(task, table, checkpoint)
            trained = resume(start, fleet=fleet, rounds=self.experiment.rounds - start.rounds, channel=channel,
                             on_round=after_round, privacy=ledger, evaluation=self.experiment.evaluate.on_nodes)
            fleet.finish()
            recorder.finish(trained)
        return trained

    def log(self, text: str) -> None:
        """Add a line to the run's log, log.txt in its folder."""
        write_log(self.folder, text)


class DeploymentRecords:
    """What a server knows of a run on nodes: which clients answered, and what they found in evaluations."""

    format, lines, checkpoint_every = DEPLOYED, ("answers.jsonl",), 1

    def __init__(self, experiment: Experiment, task: Task, fleet: RemoteFleet, log: Callable[[str], None]):
        """`log` writes a line to the run's log. The clock of the first round starts here."""
        self.experiment, self.task, self.fleet, self.log = experiment, task, fleet, log
        self.tested_split = experiment.evaluate.on_nodes.split if experiment.evaluate.on_nodes else "test"
        self.began = time.monotonic()

    @property
    def clients(self) -> int:
        """How many clients the nodes hold together."""
        return len(self.fleet.population)

    @property
    def about(self) -> dict[str, Any]:
        """For run.json: the sizes of the evaluated split, where the data are, and whether errors are rates in [0, 1]."""
        evaluates, error = self.experiment.evaluate.on_nodes, self.task.error
        whole = evaluates is not None and evaluates.error_bound == 1
        return {"splits": {self.tested_split: self.clients} if evaluates else {},
                "data": f"at {self.fleet.population.nodes} nodes",
                "rates": error is misclassification or (error is default_error and whole)}

    def begin(self, start: Trained, lines: dict[str, Lines]) -> None:
        """Nothing is recorded before the first round: its cohort evaluates the start."""

    def after_round(self, progress: Progress, lines: dict[str, Lines]) -> tuple[Trained, list[SplitEvaluations]] | None:
        """Write the round's answer reports and a log line; returns the models its cohort received and how it evaluated them.

        None where the cohort evaluated nothing.
        """
        for report in self.fleet.reports:
            lines["answers.jsonl"].write(report.line())
        self.log(f"round {progress.trained.rounds} of {self.experiment.rounds}: {time.monotonic() - self.began:.1f} s, "
                 f"{sum(report.exchanges for report in self.fleet.reports)} exchanges")
        found = progress.before.evaluation if progress.before else None
        return None if progress.before is None or found is None else (progress.before, self._by_split(found))

    def finish(self, trained: Trained) -> tuple[list[SplitEvaluations] | None, dict[str, Any], list[Path]]:
        """How the last cohort evaluated the final models, its histograms for result.json, and no files; None where it did not."""
        found = trained.evaluation
        if found is None:
            return None, {}, []
        histograms = [{name: {"edges": one.edges.values, "counts": one.counts.tolist(), "noise": one.noise}
                       for name, one in evaluation.distributions.items()} for evaluation in found]
        return self._by_split(found), {"histograms": histograms}, []

    def _by_split(self, found: tuple[Evaluation, ...]) -> list[SplitEvaluations]:
        """The evaluation of each model under the name of the split that nodes evaluate on."""
        return [{self.tested_split: evaluation} for evaluation in found]


class Unwatched:
    """Nobody watches a run on a server: its log says how it goes."""

    stop = False

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Show nothing when a run begins."""

    def round(self, round: int) -> None:
        """Show nothing after a round: the log says it."""

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """Show nothing of an evaluation: metrics.jsonl holds it."""

    def note(self, text: str) -> None:
        """Print nothing: a note is in the run's log already."""


def _wait_for_writer(folder: Path) -> None:
    """Wait until nobody else writes the folder, or PATIENCE is over; returns either way, and the lock is not kept."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with only_writer(folder):
                return
        except RunError:
            time.sleep(1)
