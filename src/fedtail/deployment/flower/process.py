"""`python -m fedtail.deployment.flower.process join|serve FOLDER`: the processes of a node or of the server, which SIGTERM ends.

The server is a gate on the network and a SuperLink behind it, on 127.0.0.1; a node is a forwarder, a SuperNode that knows
nothing but the forwarder, and a process for each message. `fedtail node run` and `fedtail deploy serve` are these, with sentences
for errors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.flower.forwarder import Forwarder
from fedtail.deployment.flower.gate import Gate
from fedtail.deployment.flower.link_database import DATABASE
from fedtail.deployment.flower.loopback import die_with_parent, free_port, process_environment
from fedtail.deployment.flower.sealed_state import HOME, make_state_key
from fedtail.deployment.flower.tasks import PORTS, NodeTasks
from fedtail.deployment.keys import make_certificates
from fedtail.deployment.node_process import FLOWER as GATE
from fedtail.deployment.node_process import only_process, read_server
from fedtail.deployment.progress import followed, node_follower, run_follower, say_now

if TYPE_CHECKING:
    from fedtail.deployment.settings import NodeSettings

ENDS = 10.0               # seconds that a process is given to end
log = logging.getLogger("fedtail.gate")


def serve(folder: Path) -> None:
    """Run the gate and the SuperLink of the server whose folder is `folder`, until SIGTERM or Ctrl-C.

    Raises ValueError for settings that are not valid and where no node has a certificate, RuntimeError where the SuperLink ends.
    """
    host, _, port = read_server(folder / GATE).rpartition(":")
    asyncio.run(_serve(folder.resolve(), host, int(port)))


def join(folder: Path, address: str = "", file: str = "node.toml") -> None:
    """Run the SuperNode of the node in `folder`, with its forwarder, until SIGTERM or Ctrl-C; its settings are in `file`.

    `address` is "host:port" of the gate, "" that in gate.toml. Raises ValueError where settings, policy or consent do not allow
    the node to start or another process runs it, RuntimeError where the SuperNode ends.
    """
    from fedtail.deployment.consent import check_readiness
    from fedtail.deployment.settings import NodeSettings

    settings = NodeSettings.read(folder / file)
    check_readiness(settings)
    host, _, port = (address or read_server(folder / GATE)).rpartition(":")
    with only_process(folder):
        asyncio.run(_join(folder.resolve(), host, int(port), settings, file))


async def _serve(folder: Path, host: str, port: int) -> None:
    """Start the gate at `host` and `port` and the SuperLink behind it, and wait until a signal or the end of the SuperLink."""
    behind, made = free_port(), DeploymentFolder(folder.parent)
    gate = await Gate(folder, behind, log.warning).start(host, port)
    made.write_superlink_config(f"127.0.0.1:{behind}")
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(behind), "--database", str(folder / DATABASE),
               "--enable-supernode-auth", "--disable-runtime-dependency-installation",
               "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.pem"),
               "--ssl-keyfile", str(folder / "server.key")]
    say_now(f"the gate for nodes is open at {host}:{port}; runs are submitted from this machine, with `flwr run` and FLWR_HOME="
            f"{made.home_folder}")
    async with gate:
        with followed(run_follower(made.path / "runs")):
            await _run_until_told(command, process_environment(made.home_folder))


async def _join(folder: Path, host: str, port: int, settings: NodeSettings, file: str) -> None:
    """Start the forwarder to the gate at `host` and `port` and a SuperNode, and wait until a signal or the SuperNode's end.

    `settings` are the node's, which the file `file` of the folder says.
    """
    home = folder / HOME
    for old in ("apps", "tls"):
        shutil.rmtree(home / old, ignore_errors=True)     # only what this process writes may be there
    home.mkdir(mode=0o700, exist_ok=True)
    home.chmod(0o700)
    make_certificates(home / "tls", ["127.0.0.1"])        # for the ways between processes of this machine
    make_state_key(home)
    forwarder = await Forwarder(folder, host, port, log.warning).start(home / "tls")
    tasks = NodeTasks(home, free_port(), process_environment(home), log.warning)
    fleet = forwarder.sockets[0].getsockname()[1]
    (home / PORTS).write_text(f"forwarder = {fleet}\ntasks = {tasks.port}\n", encoding="utf-8")
    command = ["flower-supernode", "--superlink", f"127.0.0.1:{fleet}", "--root-certificates", str(home / "tls" / "ca.crt"),
               "--auth-supernode-private-key", str(folder / "key"), *tasks.options,
               "--node-config", f"settings={json.dumps(str(folder / file))}"]
    say_now(f"{settings.name} looks for the server at {host}:{port}, with the clients in {settings.data}")
    async with forwarder:
        with followed(node_follower(settings.audit_file)):
            await _run_until_told(command, process_environment(home), tasks.run)


async def _run_until_told(command: Sequence[str], environment: Mapping[str, str],
                          beside: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
    """Run `command`, and `beside` while it runs, until SIGTERM or SIGINT, and end both then.

    Raises RuntimeError where the command ends by itself, and what `beside` raises.
    """
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, until.set)
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), stdin=asyncio.subprocess.DEVNULL,
                                                   preexec_fn=die_with_parent, start_new_session=True)
    ended, told = asyncio.create_task(process.wait()), asyncio.create_task(until.wait())
    others = [asyncio.create_task(beside())] if beside is not None else []
    await asyncio.wait([ended, told, *others], return_when=asyncio.FIRST_COMPLETED)
    by_itself = process.returncode
    told.cancel()
    for running in others:
        running.cancel()
    found = await asyncio.gather(*others, return_exceptions=True)
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(ended, ENDS)
        except TimeoutError:
            process.kill()
    for why in found:
        if isinstance(why, Exception):
            raise why
    if by_itself is not None:
        raise RuntimeError(f"{command[0]} ended by itself, with code {by_itself}.")


if __name__ == "__main__":
    {"join": join, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
