"""How much a round of W3 and of the CIFAR10 setting computes and moves on a GPU, and where its time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace

import torch
from gpu import CIFAR, PRECISIONS, TESTING, TRAINING, Results, evaluated, populations, trained
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from workloads import WORKLOADS, Workload, _made

import fedtail

FLOAT = 4
KINDS = (("convolutions", ("_convolve_kernel", "conv", "fprop", "fft", "cudnn")),
         ("weight gradients of convolutions", ("_weight_gradient_kernel",)),
         ("windows folded", ("_fold_kernel",)), ("products of linear layers", ("gemm", "nvjet", "cublas", "splitK", "cutlass")),
         ("pooling", ("pool",)), ("copies", ("copy", "memcpy", "Memcpy", "Memset")),
         ("sorting and gathering", ("sort", "index", "gather", "scatter", "radix")), ("sums", ("reduce",)))


def flops(workload: Workload) -> tuple[float, float]:
    """Floating-point operations of one example: to look at, and to train on (no gradient of the images)."""
    module, examples = workload.module(), torch.zeros(1, *workload.shape)
    with FlopCounterMode(display=False) as look:
        outputs = module(examples)
    with FlopCounterMode(display=False) as learn:
        cross_entropy(outputs, torch.zeros(1, dtype=torch.int64)).backward()
    return float(look.get_total_flops()), float(look.get_total_flops() + learn.get_total_flops())


def activations(workload: Workload) -> float:
    """Bytes of what one example's convolutions give."""
    total, module = [0.0], workload.module()

    def note(layer: nn.Conv2d, inputs: tuple, outputs: torch.Tensor) -> None:
        total[0] += outputs[0].numel() * FLOAT

    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(note)
    module(torch.zeros(1, *workload.shape))
    return total[0]


def counts(results: Results) -> None:
    """A round on average: all examples of the cohort are looked at in Delta-FL, half of them by mass are trained on."""
    for workload, method, looked, learned in ((WORKLOADS["W3"], "delta_fl", 1.0, 0.5), (WORKLOADS["W3"], "fedavg", 0.0, 1.0),
                                              (CIFAR, "fedavg", 0.0, 1.0)):
        sizes = torch.from_numpy(_made(replace(workload, shape=(1,)), seed=3).sizes).double()
        examples, dim = float(sizes.mean()) * workload.cohort, sum(p.numel() for p in workload.module().parameters())
        look, learn = flops(workload)
        steps = float((sizes / workload.batch).ceil().mean()) * workload.cohort * learned      # of single clients
        passes = 2 * looked + 5 * learned                                     # written, read; their gradient written, read twice
        moved = activations(workload) * examples * passes
        models = steps * dim * FLOAT * 8                                      # buffers, order of places, gradients, the step
        results.add(part="counts", workload=workload.title, method=method, examples=examples, client_steps=steps,
                    tflop=(looked * look + learned * learn) * examples / 1e12, gigabytes_activations=moved / 1e9,
                    gigabytes_models=models / 1e9)
    look, _ = flops(WORKLOADS["W3"])
    everyone = float(torch.from_numpy(_made(replace(WORKLOADS["W5"], shape=(1,)), seed=5).sizes).sum())
    results.add(part="counts", workload="W3", method=f"evaluation of {TESTING}", examples=everyone, tflop=look * everyone / 1e12)


def kind_of(kernel: str) -> str:
    return next((kind for kind, words in KINDS if any(word in kernel for word in words)), "elementwise and the rest")


def profile(results: Results, rounds: int = 30) -> None:
    """Where a round of W3 goes: what the card does in it, and how long it waits for the host."""
    workload = WORKLOADS["W3"]
    population, test = populations(_made(replace(workload, clients=TRAINING + TESTING), seed=3), TRAINING)
    for precision in PRECISIONS:
        module = _profile_one(results, "profile", workload, "delta_fl", precision, rounds, population)
        _profile_evaluation(results, module, precision, test)


def profile_cifar(results: Results, rounds: int = 30) -> None:
    """The same of the CIFAR10 setting, FedAvg."""
    population, _ = populations(_made(CIFAR, seed=10), CIFAR.clients)
    for precision in PRECISIONS:
        _profile_one(results, "profile_cifar", CIFAR, "fedavg", precision, rounds, population)


def _profile_one(results: Results, part: str, workload: Workload, method: str, precision: str, rounds: int,
                 population: fedtail.Population) -> nn.Module:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    warm = 30
    recorder, clock = profiled(activities=[ProfilerActivity.CUDA]), []

    def watch(progress) -> None:
        if progress.round == warm:
            torch.cuda.synchronize()
            recorder.start()
            clock.append(time.perf_counter())
        if progress.round == warm + rounds:
            torch.cuda.synchronize()
            clock.append(time.perf_counter())
            recorder.stop()

    result = trained(workload, method, precision, warm + rounds, population, watch=watch)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    names: dict[str, float] = defaultdict(float)
    for event in recorder.key_averages():
        kind = spent[kind_of(event.key)]
        kind[0], kind[1] = kind[0] + event.device_time_total / 1e3, kind[1] + event.count
        names[event.key[:60]] += event.device_time_total / 1e3 / rounds
    wall, busy = 1e3 * (clock[1] - clock[0]) / rounds, sum(ms for ms, _ in spent.values()) / rounds
    results.add(part=part, precision=precision, rounds=rounds, ms_a_round=wall, ms_busy=busy, busy=busy / wall)
    for kind, (ms, count) in sorted(spent.items(), key=lambda item: -item[1][0]):
        results.add(part=part, precision=precision, kind=kind, ms_a_round=ms / rounds, kernels_a_round=count / rounds)
    for name, ms in sorted(names.items(), key=lambda item: -item[1])[:8]:
        results.add(part=part, precision=precision, kernel=name, ms_a_round=ms)
    return result.module


def _profile_evaluation(results: Results, module: nn.Module, precision: str, test: fedtail.Population) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    evaluated(module, test, precision)
    torch.cuda.synchronize()
    with profiled(activities=[ProfilerActivity.CUDA]) as recorder:
        began = time.perf_counter()
        evaluated(module, test, precision)
        wall = 1e3 * (time.perf_counter() - began)
    busy = sum(event.device_time_total for event in recorder.key_averages()) / 1e3
    results.add(part="profile", precision=precision, evaluation=TESTING, ms=wall, ms_busy=busy)
