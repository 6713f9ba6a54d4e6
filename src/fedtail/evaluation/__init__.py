"""How a model does, as a distribution over clients."""

from fedtail.evaluation.client_histogram import ClientHistogram
from fedtail.evaluation.distribution import Distribution, table
from fedtail.evaluation.evaluate import Evaluation, evaluate
from fedtail.evaluation.family import Choice, FamilyEvaluation, choose, evaluate_family
from fedtail.evaluation.federated import FederatedEvaluation, MetricRange
from fedtail.evaluation.finetune import FineTuned, finetune

__all__ = ["Choice", "ClientHistogram", "Distribution", "Evaluation", "FamilyEvaluation", "FederatedEvaluation", "FineTuned",
           "MetricRange", "choose", "evaluate", "evaluate_family", "finetune", "table"]
