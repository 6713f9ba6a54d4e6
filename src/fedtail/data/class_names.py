"""Labels of any kind as classes 0, 1, ..., with their names kept: text, booleans, and numbers that a list puts in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.errors import FieldError
from fedtail.losses import IGNORED

FEW_CLASSES = 20             # up to which floats that are whole numbers may be meant as classes
MOST_LISTED = 1000           # classes that a file lists
NUMBERS_SHARE = 0.2          # of different values among the examples, from which on whole numbers are numbers to predict


def with_classes(population: Population, classes: Sequence[Any]) -> Population:
    """The population with its labels numbered by their place in `classes`, which lists them as the data have them.

    `with_classes(population, [-1, 1])` makes class 0 of -1 and class 1 of 1; text is listed as text. The names stay as
    `population.classes`, so that tables and predictions can use them. The list may have classes that no client here has. Raises
    FieldError for a list that is empty or names a class twice, ValueError for a label that it lacks.

    >>> signs = Population.from_arrays([[0.0], [1.0]], [1, -1], client=["a", "a"])
    >>> with_classes(signs, [-1, 1]).targets.tolist(), with_classes(signs, [-1, 1]).classes
    ([1, 0], ('-1', '1'))
    """
    names = tuple(_text_of(one) for one in classes)
    if not names or len(set(names)) < len(names):
        raise FieldError("classes", "a list of the labels, each once", list(classes), "Write classes = [\"no\", \"yes\"].")
    if population.classes is not None:
        held: dict[Any, str] = dict(enumerate(population.classes))
        present = population.targets.unique().tolist()
    else:
        present = [label for label in population.targets.unique().tolist() if label != IGNORED]
        held = {label: _text_of(label) for label in present}
    place_of = {name: place for place, name in enumerate(names)}
    for label in present:
        if label != IGNORED and held[label] not in place_of:
            raise ValueError(f"y holds the label {held[label]!r}, which is not among classes = {list(classes)}. Add it there, or "
                             "leave these examples out.")
    numbered = torch.full_like(population.targets, IGNORED, dtype=torch.int64)
    for label in present:
        if label != IGNORED:
            numbered[population.targets == label] = place_of[held[label]]
    return replace(population, targets=numbered, classes=names, folder=None)


def with_number_targets(population: Population) -> Population:
    """The population with whole-number targets as numbers to predict, float32; raises ValueError where they are names."""
    if population.classes is not None:
        raise ValueError(f"y holds the names {', '.join(population.classes[:3])}, which are no numbers to predict. Leave out "
                         'targets = "numbers".')
    return replace(population, targets=population.targets.float(), folder=None)


def classes_to_list(population: Population) -> list[Any] | None:
    """The labels that a file should list as `classes`, since they are not 0, 1, ... already; None where it need not.

    They are names, whole numbers with gaps or not from 0, and floats that are a few whole numbers, in sorted order.
    """
    targets = population.targets[population.example_clients_and_rows()[1]]
    if population.classes is not None:
        return list(population.classes)
    if targets.ndim > 1 or are_whole_numbers_to_predict(targets):
        return None
    labels = targets.unique()
    if targets.is_floating_point() and not _are_few_whole(labels, len(targets)):
        return None
    found = [int(label) for label in labels.tolist() if label != IGNORED]
    numbered = found == list(range(len(found))) and not targets.is_floating_point()
    gap_within = found and found[0] >= 0 and found[-1] < 2 * len(found) and not targets.is_floating_point() and found[0] == 0
    return None if numbered or gap_within or not 1 < len(found) <= MOST_LISTED else found


def are_whole_numbers_to_predict(targets: Tensor) -> bool:
    """Whether whole-number targets, (examples,), have so many values that they are no classes: a fifth of their number."""
    if targets.ndim > 1 or targets.is_floating_point():
        return False
    return len(targets.unique()) > max(FEW_CLASSES, NUMBERS_SHARE * len(targets))


def _are_few_whole(labels: Tensor, examples: int) -> bool:
    """Whether the distinct float `labels` are two to twenty whole numbers without gaps, or just two: classes, most likely."""
    if not 1 < len(labels) <= min(FEW_CLASSES, examples // 2) or not bool((labels == labels.round()).all()):
        return False
    return len(labels) == 2 or float(labels[-1] - labels[0]) == len(labels) - 1


def _text_of(label: Any) -> str:
    """A label as text: 1.0 and 1 are "1", True is "True"."""
    if isinstance(label, (float, np.floating)) and float(label).is_integer():
        return str(int(label))
    return str(label)
