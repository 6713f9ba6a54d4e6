"""The folder of a deployment over NVFlare's cells: what the server needs, and what each node needs; no secret is shared.

    experiment.toml         the method and the model
    server/                 certificate and key of the server, run.toml, nodes/NAME.pub and NAME.crt
    nodes/NAME/             settings, key and certificate of one node; copy the folder to the node, and delete it here
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.deployment.flower.folder import DeploymentFolder, check_new_folder, write_node_folder
from fedtail.deployment.keys import make_certificates

RUN = """\
listen = "0.0.0.0"               # the address of this machine at which nodes arrive
port = {port}
method = ""                      # which [[method]], where the file has several
out = "../runs/run"              # the run's folder
seed = 0
nodes = {nodes}                  # wait for so many
wait = 300.0                     # seconds
timeout = 60.0                   # seconds a node may take to answer
schedule = "ahead"               # or simple, or all-or-nothing (half the exchanges, for a few reliable sites)
trust = ""                       # folders (of the server) and packages, with commas, whose code the experiment may run
"""


def write_cell_folder(path: Path, experiment: Path, nodes: Sequence[str], host: str, port: int,
                      **of_nodes: Any) -> DeploymentFolder:
    """Write everything for a deployment of the file `experiment` into a folder, with fresh keys, and return its paths.

    `host` and `port` are how nodes reach the server; `of_nodes` are the arguments of `write_node_folder` for all nodes. Raises
    FileExistsError where the folder is not empty, and ValueError for fewer than two nodes, two of one name, and names that a cell
    cannot have.
    """
    check_new_folder(path, nodes)
    folder = DeploymentFolder(path.resolve())
    folder.path.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(experiment, folder.path / "experiment.toml")
    make_certificates(folder.server_folder, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))
    for name in nodes:
        write_node_folder(folder, name, experiment, **of_nodes)
    write_addresses(folder, nodes, host, port)
    return folder


def write_addresses(folder: DeploymentFolder, nodes: Sequence[str], host: str, port: int) -> None:
    """Write where nodes find the server into each node's server.toml, and the settings of a run into the server's run.toml."""
    (folder.server_folder / "run.toml").write_text(RUN.format(port=port, nodes=len(nodes)), encoding="utf-8")
    for name in nodes:
        (folder.node_folder(name) / "server.toml").write_text(f'host = "{host}"\nport = {port}\n', encoding="utf-8")


def cell_commands(folder: DeploymentFolder, host: str, port: int) -> str:
    """A text with the shell commands that start the nodes and run the experiment on the server, at `host` and `port`."""
    server = folder.server_folder
    return f"""\
Copy each nodes/NAME to its node over a way you trust, and delete it here.
On each node, in its copy of nodes/NAME, with data named in node.toml (it connects to {host}:{port}, and listens nowhere).
Read the policy that the first command writes:
  fedtail node init node.toml
  fedtail node accept node.toml        (says in words what is asked, and prints the digest to accept it with)
  fedtail node run node.toml
On the server, which listens on port {port}:
  fedtail deploy serve {server}
  fedtail deploy serve {server} --resume     (after a crash: goes on from the last round)"""
