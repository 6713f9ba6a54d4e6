"""From a finished run to a model in use: modules, predictions, exported files that are run again, model cards."""

from __future__ import annotations

import csv
import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.experiment import Source
from fedtail.experiment.experiment import build_experiments
from fedtail.model_file import read_model
from fedtail.runs import RunFolder, find_runs, run
from fedtail.runs.exporting import _quiet_exporter, example_inputs, export_run
from fedtail.runs.model_card import model_card
from run_folders import write_folder

from run_cases import Onlooker, experiment

REGRESSION = """\
rounds = 4
[data]
kind = "arrays"
path = "numbers.npz"
split = { train = 0.5, test = 0.5 }
[task.module]
part = "own_numbers:Two"
[sample]
cohort_size = 3
"""
OWN = """\
import torch
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)
    def forward(self, x):
        return self.last(self.first(x).tanh())[:, 0]
"""


def call(*words: str):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    wanted = experiment("delta_fl", 'evaluate.keep_best="worst10"', "rounds=8")
    return run(wanted, 3, tmp_path_factory.mktemp("runs") / "one", Onlooker())


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> RunFolder:
    return run(experiment("family"), 3, tmp_path_factory.mktemp("runs") / "family", Onlooker())


@pytest.fixture
def examples(tmp_path) -> Path:
    x = np.random.default_rng(0).normal(size=(11, 60)).astype("float32")
    np.savez(tmp_path / "x.npz", x=x, narrow=x[:, :5])
    return tmp_path / "x.npz"


def by_hand(folder: RunFolder, name: str, x: np.ndarray) -> np.ndarray:
    """The outputs of softmax regression, from the tensors alone."""
    weight, bias = (t.double().numpy() for t in load_file(folder.path / name).values())
    weight, bias = (weight, bias) if weight.ndim == 2 else (bias, weight)
    return x @ (weight if weight.shape[0] == x.shape[1] else weight.T) + bias


# modules

def test_a_run_gives_its_module_and_its_best_one(finished):
    assert repr(finished) == f"RunFolder('{finished.path}': delta_fl, seed 3, finished)"
    x = torch.randn(5, 60)
    for best, name in ((False, "model.safetensors"), (True, "best.safetensors")):
        module = finished.module(best=best)
        assert not module.training
        assert np.allclose(module(x).detach().numpy(), by_hand(finished, name, x.numpy()), atol=1e-5)


def test_a_model_of_a_family_is_named(family):
    first, last = family.module(0), family.module("tail_fraction 0.2")
    assert not torch.equal(torch.nn.utils.parameters_to_vector(first.parameters()), torch.nn.utils.parameters_to_vector(last.parameters()))
    with pytest.raises(ValueError, match=r"holds 3 models. Name one of them: tail_fraction 1.0, tail_fraction 0.5, tail_fraction 0.2"):
        family.module()
    with pytest.raises(ValueError, match=r"has no model 'tail_fraction 0.3'"):
        family.module("tail_fraction 0.3")
    with pytest.raises(ValueError, match="kept no best models"):
        family.module(0, best=True)


def test_a_run_that_is_not_finished_has_no_module(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "half")
    (tmp_path / "half" / "result.json").unlink()
    with pytest.raises(ValueError, match="is not finished, so it has no models yet"):
        RunFolder.open(tmp_path / "half").module()


# predict

def test_predictions_are_the_largest_output_and_its_probability(finished, examples, tmp_path):
    outputs = by_hand(finished, "model.safetensors", np.load(examples)["x"])
    chance = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    done = call("predict", finished.path, "--data", examples)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [int(row["prediction"]) for row in rows] == outputs.argmax(1).tolist()
    assert np.allclose([float(row["probability"]) for row in rows], chance.max(1), atol=1e-5)
    for name in ("p.csv", "p.parquet", "p.npz"):
        assert call("predict", finished.path, "--data", examples, "--out", tmp_path / name, "--raw").exit_code == 0
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert np.allclose(np.stack([table[f"output_{k}"].to_numpy() for k in range(10)], 1), outputs, atol=1e-5)
    assert np.load(tmp_path / "p.npz")["prediction"].tolist() == outputs.argmax(1).tolist()


def test_a_table_of_as_many_columns_is_taken_in_their_order(finished, examples, tmp_path):
    """The run took one array called x, of 60 numbers: a table for it has 60 columns, and what was done is said."""
    names = [f"sensor {k}" for k in range(60)]
    table = pd.DataFrame(np.load(examples)["x"], columns=names)
    table.to_csv(tmp_path / "new.csv", index=False)
    done, array = call("predict", finished.path, "--data", tmp_path / "new.csv"), call("predict", finished.path, "--data", examples)
    assert done.stdout == array.stdout
    assert "has no column 'x': its 60 columns were taken in their order, 'sensor 0' to 'sensor 59'. --x names others." in done.stderr
    table.assign(label=1).to_csv(tmp_path / "more.csv", index=False)
    refused = call("predict", finished.path, "--data", tmp_path / "more.csv")
    assert refused.exit_code == 2
    assert "its 61 columns are not the 60 numbers of an example. Name those in the order of training: --x " in refused.stderr


def test_predictions_come_in_blocks_that_change_nothing(finished, tmp_path, monkeypatch, examples):
    whole = call("predict", finished.path, "--data", examples).stdout
    monkeypatch.setattr("fedtail.runs.models_of_run.AT_ONCE", 4)
    rows = zip(*(csv.reader(io.StringIO(text)) for text in (whole, call("predict", finished.path, "--data", examples).stdout)), strict=True)
    assert all(one == two or float(one[1]) == pytest.approx(float(two[1])) for one, two in rows)


def test_numbers_are_predicted_by_a_module_of_ones_own_that_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_numbers.py").write_text(OWN)
    made = np.random.default_rng(1)
    x = made.normal(size=(40, 3)).astype("float32")
    np.savez("numbers.npz", x=x, y=x.sum(1), client=np.arange(40) // 4)
    [wanted] = build_experiments(Source.parse(REGRESSION, "numbers.toml", tmp_path, trust=["."]), "numbers")
    done = run(wanted, 0, tmp_path / "run", Onlooker())
    assert "own_numbers:Two" in call("predict", "run", "--data", "numbers.npz").output      # not trusted: refused by name
    found = call("predict", "run", "--data", "numbers.npz", "--trust", ".")
    assert found.exit_code == 0, found.output
    values = [float(row["prediction"]) for row in csv.DictReader(io.StringIO(found.stdout))]
    assert np.allclose(values, done.module(trust=".")(torch.from_numpy(x)).detach(), atol=1e-6)
    assert call("export", "run", "--trust", ".", "--format", "torch").exit_code == 0
    again = torch.export.load("run/export/model.pt2").module()
    assert torch.allclose(again(torch.from_numpy(x)), done.module(trust=".")(torch.from_numpy(x)))


def test_wrong_examples_are_refused_in_words(finished, examples, tmp_path):
    done = call("predict", finished.path, "--data", examples, "--x", "narrow")
    assert done.exit_code == 2
    assert "does not take the examples" in done.output
    assert "An example that it was trained on has x of 60 float32. --x names the arrays or columns." in done.output
    for words, text in ((("--data", tmp_path / "none.npz"), "there is no file"), (("--data", examples, "--out", "p.txt"), "must end in .csv, .parquet, .npz"),
                        (("--data", examples, "--x", "z"), "called 'z'")):
        done = call("predict", finished.path, *words)
        assert (done.exit_code, text in done.output) == (2, True), done.output


# export

def test_exported_files_are_read_and_run_again(finished, tmp_path):
    done = call("export", finished.path, "--out", tmp_path / "out", "--format", "safetensors", "--format", "torch", "--json")
    assert done.exit_code == 0, done.output
    assert "outputs differ by at most" in json.loads(done.stdout)["files"]["model.pt2"]
    x = torch.randn(23, 60)
    wanted = finished.module()(x)
    assert torch.allclose(torch.export.load(tmp_path / "out" / "model.pt2").module()(x), wanted, atol=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    module = getattr(fedtail.models, config["module"].pop("part"))(**config["module"])      # from the folder alone
    module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(module(x), wanted)
    assert config["inputs"] == {"x": {"shape": [60], "dtype": "float32"}}
    history = [read_model(place / "model.safetensors")[1].what for place in (finished.path, tmp_path / "out")]
    assert history[0] == history[1]      # what it cost of privacy goes with it


def test_the_card_of_doubles_and_squared_errors_says_what_onnx_takes_and_in_which_unit(tmp_path, monkeypatch):
    """Tables are doubles, the model's precision is single: onnxruntime refused what the card told to pass."""
    monkeypatch.chdir(tmp_path)
    made = np.random.default_rng(0)
    x = made.normal(size=(240, 3))
    np.savez("mine.npz", x=x, y=2e5 + 1e4 * x.sum(1), client=np.arange(240) // 10)
    assert call("init", "e.toml", "--data", "mine.npz").exit_code == 0
    ran = call("run", "e.toml", "--seeds", "0", "--set", "rounds=3", "--set", "engine.workers=1", "--out", "one")
    assert "Every client, worst first: squared error" in ran.output
    card = model_card(RunFolder.open("one"), 0, False, ["model.onnx"])
    assert 'session.run(None, {"x": x.astype("float32")})' in card
    assert "| error (squared, in squared units of the targets) | " in card
    np.savez("other.npz", x=x[:, :2])
    assert "An example that it was trained on has x of 3 float64. --x names" in call("predict", "one", "--data", "other.npz").output


def test_onnx_gives_the_same_outputs_in_another_runtime(finished, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = export_run(finished, tmp_path / "out", ["onnx"])
    assert "read and run again" in done["files"]["model.onnx"]
    x = torch.randn(23, 60)
    [found] = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx")).run(None, {"x": x.numpy()})
    assert np.allclose(found, finished.module()(x).detach(), atol=1e-5)


def test_what_cannot_be_exported_is_left_out_or_refused_with_the_reason(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtail.runs.exporting.find_spec", lambda name: None)
    done = export_run(finished, tmp_path / "all")
    assert done["left_out"] == {"onnx": "torch's exporter needs onnx and onnxscript. Write pip install 'fedtail[onnx]'"}
    with pytest.raises(ValueError, match="onnx cannot be written: torch's exporter needs onnx and onnxscript"):
        export_run(finished, tmp_path / "one", ["onnx"])
    with pytest.raises(ValueError, match=r"there is no format 'onx'. Did you mean onnx"):
        export_run(finished, tmp_path / "two", ["onx"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other things"):
        export_run(finished, tmp_path / "full")


def test_a_file_that_gives_other_outputs_is_removed(finished, tmp_path, monkeypatch):
    from fedtail.runs import exporting

    monkeypatch.setattr(exporting, "call_module", lambda module, inputs: module(inputs) + (0 if isinstance(module, fedtail.models.SoftmaxRegression) else 1))
    with pytest.raises(RuntimeError, match=r"model.pt2 gives outputs that differ by .* so it was removed"):
        export_run(finished, tmp_path / "out", ["torch"])
    assert not (tmp_path / "out" / "model.pt2").exists()


def test_a_run_without_shapes_is_refused_in_words(finished):
    old = RunFolder(finished.path, {key: value for key, value in finished.about.items() if key != "inputs"})
    with pytest.raises(ValueError, match="does not say which inputs its model takes"):
        example_inputs(old, 2)


def test_made_up_shapes_are_refused(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    for wrong in ({"x": {"shape": [10**12], "dtype": "float32"}}, {"x": {"shape": [3], "dtype": "load"}}, [1]):
        (tmp_path / "run" / "run.json").write_text(json.dumps({**about, "inputs": wrong}))
        with pytest.raises(ValueError, match="inputs cannot be"):
            RunFolder.open(tmp_path / "run")


# model cards

def card_data(text: str):
    hub = pytest.importorskip("huggingface_hub")
    return hub.ModelCard(text).data


def test_the_card_is_one_that_the_hub_reads(finished):
    text = model_card(finished, 0, False, ["model.pt2", "model.safetensors"], "apache-2.0")
    data = card_data(text)
    assert data.license == "apache-2.0"
    assert {"federated-learning", "fedtail"} <= set(data.tags)
    told = {(one.metric_type, one.metric_value) for one in data.eval_results}
    statistics = finished.result["members"][0]["test"]
    assert ("error_p100", statistics["error"]["p100"]) in told            # of four clients, the worst
    for heading in ("## Use", "## Data", "## Training", "## Results over clients", "## Privacy", "## Limits"):
        assert heading in text
    assert f"| error | {statistics['error']['mean']:.4g} |" in text
    assert "No differential privacy: released without a mechanism" in text
    assert "Superquantile(tail_fraction=0.5" in text
    assert "8 train, 4 validation, 4 test" in text


def test_the_card_of_the_best_model_is_about_its_round_and_says_who_chose(finished):
    round = finished.result["best"][0]["round"]
    line = next(line for line in finished.metrics if line["round"] == round)
    text = model_card(finished, 0, True, ["model.pt2"])
    assert f"after round {round}:" in text
    assert f"| error | {line['members'][0]['test']['error']['mean']:.4g} |" in text
    assert "chosen by error.worst10 on the validation clients" in text
    assert "license" not in text.split("---")[1]


def test_the_card_says_what_is_promised_about_new_clients_and_what_is_not(finished):
    text = model_card(finished, 0, False, [])
    assert "- No promise about the 90th percentile of the error over new clients: it takes 29 held-out clients, and there are 4." in text
    assert "No promise about new clients is made for this model, the best one of the run" in model_card(finished, 0, True, [])
    entry = {"clients": 60, "confidence": 0.95, "p90": {"observed": 0.3, "bound": 0.4, "clients_needed": None, "note": ""}}
    made = RunFolder(finished.path, finished.about)
    made.__dict__["result"] = {**finished.result, "promises": [{"error": entry}]}
    assert "- The 90th percentile of the error over new clients is at most 40.0%, with confidence 95%" in model_card(made, 0, False, [])


def test_the_card_of_a_private_run_states_its_guarantee(tmp_path):
    done = run(experiment("private", "rounds=3"), 3, tmp_path / "run", Onlooker())
    text = model_card(done, 0, False, [])
    assert f"Differential privacy: {done.privacy_line}" in text
    assert "Not covered: the simulator's evaluations" in text
    assert "differential-privacy" in card_data(text).tags


def test_an_export_of_a_model_that_diverged_says_so(tmp_path):
    broken = run(experiment("delta_fl", "local.learning_rate=1e30", "rounds=3"), 0, tmp_path / "broken", Onlooker())
    done = call("export", broken.path, "--out", tmp_path / "out", "--format", "safetensors")
    assert done.exit_code == 0, done.output
    assert "lower the learning rate" in done.stdout
    assert "lower the learning rate" in (tmp_path / "out" / "README.md").read_text().split("## Limits")[1]


# names of a table's columns


@pytest.fixture(scope="module")
def of_table(tmp_path_factory) -> Path:
    """A folder with visits.csv, whose columns are not called x and y, and a finished family trained on it."""
    place = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 2)).round(3)
    rows = [["age", "sick", "site", "dose"], *([a, int(a + b > 0), f"site {k % 12}", b] for k, (a, b) in enumerate(x.tolist()))]
    with (place / "visits.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (place / "visits.toml").write_text(TABLE)
    run(fedtail.experiment.read_experiment(place / "visits.toml"), 0, place / "run", Onlooker())
    return place


TABLE = """\
rounds = 3
[data]
kind = "arrays"
path = "visits.csv"
x = ["dose", "age"]
y = "sick"
client = "site"
split = { train = 0.5, validation = 0.25, test = 0.25 }
[task.module]
part = "LogisticRegression"
features = 2
[sample]
cohort_size = 3
[local]
learning_rate = 0.5
[risk]
part = "Superquantile"
tail_fraction = 0.5
[family]
risk.tail_fraction = [1.0, 0.5]
"""


def test_a_table_is_read_by_the_columns_that_the_run_was_trained_on(of_table):
    given = ("predict", of_table / "run", "--data", of_table / "visits.csv", "--model", "tail_fraction 0.5")
    done = call(*given)
    assert done.exit_code == 0, done.output
    assert done.stdout == call(*given, "--x", "dose", "--x", "age").stdout != call(*given, "--x", "age", "--x", "dose").stdout
    chosen = call("choose", of_table / "run", "--data", of_table / "visits.csv", "--json")
    assert chosen.exit_code == 0, chosen.output
    assert chosen.stdout == call("choose", of_table / "run", "--data", of_table / "visits.csv", "--x", "dose", "--x", "age", "--y", "sick",
                                 "--json").stdout


def test_the_card_says_what_a_single_score_predicts(of_table):
    export_run(find_runs([of_table / "run"])[0], of_table / "out", ["safetensors"], model="tail_fraction 0.5")
    text = (of_table / "out" / "README.md").read_text()
    assert "where there is one score, it predicts class 1 above 0, else class 0" in text


def test_an_export_names_columns_in_their_order_and_classes_by_number(of_table):
    """Who has the file alone cannot know that class 1 is "well", nor which column is the first."""
    one = find_runs([of_table / "run"])[0]
    made = RunFolder(one.path, {**one.about, "classes": ["ill", "well"]})
    assert "Columns of `x`, in this order: `dose`, `age`. Outputs: " in (text := model_card(made, 0, False, []))
    assert "Classes: 0 is `ill`, 1 is `well`." in text
    export_run(made, of_table / "named", ["safetensors"], model="tail_fraction 0.5")
    config = json.loads((of_table / "named" / "config.json").read_text())
    assert (config["columns"], config["class_names"]) == (["dose", "age"], ["ill", "well"])


@pytest.mark.parametrize(("clients", "words"), [(12, "mean | median | worst client | best client |"),
                                                (40, "mean | median | 90th percentile (10th where higher is better) | worst 10% of clients |")])
def test_a_card_shows_the_bad_end_of_each_metric_and_no_tenth_of_a_few_clients(tmp_path, clients, words):
    random = np.random.default_rng(0)
    errors, found = random.beta(2, 6, clients), {}
    for metric, better in (("error", "lower"), ("auc", "higher")):
        values = torch.from_numpy(errors if better == "lower" else 1 - errors)
        found[metric] = {**fedtail.Distribution(values, better=better).summary(), "p0": float(values.min()), "p100": float(values.max())}
    found["auc"]["defined"] = clients - 1
    made = write_folder(tmp_path / "run", errors, metrics=["error", "auc"], better={"error": "lower", "auc": "higher"},
                        experiment={}, rates=True)
    made.__dict__["result"] = {"round": 1, "members": [{"test": found}]}
    text = model_card(made, 0, False, [])
    assert f"| metric | {words}" in text
    [row] = [line for line in text.splitlines() if line.startswith("| auc (higher is better) |")]
    shown = [float(cell) for cell in row.split("|")[2:-2]]
    bad, good = 1 - errors.max(), 1 - errors.min()
    assert shown[2] == pytest.approx(bad if clients < 20 else np.quantile(1 - errors, 0.1), abs=1e-3)
    assert shown[-1] == pytest.approx(good, abs=1e-3) if clients < 20 else shown[3] < shown[2]
    assert row.endswith(f"| {clients - 1} |")
    assert ("show no tail: another one may do worse" in text) == (clients < 20)
    for one in found.values():                                    # as runs of earlier versions, which did not record them
        del one["p0"], one["p100"]
    assert ("| not recorded |" in model_card(made, 0, False, [])) == (clients < 20)


def test_the_exporter_says_nothing_of_packages_that_nobody_asked_for():
    log = logging.getLogger("torch.onnx")
    before = log.level
    with _quiet_exporter():
        assert not logging.getLogger("torch.onnx._internal.exporter").isEnabledFor(logging.WARNING)
    assert log.level == before
