"""Every recipe through the real `run_round`, with clients in other processes that exchange bytes, and over integers mod M."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fedtail
from fedtail import Everyone, Family, IntegerChannel, LocalSGD, PlainChannel, train
from fedtail.aggregation.base import ratio_of_sums
from fedtail.algorithm import RoundLostWarning, planned_round
from fedtail.channel import FixedPoint
from fedtail.conversations import join_conversations
from fedtail.deployment import PARTS, ClientRegistry, Node, RemoteFleet, Site
from fedtail.deployment.node import Ask, Close, Open
from fedtail.divergence import AnswersLeftOutWarning
from fedtail.local import Cosine, Stragglers
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy
from fedtail.questions import Statistic, Train
from fedtail.sampling import Cohort
from fedtail.secure import Refused
from fedtail.wire import pack, types_by_name, unpack

from cases import small_population
from node_process import make_task
from own_risk import Expectile, OwnMedian

NODES = 3
POPULATION = small_population()
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
FOLDER = Path(__file__).parent

RECIPES = {
    "fedavg": fedtail.fedavg(8, **LOCAL),
    "fedavg_sub": fedtail.fedavg_sub(0.5, 8, **LOCAL),
    "fedprox": fedtail.fedprox(0.1, 8, **LOCAL),
    "delta_fl exact": fedtail.delta_fl(0.4, 8, **LOCAL),
    "delta_fl 12 bits": fedtail.delta_fl(0.4, 8, quantile=fedtail.ExactQuantile(12), **LOCAL),
    "delta_fl majorise": fedtail.delta_fl(0.4, 8, quantile=fedtail.MajoriseMinimise(40), **LOCAL),
    "delta_fl filter": fedtail.delta_fl(0.4, 8, form="filter", **LOCAL),
    "delta_fl smoothed": fedtail.delta_fl(0.4, 8, form="smoothed", **LOCAL),
    "delta_fl refreshed": fedtail.delta_fl(0.4, 8, refresh_every=2, **LOCAL),
    "quadratic": replace(fedtail.fedavg(8, **LOCAL), risk=fedtail.QuadraticSuperquantile(0.4, 0.2)),
    "q_ffl": fedtail.q_ffl(1.0, 8, **LOCAL),
    "alpha fair": replace(fedtail.fedavg(8, **LOCAL), risk=fedtail.AlphaFair(1.0, 8.0), aggregate=fedtail.CurvatureMean()),
    "q_maml": fedtail.q_maml(1.0, 8, learning_rate=0.2),
    "term": fedtail.term(2.0, 8, **LOCAL),
    "term bounded": fedtail.term(2.0, 8, loss_bound=5.0, **LOCAL),
    "worst": replace(fedtail.fedavg(8, **LOCAL), risk=fedtail.Worst()),
    "afl": fedtail.afl(0.5, **LOCAL),
    "afl groups": fedtail.afl(0.5, groups=3, cohort_size=8, **LOCAL),
    "by mass": replace(fedtail.fedavg(8, **LOCAL), sample=fedtail.ByMass(8)),
    "poisson": replace(fedtail.delta_fl(0.4, 8, **LOCAL), sample=fedtail.Poisson(0.5)),
    "stragglers": replace(fedtail.fedavg(8, **LOCAL), local=LocalSGD(**LOCAL, epochs=2, work=Stragglers(0.5), schedule=Cosine(5))),
    "own risk": replace(fedtail.fedavg(8, **LOCAL), risk=Expectile(0.8)),
    "family": Family((fedtail.fedavg(8, **LOCAL), fedtail.delta_fl(0.4, 8, **LOCAL), fedtail.term(1.0, 8, **LOCAL))),
}


class Processes:
    """Three nodes, each with its own clients and its own memory."""

    def __init__(self, kind: str, folder: Path):
        home = torch.arange(len(POPULATION)) * NODES // len(POPULATION)
        place = torch.cat([torch.arange(int((home == n).sum())) for n in range(NODES)])
        self.registry = ClientRegistry(POPULATION.key, POPULATION.mass, home, place, POPULATION.group)
        self.running, self.sent = [], []
        for node in range(NODES):
            POPULATION.select(home == node).save(folder / f"node{node}")
            self.running.append(subprocess.Popen([sys.executable, str(FOLDER / "node_process.py"), kind, str(folder / f"node{node}")],
                                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def exchange(self, messages):
        self.sent.append(messages)
        for node, message in messages.items():
            self.running[node].stdin.write(struct.pack("<q", len(message)) + message)
            self.running[node].stdin.flush()
        replies = {}
        for node in messages:
            size = struct.unpack("<q", self.running[node].stdout.read(8))[0]
            replies[node] = self.running[node].stdout.read(size)
        return replies

    def close(self):
        for process in self.running:
            process.stdin.close()
            process.wait(timeout=20)
            process.stdout.close()


@pytest.fixture(scope="module", params=["linear", "module"])
def processes(request, tmp_path_factory):
    nodes = Processes(request.param, tmp_path_factory.mktemp(request.param))
    nodes.kind = request.param
    yield nodes
    nodes.close()


def site_of(population, kind):
    return Site(lambda: Node(population, make_task(kind)), masked_only=False)


def params_of(trained):
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([s.params for s in states])


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_model_from_processes_that_exchange_bytes_and_from_sums_of_integers(name, processes):
    algorithm, task = RECIPES[name], make_task(processes.kind)
    run = {"rounds": 3, "seed": 5}
    reference = params_of(train(algorithm, task, POPULATION, **run))
    assert (reference - torch.cat([task.params()] * (len(reference) // len(task.params())))).abs().max() > 0.01
    remote = RemoteFleet(processes.exchange, processes.registry, forgets=False)
    bytes_only = params_of(train(algorithm, task, fleet=remote, **run))
    assert torch.allclose(bytes_only, reference, atol=2e-5)
    integers = params_of(train(algorithm, task, fleet=remote, channel=IntegerChannel(), **run))
    assert torch.allclose(integers, reference, atol=1e-4)
    here = params_of(train(algorithm, task, POPULATION, channel=IntegerChannel(), **run))
    assert torch.allclose(here, reference, atol=1e-4)
    assert all(isinstance(m, bytes) for messages in processes.sent for m in messages.values())


def test_what_needs_single_rows_runs_over_plain_channels_and_is_refused_over_integers_by_name(processes):
    algorithm, task = replace(fedtail.fedavg(8, **LOCAL), aggregate=OwnMedian()), make_task(processes.kind)
    remote = RemoteFleet(processes.exchange, processes.registry)
    reference = params_of(train(algorithm, task, POPULATION, rounds=3))
    assert torch.allclose(params_of(train(algorithm, task, POPULATION, rounds=3, fleet=remote)), reference, atol=1e-6)
    with pytest.raises(ValueError, match="OwnMedian looks at single rows, but IntegerChannel reveals only sums"):
        train(algorithm, task, POPULATION, rounds=3, channel=IntegerChannel())


def test_a_gathering_question_is_refused_even_where_the_part_does_not_say_so(processes):
    from fedtail.engine import LocalFleet

    fleet = LocalFleet(POPULATION, make_task(processes.kind))
    algorithm = fedtail.fedavg(8, **LOCAL)
    state = algorithm.initial_state(make_task(processes.kind).params(), 0)
    cohort = algorithm.sample(POPULATION, 0, 0)
    planned = planned_round(algorithm, fleet, IntegerChannel(), len(state.params))
    with IntegerChannel().open(fleet, cohort, algorithm.broadcast(state, 0), fedtail.Ledger(), planned) as ask, pytest.raises(ValueError, match="reveals only sums"):
        ask(Train(algorithm.local, algorithm.risk, torch.zeros(0), algorithm.aggregate, gather=True))


def test_a_family_costs_the_messages_of_its_longest_conversation(processes):
    def messages(algorithm):
        processes.sent.clear()
        train(algorithm, make_task(processes.kind), POPULATION, rounds=2, fleet=RemoteFleet(processes.exchange, processes.registry))
        return len(processes.sent)

    members = [fedtail.fedavg(8, **LOCAL), fedtail.delta_fl(0.4, 8, **LOCAL), fedtail.delta_fl(0.8, 8, form="smoothed", **LOCAL)]
    assert messages(Family(tuple(members))) == max(messages(m) for m in members)


def test_ascent_by_client_is_refused_where_memory_can_be_lost(processes):
    fleet = RemoteFleet(processes.exchange, processes.registry, forgets=True)
    with pytest.raises(ValueError, match=r"Ascent cannot run on a fleet that may lose its clients' memory: .*use GroupAscent"):
        train(fedtail.afl(0.5, **LOCAL), make_task(processes.kind), POPULATION, rounds=1, fleet=fleet)


def test_a_node_builds_only_what_it_was_given_and_says_so():
    node = Node(POPULATION, make_task("linear"))
    algorithm = replace(fedtail.fedavg(8, **LOCAL), risk=Expectile(0.8))
    broadcast = algorithm.broadcast(algorithm.initial_state(make_task("linear").params(), 0), 0)
    node.receive_broadcast(pack(Open(algorithm.sample(POPULATION, 0, 0), broadcast)))
    question = Ask(0, (Statistic(Expectile(0.8), torch.zeros(1)),), PlainChannel().encoding(8, 30.0))
    with pytest.raises(Refused, match="'Expectile', which this node was not given"):
        node.answer(pack(question))
    for wrong in (Cohort, 3):
        with pytest.raises(Refused, match="a node cannot be"):
            node.receive_broadcast(pack(algorithm.sample(POPULATION, 0, 0) if wrong is Cohort else wrong))


def test_every_part_crosses_as_bytes_and_comes_back_equal():
    for name, algorithm in RECIPES.items():
        for member in algorithm.members if isinstance(algorithm, Family) else (algorithm,):
            types = types_by_name((*PARTS, Expectile))
            train_question = Train(member.local, member.risk, torch.arange(3.0), member.aggregate, model=1)
            again = unpack(pack(train_question), types)
            assert repr(again) == repr(train_question), name
            assert pack(again) == pack(train_question), name
    with pytest.raises(TypeError, match="function cannot be sent to another process"):
        pack(lambda: 0)


BOUNDS = st.one_of(st.floats(1e-6, 1e6), st.integers(-20, 20).map(lambda k: 2.0**k))


@given(st.integers(12, 62), st.one_of(st.integers(1, 40), st.integers(0, 6).map(lambda k: 2**k)), BOUNDS, st.integers(0, 2**32 - 1))
def test_fixed_point_sums_are_right_to_half_a_step_a_client_and_never_wrap(bits, clients, bound, seed):
    random = torch.rand(clients, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = (random * 2 - 1) * bound
    rows[:, 3], rows[:, 4] = bound, -bound                             # everybody at the bound, on either side
    code, limit = FixedPoint(clients, 1.0, bits), torch.tensor([bound], dtype=torch.float64)
    halves = rows.tensor_split(2)                                      # partial sums of partial sums
    total = code.sum(torch.stack([code.sum(code.encode(part, limit)) for part in halves]))
    assert bool(((total >= 0) & (total < 2**bits)).all())
    step = code.resolution(bound)
    assert (code.decode(total, limit) - rows.sum(0)).abs().max().item() <= clients * step / 2 * (1 + 1e-6) + 1e-9 * bound
    assert step <= 4 * bound * clients / 2.0 ** (bits - 1)             # and no room is wasted but for rounding to powers of two


@pytest.mark.parametrize("bound", [2.0**-3, 0.75, 1.0, 1.0 + 2.0**-52, 3.0, 4.0, 1024.0, 1e9])
def test_a_scale_is_the_largest_power_of_two_that_leaves_a_row_its_bits(bound):
    code = FixedPoint(5, 1.0, 40)
    largest = max(2.0**k for k in range(-60, 60) if 2.0**k * bound <= 2.0**code.row_bits)
    assert code.scale(torch.tensor([bound], dtype=torch.float64)).item() == largest


# Four clients and a scale of one: rounding moves a sum of updates by two at most, the weight by four.
COARSE = FixedPoint(4, 1.0, 20)
WHOLE = 2.0**COARSE.row_bits


@pytest.mark.parametrize(("sums", "resolved"), [
    ([8.0, 4.0], True), ([8.0, -4.0], True), ([8.0, 3.0], False), ([7.0, 4.0], False), ([7.0, 4000.0], False),
    ([8.0, 0.0, 4.0], True), ([8.0, 3.0, -3.0], False), ([WHOLE, 0.0], True), ([WHOLE - 1, 3.0], False),
], ids=str)
def test_a_ratio_needs_sums_twice_as_large_as_their_rounding(sums, resolved):
    limit = torch.full((len(sums),), WHOLE, dtype=torch.float64)
    assert COARSE.scale(limit).unique().tolist() == [1.0]
    assert COARSE.resolves_ratios(torch.tensor(sums, dtype=torch.float64), limit, 0) is resolved


@pytest.mark.parametrize("bits", range(20, 62, 3))
def test_small_updates_are_resolved_where_their_error_is_below_that_of_float32(bits):
    code, limit = FixedPoint(4, 1.0, bits), torch.tensor([1.0, 1024.0], dtype=torch.float64)
    for weight in (0.25, 0.03, 1e-3):
        worst = 4 * 0.5 * 2.0 ** (10 - code.row_bits) / weight          # four clients, half a unit of 1024 / 2^row_bits each
        assert code.resolves_ratios(torch.tensor([weight, 0.0], dtype=torch.float64), limit, 0) is (worst <= 2.0**-24)


@given(st.integers(1, 30), st.floats(-70, 0), st.integers(20, 62), st.integers(0, 2**32 - 1))
def test_a_ratio_that_is_resolved_is_right_to_a_factor_and_a_positive_weight_arrives(clients, exponent, bits, seed):
    random = torch.Generator().manual_seed(seed)
    weight = 2.0**exponent * torch.rand(clients, 1, generator=random, dtype=torch.float64)
    weight[torch.rand(clients, generator=random) < 0.3] = 0.0
    updates = torch.rand(clients, 3, generator=random, dtype=torch.float64)
    code, limit = FixedPoint(clients, 1.0, bits), torch.tensor([1.0, 16.0, 16.0, 16.0], dtype=torch.float64)
    rows = torch.cat([weight, weight * updates], 1)
    sums = code.decode(code.sum(code.encode(rows, limit, 0)), limit)
    assert bool(sums[0] > 0) == bool(weight.sum() > 0)
    assume(bool(0 < sums[0] < 1) and code.resolves_ratios(sums, limit, 0))
    exact, found = rows.sum(0)[1:] / rows.sum(0)[0], sums[1:] / sums[0]
    top = found.abs().argmax()
    small = clients / 2 * 16 * 2.0**-code.row_bits / float(sums[0]) <= 2.0**-24
    assert small or found[top] / 3 * (1 - 1e-9) <= exact[top] <= 3 * found[top] * (1 + 1e-9)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        return inputs @ self.weight


def steep_beyond_three(outputs, targets):
    """Squared error, with a gradient that is not a number where the target is beyond three."""
    steep = torch.where(targets > 3, (outputs - outputs.detach()).abs(), 1.0).sqrt()
    return (outputs - targets).square() + steep


def line_with_one_far_client(far):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, 3, generator=random)
    y = (x @ torch.tensor([0.5, -0.3, 0.2])).clamp(-2, 2)
    y[0] = far
    return fedtail.Population.from_clients(list(zip(x, y, strict=True)))


@pytest.mark.parametrize("channel", [IntegerChannel(), fedtail.SecureChannel(4, minimum_contributors=2, masks="none")], ids=["integer", "secure"])
@pytest.mark.parametrize("aggregate", [fedtail.WeightedMean(), fedtail.CurvatureMean()], ids=["mean", "curvature"])
def test_where_the_heaviest_client_fails_a_round_of_rounding_is_lost_and_said(aggregate, channel):
    """The loss of the far client is about 16 more, so others weigh exp(-48): less than the integers resolve, but not zero."""
    people, task = line_with_one_far_client(4.0), fedtail.Task(Line(), loss=steep_beyond_three, error=steep_beyond_three)
    algorithm = replace(fedtail.term(3.0, 8, learning_rate=0.1), aggregate=aggregate)

    def moves(channel):
        seen = []
        train(algorithm, task, people, rounds=6, channel=channel, on_round=seen.append)
        models = [task.params(), *(progress.trained.state.params for progress in seen)]
        return [not torch.equal(*pair) for pair in pairwise(models)], [0 in progress.view.sampled.tolist() for progress in seen]

    moved, far_asked = moves(PlainChannel())
    assert moved == [True] * 6
    assert 0 < sum(far_asked) < 6
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        moved, _ = moves(channel)
    assert moved == [not far for far in far_asked]
    assert [one.category for one in said] == [*[RoundLostWarning] * sum(far_asked), AnswersLeftOutWarning]      # at the end, how many
    assert "and the step would be mostly rounding. Raise modulus_bits or tighten update_bound; lower tilt, or even out masses" in str(said[0].message)


def test_where_nobody_weighs_anything_at_all_integers_are_as_silent_as_floats():
    """The others weigh exp(-1200), which is zero in floats too: nobody counted, and the model stays."""
    people, task = line_with_one_far_client(20.0), fedtail.Task(Line(), loss=steep_beyond_three, error=steep_beyond_three)
    plain, integer = (params_of(train(fedtail.term(3.0, 8, learning_rate=0.1), task, people, rounds=6, channel=c))
                      for c in (PlainChannel(), IntegerChannel()))
    assert torch.allclose(plain, integer, atol=1e-6)


@pytest.mark.parametrize("clients", [1, 2, 8, 64])
@pytest.mark.parametrize("name", ["fedavg", "delta_fl exact", "term", "afl"])
def test_powers_of_two_do_not_wrap(clients, name):
    people = fedtail.Population.from_clients([POPULATION.client(k % 12) for k in range(clients)], mass=[4.0] * clients)
    algorithm = replace(RECIPES[name], sample=Everyone())
    plain, integer = (params_of(train(algorithm, make_task("linear"), people, rounds=2, channel=c)) for c in (PlainChannel(), IntegerChannel()))
    assert plain.abs().max() > 1e-3
    assert torch.allclose(plain, integer, atol=1e-5)


def test_a_modulus_too_small_for_the_cohort_is_refused():
    with pytest.raises(ValueError, match=r"modulus_bits=12 leaves 7 bits for a row when 12 are added; 12 are needed.* Write modulus_bits=17"):
        train(fedtail.fedavg(12, **LOCAL), make_task("linear"), POPULATION, rounds=1, channel=IntegerChannel(12))
    train(fedtail.fedavg(12, **LOCAL), make_task("linear"), POPULATION, rounds=1, channel=IntegerChannel(17))


def test_weights_too_small_for_the_integers_are_refused():
    with pytest.raises(ValueError, match=r"every weight may be as small as exp\(-40\), which the integers of IntegerChannel do not resolve"):
        train(fedtail.term(2.0, 8, loss_bound=20.0, **LOCAL), make_task("linear"), POPULATION, rounds=1, channel=IntegerChannel())
    train(fedtail.term(2.0, 8, loss_bound=20.0, **LOCAL), make_task("linear"), POPULATION, rounds=1)


@pytest.mark.parametrize("clients", [1, 3, 12])
def test_one_client_may_hold_all_of_lambda_over_integers(clients):
    train(fedtail.afl(5.0, **LOCAL), make_task("linear"), POPULATION.select(range(clients)), rounds=25, channel=IntegerChannel())


def test_masses_that_float32_rounds_up_cross():
    people = replace(POPULATION, mass=POPULATION.mass / POPULATION.mass.sum() / 3)
    for channel in (PlainChannel(), IntegerChannel()):
        train(fedtail.fedavg(12, **LOCAL), make_task("linear"), people, rounds=1, channel=channel)


def test_whole_numbers_cross_exactly():
    code, bound = FixedPoint(100, 1.0, 62), torch.tensor([1000.0], dtype=torch.float64)
    rows = torch.full((100, 2), 1000.0, dtype=torch.float64)
    assert code.decode(code.sum(code.encode(rows, bound)), bound).tolist() == [100_000.0] * 2
    assert code.decode(code.sum(code.encode(-rows, bound)), bound).tolist() == [-100_000.0] * 2


def test_nodes_of_one_client_with_their_own_arrays_train_the_simulators_model():
    """Each builds a population of its own, whose only client has key 0: the registry's key is what its draws follow."""
    nodes = {k: site_of(fedtail.Population.from_clients([POPULATION.client(k)]), "module") for k in range(12)}
    registry = ClientRegistry(POPULATION.key, POPULATION.mass, torch.arange(12), torch.zeros(12, dtype=torch.int64))
    fleet = RemoteFleet(lambda messages: {n: nodes[n].handle(m) for n, m in messages.items()}, registry)
    for name in ("fedavg", "delta_fl exact", "stragglers"):
        reference = params_of(train(RECIPES[name], make_task("module"), POPULATION, rounds=3))
        assert torch.allclose(params_of(train(RECIPES[name], make_task("module"), fleet=fleet, rounds=3)), reference, atol=2e-5)


def test_a_node_answers_only_about_the_round_that_is_open():
    node, algorithm = Node(POPULATION, make_task("linear")), fedtail.fedavg(8, **LOCAL)
    state = algorithm.initial_state(make_task("linear").params(), 0)
    question = Train(algorithm.local, algorithm.risk, torch.zeros(0), algorithm.aggregate)
    types, code = types_by_name(PARTS), PlainChannel().encoding(8, 30.0)

    for round, opened in ((0, -1), (1, 0)):
        with pytest.raises(Refused, match=f"round {round} is asked about, but round {opened} is open"):
            node.answer(pack(Ask(round, (question,), code)))
        node.receive_broadcast(pack(Open(algorithm.sample(POPULATION, 0, 0), algorithm.broadcast(state, 0))))
    assert len(unpack(node.answer(pack(Ask(0, (question,), code))), types)) == 1
    node.receive_broadcast(pack(Close(3, True)))                                   # of another round: told again, too late
    assert node.round == 0
    node.receive_broadcast(pack(Close(0, True)))
    with pytest.raises(Refused, match="round -1 is open"):
        node.answer(pack(Ask(0, (question,), code)))


def test_two_parts_of_one_name_are_refused():
    class Mean:
        pass

    with pytest.raises(ValueError, match="two parts are called Mean"):
        Node(POPULATION, make_task("linear"), parts=[Mean])


def test_questions_may_be_joined_within_joined_questions():
    @dataclass(frozen=True)
    class TwoAtOnce(fedtail.Superquantile):
        def fit(self, previous):
            both = yield from join_conversations([self.quantile.fit(self.tail_fraction, None), self.quantile.fit(1.0, None)])
            return both[0]

    double = replace(RECIPES["delta_fl exact"], risk=TwoAtOnce(0.4))
    alone = params_of(train(double, make_task("linear"), POPULATION, rounds=2))
    family = train(Family((double, RECIPES["term"])), make_task("linear"), POPULATION, rounds=2)
    assert torch.equal(family.state[0].params, alone)
    assert torch.equal(alone, params_of(train(RECIPES["delta_fl exact"], make_task("linear"), POPULATION, rounds=2)))


def test_a_row_beyond_its_bound_is_an_error_that_names_it():
    wild = replace(fedtail.fedavg(8, learning_rate=0.2), aggregate=fedtail.WeightedMean(update_bound=1e-3))
    with pytest.raises(ValueError, match=r"a row is beyond its bound .* Raise the part's update_bound"):
        train(wild, make_task("linear"), POPULATION, rounds=1, channel=IntegerChannel())
    with pytest.raises(ValueError, match=r"modulus_bits must be in 8..62, got 63"):
        IntegerChannel(63)


def test_the_sampler_is_told_nothing_but_the_roster(processes):
    fleet = RemoteFleet(processes.exchange, processes.registry)
    assert Everyone()(fleet.population, 0, 0).ids.tolist() == list(range(len(POPULATION)))
    assert PlainChannel().reveals_rows


@pytest.mark.parametrize("mechanism", [NoPrivacy(), fedtail.dp_fedavg(12, 0.1, 1.0, cohort_size=8, **LOCAL).mechanism], ids=["exact", "noised"])
def test_noise_on_a_weight_crosses_as_it_was_drawn(mechanism):
    """A positive weight is rounded up to a unit; a sum with noise is not touched, since that would change the noise."""
    @dataclass(frozen=True)
    class Noised(fedtail.WeightedMean):
        mechanism: Mechanism = NoPrivacy()

        @property
        def declares(self):
            return replace(super().declares, mechanism=self.mechanism)

    asked = next(ratio_of_sums(Train(LocalSGD(), fedtail.Mean(), torch.zeros(0), Noised(mechanism=mechanism))))
    assert asked.divisor == (None if mechanism.private else 0)
