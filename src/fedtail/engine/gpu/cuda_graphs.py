"""Steps recorded once and replayed.

A step of a small model is some sixty short kernels. Launched one by one from Python they take ten times as long as they run;
recorded as a CUDA graph they are one launch. A recording has fixed shapes and addresses, so a step is copied into buffers
a little larger than itself: clients beyond the active ones compute on what is left there, examples beyond the batch repeat
the first and weigh nothing. Neither is read.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fedtail.types import Examples

Step = Callable[..., Tensor]      # params, inputs and perhaps targets and weight -> one row for each client

SEEN = 2             # a shape is recorded when it was needed that often, by default
TRIES = 2            # failures after which nothing more is recorded
BY_CLIENT = ("params", "keys")      # arguments without an axis of examples
PREPARED = 4         # shapes for which kernels are compiled before the first call: later ones need few that are new
KEPT = 64            # recordings at once; the one not used for longest goes
NARROW = 32          # batches up to which every width is its own shape
LAST_FEW = 8         # so few clients left: their narrow last batches are padded to the full width


class Replayed:
    """Calls a function of stacked clients through CUDA graphs of it. A result is valid until the next call.

    A graph is recorded for a shape of the arguments when that comes for the `seen`-th time. On a CPU nothing is recorded, but the
    function is called on the same buffers. If recording fails twice (a module reads values, or memory is short) all calls are
    direct, and `refused` says why. Batches are padded to a multiple of `grain` examples, or where that is 0 by a few examples.
    """

    def __init__(self, function: Step, device: torch.device, grain: int = 0, seen: int = SEEN,
                 prepare: Callable[[Callable[[], Any]], None] | None = None):
        """Wrap `function`, which takes stacked arguments on `device`; nothing is recorded yet.

        Batches are padded to a multiple of `grain` examples, or by a few where that is 0; a shape is recorded at its `seen`-th
        call. On a GPU all recordings share one memory pool and one stream. Before the first calls of the first shapes `prepare`
        is given a function that makes the call, to compile what it needs.
        """
        self.function, self.device, self.grain, self.seen, self.prepare = function, device, grain, seen, prepare
        self.refused: str | None = None
        self._steps: OrderedDict[tuple[Any, ...], _Recorded] = OrderedDict()
        self._needed: Counter[tuple[Any, ...]] = Counter()
        self._widest = self._failures = 0
        self._arena = _Arena(device)
        self._stream = _recording_stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __len__(self) -> int:
        """The number of shapes for which a recording is held now, at most 64."""
        return len(self._steps)

    def __call__(self, params: Tensor, inputs: Examples, *rest: Tensor) -> Tensor:
        """The result of the function, (clients, ...), by replaying a recording where this shape has one, else by a direct call.

        `params` is (clients, dim), `inputs` and `rest`, which are targets and weights, are (clients, batch, ...); `rest` may end
        with keys (clients,). Without `rest` the result is (clients, examples, ...). It may be a view of a buffer that the next
        call overwrites. A shape is recorded
        when it has come `seen` times; once recording has failed twice, all calls are direct.
        """
        if self.refused is not None:
            return self.function(params, inputs, *rest)
        given = _arguments_by_name(params, inputs, *rest)
        active, batch = next(t.shape[:2] for name, t in given.items() if name not in BY_CLIENT)
        clients, width = padded_size(active), self._padded_width(active, batch)
        key = (clients, width, *((name, t.dtype, item_shape(name, t)) for name, t in given.items()))
        step = self._steps.get(key)
        if step is None:
            if self.prepare is not None and key not in self._needed and len(self._needed) < PREPARED:
                self.prepare(partial(self.function, params, inputs, *rest))
            self._needed[key] += 1
            step = self._record_shape(key, clients, width, given, inputs) if self._needed[key] >= self.seen else None
        if step is None:
            return self.function(params, inputs, *rest)
        self._steps.move_to_end(key)
        step.fill_buffers(given, active, batch)
        step.compute_result()
        return step.result[:active] if batch == width or rest else step.result[:active, :batch]

    def _padded_width(self, active: int, batch: int) -> int:
        """The number of examples, at least `batch`, to which a batch of `batch` examples of `active` clients is padded.

        With `grain` it is the next multiple of that. Without, it is the widest batch so far (`_widest`, which is updated) where
        at most 8 clients are left and that is at most 256; otherwise `padded_size` of `batch`, which keeps up to 32 as they are.
        """
        self._widest = max(self._widest, batch)
        if self.grain:
            return -(-batch // self.grain) * self.grain
        return self._widest if active <= LAST_FEW and self._widest <= 8 * NARROW else padded_size(batch, NARROW)

    def _record_shape(self, key: tuple[Any, ...], clients: int, width: int, given: dict[str, Tensor],
                  inputs: Examples) -> _Recorded | None:
        """Make buffers for `clients` clients with `width` examples each, record the function on them, and store it under `key`.

        `given` are the arguments by buffer name, and `inputs` tells the names of inputs. If 64 recordings are held, the one that
        was unused for longest is dropped. Returns the recording, or None where CUDA could not record it; on a CPU it has buffers
        but no graph.
        """
        shapes = {name: (clients, *(() if name in BY_CLIENT else (width,)), *item_shape(name, t)) for name, t in given.items()}
        buffers = {name: self._arena.buffer(name, shapes[name], t.dtype) for name, t in given.items()}
        step = _Recorded(self.function, self._arena, buffers, list(inputs) if isinstance(inputs, dict) else None)
        everyone = {name: t[:1].expand(clients, *t.shape[1:]) for name, t in given.items()}
        step.fill_buffers(everyone, clients, next(t.shape[1] for name, t in given.items() if name not in BY_CLIENT))
        if self._stream is not None and not self._capture_graph(step):
            return None
        while len(self._steps) >= KEPT:
            self._steps.popitem(last=False)
        self._steps[key] = step
        return step

    def _capture_graph(self, step: _Recorded) -> bool:
        """Run `step` once to warm up, then record it as a CUDA graph and set `step.graph`; True on success.

        If that raises, the failure is cleaned up and counted (`_recover_from_failure`), and the result is False.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                step.compute_result()
            self._stream.synchronize()
            with without_garbage_collection(), torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                step.compute_result()
        except Exception as reason:      # whatever an operation that cannot be recorded says
            self._recover_from_failure(f"{type(reason).__name__}: {reason}")
            return False
        step.graph = graph
        return True

    def _recover_from_failure(self, reason: str) -> None:
        """Clean up after a failed recording: end PyTorch's allocation to the pool, synchronise, and take a new pool.

        At the second failure `refused` is set to the text `reason`, all recordings and buffers are dropped, and nothing is
        recorded any more.
        """
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool or (0, 0))
        torch.cuda.synchronize(self.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._failures += 1
        if self._failures >= TRIES:
            self.refused = reason
            self._steps.clear()
            self._arena = _Arena(self.device)


@dataclass(eq=False)
class _Recorded:
    """The recording of a function for one shape of its arguments: buffers for them, its result, and on a GPU the CUDA graph."""

    function: Step
    arena: _Arena
    buffers: dict[str, Tensor]
    names: list[str] | None               # of the inputs, where they come by name
    result: Any = None                    # known after the first run
    graph: Any = None

    def fill_buffers(self, given: dict[str, Tensor], active: int, batch: int) -> None:
        """Copy the arguments `given`, by name, into the buffers of the first `active` clients.

        `batch` is the number of examples that are given. The rest of a buffer is padding: it repeats the client's first example,
        with weight zero.
        """
        for name, source in given.items():
            buffer = self.buffers[name][:active]
            if name in BY_CLIENT or batch == buffer.shape[1]:
                buffer.copy_(source)
                continue
            buffer[:, :batch].copy_(source)
            buffer[:, batch:].copy_(source[:, :1].expand_as(buffer[:, batch:])) if name != "weight" else buffer[:, batch:].zero_()

    def compute_result(self) -> None:
        """Compute `result` from the values in the buffers: replay the graph or, where there is none, call the function.

        The first call allocates `result`, and later calls overwrite it.
        """
        if self.graph is not None:
            self.graph.replay()
            return
        held = dict(self.buffers)
        params = held.pop("params")
        inputs = held.pop("input") if self.names is None else {name: held.pop(f"input {name}") for name in self.names}
        found = self.function(params, inputs, *held.values())
        if self.result is None:
            self.result = self.arena.buffer("result", tuple(found.shape), found.dtype)
        self.result.copy_(found)


class _Arena:
    """Buffers by name, at fixed addresses. One that is too small is replaced; recordings keep the memory they were made with."""

    def __init__(self, device: torch.device):
        """An arena without buffers, which will be on `device`; no memory is allocated yet."""
        self.device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape and dtype, at the start of the memory that is held under `name` and `dtype`.

        Buffers of one name and dtype share memory, so that writing to one overwrites the others. Where that memory is too small,
        new memory (zeros) is allocated; earlier buffers then keep the old one.
        """
        size, key = math.prod(shape), (name, dtype)
        old = self._held.get(key)
        if old is None or old.numel() < size:
            room = size if old is None else max(size, 2 * old.numel())
            self._held[key] = torch.zeros(room, dtype=dtype, device=self.device)
        return self._held[key][:size].view(shape)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream on which all recordings on `device` are made; cached, since cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


def padded_size(count: int, exact: int = 1) -> int:
    """The size to which `count` is padded, at least `count`: a few sizes per power of two, so that few shapes are recorded.

    With P the next power of two, it is a multiple of P / 4 up to P = 16 and of P / 16 beyond. A count up to `exact` is kept.

    >>> [padded_size(n) for n in (1, 5, 9, 17, 50, 100)]
    [1, 6, 12, 18, 52, 104]
    """
    if count <= exact:
        return count
    power = 1 << (count - 1).bit_length()                 # the power of two that is at least count
    step = max(1, power // 16 if power > 16 else power // 4)
    return -(-count // step) * step


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A context in which Python's garbage collector is off; at its end it is on again if it was before.

    Freeing an old CUDA graph while another is being recorded would spoil the recording.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def item_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """The shape of one client's part, `tensor.shape[1:]`, of "params" and "keys"; else of one example, `tensor.shape[2:]`."""
    return tuple(tensor.shape[1 if name in BY_CLIENT else 2 :])


def _arguments_by_name(params: Tensor, inputs: Examples, *rest: Tensor) -> dict[str, Tensor]:
    """The arguments as a dict by buffer name: "params", "input", and from `rest` "targets", "weight" and "keys".

    Where `inputs` is a dict, there is an "input NAME" for each of its tensors instead of "input".
    """
    parts = {f"input {name}": t for name, t in inputs.items()} if isinstance(inputs, dict) else {"input": inputs}
    return {"params": params, **parts, **dict(zip(("targets", "weight", "keys"), rest, strict=False))}
