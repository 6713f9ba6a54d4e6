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
from fedtail.data.tables import read_npy_header
from fedtail.losses import IGNORED
from fedtail.reading import Unreadable, read_json, short_text

FORMAT, VERSION = "fedtail population", 2
FORMER = 1                                              # which padded sequences of numbers with -100, not with NaN
_MANIFEST = "population.json"
_NEEDED, _OPTIONAL = ("targets", "start", "size", "mass", "key"), ("group", "names")
_KINDS = {"start": "<i8", "size": "<i8", "mass": "<f8", "key": "<i8", "group": "<i8"}
_MANIFEST_BYTES = 1 << 20
_BLOCK = 1 << 26                                        # bytes gathered at once while saving,
_BLOCK_EXAMPLES = 1 << 21                               # of no more examples


def save_population(population: Population, folder: str | Path) -> None:
    """Write the population to `folder`, as `.npy` files and `population.json`, for `open_population`.

    Only the clients' own examples are written, one client after another, so a selection is saved at its own size. They are
    written to a new folder beside it, which is then renamed: a crash leaves the old one or none, never half of one. A saved
    population that is there is replaced. Raises FileExistsError for a folder that holds anything else, ValueError for a
    population without clients and for one that is scaled.
    """
    place = Path(os.path.abspath(folder))
    if not len(population):
        raise ValueError("this population has no clients, so there is nothing to save.")
    if population.scaling is not None:
        raise ValueError("these inputs are scaled, and by what would be lost in the folder. Save the population before it "
                         "is scaled.")
    _check_folder_replaceable(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    writing = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        writing.mkdir()
        _write_arrays(population, writing)
        _replace_folder(writing, place)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def open_population(folder: str | Path) -> Population:
    """Open a saved population by memory-mapping its files; writing to a tensor does not change them.

    The cost does not depend on the number of examples: the clients' sizes, starts and masses are read to check them, the
    examples are not. The exception is a folder of format version 1 with sequences of numbers as targets: they are read, and
    -100 among them raises ValueError, since it was padding then. Raises FileNotFoundError where the folder is no saved
    population or lacks a file, ValueError where it is damaged.
    """
    place = Path(folder)
    manifest = _read_manifest(place)
    arrays = {name: _map_array(place, name, entry) for name, entry in manifest["arrays"].items()}
    _check_array_lengths(place, manifest, arrays)
    if manifest["version"] == FORMER:
        _refuse_former_padding(place, arrays["targets"])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "names"}
    inputs = {name.partition(".")[2]: tensors[name] for name in tensors if name.startswith("inputs.")}
    return Population(
        inputs=inputs or tensors["inputs"], targets=tensors["targets"], start=tensors["start"], size=tensors["size"],
        mass=tensors["mass"], key=tensors["key"], group=tensors.get("group"),
        names=np.asarray(arrays["names"]) if "names" in arrays else None, folder=place.resolve(),
        columns=_names_in_manifest(place, manifest, "columns"), classes=_names_in_manifest(place, manifest, "classes"),
    )


def _names_in_manifest(place: Path, manifest: dict[str, Any], name: str) -> tuple[str, ...] | None:
    """The names of features or classes in the manifest of `place`, under `name`; None without. ValueError for another kind."""
    held = manifest.get(name)
    if held is not None and not (isinstance(held, list) and all(isinstance(one, str) for one in held)):
        raise ValueError(f"{place / _MANIFEST} has {name} that are no list of texts. Save the population again.")
    return None if held is None else tuple(held)


def _write_arrays(population: Population, folder: Path) -> None:
    """Write the arrays of a population and, last, its manifest `population.json` to an empty folder.

    Examples are written in client order.
    """
    size = population.size
    start = size.cumsum(0) - size
    inputs = population.inputs
    examples = {f"inputs.{k}": v for k, v in inputs.items()} if isinstance(inputs, dict) else {"inputs": inputs}
    arrays = {}
    for name, tensor in {**examples, "targets": population.targets}.items():
        arrays[name] = _write_rows(folder, name, _as_numpy(tensor, name), population)
    clients = {"start": start, "size": size, "mass": population.mass, "key": population.key, "group": population.group}
    per_client = {name: _as_numpy(tensor, name) for name, tensor in clients.items() if tensor is not None}
    if population.names is not None:
        per_client["names"] = as_labels(population.names, "names")
    for name, array in per_client.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
        arrays[name] = array
    described = {name: {"dtype": array.dtype.str, "shape": list(array.shape)} for name, array in arrays.items()}
    named = {"columns": population.columns, "classes": population.classes}
    manifest = {"format": FORMAT, "version": VERSION, "clients": len(size), "examples": population.num_examples,
                "arrays": described, **{name: list(held) for name, held in named.items() if held is not None}}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _write_rows(folder: Path, name: str, values: np.ndarray, population: Population) -> np.ndarray:
    """Write the rows of `values` that are the population's examples, client by client, to `name.npy`; returns it, memory-mapped.

    Rows are found and copied block by block, so that memory does not grow with the number of examples. Raises ValueError for a
    key of `inputs` that is not an identifier, so that it cannot be a file name.
    """
    if name.startswith("inputs.") and not name.removeprefix("inputs.").isidentifier():
        raise ValueError(f"x[{name.removeprefix('inputs.')!r}] cannot be a file name. Call it by a plain word, as the "
                         "module's argument must be.")
    shape = (population.num_examples, *values.shape[1:])
    file = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=values.dtype, shape=shape)
    step, begin = min(_BLOCK_EXAMPLES, max(1, _BLOCK // max(1, values[:1].nbytes))), 0
    for few in population.client_blocks(step):
        rows = few.example_clients_and_rows()[1].numpy()
        for low in range(0, len(rows), step):
            few_rows = rows[low:low + step]
            file[begin:begin + len(few_rows)] = values[few_rows]
            begin += len(few_rows)
    file.flush()
    return file


def _as_numpy(tensor: Tensor, name: str) -> np.ndarray:
    """`tensor`, from any device, as a NumPy array of its shape; on the CPU it shares the tensor's memory.

    Raises TypeError for a dtype that NumPy lacks, such as bfloat16; `name` only words the error.
    """
    try:
        return tensor.detach().cpu().numpy()
    except TypeError:
        raise TypeError(f"{name} holds {tensor.dtype}, which .npy files do not have. Convert it before building the "
                        "population, for example with .float().") from None


def _check_folder_replaceable(place: Path) -> None:
    """Raise FileExistsError where `place` holds anything but a saved population; a missing or empty folder is fine."""
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


def _replace_folder(writing: Path, place: Path) -> None:
    """Rename the folder `writing` to `place`. A folder already there is deleted, or put back where the rename fails."""
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
    """The content of `population.json` in the folder `place`: `format`, `version`, `clients`, `examples`, and `arrays` by name.

    Format, version and the names of the arrays are checked. Raises FileNotFoundError where the file is missing, ValueError where
    it does not describe a saved population.
    """
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
        raise ValueError(f"{place} has format version {short_text(repr(manifest.get('version')))}; this fedtail reads {VERSION}. "
                         "Install the fedtail that wrote it, or save the population again.")
    names = list(manifest["arrays"]) if isinstance(manifest.get("arrays"), dict) else []
    inputs = [name for name in names if name == "inputs" or name.partition("inputs.")[2].isidentifier()]
    rest = set(names) - set(inputs)
    if not inputs or ("inputs" in inputs and len(inputs) > 1) or not set(_NEEDED) <= rest <= {*_NEEDED, *_OPTIONAL}:
        raise ValueError(f"{place / _MANIFEST} names the arrays {short_text(', '.join(names)) or 'none'}; inputs and "
                         f"{', '.join(_NEEDED)} are needed. Save the population again.")
    return manifest


def _refuse_former_padding(place: Path, targets: np.ndarray) -> None:
    """Raise ValueError where the targets of a folder of the former format version are sequences of numbers that contain -100.

    In that version it may be padding or a number, which cannot be told apart. Targets are read in blocks, so that mapped data
    stay on disk; `place` only words the error.
    """
    if targets.dtype.kind != "f" or targets.ndim == 1:
        return
    step = max(1, _BLOCK // max(1, targets[:1].nbytes))
    if any((targets[begin:begin + step] == IGNORED).any() for begin in range(0, len(targets), step)):
        raise ValueError(f"{place} was saved by an earlier fedtail and has -100 among the numbers in y: then it was padding, now "
                         "it is a number. Build the population again from its source, and save it.")


def _map_array(place: Path, name: str, entry: Any) -> np.ndarray:
    """The array in `name.npy` of the folder `place`, memory-mapped: writing to it does not change the file.

    `entry` is the manifest's dtype and shape of it. Raises FileNotFoundError where the file is missing, ValueError where it is
    cut short, is not as `entry` says, or has a dtype that a population does not have.
    """
    file = place / f"{name}.npy"
    if not file.is_file():
        raise FileNotFoundError(f"{place} lacks {name}.npy, which {_MANIFEST} names. Save the population "
                                "again.")
    try:
        with file.open("rb") as stream:
            shape, by_columns, kind = read_npy_header(stream, name)  # before numpy maps it: a header can make that divide by zero
            begins = stream.tell()
        whole = min(shape, default=0) >= 0 and begins + math.prod(shape) * kind.itemsize == file.stat().st_size
    except Exception as reason:                                     # whatever a damaged file makes numpy say
        raise ValueError(f"{file} is damaged or cut short ({short_text(reason)}). Save the population again.") from None
    if not whole or not kind.itemsize:
        raise ValueError(f"{file} is damaged or cut short. Save the population again.")
    found = {"dtype": kind.str, "shape": list(shape)}
    if found != entry:
        raise ValueError(f"{name}.npy holds {found}, but {_MANIFEST} says {short_text(entry)}. Save the population again.")
    if (name in _KINDS and kind.str != _KINDS[name]) or (name not in (*_KINDS, "names") and kind.kind not in "biuf"):
        raise ValueError(f"{name}.npy holds {kind}, {_KINDS.get(name, 'numbers')} is needed. Save the population again.")
    return np.memmap(file, kind, "c", begins, shape, "F" if by_columns else "C")      # copy on write


def _check_array_lengths(place: Path, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError where an array does not have the length that the manifest says, or where clients are not valid.

    A client must have at least one example, rows within the examples, a positive and finite mass, and a group from 0. `place`
    only words the errors.
    """
    clients, examples = manifest.get("clients"), manifest.get("examples")
    for name, array in arrays.items():
        of_clients = name in ("start", "size", "mass", "key", *_OPTIONAL)
        count = clients if of_clients else examples
        if not array.ndim or type(count) is not int or len(array) != count or (of_clients and array.ndim != 1):
            raise ValueError(f"{name}.npy has shape {array.shape}, but {_MANIFEST} says {short_text(clients)} clients "
                             f"and {short_text(examples)} examples. Save the population again.")
    start, size = arrays["start"], arrays["size"]
    if not clients or size.min() < 1 or size.max() > examples or start.min() < 0 or (start > examples - size).any():
        raise ValueError(f"{place} has clients that reach outside its {examples} examples. Save the population again.")
    mass, group = arrays["mass"], arrays.get("group")
    if not (np.isfinite(mass) & (mass > 0)).all() or (group is not None and group.min() < 0):
        raise ValueError(f"{place} has clients whose mass is not positive and finite, or whose group is below 0. Save the "
                         "population again.")
