"""Studies of the papers: cells that are run once, verdicts that follow from numbers, pages that follow from results."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.data import label_shift
from fedtail.runs.files import RunRefused
from fedtail_studies import (
    Cell,
    Claim,
    Cost,
    Data,
    Finding,
    Needs,
    Printed,
    Results,
    Row,
    Stopped,
    Study,
    Table,
    Verdict,
    all_of,
    at_most,
    lower,
    not_above,
    reproduce,
    within,
)
from fedtail_studies.catalogue import STUDIES, study_called
from fedtail_studies.compared import protocol
from fedtail_studies.emnist.writers import read_femnist, writers
from fedtail_studies.judging import Difference, difference, interval
from fedtail_studies.overview import overview
from fedtail_studies.page import PAGE, judged, page
from fedtail_studies.questions import where_not
from fedtail_studies.results import FILE, compact, rounded
from fedtail_studies.running import Silent

from generated_data import generated_writers

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
COMMITTED = [study for study in STUDIES if (EXPERIMENTS / study.name / PAGE).exists() and (EXPERIMENTS / study.name / FILE).exists()]
SMALL = {"seeds": 1, "rounds": 3, "train_clients": 20, "pool": 8000}
TINY = {
    "table2": {"seeds": 1, "visits": 0.5, "cohort": 4}, "interpolation": SMALL, "family": SMALL, "flipped_labels": SMALL,
    "where_not": SMALL, "corrupted_tails": SMALL, "private_cost": SMALL,
    "family_femnist": {"seeds": 1, "visits": 0.3}, "flipped_labels_femnist": {"seeds": 1, "visits": 0.3},
    "bias": {"seeds": 1, "clients": 400, "cohorts": (10, 20, 50), "draws": 10},
    "theorem4": {"seeds": 1, "horizons": (2, 4), "local_steps": (1,), "looked_at": 2},
    "theorem5": {"seeds": 1, "horizons": (50, 60), "local_steps": (1,)}, "gaussians": {"seeds": 1, "examples": 20, "rounds": 5},
}


# every study, small; every committed page


@pytest.mark.parametrize("name", TINY)
def test_every_study_runs_small_and_writes_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "PERSONAL_EPOCHS", 1)
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second process
    study = study_called(name)
    plan = replace(study.quick, **TINY[name])
    results = reproduce(study, plan, tmp_path, generated_writers(8, labels=5) if study.data else None, quick=True)
    text = (tmp_path / PAGE).read_text()
    saved = json.loads((tmp_path / FILE).read_text())
    assert results.seeds == (0,)
    assert [claim["verdict"] in set(Verdict) for claim in saved["claims"]] == [True] * len(study.claims)
    assert "quick version" in text
    assert all(figure in {path.name for path in tmp_path.glob("*.png")} for figure in _figures(text))
    if study.data:
        assert "These are not the paper's data" in text
        assert not any(claim["verdict"] == "agrees" for claim in saved["claims"])


def _figures(text: str) -> list[str]:
    return [line.rpartition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]


@pytest.mark.parametrize("study", COMMITTED, ids=lambda study: study.name)
def test_committed_results_support_the_committed_page(study):
    folder = EXPERIMENTS / study.name
    found = Results.read(folder)
    complete = found.complete(study, study.full, len(found.seeds))
    assert complete.same_kind(replace(Results.begin(study, study.full, False, None), data=found.data))      # of today's plan
    assert json.loads((folder / FILE).read_text())["claims"] == judged(study, complete)
    text = (folder / PAGE).read_text()
    for part in page(study, complete, []).split("\n## "):
        assert part.strip() in text
    assert all((folder / figure).exists() for figure in _figures(text))
    assert str(EXPERIMENTS.parent) not in text + (folder / FILE).read_text()      # no paths of the machine it was made on


def test_the_overview_of_committed_verdicts_is_what_the_command_prints():
    text = overview(STUDIES, EXPERIMENTS)
    assert (EXPERIMENTS / PAGE).read_text() == text
    assert all(f"[{study.name}]" in text for study in COMMITTED)


def test_an_overview_of_nothing_says_what_to_write(tmp_path):
    with pytest.raises(FileNotFoundError, match="verdicts --out reproduced"):
        overview(STUDIES, tmp_path)


def test_names_are_unique_and_every_claim_has_a_source():
    assert len({study.name for study in STUDIES}) == len(STUDIES)
    assert all(claim.source.startswith("[") for study in STUDIES for claim in study.claims)
    assert all(study.claims and study.full.seeds >= study.quick.seeds for study in STUDIES)


# a toy study


@dataclass(frozen=True)
class Plan:
    seeds: int = 3
    shift: float = 1.0


MEASURED: list[tuple[int, str]] = []


def measure(cell: Cell, gain: float) -> dict:
    MEASURED.append((cell.seed, cell.name))
    for _ in cell.steps(2):
        pass
    before = cell.numbers("base")["test"]["p90"] if cell.name != "base" else 10.0 + cell.seed
    return {"test": {"p90": before - gain * cell.plan.shift + 0.01 * cell.seed}}


def cells(plan: Plan, seed: int) -> dict:
    return {"base": partial(measure, gain=0.0), "tail": partial(measure, gain=1.0)}


def tables(results: Results) -> list[Table]:
    return [Table("Toy", ("p90",), (Row("tail", {"p90": results.values("tail", "test.p90")}, {"p90": Printed(9.0, 0.5)}),), "[X, table 1]")]


TOY = Study(name="toy", paper="X", item="table 1", title="Toy", cost=Cost(2, 0.1), full=Plan(), quick=Plan(seeds=2), cells=cells, tables=tables,
            claims=(Claim("The tail falls.", "[X]", lambda r: lower(r.difference("tail", "base", "test.p90"), r.papers_data)),))
NEEDY = replace(TOY, name="needy", data=Needs("toys", lambda place: Data("toys, 3", None, papers=False), "Write --data DIR."))


@pytest.fixture(autouse=True)
def _nothing_measured():
    MEASURED.clear()


class StopsAfter(Silent):
    """Asks to stop after so many steps."""

    def __init__(self, steps: int):
        self.left, self.stop = steps, False

    def round(self, round: int) -> None:
        self.left -= 1
        self.stop = self.left <= 0


def test_a_finished_cell_is_not_run_again_and_seeds_can_be_added(tmp_path):
    reproduce(TOY, Plan(seeds=2), tmp_path)
    assert MEASURED == [(0, "base"), (0, "tail"), (1, "base"), (1, "tail")]
    again = (tmp_path / FILE).read_text(), (tmp_path / PAGE).read_text()
    reproduce(TOY, Plan(seeds=2), tmp_path)
    assert len(MEASURED) == 4
    assert again == ((tmp_path / FILE).read_text(), (tmp_path / PAGE).read_text())
    assert reproduce(TOY, Plan(seeds=3), tmp_path).seeds == (0, 1, 2)
    assert MEASURED[4:] == [(2, "base"), (2, "tail")]


def test_who_is_interrupted_goes_on_and_ends_the_same(tmp_path):
    reproduce(TOY, Plan(), tmp_path / "whole")
    MEASURED.clear()
    with pytest.raises(Stopped):
        reproduce(TOY, Plan(), tmp_path / "cut", watch=StopsAfter(5))
    assert MEASURED == [(0, "base"), (0, "tail"), (1, "base")]
    assert not (tmp_path / "cut" / PAGE).exists()
    reproduce(TOY, Plan(), tmp_path / "cut")
    assert MEASURED[3:] == [(1, "base"), (1, "tail"), (2, "base"), (2, "tail")]
    whole, cut = (json.loads((tmp_path / name / FILE).read_text()) for name in ("whole", "cut"))
    for seed in whole["cells"]:
        assert {n: c["numbers"] for n, c in whole["cells"][seed].items()} == {n: c["numbers"] for n, c in cut["cells"][seed].items()}
    assert whole["claims"] == cut["claims"]


def test_the_page_describes_the_data_as_they_were_last_read(tmp_path):
    for about in ("They are old.", "They are new."):
        reproduce(TOY, Plan(), tmp_path, Data("toys, 3", None, papers=False, about=about))
    assert "They are new." in (tmp_path / PAGE).read_text()
    assert Results.read(tmp_path).data["about"] == "They are new."


def test_results_of_another_plan_are_not_mixed_in(tmp_path):
    reproduce(TOY, Plan(), tmp_path)
    with pytest.raises(RunRefused, match=r"holds results of toy with other settings or data\. Choose another folder with --out\."):
        reproduce(TOY, Plan(shift=2.0), tmp_path)


def test_the_page_says_what_was_found(tmp_path):
    reproduce(TOY, Plan(), tmp_path, command="fedtail reproduce toy --seeds 3")
    text = (tmp_path / PAGE).read_text()
    assert "| The tail falls. [X] | **agrees** | difference -0.99 (95%: -1.01 to -0.965, 3 seeds) |" in text
    assert "| tail | 10.02 ± 1.02 | 9.00 ± 0.50 | +2.0 |" in text
    assert "    fedtail reproduce toy --seeds 3" in text


def test_the_page_of_a_question_of_ours_names_no_paper(tmp_path):
    ours = replace(TOY, paper="", item="what toys do")
    reproduce(ours, Plan(), tmp_path)
    text = (tmp_path / PAGE).read_text()
    assert "A question of ours: what toys do; 3 seeds" in text
    assert "references.md" not in text
    assert ours.source == "[ours, what toys do]"


def test_other_data_are_named_and_values_not_compared(tmp_path):
    reproduce(NEEDY, Plan(), tmp_path, NEEDY.data.read(tmp_path))
    text = (tmp_path / PAGE).read_text()
    assert "# Toy: toys, 3" in text
    assert "**agrees in direction**" in text
    assert "| tail | 10.02 ± 1.02 | 9.00 ± 0.50 | other data |" in text


# verdicts


def test_a_difference_is_paired_and_has_students_interval():
    found = difference([1.0, 2.0, 4.0], [2.0, 4.0, 5.0])
    assert found.mean == pytest.approx(-4 / 3)
    assert found.reach == pytest.approx(4.30265 * np.std([1, 2, 1], ddof=1) / np.sqrt(3), rel=1e-5)      # t of 2 degrees, two-sided
    assert found.sign == 0
    assert interval([-1.0, -1.1, -0.9]).sign == -1
    assert interval([1.0]).sign == 0
    assert interval([1.0, float("nan")]).sign == 0


@pytest.mark.parametrize(("found", "papers", "printed", "verdict"), [
    (Difference(-1.0, 0.2, 5), True, None, "agrees"), (Difference(-1.0, 0.2, 5), False, None, "agrees in direction"),
    (Difference(-1.0, 0.2, 5), True, Printed(-1.3, 0.1), "agrees"), (Difference(-1.0, 0.2, 5), True, Printed(-9.0, 0.1), "agrees in direction"),
    (Difference(-1.0, 1.2, 5), True, None, "not testable here"), (Difference(1.0, 0.2, 5), False, None, "disagrees"),
    (Difference(-1.0, float("nan"), 1), True, None, "not testable here"),
])
def test_lower(found, papers, printed, verdict):
    assert lower(found, papers, printed).verdict == verdict


def test_bounds_nearness_and_several_findings():
    assert at_most(0.5, 1.0, "x") == (Verdict.AGREES, "x: 0.5, to be at most 1")
    assert at_most(1.5, 1.0, "x").verdict == Verdict.DISAGREES
    assert [within(Difference(m, 0.1, 5), 0.5, True).verdict for m in (0.3, 0.45, 0.9)] == ["agrees", "not testable here", "disagrees"]
    assert [not_above(Difference(m, 0.1, 5), 0.5, True).verdict for m in (-3.0, 0.45, 0.9)] == ["agrees", "not testable here", "disagrees"]
    assert not_above(Difference(0.0, float("nan"), 1), 0.5, True).verdict == "not testable here"
    weak = all_of(Finding(Verdict.AGREES, "a"), Finding(Verdict.NOT_TESTABLE, "b"), Finding(Verdict.DIRECTION, "c"))
    assert weak == (Verdict.NOT_TESTABLE, "a; b; c")
    assert all_of(weak, Finding(Verdict.DISAGREES, "d")).verdict == Verdict.DISAGREES
    nearly = Finding(Verdict.WITHIN_ERROR, "e")
    assert all_of(Finding(Verdict.AGREES, "a"), nearly).verdict == "agrees, up to Monte Carlo error"
    assert all_of(nearly, Finding(Verdict.DIRECTION, "c")).verdict == Verdict.DIRECTION


def test_files_are_small_and_read_back():
    value = {"a": list(range(100)), "b": {"c": 1.23456789, "d": {str(k): "x" * 20 for k in range(9)}}, "e": [], "f": None}
    assert json.loads(compact(value)) == value
    assert len(compact(value).splitlines()) == 19
    assert rounded({"x": 1.23456789, "y": (float("nan"), 2)}) == {"x": 1.23457, "y": [None, 2]}


@pytest.mark.parametrize(("data", "verdict"), [(None, "agrees, up to Monte Carlo error"), (Data("toys, 3", None, papers=False), "agrees in direction")])
def test_what_only_monte_carlo_error_saves_has_a_verdict_and_a_column_of_its_own(tmp_path, data, verdict):
    nearly = replace(TOY, claims=(Claim("It nearly holds.", "[X]", lambda r: Finding(Verdict.WITHIN_ERROR, "92.9%")), *TOY.claims))
    results = reproduce(nearly, Plan(), tmp_path / "toy", data)
    assert judged(nearly, results)[0]["verdict"] == verdict
    assert f"| It nearly holds. [X] | **{verdict}** | 92.9% |" in (tmp_path / "toy" / PAGE).read_text()
    text = overview((nearly,), tmp_path)
    assert "| seeds | agrees | agrees, up to Monte Carlo error | agrees in direction | disagrees | not testable here |" in text
    assert text.count("| 1 | 1 |  |  |  |" if data is None else "| 3 |  |  | 2 |  |  |") == 1


# the command


@pytest.fixture
def toys(monkeypatch, tmp_path):
    monkeypatch.setattr("fedtail_studies.catalogue.STUDIES", (TOY, NEEDY))
    monkeypatch.setattr("fedtail_studies.command.COMMITTED", tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)


def call(*words: str):
    return CliRunner().invoke(app, ["reproduce", *words])


@pytest.mark.usefixtures("toys")
def test_the_list_says_what_there_is_and_in_which_state():
    def states() -> list[str]:
        return [study["state"] for study in json.loads(call("list", "--json").stdout)["studies"]]
    assert states() == ["not run", "needs data"]
    assert call("toy").exit_code == 0
    assert states() == ["run here", "needs data"]
    Path("experiments/needy").mkdir(parents=True)
    Path("experiments/needy/results.json").touch()
    assert states() == ["run here", "committed"]
    assert len({len(line) for line in call("list").stdout.splitlines()[1:]}) == 1


@pytest.mark.usefixtures("toys")
def test_the_command_runs_a_study_and_prints_verdicts():
    done = call("toy", "--quick", "--seeds", "3")
    assert done.exit_code == 0, done.output
    assert "agrees  The tail falls. [X]" in done.stdout
    assert Path("reproduced/toy-quick/README.md").exists()
    told = json.loads(call("toy", "--out", "here", "--json").stdout)
    assert told["seeds"] == [0, 1, 2]
    assert told["claims"][0]["verdict"] == "agrees"
    assert json.loads(Path("here/results.json").read_text())["runs"][0]["command"] == "fedtail reproduce toy --seeds 3"


@pytest.mark.usefixtures("toys")
def test_a_plan_can_be_changed_and_the_page_says_so():
    assert call("toy", "--set", "shift=2", "--out", "here").exit_code == 0
    assert "fedtail reproduce toy --seeds 3 --set shift=2" in Path("here/README.md").read_text()
    assert "shift 2.0" in Path("here/README.md").read_text()
    refused = call("toy", "--out", "here")
    assert refused.exit_code == 2
    assert "holds results of toy with other settings or data" in refused.stderr


@pytest.mark.usefixtures("toys")
def test_a_finished_study_needs_its_data_no_more():
    assert call("needy", "--data", ".", "--out", "here").exit_code == 0
    Path("here/README.md").unlink()
    assert call("needy", "--out", "here").exit_code == 0
    assert Path("here/README.md").exists()


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(("words", "text"), [
    (["tpy"], "there is no study 'tpy'. Did you mean toy? `fedtail reproduce list` shows them all."),
    (["needy"], "needy needs toys. Write --data DIR."),
    (["needy", "--data", "nowhere"], "there is nothing at --data nowhere. Write --data DIR."),
    (["toy", "--data", "."], "--data . was given, but toy makes its own data. Leave it out."),
    (["toy", "--device", "tpu"], "--device must be cpu or cuda, got 'tpu'."),
    (["toy", "--set", "shfit=2"], "--set shfit=2: the plan of this study has no field 'shfit'. Did you mean shift?"),
    (["toy", "--set", "shift=much"], "--set shift=much: 'much' is not of the kind of 1.0, its default."),
])
def test_what_is_refused_is_refused_before_any_work(words, text):
    done = call(*words)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not MEASURED
    assert not Path("reproduced").exists()


# where it does not help


def test_a_tenth_of_the_clients_are_mislabelled_and_nobody_else():
    people = label_shift(0, 500, 1, 1, examples_per_client=20, pool_size=20_000).train
    wrong = where_not.mislabelled(people, 10, seed=0)
    owner, rows = people.example_clients_and_rows()
    changed = (wrong.targets != people.targets)[rows]
    by_client = torch.zeros(500).index_add(0, owner, changed.float()) / 20
    bad = by_client[by_client > 0]
    assert 0.07 < len(bad) / 500 < 0.13
    assert float(bad.mean()) == pytest.approx(0.9, abs=0.03)      # a tenth of random labels are right
    assert int(wrong.targets.max()) <= 9


# FEMNIST


def arrays(folder: Path, writers: int = 4) -> Path:
    random = np.random.default_rng(0)
    client = np.repeat(np.arange(writers), [100 + 5 * k for k in range(writers - 1)] + [99])
    x = 255 - random.integers(0, 60, (len(client), 28, 28))
    np.savez(folder / "femnist.npz", x=x.astype(np.uint8), y=random.integers(62, size=len(client)), client=client)
    return folder


def test_femnist_is_read_from_arrays(tmp_path):
    data = read_femnist(arrays(tmp_path))
    assert data.name == "FEMNIST, 3 writers"                 # one has 99 images
    assert not data.papers
    assert data.population.inputs.shape[1:] == (28, 28)
    assert 0 <= float(data.population.inputs.min()) <= float(data.population.inputs.max()) < 0.3      # ink is 1, paper 0
    assert "every seed draws 1 to train on and 1 others" in data.about


def test_femnist_is_read_from_leaf(tmp_path):
    users = {name: {"x": np.full((100, 784), 0.9).tolist(), "y": [3] * 100} for name in ("a", "b")}
    (tmp_path / "all.json").write_text(json.dumps({"users": list(users), "num_samples": [100, 100], "user_data": users}))
    assert read_femnist(tmp_path).name == "FEMNIST, 2 writers"


def test_where_there_is_no_femnist_it_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no FEMNIST in .*femnist\.npz .*or with LEAF's json files"):
        read_femnist(tmp_path)


def test_writers_are_drawn_anew_for_every_seed_and_scaled_by_the_training_ones():
    data = generated_writers(8, labels=5)
    train, test = writers(data, 0)
    assert len(train) == len(test) == 4
    assert not set(train.key.tolist()) & set(test.key.tolist())
    pixels = train.inputs[train.example_clients_and_rows()[1]]
    assert float(pixels.mean()) == pytest.approx(0, abs=1e-4)
    assert float(pixels.std()) == pytest.approx(1, abs=1e-4)
    assert writers(data, 1)[0].key.tolist() != train.key.tolist()


@pytest.mark.skipif("FEDTAIL_DATA" not in os.environ, reason="real data are not looked at: FEDTAIL_DATA names no folder")
def test_the_real_writers_are_those_of_the_page():
    data = read_femnist(Path(os.environ["FEDTAIL_DATA"]))
    assert len(data.population) >= 2
    assert int(data.population.size.min()) >= 100
    committed = EXPERIMENTS / "table2" / FILE
    if committed.exists() and not data.papers:
        assert Results.read(EXPERIMENTS / "table2").data["name"] == data.name
