"""Runs on disk: folders that survive a crash, go on where they stopped, and can be read without training anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedtail.runs.files import RunError
from fedtail.runs.run_folder import RunFolder, find_runs

if TYPE_CHECKING:
    from fedtail.runs.execution import Interrupted, run
    from fedtail.runs.recording import Watch

__all__ = ["Interrupted", "RunError", "RunFolder", "Watch", "find_runs", "run"]


def __getattr__(name: str) -> Any:
    """Import `run`, `Interrupted` or `Watch` at first use, since training needs torch and reading runs does not.

    Python calls this for a name that the module does not define. Raises AttributeError for any other name.
    """
    if name in ("Interrupted", "run"):
        from fedtail.runs import execution
        return getattr(execution, name)
    if name == "Watch":
        from fedtail.runs.recording import Watch
        return Watch
    raise AttributeError(f"module 'fedtail.runs' has no attribute {name!r}")
