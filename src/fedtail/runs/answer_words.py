"""Numbers and sentences of answers: differences with their intervals, in the metric's own unit and direction. No torch."""

from __future__ import annotations

import math
from typing import Any

from fedtail.directions import FEW_CLIENTS
from fedtail.inference.statistics import statistic_named
from fedtail.inference.verdicts import CANNOT_TELL, Verdict

LARGE = 1e6                                  # from here on, numbers are written with exponents
ROUNDING = 1e-12                             # differences below this are those of rounding
Cell = dict[str, Any]                        # a difference with its interval
ALL_POSSIBLE = 0.95                          # of the largest difference there can be: an interval that wide excludes nothing


def verdict_words(decided: Verdict, percent: bool = False, seeds_differ: bool = False, largest: float = math.inf,
                  undefined: str = "") -> str:
    """The verdict in words: "take it", "do not", or "this data cannot tell (it would take about 240 test clients)".

    `percent` says that differences are shown in points of percent, and `seeds_differ` that training seeds add to the uncertainty;
    `largest` is the largest difference that two values can have, about which nothing is said. `undefined` is the name of a
    metric that some clients lack: only those who have it are counted.
    """
    if decided.answer != CANNOT_TELL:
        return f"{decided.answer} (no difference)" if decided.no_difference else decided.answer
    if decided.clients is not None:
        seen = "no difference was seen, and " if decided.no_difference else ""
        who = f"test clients for whom the {undefined} is defined" if undefined else "test clients"
        needed = f"at least {decided.clients} {who} for any interval" if decided.at_least else f"about {decided.clients} {who}"
        return f"this data cannot tell ({seen}it would take {needed})"
    most = (100 if percent else 1) * (decided.most or 0.0)
    limit = f"the tail differs by at most {most:.2g}{' points' if percent else ''}, and " if math.isfinite(most) and \
        (decided.most or 0.0) < ALL_POSSIBLE * largest else ""
    would = f": it would take about {decided.seeds} training seeds" if decided.seeds else \
        ": try more training seeds" if seeds_differ else ""
    return f"this data cannot tell ({limit}more clients would not tell{would})"


def confidence_words(confidence: float, compared: int) -> str:
    """What intervals are called in a sentence: "95% intervals", with what makes verdicts on several methods hold at once.

    >>> confidence_words(0.975, 2)
    '97.5% intervals, so that the verdicts on all 2 methods hold at once with 95%,'
    """
    joint = 1 - compared * (1 - confidence)
    several = f", so that the verdicts on all {compared} methods hold at once with {100 * joint:.3g}%," if compared > 1 else ""
    return f"{100 * confidence:.4g}% intervals{several}"


def change_words(tail: Cell, mean: Cell, metric: str, better: str, unit: str, clients: int) -> str:
    """What the tail gains and the mean pays, with their intervals, in words.

    `tail` and `mean` are differences in the metric, method minus baseline, of which `better` says which sign is a gain. Of few
    test `clients`, who are shown by name, a tail that has no interval is a part of one client, and nothing is said of it.
    """
    sign = -1.0 if better == "lower" else 1.0
    what = f" points of {metric}" if unit else f" of {metric}"
    if clients < FEW_CLIENTS and tail["low"] is None and tail["high"] is None:
        return f"{clients} test clients do not show the tail of new ones, and the mean {_gain('gains', 'pays', sign, mean)}{what}"
    return (f"{tail_words(tail['statistic'])} {_gain('gain', 'lose', sign, tail)}{what}, and the mean "
            f"{_gain('gains', 'pays', sign, mean)}")


def tail_words(statistic: str) -> str:
    """Who a tail statistic is about, as the subject of a sentence: "the worst 10% of new clients".

    >>> tail_words("p90")
    'new clients at the 90th percentile'
    """
    found = statistic_named(statistic)
    if found.kind == "worst":
        return f"the worst {100 * found.share:g}% of new clients"
    return f"new clients at the {found.words}"


def shown_statistic(name: str, better: str) -> str:
    """The name of a statistic of values of which larger are worse, as one of the metric itself.

    The 90th percentile of those is the 10th of a metric where higher is better.

    >>> shown_statistic("p90", "higher"), shown_statistic("worst10", "higher")
    ('p10', 'worst10')
    """
    return f"p{100 - float(name[1:]):g}" if better == "higher" and name.startswith("p") else name


def statistic_words(statistic: str, metric: str) -> str:
    """A statistic of a metric, in the metric's own direction, in words.

    >>> statistic_words("p90", "error"), statistic_words("p100", "error")
    ('p90 of the error', 'error of the worst client')
    """
    return f"{metric} of the worst client" if statistic == "p100" else f"{statistic} of the {metric}"


def range_words(cell: Cell) -> str:
    """The ends of an interval in words, "2.1 to 6.3", rounded by its width; "no interval" where an end is missing."""
    if cell["low"] is None or cell["high"] is None:
        return "no interval"
    digits = digits_for(cell)
    return f"{rounded_text(cell['low'], digits)} to {rounded_text(cell['high'], digits)}"


def rounded_text(value: float, digits: int) -> str:
    """A number with so many decimals and no negative zero; from a million on, four significant digits.

    >>> rounded_text(-0.001, 2), rounded_text(1719746889.0, 0)
    ('0.00', '1.72e+09')
    """
    return f"{value:.4g}" if abs(value) >= LARGE else f"{round(value, digits) + 0.0:.{digits}f}"


def digits_for(cell: Cell) -> int:
    """How many decimals an estimate deserves: the half-width of its interval has two significant digits; at most 6.

    >>> digits_for({"estimate": 1.0, "low": 0.4, "high": 1.6})
    2
    """
    width = (cell["high"] - cell["low"]) / 2 if cell["low"] is not None and cell["high"] is not None else 0.0
    width = width if width > ROUNDING else abs(cell["estimate"] or 0.0) / 10
    return min(6, max(0, 1 - math.floor(math.log10(width)))) if width > ROUNDING else 2


def _gain(up: str, down: str, sign: float, cell: Cell) -> str:
    """A difference as a gain or a loss, "gain 4.2 (2.1 to 6.3)": `sign` is 1 where larger is a gain.

    With `down`, a loss, the ends are losses too. Where nothing differs, both words are about zero.
    """
    word, way = (up, sign) if sign * cell["estimate"] >= -ROUNDING else (down, -sign)
    ends = [None if cell[end] is None else way * cell[end] for end in ("low", "high")]
    low, high = ends if way > 0 else ends[::-1]
    turned = {"estimate": abs(cell["estimate"]), "low": low, "high": high}
    return f"{word} {rounded_text(turned['estimate'], digits_for(turned))} ({range_words(turned)})"
