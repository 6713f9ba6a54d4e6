"""Rows, noise-free sums, estimates and readouts of histograms, against other solvers and by trying everything."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx
from scipy.optimize import isotonic_regression, nnls

from fedtail import ExactQuantile
from fedtail.clients import Seen
from fedtail.privacy.discrete_gaussian import exact
from fedtail.privacy.randomness import SeededRandomness
from fedtail.quantiles import reading
from fedtail.quantiles.bins import Edges
from fedtail.quantiles.factorisation import optimal_factor, workload
from fedtail.quantiles.strategies import Strategy, flat, optimal, printed_cumulative, scale_for, tree
from fedtail.risk.base import fit_locally

STRATEGIES = [flat(16), tree(16), optimal(16), optimal(16, level=0.8), optimal(16, public_total=True)]
NAMES = ["flat", "tree", "optimal", "optimal for a level", "optimal with a public total"]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)


def noisy_sums(strategy: Strategy, histogram: np.ndarray, deviation: float, count: int, *names) -> np.ndarray:
    """`count` sums with discrete Gaussian noise of this deviation: (count, width)."""
    noise = exact(Fraction(round(deviation**2)), count * strategy.width, SeededRandomness(0, strategy.name, *names))
    return strategy.matrix @ histogram + noise.reshape(count, strategy.width)


# bins

@given(st.lists(st.floats(-50, 50), min_size=3, max_size=20, unique=True), st.lists(st.floats(-80, 80), min_size=1, max_size=30))
def test_every_value_is_in_exactly_one_bin_and_those_outside_in_the_ends(ends, values):
    edges = Edges.given(sorted(ends))
    for value, place in zip(values, edges.place(np.array(values)).tolist(), strict=True):
        clipped = min(max(value, edges.values[0]), edges.values[-1])
        inside = [j for j in range(edges.bins) if edges.values[j] <= clipped < edges.values[j + 1]
                  or (j == edges.bins - 1 and clipped == edges.values[-1])]
        assert inside == [place]


def test_equal_bins_have_equal_width_and_a_middle():
    edges = Edges.equal(-1.0, 3.0, 8)
    assert np.diff(edges.array) == approx(np.full(8, 0.5))
    assert edges.middles == approx(np.linspace(-0.75, 2.75, 8))
    assert edges.place(np.array([-np.inf, np.inf])).tolist() == [0, 7]


# strategies

def test_flat_rows_are_one_bin_and_tree_rows_are_the_nodes_above_it():
    assert flat(4, scale=3).rows(np.array([2, 0])).tolist() == [[0, 0, 3, 0], [3, 0, 0, 0]]
    nodes = tree(8, scale=1)
    assert nodes.width == 2 * 8 - 2
    spans = [(start, start + (1 << r)) for r in range(3) for start in range(0, 8, 1 << r)]
    for j in range(8):
        assert nodes.rows(np.array([j]))[0].tolist() == [int(low <= j < high) for low, high in spans]


@every_strategy
def test_sensitivities_are_those_of_all_neighbours(strategy):
    columns = strategy.matrix.T
    zeroed = max(math.dist(column, np.zeros(strategy.width)) for column in columns)
    exchanged = max(math.dist(a, b) for a, b in itertools.product(columns, columns))
    assert strategy.sensitivity == approx(zeroed, rel=1e-14)
    assert strategy.sensitivity * strategy.exchange == approx(exchanged, rel=1e-14)
    low, high = strategy.sums_within(3)
    sums = [sum(three) for three in itertools.product(strategy.matrix.ravel().tolist()[:40], repeat=3)]
    assert low <= min(sums)
    assert max(sums) <= high


@pytest.mark.parametrize("bins", [2, 8, 64])
def test_the_tree_has_the_right_sensitivity_and_on_request_the_printed_one(bins):
    assert tree(bins, 7).sensitivity == approx(7 * math.sqrt(math.log2(bins)))
    assert tree(bins, 7, as_printed=True).sensitivity == approx(7 * math.log2(bins))
    assert (tree(bins, 7).matrix == tree(bins, 7, as_printed=True).matrix).all()
    assert flat(bins, 7).sensitivity == 7
    assert flat(bins, 7).exchange == approx(math.sqrt(2))


def test_printed_cumulative_counts_are_dyadic_sums():
    noisy = np.random.default_rng(0).integers(-50, 50, 30)                      # any numbers, not consistent ones
    nodes = {(r, start): value for (r, start), value in
             zip([(r, s) for r in range(4) for s in range(0, 16, 1 << r)], noisy.tolist(), strict=True)}

    def dyadic(end):
        total, start = 0.0, 0
        while start < end:
            r = max(r for r in range(4) if start % (1 << r) == 0 and start + (1 << r) <= end)
            total, start = total + nodes[r, start], start + (1 << r)
        return total
    assert printed_cumulative(tree(16, 1), noisy) == approx([dyadic(end) for end in range(1, 17)])
    assert printed_cumulative(flat(4, 2), np.array([2, 4, -2, 6])) == approx([1, 3, 2, 5])
    with pytest.raises(ValueError, match="the papers print cumulative counts for flat and tree, got optimal"):
        printed_cumulative(STRATEGIES[2], noisy)


# the optimal factorisation

def program(rows: np.ndarray, shift: bool) -> float:
    """min tr((W - t 1') X^-1 (W - t 1')') subject to diag X <= 1, over X and, for a public total, t: a semidefinite program."""
    bins = rows.shape[1]
    square, offset = cvxpy.Variable((bins, bins), PSD=True), cvxpy.Variable((len(rows), 1))
    moved = rows - offset @ np.ones((1, bins)) if shift else rows
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.matrix_frac(moved.T, square)), [cvxpy.diag(square) <= 1])
    return problem.solve(solver="CLARABEL")


@pytest.mark.parametrize(("bins", "level", "public_total"), [(2, None, False), (5, None, False), (6, 0.8, False), (2, None, True), (6, None, True)])
def test_the_factorisation_is_the_optimum_of_its_program(bins, level, public_total):
    factor = optimal_factor(bins, level, public_total)
    best = program(workload(bins, level, public_total), public_total)
    assert factor.error == approx(best, rel=1e-4)
    assert factor.least <= best * (1 + 1e-6)
    assert np.linalg.norm(factor.matrix, axis=0).max() == approx(1)
    direct = np.linalg.norm(workload(bins, level, public_total) @ _generalised_inverse(factor.matrix, public_total)) ** 2
    assert direct == approx(factor.error, rel=1e-6)                              # the error stated is the error made


def _generalised_inverse(matrix: np.ndarray, public_total: bool) -> np.ndarray:
    """From a noisy sum to the histogram; with a public total, of what sums to zero."""
    if not public_total:
        return np.linalg.inv(matrix)
    null = np.linalg.svd(np.ones((1, len(matrix))))[2][1:].T                     # (bins, bins - 1): sums to zero
    return null @ np.linalg.pinv(matrix @ null)


@pytest.mark.parametrize("bins", [8, 32, 64])
def test_the_factorisation_lies_between_known_bounds(bins):
    """Below: the nuclear norm, whose singular values are known. Above: the square root of the prefix sums, and identity and tree."""
    factor = optimal_factor(bins)
    singular = 1 / (2 * np.sin((2 * np.arange(1, bins + 1) - 1) * math.pi / (4 * bins + 2)))
    series = np.cumprod(np.append(1.0, 1 - 1 / (2 * np.arange(1, bins))))        # of (1 - x)^(-1/2)
    root = sum(series[k] * np.eye(bins, k=-k) for k in range(bins))
    assert root @ root == approx(workload(bins, None, False))
    assert factor.error >= singular.sum() ** 2 / bins
    assert factor.error <= (root**2).sum() * (root**2).sum(0).max()
    assert factor.error <= factor.least * (1 + 1e-5)


@pytest.mark.parametrize(("bins", "total"), [(32, True), (64, True), (32, False), (64, False)])
def test_optimal_rows_have_less_error_than_both_methods_of_the_papers(bins, total):
    def error(strategy):
        return strategy.sensitivity * math.sqrt((strategy.edge_deviations(total, 0.8) ** 2).mean())
    best = optimal(bins, level=None if total else 0.8, public_total=total)
    assert error(best) < 0.85 * error(tree(bins))
    assert error(best) < 0.65 * error(flat(bins))
    factor = optimal_factor(bins, None if total else 0.8, total)
    if total:                                                                    # rounded to integers, hardly worse
        assert error(best) == approx(math.sqrt(factor.error / (bins - 1)), rel=5e-3)


def test_scales_give_shares_their_least_variance():
    assert scale_for(4.0, 100) == 256
    assert scale_for(4.0, 10**8) == math.ceil(math.sqrt(4 * 10**8) / 4)


# estimates

@every_strategy
def test_without_noise_the_histogram_comes_back(strategy):
    histogram = np.random.default_rng(1).multinomial(500, np.ones(16) / 16).astype(float)
    total = 500.0 if strategy.needs_total else None
    exactly = strategy.matrix @ histogram.astype(int)
    assert strategy.least_squares(exactly, total) == approx(histogram)
    assert strategy.estimate(exactly, total) == approx(histogram)


@every_strategy
def test_estimates_are_the_optima_of_their_programs(strategy):
    histogram = np.random.default_rng(2).multinomial(100, 0.5 ** np.arange(1, 17)).astype(int)
    scaled = strategy.matrix / strategy.scale
    for noisy in noisy_sums(strategy, histogram, 6.0 * strategy.scale, 8):
        for total in ([100.0] if strategy.needs_total else [100.0, None]):
            counts = cvxpy.Variable(16)
            gap = cvxpy.sum_squares(scaled @ counts - noisy / strategy.scale)
            known = [] if total is None else [cvxpy.sum(counts) == total]
            cvxpy.Problem(cvxpy.Minimize(gap), known).solve(solver="CLARABEL")
            assert strategy.least_squares(noisy, total) == approx(counts.value, abs=1e-4)
            cvxpy.Problem(cvxpy.Minimize(gap), [*known, counts >= 0]).solve(solver="CLARABEL")
            estimate = strategy.estimate(noisy, total)
            assert estimate == approx(counts.value, abs=2e-3)
            assert estimate.min() >= 0
            if total is None:
                assert estimate == approx(nnls(scaled, noisy / strategy.scale)[0], abs=1e-6)
            else:
                assert estimate.sum() == approx(total, rel=1e-12)


@pytest.mark.parametrize("bins", [2, 3, 64, 256])
def test_a_simplex_estimate_satisfies_its_optimality_conditions(bins):
    strategy = optimal(bins, public_total=True)
    histogram = np.bincount(np.arange(200) * bins // 300, minlength=bins)
    for noisy in noisy_sums(strategy, histogram, 4 * strategy.sensitivity, 20, bins):
        estimate = strategy.estimate(noisy, 200.0)
        slope = strategy.matrix.T @ (strategy.matrix @ estimate - noisy) / strategy.scale**2
        held = estimate == 0
        price = slope[~held].mean()
        assert slope[~held] == approx(np.full((~held).sum(), price), abs=1e-6)
        assert (slope[held] >= price - 1e-6).all()


def test_a_simplex_estimate_of_64_bins_takes_less_than_two_milliseconds():
    from time import perf_counter

    strategy = optimal(64, public_total=True)
    sums, laps = noisy_sums(strategy, np.full(64, 2), 4 * strategy.sensitivity, 40), []
    for noisy in sums:
        start = perf_counter()
        strategy.estimate(noisy, 128.0)
        laps.append(perf_counter() - start)
    assert min(laps) < 2e-3                                                      # the fastest: the machine may be busy


def test_an_estimated_total_is_never_less_than_half_of_the_plan():
    strategy = flat(8)
    nothing = np.full(8, -1000)
    assert strategy.estimate(nothing).sum() == 0
    assert strategy.estimate(nothing, planned=60.0).sum() == approx(30)
    assert strategy.estimate(np.full(8, 256), planned=15.0).sum() == approx(8)
    assert strategy.estimate(np.full(8, 256), planned=16.0).sum() == approx(8)


@every_strategy
def test_deviations_are_those_of_the_least_squares_counts(strategy):
    """4000 sums: a standard deviation is known to 1.2%; for a new seed one of the 15 edges is off by 5% once in 1000 runs."""
    histogram, total = np.full(16, 10), 160.0 if strategy.needs_total else None
    sums = noisy_sums(strategy, histogram, 300.0, 4000)
    found = np.array([strategy.least_squares(noisy, total) for noisy in sums])
    below = np.cumsum(found, axis=1)[:, :-1] - (0.0 if total else 0.8 * found.sum(1, keepdims=True))
    expected = 300 * strategy.edge_deviations(total is not None, 0.8)
    assert below.std(0) == approx(expected, rel=0.05)
    assert below.mean(0) == approx(np.cumsum(histogram)[:-1] - (0.0 if total else 0.8 * 160), abs=5 * expected.max() / math.sqrt(4000))


# readouts

@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40))
def test_isotonic_regression_is_that_of_scipy(values):
    assert reading.isotonic(np.array(values)) == approx(isotonic_regression(values).x, abs=1e-9)


def test_a_noisy_cumulative_becomes_a_distribution_function():
    heights = reading.monotone_cdf(np.array([-2.0, 3.0, 1.0, 8.0, 12.0]), 10.0)
    assert heights == approx([0.0, 0.2, 0.2, 0.8, 1.0])


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12).filter(any), st.floats(0.01, 0.99))
def test_a_quantile_is_the_least_value_at_which_the_distribution_reaches_the_level(counts, level):
    histogram, edges = np.array(counts, dtype=float), Edges.equal(0.0, float(len(counts)), len(counts))
    value = float(reading.quantiles(histogram, edges, np.array([level]))[0])
    assert float(reading.cdf(histogram, edges, value)) == approx(level, abs=1e-9)
    assert float(reading.cdf(histogram, edges, value - 1e-3)) < level


def test_the_printed_threshold_is_the_nearest_edge_the_smaller_of_two_and_never_the_last():
    cumulative = np.array([2.0, 4.0, 6.0, 10.0])
    for level in np.arange(0, 101) / 100:
        gaps = [abs(height - 10 * level) for height in (0, 2, 4, 6)]
        assert reading.threshold_index(cumulative, 10.0, level) == gaps.index(min(gaps)) or min(
            abs(gap - min(gaps)) for k, gap in enumerate(gaps) if k != gaps.index(min(gaps))) < 1e-9
    assert reading.threshold_index(cumulative, 10.0, 0.5) == 2
    assert reading.threshold_index(cumulative, 10.0, 1.0) == 3
    assert reading.quantile_error(cumulative, 2, 0.5) == approx(0.1)
    assert reading.quantile_error(cumulative, 0, 0.3) == approx(0.3)


@given(st.lists(st.floats(-2, 12), min_size=1, max_size=40), st.sampled_from([0.05, 0.25, 0.5, 0.9, 1.0]))
def test_the_boundary_of_a_tail_selects_the_tail_mass_clipped_values_included(values, tail_fraction):
    losses, edges = np.array(values), Edges.equal(0.0, 10.0, 5)
    histogram = np.bincount(edges.place(losses), minlength=5).astype(float)
    low, high, share, tail = reading.tail_boundary(histogram, edges, tail_fraction).tolist()
    assert tail == approx(tail_fraction * len(values))
    selected = (losses >= high).sum() + share * ((losses >= low) & (losses < high)).sum()
    assert selected == approx(tail)
    exact_low = fit_locally(ExactQuantile().fit(tail_fraction), Seen(torch.tensor(losses).float().double(), torch.ones(len(values)).double()))[0]
    if tail_fraction < 1:
        assert low <= exact_low.item() + 1e-6                                     # the same boundary, as coarse as a bin
        assert exact_low.item() - 1e-6 <= high


def test_the_boundary_of_everything_is_everybody_and_of_nothing_nobody():
    edges = Edges.equal(0.0, 4.0, 4)
    assert reading.tail_boundary(np.array([0.0, 5.0, 0.0, 0.0]), edges, 1.0).tolist() == [-math.inf, 1.0, 1.0, 5.0]
    assert reading.tail_boundary(np.array([1.0, 1.0, 1.0, 1.0]), edges, 0.125).tolist() == [3.0, math.inf, 0.5, 0.5]
    assert reading.tail_boundary(np.zeros(4), edges, 0.5).tolist() == [math.inf, math.inf, 0.0, 0.0]


# bad input

@pytest.mark.parametrize(("make", "text"), [
    (lambda: Edges.equal(1.0, 1.0, 4), "the range must be two finite numbers, the lower one first, got 1 and 1. Write what is known in public about the values, as in range=(0, 10)."),
    (lambda: Edges.equal(0.0, math.inf, 4), "the range must be two finite numbers, the lower one first, got 0 and inf."),
    (lambda: Edges.equal(0.0, 1.0, 1), "bins must be at least 2, got 1. 32 or 64 are usual."),
    (lambda: Edges.given([0.0, 2.0, 2.0]), "edges must increase, but 2 follows 2. Sort them and leave out what is there twice."),
    (lambda: Edges.given([0.0, 2.0]), "a histogram needs two bins, so three edges, got 2 edges."),
    (lambda: Edges.given([0.0, 2.0, math.nan]), "edges must be finite numbers: values beyond the ends are clipped to them."),
    (lambda: tree(48), "a tree needs a number of bins that is a power of two, got 48. Write 32 or 64, or take another method."),
    (lambda: flat(1), "bins must be at least 2, got 1. 32 or 64 are usual."),
    (lambda: flat(8, 0), "scale (c) must be a whole number from 1, got 0. Leave it out to have it chosen."),
    (lambda: optimal(8, level=80.0), "level (p) must be in (0, 1), got 80. For the worst 20% of clients it is 0.8."),
    (lambda: optimal(8, level=0.8, public_total=True), "with a public total every level has the same rows. Leave out level, or public_total."),
    (lambda: optimal(2048), "the optimal factorisation of 2048 bins would take very long (limit 1024). Use fewer bins or the tree."),
    (lambda: STRATEGIES[4].estimate(np.zeros(16)), "these rows leave out the number of clients. Pass total=, or build them without public_total."),
    (lambda: STRATEGIES[0].estimate(np.zeros(5)), "a noisy sum for flat has 16 entries, got shape (5,)."),
    (lambda: STRATEGIES[0].estimate(np.zeros(16), 0.0), "total must be positive, got 0."),
])
def test_bad_settings_say_what_to_write(make, text):
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)
