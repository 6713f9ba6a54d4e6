"""What a private step costs beside Opacus: the same batch, model, clip norm and noise, in one process, by turns.

    python benchmarks/private_optim.py               # results/private_optim.md; two minutes
    python benchmarks/private_optim.py --laps 5      # a look

A step is all of it: gradients of single examples, clipping, noise, and the update of the model. Opacus runs `torch.optim.SGD` in
its `DPOptimizer`, with gradients from the hooks of its `GradSampleModule`, and with its ghost clipping. All run on one thread.
Laps alternate, so that whatever else the machine does falls on both; a ratio is the median of the ratios of neighbouring laps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import torch
from environments import HERE, commit, machine
from torch import nn

from fedtail.privacy import PoissonSampling
from fedtail.private_optim import PrivateOptimizer, adadps, dp_sgd

CLIP_NORM, NOISE, RATE, LEARNING_RATE = 1.0, 1.0, 0.01, 0.1


def convnet() -> nn.Module:
    """Two convolutions of 5 x 5 and a linear layer, for 28 x 28 pixels and 62 classes."""
    return nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 62))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "logistic, 10,000 features": (lambda: nn.Linear(10_000, 2), (10_000,), 2, 64),
    "softmax 784-10": (lambda: nn.Linear(784, 10), (784,), 10, 256),
    "MLP 784-128-10": (lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), (784,), 10, 256),
    "ConvNet 16-32": (convnet, (1, 28, 28), 62, 64),
}


def ours(module: nn.Module, x: torch.Tensor, y: torch.Tensor, preconditioned: bool = False) -> Callable[[], None]:
    """A step of our DP-SGD, or of AdaDPS with a vector that gradients are divided by."""
    dim = sum(parameter.numel() for parameter in module.parameters())
    method = adadps(LEARNING_RATE, CLIP_NORM, NOISE, torch.linspace(0.1, 1.0, dim)) if preconditioned \
        else dp_sgd(LEARNING_RATE, CLIP_NORM, NOISE)
    optimizer = PrivateOptimizer(module, method, batch_size=len(y), sampling=PoissonSampling(RATE))
    return lambda: optimizer.step(x, y)


def opacus_step(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A step of Opacus's DP-SGD with gradients of single examples from hooks."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(module)
    optimizer = DPOptimizer(torch.optim.SGD(wrapped.parameters(), LEARNING_RATE), noise_multiplier=NOISE, max_grad_norm=CLIP_NORM,
                            expected_batch_size=len(y))

    def step() -> None:
        """One forward and backward pass, and the step."""
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return step


def opacus_ghost_step(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A step of Opacus's DP-SGD by ghost clipping: norms in closed form, and a second backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD(wrapped.parameters(), LEARNING_RATE), noise_multiplier=NOISE,
                                                max_grad_norm=CLIP_NORM, expected_batch_size=len(y))
    loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean")

    def step() -> None:
        """One forward and two backward passes, and the step."""
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()
    return step


def lap(step: Callable[[], None]) -> float:
    """Milliseconds of one step."""
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def measure(name: str, laps: int) -> dict[str, list[float]]:
    """Milliseconds of `laps` steps of each contestant on one model and batch, by turns."""
    make, shape, classes, batch = MODELS[name]
    torch.manual_seed(0)
    module, x, y = make(), torch.randn(batch, *shape), torch.randint(0, classes, (batch,))
    makers = {"ours": ours, "ours, preconditioned": partial(ours, preconditioned=True), "Opacus, hooks": opacus_step,
              "Opacus, ghost": opacus_ghost_step}
    steps = {contestant: make_step(copy.deepcopy(module), x, y) for contestant, make_step in makers.items()}
    for step in steps.values():
        lap(step)
        lap(step)
    found: dict[str, list[float]] = {contestant: [] for contestant in steps}
    for _ in range(laps):
        for contestant, step in steps.items():
            found[contestant].append(lap(step))
    return found


def page(laps: int) -> str:
    """The table of results, as Markdown."""
    where = machine()
    lines = ["# Private steps beside Opacus", "",
             f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {where['processor']}, {where['cores']} cores. "
             f"`python benchmarks/private_optim.py --laps {laps}`; one thread, float32. Median milliseconds of a whole "
             "step of DP-SGD on one batch; ratios are medians over neighbouring laps, below 1 where ours is faster. "
             "Preconditioned: gradients are divided by a vector before the clip (AdaDPS), which Opacus does not have.", "",
             "| model | batch | ours | ours, preconditioned | Opacus, hooks | Opacus, ghost | ours / hooks | ours / faster |",
             "|---|---|---|---|---|---|---|---|"]
    for name, (_, _, _, batch) in MODELS.items():
        found = measure(name, laps)
        medians = [statistics.median(found[one]) for one in ("ours", "ours, preconditioned", "Opacus, hooks", "Opacus, ghost")]
        faster = min(("Opacus, hooks", "Opacus, ghost"), key=lambda one: statistics.median(found[one]))
        ratios = [statistics.median(a / b for a, b in zip(found["ours"], found[other], strict=True))
                  for other in ("Opacus, hooks", faster)]
        lines.append(f"| {name} | {batch} | " + " | ".join(f"{value:.2f}" for value in (*medians, *ratios)) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--laps", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    written = page(given.laps)
    if given.laps >= 20:
        (HERE / "results" / "private_optim.md").write_text(written)
