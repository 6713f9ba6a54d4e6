"""Group norm of stacked clients with the channels innermost, as the convolutions before and after it have them.

PyTorch's own wants images one after the other, a copy before it and one after, and under `torch.func.vmap` its gradient is a
dozen operations. Here one program has one group of one image: it reads the pixels a few times, which stay in cache, and writes
them once. Sums are float32. Under autocast images of 16 bits stay so, where PyTorch makes them float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtail.engine.gpu.stackable import make_stackable
from fedtail.engine.gpu.triton_kernels import allocate, launch, tl, triton, triton_jit

NUMBERS = 4096       # that a program holds at once


@triton_jit
def _group_norm_kernel(images, weight, bias, out, means, scales, batch, eps, GROUPS: tl.constexpr, D: tl.constexpr,
                       P: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr):
    """Kernel of `_group_norm_stack`: one program normalises one group of D channels of one image of P pixels, channels innermost.

    `means` and `scales` get the group's mean and one over its standard deviation. PIXELS by WIDTH numbers are read at once,
    WIDTH being the power of two that holds D.
    """
    one, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    first, channel = one.to(tl.int64) * (P * GROUPS * D) + group * D, tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, P, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        known = (pixel < P)[:, None] & (channel < D)[None, :]
        total += tl.sum(tl.load(images + first + pixel[:, None] * (GROUPS * D) + channel[None, :], mask=known, other=0.0)
                        .to(tl.float32), 0)
    mean = tl.sum(total, 0) / (P * D)
    squares = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, P, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        known = (pixel < P)[:, None] & (channel < D)[None, :]
        found = tl.load(images + first + pixel[:, None] * (GROUPS * D) + channel[None, :], mask=known, other=0.0).to(tl.float32)
        away = tl.where(known, found - mean, 0.0)
        squares += tl.sum(away * away, 0)
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / (P * D) + eps)
    tl.store(means + tl.program_id(0), mean)
    tl.store(scales + tl.program_id(0), scale)
    client = one // batch
    factor = tl.load(weight + client * (GROUPS * D) + group * D + channel, mask=channel < D, other=0.0).to(tl.float32) * scale
    shift = tl.load(bias + client * (GROUPS * D) + group * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    for start in range(0, P, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        known = (pixel < P)[:, None] & (channel < D)[None, :]
        place = first + pixel[:, None] * (GROUPS * D) + channel[None, :]
        found = tl.load(images + place, mask=known, other=0.0).to(tl.float32)
        tl.store(out + place, ((found - mean) * factor[None, :] + shift[None, :]).to(out.dtype.element_ty), mask=known)


@triton_jit
def _group_norm_gradient_kernel(outputs, images, weight, means, scales, by_images, by_weight, by_bias, batch,
                                GROUPS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PIXELS: tl.constexpr,
                                WIDTH: tl.constexpr):
    """Kernel of `_group_norm_gradient`: one program has one group of one image, as in `_group_norm_kernel`.

    `outputs` are gradients with respect to the outputs. `by_weight` and `by_bias` get the gradients of each image alone.
    """
    one, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    first, channel = one.to(tl.int64) * (P * GROUPS * D) + group * D, tl.arange(0, WIDTH)
    mean, scale = tl.load(means + tl.program_id(0)), tl.load(scales + tl.program_id(0))
    of_weight, of_bias = tl.zeros((WIDTH,), dtype=tl.float32), tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, P, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        known = (pixel < P)[:, None] & (channel < D)[None, :]
        place = first + pixel[:, None] * (GROUPS * D) + channel[None, :]
        slope = tl.load(outputs + place, mask=known, other=0.0).to(tl.float32)
        found = (tl.load(images + place, mask=known, other=0.0).to(tl.float32) - mean) * scale
        of_weight += tl.sum(slope * found, 0)
        of_bias += tl.sum(slope, 0)
    mine = one.to(tl.int64) * (GROUPS * D) + group * D + channel
    tl.store(by_weight + mine, of_weight, mask=channel < D)
    tl.store(by_bias + mine, of_bias, mask=channel < D)
    factor = tl.load(weight + one // batch * (GROUPS * D) + group * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    along, level = tl.sum(factor * of_weight, 0) / (P * D), tl.sum(factor * of_bias, 0) / (P * D)
    for start in range(0, P, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        known = (pixel < P)[:, None] & (channel < D)[None, :]
        place = first + pixel[:, None] * (GROUPS * D) + channel[None, :]
        slope = tl.load(outputs + place, mask=known, other=0.0).to(tl.float32)
        found = (tl.load(images + place, mask=known, other=0.0).to(tl.float32) - mean) * scale
        by_image = (slope * factor[None, :] - level - found * along) * scale
        tl.store(by_images + place, by_image.to(by_images.dtype.element_ty), mask=known)


def group_norm(images: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.group_norm` of one client's images (batch, channels, height, width) with its own weight and bias, (channels,), on a GPU.

    Under `torch.func.vmap` all clients are computed at once. Differentiable; the result has channels innermost in memory.
    """
    return _GroupNorm.apply(images, weight, bias, groups, eps)[0]


def group_norm_of_stack(images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised images, and for each group of each its mean and one over its standard deviation, (clients, batch, groups).

    `images` is (clients, batch, channels, height, width), `weight` and `bias` are (clients, channels).
    """
    clients, batch, channels, *size = images.shape
    given = _channels_innermost(images)
    out, (means, scales) = allocate(given, *given.shape), allocate(given, 2, clients, batch, groups, dtype=torch.float32)
    launch(_group_norm_kernel, (clients * batch * groups,), given, weight.contiguous(), bias.contiguous(), out, means, scales,
           batch, eps, groups, *_tile(channels // groups, size[0] * size[1]))
    return out.permute(0, 1, 4, 2, 3), means, scales


def _group_norm_gradient(outputs: Tensor, images: Tensor, weight: Tensor, means: Tensor,
                         scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to images, weight and bias, from those with respect to the outputs; all in the shapes of these.

    `means` and `scales` are what `group_norm_of_stack` returned.
    """
    clients, batch, channels, *size = images.shape
    groups, given, slopes = means.shape[2], _channels_innermost(images), _channels_innermost(outputs)
    found, (by_weight, by_bias) = allocate(given, *given.shape), allocate(means, 2, clients, batch, channels)
    launch(_group_norm_gradient_kernel, (clients * batch * groups,), slopes, given, weight.contiguous(), means.contiguous(),
           scales.contiguous(), found, by_weight, by_bias, batch, groups, *_tile(channels // groups, size[0] * size[1]))
    return found.permute(0, 1, 4, 2, 3), by_weight.sum(1).to(weight), by_bias.sum(1).to(weight)


def _channels_innermost(images: Tensor) -> Tensor:
    """`images` (clients, batch, channels, height, width) as (clients, batch, height, width, channels), one after the other."""
    return images.permute(0, 1, 3, 4, 2).contiguous()


def _tile(channels: int, pixels: int) -> tuple[int, int, int, int]:
    """How a kernel is launched for groups of so many channels and pixels: these, and how many of both are read at once."""
    width = triton.next_power_of_2(channels)
    return channels, pixels, max(1, min(triton.next_power_of_2(pixels), NUMBERS // width)), width


norm, norm_gradient = make_stackable(group_norm_of_stack, 3), make_stackable(_group_norm_gradient, 5)


class _GroupNorm(torch.autograd.Function):
    """Group norm and its gradients, of one client; under `torch.func.vmap` of all clients at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """One client's normalised images, and the mean and one over the standard deviation of each group, (batch, groups)."""
        return norm(images, weight, bias, groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for `backward` images and weight from `inputs`, and from `output` means and scales, which have no gradient."""
        images, weight, *_ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(images, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, *_: Any) -> Any:
        """Gradients with respect to the arguments of `forward`; `outputs` are those with respect to its first result."""
        return *norm_gradient(outputs, *ctx.saved_tensors), None, None
