"""DP-FTRL: banded factorisation, noise that is correlated over rounds, cohorts that take turns, and what the ledger says of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from scipy.linalg import toeplitz
from scipy.optimize import minimize

import fedtail
from fedtail import CorrelatedNoise, CyclicCohorts, Ledger, PrivacyBudget
from fedtail.aggregation import CorrelatedMean
from fedtail.algorithm import planned_round
from fedtail.channel import IntegerChannel, PlainChannel, SecureChannel
from fedtail.fleet import SimulatedPopulation
from fedtail.local import Dane
from fedtail.models import SoftmaxRegression
from fedtail.privacy import (
    CorrelatedRelease,
    CyclicSampling,
    GaussianRelease,
    NoSampling,
    RoundEvent,
    SeededRandomness,
    epsilon_at,
    group_privacy,
    guarantee,
)
from fedtail.privacy.banded_factorisation import (
    banded_coefficients,
    participation_sensitivity,
    prefix_sum_error,
    square_root_coefficients,
)
from fedtail.privacy.history import join_histories
from fedtail.privacy.statement import FLOATING, privacy_statement
from fedtail.quantiles.matrix_mechanism import optimal_factor
from fedtail.questions import Train
from fedtail.runs import run as run_experiment
from fedtail.runs.execution import Interrupted
from fedtail.sampling.cyclic import is_turn_of

from cases import small_population
from run_cases import METHODS, Onlooker, digests, experiment

TASK = fedtail.Task(SoftmaxRegression(5, 3))
PEOPLE = small_population(60)
METHOD = fedtail.dp_ftrl(60, 0.1, 1.0, rounds=12, cohort_size=15, learning_rate=0.1)
BUDGET = PrivacyBudget(delta=1e-5)


def matrix_of(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    """The banded factor C as a dense matrix, (rounds, rounds)."""
    padded = np.append(coefficients, np.zeros(rounds - len(coefficients)))
    return toeplitz(padded, np.eye(1, rounds)[0] * padded[0])


# The factorisation

@pytest.mark.parametrize("rounds", [16, 256, 1024])
def test_with_all_bands_the_largest_error_is_that_of_the_square_root(rounds):
    """The published optimum of Toeplitz factors: coefficients binom(2k, k) / 4^k, error at most 1 + (gamma + ln n) / pi."""
    found = banded_coefficients(rounds, rounds, "max")
    error = math.sqrt(prefix_sum_error(found, rounds, "max")) * np.linalg.norm(found)
    root = np.array([math.comb(2 * k, k) / 4**k for k in range(min(rounds, 500))])
    assert found[:len(root)] == pytest.approx(root, abs=2e-4)
    closed = float((square_root_coefficients(rounds) ** 2).sum())
    assert error == pytest.approx(closed, rel=1e-6)
    assert closed <= 1 + (np.euler_gamma + math.log(rounds)) / math.pi
    angles = (2 * np.arange(1, rounds + 1) - 1) * math.pi / (4 * rounds + 2)
    assert 1 < error / (0.5 / np.sin(angles)).mean() < 1.3               # the nuclear norm over n: no factorisation of any kind is below


@pytest.mark.parametrize("rounds", [16, 64])
def test_with_all_bands_the_mean_error_is_near_that_of_the_best_factor_of_any_kind(rounds):
    """The optimum over dense factors, by the fixed point of the matrix mechanism, bounds it from below."""
    found = banded_coefficients(rounds, rounds)
    ratio = prefix_sum_error(found, rounds) * float(found @ found) / (optimal_factor(rounds).least / rounds)
    root = square_root_coefficients(rounds)
    assert 1 <= ratio < 1.08
    assert ratio < prefix_sum_error(root, rounds) * float(root @ root) / (optimal_factor(rounds).least / rounds)


@pytest.mark.parametrize(("rounds", "bands", "error"), [(20, 3, "mean"), (20, 3, "max"), (7, 2, "mean")])
def test_coefficients_against_a_search_without_gradients_over_dense_matrices(rounds, bands, error):
    prefix = np.tril(np.ones((rounds, rounds)))

    def product_of_errors(rest: np.ndarray) -> float:
        """Squared error of the prefix sums, from dense matrices, times the squared norm of a column."""
        c = np.append(1.0, rest)
        squares = ((prefix @ np.linalg.inv(matrix_of(c, rounds))) ** 2).sum(1)
        return float((squares.mean() if error == "mean" else squares.max()) * (c @ c))

    found = banded_coefficients(rounds, bands, error)
    best = minimize(product_of_errors, np.full(bands - 1, 0.3), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 10_000})
    assert found[1:] == pytest.approx(best.x, abs=1e-5)
    assert prefix_sum_error(found, rounds, error) * float(found @ found) == pytest.approx(product_of_errors(found[1:]), rel=1e-10)


def test_more_bands_are_better_and_one_is_independent_noise():
    errors = [prefix_sum_error(c, 200) * float(c @ c) for c in (banded_coefficients(200, bands) for bands in (1, 2, 4, 16, 64, 200))]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(201 / 2)
    with pytest.raises(ValueError, match="bands must be between 1 and the 5 rounds, got 6"):
        banded_coefficients(5, 6)


@pytest.mark.parametrize(("rounds", "separation", "bands"), [(9, 3, 3), (8, 3, 2), (7, 4, 4), (5, 1, 1)])
def test_the_sensitivity_by_trying_all_ways_to_participate(rounds, separation, bands):
    c = banded_coefficients(rounds, bands)
    matrix, largest = matrix_of(c, rounds), 0.0
    for times in range(1, rounds + 1):
        for places in combinations(range(rounds), times):
            if all(later - earlier >= separation for earlier, later in pairwise(places)):
                signs = np.array(list(product((1.0, -1.0), repeat=times)))
                largest = max(largest, np.linalg.norm(signs @ matrix[:, places].T, axis=1).max())
    assert participation_sensitivity(c, rounds, separation) == pytest.approx(largest, rel=1e-12)
    with pytest.raises(ValueError, match="bands need as many rounds between two participations"):
        participation_sensitivity(np.ones(separation + 1), rounds + 9, separation)


# The noise

def released_noise(mean: CorrelatedMean, width: int, lost: tuple[int, ...] = ()) -> np.ndarray:
    """What the rounds of a plan release where all rows are zero, (rounds, width), in units of the round's own noise; NaN where lost."""
    kept, found = None, np.full((mean.noise.rounds, width), np.nan)
    for number in range(mean.noise.rounds):
        if number in lost:
            continue
        conversation = mean.fit(Train(None, None, torch.zeros(0), mean, kept=kept, round=number))
        question = next(conversation)
        assert question.kept is None                                    # the noise of earlier rounds is not sent to clients
        with pytest.raises(StopIteration) as ended:
            conversation.send(mean.mechanism.on_server(torch.zeros(width, dtype=torch.float64), SeededRandomness(3, number)))
        update, kept = ended.value.value
        found[number] = update.numpy() * mean.total
    return found / (mean.noise.noise_multiplier * mean.noise.sensitivity * mean.clip_norm)


@pytest.mark.parametrize("lost", [(), (2,), (0, 3, 4)])
def test_noise_has_the_covariance_that_the_price_assumes(lost):
    """(C'C)^{-1} for the rounds that were held; entries of an empirical covariance of n draws are off by sqrt(2 / n) at most."""
    noise, width = CorrelatedNoise(0.7, rounds=9, separation=4), 40_000
    drawn = released_noise(CorrelatedMean(0.3, noise, 5.0), width, lost)
    held = [number for number in range(9) if number not in lost]
    factor = matrix_of(noise.coefficients, 9)[np.ix_(held, held)]
    expected = np.linalg.inv(factor.T @ factor)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs(drawn[held] @ drawn[held].T / width - expected).max() < 6 * math.sqrt(2 / width) * scale.max()
    for turn in range(4):                                               # nobody is exposed by more than the stated multiplier
        rows = np.array([float(number % 4 == turn) for number in held])
        assert np.linalg.norm(factor @ rows) <= noise.sensitivity * (1 + 1e-12)
    if not lost:
        assert drawn == pytest.approx(np.linalg.solve(factor, factor @ drawn), abs=1e-9)


def test_noise_in_the_model_is_what_was_planned_and_less_than_with_independent_noise():
    many, one = (CorrelatedNoise(1.0, rounds=64, separation=32, bands=bands, error="max") for bands in (32, 1))
    drawn = released_noise(CorrelatedMean(0.5, many, 1.0), 4000).sum(0) * many.sensitivity * 0.5
    assert drawn.std() == pytest.approx(many.model_deviation(0.5), rel=4 / math.sqrt(2 * 4000))
    assert many.model_deviation(0.5) < 0.5 * one.model_deviation(0.5)
    assert one.model_deviation(0.5) == pytest.approx(0.5 * math.sqrt(64) * math.sqrt(2))
    assert (many.participations, len(CorrelatedNoise(1.0, 500, 100).coefficients)) == (2, 64)


# Turns

def test_everyone_has_one_turn_in_so_many_rounds_whoever_else_there_is():
    sampler, people = CyclicCohorts(7), small_population(200)
    cohorts = [sampler(people, seed, t).ids for seed, t in ((None, 0), (1, 1), (2, 2), (None, 3), (4, 4), (None, 5), (6, 6))]
    assert torch.cat(cohorts).sort().values.tolist() == list(range(200))
    assert torch.equal(sampler(people, 0, 7).ids, cohorts[0])
    assert 200 / 7 - 5 * math.sqrt(200 / 7) < min(map(len, cohorts)) <= max(map(len, cohorts)) < 200 / 7 + 5 * math.sqrt(200 / 7)
    few = people.key[::3]
    assert torch.equal(is_turn_of(few, 7, 4), is_turn_of(people.key, 7, 4)[::3])
    assert (sampler.expected_size(people), sampler.event(people), sampler.takes_everyone(people)) == (200 / 7, CyclicSampling(7), False)
    assert CyclicCohorts(1).takes_everyone(people)
    assert len(CyclicCohorts(1)(people, 0, 5).ids) == 200


def test_a_client_that_is_sampled_before_its_turn_answers_zeros():
    unlimited = replace(METHOD, sample=fedtail.Everyone())
    with pytest.raises(ValueError, match=r"which Everyone\(\) does not see to. Use sample=CyclicCohorts\(4\)."):
        fedtail.train(unlimited, TASK, PEOPLE, rounds=1)
    quiet = replace(METHOD.aggregate, noise=replace(METHOD.aggregate.noise, noise_multiplier=1e-9))
    honest, eager = (replace(METHOD, sample=sample, aggregate=quiet) for sample in (METHOD.sample, Eager(4)))
    first, second = (fedtail.train(one, TASK, PEOPLE, rounds=5).state.params for one in (honest, eager))
    assert first == pytest.approx(second, abs=1e-7)                     # everyone was sampled, and only those in turn were in the sum
    assert not torch.equal(first, TASK.params())


class Eager(CyclicCohorts):
    """Says that cohorts take turns, and samples everyone."""

    def __call__(self, population, seed, round):
        return fedtail.Everyone()(population, seed, round)


# The ledger

def test_a_whole_run_is_one_gaussian_sum_without_amplification():
    trained = fedtail.train(METHOD, TASK, PEOPLE, rounds=12, privacy=BUDGET)
    found = trained.ledger.guarantee()
    assert found.epsilon == pytest.approx(get_epsilon_gaussian(1.0, 1e-5), rel=1e-9)
    assert (found.without_amplification, found.sampling) == (found.epsilon, "cyclic")
    assert "(client-level, add-or-remove-one-client; cohorts that take turns, not secret)" in str(found)
    told = privacy_statement(trained.ledger, 12)
    assert any(note.startswith("the server is trusted: it sees the exact sums") and "12 rounds" in note for note in told["notes"])
    assert FLOATING in told["guarantee"]
    early = fedtail.train(METHOD, TASK, PEOPLE, rounds=1, privacy=BUDGET).ledger.guarantee()
    assert early.epsilon == found.epsilon                               # who stops early has paid for the whole
    exchanged = guarantee(trained.ledger.rounds, 1e-5, "replace-one")
    assert exchanged.epsilon == pytest.approx(get_epsilon_gaussian(0.5, 1e-5), rel=1e-9)
    assert group_privacy(trained.ledger.rounds, 3, 1e-5).epsilon == pytest.approx(get_epsilon_gaussian(1 / 3, 1e-5), rel=1e-9)


def test_a_budget_covers_the_whole_plan_or_none_of_it():
    enough = get_epsilon_gaussian(1.0, 1e-5) * 1.0001
    ledger = Ledger(PrivacyBudget(enough, 1e-5))
    planned = planned_round(METHOD, SimulatedPopulation(PEOPLE), PlainChannel(), 18)
    assert ledger.affordable_rounds(planned) > 12
    fedtail.train(METHOD, TASK, PEOPLE, rounds=12, privacy=ledger)
    assert sum(count for _, count in ledger.rounds) == 12
    with pytest.raises(ValueError, match="does not last for a round"):
        fedtail.train(METHOD, TASK, PEOPLE, rounds=12, privacy=PrivacyBudget(enough * 0.999, 1e-5))


def test_repeated_rounds_and_second_plans_are_charged_again(tmp_path):
    planned = planned_round(METHOD, SimulatedPopulation(PEOPLE), PlainChannel(), 18)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(BUDGET, path)

    def hold(*numbers: int) -> float:
        """Hold rounds of these numbers; epsilon after them, also from the file."""
        for number in numbers:
            ledger.open(number, planned)
            ledger.charge(planned.releases)
            ledger.close()
        assert dict(Ledger(BUDGET, path).rounds) == dict(ledger.rounds)
        return ledger.guarantee().epsilon

    once, twice, thrice = (get_epsilon_gaussian(1 / math.sqrt(times), 1e-5) for times in (1, 2, 3))
    assert hold(0, 1, 2, 3, 4) == pytest.approx(once)
    ledger = Ledger(BUDGET, path)                                       # after a crash, from a checkpoint of round 3
    assert hold(3, 4, 5, 6) == pytest.approx(twice)
    ledger = Ledger(BUDGET, path)
    assert hold(5, 6, 7) == pytest.approx(twice)                        # no round three times yet
    assert hold(4) == pytest.approx(thrice)
    other = Ledger(BUDGET)
    other.open(0, planned)
    other.charge(planned.releases)
    joint = join_histories(other.rounds, [other.history("another run", 1)])
    assert epsilon_at(joint, 1e-5) == pytest.approx(twice)


def test_accountants_refuse_correlated_noise_without_turns():
    release = CorrelatedRelease(1.0, 12, 4)
    for sampling in (NoSampling(), CyclicSampling(3)):
        with pytest.raises(ValueError, match="is priced for clients that participate at most once in 4 rounds"):
            epsilon_at([(RoundEvent((release,), sampling), 1)], 1e-5)
    beside = RoundEvent((release, GaussianRelease(2.0)), CyclicSampling(5))
    assert epsilon_at([(beside, 1)], 1e-5) == pytest.approx(get_epsilon_gaussian((1 + 1 / 4) ** -0.5, 1e-5), rel=1e-9)
    assert epsilon_at([(RoundEvent((replace(release, begins=False),), CyclicSampling(4)), 3)], 1e-5) == pytest.approx(
        get_epsilon_gaussian(1.0, 1e-5))                                # rounds whose beginning is not known are paid for
    assert epsilon_at([(RoundEvent((replace(release, noise_multiplier=0.0),), CyclicSampling(4)), 3)], 1e-5) == math.inf


# Runs

@pytest.mark.parametrize("randomness", ["seed", "os"])
def test_a_resumed_run_continues_the_noise(randomness):
    budget = replace(BUDGET, randomness=randomness)
    half = fedtail.train(METHOD, TASK, PEOPLE, rounds=5, privacy=budget)
    whole = fedtail.resume(half, PEOPLE, rounds=7)
    position, *kept = half.state.parts["aggregate"][0].split([1, 3 * TASK.params().numel()])
    assert (int(position), kept[0].dtype) == (5, torch.float64)
    assert sum(count for event, count in whole.ledger.rounds if event.releases[0].begins) == 1
    at_once = fedtail.train(METHOD, TASK, PEOPLE, rounds=12, privacy=budget)
    assert torch.equal(whole.state.params, at_once.state.params) is (randomness == "seed")
    with pytest.raises(ValueError, match=r"is planned for 12 rounds, and the run would have 13\. Plan it for 13, or run 12."):
        fedtail.resume(whole, PEOPLE, rounds=1)


FILE = """\
[sample]
part = "CyclicCohorts"
separation = 2
[aggregate]
part = "CorrelatedMean"
clip_norm = 0.1
total = 4.0
noise = { part = "CorrelatedNoise", noise_multiplier = 2.0, rounds = 6, separation = 2 }
[privacy]
delta = 0.01
"""


def test_a_run_from_a_file_is_the_same_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "ftrl", FILE)
    whole = run_experiment(experiment("ftrl"), 3, tmp_path / "whole", Onlooker()).path
    with pytest.raises(Interrupted):
        run_experiment(experiment("ftrl"), 3, tmp_path / "cut", Onlooker(stop_after=3))
    cut = run_experiment(experiment("ftrl"), 3, tmp_path / "cut", Onlooker(), resume=True).path
    assert digests(cut) == digests(whole)
    told = json.loads((whole / "privacy.json").read_text())
    assert told["epsilon"] == pytest.approx(get_epsilon_gaussian(2.0, 0.01), rel=1e-9)
    assert (told["unit"], told["sampling"]) == ("client", "cyclic")


def test_what_does_not_fit_is_refused_when_parts_are_composed():
    wide = replace(METHOD, aggregate=replace(METHOD.aggregate, noise=CorrelatedNoise(1.0, 12, 6)))
    for method, channel, text in (
            (METHOD, IntegerChannel(), "CorrelatedMean adds correlated noise on the server, to the exact sum, which IntegerChannel is there to hide. Use PrivateMean with DiscreteNoise"),
            (METHOD, SecureChannel(threshold=5), "which SecureChannel is there to hide"),
            (wide, PlainChannel(), "is planned for clients that participate at most once in 6 rounds, which CyclicCohorts"),
            (replace(METHOD, sample=CyclicCohorts(8), aggregate=replace(METHOD.aggregate, total=7.5)), PlainChannel(),
             "cohorts take turns of 8 rounds, and the noise of CorrelatedMean is planned for turns of 4"),
            (replace(METHOD, local=replace(METHOD.local, penalty=Dane(0.1))), PlainChannel(), "asks for updates more than once in a round"),
            (replace(METHOD, sample=CyclicCohorts(4, 61)), PlainChannel(), "cohorts of 15.25 clients are planned for a population of 61")):
        with pytest.raises(ValueError, match=text):
            fedtail.train(method, TASK, PEOPLE, rounds=2, channel=channel)
    for make, text in (
            (lambda: CorrelatedNoise(0.0, 5, 5), "must be positive and finite"), (lambda: CorrelatedNoise(1.0, 0, 5), "rounds and separation must be"),
            (lambda: CorrelatedNoise(1.0, 9, 4, 5), "bands must be between 1 and separation=4"), (lambda: CorrelatedNoise(1.0, 9, 4, error="rms"), "error must be"),
            (lambda: CorrelatedMean(0.0, CorrelatedNoise(1.0, 9, 4), 1.0), "clip_norm"), (lambda: CorrelatedMean(1.0, CorrelatedNoise(1.0, 9, 4), 0.0), "total"),
            (lambda: CyclicCohorts(0), "separation must be a whole number"), (lambda: fedtail.dp_ftrl(5, 1.0, 1.0, 9, cohort_size=6), "cohort_size=6")):
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(TypeError, match="noise must be CorrelatedNoise"):
        CorrelatedMean(1.0, fedtail.GaussianNoise(1.0), 1.0)
