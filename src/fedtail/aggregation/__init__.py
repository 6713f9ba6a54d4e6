"""How updates become one: the client half makes rows, the server half asks for their sums, or for single rows."""

from fedtail.aggregation.adaptive_clip import AdaptiveClip
from fedtail.aggregation.base import Aggregated, Aggregator
from fedtail.aggregation.coordinate_rules import CoordinateMedian, TrimmedMean
from fedtail.aggregation.correlated_mean import CorrelatedMean
from fedtail.aggregation.curvature_mean import CurvatureMean
from fedtail.aggregation.delayed_mean import DelayedMean
from fedtail.aggregation.geometric_median import GeometricMedian, GeometricMedianOfRows
from fedtail.aggregation.krum import Krum, MultiKrum
from fedtail.aggregation.loss_filter import LossFilter
from fedtail.aggregation.mean_of_models import MeanOfModels
from fedtail.aggregation.minimum_norm import MinimumNormDirection
from fedtail.aggregation.norm_rules import ClippedMean, NormFilter
from fedtail.aggregation.private_mean import PrivateMean
from fedtail.aggregation.weighted_mean import WeightedMean

__all__ = [
    "AdaptiveClip", "Aggregated", "Aggregator", "ClippedMean", "CoordinateMedian", "CorrelatedMean", "CurvatureMean",
    "DelayedMean", "GeometricMedian", "GeometricMedianOfRows", "Krum", "LossFilter", "MeanOfModels", "MinimumNormDirection",
    "MultiKrum", "NormFilter", "PrivateMean", "TrimmedMean", "WeightedMean",
]
