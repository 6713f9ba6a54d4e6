"""Where tensors are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtail.errors import FieldError


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The tensor `values` on `device`: itself where it is there already, else a copy.

    Copies to a GPU are asynchronous (non-blocking).
    """
    return values.to(device, non_blocking=device.type == "cuda")


PINNED = 2**20       # bytes from which a copy from a GPU goes to pinned memory, which PyTorch keeps for the next one


def to_host(values: Tensor) -> Tensor:
    """The tensor `values` on the CPU: itself where it is there already, else a copy, complete when this returns.

    Large ones are copied to pinned memory: ten times as fast as to memory that the system has yet to provide.
    """
    if values.device.type != "cuda" or values.nbytes < PINNED:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


def checked_device(device: Any) -> torch.device:
    """`device` as a torch.device; raises FieldError where it is none, or where PyTorch has no such device here.

    A GPU is not initialised by this.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise FieldError("device", "cpu, cuda or cuda:1", device, 'For a GPU write "cuda".') from None
    number = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= number:
        seen = f"PyTorch sees {number} GPUs here" if number else "PyTorch sees no GPU here"
        text = f'device is {found}, but {seen}. Write device="cpu"{f", or cuda:0 to cuda:{number - 1}" if number else ""}.'
        raise FieldError("device", "a device that is here", str(found), text=text)
    if found.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(1, dtype=torch.float64, device=found)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError):
            text = (f"device is {found}, which is not here, or lacks double precision, which sums over clients need. Write "
                    'device="cpu".')
            raise FieldError("device", "cpu or cuda", str(found), text=text) from None
    return found
