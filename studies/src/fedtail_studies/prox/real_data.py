"""The data sets of figure 3.1 that are at hand: MNIST, letters of FEMNIST, Shakespeare and Sent140, dealt out as in [Li23].

The thesis deals MNIST's images out to 1000 devices with two digits each, and ten letters of EMNIST to 200 devices with five each;
sizes follow a power law. The same is done here with the images at hand. MNIST by writer is beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedtail
from fedtail.data import Population
from fedtail.data.partition import named_generator
from fedtail.models import CharacterGRU, LSTMClassifier, SoftmaxRegression
from fedtail_studies.emnist.writers import read_femnist
from fedtail_studies.prox.networks import Network
from fedtail_studies.study import Cell, Data, Needs
from fedtail_studies.text.roles import CLASSES as LETTERS
from fedtail_studies.text.roles import read_roles, thinned
from fedtail_studies.text.tweets import WIDTH, read_tweets
from fedtail_studies.tilted.classes_data import read_mnist

MNIST, WRITERS, FEMNIST, SHAKESPEARE, SENT140 = "MNIST", "MNIST by writer", "FEMNIST", "Shakespeare", "Sent140"
FIRST_LETTER, TEN = 36, 10                       # FEMNIST's label of "a"; letters a to j
SKEW = 1.2                                       # of lognormal sizes: deviation over mean as in table 3.1, about 1.6
RATES = {MNIST: 0.03, WRITERS: 0.03, FEMNIST: 0.003, SHAKESPEARE: 0.8, SENT140: 0.3}      # printed
BESTS = {MNIST: 1.0, WRITERS: 1.0, FEMNIST: 1.0, SHAKESPEARE: 0.001, SENT140: 0.01}       # mu, printed
ADVICE = ("Write --data DIR, a folder that holds mnist_by_writer.npz, femnist.npz, shakespeare.npz, sent140.npz and "
          "glove100.npz, or folders with them; or leave out what is missing, as in --set 'sets=[\"MNIST\"]'.")


@dataclass(frozen=True, eq=False)
class Several(Data):
    """Several data sets in one folder, by name; `population` is the first of them."""

    parts: Mapping[str, Population] = field(default_factory=dict)


def read_several(place: Path) -> Several:
    """What is there of the four sources; refused where there is none."""
    parts: dict[str, Population] = {}
    for name, read in SOURCES.items():
        try:
            parts[name] = read(place).population
        except FileNotFoundError:
            continue
    if not parts:
        raise FileNotFoundError(f"there is none of {', '.join(SOURCES)} in {place}. {ADVICE}")
    return Several(", ".join(parts), next(iter(parts.values())), False, about(parts), parts)


SOURCES: dict[str, Callable[[Path], Data]] = {MNIST: read_mnist, FEMNIST: read_femnist, SHAKESPEARE: read_roles,
                                              SENT140: read_tweets}


def about(parts: Mapping[str, Population]) -> str:
    """How the data at hand differ from table 3.1."""
    texts = {MNIST: lambda people: f"MNIST's {people.num_examples} images are dealt out anew to 1000 devices, and by their "
                                   f"{len(people)} writers.",
             FEMNIST: lambda people: f"FEMNIST's ten letters are {len(letters(people)[1])} images (the thesis: 18,345).",
             SHAKESPEARE: lambda people: f"Shakespeare's roles are {len(people)}, of whom the thesis uses 143.",
             SENT140: lambda people: f"Sent140 has {len(people)} accounts with {people.num_examples / len(people):.1f} tweets on "
                                     "average (the thesis: 772 with 53)."}
    return " ".join(text(parts[name]) for name, text in texts.items() if name in parts)


def network(cell: Cell, name: str) -> Network:
    """One of the data sets for the cell's seed and plan; refused with advice where the folder does not hold it."""
    source = MNIST if name == WRITERS else name
    if source not in cell.data.parts:
        raise FileNotFoundError(f"the folder holds {', '.join(cell.data.parts)}, and no {source}. {ADVICE}")
    return _network(cell.data, name, cell.seed, cell.plan, cell.device)


@lru_cache(maxsize=1)
def _network(data: Several, name: str, seed: int, plan: Any, device: str) -> Network:
    """Devices by seed, split into 80% and 20% of their samples, with a model from that seed."""
    people = data.parts[MNIST if name == WRITERS else name]
    torch.manual_seed(seed)
    module: torch.nn.Module
    if name == SHAKESPEARE:
        share = min(plan.roles, len(people)) / len(people)
        people, module = thinned(people.split((share,), seed)[0], plan.windows), CharacterGRU(LETTERS, plan.hidden)
        people = replace(people, mass=people.size.double())
    elif name == SENT140:
        module = LSTMClassifier(dimension=WIDTH, hidden=plan.hidden)
    else:
        people, module = _images(people, name, seed, plan), SoftmaxRegression(28 * 28, TEN)
    return Network.split(people.to(device), seed, fedtail.Task(module), RATES[name], BESTS[name])


def _images(people: Population, name: str, seed: int, plan: Any) -> Population:
    """Flat images with pixels of mean 0 and deviation 1 over all of them, by device."""
    if name == FEMNIST:
        pixels, labels = letters(people)
    else:
        owner, rows = people.example_clients_and_rows()
        pixels, labels = torch.as_tensor(people.inputs)[rows].float() / 255, people.targets[rows]
    if name == WRITERS:
        device = owner.numpy()
    else:
        devices, each = (plan.mnist_devices, 2) if name == MNIST else (plan.femnist_devices, 5)
        device = dealt(labels.numpy(), devices, each, seed)
    flat = pixels.reshape(len(pixels), -1)
    made = Population.from_arrays((flat - flat.mean()) / flat.std(), labels, device)
    return made.at_least(2)


def letters(people: Population) -> tuple[Tensor, Tensor]:
    """The images of the lower-case letters a to j, and their labels 0 to 9."""
    rows = people.example_clients_and_rows()[1]
    rows = rows[(people.targets[rows] >= FIRST_LETTER) & (people.targets[rows] < FIRST_LETTER + TEN)]
    return torch.as_tensor(people.inputs)[rows].float(), people.targets[rows] - FIRST_LETTER


def dealt(labels: np.ndarray, devices: int, each: int, seed: int, skew: float = SKEW) -> np.ndarray:
    """The device of every example, (examples,): each device holds `each` of the labels, and sizes follow a lognormal law.

    Labels are numbers from 0. A device draws its labels and a weight exp(skew z), z standard normal. The holders of a label get
    one of its examples each, as long as there are any, and share the others in proportion to their weights.
    """
    random = named_generator(seed, "labels dealt to devices")
    kinds = int(labels.max()) + 1
    held = random.random((devices, kinds)).argsort(1)[:, :each]
    weight, device = np.exp(skew * random.standard_normal(devices)), np.zeros(len(labels), dtype=np.int64)
    for label in range(kinds):
        rows, holders = random.permutation(np.flatnonzero(labels == label)), np.flatnonzero((held == label).any(1))
        ends = np.rint(max(0, len(rows) - len(holders)) * weight[holders].cumsum() / weight[holders].sum()).astype(int)
        device[rows] = np.concatenate([holders, np.repeat(holders, np.diff(ends, prepend=0))])[: len(rows)]
    return device


REAL = Needs("MNIST, FEMNIST, Shakespeare and Sent140", read_several, ADVICE)
