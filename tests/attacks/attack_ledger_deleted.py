"""Claim: a run whose ledger was deleted, cut or changed neither goes on nor passes for release, and reading a ledger changes nothing.

Attacker: whoever can write to the run's folder and wants a smaller epsilon in its statement, without forging digests. Method: a
run for release is stopped half-way; its `ledger.jsonl` is deleted, cut after its first round or given other noise; then the run is
resumed, and its statement is asked for. What it would have said is compared with what an untouched run says.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from outcome import Outcome
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.experiment import Source
from fedtail.experiment.experiment import build_experiments
from fedtail.privacy.ledger_file import LedgerError
from fedtail.runs import run
from fedtail.runs.execution import Interrupted
from fedtail.runs.files import RunError

from run_cases import BASE, METHODS, Onlooker

RELEASED = METHODS["private"].replace('noise = { noise_multiplier = 1.5 }',
                                      'noise = { part = "DiscreteNoise", noise_multiplier = 1.5, planned_clients = 1 }')
[EXPERIMENT] = build_experiments(Source.parse(BASE + RELEASED.replace("delta = 0.01", 'delta = 0.01\nrandomness = "os"'), "attack.toml",
                                              Path(), ()), "attack")
DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "cut after a round": lambda path: path.write_bytes(re.match(rb"(?s).*?(?=\{\"open\": 1)", path.read_bytes()).group()),
    "given more noise": lambda path: path.write_bytes(path.read_bytes().replace(b'"honest": 1', b'"honest": 9')),
}


def statement(folder: Path, *words: str) -> tuple[int, str]:
    """What `fedtail privacy` says of a run."""
    done = CliRunner().invoke(app, ["privacy", str(folder), *words])
    return done.exit_code, done.output


def attack(damages: tuple[str, ...] = tuple(DAMAGES)) -> Outcome:
    """Damage the ledger of a stopped run in several ways, go on, and ask for the statement; then that of a finished run."""
    said, wrong = [], []
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopped, whole = Path(place) / "stopped", Path(place) / "whole"
        with suppress(Interrupted):
            run(EXPERIMENT, 3, stopped, Onlooker(stop_after=4))
        run(EXPERIMENT, 3, whole, Onlooker())
        honest = json.loads(statement(whole, "--json")[1])["epsilon"]
        before = (whole / "ledger.jsonl").read_bytes()
        (whole / "ledger.jsonl").write_bytes(before + b'{"ask": [0')           # as a writer would leave it for a moment
        statement(whole)
        if (whole / "ledger.jsonl").read_bytes() != before + b'{"ask": [0':
            wrong.append("reading a ledger cut it")
        (whole / "ledger.jsonl").write_bytes(before)
        for name in damages:
            for source, goes_on in ((stopped, True), (whole, False)):
                folder = Path(place) / f"{name} {goes_on}"
                shutil.copytree(source, folder)
                DAMAGES[name](folder / "ledger.jsonl")
                with suppress(RunError, LedgerError):
                    run(EXPERIMENT, 3, folder, Onlooker(), resume=goes_on) if goes_on else None
                code, text = statement(folder, "--json", "--for-release")
                if code == 0:
                    found = json.loads(text)["epsilon"]
                    wrong.append(f"{name}{', resumed' if goes_on else ''}: epsilon {found:.2f} instead of {honest:.2f}, for release")
                said.append(name)
    return Outcome(not wrong, "; ".join(wrong) if wrong else f"{len(said)} damaged folders refused, epsilon {honest:.2f} untouched")
