"""Faults behind `exchange`: nodes that vanish, come late, or answer rubbish are out of that question, and nothing else changes."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtail
from fedtail import IntegerChannel, PlainChannel, SecureChannel, train
from fedtail.algorithm import RoundLostWarning
from fedtail.deployment.node import PARTS, Node
from fedtail.deployment.node_messages import Reply, encode_message, message_digest, read_message, read_reply
from fedtail.secure.encoding import Refused
from fedtail.wire import pack, types_by_name, unpack

from remote_cases import LOCAL, ONE_QUESTION, PEOPLE, TASK, Sites, params_of

CHANNEL = SecureChannel(8, minimum_contributors=3)
EVERYBODY = {"sample": fedtail.Everyone()}
FEDAVG = fedtail.fedavg(30, **LOCAL)
DELTA = fedtail.delta_fl(0.5, 30, **ONE_QUESTION, **LOCAL)
TYPES = types_by_name(PARTS)


def without(node, nodes=5):
    """The simulator's clients that are not at this node."""
    return PEOPLE.select([k for k in range(30) if k * nodes // 30 != node])


def simulated(rounds, people=PEOPLE, algorithm=None):
    algorithm = algorithm or fedtail.fedavg(len(people), **LOCAL)
    return params_of(train(algorithm, TASK, people, rounds=rounds, channel=IntegerChannel()))


def with_answer(change):
    """Puts another answer in the clear into node 2's replies."""
    def fault(now, node, letter, answer):
        if node != 2:
            return answer
        sums = unpack(read_reply(letter, answer).answer, TYPES)
        return encode_message(Reply(message_digest(letter), change(sums)))
    return fault


RUBBISH = {
    "no answer": lambda *_: None,
    "bytes": lambda *_: b"rubbish",
    "empty": lambda *_: b"",
    "another letter": lambda now, node, letter, answer: encode_message(Reply(message_digest(b"another"), b"", b"")),
    "a flipped bit": lambda now, node, letter, answer: answer[:60] + bytes([answer[60] ^ 1]) + answer[61:],
}
IN_THE_CLEAR = {
    "NaN": lambda sums: pack(tuple(one.double() * math.nan for one in sums)),
    "infinite": lambda sums: pack(tuple(one.double() / 0 for one in sums)),
    "other numbers": lambda sums: pack(tuple(one.float() for one in sums)),
    "too few": lambda sums: pack(sums[:-1]),
    "another width": lambda sums: pack(tuple(one[:-1] for one in sums)),
    "a string": lambda sums: pack(("sum",)),
    "another type": lambda sums: pack(fedtail.Superquantile(0.5)),
    "no sums": lambda sums: b"\xc1",
}


@pytest.mark.parametrize("channel", [PlainChannel(), IntegerChannel(), CHANNEL], ids=["plain", "integer", "secure"])
@pytest.mark.parametrize("what", RUBBISH)
def test_a_node_that_answers_rubbish_is_left_out(what, channel):
    sites = Sites(fault=lambda now, node, letter, answer: RUBBISH[what](now, node, letter, answer) if node == 2 else answer)
    fleet = sites.fleet()
    found = params_of(train(FEDAVG, TASK, fleet=fleet, rounds=2, channel=channel))
    assert torch.allclose(found, simulated(2, without(2)), atol=1e-6)
    assert list(fleet.reports[-1].problems) == [2]
    assert (fleet.reports[-1].sampled, fleet.reports[-1].answered) == (30, 24)


@pytest.mark.parametrize("channel", [PlainChannel(), IntegerChannel()], ids=["plain", "integer"])
@pytest.mark.parametrize("what", IN_THE_CLEAR)
def test_sums_that_are_none_are_not_added(what, channel):
    fleet = Sites(fault=with_answer(IN_THE_CLEAR[what])).fleet()
    found = params_of(train(FEDAVG, TASK, fleet=fleet, rounds=1, channel=channel))
    assert torch.allclose(found, simulated(1, without(2)), atol=1e-6)
    assert fleet.reports[0].problems[2].startswith("its answer was not taken")


def test_integers_beyond_the_modulus_are_not_added():
    fleet = Sites(fault=with_answer(lambda sums: pack(tuple(one - (1 << 62) for one in sums)))).fleet()
    assert torch.equal(params_of(train(FEDAVG, TASK, fleet=fleet, rounds=1, channel=IntegerChannel())), simulated(1, without(2)))


@pytest.mark.parametrize("schedule", ["ahead", "simple"])
@pytest.mark.parametrize("dies", range(14))
def test_a_node_that_dies_at_any_exchange_costs_its_clients_and_nothing_else(dies, schedule):
    """Three rounds of two questions; whatever the exchange, every round is held, over all or over the rest."""
    sites = Sites(vanish={3: range(dies, 99)})
    fleet, answered = sites.fleet(schedule=schedule), []
    train(DELTA, TASK, fleet=fleet, rounds=3, channel=CHANNEL, on_round=lambda _: answered.extend(r.answered for r in fleet.reports))
    assert len(answered) == 6
    assert set(answered) <= {24, 30}
    assert answered == sorted(answered, reverse=True)


@pytest.mark.parametrize("misses", range(14))
def test_a_node_that_misses_one_exchange_comes_back(misses):
    sites = Sites(vanish={3: {misses}})
    fleet, answered = sites.fleet(), []
    train(DELTA, TASK, fleet=fleet, rounds=5, channel=CHANNEL, on_round=lambda _: answered.extend(r.answered for r in fleet.reports))
    assert answered[-2:] == [30, 30]
    assert set(answered) <= {24, 30}


@pytest.mark.parametrize("question", [0, 1])
def test_who_dies_in_a_question_is_out_of_that_question(question):
    """Rows come at the third and fifth exchange of the first round."""
    sites = Sites(vanish={3: {2 + 2 * question}})
    fleet = sites.fleet()
    train(DELTA, TASK, fleet=fleet, rounds=1, channel=CHANNEL)
    assert [report.answered for report in fleet.reports] == ([24, 30] if question == 0 else [30, 24])
    assert fleet.reports[question].problems == {3: "no answer"}


def test_an_answer_that_comes_late_is_ignored():
    """Node 1's answers arrive one exchange late, each in the place of the next."""
    held = {}

    def fault(now, node, letter, answer):
        if node != 1:
            return answer
        late, held[1] = held.get(1), answer
        return late

    fleet = Sites(fault=fault).fleet()
    found = params_of(train(FEDAVG, TASK, fleet=fleet, rounds=2, channel=IntegerChannel()))
    assert torch.equal(found, simulated(2, without(1)))
    assert fleet.reports[-1].problems == {1: "an answer to another message came, too late."}


def test_data_that_are_not_finite_are_left_out_on_the_node():
    sites = Sites()
    sites.people[2] = replace(sites.people[2], inputs=sites.people[2].inputs * math.nan)
    fleet = sites.fleet()
    found = params_of(train(DELTA, TASK, fleet=fleet, rounds=2, channel=CHANNEL))
    expected = train(fedtail.delta_fl(0.5, 24, **ONE_QUESTION, **LOCAL), TASK, without(2), rounds=2, channel=IntegerChannel())
    assert torch.allclose(found, params_of(expected), atol=1e-6)
    assert fleet.reports[-1].answered == 30


@pytest.mark.parametrize("schedule", ["ahead", "simple", "all-or-nothing"])
def test_where_too_few_stay_the_round_is_lost_and_the_next_is_held(schedule):
    sites = Sites(vanish=dict.fromkeys((0, 1, 2), range(1, 4)))
    fleet = sites.fleet(schedule=schedule)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = train(FEDAVG, TASK, fleet=fleet, rounds=8, channel=SecureChannel(16, minimum_contributors=3))
    lost = [one for one in said if one.category is RoundLostWarning]
    assert "is lost, and the model stays as it was" in str(lost[0].message)
    assert 0 < len(lost) < 8
    assert not torch.equal(params_of(result), TASK.params())
    assert sum(count for _, count in result.ledger.rounds) == 8


def test_fewer_clients_than_the_noise_counts_on_lose_the_round_and_are_charged():
    private = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=20, **LOCAL)
    sites = Sites(vanish={2: range(99)})
    with pytest.warns(RoundLostWarning, match="18 clients answered beside those of the node that holds most, .* and 20 are needed"):
        result = train(private, TASK, fleet=sites.fleet(), rounds=2, channel=IntegerChannel(), privacy=fedtail.PrivacyBudget(delta=1e-3))
    whole = train(private, TASK, fleet=Sites().fleet(), rounds=2, channel=IntegerChannel(), privacy=fedtail.PrivacyBudget(delta=1e-3))
    assert result.ledger.rounds == whole.ledger.rounds
    assert result.ledger.guarantee().epsilon == whole.ledger.guarantee().epsilon


@pytest.mark.parametrize("schedule", ["ahead", "simple"])
@pytest.mark.parametrize(("minimum", "held"), [(9, True), (10, False)])
def test_a_node_that_drops_out_takes_all_its_clients_from_the_tail(schedule, minimum, held):
    """A tail of 15 of 30 clients, six at each node: without one node 9 are left at least."""
    sites = Sites(vanish={2: range(12, 99)})                             # after four histograms, in two sessions
    channel = SecureChannel(8, minimum_contributors=minimum)
    lost = contextlib.nullcontext() if held else pytest.warns(RoundLostWarning, match="24 of 30 clients answered, and 25 are needed: nothing is unmasked")
    with lost:
        result = train(fedtail.delta_fl(0.5, 30, **LOCAL), TASK, fleet=sites.fleet(schedule=schedule), rounds=1, channel=channel)
    assert torch.equal(params_of(result), TASK.params()) == (not held)
    assert len(sites.letters) == (14 if held else 13)                    # nobody is asked to unmask


@pytest.mark.parametrize(("unusable", "held"), [(3, True), (4, False)])
def test_clients_of_nodes_who_answer_with_zeros_do_not_hide_anybody(unusable, held):
    """Six clients at each of five nodes; without four nodes' six are left, and ten are needed."""
    sites = Sites()
    for node in range(unusable):
        sites.people[node] = replace(sites.people[node], inputs=sites.people[node].inputs * math.nan)
    lost = contextlib.nullcontext() if held else pytest.warns(RoundLostWarning, match="30 of 30 clients answered, and 34 are needed: nothing is unmasked")
    with lost:
        result = train(FEDAVG, TASK, fleet=sites.fleet(schedule="simple"), rounds=1, channel=SecureChannel(8, minimum_contributors=10))
    assert torch.equal(params_of(result), TASK.params()) == (not held)


def test_nobody_answers():
    with pytest.warns(RoundLostWarning, match="no node answered"):
        result = train(FEDAVG, TASK, fleet=Sites(fault=lambda *_: None).fleet(), rounds=1)
    assert torch.equal(params_of(result), TASK.params())


NOISY = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=18, **LOCAL)


def test_all_or_nothing_is_repeated_once_with_the_rest_and_charged_again():
    sites = Sites(vanish={3: {2}})
    fleet = sites.fleet(schedule="all-or-nothing")
    result = train(NOISY, TASK, fleet=fleet, rounds=3, channel=SecureChannel(18, minimum_contributors=3))
    asked = [len(event.releases) * count for event, count in result.ledger.rounds]
    assert sum(asked) == 4
    assert len(sites.letters) == 1 + 3 + 1
    again = read_message(sites.letters[3][0])
    assert unpack(again.ask, TYPES).attempt == 1
    assert list(sites.letters[3]) == [0, 1, 2, 4]


def test_all_or_nothing_without_noise_is_not_repeated():
    """With the late row, the difference of the two sums would be that row."""
    sites = Sites(vanish={3: {2}})
    with pytest.warns(RoundLostWarning, match="no row came from nodes 3, and all are needed: nothing is released. Without noise there is no retry") as said:
        result = train(FEDAVG, TASK, fleet=sites.fleet(schedule="all-or-nothing"), rounds=3, channel=CHANNEL)
    assert len([one for one in said if one.category is RoundLostWarning]) == 1
    assert [list(letters) for letters in sites.letters[1:4]] == [[0, 1, 2, 3, 4]] * 3          # each question once, from everybody
    assert sum(len(event.releases) * count for event, count in result.ledger.rounds) == 3
    assert not torch.equal(params_of(result), TASK.params())


@pytest.mark.parametrize(("method", "answers"), [(FEDAVG, False), (NOISY, True)], ids=["exact", "noise"])
def test_a_node_refuses_a_retry_without_noise(method, answers):
    """Whatever the server thinks: the question of a round is asked once more as its second attempt."""
    sites = Sites()
    train(method, TASK, fleet=sites.fleet(schedule="all-or-nothing"), rounds=1, channel=SecureChannel(18, minimum_contributors=3))
    first = read_message(sites.letters[1][0])
    node, ask = Node(sites.people[0], TASK, workers=1), unpack(first.ask, TYPES)
    node.receive_broadcast(first.broadcasts[-1])
    row, _ = node.integer_row(first.ask, 62)
    again = pack(replace(ask, attempt=1))
    if answers:
        assert not np.array_equal(node.integer_row(again, 62, attempt=1)[0], row)
    else:
        with pytest.raises(Refused, match="a retry asks for sums without noise"):
            node.integer_row(again, 62, attempt=1)
    for question, attempt in ((first.ask, 1), (again, 0)):      # asked once more as it was, it would get the same noise
        with pytest.raises(Refused, match=f"the question is of attempt {1 - attempt}, and the sum of attempt {attempt}"):
            node.integer_row(question, 62, attempt=attempt)


def test_nodes_that_are_gone_for_good_do_not_stop_a_tail_and_one_that_drops_out_of_it_does():
    """Two of seven nodes never answer: no number of the round is about their clients. Then one vanishes when the tail has been found."""
    half = fedtail.delta_fl(0.5, 30, **LOCAL)
    gone = {node: range(999) for node in (5, 6)}
    channel = SecureChannel(10, minimum_contributors=10)
    sites = Sites(7, vanish=gone)
    assert not torch.equal(params_of(train(half, TASK, fleet=sites.fleet(schedule="simple"), rounds=1, channel=channel)), TASK.params())
    exchanges = len(sites.letters)
    late = Sites(7, vanish={**gone, 4: range(exchanges - 2, 999)})      # its keys and quantiles came, its update does not
    with pytest.warns(RoundLostWarning, match="nothing is unmasked"):
        train(half, TASK, fleet=late.fleet(schedule="simple"), rounds=1, channel=replace(channel, minimum_contributors=8))


def test_all_or_nothing_that_could_not_agree_on_keys_tries_again():
    sites = Sites(vanish={node: {0} for node in range(1, 5)})
    fleet = sites.fleet(schedule="all-or-nothing")
    with pytest.warns(RoundLostWarning, match="1 clients sent keys"):
        result = train(FEDAVG, TASK, fleet=fleet, rounds=2, channel=CHANNEL)
    assert fleet.reports[-1].answered == 30
    assert not torch.equal(params_of(result), TASK.params())


def test_what_a_node_has_not_heard_does_not_pile_up():
    """Node 3 never gets the keys of the others: every round it is told of the model again, and never computes."""
    sites = Sites(vanish={3: range(1, 99, 2)})
    train(FEDAVG, TASK, fleet=sites.fleet(), rounds=12, channel=CHANNEL)
    assert len(sites.sites[3]._broadcasts) <= 4


def test_a_repetition_has_fresh_noise():
    private = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=18, **LOCAL)
    sites = Sites(vanish={3: {1}})
    rows = []
    for node in sites.sites:
        made = sites.sites[node]._make

        def make(made=made):
            one = made()
            row = one.integer_row

            def noted(ask, *more):
                found = row(ask, *more)
                rows.append((ask, found[0]))
                return found

            one.integer_row = noted
            return one

        sites.sites[node]._make = make
    train(private, TASK, fleet=sites.fleet(schedule="all-or-nothing"), rounds=1, channel=SecureChannel(24, minimum_contributors=3))
    assert len(rows) == 8
    assert len({row.tobytes() for _, row in rows}) == 8


def test_a_node_that_joins_is_drawn_from_then_on():
    sites = Sites(nodes=5)
    registry, fleet = sites.registry, sites.fleet()
    fleet.population = type(registry)(*(getattr(registry, name)[:24] for name in ("key", "mass", "node", "place", "group")))
    algorithm, answered = fedtail.FederatedAlgorithm(fedtail.Everyone(), FEDAVG.local, FEDAVG.risk, FEDAVG.aggregate, FEDAVG.server), []

    def joins(progress):
        answered.append(fleet.reports[-1].answered)
        fleet.population = registry if progress.round == 2 else fleet.population

    train(algorithm, TASK, fleet=fleet, rounds=5, channel=CHANNEL, on_round=joins)
    assert answered == [24, 24, 24, 30, 30]      # the third round's cohort was drawn before it came
