"""Experiments in files: sections that name parts and their fields, checked against the parts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedtail.deprecated import object_of_old_name
from fedtail.experiment.source import ExperimentError, Source
from fedtail.experiment.trust import AS_WRITTEN, Trust

if TYPE_CHECKING:
    from fedtail.experiment.experiment import Experiment, parse_seeds, read_experiment, read_experiments

__all__ = ["AS_WRITTEN", "Experiment", "ExperimentError", "Source", "Trust", "parse_seeds", "read_experiment", "read_experiments"]


def __getattr__(name: str) -> Any:
    """Import a public name of `fedtail.experiment.experiment` at first use, since that needs torch and reading a file does not.

    Python calls this for a name that the module does not define. A name that was renamed gives the new object with a
    DeprecationWarning; any other raises AttributeError.
    """
    if name not in __all__:
        return object_of_old_name(__name__, name)
    from fedtail.experiment import experiment
    return getattr(experiment, name)
