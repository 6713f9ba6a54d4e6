"""Canaries: clients each of which moves an entry of a sum, and a bin of a histogram, that nobody else moves.

One round over n canaries is an experiment about each of them: every other one is left out as zero-out adjacency leaves it out
(its data are not numbers, so that its row is zero and its share of the noise is still there), and its entry of the released sum is
compared with those of the canaries that are present. The noise of different entries is independent, and so is who is sampled by
Poisson sampling; so entries are independent observations, as if each had been a run of its own. Nobody else moves the entry, so
that what the observer sees of it is the worst case: (1 - q) D + q (D + x) against D, with noise D and a row x at its clip norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import fedtail
from fedtail import AdaptiveClip, IntegerChannel, Ledger, PlainChannel, PrivacyBudget, SecureChannel
from fedtail.algorithm import Method, member_states, run_round
from fedtail.conversations import single_questions
from fedtail.data.population import Population
from fedtail.engine import LocalFleet
from fedtail.models import LeastSquares
from fedtail.privacy.accounting import Rounds
from fedtail.questions import Statistic

WIDE = torch.float64
CLIP = 1e-3                    # so short that the model, and with it the losses, hardly moves in a few rounds


@dataclass(frozen=True)
class Canaries:
    """`count` canaries, and `fillers`: clients of a small loss who all move one other entry."""

    count: int
    fillers: int = 0

    @cached_property
    def population(self) -> Population:
        """The fillers with a loss in [0, 1), then the canaries: the k-th has one in [k + 1, k + 2), and NaN where k is even."""
        x, loss = torch.zeros(len(self), self.count + 1, dtype=WIDE), torch.full((len(self),), 0.5, dtype=WIDE)
        x[:self.fillers, -1] = 1.0
        x[self.fillers:, :-1] = torch.eye(self.count, dtype=WIDE)
        loss[self.fillers:] = torch.arange(self.count, dtype=WIDE) + 1.5
        y = loss.sqrt()
        everybody = Population.from_clients([(x[k:k + 1], y[k:k + 1]) for k in range(len(self))])
        y[self.fillers::2] = math.nan
        return replace(everybody, targets=y)

    @property
    def task(self) -> fedtail.Task:
        """Least squares: a client's gradient is along its own feature."""
        return fedtail.Task(LeastSquares(self.count + 1, bias=False))

    def fleet(self) -> LocalFleet:
        """The simulator's own."""
        return LocalFleet(self.population, self.task, dtype=WIDE, workers=1)

    def __len__(self) -> int:
        return self.fillers + self.count


class Overheard:
    """A channel that keeps what comes out of it, as an observer of all releases does: pairs of a question and its sum."""

    heard: list[tuple[object, Tensor]]

    @contextmanager
    def open(self, *round) -> Iterator:
        with super().open(*round) as ask:
            yield lambda question: self.keep(question, ask(question))

    def keep(self, question, sums):
        self.heard.extend(zip(single_questions(question), flat(sums), strict=True))
        return sums


def flat(sums) -> Iterator[Tensor]:
    """The sums of joint questions, in order."""
    if isinstance(sums, Tensor):
        yield sums
    else:
        for one in sums:
            yield from flat(one)


@dataclass(frozen=True)
class OverheardPlain(Overheard, PlainChannel):
    heard: list = field(default_factory=list)


@dataclass(frozen=True)
class OverheardIntegers(Overheard, IntegerChannel):
    heard: list = field(default_factory=list)


@dataclass(frozen=True)
class OverheardMasked(Overheard, SecureChannel):
    heard: list = field(default_factory=list)


def channel_for(noise: str) -> Overheard:
    """The plain channel for noise that the server adds, the one of integers for shares from the clients."""
    return OverheardPlain() if noise == "gaussian" else OverheardIntegers()


@dataclass(frozen=True)
class Observations:
    """Scores of canaries that are left out and that are present, a larger one for presence, and what the ledger holds of a run."""

    without: np.ndarray
    present: np.ndarray
    charged: Rounds


def observe(method: Method, canaries: Canaries, channel: Overheard, wanted: int, seed: int | None, *, rounds: int = 1,
            rate: float = 1.0, fleet=None, known=None) -> Observations:
    """Hold runs of so many rounds until `wanted` canaries of either kind are observed, and score each by its likelihood ratio.

    Without a seed noise and cohorts come from the operating system. `known(question)` is a part of a sum that the observer can
    take off it.
    """
    fleet, ledger = fleet or canaries.fleet(), Ledger(PrivacyBudget(randomness="os" if seed is None else "seed"))
    runs, scores = -(-2 * wanted // canaries.count), []
    start = method.initial_state(canaries.task.params().to(WIDE), 0)
    for run in range(runs):
        state, score = at_round(start, run * rounds), np.zeros(canaries.count)
        for _ in range(rounds):
            channel.heard.clear()
            state = run_round(method, state, fleet, channel, seed or 0, ledger)
            evidence = sum(log_ratio(question, sums - (known(question) if known else 0), canaries) for question, sums in channel.heard)
            score += np.log1p(rate * np.expm1(evidence))       # of a client that is sampled with this probability
        scores.append(score)
    observed = np.stack(scores)
    charged = tuple((event, count // runs) for event, count in ledger.rounds)
    if sum(count for _, count in charged) != rounds:
        raise RuntimeError(f"runs of {rounds} rounds are audited, but the ledger holds {sum(n for _, n in ledger.rounds)} of {runs} runs.")
    return Observations(observed[:, ::2].ravel(), observed[:, 1::2].ravel(), charged)


def at_round(state, number: int):
    """The state of a method or a family, as if at the beginning of this round."""
    states = tuple(replace(one, round=number) for one in member_states(state))
    return states if isinstance(state, tuple) else states[0]


def log_ratio(question, sums: Tensor, canaries: Canaries) -> np.ndarray:
    """Of one sum, for each canary: the logarithm of the likelihood ratio of its presence, given that it was sampled."""
    if isinstance(question, Statistic):
        entries, moved = sums[1:], question.mechanism.clip_norm                    # the fillers are in the first bin
    else:
        entries, moved = sums, 1.0 if isinstance(question.aggregate, AdaptiveClip) else question.mechanism.clip_norm
    deviation = question.mechanism.clip_norm * question.mechanism.noise.noise_multiplier
    mu = moved / deviation
    return mu * entries[:canaries.count].numpy() / deviation - mu**2 / 2
