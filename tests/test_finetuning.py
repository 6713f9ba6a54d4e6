"""Fine-tuning held near the shared model's predictions, by symmetrised KL divergence: against autograd, on every kernel. Early stopping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedtail
from fedtail import Engine, LocalSGD, Population, Task, losses, train
from fedtail.evaluation.personal import kept_personal_rows
from fedtail.local import SymmetrisedKL
from fedtail.models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.personal import FineTuning

WIDE = torch.float64
STEPS = LocalSGD(0.1, batch_size=None, local_steps=4)


def people(classes=3, clients=5) -> Population:
    random = torch.Generator().manual_seed(0)
    sizes = [4 + 3 * k % 7 for k in range(clients)]
    return Population.from_clients([(torch.randn(n, 4, generator=random, dtype=WIDE) + k / 4, torch.randint(0, classes, (n,), generator=random))
                                    for k, n in enumerate(sizes)])


def away_from_zero(module: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=WIDE) / 2)
    return module


CASES = {
    "softmax": (lambda: SoftmaxRegression(4, 3), 3, ("closed", "stacked", "module")),
    "logistic": (lambda: LogisticRegression(4), 2, ("closed", "stacked", "module")),
    "one output": (lambda: nn.Linear(4, 1), 2, ("closed", "stacked", "module")),
    "network": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 3, ("stacked", "module")),
}


def probabilities(outputs: torch.Tensor, examples: int) -> torch.Tensor:
    """Of all classes, two where there is one logit."""
    if outputs.numel() == examples:
        likely = torch.sigmoid(outputs.reshape(-1))
        return torch.stack([1 - likely, likely], 1)
    return torch.softmax(outputs, 1)


def tuned_by_hand(task: Task, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor, strength: float) -> torch.Tensor:
    """Gradient descent on loss and penalty, the two divergences written out one by one, by autograd."""
    reference = probabilities(task.with_params(start)(x).detach(), len(y))
    module = task.with_params(start)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        outputs = module(x)
        found = probabilities(outputs, len(y))
        forth, back = ((a * (a / b).log()).sum(1) for a, b in ((found, reference), (reference, found)))
        (-found[torch.arange(len(y)), y].log() + strength / 2 * (forth + back)).mean().backward()
        optimizer.step()
    return task.params(module)


def tuned(task, population, strength, kernel="auto", **more):
    local = LocalSGD(0.1, batch_size=None, local_steps=4, penalty=SymmetrisedKL(strength))
    method = replace(fedtail.fedavg(len(population)), local=STEPS, personal=FineTuning(replace(local, **more)))
    return kept_personal_rows(train(method, task, population, rounds=1, engine=Engine(kernel=kernel, workers=1)), population.key).read().rows


@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name, (_, _, kernels) in CASES.items() for kernel in kernels])
def test_predictions_are_held_by_both_divergences(name, kernel):
    make, classes, _ = CASES[name]
    task, population = Task(away_from_zero(make())), people(classes)
    rows = tuned(task, population, 3.0, kernel)
    for k, row in enumerate(rows):
        assert torch.allclose(row, tuned_by_hand(task, task.params(), *population.client(k), 3.0), rtol=0, atol=1e-10), k


def test_mini_batches_and_momentum_take_the_penalty_of_their_batch():
    """With one example a batch, the divergence is that of this example: written out for one epoch of a client in the order of its draws."""
    task, population = Task(away_from_zero(SoftmaxRegression(4, 3))), people(clients=1)
    x, y = population.client(0)
    found = tuned(task, population, 2.0, batch_size=1, local_steps=1, momentum=0.9)[0]
    choices = [one_step(task, x[i : i + 1], y[i : i + 1], 2.0) for i in range(len(y))]
    assert min(float((found - one).abs().max()) for one in choices) < 1e-10
    assert max(float((found - one).abs().max()) for one in choices) > 1e-3


def one_step(task, x, y, strength):
    start = task.params()
    w = start.clone().requires_grad_()
    scores = x @ w[:12].reshape(3, 4).T + w[12:]
    old = (x @ start[:12].reshape(3, 4).T + start[12:]).log_softmax(1)
    new = scores.log_softmax(1)
    both = ((new.exp() * (new - old)).sum() + (old.exp() * (old - new)).sum())
    return (w - 0.1 * torch.autograd.grad(torch.nn.functional.cross_entropy(scores, y) + strength / 2 * both, w)[0]).detach()


def test_extreme_strengths_are_plain_fine_tuning_and_the_model_received():
    task, population = Task(away_from_zero(SoftmaxRegression(4, 3))), people()
    plain = replace(fedtail.fedavg(5), local=STEPS, personal=FineTuning(STEPS))
    rows = kept_personal_rows(train(plain, task, population, rounds=1), population.key).read().rows
    assert torch.allclose(tuned(task, population, 0.0), rows, rtol=0, atol=1e-12)
    predictions = []
    for strength in (0.0, 300.0):
        tuned_rows = tuned(task, population, strength, learning_rate=0.002, local_steps=500)
        far = [losses.symmetrised_kl(task.with_params(row)(population.client(k)[0]), task.module(population.client(k)[0])).mean() for k, row in enumerate(tuned_rows)]
        predictions.append(float(torch.stack(far).max().detach()))
    assert predictions[1] < 1e-3 * predictions[0]


def test_dropout_and_the_gradient_of_the_subproblem():
    torch.manual_seed(0)
    task, population = Task(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()), people()
    first, again, without = tuned(task, population, 1.0), tuned(task, population, 1.0), tuned(task, population, 0.0)
    assert torch.equal(first, again)
    assert not torch.allclose(first, without)
    task = Task(away_from_zero(SoftmaxRegression(4, 3)))
    local = LocalSGD(0.1, batch_size=None, local_steps=4, penalty=SymmetrisedKL(2.0))
    found = fedtail.inexactness(task.module, population, replace(local, local_steps=1500), task)
    assert float(found.values.max()) < 0.02                      # near the solution of the subproblem, whose gradient includes the penalty


@pytest.mark.parametrize(("task", "targets", "text"), [
    (lambda: Task(LeastSquares(4).double()), torch.float64, "the loss of this task is squared_error, whose outputs are not known"),
    (lambda: Task(LogisticRegression(4).double(), loss=losses.hinge), torch.int64, "the loss of this task is hinge, whose outputs are not known"),
    (lambda: Task(nn.Linear(4, 1).double()), torch.float64, "the loss of this task is squared error, whose outputs are not known"),
])
def test_outputs_that_are_no_class_scores_are_refused(task, targets, text):
    population = people(2)
    population = replace(population, targets=population.targets.to(targets))
    with pytest.raises(ValueError, match=text):
        tuned(task(), population, 1.0)
    with pytest.raises(ValueError, match=r"strength \(lambda\) must be at least 0 and finite, got -1\."):
        SymmetrisedKL(-1.0)


# early stopping, then fine-tuning

@pytest.mark.parametrize(("statistic", "every"), [("loss.mean", 1), ("error.worst20", 1), ("loss.p90", 3)])
def test_a_run_stops_when_its_validation_value_no_longer_improves(statistic, every):
    own, held = people(clients=8).split_examples(within=0.5)
    task, method = Task(away_from_zero(SoftmaxRegression(4, 3))), fedtail.fedavg(4, learning_rate=0.5, batch_size=None, local_steps=5)
    metric, name = statistic.split(".")
    models = []
    train(method, task, own, rounds=60, on_round=lambda p: models.append(p.trained) and None)
    values = [fedtail.evaluate(one, held)[metric].statistic(name) for one in models[every - 1 :: every]]
    best = ends = 0
    for k, value in enumerate(values):
        best, ends = (k, k) if value < values[best] else (best, k)
        if k - best == 4:
            break
    stop = fedtail.EarlyStopping(held, patience=4, every=every, statistic=statistic)
    trained = train(method, task, own, rounds=60, on_round=stop)
    assert trained.rounds == every * (ends + 1) < 60
    assert (stop.best.rounds, stop.value) == (every * (best + 1), values[best])
    tuned = fedtail.finetune(stop.best, held.at_least(2), STEPS)
    assert torch.equal(tuned.before.loss.values, fedtail.finetune(models[every * (best + 1) - 1], held.at_least(2), STEPS).before.loss.values)


def test_settings_of_early_stopping_are_refused_in_words():
    population = people()
    for wrong, text in (({"patience": 0}, "patience must be a whole number, at least 1, got 0."), ({"every": 1.5}, "every must be a whole number, at least 1, got 1.5.")):
        with pytest.raises(ValueError) as refused:
            fedtail.EarlyStopping(population, **wrong)
        assert str(refused.value) == text
    with pytest.raises(ValueError, match="worstest"):
        fedtail.EarlyStopping(population, statistic="loss.worstest")
