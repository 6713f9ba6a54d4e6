"""Do two versions of fedtail compute the same numbers, to the bit?

    python tests/same_numbers.py --against COMMIT      # trains every method with both versions, on this machine
    python tests/same_numbers.py --record numbers.json # the digests of this version alone

Digests differ between machines (their products round differently), so both versions run here, one after the other. A
rearrangement of the code must print no difference; a change that is meant to change numbers names the lines that differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve()
CLIENTS, FEATURES, CLASSES, ROUNDS = 40, 6, 3, 3
SEEDS = (0, 1)


def methods() -> dict[str, Any]:
    """Every recipe and every part that changes numbers, by a name that does not change."""
    import fedtail as ft

    local = {"learning_rate": 0.1, "batch_size": 4, "epochs": 2}
    base = ft.fedavg(16, **local)
    private = {"population": CLIENTS, "clip_norm": 0.5, "noise_multiplier": 1.0, "cohort_size": 16, **local}
    histogram = {"quantile_noise_multiplier": 2.0, "loss_bound": 8.0}
    return {
        "fedavg": base,
        "fedavg, full batches": ft.fedavg(16, learning_rate=0.1, epochs=1),
        "fedavg_sub": ft.fedavg_sub(0.5, 16, **local),
        "fedprox": ft.fedprox(0.1, 16, **local),
        "fedprox, stragglers": ft.fedprox(0.1, 16, **local, work=ft.Stragglers(0.5)),
        "delta_fl exact": ft.delta_fl(0.5, 16, **local),
        "delta_fl filter": ft.delta_fl(0.5, 16, form="filter", **local),
        "delta_fl smoothed": ft.delta_fl(0.5, 16, form="smoothed", smoothing=0.2, **local),
        "delta_fl refreshed": ft.delta_fl(0.5, 16, refresh_every=2, **local),
        "delta_fl 12 bits": ft.delta_fl(0.5, 16, quantile=ft.ExactQuantile(bits=12), **local),
        "delta_fl majorise": ft.delta_fl(0.5, 16, quantile=ft.MajoriseMinimise(), **local),
        "quadratic": replace(base, risk=ft.QuadraticSuperquantile(0.5, 0.2)),
        "worst": replace(base, risk=ft.Worst()),
        "q_ffl": ft.q_ffl(1.0, 16, **local),
        "q_ffl, small q": ft.q_ffl(0.1, 16, **local),
        "term": ft.term(1.0, 16, **local),
        "term, negative": ft.term(-1.0, 16, **local),
        "term, bounded": ft.term(1.0, 16, loss_bound=8.0, **local),
        "afl": ft.afl(0.1, **local),
        "afl by group": ft.afl(0.1, groups=3, cohort_size=16, **local),
        "family": ft.delta_fl_family((1.0, 0.5), 16, **local),
        "dp_fedavg": ft.dp_fedavg(**private),
        "dp_fedavg discrete": ft.dp_fedavg(**private, noise="discrete", planned_clients=8),
        "dp_delta_fl": ft.dp_delta_fl(0.5, **private, **histogram),
        "dp_delta_fl discrete": ft.dp_delta_fl(0.5, **private, **histogram, noise="discrete", planned_clients=8),
        "dp_delta_fl smoothed": ft.dp_delta_fl(0.5, **private, **histogram, smoothing=0.2),
        "adaptive clip": replace(ft.dp_fedavg(**private), aggregate=ft.AdaptiveClip(0.5, ft.GaussianNoise(1.0), 16.0)),
        "by mass": replace(base, sample=ft.ByMass(16)),
        "everyone": replace(base, sample=ft.Everyone()),
        "poisson": replace(base, sample=ft.Poisson(0.4)),
        "step decay": ft.fedavg(16, **local, schedule=ft.StepDecay(0.5, 2)),
        "cosine": ft.fedavg(16, **local, schedule=ft.Cosine(3)),
        **{f"server {kind.__name__}": replace(base, server=kind(0.05)) for kind in (ft.SGD, ft.Adagrad, ft.Adam, ft.Yogi)},
        **{kind.__name__: replace(base, iterate=kind()) for kind in (ft.AveragedIterate, ft.RandomIterate)},
    }


def channels() -> dict[str, Any]:
    import fedtail as ft

    return {"plain": ft.PlainChannel(), "integer": ft.IntegerChannel(),
            "secure": ft.SecureChannel(8, 2)}      # by place: the second was called hides_among


def models() -> dict[str, Callable[[], nn.Module]]:
    from fedtail.models import SoftmaxRegression

    def mlp(*between: nn.Module) -> nn.Module:
        with torch.random.fork_rng([]):
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), *between, nn.Linear(8, CLASSES))

    return {
        "linear": lambda: SoftmaxRegression(FEATURES, CLASSES),
        "mlp": mlp,
        "mlp with dropout": lambda: mlp(nn.Dropout(0.3)),
    }


def population() -> Any:
    import fedtail as ft

    random = torch.Generator().manual_seed(3)
    sizes = torch.randint(3, 20, (CLIENTS,), generator=random).tolist()
    x = [torch.randn(n, FEATURES, generator=random) for n in sizes]
    y = [torch.randint(0, CLASSES, (n,), generator=random) for n in sizes]
    return ft.Population.from_clients(list(zip(x, y, strict=True)), group=torch.arange(CLIENTS) % 3)


def runs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every run by its name: each method over each channel and seed with the linear model, and with the other models once."""
    people = population()
    for model, build in models().items():
        for name, method in methods().items():
            for channel, carries in channels().items() if model == "linear" else [("plain", channels()["plain"])]:
                for seed in SEEDS if model == "linear" else SEEDS[:1]:
                    yield f"{name} | {model} | {channel} | seed {seed}", _run(method, build, people, carries, seed)


def _run(method: Any, build: Callable[[], nn.Module], people: Any, channel: Any, seed: int) -> Callable[[], Any]:
    import fedtail as ft

    private = type(method).__name__ == "FederatedAlgorithm" and "noise" in repr(method.aggregate)
    budget = (ft.PrivacyBudget if hasattr(ft, "PrivacyBudget") else ft.Terms)(delta=1e-3) if private else None
    engine = {"engine": ft.Engine(workers=1)} if hasattr(ft, "Engine") else {"workers": 1}
    return lambda: ft.train(method, ft.Task(build()), people, rounds=ROUNDS, seed=seed, channel=channel, privacy=budget, **engine)


def digest(run: Callable[[], Any]) -> str:
    """A digest of all that a run leaves: models, duals, optimisers, memory, epsilon where it has one; or that it is refused."""
    found = hashlib.blake2b(digest_size=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trained = run()
        except (ValueError, TypeError, ImportError) as reason:
            return f"refused: {type(reason).__name__}"
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    for state in states:
        optimizer = state.optimizer_state if hasattr(state, "optimizer_state") else state.optimizer      # what it was called
        for tensor in (state.params, state.dual, *optimizer):
            found.update(b"-" if tensor is None else tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for module in trained.modules:
        for name, tensor in module.state_dict().items():
            found.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    found.update(repr(trained.failed).encode())
    budget = trained.ledger.budget if hasattr(trained.ledger, "budget") else trained.ledger.terms
    if budget.delta and priced():
        found.update(repr(trained.ledger.guarantee(budget.delta).epsilon).encode())
    for name, rows in sorted(trained.memory.kept.items()):
        found.update(name.encode() + rows.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def priced() -> bool:
    """Whether what runs cost can be computed here."""
    return importlib.util.find_spec("dp_accounting") is not None


def record(place: Path) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {name: digest(run) for name, run in runs()}
    place.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def record_elsewhere(root: Path, place: Path) -> dict[str, str]:
    """The digests of the version under `root`, by this file as it is, in a process of its own."""
    subprocess.run([sys.executable, str(HERE), "--record", str(place)], check=True,
                   env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"})
    return json.loads(place.read_text(encoding="utf-8"))


def compare(commit: str) -> int:
    """How many runs differ between that commit and the files as they are."""
    root = HERE.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "-C", str(root), "worktree", "add", "--quiet", "--detach", str(before), commit], check=True)
        try:
            old = record_elsewhere(before, Path(folder) / "old.json")
        finally:
            subprocess.run(["git", "-C", str(root), "worktree", "remove", "--force", str(before)], check=True)
        new = record_elsewhere(root, Path(folder) / "new.json")
    differ = [name for name in old if new.get(name) != old[name]]
    for name in differ:
        print(f"{name}: {old[name]} was, {new.get(name, 'nothing')} is")
    print(f"{len(old) - len(differ)} of {len(old)} runs end with the same bits as in {commit}; {len(set(new) - set(old))} are new.")
    return len(differ)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--record", metavar="FILE", type=Path)
    given = parser.parse_args()
    if given.record:
        record(given.record)
    elif given.against:
        sys.exit(compare(given.against) > 0)
    else:
        parser.error("say --against COMMIT or --record FILE.")
