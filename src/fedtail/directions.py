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


def is_share(statistic: str) -> bool:
    """Whether a statistic is about a share of the clients, as percentiles but the median and tails are.

    The extremes and means over all are none, since they mean the same of few clients as of many.

    >>> [name for name in ("mean", "std", "p50", "p90", "p100", "worst10", "worst100", "best5") if is_share(name)]
    ['p90', 'worst10', 'best5']
    """
    percent = statistic.lstrip("abcdefghijklmnopqrstuvwxyz")
    return bool(percent) and not (float(percent) in (0, 100) or statistic == "p50")


def few_clients_text(statistic: str, clients: int, better: str, who: str = "held-out clients") -> str:
    """Why a statistic says little of so few `clients`, whom `who` names, and what to write; "" for enough, or no share of them.

    >>> few_clients_text("p90", 4, "lower")[:86], few_clients_text("p90", 20, "lower"), few_clients_text("mean", 4, "lower")
    ('p90 of 4 held-out clients says little: fewer than 20 have no percentiles and no tails.', '', '')
    """
    if clients >= FEW_CLIENTS or not is_share(statistic):
        return ""
    who = who[:-1] if clients == 1 else who
    write = '"mean", or "p100" for the worst of them' if better == "lower" else '"mean"'
    return (f"{statistic} of {clients} {who} says little: fewer than {FEW_CLIENTS} have no percentiles and no tails. Look at "
            f"each by name, and choose by {write}.")


def is_better(value: float, other: float, better: str) -> bool:
    """Whether `value` is strictly better than `other`, where `better` ("lower" or "higher") ones are; False where one is NaN."""
    return value < other if better == "lower" else value > other


def better_statistic_values(statistic: str, better: str) -> Better:
    """Which values of a statistic over clients are better: lower ones for spreads (std, variance), else as `better` says.

    >>> better_statistic_values("std", "higher"), better_statistic_values("worst10", "higher")
    ('lower', 'higher')
    """
    return "lower" if statistic in SPREADS or better == "lower" else "higher"
