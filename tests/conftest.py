"""Shaped annotations are checked at run time, and small work runs on one thread."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from jaxtyping import install_import_hook

sys.path.append(str(Path(__file__).parent / "attacks"))      # so that a test can put a defect back in and see an attack find it

with install_import_hook(["fedtail.risk", "fedtail.quantiles"], "shape_checker.check"):
    import fedtail.quantiles
    import fedtail.risk  # noqa: F401

import torch
from hypothesis import settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:      # as a shell's background jobs have it: tests send real interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("fedtail", deadline=None, derandomize=True)      # the suite must not flake
settings.load_profile("fedtail")
