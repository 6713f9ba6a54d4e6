"""How long the products and convolutions of a training step take by themselves: what no loop and no library can do without."""

from __future__ import annotations

from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from fedtail.modules import call_module
from fedtail.types import Examples

NAMES = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
         "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")


class _Products(TorchDispatchMode):
    """Notes calls of PyTorch's products, convolutions, recurrent layers and attention, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.overloadpacket.__name__ in NAMES:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def product_seconds(module: nn.Module, inputs: Examples, targets: Tensor, turns: int = 7) -> float:
    """Processor seconds of the products of one step of one client on one thread, each called alone and again, in a warm cache."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained = [p for p in module.train().parameters() if p.requires_grad]
    with _Products() as found:
        torch.autograd.grad(cross_entropy(call_module(module, inputs), targets), trained, materialize_grads=True)
    seconds = 0.0
    with torch.no_grad():
        for func, args, kwargs in found.calls:
            func(*args, **kwargs)
            taken = []
            for _ in range(turns):
                began = process_time()
                func(*args, **kwargs)
                taken.append(process_time() - began)
            seconds += median(taken)
    torch.set_num_threads(threads)
    return seconds
