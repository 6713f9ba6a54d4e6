"""The answer on a page: verdicts with intervals for new clients, what of the tails is noise, and promises about new clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedtail.directions import FEW_CLIENTS
from fedtail.report.methods import Method
from fedtail.runs import RunFolder
from fedtail.runs.answer_words import confidence_words, digits_for, rounded_text, shown_statistic
from fedtail.runs.answers import TAIL, method_answer
from fedtail.runs.client_noise import NOISE, noise_outcome, noise_sentence, unknown_floor_sentence
from fedtail.runs.comparison import ONE_SPLIT, REDRAWN, metric_direction, metric_unit
from fedtail.runs.metric_bounds import metric_bounds
from fedtail.runs.noise_over_seeds import noise_over_seeds
from fedtail.runs.promise_entries import CONFIDENCE, NOTHING_EXCLUDED, promise_entry, shown_bound
from fedtail.runs.values_by_client import Compared, is_split_redrawn, values_by_client

ANSWERS_STYLE, ANSWERS_TEMPLATE = "answers.css", "answers.html.j2"
NO_BOUND = "none"
KINDS = {"take it": "take", "do not": "not", "cannot tell": "open"}


def answers_section(methods: Sequence[Method], baseline: int, metrics: Sequence[str], tail: str = TAIL,
                    price: float = 1.0) -> dict[str, Any]:
    """The data of the page's first section, as a dict; `baseline` is a position in `methods`.

    Verdicts are about the statistic `tail`, and the mean may pay `price` for each unit that it gains.
    `panels` has, for each of `metrics`, the answers about each other method (`rows`, and what they are about), `noise`, a
    sentence for each method on how much of its tail is noise, `no_floor`, one that this is not known, and `promises`, what each
    finished model promises about new clients, all at once. `floors` has, by metric and for each method, what a statistic would be
    if all clients were alike;
    `split` says whether seeds have splits of their own.
    """
    found = {metric: [noise_over_seeds(_pairs(m), metric) if m.runs_with_table else {} for m in methods] for metric in metrics}
    runs = {run.path: run for m in methods for run in m.runs_with_table.values()}
    return {
        "panels": [{**_metric_verdicts(methods, baseline, metric, tail, price), "noise": _noise_lines(methods, found[metric]),
                    "no_floor": next((text for one in found[metric] if (text := unknown_floor_sentence(one, metric))), ""),
                    "promises": _promises(methods, metric)} for metric in metrics],
        "floors": {metric: [_floors(one, methods[0].runs[0], metric) for one in found[metric]] for metric in metrics},
        "split": REDRAWN if is_split_redrawn(list(runs.values())) else ONE_SPLIT,
    }


def _noise_lines(methods: Sequence[Method], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each method on how much of its tail is noise, and whether all of it is.

    None where it is not known, and for models that have diverged, whose spread says nothing.
    """
    return [{"label": m.label, "text": noise_sentence(one), "all_noise": noise_outcome(one) == NOISE}
            for m, one in zip(methods, found, strict=True) if "floors" in one and not m.diverged_seeds]


def _floors(found: dict[str, Any], run: RunFolder, metric: str) -> dict[str, float]:
    """The noise floors of a metric by statistic, as fractions of one for error rates."""
    scale = 100.0 if metric_unit(run, metric) else 1.0
    return {name: floor["floor"] / scale for name, floor in found.get("floors", {}).items()}


def _pairs(method: Method) -> list[Compared]:
    """The (run, model) pairs of a method whose runs have a table over clients."""
    return [(run, method.model) for run in method.runs_with_table.values()]


def _metric_verdicts(methods: Sequence[Method], baseline: int, metric: str, tail: str, price: float) -> dict[str, Any]:
    """The answers about one metric for each method but the baseline that shares a finished seed with it.

    A dict of `metric`, `better`, `unit`, `rows` and what the intervals are about. A row has the position of its method, the
    verdict, its sentence, and `bars`, the tail and the mean with the places of their intervals on one axis, in percent.
    """
    sides = [{run.seed: (run, model) for run, model in _pairs(m)} for m in methods]
    others = [k for k in range(len(methods)) if k != baseline and set(sides[k]) & set(sides[baseline])]
    rows = [{"method": k, **method_answer(methods[k].label, sides[k], sides[baseline], metric, tail, price, len(others))}
            for k in others]
    known = [row for row in rows if row["estimand"]]
    axis = _axis(cell for row in known for cell in (_tail_cell(row, tail), row["mean"]))
    shown = [{"method": row["method"], "kind": KINDS.get(row["answer"], "none"), "verdict": row["verdict"],
              "changes": row["changes"],
              "bars": [_bar(_short_name(cell), cell, axis, row["better"]) for cell in (_tail_cell(row, tail), row["mean"])
                       if cell["statistic"] == "mean" or row["clients_per_seed"] >= FEW_CLIENTS]
              if row["estimand"] else []} for row in rows]
    first: dict[str, Any] = known[0] if known else {}
    return {"metric": metric, "better": metric_direction(methods[0].runs[0], metric), "unit": rows[0]["unit"] if rows else "",
            "rows": shown, "zero": 100 * -axis[0] / (axis[1] - axis[0]), "estimand": first.get("estimand", ""),
            "intervals": confidence_words(first["confidence"], first["compared"]) if first else "",
            "clients": first.get("clients", 0), "clients_per_seed": first.get("clients_per_seed", 0), "price": price,
            "seeds": len(first.get("seeds", ())), "left_out": first.get("left_out", 0)}


def _tail_cell(answer: dict[str, Any], tail: str) -> dict[str, Any]:
    """The difference in the statistic `tail`, which is called p10 instead of p90 where higher values are better."""
    return answer[shown_statistic(tail, answer["better"])]


def _short_name(cell: dict[str, Any]) -> str:
    """The statistic of a difference as the name of its bar: "worst 10%", "p90", "mean"."""
    name = cell["statistic"]
    return f"worst {name.removeprefix('worst')}%" if name.startswith("worst") else name


def _axis(cells: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """The ends of an axis that holds zero and all intervals, with a margin of 5%; (-1, 1) where all are zero."""
    ends = [0.0, *(cell[end] for cell in cells for end in ("estimate", "low", "high") if cell[end] is not None)]
    low, high = min(ends), max(ends)
    margin = 0.05 * (high - low)
    return (low - margin, high + margin) if high > low else (-1.0, 1.0)


def _bar(name: str, cell: dict[str, Any], axis: tuple[float, float], better: str) -> dict[str, Any]:
    """A difference with its interval as places on the axis, in percent of its width, and as text.

    `way` is "better", "worse" or "open", for an interval that holds zero or has no ends.
    """
    def place(value: float) -> float:
        """Where a value is on the axis, in percent of its width."""
        return round(100 * (value - axis[0]) / (axis[1] - axis[0]), 3)

    digits, known = digits_for(cell), cell["low"] is not None and cell["high"] is not None
    sign = 1 if better == "lower" else -1
    way = "open" if not known or cell["low"] <= 0 <= cell["high"] else "better" if sign * cell["estimate"] < 0 else "worse"
    low, high = (place(cell["low"]), place(cell["high"])) if known else (0.0, 100.0)
    ends = f"{_signed(cell['low'], digits)} to {_signed(cell['high'], digits)}" if known else "no interval"
    return {"name": name, "way": way, "known": known, "dot": place(cell["estimate"]), "low": low, "width": round(high - low, 3),
            "estimate": _signed(cell["estimate"], digits), "ends": ends}


def _signed(value: float, digits: int) -> str:
    """A number with its sign, a minus of its own and no negative zero."""
    text = rounded_text(value, digits)
    return "\N{MINUS SIGN}" + text[1:] if text.startswith("-") else f"+{text}"


def _promises(methods: Sequence[Method], metric: str) -> dict[str, Any]:
    """What the models of all finished runs promise about new clients in a metric, all at once, whichever is chosen.

    With k models each has confidence 1 - 0.05 / k, so that all hold together with 95%. A dict of `models`, a row for each
    method with its seeds and bounds as text, `refused` (reasons), the joint `confidence`, the `count` of models, whether there
    is `any` bound at all, and whether the metric is `undefined` for a client. A model that has diverged promises nothing; it is
    counted, as it is these clients who show it.
    """
    entries = [(m, run, entry) for m in methods if not m.personal for run in m.runs_with_table.values()
               if (entry := _stored_promise(run, m.member, metric)) is not None]
    lost = [(m, run) for m, run, _ in entries if run.seed in m.diverged_seeds]
    held = [(m, run) for m, run, entry in entries if "reason" not in entry and (m, run) not in lost]
    refused = list(dict.fromkeys(entry["reason"] for m, run, entry in entries if "reason" in entry and (m, run) not in lost))
    refused += dict.fromkeys(f"{m.label}: the model has diverged." for m, _ in lost)
    if any(m.personal for m in methods):
        refused.append("personal models: a new client has none, so nothing is promised about them.")
    count = len(held) + len(lost)
    each = 1 - (1 - CONFIDENCE) / max(count, 1)
    rows = [(m, [_promised(m, run, metric, each) for one, run in held if one is m]) for m in methods]
    texts = [text for _, found in rows for one in found for text in one["bounds"].values()]
    return {"models": [_promise_row(m.label, found) for m, found in rows if found], "refused": refused, "confidence": CONFIDENCE,
            "undefined": any("undefined" in entry for _, _, entry in entries), "count": count,
            "any": any(not text.startswith(NO_BOUND) for text in texts)}


def _promise_row(label: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The promises of a method's models, one for each seed: its label, seeds, clients, and the texts of bounds by statistic."""
    held, tested = (sorted({one[which] for one in found}) for which in ("clients", "tested"))
    clients, every = (str(few[0]) if len(few) == 1 else f"{few[0]} to {few[-1]}" for few in (held, tested))
    clients = clients if held == tested else f"{clients} of {every}"
    return {"label": label, "seeds": [one["seed"] for one in found], "clients": clients,
            "bounds": {name: [one["bounds"][name] for one in found] for name in found[0]["bounds"]}}


def _stored_promise(run: RunFolder, member: int, metric: str) -> dict[str, Any] | None:
    """What `result.json` says about new clients under the model at position `member`; None where an old run says nothing."""
    found = run.result.get("promises")
    return found[member].get(metric) if found else None


def _promised(method: Method, run: RunFolder, metric: str, confidence: float) -> dict[str, Any]:
    """The bounds of one finished model at this confidence, as texts by statistic, with its seed and numbers of clients.

    Those are `clients`, who have a value, of all that were `tested`.
    """
    [every] = values_by_client([(run, method.model)], metric)
    values = {key: value for key, value in every.items() if math.isfinite(value)}      # the others were found not defined
    better, percent = metric_direction(run, metric), bool(metric_unit(run, metric))
    entry = promise_entry(values, (), metric_bounds(run.about, metric), better, confidence)
    bounds = {name: _bound_text(one, percent, better) for name, one in entry.items() if isinstance(one, dict)}
    return {"seed": run.seed, "clients": entry["clients"], "tested": len(every), "bounds": bounds}


def _bound_text(one: dict[str, Any], percent: bool, better: str) -> str:
    """A bound as text, "34.2%", or why there is none: how many clients it takes."""
    if one["note"] == NOTHING_EXCLUDED:
        return f"{NO_BOUND}: excludes nothing"
    if one["bound"] is not None:
        return shown_bound(one["bound"], percent, better)
    why = f"takes {one['clients_needed']} clients" if one["clients_needed"] else "the metric has no bound"
    return f"{NO_BOUND}: {why}"
