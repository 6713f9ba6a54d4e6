"""How updates become one: the client half makes rows, the server half asks for their sums."""

from fedtail.aggregation.adaptive_clip import AdaptiveClip
from fedtail.aggregation.base import Aggregated, Aggregator
from fedtail.aggregation.curvature_mean import CurvatureMean
from fedtail.aggregation.private_mean import PrivateMean
from fedtail.aggregation.weighted_mean import WeightedMean

__all__ = ["AdaptiveClip", "Aggregated", "Aggregator", "CurvatureMean", "PrivateMean", "WeightedMean"]
