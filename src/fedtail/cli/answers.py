"""What commands print about how sure a result is: verdicts, noise floors and promises about new clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fedtail.runs import RunFolder


def show_answers(answers: list[dict[str, Any]], split: str, metrics: Iterable[str] = ("error",)) -> None:
    """Print the verdicts about these metrics, a sentence for each method, then what their intervals are about.

    `answers` are those of `comparison_answers`; `split` says whether seeds have splits of their own. What is the same for all
    metrics, as of a method that has diverged, is said once.
    """
    shown = [one for metric in metrics for one in answers if one["metric"] == metric]
    for text in dict.fromkeys(one["sentence"] for one in shown):
        typer.secho(text, bold=True)
    told = [one for one in shown if one["estimand"]]
    several = len({_interval_note(one, split) for one in told}) > 1
    for text in dict.fromkeys(_interval_note(one, split, one["metric"] if several else "") for one in told):
        typer.echo(text)


def show_noise(rows: list[dict[str, Any]]) -> None:
    """Print, for each row of `rows_by_method`, how much of the spread over clients is real; a tail that is all noise is red.

    Of a metric whose tail has no floor, such as an AUC, that is said once. Rows of which nothing is known are left out, and so
    are those of models that have diverged.
    """
    from fedtail.runs.client_noise import NOISE, noise_outcome, noise_sentence, unknown_floor_sentence

    for row in rows:
        if "floors" in row["noise"] and not row["diverged"]:
            all_noise = noise_outcome(row["noise"]) == NOISE
            typer.secho(f"{row['method']}: {noise_sentence(row['noise'])}", fg=typer.colors.RED if all_noise else None)
    for text in dict.fromkeys(unknown_floor_sentence(row["noise"], row["metric"]) for row in rows if not row["diverged"]):
        if text:
            typer.echo(text)


def show_promises(runs: list[RunFolder], metric: str = "error") -> None:
    """Print what the one model of a run promises about new clients, or why it does not; of several models, where to find it."""
    from fedtail.runs.comparison import metric_direction, metric_unit
    from fedtail.runs.metric_bounds import metric_name
    from fedtail.runs.promise_entries import promise_sentences

    entries = [found[metric] for run in runs for found in run.result.get("promises", ()) if metric in found]
    better, percent = metric_direction(runs[0], metric), bool(metric_unit(runs[0], metric))
    words = metric_name(runs[0].about, metric)
    told = dict.fromkeys(text for one in entries for text in promise_sentences(one, words, better, percent)
                         if len(entries) == 1 or "reason" in one)
    for text in told:
        typer.echo(text[0].upper() + text[1:])
    if any("reason" not in one for one in entries) and len(entries) > 1:
        typer.echo(_few_held_out(entries) or "What each model promises about new clients is in its result.json, and for all at "
                                             "once on the page.")


def _few_held_out(entries: list[dict[str, Any]]) -> str:
    """That no model promises anything, and how many held-out clients it takes; "" where one has a bound."""
    bounds = [one for entry in entries for one in entry.values() if isinstance(one, dict) and "bound" in one]
    needed = [one["clients_needed"] for one in bounds if one["clients_needed"]]
    if not needed or any(one["bound"] is not None for one in bounds):
        return ""
    held = min(entry["clients"] for entry in entries if "clients" in entry)
    return f"No promise about new clients: it takes {min(needed)} held-out clients, and there are {held}."


def _interval_note(one: dict[str, Any], split: str, metric: str = "") -> str:
    """What the intervals of an answer are about, in a sentence that names the `metric`, where that is given."""
    from fedtail.runs.answer_words import confidence_words

    seeds = "" if len(one["seeds"]) == 1 else f"; split {split}"
    left = f"; {one['left_out']} values that are not defined or not paired left out" if one["left_out"] else ""
    what = f", of the {metric}" if metric else ""
    return (f"In brackets{what}: {confidence_words(one['confidence'], one['compared'])} for {one['estimand']} "
            f"({one['clients_per_seed']} test clients a seed, {one['clients']} in all{seeds}{left}).")
