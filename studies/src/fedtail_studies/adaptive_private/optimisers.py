"""The optimisers of chapter 6 by the settings that are searched for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fedtail.private_optim import (
    AdaGradMoment,
    GradientPreconditioner,
    PrivateMethod,
    RMSPropMoment,
    SecondMoment,
    adadps,
    dp2,
    dp2_extra_query,
    dp_adagrad,
    dp_adam,
    dp_adam_pub,
    dp_r_pub,
    dp_rmsprop,
    dp_sgd,
    frequency_divisor,
    ideal_adadps,
    pda_dpmd,
    tfidf_divisor,
    warm_start,
    without_privacy,
)
from fedtail_studies.adaptive_private.training import Problem
from fedtail_studies.adaptive_private.tuning import Method, Settings

Choices = Mapping[str, Sequence[float]]
WARM_EPOCHS = 10


@dataclass(frozen=True)
class Ranges:
    """Where the settings of a problem are searched for: learning rates by kind of rule, clip norms, and adaptivity epsilons."""

    rates: Sequence[float]                             # of gradient descent on raw gradients
    clips: Sequence[float]                             # of raw gradients
    adaptive_rates: Sequence[float]                    # of Adam and RMSProp
    divided_rates: Sequence[float]                     # of gradient descent on preconditioned gradients
    divided_clips: Sequence[float]
    epsilons: Sequence[float]                          # in divisors, sqrt(v) + epsilon
    free_rates: Sequence[float] = (0.1,)               # of gradient descent without privacy
    free_plain_rates: Sequence[float] = (0.1,)         # of delayed RMSProp's phases without preconditioner
    plain_rates: Sequence[float] = (0.1,)              # of DP2's phases without preconditioner
    phases: Sequence[int] = (50,)                      # steps of a phase of DP2
    delayed_epsilons: Sequence[float] = (1e-5,)        # in DP2's divisors

    @property
    def raw(self) -> Choices:
        return {"rate": self.rates, "clip": self.clips}

    @property
    def adaptive(self) -> Choices:
        return {"rate": self.adaptive_rates, "clip": self.clips[-1:], "epsilon": self.epsilons}

    @property
    def divided(self) -> Choices:
        return {"rate": self.divided_rates, "clip": self.divided_clips, "epsilon": self.epsilons}

    @property
    def delayed(self) -> Choices:
        return {"rate": self.plain_rates, "clip": self.clips[-1:], "delayed_rate": self.divided_rates,
                "delayed_clip": self.divided_clips, "epsilon": self.delayed_epsilons, "phase": self.phases}


# how settings make an optimiser


def _sgd(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp_sgd(s["rate"], s["clip"], noise)


def _adam(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp_adam(s["rate"], s["clip"], noise, epsilon=s["epsilon"] ** 2)


def _rmsprop(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp_rmsprop(s["rate"], s["clip"], noise, epsilon=s["epsilon"])


def _adagrad(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp_adagrad(s["rate"], s["clip"], noise, epsilon=s["epsilon"])


def _public(s: Settings, noise: float, problem: Problem, first_decay: float | None = None) -> PrivateMethod:
    return adadps(s["rate"], s["clip"], noise, GradientPreconditioner(epsilon=s["epsilon"], first_decay=first_decay))


def _frequencies(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    assert problem.frequencies is not None
    return adadps(s["rate"], s["clip"], noise, frequency_divisor(problem.module(), problem.frequencies, s["epsilon"]))


def _tfidf(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    assert problem.rarities is not None
    return adadps(s["rate"], s["clip"], noise, tfidf_divisor(problem.module(), problem.rarities, s["epsilon"]))


def _ideal(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return ideal_adadps(s["rate"], s["clip"], noise, epsilon=s["epsilon"])


def _divide_after(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp_r_pub(s["rate"], s["clip"], noise, epsilon=s["epsilon"] ** 2)


def _public_adam(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp_adam_pub(s["rate"], s["clip"], noise, epsilon=s["epsilon"] ** 2)


def _mixed(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return pda_dpmd(s["rate"], s["clip"], noise)


def _delayed(s: Settings, noise: float, problem: Problem, moment: SecondMoment = RMSPropMoment(),
             noise_first: bool = False) -> PrivateMethod:
    return dp2(s["rate"], s["clip"], noise, int(s["phase"]), s["delayed_rate"], s["delayed_clip"], moment, s["epsilon"],
               noise_first=noise_first)


def _extra_query(s: Settings, noise: float, problem: Problem) -> PrivateMethod:
    return dp2_extra_query(s["rate"], s["clip"], noise, int(s["phase"]), s["delayed_rate"], s["delayed_clip"],
                           epsilon=s["epsilon"])


def _warm(settings: Settings, problem: Problem) -> Callable[[nn.Module], None]:
    """Ten epochs of RMSProp on the public examples, at `warm_rate`."""
    assert problem.public is not None
    return partial(warm_start, public=problem.public, epochs=WARM_EPOCHS, learning_rate=settings["warm_rate"], loss=problem.loss)


def _free(make: Any) -> Any:
    """The optimiser without clipping and noise."""
    return lambda s, noise, problem: without_privacy(make(s, 0.0, problem))


def methods(ranges: Ranges) -> dict[str, Method]:
    """All optimisers by name, with these ranges."""
    r = ranges
    one = [
        Method("DP-SGD", _sgd, r.raw),
        Method("DP-Adam", _adam, r.adaptive),
        Method("DP-RMSProp", _rmsprop, r.adaptive),
        Method("DP-AdaGrad", _adagrad, {**r.adaptive, "rate": r.divided_rates}),
        Method("AdaDPS, public data", _public, r.divided),
        Method("AdaDPS (Adam), public data", partial(_public, first_decay=0.9), r.divided),
        Method("AdaDPS, frequencies", _frequencies, r.divided),
        Method("AdaDPS, TF-IDF", _tfidf, r.divided),
        Method("ideal", _ideal, r.divided),
        Method("DP-R-Pub", _divide_after, {**r.adaptive, "rate": r.divided_rates}),
        Method("DP-Adam-Pub", _public_adam, r.adaptive),
        Method("PDA-DPMD", _mixed, r.raw),
        Method("DP-SGD, warm start", _sgd, {**r.raw, "rate": r.rates[1::2], "warm_rate": (1e-3, 1e-2)}, start=_warm),
        Method("DP2-RMSProp", _delayed, r.delayed),
        Method("DP2-AdaGrad", partial(_delayed, moment=AdaGradMoment()), r.delayed),
        Method("DP2, extra query", _extra_query, r.delayed, releases=2),
        Method("DP2, noise first", partial(_delayed, noise_first=True),
               {**r.delayed, "rate": r.plain_rates[-1:], "delayed_clip": r.clips[-1:], "delayed_rate": r.adaptive_rates}),
    ]
    free = [
        Method("SGD", _free(_sgd), {"rate": r.free_rates, "clip": (1.0,)}),
        Method("Adam", _free(_adam), {"rate": r.adaptive_rates, "clip": (1.0,), "epsilon": (1e-8,)}),
        Method("RMSProp", _free(_rmsprop), {"rate": r.adaptive_rates, "clip": (1.0,), "epsilon": r.epsilons}),
        Method("AdaS, public data", _free(_public), {**r.divided, "rate": r.adaptive_rates, "clip": (1.0,)}),
        Method("AdaS, frequencies", _free(_frequencies), {**r.divided, "rate": r.adaptive_rates, "clip": (1.0,)}),
        Method("delayed RMSProp", _free(_delayed), {**r.delayed, "rate": r.free_plain_rates, "clip": (1.0,),
                                                    "delayed_clip": (1.0,), "delayed_rate": r.adaptive_rates[1:3]}),
    ]
    return {method.name: method for method in (*one, *free)}
