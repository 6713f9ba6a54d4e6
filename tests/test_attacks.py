"""Corrupted clients: who they are, what each attack does, against hand-written loops; and that only the benign are judged."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytest import approx

import fedtail
from fedtail import CoordinateMedian, IntegerChannel, LossFilter, MultiKrum, Population, Superquantile, evaluate, train
from fedtail.algorithm import RoundLostWarning
from fedtail.attacks import ClaimedLoss, InvalidRows, LabelPoisoning, ModelReplacement, RandomUpdates, benign_clients
from fedtail.channel.base import RowsLeftOutWarning
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.engine import LocalFleet, blocks, workers
from fedtail.errors import FieldError
from fedtail.experiment import ExperimentError
from fedtail.experiment.experiment import read_experiment
from test_robust import LOCAL, TASK, task, updates_of

from cases import small_population
from remote_cases import params_of

PEOPLE = small_population(12)
ALL = [LabelPoisoning(0.25), LabelPoisoning(0.25, colluding=True), RandomUpdates(0.25), RandomUpdates(0.25, 0.5, colluding=True), ModelReplacement(0.25, 10.0),
       ClaimedLoss(0.25, 50.0), ClaimedLoss(0.25, 50.0, poisons=True)]


def attacked(attack, method=None, people=PEOPLE, rounds=1, module=TASK, channel=None, **settings):
    with LocalFleet(people, module, attack=attack, **{"workers": 1, **settings}) as fleet:
        return train(method or fedtail.fedavg(len(people), **LOCAL), module, fleet=fleet, rounds=rounds, channel=channel or fedtail.PlainChannel())


def step(trained, module=TASK):
    return trained.state.params - module.params()


# Who is corrupted

@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.29, 29), (0.5, 50), (1.0, 100)])
def test_a_fraction_of_the_clients_is_corrupted_and_stays_so(fraction, count):
    people = Population.from_arrays(torch.zeros(100, 1), torch.arange(100) % 2, torch.arange(100))
    mask = LabelPoisoning(fraction, seed=3).corrupted(people)
    assert int(mask.sum()) == count
    assert torch.equal(mask, RandomUpdates(fraction, seed=3).corrupted(people))      # the draw is the clients', not the attack's
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(LabelPoisoning(fraction, seed=3).corrupted(people.select(order)), mask[order])
    smaller = LabelPoisoning(fraction / 2, seed=3).corrupted(people)
    assert bool((mask | ~smaller).all())                                   # a larger fraction corrupts the same and more


def test_the_corrupted_are_drawn_uniformly_and_by_the_seed():
    """Of 400 seeds each of 20 clients is corrupted in about a quarter: within five standard deviations, 1e-5 of error for all."""
    people = Population.from_arrays(torch.zeros(20, 1), torch.arange(20) % 2, torch.arange(20))
    often = torch.stack([LabelPoisoning(0.25, seed=seed).corrupted(people) for seed in range(400)]).double().mean(0)
    assert bool(((often - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / 400)).all())


def test_clients_can_be_named():
    attack = ModelReplacement(0.0, 3.0, clients=(2, 7))
    assert attack.corrupted(PEOPLE).nonzero().flatten().tolist() == [2, 7]


# What each does

def poisoned_targets(attack, people=PEOPLE):
    return attack.on_population(people).poisoned(people).targets


def test_labels_of_corrupted_clients_are_uniform_and_those_of_others_stay():
    """12,000 labels of three classes, each a third whatever it was, within five standard deviations."""
    random = torch.Generator().manual_seed(0)
    people = Population.from_arrays(torch.zeros(24_000, 1), torch.randint(0, 3, (24_000,), generator=random), torch.arange(24_000) // 1000)
    attack = LabelPoisoning(0.5, seed=1)
    bad, targets = attack.corrupted(people).repeat_interleave(people.size), poisoned_targets(attack, people)
    assert torch.equal(targets[~bad], people.targets[~bad])
    assert int(bad.sum()) == 12_000
    for true in range(3):
        was = targets[bad & (people.targets == true)].bincount(minlength=3).double()
        assert bool(((was / was.sum() - 1 / 3).abs() < 5 * math.sqrt(2 / 9 / float(was.sum()))).all())
    assert torch.equal(people.targets, poisoned_targets(LabelPoisoning(0.0), people))


@pytest.mark.parametrize("labels", [(0, 1), (-1, 1), (-1.0, 1.0), (3, 7)])
def test_one_of_two_labels_is_flipped(labels):
    y = torch.tensor(labels).repeat(10)
    people = Population.from_arrays(torch.zeros(20, 1), y, torch.arange(20) // 4)
    attack = LabelPoisoning(0.4, seed=2)
    bad = attack.corrupted(people).repeat_interleave(people.size)
    assert torch.equal(poisoned_targets(attack, people), torch.where(bad, sum(labels) - y, y))


def test_colluders_take_the_next_class_and_padding_stays():
    y = [[0, 1], [2, 2, 1], [1]]
    people = Population.from_clients([([[0.0, 0.0, 0.0]], [labels]) for labels in y])
    targets = poisoned_targets(LabelPoisoning(1.0, colluding=True), people)
    assert targets.tolist() == [[1, 2, -100], [0, 0, 2], [2, -100, -100]]
    again = poisoned_targets(LabelPoisoning(1.0), people)
    assert (again == -100).tolist() == (people.targets == -100).tolist()


def test_labels_that_are_numbers_are_not_poisoned_but_refused():
    people = Population.from_arrays(torch.zeros(6, 1), torch.rand(6), torch.arange(6))
    with pytest.raises(ValueError, match="labels are poisoned where there are classes, and these targets take 6 real values"):
        LabelPoisoning(0.5).on_population(people)
    assert InvalidRows(0.5).on_population(people).labels == ()


def test_any_part_of_the_population_is_poisoned_alike():
    """As actors hold it, a shard each."""
    whole = LabelPoisoning(0.5).on_population(PEOPLE)
    for chosen in (torch.arange(5), torch.tensor([11, 3, 4])):
        part = whole.poisoned(PEOPLE.select(chosen))
        for k, client in enumerate(chosen.tolist()):
            assert torch.equal(part.client(k)[1], whole.poisoned(PEOPLE).client(client)[1])


def mean_update(updates, mass=PEOPLE.mass):
    return (mass[:, None] * updates).sum(0) / mass.sum()


@pytest.mark.parametrize("attack", [LabelPoisoning(0.25), LabelPoisoning(0.25, colluding=True), ModelReplacement(0.25, 10.0), ModelReplacement(0.5, 0.5, seed=4)], ids=repr)
def test_poisoned_and_replaced_models_against_a_loop(attack):
    bad = attack.corrupted(PEOPLE)
    updates, _ = updates_of(TASK, attack.on_population(PEOPLE).poisoned(PEOPLE))
    factor = attack.scale if isinstance(attack, ModelReplacement) else 1.0
    want = mean_update(torch.where(bad[:, None], factor * updates, updates))
    assert step(attacked(attack)).numpy() == approx(want.numpy(), abs=1e-10)
    assert float((want - mean_update(updates_of(TASK, PEOPLE)[0])).norm()) > 1e-3


@pytest.mark.parametrize("scale", [None, 2.0])
def test_random_updates_are_gaussian_of_the_stated_deviation(scale):
    """By sending one client's update alone: mean, deviation and kurtosis of 20,000 entries within five standard errors."""
    people = Population.from_arrays(torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1]), torch.tensor([0, 0, 1, 1]))
    module = fedtail.Task(fedtail.models.SoftmaxRegression(2000, 10))
    attack = RandomUpdates(0.5, scale, seed=1)
    bad = int(attack.corrupted(people).nonzero())
    people = replace(people, mass=torch.where(torch.arange(2) == bad, 1.0, 1e-30).double())
    sent = step(attacked(attack, fedtail.fedavg(2, **LOCAL), people, module=module), module).double()
    honest = step(attacked(LabelPoisoning(0.5, seed=1), fedtail.fedavg(2, **LOCAL), people, module=module), module).double()
    deviation = scale or float(honest.std(correction=0))
    count = len(sent)
    assert abs(float(sent.mean())) < 5 * deviation / math.sqrt(count)
    assert float(sent.std()) == approx(deviation, rel=5 / math.sqrt(2 * count))
    assert float(((sent / sent.std()) ** 4).mean()) == approx(3, abs=5 * math.sqrt(96 / count))


def test_colluders_send_one_update_and_others_each_their_own():
    rows = {}
    for attack in (RandomUpdates(0.5, 1.0, colluding=True), RandomUpdates(0.5, 1.0)):
        fleet = Keeping(PEOPLE, TASK, workers=1, attack=attack)
        train(replace(fedtail.fedavg(12, **LOCAL), aggregate=CoordinateMedian()), TASK, fleet=fleet, rounds=2)
        rows[attack.colluding] = [seen[attack.corrupted(PEOPLE), 1:] for seen in fleet.rows]
    assert all(bool((seen == seen[0]).all()) for seen in rows[True])
    assert not torch.equal(*rows[True])                                    # another one in each round
    assert len({tuple(row.tolist()) for seen in rows[False] for row in seen}) == 12


class Keeping(LocalFleet):
    """Keeps the gathered rows."""

    def collect(self, questions, encoding):
        found = super().collect(questions, encoding)
        self.rows = [*getattr(self, "rows", []), *(answer.clone() for question, answer in zip(questions, found, strict=True) if question.gather)]
        return found


def test_clients_that_claim_a_large_loss_are_in_every_tail():
    attack, seen = ClaimedLoss(0.25, 50.0), {}
    for name, one in (("honest", None), ("claimed", attack)):
        with LocalFleet(PEOPLE, TASK, workers=1, attack=one) as fleet:
            views = []
            train(fedtail.delta_fl(0.3, 12, **LOCAL), TASK, fleet=fleet, rounds=4, on_round=lambda p, views=views: views.append(p.view.contributors_of()))
            seen[name] = [attack.corrupted(PEOPLE)[who].double().mean() for who in views]
    corrupted = set(attack.corrupted(PEOPLE).nonzero().flatten().tolist())
    assert min(seen["claimed"]) > max(seen["honest"])
    with LocalFleet(PEOPLE, TASK, workers=1, attack=attack) as fleet:
        train(fedtail.delta_fl(0.3, 12, **LOCAL), TASK, fleet=fleet, rounds=1)
        assert corrupted <= set(fleet.round_view().contributors_of().tolist())


@pytest.mark.parametrize("claim", [50.0, 1e30, 3e38])
def test_a_claimed_loss_has_all_of_a_tilt_however_large_it_is(claim):
    """Every loss is a float32, a claimed one too: the largest that the server hears of is that of the liars."""
    attack = ClaimedLoss(0.25, claim)
    updates, _ = updates_of(TASK, PEOPLE)
    bad = attack.corrupted(PEOPLE)
    want = (PEOPLE.mass[bad, None] * updates[bad]).sum(0) / PEOPLE.mass[bad].sum()
    assert step(attacked(attack, fedtail.term(5.0, 12, **LOCAL))).numpy() == approx(want.numpy(), abs=1e-10)


def test_a_claimed_loss_takes_a_loss_filter_over():
    """It promises nothing against clients that lie about their loss."""
    attack = ClaimedLoss(0.0, 50.0, clients=(3,))
    updates, _ = updates_of(TASK, PEOPLE)
    assert step(attacked(attack, replace(fedtail.fedavg(12, **LOCAL), aggregate=LossFilter(0.0)))).numpy() == approx(updates[3].numpy(), abs=1e-10)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 1e9, -1e9])
def test_invalid_rows_are_left_out_where_rows_are_seen_and_cost_the_round_where_sums_are(value):
    attack = InvalidRows(0.25, value)
    good = ~attack.corrupted(PEOPLE)
    with pytest.warns(RowsLeftOutWarning, match="3 of 12 rows for CoordinateMedian are not finite or beyond their bound"):
        found = step(attacked(attack, replace(fedtail.fedavg(12, **LOCAL), aggregate=CoordinateMedian())))
    assert torch.equal(found, step(train(replace(fedtail.fedavg(9, **LOCAL), aggregate=CoordinateMedian()), TASK, PEOPLE.select(good), rounds=1)))
    single = task(torch.float32)                                       # where 1e300 is infinite
    with pytest.warns(RowsLeftOutWarning, match="3 of 12 rows"):
        attacked(attack, replace(fedtail.fedavg(12, **LOCAL), aggregate=CoordinateMedian()), module=single)
    lost = "asked for sum to .*, and those of 12 clients are from 0 to 348" if math.isfinite(value) else "asked for is not finite"
    for aggregate in (fedtail.WeightedMean(), fedtail.GeometricMedian()):
        with pytest.warns(RoundLostWarning, match=lost):
            assert torch.equal(attacked(attack, replace(fedtail.fedavg(12, **LOCAL), aggregate=aggregate)).state.params, TASK.params())


def test_integers_show_an_invalid_row_only_where_the_sum_of_weights_can_be_nobodys():
    """The sum decodes to numbers of any size: where its weight is one that the cohort may have, a liar cannot be told from the others."""
    with pytest.warns(RoundLostWarning, match="asked for sum to -.*, and those of 12 clients are from 0 to 348") as said:
        found = step(attacked(InvalidRows(0.25), channel=IntegerChannel(), rounds=6))
    assert len(said) < 6
    assert bool(found.isfinite().all())
    assert float(found.norm()) > 100 * float(step(attacked(None)).norm())


@pytest.mark.parametrize(("make", "text"), [
    (lambda: LabelPoisoning(1.5), "fraction must be in [0, 1], got 1.5. It is the share of clients that are corrupted."),
    (lambda: RandomUpdates(0.2, 0.0), "scale must be positive, got 0."),
    (lambda: RandomUpdates(0.2, colluding=True), "scale must be given, got None. Clients that all send one update have agreed on its scale."),
    (lambda: ModelReplacement(0.2, -1.0), "scale must be positive, got -1."),
    (lambda: ClaimedLoss(0.2, math.inf), "loss must be between -3.4e+38 and 3.4e+38, as a float32 is, got inf."),
    (lambda: ClaimedLoss(0.2, 1e39), "loss must be between -3.4e+38 and 3.4e+38, as a float32 is, got 1e+39."),
    (lambda: LabelPoisoning(0.0, clients=(3, 77)).on_population(PEOPLE), "clients must be keys of clients of the training population, got [77]."),
])
def test_attacks_without_meaning_are_refused(make, text):
    with pytest.raises(FieldError) as said:
        make()
    assert str(said.value).startswith(text)


# The same, wherever it is computed

@pytest.mark.parametrize("attack", ALL, ids=repr)
@pytest.mark.parametrize("aggregate", [fedtail.WeightedMean(), MultiKrum(0.3)], ids=["mean", "krum"])
def test_the_number_of_workers_and_the_chunk_change_no_bit(attack, aggregate, monkeypatch):
    for module, name, value in ((blocks, "GRAIN", 64), (blocks, "TOGETHER", 1), (workers, "WORTH_STARTING", 0.0), (workers, "WORTH_SHARING", 0.0)):
        monkeypatch.setattr(module, name, value)
    method = replace(fedtail.fedavg(12, learning_rate=0.3, batch_size=4), risk=Superquantile(0.7), aggregate=aggregate)
    single = task(torch.float32)
    found = [params_of(attacked(attack, method, rounds=2, module=single, **settings)) for settings in ({"workers": 1}, {"workers": 3})]
    assert torch.equal(*found)
    assert torch.allclose(found[0], params_of(attacked(attack, method, rounds=2, module=single, chunk=1)), atol=1e-5)
    assert not torch.allclose(found[0], params_of(attacked(None, method, rounds=2, module=single)), atol=1e-4) or isinstance(attack, ClaimedLoss)


def test_the_population_of_the_user_and_examples_for_evaluation_stay():
    before = PEOPLE.targets.clone()
    with LocalFleet(PEOPLE, TASK, workers=1, test=PEOPLE, attack=LabelPoisoning(1.0)) as fleet:
        assert torch.equal(PEOPLE.targets, before)
        assert not torch.equal(fleet.population.targets, before)
        assert torch.equal(fleet._held_out.population.targets, before)


# Who is judged

def test_an_evaluation_of_benign_clients_is_that_of_a_population_without_the_others():
    attack = ModelReplacement(0.25, 10.0)
    trained = attacked(attack)
    benign = ~attack.corrupted(PEOPLE)
    for weighted in (False, True):
        found = evaluate(trained, PEOPLE, weighted=weighted).of_clients(benign)
        want = evaluate(trained, PEOPLE.select(benign), weighted=weighted)
        assert len(found.error) == 9
        for name in ("loss", "error"):
            assert found[name].summary() == approx(want[name].summary())


def test_clients_of_other_splits_are_matched_by_name_or_key():
    x, y = torch.zeros(8, 1), torch.arange(8) % 2
    named = Population.from_arrays(x, y, ["d", "d", "c", "c", "b", "b", "a", "a"])
    attack = LabelPoisoning(0.0, clients=(int(named.key[1]),))            # client b
    other = Population.from_arrays(x[:4], y[:4], ["b", "b", "e", "e"])
    assert benign_clients(attack, named, named).tolist() == [True, False, True, True]
    assert benign_clients(attack, named, other).tolist() == [False, True]
    nameless = Population.from_clients([(x[:2], y[:2])] * 3)
    assert benign_clients(attack, named, nameless).tolist() == [True, False, True]


FILE = """
name = "attacked"
rounds = 3
[data]
kind = "digits"
clients = 20
split = {within = 0.3, train = 1.0}
[task]
module = {part = "SoftmaxRegression", features = 64, classes = 10}
[sample]
cohort_size = 10
[local]
learning_rate = 0.3
[aggregate]
part = "MultiKrum"
corrupted_fraction = 0.2
[attack]
part = "ModelReplacement"
fraction = 0.25
scale = 10
[engine]
workers = 1
"""


def test_an_experiment_with_an_attack_judges_the_benign_in_files_and_says_who_is_corrupted(tmp_path, capsys):
    from fedtail.cli.run import show_runs
    from fedtail.reading import Unreadable
    from fedtail.report import write_page
    from fedtail.runs import RunFolder, run

    from run_cases import Onlooker

    (tmp_path / "e.toml").write_text(FILE)
    experiment = read_experiment(tmp_path / "e.toml")
    assert experiment.attack == ModelReplacement(0.25, 10.0)
    assert experiment.as_table()["attack"] == {"part": "ModelReplacement", "fraction": 0.25, "scale": 10.0, "colluding": False}
    run(experiment, 3, tmp_path / "run", Onlooker())
    found = RunFolder.open(tmp_path / "run")
    assert found.about["benign"] == {"train": 15, "test": 15}
    splits = experiment.data.load(3)
    bad = replace(experiment.attack, seed=3).corrupted(splits["train"])
    everyone = found.clients["split"] == "test"
    assert found.clients["corrupted"][everyone].astype(bool).tolist() == bad.tolist()
    errors = found.clients["error"][everyone][~bad.numpy()]
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["members"][0]["test"]["error"]["mean"] == approx(errors.mean())
    assert last["members"][0]["test"]["error"]["std"] == approx(errors.std())
    assert found.client_columns("test")["error"].tolist() == errors.tolist()
    assert not np.isin(found.client_columns("train")["client"], bad.nonzero().flatten().numpy()).any()
    again = read_experiment(tmp_path / "run" / "experiment.toml")
    assert again.attack == experiment.attack
    write_page([found], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "every statistic is over the benign ones" in text
    assert "20 train (15 benign), 20 test (15 benign)" in text
    show_runs([found], tmp_path, as_json=False)
    assert "Error on 15 benign of 20 test clients after" in capsys.readouterr().out
    for wrong, says in (({"train": 15}, "it has benign clients of other splits than its own"), ({"train": 15, "test": -1}, "benign cannot be")):
        (tmp_path / "run" / "run.json").write_text(json.dumps({**found.about, "benign": wrong}))
        with pytest.raises(Unreadable, match=says):
            RunFolder.open(tmp_path / "run")


def test_an_attack_is_refused_on_a_deployment(tmp_path):
    (tmp_path / "e.toml").write_text(FILE)
    with pytest.raises(ExperimentError, match=r"an attack is simulated, and nothing of it exists on a deployment\. Remove"):
        deployed_experiment(tmp_path / "e.toml")
