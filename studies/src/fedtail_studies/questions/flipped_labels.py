"""A tenth of the training clients have flipped labels: what does training for the tail do to the others?

Not a claim of the papers but what is asked of them: the tail of the training clients is then partly clients no model should fit.
Labels y of a flipped client are K - 1 - y, one mistake that all make; in `where_not` they are drawn at random. Test clients are
all benign; so are the training clients whose errors are shown.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

import fedtail
from fedtail.data import Population
from fedtail.draws import hash_bits
from fedtail_studies.compared.methods import quiet_about_small_tails
from fedtail_studies.emnist.writers import FEMNIST
from fedtail_studies.judging import lower
from fedtail_studies.questions import settings
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Numbers, Study
from fedtail_studies.tables import Row, Table

FLIPPED = 0.1
TAIL_FRACTIONS = (1.0, 0.8, 0.5, 0.1)


def flip(population: Population, classes: int, seed: int) -> tuple[Population, torch.Tensor]:
    """The population with a tenth of its clients flipped, and who they are."""
    order = hash_bits(seed, "flipped labels", population.key).argsort(stable=True)
    bad = torch.zeros(len(population), dtype=torch.bool)
    bad[order[: round(FLIPPED * len(population))]] = True
    owner, rows = population.example_clients_and_rows()
    targets = population.targets.clone()
    wrong = rows[bad[owner]]
    targets[wrong] = classes - 1 - targets[wrong]
    return replace(population, targets=targets), bad


def measured(cell: Cell, theta: float, flipped: bool, place: settings.Place) -> Numbers:
    where = place(cell)
    train, bad = flip(where.train, where.classes, cell.seed)
    with quiet_about_small_tails():
        trained = cell.train(where.method(theta), where.task, train if flipped else where.train, where.rounds)
    benign = where.train.select(~bad)            # the same clients, whether or not the others were flipped
    return {"test": settings.percent(fedtail.evaluate(trained, where.test, engine=fedtail.Engine(device=cell.device)).error),
            "benign": settings.percent(fedtail.evaluate(trained, benign, engine=fedtail.Engine(device=cell.device)).error)}


def _name(theta: float, flipped: bool) -> str:
    return f"{settings.method_name(theta)}, {'a tenth flipped' if flipped else 'clean'}"


def cells(plan: settings.Plan, seed: int, place: settings.Place) -> dict:
    return {_name(theta, flipped): partial(measured, theta=theta, flipped=flipped, place=place)
            for flipped in (False, True) for theta in TAIL_FRACTIONS}


def tables(results: Results) -> list[Table]:
    made = []
    for group, title in (("test", "Error of test clients, all benign, %"), ("benign", "Error of the benign training clients, %")):
        rows = tuple(_row(results, _name(theta, flipped), group) for flipped in (False, True) for theta in TAIL_FRACTIONS)
        made.append(Table(title, tuple(settings.TITLES.values()), rows))
    return made


def _row(results: Results, name: str, group: str) -> Row:
    return Row(name, {settings.TITLES[s]: results.values(name, f"{group}.{s}") for s in settings.STATISTICS})


def _still_helps(results: Results, theta: float, flipped: bool, group: str) -> Finding:
    tail, mean = (results.difference(_name(theta, flipped), _name(1.0, flipped), f"{group}.{s}") for s in ("worst10", "mean"))
    return lower(tail, results.papers_data, None, f"theta {theta:g} less FedAvg: mean {mean.mean:+.2f}, worst 10%")


def _claims() -> tuple[Claim, ...]:
    cases = ((False, "test", "test clients where all are clean"),
             (True, "test", "test clients with a tenth of the clients flipped"),
             (True, "benign", "benign training clients with a tenth of all flipped"))
    return tuple(Claim(f"theta = {theta:g} helps the worst {who}.", "[asked of PLMH23, claimed nowhere]",
                       partial(_still_helps, theta=theta, flipped=flipped, group=group))
                 for flipped, group, who in cases for theta in TAIL_FRACTIONS[1:])


def notes(results: Results) -> list[str]:
    return ["Who is flipped is drawn from the seed; the errors of benign training clients are over the same clients in both "
            "halves of the table.",
            "A superquantile counts whoever has the largest loss. That is its purpose where the loss is large because a client "
            "is different, and its weakness where it is large because the client's data are wrong."]


def _study(name: str, title: str, place: settings.Place, full: settings.Plan, quick: settings.Plan, cost: Cost,
           **more: Any) -> Study:
    return Study(name=name, paper="PLMH23", item="flipped labels (asked of it)", title=title, cost=cost, full=full, quick=quick,
                 cells=partial(cells, place=place), tables=tables, claims=_claims(), notes=notes, **more)


FLIPPED_LABELS = _study("flipped_labels", "A tenth of the clients with flipped labels: generated clients",
                        settings.generated_clients, settings.GENERATED, settings.GENERATED_QUICK, Cost(1000, 6))
FLIPPED_LABELS_FEMNIST = _study("flipped_labels_femnist", "A tenth of the clients with flipped labels", settings.femnist_writers,
                                settings.FEMNIST, settings.FEMNIST_QUICK, Cost(54, 6), data=FEMNIST)
