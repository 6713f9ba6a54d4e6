"""The engine section of an experiment: who computes, and how."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fedtail.attacks import ClientAttack
from fedtail.data.population import Population
from fedtail.errors import FieldError
from fedtail.experiment.part_tables import own_code_file
from fedtail.experiment.values import NONE
from fedtail.task import Task

UNSET = (("shards", NONE), ("address", NONE))      # not written down: they are for one kind only


@dataclass(frozen=True)
class EnginePlan:
    """The [engine] section: where and how an experiment is computed.

    `kind` "local" trains on this machine; "ray" trains with Ray actors that hold `shards` of the clients, on the cluster at
    `address` or on a Ray that is started here. The number of `workers` (processes) changes no result; `kernel` and `shards`
    change the rounding only; `precision` is for GPUs.
    """

    kind: Literal["local", "ray"] = "local"
    kernel: Literal["auto", "closed", "stacked", "module"] = "auto"
    precision: Literal["full", "tf32", "bf16"] = "full"
    workers: int | None = None
    shards: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        """Raise FieldError for `shards` or `address` with kind "local", fewer than one shard, or a negative number of workers."""
        stray = [name for name in ("shards", "address") if getattr(self, name) is not None and self.kind == "local"]
        if stray:
            raise FieldError(stray[0], "left out", getattr(self, stray[0]),
                             text=f"{stray[0]} is for Ray, but the kind of the engine is \"local\". Write kind = \"ray\" below "
                                  f"[engine], or --engine ray; or leave {stray[0]} out.")
        if self.shards is not None and self.shards < 1:
            raise FieldError("shards", "at least 1", self.shards, "Leave it out for one on each core.")
        if self.workers is not None and self.workers < 0:
            raise FieldError("workers", "at least 0", self.workers, "1 is one process, 0 leaves it to torch's threads.")

    def ray_fleet(self, task: Task, population: Population, folder: Path, memory: Path | None,
                  attack: ClientAttack | None = None) -> AbstractContextManager[Any]:
        """A fleet of Ray actors that train `task` on the clients of `population`, to be used in a `with` block.

        Modules that were imported from `folder`, the experiment's, are sent to the actors. `memory` is the folder where clients
        keep large memory between rounds, None for a temporary one; `attack` says what corrupted clients do.
        """
        from fedtail.engine.ray import RayFleet

        return RayFleet(population, task, self.shards, self.address, kernel=self.kernel, own=loaded_own_modules(folder),
                        folder=memory, attack=attack)


def loaded_own_modules(folder: Path) -> list[ModuleType]:
    """The loaded modules whose files are in the experiment's `folder`, and so are missing on other machines.

    Modules of fedtail are left out.
    """
    found = []
    for module in list(sys.modules.values()):
        name, file = getattr(module, "__name__", "fedtail"), getattr(module, "__file__", None) or ""
        beside = own_code_file(folder, name) if file and name.partition(".")[0] != "fedtail" else None
        if beside and beside.resolve() == Path(file).resolve():
            found.append(module)
    return found
