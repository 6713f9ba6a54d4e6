"""Where tensors are."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The tensor `values` on `device`: itself where it is there already, else a copy.

    Copies to a GPU are asynchronous (non-blocking).
    """
    return values.to(device, non_blocking=device.type == "cuda")
