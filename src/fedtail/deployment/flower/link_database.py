"""What Flower calls a node: the number that its SuperLink gave the node's key, in the SuperLink's database server/link.db.

Flower's own list of nodes has numbers without names or keys, so that nobody could say which number is which node's.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cryptography.hazmat.primitives import serialization

DATABASE = "link.db"
QUERY = "SELECT node_id FROM node WHERE public_key = ? AND status != 'unregistered'"


def supernode_number(server: Path, public_key: Path) -> int | None:
    """The number under which the key in the file `public_key` is registered with the SuperLink; None where it is not.

    `server` is the server's folder; its database is only read, also while the SuperLink runs. Raises ValueError where there is no
    such key, or a database that cannot be read: a version of Flower may have changed its tables.
    """
    path = server / DATABASE
    if not path.is_file():
        return None                                         # no SuperLink ever ran here
    key = serialization.load_ssh_public_key(public_key.read_bytes())
    text = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)) as database:
            found = database.execute(QUERY, (text,)).fetchone()
    except sqlite3.Error as why:
        raise ValueError(f"{path} cannot be read: {why}.") from None
    return found[0] % 2**64 if found else None              # it is kept as a signed number, and written as an unsigned one
