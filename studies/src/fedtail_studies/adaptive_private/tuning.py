"""Settings by search, with the same number of trials for every method; and what is then reported.

The search is made once, in the first seed: of the settings tried, that with the lowest score on validation examples. Every seed
trains with it and reports scores on test examples.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from fedtail.private_optim import PrivateMethod
from fedtail_studies.adaptive_private.training import Length, Problem, course, noise_multiplier, validated
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Measure, Numbers

Settings = Mapping[str, float]


def leave(settings: Settings, problem: Problem) -> Callable[[nn.Module], None]:
    """Start from the first model as it is."""
    return lambda module: None


def unchanged(method: PrivateMethod) -> PrivateMethod:
    return method


@dataclass(frozen=True)
class Method:
    """How settings make an optimiser, and the values that each of them may have."""

    name: str
    make: Callable[[Settings, float, Problem], PrivateMethod]      # settings, noise multiplier, problem
    choices: Mapping[str, Sequence[float]]
    releases: int = 1                                  # in a step: noise grows by the root, at the same epsilon
    start: Callable[[Settings, Problem], Callable[[nn.Module], None]] = leave


@dataclass(frozen=True)
class Case:
    """A method on a problem at some epsilon; where `settings_of` names another case, its settings are used, else searched for."""

    name: str
    method: Method
    problem: Callable[[Cell], Problem]
    length: Length
    epsilon: float = math.inf
    noise: float | None = None                         # the noise multiplier, where it is given in place of epsilon
    settings_of: str = ""
    fixed: Settings = field(default_factory=dict)      # overrides what was found
    change: Callable[[PrivateMethod], PrivateMethod] = unchanged


def search_name(case: str) -> str:
    return f"settings: {case}"


def tried_settings(name: str, choices: Mapping[str, Sequence[float]], count: int) -> list[dict[str, float]]:
    """All combinations of the choices, or `count` of them drawn at random, always the same for that name.

    >>> tried_settings("m", {"rate": (1.0, 2.0), "clip": (0.5,)}, 4)
    [{'rate': 1.0, 'clip': 0.5}, {'rate': 2.0, 'clip': 0.5}]
    """
    every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    return every if len(every) <= count else random.Random(name).sample(every, count)


def lowest(tried: Sequence[Settings], scores: Sequence[float]) -> Numbers:
    """The settings with the lowest score, and all that were tried with theirs."""
    best = min(range(len(tried)), key=scores.__getitem__)
    return {"chosen": dict(tried[best]), "score": scores[best],
            "tried": [[*one.values(), score] for one, score in zip(tried, scores, strict=True)]}


def made(cell: Cell, case: Case, settings: Settings, problem: Problem) -> PrivateMethod:
    """The method with these settings, and the noise of the case."""
    noise = case.noise
    if noise is None:
        noise = noise_multiplier(case.epsilon, cell.plan.delta, case.length, len(problem.train.y))
    return case.change(case.method.make(settings, noise * case.method.releases**0.5, problem))


def searched(cell: Cell, case: Case) -> Numbers:
    """The settings that were tried with their validation scores, and those with the lowest."""
    problem, tried = case.problem(cell), tried_settings(case.method.name, case.method.choices, cell.plan.trials)
    return lowest(tried, [validated(cell, problem, made(cell, case, one, problem), case.length, case.method.start(one, problem))
                          for one in tried])


def measured(cell: Cell, case: Case) -> Numbers:
    """The test scores of a run with the settings that were found."""
    found = cell.numbers(search_name(case.settings_of or case.name), seed=0)["chosen"]
    settings, problem = {**found, **case.fixed}, case.problem(cell)
    return course(cell, problem, made(cell, case, settings, problem), case.length, cell.plan.evaluations,
                  case.method.start(settings, problem))


def cells_of(cases: Sequence[Case], seed: int) -> dict[str, Measure]:
    """Each case, in the first seed after its search."""
    made: dict[str, Measure] = {}
    for case in cases:
        if seed == 0 and not case.settings_of:
            made[search_name(case.name)] = partial(searched, case=case)
        made[case.name] = partial(measured, case=case)
    return made


# for pages


def settings_note(results: Results, cases: Sequence[Case]) -> str:
    """What was chosen for each case, for the notes of a page."""
    return chosen_note(results, [case.name for case in cases if not case.settings_of])


def chosen_note(results: Results, names: Sequence[str]) -> str:
    """What the searches of these names chose, in one sentence."""
    said = [f"{name} ({', '.join(f'{key} {value:g}' for key, value in results.numbers(search_name(name), 0)['chosen'].items())})"
            for name in names]
    return f"Settings chosen: {'; '.join(said)}."


def on_the_edge(results: Results, cases: Sequence[Case]) -> list[str]:
    """Cases whose chosen learning rate is the smallest or the largest that was tried."""
    found = []
    for case in cases:
        if not case.settings_of:
            cell = results.numbers(search_name(case.name), 0)
            rates = [one[list(case.method.choices).index("rate")] for one in cell["tried"]]
            if cell["chosen"]["rate"] in (min(rates), max(rates)):
                found.append(case.name)
    return found


def search_note(results: Results, cases: Sequence[Case]) -> str:
    """How settings were chosen, and which learning rates are at the end of their range."""
    edge = on_the_edge(results, cases)
    said = f" At the end of their range are the rates of {', '.join(edge)}." if edge else ""
    return (f"Settings by search in the first seed: {results.plan['trials']} for every method, all that there are or drawn at "
            "random, and that with the lowest score on validation examples. Every seed trains with it; the scores are of test "
            f"examples. Ranges and steps were set after trial runs of that seed. No epsilon covers the search.{said}")
