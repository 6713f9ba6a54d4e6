"""Who shares masks and secrets with whom, where every pair would be too many: few random neighbours for each client.

After Bell, Bonawitz, Gascón, Lepoint and Raykova, 2020. Clients stand on a circle in a random order, which follows from the keys
of all of them; each has the k/2 clients before it and the k/2 behind it for neighbours (a Harary graph). Of n clients, up to c
are corrupted (on the server's side) and up to d drop out, whoever they are, as long as it does not depend on the order. A row
stays secret unless

1. some honest client has t corrupted neighbours or more, who hold the t shares that restore its secrets; or
2. those who are honest and stay are not connected: then each part of them has a sum of its own.

A sum is lost where some client has fewer than t neighbours left. A client's neighbours are a uniform draw of k from the n - 1
others, so 1 and the loss are tails of the hypergeometric distribution, summed over clients. For 2 there must be two gaps on
the circle, each of k/2 places or more in a row whose clients are all gone: a union bound over pairs of places. All of it is
computed in exact fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from fedtail.secure.encoding import Refused
from fedtail.secure.primitives import fill_with_key_stream, key_stream

CORRUPTED = 0.1            # the share of clients that may be on the server's side, unless a client is told otherwise
SECURITY_BITS = 40         # rows stay secret but for a probability of 2^-40
CORRECTNESS_BITS = 20      # and sums are not lost but for one of 2^-20


def hypergeometric_tail(others: int, marked: int, drawn: int, least: int) -> Fraction:
    """The exact probability that at least `least` of `drawn` clients are marked, by the hypergeometric distribution.

    The clients are drawn without replacement from `others` clients, `marked` of which are marked.

    >>> hypergeometric_tail(4, 2, 2, 2)
    Fraction(1, 6)
    """
    ways = sum(math.comb(marked, x) * math.comb(others - marked, drawn - x) for x in range(max(least, 0), min(marked, drawn) + 1))
    return Fraction(ways, math.comb(others, drawn))


@lru_cache(maxsize=64)
def disclosure_probability(clients: int, neighbours: int, share_threshold: int, corrupted: int, dropped: int,
                           queries: int = 1) -> Fraction:
    """An upper bound, as an exact fraction, on the probability that a session discloses more than the sums of its queries.

    That happens where `share_threshold` or more of the `neighbours` of an honest client are corrupted, or where the honest
    clients that stay are not connected in the graph. `clients`, `corrupted` and `dropped` (those that may drop out) are numbers
    of clients. Who drops out may differ from query to query, so the second event is counted `queries` times. The bound may
    exceed 1.

    >>> float(disclosure_probability(1000, 46, 26, corrupted=100, dropped=100)) < 2**-40
    True
    """
    captured = (clients - corrupted) * hypergeometric_tail(clients - 1, corrupted, neighbours, share_threshold)
    gaps = Fraction(math.comb(clients, 2) * math.comb(corrupted + dropped, neighbours), math.comb(clients, neighbours))
    return captured + queries * gaps


def loss_probability(clients: int, neighbours: int, share_threshold: int, dropped: int, queries: int = 1) -> Fraction:
    """An upper bound, as an exact fraction, on the probability that the sum of some query of a session cannot be unmasked.

    A sum is lost where so many of some client's `neighbours` drop out that fewer than `share_threshold` are left. At most
    `dropped` of the `clients` drop out of each of the `queries`. The bound may exceed 1.
    """
    return queries * clients * hypergeometric_tail(clients - 1, dropped, neighbours, neighbours - share_threshold + 1)


@lru_cache(maxsize=64)
def fewest_neighbours(clients: int, corrupted: int, dropped: int, queries: int = 1, security_bits: int = SECURITY_BITS,
                      correctness_bits: int = CORRECTNESS_BITS) -> tuple[int, int] | None:
    """(k, t): the smallest even number of neighbours that suffices, and how many of them restore a secret. None if no k does.

    It suffices where rows are disclosed with probability at most 2^-security_bits, and sums lost with at most
    2^-correctness_bits, when `corrupted` clients collude and `dropped` drop out. t is more than half of k, so that no two groups
    of neighbours can be asked for different secrets. k is at most `clients` - 2: else every pair shares a mask. The
    probabilities are those of a session of `queries` sums.

    >>> fewest_neighbours(10_000, corrupted=1000, dropped=1000)
    (54, 30)
    """
    def smallest_threshold(half: int) -> int | None:
        """The smallest t, the shares that restore a secret, that keeps rows secret with 2 * half neighbours.

        None if there is none, or if sums are then lost with a probability above 2^-correctness_bits.
        """
        k = 2 * half
        secret = (t for t in range(half + 1, k + 1)
                  if disclosure_probability(clients, k, t, corrupted, dropped, queries) <= Fraction(1, 1 << security_bits))
        t = next(secret, None)
        kept = t is not None and loss_probability(clients, k, t, dropped, queries) <= Fraction(1, 1 << correctness_bits)
        return t if kept else None

    most = (clients - 2) // 2                       # with one more, everybody is a neighbour
    few, many = 0, 1                                # too few; enough, or beyond the most
    while many <= most and smallest_threshold(many) is None:
        few, many = many, 2 * many
    while many - few > 1:                           # with two neighbours and one share more, every tail is smaller
        middle = (few + many) // 2
        few, many = (few, middle) if middle > most or smallest_threshold(middle) is not None else (middle, many)
    found = smallest_threshold(many) if many <= most else None
    return None if found is None else (2 * many, found)


def clients_in_share(share: float, clients: int) -> int:
    """`share` * `clients` rounded up to an integer; an excess of up to 1e-9 over an integer is taken for a rounding error."""
    return math.ceil(share * clients - 1e-9)


def check_disclosure_probability(clients: int, neighbours: int, share_threshold: int, dropped: int, queries: int,
                                 corrupted: float, security_bits: int) -> None:
    """Raise `Refused` where a session may disclose rows with a probability above 2^-security_bits.

    Each of the `clients` has `neighbours` neighbours, `share_threshold` of whom restore its secrets. `corrupted` is the
    fraction of clients that collude with the server, `dropped` the number that may drop out of each of the `queries`.
    """
    captured = clients_in_share(corrupted, clients)
    risk = disclosure_probability(clients, neighbours, share_threshold, captured, dropped, queries)
    if risk > Fraction(1, 1 << security_bits):
        raise Refused(f"with {neighbours} neighbours each, {share_threshold} of whom restore a secret, rows are disclosed with "
                      f"probability up to {min(float(risk), 1.0):.2g} where {captured} of {clients} clients are corrupted and "
                      f"{dropped} drop out; this client requires 2^-{security_bits}.")


@lru_cache(maxsize=4)
def circle_order(seed: bytes, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """(order, place): the client at each place of the circle, and the place of each client; integer arrays, (clients,).

    Clients are numbered from 0. The order is a uniform permutation that follows from `seed` (32 bytes): clients are sorted by
    128 bits each of the seed's key stream, of which two are equal with a probability below 2^-100. The last 4 results are
    cached: do not change the arrays.
    """
    bits, zeros = np.empty((2, clients), "<u8"), np.zeros((2, clients), "<u8")
    fill_with_key_stream(key_stream(seed), bits.reshape(-1), zeros.reshape(-1))
    order = np.lexsort((bits[1], bits[0]))
    place = np.empty(clients, np.intp)
    place[order] = np.arange(clients)
    return order, place


def neighbours_of(one: int, order: np.ndarray, place: np.ndarray, neighbours: int) -> list[int]:
    """The `neighbours` / 2 clients before client `one` on the circle, the farthest first, then as many behind it, nearest first.

    `order` is the client at each place of the circle, and `place` the place of each client, as `circle_order` returns them.

    >>> neighbours_of(3, np.arange(6), np.arange(6), 4)
    [1, 2, 4, 5]
    """
    half = neighbours // 2
    offsets = np.concatenate([np.arange(-half, 0), np.arange(1, half + 1)])
    return order[(place[one] + offsets) % len(order)].tolist()
