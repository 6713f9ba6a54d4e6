"""NVFlare's own FedAvg and Flower's own, deployed on this machine as their documentation does, for `deployment.py --peer`.

The model has the same 650 numbers, and the same three nodes do the same local work in plain PyTorch (`peers/node_work.py`);
there is no Delta-FL and no secure aggregation. NVFlare runs in POC mode, with certificates and mutual TLS. Flower has TLS,
and no authentication of nodes: with ours they run nothing that is submitted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from environments import HERE

from fedtail.data import Population
from fedtail.deployment.flower.example import node_names, write_example
from fedtail.deployment.flower.loopback import StockFlower, die_with_parent

PEERS = HERE / "peers"


def save_clients(people: Population, place: Path) -> None:
    """A node's clients as plain arrays, for programs that know nothing of fedtail."""
    examples = [people.client(k) for k in range(len(people))]
    np.savez(place, x=np.concatenate([x.numpy() for x, _ in examples]), y=np.concatenate([y.numpy() for _, y in examples]),
             sizes=np.array([len(y) for _, y in examples]))


def nvflare_times(path: Path, people: dict[str, Population], rounds: int) -> list[float]:
    """When each round of NVFlare's FedAvg began, by the clock of the first site."""
    for name, mine in people.items():
        save_clients(mine, path / f"{name}.npz")
    (path / "home").mkdir()
    environment = {**os.environ, "HOME": str(path / "home"), "NVFLARE_POC_WORKSPACE": str(path / "poc"), "OMP_NUM_THREADS": "1",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (path / "peer.txt").open("w") as log:
        done = subprocess.run([sys.executable, str(PEERS / "nvflare_fedavg.py"), str(path), str(rounds)], env=environment,
                              stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent, check=False)
    if done.returncode:
        raise SystemExit(f"NVFlare's FedAvg failed:\n{(path / 'peer.txt').read_text()[-3000:]}")
    return [float(line) for line in (path / f"{min(people)}.times").read_text().split()]


def flower_times(path: Path, nodes: int, rounds: int) -> list[float]:
    """When each round of Flower's FedAvg began and the last one ended, by the clock of the server."""
    folder, _ = write_example(path / "deployment", nodes, rounds)
    out = folder.path / "runs" / "peer"
    with StockFlower(folder) as loopback:
        loopback.start_superlink()
        for name in node_names(nodes):
            save_clients(Population.open(folder.node_folder(name) / "data"), folder.node_folder(name) / "data.npz")
            loopback.start_node(name)
        loopback.submit_run(PEERS / "flower_fedavg", out=str(out), nodes=nodes, rounds=rounds, work=str(PEERS))
        loopback.wait_for_result(out, 900.0)
    return json.loads((out / "result.json").read_text())


def times(peer: str, path: Path, nodes: int, rounds: int) -> list[float]:
    """When each round of the peer's FedAvg began, in seconds."""
    if peer == "flower":
        return flower_times(path, nodes, rounds)
    folder, _ = write_example(path / "deployment", nodes, rounds)
    return nvflare_times(path, {f"site-{k}": Population.open(folder.node_folder(name) / "data")
                                for k, name in enumerate(node_names(nodes), 1)}, rounds)
