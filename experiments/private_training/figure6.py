"""DP-Delta-FL against DP-FedAvg at the same privacy, on clients whose labels shift, as in [PLMH23, figure 6].

    python experiments/private_training/figure6.py             # runs.csv, summary.json, figure6.png
    python experiments/private_training/figure6.py --plot      # the plot alone, from summary.json
    python experiments/private_training/figure6.py --quick     # a short try, in another folder

For every method and epsilon the settings are chosen on the validation clients of two seeds that are not reported, then five
other seeds are trained with them and their test clients looked at. Noise is calibrated for every run, and what its ledger says
is asserted to be within epsilon. 23 minutes of one core; interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training import DELTA, STATISTICS, Runs, Settings

HERE = Path(__file__).parent
TAIL_FRACTIONS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Plan:
    """How much is tried. The grids are those of [PLMH23, appendix D.2]; clip norms bound the update, and there is one more.

    Where the first or the last clip norm is best, the nearest of the `further` ones are tried until it is not.
    """

    rounds: int = 1000
    epsilons: Sequence[float] = (3.0, 5.0, 10.0, 15.0, 20.0)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    tuning_seeds: Sequence[int] = (100, 101)
    clip_norms: Sequence[float] = (0.09, 0.11, 0.13, 0.15, 0.18)
    further: Sequence[float] = (0.05, 0.07, 0.22, 0.27, 0.33)
    quantile_ratios: Sequence[float] = (0.1, 0.25, 0.5, 0.75)
    loss_bounds: Sequence[float] = (0.7, 0.9, 1.1, 1.3, 1.5)
    bins: Sequence[int] = (16, 32, 64)


QUICK = Plan(100, (5.0,), (0, 1), (100,), (0.09, 0.13), (), (0.25, 0.5), (1.5,), (32,))
FIRST_EPSILON = 5.0      # where loss_bound, bins and quantile_ratio are chosen, for every epsilon


def chosen(runs: Runs, plan: Plan) -> list[Settings]:
    """For every method and epsilon, the settings that are best on validation clients, found one after another."""
    def best(tried: Iterable[Settings]) -> Settings:
        return min(tried, key=lambda settings: (score(settings, "p90"), score(settings, "worst10")))      # p90 often ties

    def score(settings: Settings, name: str) -> float:
        return round(statistics.mean(runs.get(settings, seed, "validation")[name] for seed in plan.tuning_seeds), 6)

    return [found for theta in TAIL_FRACTIONS for found in searched(theta, plan, best)]


def searched(theta: float, plan: Plan, best: Callable[[Iterable[Settings]], Settings]) -> list[Settings]:
    """What the histogram needs at one epsilon; then, at each, the clip norm."""
    first = Settings(theta, FIRST_EPSILON, 0.13)
    if theta < 1:
        first = best(replace(first, quantile_ratio=0.25, bins=32, loss_bound=bound) for bound in plan.loss_bounds)
        first = best(replace(first, bins=bins) for bins in plan.bins)
        first = best(replace(first, quantile_ratio=ratio) for ratio in plan.quantile_ratios)
    found = [clipped(replace(first, epsilon=epsilon), plan, best) for epsilon in plan.epsilons]
    print("chosen:", *found, sep="\n  ", flush=True)
    return found


def clipped(settings: Settings, plan: Plan, best: Callable[[Iterable[Settings]], Settings]) -> Settings:
    """With the best clip norm, and none next to it untried."""
    norms = sorted(plan.clip_norms)
    while True:
        found = best(replace(settings, clip_norm=norm) for norm in norms)
        below = [norm for norm in plan.further if norm < norms[0] and found.clip_norm == norms[0]]
        above = [norm for norm in plan.further if norm > norms[-1] and found.clip_norm == norms[-1]]
        if not below and not above:
            return found
        norms = sorted([*norms, *below[-1:], *above[:1]])


def summary(runs: Runs, plan: Plan) -> list[dict[str, Any]]:
    """Every method on the test clients of every seed: mean, deviation, and the difference to FedAvg on the same seeds."""
    methods = [Settings(theta) for theta in TAIL_FRACTIONS] + chosen(runs, plan)
    errors = {settings: [runs.get(settings, seed, "test") for seed in plan.seeds] for settings in methods}
    fedavg = {settings.epsilon: found for settings, found in errors.items() if settings.tail_fraction == 1}
    return [described(settings, found, fedavg[settings.epsilon], plan) for settings, found in errors.items()]


def described(settings: Settings, errors: list[dict[str, float]], base: list[dict[str, float]], plan: Plan) -> dict[str, Any]:
    settled = {name: value for name, value in asdict(settings).items() if value is not None and value != math.inf}
    row: dict[str, Any] = {**settled, "rounds": plan.rounds, "seeds": list(plan.seeds)}
    if settings.private:
        z = settings.noise(plan.rounds)
        row |= {"delta": DELTA, "noise_multiplier": z.whole_round, "update_noise_multiplier": z.update,
                "quantile_noise_multiplier": z.quantile, "accountant": z.guarantee.accountant, "spent": z.guarantee.epsilon,
                "second_opinion": z.guarantee.second_opinion, "against_server": z.guarantee.against_server}
    for name in STATISTICS:
        values = [error[name] for error in errors]
        gaps = [value - other[name] for value, other in zip(values, base, strict=True)]
        row[name] = {"mean": statistics.mean(values), "std": spread(values), "standard_error": standard_error(values)}
        if settings.tail_fraction < 1:
            row[name]["less_fedavg"] = {"mean": statistics.mean(gaps), "standard_error": standard_error(gaps),
                                        "lower_in": sum(gap < 0 for gap in gaps)}
    return rounded(row)


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def standard_error(values: Sequence[float]) -> float:
    return spread(values) / math.sqrt(len(values))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return round(value, 5) if isinstance(value, float) else value


def show(rows: list[dict[str, Any]]) -> None:
    """As tables of Markdown: error in percent, mean ± deviation, and the difference to FedAvg ± its standard error."""
    print("\n| epsilon | method | mean | 90th percentile | worst 10% | less FedAvg: mean | 90th | worst 10% | 90th lower in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        gaps = [row[name].get("less_fedavg") for name in STATISTICS]
        cells = [f"{row['epsilon']:g}" if "epsilon" in row else "no noise", named(row["tail_fraction"]),
                 *(f"{row[name]['mean']:.2f} ± {row[name]['std']:.2f}" for name in STATISTICS),
                 *(f"{gap['mean']:+.2f} ± {gap['standard_error']:.2f}" if gap else "" for gap in gaps),
                 f"{gaps[1]['lower_in']} of {len(row['seeds'])}" if gaps[1] else ""]
        print(f"| {' | '.join(cells)} |")
    print("\n| epsilon | method | C | r | B | b | z of the round | of the update | of the histogram | against the server |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "epsilon" in row:
            names = ("clip_norm", "quantile_ratio", "loss_bound", "bins", "noise_multiplier", "update_noise_multiplier",
                     "quantile_noise_multiplier", "against_server")
            cells = [f"{row[name]:.4g}" if row.get(name) is not None else "" for name in names]
            print(f"| {row['epsilon']:g} | {named(row['tail_fraction'])} | {' | '.join(cells)} |")


def named(tail_fraction: float) -> str:
    return "FedAvg" if tail_fraction == 1 else f"Delta-FL {tail_fraction:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 rounds, one epsilon, two seeds: in under a minute")
    parser.add_argument("--plot", action="store_true", help="only draw summary.json")
    parser.add_argument("--out", type=Path, help="where files go: beside this script, with --quick a new folder")
    options = parser.parse_args()
    folder = options.out or (Path(tempfile.mkdtemp(prefix="private_training_")) if options.quick else HERE)
    folder.mkdir(parents=True, exist_ok=True)
    if not options.plot:
        plan = QUICK if options.quick else Plan()
        rows = summary(Runs(folder / "runs.csv", plan.rounds), plan)
        (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
        show(rows)
    from drawing import draw

    draw(json.loads((folder / "summary.json").read_text()), folder / "figure6.png")
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    main()
