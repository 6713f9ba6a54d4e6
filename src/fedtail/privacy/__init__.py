"""Differential privacy: exact integer noise, and where its randomness comes from."""

from fedtail.privacy.discrete_gaussian import Table, exact, probability
from fedtail.privacy.randomness import Randomness, SeededRandomness, SystemRandomness

__all__ = ["Randomness", "SeededRandomness", "SystemRandomness", "Table", "exact", "probability"]
