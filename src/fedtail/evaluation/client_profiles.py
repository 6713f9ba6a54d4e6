"""What is special about single clients: their size, labels and features, beside those of all clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.history import data_frame, html_table

if TYPE_CHECKING:
    import pandas

FALSE_ALARM = 0.01        # the chance that a client which is like all others is said to have a special label or feature
MOST_CLASSES = 1000       # beyond these, integers are no classes
PIECE = 10_000            # examples read together
MOST_FEATURES = 100_000   # of one example; beyond these, features are not compared


@dataclass(frozen=True)
class ClientProfiles(Sequence[dict[str, Any]]):
    """Some clients, each a dict: `name`, `size`, its values, and in words what is special about its size, labels and features.

    Prints as a table, also in notebooks; `to_pandas` makes a data frame of it.
    """

    rows: tuple[dict[str, Any], ...]
    title: str = ""

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The clients, in order."""
        return iter(self.rows)

    def __getitem__(self, place: Any) -> Any:
        """The client at a position, or several by a slice."""
        return self.rows[place]

    @property
    def columns(self) -> list[str]:
        """The names of what is known of each client."""
        return list(self.rows[0]) if self.rows else []

    def to_pandas(self) -> pandas.DataFrame:
        """The clients as a data frame, a row for each. Raises ImportError, with what to install, where pandas is missing."""
        return data_frame(self.rows, self.columns)

    def __repr__(self) -> str:
        """Aligned text: a line for each client, below the title."""
        lines = [self.columns, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.columns))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([self.title, *text] if self.title else text)

    def _repr_html_(self) -> str:
        """The clients as a table, for notebooks."""
        return html_table(self.columns, [_cells(row) for row in self.rows], self.title)


def client_profiles(population: Population, chosen: Tensor, values: dict[str, Tensor], title: str = "") -> ClientProfiles:
    """What is special about the clients at positions `chosen`, beside all clients of the population.

    `values` has a number for each client of the population, by name, such as its error. `size` is its number of examples, beside
    the median. `labels` is the class that it has most too many or too few of or, for numbers, how far its mean is from that of
    all; `features` is the column of the inputs whose mean is farthest. Both are said only where a client that is like all others
    would show as much with a chance of 1 in 100, all classes or columns considered: by a normal approximation, which is rough
    for clients with few examples. `title` stands above the table.
    """
    median = float(population.size.double().median())
    labels, features = _label_finder(population), _feature_finder(population)
    rows = []
    for position in chosen.tolist():
        name = str(position) if population.names is None else str(population.names[position])
        row = {"name": name, **{metric: float(of_all[position]) for metric, of_all in values.items()}}
        row |= {"size": f"{int(population.size[position])} (median {median:g})"}
        rows.append({**row, "labels": labels(position), "features": features(position)})
    return ClientProfiles(tuple(rows), title)


def _label_finder(population: Population) -> Any:
    """A function from a client's position to what is special about its targets, in words; empty where nothing is."""
    targets = population.targets
    if targets.ndim != 1:
        return lambda position: ""
    if targets.is_floating_point():
        return _mean_finder(population, [targets[:, None]], lambda k, gap: f"mean {gap:+.1f} sd from all")
    classes, place = targets.unique(return_inverse=True)
    if len(classes) > MOST_CLASSES:
        return lambda position: ""
    owner, rows = population.example_clients_and_rows()
    counts = torch.zeros(len(population), len(classes), dtype=torch.float64)
    counts.index_put_((owner, place[rows]), torch.ones(len(rows), dtype=torch.float64), accumulate=True)
    share, limit = counts.sum(0) / counts.sum(), _limit(len(classes))

    def find(position: int) -> str:
        """The class that the client has most too many or too few of, with its share here and of all examples."""
        size = counts[position].sum()
        spread = (size * share * (1 - share)).sqrt().clamp(min=1e-12)
        score = (counts[position] - size * share) / spread
        most = int(score.abs().argmax())
        if not float(score[most].abs()) > limit:
            return ""
        label = int(classes[most])
        called = label if population.classes is None or not 0 <= label < len(population.classes) else population.classes[label]
        return f"class {called}: {float(counts[position, most] / size):.0%} (all {float(share[most]):.0%})"

    return find


def _feature_finder(population: Population) -> Any:
    """A function from a client's position to what is special about its inputs, in words; empty where nothing is.

    Floating-point inputs are compared by their columns, those of a dict by their names.
    """
    inputs = population.inputs if isinstance(population.inputs, dict) else {"": population.inputs}
    parts = {name: one.flatten(1) for name, one in inputs.items() if one.is_floating_point() and one.ndim > 1}
    if not parts or sum(one.shape[1] for one in parts.values()) > MOST_FEATURES:
        return lambda position: ""
    names = [f"{name} {k}".strip() for name, one in parts.items() for k in range(one.shape[1])]
    names = names if population.columns is None or isinstance(population.inputs, dict) else list(population.columns)
    return _mean_finder(population, list(parts.values()), lambda k, gap: f"column {names[k]}: mean {gap:+.1f} sd from all")


def _mean_finder(population: Population, parts: Sequence[Tensor], words: Any) -> Any:
    """A function from a client's position to the column whose mean is farthest from that of all examples, by `words`.

    `parts` are (rows of the data, columns) each. Distances are compared in standard errors and told in standard deviations; empty
    where the farthest is within chance. The data are read in pieces, so that memory does not grow with them.
    """
    def columns(rows: Any) -> Tensor:
        """The columns of these rows, (rows, columns) float64."""
        return torch.cat([part[rows].double() for part in parts], 1).cpu()

    _, rows = population.example_clients_and_rows()
    pieces = rows.split(PIECE)
    mean = sum((columns(piece).sum(0) for piece in pieces), torch.zeros(())) / len(rows)
    spread = (sum(((columns(piece) - mean).square().sum(0) for piece in pieces), torch.zeros(())) / len(rows)).sqrt()
    limit = _limit(len(mean))

    def find(position: int) -> str:
        """What `words` says of the farthest column of a client."""
        first, size = int(population.start[position]), int(population.size[position])
        gap = (columns(slice(first, first + size)).mean(0) - mean) / spread
        gap = gap.where(spread > 0, 0.0)
        most = int(gap.abs().argmax())
        return words(most, float(gap[most])) if abs(float(gap[most])) * math.sqrt(size) > limit else ""

    return find


def _limit(tests: int) -> float:
    """How many standard errors the farthest of `tests` normal numbers exceeds with the chance of a false alarm."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * tests))


def _cells(row: dict[str, Any]) -> list[str]:
    """The texts of a row's entries."""
    return [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
