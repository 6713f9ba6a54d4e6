"""The life of a run with real processes over NVFlare (make test-deploy): nodes join and leave, keys change, a server is restored."""

from __future__ import annotations

import json
import shutil
import ssl
from contextlib import closing

import pytest

pytest.importorskip("nvflare")

from fedtail.deployment.asked_rounds import FILE as ASKED
from fedtail.deployment.flower.loopback import read_text_or_empty
from fedtail.deployment.nvflare.pinned_tls import node_context
from life_cases import PATIENCE, Life
from test_nvflare import Peer

pytestmark = pytest.mark.deploy


def may_connect(port, context, name):
    """Whether whoever has these secrets gets an answer to a hello: the server's own hello."""
    try:
        with closing(Peer(port, context, name)) as peer:
            peer.socket.settimeout(2.0)
            return bool(peer.socket.recv(1))
    except (OSError, ssl.SSLError):
        return False


def test_nodes_join_and_leave_while_a_run_goes_on_and_it_pauses_where_too_few_are_left(tmp_path):
    with Life(tmp_path / "deployment", nodes=4, admitted=3, minimum=3, rounds=4000) as life:
        life.start()
        life.rounds_more(3)
        assert "is admitted" in life.command("add", life.folder.path, "node-4")
        life.loopback.start_node("node-4")
        life.until("node-4 has joined, with 8 clients")
        life.rounds_more(3)
        secrets = {name: node_context(life.folder.node_folder(name)) for name in ("node-1", "node-4")}
        assert may_connect(life.loopback.port, secrets["node-4"], "node-4")
        assert "3 nodes are left" in life.command("remove", life.folder.path, "node-1")
        for text in ("node-1 is disconnected: its certificate was removed", "node-1 is removed: its 8 clients are no longer sampled"):
            life.until(text)                                  # in either order: it depends on where in a round the files were deleted
        life.rounds_more(2)
        assert not may_connect(life.loopback.port, secrets["node-1"], "node-1")
        assert not may_connect(life.loopback.port, secrets["node-1"], "node-2")
        life.command("remove", life.folder.path, "node-2")
        life.until("paused: 2 nodes are left, and node-3 answers in sums over 3 nodes or more (minimum in its node.toml)")
        held = life.rounds_done()
        life.loopback.kill("node-1")
        life.command("add", life.folder.path, "node-1")
        life.loopback.start_node("node-1")
        life.until("paused: ", "node-1 has joined, with 8 clients", "goes on: enough nodes are there")
        life.rounds_more(3)
        life.end_server()
        assert life.rounds_done() >= held + 3
        assert life.log().count(" is lost") <= 2              # those in which a connection was cut, where all three are needed
        sizes = [line["sampling"]["population"] for line in life.lines("ledger.jsonl") if "open" in line]
        assert list(dict.fromkeys(sizes)) == [24, 32]        # clients in all, as the ledger has it: 3 nodes, 4, 3, 3 nodes
        assert sizes[-1] == 24
        said, node = (life.loopback.log_file(name).read_text() for name in ("server", "node-4"))
        assert all(text in said for text in ("waits at 127.0.0.1:", "node-4 has joined", "3 of 3 nodes answered", "paused: 2 nodes"))
        assert all(text in node for text in ("node-4 looks for the server", "connected to the server", "questions answered"))
        states = {line["number"]: line["state"] for line in json.loads((life.out / "nodes.json").read_text())["nodes"]}
        assert states == {0: "removed", 1: "removed", 2: "here", 3: "here", 4: "here"}


def test_a_nodes_keys_are_replaced_and_the_old_ones_open_nothing(tmp_path):
    with Life(tmp_path / "deployment", nodes=3, rounds=4000) as life:
        life.start()
        life.rounds_more(2)
        place = life.folder.node_folder("node-2")
        stolen = shutil.copytree(place, tmp_path / "stolen")
        old = node_context(stolen)
        assert "The old keys of node-2 are dead" in life.command("rotate", life.folder.path, "--node", "node-2")
        life.until("node-2 is disconnected: its certificate was ", "node-2 is back")       # removed, for a moment, or replaced already
        assert "node-2 is removed" not in life.log()
        assert not may_connect(life.loopback.port, old, "node-2")
        life.rounds_more(3)
        assert not life.answers()[-1]["problems"]
        assert (stolen / "key").read_bytes() != (place / "key").read_bytes()


def test_the_servers_certificate_is_replaced_in_two_steps_and_nobody_is_lost(tmp_path):
    with Life(tmp_path / "deployment", nodes=3, rounds=4000) as life:
        life.start()
        life.rounds_more(2)
        stolen = shutil.copytree(life.folder.server_folder, tmp_path / "stolen")
        only_old = shutil.copytree(life.folder.node_folder("node-1"), tmp_path / "only-old")
        life.command("rotate", life.folder.path, "--server")
        both = shutil.copytree(life.folder.node_folder("node-1"), tmp_path / "both")
        assert may_connect(life.loopback.port, node_context(both), "node-1")
        assert may_connect(life.loopback.port, node_context(only_old), "node-1")
        life.command("rotate", life.folder.path, "--server", "--finish")
        new = node_context(life.folder.node_folder("node-1"))
        assert may_connect(life.loopback.port, new, "node-1")
        assert may_connect(life.loopback.port, node_context(both), "node-1")
        assert not may_connect(life.loopback.port, node_context(only_old), "node-1")
        life.loopback.kill("node-3")
        life.loopback.start_node("node-3")
        life.loopback.wait_for_log(life.out, lambda _: life.answers()[-1]["problems"] == {}, PATIENCE)
        life.rounds_more(2)
    from fedtail.deployment.nvflare.pinned_tls import server_context

    assert not shakes_hands(server_context(stolen), new)     # whoever has the server's old key is no server to a node any more
    assert shakes_hands(server_context(life.folder.server_folder), new)


def shakes_hands(server, node):
    """Whether a node with the context `node` finishes a handshake with a server of the context `server`, in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = node.wrap_bio(there, back, server_hostname="127.0.0.1")
    theirs = server.wrap_bio(back, there, server_side=True)
    try:
        for _ in range(10):
            for one in (ours, theirs):
                try:
                    one.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        ours.do_handshake()
    except ssl.SSLError:
        return False
    return True


def test_a_server_that_is_restored_from_an_old_backup_charges_what_it_forgot_and_goes_on(tmp_path):
    with Life(tmp_path / "deployment", nodes=3, rounds=4000) as life:
        life.start()
        life.rounds_more(3)
        life.end_server()
        backup = shutil.copytree(life.folder.path / "runs", tmp_path / "backup")
        before = life.rounds_done()
        life.serve(resume=True)
        life.rounds_more(6)
        life.loopback.kill("server")                          # and its disk is gone
        lost = life.lines("ledger.jsonl")
        shutil.rmtree(life.folder.path / "runs")
        shutil.copytree(backup, life.folder.path / "runs")
        life.serve(resume=True)
        life.until("started at round 0", "that the ledger of this folder does not hold, as after a restore from a backup")
        life.rounds_more(12)
        life.end_server()
        rounds = [line["open"] for line in life.lines("ledger.jsonl") if "open" in line]
        asked = [json.loads(line) for line in read_text_or_empty(life.folder.node_folder("node-1") / ASKED).splitlines()]
        for number in {line["round"] for line in asked}:      # every round is charged as often as a node was asked in it, or more
            assert rounds.count(number) >= len({line["run"] for line in asked if line["round"] == number})
        assert rounds.count(before + 1) == 2                  # once for the server that is gone, once for this one
        assert sum("open" in line for line in lost) > before + 5


PERSONAL = """
[personal]
part = "Ditto"
strength = 0.1
[personal.local]
learning_rate = 0.1
"""


def test_personal_models_stay_on_the_node_which_predicts_by_them(tmp_path):
    import numpy as np

    with Life(tmp_path / "deployment", nodes=3, rounds=3, pace=0.01, share=1.0) as life:
        for path in (life.folder.path, *map(life.folder.node_folder, life.names)):
            text = (path / "experiment.toml").read_text()
            (path / "experiment.toml").write_text(text.replace("[[method]]", f"{PERSONAL}\n[[method]]", 1))
        life.start()
        life.loopback.wait_for_result(life.out, PATIENCE)
        place = life.folder.node_folder("node-1")
        np.savez(tmp_path / "new.npz", x=life.people.inputs[:20].numpy())
        words = ["node", "predict", place / "node.toml", "--data", tmp_path / "new.npz", "--method", "FedAvg", "--json"]
        own = json.loads(life.command(*words, "--client", life.people.names[0] if life.people.names is not None else "0").splitlines()[0])
        assert own["model"] == "personal"
        assert len(own["predictions"]) == 20
        assert not any("personal" in path.name for path in life.out.iterdir())
