"""One whole deployment: SuperLink, nodes in processes of their own, TLS, node authentication, secure sums. About two minutes (make test-deploy)."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr")

from deploy_cases import SAME, Deployment

pytestmark = pytest.mark.deploy


def test_nodes_over_flower_train_the_simulators_model(tmp_path):
    with Deployment(tmp_path / "deployment", nodes=3) as deployment:
        deployment.run("run")
        deployment.finish("run")
        processes = list(deployment.loopback.processes.values())
    found = deployment.compare("run")
    assert found.difference < SAME
    assert found.moved > 0.01
    assert found.exchanges == 6 + 4
    assert found.channel == "sums over at least 7 clients, masked by the nodes"
    assert [line["answered"] for line in deployment.answers("run")] == [12] * 4
    assert json.loads((deployment.out("run") / "privacy.json").read_text())["epsilon"] == "infinity"
    assert all(process.poll() is not None for process in processes)
