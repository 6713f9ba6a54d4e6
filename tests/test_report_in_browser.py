"""The page about runs, in a browser: what the slider moves, and that what is shown is what is in the files."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import approx

from browser import Visit, chromium
from fedtail.experiment import read_experiments
from fedtail.report import page_data, write_page
from fedtail.runs import RunFolder
from fedtail.runs import run as run_experiment
from run_folders import THETAS, trained_family, write_folder, write_run

from run_cases import Onlooker, experiment

NASTY = "</script><b onclick=\"x\">&amp; ${x} %{y} 'q'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    return trained_family(tmp_path_factory)


@pytest.fixture(scope="module")
def family_page(family: list[RunFolder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(family, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def visit(browser: Any, family_page: Path) -> Iterator[Visit]:
    """The page of the family, opened once: drawing it takes a while. Tests say where they start."""
    with Visit(browser, family_page) as opened:
        yield opened


def move(visit: Visit, theta: float) -> None:
    visit.page.fill("#slider-0", str(sorted(THETAS).index(theta)))
    visit.wait()


def numbers_of(family: list[RunFolder], theta: float) -> dict[str, float]:
    """Means over seeds, of numpy over the table of clients and of the run's own last line."""
    member = THETAS.index(theta)
    errors = [run.client_columns("test", member)["error"] for run in family]
    worst = [run.metrics[-1]["members"][member]["test"]["error"]["worst10"] for run in family]
    return {"mean": np.mean([e.mean() for e in errors]), "p90": np.mean([np.percentile(e, 90) for e in errors]), "worst10": np.mean(worst)}


def check_numbers(visit: Visit, family: list[RunFolder], theta: float) -> None:
    """Label, read-out, highlighted row and slider all speak of this model."""
    expected, decimals = numbers_of(family, theta), page_data(family)["decimals"]["values"]
    assert visit.text("#focus-label") == f"θ = {theta:g}"
    assert visit.page.get_attribute("#slider-0", "aria-valuetext") == f"θ = {theta:g}"
    for place, (name, value) in enumerate(expected.items()):
        assert visit.page.get_attribute(f"#focus-{place}", "data-statistic") == name
        assert visit.value(f"#focus-{place}") == approx(value, abs=1e-12)
        assert visit.text(f"#focus-{place}") == f"{100 * value:.{decimals[name]}f}%"
        assert visit.value(f"#table tr.focus [data-statistic={name}]") == approx(value, abs=1e-12)
        assert visit.text(f"#table tr.focus [data-statistic={name}]").startswith(f"{100 * value:.{decimals[name]}f}")
    assert visit.page.locator("#table tr.focus").count() == 1
    picked = sum(run.client_columns("test", THETAS.index(theta))["picks"].sum() for run in family)
    assert visit.value("#focus-picked") == picked


def test_the_slider_moves_with_the_keyboard(visit, family):
    move(visit, 0.5)
    seen = {0.5: visit.plots()}
    visit.page.focus("#slider-0")
    for key, theta in (("ArrowLeft", 0.2), ("End", 1.0), ("ArrowLeft", 0.5), ("Home", 0.2)):
        visit.page.keyboard.press(key)
        visit.wait()
        check_numbers(visit, family, theta)
        seen.setdefault(theta, visit.plots())
        assert visit.plots() == seen[theta]                  # and back again
    assert len(seen[0.5]) == 18
    for plot, shown in seen[0.5].items():
        assert len({shown, seen[0.2][plot], seen[1.0][plot]}) == 3, f"{plot} does not follow the slider"
    assert visit.problems == []


def test_the_slider_moves_when_its_value_is_set(visit, family):
    for theta in THETAS:
        move(visit, theta)
        check_numbers(visit, family, theta)
    visit.page.click("#table tr[data-method='1']")           # rows choose, too
    visit.wait()
    check_numbers(visit, family, THETAS[1])


def test_plots_show_the_numbers_of_the_files(visit, family):
    member, data = THETAS.index(0.2), page_data(family)
    tables = [{k: run.client_columns("test", k) for k in (0, member)} for run in family]
    before, after = (100 * np.mean([t[k]["error"] for t in tables], axis=0) for k in (0, member))
    move(visit, 0.2)
    pairs = visit.traces("pairs")[0]
    assert pairs["x"] == approx(before, abs=1e-2)
    assert pairs["y"] == approx(after, abs=1e-2)
    size = [trace for trace in visit.traces("size") if trace["mode"] == "markers"][-1]
    assert size["x"] == tables[0][0]["size"].tolist()
    assert size["y"] == approx(after, abs=1e-2)
    assert sorted(visit.traces("sorted")[0]["y"]) == approx(np.sort(after - before), abs=1e-2)
    tally = [int(visit.text(f"#{name}")) for name in ("improved", "same", "worse")]
    assert tally == [data["clients"]["changes"][member][name] for name in ("improved", "same", "worse")]


@pytest.mark.parametrize("split", ["train", "test"])
def test_curves_follow_the_choice_of_clients(visit, family, split):
    move(visit, 0.2)
    visit.page.select_option("#split", split)
    visit.wait()
    for metric, scale in (("loss", 1), ("error", 100)):
        lines = [[line["members"][THETAS.index(0.2)][split][metric]["p50"] for line in run.metrics] for run in family]
        drawn = [trace["y"] for trace in visit.traces(f"{metric}-rounds")]
        assert any(y == approx(scale * np.mean(lines, axis=0), rel=1e-4) for y in drawn)
        lowest = min(value for trace in visit.traces(f"{metric}-rounds") for value in trace["y"] if value is not None)
        bottom, top = visit.page.evaluate("id => document.getElementById(id).layout.yaxis.range", f"{metric}-rounds")
        assert lowest - bottom < 0.1 * (top - bottom)        # an axis from zero would hide the differences


def test_the_composition_of_the_tail_by_group(visit):
    move(visit, 0.5)
    visit.page.select_option("#kind", "group")
    visit.wait()
    assert [trace["name"] for trace in visit.traces("composition")] == ["group 0", "group 1", "group 2"]
    visit.page.select_option("#kind", "size")
    visit.wait()
    assert all("examples" in trace["name"] for trace in visit.traces("composition"))


def test_clients_are_sorted_and_found(visit, family):
    clients = page_data(family)["clients"]
    differences, sizes = (dict(zip(clients["names"], c, strict=True)) for c in (clients["differences"][1], clients["sizes"]))
    names = "() => [...document.querySelectorAll('#client-table tbody tr')].map(row => row.cells[0].textContent)"
    move(visit, 0.5)
    shown = [abs(differences[name]) for name in visit.page.evaluate(names)]
    assert shown == sorted(map(abs, differences.values()), reverse=True)[:15]
    visit.page.click("#client-table th[data-key=size] button")
    assert [sizes[name] for name in visit.page.evaluate(names)] == sorted(sizes.values(), reverse=True)[:15]
    assert visit.page.get_attribute("#client-table th[data-key=size]", "aria-sort") == "descending"
    visit.page.click("#client-table th[data-key=name] button")
    visit.page.click("#more")
    assert visit.page.evaluate(names) == sorted(clients["names"])
    visit.page.fill("#search", clients["names"][3].upper())
    assert visit.page.evaluate(names) == [clients["names"][3]]
    assert visit.text("#found") == "1 client"


def test_nothing_is_asked_of_the_network(visit, family_page):
    visit.page.hover("#pairs")
    assert [url for url in visit.requests if not url.startswith("data:")] == [family_page.as_uri()]
    assert visit.problems == []


def test_a_phone_shows_it_without_scrolling_sideways(browser, family_page):
    with Visit(browser, family_page, 400, "dark") as visit:
        assert visit.text("#focus-label") == "θ = 0.5"       # opens in the middle
        assert visit.overflow() <= 0
        visit.page.set_viewport_size({"width": 320, "height": 600})
        visit.page.wait_for_function("document.querySelector('#histogram .main-svg').clientWidth <= 320")
        assert visit.overflow() <= 0
        assert visit.problems == []


def test_every_legend_names_the_methods_in_the_order_of_the_page(browser, tmp_path):
    names = ["FedAvg", "beta", "alpha"]
    runs = [write_run(tmp_path / name, name, [theta], 0, settings=["rounds=4"]) for name, theta in zip(names, (1.0, 0.5, 0.3), strict=True)]
    with Visit(browser, write_page(runs, tmp_path)) as visit:
        drawn = visit.page.evaluate("""() => [...document.querySelectorAll(".canvas .legend")].map(legend => [...legend.querySelectorAll(".traces")]
            .map(one => ({ name: one.textContent, ...one.getBoundingClientRect().toJSON() }))
            .sort((a, b) => Math.abs(a.top - b.top) > 4 ? a.top - b.top : a.left - b.left).map(one => one.name))""")
    legends = [[name for name in legend if name in names] for legend in drawn]
    assert sum(len(legend) == 3 for legend in legends) >= 4
    assert [legend for legend in legends if legend != sorted(legend, key=names.index)] == []


def test_every_table_is_handed_out_as_csv_in_full_and_settings_make_the_runs_again(browser, family, family_page, tmp_path):
    with Visit(browser, family_page) as visit:
        assert visit.page.locator(".csv").count() == visit.page.locator(".scroll").count() >= 2
        with visit.page.expect_download() as saved:
            visit.page.locator(".bar:has(+ .scroll #table) .csv").click()
        head, *rows = csv.reader(Path(saved.value.path()).read_text().splitlines())
        column, first = head.index("90th percentile"), THETAS[0]
        assert float(rows[0][column]) == approx(numbers_of(family, first)["p90"], rel=1e-12)
        assert [row[0].split(" ")[0] for row in rows] == ["θ"] * len(THETAS) + ["constant"]
        assert head[0] == "error"
        with visit.page.expect_download() as saved:
            visit.page.locator(".bar:has(+ .scroll #client-table) .csv").click()
        found = list(csv.reader(Path(saved.value.path()).read_text().splitlines()))[1:]
        assert len(found) == len(page_data(family)["clients"]["names"]) > visit.page.locator("#client-table tbody tr").count()
        settings = visit.page.locator(".settings pre").first.text_content()
    (tmp_path / "again.toml").write_text(settings.replace("draft-family", "runs-family"))      # `once` has moved the data
    again = read_experiments(tmp_path / "again.toml", [], [])[0]
    assert again.name == family[0].name
    assert sorted(again.seeds) == sorted(run.seed for run in family)


def test_a_hint_says_that_a_table_goes_on_sideways_and_goes_where_it_ends(browser, family_page):
    with Visit(browser, family_page, width=390) as visit:
        hint = visit.page.locator(".bar:has(+ .scroll #table) .hint")
        assert hint.is_visible()
        visit.page.eval_on_selector(".scroll:has(#table)", "frame => { frame.scrollLeft = frame.scrollWidth; }")
        hint.wait_for(state="hidden", timeout=5000)


def test_personal_models_are_a_method_of_their_own_and_participation_is_shown(browser, tmp_path):
    run = run_experiment(experiment("ditto"), 3, tmp_path / "run", Onlooker())
    with Visit(browser, write_page([run], tmp_path), 400) as visit:
        for k, column in enumerate(("error", "personal_error")):
            visit.page.click(f".chip[data-method='{k}']")
            visit.wait()
            assert visit.text("#focus-label") == ("ditto, shared", "ditto, personal")[k]
            assert visit.value("#focus-0") == approx(run.client_columns("test")[column].mean())
        [trace] = visit.traces("took-part")                  # of the method in focus
        counts = run.client_columns("train")["asked"].astype(int)
        assert trace["x"][1:-1] == approx(np.arange(counts.max() + 1))
        assert trace["y"][1:-1] == approx(100 * np.bincount(counts) / len(counts), abs=0.01)
        assert "Every sampled client trains its personal model" in visit.plots()["often"]
        assert "Personal models need about 50: these say little yet." in visit.text("header")
        some = counts[counts > 0]
        assert f"ditto: {np.median(some):g} rounds in the median, {some.min()} to {some.max()}" in visit.text(".took-part")
        assert visit.overflow() <= 0
        assert visit.problems == []


def test_light_dark_and_paper(browser, tmp_path):
    page = write_page([write_folder(tmp_path / name, [0.1, 0.2, 0.4], name=name) for name in "ab"], tmp_path)
    ink = "document.getElementById('histogram').layout.font.color"
    with Visit(browser, page) as visit:
        light = visit.page.evaluate(ink)
        visit.page.emulate_media(color_scheme="dark")
        visit.page.wait_for_function(f"{ink} !== '{light}'")
        visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert visit.page.evaluate(ink) == light
        assert visit.page.evaluate("Math.max(...[...document.querySelectorAll('.canvas')].map(c => c.clientWidth))") <= 700
        visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert visit.page.evaluate(ink) != light
        assert visit.problems == []


def test_names_are_shown_as_they_are(browser, tmp_path):
    long = "a-very-long-name-" * 20
    runs = [write_folder(tmp_path / str(k), [0.1 + k / 10, 0.2], [3, 40], name=name, names=[NASTY, long]) for k, name in enumerate((NASTY, long))]
    with Visit(browser, write_page(runs, tmp_path, title=NASTY), 400) as visit:
        assert visit.page.title() == visit.text("h1") == NASTY
        assert visit.page.locator("b[onclick]").count() == 0
        assert visit.page.locator("#client-table tbody td", has_text="</script>").inner_text() == NASTY
        assert "</script><b" in visit.page.evaluate("document.getElementById('histogram').textContent")
        assert visit.overflow() <= 0
        visit.page.click(".chip[data-method='0']")
        visit.wait()
        assert visit.text("#focus-label") == NASTY
        assert visit.problems == []


def cases(kind: str, family: list[RunFolder], place: Path) -> list[RunFolder]:
    """Folders with little in them."""
    if kind == "unfinished":
        return [write_run(place / "run", "tail", [0.4], 0, stop=3)]
    if kind == "one client":
        return [write_folder(place / "run", [0.25])]
    if kind == "regression":
        return [write_folder(place / str(k), [0.5 + k, 12.25, 3.0], rates=False, name=str(k)) for k in range(2)]
    shutil.copytree(family[0].path, place / "run")
    (place / "run" / "rounds.jsonl").unlink()
    return [RunFolder.open(place / "run")]


@pytest.mark.parametrize("kind", ["unfinished", "one client", "regression", "no rounds"])
def test_folders_with_little_in_them(browser, family, tmp_path, kind):
    runs = cases(kind, family, tmp_path)
    with Visit(browser, write_page(runs, tmp_path), 400) as visit:
        assert visit.problems == []
        assert visit.overflow() <= 0
        assert visit.page.locator("#table tr[data-method]").count() == len(page_data(runs)["methods"])
        if kind == "regression":
            assert visit.text("#focus-0") == "5.6"            # known to 3 from these three clients


def test_the_metric_in_focus_is_switched_and_its_bad_end_with_it(browser, tmp_path):
    runs = [write_run(tmp_path / name, name, [theta], 0, settings=['task.metrics=["balanced_accuracy"]', "rounds=4"])
            for name, theta in (("FedAvg", 1.0), ("tail", 0.4))]
    values = [run.client_columns("test")["balanced_accuracy"] for run in runs]
    with Visit(browser, write_page(runs, tmp_path), 400) as visit:
        before = visit.plots()
        assert visit.text("#methods h2") == "How the error is spread over clients"
        assert "further left" in visit.text("#distribution")
        assert "“Alike” is the noise floor" in visit.text("#methods")
        visit.page.select_option("#metric", "balanced_accuracy")
        visit.wait()
        assert visit.text("#methods h2") == "How the balanced_accuracy is spread over clients"
        assert "10th percentile: further right" in visit.text("#distribution")
        assert "Alike" not in visit.text("#methods")         # such a metric has no floor
        assert "further left" not in visit.text("#distribution")
        assert visit.page.locator(".of-metric:visible table.methods").count() == 1
        for k, values_of_one in enumerate(values):
            cell = f".of-metric:visible tr[data-method='{k}'] [data-statistic=p10]"
            assert visit.value(cell) == approx(np.percentile(values_of_one, 10), abs=1e-12)
        assert visit.page.get_attribute("#focus-1", "data-statistic") == "p10"
        assert visit.page.evaluate("document.getElementById('ecdf').layout.shapes[0].y0") == 10
        pairs = visit.traces("pairs")[0]
        assert pairs["y"] == approx(values[1], abs=1e-4)
        blue = visit.page.evaluate("css('--better')")
        gained = [colour == blue for colour in pairs["marker"]["color"]]
        assert gained == [after > before + 1e-9 for before, after in zip(pairs["x"], pairs["y"], strict=True)]
        changed = [name for name in ("histogram", "ecdf", "size", "sorted", "pairs", "error-rounds") if visit.plots()[name] == before[name]]
        assert changed == []
        visit.page.select_option("#metric", "error")
        visit.wait()
        assert visit.plots() == before                       # and back again
        assert visit.overflow() <= 0
        assert visit.problems == []


def test_the_answer_is_first_and_follows_the_metric(browser, family_page):
    for width in (1100, 390):
        with Visit(browser, family_page, width) as opened:
            assert opened.overflow() <= 0
            assert opened.page.evaluate("document.querySelector('#answer').offsetTop < document.querySelector('.facts').offsetTop")
            assert opened.page.locator("#answer .of-metric:visible .verdict").count() == len(THETAS) - 1
            errors = opened.text("#answer")
            opened.page.select_option("#metric", "loss")
            opened.wait()
            assert "points of error" in errors
            assert "of loss" in opened.text("#answer")
            assert "points of error" not in opened.text("#answer")
            assert opened.problems == []
