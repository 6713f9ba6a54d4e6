"""What a node takes part in, what it is asked to accept and what that costs, in sentences for its operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fedtail.deployment.agreement import Agreement
from fedtail.deployment.consent import allowed_files, changes, experiment_digest, read_accepted
from fedtail.deployment.contributions import effective_clients
from fedtail.deployment.data_budget import DataBudget
from fedtail.deployment.deployed_experiment import deployment_channel
from fedtail.deployment.policy import NodePolicy
from fedtail.deployment.policy_example import has_chosen_contributors, has_client_noise, own_tail, planned_round, rounds_asked
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment.experiment import Experiment
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.events import LatticeRelease, NonPrivateRelease, Release, RoundEvent

MOST_ROUNDS = 1 << 20      # that are tried when it is found how many a budget still has


def node_sentences(settings: NodeSettings) -> Iterator[str]:
    """Yields lines about the node with these settings, from its data, experiment and policy; ValueError for a bad one."""
    node, budget = settings.make_node(0), settings.data_budget()
    yield f"{settings.name}: {len(node.fleet.population)} clients in {settings.data}"
    for one in settings.read_experiments():
        yield f"  answers {experiment_sentence(one)}"
    yield f"  in rounds of {budget.policy.smallest_cohort} clients or more, at most {budget.policy.questions} questions in each"
    yield from tail_sentences(settings.read_experiments(), budget.policy, node.fleet.population.mass)
    hidden = f"only in masked sums over {settings.minimum} nodes or more" if settings.masked_only else "also in the clear"
    yield f"  {hidden}{'; signed' if settings.identity else '; sessions need not be signed (identity)'}"
    yield f"budget: {budget.policy.budget_text}"
    yield f"so far: {budget.spent_text()}"


def asked_sentences(settings: NodeSettings) -> Iterator[str]:
    """Yields lines about what the node's experiment file asks: what each round releases, what that costs, and what changed."""
    experiments, budget = settings.read_experiments(), settings.data_budget()
    yield f"{settings.name} is asked about the clients in {settings.data}, by {settings.experiment}:"
    for one in experiments:
        yield f"  {experiment_sentence(one)}"
        yield "  in each round, about the clients that are sampled:"
        for release in dict.fromkeys(planned_round(one).releases):
            yield f"    {release_sentence(release)}"
        yield f"  {channel_sentence(one)}"
    if settings.trust:
        files = ", ".join(allowed_files(settings)["files"]) or "no file beside it"
        yield f"  CODE RUNS ON THIS MACHINE: trust = {list(settings.trust)} in the node's settings; {files}"
    yield from tail_sentences(experiments, budget.policy)
    yield from cost_sentences(experiments, budget)
    different = changes(settings, experiments)
    accepted = read_accepted(settings)
    if accepted:
        same = accepted["digest"] == experiment_digest(experiments) and not different
        yield f"You accepted {accepted['digest']}{': the same.' if same else '. Since then:'}"
    yield from (f"  {line}" for line in different)


def tail_sentences(experiments: Sequence[Experiment], policy: NodePolicy, mass: Tensor | None = None) -> Iterator[str]:
    """Yields lines on whether one client of the node may be alone in a sum, and whether it has enough clients for a tail.

    `mass`, (clients,), are the masses of the node's clients, None where they are not known. Nothing is said where clients add
    noise to every sum.
    """
    if all(map(has_client_noise, experiments)):
        return
    chosen, least = [one for one in experiments if has_chosen_contributors(one)], policy.smallest_tail
    if least == 1:
        yield "  ONE CLIENT OF YOURS MAY BE ALONE IN A SUM (smallest_tail = 1)" + (
            ": the server's numbers say who contributes, and it could read that client's row" if chosen else
            ", beside clients of other nodes")
        return
    yield f"  in a sum without noise {least} clients of yours or more, by weight, or none"
    there, effective = (None, None) if mass is None else (len(mass), effective_clients(mass))
    if there is None or effective is None:
        return
    if effective < least:
        yield (f"  TOO FEW CLIENTS: by weight the {there} here are as many as {effective}, and without noise nothing of them is "
               f"released (smallest_tail = {least}). Ask for noise that clients add; with 1 the server could read a row.")
        return
    tails = [tail for one in chosen if (tail := own_tail(one, there)) is not None]
    if tails and min(tails) < least:
        yield (f"  FEW CLIENTS: about {min(tails):.2g} of the {there} here are in a tail, and where fewer than {least} are, this "
               "node's part is zeros: its clients in the tail are mostly left out")


def cost_sentences(experiments: Sequence[Experiment], budget: DataBudget) -> Iterator[str]:
    """Yields lines on what one training by each experiment costs, what is spent, and what the policy would leave."""
    policy, rounds = budget.policy, sum(map(rounds_asked, experiments))
    if policy.rounds_without_noise is not None:
        left = policy.rounds_without_noise - budget.rounds_answered
        yield (f"It costs {rounds} rounds. Of {policy.rounds_without_noise} that the policy allows {left} are left: "
               f"{_enough(rounds <= left)}")
        return
    if not all(map(has_client_noise, experiments)):
        yield "It costs more than any epsilon, and is refused: not every sum has noise that clients add."
        return
    assert policy.epsilon is not None
    assert policy.delta is not None
    planned, spent = [(planned_round(one), rounds_asked(one)) for one in experiments], budget.spent_rounds()
    cost, together = epsilon_at(planned, policy.delta), epsilon_at([*spent, *planned], policy.delta)
    before = epsilon_at(spent, policy.delta) if spent else 0.0
    yield f"It costs epsilon {cost:.4g} at delta {policy.delta:g} over {rounds} rounds, whoever is sampled in each of them."
    yield (f"Spent so far is {before:.4g}; with it that makes {together:.4g} of {policy.epsilon:g} that the policy allows: "
           f"{_enough(together <= policy.epsilon)}")


def left_sentences(experiments: Sequence[Experiment], budget: DataBudget) -> Iterator[str]:
    """Yields a line for each experiment: of how many more of its rounds the budget allows answers."""
    policy = budget.policy
    for one in experiments:
        if policy.rounds_without_noise is not None:
            left = max(0, policy.rounds_without_noise - budget.rounds_answered)
        elif has_client_noise(one) and not budget.rounds_answered:
            left = rounds_left(budget.spent_rounds(), planned_round(one), policy.epsilon or 0.0, policy.delta or 0.0)
        else:
            left = 0
        yield f"left: {left} rounds of {one.name}"


def rounds_left(spent: Sequence[tuple[RoundEvent, int]], event: RoundEvent, epsilon: float, delta: float) -> int:
    """How many rounds like `event` may follow those of `spent` within (epsilon, delta), by bisection; at most two million."""
    found, step = 0, 1
    while step < MOST_ROUNDS and epsilon_at([*spent, (event, found + step)], delta) <= epsilon:
        found, step = found + step, 2 * step
    while step := step // 2:
        if epsilon_at([*spent, (event, found + step)], delta) <= epsilon:
            found += step
    return found


def experiment_sentence(experiment: Experiment) -> str:
    """One method of a node's experiment in words: its name, rounds, parts, and whether clients add noise to what is released."""
    parts = "; ".join(f"{type(one.risk).__name__}, {type(one.local).__name__}, {type(one.aggregate).__name__}"
                      for one in Agreement(experiment.algorithm).method.members)
    noise = "with noise that clients add" if has_client_noise(experiment) else "without noise that clients add"
    evaluates = ", and evaluates models" if experiment.evaluate.on_nodes else ""
    return f"{experiment.name} ({parts}), {experiment.rounds} rounds, {noise}{evaluates}"


def release_sentence(release: Release) -> str:
    """What is released, in words: a sum over clients with or without noise."""
    if isinstance(release, NonPrivateRelease):
        return f"{release.what}: a sum over clients, without noise"
    noise = f"with noise {release.multiplier('zero-out'):.3g} times what one client moves it at most"
    if isinstance(release, LatticeRelease):
        return (f"{release.what}: a sum over clients of {release.width} numbers, {noise}, by shares of {release.honest} clients "
                "or more")
    return f"{release.what}: a sum over clients, {noise}"


def channel_sentence(experiment: Experiment) -> str:
    """How sums are hidden and how large cohorts are, in words, by the experiment file."""
    if "channel" not in experiment.source.tables:
        return "sums are masked among the nodes of a round"
    return f"sums are sent by {deployment_channel(experiment, None)}"


def _enough(fits: bool) -> str:
    """The end of a sentence about a budget: whether it is enough."""
    return "enough." if fits else "NOT enough, the rest is refused."
