"""The transport over NVFlare's cells: who gets in, under which name, and what is refused before anything is decoded.

Peers here speak NVFlare's frames over sockets of their own, so that they may say what no honest cell would.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgpack
import pytest

pytest.importorskip("nvflare")

from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.deployment.door import OF_A_CERTIFICATE, OF_AN_ADDRESS
from fedtail.deployment.flower.folder import check_name
from fedtail.deployment.flower.loopback import free_port
from fedtail.deployment.keys import make_certificates, make_node_certificate, make_node_key
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.nvflare.pinned_tls import node_context, server_context
from fedtail.deployment.nvflare.transport import CellTransport
from fedtail.deployment.transport import wait_until

HELLO, READY, DATA = 4, 5, 1
PREFIX = struct.Struct(">IHBBHHHH")
FILE = 'rounds = 1\n[task.module]\npart = "SoftmaxRegression"\nfeatures = 5\nclasses = 3\n[sample]\ncohort_size = 4\n[local]\nlearning_rate = 0.1\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("cells")
    (place / "e.toml").write_text(FILE)
    return write_cell_folder(place / "deployment", place / "e.toml", ["a", "b", "c"], "127.0.0.1", 8000)


class Server:
    def __init__(self, folder, **settings):
        self.lines, self.port = [], free_port()
        self.transport = CellTransport(folder.server_folder, f"127.0.0.1:{self.port}", log=self.lines.append, **settings)

    def online(self, *names):
        return wait_until(lambda: self.transport.online_nodes() == set(names), 10.0, 0.02)

    def said(self, text):
        return wait_until(lambda: any(text in line for line in self.lines), 10.0, 0.02)


@contextmanager
def listening(folder, **settings):
    server = Server(folder, **settings)
    with server.transport:
        yield server


def connected(port, source="127.0.0.1"):
    """A connection from the address `source`, without TLS."""
    for _ in range(100):                                         # the server's listener starts in a thread
        try:
            return socket.create_connection(("127.0.0.1", port), 10, (source, 0))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise ConnectionRefusedError


class Peer:
    """One connection of somebody with the keys in a node's folder, who says that their name is `name`."""

    def __init__(self, port, context, name, source="127.0.0.1"):
        self.socket = context.wrap_socket(connected(port, source), server_hostname="127.0.0.1")
        self.name = name
        self.write(HELLO, None, msgpack.packb({"endpoint_name": name, "timestamp": 0.0, "fqcn": name}))

    def write(self, kind, headers, payload):
        head = b"" if headers is None else msgpack.packb(headers)
        self.socket.sendall(PREFIX.pack(16 + len(head) + len(payload), len(head), kind, 0, 0, 1, 1, 1) + head + payload)

    def send(self, payload=b"", **other):
        head = {"msg_type": "req", "origin": self.name, "destination": "server", "from": self.name, "to": "server", "channel": "fedtail",
                "topic": "reply", "payload_encoding": "bytes", "reply_expected": False, "route": [[self.name, 0.0]]} | other
        self.write(DATA, {f"cn__{key}" if key != "number" else "fedtail.number": value for key, value in head.items()}, payload)

    def read(self):
        """The next frame of data, as (headers, payload); raises where the connection ends."""
        while True:
            length, head, kind, *_ = PREFIX.unpack(self.exactly(16))
            rest = self.exactly(length - 16)
            if kind == DATA:
                return msgpack.unpackb(rest[:head]), rest[head:]

    def exactly(self, count):
        found = bytearray()
        while len(found) < count:
            piece = self.socket.recv(min(1 << 20, count - len(found)))
            if not piece:
                raise ConnectionResetError
            found += piece
        return bytes(found)

    def refused(self):
        """Whether the server ends this connection without an answer to the hello."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except (OSError, ssl.SSLError):
            return True
        return True

    def close(self):
        self.socket.close()


def context_of(folder, name):
    return node_context(folder.node_folder(name))


def test_frames_have_the_names_that_these_tests_use():
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.sfm.constants import Types

    assert (Types.HELLO, Types.READY, Types.DATA) == (HELLO, READY, DATA)
    assert {MessageHeaderKey.ORIGIN, MessageHeaderKey.PAYLOAD_ENCODING} == {"cn__origin", "cn__payload_encoding"}


def test_only_pinned_certificates_get_in_and_only_under_their_own_name(folder, tmp_path):
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.load_verify_locations(folder.server_folder / "ca.crt")
    make_node_key(tmp_path / "stranger")
    make_node_certificate(tmp_path / "stranger")
    shutil.copyfile(folder.server_folder / "ca.crt", tmp_path / "stranger" / "ca.crt")
    old = context_of(folder, "b")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with listening(folder) as server, closing(Peer(server.port, context_of(folder, "b"), "b")):
        assert server.online("b")
        for context, name in ((anonymous, "a"), (node_context(tmp_path / "stranger"), "a"), (context_of(folder, "b"), "a"),
                              (context_of(folder, "b"), "server"), (context_of(folder, "b"), "c")):
            with closing(Peer(server.port, context, name)) as peer:
                if name != "server":                             # a second "server" is not answered, and stays nameless
                    assert peer.refused()
            assert server.online("b")
        with pytest.raises((ssl.SSLError, OSError)):
            Peer(server.port, old, "b")
        with closing(Peer(server.port, context_of(folder, "a"), "a")):
            assert server.online("a", "b")
        assert server.online("b")


def test_a_certificate_that_is_taken_out_of_the_folder_is_refused_without_a_restart(tmp_path, folder):
    server = shutil.copytree(folder.server_folder, tmp_path / "server")

    class Moved:
        server_folder = server

    with listening(Moved) as here:
        with closing(Peer(here.port, context_of(folder, "a"), "a")):
            assert here.online("a")
        (server / "nodes" / "a.crt").unlink()
        with closing(Peer(here.port, context_of(folder, "a"), "a")) as peer:
            assert peer.refused()
        assert here.online()


def test_a_stranger_who_never_finishes_the_handshake_keeps_nobody_out(folder):
    with listening(folder) as server, closing(Peer(server.port, context_of(folder, "a"), "a")):
        assert server.online("a")
        with closing(socket.create_connection(("127.0.0.1", server.port))), closing(Peer(server.port, context_of(folder, "b"), "b")):
            assert server.online("a", "b")


def test_nothing_is_forwarded_decoded_or_believed(folder, monkeypatch):
    from nvflare.fuel.f3.cellnet import utils

    decoded = []
    monkeypatch.setattr(utils.fobs, "loads", lambda *given, **named: decoded.append(given))
    with listening(folder, timeout=10.0) as server, closing(Peer(server.port, context_of(folder, "a"), "a")) as a, \
            closing(Peer(server.port, context_of(folder, "b"), "b")) as b:
        assert server.online("a", "b")
        server.transport.ids = {0: "a"}
        found = []
        asking = threading.Thread(target=lambda: found.append(server.transport.exchange({0: b"question"})))
        asking.start()
        headers, payload = a.read()
        assert payload == b"question"
        number = headers["fedtail.number"]
        assert headers["cn__payload_encoding"] == "bytes"
        for problem, other in {"b sent it as 'a'": {"origin": "a"}, "b sent it as 'server'": {"origin": "server", "destination": "a"},
                               "b sent it to 'a', and nothing is forwarded": {"destination": "a", "topic": "message"},
                               "b sent it on 'cellnet.channel', 'bulk'": {"channel": "cellnet.channel", "topic": "bulk"},
                               "b sent it on 'credential_manager'": {"channel": "credential_manager", "topic": "key_exchange"},
                               "b sent something else than bytes": {"payload_encoding": "fobs"},
                               "b did not number it": {"number": "1"}}.items():
            b.send(pickle.dumps(print), **({"number": number} | other))
            assert server.said(f"refused a message: {problem}"), server.lines
        for other in ({"payload_encoding": None}, {"secure": True, "encrypted": True}, {"conn_url": "tcp://127.0.0.1:9"}):
            before = sum("something else than bytes" in line for line in server.lines)
            b.send(pickle.dumps(print), number=number, **other)
            assert wait_until(lambda: sum("something else than bytes" in line for line in server.lines) > before, 10.0, 0.02)  # noqa: B023
        b.send(b"an answer for another node", number=number)      # well formed, and not b's to give
        assert server.said("a reply of b is not waited for")
        a.send(b"answer", number=number)
        asking.join()
        assert found == [{0: b"answer"}]
        a.send(b"again", number=number)
        assert server.said("a reply of a is not waited for")
        a.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            a.read()                                              # nothing of b's has come to a
    assert decoded == []
    assert all(line.isprintable() for line in server.lines)


def test_an_exchange_ends_when_a_connection_does_and_not_when_the_time_is_over(folder):
    with listening(folder, timeout=60.0) as server, closing(Peer(server.port, context_of(folder, "a"), "a")) as a:
        assert server.online("a")
        server.transport.ids = {0: "a", 1: "b"}
        threading.Thread(target=lambda: (a.read(), a.close())).start()
        assert server.transport.exchange({0: b"x", 1: b"y"}) == {}
        assert server.transport.seconds[0] < 10


def test_a_late_reply_is_left_out(folder):
    with listening(folder, timeout=0.5) as server, closing(Peer(server.port, context_of(folder, "a"), "a")):
        assert server.online("a")
        server.transport.ids = {0: "a"}
        assert server.transport.exchange({0: b"x"}) == {}
        assert 0.4 < server.transport.seconds[0] < 5


def test_messages_of_100_megabytes_pass_both_ways(folder):
    large = bytes(100_000_000)
    with listening(folder, timeout=120.0) as server, closing(Peer(server.port, context_of(folder, "a"), "a")) as a:
        a.socket.settimeout(120.0)
        assert server.online("a")
        server.transport.ids = {0: "a"}

        def answer():
            headers, payload = a.read()
            a.send(payload[::-1], number=headers["fedtail.number"])

        threading.Thread(target=answer).start()
        assert server.transport.exchange({0: large[:-1] + b"x"}) == {0: b"x" + large[:-1]}


def test_a_node_connects_to_the_deployments_own_server_only(folder, tmp_path):
    """A server that another authority certified, the certificate of another host, and the certificate of a node."""
    def handshakes(server_side):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            outcome = []

            def accept():
                try:
                    outcome.append(server_side.wrap_socket(listener.accept()[0], server_side=True))
                except (ssl.SSLError, OSError):
                    outcome.append(None)

            thread = threading.Thread(target=accept)
            thread.start()
            try:
                with socket.create_connection(listener.getsockname()) as plain, \
                        context_of(folder, "a").wrap_socket(plain, server_hostname="127.0.0.1"):
                    return True
            except (ssl.SSLError, OSError):
                return False
            finally:
                thread.join()
                if outcome[0] is not None:
                    outcome[0].close()

    shutil.copytree(folder.node_keys, tmp_path / "nodes")
    make_certificates(tmp_path, ["127.0.0.1"])
    as_node = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    as_node.load_cert_chain(folder.node_folder("b") / "node.crt", folder.node_folder("b") / "key.pem")
    assert handshakes(server_context(folder.server_folder))
    assert not handshakes(server_context(tmp_path))
    assert not handshakes(as_node)


def test_folders_share_no_secret_and_say_how_to_start(tmp_path):
    (tmp_path / "e.toml").write_text(FILE)
    said = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "out"), "--experiment", str(tmp_path / "e.toml"), "--nodes", "north,south",
                                    "--transport", "nvflare", "--host", "fl.example.org", "--port", "9000"])
    assert said.exit_code == 0, said.output
    assert "fedtail node run node.toml" in said.output
    assert "fedtail deploy serve" in said.output
    files = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    node = ["ca.crt", "experiment.toml", "key", "key.pem", "key.pub", "node.crt", "node.toml", "server.toml"]
    assert sorted(files) == sorted(["experiment.toml", "server/ca.crt", "server/server.key", "server/server.pem", "server/run.toml",
                                    *(f"server/nodes/{name}.{end}" for name in ("north", "south") for end in ("pub", "crt")),
                                    *(f"nodes/{name}/{one}" for name in ("north", "south") for one in node)])
    secrets = {name: content for name, content in files.items() if b"PRIVATE KEY" in content}
    assert sorted(secrets) == ["nodes/north/key", "nodes/north/key.pem", "nodes/south/key", "nodes/south/key.pem", "server/server.key"]
    assert len(set(secrets.values())) == len(secrets)
    for name in ("server", "a.b", "", "a/b", "-a"):
        with pytest.raises(ValueError, match="letters, digits, - and _"):
            check_name(name)


def test_settings_of_the_server_and_the_address_are_read_strictly(tmp_path):
    from fedtail.deployment.node_process import read_server
    from fedtail.deployment.nvflare.server import read_settings

    path = tmp_path / "run.toml"
    for text, problem in (("porto = 1", "has no setting 'porto'"), ('port = "1"', "port must be a int"), ("resume = 1", "must be a bool")):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_settings(path)
    path.write_text("port = 9\nwait = 3")
    assert (read_settings(path)["port"], read_settings(path)["wait"], read_settings(path)["schedule"]) == (9, 3, "ahead")
    for text in ('host = "h"', 'host = "h"\nport = 0', 'host = "h"\nport = 1\nmore = 2', "host = 1\nport = 1"):
        path.write_text(text)
        with pytest.raises(ValueError, match="must say host and port"):
            read_server(path)


def test_fedtail_does_not_load_nvflare():
    code = "import sys, fedtail, fedtail.cli, fedtail.deployment.nvflare, fedtail.deployment.nvflare.folder; print('nvflare' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.deploy
def test_runs_equal_the_simulators_and_leave_nothing_in_the_home_folder(tmp_path, monkeypatch):
    from fedtail.deployment.nvflare.loopback import run_cell_example

    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = run_cell_example(tmp_path / "deployment", 3, 2, lambda text: None)
    assert [one.method for one in found] == ["FedAvg", "Delta-FL"]
    assert all(one.difference < 1e-8 < 1e-2 < one.moved for one in found)
    assert list((tmp_path / "home").rglob("*")) == []
    for out in (tmp_path / "deployment" / "runs").iterdir():
        assert len(json.loads((out / "seconds.json").read_text())) == (out / "log.txt").read_text().count(" exchange ")


@pytest.mark.deploy
@pytest.mark.parametrize("fault", ["late", "garbage"])
def test_a_node_that_is_killed_comes_back_and_one_that_is_late_or_lies_is_left_out(tmp_path, fault):
    from fedtail.deployment.flower.example import node_names, write_example
    from fedtail.deployment.flower.loopback import read_text_or_empty
    from fedtail.deployment.nvflare.loopback import CellLoopback

    faulty = {"PYTHONPATH": str(Path(__file__).parent / "deploy_faults"), "FEDTAIL_FAULT": fault, "FEDTAIL_LATE": "2"}
    folder, _ = write_example(tmp_path / "deployment", 5, 9999, share=1.0, write=write_cell_folder)
    out = folder.path / "runs" / "run"

    def answered():
        lines = read_text_or_empty(out / "answers.jsonl").splitlines(keepends=True)
        return [json.loads(line)["answered"] for line in lines if line.endswith("\n")]

    with CellLoopback(folder, node_names(5)) as loopback:
        for name in node_names(5):
            loopback.start_node(name, **(faulty if name == "node-5" else {}))
        loopback.start_server(out, method="Delta-FL", nodes=5, timeout=1.5)
        loopback.wait_for_log(out, lambda log: "round 3 of" in log, 300.0)
        before = len(answered())
        loopback.kill("node-3")
        loopback.wait_for_log(out, lambda log: 24 in answered()[before:], 300.0)      # more than the threshold of 21
        loopback.start_node("node-3")
        loopback.wait_for_log(out, lambda log: answered()[-4:] == [32] * 4, 300.0)    # it is back: four honest nodes of eight clients
    assert max(answered()) == 32                                 # and never the fifth


def test_strangers_who_only_connect_keep_no_node_out_and_take_few_descriptors(folder):
    """A thousand connections without a handshake were all the descriptors of a process: the run ended at its next file."""
    with listening(folder) as server, closing(Peer(server.port, node_context(folder.node_folder("a")), "a")):
        assert server.online("a")
        before, strangers = len(os.listdir("/proc/self/fd")), []
        for _ in range(3 * OF_AN_ADDRESS):
            strangers.append(socket.create_connection(("127.0.0.1", server.port), 10))
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) - before <= len(strangers) + OF_AN_ADDRESS + 3, 10.0, 0.02)
        for one in strangers[-OF_AN_ADDRESS:]:
            one.settimeout(10.0)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""                                            # closed at once, by the server
        with closing(Peer(server.port, node_context(folder.node_folder("b")), "b", "127.0.0.2")):
            assert server.online("a", "b")
        for one in strangers:
            one.close()
        with closing(Peer(server.port, node_context(folder.node_folder("c")), "c")):
            assert server.online("a", "c")


def test_one_node_has_so_many_connections_and_no_more(folder):
    with listening(folder) as server, ExitStack() as stack:
        context = node_context(folder.node_folder("a"))
        for _ in range(OF_A_CERTIFICATE):
            stack.enter_context(closing(context.wrap_socket(connected(server.port), server_hostname="127.0.0.1")))
        one = stack.enter_context(closing(context.wrap_socket(connected(server.port), server_hostname="127.0.0.1")))
        with suppress(ConnectionResetError):
            assert one.recv(1) == b""
        stack.close()
        with closing(Peer(server.port, context, "a")):
            assert server.online("a")
