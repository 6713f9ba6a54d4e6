"""A deployed run in a folder on the server: it can be killed at any moment and resumes from its last round.

    run.json, experiment.toml   the resolved experiment   ledger.jsonl, privacy.json   the releases, and what they cost
    checkpoint-*.safetensors    after every round         answers.jsonl                which clients answered which question
    model.safetensors           the final model           metrics.jsonl                what clients found in evaluations
    best.safetensors            the best by keep_best     result.json                  written last
    training.txt                its name on nodes         nodes.json, seconds.json     who is there, and times of exchanges
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.algorithm import planned_round
from fedtail.channel.base import Channel
from fedtail.channel.secure import SecureChannel
from fedtail.client_memory import ClientMemory, NodeMemory
from fedtail.deployment.asked_rounds import Asked
from fedtail.deployment.audit_log import AUDIT, AuditLog
from fedtail.deployment.consent import experiment_digest
from fedtail.deployment.deployed_experiment import deployed_experiment_table, deployment_channel
from fedtail.deployment.forgotten_rounds import charge_forgotten_rounds, forgotten_rounds, forgotten_text, is_believable
from fedtail.deployment.remote import RemoteFleet
from fedtail.evaluation.evaluate import Evaluation
from fedtail.experiment.experiment import Experiment
from fedtail.losses import default_error, misclassification
from fedtail.privacy.ledger import Ledger
from fedtail.reading import read_json
from fedtail.risk.base import tail_fraction_used
from fedtail.runs.checkpoint import Checkpoints
from fedtail.runs.diverged import useless_models
from fedtail.runs.evaluated_models import EVALUATED, NONE, NOT_EVALUATED
from fedtail.runs.execution import checkpoint_to_resume
from fedtail.runs.files import JsonLinesFile, RunError, hold_folder_lock, refuse_foreign_folder, write_atomically
from fedtail.runs.measurements import SplitEvaluations
from fedtail.runs.recording import Recorder, append_to_log, redirect_warnings
from fedtail.runs.run_folder import DEPLOYED, LEDGER, RunFolder
from fedtail.task import Task
from fedtail.training import Progress, Trained, resume

TRAINING = "training.txt"
PATIENCE = 90.0        # seconds to wait for another writer: what is left of a server that was killed


@dataclass(frozen=True)
class DeployedRun:
    """One method with one seed, trained on the nodes of a fleet; everything is recorded in `folder`."""

    experiment: Experiment
    seed: int
    folder: Path
    resume: bool = False

    def run(self, fleet: RemoteFleet, between: Callable[[], None] = lambda: None,
            asked: Callable[[], Iterable[tuple[Asked, ...]]] = lambda: ()) -> Trained:
        """Train on the nodes of `fleet` to the last round, record everything in the folder, and return the trained models.

        With the field `resume` it goes on from the newest checkpoint. `between` is called before every round, for example to
        register nodes that joined. `asked` returns what each node was asked in this training: what the ledger does not hold of
        it is charged before the next round. Waits up to PATIENCE seconds for another process that writes to the folder. Raises
        RunRefused where one still does, where the folder holds other files or another experiment, or a run and `resume` is off.
        """
        refuse_foreign_folder(self.folder, {"run.json", "log.txt", TRAINING})
        _wait_for_writer(self.folder)
        with hold_folder_lock(self.folder), redirect_warnings(self.log):
            return self._run_locked(fleet, between, asked)

    def training_name(self) -> bytes:
        """The name of this training, 16 random bytes by which nodes know it; the same when the run is resumed.

        It is that of the newest checkpoint, or in the file training.txt, which is written where there is none.
        """
        with suppress(RunError):
            checkpoint, _ = Checkpoints(self.folder).load()
            if checkpoint is not None and checkpoint.memory.nodes is not None:
                return checkpoint.memory.nodes.training
        path = self.folder / TRAINING
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_hex(16) + "\n")
        return bytes.fromhex(path.read_text(encoding="utf-8").strip())

    def models_of_no_use(self) -> list[str]:
        """Why models of this run, which is finished, are of no use, as where every round was lost; [] for none.

        The log is told too; it has the reason of each lost round.
        """
        found = useless_models(RunFolder.open(self.folder, also_deployed=True))
        for text in found:
            self.log(f"warning: {text}")
        return found

    def channel(self, population: Any) -> Channel:
        """The channel of the experiment file or the default, whose threshold a run keeps when it is resumed with other nodes."""
        channel = deployment_channel(self.experiment, population)
        begun = self.folder / "run.json"
        if "channel" in self.experiment.source.tables or not isinstance(channel, SecureChannel) or not begun.is_file():
            return channel
        return replace(channel, threshold=read_json(begun)["experiment"]["channel"]["threshold"])

    def _run_locked(self, fleet: RemoteFleet, between: Callable[[], None],
                    asked: Callable[[], Iterable[tuple[Asked, ...]]]) -> Trained:
        """Train from the newest checkpoint, or from the start, and return the trained models; the caller holds the folder's lock.

        A checkpoint is written after every round. Before each, `between` is called, and what nodes were `asked` beyond the ledger
        is charged. After the last round the nodes of `fleet` are sent how it ended, and the results are written.
        """
        channel, checkpoints = self.channel(fleet.population), Checkpoints(self.folder)
        table = deployed_experiment_table(self.experiment, channel, self.seed)
        checkpoint, problems = checkpoint_to_resume(checkpoints, table, self.resume, "resume=true", "out")
        task, privacy = self.experiment.task.make(self.seed), self.experiment.privacy
        ledger = Ledger(privacy, self.folder / LEDGER, unrecorded=privacy.randomness)
        records = DeploymentRecords(self.experiment, task, fleet, self.log)
        fleet.audit = AuditLog(self.folder / AUDIT)
        evaluation, checked = self.experiment.evaluate.on_nodes, tuple[tuple[Asked, ...], ...]()

        def before_round() -> None:
            """Let nodes join and leave, and charge what they were asked that the ledger does not hold."""
            nonlocal checked
            between()
            found = tuple(asked())
            if found != checked:
                self._charge_forgotten_rounds(ledger, found, fleet, channel, task)
                checked = found

        def record_round(progress: Progress) -> bool:
            """Record the round of `progress`, prepare for the next and restart the clock; True to stop the training."""
            stop = recorder.record_round(progress)
            if not stop and (evaluation is not None or progress.trained.rounds < self.experiment.rounds):
                before_round()
            records.began = time.monotonic()
            return stop

        with Recorder(self.experiment, self.seed, self.folder, records, Unwatched(), ledger, checkpoints) as recorder:
            for problem in problems:
                recorder.log(problem)
            fleet.audit.write("resumed" if checkpoint else "started", method=experiment_digest([self.experiment]),
                              seed=self.seed, clients=len(fleet.population))
            start = recorder.start_or_resume(task, table, checkpoint)
            if start.memory.nodes is None:
                start = replace(start, memory=ClientMemory(fleet.population.key, {}, NodeMemory(self.training_name())))
            if not recorder.stopped:
                before_round()
            records.began = time.monotonic()
            trained = resume(start, fleet=fleet, rounds=0 if recorder.stopped else self.experiment.rounds - start.rounds,
                             channel=channel, on_round=record_round, privacy=ledger,
                             evaluation=None if recorder.stopped else evaluation, progress=False)
            if trained.interrupted:
                raise KeyboardInterrupt      # its rounds are saved; it is not finished
            fleet.finish()
            recorder.write_results(trained)
            fleet.audit.write("finished", safely=True, rounds=trained.rounds)
        return trained

    def _charge_forgotten_rounds(self, ledger: Ledger, asked: Iterable[tuple[Asked, ...]], fleet: RemoteFleet, channel: Channel,
                                 task: Task) -> None:
        """Charge to the ledger the rounds that nodes were `asked` and it does not hold, each at the most that a round releases.

        The method is that of the experiment, with its evaluation, over the clients of `fleet` and this channel. The log says so.
        """
        asked = tuple(asked)
        if liars := sum(not is_believable(one) for one in asked):
            self.log(f"{liars} nodes list more questions than a run can have asked: what they say is not charged")
        forgotten = forgotten_rounds(asked, self.folder / LEDGER)
        if not forgotten:
            return
        method, evaluates = self.experiment.algorithm, self.experiment.evaluate.on_nodes
        held: Any = method if evaluates is None else evaluates.round_with_evaluation(method)
        event = planned_round(held, fleet, channel, len(task.params()))
        charge_forgotten_rounds(ledger, forgotten, event)
        self.log(forgotten_text(forgotten))

    def log(self, text: str) -> None:
        """Append a line, the local time and `text`, to log.txt in the run's folder, which is created."""
        append_to_log(self.folder, text)


class DeploymentRecords:
    """What a run on nodes records beside checkpoints: answer reports in answers.jsonl, and the evaluations by its cohorts."""

    run_format, line_files, checkpoint_every = DEPLOYED, ("answers.jsonl",), 1

    def __init__(self, experiment: Experiment, task: Task, fleet: RemoteFleet, log: Callable[[str], None]):
        """Store what the records are about, and start the clock of the first round; nothing is written.

        `experiment` is trained under `task` on the nodes of `fleet`, whose answer reports are recorded; `log` appends a line to
        the run's log. Evaluations are recorded under the split that clients evaluate on, or "test" where the experiment evaluates
        on no nodes.
        """
        self.experiment, self.task, self.fleet, self.log = experiment, task, fleet, log
        self.tested_split = experiment.evaluate.on_nodes.split if experiment.evaluate.on_nodes else "test"
        self.began = time.monotonic()

    @property
    def num_clients(self) -> int:
        """The number of clients at all nodes of the fleet together."""
        return len(self.fleet.population)

    @property
    def run_entries(self) -> dict[str, Any]:
        """Entries for run.json: `splits` (clients by evaluated split, {} if none), `data` (a text, "at 3 nodes"), and `rates`.

        `rates` is whether errors are rates in [0, 1], which reports then show in percent. `personal` says for each model whether
        personal models beside it are evaluated, on held-out examples; it is left out where there are none.
        """
        evaluates, error = self.experiment.evaluate.on_nodes, self.task.error
        whole = evaluates is not None and evaluates.error_bound == 1
        return {"splits": {self.tested_split: self.num_clients} if evaluates else {},
                "data": f"at {self.fleet.population.num_nodes} nodes",
                "rates": error is misclassification or (error is default_error and whole), **self._personal_entry()}

    def _personal_entry(self) -> dict[str, Any]:
        """The entry of run.json that says for each model whether personal models beside it are evaluated; none without any."""
        evaluates = self.experiment.evaluate.on_nodes
        halves = evaluates.personal_halves(self.experiment.algorithm) if evaluates else {}
        found = [NONE if not member.personal.trains else EVALUATED if k in halves else NOT_EVALUATED
                 for k, member in enumerate(self.experiment.algorithm.members)]
        return {} if set(found) == {NONE} else {"personal": found}

    def record_start(self, start: Trained, lines: dict[str, JsonLinesFile]) -> None:
        """Write nothing: the model at the start is evaluated by the cohort of the first round, which has not been sampled yet.

        `start` and `lines` are not used.
        """

    def record_round(self, progress: Progress, lines: dict[str, JsonLinesFile]) -> tuple[Trained, list[SplitEvaluations]] | None:
        """Write the round's reports to answers.jsonl and a line to the log; returns (the run before this round, its evaluations).

        `progress` is about the round, and `lines` has the open files by name. The cohort of a round evaluates the models that it
        received, those before the round: one dict by split for each model. None where it evaluated nothing.
        """
        for report in self.fleet.reports:
            lines["answers.jsonl"].write({**report.as_dict(), **audit_entry(self.fleet.audit)})
        self.log(f"round {progress.trained.rounds} of {self.experiment.rounds}: {time.monotonic() - self.began:.1f} s, "
                 f"{sum(report.exchanges for report in self.fleet.reports)} exchanges"
                 f"{self._nodes_text()}{self._raised_tail_text()}")
        found = progress.before.evaluation if progress.before else None
        return None if progress.before is None or found is None else (progress.before, self._evaluations_by_split(found))

    def _nodes_text(self) -> str:
        """For the log: how many nodes answered, in the question of the last round that fewest did; "" where none was asked."""
        fewest = min(self.fleet.reports, key=lambda report: report.nodes, default=None)
        return "" if fewest is None else f", {fewest.nodes} of {fewest.asked_nodes} nodes answered"

    def _raised_tail_text(self) -> str:
        """For the log: the tail fractions used in the last round by risks that depend on the size of the cohort; "" without."""
        sampled = self.fleet.reports[-1].sampled if self.fleet.reports else 0
        used = [tail_fraction_used(member.risk, sampled) for member in self.experiment.algorithm.members
                if member.risk.declares.reads_cohort]
        return "".join(f", tail fraction {theta:.3g}" for theta in used if theta is not None)

    def record_end(self, trained: Trained) -> tuple[list[SplitEvaluations] | None, dict[str, Any], list[Path]]:
        """The triple (evaluations, entries for result.json, files written) about the final models of `trained`.

        The evaluations are those of the last cohort, one dict by split for each model; the entries hold the `histograms` that
        were released, and those of personal models; the files are always []. Where nothing was evaluated: (None, {}, []).
        """
        found = trained.evaluation
        if found is None:
            return None, {}, []
        own = [_histogram_entries(evaluation.personal) for evaluation in found]
        entries = {"histograms": list(map(_histogram_entries, found)), **({"personal_histograms": own} if any(own) else {})}
        return self._evaluations_by_split(found), entries, []

    def _evaluations_by_split(self, found: tuple[Evaluation, ...]) -> list[SplitEvaluations]:
        """For each model a dict with its evaluation, from `found`, under the name of the split that clients evaluate on."""
        return [{self.tested_split: evaluation} for evaluation in found]


def audit_entry(audit: AuditLog | None) -> dict[str, Any]:
    """The entry of a line in answers.jsonl, which checkpoints vouch for, that names the last line of the audit log."""
    return {} if audit is None else {"audit": list(audit.head)}


def _histogram_entries(evaluation: Evaluation | None) -> dict[str, Any]:
    """The released histograms of an evaluation for result.json, by metric: `edges`, `counts` and `noise`; {} for None."""
    found = {} if evaluation is None else evaluation.distributions
    return {name: {"edges": one.edges.values, "counts": one.counts.tolist(), "noise": one.noise} for name, one in found.items()}


class Unwatched:
    """A `Watch` that shows nothing and never stops a run: on a server, the run's log says how it goes."""

    stop = False

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Do nothing when a run begins; the arguments, its name, seed and rounds, are not used."""

    def round(self, round: int) -> None:
        """Do nothing after a round: the run's log has a line about it."""

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """Do nothing with the evaluation in `line`, which metrics.jsonl holds; `tested` is not used."""

    def note(self, text: str) -> None:
        """Do nothing with the note `text`: the run's log holds it already."""


def _wait_for_writer(folder: Path) -> None:
    """Wait until no other process holds the folder's lock, for PATIENCE seconds at most; tries once a second.

    Returns in both cases and does not keep the lock, so the caller must still acquire it.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with hold_folder_lock(folder):
                return
        except RunError:
            time.sleep(1)
