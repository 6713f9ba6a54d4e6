"""The examples in README and docs run, as a reader would run them: one page after the other, top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run(page, capsys):
    torch.manual_seed(0)
    names: dict = {"__name__": "example"}
    for block in blocks(page):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    if page.name == "README.md":
        printed = capsys.readouterr().out
        assert "18 clients" in printed
        assert "each client's own pick" in printed


def test_the_quickstart_is_at_most_fifteen_lines_of_python():
    lines = [line for line in blocks(ROOT / "README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
