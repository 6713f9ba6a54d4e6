"""FedProx and its relatives: adaptive mu, FedDane, stopping by inexactness, dissimilarity, and the decrease that the theory states."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
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
    feddane,
    gradient_dissimilarity,
    resume,
    train,
)
from fedtail.draws import hash_bits
from fedtail.models import SoftmaxRegression
from fedtail.parts import RoundStart
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
        trained = train(everyone(LocalSGD(penalty=AdaptiveProximal(0.5))), replace(softmax(), loss=lambda o, y: o.square().sum(1)), broken, rounds=2)
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
    (lambda: GradientDissimilarity(every=0), "every must be at least 1 round, got 0."),
    (lambda: GradientDissimilarity(gradient_bound=-1.0), "gradient_bound must be positive and finite, got -1."),
])
def test_numbers_that_mean_nothing_are_refused(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(text)


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
    "FedDane, tilted": replace(feddane(0.3, 6, 3, batch_size=3, learning_rate=0.2), risk=fedtail.Tilted(1.0)),
}


@pytest.mark.filterwarnings("ignore::fedtail.SmallTailWarning")
@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_same_over_any_channel_workers_and_nodes(name):
    method, population, task = METHODS[name], people(), softmax()
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
    whole = train(method, task, population, rounds=5)
    assert torch.equal(whole.state[0].params, train(METHODS[name], task, population, rounds=5).state.params)
    Checkpoints(tmp_path).save(train(method, task, population, rounds=2), {})
    back, problems = Checkpoints(tmp_path).load()
    assert problems == []
    again = resume(back.to_trained(method, task, 0), population, rounds=3, engine=Engine(workers=3))
    assert torch.equal(params_of(again), params_of(whole))


def test_private_sums_of_gradients_and_updates_are_both_charged():
    method = fedtail.dp_fedavg(7, 0.5, 1.0, cohort_size=4)
    dane = replace(method, local=LocalSGD(0.1, penalty=Dane(0.1)))
    found = [train(one, softmax(), replace(people(), mass=torch.ones(7, dtype=WIDE)), rounds=2)
             for one in (method, dane)]
    costs = [one.ledger.guarantee(1e-2).epsilon for one in found]
    assert costs[0] < costs[1] < math.inf
    split = replace(method, local=LocalSGD(0.1, penalty=Dane(0.1, 2)))
    with pytest.raises(ValueError, match="LocalSGD sends numbers that depend on who was sampled"):
        train(split, softmax(), replace(people(), mass=torch.ones(7, dtype=WIDE)), rounds=1)
