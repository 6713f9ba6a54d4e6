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
    """The module's outputs for its inputs: a tensor is passed as the only argument, a dict of tensors as keyword arguments."""
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def cast_inputs(inputs: Tensor | dict[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """The inputs with floating-point tensors cast to `dtype`; integers, such as tokens, stay as they are."""
    if isinstance(inputs, dict):
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients, in the order of `module.parameters()`, which is their order in a flat model."""
    return [p for p in module.parameters() if p.requires_grad]


def set_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module's trainable parameters to `dtype`, in place, and return the module.

    Other parameters and buffers are cast only where their dtype was that of a trainable parameter: a float64 buffer beside
    float32 weights stays float64, while `module.to(dtype)` would cast it too.
    """
    own = {parameter.dtype for parameter in trainable_parameters(module)}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in own:
            tensor.data = tensor.data.to(dtype)
    return module


def copy_around_frozen(module: nn.Module) -> nn.Module:
    """A deep copy of the module that shares the memory of its frozen parameters, which nobody may write to.

    A frozen base of many parameters therefore exists once, however many copies compute with it.
    """
    frozen = (p for p in module.parameters() if not p.requires_grad and type(p) is nn.Parameter)
    return copy.deepcopy(module, {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen})


def training_copy(module: nn.Module, share_frozen: bool = False) -> nn.Module:
    """A deep copy of the module in training mode, except that layers with running statistics are in evaluation mode.

    Those layers therefore use the statistics they came with and do not update them. With `share_frozen` the memory of frozen
    parameters is shared with `module`.
    """
    module = (copy_around_frozen(module) if share_frozen else copy.deepcopy(module)).train()
    for part in module.modules():
        if has_running_statistics(part):
            part.eval()
    return module


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """A context in which gradients can be differentiated once more: attention and cuDNN's recurrences are computed plainly.

    PyTorch's fused attention, and cuDNN's recurrent layers, have first derivatives only. The former settings are restored.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield


def has_running_statistics(module: nn.Module) -> bool:
    """Whether the layer `module` itself has a running mean, as batch norm does; layers inside it are not checked."""
    return getattr(module, "running_mean", None) is not None


def refuse_shared_statistics(name: str, module: nn.Module, buffers: str) -> None:
    """Raise a ValueError for a layer `module` by which clients' losses would depend on each other; the text calls it `name`.

    That is a batch norm without running statistics, and any layer with them, except that buffers="frozen" allows the latter.
    Layers inside it are not checked.
    """
    if has_running_statistics(module) and buffers != "frozen":
        raise ValueError(f"{name} keeps running statistics, which clients cannot share: use GroupNorm, or buffers='frozen'.")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not has_running_statistics(module):
        raise ValueError(f"{name} normalises by the batch it is given, so a client's loss would depend on who else is sampled: "
                         "use GroupNorm.")


_ONE_AT_A_TIME = threading.RLock()


def _renew_generator_lock() -> None:
    """Replace the global lock in a forked child process, where the thread that held it does not exist and cannot release it."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_generator_lock)


@contextmanager
def lock_and_restore_generators(device: torch.device | None = None) -> Iterator[None]:
    """A context in which this thread alone uses torch's random generators; their states are restored at its end.

    Modules draw from generators that all threads of the process share. Code that seeds them does so in this context, so that
    training in another thread neither takes numbers from this stream nor reseeds it. With a GPU as `device`, its generator is
    restored too.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        yield


def generator_states(device: torch.device) -> list[Tensor]:
    """The state of torch's CPU generator and, where `device` is a GPU, of that GPU's; a state changes when a module draws."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def block_other_draws() -> Iterator[None]:
    """A context in which no other thread is inside `lock_and_restore_generators`, for forking a process.

    A child forked while another thread draws would inherit a locked generator that nobody releases.
    """
    with _ONE_AT_A_TIME:
        yield
