"""Integer noise tells nothing about who came: as many shares for every cohort, exact integers, and no claim where neither holds.

The attacks of tests/attacks are run here as they are, and once more with the defect put back in, which they have to notice.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedtail
from fedtail import DiscreteNoise, GaussianNoise, IntegerChannel, PlainChannel, PrivacyBudget, SecureChannel, train
from fedtail.algorithm import RoundLostWarning, planned_round
from fedtail.answering import answer
from fedtail.channel import FixedPoint, base
from fedtail.channel.plain import Plain
from fedtail.clients import Clients
from fedtail.deployment.node import PARTS
from fedtail.engine import LocalFleet
from fedtail.fleet import SimulatedPopulation
from fedtail.privacy import Ledger, NoisySum, SeededRandomness, guarantee, reveal_probability
from fedtail.privacy.composed_mechanism import UNBOUNDED, UNRECORDED, VARYING
from fedtail.privacy.events import GaussianRelease, LatticeRelease, NoSampling, PoissonSampling, RoundEvent, with_constant_noise
from fedtail.questions import Statistic, StatisticPart
from fedtail.sampling import Cohort
from fedtail.secure.encoding import Refused
from fedtail.wire import pack, types_by_name, unpack

from remote_cases import PEOPLE, TASK, Sites

sys.path.append(str(Path(__file__).parent / "attacks"))
import attack_curious_node
import attack_integer_noise_under_sampling as sampled
import attack_node_alone
import attack_rounded_after_noise

MECHANISM = NoisySum(1.0, DiscreteNoise(1.0, planned_clients=5, colluders=2))
QUESTION = Statistic(StatisticPart(), torch.zeros(0), mechanism=MECHANISM)


def cohort_of(keys: list[int]) -> Cohort:
    return Cohort(torch.arange(len(keys)), torch.tensor(keys), torch.ones(len(keys), dtype=torch.float64), 1.0)


# As many shares for every cohort

@pytest.mark.parametrize("count", [7, 8, 30])
def test_as_many_clients_add_a_share_as_the_noise_relies_on(count):
    keys = torch.randperm(1000, generator=torch.Generator().manual_seed(count))[:count]
    asked = base.with_fixed_noise_shares(QUESTION, cohort_of(keys.tolist()), MECHANISM.release(3, "a sum"))
    assert int((keys <= asked.last_share).sum()) == 7
    unknown = replace(MECHANISM.release(3, "a sum"), constant=None)      # a release that does not say it can be made so
    assert base.with_fixed_noise_shares(QUESTION, cohort_of(keys.tolist()), unknown).last_share is None


def test_clients_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="two clients of the cohort have the same key, and would draw the same noise"):
        base.with_fixed_noise_shares(QUESTION, cohort_of([1, 2, 3, 4, 5, 6, 7, 7]), MECHANISM.release(3, "a sum"))


def test_a_share_is_drawn_from_the_client_it_falls_to_and_from_nobody_else():
    rows, adding = torch.rand(6, 4, dtype=torch.float64), torch.tensor([True, False, True, True, False, False])
    noise = DiscreteNoise(1.0, planned_clients=3)
    bare = noise.on_client(rows, 1.0, False, SeededRandomness(0), torch.zeros(6, dtype=torch.bool))
    some = noise.on_client(rows, 1.0, False, SeededRandomness(0), adding) - bare
    few = noise.on_client(rows[adding], 1.0, False, SeededRandomness(0)) - bare[adding]
    assert torch.equal(some[adding], few)
    assert (few != 0).any(1).all()
    assert not some[~adding].any()


def test_rows_that_are_too_long_are_zeroed_before_their_noise():
    """What clips a row before may be somebody else's code: the integers themselves are looked at once more."""
    nobody, noise = torch.zeros(4, dtype=torch.bool), DiscreteNoise(1.0, planned_clients=3, scale=64.0)
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.61, 0.81], [0.6, -0.83]], dtype=torch.float64)
    sent = noise.on_client(rows, 1.0, False, SeededRandomness(0), nobody)
    limit = 64.0 + math.sqrt(2) / 2
    assert sent.norm(dim=1).tolist() == [0.0, pytest.approx(64, abs=1), 0.0, 0.0]
    assert (rows * 64).round().norm(dim=1)[2] > limit
    whole = DiscreteNoise(1.0, planned_clients=3, scale=4.0).on_client(torch.tensor([[3.0, 4.0], [3.0, 5.0]]), 5.0, True, SeededRandomness(0), nobody[:2])
    assert whole.tolist() == [[12, 16], [0, 0]]


def test_what_shares_lack_of_a_discrete_gaussian_is_in_the_price():
    """psi of a thousand shares of variance two, over twenty million coordinates, is a hundredth of the price: 10 e^(-2 pi^2 v k/(k+1))."""
    release = LatticeRelease(300.0, Fraction(2), 1000, 20_000_000, constant=True)
    psi = 10 * sum(math.exp(-4 * math.pi**2 * k / (k + 1)) for k in range(1, 1000))
    exact = math.sqrt(300.0**2 / 2000 + psi * 20_000_000 / 2)
    assert exact > 1.001 * 300 / math.sqrt(2000)
    assert release.multiplier("zero-out") == pytest.approx(1 / min(exact, 300 / math.sqrt(2000) + psi * math.sqrt(2e7)), rel=1e-12)
    event = RoundEvent((release,), NoSampling())
    bare = RoundEvent((GaussianRelease(math.sqrt(2000) / 300),), NoSampling())
    assert guarantee([(event, 1)], 1e-5, accountant="rdp").epsilon > guarantee([(bare, 1)], 1e-5, accountant="rdp").epsilon


def test_the_number_of_shares_of_a_real_run_says_nothing_about_its_cohorts(monkeypatch):
    """Five standard deviations of five sums: wrong once in 300,000 seeds."""
    deviation = 40 * math.sqrt(2 / 10_000)
    sizes, read = sampled.shares_read()
    assert len(set(sizes)) == 5
    assert abs(read - 40).max() < 5 * deviation
    monkeypatch.setattr(base, "with_fixed_noise_shares", lambda question, cohort, release: question)
    sizes, read = sampled.shares_read()
    assert abs(read - sizes).max() < 5 * deviation * 67 / 40
    assert abs(read - 40).min() > 5 * deviation


def test_an_audit_of_integer_noise_under_sampling_stays_below_the_claim_and_catches_shares_that_tell_the_cohort(monkeypatch):
    """Others pull the other way, or not at all. Bounds at 99%: a sound release is accused once in a hundred seeds."""
    claim = sampled.claimed()
    caches = (sampled.shares_of, sampled.kinds)
    exact = guarantee([(RoundEvent((GaussianRelease(sampled.MULTIPLIER),), PoissonSampling(sampled.RATE)), sampled.ROUNDS)], sampled.DELTA).epsilon
    for cache in caches:
        cache.cache_clear()
    assert sampled.proven(-1.0, 4000) < claim.epsilon
    found = sampled.proven(0.0, 40_000)
    assert exact / 1.5 < found < exact < claim.epsilon      # what Rényi divergences at whole orders add at so large a delta is the rest
    monkeypatch.setattr(base, "with_fixed_noise_shares", lambda question, cohort, release: question)
    for cache in caches:
        cache.cache_clear()
    assert sampled.proven(-1.0, 10_000) > 1.1 * claim.epsilon
    for cache in caches:
        cache.cache_clear()


# What is not covered is not claimed

def noisy(noise, rate=0.5):
    return fedtail.FederatedAlgorithm(fedtail.Poisson(rate), fedtail.LocalSGD(learning_rate=0.1), fedtail.Mean(),
                                      fedtail.PrivateMean(1.0, noise, total=30.0 * rate), fedtail.SGD(1.0))


HERE = SimulatedPopulation(PEOPLE)
UNHEARD_OF = SimpleNamespace(population=PEOPLE)
SECURE = SecureChannel(5, minimum_contributors=2)


@pytest.mark.parametrize(("noise", "fleet", "channel", "note"), [
    (DiscreteNoise(1.0, 5), HERE, IntegerChannel(), None),
    (DiscreteNoise(1.0, 5), HERE, SECURE, None),
    (GaussianNoise(1.0), HERE, PlainChannel(), None),
    (DiscreteNoise(1.0, 5), HERE, replace(SECURE, dropout=0.1), VARYING),
    (DiscreteNoise(1.0, 5), Sites().fleet(), SECURE, VARYING),
    (DiscreteNoise(1.0, 5), Sites().fleet(), IntegerChannel(), VARYING),
    (GaussianNoise(1.0), Sites().fleet(), PlainChannel(), UNBOUNDED),
    (DiscreteNoise(1.0, 5), UNHEARD_OF, IntegerChannel(), VARYING),
    (GaussianNoise(1.0), UNHEARD_OF, PlainChannel(), UNBOUNDED),
])
def test_amplification_is_claimed_where_every_client_answers_and_nowhere_else(noise, fleet, channel, note):
    planned = planned_round(noisy(noise), fleet, channel, 18)
    found = guarantee([(planned, 10)], 1e-3)
    assert (found.epsilon < found.without_amplification) == (note is None)
    assert (found.epsilon == found.without_amplification) == (note is not None)
    assert found.notes == (() if note is None else (note,))
    assert planned.sampling.revealed == (1.0 if note else reveal_probability(0.5, 30, max(channel.minimum, noise.minimum)))


@pytest.mark.parametrize(("fleet", "channel", "constant"), [
    (lambda: LocalFleet(PEOPLE, TASK, workers=1), IntegerChannel(), True),
    (lambda: LocalFleet(PEOPLE, TASK, workers=1), replace(SECURE, masks="none", dropout=0.05), False),
    (lambda: Sites().fleet(), SECURE, False),
])
def test_what_is_planned_is_what_a_run_is_charged(fleet, channel, constant):
    method, there = noisy(DiscreteNoise(1.0, 5)), fleet()
    result = train(method, TASK, fleet=there, rounds=2, channel=channel, privacy=PrivacyBudget(delta=1e-3))
    assert dict(result.ledger.rounds) == {planned_round(method, there, channel, len(TASK.params())): 2}
    assert [release.constant for event, _ in result.ledger.rounds for release in event.releases] == [constant]


def test_ledgers_from_before_are_priced_without_amplification_and_say_so(tmp_path):
    release = MECHANISM.release(18, "the updates, by PrivateMean")
    for name, one in (("new", with_constant_noise(release)), ("old", replace(release, constant=None))):
        ledger = Ledger(PrivacyBudget(delta=1e-3), tmp_path / name)
        for number in range(3):
            ledger.open(number, RoundEvent((one,), PoissonSampling(0.1, 1e-9)))
            ledger.charge([one])
            ledger.close()
    lines = [json.loads(line) for line in (tmp_path / "old").read_text().splitlines()]
    for line in lines:
        line.get("release", {}).pop("constant", None)                # as it was written
    (tmp_path / "old").write_text("".join(json.dumps(line) + "\n" for line in lines))
    new, old = (Ledger(PrivacyBudget(delta=1e-3), tmp_path / name).guarantee() for name in ("new", "old"))
    assert new.notes == ()
    assert old.notes == (UNRECORDED,)
    assert new.epsilon < old.epsilon == old.without_amplification == pytest.approx(new.without_amplification)
    assert "no amplification by sampling" in str(old)


# A node decides what it adds

def test_which_clients_add_a_share_is_never_sent_and_cannot_be_told_to_a_node():
    types = types_by_name(PARTS)
    question = Statistic(fedtail.NoisyHistogram(4.0, 30.0, DiscreteNoise(1.0, 5)), torch.zeros(0), mechanism=MECHANISM, last_share=3)
    sent = pack(question)
    assert b"last_share" not in sent
    assert unpack(sent, types).last_share is None
    honest = pack(replace(question, last_share=None))
    forged = honest.replace(b"\xa9objective\xc0", b"\xaalast_share\x00")
    assert forged != honest
    with pytest.raises(ValueError, match="a message sets last_share of a Statistic, which only this process may say"):
        unpack(forged, types)
    with pytest.raises(Refused, match="a message sets last_share"):
        Sites().sites[0]._make()._unpack_message(forged)


# Exact integers

@dataclass(frozen=True)
class Ones(StatisticPart):
    def statistic(self, clients, trial):
        return torch.ones(len(clients.mass), 2, dtype=torch.float64) / 2


@pytest.mark.parametrize("bits", range(12, 30))
def test_noise_is_refused_where_it_would_be_rounded_again_and_exact_elsewhere(bits):
    """The encoding is refused exactly where a row of whole numbers does not come out of it as it went in."""
    code, bound = FixedPoint(3, 1.0, bits), 1000.0
    rows = torch.tensor([[999.0, -1000.0], [1.0, 0.0], [-3.0, 1000.0]], dtype=torch.float64)
    back = code.decode(code.sum(code.encode(rows, torch.tensor([bound]))), torch.tensor([bound]))
    assert (code.missing_bits(bound) == 0) == bool((code.scale(torch.tensor([bound])) >= 1).all())
    if code.missing_bits(bound) == 0:
        assert torch.equal(back, rows.sum(0))
    assert FixedPoint(3, 1.0, bits + code.missing_bits(bound)).missing_bits(bound) == 0
    assert (Plain(8, 1.0).missing_bits(2.0**50), Plain(8, 1.0).missing_bits(2.0**50 + 1), Plain(1, 1.0).missing_bits(1.0)) == (0, 1, 0)


def test_too_few_bits_for_the_largest_cohort_are_refused_before_anything_is_charged():
    """By the largest cohort there can be: what is refused must not depend on the one that was drawn."""
    method = noisy(DiscreteNoise(1.0, 5, scale=2.0**14), rate=0.3)
    bound, ledger = method.mechanism.bound(18), Ledger()
    enough = next(bits for bits in range(12, 62) if FixedPoint(len(PEOPLE), 1.0, bits).missing_bits(bound) == 0)
    with pytest.raises(ValueError, match=r"PrivateMean would be rounded once more after its noise, .* from up to 30 clients take 1 more bits\. Raise modulus_bits"):
        train(method, TASK, PEOPLE, rounds=1, seed=1, channel=IntegerChannel(enough - 1), privacy=ledger)
    assert ledger.rounds == ()
    train(method, TASK, PEOPLE, rounds=1, seed=1, channel=IntegerChannel(enough), privacy=ledger)
    with LocalFleet(PEOPLE, TASK, workers=1) as fleet:              # and by every client for itself, whatever the server says
        fleet.open_round(fedtail.Everyone()(PEOPLE, 0, 0), fedtail.fleet.Broadcast(0, 0, TASK.params()[None], 0))
        question = Statistic(Ones(), torch.zeros(0), mechanism=method.mechanism)
        with pytest.raises(ValueError, match="Ones would be rounded once more after its noise"):
            answer(question, Clients(fleet._shard, torch.arange(30)), FixedPoint(30, 1.0, enough - 1))


# A node that knows its own clients' shares

def test_a_cohort_mostly_at_one_node_is_lost_before_it_is_asked():
    sites = Sites(nodes=3)
    method = noisy(DiscreteNoise(1.0, 9))
    with pytest.warns(RoundLostWarning, match=r"clients were sampled beside those of the node that holds most, \d, which knows their shares, and the noise of PrivateMean relies on 9"):
        result = train(method, TASK, fleet=sites.fleet(), rounds=6, channel=IntegerChannel(), privacy=PrivacyBudget(delta=1e-3))
    assert 0 < sum(count for _, count in result.ledger.rounds) < 6


@pytest.mark.parametrize("attack", [attack_rounded_after_noise, attack_node_alone, attack_curious_node], ids=lambda module: module.__name__)
def test_attacks(attack):
    found = attack.attack()
    assert found.held, found.measured


def test_the_attacks_notice_their_defects(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(base, "refuse_rounding_after_noise", lambda *_: None)
        patched.setattr("fedtail.answering.refuse_rounding_after_noise", lambda *_: None)
        assert not attack_rounded_after_noise.attack().held
    with monkeypatch.context() as patched:
        patched.setattr(attack_node_alone, "planned_round", lambda method, fleet, channel, dim: planned_round(
            method, SimulatedPopulation(fleet.population), channel, dim))
        assert not attack_node_alone.attack().held
    with monkeypatch.context() as patched:
        patched.setattr(fedtail.composition, "RULES", tuple(rule for rule in fedtail.composition.RULES if "node" not in rule.__name__))
        patched.setattr("fedtail.deployment.remote.clients_add_noise", lambda mechanism: False)
        patched.setattr(base, "clients_add_noise", lambda mechanism: False)
        assert not attack_curious_node.attack().held
