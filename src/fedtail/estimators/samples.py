"""What `fit` is given: inputs, targets, weights and groups, checked, without the samples that have no weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, column_or_1d, validate_data

from fedtail.errors import FieldError
from fedtail.estimators.reductions import Array
from fedtail.risk import Risk, Superquantile, Tilted, Worst


@dataclass(frozen=True)
class Samples:
    """The arguments of an estimator's `fit`, checked, with only the samples of positive weight."""

    inputs: Array                      # (samples, features)
    targets: NDArray[Any] | None       # (samples,)
    mass: Array                        # (samples,)
    groups: NDArray[Any] | None        # (samples,)
    here: NDArray[np.bool_]            # (all,) who has a weight

    @classmethod
    def from_fit_arguments(cls, estimator: Any, X: ArrayLike, y: ArrayLike | None, sample_weight: ArrayLike | None,
                           groups: ArrayLike | None, **checks: Any) -> Samples:
        """The arguments of `fit`, checked by scikit-learn's rules, without the samples of weight zero.

        `X` is (samples, features); `y`, `sample_weight` and `groups` are (samples,) or None. `estimator` gets n_features_in_ and,
        from a frame with column names, feature_names_in_; `y` is not read where it needs no targets. A `sample_weight` of None is
        one for each sample; `checks` are further arguments of scikit-learn's `validate_data`. Raises ValueError for what does not
        fit, negative weights, and weights that are all zero.
        """
        supervised = estimator.__sklearn_tags__().target_tags.required
        if supervised:
            inputs, targets = validate_data(estimator, X, y, dtype=np.float64, **checks)
        else:
            inputs, targets = validate_data(estimator, X, dtype=np.float64, **checks), None
        mass = _check_sample_weight(sample_weight, inputs, dtype=np.float64)
        if (mass < 0).any():
            raise FieldError("sample_weight", "at least 0", float(mass.min()), "It is the mass of a sample in the risk.")
        labels = None if groups is None else read_groups(groups, inputs)
        here = mass > 0
        if not here.any():
            raise FieldError("sample_weight", "positive for some sample", 0.0, "A sample of weight zero is as if absent.")
        return cls(inputs[here], None if targets is None else targets[here], mass[here],
                   None if labels is None else labels[here], here)

    def pad_weights(self, weights: Array) -> Array:
        """Weights of all samples `fit` was given, (all,), from `weights` of those kept, (samples,): zero if left out."""
        everyone = np.zeros(len(self.here))
        everyone[self.here] = weights
        return everyone


def read_groups(groups: ArrayLike, inputs: Array) -> NDArray[Any]:
    """`groups` as an array with the label of each row of `inputs`, (samples,); ValueError for a wrong length, None or NaN."""
    labels = column_or_1d(groups)
    check_consistent_length(inputs, labels)
    if any(label is None or label != label for label in labels.tolist()):
        raise ValueError("groups must have a label for every sample, got None or NaN. Give those samples a group of their own, "
                         "or a sample_weight of zero and any label.")
    return labels


def tilted_risk(tilt: Any) -> Risk:
    """`Tilted(tilt)`, or `Worst()` for a tilt of infinity; a ValueError for minus infinity, NaN, and what is no number."""
    if not isinstance(tilt, Real) or math.isnan(tilt) or tilt == -math.inf:
        raise FieldError("tilt", "a number above minus infinity", tilt, "0 is the mean, math.inf the largest loss.", symbol="t")
    return Worst() if tilt == math.inf else Tilted(float(tilt))


def tail_risk(tail_fraction: Any) -> Risk:
    """`Superquantile(tail_fraction)`; a ValueError for what is no number in (0, 1]."""
    if not isinstance(tail_fraction, Real):
        raise FieldError("tail_fraction", "in (0, 1]", tail_fraction, "For the worst 20% of samples write 0.2.", symbol="theta")
    return Superquantile(float(tail_fraction))


def check_strength(strength: Any) -> None:
    """Raise a ValueError unless `strength`, the factor of the penalty, is a finite number of at least 0."""
    if not isinstance(strength, Real) or not 0 <= float(strength) < math.inf:
        raise FieldError("strength", "at least 0 and finite", strength, "It is the factor of the penalty; 0 is none.")


def check_max_iter(max_iter: Any) -> None:
    """Raise a ValueError unless `max_iter` is an integer of at least 1."""
    if not isinstance(max_iter, Integral) or max_iter < 1:
        raise FieldError("max_iter", "a positive integer", max_iter, "It bounds the steps of the solver.")
