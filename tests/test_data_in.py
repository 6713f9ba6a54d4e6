"""From people's data to populations: data sets per client, data frames, CSV files, sparse rows, named clients, sets."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fedtail
from fedtail import Population, Task, fedavg, train
from fedtail.data import as_sets, sparse_rows
from fedtail.data.describe import describe
from fedtail.data.opening import open_any_data
from fedtail.losses import cox_partial_likelihood
from fedtail.models import SoftmaxRegression, SparseLinear

X = torch.arange(30.0).reshape(10, 3)
Y = torch.arange(10) % 3


class Pairs(Dataset):
    """The examples above one by one, x as an array and y as a number; `wrap` makes another form of each."""

    def __init__(self, wrap=lambda x, y: (x, y), count: int = 10):
        self.wrap, self.count = wrap, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int):
        if place >= self.count:
            raise IndexError(place)
        return self.wrap(X[place].numpy(), int(Y[place]))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[k], Y[k]) for k in range(4)])


def examples(population: Population, client) -> tuple[list, list]:
    x, y = population.client(client)
    return x.tolist(), y.tolist()


def of(rows) -> tuple[list, list]:
    return X[rows].tolist(), Y[rows].tolist()


# data sets per client

EVERYTHING = list(range(10))
KINDS = {
    "tensors": (TensorDataset(X, Y), EVERYTHING),
    "a subset of tensors": (Subset(TensorDataset(X, Y), [7, 2, 5]), [7, 2, 5]),
    "a subset of a subset": (Subset(Subset(TensorDataset(X, Y), [7, 2, 5]), [2, 0]), [5, 7]),
    "own": (Pairs(), EVERYTHING),
    "a subset of its own": (Subset(Pairs(), [7, 2, 5]), [7, 2, 5]),
    "a stream": (Stream(), [0, 1, 2, 3]),
    "a loader that shuffles and drops": (DataLoader(Pairs(), batch_size=4, shuffle=True, drop_last=True), EVERYTHING),
    "a loader of some": (DataLoader(Pairs(), batch_size=4, sampler=SubsetRandomSampler([8, 1])), [1, 8]),
    "a loader by batches": (DataLoader(Pairs(), batch_sampler=[[3, 4], [0]]), [0, 3, 4]),
    "a loader of one by one": (DataLoader(Pairs(), batch_size=None), EVERYTHING),
    "a loader with its own batches": (
        DataLoader(Pairs(lambda x, y: {"a": x, "b": y}), 2,
                   collate_fn=lambda some: (torch.stack([torch.as_tensor(one["a"]) for one in some]), [one["b"] for one in some])),
        EVERYTHING),
    "a loader of a stream": (DataLoader(Stream(), 2), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_of_torch_is_a_client_with_its_examples_in_their_order(kind):
    dataset, rows = KINDS[kind]
    named = Population.from_datasets({"other": TensorDataset(X[:2], Y[:2]), "mine": dataset})
    assert named.names is not None
    assert named.names.tolist() == ["other", "mine"]
    assert examples(named, "mine") == of(rows)
    assert examples(named, "other") == of([0, 1])
    listed = Population.from_datasets([dataset])
    assert listed.names is None
    assert examples(listed, 0) == of(rows)


def test_reading_a_loader_draws_nothing_from_torchs_generator():
    before = torch.get_rng_state()
    Population.from_datasets([DataLoader(Pairs(), 4, shuffle=True)])
    assert torch.equal(torch.get_rng_state(), before)


def test_examples_that_are_dicts_or_have_several_inputs_or_lengths():
    dicts = Population.from_datasets([Pairs(lambda x, y: {"scan": x, "age": x[0], "label": y})], x=["scan", "age"], y="label")
    assert set(dicts.inputs) == {"scan", "age"}
    assert dicts.inputs["age"].tolist() == X[:, 0].tolist()
    several = Population.from_datasets([Pairs(lambda x, y: ({"a": x, "b": x[:1]}, y))])
    assert several.inputs["b"].shape == (10, 1)
    ragged = Population.from_datasets({"a": Pairs(lambda x, y: (x[: y + 1], y)), "b": Pairs(lambda x, y: (x[:1], y))})
    assert ragged.inputs["lengths"].tolist() == (Y + 1).tolist() + [1] * 10


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Population.from_datasets(TensorDataset(X, Y)), "one data set for each client is needed, got a single TensorDataset. Pass"),
    (lambda: Population.from_datasets([]), "from_datasets got no clients. Pass a dict"),
    (lambda: Population.from_datasets(7), "data sets of clients are needed, got 7"),
    (lambda: Population.from_datasets([Pairs] * 2), "client 0 is the class Pairs; a data set is needed. Write Pairs(...)."),
    (lambda: Population.from_datasets(Pairs), "data sets of clients are needed, got the class Pairs"),
    (lambda: Population.from_datasets({"a": Pairs(), "b": Pairs(count=0)}), "client 'b' has no examples. Leave it out."),
    (lambda: Population.from_datasets({"a": Pairs(lambda x, y: x)}), "the examples of client 'a' are of type ndarray; pairs (x, y)"),
    (lambda: Population.from_datasets({"a": Pairs(lambda x, y: (x, y, 1))}), "the examples of client 'a' are 3 parts; pairs (x, y)"),
    (lambda: Population.from_datasets({"a": Pairs(lambda x, y: {"u": x, "v": y})}), "are dicts of u, v. Say which entries are x and y"),
    (lambda: Population.from_datasets({"a": Pairs(lambda x, y: {"u": x})}, x="u", y="v"), "have no 'v'. They hold: u."),
    (lambda: Population.from_datasets({"a": Pairs(lambda x, y: (object(), y))}), "hold int, object, which are no numbers"),
    (lambda: Population.from_datasets({"a": (X, Y)}), "client 'a' is a pair of arrays. Pass pairs (x, y) to Population.from_clients"),
    (lambda: Population.from_datasets({"a": 3}), "client 'a' is a int; a torch Dataset, Subset or DataLoader is needed"),
    (lambda: Population.from_datasets({"a": DataLoader(Pairs(), sampler=WeightedRandomSampler([1.0] * 10, 10))}),
     "the DataLoader of client 'a' draws examples with replacement (WeightedRandomSampler)"),
    (lambda: Population.from_clients({"a": Pairs()}), "client 'a' must be a pair (x, y), got a Pairs. For data sets"),
])
def test_data_sets_are_refused_in_words(make, text):
    with pytest.raises((ValueError, TypeError)) as reason:
        make()
    assert text in str(reason.value)


def test_data_sets_of_hugging_face_by_client():
    datasets = pytest.importorskip("datasets")
    both = [datasets.Dataset.from_dict({"image": X[rows].tolist(), "age": rows, "label": Y[rows].tolist()}) for rows in ([0, 3, 1], [5, 6])]
    people = Population.from_datasets({"north": both[0], "south": both[1]}, x="image", y="label")
    assert (examples(people, "north"), examples(people, "south")) == (of([0, 3, 1]), of([5, 6]))
    assert Population.from_datasets(both, x=["age", "label"], y="label").inputs.tolist() == [[r, Y[r].item()] for r in (0, 3, 1, 5, 6)]
    ragged = [datasets.Dataset.from_dict({"words": words, "y": [0] * len(words)}) for words in ([[1, 2], [3]], [[4, 5, 6]])]
    assert Population.from_datasets(ragged, x="words", y="y").inputs["sequence"].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    with pytest.raises(TypeError, match="holds splits"):
        Population.from_datasets(datasets.DatasetDict({"train": both[0]}), x="image", y="label")
    with pytest.raises(TypeError, match="which columns"):
        Population.from_datasets(both)
    named = [one.cast_column("label", datasets.ClassLabel(names=names)) for one, names in zip(both, (["a", "b", "c"], ["c", "b", "a"]), strict=True)]
    with pytest.raises(ValueError, match=re.escape("client 1 has column 'label' as ClassLabel")):      # their classes mean others
        Population.from_datasets(named, x="image", y="label")


# data frames and CSV files

FRAME = pd.DataFrame({"age": [50, 61, 42, 33], "dose": [0.5, 1.0, 2.0, 3.0], "sick": [0, 1, 0, 1], "site": ["n", "s", "n", "n"],
                      "region": ["eu", "us", "eu", "eu"]})


@pytest.fixture(params=["pandas", "csv", "parquet"])
def read(request, tmp_path):
    """Reads a data frame as a population: directly, or from a file."""
    def reader(frame, **names) -> Population:
        if request.param == "pandas":
            return Population.from_pandas(frame, **names)
        path = tmp_path / f"data.{request.param}"
        frame.to_csv(path, index=False) if request.param == "csv" else frame.to_parquet(path)
        return Population.from_csv(path, **names) if request.param == "csv" else Population.from_parquet(path, **names)
    return reader


def test_columns_without_another_role_are_the_inputs(read):
    people = read(FRAME, y="sick", client="site", group="region")
    assert people.names is not None
    assert people.group is not None
    assert (people.names.tolist(), people.group.tolist()) == (["n", "s"], [0, 1])
    assert examples(people, "s") == ([[61.0, 1.0]], [1])
    assert examples(people, "n") == ([[50.0, 0.5], [42.0, 2.0], [33.0, 3.0]], [0, 0, 1])
    assert read(FRAME, y="sick", client="site", x="dose").inputs.tolist() == [0.5, 2.0, 3.0, 1.0]
    assert len(read(FRAME, y="sick", client=[3, 3, 4, 5], x=["dose"])) == 3
    assert len(read(FRAME, y="sick", client=None, x=["dose"])) == 1


def test_a_list_of_one_column_of_floats_is_a_matrix_of_one_feature(read):
    """Of a table with one feature `init` suggested no model, since each example was a single number."""
    one = read(FRAME[["dose", "sick", "site"]], y="sick", client="site")
    assert (one.inputs.shape, one.columns) == ((4, 1), ("dose",))
    assert read(FRAME, y="sick", client="site", x=["dose"]).inputs.shape == (4, 1)
    assert read(FRAME, y="sick", client="site", x="dose").inputs.shape == (4,)
    assert read(FRAME, y="sick", client="site", x=["age"]).inputs.dtype == torch.int64      # tokens, perhaps


def test_a_parquet_file_has_by_default_the_columns_of_an_npz_file(tmp_path):
    FRAME.rename(columns={"sick": "y", "site": "client"}).to_parquet(tmp_path / "data.parquet")
    people = Population.from_parquet(tmp_path / "data.parquet", x=["age", "dose"])
    assert examples(people, "s") == ([[61.0, 1.0]], [1])
    FRAME.drop(columns="region").to_parquet(tmp_path / "own.parquet")
    with pytest.raises(ValueError, match=re.escape("called 'y'")):
        Population.from_parquet(tmp_path / "own.parquet", client="site")
    assert Population.from_parquet(tmp_path / "own.parquet", None, "sick", "site").columns == ("age", "dose")      # in this order


def test_columns_are_refused_in_words(read):
    for names, text in [({"y": "sick", "client": "site"}, "column 'region', which is x, holds 'eu', 'us'; numbers are needed"),
                        ({"y": "ill", "client": "site", "x": "age"}, "called 'ill'. Did you mean")]:
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            read(FRAME, **names)
    empty = FRAME.assign(age=[50, None, 42, 33])
    with pytest.raises(ValueError, match=re.escape("column 'age' is empty (null) in 1 of 4 rows")):
        read(empty, y="sick", client="site", x="age")
    with pytest.raises(ValueError, match=re.escape(f"Drop or impute them first. The first is row 2 (site {FRAME.site[1]!r}).")):
        read(empty, y="sick", client="site", x="age")                    # whose row it is
    with pytest.raises(ValueError, match=re.escape("2 columns are empty (null) in some of 4 rows: 'age' in 1, 'dose' in 2. Drop or impute them first. The first is row 1")):
        read(empty.assign(dose=[None, 2.0, None, 1.0]), y="sick", client="site", x=["age", "dose"])
    with pytest.raises(ValueError, match="there is no column left to be x"):
        read(FRAME[["sick", "site"]], y="sick", client="site")


def test_columns_that_pandas_numbers_are_named_by_number_or_text():
    """A frame made of an array has the columns 0, 1, ...: they were a KeyError."""
    numbered = pd.DataFrame({0: [50.0, 61.0, 42.0], 1: [0.5, 1.0, 2.0], 2: [0, 1, 0], 3: [7, 8, 7]})
    people = Population.from_pandas(numbered, y=2, client=3)
    assert (people.columns, examples(people, "7")) == (("0", "1"), ([[50.0, 0.5], [42.0, 2.0]], [0, 0]))
    for x in ([0, 1], ["0", "1"], numbered.columns[:2]):
        assert torch.equal(Population.from_pandas(numbered, y="2", client=3, x=x).inputs, people.inputs)
    mixed = numbered.rename(columns={2: "sick", 3: "site"})
    assert Population.from_pandas(mixed, y="sick", client="site", x=1).inputs.tolist() == [0.5, 2.0, 1.0]
    with pytest.raises(ValueError, match=re.escape("called '9'. Did you mean")):
        Population.from_pandas(numbered, y=9, client=3)
    with pytest.raises(ValueError, match=re.escape("the data frame has 2 columns called 'sick'. Rename or drop one.")):
        Population.from_pandas(pd.concat([mixed, mixed[["sick"]]], axis=1), y="sick", client="site")
    with pytest.raises(TypeError, match=re.escape("y names one column, got ['sick']")):
        Population.from_pandas(mixed, y=["sick"], client="site")


@pytest.mark.parametrize("column", ["sick", "site"])
def test_empty_text_of_a_csv_file_is_missing_not_a_class_or_a_client(tmp_path, column):
    """It was a class called "", as a data frame's missing value never was."""
    frame = pd.DataFrame({"age": [50, 61, 42], "sick": ["yes", "no", "no"], "site": ["n", "s", "n"]})
    frame.loc[1, column] = None
    frame.to_csv(tmp_path / "d.csv", index=False)
    with pytest.raises(ValueError, match=re.escape(f"column {column!r} is empty (null) in 1 of 3 rows. Drop or impute them first. The first is row 2")):
        Population.from_csv(tmp_path / "d.csv", y="sick", client="site")
    with pytest.raises(ValueError, match=re.escape(f"column {column!r} is empty (null) in 1 of 3 rows")):
        Population.from_pandas(frame, y="sick", client="site")


def test_row_numbers_that_pandas_wrote_are_no_input_and_ids_are_warned_of(tmp_path):
    made = np.random.default_rng(0)
    frame = pd.DataFrame({"age": made.integers(20, 80, 60), "sick": made.integers(0, 2, 60), "site": np.arange(60) % 6})
    frame.to_csv(tmp_path / "d.csv")                                      # index=False was forgotten
    assert Population.from_csv(tmp_path / "d.csv", y="sick", client="site").inputs.shape == (60,)
    assert open_any_data(tmp_path / "d.csv", y="sick", client="site").inputs.shape == (60,)
    assert Population.from_pandas(pd.read_csv(tmp_path / "d.csv"), y="sick", client="site").inputs.shape == (60,)
    numbered = Population.from_pandas(frame.assign(id=made.permutation(60) + 7), y="sick", client="site")
    assert numbered.columns == ("age", "id")
    assert "column id numbers the examples from 7 to 66, as an id does, and says nothing of new ones. Leave it out of x." in describe(numbered)["warnings"]
    ties = Population.from_pandas(frame.assign(id=np.r_[0, np.arange(59)], row=frame.age + 0.5), y="sick", client="site")
    assert not any("numbers the examples" in one for one in describe(ties)["warnings"])


def test_frames_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match=re.escape("a pandas.DataFrame is needed, got dict. For arrays use Population.from_arrays")):
        Population.from_pandas({"y": [1]}, y="y", client="c")
    with pytest.raises(TypeError, match="a column of mixed types"):
        Population.from_pandas(FRAME.assign(site=["n", 1, "n", 2.5]), y="sick", client="site", x="age")


def test_names_in_csv_files_stay_as_they_are_written(tmp_path):
    (tmp_path / "d.csv").write_text("\ufeffpatient,v,y\n007,1,0\n7,2,1\n007,3,0\n")
    people = Population.from_csv(tmp_path / "d.csv", y="y", client="patient")
    assert people.names is not None
    assert people.names.tolist() == ["007", "7"]
    assert examples(people, "007") == ([1, 3], [0, 0])
    (tmp_path / "n.csv").write_text("client,a,b,y\n10,1,5,0\n9,2,6,1\n")
    numbered = open_any_data(tmp_path / "n.csv")                        # a and b have no other role
    assert numbered.names is not None
    assert numbered.names.tolist() == [9, 10]
    assert examples(numbered, "10") == ([[1, 5]], [0])


@pytest.mark.parametrize(("content", "text"), [
    (b"", "d.csv"), (b"a,y\n", "no rows below its header"), (b"y,y,client\n1,2,3\n", "more than one column called 'y'"),
    (b"v,y,client\n1,2\n", "d.csv"), (b"\xff\xfe\x00", "d.csv"), (b"v,y,client\n\xff,1,2\n", "is not UTF-8 text"),
])
def test_damaged_csv_files_are_refused(tmp_path, content, text):
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises((ValueError, TypeError), match=text):
        Population.from_csv(tmp_path / "d.csv", y="y", client="client")


# sparse rows

SPARSE = scipy.sparse.random(40, 12, density=0.2, random_state=np.random.default_rng(0), format="csr", dtype=np.float32)
CLIENT = np.arange(40) % 8


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix", "coo_matrix", "csr_array"])
def test_sparse_rows_become_arrays(kind):
    rows = getattr(scipy.sparse, kind)(SPARSE)
    people = Population.from_arrays(rows, np.zeros(40, int), CLIENT)
    assert np.array_equal(people.inputs.numpy(), SPARSE.toarray()[np.argsort(CLIENT, kind="stable")])
    pairs = Population.from_clients({"a": (rows.tocsr()[:4], [0] * 4), "b": (rows.tocsr()[4:5], [1])})
    assert np.array_equal(pairs.client("b")[0].numpy(), SPARSE.toarray()[4:5])


def test_a_model_on_sparse_rows_is_trained_as_on_dense_ones():
    y = (SPARSE.toarray().sum(1) > 1).astype(int) + (np.arange(40) % 3 == 0)
    dense = Population.from_arrays(SPARSE.toarray(), y, CLIENT)
    sparse = Population.from_arrays(sparse_rows(SPARSE), y, CLIENT)
    method = fedavg(8, learning_rate=0.5, batch_size=3)
    one = train(method, Task(SoftmaxRegression(12, 3)), dense, rounds=4)
    other = train(method, Task(SparseLinear(12, 3), loss=fedtail.losses.cross_entropy), sparse, rounds=4)
    assert torch.allclose(one.module.linear.weight, other.module.linear.weight, atol=1e-5)
    assert float(one.module.linear.weight.detach().abs().max()) > 0.01


def test_sparse_rows_that_no_memory_holds_are_refused():
    with pytest.raises(ValueError, match=re.escape("x is sparse, 100000 x 1000000 with")) as reason:
        Population.from_arrays(scipy.sparse.csr_array((100_000, 1_000_000), dtype=np.float32), np.zeros(100_000, int), np.zeros(100_000))
    assert "would take 373 GiB as an array. Write x=fedtail.data.sparse_rows(x)" in str(reason.value)
    with pytest.raises(TypeError, match="a scipy sparse matrix is needed, got ndarray"):
        sparse_rows(np.eye(2))


# names

PEOPLE = Population.from_arrays(X, Y, ["c", "a", "a", "b", "c", "c", "a", "b", "b", "c"])


def test_clients_are_found_by_name():
    assert examples(PEOPLE, "b") == examples(PEOPLE, 1)
    chosen = PEOPLE.select(["c", "a"])
    assert chosen.names is not None
    assert chosen.names.tolist() == ["c", "a"]
    assert examples(chosen, "a") == examples(PEOPLE, "a")
    assert len(PEOPLE.select("b")) == len(PEOPLE.select(np.array(["b"], dtype=object))) == 1
    assert (PEOPLE.position("c"), PEOPLE.name_of(2)) == (2, "c")
    numbered = Population.from_arrays(X, Y, np.arange(10) // 5 + 7)
    assert examples(numbered, "8") == of([5, 6, 7, 8, 9])
    assert numbered.name_of(0) == "7"
    assert Population.from_clients([(X, Y)]).name_of(0) == "0"


@pytest.mark.parametrize(("make", "text"), [
    (lambda: PEOPLE.client("d"), "there is no client called 'd' among 3. Did you mean "),
    (lambda: PEOPLE.select(["a", "d"]), "there is no client called 'd' among 3."),
    (lambda: Population.from_clients([(X, Y)]).client("a"), "these clients have no names, so there is none called 'a'. Use its position, from 0 to 0"),
    (lambda: Population.from_clients({"north": (X, Y), "south": (X[:2], Y[:1])}), "client 'south': x has 2 examples, y has 1."),
    (lambda: Population.from_clients({"north": ([math.nan], [0])}), "(first: example 0 in client order, client 'north')"),
    (lambda: PEOPLE.split(0.8), "split needs a fraction for each part, got 0.8. Write train, test = population.split((0.8, 0.2))."),
    (lambda: PEOPLE.split_examples(0.7, within=0.3), "split_examples was given fraction=0.7 and within=0.3. Write within alone"),
])
def test_clients_and_splits_are_refused_by_name(make, text):
    with pytest.raises((ValueError, TypeError)) as reason:
        make()
    assert text in str(reason.value)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=5), st.sampled_from([0.1, 0.2, 0.25, 0.5, 0.7, 0.9]), st.integers(0, 9))
def test_within_is_the_held_out_fraction_and_the_old_form_gives_the_same(sizes, within, seed):
    people = Population.from_arrays(np.arange(float(sum(sizes))), np.zeros(sum(sizes), int), np.repeat(range(len(sizes)), sizes))
    own, held = people.split_examples(within=within, seed=seed)
    assert ((held.size - people.size * within).abs() <= 0.5 + 1e-6).logical_or(held.size == 1).logical_or(own.size == 1).all()
    with pytest.warns(DeprecationWarning, match=re.escape("is now split_examples(within=")):
        before, after = people.split_examples(1 - within, seed)
    assert torch.equal(before.inputs, own.inputs)
    assert torch.equal(after.inputs, held.inputs)


# sets of examples

def test_a_set_holds_a_clients_examples_in_order_and_padding():
    sets = as_sets(PEOPLE)
    assert sets.size.tolist() == [1, 1, 1]
    assert sets.mass.tolist() == PEOPLE.mass.tolist()
    for client in "abc":
        inputs, targets = sets.client(client)
        x, y = PEOPLE.client(client)
        count = int(inputs["lengths"])
        assert torch.equal(inputs["sequence"][0, :count], x)
        assert torch.equal(targets[0, :count], y)
        assert inputs["sequence"][0, count:].eq(0).all()
        assert targets[0, count:].eq(-100).all()


@given(st.lists(st.integers(1, 23), min_size=1, max_size=5), st.integers(1, 12))
def test_sets_of_a_size_deal_out_every_example_once(sizes, size):
    count = sum(sizes)
    people = Population.from_arrays({"v": np.arange(float(count))}, np.arange(count) + 0.5, np.repeat(range(len(sizes)), sizes))
    sets = as_sets(people.select(range(len(sizes) - 1, -1, -1)), size)
    assert sets.size.tolist() == [math.ceil(n / size) for n in sizes[::-1]]
    lengths = sets.inputs["lengths"]
    assert lengths.max() <= size
    for k, n in enumerate(sizes[::-1]):
        inputs, targets = sets.client(k)
        assert inputs["lengths"].sum() == n
        assert inputs["lengths"].max() - inputs["lengths"].min() <= 1
        kept = ~targets.isnan()
        assert torch.equal(targets[kept], inputs["v"][kept] + 0.5)
        assert targets[kept].tolist() == people.client(len(sizes) - 1 - k)[1].tolist()


def test_sets_of_sequences_or_of_nothing_are_refused():
    ragged = Population.from_arrays([[1, 2], [3]], [0, 1], [0, 1])
    with pytest.raises(ValueError, match="these inputs are padded sequences already"):
        as_sets(ragged)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        as_sets(PEOPLE, 0)


@given(st.integers(1, 7), st.integers(0, 100))
def test_cox_loss_is_the_partial_likelihood_by_brute_force(patients, seed):
    random = np.random.default_rng(seed)
    time, event = random.integers(1, 5, patients).astype(float), random.integers(0, 2, patients)
    score = random.normal(size=patients)
    terms = [score[i] - np.log(sum(np.exp(score[j]) for j in range(patients) if time[j] >= time[i])) for i in range(patients) if event[i]]
    padded = torch.full((1, patients + 2, 2), math.nan, dtype=torch.float64)
    padded[0, :patients] = torch.tensor(np.stack([time, event], 1))
    outputs = torch.cat([torch.tensor(score), torch.tensor([3.0, -5.0])])[None].requires_grad_()
    loss = cox_partial_likelihood(outputs, padded)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(-np.mean(terms) if terms else 0.0, abs=1e-12)
    [gradient] = torch.autograd.grad(loss.sum(), outputs)
    assert gradient.isfinite().all()
    assert gradient[0, patients:].eq(0).all()                                    # padding is in nobody's risk set


class Hazard(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1, bias=False)

    def forward(self, sequence, lengths):
        return self.linear(sequence).squeeze(-1)


def test_a_stratified_cox_model_is_trained_over_clients_as_sets():
    """The hazards come out in proportion to the truth: time is exponential with rate exp(x @ w), its scale another at each site."""
    random = np.random.default_rng(0)
    truth, client = np.array([1.0, -0.5]), np.repeat(range(20), 30)
    x = random.normal(size=(600, 2)).astype("float32")
    time = random.exponential(np.exp(-(x @ truth)) * np.exp(random.normal(size=20))[client])
    y = np.stack([time, random.random(600) < 0.8], 1)
    patients = Population.from_arrays(x, y, client)
    task = Task(Hazard(), loss=cox_partial_likelihood, error=cox_partial_likelihood)
    trained = train(fedavg(20, learning_rate=0.5, batch_size=None), task, as_sets(patients), rounds=60)
    # the partial likelihood of 480 events has standard errors of about 1 / sqrt(480) = 0.05: four of them
    assert trained.module.linear.weight.detach().numpy()[0] == pytest.approx(truth, abs=0.2)
