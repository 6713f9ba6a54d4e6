"""Strategies and small builders that several test files share."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedtail import Population

TAIL_FRACTIONS = st.one_of(st.floats(0.01, 1), st.sampled_from([1.0, 0.5, 0.25, 0.1, 1e-3]))


@st.composite
def weighted_losses(draw, low: float = 0.0, high: float = 10.0, most: int = 12) -> tuple[Tensor, Tensor]:
    """Losses with ties, float64 values that float32 can hold, and random masses (often equal, sometimes one client)."""
    count = draw(st.integers(1, most))
    losses = st.one_of(st.floats(low, high, width=32), st.sampled_from([0.0, 1.0, 2.5]))
    masses = draw(st.sampled_from([st.just(1.0), st.integers(1, 300).map(float), st.floats(0.01, 5)]))
    values = draw(st.lists(losses, min_size=count, max_size=count))
    return (torch.tensor(values, dtype=torch.float64),
            torch.tensor(draw(st.lists(masses, min_size=count, max_size=count)), dtype=torch.float64))


def small_population(clients: int = 12, features: int = 5, classes: int = 3, seed: int = 0, groups: int = 3) -> Population:
    """Clients of different sizes whose labels follow different linear rules."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(4, 30, (clients,), generator=random).tolist()
    x = [torch.randn(n, features, generator=random) for n in sizes]
    rules = torch.randn(clients, features, classes, generator=random)
    pairs = [(part, (part @ rule).argmax(1)) for part, rule in zip(x, rules, strict=True)]
    return Population.from_clients(pairs, group=torch.arange(clients) % groups)
