"""An experiment on a deployment: the data are at the nodes, sums are masked, and one question finds the tail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtail.channel import Channel, SecureChannel
from fedtail.experiment.experiment import Experiment, build_experiment, build_experiments, pick_method
from fedtail.experiment.noise_section import has_noise_from_budget
from fedtail.experiment.source import ExperimentError, Source, Trusted

ONE_QUESTION = {"part": "ExactQuantile", "bits": 12}
TAILS = (None, "Superquantile", "TailFilter")
BY = "the deployment"


def deployed_experiments(path: str | Path, method: str = "", trust: Trusted = ()) -> list[Experiment]:
    """The experiments of the file at `path`, one for each method, or a list of the one called `method`.

    They have the defaults of deployments. The file's data section is ignored, because nodes have their own data; a tail without a
    `quantile` gets one that asks a single question. Code that is not fedtail's is imported only from the folders and packages in
    `trust`. Raises ExperimentError, which names the key.
    """
    source = Source.read(path, trust=trust)
    if "attack" in source.tables:
        raise source.error_at(("attack",), "an attack is simulated, and nothing of it exists on a deployment. Remove [attack].")
    if isinstance(data := source.tables.get("data"), dict) and data.get("scale", "none") != "none":
        raise source.error_at(("data", "scale"), "inputs cannot be scaled by a file on a deployment: nodes have their own data, "
                                                 "and no one sees them all. Scale each node's data by the same public numbers, "
                                                 "and remove scale.")
    if has_noise_from_budget(source):
        raise ExperimentError(f"{source.name}: noise_multiplier = \"budget\" is for simulations, where every client answers: "
                              "a deployment needs more noise for a budget. `fedtail privacy` finds it; write the number.")
    source = replace(source, tables={**source.tables, "data": {"kind": "digits"}})      # never read: nodes have their own
    if method:
        source = pick_method(source, method)
    views = [one.source for one in build_experiments(source, Path(path).stem)]
    return [build_experiment(_with_single_tail_question(view), Path(path).stem) for view in views]


def deployed_experiment(path: str | Path, method: str = "", trust: Trusted = ()) -> Experiment:
    """The experiment of the only method in the file at `path`, or of the one called `method`, with the defaults of deployments.

    Code that is not fedtail's is imported only from the folders and packages in `trust`. Raises ExperimentError where the file is
    not valid, or holds several methods and `method` is "".
    """
    found = deployed_experiments(path, method, trust)
    if len(found) > 1:
        raise ExperimentError(f"{path} holds {len(found)} methods: {', '.join(one.name for one in found)}. Say which one is "
                              "deployed with method.")
    return found[0]


def _with_single_tail_question(source: Source) -> Source:
    """The source with an exact quantile of 12 bits, one question to clients, set as the risk's `quantile`.

    Returned unchanged where the risk has no `tail_fraction`, is neither Superquantile nor TailFilter, or names a quantile itself.
    """
    risk = source.section_table("risk")
    if "tail_fraction" not in risk or risk.get("part") not in TAILS or "quantile" in risk:
        return source
    return source.with_value(("risk", "quantile"), ONE_QUESTION, BY)


def deployment_channel(experiment: Experiment, population: Any) -> Channel:
    """The channel that the experiment file names; where it names none, a `SecureChannel`.

    The default's threshold is the largest of 2, the algorithm's minimum, and a majority of the clients expected in a cohort from
    `population`.
    """
    if "channel" in experiment.source.tables:
        return experiment.channel
    expected = experiment.algorithm.sample.expected_size(population)
    return SecureChannel(threshold=max(2, experiment.algorithm.minimum_cohort, int(expected) // 2 + 1))


def agreed_channel(experiment: Experiment) -> Channel:
    """The channel whose encodings a node's answers have: what the file names, else a `SecureChannel`, of whatever threshold.

    The server finds the threshold from all clients (`deployment_channel`), which one node does not know.
    """
    return experiment.channel if "channel" in experiment.source.tables else SecureChannel(threshold=2)


def deployed_experiment_table(experiment: Experiment, channel: Channel, seed: int) -> dict[str, Any]:
    """The experiment for one seed with every default, as the plain values that are written to the run's folder.

    The sections data, engine and folder are left out, and evaluate too where nodes evaluate nothing. `channel` replaces the
    experiment's own.
    """
    table = replace(experiment, channel=channel).as_table(seed)
    unused = ("data", "engine", "folder", *(() if experiment.evaluate.on_nodes else ("evaluate",)))
    return {name: value for name, value in table.items() if name not in unused}
