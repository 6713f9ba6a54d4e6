"""Robust aggregation: against definitions by brute force, published breakdown points, and rows that no honest client sends."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

import fedtail
from fedtail import (
    Binned,
    ClippedMean,
    CoordinateMedian,
    Everyone,
    GaussianNoise,
    GeometricMedian,
    GeometricMedianOfRows,
    IntegerChannel,
    Krum,
    LocalSGD,
    LossFilter,
    MinimumNormDirection,
    MultiKrum,
    NoisyHistogram,
    NormFilter,
    Refreshed,
    SecureChannel,
    Superquantile,
    TrimmedMean,
    train,
)
from fedtail.aggregation.gathered import Contributions, num_corrupted, shares_of_lowest
from fedtail.algorithm import RoundLostWarning
from fedtail.channel.base import RoundLost, RowsLeftOutWarning
from fedtail.engine import LocalFleet, blocks, workers
from fedtail.errors import FieldError
from fedtail.models import SoftmaxRegression
from fedtail.rows import folder
from fedtail.update_memo import UpdateMemo

from cases import small_population
from remote_cases import Sites, params_of

PEOPLE = small_population(12)
LOCAL = {"learning_rate": 0.3, "batch_size": None, "local_steps": 3}
BY_ROWS = [CoordinateMedian(), TrimmedMean(0.2), Krum(0.2), MultiKrum(0.2), ClippedMean(), ClippedMean(1.5), NormFilter(0.2), LossFilter(0.2), GeometricMedianOfRows(),
           MinimumNormDirection(0.05), MinimumNormDirection()]


def task(dtype=torch.float64):
    """A softmax regression away from zero, where the losses of clients differ."""
    module = SoftmaxRegression(5, 3).to(dtype)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return fedtail.Task(module)


TASK = task()


def given_rows(clients=11, dim=7, seed=0, whole=True):
    random = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 5, (clients,), generator=random).double() if whole else torch.rand(clients, generator=random, dtype=torch.float64) + 0.1
    return Contributions(torch.randn(clients, dim, generator=random, dtype=torch.float64), weights, torch.randn(clients, generator=random, dtype=torch.float64))


def repeated(rows: Contributions) -> Contributions:
    """Every client as often as its weight says, each of weight one."""
    times = rows.weights.long()
    return Contributions(rows.updates.repeat_interleave(times, 0), torch.ones(int(times.sum()), dtype=torch.float64), rows.losses.repeat_interleave(times))


# Definitions, by brute force

def brute_krum(updates, corrupted, kept):
    """Of a list of vectors, those of lowest score, one loop after the other."""
    scores = []
    for k, one in enumerate(updates):
        distances = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(updates) if j != k)
        scores.append(sum(distances[: len(updates) - corrupted - 2]))
    return sorted(range(len(updates)), key=lambda k: scores[k])[:kept]


def mean_of(rows, chosen):
    weights = rows.weights.numpy()[chosen]
    return (weights[:, None] * rows.updates.numpy()[chosen]).sum(0) / weights.sum()


@pytest.mark.parametrize("seed", range(5))
def test_rules_over_rows_follow_their_definitions(seed):
    rows = given_rows(seed=seed)
    updates, weights, clients = rows.updates.numpy(), rows.weights.numpy(), 11
    each = repeated(rows).updates.numpy()
    norms, found = np.linalg.norm(updates, axis=1), {repr(rule): rule.combine(rows).numpy() for rule in BY_ROWS}
    assert found["CoordinateMedian(update_bound=1024.0)"] == approx(np.median(each, 0))
    assert found[repr(Krum(0.2))] == approx(updates[brute_krum(updates, 2, 1)[0]])
    assert found[repr(MultiKrum(0.2))] == approx(mean_of(rows, brute_krum(updates, 2, 9)))
    middle = np.median(np.linalg.norm(each, axis=1))
    for limit, rule in ((middle, ClippedMean()), (1.5, ClippedMean(1.5))):
        shortened = [one * min(1.0, limit / norm) for one, norm in zip(updates, norms, strict=True)]
        assert found[repr(rule)] == approx(np.average(shortened, axis=0, weights=weights))
    assert found[repr(NormFilter(0.2))] == approx(mean_of(rows, sorted(range(clients), key=lambda k: norms[k])[:9]))
    third = sorted(range(clients), key=lambda k: -float(rows.losses[k]))[2]
    assert found[repr(LossFilter(0.2))] == approx(updates[third])


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_a_trimmed_mean_of_equal_clients_is_the_mean_without_the_ends(cut):
    updates = given_rows(12).updates
    ranked = np.sort(updates.numpy(), 0)
    found = TrimmedMean(cut / 12).combine(Contributions(updates, torch.full((12,), 3.0, dtype=torch.float64), None))
    assert found.numpy() == approx(ranked[cut: 12 - cut].mean(0))


@given(st.floats(0, 0.49), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_a_trimmed_mean_is_the_integral_of_the_quantile_function_between_both_ends(fraction, seed):
    """By a fine grid of the distribution function: the boundary counts by its share."""
    rows = given_rows(6, 1, seed, whole=False)
    order = rows.updates[:, 0].argsort()
    heaped = (rows.weights[order].cumsum(0) / rows.weights.sum()).numpy()
    levels = fraction + (1 - 2 * fraction) * (np.arange(200_000) + 0.5) / 200_000
    ranked = rows.updates[order, 0].numpy()
    assert float(TrimmedMean(fraction).combine(rows)) == approx(ranked[np.searchsorted(heaped, levels).clip(max=5)].mean(), abs=1e-4)


@pytest.mark.parametrize("rule", [CoordinateMedian(), TrimmedMean(0.17), ClippedMean(), GeometricMedianOfRows(), MinimumNormDirection(0.0)], ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_weight_is_so_many_equal_clients(rule, seed):
    rows = given_rows(seed=seed)
    assert rule.combine(rows).numpy() == approx(rule.combine(repeated(rows)).numpy(), abs=1e-7)


def test_two_values_in_the_middle_of_the_weight_are_averaged_whatever_its_rounding():
    updates = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    for weights in ([1, 1, 2], [0.1, 0.2, 0.3]):                      # 0.1 + 0.2 is not 0.3 in floats
        found = CoordinateMedian().combine(Contributions(updates, torch.tensor(weights, dtype=torch.float32).double(), None))
        assert found.tolist() == [3.0]


@pytest.mark.parametrize("rule", BY_ROWS, ids=repr)
@pytest.mark.parametrize("whole", [True, False])
def test_the_order_of_clients_changes_nothing(rule, whole):
    rows = given_rows(whole=whole)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    mixed = Contributions(rows.updates[order], rows.weights[order], rows.losses[order])
    assert rule.combine(mixed).numpy() == approx(rule.combine(rows).numpy(), abs=1e-9)


@pytest.mark.parametrize("rule", [NormFilter(0.25), LossFilter(0.25), Krum(0.25), MultiKrum(0.25)], ids=repr)
def test_clients_that_are_tied_are_treated_alike(rule):
    """Corners of a square have equal norms, losses and scores: the result is its middle, whoever comes first."""
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    rows = Contributions(torch.cat([corners, corners]), torch.ones(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
    assert rule.combine(rows).tolist() == approx([0.0, 0.0])


@pytest.mark.parametrize("rule", BY_ROWS, ids=repr)
def test_single_precision_gives_the_same_to_its_rounding_even_beside_a_far_row(rule):
    rows = given_rows(clients=12, dim=300)
    rows.updates[3] *= 500
    single = Contributions(rows.updates.float(), rows.weights, rows.losses)
    exact = rule.combine(Contributions(single.updates.double(), rows.weights, rows.losses))
    assert rule.combine(single).double().numpy() == approx(exact.numpy(), abs=2e-6)


def test_of_a_number_of_clients_a_fraction_is_rounded_down_and_not_by_the_rounding_of_floats():
    for clients in range(1, 200):
        for percent in range(50):
            assert num_corrupted(percent / 100, clients) == percent * clients // 100


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.data())
@settings(max_examples=50, deadline=None)
def test_shares_of_the_lowest_are_a_mean_over_all_orders_of_the_tied(scores, data):
    count = data.draw(st.integers(1, len(scores)))
    shares, total = shares_of_lowest(torch.tensor(scores, dtype=torch.float64), count), np.zeros(len(scores))
    random = np.random.default_rng(0)
    for _ in range(2000):
        order = random.permutation(len(scores))
        total[order[np.argsort(np.array(scores)[order], kind="stable")][:count]] += 1 / 2000
    assert shares.numpy() == approx(total, abs=0.08)                  # seven standard deviations
    assert float(shares.sum()) == approx(count)


# Solvers

@pytest.mark.parametrize("deviation", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(("clients", "dim"), [(11, 7), (11, 30), (3, 40)])
def test_the_shortest_direction_solves_its_quadratic_program(deviation, clients, dim):
    rows = given_rows(clients, dim)
    unit, shares = (rows.updates / rows.updates.norm(dim=1, keepdim=True)).numpy(), (rows.weights / rows.weights.sum()).numpy()
    x = cvxpy.Variable(clients)
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(unit.T @ x)), [x >= 0, cvxpy.sum(x) == 1, cvxpy.abs(x - shares) <= deviation])
    program.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    found = MinimumNormDirection(deviation).combine(rows)
    assert found.numpy() == approx(x.value @ unit, abs=2e-6)
    assert float(found @ found) <= program.value + 1e-9
    assert found.numpy() == approx(MinimumNormDirection(deviation).combine(rows._replace(updates=rows.updates * torch.logspace(-3, 3, clients)[:, None])).numpy(), abs=1e-7)


def test_the_shortest_direction_goes_against_nobody_and_leaves_out_updates_of_norm_zero():
    rows = given_rows(6, 40)
    found = MinimumNormDirection().combine(rows)
    assert bool((rows.updates @ found >= -1e-9).all())
    more = Contributions(torch.cat([rows.updates, torch.zeros(2, 40, dtype=torch.float64)]), torch.cat([rows.weights, torch.ones(2, dtype=torch.float64)]), None)
    assert MinimumNormDirection().combine(more).numpy() == approx(found.numpy(), abs=1e-9)
    assert MinimumNormDirection().combine(more._replace(updates=more.updates * 0)).tolist() == [0.0] * 40


@pytest.mark.parametrize("seed", range(4))
def test_the_forces_on_a_geometric_median_cancel(seed):
    rows = given_rows(dim=30, seed=seed)
    towards = rows.updates - GeometricMedianOfRows().combine(rows)
    pull = (rows.weights[:, None] * towards / towards.norm(dim=1, keepdim=True)).sum(0)
    assert float(pull.norm()) < 1e-4 * float(rows.weights.sum())


def test_the_geometric_median_of_a_heavy_client_is_its_update():
    """It holds more than half of the weight, so that the others cannot pull it away."""
    rows = given_rows()
    rows.weights[4] = 2 * rows.weights.sum()
    assert GeometricMedianOfRows(1e-9).combine(rows).numpy() == approx(rows.updates[4].numpy(), abs=1e-6)


# Breakdown points: up to the tolerated weight the result stays where it is promised, one client more breaks it

FAR = 900.0


def corrupted_rows(honest, bad, dim=4, seed=0, spread=0.0):
    """Honest updates in a ball of radius one around a point, and `bad` equal (or spread) ones far away."""
    random = torch.Generator().manual_seed(seed)
    ball = torch.randn(honest, dim, generator=random, dtype=torch.float64)
    ball = 3.0 + ball / ball.norm(dim=1, keepdim=True) * torch.rand(honest, 1, generator=random, dtype=torch.float64)
    far = torch.full((bad, dim), FAR, dtype=torch.float64) + spread * torch.randn(bad, dim, generator=random, dtype=torch.float64)
    return Contributions(torch.cat([far, ball]), torch.ones(honest + bad, dtype=torch.float64), torch.cat([torch.full((bad,), 9.0), torch.zeros(honest)]).double())


@pytest.mark.parametrize("spread", [0.0, 20.0])
@pytest.mark.parametrize(("rule", "clients", "tolerated"), [(CoordinateMedian(), 11, 5), (CoordinateMedian(), 10, 4), (TrimmedMean(0.2), 10, 2), (TrimmedMean(0.45), 20, 9)], ids=repr)
def test_coordinates_stay_in_the_box_of_the_honest_up_to_the_breakdown_point(rule, clients, tolerated, spread):
    for bad in range(1, tolerated + 1):
        rows = corrupted_rows(clients - bad, bad, spread=spread)
        found, honest = rule.combine(rows), rows.updates[bad:]
        assert bool(((honest.amin(0) - 1e-12 <= found) & (found <= honest.amax(0) + 1e-12)).all())
    found = rule.combine(corrupted_rows(clients - tolerated - 1, tolerated + 1))
    assert bool((found > 10).all())


@pytest.mark.parametrize("rule", [CoordinateMedian(), GeometricMedianOfRows()], ids=repr)
def test_what_breaks_is_weight_not_number(rule):
    rows = corrupted_rows(3, 8)
    heavy = rows._replace(weights=torch.cat([torch.ones(8), torch.full((3,), 3.0)]).double())       # 8 against 9
    assert float((rule.combine(heavy) - 3).abs().max()) < 20
    assert float(rule.combine(heavy._replace(weights=torch.cat([torch.ones(8), torch.full((3,), 2.5)]).double())).min()) > 100


@pytest.mark.parametrize(("clients", "bad"), [(11, 1), (11, 3), (11, 5), (40, 19)])
@pytest.mark.parametrize("spread", [0.0, 20.0])
def test_a_geometric_median_stays_in_its_ball_up_to_half(clients, bad, spread):
    rows = corrupted_rows(clients - bad, bad, spread=spread)
    share = bad / clients
    centre = torch.full((4,), 3.0, dtype=torch.float64)
    assert float((GeometricMedianOfRows().combine(rows) - centre).norm()) <= 2 * (1 - share) / (1 - 2 * share)
    broken = corrupted_rows(clients // 2, clients - clients // 2 + 1)
    assert float((GeometricMedianOfRows().combine(broken) - centre).norm()) > 100


@pytest.mark.parametrize("rule", [Krum, MultiKrum])
@pytest.mark.parametrize(("clients", "bad"), [(7, 2), (11, 4), (15, 3)])
def test_krum_stays_in_its_ball_for_as_many_as_it_is_told(rule, clients, bad):
    centre, radius = torch.full((4,), 3.0, dtype=torch.float64), 1 + 2 * math.sqrt((clients - bad - 2) / (clients - 2 * bad - 1))
    for spread, shift in ((0.0, FAR), (20.0, FAR), (0.1, 1.0), (0.0, 3.0)):
        rows = corrupted_rows(clients - bad, bad, spread=spread)
        rows.updates[:bad] += shift - FAR
        assert float((rule(bad / clients).combine(rows) - centre).norm()) <= radius
    # n = 2f + 3 and f + 2 colluders: they are each other's n - f - 2 nearest, with score zero
    broken = corrupted_rows(3, 4)
    assert float((Krum(2 / 7).combine(broken) - 3).norm()) > 100


def test_multi_krum_leaves_out_far_rows_of_exactly_as_many_as_it_is_told():
    rows = corrupted_rows(8, 2)
    assert MultiKrum(0.2).combine(rows).numpy() == approx(mean_of(rows, list(range(2, 10))))
    assert float(MultiKrum(0.1).combine(rows).max()) > 50             # one was not expected


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_norm_rules_hold_norms_up_to_their_number_and_no_further(bad):
    rows = corrupted_rows(10 - bad, bad)
    longest = float(rows.updates[bad:].norm(dim=1).max())
    assert float(NormFilter(0.3).combine(rows).norm()) <= longest
    assert float(NormFilter(0.3).combine(corrupted_rows(6, 4)).norm()) > 100
    assert float(ClippedMean().combine(rows).norm()) <= longest + 1e-12
    assert float(ClippedMean(2.0).combine(corrupted_rows(1, 9)).norm()) <= 2.0 + 1e-12
    assert float(ClippedMean().combine(corrupted_rows(4, 6)).norm()) > 100


def test_a_loss_filter_skips_the_suspects_and_one_more_is_taken():
    rows = corrupted_rows(7, 3)
    assert float((LossFilter(0.3).combine(rows) - 3).norm()) <= 1
    assert float(LossFilter(0.2).combine(rows).min()) == FAR


@pytest.mark.parametrize("deviation", [0.05, 1.0])
def test_a_direction_of_minimum_norm_is_as_short_as_a_corrupted_client_wants(deviation):
    """No breakdown point above zero: one client that points against the others makes the step short."""
    rows = corrupted_rows(9, 1)
    against = rows._replace(updates=torch.cat([-rows.updates[1:].mean(0, keepdim=True), rows.updates[1:]]))
    honest = float(MinimumNormDirection(deviation).combine(rows._replace(updates=rows.updates[1:], weights=rows.weights[1:])).norm())
    assert honest > 0.9
    assert float(MinimumNormDirection(deviation).combine(against).norm()) < (0.1 if deviation == 1.0 else honest - 0.1)


# What has no meaning is refused

@pytest.mark.parametrize(("make", "text"), [
    (lambda: TrimmedMean(0.5), "trimmed_fraction must be at least 0 and below 0.5, got 0.5. It is left out at either end: half would leave nothing. Use CoordinateMedian."),
    (lambda: TrimmedMean(-0.1), "trimmed_fraction must be at least 0 and below 0.5, got -0.1."),
    (lambda: Krum(0.5), "corrupted_fraction must be at least 0 and below 0.5, got 0.5. Krum needs 2f + 3 clients, f of them corrupted, so that fewer than half may be."),
    (lambda: MultiKrum(-0.1), "corrupted_fraction must be at least 0 and below 0.5, got -0.1."),
    (lambda: NormFilter(1.0), "corrupted_fraction must be at least 0 and below 1, got 1."),
    (lambda: LossFilter(2), "corrupted_fraction must be at least 0 and below 1, got 2."),
    (lambda: ClippedMean(0.0), "clip_norm must be positive, got 0. Leave it out for the median of the norms."),
    (lambda: MinimumNormDirection(1.5), "max_deviation must be in [0, 1], got 1.5."),
    (lambda: GeometricMedian(0), "steps must be at least 1, got 0. Without a step it is WeightedMean."),
    (lambda: GeometricMedian(smoothing=0.0), "smoothing must be positive, got 0."),
    (lambda: GeometricMedianOfRows(-1.0), "smoothing must be positive, got -1."),
    (lambda: CoordinateMedian(update_bound=0.0), "update_bound must be positive, got 0."),
    (lambda: GeometricMedian(update_bound=-1.0), "update_bound must be positive, got -1."),
])
def test_settings_without_meaning_are_refused_in_words(make, text):
    with pytest.raises(FieldError) as said:
        make()
    assert str(said.value).startswith(text)


def test_krum_says_how_few_can_have_a_result():
    for percent in range(50):
        fewest = Krum(percent / 100).declares.fewest_rows
        assert [n for n in range(1, fewest + 1) if n >= 2 * (percent * n // 100) + 3] == [fewest]


@pytest.mark.parametrize("rule", [Krum, MultiKrum])
def test_too_few_rows_for_krum_lose_the_round_in_words(rule):
    with pytest.raises(RoundLost, match=f"8 clients contributed, and {rule.__name__} needs 2f \\+ 3 = 9 where f = 3 may be corrupted"):
        rule(0.4).combine(given_rows(8))


def test_a_round_with_too_few_contributors_is_lost_and_the_model_stays():
    method = replace(fedtail.fedavg(8, **LOCAL), aggregate=Krum(0.4))
    with pytest.warns(RoundLostWarning, match="round 0 is lost, and the model stays as it was: 8 clients contributed, and Krum needs"):
        trained = train(method, TASK, PEOPLE, rounds=1)
    assert torch.equal(trained.state.params, TASK.params())


def test_too_small_a_tail_for_krum_is_refused_beforehand():
    with pytest.raises(ValueError, match=r"MultiKrum needs the updates of 3 clients or more, and about 2\.4 of 12 contribute to a round under Superquantile\. Draw more"):
        train(replace(fedtail.delta_fl(0.2, 12, **LOCAL), aggregate=MultiKrum(0.2)), TASK, PEOPLE, rounds=1)


@pytest.mark.parametrize("rule", BY_ROWS, ids=repr)
@pytest.mark.parametrize("channel", [IntegerChannel(), SecureChannel(3, minimum_contributors=3)], ids=["integers", "secure"])
def test_rules_over_rows_are_refused_where_only_sums_are_seen_and_under_a_privacy_budget(rule, channel):
    method = replace(fedtail.fedavg(12, **LOCAL), aggregate=rule)
    with pytest.raises(ValueError, match=r"looks at single rows, but .* reveals only sums\. Use an aggregator that needs only sums"):
        train(method, TASK, PEOPLE, rounds=1, channel=channel)
    with pytest.raises(ValueError, match=r"single rows of the updates, by .* would be released without noise"):
        train(method, TASK, PEOPLE, rounds=1, privacy=fedtail.PrivacyBudget(epsilon=1.0, delta=1e-5))


# In training

def updates_of(task, people, steps=3, rate=0.3):
    """Updates and losses of all clients at the start, by autograd, one client after the other."""
    start, updates, losses = task.params(), [], []
    for k in range(len(people)):
        x, y = people.client(k)
        at = start.clone()
        for step in range(steps):
            at.requires_grad_(True)
            loss = torch.nn.functional.cross_entropy(torch.func.functional_call(task.module, _named(task, at), (x.double(),)), y)
            losses += [loss.detach()] if step == 0 else []
            at = (at - rate * torch.autograd.grad(loss, at)[0]).detach()
        updates.append(at - start)
    return torch.stack(updates), torch.stack(losses).float().double()


def _named(task, flat):
    names, sizes = zip(*((name, p.shape) for name, p in task.module.named_parameters()), strict=True)
    parts = flat.split([size.numel() for size in sizes])
    return {name: part.view(size) for name, part, size in zip(names, parts, sizes, strict=True)}


UPDATES, LOSSES = updates_of(TASK, PEOPLE)


@pytest.mark.parametrize("rule", BY_ROWS, ids=repr)
def test_a_round_combines_the_updates_of_the_cohort_here_and_on_nodes(rule):
    want = rule.combine(Contributions(UPDATES, PEOPLE.mass.float().double(), LOSSES))
    for fleet in (LocalFleet(PEOPLE, TASK, workers=1), Sites(3, PEOPLE, TASK).fleet(forgets=False)):
        trained = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=rule), TASK, fleet=fleet, rounds=1)
        assert (trained.state.params - TASK.params()).numpy() == approx(want.numpy(), abs=1e-10)


@pytest.mark.parametrize("risk", [Superquantile(0.6), Refreshed(Superquantile(0.6), 2)], ids=repr)
@pytest.mark.parametrize("rule", [MultiKrum(0.2), LossFilter(0.3), TrimmedMean(0.1)], ids=repr)
def test_on_a_tail_the_corrupted_are_a_fraction_of_those_who_contribute(risk, rule):
    """Weights by hand: the largest losses with 0.6 of the mass, the last of them in part."""
    order, left, weights = LOSSES.argsort(descending=True), 0.6 * float(PEOPLE.mass.sum()), torch.zeros(12, dtype=torch.float64)
    for k in order.tolist():
        weights[k] = min(float(PEOPLE.mass[k]), max(left, 0.0))
        left -= float(PEOPLE.mass[k])
    tail = weights > 0
    want = rule.combine(Contributions(UPDATES[tail], weights[tail], LOSSES[tail]))
    trained = train(replace(fedtail.fedavg(12, **LOCAL), risk=risk, aggregate=rule), TASK, PEOPLE, rounds=1)
    assert (trained.state.params - TASK.params()).numpy() == approx(want.numpy(), abs=1e-6)


def test_a_noisy_tail_composes_with_rules_over_rows():
    histogram = NoisyHistogram(4.0, 12.0, GaussianNoise(0.01), bins=8)
    method = replace(fedtail.fedavg(12, **LOCAL), sample=Everyone(), risk=Binned(Superquantile(0.6), histogram), aggregate=MultiKrum(0.1))
    people = replace(PEOPLE, mass=torch.ones(12, dtype=torch.float64))
    assert float((train(method, TASK, people, rounds=2).state.params - TASK.params()).norm()) > 1e-3


@pytest.mark.parametrize("rule", BY_ROWS[:4], ids=repr)
def test_the_number_of_workers_changes_no_bit_of_gathered_rows(rule, monkeypatch):
    for module, name, value in ((blocks, "GRAIN", 64), (blocks, "TOGETHER", 1), (workers, "WORTH_STARTING", 0.0), (workers, "WORTH_SHARING", 0.0)):
        monkeypatch.setattr(module, name, value)
    single, found = task(torch.float32), []
    for count in (1, 3):
        with LocalFleet(PEOPLE, single, workers=count) as fleet:
            found.append(params_of(train(replace(fedtail.delta_fl(0.7, 12, **LOCAL), aggregate=rule), single, fleet=fleet, rounds=3)))
            assert (fleet._team.pool is not None) == (count > 1)
    assert torch.equal(*found)


class Recording(LocalFleet):
    """A fleet that remembers the dtype of what it sent."""

    def collect(self, questions, encoding):
        found = super().collect(questions, encoding)
        self.dtypes = [(one.gather, answer.dtype) for one, answer in zip(questions, found, strict=True)]
        return found


def test_gathered_rows_stay_in_the_precision_of_the_model():
    for dtype in (torch.float32, torch.float64):
        fleet = Recording(PEOPLE, task(dtype), workers=1)
        train(replace(fedtail.fedavg(12, **LOCAL), aggregate=CoordinateMedian()), task(dtype), fleet=fleet, rounds=1)
        assert fleet.dtypes == [(True, dtype)]


# Rows that no honest client sends

class Tampered(LocalFleet):
    """A fleet in which one client sends what it likes, past its own checks."""

    def __init__(self, change):
        super().__init__(PEOPLE, TASK, workers=1)
        self.change = change

    def collect(self, questions, encoding):
        return [self.change(answer.clone()) if question.trains else answer for question, answer in zip(questions, super().collect(questions, encoding), strict=True)]


def put(entry, value):
    def change(rows):
        rows[4, entry] = value
        return rows
    return change


@pytest.mark.parametrize("change", [put(7, float("nan")), put(7, float("inf")), put(slice(None), -float("inf")), put(7, 1e30), put(7, -1025.0), put(0, 1e9), put(0, float("nan")),
                                    put(0, -1.0)], ids=["nan", "inf", "all", "huge", "beyond", "heavy", "no weight", "negative"])
@pytest.mark.parametrize("rule", BY_ROWS, ids=repr)
def test_rows_that_are_not_finite_or_beyond_their_bound_are_left_out_by_the_server(rule, change):
    others = torch.arange(12) != 4
    want = rule.combine(Contributions(UPDATES[others], PEOPLE.mass[others], LOSSES[others]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=rule), TASK, fleet=Tampered(change), rounds=1)
    assert (trained.state.params - TASK.params()).numpy() == approx(want.numpy(), abs=1e-9)
    texts = [str(one.message) for one in said if one.category is RowsLeftOutWarning]
    lost = f"1 of 12 rows for {type(rule).__name__} are not finite or beyond their bound, and are left out."
    silent = change(torch.zeros(5, 20))[4, 0] == -1                   # who says that it has no weight is taken at its word
    assert [text.startswith(lost) for text in texts] == ([] if silent else [True])


@pytest.mark.parametrize("change", [lambda rows: rows[:, :-1], lambda rows: rows[0], lambda rows: rows[None]], ids=["narrow", "flat", "deep"])
def test_rows_of_another_shape_lose_the_round(change):
    with pytest.warns(RoundLostWarning, match="rows of shape .* came for CoordinateMedian, and each must have 19 numbers"):
        trained = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=CoordinateMedian()), TASK, fleet=Tampered(change), rounds=1)
    assert torch.equal(trained.state.params, TASK.params())


@pytest.mark.parametrize("rule", [fedtail.WeightedMean(), GeometricMedian()], ids=repr)
def test_a_sum_of_updates_that_is_not_finite_loses_the_round(rule):
    def change(sums):
        sums[2] = float("nan")
        return sums
    with pytest.warns(RoundLostWarning, match=f"the sum that {type(rule).__name__} asked for is not finite"):
        trained = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=rule), TASK, fleet=Tampered(change), rounds=1)
    assert torch.equal(trained.state.params, TASK.params())


# The geometric median over sums

def weiszfeld(updates, mass, steps=8, smoothing=1e-4):
    centre = (mass[:, None] * updates).sum(0) / mass.sum()
    for _ in range(steps):
        pull = mass / (updates - centre).norm(dim=1).clamp(min=smoothing)
        centre = (pull[:, None] * updates).sum(0) / pull.sum()
    return centre


@pytest.mark.parametrize(("channel", "tolerance"), [(fedtail.PlainChannel(), 1e-10), (IntegerChannel(), 1e-6), (SecureChannel(3, minimum_contributors=3), 1e-6)], ids=repr)
@pytest.mark.parametrize("place", ["here", "nodes"])
def test_steps_over_sums_are_those_of_weiszfeld(channel, tolerance, place):
    fleet = LocalFleet(PEOPLE, TASK, workers=1) if place == "here" else Sites(4, PEOPLE, TASK).fleet(forgets=False)
    trained = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=GeometricMedian()), TASK, fleet=fleet, rounds=1, channel=channel)
    assert (trained.state.params - TASK.params()).numpy() == approx(weiszfeld(UPDATES, PEOPLE.mass).numpy(), abs=tolerance)


def test_both_ways_lead_to_one_median():
    many = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=GeometricMedian(300, 1e-6)), TASK, PEOPLE, rounds=1)
    rows = train(replace(fedtail.fedavg(12, **LOCAL), aggregate=GeometricMedianOfRows()), TASK, PEOPLE, rounds=1)
    assert torch.allclose(many.state.params, rows.state.params, atol=1e-4)


COUNTS: list[int] = []


@dataclass(frozen=True)
class Counting(LocalSGD):
    """Says how many clients it has trained."""

    def updates(self, clients, model, first=None):
        COUNTS.append(len(clients))
        return super().updates(clients, model, first)


COUNTED = replace(fedtail.fedavg(9), local=Counting(**LOCAL), aggregate=GeometricMedian(5))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("channel", [fedtail.PlainChannel(), IntegerChannel()], ids=["plain", "integers"])
def test_clients_train_once_however_often_the_median_asks_and_a_lost_memo_changes_no_bit(large, channel, monkeypatch, tmp_path):
    if large:
        monkeypatch.setattr("fedtail.update_memo.LARGE", 1)
    COUNTS.clear()
    with LocalFleet(PEOPLE, TASK, workers=1, chunk=2, folder=tmp_path / "rows") as fleet:
        once = params_of(train(COUNTED, TASK, fleet=fleet, rounds=3, channel=channel))
    assert sum(COUNTS) == 3 * 9
    assert not (tmp_path / "rows").exists()                           # nothing of it is left behind
    monkeypatch.setattr(UpdateMemo, "read", lambda *_: None)
    anew = params_of(train(COUNTED, TASK, PEOPLE, rounds=3, channel=channel, engine=fedtail.Engine(workers=1)))
    assert sum(COUNTS) == 3 * 9 * 7
    assert torch.allclose(once, anew, atol=1e-12)
    with LocalFleet(PEOPLE, TASK, workers=1, chunk=2) as fleet:
        assert torch.equal(once, params_of(train(COUNTED, TASK, fleet=fleet, rounds=3, channel=channel)))


@dataclass(frozen=True)
class Noting(LocalSGD):
    """Writes a byte to a file for every client it trains, in whatever process."""

    log: str = ""

    def updates(self, clients, model, first=None):
        with open(self.log, "ab") as file:
            file.write(bytes(len(clients)))
        return super().updates(clients, model, first)


def test_a_memo_on_disk_is_shared_by_processes_and_a_part_of_it_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr("fedtail.update_memo.LARGE", 1)
    for module, name, value in ((blocks, "GRAIN", 64), (blocks, "TOGETHER", 1), (workers, "WORTH_STARTING", 0.0), (workers, "WORTH_SHARING", 0.0)):
        monkeypatch.setattr(module, name, value)
    found = []
    for count in (1, 3):
        log = tmp_path / f"{count}"
        method = replace(COUNTED, local=Noting(**LOCAL, log=str(log)))
        with LocalFleet(PEOPLE, TASK, workers=count, folder=tmp_path / "rows") as fleet:
            found.append(params_of(train(method, TASK, fleet=fleet, rounds=2)))
            assert (fleet._team.pool is not None) == (count > 1)
        assert len(log.read_bytes()) == 2 * 9                         # trained once each, in whatever process
    assert torch.equal(*found)
    places = folder.RowFolder(tmp_path / "other").reserve_places(torch.tensor([5, 6, 7]))
    places.take(torch.tensor([0, 2])).write_memo("a", torch.ones(2, 3))
    assert places.read_memo("a") is None
    assert places.take(torch.tensor([2])).read_memo("a").tolist() == [[1.0] * 3]
    assert places.take(torch.tensor([0])).read_memo("b") is None
    places.remove_memos()
    assert not (tmp_path / "other").exists()


def test_a_disk_that_is_full_costs_time_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setattr("fedtail.update_memo.LARGE", 1)
    want = params_of(train(COUNTED, TASK, PEOPLE, rounds=1, engine=fedtail.Engine(workers=1)))

    def full(*_):
        raise folder.RowsError("no space left")
    monkeypatch.setattr(folder.RowPlaces, "write_memo", full)
    COUNTS.clear()
    assert torch.equal(params_of(train(COUNTED, TASK, PEOPLE, rounds=1, engine=fedtail.Engine(workers=1))), want)
    assert sum(COUNTS) == 9 * 6


def test_other_local_training_has_a_memo_of_its_own():
    names = {UpdateMemo.entry_name(model, local) for model in (0, 1) for local in (LocalSGD(0.1), LocalSGD(0.2), LocalSGD(0.1, penalty=fedtail.Proximal(1.0)))}
    assert len(names) == 6
    assert UpdateMemo.entry_name(0, LocalSGD(0.1)) in names

    @dataclass(frozen=True)
    class WithFunction(LocalSGD):
        own: object = print
    assert UpdateMemo.entry_name(0, WithFunction()) is None
