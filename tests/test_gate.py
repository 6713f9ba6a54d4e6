"""The gate before a SuperLink, and a node's forwarder: who gets through, to which calls, and whose app a node runs.

Over real sockets, with an HTTP server in the SuperLink's place.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import ssl
import threading
import tomllib
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr")
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.proto.run_pb2 import GetRunResponse, Run
from flwr.proto.transport_pb2 import Scalar

from fedtail.deployment.flower.forwarder import Forwarder
from fedtail.deployment.flower.gate import Gate
from fedtail.deployment.flower.own_app import own_app
from fedtail.deployment.keys import make_certificates, make_node_certificate, make_node_key


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.calls.append(self.path)
        status, said = self.server.says.get(self.path, (200, body[::-1]))
        self.send_response(status)
        self.send_header("location", "https://elsewhere.example.org/v1/fleet/get-run")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


@pytest.fixture
def place(tmp_path):
    make_certificates(tmp_path / "server", ["127.0.0.1"])
    make_certificates(tmp_path / "here", ["127.0.0.1"])
    (tmp_path / "server" / "nodes").mkdir()
    for name in ("north", "south", "stranger"):
        make_node_key(tmp_path / name)
        make_node_certificate(tmp_path / name)
        shutil.copyfile(tmp_path / "server" / "ca.crt", tmp_path / name / "ca.crt")
        if name != "stranger":
            shutil.copyfile(tmp_path / name / "node.crt", tmp_path / "server" / "nodes" / f"{name}.crt")
    return tmp_path


@pytest.fixture
def link(place):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(place / "server" / "server.pem", place / "server" / "server.key")
    server.socket, server.calls, server.says = secure.wrap_socket(server.socket, server_side=True), [], {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def post(port, path, body=b"", secure=None):
    """The status and body of the answer to one call; (0, b"") where the connection is closed without one."""
    said = b""
    with suppress(OSError, ssl.SSLError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secure)
        try:
            writer.write(b"POST %s HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (path, len(body)) + body)
            said = await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)
    head, _, rest = said.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), rest


def through_gate(place, link, *calls):
    """The answers to (node, path, body) through the node's forwarder and the gate, with the lines the gate logged."""
    async def all_of_them():
        gate = await Gate(place / "server", link.server_port, log.append).start("127.0.0.1", 0)
        port, found = gate.sockets[0].getsockname()[1], []
        for node, path, body in calls:
            if node == "same":                                # one forwarder for these calls, and what happens between them
                forwarder = await Forwarder(place / path, "127.0.0.1", port, own.append).start(place / "here")
                here = ssl.create_default_context(cafile=str(place / "here" / "ca.crt"))
                for one in body:
                    if callable(one):
                        one()
                    else:
                        found.append(await post(forwarder.sockets[0].getsockname()[1], *one, here))
                forwarder.close()
                continue
            if callable(node):
                node()
                continue
            if node in ("plain", "bare"):
                secure = ssl.create_default_context(cafile=str(place / "server" / "ca.crt")) if node == "bare" else None
                found.append(await post(port, path, body, secure))
                continue
            if node.startswith("the key of "):
                context = Forwarder(place / node.removeprefix("the key of "), "127.0.0.1", port).context
                found.append(await post(port, path, body, context))
                continue
            forwarder = await Forwarder(place / node, "127.0.0.1", port, own.append).start(place / "here")
            here = ssl.create_default_context(cafile=str(place / "here" / "ca.crt"))
            found.append(await post(forwarder.sockets[0].getsockname()[1], path, body, here))
            forwarder.close()
        gate.close()
        return found

    log, own = [], []
    return asyncio.run(all_of_them()), log, own


PULL, GET_RUN, GET_APP = (f"/v1/fleet/{name}".encode() for name in ("pull-messages", "get-run", "get-fab"))


def test_pinned_nodes_get_through_to_the_calls_of_nodes_and_to_no_others(place, link):
    whole = bytes(range(256)) * 4000
    closed = [b"/v1/control/start-run", b"/v1/control/list-runs", b"/v1/control/register-node", b"/v1/runtime/push-messages", b"/v1/fleet/register-node",
              b"/v1/fleet/../control/list-runs", b"/v1/fleet/pull-messages/../../control/list-runs", b"//v1/control/list-runs", b"/health", b"/openapi.json", GET_APP]
    found, log, own = through_gate(place, link, ("north", PULL, whole), ("south", PULL, b"abc"), *(("the key of north", path, b"x") for path in closed),
                                   *(("north", path, b"x") for path in closed[:-1]))
    assert found[:2] == [(200, whole[::-1]), (200, b"cba")]
    assert found[2:] == [(403, b"")] * (2 * len(closed) - 1)
    assert link.calls == [PULL.decode()] * 2
    assert (len(log), len(own)) == (len(closed), len(closed) - 1)
    assert all(line.isprintable() and "north" in line for line in log)


def test_nobody_else_gets_through(place, link):
    found, _, own = through_gate(place, link, ("plain", PULL, b"x"), ("bare", PULL, b"x"), ("the key of stranger", PULL, b"x"), ("stranger", PULL, b"x"))
    assert found == [(0, b"")] * 3 + [(503, b"")]          # on which a SuperNode waits and tries again
    assert len(own) == 1
    assert link.calls == []


def test_a_certificate_that_is_taken_back_is_refused_at_once(place, link):
    found, log, _ = through_gate(place, link, ("south", PULL, b"x"), ((place / "server" / "nodes" / "south.crt").unlink, None, None),
                              ("south", PULL, b"x"), ("north", PULL, b"x"))
    assert [status for status, _ in found] == [200, 403, 200]
    assert "not pinned" in log[0]


def test_nodes_are_added_and_keys_and_certificates_replaced_while_the_gate_is_open(place, link):
    server, north = place / "server", place / "north"
    old = shutil.copytree(north, place / "old")
    make_certificates(place / "next", ["127.0.0.1"])

    def admit(name):
        shutil.copyfile(place / name / "node.crt", server / "nodes" / f"{name}.crt")

    def replace_the_key_of_north():
        for name in ("key", "key.pub", "key.pem", "node.crt"):
            (north / name).unlink()
        make_node_key(north)
        make_node_certificate(north)
        admit("north")

    def trust_both():
        (north / "ca.crt").write_bytes((server / "ca.crt").read_bytes() + (place / "next" / "ca.crt").read_bytes())

    def replace_the_servers_certificate():
        for name in ("ca.crt", "server.pem", "server.key"):
            shutil.copyfile(place / "next" / name, server / name)

    found, log, own = through_gate(
        place, link, ("stranger", PULL, b"x"), (lambda: admit("stranger"), None, None), ("stranger", PULL, b"x"), ("same", "north", (
            (PULL, b"x"), replace_the_key_of_north, (PULL, b"x"), trust_both, (PULL, b"x"), replace_the_servers_certificate, (PULL, b"x"))),
        ("the key of old", PULL, b"x"), ("stranger", PULL, b"x"), (lambda: shutil.copyfile(server / "ca.crt", old / "ca.crt"), None, None),
        ("the key of old", PULL, b"x"))
    assert [status for status, _ in found] == [503, 200, *[200] * 4, 0, 503, 403]
    assert "not pinned" in log[0]
    assert len(own) == 2


def test_a_node_does_not_talk_to_another_server(place, link):
    shutil.rmtree(place / "server")
    make_certificates(place / "server", ["127.0.0.1"])
    (place / "server" / "nodes").mkdir()
    shutil.copyfile(place / "north" / "node.crt", place / "server" / "nodes" / "north.crt")
    found, _, own = through_gate(place, link, ("north", PULL, b"x"))
    assert found == [(503, b"")]
    assert link.calls == []
    assert "certificate verify failed" in own[0]


def test_a_node_runs_its_own_app_whatever_the_server_says(place, link):
    theirs = {"seed": Scalar(sint64=7), "settings": Scalar(string="/elsewhere/node.toml")}
    evil = Run(run_id=5, series_id=6, fab_id="../../evil", fab_version="/../9", fab_hash="f" * 64, primary_task_type="flwr-agentapp", override_config=theirs)
    link.says[GET_RUN.decode()] = (200, GetRunResponse(run=evil).SerializeToString())
    (about, app), log, _ = through_gate(place, link, ("north", GET_RUN, b"x"), ("north", GET_APP, b"x"))
    run, fab = GetRunResponse.FromString(about[1]).run, GetFabResponse.FromString(app[1]).fab
    assert link.calls == [GET_RUN.decode()]                                    # nobody asks the server for an app
    assert (run.run_id, run.series_id, run.fab_id, run.fab_version, run.primary_task_type) == (5, 6, "fedtail/fedtail-node", "1.0.0", "flwr-serverapp")
    assert {name: value.sint64 for name, value in run.override_config.items()} == {"seed": 7}
    assert (run.fab_hash, fab.content) == (fab.hash_str, own_app()[1]) == own_app()
    with zipfile.ZipFile(io.BytesIO(fab.content)) as archive:
        assert archive.namelist() == ["pyproject.toml", ".info/CONTENT"]      # and no code
        said = tomllib.loads(archive.read("pyproject.toml").decode())
    assert said["tool"]["flwr"]["app"]["components"]["clientapp"] == "fedtail.deployment.flower.node_app:app"
    assert said["project"]["dependencies"] == []
    assert log == []


@pytest.mark.parametrize("answer", [(200, b"\xff\xff"), (200, b"\x00" * ((1 << 20) + 1)), (307, b""), (302, b"")])
def test_an_answer_about_a_run_that_is_rubbish_enormous_or_leads_elsewhere_does_not_come_to_the_node(place, link, answer):
    link.says[GET_RUN.decode()] = answer
    found, _, own = through_gate(place, link, ("north", GET_RUN, b"x"))
    assert found == [(503, b"")]
    assert "gave no answer" in own[0]


def test_flower_takes_the_app_of_a_node(tmp_path):
    """By Flower's own functions that unpack an app and find what to run."""
    from flwr.cli.install import install_from_fab
    from flwr.common.config import get_project_config

    installed = install_from_fab(own_app()[1], tmp_path, skip_prompt=True)
    assert installed.name == f"fedtail.fedtail-node.1.0.0.{own_app()[0][:8]}"
    assert [path.name for path in installed.iterdir()] == ["pyproject.toml"]
    assert get_project_config(installed)["tool"]["flwr"]["app"]["config"] == {"seed": 0}
