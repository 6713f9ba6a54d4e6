"""On a machine with a GPU, from source, with torch and numpy alone: `python tests/gpu_check.py`.

Every recipe gives the same model on the GPU as on the CPU, over plain and integer channels; exits with 1 if one does not.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
from torch import nn

import fedtail
from fedtail.models import ConvNet, LSTMClassifier, SoftmaxRegression

RECIPES = {
    "fedavg": fedtail.fedavg(10),
    "delta_fl": fedtail.delta_fl(0.5, 10),
    "delta_fl smoothed": fedtail.delta_fl(0.5, 10, form="smoothed"),
    "q_ffl": fedtail.q_ffl(1.0, 10),
    "term": fedtail.term(1.0, 10),
    "afl": fedtail.afl(0.1),
    "afl groups": fedtail.afl(0.1, groups=3, cohort_size=10),
    "family": fedtail.delta_fl_family((1.0, 0.5), 10),
}


def population(shape: tuple[int, ...]) -> fedtail.Population:
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(20, 60, (30,), generator=random).tolist()
    pairs = [(torch.randn(n, *shape, generator=random), torch.randint(0, 5, (n,), generator=random)) for n in sizes]
    return fedtail.Population.from_clients(pairs, group=torch.arange(30) % 3)


def params_of(trained: fedtail.Trained) -> torch.Tensor:
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([s.params.cpu() for s in states])


def main() -> int:
    warnings.simplefilter("ignore", fedtail.SmallTailWarning)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    unwanted = [m for m in ("scipy", "sklearn", "pyarrow", "msgpack", "typer", "rich") if m in sys.modules]
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    worst, flat = 0.0, population((20,))
    for kind, module in (("linear", SoftmaxRegression(20, 5)), ("mlp", mlp)):
        for name, recipe in RECIPES.items():
            here = params_of(fedtail.train(recipe, fedtail.Task(module), flat, rounds=3, dtype=torch.float64))
            for channel in (fedtail.PlainChannel(), fedtail.IntegerChannel()):
                there = fedtail.train(recipe, fedtail.Task(module), flat, rounds=3, dtype=torch.float64, device="cuda", channel=channel)
                gap = (params_of(there) - here).abs().max().item()
                worst = max(worst, gap)
                print(f"{kind:8} {name:20} {type(channel).__name__:16} {gap:.1e}")
    images = population((1, 28, 28))
    conv = fedtail.Task(ConvNet(classes=5))
    runs = [params_of(fedtail.train(RECIPES["delta_fl"], conv, images, rounds=2, device=d, dtype=torch.float64)) for d in ("cpu", "cuda")]
    print(f"convnet  delta_fl {(runs[0] - runs[1]).abs().max().item():.1e}")
    tokens = fedtail.Population.from_clients(
        [({"sequence": (x[:, :6].abs() * 5).long().clamp(max=9), "lengths": torch.full((len(y),), 6)}, y) for x, y in
         (flat.client(k) for k in range(30))])
    recurrent = fedtail.Task(LSTMClassifier((10, 4), hidden=8, classes=5))
    words = [params_of(fedtail.train(RECIPES["delta_fl"], recurrent, tokens, rounds=2, device=d, dtype=torch.float64)) for d in ("cpu", "cuda")]
    print(f"lstm     delta_fl {(words[0] - words[1]).abs().max().item():.1e}")
    drop = fedtail.Task(nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.3), nn.Linear(16, 5)))
    same = [params_of(fedtail.train(RECIPES["delta_fl"], drop, flat, rounds=2, device="cuda")) for _ in range(2)]
    reports = [fedtail.evaluate(mlp, flat, device=d).loss.values for d in ("cpu", "cuda")]
    tuned = fedtail.finetune(mlp, flat, fedtail.LocalSGD(epochs=2), device="cuda")
    print(f"evaluation {(reports[0] - reports[1]).abs().max().item():.1e}; dropout twice the same: {torch.equal(*same)}")
    print(tuned.table())
    good = (worst < 1e-5 and torch.equal(*same) and not unwanted and torch.allclose(*reports, atol=1e-5)
            and torch.allclose(*runs, atol=1e-5) and torch.allclose(*words, atol=1e-5))
    print("all agree" if good else f"DISAGREEMENT (imported beside torch and numpy: {unwanted})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
