"""How exactly a GPU multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch

Precision = Literal["full", "tf32", "bf16"]


@contextmanager
def use_precision(precision: Precision, device: torch.device, activations: bool = True) -> Iterator[None]:
    """A context in which a GPU, `device`, multiplies and convolves in `precision`; on a CPU nothing is done.

    Former settings are restored. "full" is about float32 accuracy: TF32 is switched off, which PyTorch leaves on in convolutions
    by default, and this package's convolutions split each factor in two TF32 numbers and add three products. "tf32" rounds
    float32 factors to ten bits of mantissa. "bf16" turns on autocast to bfloat16 for factors and activations; if `activations` is
    False (backward passes, closed forms), it is the same as "full". Parameters, sums of products and losses keep their dtype.
    """
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    narrow = precision == "bf16" and activations
    try:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if narrow else nullcontext():
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def check_precision(precision: str) -> None:
    """Raise ValueError if `precision` is not "full", "tf32" or "bf16"."""
    if precision not in get_args(Precision):
        raise ValueError(f'precision must be "full", "tf32" or "bf16", got {precision!r}.')
