"""What fits what: one place that decides, from what parts, channel, fleet, sampler and population say of themselves.

`refusals` returns everything that stands against a composition, each with its text; `check` raises them all at once, before any
work starts. A rule is a function of a `Composition` that yields texts: what came, what is needed, what to write instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fedtail.channel.base import Channel, adds_shares, refuse_release
from fedtail.declarations import AggregatorDeclaration, LocalDeclaration, RiskDeclaration
from fedtail.deprecated import old_names, with_old_names
from fedtail.fleet import Fleet
from fedtail.risk.base import Risk, RiskWrapper
from fedtail.sampling import Sampler

ENOUGH_IN_TAIL = 10
RESOLVED = 15.0      # exp(-15) of a weight still leaves updates a few digits in 62 bits
ROUGHLY = 1.5        # a factor: how far a number that was planned for the population may be from what it is
CLOSELY = 1.1        # two planned numbers from each other


class SmallTailWarning(UserWarning):
    """Few clients contribute in a round: what the cohort optimises is far from the risk over all clients."""


@with_old_names
@dataclass(frozen=True)
class Composition:
    """A method's parts, and what they are to run on."""

    sample: Sampler
    risk: Risk
    aggregate: Any
    local: Any
    population: Any
    channel: Channel
    fleet: Fleet

    @property
    def declarations(self) -> tuple[RiskDeclaration, AggregatorDeclaration, LocalDeclaration]:
        """What the risk, the aggregator and the local training declare, in this order."""
        return self.risk.declares, self.aggregate.declares, self.local.declares

    @property
    def names(self) -> tuple[str, str]:
        """The class names of the risk and of the aggregator, for error texts."""
        return type(self.risk).__name__, type(self.aggregate).__name__

    @property
    def innermost_risk(self) -> Risk:
        """The risk inside all its wrappers; itself where it is not wrapped."""
        risk = self.risk
        while isinstance(risk, RiskWrapper):
            risk = risk.risk
        return risk

    @property
    def cohort_size(self) -> float:
        """How many clients are expected in a round."""
        return self.sample.expected_size(self.population)


Rule = Callable[[Composition], Iterator[str]]


def refusals(method: Any, population: Any, channel: Channel, fleet: Fleet) -> tuple[str, ...]:
    """The texts of all that stands against running a method, or any member of a family, this way; empty where nothing does.

    Each text comes once. Where the sampler or the risk lacks its clients, nothing else of that member is judged.
    """
    found = []
    for member in method.members:
        parts = Composition(member.sample, member.risk, member.aggregate, member.local, population, channel, fleet)
        needed = [text for rule in NEEDS for text in rule(parts)]
        found += needed or [text for rule in RULES for text in rule(parts)]      # without its clients nothing else can be judged
    return tuple(dict.fromkeys(found))


def check(method: Any, population: Any, channel: Channel, fleet: Fleet) -> None:
    """Raise one ValueError with all refusals, before any work starts; else warn where few clients of a cohort contribute."""
    found = refusals(method, population, channel, fleet)
    if len(found) == 1:
        raise ValueError(found[0])
    if found:
        raise ValueError("\n".join([f"{len(found)} things do not fit:", *(f"- {text}" for text in found)]))
    for member in method.members:
        _warn_of_small_tail(member.risk, member.sample, population)


def sampler_refusals(parts: Composition) -> Iterator[str]:
    """Yields the sampler's own text where it cannot draw from this population."""
    yield from _catch_refusal(lambda: parts.sample.check(parts.population))


def client_and_group_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text for each thing the risk needs and does not get: every client in every round, groups, its own checks."""
    declared, name, population = parts.risk.declares, parts.names[0], parts.population
    if declared.needs_everyone and not parts.sample.takes_everyone(population):
        yield (f"{name} keeps a lambda on every client and needs everybody every round, which {parts.sample} does not give of "
               f"{len(population)} clients. Use sample=Everyone(), or GroupAscent.")
    if declared.needs_groups is not None and population.group is None:
        yield f"{name} needs a group for each client: Population.from_arrays(..., group=...)."
    elif declared.needs_groups is not None and int(population.group.max()) >= declared.needs_groups:
        highest = int(population.group.max())
        yield f"population.group goes up to {highest}, but groups={declared.needs_groups}. Write groups={highest + 1}."
    yield from _catch_refusal(lambda: parts.risk.check(population, parts.sample))


def channel_refusals(parts: Composition) -> Iterator[str]:
    """Yields the texts of the channel where it must not, or cannot, reveal the rows of the aggregator or of the risk."""
    risk, aggregate, _ = parts.declarations
    names = parts.names
    yield from _catch_refusal(lambda: refuse_release(parts.channel, aggregate.mechanism, aggregate.gathers, names[1]))
    yield from _catch_refusal(lambda: refuse_release(parts.channel, risk.mechanism, False, names[0]))


def private_risk_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where updates are noised, but one client may move the risk's weights without bound."""
    risk, aggregate, _ = parts.declarations
    if aggregate.mechanism.private and risk.not_private:
        yield (f"{parts.names[0]} cannot be trained privately: {risk.not_private}. Use Binned(Superquantile(...), ...), or "
               "WeightedMean without privacy.")


def divisor_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where public divisors were not planned for these cohorts and this theta: updates would be too short or long.

    That is so where the cohort that a risk's numbers were planned for is not about the sampler's, and where a total is not
    about what the weights of the risk sum to; where that is not known (`Tilted`), any total will do.
    """
    risk, aggregate, _ = parts.declarations
    if aggregate.divides_by_release and not risk.releases_weight:
        yield (f"{parts.names[1]} needs a total: {parts.names[0]} does not release the weight of those who contribute. Write "
               "total=theta * m, the weight the tail is expected to have.")
    if not aggregate.mechanism.private:
        return
    cohort, planned = parts.cohort_size, risk.planned_clients
    if planned is not None and not _is_near(planned, cohort, ROUGHLY):
        yield (f"the histogram is planned for expected_clients={planned:g}, but of this population {cohort:g} are expected in a "
               f"round. Write expected_clients={cohort:g}.")
        return
    if aggregate.total is None or risk.weight is None:
        return
    clients, total, inner = planned or cohort, aggregate.total, type(parts.innermost_risk).__name__
    weight = risk.weight * clients
    if not _is_near(total, weight, ROUGHLY if planned is None else CLOSELY):
        times, wrong = (total / weight, "short") if total > weight else (weight / total, "long")
        yield (f"updates are divided by total={total:g}, but of {clients:g} clients about {weight:g} contribute under {inner}: "
               f"they would be {times:.3g} times too {wrong}. Write total={weight:g}.")


def slope_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the aggregator uses the slope of the density and the risk does not give it."""
    risk, aggregate, _ = parts.declarations
    if aggregate.needs_slope and not risk.has_slope:
        yield (f"{parts.names[1]} needs the slope of the density, which {parts.names[0]} does not give. Use WeightedMean, or "
               "PowerFair as the risk.")


def small_weight_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where sums are of integers and all weights of a round may be so small that they round to zero."""
    spread = parts.risk.declares.dynamic_range
    if not parts.channel.reveals_rows and spread > RESOLVED:
        yield (f"with {parts.risk} every weight may be as small as exp(-{spread:g}), which the integers of "
               f"{type(parts.channel).__name__} do not resolve (limit {RESOLVED:g}). Lower tilt, tighten loss_bound or leave it "
               "out; or raise tail_fraction (theta), or use Worst.")


def lost_memory_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text for each part that keeps what must not be lost on clients of a fleet that may lose it."""
    for part in (parts.risk, parts.local):
        keeps = part.declares.keeps
        if parts.fleet.forgets and keeps and not keeps.may_be_lost:
            yield f"{type(part).__name__} cannot run on a fleet that may lose its clients' memory: {keeps.lost}."


def few_contributors_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where so few clients are expected to contribute that a sum would reveal much about each.

    Also what the channel has against the fleet. Risks that cannot tell how many contribute are counted round by round.
    """
    channel, cohort = parts.channel, parts.cohort_size
    expected = parts.risk.declares.expected_contributors(cohort)
    if expected is not None and expected < channel.minimum_contributors:
        yield (f"{parts.names[0]} lets about {expected:g} of {cohort:g} clients contribute to a round: a sum over so few "
               f"reveals much about each (minimum_contributors={channel.minimum_contributors}). Draw more clients, or raise "
               "tail_fraction.")
    yield from channel.refuse_fleet(cohort, parts.fleet)


def small_group_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where a risk asks by group, sums hide single clients, and some group has too few of them in a round."""
    risk, minimum = parts.risk.declares, parts.channel.minimum_contributors
    if risk.needs_groups is None or risk.mechanism.private or not minimum:
        return
    sizes = parts.population.group.bincount()
    smallest = int(sizes.masked_fill(sizes == 0, len(parts.population) + 1).argmin())      # a group without clients tells nothing
    expected = int(sizes[smallest]) * parts.cohort_size / len(parts.population)
    if expected < minimum:
        yield (f"{parts.names[0]} asks by group, and group {smallest} has {int(sizes[smallest])} of {len(parts.population)} "
               f"clients, about {expected:.3g} of them in a round: a sum over so few reveals much about each "
               f"(minimum_contributors={minimum}). Merge small groups, or draw more clients.")


def node_noise_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where too few clients are expected beside the largest node for the noise of the risk or the aggregator.

    A node that adds its own clients' shares of integer noise knows them, so those of the others must be enough.
    """
    risk, aggregate, _ = parts.declarations
    nodes = parts.population.node
    if nodes is None:
        return
    largest = int(nodes.unique(return_counts=True)[1].max()) / len(nodes)
    beside = parts.cohort_size * (1 - largest)
    for name, mechanism in zip(parts.names, (risk.mechanism, aggregate.mechanism), strict=False):
        if adds_shares(mechanism) and beside < mechanism.minimum:
            yield (f"the noise of {name} relies on {mechanism.minimum} clients beside those of any one node, which knows its own "
                   f"clients' shares, and about {beside:.3g} of {parts.cohort_size:g} in a round are. Plan for fewer clients, "
                   "sample more, or spread them over more nodes.")


NEEDS: tuple[Rule, ...] = (sampler_refusals, client_and_group_refusals)
RULES: tuple[Rule, ...] = (
    channel_refusals, private_risk_refusals, divisor_refusals, slope_refusals,
    small_weight_refusals, lost_memory_refusals, few_contributors_refusals, small_group_refusals,
    node_noise_refusals,
)


def _warn_of_small_tail(risk: Risk, sample: Sampler, population: Any) -> None:
    """Warn where fewer than `ENOUGH_IN_TAIL` clients of a cohort are expected to contribute; not where everyone is sampled."""
    cohort = sample.expected_size(population)
    expected = risk.declares.expected_contributors(cohort)
    if expected is not None and expected < min(ENOUGH_IN_TAIL, cohort) and not sample.takes_everyone(population):
        warnings.warn(f"{type(risk).__name__} lets about {expected:g} of {cohort:g} clients contribute to a round; what such a "
                      "cohort optimises is far from the risk over all clients (theta * m should be 10 or more). Draw more "
                      "clients.",
                      SmallTailWarning, stacklevel=5)


def _catch_refusal(check: Callable[[], None]) -> Iterator[str]:
    """The text of the ValueError that a check raises; nothing where it passes."""
    try:
        check()
    except ValueError as reason:
        yield str(reason)


def _is_near(one: float, other: float, factor: float) -> bool:
    """Whether one number is within a factor of the other, above or below."""
    return other / factor <= one <= other * factor


__getattr__ = old_names(__name__)
