"""What the private quantiles study runs, and how its results are read.

A seed is a batch of runs: their means are compared, paired, and the deviation over all runs is kept by the mean square.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedtail_studies.private.quantile_releases import KINDS, METHODS, method_errors, wrap_errors, wrap_plans
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Numbers

WRAPPED = "wrap-around"


@dataclass(frozen=True)
class Plan:
    seeds: int = 5                               # batches
    runs: int = 20                               # of a batch: error against epsilon
    wrap_runs: int = 10                          # of a batch: sums that wrap around
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
    clients: tuple[int, ...] = (128, 512)
    bins: tuple[int, ...] = (32, 64)
    wrap_bins: tuple[int, ...] = (32, 64, 512)
    scales: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12)
    bits: tuple[int, ...] = (10, 11, 12, 18)


def case_name(kind: str, clients: int, bins: int) -> str:
    return f"{KINDS[kind]}, n {clients}, b {bins}"


def wrap_name(kind: str, bins: int) -> str:
    return f"{WRAPPED}, {KINDS[kind]}, b {bins}"


def cells(plan: Plan, seed: int) -> dict[str, Callable[[Cell], Numbers]]:
    found: dict[str, Callable[[Cell], Numbers]] = {
        case_name(kind, clients, bins): partial(errors_by_epsilon, kind=kind, clients=clients, bins=bins)
        for kind in KINDS for clients in plan.clients for bins in plan.bins}
    return found | {wrap_name(kind, bins): partial(errors_by_scale, kind=kind, bins=bins)
                    for kind in KINDS for bins in plan.wrap_bins}


def errors_by_epsilon(cell: Cell, kind: str, clients: int, bins: int) -> Numbers:
    """For each method, by epsilon: the worst error over levels, its square, and the average over levels; means of the batch."""
    plan: Plan = cell.plan
    numbers: Numbers = {method: {"worst": [], "square": [], "average": []} for method in METHODS}
    for place in cell.steps(len(plan.epsilons)):
        runs = [method_errors(kind, clients, bins, plan.epsilons[place], run) for run in batch(cell.seed, plan.runs)]
        for method, found in numbers.items():
            worst = np.array([max(run[method]) for run in runs])
            found["worst"].append(round(float(worst.mean()), 6))
            found["square"].append(round(float((worst**2).mean()), 8))
            found["average"].append(round(float(np.mean([run[method] for run in runs])), 6))
    return numbers


def errors_by_scale(cell: Cell, kind: str, bins: int) -> Numbers:
    """For each modulus, by scale: the average error over levels and its square, means of the batch; epsilon, both ways."""
    plan: Plan = cell.plan
    names = [*(f"{width} bits" for width in plan.bits), "optimal"]
    numbers: Numbers = {name: {"average": [], "square": []} for name in names} | {"epsilon": [], "right": []}
    for place in cell.steps(len(plan.scales)):
        scale = plan.scales[place]
        made, _, right = wrap_plans(scale, bins, max(plan.bits))
        runs = [wrap_errors(kind, scale, bins, tuple(plan.bits), run) for run in batch(cell.seed, plan.wrap_runs)]
        for name in names:
            found = np.array([run[name] for run in runs])
            numbers[name]["average"].append(round(float(found.mean()), 6))
            numbers[name]["square"].append(round(float((found**2).mean()), 8))
        numbers["epsilon"].append(made.epsilon)
        numbers["right"].append(right)
    return numbers


def batch(seed: int, runs: int) -> range:
    return range(seed * runs, (seed + 1) * runs)


def batches(results: Results, cell: str, method: str, what: str, place: int) -> list[float]:
    """One number for each batch."""
    return [results.numbers(cell, seed)[method][what][place] for seed in results.seeds]


def over_runs(results: Results, cell: str, method: str, what: str, place: int) -> tuple[float, float]:
    """Mean and standard deviation over all runs."""
    mean = statistics.mean(batches(results, cell, method, what, place))
    square = statistics.mean(batches(results, cell, method, "square", place))
    count = len(results.seeds) * results.plan["wrap_runs" if cell.startswith(WRAPPED) else "runs"]
    return mean, math.sqrt(max(0.0, square - mean**2) * count / max(1, count - 1))


def at_epsilon(results: Results, epsilon: float) -> int:
    return results.plan["epsilons"].index(epsilon)


def cases(results: Results) -> list[str]:
    plan = results.plan
    return [case_name(*case) for case in itertools.product(KINDS, plan["clients"], plan["bins"])]


def widest(results: Results) -> str:
    return f"{max(results.plan['bits'])} bits"


def printed_epsilons(results: Results, cell: str) -> list[float]:
    return results.numbers(cell, results.seeds[0])["epsilon"]


def near_scale(results: Results, cell: str, epsilon: float) -> int:
    """The scale whose printed epsilon is nearest."""
    there = printed_epsilons(results, cell)
    return min(range(len(there)), key=lambda place: abs(there[place] - epsilon))
