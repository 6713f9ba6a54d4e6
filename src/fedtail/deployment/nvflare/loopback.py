"""A whole deployment over NVFlare's cells on this machine: the processes of the nodes and of the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedtail.deployment.flower.example import METHODS, Compared, compare_with_simulator, node_names, write_example
from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.flower.loopback import die_with_parent, free_port, read_text_or_empty, send_signal
from fedtail.deployment.nvflare.folder import write_addresses, write_cell_folder
from fedtail.deployment.policy_example import write_loopback_policy


class CellLoopback:
    """Starts and ends the processes of a deployment on this machine; leaving the `with` block ends every one of them."""

    def __init__(self, folder: DeploymentFolder, nodes: Sequence[str]):
        """Choose a free port for the server and write it into the folders; nothing is started."""
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        write_addresses(folder, nodes, "127.0.0.1", self.port)

    def __enter__(self) -> CellLoopback:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every process: by SIGTERM, and after 5 seconds by SIGKILL."""
        for process in self.processes.values():
            send_signal(process.pid, signal.SIGTERM)
        for name in list(self.processes):
            try:
                self.processes[name].wait(5)
            except subprocess.TimeoutExpired:
                self.kill(name)

    def start_node(self, name: str, **environment: str) -> None:
        """Start the process of the node `name`, without waiting for it; `environment` is added to its environment variables.

        A node without a policy gets one that allows many trainings.
        """
        write_loopback_policy(self.folder.node_folder(name))
        self._start(name, ["join", str(self.folder.node_folder(name))], environment)

    def start_server(self, out: Path, **settings: Any) -> None:
        """Start a run in the folder `out` with these settings instead of those in run.toml, and return at once."""
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value)) if value is not True]
        flags = [f"--{name}" for name, value in settings.items() if value is True]
        self._start("server", ["serve", str(self.folder.server_folder), "--listen", "127.0.0.1", "--out", str(out),
                               *[word for word in words if word not in flags], *flags], {})

    def wait_for_result(self, out: Path, patience: float) -> None:
        """Wait until the run in the folder `out` is finished; RuntimeError where it fails, or after `patience` seconds."""
        try:
            code = self.processes["server"].wait(patience)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the run is not finished after {patience:g} s; see {out / 'log.txt'}.") from None
        if code or not (out / "result.json").is_file():
            raise RuntimeError(f"the run failed; see {out / 'log.txt'} and {self.log_file('server')}.")

    def wait_for_log(self, out: Path, reached: Callable[[str], bool], patience: float) -> None:
        """Wait until `reached` returns True for the log of the run in `out`; RuntimeError where it ends or `patience` passes."""
        end = time.monotonic() + patience
        while not reached(read_text_or_empty(out / "log.txt")):
            if self.processes["server"].poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the run did not come as far; see {out / 'log.txt'} and {self.log_file('server')}.")
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        """Kill the process called `name` by SIGKILL, as a crash would; returns when it has ended."""
        send_signal(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def log_file(self, name: str) -> Path:
        """The file to which the process called `name` writes stdout and stderr."""
        return self.folder.path / "logs" / f"{name}.txt"

    def _start(self, name: str, words: list[str], more: dict[str, str]) -> None:
        """Start `fedtail deploy` with these words under the name `name`; on Linux it is ended with this process."""
        self.log_file(name).parent.mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}
        with self.log_file(name).open("ab") as log:
            self.processes[name] = subprocess.Popen([sys.executable, "-m", "fedtail.deployment.nvflare.process", *words],
                                                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                                    start_new_session=True, preexec_fn=die_with_parent)


def run_cell_example(path: Path, nodes: int, rounds: int, say: Callable[[str], None], patience: float = 600.0) -> list[Compared]:
    """Run FedAvg and Delta-FL on a deployment on this machine, and return for each how it compares with the simulator.

    There are `nodes` nodes, and each method trains for `rounds` rounds. Everything is written to the new folder `path`. `say` is
    called with lines of progress; `patience` is the seconds allowed for each run. Every process is ended in any case. Raises
    ValueError for fewer than 3 nodes, FileExistsError where the folder is not empty, RuntimeError where a run fails.
    """
    if nodes < 3:
        raise ValueError(f"needs 3 nodes or more, got {nodes}: so that a sum tolerates one that drops out.")
    folder, population = write_example(path, nodes, rounds, evaluates=True, write=write_cell_folder)
    found = []
    with CellLoopback(folder, node_names(nodes)) as loopback:
        for name in node_names(nodes):
            loopback.start_node(name)
        say(f"{nodes} nodes started, {len(population)} clients; the server is on 127.0.0.1:{loopback.port}, mutual TLS 1.3")
        for method in METHODS:
            out = folder.path / "runs" / method.lower()
            loopback.start_server(out, method=method, nodes=nodes)
            loopback.wait_for_result(out, patience)
            found.append(compare_with_simulator(folder, population, method, out))
            say(f"{method}: {rounds} rounds, {found[-1].exchanges} exchanges of {found[-1].seconds:.2f} s")
    return found
