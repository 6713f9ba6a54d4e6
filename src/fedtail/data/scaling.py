"""Inputs brought to mean 0 and standard deviation 1, by numbers that are fitted on training clients and kept with the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedtail.data.population import Population
from fedtail.data.population_kind import check_is_population
from fedtail.errors import FieldError
from fedtail.types import Examples

SCALING = "scaling.safetensors"      # in the folder of a run whose inputs were scaled
By = Literal["columns", "pixels", "channels"]
CONSTANT = 1e-9                      # of the mean: what rounding may leave of the deviation of a constant
_BLOCK = 1 << 22                     # numbers read at once
_ALONE = "x"                         # the name of inputs that are one tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """A shift and a scale for inputs: `apply(x)` is (x - shift) / scale, in double precision; integers in a dict stay.

    Made by `Scaling.fit(train, "columns")` from training clients, or by `Scaling.public(0, 255)` from numbers known without the
    data. Runs of files with `[data] scale` keep theirs as `scaling.safetensors` in the run's folder, since the models there take
    scaled inputs: `Scaling.load` reads it, and `before(module)` is a module that scales first.
    """

    shift: Mapping[str, Tensor]          # by name of the input, "x" for a single tensor; broadcast to an example
    scale: Mapping[str, Tensor]
    is_dict: bool = False                # whether inputs are a dict
    fitted: bool = True                  # from clients' data, so that it tells about them

    @classmethod
    def fit(cls, population: Population, by: By = "columns") -> Scaling:
        """The scaling that brings these clients' examples, all together, to mean 0 and standard deviation 1.

        By "columns" each feature of a vector has its own numbers (for padded sequences each feature of a position, padding left
        out), by "pixels" each entry of an example of any shape, and by "channels" each channel of (channels, height, width).
        What never changes is only shifted. Of a dict of inputs, integers stay as they are. Raises FieldError for another `by`,
        ValueError where the inputs do not have such a shape, where none are scaled, or where they are scaled already.
        """
        check_is_population(population)
        if by not in ("columns", "pixels", "channels"):
            raise FieldError("scale", '"columns", "pixels" or "channels"', by)
        if population.scaling is not None:
            raise ValueError("these inputs are scaled already. Fit on the population as it was before.")
        is_dict = isinstance(population.inputs, dict)
        parts = population.inputs if isinstance(population.inputs, dict) else {_ALONE: population.inputs}
        chosen = {name: values for name, values in parts.items() if not is_dict or _is_scaled_in_dict(values)}
        if not chosen:
            raise ValueError(f"none of the inputs {', '.join(parts)} holds floats or bytes, and tokens are not scaled. Leave "
                             "out scale.")
        rows, lengths = population.example_clients_and_rows()[1], parts.get("lengths") if is_dict else None
        fitted = {name: _mean_and_deviation(values, rows, _kept_axes(values, by, name, lengths is not None),
                                            lengths if name == "sequence" else None) for name, values in chosen.items()}
        shift, scale = ({name: both[k] for name, both in fitted.items()} for k in (0, 1))
        return cls(shift, scale, is_dict)

    @classmethod
    def public(cls, shift: Any = 0.0, scale: Any = 1.0) -> Scaling:
        """The scaling of one tensor of inputs by given numbers, or arrays that broadcast to an example; for private use.

        Raises FieldError for a scale that is not positive and finite, or a shift that is not finite.
        """
        moved, by = (torch.as_tensor(value, dtype=torch.float64) for value in (shift, scale))
        if not bool(((by > 0) & by.isfinite()).all()) or not bool(moved.isfinite().all()):
            raise FieldError("scale", "positive and finite, and the shift finite", scale, "Pixels of bytes are scaled by 255.")
        return cls({_ALONE: moved}, {_ALONE: by}, fitted=False)

    def apply(self, inputs: Examples) -> Examples:
        """Inputs of examples, a tensor or a dict of tensors as the scaling was made for, scaled; new tensors.

        Floats keep their dtype, integers and bytes become float32. The padding of sequences stays 0. Raises ValueError where the
        inputs are of another form or shape.
        """
        if isinstance(inputs, dict) != self.is_dict or (isinstance(inputs, dict) and not self.shift.keys() <= inputs.keys()):
            raise ValueError(f"the scaling is for inputs {', '.join(self.shift)}{'' if self.is_dict else ' (one tensor)'}, got "
                             f"{', '.join(inputs) if isinstance(inputs, dict) else 'one tensor'}.")
        if not isinstance(inputs, dict):
            return self._scaled(_ALONE, inputs)
        done = {name: self._scaled(name, values) if name in self.shift else values for name, values in inputs.items()}
        if "sequence" in self.shift and "lengths" in inputs:
            done["sequence"] = _without_padding(done["sequence"], inputs["lengths"])
        return done

    def __call__(self, population: Population) -> Population:
        """A population of the same clients whose inputs are scaled, in memory; its `scaling` is this one.

        Raises ValueError where they are scaled already.
        """
        if population.scaling is not None:
            raise ValueError("these inputs are scaled already.")
        return replace(population, inputs=self.apply(population.inputs), scaling=self, folder=None)

    def before(self, module: nn.Module) -> nn.Module:
        """A module that scales its inputs and then calls `module`; the numbers are buffers of it, so that files keep them."""
        return ScaledInputsModule(self, module) if self.is_dict else ScaledModule(self, module)

    def to_bytes(self) -> bytes:
        """The bytes of a safetensors file with the numbers, for `load`."""
        from safetensors.torch import save

        tensors = {f"{kind}.{name}": values.contiguous() for kind, held in (("shift", self.shift), ("scale", self.scale))
                   for name, values in held.items()}
        return save(tensors, {"inputs": "dict" if self.is_dict else "tensor", "fitted": str(self.fitted)})

    @classmethod
    def load(cls, path: str | Path) -> Scaling:
        """The scaling in the file `path`, or in `scaling.safetensors` of the folder `path`.

        Raises FileNotFoundError where there is none, ValueError where the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        place = Path(path) / SCALING if Path(path).is_dir() else Path(path)
        if not place.is_file():
            raise FileNotFoundError(f"there is no {place}: the run's inputs were not scaled, or it has not begun.")
        try:
            with safe_open(place, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}      # noqa: SIM118 (not a dict)
                about = file.metadata() or {}
            held = {kind: {name.partition(".")[2]: values for name, values in tensors.items() if name.startswith(f"{kind}.")}
                    for kind in ("shift", "scale")}
            if not held["shift"] or held["shift"].keys() != held["scale"].keys():
                raise ValueError(f"it holds {', '.join(tensors) or 'nothing'}")
        except (OSError, SafetensorError, ValueError) as reason:
            raise ValueError(f"{place} is no scaling that can be read ({reason}).") from reason
        return cls(held["shift"], held["scale"], about.get("inputs") == "dict", about.get("fitted") != "False")

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        """One input, (examples, ...), shifted and scaled; raises ValueError where an example has another shape."""
        dtype = values.dtype if values.is_floating_point() else torch.float32
        shift, scale = (held[name].to(values.device) for held in (self.shift, self.scale))
        try:
            fits = torch.broadcast_shapes(shift.shape, scale.shape, values.shape[1:]) == values.shape[1:]
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"the scaling is for examples of shape {tuple(shift.shape)}, got {tuple(values.shape[1:])}.")
        out = torch.empty(values.shape, dtype=dtype, device=values.device)
        step = max(1, _BLOCK // max(1, math.prod(values.shape[1:])))
        for begin in range(0, len(values), step):
            out[begin:begin + step] = (values[begin:begin + step].double() - shift) / scale
        return out


class ScaledModule(nn.Module):
    """A module whose inputs, one tensor, are scaled first; the shift and the scale are buffers, in double precision."""

    def __init__(self, scaling: Scaling, module: nn.Module):
        """Hold `module`, and the numbers of `scaling` as buffers: `shift_x` and `scale_x`, x being the name of the input."""
        super().__init__()
        self.module, self.names = module, tuple(scaling.shift)
        for name in self.names:
            self.register_buffer(f"shift_{name}", scaling.shift[name].clone())
            self.register_buffer(f"scale_{name}", scaling.scale[name].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """The module's outputs for inputs (examples, ...) as they are, of any type of number."""
        return self.module(self.scaled(_ALONE, inputs))

    def scaled(self, name: str, values: Tensor) -> Tensor:
        """The input called `name`, scaled, in the precision of the module's parameters."""
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        return ((values - self.get_buffer(f"shift_{name}")) / self.get_buffer(f"scale_{name}")).to(dtype)


class ScaledInputsModule(ScaledModule):
    """A module that is called with several inputs by name, some of which are scaled first."""

    def forward(self, **inputs: Tensor) -> Tensor:      # type: ignore[override]
        """The module's outputs for its inputs by name; the padding of sequences stays 0."""
        done = {name: self.scaled(name, values) if name in self.names else values for name, values in inputs.items()}
        if "sequence" in self.names and "lengths" in inputs:
            done["sequence"] = _without_padding(done["sequence"], inputs["lengths"])
        return self.module(**done)


def _without_padding(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Sequences (examples, time, ...) with zeros after their `lengths`, (examples,)."""
    beyond = torch.arange(sequence.shape[1], device=sequence.device) >= lengths.reshape(-1, 1)
    return sequence.masked_fill(beyond.reshape(*beyond.shape, *[1] * (sequence.ndim - 2)), 0.0)


def scale_splits(splits: dict[str, Population], scale: By | Scaling) -> dict[str, Population]:
    """The populations by split with scaled inputs, by a scaling that is given or fitted on the split "train" alone.

    Splits that share their examples share the scaled ones too.
    """
    scaling = scale if isinstance(scale, Scaling) else Scaling.fit(splits["train"], scale)
    done: dict[int, Population] = {}
    for population in splits.values():
        if id(population.inputs) not in done:
            done[id(population.inputs)] = scaling(population)
    return {name: replace(population, inputs=done[id(population.inputs)].inputs, scaling=scaling, folder=None)
            for name, population in splits.items()}


def _is_scaled_in_dict(values: Tensor) -> bool:
    """Whether one of several inputs is scaled: floats and bytes are, other integers are tokens, lengths or positions."""
    return values.is_floating_point() or values.dtype == torch.uint8


def _kept_axes(values: Tensor, by: By, name: str, sequences: bool) -> tuple[int, ...]:
    """The axes of `values`, (examples, ...), along which every position has numbers of its own.

    Raises ValueError where the inputs called `name` do not have the shape that `by` needs; in `sequences`, "columns" are those
    of a position.
    """
    axes = values.ndim
    if by == "pixels" or axes == 1 or (by == "columns" and axes == 2 and not (sequences and name == "sequence")):
        return tuple(range(1, axes))
    if by == "columns" and sequences and name == "sequence":
        return tuple(range(2, axes))
    if by == "channels" and axes > 2:
        return (1,)
    need = 'Columns are those of vectors: write "pixels" or "channels".' if by == "columns" else \
        'Channels are those of (channels, height, width): write "columns" or "pixels".'
    raise ValueError(f"scale = {by!r}, but {name} has examples of shape {tuple(values.shape[1:])}. {need}")


def _mean_and_deviation(values: Tensor, rows: Tensor, kept: tuple[int, ...], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the given `rows` of `values`, float64 of a shape that broadcasts to an example.

    The axes `kept` keep their length. Where `lengths` (examples,) are given, positions of sequences beyond them are left out. The
    deviation is 1 where nothing varies, but for rounding. Values are read twice, in blocks.
    """
    shape = torch.Size(values.shape[axis] if axis in kept else 1 for axis in range(1, values.ndim))
    each = math.prod(values.shape[1:]) // math.prod(shape)                 # numbers of an example for one mean
    count = len(rows) * each if lengths is None else int(lengths[rows].sum())
    mean = _sum_of_powers(values, rows, shape, lengths, torch.zeros(shape, dtype=torch.float64), 1) / count
    deviation = (_sum_of_powers(values, rows, shape, lengths, mean, 2) / count).sqrt()
    return mean, deviation.where(deviation > CONSTANT * mean.abs(), 1.0)


def _sum_of_powers(values: Tensor, rows: Tensor, shape: torch.Size, lengths: Tensor | None, centre: Tensor, power: int) -> Tensor:
    """The sum over the given rows of (values - centre) to a power, float64 of `shape`, which `centre` has.

    Axes of length 1 in `shape` are summed over. Positions of sequences beyond `lengths` are left out where they are given.
    """
    total = torch.zeros(shape, dtype=torch.float64)
    step = max(1, _BLOCK // max(1, math.prod(values.shape[1:])))
    for begin in range(0, len(rows), step):
        some = rows[begin:begin + step]
        terms = (values[some].double() - centre) ** power
        if lengths is not None:
            beyond = torch.arange(values.shape[1]) >= lengths[some].reshape(-1, 1)
            terms = terms.masked_fill(beyond.reshape(*beyond.shape, *[1] * (values.ndim - 2)), 0.0)
        total += terms.sum(0).sum_to_size(shape)
    return total
