"""A node answers what its own experiment asks, and nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtail
from fedtail import train
from fedtail.channel import SecureChannel
from fedtail.channel.integer import FixedPoint, clipping
from fedtail.deployment import Node, Site
from fedtail.deployment.agreement import Agreement
from fedtail.deployment.node import PARTS
from fedtail.deployment.node_messages import read_message, read_reply
from fedtail.evaluation import FederatedEvaluation
from fedtail.privacy.mechanisms import NoPrivacy
from fedtail.questions import Count
from fedtail.secure.encoding import Refused
from fedtail.wire import pack, types_by_name, unpack

from remote_cases import LOCAL, ONE_QUESTION, PEOPLE, TASK, Sites

TYPES = types_by_name(PARTS)
CHANNEL = SecureChannel(18, minimum_contributors=3)
NOISY = fedtail.dp_delta_fl(0.5, 30, 1.0, 1.0, 1.0, loss_bound=5.0, cohort_size=30, noise="discrete", planned_clients=12, **LOCAL)
SUMS = {"fedavg": fedtail.fedavg(30, **LOCAL), "tail": fedtail.delta_fl(0.5, 30, **LOCAL, **ONE_QUESTION),
        "tail by radix": fedtail.delta_fl(0.5, 30, **LOCAL), "prox": fedtail.fedprox(0.1, 30, **LOCAL),
        "dane": fedtail.feddane(0.1, 30, **LOCAL), "q-ffl": fedtail.q_ffl(1.0, 30, **LOCAL),
        "adaptive prox": fedtail.FederatedAlgorithm(**{**vars(fedtail.fedavg(30, **LOCAL)), "local": fedtail.LocalSGD(
            **LOCAL, penalty=fedtail.AdaptiveProximal())}),
        "term": fedtail.term(1.0, 30, loss_bound=10.0, **LOCAL), "family": fedtail.delta_fl_family((1.0, 0.5), 30, **LOCAL),
        "ditto": fedtail.ditto(0.1, 30, **LOCAL), "afl": fedtail.afl(0.1, groups=3, cohort_size=30, **LOCAL),
        "median": replace(fedtail.fedavg(30, **LOCAL), aggregate=fedtail.GeometricMedian()),
        "fenced": replace(fedtail.fedavg(30, **LOCAL), risk=fedtail.FencedSuperquantile(0.5)),
        "evar": replace(fedtail.fedavg(30, **LOCAL), risk=fedtail.EntropicValueAtRisk(0.5))}


class AgreedSites(Sites):
    """Nodes that have accepted `method` and, if it is given, that their clients evaluate by `evaluation`."""

    def __init__(self, method, evaluation=None, **settings):
        self.agreements = [Agreement(method, evaluation)]
        super().__init__(**settings)

    def fresh(self, node):
        def make():
            return Node(self.people[node], self.task, self.parts, workers=1, test=self.test, agreements=self.agreements)
        return Site(make, **{"masked_only": False, **self.settings})


@pytest.mark.parametrize("name", SUMS)
def test_every_question_of_a_method_is_one_of_its_agreement(name):
    """The model after two rounds is that of nodes which answer everything, to the last bit."""
    found = [train(SUMS[name], TASK, fleet=sites.fleet(), rounds=2, channel=fedtail.IntegerChannel(), progress=False)
             for sites in (Sites(), AgreedSites(SUMS[name]))]
    for one, other in zip(*(member_params(trained) for trained in found), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, TASK.params())


def member_params(trained):
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return [state.params for state in states]


def asked_of_first_node(method, kind="Train", channel=CHANNEL):
    """A node that has accepted `method`, with its round open, and the `Ask` with a question of the class `kind` in its first round."""
    sites = Sites()
    train(method, TASK, fleet=sites.fleet(schedule="simple"), rounds=1, channel=channel, progress=False)
    letters = [read_message(one[0]) for one in sites.letters if 0 in one]
    opening = next(one.broadcasts[-1] for one in letters if one.broadcasts)
    asks = [unpack(one.ask, TYPES) for one in letters if one.ask]
    ask = next(one for one in asks if type(one.questions[0]).__name__ == kind)
    node = Node(sites.people[0], TASK, workers=1, agreements=[Agreement(method, channel=channel)])
    return node, opening, ask


def answer(node, opening, ask):
    node.receive_broadcast(opening)
    return node.integer_row(pack(ask), 62, summed=(range(5), 5))[0]


def changed(ask, **fields):
    return replace(ask, questions=(replace(ask.questions[0], **fields),))


def test_a_node_refuses_a_question_without_the_agreed_noise():
    node, opening, ask = asked_of_first_node(NOISY, "Statistic")
    assert len(answer(node, opening, ask))
    with pytest.raises(Refused, match="the noise on what is told of the losses: NoPrivacy is asked for"):
        answer(node, opening, changed(ask, mechanism=NoPrivacy()))


@pytest.mark.parametrize(("fields", "text"), [
    (lambda q: {"aggregate": fedtail.fedavg(30, **LOCAL).aggregate}, "^aggregate: "),
    (lambda q: {"risk": fedtail.Mean()}, "^risk: Mean is asked for, and the accepted experiment has "),
    (lambda q: {"local": fedtail.LocalSGD(learning_rate=9.0, batch_size=4)}, "^local: the LocalSGD asked for differs .* in learning_rate"),
    (lambda q: {"model": 1}, "model 1 is asked about, and the accepted experiment trains 1"),
    (lambda q: {"gather": True}, "masked are sums|single updates are asked for"),
    (lambda q: {"marks_contributors": False}, "updates are asked for that train no model")])
def test_a_node_refuses_other_parts_than_the_agreed_ones(fields, text):
    node, opening, ask = asked_of_first_node(NOISY)
    with pytest.raises(Refused, match=text):
        answer(node, opening, changed(ask, **fields(ask.questions[0])))


def test_a_node_refuses_evaluations_and_losses_that_its_experiment_does_not_ask():
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    half = FederatedEvaluation(split="train").client_half
    with pytest.raises(Refused, match="in the accepted experiment clients evaluate nothing"):
        answer(node, opening, replace(ask, questions=(fedtail.questions.Evaluate(half),)))
    with pytest.raises(Refused, match="which neither risk nor local training"):
        answer(node, opening, replace(ask, questions=(fedtail.questions.Statistic(fedtail.Superquantile(0.5), torch.zeros(1)),)))
    with pytest.raises(Refused, match="a count is not about the sum"):
        answer(node, opening, replace(ask, questions=(fedtail.questions.Count(fedtail.questions.Statistic(
            fedtail.Superquantile(0.5), torch.zeros(1))),)))


@pytest.mark.parametrize(("fields", "text"), [
    (lambda c: {"importance": torch.cat([torch.ones(1), torch.zeros(len(c.ids) - 1)]).double()}, "multiplied by 0, which Uniform"),
    (lambda c: {"importance": 2 * c.importance}, "multiplied by 2, which Uniform"),
    (lambda c: {"ids": c.ids[:1].repeat(len(c.ids))}, "names a client twice"),
    (lambda c: {"ids": c.ids + 1000}, "one that is not here"),
    (lambda c: {"mass_bound": c.mass_bound / 2}, "the mass bound 0.5 is below the mass of a client"),
    (lambda c: {"mass_bound": float("nan")}, "the mass bound nan is below")])
def test_a_node_refuses_a_cohort_that_singles_out_clients(fields, text):
    node, opening, _ = asked_of_first_node(SUMS["fedavg"])
    began = unpack(opening, TYPES)
    forged = pack(replace(began, cohort=replace(began.cohort, **fields(began.cohort))))
    with pytest.raises(Refused, match=text):
        node.receive_broadcast(forged)
    assert node.round == -1


def test_samplers_by_draws_give_other_factors_and_none_of_zero():
    people = replace(PEOPLE, mass=torch.rand(30, dtype=torch.float64) + 0.5)
    for sampler in (fedtail.ByMass(20), fedtail.EqualClients(20)):
        agreement = Agreement(replace(SUMS["fedavg"], sample=sampler))
        cohort = sampler(people, 3, 0)
        agreement.check_cohort(cohort, people.mass, people.key)
        with pytest.raises(Refused, match="multiplied by 0"):
            agreement.check_cohort(replace(cohort, importance=torch.zeros_like(cohort.importance)), people.mass, people.key)


def test_another_number_or_company_gets_no_fresh_noise_and_no_second_sum_and_another_round_does():
    node, opening, ask = asked_of_first_node(NOISY, "Statistic")
    renumbered = changed(ask, number=7)
    twice = replace(ask, questions=(ask.questions[0], renumbered.questions[0]))
    first = answer(node, opening, twice)
    assert np.array_equal(first[:len(first) // 2], first[len(first) // 2:-1])                  # one answer, under two numbers
    fresh = Node(node.fleet.population, TASK, workers=1, agreements=node.agreements)
    fresh.restore(node.save())                               # a restart of the node keeps it
    for one, again in itertools.product((node, fresh), (ask, renumbered, twice)):
        with pytest.raises(Refused, match="the same noise in a second sum"):
            answer(one, opening, again)
    other = Node(node.fleet.population, TASK, workers=1, agreements=node.agreements)
    assert not np.array_equal(answer(other, opening, ask)[:-1], first[:len(first) // 2])


def test_the_same_sum_without_noise_is_answered_again_as_it_was():
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    assert np.array_equal(answer(node, opening, ask), answer(node, opening, changed(ask, number=7)))


def test_an_encoding_must_be_for_the_masses_of_the_round():
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    for field, value in (("mass", ask.encoding.mass / 2), ("clients", 1), ("modulus_bits", 61)):
        with pytest.raises(Refused, match=r"answers would be encoded as FixedPoint modulo 2.*, and the accepted experiment encodes"):
            answer(node, opening, replace(ask, encoding=replace(ask.encoding, **{field: value})))


def test_the_same_question_in_another_encoding_gets_no_fresh_noise():
    node, opening, ask = asked_of_first_node(NOISY, "Statistic")
    node.receive_broadcast(opening)
    with pytest.raises(Refused, match=r"modulo 2\^61 for 30 clients"):
        node.integer_row(pack(replace(ask, encoding=replace(ask.encoding, modulus_bits=61))), 61, summed=(range(5), 5))


@pytest.mark.parametrize(("summed", "text"), [
    ((range(5), 1), "a sum over 1 nodes may hold the noise of 6 clients, and what is charged relies on 12"),
    ((range(1), 1), "a sum over 1 nodes may hold the noise of 6 clients"),
    ((range(1), 5), "a sum over 5 nodes may hold the noise of 6 clients"),
    (None, "it is not known over how many nodes the sum is")])
def test_a_sum_must_hold_the_noise_that_is_charged_whoever_is_left_out(summed, text):
    node, opening, ask = asked_of_first_node(NOISY, "Statistic")
    assert ask.questions[0].mechanism.minimum == 12
    node.receive_broadcast(opening)
    with pytest.raises(Refused, match=text):
        node.integer_row(pack(ask), 62, summed=summed)
    assert len(node.integer_row(pack(ask), 62, summed=(range(5), 2))[0])


def test_a_weight_is_the_first_entry_and_none_where_clients_add_noise():
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    with pytest.raises(Refused, match="entry 7 of the sum is named as the weight"):
        answer(node, opening, changed(ask, divisor=7))
    private = fedtail.dp_fedavg(30, 1.0, 1.0, cohort_size=30, noise="discrete", planned_clients=12, **LOCAL)
    node, opening, ask = asked_of_first_node(private)
    assert ask.questions[0].divisor is None
    for entry in (0, 7):
        with pytest.raises(Refused, match=f"entry {entry} of the sum is named as the weight"):
            answer(node, opening, changed(ask, divisor=entry))


def test_nobody_is_counted_for_a_sum_with_noise():
    private = fedtail.dp_fedavg(30, 1.0, 1.0, cohort_size=30, noise="discrete", planned_clients=12, **LOCAL)
    node, opening, ask = asked_of_first_node(private)
    with pytest.raises(Refused, match="PrivateMean has noise, and clients are counted for sums without noise only"):
        answer(node, opening, replace(ask, questions=(Count(ask.questions[0]),)))


def test_how_many_clients_are_silent_is_told_under_masks_only():
    """A loss that overflows says something about one client's data: it is an entry of the sum, not of the reply."""
    told = []

    def listen(exchange, node, letter, reply):
        told.append(read_reply(letter, reply))
        return reply

    sites = AgreedSites(SUMS["fedavg"], masked_only=True, fault=listen)
    for site in sites.sites.values():
        site._loaded_node().fleet.count_silent_clients = lambda questions: len(list(questions))
    fleet = sites.fleet(schedule="simple")
    train(SUMS["fedavg"], TASK, fleet=fleet, rounds=1, channel=CHANNEL, progress=False)
    assert fleet.count_silent_clients(()) == 5
    assert len(told) > 10
    assert not any(one.answer or one.problem for one in told)


def test_a_row_beyond_its_bound_is_clipped_on_a_node_and_told_to_nobody(caplog):
    rows, bound = torch.tensor([[3.0, -0.5], [0.25, -9.0]]), torch.tensor([1.0, 2.0], dtype=torch.float64)
    code = FixedPoint(4, 1.0, 62)
    with pytest.raises(ValueError, match="beyond its bound"):
        code.encode(rows, bound)
    found = code.decode(code.sum(clipping(code).encode(rows, bound)), bound)
    assert found.tolist() == [1.25, -2.5]
    assert "2 rows were beyond their bound" in caplog.text


def test_evaluations_of_the_experiment_are_answered():
    evaluation = FederatedEvaluation(split="train")
    sites = AgreedSites(SUMS["fedavg"], evaluation)
    trained = train(SUMS["fedavg"], TASK, fleet=sites.fleet(), rounds=1, channel=fedtail.IntegerChannel(), evaluation=evaluation,
                    progress=False)
    assert trained.evaluation is not None
