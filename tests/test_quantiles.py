"""Quantiles of client scalars through sums only, against sorted lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from fedtail import ExactQuantile, MajoriseMinimise, Superquantile
from fedtail.clients import Seen
from fedtail.quantiles import extreme_loss, loss_range
from fedtail.quantiles.radix import from_ordered_bits, ordered_bits
from fedtail.questions import converse
from fedtail.risk.base import fit_locally

from cases import TAIL_FRACTIONS, weighted_losses

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def lower_quantile(losses, mass, tail_fraction):
    """inf { eta : P(Z > eta) <= theta }, by trying every value."""
    for eta in sorted(losses.tolist()):
        if mass[losses > eta].sum() <= (tail_fraction + 1e-12) * mass.sum():      # theta * total is rounded
            return eta
    raise AssertionError


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_ordered_bits_keep_the_order_of_all_floats_and_come_back(values):
    numbers = torch.tensor(values, dtype=torch.float64)
    keys = ordered_bits(numbers)
    assert bool(((keys >= 0) & (keys < 2**32)).all())
    assert [from_ordered_bits(int(k)) for k in keys] == [v + 0.0 for v in values]      # -0.0 comes back as 0.0, which is equal
    for a, ka in zip(values, keys.tolist(), strict=True):
        for b, kb in zip(values, keys.tolist(), strict=True):
            assert (a < b) == (ka < kb)


def test_edges_beyond_the_largest_float_are_infinite():
    assert from_ordered_bits(2**32) == math.inf
    assert from_ordered_bits(int(ordered_bits(torch.tensor([math.inf]))[0]) + 1) == math.inf
    assert from_ordered_bits(0) == -math.inf


@given(weighted_losses(low=-10.0), TAIL_FRACTIONS)
def test_the_exact_quantile_is_the_lower_quantile_negative_values_included(case, tail_fraction):
    losses, mass = case
    mass = mass.round().clamp(min=1)                                   # integers: sums are exact, so is the comparison
    low, high, share, tail = fit_locally(ExactQuantile().fit(tail_fraction), Seen(losses, mass)).tolist()
    assert tail == approx(tail_fraction * mass.sum().item())
    if tail_fraction < 1:
        assert low == lower_quantile(losses, mass, tail_fraction)
    assert high == np.nextafter(np.float32(low), np.float32(np.inf))
    above, inside = mass[losses >= high].sum(), mass[(losses >= low) & (losses < high)].sum()
    assert (above + share * inside).item() == approx(tail)


@pytest.mark.parametrize("bits", [1, 5, 8, 12, 13, 20, 24, 31])
@given(case=weighted_losses(low=-4.0, most=30), tail_fraction=TAIL_FRACTIONS)
def test_fewer_bits_give_a_wider_boundary_that_counts_the_same_mass(bits, case, tail_fraction):
    losses, mass = case
    low, high, share, tail = fit_locally(ExactQuantile(bits).fit(tail_fraction), Seen(losses, mass)).tolist()
    above, inside = mass[losses >= high].sum(), mass[(losses >= low) & (losses < high)].sum()
    assert 0 <= share <= 1
    assert (above + share * inside).item() == approx(tail)
    exact = fit_locally(ExactQuantile().fit(tail_fraction), Seen(losses, mass))[0].item()
    assert low <= exact < high


@pytest.mark.parametrize(("bits", "questions"), [(32, 4), (12, 1), (8, 1), (16, 2), (24, 3)])
def test_the_number_of_questions(bits, questions):
    seen = Seen(torch.rand(50).double(), torch.ones(50, dtype=torch.float64))
    asked = []

    def ask(question):
        asked.append(question)
        return question.part.statistic(seen, question.trial).sum(0)

    converse(ExactQuantile(bits).fit(0.3), ask)
    assert len(asked) == questions


@pytest.mark.parametrize(("tail_fraction", "typical"), [(0.1, 5e-3), (0.3, 2e-3), (0.5, 1e-3)])
def test_twelve_bits_in_one_question_come_close_to_the_superquantile(tail_fraction, typical):
    """Cohorts of 100 with losses spread over a factor of seven; the gap is relative to the value."""
    random = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(25):
        losses = torch.rand(100, generator=random).mul(2).exp().float().double()
        seen = Seen(losses, torch.ones(100, dtype=torch.float64))
        risk = Superquantile(tail_fraction, ExactQuantile(bits=12))
        weights = seen.mass * risk.density(seen, fit_locally(risk.fit(None), seen))
        exact = Superquantile(tail_fraction).value(losses).item()
        gaps.append((exact - (weights * losses).sum().item() / weights.sum().item()) / exact)
    assert min(gaps) > -1e-12                                          # weights of the polytope never exceed the maximum
    assert np.mean(gaps) < typical


@given(weighted_losses(low=-10.0), st.booleans())
def test_the_extreme_loss_is_found_exactly(case, largest):
    losses, mass = case
    found = fit_locally(extreme_loss(largest), Seen(losses, mass))
    assert found == (losses.max() if largest else losses.min()).item()


@given(weighted_losses(low=-10.0))
def test_the_range_holds_every_loss_and_clients_without_mass_are_not_seen(case):
    losses, mass = case
    ends = fit_locally(loss_range(), Seen(torch.cat([losses, torch.tensor([99.0]).double()]), torch.cat([mass, torch.zeros(1).double()])))
    assert ends.low <= losses.min() <= losses.max() < ends.high
    assert ends.high <= max(losses.max().item() * (1 if losses.max() < 0 else 1.25), 1e-37) or losses.max() < 0
    assert ends.mass == approx(mass.sum().item())
    assert fit_locally(loss_range(), Seen(losses, torch.zeros_like(mass))) is None


@pytest.mark.parametrize("total", [1.0, 0.55, 37.0])
@pytest.mark.parametrize("tail_fraction", [0.8, 0.5, 0.1])
def test_majorise_minimise_finds_the_sorted_quantile_for_masses_of_any_sum(total, tail_fraction):
    random = np.random.default_rng(0)
    losses = torch.tensor(random.exponential(size=100)).float().double()
    mass = torch.tensor(random.uniform(0.5, 1.5, 100))
    mass = mass / mass.sum() * total
    seen = Seen(losses, mass)
    low, high, share, tail = fit_locally(MajoriseMinimise(steps=300).fit(tail_fraction), seen).tolist()
    quantile = lower_quantile(losses, mass, tail_fraction)
    assert low <= quantile + 1e-9
    assert high >= quantile - 1e-9
    assert high - low < 0.05                                           # a narrow boundary around it
    above, inside = mass[losses >= high].sum(), mass[(losses >= low) & (losses < high)].sum()
    assert (above + share * inside).item() == approx(tail, rel=1e-6)
    risk = Superquantile(tail_fraction, MajoriseMinimise(steps=300))
    weights = mass * risk.density(seen, fit_locally(risk.fit(None), seen))
    assert ((weights / weights.sum()) * losses).sum().item() == approx(Superquantile(tail_fraction).value(losses, mass).item(), abs=2e-3)


def test_majorise_minimise_leaves_a_data_point_that_is_not_the_quantile():
    losses = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 100.0]).double()   # the start may sit on a data point: it must move on
    seen = Seen(losses, torch.ones(6, dtype=torch.float64))
    low, high, *_ = fit_locally(MajoriseMinimise(steps=400).fit(0.5), seen).tolist()
    assert 1 <= low <= 3
    assert 2 <= high <= 4


@pytest.mark.parametrize(("make", "text"), [
    (lambda: ExactQuantile(0), "bits must be in 1..32, got 0."),
    (lambda: ExactQuantile(33), "bits must be in 1..32, got 33."),
    (lambda: MajoriseMinimise(0), "steps must be at least 1, got 0."),
])
def test_bad_settings_say_what_to_write(make, text):
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)
