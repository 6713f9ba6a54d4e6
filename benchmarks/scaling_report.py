"""The part of RESULTS.md about growth, and its picture: slopes between neighbouring points, and what memory follows.

    python benchmarks/scaling_report.py            # draws docs/assets/scaling.svg from the newest results
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from pages import Row, number, table

QUESTIONS = ("cohort", "population", "model", "examples")
AXES = {"cohort": "clients a round", "population": "clients", "model": "parameters", "examples": "examples a client"}
UNSHOWN = ("load", "MiB mapped")
EXAMPLE = 4 * 20 + 8     # bytes of an example in the points of "examples", "cohort" and "model" have their own
MIB = 2**20
FEWEST = 0.05            # processor seconds, from which a slope is told


def newest(folder: Path) -> dict[str, list[Row]]:
    """The lines of the newest run that has each question, after the line about the run itself."""
    found: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*-scaling.jsonl"), reverse=True):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for question in QUESTIONS:
            rows = [line for line in lines if line["kind"] == "scaling" and line["question"] == question]
            if rows and question not in found:
                found[question] = [lines[0], *rows]
    return found


def memory(shown: dict[str, Any]) -> float:
    """The MiB of a point: what was held before the rounds, and what they add."""
    return float(shown["MiB held"] + shown["MiB more in a round"])


def effort(shown: dict[str, Any]) -> float:
    """The processor seconds of a round, which other programs disturb least; of older files, its seconds."""
    return float(shown.get("processor seconds", shown["seconds a round"]))


def slopes(question: str, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The slopes of processor seconds and memory from the point before, in logarithms; empty for the first of a path.

    Processor seconds are counted in hundredths: there is no slope from fewer than five.
    """
    cells, axis = [("", "")], AXES[question]
    for before, here in pairwise(rows):
        if before.get("path") != here.get("path"):
            cells.append(("", ""))
            continue
        step = log(here[axis] / before[axis])
        told = "processor seconds" not in before or min(effort(before), effort(here)) >= FEWEST
        cells.append((f"{log(effort(here) / effort(before)) / step:.2f}" if told else "",
                      f"{log(memory(here) / memory(before)) / step:.2f}"))
    return cells


def section(folder: Path) -> list[str]:
    """The lines of RESULTS.md: a table for each question, and the memory that a formula foretells beside the measured one."""
    parts, found = [], newest(folder)
    for question, (about, *lines) in found.items():
        rows = [line["shown"] for line in lines]
        heads = [head for head in rows[0] if head not in UNSHOWN]
        body = [[*(number(row[head]) for head in heads), *cells]
                for row, cells in zip(rows, slopes(question, rows), strict=True)]
        loads = [row["load"] for row in rows if "load" in row]
        cores = about["machine"]["cores"]
        shared = (f" Processes that wanted a core (load): {min(loads):.1f} to {max(loads):.1f} on {cores} cores"
                  f"{', so that seconds are those of a shared machine' if max(loads) > 1.5 * cores else ''}."
                  if loads else "")
        parts += [f"## Growth with the {question}", "", lines[0]["about"], "",
                  *table([[*heads, "slope, processor seconds", "slope, memory"], *body]), "",
                  f"{about['date']}, commit {about['commit']}: `{about['command']}`.{shared}", ""]
    constants = fitted(found)
    return parts + (_formula(found, constants) if constants else [])


def fitted(found: dict[str, list[Row]]) -> dict[str, float]:
    """Bytes for each client, parameter and example, seconds for each client in a draw: from the two largest points of each."""
    if not all(question in found and "load" in found[question][-1]["shown"] for question in QUESTIONS):
        return {}

    def rise(question: str, value: Any) -> float:
        """How much `value` of a point grows for each unit of the axis, from the last point but one to the last."""
        before, last = (line["shown"] for line in found[question][-2:])
        return float((value(last) - value(before)) / (last[AXES[question]] - before[AXES[question]]))

    return {"client": rise("population", memory) * MIB,
            "client on disk": rise("population", lambda row: row["MiB in the folder"]) * MIB,
            "client drawn": rise("population", lambda row: row["seconds to draw"]),
            "parameter": rise("model", memory) * MIB,
            "example": rise("examples", memory) * MIB / 10, "base": memory(found["examples"][1]["shown"])}


def foretold(question: str, shown: dict[str, Any], constants: dict[str, float]) -> float:
    """The MiB that the formula gives for a point: what every run holds, and something for each client, parameter and example."""
    clients = {"population": shown.get("clients", 0)}.get(question, 0)
    parameters = shown.get("parameters", 0) if question == "model" else 0
    examples = 10 * shown["examples a client"] if question == "examples" else 0
    return constants["base"] + (constants["client"] * clients + constants["parameter"] * parameters
                                + constants["example"] * examples) / MIB


def _formula(found: dict[str, list[Row]], constants: dict[str, float]) -> list[str]:
    """The formula with its constants, and every point that was not used for them."""
    lines = [["", "measured, MiB", "by the formula"]]
    for question in ("population", "model", "examples"):
        for line in found[question][1:]:
            shown = line["shown"]
            lines.append([f"{number(shown[AXES[question]])} {AXES[question]}", number(memory(shown)),
                          number(foretold(question, shown, constants))])
    gibibytes = found["model"][0]["machine"]["memory_gib"]
    room = (gibibytes * 2**30 / 2 - constants["base"] * MIB)       # half: data, results and other programs need some, too
    return ["## Where the next machine is needed", "",
            "Memory of a round beside PyTorch and fedtail themselves:", "",
            f"- {constants['base']:.0f} MiB in any case,",
            f"- {constants['client']:.0f} bytes for each client of a population in a folder; its files have "
            f"{constants['client on disk']:.0f}, mapped, of which a draw reads 8,",
            f"- {constants['parameter']:.0f} bytes for each parameter of the model, with two workers,",
            f"- {constants['example']:.0f} bytes for each example held in memory, of {EXAMPLE} bytes itself.", "",
            f"{_draws(found, constants)}Constants are the rise between the two largest points; the others check them.", "",
            *table(lines), "",
            f"Half of a machine of {gibibytes} GiB is full, by this formula, at {_round_figure(room / constants['client'])} "
            f"clients of a population in a folder, at {_round_figure(room / constants['parameter'])} parameters, or at "
            f"{_round_figure(room / constants['example'])} examples of {EXAMPLE} bytes in memory; a folder that is opened "
            "has no such bound on examples. Until then a cohort costs seconds, not memory.", ""]


def _draws(found: dict[str, list[Row]], constants: dict[str, float]) -> str:
    """How long a draw takes for each client, where seconds were not those of a machine that others used."""
    about, *lines = found["population"]
    if max(line["shown"]["load"] for line in lines) > 1.5 * about["machine"]["cores"]:
        return ""
    return f"A draw of a cohort takes {1e9 * constants['client drawn']:.0f} ns for each client of the population. "


def _round_figure(count: float) -> str:
    """A number of things with two digits and a word: 83 million."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.2g} {word}" if count / size < 100 else f"{count / size:.0f} {word}"
    return f"{count:.0f}"


def draw(folder: Path, path: Path) -> None:
    """Write the picture of the newest points to `path`: seconds above, memory below, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    found = newest(folder)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scaling", "font.family": "sans-serif", "font.size": 10})
    figure, grid = plt.subplots(2, len(found), figsize=(10.4, 5.0), sharey="row", squeeze=False)
    for column, (question, (_, *lines)) in enumerate(found.items()):
        rows, axis = [line["shown"] for line in lines], AXES[question]
        for name, colour in (("any module", "#8a8f98"), ("", "#c2410c")):
            chosen = [row for row in rows if (question == "model" or row.get("path") == "any module") == bool(name)]
            for axes, value in ((grid[0][column], lambda row: max(0.01, effort(row))), (grid[1][column], memory)):
                axes.plot([row[axis] for row in chosen], [value(row) for row in chosen], "o-", color=colour, markersize=4)
        if question == "cohort":
            grid[0][0].text(0.05, 0.9, "closed form", color="#c2410c", transform=grid[0][0].transAxes, weight="bold")
            grid[0][0].text(0.05, 0.79, "any module", color="#8a8f98", transform=grid[0][0].transAxes, weight="bold")
        for row in (0, 1):
            grid[row][column].set(xscale="log", yscale="log")
            grid[row][column].spines[["top", "right"]].set_visible(False)
        grid[1][column].set_xlabel(axis)
    grid[0][0].set_ylabel("processor seconds a round")
    grid[1][0].set_ylabel("MiB")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    here = Path(__file__).parent
    draw(here / "results", here.parent / "docs" / "assets" / "scaling.svg")
