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
from fedtail.runs.files import RunError, RunRefused, digest_of, json_values, only_writer, refuse_foreign_folder
from fedtail.runs.measurements import Populations
from fedtail.runs.recording import Recorder, Watch, package_versions, redirect_warnings
from fedtail.runs.run_folder import LEDGER, RunFolder
from fedtail.runs.simulation_records import SimulationRecords, load_initial_module
from fedtail.task import Task
from fedtail.training import Trained, check_run
from fedtail.training import resume as train_on


class Interrupted(Exception):
    """A run that was stopped: it finished its round and saved."""

    def __init__(self, folder: Path, round: int, rounds: int):
        """`round` of `rounds` is the last that was trained; `folder` is where the run can be resumed."""
        super().__init__(f"stopped after round {round} of {rounds}; everything is saved in {folder}")


def run(experiment: Experiment, seed: int, folder: str | Path, watch: Watch, resume: bool = False,
        load: Callable[[], Populations] | None = None) -> RunFolder:
    """Run an experiment with one seed in a folder of its own; with `resume`, go on from its last checkpoint if there is one.

    The result is the same to the bit whether or not it was interrupted, on one machine and device. Everything that could be
    mixed is refused (RunRefused): a folder with another run, an experiment or data that changed in between, a second writer.
    `load` gives the data where they are shared with other runs. A run that is finished is returned as it is. Raises
    Interrupted where `watch` stopped it, and RunError where it failed.
    """
    folder = Path(folder)
    refuse_foreign_folder(folder, {"run.json"})
    with only_writer(folder):
        table, checkpoints = experiment.table(seed), Checkpoints(folder)
        checkpoint, problems = earlier_checkpoint(checkpoints, table, resume)
        if is_finished_and_whole(folder):
            watch.note(f"{folder} is finished; nothing to do.")
            return RunFolder.open(folder)
        splits, task = load() if load else experiment.data.load(seed), experiment.task.make(seed)
        if checkpoint is not None:
            task = load_initial_module(task, folder)
        with use_deterministic_algorithms(experiment.device), checked_fleet(experiment, task, splits, folder / MEMORY) as fleet:
            ledger = Ledger(experiment.privacy, folder / LEDGER, unrecorded=experiment.privacy.randomness)
            tail = experiment.evaluate.tail and ledger.budget.replayable      # cohorts of the operating system are kept nowhere
            records = SimulationRecords(experiment, folder, splits, task, tail)
            if checkpoint is not None:
                records.check(RunFolder.open(folder).about)
            with (Recorder(experiment, seed, folder, records, watch, ledger, checkpoints) as recorder,
                  redirect_warnings(recorder.note), _log_failures(recorder)):
                start = recorder.open(task, table, checkpoint)
                for problem in problems:
                    recorder.note(problem)
                _train_missing_rounds(experiment, start, recorder, fleet)
    return RunFolder.open(folder)


def _train_missing_rounds(experiment: Experiment, start: Trained, recorder: Recorder, fleet: Fleet) -> None:
    """Train from `start` to the last round and write the results; raises Interrupted where training was stopped before."""
    trained = train_on(start, rounds=experiment.rounds - start.rounds, channel=experiment.channel, fleet=fleet,
                       on_round=recorder.after_round, privacy=recorder.ledger)
    if trained.rounds < experiment.rounds and not trained.stopped:
        raise Interrupted(recorder.folder, trained.rounds, experiment.rounds)
    recorder.finish(trained)


@contextmanager
def _log_failures(recorder: Recorder) -> Iterator[None]:
    """Within the block, an error other than Interrupted and RunError is logged and raised again as a RunError.

    So what fails in the middle, in a user's loss or on a device, leaves its traceback in `log.txt`.
    """
    try:
        yield
    except (Interrupted, RunError):
        raise
    except Exception as reason:
        recorder.log(traceback.format_exc())
        raise RunError(f"the run failed: {type(reason).__name__}: {reason} (the trace is in {recorder.folder / 'log.txt'}). "
                       "--resume goes on from its last checkpoint.") from reason


@contextmanager
def use_deterministic_algorithms(device: str) -> Iterator[None]:
    """Within the block, choose operations on a GPU that give the same bits every time, and warn where there is none.

    Nothing changes for other devices. Torch's setting is restored afterwards.
    """
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


def holds_run_of(experiment: Experiment, seed: int, folder: Path) -> bool:
    """Whether a folder holds a run, finished or not, of this experiment with this seed; places of data files may differ."""
    if not (folder / "run.json").is_file():
        return False
    old, new = RunFolder.open(folder).about["experiment"], json_values(experiment.table(seed))
    return not list(_changed_settings(_comparable_table(old), _comparable_table(new)))


def is_finished_and_whole(folder: Path) -> bool:
    """Whether a run is finished and its ledger and files match the digests in `result.json`; False where one is damaged."""
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
def checked_fleet(experiment: Experiment, task: Task, splits: Populations, memory: Path | None = None) -> Iterator[Fleet]:
    """Yield the fleet of clients that train, after whatever training or evaluation would refuse has been refused.

    Nothing is written before. `memory` is the folder for what clients remember, None for a temporary one. Errors name the
    line of the experiment file that they are about.
    """
    with ExitStack() as stack:
        with _add_line_to_errors(experiment):
            fleet = stack.enter_context(experiment.fleet(task, splits["train"], memory))
            check_run(experiment.algorithm, task, fleet, experiment.channel, Ledger(experiment.privacy), experiment.rounds)
            check_privacy(experiment, task, splits)
            for population in splits.values():
                task.check(population)
        yield fleet


@contextmanager
def _add_line_to_errors(experiment: Experiment) -> Iterator[None]:
    """Within the block, a ValueError or TypeError is raised again with the line of the experiment file that it is about.

    Warnings are silenced: the run itself shows them when it begins.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError) as reason:
        raise experiment.source.refuse(_key_of_error(reason, experiment.table()), reason) from reason


def check_before_writing(experiment: Experiment, seed: int, splits: Populations) -> None:
    """Raise what training or evaluation would refuse, with the line of the experiment file; nothing is written or trained."""
    with checked_fleet(experiment, experiment.task.make(seed), splits):
        pass


def check_privacy(experiment: Experiment, task: Task, splits: Populations) -> None:
    """Refuse (ValueError) an experiment whose releases are all noisy and that has no delta to state its guarantee at."""
    releases = experiment.algorithm.releases(len(task.params()))
    noisy = not any(isinstance(release, NonPrivateRelease) for release in releases)
    if noisy and experiment.privacy.delta is None:
        raise ValueError("this run is private, but at which delta? Write [privacy] and below it delta = "
                         f"{0.1 / len(splits['train']):.1g}, say: below one over the number of clients.")


def _key_of_error(reason: Exception, table: dict[str, Any]) -> tuple[str, ...]:
    """The (section, key) of an experiment that an error is about.

    For a FieldError that of its field; else the first key that its words name, or ("task", "module") or ("risk",) as a guess.
    """
    keys = [(section, key) for section, inner in table.items() if isinstance(inner, dict) and section != "data"
            for key in inner if key != "part"]
    if isinstance(reason, FieldError):
        return next((pair for pair in keys if pair[1] == reason.field), ("task", "module"))
    named = [pair for pair in keys if re.search(rf"\b{re.escape(pair[1])}\b", str(reason))]
    return named[0] if named else ("task", "module") if re.search("output|module|label|shape", str(reason)) else ("risk",)


def earlier_checkpoint(checkpoints: Checkpoints, table: dict[str, Any], resume: bool, go_on: str = "--resume",
                       elsewhere: str = "--out") -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, None where there is none, and sentences about damaged ones or changed versions.

    Raises RunRefused where the folder holds a run and `resume` is False, or another experiment; raises RunError where the
    checkpoints are gone. `go_on` and `elsewhere` are the options that these texts name.
    """
    folder = checkpoints.folder
    if not (folder / "run.json").is_file():
        return None, []
    run = RunFolder.open(folder, also_deployed=True)
    about = run.about
    changed = list(_changed_settings(_comparable_table(about["experiment"]), _comparable_table(json_values(table))))
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
    if about["versions"] != package_versions():
        problems.append(f"the run began with {about['versions']}, and goes on with {package_versions()}: the bits may differ")
    return checkpoint, problems


def _comparable_table(table: dict[str, Any]) -> dict[str, Any]:
    """An experiment's table without what may differ between runs of it: places of files, and settings that change no bit.

    The contents of the files are compared by digests elsewhere.
    """
    data = {key: value for key, value in table.get("data", {}).items() if key not in ("path", "test_path", "dataset")}
    engine = {key: value for key, value in table.get("engine", {}).items() if key not in ("workers", "address")}
    return {**{key: value for key, value in table.items() if key != "folder"}, "data": data, "engine": engine}


def _changed_settings(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """A sentence for every setting that changed, such as `risk.tail_fraction was 0.5, is 0.3`.

    `key` is the path to the tables. A field that came with a later version and is not used is no change.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _changed_settings(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and (old, new) != (None, NONE):
        yield f"{key} is new" if old is None else f"{key} is gone" if new is None else f"{key} was {old!r}, is {new!r}"
