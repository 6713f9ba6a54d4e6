"""The command line, run as a user runs it."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app

SCRIPT = Path(sys.executable).with_name("fedtail")
PLAIN = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}


def run(*arguments: str, program: tuple[str, ...] = (str(SCRIPT),)) -> subprocess.CompletedProcess:
    return subprocess.run([*program, *arguments], capture_output=True, text=True, check=False, timeout=300, env=PLAIN)


@pytest.fixture(scope="module")
def first() -> subprocess.CompletedProcess:
    return run("demo", "--rounds", "3", "--json")


@pytest.fixture(scope="module")
def table() -> subprocess.CompletedProcess:
    return run("demo", "--rounds", "3")


@pytest.fixture(scope="module")
def other_seed() -> subprocess.CompletedProcess:
    return run("demo", "--rounds", "3", "--seed", "1", "--json")


def test_version_and_help():
    version, text = run("--version"), run("--help")
    assert (version.returncode, version.stdout, version.stderr) == (0, f"fedtail {fedtail.__version__}\n", "")
    assert text.returncode == 0
    assert re.search(r"^\s+demo\s+Train FedAvg and Delta-FL", text.stdout, re.MULTILINE)
    assert "--version" in text.stdout


@pytest.mark.parametrize("command", [["run"], ["init"], ["tune"], ["data", "describe"], ["deploy", "local"], ["deploy", "node", "predict"]], ids=" ".join)
def test_brackets_in_help_are_not_escaped(command):
    text = CliRunner().invoke(app, [*command, "--help"]).stdout
    assert "[required]" in text or "[default: " in text
    assert "\\" not in text


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"]], ids=" ".join)
def test_commands_that_need_no_tensor_import_none(arguments):
    done = run("-X", "importtime", str(SCRIPT), *arguments, program=(sys.executable,))
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0
    assert "fedtail.cli" in loaded      # the probe sees what was imported
    assert not loaded & {"torch", "numpy", "scipy", "sklearn", "pyarrow"}


def test_without_a_command_it_prints_its_help():
    done = run()
    assert done.returncode in (0, 2)      # click 8.2 changed it
    assert "demo" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [
    ["demo", "--rounds", "-1"], ["demo", "--rounds", "many"], ["demo", "--seed", "1.5"], ["demo", "--unknown"], ["demo", "more"],
    ["undo"], ["--unknown"],
], ids=" ".join)
def test_bad_options_exit_with_2_and_say_so_on_stderr(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error" in done.stderr or "Usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_json_is_one_object_of_the_documented_shape_and_nothing_else(first):
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\n") == 1
    result = json.loads(first.stdout)
    assert list(result) == ["rows", "answers"]
    assert [one["sentence"].partition(";")[0].partition(":")[0] for one in result["answers"]] == [
        "Delta-FL, worst 50% of clients", "Delta-FL, worst 25% of clients"]
    assert [(row["method"], row["tail_fraction"]) for row in result["rows"]] == [
        ("FedAvg", None), ("Delta-FL", 0.5), ("Delta-FL", 0.25)]
    for row in result["rows"]:
        assert list(row) == ["method", "tail_fraction", "mean", "p90", "worst10"]
        numbers = [row[key] for key in ("mean", "p90", "worst10")]
        assert all(type(x) is float and math.isfinite(x) and 0 <= x <= 100 for x in numbers)
        assert row["mean"] <= row["worst10"]
        assert row["p90"] <= row["worst10"] + 1e-9      # the mean of the worst 10% is at least their boundary
        assert row["mean"] > 1                          # percent: three rounds do not learn ten classes to 1% error
        # 500 clients of 100 examples: errors are whole percents, so 500 times their mean is a whole number
        assert 500 * row["mean"] == pytest.approx(round(500 * row["mean"]), abs=1e-6)
        assert 50 * row["worst10"] == pytest.approx(round(50 * row["worst10"]), abs=1e-6)
    assert len({row["mean"] for row in result["rows"]}) > 1      # the methods are not the same


def test_the_table_shows_the_same_numbers_aligned(first, table):
    """Another process with the same seed: the numbers of the table are those of the JSON."""
    assert table.returncode == 0, table.stderr
    assert table.stderr == ""      # no bar where nobody looks
    lines = table.stdout.splitlines()
    assert lines[0].strip() == "Error on 500 unseen clients after 3 rounds, %"
    body = [line for line in lines[1:] if line.strip() and line[0] not in "DI"]      # what follows the table is about both methods
    assert len({len(line) for line in body}) == 1
    assert [line.partition(":")[0] for line in lines[-3:]] == ["Delta-FL, worst 50% of clients", "Delta-FL, worst 25% of clients", "In brackets"]
    assert [word for word in ("method", "mean", "90th percentile", "worst 10%") if word in table.stdout] == [
        "method", "mean", "90th percentile", "worst 10%"]
    named = [line for line in body if re.search(r"FedAvg|Delta-FL", line)]
    assert [re.search(r"FedAvg|Delta-FL, worst \d+% of clients", line).group() for line in named] == [
        "FedAvg", "Delta-FL, worst 50% of clients", "Delta-FL, worst 25% of clients"]
    ends = {tuple(m.end() for m in re.finditer(r"\d+\.\d\d", line)) for line in named}
    assert len(ends) == 1      # to the right in their columns
    shown = [[float(x) for x in re.findall(r"\d+\.\d\d", line)] for line in named]
    told = [[row[key] for key in ("mean", "p90", "worst10")] for row in json.loads(first.stdout)["rows"]]
    assert shown == [pytest.approx(row, abs=0.005 + 1e-9) for row in told]


def test_another_seed_gives_other_numbers(first, other_seed):
    assert other_seed.returncode == 0, other_seed.stderr
    a, b = (json.loads(done.stdout)["rows"] for done in (first, other_seed))
    assert all(x["mean"] != y["mean"] for x, y in zip(a, b, strict=True))


def test_a_reader_that_has_gone_ends_a_command_without_a_word(tmp_path):
    file = tmp_path / "many.csv"
    long = "import typer\nfrom fedtail.cli.terminal import print_errors_as_sentences as words\n@words\ndef f():\n" \
           "    for k in range(100000): print('some line of output', k)\nf()"
    done = subprocess.run(["bash", "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(long)} 2>{file} | head -1"], capture_output=True)
    assert done.stdout == b"some line of output 0\n"
    assert "Broken pipe" not in file.read_text()
