"""Checkpoints: all it takes to go on, in one file that is whole or not there; the one before it is kept.

What clients remember is in the file too, or, where it is large, in row stores beside it, of which it holds the marks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtail.algorithm import State, member_states
from fedtail.client_memory import ClientMemory, NodeMemory
from fedtail.privacy.ledger_file import LedgerMark
from fedtail.reading import json_value
from fedtail.rows import Mark, Rows, RowStore
from fedtail.rows.writer_lock import refuse_other_writers
from fedtail.runs.files import RunError, sync_folder, write_atomically
from fedtail.runs.run_folder import LEDGER
from fedtail.training import Trained

FORMAT = "fedtail checkpoint 1"
FORMER = {"dual": "risk 0", "kept": "iterate 0", "aggregate": "aggregate 0"}      # names in version 0.1, of single tensors,
FORMER_PARTS = {"optimizer": "server"}                                            # and of several
MEMORY = "memory"      # the folder of the row stores, within the run's


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round, and the sizes and digests that its growing files had then."""

    round: int
    state: Any                              # State, or a tuple of them for a Family
    memory: ClientMemory
    failed: int
    lines: dict[str, Sequence[Any]]         # size and digest of each growing file

    def to_trained(self, algorithm: Any, task: Any, seed: int) -> Trained:
        """The checkpoint as a `Trained`, from which `fedtail.resume` continues with this algorithm, task and seed.

        Its ledger is new and empty: checkpoints do not hold the ledger.
        """
        return Trained(algorithm, task, self.state, seed, self.failed, self.memory)


class Checkpoints:
    """The two checkpoint files of a run, written in turn: while one is being replaced, the other is intact."""

    def __init__(self, folder: Path):
        """The checkpoints in a run's `folder`; nothing is read or written yet."""
        self.folder = folder
        self.files = [folder / "checkpoint-a.safetensors", folder / "checkpoint-b.safetensors"]
        self._newest: Path | None = None
        self._stores: dict[Path, set[str]] = {}      # files of row stores that each checkpoint names

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """Read the newest undamaged checkpoint; returns it, and a list with a sentence about each damaged one.

        Returns (None, []) where there is no checkpoint. Raises RunError where there are some and all are damaged. The next `save`
        replaces the other file, not the newest.
        """
        found, problems = {}, []
        for path in self.files:
            if path.is_file():
                try:
                    found[path] = _read_checkpoint(path, self.folder / MEMORY)
                    self._stores[path] = set(_row_store_files(found[path].memory))
                except Exception as reason:      # whatever a damaged file makes the reader say
                    text = (str(reason) or type(reason).__name__).splitlines()[0]
                    problems.append(f"{path.name} is damaged ({text[:300]})")
        if not found and problems:
            raise RunError(f"no checkpoint in {self.folder} can be read: {'; '.join(problems)}. Its metrics are still there; "
                           "start again in another folder.")
        if not found:
            return None, []
        self._newest = max(found, key=lambda path: found[path].round)
        newest = found[self._newest]
        return newest, [f"{problem}; going on from {self._newest.name}, round {newest.round}" for problem in problems]

    def save(self, trained: Trained, lines: dict[str, Sequence[Any]]) -> None:
        """Write a checkpoint of `trained`, which replaces the older or damaged file; the newest one stays until it is on disk.

        `lines` has the size and digest of each growing file by name. Row stores of client memory are forced to disk first;
        those that neither checkpoint names are deleted. Raises RunError where a file could not be written or the memory is in
        another folder, RowsError where another process writes to the row stores.
        """
        place = self.files[0] if self._newest == self.files[1] else self.files[1]
        refuse_other_writers(self.folder / MEMORY)
        self._sync_row_stores(trained.memory)
        write_atomically(place, _checkpoint_bytes(trained, lines))
        self._newest, self._stores[place] = place, set(_row_store_files(trained.memory))
        self._remove_unnamed_stores()

    def _sync_row_stores(self, memory: ClientMemory) -> None:
        """Force the row stores of the clients' memory to disk, before a checkpoint names them.

        Raises RunError where one is not in the folder "memory" of the run. Memory held in tensors needs nothing.
        """
        for rows in memory.kept.values():
            if isinstance(rows, Rows):
                if rows.store.file.path.parent.resolve() != (self.folder / MEMORY).resolve():
                    raise RunError(f"what clients remember is in {rows.store.file.path.parent}, but a checkpoint names what is "
                                   f"in {self.folder / MEMORY}. Train with a fleet whose folder is that one.")
                rows.store.file.sync()
                sync_folder(self.folder / MEMORY)

    def _remove_unnamed_stores(self) -> None:
        """Delete the row stores in the run's memory folder that neither checkpoint names."""
        named = set().union(*self._stores.values())
        for path in (self.folder / MEMORY).glob("*.rows"):
            if path.name not in named:
                path.unlink(missing_ok=True)


def ledger_mark(folder: Path) -> tuple[int, LedgerMark | None] | None:
    """The round of the newest readable checkpoint in `folder`, and its mark of the ledger: size, digest and number of rounds.

    None where no checkpoint can be read. The mark is None in a checkpoint written up to version 0.2.0, which held none.
    Tensors are not read, and their digest is not checked.
    """
    from safetensors import SafetensorError, safe_open

    found: list[tuple[int, LedgerMark | None]] = []
    for path in Checkpoints(folder).files:
        try:
            with safe_open(path, "pt") as file:
                told = json.loads((file.metadata() or {}).get("about", "{}"))
            mark = told["lines"].get(LEDGER)
            found.append((told["round"], LedgerMark(*mark) if mark else None))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            continue                     # missing, or damaged: the other one is whole
    return max(found, key=lambda pair: pair[0]) if found else None


def _checkpoint_bytes(trained: Trained, lines: dict[str, Sequence[Any]]) -> bytes:
    """A checkpoint of `trained` as the bytes of a safetensors file: tensors, other values as metadata, and a digest of both.

    The tensors are the states of all models and the clients' memory where it is in tensors. Memory in row stores is not copied:
    the metadata names its files. `lines` has the size and digest of each growing file.
    """
    from safetensors.torch import save

    states, memory = member_states(trained.state), trained.memory
    small = {f"kept {name}": kept for name, kept in memory.kept.items() if isinstance(kept, Tensor)}
    named = {"memory key": memory.key, **small} if small else {}
    rows = {name: kept.mark for name, kept in memory.kept.items() if isinstance(kept, Rows)}
    nodes = {"training": memory.nodes.training.hex(), "lost": memory.nodes.lost} if memory.nodes else None
    for k, state in enumerate(states):
        named |= _named_tensors(k, state)
    tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    about = json.dumps({"format": FORMAT, "round": states[0].round, "models": len(states), "failed": trained.failed,
                        "lines": lines, "family": isinstance(trained.state, tuple), **({"rows": rows} if rows else {}),
                        **({"nodes": nodes} if nodes else {})}, sort_keys=True)
    return save(tensors, {"about": about, "check": _content_digest(tensors, about)})


def _row_store_files(memory: ClientMemory) -> list[str]:
    """The names of the row-store files that hold the clients' memory; empty where it is held in tensors."""
    return [kept.mark.file for kept in memory.kept.values() if isinstance(kept, Rows)]


def _read_checkpoint(path: Path, stores: Path) -> Checkpoint:
    """The checkpoint in the file `path`; row stores of client memory are opened in the folder `stores`.

    Raises ValueError, or another exception of the reader, where the file is damaged or no checkpoint. Tensors are copied, since
    those in a memory-mapped file are aligned to 8 bytes only and PyTorch's to 64, and alignment changes how matrix products are
    rounded.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about, check = (file.metadata() or {}).get("about", "{}"), (file.metadata() or {}).get("check")
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}      # noqa: SIM118 (not a dict)
    told = json_value(about, "what it says")
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise ValueError("not a checkpoint of this version")
    if _content_digest(tensors, about) != check:
        raise ValueError("its contents do not match their digest")
    if not all(type(told[name]) is int and told[name] >= 0 for name in ("round", "models", "failed")):
        raise ValueError("what it says of its rounds and models cannot be")
    states = tuple(_state_of_model(k, tensors, told["round"]) for k in range(told["models"]))
    kept: dict[str, Tensor | Rows] = {name.removeprefix("kept "): t for name, t in tensors.items() if name.startswith("kept ")}
    kept |= {name: RowStore.open(stores, Mark(*mark)).rows for name, mark in told.get("rows", {}).items()}
    nodes = NodeMemory(bytes.fromhex(told["nodes"]["training"]), tuple(told["nodes"]["lost"])) if "nodes" in told else None
    memory = ClientMemory(tensors.get("memory key", torch.zeros(0, dtype=torch.int64)), kept, nodes)
    return Checkpoint(told["round"], states if told["family"] else states[0], memory, told["failed"], told["lines"])


def _named_tensors(k: int, state: State) -> dict[str, Tensor]:
    """The tensors of the state of model `k` by their names in a checkpoint, such as "0 params" and, of part risk, "0 risk 0"."""
    kept = {f"{k} {name} {i}": tensor for name, tensors in state.parts.items() for i, tensor in enumerate(tensors)}
    return {f"{k} params": state.params, **kept}


def _state_of_model(k: int, tensors: dict[str, Tensor], round: int) -> State:
    """The state of model `k` after `round` rounds, from the named tensors of a checkpoint.

    Tensors of other models are ignored. Names of version 0.1 are converted.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        model, _, rest = name.partition(" ")
        if model == str(k) and rest != "params":
            part, _, place = FORMER.get(rest, rest).rpartition(" ")
            parts.setdefault(FORMER_PARTS.get(part, part), {})[int(place)] = tensor
    return State(tensors[f"{k} params"], round, {name: tuple(kept[i] for i in sorted(kept)) for name, kept in parts.items()})


def _content_digest(tensors: dict[str, Tensor], about: str) -> str:
    """The BLAKE2b digest (hexadecimal) of the metadata text `about` and of all tensors: names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
