"""A policy for a node to begin with, from the experiment that it is to take part in; its operator changes it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fedtail.algorithm import smallest_cohort
from fedtail.channel.base import clients_add_noise
from fedtail.deployment.contributions import are_chosen, effective_clients
from fedtail.deployment.deployed_experiment import agreed_channel, deployed_experiments
from fedtail.deployment.policy import BARE, EXAMPLE, PRIVATE
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment.experiment import Experiment
from fedtail.experiment.source import Trusted
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.events import NoSampling, RoundEvent
from fedtail.sampling import Everyone, Poisson
from fedtail.sampling.base import FixedSize

QUESTIONS = 16        # in a round: more than any method of fedtail asks by its defaults, counts of contributors included
DELTA = 1e-6
REPEATS = 3           # rounds with noise that are held once more: cohort and noise are drawn anew after a crash of the server
MANY = 100            # trainings by each method that nodes on one's own machine allow
TWO = 2               # clients of a node, the fewest of which none is alone in its part of a sum
NOISY = "Every sum has noise that clients add, and relies on no number of them."
ALIKE = ("All clients of a round contribute, and no number of the server's says who or by how much: one client of yours may be "
         "the only one of this node in a sum, beside those of other nodes.")
CHOSEN = ("The server's numbers, such as a threshold, say who contributes. Where fewer of yours than this do, or one far "
          "outweighs the others, this node's part is zeros, and its log says so. With 1 the server could read a client's row.")
FEW = ("THE TAIL OF THIS EXPERIMENT IS SMALL: about {tail:.3g} clients at {minimum} nodes or more, fewer than two at each, so "
       "that one of yours is often alone in this node's part of a sum. A server that departs from the protocol can read that "
       "client's row. With 2 it cannot; then this node's part is zeros wherever one of yours would be alone.")
OWN_MACHINE = ("Nodes on one machine, as a trial: ONE CLIENT MAY BE ALONE IN A SUM, so that results are those of the simulator. "
               "Where a server is somebody else's, write 2 or more.")


def policy_example(path: Path, trust: Trusted = (), trainings: int = 1, repeats: int | None = None, clients: int | None = None,
                   minimum: int = 3, own_machine: bool = False) -> str:
    """The text of a policy.toml for the experiment file at `path`: just enough for `trainings` by each of its methods.

    Where clients add noise to all sums, it has the epsilon that these cost together without amplification by sampling; otherwise
    the number of their rounds. `repeats` rounds of a training may be held once more with other contents: None allows it where
    there is noise, and nowhere else, because two cohorts that differ by a client would show its row; with the same contents a
    round goes on after a crash of the server anyway. Code that is not fedtail's is imported only from what `trust` lists.
    `clients` is how many the node has, by weight, None where it has no data yet, and a sum is over `minimum` nodes or more: by
    them the smallest tail is chosen, and the text says why. On one's `own_machine`, where nobody is to be protected, one client
    may be alone in a sum.
    """
    experiments = deployed_experiments(path, trust=trust)
    cohort = max(2, min(map(fewest_sampled, experiments)))
    again, budget = 0, BARE.format(rounds=trainings * sum(map(rounds_asked, experiments)))
    if all(map(has_client_noise, experiments)):
        delta = next((one.privacy.delta for one in experiments if one.privacy.delta is not None), DELTA)
        cost = epsilon_at([(planned_round(one), trainings * rounds_asked(one)) for one in experiments], delta)
        again, budget = REPEATS, PRIVATE.format(cost=cost, epsilon=float(f"{1.005 * cost:.3g}"), delta=delta)
    tail, why = (1, OWN_MACHINE) if own_machine else smallest_tail(experiments, clients, minimum)
    comment = textwrap.fill(why, 126, initial_indent="# ", subsequent_indent="# ")
    return EXAMPLE.format(smallest_cohort=cohort, smallest_tail=tail, why=comment, questions=QUESTIONS, budget=budget,
                          repeats=again if repeats is None else repeats)


def smallest_tail(experiments: Sequence[Experiment], clients: int | None, minimum: int) -> tuple[int, str]:
    """The pair (smallest tail, why it is that, as a comment) for a node with so many `clients`, by what it was given to accept.

    It is 1 where it plays no role: where clients add noise to every sum, and where no number of the server's decides who
    contributes. It is 1 too, and the comment warns, where a tail as the experiment has it holds fewer than two clients at each of
    `minimum` nodes: a larger one would leave most of the tail out. Otherwise it is 2; where the share of clients that is sampled
    is known, and more of this node's are in a tail, half of what is expected, up to the `minimum_contributors` of the sum.
    """
    if all(map(has_client_noise, experiments)):
        return 1, NOISY
    chosen = [one for one in experiments if has_chosen_contributors(one)]
    if not chosen:
        return 1, ALIKE
    tails = [tail for one in chosen if (tail := expected_tail(one)) is not None]
    if tails and min(tails) < TWO * minimum:
        return 1, FEW.format(tail=min(tails), minimum=minimum)
    return max(TWO, min(min(_half_of_own_tail(one, clients), agreed_channel(one).minimum_contributors) for one in chosen)), CHOSEN


def has_chosen_contributors(experiment: Experiment) -> bool:
    """Whether the server's numbers decide who contributes to sums of the experiment to which clients add no noise."""
    return are_chosen(one for one in experiment.algorithm.members if not clients_add_noise(one.mechanism))


def expected_tail(experiment: Experiment) -> float | None:
    """About how many clients contribute in a round, at all nodes, if the cohort has its expected size; None where not known."""
    sample = experiment.algorithm.sample
    cohort = sample.rate * sample.population if isinstance(sample, Poisson) and sample.population else (
        getattr(sample, "cohort_size", None))
    share = _smallest_share(experiment)
    return None if cohort is None or share is None else cohort * share


def own_tail(experiment: Experiment, clients: int) -> float | None:
    """The most of a node's `clients` that contribute in a round on average, if they are like others; None where not known."""
    sample = experiment.algorithm.sample
    sampled = sample.rate if isinstance(sample, Poisson) else 1.0
    share = _smallest_share(experiment)
    return None if share is None else clients * sampled * share


def _half_of_own_tail(experiment: Experiment, clients: int | None) -> int:
    """Half of `own_tail`, rounded down; 0 where clients, the share that is sampled, or the tail are not known."""
    known = isinstance(experiment.algorithm.sample, (Poisson, Everyone))
    tail = own_tail(experiment, clients) if known and clients is not None else None
    return 0 if tail is None else int(tail / 2)


def _smallest_share(experiment: Experiment) -> float | None:
    """The smallest share of a cohort that contributes to a model of the experiment; None where a risk does not declare it."""
    shares = [one.risk.declares.contributing for one in experiment.algorithm.members]
    return min((share for share in shares if share is not None), default=None) if None not in shares else None


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


def write_policy(settings: NodeSettings, trainings: int = 1, repeats: int | None = None, own_machine: bool = False) -> Path:
    """Write the example policy of a node with these settings, and return its path; the numbers are those of `policy_example`.

    Raises FileExistsError where there is one already.
    """
    path = settings.folder / settings.policy
    if path.exists():
        raise FileExistsError(f"{path} exists, and a policy is its operator's. Change it there, or remove it first.")
    code = settings.allowed_code()
    mass = None if own_machine else own_masses(settings)
    text = policy_example(settings.folder / settings.experiment, code, trainings, repeats,
                          None if mass is None else effective_clients(mass), settings.minimum, own_machine)
    path.write_text(text, encoding="utf-8")
    return path


def own_masses(settings: NodeSettings) -> Tensor | None:
    """The masses of this node's clients, read from its data, (clients,); None where there are no data yet."""
    return settings.read_population().mass if (settings.folder / settings.data).exists() else None


def write_loopback_policy(folder: Path) -> None:
    """Be the operator of a node on one's own machine: write a policy that allows many trainings, unless there is one, and accept.

    Accepted is what the node's experiment file asks now. One client may be alone in a sum, so that results are the simulator's.
    """
    from fedtail.deployment.consent import accept, experiment_digest

    settings = replace(NodeSettings.read(folder / "node.toml"), allow_code=True)
    if not (settings.folder / settings.policy).exists():
        write_policy(settings, MANY, repeats=1000, own_machine=True)
    accept(settings, experiment_digest(settings.read_experiments()))
