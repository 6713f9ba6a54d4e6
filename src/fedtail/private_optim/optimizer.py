"""A private optimiser for a training loop of one's own: batches in, steps out, every release on a ledger before it is made."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedtail.draws import hash_bits
from fedtail.losses import default_loss
from fedtail.modules import cast_inputs, trainable_parameters
from fedtail.privacy.accounting import Guarantee
from fedtail.privacy.events import NonPrivateRelease, Sampling
from fedtail.privacy.ledger import Ledger, PrivacyBudget
from fedtail.privacy.noise import GaussianNoise
from fedtail.privacy.randomness import SystemRandomness
from fedtail.private_optim.charging import CHANNEL, EXACT, mean_release, step_event
from fedtail.private_optim.closed_form import ClosedFormGradients, has_closed_form
from fedtail.private_optim.gradient_rows import GivenGradients, RecordGradients, sum_clipped, sum_exact
from fedtail.private_optim.methods import PrivateMethod
from fedtail.private_optim.per_example import AutogradGradients, MicroBatchGradients, is_vectorisable, split_examples
from fedtail.private_optim.poisson_batches import refuse_larger_batch
from fedtail.private_optim.public_data import PublicData
from fedtail.private_optim.queries import Answer, Direction, NoisyMean, PublicGradient, Query
from fedtail.task import PerExample, Task
from fedtail.types import Examples

TRIED = 6           # examples of a batch by which a module is judged before its first step

class PrivateOptimizer:
    """Trains a module in place by a `PrivateMethod`, one batch at a time.

        optimizer = PrivateOptimizer(module, dp_sgd(0.1, clip_norm=1.0, noise_multiplier=0.7), batch_size=64,
                                     sampling=PoissonSampling(64 / 25000))
        for rows in PoissonBatches(25000, 64, steps=1000):
            optimizer.step(inputs[rows], targets[rows])
        optimizer.guarantee(delta=1e-5)

    The unit of privacy is one example. A step charges the ledger before it releases anything, and is one round there. Sums of
    gradients are divided by the expected `batch_size`, whatever the size of the batch; an empty batch is a step of pure noise.
    Noise follows from `seed` and the number of the step (a simulated guarantee; two optimisers on the same examples need two
    seeds), or comes from the operating system where the ledger's budget says so.
    """

    def __init__(self, module: nn.Module, method: PrivateMethod, *, batch_size: float, sampling: Sampling,
                 loss: PerExample = default_loss, ledger: Ledger | None = None, public: PublicData | None = None, seed: int = 0,
                 chunk: int | None = None):
        """Take `module`, whose parameters every step changes, and `method`.

        `batch_size` is the expected one, `sampling` how batches are drawn (`PoissonSampling(rate)`; `NoSampling()` where they are
        not Poisson), `loss` one number per example, `public` what a method with public gradients reads, `chunk` how many examples
        are differentiated at once. Raises ValueError where the parts do not fit, and TypeError where `sampling` is none.
        """
        if not batch_size > 0:
            raise ValueError(f"batch_size, the expected number of examples of a step, must be positive, got {batch_size:g}.")
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be PoissonSampling(rate), FixedSampling(...) or NoSampling(), got {sampling!r}.")
        if method.reads_public and public is None:
            raise ValueError("this method reads public gradients. Give public=PublicData(inputs, targets, batch_size), or use "
                             "side information (FixedPreconditioner) or dp2.")
        self.method, self.sampling, self.batch_size = method, sampling, batch_size
        self.ledger = ledger if ledger is not None else Ledger(PrivacyBudget(unit="example"))
        self.steps = 0
        self._task, self._public, self._seed, self._chunk = Task(module, loss), public, seed, chunk
        self._way: Literal["closed form", "vectorised", "one by one"] | None = None
        self._parameters = trainable_parameters(module)
        self._sizes = [parameter.numel() for parameter in self._parameters]
        _refuse_ledger(method, self.ledger)
        self._refuse_broken_batches()
        self._refuse_half_precision()
        self._transform_state, self._rule_state = method.transform.start(self.params), method.rule.start(self.params)

    @property
    def params(self) -> Tensor:
        """A copy of the module's trainable parameters as one flat vector, (dim,)."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])

    def step(self, inputs: Examples, targets: Tensor) -> None:
        """Take one step on a batch of examples, which may be empty; axis 0 of the inputs and targets is the example.

        No example may be in the batch twice. Raises `BudgetSpent`, and changes nothing, where the step would exceed the ledger's
        privacy budget; a ValueError for a batch larger than the sampling gives, and, at the first batch of two examples or more,
        for a module or loss that mixes examples.
        """
        refuse_larger_batch(len(targets), self.batch_size, self.sampling)
        self._refuse_other_parameters()
        self._refuse_opacus_hooks()
        inputs = cast_inputs(inputs, self._parameters[0].dtype)
        self.step_on(self._gradients(inputs, targets))

    def step_on(self, gradients: RecordGradients) -> None:
        """Take one step on gradients of single records that were computed elsewhere, as `GivenGradients` of Opacus's samples.

        Raises `BudgetSpent`, and changes nothing, where the step would exceed the ledger's privacy budget; a ValueError for more
        `GivenGradients` than the sampling gives.
        """
        if isinstance(gradients, GivenGradients):
            refuse_larger_batch(len(gradients.tensors[0]), self.batch_size, self.sampling)
        self.ledger.open(self.steps, step_event(self.method, self.steps, self.sampling), CHANNEL)
        try:
            direction = self._converse(gradients)
        finally:
            self.ledger.close()
        rate = direction.rate * self.method.schedule(self.steps)
        public = self._public_gradient() if self.method.rule.reads_public else None
        params, self._rule_state = self.method.rule(self.params, direction.gradient, self._rule_state, self.steps, rate, public)
        self._transform_state = direction.state
        self._write(params)
        self.steps += 1

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """The privacy guarantee of the steps so far for one example, at `delta`, by default that of the ledger's budget."""
        return self.ledger.guarantee(delta)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and the tensors of the method, for a checkpoint; the module and the ledger have their own."""
        return {"steps": self.steps, "transform": list(self._transform_state), "rule": list(self._rule_state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave; raises ValueError where it is of another method or model."""
        for name, own in (("transform", self._transform_state), ("rule", self._rule_state)):
            if [tuple(one.shape) for one in state[name]] != [tuple(one.shape) for one in own]:
                raise ValueError(f"the checkpoint has other tensors for the {name} than this method and model. Make the "
                                 "optimiser as the one that was saved.")
        self.steps = state["steps"]
        self._transform_state = tuple(one.clone() for one in state["transform"])
        self._rule_state = tuple(one.clone() for one in state["rule"])

    def _converse(self, gradients: RecordGradients) -> Direction:
        """Answer the queries of the method's transform about `gradients` until it gives the direction of the step."""
        asking, answer, asked = self.method.transform.direction(self._transform_state, self.steps), None, 0
        while True:
            try:
                query = next(asking) if answer is None else asking.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._answer(query, gradients, asked)
            asked += 1

    def _answer(self, query: Query, gradients: RecordGradients, asked: int) -> Answer:
        """The answer to query number `asked` of this step; releases are charged before anything is computed."""
        if isinstance(query, PublicGradient):
            return Answer(self._public_gradient())
        like = self.params
        if not isinstance(query, NoisyMean):
            self.ledger.charge([NonPrivateRelease(EXACT)])
            return Answer(sum_exact(gradients, self._sizes, like) / self.batch_size)
        self.ledger.charge([mean_release(self.method)])
        total = sum_clipped(gradients, query.clip, query.preconditioning, self._sizes, like)
        records = self.batch_size / self.method.microbatch_size
        if not self.method.noise_multiplier:
            return Answer(total / records)
        deviation = self.method.noise_multiplier * self.method.sensitivity(query.clip)
        return Answer((total + deviation * self._normal(like, asked)) / records, deviation / records)

    def _normal(self, like: Tensor, asked: int) -> Tensor:
        """Standard normal noise in the shape, dtype and on the device of `like`, for query number `asked` of this step."""
        if not self.ledger.budget.replayable:
            return GaussianNoise(1.0).on_server(torch.zeros_like(like, device="cpu"), 1.0, False, SystemRandomness()).to(like)
        seeded = torch.Generator(like.device).manual_seed(int(hash_bits(self._seed, "example noise", self.steps, asked)))
        return torch.randn(like.shape, generator=seeded, dtype=like.dtype, device=like.device)

    def _gradients(self, inputs: Examples, targets: Tensor) -> RecordGradients:
        """The gradients of the batch's records: micro-batches, or examples by closed forms where the module has them.

        A single example shows nothing about the module, and is differentiated by itself.
        """
        if self._way is None and len(targets) > 1:
            self._way = self._choose_way(inputs, targets)
        vectorised, size = len(targets) > 1 and self._way != "one by one", self.method.microbatch_size
        if size > 1:
            count, seed = round(self.batch_size / size), self._seed if self.ledger.budget.replayable else None
            group = hash_bits(seed, "micro-batches", self.steps, torch.arange(len(targets))) % count
            return MicroBatchGradients(self._task, inputs, targets, group.to(targets.device), count, size, self._chunk,
                                       vectorised)
        if vectorised and self._way == "closed form":
            return ClosedFormGradients(self._task, inputs, targets, self._chunk)
        return AutogradGradients(self._task, inputs, targets, self._chunk, vectorised)

    def _choose_way(self, inputs: Examples, targets: Tensor) -> Literal["closed form", "vectorised", "one by one"]:
        """How gradients of single records are computed, found by trying the module on the first examples of a batch.

        Raises ValueError for a module or loss that does not treat examples one by one.
        """
        self._task.check_examples(*next(split_examples(inputs, targets, TRIED)))
        if not is_vectorisable(self._task, inputs, targets):
            return "one by one"
        return "closed form" if has_closed_form(self._task, inputs, targets) else "vectorised"

    def _public_gradient(self) -> Tensor:
        """The mean gradient over this step's public batch, (dim,)."""
        assert self._public is not None
        return self._public.gradient(self._task, self.steps)

    def _write(self, params: Tensor) -> None:
        """Copy flat `params`, (dim,), into the module's parameters."""
        with torch.no_grad():
            for parameter, part in zip(self._parameters, params.split(self._sizes), strict=True):
                parameter.copy_(part.view_as(parameter))

    def _refuse_broken_batches(self) -> None:
        """Raise a ValueError where the expected batch is no whole number of micro-batches, at least one."""
        count = self.batch_size / self.method.microbatch_size
        if self.method.microbatch_size > 1 and not (count >= 1 and math.isclose(count, round(count))):
            raise ValueError(f"batch_size={self.batch_size:g} is no whole number of micro-batches of "
                             f"{self.method.microbatch_size} examples.")


    def _refuse_other_parameters(self) -> None:
        """Raise a ValueError where the module's trainable parameters are not those that it had when the optimiser was made."""
        if list(map(id, trainable_parameters(self._task.module))) != list(map(id, self._parameters)):
            raise ValueError("the module has other trainable parameters than when the optimiser was made: some were frozen, "
                             "unfrozen or replaced. Make a new optimiser, with the same ledger.")

    def _refuse_opacus_hooks(self) -> None:
        """Raise a ValueError for a module in Opacus's `GradSampleModule`, whose hooks would run where gradients are computed."""
        if any(hasattr(parameter, "grad_sample") for parameter in self._parameters):
            raise ValueError("the module is in Opacus's GradSampleModule, which computes gradients of examples itself. Call "
                             "step_on(GivenGradients.from_grad_samples(module.parameters())) after the backward pass, or give "
                             "the optimiser the bare module.")

    def _refuse_half_precision(self) -> None:
        """Raise a ValueError for parameters in half precision, in which clipped gradients may be longer than their clip norm."""
        halves = {parameter.dtype for parameter in self._parameters} - {torch.float32, torch.float64}
        if halves:
            raise ValueError(f"parameters are {', '.join(map(str, halves))}, in which a clipped gradient may be one percent "
                             "longer than its clip norm, and the noise too small. Write module.float(), with torch.autocast "
                             "inside it for speed.")


def _refuse_ledger(method: PrivateMethod, ledger: Ledger) -> None:
    """Raise a ValueError for a ledger about clients, or one with a budget to keep where `method` is not private."""
    if ledger.budget.unit != "example":
        raise ValueError(f"steps protect single examples, and the ledger's budget is about {ledger.budget.unit}s. Write "
                         "Ledger(PrivacyBudget(..., unit=\"example\")).")
    if ledger.budget.epsilon is not None and not method.private:
        why = "reads exact private gradients" if method.transform.declares.reads_exact else "adds no noise"
        raise ValueError(f"this method {why}, which no epsilon covers, and the ledger has a budget of epsilon = "
                         f"{ledger.budget.epsilon:g}. Leave epsilon out of the budget, or use a private method.")
