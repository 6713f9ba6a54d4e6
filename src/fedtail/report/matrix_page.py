"""The page about a matrix: every combination, and what each protection costs the others, in one file without network."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fedtail.report.page import PALETTE, STYLE, script_safe_json
from fedtail.runs.files import write_atomically

PAGE = "matrix.html"
TEMPLATE, SCRIPT = "matrix_page.html.j2", "matrix_page.js"
TITLE = "What each protection costs the others"
SHOWN = (("mean", "mean"), ("worst10", "worst 10%"), ("std", "spread"))


def write_matrix_page(result: dict[str, Any], out: Path, title: str = TITLE) -> Path:
    """Write the page about a matrix to the file `out`, atomically, and return its path.

    `result` is the content of `matrix.json`; `title` is the page's heading. Raises ImportError, with what to install, where
    jinja2 is missing.
    """
    write_atomically(out, render_matrix_page(result, title))
    return out


def render_matrix_page(result: dict[str, Any], title: str = TITLE) -> str:
    """The page about a matrix as HTML text called `title`, with styles, script and data embedded; it needs no network.

    `result` is the content of `matrix.json`. Names from the file and texts of refusals are escaped. Raises ImportError, with what
    to install, where jinja2 is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as missing:
        raise ImportError(f"the page needs {missing.name}, which is not installed. Write pip install jinja2.") from None

    rules = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style, script, template = ((files("fedtail.report") / name).read_text(encoding="utf-8") for name in (STYLE, SCRIPT, TEMPLATE))
    models = [model for model in ("shared", "personal") if any(cell[model] for cell in result["cells"])]
    return rules.from_string(template).render(
        title=title, data=result, models=models, statistics=SHOWN, facts=matrix_facts(result), style=Markup(style),
        private=any(cell["epsilon"] is not None for cell in result["cells"]), script=Markup(script),
        embedded=Markup(script_safe_json({"axes": result["axes"], "cells": result["cells"], "colours": PALETTE})))


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
            "rounds": str(result["rounds"]), "seeds": ", ".join(map(str, result["seeds"]))}
