"""Who takes part, and the hashed draws behind it.

Tests of randomness run on fixed seeds; the error rate they state is that of a right generator over all seeds.
"""

import re
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import tensor

from fedtail import ByMass, BySize, EqualClients, Everyone, Poisson, Population, Uniform
from fedtail.draws import hash_bits, random_permutations, uniform_integers, uniform_numbers
from fedtail.privacy.events import FixedSampling, NoSampling, PoissonSampling

ERROR_RATE = 1e-6                     # of each statistical assertion below
DEVIATIONS = stats.norm.isf(ERROR_RATE / 2)
SAMPLERS = [Uniform(7), Everyone(), Poisson(0.3), ByMass(9), EqualClients(7), BySize(7), BySize(7, weighted=True)]
words = st.integers(-(2**63), 2**63 - 1)


def crowd(count=20, mass=None) -> Population:
    """Clients with one example each."""
    return Population.from_arrays(torch.zeros(count, 1), [0] * count, np.arange(count), mass=mass)


def drawn(sampler, population, rounds, seed=0) -> list:
    return [sampler(population, seed, r) for r in range(rounds)]


def assert_uniform_counts(counts, expected):
    """Chi-square of counts in cells against their expectation."""
    assert stats.chisquare(counts, expected).pvalue > ERROR_RATE


# Samplers

@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_cohort_names_each_client_once_in_order_with_a_weight_within_its_bound(sampler):
    population = crowd(mass=np.arange(1.0, 21))
    for cohort in drawn(sampler, population, 50):
        ids = cohort.ids.tolist()
        assert ids == sorted(set(ids))
        assert set(ids) <= set(range(20))
        assert cohort.importance.shape == cohort.ids.shape
        assert cohort.importance.dtype == torch.float64
        assert bool((population.mass[cohort.ids] * cohort.importance <= cohort.mass_bound + 1e-9).all())


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_same_seed_same_cohorts_and_they_do_not_depend_on_what_was_drawn_before(sampler):
    population = crowd()
    forwards = drawn(sampler, population, 10, seed=4)
    backwards = [sampler(population, 4, r) for r in reversed(range(10))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.importance, b.importance)


@pytest.mark.parametrize("sampler", [Uniform(7), Poisson(0.3), ByMass(9), EqualClients(7), BySize(7)], ids=repr)
def test_other_rounds_and_seeds_give_other_cohorts(sampler):
    population = crowd()
    rounds = {tuple(c.ids.tolist()) for c in drawn(sampler, population, 10, seed=4)}
    seeds = {tuple(sampler(population, seed, 0).ids.tolist()) for seed in range(10)}
    assert len(rounds) > 5      # among at least 3000 likely cohorts five equal ones of ten: below 1e-12
    assert len(seeds) > 5


@pytest.mark.parametrize("sampler", [Uniform(7), Poisson(0.3)], ids=repr)
def test_cohorts_of_two_rounds_and_of_two_seeds_overlap_as_independent_ones_do(sampler):
    """A client's membership in consecutive rounds (or seeds) is a pair of independent coins."""
    population, many = crowd(), 1999
    for cohorts in (drawn(sampler, population, many + 1), [sampler(population, seed, 0) for seed in range(many + 1)]):
        member = torch.zeros(many + 1, 20, dtype=torch.bool)
        for r, cohort in enumerate(cohorts):
            member[r, cohort.ids] = True
        both = (member[:-1:2] & member[1::2]).double().sum(1).numpy()      # disjoint pairs of neighbours
        rate = sampler.expected_size(population) / 20
        assert abs(both.mean() - 20 * rate**2) < DEVIATIONS * both.std(ddof=1) / np.sqrt(len(both))      # error rate 1e-6 each


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 99))
def test_uniform_draws_so_many_and_a_smaller_cohort_is_a_subset(size, other, round):
    population = crowd(30)
    few, many = (set(Uniform(m)(population, 1, round).ids.tolist()) for m in sorted((size, other)))
    assert len(few) == min(size, other)
    assert few <= many


@pytest.mark.parametrize("round", [0, 7])
def test_uniform_takes_the_smallest_hashes_and_poisson_the_draws_below_its_rate(round):
    """A run that goes on after an upgrade draws the cohorts that it would have drawn. A draw at the rate is not below it."""
    population = crowd(30)
    hashes = hash_bits(5, "cohort", round, population.key)
    draws = uniform_numbers(hashes).tolist()
    for size in (1, 4, 29):
        assert Uniform(size)(population, 5, round).ids.tolist() == sorted(np.argsort(hashes.numpy())[:size].tolist())
        rate = sorted(draws)[size]
        assert Poisson(rate)(population, 5, round).ids.tolist() == [k for k in range(30) if draws[k] < rate]
        assert len(Poisson(float(np.nextafter(rate, 1.0)))(population, 5, round).ids) == size + 1


def test_uniform_draws_every_client_equally_often():
    n, m, rounds = 20, 7, 3000
    counts = torch.cat([c.ids for c in drawn(Uniform(m), crowd(n), rounds)]).bincount(minlength=n).numpy()
    # counts of draws without replacement have covariance R p (1 - p) n / (n - 1) (I - 11'/n)
    rate = m / n
    statistic = ((counts - rounds * rate) ** 2).sum() / (rounds * rate * (1 - rate)) * (n - 1) / n
    assert stats.chi2.sf(statistic, n - 1) > ERROR_RATE
    assert stats.chi2.cdf(statistic, n - 1) > ERROR_RATE      # nor more even than chance allows


def test_uniform_draws_every_pair_of_clients_equally_often():
    n, rounds = 5, 5000
    pairs = [tuple(c.ids.tolist()) for c in drawn(Uniform(2), crowd(n), rounds)]
    counts = [pairs.count((a, b)) for a in range(n) for b in range(a + 1, n)]
    assert_uniform_counts(counts, [rounds / 10] * 10)


@pytest.mark.parametrize("sampler", [Uniform(7), Everyone(), Poisson(0.3), ByMass(7), EqualClients(7), BySize(7)], ids=repr)
def test_the_order_of_the_population_does_not_matter(sampler):
    population = crowd()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    shuffled = population.select(order)
    for r in range(20):
        assert set(order[sampler(shuffled, 3, r).ids].tolist()) == set(sampler(population, 3, r).ids.tolist())


def test_a_population_with_other_keys_is_drawn_otherwise():
    population = crowd()
    other = replace(population, key=population.key + 1000)
    assert [c.ids.tolist() for c in drawn(Uniform(7), population, 5)] != [c.ids.tolist() for c in drawn(Uniform(7), other, 5)]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 50))
def test_by_mass_a_weight_is_how_often_a_client_was_drawn(mass, size, round):
    cohort = ByMass(size)(crowd(len(mass), mass), 2, round)
    weight = cohort.importance * tensor(mass, dtype=torch.float64)[cohort.ids]
    assert weight.tolist() == pytest.approx(weight.round().tolist())
    assert weight.sum().item() == pytest.approx(size)
    assert bool((weight > 0.5).all())
    assert cohort.mass_bound == pytest.approx(size, rel=1e-11)


def test_by_mass_a_draw_falls_on_the_client_whose_stretch_of_the_total_it_hits(monkeypatch):
    """Stretches of lengths 1, 2, 3, 2 out of 8, closed on the left; one that rounds up to the total is the last client's."""
    population, eighths = crowd(4, [1.0, 2, 3, 2]), torch.arange(9).double()
    assert population.key.argsort().tolist() == [0, 1, 2, 3]
    monkeypatch.setattr("fedtail.sampling.by_mass.uniform_numbers", lambda keys: eighths[: len(keys)] / 8)
    cohort = ByMass(9)(population, 0, 0)
    assert cohort.ids.tolist() == [0, 1, 2, 3]
    assert (cohort.importance * population.mass).tolist() == pytest.approx([1, 2, 3, 3])


def test_by_mass_no_weight_is_beyond_its_bound_even_where_it_is_rounded_up():
    """A channel of integers refuses a row beyond its bound, by however little; draws of one client over its mass, times it, round."""
    random, above = np.random.default_rng(0), 0
    for size in (1, 3, 5, 7, 100):
        for mass in random.uniform(0.1, 100, 40):
            population = crowd(1, [mass])
            cohort = ByMass(size)(population, 0, 0)
            weight = float(population.mass[0] * cohort.importance[0])
            above += weight > size
            assert weight <= cohort.mass_bound <= size * (1 + 1e-9)
    assert above > 0                      # so that this test sees what it is about


def test_by_mass_the_draws_are_multinomial():
    mass, size, rounds = np.array([1.0, 2, 3, 4, 10]), 6, 2000
    population = crowd(5, mass)
    times = np.zeros((rounds, 5))
    for r, cohort in enumerate(drawn(ByMass(size), population, rounds)):
        times[r, cohort.ids.numpy()] = (cohort.importance * population.mass[cohort.ids]).numpy()
    share = mass / mass.sum()
    assert_uniform_counts(times.sum(0), rounds * size * share)      # how often each: 12000 independent draws
    # how often the heaviest in one round: Binomial(6, 1/2), so draws within a round are independent too
    heaviest = np.bincount(times[:, 4].round().astype(int), minlength=7)
    assert_uniform_counts(heaviest, rounds * stats.binom.pmf(np.arange(7), size, share[4]))


def test_by_mass_the_plain_mean_over_draws_is_unbiased_for_the_mean_by_mass():
    mass, rounds, size = np.array([1.0, 2, 3, 4, 10]), 4000, 3
    population, value = crowd(5, mass), tensor([5.0, -1.0, 2.0, 0.0, 1.0]).double()
    means = []
    for cohort in drawn(ByMass(size), population, rounds):
        weight = population.mass[cohort.ids] * cohort.importance
        means.append(float((weight * value[cohort.ids]).sum() / weight.sum()))
    target = float((mass * value.numpy()).sum() / mass.sum())
    assert abs(np.mean(means) - target) < DEVIATIONS * np.std(means, ddof=1) / np.sqrt(rounds)      # error rate 1e-6


def test_by_mass_a_smaller_cohort_is_part_of_a_larger_one():
    population = crowd(mass=np.arange(1.0, 21))
    for r in range(20):
        few, many = ByMass(4)(population, 0, r), ByMass(9)(population, 0, r)
        assert set(few.ids.tolist()) <= set(many.ids.tolist())


def successive_probabilities(mass, size) -> dict:
    """The probability of each set of `size` clients, drawn one by one in proportion to the mass of those left: all orders summed."""
    found = {}
    for chosen in combinations(range(len(mass)), size):
        for order in permutations(chosen):
            likely, left = 1.0, sum(mass)
            for client in order:
                likely, left = likely * mass[client] / left, left - mass[client]
            found[chosen] = found.get(chosen, 0.0) + likely
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_by_size_cohorts_are_those_of_successive_draws_without_replacement(size):
    mass, rounds = [1.0, 2, 3, 4, 10], 4000
    expected = successive_probabilities(mass, size)
    assert sum(expected.values()) == pytest.approx(1)
    drawn_sets = [tuple(cohort.ids.tolist()) for cohort in drawn(BySize(size), crowd(5, mass), rounds)]
    assert_uniform_counts([drawn_sets.count(chosen) for chosen in expected], [rounds * likely for likely in expected.values()])


def test_by_size_a_client_contributes_once_or_by_its_mass_and_a_smaller_cohort_is_part_of_a_larger_one():
    population = crowd(mass=np.arange(1.0, 21))
    for r in range(20):
        few, many, weighted = BySize(4)(population, 0, r), BySize(9)(population, 0, r), BySize(9, weighted=True)(population, 0, r)
        assert set(few.ids.tolist()) <= set(many.ids.tolist())
        assert (population.mass[many.ids] * many.importance).tolist() == pytest.approx([1.0] * 9)
        assert torch.equal(many.ids, weighted.ids)
        assert weighted.importance.tolist() == [1.0] * 9


def test_equal_clients_are_those_of_uniform_each_contributing_once():
    population = crowd(mass=np.random.default_rng(0).uniform(0.1, 100, 20))
    for r in range(20):
        cohort = EqualClients(7)(population, 3, r)
        weight = population.mass[cohort.ids] * cohort.importance
        assert torch.equal(cohort.ids, Uniform(7)(population, 3, r).ids)
        assert weight.tolist() == pytest.approx([1.0] * 7)
        assert bool((weight <= cohort.mass_bound).all())
        assert cohort.mass_bound < 1 + 1e-9


def test_poisson_sizes_are_binomial_and_clients_are_drawn_at_the_rate():
    n, rate, rounds = 12, 0.3, 4000
    cohorts = drawn(Poisson(rate), crowd(n), rounds)
    sizes = np.array([len(c.ids) for c in cohorts])
    cells = np.clip(sizes, 0, 8)
    expected = stats.binom.pmf(np.arange(8), n, rate).tolist()
    assert_uniform_counts(np.bincount(cells, minlength=9), rounds * np.array([*expected, 1 - sum(expected)]))
    counts = torch.cat([c.ids for c in cohorts]).bincount(minlength=n).numpy()
    z = (counts - rounds * rate) / np.sqrt(rounds * rate * (1 - rate))
    assert stats.chi2.sf((z**2).sum(), n) > ERROR_RATE


def test_poisson_may_draw_nobody_and_at_rate_one_draws_everybody():
    empty = [c for c in drawn(Poisson(0.05), crowd(3), 50) if len(c.ids) == 0]
    assert empty                      # missed with probability (1 - 0.95^3)^50 < 1e-42
    assert empty[0].importance.shape == (0,)
    assert Poisson(1.0)(crowd(), 0, 0).ids.tolist() == list(range(20))


def test_everyone_is_everyone():
    assert all(c.ids.tolist() == list(range(20)) for c in drawn(Everyone(), crowd(), 3))


@pytest.mark.parametrize("sampler", [Uniform(7), Uniform(20), Everyone(), Poisson(0.3), Poisson(1.0)], ids=repr)
def test_drawn_without_regard_to_mass_a_client_stands_for_itself(sampler):
    for cohort in drawn(sampler, crowd(mass=np.arange(1.0, 21)), 5):
        assert cohort.importance.tolist() == [1.0] * len(cohort.ids)


@pytest.mark.parametrize("sampler", [Uniform(7), Uniform(20), Everyone(), Poisson(0.3), Poisson(1.0), ByMass(20), EqualClients(7),
                                     EqualClients(20), BySize(7), BySize(20)], ids=repr)
def test_who_takes_everyone_draws_them_all_in_every_round(sampler):
    population = crowd()
    assert sampler.takes_everyone(population) == all(len(cohort.ids) == 20 for cohort in drawn(sampler, population, 20))


def test_events_say_how_cohorts_are_drawn_and_claim_nothing_where_nothing_is_hidden():
    population = crowd()
    assert Uniform(7).event(population) == EqualClients(7).event(population) == FixedSampling(7, 20)
    assert Poisson(0.3).event(population) == PoissonSampling(0.3)
    for open_to_all in (Everyone(), Poisson(1.0), ByMass(9), BySize(7)):
        assert open_to_all.event(population) == NoSampling()


def test_expected_sizes():
    sizes = [s.expected_size(crowd()) for s in (Uniform(7), Everyone(), Poisson(0.3), ByMass(9), EqualClients(7), BySize(8))]
    assert sizes == pytest.approx([7, 20, 6, 9, 7, 8])


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Uniform(0), "cohort_size must be a whole number, at least 1, got 0."),
    (lambda: ByMass(0), "cohort_size must be a whole number, at least 1, got 0."),
    (lambda: Poisson(0), "rate must be in (0, 1], got 0. For 100 of 2500 clients on average write 0.04."),
    (lambda: Poisson(1.01), "rate must be in (0, 1], got 1.01. For 100 of 2500 clients on average write 0.04."),
    (lambda: Poisson(100), "rate must be in (0, 1], got 100. For 100 of 2500 clients on average write 0.04."),
    (lambda: EqualClients(2.5), "cohort_size must be a whole number, at least 1, got 2.5."),
    (lambda: BySize(0), "cohort_size must be a whole number, at least 1, got 0."),
    (lambda: EqualClients(21).check(crowd()),
     "cohort_size=21 clients a round, but the population has 20. Write cohort_size=20 or less, or sample=Everyone()."),
    (lambda: BySize(21).check(crowd()),
     "cohort_size=21 clients a round, but the population has 20. Write cohort_size=20 or less, or sample=Everyone()."),
    (lambda: Uniform(21).check(crowd()),
     "cohort_size=21 clients a round, but the population has 20. Write cohort_size=20 or less, or sample=Everyone()."),
])
def test_refusals(make, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()


def test_what_fits_is_not_refused():
    for sampler in (Uniform(20), ByMass(100), Poisson(1.0), Everyone()):
        sampler.check(crowd())


# Draws

@given(words, st.lists(words, max_size=4))
def test_the_path_of_integers_equals_the_path_of_tensors(seed, parts):
    plain = hash_bits(seed, "name", *parts)
    assert plain.dtype == torch.int64
    assert plain.shape == ()
    if parts:
        assert hash_bits(seed, "name", *(tensor([p]) for p in parts)).tolist() == [plain.item()]
        assert hash_bits(seed, "name", tensor(parts[0]), *parts[1:]).item() == plain.item()
        assert hash_bits(seed, "name", *parts[:-1], tensor(parts[-1:])).tolist() == [plain.item()]


def test_a_numpy_integer_is_an_integer():
    """Seeds often come from numpy.arange."""
    assert hash_bits(np.int64(3), "name", 1, tensor([2])).tolist() == hash_bits(3, "name", 1, tensor([2])).tolist()


def test_draws_broadcast():
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    grid = hash_bits(5, "grid", rows, columns)
    assert grid.tolist() == [[hash_bits(5, "grid", r, c).item() for c in range(4)] for r in range(3)]


def test_every_part_of_a_name_matters():
    base = hash_bits(1, "a", 2, 3).item()
    others = [hash_bits(2, "a", 2, 3), hash_bits(1, "b", 2, 3), hash_bits(1, "a", 3, 2), hash_bits(1, "a", 2, 4), hash_bits(1, "a", 3, 3),
              hash_bits(1, "a", 2), hash_bits(1, "a", 2, 3, 0), hash_bits(-1, "a", 2, 3), hash_bits(1, "", 2, 3)]
    assert len({base, *(o.item() for o in others)}) == len(others) + 1      # a collision of 64 bits: below 1e-17


STREAMS = {
    "clients": lambda k: hash_bits(0, "x", 0, k),
    "rounds": lambda k: hash_bits(0, "x", k, 0),
    "last part": lambda k: hash_bits(0, "x", 3, 7, k),
    "far clients": lambda k: hash_bits(0, "x", 0, k * 2**32),
    "seeds": lambda k: torch.stack([hash_bits(int(s), "x", 0, 0) for s in k]),
    "names": lambda k: torch.stack([hash_bits(0, f"x{s}", 0, 0) for s in k]),
    "negative": lambda k: hash_bits(0, "x", -k),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_draws_are_uniform_their_bits_balanced_and_neighbours_independent(stream):
    n = 4000
    bits = STREAMS[stream](torch.arange(n))
    numbers = uniform_numbers(bits).numpy()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > ERROR_RATE
    ones = np.array([int(((bits >> b) & 1).sum()) for b in range(64)])
    assert np.abs(ones - n / 2).max() < stats.norm.isf(ERROR_RATE / 128) * np.sqrt(n) / 2      # union over 64 bits
    flips = np.array([int((((bits[1:] ^ bits[:-1]) >> b) & 1).sum()) for b in range(64)])      # neighbours differ in half
    assert np.abs(flips - (n - 1) / 2).max() < stats.norm.isf(ERROR_RATE / 128) * np.sqrt(n - 1) / 2
    cells = (numbers[:-1:2] * 8).astype(int) * 8 + (numbers[1::2] * 8).astype(int)             # pairs fill the square
    assert_uniform_counts(np.bincount(cells, minlength=64), [len(cells) / 64] * 64)


@pytest.mark.parametrize("other", [("x", 1, 0), ("y", 0, 0), ("x", 0, 1)], ids=["round", "name", "seed"])
def test_two_streams_are_independent(other):
    name, round, seed = other
    clients = torch.arange(4000)
    a, b = uniform_numbers(hash_bits(0, "x", 0, clients)).numpy(), uniform_numbers(hash_bits(seed, name, round, clients)).numpy()
    counts, _, _ = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])
    assert_uniform_counts(counts.ravel(), [4000 / 64] * 64)
    assert stats.spearmanr(a, b).pvalue > ERROR_RATE


def test_uniform_reads_bits_as_a_fraction_in_the_unit_interval():
    extreme = tensor([0, -1, 2**63 - 1, -(2**63)])
    assert uniform_numbers(extreme).tolist() == [0.0, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5]


def test_integers_are_uniform_over_their_range():
    bits = hash_bits(0, "dice", torch.arange(6000))
    values = uniform_integers(bits, 1, 7)
    assert_uniform_counts(values.bincount(minlength=7)[1:].numpy(), [1000] * 6)
    assert int(values.min()) == 1
    highs = torch.arange(6000) % 5 + 2
    assert bool((uniform_integers(bits, 1, highs) < highs).all())
    assert uniform_integers(tensor([-1]), 0, 10).item() == 9


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 2**40))
def test_permutations_are_permutations_of_each_size(sizes, seed):
    orders = random_permutations(hash_bits(seed, "order", torch.arange(len(sizes))), tensor(sizes))
    assert orders.shape == (len(sizes), max(sizes))
    for row, size in zip(orders.tolist(), sizes, strict=True):
        assert sorted(row[:size]) == list(range(size))
        assert sorted(row) == list(range(max(sizes)))      # padding keeps to the end


def test_a_permutation_does_not_depend_on_who_else_is_asked():
    bits, sizes = hash_bits(0, "order", torch.arange(5)), tensor([3, 9, 4, 1, 6])
    together = random_permutations(bits, sizes)
    for k in range(5):
        assert random_permutations(bits[k : k + 1], sizes[k : k + 1])[0].tolist() == together[k, : sizes[k]].tolist()


@pytest.mark.parametrize("width", [4, 9])
def test_permutations_of_four_are_equally_likely(width):
    n = 4800
    sizes = torch.full((n,), 4)
    sizes[0] = width
    orders = random_permutations(hash_bits(0, "order", torch.arange(n)), sizes)[1:, :4].tolist()
    _, counts = np.unique([int("".join(map(str, order))) for order in orders], return_counts=True)
    assert len(counts) == 24
    assert_uniform_counts(counts, [(n - 1) / 24] * 24)


@settings(max_examples=20)
@given(st.integers(0, 2**63 - 1))
def test_draws_do_not_touch_torchs_generator(seed):
    before = torch.random.get_rng_state()
    random_permutations(hash_bits(seed, "order", torch.arange(3)), tensor([2, 3, 4]))
    assert torch.equal(before, torch.random.get_rng_state())
