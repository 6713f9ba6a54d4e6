"""The app that a node runs: its own, which is installed there, whatever app was submitted to the server.

A SuperNode unpacks the app (FAB) that a SuperLink sends it into a folder, puts that folder first on Python's path, and imports
what the app names: who submits an app, and who holds the server, run code on all nodes. Flower's `--trusted-entities` checks
signatures that its hub attaches; it refuses every app that is submitted from a folder. So a node of ours takes no app from the
server: it is told that every run is of this app, and is given these bytes, which name `node_app` in the installed package and
hold no code.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import cache

PYPROJECT = b"""\
[project]
name = "fedtail-node"
version = "1.0.0"
description = "What a node of fedtail runs, whatever app a server was given"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedtail"

[tool.flwr.app.components]
serverapp = "fedtail.deployment.flower.server_app:app"
clientapp = "fedtail.deployment.flower.node_app:app"

[tool.flwr.app.config]
seed = 0
"""
NAME, VERSION = "fedtail/fedtail-node", "1.0.0"
WRITTEN = (1980, 1, 1, 0, 0, 0)      # the date of the files in it, so that its digest is the same everywhere


@cache
def own_app() -> tuple[str, bytes]:
    """The pair (SHA-256 in hexadecimal, bytes) of the app that every node runs, in Flower's format."""
    listed = f"pyproject.toml,{hashlib.sha256(PYPROJECT).hexdigest()},{8 * len(PYPROJECT)}".encode()
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml", WRITTEN), PYPROJECT)
        archive.writestr(zipfile.ZipInfo(".info/CONTENT", WRITTEN), listed)
    return hashlib.sha256(whole.getvalue()).hexdigest(), whole.getvalue()


def app_answer() -> bytes:
    """What a SuperNode is answered when it asks for the app of a run: the node's own, serialised."""
    from flwr.proto.fab_pb2 import Fab, GetFabResponse

    digest, content = own_app()
    return bytes(GetFabResponse(fab=Fab(hash_str=digest, content=content)).SerializeToString())


def with_own_app(answer: bytes) -> bytes:
    """A SuperLink's `answer` about a run, with the node's own app in the place of the one that was submitted.

    Of the settings of the run only a `seed` that is a whole number is kept. Raises ValueError for bytes that are no such answer.
    """
    from flwr.proto.run_pb2 import GetRunResponse
    from flwr.supercore.constant import TaskType
    from google.protobuf.message import DecodeError

    found = GetRunResponse()
    try:
        found.ParseFromString(answer)
    except DecodeError:
        raise ValueError("the server said something about a run that is not in Flower's format.") from None
    run = found.run
    run.fab_id, run.fab_version, run.fab_hash = NAME, VERSION, own_app()[0]
    run.primary_task_type = TaskType.SERVER_APP
    for name in list(run.override_config):
        if name != "seed" or run.override_config[name].WhichOneof("scalar") not in ("sint64", "uint64"):
            del run.override_config[name]
    return bytes(found.SerializeToString())
