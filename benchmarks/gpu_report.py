"""The part of RESULTS.md about a GPU, from the newest file that `gpu.py` wrote for each of its parts."""

from __future__ import annotations

import json
from pathlib import Path

from pages import METHODS, Row, number, table

PRECISIONS = ("full", "tf32", "bf16")


def section(folder: Path) -> list[str]:
    paths = sorted(folder.glob("*.jsonl"), reverse=True)
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    newest = {part: next((rows for rows in files if any(row["part"] == part for row in rows)), None)
              for part in ("w3", "cifar", "counts", "precision", "profile")}
    found = {part: [row for row in rows if row["part"] == part] for part, rows in newest.items() if rows}
    if not found:
        return []
    machines = [rows[0] for rows in files]
    about = "; ".join(f"`python {m['command']}` on one {m['card']}, torch {m['torch']}, {m['date']}" for m in machines)
    parts = ["## One GPU", "", f"{about}. Times include recording the steps.", ""]
    for rows in files:
        parts += _w3([row for row in rows if row["part"] == "w3"])
    for part, write in (("cifar", _cifar), ("counts", _counts), ("profile", _profile), ("precision", _precision)):
        parts += write(found[part]) if part in found else []
    return parts


def _w3(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    ours = {(row["method"], row["precision"]): row for row in rows if row["program"] == "fedtail"}
    naive = {row["method"]: row for row in rows if row["program"] != "fedtail"}
    rounds = max(row.get("rounds", 0) for row in rows)
    lines = [["seconds", *PRECISIONS, "naive loop"]]
    for method in ("delta_fl", "fedavg"):
        if any((method, p) in ours for p in PRECISIONS):
            cells = [number(ours.get((method, p), {}).get("seconds")) for p in PRECISIONS]
            lines.append([METHODS[method], *cells, f"{naive[method]['extrapolated']:.0f}" if method in naive else ""])
    looked = next((row["evaluation"] for row in naive.values()), None)
    lines.append(["one evaluation of 865 clients", *(number(ours.get(("evaluation", p), {}).get("seconds")) for p in PRECISIONS),
                  number(looked)])
    return [f"### W3: {rounds} rounds of 100 clients, evaluated on 865 others every 10 rounds", "", *table(lines), "",
            "The naive loop was timed for two rounds and extrapolated; it runs with PyTorch's default, TF32 in convolutions.", ""]


def _cifar(rows: list[Row]) -> list[str]:
    ours = {row["precision"]: row for row in rows if row["program"] == "fedtail"}
    rounds = max(row["rounds"] for row in ours.values())
    others = [row for row in rows if row["program"] != "fedtail"]
    lines = [["seconds", *PRECISIONS, *(row["program"] for row in others)],
             ["FedAvg", *(number(ours.get(p, {}).get("seconds")) for p in PRECISIONS),
              *(f"{row['extrapolated']:.0f}" for row in others)]]
    timed = ", ".join(f"{row['program']} {row['rounds']}" for row in others)
    return [f"### pfl's CIFAR10 setting: {rounds} rounds of 50 of 1000 clients, 50 generated images each, batches of 10", "",
            *table(lines), "", f"Others were timed for some rounds and extrapolated ({timed}), with TF32 in convolutions.", ""]


def _counts(rows: list[Row]) -> list[str]:
    lines = [["a round", "examples", "TFLOP", "GB of windows", "GB of models"]]
    for row in rows:
        lines.append([f"{row['workload']}, {METHODS.get(row['method'], row['method'])}", f"{row['examples']:.0f}",
                      f"{row['tflop']:.2f}", number(row.get("gigabytes_windows")), number(row.get("gigabytes_models"))])
    return ["### What is computed and moved", "", *table(lines), "",
            "Bytes by formula: windows laid out as rows, and the clients' models.", ""]


def _profile(rows: list[Row]) -> list[str]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows if "kind" in row))
    cell = {(row["kind"], row["precision"]): row["ms_a_round"] for row in rows if "kind" in row}
    whole = {row["precision"]: row for row in rows if "busy" in row}
    lines = [["milliseconds a round", *PRECISIONS],
             *([kind, *(number(cell.get((kind, p))) for p in PRECISIONS)] for kind in kinds),
             ["the card is busy", *(number(whole[p]["ms_busy"]) for p in PRECISIONS)],
             ["it waits", *(number(whole[p]["ms_a_round"] - whole[p]["ms_busy"]) for p in PRECISIONS)]]
    return ["### Where the time of a round of W3 goes, Delta-FL", "", *table(lines), ""]


def _precision(rows: list[Row]) -> list[str]:
    lines = [["", "largest change of a client's loss", "median", "change of the threshold", "clients that change sides",
              "worst 10% error of a model trained so"]]
    for row in rows:
        lines.append([row["precision"], f"{row['largest_gap']:.1e}", f"{row['median_gap']:.1e}", f"{row['threshold_gap']:.1e}",
                      f"{row['tail_changed']} of {row['clients']}", f"{row['worst10_error']:.2%}"])
    return ["### What narrower products do to the quantile", "",
            f"W3 with labels partly drawn anew, {rows[0]['trained_rounds']} rounds of Delta-FL at theta 0.5, one seed; "
            "changes relative to float64.", "",
            *table(lines), ""]

