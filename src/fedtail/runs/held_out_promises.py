"""Promises of a finished run about new clients, by test clients that had no part in making its models."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedtail.data import Population
from fedtail.errors import FieldError
from fedtail.experiment.data_section import DataPlan
from fedtail.reading import short_text
from fedtail.runs.diverged import divergence_reason
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.metric_bounds import Bounds
from fedtail.runs.promise_entries import CONFIDENCE, promise_entry
from fedtail.runs.run_folder import RunFolder

Identities = dict[str, list[Hashable]]       # of the clients of each split
WRITE = "For a promise write split = { train = 0.6, validation = 0.2, test = 0.2 } below [data]."
NEEDED = math.ceil(math.log(1 - CONFIDENCE) / math.log(0.9))       # held-out clients, for a bound on the 90th percentile


def client_identities(data: DataPlan, splits: Mapping[str, Population]) -> Identities:
    """Who the clients of each split are, so that equal entries mean the same client, by name of the split.

    Names where all clients have some: a client that is in the training file and in the file of `test_path` is one client. Else
    keys, which stay with a client when clients are split. The splits of `label_shift` are drawn client by client, and clients
    without names of another file cannot be told apart from those of the first: they are taken as others.
    """
    if data.split is None:
        return {split: [(split, key) for key in one.key.tolist()] for split, one in splits.items()}
    if all(one.names is not None for one in splits.values()):
        return {split: [str(name) for name in one.names] for split, one in splits.items() if one.names is not None}
    other = "test" if data.test_path is not None else ""
    return {split: [(split, key) if split == other else key for key in one.key.tolist()] for split, one in splits.items()}


def held_out_promise(values: Iterable[float], tested: str, identities: Identities, used: Mapping[str, str], bounds: Bounds,
                     better: str, defined: Iterable[bool] | None = None) -> dict[str, Any]:
    """What can be promised about new clients by `values`, those of the clients of the split `tested`, for `result.json`.

    `used` says what each split that had a part in making the models did, by its name: {"train": "trained them"}. Where a tested
    client is in one of them, or has no finite value, there is no promise, but a `reason`. Clients for whom the metric is not
    `defined` are left out, and counted in `undefined`: the promise is about new clients for whom it is, of whom the others are
    independent draws. Other entries: see `promise_entry`.
    """
    every = list(zip(identities[tested], values, strict=True))
    known = [True] * len(every) if defined is None else list(defined)
    mine = dict(one for one, has in zip(every, known, strict=True) if has)
    if not mine:
        return no_promise("the metric is defined for no tested client.")
    missing = sum(not math.isfinite(value) for value in mine.values())
    if missing:
        return no_promise(f"there is no value for {missing} of {len(mine)} tested clients, and one of them may be the worst.")
    makers = [key for split in used for key in identities[split]]
    try:
        entry = promise_entry(mine, makers, bounds, better)
        return entry if all(known) else {**entry, "undefined": known.count(False)}
    except FieldError as refused:
        return no_promise(_reason(str(refused), set(mine), identities, used))


def no_promise(reason: str) -> dict[str, Any]:
    """The entry of `result.json` where nothing is promised, with the reason."""
    return {"reason": short_text(reason, 900)}


def result_with_kept_promises(run: RunFolder, result: dict[str, Any]) -> dict[str, Any]:
    """The `result` of a run that has just ended, in which models that have diverged promise nothing, with the reason."""
    if "promises" not in result:
        return result
    ended = replace(run, unwritten=result)
    reasons = [divergence_reason(ended, EvaluatedModel(member)) for member in range(len(run.members))]
    promises = [{metric: no_promise(f"the model has diverged: {reason}.") for metric in entries} if reason else entries
                for reason, entries in zip(reasons, result["promises"], strict=True)]
    return {**result, "promises": promises}


def _reason(text: str, mine: set[Hashable], identities: Identities, used: Mapping[str, str]) -> str:
    """Why there is no promise: what was refused, after what the tested clients did, and what to write instead."""
    did = [what for split, what in used.items() if mine & set(identities[split])]
    there = len(set().union(*identities.values()))
    advice = WRITE if there >= 5 * NEEDED else f"A promise takes {NEEDED} clients that are held out, of {there} in all."
    return f"the tested clients {' and '.join(did)}: {text} {advice}" if did else text
