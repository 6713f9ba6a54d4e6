"""Populations: built from arrays and clients, read from files, saved, opened, selected and split."""

import gc
import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pytest import approx
from torch import tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtail.data import Population, by_column, pad_sequences
from fedtail.data import storage as storage_module
from fedtail.data.describe import describe


def population(sizes=(2, 3, 1, 4), seed=0, **more) -> Population:
    """Clients whose every example is a distinct number: x = (example, -example), y = example."""
    example = np.arange(sum(sizes))
    x = np.stack([example, -example], axis=1).astype(np.float32)
    return Population.from_arrays(x, example, np.repeat(np.arange(len(sizes)), sizes), **more)


def listed(values: torch.Tensor | np.ndarray | None) -> list | None:
    return None if values is None else values.tolist()


def same(a: Population, b: Population) -> bool:
    fields = ("targets", "start", "size", "mass", "key")
    inputs = a.inputs.items() if isinstance(a.inputs, dict) else [("", a.inputs)]
    other = b.inputs if isinstance(b.inputs, dict) else {"": b.inputs}
    return (
        all(torch.equal(getattr(a, f), getattr(b, f)) and getattr(a, f).dtype == getattr(b, f).dtype for f in fields)
        and {k for k, _ in inputs} == set(other) and all(torch.equal(v, other[k]) for k, v in inputs)
        and listed(a.group) == listed(b.group) and listed(a.names) == listed(b.names)
    )


def held(p: Population) -> list[list[int]]:
    """What each client holds, by the numbers of its examples."""
    return [p.client(k)[1].tolist() for k in range(len(p))]


# from arrays

@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_from_arrays_keeps_every_example_with_its_client_in_order(client):
    example = np.arange(len(client))
    p = Population.from_arrays(example[:, None].astype(np.float32), example, client)
    assert p.names is not None
    assert p.names.tolist() == sorted(set(client))
    assert held(p) == [[i for i, c in enumerate(client) if c == name] for name in p.names]
    for k in range(len(p)):
        x, y = p.client(k)
        assert isinstance(x, torch.Tensor)
        assert x[:, 0].tolist() == y.tolist()
    assert p.size.tolist() == p.mass.tolist()
    assert p.start.tolist() == [sum(p.size.tolist()[:k]) for k in range(len(p))]


def test_labels_may_be_text_or_objects_or_tensors():
    for client in (["b", "a", "b"], np.array(["b", "a", "b"], dtype=object), ("b", "a", "b")):
        p = Population.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 2], client)
        assert p.names is not None
        assert (p.names.tolist(), p.names.dtype.kind) == (["a", "b"], "U")
        assert held(p) == [[1], [0, 2]]
    assert held(Population.from_arrays([[0.0], [1.0]], [0, 1], tensor([7, 3]))) == [[1], [0]]


def test_types_are_what_torch_computes_with():
    p = Population.from_arrays([[0.5], [1.0]], [True, False], [0, 1])
    assert isinstance(p.inputs, torch.Tensor)
    assert (p.inputs.dtype, p.targets.dtype) == (torch.float32, torch.int64)
    wide = Population.from_arrays(np.ones((2, 1)), np.array([1, 2], dtype=np.uint32), [0, 1])
    assert isinstance(wide.inputs, torch.Tensor)
    assert (wide.inputs.dtype, wide.targets.tolist()) == (torch.float64, [1, 2])
    foreign = Population.from_arrays(np.array([[1.0], [2.0]], dtype=">f4"), np.array([0.5, 1.5], dtype=">f8"), [0, 1])
    assert isinstance(foreign.inputs, torch.Tensor)
    assert foreign.inputs.tolist() == [[1.0], [2.0]]
    assert foreign.targets.tolist() == [0.5, 1.5]


def test_read_only_and_strided_arrays_are_copied_without_a_warning():
    x = np.arange(8.0).reshape(4, 2)[:, ::-1]
    frozen = np.arange(4)
    frozen.flags.writeable = False
    p = Population.from_arrays(x, frozen, frozen)
    assert isinstance(p.inputs, torch.Tensor)
    assert p.inputs.tolist() == x.tolist()


def test_a_dict_of_inputs_stays_a_dict_and_is_sorted_alike():
    p = Population.from_arrays({"age": [30, 40, 50], "scan": np.eye(3)}, [0, 1, 2], ["b", "a", "b"])
    x, y = p.client(1)
    assert isinstance(x, dict)
    assert (x["age"].tolist(), y.tolist(), x["scan"].tolist()) == ([30, 50], [0, 2], np.eye(3)[[0, 2]].tolist())


def test_sequences_of_different_lengths_are_padded_with_their_lengths():
    p = Population.from_arrays([[5, 6, 7], [8], [9, 9]], [[1, 2, 3], [4], [5, 6]], [1, 0, 1])
    assert isinstance(p.inputs, dict)
    assert p.inputs["sequence"].tolist() == [[8, 0, 0], [5, 6, 7], [9, 9, 0]]
    assert p.inputs["lengths"].tolist() == [1, 3, 2]
    assert p.targets.tolist() == [[4, -100, -100], [1, 2, 3], [5, 6, -100]]
    assert p.targets.dtype == torch.int64


LARGE = 2**63


@pytest.mark.parametrize("labels", [
    [LARGE + 1, LARGE + 2, 5], [LARGE, LARGE + 1], [2**64 - 1, 2**64 - 2, 0], [np.uint64(LARGE + 1), np.int64(3), np.uint64(LARGE + 2)],
    np.array([LARGE + 1, LARGE + 2, 3], dtype=object), np.array([LARGE + 1, LARGE + 2, 3], dtype=np.uint64), [-5, 2**62, 2**62 + 1],
    ["1", "01", "1.0"], [True, False], [0.5, 1, 2**53],
], ids=str)
def test_labels_that_differ_are_clients_that_differ(tmp_path, labels):
    """Against Python's own notion of what is equal, in memory and saved."""
    population = Population.from_arrays(np.zeros((len(labels), 1)), np.arange(len(labels)), labels)
    population.save(tmp_path / "p")
    for p in (population, Population.open(tmp_path / "p")):
        assert p.names.tolist() == sorted(set(labels))
        assert [labels[int(p.client(k)[1][0])] for k in range(len(p))] == p.names.tolist()
    assert len(set(by_column(labels).tolist())) == len(labels)


@pytest.mark.parametrize(("labels", "text"), [
    ([1, "1"], "client mixes values of type int, str, which no array holds as they are. Labels must be all text or all numbers of one kind"),
    (np.array([1, "1"], dtype=object), "client mixes values of type int, str,"),
    ([1.5, "1.5"], "client mixes values of type float, str,"),
    ([True, "True"], "client mixes values of type bool, str,"),
    (["a", b"a"], "client mixes values of type bytes, str,"),
    ([2**53 + 1, 2.0**53], "client mixes values of type float, int,"),
    ([-1, LARGE + 1], "client holds whole numbers from -1 to 9223372036854775809, which no type of 64 bits holds together. Pass them as text"),
    ([1, 2**64], "client holds whole numbers from 1 to 18446744073709551616, which no type of 64 bits holds together."),
    (["a", "a\0"], "client holds text that ends in a zero character, which NumPy drops."),
])
def test_labels_that_cannot_be_kept_apart_are_refused(tmp_path, labels, text):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1)), y=np.zeros(2))
    for make in (lambda: Population.from_arrays(np.zeros((2, 1)), [0, 1], labels),
                 lambda: Population.from_npz(tmp_path / "d.npz", client=labels)):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            make()


def equal(found, wanted) -> bool:
    return np.array_equal(np.asarray(found, dtype=float), np.asarray(wanted, dtype=float), equal_nan=True)


def test_sequences_of_numbers_are_padded_with_what_is_no_number_through_every_way_in(tmp_path):
    rows, nan = [[5.0, -100.0, 7.0], [8.0], [9.0, -100.0]], float("nan")
    padded = [[8.0, nan, nan], [5.0, -100.0, 7.0], [9.0, -100.0, nan]]
    p = Population.from_arrays(rows, rows, [1, 0, 1])
    assert equal(p.targets, padded)
    assert p.targets.dtype == torch.float32
    p.save(tmp_path / "p")
    assert equal(Population.open(tmp_path / "p").targets, padded)
    assert equal(Population.from_clients([p.client(0), p.client(1)]).targets, padded)           # out of one and into another
    assert equal(Population.from_clients([([rows[1]], [rows[1]]), (rows[::2], rows[::2])]).targets, padded)
    path = write_table(tmp_path / "t.parquet", x=rows, y=rows, site=[1, 0, 1])
    assert equal(Population.from_parquet(path, "x", "y", "site").targets, padded)
    whole = np.concatenate(rows)
    assert describe(p)["targets"] == {"kind": "numbers", "outputs": 3, "min": -100.0, "max": 9.0, "mean": approx(whole.mean()),
                                      "std": approx(whole.std())}


def test_numbers_that_are_missing_are_refused_and_not_taken_for_padding():
    nan = float("nan")
    for y in ([[1.0, nan], [2.0]], [[1.0, 2.0], [nan]], np.array([[1.0, nan], [2.0, nan]])):
        with pytest.raises(ValueError, match="y is NaN or infinite in"):
            Population.from_arrays([[1.0], [2.0]], y, [0, 1])
    x = pad_sequences([[1.0, 2.0], [3.0]])
    for y in ([[1.0, nan], [2.0, 3.0]], [[1.0, 2.0], [3.0, float("inf")]]):
        with pytest.raises(ValueError, match="y is NaN or infinite in 1 of 2 examples"):
            Population.from_arrays(x, np.array(y), [0, 1])
    with pytest.raises(ValueError, match="y is -100 wherever x is padded, and among numbers -100 is a number like any other"):
        Population.from_arrays(x, np.array([[1.0, 2.0], [3.0, -100.0]]), [0, 1])


def test_a_folder_of_the_former_version_is_opened_unless_its_padding_looks_like_a_number(tmp_path):
    cases = {"classes": np.array([[1, 2], [3, -100]]), "numbers": np.array([[1.0, 2.0], [3.0, -99.0]]), "one": np.array([1.0, -100.0])}
    for name, y in cases.items():
        Population.from_arrays([[1.0], [2.0]], y, [0, 1]).save(tmp_path / name)
        manifest(tmp_path / name, version=1)
        assert equal(Population.open(tmp_path / name).targets, y)
    Population.from_arrays([[1.0], [2.0]], np.array([[1.0, 2.0], [3.0, -100.0]]), [0, 1]).save(tmp_path / "old")
    assert equal(Population.open(tmp_path / "old").targets, [[1.0, 2.0], [3.0, -100.0]])
    manifest(tmp_path / "old", version=1)
    with pytest.raises(ValueError, match="was saved by an earlier fedtail and has -100 among the numbers in y"):
        Population.open(tmp_path / "old")


@pytest.mark.parametrize("kind", [np.uint8, bool, np.int16])
def test_classes_in_narrow_types_are_padded_with_what_no_class_is(kind):
    rows = [np.array([1, 0], kind), np.array([1], kind)]
    assert Population.from_arrays([[1, 2], [3]], rows, [0, 1]).targets.tolist() == [[1, 0], [1, -100]]


def test_padding_takes_a_type_that_holds_every_sequence():
    assert pad_sequences([[1, 2], [0.5]])["sequence"].tolist() == [[1.0, 2.0], [0.5, 0.0]]
    assert pad_sequences([[], [1, 2]])["sequence"].dtype == torch.int64
    assert pad_sequences([[], [1, 2]])["lengths"].tolist() == [0, 2]
    points = pad_sequences([np.ones((2, 3)), np.zeros((1, 3))])["sequence"]
    assert (points.shape, points[1, 1].tolist()) == ((2, 2, 3), [0.0, 0.0, 0.0])


def test_scalar_tensors_and_equally_long_object_rows_are_not_sequences():
    rows = np.empty(2, dtype=object)
    rows[:] = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    p = Population.from_arrays(rows, [tensor(1), tensor(0)], [0, 1])
    assert isinstance(p.inputs, torch.Tensor)
    assert (p.inputs.tolist(), p.targets.tolist()) == ([[1.0, 2.0], [3.0, 4.0]], [1, 0])


# from clients

def test_from_clients_keeps_the_order_of_clients():
    p = Population.from_clients([(np.ones((2, 3)), [0, 1]), (np.zeros((1, 3)), [2])], mass=[1, 2], group=[1, 0])
    assert (held(p), p.mass.tolist(), p.names) == ([[0, 1], [2]], [1.0, 2.0], None)
    assert p.group is not None
    assert p.group.tolist() == [1, 0]


def test_from_clients_joins_dicts_tensors_and_mixed_numbers():
    p = Population.from_clients([({"a": tensor([[1.0]]), "b": [1]}, [0]), ({"a": tensor([[2.0]]), "b": [0.5]}, [1])])
    assert isinstance(p.inputs, dict)
    assert (p.inputs["a"].tolist(), p.inputs["b"].tolist()) == ([[1.0], [2.0]], [1.0, 0.5])
    assert p.inputs["b"].dtype == torch.float32


@pytest.mark.parametrize("second", [[[3]], [[3, 4, 5], [6]]])
def test_from_clients_pads_sequences_over_all_clients(second):
    p = Population.from_clients([([[1, 2], [3, 4]], [0, 1]), (second, [0] * len(second))])
    assert isinstance(p.inputs, dict)
    assert p.inputs["lengths"].tolist() == [2, 2, *map(len, second)]
    width = max(map(len, [[1, 2], *second]))
    assert p.inputs["sequence"].tolist() == [row + [0] * (width - len(row)) for row in [[1, 2], [3, 4], *second]]


# errors

@pytest.mark.parametrize(("build", "text"), [
    (lambda: Population.from_arrays([], [], []), "from_arrays got no examples. Pass at least one"),
    (lambda: Population.from_arrays([1.0], [0], [[0]]), "client must hold one label per example, got shape (1, 1)"),
    (lambda: Population.from_arrays([1.0, 2.0], [0, 1], ["a", None]), "client mixes values of type NoneType, str"),
    (lambda: Population.from_arrays([1.0, 2.0], [0, 1], [1.0, np.nan]), "client is NaN for 1 of 2 examples"),
    (lambda: Population.from_arrays([1.0], [0, 1], [0, 1]), "x has 1 examples, but client names 2"),
    (lambda: Population.from_arrays({"a": [1.0], "b": [1.0, 2.0]}, [0, 1], [0, 1]), "x['a'] has 1 examples, but"),
    (lambda: Population.from_arrays([1.0, 2.0], [0], [0, 1]), "y has 1 examples, but client names 2"),
    (lambda: Population.from_arrays({}, [0], [0]), "x is a dict with keys []; text keys are needed"),
    (lambda: Population.from_arrays({"a": [[1], [1, 2]]}, [0, 1], [0, 1]), "x['a'] holds rows of different shapes"),
    (lambda: Population.from_arrays(["ab", "c"], [0, 1], [0, 1]), "x holds <U2 values, numbers are needed"),
    (lambda: Population.from_clients([([1.0], ["cat"]), ([2.0], ["mouse"])]), "y holds <U3 values, numbers are needed"),
    (lambda: Population.from_arrays([1.0, np.inf], [0, 1], ["b", "a"]),
     "x is NaN or infinite in 1 of 2 examples (first: example 0 in client order, client 'a')"),
    (lambda: Population.from_arrays([1.0, 2.0], [0.0, np.nan], [0, 1]), "y is NaN or infinite in 1 of 2 examples"),
    (lambda: population(mass=[1.0]), "mass has shape (1,), but there are 4 clients. Pass one number for each"),
    (lambda: population(mass=[1.0, 0.0, 1.0, 1.0]), "mass must be positive and finite, got 0 to 1"),
    (lambda: population(mass=[1.0, np.inf, 1.0, 1.0]), "mass must be positive and finite, got 1 to inf"),
    (lambda: replace(population(), mass=torch.tensor([1.0, 0.0, 1.0, 1.0])), "mass must be positive and finite, got 0 to 1. Leave out clients"),
    (lambda: replace(population(), mass=torch.tensor([1.0, -2.0, 1.0, 1.0])), "mass must be positive and finite, got -2 to 1"),
    (lambda: replace(population(), mass=torch.tensor([1.0, np.nan, 1.0, 1.0])), "mass must be positive and finite, got nan to nan"),
    (lambda: replace(population(), mass=torch.ones(3)), "mass has shape (3,), but there are 4 clients."),
    (lambda: population(group=[0, 1]), "group must hold one integer from 0 for each of 4 clients, got shape (2,)"),
    (lambda: population(group=["a", "b", "c", "d"]), "Number named groups first"),
    (lambda: population(group=[0, 1, 0, -1]), "group must hold one integer from 0"),
    (lambda: Population.from_clients([]), "from_clients got no clients. Pass a list of (x, y) pairs"),
    (lambda: Population.from_clients([([[1.0]], [0]), ([], [])]), "client 1 has no examples. Leave it out"),
    (lambda: Population.from_clients([([1.0, 2.0], [0]), ([1.0], [0, 1])]),
     "client 0: x has 2 examples, y has 1. Every client's x and y must have the same length"),
    (lambda: Population.from_clients([({"a": [1.0]}, [0]), ({"b": [1.0]}, [0])]), "client 1 does not give x as the first client"),
    (lambda: Population.from_clients([([1.0], [0]), ({"b": [1.0]}, [0])]), "client 1 does not give x as the first client does"),
    (lambda: population().select([0.5]), "select needs positions, names as text, or a boolean mask, got float64"),
    (lambda: population().select([True, False]), "the mask has shape (2,), but there are 4 clients"),
    (lambda: population().split((0.5, 0.6)), "fractions must be positive and sum to at most 1, got (0.5, 0.6)"),
    (lambda: population().split(()), "fractions must be positive and sum to at most 1, got ()"),
    (lambda: population().split((0.01, 0.99)), "a fraction of 0.01 of 4 clients leaves nobody"),
    (lambda: population().split_examples(within=1.0), "within must be in (0, 1), got 1. For half and half write 0.5"),
    (lambda: population().split_examples(), "1 of 4 clients hold one example, which cannot be split"),
])
def test_errors_say_what_came_and_what_to_write(build, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        build()


# select and split

def test_select_shares_examples_and_keeps_keys_names_groups_and_mass():
    p = population(mass=[1, 2, 3, 4], group=[0, 1, 0, 1])
    chosen = p.select([3, 1])
    assert (held(chosen), chosen.key.tolist(), chosen.mass.tolist()) == ([held(p)[3], held(p)[1]], [3, 1], [4, 2])
    assert chosen.group is not None
    assert chosen.names is not None
    assert (chosen.group.tolist(), chosen.names.tolist(), chosen.num_examples) == ([1, 1], [3, 1], 7)
    assert chosen.targets.data_ptr() == p.targets.data_ptr()
    assert same(p.select(p.size >= 3), p.at_least(3))
    assert same(p.select(np.array([3, 1], dtype=np.uint8)), chosen)
    assert (len(p.select([])), len(p.select(2))) == (0, 1)


@given(st.integers(4, 60), st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_splits_are_disjoint_reproducible_and_follow_the_key(clients, seed, shuffle):
    p = population([1] * clients)
    parts = p.split((0.25, 0.5, 0.25), seed)
    keys = [part.key.tolist() for part in parts]
    assert sorted(key for part in keys for key in part) == list(range(clients))
    assert [part.key.tolist() for part in p.split((0.25, 0.5, 0.25), seed)] == keys
    order = list(range(clients))
    shuffle.shuffle(order)
    assert [set(part.key.tolist()) for part in p.select(order).split((0.25, 0.5, 0.25), seed)] == [set(k) for k in keys]


def test_split_sizes_follow_the_fractions_and_seeds_differ():
    p = population([1] * 1000)
    train, test = p.split((0.7, 0.2), seed=1)
    assert (len(train), len(test)) == (700, 200)
    other = p.split((0.7, 0.2), seed=2)[0]
    assert set(train.key.tolist()) != set(other.key.tolist())      # equal with chance 1 / C(1000, 700)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12), st.floats(0.05, 0.95), st.integers(0, 99))
def test_split_examples_deals_out_every_example_once(sizes, fraction, seed):
    p = population(sizes)
    chosen = p.select(list(range(len(sizes)))[::-1])
    first, rest = chosen.split_examples(within=1 - fraction, seed=seed)
    for k, whole in enumerate(held(chosen)):
        assert sorted(held(first)[k] + held(rest)[k]) == whole
        assert len(held(first)[k]) == min(max(round(len(whole) * fraction), 1), len(whole) - 1)
    assert torch.allclose(first.mass + rest.mass, chosen.mass)
    assert torch.equal(first.key, chosen.key)
    again, _ = p.split_examples(within=1 - fraction, seed=seed)
    assert held(again) == held(first)[::-1]                   # a client's hold-out is its own, whoever else is there


class AsOnAGPU(TorchDispatchMode):
    """Refuses to select rows whose numbers lie on another device, which a GPU does and "meta" does not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_select.default:
            assert args[0].device == args[2].device
        return func(*args, **(kwargs or {}))


def test_split_examples_stays_on_the_device_of_the_examples():
    p = population((2, 5, 4))
    p = replace(p, inputs={"pixels": p.inputs, "age": p.targets})
    here, away = p.split_examples(within=0.6), p.to("meta")
    with AsOnAGPU():
        there = away.split_examples(within=0.6)
    for part, other in zip(there, here, strict=True):
        assert {values.device.type for values in (*part.inputs.values(), part.targets)} == {"meta"}
        assert [values.shape for values in part.inputs.values()] == [values.shape for values in other.inputs.values()]
        assert torch.equal(part.start, other.start)


def test_split_examples_needs_no_memory_for_padding():
    p = population([2] * 20_000 + [100_000])                  # padded to the largest: 20,001 x 100,000 x 8 bytes
    first, rest = p.split_examples()
    assert first.num_examples + rest.num_examples == p.num_examples
    inside = p.split_examples(seed=3)[0].targets[:20_000] % 2       # which of two examples comes first: a fair coin
    assert abs(inside.double().mean().item() - 0.5) < 5.5 * 0.5 / 20_000**0.5          # fails once in 2e7 seeds


# files

def test_npz_gives_one_array_or_a_dict(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, pixels=np.eye(3), age=[1, 2, 3], label=[0, 1, 2], writer=["b", "a", "b"])
    p = Population.from_npz(path, x="pixels", y="label", client="writer")
    assert held(p) == [[1], [0, 2]]
    several = Population.from_npz(path, x=["pixels", "age"], y="label", client="writer")
    assert isinstance(several.inputs, dict)
    assert several.inputs["age"].tolist() == [2, 1, 3]
    text = "called 'lable'. Did you mean 'label'? It holds: pixels, age, label, writer."
    with pytest.raises(ValueError, match=re.escape(text)):
        Population.from_npz(path, x="pixels", y="lable", client="writer")
    np.savez(path, x=np.array([None]), y=[0], client=[0])
    with pytest.raises(ValueError, match="array 'x' holds Python objects, which need pickle"):
        Population.from_npz(path)
    np.save(tmp_path / "one.npy", np.eye(2))
    with pytest.raises(ValueError, match=re.escape("is not an .npz file. Write one with numpy.savez(")):
        Population.from_npz(tmp_path / "one.npy")
    with pytest.raises(FileNotFoundError):
        Population.from_npz(tmp_path / "absent.npz")


def write_table(path: Path, chunks: int = 1, **columns) -> Path:
    table = pa.table(columns)
    parquet.write_table(table, path, row_group_size=max(1, len(table) // chunks))
    return path


def test_parquet_stacks_columns_and_reads_lists_sequences_and_text(tmp_path):
    path = write_table(
        tmp_path / "t.parquet", chunks=2, height=pa.array([1.5, 2.5, 3.5], pa.float32()), age=[1, 2, 3],
        scan=[[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], words=[[1, 2], [3], [4, 5]], label=[0, 1, 2],
        site=pa.array(["b", "a", "b"]).dictionary_encode(), person=["b", "a", "b"])
    for client in ("site", "person"):
        p = Population.from_parquet(path, x=["height", "age"], y="label", client=client)
        assert isinstance(p.inputs, torch.Tensor)
        assert p.inputs.dtype == torch.float32
        assert p.inputs.tolist() == [[2.5, 2.0], [1.5, 1.0], [3.5, 3.0]]
        assert p.names is not None
        assert p.names.tolist() == ["a", "b"]
    scan = Population.from_parquet(path, "scan", "label", "site").inputs
    assert isinstance(scan, torch.Tensor)
    assert (scan.shape, scan[0].tolist()) == ((3, 1, 2), [[3.0, 4.0]])
    words = Population.from_parquet(path, "words", "words", "site")
    assert isinstance(words.inputs, dict)
    assert words.inputs["sequence"].tolist() == [[3, 0], [1, 2], [4, 5]]
    assert words.targets.tolist() == [[3, -100], [1, 2], [4, 5]]


def test_parquet_refuses_unknown_empty_and_mixed_columns(tmp_path):
    path = write_table(tmp_path / "t.parquet", age=[1, None], scan=[[1.0], [2.0]], label=[0, 1], site=["a", "b"])
    for x, text in [("ages", "called 'ages'. Did you mean 'age'? It holds: age, scan, label, site."),
                    ("age", "column 'age' is empty (null) in 1 of 2 rows. Drop or impute them first."),
                    (["label", "scan"], "column 'scan' holds lists, which cannot be stacked with 1 other columns"),
                    ("site", "column 'site', which is x, holds 'a', 'b'; numbers are needed")]:
        with pytest.raises((ValueError, TypeError), match=re.escape(text)):
            Population.from_parquet(path, x, "label", "site")


# saved and opened

@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.sampled_from(["plain", "dict", "names", "group"]))
def test_what_is_saved_is_what_opens(tmp_path_factory, sizes, kind):
    p = population(sizes, group=range(len(sizes)) if kind == "group" else None)
    if kind == "dict":
        p = replace(p, inputs={"wide": p.targets.double(), "flag": p.targets > 2}, names=None)
    if kind == "names":
        p = replace(p, names=np.array([f"clinic {k}" for k in range(len(sizes))], dtype=object))
    folder = tmp_path_factory.mktemp("saved") / "deep" / "folder"
    p.save(folder)
    assert same(Population.open(folder), p)


def test_a_selection_is_saved_at_its_own_size(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "_BLOCK", 24)         # three rows at a time, so blocks are exercised
    chosen = population((2, 3, 1, 4, 5)).select([3, 1])
    chosen.save(tmp_path / "p")
    opened = Population.open(tmp_path / "p")
    assert (held(opened), opened.key.tolist(), len(opened.targets)) == (held(chosen), [3, 1], 7)
    assert opened.start.tolist() == [0, 4]
    opened.select([1]).save(tmp_path / "p")                   # over itself, while it is mapped
    assert held(Population.open(tmp_path / "p")) == [held(chosen)[1]]
    assert held(opened) == held(chosen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_opened_tensors_are_mapped_and_never_change_the_file(tmp_path):
    p = population()
    p.save(tmp_path / "p")
    opened = Population.open(tmp_path / "p")
    before = {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()}
    opened.targets[0] = 99
    assert opened.targets[0] == 99
    assert {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()} == before
    assert same(Population.open(tmp_path / "p"), p)


def test_opening_costs_no_object_and_no_memory_per_client(tmp_path):
    clients = 200_000
    p = Population.from_arrays(np.zeros((2 * clients, 1), np.float32), np.zeros(2 * clients, np.int64),
                               np.repeat(np.arange(clients), 2))
    replace(p, names=np.arange(clients).astype(str)).save(tmp_path / "p")
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    opened = Population.open(tmp_path / "p")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(opened) == clients
    assert len(gc.get_objects()) - objects < 1000
    assert kept < clients                                     # bytes: less than one for each client


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    population().save(tmp_path / "p")
    def broken(*_):
        raise OSError("disk full")
    monkeypatch.setattr(storage_module, "_write_arrays", broken)
    with pytest.raises(OSError, match="disk full"):
        population((1, 1)).save(tmp_path / "p")
    assert same(Population.open(tmp_path / "p"), population())
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_saving_refuses_to_remove_what_it_did_not_write(tmp_path):
    (tmp_path / "notes").mkdir()
    population().save(tmp_path / "notes")                     # an empty folder holds nothing to lose
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"also holds thesis\.tex, which saving would remove"):
        population().save(tmp_path / "notes")
    with pytest.raises(FileExistsError, match="exists and is not a saved population of this version"):
        population().save(tmp_path)
    with pytest.raises(FileExistsError, match="exists and is not a saved population of this version"):
        population().save(tmp_path / "notes" / "thesis.tex")
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(("change", "text"), [
    ({"inputs": torch.zeros(10, dtype=torch.bfloat16)}, "inputs holds torch.bfloat16, which .npy files do not have"),
    ({"inputs": {"../escape": torch.zeros(10)}}, "x['../escape'] cannot be a file name. Call it by a plain word"),
    ({"names": np.array(["a", None, "b", 1], dtype=object)}, "names mixes values of type NoneType, int, str"),
])
def test_saving_refuses_what_it_cannot_store(tmp_path, change, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        replace(population(), **change).save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_saving_nobody_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this population has no clients"):
        population().select([]).save(tmp_path / "p")


def manifest(folder: Path, **changes) -> None:
    path = folder / "population.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("damage", "text"), [
    (lambda f: (f / "population.json").unlink(), "is not a saved population: it has no population.json"),
    (lambda f: (f / "population.json").write_text("{"), "is not readable json"),
    (lambda f: (f / "population.json").write_text("[]"), "does not describe a saved population"),
    (lambda f: manifest(f, format="other"), "does not describe a saved population"),
    (lambda f: manifest(f, version=3), "has format version 3; this fedtail reads 2"),
    (lambda f: manifest(f, arrays={}), "names the arrays none; inputs and targets, start, size, mass, key are needed"),
    (lambda f: manifest(f, arrays={"inputs": 0, "../../x": 0}), "names the arrays inputs, ../../x; inputs and"),
    (lambda f: manifest(f, clients=5), "but population.json says 5 clients and 10 examples"),
    (lambda f: (f / "mass.npy").unlink(), "lacks mass.npy, which population.json names"),
    (lambda f: (f / "mass.npy").write_bytes(b"nonsense"), "mass.npy is damaged or cut short"),
    (lambda f: (f / "mass.npy").write_bytes((f / "mass.npy").read_bytes()[:-1]), "mass.npy is damaged or cut short"),
    (lambda f: (f / "mass.npy").write_bytes(b""), "mass.npy is damaged or cut short"),
    (lambda f: np.save(f / "mass.npy", np.ones(5)), "but population.json says {'dtype': '<f8', 'shape': [4]}"),
    (lambda f: np.save(f / "mass.npy", np.array([None] * 4)), "mass.npy is damaged or cut short"),
    (lambda f: np.save(f / "start.npy", np.array([0, 2, 5, 7])), "has clients that reach outside its 10 examples"),
    (lambda f: np.save(f / "size.npy", np.array([2, 3, 1, -4])), "has clients that reach outside its 10 examples"),
])
def test_opening_a_damaged_folder_says_what_is_wrong(tmp_path, damage, text):
    population().save(tmp_path / "p")
    damage(tmp_path / "p")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(text)):
        Population.open(tmp_path / "p")
