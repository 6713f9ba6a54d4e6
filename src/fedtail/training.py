"""Run an algorithm on a population in this process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedtail.algorithm import Method, State, member_states, parts_are_equal, planned_round, run_round
from fedtail.channel import Channel, PlainChannel
from fedtail.channel.base import refuse_mechanism
from fedtail.client_memory import ClientMemory
from fedtail.composition import check_composition
from fedtail.constant_prediction import constant_outputs
from fedtail.data.population import Population
from fedtail.deprecated import old_names
from fedtail.divergence import AnswersLeftOutWarning, DivergedWarning, left_out_text, parameters_text
from fedtail.engine.engine import Engine, resolve_engine
from fedtail.engine.local_fleet import LocalFleet
from fedtail.fleet import Fleet
from fedtail.model_file import read_model
from fedtail.modules import trainable_parameters
from fedtail.observing import Followed, OnRound, RoundObserver, RunValidation, cohort_rows
from fedtail.privacy.events import NonPrivateRelease, RoundEvent
from fedtail.privacy.history import UNKNOWN, EarlierHistory, attached_history
from fedtail.privacy.ledger import BudgetSpent, Ledger, PrivacyBudget
from fedtail.privacy.mechanisms import Mechanism
from fedtail.privacy.planned_budget import PlannedBudget
from fedtail.run_arguments import check_earlier_run, check_followers, check_run_settings, check_seed, check_types
from fedtail.sampling import Sampler
from fedtail.task import Task
from fedtail.trained import NOT_KNOWN, Progress, Trained, result_params

if TYPE_CHECKING:
    from fedtail.loggers.base import Logger

__all__ = ["BudgetSpentWarning", "FleetEvaluation", "InterruptedWarning", "NoContributionWarning", "OnRound", "Progress",
           "Trained", "check_budget", "check_planned_rounds", "check_run", "check_types", "refuse_release_without_noise",
           "result_params", "resume", "train"]

IN_MODEL_PRECISION = ("server", "iterate")      # parts that keep vectors like the model
SAME_KIND = "Start from the same kind of module."
ANOTHER_METHOD = "To train that model by this method write start=trained.module."
Start = nn.Module | Mapping[str, Tensor] | str | Path


class BudgetSpentWarning(UserWarning):
    """A run ends early because another round would cost more privacy than was promised."""


class InterruptedWarning(UserWarning):
    """A run ends early because of a Ctrl-C, and returns what it has trained so far."""


class NoContributionWarning(UserWarning):
    """No client contributed in any round of a run, so that nothing was learned."""


class FleetEvaluation(Protocol):
    """How models are evaluated on a fleet while it trains: see `fedtail.evaluation.FederatedEvaluation`."""

    @property
    def every(self) -> int:
        """The number of rounds from one evaluation to the next."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """The privacy mechanism of the evaluation, which clips and noises the clients' rows or their sum."""
        ...

    def round_with_evaluation(self, method: Method, only: bool = False) -> Any:
        """A method whose rounds begin with the evaluation of `method`'s models or, with `only`, consist of nothing else.

        It can be passed to `run_round`, which then returns a pair: the next state, and one evaluation for each model or None.
        """
        ...

    def sampler_refusal(self, sample: Sampler) -> str | None:
        """The reason, as a text, why models cannot be evaluated on cohorts of this sampler; None where they can."""
        ...


def train(algorithm: Method, task: Task, population: Population | None = None, *, rounds: int, seed: int | None = None,
          start: Start | None = None, engine: Engine = Engine(), channel: Channel = PlainChannel(), fleet: Fleet | None = None,
          privacy: PrivacyBudget | Ledger | None = None, evaluation: FleetEvaluation | None = None,
          validation: RunValidation | None = None, logger: Logger | None = None, progress: bool = True,
          on_round: OnRound | None = None, **old: Any) -> Trained:
    """Train by `algorithm` for `rounds` rounds, and return the models with all that `resume` needs.

    Whatever can be refused is refused before the first round. `start` is the model to begin with: a module, a state dict, or the
    path of a run's model file. Its parameters (frozen ones too) and buffers are copied into a copy of the task's module, which
    must be of the same kind; by default that module itself is the start. `seed` (0 by default) drives batches and dropout and,
    unless the privacy budget takes them from the operating system, cohorts and noise: methods with the same seed see the same.
    `engine` says where and how clients are computed. A `fleet` brings its own clients and computes for them; by default a
    `LocalFleet` does for the `population`. `channel` is what the server sees of the clients' answers.

    `privacy` is the budget of the run, or a ledger to write to: with an epsilon, training stops, with a `BudgetSpentWarning`,
    before it would cost more. By default it is the budget that the method's noise was found for (`dp_fedavg(epsilon=...)`);
    of other methods releases are only recorded. The ledger is about these rounds, and notes what is known of
    the start: the whole history of a run's module or model file, nothing of a state dict. With an `evaluation`, clients of the
    fleet evaluate the models, which is charged too. `on_round(progress)` is called after each round, and stops the run by
    returning True. `old` takes deprecated keywords that are now fields of `Engine`. To continue an earlier run use `resume`.

    `validation`, a `fedtail.Validation`, evaluates the models on clients of its own: `best` of the result is the run at its best,
    and the run ends early where that says so. `logger` (`fedtail.loggers`) gets the numbers of every round, which are also the
    `history` of the result. A bar shows how far the run is in a terminal or notebook, elsewhere one line is written at its end;
    `progress=False` shows nothing. Ctrl-C finishes the round and returns what was trained so far, with an `InterruptedWarning`
    and `interrupted` True; a second one raises KeyboardInterrupt.
    """
    engine = resolve_engine(engine, old, "train")
    check_types(algorithm, task, population, rounds)
    check_run_settings(engine, channel, fleet, privacy, evaluation)
    check_followers(validation, logger, on_round)
    check_seed(seed)
    if isinstance(start, (Trained, State, tuple)):
        first = _earlier_run_from_start(algorithm, task, start, seed, engine)
        return resume(first, population, rounds=rounds, engine=engine, channel=channel, fleet=fleet, privacy=privacy,
                      evaluation=evaluation, validation=validation, logger=logger, progress=progress, on_round=on_round)
    values, earlier = _model_to_start_from(task, start)
    task, seed = _task_with_start_tensors(task, values, engine.dtype), seed or 0
    state = algorithm.initial_state(task.params().to(engine.dtype or task.params().dtype), seed)
    ledger = privacy if isinstance(privacy, Ledger) else Ledger()
    _limit_ledger(ledger, algorithm, privacy)
    if earlier is not None:
        ledger.record_earlier_history(earlier)
    first, followed = Trained(algorithm, task, state, seed), Followed(validation, logger, progress, on_round)
    return _check_and_run(first, population, rounds, engine, channel, fleet, ledger, evaluation, followed)


def resume(trained: Trained, population: Population | None = None, *, rounds: int, engine: Engine = Engine(),
           channel: Channel = PlainChannel(), fleet: Fleet | None = None, privacy: PrivacyBudget | Ledger | None = None,
           evaluation: FleetEvaluation | None = None, validation: RunValidation | None = None, logger: Logger | None = None,
           progress: bool = True, on_round: OnRound | None = None) -> Trained:
    """Continue an earlier run for `rounds` more rounds, with its method, task and seed, as if it had not ended.

    Round numbers continue, clients keep their memory, and a copy of the run's ledger continues, under the same budget unless
    `privacy` is another; a `Ledger` given as `privacy` is used in its place. If the ledger does not hold all earlier rounds, it
    notes their history as far as it is known. `population` or `fleet` provides the clients, `engine` and `channel` say how they
    are computed and what the server sees of them, and `evaluation`, `validation`, `logger`, `progress` and `on_round` act as in
    `train`. Raises ValueError where the state does not fit the method, or where its models are those of different rounds. To
    train the model by another method write train(..., start=trained.module).
    """
    check_earlier_run(trained)
    check_run_settings(engine, channel, fleet, privacy, evaluation)
    check_followers(validation, logger, on_round)
    check_types(trained.algorithm, trained.task, population, rounds)
    dtype = engine.dtype or member_states(trained.state)[0].params.dtype
    _check_state(trained.algorithm.initial_state(trained.task.params().to(dtype), trained.seed), trained.state)
    first = replace(trained, state=_state_in_precision(trained.state, dtype), stopped="", evaluation=None, interrupted=False)
    ledger = privacy if isinstance(privacy, Ledger) else trained.ledger.copy()
    _limit_ledger(ledger, trained.algorithm, ledger.budget if privacy is None else privacy)
    if not ledger.covers_rounds(trained.rounds):
        made = trained.ledger.history(f"a model that was trained for {trained.rounds} rounds", trained.rounds)
        ledger.record_earlier_history(replace(made, what=made.what if made.is_known else UNKNOWN, round=trained.rounds))
    followed = Followed(validation, logger, progress, on_round)
    return _check_and_run(first, population, rounds, replace(engine, dtype=dtype), channel, fleet, ledger, evaluation, followed)


def _limit_ledger(ledger: Ledger, algorithm: Method, privacy: PrivacyBudget | Ledger | None) -> None:
    """Set the budget of a run's new `ledger` to `privacy` or, where that has no epsilon, to that which the method was made for.

    Where `privacy` is the ledger itself it keeps its budget. Raises ValueError where nothing would limit a method that was made
    for a budget, and where `privacy` has another delta than that, and no epsilon.
    """
    plan = algorithm.budget
    if not isinstance(privacy, Ledger):
        ledger.budget = plan.for_run(privacy) if plan else privacy or PrivacyBudget()
    elif plan:
        plan.check_ledger(privacy)


def _check_and_run(first: Trained, population: Population | None, rounds: int, engine: Engine, channel: Channel,
                   fleet: Fleet | None, ledger: Ledger, evaluation: FleetEvaluation | None, followed: Followed) -> Trained:
    """Check all that could be refused, then run the rounds on the given fleet, or on a local one for the population.

    `first` is the run before these rounds; returns the run after them, whose ledger is `ledger`. `rounds`, `engine`, `channel`
    and `evaluation` are those of `train`, and `followed` says who follows the rounds. Warns where no client contributed in any
    round of a new run (`NoContributionWarning`), where Ctrl-C ended it (`InterruptedWarning`), where a model is not finite
    (`DivergedWarning`) and where answers were left out (`AnswersLeftOutWarning`).
    """
    if population is not None:
        first.task.check(population)
        first = first if first.constant is not None else replace(first, constant=constant_outputs(first.task, population))
    with nullcontext(fleet) if fleet is not None else _make_local_fleet(population, first, engine) as fleet:
        check_run(first.algorithm, first.task, fleet, channel, ledger, rounds, evaluation)
        check_planned_rounds(first.algorithm, first.rounds + rounds)
        followed.check(first, rounds)
        fleet.restore_memory(_memory_to_start_from(first, fleet))
        first = replace(first, memory=fleet.memory(), ledger=ledger)
        with followed.open(first, rounds) as observer:
            trained, anyone, asked = _run_rounds(first, rounds, fleet, channel, evaluation, observer)
    _warn_of_divergence(trained, trained.failed - first.failed, asked)
    if trained.interrupted:
        warnings.warn(f"interrupted after {trained.rounds - first.rounds} of {rounds} rounds: this is the run so far. Go on with "
                      "fedtail.resume.", InterruptedWarning, stacklevel=3)
    elif rounds and not anyone and first.rounds == 0:
        warnings.warn(f"no client contributed in any round ({trained.failed} were left out because a loss or an update was not "
                      "finite), so nothing was learned. Lower the learning rate, look at the data or, where noise hides so few, "
                      "sample more clients.", NoContributionWarning, stacklevel=3)
    return trained


def check_run(algorithm: Method, task: Task, fleet: Fleet, channel: Channel, ledger: Ledger, rounds: int,
              evaluation: FleetEvaluation | None = None) -> None:
    """Raise a ValueError for whatever a run of `algorithm` for `task` would refuse, before anything is sampled or released.

    That is a method that does not fit the fleet or channel, an evaluation that does not fit the channel or sampler and, where the
    budget of `ledger` has an epsilon, a release without noise or an epsilon that does not cover one round. Also a ledger about
    another unit of privacy than the rounds. Warns where epsilon does not cover all `rounds`.
    """
    check_composition(algorithm, fleet.population, channel, fleet)
    if evaluation is not None:
        refuse_mechanism(channel, evaluation.mechanism, False, type(evaluation).__name__)
        refused = evaluation.sampler_refusal(algorithm.sample)
        if refused:
            raise ValueError(refused)
    dim = len(task.params())
    ledger.check_unit(planned_round(algorithm, fleet, channel, dim))
    if ledger.budget.epsilon is None:
        return
    plan = algorithm.budget
    own = plan if plan and (ledger.budget.epsilon, ledger.budget.delta) == (plan.epsilon, plan.delta) else None
    if evaluation is not None:
        refuse_release_without_noise(planned_round(evaluation.round_with_evaluation(algorithm), fleet, channel, dim), own)
    each = algorithm if evaluation is None or evaluation.every > 1 else evaluation.round_with_evaluation(algorithm)
    check_budget(ledger, planned_round(each, fleet, channel, dim), rounds, own)


def check_planned_rounds(algorithm: Method, rounds: int) -> None:
    """Raise a ValueError where a method's noise is planned for fewer than `rounds` rounds in all, before any is held."""
    for member in algorithm.members:
        most = member.aggregate.declares.most_rounds
        if most is not None and rounds > most:
            raise ValueError(f"the noise of {type(member.aggregate).__name__} is planned for {most} rounds, and the run would "
                             f"have {rounds}. Plan it for {rounds}, or run {most}.")


def _make_local_fleet(population: Population | None, first: Trained, engine: Engine) -> LocalFleet:
    """A fleet in this process for the population, with the task and precision of the run `first`, and the engine's settings.

    Raises ValueError without a population.
    """
    if population is None:
        raise ValueError("train needs a population, or a fleet that holds one.")
    dtype = member_states(first.state)[0].params.dtype
    return LocalFleet(population, first.task, engine.device, dtype, workers=engine.workers, kernel=engine.kernel,
                      precision=engine.precision)


def _run_rounds(trained: Trained, rounds: int, fleet: Fleet, channel: Channel, evaluation: FleetEvaluation | None,
                observer: RoundObserver) -> tuple[Trained, bool, int]:
    """Continue the run `trained` for up to `rounds` rounds; returns the run after the last, and whether any client contributed.

    The latter is true also if the fleet cannot tell. The third result is the number of clients sampled in these rounds, each as
    often as it was, as far as the fleet can tell. The clients of `fleet` are asked over `channel`. Each round is given to the
    `observer`, and the run ends where that says so or, with a `BudgetSpentWarning`, where the privacy budget is spent. With an
    `evaluation`, the models are evaluated in every `every`-th round, and once more at the end unless the run ended early.
    """
    anyone, stop, asked = False, False, 0
    for done in range(1, rounds + 1):
        due = evaluation is not None and trained.rounds % evaluation.every == 0
        try:
            state, found = _run_one_round(trained, fleet, channel, evaluation if due else None)
        except BudgetSpent as reason:
            warnings.warn(f"stopped after {done - 1} of {rounds} rounds: {reason}.", BudgetSpentWarning, stacklevel=4)
            return replace(trained, stopped=str(reason)), anyone, asked
        view = fleet.round_view()
        failed = trained.failed + (view.num_failed if view else 0)
        anyone = anyone or view is None or view.num_contributors > 0
        asked += view.cohort_size if view else 0
        before = trained if found is None else replace(trained, evaluation=found)
        trained = replace(trained, state=state, failed=failed, memory=fleet.memory())
        trained, stop = observer.after_round(trained, done, rounds, view, before)
        if stop:
            break
    if evaluation is not None and not stop:
        trained = replace(trained, evaluation=_evaluate_final_models(trained, fleet, channel, evaluation))
        trained = replace(trained, history=observer.history_with(trained, cohort_rows(trained)))
    return trained, anyone, asked


def _not_finite(params: Tensor) -> int:
    """How many entries are not finite; a finite sum, which is read off faster, has none."""
    return 0 if bool(params.sum().isfinite()) else int((~params.isfinite()).sum())


def _warn_of_divergence(trained: Trained, failed: int, asked: int) -> None:
    """Warn the caller of `train` where a model of `trained` is not finite, or `failed` of `asked` answers were left out.

    No more than one warning: `DivergedWarning` for the former, `AnswersLeftOutWarning` for the latter.
    """
    lost, total = max((_not_finite(p), p.numel()) for p in result_params(trained.algorithm, trained.state))
    if lost:
        warnings.warn(parameters_text(lost, total), DivergedWarning, stacklevel=4)
    elif 0 < failed < asked:
        warnings.warn(left_out_text(failed, asked), AnswersLeftOutWarning, stacklevel=4)


def _run_one_round(trained: Trained, fleet: Fleet, channel: Channel, evaluation: FleetEvaluation | None,
                   only: bool = False) -> tuple[Any, tuple[Any, ...] | None]:
    """The state after one more round of the run `trained`, and the evaluations of the models that the cohort received.

    The cohort is of `fleet`, and is asked over `channel`. The evaluations are a tuple with one for each model; None without an
    `evaluation`, or where too few clients contributed to it. With `only` the cohort evaluates and does not train. Charges the
    run's ledger.
    """
    if evaluation is None:
        return run_round(trained.algorithm, trained.state, fleet, channel, trained.seed, trained.ledger), None
    method = evaluation.round_with_evaluation(trained.algorithm, only)
    return run_round(method, trained.state, fleet, channel, trained.seed, trained.ledger)


def _evaluate_final_models(trained: Trained, fleet: Fleet, channel: Channel,
                           evaluation: FleetEvaluation) -> tuple[Any, ...] | None:
    """A tuple with the clients' evaluation of each final model of the run `trained`, from a round for that alone.

    A cohort of `fleet` is asked over `channel`, as `evaluation` says. None where too few clients contributed and, with a
    `BudgetSpentWarning`, where the privacy budget is spent. Charges the run's ledger.
    """
    try:
        return _run_one_round(trained, fleet, channel, evaluation, only=True)[1]
    except BudgetSpent as reason:
        warnings.warn(f"the models at the end are not evaluated: {reason}.", BudgetSpentWarning, stacklevel=5)
        return None


def _earlier_run_from_start(algorithm: Method, task: Task, start: Any, seed: int | None, engine: Engine) -> Trained:
    """The run to resume for train(start=an earlier run or its state), which versions before 0.2 allowed.

    It has the other arguments of `train`: the task with the earlier run's tensors in the engine's dtype, and `seed` or, where
    that is None, the earlier seed. Warns with a DeprecationWarning. Raises ValueError where the earlier run was trained by
    another method or other settings than `algorithm`.
    """
    written = "resume(trained, ...)" if isinstance(start, Trained) else "resume(Trained(algorithm, task, state, seed), ...)"
    warnings.warn(f"to go on from an earlier run write {written} since version 0.2; train(start=...) begins with a model only.",
                  DeprecationWarning, stacklevel=3)
    if not isinstance(start, Trained):
        return Trained(algorithm, task, start, seed or 0)
    if not parts_are_equal(start.algorithm, algorithm):
        raise ValueError(f"start was trained by another method or with other settings. {ANOTHER_METHOD}")
    task = _task_with_start_tensors(task, start.task.module, engine.dtype)
    return replace(start, task=task, seed=start.seed if seed is None else seed)


def check_budget(ledger: Ledger, planned: RoundEvent, rounds: int, plan: PlannedBudget | None = None) -> None:
    """Raise a ValueError, before anything is released, where a new ledger's budget does not cover one round like `planned`.

    Also where such a round releases something without noise. Warns (`BudgetSpentWarning`) where the budget covers fewer than
    `rounds` more rounds. `plan` is that of the method where its budget is the ledger's, of which the texts tell.
    """
    budget = ledger.budget
    refuse_release_without_noise(planned, plan)
    left = ledger.affordable_rounds(planned) if rounds else 0
    made = "" if plan is None else (f"{plan.words[0].upper()}{plan.words[1:]}: make it for these, or give the run a budget of "
                                    "its own, privacy=PrivacyBudget(...).")
    if rounds and left < 1 and not ledger.rounds:
        raise ValueError(f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g} does not last for a round with this noise. "
                         f"{made or '`fedtail privacy` says how much noise it needs.'}")
    if left < rounds:
        warnings.warn(f"epsilon = {budget.epsilon:g} lasts for {left} of {rounds} rounds with this noise; training will stop "
                      f"there. {made or '`fedtail privacy` says how much noise they need.'}", BudgetSpentWarning, stacklevel=3)


def refuse_release_without_noise(planned: RoundEvent, plan: PlannedBudget | None = None) -> None:
    """Raise a ValueError where the planned round releases something without noise, which no finite epsilon covers.

    `plan` is that of the method where its budget is the run's.
    """
    bare = [release.what for release in planned.releases if isinstance(release, NonPrivateRelease)]
    if bare:
        instead = "leave epsilon out of the privacy budget" if plan is None else \
            "drop the method's budget with replace(method, budget=None)"
        raise ValueError(f"{bare[0]} would be released without noise, which no epsilon covers. Use private parts (PrivateMean, "
                         f"Binned, a noise in FederatedEvaluation), or {instead}.")


def _model_to_start_from(task: Task, start: Any) -> tuple[Any, EarlierHistory | None]:
    """The module or tensors to start from, and the history of their training, from the argument `start` of `train`.

    The first is None where the task's own module is the start; a model file is read. The history is None where no run has trained
    the task's module, and says that it is unknown for any other module or state dict without one.
    """
    if start is None or start is task.module:
        return None, attached_history(task.module)
    if isinstance(start, (str, Path)):
        return read_model(Path(start))
    return start, attached_history(start) or EarlierHistory()


def _task_with_start_tensors(task: Task, start: Any, dtype: torch.dtype | None) -> Task:
    """A copy of the task whose module holds all tensors of `start`: trainable and frozen parameters, and buffers.

    Trainable parameters have the dtype `dtype`, or that of the start. The task itself where `start` is None or its own module.
    Raises ValueError where the start has another architecture, TypeError where it is neither a module nor a mapping.
    """
    if start is None or start is task.module:
        return task
    if isinstance(start, Mapping):
        values = start
    elif isinstance(start, nn.Module):
        _refuse_other_architecture(task.module, start)
        values = start.state_dict()
    else:
        raise TypeError(f"start must be a module, a state dict or a model file, got {type(start).__name__}.")
    _refuse_other_tensors(task.module.state_dict(), values)
    names = [name for name, parameter in task.module.named_parameters() if parameter.requires_grad]
    params = torch.cat([values[name].detach().reshape(-1) for name in names])
    module = task.with_params(params.to(dtype or params.dtype))
    module.load_state_dict(values)
    for ours, theirs in zip(module.modules(), start.modules(), strict=True) if isinstance(start, nn.Module) else ():
        for name, buffer in theirs.named_buffers(recurse=False):      # those that a state dict leaves out too
            setattr(ours, name, buffer.detach().clone())
    return replace(task, module=module)


def _refuse_other_architecture(module: nn.Module, start: nn.Module) -> None:
    """Raise a ValueError where two modules differ in the shapes of their trainable parameters, or in names or types of layers.

    The text takes `module` for the task's, and `start` for what the user gave.
    """
    ours, theirs = ([tuple(p.shape) for p in trainable_parameters(m)] for m in (module, start))
    if ours != theirs:
        raise ValueError(f"start has trainable parameters of shapes {theirs}, the task's module {ours}. {SAME_KIND}")
    own, other = ({name: type(part).__name__ for name, part in m.named_modules()} for m in (module, start))
    for name in dict.fromkeys([*own, *other]):
        if own.get(name) != other.get(name):
            raise ValueError(f"start has {other.get(name, 'nothing')} where the task's module has {own.get(name, 'nothing')}"
                             f"{f' ({name})' if name else ''}. {SAME_KIND}")


def _refuse_other_tensors(own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise a ValueError where the state dicts `own` and `other` differ in names or shapes of tensors.

    It names the first difference.
    """
    for name in dict.fromkeys([*own, *other]):
        needed, came = (_describe_tensor(values, name) for values in (own, other))
        if needed != came:
            raise ValueError(f"start holds {came} as {name!r}, where the task's module holds {needed}. {SAME_KIND}")


def _describe_tensor(values: Mapping[str, Any], name: str) -> str:
    """What the state dict `values` holds under `name`, for an error text: "shape (...)", "no tensor", or "nothing"."""
    if name not in values:
        return "nothing"
    return f"shape {tuple(values[name].shape)}" if isinstance(values[name], Tensor) else "no tensor"


def _check_state(fresh: Any, old: Any) -> None:
    """Raise a ValueError where the state `old` does not fit a method that starts from the state `fresh`.

    They must have the same numbers of models, parameters and server optimiser tensors.
    """
    if len(member_states(old)) != len(member_states(fresh)) or isinstance(old, tuple) != isinstance(fresh, tuple):
        raise ValueError(f"the state holds {len(member_states(old))} models, this method trains {len(member_states(fresh))}. "
                         f"{ANOTHER_METHOD}")
    rounds = {was.round for was in member_states(old)}
    if len(rounds) > 1:
        raise ValueError(f"the models of this family are those of different rounds, {min(rounds)} to {max(rounds)}, as each was "
                         "at its best. Go on with the whole result of train.")
    for was, new in zip(member_states(old), member_states(fresh), strict=True):
        if was.params.shape != new.params.shape or len(was.optimizer_state) != len(new.optimizer_state):
            raise ValueError(f"the state holds {len(was.params)} parameters and {len(was.optimizer_state)} vectors of its server "
                             f"optimiser, this run {len(new.params)} and {len(new.optimizer_state)}. {ANOTHER_METHOD}")


def _state_in_precision(state: Any, dtype: torch.dtype) -> Any:
    """A copy of a state, or of each state of a family, with the model and the tensors of server optimiser and iterate in `dtype`.

    Other parts' tensors stay. The model is always copied, even if it has this dtype: where a view lies in memory can change how
    products are rounded.
    """
    if isinstance(state, tuple):
        return tuple(_state_in_precision(s, dtype) for s in state)
    parts = {name: tuple(tensor.to(dtype) for tensor in kept) if name in IN_MODEL_PRECISION else kept
             for name, kept in state.parts.items()}
    return replace(state, params=state.params.to(dtype, copy=True), parts=parts)


def _memory_to_start_from(first: Trained, fleet: Fleet) -> ClientMemory:
    """The client memory that the fleet starts with: for a resumed run what its clients kept, for a new run an empty one.

    `first` is the run to start from; put together from a state alone, its memory is what the fleet holds. A ValueError where its
    risk or local training keeps memory on clients and neither this fleet nor its nodes hold it.
    """
    if first.memory is not NOT_KNOWN:
        return first.memory
    if first.rounds == 0:
        return ClientMemory(fleet.population.key, {})
    held = fleet.memory()
    for model, member in enumerate(first.algorithm.members):
        for name, part in (("risk", member.risk), ("local", member.local), ("personal", member.personal)):
            if part.declares.keeps and f"{name} {model}" not in held.kept and held.nodes is None:
                raise ValueError(f"{type(part).__name__} keeps memory on the clients, which a state alone does not hold. "
                                 "Go on with the whole result of train, or on the fleet that trained it.")
    return held


__getattr__ = old_names(__name__)
