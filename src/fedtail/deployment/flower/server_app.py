"""The ServerApp: it runs an experiment on the nodes of a Flower grid, in a folder."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.common import Context
from flwr.serverapp import Grid, ServerApp

from fedtail.deployment.deployed_run import append_to_log
from fedtail.deployment.flower.transport import FlowerTransport
from fedtail.deployment.launch import run_on_transport

app = ServerApp()


def run_on_grid(grid: Any, settings: Mapping[str, Any]) -> None:
    """Run an experiment on the nodes of a Flower grid, in the folder `out`, and return when the run is finished.

    `settings` are those of `flwr run`: `experiment` and `out` are needed; `timeout` (seconds to wait for an answer, by default
    60) and others have defaults. An exception is written to the run's log with its traceback, and raised. Raises RuntimeError
    at the end where a model is of no use, such as after rounds that were all lost; all files are written then.
    """
    out = Path(str(settings["out"]))
    try:
        transport = FlowerTransport(grid, float(settings.get("timeout", 60.0)), partial(append_to_log, out))
        wrong = run_on_transport(transport, settings, out)
    except BaseException:
        append_to_log(out, traceback.format_exc())
        raise
    if wrong:
        raise RuntimeError(f"{'; '.join(wrong)}. {out / 'log.txt'} has the reasons.")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The entry of Flower's ServerApp: run the experiment named in `context.run_config` on the nodes of `grid`."""
    run_on_grid(grid, context.run_config)
