"""Experiments in files: sections that name parts and their fields, checked against the parts themselves."""

from fedtail.experiment.experiment import Experiment, read_experiment, read_experiments, seeds_of
from fedtail.experiment.source import ExperimentError, Source

__all__ = ["Experiment", "ExperimentError", "Source", "read_experiment", "read_experiments", "seeds_of"]
