"""Where training for the tail does not help: the demo's setting, and three changes that take the gain away.

    python experiments/where_it_does_not_help.py > experiments/where_it_does_not_help.txt

Error in percent over 500 unseen clients, mean and standard deviation over the seeds; below each tail fraction the difference
to FedAvg on the same seeds, cohorts and clients, with its standard error. About seven minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from dataclasses import replace

import torch

import fedtail
from fedtail.data import Population, Splits, label_shift
from fedtail.models import SoftmaxRegression

TAIL_FRACTIONS = (0.5, 0.25, 0.1)
STATISTICS = ("mean", "p90", "worst10")
MISLABELLED = 0.1


def mislabelled(population: Population, seed: int) -> Population:
    """A tenth of the clients get labels drawn at random: hopeless for any model, and so the worst off."""
    random = torch.Generator().manual_seed(seed)
    bad = torch.rand(len(population), generator=random) < MISLABELLED
    wrong = bad.repeat_interleave(population.size)                      # label_shift holds clients one after another
    labels = torch.randint(10, population.targets.shape, generator=random)
    return replace(population, targets=torch.where(wrong, labels, population.targets))


def demo(seed: int) -> tuple[Splits, int]:
    return label_shift(seed), 100


def alike(seed: int) -> tuple[Splits, int]:
    return label_shift(seed, train_concentration=1000.0, test_concentration=1000.0), 100


def noisy_tail(seed: int) -> tuple[Splits, int]:
    splits = label_shift(seed)
    return splits._replace(train=mislabelled(splits.train, seed)), 100


def few_clients(seed: int) -> tuple[Splits, int]:
    return label_shift(seed), 8


SETTINGS = {
    "clients differ, 100 a round (`fedtail demo`)": demo,
    "clients alike, 100 a round": alike,
    "clients differ, a tenth of the training clients mislabelled, 100 a round": noisy_tail,
    "clients differ, 8 a round": few_clients,
}


def errors(setting, seed: int, rounds: int) -> list[dict[str, float]]:
    """For FedAvg and each tail fraction, the statistics of the test clients' error in percent."""
    data, cohort = setting(seed)
    base = fedtail.fedavg(cohort, learning_rate=0.1, batch_size=None)
    tails = [fedtail.delta_fl(theta, cohort, learning_rate=0.1, batch_size=None) for theta in TAIL_FRACTIONS]
    task = fedtail.Task(SoftmaxRegression(20, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.SmallTailWarning)       # the last setting is about it
        trained = fedtail.train(fedtail.Family((base, *tails)), task, data.train, rounds=rounds, seed=seed)
    summaries = [fedtail.evaluate(module, data.test).error.summary() for module in trained.modules]
    return [{name: 100 * summary[name] for name in STATISTICS} for summary in summaries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    names = ["FedAvg", *(f"Delta-FL {theta:g}" for theta in TAIL_FRACTIONS)]
    print(f"error of test clients, %, after {options.rounds} rounds, {options.seeds} seeds")
    for title, setting in SETTINGS.items():
        runs = [errors(setting, seed, options.rounds) for seed in range(options.seeds)]
        print(f"\n{title}\n{'':<16}" + "".join(f"{name:>17}" for name in STATISTICS), flush=True)
        for k, name in enumerate(names):
            values = [[run[k][column] for run in runs] for column in STATISTICS]
            print(f"{name:<16}" + "".join(f"{statistics.mean(v):9.2f} ± {spread(v):5.2f}" for v in values), flush=True)
            if k:
                gaps = [[run[k][column] - run[0][column] for run in runs] for column in STATISTICS]
                print(f"{'  less FedAvg':<16}"
                      + "".join(f"{statistics.mean(g):+9.2f} ± {spread(g) / math.sqrt(len(g)):5.2f}" for g in gaps), flush=True)


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
