"""`fedtail quantile`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from pytest import approx
from typer.testing import CliRunner, Result

from fedtail.cli import app
from fedtail.privacy.concentrated import epsilon_from_rho, largest_rho
from fedtail.privacy.randomness import SeededRandomness
from fedtail.quantiles import private_quantiles

FINE = ("--range", "0", "10", "--epsilon", "1", "--delta", "1e-5")


@pytest.fixture
def values(tmp_path, monkeypatch) -> np.ndarray:
    monkeypatch.chdir(tmp_path)
    numbers = np.random.default_rng(0).uniform(0, 10, 800)
    np.save("values.npy", numbers)
    return numbers


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["quantile", *words], env={"COLUMNS": "140"})


def answer(*words: str) -> dict:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_json_has_the_documented_keys_and_the_numbers_of_the_function(values):
    result = answer("values.npy", "--level", "0.9", *FINE, "--bins", "32", "--repeat", "3", "--seed", "5")
    again = [private_quantiles(values, [0.9], range=(0, 10), bins=32, epsilon=1.0, delta=1e-5, randomness=SeededRandomness(5, "quantile", k))
             for k in range(3)]
    assert list(result)[:6] == ["method", "level", "estimates", "epsilon", "delta", "expected_error"]
    assert result["method"] == "optimal"
    assert result["level"] == 0.9
    assert result["estimates"] == [one.estimates[0] for one in again]
    assert (result["epsilon"], result["delta"]) == (1.0, 1e-5)
    assert result["expected_error"] == again[0].expected_error[0]
    assert result["releases"] == 3
    assert result["epsilon_of_all_releases"] == approx(epsilon_from_rho(3 * largest_rho(1.0, 1e-5), 1e-5), rel=1e-4)
    assert result["simulated"] is True
    assert (result["adjacency"], result["sampling"], result["accountant"]) == ("zero-out", "none", "zcdp")
    observed = np.mean([abs((values <= one.estimates[0]).mean() - 0.9) for one in again])
    assert observed < 5 * result["expected_error"]


def test_several_levels_are_lists_out_of_one_release(values):
    result = answer("values.npy", "--level", "0.5", "--level", "0.9", *FINE, "--repeat", "2", "--seed", "1", "--method", "tree")
    assert result["level"] == [0.5, 0.9]
    assert np.shape(result["estimates"]) == (2, 2)
    assert len(result["expected_error"]) == 2
    assert result["method"] == "tree"
    both = private_quantiles(values, [0.5, 0.9], range=(0, 10), epsilon=1.0, delta=1e-5, method="tree", randomness=SeededRandomness(1, "quantile", 0))
    assert result["estimates"][0] == list(both.estimates)


def test_without_a_seed_no_two_runs_are_alike(values):
    first, second = (answer("values.npy", "--level", "0.5", *FINE) for _ in range(2))
    assert first["simulated"] is False
    assert first["estimates"] != second["estimates"]


def test_the_table_says_what_was_expected_before_what_came_out_and_what_it_cost(values):
    done = call("values.npy", "--level", "0.9", *FINE)
    assert done.exit_code == 0
    text = done.stdout
    assert text.startswith("800 clients, 64 bins from 0 to 10 (values outside are clipped), method optimal.\nExpected error |F(estimate) - level|, before anything is spent: 0.00")
    assert text.index("Expected error") < text.index("Estimates")
    for words in ("share of clients in its bin", "Noise 4.", "scale 256, modulus ", "wrap-around with probability 1e-12 at most.",
                  "in the last, clipped values included.",
                  "Epsilon 1 at delta 1e-05 (client-level, add-or-remove-one-client; no sampling), by concentrated privacy (zCDP), against an observer of the sum over 800 honest clients or more, and of no single row."):
        assert words in text
    assert "imulated" not in text


def test_repeats_say_that_they_compose_and_a_seed_that_it_is_a_simulation(values):
    text = call("values.npy", "--level", "0.9", *FINE, "--repeat", "4", "--seed", "0").stdout
    together = epsilon_from_rho(4 * largest_rho(1.0, 1e-5), 1e-5)
    assert "Estimates, +- over 4 releases" in text
    assert "Simulated guarantee, the seed is known: epsilon 1 at delta 1e-05" in text
    assert f"That is for one release. These 4 together: epsilon = {together:.3g} at this delta." in text


def test_values_are_read_from_other_files_too(values):
    Path("plain.txt").write_text("\n".join(map(repr, values.tolist())))
    Path("table.csv").write_text("client,loss\n" + "\n".join(f"c{k},{v!r}" for k, v in enumerate(values.tolist())))
    np.savez("arrays.npz", loss=values, other=values * 0)
    parquet.write_table(pyarrow.table({"loss": values}), "column.parquet")
    np.save("edges.npy", np.linspace(0, 10, 65))
    wanted = ("--level", "0.5", "--seed", "3")
    first = answer("values.npy", *wanted, *FINE)["estimates"]
    for words in (["plain.txt"], ["table.csv", "--column", "loss"], ["arrays.npz", "--column", "loss"], ["column.parquet"]):
        assert answer(*words, *wanted, *FINE)["estimates"] == first
    assert answer("values.npy", *wanted, "--edges", "edges.npy", *FINE[3:])["estimates"] == approx(first)


@pytest.mark.parametrize(("words", "text"), [
    (["values.npy", "--level", "0.5", *FINE[:3], "--epsilon", "0", "--delta", "1e-5"], "epsilon must be positive and finite, got 0."),
    (["values.npy", "--level", "0.5", *FINE[:3], "--epsilon", "1", "--delta", "1"], "delta must be in (0, 1), got 1."),
    (["values.npy", "--level", "0.5", "--range", "4", "4", *FINE[3:]], "the range must be two finite numbers, the lower one first, got 4 and 4."),
    (["values.npy", "--level", "0.5", *FINE[3:]], "Write one of the two (--range or --edges)."),
    (["values.npy", "--level", "50", *FINE], "level (p) must be in (0, 1), got 50. It is a fraction: for the 90th percentile write 0.9."),
    (["values.npy", "--level", "0.5", *FINE, "--method", "tree", "--bins", "48"], "a tree needs a number of bins that is a power of two, got 48. Write 32 or 64, or take another method."),
    (["values.npy", "--level", "0.5", *FINE, "--method", "best"], "method must be one of auto, flat, tree, optimal, got 'best'."),
    (["values.npy", "--level", "0.5", *FINE, "--adjacency", "add"], "adjacency must be one of zero-out, replace-one, got 'add'."),
    (["values.npy", "--level", "0.5", *FINE, "--max-error", "0.004"], "is above max_error = 0.004, so nothing is released. About "),
    (["values.npy", "--level", "0.5", *FINE, "--modulus", "1000"], "modulus (M) = 1000 is too small: sums of 800 rows at scale 256 with their noise need "),
    (["few.npy", "--level", "0.5", *FINE], "50 clients are too few for a guarantee about single clients: the noise that hides one does not shrink with their number"),
    (["missing.npy", "--level", "0.5", *FINE], "there is no file missing.npy. Pass one number per client, as numpy.save writes them."),
    (["values.dat", "--level", "0.5", *FINE], "values.dat ends in '.dat'; files that end in .npy, .csv, .txt, .npz or .parquet are read."),
    (["two.csv", "--level", "0.5", *FINE], "two.csv has 2 columns. Say which with --column: a, b."),
    (["two.csv", "--level", "0.5", *FINE, "--column", "c"], "two.csv has no column 'c'. It has: a, b."),
    (["two.csv", "--level", "0.5", *FINE, "--column", "b"], "two.csv has lines without a number in column 'b': could not convert string to float: 'x'."),
    (["objects.npy", "--level", "0.5", *FINE], "objects.npy holds Python objects, which need pickle and are not read"),
])
def test_bad_requests_are_refused_before_anything_is_released(values, words, text):
    np.save("few.npy", np.ones(50))
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("values.dat").write_text("1")
    Path("two.csv").write_text("a,b\n1,2\n3,x\n")
    done = call(*words)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert text in done.stderr


def test_what_is_refused_can_be_insisted_on(values):
    np.save("few.npy", values[:50])
    assert len(answer("few.npy", "--level", "0.5", *FINE, "--allow-few")["estimates"]) == 1
    wrapping = answer("values.npy", "--level", "0.5", *FINE, "--modulus", "1024", "--allow-wrap")
    assert (wrapping["modulus"], wrapping["wrap_probability"]) == (1024, 1.0)


def test_the_installed_command_works_and_its_help_loads_no_tensor(values):
    script = Path(sys.executable).with_name("fedtail")
    done = subprocess.run([script, "quantile", "values.npy", "--level", "0.5", *FINE, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["estimates"][0] == approx(5, abs=1)
    probe = "import sys; from typer.testing import CliRunner; from fedtail.cli import app; CliRunner().invoke(app, ['quantile', '--help']); print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
