"""The part of RESULTS.md about a GPU, each part from the file of `gpu.py` that has most of it, the newest of several."""

from __future__ import annotations

import json
from pathlib import Path

from pages import METHODS, Row, number, table

PRECISIONS = ("full", "tf32", "bf16")


def section(folder: Path) -> list[str]:
    paths = sorted(folder.glob("*.jsonl"), reverse=True)
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    lines = []
    for part, write in {"w3": _w3, "cifar": _cifar, "lstm": _lstm, "counts": _counts, "profile": _profile,
                        "profile_cifar": _profile_cifar, "precision": _precision}.items():
        found = [[row for row in rows if row["part"] == part] for rows in files]
        most = max(found, key=lambda rows: sum(row.get("program", "fedtail") == "fedtail" for row in rows), default=[])
        if most:
            lines += write(most, [row for rows in found if rows is not most for row in rows])
    heads = [rows[0] for rows in files]
    about = "; ".join(f"`python {m['command'].strip()}` on one {m['card']}, torch {m['torch']}, {m['date']}" for m in heads)
    return ["## One GPU", "", f"{about}. Times include recording the steps.", "", *lines] if lines else []


def _w3(rows: list[Row], older: list[Row]) -> list[str]:
    """`older` are rows of other calls."""
    ours = {(row["method"], row["precision"]): row for row in rows if row["program"] == "fedtail"}
    naive = {row["method"]: row for row in rows if row["program"] != "fedtail"}
    rounds = max(row.get("rounds", 0) for row in rows)
    lines = [["seconds", *PRECISIONS, "naive loop"]]
    for method in ("delta_fl", "fedavg"):
        if any((method, p) in ours for p in PRECISIONS):
            cells = [number(ours.get((method, p), {}).get("seconds")) for p in PRECISIONS]
            lines.append([METHODS[method], *cells, f"{naive[method]['extrapolated']:.0f}" if method in naive else ""])
        for call, loop in _earlier([row for row in older if row["method"] == method]):
            cells = [number(call.get(p, {}).get("seconds")) for p in PRECISIONS]
            lines.append([f"{METHODS[method]}, an earlier call", *cells, loop])
    looked = next((row["evaluation"] for row in naive.values()), None)
    lines.append(["one evaluation of 865 clients", *(number(ours.get(("evaluation", p), {}).get("seconds")) for p in PRECISIONS),
                  number(looked)])
    return [f"### W3: {rounds} rounds of 100 clients, evaluated on 865 others every 10 rounds", "", *table(lines), "",
            "The naive loop was timed for two rounds and extrapolated; it runs with PyTorch's default, TF32 in convolutions.", "",
            *_timeline([row for row in (*rows, *older) if "hundreds" in row and row["method"] == "delta_fl"])]


def _calls(runs: list[Row]) -> list[dict[str, Row]]:
    """The runs of each call by precision, of which a call has one each."""
    calls: list[dict[str, Row]] = []
    for row in runs:
        if not calls or row["precision"] in calls[-1]:
            calls.append({})
        calls[-1][row["precision"]] = row
    return calls


def _earlier(rows: list[Row]) -> list[tuple[dict[str, Row], str]]:
    """The same of earlier calls with the naive loop of each, which tells of its host."""
    loops = [f"{row['extrapolated']:.0f}" for row in rows if row["program"] == "naive loop"]
    return list(zip(_calls([row for row in rows if row["program"] == "fedtail"]), loops, strict=True))


def _timeline(runs: list[Row]) -> list[str]:
    """The same runs, as they went, those of earlier calls last."""
    cells = {"seconds": lambda row: number(row["seconds"]),
             "a first call before it, which compiles": lambda row: number(row["first_call"]),
             "the first 100 rounds": lambda row: number(row["hundreds"][0]),
             "100 rounds later, lowest to highest": lambda row: " to ".join(f"{f(row['hundreds'][1:]):.2f}" for f in (min, max)),
             "evaluations": lambda row: number(row["evaluating"]),
             "recordings, and how many": lambda row: f"{row['recording']:.2f}, {row['recordings']}",
             "core seconds the host gave to other machines": lambda row: f"{row['stolen']:.2f}"}
    heads = [p if number == 0 else f"{p}, an earlier call" for number, call in enumerate(_calls(runs)) for p in call]
    lines = [["a run of Delta-FL", *heads], *([name, *map(cell, runs)] for name, cell in cells.items())]
    return [*table(lines), ""] if runs else []


def _lstm(rows: list[Row], _: list[Row]) -> list[str]:
    lines = [["seconds a round, FedAvg", "full", "tf32", "naive loop"]]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        ours = {row["precision"]: row["seconds_a_round"] for row in mine if row["program"] == "fedtail"}
        naive = next((row["seconds_a_round"] for row in mine if row["program"] == "naive loop"), None)
        lines.append([workload, number(ours.get("full")), number(ours.get("tf32")), number(naive)])
    return ["### LSTMs of 50 clients", "", *table(lines), "",
            "sent140-lstm is W4, 200 rounds; characters-lstm has 80 characters in a sequence, two layers of 256 and 30 rounds. "
            "The naive loop, cuDNN's LSTM client by client, was timed for two rounds.", ""]


def _cifar(rows: list[Row], older: list[Row]) -> list[str]:
    ours = {row["precision"]: row for row in rows if row["program"] == "fedtail"}
    rounds = max(row["rounds"] for row in ours.values())
    others = [row for row in rows if row["program"] != "fedtail"]
    others += [row for row in older if row["program"] not in {"fedtail", *(row["program"] for row in others)}]
    lines = [["seconds", *PRECISIONS, *(row["program"] for row in others)],
             ["FedAvg", *(number(ours.get(p, {}).get("seconds")) for p in PRECISIONS),
              *(f"{row['extrapolated']:.0f}" for row in others)]]
    for call, loop in _earlier(older):
        lines.append(["FedAvg, an earlier call", *(number(call.get(p, {}).get("seconds")) for p in PRECISIONS),
                      *(loop if row["program"] == "naive loop" else "" for row in others)])
    timed = ", ".join(f"{row['program']} {row['rounds']}" for row in others)
    return [f"### pfl's CIFAR10 setting: {rounds} rounds of 50 of 1000 clients, 50 generated images each, batches of 10", "",
            *table(lines), "", f"Others were timed for some rounds and extrapolated ({timed}), with TF32 in convolutions.", ""]


def _counts(rows: list[Row], _: list[Row]) -> list[str]:
    lines = [["a round", "examples", "TFLOP", "GB of activations", "GB of models"]]
    for row in rows:
        lines.append([f"{row['workload']}, {METHODS.get(row['method'], row['method'])}", f"{row['examples']:.0f}",
                      f"{row['tflop']:.2f}", number(row.get("gigabytes_activations")), number(row.get("gigabytes_models"))])
    return ["### What is computed and moved", "", *table(lines), "",
            "Bytes by formula: what convolutions give and its gradient, and the clients' models.", ""]


def _profile_cifar(rows: list[Row], older: list[Row]) -> list[str]:
    return _profile(rows, older, "the CIFAR10 setting, FedAvg")


def _profile(rows: list[Row], _: list[Row], what: str = "W3, Delta-FL") -> list[str]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows if "kind" in row))
    cell = {(row["kind"], row["precision"]): row["ms_a_round"] for row in rows if "kind" in row}
    whole = {row["precision"]: row for row in rows if "busy" in row}
    lines = [["milliseconds a round", *PRECISIONS],
             *([kind, *(number(cell.get((kind, p))) for p in PRECISIONS)] for kind in kinds),
             ["the card is busy", *(number(whole[p]["ms_busy"]) for p in PRECISIONS)],
             ["it waits", *(number(whole[p]["ms_a_round"] - whole[p]["ms_busy"]) for p in PRECISIONS)]]
    return [f"### Where the time of a round goes: {what}", "", *table(lines), ""]


def _precision(rows: list[Row], _: list[Row]) -> list[str]:
    lines = [["", "largest change of a client's loss", "median", "change of the threshold", "clients that change sides",
              "worst 10% error of a model trained so"]]
    for row in rows:
        lines.append([row["precision"], f"{row['largest_gap']:.1e}", f"{row['median_gap']:.1e}", f"{row['threshold_gap']:.1e}",
                      f"{row['tail_changed']} of {row['clients']}",
                      f"{row['worst10_error']:.2%}" if "worst10_error" in row else ""])
    return ["### What narrower products do to the quantile", "",
            f"W3 with labels partly drawn anew, {rows[0]['trained_rounds']} rounds of Delta-FL at theta 0.5, one seed; "
            "changes relative to float64.", "",
            *table(lines), ""]

