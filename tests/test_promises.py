"""Promises about new clients: exact binomials, a linear program, and populations made to break them."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from fedtail.errors import FieldError
from fedtail.inference import promise
from fedtail.inference.promises import least_clients_for_band, tail_band
from fedtail_studies.inference.measuring import massart_bound, promises, two_points

RANDOM = np.random.default_rng


@pytest.mark.parametrize("clients", [29, 30, 46, 60, 100, 337])
@pytest.mark.parametrize("percent", [50, 80, 90])
def test_a_percentile_is_bounded_by_the_smallest_order_statistic_that_does(clients, percent):
    values = RANDOM(clients).random(clients)
    at_most = np.cumsum(stats.binom.pmf(np.arange(clients), clients, percent / 100))
    rank = next(r for r in range(1, clients + 1) if at_most[r - 1] >= 0.95)
    found = promise(dict(enumerate(values)), (), f"p{percent}")
    assert found.bound == np.sort(values)[rank - 1]
    assert found.exists


def test_fewer_than_29_clients_promise_nothing_about_p90():
    found = promise(dict.fromkeys(range(28), 0.1), ())
    assert not found.exists
    assert (found.bound, found.clients_needed) == (math.inf, 29)
    assert str(found) == "no promise about the 90th percentile: it takes 29 held-out clients, and there are 28"
    assert promise(dict.fromkeys(range(29), 0.1), ()).bound == 0.1


def test_ties_keep_the_confidence():
    """Of clients with a p90 of 1 that 11% reach, the bound is 1 in at least 95% of cases; it fails once in 10,000 times by chance."""
    found = promises(two_points(0.11), {"p90": 1.0, "worst10": 1.0}, 60, 1000)
    assert found["p90"]["broken"] <= stats.binom.ppf(1 - 1e-4, 1000, 0.05) / 1000
    assert found["worst10"]["broken"] <= stats.binom.ppf(1 - 1e-4, 1000, 0.05) / 1000


@pytest.mark.parametrize(("clients", "percent"), [(60, 10), (100, 10), (100, 25), (250, 7)])
def test_the_bound_on_a_worst_share_is_the_largest_in_the_band(clients, percent):
    """A linear program over masses on the observed values and 1: at most so much above each rank; z is the tail's mass."""
    values, share = np.sort(RANDOM(percent).beta(2, 5, clients)), percent / 100
    ranks, above = tail_band(clients, share, 0.95)
    points = np.append(values, 1.0)
    n = len(points)
    larger = np.array([np.r_[np.arange(n) > clients - rank, np.zeros(n)] for rank in ranks], float)
    tail_within = np.hstack([-np.eye(n), np.eye(n)])
    solved = optimize.linprog(np.r_[np.zeros(n), -points / share], np.vstack([larger, tail_within]), np.r_[above, np.zeros(n)],
                              np.array([np.r_[np.ones(n), np.zeros(n)], np.r_[np.zeros(n), np.ones(n)]]), [1.0, share])
    found = promise(dict(enumerate(values)), (), f"worst{percent}", bounds=(0, 1))
    assert found.bound == pytest.approx(-solved.fun, abs=1e-9)
    assert found.bound < massart_bound(values, share)


def betting_bound(values: np.ndarray, share: float, confidence: float = 0.95) -> float:
    """The upper bound c + E(x - c)+ / share on the mean of the worst `share` of values in [0, 1]: c is a percentile of the first fifth, and
    the mean over the others is bounded by the capital of one-sided bets, predictable plug-ins of the variance [WSR24]."""
    first, rest = values[:len(values) // 5], values[len(values) // 5:]
    c = np.quantile(first, 1 - share)
    x, n = 1 - np.maximum(rest - c, 0) / (1 - c), len(rest)
    means = (0.5 + np.cumsum(x)) / np.arange(2, n + 2)
    variances = (0.25 + np.r_[0, np.cumsum((x - means) ** 2)[:-1]]) / np.arange(1, n + 1)
    bets, grid = np.sqrt(2 * math.log(1 / (1 - confidence)) / (n * variances)), np.linspace(0, 1, 401)[1:]
    capital = np.cumsum(np.log1p(np.minimum(bets[:, None], 0.5 / grid) * (x[:, None] - grid)), axis=0).max(0)
    return min(1.0, c + (1 - grid[capital < math.log(1 / (1 - confidence))].min()) * (1 - c) / share)


def test_no_betting_bound_is_much_tighter():
    for clients, factor in ((100, 0.9), (1000, 1.1)):
        draws = [RANDOM([k, clients]).beta(2, 8, clients) for k in range(20)]
        ours = np.mean([promise(dict(enumerate(x)), (), "worst10", bounds=(0, 1)).bound for x in draws])
        assert ours < factor * np.mean([betting_bound(x, 0.1) for x in draws])


@pytest.mark.parametrize("clients", [60, 300])
def test_the_band_holds_for_all_ranks_at_once(clients):
    """Mass above the r-th largest of uniform variables; the share of violations is beyond the limit once in 10,000 times."""
    ranks, above = tail_band(clients, 0.1, 0.95)
    assert (np.diff(above) > 0).all()
    smallest = np.sort(RANDOM(99).random((4000, clients)), axis=1)[:, ranks - 1]
    broken = (smallest > above).any(1).mean()
    assert 0.03 <= broken <= stats.binom.ppf(1 - 1e-4, 4000, 0.055) / 4000


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_clients_nobody_has_seen_seldom_break_a_promise(share):
    found = promises(two_points(share), {"p90": 0.0, "worst10": share / 0.1}, 100, 600)
    assert found["worst10"]["broken"] <= stats.binom.ppf(1 - 1e-4, 600, 0.05) / 600


def test_a_worst_share_needs_more_clients_and_bounds():
    needed = least_clients_for_band(0.1, 0.95)
    assert 29 < needed < 60
    found = promise(dict.fromkeys(range(needed - 1), 0.1), (), "worst10", bounds=(0, 1))
    assert str(found) == f"no promise about the mean of the worst 10% of clients: it takes {needed} held-out clients, and there are {needed - 1}"
    assert promise(dict.fromkeys(range(needed), 0.1), (), "worst10", bounds=(0, 1)).exists
    for bounds in (None, (0, math.inf), (0, 0.05)):
        with pytest.raises(FieldError, match="for a promise about a worst share"):
            promise(dict.fromkeys(range(60), 0.1), (), "worst10", bounds=bounds)


def test_clients_that_had_a_part_in_the_model_are_refused():
    held_out = {f"client {k}": 0.1 for k in range(40)}
    with pytest.raises(FieldError) as refused:
        promise(held_out, [f"client {k}" for k in range(35, 90)], "p90")
    assert str(refused.value) == ("5 of 40 clients had a part in making the model (client 35, client 36, client 37 and 2 more), so that they say too "
                                  "little about new clients. Judge a model by clients that never trained, tuned, stopped or chose it.")
    assert promise(held_out, [f"client {k}" for k in range(40, 90)]).exists


@pytest.mark.parametrize(("values", "used", "text"), [
    ([0.1] * 40, [], "values must be a dict of the metric by client, got list. Write {name: value, ...} for the held-out clients"),
    (dict(enumerate([0.1] * 40)), "client 3", "used must be the names or keys of clients, got 'client 3'."),
    (dict(enumerate([0.1] * 40)), 3, "used must be the names or keys of clients, got 3.")])
def test_other_kinds_are_refused_in_words(values, used, text):
    with pytest.raises(TypeError) as refused:
        promise(values, used)
    assert text in str(refused.value)


def test_what_cannot_be_promised_is_refused():
    with pytest.raises(FieldError, match="statistic must be a percentile or worst share"):
        promise({0: 0.1}, (), "mean")
    with pytest.raises(FieldError, match="A client without a value breaks the promise"):
        promise({0: math.nan}, ())
    with pytest.raises(FieldError, match="values must be finite numbers of at least one client"):
        promise({}, ())
