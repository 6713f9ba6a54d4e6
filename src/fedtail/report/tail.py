"""Who was in the tail, how often, and how that changed: what only a simulator can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.report.client_errors import PageClients, by_seed, sample, spans_decades
from fedtail.report.methods import Method
from fedtail.report.statistics import bins, classes, page_numbers, shares
from fedtail.runs import RunFolder

WINDOWS = 24                                 # of rounds
FREQUENT = 25                                # clients in the heat map
GROUPS = 7                                   # that have a colour of their own; the rest is one class

Kind = tuple[list[str], np.ndarray]          # names of classes, and the class of each client


@dataclass(frozen=True)
class Participation:
    """How often each client was asked and counted in each window of rounds, over all seeds."""

    ends: np.ndarray                         # (windows,) last round of each
    asked: np.ndarray                        # (windows, clients)
    counted: np.ndarray                      # (windows, clients)


def tail(methods: Sequence[Method], clients: PageClients) -> dict[str, Any]:
    """Everything about tail membership, and what does not depend on the method once."""
    sizes, of_size = classes(clients.sizes, 4, "{:,.0f}")
    groups, of_group = group_classes(clients)
    drawn_ids = sample(len(clients))
    each = [_method(m, clients, drawn_ids, {"size": (sizes, of_size), "group": (groups, of_group)}) for m in methods]
    return {"total": len(clients), "points": len(drawn_ids), "names": clients.names[drawn_ids].tolist(),
            "sizes": clients.sizes[drawn_ids].tolist(), "log": spans_decades(clients.sizes),
            "classes": {"size": sizes if len(sizes) > 1 else [], "group": groups if len(groups) > 1 else []}, "methods": each}


def group_classes(clients: PageClients) -> tuple[list[str], np.ndarray]:
    """The largest groups by name, the rest as one; no class where clients have no group."""
    if not len(clients) or np.isnan(clients.groups).any():
        return [], np.zeros(len(clients), int)
    names, which, count = np.unique(clients.groups, return_inverse=True, return_counts=True)
    largest = np.sort(np.argsort(-count, kind="stable")[:GROUPS])
    rank = np.full(len(names), len(largest))
    rank[largest] = np.arange(len(largest))
    labels = [f"group {names[k]:g}" for k in largest] + (["other groups"] if len(names) > len(largest) else [])
    return labels, rank[which]


def participation(method: Method, clients: PageClients) -> Participation | None:
    """Counted over the finished runs that recorded their rounds; None where there is none."""
    runs = [run for run in method.finished.values() if run.rounds]
    if not runs:
        return None
    rounds = max(run.about["rounds"] for run in runs)
    windows = min(WINDOWS, rounds)
    asked, counted = np.zeros((2, windows, len(clients)))
    for run in runs:
        _add(run, method.member, clients.first[run.seed], rounds, asked, counted)
    ends = np.array([-(-(k + 1) * rounds // windows) for k in range(windows)])      # rounded up
    return Participation(ends, asked, counted)


def _add(run: RunFolder, member: int, first: int, rounds: int, asked: np.ndarray, counted: np.ndarray) -> None:
    for line in run.rounds:
        window = (line["round"] - 1) * len(asked) // rounds
        np.add.at(asked[window], first + np.array(line["asked"], int), 1)
        np.add.at(counted[window], first + np.array(line["members"][member]["counted"], int), 1)


def _method(method: Method, clients: PageClients, points: np.ndarray, kinds: dict[str, Kind]) -> dict[str, Any] | None:
    share = tail_share(method, clients)
    known = share[np.isfinite(share)]
    if not len(known):
        return None
    edges = bins(np.array([0.0, 1.0] * 100), 20)
    seen = participation(method, clients)
    return {"everybody": bool((known == 1).all()), "edges": page_numbers(edges), "shares": page_numbers(shares(known, edges)),
            "points": page_numbers(share[points]), "mean": float(known.mean()), "never": float((known == 0).mean()),
            "composition": {kind: _composition(seen, *made) for kind, made in kinds.items() if seen and len(made[0]) > 1},
            "ends": seen.ends.tolist() if seen else [], "frequent": _frequent(seen, clients) if seen else None}


def tail_share(method: Method, clients: PageClients) -> np.ndarray:
    """Of the rounds in which a client was asked, the share in which it counted; NaN for one that was never asked."""
    asked = _total(by_seed(method, clients, "asked"), len(clients))
    counted = _total(by_seed(method, clients, "in_tail"), len(clients))
    return np.divide(counted, asked, out=np.full(len(clients), np.nan), where=asked > 0)


def _total(values: dict[int, np.ndarray], count: int) -> np.ndarray:
    return np.nansum(np.stack(list(values.values())), 0) if values else np.zeros(count)


def _composition(seen: Participation, labels: list[str], which: np.ndarray) -> dict[str, Any]:
    """The share of each class among those who counted, by window, and among all who were asked."""
    member = np.eye(len(labels))[which]                                              # (clients, classes)
    counted, asked = seen.counted @ member, (seen.asked @ member).sum(0)
    total = counted.sum(1, keepdims=True)
    part = np.divide(counted, total, out=np.full(counted.shape, np.nan), where=total > 0)
    return {"counted": [page_numbers(row) for row in part.T], "asked": page_numbers(asked / max(asked.sum(), 1))}


def _frequent(seen: Participation, clients: PageClients) -> dict[str, Any]:
    """The clients that counted most often: the share of their rounds that counted, by window."""
    often = np.argsort(-seen.counted.sum(0), kind="stable")[:FREQUENT]
    asked, counted = seen.asked[:, often], seen.counted[:, often]
    part = np.divide(counted, asked, out=np.full(counted.shape, np.nan), where=asked > 0)
    return {"names": clients.names[often].tolist(), "sizes": clients.sizes[often].tolist(),
            "share": [page_numbers(row) for row in part.T],
            "counted": counted.sum(0).astype(int).tolist(), "asked": asked.sum(0).astype(int).tolist()}
