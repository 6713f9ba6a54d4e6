"""Who answered a question, and why others did not: reported beside the ledger, which it never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answers:
    """What became of one message of questions."""

    round: int
    question: int                       # which message of the round, from 0
    asked: int                          # clients
    answered: int                       # clients of the nodes whose answer counts; 0 where nothing was released
    problems: Mapping[int, str]         # by node: what it said, or why its answer was not taken
    exchanges: int = 1                  # with the nodes, keys and unmasking included

    def line(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return {"round": self.round, "question": self.question, "asked": self.asked, "answered": self.answered,
                "exchanges": self.exchanges, "problems": {str(node): why for node, why in self.problems.items()}}
