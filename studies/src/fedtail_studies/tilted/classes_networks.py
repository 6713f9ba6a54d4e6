"""Small networks on images: one training loop, the ways to weigh a batch, and the sampler of algorithm 16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedtail_studies.study import Cell
from fedtail_studies.tilted.baselines import generalised_cross_entropy
from fedtail_studies.tilted.classes_data import Images, generator

TINY = 1e-30


@dataclass(frozen=True)
class Training:
    """How a network is trained: SGD with momentum, the step a tenth of what it was for the last third of the steps."""

    hidden: int = 128
    epochs: int = 10
    batch: int = 100
    learning_rate: float = 0.05
    momentum: float = 0.9


class Perceptron(nn.Module):
    """One hidden layer."""

    def __init__(self, hidden: int, classes: int, seed: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(28 * 28, hidden), nn.Linear(hidden, classes)
        random = generator(seed, 7)
        for layer in (self.first, self.last):    # drawn as PyTorch does, from a generator of our own
            for value in (layer.weight, layer.bias):
                value.data = (2 * torch.rand(value.shape, generator=random) - 1) / layer.in_features**0.5

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu())


@dataclass(frozen=True, eq=False)
class Batch:
    """What a way to weigh is given."""

    module: Perceptron
    x: Tensor
    y: Tensor
    rows: Tensor                                 # in the training set
    losses: Tensor                               # cross entropy, differentiable
    progress: float                              # from 0 to 1


Reduce = Callable[[Batch], Tensor]               # to the scalar that is differentiated


def mean(batch: Batch) -> Tensor:
    """ERM."""
    return batch.losses.mean()


class Uniform:
    """Examples in an order drawn anew in every epoch."""

    def __init__(self, examples: int, size: int, seed: int) -> None:
        self.examples, self.size, self.random = examples, size, generator(seed, 11)
        self.order = torch.zeros(0, dtype=torch.int64)

    def rows(self, progress: float) -> Tensor:
        if len(self.order) < self.size:
            self.order = torch.randperm(self.examples, generator=self.random)
        rows, self.order = self.order[: self.size], self.order[self.size :]
        return rows


class TiltedGroups:
    """Algorithm 16: groups contribute in proportion to |g| exp(t R_g), R_g a running tilted mean of their losses.

    As printed, a step draws a group with that probability. Here each example of a batch has a draw of its own, so that a batch
    holds several groups; or, `stratified`, as many examples of each group are drawn and weighted by that probability, which has
    the same expectation: with a large tilt and few groups, single draws leave the others' R_g behind, and training swings
    between them. `tilt` (t) and `within` (tau) grow linearly from zero where they are `scheduled`. R_g begins with one pass over
    the data (erratum T11), given as `losses`, and is kept in log space.
    """

    def __init__(self, group: Tensor, losses: Tensor, size: int, seed: int, tilt: float, within: float = 0.0,
                 smoothing: float = 0.2,
                 scheduled: bool = False, stratified: bool = False) -> None:
        self.group, self.size, self.random = group, size, generator(seed, 13)
        self.tilt, self.within, self.smoothing, self.scheduled = tilt, within, smoothing, scheduled
        self.stratified = stratified
        self.sizes = torch.bincount(group).double()
        self.starts, self.order = (self.sizes.cumsum(0) - self.sizes).long(), group.argsort(stable=True)
        self.running = torch.zeros_like(self.sizes).index_add(0, group, losses.double()) / self.sizes

    def _at(self, tilt: float, progress: float) -> float:
        return tilt * progress if self.scheduled else tilt

    def shares(self, progress: float) -> Tensor:
        """How much each group contributes."""
        return (self.sizes.log() + self._at(self.tilt, progress) * self.running).softmax(0)

    def rows(self, progress: float) -> Tensor:
        """Examples of the next batch."""
        if self.stratified:
            groups = torch.arange(len(self.sizes)).repeat_interleave(max(1, self.size // len(self.sizes)))
        else:
            groups = torch.multinomial(self.shares(progress), self.size, replacement=True, generator=self.random)
        inside = torch.rand(len(groups), generator=self.random, dtype=torch.float64)
        return self.order[self.starts[groups] + (inside * self.sizes[groups]).long()]

    def __call__(self, batch: Batch) -> Tensor:
        """The batch's loss, with weights exp(tau (f - R_g)) inside groups; R_g of the groups in it moves on."""
        groups, tau = self.group[batch.rows], self._at(self.within, batch.progress)
        losses = batch.losses.detach().double().cpu()
        count = torch.zeros_like(self.sizes).index_add(0, groups, torch.ones_like(losses))
        lifted = (tau * (losses - self.running[groups])).clamp(max=50).exp() if tau else losses      # relative to what is kept
        fresh = torch.zeros_like(self.sizes).index_add(0, groups, lifted) / count.clamp(min=1)
        if tau:
            moved = self.running + ((1 - self.smoothing) + self.smoothing * fresh).clamp(min=TINY).log() / tau
        else:
            moved = (1 - self.smoothing) * self.running + self.smoothing * fresh
        self.running = torch.where(count > 0, moved, self.running)
        weights = (tau * (losses - self.running[groups])).clamp(max=2).exp()
        if self.stratified:
            weights = weights * self.shares(batch.progress)[groups] * len(self.sizes)
        return (weights.to(batch.losses) * batch.losses).mean()


class RunningTilted:
    """Algorithm 14 over examples: weights exp(t (f - R)), R a running tilted mean in log space, t growing linearly from zero."""

    def __init__(self, tilt: float, smoothing: float = 0.2) -> None:
        self.tilt, self.smoothing = tilt, smoothing
        self.running: Tensor | None = None

    def __call__(self, batch: Batch) -> Tensor:
        tilt, losses = self.tilt * batch.progress, batch.losses.detach().double()
        if abs(tilt) < 1e-3:
            return batch.losses.mean()
        fresh = ((tilt * losses).logsumexp(0) - torch.tensor(len(losses)).log()) / tilt
        before = fresh if self.running is None else self.running
        parts = torch.stack([torch.log(torch.tensor(1 - self.smoothing)) + tilt * before.cpu(),
                             torch.log(torch.tensor(self.smoothing)) + tilt * fresh.cpu()])
        self.running = running = (parts.logsumexp(0) / tilt).to(losses)
        weights = (tilt * (losses - running)).clamp(max=10).exp().to(batch.losses)
        return (weights * batch.losses).mean()


def generalised(q: float) -> Reduce:
    """GCE."""
    return lambda batch: generalised_cross_entropy(batch.losses, q).mean()


def self_paced(keep: float) -> Reduce:
    """SelfPaced: the mean of the losses up to their quantile `keep` in the batch."""
    def reduce(batch: Batch) -> Tensor:
        return batch.losses[batch.losses <= batch.losses.detach().quantile(keep)].mean()
    return reduce


class RandomRect:
    """Weights max(0, N(0, 1)), scaled to sum to one."""

    def __init__(self, seed: int) -> None:
        self.random = generator(seed, 17)

    def __call__(self, batch: Batch) -> Tensor:
        weights = torch.randn(len(batch.rows), generator=self.random).clamp(min=0).to(batch.losses)
        return (weights @ batch.losses) / weights.sum().clamp(min=1e-6)


def adaptive_lipschitz(strength: float, adaptive: Tensor) -> Reduce:
    """HAR, our reading: a penalty on the loss's gradient in the hidden layer, times `adaptive` of the label's class."""
    def reduce(batch: Batch) -> Tensor:
        scores = batch.module(batch.x)
        error = scores.softmax(1) - torch.nn.functional.one_hot(batch.y, scores.shape[1])
        slope = (error @ batch.module.last.weight).square().sum(1)
        return batch.losses.mean() + strength * (adaptive[batch.y] * slope).mean()
    return reduce


def trained(cell: Cell, training: Training, images: Images, test: Images, classes: int, reduce: Reduce = mean,
            sampler: Uniform | TiltedGroups | None = None, epochs: int | None = None) -> tuple[Perceptron, list[float]]:
    """The network, and its test accuracy after every epoch; methods with the same seed start alike and see the same batches."""
    module = Perceptron(training.hidden, classes, cell.seed).to(images.x.device)
    sampler = sampler or Uniform(len(images.y), training.batch, cell.seed)
    optimizer = torch.optim.SGD(module.parameters(), training.learning_rate, training.momentum)
    total = epochs or training.epochs
    each = max(1, len(images.y) // training.batch)
    curve = []
    for epoch in cell.steps(total):
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * (0.1 if epoch >= 2 * total / 3 else 1.0)
        for step in range(each):
            progress = (epoch * each + step + 1) / (total * each)
            rows = sampler.rows(progress)
            x, y = images.x[rows.to(images.x.device)], images.y[rows.to(images.y.device)]
            loss = reduce(Batch(module, x, y, rows, cross_entropy(module(x), y, reduction="none"), progress))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(accuracy(module, test))
    return module, curve


@torch.no_grad()
def accuracy(module: nn.Module, images: Images) -> float:
    return float((module(images.x).argmax(1) == images.y).double().mean())


@torch.no_grad()
def losses_of(module: nn.Module, images: Images) -> Tensor:
    """Cross entropy of every image, on the processor."""
    return cross_entropy(module(images.x), images.y, reduction="none").cpu()
