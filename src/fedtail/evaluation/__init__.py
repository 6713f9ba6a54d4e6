"""How a model does, as a distribution over clients."""

from fedtail.deprecated import old_names
from fedtail.evaluation.client_histogram import ClientHistogram
from fedtail.evaluation.dissimilarity import Dissimilarity, GradientDissimilarity, gradient_dissimilarity
from fedtail.evaluation.distribution import Distribution, text_table
from fedtail.evaluation.evaluate import Evaluation, evaluate
from fedtail.evaluation.family import Choice, FamilyEvaluation, choose, evaluate_family
from fedtail.evaluation.federated import FederatedEvaluation, MetricRange
from fedtail.evaluation.finetune import FineTuned, finetune

__all__ = ["Choice", "ClientHistogram", "Dissimilarity", "Distribution", "Evaluation", "FamilyEvaluation", "FederatedEvaluation",
           "FineTuned", "GradientDissimilarity", "MetricRange", "choose", "evaluate", "evaluate_family", "finetune",
           "gradient_dissimilarity", "text_table"]

__getattr__ = old_names(__name__)
