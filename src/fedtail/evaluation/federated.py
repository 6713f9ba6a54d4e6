"""Evaluation where the data are: clients evaluate the models they receive, and the server gets sums and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtail.algorithm import Method, member_states
from fedtail.base_part import Part
from fedtail.channel.base import RoundLost
from fedtail.conversations import Conversation, Joint
from fedtail.deprecated import with_old_names
from fedtail.errors import FieldError
from fedtail.evaluation.client_histogram import ClientHistogram
from fedtail.evaluation.client_values import client_values
from fedtail.evaluation.evaluate import Evaluation
from fedtail.fleet import Broadcast
from fedtail.personal.base import PersonalModels
from fedtail.privacy.events import Release, Unit
from fedtail.privacy.mechanisms import Mechanism, NoisySum, NoPrivacy
from fedtail.privacy.noise import Noise
from fedtail.quantiles.histogram import Edges
from fedtail.questions import Evaluate
from fedtail.sampling import Cohort, Sampler

if TYPE_CHECKING:
    from fedtail.clients import Clients

Split = Literal["test", "train"]
SPLITS = ("test", "train")
MOMENTS = 2              # entries of a row before its bins: the value and its square


@with_old_names
@dataclass(frozen=True)
class MetricRange(Part):
    """A metric by name, and the public range [`low`, `high`] of its `bins`: values beyond it are as if at its ends."""

    name: str
    low: float = 0.0
    high: float = 1.0
    bins: int = 50
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        """Raise ValueError where `low`, `high` and `bins` do not make a histogram. Also computes and caches `edges`."""
        _ = self.edges                  # refuses what is no range

    @cached_property
    def edges(self) -> Edges:
        """The edges of `bins` bins of equal width over [`low`, `high`]; cached."""
        return Edges.of_equal_width(self.low, self.high, self.bins)

    @property
    def width(self) -> int:
        """How many entries a client's row has for this metric: the value, its square, and one for each bin."""
        return MOMENTS + self.bins

    def rows(self, values: Tensor) -> Tensor:
        """Runs on the client: rows to be summed over clients, (clients, width) float64, from `values`, (clients,), on the CPU.

        A row is the client's value, clipped to [`low`, `high`] and scaled to [0, 1], its square, and a one-hot vector of its bin.
        Values beyond the range are in the first or last bin.
        """
        inside = (values.clamp(self.low, self.high) - self.low) / (self.high - self.low)
        bins = torch.nn.functional.one_hot(torch.from_numpy(self.edges.bin_indices(values.numpy())), self.bins)
        return torch.cat([inside[:, None], inside.square()[:, None], bins.double()], 1)

    def histogram_from_sums(self, sums: Tensor, noise: float = 0.0) -> ClientHistogram:
        """Runs on the server: the distribution of the metric over clients, from `sums`, (width,), the sum of their rows.

        `noise` is the standard deviation of the noise in each entry of the sum (0: none); negative counts are set to zero.
        """
        counts = np.maximum(sums[MOMENTS:].numpy(), 0.0)
        return ClientHistogram(self.edges, counts, float(sums[0]), float(sums[1]), self.better, noise)


@dataclass(frozen=True)
class ClientMetrics(Part):
    """The client half: metrics of each client's task on its own examples, as rows that can be summed.

    A client without examples in the split, or with a metric per example that is not finite, answers zeros and is in no bin. One
    for whom a metric per client is not defined (NaN) is in no bin of that metric, and in those of the others.
    """

    ranges: tuple[MetricRange, ...]
    split: Split = "test"

    sends = (MetricRange,)

    def losses(self, clients: Clients, model: int) -> Tensor:
        """Runs on the client: each client's metrics under the broadcast model of index `model`, (clients, metrics) float64.

        On the CPU; NaN for clients without examples in the split. Raises FieldError where the task has no metric of some name,
        ValueError where the split is "test" and no client holds out examples. It is called `losses` because a shard computes it
        in their place.
        """
        return self.values(clients, clients.params(model))

    def values(self, clients: Clients, params: Tensor) -> Tensor:
        """Runs on the client: each client's metrics under the model `params` (dim,), (clients, metrics) float64, as `losses`.

        All are NaN where a metric per example is not finite: the model has diverged for this client.
        """
        known = {metric.name: metric for metric in clients.kernel.task.all_metrics}
        missing = [one.name for one in self.ranges if one.name not in known]
        if missing:
            raise FieldError("metrics", "those of the task", missing[0], f"The task has {', '.join(known)}.")
        population, has = clients.examples_in_split(self.split)
        found = torch.full((len(clients), len(self.ranges)), math.nan, dtype=torch.float64)
        if bool(has.any()):
            metrics = tuple(known[one.name] for one in self.ranges)
            values = client_values(clients.kernel, params, population, metrics)
            told = torch.stack([values[one.name].cpu() for one in self.ranges], 1)
            of_examples = torch.tensor([metric.per == "example" for metric in metrics])
            found[has] = told.where(told[:, of_examples].isfinite().all(1)[:, None], math.nan)
        return found

    def rows(self, values: Tensor) -> Tensor:
        """Runs on the client: the rows of all metrics side by side, (clients, row_width), from `values`, (clients, metrics).

        Zeros in the place of a metric that is NaN or infinite, so that the client is in none of its bins.
        """
        finite = values.isfinite()
        known = values.where(finite, 0.0).T.contiguous()
        each = zip(self.ranges, known, finite.T, strict=True)
        return torch.cat([one.rows(column) * here[:, None] for one, column, here in each], 1)

    @property
    def row_width(self) -> int:
        """How many entries a client's row has: the widths of all metrics together."""
        return sum(one.width for one in self.ranges)

    @property
    def row_norm(self) -> float:
        """A bound on the L2 norm of a client's row, to which it is clipped.

        For each metric three entries are not zero, each at most 1: the value, its square and its bin.
        """
        return math.sqrt((MOMENTS + 1) * len(self.ranges))


@dataclass(frozen=True)
class PersonalMetrics(Part):
    """The client half for personal models: metrics of each client under its own model, as rows that can be summed.

    The models are those of `personal` beside the method's model with index `member`, as they were kept by the end of the last
    round. A client that has none, because it was never sampled or has lost it, has the metrics of the shared model.
    """

    metrics: ClientMetrics
    personal: PersonalModels
    member: int = 0

    sends = (ClientMetrics,)

    def losses(self, clients: Clients, model: int) -> Tensor:
        """Runs on the client: each client's metrics under its own model, (clients, metrics) float64, on the CPU.

        `model` is the index of the broadcast model by which clients without one predict. NaN for clients without examples in the
        split. Raises what `ClientMetrics.losses` raises.
        """
        found, received = self.metrics.losses(clients, model), clients.params(self.member)
        mine = clients.with_memory(self.personal.memory_name(self.member))
        for k, one in enumerate(mine.batches_of_one()):        # one row at a time: models may be large
            kept = one.kept_rows()
            if kept is not None and bool(kept.has):
                found[k] = self.metrics.values(one, self.personal.models(kept.rows.to(received), received)[0])[0]
        return found

    def rows(self, values: Tensor) -> Tensor:
        """Runs on the client: the rows of all metrics side by side, (clients, row_width), from `values`, (clients, metrics)."""
        return self.metrics.rows(values)

    @property
    def row_width(self) -> int:
        """How many entries a client's row has: as many as for the shared model."""
        return self.metrics.row_width


@with_old_names
@dataclass(frozen=True)
class FederatedEvaluation:
    """How models are evaluated by the clients of a cohort, from their own examples, and what of it is released.

    `split` is which of a client's examples: held out ("test") or those it trains on. Released are, for each metric, the sums of
    the values and their squares and a histogram of `bins` bins over a public range: the error in [0, `error_bound`], the loss in
    [0, `loss_bound`] where that is given, and `more` metrics of the task. With `noise` the release is private, without it is on
    the ledger as non-private. A cohort that trains evaluates first, every so many rounds (`every`), the model it has received.

    Where the method trains personal models, clients evaluate these too, on held-out examples only; that is a release of its own,
    with noise of its own, and the result is the `personal` of the evaluation.
    """

    split: Split = "test"
    error_bound: float = 1.0
    loss_bound: float | None = None
    bins: int = 50
    more: tuple[MetricRange, ...] = ()
    noise: Noise | None = None
    every: int = 5

    def __post_init__(self) -> None:
        """Raise FieldError for a field that is not allowed, and TypeError for a `noise` that is not a `Noise`.

        Not allowed are an unknown split, `every` below 1, a bound that is not positive and finite, and two metrics of one
        name.
        """
        if self.split not in SPLITS:
            raise FieldError("split", "test or train", self.split)
        if self.every < 1:
            raise FieldError("every", "at least 1 round", self.every)
        for name, bound in (("error_bound", self.error_bound), ("loss_bound", self.loss_bound)):
            if bound is not None and not 0 < bound < math.inf:
                raise FieldError(name, "positive and finite", bound, "It is a public bound: larger values are as if at it.")
        names = [one.name for one in self.client_half.ranges]
        if len(set(names)) < len(names):
            raise FieldError("more", "metrics of other names", names[-1])
        if self.noise is not None and not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")

    @cached_property
    def client_half(self) -> ClientMetrics:
        """The part that clients run: the metrics with their ranges, and the split; cached.

        The metrics are the loss where `loss_bound` is given, the error, and those in `more`.
        """
        loss = () if self.loss_bound is None else (MetricRange("loss", 0.0, self.loss_bound, self.bins),)
        return ClientMetrics((*loss, MetricRange("error", 0.0, self.error_bound, self.bins), *self.more), self.split)

    @property
    def mechanism(self) -> Mechanism:
        """What is done to rows and their sum before the release.

        `NoPrivacy()` without `noise`; else a `NoisySum`, which clips each row to its largest norm and adds the noise.
        """
        return NoPrivacy() if self.noise is None else NoisySum(self.client_half.row_norm, self.noise)

    def questions(self, first: int, models: int) -> tuple[Evaluate, ...]:
        """One `Evaluate` question for each of `models` consecutive broadcast models, the first of which has index `first`."""
        return tuple(Evaluate(self.client_half, model=first + k, mechanism=self.mechanism) for k in range(models))

    def evaluation_from_sums(self, sums: Tensor) -> Evaluation:
        """Runs on the server: the evaluation of one model from `sums`, (row_width,), the released sum of the clients' rows.

        It has a `ClientHistogram` for each metric, by name.
        """
        parts = sums.double().cpu().split([one.width for one in self.client_half.ranges])
        noise = 0.0 if self.noise is None else self.noise.noise_multiplier * self.client_half.row_norm
        return Evaluation({one.name: one.histogram_from_sums(part, noise)
                           for one, part in zip(self.client_half.ranges, parts, strict=True)})

    def round_with_evaluation(self, method: Method, only: bool = False) -> EvaluatedRound:
        """A method for `run_round` whose cohort evaluates the models of `method` and then, unless `only`, trains them.

        `run_round` then returns a pair: the next state, and a tuple of one evaluation per model or None.
        """
        return EvaluatedRound(method, self, only, self.personal_halves(method))

    def personal_halves(self, method: Method) -> dict[int, PersonalMetrics]:
        """The parts by which clients evaluate personal models, by the position of the member of `method` that trains some.

        None where the split is "train": personal models have seen these examples.
        """
        return {k: PersonalMetrics(self.client_half, member.personal, k) for k, member in enumerate(method.members)
                if member.personal.trains and self.split != "train"}

    def sampler_refusal(self, sample: Sampler) -> str | None:
        """An error text where cohorts of `sample` do not represent all clients equally, as those by mass; None where they do."""
        return unequal_cohort_refusal(sample)


def unequal_cohort_refusal(sample: Sampler) -> str | None:
    """An error text where cohorts of `sample` do not represent all clients equally, as those by mass; None where they do."""
    name = type(sample).__name__
    if not isinstance(sample, Sampler):
        return (f"{name} does not declare whether its cohorts represent all clients equally. Give it a property `unequal`: an "
                "empty text where each client is drawn equally often, else what it does instead.")
    if sample.unequal:
        return (f"{name} {sample.unequal}, so that an evaluation over its cohorts would be about them. Sample uniformly, or "
                "evaluate on everybody.")
    return None


class CohortEvaluation(Protocol):
    """What a cohort is asked about the models it receives: a question for each, and how its sums are read."""

    @property
    def mechanism(self) -> Mechanism:
        """What is done to rows and their sum before the release."""
        ...

    def questions(self, first: int, models: int) -> tuple[Any, ...]:
        """One question for each of `models` consecutive broadcast models, the first of which has index `first`."""
        ...

    def evaluation_from_sums(self, sums: Tensor) -> Any:
        """Runs on the server: the evaluation of one model from `sums`, (width,), the released sum of the clients' rows."""
        ...


@dataclass(frozen=True)
class EvaluatedRound:
    """A round whose cohort evaluates the models that would be handed out, and then trains, unless it is for evaluation only.

    It is run like a round of the `method`, and returns the state after it and one evaluation for each model, or None where
    too few clients contributed to the evaluation. Where `personal` has the client half for a model's personal models, their
    evaluation is the `personal` of the model's.
    """

    method: Method
    evaluation: CohortEvaluation
    only: bool = False
    personal: Mapping[int, Any] = field(default_factory=dict)      # client halves, by the position of the method's member

    def __post_init__(self) -> None:
        """Raise a ValueError where the evaluation's noise is for clients and the method's is for examples.

        One example more may move its client from one bin of a histogram to another, which is more than one client more does.
        """
        if self.unit == "example" and self.evaluation.mechanism.private:
            raise ValueError("the method hides single examples, and the noise of its evaluation hides clients: no one epsilon is "
                             "about both. Evaluate without noise, or train with LocalSGD.")

    @property
    def sample(self) -> Sampler:
        """The method's sampler, which draws the cohort."""
        return self.method.sample

    @property
    def unit(self) -> Unit:
        """The unit of privacy of the round, which is the method's."""
        return self.method.unit

    @property
    def minimum_cohort(self) -> int:
        """The smallest cohort for which the round is held.

        It is the larger of what the evaluation's mechanism needs and, unless `only`, what the method needs.
        """
        return max(0 if self.only else self.method.minimum_cohort, self.evaluation.mechanism.minimum)

    def broadcast(self, state: Any, seed: int) -> Broadcast:
        """The method's broadcast for this state and seed, with the parameters of the models to evaluate appended.

        Nothing is appended where these equal the models to train on; they differ where iterates are averaged or drawn.
        """
        told = self.method.broadcast(state, seed)
        if self._result_models(state) is None:
            return told
        return Broadcast(told.round, told.seed, torch.cat([told.params, self._result_models(state).to(told.params)]))

    def _result_models(self, state: Any) -> Any:
        """The parameters of each member's result, (models, dim), or None where each equals the model that the member trains on.

        They differ where iterates are averaged or drawn.
        """
        results = [m.result(s) for m, s in zip(self.method.members, member_states(state), strict=True)]
        same = all(torch.equal(result, s.params) for result, s in zip(results, member_states(state), strict=True))
        return None if same else torch.stack(results)

    def conversation(self, state: Any, seed: int, cohort: Cohort) -> Conversation[tuple[Any, tuple[Any, ...] | None]]:
        """Runs on the server: a generator that asks for evaluations of all models at once, then trains them unless `only`.

        It yields questions and is sent sums. Returns the state after the round (with `only` the one that came in) and a tuple of
        one evaluation per model, or None where too few clients contributed for their sums to be released. `seed` and `cohort`
        (the clients that answer) are for the method.
        """
        first = 0 if self._result_models(state) is None else len(self.method.members)
        try:
            sums = yield Joint(self._questions(first))
            found = self._evaluations(tuple(self.evaluation.evaluation_from_sums(one) for one in sums))
        except RoundLost:
            found = None
        if self.only:
            return state, found
        return (yield from self.method.conversation(state, seed, cohort)), found

    def _questions(self, first: int) -> tuple[Any, ...]:
        """The questions about all models, the first of which has index `first` in the broadcast, then about personal models."""
        own = (Evaluate(half, model=first + k, mechanism=self.evaluation.mechanism) for k, half in self.personal.items())
        return (*self.evaluation.questions(first, len(self.method.members)), *own)

    def _evaluations(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """One evaluation for each model, from `found`, one for each of `_questions`: those of personal models join the shared."""
        count = len(self.method.members)
        own = dict(zip(self.personal, found[count:], strict=True))
        return tuple(replace(one, personal=own[k]) if k in own else one for k, one in enumerate(found[:count]))

    def after_skipped_round(self, state: Any, seed: int) -> tuple[Any, None]:
        """The state after a round that was skipped for lack of clients, and None in place of the evaluations.

        The method gives that state; with `only`, `state` comes back unchanged.
        """
        return (state if self.only else self.method.after_skipped_round(state, seed)), None

    def after_lost_round(self, state: Any, seed: int) -> tuple[Any, None]:
        """The state after a round whose sums were not released, and None in place of the evaluations.

        The method gives that state; with `only`, `state` comes back unchanged.
        """
        return (state if self.only else self.method.after_lost_round(state, seed)), None

    def releases(self, dim: int) -> tuple[Release, ...]:
        """What the round releases, as entries for the privacy ledger, for a model of `dim` parameters.

        One entry for each model's evaluation, one for each evaluation of personal models and, unless `only`, those of the method.
        """
        return (*(one.release(dim) for one in self._questions(0)), *(() if self.only else self.method.releases(dim)))
