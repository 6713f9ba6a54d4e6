"""A user's module: how it is called, copied and tried before it is trusted."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def call(module: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    """A module's outputs for a tensor, or for tensors by name (passed as keywords)."""
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def cast(inputs: Tensor | dict[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Floating-point inputs in the model's precision; tokens and other integers as they are."""
    if isinstance(inputs, dict):
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def training_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode, its running statistics left as they are."""
    module = copy.deepcopy(module).train()
    for part in module.modules():
        if has_running_statistics(part):
            part.eval()
    return module


def has_running_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def refuse_shared_statistics(name: str, module: nn.Module, buffers: str) -> None:
    if has_running_statistics(module) and buffers != "frozen":
        raise ValueError(f"{name} keeps running statistics, which clients cannot share: use GroupNorm, or buffers='frozen'.")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not has_running_statistics(module):
        raise ValueError(f"{name} normalises by the batch it is given, so a client's loss would depend on who else is asked: "
                         "use GroupNorm.")


def tried(module: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    """The outputs for a few examples; refused where the module fails, or changes its own tensors when it trains."""
    name, parts = type(module).__name__, inputs if isinstance(inputs, dict) else {"x": inputs}
    shapes = {k: tuple(v.shape[1:]) for k, v in parts.items()} if isinstance(inputs, dict) else tuple(inputs.shape[1:])
    learning = training_copy(module).cpu()
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            outputs = call(copy.deepcopy(module).cpu().eval(), inputs)
            trained = call(learning, inputs)           # buffers that are filled at the first call are filled now
            for parameter in trainable(learning):      # as a step of training would, so that what follows it shows: away from 0
                away = torch.where(parameter < 0, -1.0, 1.0)
                parameter.add_(away * torch.linspace(1e-3, 2e-3, parameter.numel()).reshape(parameter.shape))
            before = {k: v.clone() for k, v in learning.state_dict().items()}
            call(learning, inputs)
    except Exception as reason:
        raise ValueError(f"{name} cannot take examples of shape {shapes}{_hint(str(reason), parts)}: {reason}") from reason
    for result in (outputs, trained):
        if not isinstance(result, Tensor):
            raise ValueError(f"{name} must return one tensor, got {type(result).__name__}. Wrap it in a module that picks one.")
    changed = [k for k, v in learning.state_dict().items() if not torch.allclose(v, before[k], 0, 0, equal_nan=True)]
    if changed:
        raise ValueError(f"{name} changes {', '.join(changed)} when it is called in training, so that clients would change each "
                         "other's. Take that part out of the module.")
    return outputs


def _hint(reason: str, parts: dict[str, Tensor]) -> str:
    whole = [name for name, values in parts.items() if not values.is_floating_point()]
    if "lengths" in reason:
        return " (for sequences of equal length pass pad_sequences(x), which gives lengths)"
    if "dtype" in reason and whole:
        return f" ({', '.join(whole)} holds integers: write pixels as x.astype('float32') / 255, say)"
    return ""
