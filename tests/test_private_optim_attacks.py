"""Attempts to make a private optimiser release more than its ledger says: each is bounded, charged or refused in words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import binom
from torch import nn

import fedtail
from fedtail import Ledger, PrivacyBudget
from fedtail.local import example_private
from fedtail.losses import cross_entropy, squared_error
from fedtail.models import LeastSquares, SoftmaxRegression
from fedtail.privacy import FixedSampling, NonPrivateRelease, NoSampling, PoissonSampling
from fedtail.privacy.ledger import BudgetSpent, LedgerError
from fedtail.private_optim import (
    AutogradGradients,
    ClippedGradient,
    ClosedFormGradients,
    ExactGradient,
    FlatClip,
    GivenGradients,
    GradientDescent,
    GradientPreconditioner,
    LayerClip,
    MicroBatchGradients,
    NoisyMean,
    Preconditioning,
    PrivateMethod,
    PrivateOptimizer,
    dp_sgd,
    has_closed_form,
)
from fedtail.private_optim.closed_form import CHUNK_NUMBERS
from fedtail.private_optim.gradient_rows import OuterRows, sum_clipped
from fedtail.private_optim.poisson_batches import refuse_larger_batch
from fedtail.private_optim.queries import Direction
from fedtail.task import Task

from cases import small_population

SILENT = replace(dp_sgd(1.0, 1.0, 1.0), noise_multiplier=0.0)
X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3


def optimizer_of(module, method=dp_sgd(0.1, 1.0, 1.0), batch_size=9, **settings):
    return PrivateOptimizer(module, method, **{"batch_size": batch_size, "sampling": NoSampling(), **settings})


# What one example moves

@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
def test_an_example_without_a_finite_gradient_does_not_reach_other_micro_batches(value):
    """The first example of a batch was what pads short micro-batches, and the derivative of a loss that is not finite, times zero, is not zero."""
    task, zero = Task(LeastSquares(2, bias=False).double(), squared_error), torch.zeros(2, dtype=torch.float64)
    x, y = torch.tensor([[1.0, 0.0]] * 9, dtype=torch.float64), torch.full((9,), 100.0, dtype=torch.float64)
    group, broken = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 7]), x.clone()
    broken[0] = value
    sums = [sum_clipped(MicroBatchGradients(task, one, y, group, 8, 2), FlatClip(1.0), Preconditioning(), [2], zero) for one in (x, broken)]
    assert float((sums[0] - sums[1]).norm()) <= replace(SILENT, microbatch_size=2).sensitivity(FlatClip(1.0)) + 1e-12


@pytest.mark.parametrize("moved", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_a_gradient_that_cancels_the_public_moment_is_clipped_by_its_true_norm(moved):
    """AdaDPS with Adam in float32: (a g + c) / A where a g is nearly -c, so that three large terms of the squared norm cancel."""
    random = torch.Generator().manual_seed(1)
    signals, inputs = torch.randn(1, 2, generator=random), torch.randn(1, 2000, generator=random)
    map_ = Preconditioning(torch.full((4000,), 1e-3), -0.5 * (signals.T @ inputs).reshape(-1), 0.5)
    rows = OuterRows(signals, inputs * (1 + moved))
    exact = (0.5 * (rows.signals.double().T @ rows.inputs.double()).reshape(-1) + map_.shift.double()) / 1e-3
    assert float(rows.norms(map_)) == pytest.approx(float(exact.norm()), rel=1e-3)
    scale = FlatClip(1.0).scales(rows.norms(map_)[:, None])
    assert float(scale * exact.norm()) <= 1 + 1e-3


@pytest.mark.parametrize("divisor", [None, 1e-7])
def test_the_norm_of_a_product_of_a_tiny_and_a_huge_factor_is_not_lost(divisor):
    rows = OuterRows(torch.full((1, 2), 1e-24), torch.full((1, 100), 1e18))
    map_ = Preconditioning(None if divisor is None else torch.full((200,), divisor))
    assert float(rows.norms(map_)) == pytest.approx(1e-24 * 1e18 * math.sqrt(200) / (divisor or 1), rel=1e-5)


@pytest.mark.parametrize("length", [1e25, 1e29, 1e33, 1e37, 1e38])
def test_no_gradient_is_too_long_to_be_clipped(length):
    """In float32 the factor C / |g| has few digits, or none, where |g| nears the largest numbers: longer ones contribute zero."""
    given = GivenGradients((torch.full((1, 3), length / 2),))
    assert float(sum_clipped(given, FlatClip(1e-4), Preconditioning(), [3], torch.zeros(3)).norm()) <= 1e-4 * (1 + 1e-6)


CLIPS = {"flat": FlatClip(0.5), "layers": LayerClip((0.4, 0.3))}


@pytest.mark.parametrize("kind", [AutogradGradients, ClosedFormGradients])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_most_that_an_example_from_inputs_to_the_sum_moves_it_in_float32(kind, clip):
    """A random search over scales and labels: the norm of the move stays within the sensitivity, up to the rounding of float32."""
    torch.manual_seed(2)
    module, largest = nn.Linear(4, 3), 0.0
    task, sizes, random = Task(module, cross_entropy), [12, 3], torch.Generator().manual_seed(3)
    divisor = torch.rand(15, generator=random) * 0.1 + 1e-4
    map_ = Preconditioning(divisor, torch.randn(15, generator=random), 0.9)
    base = sum_clipped(kind(task, X, Y), CLIPS[clip], map_, sizes, torch.zeros(15))
    for scale in (1e-3, 1.0, 1e3, 1e10):
        for label in range(3):
            extra = scale * torch.randn(20, 4, generator=random)
            moves = [sum_clipped(kind(task, torch.cat([X, one[None]]), torch.cat([Y, torch.tensor([label])])), CLIPS[clip], map_, sizes,
                                 torch.zeros(15)) - base for one in extra]
            largest = max(largest, *(float(one.double().norm()) for one in moves))
    assert 0.9 * CLIPS[clip].sensitivity < largest <= CLIPS[clip].sensitivity * (1 + 1e-4)


# Modules that mix examples, or are not what they seem at first

class Centred(nn.Module):
    """Subtracts a mean over the batch, so that an example changes the gradients of all others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0) / 2)


class Counting(nn.Module):
    """Has a running mean of its inputs in a buffer, without noise."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x)


class Flattened(nn.Module):
    """Calls its layer on time steps and examples in one axis."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.reshape(-1, 4)).view(len(x), -1, 3).mean(1)


class Hidden(nn.Module):
    """A weight that is used by hand, behind a last layer of zeros by which nothing shows at first."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(x)) @ self.layer.weight)


def test_a_module_that_mixes_examples_is_refused_also_where_the_first_batch_has_one():
    optimizer = optimizer_of(Centred(), SILENT)
    optimizer.step(X[:1], Y[:1])                            # alone it mixes nothing
    before = optimizer.params
    with pytest.raises(ValueError, match="Centred gives an example other outputs when other examples are in the batch"):
        optimizer.step(X, Y)
    assert torch.equal(optimizer.params, before)
    assert optimizer.steps == sum(times for _, times in optimizer.ledger.rounds) == 1
    assert not has_closed_form(Task(Centred()), X[:1], Y[:1])


def test_a_module_that_keeps_what_it_saw_is_refused():
    with pytest.raises(ValueError, match="Counting changes seen when it is called in training"):
        optimizer_of(Counting()).step(X, Y)


def test_layers_that_are_called_on_something_else_than_the_batch_have_no_closed_form():
    module, x = Flattened(), X[:8].reshape(4, 2, 4)
    assert not has_closed_form(Task(module), x, Y[:4])
    rows = torch.stack([torch.cat([g.reshape(-1) for g in torch.autograd.grad(nn.functional.cross_entropy(module(x[k:k + 1]), Y[k:k + 1]), module.parameters())])
                        for k in range(4)])
    optimizer = optimizer_of(module, SILENT, 4)
    before = optimizer.params
    optimizer.step(x, Y[:4])
    assert torch.allclose(before - optimizer.params, (rows / rows.norm(dim=1, keepdim=True).clamp(min=1)).sum(0) / 4, atol=1e-6)


def test_a_weight_that_is_used_by_hand_is_found_behind_a_layer_of_zeros():
    assert not has_closed_form(Task(Hidden()), X, Y)


def test_batches_of_one_example_are_the_same_bits_after_a_checkpoint():
    def run(module, optimizer, steps):
        for step in steps:
            count = (3, 1, 2, 1)[step]
            optimizer.step(X[step:step + count], Y[step:step + count])
        return optimizer

    torch.manual_seed(0)
    whole, half = nn.Linear(4, 3), nn.Linear(4, 3)
    half.load_state_dict(whole.state_dict())
    run(whole, first := optimizer_of(whole), range(4))
    stopped = run(half, optimizer_of(half), range(1))
    again = optimizer_of(half, ledger=stopped.ledger)
    again.load_state_dict(stopped.state_dict())
    assert torch.equal(run(half, again, range(1, 4)).params, first.params)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: optimizer_of(nn.Linear(4, 3), loss=nn.functional.cross_entropy).step(X, Y), r"loss must return one number per example, shape \(6,\), got \(\)"),
    (lambda: optimizer_of(nn.Linear(4, 2)).step(X, Y), "targets hold labels 0 to 2, but Linear has 2 outputs"),
    (lambda: optimizer_of(nn.Linear(5, 3)).step(X, Y), "Linear cannot take examples of shape"),
    (lambda: optimizer_of(nn.Linear(4, 3)).guarantee(), "at which delta.*below one over the number of examples"),
    (lambda: optimizer_of(nn.Linear(4, 3).bfloat16()), "parameters are torch.bfloat16, in which a clipped gradient may be one percent longer"),
])
def test_a_newcomers_mistakes_are_refused_in_words(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_parameters_that_are_unfrozen_or_replaced_need_a_new_optimiser():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    optimizer = optimizer_of(module)
    optimizer.step(X, Y)
    module[0].requires_grad_(True)
    with pytest.raises(ValueError, match="the module has other trainable parameters than when the optimiser was made"):
        optimizer.step(X, Y)
    module[0].requires_grad_(False)
    module[1] = nn.Linear(4, 3)                             # of equal shape, but another one
    with pytest.raises(ValueError, match="Make a new optimiser, with the same ledger"):
        optimizer.step(X, Y)
    assert optimizer.steps == sum(times for _, times in optimizer.ledger.rounds) == 1


# Batches that were not sampled as stated

def test_a_batch_that_the_stated_sampling_hardly_gives_is_refused():
    optimizer = optimizer_of(nn.Linear(4, 3), batch_size=8, sampling=PoissonSampling(1e-4))
    with pytest.raises(ValueError, match=r"a batch of 90 examples is not drawn by Poisson sampling that gives 8 on average"):
        optimizer.step(X.repeat(10, 1), Y.repeat(10))
    rows = (torch.zeros(90, 3, 4), torch.zeros(90, 3))
    with pytest.raises(ValueError, match="a batch of 90 examples"):
        optimizer.step_on(GivenGradients(rows))
    fixed = optimizer_of(nn.Linear(4, 3), batch_size=8, sampling=FixedSampling(8, 1000))
    with pytest.raises(ValueError, match="a batch of 9 examples is none of 8 drawn of 1000"):
        fixed.step(X, Y)
    assert optimizer.ledger.rounds == fixed.ledger.rounds == ()
    optimizer_of(nn.Linear(4, 3), batch_size=1).step(X, Y)                        # without sampling nothing is claimed


@pytest.mark.parametrize(("examples", "batch_size"), [(1000, 8), (60_000, 256), (100, 0.5), (20, 19)])
def test_true_poisson_batches_are_refused_less_than_once_in_a_million_million(examples, batch_size):
    """The smallest refused size, found by trying, and the exact binomial probability of that many or more."""
    def is_refused(count):
        try:
            refuse_larger_batch(count, batch_size, PoissonSampling(batch_size / examples))
        except ValueError:
            return True
        return False
    refused = next(count for count in range(examples * 10) if is_refused(count))
    assert binom.sf(refused - 1, examples, batch_size / examples) < 1e-12
    assert refused < batch_size + 10 * math.sqrt(batch_size) + 30


# Attempts on the ledger

def test_whoever_uses_a_ledger_is_charged_on_it():
    ledger = Ledger(PrivacyBudget(epsilon=3.0, delta=1e-5, unit="example"))
    one, other = (optimizer_of(nn.Linear(4, 3), dp_sgd(0.1, 1.0, noise), ledger=ledger) for noise in (4.0, 9.0))

    def go_on():
        while True:
            one.step(X, Y)
            other.step(X, Y)
            one.load_state_dict({**one.state_dict(), "steps": 0})                  # a rollback does not give anything back
    with pytest.raises(BudgetSpent):
        go_on()
    assert 2.5 < ledger.guarantee().epsilon <= 3.0
    assert sum(times for _, times in ledger.rounds) > 4


def test_noise_that_changes_between_steps_is_charged_as_it_is():
    optimizer = optimizer_of(nn.Linear(4, 3), dp_sgd(0.1, 1.0, 4.0))
    optimizer.step(X, Y)
    optimizer.method = replace(optimizer.method, noise_multiplier=0.5)
    optimizer.step(X, Y)
    optimizer.method = replace(optimizer.method, noise_multiplier=0.0)
    assert sorted(event.releases[0].noise_multiplier for event, _ in optimizer.ledger.rounds) == [0.5, 4.0]
    optimizer.step(X, Y)
    assert optimizer.guarantee(1e-5).epsilon == math.inf


def test_two_ledgers_on_one_file_do_not_spend_a_budget_twice(tmp_path):
    budget = PrivacyBudget(epsilon=3.0, delta=1e-5, unit="example")
    one, other = (optimizer_of(nn.Linear(4, 3), dp_sgd(0.1, 1.0, 4.0), ledger=Ledger(budget, tmp_path / "ledger.jsonl")) for _ in range(2))
    one.step(X, Y)
    with pytest.raises(LedgerError, match="was changed while this run was writing it"):
        other.step(X, Y)


class Greedy(ClippedGradient):
    """Declares one noisy mean, and asks for two and for an exact gradient."""

    def direction(self, state, step):
        yield NoisyMean(self.clip)
        yield NoisyMean(self.clip)
        return Direction((yield ExactGradient()).gradient, state)


def test_a_transform_that_asks_for_more_than_it_declares_is_charged_for_it():
    method = PrivateMethod(Greedy(FlatClip(1.0)), GradientDescent(0.1), 2.0)
    optimizer = optimizer_of(nn.Linear(4, 3), method)
    optimizer.step(X, Y)
    (event, _), = optimizer.ledger.rounds
    assert [type(release).__name__ for release in event.releases] == ["GaussianRelease", "GaussianRelease", "NonPrivateRelease"]
    assert isinstance(event.releases[2], NonPrivateRelease)
    limited = optimizer_of(nn.Linear(4, 3), method, ledger=Ledger(PrivacyBudget(epsilon=100.0, delta=1e-5, unit="example")))
    with pytest.raises(ValueError, match="would be released without noise"):
        limited.step(X, Y)
    with pytest.raises(ValueError, match="this method reads public gradients"):
        optimizer_of(nn.Linear(4, 3), replace(method, transform=ClippedGradient(FlatClip(1.0), GradientPreconditioner())))


# Memory

class Sequence(nn.Module):
    """A wide linear layer on time steps, whose gradients are written out."""

    def __init__(self):
        super().__init__()
        self.wide, self.last = nn.Linear(300, 300), nn.Linear(300, 3)

    def forward(self, x):
        return self.last(self.wide(x).mean(1))


@pytest.mark.parametrize(("module", "shape"), [
    (Sequence(), (2, 300)), (nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 1024, 3)), (4, 32, 32))])
def test_no_tensor_that_closed_forms_make_is_larger_than_planned(module, shape, monkeypatch):
    """All results of torch functions are watched: the largest are gradients written out, patches of pixels, and activations."""
    monkeypatch.setattr("fedtail.private_optim.closed_form.CHUNK_NUMBERS", CHUNK_NUMBERS // 16)
    x, y, largest = torch.randn(64, *shape), torch.arange(64) % 3, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            largest = max([largest, *(one.numel() for one in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(one, torch.Tensor))])
            return found
    task, sizes = Task(module, cross_entropy), [p.numel() for p in module.parameters()]
    with Watch():
        chunked = sum_clipped(ClosedFormGradients(task, x, y), FlatClip(0.1), Preconditioning(), sizes, torch.zeros(sum(sizes)))
    assert largest <= CHUNK_NUMBERS // 16
    at_once = sum_clipped(ClosedFormGradients(task, x, y, 64), FlatClip(0.1), Preconditioning(), sizes, torch.zeros(sum(sizes)))
    assert torch.allclose(chunked, at_once, atol=1e-5)


def test_the_examples_of_one_client_are_differentiated_a_few_at_a_time(monkeypatch):
    population, task = small_population(5), fedtail.Task(SoftmaxRegression(5, 3).double())
    method = replace(fedtail.fedavg(5), sample=fedtail.Everyone(), local=fedtail.ExamplePrivateSGD(0.3, 0.5, 0.2))
    budget, engine = PrivacyBudget(unit="example"), fedtail.Engine(workers=1, dtype=torch.float64)
    whole = fedtail.train(method, task, population, rounds=2, privacy=budget, engine=engine).state.params
    seen = []
    original = example_private.ExamplePrivateSGD._clipped_sums_at_once

    def watched(self, clients, own, batch, some, places):
        seen.append(len(own) * batch.weight[some, places].shape[1])
        return original(self, clients, own, batch, some, places)
    monkeypatch.setattr(example_private.ExamplePrivateSGD, "_clipped_sums_at_once", watched)
    monkeypatch.setattr(example_private, "NUMBERS", 3 * 18)
    few = fedtail.train(method, task, population, rounds=2, privacy=budget, engine=engine).state.params
    assert max(seen) <= 3 < int(population.size.max())
    assert torch.allclose(whole, few, atol=1e-12)
