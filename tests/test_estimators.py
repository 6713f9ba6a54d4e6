"""The estimators for scikit-learn: its own checks, and solutions against closed forms, convex programs, other libraries and searches."""

import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fedtail.estimators import (
    SuperquantileLinearRegression,
    SuperquantileLogisticRegression,
    SuperquantilePCA,
    TiltedLinearRegression,
    TiltedLogisticRegression,
    TiltedPCA,
    fitting,
)
from fedtail.estimators.reductions import risk_value, risk_weights
from fedtail.risk import Hierarchical, Mean, PowerFair, SmoothedSuperquantile, Superquantile, Tilted, Worst

CHECKED = [TiltedLinearRegression(), TiltedLinearRegression(-1.0), TiltedLinearRegression(-1.0, start="zero"), TiltedLinearRegression(math.inf),
           SuperquantileLinearRegression(), TiltedLogisticRegression(), TiltedLogisticRegression(-1.0), SuperquantileLogisticRegression(),
           TiltedPCA(), TiltedPCA(1, tilt=-1.0, fit_mean=True), SuperquantilePCA(1)]


def tensors(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def regression(seed=0, samples=60, features=4):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(samples, features)) * [1, 5, 0.2, 2][:features] + [3, 0, 1, -2][:features]
    return X, X @ rng.normal(size=features) + rng.standard_t(2, size=samples), rng.integers(1, 4, samples).astype(float), rng.integers(0, 5, samples)


def classification(seed=0, samples=80, classes=2):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, samples)
    return rng.normal(size=(samples, 3)) + y[:, None] * [1.0, 0.0, -0.7], y, rng.integers(1, 4, samples).astype(float), rng.integers(0, 4, samples)


@pytest.mark.parametrize("model", CHECKED, ids=repr)
def test_all_of_scikit_learns_checks_pass(model):
    found = check_estimator(model, on_skip=None)
    assert {result["check_name"] for result in found if result["status"] != "passed"} <= {"check_array_api_input"}
    assert len(found) > 50


def test_the_numbers_of_a_risk_are_those_of_the_library():
    rng = np.random.default_rng(0)
    for case in range(120):
        losses = rng.gamma(1.0, 10 ** rng.uniform(-3, 3), int(rng.integers(1, 30)))
        losses = np.round(losses) if case % 3 == 0 else losses                   # ties
        mass = rng.integers(1, 5, len(losses)).astype(float)
        mass /= mass.sum()
        theta = float(rng.choice([0.1, 0.25, 0.5, rng.uniform(0.01, 1)]))
        smoothing = float(10 ** rng.uniform(-8, 2) * (losses.std() + 1e-3))
        for risk in (Mean(), Worst(), Superquantile(theta), SmoothedSuperquantile(theta, smoothing), Tilted(0.0), Tilted(1e-8), Tilted(-300.0), Tilted(float(rng.normal()))):
            assert risk_value(risk, losses, mass) == pytest.approx(float(risk.value(*tensors(losses, mass))), rel=1e-10, abs=1e-10 * losses.max() + 1e-20)
            assert risk_weights(risk, losses, mass) == pytest.approx(risk.weights(*tensors(losses, mass)).numpy(), abs=1e-9)
    with pytest.raises(TypeError, match="PowerFair is not a risk that the estimators minimise"):
        risk_value(PowerFair(1.0), losses, mass)


def squared_errors(model, X, y):
    return (model.predict(X) - y) ** 2


def cross_entropies(model, X, y):
    return -model.predict_log_proba(X)[np.arange(len(y)), np.searchsorted(model.classes_, y)]


def excess(model, X, weight, groups):
    """Reconstruction errors, less the least possible of each sample's group about the same mean."""
    errors = model.reconstruction_errors(X)
    centred = X - np.average(X, axis=0, weights=weight)
    for g in np.unique(groups):
        mine = groups == g
        moments = np.linalg.eigvalsh(np.cov(centred[mine].T, aweights=weight[mine], bias=True) + np.outer(*[np.average(centred[mine], axis=0, weights=weight[mine])] * 2))
        errors[mine] -= moments[: -len(model.components_)].sum()
    return errors


@pytest.mark.parametrize(("number", "risk"), [({"tilt": 0.3}, Tilted(0.3)), ({"tilt": -0.3}, Tilted(-0.3)), ({"tilt": math.inf}, Worst()), ({"tail_fraction": 0.3}, Superquantile(0.3))], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["linear", "logistic", "pca"])
def test_what_is_known_after_a_fit_is_the_risk_of_its_losses(kind, grouped, number, risk):
    X, y, weight, groups = regression() if kind != "logistic" else classification()
    tilted = "tilt" in number
    cls = {"linear": TiltedLinearRegression if tilted else SuperquantileLinearRegression, "logistic": TiltedLogisticRegression if tilted else SuperquantileLogisticRegression, "pca": TiltedPCA if tilted else SuperquantilePCA}[kind]
    model = cls(**number).fit(X, y, sample_weight=weight, groups=groups if grouped else None)
    if kind == "pca":
        losses = excess(model, X, weight, groups) if grouped else model.reconstruction_errors(X)
    else:
        losses = (squared_errors if kind == "linear" else cross_entropies)(model, X, y)
    if not grouped:
        value, weights = risk.value(*tensors(losses, weight)), risk.weights(*tensors(losses, weight))
    else:
        nested, arguments = Hierarchical(within=Mean(), across=risk), tensors(losses, weight, groups)
        value, weights = nested.value(*arguments), nested.weights(*arguments)
        assert model.groups_.tolist() == sorted(set(groups))
        means = [np.average(losses[groups == g], weights=weight[groups == g]) for g in model.groups_]
        assert model.group_losses_ == pytest.approx(means, abs=1e-9 * losses.max())
    assert model.risk_ == pytest.approx(float(value), rel=1e-9)
    if tilted and math.isfinite(number["tilt"]):                                 # others jump where losses are tied
        assert model.weights_ == pytest.approx(weights.numpy(), abs=1e-9)
    assert model.weights_.sum() == pytest.approx(1)


@pytest.mark.parametrize("tilt", [3.0, 0.2, 1e-7, -1e-7, -0.2, -3.0])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_tilted_fit_is_stationary(tilt, grouped):
    across = Tilted(tilt)
    for kind, (X, y, weight, groups) in {"linear": regression(), "logistic": classification(), "three classes": classification(classes=3)}.items():
        cls, strength = (TiltedLinearRegression, 0.01) if kind == "linear" else (TiltedLogisticRegression, 0.01)
        model = cls(tilt, strength=strength).fit(X, y, sample_weight=weight, groups=groups if grouped else None)
        inputs, targets, mass, group = tensors(X, y, weight, groups)
        slopes = torch.tensor(np.atleast_2d(model.coef_), requires_grad=True)
        intercepts = torch.tensor(np.atleast_1d(model.intercept_), requires_grad=True)
        scores = inputs @ slopes.T + intercepts
        if kind == "linear":
            losses = (scores[:, 0] - targets) ** 2
        else:
            scores = torch.cat([torch.zeros_like(scores), scores], 1) if scores.shape[1] == 1 else scores
            losses = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        value = Hierarchical(Mean(), across).value(losses, mass, group) if grouped else across.value(losses, mass)
        gradients = torch.autograd.grad(value + strength / 2 * slopes.square().sum(), (slopes, intercepts))
        assert max(float(g.abs().max()) for g in gradients) < 1e-8, kind


def superquantile_program(losses, mass, tail_fraction, penalty=0.0):
    threshold, above = cp.Variable(), cp.Variable(len(mass), nonneg=True)
    problem = cp.Problem(cp.Minimize(threshold + (mass / mass.sum() / tail_fraction) @ above + penalty), [losses <= threshold + above])
    with warnings.catch_warnings(action="ignore"):                              # "may be inaccurate": to 1e-6 it is not
        problem.solve(cp.CLARABEL, tol_gap_rel=1e-9, tol_feas=1e-9)
    return problem.value


@pytest.mark.parametrize(("tail_fraction", "strength"), [(0.05, 0.0), (0.3, 0.0), (0.9, 0.0), (0.3, 0.5)])
@pytest.mark.parametrize("grouped", [False, True])
def test_superquantile_regression_solves_its_convex_program(tail_fraction, strength, grouped):
    rng = np.random.default_rng(3)
    X, weight, groups = rng.normal(size=(60, 4)), rng.integers(1, 4, 60).astype(float), rng.integers(0, 5, 60)
    y = X @ [1.0, -2.0, 0.5, 0.0] + rng.standard_t(4, 60)
    w, b = cp.Variable(X.shape[1]), cp.Variable()
    losses, mass = cp.square(X @ w + b - y), weight
    if grouped:
        member = np.eye(5)[groups] * weight[:, None]
        losses, mass = (member / member.sum(0)).T @ losses, member.sum(0)
    least = superquantile_program(losses, mass, tail_fraction, strength / 2 * cp.sum_squares(w))
    model = SuperquantileLinearRegression(tail_fraction, strength=strength).fit(X, y, sample_weight=weight, groups=groups if grouped else None)
    assert model.risk_ + strength / 2 * model.coef_ @ model.coef_ == pytest.approx(least, rel=1e-6)
    assert model.coef_ == pytest.approx(w.value, abs=1e-3)


@pytest.mark.parametrize("tail_fraction", [0.05, 0.5])
def test_superquantile_classification_solves_its_convex_program(tail_fraction):
    X, y, weight, _ = classification(seed=1)
    w, b = cp.Variable(X.shape[1]), cp.Variable()
    least = superquantile_program(cp.logistic(cp.multiply(1 - 2 * y, X @ w + b)), weight, tail_fraction, 0.005 * cp.sum_squares(w))
    model = SuperquantileLogisticRegression(tail_fraction, strength=0.01).fit(X, y, sample_weight=weight)
    assert model.risk_ + 0.005 * (model.coef_**2).sum() == pytest.approx(least, abs=1e-5)


def test_an_infinite_tilt_has_the_smallest_largest_error():
    X, y, _, _ = regression()
    rows = np.c_[X, np.ones(len(X))]
    program = linprog(np.r_[np.zeros(5), 1], A_ub=np.r_[np.c_[rows, -np.ones(len(X))], np.c_[-rows, -np.ones(len(X))]], b_ub=np.r_[y, -y], bounds=(None, None))
    model = TiltedLinearRegression(math.inf).fit(X, y)
    assert model.risk_ == pytest.approx(program.fun**2, rel=1e-9)
    assert np.r_[model.coef_, model.intercept_] == pytest.approx(program.x[:-1], abs=1e-6)
    assert TiltedLinearRegression(1e4).fit(X, y).coef_ == pytest.approx(model.coef_, abs=1e-2)
    tilts = [-100.0, -1.0, 0.0, 1.0, 100.0]
    risks = [TiltedLinearRegression(t).fit(X, y).risk_ for t in tilts]
    assert risks == sorted(risks)
    assert risks[-1] <= model.risk_


@pytest.mark.parametrize("model", [TiltedLinearRegression(0.0), SuperquantileLinearRegression(1.0)], ids=repr)
@pytest.mark.parametrize("intercept", [True, False])
def test_without_a_tail_it_is_least_squares_and_ridge_regression(model, intercept):
    X, y, weight, _ = regression()
    plain = LinearRegression(fit_intercept=intercept).fit(X, y, sample_weight=weight)
    mine = clone(model).set_params(fit_intercept=intercept).fit(X, y, sample_weight=weight)
    assert mine.coef_ == pytest.approx(plain.coef_)
    assert mine.intercept_ == pytest.approx(plain.intercept_)
    ridge = Ridge(alpha=0.05 * weight.sum(), fit_intercept=intercept).fit(X, y, sample_weight=weight)
    assert clone(mine).set_params(strength=0.1).fit(X, y, sample_weight=weight).coef_ == pytest.approx(ridge.coef_)


@pytest.mark.parametrize("model", [TiltedLogisticRegression(0.0, strength=0.1), SuperquantileLogisticRegression(1.0, strength=0.1)], ids=repr)
@pytest.mark.parametrize("classes", [2, 3])
def test_without_a_tail_it_is_logistic_regression(model, classes):
    X, y, weight, _ = classification(classes=classes)
    plain = LogisticRegression(C=10 / weight.sum(), tol=1e-10, max_iter=2000).fit(X, y, sample_weight=weight)
    mine = clone(model).fit(X, y, sample_weight=weight)
    assert mine.coef_ == pytest.approx(plain.coef_, abs=1e-5)
    assert mine.predict_proba(X) == pytest.approx(plain.predict_proba(X), abs=1e-5)


def test_weights_are_repetitions_and_weight_zero_is_absence():
    X, y, weight, groups = classification(classes=3)
    weight[:9] = 0
    many = np.repeat(np.arange(len(y)), weight.astype(int))
    for model in (TiltedLogisticRegression(2.0), TiltedLogisticRegression(-1.0), SuperquantileLogisticRegression(0.3), TiltedPCA(1, tilt=3.0), SuperquantilePCA(2, tail_fraction=0.2)):
        for grouped in (False, True):
            one = clone(model).fit(X, y, sample_weight=weight, groups=groups if grouped else None)
            other = clone(model).fit(X[many], y[many], groups=groups[many] if grouped else None)
            assert one.risk_ == pytest.approx(other.risk_, rel=1e-7)
            assert not one.weights_[:9].any()
            shown = (one.coef_, other.coef_) if hasattr(one, "coef_") else (one.components_, other.components_)
            assert shown[0] == pytest.approx(shown[1], abs=1e-5)


def test_pca_without_a_tail_is_pca():
    X, _, weight, _ = regression()
    plain = PCA(2).fit(X)
    for mine in (TiltedPCA(2, tilt=0.0).fit(X), SuperquantilePCA(2, tail_fraction=1.0).fit(X), TiltedPCA(2, tilt=0.0, fit_mean=True).fit(X)):
        assert np.abs((mine.components_ * plain.components_).sum(1)) == pytest.approx([1, 1])
        assert mine.mean_ == pytest.approx(plain.mean_)
        assert mine.explained_variance_ratio_ == pytest.approx(plain.explained_variance_ratio_)
        assert mine.inverse_transform(mine.transform(X)) == pytest.approx(plain.inverse_transform(plain.transform(X)))
        assert mine.score(X) == pytest.approx(-mine.risk_)
    assert TiltedPCA(4).fit(X, sample_weight=weight).risk_ == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("model", [TiltedPCA(1, tilt=0.3), TiltedPCA(1, tilt=20.0), TiltedPCA(1, tilt=-0.3), TiltedPCA(1, tilt=math.inf), SuperquantilePCA(1, tail_fraction=0.3), SuperquantilePCA(1, tail_fraction=0.03)], ids=repr)
@pytest.mark.parametrize("grouped", [False, True])
def test_pca_finds_the_best_of_all_lines_in_the_plane(model, grouped):
    rng = np.random.default_rng(4)
    X, groups = rng.standard_t(4, size=(60, 2)) @ [[2.0, 0.3], [0.0, 0.7]], rng.integers(0, 2, 60)
    X[groups == 1] = X[groups == 1] @ [[0.2, 0.5], [1.0, 0.3]]
    model = clone(model).fit(X, groups=groups if grouped else None)
    angles = np.linspace(0, np.pi, 20000)
    axes = np.stack([np.cos(angles), np.sin(angles)])                            # (2, lines)
    centred = X - X.mean(0)
    errors = (centred**2).sum(1)[:, None] - (centred @ axes) ** 2                # (samples, lines)
    mass = np.ones(len(X))
    if grouped:
        least = [np.linalg.eigvalsh(c.T @ c / len(c))[0] for c in (centred[groups == 0], centred[groups == 1])]
        errors, mass = np.stack([errors[groups == g].mean(0) - least[g] for g in (0, 1)]), np.bincount(groups).astype(float)
    risk = {"tilt": lambda t: Worst() if t == math.inf else Tilted(t), "tail_fraction": Superquantile}[name := "tilt" if hasattr(model, "tilt") else "tail_fraction"](getattr(model, name))
    values = risk.value(*tensors(errors.T, np.tile(mass, (len(angles), 1))))
    assert model.risk_ == pytest.approx(float(values.min()), abs=3e-4 * float(values.max()))
    assert model.risk_ <= float(values.min()) * (1 + 1e-6)


def test_fair_pca_leaves_a_saddle_point_and_makes_groups_alike():
    X = np.array([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    groups = ["a", "a", "b", "b"]                                                # each has no loss on an axis of its own
    fair = TiltedPCA(1, tilt=math.inf).fit(X, groups=groups)
    assert fair.group_losses_ == pytest.approx([0.9, 0.9], rel=1e-5)             # 9 sin^2 = cos^2
    assert SuperquantilePCA(1, tail_fraction=0.5).fit(X, groups=groups).group_losses_ == pytest.approx([0.9, 0.9], rel=1e-5)
    assert TiltedPCA(1, tilt=0.0).fit(X, groups=groups).group_losses_ == pytest.approx([0, 1])


def test_a_fitted_mean_leaves_outliers_aside():
    rng = np.random.default_rng(0)
    X = np.r_[rng.normal(size=(60, 3)) * [3.0, 0.1, 0.1], rng.normal(size=(8, 3)) + np.array([0.0, 4.0, 0.0])]
    fixed, fitted = (TiltedPCA(1, tilt=-1.0, fit_mean=mean).fit(X) for mean in (False, True))
    assert fitted.risk_ < fixed.risk_
    assert abs(fitted.components_[0, 0]) > 0.999
    assert np.abs(fitted.mean_[1:]).max() < 0.1
    assert fitted.weights_[60:].sum() < 1e-3


def test_the_start_decides_where_a_negative_tilt_ends():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    y = X @ [0.5, -0.3] + 0.1 * rng.normal(size=200)
    y[:150] = rng.normal(8, 1, 150)                                              # three of four samples are wrong
    erm, zero = (TiltedLinearRegression(-2.0, start=start).fit(X, y) for start in ("erm", "zero"))
    assert zero.coef_ == pytest.approx([0.5, -0.3], abs=0.1)
    assert zero.weights_[:150].sum() < 1e-6
    assert erm.intercept_ > 5
    assert TiltedLinearRegression(2.0, start="zero").fit(X, y).coef_ == pytest.approx(TiltedLinearRegression(2.0).fit(X, y).coef_)


def test_wrong_labels_are_played_down():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2)) + 4 * (np.arange(300)[:, None] % 2)
    y = np.arange(300) % 2
    noisy = np.where(rng.random(300) < 0.2, 1 - y, y)
    robust = TiltedLogisticRegression(-3.0).fit(X, noisy)
    assert robust.weights_[noisy != y].mean() < 0.1 * robust.weights_[noisy == y].mean()
    assert robust.score(X, y) > 0.98


def test_many_parameters_are_left_to_l_bfgs_with_the_same_result(monkeypatch):
    X, y, _, groups = regression()
    C, labels, _, _ = classification(classes=3)
    cases = [(TiltedLinearRegression(0.3), X, y, None), (TiltedLinearRegression(-0.3), X, y, groups), (SuperquantileLinearRegression(0.3), X, y, None),
             (TiltedLogisticRegression(3.0), C, labels, None), (SuperquantileLogisticRegression(0.3), C, labels, None),
             (TiltedPCA(2, tilt=0.3), X, None, groups), (TiltedPCA(2, tilt=-0.3, fit_mean=True), X, None, None), (SuperquantilePCA(2, tail_fraction=0.3), X, None, None)]
    second_order = [clone(model).fit(*arrays, groups=g).risk_ for model, *arrays, g in cases]
    monkeypatch.setattr(fitting, "MANY", 0)
    for (model, *arrays, g), risk in zip(cases, second_order, strict=True):
        assert clone(model).fit(*arrays, groups=g).risk_ == pytest.approx(risk, rel=1e-4), model


def test_more_features_than_samples_and_collinear_ones():
    X, y, _, _ = regression(samples=6)
    wide = np.c_[X, X[:, :2] @ [[1.0], [2.0]], np.random.default_rng(1).normal(size=(6, 5))]
    for model in (TiltedLinearRegression(), TiltedLinearRegression(-1.0), SuperquantileLinearRegression(0.5)):
        assert clone(model).fit(wide, y).predict(wide) == pytest.approx(y, abs=1e-8)
    shortest = LinearRegression().fit(wide, y).coef_
    assert TiltedLinearRegression().fit(wide, y).coef_ == pytest.approx(shortest, abs=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_only_the_product_of_tilt_and_loss_matters(scale):
    X, y, _, _ = regression()
    mine = TiltedLinearRegression(0.5 / scale**2).fit(X, scale * y)
    assert mine.coef_ / scale == pytest.approx(TiltedLinearRegression(0.5).fit(X, y).coef_, rel=1e-6)
    assert SuperquantileLinearRegression(0.2).fit(X, scale * y).coef_ / scale == pytest.approx(SuperquantileLinearRegression(0.2).fit(X, y).coef_, rel=1e-6)


def test_pipelines_and_grid_search():
    X, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), TiltedPCA(2), SuperquantileLogisticRegression(0.5))
    search = GridSearchCV(pipeline, {"tiltedpca__tilt": [-0.5, 0.5], "superquantilelogisticregression__tail_fraction": [0.3, 1.0]}, cv=3).fit(X, y)
    assert search.best_score_ > 0.9
    assert search.best_estimator_[1].get_feature_names_out().tolist() == ["tiltedpca0", "tiltedpca1"]
    assert GridSearchCV(SuperquantilePCA(), {"n_components": [1, 3]}, cv=3).fit(X).best_params_ == {"n_components": 3}
    assert cross_val_score(make_pipeline(StandardScaler(), TiltedLinearRegression(0.1)), X[:, :3], X[:, 3]).shape == (5,)


def test_groups_reach_an_estimator_in_a_search_and_in_a_pipeline():
    X, y, _, groups = classification(samples=120)
    pipeline = make_pipeline(StandardScaler(), TiltedLogisticRegression(5.0))
    search = GridSearchCV(pipeline, {"tiltedlogisticregression__tilt": [5.0]}, cv=3).fit(X, y, tiltedlogisticregression__groups=y)
    assert search.best_estimator_[1].groups_.tolist() == [0, 1]
    with config_context(enable_metadata_routing=True):
        model = TiltedLogisticRegression().set_fit_request(groups=True, sample_weight=False)
        search = GridSearchCV(model, {"tilt": [1.0, 5.0]}, cv=GroupKFold(4)).fit(X, y, groups=groups)
        assert search.best_estimator_.groups_.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("model", "arguments", "text"), [
    (TiltedLinearRegression(-math.inf), {}, r"tilt \(t\) must be a number above minus infinity, got -inf. 0 is the mean, math.inf the largest loss."),
    (TiltedLinearRegression("1"), {}, r"tilt \(t\) must be a number above minus infinity, got '1'"),
    (TiltedLinearRegression(start="ERM"), {}, "start must be 'erm' or 'zero', got 'ERM'. It matters for a negative tilt only."),
    (TiltedLinearRegression(strength=-1.0), {}, "strength must be at least 0 and finite, got -1. It is the factor of the penalty; 0 is none."),
    (TiltedLinearRegression(max_iter=0), {}, "max_iter must be a positive integer, got 0. It bounds the steps of the solver."),
    (SuperquantileLinearRegression(20), {}, r"tail_fraction \(theta\) must be in \(0, 1\], got 20. It is a fraction: .* write 0.2."),
    (SuperquantileLinearRegression("all"), {}, r"tail_fraction \(theta\) must be in \(0, 1\], got 'all'"),
    (TiltedPCA(9), {}, "n_components must be an integer from 1 to n_features=4, got 9."),
    (TiltedLinearRegression(), {"groups": [1, 2]}, "inconsistent numbers of samples"),
    (TiltedLinearRegression(), {"groups": [None] * 60}, "groups must have a label for every sample, got None or NaN. Give those samples a group"),
    (TiltedLinearRegression(), {"sample_weight": np.zeros(60)}, "(?i)sample.weight"),
    (TiltedLinearRegression(), {"sample_weight": np.r_[-1.0, np.ones(59)]}, "sample_weight must be at least 0, got -1. It is the mass of a sample"),
    (TiltedLogisticRegression(), {"y": ["a"] * 60}, "TiltedLogisticRegression needs samples of at least two classes, got one class: 'a'\\."),
    (TiltedLogisticRegression(), {"y": [1] * 60}, r"needs samples of at least two classes, got one class: 1\."),
], ids=str)
def test_what_cannot_be_fitted_is_refused_in_words(model, arguments, text):
    X, y, _, _ = regression()
    with pytest.raises(ValueError, match=text):
        model.fit(**{"X": X, "y": y, **arguments})


def test_a_warning_where_steps_were_too_few():
    X, y, _, _ = classification()
    with pytest.warns(ConvergenceWarning, match="TiltedLogisticRegression stopped after 1 steps without having converged; max_iter=1 bounds"):
        TiltedLogisticRegression(max_iter=1).fit(X, y)
    with pytest.warns(ConvergenceWarning, match="SuperquantileLinearRegression stopped after .* Raise max_iter"):
        SuperquantileLinearRegression(0.2, max_iter=3).fit(*regression()[:2])
    with pytest.warns(ConvergenceWarning, match="TiltedPCA stopped after .* Raise max_iter, or scale the data."):
        TiltedPCA(2, tilt=50.0, max_iter=1).fit(X)
