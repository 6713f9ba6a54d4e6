"""Risks of chapter 7: against brute force over repeated clients, a dense search, their order, and rounds through sums."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from scipy.special import logsumexp

import fedtail
from fedtail import (
    EntropicValueAtRisk,
    FencedSuperquantile,
    IntegerChannel,
    IntervalSuperquantile,
    InverseSuperquantile,
    Mean,
    PlainChannel,
    SecureChannel,
    Spectral,
    Superquantile,
    Tilted,
    TiltedValueAtRisk,
    ValueAtRisk,
    Worst,
)
from fedtail.client_statistics import ClientStatistics
from fedtail.models import SoftmaxRegression
from fedtail.risk.base import Risk, fit_locally

from cases import TAIL_FRACTIONS, small_population, weighted_losses

WHOLE = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=8)      # a loss, and how many clients have it


def repeated(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Losses and masses, and each loss as often as its mass says, in increasing order."""
    losses, mass = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    return losses, mass, np.sort(np.repeat(losses.numpy(), mass.long().numpy()))


@given(WHOLE, st.integers(0, 40), st.integers(0, 40))
def test_means_without_the_worst_and_the_best_are_those_of_the_clients_who_are_left(pairs, worst, best):
    losses, mass, each = repeated(pairs)
    worst, best = worst % len(each), best % len(each)
    if worst + best >= len(each):
        best = len(each) - worst - 1
    left = each[best:len(each) - worst].mean()
    assert IntervalSuperquantile(worst / len(each), best / len(each)).value(losses, mass).item() == approx(left, abs=1e-9)
    assert InverseSuperquantile(worst / len(each)).value(losses, mass).item() == approx(each[: len(each) - worst].mean(), abs=1e-9)


@given(WHOLE, st.integers(1, 40))
def test_the_value_at_risk_is_the_smallest_loss_that_few_enough_exceed(pairs, tail):
    losses, mass, each = repeated(pairs)
    theta = (1 + tail % len(each)) / len(each)
    expected = next(loss for loss in each if (each > loss).mean() <= theta + 1e-12)
    assert ValueAtRisk(theta).value(losses, mass).item() == approx(expected, abs=1e-12)
    for risk in (ValueAtRisk(theta), InverseSuperquantile(1 - theta), IntervalSuperquantile(theta / 2, theta / 3), Spectral((theta, 1.0), (0.3, 0.7))):
        clients = ClientStatistics(losses, mass)
        weights = mass * risk.density(clients, fit_locally(risk.fit(None), clients))
        assert torch.allclose(weights / weights.sum(), risk.weights(losses, mass), atol=1e-9)


@given(weighted_losses(), TAIL_FRACTIONS, TAIL_FRACTIONS, st.floats(0.05, 0.95))
def test_a_spectral_risk_is_the_mixture_of_its_superquantiles_and_weighs_larger_losses_no_less(case, one, other, share):
    losses, mass = case
    risk = Spectral((one, other), (share, 1 - share))
    mixed = share * Superquantile(one).value(losses, mass) + (1 - share) * Superquantile(other).value(losses, mass)
    assert risk.value(losses, mass).item() == approx(mixed.item(), rel=1e-9, abs=1e-12)
    density = (risk.weights(losses, mass) / mass)[losses.argsort()]
    ordered, changes = losses.sort().values, density.diff()
    assert bool((changes[ordered.diff() > 0] >= -1e-9).all())


# Values at risk by tilting


def tilted(losses: np.ndarray, share: np.ndarray, tilts: np.ndarray) -> np.ndarray:
    """R(t), with the largest loss, or the smallest, taken out of the exponent."""
    end = losses.max() if tilts[0] > 0 else losses.min()
    return end + logsumexp(tilts[:, None] * (losses - end), b=share, axis=1) / tilts


def least_entropic(losses: np.ndarray, share: np.ndarray, theta: float) -> float:
    """The least over forty thousand tilts; the largest loss is its limit."""
    width = max(np.ptp(losses), 1e-300)
    tilts = np.exp(np.linspace(math.log(1e-5), math.log(1e7), 40_001)) / width
    return min((tilted(losses, share, tilts) - math.log(theta) / tilts).min(), losses.max())


def least_tilted(losses: np.ndarray, share: np.ndarray, theta: float) -> float:
    """The least over tilts of both signs, and the limit at zero; losses of at least zero."""
    best = min(share @ losses / theta, losses.max())
    for sign in (-1, 1):
        tilts = sign * np.exp(np.linspace(math.log(1e-5), math.log(1e7), 20_001)) / max(losses.max(), 1e-300)
        exponent = tilts * tilted(losses, share, tilts)
        with np.errstate(all="ignore"):
            bracket = (np.exp(np.minimum(exponent, 200)) - (1 - theta)) / theta
            near = np.log(np.where(bracket > 1e-8, bracket, 0.0))               # the rest is rounding
            bounds = np.where(exponent > 200, exponent - math.log(theta), near) / tilts
        best = min(best, bounds[np.isfinite(bounds)].min(initial=math.inf))
    return best


@settings(max_examples=60, deadline=None)
@given(weighted_losses(), st.sampled_from([0.05, 0.2, 0.5, 0.8, 0.95]), st.sampled_from([1e-3, 1.0, 1e4]))
def test_entropic_and_tilted_values_at_risk_are_the_least_over_a_dense_grid_of_tilts(case, theta, scale):
    losses, mass = scale * case[0], case[1]
    share, size = (mass / mass.sum()).numpy(), max(losses.max().item(), 1e-9)
    entropic, by_tilt = EntropicValueAtRisk(theta).value(losses, mass).item(), TiltedValueAtRisk(theta).value(losses, mass).item()
    assert entropic == approx(least_entropic(losses.numpy(), share, theta), abs=1e-5 * size)
    at_floor = share[losses.numpy() == 0].sum()
    if abs(at_floor - (1 - theta)) > 1e-6:      # else the least is a limit, of logarithms of what rounding leaves of a difference
        assert by_tilt == approx(least_tilted(losses.numpy(), share, theta), abs=1e-5 * size)
    below, between = ValueAtRisk(theta).value(losses, mass).item(), Superquantile(theta).value(losses, mass).item()
    assert below - 1e-6 * size <= by_tilt <= entropic + 1e-6 * size              # [Li23, eq. (7.66)]
    assert below - 1e-6 * size <= between <= entropic + 1e-6 * size


def test_limits_and_closed_forms():
    losses, mass = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64), torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    assert EntropicValueAtRisk(1.0).value(losses, mass).item() == approx(Mean().value(losses, mass).item(), rel=1e-5)
    assert EntropicValueAtRisk(0.2).value(losses, mass).item() == approx(5.0, rel=1e-7)      # a fifth of the mass has the largest loss
    assert TiltedValueAtRisk(0.999).value(losses, mass).item() < 0.03                         # nearly the smallest loss
    assert InverseSuperquantile(0.0).value(losses, mass).item() == Mean().value(losses, mass).item()
    assert IntervalSuperquantile(0.0, 0.8).value(losses, mass).item() == Worst().value(losses, mass).item()
    assert Spectral((0.3,), (1.0,)).value(losses, mass).item() == approx(Superquantile(0.3).value(losses, mass).item(), rel=1e-12)
    two = torch.tensor([0.0, 1.0], dtype=torch.float64)                                       # R(t) = log((1 + e^t) / 2) / t
    tilts = torch.linspace(0.01, 40, 400_000, dtype=torch.float64)
    expected = (torch.nn.functional.softplus(tilts) - math.log(2) - math.log(0.7)).div(tilts).min().item()
    assert EntropicValueAtRisk(0.7).value(two).item() == approx(expected, rel=1e-8)


@pytest.mark.parametrize("floor", [0.0, -1.0, -1e3])
@pytest.mark.parametrize("losses", [[3.7, 0.8], [5.0], [2.0, 2.0, 9.0]], ids=str)
def test_the_tilted_value_at_risk_of_everybody_is_the_smallest_loss_wherever_the_floor_is(losses, floor):
    leaf = torch.tensor(losses, dtype=torch.float64, requires_grad=True)
    value = TiltedValueAtRisk(1.0, floor).value(leaf)
    value.backward()
    assert value.item() == approx(min(losses), rel=1e-7)
    at_least = [float(loss == min(losses)) for loss in losses]
    assert leaf.grad.tolist() == approx([one / sum(at_least) for one in at_least], abs=1e-6)


ALONE = [Mean(), Tilted(2.0), Tilted(-2.0), Tilted(math.inf), Tilted(-math.inf), Worst(), Superquantile(0.5), InverseSuperquantile(0.25),
         IntervalSuperquantile(0.25, 0.25), ValueAtRisk(0.5), EntropicValueAtRisk(0.5), TiltedValueAtRisk(0.5), Spectral((1.0, 0.5), (0.5, 0.5))]


@pytest.mark.parametrize("risk", ALONE, ids=repr)
def test_a_loss_that_is_not_a_number_makes_the_value_none_and_without_mass_it_is_absent(risk):
    losses, mass = torch.tensor([1.0, 2.0, math.nan, 3.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert risk.value(losses).isnan()
    assert risk.value(losses, mass).item() == approx(risk.value(losses[mass > 0]).item(), rel=1e-6)


@pytest.mark.parametrize(("risk", "expected"), [
    (InverseSuperquantile(0.25), 2.0), (IntervalSuperquantile(0.25, 0.25), 2.5), (ValueAtRisk(0.5), 2.0), (Tilted(-math.inf), 1.0),
    (Tilted(-2.0), 1 - math.log((1 + math.exp(-2) + math.exp(-4)) / 4) / 2), (Superquantile(0.5), math.inf), (Worst(), math.inf),
], ids=repr)
def test_an_infinite_loss_counts_only_where_it_has_weight(risk, expected):
    leaf = torch.tensor([1.0, 2.0, math.inf, 3.0], dtype=torch.float64, requires_grad=True)
    value = risk.value(leaf)
    assert value.item() == approx(expected)
    assert torch.stack([risk.value(leaf), risk.value(leaf)]).equal(risk.value(leaf.expand(2, 4)))
    value.backward()
    assert torch.allclose(leaf.grad, risk.weights(leaf), atol=1e-15)


@pytest.mark.parametrize("risk", [EntropicValueAtRisk(0.4), TiltedValueAtRisk(0.4), TiltedValueAtRisk(0.9, -3.0)], ids=repr)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_they_grow_with_the_scale_of_the_losses_and_weigh_as_a_tilt(risk, scale):
    losses = torch.tensor([0.2, 0.9, 1.1, 3.0], dtype=torch.float64)
    larger = replace(risk, loss_floor=scale * risk.loss_floor) if isinstance(risk, TiltedValueAtRisk) else risk
    assert larger.value(scale * losses).item() == approx(scale * risk.value(losses).item(), rel=1e-6)
    weights = larger.weights(scale * losses)
    assert weights.sum().item() == approx(1)
    slopes = weights.log().diff() / (scale * losses).diff()                                   # log weight = t F + constant
    assert slopes.tolist() == approx([slopes[0].item()] * 3, rel=1e-5)
    assert torch.allclose(weights, Tilted(slopes[0].item()).weights(scale * losses), atol=1e-6)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: IntervalSuperquantile(0.5, 0.5), r"leave_worst \+ leave_best = 1 leaves nobody\."),
    (lambda: IntervalSuperquantile(-0.1, 0.5), r"leave_worst must be in \[0, 1\), got -0\.1\."),
    (lambda: IntervalSuperquantile(0.1, 1.0), r"leave_best must be in \[0, 1\), got 1\."),
    (lambda: InverseSuperquantile(1.0), r"tail_fraction \(theta\) must be in \[0, 1\), got 1\."),
    (lambda: Spectral((0.5,), (0.5, 0.5)), r"a share for each tail_fraction, got 2 for 1\."),
    (lambda: Spectral((), ()), r"a share for each tail_fraction, got 0 for 0\."),
    (lambda: Spectral((0.5, 1.0), (0.5, 0.6)), r"shares must be positive and sum to one, got \(0\.5, 0\.6\)\."),
    (lambda: Spectral((0.5, 2.0), (0.5, 0.5)), r"tail_fraction \(theta\) must be in \(0, 1\], got 2\."),
    (lambda: TiltedValueAtRisk(0.5, math.inf), r"loss_floor must be finite, got inf\."),
    (lambda: TiltedValueAtRisk(0.5).value(torch.tensor([-1.0, 2.0])), r"a loss of -1 is below loss_floor=0: the bound does not hold\."),
    (lambda: EntropicValueAtRisk(0.0), r"tail_fraction \(theta\) must be in \(0, 1\], got 0\."),
])
def test_what_makes_no_sense_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# Rounds

POPULATION = small_population(14)
RISKS: dict[str, Risk] = {
    "value at risk": ValueAtRisk(0.4), "entropic": EntropicValueAtRisk(0.4), "tilted": TiltedValueAtRisk(0.4), "inverse": InverseSuperquantile(0.3),
    "interval": IntervalSuperquantile(0.2, 0.3), "fenced": FencedSuperquantile(0.3, 0.5), "spectral": Spectral((1.0, 0.4), (0.5, 0.5)),
}


def model_after(risk: Risk, channel, rounds: int = 2) -> torch.Tensor:
    method = replace(fedtail.fedavg(14, learning_rate=0.3, batch_size=None), sample=fedtail.Everyone(), risk=risk)
    torch.manual_seed(3)
    module = SoftmaxRegression(5, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return fedtail.train(method, fedtail.Task(module), POPULATION, rounds=rounds, channel=channel).state.params


@pytest.mark.parametrize("name", RISKS)
def test_a_round_is_the_step_along_the_gradient_of_the_value_over_clients(name):
    """One full step of each client: the model moves against the gradient of the risk of the clients' losses, its weights scaled to one."""
    risk, rate = RISKS[name], 0.3
    torch.manual_seed(3)
    module = SoftmaxRegression(5, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    module.double()
    pairs = [POPULATION.client(k) for k in range(len(POPULATION))]
    losses = torch.stack([torch.nn.functional.cross_entropy(module(x.double()), y) for x, y in pairs])
    value = risk.value(losses, POPULATION.mass.double())
    (weights,) = torch.autograd.grad(value, losses, retain_graph=True)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad((weights / weights.sum() * losses).sum(), list(module.parameters()))])
    assert torch.allclose(model_after(risk, PlainChannel(), 1).double(), start.double() - rate * gradient, atol=1e-5)


@pytest.mark.parametrize("name", RISKS)
@pytest.mark.parametrize("channel", [IntegerChannel(), SecureChannel(8, minimum_contributors=2)], ids=["integers", "secure"])
def test_sums_of_integers_end_at_the_same_model(name, channel):
    if name == "value at risk" and isinstance(channel, SecureChannel):
        with pytest.raises(ValueError, match="ValueAtRisk lets about 1 of 14 clients contribute"):
            model_after(RISKS[name], channel, 1)
        return
    assert torch.allclose(model_after(RISKS[name], channel), model_after(RISKS[name], PlainChannel()), atol=2e-3)


def test_who_is_left_out_by_a_boundary_is_counted_and_a_dual_of_everybody_is_kept():
    """Found by an attack: clients who miss one question of a fit move the boundary, and not the mass that stays."""
    dual = torch.zeros(8, dtype=torch.float64)
    assert InverseSuperquantile(0.3).fewest_contributors(dual, 1.0) is None
    assert IntervalSuperquantile(0.1, 0.2).fewest_contributors(dual, 1.0) is None
    assert IntervalSuperquantile(0.0, 0.2).fewest_contributors(torch.tensor([0.0, 1.0, 1.0, 8.0]), 2.0) == 4.0
    clients = ClientStatistics(torch.arange(4).double(), torch.ones(4).double())
    assert bool(fit_locally(InverseSuperquantile(0.3).fit(None), clients).isfinite().all())


# The fence

def fenced_by_hand(losses: list[float], masses: list[float], theta: float, reach: float) -> float:
    """The value by its definition, one client after the other: sort, find both quantiles, drop whoever is beyond, fill the tail."""
    ranked, total = sorted(zip(losses, masses, strict=True), reverse=True), sum(masses)

    def start_of_tail(share: float) -> float:
        heap = 0.0
        for loss, mass in ranked:
            heap += mass
            if heap > share * total * (1 + 1e-12):
                return loss
        return ranked[-1][0]

    median, decile = start_of_tail(0.5), start_of_tail(0.9)
    stay = [(loss, mass) for loss, mass in ranked if median == decile or loss <= median + reach * (median - decile)]
    room = wanted = theta * sum(mass for _, mass in stay)
    value = 0.0
    for loss, mass in stay:
        taken = min(mass, room)
        value, room = value + taken * loss, room - taken
    return value / wanted


@pytest.mark.parametrize("seed", range(25))
def test_the_fenced_superquantile_is_its_definition_alone_and_by_sums(seed):
    random = torch.Generator().manual_seed(seed)
    losses = (torch.rand(13, generator=random, dtype=torch.float64) ** 3 * 8).float().double()
    losses[: seed % 4] += 40                          # corrupted
    mass = torch.rand(13, generator=random, dtype=torch.float64) + 0.1 if seed % 2 else torch.ones(13).double()
    risk = FencedSuperquantile(0.05 + seed / 30, 0.5 + seed % 5)
    expected = fenced_by_hand(losses.tolist(), mass.tolist(), risk.tail_fraction, risk.reach)
    assert risk.value(losses, mass).item() == approx(expected, abs=1e-9)
    clients = ClientStatistics(losses, mass)
    density = mass * risk.density(clients, fit_locally(risk.fit(None), clients))
    assert (density * losses).sum().item() / density.sum().item() == approx(expected, abs=1e-6)


def test_without_a_gap_the_fence_leaves_nobody_out():
    losses = torch.linspace(1, 2, 40).double()
    assert torch.allclose(FencedSuperquantile(0.1).weights(losses), fedtail.Superquantile(0.1).weights(losses), atol=1e-14)
    equal = torch.full((7,), 2.3).double()
    assert torch.allclose(FencedSuperquantile(0.1).weights(equal), torch.full((7,), 1 / 7).double(), atol=1e-14)
    rough = torch.tensor([0.0] * 6 + [1.0, 2.0]).double()      # median and decile are equal: no scale to measure a gap by
    assert FencedSuperquantile(0.125).value(rough).item() == 2.0


@pytest.mark.parametrize("corrupted", [0, 5, 10, 20, 40])
def test_corrupted_clients_far_beyond_the_others_change_nothing_but_who_is_left(corrupted):
    """Up to 40 of 100 with any large loss: the value stays within the range of the honest tail, and the corrupted have no weight."""
    honest = torch.linspace(0.5, 1.5, 100 - corrupted).double()
    risk = FencedSuperquantile(0.1)
    for far in (30.0, 1e6):
        losses = torch.cat([honest, torch.full((corrupted,), far).double()])
        weights = risk.weights(losses)
        assert float(weights[100 - corrupted:].sum()) == 0.0
        assert risk.value(losses).item() == approx(fedtail.Superquantile(0.1).value(honest).item(), abs=1e-12)


@pytest.mark.parametrize("reach", [0.0, -1.0, math.inf, math.nan])
def test_a_reach_that_is_no_distance_is_refused(reach):
    with pytest.raises(ValueError, match=r"reach must be positive and finite, got .*Use Superquantile without a fence\."):
        FencedSuperquantile(0.1, reach)
