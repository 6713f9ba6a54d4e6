"""Division by a Hessian that may not be positive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from fedtail.estimators.reductions import Array

LIFT = 1e-14      # of the largest diagonal entry, added to all: directions in which nothing is known stay where they are


def positive_definite_solver(*hessians: Array) -> Callable[[Array], Array]:
    """A function v -> H^-1 v, from (p,) to (p,), for symmetric (p, p) `hessians` in order of preference, at least one.

    H is the first that is positive definite after a tiny lift of its diagonal. If none is, H is the last with its eigenvalues
    replaced by their absolute values, at least 1e-10 of the largest. The arguments are not changed; ValueError where one is not
    finite.
    """
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
