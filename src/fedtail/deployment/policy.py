"""What a node's operator allows, whatever a server says: the file policy.toml beside the node's settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedtail.reading import TOML_BYTES, read_text, short_text, toml_tables

EXAMPLE = """\
# What this node does, whatever a server says. Its operator decides; nothing in here has a default.
smallest_cohort = {smallest_cohort}      # clients of all nodes in a round, at least
{why}
smallest_tail = {smallest_tail}        # of this node's own clients in a sum without noise, at least, unless none of them is in it
questions = {questions}           # in a round, at most
repeats = {repeats}              # rounds of a training that may be held once more, as after a crash of a server
{budget}
"""
PRIVATE = """
# The budget of this data set for any one client, over all runs and servers. The accepted experiment costs {cost:.4g} of it here,
# where nobody relies on the server for who is sampled.
epsilon = {epsilon:g}
delta = {delta:g}"""
BARE = """
# Sums of this experiment have no noise that clients add. So many rounds this data set answers, over all runs and servers:
rounds_without_noise = {rounds}"""


@dataclass(frozen=True)
class NodePolicy:
    """The limits that a node keeps; a message beyond one of them is refused.

    A round must have `smallest_cohort` clients or more over all nodes, and to a sum without noise `smallest_tail` or more of the
    node's own clients contribute, by their effective number (`effective_clients`), or none. `questions` is how many a round may
    ask, and `repeats` how many rounds of one training may be begun again. The data set has one budget for all runs and servers:
    either `epsilon` and `delta`, with which every sum must have noise, or `rounds_without_noise`, how many rounds are answered,
    with noise or without. Nothing of it has a default: what is not said is not allowed.
    """

    smallest_cohort: int
    smallest_tail: int
    questions: int
    repeats: int
    epsilon: float | None = None
    delta: float | None = None
    rounds_without_noise: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range, and unless there is one budget: epsilon and delta, or rounds."""
        for name, least in (("smallest_cohort", 2), ("smallest_tail", 1), ("questions", 1), ("repeats", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}.")
        if (self.epsilon is None) != (self.delta is None) or (self.epsilon is None) == (self.rounds_without_noise is None):
            raise ValueError("a policy has one budget for the data set: epsilon and delta, with which every sum must have noise, "
                             "or rounds_without_noise. Write one of the two.")
        if self.epsilon is not None and not 0 < self.epsilon < float("inf"):
            raise ValueError(f"epsilon must be positive and finite, got {self.epsilon:g}. Sums without noise are allowed by "
                             "rounds_without_noise.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta:g}. It should be below one over the number of clients.")
        if self.rounds_without_noise is not None and self.rounds_without_noise < 0:
            raise ValueError(f"rounds_without_noise must be 0 or more, got {self.rounds_without_noise}.")

    @classmethod
    def read(cls, path: Path) -> NodePolicy:
        """The policy in the TOML file at `path`.

        Raises ValueError where there is no file, and where a setting is missing, unknown, of the wrong type or out of range.
        """
        if not path.is_file():
            raise ValueError(f"there is no policy {path}: a node without one answers nothing. `fedtail node init` writes one, "
                             "for its operator to change.")
        given = toml_tables(read_text(path, TOML_BYTES, "the policy of a node"), path.name)
        known = {one.name: one.type for one in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{path.name} has no setting {name!r}. There are {', '.join(known)}.")
            _check_kind(path.name, name, value, float if name in ("epsilon", "delta") else int)
        for name in ("smallest_cohort", "smallest_tail", "questions", "repeats"):
            if name not in given:
                raise ValueError(f"{path.name} does not say {name}, and what is not said is not allowed. Write {name} = ...")
        return cls(**given)

    @property
    def digest(self) -> str:
        """SHA-256 of the numbers in it, as 64 hexadecimal digits: how the file is written does not change it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def budget_text(self) -> str:
        """The budget of the data set in words."""
        if self.epsilon is not None:
            return f"epsilon {self.epsilon:g} at delta {self.delta:g}; every sum has noise"
        return f"{self.rounds_without_noise} rounds whose sums may have no noise"


def _check_kind(file: str, name: str, value: Any, kind: type) -> None:
    """Raise ValueError unless `value`, the setting `name` of `file`, is a number of the type `kind`, int or float."""
    fits = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not fits:
        raise ValueError(f"{file}: {name} must be a {'number' if kind is float else 'whole number'}, got "
                         f"{short_text(repr(value))}.")
