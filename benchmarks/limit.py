"""What the machine could do at most: its measured peak, and the operations that each workload asks for.

    python benchmarks/limit.py

The limit of a workload is its operations (counted by torch on one batch, multiplications and additions apart, and scaled to
a round) at the best float32 rate of all cores, in a large matrix product or a convolution. Nothing is added for memory, so
the limit of small models is out of reach for anybody.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch.nn.functional import conv2d, cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from workloads import WORKLOADS, Workload, client_sizes

TRIES = 7


def peaks() -> dict[str, float]:
    """Best rates in GFLOP/s: matrix products on one core and on all, convolutions (forward) likewise."""
    before, found = torch.get_num_threads(), {}
    cores = torch.multiprocessing.cpu_count()
    for name, threads in (("one", 1), ("all", cores)):
        torch.set_num_threads(threads)
        a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
        found[f"gemm_{name}"] = _rate(lambda a=a, b=b: a @ b, 2 * 2048**3)
        x = torch.randn(64, 64, 32, 32).contiguous(memory_format=torch.channels_last)
        w = torch.randn(64, 64, 3, 3).contiguous(memory_format=torch.channels_last)
        found[f"conv_{name}"] = _rate(lambda x=x, w=w: conv2d(x, w, padding=1), 2 * 64 * 64 * 64 * 9 * 32 * 32)
    torch.set_num_threads(before)
    return {**found, "best": max(found["gemm_all"], found["conv_all"]), "cores": cores}


def _rate(product: Callable[[], object], operations: int) -> float:
    """The best of a few tries, each long enough to measure."""
    product()
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        for _ in range(3):
            product()
        best = min(best, (time.perf_counter() - began) / 3)
    return operations / best / 1e9


def work(workload: Workload) -> dict[str, float]:
    """Operations of a round of the cohort (GFLOP): training, and one forward pass for the losses."""
    batch = workload.batch or 100
    warnings.filterwarnings("ignore", message="TF32")
    module, x = workload.module(), torch.randn(batch, *workload.shape)
    y = torch.randint(0, workload.classes, (batch,))
    with torch.backends.mkldnn.flags(enabled=False):      # else an LSTM is not counted
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            module(x)
        with FlopCounterMode(display=False) as both:
            cross_entropy(module(x), y).backward()
    sizes = client_sizes(workload.clients, workload.sizes, seed=0)
    examples = sizes.mean() * workload.cohort
    once, training = (count.get_total_flops() / batch * examples / 1e9 for count in (forward, both))
    return {"examples": examples, "forward_gflop": once, "training_gflop": 0.0 if workload.evaluation else training,
            "parameters": sum(p.numel() for p in module.parameters())}


def needed(work: dict[str, float], method: str) -> float:
    """Operations (GFLOP) that a method cannot do without; Delta-FL at theta 0.5 looks at all and trains half."""
    if method == "evaluation":
        return work["forward_gflop"]
    return work["training_gflop"] if method.startswith("fedavg") else work["forward_gflop"] + 0.5 * work["training_gflop"]


if __name__ == "__main__":
    measured = peaks()
    print(", ".join(f"{name} {value:.0f}" for name, value in measured.items()), "(GFLOP/s)")
    for workload in WORKLOADS.values():
        counted = work(workload)
        method = "evaluation" if workload.evaluation else "fedavg"
        print(f"{workload.name} {workload.title}: {counted['parameters']} parameters, {counted['examples']:.0f} examples, "
              f"{needed(counted, method):.3f} GFLOP, limit {needed(counted, method) / measured['best']:.5f} s")
