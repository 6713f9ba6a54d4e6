"""Which kernel computes a task: by name, or by what the task is, the shapes of the data and the device alone."""

from __future__ import annotations

import warnings

import torch

from fedtail.data.population import Population
from fedtail.engine.engine import KERNELS
from fedtail.engine.gpu.precision import Precision, check_precision
from fedtail.engine.kernels import Kernel, ModuleKernel, TrainingDraws, training_draws
from fedtail.engine.linear import LinearKernel, residual_function
from fedtail.engine.stacked import StackedKernel, forward_sizes, stacking_is_faster, stacking_refusal
from fedtail.task import Task

DRAWN = "draws from torch's generators by another function than dropout, rand, randn and bernoulli"
INSTEAD = ("Write its forward, and the loss, without what depends on values of tensors (if, .item(), packing read in both ways), "
           "and draw by F.dropout, torch.rand, randn or bernoulli; or write engine=Engine(kernel='module'), which says that it "
           "is meant.")


_WARNED: set[str] = set()


class SlowKernelWarning(UserWarning):
    """A model is trained one client after the other where clients side by side would be faster, but cannot be stacked."""


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
    name = type(task.module).__name__
    if kernel == "closed":
        raise ValueError(f"kernel='closed' needs a linear model with its own loss and nothing else in it, which {name} is not. "
                         "Write kernel='auto'.")
    draws = TrainingDraws(True, True) if population is None else training_draws(task, device, dtype, population)
    if population is not None and (kernel == "stacked" or (kernel == "auto" and _should_stack(task, device, dtype, population))):
        refusal = (f"{draws.layer or name} {DRAWN}" if draws.generators
                   else stacking_refusal(task, device, dtype, population))
        if not refusal:
            return StackedKernel(task, device, dtype, precision, draws.counted)
        if kernel == "stacked":
            raise ValueError(f"kernel='stacked' needs a module whose operations torch.func can stack, which {name} is not: "
                             f"{refusal}. Write kernel='auto'.")
        if not draws.generators or draws.layer:            # a step that raised raises again in training
            _warn_once(f"{name} is trained one client after the other, the slowest way: {refusal}. {INSTEAD}")
    elif kernel == "stacked":
        raise ValueError("kernel='stacked' needs a population, on whose first example it is tried. Write kernel='auto'.")
    return ModuleKernel(task, device, dtype, precision, draws.generators, draws.counted)


def _should_stack(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> bool:
    """Whether stacking is likely faster, by the module first and, only where it may be, by the sizes of a forward pass."""
    if device.type != "cpu" or not stacking_is_faster(task, device):
        return device.type != "cpu"
    return stacking_is_faster(task, device, forward_sizes(task, device, dtype, population))


def _warn_once(text: str) -> None:
    """Warn by a SlowKernelWarning, unless this process has warned by the same text before."""
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, SlowKernelWarning, stacklevel=3)


def evaluation_kernel(task: Task, device: torch.device, dtype: torch.dtype, population: Population,
                      precision: Precision = "full") -> Kernel:
    """A kernel to evaluate `task` with on `device`, in `dtype`: a LinearKernel for linear models with their own loss.

    For any other it is a ModuleKernel. Only its method `outputs` is for use. Unlike `kernel_for` it computes no gradients to find
    out which kernel fits; of `population` it reads only shapes and dtypes. Raises ValueError for an unknown `precision` where the
    model is not linear.
    """
    residual = residual_function(task, population)
    return LinearKernel(task, residual, device) if residual else ModuleKernel(task, device, dtype, precision)
