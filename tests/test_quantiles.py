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
from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import converse
from fedtail.quantiles import boundary_dual, check_quantile, empty_tail, extreme_loss, loss_range
from fedtail.quantiles.majorise import MassAbove, PinballStep
from fedtail.quantiles.multisect import Bracket, multisect
from fedtail.quantiles.radix import Digit, float_from_ordered_bits, ordered_bits
from fedtail.questions import StatisticPart
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
    assert [float_from_ordered_bits(int(k)) for k in keys] == [v + 0.0 for v in values]      # -0.0 comes back as 0.0, which is equal
    for a, ka in zip(values, keys.tolist(), strict=True):
        for b, kb in zip(values, keys.tolist(), strict=True):
            assert (a < b) == (ka < kb)


def test_edges_beyond_the_largest_float_are_infinite():
    assert float_from_ordered_bits(2**32) == math.inf
    assert float_from_ordered_bits(int(ordered_bits(torch.tensor([math.inf]))[0]) + 1) == math.inf
    assert float_from_ordered_bits(0) == -math.inf


@pytest.mark.parametrize("bits", [12, 32])
def test_the_boundary_of_everything_is_at_the_smallest_loss(bits):
    losses = torch.tensor([3.0, -1.5, 2.0, 7.0]).double()
    low, high, share, tail = fit_locally(ExactQuantile(bits).fit(1.0), ClientStatistics(losses, torch.ones(4).double())).tolist()
    assert low <= -1.5 < high
    assert high < 2.0
    assert (share, tail) == (1.0, 4.0)


@given(weighted_losses(low=-10.0), TAIL_FRACTIONS)
def test_the_exact_quantile_is_the_lower_quantile_negative_values_included(case, tail_fraction):
    losses, mass = case
    mass = mass.round().clamp(min=1)                                   # integers: sums are exact, so is the comparison
    low, high, share, tail = fit_locally(ExactQuantile().fit(tail_fraction), ClientStatistics(losses, mass)).tolist()
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
    low, high, share, tail = fit_locally(ExactQuantile(bits).fit(tail_fraction), ClientStatistics(losses, mass)).tolist()
    above, inside = mass[losses >= high].sum(), mass[(losses >= low) & (losses < high)].sum()
    assert 0 <= share <= 1
    assert (above + share * inside).item() == approx(tail)
    exact = fit_locally(ExactQuantile().fit(tail_fraction), ClientStatistics(losses, mass))[0].item()
    assert low <= exact < high


def overheard(conversation, seen):
    """Its result, the questions, and the sums that answered them."""
    asked, answers = [], []

    def ask(question):
        asked.append(question)
        answers.append(question.part.statistic(seen, question.trial).sum(0))
        return answers[-1]

    return converse(conversation, ask), asked, answers


@pytest.mark.parametrize(("bits", "sums"), [
    (32, [256] * 4), (12, [4096]), (8, [256]), (1, [2]), (13, [256, 32]), (16, [256] * 2), (24, [256] * 3), (31, [256, 256, 256, 128])])
def test_the_number_of_questions_and_of_sums_in_each(bits, sums):
    seen = ClientStatistics(torch.rand(50).double(), torch.ones(50, dtype=torch.float64))
    _, _, answers = overheard(ExactQuantile(bits).fit(0.3), seen)
    assert [len(answer) for answer in answers] == sums
    assert all(answer.dtype == torch.float64 for answer in answers)


def test_the_range_takes_one_question_and_ends_at_the_largest_float():
    largest = float(np.finfo(np.float32).max)
    ends, _, answers = overheard(loss_range(), ClientStatistics(torch.tensor([largest, 1.0]).double(), torch.tensor([0.25, 0.25]).double()))
    assert [len(answer) for answer in answers] == [4096]
    assert (ends.low, ends.high, ends.mass) == (1.0, largest, 0.5)


def test_the_extreme_loss_is_the_largest_unless_told_and_none_without_clients():
    losses = torch.tensor([2.0, -3.0, 5.0, 1.0]).double()
    assert fit_locally(extreme_loss(), ClientStatistics(losses, torch.full((4,), 0.1).double())) == 5.0
    assert fit_locally(extreme_loss(), ClientStatistics(losses, torch.zeros(4).double())) is None
    assert fit_locally(extreme_loss(), ClientStatistics(torch.tensor([2.0]).double(), torch.tensor([0.5]).double())) == 2.0


def test_both_zeros_are_one_number():
    assert ordered_bits(torch.tensor([-0.0])).tolist() == ordered_bits(torch.tensor([0.0])).tolist() == [2**31]


def test_a_tail_of_whole_clients_is_whole_however_its_fraction_is_rounded():
    """1/49 of 49 clients is less than one of them in floating point. The boundary is then at the next one, of whom nothing counts."""
    assert 1 / 49 * 49 < 1
    losses = torch.arange(49.0).double()
    for mass in (1.0, 0.01, 300.0):
        low, high, share, tail = fit_locally(ExactQuantile().fit(1 / 49), ClientStatistics(losses, torch.full((49,), mass).double())).tolist()
        assert (low, share) == (47.0, 0.0)
        assert 47 < high < 48
        assert tail == approx(mass)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_who_goes_after_a_question_leaves_the_boundary_as_fine_as_it_was(left):
    """The first `left` bytes are answered; a boundary of 8 * `left` bits has the ends, the share and the mass."""
    seen = ClientStatistics(torch.tensor([1.0, 1.5, 2.5, 2.75, 9.0]).double(), torch.tensor([1.0, 0.5, 0.25, 2.0, 1.0]).double())
    asked = []

    def ask(question):
        asked.append(question)
        return question.part.statistic(seen, question.trial).sum(0) * (len(asked) <= left)

    assert converse(ExactQuantile().fit(0.4), ask).tolist() == fit_locally(ExactQuantile(8 * left).fit(0.4), seen).tolist()
    assert len(asked) == left + 1


def test_a_digit_is_counted_for_those_with_its_beginning_only():
    seen = ClientStatistics(torch.tensor([1.0, 1.0, -1.0]).double(), torch.tensor([0.5, 0.25, 4.0]).double())
    key = int(ordered_bits(torch.tensor([1.0]))[0])
    rows = Digit(16, 8).statistic(seen, torch.tensor(key >> 24))
    expected = torch.zeros(3, 256).double()
    expected[0, (key >> 16) % 256], expected[1, (key >> 16) % 256] = 0.5, 0.25
    assert torch.equal(rows, expected)


# boundaries

@pytest.mark.parametrize(("above", "inside", "tail", "share"), [
    (2.0, 0.5, 2.25, 0.5), (0.0, 4.0, 1.0, 0.25), (1.0, 2.0, 1.5, 0.25),
    (0.0, 0.0, 1.0, 0.0),                               # nobody inside
    (0.0, 1.0, 3.0, 1.0), (2.0, 1.0, 1.0, 0.0),         # more than there is, less than nothing
    (0.0, 1.0, 1e-13, 1e-13),                           # a tiny share is all that there is
    (0.5, 0.5, 0.5 + 1e-14, 0.0),                       # a rounding error of the mass above
    (1e-12, 1.0, 2e-12, 0.0), (1e-12, 1.0, 3e-12, 2e-12),
])
def test_the_share_of_a_boundary(above, inside, tail, share):
    found = boundary_dual(-1.0, 3.0, above, inside, tail)
    assert found.dtype == torch.float64
    assert found.tolist() == [-1.0, 3.0, approx(share, rel=1e-9), min(tail, above + inside)]


def test_a_tail_is_not_said_to_hold_those_who_dropped_out_while_it_was_found():
    """Ten clients; of the boundary's seven, five drop out after the first byte: three contribute, not the four of theta."""
    losses = torch.tensor([9.0, *(2.0 + k / 8 for k in range(7)), 0.5, 0.5]).double()
    everybody, asked = ClientStatistics(losses, torch.ones(10).double()), []
    stayed = ClientStatistics(losses, torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 1, 1, 1]).double())

    def ask(question):
        asked.append(question)
        return question.part.statistic(everybody if len(asked) == 1 else stayed, question.trial).sum(0)

    risk = Superquantile(0.4)
    dual = converse(risk.fit(None), ask)
    assert int((risk.density(everybody, dual) > 0).sum()) == 3
    assert risk.fewest_contributors(dual, 1.0) == 3


def test_nobody_is_above_infinity():
    assert empty_tail().tolist() == [math.inf, math.inf, 0.0, 0.0]
    assert empty_tail().dtype == torch.float64


@pytest.mark.parametrize("wrong", [ExactQuantile, "exact", None])
def test_a_quantile_must_be_a_part(wrong):
    with pytest.raises(TypeError, match="quantile must be a part, got"):
        check_quantile(wrong)
    check_quantile(ExactQuantile())
    check_quantile(MajoriseMinimise())


@pytest.mark.parametrize(("tail_fraction", "typical"), [(0.1, 5e-3), (0.3, 2e-3), (0.5, 1e-3)])
def test_twelve_bits_in_one_question_come_close_to_the_superquantile(tail_fraction, typical):
    """Cohorts of 100 with losses spread over a factor of seven; the gap is relative to the value."""
    random = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(25):
        losses = torch.rand(100, generator=random).mul(2).exp().float().double()
        seen = ClientStatistics(losses, torch.ones(100, dtype=torch.float64))
        risk = Superquantile(tail_fraction, ExactQuantile(bits=12))
        weights = seen.mass * risk.density(seen, fit_locally(risk.fit(None), seen))
        exact = Superquantile(tail_fraction).value(losses).item()
        gaps.append((exact - (weights * losses).sum().item() / weights.sum().item()) / exact)
    assert min(gaps) > -1e-12                                          # weights of the polytope never exceed the maximum
    assert np.mean(gaps) < typical


@given(weighted_losses(low=-10.0), st.booleans())
def test_the_extreme_loss_is_found_exactly(case, largest):
    losses, mass = case
    found = fit_locally(extreme_loss(largest), ClientStatistics(losses, mass))
    assert found == (losses.max() if largest else losses.min()).item()


@given(weighted_losses(low=-10.0))
def test_the_range_holds_every_loss_and_clients_without_mass_are_not_seen(case):
    losses, mass = case
    ends = fit_locally(loss_range(), ClientStatistics(torch.cat([losses, torch.tensor([99.0]).double()]), torch.cat([mass, torch.zeros(1).double()])))
    assert ends.low <= losses.min() <= losses.max() < ends.high
    assert ends.high <= max(losses.max().item() * (1 if losses.max() < 0 else 1.25), 1e-37) or losses.max() < 0
    assert ends.mass == approx(mass.sum().item())
    assert fit_locally(loss_range(), ClientStatistics(losses, torch.zeros_like(mass))) is None


@pytest.mark.parametrize("total", [1.0, 0.55, 37.0])
@pytest.mark.parametrize("tail_fraction", [0.8, 0.5, 0.1])
def test_majorise_minimise_finds_the_sorted_quantile_for_masses_of_any_sum(total, tail_fraction):
    random = np.random.default_rng(0)
    losses = torch.tensor(random.exponential(size=100)).float().double()
    mass = torch.tensor(random.uniform(0.5, 1.5, 100))
    mass = mass / mass.sum() * total
    seen = ClientStatistics(losses, mass)
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
    seen = ClientStatistics(losses, torch.ones(6, dtype=torch.float64))
    low, high, *_ = fit_locally(MajoriseMinimise(steps=400).fit(0.5), seen).tolist()
    assert 1 <= low <= 3
    assert 2 <= high <= 4


@pytest.mark.parametrize("steps", [1, 2, 30])
@pytest.mark.parametrize("shift", [0.0, -50.0, -4.0, 1e20, -1e-20])
def test_however_few_steps_the_boundary_holds_the_quantile_and_counts_the_tail(steps, shift):
    random = np.random.default_rng(0)
    for tail_fraction in (0.05, 0.25, 0.5, 0.8, 1.0):
        base = random.integers(1, 9, 40) * max(abs(shift), 1e-25) / 64           # multiples of a power of two: ties, and exact sums
        losses = torch.tensor(base).float().double() + torch.tensor(shift).float().double()
        mass = torch.tensor(random.integers(1, 5, 40)).double()
        low, high, share, tail = fit_locally(MajoriseMinimise(steps).fit(tail_fraction), ClientStatistics(losses, mass)).tolist()
        above, inside = mass[losses >= high].sum(), mass[(losses >= low) & (losses < high)].sum()
        assert (above + share * inside).item() == approx(tail, rel=1e-9)
        assert tail == approx(tail_fraction * mass.sum().item())
        if tail_fraction < 1:
            assert low <= lower_quantile(losses, mass, tail_fraction) <= high


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("shift", [0.0, -1.0, -40.0])
def test_majorise_minimise_is_as_sharp_at_any_scale_and_sign(scale, shift):
    losses = ((torch.arange(101.0).double() / 100 + shift) * scale).float().double()
    for tail_fraction in (0.2, 0.505, 0.9):
        seen = ClientStatistics(losses, torch.ones(101).double())
        low, high, *_ = fit_locally(MajoriseMinimise().fit(tail_fraction), seen).tolist()
        quantile = lower_quantile(losses, seen.mass, tail_fraction)
        assert low <= quantile <= high
        assert high - low < 0.03 * scale
        assert abs((low + high) / 2 - quantile) < 0.03 * scale


def test_majorise_minimise_asks_for_the_range_a_hundred_steps_and_one_ladder():
    seen = ClientStatistics(torch.rand(30, generator=torch.Generator().manual_seed(0)).double(), torch.ones(30).double())
    _, asked, answers = overheard(MajoriseMinimise().fit(0.3), seen)
    assert len(asked) == 102
    assert [len(answer) for answer in answers[1:]] == [2] * 100 + [32]
    assert all(question.trial.dtype == torch.float64 for question in asked[1:])
    assert len(overheard(MajoriseMinimise(1).fit(0.3), seen)[1]) == 3
    ladder = asked[-1].trial
    assert bool((ladder.diff() > 0).all())
    assert ladder[0] <= seen.losses.min()
    assert ladder[-1] >= seen.losses.max()


def test_majorise_minimise_stops_where_it_is_when_nobody_answers():
    seen = ClientStatistics(torch.tensor([1.0, 2.0, 4.0, 7.0]).double(), torch.ones(4).double())
    ends = fit_locally(loss_range(), seen)
    asked = []

    def ask(question):
        asked.append(question)
        silent = isinstance(question.part, PinballStep)
        return question.part.statistic(seen, question.trial).sum(0) * (not silent)

    low, high, share, tail = converse(MajoriseMinimise().fit(0.5), ask).tolist()
    assert len(asked) == 3
    assert asked[1].trial.item() == approx((ends.low + ends.high) / 2)
    assert low <= 2.0 < high                            # a boundary there is, if a wide one
    above, inside = (seen.losses >= high).sum(), ((seen.losses >= low) & (seen.losses < high)).sum()
    assert above + share * inside == approx(tail)


def test_the_rows_of_majorise_minimise_are_as_documented():
    losses, mass = torch.tensor([1.0, 2.0, 5.0]).double(), torch.tensor([1.0, 2.0, 4.0]).double()
    assert MassAbove().statistic(ClientStatistics(losses, mass), torch.tensor([2.0, 6.0]).double()).tolist() == [[0, 0], [2, 0], [4, 0]]
    rows = PinballStep(0.5).statistic(ClientStatistics(losses, mass), torch.tensor(2.0).double())
    assert rows.tolist() == [[approx(-1 / 1.5), approx(0.5 / 1.5)], [0.0, 2.0], [approx(12 / 3.5), approx(2 / 3.5)]]


# where a sum crosses a target

class Excess(StatisticPart):
    """How much of each loss is over the trial: a sum that decreases, linear between losses."""

    def statistic(self, seen, trial):
        return seen.mass[:, None] * (seen.losses[:, None] - trial).clamp(min=0)


def excess(losses, value):
    return sum(max(loss - value, 0.0) for loss in losses)


@pytest.mark.parametrize("resolution", [1.0, 1e-3, 1e-9, 0.0])
@pytest.mark.parametrize("target", [0.5, 3.0, 11.0])
def test_a_crossing_is_bracketed_to_the_resolution_and_no_further(target, resolution):
    losses = [-2.5, 0.3, 1.7, 4.1, 6.9]
    found, asked, _ = overheard(multisect(Excess(), -8.0, 8.0, target, resolution), ClientStatistics(torch.tensor(losses, dtype=torch.float64), torch.ones(5).double()))
    assert found.low < found.high
    assert found.at_low == approx(excess(losses, found.low), abs=1e-12)
    assert found.at_high == approx(excess(losses, found.high), abs=1e-12)
    assert found.at_low >= target > found.at_high
    floor = 4 * math.ulp(max(abs(found.low), abs(found.high)))
    assert found.high - found.low <= max(resolution, floor)
    widths = [(question.trial[-1] - question.trial[0]).item() for question in asked]
    assert all(width > resolution for width in widths)                             # none was asked in vain
    assert [len(question.trial) for question in asked] == [34] * len(asked)
    assert widths == approx([16 / 33**k for k in range(len(asked))], rel=1e-3)
    assert found.high - found.low == approx(widths[-1] / 33, rel=1e-3 if resolution else 1.0)
    assert excess(losses, found.linear_crossing(target)) == approx(target, abs=1e-9 + 0.5 * resolution)


def test_a_bracket_of_just_the_resolution_is_enough():
    seen = ClientStatistics(torch.tensor([5.5]).double(), torch.ones(1).double())
    found, asked, _ = overheard(multisect(MassAbove(), 0.0, 33.0, 1.0, 1.0), seen)
    assert found == Bracket(5.0, 6.0, 1.0, 0.0)
    assert len(asked) == 1


def test_a_target_that_is_never_or_always_reached_brackets_an_end():
    seen = ClientStatistics(torch.tensor([5.5]).double(), torch.ones(1).double())
    assert fit_locally(multisect(MassAbove(), 0.0, 33.0, 2.0, 2.0), seen) == Bracket(0.0, 1.0, 1.0, 1.0)
    assert fit_locally(multisect(MassAbove(), 0.0, 33.0, 0.0, 2.0), seen) == Bracket(33.0, 33.0, 0.0, 0.0)
    assert fit_locally(multisect(MassAbove(), 0.0, 5.5, 1.0, 1e-3), seen).high == 5.5


def test_a_crossing_at_zero_takes_as_many_questions_as_are_allowed():
    seen = ClientStatistics(torch.tensor([0.0]).double(), torch.ones(1).double())
    found, asked, _ = overheard(multisect(MassAbove(), 0.0, 1.0, 1.0, 0.0), seen)
    assert len(asked) == 32
    assert (found.low, found.at_low, found.at_high) == (0.0, 1.0, 0.0)
    assert found.high == approx(33.0**-32)


@pytest.mark.parametrize(("bracket", "target", "expected"), [
    (Bracket(1.0, 3.0, 8.0, 4.0), 5.0, 2.5), (Bracket(1.0, 3.0, 8.0, 4.0), 8.0, 1.0), (Bracket(1.0, 3.0, 8.0, 4.0), 4.0, 3.0),
    (Bracket(1.0, 3.0, 8.0, 4.0), 9.0, 1.0), (Bracket(1.0, 3.0, 8.0, 4.0), 0.0, 3.0),
    (Bracket(1.0, 3.0, 0.75, 0.25), 0.5, 2.0), (Bracket(-1.0, 3.0, 6.0, 6.0), 7.0, -1.0),
])
def test_the_linear_crossing_stays_in_the_bracket(bracket, target, expected):
    assert bracket.linear_crossing(target) == approx(expected)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: ExactQuantile(0), "bits must be in 1..32, got 0."),
    (lambda: ExactQuantile(33), "bits must be in 1..32, got 33."),
    (lambda: ExactQuantile(-1), "bits must be in 1..32, got -1."),
    (lambda: MajoriseMinimise(0), "steps must be at least 1, got 0."),
])
def test_bad_settings_say_what_to_write(make, text):
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)


def test_the_clients_with_the_largest_losses_may_miss_the_first_question():
    """Those who answer the ladder may all be above the range that was found before: the boundary is then its last step."""
    def few_and_then_all():
        few, every = (ClientStatistics(losses, torch.ones_like(losses)) for losses in (torch.tensor([0.1, 0.2]).double(), torch.full((9,), 5.0).double()))
        conversation = MajoriseMinimise(2).fit(0.5)
        question, clients = next(conversation), few
        while True:
            try:
                question = conversation.send(question.part.statistic(clients, question.trial).sum(0))
            except StopIteration as end:
                return end.value
            clients = every
    low, high, share, _ = few_and_then_all().tolist()
    assert low <= high
    assert 0 <= share <= 1
