"""The clients of a page: which are one client in several seeds, and the error, or another metric, of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.report.methods import Method
from fedtail.report.statistics import bin_edges, bin_shares, distribution_function, json_numbers, mean_of_rows, thinned_positions
from fedtail.runs import RunFolder

POINTS = 1500                                # in a scatter plot; more would hide each other and slow the page
LISTED = 2000                                # clients that are on the page by name when there are no more than these
EXTREMES = 50                                # else, by method, this many that gained most and lost most
SAME = 1e-9


@dataclass(frozen=True)
class PageClients:
    """The clients of a split over all runs of a page, one row each.

    Where all seeds have the same clients and data, a client has one row for all of them; otherwise each seed's clients have
    their own.
    """

    split: str
    names: np.ndarray                        # (clients,) str
    sizes: np.ndarray                        # (clients,)
    groups: np.ndarray                       # (clients,) float, NaN for none
    first: Mapping[int, int]                 # seed -> where its clients start
    count: Mapping[int, int]                 # seed -> how many they are

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.names)

    @property
    def are_same_in_all_seeds(self) -> bool:
        """Whether all seeds have the same clients and data, so that a row is one client in all; true for a single seed."""
        return not any(self.first.values())

    def place_values(self, seed: int, values: np.ndarray) -> np.ndarray:
        """An array over all rows, (clients,) float64, with `values`, those of one seed's clients, in that seed's rows.

        The other rows are NaN.
        """
        rows = np.full(len(self), np.nan)
        rows[self.first[seed]:self.first[seed] + self.count[seed]] = values
        return rows


@dataclass(frozen=True)
class _Identity:
    """The names, sizes and groups of the clients of one run in one split, ordered by client number."""
    names: np.ndarray
    sizes: np.ndarray
    groups: np.ndarray
    data: str                                # the run's mark of its data; "" where it left none

    def has_same_clients(self, other: _Identity) -> bool:
        """Whether `other` has equal names, sizes and groups of clients, in the same order. `data` is not compared."""
        pairs = ((self.names, other.names), (self.sizes, other.sizes), (self.groups, other.groups))
        return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def page_clients(methods: Sequence[Method], split: str) -> PageClients | None:
    """The clients of a split over all runs of the methods that have a table over clients; None where no run has one.

    Raises ValueError where two runs of the same seed have different clients, so that their errors cannot be compared by client.
    """
    known: dict[int, tuple[RunFolder, _Identity]] = {}
    for run in {run.path: run for m in methods for run in m.runs_with_table.values()}.values():
        mine = _client_identity(run, split)
        first, theirs = known.setdefault(run.seed, (run, mine))
        if not mine.has_same_clients(theirs):
            raise ValueError(f"{run.path} and {first.path} have the same seed but other {split} clients, so that clients cannot "
                             "be compared. Write a page for each, or run both on the same data.")
    return _join_seeds(split, {seed: identity for seed, (_, identity) in sorted(known.items())})


def client_column(run: RunFolder, split: str, member: int, name: str) -> np.ndarray:
    """The column `name` of a run's table over clients, for one split and the model at position `member`: (clients,) float64.

    Ordered by client number. NaN where a client has no value, and everywhere where the table has no such column.
    """
    rows = run.client_columns(split, member)
    if name not in rows:
        return np.full(len(rows["client"]), np.nan)
    return np.array([np.nan if v is None else v for v in rows[name][np.argsort(rows["client"])].tolist()], float)


def column_by_seed(method: Method, clients: PageClients, name: str) -> dict[int, np.ndarray]:
    """The column `name` of the method's model, by seed, each as an array over all rows of `clients`, (clients,) float64.

    Only runs with a table over clients are included. Rows of other seeds' clients are NaN.
    """
    return {seed: clients.place_values(seed, client_column(run, clients.split, method.member, name))
            for seed, run in method.runs_with_table.items()}


def mean_by_client(values: Mapping[int, np.ndarray], clients: PageClients) -> np.ndarray:
    """Each client's mean of `values` over seeds, (clients,); NaN where it has no finite number in any seed."""
    return mean_of_rows(list(values.values())) if values else np.full(len(clients), np.nan)


def values_of_all_seeds(values: Mapping[int, np.ndarray]) -> np.ndarray:
    """The finite numbers in `values`, arrays by seed, in one array: one seed after another, empty without seeds."""
    everything = np.concatenate([np.zeros(0), *values.values()])
    return everything[np.isfinite(everything)]


def _client_identity(run: RunFolder, split: str) -> _Identity:
    """The names, sizes and groups of a run's clients in a split, ordered by client number, and the fingerprint of the run's data.

    Clients without a name are named by their number. The fingerprint is "" where `run.json` has none.
    """
    rows = run.client_columns(split)
    order = np.argsort(rows["client"])
    named = [str(client) if name is None else str(name) for name, client in zip(rows["name"], rows["client"], strict=True)]
    groups, mark = client_column(run, split, 0, "group"), str(run.about.get("fingerprint", ""))
    return _Identity(np.array(named, dtype=object)[order], rows["size"][order], groups, mark)


def _join_seeds(split: str, by_seed: dict[int, _Identity]) -> PageClients | None:
    """The clients of all seeds, given `by_seed`, as rows: one for each client where all seeds have the same clients and data.

    Otherwise the clients of each seed follow those of the one before, with the seed in their names. None without seeds. `split`
    is only stored in the result.
    """
    if not by_seed:
        return None
    each = list(by_seed.values())
    count = {seed: len(identity.names) for seed, identity in by_seed.items()}
    if all(identity.has_same_clients(each[0]) and identity.data == each[0].data for identity in each):
        return PageClients(split, each[0].names, each[0].sizes, each[0].groups, dict.fromkeys(by_seed, 0), count)
    names = [f"{name} (seed {seed})" for seed, identity in by_seed.items() for name in identity.names]
    starts = np.cumsum([0, *count.values()])[:-1].tolist()
    sizes, groups = (np.concatenate([getattr(identity, part) for identity in each]) for part in ("sizes", "groups"))
    return PageClients(split, np.array(names, dtype=object), sizes, groups, dict(zip(by_seed, starts, strict=True)), count)


def metric_distributions(methods: Sequence[Method], clients: PageClients | None, metric: str) -> dict[str, Any] | None:
    """Histograms and distribution functions of a metric over clients, for all methods on common bins; None without any values.

    A dict: `edges` of the bins, and lists over methods: `shares`, the share of values in each bin; `functions`, the empirical
    distribution function as {"x", "y"}; `clients`, the number of values. The clients of all seeds are pooled. The values of a
    deployed run are known as a histogram only: they are spread evenly within its bins. A method that has diverged has none,
    unless all have.
    """
    lost = _positions_to_leave_out(methods)
    values = [np.zeros(0) if k in lost else _pooled_values(m, clients, metric) for k, m in enumerate(methods)]
    if not any(map(len, values)):
        return None
    edges = bin_edges(np.concatenate(values))
    return {"edges": json_numbers(edges), "shares": [json_numbers(bin_shares(v, edges)) for v in values],
            "functions": [distribution_function(v) for v in values], "clients": [len(v) for v in values]}


def _positions_to_leave_out(methods: Sequence[Method]) -> set[int]:
    """The positions of methods that have diverged, whose values would stretch every axis; none where all have diverged."""
    lost = {k for k, m in enumerate(methods) if m.diverged_seeds}
    return set() if len(lost) == len(methods) else lost


def _pooled_values(method: Method, clients: PageClients | None, metric: str) -> np.ndarray:
    """The finite values of a metric of all clients over the method's finished runs, in one array, (values,).

    For deployed runs, values spread evenly over the bins of their histograms stand for them. `clients` is None without a table
    over clients.
    """
    known = column_by_seed(method, clients, method.model.column(metric)) if clients else {}
    deployed = [run.values_from_histogram(metric, method.model) for run in method.finished_runs.values() if run.is_deployed]
    return np.concatenate([values_of_all_seeds(known), *deployed])


@dataclass(frozen=True)
class ClientValues:
    """A metric of every client of a page under every method, and its difference to the baseline: (clients,), NaN for none."""

    means: Sequence[np.ndarray]              # over seeds, by method
    differences: Sequence[np.ndarray]        # to the baseline, over the seeds that both have
    baseline: int                            # position of the method
    better: str                              # "lower" or "higher"


def client_values_by_method(methods: Sequence[Method], baseline: int, clients: PageClients, metric: str,
                            better: str) -> ClientValues:
    """The values of a metric of every client of the page, and their differences to those of the method at `baseline`.

    There are none for a method that has diverged, unless all have.
    """
    lost = _positions_to_leave_out(methods)
    found = [{} if k in lost else column_by_seed(m, clients, m.model.column(metric)) for k, m in enumerate(methods)]
    return ClientValues([mean_by_client(mine, clients) for mine in found],
                        [differences_to_baseline(mine, found[baseline], clients) for mine in found], baseline, better)


def client_list(clients: PageClients, values: Sequence[ClientValues]) -> tuple[np.ndarray, dict[str, Any]]:
    """Which clients the page lists, as positions, and what it says of them whatever the metric.

    The latter is a dict: `names` and `sizes` of the listed clients (some of many); `points`, the positions among them of those in
    the scatter plot; `total`, the number of all clients; `averaged`, whether values are means over seeds; `log`, whether sizes
    need a logarithmic axis. `values` are those of all metrics: of many clients, those with the largest changes are listed.
    """
    kept, points = _listed_clients([gain for one in values for gain in one.differences], len(clients))
    return kept, {
        "total": len(clients), "averaged": clients.are_same_in_all_seeds and len(clients.first) > 1,
        "names": clients.names[kept].tolist(), "sizes": clients.sizes[kept].tolist(),
        "points": np.flatnonzero(np.isin(kept, points)).tolist(), "log": spans_decades(clients.sizes)}


def client_comparison(values: ClientValues, kept: np.ndarray) -> dict[str, Any]:
    """The data of the page's client section about one metric: its value for each listed client, and how it changed.

    A dict of lists over methods: `errors`, the values (whatever the metric), `differences` to the baseline, and `changes`. `kept`
    are the positions of the listed clients.
    """
    means = values.means[values.baseline]
    return {"errors": [json_numbers(mine[kept]) for mine in values.means],
            "differences": [json_numbers(mine[kept]) for mine in values.differences],
            "changes": [_change_summary(mine, means, values.better) for mine in values.differences]}


def differences_to_baseline(mine: dict[int, np.ndarray], baseline: dict[int, np.ndarray], clients: PageClients) -> np.ndarray:
    """Each client's error minus that under the baseline, averaged over the seeds that both have, (clients,).

    `mine` and `baseline` have errors over all clients by seed. NaN for a client without a finite difference, and for all
    where no seed is shared.
    """
    common = [seed for seed in mine if seed in baseline]
    with np.errstate(invalid="ignore"):      # infinite under both: no difference is known
        return mean_of_rows([mine[s] - baseline[s] for s in common]) if common else np.full(len(clients), np.nan)


def spans_decades(sizes: np.ndarray) -> bool:
    """Whether the largest size is more than ten times the smallest, so that an axis should be logarithmic.

    False without sizes, or where the smallest is zero.
    """
    return bool(len(sizes) and sizes.min() > 0 and sizes.max() > 10 * sizes.min())


def plotted_clients(count: int, most: int = POINTS) -> np.ndarray:
    """Ascending positions of the clients that a scatter plot shows: all `count`, or a random sample of `most`.

    The sample is drawn with a fixed seed, so it is the same at every call.
    """
    return np.arange(count) if count <= most else np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _listed_clients(gains: Sequence[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions of the clients listed on the page, and of those among them that a scatter plot shows.

    `count` is the number of clients; up to 2000 are all listed. Of more, the plotted ones are listed and, for each method, the 50
    with the lowest and the 50 with the highest difference in `gains`.
    """
    points = plotted_clients(count)
    if count <= LISTED:
        return np.arange(count), points
    ranks = [np.argsort(mine)[:np.isfinite(mine).sum()] for mine in gains]          # NaN sorts last
    extremes = [np.concatenate([rank[:EXTREMES], rank[-EXTREMES:]]) for rank in ranks]
    return np.unique(np.concatenate([points, *extremes])), points


def _change_summary(difference: np.ndarray, baseline: np.ndarray, better: str) -> dict[str, Any]:
    """How many clients `improved`, stayed the `same` or got `worse`, and the sorted differences as a curve, `x` and `y`.

    A difference is no change where it is at most 1e-9 times the larger of 1 and the baseline's value. NaN is left out. The
    curve has at most 400 points, from the client that gained most; `x` is the share of clients. `better` values are "lower" or
    "higher" ones.
    """
    sign = 1 if better == "lower" else -1
    known = np.isfinite(difference)
    values, scale = difference[known], np.maximum(1, np.abs(baseline[known]))
    same = np.abs(values) <= SAME * scale
    ranked = sign * np.sort(sign * values)
    kept = thinned_positions(len(ranked), 400)
    gained, lost = (int((~same & (side * sign * values < 0)).sum()) for side in (1, -1))
    return {"improved": gained, "same": int(same.sum()), "worse": lost,
            "x": json_numbers((kept + 0.5) / max(len(ranked), 1)), "y": json_numbers(ranked[kept])}
