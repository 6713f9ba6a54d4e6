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

from fedtail.experiment.experiment import Experiment
from fedtail.model_file import model_bytes, training_record
from fedtail.privacy.history import EarlierHistory
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.ledger_file import LedgerError, LedgerMark
from fedtail.runs.checkpoint import Checkpoint, Checkpoints
from fedtail.runs.files import Lines, RunRefused, digest_of, write_json, write_whole
from fedtail.runs.keep_best import KeepBest
from fedtail.runs.measurements import SplitEvaluations, TensorBoard, metrics_line
from fedtail.runs.run_folder import LEDGER, VERSION, RunFolder
from fedtail.task import Task
from fedtail.training import Progress, Trained
from fedtail.version import __version__


class Watch(Protocol):
    """Follows a run while it goes on, and may stop it."""

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Called when a run or a trial begins, or goes on: `round` rounds of `rounds` are done, 0 at the start."""
        ...

    def round(self, round: int) -> None:
        """Called after every round with its number, from 1 on, once it is recorded."""
        ...

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """Called with each line that was written to `metrics.jsonl`; `tested` is the split that reports are about."""
        ...

    def note(self, text: str) -> None:
        """Called with a sentence that a person should read, such as a warning."""
        ...

    @property
    def stop(self) -> bool:
        """Whether to finish the round, save and leave; asked once a round."""
        ...


class Records(Protocol):
    """What a run records beside its checkpoints: from all clients in the simulator, from their sums on a deployment."""

    @property
    def format(self) -> str:
        """The kind of run, `format` in `run.json`: simulated or deployed."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """What `run.json` says of clients and data, as plain values."""
        ...

    @property
    def tested_split(self) -> str:
        """The split that reports are about."""
        ...

    @property
    def lines(self) -> tuple[str, ...]:
        """The names of the files of JSON lines beside `metrics.jsonl`, which `begin` and `after_round` write to."""
        ...

    @property
    def checkpoint_every(self) -> int:
        """How many rounds lie between checkpoints."""
        ...

    @property
    def clients(self) -> int:
        """How many clients the privacy guarantee is about."""
        ...

    def begin(self, start: Trained, lines: dict[str, Lines]) -> list[SplitEvaluations] | None:
        """Record the state before the first round; returns its evaluations by model, or None where it is not evaluated."""
        ...

    def after_round(self, progress: Progress, lines: dict[str, Lines]) -> tuple[Trained, list[SplitEvaluations]] | None:
        """Record a round; returns the state that was evaluated with it and the evaluations by model, or None."""
        ...

    def finish(self, trained: Trained) -> tuple[list[SplitEvaluations] | None, dict[str, Any], list[Path]]:
        """Record the end: the last evaluations by model (or None), more entries for `result.json`, and the files written.

        The digests of those files go into `result.json`.
        """
        ...


class Recorder:
    """Writes the files of one run as it goes on."""

    def __init__(self, experiment: Experiment, seed: int, folder: Path, records: Records, watch: Watch, ledger: Ledger,
                 checkpoints: Checkpoints):
        """Nothing is written yet: `open` begins the files in `folder`. `records` knows what this kind of run evaluates."""
        self.experiment, self.seed, self.folder, self.records, self.watch = experiment, seed, folder, records, watch
        self.checkpoints, self.ledger = checkpoints, ledger
        self.best = KeepBest(folder, experiment.evaluate.keep_best, experiment.members) if experiment.evaluate.keep_best else None
        self._lines: dict[str, Lines] = {}
        self._board: TensorBoard | None = None
        self._repriced: list[dict[str, Any]] = []

    def __enter__(self) -> Recorder:
        """The recorder itself; files are opened by `open`."""
        return self

    def __exit__(self, *reason: Any) -> None:
        """Close the files, whatever happened."""
        for lines in self._lines.values():
            lines.close()
        if self._board is not None:
            self._board.close()

    def open(self, task: Task, table: dict[str, Any], checkpoint: Checkpoint | None) -> Trained:
        """What training starts from: the checkpoint, or a fresh start, which is evaluated and saved as the first checkpoint.

        Writes `run.json` for a fresh start; lines that came after the checkpoint are cut off. Raises RunRefused where the
        ledger lacks what the checkpoint says it held.
        """
        round, kept = (checkpoint.round, checkpoint.lines) if checkpoint else (0, {})
        if checkpoint is None:
            self._write_run_json(task, table)
        else:
            self._check_ledger(checkpoint)
        for name in ("metrics.jsonl", *self.records.lines):
            self._lines[name] = Lines(self.folder / name, kept.get(name, (0, "")))
        if self.experiment.evaluate.tensorboard:
            self._board = TensorBoard(self.folder, self.experiment.members, round + 1 if checkpoint else 0)
        self.watch.begin(self.experiment.name, self.seed, round, self.experiment.rounds)
        self.log(f"{'resumed after' if checkpoint else 'started at'} round {round} of {self.experiment.rounds}")
        self._note_few_clients()
        if checkpoint and not self.ledger.budget.replayable:
            self.note("cohorts and noise come from the operating system: the run goes on, but not as it would have to the bit")
        if checkpoint:
            return checkpoint.to_trained(self.experiment.algorithm, task, self.seed)
        start = Trained(self.experiment.algorithm, task, self.experiment.algorithm.start(task.params(), self.seed), self.seed)
        found = self.records.begin(start, self._lines)
        if found is not None:
            self._write_evaluation(start, found)
        self._save(start)
        return start

    def after_round(self, progress: Progress) -> bool:
        """Record a round and what was evaluated with it, and save a checkpoint where one is due.

        True where training should stop: `train` calls this after every round.
        """
        trained, stop = progress.trained, self.watch.stop      # read once: it may change
        evaluated = self.records.after_round(progress, self._lines)
        if evaluated is not None:
            self._write_evaluation(*evaluated)
        if stop or trained.rounds % self.records.checkpoint_every == 0 or trained.rounds == self.experiment.rounds:
            self._save(trained)
        self.watch.round(trained.rounds)
        return stop

    def finish(self, trained: Trained) -> None:
        """Write models, the last evaluation and the privacy statement of a finished run.

        `result.json`, with the digests of the other files, comes last: where it is there, the run is finished.
        """
        models = RunFolder(self.folder, {"members": self.experiment.members}).models
        for path, module in zip(models, trained.modules, strict=True):
            write_whole(path, model_bytes(module, training_record(self.ledger, trained.rounds)))
        found, more, written = self.records.finish(trained)
        if found is not None and self._last_round() != trained.rounds:
            self._write_evaluation(trained, found)
            self._save(trained)
        self._write_privacy(trained)
        kept = self.best.model_files() if self.best else []
        files = {path.name: digest_of(path.read_bytes()) for path in (*models, *written, *kept)}
        line = {"round": trained.rounds} if found is None else metrics_line(trained.rounds, found)
        best, mark = {"best": self.best.found} if self.best else {}, self.ledger.mark(safely=True)
        write_json(self.folder / "result.json", {**line, **more, **best, "failed": trained.failed, "stopped": trained.stopped,
                                                 "channel": list(self.ledger.channels), "files": files,
                                                 **({"ledger": list(mark)} if mark and not self.ledger.non_private else {})})
        early = f" after {trained.rounds} of {self.experiment.rounds} rounds" if trained.stopped else ""
        self.log(f"finished{early}; {trained.failed} answers left out because a loss or an update was not finite")

    def note(self, text: str) -> None:
        """Write a sentence to `log.txt` and show it to whoever watches the run."""
        self.log(text)
        self.watch.note(text)

    def log(self, text: str) -> None:
        """Append a line with the time to `log.txt`."""
        write_log(self.folder, text)

    def _write_run_json(self, task: Task, table: dict[str, Any]) -> None:
        """Write `run.json`, which describes the run, and `experiment.toml`, its experiment, from `table`."""
        import tomli_w

        family = self.experiment.family
        write_json(self.folder / "run.json", {
            "format": self.records.format, "version": VERSION, "name": self.experiment.name, "seed": self.seed,
            "rounds": self.experiment.rounds, "members": self.experiment.members,
            "family": None if family is None else {"field": family.field, "values": family.values},
            "metrics": [m.name for m in task.all_metrics], "better": {m.name: m.better for m in task.all_metrics},
            **self.records.about, "versions": package_versions(), "experiment": table})
        write_whole(self.folder / "experiment.toml", tomli_w.dumps(table))

    def _write_evaluation(self, trained: Trained, found: list[SplitEvaluations]) -> None:
        """Write a line of `metrics.jsonl` (and to TensorBoard), and keep the models that are the best so far.

        `found` has the evaluations by model; `trained` is the state they are of.
        """
        line = metrics_line(trained.rounds, found)
        self._lines["metrics.jsonl"].write(line)
        if self._board is not None:
            self._board.write(trained.rounds, found)
        if self.best is not None:
            self.best.keep_if_better(trained, found, self.records.tested_split)
        self.watch.evaluated(line, self.records.tested_split)

    def _last_round(self) -> int | None:
        """The round of the last line of `metrics.jsonl`; None where there is none."""
        self._lines["metrics.jsonl"].flush()
        lines = RunFolder(self.folder, {}).metrics
        return lines[-1]["round"] if lines else None

    def _save(self, trained: Trained) -> None:
        """Write a checkpoint, with the state of all growing files and of the ledger, and the privacy statement so far."""
        mark = self.ledger.mark(safely=True)
        lines: dict[str, Any] = {name: lines.flush() for name, lines in self._lines.items()}
        self.checkpoints.save(trained, {**lines, **({LEDGER: mark} if mark else {})})
        self._write_privacy(trained)

    def _check_ledger(self, checkpoint: Checkpoint) -> None:
        """Refuse (RunRefused) to go on where the ledger does not hold what it held at the checkpoint.

        What was charged since then stays. A checkpoint of a version that held no digest of the ledger makes the earlier
        rounds count as not verified.
        """
        mark, round = checkpoint.lines.get(LEDGER), checkpoint.round
        try:
            if mark is not None:
                self.ledger.check(LedgerMark(*mark), round)
        except LedgerError as reason:
            raise RunRefused(str(reason)) from reason
        if mark is None and round:
            self.ledger.record_earlier(EarlierHistory(
                f"rounds before round {round} that cannot be verified (their checkpoints did not hold a digest of the ledger)",
                round))
            self.note(f"the checkpoint was written before checkpoints held a digest of the ledger: whether {LEDGER} is whole "
                      f"before round {round} cannot be verified, and the privacy statement will say so")
        self._note_new_price()

    def _note_new_price(self) -> None:
        """Note, and keep for `privacy.json`, where this version prices earlier rounds otherwise than was stated."""
        from fedtail.privacy.statement import describe_price_change, price_change

        earlier = RunFolder(self.folder, {}).privacy
        change = price_change(self.ledger, earlier)
        self._repriced = [*earlier.get("repriced", []), *([change] if change else [])]
        if change:
            self.note(f"{describe_price_change(change)}: both are in privacy.json")

    def _note_few_clients(self) -> None:
        """Note that there are too few clients for a meaningful privacy guarantee, where there is a guarantee."""
        from fedtail.privacy.calibration import check_population

        if self.ledger.budget.delta is not None:
            try:
                check_population(self.records.clients)
            except ValueError as reason:
                self.note(str(reason))

    def _write_privacy(self, trained: Trained) -> None:
        """Write the privacy statement of the rounds so far to `privacy.json`."""
        from fedtail.privacy.statement import statement

        folder = RunFolder.open(self.folder, also_deployed=True)
        found = statement(self.ledger, trained.rounds, not_charged=folder.not_charged)
        write_json(self.folder / "privacy.json", {**found, **({"repriced": self._repriced} if self._repriced else {})})


def write_log(folder: Path, text: str) -> None:
    """Append a line, with the local time, to `log.txt` in a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")


def package_versions() -> dict[str, str]:
    """The versions of fedtail, torch, numpy and Python, on which the bits of a result depend."""
    return {"fedtail": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


@contextmanager
def redirect_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Within the block, Python warnings go to `note`, each text once, instead of to the terminal."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            note(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
