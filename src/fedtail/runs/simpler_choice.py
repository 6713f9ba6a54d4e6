"""Choosing among settings by held-out clients: the best, or a simpler one within one standard error of it. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.errors import FieldError
from fedtail.inference import new_client_interval
from fedtail.runs.values_by_client import ByClient

CONFIDENCE = 0.95
SIMPLER: dict[str, Callable[[float], float]] = {      # by the last part of a field: larger is closer to plain averaging
    "tail_fraction": lambda value: value, "tilt": lambda value: -abs(value), "power": lambda value: -value}


@dataclass(frozen=True)
class Candidate:
    """A setting that was tried, with the statistic it is chosen by, for each seed and in the mean; smaller is better.

    `values` are those of held-out clients by key, for each seed, larger is worse; None where they are not known.
    """

    name: str                                # in the reason: "tail_fraction = 0.5"
    settings: dict[str, Any]                 # values by dotted field
    by_seed: tuple[float, ...]
    values: tuple[ByClient, ...] | None = None

    @property
    def value(self) -> float:
        """The mean over seeds of the statistic."""
        return sum(self.by_seed) / len(self.by_seed)


@dataclass(frozen=True)
class Difference:
    """The statistic of a candidate minus that of the best, with its standard error and its interval for new clients.

    `error` is NaN where there is none, and the ends are infinite. `note` says what limits the interval, "" where nothing does.
    """

    estimate: float
    error: float
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class Chosen:
    """The positions of the best and of the chosen candidate, the reason in a sentence, and differences of all to the best."""

    best: int
    chosen: int
    reason: str
    differences: tuple[Difference, ...]


def choose_simpler(candidates: Sequence[Candidate], statistic: str, words: str, scale: float = 1.0, among: str = "") -> Chosen:
    """The best candidate, or the simplest whose statistic is within one standard error of it, with the reason.

    Simpler is closer to plain averaging: a larger tail fraction (theta), a smaller tilt or power; settings without such a field
    are as simple as each other. The standard error is that of the paired difference to the best over the same held-out clients
    and seeds, so that what all settings share does not blur it. `statistic` is "mean", "p90" or "worst10" of values of which
    larger are worse, or another name, for which only the seeds give a standard error. `words` names it in the reason, where
    numbers are multiplied by `scale`; `among` says there which candidates these are, where others were left out: " of the trials
    whose loss does not diverge". At least one candidate is needed.
    """
    best = min(range(len(candidates)), key=lambda k: candidates[k].value)
    differences = tuple(_difference(one, candidates[best], statistic) for one in candidates)
    simpler = [k for k, one in enumerate(candidates) if _is_simpler(one.settings, candidates[best].settings)]
    near = [k for k in simpler if differences[k].estimate <= differences[k].error]
    if not near:
        return Chosen(best, best, _reason_for_best(simpler, differences, candidates[best].name, words + among),
                      differences)
    picked = max(near, key=lambda k: (_simplicity(candidates[k].settings), -candidates[k].value))
    far = differences[picked]
    reason = (f"chosen: {candidates[picked].name}. Its {words} is {scale * far.estimate:.3g} worse than that of the best{among}, "
              f"{candidates[best].name}, which is within one standard error of the difference ({scale * far.error:.3g}, over "
              "held-out clients and seeds), and it is closer to plain averaging.")
    return Chosen(best, picked, reason, differences)


def _reason_for_best(simpler: Sequence[int], differences: Sequence[Difference], best: str, words: str) -> str:
    """Why the best candidate is chosen: none is simpler, none is close, or nothing says how close."""
    if not simpler:
        return f"chosen: {best}. It has the best {words}."
    if all(math.isnan(differences[k].error) for k in simpler):
        return f"chosen: {best}. It has the best {words}. How sure that is, one seed cannot tell for this statistic."
    return f"chosen: {best}. It has the best {words}, and nothing simpler is within one standard error of it."


def _difference(one: Candidate, best: Candidate, statistic: str) -> Difference:
    """The difference of two candidates in the statistic: by clients and seeds where their values are known, else by seeds."""
    if one is best:
        return Difference(0.0, 0.0, 0.0, 0.0)
    if one.values is not None and best.values is not None:
        try:
            found = new_client_interval(list(one.values), statistic, baseline=list(best.values), confidence=CONFIDENCE)
        except FieldError:                   # another statistic, or too few clients
            return _difference_by_seed(one, best)
        seeds = 0.0 if math.isnan(found.seed_error) else found.seed_error
        return Difference(found.estimate, math.hypot(found.client_error, seeds), found.low, found.high, found.note)
    return _difference_by_seed(one, best)


def _difference_by_seed(one: Candidate, best: Candidate) -> Difference:
    """The mean paired difference over seeds and its standard error; NaN for one seed. The interval is Student's."""
    from scipy.special import stdtrit

    less = np.subtract(one.by_seed, best.by_seed)
    error = float(less.std(ddof=1) / math.sqrt(len(less))) if len(less) > 1 else math.nan
    half = stdtrit(len(less) - 1, (1 + CONFIDENCE) / 2) * error if len(less) > 1 else math.inf
    return Difference(float(less.mean()), error, float(less.mean() - half), float(less.mean() + half))


def _simplicity(settings: dict[str, Any]) -> tuple[float, ...]:
    """How close settings are to plain averaging: a number for each field that says so, in the fields' order."""
    return tuple(SIMPLER[field](value) for name, value in sorted(settings.items())
                 if (field := name.rpartition(".")[2]) in SIMPLER and isinstance(value, (int, float)))


def _is_simpler(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether settings are as close to plain averaging as others in every field that says so, and closer in one."""
    mine, theirs = _simplicity(one), _simplicity(other)
    return len(mine) == len(theirs) and mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))
