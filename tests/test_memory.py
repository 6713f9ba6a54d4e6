"""A population larger than memory: examples stay on disk, and a round holds a piece of them at a time."""

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
