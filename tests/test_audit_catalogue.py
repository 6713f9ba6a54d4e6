"""The audits of tests/audits in their quick form, and that they do what their page says.

A bound is above the truth with probability one in a million. Seeds are fixed but for noise that nodes draw from the operating system.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedtail.privacy import Attack, GaussianRelease, NoSampling, PoissonSampling, RoundEvent, epsilon_at, gaussian_epsilon

from audits import __main__ as command
from audits.canaries import Canaries
from audits.catalogue import AUDITS, DELTA
from audits.curve import Curve, epsilon_by_curve
from audits.findings import Finding, carry_out
from audits.page import BEGIN, END, write_page
from audits.targets import quantile_plan

QUICK = [audit for audit in AUDITS if audit.quick]


@pytest.mark.parametrize("audit", QUICK, ids=lambda audit: audit.name)
def test_a_release_keeps_its_claim_and_is_caught_with_too_little_noise(audit):
    finding = carry_out(audit, quick=True, seed=0)
    assert finding.passes, str(finding)
    assert finding.ratio < 3


def test_every_second_canary_sends_zeros_and_each_has_an_entry_and_a_bin_of_its_own():
    people = Canaries(6, fillers=2).population
    assert people.targets.isnan().tolist() == [False, False, True, False, True, False, True, False]
    assert np.flatnonzero(people.inputs[2:].numpy().sum(0)).tolist() == list(range(6))
    assert people.targets.square().floor()[people.targets.isfinite()].tolist() == [0, 0, 2, 4, 6]


@pytest.mark.parametrize(("shift", "variance"), [(1000, 250_000), (int(quantile_plan("flat", "zero-out").strategy.matrix.max()),
                                                                   float(5 * quantile_plan("flat", "zero-out").shares.variance))])
def test_a_discrete_gaussian_has_the_epsilon_of_a_normal_distribution(shift, variance):
    """By the sum of (p(y - shift) - e^epsilon p(y)) over the integers at which it is positive."""
    integers = np.arange(-60 * math.isqrt(int(variance)), 60 * math.isqrt(int(variance)))
    weights = np.exp(-integers**2 / (2 * variance))

    def excess(epsilon: float) -> float:
        gap = np.exp(-(integers - shift) ** 2 / (2 * variance)) - np.exp(epsilon - integers**2 / (2 * variance))
        return float(gap[gap > 0].sum() / weights.sum()) - DELTA

    assert brentq(excess, 0.0, 100.0) == pytest.approx(gaussian_epsilon(shift / math.sqrt(variance), DELTA), rel=2e-3)


def gaussian_rounds(multiplier: float, sampling, count: int):
    return ((RoundEvent((GaussianRelease(multiplier),), sampling), count),)


def test_the_curve_of_a_gaussian_sum_is_the_closed_form_and_never_above_it():
    curve, alarms = Curve(gaussian_rounds(1.0, NoSampling(), 1), 2.0), np.array([1e-3, 0.01, 0.1, 0.5, 0.9])
    exact = norm.cdf(norm.isf(alarms) - 2.0)
    assert (curve.fewest_misses(alarms) <= exact + 1e-9).all()
    assert curve.fewest_misses(alarms) == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_the_bound_by_a_curve_is_below_the_truth_and_near_it(factor):
    """Scores of three rounds drawn here, by numpy's generator, with noise that is 1.2 times too small or as charged."""
    random, mu, rate, runs = np.random.default_rng(1), factor / 0.75, 0.5, 40_000

    def scores(present: bool) -> np.ndarray:
        moved = mu * (random.random((runs, 3)) < rate) * present
        return np.log1p(rate * np.expm1(mu * (moved + random.normal(size=(runs, 3))) - mu**2 / 2)).sum(1)

    charged = gaussian_rounds(0.75, PoissonSampling(rate), 3)
    found = epsilon_by_curve(Attack(scores(False), scores(True), 1 - 1e-6), charged, DELTA)
    truth = epsilon_at(gaussian_rounds(0.75 / factor, PoissonSampling(rate), 3), DELTA)
    assert truth / 1.25 < found < truth


def finding(audit, proven: float = 5.0, damaged: float = 8.0) -> Finding:
    return Finding(audit, "noise / 2", 6.0, proven, damaged, 1000, 1.0, quick=False)


def test_what_passes():
    assert finding(AUDITS[0]).passes
    assert not finding(AUDITS[0], proven=6.1).passes             # above the claim
    assert not finding(AUDITS[0], proven=3.9).passes             # a sum is audited within a factor of 1.5
    assert not finding(AUDITS[0], damaged=5.9).passes            # not caught
    assert finding(next(one for one in AUDITS if one.training), proven=2.1).passes


def test_the_page_has_a_row_for_each_audit_that_ran(tmp_path):
    page = tmp_path / "audits.md"
    page.write_text(f"before\n{BEGIN}\n| `gone` | x |\n{END}\nafter\n")
    write_page(page, [finding(AUDITS[1]), finding(AUDITS[0])])
    write_page(page, [finding(AUDITS[1], proven=4.5)])
    text = page.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{AUDITS[0].name}`", f"| `{AUDITS[1].name}`"]
    assert [row[4] for row in rows] == ["5.00", "4.50"]
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")


def test_the_command_runs_the_audits_that_are_named_and_refuses_others(capsys):
    assert command.main(["--quick", "--seed", "0", "histogram_flat_gaussian"]) == 0
    assert "passes        histogram_flat_gaussian" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["nobody"])
    assert "there is no audit 'nobody'" in capsys.readouterr().err
