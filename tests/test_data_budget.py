"""What a node's data may answer is counted on its own disk, over all runs, servers and restarts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import fedtail
from fedtail import train
from fedtail.algorithm import RoundLostWarning
from fedtail.deployment import Node, Site
from fedtail.deployment.agreement import Agreement
from fedtail.deployment.data_budget import LEDGER, ROUNDS, DataBudget
from fedtail.deployment.deployed_experiment import deployed_experiments
from fedtail.deployment.policy import NodePolicy
from fedtail.deployment.policy_example import policy_example
from fedtail.fleet import Broadcast
from fedtail.privacy.accounting import guarantee
from fedtail.privacy.events import NoSampling, RoundEvent
from fedtail.secure.encoding import Refused
from fedtail.wire import pack, unpack
from test_agreement import CHANNEL, NOISY, SUMS, TYPES, answer, asked_of_first_node, changed

from remote_cases import LOCAL, TASK, Sites

BARE = NodePolicy(smallest_cohort=10, smallest_tail=1, questions=8, repeats=1, rounds_without_noise=2)
PRIVATE = replace(BARE, rounds_without_noise=None, epsilon=40.0, delta=1e-5)


def budgeted(node, folder, policy):
    """A new process of the same node, with the budget in `folder`."""
    return Node(node.fleet.population, TASK, workers=1, agreements=node.agreements, budget=DataBudget(folder, policy))


class BudgetedSites(Sites):
    """Nodes that have accepted `method`, each with a budget by `policy` in `folder`."""

    def __init__(self, method, folder, policy, **settings):
        self.make = lambda node: Node(self.people[node], TASK, workers=1, agreements=[Agreement(method)],
                                      budget=DataBudget(folder / str(node), policy))
        super().__init__(**settings)

    def fresh(self, node):
        return Site(lambda: self.make(node), masked_only=False)


def test_a_data_set_answers_so_many_rounds_without_noise_over_all_trainings(tmp_path):
    method = SUMS["fedavg"]
    for _ in range(2):
        sites = BudgetedSites(method, tmp_path, BARE)
        trained = train(method, TASK, fleet=sites.fleet(), rounds=1, channel=CHANNEL, progress=False)
        assert not torch.equal(trained.state.params, TASK.params())
    sites = BudgetedSites(method, tmp_path, BARE)
    with pytest.warns(RoundLostWarning):
        trained = train(method, TASK, fleet=sites.fleet(), rounds=1, channel=CHANNEL, progress=False)
    assert torch.equal(trained.state.params, TASK.params())
    assert DataBudget(tmp_path / "0", BARE).spent_text() == (
        "3 rounds begun, 2 of them answered, of 2 that the policy allows")


def test_a_private_budget_is_charged_before_the_answer_and_agrees_with_the_accountant(tmp_path):
    node, opening, ask = asked_of_first_node(NOISY, "Statistic")
    mine = budgeted(node, tmp_path, PRIVATE)
    answer(mine, opening, ask)
    release = ask.questions[0].release(TASK.params().numel())
    expected = guarantee([(RoundEvent((release,), NoSampling()), 1)], 1e-5).epsilon
    told = DataBudget(tmp_path, PRIVATE).spent_text()
    assert f"epsilon {expected:.4g}" in told
    before = (tmp_path / LEDGER).read_bytes()
    again = budgeted(node, tmp_path, PRIVATE)
    again.restore(mine.save())
    for one, asked in ((mine, changed(ask, number=5)), (again, ask)):      # the same question, also after a restart: nothing is charged
        with pytest.raises(Refused, match="the same noise in a second sum"):
            answer(one, opening, asked)
    assert (tmp_path / LEDGER).read_bytes() == before
    small = replace(PRIVATE, epsilon=1.01 * expected)
    other = replace(unpack(opening, TYPES), training=b"another training")
    with pytest.raises(Refused, match=r"the budget of this data set, .* does not cover it"):
        answer(budgeted(node, tmp_path, small), pack(other), ask)
    assert (tmp_path / LEDGER).read_bytes() == before


def test_with_an_epsilon_nothing_leaves_without_noise_that_clients_add(tmp_path):
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    with pytest.raises(Refused, match="without noise that clients add"):
        answer(budgeted(node, tmp_path, PRIVATE), opening, ask)
    by_server = fedtail.dp_fedavg(30, 1.0, 1.0, cohort_size=30, **LOCAL)
    node, opening, ask = asked_of_first_node(by_server, channel=fedtail.PlainChannel())
    mine = budgeted(node, tmp_path, PRIVATE)
    mine.receive_broadcast(opening)
    with pytest.raises(Refused, match="the updates, by PrivateMean would be released without noise that clients add"):
        mine.answer(pack(ask))


def test_a_node_that_lost_its_answers_pays_for_new_noise(tmp_path):
    node, opening, ask = asked_of_first_node(NOISY, "Statistic")
    answer(budgeted(node, tmp_path, PRIVATE), opening, ask)
    once = (tmp_path / LEDGER).stat().st_size
    answer(budgeted(node, tmp_path, PRIVATE), opening, ask)
    assert (tmp_path / LEDGER).stat().st_size > once


def test_a_replayed_round_is_refused_and_the_same_round_once_more_is_free(tmp_path):
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    began = unpack(opening, TYPES)
    for k in range(3):
        mine = budgeted(node, tmp_path, BARE)
        answer(mine, opening, ask)                                  # contents as they were: a server that was started again
        assert len((tmp_path / ROUNDS).read_text().splitlines()) == 2, k
    def other(seed):
        return pack(replace(began, broadcast=replace(began.broadcast, seed=seed)))
    answer(budgeted(node, tmp_path, BARE), other(1), ask)           # one repeat is allowed, and is a second round without noise
    with pytest.raises(Refused, match="was held here before, and its policy allows 1 rounds"):
        answer(budgeted(node, tmp_path, BARE), other(2), ask)


def test_questions_of_a_round_are_counted_on_disk(tmp_path):
    node, opening, ask = asked_of_first_node(SUMS["tail by radix"], "Statistic")
    policy = replace(BARE, questions=2)
    def trial(k):
        return changed(ask, trial=ask.questions[0].trial + k)
    for k in (0, 1):
        answer(budgeted(node, tmp_path, policy), opening, trial(k))
    with pytest.raises(Refused, match="more than 2 questions are asked in round 0"):
        answer(budgeted(node, tmp_path, policy), opening, trial(2))
    assert len(answer(budgeted(node, tmp_path, policy), opening, trial(1)))


def test_small_cohorts_are_refused_and_small_tails_left_out(tmp_path):
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    with pytest.raises(Refused, match="the round has 30 clients, and this node's policy takes part in those of 31 or more"):
        answer(budgeted(node, tmp_path, replace(BARE, smallest_cohort=31)), opening, ask)
    here = len(node.fleet.population)
    for kind in ("Train", "Statistic"):                             # how many are here is known to the server
        node, opening, ask = asked_of_first_node(SUMS["tail by radix"], kind)
        with pytest.raises(Refused, match=f"{here} clients of this node are in the round, and its policy has {here + 1} or more"):
            answer(budgeted(node, tmp_path / kind, replace(BARE, smallest_tail=here + 1)), opening, ask)
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    assert answer(budgeted(node, tmp_path, replace(BARE, smallest_tail=here)), opening, ask).any()


def test_a_small_tail_is_left_out_whoever_contributed_before_and_the_server_cannot_tell(tmp_path, monkeypatch):
    """One client above the threshold answers as none would: with zeros, and without a word; all of them are in the sum."""
    monkeypatch.setattr(DataBudget, "_refuse_other_weights", lambda *_: None)      # by which there is one threshold in a round
    method = replace(SUMS["tail by radix"], risk=fedtail.Superquantile(0.5))
    node, opening, ask = asked_of_first_node(method)
    began, people = unpack(opening, TYPES), node.fleet.population
    params = torch.randn(began.broadcast.params.shape, generator=torch.Generator().manual_seed(0))
    opening = pack(replace(began, broadcast=replace(began.broadcast, params=params)))
    weight, bias = params[0, :15].view(3, 5), params[0, 15:]
    losses = [float(torch.nn.functional.cross_entropy(x @ weight.T + bias, y)) for x, y in map(people.client, range(len(people)))]

    def above(threshold):
        return changed(ask, dual=torch.full_like(ask.questions[0].dual, threshold))

    mine = budgeted(node, tmp_path, replace(BARE, smallest_tail=3))
    top = sorted(losses)
    for threshold, left_out in ((top[0] - 1, False), (sum(top[-2:]) / 2, True), (top[-1] + 1, True), (sum(top[-4:-2]) / 2, False)):
        assert answer(mine, opening, above(threshold))[:-1].any() != left_out, threshold


def test_a_record_that_was_cut_or_damaged_is_not_taken_for_a_fresh_one(tmp_path):
    node, opening, ask = asked_of_first_node(SUMS["fedavg"])
    mine = budgeted(node, tmp_path, BARE)
    answer(mine, opening, ask)
    path, whole = tmp_path / ROUNDS, (tmp_path / ROUNDS).read_bytes()
    path.write_bytes(whole + b'{"training": "a crash cut thi')
    budgeted(node, tmp_path, BARE).receive_broadcast(opening)       # which was never answered
    assert path.read_bytes() == whole
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(Refused, match="is not what was written: lines were cut, changed or lost"):
        budgeted(node, tmp_path, BARE).receive_broadcast(opening)
    path.write_bytes(b"")
    with pytest.raises(Refused, match="is not what was written"):
        mine.budget.begin_round(b"t", 0, b"o")


@pytest.mark.parametrize(("text", "problem"), [
    ("smallest_cohort = 3\n", "does not say smallest_tail, and what is not said is not allowed"),
    ("smallest_cohort = 3\nsmallest_tail = 1\nquestions = 4\nrepeats = 1\n", "has one budget for the data set"),
    ("smallest_cohort = 3\nsmallest_tail = 1\nquestions = 4\nrepeats = 1\nepsilon = 2.0\n", "has one budget for the data set"),
    ("smallest_cohort = 1\nsmallest_tail = 1\nquestions = 4\nrepeats = 1\nrounds_without_noise = 2\n", "smallest_cohort must be 2 or more"),
    ("smallest_cohort = 3\nsmallest_tail = 1\nquestions = 4\nrepeats = 1\nepsilon = inf\ndelta = 1e-5\n", "epsilon must be positive and finite"),
    ("smallest_cohort = true\n", "smallest_cohort must be a whole number"), ("cohort = 3\n", "has no setting 'cohort'")])
def test_a_policy_says_everything(tmp_path, text, problem):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ValueError, match=problem):
        NodePolicy.read(tmp_path / "policy.toml")


@pytest.mark.parametrize("noise", [False, True])
def test_the_example_is_just_enough_for_the_experiment(tmp_path, noise):
    private = '[aggregate]\npart = "PrivateMean"\nclip_norm = 1.0\ntotal = 20.0\nnoise = { part = "DiscreteNoise", ' \
        'noise_multiplier = 2.0, planned_clients = 12 }\n[sample]\npart = "Poisson"\nrate = 0.5\npopulation = 40\n'
    (tmp_path / "e.toml").write_text('rounds = 7\n[data]\nkind = "digits"\n[local]\nlearning_rate = 0.1\nbatch_size = 4\n'
                                     '[task.module]\npart = "SoftmaxRegression"\nfeatures = 64\nclasses = 10\n'
                                     + (private if noise else "[sample]\ncohort_size = 20\n"))
    (tmp_path / "policy.toml").write_text(policy_example(tmp_path / "e.toml"))
    policy = NodePolicy.read(tmp_path / "policy.toml")
    if not noise:
        assert (policy.rounds_without_noise, policy.budget_text) == (7, "7 rounds whose sums may have no noise")
        return
    experiment, = deployed_experiments(tmp_path / "e.toml")
    event = RoundEvent(experiment.algorithm.releases(experiment.task.make(0).params().numel()), NoSampling())
    assert guarantee([(event, 7)], policy.delta).epsilon <= policy.epsilon < guarantee([(event, 8)], policy.delta).epsilon


@pytest.mark.parametrize(("more", "cohort"), [
    ("[sample]\ncohort_size = 22\n", 22), ('[sample]\npart = "ByMass"\ncohort_size = 22\n', 12), ('[sample]\npart = "Everyone"\n', 10),
    ('[sample]\npart = "ByMass"\ncohort_size = 22\n[channel]\npart = "SecureChannel"\nthreshold = 9\nminimum_contributors = 4\n', 9)])
def test_a_written_policy_allows_no_smaller_cohorts_than_the_experiment_has(tmp_path, more, cohort):
    file = tmp_path / "e.toml"
    file.write_text('rounds = 3\n[task.module]\npart = "SoftmaxRegression"\nfeatures = 5\nclasses = 3\n[local]\nlearning_rate = 0.1\n' + more)
    written = tmp_path / "policy.toml"
    written.write_text(policy_example(file))
    assert NodePolicy.read(written).smallest_cohort == cohort
    with pytest.raises(Refused, match=f"the round has 9 clients, and this node's policy takes part in those of {cohort}") if cohort > 9 else nullcontext():
        node, _, _ = asked_of_first_node(SUMS["fedavg"])
        mine = budgeted(node, tmp_path, NodePolicy.read(written))
        mine._broadcast = Broadcast(0, 0, TASK.params()[None])
        mine._charge_budget({}, 9)
