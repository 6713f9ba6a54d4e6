"""Run an experiment in a folder, so that it can be killed at any moment and go on as if it had not been."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from fedtail.reading import checked_file_name
from fedtail.runs.checkpoint import MEMORY, Checkpoint, Checkpoints
from fedtail.runs.files import RunError, RunRefused, bytes_digest, hold_folder_lock, refuse_foreign_folder, to_json_values
from fedtail.runs.logs import check_loggers
from fedtail.runs.measurements import Populations
from fedtail.runs.recording import Recorder, Watch, package_versions, redirect_warnings
from fedtail.runs.run_folder import LEDGER, RunFolder
from fedtail.runs.simulation_records import SimulationRecords, load_initial_module
from fedtail.task import Task
from fedtail.training import InterruptedWarning, Trained, check_run
from fedtail.training import resume as train_on


class Interrupted(Exception):
    """Raised where a run's `Watch` asked it to stop: the current round was finished and a checkpoint saved."""

    def __init__(self, folder: Path, round: int, rounds: int):
        """Build the message: `round` of `rounds` was the last one trained, and the run can be resumed in `folder`."""
        super().__init__(f"stopped after round {round} of {rounds}; everything is saved in {folder}")


def run(experiment: Experiment, seed: int, folder: str | Path, watch: Watch, resume: bool = False,
        load: Callable[[], Populations] | None = None) -> RunFolder:
    """Run an experiment with one seed in a folder of its own, and return that folder, opened for reading.

    With `resume`, go on from the last checkpoint in the folder if there is one; a run that is finished and undamaged is
    returned unchanged, unless the experiment now has more rounds: it goes on with those. On one machine and device, a resumed
    run gives the same bits as an uninterrupted one, unless noise comes from the operating system. `load` returns the populations
    by split, for data shared between runs; without it `experiment.data` is loaded.

    Raises RunRefused for a folder with other files, a run in it without `resume`, an experiment, data or user code that
    changed since it began, or a second writer; ExperimentError where the experiment cannot be trained on these data;
    Interrupted where `watch` stopped the run; RunError where it failed.
    """
    folder = Path(folder)
    refuse_foreign_folder(folder, {"run.json"})
    experiment = evaluated_as_before(experiment, folder) if resume else experiment
    with hold_folder_lock(folder):
        table, checkpoints = experiment.as_table(seed), Checkpoints(folder)
        checkpoint, problems = checkpoint_to_resume(checkpoints, table, resume, longer=True)
        if is_run_finished_and_intact(folder) and RunFolder.open(folder).about["rounds"] >= experiment.rounds:
            finished = RunFolder.open(folder)
            early = f" It ended early: {finished.result['stopped']}." if finished.result.get("stopped") else ""
            watch.note(f"{folder} is finished; nothing to do.{early}")
            return finished
        splits, task = load() if load else experiment.data.load(seed), experiment.task.make(seed)
        if checkpoint is not None:
            experiment = computed_as_before(experiment, folder)
            task = load_initial_module(task, folder)
        with (use_deterministic_algorithms(experiment.device),
              checked_fleet(experiment, task, splits, folder / MEMORY, seed) as fleet):
            ledger = Ledger(experiment.privacy, folder / LEDGER, unrecorded=experiment.privacy.randomness)
            tail = experiment.evaluate.tail and ledger.budget.replayable      # cohorts of the operating system are kept nowhere
            records = SimulationRecords(experiment, folder, splits, task, tail, experiment.attack_for_seed(seed))
            if checkpoint is not None:
                records.check_unchanged(RunFolder.open(folder).about)
            with (Recorder(experiment, seed, folder, records, watch, ledger, checkpoints) as recorder,
                  redirect_warnings(recorder.note), _log_failures(recorder)):
                start = recorder.start_or_resume(task, table, checkpoint)
                for text in (*problems, *records.notes):
                    recorder.note(text)
                _train_missing_rounds(experiment, start, recorder, fleet)
    return RunFolder.open(folder)


def _train_missing_rounds(experiment: Experiment, start: Trained, recorder: Recorder, fleet: Fleet) -> None:
    """Train on `fleet` from `start` to the experiment's last round, record every round, then write the models and results.

    Raises Interrupted, without writing results, where the recorder's watch or a Ctrl-C stopped training early. A run that ended
    early because its privacy budget was spent, or because its models got no better, is finished: its results are written.
    """
    rounds = 0 if recorder.stopped else experiment.rounds - start.rounds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InterruptedWarning)      # Interrupted says so
        trained = train_on(start, rounds=rounds, channel=experiment.channel, fleet=fleet, on_round=recorder.record_round,
                           privacy=recorder.ledger, progress=False)
    if trained.interrupted:
        recorder.save_interrupted(trained)
    if trained.rounds < experiment.rounds and not (trained.stopped or recorder.stopped):
        raise Interrupted(recorder.folder, trained.rounds, experiment.rounds)
    recorder.write_results(trained)


@contextmanager
def _log_failures(recorder: Recorder) -> Iterator[None]:
    """Within the block, log any Exception except Interrupted and RunError to `log.txt`, then raise it again as a RunError.

    The log has the full traceback, so that a failure in a user's loss or on a device can be found later. `recorder` is that of
    the run.
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
    """Within the block, PyTorch uses deterministic operations on a CUDA device, and warns where an operation has none.

    Does nothing for other devices. Whether PyTorch is deterministic is restored afterwards; the environment variable
    CUBLAS_WORKSPACE_CONFIG, which is set where it was not, stays set.
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


def folder_holds_run(experiment: Experiment, seed: int, folder: Path, shorter: bool = False) -> bool:
    """Whether `folder` holds a run, finished or not, of this experiment with this seed.

    Paths of data files, the number and address of worker processes, and where it is logged may differ. With `shorter`, the run
    may have fewer rounds than the experiment, with which it can go on. Raises ValueError where `run.json` is damaged.
    """
    if not (folder / "run.json").is_file():
        return False
    old = RunFolder.open(folder).about["experiment"]
    new = to_json_values(evaluated_as_before(experiment, folder).as_table(seed))
    return not list(_changes_of_experiment(old, new, shorter))


def evaluated_as_before(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment, evaluated as often as the run in `folder` where it does not say how often itself.

    By default that is a twentieth of all rounds, which would change when a run goes on with more rounds. Without a run in the
    folder it is the experiment as it is.
    """
    if experiment.evaluate.every is not None or not (folder / "run.json").is_file():
        return experiment
    every = RunFolder.open(folder, also_deployed=True).about["experiment"].get("evaluate", {}).get("every")
    return replace(experiment, evaluate=replace(experiment.evaluate, every=every)) if every else experiment


def computed_as_before(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with the kernel that the run in `folder` began with, where it leaves the choice to the package.

    So a run goes on to the same bits also where a later version would choose another kernel.
    """
    kernel = RunFolder.open(folder).about.get("kernel")
    if experiment.engine.kernel != "auto" or kernel is None:
        return experiment
    return replace(experiment, engine=replace(experiment.engine, kernel=kernel))


def is_run_finished_and_intact(folder: Path) -> bool:
    """Whether the run in `folder` is finished, and its ledger and files match the digests in `result.json`.

    False where there is no finished run, or where one of these files is missing, unreadable or changed.
    """
    try:
        result = RunFolder.open(folder).result
        mark = result.get("ledger")
        if mark and not LedgerFile(folder / LEDGER).matches_mark(LedgerMark(*mark)):
            return False
        return all((folder / checked_file_name(name, "result.json")).is_file()
                   and bytes_digest((folder / name).read_bytes()) == digest for name, digest in result["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def checked_fleet(experiment: Experiment, task: Task, splits: Populations, memory: Path | None = None,
                  seed: int = 0) -> Iterator[Fleet]:
    """Check that an experiment can be trained and evaluated on `splits`, then yield the fleet of its training clients.

    Nothing is trained or recorded by the checks. `memory` is the folder for the clients' memory, None for a temporary one, and
    `seed` that of the run.
    Raises ExperimentError, with the line of the experiment file, where the algorithm, task, data, channel or privacy settings
    do not fit together, and where the client of a logger is not installed. The fleet is closed after the block.
    """
    check_loggers(experiment)
    with ExitStack() as stack:
        with _add_line_to_errors(experiment):
            fleet = stack.enter_context(experiment.fleet(task, splits["train"], memory, seed))
            check_run(experiment.algorithm, task, fleet, experiment.channel, Ledger(experiment.privacy), experiment.rounds)
            check_delta_is_given(experiment, task, splits)
            for population in splits.values():
                task.check(population)
        yield fleet


@contextmanager
def _add_line_to_errors(experiment: Experiment) -> Iterator[None]:
    """Within the block, turn a ValueError or TypeError into an ExperimentError that names the line of the experiment file.

    Warnings within the block are silenced: the run itself shows them when it begins.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError) as reason:
        raise experiment.source.error_at(_key_of_error(reason, experiment.as_table()), reason) from reason


def check_experiment_can_run(experiment: Experiment, seed: int, splits: Populations) -> None:
    """Raise the ExperimentError that `run` would raise for this experiment before its first round; nothing is trained or written.

    `splits` are the populations by split, and `seed` initialises the module.
    """
    with checked_fleet(experiment, experiment.task.make(seed), splits, seed=seed):
        pass


def check_delta_is_given(experiment: Experiment, task: Task, splits: Populations) -> None:
    """Raise ValueError where every release of the experiment is noisy but `[privacy]` gives no delta to state epsilon at.

    `task` gives the number of parameters. `splits` gives the number of training clients, for the delta that the text
    proposes.
    """
    releases = experiment.algorithm.releases(len(task.params()))
    noisy = not any(isinstance(release, NonPrivateRelease) for release in releases)
    if noisy and experiment.privacy.delta is None:
        raise ValueError("this run is private, but at which delta? Write [privacy] and below it delta = "
                         f"{0.1 / len(splits['train']):.1g}, say: below one over the number of clients.")


def _key_of_error(reason: Exception, table: dict[str, Any]) -> tuple[str, ...]:
    """The key (section, key) of an experiment that the error `reason` is most likely about, to find its line in the file.

    `table` is the experiment's table; section "data" is not considered. For a FieldError it is the first key of the field's name,
    else ("task", "module"). For other errors it is the first key that the message contains as a word; where there is none,
    ("task", "module") if the message is about outputs, modules, labels or shapes, else ("risk",).
    """
    keys = [(section, key) for section, inner in table.items() if isinstance(inner, dict) and section != "data"
            for key in inner if key != "part"]
    if isinstance(reason, FieldError):
        return next((pair for pair in keys if pair[1] == reason.field), ("task", "module"))
    named = [pair for pair in keys if re.search(rf"\b{re.escape(pair[1])}\b", str(reason))]
    return named[0] if named else ("task", "module") if re.search("output|module|label|shape", str(reason)) else ("risk",)


def checkpoint_to_resume(checkpoints: Checkpoints, table: dict[str, Any], resume: bool, go_on: str = "--resume",
                         elsewhere: str = "--out", longer: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, and sentences to show about damaged checkpoints or changed package versions.

    The checkpoint is None where the folder has no run, or a run without checkpoints and without trained rounds. `table` is
    the experiment now. Raises RunRefused where the folder holds a run and `resume` is False, or where its experiment differs
    from `table`, unless it has more rounds and `longer` is True. Raises RunError where checkpoints are missing though rounds are
    recorded, or where none can be read. `go_on` and `elsewhere` are the command-line options that the error texts name.
    """
    folder = checkpoints.folder
    if not (folder / "run.json").is_file():
        return None, []
    run = RunFolder.open(folder, also_deployed=True)
    about = run.about
    changed = list(_changes_of_experiment(about["experiment"], to_json_values(table), longer))
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


def _changes_of_experiment(old: dict[str, Any], new: dict[str, Any], longer: bool) -> Iterator[str]:
    """Yield a phrase for every setting of the table `old` that a run cannot go on with as it is in `new`.

    It can with more rounds where `longer` is True.
    """
    rounds = {"rounds": old["rounds"]} if longer and new["rounds"] > old.get("rounds", new["rounds"]) else {}
    return _changed_settings(_comparable_table(old), _comparable_table({**new, **rounds}))


def _comparable_table(table: dict[str, Any]) -> dict[str, Any]:
    """A copy of an experiment's table without the settings that may differ when its run is resumed.

    These are `folder`, `log`, the paths and name of the data (`path`, `test_path`, `dataset`), and the `workers` and `address`
    of the engine. That the data themselves are unchanged is checked by digests elsewhere.
    """
    data = {key: value for key, value in table.get("data", {}).items() if key not in ("path", "test_path", "dataset")}
    engine = {key: value for key, value in table.get("engine", {}).items() if key not in ("workers", "address")}
    return {**{key: value for key, value in table.items() if key not in ("folder", "log")}, "data": data, "engine": engine}


def _changed_settings(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield a phrase for every setting that differs between two tables, such as `risk.tail_fraction was 0.5, is 0.3`.

    `key` is the path to `old` and `new` within the whole tables, empty at the top. A key that is absent in `old` and is
    "none" or false in `new` (a field that a later version added, and that is not used) is no difference.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _changed_settings(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not (old is None and (new == NONE or new is False)):
        yield f"{key} is new" if old is None else f"{key} is gone" if new is None else f"{key} was {old!r}, is {new!r}"
