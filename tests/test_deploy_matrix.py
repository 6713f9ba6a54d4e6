"""Every fault over every transport, in real processes. NVFlare's and two of Flower's are in make test-deploy, all in
make test-deploy-matrix.

What must hold in every case: each round completes with the others or is lost, in words; the model is the simulator's over the
clients that stayed, to 1e-6; every release is on the ledger; nothing is left running.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("nvflare")

from fedtail import Population
from fedtail.deployment.flower.folder import write_gate_address
from fedtail.deployment.keys import make_certificates
from fedtail.deployment.policy_example import write_loopback_policy

from deploy_cases import FAULTS, Deployment, processes_of
from deploy_network import a_cable, why_no_network
from deploy_oracle import models_apart, releases_on_ledger

EQUAL = 1e-6
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NO_FAKETIME = "" if FAKETIME else "libfaketime is missing: apt-get install faketime"
PATIENCE = {"flower": 900.0, "nvflare": 400.0}
TIMEOUT = {"flower": 90.0, "nvflare": 60.0}      # seconds; over NVFlare the first question loads torch, on four nodes at once
SHORT = {"flower": 35.0, "nvflare": 20.0}       # of those where a node is late, or out of reach: it is waited for so long
LATE = {"flower": "50", "nvflare": "24"}
ALL, ONE_LESS = 32, 24        # clients, of four nodes with eight each


@dataclass(frozen=True)
class Case:
    """What is done to a deployment of `nodes` nodes, and what its reports then say.

    `answered` are the clients in each sum, one number for each question; () where that depends on moments. `stage` is the server is killed, `repeated` how many releases are on the ledger twice. Rows of the nodes `zero` are zeros, of those in `times`
    multiples; `timeout` is by transport.
    """

    name: str
    answered: tuple = (ALL,) * 4
    faults: dict = None                 # of nodes, by number
    nodes: int = 4
    rounds: int = 2
    stage: str = ""
    repeated: int = 0
    zero: tuple = ()
    times: dict = None
    why_not: str = ""
    act: object = None                  # called with (deployment, transport) in place of starting nodes and running
    timeout: dict = field(default_factory=lambda: TIMEOUT)
    quick_on_flower: bool = False


def back_at(*rows):
    """Answered by all but one node at these of four rows, and by all at the others."""
    return tuple(ONE_LESS if k in rows else ALL for k in range(4))


def run_plainly(deployment, case, transport, faults):
    for k, name in enumerate(deployment.names):
        deployment.start(name, **faults.get(k, {}))
    deployment.run("run", timeout=case.timeout[transport], nodes=case.nodes)
    if case.stage:
        deployment.wait_until_server_died(PATIENCE[transport])
        deployment.run("run", timeout=case.timeout[transport], nodes=case.nodes, resume=True)
    deployment.finish("run", PATIENCE[transport])


KILLED = [Case(f"a node is killed in {name}", faults={2: {"FEDTAIL_FAULT": "killed", "FEDTAIL_AT": str(row)}},
               answered=(ALL,) * row + (ONE_LESS,) * (4 - row), quick_on_flower=row == 3)
          for row, name in enumerate(("the first question", "the second question", "the next round", "the last question"))]
SPOILT = [
    Case("a node is late for a question", back_at(2), {2: {"FEDTAIL_FAULT": "late", "FEDTAIL_AT": "2"}}, timeout=SHORT),
    Case("a node is late for an update", back_at(1), {2: {"FEDTAIL_FAULT": "late", "FEDTAIL_AT": "1"}}, timeout=SHORT),
    Case("a node lies in well-formed numbers", faults={2: {"FEDTAIL_FAULT": "lying", "FEDTAIL_AT": "0,1,2,3"}}, times={2: 3}),
    Case("a node answers garbage", (ONE_LESS,) * 4, {2: {"FEDTAIL_FAULT": "garbage"}}),
    Case("30% of the nodes are killed in a round", (80, 56, 56, 56), nodes=10,
         faults={k: {"FEDTAIL_FAULT": "killed", "FEDTAIL_AT": "1"} for k in (1, 4, 8)}),
]
STAGES = {"before the first broadcast": ("before:3", 1),       # charged before it is sent
          "after a broadcast": ("after:7", 1), "between the questions": ("before:9", 2), "before a checkpoint": ("after:10", 2),
          "after a checkpoint": ("saved:2", 0)}
SERVERS = [Case(f"the server is killed {name}", (ALL,) * 6, rounds=3, stage=stage, repeated=repeated)
           for name, (stage, repeated) in STAGES.items()]
CASES = [*KILLED, *SPOILT, *SERVERS]


@contextmanager
def deployed(tmp_path, case, transport, monkeypatch, **settings):
    """A deployment without nodes, whose processes may be given faults; when it ends nothing of it may run."""
    monkeypatch.setenv("PYTHONPATH", FAULTS)
    monkeypatch.setenv("FEDTAIL_STAGE", case.stage)
    monkeypatch.setenv("FEDTAIL_ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("FEDTAIL_LATE", LATE[transport])
    with Deployment(tmp_path / "deployment", case.nodes, rounds=case.rounds, share=1.0, started=0, transport=transport,
                    **settings) as deployment:
        yield deployment
    assert processes_of(deployment.folder.path) == []


def check(deployment, case):
    """All that must hold of a run that has finished."""
    lines = deployment.answers("run")
    assert all(line["problems"] for line in lines if line["answered"] < ALL)
    answered = tuple(line["answered"] for line in lines)
    assert answered == case.answered, lines
    apart, moved = models_apart(deployment, "run", zero=case.zero, times=case.times)
    assert apart < EQUAL
    assert (moved > 1e-3) == any(answered[1:])                  # a round that is lost leaves the model as it was
    assert deployment.log("run").count("is lost, and the model stays as it was") == answered.count(0)
    assert releases_on_ledger(deployment, "run") == len(lines) + case.repeated


def cases_of(transport, cases):
    """All cases over NVFlare are in the quick suite, over Flower those that say so; the matrix has all of them."""
    quick = {case.name: (pytest.mark.deploy,) if transport == "nvflare" or case.quick_on_flower else () for case in cases}
    return [pytest.param(transport, case, id=f"{transport}-{case.name.replace(' ', '-')}",
                         marks=(pytest.mark.deploy_matrix, *quick[case.name])) for case in cases]


def on_both(cases):
    return pytest.mark.parametrize(("transport", "case"), [*cases_of("nvflare", cases), *cases_of("flower", cases)])


@on_both(CASES)
def test_a_fault(tmp_path, monkeypatch, transport, case):
    faults = {node: {"FEDTAIL_COUNT": str(tmp_path / f"rows-of-{node}"), **fault} for node, fault in (case.faults or {}).items()}
    with deployed(tmp_path, case, transport, monkeypatch) as deployment:
        run_plainly(deployment, case, transport, faults)
    check(deployment, case)


@on_both([Case("too few nodes stay", faults={k: {"FEDTAIL_FAULT": "killed", "FEDTAIL_AT": "1"} for k in (0, 1, 3)})])
def test_a_pause(tmp_path, monkeypatch, transport, case):
    """The round is lost. The next one is lost too, or waits for nodes where the server knows by then that they are gone."""
    with deployed(tmp_path, case, transport, monkeypatch) as deployment:
        for k, name in enumerate(deployment.names):
            deployment.start(name, **case.faults.get(k, {}))
        deployment.run("run", timeout=case.timeout[transport], nodes=case.nodes)
        deployment.loopback.wait_for_log(deployment.out("run"), lambda log: "paused: " in log or "finished; " in log, PATIENCE[transport])
        pauses = "finished; " not in deployment.log("run")
        for k in case.faults if pauses else ():
            deployment.kill(deployment.names[k])
            deployment.start(deployment.names[k])
        deployment.finish("run", PATIENCE[transport])
    lost = (ALL, 0) if deployment.answers("run")[0]["answered"] else (0,)      # some are killed before the first sum is unmasked
    check(deployment, replace(case, answered=(*lost, *((ALL, ALL) if pauses else (0,)))))
    assert ("goes on: enough nodes are there" in deployment.log("run")) == pauses


def with_broken_data(deployment, case, transport):
    """Node 3's examples are not numbers."""
    data = deployment.folder.node_folder("node-3") / "data"
    people = Population.open(data)
    replace(people, inputs=people.inputs * math.nan).save(data.with_name("broken"))
    settings = deployment.folder.node_folder("node-3") / "node.toml"
    settings.write_text(settings.read_text().replace('data = "data"', 'data = "broken"'))
    run_plainly(deployment, case, transport, {})


@on_both([Case("a node has data that are not numbers", zero=(2,))])
def test_data(tmp_path, monkeypatch, transport, case):
    with deployed(tmp_path, case, transport, monkeypatch) as deployment:
        with_broken_data(deployment, case, transport)
    check(deployment, case)


def run_over(cable, deployment, case, transport, during=None):
    """Node 3 is at the other end of the cable; `during` is called when the first round is over."""
    for k, name in enumerate(deployment.names):
        deployment.start(name, **({"server": cable.server, "FEDTAIL_NETNS": cable.namespace} if k == 2 else {}))
    deployment.run("run", timeout=case.timeout[transport], nodes=case.nodes)
    if during:
        deployment.after_line("run", f"round 1 of {case.rounds}", PATIENCE[transport])
        during()
    deployment.finish("run", PATIENCE[transport])


def cut_and_mended(cable, deployment, case, transport):
    """The cable is cut after a round and for the rest of the run, without a word to either side; mended, the node comes back."""
    run_over(cable, deployment, case, transport, cable.cut)
    cable.mend()
    deployment.run("again", timeout=case.timeout[transport], nodes=case.nodes)
    deployment.finish("again", PATIENCE[transport])
    assert [line["answered"] for line in deployment.answers("again")] == [ALL] * 2 * case.rounds


def slowed(cable, deployment, case, transport):
    cable.slow()
    run_over(cable, deployment, case, transport)


def delayed(cable, deployment, case, transport):
    if reason := cable.why_no_delay():
        pytest.skip(reason)
    cable.delay()
    run_over(cable, deployment, case, transport)


NETWORKS = [
    Case("the network of a node is cut and mended", (ALL, ALL, *(ONE_LESS,) * 4), rounds=3, act=cut_and_mended, timeout=SHORT),
    Case("the network of a node is slow and loses packets", act=slowed),
    Case("the network of a node delays and loses packets", act=delayed),
]


@on_both(NETWORKS)
@pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())
def test_a_network(tmp_path, monkeypatch, transport, case):
    with a_cable() as cable, deployed(tmp_path, case, transport, monkeypatch, hosts=[cable.server], listen="0.0.0.0") as deployment:
        case.act(cable, deployment, case, transport)
    check(deployment, case)


def skewed(seconds):
    """The environment of a process whose clock on the wall is wrong by so many seconds; durations are not."""
    return {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{seconds:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def clocks(**skews):
    return [Case(f"the clock of a node is {name.replace('_', ' ')}", faults={2: skewed(seconds)}) for name, seconds in skews.items()]


CLOCKS = {"nvflare": clocks(ten_minutes_ahead=600, ten_minutes_behind=-600, half_a_day_behind=-12 * 3600),
          "flower": clocks(four_minutes_behind=-240)}       # Flower's nodes sign the time, which may be five minutes old


@pytest.mark.parametrize(("transport", "case"), [one for transport, cases in CLOCKS.items() for one in cases_of(transport, cases)])
@pytest.mark.skipif(bool(NO_FAKETIME), reason=NO_FAKETIME)
def test_a_clock(tmp_path, monkeypatch, transport, case):
    with deployed(tmp_path, case, transport, monkeypatch) as deployment:
        run_plainly(deployment, case, transport, case.faults)
    check(deployment, case)


@pytest.mark.deploy_matrix
@pytest.mark.skipif(bool(NO_FAKETIME), reason=NO_FAKETIME)
def test_flower_keeps_out_a_node_whose_clock_is_a_minute_ahead(tmp_path, monkeypatch):
    """By its signed times, which may be five seconds ahead of the server's; the run is held with the others."""
    case = Case("a clock is a minute ahead")
    with deployed(tmp_path, case, "flower", monkeypatch) as deployment:
        for k, name in enumerate(deployment.names):
            deployment.start(name, **(skewed(60) if k == 3 else {}))
        deployment.run("run", timeout=TIMEOUT["flower"], nodes=3)
        deployment.finish("run", PATIENCE["flower"])
    assert [(line["asked"], line["answered"]) for line in deployment.answers("run")] == [(ONE_LESS, ONE_LESS)] * 4
    assert "node-4" not in deployment.log("run")


@contextmanager
def server_of(folder):
    """A port of 127.0.0.1 that shakes hands with whoever connects, until the block ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def accept():
            with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True):
                pass

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)


@pytest.mark.deploy
@pytest.mark.deploy_matrix
@pytest.mark.skipif(bool(NO_FAKETIME), reason=NO_FAKETIME)
@pytest.mark.parametrize(("days", "admitted"), [(-2, False), (-0.9, True), (364, True), (366, False)])
def test_clocks_that_break_tls(tmp_path, days, admitted):
    """A node verifies the server's certificate, which is valid from a day before it was made, for a year."""
    make_certificates(tmp_path, ["127.0.0.1"])
    with server_of(tmp_path) as port:
        code = f"import socket, ssl; ssl.create_default_context(cafile={str(tmp_path / 'ca.crt')!r}).wrap_socket(" \
               f"socket.create_connection(('127.0.0.1', {port})), server_hostname='127.0.0.1')"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **skewed(round(days * 86400))}, capture_output=True,
                              text=True)
    assert (done.returncode == 0) == admitted, done.stderr
    assert admitted or "certificate is not yet valid" in done.stderr or "certificate has expired" in done.stderr


OTHER_APP = """
import sys
from pathlib import Path
from fedtail.deployment.flower import own_app, process
own_app.PYPROJECT = own_app.PYPROJECT.replace(b"fedtail.deployment.flower.node_app", b"large.client_app")
process.join(Path(sys.argv[1]))
"""


@pytest.mark.deploy_matrix
def test_messages_of_100_megabytes_pass_both_ways_over_flower(tmp_path):
    """Through gate and forwarder, to a node whose own app is this one. Over NVFlare test_nvflare.py tries it."""
    app = shutil.copytree(Path(__file__).parent / "large_flower_app", tmp_path / "app")
    with Deployment(tmp_path / "deployment", nodes=2, started=0) as deployment:
        loopback, place = deployment.loopback, deployment.folder.node_folder("node-1")
        write_loopback_policy(place)
        write_gate_address(place, "127.0.0.1", loopback.port)
        loopback.register_node("node-1")
        loopback._start_process("node-1", [sys.executable, "-c", OTHER_APP, str(place)], {"PYTHONPATH": os.pathsep.join([str(app), *sys.path])})
        loopback.submit_run(app, out=str(deployment.out("large")), size=100_000_000)
        deployment.finish("large")
    assert json.loads((deployment.out("large") / "result.json").read_text())["equal"]
