"""Theorem 5 of [PLMH23]: Algorithm 3 with smoothed weights on convex clients, against an optimum that is known.

Client k has the loss (w - c_k)' A_k (w - c_k) / 2 + b_k, the eigenvalues of A_k in [0, 1], and (lambda/2) |w|^2 is added.
Learning rate and smoothing are those of the theorem for each horizon T (`fedtail.theory.convex_step_size`, with its departures
from the print); the iterate is the averaged one. Two gaps are measured: of the objective that cohorts optimise, whose
expectation is exact, and of F_theta over all clients, which may stay away by the bias B / sqrt(theta m). Both optima are found
by proximal steps, each to a certificate of 1e-9 in value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedtail
from fedtail.data import Population
from fedtail.models import LeastSquares
from fedtail.theory import averaging_contraction, convex_step_size, expected_minibatch_superquantile, moreau_gradient
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Numbers, Study
from fedtail_studies.tables import Table
from fedtail_studies.theory import rates

DIM, CLIENTS, THETA = 4, 60, 0.5
SMOOTHNESS, STRENGTH = 1.0, 0.9                  # L and lambda
STATED = -1.0


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    horizons: tuple[int, ...] = (64, 128, 256, 512, 1024)
    local_steps: tuple[int, ...] = (1, 4)
    cohort: int = 20


class Quadratics(NamedTuple):
    """Clients, and their losses in closed form."""

    population: Population
    curvature: Tensor                            # (clients, dim, dim) A
    centre: Tensor                               # (clients, dim) c
    height: Tensor                               # (clients,) b

    def losses(self, w: Tensor) -> Tensor:
        away = w - self.centre
        return torch.einsum("ki,kij,kj->k", away, self.curvature, away) / 2 + self.height

    def objective(self, w: Tensor, cohort: int) -> Tensor:
        """What cohorts of that size optimise; with all clients F_theta itself, [PLMH23, eq. (6)]."""
        return expected_minibatch_superquantile(self.losses(w), cohort, THETA) + STRENGTH / 2 * w @ w

    def steepest(self, w: Tensor, radius: float) -> float:
        """G: a bound on every client's gradient in a ball, the regulariser included."""
        gradients = torch.einsum("kij,kj->ki", self.curvature, w - self.centre).norm(dim=1)
        return float(gradients.max()) + SMOOTHNESS * radius + STRENGTH * (float(w.norm()) + radius)


@lru_cache(maxsize=8)
def minimiser(seed: int, cohort: int) -> Tensor:
    """Of the clients of a seed, by proximal steps: each takes off nine tenths of the distance or more."""
    clients, w, reach = quadratic_clients(seed), torch.zeros(DIM, dtype=torch.float64), STRENGTH / 9
    for _ in range(8):
        w = w - moreau_gradient(lambda z: clients.objective(z, cohort), w, reach, tolerance=1e-9) / reach
    return w


def quadratic_clients(seed: int) -> Quadratics:
    """Made of least-squares examples, so that the mean of (x'w - y)^2 is the loss."""
    random, examples, curvature = np.random.default_rng([seed, 5]), [], []
    centre, height = 0.6 * random.normal(size=(CLIENTS, DIM)), random.uniform(0.1, 0.3, CLIENTS)
    for c, b in zip(centre, height, strict=True):
        turn = np.linalg.qr(random.normal(size=(DIM, DIM)))[0]
        values = np.concatenate([[0.0, 1.0], random.random(DIM - 2)])
        x = np.vstack([np.sqrt((DIM + 1) * values / 2)[:, None] * turn.T, np.zeros(DIM)])
        examples.append((x, x @ c + np.append(np.zeros(DIM), math.sqrt((DIM + 1) * b))))
        curvature.append(turn * values @ turn.T)
    return Quadratics(Population.from_clients(examples), torch.from_numpy(np.array(curvature)), torch.from_numpy(centre),
                      torch.from_numpy(height))


def measured(cell: Cell, local_steps: int, rounds: int) -> Numbers:
    """The gaps of the averaged iterate, with the theorem's own constants."""
    clients, cohort = quadratic_clients(cell.seed), cell.plan.cohort
    best = {size: minimiser(cell.seed, size) for size in (cohort, CLIENTS)}
    start = best[CLIENTS] + 0.5                  # |w0 - w*| = 1 in four dimensions
    distance = float((start - best[CLIENTS]).norm())
    lipschitz = clients.steepest(best[CLIENTS], distance)
    chosen = convex_step_size(SMOOTHNESS, lipschitz, STRENGTH, local_steps, rounds, distance, THETA, cohort)
    method = fedtail.delta_fl(THETA, cohort, form="smoothed", smoothing=chosen.smoothing, learning_rate=chosen.learning_rate,
                              batch_size=None, local_steps=local_steps, weight_decay=STRENGTH)
    iterate = fedtail.AveragedIterate(averaging_contraction(chosen.learning_rate, STRENGTH, local_steps))
    module = LeastSquares(DIM, bias=False).double()
    with torch.no_grad():
        module.linear.weight.copy_(start[None])
    trained = cell.train(replace(method, iterate=iterate), fedtail.Task(module), clients.population, rounds)
    found = next(trained.module.parameters()).detach().cpu().double()[0]
    gaps = {size: float(clients.objective(found, size) - clients.objective(best[size], size)) for size in best}
    return {"gap": gaps[cohort], "gap_all": gaps[CLIENTS], "bound": bound(rounds, local_steps, lipschitz, distance, cohort),
            "learning_rate": chosen.learning_rate, "smoothing": chosen.smoothing}


def bound(rounds: int, local_steps: int, lipschitz: float, distance: float, cohort: int) -> float:
    """Theorem 8, the full Theorem 5, with constant one and without its last term, the bias B / sqrt(theta m)."""
    condition, closeness = (SMOOTHNESS + STRENGTH) / STRENGTH, (STRENGTH * distance / lipschitz) ** 2
    one = max(1.0, math.log(closeness * THETA * cohort * rounds))
    two = max(1.0, math.log(closeness * rounds**2 / condition**2)) ** 2
    spread = math.log(cohort)
    return (STRENGTH * distance**2 * math.exp(-rounds / (16 * condition**1.5))
            + lipschitz**2 / (STRENGTH * rounds) * (1 / (THETA * cohort) + spread) * one
            + (lipschitz * condition / rounds) ** 2 / STRENGTH * (1 - 1 / local_steps + spread) * two)


def tables(results: Results) -> list[Table]:
    columns = {"what cohorts optimise": "gap", "F_theta": "gap_all", "bound without bias": "bound",
               "learning rate": "learning_rate", "smoothing": "smoothing"}
    return rates.rate_tables(results, "The averaged iterate: objective less its minimum", columns, "gap", STATED)


def figures(results: Results, folder: Path) -> list[Figure]:
    rates.draw(results, folder / "rate.png", "gap", "objective of cohorts less its minimum", STATED)
    return [Figure("rate.png", "Mean gap over seeds against the number of rounds, each horizon with its own step and smoothing.")]


THEOREM5 = Study(
    name="theorem5", paper="PLMH23", item="Theorem 5", title="Convergence where clients are convex", cost=Cost(1024, 4),
    full=Plan(), quick=Plan(seeds=2, horizons=(64, 128, 256, 512)), cells=partial(rates.cells, measured=measured), tables=tables,
    figures=figures,
    claims=(
        Claim("The gap falls as 1/T, up to logarithms.", "[PLMH23, Theorem 5, Remark 2]",
              partial(rates.falls_as_stated, path="gap", stated=STATED)),
        Claim("F_theta keeps to the bound of the full statement, with constant one and even without its bias.",
              "[PLMH23, Theorem 8]", partial(rates.keeps_to_bound, path="gap_all")),
    ),
)
