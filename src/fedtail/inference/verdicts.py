"""A verdict on a change of method: take it, do not, or what it would take to tell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedtail.errors import FieldError
from fedtail.inference.intervals import FEW_CLIENTS, FEW_IN_TAIL, Interval
from fedtail.inference.statistics import statistic_named

TAKE_IT, DO_NOT, CANNOT_TELL = "take it", "do not", "cannot tell"
MOST_CLIENTS = 1_000_000
MOST_SEEDS = 30             # that are named as what it would take


@dataclass(frozen=True)
class Verdict:
    """What intervals of the tail and of the mean say about a method against its baseline.

    `answer` is "take it", "do not" or "cannot tell"; `reason` says why, in words. `clients` is about how many test clients in
    each seed it would take to tell, for "cannot tell", or at least as many, where there is no interval before (`at_least`); None
    where no number of clients would, because training seeds differ more than the methods do or the estimate is too close to what
    it is compared with. Then `most` is the largest difference in the tail that is still possible, and `seeds` about how many
    training seeds it would take with these clients, None where no number up to 30 would. `no_difference` is whether the clients
    show none at all, neither in the tail nor in the mean.
    """

    answer: str
    reason: str
    clients: int | None = None
    at_least: bool = False
    most: float | None = None
    no_difference: bool = False
    seeds: int | None = None

    def __str__(self) -> str:
        """The answer and its reason in one sentence."""
        return f"{self.answer}: {self.reason}"


def verdict(tail: Interval, mean: Interval, price: float = 1.0) -> Verdict:
    """Whether to take a method, from intervals of its differences from the baseline in a tail statistic and in the mean.

    Both intervals are those of differences, method minus baseline, of a value that is better when smaller. The gain is minus
    the difference in the tail. The rule, with `price` the most that the mean may rise for each unit gained in the tail:

    - "take it" where all of the tail's interval is below 0 and the mean's upper end is at most `price` times the estimated gain;
    - "do not" where the tail's interval is above 0 or is the point 0, or the mean's lower end is above `price` times the largest
      gain in the tail's interval (at least 0);
    - "cannot tell" otherwise, with the number of clients that would tell if the estimates stayed as they are. The part of an
      interval's half-width that comes from clients shrinks with the square root of their number, the part of the seeds does not.

    Raises FieldError where an interval is not of a difference, `mean` is not of the mean, or `price` is negative.
    """
    _check(tail, mean, price)
    gain, allowed = -tail.estimate, price * max(-tail.estimate, 0.0)
    changes = f"tail ({tail.statistic}) {_signed(tail)}, mean {_signed(mean)}"
    if tail.high < 0 and mean.high <= allowed:
        return Verdict(TAKE_IT, f"{changes}; the tail gains, and the mean pays at most {price:g} for each unit of it")
    alike = _is_nothing(tail) and _is_nothing(mean)
    if tail.low > 0 or tail.low == tail.high == 0:
        why = "no difference between the methods" if alike else "the tail does not gain"
        return Verdict(DO_NOT, f"{changes}; {why}", no_difference=alike)
    if mean.low > price * max(-tail.low, 0.0):
        return Verdict(DO_NOT, f"{changes}; the mean pays more than {price:g} for each unit that the tail may gain")
    needed = _needed(tail, mean, gain, allowed)
    at_least = needed is not None and needed == max((_least_clients(one) for one in (tail, mean) if one.note), default=0)
    if needed is not None:
        before = "no difference was seen; " if alike else ""
        more = f"it would take at least {needed} test clients for any interval" if at_least else \
            f"it would take about {needed} test clients"
        return Verdict(CANNOT_TELL, f"{changes}; {before}{more}", needed, at_least, no_difference=alike)
    most = max(abs(tail.low), abs(tail.high))
    seeds = _most_of(_seeds_for(*one) for one in _questions(tail, mean, gain, allowed))
    would = f": it would take about {seeds} training seeds" if seeds else \
        ": try more training seeds" if tail.seed_error > 0 or mean.seed_error > 0 else ""
    return Verdict(CANNOT_TELL, f"{changes}; the tail differs by at most {most:.3g}, and no number of clients would tell{would}",
                   most=most, seeds=seeds)


def _questions(tail: Interval, mean: Interval, gain: float, allowed: float) -> list[tuple[Interval, float, float]]:
    """What has to be decided: an interval, how far its estimate is from what it is compared with, and its half-width that way.

    Whether the tail differs from 0 and, where it gains, whether the mean stays within what the gain allows.
    """
    found = [(tail, abs(gain), tail.high - tail.estimate if gain > 0 else tail.estimate - tail.low)]
    if gain > 0:
        half_width = mean.high - mean.estimate if mean.estimate <= allowed else mean.estimate - mean.low
        found.append((mean, abs(allowed - mean.estimate), half_width))
    return found


def _needed(tail: Interval, mean: Interval, gain: float, allowed: float) -> int | None:
    """About how many clients in each seed make both questions decided, if estimates stay as they are; None where none does."""
    return _most_of(_clients_for(*one) for one in _questions(tail, mean, gain, allowed))


def _most_of(numbers: Iterable[int | None]) -> int | None:
    """The largest of `numbers`; None where one is."""
    known = list(numbers)
    return None if any(one is None for one in known) else max(one for one in known if one is not None)


def _seeds_for(interval: Interval, distance: float, half_width: float) -> int | None:
    """About how many training seeds make `half_width` as small as `distance` with the clients there are, no fewer than now.

    The part of the clients is taken to stay as it is, with the normal quantile, and the rest of the squared half-width to shrink
    as that of Student's distribution over the root of the seeds. None where that takes more than 30, or there is one seed.
    """
    from scipy.special import ndtri, stdtrit

    if interval.seeds < 2 or not math.isfinite(half_width):
        return None
    if half_width <= distance:
        return interval.seeds
    level = (1 + interval.confidence) / 2
    clients = min(ndtri(level) * interval.client_error, half_width)
    left, rest = distance**2 - clients**2, half_width**2 - clients**2
    if left <= 0:
        return None
    now = stdtrit(interval.seeds - 1, level) ** 2 / interval.seeds
    return next((seeds for seeds in range(interval.seeds + 1, MOST_SEEDS + 1)
                 if rest * stdtrit(seeds - 1, level) ** 2 / seeds <= left * now), None)


def _is_nothing(interval: Interval) -> bool:
    """Whether no client differs: the estimate and both standard errors are 0, that of the seeds where there is one."""
    return interval.estimate == interval.client_error == 0 and not interval.seed_error > 0


def _clients_for(interval: Interval, distance: float, half_width: float) -> int | None:
    """How many clients make `half_width` as small as `distance`, no fewer than there are or than an interval needs.

    With the clients' share c of the squared half-width h^2 at n clients, n c h^2 / (d^2 - (1 - c) h^2). None where it is not
    positive or above a million. Where there is no interval yet, or one that allows for unseen clients, what an interval needs.
    """
    least = _least_clients(interval)
    if interval.note or not math.isfinite(half_width):
        return least
    seeds = 0.0 if math.isnan(interval.seed_error) else interval.seed_error**2
    total = interval.client_error**2 + seeds
    part = interval.client_error**2 / total if total > 0 else 1.0
    left = distance**2 - (1 - part) * half_width**2
    if left <= 0:
        return None
    needed = math.ceil(interval.clients_per_seed * part * half_width**2 / left)
    return max(least, _rounded_up(needed)) if needed <= MOST_CLIENTS else None


def _least_clients(interval: Interval) -> int:
    """How many clients an interval of this statistic needs, no fewer than there are."""
    return max(interval.clients_per_seed, math.ceil(FEW_IN_TAIL / statistic_named(interval.statistic).share - 1e-9), FEW_CLIENTS)


def _rounded_up(number: int) -> int:
    """The number, rounded up to two significant digits.

    >>> _rounded_up(1234), _rounded_up(87)
    (1300, 87)
    """
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit


def _signed(interval: Interval) -> str:
    """The estimate and its interval with signs, as "-0.031 [-0.052, -0.011]"."""
    return f"{interval.estimate:+.3g} [{interval.low:+.3g}, {interval.high:+.3g}]"


def _check(tail: Interval, mean: Interval, price: float) -> None:
    """Raise FieldError for intervals that are not of differences, a `mean` of another statistic, or a negative price."""
    for name, interval in (("tail", tail), ("mean", mean)):
        if not interval.is_difference:
            raise FieldError(name, "an interval of a difference", "one of a single method",
                             "Write new_client_interval(values, ..., baseline=values of the other method).")
    if mean.statistic != "mean":
        raise FieldError("mean", "an interval of the mean", mean.statistic, 'Write new_client_interval(values, "mean", ...).')
    if not 0 <= price < math.inf:
        raise FieldError("price", "0 or more", price, "Write 1 to let the mean pay as much as the tail gains.")
