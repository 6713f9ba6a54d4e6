"""The ledger: written before anything is asked, never forgetful, never late."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from fractions import Fraction

import pytest

import fedtail
from fedtail import Ledger, PrivacyBudget
from fedtail.engine import LocalFleet
from fedtail.models import SoftmaxRegression
from fedtail.privacy import BudgetSpent
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.events import (
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    RoundEvent,
)
from fedtail.privacy.ledger_file import LedgerError
from fedtail.privacy.statement import FLOATING, REAL, SEARCHED, SIMULATED, guarantee_status, privacy_statement, release_obstacles

from cases import small_population

UPDATE = GaussianRelease(1.5, 2.0, "the updates")
COUNTS = LatticeRelease(7.0, Fraction(7, 2), 30, 32, 1.4, 1e-30, "the histogram", constant=True)
BARE = NonPrivateRelease("the losses")
POISSON = PoissonSampling(0.1)
ROUND = RoundEvent((COUNTS, UPDATE), POISSON)
ABOUT = {"unit": "client", "adjacency": "zero-out", "neighbours": "add-or-remove-one-client",
         "observer": "an observer of every release who does not know the cohorts"}


def a_round(ledger: Ledger, number: int, *asked, planned=ROUND) -> None:
    ledger.open(number, planned)
    for releases in asked:
        ledger.charge(releases)
    ledger.close()


def test_equal_rounds_are_counted_and_what_was_not_asked_is_not_charged():
    ledger = Ledger()
    for number in range(3):
        a_round(ledger, number, [COUNTS], [UPDATE])
    a_round(ledger, 3, [COUNTS])
    a_round(ledger, 4)
    assert dict(ledger.rounds) == {ROUND: 3, RoundEvent((COUNTS,), POISSON): 1}
    ledger.open(5, ROUND)
    ledger.charge([COUNTS])
    assert dict(ledger.rounds)[RoundEvent((COUNTS,), POISSON)] == 2                # the round under way counts
    assert ledger.non_private_releases == ()


def test_a_file_gives_the_same_ledger_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path=path)
    a_round(first, 0, [COUNTS], [UPDATE])
    a_round(first, 1, [BARE], [UPDATE], planned=RoundEvent((BARE, UPDATE), FixedSampling(3, 10)))
    a_round(first, 1, [UPDATE, UPDATE], planned=RoundEvent((UPDATE, UPDATE), NoSampling()))
    first.open(2, ROUND)
    first.charge([COUNTS])                                                          # and then the machine dies
    again = Ledger(path=path)
    assert dict(again.rounds) == dict(first.rounds)
    assert again.non_private_releases == ("the losses",)
    a_round(again, 2, [COUNTS], [UPDATE])                                           # repeated: charged again
    assert sum(count for _, count in Ledger(path=path).rounds) == 5


def test_private_releases_are_on_disk_before_they_are_asked_for(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path=path)
    ledger.open(0, ROUND)
    assert synced == []                                                             # a round that asks nothing costs nothing
    for releases in ([COUNTS], [UPDATE], [UPDATE]):
        ledger.charge(releases)
        assert synced[-1] == path.stat().st_size
    before = len(synced)
    ledger.charge([BARE])
    assert len(synced) == before + 1                                                # the first of its kind
    ledger.charge([BARE])
    assert len(synced) == before + 1                                                # infinite already


def test_a_line_cut_short_was_never_asked_and_a_damaged_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    a_round(Ledger(path=path), 0, [UPDATE])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"ask": [0')
    cut = Ledger(path=path)
    assert dict(cut.rounds) == {RoundEvent((UPDATE,), POISSON): 1}
    assert path.read_bytes() == whole + b'{"ask": [0'                               # reading changes nothing
    a_round(cut, 1, [UPDATE])
    assert path.read_bytes().startswith(whole + b'{"open": 1')                      # writing takes its place
    assert dict(Ledger(path=path).rounds) == {RoundEvent((UPDATE,), POISSON): 2}
    for damaged in (whole.replace(b'"ask": [0]', b'"ask": [7]'), whole.replace(b"GaussianRelease", b"Nothing"), b"\x00" + whole, whole[5:]):
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"is damaged|is not a ledger of this version"):
            Ledger(path=path)


def test_a_budget_is_never_exceeded_and_nearly_used_up():
    budget = PrivacyBudget(epsilon=3.0, delta=1e-5)
    event = RoundEvent((UPDATE,), POISSON)
    ledger = Ledger(budget)
    done = ledger.affordable_rounds(event)
    assert done > 10
    for number in range(done):
        a_round(ledger, number, [UPDATE], planned=event)
    with pytest.raises(BudgetSpent, match=rf"round {done} would exceed epsilon = 3 at delta = 1e-05"):
        ledger.open(done, event)
    assert epsilon_at([(event, done)], 1e-5) <= 3.0 < epsilon_at([(event, done + 1)], 1e-5)
    assert ledger.guarantee().epsilon <= 3.0


def test_what_was_charged_beyond_the_plan_leaves_fewer_rounds():
    """A question that had to be repeated is charged once more, in early rounds, when the budget still holds many."""
    ledger, planned = Ledger(PrivacyBudget(epsilon=12.0, delta=1e-5)), RoundEvent((UPDATE,), NoSampling())
    with contextlib.suppress(BudgetSpent):
        for number in range(1000):
            a_round(ledger, number, [UPDATE], *([[UPDATE]] if number < 2 else []), planned=planned)
    assert 3 < number < 999
    assert ledger.guarantee().epsilon <= 12.0


def test_under_a_budget_nothing_crosses_that_was_not_planned_and_does_not_fit():
    ledger = Ledger(PrivacyBudget(epsilon=1.0, delta=1e-5))
    ledger.open(0, RoundEvent((UPDATE,), POISSON))
    with pytest.raises(ValueError, match="the losses would be released without noise, which no epsilon covers"):
        ledger.charge([BARE])
    ledger.charge([UPDATE])
    with pytest.raises(BudgetSpent, match="the updates was not planned, and would exceed epsilon = 1"):
        ledger.charge([UPDATE] * 100)
    assert ledger.guarantee().epsilon <= 1.0
    with pytest.raises(RuntimeError, match="released outside a round"):
        Ledger().charge([UPDATE])


def test_a_copy_goes_on_from_the_same_history_and_leaves_it_alone():
    ledger = Ledger(PrivacyBudget(delta=1e-5))
    a_round(ledger, 0, [UPDATE])
    twin = ledger.copy()
    a_round(twin, 1, [UPDATE])
    assert (dict(ledger.rounds)[RoundEvent((UPDATE,), POISSON)], dict(twin.rounds)[RoundEvent((UPDATE,), POISSON)]) == (1, 2)
    assert twin.budget == ledger.budget


def test_what_the_server_sees_is_kept_once_each_in_order(tmp_path):
    ledger = Ledger(path=tmp_path / "ledger.jsonl")
    for number, channel in enumerate(["in the clear", "", "masked", "in the clear"]):
        ledger.open(number, ROUND, channel)
        ledger.charge([UPDATE])
    assert ledger.channels == ("in the clear", "masked")
    assert (Ledger(path=tmp_path / "ledger.jsonl").channels, ledger.copy().channels, Ledger().channels) == (ledger.channels, ledger.channels, ())
    assert sum(count for _, count in ledger.copy().rounds) == 4


def test_a_budget_holds_for_rounds_of_several_kinds():
    """After each round one less of its kind fits, and what does not fit is refused."""
    kinds = [RoundEvent((UPDATE,), POISSON), RoundEvent((COUNTS,), POISSON)]
    ledger, number = Ledger(PrivacyBudget(epsilon=2.0, delta=1e-5)), 0
    for kind in [kinds[0], kinds[0], kinds[1], kinds[0]]:
        left = ledger.affordable_rounds(kind)
        a_round(ledger, number, kind.releases, planned=kind)
        assert ledger.affordable_rounds(kind) == left - 1
        number += 1
    a_round(ledger, number, planned=kinds[0])                                       # asked nothing, and is not charged
    assert sum(count for _, count in ledger.rounds) == 4
    many = RoundEvent((UPDATE,) * 40, POISSON)
    with pytest.raises(BudgetSpent, match=r"round 9 would exceed epsilon = 2 at delta = 1e-05"):
        ledger.open(9, many)
    assert ledger.affordable_rounds(many) == 0
    assert epsilon_at([*ledger.rounds, (many, 1)], 1e-5) > 2.0


def test_more_than_was_planned_may_be_asked_where_it_fits():
    ledger = Ledger(PrivacyBudget(epsilon=5.0, delta=1e-5))
    ledger.open(0, RoundEvent((UPDATE,), POISSON))
    ledger.charge([UPDATE])
    ledger.charge([UPDATE])
    assert dict(ledger.rounds) == {RoundEvent((UPDATE, UPDATE), POISSON): 1}


def test_questions_that_need_a_budget_or_a_delta_say_so():
    for budget in (PrivacyBudget(), PrivacyBudget(delta=1e-5)):
        with pytest.raises(ValueError, match=r"^there is no privacy budget\. Give the run PrivacyBudget\(epsilon=\.\.\., delta=\.\.\.\)\.$"):
            Ledger(budget).affordable_rounds(ROUND)
    with pytest.raises(ValueError, match="at which delta"):
        Ledger().guarantee()
    ledger = Ledger(PrivacyBudget(delta=1e-3, adjacency="replace-one"))
    a_round(ledger, 0, [UPDATE])
    assert (ledger.guarantee().delta, ledger.guarantee(1e-7).delta, ledger.guarantee().adjacency) == (1e-3, 1e-7, "replace-one")
    assert (PrivacyBudget().replayable, PrivacyBudget(randomness="os").replayable) == (True, False)
    assert PrivacyBudget(epsilon=1e-9, delta=0.999).adjacency == "zero-out"


def test_what_a_ledger_says_of_itself():
    bare, empty, private, real = Ledger(), Ledger(), Ledger(PrivacyBudget(delta=1e-5)), Ledger(PrivacyBudget(delta=1e-5, randomness="os"))
    bare.open(0, RoundEvent((BARE, UPDATE), POISSON), "in the clear")
    bare.charge([BARE, UPDATE])
    assert privacy_statement(bare, 1) == {"private": False, "epsilon": "infinity", "rounds": 1, "channel": "in the clear",
                                  "why": "released without a mechanism: the losses", **ABOUT}
    assert privacy_statement(empty, 0) == {"private": False, "epsilon": 0.0, "rounds": 0, "why": "nothing was released yet", "channel": "", **ABOUT}
    for number in range(3):
        a_round(private, number, [COUNTS], [UPDATE])
        a_round(real, number, [COUNTS, COUNTS])
    said, found = privacy_statement(private, 5), private.guarantee()
    assert (said["private"], said["rounds"], said["epsilon"], said["delta"]) == (True, 5, found.epsilon, 1e-5)
    assert said["releases"] == [{"what": "the histogram", "times": 3}, {"what": "the updates", "times": 3}]
    assert said["second_opinion"] is None
    assert privacy_statement(real, 3)["releases"] == [{"what": "the histogram", "times": 6}]
    assert privacy_statement(real, 3, 1e-4)["delta"] == 1e-4
    assert (release_obstacles(private), release_obstacles(real)) == ([SIMULATED, FLOATING], [])
    assert (guarantee_status(real), said["guarantee"]) == ([REAL], f"{SIMULATED}; {FLOATING}")
    assert release_obstacles(bare) == ["epsilon is infinite: released without a mechanism: the losses", SIMULATED, FLOATING]
    assert said["notes"] == [SEARCHED]
    assert said["statement"] == str(found) == f"epsilon {found.epsilon:.4g} at delta 1e-05 (client-level, " \
        "add-or-remove-one-client; Poisson sampling kept secret), against an observer of all releases who does not know the cohorts; without " \
        f"amplification, against a server that knows the cohorts, {found.without_amplification:.4g}"
    assert said.items() >= ABOUT.items()
    sampled = Ledger(PrivacyBudget(delta=1e-5))
    a_round(sampled, 0, [UPDATE], planned=RoundEvent((UPDATE,), PoissonSampling(0.1, 0.01)))
    said = privacy_statement(sampled, 1)
    assert said["accountant"] == "rdp"
    assert said["second_opinion"] == ["pld", "infinity"]                            # a hundredth of the rounds is more than delta


@pytest.mark.parametrize(("given", "text"), [
    ({"epsilon": 0.0, "delta": 0.1}, "epsilon must be positive, got 0. Between 1 and 10 is usual."),
    ({"delta": 0.0}, "delta must be in (0, 1), got 0. It should be below one over the number of clients."),
    ({"delta": 1.0}, "delta must be in (0, 1), got 1. It should be below one over the number of clients."),
    ({"epsilon": 1.0}, "epsilon=1 means nothing without delta. Write delta below one over the number of clients."),
    ({"adjacency": "add-remove"}, "adjacency must be zero-out or replace-one, got 'add-remove'."),
    ({"randomness": "dice"}, "randomness must be seed or os, got 'dice'."),
])
def test_terms_that_mean_nothing_are_refused(given, text):
    with pytest.raises(ValueError) as refused:
        PrivacyBudget(**given)
    assert str(refused.value) == text


class Witness:
    """A fleet that looks at the ledger's file whenever it is asked something, and fails when told to."""

    def __init__(self, fleet, path, fails_at=None):
        self.fleet, self.path, self.fails_at, self.asked = fleet, path, fails_at, []

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def collect(self, questions, encoding):
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        self.asked.append((len(questions), len(lines[-1]["ask"])))
        if len(self.asked) == self.fails_at:
            raise OSError("the network is gone")
        return self.fleet.collect(questions, encoding)


def test_every_question_of_a_run_is_on_the_ledger_when_it_is_asked_and_stays_there_when_it_fails(tmp_path):
    population = small_population(40)
    task = fedtail.Task(SoftmaxRegression(5, 3))
    private = fedtail.dp_delta_fl(0.5, 40, 0.1, 1.0, 2.0, 3.0, cohort_size=20, learning_rate=0.1)
    for name, algorithm, fails_at in (("private", private, 6), ("bare", fedtail.delta_fl(0.5, 20, learning_rate=0.1), 13)):
        path = tmp_path / name
        with LocalFleet(population, task) as inner:
            fleet = Witness(inner, path, fails_at)
            with pytest.raises(OSError, match="the network is gone"):
                fedtail.train(algorithm, task, population, rounds=10, fleet=fleet, privacy=Ledger(PrivacyBudget(delta=1e-3), path))
        assert len(fleet.asked) == fails_at
        assert all(told == charged for told, charged in fleet.asked)
        recorded = sum(count * len(event.releases) for event, count in Ledger(path=path).rounds)
        assert recorded == fails_at


def test_a_run_that_lets_something_cross_without_noise_names_it():
    population = small_population(40)
    task = fedtail.Task(SoftmaxRegression(5, 3))
    found = fedtail.train(fedtail.delta_fl(0.5, 20, learning_rate=0.1), task, population, rounds=2).ledger.guarantee(1e-3)
    assert found.epsilon == float("inf")
    assert found.non_private == ("what Digit asks about the losses", "the updates, by WeightedMean")
    mixed = fedtail.dp_fedavg(40, 0.1, 1.0, cohort_size=20, learning_rate=0.1)
    mixed = fedtail.FederatedAlgorithm(mixed.sample, mixed.local, fedtail.Superquantile(0.5), replace(mixed.aggregate, total=10.0), mixed.server)
    found = fedtail.train(mixed, task, population, rounds=2).ledger.guarantee(1e-3)
    assert (found.epsilon, found.non_private) == (float("inf"), ("what Digit asks about the losses",))
