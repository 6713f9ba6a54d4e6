"""Clients' keys over nodes: by default, as `fedtail deploy init` writes it, hashed with the node's name, alike at node and server."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtail
from fedtail import train
from fedtail.algorithm import RoundLostWarning
from fedtail.cli import app
from fedtail.deployment import ClientRegistry, RemoteFleet
from fedtail.deployment.client_keys import hashed_keys
from fedtail.deployment.consent import accept, experiment_digest
from fedtail.deployment.deployed_experiment import deployed_experiment, deployment_channel
from fedtail.deployment.flower.folder import write_deployment_folder
from fedtail.deployment.policy_example import write_policy
from fedtail.deployment.registry import packed_node_info, read_node_info
from fedtail.deployment.settings import NodeSettings
from fedtail.engine import LocalFleet

from cases import small_population

FILE = """\
name = "keys"
rounds = 3
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[sample]
cohort_size = 10
[local]
learning_rate = 0.2
batch_size = 4
[risk]
part = "Superquantile"
tail_fraction = 0.5
[personal]
part = "Ditto"
strength = 0.1
local = { learning_rate = 0.2, local_steps = 3 }
[channel]
part = "SecureChannel"
threshold = 4
minimum_contributors = 2
[evaluate.on_nodes]
loss_bound = 3.0
"""
NAMES, CLIENTS, HELD_OUT = ("north", "south", "east"), 8, 0.3
PEOPLE = small_population(len(NAMES) * CLIENTS)


class Hospitals:
    """Three nodes from the folder of a new deployment, whose clients have the same names and keys in the data of each."""

    def __init__(self, place, **of_nodes):
        (place / "experiment.toml").write_text(FILE)
        self.folder = write_deployment_folder(place / "deployment", place / "experiment.toml", NAMES, "127.0.0.1", 8000,
                                              data="people", minimum=2, test_share=HELD_OUT, **of_nodes)
        self.settings = {}
        for k, name in enumerate(NAMES):
            here = PEOPLE.select(range(k * CLIENTS, (k + 1) * CLIENTS))
            here = here.with_columns(key=torch.arange(CLIENTS), names=np.array([str(one + 1) for one in range(CLIENTS)]))
            here.save(self.folder.node_folder(name) / "people")
            self.settings[k] = NodeSettings.read(self.folder.node_folder(name) / "node.toml")
            write_policy(self.settings[k], own_machine=True)      # a client may be alone in its node's part, as in the simulator
            accept(self.settings[k], experiment_digest(self.settings[k].read_experiments()))

    def registry(self):
        """What a server knows of them, from what each says of itself."""
        found = ClientRegistry.empty()
        for k, one in self.settings.items():
            info = read_node_info(packed_node_info(one))
            found = found.with_node(k, info.key, info.mass, info.group)
        return found

    def fleet(self):
        sites = {k: one.make_site() for k, one in self.settings.items()}

        def exchange(letters):
            replies = {}
            for k, letter in letters.items():
                replies[k] = sites[k].handle(letter)
                sites[k].keep_memory()
            return replies

        return RemoteFleet(exchange, self.registry())


@pytest.fixture
def hospitals(tmp_path):
    return Hospitals(tmp_path)


def test_a_new_deployment_computes_what_the_simulator_does_by_the_same_keys(hospitals, tmp_path):
    """Secure rounds with evaluations and personal models: cohorts, batches and held-out examples are drawn by these keys."""
    assert {one.keys for one in hospitals.settings.values()} == {"name"}
    experiment = deployed_experiment(hospitals.folder.path / "experiment.toml")
    fleet, evaluation, channel = hospitals.fleet(), experiment.evaluate.on_nodes, deployment_channel(experiment, PEOPLE)
    registry = fleet.population
    with warnings.catch_warnings(action="error", category=RoundLostWarning):
        there = train(experiment.algorithm, experiment.task.make(0), fleet=fleet, rounds=3, channel=channel, evaluation=evaluation)
    fleet.finish()
    own, held = PEOPLE.with_columns(key=registry.key).split_examples(within=HELD_OUT)
    assert torch.equal(own.mass, registry.mass)
    with LocalFleet(own, experiment.task.make(0), workers=1, test=held) as simulated:
        here = train(experiment.algorithm, experiment.task.make(0), fleet=simulated, rounds=3, channel=channel, evaluation=evaluation)
        rows = simulated.memory().kept["personal 0"]
    assert (there.state.params - here.state.params).abs().max() < 1e-6
    for found, expected in ((there.evaluation[0], here.evaluation[0]), (there.evaluation[0].personal, here.evaluation[0].personal)):
        assert found.error.counts.tolist() == expected.error.counts.tolist()
        assert found.loss.mean() == pytest.approx(expected.loss.mean(), abs=1e-5)
    assert 0 < int(rows[CLIENTS: 2 * CLIENTS].isnan().any(1).sum()) < CLIENTS
    x = 3 * torch.randn(50, 5, generator=torch.Generator().manual_seed(3))
    np.savez(tmp_path / "new.npz", x=x.numpy())
    for k, row in enumerate(rows[CLIENTS: 2 * CLIENTS]):       # the clients of the second node, by their names there
        words = ["deploy", "node", "predict", str(hospitals.settings[1].folder / "node.toml"), "--data", str(tmp_path / "new.npz"),
                 "--client", str(k + 1), "--json"]
        done = CliRunner().invoke(app, words)
        if row.isnan().any():
            assert f"client {k + 1} has no personal model on this node" in done.stderr
        else:
            predicted = (x @ row[:15].reshape(3, 5).T + row[15:]).argmax(1)
            assert json.loads(done.stdout.splitlines()[0])["predictions"] == predicted.tolist()


def test_clients_of_one_name_have_a_key_of_their_own_at_each_node(hospitals):
    registry = hospitals.registry()
    assert len(registry.key.unique()) == len(PEOPLE)
    for k, one in hospitals.settings.items():
        own, held = one.read_splits()
        assert torch.equal(own.key, registry.key[registry.node == k])
        assert torch.equal(held.key, own.key)
        assert own.names.tolist() == [str(name + 1) for name in range(CLIENTS)]


def test_keys_of_many_nodes_are_all_different():
    many = torch.cat([hashed_keys(f"node-{k}", torch.arange(2000)) for k in range(50)])
    assert len(many.unique()) == len(many)


def test_a_server_refuses_keys_that_two_nodes_have_and_says_what_to_write(tmp_path):
    hospitals = Hospitals(tmp_path, keys="data")
    with pytest.raises(ValueError, match=r'node 1 has clients whose keys others have already\. Write keys = "name" in its node\.toml'):
        hospitals.registry()
    with pytest.raises(ValueError, match="node 1 has several clients of one key"):
        ClientRegistry.empty().with_node(1, torch.tensor([3, 3]), torch.ones(2))


@pytest.mark.parametrize("keys", ["name", "data"])
def test_a_node_whose_data_have_a_key_twice_says_which(hospitals, keys):
    north = replace(hospitals.settings[0], keys=keys)
    people = fedtail.Population.open(north.folder / "people")
    people.with_columns(key=torch.tensor([0, 1, 2, 3, 4, 5, 2, 7])).save(north.folder / "people")
    with pytest.raises(ValueError, match=r"2 clients in people have the key 2: 3, 7\. .* Save them with a key for each"):
        north.read_population()
