"""A user's module is tried on a few examples before it is trusted: what would go wrong in silence is refused in words."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.data.population import select_rows
from fedtail.losses import is_padding
from fedtail.modules import call_module, copy_around_frozen, lock_and_restore_generators, trainable_parameters, training_copy
from fedtail.types import Examples

CLOSE = 1e-3         # of the largest output: far above rounding over batches of different sizes, far below a mean over the batch
ROUNDING = 32        # units in the last place, where those are coarse (half precision)
AGAIN = 4            # calls of any module, which should all give the same
TIMES = 32           # calls of a module that was seen to draw: whether it drops a layer, say, does not show every time


def try_module(module: nn.Module, inputs: Examples) -> Tensor:
    """The module's outputs for a few examples, `inputs`, computed by a copy on the CPU in evaluation mode.

    Raises ValueError for a module that fails or does not return a tensor, has tensor hooks on its parameters, writes to its
    inputs, changes its own tensors in training mode, or is random in a way that no seed of a run controls. The module and torch's
    generators are left as they were, but for frozen parameters that a forward writes to, which are shared.
    """
    _refuse_tensor_hooks(module)
    trial = Trial(module)
    with torch.no_grad(), lock_and_restore_generators():
        outputs = trial(trial.evaluating, inputs)
        trial(trial.learning, inputs)                      # buffers that are filled at the first call are filled now
        trial.move_parameters()
        _refuse_changed_tensors(trial, inputs)
        _refuse_draws_in_evaluation(trial, inputs)
        _refuse_other_generators(trial, inputs)
    return outputs


def refuse_dependence_on_batch(module: nn.Module, inputs: Examples, targets: Tensor) -> None:
    """Raise a ValueError for a module whose outputs for an example depend on the other examples in the batch, in either mode.

    It is called on `inputs`, and on the last and the first example as a batch of two, in this order; the outputs for these must
    be equal. Dropout is turned off, since what it draws depends on the batch size; a mode in which the module still draws is not
    judged. Positions that are padding by `targets` may differ. The module itself is not changed.
    """
    trial, picked = Trial(module), torch.tensor([len(targets) - 1, 0])
    _turn_off_dropout(trial.learning)
    with torch.no_grad(), lock_and_restore_generators():
        for copied in (trial.evaluating, trial.learning):
            trial(copied, inputs)                          # buffers that are filled at the first call are filled now
        trial.move_parameters()                                       # last layers that start at zero would hide all before them
        for copied in (trial.evaluating, trial.learning):
            whole, pair = trial(copied, inputs), trial(copied, select_rows(inputs, picked))
            if not trial.drew and len(whole) == len(targets) and pair.shape[1:] == whole.shape[1:]:
                trial.refuse_different_outputs(pair, whole[picked], targets[picked])


class Trial:
    """Copies of a module, one in each mode, that are called on copies of the examples; whatever fails is refused in words."""

    def __init__(self, module: nn.Module):
        """Copy the module to the CPU twice: `learning` in training mode and `evaluating` in evaluation mode.

        Frozen parameters that are there already share its memory.
        """
        self.name, self.drew = type(module).__name__, False
        self.learning = training_copy(module, share_frozen=True).cpu()
        self.evaluating = copy_around_frozen(module).cpu().eval()

    def __call__(self, copied: nn.Module, inputs: Examples, seed: int = 0) -> Tensor:
        """The outputs of `copied`, one of the two copies, for a clone of the inputs, with torch's generator seeded by `seed`.

        Sets `drew` to whether the call drew from that generator, torch's default one. Raises ValueError where the module fails,
        does not return a tensor, or writes to its inputs.
        """
        given = {k: v.clone() for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.clone()
        before = torch.default_generator.manual_seed(seed).get_state()
        try:
            outputs = call_module(copied, given)
        except Exception as reason:
            shapes = {k: tuple(v.shape[1:]) for k, v in _inputs_by_name(inputs).items()}
            shape, hint = shapes if isinstance(inputs, dict) else shapes["x"], _input_hint(str(reason), _inputs_by_name(inputs))
            raise ValueError(f"{self.name} cannot take examples of shape {shape}{hint}: {reason}") from reason
        self.drew = not torch.equal(torch.default_generator.get_state(), before)
        if not isinstance(outputs, Tensor):
            raise ValueError(f"{self.name} must return one tensor, got {type(outputs).__name__}. Wrap it in a module that picks "
                             "one.")
        self._refuse_written_inputs(_inputs_by_name(given), _inputs_by_name(inputs))
        return outputs.clone()                             # they may be a view of a parameter, which `move_parameters` changes

    def move_parameters(self) -> None:
        """Move the trainable parameters of both copies by 0.001 to 0.002 away from zero, in place, as a step of training might.

        Layers that start at zero then no longer hide the layers before them.
        """
        for parameter in (*trainable_parameters(self.learning), *trainable_parameters(self.evaluating)):
            away = torch.where(parameter < 0, -1.0, 1.0)
            parameter.add_(away * torch.linspace(1e-3, 2e-3, parameter.numel()).reshape(parameter.shape))

    def refuse_different_outputs(self, some: Tensor, others: Tensor, targets: Tensor) -> None:
        """Raise a ValueError where two outputs for the same examples, `some` and `others`, differ by more than rounding.

        Positions that are padding by `targets`, and values that are not finite, are left out.
        """
        gap, scale = (some.double() - others.double()).abs(), others.double().abs()
        counts = gap.isfinite() & scale.isfinite()
        if targets.ndim > 1 and gap.shape[: targets.ndim] == targets.shape:
            counts &= ~is_padding(targets).reshape(*targets.shape, *[1] * (gap.ndim - targets.ndim))
        largest, most = (values.where(counts, 0.0).amax().item() if values.numel() else 0.0 for values in (gap, scale))
        if largest > most * max(CLOSE, ROUNDING * torch.finfo(trainable_parameters(self.learning)[0].dtype).eps):
            raise ValueError(f"{self.name} gives an example other outputs when other examples are in the batch (by up to "
                             f"{largest:.2g}, outputs being up to {most:.2g}), so a client's loss would depend on its "
                             "neighbours. Normalise within an example (LayerNorm, GroupNorm; x.mean(1, keepdim=True), not "
                             "x.mean(0)), and give recurrent and attention layers batch_first=True.")

    def _refuse_written_inputs(self, given: dict[str, Tensor], originals: dict[str, Tensor]) -> None:
        """Raise a ValueError, which names them, where the module wrote to some tensors of `given`, the inputs it was called with.

        `given` were clones of `originals`; both are dicts by name.
        """
        written = [name for name, values in given.items() if _was_written_to(values, originals[name])]
        if written:
            raise ValueError(f"{self.name} writes to its input ({', '.join(written)}), which would change the population's own "
                             "examples. Write x = 2 * x for x.mul_(2), x = x.masked_fill(...) for x[...] = 0 and a first layer "
                             "without inplace=True, or begin forward with x = x.clone().")


def _turn_off_dropout(module: nn.Module) -> None:
    """Turn off the dropout of PyTorch's own layers (dropout, recurrent, attention), in place; other draws of the module stay."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
        elif isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
            part.dropout = 0.0


def _refuse_tensor_hooks(module: nn.Module) -> None:
    """Raise a ValueError where a trainable parameter of `module` has a tensor hook, which the copies that clients train lack."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise ValueError(f"{name} has a tensor hook (register_hook or register_post_accumulate_grad_hook), which would never "
                             "be called: clients train copies of the module, and copies have none. To mask a gradient use weight "
                             "* mask + (weight * (1 - mask)).detach() in forward, or freeze a whole parameter by "
                             "requires_grad_(False). Hooks of modules are called.")


def _refuse_changed_tensors(trial: Trial, inputs: Examples) -> None:
    """Raise a ValueError where calling the trial's copy in training mode on `inputs` changes its parameters or buffers.

    Clients would change each other's tensors.
    """
    frozen = {name for name, parameter in trial.learning.named_parameters() if not parameter.requires_grad}

    def state() -> dict[str, tuple[Tensor, int]]:
        """Tensors by name, each with its version: of the frozen, which may be a large base, sums in place of copies."""
        return {k: (v.sum(dtype=torch.float64) if k in frozen and v.is_floating_point() else v.clone(), v._version)
                for k, v in trial.learning.state_dict(keep_vars=True).items()}

    before = state()
    trial(trial.learning, inputs)
    changed = [k for k, (v, version) in state().items()
               if not _are_identical(v, before[k][0]) or (k in frozen and version != before[k][1])]
    if changed:
        raise ValueError(f"{trial.name} changes {', '.join(changed)} when it is called in training, so that clients would change "
                         "each other's. Take that part out of the module.")


def _refuse_draws_in_evaluation(trial: Trial, inputs: Examples) -> None:
    """Raise a ValueError where outputs in evaluation mode differ between seeds of torch's default generator.

    The trial's copy in evaluation mode is called on `inputs`, many times if its first call drew from that generator.
    """
    first = trial(trial.evaluating, inputs)
    if trial.drew and any(not _are_identical(trial(trial.evaluating, inputs, seed), first) for seed in range(TIMES)):
        raise ValueError(f"{trial.name} draws random numbers in evaluation mode, where no client has a stream of its own: losses "
                         "would change with the number of workers. Draw in training only: F.dropout(x, p, self.training).")


def _refuse_other_generators(trial: Trial, inputs: Examples) -> None:
    """Raise a ValueError where outputs of a copy differ between calls though torch's default generator is seeded alike.

    Each of the trial's copies, one in each mode, is called several times on `inputs`. A module that differs draws from another
    generator, which no seed of the run controls; the text names those whose state changed.
    """
    for mode, copied in (("training", trial.learning), ("evaluation", trial.evaluating)):
        before, first = _generator_states(copied), trial(copied, inputs)
        drawn = [name for name, state in _generator_states(copied).items() if state != before.get(name)]
        if all(_are_identical(trial(copied, inputs), first) for _ in range(TIMES if drawn else AGAIN)):
            continue
        unknown = "gives other outputs at each call (a generator of its own, or an attribute that every call changes)"
        source = f"draws from {' and '.join(drawn)}" if drawn else unknown
        raise ValueError(f"{trial.name} {source} in {mode} mode, which no seed of the run controls: the model would change with "
                         "the number of workers. Draw from torch's default generator (torch.rand, F.dropout), which is seeded "
                         "for each client.")


def _generator_states(module: nn.Module) -> dict[str, bytes]:
    """The states of all generators that a module may draw from, except torch's default one, as bytes by name.

    These are numpy's and Python's global ones, and the generators of torch, numpy and Python among the module's attributes.
    """
    held: dict[str, Any] = {"numpy.random": np.random.get_state(), "random": random.getstate()}      # noqa: NPY002
    for name, part in module.named_modules():
        for key, value in _nested_values(vars(part)):
            where = f"{name}.{key}" if name else key
            if isinstance(value, np.random.Generator):
                held[where] = value.bit_generator.state
            elif isinstance(value, (torch.Generator, np.random.RandomState)):
                held[where] = value.get_state()
            elif isinstance(value, random.Random):
                held[where] = value.getstate()
    return {name: pickle.dumps(state) for name, state in held.items()}


def _nested_values(held: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for the values in nested dicts, lists and tuples; the name joins keys and positions by dots.

    `key` is the name of `held` itself, under which a value that is none of these is yielded.
    """
    if isinstance(held, (list, tuple, dict)):
        for name, value in held.items() if isinstance(held, dict) else enumerate(held):
            yield from _nested_values(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, held


def _inputs_by_name(inputs: Examples) -> dict[str, Tensor]:
    """The inputs as a dict of tensors by name; a single tensor gets the name "x"."""
    return inputs if isinstance(inputs, dict) else {"x": inputs}


def _was_written_to(after: Tensor, before: Tensor) -> bool:
    """Whether `after`, once a clone of `before`, was written to: torch has counted a write, or the values differ.

    The values show writes through numpy, which torch does not count.
    """
    return (not after.is_inference() and after._version > 0) or not _are_identical(after, before)


def _are_identical(some: Tensor, others: Tensor) -> bool:
    """Whether the tensors `some` and `others` have the same shape and equal values, NaN being equal to NaN."""
    return torch.equal(some, others) or (some.shape == others.shape and torch.allclose(some, others, 0, 0, equal_nan=True))


def _input_hint(reason: str, parts: dict[str, Tensor]) -> str:
    """A hint in brackets for the error text of a module that failed with the message `reason` on the inputs `parts`.

    It says that lengths are missing, that integers came where floats are needed, or that the axis of an image's channels is
    missing or last, or an image meets a linear layer; empty where none is recognised.
    """
    whole = [name for name, values in parts.items() if not values.is_floating_point()]
    shape = next(iter(parts.values())).shape[1:]
    if "lengths" in reason:
        return " (for sequences of equal length pass pad_sequences(x), which gives lengths)"
    if whole and ("dtype" in reason or "Input type" in reason):
        return f" ({', '.join(whole)} holds integers: write pixels as x.astype('float32') / 255, say)"
    if "channels" in reason and len(shape) == 2:
        return " (an image needs an axis of channels, which comes first: write x[:, None])"
    if "channels" in reason and len(shape) == 3 and shape[2] < shape[0]:
        return " (the channels of an image come first: write x.transpose(0, 3, 1, 2) of an array)"
    if "mat1 and mat2 shapes" in reason and len(shape) > 1:
        return " (to give whole images to a linear layer begin the module with torch.nn.Flatten())"
    return ""
