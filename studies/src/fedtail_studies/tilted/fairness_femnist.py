"""TERM over writers of FEMNIST: a question of ours, how the tail of test writers follows the tilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fedtail
from fedtail.models import SoftmaxRegression
from fedtail_studies.compared.methods import percent
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.emnist.writers import FEMNIST, classes, writers
from fedtail_studies.judging import Difference, all_of, difference, lower, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

STATISTICS = ("mean", "p90", "worst10")
TITLES = {"mean": "mean", "p90": "90th percentile", "worst10": "worst 10%"}
LITTLE = 0.5                                     # points of error


@dataclass(frozen=True)
class Plan:
    seeds: int = 3
    visits: float = 6.0                         # of every training writer
    cohort: int = 50
    tilts: tuple[float, ...] = (0.0, 1.0, 5.0)
    inside_tilts: tuple[float, ...] = (0.0, 1.0)      # over writers, where examples inside them are tilted too
    within: float = 1.0


def measured(cell: Cell, tilts: tuple[float, ...], within: float) -> Numbers:
    """Some tilts over writers as one family, over the same cohorts and batches; `within` tilts over a writer's examples."""
    plan: Plan = cell.plan
    train, test = writers(cell.data, cell.seed)
    cohort = min(plan.cohort, len(train))
    rounds = max(1, round(plan.visits * len(train) / cohort))
    local: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 10, "weight_decay": 1e-5, "schedule": fedtail.Cosine(rounds),
             **({"example_risk": fedtail.Tilted(within)} if within else {})}
    task = fedtail.Task(SoftmaxRegression(28 * 28, classes(cell.data), bias=False))
    family = fedtail.Family(tuple(fedtail.term(tilt, cohort, **local) if tilt else fedtail.fedavg(cohort, **local)
                                  for tilt in tilts))
    trained = cell.train(family, task, train, rounds)
    engine = fedtail.Engine(device=cell.device)
    found = [fedtail.evaluate(module, test, engine=engine).error for module in trained.modules]
    return {"rounds": rounds, **{_key(tilt): {**percent(error, STATISTICS), "std": 100 * error.std()}
                                 for tilt, error in zip(tilts, found, strict=True)}}


def _key(tilt: float) -> str:
    return f"t {tilt:g}".replace(".", "_")


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    return {"family": partial(measured, tilts=plan.tilts, within=0.0),
            "inside writers too": partial(measured, tilts=plan.inside_tilts, within=plan.within)}


def values(results: Results, tilt: float, statistic: str) -> list[float]:
    return results.values("family", f"{_key(tilt)}.{statistic}")


def less_fedavg(results: Results, tilt: float, statistic: str) -> Difference:
    return difference(values(results, tilt, statistic), values(results, 0.0, statistic))


def _inside(results: Results, statistic: str) -> Difference:
    return difference(results.values("inside writers too", f"{_key(1.0)}.{statistic}"), values(results, 0.0, statistic))


def name_of(tilt: float) -> str:
    return f"TERM, t = {tilt:g}" if tilt else "FedAvg"


def tables(results: Results) -> list[Table]:
    columns = {**TITLES, "std": "deviation over writers"}
    rows = [Row(name_of(tilt), {title: values(results, tilt, key) for key, title in columns.items()})
            for tilt in results.plan["tilts"]]
    tau = f"examples tilted by {results.plan['within']:g}"
    rows += [Row(f"{name_of(tilt)}, {tau}", {title: results.values("inside writers too", f"{_key(tilt)}.{key}")
                                             for key, title in columns.items()}) for tilt in results.plan["inside_tilts"]]
    return [Table("Error of test writers, %", tuple(columns.values()), tuple(rows))]


def _gains(results: Results, tilts: Sequence[float], statistic: str) -> Finding:
    return all_of(*(lower(less_fedavg(results, tilt, statistic), True,
                          what=f"{TITLES.get(statistic, statistic)}, {name_of(tilt)} less FedAvg,")
                    for tilt in tilts))


def figures(results: Results, folder: Path) -> list[Figure]:
    tilts = results.plan["tilts"]
    with drawn(folder / "tilts.png") as axis:
        for (key, title), colour in zip(TITLES.items(), COLOURS, strict=False):
            found = np.array([values(results, tilt, key) for tilt in tilts])
            axis.errorbar(range(len(tilts)), found.mean(1), found.std(1), marker="o", markersize=3, capsize=2, color=colour,
                          label=title)
        axis.set_xticks(range(len(tilts)), [f"{tilt:g}" for tilt in tilts])
        axis.set(xlabel="tilt over writers, t (0 is FedAvg)", ylabel="error of test writers, %")
        axis.legend()
    return [Figure("tilts.png", "Error of test writers by tilt; bars are deviations over seeds.")]


TERM_FEMNIST = Study(
    name="term_femnist", paper="", item="how the tail follows the tilt over clients", title="TERM over writers",
    cost=Cost(22, 3, 1),
    full=Plan(), quick=Plan(seeds=2, visits=5.0), data=FEMNIST, cells=cells, tables=tables, figures=figures,
    claims=(
        Claim("Tilts of 1 and 5 lower the 90th percentile of test writers' errors.", "[ours]",
              lambda results: _gains(results, results.plan["tilts"][1:], "p90")),
        Claim("Tilts of 1 and 5 lower the mean error of the worst 10%.", "[ours]",
              lambda results: _gains(results, results.plan["tilts"][1:], "worst10")),
        Claim("Tilting the examples inside writers as well, with t = 1 for both, lowers the 90th percentile beside FedAvg.",
              "[ours]", lambda results: lower(_inside(results, "p90"), True, what="90th percentile, hierarchical less FedAvg,")),
        Claim("At t = 1 the mean error rises by no more than half a point.", "[ours]",
              lambda results: not_above(less_fedavg(results, 1.0, "mean"), LITTLE, True, "mean, TERM, t = 1 less FedAvg,")),
    ),
    notes=lambda results: [
        f"A linear model; {results.plan['cohort']} writers a round, {results.mean('family', 'rounds'):.0f} rounds, an epoch of "
        "batches of 10, step 0.1 falling to zero by a cosine. All tilts see the same cohorts and batches.",
        "\"Examples tilted\" is hierarchical TERM: a tilt over the examples of a batch inside a writer "
        "(`LocalSGD(example_risk=...)`), and one over writers, or none."],
)
