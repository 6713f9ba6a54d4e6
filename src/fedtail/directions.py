"""Which end of a metric is the bad one, how few clients have no tail, which of two values is better. Needs no torch."""

from __future__ import annotations

from typing import Literal

Better = Literal["lower", "higher"]
SPREADS = ("std", "variance")               # better small, whichever way the metric points
FEW_CLIENTS = 20                            # fewer are shown by name: a tenth of them is less than two


def bad_percentile_name(better: str, share: float = 10) -> str:
    """The name of the percentile beyond which the worst `share` percent of the clients are.

    `better` is "lower" or "higher", whichever values of the metric are better.

    >>> bad_percentile_name("lower"), bad_percentile_name("higher"), bad_percentile_name("higher", 2.5)
    ('p90', 'p10', 'p2.5')
    """
    return f"p{(100 - share if better == 'lower' else share):g}"


def wrong_percentile_text(metric: str, statistic: str, better: str) -> str:
    """What is wrong with a percentile of the clients who do well to choose a model by, such as p10 of an error; "" for others.

    >>> wrong_percentile_text("auc", "p90", "higher")[:72], wrong_percentile_text("auc", "worst10", "higher")
    ('higher values of the auc are better, so p90 is about clients who do well', '')
    """
    percent = float(statistic[1:]) if statistic[0] == "p" else 50.0
    if not (percent < 50 and better == "lower") and not (percent > 50 and better == "higher"):
        return ""
    return (f"{better} values of the {metric} are better, so {statistic} is about clients who do well. For those who do worst "
            f"write p{100 - percent:g}, or worst10 for their mean; for the best write best10.")


def is_better(value: float, other: float, better: str) -> bool:
    """Whether `value` is strictly better than `other`, where `better` ("lower" or "higher") ones are; False where one is NaN."""
    return value < other if better == "lower" else value > other


def better_statistic_values(statistic: str, better: str) -> Better:
    """Which values of a statistic over clients are better: lower ones for spreads (std, variance), else as `better` says.

    >>> better_statistic_values("std", "higher"), better_statistic_values("worst10", "higher")
    ('lower', 'higher')
    """
    return "lower" if statistic in SPREADS or better == "lower" else "higher"
