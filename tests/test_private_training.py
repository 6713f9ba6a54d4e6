"""Private training: against textbook arithmetic, by the statistics of its noise, and through every way it can be computed."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy import stats

import fedtail
from fedtail import (
    Binned,
    DiscreteNoise,
    Engine,
    Family,
    GaussianNoise,
    IntegerChannel,
    NoisyHistogram,
    PlainChannel,
    Poisson,
    PrivacyBudget,
    PrivateMean,
    SmoothedSuperquantile,
    Superquantile,
    Tilted,
    resume,
    train,
)
from fedtail.algorithm import planned_round
from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import converse
from fedtail.deployment import ClientRegistry, Node, RemoteFleet, Site
from fedtail.engine import LocalFleet
from fedtail.fleet import SimulatedPopulation
from fedtail.models import SoftmaxRegression
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.calibration import noise_for
from fedtail.privacy.events import PoissonSampling
from fedtail.privacy.minimum_cohort import minimum_cohort_for, reveal_probability
from fedtail.quantiles.noisy_histogram import merge_sparse_ends
from fedtail.risk.base import fit_locally

from cases import small_population

PEOPLE = small_population(60, seed=3)
TASK = fedtail.Task(SoftmaxRegression(5, 3))
LOCAL = {"learning_rate": 0.2, "batch_size": None}
FAINT = 1e-9
ALPHA = 1e-4


def dp_fedavg(z: float = FAINT, clip: float = 0.05, **more):
    return fedtail.dp_fedavg(60, clip, z, cohort_size=30, **{**LOCAL, **more})


def dp_delta_fl(theta: float = 0.5, z: float = FAINT, zq: float = FAINT, clip: float = 0.05, bins: int = 32, **more):
    return fedtail.dp_delta_fl(theta, 60, clip, z, zq, 3.0, cohort_size=30, bins=bins, **{**LOCAL, **more})


def textbook_round(theta: float, clip: float, bins: int, task: fedtail.Task = TASK) -> torch.Tensor:
    """Algorithm 4 without noise, client by client: full-gradient step, clip, count by bin, divide by theta * m."""
    cohort = Poisson(0.5)(PEOPLE, 0, 0).ids.tolist()
    updates, losses = [], []
    for k in cohort:
        low, high = int(PEOPLE.start[k]), int(PEOPLE.start[k] + PEOPLE.size[k])
        module = task.with_params(task.params())
        loss = torch.nn.functional.cross_entropy(module(PEOPLE.inputs[low:high]), PEOPLE.targets[low:high].long())
        loss.backward()
        update = -0.2 * torch.cat([p.grad.flatten() for p in module.parameters()]).double()
        updates.append(update * min(1.0, clip / float(update.norm())))
        losses.append(loss.item())
    bin_of = [min(int(loss / (3.0 / bins)), bins - 1) for loss in losses]
    left, weights = theta * len(cohort), [0.0] * len(cohort)
    for one in sorted(set(bin_of), reverse=True):
        members = [k for k, b in enumerate(bin_of) if b == one]
        share = min(1.0, max(0.0, left / len(members)))
        left -= share * len(members)
        for k in members:
            weights[k] = share
    return sum(w * u for w, u in zip(weights, updates, strict=True)) / (theta * 30)


@pytest.mark.parametrize("method", ["flat", "tree", "optimal"])
@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
@pytest.mark.parametrize("theta", [1.0, 0.5, 0.2])
def test_a_round_with_next_to_no_noise_is_the_textbook_round(theta, noise, method):
    task = fedtail.Task(TASK.with_params(torch.randn(18, generator=torch.Generator().manual_seed(1))))      # losses differ
    planned = {"planned_clients": 10} if noise == "discrete" else {}
    algorithm = dp_delta_fl(theta, noise=noise, method=method, z=1e-6, zq=1e-6, **planned)
    result = train(algorithm, task, PEOPLE, rounds=1, engine=Engine(dtype=torch.float64))
    moved = result.state.params - task.params().double()
    assert torch.allclose(moved, textbook_round(theta, 0.05, 32, task), atol=1e-6)


def test_dp_fedavg_is_the_mean_over_a_poisson_cohort_of_equals():
    moved = train(dp_fedavg(), TASK, PEOPLE, rounds=1, engine=Engine(dtype=torch.float64)).state.params
    assert torch.allclose(moved, textbook_round(1.0, 0.05, 32), atol=1e-8)


def one_round(algorithm, noise_seed: int) -> torch.Tensor:
    """A round with the cohort of seed 0 and its noise from another seed."""
    state = algorithm.initial_state(TASK.params().double(), 0)
    told = replace(algorithm.broadcast(state, 0), noise_seed=noise_seed)
    with LocalFleet(PEOPLE, TASK, dtype=torch.float64) as fleet:
        planned = planned_round(algorithm, fleet, PlainChannel(), len(state.params))
        with PlainChannel().open(fleet, algorithm.sample(PEOPLE, 0, 0), told, fedtail.Ledger(), planned) as ask:
            return converse(algorithm.conversation(state, 0, algorithm.sample(PEOPLE, 0, 0)), ask).params


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_the_noise_of_a_model_has_the_promised_size(noise):
    planned = {"planned_clients": 20} if noise == "discrete" else {}
    quiet = train(dp_fedavg(noise=noise, **planned, z=1e-7), TASK, PEOPLE, rounds=1, engine=Engine(dtype=torch.float64)).state.params
    draws = [one_round(dp_fedavg(z=2.0, noise=noise, **planned), noise_seed) - quiet for noise_seed in range(120)]
    noised = torch.stack(draws).flatten().numpy()
    assert len(Poisson(0.5)(PEOPLE, 0, 0).ids) > 25                               # more came than were planned: no more noise
    expected = 2.0 * 0.05 / 30
    assert noised.std() == pytest.approx(expected, rel=0.06)                      # 2160 numbers: 4.5 standard errors are 7%
    assert stats.kstest(noised / noised.std(), "norm").pvalue > ALPHA


def test_the_number_of_workers_and_the_chunks_change_no_bit_of_the_noise():
    algorithm = dp_delta_fl(z=1.0, zq=1.0, noise="discrete", planned_clients=10)
    found = []
    for settings in ({"workers": 1}, {"workers": 3}, {"workers": 1, "chunk": 7}):
        with LocalFleet(PEOPLE, TASK, **settings) as fleet:
            found.append(train(algorithm, TASK, PEOPLE, rounds=3, fleet=fleet).state.params)
    assert all(torch.equal(found[0], other) for other in found[1:])
    again = train(algorithm, TASK, PEOPLE, rounds=3, seed=1).state.params
    assert not torch.equal(found[0], again)


def test_integer_noise_crosses_a_channel_of_integers_unharmed():
    algorithm = dp_delta_fl(z=1.0, zq=1.0, noise="discrete", planned_clients=10)
    plain = train(algorithm, TASK, PEOPLE, rounds=3).state.params
    integers = train(algorithm, TASK, PEOPLE, rounds=3, channel=IntegerChannel()).state.params
    assert torch.equal(plain, integers)
    with pytest.raises(ValueError, match=r"PrivateMean adds GaussianNoise on the server, to the exact sum, which IntegerChannel is there to hide\. Use DiscreteNoise"):
        train(dp_fedavg(z=1.0), TASK, PEOPLE, rounds=1, channel=IntegerChannel())


def nodes_for(population):
    home = torch.arange(len(population)) * 2 // len(population)
    nodes = [Site(lambda n=n: Node(population.select(home == n), TASK), masked_only=False) for n in range(2)]
    place = torch.cat([torch.arange(int((home == n).sum())) for n in range(2)])
    registry = ClientRegistry(population.key, population.mass, home, place, None)
    return nodes, registry


def test_nodes_take_their_noise_from_their_own_machine_and_answer_twice_alike():
    nodes, registry = nodes_for(PEOPLE)
    heard = []

    def exchange(messages):
        replies = {node: nodes[node].handle(message) for node, message in messages.items()}
        again = {node: nodes[node].handle(message) for node, message in messages.items()}
        heard.append(replies == again)
        return replies

    algorithm = dp_delta_fl(z=1.0, zq=1.0, noise="discrete", planned_clients=10)
    first, second = (train(algorithm, TASK, fleet=RemoteFleet(exchange, registry), rounds=2, seed=0).state.params for _ in range(2))
    assert not torch.equal(first, second)                                         # the same seed, other noise
    assert all(heard)


def test_with_the_operating_systems_randomness_nothing_can_be_replayed():
    budget, asked = PrivacyBudget(randomness="os"), []

    def note(progress):
        asked.append(progress.view.sampled.tolist())

    for _ in range(2):
        train(dp_fedavg(z=1.0), TASK, PEOPLE, rounds=3, seed=0, privacy=budget, on_round=note)
    assert asked[:3] != asked[3:]
    sizes = [len(train(dp_fedavg(), TASK, PEOPLE, rounds=1, privacy=budget, on_round=note).state.params) and len(asked[-1]) for _ in range(40)]
    assert abs(sum(sizes) / 40 - 30) < 6 * math.sqrt(15 / 40)                      # six standard errors: one run in 10^9 fails


LOSSES = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2.5
PLAIN = [Superquantile(0.3), SmoothedSuperquantile(0.3, 0.2), Tilted(1.5), fedtail.QuadraticSuperquantile(0.4, 0.3), fedtail.TailFilter(0.25)]


@pytest.mark.parametrize("risk", PLAIN, ids=lambda risk: type(risk).__name__)
def test_one_histogram_fits_the_dual_of_every_risk_of_the_distribution(risk):
    """Without noise: as if the risk had asked clients whose losses are those of their bins."""
    binned = Binned(risk, NoisyHistogram(3.0, 200.0, GaussianNoise(FAINT), bins=64, method="flat"))
    seen = ClientStatistics(LOSSES, torch.full_like(LOSSES, 7.0))                              # masses are not looked at
    dual = fit_locally(binned.fit(None), seen)
    middles = (LOSSES / (3.0 / 64)).floor().add(0.5).mul(3.0 / 64).float().double()
    alone = ClientStatistics(middles, torch.ones_like(middles))
    expected = risk.density(alone, fit_locally(risk.fit(None), alone))
    assert torch.allclose(binned.density(seen, dual), expected, atol=1e-5)
    assert binned.released_weight(dual) == pytest.approx(float(expected.sum()), rel=1e-5)
    exact = risk.density(ClientStatistics(LOSSES, alone.mass), fit_locally(risk.fit(None), ClientStatistics(LOSSES, alone.mass)))
    assert float((binned.density(seen, dual) - exact).abs().mean()) < 0.05         # bins cost little


def test_equal_losses_share_the_boundary_and_something_moves():
    """At a zero start every loss is log(classes): a bare threshold would count nobody, or everybody."""
    binned = Binned(Superquantile(0.25), NoisyHistogram(3.0, 100.0, GaussianNoise(FAINT)))
    seen = ClientStatistics(torch.full((100,), math.log(3), dtype=torch.float64), torch.ones(100, dtype=torch.float64))
    density = binned.density(seen, fit_locally(binned.fit(None), seen))
    assert torch.allclose(density, torch.full((100,), 0.25).double(), atol=1e-6)


def test_a_failed_client_is_in_no_bin_and_losses_beyond_the_bound_are_in_the_last():
    histogram = NoisyHistogram(2.0, 3.0, GaussianNoise(1.0), bins=4, method="flat")
    rows = histogram.statistic(ClientStatistics(torch.tensor([0.1, 9.0, 2.0, 1.0]).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()), torch.zeros(0))
    assert (rows / rows.max()).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_trimming_moves_thin_ends_inwards_and_keeps_the_rest():
    counts = torch.tensor([0.5, 0.0, 1.0, 20.0, 30.0, 1.5, 0.0, 0.25]).numpy()
    assert merge_sparse_ends(counts, 2.0).tolist() == [0, 0, 0, 21.5, 31.75, 0, 0, 0]
    assert merge_sparse_ends(counts, 0.1).tolist() == pytest.approx(counts.tolist())
    assert merge_sparse_ends(torch.zeros(4).numpy(), 1.0).tolist() == [0, 0, 0, 0]


def test_the_ledger_prices_a_run_as_dp_accounting_does():
    rounds, z, zq = 7, 1.5, 4.0
    result = train(dp_delta_fl(z=z, zq=zq), TASK, PEOPLE, rounds=rounds)
    effective = (z**-2 + zq**-2) ** -0.5
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(effective)), rounds)
    assert result.ledger.guarantee(1e-3).epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-6)
    family = Family((dp_delta_fl(z=z, zq=zq), dp_fedavg(z=z)))
    both = train(family, TASK, PEOPLE, rounds=rounds).ledger.guarantee(1e-3)
    effective = (2 * z**-2 + zq**-2) ** -0.5
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(effective)), rounds)
    assert both.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-6)
    assert both.second_opinion[1] > both.epsilon
    assert both.without_amplification > both.epsilon


def test_small_cohorts_are_not_asked_and_the_rate_is_that_of_those_that_are():
    algorithm = dp_fedavg(z=1.0, noise="discrete", planned_clients=30)
    asked = []
    result = train(algorithm, TASK, PEOPLE, rounds=20, on_round=lambda progress: asked.append(progress.view.cohort_size) and None)
    held = [cohort for cohort in asked if cohort]
    assert 0 < len(held) < 20
    assert min(held) >= 30
    [(event, count)] = result.ledger.rounds
    assert count == len(held)
    assert event.sampling == PoissonSampling(0.5, reveal_probability(0.5, 60, 30))


def test_training_stops_before_it_would_exceed_its_budget_and_says_so():
    budget = PrivacyBudget(epsilon=2.0, delta=1e-3)
    with pytest.warns(fedtail.BudgetSpentWarning) as told:
        result = train(dp_fedavg(z=3.0), TASK, PEOPLE, rounds=500, privacy=budget)
    done = result.state.round
    assert 0 < done < 500
    assert f"epsilon = 2 lasts for {done} of 500 rounds with this noise; training will stop there." in str(told[0].message)
    assert f"stopped after {done} of 500 rounds: round {done} would exceed epsilon = 2 at delta = 0.001." in str(told[1].message)
    [(event, _)] = result.ledger.rounds
    assert result.ledger.guarantee().epsilon <= 2.0 < epsilon_at([(event, done + 1)], 1e-3)
    with pytest.warns(fedtail.BudgetSpentWarning) as told:
        more = resume(result, PEOPLE, rounds=3)
    assert "stopped after 0 of 3 rounds" in str(told[1].message)
    assert more.state.round == done


@pytest.mark.parametrize(("make", "text"), [
    (lambda: train(replace(dp_fedavg(z=1.0), risk=fedtail.PowerFair(1.0)), TASK, PEOPLE, rounds=1), "PowerFair cannot be trained privately: its rows hold powers of losses and squared norms, which nothing bounds."),
    (lambda: train(replace(dp_fedavg(z=1.0), risk=fedtail.Ascent(), sample=fedtail.Everyone()), TASK, PEOPLE, rounds=1), "Ascent cannot be trained privately: its weights live on from round to round"),
    (lambda: Binned(fedtail.PowerFair(1.0), NoisyHistogram(1.0, 9.0, GaussianNoise(1.0))), "PowerFair cannot be trained privately"),
    (lambda: Binned(fedtail.Worst(), NoisyHistogram(1.0, 9.0, GaussianNoise(1.0))), "Worst cannot be trained privately: the largest loss is one client's"),
    (lambda: Binned(fedtail.Mean(), NoisyHistogram(1.0, 9.0, GaussianNoise(1.0))), "Mean does not look at the losses, so it needs no histogram. Use Mean itself."),
    (lambda: NoisyHistogram(0.0, 9.0, GaussianNoise(1.0)), "loss_bound must be positive, got 0."),
    (lambda: NoisyHistogram(1.0, 0.0, GaussianNoise(1.0)), "expected_clients (m) must be at least 1, got 0"),
    (lambda: NoisyHistogram(1.0, 9.0, GaussianNoise(1.0), bins=12, method="tree"), "a tree needs a number of bins that is a power of two, got 12."),
    (lambda: PrivateMean(0.0, GaussianNoise(1.0)), "clip_norm (C) must be positive, got 0."),
    (lambda: PrivateMean(1.0, GaussianNoise(1.0), 0.0), "total must be positive, got 0."),
    (lambda: dp_fedavg(z=1.0, planned_clients=3), "planned_clients=3 is for noise='discrete', whose shares come from the clients."),
    (lambda: dp_fedavg(z=1.0, noise="uniform"), "noise must be gaussian or discrete, got 'uniform'."),
    (lambda: fedtail.dp_fedavg(10, 1.0, 1.0, cohort_size=30), "cohort_size=30 clients a round on average, of a population of 10."),
    (lambda: train(fedtail.fedavg(10), TASK, PEOPLE, rounds=1, privacy=PrivacyBudget(1.0, 1e-3)), "the updates, by WeightedMean would be released without noise, which no epsilon covers."),
    (lambda: train(dp_fedavg(z=0.1), TASK, PEOPLE, rounds=1, privacy=PrivacyBudget(1.0, 1e-3)), "epsilon = 1 at delta = 0.001 does not last for a round with this noise."),
    (lambda: train(replace(dp_fedavg(z=1.0), aggregate=PrivateMean(1.0, GaussianNoise(1.0))), TASK, PEOPLE, rounds=1), "PrivateMean needs a total: Mean does not release the weight of those who contribute."),
])
def test_refusals(make, text):
    with pytest.raises((ValueError, TypeError)) as refused:
        make()
    assert text in str(refused.value)


HALF = small_population(30)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: train(dp_fedavg(z=1.0), TASK, HALF, rounds=1), "cohorts of 30 clients are planned for a population of 60, but this one has 30: its cohorts would have 15, and what is divided by would not fit. Write population=30."),
    (lambda: train(dp_delta_fl(z=1.0, zq=1.0, noise="discrete", planned_clients=10), TASK, HALF, rounds=1), "planned for a population of 60, but this one has 30"),
    (lambda: train(fedtail.Family((dp_delta_fl(), dp_fedavg())), TASK, HALF, rounds=0), "planned for a population of 60, but this one has 30"),
    (lambda: train(replace(dp_fedavg(), sample=Poisson(0.5)), TASK, HALF, rounds=1), "updates are divided by total=30, but of 15 clients about 15 contribute under Mean: they would be 2 times too short. Write total=15."),
    (lambda: train(replace(dp_fedavg(), sample=fedtail.Everyone()), TASK, PEOPLE, rounds=1), "they would be 2 times too long. Write total=60."),
    (lambda: train(replace(dp_delta_fl(0.5), sample=Poisson(0.5)), TASK, HALF, rounds=1), "the histogram is planned for expected_clients=30, but of this population 15 are expected in a round. Write expected_clients=15."),
    (lambda: train(replace(dp_delta_fl(0.5), risk=dp_delta_fl(0.2).risk), TASK, PEOPLE, rounds=1), "updates are divided by total=15, but of 30 clients about 6 contribute under Superquantile: they would be 2.5 times too short. Write total=6."),
    (lambda: train(replace(dp_delta_fl(0.5, smoothing=0.1), risk=dp_delta_fl(0.8, smoothing=0.1).risk), TASK, PEOPLE, rounds=1), "about 24 contribute under SmoothedSuperquantile: they would be 1.6 times too long."),
    (lambda: train(replace(dp_delta_fl(0.5), aggregate=fedtail.AdaptiveClip(0.1, GaussianNoise(1.0), 30.0)), TASK, PEOPLE, rounds=1), "they would be 2 times too short. Write total=15."),
])
def test_numbers_that_were_planned_for_other_clients_or_another_tail_are_refused(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


def test_numbers_that_are_merely_rounded_or_of_no_known_sum_are_accepted():
    near = PrivateMean(0.05, GaussianNoise(1.0), 28.0)
    for algorithm in (replace(dp_fedavg(z=1.0), aggregate=near), replace(dp_fedavg(z=1.0), sample=Poisson(0.45)),
                      replace(dp_fedavg(z=1.0), risk=Tilted(1.0, loss_bound=3.0), aggregate=PrivateMean(0.05, GaussianNoise(1.0), 3.0)),
                      replace(dp_delta_fl(), aggregate=PrivateMean(0.05, GaussianNoise(FAINT)))):
        assert train(algorithm, TASK, PEOPLE, rounds=1).state.round == 1


def test_without_a_total_the_released_weight_divides():
    quiet = dp_delta_fl(0.5)
    released = replace(quiet, aggregate=PrivateMean(0.05, GaussianNoise(FAINT)))
    one, other = (train(a, TASK, PEOPLE, rounds=1, engine=Engine(dtype=torch.float64)).state.params for a in (quiet, released))
    cohort = len(Poisson(0.5)(PEOPLE, 0, 0).ids)
    divisor = min(max(0.5 * cohort, 7.5), 30.0)
    assert torch.allclose(other * divisor, one * 15.0, atol=1e-6)


def test_discrete_noise_is_planned_for_the_smallest_cohort_that_is_likely():
    algorithm = fedtail.dp_fedavg(2500, 0.1, 1.0, cohort_size=100, noise="discrete")
    assert isinstance(algorithm.aggregate.noise, DiscreteNoise)
    planned = algorithm.aggregate.noise.planned_clients
    assert stats.binom.cdf(planned - 1, 2500, 0.04) < 1e-5 <= stats.binom.cdf(planned, 2500, 0.04)


@pytest.mark.parametrize("noise", [GaussianNoise(0.5), DiscreteNoise(0.5, planned_clients=10)], ids=["gaussian", "discrete"])
def test_an_adaptive_clip_norm_finds_the_quantile_of_the_norms_it_is_told_to_find(noise):
    """Against the exact norms of all clients' updates at the model where it ends: half are shorter, to a tenth."""
    people = small_population(400, seed=5)
    algorithm = replace(fedtail.dp_fedavg(400, 1.0, 1.0, cohort_size=200, learning_rate=0.01, batch_size=None),
                        aggregate=fedtail.AdaptiveClip(5.0, noise, 200.0, quantile=0.5, rate=0.5))
    result = train(algorithm, TASK, people, rounds=40)
    norms = []
    for k in range(len(people)):
        rows = slice(int(people.start[k]), int(people.start[k] + people.size[k]))
        module = result.module
        torch.nn.functional.cross_entropy(module(people.inputs[rows]), people.targets[rows].long()).backward()
        norms.append(0.01 * float(torch.cat([p.grad.flatten() for p in module.parameters()]).norm()))
    share = float((torch.tensor(norms) <= float(result.state.part_state("aggregate")[0])).double().mean())
    assert 0.4 < share < 0.6
    [(event, count)] = result.ledger.rounds
    assert count == 40                                                            # equal rounds, whatever the clip norm was
    assert event.releases[0].multiplier("zero-out") == pytest.approx(0.5, rel=1e-3)


def test_an_adaptive_clip_uses_only_what_earlier_rounds_released_and_bounds_its_rows():
    aggregate = fedtail.AdaptiveClip(0.05, GaussianNoise(FAINT), 30.0)
    algorithm = replace(dp_fedavg(), aggregate=aggregate)
    first = train(algorithm, TASK, PEOPLE, rounds=1, engine=Engine(dtype=torch.float64))
    fixed = train(dp_fedavg(clip=0.05), TASK, PEOPLE, rounds=1, engine=Engine(dtype=torch.float64))
    assert torch.allclose(first.state.params, fixed.state.params, atol=1e-8)
    longer = torch.tensor([[0.0] * 9, [1.0] * 9, [1e-3] * 9]).double()
    question = fedtail.questions.Train(algorithm.local, algorithm.risk, torch.zeros(0), aggregate, kept=torch.tensor([0.5]))
    rows = aggregate.rows(longer, ClientStatistics(torch.zeros(3).double(), torch.ones(3).double()).with_density(torch.ones(3).double()), question, None)
    assert float(rows.norm(dim=1).max()) <= aggregate.mechanism.clip_norm
    assert rows[:, -1].tolist() == [0.25, -0.25, 0.25]


@pytest.mark.parametrize(("noise", "ratio"), [("gaussian", 0.25), ("discrete", 0.25)])
def test_noise_calibrated_for_some_rounds_lasts_for_them_and_no_more(noise, ratio):
    rounds, planned = 50, minimum_cohort_for(0.04, 2500)
    drawn = PoissonSampling(0.04, reveal_probability(0.04, 2500, planned if noise == "discrete" else 0))
    levels = noise_for(3.0, 1e-4, rounds, drawn, ratio, discrete=noise == "discrete")
    algorithm = fedtail.dp_delta_fl(0.5, 2500, 0.1, levels.update, levels.quantile, 3.0, noise=noise, **LOCAL)
    crowd = replace(small_population(2500), mass=torch.ones(2500, dtype=torch.float64))
    event = planned_round(algorithm, SimulatedPopulation(crowd), PlainChannel(), 18)
    assert event.sampling == drawn
    assert rounds <= fedtail.Ledger(PrivacyBudget(3.0, 1e-4)).affordable_rounds(event) <= rounds + 1


def test_the_mechanism_of_the_histogram_is_looked_at_before_anything_is_asked():
    mixed = replace(dp_delta_fl(z=1.0, zq=1.0, noise="discrete", planned_clients=10),
                    risk=Binned(Superquantile(0.5), NoisyHistogram(3.0, 30.0, GaussianNoise(1.0))))
    with pytest.raises(ValueError, match="Binned adds GaussianNoise on the server, to the exact sum"):
        train(mixed, TASK, PEOPLE, rounds=0, channel=IntegerChannel())


def test_a_tilted_risk_with_a_public_bound_asks_nothing_and_is_private():
    algorithm = replace(dp_fedavg(z=1.0), risk=Tilted(1.0, loss_bound=3.0), aggregate=PrivateMean(0.05, GaussianNoise(1.0), 10.0))
    assert train(algorithm, TASK, PEOPLE, rounds=2).ledger.guarantee(1e-3).epsilon < math.inf
