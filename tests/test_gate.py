"""The gate before a SuperLink: who gets through, and to which calls; over real sockets, with a plain HTTP server behind it."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr")
from fedtail.deployment.flower.gate import Gate, forward_to_gate
from fedtail.deployment.keys import make_certificates, make_node_certificate, make_node_key


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.calls.append(self.path)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, *_):
        pass


@pytest.fixture
def place(tmp_path):
    make_certificates(tmp_path / "server", ["127.0.0.1"])
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
    server.socket, server.calls = secure.wrap_socket(server.socket, server_side=True), []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def post(port, path, body=b"", secure=None):
    """The status and body of the answer to one call; (0, b"") where the connection is closed without one."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secure)
        writer.write(b"POST %s HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (path, len(body)) + body)
        said = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    except (OSError, ssl.SSLError):
        return 0, b""
    head, _, rest = said.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), rest


def through_gate(place, link, *calls):
    """The answers to (node, path, body) through the node's forwarder and the gate, with the lines the gate logged."""
    async def all_of_them():
        gate = await Gate(place / "server", link.server_port, log.append).start("127.0.0.1", 0)
        port, found = gate.sockets[0].getsockname()[1], []
        for node, path, body in calls:
            if callable(node):
                node()
                continue
            if node in ("plain", "bare"):
                secure = ssl.create_default_context(cafile=str(place / "server" / "ca.crt")) if node == "bare" else None
                found.append(await post(port, path, body, secure))
                continue
            forwarder = await forward_to_gate(place / node, "127.0.0.1", port)
            found.append(await post(forwarder.sockets[0].getsockname()[1], path, body))
            forwarder.close()
        gate.close()
        return found

    log = []
    return asyncio.run(all_of_them()), log


PULL = b"/v1/fleet/pull-messages"


def test_pinned_nodes_get_through_to_the_calls_of_nodes_and_to_no_others(place, link):
    whole = bytes(range(256)) * 4000
    closed = [b"/v1/control/start-run", b"/v1/control/list-runs", b"/v1/control/register-node", b"/v1/runtime/push-messages", b"/v1/fleet/register-node",
              b"/v1/fleet/../control/list-runs", b"/v1/fleet/pull-messages/../../control/list-runs", b"//v1/control/list-runs", b"/health", b"/openapi.json"]
    found, log = through_gate(place, link, ("north", PULL, whole), ("south", PULL, b"abc"), *(("north", path, b"x") for path in closed))
    assert found[:2] == [(200, whole[::-1]), (200, b"cba")]
    assert found[2:] == [(403, b"")] * len(closed)
    assert link.calls == [PULL.decode()] * 2
    assert len(log) == len(closed)
    assert all(line.isprintable() and "north" in line for line in log)


def test_nobody_else_gets_through(place, link):
    found, _ = through_gate(place, link, ("plain", PULL, b"x"), ("bare", PULL, b"x"), ("stranger", PULL, b"x"))
    assert found == [(0, b"")] * 3
    assert link.calls == []


def test_a_certificate_that_is_taken_back_is_refused_at_once(place, link):
    found, log = through_gate(place, link, ("south", PULL, b"x"), ((place / "server" / "nodes" / "south.crt").unlink, None, None),
                              ("south", PULL, b"x"), ("north", PULL, b"x"))
    assert [status for status, _ in found] == [200, 403, 200]
    assert "not pinned" in log[0]


def test_a_node_does_not_talk_to_another_server(place, link):
    shutil.rmtree(place / "server")
    make_certificates(place / "server", ["127.0.0.1"])
    (place / "server" / "nodes").mkdir()
    shutil.copyfile(place / "north" / "node.crt", place / "server" / "nodes" / "north.crt")
    found, _ = through_gate(place, link, ("north", PULL, b"x"))
    assert found == [(0, b"")]
    assert link.calls == []
