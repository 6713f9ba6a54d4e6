"""A user's module: how it is called and copied, and whose random numbers it draws."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def call_module(module: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    """A module's outputs for a tensor, or for tensors by name (passed as keywords)."""
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def cast_inputs(inputs: Tensor | dict[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Floating-point inputs in this precision; tokens and other integers as they are."""
    if isinstance(inputs, dict):
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients, in the module's order, which is the order of a flat model."""
    return [p for p in module.parameters() if p.requires_grad]


def set_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the trained parameters, and whatever tensor had their dtype, in place; other tensors stay. Returns the module.

    A float64 table beside float32 weights is float64 for a reason; `module.to(dtype)` would cast it too.
    """
    own = {parameter.dtype for parameter in trainable_parameters(module)}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in own:
            tensor.data = tensor.data.to(dtype)
    return module


def training_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode, but for layers with running statistics, which stay in evaluation mode and keep them."""
    module = copy.deepcopy(module).train()
    for part in module.modules():
        if has_running_statistics(part):
            part.eval()
    return module


def has_running_statistics(module: nn.Module) -> bool:
    """Whether the layer itself, not one inside it, keeps a running mean, as batch norm does."""
    return getattr(module, "running_mean", None) is not None


def refuse_shared_statistics(name: str, module: nn.Module, buffers: str) -> None:
    """Raise a ValueError for a layer that clients cannot train separately: one that normalises by the batch or keeps running
    statistics. With buffers="frozen" the latter are kept as they came, and allowed.
    """
    if has_running_statistics(module) and buffers != "frozen":
        raise ValueError(f"{name} keeps running statistics, which clients cannot share: use GroupNorm, or buffers='frozen'.")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not has_running_statistics(module):
        raise ValueError(f"{name} normalises by the batch it is given, so a client's loss would depend on who else is sampled: "
                         "use GroupNorm.")


_ONE_AT_A_TIME = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: the thread that held it is not there to release it."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def own_generator(device: torch.device | None = None) -> Iterator[None]:
    """A context in which this thread alone uses torch's random generators, which are afterwards as they were before.

    Modules draw from generators that all threads of the process share. Whoever seeds them does so in here, so that a training
    in another thread neither takes numbers from this one's stream nor starts it again. `device` adds a GPU's generator.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        yield


def generator_positions(device: torch.device) -> list[Tensor]:
    """The states of torch's generators, of the CPU and of a GPU `device`: they change when a module draws."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def block_other_draws() -> Iterator[None]:
    """A context that keeps other threads out of `own_generator`: a process forked in there would inherit a locked generator."""
    with _ONE_AT_A_TIME:
        yield
