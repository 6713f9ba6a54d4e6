"""Settings of a first experiment that follow from the data: how inputs are scaled, the step size, the number of rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.data.scaling import By, Scaling

EXAMPLES = 5000             # that the curvature is computed from, evenly spaced
BATCH = 10                  # examples of a step of the file that is written
MOST_STEPS = 30             # of a client in a round: after more, clients that differ are each far on their own way
MOST_FEATURES = 4096        # for which a matrix of second moments is computed
CURVATURE = {"LeastSquares": 2.0, "LogisticRegression": 0.25, "SoftmaxRegression": 0.5}      # of a loss, over that of |x|^2
PIXELS = 255.0
WIDE = 64                   # columns of floats in [-1, 1] that are taken as a flat image, or as bits
LEFT = 0.01                 # of the distance to a constant prediction, after all rounds
OF_DEVIATION = 0.1          # of the targets' deviation, which is left at most
OF_ENTROPY = 1e-3           # of the labels' entropy, by which the loss of learned frequencies may be above it
MOST_ROUNDS = 2000


@dataclass(frozen=True)
class StepPlan:
    """The step size of local training, the number of rounds, and a client's steps in a round, None for one pass over its data."""

    learning_rate: float = 0.1
    rounds: int = 100
    local_steps: int | None = None


def starter_scale(population: Population) -> By | dict[str, float] | None:
    """How a first experiment scales the inputs, as `scale` of [data]: "columns", "pixels", public numbers in a dict, or None.

    Vectors are scaled by columns, those of bytes too unless they reach 255 as flat images do, and images by pixels unless they
    are in [-1, 1] already. Vectors of 64 columns or more in [-1, 1] are taken for flat images: they have one shift and scale for
    all columns, as a pixel that is hardly ever lit, divided by its deviation, would be huge where it is. None for several inputs,
    single numbers, and whole numbers of several axes, which may be tokens.
    """
    inputs = population.inputs
    if isinstance(inputs, dict) or inputs.ndim < 2 or not inputs[0].numel():
        return None
    if inputs.dtype == torch.uint8:
        return {"scale": PIXELS} if inputs.ndim > 2 or float(inputs.max()) == PIXELS else "columns"      # codes are no pixels
    if not inputs.is_floating_point():
        return None
    if inputs.ndim == 2 and inputs.shape[1] < WIDE:
        return "columns"
    rows = (block.example_clients_and_rows()[1] for block in population.client_blocks(1 << 16))
    largest = max(float(inputs[some].abs().max()) for some in rows)
    if inputs.ndim == 2:
        return _one_scale(population) if largest <= 1 else "columns"
    return None if largest <= 1 else "pixels"


def _one_scale(population: Population) -> By | dict[str, float]:
    """A shift and a scale, of one digit, that bring all columns together to mean 0 and deviation 1 about; "columns" for zeros."""
    sums, count = np.zeros(2), 0
    for block in population.client_blocks(1 << 16):
        values = population.inputs[block.example_clients_and_rows()[1]].double()      # type: ignore[index]
        sums += np.array([float(values.sum()), float(values.square().sum())])
        count += values.numel()
    mean = sums[0] / count
    deviation = float(f"{max(sums[1] / count - mean * mean, 0.0) ** 0.5:.1g}")
    return {"shift": round(mean, 1) + 0.0, "scale": deviation} if deviation > 0 else "columns"


def plan_steps(population: Population, suggested: dict[str, Any] | None, scale: By | dict[str, float] | None) -> StepPlan:
    """A step size below one over the curvature of mini-batches of a linear model, and rounds enough to learn a constant.

    The curvature is the largest eigenvalue of the second moments of a client's scaled inputs, beside a one for the bias, and a
    tenth of the longest input's squared length, for mini-batches that hold it. It is that of the worst client: one whose inputs
    lie far from everybody's takes steps on these alone, and a tail is made of such clients. `suggested` is the model; for
    others than linear ones the step size is 0.1, or 0.05 for a convolutional one. Numbers to predict may be far from zero,
    where models start: rounds are such that, from a model without features, a hundredth of that distance is left, or a tenth of
    their deviation where that is less (years around 2000 would otherwise be off by 20). Labels of which some are rare take
    longer, too: rounds are such that a model without features has learned how frequent each is, or the loss would be above that
    of a constant prediction. The scale of the numbers does not change the step size. A client takes one pass over its data, or
    30 steps where the median client's pass has more: models that went each their own way for hundreds of steps are, on average,
    worse than none where clients contradict each other.
    """
    part = suggested["part"] if suggested else ""
    steps = math.ceil(float(population.size.double().median()) / BATCH)
    most = MOST_STEPS if steps > MOST_STEPS else None
    if part not in CURVATURE or isinstance(population.inputs, dict):
        return StepPlan(0.05 if part == "ConvNet" else 0.1, local_steps=most)
    owner, owned = population.example_clients_and_rows()
    some = torch.from_numpy(np.unique(np.linspace(0, len(owned) - 1, min(len(owned), EXAMPLES)).astype(np.int64)))
    rows = owned[some]
    scaling = Scaling.fit(population, scale) if isinstance(scale, str) else Scaling.public(**(scale or {}))
    applied = scaling.apply(population.inputs[rows])
    flat = torch.cat([applied.flatten(1).double(), torch.ones(len(rows), 1, dtype=torch.float64)], 1)      # type: ignore[union-attr]
    longest = float(flat.square().sum(1).max())
    largest = _largest_of_clients(flat, owner[some]) if flat.shape[1] <= MOST_FEATURES else longest
    rate = min(0.1, _round_down(1 / (CURVATURE[part] * (largest + longest / BATCH))))
    targets = population.targets[owned]
    needed = math.log(1 / _distance_left(targets)) / (CURVATURE[part] * rate) if part == "LeastSquares" else \
        steps_to_frequencies(targets.unique(return_counts=True)[1].numpy(), part == "LogisticRegression", rate)
    return StepPlan(rate, int(min(MOST_ROUNDS, 100 * math.ceil(max(needed / (most or steps), 100) / 100))), most)


def steps_to_frequencies(counts: np.ndarray, one_output: bool, rate: float) -> float:
    """How many steps of size `rate` a model without features takes from equal odds to the frequencies of its labels, about.

    `counts` are the examples of each class. It is there where its loss is above the entropy of the labels by a thousandth at
    most. With `one_output` it gives log odds, as logistic regression does, else a score for each class.

    >>> [round(steps_to_frequencies(np.array([one, 1000 - one]), True, 0.1), -2) for one in (500, 100, 25)]
    [0.0, 300.0, 1000.0]
    """
    shares = counts / counts.sum()
    left, done = OF_ENTROPY * float(-shares @ np.log(shares)), 0.0
    scores, step = np.zeros(len(shares)), (0.5 if one_output else 1.0) * rate      # two scores part twice as fast as one
    while done < MOST_ROUNDS * MOST_STEPS:
        odds = np.exp(scores - scores.max())
        odds /= odds.sum()
        if shares @ np.log(shares / odds) <= left:
            break
        stride = max(1.0, 0.01 / (step * float(np.abs(shares - odds).max())))      # some steps at once while little changes
        scores += stride * step * (shares - odds)
        done += stride
    return done


def _largest_of_clients(flat: Tensor, owner: Tensor) -> float:
    """The largest eigenvalue, over clients, of the second moments of a client's rows of `flat`; `owner` is the client of each."""
    parts = flat.split(owner.unique_consecutive(return_counts=True)[1].tolist())
    squares = (part.T @ part if len(part) >= part.shape[1] else part @ part.T for part in parts)      # equal eigenvalues
    return max(float(torch.linalg.eigvalsh(square)[-1]) / len(part) for square, part in zip(squares, parts, strict=True))


def _distance_left(targets: Tensor) -> float:
    """The share of the distance from zero to the mean of `targets` that rounds may leave: 0.01, or a tenth of the deviation."""
    values = targets.double().reshape(len(targets), -1)
    far, spread = values.nanmean(0).abs(), (values - values.nanmean(0)).square().nanmean(0).sqrt()
    shares = (OF_DEVIATION * spread / far)[(far > 0) & (spread > 0)]
    return min([LEFT, *shares.tolist()])


def _round_down(value: float) -> float:
    """A positive number rounded down to one significant digit: 0.03 for 0.0371."""
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.floor(value / power + 1e-9) * power:.1g}")
