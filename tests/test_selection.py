"""Private searches: the price of the best of several trials, the number of trials, and `fedtail tune` with a guarantee."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from attack_tuning import attack
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats
from scipy.special import logsumexp
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.experiment.tune_section import read_search
from fedtail.privacy import FixedSampling, GaussianRelease, NoSampling, PoissonSampling, RoundEvent, SeededRandomness, epsilon_at
from fedtail.privacy.accountants import ORDERS
from fedtail.privacy.selection import best_trial_divergences, draw_number_of_trials, epsilon_of_search, negative_binomial_gamma
from fedtail.runs.files import RunRefused
from fedtail.runs.private_tuning import PrivateSearch
from fedtail.runs.tuning import _split_held_out, tune

from run_cases import BASE, METHODS, Onlooker

SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
AT = np.array(ORDERS)


@pytest.mark.parametrize("stopping", SHAPES)
@pytest.mark.parametrize(("mean", "noise", "rate"), [(1, 2.0, 1.0), (4, 1.0, 0.1), (30, 5.0, 0.02)])
def test_the_bound_is_that_of_another_implementation(stopping, mean, noise, rate):
    """dp-accounting's own event for repeated trials, which knows Gaussian sums and Poisson samples of them."""
    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)) if rate < 1 else dp_accounting.GaussianDpEvent(noise)
    trial = dp_accounting.SelfComposedDpEvent(one, 20)
    theirs = RdpAccountant(list(ORDERS)).compose(RepeatAndSelectDpEvent(trial, mean, SHAPES[stopping])).rdp
    ours = best_trial_divergences(AT, RdpAccountant(list(ORDERS)).compose(trial).rdp, stopping, mean)
    finite = np.isfinite(theirs)
    assert np.allclose(ours[finite], theirs[finite], rtol=1e-6, atol=1e-9)
    sampling = PoissonSampling(rate) if rate < 1 else NoSampling()
    found = epsilon_of_search([(RoundEvent((GaussianRelease(noise),), sampling), 20)], (), stopping, mean, 1e-5)
    expected = RdpAccountant(list(ORDERS)).compose(RepeatAndSelectDpEvent(trial, mean, SHAPES[stopping])).get_epsilon(1e-5)
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_bound_in_closed_form_for_a_gaussian_trial():
    """Geometric, one Gaussian sum (rho = 1 / 2 z^2): min over j of (1 - 1/j) j rho + log(mean) / j is at j = sqrt(log(mean) / rho)."""
    rho, mean, orders = 0.02, 8.0, np.linspace(1.01, 200, 20_000)
    found = best_trial_divergences(orders, rho * orders, "geometric", mean)
    constant = 2 * (2 * math.sqrt(rho * math.log(mean)) - rho)
    whole = rho * orders + constant + math.log(mean) / (orders - 1)
    least = np.argmin(whole)                                                # below it a larger order bounds it
    assert np.allclose(found[least:], whole[least:], rtol=1e-5)
    assert np.allclose(found[:least], whole[least], rtol=1e-5)


def generating(stopping: str, mean: float):
    """E x^K."""
    if stopping == "poisson":
        return lambda x: np.exp(mean * (x - 1))
    gamma = negative_binomial_gamma(SHAPES[stopping], mean)
    if stopping == "geometric":
        return lambda x: gamma * x / (1 - (1 - gamma) * x)
    return lambda x: np.log1p(-(1 - gamma) * x) / math.log(gamma)


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return float(logsumexp(order * np.log(p) - (order - 1) * np.log(q)) / (order - 1))


@pytest.mark.parametrize("stopping", SHAPES)
def test_no_small_mechanism_exceeds_the_bound(stopping):
    """Outcomes in an order, two distributions of one trial: that of the best of K is exact, by the generating function of K."""
    random, tight = np.random.default_rng(0), 0.0
    orders = np.array([1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0, 64.0])
    for _ in range(150):
        p, q = random.dirichlet(np.full(4, random.choice([0.5, 5.0])), 2) * 0.98 + 0.005
        mean = float(random.choice([1.5, 4.0, 20.0]))
        best = generating(stopping, mean)
        ours, theirs = (np.diff(best(np.cumsum(np.append(0.0, one)))) for one in (p, q))
        if stopping == "poisson":                                           # it may make no trial at all
            ours, theirs = (np.append(one, math.exp(-mean)) for one in (ours, theirs))
        assert ours.sum() == pytest.approx(1)
        trial = np.array([max(divergence(p, q, order), divergence(q, p, order)) for order in orders])
        bound = best_trial_divergences(orders, trial, stopping, mean)
        exact = np.array([max(divergence(ours, theirs, order), divergence(theirs, ours, order)) for order in orders])
        assert (exact <= bound + 1e-9).all()
        tight = max(tight, float((exact / bound).max()))
    assert tight > 0.3                                                      # of this size, not of another


@pytest.mark.parametrize(("stopping", "law"), [
    ("poisson", stats.poisson(6.0)), ("geometric", stats.geom(1 / 6.0)), ("logarithmic", stats.logser(1 - negative_binomial_gamma(0.0, 6.0)))])
def test_the_number_of_trials_has_its_distribution(stopping, law):
    """A chi-squared test, wrong once in a million for a right sampler."""
    random, count = SeededRandomness(7), 4000
    drawn = np.array([draw_number_of_trials(stopping, 6.0, random) for _ in range(count)])
    assert law.mean() == pytest.approx(6.0, rel=1e-6)
    edges = [k for k in range(60) if count * law.pmf(k) > 8]
    seen = np.array([np.sum(drawn == k) for k in edges] + [np.sum(~np.isin(drawn, edges))])
    expected = count * np.array([law.pmf(k) for k in edges] + [1 - sum(law.pmf(k) for k in edges)])
    assert stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1) > 1e-6


def test_a_search_costs_what_its_parts_cost():
    trial = [(RoundEvent((GaussianRelease(3.0),), PoissonSampling(0.1)), 10)]
    score = [(RoundEvent((GaussianRelease(1.0),), NoSampling()), 1)]
    assert epsilon_of_search(trial, (), "composition", 5, 1e-5) == epsilon_at([(trial[0][0], 50)], 1e-5)
    assert epsilon_of_search(trial, score, "composition", 5, 1e-5) == epsilon_at([(score[0][0], 5)], 1e-5)      # those who judge pay more
    for stopping in SHAPES:
        with_score = epsilon_of_search(trial, score, stopping, 5, 1e-5)
        assert with_score > epsilon_of_search(trial, (), stopping, 5, 1e-5) > epsilon_at(trial, 1e-5)
        assert with_score >= epsilon_of_search((), score, stopping, 5, 1e-5)
    assert epsilon_of_search([(RoundEvent((GaussianRelease(0.0),), NoSampling()), 1)], (), "poisson", 5, 1e-5) == math.inf
    fixed = [(RoundEvent((GaussianRelease(3.0),), FixedSampling(10, 100)), 10)]
    assert epsilon_of_search(fixed, score, "poisson", 5, 1e-5, "replace-one") > 0
    with pytest.raises(ValueError, match="one trial or more on average"):
        best_trial_divergences(AT, AT, "poisson", 0.5)


def test_searching_many_times_shows_no_more_than_the_price_and_more_than_one_trial():
    outcome = attack(4000)                                                  # a lower bound is too large once in a hundred searches of a kind
    assert outcome.held, outcome.measured
    one, composed = (float(re.search(rf"{words} ([\d.]+)", outcome.measured)[1]) for words in ("one trial", "composition at least"))
    assert composed > 1.5 * one


TUNE = """
[tune]
trials = 3
statistic = "mean"
{private}
[tune.search]
local.learning_rate = {{ low = 0.01, high = 1.0, log = true }}
"""


def written(place: Path, private: str, more: str = "") -> Path:
    text = BASE.replace("rounds = 6", "rounds = 2") + METHODS["private"] + TUNE.format(private=private) + more
    (place / "t.toml").write_text(text)
    return place / "t.toml"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("private", "covered"), [('private = "composition"', False), ('private = "geometric"\nnoise = { noise_multiplier = 3.0 }', True)])
def test_a_private_search_states_what_its_best_model_cost(tmp_path, private, covered):
    found = tune(read_search(written(tmp_path, private)), (0,), tmp_path / "out", Onlooker())
    said = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert said == found["privacy"]
    assert (found["finished"], (tmp_path / "out" / "model.safetensors").is_file()) == (True, True)
    assert (said["not_charged"] == []) == covered
    assert (said["unit"], said["adjacency"], said["delta"]) == ("client", "zero-out", 0.01)
    assert said["guarantee"].startswith("simulated guarantee")
    if not covered:
        assert len(found["trials"]) == 3
        assert "held-out clients, by whose exact results the best trial was chosen, are not covered" in said["statement"]
    search = read_search(tmp_path / "t.toml")
    trial = PrivateSearch(search, *_split_held_out(search, 0))
    assert said["epsilon"] > epsilon_at([(trial.trial_round_event, trial.rounds_per_trial)], 0.01)


@pytest.mark.filterwarnings("ignore")
def test_a_random_number_of_trials_is_drawn_once_and_the_best_is_known_at_the_end_only(tmp_path, monkeypatch):
    search = read_search(written(tmp_path, 'private = "geometric"'))
    seed = next(seed for seed in range(20) if draw_number_of_trials("geometric", 3, SeededRandomness(seed, "trials")) == 3)
    stopped = tune(search, (seed,), tmp_path / "out", Onlooker(stop_after=4))
    assert (stopped["finished"], stopped["best"], (tmp_path / "out" / "best.toml").exists()) == (False, None, False)
    monkeypatch.setattr(PrivateSearch, "draw_number_of_trials", lambda *_: 1)      # as the operating system might
    done = tune(search, (seed,), tmp_path / "out", Onlooker(), resume=True)
    assert (done["finished"], len(done["trials"])) == (True, 3)
    with pytest.raises(RunRefused, match="holds another search"):
        tune(read_search(tmp_path / "t.toml", ["tune.trials=9"]), (seed,), tmp_path / "out", Onlooker(), resume=True)


@pytest.mark.parametrize(("private", "settings", "seeds", "text"), [
    ('private = "poisson"', ["privacy.epsilon=1.0"], (0,), r"would cost epsilon [\d.]+ at delta 0.01, more than epsilon = 1\."),
    ('private = "poisson"', [], (0, 1), "are made with one seed, got 2"),
    ('private = "poisson"\nmetric = "loss"\nnoise = { noise_multiplier = 1.0 }', [], (0,), "noise in \\[tune\\] is for the error"),
    ('private = "poisson"', ["tune.search.rounds=[2, 3]"], (0,), "changes what a trial costs"),
    ('private = "poisson"', ["aggregate.noise.noise_multiplier=0.0"], (0,), "noise"),
])
def test_what_has_no_price_is_refused_before_a_trial(tmp_path, private, settings, seeds, text):
    with pytest.raises(ValueError, match=text):
        tune(read_search(written(tmp_path, private), settings), seeds, tmp_path / "out", Onlooker())
    assert not (tmp_path / "out" / "trials.log").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_search_over_private_runs_without_a_guarantee_says_so(tmp_path):
    watch = Onlooker()
    tune(read_search(written(tmp_path, ""), ["tune.trials=1"]), (0,), tmp_path / "out", watch)
    assert any("the trials are private, the choice among them is not" in note for note in watch.notes)
    shown = CliRunner().invoke(app, ["tune", str(written(tmp_path, 'private = "composition"')), "--trials", "1", "--out", str(tmp_path / "two")])
    assert "A run of the file would be charged beside the search" in shown.output
    refused = CliRunner().invoke(app, ["tune", str(written(tmp_path, "noise = { noise_multiplier = 1.0 }"))])
    assert (refused.exit_code, 'Write private = "poisson" too.' in refused.output) == (2, True)
