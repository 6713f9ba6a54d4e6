"""The noise floor of a tail: what a statistic over clients would be if all clients had the same error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.errors import FieldError
from fedtail.inference.statistics import statistic_named

FEWEST_DRAWS = 199              # simulations: the 190th smallest is the end of 95%
MOST_DRAWS = 20_000_000         # of single example losses, in all simulations together
FEWEST_EXAMPLES = 20            # that are drawn for a client with more; the noise of their mean is scaled down
ROUNDING = 1e-6                 # relative, of losses in float32
LEVEL = 0.95
WORST_CLIENT = "p100"           # has no interval for new clients, and a floor


@dataclass(frozen=True)
class NoiseFloor:
    """A statistic of the observed clients beside what it would be if all clients were alike.

    `floor` is its mean over simulated clients that all have the `overall` error, known up to `monte_carlo_error` (a standard
    error); `highest` is the end of 95% of the simulations. `is_noise` is whether the observed statistic is not above that: then
    it is no larger than chance alone explains.
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
        return self.observed <= self.highest + ROUNDING * max(abs(self.observed), abs(self.highest))

    def __str__(self) -> str:
        """The facts in one sentence."""
        about = (f"{self.statistic} is {self.observed:.3g}; if all clients had the overall error {self.overall:.3g}, it would be "
                 f"{self.floor:.3g} (at most {self.highest:.3g} in 95% of cases)")
        return f"{about}: this tail is no larger than noise makes it" if self.is_noise else f"{about}: clients differ"


def noise_floor(values: Any, sizes: Any, statistic: str = "worst10", *, example_losses: Any = None,
                example_variance: float | None = None, draws: int = 999, seed: int = 0) -> NoiseFloor:
    """What `statistic` would be if all clients had the overall error, by simulation of clients of these sizes.

    `values`, (clients,), are means over each client's `sizes`, (clients,), examples. The overall error is the mean over all
    examples. Without more, values are error rates and a client's number of errors is binomial. For other losses give
    `example_losses`, those of single examples of all clients in one array. If they are all examples, they are dealt out anew
    to clients of these sizes: a permutation test, which calls at most 5% of the tails of alike clients real, however their losses
    are distributed and however few each has. If they are fewer (some of many examples), or there are more than 100,000, they are
    drawn with replacement. Where losses are not known, `example_variance`, the variance within clients, gives normal noise;
    losses are skewed, so that it calls many a tail of clients with few examples real. `statistic` is "mean", "std", "p90",
    "worst10", or "p100", the worst client; `draws` is the most simulations, 199 at least. Raises FieldError for values that are
    no error rates where neither is given, for both, for losses that are not finite, and for sizes that do not fit.

    >>> same = noise_floor([0.2, 0.3, 0.1, 0.4, 0.2, 0.3] * 10, [10] * 60)
    >>> same.is_noise, round(same.observed, 3)
    (True, 0.4)
    """
    [found] = noise_floors(values, sizes, (statistic,), example_losses=example_losses, example_variance=example_variance,
                           draws=draws, seed=seed)
    return found


def noise_floors(values: Any, sizes: Any, statistics: Sequence[str], *, example_losses: Any = None,
                 example_variance: float | None = None, draws: int = 999, seed: int = 0) -> list[NoiseFloor]:
    """The noise floor of several statistics, in order, from one simulation; arguments and errors are those of `noise_floor`."""
    values, sizes = _checked(values, sizes)
    if example_losses is not None and example_variance is not None:
        raise FieldError("example_losses", "given without example_variance", "both", "Give one of them.")
    overall = float(values @ sizes / sizes.sum())
    random = np.random.default_rng(seed)
    if example_losses is not None:
        draw = _pooled_draw(_checked_losses(example_losses), sizes, overall, random)
        draws = max(FEWEST_DRAWS, min(draws, MOST_DRAWS // int(sizes.sum())))
    elif example_variance is not None:
        spread = np.sqrt(example_variance / sizes)
        draw = lambda rows: random.normal(overall, spread, (rows, len(sizes)))               # noqa: E731
    else:
        _check_error_rates(values, sizes)
        draw = lambda rows: random.binomial(sizes, overall, (rows, len(sizes))) / sizes      # noqa: E731
    reduced = [_row_statistic(statistic) for statistic in statistics]
    block = max(1, 1_000_000 // len(sizes))
    drawn = (draw(min(block, draws - start)) for start in range(0, draws, block))
    parts = [[reduce(rows) for reduce in reduced] for rows in drawn]
    found = [np.concatenate(one) for one in zip(*parts, strict=True)]
    place = min(draws, math.ceil(LEVEL * (draws + 1))) - 1                   # the observed one is one more of them
    return [NoiseFloor(name, float(reduce(values[None])[0]), overall, float(one.mean()), float(np.sort(one)[place]),
                       float(one.std(ddof=1) / math.sqrt(draws)))
            for name, reduce, one in zip(statistics, reduced, found, strict=True)]


def _pooled_draw(losses: np.ndarray, sizes: np.ndarray, overall: float,
                 random: np.random.Generator) -> Callable[[int], np.ndarray]:
    """A function from a number of rows to client means, (rows, clients), of examples taken from `losses`.

    All examples are dealt out anew in each row where they are as many as the clients have, and not too many; else they are drawn
    with replacement, for each client as many as it has or fewer: it has the `overall` error and the noise of a mean over n of
    these, times the root of n over its size.
    """
    total = int(sizes.sum())
    dealt = len(losses) == total and total * FEWEST_DRAWS <= MOST_DRAWS
    counts = sizes if dealt else np.minimum(sizes, _examples_drawn(sizes))
    starts, centre = np.concatenate([[0], np.cumsum(counts)[:-1]]), losses.mean()

    def row() -> np.ndarray:
        """The means of all clients in one simulation."""
        taken = random.permutation(losses) if dealt else losses[random.integers(0, len(losses), counts.sum())]
        return np.add.reduceat(taken, starts, dtype=float) / counts

    def draw(rows: int) -> np.ndarray:
        """Client means in so many simulations."""
        means = np.stack([row() for _ in range(rows)])
        return means if dealt else overall + np.sqrt(counts / sizes) * (means - centre)

    return draw


def _examples_drawn(sizes: np.ndarray) -> int:
    """The most examples that are drawn for a client, so that all simulations take about MOST_DRAWS; FEWEST_EXAMPLES at least."""
    low, high = FEWEST_EXAMPLES, max(int(sizes.max()), FEWEST_EXAMPLES)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(sizes, middle).sum() * FEWEST_DRAWS <= MOST_DRAWS else (low, middle - 1)
    return low


def _row_statistic(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function from values, (rows, clients), to the statistic called `name` of each row, (rows,)."""
    if name == "std":
        return lambda rows: rows.std(1)
    if name == WORST_CLIENT:
        return lambda rows: rows.max(1)
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


def _checked_losses(example_losses: Any) -> np.ndarray:
    """Losses of single examples as an array (examples,). Raises FieldError where there is none, or one is not finite."""
    losses = np.asarray(example_losses, float).ravel()
    if not len(losses) or not np.isfinite(losses).all():
        raise FieldError("example_losses", "finite losses of single examples", "none" if not len(losses) else "NaN or infinity",
                         "Leave clients without a value out, with their examples.")
    return losses


def are_error_rates(values: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether all values are whole numbers of errors over sizes; not so where an example is a sequence with a rate of its own."""
    errors = values * sizes
    return bool((values >= 0).all() and (values <= 1).all() and (np.abs(errors - np.round(errors)) <= 1e-3 + 1e-6 * sizes).all())


def _check_error_rates(values: np.ndarray, sizes: np.ndarray) -> None:
    """Raise FieldError where values are not shares of `sizes` examples."""
    if not are_error_rates(values, sizes):
        raise FieldError("values", "error rates, errors over sizes, where nothing is said about examples", "other values",
                         "Give example_losses or example_variance for other losses.")
