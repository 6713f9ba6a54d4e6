"""Private recipes by their budget: the ledger of the finished run states no more than was asked for, and hardly less."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest

import fedtail
from fedtail import BudgetSpentWarning, Ledger, PrivacyBudget, Task, Trained, resume, train
from fedtail.deployment.deployed_experiment import deployed_experiments
from fedtail.deployment.deployed_run import Unwatched
from fedtail.experiment import ExperimentError
from fedtail.experiment.trust import AS_WRITTEN
from fedtail.models import SoftmaxRegression
from fedtail.privacy.calibration import noise_for
from fedtail.privacy.events import PoissonSampling
from fedtail.runs import run as run_experiment
from fedtail.runs.files import RunRefused
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


def run(method, rounds, **settings):
    """A run of `method`, and the texts of the warnings that it gave."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = train(method, Task(SoftmaxRegression(5, 3)), PEOPLE, rounds=rounds, progress=False, **settings)
    return trained, [str(one.message) for one in said]


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_keeps_to_the_budget_of_its_method(name, noise):
    method = METHODS[name](noise=noise, **BUDGET)
    whole, said = run(method, 3)
    assert (whole.rounds, said) == (3, [])
    longer, said = run(method, 30)
    assert longer.rounds == 3
    assert longer.stopped
    assert longer.ledger.guarantee().epsilon <= BUDGET["epsilon"]
    assert ("lasts for 3 of 30 rounds with this noise; training will stop there. The method was made for epsilon = 4 at delta = "
            "0.001 over 3 rounds: make it for these, or give the run a budget of its own, privacy=PrivacyBudget(...).") in said[0]


def test_a_run_that_is_resumed_keeps_to_the_budget_of_its_method():
    method = METHODS["dp_fedavg"](**BUDGET)
    first, _ = run(method, 2)
    with pytest.warns(BudgetSpentWarning):
        assert resume(first, PEOPLE, rounds=5, progress=False).rounds == 3
    by_hand = Trained(method, first.task, first.state, 0)                     # from a state alone
    with pytest.warns(BudgetSpentWarning):
        assert resume(by_hand, PEOPLE, rounds=5, progress=False).rounds == 5        # three rounds of a ledger of its own
    more = resume(first, PEOPLE, rounds=5, progress=False, privacy=PrivacyBudget(20.0, 1e-3))
    assert more.rounds == 7
    assert more.ledger.guarantee().epsilon > BUDGET["epsilon"]


def test_a_budget_of_ones_own_wins():
    method = METHODS["dp_fedavg"](**BUDGET)
    assert run(method, 5, privacy=PrivacyBudget(20.0, 1e-3))[0].rounds == 5
    assert run(method, 5, privacy=Ledger(PrivacyBudget(20.0, 1e-3)))[0].rounds == 5
    assert run(method, 3, privacy=PrivacyBudget(3.0, 1e-3))[0].rounds < 3
    assert run(replace(method, budget=None), 5)[0].rounds == 5


def test_a_budget_without_an_epsilon_is_none():
    method = METHODS["dp_fedavg"](**BUDGET)
    longer, _ = run(method, 30, privacy=PrivacyBudget(randomness="os"))
    assert longer.rounds == 3
    assert longer.ledger.budget == PrivacyBudget(4.0, 1e-3, randomness="os")
    with pytest.raises(ValueError, match="has delta=1e-05 and no epsilon, and the method was made for epsilon = 4"):
        run(method, 3, privacy=PrivacyBudget(delta=1e-5))
    with pytest.raises(ValueError, match=re.escape("Write Ledger(PrivacyBudget(epsilon=4, delta=0.001), ...), or drop")):
        run(method, 3, privacy=Ledger())


def test_a_method_whose_parts_were_exchanged_keeps_its_budget():
    method = METHODS["dp_fedavg"](**BUDGET)
    loud = replace(method, aggregate=replace(method.aggregate, noise=fedtail.GaussianNoise(0.8)))
    shorter, said = run(loud, 3)
    assert shorter.rounds < 3
    assert shorter.ledger.guarantee().epsilon <= BUDGET["epsilon"]
    assert "The method was made for epsilon = 4" in said[0]
    quiet = replace(method, aggregate=replace(method.aggregate, noise=fedtail.GaussianNoise(20.0)))
    assert run(quiet, 30)[0].rounds == 30                                     # the ledger says what rounds cost, not their number
    with pytest.raises(ValueError, match=re.escape("or drop the method's budget with replace(method, budget=None)")):
        run(replace(method, aggregate=fedtail.WeightedMean()), 3)
    with pytest.raises(TypeError, match="a PlannedBudget, got a PrivacyBudget"):
        replace(method, budget=PrivacyBudget(4.0, 1e-3))


def test_a_family_keeps_to_the_strictest_budget_of_its_members():
    strict, lax = METHODS["dp_fedavg"](**BUDGET), METHODS["dp_fedavg"](epsilon=9.0, delta=1e-2, rounds=5)
    family = fedtail.Family((lax, strict))
    assert (family.budget.epsilon, family.budget.delta, family.budget.rounds) == (4.0, 1e-3, 3)
    long = METHODS["dp_fedavg"](epsilon=4.0, delta=1e-3, rounds=12)
    trained, _ = run(fedtail.Family((long, long)), 12)
    assert 0 < trained.rounds < 12
    assert trained.ledger.guarantee().epsilon <= 4.0       # two models cost more than one
    assert fedtail.Family((fedtail.fedavg(), fedtail.fedavg())).budget is None


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


def test_a_run_of_a_file_goes_on_with_no_more_rounds_than_its_budget_pays_for(tmp_path):
    experiment = parsed(FILE + PRIVACY)
    first = run_experiment(experiment, 0, tmp_path / "run", Unwatched())
    assert first.privacy["epsilon"] <= 3.0
    more = parsed(FILE + PRIVACY, "rounds=8")                                 # the noise of eight rounds is another one
    with pytest.raises(RunRefused, match=r"aggregate.noise.noise_multiplier was [\d.]+, is [\d.]+"):
        run_experiment(more, 0, tmp_path / "run", Unwatched(), resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetSpentWarning)
        longer = run_experiment(replace(experiment, rounds=8), 0, tmp_path / "longer", Unwatched())      # the noise of four
    assert "would exceed epsilon = 3 at delta = 0.001" in longer.result["stopped"]
    assert longer.privacy["epsilon"] <= 3.0
