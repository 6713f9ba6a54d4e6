"""What fits what: every rule with its text, all refusals at once, parts of a user's own like ours, and the table in docs/."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import fedtail
from fedtail import (
    Ascent,
    Binned,
    CurvatureMean,
    DiscreteNoise,
    Everyone,
    Family,
    GaussianNoise,
    GroupAscent,
    IntegerChannel,
    Mean,
    NoisyHistogram,
    PlainChannel,
    PowerFair,
    PrivateMean,
    Refreshed,
    SecureChannel,
    Superquantile,
    Tilted,
    Worst,
    compatibility,
    composition,
    train,
)
from fedtail.algorithm import RoundLostWarning
from fedtail.base_part import Part, classes_sent_with
from fedtail.composition import NEEDS, RULES, Composition, check_composition, refusals
from fedtail.declarations import AggregatorDeclaration, RiskDeclaration
from fedtail.engine import LocalFleet
from fedtail.local import LocalTraining
from fedtail.privacy import NoisySum
from fedtail.questions import Statistic, StatisticPart
from fedtail.risk import Risk

from cases import small_population
from own_risk import OwnMedian
from remote_cases import LOCAL, PEOPLE, TASK, Sites, params_of

HERE = LocalFleet(PEOPLE, TASK)
BASE = replace(fedtail.fedavg(30, **LOCAL), sample=Everyone())
GROUPLESS = replace(PEOPLE, group=None)
NOISE, ROWS = DiscreteNoise(1.0, planned_clients=10), IntegerChannel()
FTRL = fedtail.dp_ftrl(30, 0.1, 1.0, rounds=6, cohort_size=10, **LOCAL)
HIDING = SecureChannel(16, minimum_contributors=5)
NODES = Sites()
HISTOGRAM = NoisyHistogram(4.0, 30.0, NOISE, bins=8)


def method(**parts):
    return replace(BASE, **parts)


def private(risk, total=None, noise=NOISE):
    return method(risk=risk, aggregate=PrivateMean(1.0, noise, total))


@dataclass(frozen=True)
class Particular(Risk):
    """A user's risk with a condition of its own."""

    most: int

    def check(self, population, sample):
        if len(population) > self.most:
            raise ValueError(f"Particular is for {self.most} clients.")


@dataclass(frozen=True)
class Own(Part):
    """An aggregator of a user's own, of which only the declaration matters here."""

    declares: AggregatorDeclaration


@dataclass(frozen=True)
class Attached(fedtail.LocalSGD):
    """Local training that keeps something on its clients."""

    may_be_lost: bool = True

    @property
    def declares(self):
        return replace(super().declares, keeps=fedtail.parts.Keeps("nothing goes on without it", self.may_be_lost))


@dataclass(frozen=True)
class TellsOfCohort(fedtail.LocalSGD):
    """Local training that sends what depends on the cohort."""

    @property
    def declares(self):
        return replace(super().declares, reads_cohort=True)


@dataclass(frozen=True)
class Case:
    """A composition that one rule refuses, with the whole text or its beginning, and a neighbour that nothing refuses."""

    rule: str
    refused: object
    text: str
    fits: object
    channel: object = PlainChannel()
    fleet: object = HERE
    fits_fleet: object = None
    fits_channel: object = None
    population: object = PEOPLE
    fits_population: object = PEOPLE


CASES = [
    Case("sampler_refusals", fedtail.fedavg(31), "cohort_size=31 clients a round, but the population has 30.", fedtail.fedavg(30)),
    Case("client_and_group_refusals", method(sample=fedtail.Uniform(29), risk=Ascent()),
         "Ascent keeps a lambda on every client and needs everybody every round, which Uniform(cohort_size=29) does not give of 30 clients. Use sample=Everyone(), or GroupAscent.",
         method(sample=fedtail.Uniform(30), risk=Ascent())),
    Case("client_and_group_refusals", method(risk=GroupAscent(3)), "GroupAscent needs a group for each client: Population.from_arrays(..., group=...).",
         method(risk=GroupAscent(3)), population=GROUPLESS),
    Case("client_and_group_refusals", method(risk=GroupAscent(2)), "population.group goes up to 2, but groups=2. Write groups=3.", method(risk=GroupAscent(3))),
    Case("client_and_group_refusals", method(risk=Refreshed(Particular(29), 2)), "Particular is for 29 clients.", method(risk=Refreshed(Particular(30), 2))),
    Case("channel_refusals", method(aggregate=OwnMedian()),
         "OwnMedian looks at single rows, but IntegerChannel reveals only sums. Use an aggregator that needs only sums (WeightedMean, GeometricMedian), or PlainChannel.",
         method(aggregate=OwnMedian()), ROWS, fits_channel=PlainChannel()),
    Case("channel_refusals", private(Mean(), 30.0, GaussianNoise(1.0)),
         "PrivateMean adds GaussianNoise on the server, to the exact sum, which IntegerChannel is there to hide. Use DiscreteNoise, whose shares are added by the clients, or PlainChannel.",
         private(Mean(), 30.0), ROWS),
    Case("channel_refusals", method(risk=Refreshed(Binned(Superquantile(0.5), replace(HISTOGRAM, noise=GaussianNoise(1.0))), 2)),
         "Refreshed adds GaussianNoise on the server, to the exact sum, which IntegerChannel is there to hide.",
         method(risk=Refreshed(Binned(Superquantile(0.5), HISTOGRAM), 2)), ROWS),
    Case("channel_refusals", private(Mean(), 30.0, DiscreteNoise(1.0, planned_clients=17)),
         "PrivateMean relies on the noise of 17 clients, but SecureChannel releases sums over 16. Write threshold=17, or plan for fewer clients.",
         private(Mean(), 30.0, DiscreteNoise(1.0, planned_clients=16)), HIDING),
    Case("node_noise_refusals", private(Mean(), 30.0, DiscreteNoise(1.0, planned_clients=25)),
         "the noise of PrivateMean relies on 25 clients beside those of any one node, which knows its own clients' shares, and about 24 of 30 in a round are. Plan for fewer clients, sample more, or spread them over more nodes.",
         private(Mean(), 30.0, DiscreteNoise(1.0, planned_clients=20, colluders=4)), fleet=NODES.fleet(), population=NODES.registry, fits_population=NODES.registry),
    Case("private_risk_refusals", private(Worst(), 1.0),
         "Worst cannot be trained privately: the largest loss is one client's, and noise that hides one client hides it. Use Binned(Superquantile(...), ...), or WeightedMean without privacy.",
         method(risk=Worst())),
    Case("private_risk_refusals", private(Particular(30), 30.0), "Particular cannot be trained privately: it does not declare that one client moves it by a bounded amount",
         private(Tilted(1.0), 30.0)),
    Case("divisor_refusals", private(Mean()),
         "PrivateMean needs a total: Mean does not release the weight of those who contribute. Write total=theta * m, the weight the tail is expected to have.",
         private(Refreshed(Binned(Superquantile(0.5), HISTOGRAM), 2))),
    Case("divisor_refusals", private(Superquantile(0.5), 23.0),
         "updates are divided by total=23, but of 30 clients about 15 contribute under Superquantile: they would be 1.53 times too short. Write total=15.",
         private(Superquantile(0.5), 22.0)),
    Case("divisor_refusals", private(Refreshed(Binned(Superquantile(0.5), HISTOGRAM), 2), 13.0),
         "updates are divided by total=13, but of 30 clients about 15 contribute under Superquantile: they would be 1.15 times too long. Write total=15.",
         private(Refreshed(Binned(Superquantile(0.5), HISTOGRAM), 2), 14.0)),
    Case("divisor_refusals", private(Binned(Tilted(1.0), replace(HISTOGRAM, expected_clients=46.0)), 30.0),
         "the histogram is planned for expected_clients=46, but of this population 30 are expected in a round. Write expected_clients=30.",
         private(Binned(Tilted(1.0), replace(HISTOGRAM, expected_clients=44.0)), 30.0)),
    Case("few_rows_refusals", method(risk=Superquantile(0.1), aggregate=fedtail.Krum(0.4)),
         "Krum needs the updates of 7 clients or more, and about 3 of 30 contribute to a round under Superquantile. Draw more clients, raise tail_fraction, or lower corrupted_fraction.",
         method(risk=Superquantile(0.1), aggregate=fedtail.Krum(0.2))),
    Case("slope_refusals", method(risk=Superquantile(0.5), aggregate=CurvatureMean()),
         "CurvatureMean needs the slope of the density, which Superquantile does not give. Use WeightedMean, or PowerFair as the risk.",
         method(risk=Refreshed(PowerFair(1.0), 2), aggregate=CurvatureMean())),
    Case("small_weight_refusals", method(risk=Tilted(3.0, 10.0)),
         "with Tilted(tilt=3.0, loss_bound=10.0) every weight may be as small as exp(-30), which the integers of IntegerChannel do not resolve (limit 15). Lower tilt, tighten loss_bound or leave it out; or raise tail_fraction (theta), or use Worst.",
         method(risk=Tilted(1.5, 10.0)), ROWS),
    Case("small_weight_refusals", method(risk=Tilted(3.0, 10.0)), "with Tilted(tilt=3.0, loss_bound=10.0) every weight may be as small as exp(-30)",
         method(risk=Tilted(3.0, 10.0)), ROWS, fits_channel=PlainChannel()),
    Case("lost_memory_refusals", method(risk=Ascent()), "Ascent cannot run on a fleet that may lose its clients' memory: a client that lost its lambda starts again at one",
         method(risk=Ascent()), fleet=NODES.fleet(), fits_fleet=NODES.fleet(forgets=False)),
    Case("lost_memory_refusals", method(local=Attached(may_be_lost=False)), "Attached cannot run on a fleet that may lose its clients' memory: nothing goes on without it.",
         method(local=Attached(may_be_lost=True)), fleet=NODES.fleet()),
    Case("kept_models_refusals", method(aggregate=fedtail.aggregation.MeanOfModels()),
         "MeanOfModels needs clients that keep models and send how far these have moved, and LocalSGD keeps none. Use local=MeanRegularised(...), or WeightedMean.",
         fedtail.mean_regularised(0.1)),
    Case("kept_models_refusals", replace(method(), personal=fedtail.personal.KeptByLocal()),
         "KeptByLocal predicts by models that local training keeps, and LocalSGD keeps none. Use local=MeanRegularised(...), or personal=Ditto(...).",
         replace(method(), personal=fedtail.Ditto(0.1))),
    Case("kept_models_refusals", replace(fedtail.mean_regularised(0.1), risk=Superquantile(0.5)),
         "MeanOfModels counts every client's model once, and Superquantile weighs clients by their losses. Use risk=Mean(), or WeightedMean.",
         replace(fedtail.mean_regularised(0.1), risk=Superquantile(0.5), aggregate=fedtail.WeightedMean())),
    Case("few_contributors_refusals", method(risk=Superquantile(0.15)),
         "Superquantile lets about 4.5 of 30 clients contribute to a round: a sum over so few reveals much about each (minimum_contributors=5). Draw more clients, or raise tail_fraction.",
         method(risk=Superquantile(0.17)), HIDING),
    Case("split_cohort_refusals", fedtail.feddane(0.1, 8, 8),
         "8 clients of a cohort are asked for their gradients and the others train, but only 8 are drawn a round. Draw more clients, or lower gradient_clients.",
         fedtail.feddane(0.1, 9, 8)),
    Case("split_cohort_refusals", fedtail.feddane(0.1, 20, 16),
         "16 clients of a cohort are asked for their gradients and about 4 train: a sum over so few reveals much about each (minimum_contributors=5). Draw more clients, or leave gradient_clients out: then all do both.",
         fedtail.feddane(0.1, 20, 15), HIDING),
    Case("split_cohort_refusals", replace(private(Mean(), 30.0), local=fedtail.LocalSGD(penalty=fedtail.Dane(0.1, 10))),
         "PrivateMean divides by the weight of a whole cohort, of which 10 clients are asked for their gradients while only the others train. Leave gradient_clients out: then all do both.",
         replace(private(Mean(), 30.0), local=fedtail.LocalSGD(penalty=fedtail.Dane(0.1)))),
    Case("small_group_refusals", method(sample=fedtail.Uniform(16), risk=Refreshed(GroupAscent(3), 2)),
         "Refreshed asks by group, and group 1 has 5 of 30 clients, about 2.67 of them in a round: a sum over so few reveals much about each (minimum_contributors=5). Merge small groups, or draw more clients.",
         method(risk=GroupAscent(3)), channel=HIDING, population=replace(PEOPLE, group=torch.tensor([0] * 13 + [1] * 5 + [2] * 12))),
    Case("few_contributors_refusals", method(sample=fedtail.Uniform(15)),
         "about 15 clients are drawn a round, and sums are released over 16 or more. Lower threshold, or draw more clients.", method(sample=fedtail.Uniform(16)), HIDING),
    Case("secret_cohort_refusals", replace(private(Mean(), 30.0), sample=fedtail.Poisson(0.99), local=TellsOfCohort()),
         "TellsOfCohort sends numbers that depend on who was sampled, and amplification by Poisson sampling relies on cohorts that stay secret. Use parts that do not read the cohort: Stragglers without exact=True, a fixed tail_fraction.",
         replace(private(Mean(), 30.0), local=TellsOfCohort())),
    Case("participation_refusals", replace(FTRL, sample=fedtail.Uniform(10)),
         "the noise of CorrelatedMean is planned for clients that participate at most once in 3 rounds, which Uniform(cohort_size=10) does not see to. Use sample=CyclicCohorts(3).",
         FTRL),
    Case("participation_refusals", replace(FTRL, local=fedtail.LocalSGD(penalty=fedtail.Dane(0.1))),
         "local training asks for updates more than once in a round, and the noise of CorrelatedMean is planned for one sum. Use a penalty that asks for none, as Proximal, or PrivateMean.", FTRL),
    Case("scaled_input_refusals", private(Mean(), 30.0),
         "the inputs were scaled by means and deviations of the clients' data, which go with the model and have no noise. Scale by public numbers: fedtail.data.Scaling.public(shift, scale), in a file scale = { shift = 0.0, scale = 255.0 }.",
         private(Mean(), 30.0), population=fedtail.data.Scaling.fit(PEOPLE)(PEOPLE), fits_population=fedtail.data.Scaling.public(1.0, 2.0)(PEOPLE)),
    Case("two_units_refusals", replace(private(Mean(), 30.0), local=fedtail.ExamplePrivateSGD(1.0, 1.0)),
         "ExamplePrivateSGD hides single examples, and the noise of PrivateMean hides clients: no one epsilon is about both. Use WeightedMean and a risk without noise, or LocalSGD.",
         method(local=fedtail.ExamplePrivateSGD(1.0, 1.0))),
    Case("two_units_refusals", method(local=fedtail.ExamplePrivateSGD(1.0, 1.0)),
         "ExamplePrivateSGD draws noise inside clients, and clients of this fleet may have to answer again, with noise that nothing is charged for. Use a fleet in this process, and a channel without dropout.",
         BASE, PlainChannel(), NODES.fleet()),
    Case("few_contributors_refusals", BASE, 'nodes mask their rows and drop out by themselves: masks = "none" and dropout are for the simulator. Leave them out.',
         BASE, replace(HIDING, masks="none"), NODES.fleet(), NODES.fleet(), HIDING),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.text[:40]}")
def test_a_rule_says_its_text_where_it_is_broken_and_no_other_rule_says_anything(case):
    (said,) = refusals(case.refused, case.population, case.channel, case.fleet)
    assert said.startswith(case.text)
    parts = Composition(case.refused.sample, case.refused.risk, case.refused.aggregate, case.refused.local, case.refused.server, case.population, case.channel, case.fleet, case.refused.personal)
    asked = NEEDS if case.rule in {rule.__name__ for rule in NEEDS} else RULES
    assert {rule.__name__: list(rule(parts)) for rule in asked} == {rule.__name__: [said] if rule.__name__ == case.rule else [] for rule in asked}
    assert refusals(case.fits, case.fits_population, case.fits_channel or case.channel, case.fits_fleet or case.fleet) == ()


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == {rule.__name__ for rule in (*NEEDS, *RULES)}
    public = {name for name, value in vars(composition).items() if getattr(value, "__annotations__", {}).get("return") == "Iterator[str]" and not name.startswith("_")}
    assert public == {rule.__name__ for rule in (*NEEDS, *RULES)}


def test_all_that_stands_against_a_method_is_said_in_one_message():
    wrong = private(Refreshed(Worst(), 2), noise=GaussianNoise(1.0))
    texts = refusals(wrong, PEOPLE, HIDING, HERE)
    assert [text.split(".")[0].split(":")[0] for text in texts] == [
        "PrivateMean adds GaussianNoise on the server, to the exact sum, which SecureChannel is there to hide",
        "Refreshed cannot be trained privately",
        "PrivateMean needs a total",
        "Refreshed lets about 1 of 30 clients contribute to a round",
    ]
    with pytest.raises(ValueError) as refused:
        train(wrong, TASK, PEOPLE, rounds=1, channel=HIDING)
    assert str(refused.value) == "\n".join(["4 things do not fit:", *(f"- {text}" for text in texts)])


def test_one_refusal_is_said_without_a_list_and_that_of_two_members_once():
    worst = method(risk=Worst())
    family = Family((worst, BASE, replace(worst, local=replace(worst.local, learning_rate=0.1)), method(risk=Superquantile(0.1))))
    assert len(refusals(family, PEOPLE, HIDING, HERE)) == 2
    assert refusals(Family((worst, worst)), PEOPLE, HIDING, HERE) == refusals(worst, PEOPLE, HIDING, HERE)
    with pytest.raises(ValueError, match=r"^Worst lets about 1 of 30"):
        check_composition(worst, PEOPLE, HIDING, HERE)
    with pytest.warns(fedtail.SmallTailWarning, match="Superquantile lets about 5 of 10 clients contribute to a round"):
        check_composition(fedtail.delta_fl(0.5, 10), PEOPLE, PlainChannel(), HERE)


def test_without_its_clients_nothing_else_of_a_method_is_judged():
    texts = refusals(replace(private(GroupAscent(2)), sample=fedtail.Uniform(31)), PEOPLE, HIDING, HERE)
    assert [text.split(",")[0] for text in texts] == ["cohort_size=31 clients a round", "population.group goes up to 2"]


@pytest.mark.parametrize("risk", [Worst(), Refreshed(Worst(), 3), Refreshed(Refreshed(Worst(), 3), 2), PowerFair(1.0), Refreshed(GroupAscent(3), 2)], ids=repr)
def test_what_noise_cannot_make_private_is_refused_inside_a_wrapper_as_it_is_alone(risk):
    (text,) = refusals(private(risk, 30.0), PEOPLE, PlainChannel(), HERE)
    inner = risk
    while isinstance(inner, Refreshed):
        inner = inner.risk
    assert text.startswith(f"{type(risk).__name__} cannot be trained privately: {inner.declares.not_private}.")
    with pytest.raises(ValueError, match=f"{type(risk).__name__} cannot be trained privately"):
        Binned(risk, HISTOGRAM)


@pytest.mark.parametrize("risk", [Tilted(3.0, 10.0), Refreshed(Tilted(3.0, 10.0), 2), Binned(Tilted(3.0, 10.0), HISTOGRAM), Refreshed(Binned(Tilted(3.0, 10.0), HISTOGRAM), 2),
                                  Tilted(-3.0, 10.0), Superquantile(1e-7)], ids=repr)
def test_weights_too_small_for_integers_are_refused_alone_and_inside_a_wrapper(risk):
    (text,) = refusals(method(risk=risk), PEOPLE, IntegerChannel(), HERE)
    assert "which the integers of IntegerChannel do not resolve (limit 15)" in text
    assert refusals(method(risk=risk), PEOPLE, PlainChannel(), HERE) == ()


@pytest.mark.parametrize(("declared", "text"), [
    (AggregatorDeclaration(1, gathers=True), "Own looks at single rows, but IntegerChannel reveals only sums."),
    (AggregatorDeclaration(1, needs_slope=True), "Own needs the slope of the density, which Superquantile does not give."),
    (AggregatorDeclaration(0, mechanism=NoisySum(1.0, GaussianNoise(1.0)), total=15.0), "Own adds GaussianNoise on the server, to the exact sum"),
    (AggregatorDeclaration(0, mechanism=NoisySum(1.0, NOISE), total=60.0), "updates are divided by total=60, but of 30 clients about 15 contribute under Superquantile"),
    (AggregatorDeclaration(1, fewest_rows=16), "Own needs the updates of 16 clients or more, and about 15 of 30 contribute to a round under Superquantile."),
    (AggregatorDeclaration(0, divides_by_release=True), "Own needs a total: Superquantile does not release the weight of those who contribute."),
], ids=["gathers", "needs_slope", "mechanism", "total", "fewest_rows", "divides_by_release"])
def test_an_aggregator_of_a_users_own_is_checked_like_ours(declared, text):
    (said,) = refusals(method(risk=Superquantile(0.5), aggregate=Own(declared)), PEOPLE, IntegerChannel(), HERE)
    assert said.startswith(text)
    assert refusals(method(risk=Superquantile(0.5), aggregate=Own(AggregatorDeclaration(1))), PEOPLE, IntegerChannel(), HERE) == ()


def test_a_users_private_aggregator_refuses_what_cannot_be_private():
    noisy = Own(AggregatorDeclaration(0, mechanism=NoisySum(1.0, NOISE), total=30.0))
    (said,) = refusals(method(risk=Refreshed(Worst(), 2), aggregate=noisy), PEOPLE, PlainChannel(), HERE)
    assert said.startswith("Refreshed cannot be trained privately: the largest loss is one client's")


@dataclass(frozen=True)
class ByGroup(Risk):
    """Needs the clients' groups, which a histogram of losses does not show."""

    @property
    def declares(self):
        return RiskDeclaration(needs_groups=3, not_private="")


def test_a_risk_that_needs_groups_is_not_fitted_from_a_histogram_that_has_none():
    with pytest.raises(ValueError, match="ByGroup cannot be fitted from a histogram"):
        Binned(ByGroup(), HISTOGRAM)


@dataclass(frozen=True)
class Above(Risk):
    """Six lines, which declare nothing."""

    threshold: float

    def density(self, clients, dual):
        return (clients.losses > self.threshold).double()


def releases_of(trained):
    return [[release.what for release in event.releases] for event, count in trained.ledger.rounds for _ in range(count)]


def test_a_risk_that_declares_nothing_is_counted_in_every_round_over_a_channel_that_hides():
    everybody, nobody = (method(risk=Above(threshold)) for threshold in (0.0, 5.0))
    counted = ["how many clients contribute under Above", "the updates, by WeightedMean"]
    assert refusals(everybody, PEOPLE, HIDING, HERE) == ()
    trained = train(everybody, TASK, PEOPLE, rounds=2, channel=HIDING)
    assert releases_of(trained) == [counted, counted]
    assert torch.equal(params_of(trained), params_of(train(BASE, TASK, PEOPLE, rounds=2, channel=IntegerChannel())))
    assert releases_of(train(everybody, TASK, PEOPLE, rounds=1, channel=IntegerChannel()))[0][-1] == counted[1]
    with pytest.warns(RoundLostWarning, match="as few as 0 clients may contribute, and minimum_contributors is 5"), pytest.warns(fedtail.NoContributionWarning):
        lost = train(nobody, TASK, PEOPLE, rounds=1, channel=HIDING)
    assert releases_of(lost) == [counted[:1]]


def test_a_noisy_histogram_does_not_say_how_many_contribute_so_they_are_counted():
    """A histogram that is mostly noise shows tails that are not there: such rounds are lost, and none trains fewer than five."""
    mostly_noise = method(risk=Binned(Superquantile(0.5), replace(HISTOGRAM, noise=DiscreteNoise(20.0, planned_clients=10))))
    with pytest.warns(RoundLostWarning, match="minimum_contributors is 5"):
        trained = train(mostly_noise, TASK, PEOPLE, rounds=8, channel=replace(HIDING, masks="none"))
    released = releases_of(trained)
    assert all("how many clients contribute under Binned" in one for one in released)
    assert 0 < sum("the updates, by WeightedMean" in one for one in released) < 8


@dataclass(frozen=True)
class MeanLoss(StatisticPart):
    def statistic(self, clients, trial):
        return torch.stack([clients.mass, clients.mass * clients.losses], 1)

    def row_bound(self, clients, mass):
        return 100 * mass


@dataclass(frozen=True)
class Forgetful(Risk):
    """Asks through a helper, and does not say so."""

    def fit(self, previous):
        mass, lifted = yield Statistic(MeanLoss(), torch.zeros(0))
        return (lifted / mass)[None]

    def density(self, clients, dual):
        return torch.where(clients.losses > dual[0], 1.0, 0.5)


@dataclass(frozen=True)
class Declared(Forgetful):
    sends: ClassVar[tuple[type, ...]] = (MeanLoss,)

    @property
    def declares(self):
        return RiskDeclaration(contributing=1.0)


@pytest.mark.parametrize("channel", [PlainChannel(), IntegerChannel(), HIDING], ids=lambda channel: type(channel).__name__)
def test_a_helper_that_a_risk_declares_is_known_to_its_nodes(channel):
    expected = params_of(train(method(risk=Declared()), TASK, PEOPLE, rounds=2))
    remote = params_of(train(method(risk=Declared()), TASK, fleet=Sites(3, parts=[Declared]).fleet(), rounds=2, channel=channel))
    assert (expected - TASK.params()).abs().max() > 0.01
    assert torch.allclose(remote, expected, atol=1e-5)


@pytest.mark.parametrize("channel", [PlainChannel(), HIDING], ids=lambda channel: type(channel).__name__)
def test_a_helper_that_a_risk_forgot_to_declare_is_refused_by_every_node_in_words(channel):
    fleet = Sites(3, parts=[Forgetful]).fleet()
    with pytest.warns(RoundLostWarning):
        train(method(risk=Forgetful()), TASK, fleet=fleet, rounds=1, channel=channel)
    problems = fleet.reports[0].problems
    assert set(problems) == {0, 1, 2}
    assert all("holds a 'MeanLoss', which this node was not given" in text for text in problems.values())


# The table in docs/

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"


@pytest.fixture(scope="module")
def rows():
    return list(compatibility.table_rows())


def test_the_table_of_what_runs_where_is_what_the_parts_declare(rows):
    page = PAGE.read_text()
    shown = page.split(compatibility.BEGIN)[1].split(compatibility.END)[0].strip()
    assert shown == compatibility.markdown_table(iter(rows)), "docs/methods.md is not what the parts declare. Run make tables (python -m fedtail.compatibility docs/methods.md)."
    assert compatibility.page_with_table(page) == page


def test_the_table_has_every_risk_and_every_aggregator(rows):
    names = " ".join(row.part for row in rows)
    for room in (fedtail.risk, fedtail.aggregation, fedtail.local):
        for name in room.__all__:
            kind = getattr(room, name)
            if isinstance(kind, type) and issubclass(kind, Part if room is not fedtail.local else LocalTraining) and kind not in (Risk, LocalTraining):
                assert name in names, f"{name} is missing in fedtail.compatibility.table_rows"


def test_a_cell_that_says_no_has_its_text_and_others_have_none(rows):
    cells = [cell for row in rows for cell in row.cells]
    assert all((cell.says == "no") == bool(cell.refused) for row in rows for cell in row.cells[:-1])
    assert {cell.says for cell in cells} == {"yes", "no", "inside `Binned`", "ε is infinite", "yes, counted first", "yes, counted first with a reused dual", "yes, must not be lost"}
    by_name = {row.part: row for row in rows}
    assert by_name["`Mean`"].secure.says == by_name["`Superquantile`"].secure.says == "yes"
    assert "Worst lets about 1 of 100" in by_name["`Worst`"].secure.refused[0]
    assert len(fields(by_name["`Mean`"])) == len(compatibility.HEAD)


def test_the_command_rewrites_a_page_between_its_comments_only(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{compatibility.BEGIN}\nformerly\n{compatibility.END}\nafter\n")
    compatibility.main(str(page))
    assert page.read_text().startswith(f"before\n{compatibility.BEGIN}\n\n| risk")
    assert page.read_text().endswith(f"{compatibility.END}\nafter\n")
    assert "formerly" not in page.read_text()


# Found by an attack on the checks: what evades them, or makes them count somebody else

@dataclass(frozen=True)
class OnlyOne(fedtail.Mean):
    """The mean's own promise that everybody contributes does not hold for another density."""

    def density(self, clients, dual):
        return (torch.arange(len(clients.mass)) == 0).double()


@dataclass(frozen=True)
class FewSteps(fedtail.LocalSGD):
    def steps(self, clients):
        return super().steps(clients) * (clients.random_bits("few") % 4 == 0)


def test_what_a_subclass_changes_it_does_not_inherit_the_promises_of():
    assert fedtail.Mean().fewest_contributors(torch.zeros(0), 1.0) == float("inf")
    assert OnlyOne().fewest_contributors(torch.zeros(0), 1.0) is None
    assert fedtail.LocalSGD().declares.everyone_trains
    assert not FewSteps().declares.everyone_trains
    assert fedtail.Tilted(0.0).fewest_contributors(torch.zeros(1), 1.0) is None


def test_a_cohort_smaller_than_one_must_hide_among_is_lost_whatever_the_risk_says():
    people = small_population(30)
    method = replace(fedtail.fedavg(30), sample=fedtail.Poisson(11 / 30))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        views = []
        fedtail.train(method, TASK, people, rounds=12, channel=fedtail.SecureChannel(2, minimum_contributors=10, masks="none"), on_round=lambda p: views.append(p.view))
    drawn = [view.cohort_size for view in views]
    lost = {int(str(one.message).split()[1]) for one in said if one.category is RoundLostWarning}
    assert lost == {round for round, cohort in enumerate(drawn) if 2 <= cohort < 10}
    assert lost


@dataclass(frozen=True)
class Twice(fedtail.Everyone):
    def __call__(self, population, seed, round):
        cohort = super().__call__(population, seed, round)
        return replace(cohort, ids=cohort.ids.clone().fill_(0))


def test_a_sampler_that_names_a_client_twice_is_refused():
    with pytest.raises(ValueError, match="Twice named a client more than once in a cohort"):
        fedtail.train(replace(fedtail.fedavg(8), sample=Twice()), TASK, small_population(8), rounds=1)


def test_innocent_fields_of_a_risk_may_have_the_names_of_former_members():
    @dataclass(frozen=True)
    class Innocent(Risk):
        mechanism: float = 1.0
        counted: int = 3

    assert Innocent().counted == 3
    with pytest.raises(TypeError, match="defines remembers"):
        type("Old", (Risk,), {"remembers": True, "__annotations__": {"remembers": "ClassVar[bool]"}})


def test_classes_that_send_each_other_are_named_once():
    first, second = type("First", (Part,), {}), type("Second", (Part,), {})
    first.sends, second.sends = (second,), (first,)
    assert list(classes_sent_with(first)) == [first, second]
