"""What an attack found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Whether the claim held against the attack, and what was measured: a sentence with its figures."""

    held: bool
    measured: str
