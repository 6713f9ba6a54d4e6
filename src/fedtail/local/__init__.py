"""What a client does with its data: from the model received to an update."""

from fedtail.local.adaptive_proximal import AdaptiveProximal
from fedtail.local.base import LocalTraining, Objective, Prepared, RoundStart, full_gradients
from fedtail.local.dane import Dane
from fedtail.local.full_gradient import FullGradient
from fedtail.local.participants import Participants
from fedtail.local.penalties import NoPenalty, Penalty, PreparedPenalty, Proximal
from fedtail.local.schedules import Constant, Cosine, Schedule, StepDecay
from fedtail.local.sgd import LocalSGD
from fedtail.local.work import FullWork, Stragglers, Work

__all__ = ["AdaptiveProximal", "Constant", "Cosine", "Dane", "FullGradient", "FullWork", "LocalSGD", "LocalTraining", "NoPenalty",
           "Objective", "Participants", "Penalty", "Prepared", "PreparedPenalty", "Proximal", "RoundStart", "Schedule",
           "StepDecay", "Stragglers", "Work", "full_gradients"]
