"""Kernels for a GPU that PyTorch has no fast ones for: convolutions of stacked clients, and pooling, with the channels innermost.

A convolution is a matrix product whose rows are the windows; they are read where they lie, never laid out. Compiled by Triton
when first used; where it is absent they cannot be called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:      # on machines without a GPU
    triton = tl = None

if TYPE_CHECKING:
    from fedtail.engine.gpu.convolutions import Pair, Window

_COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)
_TRYING: ContextVar[bool] = ContextVar("trying", default=False)
BLOCK = 1024         # numbers that one program writes
WARPS = 1024         # that fill a GPU
SHALLOW = 32         # numbers in a window that are multiplied at once
EXACT = "tf32x3"     # a factor of float32 as the sum of two of TF32, in three products


def triton_jit(function: Any) -> Any:
    """A decorator that compiles a kernel by `triton.jit`; without Triton it returns `function` unchanged.

    A kernel is compiled anew for other constants and layouts, but not for other values of `batch`, `parts` and `share`.
    """
    return triton.jit(function, do_not_specialize=["batch", "parts", "share"]) if triton else function


@triton_jit
def _add_half_tf32_unit(x):
    """Device function: the float32 numbers `x`, made larger in magnitude by half a unit of the last bit of TF32.

    Tensor cores cut a float32 factor off after ten bits; with this half unit added first, that rounds to the nearest. Infinities
    and NaN stay what they are.
    """
    # Tensor cores cut a factor of float32 off after ten bits. With half of the last of them added first, that is to the nearest;
    # infinities and what is not a number stay what they are, which adding to the bits themselves would not do.
    power = (x.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return x + power * 0.00048828125                           # 2 ** -11


@triton_jit
def _round_to_tf32_kernel(given, out, numbers, BLOCK: tl.constexpr):
    """Kernel: write the first `numbers` float32 entries of `given` to `out`, half a TF32 unit larger; one program writes BLOCK.

    Tensor cores cut such numbers off after ten bits, which rounds the original ones to TF32.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, _add_half_tf32_unit(tl.load(given + at, mask=at < numbers)), mask=at < numbers)


@triton_jit
def _convolve_kernel(images, matrix, bias, out, batch, by_image, by_channel, by_row, by_column, C: tl.constexpr,
                     H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
                     SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
                     OUTPUTS: tl.constexpr, BIASED: tl.constexpr, TURNED: tl.constexpr, HOW: tl.constexpr, ROWS: tl.constexpr,
                     WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Kernel of `convolve`: one program computes ROWS by WIDTH entries of one client's output matrix (batch * OH * OW, OUTPUTS).

    C is the number of channels; pairs are heights and widths: H W image, KH KW kernel, OH OW output, SH SW stride, PH PW
    padding, DH DW dilation. `matrix` holds the weights, (clients, OUTPUTS, KH * KW * C); with TURNED the kernel is turned by 180
    degrees. `bias` is read if BIASED. `by_...` are strides of `images`. DEPTH entries of a window are multiplied at once, in
    precision HOW.
    """
    length: tl.constexpr = KH * KW * C
    rows = batch * OH * OW
    tiles = tl.cdiv(rows, ROWS)
    client, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    top, left = ((row % (OH * OW)) // OW) * SH - PH, (row % OW) * SW - PW
    corner = (client * batch + row // (OH * OW)) * by_image + top * by_row + left * by_column
    mine = matrix + client * OUTPUTS * length + output * length
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for block in range(tl.cdiv(length, DEPTH)):
        if C % DEPTH == 0:                                     # one place of the window, some of its channels
            tap, channel = block // (C // DEPTH), block % (C // DEPTH) * DEPTH + tl.arange(0, DEPTH)
        else:
            tap, channel = (block * DEPTH + tl.arange(0, DEPTH)) // C, (block * DEPTH + tl.arange(0, DEPTH)) % C
        down, along = (tap // KW) * DH, (tap % KW) * DW
        inside = tap * C + channel
        there, known = (row < rows)[:, None], (output < OUTPUTS)[None, :]
        if length % DEPTH > 0:
            there, known = there & (inside < length)[None, :], known & (inside < length)[:, None]
        if PH > 0 or PW > 0:
            if C % DEPTH == 0:
                y, x = top + down, left + along
                there = there & ((y >= 0) & (y < H) & (x >= 0) & (x < W))[:, None]
            else:
                y, x = top[:, None] + down[None, :], left[:, None] + along[None, :]
                there = there & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        step = down * by_row + along * by_column + channel * by_channel
        windows = tl.load(images + corner[:, None] + step[None, :], mask=there, other=0.0)
        place = (KH * KW - 1 - tap) * C + channel if TURNED else inside
        weights = tl.load(mine[None, :] + place[:, None], mask=known, other=0.0)
        if HOW == "tf32" and windows.dtype == tl.float32:
            windows = _add_half_tf32_unit(windows)                  # the weights are already
        total = tl.dot(windows, weights, total, input_precision=HOW)
    if BIASED:
        total += tl.load(bias + client * OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    where = (client * rows + row)[:, None] * OUTPUTS + output[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :])


@triton_jit
def _weight_gradient_kernel(images, outputs, weights, biases, batch, parts, share, by_image, by_channel, by_row, by_column,
                            C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                            OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
                            PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, OUTPUTS: tl.constexpr,
                            BIASED: tl.constexpr, HOW: tl.constexpr, WIDTH: tl.constexpr, ACROSS: tl.constexpr,
                            DEPTH: tl.constexpr):
    """Kernel of `weight_gradient`: one program sums ACROSS by WIDTH entries of a client's weight gradient over part of its rows.

    `outputs` are gradients with respect to the outputs. A client's rows (batch * OH * OW) are cut into `parts` of `share` rows
    each; `weights` and `biases` get one partial sum per part. If BIASED, every window has one more entry, 1, whose gradient is
    the bias's. C is channels; H W image, KH KW kernel, OH OW output, SH SW stride, PH PW padding, DH DW dilation; `by_...` are
    strides of `images`; DEPTH rows are multiplied at once, in precision HOW.
    """
    length: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (length + BIASED + ACROSS - 1) // ACROSS
    one, rows = tl.program_id(0) // tiles, batch * OH * OW
    client, begin = one // parts, (one % parts) * share
    inside = tl.program_id(0) % tiles * ACROSS + tl.arange(0, ACROSS)
    output = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    tap, channel = inside // C, inside % C
    down, along = (tap // KW) * DH, (tap % KW) * DW
    step = down * by_row + along * by_column + channel * by_channel
    total = tl.zeros((ACROSS, WIDTH), dtype=tl.float32)
    for first in range(0, share, DEPTH):
        row = begin + first + tl.arange(0, DEPTH)
        top, left = ((row % (OH * OW)) // OW) * SH - PH, (row % OW) * SW - PW
        corner = (client * batch + row // (OH * OW)) * by_image + top * by_row + left * by_column
        there = (row < rows)[:, None] & (inside < length)[None, :]
        if PH > 0 or PW > 0:
            y, x = top[:, None] + down[None, :], left[:, None] + along[None, :]
            there = there & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        windows = tl.load(images + corner[:, None] + step[None, :], mask=there, other=0.0)
        if BIASED:
            windows = tl.where((inside == length)[None, :], 1.0, windows)
        slopes = tl.load(outputs + (client * rows + row)[:, None] * OUTPUTS + output[None, :],
                         mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :], other=0.0)
        windows = windows.to(slopes.dtype)
        if HOW == "tf32" and slopes.dtype == tl.float32:
            windows, slopes = _add_half_tf32_unit(windows), _add_half_tf32_unit(slopes)
        total = tl.dot(tl.trans(windows), slopes, total, input_precision=HOW)
    found = total.to(weights.dtype.element_ty)
    where = (one * OUTPUTS + output)[None, :] * length + (channel * KH * KW + tap)[:, None]
    tl.store(weights + where, found, mask=(output < OUTPUTS)[None, :] & (inside < length)[:, None])
    if BIASED:
        tl.store(biases + (one * OUTPUTS + output)[None, :] + tl.zeros_like(inside)[:, None], found,
                 mask=(output < OUTPUTS)[None, :] & (inside == length)[:, None])


@triton_jit
def _fold_kernel(columns, out, numbers, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                 OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                 DH: tl.constexpr, DW: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel of `fold_windows`: one program writes BLOCK numbers of images, each the sum of the values all windows hold for it.

    `columns` holds these values, (images, OH, OW, KH, KW, C); images are written with channels (C) innermost. H W is the image,
    KH KW the kernel, OH OW the output, SH SW the stride, PH PW padding, DH DW dilation. `numbers` is how many numbers the images
    have, and SUM the dtype of the sum.
    """
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


@triton_jit
def _max_pool_kernel(images, out, which, numbers, by_image, by_channel, by_row, by_column,
                     C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr,
                     SW: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel of `max_pool`: one program writes the largest number of each of BLOCK windows to `out`.

    With KEEP it also writes that number's index in the window to `which`. Of equal numbers the first is taken, and NaN is the
    largest. Outputs have channels (C) innermost; KH KW is the window, OH OW the output, SH SW the stride; `numbers` is how many
    windows there are, all channels included; `by_...` are strides of `images`.
    """
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


@triton_jit
def _max_unpool_kernel(outputs, which, out, numbers, by_image, by_channel, by_row, by_column, C: tl.constexpr, H: tl.constexpr,
                       W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr,
                       SW: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel of `max_unpool`: one program writes BLOCK pixels; a pixel that was largest gets its window's number, others 0.

    `outputs` are the numbers of the windows, and `which` the index of the largest pixel in each. Pixels have channels (C)
    innermost; H W is the image, KH KW the window, OH OW the output, SH SW the stride. `numbers` is how many pixels there are, all
    channels included; `by_...` are strides of `outputs`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel = at % C, at // C
    x, y, image = pixel % W, (pixel // W) % H, pixel // (W * H)
    row, column = y // SH, x // SW
    there = (at < numbers) & (row < OH) & (column < OW) & (y % SH < KH) & (x % SW < KW)
    mine = tl.load(which + ((image * OH + row) * OW + column) * C + channel, mask=there, other=0) == (y % SH) * KW + x % SW
    place = image * by_image + channel * by_channel + row * by_row + column * by_column
    found = tl.load(outputs + place, mask=there & mine, other=0.0)
    tl.store(out + at, found, mask=at < numbers)


def convolve(images: Tensor, matrix: Tensor, bias: Tensor | None, window: Window, turned: bool = False) -> Tensor:
    """The convolution of images (clients, batch, channels, height, width), of any strides, with weights of each client, on a GPU.

    `matrix` holds the weights, (clients, outputs, kernel height * width * channels), channels fastest; `bias` is (clients,
    outputs) or None; `window` has kernel size, stride, padding and dilation. With `turned` the kernel is turned by 180 degrees.
    Returns (clients, batch, outputs, rows, columns), in the dtype of the images and with the axis of outputs innermost in memory.
    """
    clients, batch, channels, *size = images.shape
    places, outputs = window.output_size(*size), matrix.shape[1]
    out = allocate(images, clients, batch, *places, outputs)
    rows, flat = batch * places[0] * places[1], images.flatten(0, 1)
    tile = convolution_tile(clients, rows, outputs, matrix.shape[2], channels, factor_kind(images))
    grid = clients * triton.cdiv(rows, tile[0]), triton.cdiv(outputs, tile[1])
    given = round_matrix_to_tf32(matrix.contiguous()), out if bias is None else bias.contiguous()
    launch(_convolve_kernel, grid, flat, *given, out, batch, *flat.stride(), channels, *size, *window.kernel, *places,
           *window.stride, *window.padding, *window.dilation, outputs, bias is not None, turned, product_precision(images),
           *tile[:3], num_warps=tile[3], num_stages=tile[4])
    return out.permute(0, 1, 4, 2, 3)


def weight_gradient(images: Tensor, outputs: Tensor, window: Window, biased: bool) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the weights, (clients, outputs, channels, kernel...), and to the bias, (clients, outputs).

    `images` are the inputs, (clients, batch, channels, height, width), and `outputs` the gradients with respect to the outputs,
    (clients, batch, outputs, rows, columns). If there is no bias (not `biased`) the second tensor is (clients, 0). Where clients
    are few, each one's sum is split into parts to keep the GPU busy. `window` has kernel size, stride, padding and dilation.
    """
    clients, batch, channels, *size = images.shape
    wide, places, flat = outputs.shape[2], outputs.shape[3:], images.flatten(0, 1)
    rows, length = batch * places[0] * places[1], window.kernel[0] * window.kernel[1] * channels
    how, width, across, depth, warps, stages = weight_gradient_tile(wide, length + biased, factor_kind(images))
    grid = triton.cdiv(length + biased, across), triton.cdiv(wide, width)
    parts = max(1, min(triton.cdiv(WARPS, warps * clients * grid[0] * grid[1]), triton.cdiv(rows, 2 * depth)))
    share = triton.cdiv(triton.cdiv(rows, parts), depth) * depth
    parts = triton.cdiv(rows, share)
    kind = images.dtype if parts == 1 else torch.float32
    weights = allocate(images, clients, parts, wide, length, dtype=kind)
    biases = allocate(images, clients, parts, wide if biased else 0, dtype=kind)
    by_pixel = outputs.permute(0, 1, 3, 4, 2).contiguous()
    launch(_weight_gradient_kernel, (clients * parts * grid[0], grid[1]), flat, by_pixel, weights, biases, batch, parts, share,
           *flat.stride(), channels, *size, *window.kernel, *places, *window.stride, *window.padding, *window.dilation, wide,
           biased, how, width, across, depth, num_warps=warps, num_stages=stages)
    weights, biases = (found[:, 0] if parts == 1 else found.sum(1).to(images.dtype) for found in (weights, biases))
    return weights.unflatten(2, (channels, *window.kernel)), biases


def convolution_tile(clients: int, rows: int, outputs: int, length: int, channels: int,
                     factors: str) -> tuple[int, int, int, int, int]:
    """How `_convolve_kernel` is launched: (rows, outputs, depth, warps, stages) of one program.

    A program computes so many rows (output pixels) of so many outputs, and multiplies `depth` entries of a window at once. `rows`
    is the number of output pixels per client, `length` that of entries of a window. `factors` is "narrow" (16 bits), "tf32" or
    "tf32x3". The numbers are the best of those tried on an H200. `channels` is the number of channels of the images.
    """
    wide = max(16, min(64, triton.next_power_of_2(outputs)))
    if length <= SHALLOW:
        return 128, wide, max(16, triton.next_power_of_2(length)), 4, 1
    enough, (large, small) = (128, (128, 16)) if factors == EXACT else (264, (128, 64))
    many = clients * triton.cdiv(rows, large)
    if factors != EXACT and outputs >= 128 and many * triton.cdiv(outputs, 128) >= enough:
        return large, 128, 64 if channels % 64 == 0 and factors == "narrow" else 32, 8 if factors == "narrow" else 4, 3
    fills = many * triton.cdiv(outputs, wide) >= enough or _TRYING.get()
    return large if fills else small, wide, 64 if channels % 64 == 0 and factors == "narrow" else 32, 4, 3


def weight_gradient_tile(outputs: int, length: int, factors: str) -> tuple[str, int, int, int, int, int]:
    """How `_weight_gradient_kernel` is launched: (precision, outputs, entries of a window, rows, warps, stages) of one program.

    `outputs` is the number of output channels, `length` that of entries of a window, a bias included, and `factors` as for
    `convolution_tile`. The numbers are the best of those tried on an H200, where large tiles of float32 are multiplied faster
    without tensor cores ("ieee"): these want both factors in the other order.
    """
    if factors == EXACT and outputs >= 64 and length >= 64:
        return "ieee", 64, 64, 32, 4, 3
    widest, across = (128 if factors == "tf32" else 64), (64 if factors == "narrow" and length > 64 else 32)
    how = EXACT if factors == EXACT else "tf32"
    return how, max(16, min(widest, triton.next_power_of_2(outputs))), across, 64, 1 if length <= SHALLOW else 4, 3


def product_precision(images: Tensor) -> str:
    """Triton's `input_precision` for products of these images: "tf32", or "tf32x3", which is about as exact as float32.

    It is "tf32" where `torch.backends.cudnn.allow_tf32` is set or the images are not float32.
    """
    return "tf32" if torch.backends.cudnn.allow_tf32 or images.dtype != torch.float32 else EXACT


def factor_kind(images: Tensor) -> str:
    """What the factors of products of these images are, by which tiles are chosen: "narrow" (16 bits), "tf32" or "tf32x3"."""
    return "narrow" if images.dtype != torch.float32 else product_precision(images)


def round_matrix_to_tf32(matrix: Tensor) -> Tensor:
    """A copy of `matrix`, float32 weights, that tensor cores round to the nearest TF32; `matrix` itself if TF32 is not used.

    TF32 is used where `product_precision` says so and the dtype is float32. Done here once, for all programs that read the
    weights.
    """
    if product_precision(matrix) == EXACT or matrix.dtype != torch.float32:
        return matrix
    out = allocate(matrix, *matrix.shape)
    _launch_kernel(out.numel(), _round_to_tf32_kernel, matrix, out, out.numel())
    return out


def fold_windows(columns: Tensor, window: Window, size: Pair) -> Tensor:
    """For each pixel, the sum of the values that all windows hold for it, on a GPU.

    `columns` is (images, rows, columns, kernel..., channels). Returns (images, channels, height, width), where `size` is (height,
    width), with channels innermost in memory.
    """
    count, *places, _, _, channels = columns.shape
    out = allocate(columns, count, *size, channels)
    _launch_kernel(out.numel(), _fold_kernel, columns.contiguous(), out, out.numel(), channels, *size, *window.kernel, *places,
                   *window.stride, *window.padding, *window.dilation,
                   tl.float64 if columns.dtype == torch.float64 else tl.float32)
    return out.permute(0, 3, 1, 2)


def max_pool(images: Tensor, window: Window, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The largest number of each window, and its index in the window (row by row), both (images, channels, rows, columns).

    `images` is (images, channels, height, width), on a GPU. Indices are uint8, or int32 for windows of 256 pixels or more. If
    `keep` is False they are not computed, and the second tensor is the first.
    """
    count, channels, height, width = images.shape
    places = window.output_size(height, width)
    out = allocate(images, count, *places, channels)
    few = window.kernel[0] * window.kernel[1] < 256
    which = allocate(out, *out.shape, dtype=torch.uint8 if few else torch.int32) if keep else out
    _launch_kernel(out.numel(), _max_pool_kernel, images, out, which, out.numel(), *images.stride(), channels, *window.kernel,
                   *places, *window.stride, keep)
    return out.permute(0, 3, 1, 2), which.permute(0, 3, 1, 2)


def max_unpool(outputs: Tensor, which: Tensor, window: Window, size: Pair) -> Tensor:
    """A tensor with each number of `outputs` at the pixel that was largest in its window, and zeros elsewhere, on a GPU.

    `which` holds that pixel's index in the window, as from `max_pool`; both are (images, channels, rows, columns). Windows must
    not overlap. Returns (images, channels, height, width), where `size` is (height, width).
    """
    count, channels, *places = outputs.shape
    out = allocate(outputs, count, *size, channels)
    which = which.permute(0, 2, 3, 1).contiguous()
    _launch_kernel(out.numel(), _max_unpool_kernel, outputs, which, out, out.numel(), *outputs.stride(), channels, *size,
                   *window.kernel, *places, *window.stride)
    return out.permute(0, 3, 1, 2)


def _launch_kernel(numbers: int, kernel: Any, *args: Any) -> None:
    """Launch a kernel with `args` as programs that write BLOCK numbers each; `numbers` is how many are written in all."""
    launch(kernel, (triton.cdiv(numbers, BLOCK),), *args, BLOCK=BLOCK)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel with `args` and `options` as a `grid` of programs, on the device of the first tensor in `args`.

    It is compiled first where this is the first launch of its kind. Within `compiled_together` it is only compiled.
    """
    with torch.cuda.device(next(a.device for a in args if isinstance(a, Tensor))):
        if _COMPILING.get():
            kernel.warmup(*args, grid=grid, **options)
        else:
            kernel[grid](*args, **options)


@contextmanager
def compiled_together() -> Iterator[None]:
    """A context in which kernels are compiled, as many at a time as there are cores, and not run; they are ready at its end.

    What they would write is zero (`allocate`), so that only shapes of results mean anything. Errors of the compiler are left to
    the launch that meets them again. Gradients are computed in this thread, to which the context belongs.
    """
    token = _COMPILING.set(True)
    try:
        with (ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as threads,
              triton.AsyncCompileMode(threads, ignore_errors=True), torch.autograd.set_multithreading_enabled(False)):
            yield
    finally:
        _COMPILING.reset(token)


@contextmanager
def tiles_of_many_clients() -> Iterator[None]:
    """A context in which a trial on two clients has the kernels of a round of many, which need not be compiled again for that."""
    token = _TRYING.set(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):      # in this thread, to which the context belongs
            yield
    finally:
        _TRYING.reset(token)


def compile_before(call: Callable[[], Any]) -> None:
    """Compile the kernels that `call()` launches, side by side, by making it within `compiled_together`; its result is dropped.

    Does nothing where Triton is absent or compiles only one kernel after the other, which it then does at the first launches.
    """
    if hasattr(triton, "AsyncCompileMode"):
        with compiled_together():
            call()


def allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor of this shape on the device of `like`, for a kernel to write, in its dtype unless given; else zeros."""
    return (like.new_zeros if _COMPILING.get() else like.new_empty)(shape, dtype=dtype)
