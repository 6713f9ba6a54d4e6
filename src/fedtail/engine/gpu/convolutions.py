"""Convolutions and pooling of stacked clients, each with weights of its own.

`torch.func.vmap` makes one grouped convolution of them, which cuDNN computes group by group. Here the whole stack is one batched
matrix product whose rows are the windows, and so are its gradients. On a GPU kernels of our own read the windows where they
lie; elsewhere, and in float64, they are laid out as rows (im2col). Images are kept with their channels innermost, which makes a
window a few runs of contiguous numbers.

Under `StackedOperations()` calls of `conv2d` and `max_pool2d` are replaced where this is possible; all others stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedtail.engine.gpu import triton_kernels
from fedtail.engine.gpu.group_norm import group_norm, group_norm_of_stack
from fedtail.engine.gpu.packed import Padded, keep_padded
from fedtail.engine.gpu.recurrence import gru, lstm, packed_gru, packed_lstm
from fedtail.engine.gpu.stackable import make_stackable

Pair = tuple[int, int]
CPU = torch.device("cpu")
FEW_WEIGHTS = 4096      # up to which the weight gradient is summed by example: else too few products to fill a GPU
INDEXABLE = 2**31       # numbers that a kernel counts in 32 bits


@dataclass(frozen=True)
class Window:
    """How a kernel slides over an image, by height and width."""

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def output_size(self, height: int, width: int) -> Pair:
        """The size (rows, columns) of the output of a convolution or pooling of an image of this height and width."""
        one, two = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in
                    zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True))
        return one, two

    def input_size(self, rows: int, columns: int, more: Pair = (0, 0)) -> Pair:
        """The size (height, width) of the image whose convolution has so many `rows` and `columns`, `more` pixels added to it."""
        one, two = ((count - 1) * s - 2 * p + d * (k - 1) + 1 + m for count, k, s, p, d, m in
                    zip((rows, columns), self.kernel, self.stride, self.padding, self.dilation, more, strict=True))
        return one, two


class StackedOperations(TorchFunctionMode):
    """Within it, convolutions, max-pooling, LSTMs and GRUs of a stack of clients are computed as this package does."""

    def __init__(self, device: torch.device = CPU):
        """Operations of a stack on `device`: lengths that a module moves to the CPU and ranges it makes there stay on it."""
        super().__init__()
        self.device, self.padded = device, list[Padded]()      # packed sequences, in the order in which they were packed

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The result of `func`, computed by this package for 2-D convolutions, max-pooling, LSTMs, GRUs and bags of embeddings.

        All other functions, and calls it does not support, are left to PyTorch.
        """
        found: Any = None
        if func is torch.lstm or func is torch.gru:
            found = self.run_recurrence(func is torch.lstm, *args, **(kwargs or {}))
        elif func is torch._pack_padded_sequence:
            found = self.pack(*args, **(kwargs or {}))
        elif func is torch._pad_packed_sequence:
            found = self.pad_packed(*args, **(kwargs or {}))
        elif func is Tensor.cpu or func is Tensor.to or func is torch.arange:
            found = self.stay_on_device(func, *args, **(kwargs or {}))
        elif func is Tensor.scatter_ and not kwargs and len(args) == 4 and isinstance(args[3], Tensor):
            found = args[0].copy_(torch.scatter(*args))      # in place it is computed one client after the other
        elif func is torch.conv2d:
            found = self._conv2d(*args, **(kwargs or {}))
        elif func is F.max_pool2d or func is torch.max_pool2d:
            found = self._max_pool2d(*args, **(kwargs or {}))
        elif func is F.embedding_bag:
            found = self.embedding_bag(*args, **(kwargs or {}))
        elif func is F.group_norm:
            found = self.group_norm(*args, **(kwargs or {}))
        elif func is F.adaptive_avg_pool2d:
            found = self.adaptive_avg_pool2d(*args, **(kwargs or {}))
        elif func is F.conv_transpose2d:
            found = self.conv_transpose2d(*args, **(kwargs or {}))
        elif func in (F.scaled_dot_product_attention, F.multi_head_attention_forward) and self.device.type == "cpu":
            with sdpa_kernel(SDPBackend.MATH):      # fused, it is computed one client after the other there
                found = func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found

    def _conv2d(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                dilation: Any = 1, groups: int = 1) -> Tensor | None:
        """The result of `torch.conv2d` with these arguments, computed by `convolve`; under autocast, in autocast's dtype.

        The arguments are those of `torch.conv2d`, `input` being (batch, channels, height, width). None, so that PyTorch computes
        it, for inputs without four axes, groups, padding given as text, weights of another dtype than the input, and where
        `convolve` returns None.
        """
        if input.ndim != 4 or groups != 1 or isinstance(padding, str):
            return None
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            narrow = torch.get_autocast_dtype("cuda")
            input, weight, bias = input.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        height, width = weight.shape[2:]
        window = Window((height, width), _height_and_width(stride), _height_and_width(padding), _height_and_width(dilation))
        return self.convolve(input, weight, bias, window) if input.dtype == weight.dtype else None

    def conv_transpose2d(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                         output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Tensor | None:
        """`F.conv_transpose2d` of one client, as the gradient of a convolution, which has that one as its own; under vmap of all.

        None, so that PyTorch computes it, for inputs without four axes, groups, and weights that clients share.
        """
        if input.ndim != 4 or groups != 1 or not torch._C._functorch.is_functorch_wrapped_tensor(weight):
            return None
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            narrow = torch.get_autocast_dtype("cuda")
            input, weight, bias = input.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        if input.dtype != weight.dtype:
            return None
        window = Window(*map(_height_and_width, (weight.shape[2:], stride, padding, dilation)))
        rows, columns = input.shape[2:]
        size = window.input_size(rows, columns, _height_and_width(output_padding))
        found = _TransposedConvolution.apply(input, weight, window, size)
        return found if bias is None else found + bias[:, None, None]

    def _max_pool2d(self, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                    ceil_mode: bool = False, return_indices: bool = False) -> Tensor | None:
        """The result of `max_pool2d` with these arguments, computed by `max_pool`.

        The arguments are those of `torch.nn.functional.max_pool2d`, `input` being (batch, channels, height, width). None, so that
        PyTorch computes it: on a CPU or without Triton, and for inputs without four axes, overlapping windows, padding, dilation,
        `ceil_mode` or `return_indices`.
        """
        kernel, pace = _height_and_width(kernel_size), _height_and_width(stride or kernel_size)
        apart = all(k <= s for k, s in zip(kernel, pace, strict=True))      # each number is in one window at most
        spread = any(_height_and_width(padding)) or _height_and_width(dilation) != (1, 1)
        if (input.ndim != 4 or not apart or spread or ceil_mode or return_indices or _triton_kernels_if_usable(input) is None):
            return None
        return self.max_pool(input, Window(kernel, pace))

    def convolve(self, images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor | None:
        """The convolution of one client's images (batch, channels, height, width), differentiable.

        Returns (batch, outputs, rows, columns). `weight` is (outputs, channels, kernel...), `bias` (outputs,) or None, and
        `window` has stride, padding and dilation. Under `torch.func.vmap` all clients are computed at once, each with its own
        weights. None, so that PyTorch computes all clients as one batch, for weights that they share, as frozen ones.
        """
        if not torch._C._functorch.is_functorch_wrapped_tensor(weight):
            return None
        return _Convolution.apply(images, weight, bias, window)

    def max_pool(self, images: Tensor, window: Window) -> Tensor:
        """The largest number of each `window` of one client's images (batch, channels, height, width), differentiable.

        Returns (batch, channels, rows, columns). Under `torch.func.vmap` all clients are computed at once.
        """
        return _MaxPool.apply(images, window)[0]

    def embedding_bag(self, input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
                      norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", *rest: Any,
                      **more: Any) -> Tensor | None:
        """`F.embedding_bag` of bags of equal length, (batch, length), as the sum or mean of their embeddings, which do stack.

        None, so that PyTorch computes it, for bags of unequal length and other settings.
        """
        other = any(value is not None and value is not False for value in (*rest, *more.values()))
        if input.ndim != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq or mode == "max" or other:
            return None
        return F.embedding(input, weight).sum(1) if mode == "sum" else F.embedding(input, weight).mean(1)

    def group_norm(self, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
                   eps: float = 1e-5) -> Tensor | None:
        """`F.group_norm` of one client's images by a Triton kernel; on a CPU by PyTorch, on images one after the other in memory.

        None, so that PyTorch computes it, on a GPU for inputs without four axes, in float64, and without weight and bias.
        """
        if not input.is_cuda:
            return F.group_norm(input.clone(memory_format=torch.contiguous_format), num_groups, weight, bias, eps)
        if weight is None or bias is None or not _norms_by_triton(input):
            return None
        return group_norm(input, num_groups, weight, bias, eps)

    def adaptive_avg_pool2d(self, input: Tensor, output_size: Any) -> Tensor | None:
        """`F.adaptive_avg_pool2d` to one pixel, as a mean, which does stack; None, for PyTorch, to other sizes."""
        return input.mean((-2, -1), keepdim=True) if output_size in (1, (1, 1), [1, 1]) else None

    def run_recurrence(self, is_lstm: bool, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`torch.lstm` or `torch.gru` with these arguments, for padded sequences or for packed ones that this context packed.

        Returns the tuple of tensors that these return, or None where the call is not supported and PyTorch computes it.
        """
        padded = next((one for one in self.padded if args and args[0] is one.sizes), None)
        if padded is not None:
            return (packed_lstm if is_lstm else packed_gru)(padded, input, *args, **kwargs)
        return (lstm if is_lstm else gru)(input, *args, **kwargs)

    def pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor] | None:
        """`torch._pack_padded_sequence`: rows and batch sizes that stand for packed sequences, which are kept padded."""
        data, padded = keep_padded(input, lengths, batch_first)
        self.padded.append(padded)
        return data, padded.sizes

    def pad_packed(self, data: Tensor, sizes: Tensor, batch_first: bool, value: float,
                   total: int) -> tuple[Tensor, Tensor] | None:
        """`torch._pad_packed_sequence` of sequences that this context packed; None, so that PyTorch computes it, for others."""
        return next((one.pad(data, batch_first, value, total) for one in self.padded if sizes is one.sizes), None)

    def stay_on_device(self, func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """Whole numbers of a stack that a module moves to the CPU, as lengths to pack by, as they are; ranges on the device.

        `func` is `Tensor.cpu`, `Tensor.to` or `torch.arange`. No value of a stack can be read on the CPU, and a step that waits
        for it cannot be recorded. None for all else, which PyTorch computes.
        """
        if self.device.type == "cpu":
            return None
        if func is torch.arange:
            elsewhere = kwargs.get("device") is not None or "out" in kwargs
            return None if elsewhere else torch.arange(*args, **{**kwargs, "device": self.device})
        to_cpu = func is Tensor.cpu or (len(args) == 2 and not kwargs and args[1] in ("cpu", CPU))
        whole = not args[0].is_floating_point() and torch._C._functorch.is_functorch_wrapped_tensor(args[0])
        return args[0] if to_cpu and whole else None


class FlatOperations(StackedOperations):
    """Within it, convolutions and max-pooling of one model on many examples, without gradients, are computed by Triton kernels.

    LSTMs, GRUs, and all of it on a CPU, are left to PyTorch.
    """

    def embedding_bag(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that PyTorch computes it; the arguments are not used."""

    def group_norm(self, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
                   eps: float = 1e-5) -> Tensor | None:
        """`F.group_norm` with one model, without gradients, by a Triton kernel; None, for PyTorch, as above and on CPUs."""
        if weight is None or bias is None or not _norms_by_triton(input):
            return None
        return group_norm_of_stack(input[None], weight[None], bias[None], num_groups, eps)[0][0]

    def adaptive_avg_pool2d(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that PyTorch computes it; the arguments are not used."""

    def conv_transpose2d(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that PyTorch computes it; the arguments are not used."""

    def run_recurrence(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that PyTorch computes LSTMs and GRUs; the arguments are not used."""

    def pack(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that PyTorch packs sequences; the arguments are not used."""

    def convolve(self, images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor | None:
        """The convolution of images (batch, channels, height, width) with one model by a Triton kernel, without gradients.

        `weight` is (outputs, channels, kernel...), `bias` (outputs,) or None, and `window` has stride, padding and dilation.
        Returns (batch, outputs, rows, columns). None, so that PyTorch computes it: on a CPU, without Triton, in float64, and for
        2^31 or more numbers.
        """
        if not _convolves_by_triton(images, len(images) * len(weight) * math.prod(window.output_size(*images.shape[2:]))):
            return None
        return _convolve_stack(images[None], weight[None], None if bias is None else bias[None], window)[0]

    def max_pool(self, images: Tensor, window: Window) -> Tensor:
        """The largest number of each window of images (batch, channels, height, width) by a Triton kernel, without gradients.

        Returns (batch, channels, rows, columns); the indices that gradients would need are not computed.
        """
        return triton_kernels.max_pool(images, window, keep=False)[0]


def _height_and_width(value: Any) -> Pair:
    """(height, width) as integers, from `value`: one number for both, or a tuple or list of one or two numbers."""
    first, *rest = value if isinstance(value, (tuple, list)) else (value,)
    return int(first), int(rest[0] if rest else first)


def _triton_kernels_if_usable(images: Tensor) -> Any:
    """The module `triton_kernels` if `images` are floating-point numbers on a GPU and Triton can compile there; else None."""
    return triton_kernels if images.is_cuda and images.is_floating_point() and _triton_compiles() else None


@cache
def _triton_compiles() -> bool:
    """Whether Triton can compile and run a kernel here: it may be installed without the C compiler it needs.

    Tried by pooling a small image at the first call; the result is cached.
    """
    try:
        triton_kernels.max_pool(torch.zeros(1, 1, 2, 2, device="cuda"), Window((2, 2), (2, 2)))
    except Exception:      # whatever is missing
        return False
    return True


def _convolves_by_triton(images: Tensor, written: int) -> bool:
    """Whether a Triton kernel can convolve these images, which it does without a copy of their windows.

    False on a CPU, without Triton, in float64, and where `images` or the output have 2^31 numbers or more; `written` is how many
    the output has.
    """
    return (_triton_kernels_if_usable(images) is not None and images.dtype != torch.float64
            and max(images.numel(), written) < INDEXABLE)


def _norms_by_triton(images: Tensor) -> bool:
    """Whether a Triton kernel can normalise these images (batch, channels, height, width): on a GPU, not in float64."""
    return images.ndim == 4 and images.dtype != torch.float64 and _triton_kernels_if_usable(images) is not None


def _convolve_stack(images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """The convolution of images (clients, batch, channels, height, width) with weights (clients, outputs, channels, kernel...).

    `bias` is (clients, outputs) or None. Returns (clients, batch, outputs, rows, columns), with the axis of outputs innermost in
    memory. Computed by a Triton kernel where it can, else by a matrix product with the windows as rows.
    """
    matrix, shape = weight.permute(0, 1, 3, 4, 2).flatten(2), (images.shape[1], *window.output_size(*images.shape[3:]))
    if _convolves_by_triton(images, matrix.shape[0] * matrix.shape[1] * math.prod(shape)):
        return triton_kernels.convolve(images, matrix, bias, window)
    columns = _window_rows(images, window)
    found = torch.bmm(columns, matrix.mT) if bias is None else torch.baddbmm(bias[:, None], columns, matrix.mT)
    return found.unflatten(1, shape).permute(0, 1, 4, 2, 3)


def _window_rows(images: Tensor, window: Window) -> Tensor:
    """A matrix for each client whose rows are the windows of its images, (clients, batch * places, kernel * channels).

    `images` is (clients, batch, channels, height, width), and gets a border of zeros as padding. A place is a position of the
    window in an image: there are rows * columns of them, those of the output.
    """
    (high, wide), (down, across) = window.kernel, window.dilation
    images = F.pad(images, (window.padding[1],) * 2 + (window.padding[0],) * 2)
    views = images.unfold(3, down * (high - 1) + 1, window.stride[0]).unfold(4, across * (wide - 1) + 1, window.stride[1])
    return views[..., ::down, ::across].permute(0, 1, 3, 4, 5, 6, 2).flatten(1, 3).flatten(2)


def _fold_windows(columns: Tensor, window: Window, size: Pair) -> Tensor:
    """For each pixel, the sum of the values that all windows hold for it: the transpose of cutting images into windows.

    `columns` is (clients, batch, rows, columns, kernel..., channels). Returns images (clients, batch, channels, height, width),
    where `size` is (height, width).
    """
    clients, batch, rows, across, high, wide, channels = columns.shape
    if _triton_kernels_if_usable(columns) and columns.numel() < INDEXABLE:
        return triton_kernels.fold_windows(columns.flatten(0, 1), window, size).unflatten(0, (clients, batch))
    (top, left), (height, width) = window.padding, size
    wider = columns.new_zeros(clients, batch, rows, width + 2 * left, high, channels)      # first along rows, then down
    for k in range(wide):
        wider[:, :, :, _pixels_at_kernel_entry(k, across, window, 1)] += columns[:, :, :, :, :, k]
    whole = columns.new_zeros(clients, batch, height + 2 * top, width + 2 * left, channels)
    for k in range(high):
        whole[:, :, _pixels_at_kernel_entry(k, rows, window, 0)] += wider[:, :, :, :, k]
    return whole[:, :, top : top + height, left : left + width].permute(0, 1, 4, 2, 3)


def _pixels_at_kernel_entry(k: int, places: int, window: Window, axis: int) -> slice:
    """The slice of pixels, along one axis of a padded image, that entry `k` of the kernel meets as the window moves along.

    `places` is the number of positions of the window; `axis` is 0 for height, 1 for width.
    """
    first, stride = k * window.dilation[axis], window.stride[axis]
    return slice(first, first + (places - 1) * stride + 1, stride)


def _weight_gradient(images: Tensor, outputs: Tensor, biased: bool, window: Window) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the weights, (clients, outputs, channels, kernel...), and to the bias, (clients, outputs).

    `images` are the inputs, (clients, batch, channels, height, width), and `outputs` the gradients with respect to the outputs,
    (clients, batch, outputs, rows, columns). If there is no bias (not `biased`), the second tensor has no meaning and may be
    empty. `window` has kernel size, stride, padding and dilation.
    """
    if _convolves_by_triton(images, outputs.numel()):
        return triton_kernels.weight_gradient(images, outputs, window, biased)
    clients, batch, channels = outputs.shape[:3]
    columns, rows = _window_rows(images, window), _outputs_as_matrices(outputs)
    if columns.shape[2] * channels <= FEW_WEIGHTS:
        rows, columns = (t.reshape(clients * batch, -1, t.shape[2]) for t in (rows, columns))
    found = torch.bmm(rows.mT, columns).unflatten(0, (clients, -1)).sum(1).unflatten(2, (*window.kernel, -1))
    return found.permute(0, 1, 4, 2, 3), outputs.sum((1, 3, 4))


def _input_gradient(outputs: Tensor, weight: Tensor, window: Window, size: Pair) -> Tensor:
    """Gradients with respect to the images, (clients, batch, channels, height, width), where `size` is (height, width).

    `outputs` are the gradients with respect to the outputs, (clients, batch, outputs, rows, columns); `weight` is (clients,
    outputs, channels, kernel...). Where the stride is one, padding is less than the extent of the kernel, it pays and a Triton
    kernel can do it, the result is a convolution of `outputs` with the kernel turned by 180 degrees. Otherwise the gradients of
    all windows are computed and summed for each pixel.
    """
    clients, batch, wide, *places = outputs.shape
    channels, pixels = weight.shape[2], math.prod(size)
    down, along = (d * (k - 1) - p for k, p, d in zip(window.kernel, window.padding, window.dilation, strict=True))
    turns = window.stride == (1, 1) and min(down, along) >= 0
    exact = triton_kernels.product_precision(outputs) == triton_kernels.EXACT
    wasteful = exact and 2 * pixels > 3 * math.prod(places)      # most products are with zeros
    if turns and not wasteful and _convolves_by_triton(outputs, clients * batch * channels * pixels):
        back = Window(window.kernel, (1, 1), (down, along), window.dilation)
        return triton_kernels.convolve(outputs, weight.permute(0, 2, 3, 4, 1).flatten(2), None, back, turned=True)
    if _convolves_by_triton(outputs, outputs.numel() // wide * weight[0, 0].numel()):
        matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)
        columns = triton_kernels.convolve(outputs, matrix, None, Window((1, 1), (1, 1))).permute(0, 1, 3, 4, 2)
    else:
        columns = torch.bmm(_outputs_as_matrices(outputs), weight.permute(0, 1, 3, 4, 2).flatten(2))
    return _fold_windows(columns.reshape(clients, batch, *places, *window.kernel, channels), window, size)


def _outputs_as_matrices(outputs: Tensor) -> Tensor:
    """`outputs` (clients, batch, channels, rows, columns) as matrices (clients, batch * rows * columns, channels)."""
    return outputs.permute(0, 1, 3, 4, 2).flatten(1, 3)


convolve, convolve_with_bias = make_stackable(_convolve_stack, 2), make_stackable(_convolve_stack, 3)
weight_gradient, input_gradient = make_stackable(_weight_gradient, 2), make_stackable(_input_gradient, 2)


class _Convolution(torch.autograd.Function):
    """A 2-D convolution, and its gradients, of one client; under `torch.func.vmap` of all clients at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        """The outputs (batch, outputs, rows, columns) of one client; under `torch.func.vmap` those of all clients at once.

        `images` is (batch, channels, height, width), `weight` (outputs, channels, kernel...), `bias` (outputs,) or None. `window`
        has kernel size, stride, padding and dilation.
        """
        return (convolve if bias is None else convolve_with_bias)(images, weight, bias, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for `backward` images, weights and window from `inputs`, the arguments of `forward`, and whether there is a bias.

        `output` is not used.
        """
        images, weight, bias, ctx.window = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, outputs: Tensor) -> Any:
        """Gradients with respect to the four arguments of `forward`; `outputs` are those with respect to its result.

        They are None where not needed, for an absent bias, and for the window.
        """
        images, weight = ctx.saved_tensors
        by_images = input_gradient(outputs, weight, ctx.window, tuple(images.shape[2:])) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:3]):
            return by_images, None, None, None
        by_weight, by_bias = weight_gradient(images, outputs, ctx.has_bias, ctx.window)
        return by_images, by_weight, by_bias if ctx.has_bias else None, None


class _TransposedConvolution(torch.autograd.Function):
    """The gradient of a 2-D convolution with respect to its images, as an operation of one client; under vmap of all at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outputs: Tensor, weight: Tensor, window: Window, size: Pair) -> Tensor:
        """Images (batch, channels, *size), from `outputs` (batch, outputs, *rest) and `weight` (outputs, channels, *kernel)."""
        return input_gradient(outputs, weight, window, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for `backward` what `forward` was given, `inputs`; `output` is not used."""
        outputs, weight, ctx.window, _ = inputs
        ctx.save_for_backward(outputs, weight)

    @staticmethod
    def backward(ctx: Any, by_images: Tensor) -> Any:
        """Gradients with respect to the four arguments of `forward`: convolutions of `by_images`, those of its result."""
        outputs, weight = ctx.saved_tensors
        by_outputs = convolve(by_images, weight, None, ctx.window) if ctx.needs_input_grad[0] else None
        by_weight = weight_gradient(by_images, outputs, False, ctx.window)[0] if ctx.needs_input_grad[1] else None
        return by_outputs, by_weight, None, None


def _max_pool_stack(images: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The largest number of each window and its index within the window, both (clients, batch, channels, rows, columns).

    `images` is (clients, batch, channels, height, width), on a GPU.
    """
    largest, place = triton_kernels.max_pool(images.flatten(0, 1), window)
    return largest.unflatten(0, images.shape[:2]), place.unflatten(0, images.shape[:2])


def _max_pool_gradient(outputs: Tensor, place: Tensor, window: Window, size: Pair) -> Tensor:
    """Gradients with respect to the images, (clients, batch, channels, height, width), where `size` is (height, width).

    `outputs` are the gradients with respect to the pooled numbers, (clients, batch, channels, rows, columns). Each goes to the
    pixel that was largest in its window, whose index there is in `place`; other pixels get zero.
    """
    images = triton_kernels.max_unpool(outputs.flatten(0, 1), place.flatten(0, 1), window, size)
    return images.unflatten(0, outputs.shape[:2])


max_pool, max_pool_gradient = make_stackable(_max_pool_stack, 1), make_stackable(_max_pool_gradient, 2)


class _MaxPool(torch.autograd.Function):
    """Max-pooling and its gradient, of one client; under `torch.func.vmap` of all clients at once.

    Among equal numbers the first in the window is the largest, as in PyTorch.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """The largest number of each window of one client's images, and its index in the window.

        Both are (batch, channels, rows, columns). Under `torch.func.vmap` those of all clients at once.
        """
        return max_pool(images, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the window and the image size, from `inputs`, and the indices of the largest numbers, from `output`.

        These indices are marked as not differentiable.
        """
        images, ctx.window = inputs
        ctx.size = tuple(images.shape[2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, _: Any) -> Any:
        """Gradients with respect to the two arguments of `forward`; `outputs` are those with respect to the largest numbers.

        The gradient of the window is None.
        """
        return max_pool_gradient(outputs, ctx.saved_tensors[0], ctx.window, ctx.size), None
