"""Quantile error of the tree against epsilon, with sums that wrap around at small moduli, as in [PLMH23, figure 5].

    python experiments/private_quantiles/figure5.py            # figure5.csv and figure5.png; about a minute on one core
    python experiments/private_quantiles/figure5.py --plot     # the plot alone, from figure5.csv

256 clients, noise of variance 2 from each, scale c = 1, 2, 3, ...; the error (19) averaged over the levels 0.1, ..., 0.9, its
mean and standard deviation over runs. Epsilon is that of the printed sensitivity c log2 b; `epsilon_right` is that of
c sqrt(log2 b).
"""

from __future__ import annotations

import argparse
from fractions import Fraction

import numpy as np
from papers import BOUND, DELTA, KINDS, LEVELS, draw, plan_for, read, threshold_errors, write

from fedtail.privacy.concentrated import epsilon_of
from fedtail.privacy.randomness import SeededRandomness
from fedtail.privacy.shares import NoiseShares, Ring
from fedtail.quantiles import Edges, QuantilePlan, optimal, tree
from fedtail.quantiles.private import noisy_sum
from fedtail.quantiles.strategies import printed_cumulative

CLIENTS, VARIANCE, BITS = 256, Fraction(2), (10, 11, 12, 18)
SCALES, BINS = (1, 2, 3, 4, 5, 6, 8, 10, 12), (32, 64, 512)


def symmetric(bits: int) -> Ring:
    """The papers' ring, -M/2 + 1, ..., M/2."""
    return Ring(1 << bits, 1 - (1 << (bits - 1)))


def tree_plan(scale: int, bins: int) -> QuantilePlan:
    strategy = tree(bins, scale, as_printed=True)
    shares = NoiseShares(VARIANCE, CLIENTS, strategy.width)
    epsilon = epsilon_of(shares.concentrated_epsilon(strategy.sensitivity) ** 2 / 2, DELTA)
    edges = Edges.equal(0.0, BOUND, bins)
    return QuantilePlan(CLIENTS, LEVELS, edges, strategy, shares, symmetric(max(BITS)), 0.0, epsilon, DELTA, "zero-out", True)


def measure(runs: int) -> list[dict]:
    rows = []
    for bins in BINS:
        for scale in SCALES:
            plan = tree_plan(scale, bins)
            right = epsilon_of(plan.shares.concentrated_epsilon(tree(bins, scale).sensitivity) ** 2 / 2, DELTA)
            best = plan_for(lambda c, bins=bins: optimal(bins, c, public_total=True), CLIENTS, bins, plan.epsilon)
            for kind in KINDS:
                found: dict[str, list[float]] = {}
                for run in range(runs):
                    for name, error in errors(plan, best, draw(kind, CLIENTS, run), run).items():
                        found.setdefault(name, []).append(error)
                case = {"values": kind, "bins": bins, "scale": scale, "epsilon": f"{plan.epsilon:.4f}",
                        "epsilon_right": f"{right:.4f}"}
                rows += [{**case, "method": name, "error": f"{np.mean(mine):.5f}", "std": f"{np.std(mine, ddof=1):.5f}",
                          "runs": runs} for name, mine in found.items()]
    return rows


def errors(plan: QuantilePlan, best: QuantilePlan, values: np.ndarray, run: int) -> dict[str, float]:
    """The average error of the tree at every modulus, from the same noisy sum, and of the optimal rows at the same epsilon."""
    truth = np.cumsum(np.bincount(plan.edges.place(values), minlength=plan.edges.bins))
    noisy = noisy_sum(plan, values, SeededRandomness(run, plan.strategy.scale, plan.edges.bins))
    found = {}
    for bits in BITS:                                              # each modulus divides the next
        cumulative = printed_cumulative(plan.strategy, symmetric(bits).decode(noisy))
        found[f"tree, {bits} bits"] = float(np.mean(threshold_errors(cumulative, float(CLIENTS), truth)))
    counts = best.strategy.estimate(noisy_sum(best, values, SeededRandomness(run, "best", best.epsilon)), float(CLIENTS))
    found["optimal"] = float(np.mean(threshold_errors(np.cumsum(counts), float(CLIENTS), truth)))
    return found


def plot(rows: list[dict]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.5), sharey=True)
    names, styles = [*(f"tree, {bits} bits" for bits in BITS), "optimal"], ("C3-^", "C1-s", "C4-v", "C0-o", "C2-D")
    for axis, (kind, bins) in zip(axes.flat, [(k, b) for k in KINDS for b in BINS], strict=True):
        for name, style in zip(names, styles, strict=True):
            mine = [row for row in rows if (row["values"], row["bins"], row["method"]) == (kind, str(bins), name)]
            axis.errorbar([float(row["epsilon"]) for row in mine], [float(row["error"]) for row in mine],
                          [float(row["std"]) for row in mine], fmt=style, label=name, capsize=2, markersize=4)
        axis.set(title=f"{KINDS[kind]}, n = {CLIENTS}, b = {bins}", ylim=(0, 0.45), xlabel="epsilon (printed)")
        axis.grid(True, alpha=0.25)
    for axis in axes[:, 0]:
        axis.set_ylabel("average quantile error")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(__file__.replace(".py", ".png"), dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--plot", action="store_true")
    options = parser.parse_args()
    if not options.plot:
        write("figure5.csv", measure(options.runs))
    plot(read("figure5.csv"))


if __name__ == "__main__":
    main()
