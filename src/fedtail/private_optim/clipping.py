"""Clipping rules: by how much the gradient of each record is scaled, and how far one record can then move the sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ClippingRule(Protocol):
    """Scales for the gradients of records (examples, or micro-batches of them), from their norms."""

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm of a scaled gradient: how far the sum moves at most if one record is zeroed. May be infinite."""
        ...

    def scales(self, norms: Tensor) -> Tensor:
        """The factor of each tensor of each record's gradient, (records, tensors), from their L2 norms, of the same shape.

        Raises ValueError where the rule was made for another number of tensors.
        """
        ...


@dataclass(frozen=True)
class FlatClip:
    """A gradient longer than `clip_norm` (C) is shortened to that L2 norm: g min(1, C / |g|)."""

    clip_norm: float

    def __post_init__(self) -> None:
        """Raise a ValueError unless the clip norm is positive and finite."""
        check_clip_norm("clip_norm (C)", self.clip_norm)

    @property
    def sensitivity(self) -> float:
        """The clip norm."""
        return self.clip_norm

    def scales(self, norms: Tensor) -> Tensor:
        """min(1, C / |g|) for each record, the same for all of its tensors, (records, tensors)."""
        whole = norms.norm(dim=1, keepdim=True)
        return (self.clip_norm / whole.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0).expand_as(norms)


@dataclass(frozen=True)
class LayerClip:
    """Each parameter tensor of a gradient is shortened to a norm of its own; `clip_norms` has one for each, in their order.

    Tensors are those of `module.parameters()` that require gradients, a weight and a bias being two.
    """

    clip_norms: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise a ValueError unless there is at least one clip norm and each is positive and finite."""
        if not self.clip_norms:
            raise ValueError("LayerClip needs one clip norm for each parameter tensor of the model, got none.")
        for clip_norm in self.clip_norms:
            check_clip_norm("each of clip_norms", clip_norm)

    @classmethod
    def equal(cls, clip_norm: float, tensors: int) -> LayerClip:
        """A rule for `tensors` tensors with equal clip norms, whose sensitivity is `clip_norm` in all."""
        return cls((clip_norm / math.sqrt(tensors),) * tensors)

    @property
    def sensitivity(self) -> float:
        """The square root of the sum of the squared clip norms."""
        return math.hypot(*self.clip_norms)

    def scales(self, norms: Tensor) -> Tensor:
        """min(1, C_l / |g_l|) for each tensor l of each record, (records, tensors)."""
        if norms.shape[1] != len(self.clip_norms):
            raise ValueError(f"LayerClip has {len(self.clip_norms)} clip norms, and the model has {norms.shape[1]} parameter "
                             f"tensors. Give one for each, or use LayerClip.equal(clip_norm, {norms.shape[1]}).")
        return (norms.new_tensor(self.clip_norms) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


@dataclass(frozen=True)
class AutomaticClip:
    """Every gradient is normalised: C g / (|g| + stability), as in automatic clipping (Bu, Wang, Zha, Karypis 2023).

    Short gradients are lengthened too, so `clip_norm` (C) and the learning rate are one setting. A larger `stability` keeps more
    of the differences between lengths.
    """

    clip_norm: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        """Raise a ValueError unless the clip norm and the stability constant are positive and finite."""
        check_clip_norm("clip_norm (C)", self.clip_norm)
        if not 0 < self.stability < math.inf:
            raise ValueError(f"stability must be positive and finite, got {self.stability:g}. 0.01 is usual.")

    @property
    def sensitivity(self) -> float:
        """The clip norm, which no normalised gradient quite reaches."""
        return self.clip_norm

    def scales(self, norms: Tensor) -> Tensor:
        """C / (|g| + stability) for each record, the same for all of its tensors, (records, tensors)."""
        return (self.clip_norm / (norms.norm(dim=1, keepdim=True) + self.stability)).expand_as(norms)


@dataclass(frozen=True)
class NoClip:
    """Gradients are summed as they are. One record may move the sum without bound, so what is released is not private."""

    @property
    def sensitivity(self) -> float:
        """Infinity."""
        return math.inf

    def scales(self, norms: Tensor) -> Tensor:
        """One for each tensor of each record, (records, tensors)."""
        return torch.ones_like(norms)


def check_clip_norm(name: str, clip_norm: float) -> None:
    """Raise a ValueError, which calls the value `name`, unless `clip_norm` is positive and finite."""
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {clip_norm:g}. It bounds the norm of a gradient; without "
                         "clipping, which is not private, write NoClip().")
