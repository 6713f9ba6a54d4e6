"""Labels and columns as people have them: names kept, classes numbered, in describe, init, runs, predictions and profiles."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.data.describe import describe
from fedtail.data.population import Population
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment import read_experiment


def call(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "400"})


def frame(labels: list, clients: int = 24, each: int = 12) -> pandas.DataFrame:
    """Two features that tell the labels apart, `weight` on another scale; the first client alone is heavy."""
    draws = np.random.default_rng(0)
    place = draws.integers(len(labels), size=clients * each)
    owner = np.repeat(np.arange(clients), each)
    return pandas.DataFrame({"age": place + 0.1 * draws.normal(size=len(place)), "weight": 50 + 9.0 * (owner == 0) + draws.normal(size=len(place)),
                             "outcome": np.array(labels, dtype=object)[place], "site": [f"site{k:02d}" for k in owner]})


KINDS = {"signs": ([-1, 1], ["-1", "1"]), "from one": ([1, 2, 3], ["1", "2", "3"]), "text": (["no", "yes"], ["no", "yes"]),
         "booleans": ([False, True], ["False", "True"]), "whole floats": ([0.0, 1.0], ["0", "1"])}


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_file_that_runs_for_labels_of_every_kind(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    labels, names = KINDS[kind]
    table = frame(labels).infer_objects()
    table.to_parquet("mine.parquet")
    written = call("init", "e.toml", "--data", "mine.parquet", "--y", "outcome", "--client", "site")
    assert written.exit_code == 0, written.output
    answered = call("run", "e.toml", "--seeds", "0", "--set", "rounds=40", "--set", "engine.workers=1", "--out", "out")
    assert answered.exit_code == 0, answered.output
    assert "warning" not in answered.output
    [path] = Path("out").rglob("run.json")
    about = json.loads(path.read_text())
    assert (about["classes"], about["columns"], about["rates"]) == (names, ["age", "weight"], True)
    predicted = call("predict", str(path.parent), "--data", "mine.parquet")
    rows = list(csv.DictReader(io.StringIO(predicted.stdout)))
    wanted = [names[labels.index(one)] for one in table["outcome"]]
    assert np.mean([row["prediction"] == name for row, name in zip(rows, wanted, strict=True)]) > 0.9      # the classes are far apart


def test_whole_numbers_of_many_values_are_numbers_to_predict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = frame([0, 1])
    table["outcome"] = np.arange(len(table)) % 150
    table.to_csv("mine.csv", index=False)
    said = call("data", "describe", "mine.csv", "--y", "outcome", "--client", "site").stdout
    assert 'y holds 150 different whole numbers in 288 examples' in said
    call("init", "e.toml", "--data", "mine.csv", "--y", "outcome", "--client", "site")
    text = Path("e.toml").read_text()
    assert 'targets = "numbers"' in text
    assert 'part = "LeastSquares"' in text


def test_describe_names_columns_and_classes():
    population = Population.from_pandas(frame(["no", "yes"]), y="outcome", client="site")
    found = describe(population)
    assert (population.columns, population.classes) == (("age", "weight"), ("no", "yes"))
    assert found["targets"]["names"] == ["no", "yes"]
    assert found["features"]["x"]["most"][0]["feature"] == "weight"
    wide = frame(["no", "yes"]).assign(weight=lambda t: 1e5 * t["weight"])
    [warning] = describe(Population.from_pandas(wide, y="outcome", client="site"))["warnings"]
    assert warning.startswith("x is not scaled: feature weight has standard deviation")


def test_describe_says_what_to_write_for_labels_that_are_not_from_zero():
    [warning] = describe(Population.from_pandas(frame([-1, 1]).infer_objects(), y="outcome", client="site"))["warnings"]
    assert "classes = [-1, 1] below [data]" in warning


def test_names_stay_with_a_saved_population_and_its_parts(tmp_path):
    population = Population.from_pandas(frame(["no", "yes"]), y="outcome", client="site")
    population.save(tmp_path / "saved")
    for kept in (Population.open(tmp_path / "saved"), population.split((0.5, 0.5))[1], population.split_examples()[0]):
        assert (kept.columns, kept.classes) == (population.columns, population.classes)


def test_worst_clients_are_told_by_the_names_of_their_columns():
    population = Population.from_pandas(frame(["no", "yes"]), y="outcome", client="site")
    found = fedtail.evaluate(fedtail.models.LogisticRegression(2), population)
    profile = next(row for row in found.worst_clients(24) if row["name"] == "site00")
    assert profile["features"].startswith("column weight: mean +")


def test_a_test_file_is_numbered_as_the_training_file(tmp_path):
    frame(["no", "yes"]).to_csv(tmp_path / "train.csv", index=False)
    frame(["yes"]).to_csv(tmp_path / "test.csv", index=False)                 # alone, "yes" would be class 0
    (tmp_path / "e.toml").write_text('rounds = 1\n[data]\nkind = "arrays"\npath = "train.csv"\ntest_path = "test.csv"\nx = ["age", "weight"]\n'
                                     'y = "outcome"\nclient = "site"\n[task.module]\npart = "LogisticRegression"\nfeatures = 2\n[sample]\npart = "Everyone"\n[local]\nlearning_rate = 0.1\n')
    splits = read_experiment(tmp_path / "e.toml").data.load(0)
    assert splits["test"].targets.unique().tolist() == [1]
    assert splits["test"].classes == splits["train"].classes == ("no", "yes")


def test_a_label_that_is_not_listed_is_refused():
    population = Population.from_arrays(torch.zeros(3, 1), [0, 1, 2], client=[0, 0, 0])
    with pytest.raises(ValueError, match=r"y holds the label '2', which is not among classes = \[0, 1\]. Add it there"):
        fedtail.data.with_classes(population, [0, 1])


def test_numbers_far_from_zero_beat_a_constant_with_the_starter_file_and_have_their_unit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = frame([0, 1])
    table["outcome"] = 2000.0 + 10 * table["age"]                 # deviation 5: a hundredth of 2000 is 20
    table.to_csv("mine.csv", index=False)
    call("init", "e.toml", "--data", "mine.csv", "--y", "outcome", "--client", "site")
    answered = call("run", "e.toml", "--seeds", "0", "--set", "engine.workers=1", "--out", "out")
    assert answered.exit_code == 0, answered.output
    assert "Squared error (squared units of y) on 5 test clients" in answered.output
    [path] = Path("out").rglob("result.json")
    result = json.loads(path.read_text())
    assert result["members"][0]["test"]["error"]["mean"] < 0.1 * result["constant"]["test"]["error"]["mean"]


def test_a_node_refuses_text_labels_and_takes_booleans(tmp_path):
    settings = NodeSettings(tmp_path, "north", "experiment.toml", "mine.csv", columns={"y": "outcome", "client": "site"})
    frame(["yes"]).to_csv(tmp_path / "mine.csv", index=False)                 # alone, it would be class 0 here and class 1 elsewhere
    with pytest.raises(ValueError, match=r"y of mine.csv holds the names yes: every node must number classes alike"):
        settings.read_population()
    frame([True]).to_csv(tmp_path / "mine.csv", index=False)
    assert settings.read_population().targets.unique().tolist() == [1]
