"""Claim: a file or message takes memory in proportion to its size, at most a hundred times it or 256 MiB of numbers, or is refused.

Attacker: whoever sends data, a run folder or a message. Method: small files that stand for very much: zeros deflated, equal values
in parquet's run lengths, one long text for many rows, headers that announce 2^60
rows, and messages that announce more than they bring. Each is read in a process whose address space may grow by 2 GiB.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from outcome import Outcome

MORE = 2 << 30


def npy(shape: str, body: bytes = b"", kind: str = "<f8") -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head + body


def zeros(place: Path) -> None:
    with zipfile.ZipFile(place / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            file.write(npy("(37500000, 1)"))
            for _ in range(75):
                file.write(bytes(4_000_000))
        archive.writestr("y.npy", npy("(0,)"))
        archive.writestr("client.npy", npy("(0,)"))


def announced(place: Path) -> None:
    np.savez(place / "a.npz", y=np.zeros(2), client=np.zeros(2))
    with zipfile.ZipFile(place / "a.npz", "a") as archive:
        archive.writestr("x.npy", npy("(1152921504606846976,)"))


def equal_values(place: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    part = pa.table({"x": np.zeros(2_000_000), "y": np.zeros(2_000_000, np.int64), "client": np.zeros(2_000_000, np.int64)})
    with parquet.ParquetWriter(place / "a.parquet", part.schema, compression="zstd") as writer:
        for _ in range(8):
            writer.write_table(part)


def equal_lists(place: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    long = pa.ListArray.from_arrays([0, 20_000_000], pa.array(np.zeros(20_000_000)))
    part = pa.table({"x": long, "y": np.zeros(1, np.int64), "client": np.zeros(1, np.int64)})
    with parquet.ParquetWriter(place / "a.parquet", part.schema, compression="zstd", write_statistics=False) as writer:
        for _ in range(2):
            writer.write_table(part)


def one_long_text(place: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int32)), pa.array(["a" * 1_000_000]))
    parquet.write_table(pa.table({"x": np.zeros(5000), "y": np.zeros(5000, np.int64), "client": names}), place / "a.parquet")


def open_data(place: Path) -> None:
    from fedtail.data.opening import open_any_data

    open_any_data(next(place.iterdir()))


def mapped(place: Path) -> None:
    from fedtail.data import Population

    Population.from_arrays(np.zeros((4, 1)), np.zeros(4), [0, 0, 1, 1]).save(place / "p")
    (place / "p" / "mass.npy").write_bytes(npy("(-1,)", kind="|S0"))


def open_mapped(place: Path) -> None:
    from fedtail.data import Population

    Population.open(place / "p")


def nothing(place: Path) -> None:
    """The message is in the reading."""


def open_message(place: Path) -> None:
    import msgpack

    from fedtail.deployment.registry import read_node_info

    whole = {"tensor": "<i8", "shape": [2**31, 2**30], "bytes": b""}
    read_node_info(msgpack.packb({"type": "NodeInfo", "fields": {"name": "a", "key": whole, "mass": whole}}))


def many_clients(place: Path) -> None:
    about = {"format": "fedtail run", "version": 1, "name": "a", "seed": 0, "rounds": 1, "members": ["a"], "metrics": ["error"],
             "rates": True, "splits": {"train": 2**40}}
    (place / "run.json").write_text(json.dumps(about))
    (place / "rounds.jsonl").write_text('{"clients": 1099511627776}\n{"round": 1, "asked": null, "members": [{"counted": null}]}\n')


def open_run(place: Path) -> None:
    from fedtail.runs.run_folder import RunFolder

    _ = RunFolder.open(place).rounds


def deep(place: Path) -> None:
    (place / "e.toml").write_text("a." * 200_000 + "a = 1\n")


def open_toml(place: Path) -> None:
    from fedtail.experiment import Source

    Source.read(place / "e.toml")


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "deflated zeros": (zeros, open_data), "2^60 rows announced": (announced, open_data), "run lengths": (equal_values, open_data),
    "lists of run lengths": (equal_lists, open_data), "one long text": (one_long_text, open_data),
    "a header that divides by zero": (mapped, open_mapped), "a message with 2^61 numbers": (nothing, open_message),
    "a run of 2^40 clients": (many_clients, open_run), "a key of 200,000 parts": (deep, open_toml)}


def attack() -> Outcome:
    import pyarrow.parquet  # noqa: F401
    import torch

    import fedtail.deployment.registry  # noqa: F401

    torch.set_num_threads(1)
    broke, sizes = [], []
    for name, (make, read) in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            _in_a_process(lambda make=make, place=place: make(Path(place)), bounded=False)
            sizes.append(sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file()))
            outcome = _in_a_process(lambda read=read, place=place: read(Path(place)))
            if outcome != "refused":
                broke.append(f"{name}: {outcome}")
    return Outcome(not broke, f"{len(CASES)} files of up to {max(sizes) / 1e6:.2f} MB: " + ("; ".join(broke) or "all refused"))


def _in_a_process(work: Callable[[], None], bounded: bool = True) -> str:
    """What becomes of some work in a forked process: read, refused, an error of another kind, or an end."""
    inner, outer = os.pipe()
    child = os.fork()
    if not child:
        os.close(inner)
        try:
            if bounded:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + MORE, used + MORE))
                resource.setrlimit(resource.RLIMIT_CPU, (15, 15))
            work()
            said = "read"
        except ValueError:
            said = "refused"
        except BaseException as reason:
            said = f"{type(reason).__name__}: {str(reason)[:100]}"
        os.write(outer, said.encode())
        os._exit(0)
    os.close(outer)
    with open(inner, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"the process ended with status {status}"
