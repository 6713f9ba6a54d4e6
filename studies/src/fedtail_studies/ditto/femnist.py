"""Ditto, robust rules and TERM on FEMNIST by writer under three attacks: tables 5.1, 5.3, 5.5, 5.6 and 5.8 of [Li23]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtail_studies.ditto import attack_figures, robustness
from fedtail_studies.ditto.attacked import AttackPlan, cells_of
from fedtail_studies.ditto.devices import HIDDEN, SIDE, writers
from fedtail_studies.ditto.printed import BEST, FEMNIST
from fedtail_studies.emnist import writers as emnist
from fedtail_studies.results import Results
from fedtail_studies.study import Cost, Measure, Study
from fedtail_studies.tables import Table

COLUMNS = ("clean", "A1 20%", "A1 80%", "A2 80%", "A3 20%")
FULL = AttackPlan(columns=COLUMNS, rounds=80, batch=16, strengths=(0.1, 1.0), tilts=(1.0, 5.0), tuning_epochs=50)
QUICK = replace(FULL, seeds=2, rounds=5, columns=("clean", "A1 80%", "A2 80%", "A3 20%"), tuning_epochs=2)


def cells(plan: AttackPlan, seed: int) -> dict[str, Measure]:
    """Every column and method."""
    return cells_of(plan, writers)


def tables(results: Results) -> list[Table]:
    """Accuracies and deviations beside those of tables 5.5, 5.6 and 5.8."""
    return robustness.accuracy_tables(results, FEMNIST, "[Li23, tables 5.5, 5.6 and 5.8]")


def notes(results: Results) -> Sequence[str]:
    """What differs from the thesis."""
    plan = results.plan
    return [
        f"{plan['devices']} writers, drawn anew for every seed (the thesis: 205), images of {SIDE} x {SIDE} pixels and a network "
        f"with one hidden layer of {HIDDEN} units (the thesis: a CNN), batches of {plan['batch']} (32). A writer takes part in "
        f"about {plan['rounds'] * plan['cohort'] / plan['devices']:.0f} rounds.",
        f"Fine-tuning is {plan['tuning_epochs']} epochs from the last global model. Five of the ten columns are run, chosen "
        "before any result of them was seen.",
        *robustness.common_notes(results),
    ]


DITTO_FEMNIST = Study(
    name="ditto_femnist", paper="Li23", item="tables 5.1, 5.3, 5.5, 5.6, 5.8, figures 5.3 to 5.5 (FEMNIST)",
    title="Ditto under attacks", cost=Cost(80, 15), full=FULL, quick=QUICK, data=emnist.FEMNIST, cells=cells, tables=tables,
    figures=attack_figures.figures, notes=notes,
    claims=(
        *robustness.common_claims(FEMNIST, "table 5.8"),
        robustness.fine_tuning_claim(FEMNIST, "table 5.8"),
        robustness.claim("Under model replacement FedMGDA+ is more accurate than Ditto.", "[Li23, table 5.8]", FEMNIST, BEST,
                         "FedMGDA+", "A3"),
    ),
)
