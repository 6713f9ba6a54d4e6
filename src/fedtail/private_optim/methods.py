"""Private optimisers as data: a gradient transform, a rule and a noise multiplier; and the published ones by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fedtail.local.schedules import Constant, Schedule
from fedtail.private_optim.clipping import ClippingRule, FlatClip
from fedtail.private_optim.delayed import DelayedMoment
from fedtail.private_optim.preconditioners import FixedPreconditioner, GradientPreconditioner, Preconditioner
from fedtail.private_optim.queries import ExactGradient
from fedtail.private_optim.rules import AdaptiveRule, GradientDescent, PublicAdam, PublicMixing, PublicScaling, Rule
from fedtail.private_optim.second_moments import AdaGradMoment, RMSPropMoment, SecondMoment, YogiMoment
from fedtail.private_optim.transforms import ClippedGradient, DelayedGradient, ExtraQueryGradient, GradientTransform


@dataclass(frozen=True)
class PrivateMethod:
    """How one step goes: `transform` asks for noisy means of gradients, `rule` steps along what it makes of them.

    The noise of each mean has standard deviation `noise_multiplier` (z) times the sensitivity of its clipping rule, on the sum;
    0 adds none, and is not private. `schedule` gives the factor of the learning rate in each step. With `microbatch_size` above
    1, examples are put into micro-batches at random, whose averages are clipped; one example then moves a sum by up to twice the
    clip norm, and the noise is twice as large.
    """

    transform: GradientTransform
    rule: Rule
    noise_multiplier: float
    schedule: Schedule = Constant()
    microbatch_size: int = 1

    def __post_init__(self) -> None:
        """Raise a ValueError for a noise multiplier that is negative or not finite, one without clipping, or no micro-batch."""
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier (z) must be 0 or more and finite, got {self.noise_multiplier:g}.")
        if self.noise_multiplier and not all(clip.sensitivity < math.inf for clip in self.transform.declares.clips):
            raise ValueError(f"noise_multiplier={self.noise_multiplier:g} without clipping gives infinite noise. Clip by "
                             "FlatClip, LayerClip or AutomaticClip, or write noise_multiplier=0, which is not private.")
        if self.microbatch_size < 1:
            raise ValueError(f"microbatch_size must be at least 1 example, got {self.microbatch_size}.")

    @property
    def private(self) -> bool:
        """Whether its steps have a finite epsilon: noise is added, and no exact gradient is read."""
        return self.noise_multiplier > 0 and not self.transform.declares.reads_exact

    @property
    def reads_public(self) -> bool:
        """Whether its steps read public gradients."""
        return self.transform.declares.reads_public or self.rule.reads_public

    def sensitivity(self, clip: ClippingRule) -> float:
        """How far a sum clipped by `clip` moves at most if one example is zeroed: with micro-batches twice as far."""
        return clip.sensitivity * (1 if self.microbatch_size == 1 else 2)


def dp_sgd(learning_rate: float, clip_norm: float, noise_multiplier: float, momentum: float = 0.0) -> PrivateMethod:
    """DP-SGD (Abadi et al. 2016): the noisy mean of clipped gradients, and a step of gradient descent."""
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), GradientDescent(learning_rate, momentum), noise_multiplier)


def dp_adam(learning_rate: float, clip_norm: float, noise_multiplier: float, first_decay: float = 0.9,
            second_decay: float = 0.999, epsilon: float = 1e-8, epsilon_inside_root: bool = True) -> PrivateMethod:
    """DP-Adam [Li23, Algorithm 9]: DP-SGD's gradient, and a step of Adam, by default with epsilon inside the root as printed."""
    moment = RMSPropMoment(second_decay)
    rule = AdaptiveRule(learning_rate, moment, first_decay, epsilon, epsilon_inside_root, bias_correction=True)
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def dp_rmsprop(learning_rate: float, clip_norm: float, noise_multiplier: float, decay: float = 0.9,
               epsilon: float = 1e-3) -> PrivateMethod:
    """DP-RMSProp: DP-SGD's gradient, and a step of RMSProp."""
    rule = AdaptiveRule(learning_rate, RMSPropMoment(decay), epsilon=epsilon)
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def dp_adagrad(learning_rate: float, clip_norm: float, noise_multiplier: float, epsilon: float = 1e-3) -> PrivateMethod:
    """DP-AdaGrad: DP-SGD's gradient, and a step of AdaGrad."""
    rule = AdaptiveRule(learning_rate, AdaGradMoment(), epsilon=epsilon)
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def dp_yogi(learning_rate: float, clip_norm: float, noise_multiplier: float, first_decay: float = 0.9,
            second_decay: float = 0.999, epsilon: float = 1e-3) -> PrivateMethod:
    """DP-Yogi: DP-SGD's gradient, and a step of Yogi without bias correction."""
    rule = AdaptiveRule(learning_rate, YogiMoment(second_decay), first_decay, epsilon)
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def adadps(learning_rate: float, clip_norm: float, noise_multiplier: float, preconditioner: Preconditioner | Tensor,
           momentum: float = 0.0) -> PrivateMethod:
    """AdaDPS [Li23, Algorithm 8]: gradients are preconditioned before they are clipped, and a step of gradient descent.

    `preconditioner` is a flat public vector that gradients are divided by (see `frequency_divisor`), or a part:
    `GradientPreconditioner()` for the second moment of public gradients.
    """
    part = FixedPreconditioner(preconditioner) if isinstance(preconditioner, Tensor) else preconditioner
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm), part), GradientDescent(learning_rate, momentum), noise_multiplier)


def ideal_adadps(learning_rate: float, clip_norm: float, noise_multiplier: float, moment: SecondMoment = RMSPropMoment(),
                 epsilon: float = 1e-3) -> PrivateMethod:
    """AdaDPS whose preconditioner is made of exact private gradients: an upper bound [Li23, Table 6.4], and not private."""
    return adadps(learning_rate, clip_norm, noise_multiplier, GradientPreconditioner(moment, epsilon, ExactGradient()))


def adas(learning_rate: float, preconditioner: Preconditioner | Tensor, momentum: float = 0.0) -> PrivateMethod:
    """AdaS: AdaDPS without clipping and noise [Li23, section 6.7.2]; not private."""
    return without_privacy(adadps(learning_rate, 1.0, 0.0, preconditioner, momentum))


def dp2(learning_rate: float, clip_norm: float, noise_multiplier: float, phase_steps: int,
        delayed_learning_rate: float | None = None, delayed_clip_norm: float | None = None,
        moment: SecondMoment = RMSPropMoment(), epsilon: float = 1e-3, delayed_steps: int | None = None,
        debias: bool = False, noise_first: bool = False) -> PrivateMethod:
    """DP2 [Li23, Algorithm 11]: `phase_steps` (s1) of DP-SGD, then as many, or `delayed_steps` (s2), with a preconditioner.

    The preconditioner is made of the gradients that the first phase released, so a step costs what one of DP-SGD costs. Learning
    rate and clip norm of the second phase are by default those of the first. `moment` AdaGradMoment() or YogiMoment() gives
    DP2-AdaGrad and DP2-Yogi. `debias` subtracts the variance of the noise; `noise_first` is the second ablation.
    """
    phases = DelayedMoment(phase_steps, delayed_steps or phase_steps, moment, epsilon, debias)
    transform = DelayedGradient(phases, FlatClip(clip_norm), FlatClip(delayed_clip_norm or clip_norm),
                                (delayed_learning_rate or learning_rate) / learning_rate, noise_first)
    return PrivateMethod(transform, GradientDescent(learning_rate), noise_multiplier)


def dp2_extra_query(learning_rate: float, clip_norm: float, noise_multiplier: float, every: int,
                    delayed_learning_rate: float | None = None, delayed_clip_norm: float | None = None,
                    moment: SecondMoment = RMSPropMoment(), epsilon: float = 1e-3) -> PrivateMethod:
    """DP2's first ablation [Li23, Algorithm 12]: two noisy means in most steps, each of which is charged."""
    transform = ExtraQueryGradient(every, FlatClip(clip_norm), FlatClip(delayed_clip_norm or clip_norm),
                                   (delayed_learning_rate or learning_rate) / learning_rate, moment, epsilon)
    return PrivateMethod(transform, GradientDescent(learning_rate), noise_multiplier)


def dp_r_pub(learning_rate: float, clip_norm: float, noise_multiplier: float, decay: float = 0.9, epsilon: float = 1e-8,
             epsilon_inside_root: bool = True) -> PrivateMethod:
    """DP-R-Pub: DP-SGD's gradient divided by the root of the second moment of public gradients, after the noise."""
    rule = PublicScaling(learning_rate, RMSPropMoment(decay), epsilon, epsilon_inside_root)
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def dp_adam_pub(learning_rate: float, clip_norm: float, noise_multiplier: float, private_share: float = 0.9,
                first_decay: float = 0.9, second_decay: float = 0.999, epsilon: float = 1e-8,
                epsilon_inside_root: bool = True) -> PrivateMethod:
    """DP-Adam-Pub: Adam with a first moment of noisy and public gradients, and a second moment of public ones."""
    rule = PublicAdam(learning_rate, private_share, first_decay, second_decay, epsilon, epsilon_inside_root)
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def pda_dpmd(learning_rate: float, clip_norm: float, noise_multiplier: float, private_share: float = 0.9) -> PrivateMethod:
    """PDA-DPMD as [Li23] compares with it: gradient descent along a mixture of the noisy and the public gradient."""
    rule = PublicMixing(private_share, GradientDescent(learning_rate))
    return PrivateMethod(ClippedGradient(FlatClip(clip_norm)), rule, noise_multiplier)


def without_privacy(method: PrivateMethod) -> PrivateMethod:
    """`method` without clipping and noise: the optimiser that it makes private. Its steps are on the ledger as not private."""
    return replace(method, transform=method.transform.without_clipping(), noise_multiplier=0.0)
