"""Which Ray computes: one that this process uses already, one at an address, or a small one that is started here."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

LEAST_MEMORY = 2**28      # bytes for what actors are sent: models, sums, and examples that are not mapped
PATIENCE = 5.0            # seconds for an address to answer
_users: list[object] = []      # of the Ray that was started or joined here
_ours: list[str] = []          # its address, if it was started here


def need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ImportError("this needs Ray, which is not installed. Write pip install 'fedtail[ray]', or compute on this machine "
                          "alone: LocalFleet, engine.kind = \"local\".")


def join(address: str | None, cores: int, memory: int) -> Callable[[], None]:
    """Use a Ray; returns what lets go of it. It ends with its last user if it was started here, and is left alone if not."""
    if _is_running():
        _check_address(address)
        if not _users:
            return _nothing
    else:
        _users.clear()
        _ours.clear()
        _start(address, cores, memory)
    user = object()
    _users.append(user)
    return lambda: _leave(user)


def is_ours() -> bool:
    """Whether the Ray that is used was started here, so that its cores are nobody else's."""
    return _is_running() and sys.modules["ray"].get_runtime_context().gcs_address in _ours


def _is_running() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _start(address: str | None, cores: int, memory: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None and "ray" not in sys.modules:       # it is read once, when Ray is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")    # without, whoever reaches its ports may run code here
    if address not in (None, "auto"):
        _check_answers(str(address))
    ray: Any = importlib.import_module("ray")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init("local", num_cpus=cores, num_gpus=0, include_dashboard=False, object_store_memory=memory + LEAST_MEMORY, **quiet)
        _ours.append(ray.get_runtime_context().gcs_address)
        return
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError) as reason:
        raise _nobody(address, reason) from reason


def check_form(address: str | None) -> None:
    """Refuse what is not the address of a cluster."""
    _, colon, port = (address or "").rpartition(":")
    if address in (None, "auto") or ("//" not in str(address) and colon and port.isdigit()):
        return
    raise ValueError(f"address must be \"auto\" or HOST:PORT of a Ray cluster this machine belongs to, got {address!r}. From a "
                     "machine outside, send the run with `ray job submit`, and write \"auto\".")


def _check_answers(address: str) -> None:
    """Whether anybody listens there; Ray alone would try for ten minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as reason:
        raise _nobody(address, reason) from reason


def _nobody(address: str, reason: Exception) -> ConnectionError:
    return ConnectionError(f"no Ray answers at {address!r} ({reason}). Start one with `ray start --head`, or leave address out "
                           "to use the cores of this machine. If it asks for a token, set RAY_AUTH_MODE=token here too.")


def _check_address(address: str | None) -> None:
    import ray

    ours = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", ours):
        raise ValueError(f"address is {address!r}, but this process uses the Ray at {ours} already. Leave address out to use "
                         "that one, or call ray.shutdown() first.")


def _leave(user: object) -> None:
    if user in _users:
        _users.remove(user)
        if not _users and _is_running():
            sys.modules["ray"].shutdown()
            _ours.clear()


def _nothing() -> None:
    """Whoever started it ends it."""
