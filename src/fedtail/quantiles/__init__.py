"""Quantiles of one number per client, through sums only."""

from fedtail.quantiles.base import Quantile, boundary, check_quantile, nobody
from fedtail.quantiles.majorise import MajoriseMinimise
from fedtail.quantiles.radix import ExactQuantile, extreme_loss, loss_range

__all__ = ["ExactQuantile", "MajoriseMinimise", "Quantile", "boundary", "check_quantile", "extreme_loss", "loss_range", "nobody"]
