"""From numbers to verdicts, by rules that are the same for every study.

Differences are paired by seed: methods with the same seed see the same clients, cohorts and batches. A direction is taken to be
there when the 95% interval of the mean difference (Student's t over the seeds) is on one side of zero. Where it is not, these
seeds cannot tell, and the verdict is "not testable here", with the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedtail_studies.study import Finding, Verdict
from fedtail_studies.tables import Printed

LEVEL = 0.95
ORDER = (Verdict.DISAGREES, Verdict.NOT_TESTABLE, Verdict.DIRECTION, Verdict.WITHIN_ERROR, Verdict.AGREES)  # weakest first


@dataclass(frozen=True)
class Difference:
    """A mean over seeds of paired differences, and how far the 95% interval reaches to each side (NaN for one seed)."""

    mean: float
    reach: float
    seeds: int

    @property
    def sign(self) -> int:
        """-1 or 1 where the interval is on one side of zero, else 0."""
        return int(math.copysign(1, self.mean)) if abs(self.mean) > self.reach else 0      # no comparison holds for NaN

    def __str__(self) -> str:
        if self.seeds == 1 or math.isnan(self.reach):
            return f"{self.mean:+.3g} ({self.seeds} seed{'s' if self.seeds > 1 else ''}: no interval)"
        return f"{self.mean:+.3g} (95%: {self.mean - self.reach:+.3g} to {self.mean + self.reach:+.3g}, {self.seeds} seeds)"


def difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The mean of values less baseline, seed by seed.

    >>> print(difference([1.0, 2.0, 3.0], [2.0, 3.1, 3.9]))
    -1 (95%: -1.25 to -0.752, 3 seeds)
    """
    return interval([a - b for a, b in zip(values, baseline, strict=True)])


def interval(values: Sequence[float]) -> Difference:
    """The mean of some numbers, one for each seed, with its 95% interval."""
    from scipy.stats import t

    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Difference(statistics.fmean(values), math.nan, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Difference(statistics.fmean(values), float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error, len(values))


def lower(found: Difference, papers_data: bool, printed: Printed | None = None, what: str = "difference") -> Finding:
    """Whether a difference is below zero; on the paper's data also whether it is as large as printed, to two deviations."""
    if found.sign > 0:
        return Finding(Verdict.DISAGREES, f"{what} {found}")
    if found.sign == 0:
        return Finding(Verdict.NOT_TESTABLE, f"{what} {found}: these seeds do not tell")
    said = "" if printed is None else f"; printed {printed.mean:+.3g}"
    if not papers_data:
        return Finding(Verdict.DIRECTION, f"{what} {found}{said}, on other data")
    near = printed is None or abs(found.mean - printed.mean) <= 2 * (printed.std or 0.0) + found.reach
    return Finding(Verdict.AGREES if near else Verdict.DIRECTION, f"{what} {found}{said}")


def at_most(value: float, bound: float, what: str) -> Finding:
    """Whether a number keeps to a bound that is stated: right or wrong, with no spread to speak of."""
    return Finding(Verdict.AGREES if value <= bound else Verdict.DISAGREES, f"{what}: {value:.3g}, to be at most {bound:.3g}")


def within(found: Difference, reach: float, papers_data: bool, what: str = "difference") -> Finding:
    """Whether two methods are as near as `reach`: agrees where the whole interval is, disagrees where none of it is."""
    farthest, nearest = abs(found.mean) + found.reach, abs(found.mean) - found.reach
    if farthest <= reach:
        return Finding(Verdict.AGREES if papers_data else Verdict.DIRECTION, f"{what} {found}, within {reach:.3g}")
    if nearest > reach:
        return Finding(Verdict.DISAGREES, f"{what} {found}, farther than {reach:.3g}")
    return Finding(Verdict.NOT_TESTABLE, f"{what} {found}: these seeds do not tell whether it is within {reach:.3g}")


def not_above(found: Difference, margin: float, papers_data: bool, what: str = "difference") -> Finding:
    """Whether a method is at least as good as another, give or take `margin`: the whole interval is below it, or none of it."""
    if found.mean + found.reach <= margin:
        return Finding(Verdict.AGREES if papers_data else Verdict.DIRECTION, f"{what} {found}, not above {margin:.3g}")
    if found.mean - found.reach > margin:
        return Finding(Verdict.DISAGREES, f"{what} {found}, above {margin:.3g}")
    return Finding(Verdict.NOT_TESTABLE, f"{what} {found}: these seeds do not tell whether it is above {margin:.3g}")


def all_of(*findings: Finding) -> Finding:
    """One verdict for several: the weakest, with all reasons."""
    return Finding(min((f.verdict for f in findings), key=ORDER.index), "; ".join(f.reason for f in findings))
