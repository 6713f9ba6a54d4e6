"""With real processes over NVFlare (make test-deploy): a node is killed between charge, answer and end of a round, and goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from fedtail.deployment.audit_log import verify
from fedtail.deployment.data_budget import ROUNDS
from fedtail.deployment.flower.example import node_names, write_example
from fedtail.deployment.node_status import node_log, run_log
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.nvflare.loopback import CellLoopback
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.transport import wait_until
from fedtail.privacy.accounting import epsilon_at

pytestmark = pytest.mark.deploy
KILLS = str(Path(__file__).parent / "node_kills")
ENOUGH, ROUND = 300.0, 2
FILE = """\
name = "killed"
rounds = 500
[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10
[sample]
part = "Poisson"
rate = 1.0
population = 32
[local]
learning_rate = 0.1
[aggregate]
part = "PrivateMean"
clip_norm = 1.0
total = 32.0
noise = { part = "DiscreteNoise", noise_multiplier = 4.0, planned_clients = 8 }
[privacy]
delta = 1e-6
[channel]
part = "SecureChannel"
threshold = 16
minimum_contributors = 3
"""


@pytest.mark.parametrize("moment", ["charged", "answered", "closed"])
def test_a_node_that_is_killed_keeps_what_it_spent_and_goes_on(tmp_path, moment):
    folder, _ = write_example(tmp_path / "deployment", 4, 6, write=write_cell_folder)
    names, out = node_names(4), tmp_path / "run"
    for place in (folder.path, *map(folder.node_folder, names)):
        (place / "experiment.toml").write_text(FILE)
    with CellLoopback(folder, names) as loopback:
        for name in names:
            loopback.start_node(name, **({"FEDTAIL_KILL": f"{ROUND}:{moment}", "PYTHONPATH": KILLS} if name == "node-1" else {}))
        loopback.start_server(out, nodes=4)
        assert wait_until(lambda: loopback.processes["node-1"].poll() is not None, ENOUGH)
        assert loopback.processes.pop("node-1").returncode == -signal.SIGKILL
        settings = NodeSettings.read(folder.node_folder("node-1") / "node.toml")
        at_death = settings.data_budget().spent_rounds()
        assert sum(count for _, count in at_death) == ROUND + 1                 # it was on disk before the answer left
        loopback.start_node("node-1")
        assert wait_until(lambda: max(answered_rounds(settings)) > ROUND, ENOUGH)
    entries, problems = node_log(settings)
    assert problems == []
    assert verify(settings.budget_folder / ROUNDS)[1] == []
    spent, policy = settings.data_budget().spent_rounds(), settings.read_policy()
    charged = [one for one in entries if one["what"] == "charged"]
    answered, held = answered_rounds(settings), sum(count for _, count in spent)
    assert held >= len(charged) >= len(set(answered))
    assert held - len(charged) <= 2                              # killed between the charge and the line about it, twice at most
    assert set(answered) >= {0, 1} | ({ROUND} if moment != "charged" else set())
    assert epsilon_at(at_death, policy.delta) < epsilon_at(spent, policy.delta) <= policy.epsilon
    assert run_log(out)[1] == []


def answered_rounds(settings):
    """The rounds that a node's log says it answered."""
    return [one["round"] for one in node_log(settings)[0] if one["what"] == "answered"]
