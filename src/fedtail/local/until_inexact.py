"""Local training that stops where a client's subproblem is solved well enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import LocalDeclaration
from fedtail.devices import to_device
from fedtail.local.base import LocalTraining, Objective, Prepared, RoundStart, full_gradients
from fedtail.local.sgd import LocalSGD
from fedtail.local.work import Work


@dataclass(frozen=True)
class NextSteps(Work):
    """The next `count` steps of those that `work` gives each client, of which `taken` are behind it."""

    work: Work
    taken: int
    count: int

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """At most `count` of the steps that each client has left, (clients,) int64; `full` and `epoch` are those of `Work`."""
        return (self.work.steps(clients, full, epoch) - self.taken).clamp(0, self.count)


@dataclass(frozen=True)
class UntilInexact(LocalTraining):
    """Each client stops at a `gamma`-inexact solution of its subproblem, [Li23, Definitions 5 and 6].

    Its subproblem h is what the steps of `local` minimise: for FedProx h(w) = F_k(w) + mu / 2 |w - w_t|^2, with w_t the model
    received. After every `every` steps a client computes its full gradient of h, and stops where |grad h(w)| <= gamma |grad
    h(w_t)|, which for FedProx is gamma |grad F_k(w_t)|. It takes at most the steps of `local`, fewer for a straggler, and at
    least the first `every` of them. A check costs a pass over the client's data; with full gradients (`batch_size=None`) it is
    also the next step's. Batches are those of `local`, whether it stops or not.
    """

    local: LocalSGD
    gamma: float
    every: int = 1

    def __post_init__(self) -> None:
        """Raise TypeError where `local` is not a `LocalSGD`, ValueError for a number out of range or a `local` with momentum."""
        if not isinstance(self.local, LocalSGD):
            raise TypeError(f"UntilInexact stops the steps of a LocalSGD, got {self.local!r}. Write UntilInexact(LocalSGD(0.1, "
                            "epochs=20, penalty=Proximal(1.0)), gamma=0.1), say.")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1], got {self.gamma:g}. 0 is an exact solution, 1 none at all.")
        if not isinstance(self.every, Integral) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {self.every}.")
        if self.local.momentum:
            raise ValueError(f"momentum={self.local.momentum:g} is lost where training stops to be checked. Write momentum=0.")

    @property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: that of `local`."""
        return self.local.declares

    @property
    def objective(self) -> Objective | None:
        """What risks over clients read as a client's loss: that of `local`."""
        return self.local.objective

    def prepare(self, start: RoundStart) -> Conversation[Prepared]:
        """Runs on the server before clients train: the conversation of `local`, around whose part of the round this one is."""
        local, kept = yield from self.local.prepare(start)
        return Prepared(self if local is self.local else replace(self, local=local), kept)

    def steps(self, clients: Clients) -> Tensor:
        """How many steps each client may take in this round, (clients,) int64: those of `local`."""
        return self.local.steps(clients)

    def round_numbers(self, kept: Tensor | None) -> Mapping[str, float]:
        """The numbers of a round by name that `local` has, from what the server keeps after it."""
        return self.local.round_numbers(kept)

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 0: that of `local`."""
        return self.local.rate(round)

    def subproblem_gradients(self, clients: Clients, anchor: Tensor, params: Tensor, own: Tensor | None = None) -> Tensor:
        """The gradient of what each client's steps minimise, (clients, dim): as `LocalSGD.subproblem_gradients` of `local`."""
        return self.local.subproblem_gradients(clients, anchor, params, own)

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """The local model of each client where it stopped, (clients, dim), for at most `kernel.stack` clients at once.

        `anchor` (dim,) is the model received and `start`, (dim,) or (clients, dim), where training begins; it is not changed.
        `first` are the gradients of the first step, (clients, dim), where they are known already. With `done` > 0, batches go on
        after that many steps.
        """
        if len(clients) > clients.kernel.stack:
            parts = torch.arange(len(clients)).split(clients.kernel.stack)
            return torch.cat([self.models(clients.take(part), anchor, start if start.ndim == 1 else start[part],
                                          None if first is None else first[part], done) for part in parts])
        at_anchor = full_gradients(clients, anchor, self.local.example_risk)
        goal = self.gamma * self.subproblem_gradients(clients, anchor, anchor, at_anchor).norm(dim=1)
        if first is None and self.local.batch_size is None and start is anchor:
            first = at_anchor
        return self._train_until(goal, clients, anchor, start.expand(len(clients), -1).clone(), first, done)

    def _train_until(self, goal: Tensor, clients: Clients, anchor: Tensor, params: Tensor, first: Tensor | None,
                     done: int) -> Tensor:
        """Train in pieces of `every` steps; clients whose gradient is at most their `goal`, (clients,), go on no longer.

        `params` (clients, dim) are the models to begin with, which are changed in place and returned; the other arguments are
        those of `models`.
        """
        left, taken = self.steps(clients), 0
        going = left.nonzero().flatten()                       # positions of the clients that still train
        if first is not None and len(going) < len(clients):
            first = first[to_device(going, first.device)]
        while len(going):
            there = to_device(going, params.device)
            piece = replace(self.local, work=NextSteps(self.local.work, taken, self.every))
            params[there] = piece.models(clients.take(going), anchor, params[there], first, done + taken)
            taken += self.every
            going = going[left[going] > taken]
            if len(going):
                going, first = self._far_from_goal(goal, clients, anchor, params, going)
        return params

    def _far_from_goal(self, goal: Tensor, clients: Clients, anchor: Tensor, params: Tensor,
                       going: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which of the clients at positions `going` go on, and the gradients of their next steps where these are full ones.

        They go on where the gradient of their subproblem at their model in `params` is longer than their `goal`. The gradients
        are (clients, dim); None with mini-batches.
        """
        few, there = clients.take(going), to_device(going, params.device)
        own = full_gradients(few, params[there], self.local.example_risk)
        far = self.subproblem_gradients(few, anchor, params[there], own).norm(dim=1) > goal[there]
        return going[far.cpu()], own[far] if self.local.batch_size is None else None
