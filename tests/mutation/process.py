"""A function in a forked process: what it prints goes to a file, and it ends in time or is killed with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

TIMEOUT = -1
PARENT_DEATH_SIGNAL = 1     # PR_SET_PDEATHSIG of prctl(2)
SPARE_MEMORY = 6 << 30      # bytes a mutant may take beyond what is there already


def run_forked(work: Callable[[], int], log: Path, seconds: float) -> int:
    """The exit code of `work`, which is TIMEOUT where it took longer."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become_child(work, log)
    try:
        code = _wait(child, time.monotonic() + seconds)
    except BaseException:
        _kill(child)
        os.waitpid(child, 0)
        raise
    _kill(child)                # whatever it has left behind
    return code


def die_with_parent() -> None:
    """This process ends when the one that forked it does, however that ends (on Linux)."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _become_child(work: Callable[[], int], log: Path) -> None:
    code = 70
    try:
        os.setsid()
        die_with_parent()
        out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        limit = _address_space() + SPARE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, until: float) -> int:
    pause = 0.005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if time.monotonic() > until:
            _kill(child)
            os.waitpid(child, 0)
            return TIMEOUT
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
