"""How much of a tail over clients is the noise of their few examples: floors and real spread, for result.json. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedtail.directions import FEW_CLIENTS
from fedtail.errors import FieldError
from fedtail.inference import real_spread
from fedtail.inference.noise_floor import WORST_CLIENT, are_error_rates, noise_floors
from fedtail.reading import short_text
from fedtail.runs.answer_words import shown_statistic
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.run_folder import RunFolder

TAILS = ("p90", "worst10", "worst5")         # of values of which larger are worse
FEW_TAILS = (WORST_CLIENT,)                  # alike, of fewer than 20 clients
DRAWS, MOST_DRAWS = 999, 20_000_000         # simulated populations; values of clients in all of them
WORST_CLIENTS = (WORST_CLIENT, "p0")         # by the metric itself, whichever end is the bad one
REAL, NOISE, UNKNOWN = "real", "noise", "cannot be told"
MOSTLY_REAL = 0.5                            # of the variance over clients: a tail is noise where no more than this may be real
ONE_EXAMPLE = "clients have one example each, and what they differ by cannot be told from noise"
PER_CLIENT = "it is one number for a client, not a mean over its examples"


def variance_column(column: str) -> str:
    """The column of the table over clients with the variance of a metric over a client's examples: "loss_variance" of "loss"."""
    return f"{column}_variance"


class PooledExamples(NamedTuple):
    """A metric of single examples of several clients, `values` (examples,), and the row of the client each is from, `owner`."""

    values: np.ndarray
    owner: np.ndarray


def noise_of_run(run: RunFolder, model: EvaluatedModel, metric: str) -> dict[str, Any]:
    """What `noise_of_columns` finds for the tested clients of a finished run: read from `result.json`, else from its table.

    It is the latter, too, where a run of few clients of an earlier version has floors of shares of them.
    """
    stored = run.result.get("personal_noise" if model.personal else "noise")
    known = stored[model.member].get(metric) if stored and len(stored) > model.member else None
    if known is not None and not (run.has_client_table and _has_shares_of_few(run, known)):
        return known
    if not run.has_client_table:
        return {"reason": "the values of single clients are not known"}
    rates, better = metric == "error" and bool(run.about["rates"]), run.about.get("better", {}).get(metric, "lower")
    return noise_of_columns(run.client_columns(run.tested_split, model.member), model.column(metric), rates, better)


def _has_shares_of_few(run: RunFolder, found: Mapping[str, Any]) -> bool:
    """Whether floors of a run are those of shares of clients, of whom there are too few."""
    return "worst10" in found.get("floors", ()) and len(run.client_columns(run.tested_split, 0)["size"]) < FEW_CLIENTS


def noise_of_columns(rows: Mapping[str, np.ndarray], column: str, rates: bool, better: str,
                     examples: PooledExamples | None = None) -> dict[str, Any]:
    """The noise floor of the tails of a metric, and how much of its spread over clients is real, as a dict for `result.json`.

    `rows` are columns of the table over clients; `column` holds the metric. Error `rates` have binomial noise; means over other
    numbers that of `examples` dealt out anew, or, without them, as for runs of earlier versions, normal noise of the variance in
    `variance_column(column)`. `floors` has, by statistic, `observed`, `floor` (its mean if all clients were alike), `highest`
    (95% of simulations are not above) and `is_noise`: those of a percentile and two shares of the clients or, in a table of fewer
    than 20 clients, that of the worst client, "p100" ("p0" where higher is better). `spread` has the shares of the variance over
    clients that is real, or None for fewer than ten clients. Values are in the metric's own unit. Only `reason` where the noise
    is not known. Clients without a value are left out.
    """
    values = np.array([math.nan if v is None else v for v in rows[column]], float) if column in rows else np.zeros(0)
    variances = np.array(rows.get(variance_column(column), np.full(len(values), np.nan)), float)
    known = np.isfinite(values)
    pool = None if examples is None else examples.values[known[examples.owner]]
    values, variances = values[known], variances[known]
    sizes = np.asarray(rows["size"])[known] if len(values) else np.zeros(0)
    if len(values) < 2:
        return {"reason": "fewer than two clients have a value"}
    if sizes.max() < 2:
        return {"reason": ONE_EXAMPLE}
    binomial = rates and are_error_rates(values, sizes)
    if not binomial and not np.isfinite(variances).any():
        return {"reason": PER_CLIENT}
    sign = 1.0 if better == "lower" else -1.0
    try:
        floors = _floors(sign * values, sizes, None if binomial else variances, None if pool is None else sign * pool,
                         FEW_TAILS if len(known) < FEW_CLIENTS else TAILS)
    except FieldError as refused:            # sizes that no run writes
        return {"reason": short_text(str(refused))}
    turned = {shown_statistic(name, better): _in_metric_direction(found, sign) for name, found in floors.items()}
    return {"floors": turned, "spread": _spread(values, sizes, None if binomial else variances)}


def noise_outcome(found: Mapping[str, Any], tail: str | None = None) -> str:
    """Whether a tail is "real", "noise" or "cannot be told", from an entry of `noise_of_columns` with floors.

    The tail is by default the worst 10% of the clients, or the worst client where there are few. It is real where it is larger
    than 95% of those of clients who are all alike. It is noise where it is not and less than half of the variance over clients
    may be real, by the upper end of its interval. Else nothing is shown either way.
    """
    if not found["floors"][tail or _usual_tail(found)]["is_noise"]:
        return REAL
    return NOISE if found["spread"] and found["spread"]["share_high"] < MOSTLY_REAL else UNKNOWN


def noise_sentence(found: Mapping[str, Any], tail: str | None = None) -> str:
    """A sentence on how much of a tail is noise, from an entry of `noise_of_columns`, that goes by `noise_outcome`.

    Of fewer than ten clients, whose real spread is not estimated, it is said that they are too few to tell.
    """
    if "reason" in found:
        return f"the noise floor is not known: {found['reason']}."
    tail, one = tail or _usual_tail(found), found["spread"]
    worst = tail in WORST_CLIENTS
    this, larger, less = ("the worst client", "worse", "no worse") if worst else ("this tail", "larger", "no larger")
    ends = f"{one['share_low']:.0%} to {one['share_high']:.0%}" if one else ""
    share = f"{one['share']:.0%} of the variance over clients is real ({ends})" if one else ""
    outcome = noise_outcome(found, tail)
    if outcome == REAL:
        if one and one["share_low"] <= 0:    # a test of the tail sees what the variance does not show
            return f"{this} is {larger} than noise makes it, though how much clients differ is not known well: {share}."
        return f"{share}." if share else "clients differ by more than noise."
    as_bad = "clients of these sizes that are all alike {} have as bad a one"
    if not one:                              # a test of few clients that finds nothing says little
        return f"too few clients to tell {this} from noise: {as_bad.format('may')}."
    if outcome == UNKNOWN:
        return f"{this} cannot be told from noise: {as_bad.format('may')}; {share}."
    all_noise = "this tail is all noise, as far as these clients show" if one["share_low"] <= 0 and not worst else \
        f"{this} is {less} than noise alone makes it"
    return f"{all_noise}: {as_bad.format('would')}; {share}."


def _usual_tail(found: Mapping[str, Any]) -> str:
    """The tail that a sentence is about, of those with a floor: the worst 10% of the clients, or the worst of few."""
    return "worst10" if "worst10" in found["floors"] else next(name for name in WORST_CLIENTS if name in found["floors"])


def unknown_floor_sentence(found: Mapping[str, Any], metric: str) -> str:
    """That a tail of this metric may be noise and has no floor by which to tell, from an entry of `noise_of_columns`.

    "" where there is a floor, or where nothing is known of the clients.
    """
    reason = found.get("reason")
    return f"How much of a tail of the {metric} is noise is not known: {reason}." if reason in (PER_CLIENT, ONE_EXAMPLE) else ""


def _floors(values: np.ndarray, sizes: np.ndarray, variances: np.ndarray | None, pool: np.ndarray | None,
            tails: tuple[str, ...]) -> dict[str, Any]:
    """The noise floor of each of `tails`, by statistic.

    `variances` are those over each client's examples, (clients,), None for error rates; `pool` the values of single examples,
    None where they are not known.
    """
    draws = int(max(199, min(DRAWS, MOST_DRAWS / len(values))))
    noise: dict[str, Any] = {} if variances is None else \
        {"example_losses": pool} if pool is not None else {"example_variance": _pooled(variances, sizes - 1)}
    return dict(zip(tails, noise_floors(values, sizes, tails, draws=draws, **noise), strict=True))


def _in_metric_direction(found: Any, sign: float) -> dict[str, Any]:
    """A `NoiseFloor` of values times `sign` as a dict of values themselves."""
    return {"observed": sign * found.observed, "floor": sign * found.floor, "highest": sign * found.highest,
            "is_noise": found.is_noise}


def _spread(values: np.ndarray, sizes: np.ndarray, variances: np.ndarray | None) -> dict[str, Any] | None:
    """How much of the spread is real, as a dict; None where there are too few clients with two or more examples."""
    try:
        found = real_spread(values, sizes, example_variances=variances)
    except FieldError:
        return None
    return {"share": found.share, "share_low": found.share_low, "share_high": found.share_high, "std": found.std,
            "low": found.low, "high": found.high if math.isfinite(found.high) else None, "observed_std": found.observed_std,
            "is_noise": found.is_noise}


def _pooled(moments: np.ndarray, freedom: np.ndarray) -> float:
    """A variance over examples within clients, pooled by degrees of freedom; clients without one are left out, 0 without any."""
    known = np.isfinite(moments) & (freedom > 0)
    return float(moments[known] @ freedom[known] / max(freedom[known].sum(), 1))
