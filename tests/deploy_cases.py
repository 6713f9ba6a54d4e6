"""A deployment of real processes on this machine, over either transport, and what its runs leave."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from fedtail.deployment.flower.example import compare_with_simulator, node_names, write_example
from fedtail.deployment.flower.folder import write_deployment_folder, write_gate_address
from fedtail.deployment.flower.loopback import Loopback, read_text_or_empty

from deploy_oracle import read_json_lines

ENOUGH = 400.0      # seconds a run may take on a busy machine
SAME = 1e-8         # nodes compute their clients in other batches than the simulator: the last bits of a float32 differ
FAULTS = str(Path(__file__).parent / "deploy_faults")
MARK = "FEDTAIL_DEPLOYMENT"      # in the environment of every process of a deployment: its folder


class Deployment:
    """`nodes` written, `started` of them registered and running, over "flower" or "nvflare".

    `hosts` are further names of the server in its certificate; `listen` is where it listens.
    """

    def __init__(self, path, nodes, rounds=2, started=None, transport="flower", hosts=(), listen="127.0.0.1", **settings):
        self.transport, self.names, self.listen = transport, node_names(nodes), listen
        self.folder, self.people = write_example(path, nodes, rounds, write=writer(transport, hosts), **settings)
        self.started, self.registered = self.names[:started], set()
        os.environ[MARK] = str(self.folder.path)
        self.loopback = OverFlower(self.folder, listen) if transport == "flower" else cells(self.folder, self.names)

    def __enter__(self):
        self.loopback.__enter__()
        if self.transport == "flower":
            self.loopback.start_superlink()
        for name in self.started:
            self.start(name)
        return self

    def __exit__(self, *reason):
        self.loopback.__exit__(*reason)
        os.environ.pop(MARK)

    def out(self, name):
        return self.folder.path / "runs" / name

    def start(self, name, server="127.0.0.1", **environment):
        """Start the node `name`, which reaches the server at the address `server`."""
        if self.transport == "nvflare":
            place = self.folder.node_folder(name) / "server.toml"
            place.write_text(f'host = "{server}"\nport = {self.loopback.port}\n')
            self.loopback.start_node(name, **environment)
            return
        if name not in self.registered:
            self.loopback.register_node(name)
            self.registered.add(name)
        self.loopback.servers[name] = server
        self.loopback.start_node(name, **environment)

    def kill(self, name):
        """Kill a node with all that it started; one that has died already is only forgotten."""
        (self.loopback.kill_process if self.transport == "flower" else self.loopback.kill)(name)

    def run(self, name, method="Delta-FL", **settings):
        settings = {"method": method, "nodes": len(self.started), **settings}
        if self.transport == "flower":
            self.loopback.submit_run(out=str(self.out(name)), **settings)
        else:
            self.loopback.start_server(self.out(name), listen=self.listen, **settings)

    def wait_until_server_died(self, patience=ENOUGH):
        """Wait until the server has killed itself, and start what must be there before a run can go on."""
        name = "superlink" if self.transport == "flower" else "server"
        self.loopback.processes[name].wait(patience)
        self.kill(name)
        if self.transport == "flower":
            self.loopback.start_superlink()

    def finish(self, name, patience=ENOUGH):
        try:
            self.loopback.wait_for_result(self.out(name), patience)
        except RuntimeError:                         # a run that lost every round is finished, and its server says so by its exit code
            if not (self.out(name) / "result.json").is_file():
                raise

    def after_exchange(self, name, number, patience=ENOUGH):
        self.after_line(name, f"exchange {number}:", patience)

    def after_line(self, name, text, patience=ENOUGH):
        self.loopback.wait_for_log(self.out(name), lambda log: text in log, patience)

    def log(self, name):
        return read_text_or_empty(self.out(name) / "log.txt")

    def answers(self, name):
        return read_json_lines(self.out(name) / "answers.jsonl")

    def compare(self, name, method="Delta-FL"):
        return compare_with_simulator(self.folder, self.people, method, self.out(name))


class OverFlower(Loopback):
    """A loopback whose gate may listen at another address, and whose nodes may reach it at another."""

    def __init__(self, folder, listen):
        super().__init__(folder)
        self.servers = {}
        write_gate_address(folder.server_folder, listen, self.port)

    def start_node(self, name, **environment):
        """Start the node, which reaches the gate at its address in `servers`."""
        super().start_node(name, server=self.servers.get(name, "127.0.0.1"), **environment)


def cells(folder, names):
    from fedtail.deployment.nvflare.loopback import CellLoopback

    return CellLoopback(folder, names)


def writer(transport, hosts):
    """What writes the folder, with a certificate that is good for `hosts` too."""
    if transport == "flower":
        write = write_deployment_folder
    else:
        from fedtail.deployment.nvflare.folder import write_cell_folder as write

    def written(path, experiment, nodes, host, port, **of_nodes):
        return write(path, experiment, nodes, hosts[0] if hosts else host, port, **of_nodes)
    return written


def processes_of(folder, patience=10.0):
    """The command lines of processes of the deployment in `folder` that still run `patience` seconds from now."""
    wanted, end = f"{MARK}={folder}".encode(), time.monotonic() + patience
    while True:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(place.name) != os.getpid() and wanted in (place / "environ").read_bytes().split(b"\0"):
                    found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)
