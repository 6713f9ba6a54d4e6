"""Where tensors are."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device; itself where it is there. A copy to a GPU does not wait for work that the GPU has still to do."""
    return values.to(device, non_blocking=device.type == "cuda")
