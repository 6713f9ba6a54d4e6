"""`fedtail deploy doctor`: a sound deployment is found closed, and each defence that is switched off is found open.

Gates and cells listen on real sockets here; Flower's own SuperLink, in its own process, is marked `deploy`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from cryptography import x509
from typer.testing import CliRunner

pytest.importorskip("flwr")
pytest.importorskip("nvflare")

from fedtail.cli import app
from fedtail.deployment.consent import accept, experiment_digest
from fedtail.deployment.doctor import CLOSED, NOT_TESTED, OPEN, TRUST, attacks, doors, examine_address, examine_folder, files
from fedtail.deployment.doctor.departing_server import SCHEDULES, joins_unsigned
from fedtail.deployment.doctor.doors import Door, stranger_context
from fedtail.deployment.doctor.node_attacks import attacks_on_node
from fedtail.deployment.flower.folder import write_deployment_folder, write_gate_address
from fedtail.deployment.flower.gate import Gate
from fedtail.deployment.flower.loopback import free_port, process_environment
from fedtail.deployment.keys import make_certificates, make_identity, make_node_certificate, make_node_key
from fedtail.deployment.nvflare import pinned_tls
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.nvflare.transport import CellTransport
from fedtail.deployment.policy_example import write_policy
from fedtail.deployment.settings import NodeSettings

from departing_server import BARE, PRIVATE, TAIL, nodes, without
from remote_cases import PEOPLE

FILE = ('rounds = 2\n[task.module]\npart = "SoftmaxRegression"\nfeatures = 5\nclasses = 3\n[sample]\ncohort_size = 22\n[local]\nlearning_rate = 0.1\n'
        '[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n')
NAMES = ["a", "b", "c"]
ALONE = {"plain text", "server's certificate", "old TLS", "strangers"}
CALLS = set(attacks.CONTROL) | {"join with an unknown key"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("doctor")
    place.chmod(0o755)
    (place / "e.toml").write_text(FILE)
    write_deployment_folder(place / "flower", place / "e.toml", NAMES, "127.0.0.1", 8000, data="people", keys="data")
    write_cell_folder(place / "nvflare", place / "e.toml", NAMES, "127.0.0.1", 8000, data="people", keys="data")
    for transport in ("flower", "nvflare"):
        operated(place / transport / "nodes")
    return place


def operated(folder):
    """What the operators of the nodes do: data, identities that all nodes pin, the policy that `node init` writes, and consent."""
    pinned = [make_identity(folder / name) for name in NAMES]
    for k, name in enumerate(NAMES):
        PEOPLE.select(torch.arange(30) % 3 == k).save(folder / name / "people")
        settings = folder / name / "node.toml"
        settings.write_text(f'{settings.read_text()}identity = "identity"\npinned = {json.dumps(pinned)}\n')
        read = NodeSettings.read(settings)
        write_policy(read)
        accept(read, experiment_digest(read.read_experiments()))


def results(findings):
    return {one.check: one.result for one in findings}


def open_ones(findings):
    return {one.check for one in findings if one.result != CLOSED and one.result != TRUST}


class Answers(BaseHTTPRequestHandler):
    """A SuperLink that takes every call."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def gated(server, change=lambda gate: None):
    """The port of a gate before a SuperLink that takes every call; `change` weakens the gate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.pem", server / "server.key")
    link = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    link.socket = context.wrap_socket(link.socket, server_side=True)
    gate, loop, ready = Gate(server, link.server_port), asyncio.new_event_loop(), threading.Event()
    change(gate)

    async def listen():
        listening = await gate.start("127.0.0.1", 0)
        found.append(listening.sockets[0].getsockname()[1])
        ready.set()
        await told.wait()
        listening.close()
        await asyncio.sleep(0.3)

    found, told = [], asyncio.Event()
    threads = [threading.Thread(target=link.serve_forever), threading.Thread(target=loop.run_until_complete, args=(listen(),))]
    for thread in threads:
        thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(told.set)
        link.shutdown()
        for thread in threads:
            thread.join()
        link.server_close()
        loop.close()


def examine(written, transport, port, node=True):
    """What is found from outside and, with the keys of node a, by its holder."""
    place = written / transport
    found = examine_address("127.0.0.1", port, place / "server" / "ca.crt")
    return found + (list(attacks.attacks_by_node("127.0.0.1", port, place / "nodes" / "a")) if node else [])


def test_a_sound_gate_is_closed(written):
    with gated(written / "flower" / "server") as port:
        found = examine(written, "flower", port)
    assert open_ones(found) == set()
    assert {one.check for one in found} == ALONE | CALLS | {f"{name}, by a node" for name in CALLS} | {"another name"}


def old_tls(gate):
    gate.context.minimum_version = ssl.TLSVersion.TLSv1_2


def no_certificates(gate):
    gate.context.verify_mode, gate.pinned_name = ssl.CERT_NONE, lambda certificate: "a"


@pytest.mark.parametrize(("change", "expected"), [(old_tls, {"old TLS"}),
                                                  (no_certificates, {"strangers"})])
def test_a_gate_that_is_weakened_is_found_out(written, change, expected):
    with gated(written / "flower" / "server", change) as port:
        assert open_ones(examine(written, "flower", port)) == expected


def test_a_gate_that_passes_on_every_call_is_found_out(written, monkeypatch):
    class Everything:
        def __contains__(self, call):
            return True

    monkeypatch.setattr("fedtail.deployment.flower.gate.CALLS", Everything())
    with gated(written / "flower" / "server") as port:
        assert open_ones(examine(written, "flower", port)) == {f"{name}, by a node" for name in CALLS}
    with gated(written / "flower" / "server", no_certificates) as port:
        assert open_ones(examine(written, "flower", port)) == {"strangers"} | CALLS | {f"{name}, by a node" for name in CALLS}


def test_a_server_of_another_authority_or_name_is_found_out(written, tmp_path):
    with gated(written / "flower" / "server") as port:
        make_certificates(tmp_path, ["127.0.0.1"])
        assert results(examine_address("127.0.0.1", port, tmp_path / "ca.crt"))["server's certificate"] == OPEN
        assert results(examine_address("127.0.0.1", port))["server's certificate"] == NOT_TESTED
    other = shutil.copytree(written / "flower" / "server", tmp_path / "server")
    for name in ("server.key", "ca.crt", "server.pem"):
        (other / name).unlink()
    make_certificates(other, ["fl.example.org"])
    with gated(other) as port:
        assert results(examine_address("127.0.0.1", port, other / "ca.crt"))["server's certificate"] == OPEN


def test_old_versions_are_tried_one_by_one(written):
    def oldest(gate):
        gate.context.set_ciphers("ALL:@SECLEVEL=0")
        gate.context.minimum_version = ssl.TLSVersion.TLSv1

    with pytest.warns(DeprecationWarning, match="TLSv1"), gated(written / "flower" / "server", oldest) as port:
        found = {one.check: one for one in examine_address("127.0.0.1", port)}["old TLS"]
    assert found.result == OPEN
    assert "TLS 1.0, 1.1, 1.2 is taken" in found.text


@pytest.fixture
def hasty(monkeypatch):
    """A cell does not answer what is no frame, and every such silence lasts as long as the doctor's patience."""
    monkeypatch.setattr(doors, "PATIENCE", 2.0)
    monkeypatch.setattr(doors, "STAYS", 0.7)


@contextmanager
def celled(server):
    port = free_port()
    with CellTransport(server, f"127.0.0.1:{port}"):
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 10).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port


@pytest.mark.usefixtures("hasty")
def test_sound_cells_are_closed(written):
    with celled(written / "nvflare" / "server") as port:
        assert open_ones(examine(written, "nvflare", port)) == set()


@pytest.mark.usefixtures("hasty")
def test_cells_that_are_weakened_are_found_out(written, monkeypatch):
    sound = pinned_tls.server_context

    def weak(**settings):
        def context(folder):
            made = sound(folder)
            for name, value in settings.items():
                setattr(made, name, value)
            return made
        return context

    monkeypatch.setattr(pinned_tls, "server_context", weak(minimum_version=ssl.TLSVersion.TLSv1_2))
    with celled(written / "nvflare" / "server") as port:
        assert open_ones(examine(written, "nvflare", port)) == {"old TLS"}
    monkeypatch.setattr(pinned_tls, "server_context", sound)
    monkeypatch.setattr(pinned_tls, "pinned_name", lambda folder, certificate: attacks.NO_NAME)
    with celled(written / "nvflare" / "server") as port:
        assert open_ones(examine(written, "nvflare", port)) == {"another name"}
    monkeypatch.setattr(pinned_tls, "server_context", weak(verify_mode=ssl.CERT_NONE))
    with celled(written / "nvflare" / "server") as port:
        assert open_ones(examine(written, "nvflare", port)) == {"another name", "strangers"}


def test_nothing_that_listens_is_not_tested_and_not_closed():
    found = examine_address("127.0.0.1", free_port())
    assert [(one.check, one.result) for one in found] == [("reached", NOT_TESTED)]


def test_whoever_answers_nothing_or_for_ever_ends_in_time(monkeypatch):
    monkeypatch.setattr(doors, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert Door("127.0.0.1", silent.getsockname()[1], "").knock(b"x") == b""
        assert Door("127.0.0.1", silent.getsockname()[1], "", stranger_context()).call("/") == (0, b"")
        assert time.monotonic() - began < 5


def copied(written, tmp_path, transport="flower"):
    """A deployment whose nodes have been given their folders, and the folder of one."""
    place = shutil.copytree(written / transport, tmp_path / "d")
    node = place / "nodes" / "a"
    moved = shutil.move(node, tmp_path / "node")
    shutil.rmtree(place / "nodes")
    return place / "server", Path(moved)


def expired(server, days=0):              # valid until it was made
    for name in ("server.key", "ca.crt", "server.pem"):
        (server / name).unlink()
    make_certificates(server, ["127.0.0.1"], days=days)


def authority_key(server):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    (server / "kept.pem").write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    (server / "kept.pem").chmod(0o600)
    old = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
    from cryptography.hazmat.primitives import hashes
    made = x509.CertificateBuilder(old.issuer, old.subject, key.public_key(), old.serial_number, old.not_valid_before_utc, old.not_valid_after_utc)
    (server / "ca.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(s.Encoding.PEM))


def tomorrow(server, monkeypatch=None):
    from datetime import UTC, datetime, timedelta

    class Early(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(UTC) - timedelta(days=10)

    return Early


@pytest.mark.parametrize(("weaken", "check"), [
    (lambda server: None, None),
    (lambda server: (server / "server.key").chmod(0o644), "key files"),
    (lambda server: (server / "server.key").chmod(0o640), "key files"),
    (authority_key, "authority's key"),
    (lambda server: make_node_key(server.parent / "nodes" / "b"), "nodes' secrets"),
    (lambda server: (server / "identity").touch(0o600), "nodes' secrets"),
    (expired, "certificates"),
    (lambda server: expired(server, 20), "certificates"),
    (lambda server: (server / "ca.crt").unlink(), "authority's key"),
    (lambda server: shutil.copyfile(server / "nodes" / "a.crt", server / "nodes" / "b.crt"), "names and keys"),
    (lambda server: [shutil.copyfile(server / "nodes" / f"a.{kind}", server / "nodes" / f"b.{kind}") for kind in ("crt", "pub")], "names and keys"),
    (lambda server: [path.unlink() for path in (server / "nodes").iterdir()], "names and keys"),
    (lambda server: (server / "gate.toml").unlink(), "gate"),
])
def test_a_server_whose_files_are_weakened_is_found_out(written, tmp_path, weaken, check):
    server, _ = copied(written, tmp_path)
    weaken(server)
    found = open_ones(files.checks_of_server(server))
    assert (check in found) if check else not found
    assert found <= {check, "certificates"}                   # a missing ca.crt is both


def test_a_certificate_of_tomorrow_is_a_clock_that_is_wrong(written, monkeypatch):
    monkeypatch.setattr(files, "datetime", tomorrow(None))
    found = {one.check: one for one in files.checks_of_server(written / "nvflare" / "server")}["certificates"]
    assert found.result == OPEN
    assert "is the clock right?" in found.text


@pytest.mark.parametrize(("weaken", "check"), [
    (lambda node: None, None),
    (lambda node: (node / "key.pem").chmod(0o604), "key files"),
    (lambda node: make_node_key(node / "other"), "others' secrets"),
    (lambda node: make_certificates(node / "server", ["a"]), "others' secrets"),
    (lambda node: authority_key(node), ("others' secrets", "authority's key")),
    (lambda node: (node / "policy.toml").unlink(), ("policy", "node's answers")),
    (lambda node: (node / "policy.toml").write_text("smallest_cohort = 2\n"), ("policy", "node's answers")),
    (lambda node: unsigned(node, "masked_only = true", "masked_only = false"), ("masks", "signed sums")),
    (lambda node: (node / "node.toml").write_text("nonsense = 1\n"), "settings"),
    (lambda node: (node / "node.crt").write_text("rubbish"), "certificates"),
    (lambda node: unsigned(node), "signed sums"),
    (lambda node: (node / "identity").unlink(), ("signed sums")),
    (lambda node: (node / "accepted.json").unlink(), "consent"),
    (lambda node: (node / "accepted.json").write_text("{}"), "consent"),
    (lambda node: changed(node / "experiment.toml", "learning_rate = 0.1", "learning_rate = 0.2"), "consent"),
    (lambda node: (node / "people").rename(node / "others") and changed(node / "node.toml", '"people"', '"others"'), "consent"),
    (lambda node: (node / "audit.jsonl").unlink(), "consent"),
    (lambda node: shutil.rmtree(node / "people"), "node's answers"),
    (lambda node: changed(node / "node.toml", "minimum = 3", "minimum = 2"), "sum of two nodes"),
    (lambda node: changed(node / "policy.toml", "smallest_tail = 2", "smallest_tail = 1"), "threshold"),
    (lambda node: changed(node / "policy.toml", "smallest_cohort = 22", "smallest_cohort = 2"), "small cohort"),
    (lambda node: changed(node / "policy.toml", "smallest_cohort = 22", "smallest_cohort = 21"), "small cohort"),
    (lambda node: changed(node / "policy.toml", "repeats = 0", "repeats = 1"), "round held again"),
    (lambda node: [changed(node / "policy.toml", *one) for one in (("smallest_tail = 2", "smallest_tail = 1"),
                                                                  ("smallest_cohort = 22", "smallest_cohort = 2"))], ("threshold", "small cohort")),
])
def test_a_node_whose_files_are_weakened_is_found_out(written, tmp_path, weaken, check):
    _, node = copied(written, tmp_path)
    weaken(node)
    assert open_ones(files.checks_of_node(node)) == ({check} if isinstance(check, str) else set(check or ()))


def changed(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def unsigned(node, old="", new=""):
    """The settings of a node without an identity, and with `new` in place of `old`."""
    settings = node / "node.toml"
    lines = [line for line in settings.read_text().splitlines() if not line.startswith(("identity", "pinned"))]
    settings.write_text("\n".join(lines).replace(old, new) if old else "\n".join(lines))


AGREEMENT, BUDGET = "fedtail.deployment.agreement:Agreement.", "fedtail.deployment.data_budget:DataBudget."


@pytest.mark.parametrize(("file", "defences", "expected"), [
    (TAIL, (), set()), (BARE, (), set()), (PRIVATE, (), set()),
    (TAIL, (AGREEMENT + "check_question",), {"another bound"}),
    (TAIL, (AGREEMENT + "check_cohort",), {"one client twice", "importance zero"}),
    (TAIL, ("fedtail.deployment.node:Node._count_left_out",), {"threshold"}),
    (TAIL, (BUDGET + "_refuse_other_weights",), {"two thresholds"}), (TAIL, (BUDGET + "begin_round",), {"round held again"}),
    (PRIVATE, (AGREEMENT + "check_question", BUDGET + "_charge_releases"), {"question without noise", "another bound"}),
    (PRIVATE, (AGREEMENT + "check_cohort",), {"one client twice", "importance zero"})])
def test_a_node_whose_own_defences_are_off_is_found_out_and_nothing_is_charged(file, defences, expected):
    with nodes(file, "") as hospitals:
        settings = hospitals.settings[1]
        before = files_below(settings.folder)
        with without(*defences):
            found = results(attacks_on_node(settings))
        after = files_below(settings.folder)
    weak = {"signed sums"} | (set() if file is PRIVATE else {"small cohort", "sum of two nodes"})      # of these folders, made for attacks
    assert {check for check, result in found.items() if result not in (CLOSED, TRUST)} == weak | expected
    assert after == before


def files_below(folder):
    return {path: (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def test_a_node_with_an_identity_that_joins_what_is_not_signed_is_found_out(written, tmp_path):
    """In the kinds of session that a server may invite to."""
    _, node = copied(written, tmp_path)
    settings = NodeSettings.read(node / "node.toml")
    assert results(attacks_on_node(settings))["signed sums"] == CLOSED
    for schedule in SCHEDULES:
        assert not joins_unsigned(settings.make_site(), 3, schedule)
        assert joins_unsigned(replace(settings, identity="", pinned=()).make_site(), 3, schedule)


def test_what_the_doctor_says_of_a_policy_is_what_it_looked_at(written):
    found = {one.check: one for one in files.checks_of_node(written / "flower" / "nodes" / "a")}
    assert found["policy"].text == ("policy.toml can be read, and says: rounds of 22 clients or more, 2 of this node's or more in a sum without noise, 16 "
                                    "questions in a round, 0 held again; 2 rounds whose sums may have no noise. What it allows is tried below.")
    assert found["consent"].text.startswith("accepted.json names what lies here: experiment file, code, places of data and budget")


def test_a_node_of_one_client_is_told_what_could_not_be_tried(written, tmp_path):
    _, node = copied(written, tmp_path)
    shutil.rmtree(node / "people")
    PEOPLE.select([0]).save(node / "people")
    found = {one.check: one for one in attacks_on_node(NodeSettings.read(node / "node.toml"))}["node's answers"]
    assert found.result == NOT_TESTED
    assert "1 clients of this node are in the round, and its policy has 2 or more of them" in found.text


def test_data_that_every_account_can_read_are_found(tmp_path):
    data = tmp_path / "node" / "data.npz"
    data.parent.mkdir()
    data.touch()
    for folder, file, readable in ((0o755, 0o644, True), (0o700, 0o644, False), (0o755, 0o640, False)):
        data.parent.chmod(folder)
        data.chmod(file)
        everywhere = all(each.stat().st_mode & 0o001 for each in data.parent.resolve().parents)
        assert files.readable_by_all(data) == (readable and everywhere)


def test_a_node_whose_data_every_account_can_read_is_found_out(written):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:                     # pytest's own folders are closed to others
        Path(place).chmod(0o755)
        _, node = copied(written, Path(place))
        node.chmod(0o755)
        data = node / "people"
        for mode, expected in ((0o755, {"data"}), (0o750, set())):
            data.chmod(mode)
            assert open_ones(files.checks_of_node(node)) == expected


def test_every_check_of_files_is_switched_off_by_one_of_these_tests(written, tmp_path):
    """A check that is added needs a case above in which its defence is off."""
    def switched_off(test):
        return {one for _, check in test.pytestmark[0].args[1] for one in ([check] if isinstance(check, str) else check or ())}

    server, node = copied(written, tmp_path)
    whole = list(files.checks_of_node(node))
    (node / "node.toml").write_text((node / "node.toml").read_text().replace("trust = []", 'trust = ["."]'))
    by_code = {"data"}.union(*(one[2] for one in test_a_node_whose_own_defences_are_off_is_found_out_and_nothing_is_charged.pytestmark[0].args[1]))
    for found, test, elsewhere in ((files.checks_of_server(server), test_a_server_whose_files_are_weakened_is_found_out, set()),
                                   ([*whole, *files.checks_of_node(node)], test_a_node_whose_files_are_weakened_is_found_out, by_code)):
        checks = {one.check for one in found if one.result != TRUST}
        assert checks <= switched_off(test) | elsewhere


def test_the_command_examines_folders_and_addresses_and_exits_with_one_where_anything_is_open(written, tmp_path):
    server, node = copied(written, tmp_path)
    with gated(server) as port:
        write_gate_address(server, "0.0.0.0", port)
        write_gate_address(node, "127.0.0.1", port)
        for target in (server, server.parent, node):
            done = CliRunner().invoke(app, ["deploy", "doctor", str(target)])
            assert done.exit_code == 0, done.output
            assert "Nothing is open" in done.output
        (node / "key.pem").chmod(0o644)
        done = CliRunner().invoke(app, ["deploy", "doctor", str(node), "--json"])
        assert done.exit_code == 1
        said = json.loads(done.output)
        assert (said["open"], said["not_tested"]) == (1, 0)
        assert {one["check"] for one in said["findings"] if one["result"] == "open"} == {"key files"}
        done = CliRunner().invoke(app, ["deploy", "doctor", f"127.0.0.1:{port}", "--ca", str(server / "ca.crt")])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["deploy", "doctor", str(server)])
    assert done.exit_code == 1
    assert "Nothing answers" in done.output
    for wrong in (str(tmp_path / "d" / "app"), "nowhere", "host:port", "host:99999"):
        assert CliRunner().invoke(app, ["deploy", "doctor", wrong]).exit_code == 2


def test_the_headers_of_flower_are_as_the_doctor_has_them():
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.superlink.routers.control.router import router

    assert (attacks.KEY_HEADER, attacks.SIGNATURE_HEADER, attacks.TIME_HEADER) == (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
    assert RegisterNodeRequest.FromString(attacks.NO_KEY).public_key == b"none"
    assert {path for path, _ in attacks.CONTROL.values()} <= {route.path for route in router.routes}


@contextmanager
def process(place, name, *command):
    """A process of the deployment, once its port is open."""
    log = (place / name).open("wb")
    one = subprocess.Popen(command, env=process_environment(place / "home"), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield one
    finally:
        one.terminate()
        try:
            one.wait(20)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
        log.close()


def listens(port, patience=120.0):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        with closing(socket.socket()) as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens at {port}")


@pytest.mark.deploy
def test_flowers_own_server_with_each_of_its_defences_off(written, tmp_path):
    """In plain text; with TLS, anybody may join; with node authentication, whose Control API is open; and behind the gate."""
    server = written / "flower" / "server"
    bare, tls, fenced = [free_port() for _ in range(3)]
    secure = ["--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.pem"), "--ssl-keyfile", str(server / "server.key")]
    link = ["flower-superlink", "--host", "127.0.0.1", "--disable-runtime-dependency-installation", "--port"]
    with process(tmp_path, "bare", *link, str(bare), "--insecure"), process(tmp_path, "tls", *link, str(tls), *secure), \
            process(tmp_path, "auth", *link, str(fenced), "--enable-supernode-auth", *secure):
        for port in (bare, tls, fenced):
            listens(port)
        control = set(attacks.CONTROL)
        assert open_ones(examine(written, "flower", bare, node=False)) == ALONE | CALLS
        assert open_ones(examine(written, "flower", tls, node=False)) == {"old TLS", "strangers"} | CALLS
        assert open_ones(examine(written, "flower", fenced, node=False)) == {"old TLS", "strangers"} | control
        runs = subprocess.run(["grep", "-c", "Created run", str(tmp_path / "bare")], capture_output=True, text=True, check=False).stdout
        assert runs.strip() == "0"
    gate = free_port()
    whole = shutil.copytree(written / "flower", tmp_path / "whole")
    write_gate_address(whole / "server", "127.0.0.1", gate)
    with process(tmp_path, "gated", sys.executable, "-m", "fedtail.deployment.flower.process", "serve", str(whole / "server")):
        listens(gate)
        behind = int((whole / "server" / "home" / "config.toml").read_text().split("127.0.0.1:")[1].split('"')[0])
        listens(behind)
        found = examine_folder(whole)
        assert open_ones(found) == {"nodes' secrets"}            # all nodes' folders are still there
        assert {f"{name}, by a node" for name in CALLS} <= {one.check for one in found}
        assert results(examine_address("127.0.0.1", behind, whole / "server" / "ca.crt"))["list nodes"] == OPEN      # what the gate keeps away
    assert os.path.exists(whole / "server" / "link.db")


PLAIN_CELL = """
import sys, time
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
CoreCell("server", f"tcp://127.0.0.1:{sys.argv[1]}", secure=False, credentials={}).start()
time.sleep(300)
"""


@pytest.mark.deploy
@pytest.mark.usefixtures("hasty")
def test_a_cell_of_nvflare_without_tls_is_found_out(written, tmp_path):
    port = free_port()
    with process(tmp_path, "cell", sys.executable, "-c", PLAIN_CELL, str(port)):
        listens(port)
        assert open_ones(examine(written, "nvflare", port, node=False)) == ALONE


def test_a_made_up_node_with_a_certificate_of_its_own_is_a_stranger(written, tmp_path):
    make_node_key(tmp_path)
    make_node_certificate(tmp_path)
    with gated(written / "flower" / "server") as port:
        assert open_ones(attacks.attacks_by_node("127.0.0.1", port, tmp_path)) == set()


def test_text_from_the_network_forges_no_line_of_a_nodes_or_a_servers_log(caplog, tmp_path):
    from fedtail.deployment.flower.server_app import run_on_grid
    from fedtail.deployment.site import error_text

    evil = "no\n2026-01-01T00:00:00 north has joined\x1b[2J\r\u202e<script>"
    assert error_text(ValueError(evil)) == "ValueError on the node; its own log says more."
    (line,) = caplog.messages
    with pytest.raises(Exception, match="script"):
        run_on_grid(None, {"out": str(tmp_path), "experiment": "e.toml", "timeout": evil})
    for text in (line, (tmp_path / "log.txt").read_text()):
        assert "Traceback" in text or "ValueError" in text
        assert all(part.isprintable() for part in text.rstrip().split("\n"))
        assert not any(part.startswith("2026-01-01") for part in text.split("\n"))
        assert "\\x1b[2J" in text
