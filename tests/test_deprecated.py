"""Names that have changed: the old ones work and warn, and files that hold them are read."""

import functools
import importlib
import inspect
import json
import warnings
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtail
from fedtail import AdaptiveClip, GaussianNoise, Ledger, PlainChannel, PrivacyBudget, SecureChannel, State
from fedtail.channel import FixedPoint, SignedGraph, SparseGraph
from fedtail.client_statistics import ClientStatistics
from fedtail.clients import Clients
from fedtail.composition import Composition
from fedtail.deployment import AnswerReport, Node, RemoteFleet, Site
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deprecated import ATTRIBUTES, KEYWORDS, NAMES, VALUES
from fedtail.engine import LocalFleet
from fedtail.evaluation import ClientHistogram, FederatedEvaluation, MetricRange
from fedtail.fleet import RoundView
from fedtail.local import Penalty, Proximal
from fedtail.privacy import DiscreteGaussianTable, GaussianRelease, PoissonSampling, RoundEvent, guarantee
from fedtail.quantiles import Edges, NoisyHistogram, flat_strategy, plan_quantiles
from fedtail.rows import RowFolder
from fedtail.runs import Interrupted, RunFolder, run
from fedtail.runs.files import RunRefused
from fedtail.secure import AllOrNothingClient, AllOrNothingRounds, Client, Identity, LocalClients, Run, Session, sparse_session

from remote_cases import PEOPLE, TASK, Sites, registry_of
from run_cases import Onlooker, digests, experiment

OLD_LEDGER = """\
{"format": "fedtail ledger 1"}
{"open": 0, "sampling": {"kind": "PoissonSampling", "rate": 0.1, "decisive": 1e-09}, "channel": "sums"}
{"release": {"kind": "GaussianRelease", "noise_multiplier": 2.0, "what": "the updates", "exchange": 2.0}}
{"ask": [0]}
{"open": 1, "sampling": {"kind": "PoissonSampling", "rate": 0.1, "decisive": 1e-09}, "channel": "sums"}
{"ask": [0]}
"""
DEPLOYED = """\
name = "deployed"
rounds = 4
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[sample]
cohort_size = 20
[channel]
part = "SecureChannel"
threshold = 8
minimum_contributors = 3
"""
SECURE = '[channel]\npart = "SecureChannel"\nthreshold = 4\nminimum_contributors = 2\nmasks = "none"\n'


@pytest.mark.parametrize(("module", "old", "new"), [(module, *names) for module in NAMES for names in NAMES[module].items()])
def test_an_old_name_of_a_module_warns_with_the_new_one_which_it_is(module, old, new):
    home = importlib.import_module(module)
    place, _, name = (new if "." in new else f"{module}.{new}").rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is now {place}\.{name}; the old name goes") as caught:
        assert getattr(home, old) is getattr(importlib.import_module(place), name)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=f"{old} is now"):
        exec(f"from {module} import {old}", {})
    assert old not in dir(home)
    assert old not in getattr(home, "__all__", ())
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'never'"):
        _ = home.never


@functools.cache
def holders():
    """One of each class that has attributes of old names."""
    some = torch.tensor([4, 7, 9])
    event = RoundEvent((GaussianRelease(2.0),), PoissonSampling(0.1))
    folder = RowFolder()
    folder.write("risk", some, torch.ones(3, 2))
    store = folder.stores["risk"]
    method, fleet = fedtail.fedavg(3), LocalFleet(PEOPLE, TASK)
    run_of_two = Run(b"run", (0, 1))
    rounds = AllOrNothingRounds(LocalClients((0, 1), b"run"), run_of_two)
    return {"AdaptiveClip": AdaptiveClip(1.0, GaussianNoise(1.0), 10.0), "AnswerReport": AnswerReport(0, 0, 5, 4, {}),
            "AllOrNothingClient": AllOrNothingClient(run_of_two, 0), "AllOrNothingRounds": rounds, "AllOrNothingServer": rounds.server,
            "Identity": Identity(bytes(32), {}), "Session": Session(b"run", 0, (0, 1), 2), "SparseSession": sparse_session(b"run", 0, tuple(range(200)), 101, 0.1, 0.1), "Client": Client(Session(b"run", 0, (0, 1), 2), 0), "ClientRegistry": registry_of(PEOPLE, 3),
            "Clients": Clients(None, some), "Channel": PlainChannel(), "FixedPoint": FixedPoint(3, 1.0, 40), "Run": run_of_two, "SignedGraph": SignedGraph(), "SparseGraph": SparseGraph(0.1, 0.1),
            "ClientHistogram": ClientHistogram(Edges.of_equal_width(0.0, 1.0, 2), np.array([1.0, 2.0]), 1.0, 1.0),
            "DiscreteGaussianTable": DiscreteGaussianTable.from_variance(4.0), "Edges": Edges.of_equal_width(0.0, 1.0, 4), "Strategy": flat_strategy(4), "MetricRange": MetricRange("error"),
            "FederatedEvaluation": FederatedEvaluation(), "NoisyHistogram": NoisyHistogram(2.0, 8.0, GaussianNoise(1.0), bins=4),
            "RemoteFleet": Sites().fleet(), "SimulatedFleet": fleet, "QuantilePlan": plan_quantiles(100, [0.5], Edges.of_equal_width(0.0, 1.0, 4), epsilon=1.0, delta=1e-5),
            "WeightedClients": ClientStatistics(some.double(), some.double()).with_density(some.double()),
            "ClientStatistics": ClientStatistics(some.double(), some.double()), "State": State(TASK.params()),
            "Composition": Composition(method.sample, method.risk, method.aggregate, method.local, method.server, PEOPLE, PlainChannel(), fleet),
            "LocalFleet": fleet, "Experiment": experiment(), "Site": Site(lambda: Node(PEOPLE, TASK)), "Source": experiment().source, "Family": fedtail.Family((method,)), "FederatedAlgorithm": method, "Guarantee": guarantee([(event, 3)], 1e-5),
            "Node": Node(PEOPLE, TASK), "Population": PEOPLE, "RowFile": store.file, "RowFolder": folder, "RowPlaces": folder.reserve_places(some), "RowStore": store, "Rows": store.rows,
            "RunFolder": RunFolder(Path("run"), {"format": "fedtail run", "splits": {"train": 3}}),
            "Ledger": Ledger(PrivacyBudget(delta=1e-3)), "PoissonSampling": PoissonSampling(0.1, 0.01),
            "RoundView": RoundView(some, torch.tensor([[True, False, True]]), some > 8), "SecureChannel": SecureChannel(5)}


@pytest.mark.parametrize(("kind", "old", "new"), [(kind, *names) for kind in ATTRIBUTES for names in ATTRIBUTES[kind].items()])
def test_an_old_attribute_warns_and_is_the_new_one(kind, old, new):
    holder = holders()[kind]
    with pytest.warns(DeprecationWarning, match=rf"^{kind}\.{old} is now {kind}\.{new};") as caught:
        found = getattr(holder, old)
    assert caught[0].filename == __file__
    assert found == getattr(holder, new) if not torch.is_tensor(found) else torch.equal(found, getattr(holder, new))


def test_an_old_class_method_warns_and_is_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"^Edges\.equal is now Edges\.of_equal_width;") as caught:
        assert Edges.equal(0.0, 1.0, 2) == Edges.from_values([0.0, 0.5, 1.0])
    assert caught[0].filename == __file__
    assert Edges.place.__doc__ == "The old name of `bin_indices`."


def test_a_penalty_that_overrides_the_old_method_warns_and_is_prepared_by_it():
    with pytest.warns(DeprecationWarning, match=r"^Pulling\.of is now Pulling\.prepare_for_clients;") as caught:
        @dataclass(frozen=True)
        class Pulling(Penalty):
            strength: float

            def of(self, clients, anchor):
                return Proximal(self.strength)
    assert caught[0].filename == __file__

    def trained(penalty):
        return fedtail.train(fedtail.fedavg(10, learning_rate=0.2, batch_size=4, penalty=penalty), TASK, PEOPLE, rounds=2).state.params

    assert torch.equal(trained(Pulling(0.5)), trained(Proximal(0.5)))
    assert not torch.equal(trained(Pulling(0.5)), trained(Proximal(0.0)))


def test_the_budget_of_a_ledger_can_be_set_by_its_old_name_and_what_is_frozen_cannot():
    ledger = Ledger()
    with pytest.warns(DeprecationWarning, match=r"Ledger\.terms is now Ledger\.budget"):
        ledger.terms = PrivacyBudget(delta=1e-4)
    assert ledger.budget == PrivacyBudget(delta=1e-4)
    with pytest.raises(FrozenInstanceError):
        SecureChannel(5).hides_among = 3


@pytest.mark.parametrize(("make", "keyword", "expected"), [
    (lambda: SecureChannel(5, hides_among=3), "hides_among of SecureChannel is now minimum_contributors", SecureChannel(5, 3)),
    (lambda: replace(SecureChannel(5), hides_among=3), "hides_among of SecureChannel is now minimum_contributors", SecureChannel(5, 3)),
    (lambda: PoissonSampling(0.1, decisive=0.01), "decisive of PoissonSampling is now revealed", PoissonSampling(0.1, 0.01)),
    (lambda: Ledger(terms=PrivacyBudget(delta=0.01)).budget, "terms of Ledger is now budget", PrivacyBudget(delta=0.01)),
    (lambda: AnswerReport(0, 0, asked=5, answered=4, problems={}), "asked of AnswerReport is now sampled", AnswerReport(0, 0, 5, 4, {})),
    (lambda: len(RemoteFleet(dict, roster=registry_of(PEOPLE, 3)).population), "roster of RemoteFleet is now registry", len(PEOPLE))])
def test_an_old_keyword_warns_and_gives_the_same(make, keyword, expected):
    with pytest.warns(DeprecationWarning, match=keyword) as caught:
        assert make() == expected
    assert caught[0].filename.endswith(("dataclasses.py", "test_deprecated.py"))


def test_classes_with_old_names_keep_their_signatures():
    assert list(inspect.signature(SecureChannel).parameters) == ["threshold", "minimum_contributors", "modulus_bits", "masks", "dropout", "graph"]
    assert KEYWORDS["RemoteFleet"].items() - ATTRIBUTES["RemoteFleet"].items() == {("roster", "registry")}
    assert KEYWORDS.keys() == ATTRIBUTES.keys()
    with pytest.raises(TypeError, match="hidden_among"):
        SecureChannel(5, hidden_among=3)


def test_an_old_schedule_warns_and_gives_the_same_sums():
    assert VALUES == {"schedule": {"together": "all-or-nothing"}}
    method, models = fedtail.fedavg(20, learning_rate=0.2, batch_size=4), []
    for schedule in ("all-or-nothing", "together"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DeprecationWarning)
            fleet = Sites().fleet(schedule=schedule)
        assert [str(one.message)[:55] for one in caught] == (['schedule = "together" is now schedule = "all-or-nothing"'[:55]] if schedule == "together" else [])
        assert fleet.schedule == "all-or-nothing"
        models.append(fedtail.train(method, TASK, fleet=fleet, rounds=2, channel=SecureChannel(8, 3)).state.params)
    assert torch.equal(*models)


def test_a_ledger_of_before_opens_and_costs_the_same(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text(OLD_LEDGER)
    ledger = Ledger(PrivacyBudget(delta=1e-5), path)
    event = RoundEvent((GaussianRelease(2.0, what="the updates"),), PoissonSampling(0.1, 1e-9))
    assert ledger.rounds == ((event, 2),)
    assert ledger.guarantee() == guarantee([(event, 2)], 1e-5)
    ledger.open(2, event)
    ledger.charge(event.releases)
    ledger.close()
    assert path.read_text().startswith(OLD_LEDGER)
    assert Ledger(PrivacyBudget(delta=1e-5), path).rounds == ((event, 3),)


def test_an_experiment_with_an_old_field_warns_and_is_the_same():
    new = experiment("delta_fl", more=SECURE)
    with pytest.warns(DeprecationWarning, match="hides_among of SecureChannel is now minimum_contributors"):
        old = experiment("delta_fl", more=SECURE.replace("minimum_contributors", "hides_among"))
    assert (old.channel, old.as_table(0)) == (new.channel, new.as_table(0))


def aged(folder):
    """A run folder as it was before the names changed."""
    for name in ("run.json", "experiment.toml"):
        path = folder / name
        before = path.read_text()
        path.write_text(before.replace("minimum_contributors", "hides_among"))
        assert path.read_text() != before


def test_a_run_of_before_goes_on_and_ends_with_the_same_bits(tmp_path):
    whole, broken = experiment("delta_fl", "risk.tail_fraction=0.9", more=SECURE), tmp_path / "broken"
    run(whole, 0, tmp_path / "whole", Onlooker())
    with pytest.raises(Interrupted):
        run(whole, 0, broken, Onlooker(stop_after=3))
    aged(broken)
    assert RunFolder.open(broken).about["experiment"]["channel"]["minimum_contributors"] == 2
    with pytest.raises(RunRefused, match=r"channel\.minimum_contributors was 2, is 3\."):
        run(replace(whole, channel=replace(whole.channel, minimum_contributors=3)), 0, broken, Onlooker(), resume=True)
    run(whole, 0, broken, Onlooker(), resume=True)
    ours, theirs = digests(broken), digests(tmp_path / "whole")
    assert {name for name in ours if ours[name] != theirs[name]} <= {"experiment.toml"}


def test_a_deployed_run_of_before_goes_on(tmp_path):
    file = tmp_path / "experiment.toml"
    file.write_text(DEPLOYED)
    described, sites, folder = deployed_experiment(file), Sites(), tmp_path / "run"

    def dies(messages):
        if len(sites.letters) == 5:
            raise KeyboardInterrupt
        return sites.exchange(messages)

    with pytest.raises(KeyboardInterrupt):
        DeployedRun(described, 0, folder).run(RemoteFleet(dies, sites.registry))
    aged(folder)
    assert DeployedRun(described, 0, folder, resume=True).run(Sites().fleet()).state.round == 4


def test_the_statement_of_a_run_of_before_is_read(tmp_path):
    private, folder = experiment("private"), tmp_path / "run"
    run(private, 0, folder, Onlooker())
    promise, path = RunFolder.open(folder).privacy_line, folder / "privacy.json"
    assert promise
    found = json.loads(path.read_text())
    found["against_server"] = found.pop("without_amplification")
    path.write_text(json.dumps(found))
    assert RunFolder.open(folder).privacy_line == promise
