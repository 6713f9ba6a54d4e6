"""What commands print about how sure a result is: verdicts, noise floors and promises about new clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fedtail.runs import RunFolder


def show_answers(answers: list[dict[str, Any]], split: str, metric: str = "error") -> None:
    """Print the verdicts about one metric, a sentence for each method, then what their intervals are about.

    `answers` are those of `comparison_answers`; `split` says whether seeds have splits of their own.
    """
    shown = [one for one in answers if one["metric"] == metric]
    for one in shown:
        typer.secho(one["sentence"], bold=True)
    for text in dict.fromkeys(_interval_note(one, split) for one in shown if one["estimand"]):
        typer.echo(text)


def show_noise(rows: list[dict[str, Any]]) -> None:
    """Print, for each row of `rows_by_method`, how much of the spread over clients is real; a tail that is all noise is red."""
    from fedtail.runs.client_noise import noise_sentence

    for row in rows:
        all_noise = row["noise"].get("floors", {}).get("worst10", {}).get("is_noise")
        typer.secho(f"{row['method']}: {noise_sentence(row['noise'])}", fg=typer.colors.RED if all_noise else None)


def show_promises(runs: list[RunFolder]) -> None:
    """Print what the models of runs promise about new clients: a line for each run and model, or why they do not."""
    from fedtail.runs.promise_entries import promise_sentences

    lines: dict[str, list[str]] = {}
    for run in runs:
        better, percent = run.about.get("better", {}).get("error", "lower"), bool(run.about["rates"])
        for member, found in zip(run.members, run.result.get("promises", ()), strict=False):
            about = f"{member}, seed {run.seed}" if len(run.members) > 1 else f"seed {run.seed}"
            for text in promise_sentences(found["error"], "error", better, percent) if "error" in found else ():
                lines.setdefault(text, []).append(about)
    for text, about in lines.items():
        typer.echo(f"{text[0].upper()}{text[1:]}" + ("" if len(runs) == len(lines) == 1 else f"  [{'; '.join(about)}]"))


def _interval_note(one: dict[str, Any], split: str) -> str:
    """What the intervals of an answer are about, in a sentence."""
    seeds = "" if len(one["seeds"]) == 1 else f"; split {split}"
    left = f"; {one['left_out']} values that are not defined or not paired left out" if one["left_out"] else ""
    return (f"In brackets: {one['confidence']:.0%} intervals for {one['estimand']} ({one['clients_per_seed']} test clients a seed, "
            f"{one['clients']} in all{seeds}{left}).")
