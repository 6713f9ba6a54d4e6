"""Over Flower, with real processes (make test-deploy): a server that is killed and goes on, nodes that join or were not invited, and
clients of somebody who knows nothing of fedtail. Faults of nodes, networks and clocks are in test_deploy_matrix.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedtail.deployment.flower.example import node_names, write_example
from fedtail.deployment.flower.loopback import StockFlower, read_text_or_empty

from deploy_cases import ENOUGH, Deployment

pytestmark = pytest.mark.deploy
TIMEOUT = 30.0


def foreign_app(ours, place, marker):
    """A copy of our app in whose place nodes would run another, which writes the file `marker` when it is imported."""
    shutil.copytree(ours, place)
    about = (place / "pyproject.toml").read_text()
    (place / "pyproject.toml").write_text(about.replace("fedtail.deployment.flower.node_app:app", "foreign:app"))
    (place / "foreign.py").write_text(f"from pathlib import Path\nfrom flwr.clientapp import ClientApp\n\n"
                                      f"Path({str(marker)!r}).touch()\napp = ClientApp()\n")
    subprocess.run([sys.executable, "-c", "import foreign"], cwd=place, check=True)
    marker.unlink()                                                     # it would be seen
    return place


def test_the_server_is_killed_and_goes_on_and_a_node_joins_and_a_stranger_is_kept_out(tmp_path):
    with Deployment(tmp_path / "deployment", nodes=5, rounds=3, started=3) as deployment:
        loopback = deployment.loopback
        loopback.start_node("node-5")                                   # which nobody registered
        deployment.run("run", timeout=TIMEOUT)
        loopback.wait_for_log(deployment.out("run"), lambda log: "round 1 of 3" in log, 400.0)
        deployment.after_exchange("run", 7)
        loopback.kill_process("superlink")
        loopback.start_superlink()
        deployment.run("run", timeout=TIMEOUT, resume=True)
        deployment.finish("run")
        assert "resumed after round" in deployment.log("run")
        assert "node-5" not in deployment.log("run")
        loopback.submit_run(foreign_app(deployment.folder.app_folder, tmp_path / "foreign", marker := tmp_path / "ran"),
                            out=str(deployment.out("undisturbed")), method="Delta-FL", nodes=3, timeout=TIMEOUT)
        loopback.wait_for_log(deployment.out("undisturbed"), lambda log: "round 1 of 3" in log, 400.0)
        deployment.finish("undisturbed")
        one, other = ((deployment.out(name) / "model.safetensors").read_bytes() for name in ("run", "undisturbed"))
        assert one == other
        assert not marker.exists()                                      # nodes answered as ever, and ran nothing of the app
        deployment.run("joined", timeout=TIMEOUT)
        loopback.wait_for_log(deployment.out("joined"), lambda log: "started" in log, 400.0)
        loopback.register_node("node-4")
        loopback.start_node("node-4")
        deployment.finish("joined")
        assert "node-4 has joined, with 8 clients" in deployment.log("joined")
        assert "lost" not in deployment.log("joined")
        assert "node-5" not in "".join(deployment.log(name) for name in ("run", "undisturbed", "joined"))
        assert "Failed to activate SuperNode" in read_text_or_empty(loopback.log_file("node-5"))


def test_a_strategy_for_clients_that_know_nothing_of_fedtail(tmp_path):
    """Nodes want 0, 2 and 9 and hold 10, 20 and 10 examples: the worst half of the mass, and the model it leads to, by hand."""
    app = shutil.copytree(Path(__file__).parent / "stock_flower_app", tmp_path / "app")
    wanted, examples = np.array([0.0, 2.0, 9.0]), np.array([10, 20, 10])
    folder, _ = write_example(tmp_path / "deployment", 3, 1)
    out = folder.path / "runs" / "stock"
    with StockFlower(folder) as loopback:
        loopback.start_superlink()
        for name, target, count in zip(node_names(3), wanted, examples, strict=True):
            (folder.node_folder(name) / "wanted.json").write_text(json.dumps({"target": target, "examples": int(count)}))
            loopback.start_node(name)
        loopback.submit_run(app, out=str(out))
        loopback.wait_for_result(out, ENOUGH)
    w = 3.0
    for _ in range(2):                                                  # half of 40 examples: the worst node's 10, 10 of the next
        worst, second = np.argsort(-(w - wanted) ** 2)[:2]
        assert examples[worst] == 10
        w += 0.5 * (0.5 * (wanted[worst] - w) + 0.5 * (wanted[second] - w))
    found = json.loads((out / "result.json").read_text())
    assert found == {"w": pytest.approx(w, rel=1e-12), "counted": 3}
