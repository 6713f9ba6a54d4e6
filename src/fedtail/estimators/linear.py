"""Linear and logistic regression under a tilted risk or a superquantile, as estimators of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedtail.errors import FieldError
from fedtail.estimators.fitting import Solution, minimise_directly, minimise_risk
from fedtail.estimators.linear_problem import (
    CrossEntropy,
    Design,
    LinearProblem,
    PointLoss,
    SquaredError,
    class_contrasts,
    class_probabilities,
)
from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array
from fedtail.estimators.samples import Samples, check_max_iter, check_strength, tail_risk, tilted_risk
from fedtail.risk import Risk, Tilted


@dataclass(frozen=True)
class LinearFit:
    """What a linear model of any kind knows after `fit`."""

    coefficients: Array                # (q, features)
    intercepts: Array                  # (q,)
    attributes: dict[str, Any]         # of the estimator, besides those

    @classmethod
    def from_samples(cls, estimator: Any, samples: Samples, loss: PointLoss, risk: Risk) -> LinearFit:
        """Minimise `risk` of `loss` over the samples, with the penalty, intercept and limits that `estimator` asks for.

        These are its strength, fit_intercept, max_iter and start; it is only read. `attributes` has risk_,
        weights_ (all samples `fit` was given, sum one) and n_iter_, and with groups groups_ and group_losses_. Issues a
        ConvergenceWarning where the minimum was not reached; raises ValueError for a bad parameter.
        """
        check_strength(estimator.strength)
        check_max_iter(estimator.max_iter)
        units = Units.from_masses(samples.mass, samples.groups)
        design = Design.from_inputs(samples.inputs, samples.mass / samples.mass.sum(), estimator.fit_intercept)
        problem = LinearProblem(design, loss, units, float(estimator.strength))
        found = _minimise_from_start(problem, risk, estimator.start, estimator.max_iter)
        found.warn_unless_converged(estimator, "Raise max_iter, scale the data, or add a penalty (strength).")
        attributes = found.risk_attributes(problem, risk, samples, units)
        return cls(*design.coefficients_and_intercepts(found.point), attributes)


def _minimise_from_start(problem: LinearProblem, risk: Risk, start: str, max_iter: int) -> Solution:
    """Minimise `risk` of the problem's losses from `start`: "erm" (by way of the mean) or "zero" (from zero coefficients).

    "zero" differs from "erm" for a negative tilt only: other risks have no second minimum and always go by way of the mean.
    `max_iter` bounds the steps for each risk on the way. Raises ValueError for any other `start`.
    """
    if start not in ("erm", "zero"):
        raise FieldError("start", "'erm' or 'zero'", start, "It matters for a negative tilt only.")
    if start == "zero" and isinstance(risk, Tilted) and risk.tilt < 0:
        return minimise_directly(problem, risk, problem.zero_point(), max_iter)
    return minimise_risk(problem, risk, problem.zero_point(), max_iter)


class LinearRegressor(RegressorMixin, BaseEstimator):
    """Linear regression under the risk that a subclass gives in `_risk_to_minimise`."""

    start: str = "erm"                 # a parameter of those whose risk may have several minima
    coef_: Array
    intercept_: float

    def _risk_to_minimise(self) -> Risk:
        """The risk of the squared errors that `fit` minimises; a ValueError where a parameter does not fit."""
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> Self:
        """Fit to inputs `X`, (samples, features), and targets `y`, (samples,); sets the fitted attributes, returns self.

        The masses in the risk are those of `sample_weight`, (samples,), by default equal; a sample of weight zero is left out.
        With `groups`, (samples,), the losses in the risk are the mean losses of the groups, whose masses are the sums of their
        samples'. Raises a ValueError for what cannot be fitted; a scikit-learn ConvergenceWarning says that `max_iter` was too
        small.
        """
        samples = Samples.from_fit_arguments(self, X, y, sample_weight, groups, y_numeric=True)
        loss = SquaredError(np.asarray(samples.targets, dtype=np.float64))
        fitted = LinearFit.from_samples(self, samples, loss, self._risk_to_minimise())
        self.coef_, self.intercept_ = fitted.coefficients[0], float(fitted.intercepts[0])
        self.__dict__.update(fitted.attributes)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The prediction for each row of `X`, (samples,) float64.

        Raises sklearn's NotFittedError before `fit`, and ValueError for another number of features.
        """
        check_is_fitted(self)
        return validate_data(self, X, reset=False, dtype=np.float64) @ self.coef_ + self.intercept_


class LogisticClassifier(ClassifierMixin, BaseEstimator):
    """Logistic regression, softmax for more than two classes, under the risk that a subclass gives in `_risk_to_minimise`."""

    start: str = "erm"                 # a parameter of those whose risk may have several minima
    classes_: NDArray[Any]
    coef_: Array
    intercept_: Array

    def _risk_to_minimise(self) -> Risk:
        """The risk of the cross entropies that `fit` minimises; a ValueError where a parameter does not fit."""
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> Self:
        """Fit to inputs `X`, (samples, features), and classes `y`, (samples,); sets the fitted attributes, returns self.

        The masses in the risk are those of `sample_weight`, (samples,), by default equal; a sample of weight zero is left out.
        With `groups`, (samples,), the losses in the risk are the mean losses of the groups, whose masses are the sums of their
        samples'; `groups=y` has classes as groups. Raises a ValueError for what cannot be fitted, such as a single class; a
        scikit-learn ConvergenceWarning says that `max_iter` was too small.
        """
        samples = Samples.from_fit_arguments(self, X, y, sample_weight, groups)
        check_classification_targets(samples.targets)
        classes, labels = np.unique(np.asarray(samples.targets), return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"{type(self).__name__} needs samples of at least two classes, got one class: "
                             f"{classes.tolist()[0]!r}.")
        fitted = LinearFit.from_samples(self, samples, CrossEntropy.from_labels(labels, len(classes)), self._risk_to_minimise())
        scores = class_contrasts(len(classes))
        scores = scores[1:] if len(classes) == 2 else scores
        self.classes_, self.coef_, self.intercept_ = classes, scores @ fitted.coefficients, scores @ fitted.intercepts
        self.__dict__.update(fitted.attributes)
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Scores of the rows of `X`: (samples, classes) in the order of `classes_`; of two classes the second's, (samples,).

        Scores are log-probabilities up to a constant per row. Raises sklearn's NotFittedError before `fit`.
        """
        check_is_fitted(self)
        scores = validate_data(self, X, reset=False, dtype=np.float64) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: ArrayLike) -> Array:
        """The probabilities of `classes_`, in their order, for each row of `X`: (samples, classes).

        Raises sklearn's NotFittedError before `fit`.
        """
        scores = self.decision_function(X)
        return class_probabilities(np.c_[np.zeros_like(scores), scores] if scores.ndim == 1 else scores)

    def predict_log_proba(self, X: ArrayLike) -> Array:
        """The log-probabilities of `classes_`, in their order, for each row of `X`: (samples, classes).

        Finite also where the probability underflows. Raises sklearn's NotFittedError before `fit`.
        """
        scores = self.decision_function(X)
        scores = np.c_[np.zeros_like(scores), scores] if scores.ndim == 1 else scores
        return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of each row of `X`, (samples,), one of `classes_`; NotFittedError before `fit`."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]


class TiltedLinearRegression(LinearRegressor):
    r"""Linear regression by the tilted risk of the squared errors, TERM [Li23, eq. (7.2)].

    Minimises  (1/t) log sum_i m_i exp(t (y_i - x_i w - b)^2) + (strength / 2) |w|^2  with `tilt` (t) and masses m of sum one.
    t > 0 lowers the largest errors, t = 0 is least squares (ridge regression), t < 0 plays down outliers, `math.inf` is the
    smallest largest error. The tilt is in units of one over the loss: with targets in other units it means something else.

    For t < 0 the risk is not convex, and `start` decides which minimum is found: "erm" follows minima from least squares
    through tilts between zero and t; "zero" begins at t with all coefficients zero, which stands more outliers than good samples
    where the good targets are near zero.

    After `fit`: `coef_` (features,), `intercept_`, `risk_` (the value of the risk), `weights_` (how much each sample contributes
    to the gradient, sum one), `n_iter_`, and with groups `groups_` (their labels) and `group_losses_`.

    >>> X, y = np.arange(6.0)[:, None], np.array([0.0, 1.0, 2.0, 30.0, 4.0, 5.0])      # on a line, but for one outlier
    >>> TiltedLinearRegression(tilt=0.0).fit(X, y).coef_.round(3)
    array([1.771])
    >>> TiltedLinearRegression(tilt=-1.0).fit(X, y).coef_.round(3)
    array([1.])
    """

    def __init__(self, tilt: float = 1.0, *, strength: float = 0.0, fit_intercept: bool = True, start: str = "erm",
                 max_iter: int = 200):
        """Keep the parameters; they are checked in `fit`.

        `tilt` is t, `strength` the factor of the squared penalty, `start` where fits of negative tilts begin ("erm" or "zero"),
        and `max_iter` the most steps for each risk on the way. With `fit_intercept` the model has an intercept, which is not
        penalised.
        """
        self.tilt = tilt
        self.strength = strength
        self.fit_intercept = fit_intercept
        self.start = start
        self.max_iter = max_iter

    def _risk_to_minimise(self) -> Risk:
        """`Tilted(tilt)`, or `Worst` for an infinite tilt; a ValueError for a tilt that is no number or minus infinity."""
        return tilted_risk(self.tilt)


class SuperquantileLinearRegression(LinearRegressor):
    r"""Linear regression by the superquantile of the squared errors: the mean of the worst `tail_fraction` (theta) of them.

    Minimises  S_theta((y_i - x_i w - b)^2) + (strength / 2) |w|^2,  [PLMH23, eq. (6)] over samples. theta = 1 is least squares
    (ridge regression), theta -> 0 the smallest largest error. Convex, and solved exactly by an interior-point method up to a
    thousand coefficients; beyond, L-BFGS minimises a smoothed tail.

    After `fit`: `coef_` (features,), `intercept_`, `risk_` (the value of the risk), `weights_` (how much each sample contributes
    to the gradient, sum one), `n_iter_`, and with groups `groups_` (their labels) and `group_losses_`.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([0.0, 1.0, 2.0, 5.0])
    >>> model = SuperquantileLinearRegression(tail_fraction=0.25).fit(X, y)      # the largest of four errors
    >>> float(model.coef_[0].round(3)), round(model.risk_, 3)
    (1.667, 0.444)
    """

    def __init__(self, tail_fraction: float = 0.5, *, strength: float = 0.0, fit_intercept: bool = True, max_iter: int = 200):
        """Keep the parameters; they are checked in `fit`.

        `tail_fraction` is theta, in (0, 1], `strength` the factor of the squared penalty, and `max_iter` the most steps. With
        `fit_intercept` the model has an intercept, which is not penalised.
        """
        self.tail_fraction = tail_fraction
        self.strength = strength
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter

    def _risk_to_minimise(self) -> Risk:
        """`Superquantile(tail_fraction)`; a ValueError for a tail fraction outside (0, 1]."""
        return tail_risk(self.tail_fraction)


class TiltedLogisticRegression(LogisticClassifier):
    r"""Logistic regression by the tilted risk of the cross entropies, TERM [Li23, eq. (7.2)].

    Minimises  (1/t) log sum_i m_i exp(t f_i) + (strength / 2) |w|^2,  f_i the negative log-probability of the class of sample i,
    with `tilt` (t) and masses m that sum to one. t > 0 lowers the largest losses, t = 0 is logistic regression (scikit-learn's C
    is then 1 / (strength * samples)), t < 0 plays down wrong labels. Without a penalty, separable classes have no minimum.

    For t < 0 the risk is not convex: `start="erm"` follows minima from t = 0 through tilts between zero and t, "zero" begins at t
    with all coefficients zero.

    After `fit`: `classes_`, `coef_` (1 or classes, features), `intercept_`, `risk_` (the value of the risk), `weights_` (how much
    each sample contributes to the gradient, sum one), `n_iter_`, and with groups `groups_` (their labels) and `group_losses_`.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["a", "b", "a", "b"])
    >>> TiltedLogisticRegression(tilt=1.0).fit(X, y).predict([[-1.0], [4.0]]).tolist()
    ['a', 'b']
    """

    def __init__(self, tilt: float = 1.0, *, strength: float = 1e-3, fit_intercept: bool = True, start: str = "erm",
                 max_iter: int = 200):
        """Keep the parameters; they are checked in `fit`.

        `tilt` is t, `strength` the factor of the squared penalty, `start` where fits of negative tilts begin ("erm" or "zero"),
        and `max_iter` the most steps for each risk on the way. With `fit_intercept` the model has intercepts, which are not
        penalised.
        """
        self.tilt = tilt
        self.strength = strength
        self.fit_intercept = fit_intercept
        self.start = start
        self.max_iter = max_iter

    def _risk_to_minimise(self) -> Risk:
        """`Tilted(tilt)`, or `Worst` for an infinite tilt; a ValueError for a tilt that is no number or minus infinity."""
        return tilted_risk(self.tilt)


class SuperquantileLogisticRegression(LogisticClassifier):
    r"""Logistic regression by the superquantile of the cross entropies: the mean of the worst `tail_fraction` (theta) of them.

    Minimises  S_theta(f) + (strength / 2) |w|^2,  [PLMH23, eq. (6)] over samples, f_i the negative log-probability of the class
    of sample i. theta = 1 is logistic regression (scikit-learn's C is then 1 / (strength * samples)), theta -> 0 the smallest
    largest loss. Convex, and solved exactly by an interior-point method up to a thousand coefficients; beyond, L-BFGS minimises a
    smoothed tail.

    After `fit`: `classes_`, `coef_` (1 or classes, features), `intercept_`, `risk_` (the value of the risk), `weights_` (how much
    each sample contributes to the gradient, sum one), `n_iter_`, and with groups `groups_` (their labels) and `group_losses_`.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["a", "b", "a", "b"])
    >>> SuperquantileLogisticRegression(tail_fraction=0.5).fit(X, y).predict([[-1.0], [4.0]]).tolist()
    ['a', 'b']
    """

    def __init__(self, tail_fraction: float = 0.5, *, strength: float = 1e-3, fit_intercept: bool = True, max_iter: int = 200):
        """Keep the parameters; they are checked in `fit`.

        `tail_fraction` is theta, in (0, 1], `strength` the factor of the squared penalty, and `max_iter` the most steps. With
        `fit_intercept` the model has intercepts, which are not penalised.
        """
        self.tail_fraction = tail_fraction
        self.strength = strength
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter

    def _risk_to_minimise(self) -> Risk:
        """`Superquantile(tail_fraction)`; a ValueError for a tail fraction outside (0, 1]."""
        return tail_risk(self.tail_fraction)
