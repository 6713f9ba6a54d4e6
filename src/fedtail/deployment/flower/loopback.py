"""A whole deployment on this machine, by the commands that a real one has: a SuperLink behind its gate, and nodes.

Nodes are registered by their keys and pinned by their certificates.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtail.deployment.flower.folder import LINK, DeploymentFolder, write_gate_address

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
}
PROCESS = [sys.executable, "-m", "fedtail.deployment.flower.process"]


class Loopback:
    """Starts and ends the processes of a deployment on this machine; leaving the `with` block ends every one of them."""

    def __init__(self, folder: DeploymentFolder):
        """Choose a free port for the gate and write its address into the server's folder in `folder`; nothing is started."""
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self._seen: set[int] = set()
        self._before: Any = None
        self._logged: dict[Path, int] = {}                   # how long the log of a run was when it was submitted
        write_gate_address(folder.server_folder, "127.0.0.1", self.port)

    def __enter__(self) -> Loopback:
        """Return this object; until the block ends, SIGTERM makes this process exit with code 143.

        The exit passes through `__exit__`, so that all processes of the deployment are ended. In a thread other than the main
        one, signals are left alone.
        """
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # which leaves by way of __exit__
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the deployment and all that they started, by SIGKILL where needed; restore SIGTERM's handler."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.note_children()
        for name in list(self.processes):
            self.stop_process(name)
        for pid in self._seen:                           # what a killed parent left behind
            send_signal(pid, signal.SIGKILL)

    def start_superlink(self, patience: float = 60.0) -> None:
        """Start the gate and the SuperLink behind it, with its database in the server's folder, and wait until it answers.

        Raises RuntimeError where it ends by itself, or does not answer within `patience` seconds.
        """
        self._start_process("superlink", [*PROCESS, "serve", str(self.folder.server_folder)])
        self._wait_for_superlink(patience)

    def _wait_for_superlink(self, patience: float) -> None:
        """Wait until the SuperLink answers; RuntimeError where it ends by itself or `patience` seconds pass."""
        end = time.monotonic() + patience
        while not self._run_flwr("ls", LINK)[0]:
            self._check_alive("superlink")
            if time.monotonic() > end:
                raise RuntimeError(f"the SuperLink did not come up in {patience:g} s; see {self.log_file('superlink')}.")
            time.sleep(0.5)

    def register_node(self, name: str) -> None:
        """Register the public key of the node `name` with the SuperLink, so that it may connect.

        Raises RuntimeError where that is refused.
        """
        done, said = self._run_flwr("supernode", "register", str(self.folder.node_folder(name) / "key.pub"), LINK)
        if not done:
            raise RuntimeError(f"{name} could not be registered: {said}")

    def start_node(self, name: str, server: str = "127.0.0.1", **environment: str) -> None:
        """Start the process of the node `name`, without waiting for it; `environment` is added to its environment variables.

        It reaches the gate at the address `server`. A node without a policy gets one that allows many trainings.
        """
        from fedtail.deployment.policy_example import write_loopback_policy

        place = self.folder.node_folder(name)
        write_loopback_policy(place)
        write_gate_address(place, server, self.port)
        self._start_process(name, [*PROCESS, "join", str(place)], environment)

    def submit_run(self, app: Path | None = None, **settings: Any) -> None:
        """Submit a run with these settings to the SuperLink and return at once; raises RuntimeError where it is refused.

        `settings` override those of the app; `out`, the run's folder, must be among them. `app` is the folder of a Flower app, by
        default the deployment's own.
        """
        out = Path(settings["out"])
        self._logged[out] = len(read_text_or_empty(out / "log.txt"))
        written = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        done, said = self._run_flwr("run", str(app or self.folder.app_folder), LINK, "--run-config", written)
        if not done:
            raise RuntimeError(f"the run was not taken: {said}")

    def wait_for_result(self, out: Path, patience: float) -> None:
        """Wait until the run in the folder `out` has written result.json, its last file.

        Raises RuntimeError where the run fails, the SuperLink ends, or `patience` seconds pass.
        """
        self.wait_for_log(out, lambda log: (out / "result.json").is_file(), patience)

    def wait_for_log(self, out: Path, reached: Callable[[str], bool], patience: float) -> None:
        """Wait until `reached` returns True for the text that the run in the folder `out` has logged since it was submitted.

        Raises RuntimeError where the log holds a traceback, the SuperLink ends, or `patience` seconds pass.
        """
        end = time.monotonic() + patience
        while not reached(log := read_text_or_empty(out / "log.txt")[self._logged.get(out, 0):]):
            self.note_children()
            if "Traceback" in log:
                raise RuntimeError(f"the run failed: {log.strip().splitlines()[-1]} (see {out / 'log.txt'})")
            self._check_alive("superlink")
            if time.monotonic() > end:
                raise RuntimeError(f"the run is not as far after {patience:g} s; see {out / 'log.txt'} and the logs in "
                                   f"{self.log_file('superlink').parent}.")
            time.sleep(0.2)

    def kill_process(self, name: str) -> None:
        """Kill the process called `name` and all that it started by SIGKILL, as a crash would; returns when it has ended.

        It is removed from `processes`. Raises KeyError for a name that is not there.
        """
        process = self.processes.pop(name)
        for pid in [process.pid, *descendant_ids(process.pid)]:
            send_signal(pid, signal.SIGKILL)
        process.wait()

    def stop_process(self, name: str) -> None:
        """End the process called `name` by SIGTERM; after at most 5 seconds it and all that it started are sent SIGKILL.

        Returns when it has ended.
        """
        process = self.processes.pop(name)
        family = [process.pid, *descendant_ids(process.pid)]
        send_signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        for pid in {*family, *descendant_ids(process.pid)}:
            send_signal(pid, signal.SIGKILL)
        process.wait()

    def note_children(self) -> None:
        """Remember the ids of all processes that ours have started so far, so that `__exit__` ends them if their parent dies.

        Ids that no longer belong to a process of Flower's are forgotten.
        """
        for process in self.processes.values():
            self._seen.update(descendant_ids(process.pid))
        self._seen = {pid for pid in self._seen if is_flower_process(pid)}

    def log_file(self, name: str) -> Path:
        """The file to which the process called `name` writes stdout and stderr: logs/NAME.txt in the deployment's folder."""
        return self.folder.path / "logs" / f"{name}.txt"

    def _start_process(self, name: str, command: list[str], more: Mapping[str, str] | None = None) -> None:
        """Start `command` under the name `name`, with stdout and stderr appended to its log file, and return at once.

        On Linux the process is ended with this one. `more` is added to its environment variables.
        """
        self.log_file(name).parent.mkdir(exist_ok=True)
        environment = {**process_environment(self.folder.home_folder), **(more or {})}
        with self.log_file(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                    env=environment, start_new_session=True, preexec_fn=die_with_parent)

    def _check_alive(self, name: str) -> None:
        """Raise RuntimeError, which names the log file, where the process called `name` has ended."""
        if self.processes[name].poll() is not None:
            raise RuntimeError(f"{name} ended by itself; see {self.log_file(name)}.")

    def _run_flwr(self, *words: str) -> tuple[bool, str]:
        """Run the command `flwr` with these arguments and return (whether it exited with 0, its stdout and stderr as one text).

        Raises subprocess.TimeoutExpired after 120 seconds.
        """
        done = subprocess.run(["flwr", *words], env=process_environment(self.folder.home_folder), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=120, check=False)
        return done.returncode == 0, (done.stdout + done.stderr).strip()


class StockFlower(Loopback):
    """Flower's own SuperLink and SuperNodes on this machine, which run what is submitted: for apps that know nothing of fedtail.

    There is no gate, and no key is asked for; TLS and the folders are those of the deployment.
    """

    def start_superlink(self, patience: float = 60.0) -> None:
        """Start the SuperLink, and wait until it answers. Raises RuntimeError where it ends by itself or `patience` passes."""
        self.folder.write_superlink_config(f"127.0.0.1:{self.port}")
        server = self.folder.server_folder
        secrets = ["--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.pem"),
                   "--ssl-keyfile", str(server / "server.key")]
        self._start_process("superlink", ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
                                          "--disable-runtime-dependency-installation", *secrets])
        self._wait_for_superlink(patience)

    def start_node(self, name: str, server: str = "127.0.0.1", **environment: str) -> None:
        """Start Flower's SuperNode for the node `name`, which is told where its folder's node.toml is, without waiting for it.

        It reaches the SuperLink at the address `server`.
        """
        place = self.folder.node_folder(name)
        settings = f"settings={json.dumps(str(place / 'node.toml'))}"
        self._start_process(name, ["flower-supernode", "--superlink", f"{server}:{self.port}", "--root-certificates",
                                   str(place / "ca.crt"), "--host", "127.0.0.1", "--port", str(free_port()),
                                   "--isolation", "subprocess", "--node-config", settings], environment)


def process_environment(home: Path) -> dict[str, str]:
    """The environment variables of Flower's processes: those of this process, and what they need.

    FLWR_HOME is `home`, telemetry is off, and the folder of this Python interpreter comes first in PATH.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def die_with_parent() -> None:
    """Called in a new process before its program starts: on Linux, the kernel will send it SIGTERM when its parent ends.

    Does nothing on other systems.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago; it is not reserved."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def read_text_or_empty(path: Path) -> str:
    """The text of the file at `path`; "" where it does not exist."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def send_signal(pid: int, how: signal.Signals) -> None:
    """Send the signal `how` to the process with id `pid`; does nothing where it has ended or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, how)


def is_flower_process(pid: int) -> bool:
    """Whether the process with id `pid` still runs and is one of Flower's, by its command line in /proc.

    It is asked because the system reuses ids of ended processes. Always False where there is no /proc.
    """
    try:
        return any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in (b"flwr-", b"flower-"))
    except OSError:
        return False


def descendant_ids(pid: int) -> list[int]:
    """The ids of all processes that process `pid` started, directly or through others, as /proc shows them; [] without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    return list(_nested_children(pid, children))


def _nested_children(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    """Yield the ids of the children of process `pid`, each followed by those of its own children.

    `children` has the direct children of every process, by process id.
    """
    for child in children.get(pid, []):
        yield child
        yield from _nested_children(child, children)
