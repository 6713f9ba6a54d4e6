"""Evaluation by the clients themselves: what is released is what a table over all clients would give, to a bin."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy import stats
from torch import tensor

import fedtail
from fedtail import Distribution, FederatedEvaluation, Metric, Task, evaluate, resume, train
from fedtail.channel import IntegerChannel, PlainChannel, SecureChannel
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.settings import NodeSettings
from fedtail.engine import LocalFleet
from fedtail.evaluation import MetricRange
from fedtail.evaluation.client_histogram import tail_mean
from fedtail.models import SoftmaxRegression
from fedtail.quantiles.histogram import Edges
from fedtail.report.page import page_data, write_page
from fedtail.runs import RunFolder, find_runs
from fedtail.runs.execution import Interrupted

from cases import small_population
from remote_cases import PEOPLE, Sites
from run_cases import Onlooker, experiment

TRAIN, TEST = small_population(30).split_examples(within=0.4, seed=1)
TRAIN = replace(TRAIN, mass=torch.ones(30, dtype=torch.float64))
EVERYONE = replace(fedtail.fedavg(30, learning_rate=0.3, batch_size=4), sample=fedtail.Everyone())
LOSSES = FederatedEvaluation(loss_bound=3.0, bins=20, every=1)


def task(**settings):
    return Task(SoftmaxRegression(5, 3), **settings)


def expected(values, metric):
    """The row sums by numpy's own histogram."""
    inside = np.clip(values, metric.low, metric.high)
    counts, _ = np.histogram(inside, np.linspace(metric.low, metric.high, metric.bins + 1))
    return counts, inside


# What a histogram says

@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=40), st.integers(2, 30))
def test_a_histogram_of_rows_has_the_moments_of_the_values_and_its_percentiles_to_a_bin(values, bins):
    metric = MetricRange("error", 0.0, 1.0, bins)
    read = metric.histogram_from_sums(metric.rows(tensor(values, dtype=torch.float64)).sum(0))
    counts, inside = expected(np.array(values), metric)
    assert read.num_clients == len(values) == len(read)
    assert read.mean() == pytest.approx(inside.mean(), abs=1e-9)
    assert read.std() == pytest.approx(inside.std(), abs=1e-6)
    exact = Distribution(torch.from_numpy(inside), torch.ones(len(values), dtype=torch.float64))
    for percent in (10, 50, 90):
        assert abs(read.percentile(percent) - exact.percentile(percent)) <= read.resolution + 1e-9
    for fraction in (0.1, 0.3, 1.0):
        assert abs(read.worst(fraction) - exact.worst(fraction)) <= read.resolution + 1e-9
        assert abs(read.best(fraction) - exact.best(fraction)) <= read.resolution + 1e-9
    assert counts.sum() == read.counts.sum()
    assert read.by_client() is read
    with pytest.raises(ValueError, match=r"^a ClientHistogram holds sums over clients, of equal weight, which do not tell how many examples each has\. Statistics by example need"):
        fedtail.evaluation.Evaluation({"error": read}).by_example      # noqa: B018


@given(st.lists(st.integers(0, 6), min_size=2, max_size=12).filter(any), st.floats(0.01, 1.0), st.booleans())
def test_a_tail_of_a_histogram_is_the_tail_of_clients_spread_within_bins(counts, fraction, top):
    edges = Edges.of_equal_width(-1.0, 2.0, len(counts))
    fine = 50                                              # each client as many small ones: a tail to a fraction of one
    spread = np.concatenate([low + (high - low) * (np.arange(fine * count) + 0.5) / (fine * count)
                             for low, high, count in zip(edges.values, edges.values[1:], counts, strict=False) if count])
    ranked = np.sort(spread)[::-1] if top else np.sort(spread)
    weights = np.clip(fraction * len(ranked) - np.arange(len(ranked)), 0, 1)
    assert tail_mean(np.array(counts, float), edges, fraction, top) == pytest.approx((weights * ranked).sum() / weights.sum(), abs=0.01)


def test_a_histogram_over_nobody_says_nothing_and_a_better_end_is_kept():
    none = MetricRange("error").histogram_from_sums(torch.zeros(52))
    assert all(math.isnan(value) for name, value in none.summary().items() if name not in ("clients", "resolution", "noise"))
    rows = MetricRange("auc", better="higher").rows(tensor([0.1, 0.9], dtype=torch.float64)).sum(0)
    auc = MetricRange("auc", better="higher").histogram_from_sums(rows)
    assert auc.worst(0.5) < 0.2
    assert auc.best(0.5) > 0.8
    assert auc.statistic("worst50") == auc.worst(0.5)
    assert auc.statistic("p90") == auc.percentile(90)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: FederatedEvaluation(split="valid"), "split must be test or train, got 'valid'"),
    (lambda: FederatedEvaluation(loss_bound=-1.0), "loss_bound must be positive and finite"),
    (lambda: FederatedEvaluation(every=0), "every must be at least 1 round"),
    (lambda: FederatedEvaluation(more=(MetricRange("error"),)), "more must be metrics of other names, got 'error'"),
    (lambda: FederatedEvaluation(bins=1), "bins must be at least 2"),
    (lambda: FederatedEvaluation(noise=3), "noise must be GaussianNoise"),
])
def test_an_evaluation_that_cannot_be_is_refused(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=6))
def test_no_row_is_longer_than_the_norm_that_noise_is_planned_for(values):
    half = LOSSES.client_half
    rows = half.rows(tensor(values, dtype=torch.float64))
    assert rows.shape == (len(values), half.row_width)
    assert float(rows.norm(dim=1).max()) <= half.row_norm + 1e-12
    assert float(rows.abs().max()) <= 1


# Over channels and fleets

@pytest.mark.parametrize("channel", [PlainChannel(), IntegerChannel(), SecureChannel(16, minimum_contributors=5)], ids=lambda c: type(c).__name__)
def test_what_clients_release_is_the_histogram_of_a_table_over_all_of_them(channel):
    seen = []
    with LocalFleet(TRAIN, task(), workers=1, test=TEST) as fleet:
        trained = train(EVERYONE, task(), fleet=fleet, rounds=2, channel=channel, evaluation=LOSSES, on_round=seen.append)
    plain = train(EVERYONE, task(), TRAIN, rounds=2, channel=channel)
    assert torch.equal(trained.state.params, plain.state.params)              # an evaluation changes nothing
    runs = [*(progress.before for progress in seen), trained]
    assert [run.rounds for run in runs] == [0, 1, 2]
    for run in runs:
        table = evaluate(run, TEST)
        for metric in LOSSES.client_half.ranges:
            found, values = run.evaluation[0][metric.name], table[metric.name].values.float().double().numpy()
            counts, inside = expected(values, metric)
            assert found.counts.tolist() == pytest.approx(counts.tolist(), abs=1e-6)
            assert found.mean() == pytest.approx(inside.mean(), abs=1e-6)
            assert found.std() == pytest.approx(inside.std(), abs=1e-4)
    assert "an evaluation, by ClientMetrics" in " ".join(trained.ledger.guarantee(1e-3).non_private)


def test_members_of_a_family_and_averaged_models_are_evaluated_as_they_would_be_handed_out():
    averaged = replace(EVERYONE, iterate=fedtail.AveragedIterate(0.5))
    family = fedtail.Family((averaged, replace(averaged, risk=fedtail.Superquantile(0.5))))
    with LocalFleet(TRAIN, task(), workers=1, test=TEST) as fleet:
        trained = train(family, task(), fleet=fleet, rounds=3, evaluation=LOSSES)
    assert not torch.equal(trained.state[0].params, trained.algorithm.members[0].result(trained.state[0]))
    for module, found in zip(trained.modules, trained.evaluation, strict=True):
        assert found.loss.mean() == pytest.approx(float(evaluate(module, TEST, task()).loss.values.clamp(max=3.0).mean()), abs=1e-6)


def test_workers_and_a_cohort_change_nothing_and_only_the_cohort_is_evaluated():
    method, found = replace(fedtail.fedavg(12, learning_rate=0.3, batch_size=4)), []
    for workers in (1, 3):
        with LocalFleet(TRAIN, task(), workers=workers, test=TEST) as fleet:
            run = train(method, task(), fleet=fleet, rounds=1, seed=4, evaluation=LOSSES)
            found.append((run.evaluation[0].loss.counts.tolist(), run.evaluation[0].loss.total, fleet.round_view().sampled))
    assert found[0][:2] == found[1][:2]
    values = evaluate(run, TEST.select(found[0][2])).loss.values.numpy()
    assert found[0][0] == expected(values, LOSSES.client_half.ranges[0])[0].tolist()


def test_clients_without_examples_or_with_a_metric_that_is_not_finite_are_in_no_bin():
    def odd(outputs, targets):
        return torch.where(targets.sum() % 2 == 0, math.nan, 0.5)

    judged = task(metrics=[Metric("odd", odd, per="client")])
    evaluation = FederatedEvaluation(more=(MetricRange("odd"),))
    some = TEST.select(range(20))
    with LocalFleet(TRAIN, judged, workers=1, test=some) as fleet:
        run = train(EVERYONE, judged, fleet=fleet, rounds=1, evaluation=evaluation)
    even = sum(int(some.client(k)[1].sum()) % 2 == 0 for k in range(20))
    assert 0 < even < 20
    assert run.evaluation[0]["odd"].num_clients == 20 - even                # not defined for the others, who stay in the error
    assert run.evaluation[0].error.num_clients == 20
    assert run.failed == 0


def test_a_sum_over_too_few_is_never_released_and_training_goes_on():
    few, channel = TEST.select(range(4)), SecureChannel(16, minimum_contributors=5)
    with LocalFleet(TRAIN, task(), workers=1, test=few) as fleet:
        run = train(EVERYONE, task(), fleet=fleet, rounds=2, channel=channel, evaluation=LOSSES)
    assert run.evaluation is None
    released = " ".join(run.ledger.guarantee(1e-3).non_private)
    assert "how many clients contribute under ClientMetrics" in released      # counted,
    assert "an evaluation" not in released                                    # and nothing else
    assert torch.equal(run.state.params, train(EVERYONE, task(), TRAIN, rounds=2, channel=channel).state.params)
    with pytest.raises(ValueError, match="these clients hold out none"), LocalFleet(TRAIN, task(), workers=1) as fleet:
        train(EVERYONE, task(), fleet=fleet, rounds=1, evaluation=LOSSES)
    with pytest.raises(ValueError, match=r"metrics must be those of the task, got 'auc'\. The task has loss, error\."):
        train(EVERYONE, task(), TRAIN, rounds=1, evaluation=FederatedEvaluation("train", more=(MetricRange("auc"),)))
    with pytest.raises(ValueError, match="ByMass draws large clients more often"):
        train(replace(EVERYONE, sample=fedtail.ByMass(5)), task(), TRAIN, rounds=1, evaluation=replace(LOSSES, split="train"))


class FirstFive:
    """A sampler of somebody's own that takes the first five clients, and does not declare whether that is fair to the others."""

    def __call__(self, population, seed, round):
        return fedtail.Everyone()(population.select(torch.arange(len(population)) < 5), seed, round)

    def expected_size(self, population):
        return 5

    def event(self, population):
        return fedtail.Everyone().event(population)

    def takes_everyone(self, population):
        return False

    def check(self, population):
        pass


def test_evaluation_over_cohorts_of_an_undeclared_sampler_is_refused():
    own, everybody = replace(EVERYONE, sample=FirstFive()), replace(LOSSES, split="train")
    assert train(own, task(), TRAIN, rounds=1).state.round == 1
    with pytest.raises(ValueError, match=r"^FirstFive does not declare whether its cohorts represent all clients equally\. Give it a "):
        train(own, task(), TRAIN, rounds=1, evaluation=everybody)
    FirstFive.unequal = "takes the first five"
    with pytest.raises(ValueError, match=r"^FirstFive takes the first five, so that an evaluation over its cohorts would be about "):
        train(own, task(), TRAIN, rounds=1, evaluation=everybody)


# Privacy

PRIVATE = FederatedEvaluation("train", bins=8, noise=fedtail.GaussianNoise(4.0), every=1)


def test_a_private_evaluation_costs_what_a_gaussian_release_costs_and_the_budget_stops_it():
    private = replace(EVERYONE, aggregate=fedtail.PrivateMean(1.0, fedtail.GaussianNoise(4.0), 30.0))
    with LocalFleet(TRAIN, task(), workers=1) as fleet:
        run = train(private, task(), fleet=fleet, rounds=0, evaluation=PRIVATE, privacy=fedtail.PrivacyBudget(delta=1e-3))
    epsilon = run.ledger.guarantee(1e-3).epsilon

    def delta(eps, z=4.0):      # of one Gaussian release, add-or-remove, in closed form (Balle and Wang 2018)
        return stats.norm.cdf(0.5 / z - eps * z) - math.exp(eps) * stats.norm.cdf(-0.5 / z - eps * z)

    assert delta(epsilon) == pytest.approx(1e-3, rel=0.02)
    with LocalFleet(TRAIN, task(), workers=1) as fleet, pytest.warns(fedtail.BudgetSpentWarning, match="at the end are not evaluated"):
        spent = resume(run, fleet=fleet, rounds=0, evaluation=PRIVATE, privacy=fedtail.PrivacyBudget(epsilon=epsilon * 1.01, delta=1e-3))
    assert spent.evaluation is None
    with pytest.raises(ValueError, match="adds GaussianNoise on the server"):
        train(EVERYONE, task(), TRAIN, rounds=1, channel=SecureChannel(16), evaluation=PRIVATE)
    with pytest.raises(ValueError, match=r"an evaluation, by ClientMetrics would .* without noise, which no epsilon covers"):
        train(private, task(), TRAIN, rounds=1, evaluation=replace(PRIVATE, noise=None, every=7), privacy=fedtail.PrivacyBudget(epsilon=1.0, delta=1e-3))


def test_the_noise_in_a_histogram_is_the_one_it_was_priced_for():
    """Two-sided chi-square test of the variance over 40 runs x 8 bins, in the middle of its range: error rate 1e-6."""
    half, errors = PRIVATE.client_half, []
    exact = train(EVERYONE, task(), TRAIN, rounds=0, evaluation=replace(PRIVATE, noise=None)).evaluation[0].error
    for seed in range(40):
        rows = half.rows(evaluate(train(EVERYONE, task(), TRAIN, rounds=0), TRAIN).error.values[:, None])
        noisy = PRIVATE.mechanism.on_server(rows.sum(0), fedtail.privacy.SeededRandomness(seed, "noise", 0, 0))
        errors += (noisy[2:].numpy() - exact.counts).tolist()
    scaled = np.square(errors).sum() / (4.0 * half.row_norm) ** 2
    assert stats.chi2.ppf(5e-7, len(errors)) < scaled < stats.chi2.ppf(1 - 5e-7, len(errors))
    assert PRIVATE.evaluation_from_sums(torch.zeros(10)).error.noise == 4.0 * half.row_norm


# On nodes

def test_nodes_find_what_the_simulator_finds_and_say_what_they_lack():
    train_part, test_part = PEOPLE.split_examples(within=0.3, seed=0)
    train_part = replace(train_part, mass=torch.ones(30, dtype=torch.float64))
    channel = SecureChannel(16, minimum_contributors=5)
    sites = Sites(people=train_part, test=test_part, restart=True)
    there = train(EVERYONE, task(), fleet=sites.fleet(), rounds=2, channel=channel, evaluation=LOSSES)
    with LocalFleet(train_part, task(), workers=1, test=test_part) as fleet:
        here = train(EVERYONE, task(), fleet=fleet, rounds=2, channel=channel, evaluation=LOSSES)
    assert there.evaluation[0].loss.counts.tolist() == pytest.approx(here.evaluation[0].loss.counts.tolist(), abs=1e-6)
    assert there.evaluation[0].loss.mean() == pytest.approx(here.evaluation[0].loss.mean(), abs=1e-5)
    bare = Sites(people=train_part)
    fleet = bare.fleet()
    without = train(EVERYONE, task(), fleet=fleet, rounds=1, channel=channel, evaluation=LOSSES)
    assert without.evaluation is None
    assert without.state.round == 1


def test_a_node_holds_out_a_share_of_each_clients_examples_or_a_file_of_its_own(tmp_path):
    people = fedtail.Population.from_arrays(np.arange(40.0)[:, None], np.arange(40) % 2, np.repeat(["a", "b", "c", "d"], 10))
    people.save(tmp_path / "people")
    base = 'name = "north"\nexperiment = "experiment.toml"\ndata = "people"\n'
    (tmp_path / "node.toml").write_text(base + "test_share = 0.2\n")
    own, held = NodeSettings.read(tmp_path / "node.toml").read_splits()
    assert (own.size.tolist(), held.size.tolist()) == ([8] * 4, [2] * 4)
    assert sorted([*own.inputs.flatten().tolist(), *held.inputs.flatten().tolist()]) == list(range(40))
    fedtail.Population.from_arrays(np.ones((3, 1)), [0, 1, 1], ["d", "b", "x"]).save(tmp_path / "held")
    (tmp_path / "node.toml").write_text(base + 'test = "held"\n')
    own, held = NodeSettings.read(tmp_path / "node.toml").read_splits()
    assert held.key.tolist() == own.key[[1, 3]].tolist()
    (tmp_path / "node.toml").write_text(base)
    assert NodeSettings.read(tmp_path / "node.toml").read_splits()[1] is None
    for wrong, text in (("test_share = 1.5", r"test_share must be in \[0, 1\)"), ('test_share = 0.5\ntest = "held"', "Write one of them")):
        (tmp_path / "node.toml").write_text(base + wrong + "\n")
        with pytest.raises(ValueError, match=text):
            NodeSettings.read(tmp_path / "node.toml")


FILE = """\
name = "deployed"
rounds = 4
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[sample]
cohort_size = 20
[local]
learning_rate = 0.3
[channel]
part = "SecureChannel"
threshold = 11
minimum_contributors = 3
[evaluate]
keep_best = "loss.p90"
[evaluate.on_nodes]
loss_bound = 3.0
every = 2
"""


def test_a_deployed_run_has_tails_a_page_and_its_best_model_and_goes_on_after_a_crash(tmp_path):
    (tmp_path / "experiment.toml").write_text(FILE)
    made = deployed_experiment(tmp_path / "experiment.toml")
    train_part, test_part = PEOPLE.split_examples(within=0.3, seed=0)
    train_part = replace(train_part, mass=torch.ones(30, dtype=torch.float64))
    sites = Sites(people=train_part, test=test_part)

    def crash():
        crash.rounds += 1
        if crash.rounds == 3:
            raise KeyboardInterrupt

    crash.rounds = 0
    with pytest.raises(KeyboardInterrupt):
        DeployedRun(made, 0, tmp_path / "run").run(sites.fleet(), crash)
    trained = DeployedRun(made, 0, tmp_path / "run", resume=True).run(sites.fleet())
    run = RunFolder.open(tmp_path / "run")
    assert [line["round"] for line in run.metrics] == [0, 2, 4]
    lines = [line["members"][0]["test"] for line in run.metrics]
    assert lines[-1]["loss"]["worst10"] == trained.evaluation[0].loss.worst(0.1)
    assert lines[-1]["error"]["clients"] == 20
    best = json.loads((tmp_path / "run" / "best.json").read_text())[0]
    assert best["value"] == min(line["loss"]["p90"] for line in lines)
    assert (tmp_path / "run" / "best.safetensors").is_file()
    assert "best.safetensors" in run.result["files"]
    assert find_runs(tmp_path / "run")[0].is_finished
    data = page_data([run])
    assert data["distributions"]["clients"] == [20]
    assert data["clients"] is None
    assert any("of the errors of its clients a histogram is known, with bins of width 0.02" in note for note in data["notes"])
    assert write_page([run], tmp_path).read_text().count('id="distribution"') == 1
    spread = run.values_from_histogram("error")
    assert spread.mean() == pytest.approx(lines[-1]["error"]["mean"], abs=0.02)


def test_a_deployed_run_ends_early_where_no_better_model_is_found_and_stays_ended_when_it_is_resumed(tmp_path):
    """Training with a step of nothing finds no better model: two evaluations after the first, the run is over."""
    (tmp_path / "experiment.toml").write_text(FILE.replace("rounds = 4", "rounds = 40").replace('keep_best = "loss.p90"', 'keep_best = "loss.p90"\npatience = 2')
                                              .replace("learning_rate = 0.3", "learning_rate = 1e-30").replace("cohort_size = 20", "cohort_size = 30"))
    made = deployed_experiment(tmp_path / "experiment.toml")
    train_part, test_part = PEOPLE.split_examples(within=0.3, seed=0)
    sites = Sites(people=replace(train_part, mass=torch.ones(30, dtype=torch.float64)), test=test_part)
    DeployedRun(made, 0, tmp_path / "run").run(sites.fleet())
    run = RunFolder.open(tmp_path / "run")
    assert [line["round"] for line in run.metrics] == [0, 2, 4]
    assert run.result["round"] == 5 < 40
    assert "no better model" in run.result["stopped"] or run.result["stopped"]
    (tmp_path / "run" / "result.json").unlink()               # killed between the last checkpoint and the results
    before = len(sites.letters)
    DeployedRun(made, 0, tmp_path / "run", resume=True).run(sites.fleet())
    assert len(sites.letters) == before                       # nobody is asked for another evaluation
    assert RunFolder.open(tmp_path / "run").result["stopped"] == run.result["stopped"]


def test_in_the_simulator_the_best_models_are_kept_too(tmp_path):
    whole, other = (tmp_path / name for name in ("whole", "other"))
    made = experiment("family", 'evaluate.keep_best="worst10"', "evaluate.every=1")
    found = fedtail.runs.run(made, 0, whole, Onlooker())
    with pytest.raises(Interrupted):
        fedtail.runs.run(made, 0, other, Onlooker(stop_after=3))
    again = fedtail.runs.run(made, 0, other, Onlooker(), resume=True)
    assert again.result["best"] == found.result["best"]
    for member, best in enumerate(found.result["best"]):
        values = {line["round"]: line["members"][member]["validation"]["error"]["worst10"] for line in found.metrics}
        assert best["value"] == min(values.values()) == values[best["round"]]
        module = made.task.make(0).module
        module.load_state_dict(load_file(whole / f"best-{member}.safetensors"))
        validation = made.data.load(0)["validation"]
        assert evaluate(module, validation, made.task.make(0)).error.worst(0.1) == pytest.approx(best["value"], abs=1e-6)
    with pytest.raises(ValueError, match="there is no statistic 'worst'"):
        experiment("family", 'evaluate.keep_best="worst"')
