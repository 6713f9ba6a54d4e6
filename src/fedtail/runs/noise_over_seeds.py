"""Noise floors of one method over its seeds, in shown units and in words. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedtail.directions import FEW_CLIENTS
from fedtail.runs.client_noise import noise_of_run
from fedtail.runs.diverged import diverged_seeds
from fedtail.runs.values_by_client import Compared

Noise = dict[str, Any]


def noise_over_seeds(found: Sequence[Compared], metric: str = "error") -> Noise:
    """The noise floors of a method's tails, mean over its (run, model) pairs, and how much of the spread over clients is real.

    A dict as `noise_of_columns` returns, with error rates in percent. A tail is noise where its mean over seeds is not beyond the
    mean of what 95% of simulations stay within, both of which are shown; seeds that share no clients only make that stricter.
    The share that is real is the mean over seeds, and its interval the smallest that holds those of all seeds. Only `reason`
    where a model has diverged, or where a run has no floors, that of the first such run, or where they are of other statistics.
    """
    if diverged_seeds(found):
        return {"reason": "the model has diverged"}
    each = [noise_of_run(run, model, metric) for run, model in found]
    refused = next((one for one in each if "reason" in one), None)
    if refused is not None:
        return refused
    shared = [name for name in each[0]["floors"] if all(name in one["floors"] for one in each)]
    if not shared:
        return {"reason": f"only some of the seeds tested fewer than {FEW_CLIENTS} clients"}
    scale = 100.0 if metric == "error" and found[0][0].about["rates"] else 1.0
    sign = 1.0 if found[0][0].about.get("better", {}).get(metric, "lower") == "lower" else -1.0
    floors = {name: _mean_floor([one["floors"][name] for one in each], scale, sign) for name in shared}
    spreads = [one["spread"] for one in each if one["spread"]]
    return {"floors": floors, "spread": _joined_spread(spreads) if len(spreads) == len(each) else None, "seeds": len(each)}


def _mean_floor(each: Sequence[dict[str, Any]], scale: float, sign: float) -> dict[str, Any]:
    """One floor for several seeds: means of the numbers, times `scale`, and whether they are noise.

    `sign` is 1 where larger values are worse, else -1.
    """
    mean = {name: statistics.fmean(one[name] for one in each) for name in ("observed", "floor", "highest")}
    is_noise = sign * mean["observed"] <= sign * mean["highest"]
    return {**{name: scale * value for name, value in mean.items()}, "is_noise": is_noise}


def _joined_spread(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One share of the variance that is real for several seeds, with an interval that holds all of theirs."""
    return {"share": statistics.fmean(one["share"] for one in each), "share_low": min(one["share_low"] for one in each),
            "share_high": max(one["share_high"] for one in each)}
