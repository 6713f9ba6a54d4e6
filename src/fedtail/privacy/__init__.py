"""Differential privacy: mechanisms, accountants and one ledger."""

from fedtail.privacy.accounting import Guarantee, delta_at, epsilon_at, guarantee, rounds_affordable
from fedtail.privacy.audit import Attack, gaussian_epsilon
from fedtail.privacy.calibration import NoiseLevels, noise_for, smallest_noise
from fedtail.privacy.discrete_gaussian import Table, exact, probability
from fedtail.privacy.events import (
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    RoundEvent,
)
from fedtail.privacy.ledger import BudgetSpent, Ledger, Terms
from fedtail.privacy.mechanisms import Mechanism, NoisySum, NoPrivacy
from fedtail.privacy.minimum_cohort import decisive_share, minimum_for
from fedtail.privacy.noise import DiscreteNoise, GaussianNoise, Noise
from fedtail.privacy.randomness import Randomness, SeededRandomness, SystemRandomness

__all__ = [
    "Attack", "BudgetSpent", "DiscreteNoise", "FixedSampling", "GaussianNoise", "GaussianRelease", "Guarantee",
    "LatticeRelease", "Ledger", "Mechanism", "NoPrivacy", "NoSampling", "Noise", "NoiseLevels", "NoisySum",
    "NonPrivateRelease", "PoissonSampling", "Randomness", "RoundEvent", "SeededRandomness", "SystemRandomness", "Table",
    "Terms", "decisive_share", "delta_at", "epsilon_at", "exact", "gaussian_epsilon", "guarantee", "minimum_for", "noise_for",
    "probability", "rounds_affordable", "smallest_noise",
]
