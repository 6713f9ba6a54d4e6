"""Private recipes by their budget: the ledger of the finished run states no more than was asked for, and hardly less."""

from __future__ import annotations

import pytest

import fedtail
from fedtail import PrivacyBudget, Task, train
from fedtail.deployment.deployed_experiment import deployed_experiments
from fedtail.experiment import ExperimentError
from fedtail.experiment.trust import AS_WRITTEN
from fedtail.models import SoftmaxRegression
from fedtail.privacy.calibration import noise_for
from fedtail.privacy.events import PoissonSampling
from test_experiment import BASE, parsed, refused

from cases import small_population

PEOPLE = small_population(120, seed=3)
BUDGET = {"epsilon": 4.0, "delta": 1e-3, "rounds": 3}
MORE = {"cohort_size": 40, "learning_rate": 0.1, "batch_size": None}
METHODS = {
    "dp_fedavg": lambda **more: fedtail.dp_fedavg(len(PEOPLE), 0.1, **MORE, **more),
    "dp_delta_fl": lambda **more: fedtail.dp_delta_fl(0.5, len(PEOPLE), 0.1, loss_bound=4.0, **MORE, **more),
    "dp_delta_fl, another ratio": lambda **more: fedtail.dp_delta_fl(0.5, len(PEOPLE), 0.1, loss_bound=4.0, quantile_ratio=1.0,
                                                                      **MORE, **more),
}


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
@pytest.mark.parametrize("name", METHODS)
def test_the_ledger_ends_at_the_budget_and_no_round_is_missing(name, noise):
    method = METHODS[name](noise=noise, **BUDGET)
    budget = PrivacyBudget(BUDGET["epsilon"], BUDGET["delta"])
    trained = train(method, Task(SoftmaxRegression(5, 3)), PEOPLE, rounds=BUDGET["rounds"], privacy=budget)
    spent = trained.ledger.guarantee().epsilon
    assert trained.rounds == BUDGET["rounds"]
    assert 0.99 * BUDGET["epsilon"] <= spent <= BUDGET["epsilon"]


def test_the_noise_is_the_one_that_the_planner_finds_for_the_same_rounds():
    levels = noise_for(4.0, 1e-3, 3, PoissonSampling(40 / 120), quantile_ratio=0.25)
    method = METHODS["dp_delta_fl"](**BUDGET)
    assert method.aggregate.noise.noise_multiplier == pytest.approx(levels.update, rel=1e-3)
    assert method.risk.histogram.noise.noise_multiplier == pytest.approx(levels.quantile, rel=1e-3)


def test_the_hand_set_form_stays():
    assert METHODS["dp_fedavg"](noise_multiplier=1.5).aggregate.noise.noise_multiplier == 1.5
    method = METHODS["dp_delta_fl"](noise_multiplier=1.5, quantile_noise_multiplier=2.5)
    assert (method.aggregate.noise.noise_multiplier, method.risk.histogram.noise.noise_multiplier) == (1.5, 2.5)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: METHODS["dp_fedavg"](), "how much noise? epsilon and delta and rounds are missing. Write epsilon=5.0"),
    (lambda: METHODS["dp_fedavg"](epsilon=1.0, delta=1e-3), "how much noise? rounds is missing"),
    (lambda: METHODS["dp_fedavg"](noise_multiplier=1.0, **BUDGET), "noise_multiplier=1 and a budget were given"),
    (lambda: METHODS["dp_delta_fl"](noise_multiplier=1.0), "give both, or neither and a budget"),
    (lambda: fedtail.dp_delta_fl(0.5, 100, 0.1, **BUDGET), "dp_delta_fl needs loss_bound"),
    (lambda: fedtail.dp_delta_fl(0.5, 120, 0.1, loss_bound=1.0, quantile_ratio=0.0, **BUDGET), "quantile_ratio (r) must be positive"),
    (lambda: fedtail.dp_fedavg(PEOPLE, 0.1, 1.0), "population is the number of clients that the model will be trained on, from which "
     "sampling and privacy follow, got a Population. Write population=len(train), here 120."),
    (lambda: fedtail.dp_ftrl("many", 0.1, 1.0, 3), "got a str. Write population=1000, say."),
])
def test_budgets_and_populations_are_refused_in_words(make, text):
    with pytest.raises((ValueError, TypeError)) as reason:
        make()
    assert text in str(reason.value)


FILE = BASE.replace("[sample]\ncohort_size = 8\n", """\
[sample]
part = "Poisson"
rate = 0.5
population = 16
[risk]
part = "Binned"
risk = { part = "Superquantile", tail_fraction = 0.5 }
histogram = { loss_bound = 4.0, expected_clients = 8.0, noise = { noise_multiplier = "budget" } }
[aggregate]
part = "PrivateMean"
clip_norm = 0.1
total = 4.0
noise = { noise_multiplier = "budget" }
""")
PRIVACY = "[privacy]\nepsilon = 3.0\ndelta = 1e-3\n"


def test_a_file_asks_for_the_noise_of_its_budget():
    found = parsed(FILE + PRIVACY)
    wanted = fedtail.dp_delta_fl(0.5, 16, 0.1, loss_bound=4.0, cohort_size=8, epsilon=3.0, delta=1e-3, rounds=4)
    assert found.algorithm.aggregate.noise == wanted.aggregate.noise
    assert found.algorithm.risk.histogram.noise.noise_multiplier == pytest.approx(
        wanted.risk.histogram.noise.noise_multiplier, rel=1e-6)
    assert found.as_table()["aggregate"]["noise"]["noise_multiplier"] == wanted.aggregate.noise.noise_multiplier


def test_noise_of_one_release_is_found_beside_that_of_another_which_is_given():
    text = FILE.replace('histogram = { loss_bound = 4.0, expected_clients = 8.0, noise = { noise_multiplier = "budget"',
                        "histogram = { loss_bound = 4.0, expected_clients = 8.0, noise = { noise_multiplier = 20.0")
    both, one = (parsed(file + PRIVACY).algorithm for file in (FILE, text))
    assert one.risk.histogram.noise.noise_multiplier == 20.0
    assert one.aggregate.noise.noise_multiplier < both.aggregate.noise.noise_multiplier      # more is left for the updates


def test_files_without_a_budget_or_a_population_are_refused(tmp_path):
    assert 'line 19: noise_multiplier = "budget" needs a budget. Write [privacy]' in refused(FILE)
    assert "needs the number of training clients. Write population" in refused(FILE.replace("population = 16\n", "") + PRIVACY)
    (tmp_path / "e.toml").write_text(FILE + PRIVACY)
    with pytest.raises(ExperimentError, match="is for simulations, where every client answers"):
        deployed_experiments(tmp_path / "e.toml")


def test_noise_of_a_budget_is_not_guessed_where_code_was_not_imported():
    text = FILE.replace('part = "Superquantile", tail_fraction = 0.5', 'part = "mine:Risk"') + PRIVACY
    assert "follows from all parts, and code of your own was not imported" in refused(text, trust=AS_WRITTEN)
