"""The papers' data: sizes, seeds, moments with a stated error rate, and labels that follow from the model."""

import re

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits, make_classification

import fedtail.data
from fedtail.data import (
    Population,
    Splits,
    digits,
    label_shift,
    synthetic,
    synthetic_hybrid,
    synthetic_iid,
    synthetic_models,
    three_gaussians,
)
from fedtail.data.generators import _client_sizes

ERROR_RATE = 1e-7          # how often, over seeds, a test of moments fails although the code is right


def inputs(population: Population) -> np.ndarray:
    assert isinstance(population.inputs, torch.Tensor)
    return population.inputs.numpy()


def hoeffding(clients: int, tests: int = 1) -> float:
    """How far the mean of so many independent numbers in [0, 1] may be from its expectation."""
    return float(np.sqrt(np.log(2 * tests / ERROR_RATE) / (2 * clients)))


def chi_square_bounds(degrees: int) -> tuple[float, float]:
    return tuple(stats.chi2.ppf([ERROR_RATE / 2, 1 - ERROR_RATE / 2], degrees))


def pool(size: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_classification(
        n_samples=size, n_features=20, n_informative=15, n_redundant=2, n_repeated=0, n_classes=10,
        n_clusters_per_class=1, class_sep=5.0, hypercube=False, random_state=2345)
    return x.astype(np.float32), y


# label shift

@pytest.fixture(scope="module")
def small() -> Splits:
    return label_shift(train_clients=2500, validation_clients=300, test_clients=700, examples_per_client=10,
                       pool_size=80_000)


def label_counts(population: Population) -> np.ndarray:
    counts = np.zeros((len(population), 10))
    np.add.at(counts, (np.repeat(np.arange(len(population)), population.size), population.targets.numpy()), 1)
    return counts


def test_label_shift_has_the_sizes_and_types_asked_for(small):
    for part, clients in zip(small, (2500, 300, 700), strict=True):
        assert part.size.tolist() == [10] * clients
        assert part.inputs.shape == (10 * clients, 20)
        assert (part.inputs.dtype, part.targets.dtype) == (torch.float32, torch.int64)
    assert small._fields == ("train", "validation", "test")


def test_label_shift_gives_examples_of_the_pool_and_none_twice(small):
    x, y = pool(80_000)
    place = {row.tobytes(): i for i, row in enumerate(x)}
    assert len(place) == len(x)
    taken = [place[row.tobytes()] for part in small for row in inputs(part)]
    assert len(set(taken)) == len(taken)
    assert np.array_equal(y[taken], np.concatenate([part.targets.numpy() for part in small]))


def test_label_proportions_have_the_dirichlets_moments(small):
    # n_c (n_c - 1) / (n (n - 1)) is unbiased for p_c^2, and E sum_c p_c^2 = (a + 1) / (10 a + 1) for Dir(a, ..., a)
    for part, concentration in zip(small, (0.5, 0.01, 0.01), strict=True):
        counts = label_counts(part)
        assert np.abs(counts.mean(0) / 10 - 0.1).max() < hoeffding(len(part), tests=10)
        second = (counts * (counts - 1)).sum(1).mean() / 90
        assert abs(second - (concentration + 1) / (10 * concentration + 1)) < hoeffding(len(part))


def test_the_seed_drives_clients_but_not_the_pool(small):
    def draw(seed: int, test_clients: int = 20) -> Splits:
        return label_shift(seed, 50, 20, test_clients, 10, pool_size=5000)
    for a, b in zip(draw(3), draw(3), strict=True):
        assert np.array_equal(inputs(a), inputs(b))
        assert torch.equal(a.targets, b.targets)
    other = draw(4)
    assert not torch.equal(draw(3).train.targets, other.train.targets)
    rows = {row.tobytes() for row in pool(5000)[0]}
    assert all(row.tobytes() in rows for part in other for row in inputs(part))
    assert np.array_equal(inputs(draw(3).train), inputs(draw(3, test_clients=1).train))      # training comes first


def test_the_papers_own_sizes_fit_into_its_pool():
    splits = label_shift(seed=1)
    assert [len(part) for part in splits] == [2500, 500, 500]
    assert {int(n) for part in splits for n in part.size} == {100}
    rows = np.concatenate([inputs(part) for part in splits])
    assert len(np.unique(rows[:, :3], axis=0)) == len(rows) == 350_000


# Synthetic(alpha, beta)

@pytest.mark.parametrize(("spread", "variance"), [("std", (0.25, 4.0)), ("variance", (0.5, 2.0))])
def test_models_and_centres_have_the_moments_of_their_law(spread, variance):
    clients = 2000
    models = synthetic_models(0.5, 2.0, clients, seed=5, spread=spread)
    low, high = chi_square_bounds(clients)
    entries = np.concatenate([models.weight.reshape(clients, -1), models.bias], axis=1)     # 610 entries N(u_k, 1)
    assert low < (entries.mean(1) ** 2 / (variance[0] + 1 / 610)).sum() < high
    assert low < (models.centre.mean(1) ** 2 / (variance[1] + 1 / 60)).sum() < high         # 60 entries N(B_k, 1)
    for values in (entries, models.centre):                                                 # around their mean: N(0, 1)
        low_within, high_within = chi_square_bounds(clients * (values.shape[1] - 1))
        assert low_within < ((values - values.mean(1, keepdims=True)) ** 2).sum() < high_within
    shift = models.bias.mean(1) - models.weight.mean((1, 2))                                # one u_k for both
    assert low < (shift**2 / (1 / 10 + 1 / 600)).sum() < high


def test_labels_are_the_largest_of_the_clients_own_model():
    p = synthetic(0.5, 0.5, clients=12, seed=2, sizes="moderate")
    models = synthetic_models(0.5, 0.5, clients=12, seed=2)
    for k in range(len(p)):
        x, y = p.client(k)
        assert isinstance(x, torch.Tensor)
        scores = np.einsum("cf,nf->nc", models.weight[k], x.numpy().astype(np.float64)) + models.bias[k]
        assert np.array_equal(scores.argmax(1), y.numpy())
        assert not np.array_equal(((x.numpy() @ models.weight[k - 1].T) + models.bias[k - 1]).argmax(1), y.numpy())


def test_inputs_spread_around_the_clients_centre():
    p = synthetic(1.0, 1.0, clients=5, seed=3, sizes=[2000] * 5)
    centre = synthetic_models(1.0, 1.0, clients=5, seed=3).centre
    noise = (inputs(p) - np.repeat(centre, 2000, axis=0)) / np.sqrt(np.arange(1, 61) ** -1.2)    # standard normal
    low, high = chi_square_bounds(10_000)
    squares = (noise**2).sum(0)                                                  # 60 tests: the error rate is 6e-6
    assert (low < squares).all()
    assert (squares < high).all()
    assert abs(noise.mean()) * noise.size**0.5 < stats.norm.isf(ERROR_RATE / 2)


def test_sizes_follow_their_law_and_do_not_depend_on_alpha():
    small, large = (synthetic(a, a, clients=30, seed=4).size for a in (0.0, 1.0))
    assert torch.equal(small, large)
    assert torch.equal(small, synthetic_iid(30, seed=4).size)
    power = np.concatenate([_client_sizes("power_law", 500, seed) for seed in range(20)]) - 50
    moderate = np.concatenate([_client_sizes("moderate", 500, seed) for seed in range(20)]) - 50
    # floor(X) and round(X) lie within one of X: the empirical laws at the edges of the cells bound the law of X
    for sizes, law, below in ((power, stats.lognorm(2.0, scale=np.exp(4.0)), 0.0),
                              (moderate, stats.lognorm(0.8, scale=np.exp(4.02)), 0.5)):
        for value in range(0, 1000, 50):
            expected = law.cdf(value + 1 - below)                                # P(X < value + 1), or + 1/2 if rounded
            share = (sizes <= value).mean()
            assert abs(share - expected) < hoeffding(len(sizes), tests=40)


def test_moderate_sizes_have_the_mean_and_deviation_of_the_table():
    sizes = _client_sizes("moderate", 2_000_000, seed=0)
    law = stats.lognorm(0.8, scale=np.exp(4.02))
    assert abs(sizes.mean() - 50 - law.mean()) < stats.norm.isf(ERROR_RATE / 2) * law.std() / 2_000_000**0.5
    assert (round(50 + law.mean()), round(law.std())) == (127, 73)               # [Li23, Table 4.4]


def test_iid_clients_share_one_model_and_centre_zero():
    p = synthetic_iid(clients=4, seed=6, sizes=[3000] * 4)
    mean = inputs(p).reshape(4, 3000, 60).mean(1)
    scaled = mean * np.sqrt(3000) / np.sqrt(np.arange(1, 61) ** -1.2)
    low, high = chi_square_bounds(240)
    assert low < (scaled**2).sum() < high
    table = label_table(p)
    assert stats.chi2_contingency(table[:, table.sum(0) > 20]).pvalue > ERROR_RATE       # the same mix of labels


def label_table(population: Population) -> np.ndarray:
    return np.stack([np.bincount(population.client(k)[1], minlength=10) for k in range(len(population))])


def test_half_of_the_hybrid_clients_are_alike():
    p = synthetic_hybrid(1.0, 1.0, clients=9, seed=7, sizes=[2000] * 9)
    assert p.group is not None
    assert p.group.tolist() == [0] * 4 + [1] * 5
    table = label_table(p)
    alike = table[:4]
    assert stats.chi2_contingency(alike[:, alike.sum(0) > 20]).pvalue > ERROR_RATE
    whole, iid = synthetic(1.0, 1.0, 9, 7, [2000] * 9), synthetic_iid(9, 7, [2000] * 9)
    for k in range(9):
        same = (iid, whole)[int(p.group[k])]
        assert torch.equal(p.client(k)[1], same.client(k)[1])
        assert torch.equal(torch.as_tensor(p.client(k)[0]), torch.as_tensor(same.client(k)[0]))


def test_synthetic_is_reproducible_and_seeds_differ():
    a, b, c = (synthetic(1.0, 1.0, clients=3, seed=s, sizes=[10] * 3) for s in (0, 0, 1))
    assert np.array_equal(inputs(a), inputs(b))
    assert not np.array_equal(inputs(a), inputs(c))
    assert (a.inputs.dtype, a.targets.dtype) == (torch.float32, torch.int64)             # type: ignore[union-attr]


# three Gaussians, digits

def test_three_gaussians_have_their_means_and_identity_covariance():
    n = 4000
    p = three_gaussians(n, seed=1)
    means = np.repeat([(0.0, 0.0), (1.0, 0.4), (3.0, 0.0)], n, axis=0)
    noise = inputs(p) - means
    low, high = chi_square_bounds(6 * n)
    assert low < (noise.astype(np.float64) ** 2).sum() < high
    bound = stats.norm.isf(ERROR_RATE / 12) / n**0.5
    assert np.abs(noise.reshape(3, n, 2).mean(1)).max() < bound
    assert abs((noise[:, 0] * noise[:, 1]).mean()) < 6 / (3 * n) ** 0.5          # a mean of variance 1 / (3 n)
    assert torch.equal(torch.as_tensor(p.inputs), p.targets)
    assert p.size.tolist() == [n] * 3


def test_the_default_triangle_is_obtuse():
    a, b, c = (np.array(point) for point in ((0.0, 0.0), (1.0, 0.4), (3.0, 0.0)))
    assert (a - b) @ (c - b) < 0
    centres = three_gaussians(1, ((5.0,), (-5.0,), (0.0,), (9.0,)))
    assert (len(centres), inputs(centres).shape) == (4, (4, 1))


def test_digits_are_all_there_once():
    p = digits(clients=50, concentration=0.3, seed=1)
    x, y = load_digits(return_X_y=True)
    assert (len(p), p.num_examples, int(p.size.min()) >= 1) == (50, 1797, True)
    assert (inputs(p).min(), inputs(p).max(), inputs(p).dtype) == (0.0, 1.0, np.float32)
    rows = sorted((*row, label) for row, label in zip((x / 16).tolist(), y.tolist(), strict=True))
    assert rows == sorted((*row, label) for row, label in zip(inputs(p).tolist(), p.targets.tolist(), strict=True))
    assert not torch.equal(p.size, digits(50, 0.3, seed=2).size)


# errors and names

@pytest.mark.parametrize(("build", "text"), [
    (lambda: label_shift(pool_size=2000), "examples of label"),
    (lambda: label_shift(pool_size=2000), "Raise pool_size=2000, or ask for fewer clients"),
    (lambda: label_shift(train_clients=0, pool_size=2000), "train needs at least one client, one example for each"),
    (lambda: label_shift(test_concentration=0.0, pool_size=2000), "validation needs at least one client"),
    (lambda: synthetic(1, 1, spread="sd"), 'spread must be "std" or "variance", got \'sd\''),              # type: ignore
    (lambda: synthetic(-1, 1), "alpha and beta must be at least 0, got -1 and 1"),
    (lambda: synthetic(1, 1, sizes="equal"), 'sizes must be "power_law", "moderate" or one number'),       # type: ignore
    (lambda: synthetic(1, 1, 3, sizes=[1, 2]), "a whole number from 1 for each of 3 clients, got [1, 2]"),
    (lambda: synthetic(1, 1, 2, sizes=[1, 0]), "sizes must hold a whole number from 1 for each of 2 clients"),
    (lambda: three_gaussians(0), "examples_per_client be at least 1, got shape (3, 2) and 0"),
    (lambda: three_gaussians(5, (1.0, 2.0)), "means must hold one point for each client"),                 # type: ignore
])
def test_errors_say_what_came_and_what_to_write(build, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


def test_the_room_names_what_is_public():
    assert fedtail.data.__all__ == [
        "LinearClients", "Population", "Scaling", "Splits", "as_sets", "by_column", "digits", "dirichlet", "encode_characters",
        "label_shards", "label_shift", "pad_sequences", "quantity_skew", "sparse_rows", "synthetic", "synthetic_hybrid",
        "synthetic_iid", "synthetic_models", "three_gaussians", "with_classes", "with_number_targets"]
    assert all(hasattr(fedtail.data, name) for name in fedtail.data.__all__)
