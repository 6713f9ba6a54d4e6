"""Which kernel computes a task: by name, or by what the task is, the shapes of the data and the device alone."""

from __future__ import annotations

import torch

from fedtail.data.population import Population
from fedtail.engine.engine import KERNELS
from fedtail.engine.gpu.precision import Precision, check_precision
from fedtail.engine.kernels import Kernel, ModuleKernel, training_uses_random_numbers
from fedtail.engine.linear import LinearKernel, residual_function
from fedtail.engine.stacked import StackedKernel, can_be_stacked, stacking_is_faster
from fedtail.task import Task

REFUSED = {"closed": "a linear model with its own loss and nothing else in it",
           "stacked": "a module without dropout or tied parameters whose operations torch.func can stack"}


def kernel_for(task: Task, device: torch.device, dtype: torch.dtype, population: Population | None = None,
               kernel: str = "auto", precision: Precision = "full") -> Kernel:
    """The kernel that computes `task` on `device` in `dtype`: the one named by `kernel`, or with "auto" the fastest that fits.

    "closed" uses closed-form gradients of linear models, "stacked" computes many clients in each operation, "module" computes one
    client after the other and takes any `nn.Module`. "auto" tries them in this order, "stacked" only where it is likely faster.
    The package's linear models are recognised by class; a plain `nn.Linear` only with a `population` of flat examples. Stacking
    needs a `population`, on whose first example it is tried. Without one, "module" is taken to draw random numbers in training.
    Raises ValueError for an unknown `kernel` or `precision`, and where the named kernel cannot compute the task.
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
    draws = population is None or training_uses_random_numbers(task, device, dtype, population)
    return ModuleKernel(task, device, dtype, precision, draws)


def evaluation_kernel(task: Task, device: torch.device, dtype: torch.dtype, population: Population,
                      precision: Precision = "full") -> Kernel:
    """A kernel to evaluate `task` with on `device`, in `dtype`: a LinearKernel for linear models with their own loss.

    For any other it is a ModuleKernel. Only its method `outputs` is for use. Unlike `kernel_for` it computes no gradients to find
    out which kernel fits; of `population` it reads only shapes and dtypes. Raises ValueError for an unknown `precision` where the
    model is not linear.
    """
    residual = residual_function(task, population)
    return LinearKernel(task, residual, device) if residual else ModuleKernel(task, device, dtype, precision)
