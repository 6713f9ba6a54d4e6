"""Data that several runs share: loaded once, and again only where a run needs others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedtail.experiment.experiment import Experiment
from fedtail.runs.measurements import Populations


class LoadedData:
    """The data that were loaded last, so that several methods on the same data load them once."""

    def __init__(self) -> None:
        """Begin with nothing loaded."""
        self._key: Any = None
        self._splits: Populations = {}

    def loader_for(self, experiment: Experiment, seed: int) -> Callable[[], Populations]:
        """A function without arguments that returns the populations of an experiment and seed by name of their split.

        It loads them when it is called, unless those loaded last have the same data section and, where data depend on it, the
        same seed.
        """
        def load() -> Populations:
            """The populations by name of their split; those that were loaded last, or loaded now and stored in their place."""
            key = (experiment.data.as_table(), seed if not experiment.data.is_same_for_all_seeds else None)
            if self._key != key:
                self._key, self._splits = key, experiment.data.load(seed)
            return self._splits
        return load
