"""What the page is about, and the table of methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedtail.report.clients import Clients, column
from fedtail.report.methods import Method, is_finished
from fedtail.report.statistics import STATISTICS, over_seeds, paired, summary
from fedtail.runs import RunFolder


def facts(runs: Sequence[RunFolder]) -> dict[str, str]:
    """The header: what ran on what."""
    splits = [{split.replace("_", "-"): count for split, count in run.about["splits"].items()} for run in runs]
    sizes = _distinct(", ".join(f"{count} {split}" for split, count in mine.items()) for mine in splits)
    versions = _distinct(", ".join(f"{k} {v}" for k, v in run.about.get("versions", {}).items()) for run in runs)
    return {"Data": _distinct(str(run.about.get("data", "")) for run in runs), "Clients": sizes,
            "Rounds": _distinct(str(run.about["rounds"]) for run in runs),
            "Seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
            **({"Privacy": promised} if (promised := _distinct(_promise(run) for run in runs)) else {}),
            "Device": _distinct(str(run.about.get("device", "")) for run in runs), "Versions": versions}


def _promise(run: RunFolder) -> str:
    return f"{run.name}: {run.promise}" if run.promise else ""


def notes(runs: Sequence[RunFolder], clients: Clients | None) -> list[str]:
    """What a reader must know before believing the page."""
    told = [_unfinished(run) for run in runs if not is_finished(run)]
    if clients is None:
        told.append("No run has a table over clients yet: only what is recorded round by round is shown.")
    elif not clients.shared:
        told.append("The seeds have different clients, so a client of one seed is not averaged with one of another: "
                    "each is shown on its own, with its seed.")
    return told


def table(methods: Sequence[Method], baseline: int) -> list[dict[str, Any]]:
    """A row for each method: the statistics of the error over test clients, over seeds and against the baseline."""
    by_seed = [{run.seed: last_summary(run, m.member) for run in m.averaged} for m in methods]
    rows = [_row(m, by_seed[k], {} if k == baseline else by_seed[baseline]) for k, m in enumerate(methods)]
    for name in STATISTICS:
        whole = [row["statistics"][name]["mean"] for row in rows if row["finished"]]
        best = min((value for value in whole if value is not None), default=None)
        for row in rows:
            row["statistics"][name]["best"] = bool(row["finished"] and len(whole) > 1 and row["statistics"][name]["mean"] == best)
    return rows


def last_summary(run: RunFolder, member: int) -> dict[str, float]:
    """The error over the clients a page is about, at the last evaluated round: the run's own numbers."""
    line = run.metrics[-1]["members"][member].get(run.tested, {}) if run.metrics else {}
    if "error" in line:
        return {name: math.nan if line["error"].get(name) is None else line["error"][name] for name in STATISTICS}
    if is_finished(run):
        return summary(column(run, run.tested, member, "error"))
    return dict.fromkeys(STATISTICS, math.nan)


def _row(method: Method, mine: dict[int, dict[str, float]], baseline: dict[int, dict[str, float]]) -> dict[str, Any]:
    common = [seed for seed in mine if seed in baseline]
    statistics = {name: over_seeds([numbers[name] for numbers in mine.values()]) for name in STATISTICS}
    for name, cell in statistics.items():
        cell["difference"] = paired([mine[s][name] for s in common], [baseline[s][name] for s in common])
    last = max((run.metrics[-1]["round"] for run in method.averaged if run.metrics), default=None)
    return {"statistics": statistics, "finished": bool(method.finished), "round": last}


def _unfinished(run: RunFolder) -> str:
    done = f"round {run.metrics[-1]['round']} of {run.about['rounds']}" if run.metrics else "before its first evaluation"
    return f"{run.name}, seed {run.seed}, is not finished ({done}); it joins no average of finished runs."


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))
