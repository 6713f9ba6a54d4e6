"""The unit of privacy, client or example: in the budget, the event, the guarantee and the statement, and never mixed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm
from typer.testing import CliRunner

import fedtail
from fedtail import Ledger, PrivacyBudget
from fedtail.cli import app
from fedtail.models import SoftmaxRegression
from fedtail.privacy import (
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    RoundEvent,
    delta_at,
    epsilon_at,
    group_privacy,
    guarantee,
    rounds_affordable,
)
from fedtail.privacy.discrete_gaussian import variance_as_fraction
from fedtail.privacy.history import EarlierHistory
from fedtail.privacy.ledger_file import LedgerError
from fedtail.privacy.selection import epsilon_of_search
from fedtail.privacy.statement import privacy_statement, release_obstacles

from cases import small_population

UPDATE = GaussianRelease(1.5, 2.0, "the updates")
CLIENTS = RoundEvent((UPDATE,), PoissonSampling(0.1))
EXAMPLES = replace(CLIENTS, unit="example")
BOTH = "some of these rounds protect clients and others examples, and no one epsilon is about both."
ABOUT_EXAMPLES = PrivacyBudget(delta=1e-5, unit="example")


def hold(ledger: Ledger, number: int, planned: RoundEvent) -> None:
    """One round of the ledger that releases what is planned."""
    ledger.open(number, planned)
    ledger.charge(planned.releases)
    ledger.close()


# Never one epsilon about both

def test_rounds_of_two_units_have_no_common_price():
    mixed = [(CLIENTS, 2), (EXAMPLES, 3)]
    for price in (lambda: guarantee(mixed, 1e-5), lambda: epsilon_at(mixed, 1e-5), lambda: delta_at(mixed, 1.0),
                  lambda: rounds_affordable([(CLIENTS, 1)], EXAMPLES, 9.0, 1e-5), lambda: group_privacy(mixed, 2, 1e-5),
                  lambda: epsilon_of_search([(CLIENTS, 1)], [(EXAMPLES, 1)], "composition", 3, 1e-5)):
        with pytest.raises(ValueError, match=BOTH):
            price()
    assert CLIENTS != EXAMPLES
    assert epsilon_at([(CLIENTS, 2), (EXAMPLES, 0)], 1e-5) == epsilon_at([(CLIENTS, 2)], 1e-5)      # held never: nothing to mix
    assert epsilon_at([(EXAMPLES, 5)], 1e-5) == epsilon_at([(CLIENTS, 5)], 1e-5)                    # arithmetic knows no unit


@pytest.mark.parametrize("wrong", ["user", "", None])
def test_an_unknown_unit_is_refused(wrong):
    for make in (lambda: RoundEvent((), NoSampling(), wrong), lambda: PrivacyBudget(unit=wrong)):
        with pytest.raises(ValueError, match=f"unit must be client or example, got {wrong!r}."):
            make()


@pytest.mark.parametrize("epsilon", [None, 50.0])
def test_a_ledger_refuses_rounds_of_the_other_unit(epsilon):
    for budget, other in ((PrivacyBudget(epsilon, 1e-5), EXAMPLES), (replace(ABOUT_EXAMPLES, epsilon=epsilon), CLIENTS)):
        ledger = Ledger(budget)
        with pytest.raises(ValueError, match=r"the privacy budget is about .*, and this round protects .*: no epsilon is about both"):
            ledger.open(0, other)
        assert (ledger.rounds, ledger.round_numbers, ledger.unit) == ((), frozenset(), budget.unit)
        hold(ledger, 0, replace(other, unit=budget.unit))
        ledger.budget = replace(budget, unit=other.unit)                                            # a budget does not change the past
        with pytest.raises(ValueError, match="the rounds on this ledger are about"):
            ledger.open(1, other)
        assert ledger.guarantee().unit == ledger.unit == budget.unit


def test_a_run_of_clients_is_refused_a_budget_about_examples_before_it_starts():
    method = fedtail.dp_fedavg(40, 0.1, 2.0, cohort_size=20, learning_rate=0.1)
    with pytest.raises(ValueError, match="the privacy budget is about single examples, and this round protects clients with all"):
        fedtail.train(method, fedtail.Task(SoftmaxRegression(5, 3)), small_population(40), rounds=1, privacy=ABOUT_EXAMPLES)


# On disk

def test_a_file_keeps_the_unit_and_old_files_are_about_clients(tmp_path):
    path = tmp_path / "ledger.jsonl"
    hold(Ledger(ABOUT_EXAMPLES, path), 0, EXAMPLES)
    assert json.loads(path.read_text().splitlines()[0]) == {"format": "fedtail ledger 2", "unit": "example"}
    again = Ledger(ABOUT_EXAMPLES, path)
    assert (dict(again.rounds), again.unit) == ({EXAMPLES: 1}, "example")
    hold(again, 1, EXAMPLES)
    assert dict(Ledger(path=path).rounds) == {EXAMPLES: 2}                                          # the file decides what it is
    with pytest.raises(ValueError, match="the rounds on this ledger are about single examples"):
        Ledger(PrivacyBudget(delta=1e-5), path).open(2, CLIENTS)
    assert Ledger(ABOUT_EXAMPLES, path).copy_of_first_bytes(path.stat().st_size).guarantee().unit == "example"
    old = tmp_path / "old.jsonl"
    old.write_text('{"format": "fedtail ledger 1"}\n{"open": 0, "sampling": {"kind": "PoissonSampling", "rate": 0.1, "revealed": 0.0}, '
                   '"channel": "", "randomness": "os"}\n{"release": {"kind": "GaussianRelease", "noise_multiplier": 1.5, "exchange": 2.0, '
                   '"what": "the updates"}}\n{"ask": [0]}\n{"before": {"what": "a model", "round": 0, "sources": ["os"], "rounds": [{"releases": '
                   '[{"kind": "GaussianRelease", "noise_multiplier": 1.5, "exchange": 2.0, "what": "the updates"}], "sampling": '
                   '{"kind": "PoissonSampling", "rate": 0.1, "revealed": 0.0}, "count": 3}]}}\n')
    read = Ledger(PrivacyBudget(delta=1e-5), old)
    assert (dict(read.rounds), read.earlier_histories[0].rounds) == ({CLIENTS: 1}, ((CLIENTS, 3),))


@pytest.mark.parametrize("head", ['{"format": "fedtail ledger 2", "unit": "user"}', '{"format": "fedtail ledger 2"}', '{"format": "fedtail ledger 3"}'])
def test_a_file_of_an_unknown_unit_is_refused(tmp_path, head):
    (tmp_path / "ledger.jsonl").write_text(head + "\n")
    with pytest.raises(LedgerError, match="is not a ledger of this version"):
        Ledger(path=tmp_path / "ledger.jsonl")


# Histories of two units are told apart

def test_a_start_from_a_model_of_the_other_unit_is_stated_beside_and_not_added(tmp_path):
    earlier = EarlierHistory("a model that was trained for 7 rounds", 0, ((EXAMPLES, 7),), ("os",))
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(PrivacyBudget(delta=1e-5, randomness="os"), path)
    ledger.record_earlier_history(earlier)
    hold(ledger, 0, CLIENTS)
    ledger = Ledger(ledger.budget, path)
    assert ledger.earlier_histories == (earlier,)
    assert dict(ledger.history("both", 1).rounds) == {CLIENTS: 1, EXAMPLES: 7}                      # joint histories keep it
    found = ledger.guarantee()
    assert (found.unit, found.epsilon) == ("client", epsilon_at([(CLIENTS, 1)], 1e-5))
    clients, examples = (f"{epsilon_at([pair], 1e-5):.4g}" for pair in ((CLIENTS, 1), (EXAMPLES, 7)))
    assert found.only.endswith(f"so that there is no one epsilon: the rounds of each unit alone have epsilon {clients} for a client and {examples} "
                               "for an example")
    assert any("whose rounds protect examples, which does not protect a client" in text for text in release_obstacles(ledger))
    same = Ledger(PrivacyBudget(delta=1e-5, randomness="os"))
    same.record_earlier_history(replace(earlier, rounds=((CLIENTS, 7),)))
    hold(same, 0, CLIENTS)
    assert same.guarantee().only.endswith(f"epsilon is {epsilon_at([(CLIENTS, 8)], 1e-5):.4g}")
    assert not any("protect examples" in text for text in release_obstacles(same))


def test_statements_name_the_unit():
    ledger = Ledger(ABOUT_EXAMPLES)
    hold(ledger, 0, EXAMPLES)
    told = privacy_statement(ledger, 1)
    assert (told["unit"], told["neighbours"]) == ("example", "add-or-remove-one-example")
    assert told["observer"] == "an observer of every release who does not know the batches"
    assert "(example-level, add-or-remove-one-example; Poisson sampling kept secret), against an observer of all releases who does not know the batches" in \
        told["statement"]
    assert "client" not in told["statement"]
    assert str(guarantee([(replace(EXAMPLES, sampling=NoSampling()), 1)], 1e-5, "replace-one")).endswith(
        "(example-level, replace-one-example; no sampling), against an observer of all releases")
    empty = privacy_statement(Ledger(ABOUT_EXAMPLES), 0)
    assert (empty["unit"], empty["private"]) == ("example", False)


def test_the_command_line_names_and_converts_the_unit():
    words = ["privacy", "--population", "5000", "--cohort", "50", "--rounds", "20", "--delta", "1e-5", "--noise", "2", "--sampling", "none",
             "--unit", "example", "--group", "4"]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["unit"] == "example"
    assert told["group"]["epsilon"] == pytest.approx(gaussian_epsilon(2 / math.sqrt(20) / 4, 1e-5), rel=1e-6)
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "140"}).stdout
    assert "so for a client with at most 4 examples" in shown
    assert "20 rounds, 5000 examples, every example in every round" in shown
    for wrong, text in (("--unit", "--unit must be client or example, got user."), ("--group", "--group is for 2 or more together, got 1.")):
        refused = CliRunner().invoke(app, [*words, wrong, "user" if wrong == "--unit" else "1"])
        assert (refused.exit_code, text in refused.stderr) == (2, True)


# Group privacy

def gaussian_epsilon(noise: float, delta: float) -> float:
    """Epsilon of one Gaussian sum, from the closed form of its delta (Balle and Wang 2018), by root finding."""
    def excess(epsilon: float) -> float:
        """Delta at `epsilon`, less the one that is wanted."""
        half = 0.5 / noise
        return norm.cdf(half - epsilon * noise) - math.exp(epsilon + norm.logcdf(-half - epsilon * noise)) - delta
    return brentq(excess, 0, 500, xtol=1e-10)


@pytest.mark.parametrize(("noise", "count", "size"), [(10.0, 1, 2), (20.0, 4, 7), (3.0, 2, 3)])
def test_without_sampling_a_group_costs_k_times_the_sensitivity(noise, count, size):
    event = RoundEvent((GaussianRelease(noise, exchange=1.4),), NoSampling(), "example")
    found = group_privacy([(event, count)], size, 1e-5)
    assert found.epsilon == pytest.approx(gaussian_epsilon(noise / size / math.sqrt(count), 1e-5), rel=1e-6)
    assert (found.unit, found.size, found.by) == ("example", size, "k-fold sensitivity, without amplification")
    exchanged = group_privacy([(event, count)], size, 1e-5, "replace-one")
    assert exchanged.epsilon == pytest.approx(gaussian_epsilon(noise / 1.4 / size / math.sqrt(count), 1e-5), rel=1e-6)
    assert f"for any {size} examples together, so for a client with at most {size} examples" in str(found)


@pytest.mark.parametrize(("noise", "rate", "size"), [(2.0, 0.05, 3), (1.0, 0.2, 2), (4.0, 0.01, 10)])
def test_a_sampled_group_is_the_mixture_over_how_many_of_it_are_sampled(noise, rate, size):
    places, delta = np.linspace(-14 * noise, size + 14 * noise, 400_001), 1e-4
    shares = binom.pmf(np.arange(size + 1), size, rate)
    alone = norm.pdf(places, 0, noise)
    mixed = sum(share * norm.pdf(places, shift, noise) for shift, share in enumerate(shares))       # 0, 1, ... of the group take part

    def excess(epsilon: float) -> float:
        """The larger of both directions of the hockey-stick divergence, by the trapezoidal rule, less delta."""
        factor = math.exp(epsilon)
        return max(np.trapezoid(np.maximum(mixed - factor * alone, 0), places), np.trapezoid(np.maximum(alone - factor * mixed, 0), places)) - delta

    expected = brentq(excess, 1e-3, 20, xtol=1e-8)
    found = group_privacy([(RoundEvent((GaussianRelease(noise),), PoissonSampling(rate), "example"), 1)], size, delta)
    assert found.by == "k-fold sensitivity, each member sampled on its own"
    assert found.epsilon == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert found.epsilon >= expected - 1e-4                                                         # rounded upwards


def test_the_generic_bound_holds_where_no_better_one_is_known():
    rounds, size, delta = [(RoundEvent((GaussianRelease(20.0),), FixedSampling(10, 1000), "example"), 100)], 4, 1e-5
    found = group_privacy(rounds, size, delta, "replace-one")
    grid = np.linspace(1e-3, 0.2, 400)
    fits = [one for one in grid if delta_at(rounds, one, "replace-one") * sum(math.exp(i * one) for i in range(size)) <= delta]
    assert found.by == "the generic bound, from epsilon and delta of one"
    assert size * (fits[0] - (grid[1] - grid[0])) <= found.epsilon <= size * fits[0]


def test_integer_noise_and_releases_without_noise_in_groups():
    lattice = LatticeRelease(8.0, variance_as_fraction(80.0**2 / 20), 20, 4, constant=True)
    found = group_privacy([(RoundEvent((lattice,), NoSampling()), 3)], 5, 1e-5)
    assert found.epsilon == epsilon_at([(RoundEvent((replace(lattice, sensitivity=40.0),), NoSampling()), 3)], 1e-5)
    assert found.epsilon == pytest.approx(gaussian_epsilon(2 / math.sqrt(3), 1e-5), rel=0.1)        # zCDP is a little looser
    assert "for any 5 clients together (" in str(found)
    sampled = group_privacy([(RoundEvent((lattice,), PoissonSampling(0.01)), 3)], 5, 1e-5)
    assert sampled.epsilon <= found.epsilon
    bare = RoundEvent((NonPrivateRelease("the losses"),), NoSampling())
    assert group_privacy([(bare, 1)], 3, 1e-5).epsilon == math.inf
    assert group_privacy([], 3, 1e-5).epsilon == 0
    assert group_privacy([(CLIENTS, 9)], 1, 1e-5).epsilon == epsilon_at([(CLIENTS, 9)], 1e-5)
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match="size must be a whole number of units"):
            group_privacy([(CLIENTS, 1)], wrong, 1e-5)


def test_an_evaluation_whose_noise_is_for_clients_is_refused_beside_local_training_whose_noise_is_for_examples():
    method = replace(fedtail.fedavg(5, learning_rate=0.1), local=fedtail.ExamplePrivateSGD(1.0, 1.0))
    private = fedtail.FederatedEvaluation(noise=fedtail.GaussianNoise(2.0))
    with pytest.raises(ValueError, match=r"^the method hides single examples, and the noise of its evaluation hides clients: no one epsilon is about both\. "):
        private.round_with_evaluation(method)
    assert fedtail.FederatedEvaluation().round_with_evaluation(method).unit == "example"
    assert private.round_with_evaluation(replace(method, local=fedtail.LocalSGD())).unit == "client"
