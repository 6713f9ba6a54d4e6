"""Small generated data in the shape of the papers' data sets, for tests of the studies."""

from __future__ import annotations

import numpy as np

from fedtail.data import Population
from fedtail.data.fetching.shakespeare import cut_windows
from fedtail_studies.emnist.writers import IMAGES
from fedtail_studies.study import Data
from fedtail_studies.text.roles import WINDOW
from fedtail_studies.text.tweets import LENGTH, WIDTH


def generated_writers(clients: int = 24, seed: int = 0, labels: int = 62) -> Data:
    """Noise in the shape of FEMNIST: a blob that depends on the label, moved a little by the writer."""
    random = np.random.default_rng(seed)
    prototypes, drawn = random.random((labels, 28, 28)), []
    for _ in range(clients):
        y = random.integers(labels, size=int(random.integers(IMAGES, 2 * IMAGES + 40)))
        x = prototypes[y] + 0.3 * random.standard_normal((1, 28, 28)) + 0.6 * random.standard_normal((len(y), 28, 28))
        drawn.append((x.astype(np.float32), y))
    people = Population.from_clients(drawn)
    return Data(f"generated, {clients} writers", people, papers=False, about="They are generated, for a test.")


def generated_tweets(clients: int = 16, seed: int = 0) -> Data:
    """Vectors whose mean tells the label."""
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(clients):
        y = random.integers(2, size=int(random.integers(4, 9)))
        x = 0.5 * random.standard_normal((len(y), LENGTH, WIDTH)) + (2 * y[:, None, None] - 1) * (np.arange(WIDTH) < 5)
        pairs.append(({"sequence": x.astype(np.float32), "lengths": random.integers(3, LENGTH, size=len(y))}, y))
    about = "They are generated, for a test."
    return Data(f"generated, {clients} accounts", Population.from_clients(pairs), papers=False, about=about)


def generated_roles(clients: int = 12, seed: int = 0) -> Data:
    """Letters that mostly follow the alphabet; some roles skip more."""
    random = np.random.default_rng(seed)
    pairs = []
    for k in range(clients):
        skips = 0.1 + 0.5 * k / clients
        steps = random.choice([1, 2], size=int(random.integers(130, 260)), p=[1 - skips, skips])
        pairs.append(cut_windows((steps.cumsum() % 26).astype(np.uint8), WINDOW))
    about = "They are generated, for a test."
    return Data(f"generated, {clients} roles", Population.from_clients(pairs), papers=False, about=about)
