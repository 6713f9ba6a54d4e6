"""Models of clients' own whose mean is the shared model: mean-regularised multi-task learning, and L2SGD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from fedtail.clients import Clients
from fedtail.declarations import Keeps, LocalDeclaration
from fedtail.local.base import LocalTraining
from fedtail.local.objectives import ExampleRisk
from fedtail.local.pulled_steps import check_pull, pulled_steps
from fedtail.local.sgd import LocalSGD

STAYS_IN_MEAN = ("the shared model is the mean of all clients' models, in which a lost one would stay for ever. Use Ditto, whose "
                 "clients may start again")


@dataclass(frozen=True)
class MeanRegularised(LocalTraining):
    """Each client trains a model of its own, F_k(v) + strength / 2 |v - w|^2 (lambda), and sends how far it moved.

    w is the shared model it receives, which `MeanOfModels` makes the mean of all clients' models. At rest all v_k together
    minimise sum_k F_k(v_k) + lambda / 2 sum_k |v_k - mean v|^2, whoever is sampled: its gradient in v_k is that of the term
    above, since the distances to the mean sum to zero. With everybody in each round this is mean-regularised multi-task
    learning, with a cohort it is L2SGD as [Li23, section 5.6.2] trains it. The model stays on the client: it goes on from there
    with the steps of `local` when it is sampled next, and begins with the shared model at the first time. Predict by it with
    `personal=KeptByLocal()`. A strength of 0 is a model of the client's own data alone.
    """

    strength: float
    local: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        """Raise ValueError where the strength or `local` does not fit: see `check_pull`."""
        check_pull(self.strength, self.local)

    @cached_property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: that of `local`, and that a model is kept, which must not be lost."""
        return replace(self.local.declares, keeps=Keeps(STAYS_IN_MEAN, may_be_lost=False), keeps_models=True)

    @property
    def objective(self) -> ExampleRisk | None:
        """What risks over clients read as a client's loss, as `local` has it: of the shared model, not of the client's own."""
        return self.local.objective

    def steps(self, clients: Clients) -> Tensor:
        """How many steps each client takes in this round, (clients,) int64: those of `local`."""
        return self.local.steps(clients)

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 0: that of `local`."""
        return self.local.rate(round)

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """The clients' own models after the steps of `local` from `start`, (clients, dim), pulled towards `anchor` (dim,).

        `first` is not used: gradients at the shared model are of no use to a model that is elsewhere.
        """
        return pulled_steps(self.local, self.strength).models(clients, anchor, start, done=done)

    def updates(self, clients: Clients, model: int = 0, first: Tensor | None = None) -> Tensor:
        """Runs on the clients: how far each client's own model has moved in this round, (clients, dim); the model is kept.

        `model` is the index of the broadcast model, which is where a client without a model begins. `first` is not used.
        """
        mine, received = clients.with_memory(self.memory_name(model)), clients.params(model)
        before, kept = received.repeat(len(clients), 1), mine.kept_rows()
        before = before if kept is None else kept.rows.to(before).where(kept.has[:, None], before)
        after = self.models(mine, received, before)
        mine.keep(after)
        return after - before
