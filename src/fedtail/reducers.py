"""Risks over the examples of a mini-batch, as losses for any torch training loop.

`RiskLoss` reduces the losses of single examples to a scalar in place of their mean. `RunningTiltedLoss` has a memory: it
estimates the tilted loss of all data from batch to batch. The reductions that are written here stay in the precision of the
losses (float32 at least) and on their device, wait for no number on the host, and have no branch that depends on the losses, so
that `torch.compile` makes one graph of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.errors import check_is_number
from fedtail.risk import Hierarchical, Mean, Risk, Spectral, Superquantile, Tilted, Worst

SMALL, LARGE = 1e-20, 1e20      # tilts below and above, in absolute value, are those of the mean and of the extreme loss
ROUNDING = 1e-12                # theta * batch size is taken as a whole number where it is off by less, relatively
FEW = 256                       # so many exponentials less one are summed to enough digits, whether near to zero or to minus one
GROUP_ROUNDING = 1e-6           # likewise for theta * group size, which is computed in float32


class RiskLoss(nn.Module):
    """Reduces the losses of the examples in a batch, (batch,), to one number, by a `Risk`: in place of their mean.

    `risk` is any risk that has a `value`; each example has the same mass. `Mean`, `Worst`, `Tilted`, `Superquantile`,
    `Spectral`, and `Hierarchical` of these, are reduced directly: a few operations in the precision of the losses, which
    `torch.compile(fullgraph=True)` takes as one graph and which never wait for the device. All other risks are computed by their
    `value`, in float64. There is no state.

    >>> criterion = RiskLoss(Tilted(2.0))
    >>> logits, labels = torch.zeros(3, 5), torch.tensor([0, 1, 4])
    >>> criterion(nn.functional.cross_entropy(logits, labels, reduction="none"))
    tensor(1.6094)
    """

    def __init__(self, risk: Risk) -> None:
        """Raise a TypeError where `risk` is not a `Risk`, has no `value`, or learns its weights from round to round."""
        super().__init__()
        if not isinstance(risk, Risk):
            raise TypeError(f"RiskLoss needs a Risk, got {risk!r}. Write RiskLoss(fedtail.Superquantile(0.2)).")
        if type(risk).value is Risk.value:
            raise TypeError(f"RiskLoss needs a risk with a value, which {type(risk).__name__} has not. Define value(losses, "
                            "mass), or use Tilted or Superquantile.")
        declared = risk.declares
        if declared.keeps or declared.needs_everyone or (declared.needs_groups and not isinstance(risk, Hierarchical)):
            raise TypeError(f"{type(risk).__name__} learns the weights of clients from round to round, which a batch has not. "
                            "Use fedtail.Worst(), or fedtail.Hierarchical(within=fedtail.Mean(), across=fedtail.Worst()).")
        self.risk = risk

    def forward(self, losses: Tensor, group: Any = None) -> Tensor:
        """The risk of these losses, (batch,), a scalar in their dtype; computed in float32 where they are narrower.

        `group` are the groups of the examples for a `Hierarchical` risk, any integers: (batch,), or (levels - 1, batch) from the
        finest to the coarsest, each group within one of the next level (direct reductions do not check that). Raises a ValueError
        for losses that are not of single examples, (batch,), for none, and for groups that do not fit or are not needed; a
        TypeError for losses that are not floating-point numbers.
        """
        check_losses(losses)
        group = None if group is None else torch.as_tensor(group, device=losses.device)
        check_group(self.risk, losses, group)
        return reduce_losses(self.risk, at_least_float32(losses), group).to(losses.dtype)

    def extra_repr(self) -> str:
        """The risk, for the printed form of a model."""
        return repr(self.risk)


class RunningTiltedLoss(nn.Module):
    r"""Stochastic TERM in any loop: weighs a batch by a running estimate of the tilted loss of all data, [Li23, Algorithm 14].

    In training mode each batch moves the estimate R by tilted averaging, R <- (1/t) log((1 - lambda) e^{t R} + lambda e^{t R_B}),
    where R_B is the tilted loss of the batch, `tilt` is t and `smoothing` is lambda, in (0, 1]. The result has the value R and
    the gradient (1/|B|) sum_x e^{t (f(x) - R)} grad f(x). So a batch of hard examples contributes more than one of easy examples
    (t > 0), even where a batch is one example; `RiskLoss(Tilted(t))`, which is lambda = 1, weighs examples within a batch only.
    In evaluation mode the result is the tilted loss of the batch, and the estimate stays.

    The estimate is a buffer, `estimate`: it is in `state_dict`, moves with the module, and stays in float32 in a module of lower
    precision. It is NaN until `start` or the first batch sets it. A batch whose tilted loss is not finite leaves it as it was.
    `tilt` and `smoothing` may be set between steps, as for a tilt that goes from 0 to -2 during training. Each process of a
    distributed run has an estimate from its own batches.

    >>> criterion = RunningTiltedLoss(tilt=1.0, smoothing=0.5)
    >>> for batch in (torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])):
    ...     print(f"{criterion(batch):.4f}")
    0.0000
    0.6201
    """

    estimate: Tensor

    def __init__(self, tilt: float, smoothing: float = 0.2) -> None:
        """Raise a ValueError for a tilt that is not finite, and for a smoothing outside (0, 1]."""
        super().__init__()
        check_is_number("tilt (t)", tilt)
        check_is_number("smoothing (lambda)", smoothing)
        if not math.isfinite(tilt):
            raise ValueError(f"tilt (t) must be finite, got {tilt:g}. For the largest loss of a batch write "
                             "RiskLoss(fedtail.Worst()).")
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing (lambda) must be in (0, 1], got {smoothing:g}. It is the share of the newest batch in "
                             "the estimate: write 0.2, or 1 to forget all batches before.")
        self.tilt, self.smoothing = tilt, smoothing
        self.register_buffer("estimate", torch.tensor(float("nan")))

    @torch.no_grad()
    def start(self, losses: Tensor) -> None:
        """Set the estimate to the tilted loss of these losses, (examples,): of all training data, or of a good sample.

        Without this the first batch sets it. Raises a ValueError or TypeError for losses that do not fit, as `forward` does.
        """
        check_losses(losses)
        self.estimate.copy_(tilted_mean(at_least_float32(losses), self.tilt))

    def forward(self, losses: Tensor) -> Tensor:
        """A scalar in the dtype of `losses`, (batch,), with the gradient of the algorithm; training mode moves the estimate.

        Raises a ValueError for losses that are not of single examples, (batch,), and for none; a TypeError for losses that are
        not floating-point numbers.
        """
        check_losses(losses)
        wide = at_least_float32(losses)
        if not self.training:
            return tilted_mean(wide, self.tilt).to(losses.dtype)
        now = self._next_estimate(tilted_mean(wide.detach(), self.tilt))
        self.estimate.copy_(now)
        tilt = 0.0 if abs(self.tilt) < SMALL else self.tilt
        step = (tilt * (wide - now)).exp().mean() if tilt else wide.mean()      # has the gradient; at most 1 / lambda
        return torch.add(now, step - step.detach(), alpha=1 / (tilt or 1.0)).to(losses.dtype)

    def extra_repr(self) -> str:
        """The tilt and the smoothing as text, for the printed form of a model."""
        return f"tilt={self.tilt:g}, smoothing={self.smoothing:g}"

    def _next_estimate(self, batch: Tensor) -> Tensor:
        """The estimate after a batch whose tilted loss is the scalar `batch`: a scalar of its dtype, without a gradient.

        `self.estimate` is read, not changed. The result is `batch` where there was no estimate (NaN), and the old estimate where
        `batch` is not finite.
        """
        before = self.estimate.to(batch.dtype)
        if self.smoothing == 1:
            after = batch
        elif abs(self.tilt) < SMALL:
            after = torch.lerp(before, batch, self.smoothing)
        else:
            apart = self.tilt * (batch - before)
            up, less = apart > 0, exp_minus_one(-apart.abs())      # of the one that weighs less, relative to the other
            log = torch.where(up, (1 - self.smoothing) * less, self.smoothing * less).log1p()
            after = torch.add(torch.where(up, batch, before), log, alpha=1 / self.tilt)
        after = torch.where(before.isnan(), batch, after)
        return torch.where(batch.isfinite(), after, before)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> RunningTiltedLoss:
        """Called by torch to move or convert the module by `fn`: as usual, but the estimate stays in float32 or wider.

        `args` and `options` are passed on to torch's own method. Returns the module.
        """
        super()._apply(fn, *args, **options)
        self.estimate = at_least_float32(self.estimate)
        return self


def reduce_losses(risk: Risk, losses: Tensor, group: Tensor | None = None) -> Tensor:
    """The risk of `losses`, (batch,), of equal mass, a scalar: directly where it can be, else `risk.value`.

    `group` are integers, (batch,) or (levels - 1, batch) from the finest level to the coarsest: used by a `Hierarchical` risk
    only.
    """
    if isinstance(risk, Hierarchical) and group is not None:
        return reduce_groups(risk, losses, group) if has_direct_reduction(risk) else risk.value(losses, group=group)
    if type(risk) is Mean:
        return losses.mean()
    if type(risk) is Worst:
        return losses.amax()
    if type(risk) is Tilted:
        return tilted_mean(losses, risk.tilt)
    if type(risk) is Superquantile:
        return tail_mean(losses, risk.tail_fraction)
    if type(risk) is Spectral:
        tails = [share * tail_mean(losses, fraction) for share, fraction in zip(risk.shares, risk.tail_fractions, strict=True)]
        return torch.stack(tails).sum()
    return risk.value(losses)


def has_direct_reduction(risk: Risk) -> bool:
    """Whether `reduce_losses` computes the risk itself, in the precision of the losses and in one graph, and not by `risk.value`.

    Exact types count: a subclass is not reduced directly.
    """
    if type(risk) is Hierarchical:
        return type(risk.within) in (Mean, Worst, Tilted, Superquantile) and has_direct_reduction(risk.across)
    return type(risk) in (Mean, Worst, Tilted, Superquantile, Spectral)


def reduce_groups(risk: Hierarchical, losses: Tensor, group: Tensor) -> Tensor:
    """A `Hierarchical` risk of `losses`, (batch,), of equal mass: a scalar. Only for a risk that `has_direct_reduction`.

    `group` are integers, (batch,) or (levels - 1, batch) from the finest level to the coarsest. Each loss is replaced by the
    value of its finest group. A group then has as many equal losses as members, which is its mass, and the risk across groups is
    one over these.
    """
    finest = (group if group.ndim == 1 else group[0]).long()
    slot = torch.searchsorted(finest.sort().values, finest)      # numbers below the batch size, one for each group
    within = risk.within
    if type(within) is Superquantile:
        values = tail_means_by_group(losses, slot, within.tail_fraction)
    else:
        tilt = within.tilt if type(within) is Tilted else math.inf if type(within) is Worst else 0.0
        values = tilted_means_by_group(losses, slot, tilt)
    return reduce_losses(risk.across, values, group[1:] if group.ndim > 1 else None)


def tilted_means_by_group(losses: Tensor, slot: Tensor, tilt: float) -> Tensor:
    """For each loss the tilted mean of all losses of its group, (batch,), [Li23, eq. (7.83)], as accurate as `tilted_mean`.

    `slot` is the number of each loss's group, (batch,) int64, below the batch size. An infinite `tilt` gives the extreme loss.
    """
    size = sum_by_group(torch.ones_like(losses.detach()), slot)
    if abs(tilt) < SMALL:
        return sum_by_group(losses, slot) / size
    known = losses.detach()
    extreme = known.scatter_reduce(0, slot, known, "amax" if tilt > 0 else "amin", include_self=False)[slot]
    if abs(tilt) > LARGE:
        tied = (known == extreme).to(losses.dtype)           # torch's own gradient of a largest number by group miscounts ties
        return sum_by_group(tied * losses, slot) / sum_by_group(tied, slot)
    lifted = tilt * (losses - extreme)
    log = sum_by_group(lifted.exp(), slot).log()
    less = sum_by_group(exp_minus_one(lifted.detach()), slot) / size
    value = torch.where(less > -0.5, less.log1p(), log.detach() - size.log())
    return torch.add(extreme, value + (log - log.detach()), alpha=1 / tilt)


def tail_means_by_group(losses: Tensor, slot: Tensor, tail_fraction: float) -> Tensor:
    """For each loss the mean of the worst `tail_fraction` (theta) of the losses of its group, (batch,); losses have equal mass.

    `slot` is the number of each loss's group, (batch,) int64, below the batch size. Losses tied at the boundary of a tail share
    what is left of it.
    """
    known = losses.detach()
    size = tail_fraction * sum_by_group(torch.ones_like(known), slot)      # of the tail, in examples
    order = known.argsort(descending=True)
    order = order[slot[order].argsort(stable=True)]                        # group by group, from the largest loss on
    first = torch.searchsorted(slot[order], slot)
    boundary = known[order[first + (size * (1 - GROUP_ROUNDING)).ceil().long() - 1]]
    above, tied = known > boundary, known == boundary
    share = (size - sum_by_group(above.to(losses.dtype), slot)) / sum_by_group(tied.to(losses.dtype), slot)
    return sum_by_group(torch.where(above, 1.0, share * tied) * losses, slot) / size


def sum_by_group(numbers: Tensor, slot: Tensor) -> Tensor:
    """For each of `numbers`, (batch,), the sum over all that are in its group: (batch,), members of a group have the same.

    `slot` is the number of each one's group, (batch,) int64, below the batch size.
    """
    return torch.zeros_like(numbers).index_add(0, slot, numbers)[slot]


def tilted_mean(losses: Tensor, tilt: float) -> Tensor:
    """(1/t) log mean exp(t F), [Li23, eq. (7.2)], a scalar of the dtype of the losses, (batch,); twice differentiable too.

    Accurate for every `tilt` (t), infinite ones included, and every scale of the losses: no exponential overflows, and near the
    mean no digits cancel.
    """
    if abs(tilt) < SMALL:
        return losses.mean()
    if abs(tilt) > LARGE:
        return losses.amax() if tilt > 0 else losses.amin()
    known = losses.detach()
    extreme = known.amax() if tilt > 0 else known.amin()
    lifted = tilt * (losses - extreme)                       # at most zero
    if losses.shape[0] <= FEW and not torch.compiler.is_compiling():
        return torch.add(extreme, lifted.expm1().mean().log1p(), alpha=1 / tilt)      # half as many operations
    log = lifted.exp().sum().log()                           # has the gradient, the weights; its value cancels near the mean
    known_log, less = log.detach(), exp_minus_one(lifted.detach()).mean()
    value = torch.where(less > -0.5, less.log1p(), known_log - math.log(losses.shape[0]))
    return torch.add(extreme, value + (log - known_log), alpha=1 / tilt)


def tail_mean(losses: Tensor, tail_fraction: float) -> Tensor:
    """The mean of the worst `tail_fraction` (theta) of the losses, (batch,), a scalar of their dtype: [PLMH23, eq. (6)].

    The masses are equal. One selection of the largest losses; those tied at the boundary share what is left of the tail.
    """
    size = tail_fraction * losses.shape[0]                   # of the tail, in examples
    known = losses.detach()
    boundary = known.topk(math.ceil(size * (1 - ROUNDING)), sorted=False).values.amin()
    above, tied = known > boundary, known == boundary
    share = (size - above.sum(dtype=losses.dtype)) / tied.sum(dtype=losses.dtype)
    return (torch.where(above, 1.0, share * tied) / size).dot(losses)


def exp_minus_one(exponents: Tensor) -> Tensor:
    """exp(x) - 1 for each x of `exponents`, all at most zero, in their shape: to all digits near zero, in a compiled graph too.

    On a CPU `torch.compile` writes `expm1` as exp(x) - 1, which loses all digits of a small x; there it is a hyperbolic tangent.
    """
    if not torch.compiler.is_compiling():
        return exponents.expm1()
    bent = (exponents / 2).tanh()
    return 2 * bent / (1 - bent)


def at_least_float32(losses: Tensor) -> Tensor:
    """The losses in float32 where their dtype is narrower (float16, bfloat16), else the tensor itself."""
    return losses.float() if losses.dtype.itemsize < 4 else losses


def check_losses(losses: Tensor) -> None:
    """Raise a ValueError unless these are losses of single examples, (batch,), at least one; a TypeError unless floating."""
    if losses.ndim != 1:
        raise ValueError(f"losses must be those of single examples, (batch,), got shape {tuple(losses.shape)}. Write "
                         "reduction='none' in the loss function, and take the mean over the axes of an example.")
    if losses.shape[0] == 0:
        raise ValueError("there are no losses: a risk needs one at least. Leave out an empty batch.")
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating-point numbers, got {losses.dtype}. Write losses.float().")


def check_group(risk: Risk, losses: Tensor, group: Tensor | None) -> None:
    """Raise a ValueError unless `group` fits the risk and the losses, (batch,).

    A `Hierarchical` risk of L levels needs integers of shape (batch,) for L = 2, else (L - 1, batch); any other risk needs None.
    """
    if not isinstance(risk, Hierarchical):
        if group is not None:
            raise ValueError(f"{type(risk).__name__} has no groups. RiskLoss takes the losses of single examples, and groups "
                             "only for a Hierarchical risk. Leave group out, or write RiskLoss(fedtail.Hierarchical("
                             f"within=fedtail.Mean(), across=fedtail.{type(risk).__name__}(...))).")
        return
    shape = (losses.shape[0],) if risk.levels == 2 else (risk.levels - 1, losses.shape[0])
    if group is None or group.shape != shape or group.is_floating_point():
        came = "nothing" if group is None else f"{group.dtype} of shape {tuple(group.shape)}"
        raise ValueError(f"a Hierarchical risk of {risk.levels} levels needs the groups of the examples, integers of shape "
                         f"{shape}, got {came}. Write criterion(losses, group=labels).")
