"""Quantiles of one number per client, through sums only."""

from fedtail.deprecated import old_names
from fedtail.quantiles.base import Quantile, boundary_dual, check_quantile, empty_tail
from fedtail.quantiles.histogram import Edges, tail_boundary
from fedtail.quantiles.majorise import MajoriseMinimise
from fedtail.quantiles.noisy_histogram import NoisyHistogram
from fedtail.quantiles.planning import QuantilePlan, plan_quantiles
from fedtail.quantiles.private import QuantileRelease, private_quantiles
from fedtail.quantiles.radix import ExactQuantile, extreme_loss, loss_range
from fedtail.quantiles.strategies import Strategy, flat_strategy, optimal_strategy, tree_strategy

__all__ = [
    "Edges", "ExactQuantile", "MajoriseMinimise", "NoisyHistogram", "Quantile", "QuantilePlan", "QuantileRelease", "Strategy",
    "boundary_dual", "check_quantile", "empty_tail", "extreme_loss", "flat_strategy", "loss_range", "optimal_strategy",
    "plan_quantiles", "private_quantiles", "tail_boundary", "tree_strategy",
]

__getattr__ = old_names(__name__)
