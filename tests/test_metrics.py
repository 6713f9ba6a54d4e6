"""Metrics of both directions: ready-made ones, clients for whom they are not defined, and models that are no use."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx
from scipy import optimize, stats
from sklearn.metrics import mean_absolute_error
from typer.testing import CliRunner

import fedtail
from fedtail import Distribution, Metric, Population, Task, metrics
from fedtail.cli import app
from fedtail.constant_prediction import constant_outputs
from fedtail.directions import bad_percentile_name
from fedtail.divergence import loss_gap
from fedtail.evaluation import EarlyStopping
from fedtail.experiment import read_experiment
from fedtail.losses import hinge
from fedtail.models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.report import page_data, write_page
from fedtail.report.curves import has_extremes
from fedtail.report.page import script_safe_json
from fedtail.runs import RunFolder, find_runs
from fedtail.runs.comparison import STATISTICS, constant_row, paired_differences, rows_by_client, rows_by_method
from fedtail.runs.diverged import divergence_sentences
from fedtail.runs.keep_best import KeepBest
from run_folders import write_folder, write_run


def two_classes(clients: int = 12, features: int = 3, one_class: tuple[int, ...] = (2,)) -> Population:
    """Clients with two classes, some of them with class 0 only."""
    rng, made = np.random.default_rng(0), []
    for k in range(clients):
        x = rng.normal(size=(int(rng.integers(8, 25)), features)).astype("float32")
        y = (x.sum(1) + rng.normal(size=len(x)) > 0).astype(int)
        y[:2] = 0, 1
        made.append((x, y * (k not in one_class)))
    return Population.from_clients(made)


def fixed_model(features: int = 3) -> LogisticRegression:
    module = LogisticRegression(features)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(0.5, 1.0, parameter.numel()).reshape(parameter.shape))
    return module


# ---- ready-made metrics, against their definitions


def auc_by_pairs(scores: np.ndarray, positive: np.ndarray) -> float:
    pairs = list(itertools.product(scores[positive], scores[~positive]))
    return float(np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs]))


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=25))
def test_auc_and_f1_are_those_of_their_definitions(examples):
    scores, labels = np.array([s for s, _ in examples], float), np.array([y for _, y in examples])
    outputs, targets = torch.tensor(scores)[:, None], torch.tensor(labels)
    auc, score = metrics.roc_auc().function(outputs, targets), metrics.f1().function(outputs, targets)
    twice = metrics.roc_auc().function(torch.cat([-outputs, outputs], 1), targets)      # two outputs of the same ranking
    if len(set(labels.tolist())) < 2:
        assert math.isnan(auc)
        assert math.isnan(twice)
    else:
        assert auc == approx(auc_by_pairs(scores, labels == 1)) == twice
    right, found, wanted = ((scores > 0) & (labels == 1)).sum(), (scores > 0).sum(), (labels == 1).sum()
    assert score == approx(2 * right / (found + wanted)) if wanted else math.isnan(score)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_metrics_of_classes_are_those_of_scikit_learn(classes, ties):
    """300 clients of 1 to 40 examples, with and without equal scores; of several classes, one against the rest."""
    from sklearn import metrics as sk

    random = np.random.default_rng(classes + ties)
    for _ in range(300):
        n = int(random.integers(1, 41))
        outputs = random.integers(-2, 3, (n, classes)).astype(float) if ties else random.normal(0, 1, (n, classes))
        labels = random.integers(0, classes, n)
        scores = outputs - outputs[:, :1] if classes == 2 else torch.tensor(outputs).softmax(1).numpy()
        mine = [metric().function(torch.tensor(outputs), torch.tensor(labels)) for metric in
                (metrics.roc_auc, metrics.average_precision, metrics.f1, metrics.balanced_accuracy)]
        each = [k for k in ((1,) if classes == 2 else range(classes)) if (labels == k).any()]
        ranked = [[score(labels == k, scores[:, k]) for k in each if areas or not (labels == k).all()]
                  for score, areas in ((sk.roc_auc_score, False), (sk.average_precision_score, True))]
        f1 = sk.f1_score(labels, outputs.argmax(1), average="binary" if classes == 2 else "macro", zero_division=0.0)
        present = np.unique(labels)
        recall = sk.recall_score(labels, outputs.argmax(1), labels=present, average="macro", zero_division=0.0)
        wanted = [*(np.mean(one) if one else math.nan for one in ranked), f1 if classes > 2 or 1 in labels else math.nan, recall]
        assert mine == approx(wanted, nan_ok=True, abs=1e-12)


@pytest.mark.parametrize("made", [metrics.roc_auc, metrics.average_precision, metrics.f1, metrics.balanced_accuracy])
def test_outputs_that_are_not_finite_have_no_metric_of_classes(made):
    assert math.isnan(made().function(torch.tensor([math.inf, 1.0, -2.0]), torch.tensor([1, 0, 1])))


def test_several_classes_are_means_over_those_a_client_has():
    rng = np.random.default_rng(1)
    outputs, labels = torch.from_numpy(rng.normal(size=(40, 4))), rng.choice([0, 1, 3], 40)      # class 2 never
    likely = torch.softmax(outputs, 1).numpy()
    expected = np.mean([auc_by_pairs(likely[:, k], labels == k) for k in (0, 1, 3)])
    assert metrics.roc_auc().function(outputs, torch.from_numpy(labels)) == approx(expected)
    guess = outputs.argmax(1).numpy()
    recalls = [(guess[labels == k] == k).mean() for k in (0, 1, 3)]
    assert metrics.balanced_accuracy().function(outputs, torch.from_numpy(labels)) == approx(np.mean(recalls))
    ranked = labels[np.argsort(-likely[:, 3])] == 3
    precisions = [ranked[:k + 1].mean() for k in np.flatnonzero(ranked)]
    two = torch.stack([torch.zeros(40), torch.from_numpy(likely[:, 3])], 1)
    assert metrics.average_precision().function(two, torch.from_numpy((labels == 3).astype(int))) == approx(np.mean(precisions))


def test_numbers():
    outputs, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 2.0, 7.0])
    assert metrics.mean_absolute_error().function(outputs[:, None], targets).mean() == approx(4 / 3)
    several = torch.tensor([[1.0, 2.0], [4.0, math.nan], [math.nan, math.nan]])      # padded sequences of numbers
    assert metrics.mean_absolute_error().function(torch.zeros(3, 2), several).tolist() == [1.5, 4.0, 0.0]
    diverged = metrics.mean_absolute_error().function(torch.tensor([[1.0, math.nan], [0.0, 0.0], [0.0, 0.0]]), several)
    assert diverged.isnan().tolist() == [True, False, False]
    assert metrics.r2().function(outputs, targets) == approx(1 - 10 / ((targets - 3) ** 2).sum().item())
    assert math.isnan(metrics.r2().function(outputs, torch.ones(3)))
    assert math.isnan(metrics.r2().function(outputs[:1], targets[:1]))


def concordance_by_pairs(predicted, times, events) -> float:
    """Every ordered pair of which the first came first, for certain."""
    score = [(predicted[i] < predicted[j]) + 0.5 * (predicted[i] == predicted[j])
             for i, j in itertools.permutations(range(len(times)), 2)
             if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j]))]
    return float(np.mean(score)) if score else math.nan


survival = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), min_size=1, max_size=20)


@given(survival)
def test_concordance_is_the_share_of_pairs_in_the_right_order(examples):
    predicted, times, events = (np.array(column) for column in zip(*examples, strict=True))
    targets = torch.from_numpy(np.stack([times, events], 1).astype("float32"))
    expected = concordance_by_pairs(predicted, times, events)
    assert metrics.concordance().function(torch.from_numpy(predicted).double(), targets) == approx(expected, nan_ok=True)
    assert metrics.risk_concordance().function(-torch.from_numpy(predicted).double()[:, None], targets) == approx(expected, nan_ok=True)


def test_concordance_is_that_of_lifelines():
    utils = pytest.importorskip("lifelines.utils", reason="concordance is not compared: lifelines is not installed")
    rng = np.random.default_rng(3)
    for _ in range(20):
        predicted, times, events = rng.normal(size=60).round(1), rng.integers(1, 30, 60), rng.random(60) < 0.6
        assert metrics.concordance_index(predicted, times.astype(float), events) == approx(
            utils.concordance_index(times, predicted, events))


def test_concordance_in_blocks_is_the_same(monkeypatch):
    rng = np.random.default_rng(4)
    case = rng.normal(size=80), rng.integers(0, 20, 80).astype(float), rng.random(80) < 0.7
    whole = metrics.concordance_index(*case)
    monkeypatch.setattr(metrics, "PAIRS", 100)
    assert metrics.concordance_index(*case) == approx(whole, rel=1e-12)


@pytest.mark.parametrize(("made", "outputs", "targets", "text"), [
    (metrics.roc_auc, torch.zeros(3, 1), torch.zeros(3), "this metric is for one class per example"),
    (metrics.mean_absolute_error, torch.zeros(3, 2), torch.zeros(3), "the module gives 2 numbers per example, the targets hold 1"),
    (metrics.concordance, torch.zeros(3), torch.full((3, 2), 2.0), "pairs of a time and whether the event happened"),
])
def test_targets_of_another_kind_are_refused(made, outputs, targets, text):
    with pytest.raises(ValueError, match=text):
        made().function(outputs, targets)


# ---- clients for whom a metric is not defined


def test_a_client_without_a_metric_is_left_out_of_that_metric_only():
    population, task = two_classes(), Task(fixed_model(), metrics=[metrics.roc_auc()])
    found = fedtail.evaluate(task.module, population, task)
    auc = found["roc_auc"]
    by_hand = [auc_by_pairs(task.module(x).detach().numpy().reshape(-1), (y == 1).numpy())
               for k in range(12) if k != 2 for x, y in [population.client(k)]]
    assert (auc.num_defined, len(auc)) == (11, 12)
    assert auc.mean() == approx(np.mean(by_hand))
    assert auc.worst(2 / 11) == approx(np.mean(np.sort(by_hand)[:2]))
    assert auc.bad_percentile() == approx(np.percentile(by_hand, 10))
    assert found.error.num_defined == 12
    assert math.isfinite(found.error.mean())
    assert "roc_auc, defined for 11 of 12" in found.table()
    assert found.of_clients(torch.arange(3))["roc_auc"].num_defined == 2


def test_the_absolute_error_is_a_mean_over_examples_whose_noise_is_known():
    population, task = numbers_of(two_classes(one_class=())), Task(LeastSquares(3), metrics=[metrics.mean_absolute_error()])
    found = fedtail.evaluate(task.module, population, task)["mean_absolute_error"]
    by_hand = [mean_absolute_error(y, task.module(x).detach().reshape(-1)) for x, y in map(population.client, range(len(population)))]
    assert found.values.tolist() == approx(by_hand)
    assert metrics.mean_absolute_error().per == "example"


def test_a_metric_that_no_client_has_is_not_a_number():
    found = fedtail.evaluate(fixed_model(), two_classes(one_class=tuple(range(12))), Task(fixed_model(), metrics=[metrics.f1()]))
    assert found["f1"].num_defined == 0
    assert math.isnan(found["f1"].mean())


def test_a_diverged_model_is_loud_in_every_metric():
    """The error of NaN outputs was a number, since argmax gives some class."""
    task = Task(fixed_model(), metrics=[metrics.roc_auc(), Metric("strict", lambda o, t: 1 / 0, per="client")])
    with torch.no_grad():
        next(task.module.parameters()).fill_(math.nan)
    with pytest.warns(fedtail.DivergedWarning, match="the loss is not finite for all 12 clients: the model has diverged"):
        found = fedtail.evaluate(task.module, two_classes(), task)
    for name in ("loss", "error", "roc_auc", "strict"):
        assert math.isnan(found[name].mean())
        assert found[name].num_defined == 12      # not "undefined": lost


@pytest.mark.parametrize(("better", "name"), [("lower", "p90"), ("higher", "p10")])
def test_the_percentile_is_that_of_the_bad_end(better, name):
    values = torch.from_numpy(np.random.default_rng(0).random(57))
    found = Distribution(values, better=better)
    assert bad_percentile_name(better) == name
    assert found.bad_percentile() == approx(np.percentile(values, int(name[1:])))
    assert found.bad_percentile(25) == approx(np.percentile(values, 75 if better == "lower" else 25))


# ---- choosing


def test_models_are_chosen_by_any_metric_in_its_direction():
    population = two_classes(one_class=())
    good, bad = fixed_model(), fixed_model()
    with torch.no_grad():
        next(bad.parameters()).mul_(-1)
    task = Task(good, metrics=[metrics.roc_auc()])
    for metric in ("error", "loss", "roc_auc"):
        picked = fedtail.choose([bad, good], population.client(0), task, metric)
        assert (picked.index, picked.metric) == (1, metric)
    with pytest.raises(ValueError, match=r"metric must be one of the task, got 'auc'. There are loss, error, roc_auc"):
        fedtail.choose([good], population.client(0), task, "auc")
    x, y = population.client(0)
    with pytest.raises(ValueError, match="roc_auc is not defined for these 2 examples"):
        fedtail.choose([good], (x[:2], torch.zeros_like(y[:2])), task, "roc_auc")


def test_a_family_is_picked_from_by_any_metric():
    population, task = two_classes(30, one_class=(2,)), Task(LogisticRegression(3), metrics=[metrics.roc_auc()])
    trained = fedtail.train(fedtail.delta_fl_family((1.0, 0.5), 20, learning_rate=0.3), task, population, rounds=3)
    own, held = population.split_examples(within=0.5, seed=0)
    values = {part: np.array([fedtail.evaluate(m, part, task)["roc_auc"].values.numpy() for m in trained.modules]) for part in (own, held)}
    found = fedtail.evaluate_family(trained, population, metric="roc_auc")
    expected = np.where(np.isnan(values[own]).all(0), 0, np.nan_to_num(values[own], nan=-1).argmax(0))
    assert found.choice.tolist() == expected.tolist()
    picked = values[held][expected, np.arange(30)]
    assert found.chosen.mean() == approx(np.nanmean(picked))
    assert "p10" in found.table()
    assert "p90" not in found.table()


def test_a_spread_is_better_small_whichever_way_the_metric_points(tmp_path):
    population, task = two_classes(one_class=()), Task(LogisticRegression(3), metrics=[metrics.roc_auc()])
    watch = EarlyStopping(population, patience=50, statistic="roc_auc.std")
    seen: list[float] = []

    def on_round(progress):
        seen.append(fedtail.evaluate(progress.trained, population)["roc_auc"].std())
        return watch(progress)

    trained = fedtail.train(fedtail.fedavg(6, learning_rate=0.5), task, population, rounds=6, on_round=on_round)
    assert watch.value == min(seen) < max(seen)
    keeper = KeepBest(tmp_path, "roc_auc.std", ["a"])
    for spread in (0.2, 0.1, 0.3):
        one = replace(fedtail.evaluate(trained, population), distributions={"roc_auc": Distribution(torch.tensor([0.5 - spread, 0.5 + spread]).double(), better="higher")})
        keeper.keep_better_models(trained, [{"test": one}], "test")
    assert keeper.found[0]["value"] == approx(0.1)


# ---- the constant prediction


def best_constant(loss, targets, weights, width: int) -> np.ndarray:
    """The minimiser of the weighted mean loss over constant outputs, by scipy."""
    def mean(c):
        outputs = torch.from_numpy(np.tile(c, (len(targets), 1)))
        return float((loss(outputs, targets) * weights).sum() / weights.sum())

    return optimize.minimize(mean, np.zeros(width), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10, "maxiter": 4000}).x


@pytest.mark.parametrize("kind", ["classes", "logit", "hinge", "numbers", "logit of floats", "hinge of floats"])
def test_the_constant_prediction_minimises_the_weighted_training_loss(kind):
    rng = np.random.default_rng(5)
    sizes, mass = (5, 40, 60), torch.tensor([3.0, 1.0, 2.0])
    label = {"classes": lambda n: rng.choice(3, n, p=(0.2, 0.5, 0.3)), "numbers": lambda n: rng.normal(size=n).astype("float32")}
    draw = label.get(kind, lambda n: (rng.random(n) < 0.3).astype("float32" if "floats" in kind else int))
    population = Population.from_clients([(rng.normal(size=(n, 2)).astype("float32"), draw(n)) for n in sizes], mass=mass)
    task = {"classes": Task(SoftmaxRegression(2, 3)), "logit": Task(LogisticRegression(2)),
            "hinge": Task(LogisticRegression(2), loss=hinge), "numbers": Task(LeastSquares(2))}[kind.removesuffix(" of floats")]
    found = constant_outputs(task, population).double().reshape(-1)
    weights = (mass / torch.tensor(sizes))[torch.arange(3).repeat_interleave(torch.tensor(sizes))].double()

    def mean(c):
        return float((task.loss(c.expand(len(weights), -1), population.targets) * weights).sum() / weights.sum())

    best = torch.from_numpy(best_constant(task.loss, population.targets, weights, len(found)))
    assert mean(found) == approx(mean(best), rel=2e-3)      # one example more, spread over the classes, keeps logits finite


def test_a_loss_of_ones_own_has_a_constant_prediction_too():
    def median_loss(outputs, targets):
        return (outputs.reshape(-1) - targets).abs()

    rng = np.random.default_rng(6)
    population = Population.from_clients([(rng.normal(size=(51, 2)).astype("float32"), rng.exponential(size=51).astype("float32"))])
    found = constant_outputs(Task(torch.nn.Linear(2, 1), loss=median_loss), population)
    mean = lambda c: float(np.abs(population.targets.numpy() - c).mean())      # noqa: E731
    assert mean(found.item()) == approx(mean(np.median(population.targets.numpy())), rel=1e-2)


def test_sequences_and_classes_that_never_occur():
    targets = torch.tensor([[0, 1, -100], [1, 1, -100]])
    population = Population.from_clients([(torch.zeros(2, 3, 2), targets)])
    found = constant_outputs(Task(torch.nn.Linear(2, 3)), population)
    assert found.shape == (3, 3)
    counts = np.array([1, 3, 0]) + 4 / 2 / 3                                 # padding does not count
    assert found[0].exp().numpy() == approx(counts / counts.sum(), rel=1e-5)


def test_every_evaluation_of_a_trained_model_has_the_constant_beside_it():
    train, test = two_classes(20, one_class=()).split((0.5, 0.5), seed=0)
    trained = fedtail.train(fedtail.fedavg(10, learning_rate=0.3), Task(LogisticRegression(3)), train, rounds=5)
    found = fedtail.evaluate(trained, test)
    majority = int((train.targets[torch.cat([torch.arange(s, s + n) for s, n in zip(train.start, train.size, strict=True)])] == 1).double().mean() > 0.5)
    errors = [float((test.client(k)[1] != majority).double().mean()) for k in range(len(test))]
    assert found.constant.error.mean() == approx(np.mean(errors))
    assert found.loss.mean() < found.constant.loss.mean()
    assert found.table().splitlines()[0].endswith("constant")
    assert found.by_example.constant.error.mean() == approx(np.average(errors, weights=test.size))


def test_a_model_below_the_constant_and_answers_left_out_are_told():
    train = two_classes(20, one_class=())
    wrong = fixed_model()
    with torch.no_grad():
        next(wrong.parameters()).mul_(-5)
    trained = fedtail.train(fedtail.fedavg(10, learning_rate=1e-9), Task(wrong), train, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fedtail.WorseThanConstantWarning, match="is above that of a constant prediction"):
            fedtail.evaluate(trained, train)
    x, y = train.client(0)
    broken = Population.from_clients([(x.numpy() * 1e38, y.numpy()), *((x.numpy(), y.numpy()) for x, y in map(train.client, range(1, 5)))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fedtail.AnswersLeftOutWarning, match=r"2 of 10 answers \(20%\) of clients were left out"):
            fedtail.train(fedtail.fedavg(5, learning_rate=0.1), Task(LeastSquares(3)), numbers_of(broken), rounds=2)


def numbers_of(population: Population) -> Population:
    return replace(population, targets=population.targets.float())


def test_a_mean_that_pays_for_the_tail_is_told_as_that():
    """Not as a model that serves these clients worse than none: its worst clients are better off."""
    clients = [(np.zeros((20, 3), "float32"), np.array([1] * ones + [0] * (20 - ones))) for ones in (20, *[1] * 19)]
    population = Population.from_clients(clients)
    even = LogisticRegression(3)
    with torch.no_grad():
        for parameter in even.parameters():
            parameter.fill_(0.05)
    trained = fedtail.train(fedtail.fedavg(4, learning_rate=1e-12), Task(even), population, rounds=1)
    with pytest.warns(fedtail.WorseThanConstantWarning, match=r"while that of the worst 10% is below it, 0\.716 for 1\.266: the mean pays for the tail"):
        fedtail.evaluate(trained, population)


@pytest.mark.parametrize(("shift", "spread", "worse"), [(0.1, 0.05, True), (0.1, 0.5, False), (0.004, 1e-4, False), (-0.1, 0.05, False)])
def test_a_loss_above_the_constants_is_told_where_it_is_beyond_chance(shift, spread, worse):
    """By scipy's paired test over clients; a gap below a hundredth of the loss is no finding however many clients there are."""
    constants = np.random.default_rng(3).gamma(4, 0.2, 20)
    losses = constants + shift + spread * np.random.default_rng(4).permutation(np.linspace(-1, 1, 20))
    found = loss_gap(losses, constants)
    assert found.error == approx(stats.sem(losses - constants))
    assert found.is_a_finding(constants.mean()) is worse
    if abs(shift) > 0.01:
        assert worse is bool(stats.ttest_rel(losses, constants, alternative="greater").pvalue < 0.025)
    assert loss_gap([1.2], [1.0]).is_a_finding(1.0)                      # one client: nothing is known of chance


def test_a_weighted_gap_has_the_error_of_a_weighted_mean():
    losses, mass = np.array([1.0, 2.0, 5.0, 7.0]), np.array([2.0, 2.0, 2.0, 0.0])
    assert loss_gap(losses, np.zeros(4), mass) == loss_gap(losses[:3], np.zeros(3))
    gap = loss_gap(losses, np.zeros(4), np.array([3.0, 1.0, 0.0, 0.0]))
    assert (gap.gap, gap.clients, gap.error) == (approx(1.25), 2, approx(math.sqrt(2 * (0.75**2 * 0.25**2 + 0.25**2 * 0.75**2))))


def test_chance_is_no_warning_in_python():
    """Of 20 clients whose labels say nothing the loss is 2% above the constant's, by less than they differ in it."""
    people = two_classes(20, one_class=())
    people = replace(people, targets=torch.from_numpy(np.random.default_rng(0).permutation(people.targets.numpy())))
    module = LogisticRegression(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.2)
    trained = fedtail.train(fedtail.fedavg(20, learning_rate=1e-12), Task(module), people, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fedtail.evaluate(trained, people)
    less = (found.loss.values - found.constant.loss.values).numpy()
    assert 0.01 * found.constant.loss.mean() < less.mean() < 2 * stats.sem(less)


def test_a_network_that_diverged_on_large_targets_is_told_to_divide_them():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    prices = Population.from_arrays(x, 250_000 + 90_000 * x.sum(1), np.arange(200) % 10)
    network = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    method = fedtail.fedavg(10, learning_rate=0.1)
    with pytest.warns(fedtail.DivergedWarning) as told:
        fedtail.evaluate(fedtail.train(method, Task(network), prices, rounds=5, progress=False), prices)
    [text] = [str(one.message) for one in told if "The targets spread by about 2e+05" in str(one.message)]
    assert text.endswith("divide them by such a number, for everybody the same.")
    divided = replace(prices, targets=prices.targets / 1e5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fedtail.evaluate(fedtail.train(method, Task(network), divided, rounds=5, progress=False), divided)
    assert found.error.mean() < 0.1 * found.constant.error.mean()


def test_parameters_that_are_not_finite_are_told():
    lost = fixed_model()
    with torch.no_grad():
        next(lost.parameters()).fill_(math.nan)
    with pytest.raises(fedtail.DivergedWarning, match="3 of 4 parameters of the model are not finite"):
        fedtail.train(fedtail.fedavg(5, learning_rate=0.1), Task(lost), two_classes(one_class=()), rounds=1)


# ---- files, runs and commands

FILE = """
name = "{name}"
rounds = 4
[data]
kind = "arrays"
path = "{data}"
split = {{ train = 0.5, test = 0.5 }}
[task]
metrics = ["roc_auc", "f1"]
[task.module]
part = "LogisticRegression"
features = 3
[sample]
cohort_size = 6
[local]
learning_rate = 0.3
[evaluate]
every = 2
[[method]]
name = "mean"
[[method]]
name = "tail"
risk = {{ part = "Superquantile", tail_fraction = 0.5 }}
"""


def write_files(place, clients: int, name: str = "e") -> None:
    population = two_classes(clients, one_class=(2, 3))
    owner = np.repeat(np.arange(clients), population.size)
    np.savez(place / f"{name}.npz", x=population.inputs.numpy(), y=population.targets.numpy(),
             client=np.array([f"clinic {k:02d}" for k in owner]))
    (place / f"{name}.toml").write_text(FILE.format(name=name, data=f"{name}.npz"))


def call(*words: str):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two methods with two metrics on twenty-two test clients, and on six."""
    place = tmp_path_factory.mktemp("compared")
    for name, clients in (("many", 44), ("few", 12)):
        write_files(place, clients, name)
        done = call("compare", place / f"{name}.toml", "--out", place / name, "--json")
        assert done.exit_code == 0, done.output
        (place / f"{name}.json").write_text(done.stdout)
    return place


def runs_of(place, name) -> list[RunFolder]:
    return [RunFolder.open(place / name / method / "seed-0") for method in ("mean", "tail")]


def test_metrics_by_name_are_read_written_and_misspelt(tmp_path):
    write_files(tmp_path, 12)
    plan = read_experiment(tmp_path / "e.toml", method="mean").task
    assert plan.metric_names == ["loss", "error", "roc_auc", "f1"]
    assert plan.as_table()["metrics"] == ["roc_auc", "f1"]
    assert plan.make(0).metrics == (metrics.roc_auc(), metrics.f1())
    done = call("run", tmp_path / "e.toml", "--method", "mean", "--set", 'task.metrics=["roc_acu"]')
    assert done.exit_code == 2
    assert "fedtail.metrics has no 'roc_acu'. Did you mean roc_auc?" in done.stderr
    done = call("run", tmp_path / "e.toml", "--method", "mean", "--metric", "auc")
    assert (done.exit_code, "mean has no metric 'auc'; it has loss, error, roc_auc, f1." in done.stderr) == (2, True)


def test_seeds_that_agree_but_for_rounding_have_no_spread_and_all_clients_are_counted(tmp_path):
    """The constant prediction has an AUC of one half for everybody; seed 1 has no client without one, so there it is defined for all."""
    for seed, (value, defined) in enumerate([(0.5, {"defined": 3}), (0.5 + 1.1e-16, {})]):
        path = write_folder(tmp_path / str(seed), [0.1, 0.2, 0.3, 0.4], seed=seed).path / "result.json"
        constant = {"test": {"roc_auc": {**dict.fromkeys(STATISTICS, value), **defined}}}
        path.write_text(json.dumps({**json.loads(path.read_text()), "constant": constant}))
    row = constant_row(find_runs([tmp_path]), "roc_auc")
    assert row["mean"] == {"mean": 0.5, "std": 0.0}
    assert row["defined"] == {0: 3, 1: 4}


def test_rows_and_differences_of_a_metric_where_higher_is_better(compared):
    runs = runs_of(compared, "many")
    each = [run.client_columns("test")["roc_auc"] for run in runs]
    assert [np.isnan(values).sum() for values in each] == [2, 2]
    rows = rows_by_method(runs, "roc_auc")
    assert [row["defined"] for row in rows] == [{0: 20}, {0: 20}]
    for row, values in zip(rows, each, strict=True):
        known = np.sort(values[~np.isnan(values)])
        assert row["p10"]["mean"] == approx(np.percentile(known, 10))
        assert row["worst10"]["mean"] == approx((known[0] + known[1]) / 2)
    [less] = paired_differences(runs, "roc_auc")
    assert less["mean"]["mean"] == approx(np.nanmean(each[1]) - np.nanmean(each[0]))
    told = json.loads((compared / "many.json").read_text())
    assert told["metrics"]["roc_auc"][0]["mean"] == rows[0]["mean"]
    assert told["constant"]["mean"]["mean"] == constant_row(runs)["mean"]["mean"]
    kept = json.loads((compared / "many" / "comparison.json").read_text())
    assert set(kept["metrics"]) == {"error", "roc_auc", "f1", "loss"}


def test_the_tables_of_a_terminal(compared):
    for name, clients in (("many", 22), ("few", 6)):
        done = call("compare", compared / f"{name}.toml", "--out", compared / name, "--resume", "--metric", "roc_auc")
        assert done.exit_code == 0, done.output
        assert f"roc_auc on {clients} test clients after 4 rounds, higher is better" in done.stdout
        assert "Error on" not in done.stdout
        assert "constant prediction" in done.stdout
    assert "worst client" in done.stdout
    assert "worst 10%" not in done.stdout
    runs = runs_of(compared, "few")
    rows = rows_by_client(runs, "roc_auc")
    lines = [line for line in done.stdout.splitlines() if "clinic" in line]
    assert [line.split("│")[1].strip() for line in lines] == [row["client"] for row in rows]
    assert len(rows) == 6
    means = [np.mean(list(row["values"].values())) for row in rows if None not in row["values"].values()]
    assert means == sorted(means)                            # worst first
    assert all(None in row["values"].values() for row in rows[len(means):])      # and those without an AUC last
    assert len(means) < len(rows)
    columns = runs[0].client_columns("test")
    by_name = dict(zip(columns["name"], columns["roc_auc"], strict=True))
    assert {row["client"]: row["values"]["mean"] for row in rows} == {n: None if np.isnan(v) else approx(v) for n, v in by_name.items()}


@pytest.mark.parametrize(("rate", "text"), [
    (3.0, " before. The model has diverged: lower the learning rate"), (1e3, "the loss is not finite for all 12 test clients")])
def test_a_run_that_diverges_ends_with_code_one_and_without_a_number(tmp_path, rate, text):
    write_files(tmp_path, 24)
    words = ("compare", tmp_path / "e.toml", "--out", tmp_path / "out", "--set", 'task.metrics=["r2"]', "--set",
             'task.loss="squared_error"', "--set", 'task.error="squared_error"', "--set", f"local.learning_rate={rate}", "--set", "rounds=3")
    done = call(*words)
    assert done.exit_code == 1, done.output
    assert text in done.stdout, done.output
    assert "diverged" in done.stdout.split("constant prediction")[0]
    assert "Error: the model has diverged (mean, seed 0; tail, seed 0)" in done.stderr
    runs = runs_of(tmp_path, "out")
    assert all(row[name]["mean"] is None and row["diverged"] == [0] for row in rows_by_method(runs) for name in ("mean", "worst10"))
    data = page_data(runs)
    assert data["alarms"] == divergence_sentences(runs) != []
    assert all(row["statistics"]["mean"]["mean"] is None and row["diverged"] == [0] for row in data["table"])
    page = write_page(runs, tmp_path).read_text().split("page-data")[0]
    assert page.count('class="note alarm"') == len(data["alarms"])
    assert ">diverged" in page


def test_choose_goes_by_a_metric(tmp_path):
    run = write_run(tmp_path / "run", "family", [1.0, 0.3], 0, settings=['task.metrics=["balanced_accuracy"]', "rounds=3"])
    population = Population.from_npz(tmp_path / "clients.npz")
    x, y = population.client(0)
    np.savez(tmp_path / "mine.npz", x=x.numpy(), y=y.numpy())
    done = call("choose", run.path, "--data", tmp_path / "mine.npz", "--metric", "balanced_accuracy", "--json")
    found = json.loads(done.stdout)
    values = [model["balanced_accuracy"] for model in found["models"]]
    assert (found["metric"], found["better"], found["unit"]) == ("balanced_accuracy", "higher", "")
    assert found["index"] == int(np.argmax(values))
    assert "balanced_accuracy on" in call("choose", run.path, "--data", tmp_path / "mine.npz", "--metric", "balanced_accuracy").stdout
    columns = run.client_columns("test", 1)
    assert {"picks_balanced_accuracy", "judged_balanced_accuracy", "picks_loss"} <= set(columns)
    choice = page_data([run], metric="balanced_accuracy")["choices"][0]
    assert sum(choice["counts"]) == choice["clients"] > 0


# ---- the page


def test_a_page_has_a_view_of_every_metric_in_its_direction(compared):
    runs = runs_of(compared, "many")
    data = page_data(runs)
    assert [data["metric"], *data["further"]] == ["error", "loss", "roc_auc", "f1"]
    auc = data["further"]["roc_auc"]
    each = [run.client_columns("test")["roc_auc"] for run in runs]
    assert [name for name, _ in auc["statistics"]] == ["mean", "p10", "worst10", "worst5", "best10", "std"]
    for row, values in zip(auc["table"], each, strict=True):
        assert row["statistics"]["p10"]["mean"] == approx(np.nanpercentile(values, 10))
        assert row["statistics"]["best10"]["mean"] > row["statistics"]["worst10"]["mean"]
        assert row["defined"] == "defined for 20 of 22"
    means = [np.nanmean(values) for values in each]
    assert [row["statistics"]["mean"]["best"] for row in auc["table"]] == [mean == max(means) for mean in means]
    change = auc["clients"]["changes"][1]
    gap = (each[1] - each[0])[~np.isnan(each[0])]
    assert (change["improved"], change["worse"]) == ((gap > 1e-9).sum(), (gap < -1e-9).sum())
    assert change["y"] == sorted(change["y"], reverse=True)                  # from the client that gained most
    assert auc["distributions"]["clients"] == [20, 20]
    assert auc["constant"]["mean"]["mean"] == approx(0.5)
    with pytest.raises(ValueError, match="there is no metric 'auc' on this page; there are loss, error, roc_auc, f1"):
        page_data(runs, metric="auc")


def test_few_clients_are_on_the_page_by_name(compared):
    data = page_data(runs_of(compared, "few"))
    assert [name for name, _ in data["statistics"]] == ["mean", "p100", "p0", "std"]
    assert [name for name, _ in data["further"]["roc_auc"]["statistics"]] == ["mean", "p0", "p100", "std"]
    assert len(data["by_client"]) == 6
    errors = runs_of(compared, "few")[1].client_columns("test")
    assert {row["client"]: row["values"][1] for row in data["by_client"]} == approx(dict(zip(errors["name"], errors["error"], strict=True)))
    assert data["table"][1]["statistics"]["p100"]["mean"] == approx(errors["error"].max())
    assert page_data(runs_of(compared, "many"))["by_client"] == []


def test_curves_of_few_clients_show_the_worst_one_instead_of_a_percentile(compared, tmp_path):
    """The 90th percentile of six clients is half of one of them."""
    for name, few in (("few", True), ("many", False)):
        runs = runs_of(compared, name)
        data = page_data(runs)
        text = write_page(runs, tmp_path / f"{name}.html").read_text()
        assert data["few"] is few
        assert ("and worst client (dotted)" in text, "and 90th percentile (dotted)" in text) == (few, not few)
        worst = [line["members"][0]["test"]["error"]["p100"] for line in runs[0].metrics]
        assert data["curves"][0]["test"]["error"]["p100"] == approx(worst, rel=1e-4)
    earlier = page_data(runs_of(compared, "few"))["curves"]
    earlier[0]["test"]["error"]["p100"] = [None] * len(earlier[0]["test"]["error"]["mean"])
    assert not has_extremes(earlier)                              # recorded before there was a worst client in metrics.jsonl


def test_a_page_stays_small_with_many_clients_and_metrics(tmp_path):
    values = np.random.default_rng(0).random((2, 30_000))
    names = ["loss", "error"]
    runs = [write_folder(tmp_path / name, errors, name=name, metrics=names) for name, errors in zip("ab", values, strict=True)]
    assert len(script_safe_json(page_data(runs))) < 600_000


def test_methods_with_other_metrics_are_on_one_page(tmp_path):
    """The direction of a metric is that of the runs that have it, also where the first does not."""
    plain = write_folder(tmp_path / "plain", [0.1, 0.2, 0.3], name="plain")
    more = write_folder(tmp_path / "more", [0.3, 0.2, 0.1], name="more", metrics=["loss", "error", "auc"],
                        better={"loss": "lower", "error": "lower", "auc": "higher"})
    view = page_data([plain, more])["further"]["auc"]
    assert (view["better"], view["statistics"][1][0]) == ("higher", "p0")
    assert [row["statistics"]["mean"]["mean"] for row in view["table"]] == [None, None]
    assert write_page([plain, more], tmp_path).is_file()


def test_a_loss_a_thousand_times_that_of_the_constant_has_diverged_not_learned_too_little():
    """One rule in Python as in runs: a finite loss of 1e28 is no reason to train longer."""
    random = np.random.default_rng(0)
    people = Population.from_clients([(random.normal(size=(20, 5)).astype("float32"), random.integers(0, 2, 20)) for _ in range(12)])
    task = Task(LogisticRegression(5))
    for rate, category, text in ((1e30, fedtail.DivergedWarning, "where a constant prediction has .*: training has diverged. Lower the learning rate"),
                                 (30.0, fedtail.WorseThanConstantWarning, "is above that of a constant prediction")):
        trained = fedtail.train(fedtail.fedavg(10, learning_rate=rate), task, people, rounds=5, seed=0)
        with pytest.warns(fedtail.DivergedWarning, match=text) as told:
            fedtail.evaluate(trained, people)
        assert [one.category for one in told] == [category]
