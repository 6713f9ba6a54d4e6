"""Running a node: over Flower its SuperNode, over NVFlare a process that stays; which of them, a file in its folder says."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from fedtail.deployment.consent import check_readiness
from fedtail.deployment.settings import NodeSettings
from fedtail.reading import TOML_BYTES, read_text, toml_tables

FLOWER, NVFLARE = "superlink.toml", "server.toml"      # each with host and port
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def run_node(settings: NodeSettings, file: Path, server: str = "") -> None:
    """Check the node and run it until it is told to end; over Flower this process is replaced by flower-supernode.

    `file` is the path of its settings, and `server` "host:port" replaces the address in the folder. Raises ValueError where the
    node may not start, and where neither of the files with the server's address is there.
    """
    check_readiness(settings)
    over_flower, over_nvflare = (settings.folder / FLOWER).is_file(), (settings.folder / NVFLARE).is_file()
    if over_flower == over_nvflare:
        raise ValueError(f"{settings.folder} must have either {FLOWER}, for Flower, or {NVFLARE}, for NVFlare, which say where "
                         "the server is. `fedtail deploy init` writes one of them.")
    address = server or read_server(settings.folder / (FLOWER if over_flower else NVFLARE))
    if over_nvflare:
        from fedtail.deployment.nvflare.process import join

        join(settings.folder, address, file.name)
        return
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("flower-supernode", path=places)
    if program is None:
        raise ValueError("there is no flower-supernode. Install Flower with: pip install 'fedtail[flower]'")
    os.execve(program, supernode_command(settings, file, address), {**os.environ, **QUIET, "PATH": places})


def supernode_command(settings: NodeSettings, file: Path, address: str) -> list[str]:
    """The words of the command that starts a node's SuperNode for the SuperLink at `address`, as `fedtail deploy init` prints."""
    return ["flower-supernode", "--superlink", address, "--root-certificates", str(settings.folder / "ca.crt"),
            "--auth-supernode-private-key", str(settings.folder / "key"), "--node-config", f"settings={json.dumps(str(file))}"]


def read_server(path: Path) -> str:
    """The address "host:port" in a file with these two settings; raises ValueError where it has others, or is not there."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}. `fedtail deploy init` writes one.")
    said = toml_tables(read_text(path, TOML_BYTES, "the address of the server"), path.name)
    host, port = said.get("host"), said.get("port")
    if set(said) != {"host", "port"} or not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise ValueError(f'{path.name} must say host and port and nothing else. Write host = "fl.example.org" and port = 8000.')
    return f"{host}:{port}"
