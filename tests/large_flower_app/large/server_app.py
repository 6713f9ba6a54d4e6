"""One exchange with one node, by the transport that carries every deployment over Flower."""

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtail.deployment.flower.transport import FlowerTransport
from fedtail.deployment.transport import wait_until

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    transport = FlowerTransport(grid, timeout=300.0)
    wait_until(transport.online_nodes, 120.0)
    transport.ids = {0: min(transport.online_nodes())}
    sent = bytes(int(context.run_config["size"]) - 1) + b"x"
    replies = transport.exchange({0: sent})
    out = Path(str(context.run_config["out"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps({"equal": replies == {0: sent[::-1]}, "seconds": transport.seconds[0]}))
