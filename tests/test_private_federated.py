"""AdaDPS and DP2 for clients: preconditioned local steps, and preconditioners before the clip, through channels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fedtail
from fedtail import DelayedMean, FixedDivisor, GaussianNoise, LocalSGD, PrivateMean
from fedtail.models import SoftmaxRegression
from fedtail.privacy import NoSampling
from fedtail.private_optim import AdaGradMoment, RMSPropMoment, YogiMoment

from cases import small_population

CLIENTS = 12
PEOPLE = replace(small_population(CLIENTS), mass=torch.ones(CLIENTS, dtype=torch.float64))
TASK = fedtail.Task(SoftmaxRegression(5, 3).double())
DIM = len(TASK.params())
DIVISOR = torch.linspace(0.2, 2.0, DIM, dtype=torch.float64)
SILENT = GaussianNoise(1e-30)
GRADIENT = LocalSGD(1.0, batch_size=None, local_steps=1)
EVERYONE = fedtail.FederatedAlgorithm(fedtail.Everyone(), GRADIENT, fedtail.Mean(), PrivateMean(1e6, SILENT, float(CLIENTS)), fedtail.SGD(0.5))


def trained(algorithm, rounds, **settings):
    return fedtail.train(algorithm, TASK, PEOPLE, rounds=rounds, engine=fedtail.Engine(workers=1, dtype=torch.float64), **settings)


def gradient(params, client):
    x, y = PEOPLE.client(client)
    weight = params[:15].view(3, 5).clone().requires_grad_()
    bias = params[15:].clone().requires_grad_()
    found = torch.autograd.grad(torch.nn.functional.cross_entropy(x.double() @ weight.T + bias, y), (weight, bias))
    return torch.cat([one.reshape(-1) for one in found])


def clipped(rows, norm):
    return rows * (norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)


def test_algorithm_10_divides_every_local_step_and_clips_the_update():
    local = LocalSGD(0.05, batch_size=None, local_steps=4, divisor=FixedDivisor(DIVISOR))
    found = trained(replace(EVERYONE, local=local, aggregate=PrivateMean(0.3, SILENT, float(CLIENTS)), server=fedtail.SGD(1.0)), 3)
    params = TASK.params()
    for _ in range(3):
        updates = []
        for client in range(CLIENTS):
            own = params.clone()
            for _ in range(4):
                own = own - 0.05 * gradient(own, client) / DIVISOR
            updates.append(own - params)
        params = params + clipped(torch.stack(updates), 0.3).sum(0) / CLIENTS
    assert torch.allclose(found.state.params, params, atol=1e-10)


@pytest.mark.parametrize("more", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"penalty": fedtail.Proximal(0.3)}])
def test_a_divisor_divides_gradients_and_penalties_but_not_weight_decay(more):
    local = LocalSGD(0.05, batch_size=None, local_steps=3, divisor=FixedDivisor(DIVISOR), **more)
    found = trained(replace(EVERYONE, local=local, server=fedtail.SGD(1.0)), 1)
    start, total = TASK.params(), torch.zeros(DIM, dtype=torch.float64)
    for client in range(CLIENTS):
        own, velocity = start.clone(), torch.zeros(DIM, dtype=torch.float64)
        for _ in range(3):
            g = gradient(own, client) + (0.3 * (own - start) if "penalty" in more else 0)
            velocity = more.get("momentum", 0) * velocity + g / DIVISOR
            own = own * (1 - 0.05 * more.get("weight_decay", 0)) - 0.05 * velocity
        total += own - start
    assert torch.allclose(found.state.params, start + total / CLIENTS, atol=1e-10)


def test_updates_are_divided_before_they_are_clipped():
    found = trained(replace(EVERYONE, aggregate=PrivateMean(0.3, SILENT, float(CLIENTS), FixedDivisor(DIVISOR))), 4)
    params = TASK.params()
    for _ in range(4):
        rows = torch.stack([gradient(params, client) for client in range(CLIENTS)]) / DIVISOR
        params = params - 0.5 * clipped(rows, 0.3).sum(0) / CLIENTS
    assert torch.allclose(found.state.params, params, atol=1e-10)


MOMENTS = {"rmsprop": (RMSPropMoment(), lambda v, g: 0.9 * v + 0.1 * g**2), "adagrad": (AdaGradMoment(), lambda v, g: v + g**2),
           "yogi": (YogiMoment(), lambda v, g: v + 0.1 * torch.sign(g**2 - v) * g**2)}


@pytest.mark.parametrize("name", MOMENTS)
def test_dp2_over_clients_without_noise_is_the_delayed_optimiser(name):
    moment, follow = MOMENTS[name]
    found = trained(replace(EVERYONE, aggregate=DelayedMean(0.2, SILENT, float(CLIENTS), 3, 2, 0.7, 0.1, moment, 0.05)), 13)
    params = TASK.params()
    v = G = torch.zeros(DIM, dtype=torch.float64)
    for step in range(13):
        r = step % 5
        if r == 0:
            G = torch.zeros_like(v)
        if r == 3:
            v = follow(v, G / 3)
        D, norm, rate = (1.0, 0.2, 0.5) if r < 3 else (v.sqrt() + 0.05, 0.7, 0.05)
        g = clipped(torch.stack([gradient(params, client) for client in range(CLIENTS)]) / D, norm).sum(0) / CLIENTS
        G = G + g
        params = params - rate * g
    assert torch.allclose(found.state.params, params, atol=1e-9)


def noisy(aggregate):
    return replace(EVERYONE, sample=fedtail.Poisson(0.7), aggregate=aggregate)


def test_a_phase_as_long_as_the_run_is_dp_fedavg_and_costs_the_same():
    total = 0.7 * CLIENTS
    plain = trained(noisy(PrivateMean(0.2, GaussianNoise(0.7), total)), 8, seed=3)
    delayed = trained(noisy(DelayedMean(0.2, GaussianNoise(0.7), total, 8, 1, 5.0)), 8, seed=3)
    assert torch.allclose(plain.state.params, delayed.state.params, atol=1e-12)
    shorter = trained(noisy(DelayedMean(0.2, GaussianNoise(0.7), total, 3, 2, 5.0)), 8, seed=3)
    assert not torch.allclose(plain.state.params, shorter.state.params, atol=1e-3)
    assert plain.ledger.guarantee(1e-3).epsilon == delayed.ledger.guarantee(1e-3).epsilon == shorter.ledger.guarantee(1e-3).epsilon


def test_a_run_that_stops_in_the_middle_of_a_phase_goes_on_to_the_same_bits():
    algorithm = noisy(DelayedMean(0.2, GaussianNoise(0.7), 0.7 * CLIENTS, 3, 2, 5.0))
    whole, half = trained(algorithm, 12, seed=4), trained(algorithm, 7, seed=4)
    assert torch.equal(fedtail.resume(half, PEOPLE, rounds=5, engine=fedtail.Engine(workers=1, dtype=torch.float64)).state.params, whole.state.params)


def test_the_noise_in_the_preconditioner_has_the_variance_of_one_release_over_the_length_of_the_phase():
    """Sixty runs of 18 parameters; the variance within 5 standard errors of sigma^2 C^2 / (s1 m^2)."""
    algorithm = replace(EVERYONE, aggregate=DelayedMean(1e-3, GaussianNoise(2000.0), float(CLIENTS), 3, 2, 1.0), server=fedtail.SGD(1e-9))
    means = torch.stack([trained(algorithm, 3, seed=seed).state.part_state("aggregate")[1 + DIM:] / 3 for seed in range(60)])
    theory = (2000 * 1e-3) ** 2 / (3 * CLIENTS**2)
    assert abs(float(means.var()) / theory - 1) < 5 * math.sqrt(2 / means.numel())


def test_clients_are_sent_a_divisor_in_delayed_rounds_and_nothing_in_plain_ones():
    part, seen = DelayedMean(1.0, SILENT, 1.0, 2, 1, 1.0), []
    train = fedtail.parts.Train(GRADIENT, fedtail.Mean(), torch.zeros(0), part)
    kept = None
    for _ in range(4):
        asking = part.fit(replace(train, kept=kept))
        seen.append(next(asking).kept)
        with pytest.raises(StopIteration) as end:
            asking.send(torch.full((DIM,), 2.0, dtype=torch.float64))
        kept = end.value.value.kept
    assert [one is None for one in seen] == [True, True, False, True]
    assert torch.allclose(seen[2], torch.full((DIM,), math.sqrt(0.1 * 4) + 1e-3, dtype=torch.float64))


def test_the_recipes_are_these_parts():
    found = fedtail.fed_adadps(100, 0.5, 1.0, DIVISOR, cohort_size=10, learning_rate=0.2)
    assert found.local.divisor == FixedDivisor(DIVISOR)
    assert found.aggregate == PrivateMean(0.5, GaussianNoise(1.0), 10.0)
    assert fedtail.fed_dp2(100, 0.5, 1.0, 20, 3.0, cohort_size=10).aggregate == DelayedMean(0.5, GaussianNoise(1.0), 10.0, 20, 20, 3.0)


def test_divisors_are_told_apart_by_their_values():
    ones = torch.ones(5000)
    other = ones.clone()
    other[2500] = 2.0
    assert FixedDivisor(ones) == FixedDivisor(ones.clone())
    assert hash(FixedDivisor(ones)) == hash(FixedDivisor(ones.clone()))
    assert FixedDivisor(ones) != FixedDivisor(other)
    assert repr(FixedDivisor(ones)) != repr(FixedDivisor(other))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: FixedDivisor(torch.zeros(3)), "the divisor must be a flat vector of positive finite numbers"),
    (lambda: DelayedMean(1.0, SILENT, 5.0, 0, 2, 1.0), r"both phases need at least one step, got plain_steps \(s1\) = 0"),
    (lambda: DelayedMean(1.0, SILENT, 5.0, 2, 2, 0.0), "delayed_clip_norm must be positive, got 0."),
    (lambda: trained(replace(EVERYONE, local=replace(GRADIENT, divisor=FixedDivisor(torch.ones(3)))), 1), "the divisor has 3 values, the model 18 parameters."),
])
def test_what_does_not_fit_is_refused_in_words(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# DP-SGD inside clients

INSIDE = replace(EVERYONE, aggregate=fedtail.WeightedMean(), server=fedtail.SGD(1.0))
EXAMPLES = fedtail.PrivacyBudget(delta=1e-5, unit="example")


def example_gradients(params, x, y):
    return torch.stack([one_gradient(params, x[k:k + 1], y[k:k + 1]) for k in range(len(y))])


def one_gradient(params, x, y):
    weight, bias = params[:15].view(3, 5).clone().requires_grad_(), params[15:].clone().requires_grad_()
    found = torch.autograd.grad(torch.nn.functional.cross_entropy(x.double() @ weight.T + bias, y), (weight, bias))
    return torch.cat([one.reshape(-1) for one in found])


def test_dp_sgd_inside_clients_clips_the_gradient_of_every_example():
    found = trained(replace(INSIDE, local=fedtail.ExamplePrivateSGD(0.4, 1e-30, 0.3, epochs=3)), 2, privacy=EXAMPLES)
    params, mass = TASK.params(), PEOPLE.mass
    for _ in range(2):
        updates = []
        for client in range(CLIENTS):
            own, (x, y) = params.clone(), PEOPLE.client(client)
            for _ in range(3):
                own = own - 0.3 * clipped(example_gradients(own, x, y), 0.4).mean(0)
            updates.append(own - params)
        params = params + (mass[:, None] * torch.stack(updates)).sum(0) / mass.sum()
    assert torch.allclose(found.state.params, params, atol=1e-10)


def test_with_small_batches_and_no_clipping_it_is_local_sgd():
    private = trained(replace(INSIDE, local=fedtail.ExamplePrivateSGD(1e6, 1e-36, 0.3, batch_size=3, epochs=2)), 3, privacy=EXAMPLES)
    plain = trained(replace(INSIDE, local=LocalSGD(0.3, batch_size=3, epochs=2)), 3)
    assert torch.allclose(private.state.params, plain.state.params, atol=1e-10)


def test_the_noise_of_a_client_is_its_own_at_the_stated_deviation_and_follows_the_seed():
    """One step from a model where nothing is learned; the variance of 12 x 18 x 40 numbers within 5 standard errors."""
    local = fedtail.ExamplePrivateSGD(1e-6, 2e6, 1.0)
    sizes = PEOPLE.size.double()
    moved = torch.stack([trained(replace(INSIDE, local=local), 1, seed=seed, privacy=EXAMPLES).state.params - TASK.params() for seed in range(40)])
    deviation = 2.0 * math.sqrt(float((1 / sizes**2).sum())) / CLIENTS           # of the mean over clients of noise over their sizes
    assert abs(float(moved.var()) / deviation**2 - 1) < 5 * math.sqrt(2 / moved.numel())
    again = trained(replace(INSIDE, local=local), 1, seed=3, privacy=EXAMPLES).state.params - TASK.params()
    assert torch.equal(again, moved[3])


def test_it_is_on_the_ledger_for_the_unit_of_an_example_and_the_models_of_a_family_have_their_own_noise():
    inside = replace(INSIDE, sample=fedtail.Poisson(0.5), local=fedtail.ExamplePrivateSGD(0.4, 2.0, 0.3, epochs=4))
    found = trained(inside, 3, privacy=EXAMPLES)
    (event, times), = found.ledger.rounds
    assert (event.unit, times) == ("example", 3)
    assert event.sampling == NoSampling()      # the client's other examples may show that it was sampled
    assert [release.noise_multiplier for release in event.releases] == [1.0]
    assert "example-level" in str(found.ledger.guarantee())
    family = trained(fedtail.Family((inside, inside)), 1, privacy=EXAMPLES)
    assert not torch.equal(family.state[0].params, family.state[1].params)
    assert len(family.ledger.rounds[0][0].releases) == 2


def test_what_does_not_fit_the_noise_inside_clients_is_refused_in_words():
    inside = replace(INSIDE, local=fedtail.ExamplePrivateSGD(0.4, 2.0))
    with pytest.raises(ValueError, match=r"ExamplePrivateSGD hides single examples, and the noise of PrivateMean hides clients: no one epsilon is about both\."):
        trained(replace(inside, aggregate=PrivateMean(1.0, GaussianNoise(1.0), float(CLIENTS))), 1, privacy=EXAMPLES)
    with pytest.raises(ValueError, match="this round protects single examples"):
        trained(inside, 1)
    with pytest.raises(ValueError, match="some members of this Family protect clients and others single examples"):
        fedtail.Family((INSIDE, inside))


def test_noise_inside_clients_passes_through_every_channel_of_the_simulator():
    inside = replace(INSIDE, local=fedtail.ExamplePrivateSGD(0.4, 1.0, 0.3))
    plain, *sums = (trained(inside, 2, privacy=EXAMPLES, channel=channel).state.params
                    for channel in (fedtail.PlainChannel(), fedtail.IntegerChannel(), fedtail.SecureChannel(5, minimum_contributors=2)))
    assert all(torch.allclose(one, plain, atol=1e-10) for one in sums)
