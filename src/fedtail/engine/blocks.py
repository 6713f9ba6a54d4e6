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
    """Cut a cohort into blocks of consecutive clients with about equally many examples: a list of (low, high), high excluded.

    `sizes` (clients,) is the number of examples of each client, `dim` the number of model parameters, and `stack` how many
    clients the kernel computes side by side. All clients are one block where `device` is not a CPU or there is little work. An
    empty cohort gives an empty list.
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
    """Cut consecutive clients into at most `count` blocks with about equally many examples: a list of (low, high), high excluded.

    `sizes` (clients,) is the number of examples of each client; there must be at least one client. No block is empty.
    """
    examples = sizes.cumsum(0)
    middle = examples - sizes / 2
    number = (middle * count / examples[-1]).long()                 # the block in which a client's middle example lies
    ends = torch.searchsorted(number, torch.arange(count), right=True).tolist()
    return [(low, high) for low, high in zip([0, *ends], ends, strict=False) if low < high]


def max_blocks(dim: int) -> int:
    """The largest number of blocks into which a round is cut, 4 to 32: fewer for models with more than 2^21 parameters (`dim`).

    A sum is held in memory for each block, so that large models have fewer.
    """
    return max(FEWEST, min(MOST, LARGE // dim))


def max_clients_at_once(kernel: Kernel, population: Population, device: torch.device) -> int:
    """How many clients to compute at once, at least 1: `kernel.stack`, or fewer to bound memory.

    The parameters of all their models are bounded, and their examples, each client padded to the size of the population's
    largest. On a GPU both bounds are 64 times as large as on a CPU. `device` says which it is.
    """
    per_example = sum(values[0].numel() for values in (*input_tensors(population.inputs), population.targets))
    padded = int(population.size.max()) * per_example
    room = 1 if device.type == "cpu" else ON_A_GPU
    return max(1, min(kernel.stack, room * ROW_ENTRIES // kernel.dim, room * EXAMPLE_ENTRIES // padded))
