"""Personal models: against loops written out, over every fleet and channel, kept, resumed, evaluated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fedtail
from fedtail import (
    Ditto,
    Engine,
    Family,
    IntegerChannel,
    LocalSGD,
    Population,
    SecureChannel,
    Task,
    ValidatedDitto,
    evaluate_personal,
    resume,
    train,
)
from fedtail.divisors import FixedDivisor
from fedtail.evaluation.personal import kept_personal_rows
from fedtail.models import LeastSquares, SoftmaxRegression
from fedtail.parts import converse

from remote_cases import Sites

WIDE = torch.float64
STEPS = LocalSGD(0.1, batch_size=None, local_steps=4)


def people(clients=6, seed=0, classes=3) -> Population:
    """Clients of different sizes and different data."""
    torch.manual_seed(seed)
    sizes = [5 + (5 * k + 3) % 9 for k in range(clients)]
    return Population.from_clients([(torch.randn(n, 4, dtype=WIDE) + k / 4, torch.randint(0, classes, (n,))) for k, n in enumerate(sizes)])


def softmax() -> Task:
    torch.manual_seed(1)
    return Task(SoftmaxRegression(4, 3).double())


def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the mean cross entropy of a softmax regression, by autograd."""
    w = w.clone().requires_grad_()
    weight, bias = w[:12].reshape(3, 4), w[12:]
    loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
    return torch.autograd.grad(loss, w)[0]


def ditto_by_hand(population: Population, method, strength: float, rounds: int, seed: int = 0):
    """Algorithm 7 of the thesis with full gradients: the shared model, and a personal one for whoever was sampled."""
    w, own = softmax().params(), {}
    for round in range(rounds):
        received, updates, masses = w.clone(), [], []
        for k in method.sample(population, seed, round).ids.tolist():
            x, y = population.client(k)
            local = received.clone()
            for _ in range(4):
                local = local - 0.1 * gradient(local, x, y)
            updates.append(local - received)
            masses.append(len(y))
            v = own.get(k, received).clone()
            for _ in range(4):
                v = v - 0.1 * (gradient(v, x, y) + strength * (v - received))
            own[k] = v
        mass = torch.tensor(masses, dtype=WIDE)
        w = received + (mass[:, None] * torch.stack(updates)).sum(0) / mass.sum()
    return w, own


def ditto(cohort=3, strength=0.7, **more):
    return replace(fedtail.fedavg(cohort), local=STEPS, personal=Ditto(strength, STEPS), **more)


def test_the_recipe_trains_both_models_by_the_same_steps():
    settings = {"learning_rate": 0.1, "batch_size": None, "local_steps": 4}
    assert fedtail.ditto(0.7, 3, **settings) == ditto()


def personal_rows(trained, population, model=0):
    found = kept_personal_rows(trained, population.key, model).read()
    return {k: row for k, (row, has) in enumerate(zip(found.rows, found.has, strict=True)) if has}


def assert_same_models(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for k, row in found.items():
        assert torch.allclose(row, expected[k], rtol=0, atol=tolerance), k


@pytest.mark.parametrize("workers", [1, 2])
def test_ditto_is_its_algorithm(workers):
    population, method = people(), ditto()
    trained = train(method, softmax(), population, rounds=5, engine=Engine(workers=workers))
    w, own = ditto_by_hand(population, method, 0.7, 5)
    assert len(own) > 3
    assert torch.allclose(trained.state.params, w, rtol=0, atol=1e-10)
    assert_same_models(personal_rows(trained, population), own)


def test_the_shared_model_does_not_change_and_nothing_more_is_released():
    plain, with_own = (train(m, softmax(), people(), rounds=4) for m in (replace(ditto(), personal=fedtail.NoPersonalModels()), ditto()))
    assert torch.equal(plain.state.params, with_own.state.params)
    assert plain.ledger.rounds == with_own.ledger.rounds


@pytest.mark.parametrize("channel", [IntegerChannel(), SecureChannel(3, minimum_contributors=3)])
def test_personal_models_beside_sums_of_integers(channel):
    population, method = people(), ditto(cohort=5)
    trained = train(method, softmax(), population, rounds=3, channel=channel)
    w, own = ditto_by_hand(population, method, 0.7, 3)
    assert torch.allclose(trained.state.params, w, rtol=0, atol=1e-6)
    assert_same_models(personal_rows(trained, population), own, 1e-6)


def test_whoever_is_sampled_trains_though_only_the_tail_contributes():
    population = people()
    method = replace(fedtail.delta_fl(0.4, 6), local=STEPS, personal=Ditto(0.7, STEPS))
    seen = []
    trained = train(method, softmax(), population, rounds=2, on_round=lambda p: seen.append(p.view.trained[0].clone()))
    assert int(seen[1].sum()) < 6                                # at the start, a model of zeros, all losses are equal
    before = personal_rows(train(method, softmax(), population, rounds=1), population)
    after = personal_rows(trained, population)
    assert after.keys() == before.keys() == set(range(6))
    assert not any(torch.equal(after[k], before[k]) for k in range(6))


def test_extreme_strengths_are_the_clients_own_data_and_the_shared_model():
    population = people()
    alone = train(ditto(strength=0.0), softmax(), population, rounds=4)
    for k, row in personal_rows(alone, population).items():      # a strength of zero never looks at the shared model again
        x, y = population.client(k)
        rounds = [r for r in range(4) if k in ditto().sample(population, 0, r).ids.tolist()]
        shared = train(ditto(strength=0.0), softmax(), population, rounds=rounds[0]).state.params if rounds[0] else softmax().params()
        v = shared.clone()
        for _ in range(4 * len(rounds)):
            v = v - 0.1 * gradient(v, x, y)
        assert torch.allclose(row, v, rtol=0, atol=1e-10)
    far = [float((torch.stack(list(personal_rows(t, population).values())) - before).norm(dim=1).max())
           for strength in (1.0, 100.0) for t, before in [together(strength, population)]]
    assert far[1] < 0.03 * far[0]                                # towards infinity it is the model received


def together(strength, population):
    """One round of many small steps with everybody, and the model that was received."""
    steps = LocalSGD(0.009, batch_size=None, local_steps=300)
    method = replace(fedtail.fedavg(6), local=STEPS, personal=Ditto(strength, steps))
    return train(method, softmax(), population, rounds=1), softmax().params()


def test_a_run_goes_on_with_its_personal_models_to_the_bit(tmp_path):
    from fedtail.runs.checkpoint import Checkpoints
    population, method = people(), ditto()
    whole, half = train(method, softmax(), population, rounds=6), train(method, softmax(), population, rounds=3)
    Checkpoints(tmp_path).save(half, {})
    back, problems = Checkpoints(tmp_path).load()
    assert problems == []
    for begun in (half, back.to_trained(method, softmax(), 0)):
        again = resume(begun, population, rounds=3)
        found, expected = personal_rows(again, population), personal_rows(whole, population)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in found)
    with pytest.raises(ValueError, match="Ditto keeps memory on the clients, which a state alone does not hold"):
        resume(fedtail.Trained(method, softmax(), half.state), population, rounds=1)


def test_members_of_a_family_have_personal_models_of_their_own():
    population = people()
    members = (ditto(strength=0.7), ditto(strength=2.0), replace(ditto(), personal=fedtail.NoPersonalModels()))
    trained = train(Family(members), softmax(), population, rounds=3)
    for k, member in enumerate(members[:2]):
        assert_same_models(personal_rows(trained, population, k), personal_rows(train(member, softmax(), population, rounds=3), population), 0.0)
    assert personal_rows(trained, population, 2) == {}
    with pytest.raises(ValueError, match="this run trained no personal models"):
        evaluate_personal(trained, population, model=2)


def test_an_aggregator_that_asks_twice_trains_personal_models_once():
    @dataclass(frozen=True)
    class Twice(fedtail.WeightedMean):
        def fit(self, train):
            yield from super().fit(train)
            return (yield from super().fit(train))

    asked, method = [], replace(ditto(), aggregate=Twice())
    talk = method.conversation(method.initial_state(softmax().params(), 0), 0, method.sample(people(), 0, 0))
    converse(talk, lambda question: asked.append(question.personal) or torch.ones(16, dtype=WIDE))
    assert asked == [Ditto(0.7, STEPS), None]


def test_nodes_train_personal_models_of_their_clients():
    population, method = people(), ditto()
    sites = Sites(nodes=3, people=population, task=softmax(), restart=True)      # a new process for every message
    fleet = sites.fleet()
    trained = train(method, softmax(), fleet=fleet, rounds=4)
    fleet.finish()
    w, own = ditto_by_hand(population, method, 0.7, 4)
    assert torch.allclose(trained.state.params, w, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="the personal models of this run are on its nodes"):
        evaluate_personal(trained, population)
    kept = {}
    for node, site in sites.sites.items():
        here = site._loaded_node().fleet.memory()
        rows = zip((sites.registry.node == node).nonzero().flatten().tolist(), here.kept["personal 0"], strict=True)
        kept |= {k: row for k, row in rows if not row.isnan().any()}
    assert_same_models(kept, own)


def test_large_personal_models_are_rows_on_disk():
    from fedtail.rows import Rows
    from fedtail.rows.folder import LARGE
    population = people(classes=2)
    torch.manual_seed(0)
    wide = Task(torch.nn.Sequential(torch.nn.Linear(4, LARGE // 4), torch.nn.Tanh(), torch.nn.Linear(LARGE // 4, 2)).double())
    steps = LocalSGD(1e-4, batch_size=None, local_steps=3)
    method = replace(fedtail.fedavg(3), local=steps, personal=Ditto(0.5, steps))
    trained = train(method, wide, population, rounds=3)
    assert isinstance(trained.memory.kept["personal 0"], Rows)
    whole = evaluate_personal(trained, population)
    assert 3 <= int(whole.has_model.sum()) <= 6
    assert whole.personal.loss.mean() < whole.shared.loss.mean()


# strengths by validation

def test_each_client_takes_the_strength_with_the_smallest_validation_loss():
    population = people(clients=8, seed=3)
    part = ValidatedDitto((0.0, 0.5, 5.0), 1.0, 0.4, STEPS)
    method = replace(fedtail.fedavg(8), local=STEPS, personal=part)
    trained = train(method, softmax(), population, rounds=2)
    own, held = population.split_examples(within=0.4)
    few = 0
    for k, row in personal_rows(trained, population).items():
        v = w = softmax().params()
        for round in range(2):
            received = w if round == 0 else train(method, softmax(), population, rounds=1).state.params
            tried = []
            for strength in (0.0, 0.5, 5.0, 1.0):
                one = v.clone()
                for _ in range(4):
                    one = one - 0.1 * (gradient(one, *own.client(k)) + strength * (one - received))
                tried.append(one)
            x, y = held.client(k)
            losses = [float(torch.nn.functional.cross_entropy(x @ one[:12].reshape(3, 4).T + one[12:], y)) for one in tried[:3]]
            few += len(y) < 4
            v = tried[3] if len(y) < 4 else tried[min(range(3), key=losses.__getitem__)]
        assert torch.allclose(row, v, rtol=0, atol=1e-10)
    assert 0 < few < 16                                           # both rules were used


def test_steps_to_the_end_solve_the_regularised_least_squares_of_each_client():
    """[Li23, eq. (5.23)]: a linear system for each client."""
    torch.manual_seed(2)
    data = [(torch.ones(5, 1, dtype=WIDE), torch.randn(5, dtype=WIDE) + k / 3) for k in range(6)]
    population, task = Population.from_clients(data), Task(LeastSquares(1).double())
    steps = LocalSGD(0.2, batch_size=None, local_steps=400)
    trained = train(replace(fedtail.fedavg(6), local=LocalSGD(0.1, batch_size=None), personal=Ditto(0.8, steps)), task, population, rounds=1)
    start = task.params()
    for k, row in personal_rows(trained, population).items():
        x, y = data[k]
        design = torch.cat([x, x], 1) if len(row) == 2 else x
        scale = float(fedtail.Task(LeastSquares(1).double()).loss(torch.zeros(1, dtype=WIDE), torch.ones(1, dtype=WIDE)))      # 1 or 1/2
        normal = 2 * scale * design.T @ design / len(y) + 0.8 * torch.eye(len(row), dtype=WIDE)
        expected = torch.linalg.solve(normal, 2 * scale * design.T @ y / len(y) + 0.8 * start)
        assert torch.allclose(row, expected, rtol=0, atol=1e-8)


# evaluation

def test_personal_models_are_evaluated_beside_the_shared_one_on_the_same_examples():
    own, held = people(seed=5).split_examples(within=0.4)
    trained = train(ditto(), softmax(), own, rounds=2)
    found = evaluate_personal(trained, held)
    rows = personal_rows(trained, own)
    assert found.has_model.tolist() == [k in rows for k in range(6)]
    assert 0 < len(rows) < 6
    for k in range(6):
        x, y = held.client(k)
        for model, evaluation in ((trained.state.params, found.shared), (rows.get(k, trained.state.params), found.personal)):
            scores = x @ model[:12].reshape(3, 4).T + model[12:]
            assert float(evaluation.loss.values[k]) == pytest.approx(float(torch.nn.functional.cross_entropy(scores, y)), abs=1e-9)
            assert float(evaluation.error.values[k]) == pytest.approx(float((scores.argmax(1) != y).double().mean()), abs=1e-12)
    assert f"error, {len(rows)} of 6 with a model of their own" in found.table()
    k = next(iter(rows))
    assert torch.allclose(torch.cat([p.flatten() for p in fedtail.personal_module(trained, held, k).parameters()]), rows[k])
    absent = next(k for k in range(6) if k not in rows)
    with pytest.raises(ValueError, match=f"client {absent} has no personal model: it was never sampled"):
        fedtail.personal_module(trained, held, absent)
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"client must be a position in the population, from 0 to 5, got {wrong}"):
            fedtail.personal_module(trained, held, wrong)
    with pytest.raises(ValueError, match="model must be the position of a model, from 0 to 0, got 1"):
        evaluate_personal(trained, held, model=1)
    with pytest.raises(ValueError, match="this run trained no personal models"):
        fedtail.personal_module(train(fedtail.fedavg(3), softmax(), own, rounds=1), held, 0)


PLAIN = "a mixture's steps are plain gradient steps, and local has momentum, weight_decay, a penalty, an example_risk or a divisor. Leave these out."


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Ditto(-1.0), "strength (lambda) must be at least 0 and finite, got -1. 0 trains on a client's own data alone."),
    (lambda: Ditto(20.0, LocalSGD(0.1)), "learning_rate * strength must be below 1, got 0.1 * 20: every step would overshoot the shared model. Lower one of them."),
    (lambda: Ditto(1.0, LocalSGD(0.1, penalty=fedtail.Proximal(1.0))), "the personal model has the penalty of its strength; local has Proximal(strength=1.0) beside it. Leave it out."),
    (lambda: Ditto(1.0, LocalSGD(0.1, work=fedtail.Stragglers(0.5, exact=True))), "personal models are trained by the client alone, and NoPenalty() or Stragglers(fraction=0.5, drop=False, exact=True) needs the server in every round. Use parts that do not: Proximal, Stragglers without exact=True."),
    (lambda: fedtail.personal.FineTuning(LocalSGD(penalty=fedtail.AdaptiveProximal())), "personal models are trained by the client alone, and AdaptiveProximal(start=0.0, step=0.1, patience=5, loss_bound=1000.0) or FullWork() needs the server in every round. Use parts that do not: Proximal, Stragglers without exact=True."),
    (lambda: ValidatedDitto(()), "strengths (lambda) must name at least one to choose from. Write strengths=(0.1, 1.0, 2.0)."),
    (lambda: ValidatedDitto(validation=1.0), "validation must be a share in (0, 1) of a client's examples, got 1."),
    *((lambda settings=settings: fedtail.personal.APFL(0.5, LocalSGD(0.1, **settings)), PLAIN) for settings in ({"momentum": 0.5}, {"weight_decay": 0.1}, {"penalty": fedtail.Proximal(1.0)},
                                                                                            {"example_risk": fedtail.Superquantile(0.5)}, {"divisor": FixedDivisor((2.0,))})),
])
def test_what_does_not_fit_is_refused_in_words(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value) == text


@pytest.mark.parametrize("make", [lambda local: Ditto(0.1, local), lambda local: ValidatedDitto(local=local), lambda local: fedtail.personal.APFL(0.5, local),
                                  lambda local: fedtail.personal.Mapper(local=local)])
def test_local_training_whose_steps_cannot_be_pulled_is_refused_in_words(make):
    with pytest.raises(TypeError, match=r"^local must be a LocalSGD, whose steps the client's own model takes, got MAML"):
        make(fedtail.MAML())


# mixtures

def test_apfl_is_its_algorithm():
    population = people()
    method = replace(fedtail.fedavg(6), local=STEPS, personal=fedtail.personal.APFL(0.3, STEPS))
    trained = train(method, softmax(), population, rounds=3)
    w, own = softmax().params(), {}
    for _ in range(3):
        received, updates = w, []
        for k in range(6):
            x, y = population.client(k)
            v, local = own.get(k, received), received
            for _ in range(4):
                local = local - 0.1 * gradient(local, x, y)
                v = v - 0.1 * 0.3 * gradient(0.3 * v + 0.7 * local, x, y)
            own[k] = v
            updates.append(len(y) * (local - received))
        w = received + torch.stack(updates).sum(0) / population.num_examples
    assert torch.allclose(trained.state.params, w, rtol=0, atol=1e-10)
    assert_same_models(personal_rows(trained, population), own)
    found = evaluate_personal(trained, population)
    for k in range(6):
        x, y = population.client(k)
        mixed = 0.3 * own[k] + 0.7 * w
        expected = torch.nn.functional.cross_entropy(x @ mixed[:12].reshape(3, 4).T + mixed[12:], y)
        assert float(found.personal.loss.values[k]) == pytest.approx(float(expected), abs=1e-9)


def test_mapper_keeps_the_mix_with_the_smallest_training_loss():
    population, mixes = people(seed=4), (0.0, 0.3, 0.9)
    method = replace(fedtail.fedavg(6), local=STEPS, personal=fedtail.personal.Mapper(mixes, STEPS))
    trained = train(method, softmax(), population, rounds=2)
    own = {}
    for rounds in range(2):
        received = softmax().params() if rounds == 0 else train(method, softmax(), population, rounds=1).state.params
        for k in range(6):
            x, y = population.client(k)
            tried = []
            for mix in mixes:
                v = own[k][0] if k in own else received
                for _ in range(4):
                    v = v - 0.1 * mix * gradient(mix * v + (1 - mix) * received, x, y)
                mixed = mix * v + (1 - mix) * received
                tried.append((float(torch.nn.functional.cross_entropy(x @ mixed[:12].reshape(3, 4).T + mixed[12:], y)), v, mix))
            own[k] = min(tried, key=lambda one: one[0])[1:]
    rows = personal_rows(trained, population)
    assert_same_models({k: row[:-1] for k, row in rows.items()}, {k: v for k, (v, _) in own.items()})
    assert [float(rows[k][-1]) for k in range(6)] == [own[k][1] for k in range(6)]


@pytest.mark.parametrize("part", [Ditto(0.5, LocalSGD(0.1, 3, epochs=2)), fedtail.personal.APFL(0.4, LocalSGD(0.1, 3, epochs=2)),
                                  fedtail.personal.Mapper(local=LocalSGD(0.1, 3, epochs=2)), ValidatedDitto(local=LocalSGD(0.1, 3, epochs=2)),
                                  fedtail.personal.FineTuning(LocalSGD(0.1, 3, epochs=2, penalty=fedtail.local.SymmetrisedKL(0.5)))],
                         ids=lambda part: type(part).__name__)
def test_the_same_bits_whatever_the_workers_and_who_else_is_there(part):
    population = people(clients=40)
    method = replace(fedtail.fedavg(30, learning_rate=0.1, batch_size=3, epochs=2), personal=part)
    one, two = (personal_rows(train(method, softmax(), population, rounds=2, engine=Engine(workers=workers)), population) for workers in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    every = replace(method, sample=fedtail.Everyone(), local=LocalSGD(0.1, 3, epochs=2, work=fedtail.Stragglers(1.0, drop=True)))
    with pytest.warns(fedtail.NoContributionWarning):
        alone = train(every, softmax(), population, rounds=1)      # the shared model stays: what is kept is of one model received
    few = population.select(torch.arange(0, 40, 7))
    with pytest.warns(fedtail.NoContributionWarning):
        some = personal_rows(train(every, softmax(), few, rounds=1), few)
    for place, k in enumerate(range(0, 40, 7)):
        assert torch.allclose(some[place], personal_rows(alone, population)[k], rtol=1e-9, atol=1e-12)


# fine-tuning

def test_ewc_holds_by_the_mean_square_of_single_gradients():
    population = people()
    local = LocalSGD(0.1, batch_size=None, local_steps=5, penalty=fedtail.local.EWC(3.0, examples=4))
    trained = train(replace(fedtail.fedavg(6), local=STEPS, personal=fedtail.personal.FineTuning(local)), softmax(), population, rounds=2)
    received = train(replace(fedtail.fedavg(6), local=STEPS), softmax(), population, rounds=1).state.params
    for k, row in personal_rows(trained, population).items():
        x, y = population.client(k)
        fisher = torch.stack([gradient(received, x[i: i + 1], y[i: i + 1]).square() for i in range(4)]).mean(0)
        v = received
        for _ in range(5):
            v = v - 0.1 * (gradient(v, x, y) + 3.0 * fisher * (v - received))
        assert torch.allclose(row, v, rtol=0, atol=1e-10)


def test_only_the_named_parameters_are_tuned():
    torch.manual_seed(0)
    network = Task(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double())
    tuned = LocalSGD(0.1, batch_size=None, local_steps=5, penalty=fedtail.local.TrainOnly(("2.",)))
    population = people()
    trained = train(replace(fedtail.fedavg(6), local=STEPS, personal=fedtail.personal.FineTuning(tuned)), network, population, rounds=1)
    start = network.params()
    for row in personal_rows(trained, population).values():
        assert torch.equal(row[:25], start[:25])
        assert not torch.equal(row[25:], start[25:])
    wrong = replace(tuned, penalty=fedtail.local.TrainOnly(("3.",)))
    with pytest.raises(ValueError, match=r"no parameter begins with 3\.\. There are 0\.weight, 0\.bias, 2\.weight, 2\.bias\."):
        train(replace(fedtail.fedavg(6), local=wrong), network, population, rounds=1)
