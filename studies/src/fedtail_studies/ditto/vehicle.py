"""Ditto, robust rules and TERM on Vehicle under three attacks: table 5.7 and rows of tables 5.5 and 5.6 of [Li23]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

import fedtail
from fedtail.models import LogisticRegression
from fedtail.multitask import mocha
from fedtail_studies.ditto import attack_figures, robustness
from fedtail_studies.ditto.attack_notes import common_notes
from fedtail_studies.ditto.attacked import CLEAN, AttackPlan, attack_in, benign, cells_of, over_devices
from fedtail_studies.ditto.devices import sensors
from fedtail_studies.ditto.printed import BEST, VEHICLE, WIDE
from fedtail_studies.ditto.several_models import client_accuracies
from fedtail_studies.judging import difference, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Finding, Measure, Needs, Numbers, Study
from fedtail_studies.tables import Table
from fedtail_studies.tilted.fairness_vehicle import ADVICE, read_vehicle

FULL = AttackPlan(columns=WIDE, with_ditto=("clipping", "multi-Krum"))
QUICK = replace(FULL, seeds=2, rounds=10, columns=("clean", "A1 20%", "A1 80%", "A2 80%", "A3 20%"), tilts=(1.0, 5.0))


RELATED = "MOCHA"
STRENGTHS, UPDATES = (1.0, 0.1, 0.01), 12              # of MOCHA: lambda to choose from, and how often tasks are related anew
AS_GOOD = 2.0                                          # points of accuracy


def related_models(cell: Cell, column: str) -> Numbers:
    """MOCHA on the samples as they are poisoned, with the strength of the best validation accuracy of benign devices."""
    devices = sensors(cell)
    attack = attack_in(column, cell.plan.cohort, cell.seed)
    chosen = benign(devices, attack)
    train = devices.train if attack is None else attack.on_population(devices.train).poisoned(devices.train)
    task, found = fedtail.Task(LogisticRegression(torch.as_tensor(train.inputs).shape[1])), []
    for strength in STRENGTHS:
        models = mocha(train, task, strength, max_updates=UPDATES, tolerance=1e-3)
        test, validation = (client_accuracies(models.evaluate(part)) for part in (devices.test, devices.validation))
        found.append(over_devices(test, validation, chosen))
    return {RELATED: max(found, key=lambda one: one["validation"])}


def cells(plan: AttackPlan, seed: int) -> dict[str, Measure]:
    """Every column and method; MOCHA, to which no updates are sent, without attacks and with poisoned labels."""
    related = {f"{column}: {RELATED}": partial(related_models, column=column) for column in plan.columns
               if column == CLEAN or column.startswith("A1")}
    return {**cells_of(plan, sensors), **related}


def as_good_as_related(results: Results) -> Finding:
    """Whether Ditto is at least as accurate as MOCHA without attacks, to `AS_GOOD` points."""
    found = difference(robustness.values(results, CLEAN, RELATED), robustness.values(results, CLEAN, BEST))
    return not_above(found, AS_GOOD, results.papers_data, "accuracy, clean, MOCHA less Ditto, best lambda,")


def tables(results: Results) -> list[Table]:
    """Accuracies and deviations beside those of tables 5.5 and 5.7."""
    return robustness.accuracy_tables(results, VEHICLE, "[Li23, tables 5.5 and 5.7]")


def notes(results: Results) -> Sequence[str]:
    """What differs from the thesis."""
    return [
        "A linear SVM on standardised features. The samples are those that the thesis trains on; its test samples are not at "
        "hand, so that a sensor is tested on a fifth of its own, five at the median: deviations over sensors are the larger.",
        "MOCHA is solved on all samples at once, with the logistic loss: its dual for the hinge loss takes minutes here. Nothing "
        f"is sent, so that only labels can be poisoned. lambda is the best of {', '.join(f'{one:g}' for one in STRENGTHS)} by "
        "validation accuracy of benign devices.",
        *common_notes(results),
        f"The step {results.plan['learning_rate']:g} is, of 0.01 and 0.1, the best without attacks on a seed that is not shown. "
        "After results were seen one thing was changed: personal models begin with the initial model, as in Algorithm 7. At "
        "first a device began with the shared model that it received when it was first drawn, which may already be corrupted; "
        "local models then depended on the attack, which they must not.",
    ]


DITTO_VEHICLE = Study(
    name="ditto_vehicle", paper="Li23", item="tables 5.5 to 5.7, figures 5.4, 5.5 (Vehicle)", title="Ditto under attacks",
    cost=Cost(100, 15), full=FULL, quick=QUICK, data=Needs("Vehicle", read_vehicle, ADVICE), cells=cells, tables=tables,
    figures=attack_figures.figures, notes=notes,
    claims=(
        *robustness.common_claims(VEHICLE, "table 5.7"),
        robustness.claim("Pulled towards a model made with multi-Krum, Ditto is more accurate under attacks than it is else.",
                         "[Li23, table 5.6, for CelebA]", VEHICLE, BEST, f"{BEST} + multi-Krum", ""),
        Claim(f"Without attacks Ditto is at least as accurate as MOCHA, to {AS_GOOD:g} points.", "[Li23, table 5.7]",
              as_good_as_related),
        robustness.claim("Without attacks MOCHA's accuracy varies less over devices than the global model's.",
                         "[Li23, table 5.7]", VEHICLE, RELATED, "global", CLEAN, "std"),
        robustness.claim("Where labels are poisoned MOCHA is more accurate than the global model.", "[Li23, table 5.7]", VEHICLE,
                         "global", RELATED, "A1"),
    ),
)
