"""How many of a node's own clients are in a sum: its policy's `smallest_tail`, how that is chosen, and what its operator is told."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtail
from fedtail import train
from fedtail.algorithm import RoundLostWarning
from fedtail.cli import app
from fedtail.deployment import Node
from fedtail.deployment.agreement import Agreement
from fedtail.deployment.contributions import effective_clients
from fedtail.deployment.data_budget import DataBudget
from fedtail.deployment.node import Close
from fedtail.deployment.policy import NodePolicy
from fedtail.deployment.policy_example import policy_example, write_loopback_policy
from fedtail.deployment.settings import NodeSettings
from fedtail.evaluation import FederatedEvaluation
from fedtail.questions import Evaluate
from fedtail.secure.encoding import Refused
from fedtail.wire import pack, unpack
from test_agreement import CHANNEL, SUMS, TYPES, AgreedSites, answer, asked_of_first_node, changed, member_params
from test_data_budget import BudgetedSites

from remote_cases import TASK

POLICY = NodePolicy(smallest_cohort=10, smallest_tail=2, questions=99, repeats=0, rounds_without_noise=9)
TAIL = replace(SUMS["tail by radix"], risk=fedtail.Superquantile(0.5))
SILENT = -1      # the last entry of a masked row: clients that are not in the sum though they were to be


def own(node, folder, policy=POLICY, people=None, test=None):
    """A new process of the same node, with a budget by `policy` in `folder`."""
    return Node(node.fleet.population if people is None else people, TASK, workers=1, agreements=node.agreements, test=test,
                budget=DataBudget(folder, policy))


def at_random(opening):
    """The same round about another model, at which no two losses are alike."""
    began = unpack(opening, TYPES)
    params = torch.randn(began.broadcast.params.shape, generator=torch.Generator().manual_seed(0))
    return pack(replace(began, broadcast=replace(began.broadcast, params=params)))


def losses_at(opening, people):
    """The losses of a node's clients under the model of a round, in falling order."""
    params = unpack(opening, TYPES).broadcast.params[0]
    weight, bias = params[:15].view(3, 5), params[15:]
    found = [float(torch.nn.functional.cross_entropy(x @ weight.T + bias, y)) for x, y in map(people.client, range(len(people)))]
    return sorted(found, reverse=True)


def tail_of(ask, low, high, share):
    """The question to train under this dual: full weight from the loss `high` on, `share` of it from `low` to `high`."""
    return changed(ask, dual=torch.tensor([low, high, share, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(("weights", "effective"), [
    ([], 0), ([0.0, 0.0], 0), ([3.0], 1), ([1.0, 1.0], 2), ([1.0, 1e-12], 1), ([1e-300, 1e-300, 0.0], 2), ([1.0, 0.28], 2), ([1.0, 0.26], 1),
    ([5.0, 5.0, 5.0, 1.0], 3), ([2.0, 1.0, 1.0], 3), ([1e300] * 7, 7), ([math.nan, 1.0], 0)])
def test_clients_are_as_many_as_they_weigh(weights, effective):
    assert effective_clients(torch.tensor(weights, dtype=torch.float64)) == effective


def test_clients_that_contribute_by_name_only_hide_nobody(tmp_path):
    """One client above a threshold and all others with a weight of 1e-12: that is the one client's row."""
    node, opening, ask = asked_of_first_node(TAIL)
    opening = at_random(opening)
    top = losses_at(opening, node.fleet.population)
    for k, (low, high, share, answered) in enumerate((
            (0.0, sum(top[:2]) / 2, 1e-12, False), (0.0, sum(top[:2]) / 2, 0.2, True), (sum(top[1:3]) / 2, sum(top[:2]) / 2, 0.9, True),
            (sum(top[1:3]) / 2, sum(top[:2]) / 2, 0.2, False), (sum(top[1:3]) / 2, sum(top[:2]) / 2, 1e9, False))):
        row = answer(own(node, tmp_path / str(k)), opening, tail_of(ask, low, high, share))
        assert row[:SILENT].any() == answered, (low, high, share)
        assert (row[SILENT] == 0) == answered


def test_a_client_that_outweighs_the_others_is_alone(tmp_path):
    """By its mass: the policy asks for effective clients, whoever chose the weights."""
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    began, people = unpack(opening, TYPES), node.fleet.population
    mass = torch.ones(len(people), dtype=torch.float64)
    mass[0] = 1000.0
    opening = pack(replace(began, cohort=replace(began.cohort, mass_bound=1000.0)))
    ask = replace(ask, encoding=CHANNEL.encoding(30, 1000.0))
    assert answer(own(node, tmp_path / "equal"), opening, ask)[:SILENT].any()
    heavy = answer(own(node, tmp_path / "heavy", people=replace(people, mass=mass)), opening, ask)
    assert not heavy[:SILENT].any()
    assert heavy[SILENT] == len(people)


def test_clients_that_failed_hide_nobody(tmp_path):
    """Two are above the threshold, and the server's model makes the update of one of them overflow: the sum would be the other's row."""
    node, opening, ask = asked_of_first_node(TAIL)
    opening, people = at_random(opening), node.fleet.population
    top = losses_at(opening, people)
    question = tail_of(ask, sum(top[1:3]) / 2, sum(top[1:3]) / 2, 1.0)
    assert answer(own(node, tmp_path / "two"), opening, question)[:SILENT].any()
    worst = max(range(len(people)), key=lambda k: losses_at(opening, people.select([k]))[0])

    class Overflows(Node):
        """A node at which one client fails."""

        def _count_left_out(self, question):
            self.fleet._shard.failed[worst] = True
            return super()._count_left_out(question)

    one = Overflows(people, TASK, workers=1, agreements=node.agreements, budget=DataBudget(tmp_path / "one", POLICY))
    row = answer(one, opening, question)
    assert not row[:SILENT].any()
    assert row[SILENT] == 2                                       # the one that failed, and the one that is left out


def test_what_is_left_out_is_told_in_the_masked_sum_so_that_minimum_contributors_holds(tmp_path):
    """An honest server counts contributors before the sum; those that nodes leave out may not be among them."""
    strict, params = replace(POLICY, smallest_tail=6), []         # of six at each node: at the zero start all are in the tail, later half
    for rounds in (1, 2):
        sites = BudgetedSites(TAIL, tmp_path / str(rounds), strict)
        with pytest.warns(RoundLostWarning, match="round 1 is lost, .*clients") if rounds == 2 else nullcontext():
            params.append(train(TAIL, TASK, fleet=sites.fleet(), rounds=rounds, channel=CHANNEL, progress=False).state.params)
    assert torch.equal(*params)
    assert params[0].any()


def test_a_group_of_one_client_is_left_out_of_sums_by_group(tmp_path):
    node, opening, ask = asked_of_first_node(SUMS["afl"], "Statistic")
    people = node.fleet.population
    group = torch.tensor([0, *[1] * (len(people) - 2), 2])
    alone = own(node, tmp_path / "alone", replace(POLICY, smallest_tail=1), people=replace(people, group=group))
    hidden = own(node, tmp_path / "hidden", people=replace(people, group=group))
    every, some = answer(alone, opening, ask), answer(hidden, opening, ask)
    mass, lifted = every[:SILENT].reshape(2, 3)
    assert mass.all()
    assert lifted.all()
    assert some[:SILENT].reshape(2, 3).tolist() == [[0, mass[1], 0], [0, lifted[1], 0]]
    assert (every[SILENT], some[SILENT]) == (0, 2)


def test_an_evaluation_of_one_client_is_left_out(tmp_path):
    evaluation = FederatedEvaluation(loss_bound=5.0)
    people = AgreedSites(SUMS["fedavg"]).people[0]
    _, opening, ask = asked_of_first_node(SUMS["fedavg"])
    for k, (examined, answered) in enumerate((([0], False), ([0, 1], True))):
        mine = Node(people, TASK, workers=1, test=people.select(examined), agreements=[Agreement(SUMS["fedavg"], evaluation, CHANNEL)],
                    budget=DataBudget(tmp_path / str(k), POLICY))
        row = answer(mine, opening, replace(ask, questions=(Evaluate(evaluation.client_half),)))
        assert row[:SILENT].any() == answered


@pytest.mark.parametrize("restarted", [False, True])
def test_a_round_has_one_rule_of_who_contributes(tmp_path, restarted):
    """The difference of two sums with different thresholds is those between; also after a restart, and when the round is begun anew."""
    node, opening, ask = asked_of_first_node(TAIL)
    opening = at_random(opening)
    top = losses_at(opening, node.fleet.population)
    both = [tail_of(ask, t, t, 1.0) for t in (top[-1] - 1, sum(top[-2:]) / 2)]
    mine = own(node, tmp_path)
    first = answer(mine, opening, both[0])
    if restarted:
        mine = own(node, tmp_path)
    else:
        mine.receive_broadcast(pack(Close(mine.round, False)))
    with pytest.raises(Refused, match="by two rules of who contributes in one round, without noise"):
        answer(mine, opening, both[1])
    assert (answer(mine, opening, both[0]) == first).all()


@pytest.mark.parametrize("name", SUMS)
def test_no_method_has_two_rules_in_a_round(tmp_path, name):
    """The model after two rounds on nodes with a policy is that of nodes without one, to the last bit."""
    policy = replace(POLICY, smallest_tail=1)
    found = [train(SUMS[name], TASK, fleet=sites.fleet(), rounds=2, channel=fedtail.IntegerChannel(), progress=False)
             for sites in (AgreedSites(SUMS[name]), BudgetedSites(SUMS[name], tmp_path, policy))]
    for one, other in zip(*(member_params(trained) for trained in found), strict=True):
        assert torch.equal(one, other)


# How it is chosen

HEAD = 'rounds = 3\n[task.module]\npart = "SoftmaxRegression"\nfeatures = 5\nclasses = 3\n[local]\nlearning_rate = 0.1\n'
RISK = '[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n'
EVERYONE, MANY, FEW = '[sample]\npart = "Everyone"\n', "[sample]\ncohort_size = 30\n", "[sample]\ncohort_size = 8\n"
HIDES = '[channel]\npart = "SecureChannel"\nthreshold = 5\nminimum_contributors = {}\n'
NOISE = ('[aggregate]\npart = "PrivateMean"\nclip_norm = 1.0\ntotal = 20.0\nnoise = {{ part = "DiscreteNoise", noise_multiplier = 2.0, '
         'planned_clients = 12 }}\n[sample]\npart = "Poisson"\nrate = 0.5\npopulation = 40\n')


@pytest.mark.parametrize(("more", "clients", "minimum", "tail", "why"), [
    (MANY, 10, 3, 1, "no number of the server's says who"),
    (MANY + RISK, None, 3, 2, "The server's numbers, such as a threshold, say who contributes."),
    (MANY + RISK, 1000, 3, 2, "With 1 the server could read a client's row."),
    (EVERYONE + RISK, 1, 3, 2, "say who contributes"), (EVERYONE + RISK, 20, 3, 5, "say who contributes"),
    (EVERYONE + RISK, 1000, 3, 10, "say who contributes"), (EVERYONE + RISK + HIDES.format(4), 1000, 3, 4, "say who contributes"),
    ('[sample]\npart = "Poisson"\nrate = 0.5\n' + RISK, 24, 3, 3, "say who contributes"),
    (FEW + RISK + HIDES.format(3), 10, 3, 1, "THE TAIL OF THIS EXPERIMENT IS SMALL: about 4 clients at 3 nodes or more"),
    (FEW + RISK + HIDES.format(3), 10, 2, 2, "say who contributes"),
    (MANY + '[risk]\npart = "PowerFair"\npower = 1.0\n', 10, 3, 2, "say who contributes"),
    (NOISE.replace("{{", "{").replace("}}", "}"), 10, 3, 1, "Every sum has noise that clients add"),
    (MANY + '[[method]]\nname = "A"\n[[method]]\nname = "B"\nrisk = { part = "TailFilter", tail_fraction = 0.5 }\n', 10, 3, 2, "say who contributes")])
def test_a_written_policy_says_how_small_a_tail_may_be_and_why(tmp_path, more, clients, minimum, tail, why):
    (tmp_path / "e.toml").write_text(HEAD + more)
    text = policy_example(tmp_path / "e.toml", clients=clients, minimum=minimum)
    (tmp_path / "policy.toml").write_text(text)
    assert NodePolicy.read(tmp_path / "policy.toml").smallest_tail == tail
    assert why in text.replace("\n# ", " ")


def node_of(folder, sizes, more=MANY + RISK, settings=""):
    """A node whose clients have so many examples each."""
    chance = np.random.default_rng(0)
    np.savez(folder / "people.npz", x=chance.normal(size=(sum(sizes), 5)).astype("float32"), y=chance.integers(0, 3, sum(sizes)),
             client=np.repeat(np.arange(len(sizes)), sizes))
    (folder / "e.toml").write_text(HEAD + more)
    (folder / "node.toml").write_text(f'name = "north"\nexperiment = "e.toml"\ndata = "people.npz"\n{settings}')
    return folder / "node.toml"


def node_command(*words):
    done = CliRunner().invoke(app, ["node", *map(str, words)])
    return " ".join(done.output.split())


ALONE = "ONE CLIENT OF YOURS MAY BE ALONE IN A SUM (smallest_tail = 1)"


@pytest.mark.parametrize(("sizes", "more", "said"), [
    ([20] * 10, MANY + RISK, "in a sum without noise 2 clients of yours or more, by weight, or none"),
    ([20], MANY + RISK, "TOO FEW CLIENTS: by weight the 1 here are as many as 1, and without noise nothing of them is released"),
    ([900, 10, 10, 10], MANY + RISK, "TOO FEW CLIENTS: by weight the 4 here are as many as 1"),
    ([20] * 3, MANY + RISK, "FEW CLIENTS: about 1.5 of the 3 here are in a tail, and where fewer than 2 are, this node's part is zeros"),
    ([20] * 10, FEW + RISK + HIDES.format(3), f"{ALONE}: the server's numbers say who contributes, and it could read that client's row"),
    ([20] * 10, MANY, f"{ALONE}, beside clients of other nodes")])
def test_a_node_is_told_in_words_whether_one_client_may_be_alone_and_whether_it_has_enough(tmp_path, sizes, more, said):
    node = node_of(tmp_path, sizes, more)
    assert said in node_command("init", node)
    told = node_command("accept", node)
    assert (ALONE in told) == (ALONE in said)
    assert said in told or ALONE not in said
    assert said in node_command("check", node)


def test_where_clients_add_noise_nothing_is_said_about_tails(tmp_path):
    node = node_of(tmp_path, [20] * 40, NOISE.replace("{{", "{").replace("}}", "}"))
    assert not any("CLIENT" in node_command(*words) for words in (("init", node), ("accept", node), ("check", node)))


def test_a_node_without_data_yet_has_a_policy_all_the_same(tmp_path):
    node = node_of(tmp_path, [20] * 10)
    (tmp_path / "people.npz").unlink()
    assert "smallest_tail = 2" in node_command("init", node)


def test_on_ones_own_machine_one_client_may_be_alone_and_the_policy_says_so(tmp_path):
    node_of(tmp_path, [20] * 10)
    write_loopback_policy(tmp_path)
    settings = NodeSettings.read(tmp_path / "node.toml")
    assert settings.read_policy().smallest_tail == 1
    assert "ONE CLIENT MAY BE ALONE IN A SUM" in (tmp_path / "policy.toml").read_text()
