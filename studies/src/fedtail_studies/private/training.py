"""DP-Delta-FL against DP-FedAvg at the same privacy, on clients whose labels shift: [PLMH23, figure 6], [PLMH22q, figure 3].

For every method and epsilon, settings are drawn at random from the papers' grids and chosen on the validation clients of seeds
that are not reported; then other seeds are trained with them, and their test clients looked at. Noise is calibrated for every
run, and what its ledger says is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.private.cells import FIRST, OTHER_DELTA, THETAS, Plan, cell_name, cells, method_name
from fedtail_studies.private.claims import CLAIMS, deviation, gap
from fedtail_studies.results import Results
from fedtail_studies.study import Cost, Figure, Study
from fedtail_studies.tables import Printed, Row, Table

PRINTED_TAIL = {1.0: 55.7, 0.5: 52.6, 0.25: 51.4}      # 90th percentiles at epsilon 5, [PLMH23, section 7.7]
COLUMNS = {"mean": "mean", "90th percentile": "p90", "worst 10%": "worst10"}


def tables(results: Results) -> list[Table]:
    plan = results.plan
    grid: list[tuple[str, float | None]] = [("no noise", None), *((f"epsilon {e:g}", e) for e in plan["epsilons"])]
    main = [_row(results, cell_name(theta, epsilon), f"{said}, {method_name(theta)}")
            for said, epsilon in grid for theta in THETAS]
    told = [Row(method_name(theta), {"90th percentile": results.values(cell_name(theta, FIRST), "p90")},
                {"90th percentile": Printed(PRINTED_TAIL[theta])}) for theta in THETAS]
    other = [_row(results, cell_name(theta, epsilon, OTHER_DELTA), f"epsilon {epsilon:g}, {method_name(theta)}")
             for epsilon in plan["other_delta_at"] for theta in THETAS]
    kinds = [_row(results, cell_name(0.25, FIRST, None, kind), f"{method_name(0.25)}, {kind or 'optimal'}")
             for kind in ("flat", "tree", None)]
    return [Table(f"Against the text, at epsilon {FIRST:g} and delta = 1/n", ("90th percentile",), tuple(told),
                  "[PLMH23, section 7.7]"),
            Table(f"Test clients at delta = 1/n = {1 / plan['train_clients']:g}, error in percent", tuple(COLUMNS), tuple(main),
                  head="budget, method"),
            _gaps(results, None, [None, *plan["epsilons"]]),
            Table(f"Test clients at delta = {OTHER_DELTA:g}, with the same settings", tuple(COLUMNS), tuple(other),
                  head="budget, method"),
            _gaps(results, OTHER_DELTA, plan["other_delta_at"]),
            Table(f"How a client writes its bin, at epsilon {FIRST:g}", tuple(COLUMNS), tuple(kinds), head="method, histogram"),
            _noise(results)]


def _row(results: Results, cell: str, name: str) -> Row:
    return Row(name, {title: results.values(cell, path) for title, path in COLUMNS.items()})


def _gaps(results: Results, delta: float | None, epsilons: Sequence[float | None]) -> Table:
    """Every method less FedAvg on the same seeds."""
    rows = []
    for epsilon in epsilons:
        for theta in THETAS[1:]:
            names = [cell_name(of, epsilon, delta) for of in (theta, 1.0)]
            pairs = {title: zip(*(results.values(name, path) for name in names), strict=True) for title, path in COLUMNS.items()}
            said = f"epsilon {epsilon:g}" if epsilon else "no noise"
            rows.append(Row(f"{said}, {method_name(theta)}", {title: [a - b for a, b in pair] for title, pair in pairs.items()}))
    return Table(f"Less FedAvg on the same seeds, at delta = {f'{delta:g}' if delta else '1/n'}", tuple(COLUMNS), tuple(rows),
                 head="budget, method")


def _noise(results: Results) -> Table:
    """Settings by method and epsilon, and what the noise is worth to others."""
    plan, rows = results.plan, []
    worth = {"z of the round": "noise", "epsilon by Renyi": "second_opinion", "against the server": "against_server"}
    for theta, histogram, clip_norms in plan["settings"]:
        for epsilon in plan["epsilons"]:
            ran = results.numbers(cell_name(theta, epsilon), results.seeds[0])
            ours = {"C": [clip_norms[plan["settings_at"].index(epsilon)]]}
            ours |= {name: [value] for name, value in zip("rBb", histogram, strict=False)}      # FedAvg has no histogram
            rows.append(Row(cell_name(theta, epsilon), ours | {title: [ran[name]] for title, name in worth.items()}))
    return Table("Settings, and the noise at delta = 1/n", ("C", "r", "B", "b", *worth), tuple(rows), head="method, budget")


def figures(results: Results, folder: Path) -> list[Figure]:
    titles = {"mean": "mean over test clients", "p90": "90th percentile of test clients"}
    with drawn(folder / "figure6.png", columns=3, width=4.4) as axes:
        for axis, path in zip(axes, titles, strict=False):
            _draw_errors(axis, results, path)
            axis.set(title=titles[path], ylabel="error, %")
        _draw_gaps(axes[2], results)
        axes[2].set(title="90th percentile, less that of FedAvg", ylabel="percentage points")
        for axis in axes:
            axis.set(xlabel=f"ε  (δ = 1/{results.plan['train_clients']})", xticks=results.plan["epsilons"])
        axes[1].legend(loc=(0.55, 0.5))
    caption = ("Error against epsilon, as figure 6 of [PLMH23] and figure 3 of [PLMH22q]: ± is the deviation over seeds on the "
               "left and in the middle, the 95% interval of the paired difference on the right; dashed, without noise; stars, "
               "the paper's text at epsilon 5.")
    return [Figure("figure6.png", caption)]


def _draw_errors(axis: Any, results: Results, path: str) -> None:
    for place, theta in enumerate(THETAS):
        names = [cell_name(theta, epsilon) for epsilon in results.plan["epsilons"]]
        heights, reach = [results.mean(name, path) for name in names], [deviation(results, name, path) for name in names]
        _points(axis, results, place, heights, reach, method_name(theta))
        axis.axhline(results.mean(cell_name(theta), path), color=COLOURS[place], linestyle="--", linewidth=1)
        if path == "p90":
            axis.plot(FIRST + 0.8, PRINTED_TAIL[theta], "*", markersize=11, markerfacecolor="none",
                      markeredgecolor=COLOURS[place])


def _draw_gaps(axis: Any, results: Results) -> None:
    axis.axhline(0, color=COLOURS[0])
    for place, theta in enumerate(THETAS[1:], 1):
        gaps = [gap(results, theta, 1.0, "p90", epsilon) for epsilon in results.plan["epsilons"]]
        reach = [found.reach if found.reach == found.reach else 0.0 for found in gaps]      # NaN for one seed
        _points(axis, results, place, [found.mean for found in gaps], reach, method_name(theta))
        axis.axhline(gap(results, theta, 1.0, "p90", None).mean, color=COLOURS[place], linestyle="--", linewidth=1)


def _points(axis: Any, results: Results, place: int, heights: list[float], reach: list[float], label: str) -> None:
    """Beside each other, so that bars do not cover each other."""
    axis.errorbar([epsilon + 0.3 * (place - 1) for epsilon in results.plan["epsilons"]], heights, reach, color=COLOURS[place],
                  marker="osD"[place], capsize=3, markersize=5, label=label)


def notes(results: Results) -> list[str]:
    plan = results.plan
    return [
        f"Data as in appendix D.2 of [PLMH23]: {plan['train_clients']} training clients, {plan['other_clients']} for "
        "validation and as many for the test, which hold fewer labels each; a linear model, one full-gradient step of 0.1 a "
        f"round, {plan['rounds']} rounds, {plan['cohort']} clients a round on average. A client has 100 examples: its error "
        "is a whole percent, and so nearly is a percentile over clients. The worst 10% has no such steps. Deviations are "
        "mostly those of the clients drawn, which all methods of a seed share.",
        "What epsilon means here: zero-out adjacency, one client, Poisson sampling, Gaussian noise on sums that are divided "
        "by a public number; the histogram of losses and the updates are composed first and amplified once; priced by "
        "privacy loss distributions; the ledger of every run is held to its promise. It is not the papers' epsilon: there "
        "the update's cost is upside down, noise is added after a division by a number that is not private, and cohorts of "
        "fixed size are priced by a theorem for Poisson sampling (`docs/departures.md`). Against a server that knows who was "
        "asked it is next to nothing: last column.",
        "Settings were chosen on the validation clients of seeds 100 and 101, which are not reported, by the 90th percentile "
        "after 1000 rounds, ties by the worst 10%, one after another: at epsilon 5 the loss bound B, the bins b and the "
        "ratio r from the paper's grids, kept at other epsilons; then at each epsilon the clip norm C, from .09 .11 .13 .15 "
        "(the paper's .9 to 1.5 bound the gradient) and .18, and further outwards where the first or last was best, for "
        "FedAvg's sake. All of it is in `one_by_one.csv`. At theta = 0.5 all ten settings of the histogram are within 0.05 "
        "points of each other; C moves the 90th percentile by 1.5 points at most. The search that a command makes again is "
        "`fedtail reproduce private_search`: the whole grid at random, 40 points for each tail fraction and epsilon.",
        "No epsilon covers the 200 private runs of that search. Nor are seeds secret, and noise is in floating point: a "
        "simulated guarantee. Delta = 1/n, as printed, is not below 1/n, which `fedtail privacy` warns of; 1e-5 stands "
        "beside it, with the settings chosen at 1/n.",
        "Departures: the optimal rows in place of the tree (all three stand beside each other above), and a boundary bin "
        "that counts in part in place of a bare threshold.",
        "All seeds take their examples from one pool, so an example may be in a validation client of seed 100 and in a test "
        "client of seed 0. Clients differ; within a seed nothing is shared.",
        *(() if results.quick else EARLIER),
    ]


EARLIER = (
    "FedAvg's .27 and .22 at epsilon 15 and 20 come from the outward search, which was added when the table without it had "
    "been seen; they are better on validation clients and worse on the tests. With .18 the 90th percentile less FedAvg's is "
    "-3.02 at both for Delta-FL 0.5, and -4.38 and -4.22 for 0.25: those runs are in `one_by_one.csv` too. The search of "
    "`private_search` was fixed beforehand; its page has the same comparison.",
)

PRIVATE_TRAINING = Study(
    name="private_training", paper="PLMH23", item="figure 6; PLMH22q, figure 3",
    title="Private training: Delta-FL against FedAvg at the same epsilon", cost=Cost(1000, 14), full=Plan(),
    quick=Plan(seeds=3, rounds=300, epsilons=(3.0, 5.0, 10.0), other_delta_at=(5.0,)), cells=cells, tables=tables,
    figures=figures, notes=notes, claims=CLAIMS)
