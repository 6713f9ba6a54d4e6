"""Random cases against the textbook, and proof that a wrong line is noticed; `make fuzz-core` tries for an hour."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import pytest
import torch

from fedtail import algorithm, server
from fedtail.aggregation import weighted_mean
from fedtail.aggregation.curvature_mean import CurvatureMean
from fedtail.clients import Clients
from fedtail.engine import linear, shared_memory
from fedtail.iterates import AveragedIterate
from fedtail.local import batches, sgd
from fedtail.local.penalties import Proximal
from fedtail.local.schedules import Cosine, StepDecay
from fedtail.local.work import Stragglers
from fedtail.risk import (
    Ascent,
    GroupAscent,
    PowerFair,
    QuadraticSuperquantile,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    Tilted,
)
from fedtail.runs import checkpoint
from fedtail.sampling import by_mass
from fuzz_core import Case, Disagreement, case_of, fuzz, table

CASES = 25       # in each of four tests: a few seconds of one core
NOTICED = 30     # cases that have the part in question, within which a wrong line in it is noticed


@pytest.mark.parametrize("seed", range(4))
def test_random_cases_agree_with_the_textbook(seed):
    first = 10**6 * (100 + seed)
    counts = fuzz(range(first, first + CASES))
    assert counts["cases"] == CASES
    assert len(table(counts).splitlines()) == 13      # every kind of part was tried


def test_a_case_is_a_function_of_its_number():
    one, other = case_of(7), case_of(7)
    assert one.methods == other.methods
    assert torch.equal(one.task.params(), other.task.params())
    assert torch.equal(one.population.targets, other.population.targets)
    assert one.methods != case_of(8).methods


# One wrong line at a time: (the cases that have the part, where the line is, what it is there, what it becomes)


def has(kind: str, *names: str):
    return lambda case: any((kind, name) in set(case.labels()) for name in names)


def locally(setting: str):
    return lambda case: any(setting in method["local"][1] for method in case.methods)


def plain_batches(case: Case) -> bool:
    return any(method["local"][1]["batch_size"] in (3, 4) for method in case.methods)


def wrong_curvature(self, updates, seen, train, clients):
    flat_risk = replace(train.risk, power=0.0)
    rows = right_curvature_rows(self, updates, seen, train, clients)
    return torch.cat([right_curvature_rows(self, updates, seen, replace(train, risk=flat_risk), clients)[:, :1], rows[:, 1:]], 1)


right_curvature_rows, right_batches, right_weighted = CurvatureMean.rows, sgd.batches, batches._padded_order_and_weights
right_state, right_put = checkpoint._state_of_model, shared_memory.SharedMemory.put_sum
right_weighted_rows, right_draws = weighted_mean.WeightedMean.rows, Clients.random_bits

DEFECTS = {
    "the boundary of the tail counts fully": (
        has("risk", "Superquantile"), Superquantile, "density", lambda self, seen, dual: (seen.losses >= dual[0]).double()),
    "the boundary of the filter is left out": (
        has("risk", "TailFilter"), TailFilter, "density", lambda self, seen, dual: (seen.losses > dual[0]).double()),
    "nothing is capped": (
        has("risk", "SmoothedSuperquantile"), SmoothedSuperquantile, "_density_at",
        lambda self, losses, level: self.tail_fraction * ((losses - level) / self.smoothing).exp()),
    "half the smoothing": (
        has("risk", "QuadraticSuperquantile"), QuadraticSuperquantile, "_density_at",
        lambda self, losses, threshold: ((losses - threshold) * 2 / self.smoothing).clamp(0, 1)),
    "tilted the other way": (
        has("risk", "Tilted"), Tilted, "density", lambda self, seen, dual: (self.tilt * (dual[0] - seen.losses)).clamp(max=0).exp()),
    "a power too many": (
        has("risk", "PowerFair"), PowerFair, "density", lambda self, seen, dual: (seen.losses / dual[0]) ** (self.power + 1)),
    "lambdas are not projected": (
        has("risk", "Ascent"), Ascent, "remember", lambda self, seen, dual: torch.ones_like(seen.mass) + dual[1] * seen.losses),
    "groups weigh by their mass": (
        has("risk", "GroupAscent"), GroupAscent, "density", lambda self, seen, dual: dual[self.groups:][seen.group]),
    "masses are forgotten": (
        has("sample", "Everyone"), weighted_mean.WeightedMean, "rows", lambda self, updates, seen, train, clients: right_weighted_rows(
            self, updates, replace(seen, mass=(seen.mass > 0).double()), train, clients)),
    "no curvature": (has("aggregate", "CurvatureMean"), CurvatureMean, "rows", wrong_curvature),
    "the penalty pushes away": (
        locally("penalty"), Proximal, "add_gradient",
        lambda self, gradients, params, anchor: gradients - self.strength * (params - anchor)),
    "the first batch is skipped": (
        plain_batches, sgd, "batches", lambda *given: islice(right_batches(*given), 1, None)),
    "every epoch in the same order": (
        locally("epochs"), Clients, "random_bits",
        lambda self, name, *parts: right_draws(self, name, *(0 * part for part in parts)) if name == "batches" else
        right_draws(self, name, *parts)),
    "a small last batch weighs less": (
        plain_batches, batches, "_padded_order_and_weights", lambda clients, order, size: (
            right_weighted(clients, order, size)[0], right_weighted(clients, order, size)[1].clamp(max=1 / (size or 1e-9)))),
    "the schedule is a round ahead": (
        locally("schedule"), StepDecay, "__call__", lambda self, round: self.factor ** ((round + 1) // self.every)),
    "the cosine goes below its end": (
        locally("schedule"), Cosine, "__call__", lambda self, round: self.final + (1 - self.final) * (1 - round / self.num_rounds)),
    "no straggler does it all": (
        locally("work"), Stragglers, "steps", lambda self, clients, full, epoch: (full - 1).clamp(min=1)),
    "Adam's second decay is its first": (
        has("server", "Adam"), server.Adam, "second_moment",
        lambda self, second, square: self.first_decay * second + (1 - self.first_decay) * square),
    "Yogi without a sign": (
        has("server", "Yogi"), server.Yogi, "second_moment", lambda self, second, square: second - (1 - self.second_decay) * (second - square)),
    "momentum forgets": (
        lambda case: any(method["server"][1].get("momentum") for method in case.methods), server.SGD, "__call__",
        lambda self, params, update, state: (params + self.learning_rate * update, (update,) if self.momentum else ())),
    "the average counts a model twice": (
        has("iterate", "AveragedIterate"), AveragedIterate, "keep",
        lambda self, kept, params, round, seed: params.clone() if kept is None else kept + (params - kept) / (round + 2)),
    "a client drawn twice counts once": (
        has("sample", "ByMass"), by_mass, "Cohort",
        lambda ids, key, importance, bound: algorithm.Cohort(ids, key, importance.clamp(max=float(importance.min())), bound)),
    "a residual of the closed form": (
        has("kernel", "closed"), linear, "_subtract_one_at_targets", lambda likely, targets: likely.scatter_(1, targets[:, None], 0.0)),
    "a checkpoint forgets the dual": (
        lambda case: has("resumed", "checkpoint")(case) and has("risk", "GroupAscent", "Refreshed")(case), checkpoint, "_state_of_model",
        lambda *given: replace(right_state(*given), dual=None)),
    "a worker's sum is off by a bit": (
        has("workers", "2"), shared_memory.SharedMemory, "put_sum",
        lambda self, block, rows: right_put(self, block, rows.nextafter(rows + 1) if rows.is_floating_point() else rows + 1)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_wrong_line_is_noticed(name, monkeypatch):
    """The first disagreement among the cases that have the part; and without the wrong line none of them disagrees."""
    concerns, where, line, wrong = DEFECTS[name]
    monkeypatch.setattr(where, line, wrong)
    concerned = (case.number for case in map(case_of, count(10**6 * 200)) if concerns(case))
    with pytest.raises(Disagreement, match=r"python tests/fuzz_core.py --case 200\d+"):
        fuzz(islice(concerned, NOTICED))
