"""Private quantiles: error against epsilon, [PLMH22q, figure 2]; trees whose sums wrap around, [PLMH23, figure 5]."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.private.quantile_cells import (
    Plan,
    at_epsilon,
    batches,
    cases,
    cells,
    near_scale,
    over_runs,
    printed_epsilons,
    widest,
    wrap_name,
)
from fedtail_studies.private.quantile_claims import CLAIMS, EXACT
from fedtail_studies.private.quantile_releases import KINDS, METHODS
from fedtail_studies.results import Results
from fedtail_studies.study import Cost, Figure, Study
from fedtail_studies.tables import Printed, Row, Table

SHOWN = (1.0, 5.0, 10.0)
TOLD = {1.0: 0.14, 5.0: 0.03}                    # of uniform values in 64 bins, [PLMH23, section 7.6]


def tables(results: Results) -> list[Table]:
    made = []
    for epsilon in SHOWN:
        place = at_epsilon(results, epsilon)
        rows = [Row(case, {method: batches(results, case, method, "worst", place) for method in METHODS})
                for case in cases(results)]
        made.append(Table(f"Worst error over levels at epsilon {epsilon:g}", METHODS, tuple(rows), digits=3, head="values, n, b"))
    place = at_epsilon(results, 1.0)
    rows = [Row(case, {method: [over_runs(results, case, method, "worst", place)[1]] for method in METHODS})
            for case in cases(results)]
    made.append(Table("Deviation of one run at epsilon 1", METHODS, tuple(rows), digits=3, head="values, n, b"))
    wrapped = [_wrap_table(results, kind, bins) for kind, bins in itertools.product(KINDS, results.plan["wrap_bins"])]
    return [*made, _told(results), *wrapped]


def _told(results: Results) -> Table:
    cell, rows = wrap_name("uniform", 64), []
    for epsilon, value in TOLD.items():
        place = near_scale(results, cell, epsilon)
        rows.append(Row(f"{printed_epsilons(results, cell)[place]:.2f}",
                        {"error": batches(results, cell, widest(results), "average", place)}, {"error": Printed(value)}))
    return Table("The printed tree against the text: n = 256, uniform, b = 64", ("error",), tuple(rows), "[PLMH23, section 7.6]",
                 digits=3, head="epsilon, printed")


def _wrap_table(results: Results, kind: str, bins: int) -> Table:
    cell, bits = wrap_name(kind, bins), [f"{width} bits" for width in results.plan["bits"]]
    right, rows = results.numbers(cell, results.seeds[0])["right"], []
    for place, epsilon in enumerate(printed_epsilons(results, cell)):
        ours = {name: batches(results, cell, name, "average", place) for name in (*bits, "optimal")}
        ours["deviation of a run"] = [over_runs(results, cell, bits[-1], "average", place)[1]]
        ours["epsilon, right"] = [right[place]]
        rows.append(Row(f"{epsilon:.2f}", ours))
    return Table(f"Average error of the printed tree: n = 256, {KINDS[kind]}, b = {bins}",
                 (*bits, "deviation of a run", "optimal", "epsilon, right"), tuple(rows), digits=3, head="epsilon, printed")


def figures(results: Results, folder: Path) -> list[Figure]:
    plan = results.plan
    across = len(plan["clients"]) * len(plan["bins"])
    with drawn(folder / "figure2.png", across, len(KINDS), 3.6, 3.2, sharex=True, sharey="row") as axes:
        for axis, case in zip(np.ravel(axes), cases(results), strict=True):
            for number, method in enumerate(METHODS):
                _plot(axis, results, case, method, "worst", plan["epsilons"], number)
            axis.set(title=case, xscale="log", yscale="log", xlabel="ε", ylabel="worst quantile error")
        np.ravel(axes)[0].legend(fontsize=7)
    names = [*(f"{width} bits" for width in plan["bits"]), "optimal"]
    with drawn(folder / "figure5.png", len(plan["wrap_bins"]), len(KINDS), 4.2, 3.2, sharey=True) as axes:
        for axis, (kind, bins) in zip(np.ravel(axes), itertools.product(KINDS, plan["wrap_bins"]), strict=True):
            cell = wrap_name(kind, bins)
            for number, name in enumerate(names):
                _plot(axis, results, cell, name, "average", printed_epsilons(results, cell), number)
            axis.set(title=f"{KINDS[kind]}, n = 256, b = {bins}", ylim=(0, 0.45), xlabel="ε, as printed",
                     ylabel="average quantile error")
        np.ravel(axes)[0].legend(fontsize=7)
    first = "Worst quantile error against epsilon, mean ± deviation over runs, as figure 2 of [PLMH22q]."
    second = ("Average quantile error of the printed tree against the printed epsilon, sums modulo M = 2^bits, as figure 5 of "
              "[PLMH23]; and of the optimal rows at the same epsilon.")
    return [Figure("figure2.png", first), Figure("figure5.png", second)]


def _plot(axis: Any, results: Results, cell: str, name: str, what: str, places: Sequence[float], number: int) -> None:
    found = [over_runs(results, cell, name, what, place) for place in range(len(places))]
    axis.errorbar(places, [mean for mean, _ in found], [deviation for _, deviation in found], color=COLOURS[number], label=name,
                  marker="os^vDx"[number], markersize=3.5, capsize=2, linewidth=1.2)


def _beyond(results: Results) -> str:
    """What the optimal rows gain over the papers' methods."""
    one, five = (at_epsilon(results, epsilon) for epsilon in (1.0, 5.0))

    def mean(case: str, method: str, place: int) -> float:
        return over_runs(results, case, method, "worst", place)[0]

    def against_tree(cell: str, place: int) -> float:
        best, tree = (over_runs(results, cell, name, "average", place)[0] for name in ("optimal", widest(results)))
        return best / tree

    gains = [mean(case, "optimal", one) / min(mean(case, method, one) for method in METHODS[:3]) for case in cases(results)]
    large = [case for case in cases(results) if f"n {max(results.plan['clients'])}" in case]
    inside = [mean(case, METHODS[5], five) / mean(case, "optimal", five) for case in large]
    wrapped = itertools.product(KINDS, results.plan["wrap_bins"], range(len(results.plan["scales"])))
    trees = [against_tree(wrap_name(kind, bins), place) for kind, bins, place in wrapped]
    return (f"Beyond the papers: the optimal rows, with least squares on the simplex, have {min(gains):.2f} to {max(gains):.2f} "
            f"of the error of the best printed method at epsilon 1; at the larger n and epsilon 5 reading inside the bin leaves "
            f"{min(inside):.2f} to {max(inside):.2f} of theirs. At the printed epsilons of figure 5 they have {min(trees):.2f} "
            f"to {max(trees):.2f} of the error of the tree.")


def notes(results: Results) -> list[str]:
    plan, count = results.plan, len(results.seeds)
    first, place = results.numbers(wrap_name("uniform", 64), results.seeds[0]), at_epsilon(results, 1.0)
    ratios = [printed / right for printed, right in zip(first["epsilon"], first["right"], strict=True)]
    against = [over_runs(results, case, "tree", "worst", place)[0] / over_runs(results, case, EXACT, "worst", place)[0]
               for case in cases(results)]
    return [
        f"A seed is a batch of {plan['runs']} runs (figure 2) or {plan['wrap_runs']} (figure 5), {count * plan['runs']} and "
        f"{count * plan['wrap_runs']} in all; the papers have 10. The ± of the tables is that of batches; what the papers "
        "plot, the deviation of one run, stands in a table or column of its own and in the figures.",
        "The error is |F - p| at the edge that was chosen, [PLMH23, eq. (17) to (19)]; inside bins it is |F - p| at the "
        "value read by interpolation. Every client draws its own share of discrete Gaussian noise, and sums are taken modulo "
        "M; zero-out, (epsilon, 1e-5).",
        f"Figure 5 has shares of variance 2, scales c = {', '.join(map(str, plan['scales']))} and M = "
        f"{', '.join(f'2^{width}' for width in plan['bits'])} in the symmetric ring, and epsilon from the printed "
        "sensitivity c log2 b. Figure 2 has the noise that its epsilon needs at a scale and modulus chosen by the library, "
        "so that nothing wraps around.",
        "Ten bits wrap around because c n / 2 is half the ring from c = 4 on, and the error does not come back; more bits "
        "follow at twice and four times the scale.",
        f"The right sensitivity of the tree is c sqrt(log2 b): the same noise is worth an epsilon {min(ratios):.1f} to "
        f"{max(ratios):.1f} times smaller than printed (64 bins). At the same epsilon, 1, its worst error is then "
        f"{min(against):.2f} to {max(against):.2f} times that of the flat histogram with the exact count, and not a multiple "
        "of it.",
        _beyond(results),
        "No edge of 32 bins is nearer than 0.0125 to the level 0.3 of a uniform distribution: there a worst error below 0.01 "
        "is out of reach at any epsilon, but for luck with the values.",
    ]


PRIVATE_QUANTILES = Study(
    name="private_quantiles", paper="PLMH23", item="figure 5; PLMH22q, figure 2",
    title="Private quantiles: flat, tree and optimal histograms",
    cost=Cost(0, 5), full=Plan(), quick=Plan(seeds=3, runs=6, wrap_runs=5), cells=cells, tables=tables, figures=figures,
    notes=notes, claims=CLAIMS)
