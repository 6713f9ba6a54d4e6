"""Which models of a run a row or a curve is about: a shared model, or the personal models beside it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedtail.runs.run_folder import RunFolder

NONE, EVALUATED, NOT_EVALUATED = "none", "evaluated", "not evaluated"      # personal models beside a model, in run.json
ENOUGH_ROUNDS = 50                           # in which clients take part, for results about personal models

ON_NODES = ("the personal models are not evaluated: nodes evaluate on examples that these have seen. Write split = \"test\" "
            "below [evaluate.on_nodes], and test_share = 0.2 in each node.toml.")


@dataclass(frozen=True)
class EvaluatedModel:
    """What one row of a comparison is about: a shared model of a run or, with `personal`, the clients' own models beside it."""

    member: int                              # position of the shared model among those of the run
    personal: bool = False

    def statistics(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics in a line of `metrics.jsonl`, or in `result.json`, by split, metric and name.

        An empty dict where the line has none about personal models. Raises KeyError or IndexError where it has no such model.
        """
        if not self.personal:
            return line["members"][self.member]
        own = line.get("personal")
        return own[self.member] if own else {}

    def column(self, metric: str) -> str:
        """The name of the column of the table over clients that holds a metric of these models, such as "personal_error"."""
        return personal_column(metric) if self.personal else metric


def personal_column(metric: str) -> str:
    """The name of the column of the table over clients that holds a metric of personal models: "personal_error" of "error"."""
    return f"personal_{metric}"


def metric_column(name: str, metric: str) -> str:
    """The name of a column, or of an entry, about a metric: "judged" of the error, "judged_auc" of another."""
    return name if metric == "error" else f"{name}_{metric}"


def evaluated_models(run: RunFolder) -> list[EvaluatedModel]:
    """The models of a run that can be compared: its shared ones, in order, then personal ones beside them that were evaluated."""
    own = [EvaluatedModel(k, True) for k, found in enumerate(run.personal) if found == EVALUATED]
    return [*(EvaluatedModel(k) for k in range(len(run.members))), *own]


def model_label(run: RunFolder, model: EvaluatedModel, name: str) -> str:
    """`name`, that of a shared model of `run`, with ", personal" for the personal models beside it.

    Where a model has such beside it, its own label ends in ", shared".
    """
    if model.personal:
        return f"{name}, personal"
    return f"{name}, shared" if run.personal[model.member] == EVALUATED else name


def participation_summary(counts: np.ndarray) -> dict[str, float]:
    """How often clients took part, from `counts`, (clients,), the rounds for which each was sampled, as a dict of numbers.

    `clients` is their number, `total` the sum of the counts and `never` how many were never sampled; `min`, `median` and `max`
    are over the others, or 0.
    """
    some = counts[counts > 0]
    spread = (some.min(), np.median(some), some.max()) if len(some) else (0, 0, 0)
    return {"clients": len(counts), "total": int(counts.sum()), "never": int((counts == 0).sum()),
            **dict(zip(("min", "median", "max"), map(float, spread), strict=True))}


def personal_sentences(runs: Sequence[RunFolder]) -> list[str]:
    """Sentences on what limits results about personal models, one for each method (all its seeds) and reason.

    That is where they were not evaluated, where clients took part in few rounds, and where participation was not recorded.
    """
    methods = dict.fromkeys(run.name for run in runs)
    return [f"{name}: {text}" for name in methods for text in _personal_limits([run for run in runs if run.name == name])]


def not_evaluated_text(tested: str) -> str:
    """Why personal models are not evaluated on the split `tested`, and what to write so that they are."""
    why = "they have seen its examples" if tested == "train" else "its clients did not train"
    return (f"the personal models are not evaluated on the {tested.replace('_', '-')} split: {why}. To hold out examples of the "
            "training clients write split = { train = 1.0, within = 0.2 } below [data].")


def _personal_limits(runs: Sequence[RunFolder]) -> list[str]:
    """Sentences, without a name, on what limits the results about the personal models of one method's runs; none without any."""
    left_out = [run for run in runs if NOT_EVALUATED in run.personal]
    limits = [ON_NODES if run.is_deployed else not_evaluated_text(run.tested_split) for run in left_out[:1]]
    ended = [run for run in runs if EVALUATED in run.personal and run.is_finished and not run.is_deployed]
    known = [run.result.get("participation") for run in ended]
    if any(one is None for one in known):
        limits.append("how often clients took part was not recorded, so that what the personal models are worth is not known.")
    found = [one for one in known if one]
    few, least, most = (pick(one[key] for one in found) if found else 0 for key, pick in
                        (("median", min), ("min", min), ("max", max)))
    if found and few < ENOUGH_ROUNDS:
        limits.append(f"clients with a personal model took part in {few:g} rounds (median; {least:g} to {most:g}). Personal "
                      f"models need about {ENOUGH_ROUNDS}: these say little yet.")
    return limits
