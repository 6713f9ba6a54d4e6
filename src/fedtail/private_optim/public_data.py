"""Public data beside private ones: batches for public gradients, and training on them before the private steps begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtail.data.arrays import select_rows
from fedtail.draws import hash_bits, random_permutations
from fedtail.losses import default_loss
from fedtail.private_optim.per_example import mean_gradient
from fedtail.task import PerExample, Task
from fedtail.types import Examples


@dataclass(frozen=True, eq=False)
class PublicData:
    """Public examples, of which every step reads `batch_size`, uniformly with replacement; None reads all of them.

    Batches follow from `seed` and the number of the step. Their gradients are read without clipping or noise, and no guarantee
    covers them: an example that is also among the private ones is not protected.
    """

    inputs: Examples
    targets: Tensor
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a ValueError where there are no examples, or the batch size is below 1."""
        if not len(self.targets):
            raise ValueError("there are no public examples. Without them use side information (FixedPreconditioner) or dp2.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}. Leave it out to read all public examples.")

    def batch(self, step: int) -> tuple[Examples, Tensor]:
        """The inputs and targets that step number `step` reads."""
        if self.batch_size is None:
            return self.inputs, self.targets
        bits = hash_bits(self.seed, "public batch", step, torch.arange(self.batch_size))
        rows = (bits % len(self.targets)).to(self.targets.device)
        return select_rows(self.inputs, rows), self.targets[rows]

    def gradient(self, task: Task, step: int) -> Tensor:
        """The mean gradient of the task over the batch of step number `step`, flat, (dim,)."""
        return mean_gradient(task, *self.batch(step))

    def shuffled(self, epoch: int) -> Iterator[tuple[Examples, Tensor]]:
        """Yields the batches of one pass over all examples in random order, which follows from the seed and `epoch`."""
        count = len(self.targets)
        order = random_permutations(hash_bits(self.seed, "public epoch", torch.tensor([epoch])), torch.tensor([count]))[0]
        for rows in order.to(self.targets.device).split(self.batch_size or count):
            yield select_rows(self.inputs, rows), self.targets[rows]


def warm_start(module: nn.Module, public: PublicData, epochs: int = 10, learning_rate: float = 1e-3,
               loss: PerExample = default_loss) -> None:
    """Train `module` in place on public data alone, by `torch.optim.RMSprop`, before private steps: [Li23, section 6.7.1].

    `loss` is per example, as `fedtail.Task` takes it. It costs no privacy.
    """
    task = Task(module, loss)
    optimizer = torch.optim.RMSprop([p for p in module.parameters() if p.requires_grad], lr=learning_rate)
    for epoch in range(epochs):
        for inputs, targets in public.shuffled(epoch):
            found = mean_gradient(task, inputs, targets).split([p.numel() for p in optimizer.param_groups[0]["params"]])
            for parameter, part in zip(optimizer.param_groups[0]["params"], found, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
    optimizer.zero_grad()
