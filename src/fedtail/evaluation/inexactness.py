"""How well clients solve their local subproblems: gamma-inexactness, [Li23, Definitions 5 and 6]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fedtail.algorithm import Method
from fedtail.base_part import Part
from fedtail.clients import Shard
from fedtail.data.population import Population
from fedtail.engine.blocks import cohort_blocks, max_clients_at_once
from fedtail.engine.engine import Engine
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import isolate_generators
from fedtail.engine.local_fleet import population_on_device
from fedtail.engine.workers import num_workers, run_blocks
from fedtail.errors import FieldError
from fedtail.evaluation.distribution import Distribution
from fedtail.evaluation.evaluate import Evaluation, task_with_model
from fedtail.evaluation.federated import EvaluatedRound, MetricRange, unequal_cohort_refusal
from fedtail.fleet import Broadcast
from fedtail.local.sgd import LocalSGD
from fedtail.local.until_inexact import UntilInexact
from fedtail.privacy.mechanisms import Mechanism, NoisySum, NoPrivacy
from fedtail.privacy.noise import Noise
from fedtail.questions import Evaluate
from fedtail.sampling import Sampler
from fedtail.task import Task
from fedtail.training import Trained

if TYPE_CHECKING:
    from fedtail.clients import Clients

NAME = "inexactness"


def inexactness(model: Trained | nn.Module, population: Population, local: LocalSGD | UntilInexact, task: Task | None = None,
                seed: int | None = None, engine: Engine = Engine()) -> Distribution:
    """The inexactness gamma_k of every client of a population, as a distribution with equal weights, [Li23, Definition 6].

    Every client trains by `local` from `model`, the model received (w), to w_k; gamma_k = |grad h_k(w_k)| / |grad h_k(w)|, with
    h_k what its steps minimise: for FedProx F_k(w') + mu / 2 |w' - w|^2, so that the denominator is |grad F_k(w)|. It is 1 for a
    client that takes no step, and 0 where both gradients are zero. Batches and stragglers are those of `seed` in round 0; for a
    `Trained` model without a `seed`, those of its next round. `task` gives the loss, by default that of training.
    """
    task = task_with_model(model, task)
    task.check(population)
    params = task.params().to(engine.device, engine.dtype)
    round, drawn_by = (model.rounds, model.seed) if isinstance(model, Trained) and seed is None else (0, seed or 0)
    mine = population_on_device(population, params.device)
    kernel = kernel_for(task, params.device, params.dtype, population, engine.kernel)
    importance, told = torch.ones(len(mine), dtype=torch.float64), Broadcast(round, drawn_by, params[None])
    shard = Shard(mine, importance, told, kernel, params[None])
    blocks = cohort_blocks(mine.size, kernel.dim, max_clients_at_once(kernel, mine, params.device), params.device)

    def block_values(block: int) -> Tensor:
        """The inexactness of the clients in the block at position `block`, (clients,) float64."""
        with isolate_generators(kernel, params.device):
            return client_inexactness(local, shard.clients(*blocks[block]), 0)

    return Distribution(torch.cat(run_blocks(block_values, len(blocks), num_workers(params.device, engine.workers))))


def client_inexactness(local: LocalSGD | UntilInexact, clients: Clients, model: int) -> Tensor:
    """Runs on the clients: each trains by `local` from the broadcast model `model`, and the result is its inexactness.

    That is |grad h(w_k)| / |grad h(w)|, (clients,) float64 on the CPU; 0 where both are zero, infinite where only the latter is.
    """
    anchor, found = clients.params(model), []
    for part in torch.arange(len(clients)).split(clients.kernel.stack):
        few = clients.take(part)
        models = local.models(few, anchor, anchor)
        after, before = (local.subproblem_gradients(few, anchor, one).norm(dim=1).double() for one in (models, anchor))
        found.append(torch.where(after == 0, 0.0, after / before).cpu())
    return torch.cat(found)


@dataclass(frozen=True)
class ClientInexactness(Part):
    """The client half: each client trains by `local`, and its inexactness is a row that can be summed.

    A client whose inexactness is not finite answers zeros and is in no bin.
    """

    sends: ClassVar[tuple[type, ...]] = (MetricRange,)
    local: LocalSGD | UntilInexact
    range: MetricRange

    def losses(self, clients: Clients, model: int) -> Tensor:
        """Runs on the client: each client's inexactness from the broadcast model of index `model`, (clients, 1) float64.

        It is called `losses` because a shard computes it in their place.
        """
        return client_inexactness(self.local, clients, model)[:, None]

    def rows(self, values: Tensor) -> Tensor:
        """Runs on the client: the value, its square and a one-hot vector of its bin, (clients, row_width), from (clients, 1)."""
        finite = values.isfinite()
        return self.range.rows(values.where(finite, 0.0)[:, 0]) * finite

    @property
    def row_width(self) -> int:
        """How many entries a client's row has."""
        return self.range.width


@dataclass(frozen=True)
class FederatedInexactness:
    """How well the clients of a cohort solve their subproblems by `local`, for `train(evaluation=...)`, from sums over clients.

    Every so many rounds (`every`) the cohort trains by `local` from the model it has received, and released are, over its
    clients, the sums of the inexactness and its square and a histogram of `bins` bins over [0, 1], where larger values are as if
    at 1; with `noise` privately. `local` is used as it is: an `AdaptiveProximal` has its first strength. The result, for each
    model, is an `Evaluation` with one metric, "inexactness".
    """

    local: LocalSGD | UntilInexact
    bins: int = 50
    noise: Noise | None = None
    every: int = 5

    def __post_init__(self) -> None:
        """Raise FieldError where `every` is below 1 or `bins` make no histogram, and TypeError for a `noise` that is none."""
        if self.every < 1:
            raise FieldError("every", "at least 1 round", self.every)
        if self.noise is not None and not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")
        _ = self.client_half

    @cached_property
    def client_half(self) -> ClientInexactness:
        """The part that clients run: how they train, and the bins; cached."""
        return ClientInexactness(self.local, MetricRange(NAME, 0.0, 1.0, self.bins))

    @property
    def mechanism(self) -> Mechanism:
        """What is done to rows and their sum: nothing without `noise`; else three entries of at most 1 are clipped and noised."""
        return NoPrivacy() if self.noise is None else NoisySum(math.sqrt(3), self.noise)

    def questions(self, first: int, models: int) -> tuple[Evaluate, ...]:
        """One `Evaluate` question for each of `models` consecutive broadcast models, the first of which has index `first`."""
        return tuple(Evaluate(self.client_half, model=first + k, mechanism=self.mechanism) for k in range(models))

    def evaluation_from_sums(self, sums: Tensor) -> Evaluation:
        """Runs on the server: an `Evaluation` with a histogram of the inexactness, from the released sum of the rows."""
        noise = 0.0 if self.noise is None else self.noise.noise_multiplier * math.sqrt(3)
        return Evaluation({NAME: self.client_half.range.histogram_from_sums(sums.double().cpu(), noise)})

    def round_with_evaluation(self, method: Method, only: bool = False) -> EvaluatedRound:
        """A method for `run_round` whose cohort first measures its inexactness, and then, unless `only`, trains by `method`."""
        return EvaluatedRound(method, self, only)

    def sampler_refusal(self, sample: Sampler) -> str | None:
        """An error text where cohorts of `sample` do not represent all clients equally, which is so for `ByMass`; else None."""
        return unequal_cohort_refusal(sample)
