"""Attacks on everything that is released: what they prove stays below what is promised, and catches what is broken.

Bounds hold with probability 99% each, so an attack on a sound release accuses it wrongly once in a hundred seeds at most.
Seeds are fixed: a test passes or fails for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import fedtail
from fedtail import (
    Binned,
    DiscreteNoise,
    Engine,
    Family,
    GaussianNoise,
    IntegerChannel,
    NoisyHistogram,
    PlainChannel,
    Poisson,
    PrivateMean,
    train,
)
from fedtail.answering import answer, row_bound_for
from fedtail.channel import base
from fedtail.clients import Clients, Shard
from fedtail.conversations import single_questions
from fedtail.data.population import Population
from fedtail.fleet import Broadcast
from fedtail.models import LeastSquares
from fedtail.privacy import Attack, Guarantee, Ledger, NoisySum, SeededRandomness, gaussian_epsilon
from fedtail.privacy.audit import _clopper_pearson_bound, _error_rate_bounds
from fedtail.privacy.events import NoSampling, Release, RoundEvent, Sampling
from fedtail.quantiles import Edges, QuantilePlan, plan_quantiles
from fedtail.quantiles.private import noisy_sum
from fedtail.questions import Question, Statistic

DELTA = 1e-9
CLIENTS = 5      # of a small sum; the last one is the client under attack
WIDE = torch.float64


# The tool itself

def normal_scores(mu: float, runs: int, *names: int | str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(SeededRandomness(0, "scores", *names).words(2))
    return random.normal(size=runs), random.normal(loc=mu, size=runs)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.02])
def test_the_gaussian_curve_is_the_closed_form(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    found = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert found <= delta * (1 + 1e-6)
    assert epsilon == 0 or found == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("bound", [Attack.mu, Attack.mu_if_normal])
def test_bounds_on_mu_are_above_it_as_seldom_as_they_say(bound, mu):
    """At 95%: of 400 bounds at most 5% may be too large; 34 of them would be so by chance once in a thousand times."""
    wrong = sum(bound(Attack(*normal_scores(mu, 200, int(10 * mu), k), confidence=0.95)) > mu for k in range(400))
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)
    if bound is Attack.mu_if_normal and mu:
        assert wrong >= stats.binom.ppf(0.001, 400, 0.05)      # exact, not only safe


def test_the_bound_for_normal_scores_is_that_of_a_noncentral_t():
    """At the bound a gap as large as the one found, or larger, has probability 1 - confidence."""
    for without, present, mu, confidence in ((25, 60, 1.0, 0.9), (100, 40, 3.0, 0.99), (20, 20, 0.5, 0.5)):
        scores = normal_scores(mu, 100, "t", without)[0][:without] * 3, normal_scores(mu, 100, "t", without)[1][:present] * 3
        found = Attack(*scores, confidence=confidence).mu_if_normal()
        test = stats.ttest_ind(scores[1], scores[0], equal_var=True)
        assert found > 0
        assert stats.nct.cdf(test.statistic, test.df, found / math.sqrt(1 / without + 1 / present)) == pytest.approx(confidence, abs=1e-9)
    assert Attack(scores[1], scores[0] - 10).mu_if_normal() == 0


def test_the_threshold_is_chosen_on_other_runs_than_it_is_tested_on():
    """Every other run is told apart, and the rest the wrong way round: what is chosen on the first half fails on the second."""
    def halves(first, second):
        return np.tile([first, second], 500).astype(float)

    assert Attack(halves(0, 2), halves(1, 1)).mu() == 0
    assert Attack(halves(0, 0), halves(1, -1)).mu() == 0
    error = 1 - 0.005 ** (1 / 500)
    apart = Attack(halves(0, 0.5), halves(1, 1))                          # a threshold above 1/2 holds in both halves
    assert apart.mu() in (0, pytest.approx(-2 * stats.norm.ppf(error)))
    assert Attack(halves(0, -9), halves(1, 9)).mu() == pytest.approx(-2 * stats.norm.ppf(error))


def test_bounds_on_probabilities_are_clopper_and_pearsons():
    for runs in (20, 77):
        happened = np.arange(runs + 1)
        bounds = _clopper_pearson_bound(happened, runs, 0.02)
        assert stats.binom.cdf(happened[:-1], runs, bounds[:-1]) == pytest.approx(np.full(runs, 0.02), rel=1e-9)
        assert bounds[-1] == 1
    random = np.random.default_rng(0)
    without, present = random.integers(0, 6, 40).astype(float), random.integers(2, 9, 30).astype(float)
    for threshold in range(-1, 11):
        alarms, misses = _error_rate_bounds(without, present, np.array(float(threshold)), 0.96)
        assert float(alarms) == pytest.approx(float(_clopper_pearson_bound(np.array((without >= threshold).sum()), 40, 0.02)))
        assert float(misses) == pytest.approx(float(_clopper_pearson_bound(np.array((present < threshold).sum()), 30, 0.02)))


def test_bounds_approach_the_truth_with_more_runs():
    bounds = [Attack(*normal_scores(2.0, runs, "more")) for runs in (100, 1000, 10_000, 100_000)]
    for found in ([attack.mu() for attack in bounds], [attack.mu_if_normal() for attack in bounds]):
        assert found == sorted(found)
        assert 1.9 < found[-1] < 2.0
    assert all(attack.mu_if_normal() > attack.mu() for attack in bounds)


def test_a_bound_of_any_shape_finds_the_epsilon_of_randomised_response():
    """Says the truth with probability e^epsilon / (1 + e^epsilon): pure privacy, whose curve is a corner and no Gaussian's."""
    epsilon, runs = 1.5, 60_000
    truth = SeededRandomness(0, "response").words(2 * runs) / 2.0**64 < 1 / (1 + math.exp(-epsilon))
    attack = Attack(~truth[:runs], truth[runs:])
    assert 0.95 * epsilon < attack.epsilon_of_any_shape(0.0) < epsilon
    assert attack.epsilon(1e-9) > 3 * epsilon      # the wrong shape: a Gaussian that is as easy to tell apart promises less
    assert attack.epsilon_of_any_shape(0.9) == 0


def test_what_is_told_apart_every_time_proves_as_much_as_there_were_runs():
    attack = Attack(np.zeros(2000), np.ones(2000))
    error = 1 - 0.005 ** (1 / 1000)
    assert attack.mu() == pytest.approx(-2 * stats.norm.ppf(error))
    assert attack.epsilon_of_any_shape(0.01) == pytest.approx(math.log((0.99 - error) / error))
    assert 95 < attack.mu_if_normal() < 100
    assert (gaussian_epsilon(math.inf, 1e-5), gaussian_epsilon(0.0, 1e-5)) == (math.inf, 0)
    assert Attack(np.zeros(20), np.ones(20), confidence=0.5).mu() > 0          # the fewest runs and the least confidence there are
    assert attack.confidence == 0.99
    backwards = Attack(np.ones(2000), np.zeros(2000))
    assert backwards.mu() == backwards.mu_if_normal() == backwards.epsilon(1e-5) == 0
    assert backwards.epsilon_of_any_shape(0.01) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Attack(np.zeros(30), np.zeros(5)), "present must be one score for each run, of 20 runs or more and none of them NaN, got an array of shape (5,) with 0 NaN."),
    (lambda: Attack(np.full(30, math.nan), np.zeros(30)), "without must be one score for each run, of 20 runs or more and none of them NaN, got an array of shape (30,) with 30 NaN."),
    (lambda: Attack(np.zeros(19), np.zeros(30)), "without must be one score for each run, of 20 runs or more and none of them NaN, got an array of shape (19,) with 0 NaN."),
    (lambda: Attack(np.zeros(30), np.zeros((30, 1))), "present must be one score for each run, of 20 runs or more and none of them NaN, got an array of shape (30, 1) with 0 NaN."),
    (lambda: Attack(np.zeros(30), np.array([math.nan, *[0.0] * 29])), "got an array of shape (30,) with 1 NaN."),
    (lambda: Attack(np.zeros(30), np.zeros(30), confidence=1.0), "confidence must be in [0.5, 1), got 1."),
    (lambda: Attack(np.zeros(30), np.zeros(30), confidence=0.49), "confidence must be in [0.5, 1), got 0.49."),
    (lambda: Attack(np.zeros(30), np.zeros(30)).epsilon_of_any_shape(-0.1), "delta must be in [0, 1), got -0.1."),
    (lambda: Attack(np.zeros(30), np.zeros(30), confidence=0.01), "confidence must be in [0.5, 1), got 0.01. For one wrong bound in a hundred write 0.99."),
    (lambda: gaussian_epsilon(1.0, 0.0), "delta must be in (0, 1), got 0."),
    (lambda: Attack(np.zeros(30), np.zeros(30)).epsilon_of_any_shape(1.0), "delta must be in [0, 1), got 1."),
])
def test_refusals(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


# Many rounds at once: the clients of all of them are one crowd, each with its own key, and sums are taken run by run

@dataclass(frozen=True)
class Given:
    """A question whose rows are known, (clients, width); those of every run are the same."""

    row: Tensor
    mechanism: NoisySum
    number: int = 0
    gather: bool = False
    divisor: None = None
    name: str = "Given"
    model: int = 0
    trains: bool = False
    objective: None = None
    last_share: None = None

    def needs_losses(self, shard: Shard) -> bool:
        return False

    def width(self, dim: int) -> int:
        return self.row.shape[1]

    def fewest_contributors(self, mass: float) -> float:
        return float("inf")

    def rows(self, clients: Clients) -> Tensor:
        return self.row.repeat(len(clients) // len(self.row), 1)

    def release(self, dim: int) -> Release:
        return self.mechanism.release(self.row.shape[1], "given rows")


@cache
def crowd(clients: int) -> Population:
    one, place = torch.ones(clients, dtype=WIDE), torch.arange(clients)
    return Population(one[:, None], one, place, torch.ones_like(place), one, place)


def shard(runs: int, seed: int, losses: Tensor | None = None) -> Shard:
    """The clients of all runs in a round; `losses` (clients,) are what they find."""
    everybody, told = crowd(runs * CLIENTS), Broadcast(0, seed, torch.zeros(1, 1, dtype=WIDE), noise_seed=seed)
    found = Shard(everybody, everybody.mass, told, None, told.params)
    if losses is not None:
        found.memo[0] = losses.repeat(runs)
    return found


def released(question: Question, asked: Shard, channel) -> Tensor:
    """What comes out of every run, (runs, width): each client answers, each run is added up, decoded and noised."""
    encoding = channel.encoding(CLIENTS, 1.0)
    base.refuse_mechanism(channel, question.mechanism, question.gather, "a question")
    crossed = answer(question, asked.clients(), encoding)
    total = encoding.sum(crossed.reshape(-1, CLIENTS, crossed.shape[1]).transpose(0, 1))
    sums = encoding.decode(total, row_bound_for(question, total.shape[-1], encoding))
    return question.mechanism.on_server(sums, base.server_noise_source(asked.broadcast, question.number))


def promised(*releases: Release, delta: float = DELTA, rounds: int = 1, sampling: Sampling = NoSampling()) -> Guarantee:
    """What the ledger says of so many rounds with these releases."""
    ledger = Ledger()
    for k in range(rounds):
        ledger.open(k, RoundEvent(releases, sampling))
        ledger.charge(releases)
    return ledger.guarantee(delta)


OTHERS = torch.randn(CLIENTS - 1, 3, generator=torch.Generator().manual_seed(0), dtype=WIDE)
NOISES = {"gaussian": (GaussianNoise(1.0), PlainChannel()), "discrete": (DiscreteNoise(1.0, planned_clients=CLIENTS), IntegerChannel())}


def asked_of(row: list[float], mechanism: NoisySum, number: int = 0) -> Given:
    """A sum over the others and a client with this row."""
    return Given(torch.cat([OTHERS, torch.tensor([row], dtype=WIDE)]), mechanism, number)


NOBODY = [math.nan] * 3      # what a client that failed computed: it is zeroed, and still adds its share of the noise


def attack_on_a_sum(mechanism: NoisySum, channel, runs: int = 100_000) -> Attack:
    """A client whose row is far longer than the clip norm, looked for in its own direction."""
    row = [30.0, 40.0, -50.0]
    scores = [released(asked_of(r, mechanism), shard(runs, seed), channel) @ torch.tensor(row, dtype=WIDE)
              for seed, r in enumerate([NOBODY, row])]
    return Attack(*(score.numpy() for score in scores))


@pytest.mark.parametrize("kind", NOISES)
def test_a_sum_keeps_its_promise_and_no_more(kind):
    noise, channel = NOISES[kind]
    mechanism = NoisySum(0.7, noise)
    found, promise = attack_on_a_sum(mechanism, channel), promised(mechanism.release(3, "a sum"))
    assert 0.8 * promise.epsilon < found.epsilon(DELTA) < promise.epsilon
    assert found.mu() < found.mu_if_normal() < 1 / mechanism.release(3, "a sum").multiplier("zero-out")


@dataclass(frozen=True)
class ThinGaussian(GaussianNoise):
    """Broken: a part of the noise that it says it adds."""

    part: float = 0.9

    def on_server(self, total, clip_norm, whole, random):
        return GaussianNoise(self.part * self.noise_multiplier).on_server(total, clip_norm, whole, random)


@dataclass(frozen=True)
class ThinDiscrete(DiscreteNoise):
    """Broken alike: clients draw shares for less noise."""

    part: float = 0.9

    def on_client(self, rows, clip_norm, whole, random, adding=None):
        return DiscreteNoise(self.part * self.noise_multiplier, self.planned_clients, scale=self.scale).on_client(rows, clip_norm, whole, random, adding)


@pytest.mark.parametrize(("noise", "channel"), [(ThinGaussian(1.0), PlainChannel()), (ThinDiscrete(1.0, CLIENTS, scale=256.0), IntegerChannel())], ids=NOISES)
def test_noise_a_tenth_too_small_is_caught(noise, channel):
    mechanism = NoisySum(0.7, noise)
    promise = promised(mechanism.release(3, "a sum"))
    assert attack_on_a_sum(mechanism, channel, runs=200_000).epsilon(DELTA) > promise.epsilon


def attack_on_two_sums(mechanism: NoisySum, channel, numbers: tuple[int, int], runs: int = 20_000) -> Attack:
    """Two questions of one round, to which the client answers the opposite: whatever noise they share cancels."""
    row = torch.tensor([30.0, 40.0, -50.0], dtype=WIDE)
    scores = []
    for seed, sign in enumerate([math.nan, 1.0]):
        asked = shard(runs, seed)
        first, second = (released(asked_of((sign * s * row).tolist(), mechanism, number), asked, channel)
                         for s, number in zip((1, -1), numbers, strict=True))
        scores.append(((first - second) @ row).numpy())
    return Attack(*scores)


@pytest.mark.parametrize("kind", NOISES)
def test_two_questions_of_a_round_have_noise_of_their_own_and_are_caught_where_they_have_not(kind):
    noise, channel = NOISES[kind]
    mechanism = NoisySum(0.7, noise)
    promise = promised(*2 * [mechanism.release(3, "a sum")])
    assert 0.8 * promise.epsilon < attack_on_two_sums(mechanism, channel, (0, 1)).epsilon(DELTA) < promise.epsilon
    assert attack_on_two_sums(mechanism, channel, (1, 1)).epsilon(DELTA) > 2 * promise.epsilon


@pytest.mark.parametrize("shared", [False, True])
def test_clients_who_draw_the_same_share_are_caught_by_remainders(shared):
    """Five equal shares are more noise than five different ones, but a multiple of five: the rest of the sum is exact."""
    mechanism = NoisySum(0.7, DiscreteNoise(1.0, CLIENTS, scale=256.0))
    others, scores = (256 * mechanism.clip(OTHERS)).round().sum(0), []
    for seed, row in enumerate([NOBODY, [30.0, 40.0, -50.0]]):
        asked = shard(20_000, seed)
        if shared:
            asked = replace(asked, population=replace(asked.population, key=asked.population.key // CLIENTS))
        total = 256 * released(asked_of(row, mechanism), asked, IntegerChannel())
        scores.append(((total - others) % CLIENTS != 0).any(1).double().numpy())
    promise = promised(mechanism.release(3, "a sum")).epsilon
    assert (Attack(*scores).epsilon(DELTA) > promise) == shared


# Histograms of losses, through the question that asks for them

@cache
def histogram(method: str, kind: str) -> NoisyHistogram:
    return NoisyHistogram(8.0, float(CLIENTS), NOISES[kind][0], bins=8, method=method)


def extremes(matrix: np.ndarray, adjacency: str) -> tuple[int | None, int]:
    """The neighbours that differ most: nobody or the bin of the longest column, or the two bins that are farthest apart."""
    if adjacency == "zero-out":
        return None, int((matrix**2).sum(0).argmax())
    gaps = ((matrix[:, :, None] - matrix[:, None]) ** 2).sum(0)
    first, second = np.unravel_index(gaps.argmax(), gaps.shape)
    return int(first), int(second)


def column(matrix: np.ndarray, place: int | None) -> np.ndarray:
    return np.zeros(len(matrix)) if place is None else matrix[:, place]


def attack_on_a_histogram(question: Statistic, channel, adjacency: str, runs: int = 30_000) -> Attack:
    places = extremes(question.part.strategy.matrix, adjacency)
    absent, present = (column(question.part.strategy.matrix, place) for place in places)
    scores = []
    for seed, place in enumerate(places):
        loss = math.nan if place is None else place + 0.5
        asked = shard(runs, seed, torch.tensor([0.3, 2.5, 2.6, 9.0, loss], dtype=WIDE))
        scores.append(released(question, asked, channel).numpy() @ (present - absent))
    return Attack(*scores)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("method", ["flat", "tree", "optimal"])
def test_a_histogram_keeps_its_promise_and_no_more(method, kind, adjacency):
    question = next(histogram(method, kind).ask_histogram())
    promise = fedtail.privacy.guarantee([(RoundEvent((question.release(0),), NoSampling()), 1)], DELTA, adjacency)
    found = attack_on_a_histogram(question, NOISES[kind][1], adjacency)
    assert 0.8 * promise.epsilon < found.epsilon(DELTA) < promise.epsilon
    assert found.mu() < 1 / question.release(0).multiplier(adjacency)


@dataclass(frozen=True)
class ExactTotal(NoisySum):
    """Broken: counts are noised, but made to add up to the number of clients who answered."""

    def on_server(self, total, random):
        noisy = super().on_server(total, random)
        return noisy + (total - noisy).mean(-1, keepdim=True)


def test_a_histogram_whose_total_is_exact_is_caught():
    question = next(histogram("flat", "gaussian").ask_histogram())
    fair, promise = question.mechanism, promised(question.release(0))
    leaky = replace(question, mechanism=ExactTotal(fair.clip_norm, fair.noise, fair.exchange, fair.whole))
    scores = [released(leaky, shard(5000, seed, torch.tensor([0.3, 2.5, 2.6, 9.0, loss], dtype=WIDE)), PlainChannel()).sum(1).numpy()
              for seed, loss in enumerate([math.nan, 1.5])]
    assert Attack(*scores).epsilon(DELTA) > 2 * promise.epsilon


# Quantiles as an analyst asks for them

@cache
def quantile_plan(method: str, adjacency: str) -> QuantilePlan:
    return plan_quantiles(CLIENTS, [0.5], Edges.of_equal_width(0.0, 4.0, 4), epsilon=12.0, delta=DELTA, method=method, adjacency=adjacency, allow_few=True)


def with_an_empty_row(plan: QuantilePlan) -> QuantilePlan:
    """The same plan with a bin more, beyond the range, whose client sends nothing but its share of the noise."""
    matrix = np.concatenate([plan.strategy.matrix, np.zeros((plan.strategy.width, 1), dtype=np.int64)], 1)
    return replace(plan, strategy=replace(plan.strategy, matrix=matrix), edges=Edges.from_values([*plan.edges.values, 5.0]))


def attack_on_quantiles(plan: QuantilePlan, runs: int = 6000) -> Attack:
    places, spent = extremes(plan.strategy.matrix, plan.adjacency), with_an_empty_row(plan)
    absent, present = (column(plan.strategy.matrix, place) for place in places)
    scores = []
    for seed, place in enumerate(places):
        values, stream = np.array([0.2, 1.1, 1.7, 3.3, 4.5 if place is None else place + 0.5]), SeededRandomness(seed, "quantiles")
        scores.append(np.stack([noisy_sum(spent, values, stream) for _ in range(runs)]) @ (present - absent))
    return Attack(*scores)


@pytest.mark.parametrize(("method", "adjacency"), [("flat", "zero-out"), ("tree", "replace-one"), ("optimal", "zero-out"), ("optimal", "replace-one")])
def test_quantiles_keep_their_promise_and_no_more(method, adjacency):
    plan = quantile_plan(method, adjacency)
    found = attack_on_quantiles(plan)
    assert 0.8 * plan.epsilon < found.epsilon(DELTA) < found.epsilon_if_normal(DELTA) < plan.epsilon


def test_quantiles_with_a_tenth_less_noise_are_caught():
    plan = quantile_plan("optimal", "zero-out")
    thin = replace(plan, shares=replace(plan.shares, variance=plan.shares.variance * Fraction(81, 100)))
    assert attack_on_quantiles(thin).epsilon_if_normal(DELTA) > plan.epsilon


# Cohorts: whoever does not know who was asked learns less, and no less than is said

@dataclass(frozen=True)
class AskedEveryTime(Poisson):
    """Broken: one client of every five takes part always, and the ledger is told otherwise."""

    def __call__(self, population, seed, round):
        cohort = super().__call__(population, seed, round)
        favoured = torch.arange(CLIENTS - 1, len(population), CLIENTS)
        ids = torch.cat([cohort.ids, favoured]).unique()
        return replace(cohort, ids=ids, key=population.key[ids], importance=torch.ones(len(ids), dtype=WIDE))


@dataclass(frozen=True)
class OfSome(Given):
    """The rows of those who were drawn."""

    drawn: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def rows(self, clients: Clients) -> Tensor:
        return self.row[self.drawn]


SAMPLED = NoisySum(0.7, GaussianNoise(0.6))
RATE, ROUNDS = 0.3, 3
LARGE = 0.03      # delta at which raw counts tell something: amplified privacy has no Gaussian shape


def sampled_scores(sample: Poisson, row: list[float], seed: int, runs: int = 60_000) -> np.ndarray:
    """Rounds over Poisson cohorts, scored by the likelihood ratio of somebody who does not see who was asked."""
    everybody, rows = crowd(runs * CLIENTS), torch.cat([OTHERS * torch.tensor([1.0, 1.0, 0.0]), torch.tensor([row], dtype=WIDE)])
    scores, mu = np.zeros(runs), 1 / SAMPLED.noise.noise_multiplier
    for k in range(ROUNDS):
        drawn, told = sample(everybody, seed, k).ids, Broadcast(k, seed, torch.zeros(1, 1, dtype=WIDE), noise_seed=seed)
        asked = Shard(everybody.select(drawn), everybody.mass[drawn], told, None, told.params)
        crossed = answer(OfSome(rows, SAMPLED, drawn=drawn % CLIENTS), asked.clients(), PlainChannel().encoding(CLIENTS, 1.0))
        sums = torch.zeros(runs, 3, dtype=WIDE).index_add_(0, drawn // CLIENTS, crossed)
        seen = SAMPLED.on_server(sums, base.server_noise_source(told, 0))[:, 2].numpy() * mu / SAMPLED.clip_norm      # of variance one
        scores += np.log1p(sample.rate * np.expm1(mu * seen - mu**2 / 2))
    return scores


def attack_on_cohorts(sample: Poisson) -> tuple[float, Guarantee]:
    """What is proven about the amplified guarantee, and what was promised."""
    found = Attack(*(sampled_scores(sample, row, seed) for seed, row in enumerate([NOBODY, [0.0, 0.0, 9.0]])))
    promise = promised(SAMPLED.release(3, "a sum"), delta=LARGE, rounds=ROUNDS, sampling=sample.event(crowd(CLIENTS)))
    return found.epsilon_of_any_shape(LARGE), promise


def test_sampled_rounds_keep_the_amplified_promise():
    found, promise = attack_on_cohorts(Poisson(RATE))
    assert 0.8 * promise.epsilon < found < promise.epsilon < promise.without_amplification


def test_a_client_that_is_asked_every_time_is_caught_by_the_amplified_promise_and_not_by_the_other():
    found, promise = attack_on_cohorts(AskedEveryTime(RATE))
    assert promise.epsilon < found < promise.without_amplification


# Training: the same run many times over, as the members of a family, whose noise is drawn anew for each of them

PEOPLE, BINS = 40, 8
UPDATE, QUANTILE = 0.75, 1.5     # noise multipliers
CLIP, TAIL = 0.1, 0.5
CANARY = BINS - 1                # the parameter that nobody else moves, and the bin that nobody else is in


def population(there: bool) -> Population:
    """Everybody else pulls the first parameter; the last client pulls its own, with a gradient and a loss beyond all bounds.

    Where it is not there its data are no numbers, so that it is zeroed.
    """
    x, y = torch.zeros(PEOPLE, BINS, dtype=WIDE), torch.full((PEOPLE,), 1.5, dtype=WIDE)
    x[:-1, 0], x[-1, CANARY], y[-1] = 1.0, 1.0, 1e4
    found = Population.from_clients([(x[k:k + 1], y[k:k + 1]) for k in range(PEOPLE)])
    return found if there else replace(found, targets=found.targets.where(found.targets < 1e4, math.nan))


WITHOUT, PRESENT = population(False), population(True)
TASK = fedtail.Task(LeastSquares(BINS, bias=False))
LOCAL = {"learning_rate": 1.0, "batch_size": None}


def dp_fedavg(cohort: int = PEOPLE, **more):
    return fedtail.dp_fedavg(PEOPLE, CLIP, UPDATE, cohort_size=cohort, **LOCAL, **more)


def dp_delta_fl(cohort: int = PEOPLE, **more):
    return fedtail.dp_delta_fl(TAIL, PEOPLE, CLIP, UPDATE, QUANTILE, 4.0, cohort_size=cohort, bins=BINS, method="flat", **LOCAL, **more)


class Overheard:
    """A channel that keeps what comes out of it: all that an observer sees, which is more than the models say."""

    @contextmanager
    def open(self, *told) -> Iterator:
        with super().open(*told) as ask:
            yield lambda question: self.keep(question, ask(question))

    def keep(self, question, answer):
        self.messages.append((next(single_questions(question)).mechanism, torch.stack(answer)))
        return answer


@dataclass(frozen=True)
class OverheardPlain(Overheard, PlainChannel):
    messages: list = field(default_factory=list)


@dataclass(frozen=True)
class OverheardIntegers(Overheard, IntegerChannel):
    messages: list = field(default_factory=list)


@dataclass(frozen=True)
class Observed:
    """Of a family of equals: each message's mechanism and sums, (runs, width), and the models, (runs, parameters)."""

    messages: list
    models: Tensor


def observed(algorithm, people: Population, seed: int, runs: int, rounds: int, channel) -> Observed:
    trained = train(Family((algorithm,) * runs), TASK, people, rounds=rounds, seed=seed, engine=Engine(dtype=WIDE, workers=1), channel=channel)
    return Observed(channel.messages, torch.stack([state.params for state in trained.state]))


def evidence(seen: Observed) -> Tensor:
    """The likelihood ratio: to every message the client adds as much as it may, where nobody else adds anything."""
    return sum(sums[:, CANARY] / (how.clip_norm * how.noise.noise_multiplier**2) for how, sums in seen.messages)


def attack_on_training(algorithm, read=evidence, seeds=(0, 1), runs: int = 150, rounds: int = 3, channel=OverheardPlain) -> Attack:
    return Attack(*(read(observed(algorithm, people, seed, runs, rounds, channel())).numpy()
                    for seed, people in zip(seeds, (WITHOUT, PRESENT), strict=True)))


def promised_by_training(algorithm, rounds: int = 3) -> Guarantee:
    """What the ledger of one such run says."""
    return train(algorithm, TASK, PRESENT, rounds=rounds, engine=Engine(dtype=WIDE, workers=1)).ledger.guarantee(DELTA)


TRAINING = {"dp_fedavg": dp_fedavg(), "dp_delta_fl": dp_delta_fl()}


@pytest.mark.parametrize("algorithm", TRAINING.values(), ids=TRAINING)
def test_training_keeps_its_promise(algorithm):
    """Everybody takes part in every round: what a server can tell is what anybody can."""
    found, promise = attack_on_training(algorithm), promised_by_training(algorithm)
    assert 0.6 * promise.epsilon < found.epsilon_if_normal(DELTA) < promise.epsilon == promise.without_amplification
    assert found.epsilon(DELTA) < promise.epsilon


def test_training_with_integer_noise_keeps_its_promise():
    algorithm = dp_delta_fl(noise="discrete", planned_clients=PEOPLE)
    found, promise = attack_on_training(algorithm, runs=120, channel=OverheardIntegers), promised_by_training(algorithm)
    assert 0.6 * promise.epsilon < found.epsilon_if_normal(DELTA) < promise.epsilon
    assert found.epsilon(DELTA) < promise.epsilon


def test_a_server_learns_of_somebody_asked_every_time_what_is_said_and_more_than_others_are_promised():
    """A fifth is asked in each round. In these runs the client always was, which the server knows: the worst case for it."""
    algorithm = dp_fedavg(cohort=PEOPLE // 5)
    always = (seed for seed in range(2000) if all(PEOPLE - 1 in algorithm.sample(PRESENT, seed, k).ids for k in range(3)))
    seeds = next(always), next(always)
    found, promise = attack_on_training(algorithm, seeds=seeds, runs=250).epsilon_if_normal(DELTA), promised_by_training(algorithm)
    assert promise.epsilon < found < promise.without_amplification


def thin(algorithm):
    """A quarter of the noise of every release is missing."""
    found = replace(algorithm, aggregate=replace(algorithm.aggregate, noise=ThinGaussian(UPDATE, 0.75)))
    if not isinstance(algorithm.risk, Binned):
        return found
    histogram = replace(algorithm.risk.histogram, noise=ThinGaussian(QUANTILE, 0.75))
    return replace(found, risk=replace(algorithm.risk, histogram=histogram))


@pytest.mark.parametrize("algorithm", TRAINING.values(), ids=TRAINING)
def test_training_with_a_quarter_less_noise_is_caught(algorithm):
    found, promise = attack_on_training(thin(algorithm)), promised_by_training(thin(algorithm))
    assert promise.epsilon == promised_by_training(algorithm).epsilon
    assert found.epsilon_if_normal(DELTA) > promise.epsilon


@dataclass(frozen=True)
class ByRealisedCount(PrivateMean):
    """Broken: the noisy sum is divided by how many clients there really were, as [PLMH23, Algorithm 4] does."""

    counts: list = field(default_factory=list)

    def rows(self, updates, seen, train, clients):
        self.counts.append(int(updates.isfinite().all(1).sum()))
        return super().rows(updates, seen, train, clients)

    def fit(self, train):
        return (yield train) / self.counts[-1]


def drift(seen: Observed) -> Tensor:
    """How far the client's parameter came, less how far the others': fewer of them divide by less, and go further."""
    return seen.models[:, CANARY] - seen.models[:, 0]


def test_dividing_by_the_exact_number_of_clients_is_caught():
    fair = dp_fedavg()
    leaky = replace(fair, aggregate=ByRealisedCount(CLIP, GaussianNoise(UPDATE), float(PEOPLE)))
    promise = promised_by_training(leaky)
    assert promise.epsilon == promised_by_training(fair).epsilon
    assert attack_on_training(fair, read=drift).epsilon_if_normal(DELTA) < promise.epsilon
    assert attack_on_training(leaky, read=drift).epsilon_if_normal(DELTA) > promise.epsilon


def cancelled(seen: Observed) -> Tensor:
    """The update less the histogram, each in units of its noise."""
    counts, updates = (sums[:, CANARY] / how.clip_norm / how.noise.noise_multiplier for how, sums in seen.messages)
    return updates - counts


def test_a_histogram_and_an_update_with_the_same_noise_are_caught(monkeypatch):
    algorithm, runs, fair = dp_delta_fl(), 100, base.server_noise_source
    promise = promised_by_training(algorithm, rounds=1).epsilon
    assert attack_on_training(algorithm, cancelled, runs=runs, rounds=1).epsilon(DELTA) < promise
    monkeypatch.setattr(base, "server_noise_source", lambda told, number: fair(told, number % runs))      # of a run's two questions
    assert attack_on_training(algorithm, cancelled, runs=runs, rounds=1).epsilon(DELTA) > promise
