"""What a node takes part in and allows, in sentences for its operator."""

from __future__ import annotations

from collections.abc import Iterator

from fedtail.deployment.agreement import Agreement
from fedtail.deployment.policy_example import has_client_noise
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment.experiment import Experiment


def node_sentences(settings: NodeSettings) -> Iterator[str]:
    """Yields lines about the node with these settings, from its data, experiment and policy; ValueError for a bad one."""
    node, budget = settings.make_node(0), settings.data_budget()
    yield f"{settings.name}: {len(node.fleet.population)} clients in {settings.data}"
    for one in settings.read_experiments():
        yield f"  answers {experiment_sentence(one)}"
    yield f"  in rounds of {budget.policy.smallest_cohort} clients or more, at most {budget.policy.questions} questions in each"
    hidden = f"only in masked sums over {settings.minimum} nodes or more" if settings.masked_only else "also in the clear"
    yield f"  {hidden}{'; signed' if settings.identity else '; sessions need not be signed (identity)'}"
    yield f"budget: {budget.policy.budget_text}"
    yield f"so far: {budget.spent_text()}"


def experiment_sentence(experiment: Experiment) -> str:
    """One method of a node's experiment in words: its name, rounds, parts, and whether clients add noise to what is released."""
    parts = "; ".join(f"{type(one.risk).__name__}, {type(one.local).__name__}, {type(one.aggregate).__name__}"
                      for one in Agreement(experiment.algorithm).method.members)
    noise = "with noise that clients add" if has_client_noise(experiment) else "without noise that clients add"
    evaluates = ", and evaluates models" if experiment.evaluate.on_nodes else ""
    return f"{experiment.name} ({parts}), {experiment.rounds} rounds, {noise}{evaluates}"
