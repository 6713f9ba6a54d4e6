"""Data of the regression studies: QSAR drug discovery, abalone and California housing, and how they are split and corrupted.

What the thesis does not say is taken from the released code it names: the first part of a shuffled training set is corrupted;
abalone's sex is one feature (male or not); California housing has the eight features that scikit-learn computes; features of
these two are standardised over all rows; a constant feature is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedtail.data import Population
from fedtail_studies.study import Data, Needs

QSAR_SHAPE, ABALONE_ROWS, HOUSING_ROWS = (4085, 410), 4177, 20_640
NOISE_MEAN, NOISE_DEVIATION = 5.0, 5.0           # N(5, 5): a standard deviation in the released code
FEATURE_FACTOR, TARGET_FACTOR = 100.0, 10_000.0
MALE = "male"
QSAR_ADVICE = "Write --data DIR, a folder with qsar.npz (arrays x of 4085 x 410 zeros and ones, y)."
ABALONE_ADVICE = ("Write --data DIR, a folder with abalone.npz (arrays x of 4177 x 7 measures, y rings, client the sex, "
                  "client_names).")
HOUSING_ADVICE = "Write --data DIR, a folder with housing.npz (arrays x of 20640 x 8, y, feature_names as in housing.csv)."


@dataclass(frozen=True, eq=False)
class Sides:
    """Examples to train on, of which the first `num_noisy` are corrupted, and clean ones to validate and to test on."""

    x: np.ndarray                                # (train, features), the last one constant where nothing is corrupted
    y: np.ndarray                                # (train,)
    num_noisy: int
    validation_x: np.ndarray
    validation_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def clean(self) -> tuple[np.ndarray, np.ndarray]:
        """The training examples that are not corrupted."""
        return self.x[self.num_noisy :], self.y[self.num_noisy :]

    def rmse(self, params: np.ndarray) -> float:
        """Root mean squared error on the test examples."""
        return root_mean_square(self.test_x @ params - self.test_y)


def root_mean_square(residuals: np.ndarray) -> float:
    """The root of the mean square; infinite where it overflows."""
    return float(np.sqrt(np.mean(np.square(residuals))))


def shuffled(data: Data, draw: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Features with a constant one at the end, and targets, in an order that is drawn; float64."""
    x = torch.as_tensor(data.population.inputs).double().numpy()
    y = data.population.targets.double().numpy().reshape(-1)
    order = draw.permutation(len(y))
    return np.column_stack([x, np.ones(len(x))])[order], y[order]


def noisy_targets(data: Data, share: float, seed: int) -> Sides:
    """80% to train on, 10% to validate on, 10% to test on; the share of the training targets is drawn from N(5, 5^2)."""
    draw = np.random.RandomState(seed)           # the generator of the released code: its splits, where the order of rows is its
    x, y = shuffled(data, draw)
    train, validation = int(0.8 * len(y)), int(0.9 * len(y))
    noisy = int(share * train)
    targets = y[:train].copy()
    targets[:noisy] = draw.normal(NOISE_MEAN, NOISE_DEVIATION, noisy)
    return Sides(x[:train], targets, noisy, x[train:validation], y[train:validation], x[validation:], y[validation:])


def noisy_rows(data: Data, examples: int, noisy: int, seed: int) -> Sides:
    """So many examples to train on, `noisy` of them with features times 100 and targets times 10,000; the last 10% to test on.

    The constant feature is multiplied too: otherwise the printed errors of least squares do not come out.
    """
    x, y = shuffled(data, np.random.RandomState(seed))
    validation, test = int(0.8 * len(y)), int(0.9 * len(y))
    features, targets = x[:examples].copy(), y[:examples].copy()
    features[:noisy] *= FEATURE_FACTOR
    targets[:noisy] *= TARGET_FACTOR
    return Sides(features, targets, noisy, x[validation:test], y[validation:test], x[test:], y[test:])


def read_qsar(place: Path) -> Data:
    """Drug discovery: 4085 compounds, 410 binary features, bioactivity."""
    found = _load(place, "qsar", "qsar_drug", QSAR_ADVICE, ("x", "y"))
    papers = found["x"].shape == QSAR_SHAPE
    count, features = found["x"].shape
    about = f"They are {count} compounds with {features} features; the thesis has 4085, with 411 (one is constant)."
    return Data(f"QSAR drug discovery, {count} compounds", _population(found["x"], found["y"]), papers, about)


def read_abalone(place: Path) -> Data:
    """Abalone: sex as one feature (male or not), seven measures, rings."""
    found = _load(place, "abalone", "abalone", ABALONE_ADVICE, ("x", "y", "client", "client_names"))
    male = found["client"] == list(found["client_names"]).index(MALE)
    x = standardised(np.column_stack([male, found["x"]]))
    return Data(f"abalone, {len(x)} animals", _population(x, found["y"]), len(x) == ABALONE_ROWS, f"They are {len(x)} animals.")


def read_housing(place: Path) -> Data:
    """California housing: the eight features scikit-learn computes, from the counts of housing.csv; values in 100,000 dollars.

    Block groups without a count of bedrooms are left out, so these are never quite the thesis's data.
    """
    found = _load(place, "housing", "california_housing", HOUSING_ADVICE, ("x", "y", "feature_names"))
    column = dict(zip([str(name) for name in found["feature_names"]], found["x"].astype(float).T, strict=True))
    homes, people = column["households"], column["population"]
    x = np.column_stack([column["median_income"], column["housing_median_age"], column["total_rooms"] / homes,
                         column["total_bedrooms"] / homes, people, people / homes, column["latitude"], column["longitude"]])
    there = np.isfinite(x).all(1)
    about = (f"They are {there.sum()} block groups; {(~there).sum()} without a count of bedrooms are left out, and features are "
             "computed from counts. The thesis has all 20640, from scikit-learn.")
    return Data(f"California housing, {there.sum()} block groups", _population(standardised(x[there]), found["y"][there] / 1e5),
                papers=bool(there.all()) and len(x) == HOUSING_ROWS, about=about)


def standardised(x: np.ndarray) -> np.ndarray:
    """Each feature less its mean, over its standard deviation."""
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def _population(x: np.ndarray, y: np.ndarray) -> Population:
    """One client that holds all examples in the order of the arrays."""
    return Population.from_arrays(torch.as_tensor(x.astype(np.float64)), torch.as_tensor(y.astype(np.float64)),
                                  torch.zeros(len(y), dtype=torch.int64))


def _load(place: Path, name: str, folder: str, advice: str, needed: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of NAME.npz at a place or a little below it; refused with advice where they are missing."""
    candidates = (place, place / f"{name}.npz", place / folder / f"{name}.npz")
    files = [file for file in candidates if file.suffix == ".npz" and file.is_file()]
    if not files:
        raise FileNotFoundError(f"there is no {name}.npz in {place}. {advice}")
    with np.load(files[0], allow_pickle=False) as archive:
        missing = [key for key in needed if key not in archive]
        if missing:
            raise ValueError(f"{files[0]} holds no array {', '.join(missing)}. {advice}")
        return {key: archive[key] for key in needed}


QSAR = Needs("QSAR drug discovery", read_qsar, QSAR_ADVICE)
ABALONE = Needs("abalone", read_abalone, ABALONE_ADVICE)
HOUSING = Needs("California housing", read_housing, HOUSING_ADVICE)
