"""Write the page: the data, our own script and style, and plotly's, in one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedtail.report.data import page_data
from fedtail.runs import RunFolder
from fedtail.runs.files import plain, write_whole

STYLE, SCRIPTS, TEMPLATE = "page.css", ("style.js", "plots.js", "tail_plots.js", "tables.js", "page.js"), "page.html.j2"
NAME = "report.html"


def write_page(runs: Sequence[RunFolder], out: Path | str, title: str = "The distribution over clients",
               baseline: str | None = None) -> Path:
    """Write `report.html` into the folder `out`, or to `out` itself where it ends in .html; returns its path.

    Methods are the distinct names among the runs, in their order; `baseline` names the one to compare with, by default the first.
    The page appears whole or not at all: it is written next to its place and renamed.
    """
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / NAME
    text = render(page_data(runs, baseline), title)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def render(data: dict[str, Any], title: str) -> str:
    """The page as text. What users named is escaped: by the template in the text, by `embedded` in the data."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        plotly = import_module("plotly.offline").get_plotlyjs()
    except ImportError as missing:
        raise ImportError(f"the page needs {missing.name}, which is not installed. Write pip install plotly jinja2.") from None

    rules = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return rules.from_string(_own(TEMPLATE)).render(
        title=title, data=data, embedded=Markup(embedded(data)), style=Markup(_own(STYLE)),
        plotly=Markup(plotly.replace("</script", r"<\/script")), scripts=Markup("\n".join(map(_own, SCRIPTS))))


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: no character in it can end the element."""
    text = json.dumps(plain(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _own(name: str) -> str:
    return (files("fedtail.report") / name).read_text(encoding="utf-8")
