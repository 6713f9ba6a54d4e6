"""What a node has done, from its own files: whom it answered last, what it refused and why, what is left of its budget."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtail.deployment.audit_log import AUDIT, Head, verify
from fedtail.deployment.consent import Consent, read_accepted
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.told import experiment_sentence, left_sentences
from fedtail.escaping import one_line
from fedtail.secure.encoding import Refused

MOST = 5                                  # reasons of refusals that are told
CHAIN = ("line", "before")                # of each line of a log, not for people


def status_sentences(settings: NodeSettings) -> Iterator[str]:
    """Yields lines about what the node with these settings takes part in and has done, from its files; nothing is written.

    The data are not read. Raises ValueError where settings, experiment or policy are not valid.
    """
    experiments, budget = settings.read_experiments(), settings.data_budget()
    yield f"{settings.name}, clients in {settings.data}"
    try:
        Consent.of(settings, experiments).check()
        yield f"takes part in {read_accepted(settings)['digest']}:"
    except Refused as why:
        yield f"answers nothing: {why}"
    yield from (f"  {experiment_sentence(one)}" for one in experiments)
    entries, problems = node_log(settings)
    yield from activity_sentences(entries)
    yield from (f"AUDIT LOG: {one}" for one in problems)
    yield f"budget: {budget.policy.budget_text}"
    yield f"spent: {budget.spent_text()}"
    yield from left_sentences(experiments, budget)


def node_log(settings: NodeSettings) -> tuple[list[dict[str, Any]], list[str]]:
    """The pair (entries, problems in words) of the node's audit log, compared with the consent that names a line of it."""
    given = read_accepted(settings)
    if not given and not settings.audit_file.is_file():
        return [], []
    return verify(settings.audit_file, [("accepted.json", Head(*given["log"]))] if given else [])


def activity_sentences(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yields lines about the last answer, the rounds of each training, and what was refused how often, the last reasons first."""
    answered = [one for one in entries if one.get("what") == "answered"]
    yield f"answered last: {answered[-1]['time']}, round {answered[-1]['round']}" if answered else "answered nothing yet"
    rounds: dict[str, set[int]] = {}
    for one in entries:
        if one.get("what") == "opened":
            rounds.setdefault(str(one["training"]), set()).add(int(one["round"]))
    for training, held in list(rounds.items())[-MOST:]:
        yield f"  training {training[:12]}: {len(held)} rounds, {min(held)} to {max(held)}"
    refused = Counter(str(one["why"]) for one in entries if one.get("what") == "refused")
    last = {str(one["why"]): one["time"] for one in entries if one.get("what") == "refused"}
    yield f"refused: {refused.total() or 'nothing'}{' messages' if refused else ''}"
    for why in sorted(refused, key=lambda text: last[text], reverse=True)[:MOST]:
        yield f"  {refused[why]} times, last {last[why]}: {one_line(why)}"


def entry_text(entry: dict[str, Any]) -> str:
    """A line of a log for people: the time, what happened, and what is said about it."""
    about = " ".join(f"{name}={value}" for name, value in entry.items() if name not in (*CHAIN, "time", "what"))
    return one_line(f"{entry.get('time', '?')}  {entry.get('what', '?')}  {about}")


def compare_logs(server: list[dict[str, Any]], node: list[dict[str, Any]]) -> list[str]:
    """What a node answered in the trainings of a run that the run's log does not hold as asked, in words; [] for nothing.

    Both sides log the digest that masks are bound to: of the round, the model, the question and the cohort.
    """
    asked = {str(one.get("context")): str(one.get("training")) for one in server if one.get("what") == "asked"}
    answered = [{name: str(value) for name, value in one.items()} for one in node if one.get("what") == "answered"]
    trainings, nothing = set(asked.values()), {"round": "?", "time": "?", "context": "?"}
    text = "round {round}, {time}: the node answered {context:.16}, which the server's log does not ask"
    return [one_line(text.format(**nothing | one))
            for one in answered if one.get("training") in trainings and one.get("context") not in asked]


def run_log(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The pair (entries, problems in words) of the audit log of a run in `folder`, compared with what answers.jsonl names."""
    answers = folder / "answers.jsonl"
    text = answers.read_bytes() if answers.is_file() else b""
    lines = [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    return verify(folder / AUDIT, [("answers.jsonl", Head(*line["audit"])) for line in lines if "audit" in line])


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The pair (entries, problems in words) of an audit log at `path`, or in the folder `path`."""
    return verify(path / AUDIT if path.is_dir() else path)
