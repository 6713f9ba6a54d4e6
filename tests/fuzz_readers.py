"""Files and messages that nobody should send, against everything that reads one.

    python tests/fuzz_readers.py --seconds 3600 --seed 0 [--reader npz] [--case 0/npz/17]      # make fuzz-readers

Valid files of every kind are written once, then changed: bits flipped, cut short, spliced, numbers in them replaced by extreme ones;
and with knowledge of the format: values of a JSON, TOML or MessagePack tree exchanged, headers of arrays edited, archives rewritten,
checksums set right again. Each case is read in a process with a bound on its memory and its time. It must be read, or refused by an
error that fedtail itself raises; an error of another library that comes through, a MemoryError, a crash or a hang is a finding.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import linecache
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
import tomllib
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import tomli_w
import torch

import fedtail

HOME = str(Path(fedtail.__file__).parent)
MEMORY = 2 << 30             # of address space beyond what the process had: the stated bounds are below it
CPU_SECONDS, WALL_SECONDS = 10.0, 120.0
BATCH = 150
Files = dict[str, bytes]     # by their path in a folder
Read = Callable[[Path], Any]


@dataclass(frozen=True)
class Reader:
    """Something that reads: what a valid input is, how to change it with knowledge of its format, and how it is read."""

    name: str
    seeds: Callable[[], list[Files]]
    read: Read
    main: tuple[str, ...] = ()      # files that are changed; by default all


# Values that nobody expects

HUGE = (2**31, 2**32 - 1, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1, -1, -2**31, -2**63, 0, 1, 10**18)
TEXTS = ("", "x", "../../../etc/passwd", "/dev/zero", "a\0b", "é" * 40, "nan", "none", "os:system", "subprocess:getoutput", "mine:Net",
         "SGD", "Superquantile", "float32", "O", "<f8", "test", "train", "9" * 5000, "\ud800", "a" * 100_000, "(", "\\")


def odd_value(rng: random.Random, text: bool = False) -> Any:
    """A value of any kind; with `text`, one that JSON and TOML can hold."""
    match rng.randrange(9):
        case 0:
            return rng.choice(HUGE)
        case 1:
            return rng.choice([float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0, 0.5])
        case 2:
            return rng.choice(TEXTS[:-3] if text else TEXTS)
        case 3:
            return rng.choice([True, False, None])
        case 4:
            return [odd_value(rng, text) for _ in range(rng.randrange(4))]
        case 5:
            return {rng.choice(("part", "kind", "x", "", "tensor", "type")): odd_value(rng, text) for _ in range(rng.randrange(3))}
        case 6:
            return nested(rng.choice([3, 40, 300]), rng)
        case 7:
            return rng.randrange(-5, 300)
        case _:
            return [0] * rng.choice([1, 100, 20_000])


def nested(depth: int, rng: random.Random) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values stand in a tree; the first few of a long list."""
    found = [path] if path else []
    inner = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:6] if isinstance(tree, (list, tuple)) else ()
    for key, value in inner:
        found += places(value, (*path, key))
    return found


def changed_tree(tree: Any, rng: random.Random, text: bool = True) -> Any:
    """A copy of a tree with one to three places changed: another value, gone, twice, moved, renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        there = places(tree)
        if not there:
            return odd_value(rng, text)
        *above, last = rng.choice(there)
        holder = tree
        for key in above:
            holder = holder[key]
        what = rng.randrange(7)
        if what == 0 and isinstance(holder, (dict, list)):
            del holder[last]
        elif what == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "x", "part", f"{last}x", "a" * 300, "../x", "(", 'q"q'])] = holder.pop(last)
        elif what == 2:
            *from_, end = rng.choice(there)
            source = tree
            try:
                for key in from_:
                    source = source[key]
                holder[last] = copy.deepcopy(source[end])
            except (KeyError, IndexError, TypeError):
                pass
        elif what == 3 and isinstance(holder, list):
            holder.insert(last, odd_value(rng, text))
        elif what == 4 and isinstance(holder[last], int):
            holder[last] = rng.choice([holder[last] + 1, holder[last] - 1, -holder[last], holder[last] * 2, 0])
        else:
            holder[last] = odd_value(rng, text)
    return tree


def changed_bytes(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Changed without care for the format."""
    content = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(9):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(content):
                content[at] = rng.choice([0, 255, 127, 128, rng.randrange(256)])
            case 2:
                del content[at:]
            case 3:
                content[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 4:
                del content[at:at + rng.randrange(1, 60)]
            case 5:
                other = rng.choice(others)
                content[at:] = other[rng.randrange(len(other) + 1):]
            case 6:
                size = rng.choice([2, 4, 8])
                content[at:at + size] = (rng.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, rng.choice(["little", "big"]))
            case 7:
                digits = [k for k, byte in enumerate(content[:20_000]) if chr(byte).isdigit()]
                if digits:
                    at = rng.choice(digits)
                    content[at:at + 1] = rng.choice([str(rng.choice(HUGE)).encode(), b"-1", b"NaN", b"1e999", b"9" * 6000, b'"'])
            case _:
                content[at:at] = content[at:at + 40] * rng.choice([1, 3, 50])
    return bytes(content)


# Formats


def changed_json(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    if rng.random() < 0.1:
        return (b"[" * 100_000) if rng.random() < 0.5 else (b'{"a":' * 50_000)
    if rng.random() < 0.1 and "{" in text:                  # the same key twice
        at = text.index("{") + 1
        key = rng.choice([*json.loads(text)] if isinstance(json.loads(text), dict) and json.loads(text) else ["x"])
        return f"{text[:at]}{json.dumps(key)}: {json.dumps(odd_value(rng, True))}, {text[at:]}".encode()
    return json.dumps(changed_tree(json.loads(text), rng)).encode("utf-8", "surrogatepass")


def changed_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(max(1, len(lines) - 1))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case _:
            lines[at] = changed_json(lines[at] or b"{}", rng)
    return b"\n".join(lines)


def changed_toml(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.12:
        return rng.choice([b"x = " + b"[" * 20_000, b"x = " + b"{a=" * 9_000, b"a." * 20_000 + b"a = 1", b"x = 0x" + b"f" * 20_000,
                           b"x = " + b"9" * 9_000, b'"' * 5000, b"x = 1e99999", b"rounds = 0x" + b"f" * 9_000 + b"\n" + data,
                           b"rounds = nan\n" + data, b"[a]\n" * 20_000])
    try:
        return tomli_w.dumps(changed_tree(tomllib.loads(data.decode()), rng)).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, AttributeError, RecursionError):      # TOML has no null
        return changed_bytes(data, rng, [data])


def npy(header: str, body: bytes, version: int = 1) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text) % 65536) + text + body


def changed_npy(data: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<H", data[8:10])[0]
    header, body = data[10:10 + length].decode("latin1"), data[10 + length:]
    dtype = rng.choice(["<f4", "<f8", "<i8", ">i4", "|O", "|b1", "<U7", "|V100000", "<c16", "<M8[s]", "<f2", "|S0", "<i8", "|u1", "<u8"])
    shape = rng.choice(["(1152921504606846976,)", "(-1,)", "(4611686018427387904, 4)", "()", "(0,)", "(0, 9)", "(10, 0)", "(2,)*3",
                        "(1, 2, 3, 4)", f"({len(body) // 8},)", f"({len(body) // 4}, 1)", "(1,)" + " " * 9000, "(100000000,)", "(1.5,)",
                        "(True,)", "[3]", "(9999999999999999999999999,)"])
    order = rng.choice(["True", "False"])
    new = {0: f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}",
           1: f"{{'descr': [('a', '<f4'), ('b', {dtype!r})], 'fortran_order': False, 'shape': {shape}, }}",
           2: header.strip().replace("False", "True"), 3: header.strip() + "()" * rng.choice([1, 3000]),
           4: "{'descr': '<f8', 'fortran_order': False, 'shape': " + "(" * rng.choice([5, 3000])}[rng.choice([0, 0, 0, 1, 2, 3, 4])]
    return npy(new[:60_000], rng.choice([body, body, body[:10], b""]), rng.choice([1, 1, 2, 3]))


def changed_npz(data: bytes, rng: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(held))
    what = rng.randrange(9)
    if what <= 3:
        held[name] = changed_npy(held[name], rng)
    elif what == 4:
        held[rng.choice(["../../x.npy", "/etc/x.npy", "x", "", "y.npy.npy"])] = held.pop(name)
    elif what == 5:
        held[name] = b"\x80\x04\x95" + rng.randbytes(30)               # a pickle
    elif what == 6:
        held[name] = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (300000000,), }", bytes(1000))
    elif what == 7:
        held[name] = held[name][:rng.randrange(len(held[name]))]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])) as new:
        for each, content in held.items():
            new.writestr(each, content)
    packed = bytearray(out.getvalue())
    if what == 8:                                                       # sizes in the archive's directory
        at = packed.find(b"PK\1\2")
        packed[at + rng.choice([20, 24, 42]):][:4] = b"\xff\xff\xff\x7f"
        packed[at + 20:at + 28] = struct.pack("<II", rng.choice([0, 10, 2**31]), rng.choice([0, 2**30, 2**32 - 1]))
    return bytes(packed)


def bomb_npz(rng: random.Random) -> bytes:
    """Half a gigabyte of zeros, or an announcement of more than there is, in a small file."""
    rows = rng.choice([5_000_000, 60_000_000])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new, new.open("x.npy", "w", force_zip64=True) as file:
        file.write(npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({rows}, 1), }}", b""))
        for _ in range(rows // 500_000):
            file.write(bytes(4_000_000))
    return out.getvalue()


def changed_parquet(data: bytes, rng: random.Random) -> bytes:
    """Another table under the same names of columns."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = rng.choice([0, 1, 3, 20, 20])
    columns = {
        "n": lambda: pa.array([rng.choice([0.5, float("nan"), float("inf"), 1e308]) for _ in range(rows)]),
        "i": lambda: pa.array([rng.choice([0, -1, 2**62]) for _ in range(rows)]),
        "u": lambda: pa.array([2**64 - 1] * rows, pa.uint64()), "null": lambda: pa.array([None] * rows),
        "some": lambda: pa.array([None if k % 2 else 1.0 for k in range(rows)], pa.float64()),
        "text": lambda: pa.array(["ab" * rng.randrange(4) for _ in range(rows)]), "bytes": lambda: pa.array([b"\xff\0"] * rows),
        "list": lambda: pa.array([[1.0] * rng.randrange(3) for _ in range(rows)], pa.list_(pa.float64())),
        "deep": lambda: pa.array([[[1], [2, 3]]] * rows, pa.list_(pa.list_(pa.int64()))),
        "struct": lambda: pa.array([{"a": 1}] * rows, pa.struct([("a", pa.int64())])), "bool": lambda: pa.array([True] * rows),
        "date": lambda: pa.array([0] * rows, pa.date32()), "time": lambda: pa.array([0] * rows, pa.timestamp("ns", "UTC")),
        "decimal": lambda: pa.array([None if not rows else 1] * rows).cast(pa.decimal128(20)), "half": lambda: pa.array(
            np.zeros(rows, np.float16)), "dict": lambda: pa.array(["a"] * rows).dictionary_encode(),
        "fixed": lambda: pa.array([[1.0, 2.0]] * rows, pa.list_(pa.float64(), 2)),
        "map": lambda: pa.array([[("a", 1)]] * rows, pa.map_(pa.string(), pa.int64())),
        "interval": lambda: pa.array([0] * rows, pa.duration("s")), "binary": lambda: pa.array([b"ab"] * rows, pa.binary(2)),
    }
    there = parquet.read_schema(io.BytesIO(data)).names
    table = pa.table({name: columns[rng.choice(list(columns))]() for name in there})
    out = io.BytesIO()
    parquet.write_table(table, out, compression=rng.choice(["none", "snappy", "zstd", "gzip", "brotli"]),
                        use_dictionary=rng.random() < 0.5, data_page_version=rng.choice(["1.0", "2.0"]))
    return out.getvalue()


def bomb_parquet(rng: random.Random) -> bytes:
    """Very many rows that are all alike, so that the file is small."""
    import pyarrow as pa
    from pyarrow import parquet

    out, rows = io.BytesIO(), 1_000_000
    table = pa.table({"x": pa.array(np.zeros(rows)), "y": pa.array(np.zeros(rows, np.int64)), "client": pa.array(np.zeros(rows, np.int64))})
    text = pa.table({"x": pa.array(np.zeros(200)), "y": pa.array(np.zeros(200, np.int64)), "client": pa.array(["a" * 1_000_000] * 200)})
    wide = pa.table({"x": pa.array([np.zeros(3_000_000)] * 4), "y": pa.array(np.zeros(4, np.int64)), "client": pa.array(np.arange(4))})
    chosen, times = rng.choice([(table, 120), (text, 20), (wide, 30)])
    with parquet.ParquetWriter(out, chosen.schema, compression="zstd") as writer:
        for _ in range(times):
            writer.write_table(chosen)
    return out.getvalue()


def changed_safetensors(data: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    about = header.get("__metadata__", {})
    inner = rng.random() < 0.6 and "about" in about
    if inner:
        told = changed_tree(json.loads(about["about"]), rng)
        about["about"] = json.dumps(told)
        return checked_safetensors(header, body)
    text = json.dumps(changed_tree(header, rng)).encode("utf-8", "surrogatepass")
    length = rng.choice([len(text), len(text), len(text), 2**60, 2**31, len(text) + 8, 0])
    return length.to_bytes(8, "little") + text + body


def checked_safetensors(header: dict[str, Any], body: bytes) -> bytes:
    """A checkpoint whose digest is right again, so that what it says is looked at."""
    from safetensors.torch import load

    from fedtail.runs.checkpoint import _content_digest

    text = json.dumps(header).encode()
    plain = json.dumps({name: value for name, value in header.items() if name != "__metadata__"}).encode()
    tensors = load(len(plain).to_bytes(8, "little") + plain + body)
    header["__metadata__"]["check"] = _content_digest(tensors, header["__metadata__"]["about"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def changed_msgpack(data: bytes, rng: random.Random) -> bytes:
    tree = msgpack.unpackb(data, strict_map_key=False)
    if rng.random() < 0.1:
        return rng.choice([b"\x91" * 100_000, b"\x81\xa1a" * 30_000, b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
                           b"\xc7\x05\x01abcde", b"\xd6\xff\0\0\0\0", b"\x82\xa1a\1\xa1a\2"])
    if rng.random() < 0.3:
        holder = [place for place in places(tree) if place[-1] in ("tensor", "shape", "bytes", "type", "fields")]
        if holder:
            *above, last = rng.choice(holder)
            inner = tree
            for key in above:
                inner = inner[key]
            inner[last] = rng.choice([[2**60], [-1], [-1, -1], [2**31, 2**31], [], "O", "<f8", "V100", ">i8", "<U5", "f8,f8", b"", b"abc",
                                      "Broadcast", "Cohort", "LocalSGD", {}, {"a": 1}, None, [True], "float32", "<c16", [0, 2**62]])
            return msgpack.packb(tree)
    try:
        return msgpack.packb(changed_tree(tree, rng, text=False))
    except (OverflowError, ValueError, TypeError, UnicodeEncodeError):
        return changed_bytes(data, rng, [data])


def changed_rows(data: bytes, rng: random.Random) -> bytes:
    about = json.loads(data[:4096])
    if rng.random() < 0.5:
        about["shape"] = rng.choice([[-1], [-6], [2**60], [0], [], [2**31, 2**31, 2**31], ["a"], [1.5], None, 3, [True], [3, -2]])
    else:
        about = changed_tree(about, rng)
    return json.dumps(about).encode("utf-8", "surrogatepass").ljust(4096) + data[4096:]


def changed(name: str, data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """One file, changed by its kind or without care."""
    kinds: dict[str, Callable[[bytes, random.Random], bytes]] = {
        ".json": changed_json, ".jsonl": changed_lines, ".toml": changed_toml, ".npy": changed_npy, ".npz": changed_npz,
        ".parquet": changed_parquet, ".safetensors": changed_safetensors, ".msgpack": changed_msgpack, ".rows": changed_rows}
    known = kinds.get(Path(name).suffix)
    if known is None or rng.random() < 0.35:
        return changed_bytes(data, rng, others)
    if rng.random() < 0.01:
        return bomb_npz(rng) if known is changed_npz else bomb_parquet(rng) if known is changed_parquet else known(data, rng)
    return known(data, rng)


# Valid files


EXPERIMENT = """\
name = "Delta-FL"
rounds = 4
seeds = [0, 1]
device = "cpu"
[data]
kind = "synthetic"
alpha = 1
beta = 1
clients = 20
sizes = "moderate"
split = { train = 0.6, test = 0.4, seed = 0 }
[task]
metrics = [{ name = "mine", function = "cross_entropy", better = "higher" }]
[task.module]
part = "SoftmaxRegression"
features = 60
classes = 10
[sample]
cohort_size = 8
[local]
learning_rate = 0.1
penalty = { part = "Proximal", strength = 0.1 }
[risk]
part = "Superquantile"
tail_fraction = 0.5
quantile = { part = "ExactQuantile", bits = 12 }
[server]
part = "SGD"
learning_rate = 1.0
[privacy]
delta = 1e-5
[evaluate]
every = 2
[[method]]
name = "a"
risk = { part = "Mean" }
[[method]]
name = "b"
[tune]
trials = 2
[tune.search]
local.learning_rate = { low = 0.01, high = 1.0, log = true }
"""
NODE = 'name = "a"\nexperiment = "experiment.toml"\ndata = "d.npz"\nminimum = 3\nmasked_only = true\nkeys = "name"\ntest_share = 0.2\ntrust = []\n'


def array_files() -> tuple[bytes, bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    rng, out, packed = np.random.default_rng(0), io.BytesIO(), io.BytesIO()
    columns = {"x": rng.normal(size=(20, 2)).astype("float32"), "y": rng.integers(0, 3, 20), "client": rng.integers(0, 4, 20)}
    np.savez_compressed(out, **columns)
    table = pa.table({"x": list(columns["x"].astype(float)), "y": columns["y"], "client": [f"c{k}" for k in columns["client"]]})
    parquet.write_table(table, packed)
    return out.getvalue(), packed.getvalue()


def folder_files(make: Callable[[Path], Any]) -> Files:
    """What something writes into an empty folder."""
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        return {str(path.relative_to(place)): path.read_bytes() for path in sorted(Path(place).rglob("*"))
                if path.is_file() and path.name != ".lock"}


def leaf_files() -> list[Files]:
    numbers = {"users": ["a", "b"], "num_samples": [2, 1],
               "user_data": {"a": {"x": [[1.0, 2.5], [3.0, 4.0]], "y": [0, 1]}, "b": {"x": [[5, 6]], "y": [1.0]}}}
    ragged = {"users": ["a", "b"], "num_samples": [2, 1],
              "user_data": {"a": {"x": [[1], [3, 4]], "y": [[0], [1, 2]]}, "b": {"x": [[5, 6, 7]], "y": [[1]]}}}
    return [{"a.json": json.dumps(numbers).encode()}, {"a.json": json.dumps(numbers).encode(), "b.json": json.dumps(
        {**numbers, "users": ["a", "c"], "user_data": {"a": numbers["user_data"]["a"], "c": numbers["user_data"]["b"]}}).encode()},
        {"r.json": json.dumps(ragged).encode()}]


def population_files() -> list[Files]:
    from fedtail.data import Population

    plain = Population.from_arrays(np.zeros((9, 2), "float32"), np.arange(9) % 3, list("aabbbcccc"), group=[0, 1, 0])
    several = Population.from_arrays({"a": np.zeros((4, 2)), "b": np.zeros((4, 1), int)}, np.zeros(4), [0, 0, 1, 1])
    return [folder_files(lambda place, one=one: one.save(place / "p")) for one in (plain, several)]


def run_files() -> list[Files]:
    """A run of each kind: trained, a family, private; with checkpoints and a ledger."""
    from fedtail.experiment.experiment import build_experiments
    from fedtail.experiment.source import Source
    from fedtail.runs import run
    from run_folders import Onlooker

    base = EXPERIMENT.partition("[[method]]")[0].replace("rounds = 4", "rounds = 2")
    family = base.replace("[server]", "[family]\nrisk.tail_fraction = [1.0, 0.5]\n[server]")
    made = []
    for text in (base, family):
        [one] = build_experiments(Source.parse(text, "e.toml", Path()), "e")
        made.append(folder_files(lambda place, one=one: run(one, 0, place / "run", Onlooker(None))))
    return made


def row_files() -> list[Files]:
    from fedtail.rows import RowStore

    def make(place: Path) -> None:
        store = RowStore.create(place / "a.rows", (3,), torch.float32, "a")
        store.write([7, 5], torch.arange(6.0).view(2, 3))
        (place / "mark.json").write_text(json.dumps(list(store.rows.mark)))
    return [folder_files(make)]


def wire_messages() -> list[Files]:
    from fedtail.deployment.node import Ask, Close, Open
    from fedtail.deployment.registry import NodeInfo
    from fedtail.fleet import Broadcast
    from fedtail.questions import Statistic, Train
    from fedtail.sampling import Cohort
    from fedtail.wire import pack

    whole = torch.arange(3)
    cohort = Cohort(whole, whole, torch.ones(3), 1.0)
    broadcast = Broadcast(**{one.name: value for one in fields(Broadcast) if (value := {
        "params": torch.zeros(4), "round": 1, "seed": 0}.get(one.name)) is not None})
    risk = fedtail.Superquantile(0.5)
    trial = Statistic(risk, torch.zeros(2)) if len(fields(Statistic)) >= 2 else None
    algorithm = fedtail.delta_fl(0.5, 3)
    train = next((Train(**{one.name: value for one in fields(Train) if (value := {
        "local": algorithm.local, "risk": algorithm.risk, "dual": torch.zeros(4), "aggregate": algorithm.aggregate}.get(one.name))
        is not None}) for _ in [0]), None)
    values = [Open(cohort, broadcast, b"t", (0,)), Ask(1, (trial, train), None), Close(1, True),
              NodeInfo("n", torch.arange(3), torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)),
              (torch.zeros(2, 3), torch.ones(2, dtype=torch.int64))]
    return [{"m.msgpack": pack(value)} for value in values]


def node_messages() -> list[Files]:
    from fedtail.deployment.node_messages import NodeMessage, Reply, encode_message

    message = NodeMessage(b"run", 3, 5, (b"open", b"close"), b"ask", b"")
    return [{"m.bin": encode_message(message)}, {"m.bin": encode_message(Reply(bytes(32), b"answer", b"", b"no"))}]


def value_files() -> list[Files]:
    numbers = io.BytesIO()
    np.save(numbers, np.arange(20.0))
    return [{"v.npy": numbers.getvalue()}, {"v.csv": b"a,b\n1,2\n3,4\n"}, {"v.txt": b"1\n2\n3.5\n"}]


# How each is read


def read_experiment_file(place: Path) -> None:
    from fedtail.experiment import AS_WRITTEN, read_experiments

    for one in read_experiments(place / "experiment.toml", (), AS_WRITTEN):
        tomli_w.dumps(one.as_table())


def read_for_a_run(place: Path) -> None:
    from fedtail.experiment import read_experiments

    for one in read_experiments(place / "experiment.toml"):
        tomli_w.dumps(one.as_table())


def read_search_file(place: Path) -> None:
    from fedtail.experiment.tune_section import read_search

    read_search(place / "experiment.toml", (), "a")


def read_node_file(place: Path) -> None:
    from fedtail.deployment.settings import NodeSettings

    NodeSettings.read(place / "node.toml").read_population()


def read_table(place: Path) -> None:
    from fedtail.data.opening import open_any_data
    from fedtail.data.tables import list_arrays, read_arrays

    path = next(place.iterdir(), place / "gone.npz")
    held = list_arrays(path)
    open_any_data(path)
    read_arrays(path, [*held][:3])


def read_leaf_folder(place: Path) -> None:
    from fedtail.data import Population

    use(Population.from_leaf(place))


def read_population(place: Path) -> None:
    from fedtail.data import Population

    use(Population.open(place / "p"))


def use(population: Any) -> None:
    """Whatever reads examples must stay within them."""
    for k in range(len(population)):
        population.client(k)
    population.num_examples, population.example_clients_and_rows(), repr(population)
    population.select([0])


def read_run(place: Path) -> None:
    from fedtail.report.page import page_data
    from fedtail.runs.comparison import paired_differences, rows_by_method
    from fedtail.runs.run_folder import find_runs

    runs = find_runs(place)
    for run in runs:
        _ = run.name, run.seed, run.members, run.is_finished, run.tested_split, run.metrics, run.privacy, run.privacy_line, run.rounds, run.models
        if run.is_finished:
            _ = run.result, run.clients, run.client_columns(run.tested_split)
    if all(run.is_finished for run in runs):
        rows_by_method(runs)
        paired_differences(runs)
    page_data(runs)


def read_ledger(place: Path) -> None:
    from fedtail.privacy.ledger_file import LedgerFile

    LedgerFile(place / "run" / "ledger.jsonl").read()


def read_checkpoints(place: Path) -> None:
    from fedtail.runs.checkpoint import Checkpoints

    Checkpoints(place / "run").load()


def read_whole(place: Path) -> None:
    from fedtail.runs.execution import is_run_finished_and_intact

    is_run_finished_and_intact(place / "run")


def read_models(place: Path) -> None:
    from fedtail.runs.choosing import load_models
    from fedtail.runs.run_folder import RunFolder

    load_models(RunFolder.open(place / "run"))


def read_rows(place: Path) -> None:
    from fedtail.rows import Mark, RowStore

    try:
        mark = Mark(*json.loads((place / "mark.json").read_bytes()))
    except (ValueError, TypeError, RecursionError, OSError):
        return                                              # that the caller reads
    RowStore.open(place, mark).rows.read([5, 7, 9])


def read_wire(place: Path) -> None:
    from fedtail.deployment.node import PARTS
    from fedtail.wire import types_by_name, unpack

    unpack((place / "m.msgpack").read_bytes(), types_by_name(PARTS))


def read_info(place: Path) -> None:
    from fedtail.deployment.registry import read_node_info

    read_node_info((place / "m.msgpack").read_bytes())


def read_node_message(place: Path) -> None:
    from fedtail.deployment.node_messages import read_message
    from fedtail.deployment.site import Site

    data = (place / "m.bin").read_bytes()
    Site(lambda: None, masked_only=True).handle(data)      # type: ignore[arg-type,return-value]
    read_message(data)


def read_reply(place: Path) -> None:
    from fedtail.deployment.node_messages import Reply
    from fedtail.secure.encoding import decode

    decode(Reply, (place / "m.bin").read_bytes())


def read_numbers(place: Path) -> None:
    from fedtail.cli.value_file import read_values
    from fedtail.quantiles.private import checked_values

    path = next(place.iterdir(), place / "gone.npy")
    checked_values(read_values(path, None))


def read_client_tables(place: Path) -> None:
    from fedtail import read_speeds, read_trace

    for path in sorted(place.iterdir()):
        (read_trace if path.stem == "trace" else read_speeds)(path)


def client_tables() -> list[dict[str, bytes]]:
    """Traces and speeds, by name in text and by key in arrays."""
    arrays = io.BytesIO()
    np.savez(arrays, key=np.array([3, 5, 4]), start=np.array([0.0, 1.0, 2.5]), end=np.array([4.0, 2.0, 3.0]))
    return [{"trace.csv": b'client,start,end\n"ann",0,4\nbob,1,2.5\nann,6,7\n', "speeds.csv": b"key,steps_per_second\n3,1.5\n4,2e-1\n"},
            {"trace.npz": arrays.getvalue()}]


READERS = {reader.name: reader for reader in (
    Reader("show", lambda: [{"experiment.toml": EXPERIMENT.encode()}], read_experiment_file),
    Reader("run", lambda: [{"experiment.toml": EXPERIMENT.encode()}], read_for_a_run),
    Reader("tune", lambda: [{"experiment.toml": EXPERIMENT.encode()}], read_search_file),
    Reader("node", lambda: [{"node.toml": NODE.encode(), "d.npz": array_files()[0]}], read_node_file, ("node.toml",)),
    Reader("npz", lambda: [{"d.npz": array_files()[0]}], read_table),
    Reader("parquet", lambda: [{"d.parquet": array_files()[1]}], read_table),
    Reader("leaf", leaf_files, read_leaf_folder),
    Reader("population", population_files, read_population),
    Reader("run_folder", run_files, read_run, ("run/run.json", "run/metrics.jsonl", "run/rounds.jsonl", "run/result.json",
                                               "run/privacy.json", "run/clients.parquet")),
    Reader("ledger", run_files, read_ledger, ("run/ledger.jsonl",)),
    Reader("checkpoint", run_files, read_checkpoints, ("run/checkpoint-a.safetensors", "run/checkpoint-b.safetensors")),
    Reader("whole", run_files, read_whole, ("run/result.json", "run/run.json")),
    Reader("models", run_files, read_models, ("run/model.safetensors", "run/model-0.safetensors", "run/experiment.toml", "run/run.json")),
    Reader("rows", row_files, read_rows), Reader("client_tables", client_tables, read_client_tables),
    Reader("wire", wire_messages, read_wire),
    Reader("node_info", wire_messages, read_info), Reader("message", node_messages, read_node_message),
    Reader("reply", node_messages, read_reply),
    Reader("numbers", value_files, read_numbers))}


# Cases


class Finding(AssertionError):
    """What must never happen."""


def judge(reason: BaseException) -> None:
    """A refusal is an error that a line of fedtail raises in words; anything else is a finding."""
    if isinstance(reason, Finding):
        raise reason
    frames = traceback.extract_tb(reason.__traceback__)
    here = [frame for frame in frames if frame.filename != __file__]
    last = here[-1] if here else frames[-1]
    ours = last.filename.startswith(HOME) and linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise ")
    if not ours or not isinstance(reason, (ValueError, TypeError, OSError, RuntimeError)) or isinstance(reason, RecursionError):
        where = f"{Path(last.filename).name}:{last.lineno}"
        through = next((f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(here) if frame.filename.startswith(HOME)), "")
        raise Finding(f"{type(reason).__name__} at {where} through {through}: {str(reason)[:200]}") from reason
    if len(str(reason)) > 4000:
        raise Finding(f"an error of {len(str(reason))} characters at {last.filename}:{last.lineno}")


def write_case(reader: Reader, seeds: list[Files], case: str, place: Path) -> None:
    """The files of a case, which its name alone decides."""
    rng = random.Random(case)
    files = dict(rng.choice(seeds))
    names = [name for name in reader.main if name in files] or list(files)
    others = [content for content in files.values() if content] or [b"\0"]
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 1, 2]))):
        if rng.random() < 0.03 and not name.startswith("m."):      # a message is there, or it is none
            del files[name]
        else:
            try:
                files[name] = changed(name, files[name], rng, others)
            except (RecursionError, OverflowError, UnicodeError, KeyError, IndexError, TypeError, ValueError, struct.error):
                files[name] = changed_bytes(files[name], rng, others)      # what cannot be written in its own format
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)


def try_case(reader: Reader, seeds: list[Files], case: str, place: Path) -> str:
    """Read one case; says whether it was taken or refused, or what was found."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    write_case(reader, seeds, case, place)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        reader.read(place)
        return "read"
    except Finding as found:
        return f"FOUND {found}"
    except BaseException as reason:
        try:
            judge(reason)
        except Finding as found:
            return f"FOUND {found}"
        return "refused"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def in_a_process(reader: Reader, seeds: list[Files], cases: list[str], scratch: Path) -> tuple[Counter[str], list[str]]:
    """A batch of cases in a forked process with a bound on its memory; what kills it is a finding, and the rest is gone on with."""
    counts, found = Counter[str](), []
    while cases:
        inner, outer = os.pipe()
        child = os.fork()
        if not child:
            os.close(inner)
            _child(reader, seeds, cases, scratch, outer)
        os.close(outer)
        with os.fdopen(inner, "rb") as pipe:
            said = pipe.read().decode("utf-8", "replace").splitlines()
        _, status = os.waitpid(child, 0)
        for case, outcome in zip(cases, said, strict=False):
            counts[outcome.partition(" ")[0]] += 1
            if outcome.startswith("FOUND"):
                found.append(f"{case}: {outcome[6:]}")
        done = len(said)
        if done < len(cases):
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            what = {signal.SIGPROF: f"more than {CPU_SECONDS:g} s of work", signal.SIGALRM: f"hung for {WALL_SECONDS:g} s"}.get(
                signal.Signals(number) if number else signal.SIGCHLD, f"the process ended with status {status}")
            counts["FOUND"] += 1
            found.append(f"{cases[done]}: {what}")
            done += 1
        cases = cases[done:]
    return counts, found


def _child(reader: Reader, seeds: list[Files], cases: list[str], scratch: Path, out: int) -> None:
    """Never returns."""
    try:
        torch.set_num_threads(1)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        import warnings
        warnings.simplefilter("ignore")
        for case in cases:
            outcome = try_case(reader, seeds, case, scratch)
            os.write(out, (outcome.replace("\n", " ").replace("\r", " ") + "\n").encode("utf-8", "replace"))
        os._exit(0)
    except BaseException:
        os._exit(99)


def seeds_of(names: list[str]) -> dict[str, list[Files]]:
    """The valid files, made in a process of its own: threads of other libraries do not live on in forks."""
    import pickle

    inner, outer = os.pipe()
    child = os.fork()
    if not child:
        os.close(inner)
        made, known = {}, {}
        try:
            for name in names:
                make = READERS[name].seeds
                known.setdefault(make, None)
                made[name] = known[make] = known[make] or make()
            with os.fdopen(outer, "wb") as pipe:
                pickle.dump(made, pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(outer)
    with os.fdopen(inner, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(content)


def load_everything() -> None:
    """Imports that a case would do, once."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401

    import fedtail.deployment.node
    import fedtail.deployment.registry
    import fedtail.deployment.settings
    import fedtail.deployment.site
    import fedtail.experiment.tune_section
    import fedtail.report.page
    import fedtail.runs.choosing
    import fedtail.runs.execution  # noqa: F401


def fuzz(seconds: float, seed: int = 0, names: list[str] | None = None, batch: int = BATCH) -> tuple[Counter[str], list[str]]:
    """Batches of cases for one reader after the other; counts, and findings with the name of their case."""
    load_everything()
    names = names or list(READERS)
    seeds, counts, found = seeds_of(names), Counter[str](), []
    end, number = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as place:
        while time.monotonic() < end:
            for name in names:
                cases = [f"{seed}/{name}/{k}" for k in range(number, number + batch)]
                came, told = in_a_process(READERS[name], seeds[name], cases, Path(place) / "case")
                counts += came + Counter({f"{name}": len(cases)})
                found += told
                if time.monotonic() >= end:
                    break
            number += batch
    return counts, found


def one_case(case: str, keep: Path | None = None) -> None:
    """Read one case here, with its whole trace."""
    load_everything()
    name = case.split("/")[1]
    seeds = seeds_of([name])[name]
    place = keep or Path(tempfile.mkdtemp())
    place.mkdir(exist_ok=True)
    write_case(READERS[name], seeds, case, place)
    print(f"in {place}")
    READERS[name].read(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=list(READERS))
    parser.add_argument("--case", help="one case, read here with its trace")
    given = parser.parse_args()
    if given.case:
        one_case(given.case)
        return 0
    counts, found = fuzz(given.seconds, given.seed, given.reader)
    alike = Counter(text.partition(": ")[2].split(": ")[0] for text in found)
    for what, times in alike.most_common():
        print(f"{times:5d}  {next(text for text in found if text.partition(': ')[2].split(': ')[0] == what)}")
    print(f"{counts['read']} read, {counts['refused']} refused, {len(found)} findings; "
          f"{', '.join(f'{counts[name]} {name}' for name in READERS if counts[name])}")
    return int(bool(found))



if __name__ == "__main__":
    raise SystemExit(main())
