"""Checkpoints: all it takes to go on, in one file that is whole or not there; the one before it is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtail.algorithm import State, states_of
from fedtail.clients import ClientMemory
from fedtail.runs.files import RunError, write_whole
from fedtail.training import Trained

FORMAT = "fedtail checkpoint 1"
FORMER = {"dual": "risk 0", "kept": "iterate 0", "aggregate": "aggregate 0"}      # names in version 0.1, of single tensors,
FORMER_PARTS = {"optimizer": "server"}                                            # and of several


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood, and how much of its growing files belongs to it."""

    round: int
    state: Any                              # State, or a tuple of them for a Family
    memory: ClientMemory
    failed: int
    lines: dict[str, Sequence[Any]]         # size and digest of each growing file

    def trained(self, algorithm: Any, task: Any, seed: int) -> Trained:
        """What `train(start=...)` goes on from."""
        return Trained(algorithm, task, self.state, seed, self.failed, self.memory)


class Checkpoints:
    """Two files in turn: while one is being replaced, the other is whole."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = [folder / "checkpoint-a.safetensors", folder / "checkpoint-b.safetensors"]
        self._newest: Path | None = None

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with those that are not; None where none was written."""
        found, problems = {}, []
        for path in self.files:
            if path.exists():
                try:
                    found[path] = _read(path)
                except Exception as reason:      # whatever a damaged file makes the reader say
                    text = (str(reason) or type(reason).__name__).splitlines()[0]
                    problems.append(f"{path.name} is damaged ({text[:100]})")
        if not found and problems:
            raise RunError(f"no checkpoint in {self.folder} can be read: {'; '.join(problems)}. Its metrics are still there; "
                           "start again in another folder.")
        if not found:
            return None, []
        self._newest = max(found, key=lambda path: found[path].round)
        newest = found[self._newest]
        return newest, [f"{problem}; going on from {self._newest.name}, round {newest.round}" for problem in problems]

    def save(self, trained: Trained, lines: dict[str, Sequence[Any]]) -> None:
        """Write a new one in the place of the older, or damaged, one."""
        place = self.files[0] if self._newest == self.files[1] else self.files[1]
        write_whole(place, _content(trained, lines))
        self._newest = place


def _content(trained: Trained, lines: dict[str, Sequence[Any]]) -> bytes:
    from safetensors.torch import save

    states, memory = states_of(trained.state), trained.memory
    named = {"memory key": memory.key, **{f"kept {name}": kept for name, kept in memory.kept.items()}} if memory.kept else {}
    for k, state in enumerate(states):
        named |= _named(k, state)
    tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    about = json.dumps({"format": FORMAT, "round": states[0].round, "models": len(states), "failed": trained.failed,
                        "lines": lines, "family": isinstance(trained.state, tuple)}, sort_keys=True)
    return save(tensors, {"about": about, "check": _check(tensors, about)})


def _read(path: Path) -> Checkpoint:
    """What was written. Tensors are copied out of the mapped file: there they lie at any multiple of 8, and where a matrix lies
    decides how its products are rounded; torch's own memory begins at multiples of 64."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about, check = (file.metadata() or {}).get("about", "{}"), (file.metadata() or {}).get("check")
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}      # noqa: SIM118 (not a dict)
    told = json.loads(about)
    if told.get("format") != FORMAT:
        raise ValueError("not a checkpoint of this version")
    if _check(tensors, about) != check:
        raise ValueError("its contents do not match their digest")
    states = tuple(_state(k, tensors, told["round"]) for k in range(told["models"]))
    kept = {name.removeprefix("kept "): tensor for name, tensor in tensors.items() if name.startswith("kept ")}
    memory = ClientMemory(tensors.get("memory key", torch.zeros(0, dtype=torch.int64)), kept)
    return Checkpoint(told["round"], states if told["family"] else states[0], memory, told["failed"], told["lines"])


def _named(k: int, state: State) -> dict[str, Tensor]:
    kept = {f"{k} {name} {i}": tensor for name, tensors in state.parts.items() for i, tensor in enumerate(tensors)}
    return {f"{k} params": state.params, **kept}


def _state(k: int, tensors: dict[str, Tensor], round: int) -> State:
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        model, _, rest = name.partition(" ")
        if model == str(k) and rest != "params":
            part, _, place = FORMER.get(rest, rest).rpartition(" ")
            parts.setdefault(FORMER_PARTS.get(part, part), {})[int(place)] = tensor
    return State(tensors[f"{k} params"], round, {name: tuple(kept[i] for i in sorted(kept)) for name, kept in parts.items()})


def _check(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
