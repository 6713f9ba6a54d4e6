"""What a run looks at while it goes on: every split under every model, and who counted in a round."""

from __future__ import annotations

import math
from typing import Any

from fedtail.algorithm import State, states_of
from fedtail.clients import RoundView
from fedtail.data import Population
from fedtail.evaluation import Distribution, Evaluation, evaluate
from fedtail.training import Trained

Splits = dict[str, Population]
Look = dict[str, Evaluation]                 # by split
MORE_PERCENTILES = (20, 60, 80, 95)          # with those of `Distribution.summary`


def look(trained: Trained, splits: Splits, **computing: Any) -> list[Look]:
    """Every split under every model; training clients count by mass, others once each."""
    return [{name: evaluate(module, people, trained.task, weighted=name == "train", **computing)
             for name, people in splits.items()} for module in trained.modules]


def metrics_line(round: int, looks: list[Look]) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    return {"round": round, "members": [{split: {metric: statistics(found) for metric, found in evaluation.distributions.items()}
                                         for split, evaluation in member.items()} for member in looks]}


def statistics(distribution: Distribution) -> dict[str, float]:
    return {**distribution.summary(), **distribution.percentiles(MORE_PERCENTILES)}


def round_line(trained: Trained, view: RoundView, clients: int) -> dict[str, Any]:
    """A line of `rounds.jsonl`: who was asked, and who counted under each model. Everybody is written as null."""
    states = states_of(trained.state)
    members = [{"counted": _counted(view, k), "threshold": _threshold(member.risk, state)}
               for k, (member, state) in enumerate(zip(trained.algorithm.members, states, strict=True))]
    asked = None if view.cohort == clients else view.asked.tolist()
    return {"round": states[0].round, "asked": asked, "failed": view.failed, "members": members}


def _counted(view: RoundView, model: int) -> list[int] | None:
    """Who counted; nothing where everybody did, which keeps the file small."""
    who = view.who_counted(model)
    return None if len(who) == view.cohort else who.tolist()


def _threshold(risk: Any, state: State) -> float | None:
    start = None if state.dual is None else risk.tail_start(state.dual)
    return start if start is not None and math.isfinite(start) else None
