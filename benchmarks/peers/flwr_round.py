"""Flower: the Message API's `FedAvg` strategy in its Ray simulation, one virtual node for each client.

`--threads 1` runs an actor on each core, each with one torch thread; `--threads 2` one actor with both. W5 asks every node
to evaluate and trains nobody.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0",
                  FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1", FLWR_HOME=tempfile.mkdtemp(prefix="flwr"),
                  RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ["PYTHONPATH"] = f"{HERE.parent}:{HERE}"      # the actors import the workloads and this file too

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from laps import Laps, arguments
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from workloads import EVALUATION_BATCH, WORKLOADS, judged, load


@cache
def held(name: str, threads: int) -> tuple[torch.nn.Module, list[TensorDataset]]:
    """An actor reads the data once."""
    torch.set_num_threads(threads)
    return WORKLOADS[name].module(), [TensorDataset(x, y) for x, y in load(WORKLOADS[name]).tensors()]


def client_app(name: str, threads: int) -> ClientApp:
    app, workload = ClientApp(), WORKLOADS[name]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        module, clients = held(name, threads)
        client = clients[context.node_config["partition-id"]]
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), workload.rate)
        total = 0.0
        for x, y in DataLoader(client, workload.batch or len(client), shuffle=True):
            optimizer.zero_grad()
            loss = cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(y)
        metrics = MetricRecord({"loss": total / len(client), "num-examples": len(client)})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        module, clients = held(name, threads)
        client = clients[context.node_config["partition-id"]]
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        module.eval()
        loss = wrong = 0.0
        with torch.no_grad():
            for x, y in DataLoader(client, EVALUATION_BATCH):
                outputs = module(x)
                loss += float(cross_entropy(outputs, y, reduction="sum"))
                wrong += float((outputs.argmax(1) != y).sum())
        metrics = MetricRecord({"loss": loss / len(client), "error": wrong / len(client), "num-examples": len(client)})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

    return app


def main() -> None:
    given, workload = arguments()
    laps, data = Laps(given.rounds), load(workload)
    server, share = ServerApp(), (workload.cohort + 0.5) / workload.clients      # rounded down by Flower

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        module = workload.module()

        def each_round(number: int, arrays: ArrayRecord) -> None:
            laps.lap() if number else laps.start()

        strategy = FedAvg(fraction_train=0.0 if workload.evaluation else share, min_available_nodes=workload.clients,
                          fraction_evaluate=1.0 if workload.evaluation else 0.0,
                          min_train_nodes=workload.cohort,      # else the first round takes its share of those connected so far
                          min_evaluate_nodes=workload.cohort)
        result = strategy.start(grid, ArrayRecord(module.state_dict()), given.rounds, evaluate_fn=each_round)
        if not workload.evaluation:
            module.load_state_dict(result.arrays.to_torch_state_dict())
        laps.done(judged(module, data))

    run_simulation(server, client_app(workload.name, given.threads), workload.clients,
                   backend_config={"client_resources": {"num_cpus": given.threads, "num_gpus": 0.0},
                                   "init_args": {"num_cpus": 2, "include_dashboard": False}})


if __name__ == "__main__":
    import flwr_round  # by its name, under which the actors find it
    flwr_round.main()
