"""Studies of chapter 4 of the thesis: each small, and what they compute with against oracles."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytest import approx

import fedtail
from fedtail.data import Population
from fedtail.models import SoftmaxRegression
from fedtail_studies import Data, Results, Verdict, reproduce
from fedtail_studies.catalogue import study_called
from fedtail_studies.fair import efficiency, meta, minimisers, printed, protocol, synthetic, vehicle
from fedtail_studies.fair.adult import EQUAL, read_adult, sides
from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.tilted.fairness_vehicle import read_vehicle


def generated_sensors() -> Data:
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(8), 30)
    x = random.standard_normal((240, 5)).astype(np.float32)
    y = (x[:, 0] + 0.3 * owner * x[:, 1] > 0).astype(np.int64)
    return Data("generated, 8 sensors", Population.from_arrays(torch.as_tensor(x), torch.as_tensor(y), owner), False, "They are generated.")


def generated_accounts() -> Data:
    random = np.random.default_rng(0)
    inputs = {"sequence": random.standard_normal((90, 4, 6)).astype(np.float32), "lengths": random.integers(1, 5, 90)}
    people = Population.from_arrays(inputs, torch.as_tensor(random.integers(0, 2, 90)), np.repeat(np.arange(30), 3))
    return Data("generated, 30 accounts", people, False, "They are generated.")


def adult_file(folder, people: int = 120) -> None:
    random = np.random.default_rng(0)
    levels = {"workclass": ["?", "Private"], "education": ["Bachelors", "Doctorate", "HS-grad"], "sex": ["Female", "Male"]}
    codes = np.stack([random.integers(0, len(names), people) for names in levels.values()], 1)
    codes[:8, 1] = 1
    np.savez(folder / "adult.npz", x_cat=codes.astype(np.uint8), y=random.integers(0, 2, people).astype(np.uint8),
             split=(np.arange(people) % 3 == 0).astype(np.uint8), cat_names=np.array(list(levels)),
             **{f"levels_{name}": np.array(names) for name, names in levels.items()})


TINY = {
    "fair_synthetic": ({"seeds": 1, "devices": 12, "cohort": 3, "powers": (0.0, 0.1, 1.0, 2.0, 5.0), "most": 4, "every": 2}, None),
    "fair_draws": ({"seeds": 1, "devices": 8, "cohort": 3, "most": 3, "steps": 3}, None),
    "fair_heterogeneity": ({"seeds": 1, "steps": 2}, None),
    "fair_efficiency": ({"seeds": 1, "devices": 10, "cohort": 3, "rounds": 4, "every": 2, "tuning_rounds": 2, "steps": (0.3, 1.0)}, None),
    "fair_adult": ({"seeds": 1, "rounds": 4, "every": 2}, "adult"),
    "fair_vehicle": ({"seeds": 1, "cohort": 3, "most": 4, "every": 2, "full_rounds": 4}, generated_sensors),
    "fair_sent140": ({"seeds": 1, "cohort": 3, "most": 4, "every": 2, "tuning_rounds": 2}, generated_accounts),
    "fair_meta": ({"seeds": 1, "cohort": 3, "train_tasks": 6, "test_tasks": 4, "rounds": 2, "sine_rounds": 2}, None),
}


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_small_and_writes_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second process
    study, (changes, data) = study_called(name), TINY[name]
    if data == "adult":
        adult_file(tmp_path)
    found = None if data is None else read_adult(tmp_path) if data == "adult" else data()
    results = reproduce(study, replace(study.quick, **changes), tmp_path, found, quick=True)
    claims, text = json.loads((tmp_path / FILE).read_text())["claims"], (tmp_path / PAGE).read_text()
    assert results.seeds == (0,)
    assert len(claims) == len(study.claims)
    assert all(f"({path.name})" in text for path in tmp_path.glob("*.png"))
    if found:
        assert "These are not the paper's data" in text
        assert not any(claim["verdict"] == Verdict.AGREES for claim in claims)


# printed numbers


def test_the_printed_rows_have_the_headline_of_the_chapter():
    """Section 4.3.2: the variance falls by 45% on average over the four data sets."""
    tables = (printed.SYNTHETIC_TEST, printed.VEHICLE_TEST, printed.SENT140_TEST, printed.SHAKESPEARE_TEST)
    chosen = ("q = 1", "q = 5", "q = 1", "q = 0.001")
    falls = [1 - table[q]["variance"].mean / table["q = 0"]["variance"].mean for table, q in zip(tables, chosen, strict=True)]
    assert np.mean(falls) == approx(0.45, abs=0.005)


@pytest.mark.parametrize("name", [f"{data}_{part}" for data in ("SYNTHETIC", "VEHICLE", "SENT140") for part in ("TEST", "TRAIN")])
def test_printed_angles_and_variances_are_of_the_same_accuracies(name):
    """tan(angle)^2 is variance / mean^2 of the devices; the average over samples is near their mean, but for Shakespeare."""
    for row in vars(printed)[name].values():
        mean = row["devices" if "devices" in row else "average"].mean
        assert np.tan(np.radians(row["angle"].mean)) ** 2 == approx(row["variance"].mean / mean**2, rel=0.35)


# the protocol


def test_a_run_ends_after_ten_readings_without_a_new_lowest_loss():
    losses = np.random.default_rng(1).random(400).cumsum()[::-1] + 40 * np.random.default_rng(2).random(400)
    patience, ended = protocol.Patience(10), next(k for k in range(400) if k >= 10 and losses[k - 9 : k + 1].min() >= losses[: k - 9].min())
    assert [patience.ends(loss) for loss in losses[: ended + 1]] == [False] * ended + [True]


def test_three_parts_are_disjoint_and_of_the_printed_shares():
    people = fedtail.data.synthetic(1.0, 1.0, 6, 0, [50, 60, 70, 80, 90, 100])
    parts = protocol.three_parts(people, 3)
    assert torch.equal(parts.train.size + parts.validation.size + parts.test.size, people.size)
    assert (parts.train.size / people.size).tolist() == approx([0.8] * 6, abs=0.01)
    rows = torch.cat([part.inputs for part in parts])
    assert len(rows.unique(dim=0)) == people.num_examples


def test_statistics_of_accuracies_are_those_of_the_tables():
    accuracy, sizes = torch.rand(40, dtype=torch.float64) * 100, torch.randint(1, 9, (40,))
    found, a = protocol.accuracy_statistics(accuracy, sizes), np.sort(accuracy.numpy())
    assert found["average"] == approx(np.average(accuracy.numpy(), weights=sizes.numpy()))
    assert (found["worst"], found["best"], found["variance"]) == approx((a[:4].mean(), a[-4:].mean(), a.var()))
    assert found["angle"] == approx(np.degrees(np.arccos(a.sum() / (np.linalg.norm(a) * 40**0.5))))
    assert found["kl"] == approx((a / a.sum() * np.log(40 * a / a.sum())).sum())


def small_people() -> Population:
    return fedtail.data.synthetic(1.0, 1.0, 5, 1, [20, 30, 25, 40, 35])


def fair_objective(params: torch.Tensor, people: Population, power: float) -> torch.Tensor:
    weight, bias = params[:600].view(10, 60), params[600:]
    each = [torch.nn.functional.cross_entropy(x.double() @ weight.T + bias, y) for x, y in map(people.client, range(len(people)))]
    return (torch.stack(each) ** (power + 1) * people.mass / people.mass.sum()).sum() / (power + 1)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_a_fixed_step_is_one_along_the_gradient_of_the_objective(power):
    people, task = small_people(), fedtail.Task(SoftmaxRegression(60, 10).double())
    one = replace(fedtail.q_ffl(power, 5, learning_rate=0.01, batch_size=None, local_steps=1), sample=fedtail.Everyone(),
                  aggregate=efficiency.MeanGradient())
    params = task.params()
    for rounds in (1, 2):
        leaf = params.clone().requires_grad_()
        params = params - 0.01 * torch.autograd.grad(fair_objective(leaf, people, power), leaf)[0]
        found = fedtail.train(one, task, people.with_columns(inputs=people.inputs.double()), rounds=rounds, engine=fedtail.Engine(workers=1))
        assert torch.allclose(found.state.params, params, atol=1e-7)      # losses are rounded to float32


def test_the_minimiser_has_no_gradient_left_and_q_fedavg_does_not_go_below_it():
    people, task = small_people(), synthetic.logistic_task()
    module, left = minimisers.minimise_fair_objective(people, task, 1.0, 2000)
    leaf = torch.cat([value.detach().double().flatten() for value in module.parameters()]).requires_grad_()
    least = fair_objective(leaf, people, 1.0)
    assert left < 1e-4
    assert float(torch.autograd.grad(least, leaf)[0].norm()) < 1e-3      # of the model in float32
    trained = fedtail.train(protocol.by_size(1.0, 3, learning_rate=0.1), task, people, rounds=20, engine=fedtail.Engine(workers=1))
    assert float(least.detach()) < protocol.objective(trained, people, 1.0)
    assert protocol.objective(module, people, 1.0) == approx(float(least.detach()), rel=1e-5)


def test_uniform_weights_are_a_plain_mean_over_uniform_cohorts():
    people = small_people()
    local = {"learning_rate": 0.1, "batch_size": None, "local_steps": 1}
    algorithm, parts = protocol.weighted_equally(protocol.by_size(0.0, 5, **local), protocol.Parts(people, people, people))
    task = synthetic.logistic_task()
    found = fedtail.train(algorithm, task, parts.train, rounds=1, engine=fedtail.Engine(workers=1)).state.params
    alone = [fedtail.train(fedtail.fedavg(1, **local), task, people.select([k]), rounds=1, engine=fedtail.Engine(workers=1)).state.params
             for k in range(5)]
    assert torch.allclose(found, torch.stack(alone).mean(0), atol=1e-6)


# data


def test_adult_is_two_devices_of_zeros_and_ones_without_unknown_values(tmp_path):
    adult_file(tmp_path)
    with np.load(tmp_path / "adult.npz") as file:
        codes, split, y = file["x_cat"], file["split"], file["y"]
    data = read_adult(tmp_path)
    train, test = sides(data)
    assert not data.papers
    assert train.size.tolist() == [((codes[:, 1] == 1) & (split == 0)).sum(), ((codes[:, 1] != 1) & (split == 0)).sum()]
    doctor = (codes[:, 1] == 1) & (split == 1)
    x, targets = test.client(0)
    columns = [codes[doctor, 0] == 1, *(codes[doctor, 1] == level for level in range(3)), *(codes[doctor, 2] == level for level in range(2))]
    assert torch.equal(x, torch.as_tensor(np.stack(columns, 1)).float())
    assert targets.tolist() == y[doctor].tolist()


@pytest.mark.parametrize(("read", "file"), [(read_adult, "adult.npz"), (read_vehicle, "vehicle.npz")])
def test_missing_data_are_refused_with_advice(read, file, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"there is no {file} in .*Write --data DIR, a folder with {file}"):
        read(tmp_path)


def test_drawings_of_a_character_are_images_that_are_nearer_to_each_other_than_to_another_one():
    random = np.random.default_rng(0)
    one, other = (meta.drawings(random, 20, 0.03) for _ in range(2))
    assert one.shape == (20, meta.PIXELS**2)
    assert one.min() >= 0
    assert one.max() == approx(1, abs=0.2)
    assert np.linalg.norm(one - one.mean(0), axis=1).mean() < 0.5 * np.linalg.norm(one.mean(0) - other.mean(0))


# verdicts


def test_every_sensor_takes_the_model_with_its_best_validation_accuracy():
    found = {"q = 0": ([90, 50, 70], [80, 40, 60]), "q = 5": ([80, 60, 70], [10, 55, 99])}
    cells = {name: {"seconds": 0.0, "numbers": {"sensors": {"validation": v, "test": t}, "test_size": [1, 1, 2]}} for name, (v, t) in found.items()}
    results = Results("fair_vehicle", False, {"powers": [0.0, 5.0]}, None, (), {0: cells})
    assert vehicle.several(results, 0)["average"] == approx((80 + 55 + 2 * 60) / 4)


def test_the_rule_for_q_takes_the_least_variance_within_a_point():
    validation = {0.0: (80, 700), 0.1: (80.5, 600), 1.0: (79.2, 500), 2.0: (75, 100)}
    cells = {f"q = {q:g}": {"seconds": 0.0, "numbers": {"validation": {"average": a, "variance": v}}} for q, (a, v) in validation.items()}
    assert synthetic.chosen_power(Results("fair_synthetic", False, {"powers": list(validation)}, None, (), {0: cells}), 0) == 1.0


def test_a_stand_in_for_omniglot_gets_no_more_than_a_direction():
    def numbers(power: float, seed: int) -> dict:
        return {"variance": 100 - power + 0.01 * seed, "worst": 50 + power + 0.01 * seed, "average": 80.0 + 0.01 * seed}
    cells = {seed: {f"{kind}, q = {q:g}": {"seconds": 0.0, "numbers": numbers(q if kind == meta.CHARACTERS else -q, seed) if kind == meta.CHARACTERS
                                            else {"variance": 9 - q + 0.01 * seed, "worst": 5 - q + 0.01 * seed}}
                    for kind in (meta.CHARACTERS, meta.SINES) for q in (0.0, 0.1, 1.0)} for seed in range(4)}
    found = [claim.judge(Results("fair_meta", False, {"powers": [0.0, 0.1, 1.0]}, None, (), cells)).verdict for claim in study_called("fair_meta").claims]
    assert found == [Verdict.DIRECTION] * 4 + [Verdict.NOT_TESTABLE]


def test_fashion_mnist_is_not_testable_whatever_adult_finds():
    names = [f"{q}{weights}" for q in ("q = 0", "q = 0.01", "q = 2") for weights in ("", EQUAL)] + ["AFL"]
    cells = {seed: {name: {"seconds": 0.0, "numbers": {"average": 82.0 + seed, "PhD": 70.0 + seed, "non-PhD": 82.0}} for name in names} for seed in range(3)}
    results = Results("fair_adult", False, {}, {"name": "x", "papers": True, "about": ""}, (), cells)
    assert study_called("fair_adult").claims[-1].judge(results).verdict is Verdict.NOT_TESTABLE
