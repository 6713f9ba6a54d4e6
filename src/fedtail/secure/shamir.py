"""Shares of a 32-byte secret: any `threshold` of them give it back, fewer say nothing about it.

A polynomial with the secret at zero and uniform coefficients over the integers modulo a prime; share x is its value at x.
The prime is the largest of 33 bytes, so secrets fit whole, and a draw of 33 bytes is practically never drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from fedtail.secure.encoding import Refused
from fedtail.secure.primitives import Randomness, system

PRIME = 2**264 - 275
SIZE = 33             # bytes of a share
SECRET = 32


def split_secret(secret: bytes, threshold: int, points: Sequence[int], random: Randomness = system) -> list[bytes]:
    """Shamir shares of a 32-byte secret, 33 bytes each, one for each of `points` and in their order; any `threshold` restore it.

    Draws the coefficients of the polynomial from `random`. Raises a ValueError where the secret has another length, the threshold
    is not in 1..len(points), or the points are not distinct and positive.
    """
    if len(secret) != SECRET or not 1 <= threshold <= len(points):
        raise ValueError(f"needs a secret of {SECRET} bytes and a threshold in 1..{len(points)}, the number of shares; got "
                         f"{len(secret)} bytes and {threshold}.")
    if len(set(points)) < len(points) or min(points) < 1:
        raise ValueError("points must be distinct and positive: the value at 0 is the secret.")
    coefficients = [_random_element(random) for _ in range(threshold - 1)] + [int.from_bytes(secret, "big")]
    return [_polynomial_value(coefficients, x).to_bytes(SIZE, "big") for x in points]


def _random_element(random: Randomness) -> int:
    """A uniform integer in [0, PRIME); draws 33 bytes from `random`, again while they are too large."""
    while (drawn := int.from_bytes(random(SIZE), "big")) >= PRIME:
        pass
    return drawn


def _polynomial_value(coefficients: list[int], x: int) -> int:
    """The value at `x`, modulo PRIME, of the polynomial with these coefficients, that of the highest power first."""
    total = 0
    for one in coefficients:      # reduced once, at the end: points are small, and a division costs more than longer numbers
        total = total * x + one
    return total % PRIME


def lagrange_weights(points: Sequence[int]) -> dict[int, int]:
    """The Lagrange coefficient at zero, modulo PRIME, of each of `points`, by point; the points must be distinct and not empty.

    The secret is the sum of coefficient times share. That of point x is the product of y / (y - x) over the other points y.
    """
    return _cached_lagrange_weights(tuple(points))


@lru_cache(maxsize=16)
def _cached_lagrange_weights(points: tuple[int, ...]) -> dict[int, int]:
    """The Lagrange coefficients at zero modulo PRIME, by point, computed with a single modular inverse.

    The last 16 results are cached, as all sums of a session use the same points; callers share the dict and must not change it.
    """
    below = [x * _product_modulo_prime([other - x for other in points if other != x]) % PRIME for x in points]
    before = list(accumulate(below, lambda one, other: one * other % PRIME, initial=1))      # products of those before each
    rest, found = _product_modulo_prime(points) * pow(before[-1], -1, PRIME) % PRIME, {}      # one inverse for all of them
    for x, one, product in zip(reversed(points), reversed(below), reversed(before[:-1]), strict=True):
        found[x], rest = product * rest % PRIME, rest * one % PRIME
    return found


def _product_modulo_prime(factors: Sequence[int]) -> int:
    """The product of `factors` modulo PRIME; one where there are none."""
    total = 1
    for first in range(0, len(factors), 64):      # small numbers: a division is worth it once in a while
        total = total * math.prod(factors[first:first + 64]) % PRIME
    return total


def restore_secret(shares: Mapping[int, bytes], counts: Mapping[int, int] | None = None) -> bytes:
    """The 32-byte secret that `shares`, given by point, restore; they must be at least as many as the threshold.

    `counts` are the points' Lagrange coefficients (`lagrange_weights`), computed here if None. Too few or wrong shares give some
    other secret, so compare it with a public key or a commitment. Raises `Refused` where it does not fit in 32 bytes, or a share
    is not in the field.
    """
    counts = lagrange_weights(list(shares)) if counts is None else counts
    total = sum(counts[x] * share_as_integer(one) for x, one in shares.items()) % PRIME
    if total >> 8 * SECRET:
        raise Refused("shares do not belong together: they give no secret of 32 bytes.")
    return total.to_bytes(SECRET, "big")


def share_as_integer(one: bytes) -> int:
    """The share `one`, 33 bytes, as an integer in [0, PRIME); raises `Refused` where it has another length or is too large."""
    value = int.from_bytes(one, "big")
    if len(one) != SIZE or value >= PRIME:
        raise Refused("a share is not a number of the field.")
    return value
