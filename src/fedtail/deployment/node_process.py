"""Running a node: over Flower its SuperNode, over NVFlare a process that stays; which of them, a file in its folder says."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedtail.deployment.settings import NodeSettings
from fedtail.reading import TOML_BYTES, read_text, toml_tables

FLOWER, NVFLARE = "gate.toml", "server.toml"      # where the gate, or the server, is: each with host and port
LOCK = "node.lock"                                # held by the process that runs the node


def run_node(folder: Path, file: str = "node.toml", server: str = "") -> None:
    """Check the node in `folder`, whose settings are in `file`, and run it until SIGTERM or Ctrl-C.

    `server` is "host:port" instead of the address in the folder. Raises ValueError where the node may not start, and where not
    one of the files with the server's address is there.
    """
    from fedtail.deployment.consent import check_readiness

    check_readiness(NodeSettings.read(folder / file))
    over_flower, over_nvflare = (folder / FLOWER).is_file(), (folder / NVFLARE).is_file()
    if over_flower == over_nvflare:
        raise ValueError(f"{folder} must have either {FLOWER}, for Flower, or {NVFLARE}, for NVFlare, which say where the "
                         "server is. `fedtail deploy init` writes one of them.")
    if over_flower:
        from fedtail.deployment.flower.process import join
    else:
        from fedtail.deployment.nvflare.process import join
    join(folder, server or read_server(folder / (FLOWER if over_flower else NVFLARE)), file)


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Within the block this process is the node of `folder`; raises ValueError where another one is, which is then left alone.

    Two of one name would take each other's place at the server again and again. The lock ends with the process, however it ends.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process runs the node of {folder}. One is enough: end it first, or leave it.") from None
        yield
    finally:
        os.close(file)


def is_running(folder: Path) -> bool:
    """Whether a process runs the node of `folder` now."""
    if not (folder / LOCK).is_file():
        return False
    with open(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_server(path: Path) -> str:
    """The address "host:port" in a file with these two settings; raises ValueError where it has others, or is not there."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}. `fedtail deploy init` writes one.")
    said = toml_tables(read_text(path, TOML_BYTES, "the address of the server"), path.name)
    host, port = said.get("host"), said.get("port")
    if set(said) != {"host", "port"} or not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(f'{path.name} must say host and port and nothing else. Write host = "fl.example.org" and port = 8000.')
    return f"{host}:{port}"
