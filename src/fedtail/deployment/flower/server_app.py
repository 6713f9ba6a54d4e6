"""The ServerApp: it reads the run's settings and hands over to `serve`."""

from __future__ import annotations

from flwr.common import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment on the nodes that are there."""
    from fedtail.deployment.flower.serving import serve

    serve(grid, context.run_config)
