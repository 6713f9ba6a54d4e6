"""The file that `fedtail init` writes for one's own data: it runs, learns, and trips none of our warnings."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.directions import few_clients_text
from fedtail.experiment import read_experiment, read_experiments
from fedtail.experiment.starter import starter_text
from fedtail.experiment.starter_settings import starter_scale, steps_to_frequencies
from fedtail.experiment.tune_section import read_search
from fedtail.runs import RunFolder, run
from fedtail.runs.diverged import divergence_sentences

from run_cases import Onlooker

random = np.random.default_rng(0)


def vectors(clients: int, each: int, classes: int = 3, features: int = 4):
    """Features of very different scales, and labels that follow from them, with another shift at each client."""
    client = np.repeat(np.arange(clients), each)
    z = random.normal(size=(clients * each, features)) + 0.5 * random.normal(size=(clients, features))[client]
    y = np.digitize(z[:, 0], np.quantile(z[:, 0], np.arange(1, classes) / classes))
    return (z * 10.0 ** np.arange(features) + 1000).astype("float32"), y, client


def prices(clients: int, each: int):
    """Numbers far from zero, of two features that are nearly the same and one of a huge scale."""
    x, _, client = vectors(clients, each)
    x[:, 3] = x[:, 0] + 0.01 * random.normal(size=len(x))
    return x, (2e5 + 3e4 * (x[:, 0] - 1000) + 1e4 * random.normal(size=len(x))).astype("float32"), client


def images(clients: int, each: int):
    count = clients * each
    return random.integers(0, 256, (count, 28, 28)).astype(np.uint8), np.arange(count) % 3, np.repeat(np.arange(clients), each)


def flat_images(clients: int, each: int):
    """Dark strokes on white, of pixels that are hardly ever dark at the rim: divided by its deviation, such a pixel would be 30 where it is."""
    count = clients * each
    y, client = np.arange(count) % 5, np.repeat(np.arange(clients), each)
    dark = random.random((count, 100)) < np.where(np.arange(100) % 10 == y[:, None] * 2, 0.7, 0.001 + 0.2 * (np.arange(100) % 10 == 1))
    return (1 - 0.9 * dark).astype("float32"), y, client


DATA = {
    "flat images": flat_images(60, 12),
    "many clients": vectors(120, 8),
    "25 clients": vectors(25, 12),                # a cohort of half of the 15 for training would have a tail of three
    "50 clients": vectors(50, 8),                 # 30 for training: a cohort of 15
    "70 clients": vectors(70, 6),
    "6 clients": vectors(6, 30),
    "10 clients": vectors(10, 30),
    "clients with one example": tuple(np.concatenate([a, b]) for a, b in zip(vectors(5, 20), vectors(3, 1), strict=True)),
    "two classes": vectors(60, 10, classes=2),
    "40 classes": vectors(60, 20, classes=40),
    "prices": prices(40, 10),
    "bytes": images(12, 4),
    "images of floats": (images(12, 4)[0].astype("float32")[:, :8, :8], *images(12, 4)[1:]),
}


def written(folder: Path, name: str) -> Path:
    x, y, client = DATA[name]
    if name == "clients with one example":
        client = np.concatenate([client[:100], client[100:] + 100])
    np.savez(folder / "mine.npz", x=x, y=y, client=client)
    (folder / "e.toml").write_text(starter_text(folder / "e.toml", folder / "mine.npz"))
    return folder / "e.toml"


def run_without_warnings(file: Path, *settings: str) -> RunFolder:
    """The finished run of the file, in which no warning was issued, in Python or to the watcher."""
    watch = Onlooker()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = run(read_experiment(file, ["engine.workers=1", *settings]), 0, file.parent / "run", watch)
    assert watch.notes == []
    return folder


@pytest.mark.parametrize("name", DATA)
def test_a_starter_file_runs_without_warnings(tmp_path, name):
    folder = run_without_warnings(written(tmp_path, name), "rounds=2")
    assert folder.is_finished
    assert folder.result["failed"] == 0


@pytest.mark.parametrize(("clients", "few"), [(4, True), (33, True), (34, False)])
def test_few_clients_get_a_method_without_shares_of_them(tmp_path, clients, few):
    x, y, client = vectors(clients, 10, classes=2)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    text = starter_text(tmp_path / "e.toml", tmp_path / "mine.npz")
    (tmp_path / "e.toml").write_text(text)
    [part] = [member.risk for member in read_experiment(tmp_path / "e.toml").algorithm.members]
    assert type(part).__name__ == ("Ascent" if few else "Superquantile")
    assert ("tail_fraction = [" in text) is not few
    assert run_without_warnings(tmp_path / "e.toml", "rounds=2").is_finished
    commented = [line.removeprefix("# ") for line in text.split("remove the # below.\n")[1].split("\n\n")[0].splitlines()]
    (tmp_path / "e.toml").write_text(text + "\n" + "\n".join(commented))
    assert [type(one.algorithm.members[0].risk).__name__ for one in read_experiments(tmp_path / "e.toml")] == ["Mean", type(part).__name__]


def test_few_clients_with_numbers_get_fedavg(tmp_path):
    """A step of weights that follow losses has no scale that fits squares of any unit."""
    x, y, client = vectors(4, 10, classes=2)
    np.savez(tmp_path / "mine.npz", x=x, y=2000 + 10 * x[:, 0].astype(np.float32) + y, client=client)
    text = starter_text(tmp_path / "e.toml", tmp_path / "mine.npz")
    commented = [line.removeprefix("# ") for line in text.split("remove the # below.\n")[1].split("\n\n")[0].splitlines()]
    (tmp_path / "e.toml").write_text(text + "\n" + "\n".join(commented))
    assert [type(one.algorithm.members[0].risk).__name__ for one in read_experiments(tmp_path / "e.toml")] == ["Mean", "Worst"]


def test_without_data_it_runs_without_warnings(tmp_path):
    (tmp_path / "e.toml").write_text(starter_text(tmp_path / "e.toml"))
    assert run_without_warnings(tmp_path / "e.toml", "rounds=2").is_finished


@pytest.mark.parametrize("name", ["prices", "two classes", "40 classes", "flat images"])
def test_a_starter_file_beats_the_constant_prediction(tmp_path, name):
    file = written(tmp_path, name)
    experiment = read_experiment(file)
    folder = run_without_warnings(file, "evaluate.every=2000")
    splits = experiment.data.load(0)
    train, test = (part.targets[part.example_clients_and_rows()[1]].double() for part in (splits["train"], splits["test"]))
    constant = (test - train.mean()).square().mean() if name == "prices" else (test != train.mode().values).double().mean()
    error = folder.result["members"][0]["test"]["error"]["mean"]
    assert error < 0.5 * float(constant) if name != "40 classes" else error < 0.99 * float(constant)


def test_a_starter_for_a_csv_file_names_its_columns(tmp_path):
    x, y, client = vectors(30, 10, classes=2)
    frame = pd.DataFrame(np.rint(x).astype(int), columns=["a", "b", "c", "d"]).assign(sick=y, site=client)
    frame.to_csv(tmp_path / "mine.csv", index=False)
    text = starter_text(tmp_path / "e.toml", tmp_path / "mine.csv", y="sick", client="site")
    (tmp_path / "e.toml").write_text(text)
    experiment = read_experiment(tmp_path / "e.toml")
    assert experiment.as_table()["data"]["x"] == ["a", "b", "c", "d"]
    assert run_without_warnings(tmp_path / "e.toml", "rounds=2").is_finished


def test_bytes_that_are_codes_are_scaled_by_columns_and_pixels_by_255(tmp_path):
    made = np.random.default_rng(0)
    for highest, kind in ((19, "columns"), (255, {"scale": 255.0})):
        x = made.integers(0, highest + 1, (60, 8)).astype("uint8")
        x[0, 0] = highest
        assert starter_scale(fedtail.Population.from_arrays(x, [0, 1] * 30, np.arange(60) % 6)) == kind


def test_flat_images_of_floats_have_one_scale_for_all_pixels(tmp_path):
    """Else the step size for the few pixels that are hardly ever lit is too small for all others."""
    found = starter_text(tmp_path / "e.toml", written(tmp_path, "flat images").parent / "mine.npz")
    x = DATA["flat images"][0]
    assert f"scale = {{ shift = {x.mean():.1f}, scale = {x.std():.1f} }}       # for all columns" in found
    rate = float(re.search(r"^learning_rate = (\S+)", found, re.MULTILINE)[1])
    assert rate > 1e-3
    narrow = fedtail.Population.from_arrays(x[:, :20], *DATA["flat images"][1:])
    assert starter_scale(narrow) == "columns"


@pytest.mark.parametrize("name", ["40 classes", "prices", "bytes"])
def test_the_search_of_a_starter_file_is_around_its_own_step_size(tmp_path, name):
    text = written(tmp_path, name).read_text()
    rate = float(re.search(r"^learning_rate = (\S+)", text, re.MULTILINE)[1])
    low, high = map(float, re.search(r"local.learning_rate = \{ low = (\S+), high = (\S+),", text).groups())
    assert (low, high) == pytest.approx((rate / 10, 10 * rate))


@pytest.mark.parametrize("clients", [34, 60, 80, 200])
def test_what_a_starter_file_suggests_has_ten_clients_in_every_tail(tmp_path, clients):
    """Uncommented, its family and its search trip no warning of a small tail: with 24 clients a round, 0.3 of them did."""
    x, y, client = vectors(clients, 5)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    text = starter_text(tmp_path / "e.toml", tmp_path / "mine.npz")
    family, searched = ([float(one) for one in found.split(",")] for found in re.findall(r"^# risk.tail_fraction = \[(.*)\]", text, re.MULTILINE))
    train = int(0.6 * clients)
    cohort = min(50, train // 2) if train >= 40 else train
    assert min(family + searched) * cohort >= 10
    assert (family[0], searched[-1]) == (1.0, 0.8)
    assert (family == sorted(set(family), reverse=True), searched == sorted(set(searched))) == (True, True)
    (tmp_path / "e.toml").write_text(f"{text}\n[family]\nrisk.tail_fraction = {family}\n")
    assert len(read_experiment(tmp_path / "e.toml").algorithm.members) == len(family)


def test_a_starter_reports_what_says_more_than_the_error(tmp_path):
    """The absolute error of numbers, in their unit; what a constant prediction cannot win, where one class has most examples."""
    x, y, client = vectors(24, 20, classes=2)
    for name, targets, metrics in (("prices", 1e5 + 1e4 * x[:, 0], ["mean_absolute_error"]), ("balanced", y, []),
                                   ("rare", (np.arange(len(y)) % 9 == 0).astype(int), ["balanced_accuracy", "roc_auc"])):
        np.savez(tmp_path / f"{name}.npz", x=x, y=targets, client=client)
        (tmp_path / f"{name}.toml").write_text(starter_text(tmp_path / f"{name}.toml", tmp_path / f"{name}.npz"))
        assert read_experiment(tmp_path / f"{name}.toml").as_table()["task"].get("metrics", []) == metrics


@pytest.mark.parametrize(("each", "work"), [(30, "epochs = 1 "), (300, "epochs = 1 "), (301, "local_steps = 30 ")])
def test_large_clients_take_some_steps_a_round_not_a_pass(tmp_path, each, work):
    """Models that each went hundreds of steps their own way have a mean that may be worse than a constant prediction."""
    x, y, client = vectors(3, each, classes=2)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    (tmp_path / "e.toml").write_text(starter_text(tmp_path / "e.toml", tmp_path / "mine.npz"))
    assert f"\n{work}" in (tmp_path / "e.toml").read_text()
    steps = read_experiment(tmp_path / "e.toml").algorithm.members[0].local.local_steps
    assert steps == (30 if "steps" in work else None)


def test_a_file_for_a_module_of_ones_own_says_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", loaded := types.ModuleType("mine"))      # from the folder of another experiment
    loaded.__spec__ = importlib.machinery.ModuleSpec("mine", None)
    np.savez("tokens.npz", x=np.arange(60).reshape(30, 2), y=[0, 1] * 15, client=np.arange(30) % 6)
    said = CliRunner().invoke(app, ["init", "--data", "tokens.npz"]).output
    assert "write mine.py beside it, with a torch.nn.Module called Net" in said
    refused = CliRunner().invoke(app, ["run", "experiment.toml"])
    assert refused.exit_code == 2
    assert "there is no mine.py in" in refused.output
    assert "installed package" not in refused.output


def rare_labels(clients: int, each: int, share: float, signal: float = 0.0):
    """Two classes, of which one is rare, and features that say nothing of them, or something."""
    made = np.random.default_rng(7)
    x = made.normal(size=(clients * each, 3)).astype("float32")
    return x, (made.random(len(x)) < 1 / (1 + np.exp(np.log(1 / share - 1) - signal * x[:, 0]))).astype(int), np.repeat(np.arange(clients), each)


@pytest.mark.parametrize(("clients", "each", "share", "risk"), [
    (100, 40, 0.025, "Superquantile(tail_fraction=1.0"), (100, 40, 0.4, "Superquantile(tail_fraction=0.5"),
    (100, 400, 0.05, "Superquantile(tail_fraction=0.5"), (8, 100, 0.05, "Mean("), (8, 100, 0.4, "Ascent(")])
def test_rare_labels_begin_without_a_tail_that_would_be_chance(tmp_path, clients, each, share, risk):
    """A client's loss is large where it drew more of the one or two rare labels: a tail of such raises the mean loss for nothing."""
    x, y, client = rare_labels(clients, each, share)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    text = starter_text(tmp_path / "e.toml", tmp_path / "mine.npz")
    (tmp_path / "e.toml").write_text(text)
    assert repr(read_experiment(tmp_path / "e.toml").algorithm.members[0].risk).startswith(risk)
    assert max(map(len, text.splitlines())) <= 140
    chance = f"with about {y.mean() * each:.2g} rare labels a client, whose loss is large is mostly chance"
    assert (chance in text) is (risk in ("Mean(", "Superquantile(tail_fraction=1.0"))
    commented = [line.removeprefix("# ") for line in text.split("remove the # below.\n")[1].split("\n\n")[0].splitlines()]
    (tmp_path / "e.toml").write_text(text + "\n" + "\n".join(commented))
    other = {"Mean(": ["Mean", "Ascent"], "Ascent(": ["Mean", "Ascent"]}.get(risk, ["Mean", "Superquantile"])
    both = [one.algorithm.members[0].risk for one in read_experiments(tmp_path / "e.toml")]
    assert [type(one).__name__ for one in both] == other
    assert getattr(both[1], "tail_fraction", 0.5) == 0.5


def test_rare_labels_without_signal_run_without_warnings(tmp_path):
    """With a tail of half of the clients and 100 rounds, the loss was above the constant prediction's by 13%."""
    x, y, client = rare_labels(100, 40, 0.025)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    (tmp_path / "e.toml").write_text(starter_text(tmp_path / "e.toml", tmp_path / "mine.npz"))
    folder = run_without_warnings(tmp_path / "e.toml", "evaluate.every=1000")
    assert divergence_sentences([folder]) == []
    loss, constant = folder.result["members"][0]["test"]["loss"]["mean"], folder.result["constant"]["test"]["loss"]["mean"]
    assert loss < 1.05 * constant


@pytest.mark.parametrize(("one_output", "shares"), [(True, (0.975, 0.025)), (True, (0.6, 0.4)), (False, (0.7, 0.25, 0.05))])
def test_rounds_are_enough_to_learn_how_rare_a_label_is(one_output, shares):
    """Against gradient steps one by one."""
    shares, rate = np.array(shares), 0.1
    scores, steps = np.zeros(1 if one_output else len(shares)), 0
    while True:
        odds = 1 / (1 + np.exp(-scores[0])) if one_output else np.exp(scores) / np.exp(scores).sum()
        odds = np.array([1 - odds, odds]) if one_output else odds
        if shares @ np.log(shares / odds) <= -1e-3 * shares @ np.log(shares):
            break
        scores, steps = scores + rate * (shares[1:] - odds[1:] if one_output else shares - odds), steps + 1
    assert steps_to_frequencies(1000 * shares, one_output, rate) == pytest.approx(steps, rel=0.1)


@pytest.mark.parametrize(("clients", "numbers", "statistic"), [(8, False, "p100"), (50, False, "p100"), (8, True, "mean"), (50, True, "p100"),
                                                               (100, False, "p90"), (98, False, "p100"), (96, False, "p100")])
def test_a_search_by_few_held_out_clients_has_no_percentile(tmp_path, clients, numbers, statistic):
    x, y, client = vectors(clients, 10, classes=2)
    np.savez(tmp_path / "mine.npz", x=x, y=x[:, 0] if numbers else y, client=client)
    text = starter_text(tmp_path / "e.toml", tmp_path / "mine.npz")
    assert f'\n# statistic = "{statistic}"\n' in text
    assert ("too few for a percentile" in text) is (statistic != "p90")
    tuned = [line.removeprefix("# ") for line in text.partition("\n# [tune]\n")[2].splitlines()]
    (tmp_path / "e.toml").write_text("\n".join([text, "[tune]", *tuned]))
    search = read_search(tmp_path / "e.toml")
    splits = search.first_experiment().data.load(0)
    held = len(splits["validation"]) if "validation" in splits else round(0.2 * len(splits["train"]))
    assert few_clients_text(search.statistic, held, search.better) == ""
    assert statistic == "p90" or held < 20


@pytest.mark.parametrize(("y", "text"), [
    (np.zeros(60, int), "mine.npz: every label is 0: there is nothing to learn."), (np.full(60, "yes"), "mine.npz: every label is yes: there is nothing to learn."),
    (np.full(60, 2.5), "mine.npz: every target is 2.5: there is nothing to learn."),
    (np.eye(2)[np.arange(60) % 2], "mine.npz: y holds labels in one-hot form, 2 numbers for each example with a single 1. Write y.argmax(1)."),
    (np.eye(3, dtype=int)[np.arange(60) % 3], "mine.npz: y holds labels in one-hot form, 3 numbers for each example with a single 1. Write y.argmax(1).")])
def test_targets_of_which_nothing_is_learned_are_refused_and_nothing_is_written(tmp_path, monkeypatch, y, text):
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", x=np.random.default_rng(0).normal(size=(60, 2)).astype("float32"), y=y, client=np.arange(60) % 6)
    done = CliRunner().invoke(app, ["init", "e.toml", "--data", "mine.npz"], env={"COLUMNS": "400"})
    assert (done.exit_code, text in done.output) == (2, True), done.output
    assert not Path("e.toml").exists()
