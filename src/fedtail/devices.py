"""Where tensors are."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device. From the host to a GPU without waiting for what the GPU has still to do."""
    return values.to(device, non_blocking=device.type == "cuda")
