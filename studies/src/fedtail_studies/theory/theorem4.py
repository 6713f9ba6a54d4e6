"""Theorem 4 of [PLMH23]: Algorithm 3 on smooth clients that are not convex, by the gradient of the Moreau envelope (13).

A client's loss is the mean of 1 - exp(-|w - c|^2 / 2) over its points c: bounded by 1, L = 1, G = exp(-1/2), and not convex. What
is measured is E |grad Phi|^2 with mu = 2L at a random iterate, where Phi is the envelope of the expected superquantile of a
cohort, exact by `fedtail.theory`; the expectation over the iterate is a mean over iterates spread evenly along the run.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedtail
from fedtail.data import Population
from fedtail.theory import expected_minibatch_superquantile, moreau_gradient, nonconvex_step_size
from fedtail.training import Progress
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Numbers, Study
from fedtail_studies.tables import Table
from fedtail_studies.theory import rates

DIM, CLIENTS, POINTS, THETA = 3, 40, 6, 0.5
SMOOTHNESS, LIPSCHITZ, LOSS_BOUND = 1.0, math.exp(-0.5), 1.0      # L, G, B
STATED = -0.5


@dataclass(frozen=True)
class Plan:
    """Below 64 rounds the theorem's step is at its cap, and the rate cannot show."""

    seeds: int = 5
    horizons: tuple[int, ...] = (64, 256, 1024, 4096)
    local_steps: tuple[int, ...] = (1, 4)
    cohort: int = 20
    looked_at: int = 16                          # iterates of a run


class Point(nn.Module):
    """One point w, whatever the input."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), -1)


def well(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 - exp(-|w - c|^2 / 2)."""
    return 1 - torch.exp(-(outputs - targets).square().sum(1) / 2)


def clients_with_points(seed: int) -> tuple[Population, Tensor]:
    """The population, and its points (clients, points, dim)."""
    random = np.random.default_rng([seed, 4])
    centre = 0.8 * random.standard_normal((CLIENTS, 1, DIM))
    points = centre + 0.7 * random.standard_normal((CLIENTS, POINTS, DIM))
    return Population.from_clients([(np.zeros((POINTS, 1)), held) for held in points]), torch.from_numpy(points)


def measured(cell: Cell, local_steps: int, rounds: int) -> Numbers:
    """The squared gradient along a run with the theorem's step."""
    population, points = clients_with_points(cell.seed)
    start = torch.full((DIM,), 0.9, dtype=torch.float64)
    wanted = set(np.linspace(0, rounds - 1, cell.plan.looked_at).round().astype(int).tolist())
    iterates = [start]

    def keep(progress: Progress) -> None:
        if progress.round in wanted:
            iterates.append(progress.state.params.double().cpu())

    def objective(w: Tensor) -> Tensor:
        losses = (1 - torch.exp(-(w - points).square().sum(2) / 2)).mean(1)
        return expected_minibatch_superquantile(losses, cell.plan.cohort, THETA)

    rate = nonconvex_step_size(SMOOTHNESS, LIPSCHITZ, local_steps, rounds, LOSS_BOUND)
    method = fedtail.delta_fl(THETA, cell.plan.cohort, learning_rate=rate, batch_size=None, local_steps=local_steps)
    cell.train(method, fedtail.Task(Point(start), loss=well, error=well), population, rounds, keep)
    squares = [float(moreau_gradient(objective, w, 2 * SMOOTHNESS, SMOOTHNESS).square().sum()) for w in iterates]
    return {"square": statistics.mean(squares), "last": squares[-1], "bound": bound(rounds, local_steps, rate),
            "learning_rate": rate}


def bound(rounds: int, local_steps: int, rate: float) -> float:
    """What the proof of Theorem 7 ends in, with its constants; the gap at the start is at most B = 1."""
    noise = 4 * local_steps * rate * SMOOTHNESS * LIPSCHITZ**2 * (1 + 8 * SMOOTHNESS * rate * (local_steps - 1))
    return 4 * LOSS_BOUND / (local_steps * rate * rounds) + noise


def tables(results: Results) -> list[Table]:
    columns = {"at a random iterate": "square", "at the last one looked at": "last", "bound": "bound",
               "learning rate": "learning_rate"}
    return rates.rate_tables(results, "Squared gradient of the Moreau envelope", columns, "square", STATED)


def figures(results: Results, folder: Path) -> list[Figure]:
    rates.draw(results, folder / "rate.png", "square", "E |∇Φ|²", STATED)
    return [Figure("rate.png", "Squared gradient of the Moreau envelope at a random iterate, mean over seeds, each horizon with "
                               "its own step.")]


def notes(results: Results) -> list[str]:
    capped = [f"T = {rounds}, tau = {tau}" for tau in results.plan["local_steps"] for rounds in results.plan["horizons"]
              if results.mean(rates.name(tau, rounds), "learning_rate") >= 0.999 / (4 * tau * SMOOTHNESS)]
    at_cap = [f"The step of the theorem is at its cap 1 / (4 tau L) for {'; '.join(capped)}, where the rate does not show yet."]
    return [*(at_cap if capped else ()),
            "Where the run has settled (the last iterate) the gradient is far smaller than at a random one: the average is over "
            "the way there.",
            "The first plan had T = 16 in place of 4096, where the step is at its cap, and a fit of T^-0.38: "
            "`--set horizons=[16,64,256,1024]`."]


THEOREM4 = Study(
    name="theorem4", paper="PLMH23", item="Theorem 4", title="Convergence where clients are not convex", cost=Cost(4096, 8),
    full=Plan(), quick=Plan(seeds=2, horizons=(64, 256, 1024), looked_at=8), cells=partial(rates.cells, measured=measured),
    tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("The squared gradient falls at least as T^-1/2.", "[PLMH23, Theorem 4]",
              partial(rates.falls_as_stated, path="square", stated=STATED)),
        Claim("It keeps to the bound that the proof ends in.", "[PLMH23, Theorem 7]",
              partial(rates.keeps_to_bound, path="square")),
    ),
)
