"""What a node over Flower has open on its own machine: its tasks are claimed with a secret, and tokens are in nobody's sight.

Flower's own Runtime API listens here, on a real socket, with a stand-in for the process of a message.
"""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr")
import uvicorn
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

from fedtail.deployment.doctor import CLOSED, NOT_TESTED, OPEN
from fedtail.deployment.doctor.doors import Door, stranger_context
from fedtail.deployment.doctor.node_ports import CLAIM, attacks_on_node_ports
from fedtail.deployment.flower.example import write_example
from fedtail.deployment.flower.folder import write_gate_address
from fedtail.deployment.flower.loopback import PROCESS, descendant_ids, free_port, is_flower_process
from fedtail.deployment.flower.tasks import NodeTasks
from fedtail.deployment.keys import make_certificates
from fedtail.deployment.node_process import is_running, only_process
from fedtail.deployment.policy_example import write_loopback_policy

STAND_IN = f"""\
#!{sys.executable}
import json, os, signal, stat, sys, time
file = sys.argv[sys.argv.index("--token-file") + 1]
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stays" in os.environ else signal.SIG_DFL)
print(json.dumps({{"words": sys.argv, "token": open(file).read(), "mode": stat.S_IMODE(os.stat(file).st_mode), "pid": os.getpid()}}),
      file=open(os.environ["said"] + ".new", "w"), flush=True)
os.rename(os.environ["said"] + ".new", os.environ["said"])
time.sleep(60 if "stays" in os.environ else 0)
"""


@contextmanager
def runtime_api(home, port, secret=None, tls=True):
    """Flower's API of a SuperNode at `port`, and its state, in which tasks can be made."""
    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    factory.state().set_node_id(1)
    files = {"ssl_certfile": home / "tls" / "server.pem", "ssl_keyfile": home / "tls" / "server.key"} if tls else {}
    server = uvicorn.Server(uvicorn.Config(create_app(factory, secret), host="127.0.0.1", port=port, log_level="error", ws="none", **files))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield factory.state()
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def home(tmp_path):
    made = tmp_path / "flower"
    make_certificates(made / "tls", ["127.0.0.1"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flwr-clientapp").write_text(STAND_IN)
    (tmp_path / "bin" / "flwr-clientapp").chmod(0o755)
    return made


def tasks_of(home, **environment):
    made = NodeTasks(home, free_port(), {"PATH": str(home.parent / "bin"), "said": str(home.parent / "said"), **environment})
    return made, (home / "tasks" / "secret").read_bytes()


def run_until(tasks, reached, patience=20.0):
    """Run the node's tasks until `reached` is true, then as at the node's end."""
    async def both():
        running, end = asyncio.create_task(tasks.run()), time.monotonic() + patience
        while not running.done() and not reached() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        over = running.done()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert not over
        assert reached()

    asyncio.run(both())


def test_a_task_is_claimed_with_the_secret_and_its_token_is_in_a_file_of_the_owner(home):
    tasks, secret = tasks_of(home)
    said = home.parent / "said"
    with runtime_api(home, tasks.port, secret) as state:
        state.create_task(task_type=TaskType.CLIENT_APP, run_id=5, fab_hash="f")
        for context in (None, stranger_context()):
            assert Door("127.0.0.1", tasks.port, "", context).call(CLAIM, b"\x0a\x0eflwr-clientapp")[0] in (0, 401)
        run_until(tasks, lambda: said.exists() and not list((home / "tasks").glob("token-*")))
        assert [one.status.status for one in state.get_tasks()] == ["starting"]      # claimed once
    found = json.loads(said.read_text())
    assert len(found["token"]) >= 32
    assert found["mode"] == 0o600
    assert found["token"] not in " ".join(found["words"])
    assert found["words"][found["words"].index("--root-certificates") + 1] == str(home / "tls" / "ca.crt")
    assert "--insecure" not in found["words"]
    assert stat.S_IMODE((home / "tasks").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "tasks" / "secret").stat().st_mode) == 0o600


def test_processes_end_with_the_node(home):
    tasks, secret = tasks_of(home, stays="yes")
    said = home.parent / "said"
    with runtime_api(home, tasks.port, secret) as state:
        state.create_task(task_type=TaskType.CLIENT_APP, run_id=5, fab_hash="f")
        run_until(tasks, said.exists)                        # it does not heed SIGTERM
    assert not Path(f"/proc/{json.loads(said.read_text())['pid']}").exists()


@pytest.mark.parametrize(("given", "text"), [(None, "answers 200 where a task of this node is claimed without secret"),
                                             (b"another", "refuses the secret of this node")])
def test_a_node_does_not_run_where_its_tasks_are_for_everybody_or_not_for_itself(home, given, text):
    tasks, _ = tasks_of(home)
    with runtime_api(home, tasks.port, given), pytest.raises(RuntimeError, match=text):
        asyncio.run(tasks.run())


def test_the_secret_is_new_at_every_start_and_whoever_takes_the_port_gets_no_process(home):
    tasks, secret = tasks_of(home)
    assert tasks_of(home)[1] != secret
    with runtime_api(home, tasks.port, tls=False), pytest.raises(AssertionError):      # it never answers, over TLS
        run_until(tasks, lambda: False, patience=1.0)
    make_certificates(home.parent / "other" / "tls", ["127.0.0.1"])
    with runtime_api(home.parent / "other", tasks.port, secret), pytest.raises(AssertionError):
        run_until(tasks, lambda: False, patience=1.0)


class Fleet(BaseHTTPRequestHandler):
    """The forwarder to a SuperLink, which answers every call with one status."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def forwarder(status):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fleet)
    server.status = status
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("secret", "tls", "fleet", "result", "texts"), [
    (b"secret", True, 401, CLOSED, ("refused (401), and so is a call in its name (401)",)),
    (b"secret", True, 503, CLOSED, ("(503, as no server is reached)",)),
    (None, True, 401, OPEN, ("acquire-task without the node's secret is answered with 200",)),
    (None, False, 401, OPEN, ("acquire-task without the node's secret is answered with 200",)),      # as Flower starts it by itself
    (b"secret", True, 200, OPEN, ("without its signature is answered with 200",)),
    (None, False, 200, OPEN, ("acquire-task without the node's secret is answered with 200", "without its signature")),
])
def test_the_doctor_tries_the_nodes_own_ports_and_prints_what_it_got(home, secret, tls, fleet, result, texts):
    node, port = home.parent, free_port()
    write_gate_address(node, "127.0.0.1", 1)
    with runtime_api(home, port, secret, tls) as state, forwarder(fleet) as other, only_process(node):
        state.create_task(task_type=TaskType.CLIENT_APP, run_id=5, fab_hash="f")
        (home / "ports.toml").write_text(f"forwarder = {other}\ntasks = {port}\n")
        found, = attacks_on_node_ports(node)
        assert [one.status.status for one in state.get_tasks()] == ["pending"]      # the doctor takes nothing
    assert found.result == result
    assert all(text in found.text for text in texts)


def test_the_doctor_touches_no_port_of_a_node_that_does_not_run(home):
    node = home.parent
    assert not list(attacks_on_node_ports(node))                 # a node over NVFlare listens nowhere
    write_gate_address(node, "127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        (home / "ports.toml").write_text(f"forwarder = {somebody.getsockname()[1]}\ntasks = {somebody.getsockname()[1]}\n")
        assert [one.result for one in attacks_on_node_ports(node)] == [CLOSED]
        somebody.settimeout(0.1)
        with pytest.raises(TimeoutError):
            somebody.accept()
    with only_process(node):
        assert is_running(node)
        (home / "ports.toml").write_text("tasks = 70000\n")
        assert [one.result for one in attacks_on_node_ports(node)] == [NOT_TESTED]
        (home / "ports.toml").unlink()
        assert [one.result for one in attacks_on_node_ports(node)] == [NOT_TESTED]
    assert not is_running(node)


def test_a_node_as_it_is_started_gives_its_tasks_to_nobody(tmp_path):
    """The real processes of a node, without a server: the SuperNode's port is open before it looks for one."""
    folder, _ = write_example(tmp_path / "deployment", 2, 1)
    node = folder.node_folder("node-1")
    write_loopback_policy(node)
    write_gate_address(node, "127.0.0.1", free_port())
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([*PROCESS, "join", str(node)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            found = list(attacks_on_node_ports(node)) if is_running(node) else []
            if found and found[0].result != NOT_TESTED:
                break
            time.sleep(0.2)
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert found[0].result == CLOSED
        assert "refused (401), and so is a call in its name (503, as no server is reached)" in found[0].text
        secrets = [path for path in (node / "flower").rglob("*") if path.name in ("key", "secret", "server.key")]
        assert sorted(path.name for path in secrets) == ["key", "secret", "server.key"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
        assert stat.S_IMODE((node / "flower").stat().st_mode) == 0o700
        children = descendant_ids(process.pid)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert children
    assert not any(map(is_flower_process, children))
