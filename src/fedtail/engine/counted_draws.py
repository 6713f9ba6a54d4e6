"""Dropout and other draws of a training step from counters: functions of the client, the step, the draw and the place in it.

torch's generators are one stream that everybody shares, so that clients side by side would change each other's masks. Here a mask
is a hash of a key (client and step), the number of the draw within the step, and the coordinates of each entry. So it is the same
on every path: one client after the other or many at once, in any block, on any worker and device, with or without padding.

Within `CountedDraws(key)` calls of PyTorch's dropout (also inside attention and recurrent layers), `rand`, `randn`, `bernoulli`
and their like are replaced. All other draws are left to torch's generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtail.draws import _mix_bits, _to_signed_64_bits, uniform_numbers
from fedtail.engine.gpu.stackable import make_stackable

VERSION = 2              # of how training draws: runs name it, and go on with no other
LEVELS = 2**16           # dropout's rate is rounded to so many levels, and what is kept is scaled by the rounded rate
SELU_ALPHA = 1.7580993408473766      # scale times alpha of SELU, whose negative is what alpha dropout puts in place of an entry
STEP, ROW, AXES = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, (
    0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F, 0xEB44ACCAB455D165)
Key = int | Tensor
UNSEEDED = ("this module draws random numbers in training (dropout, say), and its clients have not been seeded. Call "
            "clients.seed_torch(name) first, with the clients in the order of the rows.")


def step_keys(streams: Tensor, step: int, rows: int) -> Tensor:
    """The keys (rows,) of a step for the clients with these `streams` (clients,), of which the first `rows` take part.

    A single stream gives as many keys as there are rows, all different, where there are several: examples that are given as
    clients of their own. Raises RuntimeError for more rows than streams otherwise.
    """
    keys = streams + _to_signed_64_bits(step * STEP)
    if len(streams) == 1 and rows > 1:
        return _mix_bits(_mix_bits(keys) + torch.arange(rows, device=keys.device) * _to_signed_64_bits(ROW))
    if rows > len(streams):
        raise RuntimeError(f"{rows} rows are computed, but {len(streams)} clients were seeded. Seed those of this call.")
    return keys[:rows]


class CountedDraws(TorchFunctionMode):
    """Within it, dropout and other draws of one client's step are functions of its key; under `torch.func.vmap` of each one's."""

    def __init__(self, key: Key | None):
        """A step whose draws follow from `key`, a 64-bit integer or a tensor of one; with None a draw raises RuntimeError."""
        super().__init__()
        self.key, self.draws = key, 0
        self.sorted: list[tuple[Tensor, Tensor]] = []      # lengths in their new order, and that order,
        self.packed: list[tuple[Tensor, Tensor]] = []      # batch sizes of the sequences that were packed by them, and the order

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The result of `func`, drawn by counters for the functions in `REPLACED`; others run as they are."""
        replace = REPLACED.get(func)
        found = None if replace is None else replace(self, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found

    def keep(self, shape: torch.Size, rate: float, like: Tensor) -> tuple[Tensor, float]:
        """A mask of this `shape` with ones (kept) and zeros (dropped with probability `rate`), and the share that is kept.

        The mask has the dtype and device of `like`. The share is that of the rate rounded to 1 / 65536.
        """
        dropped = round(rate * LEVELS)
        return self._draw(_kept_by_stack, like.device, tuple(shape), dropped, like.dtype), 1 - dropped / LEVELS

    def uniform(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1) of this `shape`, `dtype` and `device`."""
        return self._draw(_uniform_by_stack, device, tuple(shape), dtype)

    def _draw(self, drawn: Callable[..., Tensor], device: torch.device, *settings: Any) -> Tensor:
        """The next draw of the step, by `drawn(words, device, *settings)`, for one client or, under vmap, a stack of them."""
        if self.key is None:
            raise RuntimeError(UNSEEDED)
        self.draws += 1
        if isinstance(self.key, int):
            return drawn(_mix_bits(self.key ^ _mix_bits(self.draws)), device, *settings)[0]
        return STACKABLE[drawn](self.key, self.draws, device, *settings)


def _places(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A 64-bit number for each place of a tensor of this `shape`, by its coordinates: padding an axis changes no other place."""
    total = torch.zeros(shape, dtype=torch.int64, device=device)
    for axis, size in enumerate(shape):
        along = torch.arange(size, device=device) * _to_signed_64_bits(AXES[axis % len(AXES)] + 2 * (axis // len(AXES)))
        total += along.reshape(-1, *[1] * (len(shape) - axis - 1))
    return total


_known_places = lru_cache(64)(_places)      # on a CPU: a recorded CUDA graph would own what it computes


def _hashed(words: int | Tensor, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """64 bits for each place of each client, (clients, *shape) int64, by `words` (clients,), or by one integer for one client."""
    small = device.type == "cpu" and math.prod(shape) <= 2**16
    places = (_known_places if small else _places)(shape, device)
    return _mix_bits(places[None] + words if isinstance(words, int) else places + words.reshape(-1, *[1] * len(shape)))


def _kept_by_stack(words: int | Tensor, device: torch.device, shape: tuple[int, ...], dropped: int, dtype: torch.dtype) -> Tensor:
    """Masks (clients, *shape) of ones and, with probability `dropped` / 65536, zeros; a hash of 64 bits serves four places."""
    *before, last = shape or (1,)
    bits = _hashed(words, device, (*before, -(-last // 4))).view(torch.int16)
    bits = bits if last % 4 == 0 else bits[..., :last]
    kept = bits >= dropped - LEVELS // 2 if dropped < LEVELS else torch.zeros_like(bits)      # its bound is beyond 16 bits
    return kept.to(dtype) if shape else kept.to(dtype)[..., 0]


def _uniform_by_stack(words: int | Tensor, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), (clients, *shape), with as many bits as the dtype can hold below one."""
    steps = 2.0 ** min(53, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return ((uniform_numbers(_hashed(words, device, shape)) * steps).floor() / steps).to(dtype)


def _stackable(drawn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of the keys of a stack of clients, the number of the draw and its settings, to be called under vmap."""
    return make_stackable(lambda keys, draw, *settings: drawn(_mix_bits(keys ^ _mix_bits(draw)), *settings), 1)


STACKABLE = {drawn: _stackable(drawn) for drawn in (_kept_by_stack, _uniform_by_stack)}


def _drop(mode: CountedDraws, input: Tensor, rate: float, shape: Any, inplace: bool) -> Tensor:
    """`input` times a mask of this `shape`, which broadcasts, divided by the share that is kept; `inplace` changes `input`."""
    mask, share = mode.keep(torch.Size(shape), rate, input)
    mask = mask if share in (0.0, 1.0) else mask.mul_(1 / share)
    return input.mul_(mask) if inplace else input * mask


def _dropout(mode: CountedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True,
             inplace: bool = False) -> Tensor | None:
    """`F.dropout`, `torch.dropout` and `torch.dropout_` with these arguments; None where nothing is drawn."""
    if not training or not 0 < p <= 1:
        return None
    return _drop(mode, input, p, input.shape, inplace or func is torch.dropout_)


def _channel_shape(func: Any, input: Tensor) -> tuple[int, ...]:
    """The shape of a mask that drops whole channels of `input`, (batch, channels, ...); for `func` unbatched (channels, ...)."""
    alone = (func is F.dropout1d and input.ndim == 2) or (func is F.dropout3d and input.ndim == 4)
    kept = 1 if alone else 2
    return (*input.shape[:kept], *[1] * (input.ndim - kept))


def _channel_dropout(mode: CountedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True,
                     inplace: bool = False) -> Tensor | None:
    """`F.dropout1d`, `F.dropout2d`, `F.dropout3d` and `torch.feature_dropout`; None where nothing is drawn."""
    if not training or not 0 < p <= 1 or input.ndim < 2:
        return None
    return _drop(mode, input, p, _channel_shape(func, input), inplace or func is torch.feature_dropout_)


def _alpha_dropout(mode: CountedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = False,
                   inplace: bool = False) -> Tensor | None:
    """`F.alpha_dropout` and `F.feature_alpha_dropout`, which keep mean and variance of what SELU gives; None without a draw.

    A dropped entry becomes -1.758, and all are scaled by a and moved by b = 1.758 a p, where 1 / a^2 = (1 - p) (1 + 1.758^2 p).
    """
    if not training or not 0 < p < 1:
        return None
    whole = func in (F.feature_alpha_dropout, torch.feature_alpha_dropout)
    mask, share = mode.keep(torch.Size(_channel_shape(func, input)) if whole else input.shape, p, input)
    scale = (share * (1 + SELU_ALPHA**2 * (1 - share))) ** -0.5
    found = (input * mask - SELU_ALPHA * (1 - mask)) * scale + SELU_ALPHA * scale * (1 - share)
    return input.copy_(found) if inplace else found


def _attention(mode: CountedDraws, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
               enable_gqa: bool = False) -> Tensor | None:
    """`F.scaled_dot_product_attention` with dropout of the attention weights; None without dropout."""
    if not 0 < dropout_p <= 1:
        return None
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        nothing = (scores == -math.inf).all(-1, keepdim=True)      # a query that may attend to nothing gets zeros
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    else:
        weights = scores.softmax(-1)
    return _drop(mode, weights, dropout_p, weights.shape, False) @ value


def without_override(function: Any) -> Any:
    """A copy of a Python function of PyTorch that does not hand itself to a mode as a whole: the mode sees what it calls.

    PyTorch calls what is inside such a function without the mode that it was handed to.
    """
    copied = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda *_: False},
                          function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_BARE_ATTENTION = without_override(F.multi_head_attention_forward)


def _multi_head_attention(mode: CountedDraws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward` with its dropout drawn by `mode`; None without dropout."""
    rate = args[10] if len(args) > 10 else kwargs["dropout_p"]
    training = args[13] if len(args) > 13 else kwargs.get("training", True)
    if not training or not rate:
        return None
    with mode:
        return _BARE_ATTENTION(*args, **kwargs)


def _sort(mode: CountedDraws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.sort`; of a vector of whole numbers, which may be lengths by which sequences are packed, the order is noted."""
    found = func(input, *args, **kwargs)
    if input.ndim == 1 and not input.is_floating_point() and kwargs.get("out") is None:
        mode.sorted.append((found[0], found[1]))
    return found


def _pack(mode: CountedDraws, func: Any, input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """`torch._pack_padded_sequence`, where the order of the sequences is noted, if they were sorted."""
    found = func(input, lengths, batch_first)
    mode.packed.extend((found[1], order) for values, order in mode.sorted if values is lengths)
    return found


def _drop_packed(mode: CountedDraws, rows: Tensor, rate: float, sizes: Tensor) -> Tensor:
    """Dropout of the rows of packed sequences, (rows, width), by time and by place in the batch before it was sorted.

    `sizes` says how many sequences have each time; in a stack, where sequences are kept padded, it says how many there are.
    """
    batch, whole = int(sizes[0]), int(sizes.sum()) != len(rows)
    order = next((order.to(rows.device) for known, order in mode.packed if known is sizes), None)
    mask, share = mode.keep(torch.Size((len(rows) // batch if whole else len(sizes), batch, rows.shape[1])), rate, rows)
    mask = mask if order is None else mask.index_select(1, order)
    mask = mask.flatten(0, 1) if whole else torch.cat([mask[t, :count] for t, count in enumerate(sizes.tolist())])
    return rows * (mask if share in (0.0, 1.0) else mask * (1 / share))


def _recurrence(mode: CountedDraws, func: Any, *args: Any) -> Any:
    """`torch.lstm`, `torch.gru` and `torch.rnn_*` with dropout between layers, one layer after the other; None without dropout.

    Arguments are those of PyTorch's function, for padded or for packed sequences.
    """
    packed = not isinstance(args[3], bool)
    sizes, state, weights = (args[1:4] if packed else (None, *args[1:3]))
    biased, layers, rate, training, both, *batch_first = args[4 if packed else 3:]
    if not training or not rate or layers < 2:
        return None
    each, ways, many = len(weights) // layers, 1 + both, isinstance(state, (tuple, list))
    states, output, last = (tuple(state) if many else (state,)), args[0], []
    for k in range(layers):
        here = tuple(part[k * ways : (k + 1) * ways] for part in states)
        given = (here if many else here[0], list(weights[k * each : (k + 1) * each]), biased, 1, 0.0, training, both)
        output, *found = func(output, sizes, *given) if packed else func(output, *given, *batch_first)
        last.append(found)
        if k < layers - 1:
            output = _drop_packed(mode, output, rate, sizes) if packed else _drop(mode, output, rate, output.shape, False)
    return output, *(torch.cat(parts) for parts in zip(*last, strict=True))


def _shape_of(size: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The shape that `torch.rand(*size)` or `torch.rand(size=...)` asks for."""
    given = kwargs.pop("size", size)
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else tuple(given)


def _made(mode: CountedDraws, shape: Any, normal: bool, dtype: torch.dtype | None, device: Any) -> Tensor:
    """Uniform numbers of this shape, dtype and device or, where `normal`, standard normal ones (by the inverse distribution)."""
    dtype, device = dtype or torch.get_default_dtype(), torch.device(device or torch.get_default_device())
    if not normal:
        return mode.uniform(shape, dtype, device)
    middle = mode.uniform(shape, torch.float64, device) + 2.0**-54
    return torch.special.ndtri(middle).to(dtype)


def _created(mode: CountedDraws, func: Any, *size: Any, generator: Any = None, out: Any = None, dtype: Any = None,
             device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor | None:
    """`torch.rand` and `torch.randn`; None with a generator or `out`, which are PyTorch's to use."""
    if generator is not None or out is not None or kwargs.pop("layout", None) not in (None, torch.strided):
        return None
    found = _made(mode, _shape_of(size, kwargs), func is torch.randn, dtype, device)
    return found.requires_grad_() if requires_grad else found


def _created_like(mode: CountedDraws, func: Any, input: Tensor, *, dtype: Any = None, device: Any = None,
                  requires_grad: bool = False, **kwargs: Any) -> Tensor:
    """`torch.rand_like` and `torch.randn_like`."""
    found = _made(mode, input.shape, func is torch.randn_like, dtype or input.dtype, device or input.device)
    return found.requires_grad_() if requires_grad else found


def _bernoulli(mode: CountedDraws, func: Any, input: Tensor, p: Any = None, *, generator: Any = None,
               out: Any = None) -> Tensor | None:
    """`torch.bernoulli` and `Tensor.bernoulli`, ones with probability `p`, or `input` where that is None."""
    if generator is not None or out is not None:
        return None
    return (mode.uniform(input.shape, torch.float64, input.device) < (input if p is None else p)).to(input.dtype)


def _bernoulli_(mode: CountedDraws, func: Any, input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor | None:
    """`Tensor.bernoulli_`, which fills `input` with ones with probability `p`, and zeros."""
    if generator is not None:
        return None
    return input.copy_(mode.uniform(input.shape, torch.float64, input.device) < p)


REPLACED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), _dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_), _channel_dropout),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout), _alpha_dropout),
    F.scaled_dot_product_attention: _attention, F.multi_head_attention_forward: _multi_head_attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrence),
    torch.sort: _sort, torch._pack_padded_sequence: _pack,
    **dict.fromkeys((torch.rand, torch.randn), _created), **dict.fromkeys((torch.rand_like, torch.randn_like), _created_like),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli), Tensor.bernoulli_: _bernoulli_}
