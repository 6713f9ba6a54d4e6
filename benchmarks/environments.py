"""A virtual environment for each peer, with the versions pinned in `peers/<peer>.txt`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PEERS = ("pfl", "fluke", "flwr", "fedjax")
SHOWN = ("torch", "numpy", "fedtail", "pfl", "fluke-fl", "flwr", "ray", "fedjax", "jax", "jaxlib", "dm-haiku")


def python_of(peer: str) -> Path:
    return HERE / ".envs" / peer / "bin" / "python"


def prepare(peer: str) -> str | None:
    """Make the environment unless it is there; the reason where that fails."""
    wanted, folder = (HERE / "peers" / f"{peer}.txt").read_text(), HERE / ".envs" / peer
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return None
    folder.parent.mkdir(exist_ok=True)
    install = [python_of(peer), "-m", "pip", "install", "--disable-pip-version-check", "-r", HERE / f"peers/{peer}.txt"]
    for command in ([sys.executable, "-m", "venv", folder], install):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR")]
            return (lines or (done.stderr or done.stdout).splitlines())[-1][:300]
    stamp.write_text(wanted)
    return None


def versions(python: Path | str = sys.executable) -> dict[str, str]:
    """What is installed, of what matters here."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
                            capture_output=True, text=True).stdout
    return {row["name"]: row["version"] for row in json.loads(listed or "[]") if row["name"].lower() in SHOWN}


def machine() -> dict[str, object]:
    """Where the numbers come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count(), "memory_gib": round(memory),
            "python": platform.python_version(), "system": platform.platform()}


def commit() -> str:
    """The commit that is measured, and whether the tree has changes on top."""
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True).stdout.strip()
    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "--", "../src") else "")
