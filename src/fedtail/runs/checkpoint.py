"""Checkpoints: all it takes to go on, in one file that is whole or not there; the one before it is kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtail.algorithm import State
from fedtail.clients import ClientMemory
from fedtail.runs.files import RunError, write_whole
from fedtail.training import Trained

NEWEST, BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"
FORMAT = "fedtail checkpoint 1"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood, and how much of its growing files belongs to it."""

    round: int
    state: Any                              # State, or a tuple of them for a Family
    memory: ClientMemory
    failed: int
    sizes: dict[str, int]                   # bytes of each growing file

    def trained(self, algorithm: Any, task: Any, seed: int) -> Trained:
        """What `train(start=...)` goes on from."""
        return Trained(algorithm, task, self.state, seed, self.failed, self.memory)


def save_checkpoint(folder: Path, trained: Trained, sizes: dict[str, int]) -> None:
    """Write the newest checkpoint; the one there was becomes the one before."""
    from safetensors.torch import save

    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    named = {"memory key": trained.memory.key, **{f"kept {name}": kept for name, kept in trained.memory.kept.items()}}
    for k, state in enumerate(states):
        named |= _named(k, state)
    tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    about = json.dumps({"format": FORMAT, "round": states[0].round, "models": len(states), "failed": trained.failed,
                        "sizes": sizes, "family": isinstance(trained.state, tuple)}, sort_keys=True)
    content = save(tensors, {"about": about, "check": _check(tensors, about)})
    beside = folder / f".{NEWEST}.new"
    write_whole(beside, content)
    if (folder / NEWEST).exists():
        (folder / NEWEST).replace(folder / BEFORE)
    beside.replace(folder / NEWEST)


def load_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with those that are not; None where none was written."""
    problems: list[str] = []
    there = [folder / name for name in (NEWEST, BEFORE) if (folder / name).exists()]
    for path in there:
        try:
            found = _read(path)
            return found, [f"{problem}; going on from {path.name}, round {found.round}" for problem in problems]
        except Exception as reason:      # whatever a damaged file makes the reader say
            problems.append(f"{path.name} is damaged ({(str(reason) or type(reason).__name__).splitlines()[0][:100]})")
    if there:
        raise RunError(f"no checkpoint in {folder} can be read: {'; '.join(problems)}. Its metrics are still there; start again "
                       "in another folder.")
    return None, problems


def _read(path: Path) -> Checkpoint:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about, check = (file.metadata() or {}).get("about", "{}"), (file.metadata() or {}).get("check")
        tensors = {name: file.get_tensor(name) for name in file.keys()}      # noqa: SIM118 (not a dict)
    told = json.loads(about)
    if told.get("format") != FORMAT:
        raise ValueError("not a checkpoint of this version")
    if _check(tensors, about) != check:
        raise ValueError("its contents do not match their digest")
    states = tuple(_state(k, tensors, told["round"]) for k in range(told["models"]))
    kept = {name.removeprefix("kept "): tensor for name, tensor in tensors.items() if name.startswith("kept ")}
    return Checkpoint(told["round"], states if told["family"] else states[0], ClientMemory(tensors["memory key"], kept),
                      told["failed"], told["sizes"])


def _named(k: int, state: State) -> dict[str, Tensor]:
    optimizer = {f"{k} optimizer {i}": tensor for i, tensor in enumerate(state.optimizer)}
    optional = {f"{k} dual": state.dual, f"{k} kept": state.kept}
    return {f"{k} params": state.params, **optimizer, **{name: t for name, t in optional.items() if t is not None}}


def _state(k: int, tensors: dict[str, Tensor], round: int) -> State:
    count = sum(name.startswith(f"{k} optimizer ") for name in tensors)
    return State(tensors[f"{k} params"], tensors.get(f"{k} dual"), tuple(tensors[f"{k} optimizer {i}"] for i in range(count)),
                 round, tensors.get(f"{k} kept"))


def _check(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
