"""Constants that no theorem is about, refused."""

from __future__ import annotations

import math

from fedtail.errors import FieldError
from fedtail.risk.base import check_tail_fraction


def check_cohort(tail_fraction: float, cohort_size: int) -> None:
    """Raise ValueError for a tail fraction outside (0, 1], and FieldError (a ValueError) for a cohort size below 1."""
    check_tail_fraction(tail_fraction)
    if cohort_size < 1:
        raise FieldError("cohort_size", "at least 1", cohort_size, symbol="m")


def check_local_steps(local_steps: int) -> None:
    """Raise FieldError (a ValueError) where `local_steps` is below 1."""
    if local_steps < 1:
        raise FieldError("local_steps", "at least 1", local_steps, symbol="tau")


def check_all_positive(**quantities: float) -> None:
    """Raise FieldError (a ValueError) that names the first keyword whose value is not positive and finite."""
    for name, value in quantities.items():
        if not 0 < value < math.inf:
            raise FieldError(name, "positive and finite", value)
