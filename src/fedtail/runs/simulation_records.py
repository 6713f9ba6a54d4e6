"""What a run in the simulator records: every split evaluated, every round, a table over clients."""

from __future__ import annotations

from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtail.attacks import ClientAttack, benign_clients
from fedtail.constant_prediction import constant_outputs
from fedtail.data.population import Population
from fedtail.data.scaling import SCALING
from fedtail.engine.counted_draws import VERSION
from fedtail.engine.kernel_choice import kernel_for
from fedtail.evaluation.evaluate import evaluate_constant, gap_to_constant, gives_rates
from fedtail.experiment.data_sources import data_fingerprint
from fedtail.experiment.experiment import Experiment
from fedtail.runs.evaluated_models import EVALUATED, NONE, NOT_EVALUATED, not_evaluated_text, participation_summary
from fedtail.runs.files import JsonLinesFile, RunError, RunRefused, bytes_digest, module_bytes, write_atomically
from fedtail.runs.measurements import (
    Populations,
    SplitEvaluations,
    add_finetuned_errors,
    add_participation,
    add_picked_models,
    client_table_columns,
    evaluate_splits,
    line_statistics,
    round_line,
    write_client_table,
)
from fedtail.runs.run_answers import RunAnswers
from fedtail.runs.run_folder import FORMAT, TESTED, RunFolder
from fedtail.task import Task
from fedtail.training import Progress, Trained


class SimulationRecords:
    """Evaluates all clients of all splits in this process, and records them.

    With `tail`, also records which clients were sampled and which contributed in every round. Under an attack, all statistics are
    over benign clients; the table over clients has all, and says who is corrupted.
    """

    run_format = FORMAT

    def __init__(self, experiment: Experiment, folder: Path, splits: Populations, task: Task, tail: bool,
                 attack: ClientAttack | None = None):
        """Set up the records of the run of `experiment` in `folder`, without writing.

        `splits` are the populations to evaluate under `task`. With `tail`, `rounds.jsonl` is written. `attack` says
        who is corrupted.
        """
        self.experiment, self.folder, self.splits, self.task, self.tail = experiment, folder, splits, task, tail
        self.tested_split = next(split for split in TESTED if split in splits)
        self.line_files = ("rounds.jsonl",) if tail else ()
        self.checkpoint_every = experiment.evaluate_every
        self._benign: dict[str, Tensor] | None = None      # by split, where there is an attack
        if attack is not None:
            self._benign = {name: benign_clients(attack, splits["train"], population) for name, population in splits.items()}
        within = experiment.data.splits_within_clients
        self._within = tuple(split for split in within if split in splits)
        self._last: tuple[int, list[SplitEvaluations]] | None = None

    @property
    def num_clients(self) -> int:
        """The number of training clients, whom the privacy guarantee covers."""
        return len(self.splits["train"])

    @property
    def run_entries(self) -> dict[str, Any]:
        """The entries of `run.json` about clients and data, as JSON values.

        They are the number of clients by split, whether errors are rates, data, device, kernel, and digests of the data, of
        the user's own code and of the initial module; the names of features and classes, where the data have some; and, where
        training draws random numbers, by which version of that.
        """
        return {"rates": gives_rates(self.task, self.splits[self.tested_split]),
                "splits": {name: len(population) for name, population in self.splits.items()},
                "data": str(self.experiment.data), "device": self.experiment.device, "kernel": self._kernel[0],
                "fingerprint": data_fingerprint(self.splits), "own_code": self.experiment.own_code_digests(),
                "start": bytes_digest(module_bytes(self.task.module)), "inputs": input_shapes(self.splits["train"]),
                **{name: list(held) for name, held in (("columns", self.splits["train"].columns),
                                                       ("classes", self.splits["train"].classes)) if held is not None},
                **self._randomness_entry(), **self._benign_entry(), **self._personal_entry()}

    def _personal_entry(self) -> dict[str, Any]:
        """The entry of `run.json` that says for each model whether personal models beside it are evaluated; none without any."""
        known = EVALUATED if self.tested_split in self._within else NOT_EVALUATED
        found = [known if member.personal.trains else NONE for member in self.experiment.algorithm.members]
        return {} if set(found) == {NONE} else {"personal": found}

    @property
    def notes(self) -> list[str]:
        """Sentences for the user to read when the run begins: that personal models are not evaluated, where they are not."""
        return [not_evaluated_text(self.tested_split)] if NOT_EVALUATED in self._personal_entry().get("personal", ()) else []

    def _benign_entry(self) -> dict[str, Any]:
        """The entry of `run.json` with the number of benign clients by split; no entry without an attack."""
        return {} if self._benign is None else {"benign": {name: int(mask.sum()) for name, mask in self._benign.items()}}

    def _of_benign_clients(self, evaluations: list[SplitEvaluations]) -> list[SplitEvaluations]:
        """The evaluations by split for each model, over benign clients only; as they are without an attack."""
        if self._benign is None:
            return evaluations
        return [{split: one.of_clients(self._benign[split]) for split, one in member.items()} for member in evaluations]

    def check_unchanged(self, about: dict[str, Any]) -> None:
        """Raise RunRefused where the data, the user's own code or the way to draw dropout differ from what the run began with.

        `about` is the content of its `run.json`, which holds their digests.
        """
        if about.get("randomness") != self._randomness_entry().get("randomness"):
            raise RunRefused(f"{self.folder} began with a version of fedtail that drew dropout, and what else is "
                             "random in a model, in another way (from torch's generators up to version 0.2): its masks would "
                             "change in the middle of the run. Finish it with that version, or start again in another folder "
                             "with --out.")
        for name, now, what in (("fingerprint", data_fingerprint(self.splits), "the data are"),
                                ("own_code", self.experiment.own_code_digests(), "your own code is")):
            if about[name] != now:
                raise RunRefused(f"{what} not what {self.folder} began with. Undo the change, or start again in another folder "
                                 "with --out.")

    def record_start(self, start: Trained, lines: dict[str, JsonLinesFile]) -> list[SplitEvaluations]:
        """Write the initial module to `initial.safetensors`, begin `rounds.jsonl` where it is recorded, and evaluate `start`.

        Where inputs were scaled, by what is written to `scaling.safetensors`: the run's models take scaled inputs.
        `lines` has the open files by name. Returns, for each model, the evaluations by split (those that are evaluated during the
        run).
        """
        write_atomically(self.folder / INITIAL, module_bytes(self.task.module))
        scaling = self.splits["train"].scaling
        if scaling is not None:
            write_atomically(self.folder / SCALING, scaling.to_bytes())
        if self.tail:
            lines["rounds.jsonl"].write({"simulator_only": True, "clients": self.num_clients})
        return self._of_benign_clients(self._evaluate_splits(start, self._shown_splits()))

    def record_round(self, progress: Progress, lines: dict[str, JsonLinesFile]) -> tuple[Trained, list[SplitEvaluations]] | None:
        """Append the round to `rounds.jsonl` where it is recorded, and evaluate it where an evaluation is due or it is the last.

        `progress` is about the round, `lines` has the open files by name. Returns the state and, for each model, the evaluations
        by split; None in rounds that are not evaluated.
        """
        trained = progress.trained
        if self.tail and progress.view is not None:
            lines["rounds.jsonl"].write(round_line(trained, progress.view, self.num_clients))
        if trained.rounds % self.experiment.evaluate_every and trained.rounds != self.experiment.rounds:
            return None
        return trained, self._of_benign_clients(self._evaluate_splits(trained, self._shown_splits()))

    def record_end(self, trained: Trained) -> tuple[list[SplitEvaluations], dict[str, Any], list[Path]]:
        """Evaluate all splits under the models of `trained`, and write `clients.parquet`.

        Returns, for each model, the evaluations of the splits that were evaluated during the run; entries for `result.json`;
        and the paths of `clients.parquet` and, where inputs were scaled, of their scaling. The entries are `finetuned`, the
        statistics before and after fine-tuning or None, `participation`, how often (benign) training clients took part, where
        that is recorded, `constant`, the statistics of the constant prediction by split and metric, and `above_constant`, for
        each model and split how far its mean loss is above the constant's.
        """
        evaluations = self._evaluate_splits(trained, self.splits)
        more, shown = self._write_client_table(trained, evaluations), self._shown_splits()
        found = [{split: one for split, one in member.items() if split in shown} for member in evaluations]
        scaling = [self.folder / SCALING] if self.splits["train"].scaling is not None else []
        found = self._of_benign_clients(found)
        return found, {**more, **self._constant_entries(shown, found)}, [self.folder / CLIENTS, *scaling]

    def _constant_entries(self, splits: Populations, models: list[SplitEvaluations]) -> dict[str, Any]:
        """The entries of `result.json` about the prediction that ignores the inputs, which is fitted to the training clients.

        `constant` has its statistics by split and metric. `above_constant` has for each model, of which `models` are the
        evaluations, and split the difference in the mean loss, its standard error over clients and their number, as a list, and
        that of personal models below "personal". No entries where there is no such prediction for the task's loss.
        """
        constant = constant_outputs(self.task, self.splits["train"])
        if constant is None:
            return {}
        found = {split: evaluate_constant(self.task, constant, population, weighted=split == "train")
                 for split, population in splits.items()}
        [benign] = self._of_benign_clients([found])
        return {"constant": {split: {metric: line_statistics(one) for metric, one in evaluation.distributions.items()}
                             for split, evaluation in benign.items()},
                "above_constant": [_gap_entries(member, benign) for member in models]}

    @cached_property
    def _kernel(self) -> tuple[str, bool]:
        """The name of the kernel that training will use, and whether it draws random numbers by counters.

        It is chosen by the task, its precision, the training data, the device and the experiment's engine section.
        """
        device, dtype = torch.device(self.experiment.device), self.task.params().dtype
        kernel = kernel_for(self.task, device, dtype, self.splits["train"], self.experiment.engine.kernel)
        return kernel.name, kernel.counted_draws

    def _randomness_entry(self) -> dict[str, Any]:
        """The entry of `run.json` with the version of how training draws random numbers; no entry where it draws none."""
        return {"randomness": VERSION} if self._kernel[1] else {}

    def _shown_splits(self) -> Populations:
        """The splits that are evaluated during the run, by name.

        All but "train", which is among them where the experiment's `[evaluate]` has train = true or where it is the only one
        to test on.
        """
        return {name: population for name, population in self.splits.items() if name != "train" or self.experiment.evaluate.train
                or self.tested_split == "train"}

    def _evaluate_splits(self, trained: Trained, splits: Populations) -> list[SplitEvaluations]:
        """For each model of `trained`, the evaluations of these splits, in a dict by split.

        The evaluations of the last round are stored in `_last`, so that another call in the same round computes only the splits
        that are missing.
        """
        round, known = self._last or (-1, [])
        known = known if round == trained.rounds else [{} for _ in trained.algorithm.members]
        missing = {name: population for name, population in splits.items() if name not in known[0]}
        fresh = evaluate_splits(trained, missing, self.experiment.evaluation_engine, self._within)
        self._last = (trained.rounds, [{**old, **new} for old, new in zip(known, fresh, strict=True)])
        return [{name: member[name] for name in splits} for member in self._last[1]]

    def _write_client_table(self, trained: Trained, evaluations: list[SplitEvaluations]) -> dict[str, Any]:
        """Write the table over clients, `clients.parquet`, from the `evaluations` of all splits for each model of `trained`.

        It has participation, picks and fine-tuning where they apply. Returns entries for `result.json`: `finetuned`, for each
        model the error statistics before and after fine-tuning, None where the experiment has none; `participation`, how
        often (benign) training clients took part, where rounds are recorded; and those of `RunAnswers.result_entries`.
        """
        tuned, (rows, population) = None, (client_table_columns(evaluations, self.splits), self.splits[self.tested_split])
        took_part: dict[str, Any] = {}
        benign = self._benign
        if benign is not None:
            for (split, _), columns in rows.items():
                columns["corrupted"] = ~benign[split].numpy()
        if self.tail:
            add_participation(rows, self.folder / "rounds.jsonl")
            counts = rows["train", 0]["asked"]
            took_part = participation_summary(counts if benign is None else counts[benign["train"].numpy()])
        if self.experiment.family is not None:
            add_picked_models(rows, trained, self.tested_split, population)
        if self.experiment.evaluate.finetune is not None:
            tuned = add_finetuned_errors(rows, trained, self.tested_split, population, self.experiment.evaluate.finetune,
                                         self.experiment.evaluation_engine, None if benign is None else benign[self.tested_split])
        about = RunAnswers(self.experiment, self.splits, self.tested_split, self._within, benign is not None)
        about.add_variances(rows, trained)
        write_client_table(self.folder / CLIENTS, rows, self.experiment.name)
        return {"finetuned": tuned, **({"participation": took_part} if took_part else {}), **about.result_entries(rows, trained)}


def _gap_entries(model: SplitEvaluations, constant: SplitEvaluations) -> dict[str, Any]:
    """How far the mean loss of one model is above the constant prediction's, by split, as `result.json` has it.

    Those of personal models, where there are some, are below "personal". Both evaluations are of the same clients.
    """
    own = {split: one.personal for split, one in model.items() if one.personal is not None}
    return {**{split: list(astuple(gap_to_constant(one, constant[split]))) for split, one in model.items()},
            **({"personal": _gap_entries(own, constant)} if own else {})}


def input_shapes(population: Population) -> dict[str, Any]:
    """The shape and type of one example's inputs, as JSON values: {"x": {"shape": [64], "dtype": "float32"}}.

    Inputs that are a dict are named by its keys. With them a model can be called without the data.
    """
    inputs = population.inputs if isinstance(population.inputs, dict) else {"x": population.inputs}
    return {name: {"shape": list(one.shape[1:]), "dtype": str(one.dtype).removeprefix("torch.")} for name, one in inputs.items()}


INITIAL, CLIENTS = "initial.safetensors", "clients.parquet"


def load_initial_module(task: Task, folder: Path) -> Task:
    """Load the parameters and buffers that a run began with, frozen ones too, into `task.module`; returns the task.

    They are read from `initial.safetensors` in `folder`; the module is changed in place. Raises RunError where that file is
    missing or damaged.
    """
    from safetensors.torch import load

    path = folder / INITIAL
    content = path.read_bytes() if path.is_file() else b""
    if bytes_digest(content) != RunFolder.open(folder).about["start"]:
        raise RunError(f"{path} is missing or damaged: the run cannot go on from the module it began with. Start again in "
                       "another folder.")
    task.module.load_state_dict(load(content))
    return task
