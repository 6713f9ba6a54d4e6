"""Fixed blocks of a cohort: the unit of work that is shared, and of sums.

They follow from the shapes of the data and the model alone, never from the machine, and each is computed by one thread: so a
round is the same to the last bit however many processes share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtail.clients import Blocks
from fedtail.data.arrays import input_tensors
from fedtail.data.population import Population
from fedtail.engine.kernels import Kernel

MOST = 32                # blocks of a round: enough to keep many cores busy to the end
LARGE = 2**26            # numbers in the sums of all blocks; larger models have fewer blocks
FEWEST = 4
GRAIN = 2**23            # examples times parameters worth a block of its own: a few milliseconds
OVERHEAD = 2**14         # parameters up to which a step of one client alone costs the same
TOGETHER = 12            # clients side by side from which on more gain little
ROW_ENTRIES = 2**22      # numbers held in rows at once
EXAMPLE_ENTRIES = 2**24  # numbers held in a padded batch at once
ON_A_GPU = 64            # times as many fit there


def cohort_blocks(sizes: Tensor, dim: int, stack: int, device: torch.device) -> Blocks:
    """Cut a cohort into blocks [low, high) of consecutive clients with about equally many examples each; [] for an empty cohort.

    `sizes` (clients,) is the number of examples of each client, `dim` the number of model parameters, and `stack` how many
    clients the kernel computes side by side. All clients are one block where `device` is not a CPU or there is little work.
    """
    examples = sizes.cumsum(0)
    if not len(examples):
        return []
    work = int(examples[-1]) * (max(dim, OVERHEAD) if stack == 1 else dim)
    count = min(max_blocks(dim), work // GRAIN, len(sizes) // min(stack, TOGETHER))
    if count < 2 or device.type != "cpu":
        return [(0, len(sizes))]
    return cut_into_blocks(sizes, count)


def cut_into_blocks(sizes: Tensor, count: int) -> Blocks:
    """Cut consecutive clients into at most `count` blocks [low, high) with about equally many examples each; no block is empty.

    `sizes` (clients,) is the number of examples of each client; there must be at least one client.
    """
    examples = sizes.cumsum(0)
    middle = examples - sizes / 2
    number = (middle * count / examples[-1]).long()                 # the block in which a client's middle example lies
    ends = torch.searchsorted(number, torch.arange(count), right=True).tolist()
    return [(low, high) for low, high in zip([0, *ends], ends, strict=False) if low < high]


def max_blocks(dim: int) -> int:
    """The largest number of blocks of a round, 4 to 32: fewer for a model of more parameters (`dim`), to save memory for sums."""
    return max(FEWEST, min(MOST, LARGE // dim))


def max_clients_at_once(kernel: Kernel, population: Population, device: torch.device) -> int:
    """How many clients to compute at once, at least 1: `kernel.stack`, or fewer to bound memory.

    The bounds are on the parameters of all models, and on examples padded to the largest client; a GPU gets 64 times the room.
    """
    per_example = sum(values[0].numel() for values in (*input_tensors(population.inputs), population.targets))
    padded = int(population.size.max()) * per_example
    room = 1 if device.type == "cpu" else ON_A_GPU
    return max(1, min(kernel.stack, room * ROW_ENTRIES // kernel.dim, room * EXAMPLE_ENTRIES // padded))
