"""`fedtail privacy RUN`: the privacy statement of a run, from its ledger, and whether its model may be released."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli.terminal import print_json

if TYPE_CHECKING:
    from fedtail.privacy.ledger import Ledger
    from fedtail.runs import RunFolder

COVERED = "The guarantee covers {models}. metrics.jsonl, result.json and clients.parquet hold exact results: do not release them."
COVERED_THERE = "The guarantee covers {models}. log.txt and answers.jsonl say who participated: do not release them."


def privacy_of_run(run: Path, delta: float | None, for_release: bool, as_json: bool) -> None:
    """Print the privacy statement of a run; with `for_release`, refuse where the guarantee is only simulated."""
    from fedtail.privacy.statement import obstacles, statement
    from fedtail.runs import RunFolder

    folder = RunFolder.open(run, also_deployed=True)
    ledger = ledger_of(folder)
    found = statement(ledger, folder.result["round"] if folder.finished else rounds_so_far(folder), delta)
    problems = obstacles(ledger)
    if for_release and problems:
        raise ValueError(f"{run} is not for release. {'; '.join(problems)}. {_advice(problems)}")
    if as_json:
        print_json({**found, "for_release": not problems})
        return
    show_statement(folder, found)
    if for_release:
        covered = COVERED_THERE if folder.deployed else COVERED
        typer.echo(covered.format(models=", ".join(path.name for path in folder.models)))


def rounds_so_far(folder: RunFolder) -> int:
    """Of a run that is not finished: those whose results are on disk."""
    return folder.privacy.get("rounds", 0) if folder.deployed else max((line["round"] for line in folder.metrics), default=0)


def ledger_of(folder: RunFolder) -> Ledger:
    """The ledger of a run, with the privacy budget it began with."""
    from fedtail.privacy.ledger import Ledger, Terms
    from fedtail.runs.run_folder import LEDGER

    return Ledger(Terms(**folder.about["experiment"].get("privacy", {})), folder.path / LEDGER)


def show_statement(folder: RunFolder, found: dict[str, Any]) -> None:
    """Print the privacy statement of a run: epsilon, what it holds against, and what was released."""
    from fedtail.cli.terminal import show_table

    if not found["private"]:
        typer.echo(f"epsilon is {found['epsilon']} after {found['rounds']} rounds: {found['why']}")
        return
    second = found["second_opinion"]
    typer.echo(found["statement"])
    lines = [
        (f"epsilon at delta {found['delta']:g}, by {found['accountant']}", _number(found["epsilon"])),
        *([(f"second opinion, by {second[0]}", _number(second[1]))] if second else []),
        ("what the server sees", found["channel"]), ("adjacency", found["adjacency"]),
        ("sampling", found["sampling"]), ("against", found["observer"]),
        ("without amplification, a client in one round", _number(found["one_participation"])),
        ("without amplification, a client in every round", _number(found["against_server"])),
        *((f"released: {release['what']}", f"{release['times']} times") for release in found["releases"])]
    show_table(f"{folder.name}, seed {folder.seed}, {found['rounds']} rounds", ["what", "value"], [list(line) for line in lines])
    typer.echo(found["guarantee"])
    for note in found["notes"]:
        typer.echo(f"note: {note}")


def _advice(problems: list[str]) -> str:
    """What to change so that the model of a run may be released."""
    from fedtail.privacy.statement import FLOATING, SIMULATED

    advice = [text for problem, text in ((SIMULATED, 'Run again with [privacy] randomness = "os".'),
                                         (FLOATING, 'Use noise = { part = "DiscreteNoise", ... }.')) if problem in problems]
    return " ".join(advice) or "Use private parts (PrivateMean, Binned)."


def _number(value: float | str) -> str:
    """An epsilon for a table; texts as they are."""
    return value if isinstance(value, str) else f"{value:.3f}" if value < 100 else f"{value:.0f}"
