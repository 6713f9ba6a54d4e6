"""Secure sums over nodes that mask their own rows: the same model, in as few exchanges as the schedule says."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import fedtail
from fedtail import Family, IntegerChannel, SecureChannel, train
from fedtail.deployment import Node, RemoteFleet, Site
from fedtail.deployment.masking import nodes_needed
from fedtail.deployment.node import Open
from fedtail.deployment.node_messages import NodeMessage, encode_message, read_message, read_reply
from fedtail.deployment.settings import NodeSettings
from fedtail.questions import Statistic, Train
from fedtail.secure import Refused
from fedtail.wire import pack

from remote_cases import LOCAL, ONE_QUESTION, PEOPLE, TASK, Sites, params_of, registry_of

CHANNEL = SecureChannel(8, minimum_contributors=3)
RECIPES = {
    "fedavg": fedtail.fedavg(20, **LOCAL),
    "delta_fl": fedtail.delta_fl(0.5, 20, **LOCAL),
    "delta_fl 12 bits": fedtail.delta_fl(0.5, 20, **ONE_QUESTION, **LOCAL),
    "delta_fl smoothed": fedtail.delta_fl(0.5, 20, form="smoothed", smoothing=0.5, **LOCAL),
    "term": fedtail.term(1.0, 20, loss_bound=8.0, **LOCAL),
    "q_ffl": fedtail.q_ffl(1.0, 20, **LOCAL),
    "afl groups": fedtail.afl(0.3, groups=3, cohort_size=20, **LOCAL),
    "family": Family((fedtail.fedavg(20, **LOCAL), fedtail.delta_fl(0.5, 20, **ONE_QUESTION, **LOCAL))),
}


def without_counts(rounds):
    """What is released beside how many contribute, which is asked where single clients are hidden."""
    return tuple((replace(event, releases=tuple(one for one in event.releases if not one.what.startswith("how many clients"))), count) for event, count in rounds)


@pytest.mark.parametrize("schedule", ["ahead", "simple", "all-or-nothing"])
@pytest.mark.parametrize("name", RECIPES)
def test_nodes_that_mask_their_rows_train_the_simulators_model_to_the_bit(name, schedule):
    sites = Sites()
    masked = train(RECIPES[name], TASK, fleet=sites.fleet(schedule=schedule), rounds=3, channel=CHANNEL)
    bare = train(RECIPES[name], TASK, PEOPLE, rounds=3, channel=IntegerChannel())
    same = torch.allclose if name == "term" else torch.equal      # exp rounds otherwise in vectors of another length
    assert same(params_of(masked), params_of(bare))
    assert torch.equal(params_of(masked), params_of(train(RECIPES[name], TASK, fleet=Sites().fleet(), rounds=3, channel=IntegerChannel())))
    assert masked.ledger.channels == ("sums over at least 8 clients, masked by the nodes",)
    assert without_counts(masked.ledger.rounds) == bare.ledger.rounds


@pytest.mark.parametrize(("name", "schedule", "expected"), [
    ("delta_fl 12 bits", "simple", [6, 6, 6, 6]), ("delta_fl 12 bits", "ahead", [6, 4, 4, 4]), ("delta_fl 12 bits", "all-or-nothing", [3, 2, 2, 2]),
    ("fedavg", "simple", [4, 4, 4, 4]), ("fedavg", "ahead", [4, 2, 2, 2]), ("fedavg", "all-or-nothing", [2, 1, 1, 1]),
    ("delta_fl", "ahead", [14, 12, 10, 10]),      # five questions where two were expected, until that is known
])
def test_exchanges_a_round(name, schedule, expected):
    sites, taken = Sites(), []
    fleet = sites.fleet(schedule=schedule)
    train(RECIPES[name], TASK, fleet=fleet, rounds=4, channel=CHANNEL, on_round=lambda _: taken.append(len(sites.letters)))
    assert [after - before for before, after in zip([0, *taken], taken, strict=False)] == expected
    assert sum(report.exchanges for report in fleet.reports) == expected[-1]


@pytest.mark.parametrize("schedule", ["ahead", "all-or-nothing"])
@pytest.mark.parametrize("name", ["delta_fl 12 bits", "delta_fl"])
def test_nodes_that_start_anew_for_every_letter_train_the_same_model(name, schedule):
    kept, anew = Sites(), Sites(restart=True)
    models = [params_of(train(RECIPES[name], TASK, fleet=sites.fleet(schedule=schedule), rounds=3, channel=CHANNEL)) for sites in (kept, anew)]
    assert torch.equal(*models)


def test_only_letters_that_ask_for_a_row_wake_the_part_that_computes():
    sites = Sites(restart=True)
    train(RECIPES["delta_fl 12 bits"], TASK, fleet=sites.fleet(), rounds=3, channel=CHANNEL)
    asked = sum(bool(read_message(letter).ask) for letters in sites.letters for letter in letters.values())
    assert sites.woken == asked == 3 * 2 * 5
    assert sum(len(letters) for letters in sites.letters) == (2 + 3 * 4) * 5


def test_the_front_of_a_node_needs_no_torch():
    code = "import sys, fedtail.deployment.site, fedtail.deployment.node_messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_model_travels_once_a_round():
    sites = Sites()
    train(RECIPES["delta_fl 12 bits"], TASK, fleet=sites.fleet(), rounds=2, channel=CHANNEL)
    told = [sum(len(read_message(letter).broadcasts) for letter in letters.values()) for letters in sites.letters]
    assert told == [0, 0, 5, 0, 0, 0, 10, 0, 0, 0]      # the second round's beginning comes with the first one's end


def test_losses_are_computed_once_a_round_even_in_new_processes(monkeypatch):
    from fedtail.clients import Shard

    computed, compute_losses = [], Shard.compute_losses
    monkeypatch.setattr(Shard, "compute_losses", lambda shard, model, low, high, objective=None: computed.append(high - low) or compute_losses(shard, model, low, high, objective))
    train(RECIPES["delta_fl 12 bits"], TASK, fleet=Sites(restart=True).fleet(), rounds=2, channel=CHANNEL)
    assert sum(computed) == 2 * 20


def test_noise_is_drawn_once_even_in_new_processes():
    """The same question in the same round, after a restart: fresh noise could be averaged away."""
    private = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=20, noise="discrete", planned_clients=8, **LOCAL)
    sites, asked = Sites(nodes=2), []

    def fault(now, node, letter, answer):
        sites.sites[node] = sites.fresh(node).restore(sites.sites[node].save())
        asked.append((answer, sites.sites[node].handle(letter)))
        return answer

    sites.fault = fault
    train(private, TASK, fleet=sites.fleet(), rounds=1, channel=IntegerChannel())
    assert all(first == second for first, second in asked)


def test_clients_remember_between_rounds_and_processes():
    """AFL by client keeps its lambda on the nodes; how a round ended is told with the next one's beginning."""
    algorithm = fedtail.afl(0.5, **LOCAL)
    reference = params_of(train(algorithm, TASK, PEOPLE, rounds=3, channel=IntegerChannel()))
    for restart in (False, True):
        fleet = Sites(restart=restart).fleet(forgets=False)
        assert torch.equal(params_of(train(algorithm, TASK, fleet=fleet, rounds=3, channel=IntegerChannel())), reference)


def test_so_many_nodes_must_stay_that_any_of_them_hold_the_threshold():
    assert nodes_needed({0: 10, 1: 1, 2: 1}, 3) == 3        # two could be the small ones
    assert nodes_needed({0: 10, 1: 1, 2: 1}, 2) == 2
    assert nodes_needed(dict.fromkeys(range(9), 1), 3) == 5  # and more than half
    assert nodes_needed(dict.fromkeys(range(5), 6), 8) == 3


def test_a_cohort_is_drawn_once_also_when_it_is_drawn_ahead():
    drawn = []

    class Noted(fedtail.Uniform):
        def __call__(self, population, seed, round):
            drawn.append(round)
            return super().__call__(population, seed, round)

    algorithm = replace(RECIPES["fedavg"], sample=Noted(20))
    train(algorithm, TASK, fleet=Sites().fleet(), rounds=3, channel=CHANNEL, privacy=fedtail.PrivacyBudget(randomness="os"))
    assert drawn == [0, 1, 2, 3]


@pytest.mark.parametrize("name", RECIPES)
def test_the_server_knows_how_wide_a_row_is(name):
    widths = []

    class Noted(IntegerChannel):
        def collect(self, questions, encoding, *rest):
            found = super().collect(questions, encoding, *rest)
            widths.extend((one.width(18), len(total)) for one, total in zip(questions, found, strict=True))
            return found

    train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=Noted())
    assert widths
    assert all(expected == found for expected, found in widths)


def test_a_node_that_answers_under_masks_only_says_nothing_in_the_clear():
    fleet = Sites(masked_only=True).fleet()
    with pytest.warns(fedtail.algorithm.RoundLostWarning, match="no node answered"):
        train(RECIPES["fedavg"], TASK, fleet=fleet, rounds=1, channel=IntegerChannel())
    assert set(fleet.reports[0].problems.values()) == {"this node answers under masks only (masked_only)."}
    train(RECIPES["fedavg"], TASK, fleet=Sites(masked_only=True).fleet(), rounds=1, channel=CHANNEL)


class DepartingFleet(RemoteFleet):
    """A server that does not send all nodes what it says: `changed(node, broadcast)` is what a node is told instead, and `cohort` of
    whom else is in the round."""

    def __init__(self, sites, changed=lambda node, told: told, cohort=lambda node, members: members, **settings):
        super().__init__(sites.exchange, sites.registry, **settings)
        self.changed, self.cohort = changed, cohort

    def open_round(self, cohort, broadcast):
        super().open_round(cohort, broadcast)
        for node in self._counts:
            told = Open(self.population.cohort_at(cohort, node), self.changed(node, self._broadcast), self._nodes.training, self._nodes.lost,
                        self.cohort(node, self._members))
            self._unsent[node][-1] = pack(told)


def test_a_node_takes_no_noise_from_a_seed_of_the_server():
    """Who knows the seed could take the noise off: whatever is sent, noise is the node's own."""
    method = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=20, **LOCAL)
    found = [params_of(train(method, TASK, fleet=DepartingFleet(Sites(), lambda node, told: replace(told, noise_seed=7)), rounds=1, seed=0,
                             channel=SecureChannel(20, minimum_contributors=3))) for _ in range(2)]
    assert not found[0].equal(TASK.params())
    assert not found[0].equal(found[1])


@pytest.mark.parametrize("change", [lambda told: replace(told, params=told.params + 1e-7), lambda told: replace(told, seed=told.seed + 1)])
def test_a_node_that_is_sent_another_model_has_another_context(change):
    """Its masks are bound to the model, so that a server cannot have one node answer about a model of its own."""
    fleet = DepartingFleet(Sites(), lambda node, told: change(told) if node == 3 else told, schedule="simple")
    train(RECIPES["fedavg"], TASK, fleet=fleet, rounds=1, channel=CHANNEL)
    assert 0 < fleet.reports[0].answered < fleet.reports[0].sampled
    assert [list(report.problems) for report in fleet.reports] == [[3]] * len(fleet.reports)
    assert "has another context than this server" in fleet.reports[0].problems[3]


@pytest.mark.parametrize("schedule", ["simple", "all-or-nothing"])
def test_nodes_that_are_told_of_other_cohorts_have_other_contexts(schedule):
    """A server cannot tell one node of a large cohort, as its policy wants, and the others of the small one that there is."""
    def larger(node, members):
        return members + torch.tensor([0, 100]) * (members[:, :1] != node) if node == 3 else members

    fleet = DepartingFleet(Sites(), cohort=larger, schedule=schedule)
    with warnings.catch_warnings(action="ignore"):                       # all-or-nothing: the round is lost
        train(RECIPES["fedavg"], TASK, fleet=fleet, rounds=1, channel=CHANNEL)
    assert list(fleet.reports[0].problems) == [3]
    assert "context" in fleet.reports[0].problems[3]


def test_a_node_of_which_nothing_is_said_answers_under_masks_only(tmp_path):
    """Unknown is the safe case: in the clear only where somebody wrote so."""
    ask = encode_message(NodeMessage(b"run", 3, 1, ask=b"question"))
    for settings in ({}, {"masked_only": True}):
        site = Site(lambda: Node(PEOPLE, TASK, workers=1), **settings)
        assert read_reply(ask, site.handle(ask)).problem == b"this node answers under masks only (masked_only)."
    settings = NodeSettings(tmp_path, "north", "experiment.toml", "d.npz")
    assert read_reply(ask, settings.make_site().handle(ask)).problem == b"this node answers under masks only (masked_only)."


def test_a_site_is_one_node_in_a_run_and_tells_no_data():
    site = Site(lambda: Node(PEOPLE, TASK, workers=1), masked_only=False)
    first = encode_message(NodeMessage(b"run", 3, 1))
    assert read_reply(first, site.handle(first)).problem == b""
    other = encode_message(NodeMessage(b"run", 4, 2))
    assert read_reply(other, site.handle(other)).problem == b"a message is for node 4, and this is node 3."
    with pytest.raises(Refused, match="answer to another message"):
        read_reply(first, site.handle(other))
    with pytest.raises(Refused):
        read_reply(first, b"rubbish")
    assert read_reply(b"rubbish", site.handle(b"rubbish")).problem

    def broken():
        raise ValueError("the patient's value is 17.5")

    ask = encode_message(NodeMessage(b"run", 3, 1, ask=b"question"))
    said = read_reply(ask, Site(broken, masked_only=False).handle(ask)).problem.decode()
    assert said == "ValueError on the node; its own log says more."


def test_a_node_joins_after_the_others():
    registry = replace(registry_of(PEOPLE, 3), group=None)
    more = registry.with_node(3, torch.tensor([100, 101]), torch.ones(2))
    assert more.node[-2:].tolist() == [3, 3]
    assert more.place[-2:].tolist() == [0, 1]
    for node, key, text in ((2, [100], "the next number"), (3, [0], "keys others have already")):
        with pytest.raises(ValueError, match=text):
            registry.with_node(node, torch.tensor(key), torch.ones(1))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Sites(nodes=1), "1 node holds all clients"),
    (lambda: replace(CHANNEL, masks="none"), "nodes mask their rows and drop out by themselves"),
    (lambda: replace(CHANNEL, dropout=0.1), "nodes mask their rows and drop out by themselves"),
    (lambda: "sideways", "schedule must be ahead, simple or all-or-nothing, got 'sideways'."),
])
def test_refusals(make, text):
    made = make()
    sites = made if isinstance(made, Sites) else Sites()
    channel, schedule = made if isinstance(made, SecureChannel) else CHANNEL, made if isinstance(made, str) else "ahead"
    with pytest.raises(ValueError, match=text):
        train(RECIPES["fedavg"], TASK, fleet=sites.fleet(schedule=schedule), rounds=1, channel=channel)


def test_masked_are_sums_of_integers():
    node = Node(PEOPLE, TASK, workers=1)
    from fedtail.deployment.node import Ask, Open
    from fedtail.wire import pack

    algorithm = RECIPES["fedavg"]
    node.receive_broadcast(pack(Open(algorithm.sample(PEOPLE, 0, 0), algorithm.broadcast(algorithm.initial_state(TASK.params(), 0), 0))))
    question = Train(algorithm.local, algorithm.risk, torch.zeros(0), algorithm.aggregate)
    code = IntegerChannel(40).encoding(20, 1.0)
    for wrong, bits in ((Ask(0, (question,), code), 62), (Ask(0, (replace(question, gather=True),), code), 40)):
        with pytest.raises(Refused, match="masked are sums of integers"):
            node.integer_row(pack(wrong), bits)
    row, _ = node.integer_row(pack(Ask(0, (question, Statistic(fedtail.quantiles.radix.Digit(20, 12), torch.tensor(0))), code)), 40)
    assert len(row) == 19 + 4096 + 1
