"""Clients out of one labelled data set: a client id for each example, to pass to `Population.from_arrays`."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from fedtail.data.arrays import as_labels
from fedtail.draws import named_generator
from fedtail.errors import FieldError


def dirichlet(labels: Any, clients: int, concentration: float, seed: int = 0, at_least: int = 1) -> np.ndarray:
    """Deal examples out to clients whose label proportions are drawn from a Dirichlet distribution.

    Returns a client id per example, (examples,) int64, drawn by `seed`. Client k draws p_k ~ Dir(concentration, ...,
    concentration) over the labels. The examples of label c are dealt out in proportion to p_1c, p_2c, ..., so every example goes
    to one client and client k's own mix is p_k up to a factor for each label. A large concentration gives every client the mix of
    the whole data; towards 0, one label each. A client left with fewer than `at_least` examples is filled up, at random, from the
    clients that hold the most. Raises FieldError where there are too few examples for that, or the concentration is not positive
    and finite.

    >>> client = dirichlet([0, 0, 0, 1, 1, 1], clients=2, concentration=0.5)
    >>> client.shape, sorted(set(client.tolist()))
    ((6,), [0, 1])
    """
    _, label = np.unique(as_labels(labels, "labels"), return_inverse=True)
    _check_enough_examples(len(label), clients, at_least)
    if not concentration > 0 or not np.isfinite(concentration):
        raise FieldError("concentration", "positive and finite", concentration,
                         "Write 0.1 for clients with few labels, 100 for clients that are alike.")
    random = named_generator(seed, "dirichlet partition")
    shares = _label_shares(random, clients, int(label.max()) + 1, concentration)
    client = np.empty(len(label), dtype=np.int64)
    for value, share in enumerate(shares.T):
        members = random.permutation(np.flatnonzero(label == value))
        order = random.permutation(clients)                     # so that rounding favours nobody twice
        ends = np.rint(share[order].cumsum() * len(members)).astype(np.int64)
        client[members] = np.repeat(order, np.diff(ends, prepend=0))
    return _fill_small_clients(client, clients, at_least, random)


def label_shards(labels: Any, clients: int, shards_per_client: int = 2, seed: int = 0) -> np.ndarray:
    """Deal examples out to clients in shards of the data sorted by label, so that a client has few labels [McMahan et al. 2017].

    Returns a client id per example, (examples,) int64. The examples, sorted by label and in random order within one, are cut into
    `clients * shards_per_client` shards whose sizes differ by at most one; the shards are dealt out at random, by `seed`. Raises
    FieldError where there are fewer examples than shards.

    >>> sorted(label_shards([1, 0, 1, 0], clients=2, shards_per_client=1).tolist())
    [0, 0, 1, 1]
    """
    values = as_labels(labels, "labels")
    _check_enough_examples(len(values), clients, shards_per_client)
    random = named_generator(seed, "label shards")
    mixed = random.permutation(len(values))
    by_label = mixed[np.argsort(values[mixed], kind="stable")]
    shards = clients * shards_per_client
    owner = random.permutation(np.repeat(np.arange(clients), shards_per_client))
    client = np.empty(len(values), dtype=np.int64)
    client[by_label] = owner[np.arange(len(values)) * shards // len(values)]
    return client


def quantity_skew(examples: int, clients: int, sigma: float, seed: int = 0, at_least: int = 1) -> np.ndarray:
    """Deal `examples` examples out at random to clients with lognormal sizes, all from the same distribution.

    Returns a client id per example, (examples,) int64, drawn by `seed`. Client k holds `at_least` examples and a share of the
    rest in proportion to exp(sigma * z_k), z_k standard normal. sigma = 0 gives equal sizes (to within one example); 1 is mild, 2
    has a few very large clients. Raises FieldError where there are too few examples, or sigma is negative or infinite.

    >>> import numpy
    >>> numpy.bincount(quantity_skew(10, clients=5, sigma=0.0)).tolist()
    [2, 2, 2, 2, 2]
    """
    _check_enough_examples(examples, clients, at_least)
    if not 0 <= sigma < np.inf:
        raise FieldError("sigma", "at least 0", sigma, "Write 0.0 for equal sizes, 1.0 for a mild skew.")
    random = named_generator(seed, "quantity skew")
    logs = sigma * random.standard_normal(clients)
    share = np.exp(logs - logs.max())
    ends = np.rint(share.cumsum() / share.sum() * (examples - at_least * clients)).astype(np.int64)
    size = at_least + np.diff(ends, prepend=0)
    return random.permutation(np.repeat(np.arange(clients), size))


def by_column(values: Any) -> np.ndarray:
    """Make a client of each distinct value: returns a client id per example, (examples,) int64, numbered in sorted order.

    `Population.from_arrays(x, y, client=values)` makes the same clients and keeps the values as their names.

    >>> by_column(["north", "south", "east", "north"]).tolist()
    [1, 2, 0, 1]
    """
    return np.unique(as_labels(values, "values"), return_inverse=True)[1].astype(np.int64)


def _check_enough_examples(examples: int, clients: int, at_least: int) -> None:
    """Raise FieldError unless `clients` and `at_least` are 1 or more and `examples` suffices for `at_least` per client."""
    for name, value in (("clients", clients), ("at_least", at_least)):
        if not isinstance(value, Integral):
            raise FieldError(name, "a whole number", value)
    if clients < 1 or at_least < 1:
        field, came = ("clients", clients) if clients < 1 else ("at_least", at_least)
        raise FieldError(field, "at least 1", came,
                         text=f"there must be at least one client and one example for each, got {clients} clients with "
                              f"{at_least}. A client without examples does not exist in a population.")
    if examples < at_least * clients:
        raise FieldError("clients", f"at most {examples // at_least}", clients,
                         text=f"{examples} examples do not give each of {clients} clients {at_least}. Ask for at most "
                              f"{examples // at_least} clients, or for fewer examples each.")


def _label_shares(random: np.random.Generator, clients: int, labels: int, concentration: float) -> np.ndarray:
    """Draw, from `random`, which share of each label's examples goes to each client: (clients, labels) in [0, 1].

    Each client draws Dirichlet proportions over the labels, which are then scaled so that each label's shares sum to one. All
    in logarithms, since with a small concentration most proportions underflow: log Gamma(c) = log Gamma(c + 1) + log(uniform)
    / c in distribution.
    """
    logs = np.log(random.standard_gamma(concentration + 1, (clients, labels)))
    logs -= random.standard_exponential((clients, labels)) / concentration
    logs -= np.logaddexp.reduce(logs, axis=1, keepdims=True)            # each client's proportions
    return np.exp(logs - np.logaddexp.reduce(logs, axis=0, keepdims=True))


def _fill_small_clients(client: np.ndarray, clients: int, at_least: int, random: np.random.Generator) -> np.ndarray:
    """A copy of `client`, the client id of each example, (examples,), in which each client has at least `at_least` examples.

    There are `clients` clients. The missing examples are taken from the largest clients, at random by `random`; all others stay
    with their client.
    """
    count = np.bincount(client, minlength=clients)
    missing = np.maximum(at_least - count, 0)
    surplus = _examples_to_give_away(count, int(missing.sum()))
    mixed = random.permutation(len(client))
    mixed = mixed[np.argsort(client[mixed], kind="stable")]
    place = np.arange(len(client)) - (count.cumsum() - count)[client[mixed]]
    moved = mixed[place < surplus[client[mixed]]]
    filled = client.copy()
    filled[random.permutation(moved)] = np.repeat(np.arange(clients), missing)
    return filled


def _examples_to_give_away(count: np.ndarray, need: int) -> np.ndarray:
    """How many examples each client gives away, (clients,), so that they sum to `need`; the largest clients give first.

    `count` is how many each client holds. Those that give are left with about the same number, equal to within one.
    """
    low, high = 0, int(count.max())                    # the highest level above which there are at least `need`
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(count - level, 0).sum() >= need else (low, level - 1)
    taken = np.maximum(count - low, 0)
    spare = int(taken.sum()) - need
    taken[np.flatnonzero(taken)[:spare]] -= 1          # spare is less than the number that give
    return taken
