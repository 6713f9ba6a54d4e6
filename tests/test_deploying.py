"""Everything of a deployment that needs no process of Flower's: folders and keys, settings, runs that go on, who is there."""

from __future__ import annotations

import json
import os
import signal
import ssl
import stat
import struct
import warnings
from dataclasses import replace
from types import SimpleNamespace

import msgpack
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.deployment import RemoteFleet
from fedtail.deployment.deployed_experiment import deployed_experiment, deployed_experiments, deployment_channel
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.keys import make_certificates, make_node_key
from fedtail.deployment.parts import user_parts
from fedtail.deployment.policy_example import write_policy
from fedtail.deployment.registry import NodeInfo, packed_node_info, read_node_info
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.signed_info import read_public_key, read_request, sign_info
from fedtail.deployment.wire_version import with_version
from fedtail.runs import find_runs
from fedtail.runs.files import RunRefused
from fedtail.wire import pack

from own_risk import Expectile
from remote_cases import PEOPLE, Sites, params_of

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
threshold = 8
minimum_contributors = 3
"""
TAIL = '[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(FILE + TAIL)
    return path


def test_certificates_are_good_for_their_names_and_for_no_others(tmp_path):
    make_certificates(tmp_path, ["fl.example.org", "127.0.0.1"])
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    server.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    assert handshake(server, client, "fl.example.org")
    assert handshake(server, client, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "other.example.org")
    before = (tmp_path / "ca.crt").read_bytes()
    with pytest.raises(FileExistsError):
        make_certificates(tmp_path, ["fl.example.org"])
    assert (tmp_path / "ca.crt").read_bytes() == before      # no certificate without its key
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, ssl.create_default_context(), "fl.example.org")
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert not (tmp_path / "ca.key").exists()


def handshake(server, client, name):
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    here, there = server.wrap_bio(into, out, server_side=True), client.wrap_bio(out, into, server_hostname=name)
    done = 0
    while done < 2:
        done = 0
        for side in (there, here):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                pass
    return True


def test_a_run_that_lost_every_round_says_that_its_model_is_of_no_use(file, tmp_path):
    lost = DeployedRun(deployed_experiment(file), 0, tmp_path / "lost")
    with warnings.catch_warnings():
        warnings.simplefilter("always")                      # the log has them
        lost.run(Sites(vanish={node: range(1000) for node in range(5)}).fleet())
    assert lost.models_of_no_use() == ["nothing was learned: no round changed the model"]
    assert "warning: nothing was learned: no round changed the model" in (tmp_path / "lost" / "log.txt").read_text()
    sound = DeployedRun(deployed_experiment(file), 0, tmp_path / "sound")
    sound.run(Sites().fleet())
    assert sound.models_of_no_use() == []


def test_keys_of_nodes_are_what_flower_takes_and_stay_secret(tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    make_node_key(tmp_path / "node")
    private = load_ssh_private_key((tmp_path / "node" / "key").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "node" / "key.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
    assert stat.S_IMODE((tmp_path / "node" / "key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_node_key(tmp_path / "node")


def test_deploy_init_writes_what_each_side_needs_and_nothing_more(tmp_path, file):
    said = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "out"), "--experiment", str(file), "--nodes", "north,south"])
    assert said.exit_code == 0, said.output
    assert "fedtail deploy serve" in said.output
    assert "fedtail node run node.toml" in said.output
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    node = ["ca.crt", "experiment.toml", "gate.toml", "key", "key.pem", "key.pub", "node.crt", "node.toml"]
    assert names == sorted(["app/pyproject.toml", "experiment.toml", "server/ca.crt", "server/gate.toml", "server/server.key", "server/server.pem",
                            *(f"server/nodes/{name}.{kind}" for name in ("north", "south") for kind in ("crt", "pub")),
                            *(f"nodes/{name}/{one}" for name in ("north", "south") for one in node)])
    settings = NodeSettings.read(tmp_path / "out" / "nodes" / "north" / "node.toml")
    assert (settings.name, settings.minimum, settings.masked_only) == ("north", 2, True)
    again = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "out"), "--experiment", str(file)])
    assert again.exit_code == 2
    assert "is not empty. Keys are made once" in again.output
    one = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "one"), "--experiment", str(file), "--nodes", "1"])
    assert "a deployment needs two nodes or more" in one.output


def test_on_deployments_the_losses_are_asked_about_once_and_sums_are_masked(tmp_path, file):
    assert deployed_experiment(file).algorithm.risk == fedtail.Superquantile(0.5, fedtail.ExactQuantile(12))
    said = tmp_path / "said.toml"
    said.write_text(FILE.partition("[channel]")[0] + TAIL + 'quantile = { part = "ExactQuantile", bits = 32 }\n')
    assert deployed_experiment(said).algorithm.risk == fedtail.Superquantile(0.5)
    assert deployment_channel(deployed_experiment(said), PEOPLE) == fedtail.SecureChannel(11)
    assert deployment_channel(deployed_experiment(file), PEOPLE) == fedtail.SecureChannel(8, minimum_contributors=3)
    several = tmp_path / "several.toml"
    several.write_text(FILE + '[[method]]\nname = "A"\n[[method]]\nname = "B"\nrisk = { part = "TailFilter", tail_fraction = 0.5 }\n')
    assert [one.name for one in deployed_experiments(several)] == ["A", "B"]
    assert deployed_experiment(several, "B").algorithm.risk == fedtail.TailFilter(0.5, fedtail.ExactQuantile(12))
    with pytest.raises(ValueError, match=r"holds 2 methods: A, B\. Say which one is deployed"):
        deployed_experiment(several)


def test_a_nodes_own_settings(tmp_path, file):
    PEOPLE.select(range(3)).save(tmp_path / "people")
    place = tmp_path / "node.toml"
    place.write_text('name = "north"\nexperiment = "experiment.toml"\ndata = "people"\n')
    settings = NodeSettings.read(place)
    info = read_node_info(packed_node_info(settings))
    assert msgpack.unpackb(packed_node_info(settings))["type"] == "NodeInfo"
    assert info.name == "north"
    assert len(info.key.unique()) == 3
    assert not torch.equal(info.key, PEOPLE.key[:3])
    assert torch.equal(read_node_info(packed_node_info(replace(settings, keys="data"))).key, PEOPLE.key[:3])
    with pytest.raises(ValueError, match=r"there is no policy .*policy.toml: a node without one answers nothing"):
        settings.make_node(0)
    write_policy(settings)
    assert settings.make_node(0).round == -1
    for text, wrong in (("does not say data", 'name = "n"\nexperiment = "e"\n'), ("has no setting 'nam'", 'nam = "n"\n'),
                        ("minimum must be at least 2", place.read_text() + "minimum = 1\n"), ("keys must be name or data", place.read_text() + 'keys = "x"\n')):
        (tmp_path / "wrong.toml").write_text(wrong)
        with pytest.raises(ValueError, match=text):
            NodeSettings.read(tmp_path / "wrong.toml")
    with pytest.raises(ValueError, match="there is no file"):
        NodeSettings.read(tmp_path / "nothing.toml")


def test_what_a_node_says_of_itself_is_checked():
    key, mass = torch.arange(2), torch.ones(2, dtype=torch.float64)
    for wrong in (lambda: NodeInfo("n", key, mass[:1]), lambda: NodeInfo("n", key, -mass), lambda: NodeInfo("n", key, mass * torch.nan), lambda: NodeInfo("n", key.float(), mass)):
        with pytest.raises(ValueError, match="sent no valid node info"):
            wrong()
    with pytest.raises(ValueError, match="a group for each"):
        NodeInfo("n", key, mass, key[:1])
    tensors = {"key": {"tensor": "<i8", "shape": [2], "bytes": bytes([7, *[0] * 7, 8, *[0] * 7])}, "mass": {"tensor": "<f8", "shape": [2], "bytes": struct.pack("<2d", 1, 2)}}
    old = read_node_info(msgpack.packb({"type": "NodeInfo", "fields": {"name": "n", **tensors, "group": None}}))
    assert (old.name, old.key.tolist(), old.mass.tolist(), old.group) == ("n", [7, 8], [1.0, 2.0], None)
    with pytest.raises(ValueError, match="a node sent a int as its node info"):
        read_node_info(pack(3))


def test_a_users_own_parts_are_found():
    algorithm = replace(fedtail.fedavg(8), risk=Expectile(0.8))
    assert list(user_parts(algorithm)) == [Expectile]
    assert list(user_parts(fedtail.Family((algorithm, fedtail.fedavg(8))))) == [Expectile]


def test_a_run_that_is_killed_goes_on_to_the_same_model(tmp_path, file):
    experiment = deployed_experiment(file)
    whole = DeployedRun(experiment, 0, tmp_path / "whole").run(Sites().fleet())

    class Killed(Exception):
        pass

    def kill():
        if "round 2 of 4" in (tmp_path / "run" / "log.txt").read_text():
            raise Killed

    with pytest.raises(Killed):
        DeployedRun(experiment, 0, tmp_path / "run").run(Sites().fleet(), kill)
    with pytest.raises(RunRefused, match=r"Go on with resume=true, or choose another folder with out"):
        DeployedRun(experiment, 0, tmp_path / "run").run(Sites().fleet())
    with pytest.raises(RunRefused, match="the experiment is not the one"):
        DeployedRun(replace(experiment, rounds=5), 0, tmp_path / "run", resume=True).run(Sites().fleet())
    result = DeployedRun(experiment, 0, tmp_path / "run", resume=True).run(Sites().fleet())
    assert torch.equal(params_of(result), params_of(whole))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [(line["round"], line["question"]) for line in lines] == [(round, question) for round in range(4) for question in range(2)]
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found.pop("files").keys() == {"model.safetensors"}
    assert found == {"round": 4, "failed": 0, "stopped": "", "not_finite": [{"parameters": 0, "of": 18, "changed": 18}], "channel": ["sums over at least 8 clients, masked by the nodes"]}
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["rounds"] == 4
    told = CliRunner().invoke(app, ["privacy", str(tmp_path / "run")])
    assert "epsilon is infinity after 4 rounds" in told.output
    with pytest.raises(ValueError, match="is a run on a deployment"):
        find_runs([tmp_path])


def test_ctrl_c_saves_a_run_on_nodes_and_does_not_finish_it(tmp_path, file):
    experiment = deployed_experiment(file)
    whole = DeployedRun(experiment, 0, tmp_path / "whole").run(Sites().fleet())

    def interrupt():
        if "round 2 of 4" in (tmp_path / "run" / "log.txt").read_text():
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings(action="ignore"):
        DeployedRun(experiment, 0, tmp_path / "run").run(Sites().fleet(), interrupt)
    assert not (tmp_path / "run" / "result.json").exists()
    result = DeployedRun(experiment, 0, tmp_path / "run", resume=True).run(Sites().fleet())
    assert torch.equal(params_of(result), params_of(whole))


def test_a_round_that_was_killed_stays_charged(tmp_path, file):
    """The ledger is on disk before a question goes out: the repeated round is there twice."""
    experiment, sites = deployed_experiment(file), Sites()
    exchange = sites.exchange

    def dies(letters):
        if len(sites.letters) == 5:
            raise KeyboardInterrupt
        return exchange(letters)

    with pytest.raises(KeyboardInterrupt):
        DeployedRun(experiment, 0, tmp_path / "run").run(RemoteFleet(dies, sites.registry))
    result = DeployedRun(experiment, 0, tmp_path / "run", resume=True).run(Sites().fleet())
    assert sum(count for _, count in result.ledger.rounds) == 5


class GridHere:
    """Flower's grid with nodes that are functions."""

    def __init__(self, nodes):
        self.nodes, self.sent = nodes, {}

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            self.sent[str(len(self.sent))] = message
            yield str(len(self.sent) - 1)

    def pull_messages(self, ids):
        for one in list(ids):
            message = self.sent[one]
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                about = SimpleNamespace(reply_to_message_id=one, src_node_id=message.metadata.dst_node_id)
                yield SimpleNamespace(metadata=about, content=reply, has_error=lambda reply=reply: reply == "error")


@pytest.fixture
def flower(monkeypatch):
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def test_messages_are_sent_over_flower_and_failures_are_left_out(flower):
    from fedtail.deployment.flower.transport import FlowerTransport

    def echo(message):
        return {"fedtail": {"reply": bytes(message.content["fedtail"]["letter"])[::-1]}}

    transport = FlowerTransport(GridHere({10: echo, 11: lambda _: None, 12: lambda _: "error", 13: lambda _: {}, 14: lambda _: {"fedtail": {"reply": "text"}}}), timeout=0.5)
    transport.ids = {0: 10, 1: 11, 2: 12, 3: 13, 4: 14, 5: 99}
    assert transport.exchange(dict.fromkeys(range(6), b"abc")) == {0: b"cba"}
    assert len(transport.seconds) == 1
    assert 0.4 < transport.seconds[0] < 5


def test_nodes_come_come_back_and_are_left_out(flower, tmp_path):
    from fedtail.deployment.flower.transport import FlowerTransport
    from fedtail.deployment.nodes import Nodes

    for one in ("a", "b", "c", "thief"):
        make_node_key(tmp_path / one)
    known = {one: read_public_key(tmp_path / one / "key.pub") for one in ("a", "b", "c", "thief")}

    def who(name, *keys):
        said = pack(NodeInfo(name, torch.tensor(keys), torch.ones(len(keys), dtype=torch.float64)))
        return lambda message: {"fedtail": {"who": sign_info(said, read_request(message.content["fedtail"]["ask"]).challenge, tmp_path / name / "key")}}

    grid, log = GridHere({20: who("b", 1, 2), 21: who("a", 3), 22: lambda _: {"fedtail": {"who": b"rubbish"}}}), []
    nodes = Nodes(FlowerTransport(grid, timeout=0.5), log.append, lambda: known)
    nodes.wait_for_nodes(2, 1.0)
    assert nodes.names == ["a", "b"]
    assert nodes.registry.key.tolist() == [3, 1, 2]
    assert any("node 22 is left out" in line for line in log)
    grid.nodes |= {30: who("c", 7, 8), 31: who("thief", 1), 32: who("b", 1, 2), 33: who("a", 3)}
    del grid.nodes[20]
    nodes.register_new_nodes()
    assert any("node 33 is left out: it calls itself a, and a is here" in line for line in log)
    assert nodes.names == ["a", "b", "c"]
    assert nodes.transport.ids == {0: 21, 1: 32, 2: 30}
    assert nodes.registry.node.tolist() == [0, 1, 1, 2, 2]
    assert any("thief is left out: node 3 has clients whose keys others have already" in line for line in log)
    said = len(log)
    for _ in range(5):
        nodes.register_new_nodes(tries=2)
    assert sum("node 33" in line for line in log[said:]) == 2
    with pytest.raises(RuntimeError, match=r"3 nodes have joined in 0\.1 s, and 9 are waited for"):
        nodes.wait_for_nodes(9, 0.1)


def test_a_name_is_registered_for_its_key_only_and_for_a_fresh_challenge(flower, tmp_path):
    from fedtail.deployment.nodes import Nodes

    for one in ("a", "b"):
        make_node_key(tmp_path / one)
    known, heard, log = {one: read_public_key(tmp_path / one / "key.pub") for one in ("a", "b")}, [], []

    class Wire:
        ids, seconds, node = {}, [], {}

        def online_nodes(self):
            return set(self.node)

        def request_node_info(self, nodes, request):
            heard.append(read_request(request).challenge)
            return {one: self.node[one](heard[-1]) for one in nodes}

    def info(name):
        return pack(NodeInfo(name, torch.tensor([len(name)]), torch.ones(1, dtype=torch.float64)))

    wire = Wire()
    nodes = Nodes(wire, log.append, lambda: known)
    recorded = sign_info(info("a"), b"0" * 32, tmp_path / "a" / "key")
    wire.node = {1: lambda challenge: sign_info(info("a"), challenge, tmp_path / "b" / "key"),      # somebody else's name
                 2: lambda challenge: recorded,                                                      # a registration replayed
                 3: lambda challenge: sign_info(info("x\n2026 a has joined\x1b[2J"), challenge, tmp_path / "b" / "key"),
                 4: lambda challenge: with_version(info("a"))}                                                     # no signature at all
    nodes.register_new_nodes()
    nodes.register_new_nodes()
    assert nodes.names == []
    assert len(set(heard)) == 2
    assert [sum(text in line for line in log) for text in ("node 1 is left out: it calls itself 'a', and did not sign", "node 2 is left out",
                                                           "there is no key of that name", "node info is not signed")] == [2, 2, 2, 2]
    assert all(line.isprintable() for line in log)
    wire.node = {5: lambda challenge: sign_info(info("a"), challenge, tmp_path / "a" / "key")}
    nodes.register_new_nodes()
    assert nodes.names == ["a"]
    with pytest.raises(ValueError, match="has 32 bytes"):
        sign_info(b"anything", b"short", tmp_path / "a" / "key")


def test_a_node_answers_under_masks_only_unless_its_own_settings_say_otherwise(tmp_path, file):
    (tmp_path / "node.toml").write_text(f'name = "north"\nexperiment = "{file.name}"\ndata = "d.npz"\n')
    assert NodeSettings.read(tmp_path / "node.toml").masked_only
    assert NodeSettings.read(tmp_path / "node.toml").make_site().masked_only
    (tmp_path / "node.toml").write_text(f'name = "north"\nexperiment = "{file.name}"\ndata = "d.npz"\nmasked_only = false\n')
    assert not NodeSettings.read(tmp_path / "node.toml").make_site().masked_only


@pytest.mark.filterwarnings("ignore::DeprecationWarning")      # of the packages of Flower's database
def test_what_is_to_be_done_at_flower_is_printed_with_the_nodes_number(tmp_path, file):
    """By Flower's own database; that the commands do what they say, test_deploy_life_flower.py tries with real processes."""
    pytest.importorskip("flwr")
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    from fedtail.deployment.flower.folder import write_deployment_folder
    from fedtail.deployment.flower.link_database import supernode_number

    def said(*words):
        done = CliRunner().invoke(app, ["deploy", *map(str, words)])
        assert done.exit_code == 0, done.output
        return done.output

    folder = write_deployment_folder(tmp_path / "a deployment", file, ["north", "south", "east", "west"], "127.0.0.1", 8000)
    server, home = folder.server_folder, f"FLWR_HOME='{folder.home_folder}'"
    assert "Flower does not know its key" in said("remove", folder.path, "west")        # no SuperLink ever ran
    state = LinkStateFactory(str(server / "link.db"), NoOpFederationManager(), ObjectStoreFactory(str(server / "link.db"))).state()
    numbers = {}
    for name in ("north", "south"):
        key = serialization.load_ssh_public_key((folder.node_keys / f"{name}.pub").read_bytes())
        numbers[name] = state.create_node("owner", "owner", key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo), 30.0)
        assert supernode_number(server, folder.node_keys / f"{name}.pub") == numbers[name]
    text = said("remove", folder.path, "north")
    assert f"  flwr supernode unregister {numbers['north']} fedtail\n" in text
    assert home in text
    text = said("rotate", folder.path, "--node", "south")
    assert text.index(f"  flwr supernode unregister {numbers['south']} fedtail\n") < text.index(f"  flwr supernode register '{folder.node_keys}/south'.pub fedtail\n")
    assert text.endswith("  fedtail node run node.toml\n")
    assert "unregister" not in said("rotate", folder.path, "--node", "south")           # the new key is not registered yet
    text = said("add", folder.path, "north")
    assert "unregister" not in text
    assert text.index(f"  flwr supernode register '{folder.node_keys}/north'.pub fedtail\n") < text.index("  fedtail node run node.toml\n")
    (server / "link.db").write_bytes(b"no database at all")
    (server / "link.db-wal").unlink(missing_ok=True)
    text = said("remove", folder.path, "south")
    assert "cannot be read: " in text
    assert "  flwr supernode unregister NUMBER fedtail\n" in text
