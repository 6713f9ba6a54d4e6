"""The server: a strategy, three lines."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedtail.deployment.flower import TailStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = context.run_config
    strategy = TailStrategy(tail_fraction=float(told["tail-fraction"]), min_train_nodes=int(told["nodes"]),
                            min_available_nodes=int(told["nodes"]), fraction_evaluate=0.0)
    initial = ArrayRecord({"w": Array(np.array([float(told["start"])]))})
    found = strategy.start(grid, initial, num_rounds=int(told["rounds"]))
    out = Path(str(told["out"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps({"w": float(found.arrays["w"].numpy()[0]), "counted": len(strategy.weights)}))
