"""Differential privacy: mechanisms, accountants and one ledger."""

from fedtail.deprecated import old_names
from fedtail.privacy.accounting import Guarantee, delta_at, epsilon_at, guarantee, rounds_affordable
from fedtail.privacy.audit import Attack, gaussian_epsilon
from fedtail.privacy.calibration import NoiseLevels, noise_for, smallest_noise
from fedtail.privacy.correlated_noise import BufferedNoise, CorrelatedNoise
from fedtail.privacy.discrete_gaussian import DiscreteGaussianTable, discrete_gaussian_probability, exact_discrete_gaussian
from fedtail.privacy.events import (
    CorrelatedRelease,
    CyclicSampling,
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    RoundEvent,
)
from fedtail.privacy.group_privacy import GroupGuarantee, group_privacy
from fedtail.privacy.ledger import BudgetSpent, Ledger, PrivacyBudget
from fedtail.privacy.mechanisms import Mechanism, NoisySum, NoPrivacy
from fedtail.privacy.minimum_cohort import minimum_cohort_for, reveal_probability
from fedtail.privacy.noise import DiscreteNoise, GaussianNoise, Noise
from fedtail.privacy.planned_budget import PlannedBudget
from fedtail.privacy.randomness import Randomness, SeededRandomness, SystemRandomness

__all__ = [
    "Attack", "BudgetSpent", "BufferedNoise", "CorrelatedNoise", "CorrelatedRelease", "CyclicSampling",
    "DiscreteGaussianTable", "DiscreteNoise", "FixedSampling", "GaussianNoise", "GaussianRelease", "GroupGuarantee",
    "Guarantee", "LatticeRelease", "Ledger", "Mechanism", "NoPrivacy", "NoSampling", "Noise", "NoiseLevels", "NoisySum",
    "NonPrivateRelease", "PlannedBudget", "PoissonSampling", "PrivacyBudget", "Randomness", "RoundEvent", "SeededRandomness",
    "SystemRandomness", "delta_at", "discrete_gaussian_probability", "epsilon_at", "exact_discrete_gaussian",
    "gaussian_epsilon", "group_privacy", "guarantee", "minimum_cohort_for", "noise_for", "reveal_probability",
    "rounds_affordable", "smallest_noise",
]

__getattr__ = old_names(__name__)
