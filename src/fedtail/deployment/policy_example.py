"""A policy for a node to begin with, from the experiment that it is to take part in; its operator changes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedtail.algorithm import smallest_cohort
from fedtail.channel.base import clients_add_noise
from fedtail.deployment.deployed_experiment import agreed_channel, deployed_experiments
from fedtail.deployment.policy import BARE, EXAMPLE, PRIVATE
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment.experiment import Experiment
from fedtail.experiment.source import Trusted
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.events import NoSampling, RoundEvent
from fedtail.sampling.base import FixedSize

QUESTIONS = 16        # in a round: more than any method of fedtail asks by its defaults, counts of contributors included
DELTA = 1e-6
REPEATS = 3           # rounds with noise that are held once more: cohort and noise are drawn anew after a crash of the server
MANY = 100            # trainings by each method that nodes on one's own machine allow


def policy_example(path: Path, trust: Trusted = (), trainings: int = 1, repeats: int | None = None) -> str:
    """The text of a policy.toml for the experiment file at `path`: just enough for `trainings` by each of its methods.

    Where clients add noise to all sums, it has the epsilon that these cost together without amplification by sampling; otherwise
    the number of their rounds. `repeats` rounds of a training may be held once more with other contents: None allows it where
    there is noise, and nowhere else, because two cohorts that differ by a client would show its row; with the same contents a
    round goes on after a crash of the server anyway. Code that is not fedtail's is imported only from what `trust` lists.
    """
    experiments = deployed_experiments(path, trust=trust)
    cohort = max(2, min(map(fewest_sampled, experiments)))
    again, budget = 0, BARE.format(rounds=trainings * sum(map(rounds_asked, experiments)))
    if all(map(has_client_noise, experiments)):
        delta = next((one.privacy.delta for one in experiments if one.privacy.delta is not None), DELTA)
        cost = epsilon_at([(planned_round(one), trainings * rounds_asked(one)) for one in experiments], delta)
        again, budget = REPEATS, PRIVATE.format(cost=cost, epsilon=float(f"{1.005 * cost:.3g}"), delta=delta)
    return EXAMPLE.format(smallest_cohort=cohort, questions=QUESTIONS, budget=budget,
                          repeats=again if repeats is None else repeats)


def fewest_sampled(experiment: Experiment) -> int:
    """The fewest clients that a server which follows the experiment has in a round's cohort; in a smaller one it asks nothing.

    A sampler of a fixed size has that many; where draws may name a client twice, more than half of them, which is the threshold
    of a deployment without another. Where no noise is added to the updates, the channel wants its `minimum_contributors` too.
    """
    algorithm, channel = experiment.algorithm, agreed_channel(experiment)
    size = getattr(algorithm.sample, "cohort_size", 0)
    fixed = size if isinstance(algorithm.sample, FixedSize) else size // 2 + 1 if "channel" not in experiment.source.tables else 0
    bare = not any(member.mechanism.private for member in algorithm.members)
    return max(fixed, smallest_cohort(algorithm, channel), channel.minimum_contributors if bare else 0)


def has_client_noise(experiment: Experiment) -> bool:
    """Whether clients add noise to everything that the experiment releases."""
    evaluation = experiment.evaluate.on_nodes
    mechanisms = [mechanism for member in experiment.algorithm.members for mechanism in (
        member.mechanism, *((member.risk.declares.mechanism,) if member.risk.declares.releases != () else ()))]
    mechanisms += [] if evaluation is None else [evaluation.mechanism]
    exact = any(member.local.declares.releases for member in experiment.algorithm.members)
    return not exact and all(map(clients_add_noise, mechanisms))


def rounds_asked(experiment: Experiment) -> int:
    """How many rounds one training asks a node for: with evaluations one more, in which the final models are evaluated."""
    return experiment.rounds + bool(experiment.evaluate.on_nodes)


def planned_round(experiment: Experiment) -> RoundEvent:
    """All that a round of the experiment releases, with an evaluation if it has any, about a client who is in every round."""
    evaluation = experiment.evaluate.on_nodes
    method = experiment.algorithm if evaluation is None else evaluation.round_with_evaluation(experiment.algorithm)
    return RoundEvent(method.releases(experiment.task.make(0).params().numel()), NoSampling(), experiment.algorithm.unit)


def write_policy(settings: NodeSettings, trainings: int = 1, repeats: int | None = None) -> Path:
    """Write the example policy of a node with these settings, and return its path; the numbers are those of `policy_example`.

    Raises FileExistsError where there is one already.
    """
    path = settings.folder / settings.policy
    if path.exists():
        raise FileExistsError(f"{path} exists, and a policy is its operator's. Change it there, or remove it first.")
    text = policy_example(settings.folder / settings.experiment, settings.allowed_code(), trainings, repeats)
    path.write_text(text, encoding="utf-8")
    return path


def write_loopback_policy(folder: Path) -> None:
    """Be the operator of a node on one's own machine: write a policy that allows many trainings, unless there is one, and accept.

    Accepted is what the node's experiment file asks now.
    """
    from fedtail.deployment.consent import accept, experiment_digest

    settings = replace(NodeSettings.read(folder / "node.toml"), allow_code=True)
    if not (settings.folder / settings.policy).exists():
        write_policy(settings, MANY, repeats=1000)
    accept(settings, experiment_digest(settings.read_experiments()))
