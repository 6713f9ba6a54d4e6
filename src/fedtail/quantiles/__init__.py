"""Quantiles of one number per client, through sums only."""

from fedtail.quantiles.base import Quantile, boundary, nobody
from fedtail.quantiles.majorise import MajoriseMinimise
from fedtail.quantiles.radix import ExactQuantile, extreme_loss, loss_range

__all__ = ["ExactQuantile", "MajoriseMinimise", "Quantile", "boundary", "extreme_loss", "loss_range", "nobody"]
