"""The documentation works: every example of README and docs runs, as a reader would run it, links lead somewhere, the site builds.

A page's blocks run from top to bottom in one empty folder of its own: `python` here, one namespace for a page; `bash` in a shell that
stops at the first failure; `toml` whose first line is `# name.toml` is written to that file. `text`, `console` and other `toml` are
to read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fedtail

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SLOW = DOCS / "tutorial.md"                # first, then the shortest pages, so that others run beside it
PAGES = [SLOW, *sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - {SLOW}, key=lambda page: (page.stat().st_size, page))]
RUN, READ = {"python", "bash"}, {"text", "console", "toml", "json"}


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), flags=re.S | re.M)]


def file_name(block: Block) -> str | None:
    """The file that a block is, by its first line."""
    found = re.match(r"# (\S+\.toml)\n", block.text)
    return found[1] if found and block.language == "toml" else None


def called(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language in RUN for b in blocks(p))], ids=called)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch, capfd):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    for block in blocks(page):
        if name := file_name(block):
            Path(name).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, called(page), "exec", dont_inherit=True), names)
        elif block.language == "bash":
            run_in_shell(block.text)
    if page.name == "README.md":
        printed = capfd.readouterr().out
        assert "18 clients" in printed
        assert "each client's own pick" in printed


def run_in_shell(text: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = {**os.environ, "PATH": path, "HOME": os.getcwd(), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", f"set -euo pipefail\n{text}"], env=here, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_every_block_says_what_it_is(page):
    known = RUN | READ | ({""} if page.name == "README.md" else set())      # README shows what `make demo` prints
    for block in blocks(page):
        assert block.language in known, f"{called(page)}: ```{block.language}\n{block.text[:200]}"
    assert page.read_text().count("```") == 2 * len(blocks(page)), f"{called(page)}: a fence is indented or never closed"


def test_the_quickstart_is_at_most_fifteen_lines_of_python():
    quickstart = next(b.text for b in blocks(ROOT / "README.md") if b.language == "python")
    assert len([line for line in quickstart.splitlines() if line.strip()]) <= 15


def test_the_figures_about_where_it_does_not_help_are_those_of_its_script():
    printed = (ROOT / "experiments" / "where_it_does_not_help.txt").read_text()
    section = (ROOT / "README.md").read_text().split("<!-- --8<-- [start:where-not] -->")[1].split("<!--")[0]
    for text in (section, prose(DOCS / "ideas" / "where_it_does_not_help.md")):
        for figure in re.findall(r"\b\d+\.\d\d\b", text):
            assert figure in printed, figure


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for link in links(page):
            file, _, place = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), f"{called(page)}: {link}"
            if place and "api" not in target.parts:                          # anchors of API pages: the build checks them
                assert place in anchors(target), f"{called(page)}: {link}"


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def links(page: Path) -> list[str]:
    text = prose(page)
    found = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.M)]
    return [link for link in found if not link.startswith("https://")]


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_public_name_has_its_room_in_the_reference():
    shown = set(re.findall(r"^::: (\S+)", "\n".join(p.read_text() for p in (DOCS / "api").glob("*.md")), flags=re.M))
    assert {f"fedtail.{room}" for room in fedtail._ROOMS} <= shown


def test_the_site_builds_without_a_warning_names_everything_public_and_needs_nothing_from_elsewhere(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the site is built with the packages of the extra `docs`")
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
                           cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "site"
    inventory = (site / "objects.inv").read_bytes()
    listed = set(zlib.decompress(inventory.split(b"\n", 4)[4]).decode().split())
    for name, room in fedtail._ROOM_OF.items():
        assert listed & {f"fedtail.{room}.{name}", f"fedtail.{room}.{name}.{name}"}, f"{name} is not in the API reference"
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()[^;)]*//[^;)]*", sheet.read_text()), sheet.name
    assert (site / "search" / "search_index.js").is_file()                   # what the search reads from disk
