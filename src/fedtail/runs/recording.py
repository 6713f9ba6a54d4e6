"""The files of a run, written as it goes on, wherever its clients are."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedtail.escaping import escaped_lines
from fedtail.experiment.experiment import Experiment
from fedtail.loggers.base import RunLog
from fedtail.model_file import model_bytes, training_record
from fedtail.privacy.history import EarlierHistory
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.ledger_file import LedgerError, LedgerMark
from fedtail.reading import read_json
from fedtail.runs.checkpoint import Checkpoint, Checkpoints
from fedtail.runs.files import JsonLinesFile, RunRefused, bytes_digest, write_atomically, write_json
from fedtail.runs.held_out_promises import result_with_kept_promises
from fedtail.runs.keep_best import KeepBest
from fedtail.runs.logs import logged_numbers, open_logs
from fedtail.runs.measurements import SplitEvaluations, metrics_line, not_finite_counts
from fedtail.runs.metric_bounds import bounds_entry
from fedtail.runs.run_folder import LEDGER, VERSION, RunFolder
from fedtail.task import Task
from fedtail.training import Progress, Trained
from fedtail.version import __version__


class Watch(Protocol):
    """Receives the progress of a run, and may ask it to stop. The command line shows it on the screen."""

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Called when a run or a trial begins or is resumed: `round` of its `rounds` rounds are done, 0 at the start.

        `name` is that of the experiment, or says which trial it is; `seed` is what it is trained with.
        """
        ...

    def round(self, round: int) -> None:
        """Called after every round with its number, counted from 1, once the round is recorded."""
        ...

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """Called with each line after it was written to `metrics.jsonl`; `tested` is the split that reports are about.

        `line` has `round`, and `members`: for each model the statistics by split and metric.
        """
        ...

    def note(self, text: str) -> None:
        """Called with `text`, a sentence for the user to read, such as a warning."""
        ...

    @property
    def stop(self) -> bool:
        """Whether the run should finish its round, save a checkpoint and end; read after every round."""
        ...


class Records(Protocol):
    """What a run evaluates and records besides its checkpoints.

    In the simulator that is about every client; in a deployment, from sums over clients only.
    """

    @property
    def run_format(self) -> str:
        """The kind of run, written as `format` to `run.json`: "fedtail run" (simulated) or "fedtail deployed run"."""
        ...

    @property
    def run_entries(self) -> dict[str, Any]:
        """The entries of `run.json` about clients and data, as JSON values."""
        ...

    @property
    def tested_split(self) -> str:
        """The name of the split that reports are about, such as "test"."""
        ...

    @property
    def line_files(self) -> tuple[str, ...]:
        """The names of the JSON-lines files, besides `metrics.jsonl`, that `record_start` and `record_round` append to."""
        ...

    @property
    def checkpoint_every(self) -> int:
        """The number of rounds between checkpoints."""
        ...

    @property
    def num_clients(self) -> int:
        """The number of clients that the privacy guarantee covers."""
        ...

    def record_start(self, start: Trained, lines: dict[str, JsonLinesFile]) -> list[SplitEvaluations] | None:
        """Record `start`, the state before the first round. `lines` has the open files by name, those in `line_files` included.

        Returns a dict of evaluations by split for each model, or None where the initial model is not evaluated.
        """
        ...

    def record_round(self, progress: Progress, lines: dict[str, JsonLinesFile]) -> tuple[Trained, list[SplitEvaluations]] | None:
        """Record the round that `progress` is about. `lines` has the open files by name, those in `line_files` included.

        Returns None where nothing was evaluated, else the state that was evaluated and, for each model, its evaluations by split.
        """
        ...

    def record_end(self, trained: Trained) -> tuple[list[SplitEvaluations] | None, dict[str, Any], list[Path]]:
        """Record the end of training, with the final models in `trained`.

        Returns the last evaluations by split for each model (None without any), more entries for `result.json`, and the paths of
        the files that were written, whose digests go into `result.json`.
        """
        ...


class Recorder:
    """Writes the files of one run while it is trained: metrics, checkpoints, the log, the privacy statement and the result."""

    def __init__(self, experiment: Experiment, seed: int, folder: Path, records: Records, watch: Watch, ledger: Ledger,
                 checkpoints: Checkpoints):
        """Set up without writing: `start_or_resume` begins the files in `folder`, for `experiment` trained with `seed`.

        `records` evaluates and records what is specific to a simulated or deployed run, `watch` is told of the progress, `ledger`
        is that of the run, and `checkpoints` saves its states.
        """
        self.experiment, self.seed, self.folder, self.records, self.watch = experiment, seed, folder, records, watch
        self.checkpoints, self.ledger = checkpoints, ledger
        self.best: KeepBest | None = None
        self.stopped = ""               # why the run ended before its rounds were done, where `keep_best` found nothing better
        self._lines: dict[str, JsonLinesFile] = {}
        self._logs: list[RunLog] = []
        self._repriced: list[dict[str, Any]] = []

    def __enter__(self) -> Recorder:
        """Return the recorder itself; no file is opened before `start_or_resume` is called."""
        return self

    def __exit__(self, *reason: Any) -> None:
        """Close the files that `start_or_resume` opened. Exceptions are not suppressed."""
        for lines in self._lines.values():
            lines.close()
        for log in self._logs:
            log.close()

    def start_or_resume(self, task: Task, table: dict[str, Any], checkpoint: Checkpoint | None) -> Trained:
        """Open the run's files and return the state that training starts from: that of the checkpoint, or a new one.

        Without a checkpoint it writes `run.json` and `experiment.toml`, records the new state (evaluated where `records` does so)
        and saves it as the first checkpoint. With one it removes the lines written after the checkpoint, and raises RunRefused
        where the ledger lacks releases that the checkpoint names; a run that now has more rounds is no longer finished. `task`
        holds the initial module; `table` is the experiment's table, for `run.json`. The watch is told that the run begins.
        """
        round, kept = (checkpoint.round, checkpoint.lines) if checkpoint else (0, {})
        if checkpoint is None:
            self._write_run_json(task, table)
        else:
            self._check_ledger(checkpoint)
            self._note_more_rounds(table)
        evaluate = self.experiment.evaluate
        if evaluate.keep_best is not None:
            self.best = KeepBest(self.folder, evaluate.keep_best, self.experiment.members, evaluate.patience,
                                 round if checkpoint else -1)
        for name in ("metrics.jsonl", *self.records.line_files):
            self._lines[name] = JsonLinesFile(self.folder / name, kept.get(name, (0, "")))
        self._logs = open_logs(self.experiment, self.seed, self.folder, table, round + 1 if checkpoint else 0)
        self.watch.begin(self.experiment.name, self.seed, round, self.experiment.rounds)
        self.log(f"{'resumed after' if checkpoint else 'started at'} round {round} of {self.experiment.rounds}")
        self._note_few_clients()
        if checkpoint and not self.ledger.budget.replayable:
            self.note("cohorts and noise come from the operating system: the run goes on, but not as it would have to the bit")
        if checkpoint:
            self._stop_where_over()
            return checkpoint.to_trained(self.experiment.algorithm, task, self.seed)
        algorithm = self.experiment.algorithm
        start = Trained(algorithm, task, algorithm.initial_state(task.params(), self.seed), self.seed)
        found = self.records.record_start(start, self._lines)
        if found is not None:
            self._write_evaluation(start, found)
        self._save_checkpoint(start)
        return start

    def record_round(self, progress: Progress) -> bool:
        """Record the round of `progress` and its evaluation, if any, and save a checkpoint where one is due; for `on_round`.

        Returns True where training should stop because the watch asks for it, or because no better model was found for as many
        evaluations as the experiment's `patience`. A checkpoint is due every `records.checkpoint_every` rounds, after the last
        round and before a stop.
        """
        trained, stop = progress.trained, self.watch.stop      # read once: it may change
        evaluated = self.records.record_round(progress, self._lines)
        if evaluated is not None:
            self._write_evaluation(*evaluated)
            stop = self._stop_where_over() or stop
        if stop or trained.rounds % self.records.checkpoint_every == 0 or trained.rounds == self.experiment.rounds:
            self._save_checkpoint(trained)
        self.watch.round(trained.rounds)
        return stop

    def save_interrupted(self, trained: Trained) -> None:
        """Save a checkpoint of a run that a Ctrl-C has ended after a round that was recorded."""
        self._save_checkpoint(trained)

    def _stop_where_over(self) -> bool:
        """Whether the run has waited long enough for better models; `stopped` then says so."""
        if self.best is not None and self.best.is_over:
            self.stopped = self.best.best_by.reason
        return bool(self.stopped)

    def write_results(self, trained: Trained) -> None:
        """Write the models of `trained`, the last evaluation, the privacy statement and `result.json`: the run is finished.

        `result.json`, with the digests of the other files, is written last: a run is finished where that file exists.
        """
        models = RunFolder(self.folder, {"members": self.experiment.members}).models
        modules = trained.modules
        for path, module in zip(models, modules, strict=True):
            write_atomically(path, model_bytes(module, training_record(self.ledger, trained.rounds)))
        found, more, written = self.records.record_end(trained)
        tested = [None if found is None else found[k].get(self.records.tested_split) for k in range(len(modules))]
        lost = [not_finite_counts(module, trained.task.module, one) for module, one in zip(modules, tested, strict=True)]
        if found is not None and self._last_evaluated_round() != trained.rounds:
            self._write_evaluation(trained, found)
            self._save_checkpoint(trained)
        self._write_privacy(trained)
        kept = self.best.best_model_files() if self.best else []
        files = {path.name: bytes_digest(path.read_bytes()) for path in (*models, *written, *kept)}
        line = {"round": trained.rounds} if found is None else metrics_line(trained.rounds, found)
        best, mark, stopped = self._best_entries(), self.ledger.file_mark(safely=True), trained.stopped or self.stopped
        stopped = stopped if trained.rounds < self.experiment.rounds else ""
        ledger = {"ledger": list(mark)} if mark and not self.ledger.non_private_releases else {}
        result = {**line, **more, **best, "failed": trained.failed, "stopped": stopped, "not_finite": lost,
                  "channel": list(self.ledger.channels), "files": files, **ledger}
        run = RunFolder.open(self.folder, also_deployed=True)
        write_json(self.folder / "result.json", result_with_kept_promises(run, result))
        early = f" after {trained.rounds} of {self.experiment.rounds} rounds ({stopped})" if stopped else ""
        self.log(f"finished{early}; {trained.failed} answers left out because a loss or an update was not finite")
        if self.best is not None and self.stopped and stopped:
            self.watch.note(f"stopped{early}. {self.best.kept_sentence}".rstrip())

    def _best_entries(self) -> dict[str, Any]:
        """The entries of `result.json` about the best models and the clients that chose them; none without `keep_best`."""
        if self.best is None:
            return {}
        splits = list(self.records.run_entries.get("splits") or [])
        return {"best": self.best.found, "selected_on": self.best.selection(splits, self.records.tested_split)}

    def note(self, text: str) -> None:
        """Append `text` to `log.txt` and pass it to the watch, which shows it to the user."""
        self.log(text)
        self.watch.note(text)

    def log(self, text: str) -> None:
        """Append `text` to `log.txt`, after the local time."""
        append_to_log(self.folder, text)

    def _write_run_json(self, task: Task, table: dict[str, Any]) -> None:
        """Write `run.json`, the description of the run, and `experiment.toml`, the experiment's `table` as TOML.

        `task` gives the names of the metrics and which values of each are better.
        """
        family = self.experiment.family
        write_json(self.folder / "run.json", {
            "format": self.records.run_format, "version": VERSION, "name": self.experiment.name, "seed": self.seed,
            "file": Path(self.experiment.source.name).name, "rounds": self.experiment.rounds, "members": self.experiment.members,
            "family": None if family is None else {"field": family.field, "values": family.values},
            "metrics": [m.name for m in task.all_metrics], "better": {m.name: m.better for m in task.all_metrics},
            "bounds": {m.name: bounds_entry(m.bounds) for m in task.all_metrics if m.name not in ("loss", "error")},
            **self.records.run_entries, "versions": package_versions(), "experiment": table})
        self._write_experiment(table)

    def _write_evaluation(self, trained: Trained, found: list[SplitEvaluations]) -> None:
        """Append a line to `metrics.jsonl`, write to the logs of the experiment, and save models that are the best so far.

        `found` has the evaluations by split for each model; `trained` is the state that was evaluated. The watch gets the
        line too.
        """
        line = metrics_line(trained.rounds, found)
        self._lines["metrics.jsonl"].write(line)
        for log in self._logs:
            for model, member in enumerate(found):
                log.write(trained.rounds, model, *logged_numbers(member))
        if self.best is not None:
            self.best.keep_better_models(trained, found, self.records.tested_split)
        self.watch.evaluated(line, self.records.tested_split)

    def _note_more_rounds(self, table: dict[str, Any]) -> None:
        """Where the experiment now has more rounds than the run began with, write that to `run.json`; it is not finished then."""
        place = self.folder / "run.json"
        about = read_json(place)
        if table["rounds"] > about["rounds"]:
            (self.folder / "result.json").unlink(missing_ok=True)      # first: a run is finished where it exists
            write_json(place, {**about, "rounds": table["rounds"], "experiment": table})
            self._write_experiment(table)
            self.log(f"goes on to {table['rounds']} rounds, {about['rounds']} before")

    def _write_experiment(self, table: dict[str, Any]) -> None:
        """Write `experiment.toml`, the experiment's `table` as TOML."""
        import tomli_w

        write_atomically(self.folder / "experiment.toml", tomli_w.dumps(table))

    def _last_evaluated_round(self) -> int | None:
        """The round of the last line of `metrics.jsonl`, None where it has no line. Flushes the file to disk first."""
        self._lines["metrics.jsonl"].flush()
        lines = RunFolder(self.folder, {}).metrics
        return lines[-1]["round"] if lines else None

    def _save_checkpoint(self, trained: Trained) -> None:
        """Write a checkpoint of `trained`, then the privacy statement so far.

        Flushes the JSON-lines files and the ledger to disk first; the checkpoint holds their sizes and digests.
        """
        mark = self.ledger.file_mark(safely=True)
        lines: dict[str, Any] = {name: lines.flush() for name, lines in self._lines.items()}
        self.checkpoints.save(trained, {**lines, **({LEDGER: mark} if mark else {})})
        self._write_privacy(trained)

    def _check_ledger(self, checkpoint: Checkpoint) -> None:
        """Raise RunRefused where the ledger file does not begin with what it held at the checkpoint.

        Releases charged after the checkpoint stay charged. A checkpoint of an old version holds no digest of the ledger: its
        rounds are then recorded on the ledger as not verified, which a note says. Where this version computes another epsilon
        for the earlier rounds than was stated, that is noted too.
        """
        mark, round = checkpoint.lines.get(LEDGER), checkpoint.round
        try:
            if mark is not None:
                self.ledger.check_against_mark(LedgerMark(*mark), round)
        except LedgerError as reason:
            raise RunRefused(str(reason)) from reason
        if mark is None and round:
            self.ledger.record_earlier_history(EarlierHistory(
                f"rounds before round {round} that cannot be verified (their checkpoints did not hold a digest of the ledger)",
                round))
            self.note(f"the checkpoint was written before checkpoints held a digest of the ledger: whether {LEDGER} is whole "
                      f"before round {round} cannot be verified, and the privacy statement will say so")
        self._note_changed_epsilon()

    def _note_changed_epsilon(self) -> None:
        """Note where this version of the library computes another epsilon for the earlier rounds than `privacy.json` states.

        Sets `_repriced`, the list of all such changes, which `privacy.json` will hold.
        """
        from fedtail.privacy.statement import describe_guarantee_change, guarantee_change

        earlier = RunFolder(self.folder, {}).privacy
        change = guarantee_change(self.ledger, earlier)
        self._repriced = [*earlier.get("repriced", []), *([change] if change else [])]
        if change:
            self.note(f"{describe_guarantee_change(change)}: both are in privacy.json")

    def _note_few_clients(self) -> None:
        """Where the budget has a delta, note if there are fewer than 100 clients: a privacy guarantee is useless for so few."""
        from fedtail.privacy.calibration import check_population

        if self.ledger.budget.delta is not None:
            try:
                check_population(self.records.num_clients)
            except ValueError as reason:
                self.note(str(reason))

    def _write_privacy(self, trained: Trained) -> None:
        """Write `privacy.json`: the privacy statement of the rounds up to `trained`.

        It lists where a later version of the library computed another epsilon for earlier rounds, if one did.
        """
        from fedtail.privacy.statement import privacy_statement

        folder = RunFolder.open(self.folder, also_deployed=True)
        found = privacy_statement(self.ledger, trained.rounds, not_charged=folder.not_charged_sentences)
        write_json(self.folder / "privacy.json", {**found, **({"repriced": self._repriced} if self._repriced else {})})


def append_to_log(folder: Path, text: str) -> None:
    """Append a line, the local time and `text`, to `log.txt` in `folder`. The folder is created where it is missing.

    What is not printable in the text is escaped, and its further lines are indented: whoever it came from, no part of it looks
    like another line of the log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().isoformat(timespec='seconds')} {escaped_lines(text)}\n")


def package_versions() -> dict[str, str]:
    """The versions of fedtail, torch, numpy and Python as a dict by these names; the bits of a result depend on them."""
    return {"fedtail": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


@contextmanager
def redirect_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Within the block, pass the text of every Python warning, after "warning: ", to `note` instead of printing it.

    Equal texts are passed once only. How warnings were shown before is restored afterwards.
    """
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any) -> None:
        """Stands in for `warnings.showwarning`: passes a message that was not shown before to `note`."""
        if str(message) not in shown:
            shown.add(str(message))
            note(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
