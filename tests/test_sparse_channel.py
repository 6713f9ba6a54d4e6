"""SparseGraph under SecureChannel: the same models to the bit, in the simulator and over nodes, whoever drops out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtail
from fedtail import Family, IntegerChannel, SecureChannel, train
from fedtail.algorithm import RoundLostWarning
from fedtail.channel import SignedGraph, SparseGraph
from fedtail.deployment.masking import DropoutTolerant
from fedtail.deployment.node_messages import read_message
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment.experiment import build_experiments
from fedtail.experiment.source import Source
from fedtail.secure import Client, LocalClients, Refused, Session, SparseSession
from fedtail.secure.frames import decode_bundle, decode_invitation, frame_class_and_session

from remote_cases import LOCAL, ONE_QUESTION, PEOPLE, TASK, Sites, params_of

GRAPH = SparseGraph(corrupted=0.05, dropped=0.1)
CHANNEL = SecureChannel(8, minimum_contributors=3, graph=GRAPH)
RECIPES = {
    "fedavg": fedtail.fedavg(20, **LOCAL),
    "delta_fl": fedtail.delta_fl(0.5, 20, **ONE_QUESTION, **LOCAL),
    "family": Family((fedtail.fedavg(20, **LOCAL), fedtail.delta_fl(0.5, 20, **ONE_QUESTION, **LOCAL))),
    "dp_fedavg": fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=20, noise="discrete", planned_clients=8, **LOCAL),
}
NODES, FEDAVG = 15, fedtail.fedavg(30, **LOCAL)      # of two clients each


def sessions_in(sites):
    """The kinds of all sessions that nodes were invited to, with the session itself."""
    messages = [m for letters in sites.letters for letter in letters.values() for m in decode_bundle(read_message(letter).secure)]
    return {frame_class_and_session(m)[1]: decode_invitation(frame_class_and_session(m)[0], m) for m in messages if frame_class_and_session(m)[0] in (Session, SparseSession)}.values()


@pytest.mark.parametrize("name", RECIPES)
def test_few_neighbours_change_no_bit(name):
    expected = params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=IntegerChannel()))
    for masks in ("real", "none"):
        trained = train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=replace(CHANNEL, masks=masks))
        assert torch.equal(params_of(trained), expected)
    assert trained.ledger.channels == ("simulated: sums over at least 8 clients with few neighbours (up to 5% corrupted, 10% dropped) as integers, without masks",)


def test_simulated_clients_require_what_the_channel_says():
    """With nobody corrupted and nobody gone two neighbours do; clients left to themselves would refuse them."""
    trusting = replace(CHANNEL, graph=SparseGraph(0.0, 0.0))
    session = trusting._make_session(0, tuple(range(20)))
    assert (session.neighbours, session.threshold) == (2, 20)
    with pytest.raises(Refused, match="rows are disclosed"):
        Client(session, 0)
    expected = params_of(train(RECIPES["fedavg"], TASK, PEOPLE, rounds=1, channel=IntegerChannel()))
    assert torch.equal(params_of(train(RECIPES["fedavg"], TASK, PEOPLE, rounds=1, channel=trusting)), expected)


def test_the_session_of_a_cohort_is_sparse_where_that_is_less():
    assert isinstance(CHANNEL._make_session(0, tuple(range(20))), SparseSession)
    small = replace(CHANNEL, threshold=2)
    assert type(small._make_session(0, (4, 5, 6, 7))) is Session
    assert [small._session_threshold(clients) for clients in (4, 20, 100)] == [3, 18, 90]
    assert [replace(small, graph=None)._session_threshold(clients) for clients in (4, 20, 100)] == [3, 11, 51]
    assert CHANNEL._session_threshold(8) == 8


@pytest.mark.parametrize("dropout", [0.04, 0.12])
def test_who_vanishes_is_left_out_and_with_too_many_the_round_is_lost(dropout):
    """With masks and without, to the bit, and the same rounds are lost: all but two of twenty have to stay."""
    found = []
    for masks in ("real", "none"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trained = train(RECIPES["fedavg"], TASK, PEOPLE, rounds=6, channel=replace(CHANNEL, dropout=dropout, masks=masks))
        lost = [str(one.message).split()[1] for one in said if one.category is RoundLostWarning]
        found.append((params_of(trained).tolist(), lost))
    assert found[0] == found[1]
    assert len(found[0][1]) < 3 if dropout < 0.1 else 0 < len(found[0][1]) < 6


@pytest.mark.parametrize("schedule", ["ahead", "simple"])
@pytest.mark.parametrize("name", ["fedavg", "delta_fl", "family"])
def test_nodes_with_few_neighbours_train_the_model_of_bare_sums_to_the_bit(name, schedule):
    sites = Sites(nodes=NODES, restart=schedule == "ahead")
    masked = train(RECIPES[name], TASK, fleet=sites.fleet(schedule=schedule), rounds=3, channel=CHANNEL)
    bare = train(RECIPES[name], TASK, fleet=Sites(nodes=NODES).fleet(), rounds=3, channel=IntegerChannel())
    assert torch.equal(params_of(masked), params_of(bare))
    simulated = train(RECIPES[name], TASK, PEOPLE, rounds=3, channel=IntegerChannel())
    assert torch.allclose(params_of(masked), params_of(simulated), atol=1e-6)      # two clients at a time round otherwise than twenty
    assert masked.ledger.channels == ("sums over at least 8 clients with few neighbours (up to 5% corrupted, 10% dropped), masked by the nodes",)
    kinds = {type(session) for session in sessions_in(sites)}
    assert kinds == {SparseSession}


@pytest.mark.parametrize(("schedule", "expected"), [("simple", [6, 6, 6, 6]), ("ahead", [6, 4, 4, 4])])
def test_exchanges_a_round_are_as_many_as_with_every_pair(schedule, expected):
    sites, taken = Sites(nodes=NODES), []
    everybody = replace(RECIPES["delta_fl"], sample=fedtail.Everyone())
    train(everybody, TASK, fleet=sites.fleet(schedule=schedule), rounds=4, channel=CHANNEL, on_round=lambda _: taken.append(len(sites.letters)))
    assert [after - before for before, after in zip([0, *taken], taken, strict=False)] == expected


@pytest.mark.parametrize("schedule", ["ahead", "simple"])
@pytest.mark.parametrize("dies", range(0, 14, 2))
def test_a_node_that_dies_at_any_exchange_costs_its_clients_and_nothing_else(dies, schedule):
    sites = Sites(nodes=NODES, vanish={3: range(dies, 99)})
    fleet, answered = sites.fleet(schedule=schedule), []
    train(fedtail.delta_fl(0.5, 30, **ONE_QUESTION, **LOCAL), TASK, fleet=fleet, rounds=3, channel=CHANNEL,
          on_round=lambda _: answered.extend(report.answered for report in fleet.reports))
    assert len(answered) == 6
    assert set(answered) <= {28, 30}
    assert answered == sorted(answered, reverse=True)


def test_a_session_that_was_set_up_ahead_is_used_where_it_is_the_one_that_is_needed():
    clients, counts, taken = LocalClients(range(12), b"run", corrupted=0.05), dict.fromkeys(range(12), 1), []
    clients.rows = {one: np.array([one]) for one in range(12)}
    masking = DropoutTolerant(clients, b"run", ahead=True)
    for threshold, graph in ((7, GRAPH), (7, GRAPH), (7, None), (7, None), (12, None), (12, GRAPH)):
        before = clients.exchanges
        masking.open_round(counts, threshold, counts, graph)
        assert masking.sum_rows(1, 8, b"", asked_in_vain).total.tolist() == [66]
        session = masking._rounds.server.session
        taken.append((clients.exchanges - before, type(session), session.threshold))
    assert taken == [(4, SparseSession, 10), (2, SparseSession, 10), (4, Session, 7), (2, Session, 7), (4, Session, 12), (4, SparseSession, 12)]


def asked_in_vain():
    raise AssertionError("there are no retries")


def test_where_too_many_nodes_leave_the_round_is_lost_and_the_next_is_held():
    sites = Sites(nodes=NODES, vanish={0: {2}, 1: {2}, 2: {2}})
    with pytest.warns(RoundLostWarning, match="12 of 15 clients sent a row, and the threshold is 13: nothing is released"):
        trained = train(FEDAVG, TASK, fleet=sites.fleet(schedule="simple"), rounds=2, channel=CHANNEL)
    assert not torch.equal(params_of(trained), TASK.params())


def test_a_node_refuses_neighbours_that_are_too_few_for_its_own_settings(tmp_path):
    weak, said = Sites(nodes=NODES, corrupted=0.3, restart=True).fleet(), []
    with pytest.warns(RoundLostWarning, match="0 of 15 clients sent keys"):
        train(FEDAVG, TASK, fleet=weak, rounds=2, channel=CHANNEL, on_round=lambda _: said.extend(weak.reports[-1].problems.values()))
    assert len(said) == 2 * NODES
    assert all("rows are disclosed with probability" in why for why in said)      # also by nodes that were saved and started again
    train(FEDAVG, TASK, fleet=Sites(nodes=NODES, corrupted=0.3).fleet(), rounds=1, channel=replace(CHANNEL, graph=SparseGraph(0.3, 0.1)))
    place = tmp_path / "node.toml"
    place.write_text('name = "north"\nexperiment = "e"\ndata = "d"\ncorrupted = 0.2\n')
    assert NodeSettings.read(place).make_site().corrupted == 0.2
    place.write_text('name = "north"\nexperiment = "e"\ndata = "d"\ncorrupted = 20\n')
    with pytest.raises(ValueError, match=r"corrupted must be in \[0, 1\), got 20\. It is a share of the nodes\."):
        NodeSettings.read(place)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: SparseGraph(10, 0.1), "corrupted must be in [0, 1), got 10. It is a share of the clients."),
    (lambda: SparseGraph(0.1, 0.5), "dropped must be in [0, 0.5), got 0.5. It is a share of the clients."),
    (lambda: SparseGraph(0.1, 0.1, security_bits=0), "security_bits must be in 1..256, got 0."),
    (lambda: SparseGraph(0.1, 0.1, correctness_bits=300), "correctness_bits must be in 1..256, got 300."),
    (lambda: train(FEDAVG, TASK, fleet=Sites(nodes=NODES).fleet(schedule="all-or-nothing"), rounds=1, channel=CHANNEL), "all-or-nothing sums are over few nodes, of which every pair shares a mask"),
])
def test_refusals(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


FILE = """\
rounds = 1
[data]
kind = "digits"
clients = 30
[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10
[sample]
cohort_size = 20
[channel]
part = "SecureChannel"
threshold = 8
graph = { corrupted = 0.1, dropped = 0.2 }
"""


def test_a_file_names_the_graph():
    [experiment] = build_experiments(Source.parse(FILE, "e.toml", Path()), "e")
    assert experiment.channel == SecureChannel(8, graph=SparseGraph(0.1, 0.2))
    assert experiment.as_table()["channel"]["graph"] == {"part": "SparseGraph", "corrupted": 0.1, "dropped": 0.2, "security_bits": 40, "correctness_bits": 20}
    [signed] = build_experiments(Source.parse(FILE.rsplit("graph", 1)[0] + 'graph = {part = "SignedGraph", colluding = 2}\n', "e.toml", Path()), "e")
    assert signed.channel == SecureChannel(8, graph=SignedGraph(2))
    [bare] = build_experiments(Source.parse(FILE.rsplit("graph", 1)[0], "e.toml", Path()), "e")
    assert bare.as_table()["channel"]["graph"] == "none"      # as a field that a file of before does not have
