"""What the files of a deployment say of it now, as plain values: for `fedtail deploy status` and the dashboard. It only reads."""

from __future__ import annotations

import fcntl
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.membership import is_over_flower, node_names
from fedtail.deployment.rotation import expiries
from fedtail.escaping import one_line
from fedtail.version import __version__

NODES_AND_TAILS = r"(?:, \d+ of \d+ nodes answered)?(?:, tail fraction \S+)*"
ROUND_LINE = re.compile(rf"(\S+) round (\d+) of \d+: ([\d.]+) s, \d+ exchanges{NODES_AND_TAILS}$")
POINTS = 400        # of a series at most: longer ones are thinned
LINES = 60          # of the log
PROBLEMS = 100      # the last ones
RECENT = 50         # rounds over which it is counted how often a node answered
SHOWN = ("mean", "p90", "worst10")


class DeploymentState:
    """Reads the state of one deployment from its folder, each file anew only when it has changed."""

    def __init__(self, folder: DeploymentFolder):
        """Store the folder; nothing is read yet."""
        self.folder = folder
        self._read: dict[Path, tuple[tuple[int, int], Any]] = {}      # what each file held, and its size and time then

    def read(self, run: str = "") -> dict[str, Any]:
        """The state now, of JSON values. `run` is the name of a run in the folder runs; "" or an unknown one: the newest."""
        runs = self.runs()
        chosen = run if run in runs else next(iter(runs), "")
        return {"deployment": self.folder.path.name, "transport": "Flower" if is_over_flower(self.folder) else "NVFlare",
                "fedtail": __version__, "time": time.time(), "runs": list(runs), "certificates": self._certificates(),
                "admitted": node_names(self.folder), "run": self._run(chosen, runs[chosen]) if chosen else None}

    def runs(self) -> dict[str, Path]:
        """The folders of runs by name, the one that was written last first."""
        found = [path for path in (self.folder.path / "runs").glob("*") if (path / "log.txt").is_file()]
        return {path.name: path for path in sorted(found, key=lambda one: (one / "log.txt").stat().st_mtime, reverse=True)}

    def _certificates(self) -> list[dict[str, Any]]:
        """When each certificate expires, the next one first."""
        return [{"what": one.what, "until": one.until.isoformat(), "days": math.floor(one.days), "warning": one.warning}
                for one in expiries(self.folder)]

    def _run(self, name: str, place: Path) -> dict[str, Any]:
        """What the files of one run say."""
        about, presence = self._json(place / "run.json"), self._json(place / "nodes.json")
        answers, log = self._lines(place / "answers.jsonl"), self._text(place / "log.txt")
        privacy, result, rounds = self._json(place / "privacy.json"), self._json(place / "result.json"), _rounds(log, answers)
        done = min(rounds[-1]["round"] + 1 if rounds else 0, about.get("rounds", 0))
        nodes = [{**one, **_answered(one.get("number"), answers)} for one in presence.get("nodes", [])]
        return {"name": name, "experiment": about.get("name", ""), "rounds": about.get("rounds"), "done": done,
                "state": _state(place, result, presence), "paused": presence.get("paused", ""), "seen": presence.get("time"),
                "stopped": result.get("stopped", ""), "nodes": nodes, "left_out": presence.get("left_out", {}),
                "series": thinned(rounds), "seconds": _spread([one["seconds"] for one in rounds if one["seconds"] is not None]),
                "exchanges": _spread(self._json(place / "seconds.json") or []), "problems": _problems(answers, nodes),
                "evaluations": self._evaluations(place, about), "rates": bool(about.get("rates")),
                "privacy": {one: privacy.get(one) for one in ("epsilon", "delta", "why", "channel")},
                "log": [one_line(line, 500) for line in log.rstrip("\n").split("\n")[-LINES:] if log]}

    def _evaluations(self, place: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
        """For each model and metric that clients evaluated, its mean and tail by round."""
        lines, found = self._lines(place / "metrics.jsonl"), []
        names = about.get("members") or [""]
        for model, metric in {(k, name): None for line in lines for k, one in enumerate(line.get("members", []))
                              for split in one.values() for name in split}:
            points = [(line["round"], split[metric]) for line in lines for split in line["members"][model].values()
                      if metric in split]
            series = [{"round": round, **{one: values.get(one) for one in SHOWN}} for round, values in points]
            label = names[model] if model < len(names) else str(model)
            found.append({"model": label if isinstance(label, str) else str(label), "metric": metric, "series": thinned(series),
                          "clients": points[-1][1].get("clients")})
        return found

    def _text(self, path: Path) -> str:
        """The text of a file; "" where there is none."""
        return self._parsed(path, lambda content: content.decode(errors="replace"), "")

    def _json(self, path: Path) -> Any:
        """The JSON value in a file; {} where there is none, or it is being written."""
        return self._parsed(path, json.loads, {})

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        """The values in a file of JSON lines, but a last line that is not whole; [] where there is no file."""
        return self._parsed(path, lambda content: list(_whole_lines(content)), [])

    def _parsed(self, path: Path, parse: Any, nothing: Any) -> Any:
        """`parse` of the bytes of the file at `path`, called only when it has changed; `nothing` where it cannot be read."""
        with suppress(OSError, ValueError):
            about = path.stat()
            stamp = about.st_size, about.st_mtime_ns
            if path not in self._read or self._read[path][0] != stamp:
                self._read[path] = stamp, parse(path.read_bytes())
            return self._read[path][1]
        return nothing


def _whole_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The JSON values of the lines in `content`; a damaged line is passed over."""
    for line in content.splitlines():
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                yield found


def _rounds(log: str, answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each round that was held: seconds, clients sampled, fewest that answered a question, and exchanges."""
    seconds = {int(found[2]) - 1: float(found[3]) for line in log.split("\n") if (found := ROUND_LINE.fullmatch(line))}
    nothing: dict[str, Any] = {"seconds": None, "asked": None, "answered": None, "exchanges": 0}
    rounds = {number: {**nothing, "round": number, "seconds": taken} for number, taken in seconds.items()}
    for one in answers:
        held = rounds.setdefault(one["round"], {**nothing, "round": one["round"]})
        held["asked"] = one["asked"]
        held["answered"] = one["answered"] if held["answered"] is None else min(held["answered"], one["answered"])
        held["exchanges"] += one["exchanges"]
    return [rounds[number] for number in sorted(rounds)]


def _answered(number: int | None, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many `questions` the last rounds had, and to how many of them the node with this number gave no answer (`missed`)."""
    last = answers[-1]["round"] - RECENT if answers else 0
    recent = [one for one in answers if one["round"] > last]
    return {"missed": sum(str(number) in one["problems"] for one in recent), "questions": len(recent)}


def _problems(answers: Sequence[dict[str, Any]], nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What went wrong at nodes: the last problems, the newest first, and how many there were by node and text."""
    names = {str(one.get("number")): one.get("name", "") for one in nodes}
    every = [(one["round"], names.get(node, f"node {node}"), one_line(why, 300)) for one in answers
             for node, why in one["problems"].items()]
    counts = Counter((node, why) for _, node, why in every)
    last: dict[tuple[str, str], int] = {(node, why): round for round, node, why in every}
    rows = sorted(counts, key=lambda key: last[key], reverse=True)[:PROBLEMS]
    return {"count": len(every), "rows": [{"node": node, "why": why, "times": counts[node, why], "last": last[node, why]}
                                          for node, why in rows]}


def _spread(values: Any) -> dict[str, Any]:
    """Number, median, 90th percentile, largest and the last of some durations; only the number where there are none."""
    values = [one for one in values if isinstance(one, (int, float))] if isinstance(values, list) else []
    if not values:
        return {"count": 0, "last": []}
    ranked = sorted(values)
    p90 = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    return {"count": len(values), "median": statistics.median(values), "p90": p90, "last": values[-POINTS // 2:]}


def _state(place: Path, result: dict[str, Any], presence: dict[str, Any]) -> str:
    """Whether the run in the folder `place` is finished, paused, running, or not running, as one of these words."""
    if result:
        return "finished"
    if not _is_locked(place / ".lock"):
        return "not running"
    return "paused" if presence.get("paused") else "running"


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run's folder."""
    with suppress(OSError), path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def thinned(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most POINTS of a series, evenly, the last one among them."""
    step = -(-len(series) // POINTS)
    return series if step <= 1 else series[(len(series) - 1) % step::step]


def status_lines(state: dict[str, Any]) -> Iterator[str]:
    """The state in lines for a terminal."""
    names = state["admitted"]
    yield f"{state['deployment']}: {len(names)} nodes are admitted ({', '.join(names)}), over {state['transport']}"
    run = state["run"]
    if run is None:
        yield "no run yet"
    else:
        early = f", {run['stopped']}" if run["stopped"] else ""
        yield f"run {run['name']}: {run['state']}, {run['done']} of {run['rounds']} rounds{early}"
        if run["paused"]:
            yield f"  paused: {one_line(run['paused'])}"
        for one in run["nodes"]:
            missed = f", {one['missed']} of the last {one['questions']} questions without an answer" if one["missed"] else ""
            told = f"; {one_line(one['budget'])}" if one.get("budget") else ""
            yield f"  {one_line(one['name'])}: {one['state']}{missed}{told}"
        if run["state"] != "finished":
            yield from (f"  node {one_line(one)} is left out: {one_line(why)}" for one, why in run["left_out"].items())
        for one in run["problems"]["rows"][:3]:
            yield f"  round {one['last'] + 1}, {one_line(one['node'])}: {one['why']} ({one['times']} times)"
    for one in state["certificates"]:
        yield f"certificate of {one['what']}: until {one['until'][:10]} ({one['days']} days)"
    yield from (f"warning: {one['warning']}" for one in state["certificates"] if one["warning"])
