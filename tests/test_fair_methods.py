"""Chapter 4 of [Li23] as the library's recipes: q-FedSGD, q-FedAvg, powers by client, AFL's average, and the SVM of Vehicle, against loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedtail
from fedtail import AveragedIterate, Engine, Everyone, IntegerChannel, LastIterate, Population, Task, losses, resume, train
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.stacked import StackedKernel
from fedtail.models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.risk import project_to_simplex

from remote_cases import Sites, params_of

CPU, WIDE = torch.device("cpu"), torch.float64
SIZES = (3, 11, 6, 20, 8, 5)


def people(classes: int, seed: int = 0) -> Population:
    """Six clients in two groups; numbers where there are no classes."""
    random = torch.Generator().manual_seed(seed)
    rule = torch.randn(len(SIZES), 4, max(classes, 1), generator=random, dtype=WIDE)
    pairs = []
    for k, n in enumerate(SIZES):
        x = torch.randn(n, 4, generator=random, dtype=WIDE) + k / 5
        pairs.append((x, (x @ rule[k]).argmax(1) if classes > 2 else ((x @ rule[k])[:, 0] > 0).long() if classes else (x @ rule[k])[:, 0]))
    return Population.from_clients(pairs, group=torch.arange(len(SIZES)) % 2)


def task_of(kind: str) -> Task:
    torch.manual_seed(1)
    module = {"quadratics": LeastSquares(4), "softmax": SoftmaxRegression(4, 3)}[kind].to(WIDE)
    task = Task(module)
    return replace(task, module=task.with_params(torch.randn(len(task.params()), dtype=WIDE)))


PEOPLE = {"quadratics": people(0), "softmax": people(3)}


def loss_and_gradient(kind: str, w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of a client and its gradient: a quadratic in closed form, or cross entropy by autograd."""
    if kind == "quadratics":
        wide = torch.cat([x, torch.ones(len(x), 1, dtype=WIDE)], 1)
        gap = wide @ w - y
        return gap.square().mean(), 2 * wide.T @ gap / len(y)
    w = w.clone().requires_grad_()
    loss = nn.functional.cross_entropy(x @ w[:12].view(3, 4).T + w[12:], y)
    return loss.detach(), torch.autograd.grad(loss, w)[0]


def q_ffl_by_hand(kind: str, q: float, rate: float, smoothness: float, steps: int, rounds: int) -> torch.Tensor:
    """Algorithm 3 for one step, whose difference over the rate is the gradient; Algorithm 4 for more. Clients count by mass."""
    population, w = PEOPLE[kind], task_of(kind).params()
    for _ in range(rounds):
        top, under = torch.zeros_like(w), 0.0
        for k in range(len(population)):
            x, y = population.client(k)
            loss, v = loss_and_gradient(kind, w, x, y)[0].float().double(), w.clone()
            for _ in range(steps):
                v = v - rate * loss_and_gradient(kind, v, x, y)[1]
            moved = smoothness * (w - v)
            top = top + population.mass[k] * loss**q * moved
            under = under + population.mass[k] * (q * loss ** (q - 1) * moved.square().sum() + smoothness * loss**q)
        w = w - top / under
    return w


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("kind", PEOPLE)
def test_one_full_gradient_is_q_fedsgd(kind, q):
    """Delta = F^q grad F and h = q F^(q-1) |grad F|^2 + L F^q, on random quadratics and on cross entropy."""
    smoothness, population, w = 20.0, PEOPLE[kind], task_of(kind).params()
    method = replace(fedtail.q_ffl(q, learning_rate=1 / smoothness, batch_size=None, local_steps=1), sample=Everyone())
    found = train(method, task_of(kind), population, rounds=3)
    for _ in range(3):
        each = [loss_and_gradient(kind, w, *population.client(k)) for k in range(len(population))]
        value, slope = torch.stack([f for f, _ in each]).float().double(), torch.stack([g for _, g in each])
        mass = population.mass
        w = w - (mass[:, None] * value[:, None] ** q * slope).sum(0) / (
            mass * (q * value ** (q - 1) * slope.square().sum(1) + smoothness * value**q)).sum()
    assert torch.allclose(found.state.params, w, rtol=0, atol=1e-12)
    assert torch.allclose(w, q_ffl_by_hand(kind, q, 1 / smoothness, smoothness, 1, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothness", [None, 3.0])
@pytest.mark.parametrize("q", [0.0, 0.1, 2.0])
def test_local_steps_are_q_fedavg_with_a_lipschitz_constant_of_their_own(q, smoothness):
    method = replace(fedtail.q_ffl(q, lipschitz=smoothness, learning_rate=0.05, batch_size=None, local_steps=4), sample=Everyone())
    found = train(method, task_of("softmax"), PEOPLE["softmax"], rounds=3)
    assert torch.allclose(found.state.params, q_ffl_by_hand("softmax", q, 0.05, smoothness or 20.0, 4, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lipschitz", [None, 7.0])
@pytest.mark.parametrize("local", [{"batch_size": 4}, {"batch_size": None, "local_steps": 1}, {"batch_size": 2, "epochs": 2, "momentum": 0.5}], ids=str)
def test_a_power_of_zero_is_fedavg(local, lipschitz):
    fair, mean = (train(method, task_of("softmax"), PEOPLE["softmax"], rounds=6).state.params
                  for method in (fedtail.q_ffl(0.0, 4, lipschitz, **local), fedtail.fedavg(4, **local)))
    assert torch.allclose(fair, mean, rtol=0, atol=1e-12)


def test_a_step_tuned_at_zero_decreases_the_objective_of_every_power():
    """Step-size transfer: with 1 / L at q = 0 each round of q-FedSGD goes down, whatever the power."""
    population, task = PEOPLE["quadratics"], task_of("quadratics")
    rows = [torch.cat([x, torch.ones(len(x), 1, dtype=WIDE)], 1) for x, _ in (population.client(k) for k in range(len(SIZES)))]
    smoothness = max(float(torch.linalg.eigvalsh(2 * x.T @ x / len(x)).max()) for x in rows)
    for q in (0.0, 0.1, 1.0, 5.0):
        method = replace(fedtail.q_ffl(q, learning_rate=1 / smoothness, batch_size=None, local_steps=1), sample=Everyone())
        values = []

        def objective(progress, values=values, risk=method.risk):
            values.append(risk.value(fedtail.evaluate(progress.trained, population, task, weighted=True).loss.values, population.mass).item())

        train(method, task, population, rounds=30, on_round=objective)
        assert all(later <= before * (1 + 1e-6) for before, later in pairwise(values)), q
        assert values[-1] < 0.9 * values[0]


# powers by client

def test_each_client_picks_the_power_that_is_best_on_its_validation_examples():
    powers = (0.0, 1.0, 5.0)
    local = {"learning_rate": 0.1, "batch_size": None, "local_steps": 2}
    family = fedtail.q_ffl_family(powers, 5, **local)
    training, rest = PEOPLE["softmax"].at_least(4).split_examples(within=0.5, seed=1)
    trained = train(family, task_of("softmax"), training, rounds=20)
    alone = [train(fedtail.q_ffl(q, 5, **local), task_of("softmax"), training, rounds=20) for q in powers]
    assert all(torch.equal(state.params, one.state.params) for state, one in zip(trained.state, alone, strict=True))
    assert [member.risk.power for member in fedtail.q_ffl_family().members] == [0.0, 0.001, 0.01, 0.1, 1.0, 2.0, 5.0, 10.0]

    found = fedtail.evaluate_family(trained, rest, 0.5, seed=3, names=[f"q = {q:g}" for q in powers])
    validation, test = rest.split_examples(within=0.5, seed=3)
    errors = np.array([[[float((module(x).argmax(1) != y).double().mean()) for x, y in (side.client(k) for k in range(len(side)))]
                        for module in trained.modules] for side in (validation, test)])           # (side, model, client)
    picked = errors[0].argmin(0)                                     # ties go to the smallest power
    assert found.choice.tolist() == picked.tolist()
    mine = errors[1][picked, np.arange(len(rest))]
    assert found.chosen.values.tolist() == pytest.approx(mine.tolist())
    assert found.chosen.by_example().mean() == pytest.approx(np.average(mine, weights=test.size.numpy()))
    right = 1 - mine
    assert found.chosen.angle() == pytest.approx(np.degrees(np.arccos(min(1, right.mean() / np.sqrt((right**2).mean())))), abs=1e-6)
    assert [member.summary()["mean_by_example"] for member in found.members] == pytest.approx(
        [np.average(e, weights=test.size.numpy()) for e in errors[1]])
    choice = fedtail.choose(trained.modules, validation.client(0), trained.task)
    assert choice.index == picked[0]


# AFL

def nearest_on_simplex(values: np.ndarray, total: float = 1.0) -> np.ndarray:
    """By a quadratic program."""
    x = cvxpy.Variable(len(values), nonneg=True)
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(x - values)), [cvxpy.sum(x) == total]).solve(
        solver=cvxpy.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return x.value


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9), st.sampled_from([1.0, 0.3, 4.0]))
def test_the_projection_solves_its_quadratic_program(values, total):
    found = project_to_simplex(torch.tensor(values, dtype=WIDE), total)
    assert np.abs(found.numpy() - nearest_on_simplex(np.array(values), total)).max() < 1e-6


def afl_by_hand(rounds: int, step: float, rate: float, by_group: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Descent on the weighted gradient, ascent on the weights by quadratic programs; the last model and the mean of all."""
    population, w = PEOPLE["softmax"], task_of("softmax").params()
    groups = population.group if by_group else torch.arange(len(population))
    mass = population.mass if by_group else torch.ones(len(population), dtype=WIDE)
    count = int(groups.max()) + 1
    within = torch.stack([torch.where(groups == g, mass, 0.0) / mass[groups == g].sum() for g in range(count)])      # (groups, clients)
    weights, models = np.full(count, 1 / count), [w]
    for _ in range(rounds):
        each = [loss_and_gradient("softmax", w, *population.client(k)) for k in range(len(population))]
        value, slope = torch.stack([f for f, _ in each]).float().double(), torch.stack([g for _, g in each])
        w = w - rate * torch.from_numpy(weights) @ (within @ slope)
        weights = nearest_on_simplex(weights + step * (within @ value).numpy())
        models.append(w)
    return w, torch.stack(models).mean(0)


@pytest.mark.parametrize("groups", [None, 2])
def test_afl_is_descent_and_ascent_and_returns_the_mean_of_its_models(groups):
    method = fedtail.afl(0.2, groups=groups, cohort_size=None if groups is None else 6, learning_rate=0.3, batch_size=None, local_steps=1)
    found = train(method, task_of("softmax"), PEOPLE["softmax"], rounds=8)
    last, mean = afl_by_hand(8, 0.2, 0.3, groups is not None)
    assert torch.allclose(found.state.params, last, rtol=0, atol=1e-6)
    assert torch.allclose(found.task.params(found.module), mean, rtol=0, atol=1e-6)
    assert (last - mean).abs().max() > 1e-2
    assert method.iterate == AveragedIterate()
    kept = train(replace(method, iterate=LastIterate()), task_of("softmax"), PEOPLE["softmax"], rounds=8)
    chosen = fedtail.afl(0.2, groups=groups, cohort_size=None if groups is None else 6, iterate=LastIterate(), learning_rate=0.3, batch_size=None, local_steps=1)
    assert chosen == kept.algorithm
    assert torch.equal(kept.task.params(kept.module), found.state.params)


METHODS = {
    "q-FedSGD": fedtail.q_ffl(2.0, 6, learning_rate=0.1, batch_size=None, local_steps=1),
    "q-FedAvg": fedtail.q_ffl(0.5, 6, lipschitz=5.0, learning_rate=0.1, batch_size=4),
    "powers": fedtail.q_ffl_family((0.0, 1.0), 6, learning_rate=0.1, batch_size=4),
    "AFL": fedtail.afl(0.2, learning_rate=0.3, batch_size=None, local_steps=1),
    "AFL by group": fedtail.afl(0.2, groups=2, cohort_size=6, learning_rate=0.3, batch_size=None, local_steps=1),
}


@pytest.mark.parametrize("name", METHODS)
def test_workers_and_interruptions_change_no_bit_and_nodes_sum_the_same_integers(name, monkeypatch):
    from fedtail.engine import blocks, workers
    for place, setting, value in ((blocks, "GRAIN", 1), (blocks, "TOGETHER", 1), (workers, "WORTH_STARTING", 0.0), (workers, "WORTH_SHARING", 0.0)):
        monkeypatch.setattr(place, setting, value)
    method, task, population = METHODS[name], task_of("softmax"), PEOPLE["softmax"]
    one = train(method, task, population, rounds=4, engine=Engine(workers=1))
    half = train(method, task, population, rounds=2, engine=Engine(workers=2))
    again = resume(half, population, rounds=2, engine=Engine(workers=2))
    assert torch.equal(params_of(again), params_of(one))
    assert all(torch.equal(a, b) for a, b in zip(results(again), results(one), strict=True))
    here = train(method, task, population, rounds=4, engine=Engine(workers=1), channel=IntegerChannel())
    there = train(method, task, fleet=Sites(3, population, task).fleet(forgets=False), rounds=4, channel=IntegerChannel())
    assert all(torch.equal(a, b) for a, b in zip(results(here), results(there), strict=True))
    assert torch.allclose(params_of(here), params_of(one), rtol=0, atol=1e-5)


def results(trained) -> list[torch.Tensor]:
    """The models that a run returns."""
    return [trained.task.params(module) for module in trained.modules]


# the linear SVM

def signs_of(population: Population) -> np.ndarray:
    return 2 * population.targets.numpy() - 1


def test_hinge_is_its_definition_and_has_no_slope_at_the_kink():
    scores, targets = torch.tensor([1.0, -1.0, 0.5, -2.0, 3.0, 1.5], dtype=WIDE, requires_grad=True), torch.tensor([1, 0, 1, 1, 0, 1])
    found = losses.hinge(scores, targets)
    assert found.tolist() == [0.0, 0.0, 0.5, 3.0, 4.0, 0.0]
    assert torch.autograd.grad(found.sum(), scores)[0].tolist() == [0.0, 0.0, -1.0, -1.0, 1.0, 0.0]
    assert torch.equal(losses.hinge(scores[:, None], targets), found)


def test_every_kernel_steps_along_the_same_subgradient_of_the_hinge_loss():
    population, task = people(2), Task(LogisticRegression(4).to(WIDE), loss=losses.hinge)
    x, y = (torch.stack([side[k][:3] for k in range(4)]) for side in zip(*(population.client(k) for k in range(4)), strict=True))
    models = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=WIDE)
    models[0] = torch.cat([torch.zeros(4), torch.ones(1)]).to(WIDE)      # the scores are one: at the kink of class 1
    weight = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [1 / 3] * 3, [0.0, 0.5, 0.5]], dtype=WIDE)
    signs = 2 * y - 1
    margin = signs * ((x * models[:, None, :4]).sum(2) + models[:, 4:])
    pull = -(weight * signs * (margin < 1))
    expected = torch.cat([(pull[:, :, None] * x).sum(1), pull.sum(1, keepdim=True)], 1)
    kernels = [ModuleKernel(task, CPU, WIDE), StackedKernel(task, CPU, WIDE), kernel_for(task, CPU, WIDE, population)]
    assert kernels[2].name == "closed"
    for kernel in kernels:
        assert torch.allclose(kernel.gradients(models, x, y, weight), expected, atol=1e-12)
        value, slope = kernel.losses_and_gradients(models, x, y, weight)
        assert torch.allclose(value, (weight * (1 - margin).clamp(min=0)).sum(1), atol=1e-12)
        assert torch.allclose(slope, expected, atol=1e-12)
        assert torch.allclose(kernel.losses(models, x, y), (1 - margin).clamp(min=0), atol=1e-12)
    wild = torch.full((1, 5), 1e200, dtype=WIDE)
    for kernel in kernels:
        assert not bool(kernel.gradients(wild, -1e200 * torch.ones(1, 1, 4, dtype=WIDE), torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=WIDE)).isfinite().all())


@pytest.mark.parametrize("module", [LogisticRegression(4), nn.Linear(4, 1)], ids=["model", "layer"])
def test_a_federated_svm_ends_where_a_convex_solver_does(module):
    """Mean hinge loss by examples and strength / 2 |w|^2, bias included: full steps that shrink, averaged, against the program's value."""
    population, strength, rounds = people(2), 0.5, 500
    task = Task(module.to(WIDE), loss=losses.hinge)
    method = replace(fedtail.fedavg(learning_rate=0.2, batch_size=None, local_steps=1, weight_decay=strength, schedule=fedtail.Cosine(rounds)),
                     sample=Everyone(), iterate=AveragedIterate(0.985))
    trained = train(method, task, population, rounds=rounds)
    wide = np.concatenate([population.inputs.numpy(), np.ones((population.num_examples, 1))], 1) * signs_of(population)[:, None]
    w = cvxpy.Variable(5)
    best = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(cvxpy.pos(1 - wide @ w)) / len(wide) + strength / 2 * cvxpy.sum_squares(w))).solve(solver=cvxpy.CLARABEL)
    found = task.params(trained.module).numpy()
    value = np.maximum(0, 1 - wide @ found).mean() + strength / 2 * (found**2).sum()
    assert best <= value + 1e-9
    assert value <= best + 1e-3
    assert np.abs(found - w.value).max() < 0.05


def test_labels_of_signs_are_refused_with_the_hinge_loss_of_zeros_and_ones():
    population = people(2)
    signed = population.with_columns(targets=torch.from_numpy(signs_of(population)))
    with pytest.raises(ValueError, match=r"^targets hold labels -1 to 1, but LogisticRegression has one output \(labels 0 to 1\)\. Relabel the classes from 0"):
        Task(LogisticRegression(4), loss=losses.hinge).check(signed)
