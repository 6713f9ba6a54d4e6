"""Clipping and noise on rows: by their geometry, by moments with stated error rates, and by what they cost."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedtail.privacy import DiscreteNoise, GaussianNoise, NoisySum, NoPrivacy, SeededRandomness, SystemRandomness
from fedtail.privacy.events import GaussianRelease, LatticeRelease, NonPrivateRelease
from fedtail.privacy.noise import _integer_grid
from fedtail.privacy.randomness import ClientRandomness
from fedtail.privacy.shares import NoiseShares, Ring

WIDE = torch.float64
ALPHA = 1e-4      # of each test on draws; streams are seeded, so a test passes or fails for good

ROWS = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5).map(
    lambda rows: torch.tensor(rows, dtype=WIDE))


@given(ROWS, st.floats(1e-3, 1e3))
def test_clipped_rows_keep_their_direction_and_are_never_too_long(rows, clip_norm):
    clipped = NoisySum(clip_norm, GaussianNoise(1.0)).clip(rows)
    norms = rows.norm(dim=1)
    for k, row in enumerate(clipped.tolist()):
        assert math.hypot(*row) <= clip_norm * (1 + 1e-15)
        if norms[k] <= clip_norm:
            assert torch.equal(clipped[k], rows[k])
        else:
            assert torch.allclose(clipped[k] * norms[k], rows[k] * clip_norm, rtol=1e-9, atol=1e-9 * float(norms[k]))


@pytest.mark.parametrize("random", [SeededRandomness(0, "g"), SystemRandomness()], ids=["seed", "os"])
def test_normal_noise_is_normal_and_of_the_stated_size(random):
    alpha = 1e-7 if isinstance(random, SystemRandomness) else ALPHA      # fresh draws: one run in ten million fails
    total = torch.full((200_000,), 3.0, dtype=WIDE)
    noised = NoisySum(0.5, GaussianNoise(4.0)).on_server(total, random)
    assert stats.kstest(((noised - total) / 2.0).numpy(), "norm").pvalue > alpha
    assert torch.equal(NoisySum(0.5, GaussianNoise(4.0)).on_client(torch.ones(1, 1), random), torch.full((1, 1), 0.5).double() * (1 - 1e-12))


def test_integer_shares_add_up_to_the_planned_noise():
    clients, width, clip_norm, multiplier = 40, 300, 0.7, 1.3
    mechanism = NoisySum(clip_norm, DiscreteNoise(multiplier, planned_clients=clients))
    rows = torch.randn(clients, width, generator=torch.Generator().manual_seed(0), dtype=WIDE)
    noise = []
    for trial in range(60):
        crossed = mechanism.on_client(rows, ClientRandomness(1, (trial,), torch.arange(clients)))
        assert torch.equal(crossed, crossed.round())
        assert float(crossed.abs().max()) <= mechanism.bound(width)
        noise.append(mechanism.on_server(crossed.sum(0), SystemRandomness()) - mechanism.clip(rows).sum(0))
    noise = torch.stack(noise).flatten().numpy()
    grid = _integer_grid(mechanism.noise, width, clip_norm, False)
    expected = multiplier * grid.sensitivity / grid.scale               # in the units of the rows
    assert multiplier * clip_norm <= expected <= 1.011 * multiplier * clip_norm
    spread = math.sqrt(2 / len(noise))                                  # relative standard error of a variance
    rounding = clients / 12 / grid.scale**2
    assert abs(noise.var() / (expected**2 + rounding) - 1) < 4.5 * spread
    assert abs(noise.mean()) < 4.5 * expected / math.sqrt(len(noise))


def test_a_rounded_row_is_within_the_sensitivity_that_is_paid_for():
    """Rows chosen to round up in every coordinate, at the norm where that hurts most."""
    for width in (1, 10, 1000):
        noise = DiscreteNoise(1.0, planned_clients=10)
        grid = _integer_grid(noise, width, 1.0, False)
        assert math.sqrt(width) / 2 <= 0.0101 * grid.scale
        worst = torch.full((1, width), (math.floor(grid.scale / math.sqrt(width)) + 0.5) / grid.scale, dtype=WIDE)
        worst *= min(1.0, 1.0 / float(worst.norm()))
        integers = (worst * grid.scale + 0.5).floor()
        assert float(integers.norm()) <= grid.sensitivity
        assert float(integers.norm()) > 0.9 * grid.scale                # the check is not idle


def test_a_whole_row_that_is_too_long_is_zeroed_and_still_noised():
    mechanism = NoisySum(5.0, DiscreteNoise(3.0, planned_clients=1), exchange=1.5, whole=True)
    rows = torch.tensor([[3.0, 4.0], [4.0, 4.0]], dtype=WIDE)
    draws = torch.stack([mechanism.on_client(rows, ClientRandomness(2, (k,), torch.arange(2))) for k in range(4000)])
    deviation = 15.0 / math.sqrt(4000)
    assert torch.allclose(draws.mean(0), torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double(), atol=4.5 * deviation)
    assert float(draws.std()) == pytest.approx(15.0, rel=0.1)


def test_what_a_mechanism_costs():
    assert NoisySum(0.3, GaussianNoise(2.0), exchange=1.5).release(7, "x") == GaussianRelease(2.0, 1.5, "x")
    assert NoPrivacy().release(7, "x") == NonPrivateRelease("x")
    release = NoisySum(0.3, DiscreteNoise(2.0, planned_clients=50)).release(1000, "x")
    assert isinstance(release, LatticeRelease)
    assert release.width == 1000
    assert release.honest == 50
    assert release.error == 0
    assert release.multiplier("zero-out") == pytest.approx(2.0, rel=1e-4)
    assert release.multiplier("replace-one") == pytest.approx(1.0, rel=1e-4)
    assert math.sqrt(50 * release.variance) / release.sensitivity == pytest.approx(2.0, rel=1e-4)


def test_tiny_noise_still_has_shares_that_are_discrete_gaussians():
    release = NoisySum(1.0, DiscreteNoise(1e-3, planned_clients=100)).release(10, "x")
    assert release.variance >= 2
    assert release.multiplier("zero-out") == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: GaussianNoise(0.0), "noise_multiplier (z) must be positive and finite, got 0. `fedtail privacy` says which one a budget needs; without noise leave the private part out."),
    (lambda: DiscreteNoise(math.inf, 3), "noise_multiplier (z) must be positive and finite, got inf."),
    (lambda: DiscreteNoise(1.0, 0), "planned_clients must be at least 1 and colluders at least 0, got 0 and 0."),
    (lambda: DiscreteNoise(1.0, 3, colluders=-1), "planned_clients must be at least 1 and colluders at least 0, got 3 and -1."),
    (lambda: DiscreteNoise(1.0, 5, scale=0.0), "scale must be positive, got 0. Leave it out to have it chosen."),
    (lambda: NoisySum(2.0, DiscreteNoise(1.0, 5, scale=1.5), whole=True).release(3, "x"), "rows of whole numbers need a whole scale, got 1.5."),
    (lambda: NoisySum(1.0, DiscreteNoise(0.01, 500, scale=1.0)).release(3, "x"), "the variance of a share must be at least 2"),
])
def test_refusals(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


def test_colluders_raise_the_minimum_and_not_the_noise_counted_on():
    lonely, together = DiscreteNoise(1.0, 80), DiscreteNoise(1.0, 80, colluders=10)
    assert (lonely.minimum, together.minimum, GaussianNoise(1.0).minimum) == (80, 90, 0)
    assert NoisySum(1.0, lonely).release(4, "x") == NoisySum(1.0, together).release(4, "x")


def test_words_become_normal_numbers_at_the_ends_too():
    class Ends:
        replayable = True

        def words(self, count):
            return np.array([0, 2**64 - 1], dtype=np.uint64)[:count]

    low, high = GaussianNoise(1.0).on_server(torch.zeros(2, dtype=WIDE), 1.0, False, Ends()).tolist()
    assert -9 < low < -8
    assert 8 < high < 9


def test_who_sees_an_exact_sum_and_how_far_an_entry_may_go():
    server, shares = NoisySum(0.5, GaussianNoise(2.0)), NoisySum(0.5, DiscreteNoise(2.0, 10))
    assert [mechanism.reveals_exact_sum for mechanism in (NoPrivacy(), server, shares)] == [True, True, False]
    assert [mechanism.private for mechanism in (NoPrivacy(), server, shares)] == [False, True, True]
    assert [mechanism.minimum for mechanism in (NoPrivacy(), server, shares)] == [1, 0, 10]
    assert (NoPrivacy().bound(7), server.bound(7)) == (None, 0.5)
    release = shares.release(7, "x")
    assert release.sensitivity < shares.bound(7) - 10 * math.sqrt(release.variance)
    assert shares.bound(7) == int(shares.bound(7))


@pytest.mark.parametrize(("width", "clip_norm", "multiplier", "planned"), [(1, 1.0, 1.0, 10), (1000, 0.3, 2.0, 50), (4, 30.0, 0.001, 200)])
def test_the_scale_is_the_smallest_power_of_two_that_is_fine_enough(width, clip_norm, multiplier, planned):
    """Rounding adds sqrt(width) / 2 to a norm at most, a hundredth of the clip norm, and a share has a variance of 2 or more."""
    def fine(scale):
        return math.sqrt(width) / 2 <= 0.01 * scale * clip_norm and (multiplier * scale * clip_norm) ** 2 / planned >= 2

    noise = DiscreteNoise(multiplier, planned)
    grid = _integer_grid(noise, width, clip_norm, False)
    assert fine(grid.scale)
    assert not fine(grid.scale / 2)
    assert grid.sensitivity == pytest.approx(grid.scale * clip_norm + math.sqrt(width) / 2, rel=1e-11)
    assert grid.sensitivity > grid.scale * clip_norm + math.sqrt(width) / 2
    given = _integer_grid(DiscreteNoise(multiplier, planned, scale=2 * grid.scale), width, clip_norm, False)
    assert given.scale == 2 * grid.scale


def test_whole_rows_cross_at_their_own_scale_and_just_within_their_norm():
    grid = _integer_grid(DiscreteNoise(3.0, 10), 5, 4.0, True)
    assert (grid.scale, grid.sensitivity) == (1.0, pytest.approx(4.0, rel=1e-11))
    assert grid.sensitivity > 4.0
    assert _integer_grid(DiscreteNoise(3.0, 10, scale=3.0), 5, 4.0, True).sensitivity == pytest.approx(12.0, rel=1e-11)
    mechanism = NoisySum(math.sqrt(3) * (1 - 1e-13), GaussianNoise(1.0), whole=True)      # a rounding error below the norm of the rows
    rows = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]], dtype=WIDE)
    assert mechanism.on_client(rows, SeededRandomness(0)).tolist() == [[1, 1, 1], [0, 0, 0]]
    assert NoisySum(math.sqrt(3) * (1 - 1e-11), GaussianNoise(1.0), whole=True).on_client(rows, SeededRandomness(0)).abs().sum() == 0


@pytest.mark.parametrize(("variance", "honest", "width", "sensitivity"), [(Fraction(2), 7, 3, 5.0), (Fraction(9, 4), 2, 400, 0.01), (Fraction(30), 1, 1, 2.0)])
def test_shares_cost_what_the_theorem_says(variance, honest, width, sensitivity):
    shares = NoiseShares(variance, honest, width)
    with mpmath.workdps(40):
        psi = 10 * mpmath.fsum(mpmath.exp(-2 * mpmath.pi**2 * mpmath.mpf(variance.numerator) / variance.denominator * k / (k + 1)) for k in range(1, honest))
        ratio = sensitivity / mpmath.sqrt(honest * mpmath.mpf(variance.numerator) / variance.denominator)
        ways = mpmath.sqrt(ratio**2 + psi * width / 2), ratio + psi * mpmath.sqrt(width)
    assert shares.log_ratio_bound == pytest.approx(float(psi), rel=1e-12)
    assert shares.total_deviation == pytest.approx(math.sqrt(honest * variance), rel=1e-15)
    assert shares.concentrated_epsilon(sensitivity) == pytest.approx(float(min(ways)), rel=1e-12)


def test_either_way_of_the_theorem_may_be_the_cheaper():
    """Far more coordinates than anybody has, so that psi shows."""
    for width, sensitivity in ((10**15, 1e-3), (10**15, 1e4)):
        shares = NoiseShares(Fraction(2), 2, width)
        psi, ratio = 10 * math.exp(-2 * math.pi**2), sensitivity / 2
        ways = math.sqrt(ratio**2 + psi * width / 2), ratio + psi * math.sqrt(width)
        assert shares.concentrated_epsilon(sensitivity) == pytest.approx(min(ways), rel=1e-9)
    assert ways[0] != pytest.approx(ways[1], rel=1e-3)


def test_what_is_charged_for_integer_noise_holds_the_psi_of_its_shares():
    """A sum of shares is no discrete Gaussian: the price is more than that of one, and seen where there are many coordinates."""
    release = LatticeRelease(10.0, Fraction(2), 2, 10**15)
    psi = 10 * math.exp(-2 * math.pi**2)
    for adjacency, ratio in (("zero-out", 5.0), ("replace-one", 10.0)):
        priced = 1 / release.multiplier(adjacency)
        assert priced == pytest.approx(min(math.sqrt(ratio**2 + psi * 10**15 / 2), ratio + psi * math.sqrt(10**15)), rel=1e-9)
        assert priced > 1.01 * ratio


def test_sums_wrap_as_seldom_as_hoeffding_says():
    shares = NoiseShares(Fraction(5), 10, 6)
    assert shares.wrap_probability(12, -3, 40, 43) == shares.wrap_probability(12, -3, 40, 45) == 1          # no room for noise at all
    assert shares.wrap_probability(12, -3, 40, 46) == 1
    for modulus in (256, 257, 300):
        room = (modulus - 1 - 43) // 2
        assert shares.wrap_probability(12, -3, 40, modulus) == pytest.approx(12 * math.exp(-room**2 / (2 * 12 * 5)), rel=1e-12)
    reach = shares.largest_noise(12, 1e-6)
    assert 12 * math.exp(-reach**2 / 120) <= 1e-6 < 12 * math.exp(-((reach - 1) ** 2) / 120)
    for low, high in ((-3, 40), (0, 1000), (0, 2**10 - 1 - 2 * shares.largest_noise(12, 2.0**-40)), (0, 2**10 - 2 * shares.largest_noise(12, 2.0**-40))):
        ring = Ring.for_sums(shares, 12, low, high)
        far = shares.largest_noise(12, 2.0**-40)
        assert ring.low == low - far
        assert ring.modulus & (ring.modulus - 1) == 0
        assert ring.modulus // 2 <= high - low + 2 * far < ring.modulus
        assert shares.wrap_probability(12, low, high, ring.modulus) <= 2.0**-40
        sums = np.array([ring.low, low, high, high + far])
        assert ring.decode(ring.encode(sums)).tolist() == sums.tolist()
        assert (ring.encode(sums) >= 0).all()
        assert ring.decode(np.array([ring.low - 1])).tolist() == [ring.low - 1 + ring.modulus]


def test_shares_nobody_can_give_are_refused():
    for honest, width in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"noise shares need a client and a coordinate, got honest={honest}, width={width}"):
            NoiseShares(Fraction(3), honest, width)
    with pytest.raises(ValueError, match=r"the variance of a share must be at least 2, got 1\.99"):
        NoiseShares(Fraction(199, 100), 1, 1)
    assert NoiseShares(Fraction(2), 1, 1).log_ratio_bound == 0
    assert NoiseShares.from_total_deviation(8.0, 4, 3) == NoiseShares(Fraction(16), 4, 3)
