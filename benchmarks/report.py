"""`RESULTS.md` from the JSON lines: for each workload, and for each question of `scaling.py`, the newest run that has it.

    python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import gpu_report
import scaling_report
from environments import HERE, PEERS
from limit import needed
from pages import METHODS, Row, number, table
from workloads import WORKLOADS

COLUMNS = ("fedtail, closed form", "fedtail, any module", "naive loop", *PEERS)


INTRODUCTION = """\
Written by `benchmarks/report.py` from `benchmarks/results`; do not edit. Seconds a round, medians of interleaved repetitions;
for each program its best way to use the cores. Absolute seconds hold for this machine, ratios carry further. Every library
draws its own cohorts, so rounds differ by some percent in examples, and the losses at the end in the second digit. A share of
the limit is the operations a round cannot do without, at the best rate measured on all cores, over the time it took. Where
others used a good part of a core meanwhile (the most in any turn is shown), a row is not to be trusted."""


class Run:
    """One file of results."""

    def __init__(self, path: Path):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.path, self.lines = path, lines
        self.about = next((line for line in lines if line["kind"] == "run"), {})
        self.limit = next((line for line in lines if line["kind"] == "limit"), {})

    def rows(self, workload: str) -> list[Row]:
        return [line for line in self.lines if line["kind"] == "row" and line["workload"] == workload]

    def work(self, workload: str) -> Row:
        return next(line for line in self.lines if line["kind"] == "work" and line["workload"] == workload)


def page(folder: Path) -> str:
    runs = [Run(path) for path in sorted(folder.glob("*.jsonl"), reverse=True)]
    newest = {name: next((run for run in runs if run.rows(name)), None) for name in WORKLOADS}
    newest = {name: run for name, run in newest.items() if run}
    parts = ["# Benchmarks", "", INTRODUCTION, "", *_summary(newest)]
    for name, run in newest.items():
        parts += _section(name, run)
    parts += scaling_report.section(folder) + gpu_report.section(folder / "gpu") + _remarks() + _sources(newest)
    return "\n".join(parts) + "\n"


def _remarks() -> list[str]:
    """What was found when the figures were looked at, written by hand."""
    return [*(HERE / "REMARKS.md").read_text().splitlines(), ""]


def best(rows: list[Row], program: str, method: str) -> Row | None:
    """The fastest variant of a program."""
    done = [row for row in rows if row["program"] == program and row["method"] == method and row["seconds"]]
    return min(done, key=lambda row: median(row["seconds"]), default=None)


def _summary(newest: dict[str, Run]) -> list[str]:
    lines = [["", *COLUMNS, "fastest peer / any module", "naive / any module", "share of the limit",
              "measured at"]]
    for name, run in newest.items():
        rows = run.rows(name)
        for method in ("evaluation",) if WORKLOADS[name].evaluation else ("fedavg", "delta_fl"):
            found = {column: best(rows, column, method) for column in COLUMNS}
            times = {column: median(row["seconds"]) for column, row in found.items() if row}
            ours = times.get("fedtail, any module")
            peer = min((times[p] for p in PEERS if p in times), default=None)
            fastest = min((times[c] for c in COLUMNS[:2] if c in times), default=None)
            share = needed(run.work(name), method) / run.limit["best"] / fastest if fastest else None
            cells = [number(times.get(column)) or _why(rows, column, method) for column in COLUMNS]
            lines.append([f"**{name}** {METHODS[method]}", *cells, _ratio(peer, ours), _ratio(times.get("naive loop"), ours),
                          f"{share:.0%}" if share else "", f"{run.about['date'][:10]}, {run.about['commit']}"])
    return ["## Summary", "", *table(lines), ""]


def _why(rows: list[Row], column: str, method: str) -> str:
    failed = any(row["program"] == column and row["error"] for row in rows)
    return "fails, see below" if failed and method != "delta_fl" else ""


def _section(name: str, run: Run) -> list[str]:
    workload, work, rows = WORKLOADS[name], run.work(name), run.rows(name)
    each = f"{workload.batch} a batch" if workload.batch else "the full gradient"
    asks = "loss and error of every client" if workload.evaluation else f"one epoch, {each}, rate {workload.rate:g}"
    about = (f"{workload.clients} clients, {workload.cohort} a round, {work['examples']:.0f} examples a round, "
             f"{work['parameters']:,} parameters; {asks}{', and the loss of every client asked' if workload.losses else ''}. "
             f"Others' load on the machine at the start: {work['load']:.1f}.")
    lines = [["program", "method", "cores", "seconds", "lowest to highest", "rounds", "others' cores", "share of the limit",
              "MiB", "end loss"]]
    for row in sorted(rows, key=lambda row: (row["method"], median(row["seconds"]) if row["seconds"] else 1e9)):
        if row["seconds"]:
            middle = median(row["seconds"])
            share = needed(work, row["method"]) / run.limit["best"] / middle
            more = f" ({row['kernel']})" if row.get("kernel") else f" ({row['backend']})" if row.get("backend") else ""
            lines.append([row["program"] + more, METHODS[row["method"]], row["variant"], number(middle),
                          f"{number(min(row['seconds']))} to {number(max(row['seconds']))}", str(len(row["seconds"])),
                          f"{max(row['others']):.2f}" if row.get("others") else "", f"{share:.1%}",
                          f"{row.get('peak_mib', 0):.0f}", f"{row.get('loss', float('nan')):.3f}"])
    failed = [f"- {row['program']} ({row['variant']}) did not run: `{row['error']}`" for row in rows if row["error"]]
    refused = [f"- {peer} could not be installed: `{reason}`" for peer, reason in run.about.get("refused", {}).items()]
    notes = [*failed, *refused]
    return [f"## {name} {workload.title}", "", about, "", *table(lines), "", *notes, *[""] * bool(notes)]


def _sources(newest: dict[str, Run]) -> list[str]:
    parts = ["## Where the numbers come from", ""]
    for run in sorted(set(newest.values()), key=lambda run: run.path):
        about, names = run.about, ", ".join(name for name, r in newest.items() if r is run)
        where = about["machine"]
        parts += [f"{names}: {about['date']}, commit {about['commit']}, `{about['command']}`"
                  f"{' (quick)' if about['quick'] else ''}, {run.path.name}.",
                  f"{where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB, Python {where['python']}. "
                  f"Peak, GFLOP/s: matrix products {run.limit['gemm_one']:.0f} on one core, {run.limit['gemm_all']:.0f} on all; "
                  f"convolutions {run.limit['conv_one']:.0f} and {run.limit['conv_all']:.0f}.",
                  f"Here: {_versions(about['versions'])}.", *(f"{p}: {_versions(v)}." for p, v in about["peers"].items()), ""]
    return parts


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.1f}x" if theirs and ours else ""


if __name__ == "__main__":
    (HERE / "RESULTS.md").write_text(page(HERE / "results"))
