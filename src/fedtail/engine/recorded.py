"""Steps on a CPU recorded once as a list of PyTorch's operations, and run from that list.

A step of many small clients is some hundred short operations. Called through a module, autograd and `torch.func` each costs a few
times as long as it computes; called one after the other from a list, what is left is the computing. The list holds the same
operations on the same strides, so that results have the same bits, recorded or not.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.modules import block_other_draws
from fedtail.types import Examples

OFTEN = 128          # calls with a shape after which it is recorded, which takes as long as some hundred calls save
KEPT = 64            # recordings at once; the one not used for longest goes
COUNTED = 4096       # shapes that are counted at once
PLAIN = (bool, int, float, str)      # values of a module's attributes that its forward may count in

Parts = tuple[Tensor, ...]
Step = Callable[..., Parts]          # params, inputs, targets, weight and perhaps keys -> tensors


class RecordedOperations:
    """Calls a function of stacked clients, and for shapes that come often runs a list of the operations that it consists of.

    A shape of the arguments is recorded at its `often`-th call. Nothing is recorded any more (`refused` says why) once a
    recording failed or its result was not that of the function to the last bit, or where a call draws from Python's or NumPy's
    generators or changes a number that the module holds: a list would go on with what it saw. What a forward or a loss prints
    or counts elsewhere, it does only when it is called.
    """

    def __init__(self, function: Step, module: nn.Module, often: int | None = None):
        """Wrap `function`, which calls `module` and takes params, inputs, targets, weight and keys; nothing is recorded yet."""
        self.function, self.module, self.often = function, module, often or OFTEN
        self.refused: str | None = None
        self._lists: OrderedDict[tuple[Any, ...], Step] = OrderedDict()
        self._needed: Counter[tuple[Any, ...]] = Counter()

    def __len__(self) -> int:
        """The number of shapes for which a list is held now, at most 64."""
        return len(self._lists)

    def __call__(self, params: Tensor, inputs: Examples, *rest: Tensor) -> Parts:
        """The tensors that the function returns, by a list where this shape has one, else by a call."""
        names = tuple(inputs) if isinstance(inputs, dict) else None
        given = [params, *(inputs.values() if isinstance(inputs, dict) else (inputs,)), *rest]
        given = [tensor.contiguous() for tensor in given]
        if self.refused is not None:
            return self._call(names, given)
        key = (names, *((tensor.shape, tensor.dtype) for tensor in given))
        operations = self._lists.get(key)
        if operations is not None:
            self._lists.move_to_end(key)
            return operations(*given)
        if len(self._needed) >= COUNTED:
            self._needed.clear()
        self._needed[key] += 1
        return self._call(names, given) if self._needed[key] < self.often else self._record(key, names, given)

    def _call(self, names: tuple[str, ...] | None, given: list[Tensor]) -> Parts:
        """The function's result; `given` are params, the inputs, by `names` where they are a dict, and the rest."""
        count = 1 if names is None else len(names)
        inputs = given[1] if names is None else dict(zip(names, given[1 : 1 + count], strict=True))
        return self.function(given[0], inputs, *given[1 + count :])

    def _record(self, key: tuple[Any, ...], names: tuple[str, ...] | None, given: list[Tensor]) -> Parts:
        """The function's result, after its operations were listed under `key`, or the reason why not in `refused`."""
        before = _state_outside_torch(self.module)
        found = self._call(names, given)
        try:
            if _state_outside_torch(self.module) != before:
                raise ValueError("a call changes numbers that the module holds, or draws from Python's or NumPy's generators")
            operations = list_operations(lambda *flat: self._call(names, list(flat)), given)
            if not all(map(_same_bits, operations(*given), found)):
                raise ValueError("the listed operations give another result")
        except Exception as reason:      # whatever an operation that cannot be listed says
            self.refused = f"{type(reason).__name__}: {reason}"
            self._lists.clear()
            return found
        while len(self._lists) >= KEPT:
            self._lists.popitem(last=False)
        self._lists[key] = operations
        return found


def list_operations(function: Step, given: list[Tensor]) -> Step:
    """A function of tensors of these shapes that calls one after the other the operations that `function` calls on `given`.

    What changes no number (a product with 1, a view of the same shape, `detach`) is left out, and a tensor is let go after its
    last use. No other thread may fork meanwhile.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    with block_other_draws(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")                         # of a trial nobody asked for
        listed = make_fx(function)(*given)
    aten = torch.ops.aten
    for node in list(listed.graph.nodes):
        if node.op != "call_function":
            continue
        same = node.target in (aten.detach.default, aten.alias.default)
        same |= node.target in (aten.expand.default, aten.view.default, aten._unsafe_view.default) and _same_layout(node)
        same |= node.target == aten.mul.Scalar and node.args[1] == 1 and _same_layout(node)
        if same:
            node.replace_all_uses_with(node.args[0])
    listed.graph.eliminate_dead_code()
    listed.recompile()
    return listed.forward


def _same_layout(node: Any) -> bool:
    """Whether an operation of a list returns a tensor of the shape, strides and dtype of its first argument."""
    mine, other = (one.meta.get("tensor_meta") for one in (node, node.args[0]))
    if mine is None or other is None:
        return False
    return (mine.shape, mine.stride, mine.dtype) == (other.shape, other.stride, other.dtype)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal shapes, strides and entries, NaN being equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _state_outside_torch(module: nn.Module) -> tuple[Any, ...]:
    """What a call of the module may change that a list of operations does not: generators, and numbers that layers hold."""
    held = [(name, key, value) for name, part in module.named_modules() for key, value in vars(part).items()
            if isinstance(value, PLAIN)]
    return random.getstate(), pickle.dumps(np.random.get_state()), held      # noqa: NPY002
