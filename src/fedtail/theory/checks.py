"""Constants that no theorem is about, refused."""

from __future__ import annotations

import math

from fedtail.risk.base import check_tail_fraction


def check_cohort(tail_fraction: float, cohort_size: int) -> None:
    check_tail_fraction(tail_fraction)
    if cohort_size < 1:
        raise ValueError(f"cohort_size (m) must be at least 1, got {cohort_size}.")


def check_local_steps(local_steps: int) -> None:
    if local_steps < 1:
        raise ValueError(f"local_steps (tau) must be at least 1, got {local_steps}.")


def check_all_positive(**quantities: float) -> None:
    for name, value in quantities.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")
