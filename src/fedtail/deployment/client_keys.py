"""The keys of a node's clients, by which server and node name them and draw: different for all clients of all nodes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import hash_bits
from fedtail.reading import short_text


def with_own_keys(population: Population, node: str) -> Population:
    """The clients with their keys hashed with the name of their node, so that those of other nodes have different keys.

    They have them at the server, in draws (who is sampled, batches, which examples are held out) and in what they remember.
    """
    return population.with_columns(key=hashed_keys(node, population.key))


def hashed_keys(node: str, key: Tensor) -> Tensor:
    """The keys (clients,) int64 of a node's clients, hashed with its name: different where those in `key` are.

    Two nodes of different names have no key in common but by chance, of about 2 ** -64 for each pair of clients.
    """
    return hash_bits(_seed_from_name(node), "client of a node", key)


def check_distinct_keys(population: Population, file: str) -> None:
    """Raise ValueError where two clients in `file`, a node's data, have the same key: draws and memory are by key."""
    found, counts = population.key.unique(return_counts=True)
    if len(found) == len(population):
        return
    key = int(found[counts > 1][0])
    same = [population.name_of(k) for k in (population.key == key).nonzero().flatten().tolist()]
    raise ValueError(f"{len(same)} clients in {short_text(file)} have the key {key}: {short_text(', '.join(same))}. Draws and "
                     "what clients remember are by key. Save them with a key for each: population.with_columns(key=torch.arange("
                     f"{len(population)})).save(...)")


def _seed_from_name(name: str) -> int:
    """A seed in [0, 2 ** 63) from the first 8 bytes of SHA-256 of a node's name, with which its clients' keys are hashed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") & torch.iinfo(torch.int64).max
