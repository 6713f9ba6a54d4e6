"""The consent of a node's operator to an experiment, without which the node answers nothing: accepted.json in its folder.

Accepted is a digest of all that decides what leaves the node: for each method of the experiment file the parts with their noise,
clip norms and bounds, the encoding and masks of sums, the evaluation and the number of rounds, and code that is not fedtail's
own. Nodes and servers with the same file and code have the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtail.deployment.audit_log import Head, holds
from fedtail.deployment.settings import WITNESS, NodeSettings
from fedtail.experiment.experiment import Experiment, own_code_files
from fedtail.experiment.source_only import importable_files
from fedtail.reading import read_json, short_text
from fedtail.runs.files import to_json_values, write_json
from fedtail.secure.encoding import Refused

ACCEPTED = "accepted.json"
ELSEWHERE = ("name", "seeds", "device", "folder", "data", "engine", "log")      # nothing leaves a node by them
HOW = "Its operator decides: `fedtail node accept NODE.toml` says in words what is asked."


def agreed_table(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """All that decides what leaves a node, as JSON values: a table of parts for each method, and digests of code of their own."""
    methods = {one.name: {name: value for name, value in one.as_table(0).items() if name not in ELSEWHERE} for one in experiments}
    code = {path.relative_to(one.source.folder).as_posix(): file_digest(path) for one in experiments for path in code_files(one)}
    return json.loads(json.dumps(to_json_values({"methods": methods, "code": code})))


def experiment_digest(experiments: Sequence[Experiment]) -> str:
    """SHA-256 of `agreed_table`, as 64 hexadecimal digits: what an operator accepts."""
    return hashlib.sha256(json.dumps(agreed_table(experiments), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Consent:
    """What a process of the node has read, to be compared with what the operator accepted: at its start, and for every round."""

    settings: NodeSettings
    digest: str
    files: Mapping[Path, str]           # the files that were read, with digests of their contents

    @classmethod
    def of(cls, settings: NodeSettings, experiments: Sequence[Experiment]) -> Consent:
        """The consent that this node needs for these experiments, read from its own file just now."""
        files = [settings.folder / settings.experiment, *(path for one in experiments for path in code_files(one))]
        return cls(settings, experiment_digest(experiments), {path: file_digest(path) for path in files})

    def check(self) -> None:
        """Raise Refused, with a text that holds no data, unless the operator has accepted what this process has read.

        Read anew at every call are accepted.json and the files themselves, so that withdrawn consent and changed files are
        noticed without a restart. Changed settings are refused too: a process that stays has read them once.
        """
        given = read_accepted(self.settings)
        if not given:
            raise Refused(f"this node's operator has not accepted its experiment. {HOW}")
        if given["digest"] != self.digest:
            raise Refused(f"what this node would be asked is not what its operator accepted. {HOW}")
        if {name: given[name] for name in ("data", "budget")} != places(self.settings):
            raise Refused(f"this node's data or the place of their budget changed since its operator accepted them. {HOW}")
        if any(file_digest(path) != digest for path, digest in self.files.items()):
            raise Refused("this node's experiment file or code changed since its process read it: its operator must accept it, "
                          "and start the node again.")
        if not holds(self.settings.audit_file, Head(*given["log"])):
            raise Refused("this node's audit log does not hold its operator's consent: it was removed or changed. `fedtail node "
                          "log --verify` says more, and `fedtail node accept` begins a new one where it was removed.")
        check_settings_file(self.settings)


def check_settings_file(settings: NodeSettings) -> None:
    """Raise Refused where the file says other settings than were read from it; the text names them, and none of their values."""
    try:
        changed = settings.changed_settings()
    except ValueError as why:
        raise Refused("the file of this node's settings is missing or not valid. `fedtail node check` says more; after that its "
                      "operator must start the node again.") from why
    if changed:
        raise Refused(f"the settings of this node changed since its process read them ({short_text(', '.join(changed))}): its "
                      "operator must start the node again.")


def code_files(experiment: Experiment) -> list[Path]:
    """All files in the folder of the experiment that can be imported, where it names code of its own; [] where it names none."""
    folder = experiment.source.folder
    return importable_files(folder) if own_code_files(experiment.as_table(0), folder) else []


def allowed_files(settings: NodeSettings) -> dict[str, Any]:
    """The code that `trust` in node.toml allows: what it lists, and a digest of each file in folders that an import can run."""
    from fedtail.experiment.trust import Trust

    trust = Trust.from_names(settings.trust, settings.folder)
    folders = {(settings.folder / settings.experiment).parent.resolve(), *trust.folders}
    files = {path for one in folders for path in importable_files(one)} if settings.trust else set()
    return {"trust": list(settings.trust),
            "files": {os.path.relpath(path, settings.folder): file_digest(path) for path in sorted(files)}}


def check_code(settings: NodeSettings) -> None:
    """Raise Refused unless the operator accepted the code that `trust` in node.toml allows, as it is now; none is imported."""
    now, before = allowed_files(settings), read_accepted(settings).get("allowed")
    if before == now:
        return
    was = before["files"] if isinstance(before, dict) and isinstance(before.get("files"), dict) else {}
    other = sorted(name for name in was.keys() | now["files"].keys() if was.get(name) != now["files"].get(name))
    shown = f"{', '.join(other[:3])}{f' and {len(other) - 3} more' if len(other) > 3 else ''}"
    raise Refused(f"the node's settings allow code to run on this machine (trust = {json.dumps(now['trust'])}), and its operator "
                  f"has not accepted it as it is{f': {shown}' if other else ''}. Nothing of it was run. Who wrote it? Read it or "
                  "write trust = []. To run it: `fedtail node init` and `fedtail node accept` with --trust.")


def check_readiness(settings: NodeSettings) -> None:
    """Raise ValueError unless the node may start: settings, policy, budget, audit log and consent as they must be.

    Refused, which is one, is raised where the operator has not accepted the experiment, or a record was cut or changed.
    """
    settings.own_identity()
    settings.data_budget().spent_text()
    Consent.of(settings, settings.read_experiments()).check()


def read_accepted(settings: NodeSettings) -> dict[str, Any]:
    """What the operator of the node accepted last, as in accepted.json; {} where it is nothing or the file is not valid."""
    path = settings.folder / ACCEPTED
    if not path.is_file():
        return {}
    try:
        given = read_json(path)
        Head(*given["log"])
        return given if {"digest", "table", "data", "budget", "log"} <= given.keys() else {}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def accept(settings: NodeSettings, digest: str) -> None:
    """Record that the operator accepts what the node's experiment file asks now, whose digest is `digest`, for the data it names.

    Raises ValueError where the file asks something else, the policy is missing, or `digest` is cut. Where the budget is in
    another place than before, what was noted of the former is forgotten: `changes` says so before.
    """
    experiments = settings.read_experiments()
    now = experiment_digest(experiments)
    if digest.strip().lower() != now:
        raise ValueError(f"what {settings.experiment} asks has the digest {now}, not {digest!r}. Read it first: `fedtail node "
                         "accept NODE.toml` without a digest.")
    settings.read_policy()
    before = read_accepted(settings)
    log = settings.audit_log()
    if before and before["budget"] != places(settings)["budget"]:
        (settings.folder / WITNESS).unlink(missing_ok=True)
    methods = {one.name: experiment_digest([one]) for one in experiments}
    head = log.write("accepted", safely=True, digest=now, methods=methods, **places(settings))
    write_json(settings.folder / ACCEPTED, {"digest": now, "table": agreed_table(experiments), **places(settings),
                                            "allowed": allowed_files(settings), "log": list(head)})


def changes(settings: NodeSettings, experiments: Sequence[Experiment]) -> list[str]:
    """What differs from what was accepted last, a line for each setting; [] where nothing does, or nothing was accepted."""
    before = read_accepted(settings)
    if not before:
        return []
    was = dict(_settings_within({**before["table"], "data": before["data"], "budget": before["budget"]}))
    now = dict(_settings_within({**agreed_table(experiments), **places(settings)}))
    missing = "not there"
    return [f"{name}: was {was.get(name, missing)}, is {now.get(name, missing)}" for name in sorted(was.keys() | now.keys())
            if was.get(name, missing) != now.get(name, missing)]


def places(settings: NodeSettings) -> dict[str, str]:
    """Which data the node answers about, and where their budget is: paths with symbolic links resolved."""
    def place(path: Path) -> str:
        """The path as text, relative where it is in the node's folder, so that the folder can be moved."""
        whole, home = path.resolve(), settings.folder.resolve()
        return str(whole.relative_to(home) if whole.is_relative_to(home) else whole)

    return {"data": place(settings.folder / settings.data), "budget": place(settings.budget_folder)}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content as hexadecimal digits; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _settings_within(table: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, value as text) for each setting in nested tables."""
    if not isinstance(table, dict):
        yield name, json.dumps(table)
        return
    for key, value in table.items():
        yield from _settings_within(value, f"{name}.{key}" if name else key)
