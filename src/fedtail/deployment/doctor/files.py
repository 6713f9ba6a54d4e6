"""What lies in the folders of a deployment: secrets, certificates, and the settings of a node."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from fedtail.deployment.doctor.findings import TRUST, Finding, found

LONGEST = 1 << 14           # bytes of a file that may be a key
MANY = 5000                 # files in a folder that are looked at
SOON = timedelta(days=30)
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo
OWN = {"key", "key.pem", "identity"}      # a node's secrets
NO_GATE = ("There is no gate.toml: a SuperLink of Flower is on the network itself. Make the deployment anew by "
           "`fedtail deploy init`.")
ACCOUNTS = ("Whoever has an account on the server's machine reaches Flower's Control API on 127.0.0.1, and runs code as the "
            "server. Nodes run their own app only, by their own policy.")
NODE_ACCOUNTS = ("Whoever is root on this machine, or its operator, reads the data and the keys. Another account can use up the "
                 "machine, and so stop the node; it reads what is found open here, and nothing else of the node.")
POLICY = ("policy.toml can be read, and says: rounds of {policy.smallest_cohort} clients or more, {policy.smallest_tail} of this "
          "node's or more in a sum without noise, {policy.questions} questions in a round, {policy.repeats} held again; "
          "{policy.budget_text}. What it allows is tried below.")
IN_THE_CLEAR = "masked_only is off: this node answers in the clear to whoever speaks for the server. Remove it from node.toml."


def checks_of_server(folder: Path) -> Iterator[Finding]:
    """Look at the folder of a server, and at that of the deployment where it lies in one; yields what was found."""
    whole = folder.parent if (folder.parent / "experiment.toml").is_file() else folder
    secrets = list(private_keys(whole))
    yield _readable_secrets(secrets, whole)
    yield _authority_key(folder / "ca.crt", secrets, whole)
    nodes = [path for path, _ in secrets if path.name in OWN]
    yield found("nodes' secrets", [f"{_names(nodes, whole)}: secrets of nodes. Move each to its node, and delete it here."]
                if nodes else [], "No node's secret is here.")
    yield _certificates([folder / "ca.crt", folder / "server.pem", *sorted((folder / "nodes").glob("*.crt"))], whole)
    yield _bound_names(folder / "nodes")
    if (folder / "run.toml").is_file():
        yield found("gate", [], "Nodes connect to a cell of NVFlare, which takes bytes and no code.")
        return
    yield found("gate", [] if (folder / "gate.toml").is_file() else [NO_GATE], "Nodes connect to a gate.")
    yield Finding("accounts here", TRUST, ACCOUNTS)


def checks_of_node(folder: Path) -> Iterator[Finding]:
    """Look at the folder of a node, and try what a server could ask of it; yields what was found."""
    from fedtail.deployment.doctor.node_attacks import attacks_on_node
    from fedtail.deployment.policy import NodePolicy
    from fedtail.deployment.settings import NodeSettings

    secrets = [one for one in private_keys(folder) if one[0].relative_to(folder).parts[0] != "flower"]
    yield _readable_secrets(secrets, folder)
    yield _authority_key(folder / "ca.crt", secrets, folder)
    others = [path for path, _ in secrets if path.parent != folder or path.name not in OWN]
    yield found("others' secrets", [f"{_names(others, folder)}: no secret of this node. Delete it here."] if others else [],
                "Only this node's own secrets are here.")
    yield _certificates([folder / "ca.crt", folder / "node.crt"], folder)
    try:
        settings = NodeSettings.read(folder / "node.toml")
    except ValueError as why:
        yield found("settings", [str(why)], "")
        return
    yield found("masks", [] if settings.masked_only else [IN_THE_CLEAR], "Nothing is answered without masks.")
    try:
        policy = NodePolicy.read(settings.folder / settings.policy)
    except ValueError as why:
        yield found("policy", [str(why)], "")
    else:
        yield found("policy", [], POLICY.format(policy=policy))
    data = settings.folder / settings.data
    yield found("data", [f"{settings.data} is readable by every account on this machine. Run: chmod -R o-rwx {settings.data}"]
                if readable_by_all(data) else [], "Not readable by other accounts." if data.exists() else "There are none yet.")
    yield from attacks_on_node(settings)
    if settings.trust:
        yield Finding("trusted code", TRUST, f"Code of {', '.join(settings.trust)} is run here where the experiment names it.")
    yield Finding("accounts here", TRUST, NODE_ACCOUNTS)


def private_keys(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """The files below `folder` that hold a private key, each with its public key in DER, or b"" where it cannot be read here."""
    looked = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in ("data", "runs", "memory"))
        for name in sorted(names):
            path, looked = Path(place, name), looked + 1
            if looked > MANY:
                return
            if path.is_symlink() or path.stat().st_size > LONGEST:
                continue
            try:
                content = path.read_bytes()
            except OSError:
                continue
            if b"PRIVATE KEY" in content:
                yield path, _public_key(content)
            elif name == "identity":
                yield path, b""


def _public_key(private: bytes) -> bytes:
    """The public key, in DER, of the private key in PEM or OpenSSH's format; b"" where it has a password or is no key."""
    for load in (serialization.load_pem_private_key, serialization.load_ssh_private_key):
        try:
            return load(private, None).public_key().public_bytes(serialization.Encoding.DER, PUBLIC)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
    return b""


def _readable_secrets(secrets: Sequence[tuple[Path, bytes]], folder: Path) -> Finding:
    """Whether secrets may be read or written by others than their owner."""
    wide = [path for path, _ in secrets if stat.S_IMODE(path.stat().st_mode) & 0o077]
    return found("key files", [f"{_names(wide, folder)}: other accounts may read it. Run: chmod 600 {_names(wide, folder, ' ')}"]
                 if wide else [], f"{len(secrets)} secrets, for their owner only.")


def _authority_key(certificate: Path, secrets: Sequence[tuple[Path, bytes]], folder: Path) -> Finding:
    """Whether the key lies about with which anybody could certify another server."""
    check = "authority's key"
    try:
        authority = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    except (OSError, ValueError):
        return found(check, [f"{certificate.name} is missing or no certificate."], "")
    public = authority.public_bytes(serialization.Encoding.DER, PUBLIC)
    held = [path for path, one in secrets if one == public]
    return found(check, [f"{_names(held, folder)}: whoever has it certifies another server. Delete it; make a new authority."]
                 if held else [], "It is not here.")


def _certificates(paths: Sequence[Path], folder: Path) -> Finding:
    """Whether all certificates are valid now, by this machine's clock, and for another 30 days."""
    problems, now, first = [], datetime.now(UTC), datetime.max.replace(tzinfo=UTC)
    for path in paths:
        name = _names([path], folder)
        try:
            one = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            problems.append(f"{name} is missing or no certificate.")
            continue
        first = min(first, one.not_valid_after_utc)
        if one.not_valid_before_utc > now:
            problems.append(f"{name} is valid from {one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on: is the clock right?")
        elif one.not_valid_after_utc < now:
            problems.append(f"{name} has expired on {one.not_valid_after_utc:%Y-%m-%d}.")
        elif one.not_valid_after_utc < now + SOON:
            problems.append(f"{name} expires on {one.not_valid_after_utc:%Y-%m-%d}: make new ones before.")
    return found("certificates", problems, f"All {len(paths)} are valid; the first expires on {first:%Y-%m-%d}.")


def _bound_names(folder: Path) -> Finding:
    """Whether every node's name stands for one key, in its certificate as in its public key, and no key for two names."""
    problems, owner = [], dict[bytes, str]()
    for path in sorted(folder.glob("*.crt")):
        try:
            key = x509.load_pem_x509_certificate(path.read_bytes()).public_key()
            pinned = serialization.load_ssh_public_key(path.with_suffix(".pub").read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            problems.append(f"{path.stem} lacks a certificate or a public key that can be read.")
            continue
        one, other = (each.public_bytes(serialization.Encoding.DER, PUBLIC) for each in (key, pinned))
        if one != other:
            problems.append(f"{path.stem} has a certificate of another key than {path.stem}.pub.")
        if owner.setdefault(one, path.stem) != path.stem:
            problems.append(f"{path.stem} and {owner[one]} have the same key.")
    problems += [] if owner or problems else [f"{folder} pins no node."]
    return found("names and keys", problems, f"{len(owner)} names, each with a key of its own.")


def readable_by_all(path: Path) -> bool:
    """Whether any account of this machine can read the file, or a file in the folder, by all permissions on the way to it."""
    if not path.exists() or any(not each.stat().st_mode & stat.S_IXOTH for each in path.resolve().parents):
        return False
    if path.is_dir():
        return bool(path.stat().st_mode & stat.S_IXOTH) and any(one.stat().st_mode & stat.S_IROTH for one in path.iterdir())
    return bool(path.stat().st_mode & stat.S_IROTH)


def _names(paths: Sequence[Path], folder: Path, between: str = ", ") -> str:
    """The paths relative to a folder, at most five of them, with `between` between them."""
    short = [str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path) for path in paths]
    return between.join(short[:5]) + (f" and {len(short) - 5} more" if len(short) > 5 else "")
