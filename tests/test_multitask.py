"""Related tasks, MOCHA's problem: against a linear system, dual ascent written out, autograd, and the optimality of the nuclear norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

import fedtail
from fedtail import Population, Task, losses
from fedtail.models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.multitask import mocha, task_relationship

WIDE = torch.float64


def people(tasks=5, dim=3, classes=0, seed=0) -> Population:
    """Tasks of different sizes around two directions."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(2, dim, generator=random, dtype=WIDE)
    data = []
    for k in range(tasks):
        x = torch.randn(7 + 2 * (k % 3), dim, generator=random, dtype=WIDE)
        scores = x @ (centres[k % 2] + 0.2 * torch.randn(dim, generator=random, dtype=WIDE)) + 0.3 * torch.randn(len(x), generator=random, dtype=WIDE)
        data.append((x, scores if not classes else (scores > 0).long() if classes == 2 else (scores.exp().clamp(max=2.5)).long()))
    return Population.from_clients(data)


def positive(tasks, seed=1) -> torch.Tensor:
    root = torch.randn(tasks, tasks, generator=torch.Generator().manual_seed(seed), dtype=WIDE)
    return root @ root.T / tasks + 0.1 * torch.eye(tasks, dtype=WIDE)


@pytest.mark.parametrize("bias", [True, False])
def test_squares_with_a_fixed_relationship_solve_one_linear_system(bias):
    population, omega, strength = people(), positive(5), 0.3
    found = mocha(population, Task(LeastSquares(3, bias=bias).double()), strength, omega)
    dim = 3 + bias
    system, right = strength * torch.kron(torch.linalg.inv(omega).contiguous(), torch.eye(dim, dtype=WIDE)), torch.zeros(5 * dim, dtype=WIDE)
    for k in range(5):
        x, y = population.client(k)
        x, here = torch.cat([x, torch.ones(len(x), 1, dtype=WIDE)], 1)[:, :dim], slice(k * dim, (k + 1) * dim)
        system[here, here] += 2 * x.T @ x / len(y)
        right[here] = 2 * x.T @ y / len(y)
    assert torch.allclose(found.models, torch.linalg.solve(system, right).view(5, dim), rtol=0, atol=1e-7)
    assert torch.equal(found.relationship, omega)


def dual_ascent(population, omega, strength, epochs):
    """MOCHA's dual, one multiplier at a time, in the order of examples: for hinge losses and models without bias."""
    omega, data = omega.numpy(), [tuple(map(torch.Tensor.numpy, population.client(k))) for k in range(len(population))]
    duals, w = [np.zeros(len(y)) for _, y in data], np.zeros((len(data), data[0][0].shape[1]))
    for _ in range(epochs):
        for k, (x, y) in enumerate(data):
            for i in range(len(y)):
                row = (2 * y[i] - 1) * x[i]
                curve = omega[k, k] * row @ row / (strength * len(y))
                new = min(1.0, max(0.0, duals[k][i] + (1 - row @ w[k]) / curve))
                w += np.outer(omega[:, k], (new - duals[k][i]) * row) / (strength * len(y))
                duals[k][i] = new
    return torch.from_numpy(w), sum(float(d.mean()) for d in duals)


def test_a_support_vector_machine_with_a_fixed_relationship_is_that_of_dual_ascent():
    population, omega, strength = people(classes=2), positive(5), 0.2
    task = Task(LogisticRegression(3, bias=False).double(), loss=losses.hinge)
    found = mocha(population, task, strength, omega)
    expected, multipliers = dual_ascent(population, omega, strength, 1500)
    assert torch.allclose(found.models, expected, rtol=0, atol=1e-6)
    penalty = strength / 2 * float(torch.trace(expected.T @ torch.linalg.inv(omega) @ expected))
    assert found.objective == pytest.approx(multipliers - penalty, abs=1e-6)      # no gap between primal and dual
    own = sum(float((1 - (2 * y.double() - 1) * (x @ w)).relu().mean()) for (x, y), w in zip(map(population.client, range(5)), found.models, strict=True))
    assert found.objective == pytest.approx(own + penalty, abs=1e-6)


@pytest.mark.parametrize(("module", "classes"), [(lambda: LogisticRegression(3), 2), (lambda: SoftmaxRegression(3, 3), 3), (lambda: nn.Linear(3, 1), 2)])
def test_at_smooth_solutions_the_gradient_that_autograd_finds_is_zero(module, classes):
    population, omega, strength = people(classes=classes), positive(5), 0.1
    torch.manual_seed(0)
    task = Task(module().double())
    found = mocha(population, task, strength, omega)
    pull = strength * torch.linalg.inv(omega) @ found.models
    for k, model in enumerate(found.models):
        own = task.with_params(model)
        x, y = population.client(k)
        slopes = torch.autograd.grad(task.loss(own(x), y).mean(), list(own.parameters()))
        assert torch.allclose(torch.cat([s.flatten() for s in slopes]), -pull[k], rtol=0, atol=1e-6)


def test_a_relationship_is_the_root_of_the_gram_matrix_over_its_trace():
    models = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=WIDE)
    root = np.real(sqrtm((models @ models.T).numpy()))
    assert np.allclose(task_relationship(models).numpy(), root / np.trace(root), atol=1e-10)
    assert torch.equal(task_relationship(torch.zeros(3, 2)), torch.eye(3, dtype=WIDE) / 3)


def nuclear_minimum(population, task, strength, steps):
    """Proximal gradient steps on sum_k F_k(w_k) + strength / 2 |W|_*^2: singular values are lowered by a common number, which depends on all."""
    w, rate = torch.zeros(len(population), 6, dtype=WIDE), 0.05
    for _ in range(steps):
        w = w.requires_grad_()
        slope = torch.autograd.grad(total_loss(population, task, w), w)[0]
        left, values, right = torch.linalg.svd((w - rate * slope).detach(), full_matrices=False)
        sums, count = values.cumsum(0), torch.arange(1, len(values) + 1)
        lowered = rate * strength * sums / (1 + rate * strength * count)
        taken = int((values > lowered).sum()) - 1
        w = (left * (values - lowered[taken]).clamp(min=0)) @ right
    return w, float(total_loss(population, task, w) + strength / 2 * torch.linalg.matrix_norm(w, "nuc") ** 2)


def total_loss(population, task, models):
    return sum(task.loss(population.client(k)[0] @ models[k], population.client(k)[1]).mean() for k in range(len(population)))


@pytest.mark.parametrize(("classes", "make"), [(0, lambda: Task(LeastSquares(6, bias=False).double())), (2, lambda: Task(LogisticRegression(6, bias=False).double()))])
def test_the_learned_relationship_minimises_losses_and_squared_nuclear_norm(classes, make):
    population, strength, task = people(tasks=4, dim=6, classes=classes, seed=3), 0.3, make()
    found = mocha(population, task, strength)
    best, value = nuclear_minimum(population, task, strength, 1500)
    assert found.objective == pytest.approx(value, rel=3e-4)
    assert found.objective >= value - 1e-9
    assert torch.allclose(found.models, best, rtol=0, atol=0.02)
    assert float(found.relationship.trace()) == pytest.approx(1)
    assert torch.allclose(found.relationship, task_relationship(found.models), rtol=0, atol=1e-3)
    assert found.objective < mocha(population, task, strength, torch.eye(4, dtype=WIDE) / 4).objective


def test_tasks_alone_tasks_as_one_and_what_is_learned_in_between():
    population, task = people(tasks=6), Task(LeastSquares(3, bias=False).double())
    alone = mocha(population, task, 1e-6, torch.eye(6, dtype=WIDE))
    for k in range(6):
        x, y = population.client(k)
        assert torch.allclose(alone.models[k], torch.linalg.lstsq(x, y).solution, rtol=0, atol=1e-4)
    one = mocha(population, task, 1e-6, torch.ones(6, 6, dtype=WIDE))
    assert torch.allclose(one.models, one.models[:1].expand(6, -1), rtol=0, atol=1e-9)
    x, y, weight = zip(*((x, y, torch.full((len(y),), 1 / len(y), dtype=WIDE)) for x, y in map(population.client, range(6))), strict=True)
    scale = torch.cat(weight).sqrt()
    assert torch.allclose(one.models[0], torch.linalg.lstsq(scale[:, None] * torch.cat(x), scale * torch.cat(y)).solution, rtol=0, atol=1e-5)
    learned = mocha(population, task, 0.05).relationship
    near = learned / learned.diagonal().sqrt()[:, None] / learned.diagonal().sqrt()
    assert float(near[::2, ::2].min()) > float(near[::2, 1::2].max())      # tasks of one centre are more alike than those of two


def test_models_are_evaluated_each_on_its_own_task():
    own, held = people(tasks=8, classes=2, seed=4).split_examples(within=0.4)
    task = Task(LogisticRegression(3), loss=losses.hinge)
    found = mocha(own, task, 0.1, max_updates=5)
    evaluation = found.evaluate(held)
    for k, model in enumerate(found.models):
        x, y = held.client(k)
        wrong = ((x @ model[:3] + model[3] > 0).long() != y).double().mean()
        assert float(evaluation.error.values[k]) == pytest.approx(float(wrong))
    with pytest.raises(ValueError, match="there are models of 8 tasks, and the population has 3 clients"):
        found.evaluate(held.select([0, 1, 2]))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: mocha(people(), Task(nn.Sequential(nn.Linear(3, 1))), 0.1), "mocha couples linear models with their own loss (squares, logistic, softmax, hinge), which Sequential is not. For others use l2sgd or ditto."),
    (lambda: mocha(people(), Task(LeastSquares(3)), 0.0), "strength (lambda) must be positive and finite, got 0. It is the weight of the penalty."),
    (lambda: mocha(people(), Task(LeastSquares(3)), 0.1, torch.eye(3)), "relationship (Omega) must be a symmetric matrix (5, 5), a row for each client, got (3, 3)."),
    (lambda: mocha(people(), Task(LeastSquares(3)), 0.1, -torch.eye(5)), "relationship (Omega) must be positive semidefinite, got -1. Came is its least eigenvalue."),
])
def test_what_does_not_fit_is_refused_in_words(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value) == text
    assert "mocha" not in dir(fedtail)
