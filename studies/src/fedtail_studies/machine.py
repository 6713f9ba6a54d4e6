"""What made a result: versions and the kind of machine, without its name or paths."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any


def made_by(command: str, device: str) -> dict[str, Any]:
    """An entry of `runs` in a results file."""
    import numpy
    import torch

    from fedtail.version import __version__

    machine: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        machine["gpu"] = torch.cuda.get_device_name(device)
    versions = {"fedtail": __version__, "python": platform.python_version(), "torch": torch.__version__,
                "numpy": numpy.__version__}
    return {"command": command, "date": date.today().isoformat(), "machine": machine, "versions": versions}


def processor() -> str:
    """The kind of processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()
