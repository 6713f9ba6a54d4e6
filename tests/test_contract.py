"""One contract for all: every part, wrapper, channel and fleet together is refused in words, or trains the model of the plain channel.

Parts declare themselves, so the suite finds them by itself: a risk, an aggregator or a recipe that is new and has no example here fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache

import pytest
import torch

import fedtail
from fedtail import (
    AdaptiveClip,
    AlphaFair,
    Ascent,
    Binned,
    ClippedMean,
    CoordinateMedian,
    CorrelatedMean,
    CurvatureMean,
    DelayedMean,
    DiscreteNoise,
    EntropicValueAtRisk,
    Everyone,
    ExactQuantile,
    FencedSuperquantile,
    GaussianNoise,
    GeometricMedian,
    GeometricMedianOfRows,
    GroupAscent,
    Hierarchical,
    IntegerChannel,
    IntervalSuperquantile,
    InverseSuperquantile,
    Krum,
    LossFilter,
    MajoriseMinimise,
    Mean,
    MinimumNormDirection,
    MultiKrum,
    NoisyHistogram,
    NormFilter,
    PlainChannel,
    PowerFair,
    PrivateMean,
    QuadraticSuperquantile,
    Refreshed,
    SecureChannel,
    SmoothedSuperquantile,
    Spectral,
    Superquantile,
    TailFilter,
    TailFloor,
    Tilted,
    TiltedValueAtRisk,
    TrimmedMean,
    ValueAtRisk,
    WeightedMean,
    Worst,
    aggregation,
    local,
    privacy,
    quantiles,
    recipes,
    speeds,
    train,
)
from fedtail import risk as risks
from fedtail.base_part import Part
from fedtail.composition import refusals
from fedtail.declarations import RiskDeclaration
from fedtail.deployment import PARTS
from fedtail.engine import LocalFleet
from fedtail.models import SoftmaxRegression
from fedtail.privacy import NoisySum, NoPrivacy
from fedtail.risk.base import Risk, RiskWrapper
from fedtail.wire import pack, types_by_name, unpack

from cases import small_population
from own_risk import Expectile
from remote_cases import Sites, params_of

CLIENTS, ROUNDS = 9, 2


def started(module):
    """A module away from zero, where the losses of clients differ."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return module


PEOPLE = replace(small_population(CLIENTS), mass=torch.ones(CLIENTS, dtype=torch.float64))
TASK = fedtail.Task(started(SoftmaxRegression(5, 3)))
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
BASE = replace(fedtail.fedavg(CLIENTS, **LOCAL), sample=Everyone())
FAINT = 1e-3                                # a noise multiplier: nodes draw their own noise, and end near the same model all the same
SHARES, SERVER = DiscreteNoise(FAINT, planned_clients=5), GaussianNoise(FAINT)
HISTOGRAM = NoisyHistogram(4.0, float(CLIENTS), SHARES, bins=8)

BARE = {
    "Mean": Mean(), "Superquantile": Superquantile(0.6), "12 bits": Superquantile(0.6, ExactQuantile(12)), "majorise": Superquantile(0.6, MajoriseMinimise(4)),
    "TailFilter": TailFilter(0.6), "SmoothedSuperquantile": SmoothedSuperquantile(0.6, 0.5), "QuadraticSuperquantile": QuadraticSuperquantile(0.6, 0.5),
    "Tilted": Tilted(1.0), "Tilted with a bound": Tilted(1.0, 4.0), "PowerFair": PowerFair(1.0), "AlphaFair": AlphaFair(1.0, 20.0), "Worst": Worst(), "GroupAscent": GroupAscent(3), "Ascent": Ascent(),
    "ValueAtRisk": ValueAtRisk(0.5), "EntropicValueAtRisk": EntropicValueAtRisk(0.6), "TiltedValueAtRisk": TiltedValueAtRisk(0.6),
    "InverseSuperquantile": InverseSuperquantile(0.3), "IntervalSuperquantile": IntervalSuperquantile(0.2, 0.2), "FencedSuperquantile": FencedSuperquantile(0.6), "Spectral": Spectral((1.0, 0.5), (0.5, 0.5)),
    "Hierarchical": Hierarchical(Tilted(1.0), Tilted(2.0), groups=3), "Tilted to the worst": Tilted(float("inf")), "a user's": Expectile(0.7),
}
OTHER_QUANTILES = ("12 bits", "majorise")      # are found like any other, so wrappers go without them
WRAPPERS = {
    "Refreshed": lambda risk: Refreshed(risk, 2),
    "Binned": lambda risk: Binned(risk, HISTOGRAM),
    "Binned by the server": lambda risk: Binned(risk, replace(HISTOGRAM, noise=SERVER)),
    "Refreshed(Binned)": lambda risk: Refreshed(Binned(risk, HISTOGRAM), 2),
    "Binned(Refreshed)": lambda risk: Binned(Refreshed(risk, 2), HISTOGRAM),
    "TailFloor": lambda risk: TailFloor(risk, 7),
    "Refreshed(TailFloor)": lambda risk: Refreshed(TailFloor(risk, 7), 2),
}
CHANNELS = {"plain": PlainChannel(), "integers": IntegerChannel(), "unmasked": SecureChannel(5, minimum_contributors=2, masks="none"), "masked": SecureChannel(5, minimum_contributors=2)}
PLACES = ["here", "nodes"]


def wrapped():
    """Every wrapper around every risk: what it makes, or the words with which it refuses."""
    for around, wrap in WRAPPERS.items():
        for name, risk in ((name, risk) for name, risk in BARE.items() if name not in OTHER_QUANTILES):
            try:
                yield around, name, risk, wrap(risk)
            except ValueError as why:
                yield around, name, risk, str(why)


WRAPPED = list(wrapped())
RISKS = {**BARE, **{f"{around} {name}": made for around, name, _, made in WRAPPED if isinstance(made, Risk)}}


OF_ROWS = {type(one).__name__: one for one in (CoordinateMedian(), TrimmedMean(0.1), Krum(0.1), MultiKrum(0.1), ClippedMean(), NormFilter(0.2), LossFilter(0.2),
                                               GeometricMedianOfRows(), MinimumNormDirection(0.1))}


def aggregators(risk):
    """Every aggregator, with a total that suits the risk."""
    total = CLIENTS * (1.0 if risk.declares.weight is None else risk.declares.weight)
    return {"WeightedMean": WeightedMean(), "CurvatureMean": CurvatureMean(), "PrivateMean": PrivateMean(0.1, SHARES, total), "PrivateMean by release": PrivateMean(0.1, SHARES),
            "PrivateMean by the server": PrivateMean(0.1, SERVER, total), "AdaptiveClip": AdaptiveClip(0.1, SHARES, total), "AdaptiveClip by the server": AdaptiveClip(0.1, SERVER, total),
            "CorrelatedMean": CorrelatedMean(0.1, fedtail.CorrelatedNoise(1.0, 20, 1), total),
            "DelayedMean": DelayedMean(0.1, SHARES, total, 1, 1, 0.2, epsilon=0.1), "DelayedMean by the server": DelayedMean(0.1, SERVER, total, 1, 1, 0.2, epsilon=0.1),
            "GeometricMedian": GeometricMedian(3), **OF_ROWS}


def method(risk, aggregator="WeightedMean"):
    return replace(BASE, risk=RISKS[risk], aggregate=aggregators(RISKS[risk])[aggregator])


def fleet_at(place):
    if place == "nodes":
        return Sites(3, PEOPLE, TASK, parts=[Expectile]).fleet(forgets=False)
    return LocalFleet(PEOPLE, TASK, workers=1)


@cache
def model(risk, aggregator, channel, place):
    """The model after two rounds, or None where the composition is refused, in the words of `refusals`."""
    algorithm, fleet = method(risk, aggregator), fleet_at(place)
    refused = refusals(algorithm, fleet.population, CHANNELS[channel], fleet)
    if not refused:
        return params_of(train(algorithm, TASK, fleet=fleet, rounds=ROUNDS, channel=CHANNELS[channel]))
    with pytest.raises(ValueError) as said:
        train(algorithm, TASK, fleet=fleet, rounds=ROUNDS, channel=CHANNELS[channel])
    assert all(len(text) > 40 and text in str(said.value) for text in refused)
    return None


def draws_noise(risk, aggregator):
    """Whether clients add noise, which nodes draw from their own machine."""
    declared = method(risk, aggregator)
    return any(isinstance(mechanism, NoisySum) and not mechanism.reveals_exact_sum for mechanism in (declared.mechanism, declared.risk.declares.mechanism))


ALL = list(aggregators(Mean()))
EVERY_RISK = [(risk, "WeightedMean") for risk in RISKS]
EVERY_AGGREGATOR = [(risk, aggregator) for risk in ("Mean", "PowerFair", "AlphaFair", "Binned Superquantile") for aggregator in ALL if aggregator != "WeightedMean"]


@pytest.mark.parametrize(("risk", "aggregator"), EVERY_RISK + EVERY_AGGREGATOR, ids=str)
def test_whatever_is_not_refused_trains_the_model_of_the_plain_channel_over_every_channel_and_fleet(risk, aggregator):
    plain = model(risk, aggregator, "plain", "here")
    if plain is None:
        assert all(model(risk, aggregator, channel, place) is None for channel in CHANNELS for place in PLACES)
        return
    assert (plain - TASK.params()).abs().max() > 1e-3
    found = {(channel, place): model(risk, aggregator, channel, place) for channel in CHANNELS for place in PLACES}
    noisy = draws_noise(risk, aggregator)
    for (channel, place), params in found.items():
        tolerance = 2e-3 if noisy and place == "nodes" else 2e-5
        assert params is None or (params - plain).abs().max() < tolerance, (channel, place)
    for place in PLACES if not noisy else ["here"]:
        sums = [params for (channel, where), params in found.items() if where == place and channel != "plain" and params is not None]
        assert all(torch.equal(params, sums[0]) for params in sums), place


@pytest.mark.parametrize("risk", RISKS)
def test_every_risk_with_every_aggregator_is_refused_or_trains_alike_over_floats_and_integers(risk):
    """Noise of the server is for plain channels alone; what both carry ends in one model, to the resolution of the integers."""
    for aggregator in [name for name in ALL if name not in OF_ROWS]:      # those are refused over integers, as the others show
        plain, integers = model(risk, aggregator, "plain", "here"), model(risk, aggregator, "integers", "here")
        declared = method(risk, aggregator)
        by_server = any(one.private and one.reveals_exact_sum for one in (declared.mechanism, declared.risk.declares.mechanism))
        assert (integers is None) == (plain is None or by_server), aggregator
        assert integers is None or (integers - plain).abs().max() < 2e-5, aggregator


# What wrappers and parts say of themselves

CHANGED = {"Refreshed": set(), "Binned": {"releases", "mechanism", "releases_weight", "planned_clients"},
           "TailFloor": {"contributing", "weight", "reads_cohort", "not_private", "not_batched"}}


@pytest.mark.parametrize(("around", "name", "risk", "made"), WRAPPED, ids=str)
def test_a_wrapper_declares_what_the_risk_inside_declares_but_for_what_it_changes(around, name, risk, made):
    if isinstance(made, str):
        assert made.startswith(type(risk).__name__) or "Refreshed" in made
        assert any(word in made for word in ("cannot be", "does not look at the losses"))
        return
    changed = CHANGED[next(kind for kind in ("Binned", "TailFloor", "Refreshed") if kind in around)]
    assert {field.name for field in fields(RiskDeclaration) if getattr(made.declares, field.name) != getattr(risk.declares, field.name)} <= changed


def test_wrappers_refuse_these_and_no_others():
    refused = {around: {name for which, name, _, made in WRAPPED if which == around and isinstance(made, str)} for around in WRAPPERS}
    not_private = {"Hierarchical", "Tilted to the worst", "PowerFair", "AlphaFair", "Worst", "GroupAscent", "Ascent", "ValueAtRisk", "EntropicValueAtRisk", "TiltedValueAtRisk", "a user's"}
    no_floor = set(BARE) - {"Superquantile", "TailFilter", "SmoothedSuperquantile", "QuadraticSuperquantile", *OTHER_QUANTILES}
    assert refused == {"Refreshed": {"Ascent"}, **{around: {"Mean", *not_private} for around in WRAPPERS if "Binned" in around},
                       **{around: no_floor for around in WRAPPERS if "TailFloor" in around}}


@dataclass(frozen=True)
class Thin(RiskWrapper):
    """A wrapper of a user's own that writes nothing."""

    risk: Risk


@dataclass(frozen=True)
class Loud(Risk):
    """Every field of its declaration, and every answer, is another than the default."""

    @property
    def declares(self):
        other = {bool: lambda value: not value, float: lambda value: value + 0.5}
        values = {field.name: getattr(RiskDeclaration(), field.name) for field in fields(RiskDeclaration)}
        given = {"releases": (), "mechanism": NoisySum(1.0, SHARES), "needs_groups": 3, "keeps": fedtail.parts.Keeps("lost"), "contributing": 0.25, "weight": 0.5,
                 "planned_clients": 7.0, "not_private": "loud", "not_batched": "loud"}
        return RiskDeclaration(**{name: given[name] if name in given else other[type(value)](value) for name, value in values.items()})


def test_a_wrapper_that_writes_nothing_says_all_that_the_risk_inside_says():
    assert Thin(Loud()).declares == Loud().declares
    assert all(getattr(Loud().declares, field.name) != getattr(RiskDeclaration(), field.name) for field in fields(RiskDeclaration))
    own = {name for name in vars(Risk) if not name.startswith("_")}
    assert own - set(vars(RiskWrapper)) == {"statistic", "by_group", "reads_memory", "present"}      # the inner risk answers questions, and is given losses, itself


def parts_within(value) -> Iterator[object]:
    """A part and all parts in its fields."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from parts_within(one)
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in fields(value):
            yield from parts_within(getattr(value, field.name))


OTHERS = (fedtail.NoDivisor(), fedtail.FixedDivisor(torch.linspace(0.5, 1.0, 18)), fedtail.ExamplePrivateSGD(0.5, 1.0, batch_size=4), fedtail.Proximal(0.1), local.EWC(0.5, 3), local.TrainOnly(("bias",)), local.SymmetrisedKL(0.5), local.MeanRegularised(0.3, fedtail.LocalSGD(0.2, 3)), aggregation.MeanOfModels(8.0), fedtail.personal.KeptByLocal(), fedtail.Ditto(0.5), fedtail.ValidatedDitto(),
          fedtail.personal.APFL(), fedtail.personal.Mapper(), fedtail.personal.FineTuning(fedtail.LocalSGD(penalty=fedtail.Proximal(0.1))), fedtail.AdaptiveProximal(1.0, patience=3), fedtail.Dane(0.1), fedtail.Dane(0.1, 4), local.FullGradient(3),
          fedtail.UntilInexact(fedtail.LocalSGD(0.2, penalty=fedtail.Proximal(1.0)), 0.3, every=2), fedtail.MAML(0.2, 0.1, 2, True), fedtail.MAML(0.2, difference_step=1e-3, local_steps=3, batch_size=4), local.Cosine(3), local.StepDecay(0.5, 2),
          local.Stragglers(0.5), local.Stragglers(0.5, exact=True), local.Participants(4, local.Stragglers(0.5)), local.Deadline(3.0, speeds.LogNormalSpeeds(1.0)),
          speeds.SpeedTable((3, 1), (2.0, 0.5)), fedtail.BufferedNoise(1.0, 20, 1, 2), NoPrivacy(), NoisySum(1.0, SERVER), NoisySum(0.5, SHARES, 1.0, True))
EXAMPLES = list(parts_within((*(replace(BASE, risk=risk, aggregate=one) for risk in RISKS.values() for one in aggregators(risk).values()), *OTHERS)))
ROOMS = (aggregation, local, fedtail.personal, privacy, quantiles, risks, speeds, fedtail)
PUBLIC = [part for part in dict.fromkeys(getattr(room, name) for room in ROOMS for name in room.__all__) if isinstance(part, type) and is_dataclass(part) and issubclass(part, Part)]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_public_part_is_frozen_known_to_nodes_and_the_same_after_it_was_sent(kind):
    assert kind.__dataclass_params__.frozen
    assert kind in PARTS
    examples = [one for one in EXAMPLES if type(one) is kind]
    assert examples, f"{kind.__name__} has no example in this file"
    for one in examples[:20]:
        again = unpack(pack(one), types_by_name((*PARTS, Expectile)))
        assert again == one
        assert pack(again) == pack(one)
        if hasattr(one, "declares"):
            assert again.declares == one.declares


# What questions hold, as they are asked

class Recording(LocalFleet):
    """A fleet that remembers what it was asked."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.asked = []

    def collect(self, questions, encoding):
        self.asked += [(question, encoding) for question in questions]
        return super().collect(questions, encoding)


SIZE = {"cohort_size": CLIENTS, **LOCAL}
RECIPES = {
    "fedavg": [recipes.fedavg(**SIZE), recipes.fedavg(**SIZE, work=local.Stragglers(0.5), schedule=local.Cosine(5), penalty=fedtail.Proximal(0.1)),
               *(recipes.fedavg(**SIZE, epochs=3, work=work) for work in (local.Stragglers(0.5, exact=True), local.Participants(5, local.Stragglers(0.5, exact=True)),
                                                                  local.Deadline(4.0, speeds.LogNormalSpeeds(1.0))))],
    "ditto": [recipes.ditto(0.5, **SIZE), *(replace(recipes.fedavg(**SIZE), personal=part) for part in (
        fedtail.ValidatedDitto(), fedtail.personal.APFL(), fedtail.personal.Mapper(), fedtail.personal.FineTuning(fedtail.LocalSGD(penalty=local.EWC(0.1))), fedtail.personal.FineTuning(fedtail.LocalSGD(penalty=local.SymmetrisedKL(0.1)))))],
    "l2sgd": [recipes.l2sgd(0.5, **SIZE)],
    "mean_regularised": [recipes.mean_regularised(0.5, **LOCAL)],
    "per_fedavg": [recipes.per_fedavg(CLIENTS), recipes.per_fedavg(CLIENTS, first_order=True, local_steps=2, batch_size=3)],
    "fedavg_sub": [recipes.fedavg_sub(0.5, **SIZE)],
    "fedprox": [recipes.fedprox(0.1, **SIZE), recipes.fedavg(**SIZE, penalty=fedtail.AdaptiveProximal()),
                replace(BASE, local=fedtail.UntilInexact(fedtail.LocalSGD(0.2, penalty=fedtail.AdaptiveProximal()), 0.3))],
    "feddane": [recipes.feddane(0.1, **SIZE), recipes.feddane(0.1, gradient_clients=4, **SIZE)],
    "delta_fl": [*(recipes.delta_fl(0.5, **SIZE, form=form) for form in ("exact", "filter", "smoothed")),
                 *(recipes.delta_fl(0.5, **SIZE, quantile=quantile) for quantile in (ExactQuantile(12), MajoriseMinimise(3))), recipes.delta_fl(0.5, **SIZE, refresh_every=2),
                 recipes.delta_fl(0.5, **SIZE, least_contributors=7)],
    "q_ffl": [recipes.q_ffl(1.0, **SIZE)],
    "q_ffl_family": [recipes.q_ffl_family((0.0, 1.0, 5.0), **SIZE)],
    "q_maml": [recipes.q_maml(1.0, CLIENTS, learning_rate=0.2, first_order=first_order) for first_order in (False, True)],
    "term": [recipes.term(1.0, **SIZE), recipes.term(1.0, **SIZE, loss_bound=4.0), recipes.term(1.0, **SIZE, example_tilt=-1.0, group_tilt=2.0, groups=3)],
    "afl": [recipes.afl(**LOCAL), recipes.afl(groups=3, **SIZE)],
    "dp_fedavg": [recipes.dp_fedavg(CLIENTS, 0.1, 1.0, **SIZE, noise=noise) for noise in ("gaussian", "discrete")],
    "dp_ftrl": [recipes.dp_ftrl(CLIENTS, 0.1, 1.0, rounds=20, **{**SIZE, "cohort_size": size}, bands=bands) for size, bands in ((CLIENTS, None), (CLIENTS // 4, 2))],
    "fed_adadps": [recipes.fed_adadps(CLIENTS, 0.1, 1.0, torch.linspace(0.5, 1.0, 18), **SIZE, noise=noise) for noise in ("gaussian", "discrete")],
    "fed_dp2": [recipes.fed_dp2(CLIENTS, 0.1, 1.0, 1, 0.2, **SIZE, noise=noise, moment=moment) for noise in ("gaussian", "discrete")
                for moment in (fedtail.private_optim.RMSPropMoment(), fedtail.private_optim.AdaGradMoment(), fedtail.private_optim.YogiMoment())],
    "dp_delta_fl": [recipes.dp_delta_fl(0.5, CLIENTS, 0.1, 1.0, 1.0, 4.0, **SIZE, noise=noise, method=way) for noise, way in (("gaussian", "tree"), ("discrete", "optimal"))],
    "delta_fl_family": [recipes.delta_fl_family((1.0, 0.5), **SIZE)],
}


@pytest.mark.parametrize("name", RECIPES)
def test_whatever_the_questions_of_a_recipe_hold_is_known_to_nodes(name):
    """Walks what was asked: declarations, which nodes are made from, might forget a class."""
    known = types_by_name(PARTS)
    for algorithm in RECIPES[name]:
        fleet = Recording(PEOPLE, TASK, workers=1)
        for channel in (PlainChannel(), CHANNELS["unmasked"]):
            if not refusals(algorithm, PEOPLE, channel, fleet):
                train(algorithm, TASK, fleet=fleet, rounds=ROUNDS, channel=channel)
        assert {type(question).__name__ for question, _ in fleet.asked} >= {"Train"}
        kinds = {type(part) for part in parts_within(tuple(fleet.asked))}
        assert kinds <= set(PARTS), f"{name}: {kinds - set(PARTS)}"
        for question, encoding in fleet.asked:
            again, code = unpack(pack((question, encoding)), known)
            assert pack((again, code)) == pack((question, encoding))
            dim = len(TASK.params())
            assert (again.width(dim), again.release(dim)) == (question.width(dim), question.release(dim))


def test_there_is_an_example_of_every_recipe_risk_and_aggregator():
    made = {name for name, value in vars(recipes).items() if inspect.isfunction(value) and value.__module__ == recipes.__name__ and not name.startswith("_")}
    assert set(RECIPES) == made
    kinds = {type(one) for one in EXAMPLES}
    for room in (risks, aggregation):
        for name in room.__all__:
            part = getattr(room, name)
            assert not (isinstance(part, type) and is_dataclass(part)) or part in kinds, name
