"""A whole deployment on this machine: a SuperLink, SuperNodes that are registered by their keys, TLS between them."""

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

from fedtail.deployment.flower.folder import LINK, DeploymentFolder

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
}


class Loopback:
    """Starts and ends the processes of a deployment; leaving the `with` block ends every one of them."""

    def __init__(self, folder: DeploymentFolder):
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self._seen: set[int] = set()
        self._before: Any = None
        self._logged: dict[Path, int] = {}                   # how long the log of a run was when it was submitted
        self.folder.link(f"127.0.0.1:{self.port}")

    def __enter__(self) -> Loopback:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # which leaves by way of __exit__
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.note_children()
        for name in list(self.processes):
            self.stop(name)
        for pid in self._seen:                           # what a killed parent left behind
            send(pid, signal.SIGKILL)

    def start_link(self, patience: float = 60.0) -> None:
        """Start the SuperLink, on a database that outlasts it, and wait until it answers."""
        server = self.folder.server
        self._start("superlink", ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
                                  "--database", str(server / "link.db"), "--enable-supernode-auth",
                                  "--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.pem"),
                                  "--ssl-keyfile", str(server / "server.key"), "--disable-runtime-dependency-installation"])
        end = time.monotonic() + patience
        while not self._flwr("ls", LINK)[0]:
            self._alive("superlink")
            if time.monotonic() > end:
                raise RuntimeError(f"the SuperLink did not come up in {patience:g} s; see {self.log('superlink')}.")
            time.sleep(0.5)

    def register(self, name: str) -> None:
        """Register a node by its public key, so that the SuperLink accepts it."""
        done, said = self._flwr("supernode", "register", str(self.folder.node(name) / "key.pub"), LINK)
        if not done:
            raise RuntimeError(f"{name} could not be registered: {said}")

    def start_node(self, name: str, **environment: str) -> None:
        """Start the SuperNode of a node; `environment` is added to its own."""
        place = self.folder.node(name)
        self._start(name, ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
                           "--port", str(free_port()), "--root-certificates", str(place / "ca.crt"),
                           "--auth-supernode-private-key", str(place / "key"),
                           "--node-config", f'settings="{place / "node.toml"}"'], environment)

    def run(self, app: Path | None = None, **settings: Any) -> None:
        """Submit a run with these settings, of the deployment's own app if no other is given; it goes on by itself."""
        out = Path(settings["out"])
        self._logged[out] = len(read(out / "log.txt"))
        written = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        done, said = self._flwr("run", str(app or self.folder.app), LINK, "--run-config", written)
        if not done:
            raise RuntimeError(f"the run was not taken: {said}")

    def wait(self, out: Path, patience: float) -> None:
        """Wait until a run is finished; its failure, or a timeout, is an error that names the log."""
        self.wait_for(out, lambda log: (out / "result.json").is_file(), patience)

    def wait_for(self, out: Path, reached: Callable[[str], bool], patience: float) -> None:
        """Wait until the log of a run fulfils a condition; what was logged before this run began is ignored."""
        end = time.monotonic() + patience
        while not reached(log := read(out / "log.txt")[self._logged.get(out, 0):]):
            self.note_children()
            if "Traceback" in log:
                raise RuntimeError(f"the run failed: {log.strip().splitlines()[-1]} (see {out / 'log.txt'})")
            self._alive("superlink")
            if time.monotonic() > end:
                raise RuntimeError(f"the run is not as far after {patience:g} s; see {out / 'log.txt'} and the logs in "
                                   f"{self.log('superlink').parent}.")
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """kill -9, of the process and of those it started."""
        process = self.processes.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            send(pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> None:
        """End a process, by force where it does not end by itself."""
        process = self.processes.pop(name)
        family = [process.pid, *descendants(process.pid)]
        send(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        for pid in {*family, *descendants(process.pid)}:
            send(pid, signal.SIGKILL)
        process.wait()

    def note_children(self) -> None:
        """Remember the processes that ours have started, to end them too."""
        for process in self.processes.values():
            self._seen.update(descendants(process.pid))
        self._seen = {pid for pid in self._seen if ours(pid)}

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder.path / "logs" / f"{name}.txt"

    def _start(self, name: str, command: list[str], more: Mapping[str, str] | None = None) -> None:
        self.log(name).parent.mkdir(exist_ok=True)
        environment = {**self._environment(), **(more or {})}
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                    env=environment, start_new_session=True, preexec_fn=die_with_parent)

    def _alive(self, name: str) -> None:
        if self.processes[name].poll() is not None:
            raise RuntimeError(f"{name} ended by itself; see {self.log(name)}.")

    def _flwr(self, *words: str) -> tuple[bool, str]:
        done = subprocess.run(["flwr", *words], env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120, check=False)
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    def _environment(self) -> Mapping[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**os.environ, **QUIET, "FLWR_HOME": str(self.folder.home), "PATH": path}


def die_with_parent() -> None:
    """On Linux, a process that ends when the one that started it is killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def read(path: Path) -> str:
    """The text of a file; empty where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def send(pid: int, how: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, how)


def ours(pid: int) -> bool:
    """Whether a process is one of Flower's that a deployment starts; numbers of processes are used again."""
    try:
        return any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in (b"flwr-", b"flower-"))
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    return list(_below(pid, children))


def _below(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, []):
        yield child
        yield from _below(child, children)
