"""What `train` and `resume` are given, looked at before anything is computed: what came, what is needed, what to write."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Any

from fedtail.algorithm import Family, FederatedAlgorithm
from fedtail.channel import Channel
from fedtail.data.population_kind import check_is_population
from fedtail.engine.engine import check_engine
from fedtail.errors import check_kind, kind_words
from fedtail.privacy.ledger import Ledger, PrivacyBudget
from fedtail.task import Task
from fedtail.trained import Trained


def check_types(algorithm: Any, task: Any, population: Any, rounds: int) -> None:
    """Raise a TypeError for an algorithm, task or population (unless None) of another type; a ValueError where `rounds` < 0."""
    if not isinstance(algorithm, (FederatedAlgorithm, Family)):
        hint = " Call the recipe: fedavg(...)." if callable(algorithm) else " Recipes such as fedavg() make one."
        raise TypeError(f"algorithm must be a FederatedAlgorithm or a Family, got {type(algorithm).__name__}.{hint}")
    if not isinstance(task, Task):
        raise TypeError(f"task must be a Task, got {type(task).__name__}. Write Task(module).")
    if population is not None:
        check_is_population(population)
    if not isinstance(rounds, Integral):
        raise TypeError(f"rounds must be a whole number, got {rounds!r}.")
    if rounds < 0:
        raise ValueError(f"rounds must be at least 0, got {rounds}.")


def check_earlier_run(trained: Any) -> None:
    """Raise a TypeError where what `resume` is to go on from is no result of `train`."""
    if not isinstance(trained, Trained):
        raise TypeError(f"resume goes on from what train(...) returned, got {kind_words(trained)}. To begin with a module or a "
                        "model file write train(algorithm, task, population, start=module, rounds=...); a run on disk goes on by "
                        "`fedtail run FILE --out FOLDER --resume`.")


def check_run_settings(engine: Any, channel: Any, fleet: Any, privacy: Any, evaluation: Any) -> None:
    """Raise a TypeError where one of these arguments of `train` is of another kind; the last three may be None."""
    check_engine(engine)
    check_kind("channel", channel, isinstance(channel, Channel), "a channel", "Write channel=PlainChannel(), say.")
    check_kind("fleet", fleet, fleet is None or _has(fleet, "population", "draw_cohort"), "a fleet, as LocalFleet makes one",
                "To train on a population write train(algorithm, task, population, rounds=...).")
    check_kind("privacy", privacy, privacy is None or isinstance(privacy, (PrivacyBudget, Ledger)), "a PrivacyBudget or a Ledger",
                "Write privacy=PrivacyBudget(epsilon=3.0, delta=1e-5), with a delta below one over the number of clients.")
    check_kind("evaluation", evaluation, evaluation is None or _has(evaluation, "round_with_evaluation"),
                "a FederatedEvaluation", "Write evaluation=FederatedEvaluation(...); clients that only judge the models are "
                "validation=Validation(population).")


def check_followers(validation: Any, logger: Any, on_round: Any) -> None:
    """Raise a TypeError where one of these arguments of `train` is of another kind, or `on_round` takes other arguments.

    Each may be None.
    """
    check_kind("validation", validation, validation is None or _has(validation, "better", "numbers", "population"),
                "a Validation", "Write validation=Validation(population), with the population of the validation clients.")
    check_kind("logger", logger, logger is None or _has(logger, "open_log"), "a logger of fedtail.loggers",
                'Write logger=TensorBoard("logs"), say.')
    check_kind("on_round", on_round, on_round is None or callable(on_round), "a function that is called with a Progress",
                "Write on_round=lambda progress: print(progress.round), say; of several write one that calls them.")
    if on_round is not None and not _takes_one(on_round):
        name = getattr(on_round, "__name__", type(on_round).__name__)
        written = name if name.isidentifier() else "after_round"
        raise TypeError("on_round must be a function of one argument, a Progress, got "
                        f"{name}{inspect.signature(on_round)}. Write def {written}(progress): ...")


def check_seed(seed: Any) -> None:
    """Raise a TypeError where the argument `seed` of `train` is neither None nor a whole number."""
    check_kind("seed", seed, seed is None or isinstance(seed, Integral), "a whole number", "Write seed=0, say.")


def _has(value: Any, *names: str) -> bool:
    """Whether an object has all these attributes."""
    return all(hasattr(value, name) for name in names)


def _takes_one(function: Any) -> bool:
    """Whether a function can be called with one argument; True where that is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):       # of some functions written in C
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True
