"""What a server that departs from the protocol gets from a node: attacks on the node's own parts, of which nothing is charged.

Whether the node's operator accepted the experiment is a check of its own: the attacks are tried as if.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtail.aggregation import WeightedMean
from fedtail.channel.base import clients_add_noise
from fedtail.deployment.consent import Consent, read_accepted
from fedtail.deployment.doctor.departing_server import SCHEDULES, DepartingServer, joins_unsigned
from fedtail.deployment.doctor.findings import NOT_TESTED, TRUST, Finding, found
from fedtail.deployment.policy_example import fewest_sampled, has_chosen_contributors, has_client_noise
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.site import Site
from fedtail.experiment.experiment import Experiment
from fedtail.questions import Train
from fedtail.sampling import Cohort

BOUNDS = ("update_bound", "clip_norm")
NOT_ACCEPTED = ("accepted.json is missing or not valid: the node answers nothing, and what a server could ask is tried as if its "
                "operator had accepted the experiment. Run: fedtail node accept node.toml")
UNSIGNED = ("It takes part in sums without signatures: a server that departs from the protocol can name other survivors to other "
            "nodes, and read a sum over fewer. Run `fedtail deploy identity .` on every node, and write identity and pinned in "
            "node.toml; the experiment needs SignedGraph.")
TWO_NODES = ("minimum = 2 in node.toml: who knows its own part of a sum over two nodes, without noise, knows this node's. "
             "Write 3 or more.")
BARE = "The accepted experiment releases sums without noise. How many is limited, not what they tell together."
UNNOISED, BOUND, TWICE, ZERO = "question without noise", "another bound", "one client twice", "importance zero"
SMALL, AGAIN, RULES, ALONE = "small cohort", "round held again", "two thresholds", "threshold"
REFUSED = {
    UNNOISED: "Refused: nothing is released without the noise that was agreed.",
    BOUND: "Refused: bounds are those of the experiment.",
    TWICE: "Refused: a client is in a cohort once.",
    ZERO: "Refused: no client of a cohort is multiplied by zero.",
    SMALL: "Refused: the node takes part in no smaller rounds than the experiment has.",
    AGAIN: "Refused: a round is held with one cohort.",
    RULES: "Refused: a round has one rule of who contributes.",
    ALONE: "No dual that was tried left one client of this node alone in what it answers.",
}
ANSWERED = {
    UNNOISED: "it gave a sum without the noise that was agreed.",
    BOUND: "it answered with another bound on rows than was agreed, by which they can be measured.",
    TWICE: "it took a cohort in which each client is twice.",
    ZERO: "it took a cohort in which all clients but one are multiplied by zero.",
    SMALL: "it answers in rounds of {fewer} clients, and the experiment has {least} or more. Write smallest_cohort = {least} in "
           "the policy.",
    AGAIN: "it held a round again without one of its clients, whose row is the difference. Write repeats = 0 in the policy.",
    RULES: "it gave two sums of one round with different thresholds, whose difference can be one client's row.",
    ALONE: "asked for the clients above a threshold of the server's choice, it gave the row of a single one.{more}",
}
WEAK = "the server's numbers say who contributes, and one client of this node may be alone in a sum.{more}"
RAISE = " smallest_tail is 1 in the policy: write 2 or more."


def attacks_on_node(settings: NodeSettings) -> Iterator[Finding]:
    """Try what a server could ask of the node with these settings; yields what was found.

    Nothing is charged to the node's budget, written to its log or stored in its folder.
    """
    problems: dict[str, list[str]] = {}
    with _quiet():
        yield _signed_sums(settings)
        yield _consent(settings)
        try:
            if not (settings.folder / settings.data).exists():
                raise ValueError("there are no data yet.")
            experiments = settings.read_experiments()
            least = max(2, min(map(fewest_sampled, experiments)))
            for experiment in experiments:
                for check, problem in _attacks(settings, experiment, least):
                    problems.setdefault(check, []).extend([f"{experiment.name}: {problem}"] if problem else [])
        except Exception as why:      # of data, of the experiment, or of a part of the user's own
            yield Finding("node's answers", NOT_TESTED, f"What it would answer could not be tried: {why or type(why).__name__}")
            return
    for check in problems:
        yield found(check, problems[check], REFUSED[check])
    if not all(map(has_client_noise, experiments)):
        yield found("sum of two nodes", [TWO_NODES] if settings.minimum < 3 else [],
                    f"A row is in sums over {settings.minimum} nodes or more.")
        yield Finding("noise", TRUST, BARE)


def _signed_sums(settings: NodeSettings) -> Finding:
    """Whether the node takes part in sums without signatures: it is invited to some where it has an identity."""
    check, joined = "signed sums", []
    try:
        identity = settings.own_identity()
    except ValueError as why:
        return found(check, [str(why)], "")
    if identity is None:
        return found(check, [UNSIGNED], "")
    for schedule in SCHEDULES:
        site = Site(lambda: settings.make_node(0), settings.minimum, settings.masked_only, identity, corrupted=settings.corrupted)
        joined += [schedule] if joins_unsigned(site, settings.minimum, schedule) else []
    return found(check, [f"It has an identity, and joined sessions without signatures: {', '.join(joined)}."] if joined else [],
                 f"Sessions without signatures are refused; {len(identity.pinned)} identities are pinned.")


def _consent(settings: NodeSettings) -> Finding:
    """Whether what lies in the node's folder is what its operator accepted."""
    check, given = "consent", read_accepted(settings)
    if not given:
        return Finding(check, NOT_TESTED, NOT_ACCEPTED)
    try:
        Consent.of(settings, settings.read_experiments()).check()
    except (ValueError, OSError) as why:
        return found(check, [f"The node answers nothing, because {why}"], "")
    return found(check, [], "accepted.json names what lies here: experiment file, code, places of data and budget, and a line of "
                            f"the audit log; digest {given['digest'][:12]}.")


def _attacks(settings: NodeSettings, experiment: Experiment, least: int) -> Iterator[tuple[str, str]]:
    """Yields the pair (attack, what the node did that it must not, in words; "" where it did not) for one experiment.

    No experiment of the node has rounds of fewer than `least` clients. Raises ValueError where the node does not even answer what
    a server that follows the protocol asks.
    """
    with tempfile.TemporaryDirectory(prefix="fedtail-doctor-") as folder:
        server = DepartingServer(settings, experiment, Path(folder))
        cohort, question = server.cohort, server.honest_question(server.total)
        if server.ask(question) is None:
            raise ValueError(f"it does not answer {experiment.name} as it was agreed: {server.said}")
        noisy = clients_add_noise(question.mechanism)
        if noisy:
            yield UNNOISED, _told(UNNOISED, server.ask(replace(question, aggregate=WeightedMean())))
        for name in BOUNDS:
            if isinstance(value := getattr(question.aggregate, name, None), float):
                other = replace(question, aggregate=replace(question.aggregate, **{name: value / 2}))
                yield BOUND, _told(BOUND, server.ask(other))
        yield TWICE, _told(TWICE, server.ask(question, _part(cohort, torch.arange(len(cohort.ids)).repeat(2))))
        zeros = replace(cohort, importance=(cohort.ids == cohort.ids[0]).double())
        yield ZERO, _told(ZERO, server.ask(question, zeros))
        if not noisy:
            yield SMALL, _small_cohort(server, least)
            yield AGAIN, _held_again(server, question)
            yield from _thresholds(server, experiment, question)


def _small_cohort(server: DepartingServer, least: int) -> str:
    """What came of a round with one client fewer than `least`."""
    fewer = least - 1
    here = min(len(server.cohort.ids), fewer - 1)
    if here < 1:
        return ""
    row = server.ask(server.honest_question(fewer), _part(server.cohort, torch.arange(here)), (fewer - here,))
    return _told(SMALL, row, least=least, fewer=fewer)


def _held_again(server: DepartingServer, question: Train) -> str:
    """What came of a round that is begun once more without one of the clients."""
    here = len(server.cohort.ids)
    if here < 2:
        return ""
    server.ask(question)
    others = (server.others[0] + 1, *server.others[1:])
    return _told(AGAIN, server.ask(question, _part(server.cohort, torch.arange(1, here)), others, anew=False))


def _thresholds(server: DepartingServer, experiment: Experiment, question: Train) -> Iterator[tuple[str, str]]:
    """Yields what came of numbers of the server's choice in the dual, which decides who contributes."""
    lonely, fewest = server.lonely_question(question)
    if not torch.equal(lonely.dual, question.dual):
        server.ask(question)
        yield RULES, _told(RULES, server.ask(lonely, anew=False))
    row = server.ask(lonely) if fewest == 1 else None
    may = has_chosen_contributors(experiment) and server.policy.smallest_tail == 1
    more = RAISE if may else ""
    if row is not None and bool(row.any()):
        yield ALONE, _told(ALONE, row, more=more)
    else:
        yield ALONE, WEAK.format(more=more) if may else ""


def _part(cohort: Cohort, places: Tensor) -> Cohort:
    """The cohort of the clients at these places in it, which may be there twice."""
    return replace(cohort, ids=cohort.ids[places], key=cohort.key[places], importance=cohort.importance[places])


def _told(check: str, row: Tensor | None, **numbers: Any) -> str:
    """What it means that the node answered this attack with a row; "" where it did not."""
    return "" if row is None else ANSWERED[check].format(**numbers)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block the node's own warnings, which an attack provokes, are not shown."""
    log = logging.getLogger("fedtail.node")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)
