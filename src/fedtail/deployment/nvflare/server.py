"""The server's process of a deployment over NVFlare's cells: it listens, waits for nodes, and runs the experiment."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

from fedtail.deployment.deployed_run import append_to_log
from fedtail.deployment.launch import run_on_transport
from fedtail.deployment.nvflare.transport import CellTransport
from fedtail.deployment.progress import followed, run_follower, say_now
from fedtail.reading import TOML_BYTES, read_text, short_text, toml_tables

DEFAULTS: dict[str, Any] = {"listen": "0.0.0.0", "port": 8000, "method": "", "out": "../runs/run", "seed": 0, "nodes": 2,
                            "wait": 300.0, "timeout": 60.0, "schedule": "ahead", "resume": False, "trust": ""}


def run_server(folder: Path, **given: Any) -> list[str]:
    """Run the experiment of the deployment whose server's folder is `folder`; returns why its models are of no use, [] for none.

    The settings are those of run.toml in it; `given` replaces some. An exception is written to the run's log, and raised. Raises
    ValueError for a setting that does not exist or is of another type.
    """
    settings = read_settings(folder / "run.toml") | given
    out, address = (folder / settings["out"]).resolve(), f"{settings['listen']}:{settings['port']}"
    settings |= {"experiment": str(folder.resolve().parent / "experiment.toml"), "node_keys": str(folder / "nodes")}
    say_now(f"waits at {address} for {settings['nodes']} nodes, {settings['wait']:g} s at most; the run's folder is {out}")
    timeout, log = float(settings["timeout"]), partial(append_to_log, out)
    try:
        with followed(run_follower(out)), CellTransport(folder, address, timeout, log) as transport:
            return run_on_transport(transport, settings, out)
    except BaseException:
        append_to_log(out, traceback.format_exc())
        raise


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in run.toml with the defaults of those it does not say; ValueError for one that is unknown or ill-typed."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}. `fedtail deploy init --transport nvflare` writes one.")
    said = toml_tables(read_text(path, TOML_BYTES, "the settings of a run"), path.name)
    for name, value in said.items():
        if name not in DEFAULTS:
            raise ValueError(f"{path.name} has no setting {name!r}. There are {', '.join(DEFAULTS)}.")
        kind = type(DEFAULTS[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{path.name}: {name} must be a {kind.__name__}, got {short_text(repr(value))}.")
    return DEFAULTS | said
