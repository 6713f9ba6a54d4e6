"""The noise floor of a tail: what a statistic over clients would be if all clients had the same error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.errors import FieldError
from fedtail.inference.statistics import statistic_named

MOST_DRAWS = 20_000_000         # of single example losses
SYMMETRIC = 1e-3                # a skewness below which noise is normal


@dataclass(frozen=True)
class NoiseFloor:
    """A statistic of the observed clients beside what it would be if all clients were alike.

    `floor` is its mean over simulated clients that all have the `overall` error, known up to `monte_carlo_error` (a standard
    error); 95% of the simulations are below `highest`. `is_noise` is whether the observed statistic is not above that: then it
    is no larger than chance alone explains.
    """

    statistic: str
    observed: float
    overall: float
    floor: float
    highest: float
    monte_carlo_error: float

    @property
    def is_noise(self) -> bool:
        """Whether the observed statistic is one that clients who are all alike would show, at the 5% level."""
        return self.observed <= self.highest

    def __str__(self) -> str:
        """The facts in one sentence."""
        about = (f"{self.statistic} is {self.observed:.3g}; if all clients had the overall error {self.overall:.3g}, it would be "
                 f"{self.floor:.3g} (at most {self.highest:.3g} in 95% of cases)")
        return f"{about}: this tail is all noise" if self.is_noise else f"{about}: clients differ"


def noise_floor(values: Any, sizes: Any, statistic: str = "worst10", *, example_losses: Any = None,
                example_variance: float | None = None, example_skewness: float = 0.0, draws: int = 1000,
                seed: int = 0) -> NoiseFloor:
    """What `statistic` would be if all clients had the overall error, by simulation of clients of these sizes.

    `values`, (clients,), are means over each client's `sizes`, (clients,), examples. The overall error is the mean over all
    examples. Without more, values are error rates and a client's number of errors is binomial. For other losses give
    `example_losses`, the losses of single examples of all clients in one array, which are drawn with replacement, or
    `example_variance`, the variance of losses within clients, for noise with that variance over the size; the variance of pooled
    losses would include what clients differ by. Beside it, `example_skewness` is the skewness of losses within clients: the
    noise is a shifted gamma variable of that skewness over the root of the size, normal for 0. Losses are skewed, and the tail
    of clients with few examples is much longer than normal noise has it. `statistic` is "mean", "std", "p90" or "worst10". Raises
    FieldError for values that are no error rates where neither is given, for both, and for sizes that do not fit.

    >>> same = noise_floor([0.2, 0.3, 0.1, 0.4, 0.2, 0.3] * 10, [10] * 60)
    >>> same.is_noise, round(same.observed, 3)
    (True, 0.4)
    """
    [found] = noise_floors(values, sizes, (statistic,), example_losses=example_losses, example_variance=example_variance,
                           example_skewness=example_skewness, draws=draws, seed=seed)
    return found


def noise_floors(values: Any, sizes: Any, statistics: Sequence[str], *, example_losses: Any = None,
                 example_variance: float | None = None, example_skewness: float = 0.0, draws: int = 1000,
                 seed: int = 0) -> list[NoiseFloor]:
    """The noise floor of several statistics, in order, from one simulation; arguments and errors are those of `noise_floor`."""
    values, sizes = _checked(values, sizes)
    if example_losses is not None and example_variance is not None:
        raise FieldError("example_losses", "given without example_variance", "both", "Give one of them.")
    overall = float(values @ sizes / sizes.sum())
    random = np.random.default_rng(seed)
    if example_losses is not None:
        draw = _pooled_draw(np.asarray(example_losses, float), sizes, random)
        draws = max(200, min(draws, int(MOST_DRAWS / sizes.sum())))
    elif example_variance is not None:
        draw = _skewed_draw(overall, np.sqrt(example_variance / sizes), example_skewness / np.sqrt(sizes), random)
    else:
        _check_error_rates(values, sizes)
        draw = lambda rows: random.binomial(sizes, overall, (rows, len(sizes))) / sizes      # noqa: E731
    reduced = [_row_statistic(statistic) for statistic in statistics]
    block = max(1, 1_000_000 // len(sizes))
    drawn = (draw(min(block, draws - start)) for start in range(0, draws, block))
    parts = [[reduce(rows) for reduce in reduced] for rows in drawn]
    found = [np.concatenate(one) for one in zip(*parts, strict=True)]
    return [NoiseFloor(name, float(reduce(values[None])[0]), overall, float(one.mean()), float(np.quantile(one, 0.95)),
                       float(one.std(ddof=1) / math.sqrt(draws)))
            for name, reduce, one in zip(statistics, reduced, found, strict=True)]


def _pooled_draw(losses: np.ndarray, sizes: np.ndarray, random: np.random.Generator) -> Callable[[int], np.ndarray]:
    """A function from a number of rows to client means, (rows, clients), of examples drawn from `losses` with replacement."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])

    def draw(rows: int) -> np.ndarray:
        """Client means of drawn examples, (rows, clients)."""
        drawn = (losses[random.integers(0, len(losses), sizes.sum())] for _ in range(rows))
        return np.stack([np.add.reduceat(examples, starts) / sizes for examples in drawn])

    return draw


def _skewed_draw(mean: float, spread: np.ndarray, skewness: np.ndarray,
                 random: np.random.Generator) -> Callable[[int], np.ndarray]:
    """A function from a number of rows to values, (rows, clients), around `mean`, of these standard deviations and skewnesses.

    They are shifted gamma variables, of which means over examples are such again: those of n examples have the variance over n,
    the skewness over the root of n. Normal where the skewness is almost 0.
    """
    if np.abs(skewness).max() < SYMMETRIC:
        return lambda rows: random.normal(mean, spread, (rows, len(spread)))
    shape = 4 / skewness**2
    scale = np.sign(skewness) * spread / np.sqrt(shape)
    return lambda rows: mean + scale * (random.standard_gamma(shape, (rows, len(spread))) - shape)


def _row_statistic(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function from values, (rows, clients), to the statistic called `name` of each row, (rows,)."""
    if name == "std":
        return lambda rows: rows.std(1)
    statistic = statistic_named(name)
    if statistic.kind == "mean":
        return lambda rows: rows.mean(1)
    if statistic.kind == "percentile":
        return lambda rows: np.quantile(rows, 1 - statistic.share, axis=1)

    def worst_share(rows: np.ndarray) -> np.ndarray:
        """The mean of the worst share of each row; the value at the boundary has a part of its weight."""
        weights = np.clip(statistic.share * rows.shape[1] - np.arange(rows.shape[1]), 0, 1)
        first = rows.shape[1] - int((weights > 0).sum())
        top = np.sort(np.partition(rows, first, axis=1)[:, first:], axis=1)[:, ::-1]
        return top @ weights[weights > 0] / weights.sum()

    return worst_share


def _checked(values: Any, sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values as float64 and sizes as int64, (clients,). Raises FieldError where they do not fit or are not usable."""
    values, sizes = np.asarray(values, float), np.asarray(sizes)
    if values.ndim != 1 or values.shape != sizes.shape or len(values) < 2:
        raise FieldError("sizes", "one number of examples for each of at least two values", f"{sizes.shape} for {values.shape}",
                         "Give the number of test examples of each client.")
    if not np.isfinite(values).all():
        raise FieldError("values", "finite", "NaN or infinity", "Leave clients without a value out, with their sizes.")
    if (sizes < 1).any() or (sizes != np.floor(sizes)).any():
        raise FieldError("sizes", "whole numbers, 1 or more", sizes.min(), "Leave clients without examples out.")
    return values, sizes.astype(np.int64)


def _check_error_rates(values: np.ndarray, sizes: np.ndarray) -> None:
    """Raise FieldError where values are not shares of `sizes` examples."""
    errors = values * sizes
    if (values < 0).any() or (values > 1).any() or (np.abs(errors - np.round(errors)) > 1e-3 + 1e-6 * sizes).any():
        raise FieldError("values", "error rates, errors over sizes, where nothing is said about examples", "other values",
                         "Give example_losses or example_variance for other losses.")
