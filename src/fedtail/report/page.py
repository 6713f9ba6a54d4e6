"""The page about runs: its data as plain lists and numbers, and the one file it becomes, which needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.report.answers import ANSWERS_STYLE, ANSWERS_TEMPLATE, answers_section
from fedtail.report.client_errors import ClientValues, client_list, client_values_by_method, page_clients
from fedtail.report.curves import contributors_by_round, evaluated_splits, has_extremes, learning_curves, metric_names
from fedtail.report.decimals import difference_decimals
from fedtail.report.hyperparameters import hyperparameters
from fedtail.report.methods import Method, MethodFamily, baseline_position, method_families, methods_in_runs
from fedtail.report.metric_view import PageContent, metric_view
from fedtail.report.overview import caveats, default_title, family_slider, header_facts
from fedtail.report.settings import method_settings
from fedtail.report.tail import participation_counts, tail_membership
from fedtail.runs import RunFolder
from fedtail.runs.answers import TAIL
from fedtail.runs.diverged import divergence_sentences
from fedtail.runs.files import to_json_values, write_atomically
from fedtail.runs.metric_bounds import metric_name
from fedtail.runs.rounding import shown_number

STYLE, TEMPLATE = "page.css", "page.html.j2"
SCRIPTS = ("style.js", "plots.js", "tail_plots.js", "tables.js", "page.js", "handing_out.js")
NAME = "report.html"
# Blue, vermilion, green, purple, amber, sky, grey: distinct with any kind of colour vision (after Okabe and Ito).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b35c93", "#c98500", "#3a9ad9", "#777777", "#8c5a2b")
BESIDE_A_FAMILY = ("#009e73", "#c98500", "#777777", "#8c5a2b", "#3a9ad9")      # those that are not on the ramp
RAMP = ((217, 95, 14), (192, 74, 120), (123, 88, 178), (0, 114, 178))      # from the tail to everybody


def write_page(runs: Sequence[RunFolder], out: Path | str, title: str | None = None, baseline: str | None = None,
               metric: str = "error", tail: str = TAIL, price: float = 1.0) -> Path:
    """Write the page about `runs` to `report.html` in the folder `out`, or to `out` itself where it ends in .html.

    `title` is the page's heading, by default the methods and their data. Returns the path of the page; folders are created.
    Methods are the distinct names among the runs, in their order; `baseline` names the one that the others are compared with, by
    default the first. The page opens with `metric`; all others can be chosen on it. Verdicts are about the statistic `tail`, with
    the most that the mean may pay for each unit of it, `price`. The file is replaced atomically. Raises ValueError where the runs
    cannot be on one page, and ImportError where plotly or jinja2 is missing.
    """
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / NAME
    text = render_page(page_data(runs, baseline, metric, tail, price), title or default_title(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def render_page(data: dict[str, Any], title: str) -> str:
    """The whole page as HTML text called `title`, from `data` as `page_data` returns it; scripts and styles are embedded.

    Names chosen by users are escaped, in the text and in the embedded JSON. Raises ImportError, with what to install, where
    plotly or jinja2 is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        plotly = import_module("plotly.offline").get_plotlyjs()
    except ImportError as missing:
        raise ImportError(f"the page needs {missing.name}, which is not installed. Write pip install plotly jinja2.") from None

    rules = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    rules.filters["shown"] = shown_number
    rules.filters["difference_decimals"] = difference_decimals
    answers = rules.from_string(_read_page_file(ANSWERS_TEMPLATE)).render(data=data)
    return rules.from_string(_read_page_file(TEMPLATE)).render(
        title=title, data=data, embedded=Markup(script_safe_json(data)), answers=Markup(answers),
        style=Markup(_read_page_file(STYLE) + _read_page_file(ANSWERS_STYLE)),
        plotly=Markup(plotly.replace("</script", r"<\/script")), scripts=Markup("\n".join(map(_read_page_file, SCRIPTS))))


def script_safe_json(data: Any) -> str:
    """`data` as JSON that can be embedded in an HTML script element: the characters <, > and & are escaped.

    NaN and infinity become null.
    """
    text = json.dumps(to_json_values(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _read_page_file(name: str) -> str:
    """The text of the file `name` of the package `fedtail.report`, such as "page.css": a style, a script or the template."""
    return (files("fedtail.report") / name).read_text(encoding="utf-8")


def page_data(runs: Sequence[RunFolder], baseline: str | None = None, metric: str = "error", tail: str = TAIL,
              price: float = 1.0) -> dict[str, Any]:
    """All data of the page as dicts, lists and numbers, the way `write_page` embeds it as JSON. Error rates are fractions.

    Its keys are the page's sections ("answers", "alarms", "facts", "hyperparameters", "notes", "methods", "curves",
    "contributors", "families", "tail", "participation", "settings"), what the page is set to ("deployed", "tested", "baseline",
    "focus", "splits", "metrics" and their "names" in words, "thresholds", and "few", whether curves have the worst client in the
    place of a percentile), those of `metric_view` for the `metric` that the page opens with, and "further", such a view of every
    other metric by name. `baseline` names the method that the others are compared with, by default the first; `tail` and `price`
    are what verdicts go by. Raises ValueError where there are no runs, where they cannot be on one page, or where no method,
    metric or statistic has that name.
    """
    methods = methods_in_runs(runs)
    first, families = baseline_position(methods, baseline), method_families(methods)
    tested = runs[0].tested_split
    clients, training = page_clients(methods, tested), page_clients(methods, "train")
    rounds, curves = [contributors_by_round(m) for m in methods], [learning_curves(m) for m in methods]
    content = PageContent(runs, methods, first, families, clients)
    return {
        "deployed": any(run.is_deployed for run in runs), "alarms": divergence_sentences(runs), "facts": header_facts(runs),
        "hyperparameters": hyperparameters(methods), "notes": caveats(runs, clients), "tested": tested,
        "answers": answers_section(methods, first, metric_names(methods), tail, price),
        "methods": _method_entries(methods, families), "baseline": first,
        "focus": _first_compared_method(methods, first, families),
        "splits": evaluated_splits(methods), "metrics": metric_names(methods),
        "names": {name: metric_name(runs[0].about, name) for name in ("error", *metric_names(methods))}, "curves": curves,
        "few": content.has_few_clients and has_extremes(curves),
        "contributors": rounds, "thresholds": any(value is not None for mine in rounds if mine for value in mine["threshold"]),
        "families": [family_slider(f, methods) for f in families],
        "tail": tail_membership(methods, training) if training else None,
        "participation": [participation_counts(m, training) if training else None for m in methods],
        "settings": method_settings(runs), **_metric_views(content, metric),
    }


def _metric_views(content: PageContent, metric: str) -> dict[str, Any]:
    """The view of `metric`, and below "further" those of all other metrics by name; "clients" also has what they share.

    Raises ValueError where no run has the metric.
    """
    names = metric_names(content.methods)
    if metric not in names:
        raise ValueError(f"there is no metric {metric!r} on this page; there are {', '.join(names)}.")
    values, kept, shared = _listed_values(content, names)
    views = {name: metric_view(content, name, values.get(name), kept) for name in names}
    opened = views.pop(metric)
    return {**opened, "clients": opened["clients"] and {**shared, **opened["clients"]}, "further": views}


def _listed_values(content: PageContent,
                   names: Sequence[str]) -> tuple[dict[str, ClientValues], np.ndarray | None, dict[str, Any]]:
    """The values of all clients by metric, the positions of the clients that the page lists, and what it says of these.

    An empty dict, None and an empty dict without a table over clients.
    """
    if content.clients is None:
        return {}, None, {}
    values = {name: client_values_by_method(content.methods, content.baseline, content.clients, name, content.direction(name))
              for name in names}
    kept, shared = client_list(content.clients, list(values.values()))
    return values, kept, shared


def _method_entries(methods: Sequence[Method], families: Sequence[MethodFamily]) -> list[dict[str, Any]]:
    """A dict for each method, in order: its label, name, colour, seeds, whether it is of personal models, and its family.

    The family is a position in `families`, or None.

    The members of a family are coloured along a ramp, other methods from a palette.
    """
    family_of = {k: number for number, family in enumerate(families) for k in family.order}
    colour = {k: _ramp_colour(place / max(len(f.order) - 1, 1)) for f in families for place, k in enumerate(f.order)}
    alone = [k for k in range(len(methods)) if k not in family_of]
    colour |= dict(zip(alone, (BESIDE_A_FAMILY if families else PALETTE) * len(methods), strict=False))
    return [{"label": m.label, "name": m.name, "family": family_of.get(k), "colour": colour[k], "personal": m.personal,
             "seeds": [run.seed for run in m.averaged_runs]} for k, m in enumerate(methods)]


def _first_compared_method(methods: Sequence[Method], baseline: int, families: Sequence[MethodFamily]) -> int:
    """The position in `methods` of the one that the page first compares with the method at position `baseline`.

    It is the middle one of the other members of the baseline's family; without a family the first other method, and the baseline
    itself where it is the only method. `families` are those among the methods.
    """
    others = [k for f in families if baseline in f.order for k in f.order if k != baseline]
    if others:
        return others[len(others) // 2]
    return next((k for k in range(len(methods)) if k != baseline), baseline)


def _ramp_colour(place: float) -> str:
    """The colour at `place` on the ramp for the members of a family, from 0 (its first member) to 1 (its last), as "#rrggbb"."""
    at = place * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    mixed = (round(a + (at - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
