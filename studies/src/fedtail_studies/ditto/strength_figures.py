"""Pictures of Ditto's error in closed form and of Algorithm 7's steps, as figures 5.1 and 5.2 of [Li23]."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedtail.theory import ditto_error, ditto_strength
from fedtail_studies.ditto.gaussian_devices import POINTS, PROBLEMS
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.results import Results
from fedtail_studies.study import Figure

STEPS = "Theorem 14"                                     # the cell with distances by round


def draw_errors(path: Path) -> Figure:
    """Errors by lambda, with and without adversaries: figure 5.1."""
    with drawn(path) as axis:
        for name, colour in zip(("point estimation", "point estimation, 3 adversaries"), COLOURS, strict=False):
            grid, problem = np.linspace(0, 3, 61), PROBLEMS[name]
            found = [ditto_error(problem, float(one)) for one in grid]
            mean, spread = (np.array([getattr(one, key) for one in found]) for key in ("mean", "variance"))
            axis.plot(grid, mean, color=colour, label=name)
            axis.fill_between(grid, mean - 0.1 * spread**0.5, mean + 0.1 * spread**0.5, color=colour, alpha=0.15)
            axis.axvline(ditto_strength(problem), color=colour, linestyle=":")
        axis.set(xlabel="lambda", ylabel="squared error of benign devices")
        axis.legend()
    return Figure(path.name, "Error by lambda in closed form, as figure 5.1; bands are a tenth of a standard deviation, dotted "
                             "lines lambda*.")


def draw_related(path: Path) -> Figure:
    """Local, global and Ditto's errors and their variances by 1 / tau: figure 5.2."""
    grid = np.linspace(0.5, 6, 60)
    problems = [replace(POINTS, spread=1 / float(one)) for one in grid]
    with drawn(path, columns=2) as axes:
        shown = (("mean", "squared error", 0.6), ("variance", "its variance", 0.4))
        for axis, (key, label, most) in zip(axes, shown, strict=True):
            for name, colour in zip(("local", "global", "Ditto"), COLOURS, strict=False):
                at = [{"local": 0.0, "global": math.inf, "Ditto": ditto_strength(one)}[name] for one in problems]
                found = [getattr(ditto_error(one, strength), key) for one, strength in zip(problems, at, strict=True)]
                axis.plot(grid, found, color=colour, label=name)
            axis.set(xlabel="1 / tau", ylabel=label, ylim=(0, most))
        axes[0].legend()
    return Figure(path.name, "Local, global and Ditto as devices become more related, in closed form, as figure 5.2.")


def draw_steps(results: Results, path: Path) -> Figure:
    """Distances to the optima by round."""
    with drawn(path) as axis:
        rounds = results.numbers(STEPS, results.seeds[0])["round"]
        for key, colour in zip(("shared", "own"), COLOURS, strict=False):
            axis.loglog(rounds, np.mean(results.lists(STEPS, key), 0), color=colour, label=f"{key} models")
        axis.loglog(rounds, [1 / one for one in rounds], color="#4d4d4d", linestyle=":", label="1 / t")
        axis.set(xlabel="rounds", ylabel="squared distance to the optimum")
        axis.legend()
    return Figure(path.name, "Algorithm 7 with the steps of Lemma 20, one stochastic gradient a round: mean over seeds.")


def figures(results: Results, folder: Path) -> list[Figure]:
    """Errors by lambda, by relatedness, and distances by round."""
    return [draw_errors(folder / "lambda.png"), draw_related(folder / "related.png"), draw_steps(results, folder / "steps.png")]
