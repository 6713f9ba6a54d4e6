"""All that an author of parts needs, in one place: what to derive from, what to declare, what to ask, how to try it out.

A risk derives from `Risk` (around another one from `RiskWrapper`), local training from `LocalTraining`, a penalty from `Penalty`;
an aggregator is an `Aggregator`, the number that risks see of a client an `Objective`. A risk computes `value` and `weights`
along the last axis from `self.present(losses, mass)`; local training keeps rows on its clients by `clients.keep`, as it has
declared. Samplers, schedules, server optimisers and iterates are small classes with the methods of their Protocol. Every part is
a frozen dataclass; one that is sent to nodes derives from `Part`.
"""

from __future__ import annotations

from fedtail.aggregation.base import Aggregated, Aggregator, ratio_of_sums
from fedtail.aggregation.gathered import Contributions, GatheredRows
from fedtail.base_part import Part
from fedtail.client_statistics import ClientStatistics, WeightedClients
from fedtail.clients import Clients
from fedtail.composition import Composition, refusals
from fedtail.conversations import Conversation, Joint, converse, join_conversations
from fedtail.declarations import AggregatorDeclaration, Keeps, LocalDeclaration, RiskDeclaration
from fedtail.deprecated import old_names
from fedtail.iterates import Iterate
from fedtail.local.base import LocalTraining, Objective, Prepared, RoundStart, full_gradients
from fedtail.local.penalties import Penalty, PreparedPenalty
from fedtail.local.schedules import Schedule
from fedtail.local.work import Work
from fedtail.quantiles.base import Quantile
from fedtail.quantiles.multisect import multisect
from fedtail.quantiles.radix import extreme_loss, loss_range
from fedtail.questions import Statistic, StatisticPart, Train
from fedtail.risk.base import PresentClients, Risk, RiskWrapper, fit_locally
from fedtail.sampling import Cohort, Sampler
from fedtail.server import ServerOptimizer

__all__ = [
    "Aggregated", "Aggregator", "AggregatorDeclaration", "ClientStatistics", "Clients", "Cohort", "Composition",
    "Contributions", "Conversation", "GatheredRows", "Iterate", "Joint", "Keeps", "LocalDeclaration", "LocalTraining",
    "Objective", "Part", "Penalty", "Prepared", "PreparedPenalty", "PresentClients", "Quantile", "Risk", "RiskDeclaration",
    "RiskWrapper", "RoundStart", "Sampler", "Schedule", "ServerOptimizer", "Statistic", "StatisticPart", "Train",
    "WeightedClients", "Work", "converse", "extreme_loss", "fit_locally", "full_gradients", "join_conversations",
    "loss_range", "multisect", "ratio_of_sums", "refusals",
]

__getattr__ = old_names(__name__)
