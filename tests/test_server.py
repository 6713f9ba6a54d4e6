"""Server optimisers, iterates, schedules, local steps and stragglers.

Tests of randomness run on fixed seeds; the error rate they state is that of a right generator over all seeds.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import tensor

import fedtail
from fedtail import (
    SGD,
    Adagrad,
    Adam,
    AveragedIterate,
    Constant,
    Cosine,
    Engine,
    Everyone,
    Family,
    LastIterate,
    LocalSGD,
    Population,
    RandomIterate,
    StepDecay,
    Stragglers,
    Task,
    Trained,
    Yogi,
    fedavg,
    resume,
    train,
)
from fedtail.clients import Shard
from fedtail.draws import hash_bits, random_permutations
from fedtail.engine.kernel_choice import kernel_for
from fedtail.fleet import Broadcast
from fedtail.local import FullWork, NoPenalty, Proximal
from fedtail.local.batches import batches
from fedtail.models import SoftmaxRegression
from fedtail.server import Adaptive

ERROR_RATE = 1e-6                     # of each statistical assertion below


def updates_of(seed=0, rounds=12, dim=5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rounds, dim))


def trajectory(server, updates) -> np.ndarray:
    """The models after each update, from zero."""
    params = torch.zeros(updates.shape[1], dtype=torch.float64)
    state, models = server.start(params), []
    for update in updates:
        params, state = server(params, torch.from_numpy(update), state)
        models.append(params.numpy().copy())
    return np.array(models)


def clients_of(count=6, examples=5, seed=0) -> Population:
    draw = np.random.default_rng(seed)
    return Population.from_arrays(draw.normal(size=(count * examples, 3)), draw.integers(0, 2, count * examples),
                                  np.repeat(np.arange(count), examples))


# Optimisers

@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_sgd_is_torchs_sgd_on_the_negative_update(momentum, rate):
    updates = updates_of()
    params = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([params], lr=rate, momentum=momentum)
    for update, model in zip(updates, trajectory(SGD(rate, momentum), updates), strict=True):
        params.grad = -torch.from_numpy(update)
        optimizer.step()
        assert model.tolist() == pytest.approx(params.tolist())


def test_sgd_at_rate_one_takes_the_average_as_it_is():
    updates = updates_of()
    assert trajectory(SGD(), updates) == pytest.approx(updates.cumsum(0))


def adaptive_by_numpy(rule, updates, rate, first_decay, second_decay, adaptivity) -> np.ndarray:
    """Algorithm 2 of Reddi et al., "Adaptive federated optimization" (ICLR 2021), entry by entry."""
    models = []
    x, m, v = np.zeros(updates.shape[1]), np.zeros(updates.shape[1]), np.full(updates.shape[1], adaptivity**2)
    for delta in updates:
        for i, d in enumerate(delta):
            m[i] = first_decay * m[i] + (1 - first_decay) * d
            if rule is Adagrad:
                v[i] = v[i] + d**2
            elif rule is Yogi:
                v[i] = v[i] - (1 - second_decay) * d**2 * math.copysign(1, v[i] - d**2)
            else:
                v[i] = second_decay * v[i] + (1 - second_decay) * d**2
            x[i] = x[i] + rate * m[i] / (math.sqrt(v[i]) + adaptivity)
        models.append(x.copy())
    return np.array(models)


@pytest.mark.parametrize("rule", [Adam, Yogi, Adagrad])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_adaptive_rules_are_those_of_reddi_et_al(rule, scale):
    updates = scale * updates_of(1)
    settings = {"learning_rate": 0.1, "first_decay": 0.8, "second_decay": 0.7, "adaptivity": 1e-2}
    expected = adaptive_by_numpy(rule, updates, *settings.values())
    assert trajectory(rule(**settings), updates) == pytest.approx(expected)
    default = rule()
    assert trajectory(default, updates) == pytest.approx(adaptive_by_numpy(
        rule, updates, default.learning_rate, default.first_decay, default.second_decay, default.adaptivity))


def test_yogi_and_adam_differ_and_adagrad_has_no_momentum_by_default():
    updates = updates_of(2)
    assert trajectory(Yogi(), updates) != pytest.approx(trajectory(Adam(), updates))
    assert Adagrad().first_decay == 0


def test_optimisers_do_not_change_what_they_are_given():
    for server in (SGD(0.5, 0.9), Adam(), Yogi(), Adagrad()):
        params, update = torch.ones(3), torch.full((3,), 2.0)
        state = server.start(params)
        kept = [s.clone() for s in state]
        new, _ = server(params, update, state)
        again, _ = server(params, update, state)
        assert params.tolist() == [1.0] * 3
        assert update.tolist() == [2.0] * 3
        assert all(torch.equal(a, b) for a, b in zip(kept, state, strict=True))
        assert torch.equal(new, again)


@pytest.mark.parametrize("server", [SGD(0.7, 0.5), Adam(0.1), Yogi(0.1), Adagrad(0.1)], ids=lambda s: type(s).__name__)
def test_a_run_with_a_server_optimiser_applies_it_to_the_updates_of_plain_rounds(server):
    """The update of a round depends on the model alone: get it from one plain round started there."""
    population, task = clients_of(), Task(SoftmaxRegression(3, 2))
    plain = replace(fedavg(learning_rate=0.4, batch_size=None), sample=Everyone())
    trained = train(replace(plain, server=server), task, population, rounds=4, engine=Engine(dtype=torch.float64))
    params = torch.zeros(8, dtype=torch.float64)
    state = server.start(params)
    for _ in range(4):
        after = train(plain, task, population, rounds=1, start=task.with_params(params).double(), engine=Engine(dtype=torch.float64))
        params, state = server(params, after.state.params - params, state)
    assert trained.state.params.tolist() == pytest.approx(params.tolist(), abs=1e-6)      # with_params goes through float32


@pytest.mark.parametrize(("make", "text"), [
    (lambda: SGD(0), "learning_rate of the server must be positive, got 0. SGD with 1.0 takes the average as it is."),
    (lambda: Adam(-1), "learning_rate of the server must be positive, got -1. SGD with 1.0 takes the average as it is."),
    (lambda: SGD(momentum=1), "momentum must be in [0, 1), got 1."),
    (lambda: Adam(first_decay=-0.1), "first_decay must be in [0, 1), got -0.1."),
    (lambda: Yogi(second_decay=1), "second_decay must be in [0, 1), got 1."),
    (lambda: Adagrad(adaptivity=0), "adaptivity must be positive, got 0. 1e-3 is usual."),
    (lambda: AveragedIterate(0),
     "contraction must be in (0, 1], got 0. It is 1 - learning_rate * weight_decay * local_steps / 2."),
    (lambda: AveragedIterate(1.5),
     "contraction must be in (0, 1], got 1.5. It is 1 - learning_rate * weight_decay * local_steps / 2."),
    (lambda: StepDecay(2, 10), "StepDecay needs a factor in (0, 1] and every >= 1, got 2 and 10."),
    (lambda: StepDecay(0.5, 0), "StepDecay needs a factor in (0, 1] and every >= 1, got 0.5 and 0."),
    (lambda: Cosine(0), "Cosine needs num_rounds >= 1 and final in [0, 1], got 0, 0."),
    (lambda: Cosine(10, 2), "Cosine needs num_rounds >= 1 and final in [0, 1], got 10, 2."),
    (lambda: StepDecay(0, 1), "StepDecay needs a factor in (0, 1] and every >= 1, got 0 and 1."),
    (lambda: Cosine(10, -0.5), "Cosine needs num_rounds >= 1 and final in [0, 1], got 10, -0.5."),
    (lambda: Stragglers(-0.1), "fraction of stragglers must be in [0, 1], got -0.1."),
    (lambda: Stragglers(1.5), "fraction of stragglers must be in [0, 1], got 1.5."),
    (lambda: Stragglers(50), "fraction of stragglers must be in [0, 1], got 50."),
])
def test_refusals(make, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()


def test_adaptive_alone_is_refused():
    with pytest.raises(TypeError, match=re.escape("Adaptive is what Adam, Yogi and Adagrad share. Use one of them.")):
        Adaptive()(torch.zeros(1), torch.zeros(1), Adaptive().start(torch.zeros(1)))


# Iterates

def kept_after(iterate, models, seed=0):
    """What an iterate hands out when these were w^(0), ..., w^(T)."""
    kept = None
    for round, model in enumerate(models):
        kept = iterate.keep(kept, model, round, seed)
    return iterate.result(kept, models[-1])


@given(st.integers(1, 40), st.floats(0.3, 1))
def test_the_averaged_iterate_is_its_explicit_formula(count, contraction):
    models = np.random.default_rng(count).normal(size=(count, 3))
    beta = contraction ** -(1.0 + np.arange(count))
    expected = (beta[:, None] * models).sum(0) / beta.sum()
    result = kept_after(AveragedIterate(contraction), [torch.from_numpy(m) for m in models])
    assert result.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_contraction_one_is_the_plain_average_and_long_runs_do_not_overflow():
    models = [torch.from_numpy(m) for m in np.random.default_rng(0).normal(size=(3000, 2))]
    assert kept_after(AveragedIterate(), models).tolist() == pytest.approx(torch.stack(models).mean(0).tolist())
    late = kept_after(AveragedIterate(0.5), models)      # beta_j = 2^(1+j): the explicit sum would overflow
    tail = sum(0.5 ** (1 + k) * models[-1 - k] for k in range(60))
    assert late.tolist() == pytest.approx(tail.tolist())


def test_the_averaged_iterate_does_not_change_the_models_it_saw():
    models = [torch.full((2,), float(k)) for k in range(4)]
    kept_after(AveragedIterate(), models)
    assert [m.tolist() for m in models] == [[float(k)] * 2 for k in range(4)]


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_random_iterate_is_uniform_over_all_models_but_the_last(rounds):
    models, seeds = [tensor([float(k)]) for k in range(rounds + 1)], 4000
    drawn = [int(kept_after(RandomIterate(), models, seed)) for seed in range(seeds)]
    counts = np.bincount(drawn, minlength=rounds + 1)
    assert counts[rounds] == 0                                                       # never w^(T)
    if rounds > 1:
        assert stats.chisquare(counts[:rounds]).pvalue > ERROR_RATE                  # error rate 1e-6


def test_without_a_round_every_iterate_is_the_start():
    for iterate in (LastIterate(), AveragedIterate(0.9), RandomIterate()):
        assert kept_after(iterate, [tensor([7.0])]).item() == 7.0


def seen_models(iterate, rounds=6, **more):
    """A run, and the models w^(0), ..., w^(T) it went through."""
    models = [torch.zeros(8, dtype=torch.float64)]
    algorithm = replace(fedavg(3, learning_rate=0.5), iterate=iterate)
    trained = train(algorithm, Task(SoftmaxRegression(3, 2)), clients_of(), rounds=rounds, engine=Engine(dtype=torch.float64),
                    on_round=lambda p: models.append(p.state.params.clone()) or False, **more)
    return trained, torch.stack(models)


def test_runs_hand_out_their_iterate_and_train_on_the_last():
    last, models = seen_models(LastIterate())
    averaged, again = seen_models(AveragedIterate(0.8))
    random, _ = seen_models(RandomIterate(), seed=0)
    assert torch.equal(models, again)      # what is handed out does not change what is trained
    beta = 0.8 ** -(1.0 + torch.arange(7, dtype=torch.float64))
    assert last.algorithm.result(last.state).tolist() == models[-1].tolist()
    expected = (beta[:, None] * models).sum(0) / beta.sum()
    assert averaged.algorithm.result(averaged.state).tolist() == pytest.approx(expected.tolist())
    assert averaged.module.linear.weight.flatten().tolist() == pytest.approx(expected[:6].tolist(), rel=1e-5)
    assert random.algorithm.result(random.state).tolist() in models[:-1].tolist()


def test_a_run_in_two_parts_keeps_its_iterate():
    population, task = clients_of(), Task(SoftmaxRegression(3, 2))
    for iterate in (AveragedIterate(0.8), RandomIterate()):
        algorithm = replace(fedavg(3, learning_rate=0.5), iterate=iterate)
        whole = train(algorithm, task, population, rounds=6, seed=2)
        half = train(algorithm, task, population, rounds=3, seed=2)
        rest = resume(half, population, rounds=3)
        assert torch.equal(algorithm.result(whole.state), algorithm.result(rest.state))


def test_each_member_of_a_family_has_its_own_iterate():
    population, task = clients_of(), Task(SoftmaxRegression(3, 2))
    members = [replace(fedavg(3, learning_rate=0.5), iterate=i) for i in (LastIterate(), AveragedIterate())]
    family = train(Family(tuple(members)), task, population, rounds=4)
    for member, module in zip(members, family.modules, strict=True):
        alone = train(member, task, population, rounds=4).module
        assert module.linear.weight.flatten().tolist() == pytest.approx(alone.linear.weight.flatten().tolist(), abs=1e-6)


# Schedules

def test_schedules_by_their_formulas():
    assert [Constant()(t) for t in (0, 7, 10**6)] == [1.0] * 3
    decay = StepDecay(0.5, 400)
    assert [decay(t) for t in (0, 399, 400, 799, 800, 1200)] == [1, 1, 0.5, 0.5, 0.25, 0.125]
    cosine = Cosine(100, final=0.2)
    assert [cosine(t) for t in (0, 50, 100, 1000)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert cosine(25) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert Cosine(10)(10) == pytest.approx(0)


@given(st.integers(1, 50), st.floats(0, 1))
def test_cosine_only_falls_and_stays_between_one_and_its_end(rounds, final):
    factors = [Cosine(rounds, final)(t) for t in range(rounds + 5)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx(1)
    assert factors[-1] == pytest.approx(final)


def test_a_schedule_multiplies_the_learning_rate_of_its_round():
    """With one full-gradient step everywhere, a scheduled run is rounds of runs at the scheduled rate."""
    population, task, schedule = clients_of(), Task(SoftmaxRegression(3, 2)), StepDecay(0.5, 2)
    base = replace(fedavg(learning_rate=0.8, batch_size=None), sample=Everyone())
    whole = train(replace(base, local=replace(base.local, schedule=schedule)), task, population, rounds=5, engine=Engine(dtype=torch.float64))
    state = base.initial_state(torch.zeros(8, dtype=torch.float64), 0)
    for t in range(5):
        slower = replace(base, local=replace(base.local, learning_rate=0.8 * 0.5 ** (t // 2)))
        state = resume(Trained(slower, task, state), population, rounds=1).state
    assert whole.state.params.tolist() == pytest.approx(state.params.tolist(), abs=1e-12)


def test_schedules_from_the_first_round_to_beyond_the_last():
    assert [StepDecay(0.5, 3)(t) for t in range(8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert [StepDecay(1, 1)(t) for t in (0, 9)] == [1, 1]
    assert [Cosine(4)(t) for t in range(6)] == pytest.approx([1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0, 0])
    assert [Cosine(2, 0.2)(t) for t in range(4)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert [Cosine(1, 1)(t) for t in range(3)] == [1, 1, 1]
    assert [Constant()(t) for t in (0, 100)] == [1, 1]
    local = LocalSGD(0.3, schedule=StepDecay(0.5, 1))
    assert [local.rate(t) for t in range(3)] == pytest.approx([0.3, 0.15, 0.075])


# Steps and batches

@pytest.mark.parametrize(("given", "text"), [
    ({"learning_rate": -0.1}, "learning_rate (gamma) must be positive and finite, got -0.1."),
    ({"learning_rate": 0.0}, "learning_rate (gamma) must be positive and finite, got 0."),
    ({"learning_rate": math.inf}, "learning_rate (gamma) must be positive and finite, got inf."),
    ({"momentum": 1.0}, "momentum must be in [0, 1), got 1."),
    ({"momentum": -0.1}, "momentum must be in [0, 1), got -0.1."),
    ({"learning_rate": 0.5, "weight_decay": 2.0}, "learning_rate * weight_decay must be in [0, 1), got 0.5 * 2. A step multiplies the model by one minus that."),
    ({"weight_decay": -0.1}, "learning_rate * weight_decay must be in [0, 1), got 0.1 * -0.1. A step multiplies the model by one minus that."),
    ({"batch_size": 0}, "batch_size must be a whole number, at least 1, got 0. None is the full gradient."),
    ({"epochs": 0}, "epochs must be a whole number, at least 1, got 0."),
    ({"epochs": 1.5}, "epochs must be a whole number, at least 1, got 1.5."),
    ({"local_steps": 0}, "local_steps must be a whole number, at least 1, got 0."),
    ({"epochs": 1, "local_steps": 1}, "epochs=1 and local_steps=1 both say how long to train. Give one."),
])
def test_local_settings_that_mean_nothing_are_refused(given, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        LocalSGD(**given)


def test_local_settings_at_their_ends_are_allowed():
    least = LocalSGD(1e-9, batch_size=1, epochs=1, momentum=0.0, weight_decay=0.0, penalty=Proximal(0.0))
    assert replace(least, epochs=None, local_steps=1).local_steps == 1
    LocalSGD(0.5, momentum=0.999, weight_decay=1.99)
    assert (Stragglers(0.0).drop, Stragglers(1.0).fraction) == (False, 1.0)
    default = LocalSGD()
    assert (default.learning_rate, default.batch_size, default.epochs, default.local_steps) == (0.1, 10, None, None)
    assert (default.momentum, default.weight_decay, default.penalty, default.schedule) == (0.0, 0.0, NoPenalty(), Constant())
    for bad in (-0.1, math.inf):
        with pytest.raises(ValueError, match=rf"^strength \(mu\) must be at least 0 and finite, got {bad:g}\. 0 is FedAvg\.$"):
            Proximal(bad)
    for name, bad in (("schedule", 0.5), ("penalty", 1), ("work", Stragglers), ("work", "all")):
        with pytest.raises(TypeError, match=f"^{name} must be a part, got"):
            LocalSGD(**{name: bad})


def uneven(*sizes) -> Population:
    """Clients of these sizes; every example is its own number, so that a batch tells which ones it holds."""
    numbers = torch.arange(sum(sizes), dtype=torch.float64)[:, None].expand(-1, 3)
    return Population.from_clients([(x, torch.zeros(len(x), dtype=torch.int64)) for x in numbers.split(sizes)])


@pytest.mark.parametrize("size", [1, 9, 10, 11, 20, 21])
def test_steps_are_epochs_of_as_many_batches_as_hold_a_clients_examples(size):
    few = asked(uneven(size))
    for local, expected in ((LocalSGD(), -(-size // 10)), (LocalSGD(epochs=3), 3 * -(-size // 10)), (LocalSGD(batch_size=None), 1),
                            (LocalSGD(epochs=3, batch_size=None), 3), (LocalSGD(local_steps=7), 7), (LocalSGD(batch_size=1), size)):
        assert local.steps(few).tolist() == [expected]


@pytest.mark.parametrize("sizes", [(7,), (9, 7, 4, 4, 1), (8, 8), (3, 2, 1)], ids=str)
@pytest.mark.parametrize(("batch_size", "epochs"), [(3, 1), (3, 3), (1, 2), (4, 2), (100, 3), (None, 2)])
def test_every_epoch_holds_each_example_once_in_batches_of_the_size_asked(sizes, batch_size, epochs):
    """Which examples a batch holds, how they are weighed, and that each epoch is shuffled anew, by the hash of its number."""
    few = asked(uneven(*sizes), round=2, seed=4)
    local = LocalSGD(batch_size=batch_size, epochs=epochs)
    starts = np.cumsum([0, *sizes])
    per_epoch = [1 if batch_size is None else -(-size // batch_size) for size in sizes]
    held = [[] for _ in sizes]
    for batch in batches(few, local.steps(few), torch.tensor(per_epoch), batch_size):
        assert batch.inputs.shape[:2] == batch.targets.shape == batch.weight.shape
        assert batch.active == len(batch.weight)
        assert batch.weight.shape[1] <= max(sizes)
        assert batch.weight.sum(1).tolist() == pytest.approx([1.0] * batch.active)
        for k in range(batch.active):
            there = batch.weight[k] > 0
            assert batch.weight[k][there].tolist() == pytest.approx([1 / int(there.sum())] * int(there.sum()))
            held[k].append((batch.inputs[k, there, 0] - starts[k]).int().tolist())
    for k, (size, own) in enumerate(zip(sizes, held, strict=True)):
        assert len(own) == epochs * per_epoch[k]
        for epoch in range(epochs):
            parts = own[epoch * per_epoch[k]:(epoch + 1) * per_epoch[k]]
            assert [len(part) for part in parts] == ([size] if batch_size is None else [min(batch_size, size - low) for low in range(0, size, batch_size)])
            order = [example for part in parts for example in part]
            assert sorted(order) == list(range(size))
            bits = hash_bits(4, "batches", 2, few.shard.population.key[k:k + 1], epoch)
            assert batch_size is None or order == random_permutations(bits, torch.tensor([size]))[0].tolist()


def test_how_clients_are_stacked_changes_neither_steps_nor_known_gradients():
    population, local = uneven(9, 3, 6, 1), LocalSGD(0.01, batch_size=None, epochs=3, momentum=0.5, weight_decay=0.2, penalty=Proximal(0.3))
    whole = asked(population)
    _, first = local.losses_and_first_gradients(whole)
    expected = local.updates(whole)
    assert torch.allclose(local.updates(whole, first=first), expected, atol=1e-12)
    assert torch.allclose(replace(local, epochs=1).updates(whole, first=first), replace(local, epochs=1).updates(whole), atol=1e-12)
    for stack in (1, 2, 3):
        few = asked(population)
        few.kernel.stack = stack
        assert torch.allclose(local.updates(few), expected, atol=1e-12)
        assert torch.allclose(local.updates(few, first=first), expected, atol=1e-12)


def test_dropout_is_the_clients_own_whoever_trained_before():
    """One client after another: each draws from its own hash, not from where the generator was left."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = Task(torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 2)).double())
        kernel = kernel_for(task, torch.device("cpu"), torch.float64)
        population, params = clients_of(3, 4), task.params()[None]
        shard = Shard(population, torch.ones(3), Broadcast(0, 0, params), kernel, params)
        assert kernel.stack == 1
        together = LocalSGD(0.1, batch_size=2).updates(shard.clients())
        torch.manual_seed(5)
        alone = torch.cat([LocalSGD(0.1, batch_size=2).updates(shard.clients(k, k + 1)) for k in (2, 1, 0)])
    assert torch.equal(together, alone.flip(0))
    assert not torch.equal(together[0], together[1])


# Stragglers

def asked(population, round=0, seed=0):
    """All clients of a population, in a round, ready to be asked how much they do."""
    task = Task(SoftmaxRegression(3, 2))
    kernel = kernel_for(task, torch.device("cpu"), torch.float64)
    params = task.params().double()[None]
    return Shard(population, torch.ones(len(population)), Broadcast(round, seed, params), kernel, params).clients()


def test_the_fraction_of_stragglers_is_the_one_asked_and_each_round_draws_anew():
    population, fraction, rounds = clients_of(200, 1), 0.3, 20
    local = LocalSGD(local_steps=7, work=Stragglers(fraction, drop=True))
    late = torch.stack([local.steps(asked(population, r)) == 0 for r in range(rounds)])      # (rounds, clients)
    total = int(late.sum())
    assert stats.binomtest(total, late.numel(), fraction).pvalue > ERROR_RATE
    by_client = late.sum(0).numpy()      # Binomial(20, 0.3) for each client if rounds are independent
    cells = np.clip(by_client, 3, 9)
    expected = stats.binom.pmf(np.arange(4, 9), rounds, fraction)
    expected = np.array([stats.binom.cdf(3, rounds, fraction), *expected, stats.binom.sf(8, rounds, fraction)])
    assert stats.chisquare(np.bincount(cells, minlength=10)[3:], 200 * expected).pvalue > ERROR_RATE


@pytest.mark.parametrize(("local", "possible"), [
    (LocalSGD(epochs=4, batch_size=2), [3, 6, 9, 12]),            # five examples: three batches an epoch, whole epochs
    (LocalSGD(epochs=1, batch_size=2), [1, 2, 3]),                # one epoch: some of its batches
    (LocalSGD(epochs=3, batch_size=None), [1, 2, 3]),
    (LocalSGD(local_steps=7, batch_size=2), [3, 6, 7]),           # epochs of three, and what is left of the work
    (LocalSGD(local_steps=2, batch_size=2), [1, 2]),
    (LocalSGD(epochs=1, batch_size=None), [1]),                   # nothing less than one step
], ids=str)
def test_partial_work_is_uniform_from_one_piece_to_all_of_it(local, possible):
    population = clients_of(1200, 5)
    steps = replace(local, work=Stragglers(1.0)).steps(asked(population))
    counts = [int((steps == s).sum()) for s in possible]
    assert sum(counts) == 1200
    if len(possible) > 1:
        assert stats.chisquare(counts).pvalue > ERROR_RATE


def test_who_is_late_does_not_depend_on_dropping_them():
    population = clients_of(50)
    full = LocalSGD(epochs=10, batch_size=2)
    kept = replace(full, work=Stragglers(0.5)).steps(asked(population))
    dropped = replace(full, work=Stragglers(0.5, drop=True)).steps(asked(population))
    everything = full.steps(asked(population))
    assert full.work == FullWork()
    assert everything.tolist() == [30] * 50
    assert bool(((dropped == 0) | (dropped == 30)).all())
    assert bool((kept[dropped == 30] == 30).all())
    assert bool(((kept[dropped == 0] >= 3) & (kept[dropped == 0] <= 30)).all())


def test_dropped_stragglers_are_left_out_of_the_round():
    population, task = clients_of(8), Task(SoftmaxRegression(3, 2))
    base = replace(fedavg(learning_rate=0.5, batch_size=2), sample=Everyone())
    dropping = replace(base, local=replace(base.local, work=Stragglers(0.5, drop=True)))
    there = dropping.local.steps(asked(population)) > 0
    assert 0 < int(there.sum()) < 8
    views = []
    run = train(dropping, task, population, rounds=1, engine=Engine(dtype=torch.float64), on_round=lambda p: views.append(p.view) or False)
    without = train(base, task, population.select(there), rounds=1, engine=Engine(dtype=torch.float64))
    assert run.state.params.tolist() == pytest.approx(without.state.params.tolist(), abs=1e-12)
    assert views[0].num_contributors == int(there.sum())


def test_kept_stragglers_contribute_the_steps_they_did():
    """A round with partial work is the mean of the updates of clients that were each asked for just so many steps."""
    population, task = clients_of(8), Task(SoftmaxRegression(3, 2))
    local = LocalSGD(0.5, batch_size=2, epochs=3)
    partial = replace(local, work=Stragglers(0.7))
    steps = partial.steps(asked(population))
    assert len(set(steps.tolist())) > 1
    run = train(replace(fedavg(), sample=Everyone(), local=partial), task, population, rounds=1, engine=Engine(dtype=torch.float64))
    alone = []
    for k, count in enumerate(steps.tolist()):
        alone.append(replace(local, epochs=None, local_steps=count).updates(asked(population.select([k])))[0])
    assert run.state.params.tolist() == pytest.approx(torch.stack(alone).mean(0).tolist(), abs=1e-12)


@pytest.mark.parametrize("drop", [False, True])
def test_no_stragglers_is_full_work_to_the_bit(drop):
    population, task = clients_of(), Task(SoftmaxRegression(3, 2))
    full = fedavg(4, learning_rate=0.5, batch_size=2, epochs=2)
    none = replace(full, local=replace(full.local, work=Stragglers(0.0, drop)))
    runs = [train(a, task, population, rounds=5).state.params for a in (full, none)]
    assert torch.equal(*runs)


def test_a_round_of_dropped_stragglers_only_keeps_the_model():
    algorithm = fedavg(4, learning_rate=0.5, work=Stragglers(1.0, drop=True))
    with pytest.warns(fedtail.NoContributionWarning):
        trained = train(algorithm, Task(SoftmaxRegression(3, 2)), clients_of(), rounds=3)
    assert trained.state.params.tolist() == [0.0] * 8
    assert trained.state.round == 3
