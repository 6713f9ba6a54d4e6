"""A ServerApp with Flower's FedAvg, which notes the time when each round begins and the last one ends."""

import json
import sys
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    def configure_train(self, *given, **named):
        self.times.append(time.time())
        return super().configure_train(*given, **named)


@app.main()
def main(grid: Grid, context: Context) -> None:
    sys.path.insert(0, str(context.run_config["work"]))
    import node_work

    nodes = int(context.run_config["nodes"])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.times = []
    strategy.start(grid, ArrayRecord(node_work.module().state_dict()), num_rounds=int(context.run_config["rounds"]))
    out = Path(str(context.run_config["out"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps([*strategy.times, time.time()]))
