"""Run an algorithm on a population in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.algorithm import Family, FederatedAlgorithm, State, run_round
from fedtail.channel import Channel, PlainChannel
from fedtail.channel.base import Fleet
from fedtail.clients import Memory
from fedtail.data.population import Population
from fedtail.engine.fleet import LocalFleet, RoundView
from fedtail.task import Task

Start = Any      # nn.Module | Mapping[str, Tensor] | State | tuple[State, ...] | Trained | None


@dataclass(frozen=True)
class Progress:
    """What `on_round` is given after each round."""

    round: int                          # rounds done
    rounds: int                         # rounds asked
    algorithm: FederatedAlgorithm | Family
    task: Task
    state: Any                          # State, or a tuple of them for a Family
    view: RoundView | None              # simulator only: cohort, counted and failed clients

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models as they would be handed out now."""
        return tuple(self.task.with_params(p) for p in results(self.algorithm, self.state))

    @property
    def module(self) -> nn.Module:
        return self.modules[0]


@dataclass(frozen=True)
class Trained:
    """What a run leaves: the models, and the state to go on from."""

    algorithm: FederatedAlgorithm | Family
    task: Task
    state: Any
    failed: int = 0                     # clients left out over all rounds because a loss or update was not finite
    memory: Memory = field(default_factory=dict)      # what clients keep between rounds (AFL's lambda)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """One trained module for each member of a family, else one."""
        return tuple(self.task.with_params(p) for p in results(self.algorithm, self.state))

    @property
    def module(self) -> nn.Module:
        """The trained module."""
        if isinstance(self.state, tuple) and len(self.state) > 1:
            raise ValueError(f"a family of {len(self.state)} models was trained. Use .modules, and fedtail.choose to pick one.")
        return self.modules[0]


def train(algorithm: FederatedAlgorithm | Family, task: Task, population: Population, *, rounds: int, seed: int = 0,
          start: Start = None, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
          on_round: Callable[[Progress], bool | None] | None = None,
          channel: Channel = PlainChannel(), fleet: Fleet | None = None) -> Trained:
    """Train for `rounds` rounds; everything that could be refused is refused before the first.

    `start`: a module, a state dict, or an earlier run to go on from (its rounds go on counting, its clients remember);
    its `state` alone will do where clients remember nothing. `on_round(progress)` is called after each round; return True
    to stop early. One `seed` drives cohorts, batches and dropout: methods with the same seed see the same. `channel` is
    what crosses, `fleet` who computes (by default, this process).
    """
    if rounds < 0:
        raise ValueError(f"rounds must be at least 0, got {rounds}.")
    task.check(population)
    fleet = fleet or LocalFleet(population, task, device, dtype)
    algorithm.check(task, population, channel, fleet)
    state = _start(algorithm, task, start, seed, dtype)
    _recall(algorithm, start, fleet)
    failed = 0
    for done in range(1, rounds + 1):
        state = run_round(algorithm, state, fleet, channel, seed)
        view = fleet.view() if isinstance(fleet, LocalFleet) else None
        failed += view.failed if view else 0
        if on_round is not None and on_round(Progress(done, rounds, algorithm, task, state, view)):
            break
    return Trained(algorithm, task, state, failed, getattr(fleet, "memory", {}))


def results(algorithm: FederatedAlgorithm | Family, state: Any) -> tuple[Tensor, ...]:
    """The flat models to hand out."""
    if isinstance(algorithm, Family):
        return tuple(m.result(s) for m, s in zip(algorithm.members, state, strict=True))
    return (algorithm.result(state),)


def _recall(algorithm: FederatedAlgorithm | Family, start: Start, fleet: Fleet) -> None:
    """Give clients back what they remembered, or refuse to go on without it."""
    if not isinstance(fleet, LocalFleet) or fleet.memory:
        return
    if isinstance(start, Trained):
        fleet.memory = {name: kept.clone() for name, kept in start.memory.items()}
    members = algorithm.members if isinstance(algorithm, Family) else (algorithm,)
    forgetful = [type(m.risk).__name__ for m in members if m.risk.remembers and not m.risk.survives_lost_memory]
    states = start if isinstance(start, tuple) else (start,)
    if forgetful and any(isinstance(s, State) and s.round > 0 for s in states):
        raise ValueError(f"{forgetful[0]} keeps memory on the clients, which a state alone does not hold. "
                         "Go on with start=trained, the whole result of train.")


def _start(algorithm: FederatedAlgorithm | Family, task: Task, start: Start, seed: int, dtype: torch.dtype) -> Any:
    if isinstance(start, Trained):
        return start.state
    if isinstance(start, (State, tuple)):
        return start
    module = task.module
    if isinstance(start, nn.Module):
        module = start
    elif start is not None:
        module = task.with_params(task.params())
        module.load_state_dict(start)
    params = task.params(module)
    if params.shape != task.params().shape:
        raise ValueError(f"start has {len(params)} trainable parameters, the task's module has {len(task.params())}. "
                         "Start from the same kind of module.")
    return algorithm.start(params.to(dtype), seed)
