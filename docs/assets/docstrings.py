"""Docstrings as the API pages show them: examples as code, short names of papers as links to the references."""

import re

from griffe import Docstring, Extension, Object

PAPERS = "PLMH23|PLMH22q|PLMH22|LPMH21|Li23"


def as_markdown(text: str) -> str:
    """Fence every run of `>>>` lines with what it prints; link `[PLMH23, eq. (7)]` to the paper's entry."""
    lines, inside = [], False
    for line in text.splitlines():
        starts = line.startswith(">>> ")
        if starts and not inside:
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        if not inside:
            line = re.sub(rf"\[(({PAPERS})\b[^\[\]]*)\]", lambda m: f"\\[[{m[1]}][{m[2].lower()}]\\]", line)
        lines.append(line)
    return "\n".join([*lines, *(["```"] if inside else [])])


class Docstrings(Extension):
    """Rewrites each docstring once, when it is collected."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = as_markdown(obj.docstring.value)
