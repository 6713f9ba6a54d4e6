"""A population larger than memory: examples and personal models stay on disk, and a round holds a piece of them at a time."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import resource, sys
import numpy as np, torch, fedtail

folder, workers = sys.argv[1], int(sys.argv[2])
people = fedtail.Population.open(folder)
size = people.inputs.nbytes
torch.manual_seed(0)
task = fedtail.Task({module})
fedtail.train(fedtail.delta_fl(0.5, 20), task, people, rounds=1, workers=workers)      # whatever is loaded once
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + size // 4, held + size // 4))         # a quarter of the examples may be held
try:
    people.inputs.clone()
    sys.exit("the limit does not hold")
except RuntimeError:
    pass
trained = fedtail.train(fedtail.delta_fl(0.5, len(people)), task, people, rounds=1, workers=workers)
print(fedtail.evaluate(trained, people, workers=workers).loss.mean())
"""
MODULES = {
    "closed form": "fedtail.models.SoftmaxRegression(784, 10)",
    "any module": "torch.nn.Sequential(torch.nn.Linear(784, 20), torch.nn.Dropout(0.1), torch.nn.Linear(20, 10))",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """300 megabytes in 1000 clients."""
    import numpy as np

    import fedtail
    folder = tmp_path_factory.mktemp("large") / "people"
    rng = np.random.default_rng(0)
    some = rng.standard_normal((10_000, 784), dtype="float32")
    x, y = np.tile(some, (10, 1)), rng.integers(0, 10, 100_000)
    fedtail.Population.from_arrays(x, y, np.repeat(np.arange(1000), 100)).save(folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize(("module", "workers"), [("closed form", 2), ("any module", 1)])
def test_a_round_with_everybody_and_an_evaluation_hold_a_piece_of_the_examples(saved, module, workers):
    program = textwrap.dedent(PROGRAM).replace("{module}", MODULES[module])
    done = subprocess.run([sys.executable, "-c", program, str(saved), str(workers)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < float(done.stdout) < 10


PERSONAL = """
import resource, sys, tempfile
from dataclasses import replace
from pathlib import Path
import numpy as np, torch, fedtail
from fedtail.engine.local_fleet import LocalFleet
from fedtail.evaluation.personal import kept_personal_rows
from fedtail.runs.checkpoint import MEMORY, Checkpoints

CLIENTS, folder = 100_000, Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
own = fedtail.Population.from_arrays(rng.standard_normal((2 * CLIENTS, 5), dtype="float32"), rng.integers(0, 3, 2 * CLIENTS),
                                     np.repeat(np.arange(CLIENTS), 2))
torch.manual_seed(0)
task = fedtail.Task(torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.Linear(300, 3)))
method = fedtail.ditto(0.1, cohort_size=20, learning_rate=0.1)
fedtail.evaluate(fedtail.train(method, task, own, rounds=1, workers=1), own, workers=1)      # whatever is loaded once
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
dense = 4 * CLIENTS * len(task.params())                       # a model for everybody takes a gigabyte
resource.setrlimit(resource.RLIMIT_DATA, (held + dense // 8, held + dense // 8))
try:
    torch.zeros(CLIENTS, len(task.params()))
    sys.exit("the limit does not hold")
except RuntimeError:
    pass
with LocalFleet(own, task, workers=1, folder=folder / MEMORY) as fleet:
    trained = fedtail.train(method, task, fleet=fleet, rounds=5)
    checkpoints = Checkpoints(folder)
    checkpoints.save(trained, {})
    found = fedtail.evaluate_personal(trained, own, engine=fedtail.Engine(workers=1))
    again = fedtail.resume(checkpoints.load()[0].to_trained(method, task, 0), fleet=fleet, rounds=2)
    size = max(path.stat().st_size for path in checkpoints.files if path.exists())
    disk = sum(path.stat().st_size for path in (folder / MEMORY).glob("*.rows"))
    rows = kept_personal_rows(again, own.key[:10]).read()
print(int(found.has_model.sum()), size, disk, len(task.params()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_personal_models_take_room_for_those_who_took_part_and_not_for_the_population():
    done = subprocess.run([sys.executable, "-c", PERSONAL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    have, size, disk, dim = map(int, done.stdout.split())
    assert 95 <= have <= 100                                   # twenty of a hundred thousand in each of five rounds
    assert size < 20 * 4 * dim                                 # a checkpoint holds the model and marks, no client's rows
    assert disk < 2 * 8 * 20 * 4 * dim + 10**5                 # seven rounds of twenty rows
