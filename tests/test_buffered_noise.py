"""DP-FTRL by buffered factorisation: the published optimum, sensitivity by trying all participations, the noise that is drawn, and runs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from scipy.linalg import solve_triangular, toeplitz

import fedtail
from fedtail import BufferedNoise, CorrelatedNoise, PrivacyBudget
from fedtail.aggregation import CorrelatedMean
from fedtail.models import SoftmaxRegression
from fedtail.privacy.banded_factorisation import square_root_coefficients
from fedtail.privacy.buffered_factorisation import buffered_factor
from fedtail.runs import run as run_experiment
from fedtail.runs.execution import Interrupted
from test_correlated_noise import FILE, released_noise

from cases import small_population
from run_cases import METHODS, Onlooker, digests, experiment

TASK, PEOPLE = fedtail.Task(SoftmaxRegression(5, 3)), small_population(60)
METHOD = fedtail.dp_ftrl(60, 0.1, 1.0, rounds=12, cohort_size=15, buffers=2, learning_rate=0.1)


def matrix_of(factor, rounds: int) -> np.ndarray:
    """The factor C as a dense matrix, (rounds, rounds), from its coefficients one by one."""
    first = [1.0] + [sum(w * d ** (k - 1) for w, d in zip(factor.weights, factor.decays, strict=True)) for k in range(1, rounds)]
    return toeplitz(first, np.eye(1, rounds)[0])


@pytest.mark.parametrize(("rounds", "buffers", "within"), [(64, 2, 0.005), (256, 3, 0.005), (1024, 4, 0.005), (1024, 2, 0.03)])
def test_the_largest_error_is_within_a_percent_of_the_published_optimum(rounds, buffers, within):
    """Of Toeplitz factors the square root of A is best, with error sum_k (binom(2k, k) / 4^k)^2 for one participation."""
    found = buffered_factor(rounds, buffers, rounds, "max")
    error = math.sqrt(found.prefix_sum_error(rounds, "max")) * found.sensitivity(rounds, rounds)
    best = sum((math.comb(2 * k, k) / 4**k) ** 2 for k in range(min(rounds, 500))) + float((square_root_coefficients(rounds)[500:] ** 2).sum())
    assert 1 - 1e-9 < error / best < 1 + within


@pytest.mark.parametrize(("rounds", "separation", "error"), [(40, 40, "mean"), (40, 9, "mean"), (31, 5, "max")])
def test_errors_and_sensitivity_are_those_of_dense_matrices(rounds, separation, error):
    found = buffered_factor(rounds, 3, separation, error)
    dense = matrix_of(found, rounds)
    squares = (solve_triangular(dense.T, np.tril(np.ones((rounds, rounds))).T).T ** 2).sum(1)                 # of rows of A C^{-1}
    assert found.prefix_sum_error(rounds, error) == pytest.approx(squares.mean() if error == "mean" else squares[-1], rel=1e-10)
    assert found.sensitivity(rounds, separation) == pytest.approx(np.linalg.norm(dense[:, ::separation].sum(1)), rel=1e-12)
    assert (np.diff(found.coefficients(rounds)) < 0).all()                                                    # which the worst case relies on
    assert found.weights.sum() < 1


@pytest.mark.parametrize(("rounds", "separation"), [(9, 3), (8, 2), (10, 4), (6, 1)])
def test_the_sensitivity_by_trying_all_ways_to_participate(rounds, separation):
    found, largest = buffered_factor(rounds, 2, separation), 0.0
    matrix = matrix_of(found, rounds)
    for times in range(1, rounds + 1):
        for places in combinations(range(rounds), times):
            if all(later - earlier >= separation for earlier, later in pairwise(places)):
                signs = np.array(list(product((1.0, -1.0), repeat=times)))
                largest = max(largest, np.linalg.norm(signs @ matrix[:, places].T, axis=1).max())
    assert found.sensitivity(rounds, separation) == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize(("rounds", "separation"), [(60, 12), (50, 50)])
def test_no_other_weights_and_decays_nearby_are_better(rounds, separation):
    found = buffered_factor(rounds, 2, separation)

    def cost(weights, decays):
        other = replace(found, weights=weights, decays=decays)
        return other.prefix_sum_error(rounds) * other.sensitivity(rounds, separation) ** 2
    random, best = np.random.default_rng(0), cost(found.weights, found.decays)
    for scale in (1e-3, 1e-2, 1e-1):
        for _ in range(60):
            weights, decays = (values * np.exp(scale * random.standard_normal(2)) for values in (found.weights, 1 - found.decays))
            if weights.sum() < 1 and decays.max() < 1:
                assert cost(weights, 1 - decays) > best * (1 - 1e-5)


def test_it_beats_bands_where_clients_participate_seldom_and_has_less_memory():
    buffered, banded = BufferedNoise(1.0, 600, 300), CorrelatedNoise(1.0, 600, 300)
    assert buffered.model_deviation(1.0) < 0.9 * banded.model_deviation(1.0)
    assert (buffered.memory, banded.memory) == (4, 63)
    assert BufferedNoise(1.0, 1, 1).model_deviation(2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("lost", [(), (2,), (0, 3, 4)])
def test_noise_has_the_covariance_that_the_price_assumes(lost):
    """(C'C)^{-1} for the rounds that were held; entries of an empirical covariance of n draws are off by sqrt(2 / n) at most."""
    noise, width = BufferedNoise(0.7, rounds=9, separation=4, buffers=3), 40_000
    drawn = released_noise(CorrelatedMean(0.3, noise, 5.0), width, lost)
    held = [number for number in range(9) if number not in lost]
    factor = matrix_of(noise.factor, 9)[np.ix_(held, held)]
    expected = np.linalg.inv(factor.T @ factor)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs(drawn[held] @ drawn[held].T / width - expected).max() < 6 * math.sqrt(2 / width) * scale.max()
    for turn in range(4):                                               # nobody is exposed by more than the stated multiplier
        rows = np.array([float(number % 4 == turn) for number in held])
        assert np.linalg.norm(factor @ rows) <= noise.sensitivity * (1 + 1e-12)


def test_noise_in_the_model_is_what_was_planned():
    noise = BufferedNoise(1.0, rounds=64, separation=16, error="max")
    drawn = released_noise(CorrelatedMean(0.5, noise, 1.0), 4000).sum(0) * noise.sensitivity * 0.5
    assert drawn.std() == pytest.approx(noise.model_deviation(0.5), rel=4 / math.sqrt(2 * 4000))


def test_a_run_is_one_gaussian_sum_and_goes_on_to_the_same_bits():
    budget = PrivacyBudget(delta=1e-5)
    whole = fedtail.train(METHOD, TASK, PEOPLE, rounds=12, privacy=budget)
    resumed = fedtail.resume(fedtail.train(METHOD, TASK, PEOPLE, rounds=5, privacy=budget), PEOPLE, rounds=7)
    assert torch.equal(whole.state.params, resumed.state.params)
    assert whole.ledger.guarantee().epsilon == pytest.approx(get_epsilon_gaussian(1.0, 1e-5), rel=1e-9)
    banded = fedtail.train(fedtail.dp_ftrl(60, 0.1, 1.0, rounds=12, cohort_size=15, learning_rate=0.1), TASK, PEOPLE, rounds=12)
    assert not torch.equal(whole.state.params, banded.state.params)


def test_a_run_from_a_file_is_the_same_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "ftrl", FILE.replace('part = "CorrelatedNoise"', 'part = "BufferedNoise", buffers = 2'))
    whole = run_experiment(experiment("ftrl"), 3, tmp_path / "whole", Onlooker()).path
    with pytest.raises(Interrupted):
        run_experiment(experiment("ftrl"), 3, tmp_path / "cut", Onlooker(stop_after=3))
    assert digests(run_experiment(experiment("ftrl"), 3, tmp_path / "cut", Onlooker(), resume=True).path) == digests(whole)


def test_what_does_not_fit_is_refused_in_words():
    for make, text in ((lambda: BufferedNoise(1.0, 9, 4, 0), "buffers must be a whole number from 1 to 8, got 0"), (lambda: BufferedNoise(1.0, 0, 4), "rounds and separation"),
                       (lambda: BufferedNoise(0.0, 9, 4), "must be positive and finite"), (lambda: BufferedNoise(1.0, 9, 4, error="rms"), "error must be mean or max"),
                       (lambda: fedtail.dp_ftrl(60, 0.1, 1.0, 9, 10, bands=2, buffers=2), "bands=2 are of CorrelatedNoise, and buffers=2 of BufferedNoise")):
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(TypeError, match=r"noise must be CorrelatedNoise\(...\) or BufferedNoise\(...\)"):
        CorrelatedMean(1.0, fedtail.GaussianNoise(1.0), 1.0)
