"""A family of models and a client that picks its own, against the best single theta [PLMH23, sections 4.1 and 6].

One model for each theta, all trained on the same cohorts. A test client picks the one with the least error on half of its
examples and is judged on the other half; so is every single model.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import fedtail
from fedtail.evaluation import evaluate_family
from fedtail_studies.compared.methods import quiet_about_small_tails
from fedtail_studies.emnist.writers import FEMNIST
from fedtail_studies.judging import difference, not_above
from fedtail_studies.questions import settings
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Numbers, Study
from fedtail_studies.tables import Row, Table

TAIL_FRACTIONS = (1.0, 0.8, 0.5, 0.1)
PICK = "each client's pick"
CELL = "family"


def measured(cell: Cell, place: settings.Place) -> Numbers:
    where = place(cell)
    family = fedtail.Family(tuple(where.method(theta) for theta in TAIL_FRACTIONS))
    with quiet_about_small_tails():
        trained = cell.train(family, where.task, where.train, where.rounds)
    found = evaluate_family(trained, where.test, seed=cell.seed, names=[settings.key(theta) for theta in TAIL_FRACTIONS])
    members = {name: settings.percent(errors) for name, errors in zip(found.names, found.members, strict=True)}
    return {**members, "pick": settings.percent(found.chosen), "counts": found.counts()}


def cells(plan: settings.Plan, seed: int, place: settings.Place) -> dict:
    return {CELL: partial(measured, place=place)}


def best_single(results: Results, statistic: str) -> str:
    """The theta that does best on the test clients themselves: the hardest one to beat."""
    return min((settings.key(theta) for theta in TAIL_FRACTIONS), key=lambda name: results.mean(CELL, f"{name}.{statistic}"))


def tables(results: Results) -> list[Table]:
    names = [*(settings.key(theta) for theta in TAIL_FRACTIONS), "pick"]
    rows = [Row(PICK if name == "pick" else name.replace("_", "."), {
        **{settings.TITLES[s]: results.values(CELL, f"{name}.{s}") for s in settings.STATISTICS},
        "picked by": results.values(CELL, f"counts.{name}") if name != "pick" else []}) for name in names]
    return [Table("Error on held-out halves of test clients, %, and how many clients picked a model",
                  (*settings.TITLES.values(), "picked by"), tuple(rows), head="model")]


def _at_least_as_good(results: Results, statistic: str) -> Finding:
    """Not above the best single theta by more than that varies from seed to seed."""
    best = best_single(results, statistic)
    found = difference(results.values(CELL, f"pick.{statistic}"), results.values(CELL, f"{best}.{statistic}"))
    what = f"{settings.TITLES[statistic]}, own pick less {best.replace('_', '.')}, the best on these clients,"
    values = results.values(CELL, f"{best}.{statistic}")
    margin = statistics.stdev(values) if len(values) > 1 else 0.0
    finding = not_above(found, margin, results.papers_data, what)
    return finding._replace(reason=f"{finding.reason}, the deviation of the latter over seeds")


def _study(name: str, title: str, place: settings.Place, full: settings.Plan, quick: settings.Plan, cost: Cost,
           **more: Any) -> Study:
    said = "[PLMH23, sections 4.1 and 6: the model family]"
    text = "With a model of each client's choice the {} is no higher than with the best single theta."
    claims = tuple(Claim(text.format(settings.TITLES[s]), said, partial(_at_least_as_good, statistic=s))
                   for s in ("worst10", "p90", "mean"))
    return Study(name=name, paper="PLMH23", item="the model family", title=title, cost=cost, full=full, quick=quick,
                 cells=partial(cells, place=place), tables=tables, claims=claims, **more)


FAMILY = _study("family", "A family of models, each client picks its own: generated clients", settings.generated_clients,
                settings.GENERATED, settings.GENERATED_QUICK, Cost(1000, 4))
FAMILY_FEMNIST = _study("family_femnist", "A family of models, each client picks its own", settings.femnist_writers,
                        settings.FEMNIST, settings.FEMNIST_QUICK, Cost(54, 3), data=FEMNIST)
