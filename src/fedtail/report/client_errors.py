"""The clients of a page: which are one client in several seeds, and the error of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.report.methods import Method
from fedtail.report.statistics import bins, distribution_function, mean_over, page_numbers, shares, thinned
from fedtail.runs import RunFolder

POINTS = 1500                                # in a scatter plot; more would hide each other and slow the page
LISTED = 2000                                # clients that are on the page by name when there are no more than these
EXTREMES = 50                                # else, by method, this many that gained most and lost most
SAME = 1e-9


@dataclass(frozen=True)
class PageClients:
    """A row for each client. With the same data in every seed, a client has one row for all; else one for each seed."""

    split: str
    names: np.ndarray                        # (clients,) str
    sizes: np.ndarray                        # (clients,)
    groups: np.ndarray                       # (clients,) float, NaN for none
    first: Mapping[int, int]                 # seed -> where its clients start
    count: Mapping[int, int]                 # seed -> how many they are

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shared(self) -> bool:
        """Whether every seed has the same clients."""
        return not any(self.first.values())

    def place(self, seed: int, values: np.ndarray) -> np.ndarray:
        """One seed's numbers in the rows of all clients; NaN for the clients of other seeds."""
        rows = np.full(len(self), np.nan)
        rows[self.first[seed]:self.first[seed] + self.count[seed]] = values
        return rows


@dataclass(frozen=True)
class _Identity:
    names: np.ndarray
    sizes: np.ndarray
    groups: np.ndarray
    data: str                                # the run's mark of its data; "" where it left none

    def is_same(self, other: _Identity) -> bool:
        """Whether two runs have the same clients: names, sizes and groups."""
        pairs = ((self.names, other.names), (self.sizes, other.sizes), (self.groups, other.groups))
        return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def page_clients(methods: Sequence[Method], split: str) -> PageClients | None:
    """Everybody in the split, from the finished runs of the simulator; None where there is none."""
    known: dict[int, tuple[RunFolder, _Identity]] = {}
    for run in {run.path: run for m in methods for run in m.tabled.values()}.values():
        mine = _identity(run, split)
        first, theirs = known.setdefault(run.seed, (run, mine))
        if not mine.is_same(theirs):
            raise ValueError(f"{run.path} and {first.path} have the same seed but other {split} clients, so that clients cannot "
                             "be compared. Write a page for each, or run both on the same data.")
    return _joined(split, {seed: identity for seed, (_, identity) in sorted(known.items())})


def column(run: RunFolder, split: str, member: int, name: str) -> np.ndarray:
    """One column for one split and model, in the order of the clients, as numbers; NaN where the file has none."""
    rows = run.client_columns(split, member)
    if name not in rows:
        return np.full(len(rows["client"]), np.nan)
    return np.array([np.nan if v is None else v for v in rows[name][np.argsort(rows["client"])].tolist()], float)


def by_seed(method: Method, clients: PageClients, name: str) -> dict[int, np.ndarray]:
    """A column of each finished run, in the rows of all clients."""
    return {seed: clients.place(seed, column(run, clients.split, method.member, name)) for seed, run in method.tabled.items()}


def mean_by_client(values: Mapping[int, np.ndarray], clients: PageClients) -> np.ndarray:
    """Each client's mean over seeds; NaN where it has no number."""
    return mean_over(list(values.values())) if values else np.full(len(clients), np.nan)


def pooled_over_seeds(values: Mapping[int, np.ndarray]) -> np.ndarray:
    """The finite numbers of all seeds in one list."""
    everything = np.concatenate([np.zeros(0), *values.values()])
    return everything[np.isfinite(everything)]


def _identity(run: RunFolder, split: str) -> _Identity:
    """Names, sizes and groups of a run's clients in a split, and the fingerprint of its data."""
    rows = run.client_columns(split)
    order = np.argsort(rows["client"])
    named = [str(client) if name is None else str(name) for name, client in zip(rows["name"], rows["client"], strict=True)]
    groups, mark = column(run, split, 0, "group"), str(run.about.get("fingerprint", ""))
    return _Identity(np.array(named, dtype=object)[order], rows["size"][order], groups, mark)


def _joined(split: str, by_seed: dict[int, _Identity]) -> PageClients | None:
    """The clients of all seeds: once where every seed has the same, else one after another."""
    if not by_seed:
        return None
    each = list(by_seed.values())
    count = {seed: len(identity.names) for seed, identity in by_seed.items()}
    if all(identity.is_same(each[0]) and identity.data == each[0].data for identity in each):
        return PageClients(split, each[0].names, each[0].sizes, each[0].groups, dict.fromkeys(by_seed, 0), count)
    names = [f"{name} (seed {seed})" for seed, identity in by_seed.items() for name in identity.names]
    starts = np.cumsum([0, *count.values()])[:-1].tolist()
    sizes, groups = (np.concatenate([getattr(identity, part) for identity in each]) for part in ("sizes", "groups"))
    return PageClients(split, np.array(names, dtype=object), sizes, groups, dict(zip(by_seed, starts, strict=True)), count)


def distributions(methods: Sequence[Method], clients: PageClients | None) -> dict[str, Any] | None:
    """Histogram and distribution function, the clients of all seeds pooled; None where no run is finished.

    Of a run on a deployment a histogram is known, and clients are spread evenly within its bins.
    """
    values = [_pooled(m, clients) for m in methods]
    if not any(map(len, values)):
        return None
    edges = bins(np.concatenate(values))
    return {"edges": page_numbers(edges), "shares": [page_numbers(shares(v, edges)) for v in values],
            "functions": [distribution_function(v) for v in values], "clients": [len(v) for v in values]}


def _pooled(method: Method, clients: PageClients | None) -> np.ndarray:
    """The errors of all clients of a method's finished runs."""
    known = by_seed(method, clients, "error") if clients else {}
    deployed = [run.values_from_histogram("error", method.member) for run in method.finished.values() if run.is_deployed]
    return np.concatenate([pooled_over_seeds(known), *deployed])


def by_client(methods: Sequence[Method], baseline: int, clients: PageClients) -> dict[str, Any]:
    """Every client's error and its difference to the baseline, for those on the page; `points` of them are drawn."""
    errors = [by_seed(m, clients, "error") for m in methods]
    means = [mean_by_client(mine, clients) for mine in errors]
    gains = [differences_to_baseline(mine, errors[baseline], clients) for mine in errors]
    kept, points = _kept(gains, len(clients))
    return {
        "total": len(clients), "averaged": clients.shared and len(clients.first) > 1,
        "names": clients.names[kept].tolist(), "sizes": clients.sizes[kept].tolist(),
        "points": np.flatnonzero(np.isin(kept, points)).tolist(), "log": spans_decades(clients.sizes),
        "errors": [page_numbers(mine[kept]) for mine in means], "differences": [page_numbers(mine[kept]) for mine in gains],
        "changes": [_change(mine, means[baseline]) for mine in gains],
    }


def differences_to_baseline(mine: dict[int, np.ndarray], baseline: dict[int, np.ndarray], clients: PageClients) -> np.ndarray:
    """Error minus the baseline's, each client averaged over the seeds both have; NaN where there is none."""
    common = [seed for seed in mine if seed in baseline]
    return mean_over([mine[s] - baseline[s] for s in common]) if common else np.full(len(clients), np.nan)


def spans_decades(sizes: np.ndarray) -> bool:
    """Whether sizes differ so much that an axis should be logarithmic."""
    return bool(len(sizes) and sizes.min() > 0 and sizes.max() > 10 * sizes.min())


def sample(count: int, most: int = POINTS) -> np.ndarray:
    """Which of `count` clients are drawn: all, or the same random ones each time."""
    return np.arange(count) if count <= most else np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _kept(gains: Sequence[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which clients are on the page, and which of them are drawn."""
    points = sample(count)
    if count <= LISTED:
        return np.arange(count), points
    ranks = [np.argsort(mine)[:np.isfinite(mine).sum()] for mine in gains]          # NaN sorts last
    extremes = [np.concatenate([rank[:EXTREMES], rank[-EXTREMES:]]) for rank in ranks]
    return np.unique(np.concatenate([points, *extremes])), points


def _change(difference: np.ndarray, baseline: np.ndarray) -> dict[str, Any]:
    """How many gained and lost, and the sorted differences."""
    known = np.isfinite(difference)
    values, scale = difference[known], np.maximum(1, np.abs(baseline[known]))
    same = np.abs(values) <= SAME * scale
    ranked = np.sort(values)
    kept = thinned(len(ranked), 400)
    return {"improved": int((~same & (values < 0)).sum()), "same": int(same.sum()), "worse": int((~same & (values > 0)).sum()),
            "x": page_numbers((kept + 0.5) / max(len(ranked), 1)), "y": page_numbers(ranked[kept])}
