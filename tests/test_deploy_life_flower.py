"""The life of a run over Flower with real processes (make test-deploy-matrix): a node leaves, a key changes, a server is restored.

Whatever `fedtail deploy` prints is done as it is printed, in a shell that knows nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.deployment.asked_rounds import FILE as ASKED
from fedtail.deployment.flower.forwarder import Forwarder
from fedtail.deployment.flower.loopback import QUIET, free_port, read_text_or_empty
from test_gate import post

from deploy_cases import Deployment

pytestmark = pytest.mark.deploy_matrix
PATIENCE = 900.0
RUN = {"method": "FedAvg", "timeout": 120.0}
OF_SERVER = ("app", "experiment.toml", "runs", "server")        # the rest of the folder is on nodes, or logs of this test
ROUND = re.compile(r" round \d+ of \d+: ")


def printed_commands(said):
    """The commands that were printed, each with where it is to be run: indented, below a line that says where."""
    found, where = {"server": [], "node": []}, "server"
    for line in said.splitlines():
        if line.startswith("  "):
            found[where].append(line.strip())
        elif line.endswith(":"):
            where = "node" if "on the node" in line else "server"
    return found


def shell(commands, place):
    """What these commands print, run in the folder `place`, where nothing is set but what every shell has."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("FLWR")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-e", "-c", "\n".join(commands)], env={**clean, "PATH": path}, cwd=place, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, (commands, done.stdout, done.stderr)
    return done.stdout


def copy_of_server(folder, place):
    """A copy of what is on the server's machine."""
    return shutil.copytree(folder, place, ignore=lambda path, names: {*names} - {*OF_SERVER} if Path(path) == folder else ())


class FlowerLife:
    """A deployment whose run goes on through what is done to it."""

    def __init__(self, deployment):
        self.deployment, self.loopback, self.folder = deployment, deployment.loopback, deployment.folder

    def command(self, *words):
        done = CliRunner().invoke(app, ["deploy", *map(str, words)])
        assert done.exit_code == 0, done.output
        return done.output

    def rounds(self):
        return len(ROUND.findall(self.deployment.log("run")))

    def rounds_more(self, count):
        done = self.rounds()
        self.loopback.wait_for_log(self.deployment.out("run"), lambda _: self.rounds() >= done + count, PATIENCE)

    def whole_rounds_more(self, count):
        """Wait for so many rounds more in which all three nodes that are left answered."""
        def held():
            return self.deployment.log("run").count("3 of 3 nodes answered")

        done = held()
        self.wait(lambda: held() >= done + count, PATIENCE)

    def opens(self, stolen):
        """Whether the keys in the folder `stolen` get a call through the gate; and whether Flower, asked behind it, takes them."""
        status, _ = asyncio.run(post(self.loopback.port, b"/v1/fleet/activate-node", b"", Forwarder(stolen, "127.0.0.1", 1).context))
        link = tomllib.loads((self.folder.home_folder / "config.toml").read_text())["superlink"]["fedtail"]["address"]
        command = ["flower-supernode", "--superlink", link, "--root-certificates", str(self.folder.server_folder / "ca.crt"),
                   "--auth-supernode-private-key", str(stolen / "key"), "--host", "127.0.0.1", "--port", str(free_port()),
                   "--isolation", "subprocess"]
        self.loopback._start_process("thief", command)
        log = self.loopback.log_file("thief")
        self.wait(lambda: self.loopback.processes["thief"].poll() is not None or "SuperNode ID: " in log.read_text())
        self.loopback.stop_process("thief")
        refused = "Failed to activate SuperNode" in log.read_text()
        log.unlink()
        return status not in (0, 403), not refused

    def wait(self, reached, patience=120.0):
        self.loopback.wait_for_log(self.deployment.out("run"), lambda _: reached(), patience)

    def start_again(self, name, command):
        """End the node and start it by the command that was printed, in its folder."""
        self.loopback.stop_process(name)
        place = self.folder.node_folder(name)
        self.loopback._start_process(name, ["bash", "-c", f"cd {place} && exec {command}"], QUIET)

    def resume(self):
        self.loopback.start_superlink(300.0)                     # of a busy machine
        self.deployment.run("run", **RUN, nodes=3, resume=True)

    def lines(self, name):
        return [json.loads(line) for line in read_text_or_empty(self.deployment.out("run") / name).splitlines() if line.endswith("}")]


def test_a_node_leaves_a_key_is_replaced_and_the_server_is_restored_by_the_commands_that_are_printed(tmp_path):
    with Deployment(tmp_path / "deployment", nodes=4, rounds=400) as deployment:
        life = FlowerLife(deployment)
        stolen = {name: shutil.copytree(life.folder.node_folder(name), tmp_path / name) for name in ("node-1", "node-2")}
        deployment.run("run", **RUN)
        life.rounds_more(1)

        said = life.command("remove", life.folder.path, "node-1")
        assert "3 nodes are left" in said
        life.wait(lambda: life.opens(stolen["node-1"]) == (False, True), 300.0)      # the gate refuses it, and Flower does not
        shell(printed_commands(said)["server"], tmp_path)
        assert life.opens(stolen["node-1"]) == (False, False)
        deployment.kill("node-1")

        said = life.command("rotate", life.folder.path, "--node", "node-2")
        commands = printed_commands(said)
        shell(commands["server"], tmp_path)
        life.start_again("node-2", *commands["node"])
        assert life.opens(stolen["node-2"]) == (False, False)
        deployment.after_line("run", "node-1 is removed: its 8 clients are no longer sampled", PATIENCE)
        deployment.after_line("run", "node-2 is back", PATIENCE)
        assert "node-2 is removed" not in deployment.log("run")
        life.whole_rounds_more(1)

        said = life.command("rotate", life.folder.path, "--server")
        shell(printed_commands(said)["server"], tmp_path)
        life.whole_rounds_more(2)                                # over new connections: every call of a node has its own
        shown = ssl.get_server_certificate(("127.0.0.1", life.loopback.port))
        assert shown.split() == (life.folder.server_folder / "server.pem").read_text().split()

        life.loopback.stop_process("superlink")                  # a backup of files that nobody writes
        copy_of_server(life.folder.path, tmp_path / "backup")
        held = len([line for line in life.lines("ledger.jsonl") if "open" in line])
        life.resume()
        life.rounds_more(1)
        life.loopback.kill_process("superlink")                  # and its disk is gone
        lost = [line["open"] for line in life.lines("ledger.jsonl") if "open" in line][held:]
        for name in OF_SERVER:
            place = life.folder.path / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        shutil.copytree(tmp_path / "backup", life.folder.path, dirs_exist_ok=True)
        life.resume()
        deployment.after_line("run", "that the ledger of this folder does not hold, as after a restore from a backup", PATIENCE)
        life.rounds_more(1)
        life.loopback.stop_process("superlink")
        charged = [line["open"] for line in life.lines("ledger.jsonl") if "open" in line]
        asked = [json.loads(line) for line in read_text_or_empty(life.folder.node_folder("node-3") / ASKED).splitlines()]
        assert lost
        assert set(lost) <= set(charged[held:])
        for number in {line["round"] for line in asked}:         # every round is charged as often as a node was asked in it, or more
            assert charged.count(number) >= len({line["run"] for line in asked if line["round"] == number})
