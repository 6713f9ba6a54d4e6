"""The documentation works: every example of README and docs runs, as a reader would run it, links lead somewhere, the site builds.

A page's blocks run from top to bottom in one empty folder of its own: `python` here, one namespace for a page; `bash` in a shell that
stops at the first failure; `toml` whose first line is `# name.toml` is written to that file. Blocks that begin with `# on the server` or
`# on each node` are run in the folder of that machine (typed_pages.py). `text`, `console` and other `toml` are to read. A `python` block
that begins with the import of a package of the extra `loops` is left out where that is not installed.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import pytest
import torch

import fedtail
from fedtail_studies import Results
from fedtail_studies.questions import private_cost, settings, where_not
from fedtail_studies.questions.private_cost import PRIVATE_COST
from fedtail_studies.questions.where_not import WHERE_NOT
from fedtail_studies.tables import spread_text

from typed_pages import Block, Machines, blocks, file_name, shell_environment

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
DOCS = ROOT / "docs"
SLOW = DOCS / "tutorial.md"                # first, then the shortest pages, so that others run beside it
PAGES = [SLOW, *sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - {SLOW}, key=lambda page: (page.stat().st_size, page))]
RUN, READ = {"python", "bash"}, {"text", "console", "toml", "json"}


def loop_package(block: Block) -> str | None:
    """The package of the extra `loops` that a block begins to import."""
    found = re.match(r"(?:import|from) (lightning|transformers)\b", block.text)
    return found[1] if found else None


def called(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language in RUN for b in blocks(p))], ids=called)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch, capfd):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    with several_machines(page, tmp_path) as machines:
        run_blocks(page, names, machines)
    if page.name == "README.md":
        printed = capfd.readouterr().out
        assert "18 clients" in printed
        assert "each client's own pick" in printed


def several_machines(page, path):
    """The machines of a page of several, all of them here."""
    here = any(block.place for block in blocks(page))
    return Machines(path / "machines", path, host="127.0.0.1", port=free_port()) if here else nullcontext()


def run_blocks(page, names, machines):
    for block in blocks(page):
        if name := file_name(block):
            Path(name).write_text(block.text)
        elif block.place:
            machines.type(block)
            if block.waits:
                machines.end_all()                # nodes that look for their server in vain for the rest of the page only take time
        elif block.language == "python" and (package := loop_package(block)):
            if importlib.util.find_spec(package):
                with warnings.catch_warnings(action="ignore"):      # their advice on loggers and processes
                    exec(compile(block.text, called(page), "exec", dont_inherit=True), names)
        elif block.language == "python":
            exec(compile(block.text, called(page), "exec", dont_inherit=True), names)
        elif block.language == "bash":
            run_in_shell(block.text)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_in_shell(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"set -euo pipefail\n{text}"], env=shell_environment(Path.cwd()), capture_output=True, text=True,
                          check=False, timeout=300)
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


WHERE, PRIVATE = DOCS / "ideas" / "where_it_does_not_help.md", DOCS / "howto" / "private-training.md"


@pytest.mark.parametrize(("page", "study", "shown"), [(WHERE, WHERE_NOT, 4), (PRIVATE, PRIVATE_COST, 2)], ids=["where_not", "private_cost"])
def test_tables_of_figures_are_those_of_a_study(page, study, shown):
    made = [table.markdown(True) for table in study.tables(Results.read(EXPERIMENTS / study.name))]
    tables = [found.strip() for found in re.findall(r"(?:^\|.*\n)+", page.read_text(), flags=re.M) if "90th percentile" in found]
    assert tables == made[:shown]


def test_what_is_said_of_where_it_does_not_help_is_what_its_study_found():
    found = Results.read(EXPERIMENTS / "where_not")

    def at(name: str, theta: float, *statistics: str) -> list[str]:
        return [f"{mean(where_not.values(found, name, theta, s)):.2f}" for s in statistics]

    def less(name: str, theta: float, statistic: str) -> str:
        return f"{abs(mean(where_not.gaps(found, name, theta, statistic))):.2f}"

    every = ("mean", "p90", "worst10")
    fedavg, quarter = at("demo", 1.0, *every), at("demo", 0.25, *every)
    clean, wrong = (at("a tenth mislabelled", theta, "mean", "worst10") for theta in (1.0, 0.1))
    readme, page = flat(ROOT / "README.md"), flat(WHERE)
    assert f"mean error is {float(wrong[0]):.0f}% at theta = 0.1, {float(clean[0]):.0f}% for FedAvg" in readme
    assert "{}, {} and {} for FedAvg, {}, {} and {} at theta = 0.25".format(*fedavg, *quarter) in readme
    assert f"the 90th percentile falls from {fedavg[1]} to {quarter[1]} and the mean of the worst tenth from {fedavg[2]} to {quarter[2]}" in page
    assert f"the mean error rises from {fedavg[0]} to {quarter[0]}. At θ = 0.1 the mean rises to {at('demo', 0.1, 'mean')[0]};" in page
    assert f"by {less('clients alike', 0.5, 'mean')} to {less('clients alike', 0.1, 'mean')} points" in page
    assert f"rises by {less('a tenth mislabelled', 0.25, 'mean')} points at θ = 0.25" in page
    assert f"the mean error goes from {clean[0]} to {wrong[0]} and the worst tenth from {clean[1]} to {wrong[1]}" in page
    assert f"shrinks from {less('demo', 0.25, 'p90')} to {less('few a round', 0.25, 'p90')} points" in page
    assert f"the mean rises by {less('few a round', 0.25, 'mean')}." in page


def test_the_demo_is_the_first_seed_of_its_study():
    found = Results.read(EXPERIMENTS / "where_not").numbers("demo", 0)
    readme = flat(ROOT / "README.md")
    for name, theta in (("FedAvg", 1.0), ("Delta-FL, worst 50% of clients", 0.5), ("Delta-FL, worst 25% of clients", 0.25)):
        assert "│ {} │ {mean:.2f} │ {p90:.2f} │ {worst10:.2f} │".format(name, **found[settings.key(theta)]) in readme


def test_what_is_said_of_the_cost_of_privacy_is_what_its_study_found():
    found = Results.read(EXPERIMENTS / "private_cost")

    def both(name: str) -> str:
        return "{:.1f}% and {:.1f}%".format(*(mean(found.values(name, f"test.{s}")) for s in ("mean", "p90")))

    def gap(one: str, other: str, statistic: str) -> str:
        return spread_text(private_cost.gaps(found, one, other, statistic), 1)

    page = flat(PRIVATE)
    assert (f"Delta-FL {both('Delta-FL')} without noise, {both('DP-Delta-FL')} at ε = 5; "
            f"FedAvg {both('FedAvg')} without, {both('DP-FedAvg')} with.") in flat(ROOT / "README.md")
    assert f"{gap('DP-FedAvg', 'FedAvg', 'p90')} points for FedAvg and {gap('DP-Delta-FL', 'Delta-FL', 'p90')} for Delta-FL" in page
    assert (f"over FedAvg is {gap('FedAvg', 'Delta-FL', 'p90')} without noise and {gap('DP-FedAvg', 'DP-Delta-FL', 'p90')} with it. In the worst "
            f"10% the gain is {gap('FedAvg', 'Delta-FL', 'worst10')} and {gap('DP-FedAvg', 'DP-Delta-FL', 'worst10')}:") in page
    assert (f"the 90th percentile is {gap('DP-Delta-FL with C = 0.05', 'DP-Delta-FL', 'p90')} points higher than at 0.1, at 1 the mean is "
            f"{gap('DP-Delta-FL with C = 1', 'DP-Delta-FL', 'mean')} points higher") in page


@pytest.mark.parametrize(("page", "figures"), [(WHERE, r"\b\d+\.\d\d\b"), (PRIVATE, r"\b\d+\.\d+ ± \d+\.\d+\b")], ids=["where_not", "private_cost"])
def test_no_figure_of_a_page_comes_from_elsewhere(page, figures):
    held = (EXPERIMENTS / {WHERE: "where_not", PRIVATE: "private_cost"}[page] / "README.md").read_text()
    for figure in re.findall(figures, prose(page)):
        assert figure in held, figure


def test_figures_and_studies_of_the_page_of_decisions_are_committed():
    page = (DOCS / "howto" / "which-method.md").read_text()
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    held = "".join((EXPERIMENTS / name / "README.md").read_text() for name in ("where_not", "corrupted_tails"))
    figures = re.findall(r"(?<!θ = )\b\d+\.\d\d\b(?! \|$)", text)
    assert len(figures) > 10
    for figure in figures:
        assert figure in held, figure
    studies = set(re.findall(r"`((?:where_not|table2|[a-z]+_[a-z_0-9]+|interpolation))`", text)) - {"delta_fl", "q_ffl", "dp_ftrl", "dp_delta_fl"}
    assert "corrupted_tails" in studies
    assert {name for name in studies if not (EXPERIMENTS / name / "results.json").is_file()} == set()


def flat(page: Path) -> str:
    return " ".join(page.read_text().split())


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
    packages = {path.parent.name for path in Path(fedtail.__file__).parent.glob("*/__init__.py")} - {"cli"}
    assert {f"fedtail.{room}" for room in {*packages, *fedtail._HOME, "errors", "losses"}} <= shown


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
