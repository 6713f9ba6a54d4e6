"""FedProx and its relatives: adaptive mu, FedDane, stopping by inexactness, dissimilarity, and the decrease that the theory states."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import tomli_w
import torch
from torch import nn

import fedtail
from fedtail import (
    AdaptiveProximal,
    ByMass,
    Dane,
    Engine,
    Everyone,
    Family,
    FederatedInexactness,
    GradientDissimilarity,
    IntegerChannel,
    LocalSGD,
    Poisson,
    Population,
    Proximal,
    SecureChannel,
    Stragglers,
    Superquantile,
    Task,
    UntilInexact,
    feddane,
    gradient_dissimilarity,
    inexactness,
    resume,
    theory,
    train,
)
from fedtail.channel.plain import Plain
from fedtail.draws import hash_bits, random_permutations, uniform_numbers
from fedtail.engine import blocks
from fedtail.engine.local_fleet import LocalFleet
from fedtail.experiment import Source, read_experiment
from fedtail.experiment.experiment import build_experiments
from fedtail.models import SoftmaxRegression
from fedtail.parts import AggregatorDeclaration, Part, RoundStart, Train
from fedtail.runs.checkpoint import Checkpoints

from remote_cases import Sites, params_of

WIDE = torch.float64
CHANNELS = {"integers": IntegerChannel(), "unmasked": SecureChannel(5, minimum_contributors=2, masks="none"), "masked": SecureChannel(5, minimum_contributors=2)}


def people(clients=7, seed=0, classes=3) -> Population:
    """Clients of different sizes, from 2 examples to 10."""
    random = torch.Generator().manual_seed(seed)
    sizes = [2 + (5 * k + 3) % 9 for k in range(clients)]
    return Population.from_clients([(torch.randn(n, 4, dtype=WIDE, generator=random) + k / 4, torch.randint(0, classes, (n,), generator=random))
                                    for k, n in enumerate(sizes)])


def softmax() -> Task:
    """A linear classifier away from zero."""
    task, random = Task(SoftmaxRegression(4, 3).to(WIDE)), torch.Generator().manual_seed(1)
    return replace(task, module=task.with_params(torch.randn(15, dtype=WIDE, generator=random)))


def tanh_network() -> Task:
    """A network without a closed form, with dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Task(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)).to(WIDE))


THREE, START = people(3), softmax().params()
DATA = [THREE.client(k) for k in range(3)]


def loss(params: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a linear classifier, the mean cross entropy over the examples of a client."""
    return nn.functional.cross_entropy(inputs @ params[:12].view(3, 4).T + params[12:], targets)


def gradient(params: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of `loss`, by autograd."""
    w = params.clone().requires_grad_()
    return torch.autograd.grad(loss(w, inputs, targets), w)[0]


def mean_by_mass(values, mass) -> torch.Tensor:
    return sum(m * v for m, v in zip(mass.tolist(), values, strict=True)) / float(mass.sum())


def everyone(local: LocalSGD) -> fedtail.FederatedAlgorithm:
    return replace(fedtail.fedavg(), sample=Everyone(), local=local)


# adaptive mu

def adaptive_by_hand(rounds: int, start: float, step: float, patience: int, rate: float) -> tuple[torch.Tensor, list[float]]:
    """Full steps with mu by the rule of figure 3.3, one client after another; the model, and mu in each round."""
    w, mu, before, falls, used = START.clone(), start, None, 0, []
    for _ in range(rounds):
        now = float(mean_by_mass([torch.tensor(float(loss(w, *one)), dtype=torch.float32).double() for one in DATA], THREE.mass))
        if before is not None and now > before:
            mu, falls = mu + step, 0
        elif before is not None and now < before:
            falls += 1
            if falls == patience:
                mu, falls = max(0.0, mu - step), 0
        before = now
        used.append(mu)
        new = []
        for one in DATA:
            v = w.clone()
            for _ in range(4):
                v = v - rate * (gradient(v, *one) + mu * (v - w))
            new.append(v)
        w = mean_by_mass(new, THREE.mass)
    return w, used


@pytest.mark.parametrize(("start", "step", "patience", "rate"), [(0.25, 0.1, 2, 0.3), (0.0, 0.2, 5, 2.5), (1.0, 0.4, 1, 0.5)])
def test_an_adaptive_strength_follows_the_loss_as_a_loop_by_hand(start, step, patience, rate):
    used = []
    method = everyone(LocalSGD(rate, batch_size=None, local_steps=4, penalty=AdaptiveProximal(start, step, patience)))
    trained = train(method, softmax(), THREE, rounds=14, on_round=lambda p: used.append(float(p.state.part_state("local")[0])))
    expected, by_hand = adaptive_by_hand(14, start, step, patience, rate)
    assert used == pytest.approx(by_hand, abs=1e-12)
    assert len(set(by_hand)) > 2                       # the strength moved
    assert torch.allclose(trained.state.params, expected, rtol=1e-10, atol=1e-10)


def test_the_strength_grows_where_the_loss_rises_and_shrinks_to_zero_where_it_falls():
    part = AdaptiveProximal(0.15, step=0.1, patience=2)
    state, seen = (0.15, math.nan, 0.0), []
    for now in (1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.4, 0.5, 0.5):
        state = part.after_loss(*state, now)
        seen.append(round(state[0], 12))
    #                 1.0   0.9   0.8   0.7   0.6  0.6  0.5  0.4  0.5  0.5: two falls from 0.8; to 0 and not below; equal is no fall
    assert seen == [0.15, 0.15, 0.05, 0.05, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1]
    assert part.after_loss(0.0, 0.4, 1.0, 0.3) == (0.0, 0.3, 0.0)


def test_the_loss_is_that_of_the_cohort_and_its_sum_is_on_the_ledger():
    method = replace(fedtail.fedavg(4, learning_rate=0.1, penalty=AdaptiveProximal()))
    views = []
    trained = train(method, softmax(), people(), rounds=1, on_round=lambda p: views.append(p.view.sampled.tolist()))
    losses = [float(loss(START, *people().client(k))) for k in views[0]]
    assert float(trained.state.part_state("local")[1]) == pytest.approx(float(mean_by_mass(losses, people().mass[views[0]])), rel=1e-6)
    (event, _), = trained.ledger.rounds
    assert [release.what for release in event.releases] == ["what CohortLoss asks about the losses", "the updates, by WeightedMean"]
    assert method.releases(15) == event.releases


def test_the_loss_that_is_followed_is_the_one_that_clients_minimise():
    """With a risk over examples, the numbers that risks over clients see too."""
    tilted = LocalSGD(0.1, penalty=AdaptiveProximal(), example_risk=fedtail.Tilted(2.0))
    found = [float(train(everyone(replace(tilted, example_risk=risk)), softmax(), people(), rounds=1).state.part_state("local")[1])
             for risk in (None, fedtail.Tilted(2.0))]
    single = [nn.functional.cross_entropy(x @ START[:12].view(3, 4).T + START[12:], y, reduction="none") for x, y in map(people().client, range(7))]
    assert found == pytest.approx([float(mean_by_mass([one.mean() for one in single], people().mass)),
                                   float(mean_by_mass([fedtail.Tilted(2.0).value(one) for one in single], people().mass))], rel=1e-6)


def test_a_strength_stays_as_it_was_where_no_client_has_a_finite_loss():
    broken = Population.from_clients([(x * 1e200, y) for x, y in DATA])
    with pytest.warns(fedtail.NoContributionWarning):
        trained = train(everyone(LocalSGD(penalty=AdaptiveProximal(0.5))), softmax(), broken, rounds=2)
    assert trained.state.part_state("local")[0] == 0.5


def test_fine_tuning_without_a_server_takes_the_first_strength_and_refuses_a_gradient_that_nobody_asked_for():
    found = [fedtail.finetune(softmax().module, people(), LocalSGD(0.3, penalty=penalty), softmax()).after.loss.values for penalty in (AdaptiveProximal(0.7), Proximal(0.7))]
    assert torch.equal(*found)
    with pytest.raises(TypeError, match=r"^Dane needs the mean gradient of other clients.*Use Proximal\(0\.7\)\.$"):
        fedtail.finetune(softmax().module, people(), LocalSGD(0.3, penalty=Dane(0.7)), softmax())


def test_a_run_records_the_strength_of_each_round(tmp_path):
    from fedtail.runs.measurements import round_line
    from fedtail.runs.run_checks import check_round
    lines = []
    method = Family((everyone(LocalSGD(2.5, batch_size=None, penalty=AdaptiveProximal(0.1))), everyone(LocalSGD(0.1))))
    trained = train(method, softmax(), people(), rounds=3, on_round=lambda p: lines.append(round_line(p.trained, p.view, 7)))
    assert [sorted(line["members"][0]["local"]) for line in lines] == [["loss", "strength"]] * 3
    assert lines[-1]["members"][0]["local"]["strength"] == trained.state[0].part_state("local")[0]
    assert "local" not in lines[0]["members"][1]
    check_round(tmp_path, lines[0], 7)
    with pytest.raises(ValueError, match="members cannot be"):
        check_round(tmp_path, {**lines[0], "members": [{"counted": None, "local": {"strength": "much"}}]}, 7)


# FedDane

def dane_by_hand(rounds: int, drawn) -> torch.Tensor:
    """The formula of FedDane on three clients; `drawn(round)` are those that give the gradient, None: all, and all train."""
    w, mass = START.clone(), THREE.mass
    for r in range(rounds):
        own = [gradient(w, *one) for one in DATA]
        giving = drawn(r)
        mean = mean_by_mass([own[k] for k in giving or range(3)], mass[giving or [0, 1, 2]])
        training, new = [k for k in range(3) if giving is None or k not in giving], []
        for k in training:
            v = w.clone()
            for _ in range(3):
                v = v - 0.1 * (gradient(v, *DATA[k]) + mean - own[k] + 0.5 * (v - w))
            new.append(v)
        w = mean_by_mass(new, mass[training])
    return w


@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("kernel", ["closed", "stacked", "module"])
def test_feddane_is_its_formula_on_three_clients(count, kernel):
    def drawn(r):
        bits = hash_bits(5, "gradient", r, THREE.key)
        return None if count is None else sorted(bits.argsort()[:count].tolist())
    views = []
    trained = train(feddane(0.5, 3, count, learning_rate=0.1, batch_size=None, local_steps=3), softmax(), THREE, rounds=4, seed=5,
                    engine=Engine(kernel=kernel), on_round=lambda p: views.append(p.view.contributors_of().tolist()))
    assert torch.allclose(trained.state.params, dane_by_hand(4, drawn), rtol=1e-10, atol=1e-10)
    assert views == [[k for k in range(3) if count is None or k not in drawn(r)] for r in range(4)]      # the others train
    assert trained.failed == 0                         # whoever does not train has not failed
    (event, rounds), = trained.ledger.rounds
    assert [release.what for release in event.releases] == ["the updates, by WeightedMean"] * 2      # the gradient is on the ledger too
    assert (rounds, feddane(0.5, 3, count).releases(15)) == (4, event.releases)


def test_the_correction_of_a_cohort_of_equal_clients_is_nothing():
    """Where all clients hold the same data the mean gradient is everybody's own: FedDane is FedProx."""
    same = Population.from_clients([DATA[2]] * 5)
    dane, prox = (train(method, softmax(), same, rounds=3) for method in (feddane(0.3, 5, 2, batch_size=None), fedtail.fedprox(0.3, 5, batch_size=None)))
    assert torch.allclose(dane.state.params, prox.state.params, rtol=1e-12, atol=1e-13)


def test_clients_that_give_no_gradient_to_the_tail_leave_the_proximal_term():
    """A gradient to which no client of the tail contributes: those who train do so without a correction."""
    method = replace(feddane(0.5, 3, 1, learning_rate=0.1, batch_size=None, local_steps=3), risk=fedtail.Worst())
    worst = max(range(3), key=lambda k: float(loss(START, *DATA[k])))
    seed = next(s for s in range(50) if int(hash_bits(s, "gradient", 0, THREE.key).argmin()) != worst)
    v = START.clone()
    for _ in range(3):
        v = v - 0.1 * (gradient(v, *DATA[worst]) + 0.5 * (v - START))
    trained = train(method, softmax(), THREE, rounds=1, seed=seed)
    assert torch.allclose(trained.state.params, v, rtol=1e-10, atol=1e-12)


def test_feddane_where_stragglers_are_dropped_and_rounds_are_small():
    """Gradients come from stragglers too; a Poisson cohort with nobody left to train is skipped."""
    dropping = feddane(0.5, 7, 3, work=Stragglers(0.5, drop=True))
    counts = []
    train(dropping, softmax(), people(), rounds=8, on_round=lambda p: counts.append(p.view.num_contributors))
    assert max(counts) <= 4
    assert len(set(counts)) > 1
    method, sizes = replace(feddane(0.5, 7, 3), sample=Poisson(0.5)), []
    train(method, softmax(), people(), rounds=20, on_round=lambda p: sizes.append((p.view.cohort_size, p.view.num_contributors)))
    drawn = [len(method.sample(people(), 0, r).ids) for r in range(20)]
    assert min(drawn) <= 3 < max(drawn)
    assert [trained for _, trained in sizes] == [max(0, size - 3) for size in drawn]


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Dane(-0.1), "strength (mu) must be at least 0 and finite, got -0.1. 0 is FedAvg."),
    (lambda: Dane(0.1, 0), "gradient_clients must be a whole number, at least 1, got 0. None: all clients of the cohort give their gradients, and train."),
    (lambda: AdaptiveProximal(-1.0), "start (the first mu) must be at least 0 and finite, got -1. 0 is FedAvg."),
    (lambda: AdaptiveProximal(step=0.0), "step must be positive and finite, got 0."),
    (lambda: AdaptiveProximal(loss_bound=math.inf), "loss_bound must be positive and finite, got inf."),
    (lambda: AdaptiveProximal(patience=0), "patience must be a whole number of rounds, at least 1, got 0."),
    (lambda: LocalSGD(penalty=Dane(0.1), example_risk=fedtail.Tilted(1.0)),
     "Dane corrects the gradient of the mean loss, and with example_risk clients minimise another. Leave one of them out, or use Proximal."),
    (lambda: UntilInexact(LocalSGD(), 1.5), "gamma must be in [0, 1], got 1.5. 0 is an exact solution, 1 none at all."),
    (lambda: UntilInexact(LocalSGD(), 0.5, 0), "every must be a whole number of steps, at least 1, got 0."),
    (lambda: UntilInexact(LocalSGD(momentum=0.9), 0.5), "momentum=0.9 is lost where training stops to be checked. Write momentum=0."),
    (lambda: FederatedInexactness(LocalSGD(), every=0), "every must be at least 1 round, got 0."),
    (lambda: theory.fedprox_decrease(1.0, 0.0, 1.0, 5, 1.0, 1.0), "strength (mu) = 1 must be above nonconvexity (L_-) = 1"),
    (lambda: theory.fedprox_decrease(1.0, 1.1, 1.0, 5, 1.0), "inexactness (gamma) must be in [0, 1], got 1.1"),
    (lambda: theory.fedprox_decrease(1.0, 0.0, 0.9, 5, 1.0), "dissimilarity (B) must be at least 1, and finite, got 0.9"),
    (lambda: theory.fedprox_decrease(1.0, 0.0, 1.0, 0, 1.0), "cohort_size (K) must be at least 1, got 0"),
    (lambda: theory.dissimilarity_bound(-1.0, 1.0), "variance (sigma^2) must be zero or more, and finite, got -1"),
    (lambda: GradientDissimilarity(every=0), "every must be at least 1 round, got 0."),
    (lambda: GradientDissimilarity(gradient_bound=-1.0), "gradient_bound must be positive and finite, got -1."),
])
def test_numbers_that_mean_nothing_are_refused(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(text)


# stopping by inexactness

def until_inexact_by_hand(batch_size: int | None, gamma: float, every: int, most: int, mu: float, rounds: int, seed: int) -> tuple[torch.Tensor, list[list[int]]]:
    """SGD on three clients, each stopped by itself; the model, and how many steps each client took in each round."""
    w, taken = START.clone(), []
    for r in range(rounds):
        new, counts = [], []
        for k, (x, y) in enumerate(DATA):
            v, steps, goal = w.clone(), 0, gamma * gradient(w, x, y).norm()
            while steps < most:
                rows = torch.arange(len(y)) if batch_size is None else batch_rows(k, len(y), batch_size, steps, r, seed)
                v = v - 0.2 * (gradient(v, x[rows], y[rows]) + mu * (v - w))
                steps += 1
                if steps % every == 0 and (gradient(v, x, y) + mu * (v - w)).norm() <= goal:
                    break
            new.append(v)
            counts.append(steps)
        taken.append(counts)
        w = mean_by_mass(new, THREE.mass)
    return w, taken


def batch_rows(client: int, size: int, batch_size: int, step: int, round: int, seed: int) -> torch.Tensor:
    """The examples of a client's mini-batch: a shuffle by its own stream for each epoch."""
    epoch, turn = divmod(step, -(-size // batch_size))
    bits = hash_bits(seed, "batches", round, THREE.key[client : client + 1], epoch)
    return random_permutations(bits, torch.tensor([size]), size)[0, turn * batch_size : (turn + 1) * batch_size]


@pytest.mark.parametrize("kernel", ["closed", "stacked", "module"])
@pytest.mark.parametrize(("batch_size", "gamma", "every"), [(None, 0.3, 1), (None, 0.1, 4), (3, 0.4, 1), (3, 0.5, 3)])
def test_clients_stop_at_the_first_check_that_is_inexact_enough(batch_size, gamma, every, kernel):
    local = LocalSGD(0.2, batch_size=batch_size, local_steps=25, penalty=Proximal(0.5))
    trained = train(everyone(UntilInexact(local, gamma, every)), softmax(), THREE, rounds=3, seed=4, engine=Engine(kernel=kernel))
    expected, taken = until_inexact_by_hand(batch_size, gamma, every, 25, 0.5, 3, 4)
    assert torch.allclose(trained.state.params, expected, rtol=1e-10, atol=1e-10)
    assert len({count for counts in taken for count in counts}) > 1
    assert min(map(min, taken)) < 25                   # somebody stopped


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_goal_that_is_never_reached_is_training_as_without_it(batch_size):
    """Epochs and stragglers give clients different numbers of steps; batches go on where the last piece ended."""
    local = LocalSGD(0.2, batch_size=batch_size, epochs=4, penalty=Proximal(0.5), work=Stragglers(0.5), weight_decay=0.1)
    plain = train(everyone(local), softmax(), people(), rounds=3).state.params
    for every in (1, 2, 5):
        assert torch.allclose(train(everyone(UntilInexact(local, 0.0, every)), softmax(), people(), rounds=3).state.params, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("example_risk", [None, fedtail.Tilted(1.0)])
def test_a_client_that_stopped_is_as_exact_as_it_was_to_be(example_risk):
    """Measured by another function than the one that stops: the gradient of weighted examples, decay and penalty, by autograd."""
    local = LocalSGD(0.3, batch_size=None, local_steps=200, penalty=Proximal(0.7), weight_decay=0.05, example_risk=example_risk)
    def norm(params, x, y, received):
        v = params.clone().requires_grad_()
        single = nn.functional.cross_entropy(x @ v[:12].view(3, 4).T + v[12:], y, reduction="none")
        own = single.mean() if example_risk is None else example_risk.value(single)
        return torch.autograd.grad(own + 0.025 * v @ v + 0.35 * (v - received) @ (v - received), v)[0].norm()
    for k, (x, y) in enumerate(DATA):
        alone = THREE.select([k])
        end = train(everyone(UntilInexact(local, 0.2)), softmax(), alone, rounds=1).state.params
        ratio = norm(end, x, y, START) / norm(START, x, y, START)
        assert 0.1 < ratio <= 0.2
        found = inexactness(softmax().module, alone, UntilInexact(local, 0.2), softmax()).values
        assert float(found) == pytest.approx(float(ratio), rel=1e-9)


def test_inexactness_is_measured_for_every_client_and_by_sums():
    population, task = people(), softmax()
    local = LocalSGD(0.2, batch_size=3, local_steps=4, penalty=Proximal(0.8), work=Stragglers(0.4, drop=True))
    found = [inexactness(task.module, population, local, task, seed=3, engine=Engine(workers=workers, kernel=kernel)).values
             for workers, kernel in ((1, "closed"), (3, "closed"), (1, "module"))]
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], rtol=1e-9)
    one = train(replace(everyone(local), risk=fedtail.Mean()), task, population, rounds=1, seed=3)
    late = [k for k in range(7) if float(uniform_numbers(hash_bits(3, "straggler", 0, population.key[k : k + 1]))) < 0.4]
    assert 0 < len(late) < 7
    assert found[0][late].tolist() == [1.0] * len(late)      # who takes no step is where it was
    assert all(value != 1 for value in found[0][[k for k in range(7) if k not in late]].tolist())
    again = inexactness(replace(one, state=replace(one.state, round=0, params=START)), population, local).values
    assert torch.equal(again, found[0])                # a run's own seed and round
    method = everyone(LocalSGD(0.1))
    by_sums = train(method, task, population, rounds=0, seed=3, evaluation=FederatedInexactness(local)).evaluation[0]["inexactness"]
    assert by_sums.mean() == pytest.approx(float(found[0].clamp(max=1).mean()), rel=1e-6)
    nodes = train(method, task, fleet=Sites(3, population, task).fleet(), rounds=0, seed=3, channel=IntegerChannel(), evaluation=FederatedInexactness(local))
    assert nodes.evaluation[0]["inexactness"].mean() == pytest.approx(by_sums.mean(), rel=1e-9)
    noisy = train(method, task, population, rounds=0, evaluation=FederatedInexactness(local, noise=fedtail.GaussianNoise(5.0)))
    assert noisy.ledger.guarantee(1e-2).epsilon < 3


def test_a_client_without_a_gradient_is_solved_already():
    line = Task(nn.Linear(1, 1, bias=False).to(WIDE), loss=lambda o, y: 0.5 * (o[:, 0] - y) ** 2, error=lambda o, y: (o[:, 0] - y) ** 2)
    line = replace(line, module=line.with_params(torch.zeros(1, dtype=WIDE)))
    two = Population.from_clients([(torch.ones(1, 1, dtype=WIDE), torch.tensor([y], dtype=WIDE)) for y in (0.0, 1.0)])
    found = inexactness(line.module, two, LocalSGD(0.5, batch_size=None, local_steps=2, penalty=Proximal(1.0)), line)
    assert found.values.tolist() == [0.0, 0.0]         # 1 - 0.5 (1 + 1) = 0: one step solves the other
    half = inexactness(line.module, two, LocalSGD(0.25, batch_size=None, local_steps=2, penalty=Proximal(1.0)), line)
    assert half.values.tolist() == [0.0, 0.25]


# theory

def decrease_by_the_proof(mu, gamma, b, k, smooth, below):
    """rho put together from the inequalities of the proof, (3.7), (3.9), (3.10), (3.13) to (3.15), for |grad f| = 1."""
    bar = mu - below
    moved = b * (1 + gamma) / bar                                        # |mean w_k - w|, (3.7)
    other = (smooth * (1 + gamma) / bar + gamma) * b                     # |M|, (3.9)
    mean_model = -1 / mu + other / mu + smooth / 2 * moved**2            # f(mean w_k) - f(w), (3.10)
    away = math.sqrt(2 / k) * b * (1 + gamma) / bar                      # E |w_next - mean w_k|, (3.14), (3.15)
    return -(mean_model + (1 + 2 * smooth * moved) * away + smooth * away**2)


@pytest.mark.parametrize(("mu", "gamma", "b", "k", "smooth", "below"), [(24.0, 0.0, 2.0, 64, 1.0, 0.0), (3.0, 0.2, 1.1, 10, 0.4, 0.5), (50.0, 0.05, 1.0, 5, 7.0, 2.0)])
def test_the_decrease_of_a_round_is_that_of_its_proof(mu, gamma, b, k, smooth, below):
    assert theory.fedprox_decrease(mu, gamma, b, k, smooth, below) == pytest.approx(decrease_by_the_proof(mu, gamma, b, k, smooth, below), rel=1e-12)


@pytest.mark.parametrize(("gamma", "curvatures"), [(0.0, (0.5, 1.0, 1.5)), (0.05, (0.5, 1.0, 1.5)), (0.02, (-0.1, 1.0, 1.2))])
def test_a_round_on_quadratic_clients_decreases_the_expected_loss_by_what_is_said(gamma, curvatures):
    """F_k(w) = w H_k w / 2 + b_k w in the plane; the expectation over all cohorts of K draws by mass, one by one."""
    random = torch.Generator().manual_seed(3)
    mass, mu, cohort_size = torch.tensor([0.5, 0.3, 0.2], dtype=WIDE), 12.0, 40
    turns = [torch.linalg.qr(torch.randn(2, 2, dtype=WIDE, generator=random))[0] for _ in curvatures]
    hessians = [turn @ torch.diag(torch.tensor([c, 0.7], dtype=WIDE)) @ turn.T for turn, c in zip(turns, curvatures, strict=True)]
    slopes = 1.0 + 0.05 * torch.randn(3, 2, dtype=WIDE, generator=random)
    w = torch.tensor([1.0, -2.0], dtype=WIDE)
    own = torch.stack([h @ w + b for h, b in zip(hessians, slopes, strict=True)])
    mean = mass @ own
    dissimilarity = math.sqrt(float(mass @ own.square().sum(1)) / float(mean @ mean))
    models = []
    for h, b, g in zip(hessians, slopes, own, strict=True):
        inside = h + mu * torch.eye(2, dtype=WIDE)
        error = torch.randn(2, dtype=WIDE, generator=random)
        models.append(torch.linalg.solve(inside, mu * w - b + gamma * g.norm() * error / error.norm()))      # |grad h| is gamma |grad F_k(w)|
    def value(v):
        return float(sum(m * (v @ h @ v / 2 + b @ v) for m, h, b in zip(mass.tolist(), hessians, slopes, strict=True)))
    expected, total = 0.0, 0.0
    for i in range(cohort_size + 1):
        for j in range(cohort_size + 1 - i):
            counts = (i, j, cohort_size - i - j)
            chance = math.comb(cohort_size, i) * math.comb(cohort_size - i, j) * math.prod(p**c for p, c in zip(mass.tolist(), counts, strict=True))
            expected += chance * value(sum(c * v for c, v in zip(counts, models, strict=True)) / cohort_size)
            total += chance
    assert total == pytest.approx(1.0, rel=1e-12)
    rho = theory.fedprox_decrease(mu, gamma, dissimilarity, cohort_size, 1.5, max(0.0, -min(curvatures)))
    assert rho > 0
    fallen = (value(w) - expected) / float(mean @ mean)
    assert rho <= fallen <= (1 + gamma * dissimilarity) / mu * 1.05      # and no more than a step of length 1 / mu gives


def test_a_positive_decrease_needs_more_clients_than_the_thesis_prints():
    """B < sqrt(K / 2): at the corner of Corollary 1, B = sqrt(K) / 2 and mu = 6 L B^2, rho is below 1 / (24 L B^2)."""
    for b, k, most in ((5.0, 100, 0.51), (3.0, 36, 0.27), (50.0, 10_000, 0.81)):
        assert theory.fedprox_decrease(6 * b**2, 0.0, b, k, 1.0) < most / (24 * b**2)
        with pytest.raises(ValueError, match=rf"^dissimilarity \(B\) must be at most sqrt\(cohort_size / 8\) = {math.sqrt(k / 8):.4g}, got"):
            theory.convex_proximal_strength(b, k, 1.0)
        choice = theory.convex_proximal_strength(b, math.ceil(8 * b**2), 1.0)
        assert choice.decrease >= 0.97 / (24 * b**2)
        for mu in (1.0, 10.0, 1e3, 1e6, 1e9):
            assert theory.fedprox_decrease(mu, 0.0, b, math.floor(2 * b**2), 1.0) < 0      # sqrt(K / 2) = B: for no mu
            assert theory.fedprox_decrease(mu, 1 / b, b, 10**9, 1.0) < 0                   # gamma B = 1
    assert theory.fedprox_decrease(1e6, 0.0, 5.0, 60, 1.0) > 0


def test_the_bound_by_the_variance_is_above_the_dissimilarity_and_reached_at_its_gradient():
    found = gradient_dissimilarity(softmax().module, people(), softmax())
    assert theory.dissimilarity_bound(found.variance, found.gradient_norm**2) == pytest.approx(found.dissimilarity, rel=1e-12)
    assert theory.dissimilarity_bound(found.variance, 0.5 * found.gradient_norm**2) > found.dissimilarity


# dissimilarity

def dissimilarity_by_hand(params, population):
    own = torch.stack([gradient(params, *population.client(k)) for k in range(len(population))])
    share = population.mass / population.mass.sum()
    mean = (share[:, None] * own).sum(0)
    apart = (own - mean).square().sum(1)
    return math.sqrt(float((share * own.square().sum(1)).sum()) / float(mean.square().sum())), float((share * apart).sum()), float(apart.mean())


def numbers(found) -> tuple[float, float, float]:
    return found.dissimilarity, found.variance, found.client_variance


@pytest.mark.parametrize("channel", [None, *CHANNELS])
def test_dissimilarity_and_gradient_variance_are_those_of_the_definition(channel):
    population, task, ledger = people(9), softmax(), fedtail.Ledger()
    found = gradient_dissimilarity(task.module, population, task, privacy=ledger, **({"channel": CHANNELS[channel]} if channel else {}))
    assert numbers(found) == pytest.approx(dissimilarity_by_hand(START, population), rel=1e-9)
    assert found.clients == 9
    assert found.dissimilarity**2 * found.gradient_norm**2 == pytest.approx(found.variance + found.gradient_norm**2)      # the two measures, at one point
    assert not math.isclose(found.variance, found.client_variance, rel_tol=0.01)      # masses matter
    (event, count), = ledger.rounds
    assert (count, [release.what for release in event.releases]) == (1, ["the updates, by GradientMoments"])
    assert math.isinf(ledger.guarantee(1e-3).epsilon)


@pytest.mark.parametrize("workers", [1, 3])
def test_dissimilarity_over_nodes_and_workers_is_the_same(workers):
    population, task = people(9), softmax()
    there = gradient_dissimilarity(task.module, task=task, fleet=Sites(3, population, task).fleet(), channel=IntegerChannel())
    assert there == gradient_dissimilarity(task.module, population, task, engine=Engine(workers=workers), channel=IntegerChannel())


def test_dissimilarity_where_gradients_agree_or_cancel():
    same = Population.from_clients([DATA[0]] * 3)
    assert gradient_dissimilarity(softmax().module, same, softmax()).dissimilarity == pytest.approx(1.0, rel=1e-12)
    line = Task(nn.Linear(1, 1, bias=False).to(WIDE), loss=lambda o, y: 0.5 * (o[:, 0] - y) ** 2, error=lambda o, y: (o[:, 0] - y) ** 2)
    line = replace(line, module=line.with_params(torch.zeros(1, dtype=WIDE)))
    one = torch.ones(1, 1, dtype=WIDE)
    def at(*targets):
        return gradient_dissimilarity(line.module, Population.from_clients([(one, torch.tensor([y], dtype=WIDE)) for y in targets]), line)
    assert (at(1.0, -1.0).dissimilarity, at(1.0, -1.0).variance) == (math.inf, 1.0)
    assert (at(0.0, 0.0).dissimilarity, at(0.0, 0.0).variance) == (1.0, 0.0)      # stationary for all: defined as 1
    assert (at(3.0, 1.0).dissimilarity, at(3.0, 1.0).variance) == (pytest.approx(math.sqrt(5) / 2), pytest.approx(1.0))


def test_a_run_tells_the_dissimilarity_of_the_models_it_hands_out_and_trains_as_without():
    population, seen = people(9), []
    method = Family((everyone(LocalSGD(0.2)), everyone(LocalSGD(0.2, penalty=Proximal(2.0)))))
    trained = train(method, softmax(), population, rounds=4, evaluation=GradientDissimilarity(every=2), on_round=lambda p: seen.append((p.before, p.view)))
    plain = train(method, softmax(), population, rounds=4)
    assert torch.equal(params_of(trained), params_of(plain))
    assert [before.evaluation is not None for before, _ in seen] == [True, False, True, False]
    for before, _ in seen[::2]:
        for state, found in zip(before.state, before.evaluation, strict=True):
            assert numbers(found) == pytest.approx(dissimilarity_by_hand(state.params, population), rel=1e-9)
    for state, found in zip(trained.state, trained.evaluation, strict=True):
        assert numbers(found) == pytest.approx(dissimilarity_by_hand(state.params, population), rel=1e-9)
    tail = replace(everyone(LocalSGD(0.2)), risk=Superquantile(0.3))
    views = [[], []]
    for mine, more in zip(views, ({}, {"evaluation": GradientDissimilarity(every=1)}), strict=True):
        train(tail, softmax(), population, rounds=2, on_round=lambda p, mine=mine: mine.append(p.view.contributors_of().tolist()), **more)
    assert views[0] == views[1]                        # whoever gives a gradient to look at has not trained
    with pytest.raises(ValueError, match=r"^ByMass draws large clients more often"):
        train(replace(tail, sample=ByMass(5)), softmax(), population, rounds=1, evaluation=GradientDissimilarity())
    assert math.isinf(train(everyone(LocalSGD(0.2)), softmax(), population, rounds=1).ledger.guarantee(1e-3).epsilon)


def test_a_gradient_beyond_its_bound_is_an_error_over_integers():
    with pytest.raises(ValueError, match=r"^a row is beyond its bound"):
        gradient_dissimilarity(softmax().module, people(), softmax(), gradient_bound=1e-3, channel=IntegerChannel())


def test_a_draw_for_the_gradient_has_exactly_as_many_clients_as_are_asked_for():
    keys = people(9).key
    start = RoundStart(3, torch.zeros(1), None, lambda local: iter(()), 5, keys)
    assert int((hash_bits(5, "gradient", 3, keys) <= start.draw_limit("gradient", 4)).sum()) == 4


# all of them on every fleet and channel

METHODS = {
    "adaptive mu": replace(fedtail.fedavg(6), local=LocalSGD(0.5, batch_size=3, penalty=AdaptiveProximal(0.2, patience=1))),
    "adaptive mu in the tail": replace(fedtail.delta_fl(0.6, 6), local=LocalSGD(0.5, batch_size=3, penalty=AdaptiveProximal(0.2, patience=1))),
    "FedDane": feddane(0.3, 6, batch_size=3, learning_rate=0.2),
    "FedDane, split": feddane(0.3, 6, 3, batch_size=3, learning_rate=0.2),
    "until inexact": replace(fedtail.fedavg(6), local=UntilInexact(LocalSGD(0.4, batch_size=3, epochs=4, penalty=Proximal(0.5), work=Stragglers(0.3)), 0.5, every=4)),
    "until inexact, adaptive mu": replace(fedtail.fedavg(6), local=UntilInexact(LocalSGD(0.4, batch_size=None, epochs=6, penalty=AdaptiveProximal(0.2, patience=1)), 0.5)),
    "until inexact, FedDane": replace(fedtail.fedavg(6), local=UntilInexact(LocalSGD(0.2, batch_size=3, epochs=3, penalty=Dane(0.3, 3)), 0.5, every=3)),
    "FedDane, tilted": replace(feddane(0.3, 6, 3, batch_size=3, learning_rate=0.2), risk=fedtail.Tilted(1.0)),
}


@pytest.mark.filterwarnings("ignore::fedtail.SmallTailWarning")
@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_same_over_any_channel_workers_and_nodes(name, monkeypatch):
    method, population, task = METHODS[name], people(), softmax()
    monkeypatch.setattr(blocks, "GRAIN", 64)
    monkeypatch.setattr(blocks, "TOGETHER", 2)
    assert len(blocks.cohort_blocks(population.size[:6], 15, 1000, torch.device("cpu"))) == 3      # so that processes share a round
    plain = train(method, task, population, rounds=3)
    assert not torch.equal(plain.state.params, START)
    exact = train(method, task, population, rounds=3, channel=IntegerChannel())
    assert torch.allclose(exact.state.params, plain.state.params, rtol=1e-8, atol=1e-8)
    for workers in (1, 3):
        assert torch.equal(train(method, task, population, rounds=3, engine=Engine(workers=workers)).state.params, plain.state.params)
    for channel in (CHANNELS["unmasked"], CHANNELS["masked"]):
        secure = train(method, task, population, rounds=3, channel=channel)
        assert torch.equal(secure.state.params, exact.state.params)
    there = train(method, task, fleet=Sites(3, population, task).fleet(), rounds=3, channel=IntegerChannel())
    assert torch.allclose(there.state.params, exact.state.params, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore::fedtail.SmallTailWarning")
@pytest.mark.parametrize("name", METHODS)
def test_it_goes_on_from_a_checkpoint_with_the_same_bits_also_in_a_family_with_dropout(name, tmp_path):
    task, other = tanh_network(), replace(fedtail.fedavg(6), local=LocalSGD(0.1, penalty=Proximal(0.1)))
    method, population = Family((METHODS[name], other)), people()
    whole = train(method, task, population, rounds=3)
    assert torch.equal(whole.state[0].params, train(METHODS[name], task, population, rounds=3).state.params)
    Checkpoints(tmp_path).save(train(method, task, population, rounds=1), {})
    back, problems = Checkpoints(tmp_path).load()
    assert problems == []
    again = resume(back.to_trained(method, task, 0), population, rounds=2, engine=Engine(workers=3))
    assert torch.equal(params_of(again), params_of(whole))


def test_private_sums_of_gradients_and_updates_are_both_charged():
    method = fedtail.dp_fedavg(7, 0.5, 1.0, cohort_size=4)
    dane = replace(method, local=LocalSGD(0.1, penalty=Dane(0.1)))
    found = [train(one, softmax(), replace(people(), mass=torch.ones(7, dtype=WIDE)), rounds=2)
             for one in (method, dane)]
    costs = [one.ledger.guarantee(1e-2).epsilon for one in found]
    assert costs[0] < costs[1] < math.inf
    adaptive, equal = replace(method, local=LocalSGD(0.1, penalty=AdaptiveProximal())), replace(people(), mass=torch.ones(7, dtype=WIDE))
    assert math.isinf(train(adaptive, softmax(), equal, rounds=1).ledger.guarantee(1e-2).epsilon)
    with pytest.raises(ValueError, match="CohortLoss"):
        train(adaptive, softmax(), equal, rounds=1, privacy=fedtail.PrivacyBudget(epsilon=50.0, delta=1e-2))
    split = replace(method, local=LocalSGD(0.1, penalty=Dane(0.1, 2)))
    with pytest.raises(ValueError, match="LocalSGD sends numbers that depend on who was sampled"):
        train(split, softmax(), replace(people(), mass=torch.ones(7, dtype=WIDE)), rounds=1)


# experiment files

EXPERIMENT = """
rounds = 2
[data]
kind = "digits"
clients = 12
[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10
[sample]
cohort_size = 6
"""


@pytest.mark.parametrize(("table", "made"), [
    ('[local.penalty]\npart = "AdaptiveProximal"\nstart = 1.0\npatience = 3', LocalSGD(penalty=AdaptiveProximal(1.0, patience=3))),
    ('[local]\npenalty = { part = "Dane", strength = 0.1, gradient_clients = 2 }', LocalSGD(penalty=Dane(0.1, 2))),
    ('[local]\npart = "UntilInexact"\ngamma = 0.3\nevery = 10\n[local.local]\nepochs = 20\npenalty = { part = "Proximal", strength = 1.0 }',
     UntilInexact(LocalSGD(epochs=20, penalty=Proximal(1.0)), 0.3, 10)),
])
def test_experiment_files_name_the_parts_and_write_them_down_again(table, made, tmp_path):
    (tmp_path / "prox.toml").write_text(EXPERIMENT + table)
    experiment = read_experiment(tmp_path / "prox.toml")
    assert experiment.algorithm.local == made
    written = tomli_w.dumps(experiment.as_table())
    assert build_experiments(Source.parse(written, "prox.toml", tmp_path), "prox")[0].algorithm.local == made


def test_whoever_answers_the_gradient_question_with_zeros_is_silent():
    """A row of zeros is no contribution: the sum is over fewer clients than were counted, and the channel must know."""
    population = people()
    method = replace(fedtail.fedavg(len(population)), sample=fedtail.Everyone())
    silent = {}
    @dataclass(frozen=True)
    class NothingOfTheFirst(Part):
        """An aggregator that writes zeros for one of its clients."""

        declares = AggregatorDeclaration(columns=0)

        def rows(self, updates, weighted, train, clients):
            return updates * (clients.keys != population.key[0])[:, None]

    with LocalFleet(population, softmax(), dtype=torch.float64) as fleet:
        state = method.initial_state(softmax().params(), 0)
        fleet.open_round(method.sample(population, 0, 0), method.broadcast(state, 0))
        for marks in (True, False):
            question = Train(fedtail.local.FullGradient(), fedtail.Mean(), torch.zeros(0), NothingOfTheFirst(), marks_contributors=marks)
            fleet.collect((question,), Plain(len(population), 1.0))
            silent[marks] = fleet.count_silent_clients((question,))
            fleet._shard.failed.zero_()
            fleet._shard.contributed.zero_()
        fleet.close_round(False)
    assert silent == {True: 1, False: 1}
