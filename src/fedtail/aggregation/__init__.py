"""How updates become one: the client half makes rows, the server half asks for their sums."""

from fedtail.aggregation.base import Aggregator
from fedtail.aggregation.curvature_mean import CurvatureMean
from fedtail.aggregation.weighted_mean import WeightedMean

__all__ = ["Aggregator", "CurvatureMean", "WeightedMean"]
