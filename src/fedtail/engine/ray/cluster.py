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


def check_ray_installed() -> None:
    """Raise ImportError, with the command that installs Ray, if Ray is not installed; Ray itself is not imported."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("this needs Ray, which is not installed. Write pip install 'fedtail[ray]', or compute on this machine "
                          "alone: LocalFleet, engine.kind = \"local\".")


def join_ray(address: str | None, cores: int, memory: int, gpus: int = 0) -> Callable[[], None]:
    """Connect this process to a Ray cluster, starting one if needed; returns a function to call when it is no longer used.

    A cluster that this process is connected to already is used. Otherwise that at `address` is joined or, if that is None, a
    Ray is started on this machine, with `cores` cores, `gpus` GPUs and an object store of `memory` bytes plus 256 MiB. When all
    users have called the returned functions, a Ray started here is ended and one at an address is disconnected; a connection
    that was made elsewhere in this process is left alone. Raises ValueError where this process is connected to another address,
    and ConnectionError where no Ray answers at `address`.
    """
    if _ray_is_running():
        _check_same_cluster(address)
        if not _users:
            return _keep_ray_running
    else:
        _users.clear()
        _ours.clear()
        _start_or_join_ray(address, cores, memory, gpus)
    user = object()
    _users.append(user)
    return lambda: _remove_ray_user(user)


def ray_was_started_here() -> bool:
    """Whether this process is connected to a Ray that `join_ray` started, so that nobody else uses its cores."""
    return _ray_is_running() and sys.modules["ray"].get_runtime_context().gcs_address in _ours


def _ray_is_running() -> bool:
    """Whether Ray is imported and initialised in this process; does not import it."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _start_or_join_ray(address: str | None, cores: int, memory: int, gpus: int) -> None:
    """Start a Ray on this machine if `address` is None, else connect to the cluster at `address`.

    A new Ray gets `cores` cores, `gpus` GPUs and an object store of `memory` bytes plus 256 MiB, and its address is added to
    `_ours`. Sets environment variables that are unset: no usage statistics, and token authentication for a Ray that is started
    here before `ray` was imported. Raises ConnectionError where no Ray answers at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None and "ray" not in sys.modules:       # it is read once, when Ray is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")    # without, whoever reaches its ports may run code here
    if address not in (None, "auto"):
        _check_reachable(str(address))
    ray: Any = importlib.import_module("ray")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init("local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, object_store_memory=memory + LEAST_MEMORY,
                 **quiet)
        _ours.append(ray.get_runtime_context().gcs_address)
        return
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError) as reason:
        raise _unreachable_error(address, reason) from reason


def check_address_form(address: str | None) -> None:
    """Raise ValueError if `address` is not None, "auto" or HOST:PORT; nothing is contacted."""
    _, colon, port = (address or "").rpartition(":")
    if address in (None, "auto") or ("//" not in str(address) and colon and port.isdigit()):
        return
    raise ValueError(f"address must be \"auto\" or HOST:PORT of a Ray cluster this machine belongs to, got {address!r}. From a "
                     "machine outside, send the run with `ray job submit`, and write \"auto\".")


def _check_reachable(address: str) -> None:
    """Raise ConnectionError if nothing listens at `address`, HOST:PORT, within 5 s; Ray itself would try for ten minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as reason:
        raise _unreachable_error(address, reason) from reason


def _unreachable_error(address: str, reason: Exception) -> ConnectionError:
    """A ConnectionError, returned and not raised, saying that no Ray answers at `address`, for which `reason`, and what to do."""
    return ConnectionError(f"no Ray answers at {address!r} ({reason}). Start one with `ray start --head`, or leave address out "
                           "to use the cores of this machine. If it asks for a token, set RAY_AUTH_MODE=token here too.")


def _check_same_cluster(address: str | None) -> None:
    """Raise ValueError if `address` names another cluster than the one this process is connected to; None and "auto" name any."""
    import ray

    ours = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", ours):
        raise ValueError(f"address is {address!r}, but this process uses the Ray at {ours} already. Leave address out to use "
                         "that one, or call ray.shutdown() first.")


def _remove_ray_user(user: object) -> None:
    """Remove `user` from the list of Ray's users and, if it was the last, call `ray.shutdown()`.

    That ends a Ray that was started here, and disconnects from one at an address. Does nothing for a user that was removed
    before.
    """
    if user in _users:
        _users.remove(user)
        if not _users and _ray_is_running():
            sys.modules["ray"].shutdown()
            _ours.clear()


def _keep_ray_running() -> None:
    """Do nothing; `join_ray` returns this where the connection to Ray was made elsewhere in this process and must stay."""
