"""Three clients with a Gaussian each, and one point w for all of them [LPMH21, figure 3].

The loss of a sample xi is |xi - w|^2, so that F_k(w) = |w - mu_k|^2 + 2. At theta = 1 the best point is the centroid. At theta =
2/3 the objective is the mean of the two largest losses. The paper says its minimiser is the midpoint of the longest side of the
triangle of means; that holds where the angle opposite that side is right or obtuse. In an acute triangle it is the circumcentre.
Both triangles are trained here by Algorithm 3, on samples; the exact points are those of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

import fedtail
from fedtail.data import Population, three_gaussians
from fedtail.models import LeastSquares
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, lower
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study, Verdict
from fedtail_studies.tables import Row, Table

TRIANGLES = {"obtuse": ((0.0, 0.0), (1.0, 0.4), (3.0, 0.0)), "acute": ((0.0, 0.0), (1.4, 2.0), (3.0, 0.0))}
THETA = 2 / 3
MIXTURES = 20_000
REACHED = 0.01                                   # how near a trained point has to come to be called the exact one


@dataclass(frozen=True)
class Plan:
    seeds: int = 5
    examples: int = 20_000                       # of each client
    rounds: int = 600


def trained_point(cell: Cell, triangle: str, theta: float) -> Numbers:
    """Train a point, and judge it on the mixtures of the true Gaussians."""
    sample = three_gaussians(cell.plan.examples, TRIANGLES[triangle], seed=cell.seed)
    clients = torch.arange(3).repeat_interleave(sample.size)
    people = Population.from_arrays(torch.ones(len(clients), 1), sample.targets, clients)      # the model is its one weight
    schedule = fedtail.StepDecay(0.5, max(1, cell.plan.rounds // 12))
    method = fedtail.delta_fl(theta, 3, learning_rate=0.25, batch_size=None, schedule=schedule)
    trained = cell.train(method, fedtail.Task(LeastSquares(1, outputs=2, bias=False)), people, cell.plan.rounds)
    point = trained.state.params.double().cpu().numpy()
    held = [people.client(k)[1].double() for k in range(3)]
    means, heights = np.stack([x.mean(0).numpy() for x in held]), np.array([float(x.var(0, unbiased=False).sum()) for x in held])
    away = {name: float(np.linalg.norm(point - exact)) for name, exact in exact_points(means, heights).items()}
    losses = mixture_losses(point, TRIANGLES[triangle])
    return {"point": point.tolist(), "distance": away, "worst": float(losses.max()), "mean": float(losses.mean()),
            "p90": float(np.percentile(losses, 90))}


def exact_points(means: np.ndarray, heights: np.ndarray) -> dict[str, np.ndarray]:
    """Centroid, midpoint of the longest side, and the point where all losses |w - mean|^2 + height are equal.

    For equal heights that is the circumcentre; the heights of samples, their variances, differ a little.
    """
    pairs = [(0, 1), (0, 2), (1, 2)]
    first, second = max(pairs, key=lambda pair: float(np.linalg.norm(means[pair[0]] - means[pair[1]])))
    normal = 2 * (means[1:] - means[0])
    squares = (means**2).sum(1) + heights
    circumcentre = np.linalg.solve(normal, squares[1:] - squares[0])
    return {"centroid": means.mean(0), "midpoint": (means[first] + means[second]) / 2, "circumcentre": circumcentre}


def mixture_losses(point: np.ndarray, means: Sequence[Sequence[float]]) -> np.ndarray:
    """F(w; p_pi) for mixtures pi drawn uniformly from those of conformity at least 2/3: no weight above 1/2."""
    random = np.random.default_rng(0)
    weights = random.dirichlet(np.ones(3), 8 * MIXTURES)
    weights = weights[weights.max(1) <= 1 / (3 * THETA)][:MIXTURES]
    return weights @ (((np.asarray(means) - point) ** 2).sum(1) + 2)


def cells(plan: Plan, seed: int) -> dict:
    return {_name(triangle, theta): partial(trained_point, triangle=triangle, theta=theta)
            for triangle in TRIANGLES for theta in (1.0, THETA)}


def _name(triangle: str, theta: float) -> str:
    return f"{triangle}, theta {'1' if theta == 1 else '2/3'}"


def tables(results: Results) -> list[Table]:
    columns = {"distance to centroid": "distance.centroid", "to midpoint": "distance.midpoint",
               "to circumcentre": "distance.circumcentre", "worst mixture": "worst", "mean over mixtures": "mean",
               "90th percentile": "p90"}
    rows = [Row(_name(triangle, theta), {title: results.values(_name(triangle, theta), path) for title, path in columns.items()})
            for triangle in TRIANGLES for theta in (1.0, THETA)]
    return [Table("Where the point is, and its loss on mixtures of conformity at least 2/3", tuple(columns), tuple(rows),
                  digits=3, head="triangle")]


def _reaches(triangle: str, theta: float, point: str, results: Results) -> Finding:
    name = _name(triangle, theta)
    return at_most(max(results.values(name, f"distance.{point}")), REACHED, f"{name}, largest distance to the {point}")


def _worst_is_lower(results: Results) -> Finding:
    pairs = [(triangle, results.difference(_name(triangle, THETA), _name(triangle, 1.0), "worst")) for triangle in TRIANGLES]
    return all_of(*(lower(found, True, what=f"{triangle}: worst mixture, theta 2/3 less theta 1,") for triangle, found in pairs))


def _both_have_their_mixtures(results: Results) -> Finding:
    """At their own vertices of the polytope each point is better than the other."""
    findings = []
    for triangle in TRIANGLES:
        tail, mean = (np.array(results.numbers(_name(triangle, theta), results.seeds[0])["point"]) for theta in (THETA, 1.0))
        better = float((mixture_losses(tail, TRIANGLES[triangle]) < mixture_losses(mean, TRIANGLES[triangle])).mean())
        findings.append(Finding(Verdict.AGREES if 0 < better < 1 else Verdict.DISAGREES,
                                f"{triangle}: theta 2/3 is better on {better:.0%} of the mixtures"))
    return all_of(*findings)


def figures(results: Results, folder: Path) -> list[Figure]:
    with drawn(folder / "figure3.png", columns=2) as axes:
        means = np.array(TRIANGLES["obtuse"])
        axes[0].fill(*means.T, facecolor="none", edgecolor="#c9ced3")
        axes[0].plot(*means.T, "ko", markersize=5)
        points = {theta: np.array(results.numbers(_name("obtuse", theta), results.seeds[0])["point"]) for theta in (1.0, THETA)}
        losses = {theta: mixture_losses(point, TRIANGLES["obtuse"]) for theta, point in points.items()}
        bins = np.linspace(min(map(np.min, losses.values())), max(map(np.max, losses.values())), 41)
        for (theta, point), colour in zip(points.items(), COLOURS, strict=False):
            label = _name("obtuse", theta).partition(", ")[2]
            axes[0].plot(*point, "D", color=colour, label=label)
            axes[1].hist(losses[theta], bins=bins, color=colour, alpha=0.55, label=label)
        axes[0].set(title="means, and the trained points", aspect="equal", ylim=(-0.6, 1.0))
        axes[1].set(title="loss on mixtures of conformity ≥ 2/3", xlabel="F(w; p)", ylabel="mixtures")
        for axis in axes:
            axis.legend()
    return [Figure("figure3.png", "The means (black), the point for theta = 1 and for theta = 2/3, and how they do on mixtures. "
                                  "As figure 3 of [LPMH21], left and right, with an obtuse triangle.")]


def notes(results: Results) -> list[str]:
    ours = " and ".join(f"{list(map(list, means))} ({name})" for name, means in TRIANGLES.items())
    return [f"The paper does not print its means; ours are {ours}.",
            "Distances are to the exact points of the samples, so that they measure the algorithm and not the sample."]


GAUSSIANS = Study(
    name="gaussians", paper="LPMH21", item="figure 3", title="Three Gaussians, one point", cost=Cost(600, 2),
    full=Plan(), quick=Plan(seeds=3, examples=5000, rounds=300), cells=cells, tables=tables, figures=figures, notes=notes,
    claims=(
        Claim("At theta = 1 the model is the centroid of the means.", "[LPMH21, illustration of figure 3]",
              lambda results: all_of(*(_reaches(triangle, 1.0, "centroid", results) for triangle in TRIANGLES))),
        Claim("At theta = 2/3 it is the midpoint of the longest side: obtuse triangle.", "[LPMH21, illustration of figure 3]",
              partial(_reaches, "obtuse", THETA, "midpoint")),
        Claim("At theta = 2/3 it is the midpoint of the longest side: acute triangle.",
              "[LPMH21, illustration of figure 3, any scalene triangle]", partial(_reaches, "acute", THETA, "midpoint")),
        Claim("In an acute triangle it is the circumcentre instead.", "[ours, docs/departures.md]",
              partial(_reaches, "acute", THETA, "circumcentre")),
        Claim("The worst loss over mixtures of conformity at least 2/3 is lower at theta = 2/3.", "[LPMH21, figure 3, right]",
              _worst_is_lower),
        Claim("There are mixtures for which either point is the better one.", "[LPMH21, figure 3, middle]",
              _both_have_their_mixtures),
    ),
)
