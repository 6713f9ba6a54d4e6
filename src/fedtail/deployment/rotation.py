"""Secrets of a deployment that are replaced: the key of a node, or the server's certificate and the authority that signed it.

The key of a node changes at once: from that moment its old key opens nothing, and the node is away until it has the new one. The
server's certificate changes in two steps, because every node must know the new authority first: after the first, nodes that are
given the new ca.crt trust both; after the second, the server has the new certificate, and those that are given ca.crt again trust
the new authority only. Where the server's key is in the wrong hands, both steps are one.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.keys import make_certificates, make_node_certificate, make_node_key
from fedtail.deployment.membership import KEY_FILES, admit, node_names, replace_files, server_hosts

SOON = 30                                    # days before a certificate expires: `status` and the run's log warn from then on
AUTHORITY = ("ca.crt", "server.pem", "server.key")


@dataclass(frozen=True)
class Expiry:
    """When a certificate expires: `what` it is ("node north"), its last moment, and the days until then, negative afterwards."""

    what: str
    until: datetime
    days: float

    @property
    def warning(self) -> str:
        """A sentence where it has expired or soon will; "" otherwise."""
        if self.days < 0:
            return f"the certificate of {self.what} has expired: nobody accepts it. Replace it with `fedtail deploy rotate`."
        return f"the certificate of {self.what} expires in {self.days:.0f} days. Replace it with `fedtail deploy rotate`." if (
            self.days < SOON) else ""


def rotate_node(folder: DeploymentFolder, name: str) -> Path:
    """Make new keys for the node `name` and admit these instead of the old ones; returns its folder, to be copied to the node.

    The old keys are dead when this returns. Raises ValueError where there is no such node.
    """
    if name not in node_names(folder):
        raise ValueError(f"there is no node {name!r}. There are {', '.join(node_names(folder))}.")
    place = folder.node_folder(name)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as fresh:
        make_node_key(Path(fresh))
        make_node_certificate(Path(fresh))
        (folder.node_keys / f"{name}.crt").unlink(missing_ok=True)      # not the .pub: without it, the node would be removed
        replace_files(Path(fresh), place, KEY_FILES)
    admit(folder, name)
    return place


def prepare_authority(folder: DeploymentFolder) -> None:
    """The first step for the server's certificate: make a new authority and certificate, and have nodes' ca.crt trust both.

    The new ones are in server/next. Raises FileExistsError where this was done before and not finished.
    """
    fresh = folder.server_folder / "next"
    if fresh.exists():
        raise FileExistsError(f"{fresh} exists: new certificates were made and not finished. Finish that first (--finish).")
    make_certificates(fresh, server_hosts(folder))
    both = (folder.server_folder / "ca.crt").read_bytes() + (fresh / "ca.crt").read_bytes()
    (fresh / "ca-both.crt").write_bytes(both)
    _give_nodes(folder, fresh / "ca-both.crt")


def finish_authority(folder: DeploymentFolder) -> None:
    """The second step: the server has the new certificate, and nodes' ca.crt trusts the new authority only.

    Raises ValueError where the first step was not done.
    """
    fresh = folder.server_folder / "next"
    if not all((fresh / one).is_file() for one in AUTHORITY):
        raise ValueError("no new certificates are prepared. Run `fedtail deploy rotate` without --finish first.")
    replace_files(fresh, folder.server_folder, AUTHORITY)
    shutil.rmtree(fresh)
    _give_nodes(folder, folder.server_folder / "ca.crt")


def _give_nodes(folder: DeploymentFolder, authority: Path) -> None:
    """Copy the file `authority` to ca.crt in each node's folder on this machine, from which it goes to the node."""
    for name in node_names(folder):
        if folder.node_folder(name).is_dir():
            beside = folder.node_folder(name) / ".ca.crt.writing"
            shutil.copyfile(authority, beside)
            beside.replace(folder.node_folder(name) / "ca.crt")


def expiries(folder: DeploymentFolder) -> list[Expiry]:
    """When the certificates of the authority, the server and the nodes expire, the next one first."""
    files = {"the authority (ca.crt)": folder.server_folder / "ca.crt", "the server": folder.server_folder / "server.pem",
             **{f"node {path.stem}": path for path in sorted(folder.node_keys.glob("*.crt"))}}
    return sorted((expiry(what, path) for what, path in files.items() if path.is_file()), key=lambda one: one.until)


def expiry(what: str, path: Path) -> Expiry:
    """When the certificate in the file at `path`, that of `what`, expires; the first to expire where there are several."""
    until = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(path.read_bytes()))
    return Expiry(what, until, (until - datetime.now(UTC)).total_seconds() / 86400)
