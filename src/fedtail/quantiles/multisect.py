"""Find where a decreasing sum over clients crosses a target, by asking at many trial points at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fedtail.conversations import Conversation
from fedtail.questions import Statistic, StatisticPart

POINTS = 34              # a question shrinks the bracket 33 times
MOST_QUESTIONS = 32      # enough from the whole range of float32 to any resolution; five or six are usual


class Bracket(NamedTuple):
    """The sum is at least the target at `low` and below it at `high`."""

    low: float
    high: float
    at_low: float
    at_high: float

    def linear_crossing(self, target: float) -> float:
        """The point in [low, high] where the sum equals `target` by linear interpolation; the nearer end if `target` is outside.

        It is `low` where the sum does not fall within the bracket.
        """
        drop = self.at_low - self.at_high
        step = (self.at_low - target) / drop if drop > 0 else 0.0
        return self.low + min(max(step, 0.0), 1.0) * (self.high - self.low)


def multisect(part: StatisticPart, low: float, high: float, target: float, resolution: float) -> Conversation[Bracket]:
    """A generator that runs on the server and finds where in [low, high] the sum of `part` over clients falls below `target`.

    Each question asks for the sum at 34 trial points; column j of the part's statistic is its value at trial j. The next
    question is about the interval between the two neighbouring points around the crossing. The sum must not increase with the
    trial. Stops when the interval is at most `resolution` wide, or as narrow as float64 allows, or after 32 questions. Returns
    the last interval as a `Bracket`, with the sums at its ends. It is the one point `high` where the sum there is at least
    `target`, and begins at `low` where the sum there is below `target` already.
    """
    for _ in range(MOST_QUESTIONS):
        trial = torch.linspace(low, high, POINTS, dtype=torch.float64)
        sums = yield Statistic(part, trial)
        place = max(int((sums >= target).sum()) - 1, 0)
        after = min(place + 1, POINTS - 1)
        low, high = float(trial[place]), float(trial[after])
        if high - low <= max(resolution, 4 * math.ulp(max(abs(low), abs(high)))):
            break
    return Bracket(low, high, float(sums[place]), float(sums[after]))
