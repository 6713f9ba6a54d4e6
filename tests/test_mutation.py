"""The tool behind `make mutants`, on a package of a few lines whose mutants are known."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from scipy.stats import norm

from mutation.operators import Mutant, mutants
from mutation.summary import Area

SOURCE = '''\
"""A few functions."""

LIMIT = 3


def absolute(x: int | None) -> int:
    """No more than the limit."""
    if x is None:
        raise ValueError(f"x must be a number, got {x}, which is below {0 + 1}.")
    return min(x if x > 0 else -x, LIMIT)


def untested(values: list[int]) -> int:
    total = 0
    for value in values:
        total += value
    return total
'''
TESTS = '''\
import pytest
from tiny.core import absolute, untested

def test_absolute():
    assert [absolute(x) for x in (-5, -3, -2, 0, 1, 2, 3, 4)] == [3, 3, 2, 0, 1, 2, 3, 3]

def test_refusal():
    with pytest.raises(ValueError):
        absolute(None)

def test_without_assertion():
    untested([1, 2])
'''
PROJECT = '''\
root = "."
source = "src"
package = "tiny"
tests = "tests"
reasons = "reasons.toml"
summary = "summary.md"
areas = ["core"]
preload = ["pytest", "coverage"]
left_out = {}
'''
CAUGHT = {"constant to 4", "Is to IsNot", "raise removed", "twin", "Gt to LtE", "USub dropped"}
EQUIVALENT = {"Gt to GtE"}                                                           # at 0 both branches are 0
UNTESTED = {"update removed", "Add= to Sub=", "constant to 1 in untested"}
SHIFTED = {"constant to 1 in absolute"}                                              # x > 1: absolute(1) is -1


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "src" / "tiny").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "tiny" / "__init__.py").touch()
    (tmp_path / "src" / "tiny" / "core.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_core.py").write_text(TESTS)
    (tmp_path / "project.toml").write_text(PROJECT)
    return tmp_path


def command(tiny: Path, name: str) -> list[str]:
    return [sys.executable, "-m", "mutation", name, "--project", str(tiny / "project.toml"), "--jobs", "1"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run(tiny: Path, name: str = "run") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tiny, name), env=environment(), capture_output=True, text=True, timeout=120)


def lines(tiny: Path) -> list[str]:
    place = tiny / ".mutants" / "results.jsonl"
    return place.read_text().splitlines() if place.is_file() else []


def named(tiny: Path) -> dict[str, Mutant]:
    found = mutants(tiny / "src", "tiny/core.py")
    often = Counter(mutant.operator for mutant in found)
    return {mutant.operator + (f" in {mutant.function}" if often[mutant.operator] > 1 else ""): mutant for mutant in found}


def survivors(tiny: Path) -> set[str]:
    names = {mutant.identity: name for name, mutant in named(tiny).items()}
    return {names[result["identity"]] for result in map(json.loads, lines(tiny)) if not result["caught"]}


def test_only_what_computes_is_mutated(tiny):
    assert set(named(tiny)) == CAUGHT | EQUIVALENT | UNTESTED | SHIFTED


def test_an_identity_outlives_changes_elsewhere(tiny):
    before = {mutant.identity for mutant in mutants(tiny / "src", "tiny/core.py")}
    (tiny / "src" / "tiny" / "core.py").write_text(SOURCE.replace("LIMIT = 3", "OTHER = 7\nLIMIT = 3"))
    after = {mutant.identity for mutant in mutants(tiny / "src", "tiny/core.py")}
    assert before < after
    assert len(after - before) == 1


def test_a_killed_run_goes_on_where_it_stopped_and_new_tests_meet_the_survivors_only(tiny):
    started = subprocess.Popen(command(tiny, "run"), env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while len(lines(tiny)) < 3 and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    first = lines(tiny)
    assert 3 <= len(first) < len(named(tiny))
    with (tiny / ".mutants" / "results.jsonl").open("a") as file:
        file.write('{"identity": "cut sh')
    assert run(tiny).returncode == 1                                                  # survivors without a reason
    assert lines(tiny)[:len(first)] == first
    whole = [line for line in lines(tiny) if not line.endswith("cut sh")]
    assert Counter(json.loads(line)["identity"] for line in whole) == Counter(mutant.identity for mutant in named(tiny).values())
    (tiny / ".mutants" / "results.jsonl").write_text("\n".join(whole) + "\n")
    assert survivors(tiny) == EQUIVALENT | UNTESTED
    with (tiny / "tests" / "test_core.py").open("a") as file:
        file.write("\ndef test_sum():\n    assert untested([1, 2]) == 3\n")
    (tiny / "reasons.toml").write_text(f'[{named(tiny)["Gt to GtE"].identity}]\nkind = "equivalent"\nreason = "-0 is 0."\n')
    ended = run(tiny)
    again = [json.loads(line) for line in lines(tiny)[len(whole):]]
    assert {result["identity"] for result in again} == {named(tiny)[name].identity for name in EQUIVALENT | UNTESTED}
    assert [result["identity"] for result in again if not result["caught"]] == [named(tiny)["Gt to GtE"].identity]
    assert {result["by"] for result in again if result["caught"]} == {"tests/test_core.py::test_sum"}
    assert (ended.returncode, "100.0%" in ended.stdout) == (0, True), ended.stdout + ended.stderr
    assert run(tiny, "summary").returncode == 0
    assert "-0 is 0." in (tiny / "summary.md").read_text()


@pytest.mark.parametrize("caught", [0, 3, 57, 60])
def test_the_ends_of_the_interval_are_as_many_standard_deviations_from_the_share_found(caught):
    ends = Area("a", 500, 60, 60, caught, ()).interval
    for end in ends:
        if 1e-9 < end < 1 - 1e-9:
            assert abs(caught / 60 - end) / math.sqrt(end * (1 - end) / 60) == pytest.approx(norm.ppf(0.975))
    assert ends[0] - 1e-9 <= caught / 60 <= ends[1] + 1e-9
