"""From nothing to a run on a server and three nodes, in the commands of docs/howto/deploy-server.md, each machine in a network
namespace with an address of its own. make test-deploy-matrix has it; on one machine test_documentation.py runs the same page."""

from __future__ import annotations

import json
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from deploy_network import several_machines, why_no_network
from typed_pages import HOST, NODES, PORT, Machines, blocks, file_name

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "deploy-server.md"
ELSEWHERE = "elsewhere"
WHY_NOT = why_no_network()
SIGNED = "signed sums"
AT_SERVER = {"key files", "authority's key", "nodes' secrets", "certificates", "names and keys", "gate"}
FROM_OUTSIDE = {"plain text", "server's certificate", "old TLS", "strangers"}
AT_NODE = {"key files", "others' secrets", "certificates", "masks", "policy", "data", "consent", SIGNED, "small cohort", "sum of two nodes",
           "threshold", "another name"}


@pytest.fixture
def place():
    """A folder that other accounts can enter, as those of machines are; pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp(prefix="fedtail-machines-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def of_first_run():
    """The blocks from nothing to the end of the first run."""
    found = blocks(PAGE)
    last = next(k for k, block in enumerate(found) if block.waits)
    return found[:last + 1]


def commands(block):
    """Of the block whose commands say behind them where they are typed: of each machine, a list of them."""
    found = re.findall(r"^\$ (fedtail .*?) +# on (the server|each node|a machine that has nothing to do with them)\b.*$", block.text, re.M)
    assert len(found) == len(block.text.splitlines()) == 4
    places = {"the server": ["server"], "each node": NODES, "a machine that has nothing to do with them": [ELSEWHERE]}
    return {name: [command for command, where in found if name in places[where]] for name in ["server", *NODES, ELSEWHERE]}


def ask_doctors(machines, block):
    """What the doctor finds on each machine, while the server waits: for each its code and {check: (result, text)}."""
    machines.folder(ELSEWHERE).mkdir()
    shutil.copy(machines.server / "hospitals" / "server" / "ca.crt", machines.folder(ELSEWHERE))
    found, asked = {}, commands(block)
    checks = {name: machines.begin(name, asked[name].pop(0)) for name in NODES}
    for name, process in checks.items():
        machines.end(name, process, "fedtail node check")
    assert [len(left) for left in asked.values()] == [1] * 5
    started = {name: machines.begin(name, f"{doctor} --json") for name, (doctor,) in asked.items()}
    for name, process in started.items():
        code = machines.end(name, process, *asked[name], codes=(0, 1))
        told = json.loads(machines.printed(process))
        found[name] = code, {one["check"]: (one["result"], one["text"]) for one in told["findings"]}
    return found


def check_findings(found):
    """What the page says of them."""
    for name, (code, findings) in found.items():
        bad = {check for check, (result, _) in findings.items() if result in ("open", "not tested")}
        assert bad == ({SIGNED} if name in NODES else set()), (name, findings)
        assert code == bool(bad)
        assert findings.keys() >= FROM_OUTSIDE | (AT_NODE if name in NODES else AT_SERVER if name == "server" else set()), name
        if name != "server":                      # which attacks itself at 127.0.0.1
            assert findings["server's certificate"][1] == f"Verified for {HOST} by ca.crt."


def check_copied(machines):
    """Each node has its own folder, and the server has none of their secrets."""
    assert list((machines.server / "hospitals" / "nodes").iterdir()) == []
    for name in NODES:
        assert {path.name for path in machines.folder(name).iterdir()} >= {"node.toml", "key", "key.pem", "node.crt", "ca.crt", "server.toml"}
        assert stat.S_IMODE((machines.folder(name) / "key").stat().st_mode) == 0o600


def wait_for(found, what, seconds=120.0):
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, f"{what}: not in {seconds:.0f} s"
        time.sleep(0.2)


def test_every_command_of_the_page_says_where_it_is_typed():
    """What the test below needs of the page, which is tried seldom."""
    found = of_first_run()
    assert [block.place for block in found if block.language in ("bash", "python")] == ["the server"] * 2 + ["each node"] * 2 + [
        "the server", "each node", "the server"]
    assert [block.stays for block in found if block.place] == [False] * 4 + [True, True, False]
    doctor, = (block for block in found if "fedtail deploy doctor" in block.text)
    assert {name: len(typed) for name, typed in commands(doctor).items()} == {"server": 1, **dict.fromkeys(NODES, 2), ELSEWHERE: 1}


@pytest.mark.deploy_matrix
@pytest.mark.skipif(bool(WHY_NOT), reason=f"three machines were NOT tried: {WHY_NOT}")
def test_the_page_of_the_server_leads_to_a_run_on_three_machines(place):
    server = place / "server"
    server.mkdir()
    with several_machines(["server", *NODES, ELSEWHERE], HOST) as network, Machines(place / "machines", server, network.enter) as machines:
        peers, found = set(), {}
        for block in of_first_run():
            if name := file_name(block):
                (server / name).write_text(block.text)
            elif block.waits:
                while machines.staying["server"].poll() is None:
                    peers |= {theirs for ours, theirs in network.sockets("server") if ours == int(PORT)}
                    time.sleep(0.2)
                machines.type(block)
            elif block.place:
                machines.type(block)
                if block.stays and block.place == "the server":
                    check_copied(machines)
                    wait_for(lambda: (int(PORT), "") in network.sockets("server"), "the server listens")
            elif "fedtail deploy doctor" in block.text:
                found = ask_doctors(machines, block)
                assert {ours for ours, theirs in network.sockets("server") if not theirs} == {int(PORT)}      # all that listens there
        assert [machines.staying[name].poll() for name in NODES] == [None] * 3                                # they stay
        assert not any(not theirs for name in NODES for _, theirs in network.sockets(name))                   # and listen nowhere
    check_findings(found)
    assert peers >= {network.addresses[name] for name in NODES}
    log = (server / "hospitals" / "runs" / "run" / "log.txt").read_text()
    assert re.findall(r"round (\d) of 5: .* (\d) of 3 nodes answered", log) == [(str(k), "3") for k in range(1, 6)]
