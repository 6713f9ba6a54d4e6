"""Whose code an experiment file may run: nothing at mere reading, and only what the user has allowed."""

from __future__ import annotations

import functools
import sys
import tomllib
from pathlib import Path

import attack_experiment_runs_a_command as commands
import pytest
import tomli_w
import torch
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.deployment.policy_example import write_policy
from fedtail.deployment.settings import NodeSettings
from fedtail.experiment import AS_WRITTEN, ExperimentError, Source, Trust, read_experiment, read_experiments
from fedtail.experiment.experiment import build_experiments
from fedtail.experiment.part_tables import SLOTS
from fedtail.experiment.trust import module_file_in_folder
from fedtail.secure.encoding import Refused

BASE = """\
rounds = 2
[data]
kind = "synthetic"
alpha = 1
beta = 1
clients = 20
sizes = "moderate"
[task.module]
part = "SoftmaxRegression"
features = 60
classes = 10
[sample]
cohort_size = 8
"""
MINE = """
import os
import subprocess
from dataclasses import dataclass
from functools import partial
from subprocess import getoutput
import fedtail, torch

@dataclass(frozen=True)
class Mine(fedtail.Risk):
    strength: float = 1.0
    def value(self, losses, mass=None): return losses.mean()

class Net(torch.nn.Linear):
    def __init__(self): super().__init__(60, 10)

@dataclass
class NoPart:
    cmd: str = ""

def net(): return Net()
def loss(outputs, targets): return fedtail.losses.cross_entropy(outputs, targets)
small = partial(loss)
hidden = partial(getoutput)
number = 3
"""
NAMES = iter(range(1000))


@pytest.fixture
def mine(tmp_path) -> str:
    """A module beside the experiment, each time another: modules stay loaded."""
    name = f"mine_trusted_{next(NAMES)}"
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


def given(text: str, folder: Path, trust: object = ()) -> fedtail.experiment.Experiment:
    return build_experiments(Source.parse(text, "e.toml", folder, (), trust), "e")[0]


def refused(text: str, folder: Path, trust: object = ()) -> str:
    with pytest.raises(ExperimentError) as reason:
        given(text, folder, trust)
    return str(reason.value)


def risk(name: str) -> str:
    return BASE + f'[risk]\npart = "{name}"\n'


def module(name: str, more: str = "") -> str:
    return BASE.replace('part = "SoftmaxRegression"\nfeatures = 60\nclasses = 10', f'part = "{name}"\n{more}')


def test_no_command_that_reads_or_runs_a_file_executes_what_it_names():
    outcome = commands.attack()
    assert outcome.held, outcome.measured


def test_a_refusal_names_the_file_and_what_to_write(mine, tmp_path, monkeypatch):
    text = refused(risk(f"{mine}:Mine"), tmp_path)
    assert text.startswith(f"e.toml, line 15: '{mine}:Mine' is not fedtail's: it would import {tmp_path / mine}.py, and that runs")
    assert f"write --trust {tmp_path} " in text
    monkeypatch.chdir(tmp_path.parent)
    assert f"write --trust ./{tmp_path.name} " in refused(risk(f"{mine}:Mine"), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "write --trust . " in refused(risk(f"{mine}:Mine"), tmp_path)
    package = refused(module("torch.nn:Linear"), tmp_path)
    assert "it would import the installed package torch" in package
    assert "write --trust torch " in package
    assert mine not in sys.modules


def test_what_is_trusted_is_imported_and_nothing_else(mine, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for trust in ("torch", mine, tmp_path / "elsewhere", [], AS_WRITTEN):
        if trust is not AS_WRITTEN:
            assert "is not fedtail's" in refused(risk(f"{mine}:Mine"), tmp_path, trust)
        else:
            given(risk(f"{mine}:Mine"), tmp_path, trust)
        assert mine not in sys.modules
    for trust in (tmp_path, str(tmp_path), [tmp_path.parent], Trust.from_names([tmp_path])):
        assert type(given(risk(f"{mine}:Mine"), tmp_path, trust).algorithm.risk).__name__ == "Mine"
    task = given(module("torch.nn:Linear", "in_features = 60\nout_features = 10"), tmp_path, "torch").task.make(0)
    assert isinstance(task.module, torch.nn.Linear)
    assert given(risk("fedtail.risk:Worst"), tmp_path).algorithm.risk == fedtail.Worst()      # ours needs no leave


def test_a_file_cannot_say_itself_that_it_is_trusted(mine, tmp_path):
    other = tmp_path / "sub"
    other.mkdir()
    sent = f'folder = "{tmp_path}"\n' + risk(f"{mine}:Mine")                # as a resolved experiment says where its code is
    assert "is not fedtail's" in refused(sent, other, other)
    assert "there is no section or setting 'trust'" in refused('trust = ["."]\n' + BASE, tmp_path)
    given(sent, other, tmp_path)


def test_a_module_beside_the_file_does_not_pass_for_a_trusted_package(tmp_path):
    """Nor do the imports of a trusted package find files in a folder that is not."""
    (tmp_path / "wave.py").write_text("raise SystemExit('executed')\n")
    (tmp_path / "xdrlib.py").write_text("raise SystemExit('executed')\n")
    assert "it would import" in refused(risk("wave:Mine"), tmp_path, "wave")
    package = tmp_path / "site"
    package.mkdir()
    (package / "curious_package.py").write_text("import sys\nfrom dataclasses import dataclass\nimport fedtail\nPATH = list(sys.path)\n"
                                                "@dataclass(frozen=True)\nclass Own(fedtail.Mean): pass\n")
    sys.path.append(str(package))
    try:
        given(risk("curious_package:Own"), tmp_path, "curious_package")
        assert str(tmp_path) not in sys.modules["curious_package"].PATH
    finally:
        sys.path.remove(str(package))


def test_a_link_out_of_a_trusted_folder_is_not_followed(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
    (outside / "linked_code.py").write_text(MINE)
    (inside / "linked_code.py").symlink_to(outside / "linked_code.py")
    assert "linked_code.py, and that runs the code in it" in refused(risk("linked_code:Mine"), inside, inside)
    assert "linked_code" not in sys.modules


@pytest.mark.parametrize(("text", "problem"), [
    (lambda name: risk(f"{name}:net"), "is not a class, and risk needs one with a method density."),
    (lambda name: risk(f"{name}:getoutput"), "is not a class"),
    (lambda name: risk(f"{name}:NoPart"), "has no method density"),
    (lambda name: risk(f"{name}:subprocess.Popen"), "leads into the module subprocess, which is not trusted"),
    (lambda name: module(f"{name}:os.system"), "leads into the module os, which is not trusted"),
    (lambda name: module(f"{name}:getoutput", 'cmd = "id"'), "is a function of subprocess, which is not trusted"),
    (lambda name: module(f"{name}:hidden", 'cmd = "id"'), "is a function of subprocess, which is not trusted"),
    (lambda name: module(f"{name}:number"), "is not a class"),
    (lambda name: BASE.replace("[task.module]", f'[task]\nloss = "{name}:number"\n[task.module]'), "is a int, a function is needed"),
    (lambda name: BASE.replace('kind = "synthetic"', f'kind = "{name}:getoutput"'), "is a function of subprocess"),
    (lambda name: BASE + f'[local]\nschedule = {{ part = "{name}:NoPart" }}\n', "has no method __call__"),
    (lambda name: module("fedtail.runs.files:write_atomically", 'path = "x"\ncontent = "y"'), "is a function of fedtail.runs.files"),
    (lambda name: BASE.replace('kind = "synthetic"', 'kind = "fedtail.runs.files:write_atomically"'), "is a function of fedtail.runs.files"),
    (lambda name: risk("fedtail.runs:RunFolder"), "has no method density"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_named_is_checked_before_it_is_called(mine, tmp_path, text, problem):
    assert problem in refused(text(mine), tmp_path, tmp_path)
    assert not (tmp_path / "x").exists()


def test_functions_of_a_trusted_file_are_taken(mine, tmp_path):
    text = module(f"{mine}:net").replace("[task.module]", f'[task]\nloss = "{mine}:small"\nerror = "{mine}:loss"\n[task.module]')
    task = given(text, tmp_path, tmp_path).task.make(0)
    assert isinstance(task.loss, functools.partial)
    assert type(task.module).__name__ == "Net"


def test_anything_means_some_part():
    from fedtail.experiment.part_tables import ANYTHING

    assert ANYTHING.fits(fedtail.Superquantile)
    assert not ANYTHING.fits(Path)
    assert not any(slot.fits(dict) for slot in SLOTS.values())


OWN = """\
rounds = 2
[data]
kind = "nowhere:people"
clients = 3
[task]
loss = "nowhere:loss"
metrics = [{ name = "a", function = "nowhere:metric", better = "higher" }]
[task.module]
part = "nowhere:Net"
width = 3
[sample]
cohort_size = 8
[local]
learning_rate = 0.1
penalty = { part = "nowhere:Penalty", strength = 2 }
[risk]
part = "nowhere:Risk"
inner = { part = "Worst" }
[evaluate]
finetune = { part = "nowhere:Local" }
"""


@pytest.mark.parametrize("more", ["", "[family]\nrisk.inner.part = [\"Mean\", \"Worst\"]\n", "[[method]]\nname = \"a\"\n"])
def test_show_prints_what_it_can_and_imports_nothing(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(OWN + more)
    done = CliRunner().invoke(app, ["show", "e.toml"])
    assert done.exit_code == 0, done.output
    for line in ('kind = "nowhere:people"', 'part = "nowhere:Net"', "width = 3", 'loss = "nowhere:loss"', 'part = "nowhere:Penalty"',
                 'part = "nowhere:Risk"', 'function = "nowhere:metric"', 'part = "LocalSGD"', "momentum = 0.0", 'part = "nowhere:Local"'):
        assert line in done.stdout, line
    shown = Path("shown.toml")
    shown.write_text(done.stdout)
    again = CliRunner().invoke(app, ["show", "shown.toml"]).stdout
    assert tomllib.loads(again) == tomllib.loads(done.stdout)
    [experiment] = read_experiments("shown.toml", (), AS_WRITTEN)
    for use in (lambda: experiment.data.load(0), lambda: experiment.task.make(0)):
        with pytest.raises(ExperimentError, match="was read as a name only"):
            use()
    wrong = CliRunner().invoke(app, ["show", "e.toml", "--set", "sample.cohort_size=0"])
    assert (wrong.exit_code, "cohort_size" in wrong.stderr) == (2, True)      # what is ours is still checked


def test_a_deployment_is_written_without_importing_and_nodes_decide_themselves(mine, tmp_path):
    import numpy as np

    (tmp_path / "e.toml").write_text(risk(f"{mine}:Mine"))
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "d"), "--experiment", str(tmp_path / "e.toml")])
    assert done.exit_code == 0, done.output
    assert mine not in sys.modules
    node = tmp_path / "d" / "nodes" / "node-1"
    (node / f"{mine}.py").write_text(MINE)
    np.savez(node / "d.npz", x=np.zeros((4, 60), "float32"), y=np.zeros(4, int), client=[0, 0, 1, 1])
    told = (node / "node.toml").read_text().replace("data.parquet", "d.npz")
    assert "trust = []" in told
    (node / "node.toml").write_text(told)
    with pytest.raises(ExperimentError, match=r"in node.toml trust = \[\"\.\"\] for the node's own folder"):
        NodeSettings.read(node / "node.toml").make_node(0)
    (node / "node.toml").write_text(told.replace("trust = []", 'trust = ["."]'))
    for use in (write_policy, lambda settings: settings.make_node(0)):      # the folder came from whoever runs the server
        with pytest.raises(Refused, match=rf"not accepted it as it is: {mine}.py. Nothing of it was run"):
            use(NodeSettings.read(node / "node.toml"))
    assert mine not in sys.modules
    for command in ("init", "check", "accept", "status", "budget", "run"):
        done = CliRunner().invoke(app, ["node", command, str(node / "node.toml")])
        assert done.exit_code, command
        assert "Nothing of it was run" in done.stderr or "policy.toml" in done.stderr, (command, done.stderr)
    assert mine not in sys.modules
    (node / "other.toml").write_text("allow_code = true\n" + told)
    with pytest.raises(ValueError, match="has no setting 'allow_code'"):
        NodeSettings.read(node / "other.toml")
    assert CliRunner().invoke(app, ["node", "init", str(node / "node.toml"), "--trust"]).exit_code == 0
    asked = CliRunner().invoke(app, ["node", "accept", str(node / "node.toml"), "--trust"]).stdout.strip()
    assert asked.splitlines()[-1].split()[-2] == "--trust"
    assert CliRunner().invoke(app, ["node", "accept", str(node / "node.toml"), "--trust", asked.split()[-1]]).exit_code == 0
    assert "Mine" in NodeSettings.read(node / "node.toml").make_node(0).types
    assert CliRunner().invoke(app, ["node", "check", str(node / "node.toml")]).exit_code == 0
    (node / "another.py").write_text("raise SystemExit\n")
    with pytest.raises(Refused, match=r"not accepted it as it is: another\.py"):
        NodeSettings.read(node / "node.toml").read_experiments()


@pytest.mark.parametrize(("trust", "problem"), [
    ("./no/such/folder", "is not a folder"), ([3], "must name folders or packages"), ("a b", "is not a folder")])
def test_what_cannot_be_trusted_is_refused(trust, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        Trust.from_names(trust)


def test_files_are_found_without_importing(tmp_path):
    (tmp_path / "a.py").write_text("raise SystemExit\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "b.py").write_text("raise SystemExit\n")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("raise SystemExit\n")
    assert module_file_in_folder(tmp_path, "a") == tmp_path / "a.py"
    assert module_file_in_folder(tmp_path, "pack.b") == tmp_path / "pack" / "b.py"
    assert module_file_in_folder(tmp_path, "whole.x") == tmp_path / "whole" / "__init__.py"
    assert module_file_in_folder(tmp_path, "torch") is None


def test_a_run_with_code_of_ones_own_goes_from_run_to_choose(mine, tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(module(f"{mine}:Net"))
    assert CliRunner().invoke(app, ["run", "e.toml", "--out", "r", "--trust", "."]).exit_code == 0
    np.savez("mine.npz", x=np.zeros((2, 60), "float32"), y=np.zeros(2, int))
    assert "is not fedtail's" in CliRunner().invoke(app, ["choose", "r", "--data", "mine.npz"]).stderr
    assert CliRunner().invoke(app, ["choose", "r", "--data", "mine.npz", "--trust", "."]).exit_code == 0
    assert CliRunner().invoke(app, ["report", "r"]).exit_code == 0
    assert tomli_w.dumps(read_experiment("r/experiment.toml", trust=".").as_table())
