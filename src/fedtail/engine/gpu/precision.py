"""How exactly a GPU multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch

Precision = Literal["full", "tf32", "bf16"]


@contextmanager
def use_precision(precision: Precision, device: torch.device, activations: bool = True) -> Iterator[None]:
    """A context in which a GPU multiplies and convolves in this precision; the settings before are restored. Nothing on a CPU.

    "full": the model's own, which PyTorch by default does not keep to in convolutions. Those of this package split a factor of
    float32 in two of ten bits of mantissa and add three products: about as exact. "tf32": factors of float32 are rounded to
    ten bits. "bf16": factors and activations have eight. Parameters, sums of products and losses stay as they are.
    Without `activations`, for backward passes and closed forms, "bf16" is "full".
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
    """ValueError for a precision other than "full", "tf32" and "bf16"."""
    if precision not in get_args(Precision):
        raise ValueError(f'precision must be "full", "tf32" or "bf16", got {precision!r}.')
