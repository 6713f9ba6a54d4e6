"""The distributed discrete Gaussian sum: integer rows, a share of the noise from every client, sums modulo M.

Client i sends row_i + xi_i modulo M, the xi_i independent discrete Gaussians of variance sigma^2 in every coordinate. What is
planned is the number n of honest shares that must come together; a sum of fewer is not released. [PLMH22q, section 3.1],
with the corrections of `docs/departures.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedtail.privacy.discrete_gaussian import variance_as_fraction

SMALLEST = 2            # variance of a share: from here the sum of shares is a discrete Gaussian for all that matters


@dataclass(frozen=True)
class NoiseShares:
    """Noise of `variance` (sigma^2) from each of at least `honest` (n) clients, in each of `width` (d) coordinates."""

    variance: Fraction
    honest: int
    width: int

    def __post_init__(self) -> None:
        """Raise a ValueError where `honest` or `width` is below 1 or `variance` below 2."""
        if self.honest < 1 or self.width < 1:
            raise ValueError(f"noise shares need a client and a coordinate, got honest={self.honest}, width={self.width}.")
        if self.variance < SMALLEST:
            raise ValueError(f"the variance of a share must be at least {SMALLEST}, got {float(self.variance):g}: below, a sum "
                             "of discrete Gaussians is not one. Scale the rows up.")

    @classmethod
    def from_total_deviation(cls, deviation: float, honest: int, width: int) -> NoiseShares:
        """Shares whose sum over `honest` clients has a standard deviation of at least `deviation` in each of `width` coordinates.

        The variance of a share is rounded up to a ratio of small integers. A ValueError where it is below 2, or `width` below
        1; `honest` must be positive.
        """
        return cls(variance_as_fraction(deviation**2 / honest), honest, width)

    @property
    def total_deviation(self) -> float:
        """Standard deviation of the noise in each coordinate of a sum of `honest` shares: sqrt(honest * variance)."""
        return math.sqrt(self.honest * self.variance)

    @property
    def log_ratio_bound(self) -> float:
        """psi of [PLMH22q, Theorem 1]: bounds the log-ratio of the probabilities of the summed shares and of a discrete Gaussian.

        10 sum_{k=1}^{n-1} exp(-2 pi^2 sigma^2 k/(k+1)), with n = `honest` and sigma^2 = `variance`, evaluated term by term; the
        closed bound printed there has the wrong direction. It is 0 for one share.
        """
        k = np.arange(1, self.honest)
        return 10 * float(np.exp(-2 * math.pi**2 * float(self.variance) * k / (k + 1)).sum())

    def concentrated_epsilon(self, sensitivity: float) -> float:
        """The epsilon at which the sum of `honest` shares gives (epsilon^2 / 2)-zCDP.

        It is min( sqrt(S^2 / (n sigma^2) + psi d / 2), S / (sqrt(n) sigma) + psi sqrt(d) ), where `sensitivity` (S) is by how
        much the sums of neighbouring data differ in L2 norm, n = `honest`, sigma^2 = `variance`, d = `width` and psi =
        `log_ratio_bound`.
        """
        ratio, psi = sensitivity / self.total_deviation, self.log_ratio_bound
        return min(math.sqrt(ratio**2 + psi * self.width / 2), ratio + psi * math.sqrt(self.width))

    def largest_noise(self, clients: int, failure: float) -> int:
        """A bound on the absolute noise in every coordinate of a sum over `clients` clients.

        It is exceeded in some coordinate with probability `failure` at most.
        """
        return math.ceil(math.sqrt(2 * clients * self.variance * math.log(2 * self.width / failure)))

    def wrap_probability(self, clients: int, low: int, high: int, modulus: int) -> float:
        """A bound on the probability that a noisy sum over `clients` clients is decoded wrongly in some coordinate.

        Sums are taken modulo `modulus`; `low` and `high` bound every entry of the sum before noise. It is 1 where the modulus
        leaves no room for noise.
        """
        room = (modulus - 1 - (high - low)) // 2
        if room <= 0:
            return 1.0
        return min(1.0, 2 * self.width * math.exp(-(room**2) / (2 * clients * float(self.variance))))


@dataclass(frozen=True)
class Ring:
    """Integers modulo `modulus` (M), read as those from `low` on: sums in [low, low + M) come out as they are."""

    modulus: int
    low: int

    @classmethod
    def for_sums(cls, shares: NoiseShares, clients: int, low: int, high: int, failure: float = 2.0**-40) -> Ring:
        """The ring, with a power of two as its modulus, that decodes sums over `clients` clients with their `shares` of noise.

        `low` and `high` bound every entry of the sum before noise. A sum is decoded wrongly with probability `failure` at most.
        """
        reach = shares.largest_noise(clients, failure)
        return cls(1 << (high - low + 2 * reach).bit_length(), low - reach)

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Integer rows reduced modulo `modulus` (M), elementwise: values from 0 to M - 1, in the shape of `rows`."""
        return np.mod(rows, self.modulus)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """For each sum modulo `modulus` (M), the integer in [low, low + M) that it stands for, in the shape of `total`."""
        return np.mod(total - self.low, self.modulus) + self.low
