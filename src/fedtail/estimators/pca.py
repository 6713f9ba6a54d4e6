"""Principal components under a tilted risk or a superquantile, fair to groups if wished, as transformers of scikit-learn."""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from fedtail.errors import FieldError
from fedtail.estimators.fitting import Solution, minimise_risk
from fedtail.estimators.pca_problem import Subspace, SubspaceProblem, signed
from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array, risk_value, risk_weights
from fedtail.estimators.samples import Samples, check_max_iter, tail_risk, tilted_risk
from fedtail.risk import Risk

NOT_CONVERGED = ("{} stopped after {} steps without having converged; max_iter={} bounds the steps for each risk on the way. "
                 "Raise max_iter, or scale the data.")


class PrincipalSubspace(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal components under the risk that a subclass gives in `_risk`."""

    n_components: int
    fit_mean: bool
    max_iter: int
    components_: Array
    mean_: Array

    def _risk(self) -> Risk:
        """The risk of the reconstruction errors that `fit` minimises."""
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: None = None, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> Self:
        """Fit to inputs `X`, (samples, features); `y` is not used.

        The masses in the risk are those of `sample_weight`, by default equal. With `groups`, (samples,), the losses in the risk
        are how much more each group loses than in a subspace of its own, on average, and masses are the sums of their samples'.
        Raises a ValueError for what cannot be fitted; a scikit-learn ConvergenceWarning says that `max_iter` was too small.
        """
        samples = Samples.read(self, X, None, sample_weight, groups, ensure_min_samples=2)
        check_max_iter(self.max_iter)
        check_components(self.n_components, samples.inputs)
        units = Units.of(samples.mass, samples.groups)
        problem = SubspaceProblem.of(samples.inputs, units, int(self.n_components), self.fit_mean)
        risk = self._risk()
        found = self._solve(problem, risk)
        losses = problem.losses(found.point)
        weights = samples.spread(units.spread(risk_weights(risk, losses, problem.mass)))
        self.risk_, self.weights_ = risk_value(risk, losses, problem.mass), weights
        self.n_iter_ = found.steps
        if units.labels is not None:
            self.groups_, self.group_losses_ = units.labels, losses
        self._set_axes(found.point, samples.inputs, samples.mass / samples.mass.sum())
        return self

    def _solve(self, problem: SubspaceProblem, risk: Risk) -> Solution:
        """The subspace of least risk near the principal one; warns where it was not reached."""
        if self.n_components == problem.inputs.shape[1]:
            return Solution(problem.principal(), 1, True)
        found = minimise_risk(problem, risk, problem.principal(), self.max_iter)
        if not found.converged:
            text = NOT_CONVERGED.format(type(self).__name__, found.steps, self.max_iter)
            warnings.warn(text, ConvergenceWarning, stacklevel=3)
        return found

    def _set_axes(self, found: Subspace, inputs: Array, mass: Array) -> None:
        """Set the components: the principal axes of the data in the subspace, by falling variance."""
        scores = (inputs - found.centre) @ found.axes
        middle = mass @ scores
        variances, turn = eigh((scores - middle).T @ (mass[:, None] * (scores - middle)))
        self.components_ = signed(found.axes @ turn[:, ::-1]).T
        self.mean_ = found.centre + found.axes @ middle
        self.explained_variance_ = variances[::-1].clip(min=0)
        total = mass @ ((inputs - mass @ inputs) ** 2).sum(1)
        self.explained_variance_ratio_ = self.explained_variance_ / (total or 1.0)

    @property
    def _n_features_out(self) -> int:
        """How many columns `transform` gives."""
        return len(self.components_)

    def transform(self, X: ArrayLike) -> Array:
        """The coordinates of each row of `X` along the components, (samples, n_components)."""
        check_is_fitted(self)
        return (validate_data(self, X, reset=False, dtype=np.float64) - self.mean_) @ self.components_.T

    def inverse_transform(self, X: ArrayLike) -> Array:
        """The inputs, (samples, features), of coordinates along the components, (samples, n_components)."""
        check_is_fitted(self)
        return np.asarray(X, dtype=np.float64) @ self.components_ + self.mean_

    def reconstruction_errors(self, X: ArrayLike) -> Array:
        """The squared distance of each row of `X` from the subspace, (samples,)."""
        check_is_fitted(self)
        inputs = validate_data(self, X, reset=False, dtype=np.float64)
        return (Subspace(self.components_.T, self.mean_).residuals(inputs) ** 2).sum(1)

    def score(self, X: ArrayLike, y: None = None, sample_weight: ArrayLike | None = None) -> float:
        """Minus the mean squared distance from the subspace, for grid search: it compares all tilts and tails alike."""
        errors = self.reconstruction_errors(X)
        mass = np.ones(len(errors)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return -float(np.average(errors, weights=mass))


def check_components(n_components: object, inputs: NDArray[np.float64]) -> None:
    """Raise a ValueError unless the number of components is from 1 to the number of features."""
    features = inputs.shape[1]
    if not isinstance(n_components, Integral) or not 1 <= int(n_components) <= features:
        raise FieldError("n_components", f"an integer from 1 to n_features={features}", n_components)


class TiltedPCA(PrincipalSubspace):
    r"""Principal components by the tilted risk of the reconstruction errors; with groups, fair PCA [Li23, section 7.7.2.1].

    Minimises  (1/t) log sum_i m_i exp(t f_i)  over subspaces of `n_components` axes, f_i the squared distance of sample i, with
    `tilt` (t) and masses m that sum to one. t = 0 is PCA, t > 0 lowers the largest errors, t < 0 plays down outliers, `math.inf`
    is the smallest largest error. With groups, f is how much more a group loses on average than in a subspace of its own, and a
    large t makes these alike. The tilt is in units of one over the loss.

    The subspace goes through the mean of the data; with `fit_mean` through the point where the risk is least. Not convex: what is
    found is a local minimum near the subspace of PCA.

    After `fit`: `components_` (n_components, features), `mean_`, `explained_variance_`, `explained_variance_ratio_`, `risk_` (the
    value of the risk), `weights_` (how much each sample contributes to the gradient, sum one), `n_iter_`, and with groups
    `groups_` (their labels) and `group_losses_`.

    >>> X = np.array([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> fair = TiltedPCA(1, tilt=100.0).fit(X, groups=["a", "a", "b", "b"])
    >>> fair.group_losses_.round(1)
    array([0.9, 0.9])
    """

    def __init__(self, n_components: int = 2, *, tilt: float = 1.0, fit_mean: bool = False, max_iter: int = 200):
        """Keep the parameters; they are checked in `fit`."""
        self.n_components = n_components
        self.tilt = tilt
        self.fit_mean = fit_mean
        self.max_iter = max_iter

    def _risk(self) -> Risk:
        """The tilted risk, or the largest loss."""
        return tilted_risk(self.tilt)


class SuperquantilePCA(PrincipalSubspace):
    r"""Principal components by the superquantile of the reconstruction errors: the mean of the worst `tail_fraction` (theta).

    Minimises  S_theta(f)  [PLMH23, eq. (6)] over subspaces of `n_components` axes, f_i the squared distance of sample i.
    theta = 1 is PCA, theta -> 0 the smallest largest error. With groups, f is how much more a group loses on average than in a
    subspace of its own.

    The subspace goes through the mean of the data; with `fit_mean` through the point where the risk is least. Not convex: what is
    found is a local minimum near the subspace of PCA.

    After `fit`: `components_` (n_components, features), `mean_`, `explained_variance_`, `explained_variance_ratio_`, `risk_` (the
    value of the risk), `weights_` (how much each sample contributes to the gradient, sum one), `n_iter_`, and with groups
    `groups_` (their labels) and `group_losses_`.

    >>> X = np.array([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> SuperquantilePCA(1, tail_fraction=0.5).fit(X).risk_ <= 1.0
    True
    """

    def __init__(self, n_components: int = 2, *, tail_fraction: float = 0.5, fit_mean: bool = False, max_iter: int = 200):
        """Keep the parameters; they are checked in `fit`."""
        self.n_components = n_components
        self.tail_fraction = tail_fraction
        self.fit_mean = fit_mean
        self.max_iter = max_iter

    def _risk(self) -> Risk:
        """The superquantile."""
        return tail_risk(self.tail_fraction)
