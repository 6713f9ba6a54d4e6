"""How far clients' features are from those of all clients, as total variation distances over a few bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.draws import named_generator

BINS = 10                    # of equal numbers of examples, as far as ties allow
COMPARED = 64                # features at most, evenly spaced
EXAMPLES = 200_000           # at most, evenly spaced
MOST_DIFFERENT = 3           # features that are named


def feature_difference(values: Tensor, rows: Tensor, owner: Tensor, clients: int,
                       names: tuple[str, ...] | None = None) -> dict[str, Any] | None:
    """How different clients are in one input, a dict: `total_variation`, `if_shuffled`, `features`, `compared` and `most`.

    Each feature (entry of an example) is cut into ten bins by quantiles over all examples; a client's distance in it is the total
    variation between its shares of the bins and everybody's, and `total_variation` the mean over clients and features.
    `if_shuffled` is that after examples were dealt out to the clients at random: small clients differ by chance, and only what
    exceeds it is a difference between clients. `features` is the number of entries of an example, `compared` how many of them,
    evenly spaced, were compared, and `most` lists those that exceed chance by most, by `names` where there are some, else by
    number. `values` are (examples, ...), `rows` those of
    the clients' examples and `owner` the client of each. None where an example has no entries.
    """
    features = values[0].numel()
    if not features:
        return None
    some = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), EXAMPLES)).astype(np.int64))
    chosen = np.unique(np.linspace(0, features - 1, min(features, COMPARED)).astype(np.int64))
    table = values.reshape(len(values), -1)[rows[some][:, None], torch.from_numpy(chosen)].double().numpy()
    who = owner.numpy()[some]
    dealt = named_generator(0, "describe features").permutation(who)
    found = np.array([_mean_distances(column, (who, dealt), clients) for column in table.T])          # (compared, 2)
    beyond = found[:, 0] - found[:, 1]
    order = [place for place in np.argsort(-beyond, kind="stable")[:MOST_DIFFERENT] if beyond[place] > 0]
    most = [{"feature": int(chosen[place]) if names is None else names[chosen[place]],
             "total_variation": float(found[place, 0]), "if_shuffled": float(found[place, 1])}
            for place in order]
    return {"total_variation": float(found[:, 0].mean()), "if_shuffled": float(found[:, 1].mean()), "features": features,
            "compared": len(chosen), "most": most}


def _mean_distances(column: np.ndarray, owners: tuple[np.ndarray, ...], clients: int) -> list[float]:
    """The mean over clients of the total variation between a client's shares of the bins of `column` and everybody's.

    One number for each way in which `owners` says whose the examples are.
    """
    edges = np.unique(np.quantile(column, np.arange(1, BINS) / BINS, method="inverted_cdf"))
    bins = np.searchsorted(edges, column, side="left")
    count = len(edges) + 1
    overall = np.bincount(bins, minlength=count) / len(bins)
    distances = []
    for owner in owners:
        held = np.bincount(owner, minlength=clients)
        shares = np.bincount(owner * count + bins, minlength=clients * count).reshape(clients, count)[held > 0]
        distances.append(float(np.abs(shares / held[held > 0, None] - overall).sum(1).mean() / 2))
    return distances
