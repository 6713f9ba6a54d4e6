"""Predictions on a node by the models it keeps: a client's personal model, or the shared one received last. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fedtail.algorithm import FederatedAlgorithm
from fedtail.data.arrays import as_examples, input_tensors, select_rows
from fedtail.data.population import Population
from fedtail.data.tables import read_inputs
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.node import RECEIVED, STATE, Computed, Node
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment.trust import Trust
from fedtail.losses import predicted_classes, squared_error
from fedtail.modules import call_module, cast_inputs
from fedtail.rows import Mark, RowStore
from fedtail.task import Task
from fedtail.types import Examples
from fedtail.wire import types_by_name, unpack

BATCH = 4096      # examples predicted at once


@dataclass(frozen=True)
class OwnModel:
    """A model that a node keeps: `kind` says whether it is the personal model of `client` or the shared one received last."""

    module: nn.Module
    kind: Literal["personal", "received"]
    client: str
    class_axes: int | None              # of the node's targets, where these are classes; None: it predicts numbers

    def predict(self, inputs: Examples) -> Tensor:
        """Predictions for examples, a tensor (examples, ...) or a dict of such: classes, or the model's outputs.

        Classes, (examples,), are predicted where the node's data have classes: that of the largest output or, of one output, 1
        where it is positive. Raises ValueError where the module cannot read the examples.
        """
        inputs = cast_inputs(inputs, next(self.module.parameters()).dtype)
        shapes = [tuple(one.shape[1:]) for one in input_tensors(inputs)]
        try:
            with torch.no_grad():
                outputs = torch.cat([call_module(self.module, select_rows(inputs, few))
                                     for few in torch.arange(len(input_tensors(inputs)[0])).split(BATCH)])
        except RuntimeError as reason:
            raise ValueError(f"the model cannot read examples of shape {' and '.join(map(str, shapes))}: {reason}. Pass inputs "
                             "as in the node's data.") from reason
        return outputs if self.class_axes is None else predicted_classes(outputs, self.class_axes)


def predict(settings: NodeSettings, data: Path, x: str | Sequence[str] = "x", client: str = "", method: str = "", member: int = 0,
            received: bool = False) -> tuple[OwnModel, Tensor]:
    """A model that the node with these settings keeps, and its predictions for the examples in the file `data`.

    `data` is an `.npz`, `.parquet` or `.csv` file, in which `x` names the inputs. The other arguments are those of
    `read_own_model`. Raises FileNotFoundError where there is no such file, and what `read_own_model` raises.
    """
    if not data.is_file():
        raise FileNotFoundError(f"there is no file {data}.")
    model = read_own_model(settings, client, method, member, received)
    return model, model.predict(as_examples(read_inputs(data, x), "x"))


def read_own_model(settings: NodeSettings, client: str = "", method: str = "", member: int = 0,
                   received: bool = False) -> OwnModel:
    """The personal model of a client from the newest training in the memory of a node or, with `received`, the shared one.

    `client` is a name in the node's data, or a position where these have no names; it may be left out where there is one client.
    `method` is needed where the node's experiment file has several, and `member` is the position in a family. Nothing is sent,
    changed or locked, so it can be called while the node is running. Raises ValueError where the client has no personal model,
    and nothing stands in for it unless `received` asks for that.
    """
    trust = Trust.from_names(settings.trust, settings.folder)
    experiment = deployed_experiment(settings.folder / settings.experiment, method, trust)
    part, task = _member(experiment.algorithm.members, member).personal, experiment.task.make(0)
    population = settings.read_population()
    place, name = _client_position(population, client)
    numbers = population.targets.is_floating_point() or squared_error in (task.loss, task.error)
    axes = None if numbers else population.targets.ndim
    if received:
        models = _received_models(next(iter(_trainings(settings.folder / "memory", RECEIVED)), None), task)
        return OwnModel(task.with_params(models[member]).eval(), "received", name, axes)
    if not part.trains:
        raise ValueError("the method of this node trains no personal models. --received predicts by the shared model that the "
                         "node received last.")
    found = _kept_row(settings.make_node(0), part.memory_name(member), place)
    if found is None:
        raise ValueError(f"client {name} has no personal model on this node: it was never sampled, or its memory was lost and it "
                         "starts again from the model that it receives. --received predicts by the shared model received last.")
    row, folder = found
    shared = _received_models(folder / RECEIVED, task)[member]
    return OwnModel(task.with_params(part.models(row.to(shared)[None], shared)[0]).eval(), "personal", name, axes)


def _member(members: Sequence[FederatedAlgorithm], member: int) -> FederatedAlgorithm:
    """The method at position `member` of a family; ValueError where there is none."""
    if not 0 <= member < len(members):
        raise ValueError(f"the node's experiment has {len(members)} models, and --member {member} is none of them. Positions are "
                         f"from 0 to {len(members) - 1}.")
    return members[member]


def _client_position(population: Population, client: str) -> tuple[int, str]:
    """The position of a client in the node's population, and its name; "" is the only client.

    Raises ValueError where there is no such client, or "" does not say which.
    """
    count = len(population)
    names = list(map(str, range(count) if population.names is None else population.names.tolist()))
    if not client and len(names) > 1:
        raise ValueError(f"this node has {len(names)} clients. Say which with --client: {', '.join(names[:5])}"
                         f"{', ...' if len(names) > 5 else ''}.")
    if client and client not in names:
        raise ValueError(f"there is no client {client!r} on this node. There are {', '.join(names[:5])}"
                         f"{', ...' if len(names) > 5 else ''}.")
    place = names.index(client) if client else 0
    return place, names[place]


def _trainings(memory: Path, file: str) -> list[Path]:
    """The files called `file` of all trainings in a node's folder `memory`, the one written last first."""
    return sorted(memory.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime, reverse=True)


def _received_models(path: Path | None, task: Task) -> Tensor:
    """The models that the node received in the last round of a training, (models, dim), from the file at `path`.

    Raises ValueError where there is none, which is so until a method with memory on its clients has trained there, or where they
    are of another module than that of `task`.
    """
    if path is None or not path.is_file():
        raise ValueError("this node has received no model yet, or has lost its memory. Train first.")
    models = unpack(path.read_bytes(), {})
    dim = len(task.params())
    if models.shape[1] != dim:
        raise ValueError(f"the models in {path.parent.name} have {models.shape[1]} parameters, and that of the node's "
                         f"experiment {dim}. Write the experiment that was trained last.")
    return models


def _kept_row(node: Node, name: str, place: int) -> tuple[Tensor, Path] | None:
    """The row that the client at position `place` keeps under `name` in the newest training of a node that has it; else None.

    With it comes the folder of that training. Only files are read: the node's state is not changed, and its folder is not locked.
    """
    assert node.folder is not None
    for path in _trainings(node.folder, STATE):
        state: Computed = unpack(path.read_bytes(), {**node.types, **types_by_name([Computed])})
        small, stores, key = dict(state.kept), dict(state.stores), node.fleet.population.key[place: place + 1]
        if name in small:
            row = small[name][place]
            return None if bool(row.isnan().all()) else (row, path.parent)
        if name in stores:
            found = RowStore.open(path.parent, Mark(*stores[name])).rows.row_references(key).read()
            return (found.rows[0], path.parent) if bool(found.has) else None
    return None
