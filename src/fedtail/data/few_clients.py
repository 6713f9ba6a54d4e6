"""Every client of a population of few, by name: how many examples it has, and of which classes or numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtail.data.population import Population
from fedtail.directions import FEW_CLIENTS

MOST_COUNTED = 100           # classes, beyond which only the number of those a client has is listed


def list_few_clients(population: Population, owner: np.ndarray, targets: np.ndarray,
                     real: np.ndarray) -> list[dict[str, Any]] | None:
    """A dict for each of fewer than 20 clients, in the population's order; None for more of them.

    Each has its `name`, the number of its `examples`, and of its targets the `counts` by class (of up to 100 classes) and how
    many `classes` it has, or for numbers their `mean`: a list where there are several for each example, None for what it lacks.
    `owner` is the client of each example, `targets` are (examples, outputs), and `real` says which are no padding.
    """
    if len(population) >= FEW_CLIENTS:
        return None
    numbers = targets.dtype.kind == "f"
    labels = np.unique(targets[real])
    rows: list[dict[str, Any]] = []
    for client in range(len(population)):
        mine = owner == client
        row: dict[str, Any] = {"name": population.name_of(client), "examples": int(population.size[client])}
        if numbers:
            means = [float(column[here].mean()) if here.any() else None
                     for column, here in zip(targets[mine].T, real[mine].T, strict=True)]
            rows.append({**row, "mean": means if len(means) > 1 else means[0]})
            continue
        held, counts = np.unique(targets[mine][real[mine]], return_counts=True)
        known = dict(zip(held.tolist(), counts.tolist(), strict=True))
        every = {str(label): known.get(label, 0) for label in labels.tolist()} if len(labels) <= MOST_COUNTED else {}
        rows.append({**row, "classes": len(held), **({"counts": every} if every else {})})
    return rows
