"""Model files: a module's tensors as safetensors, with what they cost of the clients' privacy in the file's metadata.

A file that stands beside the ledger it came from (`ledger.jsonl`) gives its whole history to a run that begins with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.privacy.history import UNKNOWN, EarlierHistory
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.ledger_file import LedgerError, LedgerFile, LedgerMark

LEDGER = "ledger.jsonl"         # every release, written before it was made
ENTRY = "fedtail"               # of the metadata


def model_bytes(module: nn.Module, made: dict[str, Any] | None = None) -> bytes:
    """The bytes of a safetensors file with a module's parameters and buffers by name; tied tensors are written under each name.

    `made`, the `training_record` of the run that trained the module, goes into the file's metadata as JSON.
    """
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
               for name, tensor in module.state_dict().items()}
    return save(tensors, {ENTRY: json.dumps(made, sort_keys=True)}) if made else save(tensors)


def training_record(ledger: Ledger, rounds: int) -> dict[str, Any]:
    """What a model file records about the `rounds` rounds that made it: a dict with "rounds", "non_private" and "ledger".

    "non_private" lists what was released without a mechanism. "ledger" is the size, digest and number of rounds of the ledger's
    file; None where something is non-private or the ledger has no file. A private run that repeated rounds after a crash has
    charged them twice, so its "ledger" differs from that of an uninterrupted run.
    """
    exposed = list(ledger.non_private_releases)
    mark = None if exposed else ledger.file_mark()
    return {"rounds": rounds, "non_private": exposed, "ledger": list(mark) if mark else None}


def read_model(path: Path) -> tuple[dict[str, Tensor], EarlierHistory]:
    """The tensors of the model file at `path` by name, on the CPU, and the history of the rounds that made it, as far as known.

    Raises ValueError where the file cannot be opened or is not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}      # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as reason:
        raise ValueError(f"{path} is not a model file that can be read ({reason}). Runs leave theirs as model.safetensors.") \
            from reason
    return tensors, _history_from_metadata(path, metadata)


def _history_from_metadata(path: Path, metadata: dict[str, str]) -> EarlierHistory:
    """The history of the rounds that made the model file at `path`, from the ledger beside it and the file's `metadata`.

    The ledger's rounds are taken where its file agrees with the size and digest in the metadata. Otherwise the history's rounds
    are unknown, and its text says what the metadata tell: rounds without a mechanism, a missing ledger, or nothing.
    """
    try:
        made = json.loads(metadata.get(ENTRY, "null"))
        rounds, mark = int(made["rounds"]), made["ledger"]
        what = f"{path.name}, trained for {rounds} rounds"
        if made["non_private"]:
            return EarlierHistory(f"{what} that released without a mechanism: {'; '.join(made['non_private'])}")
        mark = LedgerMark(*mark)
        beside = LedgerFile(path.parent / LEDGER)
        if not beside.matches_mark(mark):
            return EarlierHistory(f"{what}, whose ledger (digest {mark.digest}) is not beside it")
        return Ledger(path=beside.path).copy_of_first_bytes(mark.size).history(what, rounds)
    except (ValueError, TypeError, KeyError, LedgerError):
        return EarlierHistory(f"{path.name}, {UNKNOWN}")
