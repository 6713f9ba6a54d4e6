"""Run an experiment in a folder, so that it can be killed at any moment and go on as if it had not been."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedtail.algorithm import planned_round
from fedtail.errors import FieldError
from fedtail.experiment.experiment import Experiment
from fedtail.experiment.values import NONE
from fedtail.privacy.events import NonPrivateRelease
from fedtail.privacy.ledger import Ledger
from fedtail.runs.checkpoint import MEMORY, Checkpoint, Checkpoints
from fedtail.runs.files import RunError, RunRefused, only_writer, plain, refuse_strangers
from fedtail.runs.measurements import Populations
from fedtail.runs.recording import Recorder, Watch, digest_of, versions, warnings_to
from fedtail.runs.run_folder import LEDGER, RunFolder
from fedtail.task import Task
from fedtail.training import Trained, check_budget, train


class Interrupted(Exception):
    """A run that was stopped: it finished its round and saved."""

    def __init__(self, folder: Path, round: int, rounds: int):
        super().__init__(f"stopped after round {round} of {rounds}; everything is saved in {folder}")


def run(experiment: Experiment, seed: int, folder: str | Path, watch: Watch, resume: bool = False,
        load: Callable[[], Populations] | None = None) -> RunFolder:
    """Run an experiment with one seed in a folder of its own; with `resume`, go on from its last checkpoint if there is one.

    The result is the same to the bit whether or not it was interrupted, on one machine and device. Everything that could be
    mixed is refused: a folder with another run, an experiment or data that changed in between, a second writer. `load` gives
    the data where they are shared with other runs.
    """
    folder = Path(folder)
    refuse_strangers(folder, {"run.json"})
    with only_writer(folder):
        table, checkpoints = experiment.table(seed), Checkpoints(folder)
        checkpoint, problems = _earlier(checkpoints, table, resume)
        if is_whole(folder):
            watch.note(f"{folder} is finished; nothing to do.")
            return RunFolder.open(folder)
        splits = load() if load else experiment.data.load(seed)
        task = refuse_early(experiment, seed, splits)
        ledger = Ledger(experiment.privacy, folder / LEDGER)
        with (deterministic(experiment.device),
              Recorder(experiment, seed, folder, splits, watch, checkpoints, ledger) as recorder,
              warnings_to(recorder.note), _failures_logged(recorder)):
            start = recorder.open(task, table, checkpoint)
            for problem in problems:
                recorder.note(problem)
            _go_on(experiment, start, recorder)
    return RunFolder.open(folder)


def _go_on(experiment: Experiment, start: Trained, recorder: Recorder) -> None:
    """Train the rounds that are missing; raises `Interrupted` where training was stopped before the last."""
    people = recorder.splits["train"]
    with experiment.fleet(start.task, people, recorder.folder / MEMORY) as fleet:
        trained = train(experiment.algorithm, start.task, people, rounds=experiment.rounds - recorder.done(start), start=start,
                        channel=experiment.channel, fleet=fleet, **experiment.computing, on_round=recorder.after_round,
                        privacy=recorder.ledger)
    if recorder.done(trained) < experiment.rounds and not trained.stopped:
        raise Interrupted(recorder.folder, recorder.done(trained), experiment.rounds)
    recorder.finish(trained)


@contextmanager
def _failures_logged(recorder: Recorder) -> Iterator[None]:
    """What fails in the middle, in a user's loss or on a device, leaves its trace in the log."""
    try:
        yield
    except (Interrupted, RunError):
        raise
    except Exception as reason:
        recorder.log(traceback.format_exc())
        raise RunError(f"the run failed: {type(reason).__name__}: {reason} (the trace is in {recorder.folder / 'log.txt'}). "
                       "--resume goes on from its last checkpoint.") from reason


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """On a GPU, choose operations that give the same bits every time, and warn where there is none."""
    if not device.startswith("cuda"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def begun_by(experiment: Experiment, seed: int, folder: Path) -> bool:
    """Whether a folder holds a run of this experiment with this seed."""
    if not (folder / "run.json").is_file():
        return False
    return not list(_differences(_portable(RunFolder.open(folder).about["experiment"]), _portable(plain(experiment.table(seed)))))


def is_whole(folder: Path) -> bool:
    """Whether a run is finished and everything it left is as it was written."""
    try:
        files = RunFolder.open(folder).result["files"]
        return all(digest_of((folder / name).read_bytes()) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def refuse_early(experiment: Experiment, seed: int, splits: Populations) -> Task:
    """Whatever training or evaluation would refuse, before anything is written; returns the task."""
    task = experiment.task.make(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")             # they are shown when the run begins
            with experiment.fleet(task, splits["train"]) as fleet:
                train(experiment.algorithm, task, splits["train"], rounds=0, channel=experiment.channel, fleet=fleet,
                      **experiment.computing, privacy=experiment.privacy)
            check_privacy(experiment, task, splits)
        for population in splits.values():
            task.check(population)
    except (ValueError, TypeError) as reason:
        raise experiment.source.refuse(_key_of(reason, experiment.table()), reason) from reason
    return task


def check_privacy(experiment: Experiment, task: Task, splits: Populations) -> None:
    """Refuse a budget that does not last a round, and noise without a delta to state its guarantee at."""
    planned = planned_round(experiment.algorithm, splits["train"], experiment.channel, len(task.params()))
    if experiment.privacy.epsilon is not None:
        check_budget(Ledger(experiment.privacy), planned, experiment.rounds)
    noisy = not any(isinstance(release, NonPrivateRelease) for release in planned.releases)
    if noisy and experiment.privacy.delta is None:
        raise ValueError("this run is private, but at which delta? Write [privacy] and below it delta = "
                         f"{0.1 / len(splits['train']):.1g}, say: below one over the number of clients.")


def _key_of(reason: Exception, table: dict[str, Any]) -> tuple[str, ...]:
    """The key of an experiment that an error is about: that of its field, or of a plain error what its words name."""
    keys = [(section, key) for section, inner in table.items() if isinstance(inner, dict) and section != "data"
            for key in inner if key != "part"]
    if isinstance(reason, FieldError):
        return next((pair for pair in keys if pair[1] == reason.field), ("task", "module"))
    named = [pair for pair in keys if re.search(rf"\b{pair[1]}\b", str(reason))]
    return named[0] if named else ("task", "module") if re.search("output|module|label|shape", str(reason)) else ("risk",)


def _earlier(checkpoints: Checkpoints, table: dict[str, Any], resume: bool) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from; refused where the folder holds a run and `resume` is False, or another experiment."""
    folder = checkpoints.folder
    if not (folder / "run.json").is_file():
        return None, []
    about = RunFolder.open(folder).about
    changed = list(_differences(_portable(about["experiment"]), _portable(plain(table))))
    checkpoint, problems = checkpoints.load()
    if not resume:
        round = checkpoint.round if checkpoint else 0
        raise RunRefused(f"{folder} holds a run that has done {round} of {about['rounds']} rounds. Go on with --resume, or "
                         "choose another folder with --out.")
    if checkpoint is None and any(line["round"] for line in RunFolder.open(folder).metrics):
        raise RunError(f"the checkpoints of {folder} are gone, though its metrics are there. Start again in another folder.")
    if changed:
        raise RunRefused(f"the experiment is not the one {folder} began with: {'; '.join(changed[:5])}. Undo the change, or "
                         "start again in another folder with --out.")
    if about["versions"] != versions():
        problems.append(f"the run began with {about['versions']}, and goes on with {versions()}: the bits may differ")
    return checkpoint, problems


def _portable(table: dict[str, Any]) -> dict[str, Any]:
    """An experiment without the places of its files, whose contents are compared by digests, and what changes no bit of it."""
    data = {key: value for key, value in table["data"].items() if key not in ("path", "test_path", "dataset")}
    engine = {key: value for key, value in table.get("engine", {}).items() if key not in ("workers", "address")}
    return {**{key: value for key, value in table.items() if key != "folder"}, "data": data, "engine": engine}


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`risk.tail_fraction was 0.5, is 0.3`, for everything that changed; a field that came later and is not used is no change."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and (old, new) != (None, NONE):
        yield f"{key} is new" if old is None else f"{key} is gone" if new is None else f"{key} was {old!r}, is {new!r}"
