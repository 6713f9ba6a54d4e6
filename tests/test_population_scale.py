"""A round of a large population touches the cohort: what is as long as the population is hashed in pieces, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedtail
from fedtail import Engine, Population, Task, train
from fedtail.constant_prediction import _spaced_rows
from fedtail.data import storage
from fedtail.draws import PIECE, hash_bits
from fedtail.models import SoftmaxRegression
from fedtail.sampling import Uniform
from fedtail.sampling.uniform import uniform_positions

CLIENTS = 2 * PIECE + 5                                     # more than two pieces
CHEAP = {"aten.select.int", "aten.index_select.default", "aten.index.Tensor", "aten.split.Tensor", "aten.slice.Tensor",
         "aten.detach.default", "aten.alias.default", "aten.view.default"}      # views, and a few rows of many


def population_of(clients: int) -> Population:
    """Clients of two examples of three numbers, and keys in no order."""
    size = torch.full((clients,), 2)
    random = torch.Generator().manual_seed(0)
    return Population(torch.rand(2 * clients, 3, generator=random), torch.randint(0, 2, (2 * clients,), generator=random),
                      size.cumsum(0) - size, size, 1 + torch.rand(clients, generator=random).double(),
                      torch.randperm(clients, generator=random) * 7 - 9)


class LongOperations(TorchDispatchMode):
    """Notes operations that read or write a tensor with a number for each client, except those that pick a few rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """Call the operation, and note it."""
        result = operation(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.numel() >= CLIENTS]
        long = max((leaf.numel() for leaf in tensors), default=0) >= CLIENTS
        if long and (str(operation) not in CHEAP or (made and "index" in str(operation))):
            self.seen.append(str(operation))
        return result


@pytest.mark.parametrize("method", [fedtail.delta_fl(0.5, 20), fedtail.fedavg(20), fedtail.q_ffl(1.0, 20)],
                         ids=["delta_fl", "fedavg", "q_ffl"])
def test_a_round_passes_over_no_tensor_as_long_as_the_population(method):
    population, marks = population_of(CLIENTS), []
    with LongOperations() as watch:
        train(method, Task(SoftmaxRegression(3, 2)), population, rounds=3, engine=Engine(workers=1),
              on_round=lambda _: marks.append(len(watch.seen)))
    assert watch.seen[marks[0] : marks[2]] == []
    assert watch.seen[: marks[0]]                           # the setup does, once: the watch sees it


@pytest.mark.parametrize("count", [1, 20, PIECE + 7, 2 * PIECE, CLIENTS - 1, CLIENTS, CLIENTS + 3])
def test_cohorts_drawn_in_pieces_are_the_smallest_hashes_of_all(count):
    population = population_of(CLIENTS)
    for round in range(2):
        hashes = hash_bits(5, "cohort", round, population.key).numpy()
        assert uniform_positions(population, count, 5, round).tolist() == np.sort(np.argsort(hashes)[:count]).tolist()


def test_without_a_seed_as_many_different_clients_are_drawn():
    population = population_of(CLIENTS)
    one, other = (uniform_positions(population, 400, None, 0) for _ in range(2))
    assert len(one.unique()) == len(other.unique()) == 400
    assert not torch.equal(one, other)
    assert bool((one[1:] > one[:-1]).all())
    late = torch.cat([uniform_positions(population, 1000, None, 0) for _ in range(5)]) >= CLIENTS // 2
    assert abs(int(late.sum()) - 2500) < 5 * (5000 * 0.25) ** 0.5 + 5      # five standard deviations


def test_the_largest_mass_is_that_of_the_masses_that_are_there():
    population = population_of(50)
    before = population.largest_mass
    heavier = population.with_columns(mass=population.mass * 3)
    assert before == float(population.mass.max())
    assert heavier.largest_mass == float(heavier.mass.max()) == pytest.approx(3 * before)
    few = population.select(population.mass.argsort()[:10].numpy())
    assert few.largest_mass == float(few.mass.max()) < before
    assert replace(population, mass=population.mass * 2).largest_mass == pytest.approx(2 * before)
    assert Uniform(7)(heavier, 0, 0).mass_bound == heavier.largest_mass


def test_saving_and_the_constant_prediction_hold_no_number_for_each_example(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_BLOCK_EXAMPLES", 500)
    sizes = torch.full((100,), 60)
    sizes[3] = 2000                                          # more than a block
    whole = Population(torch.arange(3.0 * sizes.sum()).reshape(-1, 3), torch.rand(int(sizes.sum())), sizes.cumsum(0) - sizes, sizes,
                       sizes.double(), torch.arange(100))
    few = whole.select([7, 3, 99, *range(20, 60)])
    longest: list[int] = []

    class Longest(TorchDispatchMode):
        """Notes how long the tensors of integers are that operations make."""

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            """Call the operation, and note it."""
            result = operation(*args, **(kwargs or {}))
            longest.extend(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.dtype == torch.int64)
            return result

    with Longest():
        few.save(tmp_path / "saved")
        rows = _spaced_rows(few, 50)
    assert max(longest) <= 2500 < few.num_examples           # those of the largest client and a block, and no more
    opened, all_rows = Population.open(tmp_path / "saved"), few.example_clients_and_rows()[1]
    assert torch.equal(opened.inputs, few.inputs[all_rows])
    assert torch.equal(opened.targets, few.targets[all_rows])
    assert torch.equal(rows, all_rows[torch.linspace(0, len(all_rows) - 1, 50).long()])
    assert torch.equal(_spaced_rows(few, 10**6), all_rows)


def test_rows_beyond_single_precision_are_within_the_population():
    size = torch.tensor([2**25, 3])                         # 2^25 + 2 is rounded to 2^25 + 4
    many = Population(torch.zeros(1, 1).expand(2**25 + 3, 1), torch.zeros(1).expand(2**25 + 3), size.cumsum(0) - size, size,
                      size.double(), torch.arange(2))
    assert int(_spaced_rows(many, 7).max()) <= 2**25 + 2
