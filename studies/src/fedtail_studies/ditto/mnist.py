"""Ditto, robust rules and TERM on digits in place of Fashion MNIST, five classes a device: tables 5.1 and 5.9 of [Li23]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedtail_studies.ditto import attack_figures, robustness
from fedtail_studies.ditto.attack_notes import common_notes
from fedtail_studies.ditto.attacked import CLEAN, AttackPlan, cells_of
from fedtail_studies.ditto.devices import EACH, HIDDEN, SIDE, skewed
from fedtail_studies.ditto.printed import FASHION
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Cost, Data, Measure, Needs, Study
from fedtail_studies.tables import Table
from fedtail_studies.tilted.classes_data import MNIST_ADVICE, read_mnist

TABLE, THEIRS = "table 5.9", 500                       # and the thesis's devices
COLUMNS = (CLEAN, "A1 20%", "A1 80%", "A2 80%", "A3 20%")


@dataclass(frozen=True)
class SkewedPlan(AttackPlan):
    """An `AttackPlan` for devices that hold five classes each."""

    each_class: int = 24                               # images of a class on a device


FULL = SkewedPlan(columns=COLUMNS, learning_rate=0.05, batch=16, tuning_epochs=50, with_ditto=(), direction_step=3.0)
QUICK = replace(FULL, seeds=2, rounds=5, tuning_epochs=2)


def read_digits(place: Path) -> Data:
    """MNIST's images with pixels from 0 to 1, which stand in for those of Fashion MNIST."""
    data = read_mnist(place)
    people = data.population
    about = f"They are MNIST's {people.num_examples} images of digits, in place of Fashion MNIST's, which are not at hand."
    return replace(data, name=f"MNIST, {people.num_examples} images", about=about,
                   population=people.with_columns(inputs=torch.as_tensor(people.inputs).float() / 255))


def cells(plan: SkewedPlan, seed: int) -> dict[str, Measure]:
    """Every column and method."""
    return cells_of(plan, skewed)


def tables(results: Results) -> list[Table]:
    """Accuracies and deviations beside those of tables 5.5 and 5.9."""
    return robustness.accuracy_tables(results, FASHION, "[Li23, tables 5.5 and 5.9], for Fashion MNIST")


def notes(results: Results) -> Sequence[str]:
    """What differs from the thesis."""
    plan = results.plan
    return [
        f"{plan['devices']} devices (the thesis: {THEIRS}), each with {plan['each_class']} images of each of {EACH} classes, "
        f"dealt out anew for every seed; {SIDE} x {SIDE} pixels and a network with one hidden layer of {HIDDEN} units (the "
        f"thesis: a CNN). Fine-tuning is {plan['tuning_epochs']} epochs from the last global model. Five of the ten columns are "
        "run, chosen before any result was seen.",
        *common_notes(results),
    ]


def claims() -> tuple[Claim, ...]:
    """What table 5.9 bears out of the claims about other data, and what it says of lambda and of fine-tuning."""
    return (
        *robustness.claims_of_all(FASHION, TABLE),
        robustness.stronger_pull_claim(FASHION, TABLE),
        robustness.dynamic_claim(),
        robustness.fine_tuning_claim(FASHION, TABLE),
    )


DITTO_MNIST = Study(
    name="ditto_mnist", paper="Li23", item="tables 5.1, 5.5, 5.9, figures 5.3 to 5.5 (digits for Fashion MNIST)",
    title="Ditto under attacks", cost=Cost(100, 5), full=FULL, quick=QUICK,
    data=Needs("MNIST by writer", read_digits, MNIST_ADVICE), cells=cells, tables=tables, figures=attack_figures.figures,
    notes=notes, claims=claims(),
)
