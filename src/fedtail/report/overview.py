"""What a page is about, the table of its methods, and its families of models with the clients' picks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedtail.report.client_errors import PageClients, by_seed, column
from fedtail.report.methods import SYMBOLS, TAIL_FRACTION, Method, MethodFamily, is_finished, tick
from fedtail.report.statistics import STATISTICS, classes, mean_and_std_over_seeds, page_numbers, paired, summary
from fedtail.runs import RunFolder

JUDGED = ("mean", "p90", "worst10")


def facts(runs: Sequence[RunFolder]) -> dict[str, str]:
    """The header: what ran on what."""
    splits = [{split.replace("_", "-"): count for split, count in run.about["splits"].items()} for run in runs]
    sizes = _distinct(", ".join(f"{count} {split}" for split, count in mine.items()) for mine in splits)
    versions = _distinct(", ".join(f"{k} {v}" for k, v in run.about.get("versions", {}).items()) for run in runs)
    return {"Data": _distinct(str(run.about.get("data", "")) for run in runs), "Clients": sizes,
            "Rounds": _distinct(str(run.about["rounds"]) for run in runs),
            "Seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
            **({"Privacy": promised} if (promised := _distinct(_privacy_line(run) for run in runs)) else {}),
            "Device": _distinct(str(run.about.get("device", "")) for run in runs), "Versions": versions}


def _privacy_line(run: RunFolder) -> str:
    """The privacy guarantee of a run with its name; nothing where it has none."""
    return f"{run.name}: {run.privacy_line}" if run.privacy_line else ""


def notes(runs: Sequence[RunFolder], clients: PageClients | None) -> list[str]:
    """What a reader must know before believing the page."""
    found = [_unfinished(run) for run in runs if not is_finished(run)]
    found += [text for run in runs if run.is_deployed and (text := _from_sums(run))]
    if clients is None and not any(run.is_deployed for run in runs):
        found.append("No run has a table over clients yet: only what is recorded round by round is shown.")
    elif clients is not None and not clients.shared:
        found.append("The seeds have different clients, so a client of one seed is not averaged with one of another: "
                    "each is shown on its own, with its seed.")
    return found


def methods_table(methods: Sequence[Method], baseline: int) -> list[dict[str, Any]]:
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
    line = run.metrics[-1]["members"][member].get(run.tested_split, {}) if run.metrics else {}
    if "error" in line:
        return {name: math.nan if line["error"].get(name) is None else line["error"][name] for name in STATISTICS}
    if run.has_client_table:
        return summary(column(run, run.tested_split, member, "error"))
    return dict.fromkeys(STATISTICS, math.nan)


def _row(method: Method, mine: dict[int, dict[str, float]], baseline: dict[int, dict[str, float]]) -> dict[str, Any]:
    """The row of a method: statistics over seeds, and paired differences to the baseline."""
    common = [seed for seed in mine if seed in baseline]
    statistics = {name: mean_and_std_over_seeds([numbers[name] for numbers in mine.values()]) for name in STATISTICS}
    for name, cell in statistics.items():
        cell["difference"] = paired([mine[s][name] for s in common], [baseline[s][name] for s in common])
    last = max((run.metrics[-1]["round"] for run in method.averaged if run.metrics), default=None)
    return {"statistics": statistics, "finished": bool(method.finished), "round": last}


def _unfinished(run: RunFolder) -> str:
    """A note about a run that is not finished."""
    done = f"round {run.metrics[-1]['round']} of {run.about['rounds']}" if run.metrics else "before its first evaluation"
    return f"{run.name}, seed {run.seed}, is not finished ({done}); it joins no average of finished runs."


def _from_sums(run: RunFolder) -> str:
    """What a reader must know of a run whose clients are known by sums only."""
    about = next((line["members"][0][run.tested_split].get("error") for line in reversed(run.metrics) if line["members"]), None)
    if not about:
        return ""
    noise = f", and noise of standard deviation {about['noise']:.3g} in each count" if about.get("noise") else ""
    return (f"{run.name}, seed {run.seed}, ran on nodes that keep their data: of the errors of its clients a histogram is known, "
            f"with bins of width {about['resolution']:.3g}{noise}. Percentiles and tails are exact to a bin. Each evaluation is "
            f"over one cohort, the last over {about['clients']:.0f} of {run.about['splits'][run.tested_split]} clients.")


def _distinct(texts: Iterable[str]) -> str:
    """Distinct texts in one line."""
    return "; ".join(dict.fromkeys(text for text in texts if text))


def family_slider(family: MethodFamily, methods: Sequence[Method], clients: PageClients | None, percent: bool) -> dict[str, Any]:
    """The slider over the models of a family, and how many clients pick each."""
    members = [methods[k] for k in family.order]
    slider = {"name": family.name, "methods": list(family.order), "ticks": [tick(m.value) for m in members],
            "symbol": SYMBOLS.get(family.field, family.field) if family.field else "", "tail": family.field == TAIL_FRACTION}
    return slider | {"choice": choice(members, clients, percent) if clients else None}


def choice(members: Sequence[Method], clients: PageClients, percent: bool) -> dict[str, Any] | None:
    """What each client picked by one half of its examples, evaluated on the other half; None where no client picked."""
    picks = [by_seed(m, clients, "picks") for m in members]                          # of each member: seed -> (clients,)
    judged = [by_seed(m, clients, "judged") for m in members]
    seeds = [seed for seed in picks[0] if np.isfinite(picks[0][seed]).any()]
    if not seeds:
        return None
    chosen = {seed: np.stack([p[seed] for p in picks]) for seed in seeds}            # (members, clients)
    errors = {seed: np.stack([j[seed] for j in judged]) for seed in seeds}
    own = {seed: np.nansum(np.where(chosen[seed] == 1, errors[seed], 0), 0) for seed in seeds}
    clean = {seed: np.isfinite(errors[seed]).all(0) & (np.nansum(chosen[seed], 0) == 1) for seed in seeds}
    which = np.concatenate([chosen[s][:, clean[s]].argmax(0) for s in seeds])
    widest = np.concatenate([errors[s][-1, clean[s]] for s in seeds])
    sizes = np.concatenate([clients.sizes[clean[s]] for s in seeds])
    return {
        "counts": np.bincount(which, minlength=len(members)).tolist(), "clients": len(which), "seeds": len(seeds),
        "judged": [_summary_over_seeds([errors[s][k, clean[s]] for s in seeds]) for k in range(len(members))],
        "own": _summary_over_seeds([own[s][clean[s]] for s in seeds]),
        "by_error": _split(which, widest, 5, len(members), "{:.0f}%" if percent else "{:.3g}", 100 if percent else 1),
        "by_size": _split(which, sizes, 4, len(members), "{:,.0f}", 1),
    }


def _summary_over_seeds(values: Sequence[np.ndarray]) -> dict[str, Any]:
    """Statistics over clients, each as its mean and deviation over seeds."""
    each = [summary(v) for v in values]
    return {name: mean_and_std_over_seeds([numbers[name] for numbers in each]) for name in JUDGED}


def _split(which: np.ndarray, by: np.ndarray, parts: int, members: int, show: str, scale: float) -> dict[str, Any]:
    """In each class of clients, the share that picked each member."""
    labels, of_class = classes(by, parts, show, scale)
    counts = np.zeros((len(labels), members))
    np.add.at(counts, (of_class, which), 1)
    return {"labels": labels, "clients": counts.sum(1).astype(int).tolist(),
            "shares": [page_numbers(column) for column in (counts / counts.sum(1, keepdims=True)).T]}
