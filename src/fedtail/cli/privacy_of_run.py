"""`fedtail privacy RUN`: the privacy statement of a run, from its ledger, and whether its model may be released."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli.terminal import print_json

if TYPE_CHECKING:
    from fedtail.privacy.ledger import Ledger
    from fedtail.runs import RunFolder

UNITS = {"client": "a client, with all its examples", "example": "one example, not a client with all its examples"}
UNVERIFIED = "whether its ledger is whole cannot be verified: no checkpoint of the run holds a digest of it"
COVERED = "The guarantee covers {models}. metrics.jsonl, result.json and clients.parquet hold exact results: do not release them."
COVERED_THERE = "The guarantee covers {models}. log.txt and answers.jsonl say who participated: do not release them."


def show_privacy_of_run(run: Path, delta: float | None, for_release: bool, as_json: bool, group: int | None = None) -> None:
    """Print the privacy statement of the run in the folder `run`, computed from its ledger; as JSON with `as_json`.

    It is at `delta`, or at the run's own where that is None. With a `group`, also for so many clients or examples together.
    With `for_release`, raises ValueError, with all reasons, where the model may not be released: for example a release without
    noise, a simulated guarantee, or a ledger that cannot be verified. Raises LedgerError where the ledger was changed.
    """
    from fedtail.privacy.group_privacy import group_privacy
    from fedtail.privacy.statement import guarantee_change, privacy_statement, release_obstacles
    from fedtail.runs import RunFolder

    folder = RunFolder.open(run, also_deployed=True)
    ledger = open_ledger(folder)
    doubts = ledger_problems(folder, ledger)
    rounds = folder.result["round"] if folder.is_finished else rounds_so_far(folder)
    found = privacy_statement(ledger, rounds, delta, folder.not_charged_sentences)
    change = guarantee_change(ledger, folder.privacy)
    found["repriced"] = [*folder.privacy.get("repriced", []), *([change] if change else [])]
    problems = [*doubts, *release_obstacles(ledger)]
    if for_release and problems:
        raise ValueError(f"{run} is not for release. {'; '.join(problems)}. {_release_advice(problems)}")
    if doubts and found["private"]:
        found["notes"] += doubts
    together = None
    if group is not None and found["private"]:
        together = group_privacy(ledger.rounds, group, found["delta"], ledger.budget.adjacency)
    if as_json:
        print_json({**found, **({"group": asdict(together)} if together else {}), "for_release": not problems})
        return
    show_statement(folder, found)
    typer.echo(f"{together}" if together else "", nl=together is not None)
    if for_release:
        covered = COVERED_THERE if folder.is_deployed else COVERED
        typer.echo(covered.format(models=", ".join(path.name for path in folder.models)))


def rounds_so_far(folder: RunFolder) -> int:
    """The number of rounds of the unfinished run in `folder`: by its privacy.json if it is deployed, else the last evaluated one.

    0 where there is none.
    """
    return folder.privacy.get("rounds", 0) if folder.is_deployed else max((line["round"] for line in folder.metrics), default=0)


def open_ledger(folder: RunFolder) -> Ledger:
    """The ledger in a run's folder, with the privacy budget and the source of randomness of the run's experiment."""
    from fedtail.privacy.ledger import Ledger, PrivacyBudget
    from fedtail.runs.run_folder import LEDGER

    budget = PrivacyBudget(**folder.about["experiment"].get("privacy", {}))
    return Ledger(budget, folder.path / LEDGER, unrecorded=budget.randomness)      # which a run cannot change


def ledger_problems(folder: RunFolder, ledger: Ledger) -> list[str]:
    """Compare the ledger of the run in `folder` with the digests in its newest checkpoint and, if it is finished, in its result.

    Raises LedgerError where it does not begin with what it held then. Returns [], or a list with the text UNVERIFIED where the
    run left no digest to compare with.
    """
    from fedtail.privacy.ledger_file import LedgerMark
    from fedtail.runs.checkpoint import ledger_mark

    newest = ledger_mark(folder.path)
    at_end = folder.result.get("ledger") if folder.is_finished else None
    if newest is not None and newest[1] is not None:
        ledger.check_against_mark(newest[1], newest[0])
    if at_end is not None:
        ledger.check_against_mark(LedgerMark(*at_end), folder.result["round"])
    return [] if at_end is not None or (newest is not None and newest[1] is not None) else [UNVERIFIED]


def show_statement(folder: RunFolder, found: dict[str, Any]) -> None:
    """Print the privacy statement `found` of the run in `folder`: epsilon, what it protects and against whom, releases and notes.

    For a run without privacy, only two lines: why epsilon is infinite, and what the unit of privacy is.
    """
    from fedtail.cli.terminal import show_table
    from fedtail.privacy.statement import describe_guarantee_change

    if not found["private"]:
        typer.echo(f"epsilon is {found['epsilon']} after {found['rounds']} rounds: {found['why']}")
        typer.echo(f"{found['unit']}-level, {found['neighbours']}; against {found['observer']}")
        return
    second, one = found["second_opinion"], "an example" if found["unit"] == "example" else "a client"
    typer.echo(found["statement"])
    lines = [
        (f"epsilon at delta {found['delta']:g}, by {found['accountant']}", _epsilon_text(found["epsilon"])),
        *([(f"second opinion, by {second[0]}", _epsilon_text(second[1]))] if second else []),
        ("what the server sees", found["channel"]), ("unit", UNITS[found["unit"]]),
        ("adjacency", f"{found['adjacency']}: {found['neighbours']}"),
        ("sampling", found["sampling"]), ("against", found["observer"]),
        (f"without amplification, {one} in one round", _epsilon_text(found["one_participation"])),
        (f"without amplification, {one} in every round", _epsilon_text(found["without_amplification"])),
        *((f"released: {release['what']}", f"{release['times']} times") for release in found["releases"])]
    show_table(f"{folder.name}, seed {folder.seed}, {found['rounds']} rounds", ["what", "value"], [list(line) for line in lines])
    typer.echo(found["guarantee"])
    for change in found["repriced"]:
        typer.echo(f"repriced: {describe_guarantee_change(change)}")
    for text in found["not_charged"]:
        typer.echo(f"not charged: {text}")
    for note in found["notes"]:
        typer.echo(f"note: {note}")


def _release_advice(problems: list[str]) -> str:
    """What to change so that a model may be released: one sentence for each kind among `problems`, joined to one text.

    Problems are told apart by how their texts begin; where none is known, the advice is to use private parts.
    """
    from fedtail.privacy.accounting import ONLY
    from fedtail.privacy.statement import FLOATING, SIMULATED, UNTOLD

    known = ((SIMULATED, 'Run again with [privacy] randomness = "os".'), (UNTOLD, "Run again."), (UNVERIFIED, "Run again."),
             (ONLY, "Start from a model whose history is known and private, or release nothing."),
             (FLOATING, 'Use noise = { part = "DiscreteNoise", ... }.'))
    advice = list(dict.fromkeys(text for start, text in known if any(problem.startswith(start) for problem in problems)))
    return " ".join(advice) or "Use private parts (PrivateMean, Binned)."


def _epsilon_text(value: float | str) -> str:
    """The text of an epsilon, `value`, in a table: three decimals below 100, none above; a text like "infinite" unchanged."""
    return value if isinstance(value, str) else f"{value:.3f}" if value < 100 else f"{value:.0f}"
