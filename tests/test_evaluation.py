"""How a model does, as a distribution over clients: statistics, evaluation, fine-tuning, and the choice within a family."""

import copy
import gc
import math
import re
import sys
import weakref
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sklearn.metrics import roc_auc_score
from torch import nn, tensor

from fedtail import (
    Constant,
    Distribution,
    Engine,
    Family,
    LocalSGD,
    Metric,
    Population,
    Proximal,
    State,
    StepDecay,
    Task,
    choose,
    delta_fl,
    evaluate,
    evaluate_family,
    fedavg,
    finetune,
    train,
)
from fedtail.evaluation import text_table
from fedtail.evaluation.evaluate import Evaluation
from fedtail.losses import cross_entropy, misclassification, squared_error
from fedtail.models import CharacterGRU, LeastSquares, LogisticRegression, LSTMClassifier, SoftmaxRegression
from fedtail.runs.measurements import metrics_line
from fedtail.training import Trained

numbers = st.floats(-50, 50, allow_subnormal=False)
lists = st.lists(numbers | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=12)
with_masses = lists.flatmap(lambda v: st.tuples(st.just(v), st.lists(st.integers(1, 6), min_size=len(v), max_size=len(v))))
accuracies = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=12)
ends = st.sampled_from(["lower", "higher"])
DOUBLE = {"engine": Engine(dtype=torch.float64)}


def distribution(values, mass=None, better="lower") -> Distribution:
    mass = None if mass is None else tensor(mass, dtype=torch.float64)
    return Distribution(tensor(values, dtype=torch.float64), mass, better)


def expanded(values, mass) -> np.ndarray:
    """Every value as often as its mass says."""
    return np.repeat(np.asarray(values), mass)


def tail_program(values, mass, fraction, sign) -> float:
    """Mean of the largest (sign 1) or smallest (sign -1) `fraction` of the mass, as a linear program."""
    share = np.asarray(mass) / np.sum(mass)
    bounds = [(0, s / fraction) for s in share]
    program = linprog(-sign * np.asarray(values), A_eq=[np.ones(len(values))], b_eq=[1.0], bounds=bounds)
    return -sign * program.fun


# Statistics of one list

@given(lists, st.floats(0, 100))
def test_percentiles_follow_numpys_linear_rule(values, percent):
    assert distribution(values).percentile(percent) == pytest.approx(np.percentile(values, percent), abs=1e-9)


def test_percentiles_of_more_clients_than_float32_can_count():
    count = 2**24 + 3
    values = torch.arange(count, dtype=torch.float64).roll(count // 3)
    assert Distribution(values).percentile(90) == pytest.approx(0.9 * (count - 1), rel=1e-15)


STATISTICS = ("mean", "std", "variance", "p0.1", "p10", "p50", "p90", "p100", "worst10", "best10", "worst100")


@pytest.mark.parametrize("mass", [None, [1.0, 2.0, 1.0, 3.0]], ids=["once each", "by mass"])
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_client_whose_value_is_no_number_leaves_no_statistic_that_means_something(mass, better):
    for place in range(4):
        values = [0.1, 0.2, 0.3, 0.4]
        values[place] = math.nan
        d = distribution(values, mass, better)
        assert all(math.isnan(d.statistic(name)) for name in STATISTICS)
        assert all(math.isnan(number) for number in d.summary().values())
        assert math.isnan(replace(d, rates=True).angle())
        assert math.isnan(replace(d, rates=True).kl_to_uniform())


def test_infinite_values_are_infinite_where_they_count_and_no_number_where_nothing_can_be_said():
    d = distribution([math.inf, 1.0, 2.0, 3.0, 4.0])
    assert d.mean() == d.worst(0.1) == d.worst(0.5) == d.percentile(100) == d.percentile(80) == d.percentile(99) == math.inf
    assert (d.percentile(0), d.percentile(50), d.percentile(75)) == (1.0, 3.0, 4.0)
    assert (d.best(0.2), d.best(0.4)) == (1.0, 1.5)
    assert all(math.isnan(number) for number in (d.variance(), d.std(), d.angle(), d.kl_to_uniform()))
    both = distribution([math.inf, 1.0, -math.inf])
    assert (both.percentile(0), both.percentile(50), both.percentile(100)) == (-math.inf, 1.0, math.inf)
    assert math.isnan(both.mean())
    assert distribution([math.inf, math.inf, 1.0]).percentile(75) == math.inf


def test_nobody_has_no_statistic():
    for d in (distribution([]), distribution([], []), distribution([1.0, 2.0], [0.0, 0.0])):
        assert all(math.isnan(d.statistic(name)) for name in STATISTICS)
    assert math.isnan(distribution([]).angle())
    assert math.isnan(distribution([]).kl_to_uniform())


@given(with_masses, ends, st.sampled_from([-99.0, 0.5, 99.0, math.nan, math.inf]), st.randoms(use_true_random=False))
def test_a_client_of_mass_zero_is_in_no_statistic(case, better, value, random):
    values, mass = case
    place = random.randint(0, len(values))
    more, others = distribution([*values[:place], value, *values[place:]], [*mass[:place], 0, *mass[place:]], better), distribution(values, mass, better)
    for name in STATISTICS:
        assert more.statistic(name) == pytest.approx(others.statistic(name), rel=1e-12, abs=1e-12)
    assert more.percentile(0) == min(values)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_angle_and_divergence_do_not_depend_on_the_scale_of_the_scores(scale):
    d = distribution([3.0 * scale, 4.0 * scale, 0.0])
    assert d.angle() == pytest.approx(math.degrees(math.acos(7 / 3 / math.sqrt(25 / 3))))
    assert d.kl_to_uniform() == pytest.approx(3 / 7 * math.log(9 / 7) + 4 / 7 * math.log(12 / 7))
    assert distribution([0.0, 0.0]).angle() == distribution([0.0, 0.0]).kl_to_uniform() == 0.0      # equal scores, as any others


@given(with_masses, st.integers(0, 100))
def test_percentile_by_mass_is_the_least_value_whose_cumulative_mass_reaches_it(case, percent):
    values, mass = case
    ranked = np.sort(expanded(values, mass))
    reached = next(v for i, v in enumerate(ranked, 1) if 100 * i >= percent * len(ranked))      # in whole numbers
    assert distribution(values, mass).percentile(percent) == reached


@pytest.mark.parametrize("percent", [5, 10, 20, 30, 50, 60, 70, 80, 90, 95])
def test_percentile_by_mass_survives_rounding_where_the_mass_reaches_it_exactly(percent):
    """Of 20 m clients of equal mass, percentile q is client q n / 100; sums of 1/n in floating point fall short of it."""
    for count in range(20, 401, 20):
        values = list(range(1, count + 1))
        assert distribution(values, [0.3] * count).percentile(percent) == percent * count // 100


@given(with_masses)
def test_mean_and_variance_by_mass_are_those_of_the_expanded_list(case):
    values, mass = case
    weighted, plain = distribution(values, mass), distribution(values)
    for d, ground in ((weighted, expanded(values, mass)), (plain, np.asarray(values))):
        assert d.mean() == pytest.approx(ground.mean(), abs=1e-9)
        assert d.variance() == pytest.approx(ground.var(), abs=1e-9)
        assert d.std() == pytest.approx(ground.std(), abs=1e-6)      # a root: the error of a variance near zero grows


@given(with_masses, ends, st.integers(1, 100))
def test_tails_by_mass_are_means_of_the_ends_of_the_expanded_list(case, better, percent):
    """Repeat every unit of mass a hundred times: then a tail of `percent` is a whole number of entries."""
    values, mass = case
    ranked = np.sort(expanded(values, 100 * np.asarray(mass)))
    count = len(ranked) * percent // 100
    high, low = ranked[-count:].mean(), ranked[:count].mean()
    d = distribution(values, mass, better)
    assert d.worst(percent / 100) == pytest.approx(high if better == "lower" else low, abs=1e-9)
    assert d.best(percent / 100) == pytest.approx(low if better == "lower" else high, abs=1e-9)


@settings(max_examples=40)
@given(with_masses, st.booleans(), ends, st.floats(0.01, 1))
def test_tails_are_the_values_of_their_linear_programs(case, weighted, better, fraction):
    values, mass = case
    d = distribution(values, mass if weighted else None, better)
    mass, bad = mass if weighted else [1] * len(values), 1 if better == "lower" else -1
    assert d.worst(fraction) == pytest.approx(tail_program(values, mass, fraction, bad), abs=1e-7)
    assert d.best(fraction) == pytest.approx(tail_program(values, mass, fraction, -bad), abs=1e-7)


@given(lists, ends)
def test_the_whole_is_the_mean_and_a_tiny_tail_the_extreme(values, better):
    d, extremes = distribution(values, None, better), (max(values), min(values))
    worst, best = extremes if better == "lower" else extremes[::-1]
    assert d.worst(1.0) == pytest.approx(d.mean(), abs=1e-9)
    assert d.best(1.0) == pytest.approx(d.mean(), abs=1e-9)
    assert (d.worst(1e-9), d.best(1e-9)) == pytest.approx((worst, best), abs=1e-6)


@given(accuracies)
def test_angle_and_divergence_are_the_formulas_of_the_thesis(accuracies):
    a = np.asarray(accuracies)
    errors, higher = replace(distribution(1 - a), rates=True), distribution(a, None, "higher")
    if np.sqrt((a**2).mean()) > 1e-3:
        cosine = np.clip(a.mean() / np.sqrt((a**2).mean()), -1, 1)
        share = a / a.sum()
        kl = sum(s * math.log(len(a) * s) for s in share if s > 0)
        for d in (errors, higher):
            assert math.cos(math.radians(d.angle())) == pytest.approx(cosine, abs=1e-9)
            assert d.kl_to_uniform() == pytest.approx(kl, abs=1e-9)


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=9))
def test_losses_are_their_own_scores(losses):
    d, a = distribution(losses), np.asarray(losses)
    assert d.scores().tolist() == losses
    assert math.cos(math.radians(d.angle())) == pytest.approx(min(1.0, a.mean() / np.sqrt((a**2).mean())), abs=1e-9)
    share = a / a.sum()
    assert d.kl_to_uniform() == pytest.approx((share * np.log(len(a) * share)).sum(), abs=1e-9)


def test_equal_scores_have_angle_and_divergence_zero_and_one_alone_the_largest():
    assert distribution([0.5] * 4).angle() == pytest.approx(0, abs=1e-5)      # arccos near 1 halves the digits
    assert distribution([0.5] * 4).kl_to_uniform() == pytest.approx(0, abs=1e-12)
    alone = replace(distribution([0.0, 1.0, 1.0, 1.0]), rates=True)      # accuracy of one client only
    assert alone.angle() == pytest.approx(60)       # cosine (1/4) / (1/2)
    assert alone.kl_to_uniform() == pytest.approx(math.log(4))
    nobody = replace(distribution([1.0, 1.0]), rates=True)               # no accuracy at all: no direction, no shares
    assert (nobody.angle(), nobody.kl_to_uniform()) == (0.0, 0.0)


@given(st.floats(-50, -0.01), st.integers(1, 9))
def test_equal_negative_scores_point_the_other_way(value, clients):
    """A metric such as a log-likelihood: all clients the same, as at a zero start."""
    assert distribution([value] * clients, None, "higher").angle() == pytest.approx(180, abs=1e-5)


def test_summary_holds_what_the_papers_report():
    values = np.random.default_rng(0).random(40).round(2)
    for mass in (None, [1 + k % 5 for k in range(40)]):
        for better in ("lower", "higher"):
            d = distribution(values, mass, better)
            assert d.summary() == {
                "mean": d.mean(), "std": d.std(), "p10": d.percentile(10), "p50": d.percentile(50), "p90": d.percentile(90),
                "worst10": d.worst(0.1), "worst5": d.worst(0.05), "best10": d.best(0.1),
                "variance": d.variance(), "angle": d.angle(), "kl": d.kl_to_uniform(),
            }
    training = distribution(values, [1] * 40).percentiles()
    assert list(training) == ["p20", "p50", "p60", "p80", "p90", "p95"]      # of [PLMH23]: training losses
    assert training["p95"] == np.sort(values)[37]
    assert len(distribution(values)) == 40


@given(with_masses, ends, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(case, better, random):
    values, mass = case
    order = list(range(len(values)))
    random.shuffle(order)
    a = distribution(values, mass, better)
    b = distribution([values[k] for k in order], [mass[k] for k in order], better)
    for statistic in ("mean", "variance"):
        assert getattr(a, statistic)() == pytest.approx(getattr(b, statistic)(), abs=1e-9)
    assert a.worst(0.3) == pytest.approx(b.worst(0.3), abs=1e-9)
    assert a.percentile(40) == b.percentile(40)


@given(with_masses, st.floats(1e-3, 1e3))
def test_only_proportions_of_mass_matter(case, factor):
    values, mass = case
    a, b = (distribution(values, [f * m for m in mass]) for f in (1, factor))
    for name, arguments in (("mean", ()), ("std", ()), ("worst", (0.1,)), ("best", (0.1,)), ("percentile", (30,))):
        assert getattr(b, name)(*arguments) == pytest.approx(getattr(a, name)(*arguments), abs=1e-6)


@pytest.mark.parametrize("percent", [-1, 101, float("nan")])
def test_percentiles_beyond_the_scale_are_refused(percent):
    with pytest.raises(ValueError, match=re.escape(f"percent must be in [0, 100], got {percent:g}.")):
        distribution([1.0]).percentile(percent)


def test_tails_that_are_not_fractions_are_refused():
    text = "tail_fraction (theta) must be in (0, 1], got 10. It is a fraction: for the worst 10% of clients write 0.1."
    with pytest.raises(ValueError, match=re.escape(text)):
        distribution([1.0]).worst(10)


def test_tables_are_aligned():
    text = text_table({"a": {"x": 1.0, "y": 10.0}, "longer": {"x": 123.456, "y": 2.0}}, digits=1, title="t")
    lines = text.splitlines()
    assert [line.split() for line in lines] == [["t", "x", "y"], ["a", "1.0", "10.0"], ["longer", "123.5", "2.0"]]
    assert len({len(line) for line in lines}) == 1      # numbers are to the right, so all lines end together


def test_tails_of_the_largest_numbers_there_are():
    d = distribution([1e308, 1.5e308, -1e308, -1.5e308])
    assert (d.worst(0.25), d.best(0.25)) == (1.5e308, -1.5e308)
    assert (replace(d, better="higher").worst(0.25), replace(d, better="higher").best(0.25)) == (-1.5e308, 1.5e308)


def test_percentiles_between_a_number_and_an_infinity_are_that_infinity():
    assert distribution([-math.inf, 3.0]).percentile(25) == -math.inf
    assert distribution([-3.0, math.inf]).percentile(25) == math.inf
    assert (distribution([-math.inf, 3.0]).percentile(100), distribution([-3.0, math.inf]).percentile(0)) == (3.0, -3.0)
    assert distribution([1.5e308, -1.5e308]).percentile(25) == pytest.approx(-0.75e308)      # their difference is no float64


@pytest.mark.parametrize("name", ["p0", "worst0", "best0.0", "p100.5", "worst101", "p", "worst", "best-5", "median", "xp50", "p50x", ""])
def test_statistics_of_no_share_or_more_than_all_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(f"there is no statistic {name!r}. Write mean, std, variance, or p90, worst10, best10")):
        distribution([1.0, 2.0]).statistic(name)


def test_statistics_by_name_are_those_of_the_methods():
    d = distribution([0.5, 3.0, 1.0, 2.0, 9.0])
    assert [d.statistic(name) for name in ("p100", "p12.5", "worst40", "best100", "worst0.5")] == pytest.approx([9.0, 0.75, 6.0, 3.1, 9.0])
    assert [d.statistic(name) for name in ("mean", "std", "variance")] == pytest.approx([3.1, np.std(d.values.numpy()), np.var(d.values.numpy())])
    assert (d.better, d.rates, d.mass) == ("lower", False, None)


def test_a_table_is_set_in_columns_of_five_characters_at_least():
    rows = {"a": {"x": 1.0, "yy": 2.5}, "longer": {"x": 12345.678, "yy": 0.0}}
    assert text_table(rows, title="t").splitlines() == ["t              x     yy", "a           1.00   2.50", "longer  12345.68   0.00"]
    assert text_table(rows, ["yy"], scale=100, digits=0).splitlines() == ["           yy", "a         250", "longer      0"]


# Evaluation against a plain loop

SIZES = (5, 1, 8, 3, 300)      # the last is more than one batch of a looped kernel


def clients_of(sizes=SIZES, features=4, classes=3, seed=0, **more) -> Population:
    draw = np.random.default_rng(seed)
    total = sum(sizes)
    return Population.from_arrays(draw.normal(size=(total, features)), draw.integers(0, classes, total),
                                  np.repeat(np.arange(len(sizes)), sizes), **more)


def randomised(module: nn.Module, seed=0) -> nn.Module:
    """Float64, no parameter zero."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return module


def loop(module, population, function) -> list[float]:
    """One client after another, its examples all at once."""
    values = []
    for k in range(len(population)):
        x, y = population.client(k)
        with torch.no_grad():
            outputs = module(**x) if isinstance(x, dict) else module(x)
        values.append(float(function(outputs, y).double().mean()))
    return values


def mlp(features=4, classes=3) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, classes))


def numpy_cross_entropy(outputs, targets) -> torch.Tensor:
    scores = outputs.numpy()
    top = scores.max(1, keepdims=True)
    normaliser = np.log(np.exp(scores - top).sum(1)) + top[:, 0]
    return torch.from_numpy(normaliser - scores[np.arange(len(scores)), targets.numpy()])


def wrong(outputs, targets) -> torch.Tensor:
    return torch.from_numpy((outputs.numpy().argmax(1) != targets.numpy()).astype(float))


@pytest.mark.parametrize("module", [SoftmaxRegression(4, 3), nn.Linear(4, 3), mlp()], ids=["closed form", "nn.Linear", "mlp"])
@pytest.mark.parametrize("weighted", [False, True])
def test_evaluation_is_a_loop_over_clients(module, weighted):
    module, population = randomised(copy.deepcopy(module)), clients_of(mass=[3.0, 1, 2, 5, 1])
    result = evaluate(module, population, weighted=weighted, **DOUBLE)
    assert list(result.distributions) == ["loss", "error"]
    assert result.loss.values.tolist() == pytest.approx(loop(module, population, numpy_cross_entropy))
    assert result.error.values.tolist() == loop(module, population, wrong)
    assert result.loss.values.dtype == torch.float64
    mass = population.mass.numpy() if weighted else np.ones(5)
    assert result.error.mean() == pytest.approx(np.average(result.error.values, weights=mass))
    assert (result.error.mass is None) == (not weighted)


def test_evaluation_of_selected_clients_is_the_selection_of_their_values():
    population, module = clients_of(), randomised(mlp())
    whole = evaluate(module, population, **DOUBLE).loss.values
    some = evaluate(module, population.select([4, 1]), **DOUBLE).loss.values
    assert some.tolist() == pytest.approx(whole[[4, 1]].tolist(), abs=1e-12)


def test_data_are_checked_once_for_modules_of_one_form_and_again_where_something_changed(monkeypatch):
    population, looked, plain = clients_of(), [], Task.check
    monkeypatch.setattr(Task, "check", lambda task, people: (looked.append(people), plain(task, people)))
    for seed in range(3):
        evaluate(randomised(mlp(), seed), population, **DOUBLE)
    assert looked == [population]
    evaluate(randomised(mlp()), population.select([0, 1]), **DOUBLE)                  # other clients
    evaluate(randomised(nn.Linear(4, 3)), population, **DOUBLE)                       # another module
    evaluate(randomised(nn.Linear(4, 5)), population, **DOUBLE)                       # of other shapes
    evaluate(randomised(nn.Linear(4, 5)), population, Task(nn.Linear(4, 5), metrics=[Metric("wrong", wrong)]), **DOUBLE)
    assert len(looked) == 5
    population.targets[3] = 5
    with pytest.raises(ValueError, match="targets hold labels 0 to 5, but Linear has 5 outputs"):
        evaluate(randomised(nn.Linear(4, 5)), population, Task(nn.Linear(4, 5), metrics=[Metric("wrong", wrong)]), **DOUBLE)
    with pytest.raises(ValueError, match="targets hold labels 0 to 5, but Linear has 5 outputs"):      # refused is not checked
        evaluate(randomised(nn.Linear(4, 5)), population, Task(nn.Linear(4, 5), metrics=[Metric("wrong", wrong)]), **DOUBLE)


def test_what_was_checked_keeps_no_population_alive():
    population = clients_of()

    def margin(outputs, targets, people=population):
        return outputs[:, 0] * len(people)

    evaluate(randomised(mlp()), population, Task(mlp(), metrics=[Metric("margin", margin)]), **DOUBLE)
    alive = weakref.ref(population)
    del population, margin
    gc.collect()
    assert alive() is None


def square(outputs, targets) -> torch.Tensor:
    return torch.from_numpy(((outputs.numpy() - targets.numpy()) ** 2).reshape(len(targets), -1).sum(1))


def log_odds_loss(outputs, targets) -> torch.Tensor:
    return torch.from_numpy(np.log1p(np.exp(np.where(targets == 1, -outputs, outputs))))


def test_binary_and_real_targets_have_their_own_loss_and_error():
    draw = np.random.default_rng(1)
    x, client = draw.normal(size=(30, 4)), np.arange(30) % 3
    for module, y, loss, error in [
        (LogisticRegression(4), draw.integers(0, 2, 30), log_odds_loss, lambda o, t: (o > 0) != t),
        (LeastSquares(4), draw.normal(size=30), square, square),
        (LeastSquares(4, outputs=2), draw.normal(size=(30, 2)), square, square),
    ]:
        module, population = randomised(module), Population.from_arrays(x, y, client)
        result = evaluate(module, population, **DOUBLE)
        assert result.loss.values.tolist() == pytest.approx(loop(module, population, loss))
        assert result.error.values.tolist() == pytest.approx(loop(module, population, error))


def ragged_clients(targets="class", seed=3):
    """Text of different lengths: token lists as people hold them, and the population made of them."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 9, 40)
    tokens = [draw.integers(0, 11, n).tolist() for n in lengths]
    y = draw.integers(0, 2, 40) if targets == "class" else [draw.integers(0, 11, n).tolist() for n in lengths]
    client = np.arange(40) % 4
    return tokens, y, client, Population.from_arrays(tokens, y, client)


def test_evaluation_of_ragged_sequences_is_that_of_every_sequence_alone():
    tokens, y, client, population = ragged_clients()
    module = randomised(LSTMClassifier((11, 5), hidden=4))
    result = evaluate(module, population, **DOUBLE)
    with torch.no_grad():
        scores = torch.cat([module(tensor([t])) for t in tokens])      # no padding: one sequence at a time
    losses, errors = numpy_cross_entropy(scores, torch.from_numpy(y)), wrong(scores, torch.from_numpy(y))
    for k in range(4):
        assert result.loss.values[k].item() == pytest.approx(losses[client == k].mean().item())
        assert result.error.values[k].item() == pytest.approx(errors[client == k].mean().item())


def test_evaluation_of_sequence_targets_counts_only_real_positions():
    tokens, y, client, population = ragged_clients("sequence")
    assert int(population.targets.min()) == -100
    module = randomised(CharacterGRU(11, hidden=4, every_position=True))
    result = evaluate(module, population, **DOUBLE)
    losses, errors = [], []
    with torch.no_grad():
        for sequence, target in zip(tokens, y, strict=True):
            scores = module(tensor([sequence]))[0]      # (time, vocabulary), nothing padded
            losses.append(numpy_cross_entropy(scores, tensor(target)).mean().item())
            errors.append(wrong(scores, tensor(target)).mean().item())
    for k in range(4):
        assert result.loss.values[k].item() == pytest.approx(np.mean(np.array(losses)[client == k]))
        assert result.error.values[k].item() == pytest.approx(np.mean(np.array(errors)[client == k]))


def test_a_module_of_named_tensors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.age = nn.Embedding(6, 3), nn.Linear(2, 3)

        def forward(self, age, word):
            return self.words(word) + self.age(age)

    draw = np.random.default_rng(2)
    x = {"word": draw.integers(0, 6, 30), "age": draw.normal(size=(30, 2)).astype(np.float32)}
    population = Population.from_arrays(x, draw.integers(0, 3, 30), np.arange(30) % 3)
    module = randomised(Two())
    wide = replace(population, inputs={k: v.double() if v.is_floating_point() else v for k, v in population.inputs.items()})
    assert evaluate(module, population, **DOUBLE).loss.values.tolist() == pytest.approx(loop(module, wide, cross_entropy))


# Metrics

def auc(outputs, targets) -> float:
    return roc_auc_score(targets.numpy(), outputs.numpy())


def binary_clients(seed=5) -> Population:
    draw = np.random.default_rng(seed)
    y = np.concatenate([[0, 1], draw.integers(0, 2, 10)] * 12)      # both classes with every client
    return Population.from_arrays(draw.normal(size=(144, 3)), y, np.repeat(np.arange(12), 12), mass=np.arange(1.0, 13))


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_reachable_by_client_and_by_example_whatever_weights_were_asked_for(weighted):
    """[Li23, table 4.7]: against the list of all examples, and a plain mean over clients; masses are neither."""
    draw, sizes = np.random.default_rng(4), [1, 9, 30, 2]
    owner = np.repeat(np.arange(4), sizes)
    population = Population.from_arrays(draw.normal(size=(42, 3)), draw.integers(0, 2, 42), owner, mass=[5.0, 1.0, 1.0, 2.0])
    module = randomised(LogisticRegression(3))
    result = evaluate(module, population, weighted=weighted, **DOUBLE)
    wrong = np.concatenate([((module(x).detach().numpy() > 0) != y.numpy()) for x, y in (population.client(k) for k in range(4))])
    each = np.array([wrong[owner == k].mean() for k in range(4)])
    for found, mean, variance in ((result.by_example, wrong.mean(), np.average((each - wrong.mean()) ** 2, weights=sizes)), (result.by_client, each.mean(), each.var())):
        assert found.error.mean() == pytest.approx(mean, abs=1e-12)
        assert found.error.variance() == pytest.approx(variance, abs=1e-12)
        assert found.error.summary()["mean_by_example"] == pytest.approx(wrong.mean(), abs=1e-12)
        assert found.by_example.error.mean() == pytest.approx(wrong.mean(), abs=1e-12)
    worst = np.sort(np.repeat(each, sizes))[-21:]                    # the worse half of the examples, each with its client's error
    assert result.by_example.error.worst(0.5) == pytest.approx(worst.mean(), abs=1e-12)
    last = [line.split()[-1] for line in result.table().split("\n\n")[0].splitlines() if "if all were alike" not in line]
    assert last == ["mean_by_example", f"{result.by_example.loss.mean():.4f}", f"{wrong.mean():.4f}"]
    assert metrics_line(3, [{"test": result}])["members"][0]["test"]["error"]["mean_by_example"] == pytest.approx(wrong.mean(), abs=1e-12)
    with pytest.raises(ValueError, match=r"^this Distribution does not know how many examples each client has\. Give it sizes=population.size, or take one from fedtail.evaluate\.$"):
        distribution(each).by_example()


@pytest.mark.parametrize("weighted", [False, True])
def test_per_client_and_per_example_metrics_have_every_statistic_with_their_own_bad_end(weighted):
    population, module = binary_clients(), randomised(LogisticRegression(3))
    accuracy = Metric("accuracy", lambda o, t: ((o > 0) == t).double(), better="higher")
    task = Task(module, metrics=[Metric("auc", auc, better="higher", per="client"), accuracy])
    result = evaluate(module, population, task, weighted=weighted, **DOUBLE)
    aucs, right = [], []
    for k in range(12):
        x, y = population.client(k)
        score = module(x).detach().numpy()
        aucs.append(roc_auc_score(y.numpy(), score))
        right.append(((score > 0) == y.numpy()).mean())
    assert list(result.distributions) == ["loss", "error", "auc", "accuracy"]
    for name, values in (("auc", aucs), ("accuracy", right)):
        expected = replace(distribution(values, population.mass.tolist() if weighted else None, "higher"), sizes=population.size)
        assert result[name].values.tolist() == pytest.approx(values)
        assert result[name].summary() == pytest.approx(expected.summary(), abs=1e-9)
        assert result[name].worst(0.1) <= result[name].mean() <= result[name].best(0.1)
    assert result.error.worst(0.1) >= result.error.mean() >= result.error.best(0.1)
    assert (1 - result["accuracy"].values).tolist() == pytest.approx(result.error.values.tolist())


def test_a_per_client_metric_gets_all_of_one_client_however_it_was_batched():
    population, module = clients_of(), randomised(mlp())
    sizes = Metric("count", lambda o, t: float(len(o) + 1000 * len(t)), per="client")
    assert evaluate(module, population, Task(module, metrics=[sizes]))["count"].values.tolist() == [1001.0 * n for n in SIZES]


def test_an_evaluation_refuses_names_it_does_not_have_and_prints_those_it_has():
    result = evaluate(mlp(), clients_of())
    with pytest.raises(KeyError, match="no metric 'auc'; there are loss, error"):
        result["auc"]
    whole = evaluate(mlp(), clients_of((2,) * 20))
    assert whole.table().splitlines()[0].split() == ["20", "clients", "mean", "std", "p10", "p50", "p90", "worst10", "worst5", "best10",
                                                     "mean_by_example"]
    head, *rows = result.table().split("\n\n")[0].splitlines()
    assert head.split() == ["5", "clients", "mean", "std", "p50", "worst", "client", "best", "client", "mean_by_example"]
    assert [row.split("  ")[0] for row in rows] == ["loss", "error", "error, if all were alike"]
    assert rows[1].split()[1] == f"{result.error.mean():.4f}"


def test_errors_are_rates_where_they_count_wrong_classes_and_nowhere_else():
    draw, classes = np.random.default_rng(1), clients_of((3, 4))
    real = Population.from_arrays(draw.normal(size=(7, 4)), draw.normal(size=7), [0] * 3 + [1] * 4)
    softmax, line = SoftmaxRegression(4, 3), LeastSquares(4)
    for task, population, rates in ((Task(softmax), classes, True), (Task(softmax, error=misclassification), classes, True),
                                    (Task(softmax, error=half_wrong), classes, False), (Task(softmax, error=cross_entropy), classes, False),
                                    (Task(mlp()), classes, True), (Task(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))), real, False),
                                    (Task(line), real, False), (Task(line, error=squared_error), real, False)):
        result = evaluate(task.module, population, task)
        assert (result.error.rates, result.loss.rates) == (rates, False)
        assert torch.equal(result.error.scores(), 1 - result.error.values if rates else result.error.values)


class Weakless:
    """A metric of a class whose objects cannot be held weakly."""

    __slots__ = ()

    def __call__(self, outputs, targets):
        return outputs[:, 0]


def test_data_are_checked_every_time_where_nobody_can_say_that_nothing_changed(monkeypatch):
    population, looked, plain = clients_of((3, 4)), [], Task.check
    monkeypatch.setattr(Task, "check", lambda task, people: (looked.append(people), plain(task, people)))
    task = Task(mlp(), metrics=[Metric("first", Weakless())])
    for _ in range(3):
        evaluate(randomised(mlp()), population, task, **DOUBLE)
    assert len(looked) == 3


def test_a_per_client_metric_must_return_one_number():
    population, module = clients_of((3, 4)), randomised(mlp())
    for function, shape in ((lambda o, t: o[0], "(3,)"), (lambda o, t: o[:0, 0], "(0,)")):
        with pytest.raises(ValueError, match=re.escape(f"some must return one number for a client, got shape {shape}.")):
            evaluate(module, population, Task(module, metrics=[Metric("some", function, per="client")]), **DOUBLE)
    one = Metric("one", lambda o, t: o[:1, :1], per="client")                       # of any shape
    assert evaluate(module, population, Task(module, metrics=[one]), **DOUBLE)["one"].values.shape == (2,)


def test_the_task_given_is_the_task_used():
    population, module = clients_of(), randomised(mlp())
    task = Task(module, loss=lambda o, t: o[:, 0] * 0 + 2.0, error=lambda o, t: o[:, 0] * 0 + 7.0)
    result = evaluate(module, population, task)
    assert result.loss.values.tolist() == [2.0] * 5
    assert result.error.values.tolist() == [7.0] * 5


def test_a_trained_run_is_evaluated_with_its_own_task_or_with_the_one_given():
    population = clients_of((6, 6, 6))
    trained = train(fedavg(3, learning_rate=0.1), Task(SoftmaxRegression(4, 3), error=half_wrong), population, rounds=2)
    plain = loop(trained.module.double(), population, half_wrong)
    assert evaluate(trained, population).error.values.tolist() == pytest.approx(plain)
    more = replace(trained.task, metrics=[Metric("second", misclassification)])
    assert list(evaluate(trained, population, more).distributions) == ["loss", "error", "second"]


def test_evaluation_leaves_module_and_random_state_as_they_were():
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).train()
    before, state = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    first, second = evaluate(module, clients_of()), evaluate(module, clients_of())
    assert first.loss.values.tolist() == second.loss.values.tolist()      # dropout is off
    assert module.training
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


# Fine-tuning

def half_wrong(outputs, targets):
    """An error of one's own: 0.5 where the class is wrong."""
    return (outputs.argmax(1) != targets).double() / 2


def textbook(module, own, held, loss, epochs, rate, momentum=0.0, weight_decay=0.0) -> list[nn.Module]:
    """A copy of the module for each client, trained by torch's own optimiser on all of its own examples at once."""
    tuned = []
    for k in range(len(own)):
        local = copy.deepcopy(module)
        optimizer = torch.optim.SGD(local.parameters(), lr=rate, momentum=momentum, weight_decay=weight_decay)
        x, y = own.client(k)
        for _ in range(epochs):
            optimizer.zero_grad()
            loss(local(x), y).mean().backward()
            optimizer.step()
        tuned.append(local)
    return tuned


@pytest.mark.parametrize("module", [SoftmaxRegression(4, 3), mlp()], ids=["closed form", "mlp"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fine_tuning_is_a_loop_over_clients(module, momentum):
    module, population = randomised(copy.deepcopy(module)), clients_of((6, 2, 9, 5))
    local = LocalSGD(learning_rate=0.3, batch_size=None, epochs=4, momentum=momentum)
    task = Task(module, error=half_wrong, metrics=[Metric("first", lambda o, t: o[:, 0])])
    result = finetune(module, population, local, task, seed=3, **DOUBLE)
    own, held = population.split_examples(within=0.5, seed=3)
    tuned = textbook(module, own, held, nn.CrossEntropyLoss(reduction="none"), 4, 0.3, momentum)
    for name, function in (("loss", cross_entropy), ("error", half_wrong), ("first", lambda o, t: o[:, 0])):
        assert result.before[name].values.tolist() == pytest.approx(loop(module, held, function))
        after = [loop(local, held.select([k]), function)[0] for k, local in enumerate(tuned)]
        assert result.after[name].values.tolist() == pytest.approx(after, abs=1e-9)
    assert result.before.loss.values.tolist() != result.after.loss.values.tolist()
    lines = [line.split() for line in result.table().splitlines()]
    assert [line[0] for line in lines] == ["error", "before", "after"]
    assert lines[1][1] == f"{result.before.error.mean():.4f}"
    assert lines[2][1] == f"{result.after.error.mean():.4f}"


def test_fine_tuning_uses_the_fraction_the_seed_and_the_whole_local_solver():
    module, population = randomised(mlp()), clients_of((10, 20))
    local = LocalSGD(learning_rate=0.2, batch_size=None, local_steps=3, penalty=Proximal(0.5), schedule=StepDecay(0.1, 1))
    result = finetune(module, population, local, fraction=0.8, seed=1, **DOUBLE)
    own, held = population.split_examples(within=0.2, seed=1)
    assert own.size.tolist() == [8, 16]
    for k in range(2):
        copied = copy.deepcopy(module)
        x, y = own.client(k)
        for _ in range(3):      # the penalty written into the loss; the schedule stands at its first round
            distance = sum((p - q.detach()).square().sum() for p, q in zip(copied.parameters(), module.parameters(), strict=True))
            copied.zero_grad()
            (nn.functional.cross_entropy(copied(x), y) + 0.25 * distance).backward()
            with torch.no_grad():
                for p in copied.parameters():
                    p -= 0.2 * p.grad
        assert result.after.loss.values[k].item() == pytest.approx(loop(copied, held.select([k]), cross_entropy)[0])
    other = finetune(module, population, replace(local, schedule=Constant()), fraction=0.8, seed=2, **DOUBLE)
    assert other.before.loss.values.tolist() != result.before.loss.values.tolist()      # another split


@dataclass(frozen=True)
class Counting(LocalSGD):
    """Notes how many clients train at once."""

    counts: list[int] = field(default_factory=list)

    def updates(self, clients, model=0, first=None):
        self.counts.append(len(clients))
        return super().updates(clients, model, first)


@pytest.mark.parametrize("module", [SoftmaxRegression(4, 3), mlp()], ids=["closed form", "stacked"])
@pytest.mark.parametrize("settings", [{"epochs": 3, "momentum": 0.5}, {"local_steps": 4}, {}], ids=str)
def test_with_whom_a_client_is_tuned_changes_nothing(module, settings, monkeypatch):
    module, population = randomised(copy.deepcopy(module)), clients_of((6, 30, 9, 5, 17, 2, 8))
    dim, found = sum(p.numel() for p in module.parameters()), []
    for numbers, counts in ((2**25, [7]), (3 * dim, [3, 2, 2]), (1, [1] * 7)):
        monkeypatch.setattr(sys.modules["fedtail.evaluation.finetune"], "AT_ONCE", numbers)      # its package names the function so
        local = Counting(learning_rate=0.3, batch_size=4, **settings)
        found.append(finetune(module, population, local, seed=2, engine=Engine(workers=1, dtype=torch.float64)))
        assert local.counts == counts
    for other in found[1:]:
        for name in ("loss", "error"):
            assert torch.allclose(other.after[name].values, found[0].after[name].values, rtol=1e-12, atol=1e-14)
    alone = finetune(module, population.select([4]), LocalSGD(0.3, batch_size=4, **settings), seed=2, **DOUBLE)
    assert alone.after.loss.values[0].item() == pytest.approx(found[0].after.loss.values[4].item(), rel=1e-12)


def test_no_more_clients_are_tuned_at_once_than_fit(monkeypatch):
    module, population = SoftmaxRegression(4, 3), clients_of((6, 30, 9, 5, 17, 2, 8))
    for bound, numbers in (("ROW_ENTRIES", 4 * 15), ("EXAMPLE_ENTRIES", 4 * 15 * 5)):      # four models; 15 examples of four clients
        with monkeypatch.context() as patch:
            patch.setattr(f"fedtail.engine.blocks.{bound}", numbers)
            local = Counting(learning_rate=0.3)
            finetune(module, population, local, engine=Engine(workers=1))
            assert local.counts == [4, 3]


def test_fine_tuning_leaves_the_model_and_torchs_random_state_alone():
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    before, state = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    population = clients_of((6, 2, 9))
    first = finetune(module, population, LocalSGD(0.3, batch_size=2))
    again = finetune(module, population, LocalSGD(0.3, batch_size=2))
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.after.loss.values.tolist() == again.after.loss.values.tolist()


# The choice within a family

def family_of(modules, error=misclassification) -> Trained:
    """A trained family whose members are these modules, without any training."""
    task = Task(modules[0], error=error)
    members = Family(tuple(fedavg(1) for _ in modules))
    return Trained(members, task, tuple(State(task.params(m)) for m in modules))


def several(count=3, features=4, classes=3) -> list[nn.Module]:
    return [randomised(SoftmaxRegression(features, classes), seed) for seed in range(count)]


@pytest.mark.parametrize("error", [misclassification, cross_entropy], ids=["error", "of one's own"])
def test_choose_is_the_least_error_on_the_clients_own_examples(error):
    models, population = several(4), clients_of((9, 15, 7))
    for k in range(3):
        x, y = population.client(k)
        errors = [loop(m, population.select([k]), error)[0] for m in models]
        choice = choose(models, (x, y), Task(models[0], error=error))
        assert choice.errors == pytest.approx(tuple(errors))
        assert choice.index == int(np.argmin(errors))
        assert choice.module is models[choice.index]


def test_choose_works_without_a_task_for_any_module_and_plain_lists():
    models = [randomised(mlp(), seed) for seed in range(3)]
    x, y = clients_of((12,)).client(0)
    errors = [float(wrong(m(x).detach(), y).mean()) for m in models]
    assert choose(models, (x.numpy(), y.tolist())).errors == pytest.approx(errors)


def test_halves_are_split_with_seed_zero_unless_told_otherwise():
    module, population, local = randomised(SoftmaxRegression(4, 3)), clients_of((6, 12, 9)), LocalSGD(0.3, batch_size=2)
    plain, told = finetune(module, population, local, **DOUBLE), finetune(module, population, local, fraction=0.5, seed=0, **DOUBLE)
    for a, b in ((plain.before, told.before), (plain.after, told.after)):
        assert a.loss.values.tolist() == b.loss.values.tolist()
    lines = [line.split() for line in plain.table().splitlines()]
    assert lines[0] == ["error", "mean", "std", "p50", "worst", "client", "best", "client"]
    for line, evaluation in zip(lines[1:], (plain.before, plain.after), strict=True):
        error = evaluation.error
        assert line[1:] == [f"{value:.4f}" for value in (error.mean(), error.std(), error.percentile(50), *error.values.aminmax()[::-1])]
    plain, told = evaluate_family(family_of(several(3)), population), evaluate_family(family_of(several(3)), population, 0.5, 0)
    assert [d.values.tolist() for d in plain.members] == [d.values.tolist() for d in told.members]
    assert plain.choice.tolist() == told.choice.tolist()
    last = plain.table().splitlines()[-1]
    assert last.split()[-3:] == [f"{value:.4f}" for value in (plain.chosen.percentile(50), *plain.chosen.values.aminmax()[::-1])]


def test_a_family_is_refused_labels_it_has_no_output_for_and_names_that_are_too_many_or_too_few():
    population = clients_of((6, 12), classes=5)
    with pytest.raises(ValueError, match="targets hold labels 0 to 4, but SoftmaxRegression has 3 outputs"):
        evaluate_family(family_of(several(2)), population)
    with pytest.raises(ValueError, match="targets hold labels 0 to 4, but SoftmaxRegression has 3 outputs"):
        choose(several(2), population.client(1))
    with pytest.raises(ValueError, match="targets hold labels 0 to 4, but SoftmaxRegression has 3 outputs"):
        finetune(several(1)[0], population, LocalSGD(0.1))
    for names in (("a",), ("a", "b", "c")):
        with pytest.raises(ValueError, match=re.escape(f"names has {len(names)} entries for a family of 2 models. Give one for each, or none.")):
            evaluate_family(family_of(several(2)), clients_of((6, 12)), names=names)


def test_ties_go_to_the_first():
    a, b, c = several(3)
    x, y = clients_of((1,)).client(0)
    errors = choose([a, b, c], (x, y)).errors
    for order in ([a, a, b], [b, b, a, a], [c, c, c]):
        choice = choose(order, (x, y))
        assert choice.index == choice.errors.index(min(choice.errors))
    assert all(e in (0.0, 1.0) for e in errors)


def test_choose_refuses_an_empty_family():
    with pytest.raises(ValueError, match=re.escape("choose needs at least one model.")):
        choose([], ([[0.0]], [0]))


def broken() -> nn.Module:
    """A model that has diverged."""
    model = LeastSquares(2).double()
    nn.init.constant_(model.linear.weight, math.nan)
    return model


@pytest.mark.parametrize("place", [0, 1])
def test_nobody_chooses_a_model_that_has_diverged(place):
    models = [randomised(LeastSquares(2))]
    models.insert(place, broken())
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 2)), draw.normal(size=8)
    assert choose(models, (x, y)).index == 1 - place
    population = Population.from_arrays(x, y, [0] * 4 + [1] * 4)
    assert evaluate_family(family_of(models, squared_error), population).choice.tolist() == [1 - place] * 2


@pytest.mark.parametrize("error", [misclassification, half_wrong, cross_entropy], ids=lambda f: f.__name__)
def test_evaluate_family_is_a_loop_over_clients(error):
    models, population = several(3), clients_of((20, 4, 9, 14, 3, 30))
    result = evaluate_family(family_of(models, error), population, fraction=0.4, seed=5, names=("a", "b", "c"))
    own, held = population.split_examples(within=0.6, seed=5)
    by_own = np.array([loop(m, own, error) for m in models])
    by_held = np.array([loop(m, held, error) for m in models])
    choice = [min(range(3), key=lambda j, k=k: (by_own[j, k], j)) for k in range(6)]      # ties to the first
    assert result.choice.tolist() == choice
    assert [d.values.tolist() for d in result.members] == [pytest.approx(row.tolist()) for row in by_held]
    assert result.chosen.values.tolist() == pytest.approx([by_held[j, k] for k, j in enumerate(choice)])
    assert result.counts() == {name: choice.count(j) for j, name in enumerate("abc")}
    lines = result.table().splitlines()
    assert lines[0].split() == ["error", "mean", "p50", "worst", "client", "best", "client"]
    assert [line.rsplit(maxsplit=4)[0] for line in lines[1:]] == [
        *(f"{name} (picked by {choice.count(j)})" for j, name in enumerate("abc")), "each client's own pick"]
    assert lines[-1].split()[-4] == f"{result.chosen.mean():.4f}"


def test_the_choice_never_looks_at_the_judged_half():
    models, population = several(3), clients_of((20, 4, 9, 14, 3, 30))
    marked = replace(population, targets=torch.arange(population.num_examples))      # where each example goes
    judged = marked.split_examples(within=0.5, seed=0)[1].targets
    targets = population.targets.clone()
    targets[judged] = (targets[judged] + 1) % 3      # every judged label is another one
    before = evaluate_family(family_of(models), population)
    after = evaluate_family(family_of(models), replace(population, targets=targets))
    assert after.choice.tolist() == before.choice.tolist()
    assert after.chosen.values.tolist() != before.chosen.values.tolist()
    own = replace(population, targets=(population.targets + 1) % 3)      # and it does look at the other
    assert evaluate_family(family_of(models), own).choice.tolist() != before.choice.tolist()


def test_equal_members_tie_to_the_first_and_names_default_to_numbers():
    model = several(1)[0]
    result = evaluate_family(family_of([model, model, model]), clients_of((4, 6)))
    assert result.choice.tolist() == [0, 0]
    assert result.counts() == {"model 0": 2, "model 1": 0, "model 2": 0}


def test_a_trained_family_is_evaluated_by_the_models_it_hands_out():
    population = clients_of((8, 12, 10), seed=9)
    family = Family((fedavg(2, learning_rate=0.5), delta_fl(0.5, 2, learning_rate=0.5)))
    trained = train(family, Task(SoftmaxRegression(4, 3)), population, rounds=5)
    result, held = evaluate_family(trained, population), population.split_examples()[1]
    for member, module in zip(result.members, trained.modules, strict=True):
        assert member.values.tolist() == pytest.approx(loop(module.double(), held, wrong))
    with pytest.raises(ValueError, match=r"a family of 2 models was trained. Use .modules, and fedtail.choose to pick one."):
        evaluate(trained, population)


def test_angle_and_divergence_leave_out_who_has_no_mass():
    some, nobody = Distribution(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0, 0.0])
    for absent in (3.0, math.nan, math.inf):
        found = Distribution(torch.tensor([1.0, 2.0, absent]), mass=nobody)
        assert (found.angle(), found.kl_to_uniform()) == (some.angle(), some.kl_to_uniform())


def test_a_table_needs_no_loss():
    """After a federated evaluation without a bound on the loss there is none."""
    found = Evaluation({"error": Distribution(torch.tensor([0.1, 0.3]).double())})
    assert found.table().startswith("2 clients")
