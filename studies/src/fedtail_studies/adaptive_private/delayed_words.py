"""DP2 on bags of words: figures 6.8 to 6.12, 6.14, 6.15, 6.18, and rows of tables 6.11 and 6.14 of [Li23].

Generated documents stand in for IMDB, as in `adadps_words`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedtail.private_optim import PrivateOptimizer
from fedtail.private_optim.per_example import mean_gradient
from fedtail.private_optim.transforms import DelayedGradient
from fedtail.task import Task
from fedtail_studies.adaptive_private import words
from fedtail_studies.adaptive_private.optimisers import Ranges, methods
from fedtail_studies.adaptive_private.pages import below, claim, draw_courses, draw_lines, errors, missing, near, scores_table
from fedtail_studies.adaptive_private.projected import projected_adagrad
from fedtail_studies.adaptive_private.side_information import COUNTS, ERROR
from fedtail_studies.adaptive_private.training import Length, trained_module
from fedtail_studies.adaptive_private.tuning import Case, Method, cells_of, made, search_name, search_note, settings_note
from fedtail_studies.judging import difference, lower
from fedtail_studies.plans import with_fields
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

RANGES: Ranges = replace(COUNTS, plain_rates=(0.03, 0.1), divided_rates=(0.1, 0.3, 1.0, 3.0), phases=(10, 25),
                         delayed_epsilons=(1e-5,))
DELAYED, PUBLIC, PROJECTED = "DP2-RMSProp", "AdaDPS, public data", "projected AdaGrad"
EXTRA, FIRST = "DP2, extra query", "DP2, noise first"
MAIN = ("DP-SGD", "DP-RMSProp", "DP-AdaGrad", "PDA-DPMD", PUBLIC, DELAYED, "DP2-AdaGrad", EXTRA, FIRST)
COMPARED = ("DP-SGD", "DP-RMSProp", DELAYED)           # over epsilon, and with more computation
FREE = ("SGD", "RMSProp", "delayed RMSProp")
NEAR = 2.0                                             # points of error that count as the same


@dataclass(frozen=True)
class DelayedPlan:
    """Documents of `words`; epsilon is that of figure 6.10 for IMDB, and those of the curve."""

    seeds: int = 5
    scale: float = 1.0
    batch: int = 256
    steps: int = 800
    epsilon: float = 3.0
    epsilons: tuple[float, ...] = (1.0, 8.0)           # beside `epsilon`
    delta: float = 1e-5
    phases: tuple[int, ...] = (2, 5, 10, 25, 50, 200)
    ratio_phases: tuple[int, ...] = (5, 10, 25, 50, 100)
    more: int = 4                                      # times the batch, in figure 6.15
    trials: int = 8
    evaluations: int = 10


def at_epsilon(name: str, epsilon: float) -> str:
    return f"{name}, epsilon {epsilon:g}"


def with_phase(phase: int) -> str:
    return f"{DELAYED}, s = {phase}"


def with_more(name: str, times: int) -> str:
    return f"{name} ({times}x)"


def every_method() -> dict[str, Method]:
    """Those of `optimisers`, and the projected AdaGrad, which has two releases a step."""
    rates = (1e-3, 1e-2, 1e-1, 1.0)
    projected = Method(PROJECTED, projected_adagrad, {"rate": rates, "clip": (1.0,), "epsilon": (1e-3, 1e-1)}, releases=2)
    found = {**methods(RANGES), PROJECTED: projected}
    two = {"delayed_rate": RANGES.divided_rates[1:3]}      # with two of everything else, eight settings
    free = {"rate": (3e-4,), "delayed_rate": (0.01, 0.1), "epsilon": (1e-3, 1e-2)}      # gradients are exact, and not clipped
    found["delayed RMSProp"] = replace(found["delayed RMSProp"], choices={**found["delayed RMSProp"].choices, **free})
    return found | {name: replace(found[name], choices={**found[name].choices, **two})
                    for name in (DELAYED, "DP2-AdaGrad", EXTRA)}


def cases(plan: DelayedPlan) -> list[Case]:
    """Everything that is trained, in order."""
    length, kinds = Length(plan.batch, plan.steps), every_method()
    main = [Case(name, kinds[name], words.by_counts, length, plan.epsilon) for name in (*MAIN, PROJECTED)]
    free = [Case(name, kinds[name], words.by_counts, length) for name in FREE]
    budgets = [Case(at_epsilon(name, epsilon), kinds[name], words.by_counts, length, epsilon)
               for epsilon in plan.epsilons for name in COMPARED]
    more = [Case(with_more(name, plan.more), kinds[name], words.by_counts, replace(length, batch=plan.more * plan.batch),
                 plan.epsilon, settings_of=name) for name in COMPARED]
    delayed = next(case for case in main if case.name == DELAYED)
    phases = [replace(delayed, name=with_phase(phase), settings_of=DELAYED, fixed={"phase": phase}) for phase in plan.phases]
    return [*main, *free, *budgets, *more, *phases]


# how far gradients move while a preconditioner is used


def ratio_name(phase: int) -> str:
    return f"h({phase})"


def gradient_ratio(cell: Cell, phase: int) -> Numbers:
    """The largest ||g^t||_1 / ||G / s||_1 in delayed phases of DP2: h(s) of [Li23, section 6.9.1] without its d epsilon.

    g^t is the exact gradient of 2,000 training documents, clipped documents aside, at ten steps of every phase; G / s the mean of
    the gradients released in the phase before.
    """
    plan: DelayedPlan = cell.plan
    case = next(one for one in cases(plan) if one.name == DELAYED)
    settings = {**cell.numbers(search_name(DELAYED), seed=0)["chosen"], "phase": phase}
    problem, found = case.problem(cell), []
    method, every = made(cell, case, settings, problem), max(1, phase // 10)
    assert isinstance(method.transform, DelayedGradient)
    phases, some = method.transform.phases, problem.train.rows(slice(2000))

    def look(step: int, module: nn.Module, optimizer: PrivateOptimizer) -> None:
        if phases.is_delayed(step - 1) and step % every == 0:
            released = torch.as_tensor(optimizer.state_dict()["transform"][1]) / phase
            gradient = mean_gradient(Task(module, problem.loss), some.x.float(), some.y)
            found.append(float(gradient.abs().sum() / released.abs().sum()))

    trained_module(cell, problem, method, case.length, look)
    return {"ratio": max(found), "median": sorted(found)[len(found) // 2]}


def cells(plan: DelayedPlan, seed: int) -> dict[str, Measure]:
    ratios = {ratio_name(phase): partial(gradient_ratio, phase=phase) for phase in plan.ratio_phases}
    return {**cells_of(cases(plan), seed), **ratios}


# pages


IMDB = errors({"DP-SGD": 0.687, "DP-RMSProp": 0.713, "PDA-DPMD": 0.703, PUBLIC: 0.826, DELAYED: 0.815, EXTRA: 0.799, FIRST: 0.643,
               "RMSProp": 0.87})


def tables(results: Results) -> list[Table]:
    """Errors beside those of IMDB; by epsilon; with more computation; by the delay; h(s)."""
    plan = plan_of(results)
    by_budget = [Row(name, {f"epsilon {epsilon:g}": results.values(cell_at(name, epsilon, plan.epsilon), "test")
                            for epsilon in sorted((*plan.epsilons, plan.epsilon))} | {f"{plan.more}x batch": results.values(
                                with_more(name, plan.more), "test")}) for name in COMPARED]
    delays = Row(DELAYED, {f"s = {phase}": results.values(with_phase(phase), "test") for phase in plan.phases})
    ratios = [Row(title, {f"s = {phase}": results.values(ratio_name(phase), path) for phase in plan.ratio_phases})
              for title, path in (("largest", "ratio"), ("median", "median"))]
    return [
        scores_table(results, f"Epsilon {plan.epsilon:g} (tables 6.11, 6.14, figures 6.10, 6.13, 6.14, 6.18)", (*MAIN, PROJECTED),
                     ERROR, {"IMDB, printed": IMDB}),
        scores_table(results, "Without privacy (figure 6.8)", FREE, ERROR, {"IMDB, printed": IMDB}),
        Table("Error in percent by epsilon (figures 6.11, 6.15)", tuple(by_budget[0].ours), tuple(by_budget)),
        Table("Error in percent by delay (figure 6.12)", tuple(delays.ours), (delays,)),
        Table("Ratio of gradient norms, h(s) (figure 6.9)", tuple(ratios[0].ours), tuple(ratios), head="over steps"),
    ]


def plan_of(results: Results) -> DelayedPlan:
    """The plan that results were made by."""
    return with_fields(DelayedPlan(), results.plan)


def cell_at(name: str, epsilon: float, main: float) -> str:
    """The cell of a method at an epsilon, which may be the study's main one."""
    return name if epsilon == main else at_epsilon(name, epsilon)


def figures(results: Results, folder: Path) -> list[Figure]:
    plan = results.plan
    budgets = sorted((*plan["epsilons"], plan["epsilon"]))
    by_budget = {name: {epsilon: cell_at(name, epsilon, plan["epsilon"]) for epsilon in budgets} for name in COMPARED}
    return [
        draw_courses(results, folder, "courses.png", ("DP-SGD", "DP-RMSProp", "DP-AdaGrad", DELAYED, "DP2-AdaGrad", PUBLIC),
                     "test error, %", "Mean over seeds; as figures 6.10, 6.14 and 6.17."),
        draw_courses(results, folder, "ablations.png", (DELAYED, EXTRA, FIRST, PROJECTED), "test error, %",
                     "DP2, its ablations and the projected AdaGrad, mean over seeds; as figures 6.13 and 6.18."),
        draw_courses(results, folder, "without_privacy.png", FREE, "test error, %", "Without privacy, mean over seeds; as "
                     "figure 6.8, which has training loss."),
        draw_lines(results, folder, "epsilon.png", by_budget, ("epsilon", "test error, %"),
                   "By epsilon; as figures 6.11 and 6.15."),
        draw_lines(results, folder, "delay.png", {DELAYED: {phase: with_phase(phase) for phase in plan["phases"]}},
                   ("steps of a phase, s", "test error, %"), "By the delay; as figure 6.12."),
        draw_lines(results, folder, "ratio.png", {"h(s)": {phase: ratio_name(phase) for phase in plan["ratio_phases"]}},
                   ("steps of a phase, s", "h(s)"), "The largest ratio of the gradient's norm to that of the mean that the "
                   "preconditioner is made of; as figure 6.9.", path="ratio"),
    ]


# claims


def best_in_the_middle(results: Results) -> Finding:
    """Whether the best delay, by the mean over seeds, is neither end, and is below both ends."""
    phases = results.plan["phases"]
    best = min(phases, key=lambda phase: results.mean(with_phase(phase), "test"))
    if best in (phases[0], phases[-1]):
        ends = difference(results.values(with_phase(best), "test"), results.values(with_phase(phases[1]), "test"))
        what = f"the best delay is the end s = {best}; s = {phases[1]} less it:"
        return lower(replace(ends, mean=-ends.mean), False, what=what)
    return below(results, tuple((with_phase(best), with_phase(end)) for end in (phases[0], phases[-1])))


def most_delays_help(results: Results) -> Finding:
    """Whether all delays but the shortest and the longest have a lower error than DP-SGD."""
    inner = results.plan["phases"][1:-1]
    return below(results, tuple((with_phase(phase), "DP-SGD") for phase in inner))


def ratio_grows(results: Results) -> Finding:
    """Whether h(s) is larger at the longest delay than at the shortest."""
    first, last = (ratio_name(results.plan["ratio_phases"][place]) for place in (0, -1))
    return below(results, ((first, last),), path="ratio")


def at_every_epsilon(results: Results) -> Finding:
    """Whether DP2 has the lower error at each epsilon."""
    plan = results.plan
    return below(results, tuple((cell_at(DELAYED, epsilon, plan["epsilon"]), cell_at(name, epsilon, plan["epsilon"]))
                                for epsilon in sorted((*plan["epsilons"], plan["epsilon"])) for name in COMPARED[:2]))


def more_helps(results: Results) -> Finding:
    """Whether a larger batch at the same epsilon and steps lowers every error."""
    return below(results, tuple((with_more(name, results.plan["more"]), name) for name in COMPARED))


CLAIMS: tuple[Claim, ...] = (
    claim("DP2-RMSProp has a lower error than DP-SGD and DP-RMSProp.", "figure 6.10", below,
          ((DELAYED, "DP-SGD"), (DELAYED, "DP-RMSProp"))),
    claim("It has at each epsilon.", "figure 6.11", at_every_epsilon),
    claim("DP2-AdaGrad has a lower error than DP-SGD and DP-AdaGrad.", "figure 6.14", below,
          (("DP2-AdaGrad", "DP-SGD"), ("DP2-AdaGrad", "DP-AdaGrad"))),
    claim("DP2 has a lower error than PDA-DPMD, which reads public data.", "table 6.11", below, ((DELAYED, "PDA-DPMD"),)),
    claim(f"DP2 has the error of AdaDPS with public data, to {NEAR:g} points.", "table 6.11", near, ((DELAYED, PUBLIC),), NEAR),
    claim("Without privacy a delayed preconditioner costs nothing: RMSProp with and without delay have the same error, to "
          f"{NEAR:g} points.", "figure 6.8", near, (("delayed RMSProp", "RMSProp"),), NEAR),
    claim("A moderate delay is the best: shorter and longer ones have the larger error.", "figure 6.12", best_in_the_middle),
    claim("Nearly every delay helps: all but the shortest and the longest have a lower error than DP-SGD.", "figure 6.12",
          most_delays_help),
    claim("h(s) grows with the delay.", "figure 6.9", ratio_grows),
    claim("The first ablation, two releases a step, has the larger error at the same epsilon.", "table 6.14", below,
          ((DELAYED, EXTRA),)),
    claim("The second ablation, noise before the preconditioner, has the larger error.", "table 6.14", below,
          ((DELAYED, FIRST),)),
    claim("An AdaGrad whose gradients and preconditioner are made private separately has the larger error.", "figure 6.18", below,
          ((DELAYED, PROJECTED),)),
    claim("Batches four times as large, at the same epsilon and number of steps, lower every error.", "figure 6.15", more_helps),
    missing("Accuracies on IMDB and StackOverflow are as printed.", "tables 6.11, 6.14", "their features are not at hand; other "
            "documents stand in, and printed numbers are shown beside"),
)


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    return [
        f"Documents as in `adadps_words`; {words.TRAIN:,} to train on, batch {plan['batch']}, {plan['steps']} steps, delta "
        f"{plan['delta']:g} (IMDB: 25,000 reviews, batch 64, 39,000 steps). Phases are s1 = s2 = s steps.",
        "The ablation with an extra query and the projected AdaGrad have two releases a step: their noise is the root of two "
        "times larger, so that epsilon is the same. The thesis lets epsilon grow instead.",
        "The projected AdaGrad's subspace has 50 directions, of the public gradients at the first model, and stays.",
        "Delays, h(s) and larger batches have the settings found for DP2 and the others; only what the row says is changed.",
        "h(s) is without d epsilon, which does not depend on s.",
        words.AVERAGED_NOTE,
        search_note(results, cases(plan_of(results))),
        settings_note(results, cases(plan_of(results))),
    ]


QUICK = DelayedPlan(seeds=3, scale=0.25, batch=128, steps=150, epsilons=(8.0,), phases=(5, 25, 75), ratio_phases=(5, 25),
                    trials=4, evaluations=5)
DP2_WORDS = Study(
    name="dp2_words", paper="Li23", item="figures 6.8 to 6.12, 6.14, 6.15, 6.18, tables 6.11, 6.14 (a stand-in for IMDB)",
    title="DP2 on generated bags of words", cost=Cost(0, 12), full=DelayedPlan(), quick=QUICK, cells=cells, tables=tables,
    figures=figures, notes=notes, claims=CLAIMS)
