"""Run an experiment in a folder, so that it can be killed at any moment and go on as if it had not been."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fedtail.errors import FieldError
from fedtail.experiment.experiment import Experiment
from fedtail.experiment.values import NONE
from fedtail.fleet import Fleet
from fedtail.privacy.events import NonPrivateRelease
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.ledger_file import LedgerFile, LedgerMark
from fedtail.reading import check_plain_name
from fedtail.runs.checkpoint import MEMORY, Checkpoint, Checkpoints
from fedtail.runs.files import RunError, RunRefused, digest_of, only_writer, plain, refuse_strangers
from fedtail.runs.measurements import Populations
from fedtail.runs.recording import Recorder, Watch, versions, warnings_to
from fedtail.runs.run_folder import LEDGER, RunFolder
from fedtail.runs.simulation_records import SimulationRecords, with_first_module
from fedtail.task import Task
from fedtail.training import Trained, check_run
from fedtail.training import resume as train_on


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
        checkpoint, problems = earlier_checkpoint(checkpoints, table, resume)
        if is_whole(folder):
            watch.note(f"{folder} is finished; nothing to do.")
            return RunFolder.open(folder)
        splits, task = load() if load else experiment.data.load(seed), experiment.task.make(seed)
        if checkpoint is not None:
            task = with_first_module(task, folder)
        with deterministic(experiment.device), ready(experiment, task, splits, folder / MEMORY) as fleet:
            ledger = Ledger(experiment.privacy, folder / LEDGER, unrecorded=experiment.privacy.randomness)
            tail = experiment.evaluate.tail and ledger.budget.replayable      # cohorts of the operating system are kept nowhere
            records = SimulationRecords(experiment, folder, splits, task, tail)
            if checkpoint is not None:
                records.check(RunFolder.open(folder).about)
            with (Recorder(experiment, seed, folder, records, watch, ledger, checkpoints) as recorder,
                  warnings_to(recorder.note), _failures_logged(recorder)):
                start = recorder.open(task, table, checkpoint)
                for problem in problems:
                    recorder.note(problem)
                _go_on(experiment, start, recorder, fleet)
    return RunFolder.open(folder)


def _go_on(experiment: Experiment, start: Trained, recorder: Recorder, fleet: Fleet) -> None:
    """Train the rounds that are missing; raises `Interrupted` where training was stopped before the last."""
    trained = train_on(start, rounds=experiment.rounds - start.rounds, channel=experiment.channel, fleet=fleet,
                       on_round=recorder.after_round, privacy=recorder.ledger)
    if trained.rounds < experiment.rounds and not trained.stopped:
        raise Interrupted(recorder.folder, trained.rounds, experiment.rounds)
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
        result = RunFolder.open(folder).result
        mark = result.get("ledger")
        if mark and not LedgerFile(folder / LEDGER).agrees(LedgerMark(*mark)):
            return False
        return all((folder / check_plain_name(name, "result.json")).is_file()
                   and digest_of((folder / name).read_bytes()) == digest for name, digest in result["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def ready(experiment: Experiment, task: Task, splits: Populations, memory: Path | None = None) -> Iterator[Fleet]:
    """Who trains, once whatever training or evaluation would refuse has been refused: nothing is written before."""
    with ExitStack() as stack:
        with _errors_name_their_line(experiment):
            fleet = stack.enter_context(experiment.fleet(task, splits["train"], memory))
            check_run(experiment.algorithm, task, fleet, experiment.channel, Ledger(experiment.privacy), experiment.rounds)
            check_privacy(experiment, task, splits)
            for population in splits.values():
                task.check(population)
        yield fleet


@contextmanager
def _errors_name_their_line(experiment: Experiment) -> Iterator[None]:
    """A ValueError or TypeError raised within is raised again with the line of the experiment file that it is about.

    Warnings are silenced within: the run itself shows them when it begins.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError) as reason:
        raise experiment.source.refuse(_key_of(reason, experiment.table()), reason) from reason


def refuse_early(experiment: Experiment, seed: int, splits: Populations) -> None:
    """Whatever training or evaluation would refuse, before anything is written."""
    with ready(experiment, experiment.task.make(seed), splits):
        pass


def check_privacy(experiment: Experiment, task: Task, splits: Populations) -> None:
    """Refuse noise without a delta to state its guarantee at."""
    releases = experiment.algorithm.releases(len(task.params()))
    noisy = not any(isinstance(release, NonPrivateRelease) for release in releases)
    if noisy and experiment.privacy.delta is None:
        raise ValueError("this run is private, but at which delta? Write [privacy] and below it delta = "
                         f"{0.1 / len(splits['train']):.1g}, say: below one over the number of clients.")


def _key_of(reason: Exception, table: dict[str, Any]) -> tuple[str, ...]:
    """The key of an experiment that an error is about: that of its field, or of a plain error what its words name."""
    keys = [(section, key) for section, inner in table.items() if isinstance(inner, dict) and section != "data"
            for key in inner if key != "part"]
    if isinstance(reason, FieldError):
        return next((pair for pair in keys if pair[1] == reason.field), ("task", "module"))
    named = [pair for pair in keys if re.search(rf"\b{re.escape(pair[1])}\b", str(reason))]
    return named[0] if named else ("task", "module") if re.search("output|module|label|shape", str(reason)) else ("risk",)


def earlier_checkpoint(checkpoints: Checkpoints, table: dict[str, Any], resume: bool, go_on: str = "--resume",
                       elsewhere: str = "--out") -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from; refused where the folder holds a run and `resume` is False, or another experiment."""
    folder = checkpoints.folder
    if not (folder / "run.json").is_file():
        return None, []
    run = RunFolder.open(folder, also_deployed=True)
    about = run.about
    changed = list(_differences(_portable(about["experiment"]), _portable(plain(table))))
    checkpoint, problems = checkpoints.load()
    if not resume:
        round = checkpoint.round if checkpoint else 0
        raise RunRefused(f"{folder} holds a run that has done {round} of {about['rounds']} rounds. Go on with {go_on}, or "
                         f"choose another folder with {elsewhere}.")
    if checkpoint is None and any(line["round"] for line in run.metrics):
        raise RunError(f"the checkpoints of {folder} are gone, though its metrics are there. Start again in another folder.")
    if changed:
        raise RunRefused(f"the experiment is not the one {folder} began with: {'; '.join(changed[:5])}. Undo the change, or "
                         f"start again in another folder with {elsewhere}.")
    if about["versions"] != versions():
        problems.append(f"the run began with {about['versions']}, and goes on with {versions()}: the bits may differ")
    return checkpoint, problems


def _portable(table: dict[str, Any]) -> dict[str, Any]:
    """An experiment without the places of its files, whose contents are compared by digests, and what changes no bit of it."""
    data = {key: value for key, value in table.get("data", {}).items() if key not in ("path", "test_path", "dataset")}
    engine = {key: value for key, value in table.get("engine", {}).items() if key not in ("workers", "address")}
    return {**{key: value for key, value in table.items() if key != "folder"}, "data": data, "engine": engine}


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`risk.tail_fraction was 0.5, is 0.3`, for everything that changed; a field that came later and is not used is no change."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and (old, new) != (None, NONE):
        yield f"{key} is new" if old is None else f"{key} is gone" if new is None else f"{key} was {old!r}, is {new!r}"
