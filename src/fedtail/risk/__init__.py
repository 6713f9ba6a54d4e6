"""Risks: how the losses of many become one number, and how much each contributes."""

from fedtail.risk.alpha_fair import AlphaFair
from fedtail.risk.ascent import Ascent, GroupAscent, project_to_simplex
from fedtail.risk.base import Risk
from fedtail.risk.binned import Binned
from fedtail.risk.entropic import EntropicValueAtRisk, TiltedValueAtRisk
from fedtail.risk.fenced import FencedSuperquantile
from fedtail.risk.hierarchical import Hierarchical
from fedtail.risk.mean import Mean
from fedtail.risk.power_fair import PowerFair
from fedtail.risk.refreshed import Refreshed
from fedtail.risk.smoothed import QuadraticSuperquantile, SmoothedSuperquantile
from fedtail.risk.spectral import Spectral
from fedtail.risk.superquantile import Superquantile, TailFilter, superquantile_weights
from fedtail.risk.tail_floor import TailFloor
from fedtail.risk.tilted import Tilted
from fedtail.risk.trimmed import IntervalSuperquantile, InverseSuperquantile
from fedtail.risk.value_at_risk import ValueAtRisk
from fedtail.risk.worst import Worst

__all__ = [
    "AlphaFair", "Ascent", "Binned", "EntropicValueAtRisk", "FencedSuperquantile", "GroupAscent", "Hierarchical",
    "IntervalSuperquantile", "InverseSuperquantile", "Mean", "PowerFair", "QuadraticSuperquantile", "Refreshed", "Risk",
    "SmoothedSuperquantile", "Spectral", "Superquantile", "TailFilter", "TailFloor", "Tilted", "TiltedValueAtRisk", "ValueAtRisk",
    "Worst", "project_to_simplex", "superquantile_weights",
]
