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
        """Choose a free port for the SuperLink and write it into the folder's configuration; nothing is started yet."""
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self._seen: set[int] = set()
        self._before: Any = None
        self._logged: dict[Path, int] = {}                   # how long the log of a run was when it was submitted
        self.folder.write_link_config(f"127.0.0.1:{self.port}")

    def __enter__(self) -> Loopback:
        """From here to the end of the block SIGTERM leaves the block, so that all processes are ended.

        In other threads than the main one signals are left alone.
        """
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # which leaves by way of __exit__
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the deployment and those they started, by force where needed; SIGTERM is handled as before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.note_children()
        for name in list(self.processes):
            self.stop(name)
        for pid in self._seen:                           # what a killed parent left behind
            send_signal(pid, signal.SIGKILL)

    def start_link(self, patience: float = 60.0) -> None:
        """Start the SuperLink, on a database that outlasts it, and wait until it answers.

        RuntimeError after `patience` seconds.
        """
        server = self.folder.server
        self._start("superlink", ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
                                  "--database", str(server / "link.db"), "--enable-supernode-auth",
                                  "--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.pem"),
                                  "--ssl-keyfile", str(server / "server.key"), "--disable-runtime-dependency-installation"])
        end = time.monotonic() + patience
        while not self._run_flwr("ls", LINK)[0]:
            self._check_alive("superlink")
            if time.monotonic() > end:
                raise RuntimeError(f"the SuperLink did not come up in {patience:g} s; see {self.log_file('superlink')}.")
            time.sleep(0.5)

    def register(self, name: str) -> None:
        """Register a node by its public key, so that the SuperLink accepts it; RuntimeError where it refuses."""
        done, said = self._run_flwr("supernode", "register", str(self.folder.node(name) / "key.pub"), LINK)
        if not done:
            raise RuntimeError(f"{name} could not be registered: {said}")

    def start_node(self, name: str, **environment: str) -> None:
        """Start the SuperNode of a node, without waiting for it; `environment` is added to that of the process."""
        place = self.folder.node(name)
        self._start(name, ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
                           "--port", str(free_port()), "--root-certificates", str(place / "ca.crt"),
                           "--auth-supernode-private-key", str(place / "key"),
                           "--node-config", f'settings="{place / "node.toml"}"'], environment)

    def run(self, app: Path | None = None, **settings: Any) -> None:
        """Submit a run with these settings and return at once; RuntimeError where it is refused.

        `app` is a Flower app's folder, by default the deployment's own. `out` among the settings is the run's folder.
        """
        out = Path(settings["out"])
        self._logged[out] = len(read_if_there(out / "log.txt"))
        written = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        done, said = self._run_flwr("run", str(app or self.folder.app), LINK, "--run-config", written)
        if not done:
            raise RuntimeError(f"the run was not taken: {said}")

    def wait(self, out: Path, patience: float) -> None:
        """Wait until the run in the folder `out` is finished; RuntimeError where it fails, or after `patience` seconds."""
        self.wait_for(out, lambda log: (out / "result.json").is_file(), patience)

    def wait_for(self, out: Path, reached: Callable[[str], bool], patience: float) -> None:
        """Wait until the log of a run, from when it was submitted, fulfils a condition.

        RuntimeError where the run fails, the SuperLink ends, or `patience` seconds are over.
        """
        end = time.monotonic() + patience
        while not reached(log := read_if_there(out / "log.txt")[self._logged.get(out, 0):]):
            self.note_children()
            if "Traceback" in log:
                raise RuntimeError(f"the run failed: {log.strip().splitlines()[-1]} (see {out / 'log.txt'})")
            self._check_alive("superlink")
            if time.monotonic() > end:
                raise RuntimeError(f"the run is not as far after {patience:g} s; see {out / 'log.txt'} and the logs in "
                                   f"{self.log_file('superlink').parent}.")
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """Kill a process (SIGKILL) and all that it started, as a crash would."""
        process = self.processes.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            send_signal(pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> None:
        """End a process and all that it started: SIGTERM, and after 5 seconds SIGKILL."""
        process = self.processes.pop(name)
        family = [process.pid, *descendants(process.pid)]
        send_signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        for pid in {*family, *descendants(process.pid)}:
            send_signal(pid, signal.SIGKILL)
        process.wait()

    def note_children(self) -> None:
        """Remember the processes that ours have started so far, so that they are ended too if their parent dies first."""
        for process in self.processes.values():
            self._seen.update(descendants(process.pid))
        self._seen = {pid for pid in self._seen if is_flower_process(pid)}

    def log_file(self, name: str) -> Path:
        """The file that a process writes its output to."""
        return self.folder.path / "logs" / f"{name}.txt"

    def _start(self, name: str, command: list[str], more: Mapping[str, str] | None = None) -> None:
        """Start a command under a name, output appended to its log; it ends with this process.

        `more` is added to its environment.
        """
        self.log_file(name).parent.mkdir(exist_ok=True)
        environment = {**self._environment(), **(more or {})}
        with self.log_file(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                    env=environment, start_new_session=True, preexec_fn=die_with_parent)

    def _check_alive(self, name: str) -> None:
        """Raise RuntimeError, with the place of its log, where a process has ended by itself."""
        if self.processes[name].poll() is not None:
            raise RuntimeError(f"{name} ended by itself; see {self.log_file(name)}.")

    def _run_flwr(self, *words: str) -> tuple[bool, str]:
        """Run the `flwr` command with these words, at most 120 seconds: whether it succeeded, and all it printed."""
        done = subprocess.run(["flwr", *words], env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120, check=False)
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    def _environment(self) -> Mapping[str, str]:
        """The environment of all processes: this one's, with Flower's settings and this interpreter's programs first in PATH."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**os.environ, **QUIET, "FLWR_HOME": str(self.folder.home), "PATH": path}


def die_with_parent() -> None:
    """Called in a new process: on Linux it is sent SIGTERM when the one that started it ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def read_if_there(path: Path) -> str:
    """The text of a file; "" where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def send_signal(pid: int, how: signal.Signals) -> None:
    """Send a signal to a process, if it is still there and ours to signal."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, how)


def is_flower_process(pid: int) -> bool:
    """Whether a process that still runs is one of Flower's; process ids are used again, so a known one may be another's."""
    try:
        return any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in (b"flwr-", b"flower-"))
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The ids of the processes that a process has started, and those that these have, from /proc; empty on other systems."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    return list(_all_children(pid, children))


def _all_children(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    """The children of a process and theirs in turn; `children` are those of each process id."""
    for child in children.get(pid, []):
        yield child
        yield from _all_children(child, children)
