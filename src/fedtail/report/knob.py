"""A family of models by one number, and the clients that pick their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.report.clients import Clients, by_seed
from fedtail.report.methods import KNOB, SYMBOLS, KnobFamily, Method, tick
from fedtail.report.statistics import classes, drawn, over_seeds, summary

JUDGED = ("mean", "p90", "worst10")


def knob(family: KnobFamily, methods: Sequence[Method], clients: Clients | None, percent: bool) -> dict[str, Any]:
    """The slider, and who would set it where."""
    members = [methods[k] for k in family.order]
    told = {"name": family.name, "methods": list(family.order), "ticks": [tick(m.value) for m in members],
            "symbol": SYMBOLS.get(family.field, family.field) if family.field else "", "tail": family.field == KNOB}
    return told | {"choice": choice(members, clients, percent) if clients else None}


def choice(members: Sequence[Method], clients: Clients, percent: bool) -> dict[str, Any] | None:
    """What each client picked by one half of its examples, judged on the other half; None where nobody picked."""
    picks = [by_seed(m, clients, "picks") for m in members]                          # of each member: seed -> (clients,)
    judged = [by_seed(m, clients, "judged") for m in members]
    seeds = [seed for seed in picks[0] if np.isfinite(picks[0][seed]).any()]
    if not seeds:
        return None
    chosen = {seed: np.stack([p[seed] for p in picks]) for seed in seeds}            # (members, clients)
    errors = {seed: np.stack([j[seed] for j in judged]) for seed in seeds}
    own = {seed: np.nansum(np.where(chosen[seed] == 1, errors[seed], 0), 0) for seed in seeds}
    clean = {seed: np.isfinite(errors[seed]).all(0) & (np.nansum(chosen[seed], 0) == 1) for seed in seeds}
    which = np.concatenate([chosen[s][:, clean[s]].argmax(0) for s in seeds])
    widest = np.concatenate([errors[s][-1, clean[s]] for s in seeds])
    sizes = np.concatenate([clients.sizes[clean[s]] for s in seeds])
    return {
        "counts": np.bincount(which, minlength=len(members)).tolist(), "clients": len(which), "seeds": len(seeds),
        "judged": [_over_seeds([errors[s][k, clean[s]] for s in seeds]) for k in range(len(members))],
        "own": _over_seeds([own[s][clean[s]] for s in seeds]),
        "by_error": _split(which, widest, 5, len(members), "{:.0f}%" if percent else "{:.3g}", 100 if percent else 1),
        "by_size": _split(which, sizes, 4, len(members), "{:,.0f}", 1),
    }


def _over_seeds(values: Sequence[np.ndarray]) -> dict[str, Any]:
    each = [summary(v) for v in values]
    return {name: over_seeds([numbers[name] for numbers in each]) for name in JUDGED}


def _split(which: np.ndarray, by: np.ndarray, parts: int, members: int, show: str, scale: float) -> dict[str, Any]:
    """In each class of clients, the share that picked each member."""
    labels, of_class = classes(by, parts, show, scale)
    counts = np.zeros((len(labels), members))
    np.add.at(counts, (of_class, which), 1)
    return {"labels": labels, "clients": counts.sum(1).astype(int).tolist(),
            "shares": [drawn(column) for column in (counts / counts.sum(1, keepdims=True)).T]}
