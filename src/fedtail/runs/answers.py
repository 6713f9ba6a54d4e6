"""The answer of a comparison: does a method help new clients, how sure is that, and what would it take to tell. No torch.

From the values of single clients in the runs' tables, paired by client key and nested in seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedtail.inference import Interval, Verdict, new_client_interval, verdict
from fedtail.inference.intervals import FEW_IN_TAIL
from fedtail.inference.statistics import statistic_named
from fedtail.inference.verdicts import DO_NOT
from fedtail.runs.answer_words import Cell, change_words, shown_statistic, verdict_words
from fedtail.runs.diverged import diverged_seeds
from fedtail.runs.metric_bounds import RATES, Bounds, metric_bounds, metric_name, turned_bounds
from fedtail.runs.run_folder import RunFolder
from fedtail.runs.values_by_client import ByClient, Compared, tests_training_clients, values_by_client

TAIL = "worst10"
SHOWN = ("mean", "p90", TAIL)                # statistics that every answer has an interval for
CONFIDENCE = 0.95
ENOUGH_SEEDS = 5                             # for the part of intervals that comes from seeds
BySeed = Mapping[int, Compared]              # runs of one method
NO_ANSWER = "none"


def comparison_answers(methods: Mapping[str, Sequence[Compared]], metrics: Iterable[str], tail: str = TAIL,
                       price: float = 1.0) -> list[dict[str, Any]]:
    """An answer for each metric and each method but the first, the baseline; `methods` has its (run, model) pairs by name.

    See `method_answer`. Methods without a seed in common with the baseline are left out. The intervals of all others hold at
    once.
    """
    sides = {name: {run.seed: (run, model) for run, model in found} for name, found in methods.items()}
    baseline = next(iter(sides), "")
    others = {name: own for name, own in list(sides.items())[1:] if set(own) & set(sides[baseline])}
    return [{"method": name, "baseline": baseline, **method_answer(name, own, sides[baseline], metric, tail, price, len(others))}
            for metric in metrics for name, own in others.items()]


def method_answer(name: str, own: BySeed, baseline: BySeed, metric: str = "error", tail: str = TAIL,
                  price: float = 1.0, compared: int = 1) -> dict[str, Any]:
    """Whether to take the method called `name` rather than the baseline, by intervals for new clients, as a dict.

    `own` and `baseline` have (run, model) pairs by seed, at least one seed in common. The entries are `metric`, `better`,
    `unit`, `seeds`, `tail` (a statistic, "worst10" or "p90"), `price`, `answer` ("take it", "do not", "cannot tell" or "none"),
    `clients_needed`, `seeds_needed` (about how many training seeds it would take, where more clients would not tell), `sentence`
    (of which `verdict` and `changes` are the halves) and `estimand`, and for each statistic the difference, method minus
    baseline, with `low` and `high`; percentiles are those of clients who do badly, p10 where higher is better. Error
    rates are in percent. `compared` is how many methods are judged beside each other: each interval has confidence
    1 - 0.05 / `compared`, so that all hold at once with 95%. Clients without a value are left out and counted (`left_out`). A
    method that has diverged for a seed is not to be taken.
    """
    seeds = [seed for seed in own if seed in baseline]
    run = own[seeds[0]][0]
    better, rates = run.about.get("better", {}).get(metric, "lower"), metric == "error" and bool(run.about["rates"])
    about = {"metric": metric, "better": better, "unit": "%" if rates else "", "seeds": seeds, "tail": tail, "price": price}
    refused = why_no_answer(run)
    if refused:
        return {**about, **_no_answer(name, f"no answer about new clients: {refused}")}
    mine, theirs = (values_by_client([side[s] for s in seeds], metric) for side in (own, baseline))
    lost, theirs_lost = (diverged_seeds([side[s] for s in seeds]) for side in (own, baseline))
    if theirs_lost:
        return {**about, **_no_answer(name, "no answer: the model of the baseline has diverged.")}
    if lost:
        return {**about, **_no_answer(name, f"the model has diverged ({len(lost)} of {len(seeds)} seeds).", DO_NOT)}
    if min(_paired_clients(mine, theirs)) < 2:
        return {**about, **_no_answer(name, f"no answer: the {metric} is defined for fewer than two test clients of a seed.")}
    bounds, words = metric_bounds(run.about, metric), metric_name(run.about, metric)
    return {**about, **answer_from_values(name, mine, theirs, words, better, bounds, rates, tail, price, compared),
            "estimand": estimand_words(len(seeds), run)}


def why_no_answer(run: RunFolder) -> str:
    """Why the tested clients of a run say nothing about new clients, as a sentence; "" where they do."""
    if not run.has_client_table:
        return "the values of single clients are not known."
    return "there are no test clients, only training clients." if run.tested_split == "train" else ""


def estimand_words(seeds: int, run: RunFolder) -> str:
    """What the intervals of a comparison with so many seeds are about, in words: which clients, which value, which models."""
    few = "" if seeds >= ENOUGH_SEEDS else f"; fewer than {ENOUGH_SEEDS} seeds, so that intervals are wide"
    models = "for the models that were trained with one seed" if seeds == 1 else f"mean over {seeds} training seeds{few}"
    who = "new clients of the same population"
    if tests_training_clients(run):
        who = "clients of the same population that take part in training as these do, on new examples"
    return f"{who}; observed value of clients of this size; {models}"


def answer_from_values(name: str, mine: Sequence[ByClient], theirs: Sequence[ByClient], metric: str = "error",
                       better: str = "lower", bounds: Bounds = RATES, percent: bool = True, tail: str = TAIL,
                       price: float = 1.0, compared: int = 1) -> dict[str, Any]:
    """The entries of an answer that come from the values of clients: verdict, sentence, and a difference for each statistic.

    `mine` and `theirs` have the values of `metric` by client key, for each seed, those of the method called `name` and of its
    baseline; `bounds` are the least and largest value possible, and `percent` says that values are rates to be shown in
    percent. Of `compared` methods each has an interval of confidence 1 - 0.05 / `compared`, so that all hold at once.
    """
    mine, theirs = ([_worse_is_larger(one, better) for one in side] for side in (mine, theirs))
    confidence = 1 - (1 - CONFIDENCE) / compared
    found = {one: new_client_interval(mine, one, baseline=theirs, bounds=turned_bounds(bounds, better), confidence=confidence)
             for one in dict.fromkeys((*SHOWN, tail))}
    decided: Verdict = verdict(found[tail], found["mean"], price)
    cells = {one: _cell(interval, better, percent, bounds) for one, interval in found.items()}
    mean, seeds_differ = found["mean"], any(one.seed_error > 0 for one in (found[tail], found["mean"]))
    said = verdict_words(decided, percent, seeds_differ, bounds[1] - bounds[0], metric if _is_missing(mine) else "")
    changes = f"each test client has the same {metric} under both" if decided.no_difference else \
        change_words(cells[tail], cells["mean"], metric, better, "%" if percent else "", mean.clients_per_seed)
    changes = f"{changes}.{_wider_tail_hint(found[tail])}"
    return {"answer": decided.answer, "clients_needed": decided.clients, "seeds_needed": decided.seeds, "verdict": said,
            "changes": changes,
            "sentence": f"{name}: {said}; {changes}", "confidence": confidence, "compared": compared, "clients": mean.clients,
            "clients_per_seed": mean.clients_per_seed, "left_out": mean.left_out,
            **{cell["statistic"]: cell for cell in cells.values()}}


def _cell(found: Interval, better: str, percent: bool, bounds: Bounds) -> Cell:
    """An interval of a difference as a dict, in the metric's own direction and shown unit.

    Ends that are not finite, or no narrower than the metric's `bounds`, are None.
    """
    scale = 100.0 if percent else 1.0
    low, high = (found.low, found.high) if better == "lower" else (-found.high, -found.low)
    way = scale if better == "lower" else -scale
    ends = {end: scale * value if math.isfinite(value) else None for end, value in (("low", low), ("high", high))}
    no_interval = bool(found.note) and found.high - found.low >= 2 * (bounds[1] - bounds[0]) * (1 - 1e-9)
    errors = {"client_error": scale * found.client_error, "seed_error": scale * found.seed_error}
    return {"statistic": shown_statistic(found.statistic, better), "estimate": way * found.estimate,
            **(dict.fromkeys(ends) if no_interval else ends),
            **{error: value if math.isfinite(value) else None for error, value in errors.items()}, "note": found.note}


def _wider_tail_hint(tail: Interval) -> str:
    """What to write for a tail that these clients can say something about, after a sentence; "" where there is no need."""
    what = statistic_named(tail.statistic)
    if what.kind == "mean" or what.share * tail.clients_per_seed >= FEW_IN_TAIL - 1e-9 or tail.clients_per_seed < 2 * FEW_IN_TAIL:
        return ""
    percent = math.ceil(100 * FEW_IN_TAIL / tail.clients_per_seed)
    return f" {tail.clients_per_seed} clients can be asked about their worst {percent}%: --tail worst{percent}."


def _no_answer(name: str, text: str, answer: str = NO_ANSWER) -> dict[str, Any]:
    """The entries of an answer without intervals about the method called `name`, with the reason `text`."""
    before = "" if answer == NO_ANSWER else f"{answer}; "
    return {"answer": answer, "clients_needed": None, "seeds_needed": None, "verdict": answer,
            "sentence": f"{name}: {before}{text}", "changes": text, "estimand": "", "confidence": CONFIDENCE, "compared": 1,
            "clients": 0, "clients_per_seed": 0, "left_out": 0, **dict.fromkeys(SHOWN)}


def _worse_is_larger(values: ByClient, better: str) -> ByClient:
    """The values by client key, negated where higher is better."""
    return values if better == "lower" else {key: -value for key, value in values.items()}


def _is_missing(values: Sequence[ByClient]) -> bool:
    """Whether a client of a seed has no (finite) value."""
    return not all(math.isfinite(value) for one in values for value in one.values())


def _paired_clients(mine: list[ByClient], theirs: list[ByClient]) -> list[int]:
    """For each seed, how many clients have a finite value under both."""
    return [sum(math.isfinite(value) and math.isfinite(first.get(key, math.nan)) for key, value in one.items())
            for one, first in zip(mine, theirs, strict=True)]
