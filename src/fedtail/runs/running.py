"""Run an experiment in a folder, so that it can be killed at any moment and go on as if it had not been."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedtail.experiment.experiment import Experiment
from fedtail.runs.checkpoint import Checkpoint, Checkpoints
from fedtail.runs.files import RunError, only_writer, plain
from fedtail.runs.looking import Splits
from fedtail.runs.reading import RunFolder
from fedtail.runs.recording import Recorder, Watch, versions, warnings_to
from fedtail.task import Task
from fedtail.training import Trained, train


class Interrupted(Exception):
    """The run was asked to stop: it finished its round and saved."""

    def __init__(self, folder: Path, round: int, rounds: int):
        super().__init__(f"stopped after round {round} of {rounds}; everything is saved in {folder}")


def run(experiment: Experiment, seed: int, folder: str | Path, watch: Watch, resume: bool = False,
        load: Callable[[], Splits] | None = None) -> RunFolder:
    """Run an experiment with one seed in a folder of its own; with `resume`, go on from its last checkpoint if there is one.

    The result is the same to the bit whether or not it was interrupted, on one machine and device. Everything that could be
    mixed is refused: a folder with another run, an experiment or data that changed in between, a second writer. `load` gives
    the data where they are shared with other runs.
    """
    folder = Path(folder)
    _refuse_strangers(folder)
    with only_writer(folder):
        table, checkpoints = experiment.table(seed), Checkpoints(folder)
        checkpoint, problems = _earlier(checkpoints, table, resume)
        if (folder / "result.json").is_file():
            watch.note(f"{folder} is finished; nothing to do.")
            return RunFolder.open(folder)
        splits, task = load() if load else experiment.data.load(seed), experiment.task.make(seed)
        _refuse_early(experiment, task, splits)
        with (deterministic(experiment.device), Recorder(experiment, seed, folder, splits, watch, checkpoints) as recorder,
              warnings_to(recorder.note), _failures_logged(recorder)):
            start = recorder.open(task, table, checkpoint)
            for problem in problems:
                recorder.note(problem)
            _go_on(experiment, start, recorder)
    return RunFolder.open(folder)


def _go_on(experiment: Experiment, start: Trained, recorder: Recorder) -> None:
    trained = train(experiment.algorithm, start.task, recorder.splits["train"], rounds=experiment.rounds - recorder.done(start),
                    start=start, device=experiment.device, channel=experiment.channel, on_round=recorder.after_round)
    if recorder.done(trained) < experiment.rounds:
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


def _refuse_early(experiment: Experiment, task: Task, splits: Splits) -> None:
    """Whatever training or evaluation would refuse, before anything is written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # they are told when the run begins
        train(experiment.algorithm, task, splits["train"], rounds=0, device=experiment.device, channel=experiment.channel)
    for people in splits.values():
        task.check(people)


def _refuse_strangers(folder: Path) -> None:
    """A folder that holds anything but a run is not written to."""
    there = {path.name for path in folder.iterdir()} - {".lock", ".run.json.writing"} if folder.is_dir() else set()
    if there and "run.json" not in there:
        raise RunError(f"{folder} holds other things ({', '.join(sorted(there)[:3])}). Choose an empty or new folder with --out.")


def _earlier(checkpoints: Checkpoints, table: dict[str, Any], resume: bool) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from; refused where the folder holds a run and nobody said --resume, or another experiment."""
    folder = checkpoints.folder
    if not (folder / "run.json").is_file():
        return None, []
    about = RunFolder.open(folder).about
    changed = list(_differences(about["experiment"], plain(table)))
    checkpoint, problems = checkpoints.load()
    if not resume:
        round = checkpoint.round if checkpoint else 0
        raise RunError(f"{folder} holds a run that has done {round} of {about['rounds']} rounds. Go on with --resume, or choose "
                       "another folder with --out.")
    if checkpoint is None and any(line["round"] for line in RunFolder.open(folder).metrics):
        raise RunError(f"the checkpoints of {folder} are gone, though its metrics are there. Start again in another folder.")
    if changed:
        raise RunError(f"the experiment is not the one {folder} began with: {'; '.join(changed[:5])}. Undo the change, or start "
                       "again in another folder with --out.")
    if about["versions"] != versions():
        problems.append(f"the run began with {about['versions']}, and goes on with {versions()}: the bits may differ")
    return checkpoint, problems


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`risk.tail_fraction was 0.5, is 0.3`, for everything that changed."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key} is new" if old is None else f"{key} is gone" if new is None else f"{key} was {old!r}, is {new!r}"
