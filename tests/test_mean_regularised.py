"""Models of clients' own whose mean is the shared model: against loops and a linear system, over every channel and fleet, kept and resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedtail
from fedtail import (
    Engine,
    Everyone,
    Family,
    IntegerChannel,
    Population,
    SecureChannel,
    Task,
    evaluate_personal,
    resume,
    train,
)
from fedtail.aggregation import MeanOfModels
from fedtail.engine import LocalFleet
from fedtail.evaluation.personal import kept_personal_rows
from fedtail.local import MeanRegularised
from fedtail.models import LeastSquares
from fedtail.personal import KeptByLocal
from fedtail.privacy.events import NonPrivateRelease
from test_personal import STEPS, WIDE, assert_same_models, gradient, people, personal_rows, softmax

from remote_cases import Sites

SETTINGS = {"learning_rate": 0.1, "batch_size": None, "local_steps": 4}


def by_hand(population, method, strength, rounds, seed=0):
    """Whoever is sampled descends from its own model; the shared one is the mean of all there are, computed anew in each round."""
    w, own = softmax().params(), {}
    for round in range(rounds):
        received = w.clone()
        for k in method.sample(population, seed, round).ids.tolist():
            x, y = population.client(k)
            v = own.get(k, received).clone()
            for _ in range(4):
                v = v - 0.1 * (gradient(v, x, y) + strength * (v - received))
            own[k] = v
        w = torch.stack(list(own.values())).mean(0)
    return w, own


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("method", "everybody"), [(fedtail.l2sgd(0.7, 3, **SETTINGS), False), (fedtail.mean_regularised(0.7, **SETTINGS), True)], ids=["l2sgd", "everybody"])
def test_the_shared_model_is_the_mean_of_all_models_there_are(method, everybody, workers):
    population = people()
    trained = train(method, softmax(), population, rounds=5, engine=Engine(workers=workers))
    w, own = by_hand(population, method, 0.7, 5)
    assert (len(own) == 6) >= everybody
    assert torch.allclose(trained.state.params, w, rtol=0, atol=1e-10)
    assert_same_models(personal_rows(trained, population), own)
    found = evaluate_personal(trained, population)
    assert found.has_model.tolist() == [k in own for k in range(6)]
    assert found.personal.loss.mean() < found.shared.loss.mean()


@pytest.mark.parametrize("channel", [IntegerChannel(), SecureChannel(3, minimum_contributors=3)])
def test_sums_of_integers_are_enough(channel):
    population, method = people(), fedtail.l2sgd(0.7, 5, **SETTINGS)
    trained = train(method, softmax(), population, rounds=3, channel=channel)
    w, own = by_hand(population, method, 0.7, 3)
    assert torch.allclose(trained.state.params, w, rtol=0, atol=1e-6)
    assert_same_models(personal_rows(trained, population), own, 1e-6)


@pytest.mark.parametrize("cohort", [6, 2], ids=["everybody", "two a round"])
def test_at_rest_the_models_solve_the_problem_of_multi_task_learning(cohort):
    """min sum_k |X_k v_k - y_k|^2 / n_k + lambda / 2 sum_k |v_k - mean v|^2 is one linear system in all v_k; who is sampled does not matter."""
    torch.manual_seed(2)
    data = [(2 * torch.linalg.qr(torch.randn(9, 3, dtype=WIDE))[0] + k / 20, torch.randn(9, dtype=WIDE) + k / 3) for k in range(6)]
    population, task, strength = Population.from_clients(data), Task(LeastSquares(3, bias=False).double()), 0.9
    method = fedtail.l2sgd(strength, cohort, learning_rate=0.4, batch_size=None, local_steps=20)
    rows = personal_rows(train(method, task, population, rounds=60 if cohort == 6 else 180), population)
    centred = torch.eye(6, dtype=WIDE) - 1 / 6
    system = strength * torch.kron(centred, torch.eye(3, dtype=WIDE))
    for k, (x, _) in enumerate(data):
        system[3 * k : 3 * k + 3, 3 * k : 3 * k + 3] += 2 * x.T @ x / 9
    solution = torch.linalg.solve(system, torch.cat([2 * x.T @ y / 9 for x, y in data])).view(6, 3)
    assert_same_models(rows, dict(enumerate(solution)), 1e-8)


def test_extreme_strengths_are_local_models_and_one_model():
    population = people()
    alone = personal_rows(train(fedtail.mean_regularised(0.0, **SETTINGS), softmax(), population, rounds=3), population)
    for k, row in alone.items():
        v = softmax().params()
        for _ in range(12):
            v = v - 0.1 * gradient(v, *population.client(k))
        assert torch.allclose(row, v, rtol=0, atol=1e-10)
    apart = []
    for strength in (0.0, 1000.0):
        rows = personal_rows(train(fedtail.mean_regularised(strength, learning_rate=9e-4, batch_size=None, local_steps=50), softmax(), population, rounds=20), population)
        rows = torch.stack(list(rows.values()))
        apart.append(float((rows - rows.mean(0)).norm(dim=1).max()))
    assert apart[1] < 0.01 * apart[0]


def test_a_run_goes_on_to_the_bit_and_a_state_alone_is_refused(tmp_path):
    from fedtail.runs.checkpoint import Checkpoints
    population, method = people(), fedtail.l2sgd(0.7, 3, **SETTINGS)
    whole, half = train(method, softmax(), population, rounds=6), train(method, softmax(), population, rounds=3)
    Checkpoints(tmp_path).save(half, {})
    back, problems = Checkpoints(tmp_path).load()
    assert problems == []
    for begun in (half, back.to_trained(method, softmax(), 0)):
        again = resume(begun, population, rounds=3)
        assert torch.equal(again.state.params, whole.state.params)
        assert_same_models(personal_rows(again, population), personal_rows(whole, population), 0.0)
    with pytest.raises(ValueError, match="MeanRegularised keeps memory on the clients, which a state alone does not hold"):
        resume(fedtail.Trained(method, softmax(), half.state), population, rounds=1)


def test_in_a_family_and_on_nodes_the_models_are_the_same():
    population, methods = people(), (fedtail.l2sgd(0.7, 3, **SETTINGS), fedtail.l2sgd(2.0, 3, **SETTINGS), fedtail.ditto(0.7, 3, **SETTINGS))
    trained = train(Family(methods), softmax(), population, rounds=3)
    for k, method in enumerate(methods):
        assert_same_models(personal_rows(trained, population, k), personal_rows(train(method, softmax(), population, rounds=3), population), 0.0)
    sites = Sites(nodes=3, people=population, task=softmax(), restart=True)
    fleet = sites.fleet(forgets=False)
    remote = train(methods[0], softmax(), fleet=fleet, rounds=4)
    fleet.finish()
    w, _ = by_hand(population, methods[0], 0.7, 4)
    assert torch.allclose(remote.state.params, w, rtol=0, atol=1e-10)


def test_with_noise_the_shared_model_follows_the_mean_and_models_follow_it():
    """Private sums of clipped moves: each model is that of its own data and of the noisy shared models, which alone were released."""
    population = replace(people(), mass=torch.ones(6, dtype=WIDE))
    private = fedtail.dp_fedavg(population=6, clip_norm=50.0, noise_multiplier=1e-4, cohort_size=4, noise="gaussian")
    part = MeanRegularised(0.7, STEPS)
    method = replace(private, sample=Everyone(), local=part, personal=KeptByLocal(), aggregate=replace(private.aggregate, total=6.0))
    models = [softmax().params()]
    trained = train(method, softmax(), population, rounds=3, on_round=lambda p: models.append(p.state.params.clone()))
    assert not any(isinstance(release, NonPrivateRelease) for release in method.releases(15))
    for k, row in personal_rows(trained, population).items():
        v = models[0]
        for received in models[:3]:
            for _ in range(4):
                v = v - 0.1 * (gradient(v, *population.client(k)) + 0.7 * (v - received))
        assert torch.allclose(row, v, rtol=0, atol=1e-10)
    rows = torch.stack(list(personal_rows(trained, population).values()))
    assert 0 < float((rows.mean(0) - models[3]).norm()) < 0.1


def test_a_client_whose_model_is_not_finite_stays_out_of_the_mean():
    population = people()
    x = population.inputs.clone()
    x[population.start[2] : population.start[2] + population.size[2]] = float("inf")
    broken, method = replace(population, inputs=x), fedtail.mean_regularised(0.7, **SETTINGS)
    trained = train(method, softmax(), broken, rounds=3)
    rows = personal_rows(trained, broken)
    assert set(rows) == {0, 1, 3, 4, 5}
    assert torch.allclose(trained.state.params, torch.stack(list(rows.values())).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "text"), [
    (replace(fedtail.fedavg(3), aggregate=MeanOfModels()), "MeanOfModels needs clients that keep models and send how far these have moved, and LocalSGD keeps none. Use local=MeanRegularised(...), or WeightedMean."),
    (replace(fedtail.fedavg(3), personal=KeptByLocal()), "KeptByLocal predicts by models that local training keeps, and LocalSGD keeps none. Use local=MeanRegularised(...), or personal=Ditto(...)."),
    (replace(fedtail.l2sgd(0.1, 3), server=fedtail.SGD(0.5)), "MeanOfModels says how far the mean of the clients' models has moved, and by SGD(learning_rate=0.5, momentum=0.0) the shared model would be another. Use server=SGD(1.0)."),
    (replace(fedtail.l2sgd(0.1, 3), risk=fedtail.Superquantile(0.5)), "MeanOfModels counts every client's model once, and Superquantile weighs clients by their losses. Use risk=Mean(), or WeightedMean."),
])
def test_what_does_not_fit_is_refused_in_words(method, text):
    with pytest.raises(ValueError) as refused:
        train(method, softmax(), people(), rounds=1)
    assert text in str(refused.value)


def test_a_fleet_that_may_forget_is_refused():
    population = people()
    with pytest.raises(ValueError, match="MeanRegularised cannot run on a fleet that may lose its clients' memory: the shared model is the mean"):
        train(fedtail.l2sgd(0.7, 3, **SETTINGS), softmax(), fleet=Sites(nodes=3, people=population, task=softmax()).fleet(forgets=True), rounds=1)
    assert kept_personal_rows(train(fedtail.l2sgd(0.7, 3, **SETTINGS), softmax(), fleet=LocalFleet(population, softmax()), rounds=1), population.key).read().has.sum() == 3
