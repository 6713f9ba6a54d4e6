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
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedtail.types import Examples

Step = Callable[..., Tensor]      # params, inputs and perhaps targets and weight -> one row for each client

SEEN = 2             # a shape is recorded when it was needed that often, by default
TRIES = 2            # failures after which nothing more is recorded
KEPT = 64            # recordings at once; the one not used for longest goes
NARROW = 32          # batches up to which every width is its own shape
LAST_FEW = 8         # so few clients left: their narrow last batches are padded to the full width


class Replayed:
    """A function of stacked clients, called through recordings of it. What it returns is valid until the next call.

    On a CPU nothing is recorded: the function is called on the same buffers. What cannot be recorded (a module that reads
    its values, too little memory) is computed as if this were not here; `refused` then says why. Batches are widened to a
    multiple of `grain`, or where that is 0 by a few examples. A shape is recorded when it is needed for the `seen`-th time.
    """

    def __init__(self, function: Step, device: torch.device, grain: int = 0, seen: int = SEEN):
        """Wrap `function`; nothing is recorded yet. On a GPU all recordings of this object share one memory pool and one stream.

        Batches are padded to a multiple of `grain` examples, or by a few where that is 0; a shape is recorded at its `seen`-th
        call.
        """
        self.function, self.device, self.grain, self.seen = function, device, grain, seen
        self.refused: str | None = None
        self._steps: OrderedDict[tuple[Any, ...], _Recorded] = OrderedDict()
        self._needed: Counter[tuple[Any, ...]] = Counter()
        self._widest = self._failures = 0
        self._arena = _Arena(device)
        self._stream = _recording_stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __len__(self) -> int:
        """The number of shapes for which a recording is held now."""
        return len(self._steps)

    def __call__(self, params: Tensor, inputs: Examples, *rest: Tensor) -> Tensor:
        """The function's result, (clients, ...), by a replay where this shape is recorded, else by a direct call.

        `rest` are targets and weights (clients, batch, ...), and the result has one row per client; without them it is (clients,
        examples, ...). It may be a view of a buffer that the next call overwrites. A shape is recorded when it has come `seen`
        times; once recording has failed twice, all calls are direct.
        """
        if self.refused is not None:
            return self.function(params, inputs, *rest)
        given = _arguments_by_name(params, inputs, *rest)
        active, batch = next(t.shape[:2] for name, t in given.items() if name != "params")
        clients, width = padded_size(active), self._padded_width(active, batch)
        key = (clients, width, *((name, t.dtype, item_shape(name, t)) for name, t in given.items()))
        step = self._steps.get(key)
        if step is None:
            self._needed[key] += 1
            step = self._record_shape(key, clients, width, given, inputs) if self._needed[key] >= self.seen else None
        if step is None:
            return self.function(params, inputs, *rest)
        self._steps.move_to_end(key)
        step.fill_buffers(given, active, batch)
        step.compute_result()
        return step.result[:active] if batch == width or rest else step.result[:active, :batch]

    def _padded_width(self, active: int, batch: int) -> int:
        """How many examples to pad a batch to, where `active` clients have `batch` examples each; at least `batch`.

        Remembers the widest batch so far: where few clients are left, their batches are padded to it.
        """
        self._widest = max(self._widest, batch)
        if self.grain:
            return -(-batch // self.grain) * self.grain
        return self._widest if active <= LAST_FEW and self._widest <= 8 * NARROW else padded_size(batch, NARROW)

    def _record_shape(self, key: tuple[Any, ...], clients: int, width: int, given: dict[str, Tensor],
                  inputs: Examples) -> _Recorded | None:
        """Make buffers for `clients` clients with `width` examples each, record a step on them, and store it under `key`.

        `given` are the arguments by buffer name. Evicts the recording unused for longest when there are 64. Returns the
        recording, or None where CUDA could not record it; on a CPU the step has buffers but no graph.
        """
        shapes = {name: (clients, *((width,) if name != "params" else ()), *item_shape(name, t)) for name, t in given.items()}
        buffers = {name: self._arena.buffer(name, shapes[name], t.dtype) for name, t in given.items()}
        step = _Recorded(self.function, self._arena, buffers, list(inputs) if isinstance(inputs, dict) else None)
        everyone = {name: t[:1].expand(clients, *t.shape[1:]) for name, t in given.items()}
        step.fill_buffers(everyone, clients, next(t.shape[1] for name, t in given.items() if name != "params"))
        if self._stream is not None and not self._capture_graph(step):
            return None
        while len(self._steps) >= KEPT:
            self._steps.popitem(last=False)
        self._steps[key] = step
        return step

    def _capture_graph(self, step: _Recorded) -> bool:
        """Run the step once to warm up, then record it as a CUDA graph and set `step.graph`; True on success.

        On an exception it cleans up, counts the failure, and returns False.
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

        At the second failure `refused` is set to `reason`, and all recordings and buffers are dropped, so that none is made
        again.
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
    """One shape of a step: its buffers, where its result is, and on a GPU its graph."""

    function: Step
    arena: _Arena
    buffers: dict[str, Tensor]
    names: list[str] | None               # of the inputs, where they come by name
    result: Any = None                    # known after the first run
    graph: Any = None

    def fill_buffers(self, given: dict[str, Tensor], active: int, batch: int) -> None:
        """Copy a step's arguments into the buffers of the first `active` clients.

        Examples from position `batch` on are padding: they repeat the client's first example, with weight zero.
        """
        for name, source in given.items():
            buffer = self.buffers[name][:active]
            if name == "params" or batch == buffer.shape[1]:
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
    """Memory at fixed addresses, by name. It grows by being replaced; what was recorded keeps what it was recorded with."""

    def __init__(self, device: torch.device):
        """Buffers on `device`; no memory is allocated before `buffer` is called."""
        self.device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape and dtype, at the start of the memory held under `name`; earlier views of it share that memory.

        New memory, which is zero, is allocated where there is too little; earlier views then keep their old memory.
        """
        size, key = math.prod(shape), (name, dtype)
        old = self._held.get(key)
        if old is None or old.numel() < size:
            room = size if old is None else max(size, 2 * old.numel())
            self._held[key] = torch.zeros(room, dtype=dtype, device=self.device)
        return self._held[key][:size].view(shape)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream on which everything is recorded on `device`, made once: cuBLAS keeps memory for every stream it ran on."""
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
    """A context in which Python collects no garbage; enabled again afterwards if it was.

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
    """The shape of one client's part where `name` is "params" (without axis 0), else of one example (without axes 0 and 1)."""
    return tuple(tensor.shape[1 if name == "params" else 2 :])


def _arguments_by_name(params: Tensor, inputs: Examples, *rest: Tensor) -> dict[str, Tensor]:
    """The arguments of a step as a dict by buffer name: "params", "input", and from `rest` "targets" and "weight".

    Where inputs come by name there is one "input NAME" for each instead of "input".
    """
    parts = {f"input {name}": t for name, t in inputs.items()} if isinstance(inputs, dict) else {"input": inputs}
    return {"params": params, **parts, **dict(zip(("targets", "weight"), rest, strict=False))}
