"""Hierarchical risks: against formulas written out, rounds through sums against autograd, and risks over a client's examples."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from torch import Tensor, nn

import fedtail
from fedtail import (
    Ascent,
    Engine,
    EntropicValueAtRisk,
    Everyone,
    Hierarchical,
    IntegerChannel,
    LocalSGD,
    Mean,
    PlainChannel,
    Population,
    PowerFair,
    SecureChannel,
    Superquantile,
    Task,
    Tilted,
    ValueAtRisk,
    Worst,
    train,
)
from fedtail.client_statistics import ClientStatistics
from fedtail.experiment import Source
from fedtail.experiment.experiment import build_experiments
from fedtail.models import SoftmaxRegression
from fedtail.risk.base import fit_locally

from remote_cases import Sites, params_of
from run_cases import BASE

WIDE = torch.float64
LEVELS = {"mean": Mean(), "tilted up": Tilted(2.0), "tilted down": Tilted(-3.0), "barely": Tilted(1e-7), "largest": Tilted(math.inf),
          "smallest": Tilted(-math.inf), "superquantile": Superquantile(0.4), "worst": Worst(), "value at risk": ValueAtRisk(0.5)}


def grouped(seed: int, n: int = 40, groups: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, masses (some of them zero) and groups of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(n, generator=generator, dtype=WIDE)
    mass[:3] = 0
    group = (groups * torch.rand(n, generator=generator) ** 3).long()
    return 3 * torch.rand(n, generator=generator, dtype=WIDE), mass, group


def written_out(across, within, losses: Tensor, mass: Tensor, group: Tensor) -> Tensor:
    """The risk of the risks of the groups with mass, one after the other."""
    ids = [g for g in group.unique().tolist() if float(mass[group == g].sum()) > 0]
    values = torch.stack([within.value(losses[group == g], mass[group == g]) for g in ids])
    return across.value(values, torch.stack([mass[group == g].sum() for g in ids]))


# Tilted at its ends


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("tilt", [sign * size for sign in (-1, 1) for size in (1e-8, 1e-6, 1e-3, 0.5, 30.0, 1e6)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_tilted_is_exact_for_any_tilt_and_scale(dtype, tilt, scale):
    """Against fifty digits; |t| times the loss is up to 1e12."""
    losses = scale * torch.tensor([0.1, 0.5, 0.5, 2.0], dtype=dtype)
    with mpmath.workdps(50):
        exact = [mpmath.mpf(float(loss)) for loss in losses]
        expected = float(mpmath.log(sum(mpmath.e ** (mpmath.mpf(tilt) * loss) for loss in exact) / 4) / mpmath.mpf(tilt))
        parts = [mpmath.e ** (mpmath.mpf(tilt) * (loss - max(exact, key=lambda one: tilt * one))) for loss in exact]
        shares = [float(part / sum(parts)) for part in parts]
    digits = 3e-7 if dtype == torch.float32 else 1e-13
    assert Tilted(tilt).value(losses).item() == approx(expected, rel=digits)
    assert Tilted(tilt).weights(losses).tolist() == approx(shares, rel=max(digits, 1e-9), abs=digits)


@pytest.mark.parametrize(("tilt", "expected", "weights"), [(math.inf, 2.0, [0, 0, 0.25, 0.75]), (-math.inf, 0.1, [1, 0, 0, 0])])
def test_infinite_tilts_are_the_ends(tilt, expected, weights):
    losses, mass = torch.tensor([0.1, 0.5, 2.0, 2.0], dtype=WIDE, requires_grad=True), torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=WIDE)
    value = Tilted(tilt).value(losses, mass)
    assert value.item() == expected
    assert torch.autograd.grad(value, losses)[0].tolist() == weights
    assert Tilted(tilt).weights(losses, mass).tolist() == weights
    clients = ClientStatistics(losses.detach(), mass)
    density = Tilted(tilt).density(clients, fit_locally(Tilted(tilt).fit(None), clients))
    assert ((mass * density) / (mass * density).sum()).tolist() == weights
    assert Tilted(tilt).value(torch.tensor([[1.0, 3.0], [5.0, 2.0]])).tolist() == ([3.0, 5.0] if tilt > 0 else [1.0, 2.0])


# Alone


@given(st.integers(0, 10**6), st.sampled_from([-math.inf, -4.0, -1e-6, 0.0, 1e-6, 0.7, 25.0, math.inf]))
def test_the_same_tilt_on_both_levels_is_that_tilt_over_all(seed, tilt):
    losses, mass, group = grouped(seed)
    risk = Hierarchical(within=Tilted(tilt), across=Tilted(tilt))
    assert risk.value(losses, mass, group).item() == approx(Tilted(tilt).value(losses, mass).item(), rel=1e-12)
    assert risk.weights(losses, mass, group).tolist() == approx(Tilted(tilt).weights(losses, mass).tolist(), abs=1e-12)


@pytest.mark.parametrize("within", LEVELS)
@pytest.mark.parametrize("across", LEVELS)
def test_levels_of_any_kind_are_the_risk_of_the_risks_and_the_weights_are_its_gradient(within, across):
    losses, mass, group = grouped(len(within) + 100 * len(across))
    losses.requires_grad_()
    risk = Hierarchical(LEVELS[within], LEVELS[across])
    value = risk.value(losses, mass, group)
    assert value.item() == approx(written_out(LEVELS[across], LEVELS[within], losses.detach(), mass, group).item(), rel=1e-12)
    weights = risk.weights(losses, mass, group)
    (slope,) = torch.autograd.grad(written_out(LEVELS[across], LEVELS[within], losses, mass, group), losses)
    assert torch.allclose(slope, weights, atol=1e-12)
    assert torch.allclose(torch.autograd.grad(value, losses)[0], weights, atol=1e-12)
    assert weights.sum().item() == approx(1)
    assert weights[mass == 0].tolist() == [0.0] * 3


def test_weights_are_those_of_the_formula():
    """[Li23, eq. (7.85)] with equal masses: m_g^(t / tau - 1) e^(tau f) / sum |g'| m_g'^(t / tau)."""
    losses, _, group = grouped(5)
    t, tau = 2.5, -1.5
    lifted = (tau * losses).exp()
    sizes = group.bincount().double()
    m = torch.zeros_like(sizes).index_add(0, group, lifted) / sizes.clamp(min=1)
    total = (sizes * m.where(sizes > 0, 1.0) ** (t / tau))[sizes > 0].sum()
    expected = m[group] ** (t / tau - 1) * lifted / total
    assert torch.allclose(Hierarchical(Tilted(tau), Tilted(t)).weights(losses, group=group), expected, rtol=1e-10)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_three_levels_are_two_nested_ones(seed):
    losses, mass, group = grouped(seed, groups=9)
    coarse = group // 4
    risk = Hierarchical(Tilted(-2.0), Hierarchical(Superquantile(0.5), Tilted(3.0)))
    middle = torch.stack([Hierarchical(Tilted(-2.0), Superquantile(0.5)).value(losses[coarse == c], mass[coarse == c], group[coarse == c])
                          for c in coarse[mass > 0].unique().tolist()])
    by_coarse = torch.stack([mass[coarse == c].sum() for c in coarse[mass > 0].unique().tolist()])
    assert risk.value(losses, mass, torch.stack([group, coarse])).item() == approx(Tilted(3.0).value(middle, by_coarse).item(), rel=1e-12)
    assert risk.weights(losses, mass, torch.stack([group, coarse])).sum().item() == approx(1)
    assert risk.levels == 3


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 1], [False, False, True, True, True]])
def test_groups_are_lists_arrays_or_booleans_too(labels):
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0], dtype=WIDE)
    for group in (labels, np.array(labels), torch.tensor(labels)):
        assert Hierarchical(Mean(), Worst()).value(losses, group=group).item() == 5.0
        assert fedtail.RiskLoss(Hierarchical(Mean(), Worst()))(losses, group=group).item() == 5.0


@pytest.mark.parametrize("across", [Worst(), Tilted(math.inf), Tilted(1e3), Superquantile(0.3), Mean()], ids=repr)
@pytest.mark.parametrize("within", [Worst(), Mean(), Tilted(2.0), Superquantile(0.5)], ids=repr)
def test_groups_whose_risks_differ_by_rounding_share_by_mass(within, across):
    """Found by a tester: of several groups with equal losses one took all the weight."""
    generator = torch.Generator().manual_seed(4)
    group = torch.randint(0, 5, (40,), generator=generator)
    losses, mass = torch.full((40,), math.log(10)).to(WIDE), torch.rand(40, generator=generator, dtype=WIDE) + 0.1
    risk = Hierarchical(within, across, groups=5)
    assert torch.allclose(risk.weights(losses, mass, group), mass / mass.sum(), rtol=1e-9)
    clients = ClientStatistics(losses, mass, group)
    density = risk.density(clients, fit_locally(risk.fit(None), clients))
    assert torch.allclose(density, density.max().expand(40), rtol=1e-6)
    assert density.max() > 0


@pytest.mark.parametrize("bound", [4.0, 30.0, 40.0, 79.0])
@pytest.mark.parametrize("across", [Tilted(-5.0), Worst(), Tilted(2.0)], ids=repr)
def test_a_bound_far_above_the_losses_costs_no_digits(bound, across):
    """Found by a tester: from a bound of 30 on the values of groups had few digits left, from 40 none."""
    losses, group = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=WIDE), torch.tensor([0, 0, 1, 1])
    risk = Hierarchical(Tilted(1.0, bound), across, groups=2)
    clients = ClientStatistics(losses, torch.ones(4, dtype=WIDE), group)
    density = risk.density(clients, fit_locally(risk.fit(None), clients))
    assert torch.allclose(density / density.sum(), risk.weights(losses, group=group), rtol=1e-9)


def test_weights_of_risks_that_do_not_move_with_the_losses_are_the_gradient_too():
    losses, group = torch.tensor([1.0, 2.0, 10.0, 20.0], dtype=WIDE, requires_grad=True), torch.tensor([0, 0, 1, 1])
    value = sum(0.5 * PowerFair(1.0).value(losses[group == one]) for one in (0, 1))
    (slope,) = torch.autograd.grad(value, losses)
    assert torch.allclose(Hierarchical(PowerFair(1.0), Mean()).weights(losses, group=group), slope / slope.sum(), rtol=1e-12)
    assert Tilted(-math.inf).value(torch.tensor([math.inf, 1.0])).item() == 1.0


def test_labels_only_say_who_is_together_and_dtypes_are_kept():
    losses, mass, group = grouped(1)
    risk = Hierarchical(EntropicValueAtRisk(0.5), Superquantile(0.3))      # takes no batches: group by group
    renamed = torch.tensor([700, -3, 5, 12, 9, 1])[group]
    assert risk.value(losses, mass, group).item() == approx(risk.value(losses, mass, renamed).item(), rel=1e-9)
    narrow = Hierarchical(Tilted(1.0), Worst()).value(losses.float(), mass.float(), group)
    assert narrow.dtype == torch.float32
    assert Hierarchical(Tilted(1.0), Worst()).weights(losses.float(), group=group).dtype == torch.float32


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Hierarchical(Mean(), Ascent()), r"Ascent keeps something on each client"),
    (lambda: Hierarchical(Hierarchical(Mean(), Mean()), Mean()), r"nested from the inside out"),
    (lambda: Hierarchical(Mean(), Mean(), groups=0), r"groups must be positive"),
    (lambda: Hierarchical(Mean(), Hierarchical(Mean(), Worst()), groups=4), r"of 4 groups, for 1 further levels, got \(\)\."),
    (lambda: Hierarchical(Mean(), Hierarchical(Mean(), Worst()), groups=3, parents=(0, 1)), r"of 3 groups, for 1 further levels, got \(0, 1\)\."),
    (lambda: Hierarchical(Mean(), Worst(), groups=2, parents=(0, 1)), r"for 0 further levels"),
    (lambda: Hierarchical(Mean(), Hierarchical(Mean(), Hierarchical(Mean(), Worst())), groups=3, parents=((0, 0, 1), (0, 1, 1))), "two groups of the level above"),
    (lambda: Hierarchical(Mean(), Mean()).value(torch.ones(3)), r"needs the group of each loss"),
    (lambda: Hierarchical(Mean(), Mean()).value(torch.ones(3), group=torch.zeros(2, dtype=torch.int64)), r"group \(2,\)"),
    (lambda: Hierarchical(Mean(), Hierarchical(Mean(), Mean())).value(torch.ones(3), group=torch.tensor([[0, 0, 1], [0, 1, 1]])), "two groups of the level above"),
    (lambda: LocalSGD(example_risk=Hierarchical(Mean(), Mean())), r"cannot be the risk over a client's examples"),
    (lambda: LocalSGD(example_risk=PowerFair(1.0)), r"PowerFair cannot be the risk over a client's examples: it does not move with the losses"),
    (lambda: LocalSGD(example_risk=fedtail.TiltedValueAtRisk(0.5)), r"it does not move with the losses"),
    (lambda: LocalSGD(example_risk=fedtail.Refreshed(Hierarchical(Mean(), Worst()), 3)), r"needs the group of each loss"),
    (lambda: LocalSGD(example_risk=fedtail.GroupAscent(2)), r"cannot be the risk over a client's examples"),
])
def test_what_makes_no_sense_is_refused(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


# Federated

GROUPS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 3, 3, 3])


def people() -> Population:
    """Twelve clients of different sizes in four groups."""
    torch.manual_seed(0)
    sizes = [1 + (5 * k + 3) % 9 for k in range(12)]
    pairs = [(torch.randn(n, 4, dtype=WIDE) + k / 4, torch.randint(0, 3, (n,))) for k, n in enumerate(sizes)]
    return Population.from_clients(pairs, group=GROUPS)


def softmax() -> Task:
    torch.manual_seed(1)
    task = Task(SoftmaxRegression(4, 3).to(WIDE))
    return replace(task, module=task.with_params(torch.randn(15, dtype=WIDE)))


def full_step(risk, example_risk=None) -> fedtail.FederatedAlgorithm:
    local = LocalSGD(0.2, batch_size=None, local_steps=1, example_risk=example_risk)
    return replace(fedtail.fedavg(12), sample=Everyone(), local=local, risk=risk)


def descent(value, rounds: int) -> Tensor:
    """Gradient descent, by autograd, on a function of the losses of each client's examples."""
    w, pairs = softmax().params(), [people().client(k) for k in range(12)]
    for _ in range(rounds):
        w = w.detach().requires_grad_()
        losses = [nn.functional.cross_entropy(x @ w[:12].view(3, 4).T + w[12:], y, reduction="none") for x, y in pairs]
        w = w - 0.2 * torch.autograd.grad(value(losses), w)[0]
    return w.detach()


HIERARCHIES = {
    "tilted in tilted": Hierarchical(Tilted(2.0), Tilted(-1.0), groups=4), "mean in worst": Hierarchical(Mean(), Worst(), groups=4),
    "bounded": Hierarchical(Tilted(1.5, 9.0), Tilted(3.0), groups=4), "barely": Hierarchical(Tilted(1e-7), Tilted(1e-7), groups=4),
    "tail in tilted": Hierarchical(Superquantile(0.5), Tilted(1.0), groups=4), "tilted in tail": Hierarchical(Tilted(-1.0), Superquantile(0.6), groups=4),
    "largest in mean": Hierarchical(Tilted(math.inf), Mean(), groups=4),
    "four levels": Hierarchical(Tilted(1.0), Hierarchical(Tilted(-2.0), Hierarchical(Mean(), Tilted(4.0))), groups=4, parents=((0, 0, 1, 2), (5, 5, 5, 6))),
}


def labels_of(risk: Hierarchical) -> Tensor:
    return torch.stack([GROUPS, *(torch.tensor(one)[GROUPS] for one in risk.parents)]).squeeze(0)


@pytest.mark.parametrize("name", HIERARCHIES)
def test_rounds_descend_on_the_hierarchical_risk_of_the_clients(name):
    risk, mass = HIERARCHIES[name], people().mass.double()
    trained = train(full_step(risk), softmax(), people(), rounds=3, engine=Engine(workers=1))
    expected = descent(lambda losses: risk.value(torch.stack([own.mean() for own in losses]), mass, labels_of(risk)), 3)
    assert torch.allclose(trained.state.params, expected, atol=1e-6)


@pytest.mark.parametrize(("risk", "inside"), [(Tilted(2.0), Tilted(-2.0)), (Tilted(-1.0), Tilted(3.0)), (Mean(), Tilted(-2.0)), (Superquantile(0.5), Superquantile(0.4)),
                                              (Worst(), EntropicValueAtRisk(0.5))], ids=repr)
@pytest.mark.parametrize("kernel", ["closed", "module"])
def test_a_risk_over_examples_inside_a_risk_over_clients(risk, inside, kernel):
    mass = people().mass.double()
    trained = train(full_step(risk, inside), softmax(), people(), rounds=3, engine=Engine(workers=1, kernel=kernel))
    expected = descent(lambda losses: risk.value(torch.stack([inside.value(own) for own in losses]), mass), 3)
    assert torch.allclose(trained.state.params, expected, atol=1e-6)


THREE = Hierarchical(Tilted(2.0), Tilted(3.0), groups=4)


@pytest.mark.parametrize(("channel", "tolerance"), [(PlainChannel(), 1e-6), (IntegerChannel(), 2e-4), (SecureChannel(8, minimum_contributors=2), 2e-3)],
                         ids=["plain", "integers", "secure"])
def test_examples_in_clients_in_groups_through_sums_only(channel, tolerance):
    """Three levels of tilting, against descent on J written out."""
    mass = people().mass.double()
    method = full_step(THREE, Tilted(-1.0))
    trained = train(method, softmax(), people(), rounds=3, channel=channel, engine=Engine(workers=1))
    expected = descent(lambda losses: THREE.value(torch.stack([Tilted(-1.0).value(own) for own in losses]), mass, GROUPS), 3)
    assert torch.allclose(trained.state.params, expected, atol=tolerance)


def test_the_recipe_puts_the_levels_together():
    method = fedtail.term(2.0, 12, example_tilt=-1.0, group_tilt=3.0, groups=4, batch_size=None)
    assert (method.risk, method.local.example_risk) == (THREE, Tilted(-1.0))
    assert fedtail.term(2.0, 12).risk == Tilted(2.0)
    with pytest.raises(ValueError, match=r"group_tilt=3\.0 and groups=None: give both"):
        fedtail.term(2.0, group_tilt=3.0)


def test_an_experiment_file_has_the_levels_too():
    text = Path(__file__).parents[1].joinpath("docs", "experiments.md").read_text()
    [levels] = [block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "Hierarchical" in block]
    sample = BASE + '[sample]\ncohort_size = 5\n'
    [made] = build_experiments(Source.parse(sample + levels, "levels.toml", Path()), "levels")
    assert made.algorithm.local.example_risk == Tilted(-1.0)
    assert made.algorithm.risk == Hierarchical(Tilted(1.0), Tilted(5.0), groups=3)


def test_on_nodes_and_in_workers_with_mini_batches():
    method = replace(full_step(THREE), local=LocalSGD(0.2, batch_size=3, epochs=2, momentum=0.5, example_risk=Superquantile(0.5)))
    alone = params_of(train(method, softmax(), people(), rounds=2, engine=Engine(workers=1)))
    assert torch.equal(params_of(train(method, softmax(), people(), rounds=2, engine=Engine(workers=3))), alone)
    assert torch.allclose(params_of(train(method, softmax(), fleet=Sites(4, people(), softmax()).fleet(), rounds=2)), alone, atol=1e-9)


def test_a_group_of_few_is_as_if_absent_where_sums_hide_single_clients():
    """Of ten sampled clients some rounds have fewer than four of one group: it answers nothing and does not train."""
    torch.manual_seed(0)
    group = torch.tensor([0, 1] * 12)
    population = Population.from_clients([(torch.randn(4, 4, dtype=WIDE), torch.randint(0, 3, (4,))) for _ in group], group=group)
    views: list = []
    method = replace(full_step(Hierarchical(Tilted(1.0), Tilted(1.0), groups=2)), sample=fedtail.Uniform(10))
    train(method, softmax(), population, rounds=8, channel=SecureChannel(8, minimum_contributors=4), engine=Engine(workers=1), on_round=lambda p: views.append(p.view))
    few = 0
    for view in views:
        sizes = group[view.sampled].bincount(minlength=2)
        few += int(sizes.min() < 4)
        trained = group[view.contributors_of()].bincount(minlength=2)
        assert trained.tolist() == sizes.where(sizes >= 4, 0).tolist()
    assert few > 0
    with pytest.raises(ValueError, match=r"Hierarchical asks by group, and group 1 has 3 of 12 clients"):
        train(full_step(Hierarchical(Mean(), Worst(), groups=2)), softmax(), replace(people(), group=torch.tensor([0] * 9 + [1] * 3)), rounds=1,
              channel=SecureChannel(8, minimum_contributors=4))


@pytest.mark.parametrize(("risk", "text"), [
    (Hierarchical(Mean(), Worst()), r"needs the number of their groups"),
    (Hierarchical(PowerFair(1.0), Worst(), groups=4), r"PowerFair cannot be the risk within groups of clients"),
    (Hierarchical(Mean(), Worst(), groups=2), r"group"),
])
def test_what_cannot_be_trained_is_refused_before_a_round(risk, text):
    with pytest.raises(ValueError, match=text):
        train(full_step(risk), softmax(), people(), rounds=1)
