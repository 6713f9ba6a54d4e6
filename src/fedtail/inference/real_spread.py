"""How much of the spread over clients is real: the variance between clients beyond the noise of their few examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.errors import FieldError
from fedtail.inference.intervals import REPLICATES
from fedtail.inference.resampling import resampled_counts

ENOUGH_CLIENTS = 60         # below, a group that makes most of the spread may be missing among those seen


@dataclass(frozen=True)
class RealSpread:
    """The standard deviation over clients of what they would show with endless examples, `std`, between `low` and `high`.

    `observed_std` is that of the observed values, and `noise_std` the root of the mean variance of a client's value around what
    it would show with endless examples. `share`, between `share_low` and `share_high`, is the part of the observed variance that
    is real. `clients` is the number of clients that were used, of two or more examples.
    """

    std: float
    low: float
    high: float
    share: float
    share_low: float
    share_high: float
    observed_std: float
    noise_std: float
    clients: int
    confidence: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0: clients who are all alike would spread as much."""
        return self.low == 0

    def __str__(self) -> str:
        """The facts in one sentence."""
        about = (f"clients differ by {self.observed_std:.3g} (standard deviation), and {self.share:.0%} of the variance is real "
                 f"({self.share_low:.0%} to {self.share_high:.0%})")
        return f"{about}: no difference between clients is shown" if self.is_noise else about


def real_spread(values: Any, sizes: Any, *, example_variances: Any = None, confidence: float = 0.95,
                replicates: int = REPLICATES, seed: int = 0) -> RealSpread:
    """The spread over clients beyond noise, with an interval for new clients.

    `values`, (clients,), are means over each client's `sizes`, (clients,), examples: error rates, or means of other losses with
    `example_variances`, (clients,), the unbiased variance of the losses of each client's examples. The estimate is the variance
    of the values less the mean of each client's own variance, which for error rates is value (1 - value) / (size - 1): unbiased
    whatever the distributions are. The interval resamples clients, studentised; with fewer than 60 clients its upper end is the
    largest possible, 0.5 for error rates: a sample of fewer often lacks a group that makes most of the spread. Clients with one
    example, whose noise is not known, are left out. Raises FieldError where fewer than ten remain or arrays do not fit.

    >>> real_spread([0.1, 0.3] * 50, [1000] * 100).share > 0.98
    True
    """
    from scipy.special import ndtri, stdtrit

    values, noise = _values_and_noise(values, sizes, example_variances)
    centred, clients, level = values - values.mean(), len(values), (1 - confidence) / 2
    variances, errors = _variance_components(centred, noise, resampled_counts(replicates, clients, seed))
    influence = centred**2 - noise
    influence = influence - influence.mean()
    fourth = float((influence**4).sum())
    contributing = 3 * float((influence**2).sum()) ** 2 / fourth if fourth > 0 else 0.0
    factor = stdtrit(max(min(contributing, clients) - 1, 1.0), 1 - level) / ndtri(1 - level)
    target = float((centred**2).mean() - noise.mean())                       # what replicates estimate
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.nan_to_num((variances[1:] - target) / errors[1:], nan=0.0, posinf=np.inf, neginf=-np.inf)
    upper, lower = np.quantile(pivots, (level, 1 - level), method="inverted_cdf")
    low, high = (max(0.0, float(variances[0] - factor * pivot * errors[0])) for pivot in (lower, upper))
    if clients < ENOUGH_CLIENTS:
        high = 0.25 if example_variances is None else math.inf               # the largest variance of numbers in [0, 1]
    real, mean_noise, observed = max(0.0, float(variances[0])), float(noise.mean()), float(values.var(ddof=1))
    return RealSpread(math.sqrt(real), math.sqrt(low), math.sqrt(high), _share(real, mean_noise), _share(low, mean_noise),
                      _share(high, mean_noise), math.sqrt(observed), math.sqrt(mean_noise), clients, confidence)


def _variance_components(centred: np.ndarray, noise: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variance less mean noise, and its standard error, under each row of `counts`, (rows, clients): two arrays (rows,)."""
    n = counts.shape[1]
    moments = [centred, centred**2, centred**3, centred**4, noise, centred * noise, centred**2 * noise, noise**2]
    mean, second, third, fourth, noisy, crossed, weighted, squared = (counts @ np.stack(moments, 1) / n).T
    variance = second - mean**2
    squares = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4           # mean of the fourth power around the mean
    products = weighted - 2 * mean * crossed + mean**2 * noisy                         # and of noise times the square
    spread = squares - 2 * products + squared - (variance - noisy) ** 2
    return variance * n / (n - 1) - noisy, np.sqrt(np.maximum(spread, 0) / (n - 1))


def _share(real: float, noise: float) -> float:
    """The part of `real` in the sum of both variances; 0 where both are 0, 1 where `real` is infinite."""
    return 1.0 if math.isinf(real) else real / (real + noise) if real + noise > 0 else 0.0


def _values_and_noise(values: Any, sizes: Any, example_variances: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values and the variance of each around its client's own level, of clients with two or more examples."""
    values, sizes = np.asarray(values, float), np.asarray(sizes, float)
    if values.ndim != 1 or values.shape != sizes.shape:
        raise FieldError("sizes", "one number of examples for each value", f"{sizes.shape} for {values.shape}",
                         "Give the number of test examples of each client.")
    known = np.isfinite(values) & (sizes >= 2)
    if known.sum() < 10:
        raise FieldError("values", "those of at least ten clients with two or more examples", int(known.sum()),
                         "Fewer say too little about a spread: show every client by name.")
    if example_variances is not None:
        return values[known], np.asarray(example_variances, float)[known] / sizes[known]
    if (values[known] < 0).any() or (values[known] > 1).any():
        raise FieldError("values", "error rates where no example_variances are given", "other values",
                         "Give the variance of the losses of each client's examples.")
    return values[known], (values * (1 - values) / np.maximum(sizes - 1, 1))[known]
