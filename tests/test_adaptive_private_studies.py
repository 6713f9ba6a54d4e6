"""Studies of chapter 6 of the thesis: each small; what they train against oracles, epsilon on the ledger, how claims are judged."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pytest import approx

from fedtail.data import Population
from fedtail.losses import squared_error
from fedtail.private_optim import AutogradGradients, GivenGradients, PublicData, dp_adagrad, dp_sgd, without_privacy
from fedtail.private_optim.queries import Preconditioning
from fedtail.task import Task
from fedtail_studies import Cell, Data, Results, Verdict, reproduce
from fedtail_studies.adaptive_private import delayed_words, optimisers, toy, training, tuning, words
from fedtail_studies.adaptive_private.factorisation import Factorisation, RatingGradients
from fedtail_studies.adaptive_private.projected import ProjectedAdaGrad, public_basis
from fedtail_studies.adaptive_private.training import Length, Problem, Samples, equidistant, error_percent, optimizer_for
from fedtail_studies.catalogue import study_called
from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.running import Silent


def generated_ratings() -> Data:
    random = np.random.default_rng(0)
    user, item = random.integers(6, size=300), random.integers(9, size=300)
    ratings = random.integers(1, 6, size=300).astype(np.float32)
    people = Population.from_arrays(torch.as_tensor(item), torch.as_tensor(ratings), user)
    return Data("generated, 6 users", people, False, "They are generated.")


def generated_images() -> Data:
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(20), 30)
    x, y = random.integers(256, size=(600, 28, 28)).astype(np.uint8), random.integers(10, size=600)
    people = Population.from_arrays(torch.as_tensor(x), torch.as_tensor(y), owner, group=(np.arange(20) % 4 == 0).astype(int))
    return Data("generated, 20 writers", people, False, "They are generated.")


SHORT = {"seeds": 1, "steps": 4, "trials": 1, "evaluations": 2, "batch": 8}
TINY = {
    "adadps_toy": (SHORT, None),
    "adadps_words": ({**SHORT, "scale": 0.01}, None),
    "adadps_mnist": ({**SHORT, "train": 200, "hidden": 6, "code": 3}, generated_images),
    "dp2_words": ({**SHORT, "scale": 0.01, "epsilons": (8.0,), "phases": (1, 2, 3), "ratio_phases": (1, 2)}, None),
    "dp2_movielens": ({**SHORT, "rank": 2, "phases": (1, 2)}, generated_ratings),
    "adadps_federated": ({"seeds": 1, "devices": 20, "sentences": 10, "cohort": 5, "rounds": 2, "trials": 1, "evaluations": 2},
                         None),
    "ftrl_amplified": ({"seeds": 1, "clients": 20, "pool": 6000, "cohort": 5, "rounds": 4, "epsilons": (8.0, 64.0),
                        "server_rates": (1.0,)}, None),
}


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_small_and_writes_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second process
    monkeypatch.setattr(tuning, "noise_multiplier", lambda epsilon, *given: 0.0 if math.isinf(epsilon) else 1.0)
    monkeypatch.setattr("fedtail_studies.adaptive_private.side_information.noise_multiplier", lambda *given: 1.0)
    monkeypatch.setattr("fedtail_studies.adaptive_private.without_sampling.noise", lambda *given: 1.0)
    study, (changes, data) = study_called(name), TINY[name]
    found = None if data is None else data()
    results = reproduce(study, replace(study.quick, **changes), tmp_path, found, quick=True)
    claims, text = json.loads((tmp_path / FILE).read_text())["claims"], (tmp_path / PAGE).read_text()
    assert results.seeds == (0,)
    assert len(claims) == len(study.claims)
    assert all(f"({path.name})" in text for path in tmp_path.glob("*.png"))
    if found:
        assert not any(claim["verdict"] == Verdict.AGREES for claim in claims)


# gradients of single ratings


def test_gradients_of_ratings_are_those_of_automatic_differentiation():
    torch.manual_seed(0)
    module = Factorisation(torch.randn(4, 3), torch.randn(5, 3))
    ratings = Samples(torch.tensor([[0, 1], [3, 4], [0, 4]]), torch.tensor([4.0, 1.0, 3.5]))
    divisor, weights = torch.rand(27) + 0.1, torch.tensor([1.0, 0.5, 2.0])
    ours = next(RatingGradients(module, ratings).chunks())
    theirs = next(AutogradGradients(Task(module, squared_error), ratings.x, ratings.y).chunks())
    for plain, inside in ((True, Preconditioning()), (False, Preconditioning(divisor))):
        for one, other, piece in zip(ours, theirs, inside.split([12, 15]), strict=True):
            assert one.norms(piece).tolist() == approx(other.norms(piece).tolist(), rel=1e-5), plain
            sums = [rows.weighted_sum(weights, piece).tolist() for rows in (one, other)]
            assert sums[0] == approx(sums[1], rel=1e-4, abs=1e-5)


def test_gradients_of_ratings_refuse_what_they_have_no_closed_form_for():
    module = Factorisation(torch.ones(2, 1), torch.ones(2, 1))
    rows = next(RatingGradients(module, Samples(torch.tensor([[0, 1]]), torch.tensor([4.0]))).chunks())
    with pytest.raises(ValueError, match="no closed form"):
        rows[0].norms(Preconditioning(shift=torch.ones(2)))


# the projected AdaGrad


def small_problem(count: int = 40, features: int = 6) -> Problem:
    torch.manual_seed(1)
    samples = Samples(torch.randint(3, (count, features)), torch.randint(2, (count,)))
    from fedtail.models import LogisticRegression

    return Problem(samples, samples, samples, lambda: LogisticRegression(features), error_percent,
                   public=PublicData(samples.x.float(), samples.y, 8))


def test_the_public_basis_is_the_top_of_the_gradients_second_moment():
    problem = small_problem()
    basis = public_basis(problem, 3)
    module = problem.module()
    rows = torch.cat([torch.cat([one.weighted_sum(torch.eye(40)[k], Preconditioning()) for one in next(AutogradGradients(
        Task(module), problem.train.x.float(), problem.train.y).chunks())])[None] for k in range(40)])
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    assert (basis.T @ basis).flatten().tolist() == approx(torch.eye(3).flatten().tolist(), abs=1e-5)
    assert (basis @ basis.T).flatten().tolist() == approx((vectors[:, -3:] @ vectors[:, -3:].T).flatten().tolist(), abs=1e-4)


def test_with_all_directions_and_no_noise_it_is_adagrad():
    problem, length, epsilon = small_problem(), Length(10, 5), 1e-2
    ours = optimisers.PrivateMethod(ProjectedAdaGrad(dp_sgd(0.1, 1.0, 0.0).transform.clip, torch.eye(7), epsilon),
                                    dp_sgd(0.1, 1.0, 0.0).rule, 0.0)
    cell, found = Cell("x", 0, None, None, "cpu", Silent()), []
    for method in (without_privacy(ours), without_privacy(dp_adagrad(0.1, 1.0, 0.0, epsilon))):
        module, _ = training.trained_module(cell, problem, method, length)
        found.append(torch.cat([one.detach().flatten() for one in module.parameters()]).tolist())
    assert found[0] == approx(found[1], abs=1e-6)


# epsilon


@pytest.mark.parametrize("name", ["DP-SGD", "DP2-RMSProp", "DP2, extra query"])
def test_every_private_method_spends_what_is_promised(name):
    method = optimisers.methods(delayed_words.RANGES)[name]
    case, problem = tuning.Case(name, method, lambda cell: small_problem(), Length(8, 20), epsilon=2.0), small_problem()
    plan = replace(delayed_words.QUICK, delta=1e-2)
    settings = {**tuning.tried_settings(name, method.choices, 1)[0], "phase": 20}
    made = tuning.made(Cell("x", 0, plan, None, "cpu", Silent()), case, settings, problem)
    optimizer = optimizer_for(problem, made, problem.module(), case.length, 0)
    for _ in range(case.length.steps):
        optimizer.step_on(GivenGradients((torch.ones(3, 1, 6), torch.ones(3, 1))))
    spent = optimizer.guarantee(plan.delta).epsilon
    assert spent <= 2.0 + 1e-6
    assert spent > 1.8                                     # noise is not wasted; the extra query is free in the first step only


# data and settings


def test_generated_words_have_the_frequencies_that_are_stated():
    expected = words.zipf(100, 30.0)
    assert float(expected.sum()) == approx(30.0)
    assert float(expected[0] / expected[9]) == approx(10.0)
    found = words.written(expected, torch.zeros(100), 20_000, torch.Generator().manual_seed(0))
    deviation = float((expected[0] + expected[0] ** 2 * (math.exp(0.25) - 1)) ** 0.5)      # of a count with a log-normal length
    assert abs(float(found.x[:, 0].double().mean()) - float(expected[0])) < 5 * deviation / 20_000**0.5
    assert abs(float(found.y.double().mean()) - 0.5) < 5 * 0.5 / 20_000**0.5


def test_frequent_words_say_nothing_of_the_label_and_the_others_do():
    found = words.generated(0, 0.5)
    x, y = found.train.x.double(), found.train.y.double() - 0.5
    links = (x - x.mean(0)).T @ y / (x.std(0) * y.std() * len(y))
    assert float(links[: words.STOP_WORDS].abs().max()) < 5 / len(y) ** 0.5                # correlations of independent columns
    assert float(links[words.STOP_WORDS :].abs().max()) > 10 / len(y) ** 0.5


def test_scores_are_taken_at_equidistant_steps_and_averaged_at_the_end():
    assert equidistant(10, 3) == [3, 7, 10]
    assert equidistant(2, 10) == [1, 2]
    problem = replace(small_problem(), averaged=3)
    cell = Cell("x", 0, None, None, "cpu", Silent())
    found = training.course(cell, problem, dp_sgd(0.5, 1.0, 0.5), Length(10, 10), 10)
    assert found["step"] == list(range(1, 11))
    assert found["test"] == approx(sum(found["course"][-3:]) / 3)


def test_settings_are_searched_for_once_and_then_used_by_every_seed():
    @dataclass(frozen=True)
    class Plan:
        trials: int = 3
        evaluations: int = 2
        delta: float = 1e-2

    used = []

    def make(settings, noise, problem):
        used.append(settings["rate"])
        return dp_sgd(settings["rate"], 1.0, noise)

    method = tuning.Method("m", make, {"rate": (0.1, 0.2, 0.4)})
    case = tuning.Case("m", method, lambda cell: small_problem(), Length(8, 3), noise=0.1)
    assert list(tuning.cells_of([case], 0)) == ["settings: m", "m"]
    assert list(tuning.cells_of([case], 1)) == ["m"]
    found = tuning.searched(Cell("m", 0, Plan(), None, "cpu", Silent()), case)
    assert used == [0.1, 0.2, 0.4]
    assert found["score"] == min(one[-1] for one in found["tried"])
    finished = {0: {"settings: m": {"chosen": {"rate": 0.2}}}}
    tuning.measured(Cell("m", 1, Plan(), None, "cpu", Silent(), finished), case)
    assert used[-1] == 0.2


def test_a_run_that_diverges_is_the_worst():
    assert training.finite(math.nan) == math.inf
    module = toy.LeastSquares(2, bias=False)
    with torch.no_grad():
        module.linear.weight.fill_(math.nan)
    assert error_percent(module, Samples(torch.ones(3, 2), torch.ones(3))) == math.inf


# judging


def results_by_delay(errors: dict[int, list[float]]) -> Results:
    plan = {"phases": list(errors), "seeds": 3}
    cells = {seed: {delayed_words.with_phase(phase): {"seconds": 0.0, "numbers": {"test": values[seed]}}
                    for phase, values in errors.items()} for seed in range(3)}
    return Results("dp2_words", False, plan, None, (), cells)


def test_the_best_delay_is_in_the_middle_or_is_not():
    low, high, end = [20.0, 20.1, 20.2], [30.0, 30.2, 30.1], [10.0, 10.1, 10.2]
    assert delayed_words.best_in_the_middle(results_by_delay({1: high, 10: low, 100: high})).verdict is Verdict.DIRECTION
    assert delayed_words.best_in_the_middle(results_by_delay({1: end, 10: low, 100: high})).verdict is Verdict.DISAGREES
