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
from fedtail_studies.tables import Row, Table

Settings = Mapping[str, float]


def leave(module: nn.Module, settings: Settings, problem: Problem) -> None:
    """Start from the first model as it is."""


def unchanged(method: PrivateMethod) -> PrivateMethod:
    return method


@dataclass(frozen=True)
class Method:
    """How settings make an optimiser, and the values that each of them may have."""

    name: str
    make: Callable[[Settings, float, Problem], PrivateMethod]      # settings, noise multiplier, problem
    choices: Mapping[str, Sequence[float]]
    releases: int = 1                                  # in a step: noise grows by the root, at the same epsilon
    start: Callable[[nn.Module, Settings, Problem], None] = leave


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


def tried_settings(method: Method, count: int) -> list[dict[str, float]]:
    """All combinations of the method's choices, or `count` of them drawn at random, the same for every study of that name.

    >>> len(tried_settings(Method("m", None, {"rate": (1.0, 2.0), "clip": (1.0, 2.0, 3.0)}), 4))
    4
    """
    every = [dict(zip(method.choices, values, strict=True)) for values in itertools.product(*method.choices.values())]
    return every if len(every) <= count else random.Random(method.name).sample(every, count)


def made(cell: Cell, case: Case, settings: Settings, problem: Problem) -> PrivateMethod:
    """The method with these settings, and the noise of the case."""
    noise = case.noise
    if noise is None:
        noise = noise_multiplier(case.epsilon, cell.plan.delta, case.length, len(problem.train.y))
    return case.change(case.method.make(settings, noise * case.method.releases**0.5, problem))


def searched(cell: Cell, case: Case) -> Numbers:
    """The settings that were tried with their validation scores, and those with the lowest."""
    problem, tried = case.problem(cell), tried_settings(case.method, cell.plan.trials)
    scores = [validated(cell, problem, made(cell, case, one, problem), case.length,
                        partial(case.method.start, settings=one, problem=problem)) for one in tried]
    best = min(range(len(tried)), key=scores.__getitem__)
    return {"chosen": tried[best], "score": scores[best], "tried": [[*one.values(), score]
                                                                   for one, score in zip(tried, scores, strict=True)]}


def measured(cell: Cell, case: Case) -> Numbers:
    """The test scores of a run with the settings that were found."""
    found = cell.numbers(search_name(case.settings_of or case.name), seed=0)["chosen"]
    settings, problem = {**found, **case.fixed}, case.problem(cell)
    return course(cell, problem, made(cell, case, settings, problem), case.length, cell.plan.evaluations,
                  partial(case.method.start, settings=settings, problem=problem))


def cells_of(cases: Sequence[Case], seed: int) -> dict[str, Measure]:
    """Each case, in the first seed after its search."""
    made: dict[str, Measure] = {}
    for case in cases:
        if seed == 0 and not case.settings_of:
            made[search_name(case.name)] = partial(searched, case=case)
        made[case.name] = partial(measured, case=case)
    return made


# for pages


def settings_table(results: Results, cases: Sequence[Case]) -> Table:
    """What was chosen for each case, and how many settings were tried."""
    names = list(dict.fromkeys(name for case in cases if not case.settings_of for name in case.method.choices))
    rows = []
    for case in cases:
        if not case.settings_of:
            found = results.numbers(search_name(case.name), 0)
            rows.append(Row(case.name, {**{name: [value] for name, value in found["chosen"].items()},
                                        "tried": [len(found["tried"])],
                                        "validation score": [math.nan if found["score"] is None else found["score"]]}))
    return Table("Settings chosen", (*names, "tried", "validation score"), tuple(rows), digits=4)


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
            f"examples. No epsilon covers the search.{said}")
