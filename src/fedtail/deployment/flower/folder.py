"""The folder of a deployment: an app for `flwr run`, what the server needs, and what each node needs.

    app/pyproject.toml      what is submitted to the SuperLink: the names of our apps, and the settings of a run
    experiment.toml         the method and the model
    server/                 certificate and key; gate.toml; home/config.toml, with which `flwr` on the server finds the SuperLink
    server/nodes/           NAME.pub and NAME.crt: by them the server knows its nodes
    nodes/NAME/             its settings, its key and certificate; copy the folder to the node, and delete its secrets here
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from fedtail.deployment.keys import make_certificates, make_node_certificate, make_node_key

LINK = "fedtail"            # what `flwr run app fedtail` calls the SuperLink
APP = """\
# For `flwr run`, on the server. The app is in the installed package; nodes run their own, and nothing of this travels to them.
[project]
name = "fedtail-deployment"
version = "1.0.0"
description = "A fedtail experiment on nodes that keep their data"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedtail"

[tool.flwr.app.components]
serverapp = "fedtail.deployment.flower.server_app:app"
clientapp = "fedtail.deployment.flower.node_app:app"

[tool.flwr.app.config]
experiment = "{experiment}"      # on the server
method = ""                      # which [[method]], where the file has several
out = "{out}"                    # the run's folder, on the server
node_keys = "{node_keys}"        # NAME.pub of each node, on the server: a name is registered for its key only
seed = 0
nodes = {nodes}                  # wait for so many
wait = 300.0                     # seconds
timeout = 60.0                   # seconds a node may take to answer; 30 or more
schedule = "ahead"               # or simple, or all-or-nothing (half the exchanges, for a few reliable sites)
resume = false
trust = ""                       # folders (of the server) and packages, with commas, whose code the experiment may run
"""
NODE = """\
name = "{name}"
experiment = "experiment.toml"   # this node's own copy: its model, and the parts it is willing to run
data = "{data}"                  # .npz, .parquet, a saved population or a folder of LEAF files
minimum = {minimum}              # a row is summed over so many nodes or more
masked_only = true               # nothing is answered in the clear
keys = "{keys}"
trust = []                       # ["."]: run code of this folder that the experiment names; ["torch"]: of a package
test_share = {test_share}        # of each client's examples: never trained on, models are evaluated on them
# answer_after = 5.0             # seconds after which every answer leaves, so that its time does not tell who is in the tail
# identity = "identity"          # made here by `fedtail deploy identity .`; with pinned, only signed sums are answered
# pinned = []                    # identity.pub of every node, as text, from its operator and not through the server
# colluding = 0                  # so many other nodes may be on that server's side
"""


@dataclass(frozen=True)
class DeploymentFolder:
    """The paths of the files and folders in a deployment's folder, `path`."""

    path: Path

    @property
    def app_folder(self) -> Path:
        """The folder `app` of the Flower app, which `flwr run` takes."""
        return self.path / "app"

    @property
    def server_folder(self) -> Path:
        """The folder `server` with what the server needs: certificates, its key, and the configuration of `flwr`."""
        return self.path / "server"

    @property
    def home_folder(self) -> Path:
        """The folder `server/home` in which `flwr` finds its configuration; the environment variable FLWR_HOME names it."""
        return self.server_folder / "home"

    @property
    def node_keys(self) -> Path:
        """The folder `server/nodes` with NAME.pub and NAME.crt of each node: by them the server knows its nodes."""
        return self.server_folder / "nodes"

    def node_folder(self, name: str) -> Path:
        """The folder `nodes/NAME` with all that one node needs; it is copied to the node."""
        return self.path / "nodes" / name

    def write_superlink_config(self, address: str) -> None:
        """Write home/config.toml, with which `flwr` finds the SuperLink at `address` ("host:port") and verifies its identity."""
        self.home_folder.mkdir(parents=True, exist_ok=True)
        (self.home_folder / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{address}"\n'
            f'root-certificates = "{self.server_folder / "ca.crt"}"\n', encoding="utf-8")


def write_deployment_folder(path: Path, experiment: Path, nodes: Sequence[str], host: str, port: int,
                            **of_nodes: Any) -> DeploymentFolder:
    """Write everything for a deployment of the file `experiment` into a folder, with fresh keys, and return its paths.

    `host` and `port` are how nodes reach the server; `of_nodes` are the arguments of `write_node_folder` for all nodes. Raises
    FileExistsError where the folder is not empty, and ValueError for fewer than two nodes, two of one name, and names that a node
    cannot have.
    """
    check_new_folder(path, nodes)
    folder = DeploymentFolder(path.resolve())
    folder.app_folder.mkdir(parents=True)
    shutil.copyfile(experiment, folder.path / "experiment.toml")
    (folder.app_folder / "pyproject.toml").write_text(
        APP.format(experiment=folder.path / "experiment.toml", out=folder.path / "runs" / "run", nodes=len(nodes),
                   node_keys=folder.node_keys),
        encoding="utf-8")
    make_certificates(folder.server_folder, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))
    write_gate_address(folder.server_folder, "0.0.0.0", port)
    for name in nodes:
        write_node_folder(folder, name, experiment, **of_nodes)
        write_gate_address(folder.node_folder(name), host, port)
    return folder


def check_new_folder(path: Path, nodes: Sequence[str]) -> None:
    """Raise FileExistsError unless the folder `path` is empty, and ValueError unless `nodes` are names that nodes may have.

    There must be two or more, all different: letters, digits, - and _, at most 64, and not "server".
    """
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty. Keys are made once: choose a new folder.")
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        raise ValueError(f"a deployment needs two nodes or more, of different names; got {', '.join(nodes) or 'none'}.")
    for name in nodes:
        check_name(name)


def check_name(name: str) -> None:
    """Raise ValueError unless a node may have this name: letters, digits, - and _, at most 64, and not "server"."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name) or name == "server":
        raise ValueError(f"a node is named by letters, digits, - and _, and not server; got {name!r}.")


def write_gate_address(folder: Path, host: str, port: int) -> None:
    """Write gate.toml into the folder of the server (where its gate listens) or of a node (how it reaches the gate)."""
    (folder / "gate.toml").write_text(f'host = "{host}"\nport = {port}\n', encoding="utf-8")


def write_node_folder(folder: DeploymentFolder, name: str, experiment: Path, data: str = "data.parquet", minimum: int = 3,
                      keys: str = "name", test_share: float = 0.0) -> None:
    """Write the folder of the node `name`: node.toml, a new key pair with its certificate, ca.crt, a copy of the experiment file.

    `folder` is the deployment's, `experiment` the file to copy. `data`, `minimum`, `keys` and `test_share` go into node.toml: the
    data file in that folder, over how many nodes a row is summed at least, where clients' keys come from, and the share of
    examples held out. Raises FileExistsError where it has a key.
    """
    place = folder.node_folder(name)
    make_node_key(place)
    make_node_certificate(place)
    folder.node_keys.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(place / "key.pub", folder.node_keys / f"{name}.pub")
    shutil.copyfile(place / "node.crt", folder.node_keys / f"{name}.crt")
    shutil.copyfile(experiment, place / "experiment.toml")
    shutil.copyfile(folder.server_folder / "ca.crt", place / "ca.crt")
    (place / "node.toml").write_text(NODE.format(name=name, data=data, minimum=minimum, keys=keys, test_share=test_share),
                                     encoding="utf-8")


def environment_command(folder: DeploymentFolder) -> str:
    """The shell command after which `flwr` on the server finds the deployment's SuperLink, and sends no telemetry."""
    return f"export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME={quote(str(folder.home_folder))}"


def register_command(folder: DeploymentFolder, name: str) -> str:
    """The shell command by which Flower knows the key of the node `name`, as the server has it now."""
    return f"flwr supernode register {quote(str(folder.node_keys / name))}.pub {LINK}"


def startup_commands(folder: DeploymentFolder, nodes: Sequence[str], host: str, port: int) -> str:
    """A text with the shell commands that start the server, register and start the nodes, and submit or resume a run.

    `folder` is the deployment's, `nodes` are the names of its nodes; `host` and `port` are how nodes reach the server.
    """
    registered = "\n".join(f"  {register_command(folder, name)}" for name in nodes)
    return f"""\
Copy each nodes/NAME to its node over a way you trust, and delete it here.
On the server: a gate on port {port}, and Flower's SuperLink behind it, on 127.0.0.1 only; it stays.
  fedtail deploy serve {folder.server_folder}
On the server, in another terminal, once:
  {environment_command(folder)}
{registered}
On each node, in its copy of nodes/NAME, with data named in node.toml (it connects to {host}:{port}, and listens nowhere).
Read the policy that the first command writes:
  fedtail node init node.toml
  fedtail node accept node.toml        (says in words what is asked, and prints the digest to accept it with)
  fedtail node run node.toml
Then on the server, where FLWR_HOME is set as above:
  flwr run {folder.app_folder} {LINK}
  flwr run {folder.app_folder} {LINK} --run-config resume=true     (after a crash: goes on from the last round)"""
