"""Division by a Hessian that may not be positive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from fedtail.estimators.reductions import Array

LIFT = 1e-14      # of the largest diagonal entry, added to all: directions in which nothing is known stay where they are


def positive_solver(*hessians: Array) -> Callable[[Array], Array]:
    """A function that divides by the first Hessian that is positive, else by the last, its eigenvalues made positive."""
    for hessian in hessians:
        lifted = hessian.copy()
        lifted[np.diag_indices_from(lifted)] += LIFT * np.abs(np.diag(hessian)).max() + 1e-300
        try:
            factor = cho_factor(lifted)
        except LinAlgError:
            continue
        return lambda right, factor=factor: cho_solve(factor, right)      # type: ignore[misc]
    values, axes = eigh(hessians[-1])
    sizes = np.maximum(np.abs(values), 1e-10 * np.abs(values).max() + 1e-300)
    return lambda right: axes @ ((axes.T @ right) / sizes)
