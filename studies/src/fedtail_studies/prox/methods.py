"""The methods of chapter 3 with the printed settings: ten devices a round, batches of ten, E epochs, no decay."""

from __future__ import annotations

from typing import Any

import fedtail
from fedtail.local import FullWork, NoPenalty, Proximal, Stragglers, Work
from fedtail_studies.prox.networks import Network

LEVELS = (0.0, 0.5, 0.9)                         # of the cohort are stragglers
BATCH = 10
DROPS, KEEPS, BEST = "FedAvg", "FedProx, mu 0", "FedProx, best mu"


def local_settings(network: Network, epochs: int, strength: float = 0.0, work: Work = FullWork()) -> dict[str, Any]:
    """Keywords of `LocalSGD`: the network's learning rate, batches of ten, and FedProx's penalty of strength mu, if any."""
    penalty = Proximal(strength) if strength else NoPenalty()
    return {"learning_rate": network.learning_rate, "batch_size": BATCH, "epochs": epochs, "penalty": penalty, "work": work}


def straggling(network: Network, method: str, level: float, epochs: int, cohort: int,
               strength: float | None = None) -> fedtail.FederatedAlgorithm:
    """FedAvg, which drops the stragglers of each cohort, or FedProx, which keeps what they have done.

    Exactly a share `level` of the cohort are stragglers, the same for all methods. `strength` is mu of FedProx with the best mu;
    by default the printed one.
    """
    mu = (network.best if strength is None else strength) if method == BEST else 0.0
    work: Work = Stragglers(level, drop=method == DROPS, exact=True) if level else FullWork()
    return fedtail.fedavg(cohort, **local_settings(network, epochs, mu, work))


def runs(levels: tuple[float, ...] = LEVELS, methods: tuple[str, ...] = (DROPS, KEEPS, BEST)) -> list[tuple[str, float]]:
    """Methods and straggler levels that differ: without stragglers mu = 0 is FedAvg, and is run once."""
    return [(method, level) for level in levels for method in methods if level or method != KEEPS]


def run_name(where: str, method: str, level: float, epochs: int = 20) -> str:
    """How a run is called: the data set, the method, the share of stragglers, and the epochs where they are not 20.

    >>> run_name("MNIST", "FedAvg", 0.9), run_name("MNIST", "FedProx, mu 0", 0.0, 1)
    ('MNIST: FedAvg, 90% stragglers', 'MNIST: FedAvg, 0% stragglers, one epoch')
    """
    name = DROPS if method == KEEPS and not level else method
    return f"{where}: {name}, {level:.0%} stragglers{', one epoch' if epochs == 1 else ''}"
