"""Hugging Face data sets and Flower's partitions of them, offline, as populations."""

import re
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch

datasets = pytest.importorskip("datasets")
flower = pytest.importorskip("flwr_datasets")

from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, Sequence, Value  # noqa: E402
from flwr_datasets.partitioner import (  # noqa: E402
    DirichletPartitioner,
    IidPartitioner,
    NaturalIdPartitioner,
    PathologicalPartitioner,
)
from PIL import Image as Picture  # noqa: E402

from fedtail.data import Population  # noqa: E402
from fedtail.data.hub import open_dataset, partition_ids, read_columns, read_dataset, read_federated  # noqa: E402

datasets.disable_progress_bars()


def people(count: int = 60) -> Dataset:
    """Examples that know their place: `x` counts up, and so does `place`."""
    random = np.random.default_rng(0)
    return Dataset.from_dict({
        "x": np.arange(count, dtype=np.float32), "z": np.arange(count) * 10, "label": random.integers(0, 3, count),
        "user": [f"user {k}" for k in random.integers(0, 7, count)], "place": np.arange(count)})


def held(population: Population) -> list[list[float]]:
    return [sorted(population.client(k)[0].tolist()) for k in range(len(population))]


# data sets

def test_a_column_of_clients_makes_the_population_of_the_arrays():
    data = people()
    p = Population.from_dataset(data, x="x", y="label", client="user")
    expected = Population.from_arrays(np.arange(60, dtype=np.float32), np.array(data["label"]), np.array(data["user"]))
    assert p.names is not None
    assert expected.names is not None
    assert p.names.tolist() == expected.names.tolist()
    for field in ("inputs", "targets", "size", "mass"):
        assert torch.equal(getattr(p, field), getattr(expected, field))
        assert getattr(p, field).dtype == getattr(expected, field).dtype


def test_selected_and_sorted_examples_are_read_in_their_order():
    data = people().select([5, 3, 9])
    assert read_dataset(data, "x", "label", None).client(0)[0].tolist() == [5.0, 3.0, 9.0]
    assert read_columns(data, ["user", "place"])["place"].tolist() == [5, 3, 9]
    assert read_columns(data, ["user"])["user"].tolist() == list(data["user"])


def test_several_columns_of_numbers_are_features_and_others_a_dict():
    data = people(4).add_column("scan", [[1.0, 2.0]] * 4)
    p = read_dataset(data, ["x", "z"], "label", [0, 0, 1, 1])
    assert isinstance(p.inputs, torch.Tensor)
    assert p.inputs.dtype == torch.float32
    assert p.inputs.tolist() == [[0, 0], [1, 10], [2, 20], [3, 30]]
    mixed = read_dataset(data, ["x", "scan"], "label", [0, 0, 1, 1])
    assert isinstance(mixed.inputs, dict)
    assert {name: tuple(part.shape) for name, part in mixed.inputs.items()} == {"x": (4,), "scan": (4, 2)}


def test_groups_masses_and_ids_are_as_in_files():
    data = Dataset.from_dict({"x": [0.0, 1, 2], "y": [0, 1, 0], "site": ["s", "n", "s"], "weight": [2.0, 5.0, 2.0]})
    p = Population.from_dataset(data, "x", "y", np.array(["b", "a", "b"]), group="site", mass="weight")
    assert p.group is not None
    assert (p.group.tolist(), p.mass.tolist(), held(p)) == ([0, 1], [5.0, 2.0], [[1.0], [0.0, 2.0]])
    with pytest.raises(ValueError, match="group 'site' must be one value for each client, but client 0 has 's' and 'n'"):
        read_dataset(data, "x", "y", [0, 0, 0], group="site")


def test_classes_lists_sequences_and_matrices():
    features = Features({"kind": ClassLabel(names=["cat", "dog"]), "pair": Sequence(Value("float32"), length=2),
                         "words": Sequence(Value("int32")), "grid": Array2D((2, 3), "float32"), "user": Value("string")})
    grid = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    data = Dataset.from_dict({"kind": ["dog", "cat", "dog"], "pair": [[1, 2], [3, 4], [5, 6]], "words": [[1, 2], [], [3]],
                              "grid": grid, "user": ["b", "a", "b"]}, features=features)
    assert read_dataset(data, "pair", "kind", "user").targets.tolist() == [0, 1, 1]
    assert read_dataset(data, "pair", "kind", "user").inputs.tolist() == [[3, 4], [1, 2], [5, 6]]        # type: ignore[union-attr]
    assert read_dataset(data.select([2, 0]), "grid", "kind", None).inputs.tolist() == grid[[2, 0]].tolist()   # type: ignore[union-attr]
    for x in ("words", ["words"]):
        words = read_dataset(data, x, "words", "user")
        assert isinstance(words.inputs, dict)
        assert words.inputs["sequence"].tolist() == [[0, 0], [1, 2], [3, 0]]
        assert words.inputs["lengths"].tolist() == [0, 2, 1]
        assert words.targets.tolist() == [[-100, -100], [1, 2], [3, -100]]
    assert len(read_dataset(data, "pair", "kind", "kind")) == 2                # clients by class


def calls_to_read(count: int) -> int:
    words = pa.ListArray.from_arrays(np.cumsum([0, *([1, 2] * (count // 2))]), np.arange(3 * count // 2))
    data = Dataset(pa.table({"x": np.zeros(count, np.float32), "y": np.zeros(count, np.int64), "words": words,
                             "client": np.arange(count) % 100}))
    calls = []
    sys.setprofile(lambda *_: calls.append(1))
    try:
        populations = [read_dataset(part, x, "y", "client") for x in ("x", "words") for part in (data, data.shuffle(seed=0))]
    finally:
        sys.setprofile(None)
    assert all(population.num_examples == count for population in populations)
    return len(calls)


def test_numbers_cost_no_call_for_each_example():
    calls_to_read(1000)                                                        # what is imported on the way is imported now
    assert calls_to_read(20_000) - calls_to_read(1000) < 1000


# images

def pictures(*images: Picture.Image, **more) -> Dataset:
    return Dataset.from_dict({"image": list(images), "y": [0] * len(images)}, features=Features({"image": Image(**more), "y": Value("int64")}))


def test_images_are_floats_in_the_unit_interval_channels_first():
    random = np.random.default_rng(0)
    grey = [random.integers(0, 256, (4, 5), np.uint8) for _ in range(3)]
    p = read_dataset(pictures(*map(Picture.fromarray, grey)), "image", "y", [0, 0, 1])
    assert isinstance(p.inputs, torch.Tensor)
    assert (p.inputs.dtype, tuple(p.inputs.shape)) == (torch.float32, (3, 4, 5))
    assert np.allclose(p.inputs.numpy(), np.stack(grey) / 255, rtol=0, atol=1e-7)
    colour = random.integers(0, 256, (4, 5, 3), np.uint8)
    for more in ({}, {"decode": False}):
        inputs = read_dataset(pictures(Picture.fromarray(colour), **more), "image", "y", None).inputs
        assert isinstance(inputs, torch.Tensor)
        assert inputs.shape == (1, 3, 4, 5)
        assert np.allclose(inputs[0, 2].numpy(), colour[:, :, 2] / 255, rtol=0, atol=1e-7)


def test_deep_black_and_white_and_palette_images_are_scaled_by_their_kind():
    deep = Picture.fromarray(np.array([[0, 65535]], np.uint16))
    bits = Picture.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    palette = Picture.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)).convert("P", palette=Picture.Palette.ADAPTIVE)
    for image, expected in ((deep, [[0.0, 1.0]]), (bits, [[0.0, 1.0]]), (palette, [[[1, 0]], [[0, 0]], [[0, 1]]])):
        assert read_dataset(pictures(image), "image", "y", None).inputs[0].tolist() == expected      # type: ignore[index]


def test_images_of_two_shapes_or_unknown_scale_or_missing_are_refused():
    small, wide = (Picture.fromarray(np.zeros(shape, np.uint8)) for shape in ((2, 2), (2, 3)))
    text = "image 1 of column 'image' has shape (2, 3), image 0 has (2, 2). Bring them to one size and mode first"
    with pytest.raises(ValueError, match=re.escape(text)):
        read_dataset(pictures(small, wide), "image", "y", None)
    with pytest.raises(TypeError, match=re.escape("has images of mode F (float32), whose largest value is unknown. Convert them first")):
        read_dataset(pictures(Picture.fromarray(np.zeros((2, 2), np.float32))), "image", "y", None)
    with pytest.raises(ValueError, match="column 'image' lacks 1 of 2 images"):
        read_dataset(pictures(small, None), "image", "y", None)                # type: ignore[arg-type]


# where data sets come from

def test_folders_and_splits(tmp_path):
    data = people(10)
    data.save_to_disk(tmp_path / "one")
    both = DatasetDict(train=data, test=data.select(range(4)))
    both.save_to_disk(tmp_path / "both")
    for source, split, count in ((tmp_path / "one", None, 10), (str(tmp_path / "one"), None, 10), (both, "test", 4),
                                 (tmp_path / "both", "train", 10), (DatasetDict(all=data), None, 10)):
        assert read_dataset(source, "x", "label", "user", split=split).num_examples == count
    with pytest.raises(ValueError, match=re.escape("there are 2 splits: train, test. Choose one: split='train'.")):
        open_dataset(both)
    with pytest.raises(ValueError, match=re.escape("there is no split called 'tests'. Did you mean 'test'? It holds: train, test.")):
        open_dataset(both, "tests")
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "other", tmp_path / "absent", str(tmp_path / "absent"), "./absent"):
        with pytest.raises(FileNotFoundError, match=r"is not a folder written by save_to_disk. Load it yourself, datasets.load_"):
            open_dataset(path)


def test_a_split_that_the_data_are_not_is_refused():
    data = Dataset.from_dict({"x": [1.0]}, split=datasets.Split.TRAIN)
    assert open_dataset(data, "train") is data
    with pytest.raises(ValueError, match=re.escape("the data set is the split 'train', not 'test'. Leave split out")):
        open_dataset(data, "test")


@pytest.mark.parametrize("reason", [ConnectionError("Couldn't reach the Hub"), datasets.exceptions.DatasetNotFoundError("Not there")])
def test_without_the_hub_the_folder_is_named(monkeypatch, reason):
    asked = []
    def unreachable(*arguments, **more):
        asked.append((arguments, more))
        raise reason
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    text = (f"there is no folder 'ylecun/mnist' here, and the Hugging Face hub gave no data set of that name: {reason}. Where there "
            "is a network, write datasets.load_dataset('ylecun/mnist').save_to_disk(folder); then pass that folder.")
    with pytest.raises((ConnectionError, FileNotFoundError), match=re.escape(text)):
        read_dataset("ylecun/mnist", "image", "label", "user", split="train", subset="small")
    assert asked == [(("ylecun/mnist", "small"), {"split": "train"})]


def test_a_name_on_the_hub_is_loaded(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: DatasetDict(train=people(10)) if split is None else people(5))
    assert read_dataset("mnist", "x", "label", "user").num_examples == 10
    assert read_dataset("mnist", "x", "label", "user", split="train").num_examples == 5


@pytest.mark.parametrize(("x", "y", "client", "text"), [
    ("user", "label", "user", "column 'user' holds text, numbers are needed. Tokenise first: dataset.map("),
    ("x", "user", "user", "for labels, dataset.class_encode_column('user')"),
    ("tags", "label", "user", "column 'tags' holds text, numbers are needed"),
    ("about", "label", "user", "column 'about' holds dict; numbers, classes, images, or lists of numbers are needed"),
    ("xs", "label", "user", "there is no column in the data set called 'xs'. Did you mean 'x'? It holds: x, "),
    ("x", "label", "users", "called 'users'. Did you mean 'user'?"),
    ("gap", "label", "user", "column 'gap' is empty (null) in 1 of 3 rows"),
    ("x", "label", [0, 1], "x has 3 examples, but client names 2"),
    ("x", "label", "words", "client 'words' holds lists; one label for each example is needed"),
    (["x", "words"], "label", "user", "column 'words' holds sequences of different lengths, which must be the only x"),
])
def test_columns_that_cannot_be_read_are_refused(x, y, client, text):
    data = Dataset.from_dict({"x": [0.0, 1.0, 2.0], "label": [0, 1, 0], "user": ["a", "b", "a"], "gap": [1, None, 2],
                              "about": [{"age": 1}] * 3, "words": [[1], [2, 3], []], "tags": [["u"], ["v", "w"], []]})
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        read_dataset(data, x, y, client)


def test_other_objects_and_empty_data_are_refused():
    with pytest.raises(TypeError, match=r"a datasets.Dataset is needed, got IterableDataset. .* must be downloaded first"):
        open_dataset(people(3).to_iterable_dataset())
    with pytest.raises(TypeError, match=r"a datasets.Dataset is needed, got list"):
        open_dataset([1, 2])
    with pytest.raises(ValueError, match="the data set has no examples"):
        read_dataset(people(3).select([]), "x", "label", "user")


# Flower's partitions

def natural(data):
    return [sorted(x for x, user in zip(data["x"], data["user"], strict=True) if user == name) for name in sorted(set(data["user"]))]


@pytest.mark.parametrize("make", [
    lambda: IidPartitioner(7), lambda: DirichletPartitioner(4, "label", alpha=0.5, min_partition_size=1, seed=1),
    lambda: NaturalIdPartitioner("user"), lambda: NaturalIdPartitioner("place")])
def test_every_partition_is_a_client(make):
    data, partitioner = people(), make()
    partitioner.dataset = data
    p = read_federated(partitioner, "x", "label")
    assert p.names is not None
    assert p.names.tolist() == list(range(partitioner.num_partitions))
    assert held(p) == [sorted(partitioner.load_partition(k)["x"]) for k in range(partitioner.num_partitions)]
    for k in range(len(p)):
        x, y = p.client(k)
        assert isinstance(x, torch.Tensor)
        assert y.tolist() == [data["label"][int(place)] for place in x]


def test_natural_ids_and_groups_are_read():
    data, partitioner = people(), NaturalIdPartitioner("user")
    partitioner.dataset = data
    p = read_federated(partitioner, "x", "label", group="user")
    assert held(p) == natural(data)
    assert p.group is not None
    assert p.group.tolist() == list(range(7))


def test_examples_in_no_partition_and_empty_partitions_are_left_out():
    data = people()
    partitioner = PathologicalPartitioner(2, "label", num_classes_per_partition=1)
    partitioner.dataset = data
    with pytest.warns(UserWarning, match="will NOT be used"):
        p = read_federated(partitioner, "x", "label")
    assert 0 < p.num_examples < 60
    few = DirichletPartitioner(20, "label", alpha=0.001, min_partition_size=0)
    few.dataset = data
    p = read_federated(few, "x", "label")
    sizes = [len(few.load_partition(k)) for k in range(20)]
    assert 0 in sizes
    assert p.names is not None
    assert (p.names.tolist(), p.size.tolist()) == ([k for k in range(20) if sizes[k]], [size for size in sizes if size])


def test_federated_data_sets_give_their_partitions(tmp_path, monkeypatch):
    monkeypatch.setattr(flower.federated_dataset, "event", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: DatasetDict(train=people(), test=people(6)))
    one = flower.FederatedDataset(dataset="mnist", partitioners={"train": 5})
    p = read_federated(one, "x", "label")
    assert held(p) == [sorted(one.load_partition(k)["x"]) for k in range(5)]
    ids = partition_ids(people(), "IidPartitioner", {"num_partitions": 5})
    assert held(Population.from_dataset(people(), "x", "label", ids)) == held(p)      # shuffled as Flower shuffles
    two = flower.FederatedDataset(dataset="mnist", partitioners={"train": 5, "test": DirichletPartitioner(2, "label", 1.0, min_partition_size=0)})
    assert len(read_federated(two, "x", "label", split="train")) == 5
    with pytest.raises(ValueError, match=re.escape("there are 2 splits: train, test. Choose one: split='train'.")):
        read_federated(two, "x", "label")


@pytest.mark.parametrize(("name", "settings"), [
    ("IidPartitioner", {"num_partitions": 7}), ("NaturalIdPartitioner", {"partition_by": "user"}),
    ("DirichletPartitioner", {"num_partitions": 4, "partition_by": "label", "alpha": 0.5, "min_partition_size": 1, "seed": 3}),
    ("ShardPartitioner", {"num_partitions": 3, "partition_by": "label", "num_shards_per_partition": 2}),
    ("LinearPartitioner", {"num_partitions": 4})])
@pytest.mark.parametrize("shuffle_seed", [None, 5])
def test_ids_are_those_of_the_partitions_by_place(name, settings, shuffle_seed):
    data = people()
    ids = partition_ids(data, name, settings, shuffle_seed)
    assert (ids.shape, ids.dtype.kind) == ((60,), "i")
    partitioner = getattr(flower.partitioner, name)(**settings)
    partitioner.dataset = data if shuffle_seed is None else data.shuffle(seed=shuffle_seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Specifying null_placement", FutureWarning)
        parts = [sorted(partitioner.load_partition(k)["place"]) for k in range(partitioner.num_partitions)]
    assert [np.flatnonzero(ids == k).tolist() for k in range(len(parts))] == parts
    assert (partition_ids(data, name, settings, shuffle_seed) == ids).all()


def test_ids_need_no_other_column_and_follow_a_selection():
    chosen = people().select([8, 2, 5, 30])
    ids = partition_ids(chosen, "NaturalIdPartitioner", {"partition_by": "user"})
    users = list(chosen["user"])
    assert ids.tolist() == [sorted(set(users)).index(user) for user in users]


@pytest.mark.parametrize(("name", "settings", "text"), [
    ("Dirichlet", {}, "there is no partitioner in flwr_datasets called 'Dirichlet'. Did you mean 'DirichletPartitioner'?"),
    ("IidPartitioner", {"partitions": 3}, "there is no setting of IidPartitioner called 'partitions'. Did you mean 'num_partitions'?"),
    ("DirichletPartitioner", {"alpha": 1.0}, "DirichletPartitioner lacks num_partitions, partition_by. Its settings: num_partitions, "),
    ("NaturalIdPartitioner", {"partition_by": "users"}, "there is no column in the data set called 'users'. Did you mean 'user'?"),
    ("VerticalEvenPartitioner", {"num_partitions": 1, "drop_columns": ["fedtail row"]}, "deals out columns, not examples"),
])
def test_partitioners_that_cannot_deal_are_refused(name, settings, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        partition_ids(people(), name, settings)


def test_examples_left_to_nobody_or_to_two_are_refused(monkeypatch):
    with pytest.warns(UserWarning, match="will NOT be used"), pytest.raises(ValueError, match=r"leaves \d+ of 60 examples to nobody"):
        partition_ids(people(), "PathologicalPartitioner", {"num_partitions": 2, "partition_by": "label", "num_classes_per_partition": 1})
    monkeypatch.setattr(IidPartitioner, "load_partition", lambda self, k: self.dataset)
    with pytest.raises(ValueError, match="IidPartitioner gives an example to more than one client"):
        partition_ids(people(), "IidPartitioner", {"num_partitions": 2})


def test_other_objects_are_not_federated():
    with pytest.raises(TypeError, match="a flwr_datasets FederatedDataset or a partitioner is needed, got Dataset"):
        read_federated(people(), "x", "label")
    with pytest.raises(ValueError, match=re.escape("the IidPartitioner has no data yet. Write partitioner.dataset = dataset first.")):
        read_federated(IidPartitioner(2), "x", "label")


# packages

@pytest.mark.parametrize(("package", "call"), [
    ("datasets", lambda: read_dataset("mnist", "x", "y", "client")),
    ("flwr_datasets", lambda: read_federated(None, "x", "y")),
    ("flwr_datasets.partitioner", lambda: partition_ids(people(3), "IidPartitioner", {"num_partitions": 2}))])
def test_a_missing_package_names_what_to_install(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    text = f"this needs the package {package.partition('.')[0].replace('_', '-')}, which is not installed: pip install 'fedtail[hub]'"
    with pytest.raises(ImportError, match=re.escape(text)):
        call()


def test_describing_files_needs_none_of_them():
    code = ("import sys, fedtail.data.opening, fedtail.data.hub, fedtail.data.describe, fedtail.cli.data\n"
            "print([p for p in ('datasets', 'flwr_datasets', 'pyarrow', 'rich', 'PIL', 'pandas') if p in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
