"""Personal models where the data are: evaluated by their own clients, lost and begun again, predicting on the node."""

from __future__ import annotations

import json
import math
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import fedtail
from fedtail import Ditto, FederatedEvaluation, LocalSGD, SecureChannel, evaluate_personal, train
from fedtail.cli import app
from fedtail.deployment import RemoteFleet
from fedtail.deployment.consent import accept, experiment_digest
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.own_models import OwnModel
from fedtail.deployment.policy_example import write_policy
from fedtail.deployment.settings import NodeSettings
from fedtail.engine.local_fleet import LocalFleet
from fedtail.models import SoftmaxRegression
from fedtail.personal import APFL
from fedtail.report import page_data, write_page
from fedtail.runs import RunFolder
from fedtail.runs.evaluated_models import EvaluatedModel, personal_sentences
from fedtail.wire import pack

from cases import small_population
from remote_cases import Sites, registry_of

PEOPLE = replace(small_population(30), mass=torch.ones(30, dtype=torch.float64))
TRAIN, TEST = PEOPLE.split_examples(within=0.3, seed=0)
STEPS = LocalSGD(0.2, batch_size=4, local_steps=3)
DITTO = replace(fedtail.fedavg(8), local=STEPS, personal=Ditto(0.1, STEPS))
BOTH = FederatedEvaluation(loss_bound=3.0, bins=8, every=2)


def task() -> fedtail.Task:
    torch.manual_seed(0)
    return fedtail.Task(SoftmaxRegression(5, 3))


def everyone_evaluates(method, rounds: int, evaluation=BOTH, workers: int = 1, **more):
    """Train by the method, then have everybody evaluate in a round for that alone; the run, and what was found."""
    with LocalFleet(TRAIN, task(), workers=workers, test=TEST) as fleet:
        trained = train(method, task(), fleet=fleet, rounds=rounds, **more)
        judged = fedtail.resume(replace(trained, algorithm=replace(method, sample=fedtail.Everyone())), fleet=fleet, rounds=0,
                                evaluation=evaluation, **more)
        return trained, judged.evaluation[0], judged, evaluate_personal(trained, TEST)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("personal", [DITTO.personal, APFL(0.5, STEPS)], ids=["ditto", "apfl"])
def test_clients_release_the_histogram_of_their_personal_models(workers, personal):
    _, found, judged, exact = everyone_evaluates(replace(DITTO, personal=personal), 2, workers=workers)
    assert 0 < int(exact.has_model.sum()) < 30
    for told, known in ((found, exact.shared), (found.personal, exact.personal)):
        for metric, high in (("loss", 3.0), ("error", 1.0)):
            values = known[metric].values.float().double().numpy()
            assert told[metric].counts.tolist() == np.histogram(np.clip(values, 0, high), np.linspace(0, high, 9))[0].tolist()
            assert told[metric].mean() == pytest.approx(np.clip(values, 0, high).mean(), abs=1e-6)
    assert found.personal.loss.counts.tolist() != found.loss.counts.tolist()
    [(event, _)] = judged.ledger.rounds[-1:]
    assert [release.what for release in event.releases] == ["an evaluation, by ClientMetrics", "an evaluation, by PersonalMetrics"]


def test_members_without_personal_models_and_examples_that_were_trained_on_are_not_asked_about():
    plain = replace(DITTO, personal=fedtail.NoPersonalModels())
    family = fedtail.Family((plain, DITTO))
    with LocalFleet(TRAIN, task(), workers=1, test=TEST) as fleet:
        found = train(family, task(), fleet=fleet, rounds=1, evaluation=BOTH).evaluation
    assert found[0].personal is None
    assert found[1].personal is not None
    assert replace(BOTH, split="train").personal_halves(DITTO) == {}
    assert len(BOTH.round_with_evaluation(family, only=True).releases(18)) == 3


def test_averaged_models_are_what_clients_without_a_personal_model_predict_by():
    method = replace(DITTO, iterate=fedtail.AveragedIterate())
    _, found, _, exact = everyone_evaluates(method, 3)
    assert found.personal.loss.mean() == pytest.approx(float(exact.personal.loss.values.clamp(max=3.0).mean()), abs=1e-6)
    assert 0 < int(exact.has_model.sum()) < 30


def test_two_private_evaluations_cost_what_two_gaussian_releases_cost():
    noisy = replace(BOTH, noise=fedtail.GaussianNoise(4.0))
    private = replace(DITTO, sample=fedtail.Everyone(), aggregate=fedtail.PrivateMean(1.0, fedtail.GaussianNoise(4.0), 30.0))
    _, _, judged, _ = everyone_evaluates(private, 0, noisy, privacy=fedtail.PrivacyBudget(delta=1e-3))
    epsilon = judged.ledger.guarantee(1e-3).epsilon
    z = 4.0 / math.sqrt(2)                     # two releases of one noise are one of a sensitivity times the root of two

    def delta(eps):                            # of a Gaussian release, add-or-remove, in closed form (Balle and Wang 2018)
        return stats.norm.cdf(0.5 / z - eps * z) - math.exp(eps) * stats.norm.cdf(-0.5 / z - eps * z)

    assert delta(epsilon) == pytest.approx(1e-3, rel=0.02)


def test_nodes_find_what_the_simulator_finds():
    channel = SecureChannel(5, minimum_contributors=3)
    sites = Sites(people=TRAIN, test=TEST, task=task(), restart=True)      # a new process for every message
    there = train(DITTO, task(), fleet=sites.fleet(), rounds=3, channel=channel, evaluation=BOTH)
    with LocalFleet(TRAIN, task(), workers=1, test=TEST) as fleet:
        here = train(DITTO, task(), fleet=fleet, rounds=3, channel=channel, evaluation=BOTH)
    for metric in ("loss", "error"):
        assert there.evaluation[0].personal[metric].counts.tolist() == here.evaluation[0].personal[metric].counts.tolist()
    assert there.evaluation[0].personal.loss.mean() == pytest.approx(here.evaluation[0].personal.loss.mean(), abs=1e-5)
    assert there.evaluation[0].personal.loss.mean() != pytest.approx(there.evaluation[0].loss.mean(), abs=1e-3)


def test_a_node_that_lost_its_memory_starts_from_the_model_it_receives():
    method = replace(DITTO, sample=fedtail.Everyone(), local=replace(STEPS, batch_size=None), personal=Ditto(0.1, replace(STEPS, batch_size=None)))
    sites = Sites(nodes=3, people=TRAIN, task=task())
    before = train(method, task(), fleet=sites.fleet(), rounds=2)
    sites.sites[1] = sites.fresh(1)                            # the folder is gone, the node is not
    fleet = sites.fleet()
    fedtail.resume(before, fleet=fleet, rounds=1)
    fleet.finish()
    received = before.state.params
    for node in (0, 1):
        rows = sites.sites[node]._loaded_node().fleet.memory().kept["personal 0"]
        fresh = []
        for k in range(10):                                    # three steps by hand, from the model received in the last round
            x, y = sites.people[node].client(k)
            v = received.clone()
            for _ in range(3):
                w = v.clone().requires_grad_()
                loss = torch.nn.functional.cross_entropy(x.float() @ w[:15].reshape(3, 5).T + w[15:], y)
                v = v - 0.2 * (torch.autograd.grad(loss, w)[0] + 0.1 * (v - received))
            fresh.append(v)
        same = torch.allclose(rows, torch.stack(fresh), atol=1e-5)
        assert same == (node == 1)


# in a deployed run, and on the node

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
learning_rate = 0.2
[channel]
part = "SecureChannel"
threshold = 2
minimum_contributors = 2
[personal]
part = "Ditto"
strength = 0.1
local = { learning_rate = 0.2, local_steps = 3 }
[evaluate.on_nodes]
loss_bound = 3.0
every = 2
"""


class Folders:
    """Three nodes made from their settings, each with its folder, behind one exchange."""

    def __init__(self, place: Path, file: str = FILE, names=("a", "b", "c"), **more):
        self.settings, people = {}, replace(PEOPLE, names=np.array([f"client {k}" for k in range(30)]))
        self.registry = registry_of(people, 3)
        for k, name in enumerate(names):
            folder = place / name
            folder.mkdir(parents=True)
            (folder / "experiment.toml").write_text(file)
            people.select(self.registry.node == k).save(folder / "people")
            (folder / "node.toml").write_text(f'name = "{name}"\nexperiment = "experiment.toml"\ndata = "people"\nminimum = 2\n'
                                              'keys = "data"\ntest_share = 0.3\nmasked_only = false\n')
            self.settings[k] = NodeSettings.read(folder / "node.toml")
            write_policy(self.settings[k], trainings=10)
            accept(self.settings[k], experiment_digest(self.settings[k].read_experiments()))
        self.sites = {k: one.make_site() for k, one in self.settings.items()}

    def exchange(self, letters):
        return {node: self.sites[node].handle(letter, keep=lambda saved: None) for node, letter in letters.items()}

    def fleet(self):
        return RemoteFleet(self.exchange, self.registry)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    place = tmp_path_factory.mktemp("deployed")
    (place / "experiment.toml").write_text(FILE)
    nodes = Folders(place)
    trained = DeployedRun(deployed_experiment(place / "experiment.toml"), 0, place / "run").run(nodes.fleet())
    return place, nodes, trained


def test_a_deployed_run_has_both_in_its_files_and_on_its_page(deployed, tmp_path):
    place, _, trained = deployed
    run = RunFolder.open(place / "run")
    assert run.personal == ["evaluated"]
    assert [sorted(line["personal"][0]["test"]) for line in run.metrics] == [["error", "loss"]] * 3
    own = trained.evaluation[0].personal
    assert run.result["personal"][0]["test"]["error"]["mean"] == own.error.mean()
    assert run.result["personal_histograms"][0]["error"]["counts"] == own.error.counts.tolist()
    assert [method["label"] for method in page_data([run])["methods"]] == ["deployed, shared", "deployed, personal"]
    spread = run.values_from_histogram("error", EvaluatedModel(0, True))
    assert len(spread) == round(own.error.counts.sum()) == 20
    assert page_data([run])["distributions"]["clients"] == [20, 20]
    assert "deployed, personal" in write_page([run], tmp_path).read_text()
    told = "\n".join((place / "run" / "ledger.jsonl").read_text().splitlines())
    assert told.count("an evaluation, by PersonalMetrics") >= 1


def test_what_clients_remember_is_in_folders_of_the_owner(deployed):
    """The files are written by a node over either transport, whatever mode its process gives to new files."""
    place, nodes, _ = deployed
    for settings in nodes.settings.values():
        written = [path for path in (settings.folder / "memory").rglob("*") if path.is_file()]
        assert {"node.msgpack", "received.msgpack"} <= {path.name for path in written}
        for path in (*written, *settings.budget_folder.iterdir(), settings.audit_file):
            ways = [path, *(one for one in path.parents if one.is_relative_to(place) and one != place)]
            assert any(not stat.S_IMODE(one.stat().st_mode) & 0o077 for one in ways), path


def test_nodes_that_evaluate_on_training_examples_do_not_judge_personal_models(tmp_path):
    (tmp_path / "experiment.toml").write_text(FILE + 'split = "train"\n')
    nodes = Folders(tmp_path, FILE + 'split = "train"\n')
    DeployedRun(deployed_experiment(tmp_path / "experiment.toml"), 0, tmp_path / "run").run(nodes.fleet())
    run = RunFolder.open(tmp_path / "run")
    assert run.personal == ["not evaluated"]
    assert personal_sentences([run]) == ["deployed: the personal models are not evaluated: nodes evaluate on examples that these have "
                                         'seen. Write split = "test" below [evaluate.on_nodes], and test_share = 0.2 in each node.toml.']


def command(*words: str):
    return CliRunner().invoke(app, ["deploy", "node", "predict", *map(str, words)])


def owners(nodes: Folders, node: int) -> dict[int, torch.Tensor]:
    """Who of a node's clients has a personal model, and which, from the node that is running."""
    rows = nodes.sites[node]._loaded_node().fleet.memory().kept["personal 0"]
    return {k: row for k, row in enumerate(rows) if not row.isnan().any()}


def test_a_node_predicts_by_its_own_models_while_it_is_running(deployed, tmp_path):
    place, nodes, trained = deployed
    torch.manual_seed(3)
    x = 3 * torch.randn(50, 5)
    np.savez(tmp_path / "new.npz", x=x.numpy())
    known = owners(nodes, 1)
    k, row = next(iter(known.items()))
    shared = command(place / "b" / "node.toml", "--data", tmp_path / "new.npz", "--client", f"client {10 + k}", "--received", "--json")
    done = command(place / "b" / "node.toml", "--data", tmp_path / "new.npz", "--client", f"client {10 + k}", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[0])
    assert (told["client"], told["model"]) == (f"client {10 + k}", "personal")
    assert told["predictions"] == (x @ row[:15].reshape(3, 5).T + row[15:]).argmax(1).tolist()
    w = trained.state.params                                   # the last round was for evaluation, of the final model
    assert json.loads(shared.stdout.splitlines()[0])["predictions"] == (x @ w[:15].reshape(3, 5).T + w[15:]).argmax(1).tolist()
    assert json.loads(shared.stdout.splitlines()[0])["model"] == "received"
    plain = command(place / "b" / "node.toml", "--data", tmp_path / "new.npz", "--client", f"client {10 + k}", "--out", tmp_path / "p.npz")
    assert np.load(tmp_path / "p.npz")["prediction"].tolist() == told["predictions"]
    assert f"50 predictions by the personal model of client client {10 + k}, in " in plain.stderr


def test_where_there_is_no_personal_model_nothing_stands_in_for_it_unasked(deployed, tmp_path):
    place, nodes, _ = deployed
    np.savez(tmp_path / "new.npz", x=np.ones((2, 5), np.float32))
    asked = ["--data", tmp_path / "new.npz"]
    for words, text in (([place / "b" / "node.toml", *asked], "this node has 10 clients. Say which with --client: client 10, client 11, "),
                        ([place / "b" / "node.toml", *asked, "--client", "x"], "there is no client 'x' on this node"),
                        ([place / "b" / "node.toml", "--data", tmp_path / "no.npz"], "there is no file")):
        done = command(*words)
        assert done.exit_code == 2
        assert text in done.stderr
    lost = Folders(tmp_path / "lost")                          # nodes whose memory is gone
    done = command(tmp_path / "lost" / "a" / "node.toml", *asked, "--client", "client 0")
    assert done.exit_code == 2
    assert "client client 0 has no personal model on this node: it was never sampled, or its memory was lost" in done.stderr
    done = command(tmp_path / "lost" / "a" / "node.toml", *asked, "--client", "client 0", "--received")
    assert "this node has received no model yet, or has lost its memory" in done.stderr
    (tmp_path / "lost" / "a" / "experiment.toml").write_text(FILE.partition("[personal]")[0])
    done = command(tmp_path / "lost" / "a" / "node.toml", *asked, "--client", "client 0")
    assert "the method of this node trains no personal models" in done.stderr
    assert lost.settings[0].name == "a"
    assert nodes.registry.node.tolist().count(1) == 10


def test_what_cannot_be_predicted_is_said_in_words(deployed, tmp_path):
    place, nodes, _ = deployed
    k = next(iter(owners(nodes, 1)))
    np.savez(tmp_path / "wide.npz", x=np.ones((2, 7), np.float32))
    asked = [place / "b" / "node.toml", "--data", tmp_path / "wide.npz", "--client", f"client {10 + k}"]
    for words, text in (([], "the model cannot read examples of shape (7,)"), (["--member", 1], "has 1 models, and --member 1 is none of them. Positions are from 0 to 0.")):
        done = command(*asked, *words)
        assert done.exit_code == 2
        assert text in done.stderr


def test_a_personal_model_and_the_shared_one_are_of_one_training(deployed, tmp_path):
    """A newer training without personal models has left the model that it received, of another size: it is not theirs."""
    place, nodes, _ = deployed
    shutil.copytree(place / "b", tmp_path / "b")
    (tmp_path / "b" / "memory" / "ff").mkdir()
    (tmp_path / "b" / "memory" / "ff" / "received.msgpack").write_bytes(pack(torch.zeros(1, 4)))
    np.savez(tmp_path / "new.npz", x=np.ones((2, 5), np.float32))
    k = next(iter(owners(nodes, 1)))
    words = ["--data", tmp_path / "new.npz", "--client", f"client {10 + k}", "--json"]
    assert command(tmp_path / "b" / "node.toml", *words).stdout == command(place / "b" / "node.toml", *words).stdout != ""
    assert "the models in ff have 4 parameters, and that of the node's experiment 18" in command(tmp_path / "b" / "node.toml", *words, "--received").stderr


@pytest.mark.parametrize(("module", "axes", "want"), [(torch.nn.Linear(1, 1), 1, [0, 1, 1]), (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0)), 1, [0, 1, 1]),
                                                      (torch.nn.Linear(1, 2), 1, [1, 0, 0]), (torch.nn.Linear(1, 1), None, [[-1.0], [0.5], [2.0]])])
def test_one_output_is_a_logit_where_targets_are_classes_and_a_number_where_they_are_not(module, axes, want):
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.tensor([1.0, -1.0])[: len(one)].reshape(one.shape) if one.ndim == 2 else torch.zeros_like(one))
    assert OwnModel(module, "personal", "a", axes).predict(torch.tensor([[-1.0], [0.5], [2.0]])).tolist() == want
