"""Robust linear regression: the methods of [Li23, tables 7.2 and 7.3], each from features and targets to coefficients.

The thesis states the losses and their parameters; of CRR and STIR it names the papers only. Those two are written here after the
papers' definitions: CRR [31] alternates between the k largest residuals, taken as the corruption, and least squares on the
targets without it; STIR [217] solves least squares again and again with weights min(1/|residual|, M), with M growing in stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog, minimize
from scipy.sparse import csr_matrix

import fedtail
from fedtail.solvers import minimise
from fedtail_studies.tilted.regression_data import Sides, root_mean_square

RIDGES = (0.0, 1e-4, 0.01, 0.1, 1.0, 2.0)        # the regularisation parameters of section 7.12.2.2, and none


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """ERM: the smallest of the coefficients with the least squared error."""
    return np.linalg.lstsq(x, y, rcond=None)[0]


def ridge(x: np.ndarray, y: np.ndarray, strength: float) -> np.ndarray:
    """Least squares with `strength` times the squared norm of the coefficients beside the sum of squared errors."""
    return np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y) if strength else least_squares(x, y)


def genie_with_ridge(sides: Sides) -> np.ndarray:
    """Least squares on the clean training examples, with the ridge that is best on the validation examples."""
    fits = [ridge(*sides.clean(), strength) for strength in RIDGES]
    return min(fits, key=lambda params: root_mean_square(sides.validation_x @ params - sides.validation_y))


def least_absolute(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """L1: the least sum of absolute errors, exact: the multipliers of the linear program max y.a, x'a = 0, |a| <= 1."""
    found = linprog(-y, A_eq=csr_matrix(x.T), b_eq=np.zeros(x.shape[1]), bounds=(-1, 1), method="highs")
    if found.x is None:
        raise RuntimeError(f"the linear program of the L1 loss was not solved: {found.message}")
    return -np.asarray(found.eqlin.marginals)


def huber(x: np.ndarray, y: np.ndarray, threshold: float) -> np.ndarray:
    """The least sum of Huber losses with `threshold` (delta), by L-BFGS from least squares, on features scaled to unit norm."""
    scale = np.sqrt((x**2).sum(0)).clip(1e-12)
    scaled = x / scale

    def objective(params: np.ndarray) -> tuple[float, np.ndarray]:
        residual = scaled @ params - y
        clipped = residual.clip(-threshold, threshold)
        return float(clipped @ (residual - clipped / 2)), scaled.T @ clipped

    start = least_squares(x, y) * scale
    return minimize(objective, start, jac=True, method="L-BFGS-B",
                    options={"maxiter": 5000, "ftol": 1e-14, "gtol": 1e-8}).x / scale


def consistent_robust(x: np.ndarray, y: np.ndarray, corrupted: int, steps: int = 500) -> np.ndarray:
    """CRR: least squares on the targets less the `corrupted` (k) largest residuals, in turn, until these stay where they are."""
    project = np.linalg.pinv(x)
    params = project @ y
    for _ in range(steps):
        residual = y - x @ params
        corruption = np.zeros_like(y)
        largest = np.argpartition(-np.abs(residual), max(corrupted - 1, 0))[:corrupted]
        corruption[largest] = residual[largest]
        found = project @ (y - corruption)
        if np.linalg.norm(found - params) <= 1e-6 * max(1.0, float(np.linalg.norm(found))):
            return found
        params = found
    return params


def truncated_reweighted(x: np.ndarray, y: np.ndarray, truncation: float = 1e-3, growth: float = 10.0, stages: int = 6,
                         solves: int = 30) -> np.ndarray:
    """STIR: least squares with weights min(1/|residual|, M) until it moves by at most 2 / (growth M), then M grows, in stages.

    M begins at `truncation`, as in the released code, and a stage ends after so many `solves`; the thesis states no values.
    """
    table, params = csr_matrix(x), np.zeros(x.shape[1])
    for _ in range(stages):
        for _ in range(solves):
            weights = 1 / np.abs(table @ params - y).clip(1 / truncation)
            moments = (table.T @ table.multiply(weights[:, None]).tocsr()).toarray()
            moments[np.diag_indices_from(moments)] += 1e-10 * np.trace(moments) / len(moments)      # features may be collinear
            found = np.linalg.solve(moments, table.T @ (weights * y))
            moved, params = float(np.linalg.norm(found - params)), found
            if moved <= 2 / (growth * truncation):
                break
        truncation *= growth
    return params


class Predictions(torch.autograd.Function):
    """Features times coefficients, with a gradient in the coefficients, for features that are mostly zeros."""

    @staticmethod
    def forward(ctx: Any, params: torch.Tensor, features: Any) -> torch.Tensor:
        """(examples,) predictions of (features,) coefficients; `features` is a sparse matrix of scipy."""
        ctx.features = features
        return torch.from_numpy(features @ params.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient in the coefficients."""
        return torch.from_numpy(ctx.features.T @ gradients[0].numpy()), None


@dataclass(frozen=True)
class Descent:
    """Gradient descent with steps of one size (algorithm 13), or L-BFGS where `step_size` is None."""

    steps: int
    step_size: float | None = None


def tilted(x: np.ndarray, y: np.ndarray, tilt: float, descent: Descent, start: np.ndarray | None = None,
           through: Sequence[float] = ()) -> tuple[np.ndarray, float]:
    """TERM with squared losses (not halved), from `start`, by default zero: coefficients and the tilted loss there.

    `through` are tilts that are minimised first, each from the solution before: continuation.
    """
    features, targets = csr_matrix(x), torch.as_tensor(y)
    origin = torch.zeros(x.shape[1], dtype=torch.float64) if start is None else torch.as_tensor(start)
    how: dict[str, Any] = {"method": "lbfgs"} if descent.step_size is None else {"step_size": descent.step_size}
    found = minimise(lambda params: (Predictions.apply(params, features) - targets).square(), origin, fedtail.Tilted(tilt),
                     steps=descent.steps, through=tuple(fedtail.Tilted(before) for before in through), **how)
    return found.params.detach().numpy(), found.value
