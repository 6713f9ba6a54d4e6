"""`python -m fedtail.deployment.flower.process join|serve FOLDER`: the processes of a node or of the server, which SIGTERM ends.

The server is a gate on the network and a SuperLink behind it, on 127.0.0.1; a node is a forwarder and a SuperNode that knows
nothing but the forwarder. `fedtail deploy join` and `fedtail deploy serve` are these, with sentences for errors.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.flower.forwarder import Forwarder
from fedtail.deployment.flower.gate import Gate
from fedtail.deployment.flower.loopback import die_with_parent, free_port, process_environment
from fedtail.deployment.keys import make_certificates
from fedtail.reading import TOML_BYTES, read_text, toml_tables

GATE = "gate.toml"        # where the gate is: of the server's folder, at which address it listens; of a node's, which host it has
ENDS = 10.0               # seconds that a process is given to end
log = logging.getLogger("fedtail.gate")


def serve(folder: Path) -> None:
    """Run the gate and the SuperLink of the server whose folder is `folder`, until SIGTERM or Ctrl-C.

    Raises ValueError for settings that are not valid and where no node has a certificate, RuntimeError where the SuperLink ends.
    """
    host, port = read_gate_address(folder / GATE)
    asyncio.run(_serve(folder.resolve(), host, port))


def join(folder: Path) -> None:
    """Run the SuperNode of the node whose folder is `folder`, with its forwarder, until SIGTERM or Ctrl-C.

    Raises ValueError where the settings or the policy are not valid, RuntimeError where the SuperNode ends.
    """
    from fedtail.deployment.policy import NodePolicy
    from fedtail.deployment.settings import NodeSettings

    settings = NodeSettings.read(folder / "node.toml")
    NodePolicy.read(settings.folder / settings.policy)
    host, port = read_gate_address(folder / GATE)
    asyncio.run(_join(folder.resolve(), host, port))


async def _serve(folder: Path, host: str, port: int) -> None:
    """Start the gate at `host` and `port` and the SuperLink behind it, and wait until a signal or the end of the SuperLink."""
    behind, made = free_port(), DeploymentFolder(folder.parent)
    gate = await Gate(folder, behind, log.warning).start(host, port)
    made.write_superlink_config(f"127.0.0.1:{behind}")
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(behind), "--database", str(folder / "link.db"),
               "--enable-supernode-auth", "--disable-runtime-dependency-installation",
               "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.pem"),
               "--ssl-keyfile", str(folder / "server.key")]
    async with gate:
        await _run_until_told(command, process_environment(made.home_folder))


async def _join(folder: Path, host: str, port: int) -> None:
    """Start the forwarder to the gate at `host` and `port` and a SuperNode, and wait until a signal or the SuperNode's end."""
    home = folder / "flower"
    for old in ("apps", "tls"):
        shutil.rmtree(home / old, ignore_errors=True)     # only what this process writes may be there
    home.mkdir(mode=0o700, exist_ok=True)
    make_certificates(home / "tls", ["127.0.0.1"])        # for the way between two processes: Flower wants TLS there too
    forwarder = await Forwarder(folder, host, port, log.warning).start(home / "tls")
    command = ["flower-supernode", "--superlink", f"127.0.0.1:{forwarder.sockets[0].getsockname()[1]}",
               "--root-certificates", str(home / "tls" / "ca.crt"), "--auth-supernode-private-key", str(folder / "key"),
               "--host", "127.0.0.1", "--port", str(free_port()), "--isolation", "subprocess",
               "--node-config", f'settings="{folder / "node.toml"}"']
    async with forwarder:
        await _run_until_told(command, process_environment(home))


async def _run_until_told(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `command` until SIGTERM or SIGINT, and end it then; RuntimeError where it ends by itself."""
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, until.set)
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), stdin=asyncio.subprocess.DEVNULL,
                                                   preexec_fn=die_with_parent, start_new_session=True)
    ended, told = asyncio.create_task(process.wait()), asyncio.create_task(until.wait())
    await asyncio.wait([ended, told], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if process.returncode is not None:
        raise RuntimeError(f"{command[0]} ended by itself, with code {process.returncode}.")
    process.terminate()
    try:
        await asyncio.wait_for(ended, ENDS)
    except TimeoutError:
        process.kill()


def read_gate_address(path: Path) -> tuple[str, int]:
    """The pair (host, port) in the file gate.toml of a server or a node; raises ValueError where it has none."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}. `fedtail deploy init` writes one.")
    said = toml_tables(read_text(path, TOML_BYTES, "the address of the gate"), path.name)
    host, port = said.get("host"), said.get("port")
    if set(said) != {"host", "port"} or not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(f'{path.name} must say host and port and nothing else. Write host = "fl.example.org" and port = 8000.')
    return host, port


if __name__ == "__main__":
    {"join": join, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
