"""An experiment on a deployment: the data are at the nodes, sums are masked, and one question finds the tail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtail.channel import Channel, SecureChannel
from fedtail.experiment.experiment import Experiment, build_experiment, build_experiments, pick_method
from fedtail.experiment.source import ExperimentError, Source, Trusted

ONE_QUESTION = {"part": "ExactQuantile", "bits": 12}
TAILS = (None, "Superquantile", "TailFilter")
BY = "the deployment"


def deployed_experiments(path: str | Path, method: str = "", trust: Trusted = ()) -> list[Experiment]:
    """The methods of a file, or the one called `method`, with the defaults of deployments; its data section is not used.

    Code of your own is imported only from the folders and packages in `trust`. An ExperimentError names the key at fault.
    """
    source = Source.read(path, trust=trust)
    source = replace(source, tables={**source.tables, "data": {"kind": "digits"}})      # never read: nodes have their own
    if method:
        source = pick_method(source, method)
    views = [one.source for one in build_experiments(source, Path(path).stem)]
    return [build_experiment(_with_single_tail_question(view), Path(path).stem) for view in views]


def deployed_experiment(path: str | Path, method: str = "", trust: Trusted = ()) -> Experiment:
    """The only method of a file, or the one called `method`, with the defaults of deployments.

    Code of your own is imported only from what `trust` names. An ExperimentError where the file has several and none is chosen.
    """
    found = deployed_experiments(path, method, trust)
    if len(found) > 1:
        raise ExperimentError(f"{path} holds {len(found)} methods: {', '.join(one.name for one in found)}. Say which one is "
                              "deployed with method.")
    return found[0]


def _with_single_tail_question(source: Source) -> Source:
    """The source with a 12-bit quantile for its tail, one question instead of four, where the file does not choose a quantile."""
    risk = source.table("risk")
    if "tail_fraction" not in risk or risk.get("part") not in TAILS or "quantile" in risk:
        return source
    return source.with_value(("risk", "quantile"), ONE_QUESTION, BY)


def channel_for(experiment: Experiment, population: Any) -> Channel:
    """The channel of the file; where it names none, secure sums over more than half of the clients expected in a cohort."""
    if "channel" in experiment.source.tables:
        return experiment.channel
    expected = experiment.algorithm.sample.expected_size(population)
    return SecureChannel(threshold=max(2, experiment.algorithm.minimum, int(expected) // 2 + 1))


def deployed_table(experiment: Experiment, channel: Channel, seed: int) -> dict[str, Any]:
    """The resolved experiment for one seed as plain values, for the run's folder; without what a deployment does not use."""
    table = replace(experiment, channel=channel).table(seed)
    unused = ("data", "engine", "folder", *(() if experiment.evaluate.on_nodes else ("evaluate",)))
    return {name: value for name, value in table.items() if name not in unused}
