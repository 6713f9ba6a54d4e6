"""What a client does with its data: from the model received to an update."""

from fedtail.local.adaptive_proximal import AdaptiveProximal
from fedtail.local.base import LocalTraining, Objective, Prepared, RoundStart, full_gradients
from fedtail.local.dane import Dane
from fedtail.local.deadline import Deadline
from fedtail.local.example_private import ExamplePrivateSGD
from fedtail.local.finetuning_penalties import EWC, SymmetrisedKL, TrainOnly
from fedtail.local.full_gradient import FullGradient
from fedtail.local.maml import MAML
from fedtail.local.mean_regularised import MeanRegularised
from fedtail.local.participants import Participants
from fedtail.local.penalties import NoPenalty, Penalty, PreparedPenalty, Proximal
from fedtail.local.schedules import Constant, Cosine, Schedule, StepDecay
from fedtail.local.sgd import LocalSGD
from fedtail.local.until_inexact import UntilInexact
from fedtail.local.work import FullWork, Stragglers, Work

__all__ = ["EWC", "MAML", "AdaptiveProximal", "Constant", "Cosine", "Dane", "Deadline", "ExamplePrivateSGD", "FullGradient",
           "FullWork", "LocalSGD", "LocalTraining", "MeanRegularised", "NoPenalty", "Objective", "Participants", "Penalty",
           "Prepared", "PreparedPenalty", "Proximal", "RoundStart", "Schedule", "StepDecay", "Stragglers", "SymmetrisedKL",
           "TrainOnly", "UntilInexact", "Work", "full_gradients"]
