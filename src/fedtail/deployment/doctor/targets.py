"""What the doctor examines: the folder of a deployment, of its server or of a node, or an address as a stranger sees it."""

from __future__ import annotations

from pathlib import Path

from fedtail.deployment.doctor.attacks import attacks_by_node, attacks_from_outside
from fedtail.deployment.doctor.files import checks_of_node, checks_of_server
from fedtail.deployment.doctor.findings import Finding
from fedtail.deployment.doctor.node_ports import attacks_on_node_ports
from fedtail.reading import TOML_BYTES, read_text, toml_tables

HERE = "127.0.0.1"


def parse_address(text: str) -> tuple[str, int]:
    """The pair (host, port) in the text "HOST:PORT"; raises ValueError for any other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"an address is HOST:PORT, as in fl.example.org:8000; got {text!r}.")
    return host.strip("[]"), int(port)


def examine_address(host: str, port: int, authority: Path | None = None) -> list[Finding]:
    """What somebody can do who has the address of a deployment and its public certificate, the file `authority`."""
    if authority is not None and not authority.is_file():
        raise ValueError(f"there is no file {authority}. It is ca.crt of the deployment, which every node has.")
    return list(attacks_from_outside(host, port, authority))


def examine_folder(folder: Path, address: tuple[str, int] | None = None) -> list[Finding]:
    """What is open in a deployment, of which `folder` is the whole, the server's or a node's folder.

    The files in it are looked at, and its port is attacked: by default the one that is written there, and with `address` (host,
    port) another. Where the keys of a node are there, what its holder could do is tried too. Raises ValueError for any other
    folder.
    """
    folder = folder.resolve()
    if (folder / "node.toml").is_file():
        host, port = address or _written_address(folder, "gate.toml", "server.toml")
        return [*checks_of_node(folder), *attacks_on_node_ports(folder), *attacks_from_outside(host, port, folder / "ca.crt"),
                *_by_node(folder, host, port)]
    server = folder / "server" if (folder / "server" / "server.key").is_file() else folder
    if not (server / "server.key").is_file():
        raise ValueError(f"{folder} is no folder of a deployment, a server or a node: it has no node.toml and no server.key.")
    host, port = address or (HERE, _written_address(server, "gate.toml", "run.toml")[1])
    found = [*checks_of_server(server), *attacks_from_outside(host, port, server / "ca.crt")]
    nodes = sorted(path.parent for path in server.parent.glob("nodes/*/key.pem"))
    return found + (_by_node(nodes[0], host, port) if nodes else [])


def _by_node(node: Path, host: str, port: int) -> list[Finding]:
    """What the holder of the keys in a node's folder can do; [] where they are not all there."""
    whole = all((node / name).is_file() for name in ("node.crt", "key.pem"))
    return list(attacks_by_node(host, port, node)) if whole else []


def _written_address(folder: Path, *names: str) -> tuple[str, int]:
    """The pair (host, port) in the first of these files that is in the folder; raises ValueError where there is none."""
    for name in names:
        if (folder / name).is_file():
            said = toml_tables(read_text(folder / name, TOML_BYTES, "an address"), name)
            host, port = said.get("host", HERE), said.get("port")
            if isinstance(host, str) and type(port) is int:
                return host, port
    raise ValueError(f"{folder} does not say where the server is. Write --at HOST:PORT.")
