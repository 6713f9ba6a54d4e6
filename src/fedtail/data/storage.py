"""Populations on disk: a folder of mapped `.npy` files."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import as_labels
from fedtail.data.population import Population
from fedtail.data.tables import npy_header
from fedtail.losses import IGNORED
from fedtail.reading import Unreadable, read_json, shorten

FORMAT, VERSION = "fedtail population", 2
FORMER = 1                                              # which padded sequences of numbers with -100, not with NaN
_MANIFEST = "population.json"
_NEEDED, _OPTIONAL = ("targets", "start", "size", "mass", "key"), ("group", "names")
_KINDS = {"start": "<i8", "size": "<i8", "mass": "<f8", "key": "<i8", "group": "<i8"}
_MANIFEST_BYTES = 1 << 20
_BLOCK = 1 << 26                                        # bytes gathered at once while saving


def save_population(population: Population, folder: str | Path) -> None:
    """Write a folder that `open_population` maps: `.npy` files and `population.json`.

    Only the clients' own examples are written, one client after another, so a selection is saved at its own size. The folder
    is written beside its place and then renamed: a crash leaves the old one or none, never half of one. A saved population
    that is there is replaced; a folder that holds anything else is refused with a FileExistsError.
    """
    place = Path(os.path.abspath(folder))
    if not len(population):
        raise ValueError("this population has no clients, so there is nothing to save.")
    _check_replaceable(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    writing = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        writing.mkdir()
        _write_arrays(population, writing)
        _put_in_place(writing, place)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def open_population(folder: str | Path) -> Population:
    """Map a saved population: data stay on disk until read, and what is written to a tensor never reaches the files.

    The cost does not depend on the number of examples; sizes and starts of the clients are read once to check them. Only a
    folder of format version 1 whose targets are sequences of numbers is read through: it is refused (ValueError) where it
    holds -100, which was padding then. Raises FileNotFoundError where the folder is no saved population, ValueError where it
    is damaged.
    """
    place = Path(folder)
    manifest = _read_manifest(place)
    arrays = {name: _map_array(place, name, entry) for name, entry in manifest["arrays"].items()}
    _check_counts(place, manifest, arrays)
    if manifest["version"] == FORMER:
        _refuse_former_padding(place, arrays["targets"])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "names"}
    inputs = {name.partition(".")[2]: tensors[name] for name in tensors if name.startswith("inputs.")}
    return Population(
        inputs=inputs or tensors["inputs"], targets=tensors["targets"], start=tensors["start"], size=tensors["size"],
        mass=tensors["mass"], key=tensors["key"], group=tensors.get("group"),
        names=np.asarray(arrays["names"]) if "names" in arrays else None, folder=place.resolve(),
    )


def _write_arrays(population: Population, folder: Path) -> None:
    """Write the arrays of a population and, last, its manifest to an empty folder, examples in client order."""
    size = population.size
    start = size.cumsum(0) - size
    rows = population.examples()[1]
    inputs = population.inputs
    examples = {f"inputs.{k}": v for k, v in inputs.items()} if isinstance(inputs, dict) else {"inputs": inputs}
    arrays = {}
    for name, tensor in {**examples, "targets": population.targets}.items():
        arrays[name] = _write_rows(folder, name, _as_numpy(tensor, name), rows.numpy())
    clients = {"start": start, "size": size, "mass": population.mass, "key": population.key, "group": population.group}
    per_client = {name: _as_numpy(tensor, name) for name, tensor in clients.items() if tensor is not None}
    if population.names is not None:
        per_client["names"] = as_labels(population.names, "names")
    for name, array in per_client.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
        arrays[name] = array
    described = {name: {"dtype": array.dtype.str, "shape": list(array.shape)} for name, array in arrays.items()}
    manifest = {"format": FORMAT, "version": VERSION, "clients": len(size), "examples": len(rows), "arrays": described}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _write_rows(folder: Path, name: str, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Write the given rows of an array to `name.npy`, in blocks; returns the mapped file as an array.

    A key of `inputs` that is no identifier, so no file name, is refused (ValueError).
    """
    if name.startswith("inputs.") and not name.removeprefix("inputs.").isidentifier():
        raise ValueError(f"x[{name.removeprefix('inputs.')!r}] cannot be a file name. Call it by a plain word, as the "
                         "module's argument must be.")
    shape = (len(rows), *values.shape[1:])
    file = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=values.dtype, shape=shape)
    step = max(1, _BLOCK // max(1, values[:1].nbytes))
    for begin in range(0, len(rows), step):
        file[begin:begin + step] = values[rows[begin:begin + step]]
    file.flush()
    return file


def _as_numpy(tensor: Tensor, name: str) -> np.ndarray:
    """A tensor, from any device, as an array; raises TypeError for a dtype that NumPy lacks, such as bfloat16."""
    try:
        return tensor.detach().cpu().numpy()
    except TypeError:
        raise TypeError(f"{name} holds {tensor.dtype}, which .npy files do not have. Convert it before building the "
                        "population, for example with .float().") from None


def _check_replaceable(place: Path) -> None:
    """Refuse (FileExistsError) a folder that holds anything but a saved population; a missing or empty one is fine."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    try:
        own = {_MANIFEST, *(f"{name}.npy" for name in _read_manifest(place)["arrays"])}
    except (OSError, ValueError):
        raise FileExistsError(f"{place} exists and is not a saved population of this version, so it is not "
                              "overwritten. Choose another folder, or remove it yourself.") from None
    foreign = sorted({path.name for path in place.iterdir()} - own)
    if foreign:
        raise FileExistsError(f"{place} also holds {', '.join(foreign)}, which saving would remove. Choose another "
                              "folder, or move them away.")


def _put_in_place(writing: Path, place: Path) -> None:
    """Rename the written folder to its place and remove the one that was there, which is put back if the rename fails."""
    if not place.exists():
        writing.rename(place)
        return
    old = writing.with_name(f"{writing.name}.old")
    place.rename(old)
    try:
        writing.rename(place)
    except OSError:
        old.rename(place)
        raise
    shutil.rmtree(old)


def _read_manifest(place: Path) -> dict[str, Any]:
    """The checked content of `population.json`; raises FileNotFoundError where there is none, ValueError where it is damaged."""
    if not (place / _MANIFEST).is_file():
        raise FileNotFoundError(f"{place} is not a saved population: it has no {_MANIFEST}. Write one with "
                                "population.save(folder).")
    try:
        manifest = read_json(place / _MANIFEST, _MANIFEST_BYTES)
    except Unreadable as reason:
        raise ValueError(f"{str(reason).removesuffix('.')}. Save the population again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{place / _MANIFEST} does not describe a saved population. Write one with "
                         "population.save(folder).")
    if manifest.get("version") not in (FORMER, VERSION):
        raise ValueError(f"{place} has format version {shorten(repr(manifest.get('version')))}; this fedtail reads {VERSION}. "
                         "Install the fedtail that wrote it, or save the population again.")
    names = list(manifest["arrays"]) if isinstance(manifest.get("arrays"), dict) else []
    inputs = [name for name in names if name == "inputs" or name.partition("inputs.")[2].isidentifier()]
    rest = set(names) - set(inputs)
    if not inputs or ("inputs" in inputs and len(inputs) > 1) or not set(_NEEDED) <= rest <= {*_NEEDED, *_OPTIONAL}:
        raise ValueError(f"{place / _MANIFEST} names the arrays {shorten(', '.join(names)) or 'none'}; inputs and "
                         f"{', '.join(_NEEDED)} are needed. Save the population again.")
    return manifest


def _refuse_former_padding(place: Path, targets: np.ndarray) -> None:
    """Refuse (ValueError) targets of the former version that hold -100 among sequences of numbers.

    There it may be padding or a number, and nobody can tell. Read in blocks, so that mapped data stay on disk.
    """
    if targets.dtype.kind != "f" or targets.ndim == 1:
        return
    step = max(1, _BLOCK // max(1, targets[:1].nbytes))
    if any((targets[begin:begin + step] == IGNORED).any() for begin in range(0, len(targets), step)):
        raise ValueError(f"{place} was saved by an earlier fedtail and has -100 among the numbers in y: then it was padding, now "
                         "it is a number. Build the population again from its source, and save it.")


def _map_array(place: Path, name: str, entry: Any) -> np.ndarray:
    """The array `name.npy`, mapped copy on write, so that writing to it never reaches the file.

    Raises a ValueError where the file is cut short, or its dtype and shape are not those of `entry`, the manifest's line
    about it.
    """
    file = place / f"{name}.npy"
    if not file.is_file():
        raise FileNotFoundError(f"{place} lacks {name}.npy, which {_MANIFEST} names. Save the population "
                                "again.")
    try:
        with file.open("rb") as stream:
            shape, by_columns, kind = npy_header(stream, name)      # before numpy maps it: a header can make that divide by zero
            begins = stream.tell()
        whole = min(shape, default=0) >= 0 and begins + math.prod(shape) * kind.itemsize == file.stat().st_size
    except Exception as reason:                                     # whatever a damaged file makes numpy say
        raise ValueError(f"{file} is damaged or cut short ({shorten(reason)}). Save the population again.") from None
    if not whole or not kind.itemsize:
        raise ValueError(f"{file} is damaged or cut short. Save the population again.")
    found = {"dtype": kind.str, "shape": list(shape)}
    if found != entry:
        raise ValueError(f"{name}.npy holds {found}, but {_MANIFEST} says {shorten(entry)}. Save the population again.")
    if (name in _KINDS and kind.str != _KINDS[name]) or (name not in (*_KINDS, "names") and kind.kind not in "biuf"):
        raise ValueError(f"{name}.npy holds {kind}, {_KINDS.get(name, 'numbers')} is needed. Save the population again.")
    return np.memmap(file, kind, "c", begins, shape, "F" if by_columns else "C")      # copy on write


def _check_counts(place: Path, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError where arrays do not fit the manifest's counts, or a client reaches beyond the examples.

    Also where a mass is not positive and finite, or a group is below 0.
    """
    clients, examples = manifest.get("clients"), manifest.get("examples")
    for name, array in arrays.items():
        of_clients = name in ("start", "size", "mass", "key", *_OPTIONAL)
        count = clients if of_clients else examples
        if not array.ndim or type(count) is not int or len(array) != count or (of_clients and array.ndim != 1):
            raise ValueError(f"{name}.npy has shape {array.shape}, but {_MANIFEST} says {shorten(clients)} clients "
                             f"and {shorten(examples)} examples. Save the population again.")
    start, size = arrays["start"], arrays["size"]
    if not clients or size.min() < 1 or size.max() > examples or start.min() < 0 or (start > examples - size).any():
        raise ValueError(f"{place} has clients that reach outside its {examples} examples. Save the population again.")
    mass, group = arrays["mass"], arrays.get("group")
    if not (np.isfinite(mass) & (mass > 0)).all() or (group is not None and group.min() < 0):
        raise ValueError(f"{place} has clients whose mass is not positive and finite, or whose group is below 0. Save the "
                         "population again.")
