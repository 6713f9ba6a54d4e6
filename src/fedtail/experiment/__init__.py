"""Experiments in files: sections that name parts and their fields, checked against the parts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedtail.experiment.source import ExperimentError, Source
from fedtail.experiment.trust import AS_WRITTEN, Trust

if TYPE_CHECKING:
    from fedtail.experiment.experiment import Experiment, read_experiment, read_experiments, seeds_of

__all__ = ["AS_WRITTEN", "Experiment", "ExperimentError", "Source", "Trust", "read_experiment", "read_experiments", "seeds_of"]


def __getattr__(name: str) -> Any:
    """Import a public name of `fedtail.experiment.experiment` at first use, since that needs torch and reading a file does not.

    Python calls this for a name that the module does not define. Raises AttributeError for a name not in `__all__`.
    """
    if name not in __all__:
        raise AttributeError(f"module 'fedtail.experiment' has no attribute {name!r}")
    from fedtail.experiment import experiment
    return getattr(experiment, name)
