"""Files and messages from elsewhere: nothing but a refusal in words, within a bound of memory and time."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import attack_small_file_large_memory as swollen
import msgpack
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import fuzz_readers
from fedtail.data import Population
from fedtail.data.opening import open_any_data
from fedtail.data.tables import read_arrays, read_npy
from fedtail.deployment.registry import read_node_info
from fedtail.experiment import ExperimentError, Source
from fedtail.parquet_files import _CompactReader, open_parquet, unpacked_size
from fedtail.privacy.ledger_file import HEADS, LedgerError, LedgerFile
from fedtail.reading import DEPTH, Unreadable, checked_file_name, json_lines, json_value, read_bytes, read_json, toml_tables
from fedtail.rows import Mark, RowsError, RowStore
from fedtail.runs.execution import is_run_finished_and_intact
from fedtail.runs.run_folder import RunFolder, read_rounds
from fedtail.wire import pack, types_by_name, unpack
from run_folders import write_folder


def test_small_files_that_stand_for_much_are_refused():
    outcome = swollen.attack()
    assert outcome.held, outcome.measured


def test_damaged_and_forged_files_are_read_or_refused():
    """Twenty seconds of `make fuzz-readers`; a finding names its case, for --case."""
    counts, found = fuzz_readers.fuzz(20, seed=18, batch=25)
    assert not found, "\n".join(found)
    assert counts["refused"] > 0      # how many depends on the machine
    assert counts["read"] > 0


def test_the_fuzzer_notices_an_error_of_another_library(monkeypatch):
    reader = fuzz_readers.Reader("json", lambda: [{"a.json": b'{"a": [1, 2]}'}], lambda place: json.loads((place / "a.json").read_text()))
    monkeypatch.setitem(fuzz_readers.READERS, "json", reader)
    counts, found = fuzz_readers.fuzz(0.1, names=["json"], batch=40)
    assert counts["FOUND"] == len(found) > 3
    assert any("JSONDecodeError at decoder.py" in text for text in found)


# Text

@pytest.mark.parametrize(("text", "problem"), [
    ('{"a": 1, "a": 2}', "a key comes twice"), ("NaN", "NaN is no number"), ('{"a": -Infinity}', "-Infinity is no number"),
    ("[" * 100_000, "recursion"), ("[" * (DEPTH + 2) + "]" * (DEPTH + 2), "nested more than 64 deep"), ("1" * 5000, "digits"),
    ("18446744073709551616", "more than 64 bits"), ('"\\ud800"', "surrogates"), ("{", "Expecting"), ("", "Expecting")])
def test_json_that_is_refused(text, problem):
    with pytest.raises(Unreadable, match=problem):
        json_value(text, "it")


def test_json_that_is_read():
    value = {"a": [1, 2.5, None, "é", 2**64 - 1], "b": {"c": -2**63}}
    assert json_value(json.dumps(value), "it") == value
    assert json_value(json.dumps(value).encode(), "it") == value


@pytest.mark.parametrize(("text", "problem"), [
    ("x = " + "[" * 20_000, "recursion"), ("a." * 100_000 + "a = 1", "more than 64 parts"), ("x = " + "9" * 9000, "digits"),
    ("x = 0x" + "f" * 20, "more than 64 bits"), ("x = 1\nx = 2", "overwrite"), ("#" * (1 << 20) + "\n", "at most 1048576"),
    ('"a b"' + ' . "a b"' * 70 + " = 1", "more than 64 parts"), ("x = " + "[" * 66 + "]" * 66, "nested more than 64 deep")])
def test_toml_that_is_refused(text, problem):
    with pytest.raises(Unreadable, match=problem):
        toml_tables(text, "it")
    with pytest.raises(ExperimentError, match=problem):
        Source.parse(text, "e.toml", Path())


def test_toml_that_is_read():
    text = 'a.b.c = 1\nd = "' + "a." * 500 + '"\n'      # dots in a text are no key
    with pytest.raises(Unreadable):
        toml_tables(text, "it")                          # they look like one: a thousand dotted words are refused
    assert toml_tables('a.b.c = 1\nd = "a.b.c. d, e. f."\n', "it") == {"a": {"b": {"c": 1}}, "d": "a.b.c. d, e. f."}


def test_an_error_about_a_file_is_never_longer_than_a_page():
    with pytest.raises(ExperimentError) as reason:
        Source.parse("rounds = 1\n" + f'data = [{"0, " * 50_000}]\n', "e.toml", Path()).section_table("data")
    assert len(str(reason.value)) < 2500


def test_pipes_devices_and_large_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(bytes(101))
    for name, problem in (("pipe", "not an ordinary file"), ("device", "not an ordinary file"), ("large", "at most 100")):
        with pytest.raises(Unreadable, match=problem):
            read_bytes(tmp_path / name, 100)
    with pytest.raises(FileNotFoundError, match="cannot be read"):
        read_json(tmp_path / "none")
    assert read_bytes(tmp_path / "large", 101) == bytes(101)


def test_lines_are_whole_and_a_half_one_is_left_out(tmp_path):
    (tmp_path / "a").write_text('{"a": 1}\n[2]\n{"b"')
    assert list(json_lines(tmp_path / "a")) == [{"a": 1}, [2]]
    (tmp_path / "a").write_text('{"a": 1}\nx\n')
    with pytest.raises(Unreadable, match=r"line 2 of .*a is not readable json"):
        list(json_lines(tmp_path / "a"))


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".", "", "a\0", 3, None, "a\\b"])
def test_names_that_lead_elsewhere(name):
    with pytest.raises(Unreadable, match="plain name"):
        checked_file_name(name, "it")


# Arrays

def npz(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return path


HEADER = swollen.npy


@pytest.mark.parametrize(("content", "problem"), [
    (HEADER("(1152921504606846976,)"), "not what its .* bytes hold"), (HEADER("(-1,)"), "not what its"),
    (HEADER("(2,)", bytes(15)), "not what its"), (HEADER("(2,)", bytes(17)), "not what its"),
    (HEADER("(2,)", bytes(16), "|O"), "holds Python objects, which need pickle and are not read"), (HEADER("(2,)", b"", "|S0"), "without any"),
    (HEADER("(True,)", bytes(8)), "numbers or text are needed"), (HEADER("(2,)", bytes(200), "|V100"), "numbers or text are needed"),
    (HEADER("(" * 3000), "cannot be read"), (b"\x80\4\x95" + bytes(40), "magic string"), (b"", "cannot be read"),
    (HEADER("(99999999999999999999999,)"), "not what its")])
def test_headers_of_arrays_that_lie(tmp_path, content, problem):
    npz(tmp_path / "a.npz", x=content)
    with pytest.raises(Unreadable, match=problem):
        read_arrays(tmp_path / "a.npz", ["x"])
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(Unreadable, match=problem):
        read_npy(tmp_path / "a.npy")


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(["a", "bc"]),
                                   np.zeros((0, 3)), np.float32(3), np.array([1, 2], ">i4"), np.zeros((3, 0), bool)], ids=str)
def test_arrays_are_read_as_numpy_reads_them(tmp_path, array):
    np.savez(tmp_path / "a.npz", x=array)
    np.savez_compressed(tmp_path / "b.npz", x=array)
    np.save(tmp_path / "a.npy", array)
    theirs = np.load(tmp_path / "a.npy")
    for ours in (read_arrays(tmp_path / "a.npz", ["x"])["x"], read_arrays(tmp_path / "b.npz", ["x"])["x"], read_npy(tmp_path / "a.npy")):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tolist() == theirs.tolist()


def test_an_archive_that_announces_more_than_it_holds(tmp_path):
    npz(tmp_path / "a.npz", x=HEADER("(100,)", bytes(800)))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 24:at + 28] = (200_000_000).to_bytes(4, "little")      # unpacked, in the archive's directory
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(Unreadable, match=r"announces 200000000 bytes, and .* cannot hold them"):
        read_arrays(tmp_path / "a.npz", ["x"])


def test_pages_are_counted_as_pyarrow_counts_them(tmp_path):
    """Values by page heads against the footer's own numbers, for flat and nested columns, both versions of pages."""
    random = np.random.default_rng(0)
    lists = [random.normal(size=random.integers(0, 9)).tolist() for _ in range(3000)]
    table = pa.table({"x": lists, "y": random.integers(0, 9, 3000), "client": [f"c{k % 7}" for k in range(3000)]})
    for version in ("1.0", "2.0"):
        place = tmp_path / f"{version}.parquet"
        parquet.write_table(table, place, data_page_version=version, data_page_size=2000, row_group_size=700, compression="gzip",
                            use_dictionary=["client"])
        about = parquet.ParquetFile(place).metadata
        groups = [about.row_group(k) for k in range(about.num_row_groups)]
        for name, leaf, width in (("x", 0, 8), ("y", 1, 8), ("client", 2, 4)):
            columns = [group.column(leaf) for group in groups]
            values = sum(column.num_values for column in columns)
            with open_parquet(place) as file:
                counted = unpacked_size(file, place, [name])
            plain = sum(column.total_uncompressed_size for column in columns)      # with the heads of pages
            assert (width + 6) * values < counted <= (width + 6) * (values + 7 * len(columns)) + plain      # a dictionary has 7
        read = read_arrays(place, ["x", "y", "client"])
        assert [row.tolist() for row in read["x"]] == lists
        assert read["client"].tolist() == table["client"].to_pylist()


def test_columns_with_dots_in_their_names_are_counted_too(tmp_path):
    parquet.write_table(pa.table({"a.b": np.zeros(50_000_000), "y": np.zeros(50_000_000, bool)}), tmp_path / "a.parquet")
    with pytest.raises(Unreadable, match=r"more than 100 times as many"):
        read_arrays(tmp_path / "a.parquet", ["a.b"])


def test_bytes_and_lists_of_text_are_refused(tmp_path):
    """One long value could stand in each of many rows."""
    for odd in (pa.array([b"ab"] * 3), pa.array([b"ab"] * 3, pa.binary(2)), pa.array([["a"]] * 3)):
        parquet.write_table(pa.table({"x": odd}), tmp_path / "a.parquet")
        with pytest.raises(Unreadable, match="numbers, text, or lists of numbers are needed"):
            read_arrays(tmp_path / "a.parquet", ["x"])
    kinds = {"a": pa.array(["x", "yy"], pa.large_string()), "b": pa.array(["x", "yy"]).dictionary_encode(), "c": pa.array([0.5, 2], pa.float16())}
    parquet.write_table(pa.table(kinds), tmp_path / "a.parquet")
    read = read_arrays(tmp_path / "a.parquet", ["a", "b", "c"])
    assert [values.tolist() for values in read.values()] == [["x", "yy"], ["x", "yy"], [0.5, 2.0]]


def test_a_footer_that_would_end_the_process_is_refused(tmp_path):
    """pyarrow throws an exception that nothing catches where the statistics of a column are damaged, and it is asked for them."""
    table = pa.table({"x": np.arange(20.0), "y": np.arange(20), "client": np.arange(20)})
    parquet.write_table(table, tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for at in range(len(content) - 400, len(content) - 8, 7):
        (tmp_path / "b.parquet").write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1:])
        try:
            open_any_data(tmp_path / "b.parquet")
        except ValueError:
            continue


def test_a_writer_whose_name_is_no_text_is_refused(tmp_path):
    """The fuzzer's 7/parquet/3658: pyarrow decodes the name when it is first read."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": [1, 2]}), file)
    whole = file.read_bytes()
    at = whole.rindex(b"parquet-cpp")
    file.write_bytes(whole[:at] + b"\xd5" + whole[at + 1:])
    with pytest.raises(Unreadable, match=r"a\.parquet"):
        open_parquet(file)


def test_errors_about_numbers_with_many_digits_are_short(tmp_path):
    """The fuzzer's 7/population/4357 and 7/ledger/1854."""
    Population.from_clients([(torch.randn(2, 3), torch.tensor([0, 1]))]).save(tmp_path / "people")
    manifest = next(file for file in (tmp_path / "people").iterdir() if file.suffix == ".json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "clients": [1] * 20_000}))
    with pytest.raises(ValueError, match=r"says .* clients and 2 examples") as found:
        Population.open(tmp_path / "people")
    assert len(str(found.value)) < 2000
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(json.dumps(HEADS["client"]) + "\n" + json.dumps({"x" * 5000: 1}) + "\n")
    with pytest.raises(LedgerError, match="is damaged") as found:
        LedgerFile(ledger).read()
    assert len(str(found.value)) < 2000


@pytest.mark.parametrize("data", [b"", b"\x15", b"\x1c" * 40, b"\x18\xff\xff\xff\xff\x0f", b"\x19\xf8\xff\xff\xff\x7f", b"\xff" * 12])
def test_heads_of_pages_that_end_early(data):
    with pytest.raises(Unreadable):
        _CompactReader(data).read_struct()


def test_columns_that_are_neither_numbers_nor_text(tmp_path):
    odd = {"x": pa.array([{"a": 1}] * 3), "y": [0, 1, 0], "client": [0, 0, 1]}
    parquet.write_table(pa.table(odd), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="column 'x' holds struct"):
        open_any_data(tmp_path / "a.parquet")


# Saved populations

def saved(tmp_path: Path) -> Path:
    Population.from_arrays(np.zeros((4, 1), "float32"), [0, 1, 0, 1], [0, 0, 1, 1], group=[0, 1]).save(tmp_path / "p")
    return tmp_path / "p"


def put(place: Path, name: str, array: np.ndarray) -> None:
    """An array, with a manifest that says so."""
    np.save(place / f"{name}.npy", array)
    manifest = json.loads((place / "population.json").read_text())
    manifest["arrays"][name] = {"dtype": array.dtype.str, "shape": list(array.shape)}
    (place / "population.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("name", "array", "problem"), [
    ("start", np.array([2**63 - 1, 0]), "reach outside"), ("size", np.array([2**63 - 1, 2]), "reach outside"),
    ("start", np.array([0.0, 2.0]), "start.npy holds float64"), ("mass", np.array([np.nan, 1.0]), "mass is not positive"),
    ("mass", np.array([-1.0, 1.0]), "mass is not positive"), ("group", np.array([-1, 0]), "group is below 0"),
    ("key", np.array(["a", "b"]), "key.npy holds <U1"), ("targets", np.array(list("abcd")), "numbers is needed"),
    ("key", np.zeros((2, 1), np.int64), "says 2 clients")])
def test_populations_whose_arrays_cannot_be(tmp_path, name, array, problem):
    place = saved(tmp_path)
    put(place, name, array)
    with pytest.raises(ValueError, match=problem):
        Population.open(place)


def test_a_header_that_makes_numpy_divide_by_zero(tmp_path):
    place = saved(tmp_path)
    (place / "mass.npy").write_bytes(HEADER("(-1,)", kind="|S0"))      # numpy's own mapping ends the process
    with pytest.raises(ValueError, match="damaged or cut short"):
        Population.open(place)


# LEAF

@pytest.mark.parametrize(("content", "problem"), [
    ("[]", "not a LEAF file"), ('{"users": "ab", "num_samples": [1, 1], "user_data": {}}', "a list of names"),
    ('{"users": ["a"], "num_samples": [true], "user_data": {"a": {"x": [1], "y": [1]}}}', "a list of names"),
    ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": 1, "y": [1]}}}', "the lists x and y"),
    ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [1], "y": [1]}, "a": {"x": [], "y": []}}}', "a key comes twice"),
    ("[" * 100_000, "not a JSON file"),
    ('{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[[1, 2]], [[1], [2]]], "y": [1, 1]}}}', "different shapes")])
def test_leaf_files_that_cannot_be(tmp_path, content, problem):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=problem):
        Population.from_leaf(tmp_path)


# Messages

def plain(**fields: object) -> bytes:
    return msgpack.packb({"type": "NodeInfo", "fields": fields})


TENSOR = {"tensor": "<i8", "shape": [1], "bytes": bytes(8)}


@pytest.mark.parametrize(("message", "problem"), [
    (b"\x91" * 100_000, "no MessagePack"), (b"\xdd\xff\xff\xff\xff", "no MessagePack"), (b"\xc1", "no MessagePack"),
    (b"\xd6\xff\0\0\0\0", "bare Timestamp"), (b"\xc7\5\1abcde", "an extension of kind 1"), (b"\x82\xa1a\1\xa1a\2", "a key comes twice"), (msgpack.packb([1, 2]), "bare list"),
    (plain(name="a", key=TENSOR | {"shape": [2**31, 2**31]}, mass=TENSOR), "8 bytes for a tensor"),
    (plain(name="a", key=TENSOR | {"shape": [-1]}, mass=TENSOR), "none of torch's"),
    (plain(name="a", key=TENSOR | {"tensor": "O"}, mass=TENSOR), "none of torch's"),
    (plain(name="a", key=TENSOR | {"tensor": "<U2"}, mass=TENSOR), "none of torch's"),
    (plain(name="a", key=TENSOR | {"tensor": "f8,f8", "shape": []}, mass=TENSOR), "none of torch's"),
    (plain(name="a", key="text", mass=TENSOR), "a NodeInfo that cannot be"), (plain(nobody=1), "a NodeInfo that cannot be"),
    (msgpack.packb({"type": "NodeInfo", "fields": [1]}), "neither a tensor"), (msgpack.packb({"type": ["NodeInfo"], "fields": {}}), "neither a tensor"),
    (msgpack.packb({"type": "Popen", "fields": {}}), "was not given"), (msgpack.packb(3), "a node sent a int"),
    (pack((1,) * 2), "a node sent a tuple")])
def test_messages_that_cannot_be(message, problem):
    with pytest.raises(ValueError, match=problem):
        read_node_info(message)


def test_a_message_nested_too_deeply():
    value: object = 1
    for _ in range(100):
        value = (value,)
    with pytest.raises(Unreadable, match="nested more than"):
        unpack(pack(value), types_by_name([]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
                                   torch.float64, torch.complex64, torch.complex128], ids=str)
def test_tensors_of_every_type_and_shape_come_back(dtype):
    for shape in ((), (0,), (2, 3), (1, 0, 4)):
        tensor = torch.ones(shape, dtype=dtype)
        again = unpack(pack(tensor), types_by_name([]))
        assert (again.dtype, again.shape) == (dtype, tensor.shape)
        assert torch.equal(again, tensor)


# Run folders

def about(place: Path, **changes: object) -> None:
    told = json.loads((place / "run.json").read_text()) | changes
    (place / "run.json").write_text(json.dumps({key: value for key, value in told.items() if value != "gone"}))


@pytest.mark.parametrize(("changes", "problem"), [
    ({"name": "gone"}, "name is missing"), ({"name": ["a"]}, "name cannot be"), ({"seed": -1}, "seed cannot be"), ({"seed": 1.5}, "seed cannot be"),
    ({"members": []}, "members cannot be"), ({"members": [1]}, "members cannot be"), ({"splits": {"test": 2**60}}, "splits cannot be"),
    ({"splits": {"x": 1}}, "none of the splits"), ({"metrics": "gone"}, "metrics is missing"), ({"rounds": 0}, "rounds cannot be"),
    ({"family": {"field": "a", "values": [1, 2]}}, "2 values and 1 models"), ({"experiment": [1]}, "experiment cannot be")])
def test_descriptions_of_runs_that_cannot_be(tmp_path, changes, problem):
    write_folder(tmp_path / "r", [0.1, 0.2])
    about(tmp_path / "r", **changes)
    with pytest.raises(Unreadable, match=problem):
        RunFolder.open(tmp_path / "r")


def test_lines_and_results_that_cannot_be(tmp_path):
    run = write_folder(tmp_path / "r", [0.1, 0.2])
    for line, problem in (('{"round": -1, "members": []}', "round cannot be"), ('{"members": [{}]}', "round is missing"), ("3", "it is a int"),
                          ('{"round": 1, "members": [{}, {}]}', "2 models, and there are 1"),
                          ('{"round": 1, "members": [{"test": {"error": {"mean": "a"}}}]}', "members cannot be")):
        for name, read in (("metrics.jsonl", lambda run: run.metrics), ("result.json", lambda run: run.result)):
            (run.path / name).write_text(line + "\n")
            with pytest.raises(Unreadable, match=problem):
                read(RunFolder.open(run.path))


@pytest.mark.parametrize(("lines", "problem"), [
    (['{"clients": 1099511627776}'], "how many clients"), (['{"clients": -1}'], "how many clients"), (["[]"], "how many clients"),
    (['{"clients": 3}', '{"round": 1, "asked": [3], "members": []}'], "asked cannot be"),
    (['{"clients": 3}', '{"round": 1, "asked": [-1], "members": []}'], "asked cannot be"),
    (['{"clients": 3}', '{"round": 1, "asked": [[1], 2], "members": []}'], "asked cannot be"),
    (['{"clients": 3}', '{"round": 1, "asked": null, "members": [{"counted": "all"}]}'], "members cannot be")])
def test_records_of_rounds_that_cannot_be(tmp_path, lines, problem):
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(Unreadable, match=problem):
        list(read_rounds(tmp_path / "rounds.jsonl"))


def test_a_table_over_clients_that_cannot_be(tmp_path):
    run = write_folder(tmp_path / "r", [0.1, 0.2])
    whole = parquet.read_table(run.path / "clients.parquet").to_pydict()
    for changes, problem in (({"member": [0, 5]}, "other models"), ({"split": [1, 2]}, "column 'split' holds whole"),
                             ({"error": ["a", "b"]}, "column 'error' holds text"), ({"member": [0, 0], "split": ["test", "train"]}, "1 test clients"),
                             ({"client": [[1], [2]]}, "column 'client' holds list"), ({"size": None}, "no column size")):
        table = {name: values for name, values in (whole | changes).items() if values is not None}
        parquet.write_table(pa.table(table), run.path / "clients.parquet")
        with pytest.raises(Unreadable, match=problem):
            _ = RunFolder.open(run.path).clients


def test_a_result_that_names_files_elsewhere_is_not_whole(tmp_path):
    """It would be read to its end, and a device has none."""
    run = write_folder(tmp_path / "r", [0.1, 0.2])
    result = json.loads((run.path / "result.json").read_text())
    for name in ("/dev/zero", "../../etc/passwd", "pipe"):
        os.path.exists(run.path / "pipe") or os.mkfifo(run.path / "pipe")
        (run.path / "result.json").write_text(json.dumps(result | {"files": {name: "0" * 32}}))
        assert not is_run_finished_and_intact(run.path)


# Row stores

def test_row_stores_whose_shape_or_mark_cannot_be(tmp_path):
    store = RowStore.create(tmp_path / "a.rows", (3,), torch.float32, "a")
    store.write([7, 5], torch.arange(6.0).view(2, 3))
    mark, content = store.rows.mark, (tmp_path / "a.rows").read_bytes()
    for file in ("../a.rows", "/etc/passwd", ""):
        with pytest.raises(ValueError, match="plain name"):
            RowStore.open(tmp_path / "x", mark._replace(file=file))
    for length in (2**62, -1, "2"):
        with pytest.raises(RowsError, match="a mark of a row store is damaged"):
            RowStore.open(tmp_path, mark._replace(length=length))
    told = json.loads(content[:4096])
    for shape in ([-6], [2**60], "a", [1.5], None, [2**31] * 3):      # a row of -24 bytes, and the head's 24, would be none
        (tmp_path / "a.rows").write_bytes(json.dumps(told | {"shape": shape}).encode().ljust(4096) + content[4096:])
        with pytest.raises(RowsError, match="not a file of rows"):
            RowStore.open(tmp_path, Mark("a.rows", 2**40, mark.digest))


def test_nothing_unpickles(tmp_path):
    """A pickle that leaves a mark, wherever arrays or tensors are read."""
    import pickle

    class Marks:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    loaded = pickle.dumps(Marks())
    objects = io.BytesIO()
    np.save(objects, np.array([Marks()], dtype=object), allow_pickle=True)
    place = saved(tmp_path)
    for content in (loaded, objects.getvalue()):
        npz(tmp_path / "a.npz", x=content, y=content, client=content)
        (tmp_path / "a.npy").write_bytes(content)
        (place / "names.npy").write_bytes(content)
        for read in (lambda: open_any_data(tmp_path / "a.npz"), lambda: read_npy(tmp_path / "a.npy"), lambda: Population.open(place),
                     lambda content=content: unpack(content, types_by_name([]))):
            with pytest.raises(ValueError):
                read()
    assert not (tmp_path / "pwned").exists()
