"""Poisson sampling of examples: every example is in every batch independently, which is what amplification is proved for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedtail.draws import hash_bits, uniform_numbers
from fedtail.privacy.events import FixedSampling, PoissonSampling, Sampling

HARDLY = math.log(1e-12)        # probability below which a batch of Poisson sampling is taken for a mistake


@dataclass(frozen=True)
class PoissonBatches:
    """Batches of `examples` examples, `steps` of them, in which each example is with probability batch_size / examples.

    Sizes vary, and a batch may be empty: it is a step all the same. With `randomness` "seed" batches follow from the seed and the
    number of the step; with "os" they come from the operating system, and are stored nowhere. One pass over them is the whole
    run, of many epochs: another pass would give the same batches again, which are no new draws, and nothing would be amplified
    as it is charged.
    """

    examples: int
    batch_size: float
    steps: int
    seed: int = 0
    randomness: Literal["seed", "os"] = "seed"

    def __post_init__(self) -> None:
        """Raise a ValueError for a batch size that is not in (0, examples], or another source of randomness."""
        if not 0 < self.batch_size <= self.examples:
            raise ValueError(f"the expected batch_size must be positive and at most the {self.examples} examples, got "
                             f"{self.batch_size:g}.")
        if self.randomness not in ("seed", "os"):
            raise ValueError(f"randomness must be seed or os, got {self.randomness!r}.")

    @property
    def sampling(self) -> PoissonSampling:
        """The sampling by which accountants amplify: Poisson, at rate batch_size / examples."""
        return PoissonSampling(self.batch_size / self.examples)

    @property
    def steps_per_epoch(self) -> int:
        """How many steps read as many examples as there are, in expectation; rounded up."""
        return math.ceil(self.examples / self.batch_size)

    def batch(self, step: int) -> Tensor:
        """The row numbers of the examples in batch number `step`, int64, in increasing order."""
        seed = self.seed if self.randomness == "seed" else None
        bits = hash_bits(seed, "example batch", step, torch.arange(self.examples))
        return (uniform_numbers(bits) < self.batch_size / self.examples).nonzero()[:, 0]

    def __len__(self) -> int:
        """The number of steps."""
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the row numbers of one batch after another."""
        return (self.batch(step) for step in range(self.steps))


def refuse_larger_batch(count: int, batch_size: float, sampling: Sampling) -> None:
    """Raise a ValueError for a batch of `count` examples where `sampling`, with `batch_size` expected, gives none as large.

    Amplification would be claimed for draws that did not happen. Under Poisson sampling that is a batch so large that its
    probability is below 1e-12, by the bound exp(c - b) (b / c)^c on that of c examples or more where b are expected; under
    sampling of fixed size one of more than its `cohort`. Without sampling any batch will do.
    """
    if isinstance(sampling, FixedSampling) and count > sampling.cohort:
        raise ValueError(f"a batch of {count} examples is none of {sampling.cohort} drawn of {sampling.population}, which is "
                         f"what {sampling} is amplified for. Write NoSampling(), or draw batches as stated.")
    if isinstance(sampling, PoissonSampling) and sampling.rate < 1 and count > batch_size and (
            count - batch_size - count * math.log(count / batch_size) < HARDLY):
        raise ValueError(f"a batch of {count} examples is not drawn by Poisson sampling that gives {batch_size:g} on average: "
                         f"its probability is below 1e-12, and amplification at rate {sampling.rate:g} would be claimed "
                         "wrongly. Give the expected batch_size and the rate at which batches are drawn (PoissonBatches has "
                         "both), or write sampling=NoSampling().")
