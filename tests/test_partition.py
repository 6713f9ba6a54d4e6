"""Partitions: every example once, and the skew that was asked for."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedtail.data import by_column, dirichlet, label_shards, quantity_skew
from fedtail.data.partition import _examples_to_give_away
from fedtail.draws import named_generator

labelled = st.lists(st.integers(0, 6), min_size=1, max_size=80)


def mixes(labels: np.ndarray, client: np.ndarray) -> np.ndarray:
    """Each client's share of each label, (clients, labels)."""
    counts = np.zeros((client.max() + 1, labels.max() + 1))
    np.add.at(counts, (client, labels), 1)
    return counts / counts.sum(1, keepdims=True)


def check_ids(client: np.ndarray, examples: int, clients: int, at_least: int) -> None:
    assert client.dtype == np.int64
    assert client.shape == (examples,)                       # one id per example: each is given out exactly once
    assert client.min() >= 0
    assert np.bincount(client, minlength=clients).shape == (clients,)
    assert np.bincount(client, minlength=clients).min() >= at_least


@given(labelled, st.data(), st.sampled_from([1e-3, 0.1, 1.0, 1e3]), st.integers(0, 2**64))
def test_dirichlet_gives_out_every_example_once_and_nobody_too_few(labels, data, concentration, seed):
    at_least = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // at_least))
    client = dirichlet(labels, clients, concentration, seed, at_least)
    check_ids(client, len(labels), clients, at_least)
    assert np.array_equal(client, dirichlet(labels, clients, concentration, seed, at_least))


@given(labelled, st.data(), st.integers(0, 99))
def test_relabelling_in_order_changes_nothing(labels, data, seed):
    clients = data.draw(st.integers(1, len(labels)))
    words = [f"label {value}" for value in labels]           # text in the same order as the numbers
    assert np.array_equal(dirichlet(labels, clients, 0.3, seed), dirichlet(words, clients, 0.3, seed))
    assert np.array_equal(label_shards(labels, clients, 1, seed), label_shards(words, clients, 1, seed))


def test_a_large_concentration_gives_every_client_the_mix_of_the_whole():
    labels = np.repeat([0, 1, 2, 3], [500, 1000, 1500, 2000])
    client = dirichlet(labels, 50, concentration=1e9)
    sizes = np.bincount(client)
    # proportions differ from 1/4 by 1e-4 at most, rounding by one example for each of four labels
    assert np.abs(sizes - 100).max() <= 5
    assert np.abs(mixes(labels, client) - [0.1, 0.2, 0.3, 0.4]).max() < 0.06


def test_a_small_concentration_gives_most_clients_one_label():
    labels = np.repeat(np.arange(10), 1000)
    largest = mixes(labels, dirichlet(labels, 200, concentration=1e-3)).max(1)
    # logarithms of Gamma(a) are -Exp(a) to within O(1), so the gap between the two largest of ten is Exp(9 a): a second
    # label comes within 1e-6 of the first with chance about 9e-3 * log(1e6) = 0.13, and below that it is no example
    # of the 1000. 80 mixed clients of 200 then happen with chance P(Binomial(200, 0.14) >= 80) < 1e-15.
    assert stats.binom.sf(79, 200, 0.14) < 1e-15
    assert (largest < 0.99).sum() < 80


def test_the_mix_has_the_dirichlets_second_moment():
    # balanced labels and many clients: a client's mix is p_k to within the factor n_c / sum_k p_kc, close to constant.
    # E sum_c p_c^2 = (a + 1) / (10 a + 1) for Dir(a, ..., a). Each client's value is in [0, 1]: by Hoeffding the mean
    # of 4000 is off by 0.05 with chance below 2 exp(-2 * 4000 * 0.05^2) < 5e-9; 0.03 more is left for the factor.
    labels = np.repeat(np.arange(10), 40_000)
    for concentration in (0.1, 0.5, 5.0):
        second = (mixes(labels, dirichlet(labels, 4000, concentration, seed=1)) ** 2).sum(1).mean()
        assert abs(second - (concentration + 1) / (10 * concentration + 1)) < 0.08


def test_rounding_does_not_favour_the_same_clients_for_every_label():
    # ten labels of 50 examples over 250 equal clients: each label reaches one client in five. If always the same, 200
    # clients have none before they are filled up to one; if not, Binomial(10, 0.2) is at most one for 94 of 250.
    sizes = np.bincount(dirichlet(np.repeat(np.arange(10), 50), 250, concentration=1e9))
    assert stats.binom.sf(149, 250, stats.binom.cdf(1, 10, 0.2)) < 1e-7
    assert (sizes == 1).sum() < 150


def test_the_shortest_are_filled_from_the_largest():
    labels = np.repeat([0, 1], [990, 10])
    free, filled = (np.bincount(dirichlet(labels, 40, 0.01, 3, at_least), minlength=40) for at_least in (1, 20))
    assert free.min() < 20                                   # unless nobody prefers label 1: chance about 2^-40
    assert filled.min() >= 20
    assert filled.max() < free.max()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.data())
def test_the_largest_give_first(counts, data):
    count = np.array(counts)
    need = data.draw(st.integers(0, count.sum()))
    taken = _examples_to_give_away(count, need)
    assert taken.sum() == need
    assert ((taken >= 0) & (taken <= count)).all()
    left = count - taken
    assert (left[taken > 0] >= left.max() - 1).all()         # who gave is still among the largest


def test_seeds_give_different_partitions_and_names_different_streams():
    labels = np.arange(1000) % 10
    assert not np.array_equal(dirichlet(labels, 10, 1.0, seed=0), dirichlet(labels, 10, 1.0, seed=1))
    assert not np.array_equal(label_shards(labels, 10, seed=0), label_shards(labels, 10, seed=1))
    assert not np.array_equal(quantity_skew(1000, 10, 1.0, seed=0), quantity_skew(1000, 10, 1.0, seed=1))
    assert named_generator(0, "a").random() != named_generator(0, "b").random()
    assert named_generator(-1, "a").random() == named_generator(2**64 - 1, "a").random()


@given(labelled, st.data(), st.integers(0, 99))
def test_shards_are_even_and_hold_few_labels(labels, data, seed):
    shards = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // shards))
    client = label_shards(labels, clients, shards, seed)
    check_ids(client, len(labels), clients, shards)
    low, high = len(labels) // (clients * shards), -(-len(labels) // (clients * shards))
    assert all(low * shards <= count <= high * shards for count in np.bincount(client))
    if shards == 1:                                          # sorted by label, each client is one run
        runs = sorted((min(own), max(own)) for own in (np.array(labels)[client == k] for k in range(clients)))
        assert all(a[1] <= b[0] for a, b in pairwise(runs))


def test_two_shards_of_balanced_labels_are_at_most_two_labels():
    labels = named_generator(0, "test").permutation(np.repeat(np.arange(10), 600))
    client = label_shards(labels, clients=100)
    assert np.bincount(client).tolist() == [60] * 100        # as in McMahan et al.: 200 shards, two for each client
    distinct = np.array([len(set(labels[client == k])) for k in range(100)])
    assert set(distinct) <= {1, 2}                           # a shard has 30 of a label's 600
    assert 2 in distinct


@given(st.integers(1, 200), st.data(), st.floats(0, 8), st.integers(0, 99))
def test_quantity_skew_gives_out_every_example_once(examples, data, sigma, seed):
    at_least = data.draw(st.integers(1, examples))
    clients = data.draw(st.integers(1, examples // at_least))
    client = quantity_skew(examples, clients, sigma, seed, at_least)
    check_ids(client, examples, clients, at_least)
    if sigma == 0:
        assert np.ptp(np.bincount(client)) <= 1


def test_quantity_skew_is_lognormal():
    sizes = np.bincount(quantity_skew(10_000_000, 2000, sigma=1.0))
    # logarithms of sizes about 5000 are normal up to rounding and one common shift: a chi-square of 1999 degrees
    assert sizes.min() > 50
    variance = np.log(sizes).var(ddof=1)
    low, high = stats.chi2.ppf([5e-8, 1 - 5e-8], 1999) / 1999            # fails for one seed in 1e7
    assert low * 0.98 < variance < high * 1.02                           # 2% for rounding
    assert stats.kstest((np.log(sizes) - np.log(sizes).mean()) / variance**0.5, "norm").pvalue > 1e-7


def test_quantity_skew_does_not_skew_labels():
    labels = np.arange(100_000) // 50_000
    client = quantity_skew(len(labels), 10, sigma=1.0)
    table = np.stack([np.bincount(client[labels == value], minlength=10) for value in (0, 1)])
    assert stats.chi2_contingency(table).pvalue > 1e-7                   # fails for one seed in 1e7


@given(st.lists(st.sampled_from("abcdef"), min_size=1))
def test_by_column_has_a_client_for_each_value(values):
    client = by_column(values)
    assert client.dtype == np.int64
    assert [sorted(set(values))[k] for k in client] == values


@pytest.mark.parametrize(("split", "text"), [
    (lambda: dirichlet([0, 1], 3, 0.5), "2 examples do not give each of 3 clients 1. Ask for at most 2 clients"),
    (lambda: dirichlet([0] * 10, 3, 0.5, at_least=4), "10 examples do not give each of 3 clients 4. Ask for at most 2"),
    (lambda: dirichlet([0, 1], 0, 0.5), "at least one client and one example for each, got 0 clients with 1"),
    (lambda: dirichlet([0, 1], 1, 0.5, at_least=0), "one client and one example for each, got 1 clients with 0"),
    (lambda: dirichlet([0, 1], 1, 0.0), "concentration must be positive and finite, got 0. Write 0.1"),
    (lambda: dirichlet([0, 1], 1, np.inf), "concentration must be positive and finite, got inf"),
    (lambda: dirichlet([[0, 1]], 1, 1.0), "labels must hold one label per example, got shape (1, 2)"),
    (lambda: label_shards([0, 1, 2], 2), "3 examples do not give each of 2 clients 2"),
    (lambda: label_shards([0, 1, 2], 2, 0), "got 2 clients with 0"),
    (lambda: quantity_skew(3, 4, 1.0), "3 examples do not give each of 4 clients 1"),
    (lambda: quantity_skew(4, 4, -1.0), "sigma must be at least 0, got -1. Write 0.0 for equal sizes"),
    (lambda: by_column(["a", None]), "values mixes values of type NoneType, str"),
])
def test_errors_say_what_came_and_what_to_write(split, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        split()
