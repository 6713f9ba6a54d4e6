"""Experiment files: what they give, and how they are refused."""

from __future__ import annotations

import pickle
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

import fedtail
from fedtail.data import Population, label_shift, synthetic
from fedtail.errors import FieldError
from fedtail.experiment import ExperimentError, Source, parse_seeds, read_experiment, read_experiments
from fedtail.experiment.data_sources import data_fingerprint
from fedtail.experiment.experiment import build_experiments
from fedtail.experiment.part_tables import SLOTS, PartPlan
from fedtail.experiment.starter import starter_text

BASE = """\
rounds = 4
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


def parsed(text: str, *settings: str, folder: Path = Path(), trust: object = ()) -> fedtail.experiment.Experiment:
    [experiment] = build_experiments(Source.parse(text, "e.toml", folder, settings, trust), "e")
    return experiment


def refused(text: str, *settings: str, folder: Path = Path(), trust: object = ("collections", "no_such_module")) -> str:
    with pytest.raises(ExperimentError) as reason:
        build_experiments(Source.parse(text, "e.toml", folder, settings, trust), "e")
    return str(reason.value)


# What a file gives

RECIPES = {
    "fedavg": ("", fedtail.fedavg(8)),
    "fedprox": ('[local]\npenalty = { part = "Proximal", strength = 0.1 }', fedtail.fedprox(0.1, 8)),
    "delta_fl": ('[risk]\npart = "Superquantile"\ntail_fraction = 0.3', fedtail.delta_fl(0.3, 8)),
    "filter": ('[risk]\npart = "TailFilter"\ntail_fraction = 0.3\nquantile = { part = "ExactQuantile", bits = 12 }',
               fedtail.delta_fl(0.3, 8, form="filter", quantile=fedtail.ExactQuantile(12))),
    "smoothed": ('[risk]\npart = "SmoothedSuperquantile"\ntail_fraction = 0.3\nsmoothing = 0.1',
                 fedtail.delta_fl(0.3, 8, form="smoothed")),
    "refreshed": ('[risk]\npart = "Refreshed"\nevery = 5\nrisk = { part = "Superquantile", tail_fraction = 0.3 }',
                  fedtail.delta_fl(0.3, 8, refresh_every=5)),
    "q_maml": ('[local]\npart = "MAML"\ninner_steps = 2\n[risk]\npart = "PowerFair"\npower = 1\n[aggregate]\npart = "CurvatureMean"', fedtail.q_maml(1.0, 8, inner_steps=2)),
    "per_fedavg": ('[local]\npart = "MAML"\ndifference_step = 0.001\nlocal_steps = 3\nbatch_size = 5\n[personal]\npart = "FineTuning"\n'
                   'local = { learning_rate = 0.1, batch_size = "none", local_steps = 1 }', fedtail.per_fedavg(8, local_steps=3, batch_size=5)),
    "l2sgd": ('[local]\npart = "MeanRegularised"\nstrength = 0.2\nlocal = { learning_rate = 0.05 }\n[aggregate]\npart = "MeanOfModels"\n[personal]\npart = "KeptByLocal"',
              fedtail.l2sgd(0.2, 8, learning_rate=0.05)),
    "symmetrised KL": ('[personal]\npart = "FineTuning"\nlocal = { epochs = 3, penalty = { part = "SymmetrisedKL", strength = 0.5 } }',
                       replace(fedtail.fedavg(8), personal=fedtail.personal.FineTuning(fedtail.LocalSGD(epochs=3, penalty=fedtail.local.SymmetrisedKL(0.5))))),
    "alpha fair": ('[risk]\npart = "AlphaFair"\nalpha = 2\nloss_bound = 9', replace(fedtail.fedavg(8), risk=fedtail.AlphaFair(2.0, 9.0))),
    "q_ffl": ('[risk]\npart = "PowerFair"\npower = 1\n[aggregate]\npart = "CurvatureMean"', fedtail.q_ffl(1.0, 8)),
    "term": ('[risk]\npart = "Tilted"\ntilt = 2\nloss_bound = 4', fedtail.term(2.0, 8, loss_bound=4.0)),
    "afl": ('[sample]\npart = "Everyone"\n[risk]\npart = "Ascent"\nstep = 0.2\n[iterate]\npart = "AveragedIterate"', fedtail.afl(0.2)),
    "local": ('[local]\nlearning_rate = 1\nbatch_size = "none"\nlocal_steps = 3\nmomentum = 0.9\n'
              'schedule = { part = "StepDecay", factor = 0.5, every = 3 }\nwork = { part = "Stragglers", fraction = 0.5 }',
              fedtail.fedavg(8, learning_rate=1.0, batch_size=None, local_steps=3, momentum=0.9,
                             schedule=fedtail.StepDecay(0.5, 3), work=fedtail.Stragglers(0.5))),
    "exact stragglers": ('[local]\nepochs = 20\nwork = { part = "Stragglers", fraction = 0.9, drop = true, exact = true }',
                         fedtail.fedavg(8, epochs=20, work=fedtail.Stragglers(0.9, drop=True, exact=True))),
    "participants": ('[sample]\npart = "Everyone"\n[local.work]\npart = "Participants"\ncount = 5\nwork = { part = "Stragglers", fraction = 0.5 }',
                     replace(fedtail.fedavg(work=fedtail.Participants(5, fedtail.Stragglers(0.5))), sample=fedtail.Everyone())),
    "deadline": ('[local.work]\npart = "Deadline"\nseconds = 60\nspeeds = { part = "LogNormalSpeeds", spread = 1.0 }',
                 fedtail.fedavg(8, work=fedtail.Deadline(60.0, fedtail.LogNormalSpeeds(1.0)))),
    "speeds by name": ('[local.work]\npart = "Deadline"\nseconds = 60\nspeeds = { part = "SpeedTable", client = ["a", "b"], speed = [1, 0.5] }',
                       fedtail.fedavg(8, work=fedtail.Deadline(60.0, fedtail.SpeedTable(("a", "b"), (1.0, 0.5))))),
    "equal clients": ('[sample]\npart = "EqualClients"\ncohort_size = 8', replace(fedtail.fedavg(), sample=fedtail.EqualClients(8))),
    "by size": ('[sample]\npart = "BySize"\ncohort_size = 8\nweighted = true', replace(fedtail.fedavg(), sample=fedtail.BySize(8, weighted=True))),
    "first arrivals": ('[sample]\npart = "FirstArrivals"\ncohort_size = 8\nfactor = 1.3\nspeeds = { part = "LogNormalSpeeds", spread = 1.0 }',
                       replace(fedtail.fedavg(), sample=fedtail.FirstArrivals(8, 1.3, fedtail.LogNormalSpeeds(1.0)))),
    "available": ('[sample]\npart = "Available"\nsample = { part = "Uniform", cohort_size = 8 }\navailability = { part = "Diurnal", period = 24, share = 0.3 }',
                  replace(fedtail.fedavg(), sample=fedtail.Available(fedtail.Uniform(8), fedtail.Diurnal(24.0, 0.3)))),
    "trace": ('[sample]\npart = "Available"\nsample = { part = "Uniform", cohort_size = 8 }\n'
              'availability = { part = "Trace", client = [1, 2], start = [0, 1.5], end = [3, 4], period = 5 }',
              replace(fedtail.fedavg(), sample=fedtail.Available(fedtail.Uniform(8), fedtail.Trace([1, 2], [0, 1.5], [3, 4], 5)))),
    "floor": ('[risk]\npart = "TailFloor"\nleast = 5\nrisk = { part = "Superquantile", tail_fraction = 0.3 }', fedtail.delta_fl(0.3, 8, least_contributors=5)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_gives_the_parts_of_the_recipe(name):
    text, recipe = RECIPES[name]
    base = BASE.replace("[sample]\ncohort_size = 8\n", "") if "[sample]" in text else BASE
    assert repr(parsed(base + text).algorithm) == repr(recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_the_resolved_experiment_gives_itself_again(name):
    text, _ = RECIPES[name]
    base = BASE.replace("[sample]\ncohort_size = 8\n", "") if "[sample]" in text else BASE
    first = parsed(base + text)
    again = parsed(tomli_w.dumps(first.as_table()))
    assert again.as_table() == first.as_table()
    assert repr(again.algorithm) == repr(first.algorithm)
    assert data_fingerprint(again.data.load(0)) == data_fingerprint(first.data.load(0))


def test_traces_and_speeds_are_read_from_files_beside_the_experiment(tmp_path):
    (tmp_path / "trace.csv").write_text("key,start,end\n3,0,2\n4,1,9\n")
    (tmp_path / "speeds.csv").write_text("key,steps_per_second\n" + "".join(f"{k},{k + 1}\n" for k in range(20)))
    text = BASE.replace("cohort_size = 8\n", """part = "Available"
sample = { part = "FirstArrivals", cohort_size = 2, factor = 1.5, speeds = { part = "SpeedFile", file = "speeds.csv" } }
availability = { part = "TraceFile", file = "trace.csv", period = 9 }
""") + '[local.work]\npart = "Deadline"\nseconds = 2\nspeeds = { part = "SpeedFile", file = "speeds.csv" }\n'
    experiment = parsed(text, folder=tmp_path)
    sample, work = experiment.algorithm.sample, experiment.algorithm.local.work
    assert (sample.availability.file, sample.availability.cycle) == (tmp_path / "trace.csv", 9)
    assert sample.sample.speeds.table == work.speeds.table == fedtail.read_speeds(tmp_path / "speeds.csv")
    assert parsed(tomli_w.dumps(experiment.as_table())).as_table() == experiment.as_table()
    population = experiment.data.load(0)["train"]
    assert [sample(population, 0, number).key.tolist() for number in (0, 1, 5, 9)] == [[3], [3, 4], [4], [3]]
    wrong = text.replace("trace.csv", "gone.csv")
    assert "gone.csv cannot be read: No such file or directory." in refused(wrong, folder=tmp_path)
    assert "fedtail.sampling has no part 'Uniform' for availability." in refused(text.replace('"TraceFile"', '"Uniform"'), folder=tmp_path)


def test_every_public_part_of_a_method_can_be_named():
    """A part that is added to the package is found without being listed here."""
    named = {name for slot in SLOTS.values() for name in slot.candidates()}
    rooms = ("fedtail.sampling", "fedtail.local", "fedtail.risk", "fedtail.aggregation", "fedtail.server", "fedtail.iterates",
             "fedtail.quantiles", "fedtail.channel", "fedtail.speeds")
    public = {name for name in fedtail.__all__ if isinstance(getattr(fedtail, name), type)
              and getattr(fedtail, name).__module__.startswith(rooms)} - {"Risk"}
    assert public <= named
    assert set(fedtail.models.__all__) <= named


def test_settings_from_the_command_line_win_and_are_toml_values():
    experiment = parsed(BASE, "rounds=7", "risk.part=Superquantile", "risk.tail_fraction=0.25", "local.batch_size=none", 'name="x y"')
    assert (experiment.rounds, experiment.name) == (7, "x y")
    assert experiment.algorithm.risk == fedtail.Superquantile(0.25)
    assert experiment.algorithm.local.batch_size is None


def test_methods_change_fields_or_replace_parts():
    text = BASE + """
[risk]
part = "Superquantile"
tail_fraction = 0.5
quantile = { part = "ExactQuantile", bits = 16 }
[[method]]
name = "a"
[[method]]
name = "b"
risk = { tail_fraction = 0.2 }
[[method]]
name = "c"
risk = "Worst"
rounds = 9
[method.local]
learning_rate = 0.5
"""
    a, b, c = build_experiments(Source.parse(text, "e.toml", Path()), "e")
    assert a.algorithm.risk == fedtail.Superquantile(0.5, fedtail.ExactQuantile(16))
    assert b.algorithm.risk == fedtail.Superquantile(0.2, fedtail.ExactQuantile(16))
    assert c.algorithm.risk == fedtail.Worst()
    assert (a.rounds, c.rounds, a.algorithm.local.learning_rate, c.algorithm.local.learning_rate) == (4, 9, 0.1, 0.5)
    assert [e.name for e in (a, b, c)] == ["a", "b", "c"]


def test_a_method_that_names_the_part_that_is_meant_changes_its_fields():
    text = BASE + """
risk = "Worst"
[local]
learning_rate = 0.7
epochs = 9
[[method]]
name = "a"
local = { part = "LocalSGD", batch_size = 3 }
[[method]]
name = "b"
risk = { part = "Superquantile", tail_fraction = 0.5 }
rounds = 9
"""
    text = text.replace('risk = "Worst"\n', "").replace("rounds = 4", 'rounds = 4\nrisk = "Worst"')
    a, b = build_experiments(Source.parse(text, "e.toml", Path()), "e")
    assert (a.algorithm.local.learning_rate, a.algorithm.local.epochs, a.algorithm.local.batch_size) == (0.7, 9, 3)
    assert (a.algorithm.risk, b.algorithm.risk) == (fedtail.Worst(), fedtail.Superquantile(0.5))
    told = build_experiments(Source.parse(text, "e.toml", Path(), ["rounds=2", "local.learning_rate=0.2"]), "e")
    assert [(e.rounds, e.algorithm.local.learning_rate) for e in told] == [(2, 0.2), (2, 0.2)]      # --set wins


OWN = """
from dataclasses import dataclass, field
from pathlib import Path
import fedtail, torch

@dataclass(frozen=True)
class Both(fedtail.Risk):
    first: fedtail.Risk = fedtail.Mean()
    sample: str = "text"
    file: Path = Path("x")
    def value(self, losses, mass=None): return self.first.value(losses, mass)
    @dataclass(frozen=True)
    class Inner(fedtail.Risk):
        def value(self, losses, mass=None): return losses.mean()

class Net(torch.nn.Module):
    def __init__(self, hidden=None):
        super().__init__()
        self.hidden, self.last = hidden, torch.nn.Linear(60, 10)
    def forward(self, x): return self.last(x)

class NotADataclass(fedtail.Risk):
    pass

def odd(): return 3
"""


def test_your_own_parts_hold_parts_text_paths_and_nothing(tmp_path):
    (tmp_path / "mine_holding.py").write_text(OWN)
    text = BASE.replace("SoftmaxRegression", "mine_holding:Net").replace("features = 60\nclasses = 10\n", "")
    text += '[risk]\npart = "mine_holding:Both"\nfirst = { part = "Worst" }\nsample = "Uniform"\nfile = "y.txt"\n'
    first = parsed(text, folder=tmp_path, trust=tmp_path)
    assert first.algorithm.risk.first == fedtail.Worst()
    assert first.algorithm.risk.sample == "Uniform"
    assert first.algorithm.risk.file == tmp_path / "y.txt"
    again = parsed(tomli_w.dumps(first.as_table()), trust=tmp_path)          # the resolved file says where its own parts are
    assert again.as_table() == first.as_table()
    assert again.task.make(0).module.hidden is None
    assert again.own_code_digests() == first.own_code_digests()
    assert list(first.own_code_digests()) == ["mine_holding.py"]
    inner = parsed(BASE + '[risk]\npart = "mine_holding:Both.Inner"\n', folder=tmp_path, trust=tmp_path)
    assert parsed(tomli_w.dumps(inner.as_table()), trust=tmp_path).as_table() == inner.as_table()
    assert "must be a dataclass" in refused(BASE + '[risk]\npart = "mine_holding:NotADataclass"\n', folder=tmp_path, trust=tmp_path)


def test_mistakes_in_your_own_files_are_told_apart(tmp_path):
    (tmp_path / "mine_failing.py").write_text("import math\nmath.no_such_thing\n")
    assert "importing mine_failing failed: AttributeError: module 'math' has no attribute 'no_such_thing'." in refused(
        BASE + '[risk]\npart = "mine_failing:Net"\n', folder=tmp_path, trust=tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine_twice.py").write_text(OWN)
    text = BASE + '[risk]\npart = "mine_twice:Both"\n'
    parsed(text, folder=tmp_path / "a", trust=tmp_path)
    assert re.search(r"b/mine_twice\.py is not what was imported: a module of the same name is loaded from .*a/mine_twice\.py",
                     refused(text, folder=tmp_path / "b", trust=tmp_path))


def test_a_family_varies_one_field():
    experiment = parsed(BASE + '[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n[family]\nrisk.tail_fraction = [1.0, 0.5, 0.2]')
    assert [m.risk.tail_fraction for m in experiment.algorithm.members] == [1.0, 0.5, 0.2]
    assert experiment.members == ["tail_fraction 1.0", "tail_fraction 0.5", "tail_fraction 0.2"]
    assert parsed(tomli_w.dumps(experiment.as_table())).as_table() == experiment.as_table()


def test_all_methods_of_a_seed_start_from_the_same_module_and_torch_is_left_alone():
    text = BASE.replace("SoftmaxRegression", "torch.nn:Linear").replace("features", "in_features").replace("classes", "out_features")
    task = parsed(text, trust="torch").task
    before = torch.random.get_rng_state()
    first, again, other = (task.make(seed).params() for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_your_own_parts_modules_metrics_and_data_are_found_beside_the_file(tmp_path):
    (tmp_path / "mine_for_tests.py").write_text('''
import torch, fedtail
from dataclasses import dataclass, replace

@dataclass(frozen=True)
class Everybody(fedtail.Risk):
    strength: float = 1.0
    def value(self, losses, mass=None): return losses.mean()

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(60, width)
    def forward(self, x): return self.inner(x)

def half(outputs, targets): return (outputs.argmax(-1) == targets).double().mean()
def people(clients: int, seed: int = 0): return fedtail.data.synthetic(0, 0, clients, seed, sizes=[5] * clients)
''')
    (tmp_path / "e.toml").write_text('''
rounds = 2
[data]
kind = "mine_for_tests:people"
clients = 12
seed = "run"
[task]
metrics = [{ name = "accuracy", function = "mine_for_tests:half", better = "higher", per = "client" }]
module = { part = "mine_for_tests:Net", width = 10 }
[sample]
part = "Everyone"
[risk]
part = "mine_for_tests:Everybody"
strength = 2
''')
    experiment = read_experiment(tmp_path / "e.toml", trust=[tmp_path])
    assert type(experiment.algorithm.risk).__name__ == "Everybody"
    assert experiment.algorithm.risk.strength == 2.0
    task = experiment.task.make(0)
    assert [m.name for m in task.all_metrics] == ["loss", "error", "accuracy"]
    splits = experiment.data.load(5)
    expected = synthetic(0, 0, 12, 5, sizes=[5] * 12).split((0.8, 0.2), 0)
    assert torch.equal(splits["test"].inputs[splits["test"].start[0]], expected[1].inputs[expected[1].start[0]])
    table = experiment.as_table()
    assert table["risk"]["part"] == "mine_for_tests:Everybody"
    assert table["task"]["metrics"][0]["function"] == "mine_for_tests:half"
    assert table["data"]["seed"] == "run"
    again = build_experiments(Source.parse(tomli_w.dumps(table), "e.toml", tmp_path, trust=tmp_path), "e")[0]
    assert again.as_table() == table


# Data

@pytest.fixture
def arrays(tmp_path):
    random = np.random.default_rng(0)
    columns = {"feature": random.normal(size=(200, 3)).astype("float32"), "label": random.integers(0, 4, 200),
               "site": random.integers(0, 25, 200)}
    columns["chain"] = columns["site"] % 3
    np.savez(tmp_path / "a.npz", **columns)
    return tmp_path, columns


DATA = '[data]\nkind = "arrays"\npath = "a.npz"\nx = "feature"\ny = "label"\nclient = "site"\n'
REST = '[task.module]\npart = "SoftmaxRegression"\nfeatures = 3\nclasses = 4\n[sample]\ncohort_size = 4\n'


def load(folder, data: str, seed: int = 0):
    return parsed(f"rounds = 1\n{data}{REST}", folder=folder).data.load(seed)


def test_arrays_are_read_relative_to_the_file_and_split_by_client(arrays):
    folder, columns = arrays
    splits = load(folder, DATA + "split = { train = 0.6, validation = 0.2, test = 0.2, seed = 3 }\n")
    expected = Population.from_arrays(columns["feature"], columns["label"], columns["site"]).split((0.6, 0.2, 0.2), 3)
    assert [(name, people.names.tolist()) for name, people in splits.items()] == [
        (name, people.names.tolist()) for name, people in zip(("train", "validation", "test"), expected, strict=True)]


def test_examples_can_be_held_out_within_clients(arrays):
    folder, _ = arrays
    alone = load(folder, DATA + "at_least = 2\nsplit = { within = 0.25 }\n")
    assert list(alone) == ["train", "test"]
    assert torch.equal(alone["train"].key, alone["test"].key)
    both = load(folder, DATA + "at_least = 2\nsplit = { train = 0.5, test = 0.5, within = 0.25 }\n")
    assert list(both) == ["train", "test", "held_out"]
    assert torch.equal(both["train"].key, both["held_out"].key)
    assert not set(both["train"].key.tolist()) & set(both["test"].key.tolist())
    whole = Population.from_arrays(x=np.zeros(200), y=np.zeros(200), client=arrays[1]["site"])
    kept, back = (both[name].size.sum().item() for name in ("train", "held_out"))
    assert kept + back == whole.select(np.isin(whole.key.numpy(), both["train"].key.numpy())).num_examples


def test_groups_masses_and_a_file_for_the_test_clients(arrays):
    folder, columns = arrays
    np.savez(folder / "b.npz", **{name: values[:50] for name, values in columns.items()})
    splits = load(folder, DATA + 'group = "chain"\ntest_path = "b.npz"\n')
    assert len(splits["train"]) == len(np.unique(columns["site"]))
    assert splits["train"].group.tolist() == (splits["train"].names % 3).tolist()
    assert splits["test"].num_examples == 50
    both = load(folder, DATA + 'at_least = 2\ntest_path = "b.npz"\nsplit = { within = 0.5 }\n')
    assert set(both) == {"train", "held_out", "test"}
    assert torch.equal(both["train"].key, both["held_out"].key)
    assert "test clients are those of test_path" in refused(
        f'rounds = 1\n{DATA}test_path = "b.npz"\nsplit = {{ train = 0.5, test = 0.5 }}\n{REST}', folder=folder)


@pytest.mark.parametrize(("client", "expected"), [
    ('{ part = "dirichlet", clients = 7, concentration = 0.5 }', lambda c: fedtail.data.dirichlet(c["label"], 7, 0.5)),
    ('{ part = "label_shards", clients = 7, shards_per_client = 3, seed = 2 }',
     lambda c: fedtail.data.label_shards(c["label"], 7, 3, seed=2)),
    ('{ part = "quantity_skew", clients = 7, sigma = 1 }', lambda c: fedtail.data.quantity_skew(200, 7, 1.0)),
    ('{ part = "by_column", values = "chain" }', lambda c: fedtail.data.by_column(c["chain"])),
], ids=["dirichlet", "label_shards", "quantity_skew", "by_column"])
def test_every_partitioner_deals_the_examples_out(arrays, client, expected):
    folder, columns = arrays
    splits = load(folder, DATA.replace('"site"', client) + "split = { train = 1.0 }\n")
    wanted = Population.from_arrays(columns["feature"], columns["label"], expected(columns))
    assert torch.equal(splits["train"].size, wanted.size)
    assert torch.equal(splits["train"].targets, wanted.targets)


def test_a_partitioner_can_follow_the_seed_of_the_run(arrays):
    folder, columns = arrays
    data = DATA.replace('"site"', '{ part = "dirichlet", clients = 7, concentration = 0.5, seed = "run" }')
    plan = parsed(f"rounds = 1\n{data}split = {{ train = 1.0 }}\n{REST}", folder=folder).data
    for seed in (0, 4):
        wanted = Population.from_arrays(columns["feature"], columns["label"], fedtail.data.dirichlet(columns["label"], 7, 0.5, seed))
        assert torch.equal(plan.load(seed)["train"].targets, wanted.targets)
    assert not plan.is_same_for_all_seeds
    assert plan.as_table()["client"]["seed"] == "run"


GENERATORS = {
    "digits": "clients = 30", "synthetic": "alpha = 1\nbeta = 1", "synthetic_iid": "clients = 20",
    "synthetic_hybrid": "alpha = 1\nbeta = 1\nclients = 20", "three_gaussians": "examples_per_client = 20\nsplit = { within = 0.5 }",
    "label_shift": "train_clients = 20\nvalidation_clients = 10\ntest_clients = 10\npool_size = 10000",
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_generator_is_a_kind_of_data(kind):
    text = f'rounds = 1\n[data]\nkind = "{kind}"\n{GENERATORS[kind]}\n{REST}'
    splits = parsed(text).data.load(0)
    assert {"train", "test"} <= set(splits)
    assert all(len(people) for people in splits.values())


def test_label_shift_brings_its_own_splits():
    splits = parsed(f'rounds = 1\n[data]\nkind = "label_shift"\n{GENERATORS["label_shift"]}\n{REST}').data.load(0)
    expected = label_shift(0, 20, 10, 10, pool_size=10_000)
    assert torch.equal(splits["validation"].targets, expected.validation.targets)


def test_leaf_and_saved_folders(tmp_path):
    (tmp_path / "leaf").mkdir()
    (tmp_path / "leaf" / "all.json").write_text(
        '{"users": ["a", "b"], "num_samples": [1, 2], "user_data": {"a": {"x": ["To be"], "y": [","]}, '
        '"b": {"x": ["o be,", " be, "], "y": [" ", "o"]}}}')
    splits = load(tmp_path, '[data]\nkind = "leaf"\npath = "leaf"\nencode = "characters"\nsplit = { train = 1.0 }\n')
    assert splits["train"].names.tolist() == ["a", "b"]
    splits["train"].save(tmp_path / "saved")
    again = load(tmp_path, '[data]\nkind = "saved"\npath = "saved"\nsplit = { train = 1.0 }\n')
    assert torch.equal(again["train"].targets, splits["train"].targets)


def test_a_hugging_face_folder_by_column_our_partitioner_or_flowers(tmp_path):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(60, 3)).astype("float32").tolist(), "label": random.integers(0, 3, 60).tolist(),
               "place": [f"site {k % 5}" for k in range(60)]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "hub")
    base = '[data]\nkind = "huggingface"\ndataset = "hub"\nx = "x"\ny = "label"\nsplit = { train = 1.0 }\n'
    assert load(tmp_path, base + 'client = "place"\n')["train"].names.tolist() == [f"site {k}" for k in range(5)]
    ours = load(tmp_path, base + 'client = { part = "dirichlet", clients = 6, concentration = 1.0 }\n')["train"]
    assert ours.size.tolist() == np.bincount(fedtail.data.dirichlet(columns["label"], 6, 1.0)).tolist()
    flowers = load(tmp_path, base + 'client = { part = "IidPartitioner", num_partitions = 4 }\n')["train"]
    assert flowers.size.tolist() == [15, 15, 15, 15]


def test_the_fingerprint_changes_with_any_number_and_not_otherwise():
    splits = {"train": synthetic(0, 0, 3, sizes=[4, 5, 6])}
    same = data_fingerprint({"train": synthetic(0, 0, 3, sizes=[4, 5, 6])})
    assert data_fingerprint(splits) == same
    splits["train"].inputs[3, 7] += 1e-6
    assert data_fingerprint(splits) != same


# How they are refused: the line, what came, the nearest name or the allowed range

LINE = {name: number for number, name in enumerate(BASE.splitlines(), start=1)}


@pytest.mark.parametrize(("text", "expected"), [
    ("round = 3\n" + BASE, "e.toml, line 1: there is no section or setting 'round'. Did you mean rounds?"),
    (BASE + "[risks]\n", "e.toml, line 14: there is no section or setting 'risks'. Did you mean risk?"),
    (BASE + '[risk]\npart = "Superquantle"\n', "e.toml, line 15: fedtail.risk has no part 'Superquantle' for risk. Did you mean "
     'Superquantile? Your own is written "module:Class".'),
    (BASE + '[risk]\npart = "Superquantile"\ntail_fracton = 0.3\n',
     "e.toml, line 16: Superquantile has no field 'tail_fracton'. Did you mean tail_fraction?"),
    (BASE + '[risk]\npart = "Superquantile"\n', "e.toml, line 14: Superquantile needs tail_fraction, which is missing."),
    (BASE + '[risk]\npart = "Superquantile"\ntail_fraction = 80\n',
     "e.toml, line 16: tail_fraction (theta) must be in (0, 1], got 80."),
    (BASE + '[risk]\npart = "Superquantile"\ntail_fraction = "half"\n', "e.toml, line 16: tail_fraction must be a number, got 'half'."),
    (BASE + '[risk]\npart = "Superquantile"\ntail_fraction = true\n', "e.toml, line 16: tail_fraction must be a number, got True."),
    (BASE + "[local]\nbatch_size = 2.5\n", 'e.toml, line 15: batch_size must be "none" or a whole number, got 2.5.'),
    (BASE + "[local]\nlearning_rate = -1\n", "e.toml, line 15: learning_rate (gamma) must be positive and finite, got -1."),
    (BASE + '[local]\nschedule = { part = "StepDecay", factor = 2, every = 3 }\n', "e.toml, line 15: StepDecay needs a factor in (0, 1]"),
    (BASE + '[local.schedule]\npart = "StepDecay"\nfactor = 2\nevery = 3\n', "e.toml, line 16: StepDecay needs a factor in (0, 1]"),
    (BASE + '[server]\npart = "Uniform"\n', "e.toml, line 15: fedtail.server has no part 'Uniform' for server."),
    (BASE + '[risk]\npart = "no_such_module:X"\n', "e.toml, line 15: 'no_such_module:X' cannot be imported"),
    (BASE + '[risk]\npart = "collections:Nothing"\n', "e.toml, line 15: module collections has no Nothing."),
    (BASE + '[risk]\npart = "collections:OrderedDict"\n', "has no method density, which risk needs."),
    (BASE.replace("[sample]\ncohort_size = 8\n", ""), "e.toml: who takes part in a round? Write [sample]"),
    (BASE.replace("rounds = 4", "rounds = 0"), "e.toml, line 1: rounds must be a whole number from 1, got 0."),
    (BASE.replace("rounds = 4", ""), "e.toml: rounds must be a whole number from 1, got nothing."),
    (BASE.replace('kind = "synthetic"', 'kind = "sinthetic"'), "e.toml, line 3: there is no kind of data 'sinthetic'. Did you mean synthetic?"),
    (BASE.replace('kind = "synthetic"', ""), "e.toml, line 2: [data] needs a kind: arrays, leaf, saved, huggingface"),
    (BASE.replace("alpha", "alfa"), "e.toml, line 4: synthetic has no field 'alfa'. Did you mean alpha?"),
    (BASE.replace('sizes = "moderate"', "split = { train = 0.9, test = 0.3 }"), "e.toml, line 7: train, validation and test are fractions"),
    (BASE.replace('sizes = "moderate"', "split = { trian = 0.9 }"), "e.toml, line 7: split has no field 'trian'. Did you mean train?"),
    (BASE.replace('sizes = "moderate"', "split = 0.5"), "e.toml, line 7: split must be a table, got 0.5."),
    (BASE.replace('"SoftmaxRegression"', '"SoftmaxRegresion"'), "e.toml, line 9: fedtail.models has no part 'SoftmaxRegresion'"),
    (BASE.replace("classes = 10", ""), "e.toml, line 8: SoftmaxRegression needs classes, which is missing."),
    (BASE + '[task]\nloss = "cross_entrpy"\n', "e.toml, line 15: fedtail.losses has no 'cross_entrpy'. Did you mean cross_entropy?"),
    (BASE + '[task]\nbuffers = "kept"\n', "e.toml, line 15: buffers must be one of 'refused', 'frozen', got 'kept'."),
    (BASE + "[evaluate]\nevery = 0\n", "e.toml, line 15: every must be at least 1 round, got 0."),
    (BASE + "[privacy]\nepsilon = 1.0\n", "e.toml, line 15: epsilon=1 means nothing without delta."),
    (BASE + "[privacy]\nrandomness = 'dice'\n", "e.toml, line 15: randomness must be one of 'seed', 'os', got 'dice'."),
    (BASE + "[aggregate]\npart = 'PrivateMean'\nclip_norm = 0.1\nnoise = { noise_multiplier = 0.0 }\n", "e.toml, line 17: noise_multiplier (z) must be positive and finite, got 0."),
    (BASE + "[personalise]\npart = 'Ditto'\n", "e.toml, line 14: the section of personal models is [personal], and below it part = \"Ditto\""),
    (BASE + "[family]\nrisk.tail_fraction = 0.5\n", "e.toml, line 14: a family varies one field of a part over two values or more."),
    (BASE + "[family]\nrisk.tail_fraction = [1.0, 0.5]\n", "Mean has no field 'tail_fraction'."),
    (BASE + "[family]\nsample.cohort_size = [2, 3]\n", "e.toml, line 14: the members of a Family are trained on one cohort"),
    (BASE + "[family]\nlocal.learning_rate = [0.1, 0.1]\n", "the models of a family differ, got [0.1, 0.1]. Name each value once."),
    (BASE + "[task]\nmetrics = 3\n", "e.toml, line 15: metrics must be a list of names and tables, got 3."),
    ("device = 'meta'\n" + BASE, "e.toml, line 1: device must be cpu or cuda, got 'meta'."),
    ("device = 'gpu0'\n" + BASE, "e.toml, line 1: device must be cpu or cuda, got 'gpu0'."),
    (BASE + "[engine]\nkernel = 'fast'\n", "e.toml, line 15: kernel must be one of 'auto', 'closed', 'stacked', 'module', got 'fast'."),
    (BASE + "[engine]\nworkers = -1\n", "e.toml, line 15: workers must be at least 0, got -1."),
    (BASE + "[engine]\nprecision = 'half'\n", "e.toml, line 15: precision must be one of 'full', 'tf32', 'bf16', got 'half'."),
    (BASE + "[engine]\nwokers = 2\n", "e.toml, line 15: [engine] has no field 'wokers'. Did you mean workers?"),
    ("seeds = '4..'\n" + BASE, "e.toml, line 1: seeds must be whole numbers from 0"),
    ("seeds = -1\n" + BASE, "e.toml, line 1: seeds must be whole numbers from 0"),
    (BASE + "[[method]]\nrisk = 'Worst'\n", "e.toml, line 14: a method needs a name."),
    (BASE + "[[method]]\nname = 'a'\n[[method]]\nname = 'a'\n", "methods need different names, got a, a."),
    (BASE + "[[method]]\nname = 'a'\n[[method]]\nname = 'b'\nrisk = { part = 'Superquantile', tail_fraction = 5 }\n",
     "e.toml, line 18: tail_fraction (theta) must be in (0, 1], got 5."),
    (BASE + "[risk]\npart = 'Superquantile'\ntail_fraction = 0.5\n[[method]]\nname = 'a'\n[[method]]\nname = 'b'\n"
     "risk = { tail_fraction = 4 }\n", "e.toml, line 21: tail_fraction (theta) must be in (0, 1], got 4."),
    (BASE + "[risk]\npart = 'Superquantile'\ntail_fraction = 0.5\n[family]\nrisk.tail_fraction = [0.3, 7]\n",
     "e.toml, line 18: tail_fraction (theta) must be in (0, 1], got 7."),
    (BASE + "[risk]\npart = 3\n", "e.toml, line 14: part must be a name, got 3."),
    (BASE + "[local]\nschedule = 3\n", "e.toml, line 15: schedule must be a part, { part = ... }, got 3."),
    (BASE + "[[risk]]\npart = 'Worst'\n", "e.toml, line 14: risk must be a table"),
    (BASE.replace("[task.module]", "[task.modul]"), "e.toml, line 8: [task] has no field 'modul'. Did you mean module?"),
    (BASE + "[risk]\npart = './mine.py:X'\n", "e.toml, line 15: './mine.py:X' is not a module and a name."),
    (BASE + "[risk]\n[risk]\n", "e.toml is not valid TOML: Cannot declare ('risk',) twice (at line 15, column 6)."),
    ("", "e.toml: rounds must be a whole number from 1, got nothing."),
    (BASE + "[[method]]\nname = 'a'\ndata = 3\n", "e.toml, line 16: there is no section or setting 'data'."),
    (BASE + "[risk]\npart = Worst\n", "e.toml is not valid TOML: Invalid value (at line 15, column 8)."),
], ids=lambda value: re.sub(r"\W+", " ", value[-40:]) if isinstance(value, str) else "")
def test_what_cannot_be_is_refused_with_its_line(text, expected):
    assert expected in refused(text)


@pytest.mark.parametrize(("setting", "expected"), [
    ("risk.tail_fraction=3", "--set risk.tail_fraction=3: Mean has no field 'tail_fraction'. It takes none."),
    ("local.learning_rate=fast", "--set local.learning_rate=fast: learning_rate must be a number, got 'fast'."),
    ("rounds.x=1", "--set rounds.x=1: rounds is not a table."),
    ("rounds", "--set rounds: a key and a value are needed."),
    ("data.clients=0.5", "--set data.clients=0.5: clients must be a whole number, got 0.5."),
])
def test_a_setting_that_cannot_be_is_refused_by_its_name(setting, expected):
    with pytest.raises(ExperimentError, match=re.escape(expected)):
        build_experiments(Source.parse(BASE, "e.toml", Path(), [setting]), "e")


def test_missing_files_and_methods_are_refused(tmp_path):
    with pytest.raises(ExperimentError, match=r"there is no file .*none\.toml\. `fedtail init none\.toml`"):
        read_experiment(tmp_path / "none.toml")
    with pytest.raises(ExperimentError, match="is a folder"):
        read_experiment(tmp_path)
    (tmp_path / "two.toml").write_text(BASE + "[[method]]\nname = 'one'\n[[method]]\nname = 'other'\n")
    with pytest.raises(ExperimentError, match=r"holds 2 methods: one, other\. Compare them"):
        read_experiment(tmp_path / "two.toml")
    with pytest.raises(ExperimentError, match=r"has no method .ohter.\. Did you mean other\?"):
        read_experiment(tmp_path / "two.toml", method="ohter")
    assert read_experiment(tmp_path / "two.toml", method="other").name == "other"
    assert "there is no" in refused(DATA.join(["rounds = 1\n", REST]), folder=tmp_path)


@pytest.mark.parametrize(("value", "seeds"), [
    (3, (3,)), ([0, 2], (0, 2)), ("0..4", (0, 1, 2, 3, 4)), ("7", (7,)), ("1,5,1", (1, 5)), ("2..2", (2,))])
def test_seeds_are_written_in_a_few_ways(value, seeds):
    assert parse_seeds(value) == seeds


@pytest.mark.parametrize("value", ["", "a", "4..1", -1, [], [0.5], [True], None, "0..x"])
def test_other_seeds_are_refused(value):
    with pytest.raises(ValueError, match="seeds must be whole numbers"):
        parse_seeds(value)


# The file to start from

def test_the_starter_is_a_valid_experiment_with_its_comments_removed_too(tmp_path):
    text = starter_text()
    experiment = parsed(text)
    assert experiment.algorithm.risk == fedtail.Superquantile(0.5)
    assert {"train", "validation", "test"} == set(experiment.data.load(0))
    for heading in ("# penalty = ", "# schedule = ", "# finetune = ", "# [family]\n# risk"):
        uncommented = text.replace(heading, heading.replace("# ", ""))
        assert parsed(uncommented).as_table() != experiment.as_table()
    methods = text.replace('# [[method]]\n# name = "FedAvg"\n# risk', '[[method]]\nname = "FedAvg"\nrisk').replace(
        '# [[method]]\n# name = "Delta-FL 0.5"', '[[method]]\nname = "Delta-FL 0.5"')
    assert [e.algorithm.risk for e in build_experiments(Source.parse(methods, "e", tmp_path), "e")] == [
        fedtail.Mean(), fedtail.Superquantile(0.5)]


@pytest.mark.parametrize(("clients", "numbers"), [(40, False), (4, False), (40, True)])
def test_a_starter_for_your_data_runs_on_them(tmp_path, clients, numbers):
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 5)).astype("float32")
    y = x.sum(1) if numbers else random.integers(0, 3, 400)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=np.arange(400) % clients)
    (tmp_path / "e.toml").write_text(starter_text(tmp_path / "e.toml", tmp_path / "mine.npz"))
    experiment = read_experiment(tmp_path / "e.toml", ["rounds=1"])
    splits = experiment.data.load(0)
    trained = fedtail.train(experiment.algorithm, experiment.task.make(0), splits["train"], rounds=1)
    assert len(fedtail.evaluate(trained, splits["test"]).error) == len(splits["test"])


def test_lines_are_found_in_every_form_of_toml():
    text = 'a.b = 1\n["x y".z]\n"k k" = 2\n[[m]]\nn = 1\n[m.s]\nt = 2\n[[m]]\n[m.s]\nt = 3\n'
    assert tomllib.loads(text)["m"][1]["s"]["t"] == 3
    where = Source.parse(text, "f", Path()).location
    assert [where("a", "b"), where("x y", "z", "k k"), where("m", 0, "s", "t"), where("m", 1, "s", "t"), where("m", 1, "s", "u")] == [
        "f, line 1", "f, line 3", "f, line 7", "f, line 10", "f, line 9"]
    assert where("nowhere") == "f"
    several = 'a = [\n  ["b"],\n  "[c]", # [\n]\n[risk]\ntext = """\n[not]\nx = 1\n"""\ny = { z = [1,\n 2] }\nlast = 3\n'
    assert set(tomllib.loads(several)["risk"]) == {"text", "y", "last"}
    where = Source.parse(several, "f", Path()).location
    assert [where("a"), where("risk", "text"), where("risk", "y"), where("risk", "last"), where("b")] == [
        "f, line 1", "f, line 6", "f, line 10", "f, line 12", "f"]


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    (tmp_path / "e.toml").write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert read_experiment(tmp_path / "e.toml").rounds == 4


def test_a_starter_names_the_arrays_it_was_told(tmp_path):
    random = np.random.default_rng(0)
    columns = {"pixels": random.normal(size=(90, 3)).astype("float32"), "digit": np.arange(90) % 3, "writer": np.arange(90) % 30}
    np.savez(tmp_path / 'odd "name".npz', **columns)
    (tmp_path / "mine.toml").write_text(starter_text(tmp_path / "mine.toml", tmp_path / 'odd "name".npz', "pixels", "digit", "writer"))
    experiment = read_experiment(tmp_path / "mine.toml")
    assert len(experiment.data.load(0)["train"]) == 18
    assert "fedtail run mine.toml" in (tmp_path / "mine.toml").read_text()


def test_files_with_several_methods_are_read_whole(tmp_path):
    (tmp_path / "e.toml").write_text(BASE + "[[method]]\nname = 'a'\n[[method]]\nname = 'b'\n")
    assert [e.name for e in read_experiments(tmp_path / "e.toml")] == ["a", "b"]


# What an error carries as data

def error_of(text: str, folder: Path = Path()) -> ExperimentError:
    with pytest.raises(ExperimentError) as reason:
        build_experiments(Source.parse(text, "e.toml", folder), "e")
    return reason.value


@pytest.mark.parametrize(("text", "key", "came"), [
    (BASE + "[engine]\nworkers = -1\n", ("engine", "workers"), -1),
    (BASE + "[engine]\nshards = 2\n", ("engine", "shards"), 2),
    (BASE.replace('sizes = "moderate"', "split = { within = 2.0 }"), ("data", "split", "within"), 2.0),
    (BASE.replace("rounds = 4", "rounds = 0"), ("rounds",), 0),
    ("device = 'gpu0'\n" + BASE, ("device",), "gpu0"),
    (BASE + "[local]\nbatch_size = 2.5\n", ("local", "batch_size"), 2.5),
])
def test_errors_carry_their_field_and_what_came(text, key, came):
    error = error_of(text)
    assert (error.key, error.field, error.came) == (key, key[-1], came)
    assert error.needed


@dataclass(frozen=True)
class Whose:
    """A part of a user's own that names another field in its text than the one it is about."""

    first: int
    second: int

    def __post_init__(self):
        raise FieldError("second", "larger than first", self.second, "Write second = 3.")


def test_a_field_is_taken_from_the_error_and_not_from_its_words():
    source = Source.parse("[risk]\nfirst = 2\nsecond = 1\n", "e.toml", Path())
    with pytest.raises(ExperimentError) as reason:
        PartPlan("Whose", Whose, {"first": 2, "second": 1}, source, ("risk",)).make()
    assert str(reason.value) == "e.toml, line 3: second must be larger than first, got 1. Write second = 3."
    assert reason.value.write == "Write second = 3."


def test_errors_about_a_field_survive_a_pickle():
    error = FieldError("tail_fraction", "in (0, 1]", 80.0, "Write 0.2.", symbol="theta")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(error) == "tail_fraction (theta) must be in (0, 1], got 80. Write 0.2."
    experiment = error_of(BASE + "[engine]\nworkers = -1\n")
    assert vars(pickle.loads(pickle.dumps(experiment))) == vars(experiment)
