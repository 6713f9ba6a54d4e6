"""The files of a run, written as it goes on."""

from __future__ import annotations

import hashlib
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedtail.algorithm import states_of
from fedtail.engine.choice import kernel_for
from fedtail.evaluation.evaluate import gives_rates
from fedtail.experiment.data_sources import fingerprint
from fedtail.experiment.experiment import Experiment
from fedtail.privacy.ledger import Ledger
from fedtail.runs.checkpoint import Checkpoint, Checkpoints
from fedtail.runs.files import Lines, RunError, RunRefused, write_json, write_whole
from fedtail.runs.measurements import (
    Populations,
    SplitEvaluations,
    TensorBoard,
    add_finetuned,
    add_participation,
    add_picks,
    client_rows,
    evaluate_splits,
    metrics_line,
    round_line,
    write_clients,
)
from fedtail.runs.run_folder import FORMAT, TESTED, VERSION, RunFolder
from fedtail.task import Task
from fedtail.training import Progress, Trained
from fedtail.version import __version__


class Watch(Protocol):
    """Follows a run while it goes on, and may stop it."""

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """A run begins, or goes on after a round."""
        ...

    def round(self, round: int) -> None:
        """A round is done."""
        ...

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """A line of `metrics.jsonl` was written; `tested` is the split that reports are about."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know."""
        ...

    @property
    def stop(self) -> bool:
        """Whether to finish the round, save and leave."""
        ...


class Recorder:
    """Writes the files of one run as it goes on."""

    def __init__(self, experiment: Experiment, seed: int, folder: Path, splits: Populations, watch: Watch,
                 checkpoints: Checkpoints, ledger: Ledger):
        self.experiment, self.seed, self.folder, self.splits, self.watch = experiment, seed, folder, splits, watch
        self.checkpoints, self.ledger = checkpoints, ledger
        self.tail = experiment.evaluate.tail and ledger.terms.replayable      # cohorts of the operating system are kept nowhere
        self.tested = next(split for split in TESTED if split in splits)
        self._last: tuple[int, list[SplitEvaluations]] | None = None
        self._lines: dict[str, Lines] = {}
        self._board: TensorBoard | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *reason: Any) -> None:
        for lines in self._lines.values():
            lines.close()
        if self._board is not None:
            self._board.close()

    def done(self, trained: Trained) -> int:
        """How many rounds a model was trained for."""
        return states_of(trained.state)[0].round

    def open(self, task: Task, table: dict[str, Any], checkpoint: Checkpoint | None) -> Trained:
        """What training starts from: the checkpoint, or a fresh start that is then a checkpoint itself."""
        round, kept = (checkpoint.round, checkpoint.lines) if checkpoint else (0, {})
        self._write_run_json(task, table, fresh=checkpoint is None)
        task = self._same_start(task, fresh=checkpoint is None)
        names = ["metrics.jsonl", "rounds.jsonl"] if self.tail else ["metrics.jsonl"]
        for name in names:
            self._lines[name] = Lines(self.folder / name, kept.get(name, (0, "")))
        if self.experiment.evaluate.tensorboard:
            self._board = TensorBoard(self.folder, self.experiment.members, round + 1 if checkpoint else 0)
        self.watch.begin(self.experiment.name, self.seed, round, self.experiment.rounds)
        self.log(f"{'resumed after' if checkpoint else 'started at'} round {round} of {self.experiment.rounds}")
        self._doubt_privacy()
        if checkpoint and not self.ledger.terms.replayable:
            self.note("cohorts and noise come from the operating system: the run goes on, but not as it would have to the bit")
        if checkpoint:
            return checkpoint.trained(self.experiment.algorithm, task, self.seed)
        start = Trained(self.experiment.algorithm, task, self.experiment.algorithm.start(task.params(), self.seed), self.seed)
        if "rounds.jsonl" in self._lines:
            self._lines["rounds.jsonl"].write({"simulator_only": True, "clients": len(self.splits["train"])})
        self._evaluate(start)
        self._save(start)
        return start

    def after_round(self, progress: Progress) -> bool:
        """Record a round, evaluate and save where that is due; True where training should stop."""
        trained, round, stop = progress.trained, self.done(progress.trained), self.watch.stop      # read once: it may change
        if "rounds.jsonl" in self._lines and progress.view is not None:
            self._lines["rounds.jsonl"].write(round_line(trained, progress.view, len(self.splits["train"])))
        due = round % self.experiment.evaluate_every == 0 or round == self.experiment.rounds
        if due:
            self._evaluate(trained)
        if due or stop:
            self._save(trained)
        self.watch.round(round)
        return stop

    def finish(self, trained: Trained) -> None:
        """What a finished run leaves; `result.json` is written last and says that it is finished."""
        models = RunFolder.open(self.folder).models
        for path, module in zip(models, trained.modules, strict=True):
            write_whole(path, module_bytes(module))
        evaluations = self._evaluations(trained, self.splits)
        tuned = self._write_clients(trained, evaluations)
        self._write_privacy(trained)
        shown = [{split: found for split, found in member.items() if split in self._evaluated_splits()} for member in evaluations]
        files = {path.name: digest_of(path.read_bytes()) for path in (*models, self.folder / "clients.parquet")}
        write_json(self.folder / "result.json", {**metrics_line(self.done(trained), shown), "finetuned": tuned,
                                                 "failed": trained.failed, "files": files})
        early = f" after {self.done(trained)} of {self.experiment.rounds} rounds" if trained.stopped else ""
        self.log(f"finished{early}; {trained.failed} answers left out because a loss or an update was not finite")

    def note(self, text: str) -> None:
        """Something a person should know."""
        self.log(text)
        self.watch.note(text)

    def log(self, text: str) -> None:
        """Append a line with the time to `log.txt`."""
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")

    def _write_run_json(self, task: Task, table: dict[str, Any], fresh: bool) -> None:
        """Write `run.json` and `experiment.toml`; of a resumed run, refuse other data or code."""
        import tomli_w

        print_of_data = fingerprint(self.splits)
        if not fresh:
            _refuse_changed(RunFolder.open(self.folder), "fingerprint", print_of_data, "the data are")
            _refuse_changed(RunFolder.open(self.folder), "own_code", self.experiment.own_code(), "your own code is")
            return
        family = self.experiment.family
        write_json(self.folder / "run.json", {
            "format": FORMAT, "version": VERSION, "name": self.experiment.name, "seed": self.seed,
            "rounds": self.experiment.rounds, "members": self.experiment.members,
            "family": None if family is None else {"field": family.field, "values": family.values},
            "rates": gives_rates(task, self.splits[self.tested]),
            "metrics": [m.name for m in task.all_metrics], "better": {m.name: m.better for m in task.all_metrics},
            "splits": {name: len(population) for name, population in self.splits.items()},
            "data": str(self.experiment.data), "device": self.experiment.device, "kernel": self._kernel(task),
            "versions": versions(), "fingerprint": print_of_data, "own_code": self.experiment.own_code(),
            "start": digest_of(module_bytes(task.module)), "experiment": table})
        write_whole(self.folder / "experiment.toml", tomli_w.dumps(table))

    def _kernel(self, task: Task) -> str:
        """The kernel that will be chosen: it follows from the task, the shapes of the data and the device."""
        engine, dtype = self.experiment.engine, task.params().dtype
        return kernel_for(task, torch.device(self.experiment.device), dtype, self.splits["train"], engine.kernel).name

    def _same_start(self, task: Task, fresh: bool) -> Task:
        """The task with the module the run began with, frozen parameters and buffers included."""
        from safetensors.torch import load

        path, module = self.folder / "initial.safetensors", task.module
        if fresh:
            write_whole(path, module_bytes(module))
            return task
        content = path.read_bytes() if path.is_file() else b""
        if digest_of(content) != RunFolder.open(self.folder).about["start"]:
            raise RunError(f"{path} is missing or damaged: the run cannot go on from the module it began with. Start again in "
                           "another folder.")
        module.load_state_dict(load(content))
        return replace(task, module=module)

    def _evaluated_splits(self) -> Populations:
        """The splits that are evaluated while the run goes on."""
        return {name: population for name, population in self.splits.items() if name != "train" or self.experiment.evaluate.train
                or self.tested == "train"}

    def _evaluations(self, trained: Trained, splits: Populations) -> list[SplitEvaluations]:
        """Evaluate these splits; what was evaluated last, under the same models, is taken from there."""
        round, known = self._last or (-1, [])
        known = known if round == self.done(trained) else [{} for _ in trained.algorithm.members]
        missing = {name: population for name, population in splits.items() if name not in known[0]}
        fresh = evaluate_splits(trained, missing, **self.experiment.evaluating)
        self._last = (self.done(trained), [{**old, **new} for old, new in zip(known, fresh, strict=True)])
        return [{name: member[name] for name in splits} for member in self._last[1]]

    def _evaluate(self, trained: Trained) -> None:
        """Evaluate, and write a line of `metrics.jsonl`."""
        evaluations = self._evaluations(trained, self._evaluated_splits())
        line = metrics_line(self.done(trained), evaluations)
        self._lines["metrics.jsonl"].write(line)
        if self._board is not None:
            self._board.write(self.done(trained), evaluations)
        self.watch.evaluated(line, self.tested)

    def _save(self, trained: Trained) -> None:
        """Write a checkpoint, and what the run has cost so far."""
        self.checkpoints.save(trained, {name: lines.flush() for name, lines in self._lines.items()})
        self._write_privacy(trained)

    def _doubt_privacy(self) -> None:
        """Note what a privacy guarantee for so few clients is worth, where there is one."""
        from fedtail.privacy.calibration import check_population

        if self.ledger.terms.delta is not None:
            try:
                check_population(len(self.splits["train"]))
            except ValueError as reason:
                self.note(str(reason))

    def _write_privacy(self, trained: Trained) -> None:
        """Write the privacy statement, `privacy.json`."""
        from fedtail.privacy.statement import statement

        write_json(self.folder / "privacy.json", statement(self.ledger, self.done(trained)))

    def _write_clients(self, trained: Trained, evaluations: list[SplitEvaluations]) -> list[dict[str, Any]] | None:
        """The table over clients; returns what fine-tuning changed, where the experiment has it."""
        tuned, (rows, population) = None, (client_rows(evaluations, self.splits), self.splits[self.tested])
        if self.tail:
            add_participation(rows, self.folder / "rounds.jsonl")
        if self.experiment.family is not None:
            add_picks(rows, trained, self.tested, population)
        if self.experiment.evaluate.finetune is not None:
            tuned = add_finetuned(rows, trained, self.tested, population, self.experiment.evaluate.finetune,
                                  **self.experiment.evaluating)
        write_clients(self.folder / "clients.parquet", rows, self.experiment.name)
        return tuned


def module_bytes(module: nn.Module) -> bytes:
    """A module's parameters and buffers as safetensors, each a tensor of its own (tied ones twice)."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                 for name, tensor in module.state_dict().items()})


def digest_of(content: bytes) -> str:
    """A digest of the contents of a file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def versions() -> dict[str, str]:
    """The versions of the packages that decide about bits."""
    return {"fedtail": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def _refuse_changed(run: RunFolder, name: str, now: Any, what: str) -> None:
    """Refuse to go on where something is not what the run began with."""
    if run.about[name] != now:
        raise RunRefused(f"{what} not what {run.path} began with. Undo the change, or start again in another folder with --out.")


@contextmanager
def warnings_to(note: Callable[[str], None]) -> Iterator[None]:
    """Warnings go to the log and to the terminal, once each."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            note(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
