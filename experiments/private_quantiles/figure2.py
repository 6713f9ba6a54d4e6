"""Quantile error against epsilon for flat and tree histograms and the optimal factorisation, as in [PLMH22q, figure 2].

    python experiments/private_quantiles/figure2.py            # figure2.csv and figure2.png; about two minutes on one core
    python experiments/private_quantiles/figure2.py --plot     # the plot alone, from figure2.csv

The worst error (3) over the levels 0.1, ..., 0.9, its mean and standard deviation over runs; every method at the same
(epsilon, 1e-5).
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
from papers import KINDS, LEVELS, draw, plan_for, read, threshold_errors, write

from fedtail.privacy.randomness import SeededRandomness
from fedtail.quantiles import QuantilePlan, flat, optimal, tree
from fedtail.quantiles.private import noisy_sum
from fedtail.quantiles.reading import quantiles
from fedtail.quantiles.strategies import printed_cumulative

EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
METHODS = ("flat, estimated n", "flat, exact n", "tree, as printed", "tree", "optimal", "optimal, inside bins")


def errors(plans: dict[str, QuantilePlan], values: np.ndarray, run: int) -> dict[str, list[float]]:
    """|F - p| at each level, by method: the papers' estimates and readout; least squares on the simplex, so and inside bins."""
    clients, edges = len(values), plans["flat"].edges
    truth = np.cumsum(np.bincount(edges.place(values), minlength=edges.bins))
    noisy = {name: noisy_sum(plan, values, SeededRandomness(run, name, clients, edges.bins, plan.epsilon))
             for name, plan in plans.items()}
    running = printed_cumulative(plans["flat"].strategy, noisy["flat"])
    found = plans["optimal"].strategy.estimate(noisy["optimal"], float(clients))
    inside = quantiles(found, edges, np.array(LEVELS))
    trees = {name: printed_cumulative(plans[name].strategy, noisy[name]) for name in ("tree, as printed", "tree")}
    return {"flat, estimated n": threshold_errors(running, max(float(running[-1]), clients / 2), truth),
            "flat, exact n": threshold_errors(running, float(clients), truth),
            **{name: threshold_errors(cumulative, float(clients), truth) for name, cumulative in trees.items()},
            "optimal": threshold_errors(np.cumsum(found), float(clients), truth),
            "optimal, inside bins": [abs(float((values <= value).mean()) - level)
                                     for value, level in zip(inside, LEVELS, strict=True)]}


def measure(runs: int) -> list[dict]:
    rows = []
    for clients in (128, 512):
        for bins in (32, 64):
            builders = {"flat": partial(flat, bins), "tree, as printed": partial(tree, bins, as_printed=True),
                        "tree": partial(tree, bins), "optimal": partial(optimal, bins, public_total=True)}
            for epsilon in EPSILONS:
                plans = {name: plan_for(build, clients, bins, epsilon) for name, build in builders.items()}
                for kind in KINDS:
                    found = [errors(plans, draw(kind, clients, run), run) for run in range(runs)]
                    rows += [summary(found, method, {"values": kind, "clients": clients, "bins": bins, "epsilon": epsilon})
                             for method in METHODS]
    return rows


def summary(found: list[dict[str, list[float]]], method: str, case: dict) -> dict:
    worst, mean = ([over(run[method]) for run in found] for over in (max, np.mean))
    return {**case, "method": method, "worst": f"{np.mean(worst):.5f}", "worst_std": f"{np.std(worst, ddof=1):.5f}",
            "average": f"{np.mean(mean):.5f}", "runs": len(found)}


def plot(rows: list[dict]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7.5), sharex=True, sharey="row")
    panels = [(kind, clients, bins) for kind in KINDS for clients in ("128", "512") for bins in ("32", "64")]
    for axis, (kind, clients, bins) in zip(axes.flat, panels, strict=True):
        for method, style in zip(METHODS, ("C0-o", "C1-s", "C3-^", "C4-v", "C2-D", "C2--x"), strict=True):
            mine = [row for row in rows
                    if (row["values"], row["clients"], row["bins"], row["method"]) == (kind, clients, bins, method)]
            axis.errorbar([float(row["epsilon"]) for row in mine], [float(row["worst"]) for row in mine],
                          [float(row["worst_std"]) for row in mine], fmt=style, label=method, capsize=2, markersize=4)
        axis.set(title=f"{KINDS[kind]}, n = {clients}, b = {bins}", xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.25)
    for axis in axes[1]:
        axis.set_xlabel("epsilon")
    for axis in axes[:, 0]:
        axis.set_ylabel("worst quantile error")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(__file__.replace(".py", ".png"), dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--plot", action="store_true")
    options = parser.parse_args()
    if not options.plot:
        write("figure2.csv", measure(options.runs))
    plot(read("figure2.csv"))


if __name__ == "__main__":
    main()
