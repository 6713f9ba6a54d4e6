"""What one attack of the doctor found."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSED, NOT_TESTED, TRUST = "open", "closed", "not tested", "trust"


@dataclass(frozen=True)
class Finding:
    """The result of one attack, `check`, with what was tried and found in words.

    `result` is "closed" where the attack failed, "open" where it succeeded, "not tested", or "trust" for what no attack of this
    kind can show and no defence is claimed against.
    """

    check: str
    result: str
    text: str


def found(check: str, problems: list[str], fine: str) -> Finding:
    """The finding of an attack with these `problems`: open with all of them in words, or closed with the text `fine`."""
    return Finding(check, OPEN if problems else CLOSED, " ".join(problems) or fine)
