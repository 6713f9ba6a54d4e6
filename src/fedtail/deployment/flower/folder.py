"""The folder of a deployment: an app for `flwr run`, what the server needs, and what each node needs.

    app/pyproject.toml      all that Flower sends to nodes: the names of our two apps, and the settings of a run
    experiment.toml         the method and the model
    server/                 certificate and key; home/config.toml, with which `flwr` finds the SuperLink
    nodes/NAME/             its settings and its key; copy the folder to the node, and nothing else
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtail.deployment.keys import make_certificates, make_node_key

LINK = "fedtail"            # what `flwr run app fedtail` calls the SuperLink
APP = """\
# For `flwr run`: both apps are in the installed package, and nothing else travels to the nodes.
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
    FileExistsError where the folder is not empty, and ValueError for fewer than two nodes or two of one name.
    """
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty. Keys are made once: choose a new folder.")
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        raise ValueError(f"a deployment needs two nodes or more, of different names; got {', '.join(nodes) or 'none'}.")
    folder = DeploymentFolder(path.resolve())
    folder.app_folder.mkdir(parents=True)
    shutil.copyfile(experiment, folder.path / "experiment.toml")
    (folder.app_folder / "pyproject.toml").write_text(
        APP.format(experiment=folder.path / "experiment.toml", out=folder.path / "runs" / "run", nodes=len(nodes),
                   node_keys=folder.node_keys),
        encoding="utf-8")
    make_certificates(folder.server_folder, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))
    folder.write_superlink_config(f"{host}:{port}")
    for name in nodes:
        write_node_folder(folder, name, experiment, **of_nodes)
        (folder.node_folder(name) / "superlink.toml").write_text(f'host = "{host}"\nport = {port}\n', encoding="utf-8")
    return folder


def write_node_folder(folder: DeploymentFolder, name: str, experiment: Path, data: str = "data.parquet", minimum: int = 3,
                      keys: str = "name", test_share: float = 0.0) -> None:
    """Write the folder of the node `name`: node.toml, a new key pair, the server's certificate, a copy of the experiment file.

    `folder` is the deployment's, `experiment` the file to copy. `data`, `minimum`, `keys` and `test_share` go into node.toml: the
    data file in that folder, over how many nodes a row is summed at least, where clients' keys come from, and the share of
    examples held out. Raises FileExistsError where it has a key.
    """
    place = folder.node_folder(name)
    make_node_key(place)
    folder.node_keys.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(place / "key.pub", folder.node_keys / f"{name}.pub")
    shutil.copyfile(experiment, place / "experiment.toml")
    shutil.copyfile(folder.server_folder / "ca.crt", place / "ca.crt")
    (place / "node.toml").write_text(NODE.format(name=name, data=data, minimum=minimum, keys=keys, test_share=test_share),
                                     encoding="utf-8")


def startup_commands(folder: DeploymentFolder, nodes: Sequence[str], host: str, port: int) -> str:
    """A text with the shell commands that start the server, register and start the nodes, and submit or resume a run.

    `folder` is the deployment's, `nodes` are the names of its nodes; `host` and `port` are how nodes reach the server.
    """
    server, quiet = folder.server_folder, "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
    registered = "\n".join(f"  flwr supernode register {folder.node_folder(name) / 'key.pub'} {LINK}" for name in nodes)
    return f"""\
On the server:
  {quiet} FLWR_HOME={folder.home_folder}
  flower-superlink --host 0.0.0.0 --port {port} --database {server / 'link.db'} --enable-supernode-auth \\
    --ssl-ca-certfile {server / 'ca.crt'} --ssl-certfile {server / 'server.pem'} --ssl-keyfile {server / 'server.key'} \\
    --disable-runtime-dependency-installation
{registered}
On each node, in its copy of nodes/NAME, with data named in node.toml; read the policy that the first command writes:
  fedtail node init node.toml
  fedtail node accept node.toml        (says in words what is asked, and prints the digest to accept it with)
  fedtail node run node.toml           (or the command that it runs:)
  {quiet}
  flower-supernode --superlink {host}:{port} --root-certificates ca.crt --auth-supernode-private-key key \\
    --node-config 'settings="'$PWD'/node.toml"'
Then on the server:
  flwr run {folder.app_folder} {LINK}
  flwr run {folder.app_folder} {LINK} --run-config resume=true     (after a crash: goes on from the last round)"""
