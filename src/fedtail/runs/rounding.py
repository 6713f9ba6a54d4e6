"""How many decimals numbers deserve: as many as their uncertainty has, the same for all numbers of a column. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from fedtail.runs.answer_words import digits_for, rounded_text

MISSING = "\N{EN DASH}"


def decimals_by_uncertainty(uncertainties: Iterable[float | None], values: Iterable[float | None]) -> int:
    """How many decimals the numbers of a column are shown with: those of two significant digits of their uncertainty, 0 to 6.

    The uncertainty is the median of `uncertainties` (standard errors, or deviations over seeds); None, zero and numbers that are
    not finite are left out. Without any, numbers get three significant digits of the median of `values`.

    >>> decimals_by_uncertainty([0.013, 0.02, None], [0.2241, 0.2398, 0.31]), decimals_by_uncertainty([1.2], [12.3])
    (3, 1)
    """
    known, sizes = (sorted(abs(one) for one in found if one is not None and math.isfinite(one) and one != 0)
                    for found in (uncertainties, values))
    half_width = statistics.median_low(known) if known else 0.0
    return digits_for({"estimate": statistics.median_low(sizes) if sizes else 0.0, "low": -half_width, "high": half_width})


def shown_number(value: float | None, decimals: int, sign: str = "") -> str:
    """A number with so many decimals, with a minus of its own; a dash where it is None or not finite.

    With `sign` "+" it is a difference, written with its sign. A number that would be rounded to zero at six decimals, the most
    there are, and one of a million or more keep significant digits instead.

    >>> shown_number(-0.0132, 3, "+"), shown_number(0.21, 3), shown_number(None, 2)
    ('−0.013', '0.210', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.2g}" if decimals == 6 and 0 < abs(value) < 1e-6 else rounded_text(value, decimals)
    return "\N{MINUS SIGN}" + text[1:] if text.startswith("-") else sign + text
