"""Convolutions and pooling of stacked clients, each with weights of its own.

`torch.func.vmap` makes one grouped convolution of them, which cuDNN computes group by group. Here the windows are laid out as
rows (im2col), so that the whole stack is one batched matrix product, and so are its gradients. Images are kept with their
channels innermost, which makes a window a few runs of contiguous numbers.

Under `Stacked()` calls of `conv2d` and `max_pool2d` are replaced where this is possible; all others stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtail.engine import fused
from fedtail.engine.recurrence import lstm
from fedtail.engine.stackable import stackable

Pair = tuple[int, int]
FEW_WEIGHTS = 4096      # up to which the weight gradient is summed by example: else too few products to fill a GPU
THIN = 64               # numbers in a window up to which cuDNN is slower than a product
ALIGNED = 8             # numbers that rows are a multiple of: 16 bytes in bfloat16
INDEXABLE = 2**31       # numbers that a kernel counts in 32 bits


@dataclass(frozen=True)
class Window:
    """How a kernel slides over an image, by height and width."""

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def places(self, height: int, width: int) -> Pair:
        """Rows and columns of the outputs."""
        one, two = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in
                    zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True))
        return one, two


class Stacked(TorchFunctionMode):
    """Within it, convolutions, max-pooling and LSTMs of a stack of clients are computed as this package does."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found: Any = None
        if func is torch.lstm:
            found = self.recurred(*args, **(kwargs or {}))
        elif func is torch.conv2d:
            found = self._conv2d(*args, **(kwargs or {}))
        elif func is F.max_pool2d or func is torch.max_pool2d:
            found = self._max_pool2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found

    def _conv2d(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                dilation: Any = 1, groups: int = 1) -> Tensor | None:
        if input.ndim != 4 or groups != 1 or isinstance(padding, str):
            return None
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            narrow = torch.get_autocast_dtype("cuda")
            input, weight, bias = input.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        height, width = weight.shape[2:]
        window = Window((height, width), _pair(stride), _pair(padding), _pair(dilation))
        return self.convolved(input, weight, bias, window) if input.dtype == weight.dtype else None

    def _max_pool2d(self, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                    ceil_mode: bool = False, return_indices: bool = False) -> Tensor | None:
        kernel, pace = _pair(kernel_size), _pair(stride or kernel_size)
        apart = all(k <= s for k, s in zip(kernel, pace, strict=True))      # each number is in one window at most
        if (input.ndim != 4 or not apart or any(_pair(padding)) or _pair(dilation) != (1, 1) or ceil_mode or return_indices
                or _fused(input) is None):
            return None
        return self.pooled(input, Window(kernel, pace))

    def convolved(self, images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor | None:
        return _Convolution.apply(images, weight, bias, window)[0]

    def pooled(self, images: Tensor, window: Window) -> Tensor:
        return _MaxPool.apply(images, window)[0]

    def recurred(self, *args: Any, **kwargs: Any) -> Any:
        return lstm(*args, **kwargs)


class Flat(Stacked):
    """The same for one model, many examples and no gradients.

    cuDNN is faster there, except for images of few channels, and in full precision it is faster with the channels outermost.
    """

    def recurred(self, *args: Any, **kwargs: Any) -> None:
        """One model's LSTM is left to PyTorch."""

    def convolved(self, images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor | None:
        if _fused(images) is None:
            return None
        if weight[0].numel() <= THIN:
            columns, matrix = _columns(images[None], window, bias is not None), _matrix(weight[None], *_stack_of_one(bias))
            return _product(columns, matrix, len(images), window.places(*images.shape[2:]))[0]
        images = images.contiguous() if _wants_channels_first(images) else images
        return F.conv2d(images, weight, bias, window.stride, window.padding, window.dilation)

    def pooled(self, images: Tensor, window: Window) -> Tensor:
        return fused.pooled(images, window, keep=False)[0]


def _wants_channels_first(images: Tensor) -> bool:
    """Where cuDNN does not use tensor cores."""
    return images.dtype == torch.float64 or (images.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32)


def _stack_of_one(bias: Tensor | None) -> list[Tensor]:
    return [] if bias is None else [bias[None]]


def _pair(value: Any) -> Pair:
    first, *rest = value if isinstance(value, (tuple, list)) else (value,)
    return int(first), int(rest[0] if rest else first)


def _fused(images: Tensor) -> Any:
    """The kernels for a GPU, where Triton is there to compile them."""
    return fused if images.is_cuda and images.is_floating_point() and _compiles() else None


@cache
def _compiles() -> bool:
    """Tried once: Triton may be there without the C compiler it needs."""
    try:
        fused.pooled(torch.zeros(1, 1, 2, 2, device="cuda"), Window((2, 2), (2, 2)))
    except Exception:      # whatever is missing
        return False
    return True


def _columns(images: Tensor, window: Window, ones: bool) -> Tensor:
    """The windows as rows: (clients, batch, channels, height, width) -> (clients, batch * places, kernel * channels).

    With a column of ones, which takes the bias into the product, if asked; then of zeros up to a multiple of eight, since
    tensor cores want rows of whole 16 bytes.
    """
    clients, batch, channels = images.shape[:3]
    rows, columns = window.places(*images.shape[3:])
    inside = window.kernel[0] * window.kernel[1] * channels
    shape = clients, batch * rows * columns, aligned(inside + ones)
    if _fused(images) and math.prod(shape) < INDEXABLE and images.numel() < INDEXABLE:
        return fused.columns(images.flatten(0, 1), window, shape[2], ones).view(shape)
    (high, wide), (down, across) = window.kernel, window.dilation
    images = F.pad(images, (window.padding[1],) * 2 + (window.padding[0],) * 2)
    views = images.unfold(3, down * (high - 1) + 1, window.stride[0]).unfold(4, across * (wide - 1) + 1, window.stride[1])
    out = images.new_zeros(shape)
    out[..., :inside] = views[..., ::down, ::across].permute(0, 1, 3, 4, 5, 6, 2).reshape(*shape[:2], inside)
    out[..., inside : inside + ones] = 1.0
    return out


def aligned(width: int) -> int:
    return -(-width // ALIGNED) * ALIGNED


def _folded(columns: Tensor, window: Window, size: Pair) -> Tensor:
    """The sum of what every window has for a pixel: (clients, batch, rows, columns, kernel..., channels) -> images."""
    clients, batch, rows, across, high, wide, channels = columns.shape
    if _fused(columns) and columns.numel() < INDEXABLE:
        return fused.folded(columns.flatten(0, 1), window, size).unflatten(0, (clients, batch))
    (top, left), (height, width) = window.padding, size
    wider = columns.new_zeros(clients, batch, rows, width + 2 * left, high, channels)      # first along rows, then down
    for k in range(wide):
        wider[:, :, :, _reach(k, across, window, 1)] += columns[:, :, :, :, :, k]
    whole = columns.new_zeros(clients, batch, height + 2 * top, width + 2 * left, channels)
    for k in range(high):
        whole[:, :, _reach(k, rows, window, 0)] += wider[:, :, :, :, k]
    return whole[:, :, top : top + height, left : left + width].permute(0, 1, 4, 2, 3)


def _reach(k: int, places: int, window: Window, axis: int) -> slice:
    """Which pixels the k-th number of every window is."""
    first, stride = k * window.dilation[axis], window.stride[axis]
    return slice(first, first + (places - 1) * stride + 1, stride)


def _product(columns: Tensor, matrix: Tensor, batch: int, places: Pair) -> Tensor:
    """Outputs (clients, batch, channels, rows, columns), the channels innermost in memory."""
    return torch.bmm(columns, matrix.mT).unflatten(1, (batch, *places)).permute(0, 1, 4, 2, 3)


def _matrix(weight: Tensor, *bias: Tensor) -> Tensor:
    """(clients, outputs, inputs, kernel...) and the bias, in the order of the columns.

    What stands against their zeros does not matter: it is the last number again, which costs no kernel of its own.
    """
    rows = weight.permute(0, 1, 3, 4, 2).flatten(2)
    last = bias[0][..., None] if bias else rows[..., -1:]
    missing = aligned(rows.shape[2] + len(bias)) - rows.shape[2]
    return torch.cat([rows, last.expand(*rows.shape[:2], missing)], 2) if missing else rows


def _matrix_gradient(outputs: Tensor, columns: Tensor) -> Tensor:
    clients, batch, channels = outputs.shape[:3]
    rows = outputs.permute(0, 1, 3, 4, 2).reshape(clients, -1, channels)      # (clients, batch * places, channels)
    if columns.shape[2] * channels > FEW_WEIGHTS:
        return torch.bmm(rows.mT, columns)
    rows, columns = (t.reshape(clients * batch, -1, t.shape[2]) for t in (rows, columns))
    return torch.bmm(rows.mT, columns).unflatten(0, (clients, batch)).sum(1)


def _input_gradient(outputs: Tensor, matrix: Tensor, window: Window, channels: int, size: Pair) -> Tensor:
    clients, batch, wide, *places = outputs.shape
    rows = outputs.permute(0, 1, 3, 4, 2).reshape(clients, -1, wide)
    inside = window.kernel[0] * window.kernel[1] * channels
    columns = torch.bmm(rows, matrix[:, :, :inside]).view(clients, batch, *places, *window.kernel, channels)
    return _folded(columns, window, size)


columns_of, product = stackable(_columns, 1), stackable(_product, 2)
matrix_gradient, input_gradient = stackable(_matrix_gradient, 2), stackable(_input_gradient, 2)
matrix_of, matrix_with_bias = stackable(_matrix, 1), stackable(_matrix, 2)


class _Convolution(torch.autograd.Function):
    """Outputs, and what they were made of, which the gradients need again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> tuple[Tensor, Tensor, Tensor]:
        columns = columns_of(images, window, bias is not None)
        matrix = matrix_of(weight) if bias is None else matrix_with_bias(weight, bias)
        return product(columns, matrix, len(images), window.places(*images.shape[2:])), columns, matrix

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        images, weight, bias, ctx.window = inputs
        ctx.size, ctx.channels, ctx.has_bias = tuple(images.shape[2:]), weight.shape[1], bias is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, *_: Any) -> Any:
        columns, matrix = ctx.saved_tensors
        images = input_gradient(outputs, matrix, ctx.window, ctx.channels, ctx.size) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:3]):
            return images, None, None, None
        gradient, inside = matrix_gradient(outputs, columns), math.prod(ctx.window.kernel) * ctx.channels
        weight = gradient[:, :inside].unflatten(1, (*ctx.window.kernel, -1)).permute(0, 3, 1, 2)
        return images, weight, gradient[:, inside] if ctx.has_bias else None, None


def _pooled(images: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    largest, place = fused.pooled(images.flatten(0, 1), window)
    return largest.unflatten(0, images.shape[:2]), place.unflatten(0, images.shape[:2])


def _unpooled(outputs: Tensor, place: Tensor, window: Window, size: Pair) -> Tensor:
    images = fused.unpooled(outputs.flatten(0, 1), place.flatten(0, 1), window, size)
    return images.unflatten(0, outputs.shape[:2])


pooled, unpooled = stackable(_pooled, 1), stackable(_unpooled, 2)


class _MaxPool(torch.autograd.Function):
    """The largest number of each window, and which it was: of equal ones the first, as in PyTorch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        return pooled(images, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        images, ctx.window = inputs
        ctx.size = tuple(images.shape[2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, _: Any) -> Any:
        return unpooled(outputs, ctx.saved_tensors[0], ctx.window, ctx.size), None
