"""Which kernel computes a task: by name, or by what the task is, the shapes of the data and the device alone."""

from __future__ import annotations

import torch

from fedtail.data.population import Population
from fedtail.engine.engine import KERNELS
from fedtail.engine.gpu.precision import Precision, check_precision
from fedtail.engine.kernels import Kernel, ModuleKernel, draws_when_training
from fedtail.engine.linear import LinearKernel, residual_function
from fedtail.engine.stacked import StackedKernel, can_be_stacked, stacking_is_faster
from fedtail.task import Task

REFUSED = {"closed": "a linear model with its own loss and nothing else in it",
           "stacked": "a module without dropout or tied parameters whose operations torch.func can stack"}


def kernel_for(task: Task, device: torch.device, dtype: torch.dtype, population: Population | None = None,
               kernel: str = "auto", precision: Precision = "full") -> Kernel:
    """The kernel that computes a task, chosen by `kernel` or, with "auto", by the task; ValueError where the named one cannot.

    "auto" is "closed" (closed-form gradients) for linear models, "stacked" (many clients through each operation) where that is
    faster, else "module" (one client after the other, any `nn.Module`). The package's linear models are known by their class;
    a plain `nn.Linear` by the shapes of the population too. The choice follows from the task, the shapes of the data and the
    device alone. Without a `population` nothing is stacked, and the module is taken to draw random numbers when it trains.
    """
    check_precision(precision)
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}.")
    residual = residual_function(task, population) if kernel in ("auto", "closed") else None
    if residual:
        return LinearKernel(task, residual, device)
    stacked = population is not None and kernel in ("auto", "stacked") and (
        kernel == "stacked" or stacking_is_faster(task, device))
    if stacked and population is not None and can_be_stacked(task, device, dtype, population):
        return StackedKernel(task, device, dtype, precision)
    if kernel in ("closed", "stacked"):
        name = type(task.module).__name__
        raise ValueError(f"kernel={kernel!r} needs {REFUSED[kernel]}, which {name} is not. Write kernel='auto'.")
    draws = population is None or draws_when_training(task, device, dtype, population)
    return ModuleKernel(task, device, dtype, precision, draws)


def evaluation_kernel(task: Task, device: torch.device, dtype: torch.dtype, population: Population,
                      precision: Precision = "full") -> Kernel:
    """A kernel that is used for `outputs` only: closed-form for linear models, else the module; gradients are not tried out."""
    residual = residual_function(task, population)
    return LinearKernel(task, residual, device) if residual else ModuleKernel(task, device, dtype, precision)
