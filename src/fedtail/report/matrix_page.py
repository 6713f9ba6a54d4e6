"""The page about a matrix: every combination, and what each protection costs the others, in one file without network."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fedtail.report.page import PALETTE, STYLE, script_safe_json
from fedtail.report.settings import toml_text
from fedtail.runs.files import write_atomically
from fedtail.runs.matrix_columns import defined_text, shown_columns
from fedtail.runs.matrix_results import result_of_metric

PAGE = "matrix.html"
TEMPLATE, SCRIPTS = "matrix_page.html.j2", ("matrix_page.js", "handing_out.js")
TITLE = "What each protection costs the others"


def write_matrix_page(result: dict[str, Any], out: Path, title: str = TITLE, metric: str = "error") -> Path:
    """Write the page about a matrix to the file `out`, atomically, and return its path.

    `result` is the content of `matrix.json`; `title` is the page's heading, and `metric` the one it opens with. Raises
    ImportError, with what to install, where jinja2 is missing.
    """
    write_atomically(out, render_matrix_page(result, title, metric))
    return out


def render_matrix_page(result: dict[str, Any], title: str = TITLE, metric: str = "error") -> str:
    """The page about a matrix as HTML text called `title`, with styles, script and data embedded; it needs no network.

    `result` is the content of `matrix.json`. The page opens with `metric`, and others can be chosen on it. Names from the file
    and texts of refusals are escaped. Raises ImportError, with what to install, where jinja2 is missing, and KeyError where there
    is no such metric.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as missing:
        raise ImportError(f"the page needs {missing.name}, which is not installed. Write pip install jinja2.") from None

    rules = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style, template, *scripts = ((files("fedtail.report") / name).read_text(encoding="utf-8")
                                 for name in (STYLE, TEMPLATE, *SCRIPTS))
    views = [metric_view(result, name) for name in dict.fromkeys((metric, *result["metrics"]))]
    return rules.from_string(template).render(
        title=title, data=result, metric=metric, views=views, facts=matrix_facts(result), style=Markup(style),
        own=any(cell["personal"] for cell in result["cells"]), settings=toml_text(result["settings"]),
        private=any(cell["epsilon"] is not None for cell in result["cells"]), script=Markup("\n".join(scripts)),
        embedded=Markup(script_safe_json(_embedded(result, views, metric))))


def metric_view(result: dict[str, Any], metric: str) -> dict[str, Any]:
    """What the page shows of one metric: its name, better end and unit, the columns of its tables, and their rows.

    `cells` and `costs` are those of the metric; `defined` says, for each combination, for how many clients it is defined.
    """
    found = result_of_metric(result, metric)
    return {"metric": metric, "better": found["better"], "unit": found["unit"], "columns": shown_columns(found),
            "cells": found["cells"], "costs": found["costs"],
            "defined": [defined_text(cell, result["clients"]) for cell in found["cells"]]}


def _embedded(result: dict[str, Any], views: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The data of the page's script: axes, combinations, and by metric the points of the plane, with titles and decimals."""
    metrics = {view["metric"]: {"better": view["better"], "unit": view["unit"], "tail": view["columns"][1].statistic,
                                "titles": [column.title for column in view["columns"][:2]],
                                "decimals": [column.decimals for column in view["columns"][:2]],
                                "cells": [{column.key: (column.cell(cell) or {}).get("mean") for column in view["columns"]}
                                          for cell in view["cells"]]} for view in views if view["columns"]}
    cells = [{"values": cell["values"], "state": cell["state"]} for cell in result["cells"]]
    return {"axes": result["axes"], "cells": cells, "metrics": metrics, "metric": metric, "colours": PALETTE}


def matrix_facts(result: dict[str, Any]) -> dict[str, str]:
    """The facts in the page's head by name, as texts: how many combinations ended how, data, clients, rounds and seeds.

    `result` is the content of `matrix.json`.
    """
    states = [cell["state"] for cell in result["cells"]]
    counts = [f"{states.count(state)} {said}" for state, said in (("done", "trained"), ("refused", "refused"),
                                                                  ("diverged", "diverged"), ("failed", "failed"))
              if state in states]
    return {"combinations": f"{len(states)}: {', '.join(counts)}", "axes": ", ".join(result["axes"]), "data": result["data"],
            "evaluated": f"{result['clients']} {result['split'].replace('_', '-')} clients, the corrupted left out",
            "rounds": str(result["rounds"]), "seeds": ", ".join(map(str, result["seeds"])),
            **({"split": result["split_of_seeds"]} if len(result["seeds"]) > 1 and "split_of_seeds" in result else {})}
