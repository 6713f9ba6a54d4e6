"""How a model does, as a distribution over clients."""

from fedtail.deprecated import old_names
from fedtail.evaluation.client_histogram import ClientHistogram
from fedtail.evaluation.client_profiles import ClientProfiles, client_profiles
from fedtail.evaluation.dissimilarity import Dissimilarity, GradientDissimilarity, gradient_dissimilarity
from fedtail.evaluation.distribution import Distribution, text_table
from fedtail.evaluation.early_stopping import EarlyStopping
from fedtail.evaluation.evaluate import Evaluation, evaluate
from fedtail.evaluation.family import Choice, FamilyEvaluation, choose, evaluate_family
from fedtail.evaluation.federated import FederatedEvaluation, MetricRange
from fedtail.evaluation.finetune import FineTuned, finetune
from fedtail.evaluation.inexactness import FederatedInexactness, inexactness
from fedtail.evaluation.personal import PersonalEvaluation, evaluate_personal, personal_module
from fedtail.evaluation.validation import Validation

__all__ = ["Choice", "ClientHistogram", "ClientProfiles", "Dissimilarity", "Distribution", "EarlyStopping", "Evaluation",
           "FamilyEvaluation", "FederatedEvaluation", "FederatedInexactness", "FineTuned", "GradientDissimilarity", "MetricRange",
           "PersonalEvaluation", "Validation", "choose", "client_profiles", "evaluate", "evaluate_family", "evaluate_personal",
           "finetune", "gradient_dissimilarity", "inexactness", "personal_module", "text_table"]

__getattr__ = old_names(__name__)
