"""Where and how models are computed, as one value for training and evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from fedtail.devices import checked_device
from fedtail.engine.gpu.precision import Precision, check_precision
from fedtail.errors import FieldError, check_kind

KERNELS = ("auto", "closed", "stacked", "module")


@dataclass(frozen=True)
class Engine:
    """Where and how models are computed; nothing here changes a method.

    `dtype` is by default the module's. On a CPU `workers` processes share the work, by default one for each core; their number
    changes no bit. 0 leaves it to torch's own threads, whose number may. `kernel` is how models are computed, which changes the
    rounding only: "closed" (closed-form gradients), "stacked" (many clients through each operation), "module" (one client
    after the other), or as fits the task ("auto"). `precision` is how a GPU multiplies: "full", "tf32", "bf16".
    """

    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    workers: int | None = None
    kernel: str = "auto"
    precision: Precision = "full"

    def __post_init__(self) -> None:
        """Raise FieldError for a device that is not here, an unknown `kernel`, negative `workers`; ValueError for `precision`."""
        checked_device(self.device)
        if self.kernel not in KERNELS:
            raise FieldError("kernel", f"one of {', '.join(KERNELS)}", self.kernel)
        if self.workers is not None and self.workers < 0:
            raise FieldError("workers", "at least 0", self.workers, "1 is one process, 0 leaves it to torch's threads.")
        check_precision(self.precision)


SETTINGS = tuple(one.name for one in fields(Engine))


def check_engine(engine: Any) -> None:
    """Raise a TypeError unless `engine` is an Engine."""
    check_kind("engine", engine, isinstance(engine, Engine), "an Engine", 'Write engine=Engine("cuda"), say.')


def resolve_engine(engine: Engine, given: Mapping[str, Any], name: str) -> Engine:
    """The engine of a call to the function `name`, which takes an `engine` or, as before version 0.2, its fields as keywords.

    `given` holds those keywords. If it is empty, `engine` is returned; else a new Engine made of them, with a DeprecationWarning
    that points at the line of the function's caller. Raises TypeError for a keyword that is no field of Engine, and where
    keywords are given together with an `engine` that is not the default.
    """
    stray = [key for key in given if key not in SETTINGS]
    if stray:
        raise TypeError(f"{name}() has no argument {stray[0]!r}.")
    check_engine(engine)
    if not given:
        return engine
    if engine != Engine():
        raise TypeError(f"{name}() was given an engine and {', '.join(given)}. Write all of it in Engine(...).")
    written = ", ".join(f"{key}={value!r}" for key, value in given.items())
    warnings.warn(f"{name}({written}) is written engine=Engine({written}) since version 0.2, and will go.", DeprecationWarning,
                  stacklevel=3)
    return Engine(**given)
