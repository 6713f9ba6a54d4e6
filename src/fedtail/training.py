"""Run an algorithm on a population in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.algorithm import Family, FederatedAlgorithm, State, planned_round, run_round, same_parts, states_of
from fedtail.channel import Channel, PlainChannel
from fedtail.client_memory import ClientMemory
from fedtail.composition import check
from fedtail.data.population import Population
from fedtail.engine.fleet import LocalFleet
from fedtail.engine.gpu.precision import Precision
from fedtail.fleet import Fleet, RoundView
from fedtail.modules import trainable
from fedtail.privacy.events import NonPrivateRelease, RoundEvent
from fedtail.privacy.ledger import BudgetSpent, Ledger, Terms
from fedtail.task import Task

Method = FederatedAlgorithm | Family
IN_MODEL_PRECISION = ("server", "iterate")      # parts that keep vectors like the model
SAME_KIND = "Start from the same kind of module."
Start = Any      # nn.Module | Mapping[str, Tensor] | State | tuple[State, ...] | Trained | None


class BudgetSpentWarning(UserWarning):
    """A run ends early because another round would cost more privacy than was promised."""


class NobodyCountedWarning(UserWarning):
    """No client counted in any round of a run, so that nothing was learned."""


@dataclass(frozen=True)
class Trained:
    """What a run leaves: the models, and all it takes to go on (`train(..., start=trained)`)."""

    algorithm: Method
    task: Task
    state: Any
    seed: int = 0
    failed: int = 0                     # clients left out over all rounds because a loss or update was not finite
    memory: ClientMemory = field(default=ClientMemory(torch.zeros(0, dtype=torch.int64), {}), repr=False)      # AFL's lambda
    stopped: str = ""                   # why it ended before the rounds that were asked for, where a budget was spent
    ledger: Ledger = field(default_factory=Ledger, repr=False)      # all that crossed; .guarantee(delta) prices it

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models as they would be handed out now, in evaluation mode: one for each member of a family, else one."""
        return tuple(self.task.with_params(p).eval() for p in results(self.algorithm, self.state))

    @property
    def module(self) -> nn.Module:
        """The trained module, in evaluation mode; refused where there are several."""
        if len(self.algorithm.members) > 1:
            raise ValueError(f"a family of {len(self.algorithm.members)} models was trained. Use .modules, and fedtail.choose to "
                             "pick one.")
        return self.modules[0]


@dataclass(frozen=True)
class Progress:
    """What `on_round` is given after each round."""

    round: int                          # rounds done
    rounds: int                         # rounds asked
    trained: Trained                    # the run so far: its models, and all it takes to go on
    view: RoundView | None              # simulator only: who was asked, who counted, who failed

    @property
    def state(self) -> Any:
        return self.trained.state

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.trained.modules

    @property
    def module(self) -> nn.Module:
        return self.trained.module


def train(algorithm: Method, task: Task, population: Population | None = None, *, rounds: int, seed: int | None = None,
          start: Start = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, workers: int | None = None,
          kernel: str = "auto", precision: Precision = "full",
          on_round: Callable[[Progress], bool | None] | None = None,
          channel: Channel = PlainChannel(), fleet: Fleet | None = None, privacy: Terms | Ledger | None = None) -> Trained:
    """Train for `rounds` rounds; everything that could be refused is refused before the first.

    `start`: a module or a state dict, whose parameters (frozen ones too) and buffers are copied into the task's module, which
    must be of the same kind; or an earlier run to go on from: its rounds go on counting, its clients remember, its seed is
    used. The `state` alone will do where clients remember nothing, or on the `fleet` that still holds what they remember.
    `on_round(progress)` is called after each round; return True to stop early. One `seed` drives cohorts, batches and
    dropout: methods with the same seed see the same. `dtype` is by default the module's. On a CPU `workers` processes share a
    round, by default one for each core; their number changes no bit. `kernel` is how models are computed ("auto", "closed",
    "stacked", "module"), `precision` how a GPU multiplies ("full", "tf32", "bf16"). `channel` is what crosses, `fleet` who
    computes: by default a `LocalFleet` for the `population`; another fleet brings its own clients. `privacy` are the terms of
    the run: with an epsilon, training stops before it would cost more; by default the ledger only counts.
    """
    _check_kinds(algorithm, task, population, rounds)
    earlier = start if isinstance(start, Trained) else None
    old = earlier.state if earlier else start if isinstance(start, (State, tuple)) else None
    if old is None or earlier:
        task = _warm(task, earlier.task.module if earlier else start, dtype)
    dtype = dtype or (task.params() if old is None else states_of(old)[0].params).dtype
    if population is not None:
        task.check(population)
    with nullcontext(fleet) if fleet is not None else _own_fleet(population, task, device, dtype, workers=workers, kernel=kernel,
                                                              precision=precision) as fleet:
        check(algorithm, fleet.population, channel, fleet)
        seed = earlier.seed if seed is None and earlier else seed or 0
        state = algorithm.start(task.params().to(dtype), seed)
        if old is not None:
            _check_method(algorithm, state, old, earlier)
            state = _in_precision(old, dtype)
        fleet.recall(_remembered(algorithm, old, earlier, fleet))
        ledger = _ledger(privacy, earlier)
        first = Trained(algorithm, task, state, seed, earlier.failed if earlier else 0, fleet.memory(), ledger=ledger)
        if ledger.terms.epsilon is not None:
            planned = planned_round(algorithm, fleet.population, channel, states_of(state)[0].params.shape[-1])
            check_budget(ledger, planned, rounds)
        trained, counted = _rounds(first, rounds, fleet, channel, on_round)
    if rounds and not counted and (old is None or states_of(old)[0].round == 0):
        warnings.warn(f"no client counted in any round ({trained.failed} were left out because a loss or an update was not "
                      "finite), so nothing was learned. Lower the learning rate, look at the data or, where noise hides so few, "
                      "ask more clients.", NobodyCountedWarning, stacklevel=2)
    return trained


def _own_fleet(population: Population | None, *given: Any, **settings: Any) -> LocalFleet:
    if population is None:
        raise ValueError("train needs a population, or a fleet that holds one.")
    return LocalFleet(population, *given, **settings)


def _rounds(trained: Trained, rounds: int, fleet: Fleet, channel: Channel,
            on_round: Callable[[Progress], bool | None] | None) -> tuple[Trained, int]:
    """The loop: the run after so many rounds, or until `on_round` says stop, and how many clients counted in all."""
    counted = 0
    for done in range(1, rounds + 1):
        try:
            state = run_round(trained.algorithm, trained.state, fleet, channel, trained.seed, trained.ledger)
        except BudgetSpent as reason:
            warnings.warn(f"stopped after {done - 1} of {rounds} rounds: {reason}.", BudgetSpentWarning, stacklevel=3)
            trained = replace(trained, stopped=str(reason))
            break
        view = fleet.view()
        failed, counted = trained.failed + (view.failed if view else 0), counted + (view.counted if view else 1)
        trained = replace(trained, state=state, failed=failed, memory=fleet.memory())
        if on_round is not None and on_round(Progress(done, rounds, trained, view)):
            break
    return trained, counted


def _ledger(privacy: Terms | Ledger | None, earlier: Trained | None) -> Ledger:
    """The ledger of a run: given, or an earlier run's history under these terms."""
    if isinstance(privacy, Ledger):
        return privacy
    ledger = earlier.ledger.copy() if earlier else Ledger()
    ledger.terms = privacy or ledger.terms
    return ledger


def check_budget(ledger: Ledger, planned: RoundEvent, rounds: int) -> None:
    """Before anything is asked: refuse a budget that does not last a round, warn of one that does not last to the end."""
    terms = ledger.terms
    bare = [release.what for release in planned.releases if isinstance(release, NonPrivateRelease)]
    if bare:
        raise ValueError(f"{bare[0]} would cross without noise, which no epsilon covers. Use private parts (PrivateMean, "
                         "Binned), or leave epsilon out of the terms.")
    left = ledger.affordable(planned) if rounds else 0
    if rounds and left < 1 and not ledger.rounds:
        raise ValueError(f"epsilon = {terms.epsilon:g} at delta = {terms.delta:g} does not last for a round with this noise. "
                         "`fedtail privacy` says how much noise it needs.")
    if left < rounds:
        warnings.warn(f"epsilon = {terms.epsilon:g} lasts for {left} of {rounds} rounds with this noise; training will stop "
                      "there. `fedtail privacy` says how much noise they need.", BudgetSpentWarning, stacklevel=3)


def results(algorithm: Method, state: Any) -> tuple[Tensor, ...]:
    """The flat models to hand out."""
    return tuple(m.result(s) for m, s in zip(algorithm.members, states_of(state), strict=True))


def _check_kinds(algorithm: Any, task: Any, population: Any, rounds: int) -> None:
    if not isinstance(algorithm, (FederatedAlgorithm, Family)):
        hint = " Call the recipe: fedavg(...)." if callable(algorithm) else " Recipes such as fedavg() make one."
        raise TypeError(f"algorithm must be a FederatedAlgorithm or a Family, got {type(algorithm).__name__}.{hint}")
    if not isinstance(task, Task):
        raise TypeError(f"task must be a Task, got {type(task).__name__}. Write Task(module).")
    if population is not None and not isinstance(population, Population):
        raise TypeError(f"population must be a Population, got {type(population).__name__}. "
                        "Write Population.from_arrays(x, y, client).")
    if rounds < 0:
        raise ValueError(f"rounds must be at least 0, got {rounds}.")


def _warm(task: Task, start: Any, dtype: torch.dtype | None) -> Task:
    """The task whose own module holds all tensors of the module to start from: trained and frozen parameters, and buffers.

    Trained parameters come in `dtype`, or as they are in the start.
    """
    if start is None or start is task.module:
        return task
    if isinstance(start, Mapping):
        values = start
    elif isinstance(start, nn.Module):
        _refuse_other_parts(task.module, start)
        values = start.state_dict()
    else:
        raise TypeError(f"start must be a module, a state dict or an earlier run, got {type(start).__name__}.")
    _refuse_other_tensors(task.module.state_dict(), values)
    names = [name for name, parameter in task.module.named_parameters() if parameter.requires_grad]
    params = torch.cat([values[name].detach().reshape(-1) for name in names])
    module = task.with_params(params.to(dtype or params.dtype))
    module.load_state_dict(values)
    for ours, theirs in zip(module.modules(), start.modules(), strict=True) if isinstance(start, nn.Module) else ():
        for name, buffer in theirs.named_buffers(recurse=False):      # those that a state dict leaves out too
            setattr(ours, name, buffer.detach().clone())
    return replace(task, module=module)


def _refuse_other_parts(module: nn.Module, start: nn.Module) -> None:
    """A start gives its tensors, not its architecture: refuse one whose tensors were made for another."""
    ours, theirs = ([tuple(p.shape) for p in trainable(m)] for m in (module, start))
    if ours != theirs:
        raise ValueError(f"start has trainable parameters of shapes {theirs}, the task's module {ours}. {SAME_KIND}")
    own, other = ({name: type(part).__name__ for name, part in m.named_modules()} for m in (module, start))
    for name in dict.fromkeys([*own, *other]):
        if own.get(name) != other.get(name):
            raise ValueError(f"start has {other.get(name, 'nothing')} where the task's module has {own.get(name, 'nothing')}"
                             f"{f' ({name})' if name else ''}. {SAME_KIND}")


def _refuse_other_tensors(own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Both are state dicts: the same names and shapes are needed."""
    for name in dict.fromkeys([*own, *other]):
        needed, came = (_form(values, name) for values in (own, other))
        if needed != came:
            raise ValueError(f"start holds {came} as {name!r}, where the task's module holds {needed}. {SAME_KIND}")


def _form(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "nothing"
    return f"shape {tuple(values[name].shape)}" if isinstance(values[name], Tensor) else "no tensor"


def _check_method(algorithm: Method, fresh: Any, old: Any, earlier: Trained | None) -> None:
    """Refuse to go on from a state that this method did not make."""
    advice = "To start this method from that model write start=trained.module."
    if earlier and not same_parts(earlier.algorithm, algorithm):
        raise ValueError(f"start was trained by another method or with other settings. {advice}")
    for was, new in zip(states_of(old), states_of(fresh), strict=False):
        if was.params.shape != new.params.shape or len(was.optimizer) != len(new.optimizer):
            raise ValueError(f"start holds {len(was.params)} parameters and {len(was.optimizer)} vectors of its server "
                             f"optimiser, this run {len(new.params)} and {len(new.optimizer)}. {advice}")
    if len(states_of(old)) != len(states_of(fresh)) or isinstance(old, tuple) != isinstance(fresh, tuple):
        raise ValueError(f"start holds {len(states_of(old))} models, this method trains {len(states_of(fresh))}. {advice}")


def _in_precision(state: Any, dtype: torch.dtype) -> Any:
    """The state in a precision, its model in memory of its own: a view may lie where products are rounded otherwise."""
    if isinstance(state, tuple):
        return tuple(_in_precision(s, dtype) for s in state)
    parts = {name: tuple(tensor.to(dtype) for tensor in kept) if name in IN_MODEL_PRECISION else kept
             for name, kept in state.parts.items()}
    return replace(state, params=state.params.to(dtype, copy=True), parts=parts)


def _remembered(algorithm: Method, old: Any, earlier: Trained | None, fleet: Fleet) -> ClientMemory:
    """What clients are to remember at the start; refused where a state goes on without what its clients kept."""
    if earlier:
        return earlier.memory
    if old is None or not any(s.round > 0 for s in states_of(old)):
        return ClientMemory(fleet.population.key, {})
    held = fleet.memory()
    for model, member in enumerate(algorithm.members):
        if member.risk.declares.keeps and f"risk {model}" not in held.kept and held.nodes is None:
            raise ValueError(f"{type(member.risk).__name__} keeps memory on the clients, which a state alone does not hold. "
                             "Go on with start=trained, the whole result of train, or on the fleet that trained it.")
    return held
