"""Bags of words with a binary label, generated with Zipf's frequencies.

The documents stand in for IMDB, whose features are not at hand. As in the toy of [Li23, section 6.2], the most frequent
words say nothing of the label and the others do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedtail.models import LogisticRegression
from fedtail_studies.adaptive_private.training import Problem, Samples, error_percent
from fedtail_studies.study import Cell
from fedtail_studies.tilted.classes_data import generator

TRAIN, VALIDATION, TEST, OPEN = 20_000, 2_000, 5_000, 3_000      # documents; open ones are where frequencies are known from
WORDS, STOP_WORDS = 1_000, 40                                    # the vocabulary, and how many of it say nothing of the label
TOKENS, SPREAD = 150.0, 0.45                                     # words in a document; deviation of the others' weights
PUBLIC_BATCH = 64
AVERAGED = 3                                                     # models whose errors are averaged
AVERAGED_NOTE = ("An error is the mean of those after 80%, 90% and all of the steps: with frequent words in it, a model sways "
                 "from one label to the other, and its last error is a matter of chance.")


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents to train on and so on, some that are open, and some of another kind that may be public; x are counts of words."""

    train: Samples
    validation: Samples
    test: Samples
    open: Samples
    foreign: Samples


def zipf(words: int, tokens: float) -> Tensor:
    """How often each word is expected in a document: proportional to 1 / rank, `tokens` in all; (words,)."""
    shape = 1 / (torch.arange(words) + 1.0)
    return tokens * shape / shape.sum()


def written(expected: Tensor, weights: Tensor, count: int, random: torch.Generator) -> Samples:
    """Documents of unequal length with independent Poisson counts, up to 255, and labels by a logistic model; x (count, words).

    Log-odds are centred for the document's length, so that both labels are as frequent.
    """
    length = (0.5 * torch.randn(count, 1, generator=random) - 0.125).exp()
    x = torch.poisson(length * expected, generator=random).clamp(max=255)
    odds = x @ weights - length[:, 0] * float(expected @ weights)
    return Samples(x.to(torch.uint8), (torch.rand(count, generator=random) < odds.sigmoid()).long())


@lru_cache(maxsize=1)
def generated(seed: int, scale: float) -> Documents:
    """Generated documents, `scale` times as many as in full; those of another kind have other frequencies and weights."""
    random, expected = generator(seed, 6), zipf(WORDS, TOKENS)
    weights = SPREAD * torch.randn(WORDS, generator=random)
    weights[:STOP_WORDS] = 0.0
    train, validation, test, known = (written(expected, weights, max(50, int(scale * count)), random)
                                      for count in (TRAIN, VALIDATION, TEST, OPEN))
    other = expected * torch.randn(WORDS, generator=random).exp()
    turned = 0.7 * weights + (1 - 0.7**2) ** 0.5 * SPREAD * torch.randn(WORDS, generator=random) * (weights != 0)
    return Documents(train, validation, test, known, written(other, turned, max(50, int(scale * 1000)), random))


# problems


def documents(cell: Cell) -> Documents:
    """The documents of the cell's seed."""
    return generated(cell.seed, cell.plan.scale)


def inverse_frequencies(found: Documents) -> Tensor:
    """log(n / df) over the open documents, n of them, of which df have the word, at least one; (words,)."""
    return -(found.open.x > 0).double().mean(0).clamp(min=1 / len(found.open.y)).log().float()


def problem_on(found: Documents, public: Samples, seed: int) -> Problem:
    """Logistic regression on the documents, with these public ones, of which every step reads a batch."""
    reads = public.public(min(PUBLIC_BATCH, len(public.y)), seed)
    return Problem(found.train, found.validation, found.test, lambda: LogisticRegression(found.train.x.shape[1]), error_percent,
                   public=reads, averaged=AVERAGED, frequencies=found.open.x.float().mean(0), rarities=inverse_frequencies(found))


def by_counts(cell: Cell, share: float = 0.01) -> Problem:
    """Counts of words; so large a share of the training documents is public."""
    found = documents(cell)
    return problem_on(found, found.train.rows(slice(max(2, round(share * len(found.train.y))))), cell.seed)


def by_foreign(cell: Cell) -> Problem:
    """Counts of words; public are documents of another kind, 1% as many as there are to train on."""
    found = documents(cell)
    return problem_on(found, found.foreign.rows(slice(max(2, len(found.train.y) // 100))), cell.seed)


def by_tfidf(cell: Cell) -> Problem:
    """Counts times inverse document frequencies, each document of norm one."""
    made = weighted_documents(cell)
    problem = problem_on(made, made.train.rows(slice(max(2, len(made.train.y) // 100))), cell.seed)
    return replace(problem, rarities=inverse_frequencies(documents(cell)))


def weighted_documents(cell: Cell) -> Documents:
    """The documents of the cell's seed as TF-IDF."""
    found = documents(cell)
    scale = inverse_frequencies(found)

    def weighted(samples: Samples) -> Samples:
        x = samples.x.float() * scale
        return Samples(x / x.norm(dim=1, keepdim=True).clamp(min=1e-6), samples.y)

    return Documents(weighted(found.train), weighted(found.validation), weighted(found.test), weighted(found.open), found.foreign)
