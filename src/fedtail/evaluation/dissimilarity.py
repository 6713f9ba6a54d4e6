"""How much the gradients of clients differ under one model, from sums over clients: B(w) and the variance of [Li23, 3.3.1]."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedtail.algorithm import Method
from fedtail.base_part import Part
from fedtail.channel import Channel, PlainChannel
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.data.population import Population
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.engine.engine import Engine
from fedtail.errors import FieldError
from fedtail.evaluation.evaluate import task_with_model
from fedtail.evaluation.federated import EvaluatedRound, unequal_cohort_refusal
from fedtail.fleet import Fleet
from fedtail.local.full_gradient import FullGradient
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy
from fedtail.questions import Train
from fedtail.recipes import fedavg
from fedtail.risk.mean import Mean
from fedtail.sampling import Everyone, Sampler
from fedtail.task import Task
from fedtail.training import Trained, train

NUMBERS = 4      # entries of a row before its vectors


@dataclass(frozen=True)
class Dissimilarity:
    """How much clients' gradients differ at one model w, where F_k is client k's mean loss and f the mean of these by mass.

    `mean_square` is E_k |grad F_k|^2, by mass (p_k = n_k / n by default); `gradient_norm` is |grad f|; `client_variance` is the
    plain mean over `clients` of |grad F_k - grad f|^2, as the thesis's figures plot it. The ratio `dissimilarity` and the
    `variance` are two measures, of which neither gives the other: with variance sigma^2, B <= sqrt(1 + sigma^2 / eps) wherever
    |grad f|^2 > eps, no more.
    """

    mean_square: float
    gradient_norm: float
    client_variance: float
    clients: int

    @property
    def dissimilarity(self) -> float:
        """B(w) = sqrt(E_k |grad F_k|^2) / |grad f|, at least 1, [Li23, Definition 7].

        1 where all gradients are zero, as the thesis defines it; infinite where only their mean is.
        """
        if self.gradient_norm == 0:
            return 1.0 if self.mean_square == 0 else math.inf
        return max(1.0, math.sqrt(self.mean_square) / self.gradient_norm)

    @property
    def variance(self) -> float:
        """E_k |grad F_k - grad f|^2 with expectations by mass, which is E_k |grad F_k|^2 - |grad f|^2."""
        return max(0.0, self.mean_square - self.gradient_norm**2)


@dataclass(frozen=True)
class GradientMoments(Part):
    """The sums from which a `Dissimilarity` is computed; on the clients it takes the place of an aggregator.

    A row is (mass, mass |g|^2, 1, |g|^2, mass g, g), with g the client's full gradient, whose norm is at most `gradient_bound`
    where sums are of integers.
    """

    gradient_bound: float = 1024.0

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that questions read: a row has four numbers and two vectors of the size of the model."""
        return AggregatorDeclaration(columns=NUMBERS, vectors=2)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """Runs on the clients: one row each, (clients, 4 + 2 dim) float64, on the device of `updates`.

        `updates` (clients, dim) are minus the gradients; masses are those of `weighted`. `train` and `clients` are not used.
        """
        mass, gradients = to_device(weighted.weight, updates.device)[:, None], -updates.double()
        square, one = gradients.square().sum(1, keepdim=True), torch.ones_like(mass)
        return torch.cat([mass, mass * square, one, square, mass * gradients, gradients], 1)

    def fit(self, train: Train) -> Conversation[Tensor]:
        """Runs on the server: a generator that asks `train` once and returns the sum of the rows, (4 + 2 dim,)."""
        return (yield train)

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,) float64, for a client whose mass is at most `weight`."""
        dim, most = (width - NUMBERS) // 2, self.gradient_bound
        numbers = torch.tensor([weight, weight * most**2, 1.0, most**2], dtype=torch.float64)
        ones = torch.ones(dim, dtype=torch.float64)
        return torch.cat([numbers, weight * most * ones, most * ones])


@dataclass(frozen=True)
class GradientDissimilarity:
    """Clients' gradients are compared by sums over a cohort, for `train(evaluation=...)`: a `Dissimilarity` for each model.

    A cohort that trains first gives its gradients at the model it has received, every so many rounds (`every`). Expectations are
    over the cohort: sample everybody for those over the population. The sums are released without noise. `gradient_bound` is the
    largest norm of a client's gradient that channels of integers must carry.
    """

    every: int = 5
    gradient_bound: float = 1024.0

    def __post_init__(self) -> None:
        """Raise FieldError where `every` is below 1, or `gradient_bound` is not positive and finite."""
        if self.every < 1:
            raise FieldError("every", "at least 1 round", self.every)
        if not 0 < self.gradient_bound < math.inf:
            raise FieldError("gradient_bound", "positive and finite", self.gradient_bound)

    @property
    def mechanism(self) -> Mechanism:
        """`NoPrivacy()`: the sums are released as they are, and are on the ledger as non-private."""
        return NoPrivacy()

    def questions(self, first: int, models: int) -> tuple[Train, ...]:
        """One question for each of `models` consecutive broadcast models, the first of which has index `first`."""
        part = GradientMoments(self.gradient_bound)
        empty = torch.zeros(0, dtype=torch.float64)
        return tuple(Train(FullGradient(), Mean(), empty, part, model=first + k, marks_contributors=False) for k in range(models))

    def evaluation_from_sums(self, sums: Tensor) -> Dissimilarity:
        """Runs on the server: the `Dissimilarity` from `sums`, (4 + 2 dim,), the sum of the clients' rows."""
        (mass, squares, count, plain_squares), vectors = sums[:NUMBERS].tolist(), sums[NUMBERS:].double()
        by_mass, plain = vectors.unflatten(0, (2, -1)) / torch.tensor([[mass], [count]], dtype=torch.float64)
        square = float(by_mass.square().sum())
        spread = plain_squares / count - 2 * float(plain @ by_mass) + square
        return Dissimilarity(squares / mass, math.sqrt(square), max(0.0, spread), round(count))

    def round_with_evaluation(self, method: Method, only: bool = False) -> EvaluatedRound:
        """A method for `run_round` whose cohort gives its gradients at the models of `method` and then, unless `only`, trains."""
        return EvaluatedRound(method, self, only)

    def sampler_refusal(self, sample: Sampler) -> str | None:
        """An error text where cohorts of `sample` do not represent all clients equally, which is so for `ByMass`; else None."""
        return unequal_cohort_refusal(sample)


def gradient_dissimilarity(model: Trained | nn.Module, population: Population | None = None, task: Task | None = None, *,
                           gradient_bound: float = 1024.0, engine: Engine = Engine(), channel: Channel = PlainChannel(),
                           fleet: Fleet | None = None, privacy: Ledger | None = None) -> Dissimilarity:
    """How much the gradients of all clients of a population differ under a model: B(w) and gradient variances.

    `task` gives the loss, by default that of training. With a `fleet` its clients answer, over the `channel`, in place of those
    of `population`; what is released is written to `privacy`, a ledger, where one is given. `gradient_bound` is the largest norm
    of a client's gradient that channels of integers must carry. Raises ValueError where too few clients contribute for their sums
    to be released.
    """
    everyone = replace(fedavg(), sample=Everyone())
    looked = train(everyone, task_with_model(model, task), population, rounds=0, engine=engine, channel=channel, fleet=fleet,
                   privacy=privacy, evaluation=GradientDissimilarity(gradient_bound=gradient_bound), progress=False)
    if looked.evaluation is None:
        raise ValueError("too few clients gave their gradients for the sums to be released.")
    (found,) = looked.evaluation
    return found
