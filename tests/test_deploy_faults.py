"""With real processes (make test-deploy): killed, late, lying and uninvited nodes; a server that is killed and goes on; clients
of somebody who knows nothing of fedtail."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedtail import Population
from fedtail.deployment.flower.loopback import read_text_or_empty

from deploy_cases import SAME, Deployment

pytestmark = pytest.mark.deploy
FAULTS = str(Path(__file__).parent / "deploy_faults")
TIMEOUT = 30.0


@pytest.mark.parametrize("question", [0, 1])
def test_a_node_is_killed_in_a_question(tmp_path, question):
    """Exchanges 3 and 5 ask for the rows of the first round's two questions."""
    with Deployment(tmp_path / "deployment", nodes=4, share=1.0, rounds=2) as deployment:
        deployment.run("run", timeout=TIMEOUT)
        deployment.after_exchange("run", 2 + 2 * question)
        deployment.loopback.kill_process("node-4")
        deployment.finish("run")
        answered = [line["answered"] for line in deployment.answers("run")]
        assert answered == ([24, 24, 24, 24] if question == 0 else [32, 24, 24, 24])
        assert "3" in deployment.answers("run")[question]["problems"]
        assert "lost" not in deployment.log("run")


def test_nodes_that_are_late_or_answer_rubbish_or_have_broken_data(tmp_path):
    with Deployment(tmp_path / "deployment", nodes=5, share=1.0, rounds=2, started=0) as deployment:
        data = deployment.folder.node_folder("node-5") / "data"
        people = Population.open(data)
        broken = replace(people, inputs=people.inputs * math.nan)
        broken.save(data.with_name("broken"))
        settings = deployment.folder.node_folder("node-5") / "node.toml"
        settings.write_text(settings.read_text().replace('data = "data"', 'data = "broken"'))
        faults = {"node-3": "late", "node-4": "garbage"}
        for name in deployment.names:
            deployment.loopback.register_node(name)
            extra = {"FEDTAIL_FAULT": faults[name], "PYTHONPATH": FAULTS} if name in faults else {}
            deployment.loopback.start_node(name, **extra)
        deployment.run("run", nodes=5, timeout=TIMEOUT)
        deployment.finish("run", 600.0)
        lines = deployment.answers("run")
        assert [line["answered"] for line in lines] == [24] * 4
        assert {"2", "3"} <= lines[0]["problems"].keys()
        assert deployment.difference_from("run", deployment.people.select([k for k in range(40) if k % 5 < 2])) < SAME


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
        deployment.run("undisturbed", timeout=TIMEOUT)
        loopback.wait_for_log(deployment.out("undisturbed"), lambda log: "round 1 of 3" in log, 400.0)
        deployment.finish("undisturbed")
        one, other = ((deployment.out(name) / "model.safetensors").read_bytes() for name in ("run", "undisturbed"))
        assert one == other
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
    with Deployment(tmp_path / "deployment", nodes=3) as deployment:
        for name, target, count in zip(deployment.names, wanted, examples, strict=True):
            (deployment.folder.node_folder(name) / "wanted.json").write_text(json.dumps({"target": target, "examples": int(count)}))
        deployment.loopback.submit_run(app, out=str(deployment.out("stock")))
        deployment.finish("stock")
    w = 3.0
    for _ in range(2):                                                  # half of 40 examples: the worst node's 10, 10 of the next
        worst, second = np.argsort(-(w - wanted) ** 2)[:2]
        assert examples[worst] == 10
        w += 0.5 * (0.5 * (wanted[worst] - w) + 0.5 * (wanted[second] - w))
    found = json.loads((deployment.out("stock") / "result.json").read_text())
    assert found == {"w": pytest.approx(w, rel=1e-12), "counted": 3}
