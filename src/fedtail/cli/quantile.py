"""`fedtail quantile`: private quantiles of one number per client, out of one noisy sum."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli import options
from fedtail.cli.terminal import print_errors_as_sentences, print_json, show_table
from fedtail.cli.value_file import read_values

if TYPE_CHECKING:

    from fedtail.quantiles.planning import QuantilePlan
    from fedtail.quantiles.private import QuantileRelease


@print_errors_as_sentences
def quantile(
    values: Path = typer.Argument(..., metavar="VALUES", show_default=False,
                                  help="One number per client: .npy, .csv, .txt, or a column of an .npz or .parquet file."),
    levels: list[float] = typer.Option(..., "--level", metavar="P", show_default=False,
                                       help="Which quantile: 0.9 is the 90th percentile. May be given again."),
    ends: tuple[float, float] | None = typer.Option(None, "--range", metavar="LOW HIGH", show_default=False,
                                                    help="Public bounds; values outside are clipped to them."),
    bins: int = typer.Option(64, "--bins", help="Bins of equal width in the range."),
    edges: Path | None = typer.Option(None, "--edges", metavar="FILE", show_default=False,
                                      help="Edges of the bins, instead of --range and --bins."),
    epsilon: float = typer.Option(..., "--epsilon", show_default=False, help="Of the guarantee: 1 is strong, 10 is weak."),
    delta: float = typer.Option(..., "--delta", show_default=False, help="Of the guarantee: well below 1 / clients."),
    method: str = typer.Option("auto", "--method", help="flat, tree, optimal; auto is that of the smallest expected error."),
    max_error: float | None = typer.Option(None, "--max-error", metavar="E", show_default=False,
                                           help="Release nothing if |F(estimate) - P| is expected to be larger."),
    adjacency: str = typer.Option("zero-out", "--adjacency", help="zero-out, or replace-one."),
    colluders: int = typer.Option(0, "--colluders", help="Clients who may tell others their noise."),
    scale: int | None = typer.Option(None, "--scale", metavar="C", help="Of the rows; by default fine enough.",
                                     show_default=False),
    modulus: int | None = typer.Option(None, "--modulus", metavar="M", help="Of the sums; by default large enough.",
                                       show_default=False),
    allow_wrap: bool = typer.Option(False, "--allow-wrap", help="Take a modulus that is too small, to see what happens."),
    allow_few: bool = typer.Option(False, "--allow-few", help="Release for fewer than 100 clients, useless as it is."),
    repeat: int = typer.Option(1, "--repeat", metavar="N", min=1, help="Release so many times, for study; each one spends."),
    seed: int | None = typer.Option(None, "--seed", show_default=False,
                                    help="Noise that can be replayed: a simulated guarantee. By default it is the system's."),
    column: str | None = typer.Option(None, "--column", metavar="NAME", show_default=False, help="Which column of the file."),
    as_json: bool = options.JSON,
) -> None:
    """Quantiles of one number per client, with differential privacy for each client.

    Every client adds noise to the row it sends; only their sum is released, and all levels are read off it. The expected error is
    |F(estimate) - P|, 0.02 being two percentiles, and is known before anything is spent. Values outside the range are clipped;
    how many is not released. The number of clients is taken to be public.
    """
    from fedtail.quantiles.private import build_edges, checked_values, plan_quantiles, release_quantiles

    numbers = checked_values(read_values(values, column))
    places = None if edges is None else read_values(edges, None)
    plan = plan_quantiles(
        len(numbers), levels, build_edges(ends, bins, places), epsilon=epsilon, delta=delta, method=method,
        adjacency=adjacency, colluders=colluders, scale=scale, modulus=modulus, allow_wrap=allow_wrap,
        allow_few=allow_few, max_error=max_error)
    if not as_json:
        print_plan(plan)
    releases = [release_quantiles(plan, numbers, randomness_for_release(seed, k)) for k in range(repeat)]
    if as_json:
        print_json(releases_as_json(releases))
    else:
        show_releases(releases)


def randomness_for_release(seed: int | None, k: int) -> Any:
    """The source of noise for release number `k`: the operating system where `seed` is None.

    Otherwise a generator seeded with `seed` and `k`, with which the guarantee is only simulated.
    """
    from fedtail.privacy.randomness import SeededRandomness, SystemRandomness

    return SystemRandomness() if seed is None else SeededRandomness(seed, "quantile", k)


def releases_as_json(releases: list[QuantileRelease]) -> dict[str, Any]:
    """The releases, of one plan and at least one, as a dict of plain values for --json.

    It has the estimates of each release, the settings of the plan, epsilon and delta of one release, and epsilon of all together.
    `level`, `expected_error` and each of `estimates` are numbers where the plan has one level, else lists over the levels.
    """
    plan = releases[0].plan
    single = len(plan.levels) == 1

    def number_or_list(numbers: tuple[float, ...]) -> Any:
        """The only number where the plan has one level, else all numbers as a list."""
        return numbers[0] if single else list(numbers)
    return {"method": plan.method, "level": number_or_list(plan.levels),
            "estimates": [number_or_list(one.estimates) for one in releases],
            "epsilon": plan.epsilon, "delta": plan.delta, "expected_error": number_or_list(plan.expected_error),
            "releases": len(releases), "epsilon_of_all_releases": plan.epsilon_of_releases(len(releases)),
            "adjacency": plan.adjacency, "sampling": "none", "accountant": "zcdp", "simulated": releases[0].simulated,
            "clients": plan.clients, "bins": plan.edges.bins, "scale": plan.strategy.scale, "noise": plan.deviation,
            "modulus": plan.ring.modulus, "wrap_probability": plan.wraps}


def print_plan(plan: QuantilePlan) -> None:
    """Print what `plan` knows before privacy is spent: clients, bins and method, then each level's expected error."""
    errors = ", ".join(f"{error:.2g} at {level:g}" for level, error in zip(plan.levels, plan.expected_error, strict=True))
    low, high = plan.edges.values[0], plan.edges.values[-1]
    typer.echo(f"{plan.clients} clients, {plan.edges.bins} bins from {low:g} to {high:g} (values outside are clipped), method "
               f"{plan.method}.")
    typer.echo(f"Expected error |F(estimate) - level|, before anything is spent: {errors}.")


def show_releases(releases: list[QuantileRelease]) -> None:
    """Print the estimates and their expected errors, the noise, and the guarantee of one release and of all together.

    `releases` are of one plan, at least one. For several, each estimate is the mean and standard deviation over them.
    """
    import numpy as np

    first, plan = releases[0], releases[0].plan
    estimates = np.array([one.estimates for one in releases])                 # (releases, levels)
    if len(releases) == 1:
        cells = [[f"{level:g}", f"{value:.6g}", f"{error:.2g}", f"{mass:.2g}"] for level, value, error, mass in
                 zip(plan.levels, first.estimates, plan.expected_error, first.bin_masses, strict=True)]
        show_table("Estimates", ["level", "estimate", "expected error", "share of clients in its bin"], cells)
        ends = first.histogram[[0, -1]] / first.histogram.sum()
        typer.echo(f"About {ends[0]:.2g} of the clients are in the first bin and {ends[1]:.2g} in the last, clipped values "
                   "included.")
    else:
        cells = [[f"{level:g}", f"{several.mean():.6g} +- {several.std(ddof=1):.2g}", f"{error:.2g}"] for level, several, error
                 in zip(plan.levels, estimates.T, plan.expected_error, strict=True)]
        show_table(f"Estimates, +- over {len(releases)} releases", ["level", "estimate", "expected error"], cells)
    typer.echo(f"Noise {plan.deviation / plan.strategy.sensitivity:.3g} times what one client can move; scale "
               f"{plan.strategy.scale}, modulus {plan.ring.modulus}, wrap-around with probability {max(plan.wraps, 1e-12):.1g} "
               "at most.")
    typer.echo(f"{first.statement[0].upper()}{first.statement[1:]}.")
    if len(releases) > 1:
        together = plan.epsilon_of_releases(len(releases))
        typer.echo(f"That is for one release. These {len(releases)} together: epsilon = {together:.3g} at this delta.")
