"""Private optimisers: each is its non-private one without noise; sensitivities by search; charges, noise, and gradients of single examples."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from pytest import approx
from torch import nn

from fedtail.losses import cross_entropy, squared_error
from fedtail.models import LeastSquares, SoftmaxRegression
from fedtail.privacy import GaussianRelease, Ledger, NoSampling, PoissonSampling, PrivacyBudget, RoundEvent
from fedtail.privacy.ledger import BudgetSpent
from fedtail.private_optim import (
    AdaGradMoment,
    AdaptiveRule,
    AutogradGradients,
    AutomaticClip,
    ClippedGradient,
    ClosedFormGradients,
    DelayedMoment,
    FixedPreconditioner,
    FlatClip,
    GivenGradients,
    GradientDescent,
    GradientPreconditioner,
    LayerClip,
    MicroBatchGradients,
    NoClip,
    PoissonBatches,
    Preconditioning,
    PrivateMethod,
    PrivateOptimizer,
    PublicData,
    RMSPropMoment,
    YogiMoment,
    adadps,
    adas,
    dp2,
    dp2_extra_query,
    dp_adagrad,
    dp_adam,
    dp_adam_pub,
    dp_r_pub,
    dp_rmsprop,
    dp_sgd,
    dp_yogi,
    feature_divisor,
    frequency_divisor,
    has_closed_form,
    ideal_adadps,
    pda_dpmd,
    tfidf_divisor,
    warm_start,
    without_privacy,
)
from fedtail.private_optim.gradient_rows import sum_clipped
from fedtail.task import Task

FEATURES, CLASSES, BATCH = 7, 3, 12


def data(count=BATCH, seed=0, features=FEATURES):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, features, generator=random, dtype=torch.float64), torch.randint(0, CLASSES, (count,), generator=random)


def mlp(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def flat(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def gradient(module, x, y):
    """The mean gradient over a batch, flat, by an ordinary backward pass."""
    found = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), list(module.parameters()))
    return torch.cat([one.reshape(-1) for one in found])


def trained(method, steps=9, module=None, **settings):
    """The module after some steps of `method` on changing batches."""
    module = mlp() if module is None else module
    optimizer = PrivateOptimizer(module, method, batch_size=BATCH, sampling=NoSampling(), **settings)
    for step in range(steps):
        optimizer.step(*data(seed=step))
    return module, optimizer


# Without noise and clipping: the optimisers that they make private

TORCH = {
    "sgd": (dp_sgd(0.3, 1.0, 1.0), lambda p: torch.optim.SGD(p, 0.3)),
    "momentum": (dp_sgd(0.3, 1.0, 1.0, momentum=0.8), lambda p: torch.optim.SGD(p, 0.3, momentum=0.8)),
    "adam": (dp_adam(0.1, 1.0, 1.0, epsilon_inside_root=False), lambda p: torch.optim.Adam(p, 0.1)),
    "rmsprop": (dp_rmsprop(0.05, 1.0, 1.0, decay=0.95, epsilon=1e-3), lambda p: torch.optim.RMSprop(p, 0.05, alpha=0.95, eps=1e-3)),
    "adagrad": (dp_adagrad(0.2, 1.0, 1.0, epsilon=1e-3), lambda p: torch.optim.Adagrad(p, 0.2, eps=1e-3)),
}


@pytest.mark.parametrize("name", TORCH)
def test_without_noise_and_clipping_it_is_torchs_own_optimiser_step_for_step(name):
    method, make = TORCH[name]
    ours, theirs = mlp(), mlp()
    optimizer = PrivateOptimizer(ours, without_privacy(method), batch_size=BATCH, sampling=NoSampling())
    oracle = make(theirs.parameters())
    for step in range(12):
        x, y = data(seed=step)
        optimizer.step(x, y)
        oracle.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        oracle.step()
        assert torch.allclose(flat(ours), flat(theirs), rtol=1e-10, atol=1e-12), step


def by_hand(step_function, steps=9):
    """The parameters after steps of a function (params, gradient, t, public gradient) -> params, t from 0."""
    module = mlp()
    for step in range(steps):
        g, public = gradient(module, *data(seed=step)), gradient(module, *data(5, seed=99))
        params = step_function(flat(module), g, step, public, module)
        for parameter, part in zip(module.parameters(), params.split([p.numel() for p in module.parameters()]), strict=True):
            parameter.data = part.view_as(parameter).clone()
    return flat(module)


DIM = len(flat(mlp()))
PUBLIC = PublicData(*data(5, seed=99))


def test_dp_adam_has_epsilon_inside_the_root_as_algorithm_9_prints_it():
    m, v = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)

    def step(w, g, t, public, module):
        m.mul_(0.9).add_(0.1 * g)
        v.mul_(0.99).add_(0.01 * g**2)
        return w - 0.1 * (m / (1 - 0.9 ** (t + 1))) / (v / (1 - 0.99 ** (t + 1)) + 1e-4).sqrt()
    found, _ = trained(without_privacy(dp_adam(0.1, 1.0, 1.0, second_decay=0.99, epsilon=1e-4)))
    assert torch.allclose(flat(found), by_hand(step), atol=1e-12)


def test_dp_yogi_is_yogi():
    m, v = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)

    def step(w, g, t, public, module):
        m.mul_(0.9).add_(0.1 * g)
        v.sub_(0.1 * torch.sign(v - g**2) * g**2)
        return w - 0.1 * m / (v.sqrt() + 1e-2)
    found, _ = trained(without_privacy(dp_yogi(0.1, 1.0, 1.0, second_decay=0.9, epsilon=1e-2)))
    assert torch.allclose(flat(found), by_hand(step), atol=1e-12)


MOMENTS = {
    "rmsprop": (RMSPropMoment(0.8), lambda v, g: 0.8 * v + 0.2 * g**2),
    "adagrad": (AdaGradMoment(), lambda v, g: v + g**2),
    "yogi": (YogiMoment(0.8), lambda v, g: v + 0.2 * torch.sign(g**2 - v) * g**2),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_dp2_without_noise_is_the_delayed_optimiser(name):
    moment, follow = MOMENTS[name]
    v = G = torch.zeros(DIM, dtype=torch.float64)

    def step(w, g, t, public, module):
        nonlocal v, G
        r = t % 5
        if r == 0:
            G = torch.zeros(DIM, dtype=torch.float64)
        if r == 3:
            v, G = follow(v, G / 3), torch.zeros(DIM, dtype=torch.float64)
        D = 1.0 if r < 3 else v.sqrt() + 0.05
        G = G + g / D
        return w - (0.5 if r < 3 else 0.02) * g / D
    method = dp2(0.5, 1.0, 1.0, 3, 0.02, moment=moment, epsilon=0.05, delayed_steps=2)
    found, _ = trained(without_privacy(method), 13)
    expected = by_hand(step, 13)
    assert torch.allclose(flat(found), expected, atol=1e-11)
    first, _ = trained(without_privacy(replace(method, transform=replace(method.transform, noise_first=True))), 13)
    assert torch.allclose(flat(first), expected, atol=1e-11)      # without clipping, dividing before or after is the same


def test_the_extra_query_ablation_divides_its_sums_by_how_many_gradients_they_have():
    v = G = torch.zeros(DIM, dtype=torch.float64)

    def step(w, g, t, public, module):
        nonlocal v, G
        G = G + g
        if t % 3 == 0:
            v, G = 0.9 * v + 0.1 * (G / (3 if t else 1)) ** 2, torch.zeros(DIM, dtype=torch.float64)
            return w - 0.5 * g
        return w - 0.02 * g / (v.sqrt() + 0.05)
    found, _ = trained(without_privacy(dp2_extra_query(0.5, 1.0, 1.0, 3, 0.02, epsilon=0.05)), 10)
    assert torch.allclose(flat(found), by_hand(step, 10), atol=1e-11)


def test_adas_with_a_fixed_vector_divides_every_gradient():
    A = torch.linspace(0.1, 2.0, DIM, dtype=torch.float64)
    found, _ = trained(adas(0.2, A, momentum=0.0))
    assert torch.allclose(flat(found), by_hand(lambda w, g, t, public, module: w - 0.2 * g / A), atol=1e-12)


@pytest.mark.parametrize("every", [1, 4])
def test_adas_with_public_gradients_is_rmsprop_with_their_second_moment(every):
    v = torch.zeros(DIM, dtype=torch.float64)

    def step(w, g, t, public, module):
        if t % every == 0:
            v.mul_(0.9).add_(0.1 * public**2)
        return w - 0.05 * g / (v.sqrt() + 0.1)
    found, _ = trained(adas(0.05, GradientPreconditioner(epsilon=0.1, every=every)), public=PUBLIC)
    assert torch.allclose(flat(found), by_hand(step), atol=1e-12)


def test_adas_with_adam_mixes_the_public_first_moment_into_every_gradient():
    v, M = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)

    def step(w, g, t, public, module):
        v.mul_(0.9).add_(0.1 * public**2)
        M.mul_(0.7).add_(0.3 * public)
        return w - 0.05 * (0.7 * g + 0.3 * M) / (v.sqrt() + 0.1)
    found, _ = trained(adas(0.05, GradientPreconditioner(epsilon=0.1, first_decay=0.7)), public=PUBLIC)
    assert torch.allclose(flat(found), by_hand(step), atol=1e-12)


def test_the_ideal_preconditioner_without_noise_is_rmsprop_on_the_private_gradients():
    found, optimizer = trained(without_privacy(ideal_adadps(0.05, 1.0, 1.0, epsilon=1e-2)))
    theirs = mlp()
    oracle = torch.optim.RMSprop(theirs.parameters(), 0.05, alpha=0.9, eps=1e-2)
    for step in range(9):
        oracle.zero_grad()
        nn.functional.cross_entropy(theirs(data(seed=step)[0]), data(seed=step)[1]).backward()
        oracle.step()
    assert torch.allclose(flat(found), flat(theirs), atol=1e-12)
    assert set(optimizer.ledger.non_private_releases) == {"exact gradient for the preconditioner", "mean of gradients without noise"}


def test_rules_that_read_public_gradients_follow_their_formulas():
    m, v = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)

    def scaled(w, g, t, public, module):
        v.mul_(0.9).add_(0.1 * public**2)
        return w - 0.05 * g / (v + 1e-3).sqrt()
    found, _ = trained(without_privacy(dp_r_pub(0.05, 1.0, 1.0, epsilon=1e-3)), public=PUBLIC)
    assert torch.allclose(flat(found), by_hand(scaled), atol=1e-12)
    v.zero_()

    def adam(w, g, t, public, module):
        m.mul_(0.8).add_(0.2 * (0.6 * g + 0.4 * public))
        v.mul_(0.95).add_(0.05 * public**2)
        return w - 0.05 * (m / (1 - 0.8 ** (t + 1))) / (v / (1 - 0.95 ** (t + 1)) + 1e-3).sqrt()
    found, _ = trained(without_privacy(dp_adam_pub(0.05, 1.0, 1.0, 0.6, 0.8, 0.95, 1e-3)), public=PUBLIC)
    assert torch.allclose(flat(found), by_hand(adam), atol=1e-12)
    found, _ = trained(without_privacy(pda_dpmd(0.3, 1.0, 1.0, 0.7)), public=PUBLIC)
    assert torch.allclose(flat(found), by_hand(lambda w, g, t, public, module: w - 0.3 * (0.7 * g + 0.3 * public)), atol=1e-12)


def test_a_schedule_multiplies_the_learning_rate():
    found, _ = trained(replace(without_privacy(dp_sgd(0.3, 1.0, 1.0)), schedule=lambda step: 1 / math.sqrt(step + 1)))
    assert torch.allclose(flat(found), by_hand(lambda w, g, t, public, module: w - 0.3 / math.sqrt(t + 1) * g), atol=1e-12)


def test_a_warm_start_is_rmsprop_on_public_data():
    ours, theirs = mlp(), mlp()
    warm_start(ours, PUBLIC, epochs=4, learning_rate=0.01)
    oracle = torch.optim.RMSprop(theirs.parameters(), 0.01)
    for _ in range(4):
        oracle.zero_grad()
        nn.functional.cross_entropy(theirs(PUBLIC.inputs), PUBLIC.targets).backward()
        oracle.step()
    assert torch.allclose(flat(ours), flat(theirs), atol=1e-12)
    assert all(parameter.grad is None for parameter in ours.parameters())


# Gradients of single examples

class Sequences(nn.Module):
    """Linear layers on every time step, (examples, time, features)."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, CLASSES, bias=False)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)).mean(1))


class Tied(nn.Module):
    """One layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Bare(nn.Module):
    """A layer that is called, and whose weight is also used by hand."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(x)) @ self.layer.weight)


def convnet():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, stride=2, dilation=1, bias=False),
                         nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


def frozen_bias():
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    module[0].bias.requires_grad_(False)
    return module


MODELS = {
    "linear": (lambda: nn.Linear(FEATURES, CLASSES), (FEATURES,), True),
    "our own": (lambda: SoftmaxRegression(FEATURES, CLASSES), (FEATURES,), True),
    "mlp": (lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)), (FEATURES,), True),
    "frozen": (frozen_bias, (FEATURES,), True),
    "convnet": (convnet, (2, 8, 8), True),
    "sequences": (Sequences, (3, 4), True),
    "called twice": (Tied, (FEATURES,), False),
    "used by hand": (Bare, (FEATURES,), False),
    "in place": (lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES)), (FEATURES,), False),
    "layer norm": (lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)), (FEATURES,), False),
}


def explicit(module, x, y):
    """The gradient of every example by its own backward pass, (examples, dim)."""
    trained_parameters = [p for p in module.parameters() if p.requires_grad]
    found = [torch.autograd.grad(nn.functional.cross_entropy(module(x[k:k + 1]), y[k:k + 1]), trained_parameters) for k in range(len(y))]
    return torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in found])


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_of_preconditioned_gradients_are_those_of_one_backward_pass_per_example(name):
    make, shape, closed = MODELS[name]
    torch.manual_seed(3)
    module = make().double()
    x, y = torch.randn(9, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (9,))
    task = Task(module, cross_entropy)
    sizes = [p.numel() for p in module.parameters() if p.requires_grad]
    rows, like = explicit(module, x, y), torch.zeros(sum(sizes), dtype=torch.float64)
    divisor, shift = torch.rand(sum(sizes), dtype=torch.float64) + 0.1, torch.randn(sum(sizes), dtype=torch.float64)
    assert has_closed_form(task, x, y) == closed
    kinds = (AutogradGradients, ClosedFormGradients) if closed else (AutogradGradients,)
    for map_ in (Preconditioning(), Preconditioning(divisor), Preconditioning(divisor, shift, 0.7), Preconditioning(None, shift)):
        moved = (map_.factor * rows + (0 if map_.shift is None else shift)) / (1 if map_.divisor is None else divisor)
        clip = float(moved.norm(dim=1).median())
        expected = (moved * (clip / moved.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
        pieces = [part * (0.3 / part.norm(dim=1, keepdim=True)).clamp(max=1) for part in moved.split(sizes, 1)]
        for kind in kinds:
            for chunk in (None, 4):
                found = sum_clipped(kind(task, x, y, chunk), FlatClip(clip), map_, sizes, like)
                assert torch.allclose(found, expected, atol=1e-9), (kind, chunk, map_)
            layered = sum_clipped(kind(task, x, y), LayerClip((0.3,) * len(sizes)), map_, sizes, like)
            assert torch.allclose(layered, torch.cat(pieces, 1).sum(0), atol=1e-9)


def test_an_example_whose_gradient_is_not_finite_contributes_zero():
    x, y = data(6)
    x[2], x[4, 0] = float("nan"), float("inf")
    module, good = mlp(), torch.tensor([0, 1, 3, 5])
    sizes, like = [p.numel() for p in module.parameters()], torch.zeros(DIM, dtype=torch.float64)
    task = Task(module)
    for kind in (AutogradGradients, ClosedFormGradients):
        for map_ in (Preconditioning(), Preconditioning(like + 2.0, like + 1.0, 0.5)):
            found = sum_clipped(kind(task, x, y), FlatClip(0.5), map_, sizes, like)
            assert torch.allclose(found, sum_clipped(kind(task, x[good], y[good]), FlatClip(0.5), map_, sizes, like), atol=1e-12)


def test_recurrent_modules_are_differentiated_too():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.linear = nn.GRU(4, 5, batch_first=True), nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.linear(self.gru(x)[0][:, -1])
    torch.manual_seed(0)
    module, x, y = Last().double(), torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(0, CLASSES, (5,))
    rows = explicit(module, x, y)
    before = flat(module)
    PrivateOptimizer(module, replace(dp_sgd(1.0, 0.2, 1.0), noise_multiplier=0.0), batch_size=5, sampling=NoSampling()).step(x, y)
    expected = before - (rows * (0.2 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 5
    assert torch.allclose(flat(module), expected, atol=1e-9)
    groups, sizes = torch.tensor([0, 1, 0, 1, 1]), [p.numel() for p in module.parameters()]
    rows = explicit(module, x, y)
    found = sum_clipped(MicroBatchGradients(Task(module), x, y, groups, 2, 2, vectorised=False), NoClip(), Preconditioning(), sizes, torch.zeros_like(before))
    assert torch.allclose(found, rows.sum(0) / 2, atol=1e-9)


def test_gradients_are_written_out_a_chunk_at_a_time():
    """Ten million parameters and 200 examples would be 8 GB of gradients; closed forms write none, and the others a chunk."""
    module, (x, y) = nn.Linear(1000, 1000), (torch.randn(200, 1000), torch.randint(0, 1000, (200,)))
    task = Task(module)
    rows = next(ClosedFormGradients(task, x, y).chunks())
    assert sum(t.numel() for t in (rows[0].signals, rows[0].inputs)) == 200 * 2000
    chunk = next(AutogradGradients(task, x, y).chunks())
    assert chunk[0].rows.shape == (16, 10**6)


# Sensitivity, by search

SENSITIVE = {
    "flat": FlatClip(0.7),
    "layers": LayerClip((0.5, 0.2, 0.4, 0.1)),
    "automatic": AutomaticClip(0.7, 0.01),
}


def largest_move(move, start, steps=60):
    """The largest value of `move` that gradient ascent from `start` finds."""
    x, best = start.clone().requires_grad_(), 0.0
    optimizer = torch.optim.Adam([x], 0.3)
    for _ in range(steps):
        value = move(x)
        best = max(best, value.item())
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("name", SENSITIVE)
def test_no_example_moves_a_sum_by_more_than_its_rule_declares_and_some_by_nearly_as_much(name, preconditioned):
    clip = SENSITIVE[name]
    shapes = [6, 3, 5, 2]
    random = torch.Generator().manual_seed(4)
    others = torch.randn(5, 16, generator=random, dtype=torch.float64)
    divisor = torch.rand(16, generator=random, dtype=torch.float64) + 0.01
    map_ = Preconditioning(divisor, torch.randn(16, generator=random, dtype=torch.float64), 0.6) if preconditioned else Preconditioning()

    def total(rows):
        given = GivenGradients(tuple(rows.split(shapes, 1)))
        return sum_clipped(given, clip, map_, shapes, rows.detach()[0])

    found = []
    for scale in (1e-3, 1.0, 1e3):
        for _ in range(10):
            one = scale * torch.randn(1, 16, generator=random, dtype=torch.float64)
            found.append(float((total(torch.cat([others, one])) - total(others)).norm()))
        found.append(largest_move(lambda x: total_with(x, clip, map_, shapes).norm(), scale * torch.randn(1, 16, generator=random, dtype=torch.float64)))
    assert max(found) <= clip.sensitivity * (1 + 1e-9)
    assert max(found) > 0.95 * clip.sensitivity


def total_with(x, clip, map_, shapes):
    """What one example with gradient `x`, (1, dim), adds to a sum: differentiable by it."""
    moved = map_(x)
    norms = torch.stack([part.norm(dim=1) for part in moved.split(shapes, 1)], 1)
    scales = clip.scales(norms)
    return torch.cat([part * scales[:, k:k + 1] for k, part in enumerate(moved.split(shapes, 1))], 1)


def test_an_example_moves_a_clipped_micro_batch_by_up_to_twice_the_clip_norm():
    """The average of the others points one way, with the example it points the other: both are clipped."""
    method = replace(dp_sgd(0.1, 0.5, 1.0), microbatch_size=4)
    assert method.sensitivity(FlatClip(0.5)) == 1.0
    module = LeastSquares(2, bias=False).double()
    task = Task(module, lambda outputs, targets: squared_error(outputs, targets) / 2)
    x, group = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    random, found = torch.Generator().manual_seed(0), []
    for _ in range(100):
        y = 20 * torch.randn(4, generator=random, dtype=torch.float64)
        sums = [sum_clipped(MicroBatchGradients(task, x[:k], y[:k], group[:k], 1, 4), FlatClip(0.5), Preconditioning(), [2], torch.zeros(2, dtype=torch.float64)) for k in (3, 4)]
        found.append(float((sums[0] - sums[1]).norm()))
    assert 0.95 < max(found) <= 1.0 + 1e-12


def test_micro_batches_are_averages_over_their_size_whatever_their_number_of_examples():
    x, y = data(10)
    module, group = mlp(), torch.tensor([0, 2, 2, 0, 1, 2, 2, 2, 0, 1])
    rows, like = explicit(module, x, y), torch.zeros(DIM, dtype=torch.float64)
    averages = torch.stack([rows[group == k].sum(0) / 4 for k in range(4)])
    expected = (averages * (0.1 / averages.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1)).sum(0)
    sizes = [p.numel() for p in module.parameters()]
    for chunk in (None, 2):
        found = sum_clipped(MicroBatchGradients(Task(module), x, y, group, 4, 4, chunk), FlatClip(0.1), Preconditioning(), sizes, like)
        assert torch.allclose(found, expected, atol=1e-12)


def test_without_noise_and_clipping_micro_batches_change_nothing():
    found, _ = trained(replace(without_privacy(dp_sgd(0.3, 1.0, 1.0)), microbatch_size=4))
    assert torch.allclose(flat(found), by_hand(lambda w, g, t, public, module: w - 0.3 * g), atol=1e-12)


# Noise and charges

def noise_of(method, count=4000, steps=1, batch_size=8, **settings):
    """What a model of zeros is moved by, in units of the learning rate, when all batches are empty: noise alone."""
    module = LeastSquares(count, bias=False).double()
    optimizer = PrivateOptimizer(module, method, batch_size=batch_size, sampling=NoSampling(), **settings)
    for _ in range(steps):
        optimizer.step(torch.zeros(0, count), torch.zeros(0))
    return flat(module), optimizer


def standard_error(count):
    """Of the sample variance of so many standard normal numbers."""
    return math.sqrt(2 / count)


@pytest.mark.parametrize("randomness", ["seed", "os"])
@pytest.mark.parametrize(("method", "deviation"), [
    (dp_sgd(1.0, 0.5, 3.0), 3.0 * 0.5 / 8), (replace(dp_sgd(1.0, 0.5, 3.0), microbatch_size=4), 3.0 * 2 * 0.5 / 2),
    (PrivateMethod(ClippedGradient(AutomaticClip(2.0)), GradientDescent(1.0), 1.5), 1.5 * 2.0 / 8)])
def test_an_empty_batch_is_a_step_of_noise_at_the_declared_deviation(method, deviation, randomness):
    """Variance within 5 standard errors: a right one fails less than once in a million."""
    moved, optimizer = noise_of(method, ledger=Ledger(PrivacyBudget(randomness=randomness, unit="example")))
    assert abs(float(moved.var()) / deviation**2 - 1) < 5 * standard_error(4000)
    assert abs(float(moved.mean())) < 5 * deviation / math.sqrt(4000)
    assert optimizer.steps == 1
    assert optimizer.ledger.rounds == ((RoundEvent((GaussianRelease(method.noise_multiplier, 2.0, "mean of clipped gradients"),), NoSampling(), "example"), 1),)


def test_the_noise_in_dp2s_preconditioner_has_the_variance_of_one_release_over_the_length_of_the_phase():
    """sigma^2 C^2 / (s1 b^2) [Li23, section 6.8.2]; within 5 standard errors."""
    _, optimizer = noise_of(dp2(1e-9, 0.5, 3.0, 5), steps=5)
    mean = optimizer.state_dict()["transform"][1] / 5
    theory = (3.0 * 0.5) ** 2 / (5 * 8**2)
    assert abs(float(mean.var()) / theory - 1) < 5 * standard_error(4000)
    _, debiased = noise_of(dp2(1e-9, 0.5, 3.0, 5, debias=True), steps=5)
    second = debiased.state_dict()["transform"][0]
    assert torch.allclose(second, 0.1 * (debiased.state_dict()["transform"][1] / 5).square().sub(theory).clamp(min=0))
    assert 0 < float((second > 0).double().mean()) < 0.5       # most of what is noise alone falls below its variance


def test_a_phase_as_long_as_the_run_is_dp_sgd_bit_for_bit_and_costs_the_same():
    plain, charged = trained(dp_sgd(0.3, 0.2, 0.7), 8, seed=5)
    delayed, also = trained(dp2(0.3, 0.2, 0.7, 8, 0.01, 3.0), 8, seed=5)
    assert torch.equal(flat(plain), flat(delayed))
    assert charged.ledger.rounds == also.ledger.rounds
    shorter, same = trained(dp2(0.3, 0.2, 0.7, 4, 0.01, 3.0), 8, seed=5)
    assert not torch.equal(flat(plain), flat(shorter))
    assert same.ledger.rounds == charged.ledger.rounds         # one release a step in either phase


METHODS = {
    "dp_sgd": dp_sgd(0.1, 0.5, 0.8, momentum=0.5), "dp_adam": dp_adam(0.1, 0.5, 0.8), "dp_rmsprop": dp_rmsprop(0.1, 0.5, 0.8),
    "dp_adagrad": dp_adagrad(0.1, 0.5, 0.8), "dp_yogi": dp_yogi(0.1, 0.5, 0.8), "adadps": adadps(0.1, 0.5, 0.8, torch.full((DIM,), 0.5)),
    "public": adadps(0.1, 0.5, 0.8, GradientPreconditioner(first_decay=0.9)), "dp2": dp2(0.1, 0.5, 0.8, 3),
    "dp2_extra_query": dp2_extra_query(0.1, 0.5, 0.8, 3), "dp_r_pub": dp_r_pub(0.1, 0.5, 0.8), "dp_adam_pub": dp_adam_pub(0.1, 0.5, 0.8),
    "pda_dpmd": pda_dpmd(0.1, 0.5, 0.8), "micro-batches": replace(dp_sgd(0.1, 0.5, 0.8), microbatch_size=4),
}


@pytest.mark.parametrize("name", METHODS)
def test_same_seed_same_bits_and_a_checkpoint_continues_them(name):
    method = METHODS[name]
    one, optimizer = trained(method, 7, public=PUBLIC, seed=3)
    again, _ = trained(method, 7, public=PUBLIC, seed=3)
    other, _ = trained(method, 7, public=PUBLIC, seed=4)
    assert torch.equal(flat(one), flat(again))
    assert not torch.equal(flat(one), flat(other))
    half, stopped = trained(method, 4, public=PUBLIC, seed=3)
    resumed = PrivateOptimizer(copy.deepcopy(half), method, batch_size=BATCH, sampling=NoSampling(), public=PUBLIC, seed=3, ledger=stopped.ledger)
    resumed.load_state_dict(stopped.state_dict())
    for step in range(4, 7):
        resumed.step(*data(seed=step))
    assert torch.equal(resumed.params, flat(one))
    assert resumed.ledger.rounds == optimizer.ledger.rounds


def test_the_ledger_has_every_release_before_it_is_made():
    module = mlp()
    optimizer = PrivateOptimizer(module, dp2_extra_query(0.1, 0.5, 0.8, 3), batch_size=BATCH, sampling=PoissonSampling(0.01))
    charged = []

    class Watched:
        def chunks(self):
            charged.append(sum(len(event.releases) * times for event, times in optimizer.ledger.rounds))
            yield from AutogradGradients(Task(module), *data()).chunks()
    for _ in range(4):
        optimizer.step_on(Watched())
    assert charged == [1, 2, 3, 4, 5, 6]                        # 1, 2, 2 and 1 queries
    release = GaussianRelease(0.8, 2.0, "mean of clipped gradients")
    assert dict(optimizer.ledger.rounds) == {RoundEvent((release,), PoissonSampling(0.01), "example"): 2, RoundEvent((release, release), PoissonSampling(0.01), "example"): 2}


def test_the_toy_of_section_6_2_costs_what_the_accountant_says_though_batches_may_be_empty():
    batches = PoissonBatches(1000, 8, 2250)
    module = LeastSquares(1, bias=False)
    optimizer = PrivateOptimizer(module, dp_sgd(0.01, 1.0, 0.7), batch_size=8, sampling=batches.sampling)
    for rows in batches:
        optimizer.step(torch.zeros(len(rows[:1]), 1), torch.zeros(len(rows[:1])))
    assert optimizer.guarantee(1e-3).epsilon == approx(3.417, abs=0.02)
    assert optimizer.guarantee(1e-3).second_opinion[1] == approx(4.127, abs=0.02)


def test_a_spent_budget_stops_the_steps_and_changes_nothing():
    ledger = Ledger(PrivacyBudget(epsilon=1.0, delta=1e-5, unit="example"))
    module = mlp()
    optimizer = PrivateOptimizer(module, dp_sgd(0.1, 0.5, 4.0), batch_size=BATCH, sampling=NoSampling(), ledger=ledger)
    for step in range(ledger.affordable_rounds(RoundEvent((GaussianRelease(4.0, 2.0, "mean of clipped gradients"),), NoSampling(), "example"))):
        optimizer.step(*data(seed=step))
    before = optimizer.params
    with pytest.raises(BudgetSpent):
        optimizer.step(*data())
    assert torch.equal(optimizer.params, before)
    assert 0 < optimizer.steps < 100
    assert ledger.guarantee().epsilon <= 1.0
    assert sum(times for _, times in ledger.rounds) == optimizer.steps


def test_poisson_batches_have_every_example_at_its_rate_and_sizes_that_vary():
    """4000 batches of 40 examples at rate 0.1: each share within 5 standard errors of 0.1."""
    batches = PoissonBatches(40, 4, 4000, seed=1)
    seen = torch.zeros(len(batches), 40)
    for row, rows in zip(seen, batches, strict=True):
        row[rows] = 1
    assert ((seen.mean(0) - 0.1).abs() < 5 * math.sqrt(0.09 / 4000)).all()
    sizes = seen.sum(1)
    assert sizes.var() == approx(40 * 0.09, rel=0.15)
    assert (sizes == 0).any()
    covariance = ((seen - 0.1).T @ (seen - 0.1) / 4000).fill_diagonal_(0)
    assert covariance.abs().max() < 6 * 0.09 / math.sqrt(4000)
    assert not torch.equal(torch.cat(list(PoissonBatches(1000, 100, 1, randomness="os"))), torch.cat(list(PoissonBatches(1000, 100, 1, randomness="os"))))


# Side information

def test_side_information_is_spread_over_the_parameters_of_features():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    frequencies = torch.tensor([0.5, 0.1, 0.0, 1.0])
    found = frequency_divisor(module, frequencies, 0.01)
    assert torch.equal(found[:12].view(3, 4), (frequencies + 0.01).expand(3, 4))
    assert torch.equal(found[12:], torch.ones(3 + 6 + 2))
    assert torch.allclose(tfidf_divisor(module, frequencies, 0.01)[:4], 1 / (frequencies + 0.01))
    with pytest.raises(ValueError, match="no parameter of Sequential has a last axis of 5 features"):
        feature_divisor(module, torch.ones(5))


# Refusals

@pytest.mark.parametrize(("make", "text"), [
    (lambda: FlatClip(0.0), r"clip_norm \(C\) must be positive and finite, got 0. It bounds the norm of a gradient; without clipping, which is not private, write NoClip\(\)."),
    (lambda: LayerClip(()), "LayerClip needs one clip norm for each parameter tensor of the model, got none."),
    (lambda: AutomaticClip(1.0, 0.0), "stability must be positive and finite, got 0. 0.01 is usual."),
    (lambda: RMSPropMoment(1.0), r"decay must be in \[0, 1\), got 1. It is the share of the past that is kept: 0.9 or 0.99."),
    (lambda: FixedPreconditioner(torch.zeros(3)), r"the divisor must be a flat vector of positive finite numbers, one for each parameter, got shape \(3,\) with smallest entry 0."),
    (lambda: DelayedMoment(0, 3), r"both phases need at least one step, got plain_steps \(s1\) = 0 and delayed_steps \(s2\) = 3."),
    (lambda: AdaptiveRule(0.1, epsilon=0.0), "epsilon, which keeps divisors away from zero, must be positive, got 0. 1e-3 is usual."),
    (lambda: PrivateMethod(ClippedGradient(NoClip()), GradientDescent(0.1), 1.0), "noise_multiplier=1 without clipping gives infinite noise."),
    (lambda: dp_sgd(0.1, 1.0, -1.0), r"noise_multiplier \(z\) must be 0 or more and finite, got -1."),
    (lambda: trained(adadps(0.1, 1.0, 1.0, torch.ones(3))), f"the preconditioner has 3 entries, the model {DIM} parameters."),
    (lambda: trained(pda_dpmd(0.1, 1.0, 1.0)), r"this method reads public gradients. Give public=PublicData\(inputs, targets, batch_size\)"),
    (lambda: trained(PrivateMethod(ClippedGradient(LayerClip((1.0,))), GradientDescent(0.1), 1.0)), "LayerClip has 1 clip norms, and the model has 4 parameter tensors."),
    (lambda: trained(replace(dp_sgd(0.1, 1.0, 1.0), microbatch_size=5)), "batch_size=12 is no whole number of micro-batches of 5 examples."),
    (lambda: trained(ideal_adadps(0.1, 1.0, 1.0), ledger=Ledger(PrivacyBudget(epsilon=8.0, delta=1e-5, unit="example"))), "this method reads exact private gradients, which no epsilon covers, and the ledger has a budget of epsilon = 8."),
    (lambda: trained(without_privacy(dp_sgd(0.1, 1.0, 1.0)), ledger=Ledger(PrivacyBudget(epsilon=8.0, delta=1e-5, unit="example"))), "this method adds no noise, which no epsilon covers"),
    (lambda: trained(dp_sgd(0.1, 1.0, 1.0), ledger=Ledger()), r"steps protect single examples, and the ledger's budget is about clients. Write Ledger\(PrivacyBudget\(..., unit=\"example\"\)\)."),
    (lambda: PoissonBatches(10, 11, 3), "the expected batch_size must be positive and at most the 10 examples, got 11."),
    (lambda: PublicData(torch.zeros(0, 2), torch.zeros(0)), "there are no public examples."),
])
def test_what_does_not_fit_is_refused_in_words(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_module_that_mixes_examples_and_a_missing_sampling_are_refused():
    with pytest.raises(ValueError, match="keeps running statistics"):
        PrivateOptimizer(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), dp_sgd(0.1, 1.0, 1.0), batch_size=4, sampling=NoSampling())
    with pytest.raises(TypeError, match=r"sampling must be PoissonSampling\(rate\), FixedSampling\(...\) or NoSampling\(\), got 0.01."):
        PrivateOptimizer(mlp(), dp_sgd(0.1, 1.0, 1.0), batch_size=4, sampling=0.01)


# Beside Opacus

BACKWARD_HOOKS = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


@BACKWARD_HOOKS
def test_grad_samples_of_opacus_give_the_same_step():
    opacus = pytest.importorskip("opacus")
    from opacus.grad_sample import GradSampleModule
    wrapped, own, (x, y) = GradSampleModule(mlp(), loss_reduction="sum"), mlp(), data()
    method = dp2(0.3, 0.2, 0.7, 2, 0.1, 1.0)
    theirs = PrivateOptimizer(wrapped, method, batch_size=BATCH, sampling=NoSampling(), seed=2)
    ours = PrivateOptimizer(own, method, batch_size=BATCH, sampling=NoSampling(), seed=2)
    for step in range(5):
        x, y = data(seed=step)
        wrapped.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        theirs.step_on(GivenGradients.from_grad_samples(wrapped.parameters()))
        ours.step(x, y)
    assert opacus.__version__
    assert torch.allclose(theirs.params, ours.params, atol=1e-10)
    with pytest.raises(ValueError, match="the module is in Opacus's GradSampleModule, which computes gradients of examples itself"):
        theirs.step(*data())
    wrapped.zero_grad()
    with pytest.raises(ValueError, match="each parameter needs one tensor in grad_sample"):
        GivenGradients.from_grad_samples(wrapped.parameters())


@BACKWARD_HOOKS
def test_without_noise_a_step_is_that_of_opacus_own_optimiser_and_its_poisson_loader_feeds_ours():
    pytest.importorskip("opacus")
    from opacus.data_loader import DPDataLoader
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from torch.utils.data import DataLoader, TensorDataset
    dataset = TensorDataset(*data(40))
    loader = DPDataLoader.from_data_loader(DataLoader(dataset, batch_size=4), generator=torch.Generator().manual_seed(0))
    wrapped, own = GradSampleModule(mlp()), mlp()
    theirs = DPOptimizer(torch.optim.SGD(wrapped.parameters(), 0.3), noise_multiplier=0.0, max_grad_norm=0.2, expected_batch_size=4)
    ours = PrivateOptimizer(own, replace(dp_sgd(0.3, 0.2, 1.0), noise_multiplier=0.0), batch_size=4, sampling=PoissonSampling(0.1))
    sizes = []
    for x, y in loader:
        ours.step(x, y)
        sizes.append(len(y))
        theirs.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        theirs.step()
        assert torch.allclose(flat(own), flat(wrapped), atol=1e-5), sizes      # Opacus adds 1e-6 to norms
    assert ours.steps == len(loader)
    assert len(set(sizes)) > 2
