"""Principal components under a tilted risk or a superquantile, fair to groups if wished, as transformers of scikit-learn."""

from __future__ import annotations

from numbers import Integral
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from fedtail.errors import FieldError
from fedtail.estimators.fitting import Solution, minimise_risk
from fedtail.estimators.pca_problem import Subspace, SubspaceProblem, fix_axis_signs
from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array
from fedtail.estimators.samples import Samples, check_max_iter, tail_risk, tilted_risk
from fedtail.risk import Risk


class PrincipalSubspace(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal components under the risk that a subclass gives in `_risk_to_minimise`."""

    n_components: int
    fit_mean: bool
    max_iter: int
    components_: Array
    mean_: Array

    def _risk_to_minimise(self) -> Risk:
        """The risk of the reconstruction errors that `fit` minimises; a ValueError where a parameter does not fit."""
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: None = None, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> Self:
        """Fit to inputs `X`, (samples, features), of two samples or more; sets the fitted attributes, returns self.

        The masses in the risk are those of `sample_weight`, (samples,), by default equal; a sample of weight zero is left out.
        With `groups`, (samples,), the losses in the risk are how much more each group loses on average than in a subspace of its
        own, and a group's mass is the sum of its samples'. Raises a ValueError for what cannot be fitted; a scikit-learn
        ConvergenceWarning says that `max_iter` was too small. `y` is ignored.
        """
        samples = Samples.from_fit_arguments(self, X, None, sample_weight, groups, ensure_min_samples=2)
        check_max_iter(self.max_iter)
        check_components(self.n_components, samples.inputs)
        units = Units.from_masses(samples.mass, samples.groups)
        problem = SubspaceProblem.from_inputs(samples.inputs, units, int(self.n_components), self.fit_mean)
        risk = self._risk_to_minimise()
        found = self._find_subspace(problem, risk)
        self.__dict__.update(found.risk_attributes(problem, risk, samples, units))
        self._set_components(found.point, samples.inputs, samples.mass / samples.mass.sum())
        return self

    def _find_subspace(self, problem: SubspaceProblem, risk: Risk) -> Solution:
        """The subspace of least `risk` near the principal one of `problem`, as `point` of the result.

        Warns where the minimum was not reached. With as many components as features nothing is minimised: every input is in the
        subspace.
        """
        if self.n_components == problem.inputs.shape[1]:
            return Solution(problem.principal_subspace(), 1, True)
        found = minimise_risk(problem, risk, problem.principal_subspace(), self.max_iter)
        found.warn_unless_converged(self, "Raise max_iter, or scale the data.")
        return found

    def _set_components(self, found: Subspace, inputs: Array, mass: Array) -> None:
        """Set components_, mean_, explained_variance_ and explained_variance_ratio_ from the subspace `found`.

        The components are the principal axes of `inputs`, (samples, features), projected on `found`, by falling variance; `mass`,
        (samples,), sums to one. mean_ is the mean of the projected inputs.
        """
        scores = (inputs - found.centre) @ found.axes
        middle = mass @ scores
        variances, turn = eigh((scores - middle).T @ (mass[:, None] * (scores - middle)))
        self.components_ = fix_axis_signs(found.axes @ turn[:, ::-1]).T
        self.mean_ = found.centre + found.axes @ middle
        self.explained_variance_ = variances[::-1].clip(min=0)
        total = mass @ ((inputs - mass @ inputs) ** 2).sum(1)
        self.explained_variance_ratio_ = self.explained_variance_ / (total or 1.0)

    @property
    def _n_features_out(self) -> int:
        """How many columns `transform` gives; scikit-learn reads it to name them. Only after `fit`."""
        return len(self.components_)

    def transform(self, X: ArrayLike) -> Array:
        """Coordinates along the components, from `mean_`, of each row of `X`: (samples, n_components).

        Raises sklearn's NotFittedError before `fit`.
        """
        check_is_fitted(self)
        return (validate_data(self, X, reset=False, dtype=np.float64) - self.mean_) @ self.components_.T

    def inverse_transform(self, X: ArrayLike) -> Array:
        """The points of the subspace, (samples, features), from their coordinates `X`, (samples, n_components).

        The inverse of `transform` for these. Raises sklearn's NotFittedError before `fit`.
        """
        check_is_fitted(self)
        return np.asarray(X, dtype=np.float64) @ self.components_ + self.mean_

    def reconstruction_errors(self, X: ArrayLike) -> Array:
        """The squared distance of each row of `X` from the subspace, (samples,); NotFittedError before `fit`."""
        check_is_fitted(self)
        inputs = validate_data(self, X, reset=False, dtype=np.float64)
        return (Subspace(self.components_.T, self.mean_).residuals(inputs) ** 2).sum(1)

    def score(self, X: ArrayLike, y: None = None, sample_weight: ArrayLike | None = None) -> float:
        """Minus the mean squared distance of the rows of `X` from the subspace, weighted by `sample_weight`, by default equally.

        Higher is better, as grid search wants it. It does not depend on the tilt or tail, so that fits with several are compared
        alike. `y` is ignored. Raises sklearn's NotFittedError before `fit`.
        """
        errors = self.reconstruction_errors(X)
        mass = np.ones(len(errors)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return -float(np.average(errors, weights=mass))


def check_components(n_components: object, inputs: NDArray[np.float64]) -> None:
    """Raise a ValueError unless `n_components` is an integer from 1 to the number of columns of `inputs`."""
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
        """Keep the parameters; they are checked in `fit`.

        `n_components` is the dimension of the subspace, `tilt` is t, `fit_mean` fits the point it goes through too, and
        `max_iter` is the most steps for each risk on the way.
        """
        self.n_components = n_components
        self.tilt = tilt
        self.fit_mean = fit_mean
        self.max_iter = max_iter

    def _risk_to_minimise(self) -> Risk:
        """`Tilted(tilt)`, or `Worst` for an infinite tilt; a ValueError for a tilt that is no number or minus infinity."""
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
        """Keep the parameters; they are checked in `fit`.

        `n_components` is the dimension of the subspace, `tail_fraction` is theta, in (0, 1], `fit_mean` fits the point it goes
        through too, and `max_iter` is the most steps for each risk on the way.
        """
        self.n_components = n_components
        self.tail_fraction = tail_fraction
        self.fit_mean = fit_mean
        self.max_iter = max_iter

    def _risk_to_minimise(self) -> Risk:
        """`Superquantile(tail_fraction)`; a ValueError for a tail fraction outside (0, 1]."""
        return tail_risk(self.tail_fraction)
