"""Studies of tilted classification, fairness and meta-learning: each small on generated data; their baselines against oracles."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import cvxpy
import numpy as np
import pytest
import torch
from pytest import approx
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

import fedtail
from fedtail.data import Population
from fedtail_studies import Cell, Data, Verdict, reproduce
from fedtail_studies.catalogue import study_called
from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.running import Silent
from fedtail_studies.tilted import baselines, classes_data, classes_mnist, classes_noise, meta_sine
from fedtail_studies.tilted.classes_compound import over_annotators
from fedtail_studies.tilted.classes_data import hiv_split, read_hiv, read_mnist
from fedtail_studies.tilted.classes_hiv import accuracies, over_classes
from fedtail_studies.tilted.classes_networks import Batch, Perceptron, RunningTilted, TiltedGroups
from fedtail_studies.tilted.fairness_pca import Moments, descend, read_credit
from fedtail_studies.tilted.fairness_vehicle import read_vehicle

from generated_data import generated_writers


def generated_octamers(papers: bool = False) -> Data:
    """A rare class that some of 8 features tell, with much noise."""
    random = np.random.default_rng(0)
    x = (random.random((400, 8)) < 0.3).astype(np.float32)
    y = (x @ np.linspace(-1, 1, 8) + 0.7 * random.standard_normal(400) > 0.6).astype(np.int64)
    return Data("generated, 400 octamers", classes_data.one_client(x, y), papers, "They are generated, for a test.")


def generated_images() -> Data:
    """Blobs by digit, 40 writers, a quarter of them to test on."""
    random = np.random.default_rng(0)
    blobs, y = random.random((10, 28, 28)), random.integers(10, size=1200)
    x = (255 * np.clip(blobs[y] + 0.3 * random.standard_normal((1200, 28, 28)), 0, 1)).astype(np.uint8)
    people = Population.from_arrays(torch.as_tensor(x), torch.as_tensor(y), np.arange(1200) // 30, group=(np.arange(40) >= 30).astype(np.int64))
    return Data("generated, 40 writers", people, False, "They are generated, for a test.")


def generated_groups() -> Data:
    random = np.random.default_rng(0)
    x = np.concatenate([random.standard_normal((300, 6)) * [3, 2, 1, 1, 1, 1], random.standard_normal((60, 6)) * [1, 1, 1, 1, 2, 3]])
    return Data("generated, 360 people", Population.from_arrays(torch.as_tensor(x), torch.zeros(360, dtype=torch.int64), np.arange(360) >= 300),
                False, "They are generated, for a test.")


def generated_sensors() -> Data:
    random = np.random.default_rng(0)
    owner = random.integers(8, size=240)
    x = random.standard_normal((240, 5)).astype(np.float32)
    y = (x[:, 0] + 0.3 * owner * x[:, 1] > 0).astype(np.int64)
    return Data("generated, 8 sensors", Population.from_arrays(torch.as_tensor(x), torch.as_tensor(y), owner), False, "They are generated.")


STAND_INS = {"mnist_noise", "mnist_annotators", "mnist_compound"}
TINY = {
    "hiv_classes": ({"seeds": 1, "steps": 50, "reweighting_steps": 20}, generated_octamers),
    "hiv_compound": ({"seeds": 1, "steps": 20, "reweighting_steps": 20}, generated_octamers),
    "mnist_imbalance": ({"seeds": 1, "images": 150, "shares": (0.8,), "epochs": 1, "hidden": 8}, generated_images),
    "mnist_noise": ({"seeds": 1, "images": 400, "noise": (0.4,), "epochs": 1, "hidden": 8}, generated_images),
    "mnist_annotators": ({"seeds": 1, "images": 400, "epochs": 1, "hidden": 8}, generated_images),
    "mnist_compound": ({"seeds": 1, "images": 400, "epochs": 1, "hidden": 8}, generated_images),
    "fair_pca": ({"seeds": 1, "dimensions": (2,), "steps": 40, "dimension": 2}, generated_groups),
    "vehicle": ({"seeds": 1, "rounds": 2, "cohort": 4}, generated_sensors),
    "term_femnist": ({"seeds": 1, "visits": 0.5}, lambda: generated_writers(8, labels=5)),
    "sine_meta": ({"seeds": 1, "steps": 3, "tasks": 50, "hard": 5, "batch": 10}, None),
}


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_small_and_writes_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second process
    monkeypatch.setattr(baselines, "ITERATIONS", 15)
    study, (changes, data) = study_called(name), TINY[name]
    results = reproduce(study, replace(study.quick, **changes), tmp_path, data and data(), quick=True)
    claims, text = json.loads((tmp_path / FILE).read_text())["claims"], (tmp_path / PAGE).read_text()
    assert results.seeds == (0,)
    assert len(claims) == len(study.claims)
    assert not any(claim["verdict"] == Verdict.AGREES for claim in claims)
    assert all(f"({path.name})" in text for path in tmp_path.glob("*.png"))
    if data:
        assert "These are not the paper's data" in text
    if name in STAND_INS:
        assert {claim["verdict"] for claim in claims} == {Verdict.NOT_TESTABLE}


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_a_stand_in_decides_nothing_whatever_it_finds(name):
    study = study_called(name)
    cells = {"mnist_noise": {f"{share}% noise": (*classes_noise.METHODS,) for share in (20, 40, 80)},
             "mnist_annotators": {classes_noise.CROWD: classes_noise.CROWD_METHODS, classes_noise.FIVE: classes_noise.FIVE_METHODS},
             "mnist_compound": {"swapped labels": classes_noise.COMPOUND_METHODS}}[name]
    from fedtail_studies import Results

    def numbers(methods: tuple[str, ...], seed: int) -> dict:
        return {m: {"final": 0.5 + 0.4 * m.startswith("TERM") + 0.001 * seed, "rare": 0.5 + 0.4 * m.startswith("TERM")} for m in methods}
    found = Results(name, False, {"noise": [0.2, 0.4, 0.8]}, {"name": "x", "papers": False, "about": ""}, (),
                    {seed: {cell: {"seconds": 0.0, "numbers": numbers(methods, seed)} for cell, methods in cells.items()} for seed in range(5)})
    assert {claim.judge(found).verdict for claim in study.claims} == {Verdict.NOT_TESTABLE}


@pytest.mark.parametrize(("read", "file"), [(read_hiv, "hiv1.npz"), (read_mnist, "mnist_by_writer.npz"), (read_credit, "credit.npz"),
                                            (read_vehicle, "vehicle.npz")])
def test_missing_data_are_refused_with_advice(read, file, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"there is no {file} in .*Write --data DIR, a folder with {file}"):
        read(tmp_path)


@pytest.mark.skipif("FEDTAIL_TILTED_DATA" not in os.environ, reason="real data are not looked at: FEDTAIL_TILTED_DATA names no folder")
def test_the_real_data_are_the_thesis_s():
    place = Path(os.environ["FEDTAIL_TILTED_DATA"])
    assert read_hiv(place).papers
    assert read_credit(place).papers
    assert not read_mnist(place).papers
    assert not read_vehicle(place).papers


# baselines against oracles


def test_chi_square_weights_solve_their_program():
    losses = torch.tensor(np.random.default_rng(0).exponential(size=30))
    for radius in (0.01, 0.5, 3.0):
        weights = cvxpy.Variable(30)
        program = cvxpy.Problem(cvxpy.Maximize(weights @ losses.numpy()),
                                [weights >= 0, cvxpy.sum(weights) == 1, cvxpy.sum_squares(30 * weights - 1) / 60 <= radius])
        assert float(baselines.chi_square_weights(losses, radius) @ losses) == approx(program.solve(solver="CLARABEL"), rel=1e-5)
    assert baselines.chi_square_weights(torch.ones(4), 1.0).tolist() == [0.25] * 4


def test_human_aligned_weights_are_the_integral_of_the_quantile_function_under_the_cubic_s_slope():
    losses = torch.tensor(np.random.default_rng(1).exponential(size=7))
    a, b, ranked = 0.4, 0.3, np.sort(losses.numpy())
    slope = [1 + 3 * (1 - b) / (a * a - a + 1) * (3 * u * u - 2 * (a + 1) * u + a) for u in np.linspace(0, 1, 70_001)[:-1] + 1 / 140_000]
    integral = np.mean(ranked[np.arange(70_000) // 10_000] * slope)      # midpoint rule: each loss is the quantile of a seventh
    weights = baselines.prospect_weights(losses, a, b)
    assert float(weights @ losses) == approx(integral, rel=1e-7)
    assert float(weights.sum()) == approx(1)
    assert min(slope) == approx(b, abs=1e-6)
    assert np.allclose(baselines.prospect_weights(losses, a, 1.0), 1 / 7)
    assert torch.equal(baselines.prospect_weights(losses.flip(0), a, b), weights.flip(0))


def test_focal_loss_and_gce_of_probabilities_and_their_limits():
    p = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    losses = -p.log()
    assert torch.allclose(baselines.focal(losses, 2.0), (1 - p) ** 2 * losses)
    assert torch.equal(baselines.focal(losses, 0.0), losses)
    assert torch.allclose(baselines.generalised_cross_entropy(losses, 0.7), (1 - p**0.7) / 0.7)
    assert torch.allclose(baselines.generalised_cross_entropy(losses, 1.0), 1 - p)
    assert torch.allclose(baselines.generalised_cross_entropy(losses, 1e-9), losses)


def test_alignments_are_how_much_a_step_on_an_example_lowers_the_held_out_loss():
    random = torch.Generator().manual_seed(0)
    module = Perceptron(4, 3, seed=0).double()
    x, y = torch.rand((6, 784), generator=random, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    held_out = torch.rand((3, 784), generator=random, dtype=torch.float64), torch.tensor([0, 1, 2])
    params = list(module.parameters())

    def held_out_loss() -> float:
        return float(cross_entropy(module(held_out[0]), held_out[1]).detach())
    before, step, expected = held_out_loss(), 1e-6, []
    for k in range(6):
        slopes = torch.autograd.grad(cross_entropy(module(x[k : k + 1]), y[k : k + 1]), params)
        with torch.no_grad():
            for value, slope in zip(params, slopes, strict=True):
                value -= step * slope
            expected.append((before - held_out_loss()) / step)
            for value, slope in zip(params, slopes, strict=True):
                value += step * slope
    assert baselines.gradient_alignments(module, x, y, held_out).tolist() == approx(expected, rel=1e-3)
    assert baselines.learned_weights(torch.tensor([1.0, -2.0, 3.0])).tolist() == [0.25, 0.0, 0.75]
    assert baselines.learned_weights(torch.tensor([-1.0, -2.0])).tolist() == [0.5, 0.5]


def test_learned_reweighting_of_a_linear_model_takes_the_same_weights():
    random = np.random.default_rng(0)
    train, held = (baselines.Logistic(random.standard_normal((20, 4)), random.integers(2, size=20)) for _ in range(2))
    slopes = torch.stack([(torch.sigmoid(train.x[k] @ torch.zeros(4).double()) - train.y[k]) * train.x[k] for k in range(20)])
    direction = held.x.T @ (baselines.balanced(held.y) * (0.5 - held.y))
    expected = -0.3 * slopes.T @ baselines.learned_weights(slopes @ direction)
    assert baselines.learned_reweighting(train, held, steps=1, step_size=0.3).tolist() == approx(expected.tolist())
    assert float(baselines.balanced(held.y)[held.y > 0.5].sum()) == approx(0.5)


def test_hard_mining_keeps_the_hardest_of_the_common_class():
    losses, labels = torch.tensor([0.1, 3.0, 2.0, 0.5, 1.0]), torch.tensor([1, 1, 1, 1, 0])
    assert baselines.hard_mining_weights(losses, labels, common=1).tolist() == [0, 0.5, 0, 0, 0.5]
    assert baselines.hard_mining_weights(losses, torch.ones(5), common=1).tolist() == approx([0.2] * 5)
    assert baselines.inverse_ratio_weights(torch.tensor([0, 1, 1]), torch.tensor([1, 4])).tolist() == approx([4 / 6, 1 / 6, 1 / 6])


def test_fits_reach_the_minimum_and_gradient_weights_its_slope():
    random = np.random.default_rng(0)
    x = np.column_stack([random.standard_normal((60, 3)), np.ones(60)])
    model = baselines.Logistic(x, (x @ [1, -1, 0.5, 0] + random.standard_normal(60) > 0).astype(float))
    signs = 2 * model.y.numpy() - 1
    oracle = minimize(lambda v: np.logaddexp(0, -signs * (x @ v)).mean(), np.zeros(4), method="Nelder-Mead",
                      options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 10_000, "maxfev": 10_000}).x
    assert baselines.fitted(model, torch.mean).tolist() == approx(oracle.tolist(), abs=1e-4)
    assert baselines.descended(model, 5000, 0.5).tolist() == approx(oracle.tolist(), abs=1e-3)
    params = torch.tensor([0.3, 0.1, -0.2, 0.0], dtype=torch.float64)
    weights = baselines.gradient_weights(model, fedtail.Tilted(-2.0).value)(params)
    assert weights.tolist() == approx(fedtail.Tilted(-2.0).weights(model.losses(params)).tolist())


def test_tilts_over_classes_and_annotators_are_nested_tilted_means():
    random = np.random.default_rng(0)
    losses, labels, who = torch.tensor(random.exponential(size=40)), torch.tensor(random.integers(2, size=40)), torch.tensor(np.arange(40) % 4)

    def tilted(values, mass, t):
        mass = np.array(mass) / np.sum(mass)
        return float(np.log((mass * np.exp(t * np.array(values))).sum()) / t) if t else float((mass * np.array(values)).sum())
    parts = [losses[labels == c].numpy() for c in (0, 1)]
    sizes = [len(part) for part in parts]
    expected = tilted([tilted(part, np.ones(len(part)), -2.0) for part in parts], sizes, 5.0)
    assert float(over_classes(labels, 5.0, -2.0)(losses)) == approx(expected)
    by_annotator = [tilted([float(losses[(who == a) & (labels == c)].mean()) for c in (0, 1)],
                           [int(((who == a) & (labels == c)).sum()) for c in (0, 1)], 50.0) for a in range(4)]
    assert float(over_annotators(losses, labels, who, 50.0, -2.0)) == approx(tilted(by_annotator, [10] * 4, -2.0))


# HIV-1


def test_scenarios_thin_the_rare_class_and_shuffle_labels_of_the_last_annotators_alone():
    data = generated_octamers()
    clean, noisy, thin = hiv_split(data, 0), hiv_split(data, 0, noise=0.3), hiv_split(data, 0, ratio=20)
    assert [len(clean.train[1]), len(clean.validation[1]), len(clean.test[1])] == [320, 40, 40]
    assert np.array_equal(clean.train[0], noisy.train[0])
    assert all(np.array_equal(a, b) for a, b in zip(clean.test, noisy.test, strict=True))
    changed = clean.train[1] != noisy.train[1]
    assert clean.train[1].sum() == noisy.train[1].sum()
    assert changed.any()
    assert set(noisy.annotator[changed].tolist()) <= {7, 8, 9}
    assert np.mean(noisy.annotator >= 7) == approx(0.3, abs=0.01)
    common = int((thin.train[1] == 0).sum())
    assert common == int((clean.train[1] == 0).sum())
    assert int(thin.train[1].sum()) == round(common / 20)
    assert np.array_equal(thin.test[1], clean.test[1])


def test_accuracies_follow_the_threshold():
    side = np.array([[2.0, 1.0], [-1.0, 1.0], [0.5, 1.0], [-3.0, 1.0]]), np.array([1, 1, 0, 0])
    assert accuracies(np.array([1.0, 0.0]), side) == {"rare": 0.5, "common": 0.5, "all": 0.5}
    assert accuracies(np.array([1.0, 0.0]), side, threshold=0.1) == {"rare": 1.0, "common": 0.5, "all": 0.75}


# fair components


def test_group_losses_are_reconstruction_errors_and_the_bound_is_that_of_the_semidefinite_program():
    people = generated_groups().population
    moments, x, owner = Moments.of(people), torch.as_tensor(people.inputs).double(), people.example_clients_and_rows()[0]
    projection = moments.pooled(2)
    for group in range(2):
        part = x[owner == group]
        error = (part - part @ projection @ projection.T).square().sum() / len(part)
        best = torch.linalg.svd(part).S[2:].square().sum() / len(part)
        assert float(moments.losses(projection)[group]) == approx(float(error - best))
    matrix, largest = cvxpy.Variable((6, 6), symmetric=True), cvxpy.Variable()
    fits = [float(moments.best(2)[g]) - cvxpy.trace(moments.matrices[g].numpy() @ matrix) <= largest for g in range(2)]
    program = cvxpy.Problem(cvxpy.Minimize(largest), [matrix >> 0, np.eye(6) - matrix >> 0, cvxpy.trace(matrix) == 2, *fits])
    assert moments.min_max_bound(2) == approx(program.solve(solver="CLARABEL"), abs=1e-5)


def test_tilting_over_groups_goes_from_pca_to_the_min_max():
    moments = Moments.of(generated_groups().population)
    mild, values = descend(moments, moments.pooled(2), 1e-9, 50, 0.01)
    assert values[-1] == approx(values[0])                                      # PCA is where the mean is least
    assert moments.losses(mild).tolist() == approx(moments.losses(moments.pooled(2)).tolist(), abs=1e-6)
    strong, values = descend(moments, moments.pooled(2), 20.0, 300, 0.02)
    assert values[-1] < values[0]
    assert float(moments.losses(strong).max()) == approx(moments.min_max_bound(2), rel=0.1)


# networks


def _batch(losses: torch.Tensor, rows: torch.Tensor, progress: float = 1.0) -> Batch:
    return Batch(Perceptron(2, 2, 0), torch.zeros(0), torch.zeros(0), rows, losses, progress)


def test_groups_are_drawn_by_size_and_tilted_loss_and_running_losses_move_by_the_smoothing():
    group, losses = torch.tensor([0] * 30 + [1] * 10), torch.cat([torch.full((30,), 0.5), torch.full((10,), 2.0)])
    sampler = TiltedGroups(group, losses, 4000, seed=0, tilt=-2.0)
    expected = np.array([30 * np.exp(-1.0), 10 * np.exp(-4.0)])
    share = expected / expected.sum()
    assert sampler.shares(1.0).tolist() == approx(share.tolist())
    rows = sampler.rows(1.0)
    assert float((group[rows] == 1).double().mean()) == approx(share[1], abs=5 * (share[1] / 4000) ** 0.5)
    sampler(_batch(torch.tensor([1.0, 1.5]), torch.tensor([0, 1])))
    assert sampler.running.tolist() == approx([0.8 * 0.5 + 0.2 * 1.25, 2.0])


def test_stratified_batches_have_the_tilted_weights_and_inner_tilts_run_in_log_space():
    group, losses = torch.tensor([0] * 6 + [1] * 2), torch.linspace(0.5, 2.0, 8)
    sampler = TiltedGroups(group, losses, 4, seed=0, tilt=3.0, within=-2.0, smoothing=1.0, stratified=True)
    rows = sampler.rows(1.0)
    assert group[rows].tolist() == [0, 0, 1, 1]
    values = torch.tensor([1.0, 0.2, 0.7, 0.9])
    loss = sampler(_batch(values, rows))
    inner = [-np.log(np.mean(np.exp(-2 * values[k : k + 2].numpy()))) / 2 for k in (0, 2)]
    assert sampler.running.tolist() == approx(inner)
    outer = np.array([6, 2]) * np.exp(3 * np.array(inner))
    outer /= outer.sum()
    weights = [outer[k // 2] * np.exp(-2 * (float(values[k]) - inner[k // 2])) / 2 for k in range(4)]
    assert float(loss) == approx(float(np.dot(weights, values.numpy())), rel=1e-6)


def test_the_running_tilted_loss_is_algorithm_14():
    reduce = RunningTilted(-2.0, smoothing=0.5)
    first, second = torch.tensor([0.5, 1.0]), torch.tensor([2.0, 0.1])
    reduce(_batch(first, torch.arange(2)))
    loss = reduce(_batch(second, torch.arange(2)))
    running = -np.log(0.5 * np.mean(np.exp(-2 * first.numpy())) + 0.5 * np.mean(np.exp(-2 * second.numpy()))) / 2
    assert float(reduce.running) == approx(running)
    assert float(loss) == approx(float(np.mean(np.exp(-2 * (second.numpy() - running)) * second.numpy())), rel=1e-6)


def test_imbalanced_digits_have_the_share_and_hold_clean_ones_apart():
    plan = replace(classes_mnist.Plan(), images=60, clean=6)
    train, clean, test = classes_mnist.imbalanced(Cell("x", 0, plan, generated_images(), "cpu", Silent()), 0.9)
    assert train.y.tolist().count(1) == 54
    assert clean.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert not {tuple(row.tolist()) for row in train.x} & {tuple(row.tolist()) for row in clean.x}
    assert set(test.y.tolist()) == {0, 1}


# sine waves


def test_adapted_losses_are_those_of_a_step_task_by_task():
    params = meta_sine.initial(5, 0)
    random = torch.Generator().manual_seed(0)
    support, query = ((torch.rand((3, 4), generator=random), torch.rand((3, 4), generator=random)) for _ in range(2))
    found = meta_sine.adapted_losses(params, support, query, 0.1, through=True)
    for k in range(3):
        inner = (meta_sine.predicted(params, support[0][k][None]) - support[1][k]).square().mean()
        moved = [v - 0.1 * g for v, g in zip(params, torch.autograd.grad(inner, params, create_graph=True), strict=True)]
        alone = (meta_sine.predicted(moved, query[0][k][None]) - query[1][k]).square().mean()
        assert found[k].item() == approx(alone.item(), rel=1e-5)
        slopes = zip(torch.autograd.grad(found[k], params, retain_graph=True), torch.autograd.grad(alone, params), strict=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in slopes)


def test_training_tasks_are_mostly_easy_and_test_amplitudes_uniform():
    train, test = meta_sine.drawn_tasks(replace(meta_sine.Plan(), tasks=1000, hard=50), 0)
    hard = train.amplitude[:, 0] > 4.9
    assert int(hard.sum()) == 50
    assert float(train.amplitude[~hard].max()) <= 1.0
    assert float(test.amplitude.mean()) == approx(2.55, abs=0.2)
    assert float(train.phase.max()) <= np.pi
