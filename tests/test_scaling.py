"""Scaling of inputs: against numpy and scikit-learn, on training clients only, and kept with the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

import fedtail
from fedtail import Population, Task, fedavg, train
from fedtail.cli import app
from fedtail.data import Scaling
from fedtail.deployment.deployed_experiment import deployed_experiments
from fedtail.experiment import ExperimentError, read_experiment
from fedtail.models import LogisticRegression, SoftmaxRegression
from fedtail.runs import RunFolder, run
from fedtail.runs.choosing import choose_model
from fedtail.runs.models_of_run import load_models
from test_experiment import parsed, refused

from run_cases import Onlooker

random = np.random.default_rng(0)
X = (random.normal(size=(200, 5)) * [1, 1e4, 1e-3, 1, 0] + [0, 1e6, 5, 0, 3]).astype("float32")
Y = ((X[:, 1] - 1e6) / 1e4 + 1000 * (X[:, 2] - 5) > 0).astype(int)
CLIENT = np.arange(200) % 20
PEOPLE = Population.from_arrays(X, Y, CLIENT)


def test_columns_are_those_of_scikit_learn():
    scaled = Scaling.fit(PEOPLE)(PEOPLE)
    wanted = StandardScaler().fit_transform(X.astype(np.float64))[np.argsort(CLIENT, kind="stable")]
    assert scaled.inputs.dtype == torch.float32
    assert scaled.inputs.numpy() == pytest.approx(wanted, abs=1e-4)
    assert scaled.inputs[:, 4].eq(0).all()                                  # what never changes is only shifted
    assert torch.equal(PEOPLE.inputs, Population.from_arrays(X, Y, CLIENT).inputs)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_pixels_and_channels_are_those_of_numpy(examples, channels, seed):
    images = np.random.default_rng(seed).integers(0, 256, (examples, channels, 3, 2)).astype(np.uint8)
    people = Population.from_arrays(images, np.zeros(examples, int), np.arange(examples))
    for by, axes in (("pixels", 0), ("channels", (0, 2, 3))):
        scaling = Scaling.fit(people, by)
        mean, deviation = images.mean(axes, keepdims=True), images.std(axes, keepdims=True)
        wanted = (images - mean) / np.where(deviation > 0, deviation, 1)
        assert scaling.apply(people.inputs).numpy() == pytest.approx(wanted, abs=1e-5)


def test_sequences_are_scaled_without_their_padding():
    rows = [random.normal(3, 2, (k + 1, 2)).astype("float32") for k in range(6)]
    people = Population.from_arrays(rows, np.zeros(6, int), np.arange(6))
    scaled = Scaling.fit(people)(people)
    together = np.concatenate(rows)
    wanted = (together - together.mean(0)) / together.std(0)
    real = torch.arange(6) < people.inputs["lengths"][:, None]
    assert scaled.inputs["sequence"][real].numpy() == pytest.approx(wanted, abs=1e-5)
    assert scaled.inputs["sequence"][~real].eq(0).all()
    assert torch.equal(scaled.inputs["lengths"], people.inputs["lengths"])


def test_of_several_inputs_tokens_stay():
    people = Population.from_arrays({"age": X[:, :1], "words": np.arange(400).reshape(200, 2)}, Y, CLIENT)
    scaled = Scaling.fit(people)(people)
    assert torch.equal(scaled.inputs["words"], people.inputs["words"])
    assert scaled.inputs["age"].std(correction=0).item() == pytest.approx(1)


def test_only_the_clients_it_is_fitted_on_matter():
    chosen = PEOPLE.select([3, 7])
    own = X[np.isin(CLIENT, [3, 7])].astype(np.float64)
    assert Scaling.fit(chosen).shift["x"].numpy() == pytest.approx(own.mean(0))
    assert Scaling.fit(chosen).scale["x"].numpy()[:4] == pytest.approx(own.std(0)[:4], rel=1e-6)


def test_a_scaling_is_read_as_it_was_written_and_goes_before_a_module(tmp_path):
    for people in (PEOPLE, Population.from_arrays({"age": X[:, :1], "words": np.arange(200)}, Y, CLIENT)):
        scaling = Scaling.fit(people)
        (tmp_path / "scaling.safetensors").write_bytes(scaling.to_bytes())
        again = Scaling.load(tmp_path)
        assert (again.fitted, again.is_dict, list(again.shift)) == (True, isinstance(people.inputs, dict), list(scaling.shift))
        name = next(iter(scaling.shift))
        assert torch.equal(again.shift[name], scaling.shift[name])
        assert torch.equal(again.scale[name], scaling.scale[name])
    module = torch.nn.Linear(5, 2)
    scaling = Scaling.fit(PEOPLE)
    whole = scaling.before(module)
    assert torch.allclose(whole(PEOPLE.inputs), module(scaling.apply(PEOPLE.inputs)), atol=1e-5)
    assert {"shift_x", "scale_x", "module.weight"} <= whole.state_dict().keys()

    class Two(torch.nn.Module):
        def forward(self, age, words):
            return age[:, 0] + words

    two = Population.from_arrays({"age": X[:, :1], "words": np.arange(200)}, Y, CLIENT)
    fitted = Scaling.fit(two)
    assert torch.allclose(fitted.before(Two())(**two.inputs), Two()(**fitted.apply(two.inputs)))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Scaling.fit(PEOPLE, "rows"), 'scale must be "columns", "pixels" or "channels", got \'rows\'.'),
    (lambda: Scaling.fit(PEOPLE, "channels"), "scale = 'channels', but x has examples of shape (5,). Channels are those of"),
    (lambda: Scaling.fit(Population.from_arrays(np.zeros((4, 2, 2)), [0] * 4, [0] * 4)), "but x has examples of shape (2, 2). Columns are"),
    (lambda: Scaling.fit(Scaling.fit(PEOPLE)(PEOPLE)), "these inputs are scaled already"),
    (lambda: Scaling.public(0, 255)(Scaling.fit(PEOPLE)(PEOPLE)), "these inputs are scaled already"),
    (lambda: Scaling.fit(Population.from_arrays([[1, 2], [3]], [0, 1], [0, 1])), "holds floats or bytes, and tokens are not scaled"),
    (lambda: Scaling.public(0, 0), "scale must be positive and finite"),
    (lambda: Scaling.fit(PEOPLE).apply(torch.zeros(3, 4)), "the scaling is for examples of shape (5,), got (4,)."),
    (lambda: Scaling.fit(PEOPLE).apply({"x": torch.zeros(3, 5)}), "the scaling is for inputs x (one tensor), got x."),
    (lambda: Scaling.fit(PEOPLE)(PEOPLE).save("nowhere"), "Save the population before it is scaled"),
])
def test_scalings_are_refused_in_words(make, text):
    with pytest.raises(ValueError) as reason:
        make()
    assert text in str(reason.value)


def test_files_that_are_no_scaling_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="inputs were not scaled"):
        Scaling.load(tmp_path)
    (tmp_path / "scaling.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no scaling that can be read"):
        Scaling.load(tmp_path)


# private training

def test_a_private_method_takes_public_numbers_only():
    method = fedtail.dp_fedavg(20, 0.1, 1.0, cohort_size=10, batch_size=None)
    task = Task(SoftmaxRegression(5, 2))
    with pytest.raises(ValueError, match="were scaled by means and deviations of the clients' data"):
        train(method, task, Scaling.fit(PEOPLE)(PEOPLE), rounds=1)
    train(method, task, Scaling.public([0, 1e6, 5, 0, 3], [1, 1e4, 1e-3, 1, 1])(PEOPLE), rounds=1)
    train(fedavg(10), task, Scaling.fit(PEOPLE)(PEOPLE), rounds=1)


# files

FILE = """\
rounds = 20
[data]
kind = "arrays"
path = "d.npz"
scale = {scale}
split = {{ train = 0.6, validation = 0.2, test = 0.2, seed = 3 }}
[task.module]
part = "LogisticRegression"
features = 5
[sample]
part = "Everyone"
"""


@pytest.fixture
def file(tmp_path) -> Path:
    np.savez(tmp_path / "d.npz", x=X, y=Y, client=CLIENT)
    (tmp_path / "e.toml").write_text(FILE.format(scale='"columns"'))
    return tmp_path / "e.toml"


def test_a_file_scales_by_its_training_clients(file):
    experiment = read_experiment(file)
    splits = experiment.data.load(0)
    plain = replace(experiment.data, scale=None).load(0)
    wanted = Scaling.fit(plain["train"])
    for name, population in splits.items():
        assert torch.equal(population.inputs, wanted.apply(plain[name].inputs))
        assert population.names is not None
        assert population.names.tolist() == plain[name].names.tolist()
        assert population.scaling is splits["train"].scaling
        assert population.inputs is splits["train"].inputs                  # shared between splits, as before
    assert read_experiment(file).as_table()["data"]["scale"] == "columns"


def test_a_run_keeps_its_scaling_and_a_model_chosen_by_it_takes_inputs_as_they_are(file, tmp_path):
    experiment = read_experiment(file)
    folder = run(experiment, 0, tmp_path / "run", Onlooker())
    scaling = Scaling.load(folder.path)
    assert torch.equal(scaling.shift["x"], experiment.data.load(0)["train"].scaling.shift["x"])
    assert "scaling.safetensors" in folder.result["files"]
    test = replace(experiment.data, scale=None).load(0)["test"]
    _, [module] = load_models(folder)
    x, y = test.inputs[test.example_clients_and_rows()[1]], test.targets[test.example_clients_and_rows()[1]]
    wrong = ((module(x) > 0).long() != y).float().mean().item()
    assert torch.equal(folder.module()(x), module(x))                       # RunFolder.module scales too
    assert wrong == pytest.approx(folder.result["members"][0]["test"]["error"]["mean"] / 1, abs=1e-6)      # clients have 10 each
    assert wrong < 0.15                                                                                 # unscaled it learns nothing
    np.savez(tmp_path / "mine.npz", x=x.numpy(), y=y.numpy())
    assert choose_model(folder.path, tmp_path / "mine.npz")["models"][0]["error"] == pytest.approx(100 * wrong, abs=1e-4)
    done = CliRunner().invoke(app, ["predict", str(folder.path), "--data", str(tmp_path / "mine.npz"), "--out", str(tmp_path / "p.npz")])
    assert done.exit_code == 0, done.output
    assert (np.load(tmp_path / "p.npz")["prediction"] != y.numpy()).mean() == pytest.approx(wrong, abs=1e-6)
    exported = CliRunner().invoke(app, ["export", str(folder.path), "--format", "torch", "--out", str(tmp_path / "export")])
    assert exported.exit_code == 0, exported.output
    again = torch.export.load(tmp_path / "export" / "model.pt2").module()
    assert torch.allclose(again(x), module(x), atol=1e-5)
    CliRunner().invoke(app, ["export", str(folder.path), "--format", "safetensors", "--out", str(tmp_path / "card")])
    card = (tmp_path / "card" / "README.md").read_text()
    names = {"module": LogisticRegression(5), "x": x}
    code = card.split("begin with `module.`:")[1].split("```python\n")[1].split("```")[0]
    exec(code.replace("model.safetensors", str(tmp_path / "card" / "model.safetensors")), names)      # as the card says
    assert torch.allclose(names["outputs"], module(x), atol=1e-5)
    assert RunFolder.open(folder.path).about["experiment"]["data"]["scale"] == "columns"


def test_a_file_scales_by_public_numbers(file):
    file.write_text(FILE.format(scale="{ shift = [0, 1e6, 5, 0, 3], scale = 2.0 }"))
    experiment = read_experiment(file)
    inputs = experiment.data.load(0)["train"].inputs
    assert inputs.numpy() == pytest.approx((X[np.argsort(CLIENT, kind="stable")] - np.float32([0, 1e6, 5, 0, 3])) / 2, rel=1e-6)
    assert not experiment.data.load(0)["train"].scaling.fitted
    table = experiment.as_table()["data"]["scale"]
    assert table == {"shift": [0.0, 1e6, 5.0, 0.0, 3.0], "scale": 2.0}


def test_files_with_other_scales_are_refused(file):
    def text(scale: str) -> str:
        return FILE.format(scale=scale).replace("d.npz", str(file.parent / "d.npz"))

    assert 'line 5: scale must be "columns", "pixels", "channels", or { shift' in refused(text('"rows"'))
    assert "line 5: scale has no field 'mean'" in refused(text("{ mean = 1.0 }"))
    assert "scale must be positive and finite" in refused(text("{ scale = 0.0 }"))
    with pytest.raises(ExperimentError, match="line 5: scale = 'channels', but x has examples of shape"):
        parsed(text('"channels"')).data.load(0)
    with pytest.raises(ExperimentError, match="inputs cannot be scaled by a file on a deployment"):
        deployed_experiments(file)
    private = text('"columns"').replace('part = "Everyone"', 'part = "Poisson"\nrate = 0.5') + (
        '[aggregate]\npart = "PrivateMean"\nclip_norm = 0.1\ntotal = 6.0\nnoise = { noise_multiplier = 1.0 }\n[privacy]\ndelta = 1e-3\n')
    with pytest.raises(ExperimentError, match="were scaled by means and deviations of the clients' data"):
        run(parsed(private), 0, file.parent / "private", Onlooker())
