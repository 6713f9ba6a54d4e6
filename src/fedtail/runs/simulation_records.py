"""What a run in the simulator records: every split evaluated, every round, a table over clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedtail.engine.kernel_choice import kernel_for
from fedtail.evaluation.evaluate import gives_rates
from fedtail.experiment.data_sources import fingerprint
from fedtail.experiment.experiment import Experiment
from fedtail.runs.files import Lines, RunError, RunRefused, digest_of, module_bytes, write_whole
from fedtail.runs.measurements import (
    Populations,
    SplitEvaluations,
    add_finetuned,
    add_participation,
    add_picks,
    client_rows,
    evaluate_splits,
    round_line,
    write_clients,
)
from fedtail.runs.run_folder import FORMAT, TESTED, RunFolder
from fedtail.task import Task
from fedtail.training import Progress, Trained


class SimulationRecords:
    """Evaluates all clients of all splits in this process; `tail` records who was sampled and who contributed in every round."""

    format = FORMAT

    def __init__(self, experiment: Experiment, folder: Path, splits: Populations, task: Task, tail: bool):
        self.experiment, self.folder, self.splits, self.task, self.tail = experiment, folder, splits, task, tail
        self.tested = next(split for split in TESTED if split in splits)
        self.lines = ("rounds.jsonl",) if tail else ()
        self.checkpoint_every = experiment.evaluate_every
        self._last: tuple[int, list[SplitEvaluations]] | None = None

    @property
    def clients(self) -> int:
        return len(self.splits["train"])

    @property
    def about(self) -> dict[str, Any]:
        return {"rates": gives_rates(self.task, self.splits[self.tested]),
                "splits": {name: len(population) for name, population in self.splits.items()},
                "data": str(self.experiment.data), "device": self.experiment.device, "kernel": self._kernel(),
                "fingerprint": fingerprint(self.splits), "own_code": self.experiment.own_code(),
                "start": digest_of(module_bytes(self.task.module))}

    def check(self, about: dict[str, Any]) -> None:
        """Refuse to go on with other data, or other code of the user's."""
        for name, now, what in (("fingerprint", fingerprint(self.splits), "the data are"),
                                ("own_code", self.experiment.own_code(), "your own code is")):
            if about[name] != now:
                raise RunRefused(f"{what} not what {self.folder} began with. Undo the change, or start again in another folder "
                                 "with --out.")

    def begin(self, start: Trained, lines: dict[str, Lines]) -> list[SplitEvaluations]:
        """The start is evaluated too."""
        write_whole(self.folder / INITIAL, module_bytes(self.task.module))
        if self.tail:
            lines["rounds.jsonl"].write({"simulator_only": True, "clients": self.clients})
        return self._evaluations(start, self._shown())

    def after_round(self, progress: Progress, lines: dict[str, Lines]) -> tuple[Trained, list[SplitEvaluations]] | None:
        """Every so many rounds, and after the last, all shown splits are evaluated."""
        trained = progress.trained
        if self.tail and progress.view is not None:
            lines["rounds.jsonl"].write(round_line(trained, progress.view, self.clients))
        if trained.rounds % self.experiment.evaluate_every and trained.rounds != self.experiment.rounds:
            return None
        return trained, self._evaluations(trained, self._shown())

    def finish(self, trained: Trained) -> tuple[list[SplitEvaluations], dict[str, Any], list[Path]]:
        """All splits are evaluated, and `clients.parquet` is written."""
        evaluations = self._evaluations(trained, self.splits)
        tuned, shown = self._write_clients(trained, evaluations), self._shown()
        found = [{split: one for split, one in member.items() if split in shown} for member in evaluations]
        return found, {"finetuned": tuned}, [self.folder / CLIENTS]

    def _kernel(self) -> str:
        """The kernel that will be chosen: it follows from the task, the shapes of the data and the device."""
        device, dtype = torch.device(self.experiment.device), self.task.params().dtype
        return kernel_for(self.task, device, dtype, self.splits["train"], self.experiment.engine.kernel).name

    def _shown(self) -> Populations:
        """The splits that are evaluated while the run goes on."""
        return {name: population for name, population in self.splits.items() if name != "train" or self.experiment.evaluate.train
                or self.tested == "train"}

    def _evaluations(self, trained: Trained, splits: Populations) -> list[SplitEvaluations]:
        """Evaluate these splits; what was evaluated last, under the same models, is taken from there."""
        round, known = self._last or (-1, [])
        known = known if round == trained.rounds else [{} for _ in trained.algorithm.members]
        missing = {name: population for name, population in splits.items() if name not in known[0]}
        fresh = evaluate_splits(trained, missing, self.experiment.evaluating)
        self._last = (trained.rounds, [{**old, **new} for old, new in zip(known, fresh, strict=True)])
        return [{name: member[name] for name in splits} for member in self._last[1]]

    def _write_clients(self, trained: Trained, evaluations: list[SplitEvaluations]) -> list[dict[str, Any]] | None:
        """The table over clients; returns what fine-tuning changed, where the experiment has it."""
        tuned, (rows, population) = None, (client_rows(evaluations, self.splits), self.splits[self.tested])
        if self.tail:
            add_participation(rows, self.folder / "rounds.jsonl")
        if self.experiment.family is not None:
            add_picks(rows, trained, self.tested, population)
        if self.experiment.evaluate.finetune is not None:
            tuned = add_finetuned(rows, trained, self.tested, population, self.experiment.evaluate.finetune,
                                  self.experiment.evaluating)
        write_clients(self.folder / CLIENTS, rows, self.experiment.name)
        return tuned


INITIAL, CLIENTS = "initial.safetensors", "clients.parquet"


def with_first_module(task: Task, folder: Path) -> Task:
    """The task with the module that a run began with, frozen parameters and buffers included."""
    from safetensors.torch import load

    path = folder / INITIAL
    content = path.read_bytes() if path.is_file() else b""
    if digest_of(content) != RunFolder.open(folder).about["start"]:
        raise RunError(f"{path} is missing or damaged: the run cannot go on from the module it began with. Start again in "
                       "another folder.")
    task.module.load_state_dict(load(content))
    return task
