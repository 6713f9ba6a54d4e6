"""Nodes that are added to a deployment, or removed from it for good, while its server may be running: by files in its folder."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509

from fedtail.deployment.flower.folder import DeploymentFolder, check_name, write_gate_address, write_node_folder
from fedtail.deployment.keys import make_node_certificate, make_node_key
from fedtail.deployment.node_process import read_server
from fedtail.deployment.settings import NodeSettings

KEY_FILES = ("key", "key.pub", "key.pem", "node.crt")      # of a node; the second and the last are the server's too
ALIKE = ("minimum", "keys", "test_share", "data")          # settings that a new node shares with one that is there


def open_deployment(path: Path) -> DeploymentFolder:
    """The deployment whose folder is `path`, or whose server's folder it is; raises ValueError where there is none."""
    for place in (path.resolve(), path.resolve().parent):
        folder = DeploymentFolder(place)
        if folder.node_keys.is_dir() and (place / "experiment.toml").is_file():
            return folder
    raise ValueError(f"{path} is no folder of a deployment. `fedtail deploy init` makes one.")


def is_over_flower(folder: DeploymentFolder) -> bool:
    """Whether Flower carries the messages of the deployment; else NVFlare does."""
    return (folder.app_folder / "pyproject.toml").is_file()


def node_names(folder: DeploymentFolder) -> list[str]:
    """The names of the deployment's nodes, in order: those whose public key the server has."""
    return sorted(path.stem for path in folder.node_keys.glob("*.pub"))


def add_node(folder: DeploymentFolder, name: str, test_share: float = 0.0) -> Path:
    """Make the folder of a new node `name` and admit it at the server, which need not be restarted; returns that folder.

    It has the settings of a node that is there, where its folder still is; else defaults and `test_share`. Raises ValueError for
    a name that a node cannot have, and FileExistsError where there is a node of that name.
    """
    check_name(name)
    place = folder.node_folder(name)
    if name in node_names(folder) or (place / "key").exists():
        raise FileExistsError(f"there is a node {name} already. Choose another name, or remove that one first.")
    if (place / "node.toml").is_file():                      # it was there before: its settings are its operator's
        make_node_key(place)
        make_node_certificate(place)
        shutil.copyfile(folder.server_folder / "ca.crt", place / "ca.crt")
    else:
        write_node_folder(folder, name, folder.path / "experiment.toml", **_settings_of_another(folder, test_share))
    if is_over_flower(folder):
        port = int(read_server(folder.server_folder / "gate.toml").rpartition(":")[2])
        write_gate_address(place, server_hosts(folder)[0], port)
    else:
        host, port = server_address(folder)
        (place / "server.toml").write_text(f'host = "{host}"\nport = {port}\n', encoding="utf-8")
    admit(folder, name)
    return place


def admit(folder: DeploymentFolder, name: str) -> None:
    """Copy the public key and the certificate of the node `name` to the server, each at once: it may connect from now on."""
    for ours, theirs in (("node.crt", f"{name}.crt"), ("key.pub", f"{name}.pub")):
        beside = folder.node_keys / f".{theirs}.writing"
        shutil.copyfile(folder.node_folder(name) / ours, beside)
        beside.replace(folder.node_keys / theirs)


def remove_node(folder: DeploymentFolder, name: str) -> int:
    """Exclude the node `name` for good, also from a run that is under way; returns how many nodes are left.

    Its certificate and public key are deleted here, so that its secrets open nothing any more, and its secrets too where this
    machine still has them. Raises ValueError where there is no such node.
    """
    names = node_names(folder)
    if name not in names:
        raise ValueError(f"there is no node {name!r}. There are {', '.join(names)}.")
    for path in (folder.node_keys / f"{name}.crt", folder.node_keys / f"{name}.pub",
                 *(folder.node_folder(name) / one for one in KEY_FILES)):
        path.unlink(missing_ok=True)
    return len(names) - 1


def server_address(folder: DeploymentFolder) -> tuple[str, int]:
    """The host name and port at which nodes find the server: of its certificate, and of its settings."""
    from fedtail.deployment.nvflare.server import read_settings

    return server_hosts(folder)[0], int(read_settings(folder.server_folder / "run.toml")["port"])


def server_hosts(folder: DeploymentFolder) -> list[str]:
    """The host names and addresses in the server's certificate, the first one that which nodes use."""
    certificate = x509.load_pem_x509_certificate((folder.server_folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one.value) for one in names]


def _settings_of_another(folder: DeploymentFolder, test_share: float) -> dict[str, Any]:
    """The arguments of `write_node_folder` for a new node: the settings of one that is there, or `test_share` and few nodes."""
    for name in node_names(folder):
        with suppress(ValueError, OSError):
            other = NodeSettings.read(folder.node_folder(name) / "node.toml")
            return {one: getattr(other, one) for one in ALIKE}
    return {"test_share": test_share, "minimum": min(3, len(node_names(folder)) + 1)}


def replace_files(source: Path, place: Path, names: tuple[str, ...]) -> None:
    """Move files from the folder `source` into `place`, each at once, over those that are there."""
    for name in names:
        os.replace(source / name, place / name)
