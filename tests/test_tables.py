"""Arrays by name out of files: groups, masses and ids for each example; data opened by their path alone."""

import json
import os
import re
from decimal import Decimal

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from fedtail.data import Population, dirichlet, pad_sequences
from fedtail.data.opening import open_any_data
from fedtail.data.tables import Sequences, list_arrays, read_arrays, values_per_client
from fedtail.experiment.starter import starter_text


@pytest.fixture(params=["npz", "parquet"])
def write(request, tmp_path):
    """Write arrays to a file of either kind; gives its path."""
    def written(**arrays):
        path = tmp_path / f"data.{request.param}"
        if request.param == "npz":
            np.savez(path, **arrays)
        else:
            parquet.write_table(pa.table({name: list(values) for name, values in arrays.items()}), path)
        return path
    return written


def read(path, x="x", y="y", client="client", **more) -> Population:
    reader = Population.from_npz if path.suffix == ".npz" else Population.from_parquet
    return reader(path, x, y, client, **more)


# groups and masses

def test_groups_are_numbered_in_sorted_order_and_masses_kept(write):
    path = write(x=np.arange(5.0), y=np.arange(5), client=["c", "a", "b", "a", "c"],
                 site=["south", "north", "east", "north", "south"], weight=[2.0, 0.5, 3.0, 0.5, 2.0])
    p = read(path, group="site", mass="weight")
    assert p.names is not None
    assert p.group is not None
    assert (p.names.tolist(), p.group.tolist(), p.mass.tolist()) == (["a", "b", "c"], [1, 0, 2], [0.5, 3.0, 2.0])
    assert read(path).group is None
    assert read(path).mass.tolist() == [2.0, 1.0, 2.0]


def test_numbers_and_one_column_in_two_roles_may_be_groups(write):
    path = write(x=np.arange(4.0), y=np.arange(4), client=[7, 3, 7, 3], site=[-5, 9, -5, 9])
    p = read(path, group="site")
    assert p.group is not None
    assert p.group.tolist() == [1, 0]                                     # of clients 3 and 7
    own = read(path, group="client", mass="client")
    assert own.group is not None
    assert (own.group.tolist(), own.mass.tolist()) == ([0, 1], [3.0, 7.0])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=30))
def test_one_value_for_each_client_or_the_first_client_that_has_two(pairs):
    client, values = (np.array(column) for column in zip(*pairs, strict=True))
    seen = {name: set(values[client == name].tolist()) for name in sorted(set(client.tolist()))}
    mixed = [name for name, found in seen.items() if len(found) > 1]
    if mixed:
        with pytest.raises(ValueError, match=f"but client {mixed[0]} has") as error:
            values_per_client(values, client, "group 'site'")
        two = re.findall(r"has (\d) and (\d)", str(error.value))[0]
        assert set(map(int, two)) <= seen[mixed[0]]
        assert two[0] != two[1]
    else:
        assert values_per_client(values, client, "group 'site'").tolist() == [min(found) for found in seen.values()]


@pytest.mark.parametrize(("more", "text"), [
    ({"group": "site"}, "group 'site' must be one value for each client, but client 'a' has 'n' and 's'. Make it one"),
    ({"mass": "weight"}, "mass 'weight' must be one value for each client, but client 'b' has 1.0 and 2.0."),
    ({"mass": "debt"}, "mass 'debt' must hold one positive number for each example, got float64 of shape (4,), not all positive"),
    ({"mass": "site"}, "mass 'site' must hold one positive number for each example"),
    ({"group": "sites"}, "called 'sites'. Did you mean 'site'? It holds: x, y, client, site, weight, debt, gap."),
    ({"group": "gap"}, "group 'gap' is NaN for 1 of 4 examples"),
])
def test_groups_and_masses_that_do_not_fit_are_refused(write, more, text):
    path = write(x=np.arange(4.0), y=np.arange(4), client=["b", "a", "a", "b"], site=["s", "n", "s", "n"],
                 weight=[1.0, 1.0, 1.0, 2.0], debt=[1.0, -1.0, 1.0, 1.0], gap=[0.0, np.nan, 1.0, 1.0])
    with pytest.raises(ValueError, match=re.escape(text)):
        read(path, **more)


def test_a_group_of_another_length_is_refused(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.arange(3.0), y=[0, 1, 2], client=[0, 1, 1], site=[1, 2])
    with pytest.raises(ValueError, match="group 'site' has 2 values, but client names 3"):
        Population.from_npz(tmp_path / "d.npz", group="site")


# ids from a partitioner, raw arrays

def test_ids_of_a_partitioner_stand_in_for_a_column(write):
    path = write(x=np.arange(60.0), y=np.arange(60) % 3)
    ids = dirichlet(read_arrays(path, ["y"])["y"], clients=4, concentration=1.0, seed=1)
    p = read(path, client=ids)
    assert len(p) == 4
    assert isinstance(p.inputs, torch.Tensor)
    for k in range(4):
        assert p.client(k)[0].tolist() == np.arange(60.0)[ids == k].tolist()
    assert (len(read(path, client=None)), read(path, client=None).num_examples) == (1, 60)
    with pytest.raises(ValueError, match="x has 60 examples, but client names 59"):
        read(path, client=ids[:59])


def test_raw_arrays_come_by_name_in_the_order_asked(write):
    path = write(x=np.eye(3), label=[0, 1, 2], site=["b", "a", "b"])
    arrays = read_arrays(path, ["site", "x"])
    assert list(arrays) == ["site", "x"]
    assert (arrays["site"].tolist(), arrays["x"].tolist()) == (["b", "a", "b"], np.eye(3).tolist())
    with pytest.raises(ValueError, match=re.escape("called 'lable'. Did you mean 'label'? It holds: x, label, site.")):
        read_arrays(path, ["lable"])
    assert list(list_arrays(path)) == ["x", "label", "site"]
    assert list_arrays(path)["label"] in ("(3,) int64",)


def test_raw_arrays_refuse_other_files_by_name(tmp_path):
    for name, ending in (("data.xlsx", "'.xlsx'"), ("data", "'nothing'")):
        text = f"{tmp_path / name} ends in {ending}; files that end in .npz, .parquet or .csv are read. Write one with"
        with pytest.raises(ValueError, match=re.escape(text)):
            read_arrays(tmp_path / name, ["x"])
    for name in ("absent.npz", "absent.parquet"):
        with pytest.raises(FileNotFoundError):
            read_arrays(tmp_path / name, ["x"])


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=12), st.sampled_from([0, -100]))
def test_sequences_are_padded_as_by_pad_sequences(rows, fill):
    flat = np.array([entry for row in rows for entry in row], dtype=np.int64)
    sequences = Sequences(flat, np.array([len(row) for row in rows]))
    expected = pad_sequences([np.array(row, dtype=np.int64) for row in rows], fill)
    assert sequences.pad(fill).tolist() == expected["sequence"].tolist()
    assert [row.tolist() for row in sequences.as_list()] == rows


def test_ragged_columns_of_bytes_are_padded_with_what_losses_ignore(tmp_path):
    tags = pa.array([[1, 2], [250]], pa.list_(pa.uint8()))
    parquet.write_table(pa.table({"x": tags, "y": tags, "client": [1, 0]}), tmp_path / "d.parquet")
    p = Population.from_parquet(tmp_path / "d.parquet", "x", "y", "client")
    assert p.targets.tolist() == [[250, -100], [1, 2]]
    assert isinstance(p.inputs, dict)
    assert (p.inputs["sequence"].tolist(), p.inputs["lengths"].tolist()) == ([[250, 0], [1, 2]], [1, 2])
    assert [row.tolist() for row in read_arrays(tmp_path / "d.parquet", ["x"])["x"]] == [[1, 2], [250]]
    assert len(Population.from_parquet(tmp_path / "d.parquet", "x", "y", None)) == 1


def test_lists_of_ragged_lists_are_refused(tmp_path):
    parquet.write_table(pa.table({"x": [[[1], [2, 3]], [[4]]], "y": [0, 1], "c": [0, 1]}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=re.escape("column 'x' holds lists of lists of different lengths. Pad them to one shape")):
        Population.from_parquet(tmp_path / "d.parquet", "x", "y", "c")


# opened by path alone

def test_every_kind_of_path_opens_to_the_same_population(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    x, y, client = np.arange(6.0, dtype=np.float32)[:, None], [0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 2, 2]
    np.savez(tmp_path / "d.npz", x=x, y=y, client=client)
    table = pa.table({"x": list(x), "y": y, "client": client})
    parquet.write_table(table, tmp_path / "d.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "hub")
    datasets.DatasetDict(train=datasets.Dataset(table), test=datasets.Dataset(table.slice(0, 2))).save_to_disk(tmp_path / "two")
    Population.from_arrays(x, y, client).save(tmp_path / "saved")
    (tmp_path / "leaf").mkdir()
    users = {str(k): {"x": x[2 * k:2 * k + 2].tolist(), "y": y[2 * k:2 * k + 2]} for k in range(3)}
    (tmp_path / "leaf" / "a.json").write_text(json.dumps(
        {"users": list(users), "num_samples": [2, 2, 2], "user_data": users}))
    for place, more in (("d.npz", {}), ("d.parquet", {}), ("hub", {}), ("two", {"split": "train"}), ("saved", {}), ("leaf", {})):
        p = open_any_data(tmp_path / place, **more)
        assert (len(p), p.targets.tolist()) == (3, y)
        assert isinstance(p.inputs, torch.Tensor)
        assert p.inputs.flatten().tolist() == list(range(6))
    assert len(open_any_data(tmp_path / "two", split="test")) == 1
    with pytest.raises(ValueError, match=re.escape("there are 2 splits: train, test. Choose one: split='train'.")):
        open_any_data(tmp_path / "two")
    with pytest.raises(ValueError, match=re.escape("saved is a saved population, whose x, y and clients are known. Leave out y, group.")):
        open_any_data(tmp_path / "saved", y="y", group="g")
    with pytest.raises(ValueError, match=re.escape("leaf is a folder of LEAF files, whose x, y and clients are known. Leave out client.")):
        open_any_data(tmp_path / "leaf", client="user")
    with pytest.raises(FileNotFoundError, match=re.escape(f"LEAF's json files. Did you mean {tmp_path / 'hub'}?")):
        open_any_data(tmp_path)


def test_names_are_taken_as_given_and_else_guessed(write):
    path = write(scan=np.eye(4), y=[0, 1, 2, 3], client=[0, 0, 1, 1], writer=[0, 1, 2, 3], site=[0, 1, 2, 2])
    assert len(open_any_data(path, x="scan")) == 2
    p = open_any_data(str(path), x="scan", client="writer", group="site")
    assert p.group is not None
    assert (len(p), p.group.tolist()) == (4, [0, 1, 2, 2])
    with pytest.raises(ValueError, match=r"data\.\w+ has no array called x\. Say which of its arrays to take as x\. It holds: "
                       r"scan \(4,.*; y \(4,\) int64; client \(4,\) int64; writer"):
        open_any_data(path)
    with pytest.raises(ValueError, match=r"client \(?.*writer.*On the command line write --x NAME\.$"):
        open_any_data(path)


def test_a_table_needs_names_of_targets_and_clients_only(tmp_path):
    (tmp_path / "t.csv").write_text("age,sick,site\n50,1,a\n40,0,b\n")
    with pytest.raises(ValueError, match=r"t\.csv has no array called y or client\..*On the command line write --y NAME --client NAME\.$"):
        open_any_data(tmp_path / "t.csv")
    assert open_any_data(tmp_path / "t.csv", y="sick", client="site").inputs.tolist() == [50.0, 40.0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_with_a_column_of_text_says_which_and_what_to_write(tmp_path, kind):
    frame = pandas.DataFrame({"age": [50, 40], "sex": ["f", "m"], "dose": [0.5, 1.0], "sick": [1, 0], "site": ["a", "b"]})
    place = tmp_path / f"t.{kind}"
    frame.to_csv(place, index=False) if kind == "csv" else frame.to_parquet(place)
    with pytest.raises(ValueError, match=r"column 'sex' holds text, and x takes numbers\. Encode .*leave it out: on the command line --x age --x dose\.$"):
        open_any_data(place, y="sick", client="site")
    assert open_any_data(place, x=["age", "dose"], y="sick", client="site").inputs.shape == (2, 2)


DAY = pandas.Timestamp("2024-01-01")


@pytest.mark.parametrize(("kind", "column", "values", "text"), [
    ("csv", "when", [DAY, DAY], "column 'when' holds dates or times, and x takes numbers. Make numbers of times first, such as days since"),
    ("parquet", "when", [DAY, DAY], "column 'when' holds dates or times, and x takes numbers. Make numbers of times first, such as days since"),
    ("parquet", "scan", [[1.0, 2.0]] * 2, "Column 'scan' holds lists, and x takes numbers. Make columns of single numbers of lists first, or take one as the only input (--x scan), or leave it out:"),
    ("parquet", "sex", pandas.Categorical(["f", "m"]), "column 'sex' holds text, and x takes numbers. Encode text first (pandas.get_dummies makes"),
    ("parquet", "price", [Decimal("1.5")] * 2, "column 'price' holds decimal128(2, 1), and x takes numbers. Make numbers of decimal128(2, 1) first,"),
])
def test_a_table_with_a_column_of_no_numbers_says_which_and_what_to_write(tmp_path, kind, column, values, text):
    frame = pandas.DataFrame({"age": [50, 40], column: values, "dose": [0.5, 1.0], "y": [1, 0], "client": ["a", "b"]})
    place = tmp_path / f"t.{kind}"
    frame.to_csv(place, index=False) if kind == "csv" else frame.to_parquet(place)
    with pytest.raises(ValueError) as told:
        open_any_data(place)
    said = str(told.value)
    if column == "scan":                                                # which may well be the input
        assert "t.parquet has no array called x. Say which of its arrays to take as x. It holds: age (2,) int64; scan " in said
        assert said.endswith(f"{text} --x age --x dose. On the command line write --x NAME.")
    else:
        assert said.startswith(text)
        assert said.endswith("or leave it out: on the command line --x age --x dose.")
    with pytest.raises(ValueError, match=re.escape(text)):
        starter_text(tmp_path / "e.toml", place)


def test_columns_without_numbers_are_all_named(tmp_path):
    pandas.DataFrame({"age": [50, 40], "sex": ["f", "m"], "town": ["x", "y"], "when": [DAY, DAY], "y": [1, 0], "client": ["a", "b"]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"^columns 'sex', 'town' hold text, column 'when' holds dates or times, and x takes.*or leave them out: .* --x age\.$"):
        open_any_data(tmp_path / "t.parquet")


def test_paths_that_hold_no_data_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        open_any_data(tmp_path / "absent.npz")
    with pytest.raises(FileNotFoundError, match="is neither a saved population, nor a saved data set, nor a folder of LEAF's"):
        open_any_data(tmp_path)
    (tmp_path / "d.xlsx").write_text("x,y\n")
    with pytest.raises(ValueError, match=re.escape("ends in '.xlsx'; files that end in .npz, .parquet or .csv are read")):
        open_any_data(tmp_path / "d.xlsx")
    (tmp_path / "d.csv").write_text("x,y\n")
    with pytest.raises(ValueError, match=re.escape("d.csv has no rows below its header")):
        open_any_data(tmp_path / "d.csv")
    (tmp_path / "d.npz").write_text("not a zip")
    with pytest.raises(ValueError, match=re.escape("is not an .npz file")):
        open_any_data(tmp_path / "d.npz")


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: str):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (self.place,)


def test_an_npz_file_runs_nothing(tmp_path):
    """Arrays of objects are pickles, and a pickle runs what it likes."""
    good = {"x": np.zeros((3, 2)), "y": np.zeros(3, dtype=int), "client": np.array([0, 1, 1])}
    for name in good:
        np.savez(tmp_path / "d.npz", **{**good, name: np.array([Runs(str(tmp_path / "ran")), 1, 2], dtype=object)})
        with pytest.raises(ValueError, match=f"array '{name}' holds Python objects, which need pickle and are not read"):
            Population.from_npz(tmp_path / "d.npz")
        assert not (tmp_path / "ran").exists()
    with np.load(tmp_path / "d.npz", allow_pickle=True) as file:
        _ = file["client"]
    assert (tmp_path / "ran").exists()                                              # as it would have
