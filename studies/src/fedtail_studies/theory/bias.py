"""What a cohort of m clients optimises, against the tail of all clients: bias (12) and variance of Property 9 of [PLMH23].

The expected superquantile of a cohort is exact (`fedtail.theory.expected_minibatch_superquantile`, no sampling). The variance of
a cohort's gradient is measured over drawn cohorts, with one gradient of norm G = 1 for each client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedtail.risk.superquantile import superquantile_weights
from fedtail.theory import bias_bound, expected_minibatch_superquantile, variance_bound
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import Difference, at_most, interval
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table

COHORTS = (10, 20, 50, 100, 200, 400)
TAIL_FRACTIONS = (0.8, 0.5, 0.25, 0.1)
DISTRIBUTIONS = ("uniform", "skewed", "two-point")
DIM = 8
SMALL = 8                                        # cohorts of up to an eighth of the clients show the rate


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    clients: int = 865                           # as many as train on EMNIST in the paper
    cohorts: tuple[int, ...] = COHORTS
    draws: int = 2000                            # of cohorts, for the variance


def client_losses(distribution: str, clients: int, theta: float, seed: int) -> torch.Tensor:
    """Losses in [0, 1]: evenly spread, mostly small, or the worst case of (12): a share theta of them 1, the others 0."""
    random = np.random.default_rng([seed, DISTRIBUTIONS.index(distribution)])
    if distribution == "uniform":
        return torch.from_numpy(random.random(clients))
    if distribution == "skewed":
        return torch.from_numpy(random.beta(0.5, 4.0, clients))
    return (torch.arange(clients) < round(theta * clients)).double()


def measured(cell: Cell, distribution: str) -> Numbers:
    """For every theta and m: bias, its bound, the variance of the cohort's gradient, its bound."""
    plan: Plan = cell.plan
    table: dict[str, Numbers] = {}
    for k in cell.steps(len(TAIL_FRACTIONS)):
        theta = TAIL_FRACTIONS[k]
        losses = client_losses(distribution, plan.clients, theta, cell.seed)
        whole = float(superquantile_weights(losses, torch.ones_like(losses), theta) @ losses)
        sizes = [m for m in plan.cohorts if m <= plan.clients]
        bias = [whole - float(expected_minibatch_superquantile(losses, m, theta)) for m in sizes]
        variance = [gradient_variance(losses, m, theta, plan.draws, cell.seed) for m in sizes]
        table[f"{theta:g}"] = {"cohorts": sizes, "bias": bias, "bias_bound": [bias_bound(1.0, theta, m) for m in sizes],
                               "variance": variance, "variance_bound": [variance_bound(1.0, theta, m) for m in sizes],
                               "slope": slope(plan, sizes, bias), "variance_slope": slope(plan, sizes, variance)}
    return {key.replace(".", "_"): found for key, found in table.items()}


def gradient_variance(losses: torch.Tensor, cohort: int, theta: float, draws: int, seed: int) -> float:
    """E |g_S - E g_S|^2 over cohorts, clients' gradients uniform on the unit sphere (G = 1)."""
    random = np.random.default_rng([seed, cohort])
    gradients = random.standard_normal((len(losses), DIM))
    gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
    ranks = random.random((draws, len(losses))).argpartition(cohort - 1, axis=1)[:, :cohort]       # (draws, cohort)
    order = np.take_along_axis(ranks, (-losses.numpy()[ranks]).argsort(1, kind="stable"), 1)
    weights = np.clip(theta * cohort - np.arange(cohort), 0, 1) / (theta * cohort)
    means = np.einsum("j,djk->dk", weights, gradients[order])
    return float(means.var(0, ddof=1).sum())


def slope(plan: Plan, sizes: list[int], values: list[float]) -> float:
    """Of log value against log m, for cohorts small beside the population: -1/2 is the rate of (12)."""
    small = [k for k, m in enumerate(sizes) if m <= plan.clients / SMALL]
    if len(small) < 2 or min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log([sizes[k] for k in small]), np.log([values[k] for k in small]), 1)[0])


def cells(plan: Plan, seed: int) -> dict:
    return {distribution: partial(measured, distribution=distribution) for distribution in DISTRIBUTIONS}


def _key(theta: float) -> str:
    return f"{theta:g}".replace(".", "_")


def _worst_ratio(results: Results, quantity: str) -> float:
    """The largest share of its bound that is used, over everything."""
    return max(value / bound for name in DISTRIBUTIONS for theta in TAIL_FRACTIONS for seed in results.seeds
               for found in (results.numbers(name, seed)[_key(theta)],)
               for value, bound in zip(found[quantity], found[f"{quantity}_bound"], strict=True))


def _smallest_bias(results: Results) -> float:
    return min(value for name in DISTRIBUTIONS for theta in TAIL_FRACTIONS for seed in results.seeds
               for value in results.numbers(name, seed)[_key(theta)]["bias"])


def _slopes(results: Results, name: str, path: str) -> Difference:
    return interval([value for theta in TAIL_FRACTIONS for value in results.values(name, f"{_key(theta)}.{path}")
                     if math.isfinite(value)])


def _rate_is_reached(results: Results) -> Finding:
    found = _slopes(results, "two-point", "slope")
    near = abs(found.mean + 0.5) <= 0.1
    return Finding(Verdict.AGREES if near else Verdict.DISAGREES,
                   f"bias falls as m^{found.mean:.2f} where a share theta of clients has loss 1 and the others 0; stated m^-0.5")


def _pessimistic(results: Results) -> Finding:
    uniform, skewed = (_slopes(results, name, "slope") for name in ("uniform", "skewed"))
    used = max(value / bound for name in ("uniform", "skewed") for seed in results.seeds
               for found in (results.numbers(name, seed)[_key(0.5)],) for m, value, bound
               in zip(found["cohorts"], found["bias"], found["bias_bound"], strict=True) if m >= 50)
    verdict = Verdict.AGREES if used < 0.1 and max(uniform.mean, skewed.mean) < -0.8 else Verdict.DISAGREES
    return Finding(verdict, f"losses without atoms: bias falls as m^{uniform.mean:.2f} (uniform) and m^{skewed.mean:.2f} "
                            f"(skewed), and at theta 0.5, m >= 50 it is at most {used:.1%} of the bound")


def tables(results: Results) -> list[Table]:
    shown = [m for m in (50, 100) if m in results.plan["cohorts"]] or results.plan["cohorts"][:1]
    made = []
    for m in shown:
        columns = ("bias", "bound (12)", "slope of bias", "variance", "bound, Property 9", "slope of variance")
        rows = [Row(f"{name}, {theta:g}", dict(zip(columns, _row(results, name, theta, m), strict=True)))
                for name in DISTRIBUTIONS for theta in TAIL_FRACTIONS]
        made.append(Table(f"Cohorts of {m} of {results.plan['clients']} clients, losses in [0, 1]", columns, tuple(rows),
                          digits=4, head="losses, theta"))
    return made


def _row(results: Results, name: str, theta: float, m: int) -> list[list[float]]:
    found = [results.numbers(name, seed)[_key(theta)] for seed in results.seeds]
    place = found[0]["cohorts"].index(m)
    listed = [[one[path][place] for one in found] for path in ("bias", "bias_bound", "variance", "variance_bound")]
    slopes = [[one[path] for one in found if one[path] is not None] for path in ("slope", "variance_slope")]
    return [listed[0], listed[1], slopes[0], listed[2], listed[3], slopes[1]]


def figures(results: Results, folder: Path) -> list[Figure]:
    with drawn(folder / "bias.png", columns=3, width=4.0, sharey=True) as axes:
        for axis, name in zip(axes, DISTRIBUTIONS, strict=True):
            for theta, colour in zip(TAIL_FRACTIONS, COLOURS, strict=False):
                found = results.numbers(name, results.seeds[0])[_key(theta)]
                axis.loglog(found["cohorts"], np.maximum(found["bias"], 1e-6), "o-", markersize=3, color=colour,
                            label=f"θ = {theta:g}")
                axis.loglog(found["cohorts"], found["bias_bound"], ":", color=colour)
            axis.set(title=name, xlabel="clients in a cohort, m", ylim=(1e-5, 2))
        axes[0].set_ylabel("bias; dotted: B / √(θm)")
        axes[0].legend()
    return [Figure("bias.png", "How far the expected tail of a cohort is below the tail of all clients; dotted, the bound (12).")]


BIAS = Study(
    name="bias", paper="PLMH23", item="equation (12) and Property 9", title="Bias and variance of a cohort's tail",
    cost=Cost(0, 1), full=Plan(), quick=Plan(seeds=2, draws=300), cells=cells, tables=tables,
    figures=figures,
    claims=(
        Claim("A cohort's expected tail differs from that of all clients by at most B / sqrt(theta m).", "[PLMH23, eq. (12)]",
              lambda results: at_most(_worst_ratio(results, "bias"), 1.0, "largest share of the bound that is used")),
        Claim("The difference has a sign: a cohort's tail is never above.", "[ours, fedtail.theory]",
              lambda results: at_most(-_smallest_bias(results), 1e-9, "largest excess of a cohort's tail")),
        Claim("The rate m^-1/2 is the right one in the worst case.", "[PLMH23, eq. (12)]", _rate_is_reached),
        Claim("The bound can be pessimistic: around m = 50 to 100 and theta = 1/2 the bias is small.",
              "[PLMH23, after Remark 2]", _pessimistic),
        Claim("A cohort's gradient varies by at most 8 G^2 / (theta m).", "[PLMH23, Property 9]",
              lambda results: at_most(_worst_ratio(results, "variance"), 1.0, "largest share of the bound that is used")),
    ),
)
