"""The data of a page: everything that is drawn on it, from the run folders, as plain lists and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedtail.report.clients import Clients, clients_of
from fedtail.report.errors import by_client, distributions
from fedtail.report.knob import knob
from fedtail.report.methods import KnobFamily, Method, baseline_of, families_of, methods_of
from fedtail.report.overview import facts, notes, table
from fedtail.report.rounds import counted, curves, metrics, splits
from fedtail.report.tail import tail
from fedtail.runs import RunFolder

# Blue, vermilion, green, purple, amber, sky, grey: distinct with any kind of colour vision (after Okabe and Ito).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b35c93", "#c98500", "#3a9ad9", "#777777", "#8c5a2b")
BESIDE_A_FAMILY = ("#009e73", "#c98500", "#777777", "#8c5a2b", "#3a9ad9")      # those that are not on the ramp
RAMP = ((217, 95, 14), (192, 74, 120), (123, 88, 178), (0, 114, 178))      # from the tail to everybody


def page_data(runs: Sequence[RunFolder], baseline: str | None = None) -> dict[str, Any]:
    """What `write_page` puts on the page; numbers are raw, so an error rate is a fraction."""
    methods = methods_of(runs)
    first, families = baseline_of(methods, baseline), families_of(methods)
    tested = runs[0].tested
    clients, training = clients_of(methods, tested), clients_of(methods, "train")
    percent, rounds = bool(runs[0].about["rates"]), [counted(m) for m in methods]
    return {
        "facts": facts(runs), "notes": notes(runs, clients), "tested": tested, "percent": percent,
        "methods": _listed(methods, families), "baseline": first, "focus": _first_focus(methods, first, families),
        "table": table(methods, first),
        "splits": splits(methods), "metrics": metrics(methods), "curves": [curves(m) for m in methods],
        "counted": rounds, "thresholds": any(value is not None for mine in rounds if mine for value in mine["threshold"]),
        "families": [knob(f, methods, clients, percent) for f in families],
        **_over_clients(methods, first, clients, training),
    }


def _over_clients(methods: Sequence[Method], baseline: int, clients: Clients | None, training: Clients | None) -> dict[str, Any]:
    """What needs the table over clients; nothing where no run is finished."""
    return {
        "distributions": distributions(methods, clients) if clients else None,
        "clients": by_client(methods, baseline, clients) if clients else None,
        "tail": tail(methods, training) if training else None,
    }


def _listed(methods: Sequence[Method], families: Sequence[KnobFamily]) -> list[dict[str, Any]]:
    family_of = {k: number for number, family in enumerate(families) for k in family.order}
    colour = {k: _ramp(place / max(len(f.order) - 1, 1)) for f in families for place, k in enumerate(f.order)}
    alone = [k for k in range(len(methods)) if k not in family_of]
    colour |= dict(zip(alone, (BESIDE_A_FAMILY if families else PALETTE) * len(methods), strict=False))
    return [{"label": m.label, "name": m.name, "family": family_of.get(k), "colour": colour[k],
             "seeds": [run.seed for run in m.averaged]} for k, m in enumerate(methods)]


def _first_focus(methods: Sequence[Method], baseline: int, families: Sequence[KnobFamily]) -> int:
    """The page opens on something to compare with the baseline: the middle of its family, or the next method."""
    others = [k for f in families if baseline in f.order for k in f.order if k != baseline]
    if others:
        return others[len(others) // 2]
    return next((k for k in range(len(methods)) if k != baseline), baseline)


def _ramp(place: float) -> str:
    """A colour between the tail's (0) and everybody's (1)."""
    at = place * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    mixed = (round(a + (at - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
