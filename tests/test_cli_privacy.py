"""`fedtail privacy`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fedtail
from fedtail.cli import app
from fedtail.privacy.calibration import noise_for
from fedtail.privacy.events import PoissonSampling
from fedtail.privacy.minimum_cohort import reveal_probability
from fedtail.runs import run as run_experiment

from run_cases import METHODS, Onlooker, experiment

SETTING = ("--population", "2500", "--cohort", "100", "--rounds", "1000", "--delta", "0.0004")
SMALL = ("--population", "1000", "--cohort", "100", "--rounds", "10", "--delta", "1e-5")
KEYS = ["noise_multiplier", "quantile_noise_multiplier", "update_noise_multiplier", "epsilon", "delta", "accountant", "sampling",
        "adjacency"]


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["privacy", *words], env={"COLUMNS": "140"})


def answer(*words: str) -> dict:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_the_noise_for_a_promise():
    found = answer(*SETTING, "--epsilon", "5", "--quantile-ratio", "0.25")
    assert list(found)[:8] == KEYS
    assert found["noise_multiplier"] == pytest.approx(1.164, abs=1e-3)
    assert found["update_noise_multiplier"] == pytest.approx(found["noise_multiplier"] * 1.25**0.5)
    assert found["quantile_noise_multiplier"] == pytest.approx(found["noise_multiplier"] * 5**0.5)
    assert (found["epsilon"], found["delta"]) == (5, 0.0004)
    assert (found["accountant"], found["sampling"], found["adjacency"]) == ("pld", "poisson", "zero-out")
    assert 4.999 < found["epsilon_spent"] <= 5
    assert found["second_opinion"] == {"accountant": "rdp", "epsilon": pytest.approx(5.626, abs=0.01)}
    assert found["epsilon_one_participation"] < 5 < found["epsilon_without_amplification"]


def test_the_promise_of_a_noise_is_the_inverse():
    bought = answer(*SMALL, "--epsilon", "2", "--models", "3")
    assert bought["quantile_noise_multiplier"] is None
    assert bought["update_noise_multiplier"] == pytest.approx(3**0.5 * bought["noise_multiplier"])
    back = answer(*SMALL, "--noise", str(bought["noise_multiplier"]), "--models", "3")
    assert back["epsilon"] == pytest.approx(2, rel=1e-4)
    assert {**back, "epsilon": 2.0} == {**bought, "epsilon_spent": pytest.approx(back["epsilon_spent"]),
                                        "second_opinion": back["second_opinion"]}


@pytest.mark.parametrize(("words", "expected"), [
    (("--sampling", "fixed"), ("pld", "fixed", "zero-out")),
    (("--sampling", "fixed", "--adjacency", "replace-one"), ("pld", "fixed", "replace-one")),
    (("--adjacency", "replace-one"), ("pld", "poisson", "replace-one")),
    (("--sampling", "none", "--accountant", "zcdp"), ("zcdp", "none", "zero-out")),
    (("--accountant", "rdp"), ("rdp", "poisson", "zero-out")),
], ids=lambda value: " ".join(value))
def test_every_way_to_draw_and_to_count(words, expected):
    found = answer(*SMALL, "--epsilon", "4", *words)
    assert (found["accountant"], found["sampling"], found["adjacency"]) == expected
    assert found["epsilon_spent"] <= 4
    plain = answer(*SMALL, "--epsilon", "4")
    assert found["noise_multiplier"] > plain["noise_multiplier"]
    assert bool(found["notes"]) == ("fixed" in words)


def test_without_sampling_no_cohort_is_needed():
    assert answer("--population", "1000", "--rounds", "1", "--delta", "1e-6", "--epsilon", "1", "--sampling", "none")["rate"] == 1


def test_skipped_rounds_are_accounted_for():
    found = answer(*SMALL, "--epsilon", "4", "--minimum", "100")
    drawn = PoissonSampling(0.1, reveal_probability(0.1, 1000, 100))
    assert found["noise_multiplier"] == pytest.approx(noise_for(4, 1e-5, 10, drawn).whole_round)
    assert found["noise_multiplier"] > answer(*SMALL, "--epsilon", "4")["noise_multiplier"]
    done = call(*SMALL, "--noise", "2", "--minimum", "60")
    assert "rounds of fewer than 60 are skipped, with probability" in done.stdout


def test_tables_for_people(tmp_path):
    done = call(*SMALL, "--epsilon", "4", "--quantile-ratio", "0.25", "--plot", str(tmp_path / "new" / "plot.html"))
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    for words in ("10 rounds, 1000 clients, cohorts of 100 by poisson sampling, zero-out, delta 1e-05", "noise multiplier of a whole round",
                  "noise multiplier of each histogram", "epsilon, by pld", "second opinion, by rdp", "without amplification, a client in every round",
                  "Epsilon against rounds, at this noise", "without amplification", "largest minimum missed"):
        assert words in done.stdout
    body = [line for line in done.stdout.splitlines() if line.startswith(("│", "┃"))]
    assert [line.split("│")[1].strip() for line in body[-6:]] == ["1", "2", "5", "8", "10", "20"]
    assert body[-2].split("│")[2].strip() == "4.000"
    page = (tmp_path / "new" / "plot.html").read_text()
    assert "epsilon at delta 1e-05" in page
    assert "<script src=" not in page                          # works offline


def test_printed_noise_is_rounded_upwards():
    shown = call(*SMALL, "--epsilon", "4")
    exact = answer(*SMALL, "--epsilon", "4")["noise_multiplier"]
    line = next(line for line in shown.stdout.splitlines() if "whole round" in line)
    assert exact <= float(line.split("│")[2]) < exact + 1.01e-4


def test_doubts_are_on_stderr():
    done = call("--population", "1000", "--cohort", "10", "--rounds", "10", "--delta", "0.01", "--epsilon", "4", "--sampling", "fixed")
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "warning: cohorts of fixed size earn no amplification under zero-out adjacency, and none is claimed: use Poisson sampling, or use replace-one adjacency",
        "warning: delta = 0.01 is not below 1 / population = 0.001: publishing all data of a client drawn at random would pass",
        "warning: cohorts of about 10 clients are small: the noise of a sum is the same for any cohort"]


def changed(**settings: str) -> list[str]:
    words = {"population": "1000", "cohort": "100", "rounds": "10", "delta": "1e-5", "epsilon": "4", **settings}
    return [word for name, value in words.items() if value for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(("words", "text"), [
    ([], "--population, --rounds, --delta, --cohort must be given too."),
    (changed(cohort=""), "--cohort must be given too."),
    (changed(epsilon=""), "give either --epsilon, for the noise it needs, or --noise, for the epsilon it gives."),
    (changed(noise="1"), "give either --epsilon, for the noise it needs, or --noise, for the epsilon it gives."),
    (changed(cohort="1001"), "--cohort must be between 1 and the population of 1000, got 1001."),
    (changed(population="0"), "--population must be 1 or more, got 0."),
    (changed(rounds="0"), "there must be one round or more, got rounds=0."),
    (changed(epsilon="0"), "epsilon must be positive and finite, got 0."),
    (changed(delta="1"), "delta must be in (0, 1), got 1."),
    (changed(epsilon="", noise="0"), "noise (z of the whole round) must be positive and finite, got 0."),
    (changed(quantile_ratio="-1"), "quantile_ratio (r) must not be negative, got -1."),
    (changed(models="0"), "a family has one model or more, got models=0."),
    (changed(sampling="uniform"), "--sampling must be poisson, fixed or none, got uniform."),
    (changed(adjacency="add"), "--adjacency must be zero-out or replace-one, got add."),
    (changed(accountant="moments"), "--accountant must be pld, rdp or zcdp, got moments."),
    (changed(accountant="zcdp"), "sampling does not amplify concentrated privacy (zcdp)."),
    (changed(minimum="60", sampling="fixed"), "--minimum is for Poisson sampling: other cohorts have a size that is known."),
    (changed(minimum="1001"), "the minimum must be between 0 and the population of 1000, got 1001."),
    (changed(plot="plot.png"), "--plot writes a page, .html, got plot.png."),
    (changed(population="50", cohort="10"), "a guarantee for each of 50 clients will be useless: "),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_cannot_be_had_is_refused_before_anything_is_computed(words, text):
    done = call(*words, "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"Error: {text}")


def test_few_clients_are_shown_their_numbers_when_they_insist():
    refused = call(*changed(population="50", cohort="10"))
    assert refused.stderr.endswith("better a thousand. Write --anyway to see the numbers.\n")
    assert answer(*changed(population="50", cohort="10"), "--anyway")["noise_multiplier"] > 0


def test_its_help_needs_no_tensor():
    script = Path(sys.executable).with_name("fedtail")
    done = subprocess.run([sys.executable, "-X", "importtime", str(script), "privacy", "--help"], capture_output=True, text=True,
                          check=False, timeout=60)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert (done.returncode, "fedtail.cli.privacy" in loaded) == (0, True)
    assert not loaded & {"torch", "numpy", "scipy", "dp_accounting", "plotly"}
    assert "--quantile-ratio" in done.stdout


# About a run

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    float_noise, integers = 'noise = { noise_multiplier = 1.5 }', 'noise = { part = "DiscreteNoise", noise_multiplier = 1.5, planned_clients = 1 }'
    for_release = METHODS["private"].replace(float_noise, integers).replace("delta = 0.01", 'delta = 0.01\nrandomness = "os"')
    METHODS.update({"for release": for_release, "seeded": METHODS["private"]})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fedtail.NoContributionWarning)      # noise no one knows may hide eight clients in every round
            return {name: run_experiment(experiment(name), 3, place / name, Onlooker()).path
                    for name in ("for release", "seeded", "delta_fl")}
    finally:
        for name in ("for release", "seeded"):
            del METHODS[name]


def test_a_run_is_told_from_its_ledger(runs):
    told = json.loads(call(str(runs["seeded"]), "--json").stdout)
    assert told["epsilon"] == json.loads((runs["seeded"] / "privacy.json").read_text())["epsilon"]
    assert told["for_release"] is False
    shown = call(str(runs["seeded"])).stdout
    assert "epsilon at delta 0.01, by rdp" in shown
    assert "released: the updates, by AdaptiveClip" in shown
    assert "simulated guarantee: the seed is in this folder" in shown
    smaller = json.loads(call(str(runs["seeded"]), "--delta", "0.0001", "--json").stdout)
    assert smaller["epsilon"] > told["epsilon"]
    assert "epsilon is infinity after 6 rounds: released without a mechanism: what Digit asks about the losses; the updates, by WeightedMean" in \
        call(str(runs["delta_fl"])).stdout


def test_only_a_run_nobody_can_replay_is_for_release(runs):
    released = call(str(runs["for release"]), "--for-release")
    assert released.exit_code == 0
    assert "The guarantee covers model.safetensors." in released.stdout
    for name, texts in (("seeded", ("is not for release. simulated guarantee: the seed is in this folder", 'randomness = "os"', "DiscreteNoise")),
                        ("delta_fl", ("epsilon is infinite: released without a mechanism",))):
        refused = call(str(runs[name]), "--for-release")
        assert refused.exit_code == 2
        assert all(text in refused.stderr for text in texts)
    assert "--for-release is about a run." in call("--for-release").stderr
