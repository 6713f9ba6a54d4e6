"""What a run measures: lines of metrics.jsonl and rounds.jsonl, and the table over clients."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedtail.algorithm import State, member_states
from fedtail.data import Population
from fedtail.divergence import DivergedWarning
from fedtail.engine import Engine
from fedtail.evaluation import Distribution, Evaluation, evaluate, evaluate_personal, finetune
from fedtail.evaluation.family import evaluate_family_by_metric
from fedtail.fleet import RoundView
from fedtail.history import tail_threshold
from fedtail.local import LocalSGD
from fedtail.risk.base import tail_fraction_used
from fedtail.runs.evaluated_models import metric_column, personal_column
from fedtail.runs.files import write_atomically
from fedtail.runs.run_folder import read_rounds
from fedtail.training import Trained

ClientColumns = dict[str, np.ndarray]       # of one split and model
# Types of columns; their names, and the keys of lines, are those of older runs, which have to stay readable.
KINDS = {"split": "string", "client": "int64", "name": "string", "size": "int64", "mass": "float64", "group": "int64",
         "member": "int32", "key": "int64", "asked": "int64", "in_tail": "int64", "picks": "bool", "corrupted": "bool",
         "has_personal_model": "bool"}                                                                       # others are float64
FIRST = ("split", "client", "name", "size", "mass", "group", "member")
Populations = dict[str, Population]
SplitEvaluations = dict[str, Evaluation]     # of one model, by split
MORE_PERCENTILES = (0, 20, 60, 80, 95, 100)  # with those of `Distribution.summary`


def evaluate_splits(trained: Trained, splits: Populations, engine: Engine,
                    within: tuple[str, ...] = ()) -> list[SplitEvaluations]:
    """Evaluate every model of `trained` on every split; returns, for each model, a dict of evaluations by split.

    Training clients are weighted by their mass, clients of other splits equally. `engine` says where and how it is computed.
    `within` names the splits that hold other examples of the training clients: there, personal models are evaluated too, where
    the method trains some.
    """
    def evaluation(model: int, module: nn.Module, split: str) -> Evaluation:
        """The evaluation of the model at position `model`, as `module`, on a split, with that of its personal models if any."""
        if split in within and trained.algorithm.members[model].personal.trains:
            found = evaluate_personal(trained, splits[split], engine=engine, model=model)
            return replace(found.shared, personal=found.personal)
        return evaluate(module, splits[split], trained.task, weighted=split == "train", engine=engine)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)      # a run says it once, at its end
        return [{split: evaluation(model, module, split) for split in splits} for model, module in enumerate(trained.modules)]


def metrics_line(round: int, evaluations: list[SplitEvaluations]) -> dict[str, Any]:
    """A line of `metrics.jsonl`, as a dict: `round`, and `members`, a list over models.

    Each entry of `members` is a dict of statistics over clients by split, metric and name of the statistic, from `evaluations`,
    which has the evaluations by split for each model. Where personal models were evaluated, `personal` has their statistics in
    the same form, in the splits where they were, and `personal_models` how many clients have one, by split, where that is known.
    """
    own = [{split: one.personal for split, one in member.items() if one.personal is not None} for member in evaluations]
    line: dict[str, Any] = {"round": round, "members": [_statistics_by_split(member) for member in evaluations]}
    if not any(own):
        return line
    counts = [{split: int(one.has_model.sum()) for split, one in member.items() if one.has_model is not None} for member in own]
    return {**line, "personal": [_statistics_by_split(member) for member in own], "personal_models": counts}


def _statistics_by_split(member: SplitEvaluations) -> dict[str, dict[str, dict[str, float]]]:
    """The statistics over clients of one model, or of the personal models beside it, by split, metric and name."""
    return {split: {metric: line_statistics(found) for metric, found in evaluation.distributions.items()}
            for split, evaluation in member.items()}


def line_statistics(distribution: Distribution) -> dict[str, float]:
    """The statistics of a distribution over clients that a line of `metrics.jsonl` holds, by name.

    These are mean, std, p0, p10, p20, p50, p60, p80, p90, p95, p100, worst10, worst5, best10, variance, angle and kl. For a
    metric that is not defined for all clients, `defined` is the number of those for whom it is, over whom the statistics are.
    """
    few = isinstance(distribution, Distribution) and distribution.num_defined < len(distribution)
    return {**distribution.summary(), **distribution.percentiles(MORE_PERCENTILES),
            **({"defined": distribution.num_defined} if few else {})}


def not_finite_counts(module: nn.Module, initial: nn.Module, evaluation: Evaluation | None) -> dict[str, int]:
    """How many `parameters` of a model, `of` all, and the losses of how many `clients` are not finite, for `result.json`.

    `changed` is how many parameters differ from those of `initial`, the module before training. `evaluation` is that of the
    tested split; without one, and where only sums over clients are known, there is no `clients`.
    """
    values = [parameter.detach().cpu() for parameter in module.parameters()]
    changed = sum(int((one != before.detach().cpu()).sum()) for one, before in zip(values, initial.parameters(), strict=True))
    lost = {"parameters": sum(int((~one.isfinite()).sum()) for one in values), "of": sum(one.numel() for one in values),
            "changed": changed}
    loss = None if evaluation is None else evaluation.distributions.get("loss")
    return lost | ({"clients": int((~loss.values.isfinite()).sum())} if isinstance(loss, Distribution) else {})


def round_line(trained: Trained, view: RoundView, clients: int) -> dict[str, Any]:
    """A line of `rounds.jsonl` about the last round of `trained`, as a dict: the round, its clients, and who contributed.

    `view` says who was sampled, contributed and failed. `asked` has the positions of the sampled clients, None for all `clients`;
    `failed` the number of failed answers; `members` a dict for each model, in which `counted` has the positions of contributors,
    None for the whole cohort, `threshold` the loss at which the tail begins, None where there is none, `tail_fraction` the share
    of the cohort that contributes by the risk's declaration (theta of a superquantile), None where it is not known, and `local`
    the numbers of local training by name, such as the `strength` of an `AdaptiveProximal`; it is left out where there are none.
    """
    states, size = member_states(trained.state), view.cohort_size
    members = [{"counted": _contributor_positions(view, k), "threshold": tail_threshold(member.risk.for_cohort(size), state),
                "tail_fraction": tail_fraction_used(member.risk, size), **_local_numbers(member.local, state)}
               for k, (member, state) in enumerate(zip(trained.algorithm.members, states, strict=True))]
    cohort = None if view.cohort_size == clients else view.sampled.tolist()
    return {"round": states[0].round, "asked": cohort, "failed": view.num_failed, "members": members}


def _contributor_positions(view: RoundView, model: int) -> list[int] | None:
    """The positions of the clients that contributed in a round to the model at position `model`; None for the whole cohort.

    `view` says who was sampled and contributed.
    """
    who = view.contributors_of(model)
    return None if len(who) == view.cohort_size else who.tolist()


def _local_numbers(local: Any, state: State) -> dict[str, dict[str, float | None]]:
    """{"local": numbers by name} of local training in this state, None for one that is not finite; empty where it gives none."""
    numbers = local.round_numbers(state.part_state("local"))
    return {"local": {name: one if math.isfinite(one) else None for name, one in numbers.items()}} if numbers else {}


def client_table_columns(evaluations: list[SplitEvaluations], splits: Populations) -> dict[tuple[str, int], ClientColumns]:
    """The columns of the table over clients by (split, position of the model), each an array over the clients of the split.

    They are the client's identity (split, number, name, size, mass, group, model), from `splits`, and its loss, error and other
    metrics, from `evaluations`, which has the evaluations by split for each model. Where personal models were evaluated, there
    are `personal_loss`, `personal_error` and so on, and `has_personal_model`: who has none is evaluated by the shared one.
    """
    rows = {}
    for member, by_split in enumerate(evaluations):
        for split, evaluation in by_split.items():
            population = splits[split]
            values = {metric: found.values.numpy() for metric, found in evaluation.distributions.items()}
            rows[split, member] = {**_identity_columns(population, split, member), **values,
                                   **_personal_columns(evaluation.personal)}
    return rows


def _personal_columns(personal: Evaluation | None) -> ClientColumns:
    """The columns of the table over clients about personal models, from their evaluation; none where that is None."""
    if personal is None:
        return {}
    has = {} if personal.has_model is None else {"has_personal_model": personal.has_model.numpy()}
    return {**{personal_column(metric): found.values.numpy() for metric, found in personal.distributions.items()}, **has}


def add_participation(rows: dict[tuple[str, int], ClientColumns], rounds: Path) -> None:
    """Add columns for how often each training client was sampled (`asked`) and contributed to each model (`in_tail`).

    `rows` has the columns by (split, position of the model) and is changed in place. The counts are taken from the file
    `rounds.jsonl` at the path `rounds`.
    """
    members = sorted(member for split, member in rows if split == "train")
    clients = len(rows["train", 0]["client"])
    sampled, contributed = np.zeros(clients, np.int64), np.zeros((len(members), clients), np.int64)
    for line in read_rounds(rounds):
        sampled[line["asked"]] += 1
        for member in members:
            contributed[member][line["members"][member]["counted"]] += 1
    for member in members:
        rows["train", member] |= {"asked": sampled, "in_tail": contributed[member]}


def add_picked_models(rows: dict[tuple[str, int], ClientColumns], trained: Trained, split: str, population: Population) -> None:
    """Add columns for the model of a family that each client picks by half of its examples, and errors on the other half.

    `rows` has the columns by (split, position of the model) and is changed in place: `picks` is True for the model that the
    client picks by the error, `judged` is the model's error on the other half; picks by another metric, and that metric, are in
    `picks_auc` and `judged_auc`, say. They are None and NaN for clients with fewer than two examples; nothing is added where all
    clients are such. `trained` holds the models, and `population` the clients of `split`.
    """
    able = population.size.numpy() >= 2
    if not able.any():
        return
    for metric, family in evaluate_family_by_metric(trained, population.select(able)).items():
        picks, judged = (metric_column(name, metric) for name in ("picks", "judged"))
        for member, values in enumerate(family.members):
            rows[split, member][picks] = _spread_over_clients(able, (family.choice == member).numpy().astype(object), None)
            rows[split, member][judged] = _spread_over_clients(able, values.values.numpy(), np.nan)


def add_finetuned_errors(rows: dict[tuple[str, int], ClientColumns], trained: Trained, split: str, population: Population,
                         local: LocalSGD, engine: Engine, benign: Tensor | None = None) -> list[dict[str, Any]]:
    """Add columns for each client's metrics on half of its examples, before and after fine-tuning on the other half.

    `rows` has the columns by (split, position of the model) and is changed in place. A copy of each model of `trained` is
    fine-tuned by `local` for each client of `population`, that of `split`; `engine` says where and how. The columns,
    `before_finetuning` and `after_finetuning` of the error, `before_finetuning_loss` and so on, are NaN for clients with fewer
    than two examples, and for those that are not `benign`, (clients,) bool, where that is given. Returns, for each model, the
    statistics `before` and `after` of the error, `before_loss` and so on; an empty list where no client has two examples.
    """
    able, summaries = (population.size >= 2 if benign is None else (population.size >= 2) & benign).numpy(), []
    for member, module in enumerate(trained.modules if able.any() else ()):
        tuned = finetune(module, population.select(able), local, trained.task, engine=engine)
        each = {(when, metric): found for when, one in (("before", tuned.before), ("after", tuned.after))
                for metric, found in one.distributions.items()}
        summaries.append({metric_column(when, metric): line_statistics(found) for (when, metric), found in each.items()})
        for (when, metric), found in each.items():
            column = metric_column(f"{when}_finetuning", metric)
            rows[split, member][column] = _spread_over_clients(able, found.values.numpy(), np.nan)
    return summaries


def write_client_table(path: Path, rows: dict[tuple[str, int], ClientColumns], name: str) -> None:
    """Write the table over clients as a parquet file at `path`, atomically: the entries of `rows` one below another.

    `rows` has the columns by (split, position of the model); a column that an entry lacks is null there. The schema metadata
    holds `name`, the experiment's, and marks the file as simulator-only. Raises RunError where it could not be written.
    """
    import pyarrow as arrow
    from pyarrow import parquet

    columns = list(dict.fromkeys([*FIRST, *(column for part in rows.values() for column in part)]))
    arrays = {column: arrow.concat_arrays([_arrow_array(part, column) for part in rows.values()]) for column in columns}
    content = io.BytesIO()
    parquet.write_table(arrow.table(arrays).replace_schema_metadata({"simulator_only": "true", "experiment": name}), content)
    write_atomically(path, content.getvalue())


def _identity_columns(population: Population, split: str, member: int) -> ClientColumns:
    """The columns that identify a row: split, client (0, 1, ...), name, size, mass, member, key, and group where there are any.

    Each is an array over the clients of the population. The key stays with a client however clients are split, so that
    runs with different splits can be compared client by client; clients without names are named by it.
    """
    count = len(population)
    names = population.key.numpy().astype(str) if population.names is None else population.names.astype(str)
    who = {"split": np.full(count, split), "client": np.arange(count), "name": names,
           "size": population.size.numpy(), "mass": population.mass.numpy(), "member": np.full(count, member, np.int32),
           "key": population.key.numpy()}
    return who if population.group is None else {**who, "group": population.group.numpy()}


def _spread_over_clients(able: np.ndarray, values: np.ndarray, missing: Any) -> np.ndarray:
    """A column over all clients, (clients,): `values`, in order, where the mask `able` is True, and `missing` elsewhere.

    Its dtype is that of `values`, or object where `missing` is None.
    """
    spread = np.full(len(able), missing, values.dtype if missing is not None else object)
    spread[able] = values
    return spread


def _arrow_array(part: ClientColumns, column: str) -> Any:
    """A column of `part` as an arrow array, of the type it has in `clients.parquet`; all null where `part` lacks that column."""
    import pyarrow as arrow

    kind = arrow.type_for_alias("bool" if column.startswith("picks_") else KINDS.get(column, "float64"))
    if column not in part:
        return arrow.nulls(len(part["client"]), kind)
    return arrow.array(part[column], kind)
