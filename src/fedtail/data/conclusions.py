"""What data of this size can show: how many clients and examples conclusions about a tail need."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedtail.directions import FEW_CLIENTS

TESTED = 0.2                 # share of the clients that `fedtail init` keeps for the test
POINTS = 0.1                 # how precisely a client's error should be known
GAIN, SPREAD = 0.05, 0.1     # a gain that matters, and how much gains differ between clients
WORST = 0.1
ERROR = 0.2                  # of the model that the noise floor is shown for
TAIL_CLIENTS = 10            # that should contribute to a round
CONFIDENCE, POWER = 1.96, 0.84


def data_needs(size: np.ndarray, rates: bool) -> dict[str, Any]:
    """What conclusions need, beside what there is: a dict of numbers, and `sentences` that say it.

    `size` is the number of examples of each client, and `rates` says whether examples are right or wrong (classes). Entries:
    `test_clients`, those of a split of 80% and 20%; `for_promise`, how many bound the 90th percentile of new clients with
    confidence 95%; `for_mean` and `for_worst`, how many show that the mean, or the worst tenth, is better by 0.05 where gains
    differ by 0.1 between clients; `examples`, how many of one client show its error rate to 0.1, and `clients_with_examples`, how
    many clients have them; `floor`, what the worst tenth of clients of the median size would show that all have an error of 0.2,
    or of fewer than 20 clients the worst one (None for numbers).
    """
    clients, median = len(size), int(np.median(size))
    found: dict[str, Any] = {
        "test_clients": round(TESTED * clients), "for_promise": math.ceil(math.log(0.05) / math.log(0.9)),
        "for_mean": math.ceil((CONFIDENCE + POWER) ** 2 * (SPREAD / GAIN) ** 2),
        "for_worst": math.ceil((CONFIDENCE + POWER) ** 2 * (SPREAD / GAIN) ** 2 / WORST),
        "examples": math.ceil((CONFIDENCE / POINTS) ** 2 / 4), "floor": None,
    }
    if rates:
        found["floor"] = worst_of_alike(median, ERROR) if clients >= FEW_CLIENTS else worst_of_few_alike(median, ERROR, clients)
    found["clients_with_examples"] = int((size >= found["examples"]).sum())
    about_examples = _example_sentences(clients, median, found) if rates else []
    return {**found, "sentences": [*_client_sentences(clients, found, rates), *about_examples]}


def worst_of_alike(examples: int, error: float, share: float = WORST) -> float:
    """The mean observed error of the worst `share` of many clients that all have this error, from so many examples each.

    That is the superquantile of the binomial distribution, over the number of examples.

    >>> round(worst_of_alike(1, 0.05), 3)                 # one client in twenty is wrong, of a tenth of them
    0.5
    """
    from scipy.stats import binom

    wrong = np.arange(examples, -1, -1)
    mass = binom.pmf(wrong, examples, error)
    taken = np.diff(np.minimum(np.cumsum(mass), share), prepend=0.0)
    return float(taken @ wrong / taken.sum() / examples)


def worst_of_few_alike(examples: int, error: float, clients: int) -> float:
    """The mean over draws of the largest observed error of so many clients that all have this error, with so many examples each.

    >>> round(worst_of_few_alike(1, 0.5, 2), 3)           # of two coins, three times in four one is wrong
    0.75
    """
    from scipy.stats import binom

    below = binom.cdf(np.arange(examples), examples, error) ** clients       # that all have at most so many wrong
    return float((1 - below).sum() / examples)


def _client_sentences(clients: int, found: dict[str, Any], rates: bool) -> list[str]:
    """Sentences on the number of clients: whether a round has a tail, and what their test part can show.

    `found` are the numbers of `data_needs`; without `rates` gains are in units of how much they differ between clients.
    """
    test = found["test_clients"]
    gain = "A gain of 5 points" if rates else "A gain of half of what gains differ by between clients"
    where = " (where gains differ by 10 points between clients)" if rates else ""
    takes = (f"{gain} takes about {found['for_mean']} test clients to show in the mean and {found['for_worst']} in the worst "
             f"tenth{where}")
    promise = f"A bound on the 90th percentile of new clients takes {found['for_promise']}."
    if clients < FEW_CLIENTS:
        few = "1 client is" if clients == 1 else f"{clients} clients are"
        return [f"{few} few for training on a tail, which should be {TAIL_CLIENTS} clients of a round. Look at each by name.",
                f"{takes}, and there are {clients} in all: what is shown is about these. {promise}"]
    train, enough = clients - test, "which there are" if test >= found["for_worst"] else f"and a fifth of these clients is {test}"
    half = [f"{clients} clients are few for training on a tail: the worst half of {train} training clients is fewer than "
            f"{TAIL_CLIENTS}."] if train < 2 * TAIL_CLIENTS else []
    return [*half, f"{takes}, {enough}. {promise}"]


def _example_sentences(clients: int, median: int, found: dict[str, Any]) -> list[str]:
    """Sentences on the number of examples: how precisely errors of single clients are known, and the noise of their tail."""
    plural = "" if median == 1 else "s"
    worst = "the worst tenth of clients" if clients >= FEW_CLIENTS else f"the worst of {clients}"
    return [f"One client's error rate is known to 10 points from {found['examples']} examples on, which "
            f"{found['clients_with_examples']:,} of {clients:,} clients have. If all clients were alike, with an error of "
            f"{ERROR:.0%}, {worst} with {median:,} example{plural} would show {found['floor']:.0%}."]
