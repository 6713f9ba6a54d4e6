"""Who was in the tail, how often, and how that changed: what only a simulator can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.report.client_errors import PageClients, column_by_seed, plotted_clients, spans_decades, values_of_all_seeds
from fedtail.report.methods import Method
from fedtail.report.statistics import bin_edges, bin_shares, json_numbers, quantile_classes
from fedtail.runs import RunFolder
from fedtail.runs.evaluated_models import participation_summary

WINDOWS = 24                                 # of rounds
FREQUENT = 25                                # clients in the heat map
MOST_BINS = 30                               # of the histogram of participation
GROUPS = 7                                   # that have a colour of their own; the rest is one class

Kind = tuple[list[str], np.ndarray]          # names of classes, and the class of each client


@dataclass(frozen=True)
class Participation:
    """How often each client was sampled and contributed (had non-zero weight) in each window of rounds, summed over seeds."""

    ends: np.ndarray                         # (windows,) last round of each
    sampled: np.ndarray                      # (windows, clients)
    contributed: np.ndarray                  # (windows, clients)


def tail_membership(methods: Sequence[Method], clients: PageClients) -> dict[str, Any]:
    """The data of the page's tail section: how often which clients contributed, for each method.

    A dict: `total`, the number of clients; `points`, `names` and `sizes`, the number, names and sizes of those in the scatter
    plot; `log`, whether sizes need a logarithmic axis; `classes`, the labels of the classes by "size" and by "group" (empty where
    there is one class only); and `methods`, a dict for each method, or None where its runs did not record participation, and for
    personal models, which have no tail.
    """
    sizes, of_size = quantile_classes(clients.sizes, 4, "{:,.0f}")
    groups, of_group = group_classes(clients)
    drawn_ids = plotted_clients(len(clients))
    each = [_method_tail_data(m, clients, drawn_ids, {"size": (sizes, of_size), "group": (groups, of_group)}) for m in methods]
    return {"total": len(clients), "points": len(drawn_ids), "names": clients.names[drawn_ids].tolist(),
            "sizes": clients.sizes[drawn_ids].tolist(), "log": spans_decades(clients.sizes),
            "classes": {"size": sizes if len(sizes) > 1 else [], "group": groups if len(groups) > 1 else []}, "methods": each}


def participation_counts(method: Method, clients: PageClients) -> dict[str, Any] | None:
    """In how many rounds each training client took part under `method`, over the clients of all its seeds; None if not recorded.

    A dict: a histogram over clients (`edges`, `shares`) and what `participation_summary` gives: `clients`, `never`, `min`,
    `median` and `max`.
    """
    counts = values_of_all_seeds(column_by_seed(method, clients, "asked"))
    if not len(counts):
        return None
    width = -(-int(counts.max() + 1) // MOST_BINS)                                   # whole rounds, rounded up
    edges = np.arange(0, counts.max() + 1 + width, width) - 0.5
    return {**participation_summary(counts), "edges": json_numbers(edges), "shares": json_numbers(bin_shares(counts, edges))}


def group_classes(clients: PageClients) -> tuple[list[str], np.ndarray]:
    """Labels of the 7 largest groups and, for all others, "other groups"; and the class of each client, (clients,) int.

    The class is a position among the labels. The labels are empty and all classes 0 where a client has no group.
    """
    if not len(clients) or np.isnan(clients.groups).any():
        return [], np.zeros(len(clients), int)
    names, which, count = np.unique(clients.groups, return_inverse=True, return_counts=True)
    largest = np.sort(np.argsort(-count, kind="stable")[:GROUPS])
    rank = np.full(len(names), len(largest))
    rank[largest] = np.arange(len(largest))
    labels = [f"group {names[k]:g}" for k in largest] + (["other groups"] if len(names) > len(largest) else [])
    return labels, rank[which]


def participation(method: Method, clients: PageClients) -> Participation | None:
    """How often each client was sampled and contributed in each window of rounds, summed over the method's seeds.

    None where no run with a table over clients recorded its rounds. The rounds of the longest run are divided into at most 24
    windows.
    """
    runs = [run for run in method.runs_with_table.values() if run.rounds]
    if not runs:
        return None
    rounds = max(run.about["rounds"] for run in runs)
    windows = min(WINDOWS, rounds)
    sampled, contributed = np.zeros((2, windows, len(clients)))
    for run in runs:
        _add_rounds(run, method.member, clients.first[run.seed], rounds, sampled, contributed)
    ends = np.array([-(-(k + 1) * rounds // windows) for k in range(windows)])      # rounded up
    return Participation(ends, sampled, contributed)


def _add_rounds(run: RunFolder, member: int, first: int, rounds: int, sampled: np.ndarray, contributed: np.ndarray) -> None:
    """Add the rounds of one run to the counts `sampled` and `contributed`, (windows, clients), in place.

    `first` is the row of the run's first client, `rounds` the number of rounds that the windows divide, `member` the model's
    position. Clients that were corrupted by an attack have no row, and are left out.
    """
    place = _rows_of_clients(run)
    for line in run.rounds:
        window = (line["round"] - 1) * len(sampled) // rounds
        for counts, who in ((sampled, line["asked"]), (contributed, line["members"][member]["counted"])):
            rows = place[np.array(who, int)]
            np.add.at(counts[window], first + rows[rows >= 0], 1)


def _rows_of_clients(run: RunFolder) -> np.ndarray:
    """Which row each training client of a run has among those that the page shows, (clients,) int64; -1 for a corrupted one."""
    place = np.full(run.about["splits"]["train"], -1)
    shown = np.sort(run.client_columns("train")["client"])
    place[shown] = np.arange(len(shown))
    return place


def _method_tail_data(method: Method, clients: PageClients, points: np.ndarray, kinds: dict[str, Kind]) -> dict[str, Any] | None:
    """The tail section's data for one method; None for personal models, and where its runs did not record participation.

    A client's tail share is the share of the rounds it was sampled for to which it contributed. The dict has a histogram of these
    shares over clients (`edges`, `shares`), their `mean`, the fraction of clients that `never` contributed and whether
    `everybody` always did, the shares at the rows `points` of the scatter plot, and by window of rounds (`ends`) the
    `composition` of the tail by class and the most `frequent` contributors. `kinds` has labels and classes of clients by name:
    "size" and "group".
    """
    share = np.full(len(clients), np.nan) if method.personal else tail_share(method, clients)
    known = share[np.isfinite(share)]
    if not len(known):
        return None
    edges = bin_edges(np.array([0.0, 1.0] * 100), 20)
    found = participation(method, clients)
    return {"everybody": bool((known == 1).all()), "edges": json_numbers(edges), "shares": json_numbers(bin_shares(known, edges)),
            "points": json_numbers(share[points]), "mean": float(known.mean()), "never": float((known == 0).mean()),
            "composition": {kind: _tail_composition(found, *made) for kind, made in kinds.items() if found and len(made[0]) > 1},
            "ends": found.ends.tolist() if found else [],
            "frequent": _most_frequent_contributors(found, clients) if found else None}


def tail_share(method: Method, clients: PageClients) -> np.ndarray:
    """Of the rounds that each client was sampled for under `method`, the share to which it contributed, (clients,).

    Rounds of all seeds are counted together. NaN for a client that was never sampled.
    """
    sampled = _total_over_seeds(column_by_seed(method, clients, "asked"), len(clients))
    contributed = _total_over_seeds(column_by_seed(method, clients, "in_tail"), len(clients))
    return np.divide(contributed, sampled, out=np.full(len(clients), np.nan), where=sampled > 0)


def _total_over_seeds(values: dict[int, np.ndarray], count: int) -> np.ndarray:
    """The sum over seeds of `values`, arrays by seed, for each client, (count,); NaN is taken for zero. Zeros without seeds."""
    return np.nansum(np.stack(list(values.values())), 0) if values else np.zeros(count)


def _tail_composition(found: Participation, labels: list[str], which: np.ndarray) -> dict[str, Any]:
    """The share of each class of clients among the contributors, by window, and among all sampled clients, as a dict.

    `contributed` has a list over windows for each class, None in windows without contributors; `sampled` has one share for each
    class, over all windows. `found` counts how often each client was sampled and contributed; `which` is the class of each
    client, a position in `labels`.
    """
    member = np.eye(len(labels))[which]                                              # (clients, classes)
    contributed, sampled = found.contributed @ member, (found.sampled @ member).sum(0)
    total = contributed.sum(1, keepdims=True)
    part = np.divide(contributed, total, out=np.full(contributed.shape, np.nan), where=total > 0)
    return {"contributed": [json_numbers(row) for row in part.T], "sampled": json_numbers(sampled / max(sampled.sum(), 1))}


def _most_frequent_contributors(found: Participation, clients: PageClients) -> dict[str, Any]:
    """The 25 clients that contributed most often, by the counts in `found`, as a dict of lists over these clients.

    These are `names`, `sizes`, how often they `contributed` and were `sampled`, and `share`, a list over windows for each: of the
    rounds it was sampled for, the share to which it contributed, None where it was not sampled.
    """
    often = np.argsort(-found.contributed.sum(0), kind="stable")[:FREQUENT]
    sampled, contributed = found.sampled[:, often], found.contributed[:, often]
    part = np.divide(contributed, sampled, out=np.full(contributed.shape, np.nan), where=sampled > 0)
    return {"names": clients.names[often].tolist(), "sizes": clients.sizes[often].tolist(),
            "share": [json_numbers(row) for row in part.T],
            "contributed": contributed.sum(0).astype(int).tolist(), "sampled": sampled.sum(0).astype(int).tolist()}
