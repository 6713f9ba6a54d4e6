"""Warnings about models that are no use: not finite, or no better than a prediction that ignores the inputs. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

LARGE = 100.0                                # a spread of targets of which a network's first steps may be too long
DIVERGED = 1000.0                            # a loss so many times what a model without training has is not a model's any more
WORTH_SAYING = 0.01                          # of the loss of a constant prediction: models are not told from it by less
BEYOND_CHANCE = 0.975                        # of Student's distribution


class DivergedWarning(UserWarning):
    """A model, or its loss on some clients, is not finite: training has diverged."""


class AnswersLeftOutWarning(DivergedWarning):
    """Clients were left out of rounds because their loss or update was not finite, while the model stayed finite."""


class WorseThanConstantWarning(DivergedWarning):
    """A model's mean loss over clients is above that of a constant prediction, which ignores the inputs, beyond chance."""


@dataclass(frozen=True)
class LossGap:
    """How far the mean loss of a model is above that of a constant prediction, over the same clients.

    `error` is the standard error of that difference over clients, paired by client; None where it is not known, as for one
    client. `clients` is their number.
    """

    gap: float
    error: float | None
    clients: int

    def is_a_finding(self, constant: float) -> bool:
        """Whether the model is worse than the constant prediction, whose mean loss is `constant`: one rule for every warning.

        So it is where the gap is over 1% of that loss and beyond chance: above the 97.5th percentile of Student's distribution
        times the standard error, where there is one. Clients differ in how much a model gains for them, and the mean over
        few of them is above the constant's by chance.

        >>> LossGap(0.0144, 0.0054, 20).is_a_finding(0.1077), LossGap(0.0144, 0.0090, 20).is_a_finding(0.1077)
        (True, False)
        >>> LossGap(0.001, 1e-5, 20).is_a_finding(1.384)
        False
        """
        if not self.gap > WORTH_SAYING * abs(constant):
            return False
        if self.error is None:
            return True
        return bool(self.gap > student_quantile(max(self.clients - 1, 1)) * self.error)


def student_quantile(freedom: int) -> float:
    """The 97.5th percentile of Student's distribution, without scipy, which evaluations do not need.

    Below 30 by bisection of the distribution function, a finite sum for whole numbers; from there by its expansion about the
    normal percentile, to 1e-7.

    >>> [round(student_quantile(freedom), 4) for freedom in (1, 2, 19, 1000)]
    [12.7062, 4.3027, 2.093, 1.9623]
    """
    if freedom >= 30:
        z = NormalDist().inv_cdf(BEYOND_CHANCE)
        terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
                 (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160)
        return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))
    low, high = 1.9, 13.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (low, middle) if _within(middle, freedom) > 2 * BEYOND_CHANCE - 1 else (middle, high)
    return high


def _within(value: float, freedom: int) -> float:
    """The probability that a Student variable with `freedom` degrees of freedom is between -`value` and `value`."""
    angle = math.atan(value / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


def loss_gap(losses: Any, constants: Any, mass: Any = None) -> LossGap:
    """The `LossGap` of the `losses` of clients under a model and under a constant prediction, (clients,) each.

    The mean is weighted by `mass`, (clients,), where there is one; clients of mass zero are left out.

    >>> loss_gap([1.0, 3.0], [1.0, 1.0])
    LossGap(gap=1.0, error=1.0, clients=2)
    """
    with np.errstate(invalid="ignore", over="ignore"):                # of losses that are not finite the gap is none
        less = np.asarray(losses, float) - np.asarray(constants, float)
        share = np.ones(len(less)) if mass is None else np.asarray(mass, float)
        less, share = less[share > 0], share[share > 0]
        count = len(less)
        share = share / share.sum() if count else share
        gap = float(share @ less) if count else math.nan
        error = math.sqrt(count / (count - 1) * float(share**2 @ (less - gap) ** 2)) if count > 1 else None
    return LossGap(gap, error, count)


def has_exploded(loss: float, *untrained: float | None) -> bool:
    """Whether a mean loss is more than 1000 times each of those of models without training: before the first round, a constant.

    Of `untrained` those that are None or not finite are left out; False where none is left, and for a loss that is NaN.

    >>> has_exploded(1e28, 0.693, None), has_exploded(0.9, 0.693), has_exploded(1e28, None)
    (True, False, False)
    """
    known = [one for one in untrained if one is not None and math.isfinite(one)]
    return bool(known) and loss > DIVERGED * max(known) > 0


def clients_text(count: int, total: int, who: str = "clients") -> str:
    """ "3 of 20 clients", or "all 20 clients".

    >>> clients_text(3, 20), clients_text(20, 20, "test clients")
    ('3 of 20 clients', 'all 20 test clients')
    """
    return f"all {total} {who}" if count == total else f"{count} of {total} {who}"


def not_finite_text(count: int, total: int, who: str = "clients") -> str:
    """That the loss is not finite for `count` of `total` clients, and what to do."""
    return (f"the loss is not finite for {clients_text(count, total, who)}: the model has diverged. Lower the learning rate, "
            "clip updates, or look at the inputs of these clients.")


def large_targets_text(constant: float | None) -> str:
    """What else to do where training diverged on large numbers, as the loss of a `constant` prediction shows: a sentence, or "".

    >>> large_targets_text(8.2e9)[:36], large_targets_text(0.69)
    (' The targets spread by about 9e+04, ', '')
    """
    if constant is None or not math.isfinite(constant) or constant < LARGE**2:
        return ""
    return (f" The targets spread by about {math.sqrt(constant):.0e}, and a network expects about 1: divide them by such a "
            "number, for everybody the same.")


def parameters_text(count: int, total: int) -> str:
    """That `count` of `total` parameters are not finite, and what to do."""
    return (f"{count} of {total} parameters of the model are not finite: training has diverged. Lower the learning rate, or clip "
            "updates.")


def left_out_text(count: int, total: int | None) -> str:
    """That `count` answers of clients were left out, of `total` where that is known, and what to do."""
    share = f"{count} of {total} answers ({count / total:.0%})" if total else f"{count} answers"
    return (f"{share} of clients were left out because a loss or an update was not finite. Lower the learning rate, or look at "
            "the inputs of these clients.")


def constant_text(loss: float, constant: float, tail: tuple[float, float] | None = None) -> str:
    """That the mean loss is above that of a constant prediction, and what to do.

    `tail` is the loss of the worst 10% of the clients, and the constant's: where the first is less, the mean pays for the tail,
    as methods that follow the worst clients make it.
    """
    above = (f"the mean loss over clients, {loss:.4g}, is above that of a constant prediction, {constant:.4g}, which ignores "
             "the inputs")
    if tail is not None and tail[0] < tail[1]:
        return (f"{above}, while that of the worst 10% is below it, {tail[0]:.4g} for {tail[1]:.4g}: the mean pays for the tail. "
                "See whether it is worth that, against FedAvg; train longer, or with another learning rate.")
    return (f"{above}: by its loss these clients are worse off than without the model, also where fewer answers are wrong. "
            "Look at how sure it is of wrong answers; train longer, or with another learning rate.")


def exploded_text(loss: float, constant: float) -> str:
    """That the mean loss is so far above that of a constant prediction that training has diverged, and what to do."""
    return (f"the mean loss over clients is {loss:.4g}, where a constant prediction has {constant:.4g}: training has diverged. "
            "Lower the learning rate, or clip updates.")
