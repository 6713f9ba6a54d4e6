"""What fits what: one place that decides, from what parts, channel, fleet, sampler and population say of themselves.

`refusals` returns everything that stands against a composition, each with its text; `check_composition` raises them all at once,
before any work starts. A rule is a function of a `Composition` that yields texts: what came, what is needed, what to write
instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fedtail.channel.base import Channel, clients_add_noise, refuse_mechanism
from fedtail.data.population import Population
from fedtail.declarations import AggregatorDeclaration, LocalDeclaration, RiskDeclaration
from fedtail.deprecated import old_names, with_old_names
from fedtail.fleet import Fleet
from fedtail.personal.base import NoPersonalModels, PersonalModels
from fedtail.privacy.events import CyclicSampling, PoissonSampling
from fedtail.risk.base import Risk, RiskWrapper
from fedtail.sampling import Sampler
from fedtail.server import SGD, ServerOptimizer

ENOUGH_IN_TAIL = 10
RESOLVED = 15.0      # exp(-15) of a weight still leaves updates a few digits in 62 bits
ROUGHLY = 1.5        # a factor: how far a number that was planned for the population may be from what it is
CLOSELY = 1.1        # two planned numbers from each other


class SmallTailWarning(UserWarning):
    """Few clients contribute in a round: what the cohort optimises is far from the risk over all clients."""


@with_old_names
@dataclass(frozen=True)
class Composition:
    """A method's parts, with the population, channel and fleet that it is to run on, for the rules to judge."""

    sample: Sampler
    risk: Risk
    aggregate: Any
    local: Any
    server: ServerOptimizer
    population: Any
    channel: Channel
    fleet: Fleet
    personal: PersonalModels = NoPersonalModels()

    @property
    def declarations(self) -> tuple[RiskDeclaration, AggregatorDeclaration, LocalDeclaration]:
        """The declarations of the risk, the aggregator and the local training, in this order."""
        return self.risk.declares, self.aggregate.declares, self.local.declares

    @property
    def risk_and_aggregator_names(self) -> tuple[str, str]:
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
        """The number of clients that the sampler draws from this population in a round, on average."""
        return self.sample.expected_size(self.population)


Rule = Callable[[Composition], Iterator[str]]


def refusals(method: Any, population: Any, channel: Channel, fleet: Fleet) -> tuple[str, ...]:
    """All reasons why a method cannot run on this population, channel and fleet, as a tuple of texts; empty where it can.

    For a family these are the reasons of all members; each text comes once. Where the population or the sampler does not provide
    the clients that a member needs, the other rules are not applied to that member.
    """
    found = []
    for member in method.members:
        _check_declarations(member)
        parts = Composition(member.sample, member.risk, member.aggregate, member.local, member.server, population, channel,
                            fleet, member.personal)
        needed = [text for rule in NEEDS for text in rule(parts)]
        found += needed or [text for rule in RULES for text in rule(parts)]      # without its clients nothing else can be judged
    return tuple(dict.fromkeys(found))


def _check_declarations(member: Any) -> None:
    """Raise a TypeError where a part of a method stands in the place of another, which its declaration tells."""
    for name, kind in (("risk", RiskDeclaration), ("aggregate", AggregatorDeclaration), ("local", LocalDeclaration)):
        part = getattr(member, name)
        if not isinstance(part.declares, kind):
            hint = " Penalties go to local training: fedavg(penalty=Proximal(0.1)), say." if name == "risk" else ""
            raise TypeError(f"{name} is {part!r}, which declares a {type(part.declares).__name__}; a {kind.__name__} is "
                            f"needed.{hint}")


def check_composition(method: Any, population: Any, channel: Channel, fleet: Fleet) -> None:
    """Raise one ValueError with all reasons why a method cannot run on this population, channel and fleet.

    Where there are none, warn (`SmallTailWarning`) for each member in whose rounds few clients are expected to contribute.
    Nothing is trained or asked.
    """
    found = refusals(method, population, channel, fleet)
    if len(found) == 1:
        raise ValueError(found[0])
    if found:
        raise ValueError("\n".join([f"{len(found)} things do not fit:", *(f"- {text}" for text in found)]))
    for member in method.members:
        _warn_of_small_tail(member.risk, member.sample, population)


def sampler_refusals(parts: Composition) -> Iterator[str]:
    """Yields the text of the ValueError that the sampler's `check` raises for this population; nothing where it raises none.

    `parts` is the method with the population that it is to run on.
    """
    yield from _catch_refusal(lambda: parts.sample.check(parts.population))


def client_and_group_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text for each requirement of the risk that is not met: every client in every round, a group for each client.

    Also the text of the ValueError that the risk's own `check` raises. `parts` is the method with the population that it is to
    run on.
    """
    declared, name, population = parts.risk.declares, parts.risk_and_aggregator_names[0], parts.population
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
    """Yields a text where the channel refuses the rows of the aggregator or of the risk.

    A channel that reveals only sums refuses single rows, and noise that the server adds to the exact sum. A secure one also
    refuses noise that relies on more clients than it sums over. `parts` is the method with the channel that it is to run over.
    """
    risk, aggregate, _ = parts.declarations
    names = parts.risk_and_aggregator_names
    yield from _catch_refusal(lambda: refuse_mechanism(parts.channel, aggregate.mechanism, aggregate.gathers, names[1]))
    yield from _catch_refusal(lambda: refuse_mechanism(parts.channel, risk.mechanism, False, names[0]))


def private_risk_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the aggregator adds noise and the risk declares (`not_private`) why noise does not make it private.

    `parts` holds both.
    """
    risk, aggregate, _ = parts.declarations
    if aggregate.mechanism.private and risk.not_private:
        yield (f"{parts.risk_and_aggregator_names[0]} cannot be trained privately: {risk.not_private}. Use "
               "Binned(Superquantile(...), ...), or WeightedMean without privacy.")


def divisor_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where updates would be divided by a number that does not fit, so that steps would be too short or too long.

    Refused is an aggregator that divides by the weight the risk releases, where the risk releases none. With noise also: a risk
    planned for a cohort that differs from the sampler's by more than a factor of `ROUGHLY`, and a `total` that differs from the
    sum of weights that the risk declares by more than that (by more than `CLOSELY`, where the risk has a planned cohort). A risk
    that declares no sum of weights, as `Tilted`, takes any total. `parts` is the method with the population that it is to run on.
    """
    risk, aggregate, _ = parts.declarations
    if aggregate.divides_by_release and not risk.releases_weight:
        name, aggregator = parts.risk_and_aggregator_names
        yield (f"{aggregator} needs a total: {name} does not release the weight of those who contribute. Write "
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


def few_rows_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the aggregator has no result of so few clients as are expected to have a non-zero weight.

    A risk that does not declare how many contribute is judged by the cohort; a round in which fewer do is lost. An aggregator
    that takes any number is not judged: a round without contributors keeps the model.
    """
    cohort, needed = parts.cohort_size, parts.aggregate.declares.fewest_rows
    declared = parts.risk.declares.expected_contributors(cohort)
    expected = cohort if declared is None else min(declared, cohort)
    if expected < needed and needed > 1:
        name, aggregator = parts.risk_and_aggregator_names
        yield (f"{aggregator} needs the updates of {needed} clients or more, and about {expected:.3g} of {cohort:g} contribute "
               f"to a round under {name}. Draw more clients, raise tail_fraction, or lower corrupted_fraction.")


def slope_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the aggregator needs the derivative of the risk's density in the loss and the risk does not give it.

    `parts` holds both.
    """
    risk, aggregate, _ = parts.declarations
    if aggregate.needs_slope and not risk.has_slope:
        name, aggregator = parts.risk_and_aggregator_names
        yield (f"{aggregator} needs the slope of the density, which {name} does not give. Use WeightedMean, or "
               "PowerFair as the risk.")


def small_weight_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the channel sums integers and all weights of a round may be too small for them.

    That is so where the risk declares that all may be below exp(-`RESOLVED`) times the largest possible weight. `parts` is the
    method with the channel that it is to run over.
    """
    spread = parts.risk.declares.dynamic_range
    if not parts.channel.reveals_rows and spread > RESOLVED:
        yield (f"with {parts.risk} every weight may be as small as exp(-{spread:g}), which the integers of "
               f"{type(parts.channel).__name__} do not resolve (limit {RESOLVED:g}). Lower tilt, tighten loss_bound or leave it "
               "out; or raise tail_fraction (theta), or use Worst.")


def lost_memory_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text for each part whose clients' memory must not be lost, where this fleet may lose it.

    Those are the risk, the local training and the personal models of `parts`, the method with the fleet it is to run on.
    """
    for part in (parts.risk, parts.local, parts.personal):
        keeps = part.declares.keeps
        if parts.fleet.forgets and keeps and not keeps.may_be_lost:
            yield f"{type(part).__name__} cannot run on a fleet that may lose its clients' memory: {keeps.lost}."


def kept_models_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the aggregator or the personal models rely on models that local training does not keep.

    Also where an aggregator that counts each client's model once is given a risk that weighs clients by their losses, or a server
    whose step is not the move of the mean itself.
    """
    risk, aggregate, local = parts.declarations
    (name, aggregator), kind = parts.risk_and_aggregator_names, type(parts.local).__name__
    if aggregate.needs_kept_models and not local.keeps_models:
        yield (f"{aggregator} needs clients that keep models and send how far these have moved, and {kind} keeps none. Use "
               "local=MeanRegularised(...), or WeightedMean.")
    if parts.personal.declares.kept_by_local and not local.keeps_models:
        yield (f"{type(parts.personal).__name__} predicts by models that local training keeps, and {kind} keeps none. Use "
               "local=MeanRegularised(...), or personal=Ditto(...).")
    if aggregate.needs_kept_models and risk.reads_losses:
        yield (f"{aggregator} counts every client's model once, and {name} weighs clients by their losses. Use risk=Mean(), or "
               "WeightedMean.")
    if aggregate.needs_kept_models and parts.server != SGD(1.0):
        yield (f"{aggregator} says how far the mean of the clients' models has moved, and by {parts.server} the shared model "
               "would be another. Use server=SGD(1.0).")


def few_contributors_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where fewer clients than the channel's `minimum_contributors` are expected to have a non-zero weight.

    Also the channel's own texts against the fleet. A risk that does not declare how many contribute is not judged here: the
    channel counts them in each round. `parts` is the method with the population, channel and fleet that it is to run on.
    """
    channel, cohort = parts.channel, parts.cohort_size
    expected = parts.risk.declares.expected_contributors(cohort)
    if expected is not None and expected < channel.minimum_contributors:
        name, _ = parts.risk_and_aggregator_names
        yield (f"{name} lets about {expected:g} of {cohort:g} clients contribute to a round: a sum over so few "
               f"reveals much about each (minimum_contributors={channel.minimum_contributors}). Draw more clients, or raise "
               "tail_fraction.")
    yield from channel.fleet_refusals(cohort, parts.fleet)


def split_cohort_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where local training lets some clients of a cohort answer a question while the others train, and cannot.

    It cannot where the cohort has too few clients for both, on average; where one of the two sums is over fewer than the
    channel's `minimum_contributors`; and with noise, since the aggregator would divide both sums by the weight of a whole cohort.
    """
    answering, cohort, channel = parts.local.declares.answers_only, parts.cohort_size, parts.channel
    if not answering:
        return
    if cohort <= answering:
        yield (f"{answering} clients of a cohort are asked for their gradients and the others train, but only {cohort:g} are "
               "drawn a round. Draw more clients, or lower gradient_clients.")
    elif min(answering, cohort - answering) < channel.minimum_contributors:
        yield (f"{answering} clients of a cohort are asked for their gradients and about {cohort - answering:g} train: a sum "
               f"over so few reveals much about each (minimum_contributors={channel.minimum_contributors}). Draw more clients, "
               "or leave gradient_clients out: then all do both.")
    if parts.aggregate.declares.mechanism.private:
        yield (f"{parts.risk_and_aggregator_names[1]} divides by the weight of a whole cohort, of which {answering} clients are "
               "asked for their gradients while only the others train. Leave gradient_clients out: then all do both.")


def small_group_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where a risk without noise asks by group and the smallest group is too small for the channel.

    That is so where fewer of its clients are expected in a cohort than the channel's `minimum_contributors`. `parts` is the
    method with the population and channel that it is to run on.
    """
    risk, minimum = parts.risk.declares, parts.channel.minimum_contributors
    if risk.needs_groups is None or risk.mechanism.private or not minimum:
        return
    sizes = parts.population.group.bincount()
    smallest = int(sizes.masked_fill(sizes == 0, len(parts.population) + 1).argmin())      # a group without clients tells nothing
    expected = int(sizes[smallest]) * parts.cohort_size / len(parts.population)
    if expected < minimum:
        name, _ = parts.risk_and_aggregator_names
        yield (f"{name} asks by group, and group {smallest} has {int(sizes[smallest])} of {len(parts.population)} "
               f"clients, about {expected:.3g} of them in a round: a sum over so few reveals much about each "
               f"(minimum_contributors={minimum}). Merge small groups, or draw more clients.")


def node_noise_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text for the risk or the aggregator where its noise relies on more clients than are expected beside one node's.

    A node that adds its own clients' shares of integer noise knows them, so those of all other nodes must be enough: the expected
    number of sampled clients outside the largest node is compared. Nothing where the population has no nodes. `parts` is the
    method with the population that it is to run on.
    """
    risk, aggregate, _ = parts.declarations
    nodes = parts.population.node
    if nodes is None:
        return
    largest = int(nodes.unique(return_counts=True)[1].max()) / len(nodes)
    beside = parts.cohort_size * (1 - largest)
    for name, mechanism in zip(parts.risk_and_aggregator_names, (risk.mechanism, aggregate.mechanism), strict=False):
        if clients_add_noise(mechanism) and beside < mechanism.minimum:
            yield (f"the noise of {name} relies on {mechanism.minimum} clients beside those of any one node, which knows its own "
                   f"clients' shares, and about {beside:.3g} of {parts.cohort_size:g} in a round are. Plan for fewer clients, "
                   "sample more, or spread them over more nodes.")


def secret_cohort_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text for the risk or the local training where it sends numbers that depend on a cohort which must stay secret.

    It must where the aggregator or the risk adds noise and cohorts are drawn by Poisson sampling: amplification by sampling is
    claimed against an observer who does not know who was sampled. `parts` is the method with its sampler.
    """
    risk, aggregate, _ = parts.declarations
    noised = aggregate.mechanism.private or risk.mechanism.private
    if not noised or not isinstance(parts.sample.event(parts.population), PoissonSampling):
        return
    for part in (parts.risk, parts.local):
        if part.declares.reads_cohort:
            yield (f"{type(part).__name__} sends numbers that depend on who was sampled, and amplification by Poisson sampling "
                   "relies on cohorts that stay secret. Use parts that do not read the cohort: Stragglers without exact=True, "
                   "a fixed tail_fraction.")


def two_units_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where local training adds noise for single examples, and another part, or the fleet, does not fit that.

    Noise of the aggregator or the risk protects clients, and no one epsilon is about both. Clients that may have to answer again
    would draw noise anew, for which nothing is charged. `parts` is the method with the channel and fleet that it is to run on.
    """
    risk, aggregate, local = parts.declarations
    if local.update_release is None:
        return
    name = type(parts.local).__name__
    for other, mechanism in zip(parts.risk_and_aggregator_names, (risk.mechanism, aggregate.mechanism), strict=True):
        if mechanism.private:
            yield (f"{name} hides single examples, and the noise of {other} hides clients: no one epsilon is about both. Use "
                   "WeightedMean and a risk without noise, or LocalSGD.")
    if not parts.channel.all_answer(parts.fleet):
        yield (f"{name} draws noise inside clients, and clients of this fleet may have to answer again, with noise that nothing "
               "is charged for. Use a fleet in this process, and a channel without dropout.")


def participation_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where the aggregator's noise allows a client only seldom and cohorts are drawn otherwise, or asked twice.

    Noise that is correlated over rounds needs cohorts that take turns (`CyclicCohorts`), and one sum of updates in a round.
    `parts` is the method with its sampler.
    """
    declared, sampling = parts.aggregate.declares, parts.sample.event(parts.population)
    aggregator = parts.risk_and_aggregator_names[1]
    if declared.most_rounds is None:
        return
    if declared.separation > 1 and not (isinstance(sampling, CyclicSampling) and sampling.separation >= declared.separation):
        yield (f"the noise of {aggregator} is planned for clients that participate at most once in {declared.separation} rounds, "
               f"which {parts.sample} does not see to. Use sample=CyclicCohorts({declared.separation}).")
    elif isinstance(sampling, CyclicSampling) and sampling.separation > declared.separation > 1:
        yield (f"cohorts take turns of {sampling.separation} rounds, and the noise of {aggregator} is planned for turns of "
               f"{declared.separation}, by which clients check that they are not sampled too soon: most would answer zeros. "
               f"Write separation={sampling.separation} for both.")
    if parts.local.declares.mean_updates:
        yield (f"local training asks for updates more than once in a round, and the noise of {aggregator} is planned for one "
               "sum. Use a penalty that asks for none, as Proximal, or PrivateMean.")


def scaled_input_refusals(parts: Composition) -> Iterator[str]:
    """Yields a text where some part adds noise, and the inputs were scaled by numbers that were fitted on clients' data.

    These numbers go with the model, without noise. `parts` is the method with its population.
    """
    risk, aggregate, local = parts.declarations
    noised = aggregate.mechanism.private or risk.mechanism.private or local.update_release is not None
    scaled = isinstance(parts.population, Population) and parts.population.scaling is not None
    if noised and scaled and parts.population.scaling.fitted:
        yield ("the inputs were scaled by means and deviations of the clients' data, which go with the model and have no "
               "noise. Scale by public numbers: fedtail.data.Scaling.public(shift, scale), in a file "
               "scale = { shift = 0.0, scale = 255.0 }.")


NEEDS: tuple[Rule, ...] = (sampler_refusals, client_and_group_refusals)
RULES: tuple[Rule, ...] = (
    channel_refusals, private_risk_refusals, divisor_refusals, few_rows_refusals, slope_refusals,
    small_weight_refusals, lost_memory_refusals, kept_models_refusals, few_contributors_refusals, split_cohort_refusals,
    small_group_refusals, node_noise_refusals, secret_cohort_refusals, participation_refusals, two_units_refusals,
    scaled_input_refusals,
)


def _warn_of_small_tail(risk: Risk, sample: Sampler, population: Any) -> None:
    """Warn (`SmallTailWarning`) where the risk is expected to give fewer than `ENOUGH_IN_TAIL` clients a non-zero weight.

    That is of an average cohort that `sample` draws from the population. Silent where the number is unknown, where every round
    samples every client, or where the whole cohort contributes.
    """
    cohort = sample.expected_size(population)
    expected = risk.declares.expected_contributors(cohort)
    if expected is not None and expected < min(ENOUGH_IN_TAIL, cohort) and not sample.takes_everyone(population):
        warnings.warn(f"{type(risk).__name__} lets about {expected:g} of {cohort:g} clients contribute to a round; what such a "
                      "cohort optimises is far from the risk over all clients (theta * m should be 10 or more). Draw more "
                      "clients.",
                      SmallTailWarning, stacklevel=5)


def _catch_refusal(check: Callable[[], None]) -> Iterator[str]:
    """Yields the text of the ValueError that `check()` raises; nothing where it returns."""
    try:
        check()
    except ValueError as reason:
        yield str(reason)


def _is_near(one: float, other: float, factor: float) -> bool:
    """Whether `one` is between `other / factor` and `other * factor`."""
    return other / factor <= one <= other * factor


__getattr__ = old_names(__name__)
