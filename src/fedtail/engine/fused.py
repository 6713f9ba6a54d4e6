"""Kernels for a GPU that PyTorch has no fast ones for: windows as rows and back, and pooling, with the channels innermost.

They move each number once. Compiled by Triton when first used; where it is absent they cannot be called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:      # on machines without a GPU
    triton = tl = None

if TYPE_CHECKING:
    from fedtail.engine.convolutions import Pair, Window

BLOCK, TILE = 1024, 2048      # numbers that one program writes
jit: Any = triton.jit if triton else lambda function: function


@jit
def _columns(images, out, rows, by_image, by_channel, by_row, by_column, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
             KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
             PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, WIDTH: tl.constexpr, ONES: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top, left = ((row % (OH * OW)) // OW) * SH - PH, (row % OW) * SW - PW
    down, along = (inside // (KW * C)) * DH, ((inside // C) % KW) * DW
    there = (row < rows)[:, None] & (inside < KH * KW * C)[None, :]
    if PH > 0 or PW > 0:
        y, x = top[:, None] + down[None, :], left[:, None] + along[None, :]
        there = there & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    first = (row // (OH * OW)) * by_image + top * by_row + left * by_column
    step = down * by_row + along * by_column + (inside % C) * by_channel
    found = tl.load(images + first[:, None] + step[None, :], mask=there, other=0.0)
    if ONES:
        found = tl.where((inside == KH * KW * C)[None, :], 1.0, found)
    tl.store(out + row[:, None] * WIDTH + inside[None, :], found, mask=(row < rows)[:, None] & (inside < WIDTH)[None, :])


@jit
def _folded(columns, out, numbers, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
            OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
            DH: tl.constexpr, DW: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel = at % C, at // C
    x, y, image = pixel % W, (pixel // W) % H, pixel // (W * H)
    total = tl.zeros((BLOCK,), dtype=SUM)
    for i in range(KH):
        down = y + PH - i * DH
        row = down // SH
        in_row = (at < numbers) & (down >= 0) & (row < OH) & (down % SH == 0)
        for j in range(KW):
            along = x + PW - j * DW
            column = along // SW
            there = in_row & (along >= 0) & (column < OW) & (along % SW == 0)
            place = (((image * OH + row) * OW + column) * KH + i) * KW + j
            total += tl.load(columns + place * C + channel, mask=there, other=0.0).to(SUM)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < numbers)


@jit
def _pooled(images, out, which, numbers, by_image, by_channel, by_row, by_column,
            C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr,
            SW: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, place = at % C, at // C
    x, y, image = place % OW, (place // OW) % OH, place // (OW * OH)
    corner = images + image * by_image + channel * by_channel + y * SH * by_row + x * SW * by_column
    largest = tl.load(corner, mask=at < numbers)
    best = tl.zeros((BLOCK,), dtype=tl.int32)
    for k in range(1, KH * KW):
        value = tl.load(corner + (k // KW) * by_row + (k % KW) * by_column, mask=at < numbers)
        better = (value > largest) | (value != value)      # not a number wins, as in PyTorch
        largest, best = tl.where(better, value, largest), tl.where(better, k, best)
    tl.store(out + at, largest, mask=at < numbers)
    if KEEP:
        tl.store(which + at, best.to(which.dtype.element_ty), mask=at < numbers)


@jit
def _unpooled(outputs, which, out, numbers, by_image, by_channel, by_row, by_column, C: tl.constexpr, H: tl.constexpr,
              W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr,
              SW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel = at % C, at // C
    x, y, image = pixel % W, (pixel // W) % H, pixel // (W * H)
    row, column = y // SH, x // SW
    there = (at < numbers) & (row < OH) & (column < OW) & (y % SH < KH) & (x % SW < KW)
    mine = tl.load(which + ((image * OH + row) * OW + column) * C + channel, mask=there, other=0) == (y % SH) * KW + x % SW
    place = image * by_image + channel * by_channel + row * by_row + column * by_column
    found = tl.load(outputs + place, mask=there & mine, other=0.0)
    tl.store(out + at, found, mask=at < numbers)


def columns(images: Tensor, window: Window, width: int, ones: bool) -> Tensor:
    """(images, channels, height, width), in any layout -> (images * places, width): the window, perhaps a one, then zeros."""
    count, channels, *size = images.shape
    rows, down = window.places(*size)
    out = images.new_empty(count * rows * down, width)
    block = min(128, triton.next_power_of_2(width))
    grid = (triton.cdiv(len(out), TILE // block), triton.cdiv(width, block))
    with torch.cuda.device(images.device):
        _columns[grid](images, out, len(out), *images.stride(), channels, *size, *window.kernel, rows, down, *window.stride,
                       *window.padding, *window.dilation, width, ones, TILE // block, block)
    return out


def folded(columns: Tensor, window: Window, size: Pair) -> Tensor:
    """(images, rows, columns, kernel..., channels) -> the sum for every pixel, (images, channels, height, width)."""
    count, *places, _, _, channels = columns.shape
    out = columns.new_empty(count, *size, channels)
    _over(out.numel(), _folded, columns.contiguous(), out, out.numel(), channels, *size, *window.kernel, *places, *window.stride,
          *window.padding, *window.dilation, tl.float64 if columns.dtype == torch.float64 else tl.float32)
    return out.permute(0, 3, 1, 2)


def pooled(images: Tensor, window: Window, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The largest number of each window and, if it is to be kept, its place within it."""
    count, channels, height, width = images.shape
    places = window.places(height, width)
    out = images.new_empty(count, *places, channels)
    few = window.kernel[0] * window.kernel[1] < 256
    which = torch.empty_like(out, dtype=torch.uint8 if few else torch.int32) if keep else out
    _over(out.numel(), _pooled, images, out, which, out.numel(), *images.stride(), channels, *window.kernel, *places,
          *window.stride, keep)
    return out.permute(0, 3, 1, 2), which.permute(0, 3, 1, 2)


def unpooled(outputs: Tensor, which: Tensor, window: Window, size: Pair) -> Tensor:
    """Each number put where the largest of its window was, zero elsewhere."""
    count, channels, *places = outputs.shape
    out = outputs.new_empty(count, *size, channels)
    which = which.permute(0, 2, 3, 1).contiguous()
    _over(out.numel(), _unpooled, outputs, which, out, out.numel(), *outputs.stride(), channels, *size, *window.kernel, *places,
          *window.stride)
    return out.permute(0, 3, 1, 2)


def _over(numbers: int, kernel: Any, *args: Any) -> None:
    """One thread for each number written."""
    with torch.cuda.device(next(a.device for a in args if isinstance(a, Tensor))):
        kernel[(triton.cdiv(numbers, BLOCK),)](*args, BLOCK=BLOCK)
