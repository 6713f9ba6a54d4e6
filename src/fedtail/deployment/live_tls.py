"""A TLS server whose certificates change while it listens: nodes that join or leave, keys that are replaced, no restart."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Stamp = tuple[tuple[str, int, int, int], ...]


def live_context(make: Callable[[], ssl.SSLContext], folder: Path) -> ssl.SSLContext:
    """A context that takes each handshake with `make()`, called anew when a file in `folder` or in its `nodes` has changed.

    While the files cannot be used, because one is being written or is not valid, handshakes go on with what was read last.
    """
    context = current = make()
    seen = folder_stamp(folder)

    def refresh(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give the handshake that begins the context of the files as they are now; `name` and `context` are not used."""
        nonlocal current, seen
        now = folder_stamp(folder)
        if now != seen:
            with suppress(OSError, ValueError):                 # an SSLError is an OSError
                current, seen = make(), now
        connection.context = current

    context.sni_callback = refresh
    return context


def folder_stamp(folder: Path) -> Stamp:
    """Names, inodes, sizes and times of the files in `folder` and in its folder `nodes`: another stamp where one has changed."""
    found = []
    for place in (folder, folder / "nodes"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            try:
                about = path.stat()
            except FileNotFoundError:
                continue
            found.append((str(path), about.st_ino, about.st_size, about.st_mtime_ns))
    return tuple(found)
