"""Settings of private training at random: 40 points of the paper's grid for each tail fraction and epsilon.

[PLMH23, appendix D.2] searches a grid of 240 settings. Here points are drawn from it and judged on validation clients of a seed
that is not reported; what is best is trained on the other seeds, beside the settings that `private_training` uses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fedtail_studies.judging import all_of, lower, within
from fedtail_studies.private.cells import THETAS, Plan, Size, cell_name, measured
from fedtail_studies.private.runs import Budget, Settings, points, trained_errors
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Numbers, Study
from fedtail_studies.tables import Row, Table

COLUMNS = {"mean": "mean", "90th percentile": "p90", "worst 10%": "worst10"}
USED, SEARCHED = "one by one", "at random"


@dataclass(frozen=True)
class SearchPlan(Size):
    points: int = 40                             # of the grid, for each tail fraction and epsilon
    tuning_seeds: tuple[int, ...] = (100,)


def search_name(theta: float, epsilon: float) -> str:
    return f"search, {cell_name(theta, epsilon)}"


def cells(plan: SearchPlan, seed: int) -> dict[str, Callable[[Cell], Numbers]]:
    """The search once, under the first seed; then what it found, and what is used elsewhere."""
    grid = [(theta, epsilon) for theta in THETAS for epsilon in plan.epsilons]
    found: dict[str, Callable[[Cell], Numbers]] = {}
    if seed == 0:
        found |= {search_name(*place): partial(searched, theta=place[0], epsilon=place[1]) for place in grid}
    for theta, epsilon in grid:
        budget = Budget(epsilon, plan.delta)
        found[cell_name(theta, epsilon, None, USED)] = partial(measured, settings=Plan().chosen(theta, epsilon), budget=budget)
        found[cell_name(theta, epsilon, None, SEARCHED)] = partial(found_at_random, theta=theta, budget=budget)
    return found


def searched(cell: Cell, theta: float, epsilon: float) -> Numbers:
    """The points that were tried, and the best: the smallest 90th percentile of validation clients, ties by the worst 10%."""
    plan: SearchPlan = cell.plan
    tried = points(theta, plan.points, plan.epsilons.index(epsilon))
    scores: list[list[float]] = []
    for place in cell.steps(len(tried)):
        runs = [trained_errors(tried[place], Budget(epsilon, plan.delta), plan.clients, plan.rounds, seed, "validation")
                for seed in plan.tuning_seeds]
        scores.append([statistics.mean(run[name] for run in runs) for name in ("p90", "worst10", "mean")])
    best = min(range(len(tried)), key=lambda place: scores[place])
    listed = [[*list(point.numbers().values())[1:5], *score[:2]] for point, score in zip(tried, scores, strict=True)]
    return {"chosen": tried[best].numbers(), "score": scores[best], "tried": len(tried), "lowest": min(scores)[0],
            "highest": max(scores)[0], "points": listed}      # C, r, B, b, 90th percentile, worst 10%


def found_at_random(cell: Cell, theta: float, budget: Budget) -> Numbers:
    return measured(cell, Settings(**cell.numbers(search_name(theta, budget.epsilon), seed=0)["chosen"]), budget)


def tables(results: Results) -> list[Table]:
    rows = [Row(cell_name(theta, epsilon, None, how), {title: results.values(cell_name(theta, epsilon, None, how), path)
                                                       for title, path in COLUMNS.items()})
            for epsilon in results.plan["epsilons"] for theta in THETAS for how in (USED, SEARCHED)]
    return [Table("Test clients at delta = 1/n, error in percent", tuple(COLUMNS), tuple(rows), head="method, budget, settings"),
            _chosen(results)]


def _chosen(results: Results) -> Table:
    """Settings by method and epsilon, and how much hangs on them."""
    titles = {"C": "clip_norm", "r": "quantile_ratio", "B": "loss_bound", "b": "bins"}
    rows = []
    for theta in THETAS:
        for epsilon in results.plan["epsilons"]:
            found = results.numbers(search_name(theta, epsilon), 0)
            ours = {title: [found["chosen"][name]] for title, name in titles.items() if name in found["chosen"]}
            middle = statistics.median(point[-2] for point in found["points"])
            ours |= {"points": [found["tried"]], "best": [found["lowest"]], "median": [middle], "worst": [found["highest"]]}
            rows.append(Row(cell_name(theta, epsilon), ours))
    return Table("Chosen at random, and the 90th percentile of validation clients over the points",
                 (*titles, "points", "best", "median", "worst"), tuple(rows), head="method, budget")


def _nothing_better(results: Results) -> Finding:
    """Paired: settings at random less those used."""
    findings = []
    for theta in THETAS:
        for epsilon in results.plan["epsilons"]:
            found = results.difference(cell_name(theta, epsilon, None, SEARCHED), cell_name(theta, epsilon, None, USED), "p90")
            findings.append(within(found, 1.0, True, f"{cell_name(theta, epsilon)}:"))
    return all_of(*findings)


def _tail_is_lower(theta: float, results: Results) -> Finding:
    findings = []
    for epsilon in results.plan["epsilons"]:
        found = results.difference(cell_name(theta, epsilon, None, SEARCHED), cell_name(1.0, epsilon, None, SEARCHED), "p90")
        findings.append(lower(found, True, what=f"epsilon {epsilon:g}:"))
    return all_of(*findings)


def notes(results: Results) -> list[str]:
    plan = results.plan
    runs = sum(results.numbers(search_name(theta, epsilon), 0)["tried"] for theta in THETAS for epsilon in plan["epsilons"])
    return [
        f"{plan['points']} of 360 points for each tail fraction and epsilon (FedAvg has a clip norm only, of which there are "
        f"6), judged on the validation clients of seed {', '.join(map(str, plan['tuning_seeds']))}: clip norms .09 .11 .13 "
        ".15 (the paper's, which bound the gradient, times the learning rate) and .18 .22; r, B and b as printed.",
        f"No epsilon covers these {runs * len(plan['tuning_seeds'])} private runs, nor any other search over private runs.",
        f"Settings used elsewhere ({USED}) were chosen one after another on the validation clients of two seeds: "
        "`fedtail reproduce private_training` has them. What epsilon means is said there too.",
    ]


PRIVATE_SEARCH = Study(
    name="private_search", paper="PLMH23", item="appendix D.2", title="Settings of private training, at random",
    cost=Cost(1000, 60), full=SearchPlan(), quick=SearchPlan(seeds=3, rounds=300, epsilons=(5.0,), points=8), cells=cells,
    tables=tables, notes=notes,
    claims=(
        Claim("The tail of Delta-FL 0.5 is below FedAvg's, with settings found at random for both.", "[PLMH23, section 7.7]",
              partial(_tail_is_lower, 0.5)),
        Claim("So is that of Delta-FL 0.25.", "[PLMH23, section 7.7]", partial(_tail_is_lower, 0.25)),
        Claim("Random points of the grid lead to the same tail as settings chosen one by one, within a point.", "[ours]",
              _nothing_better),
    ),
)
