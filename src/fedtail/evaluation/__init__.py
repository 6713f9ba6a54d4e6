"""How a model does, as a distribution over clients."""

from fedtail.evaluation.distribution import Distribution, table
from fedtail.evaluation.evaluate import Evaluation, evaluate
from fedtail.evaluation.family import Choice, FamilyEvaluation, choose, evaluate_family
from fedtail.evaluation.finetune import FineTuned, finetune

__all__ = ["Choice", "Distribution", "Evaluation", "FamilyEvaluation", "FineTuned", "choose", "evaluate", "evaluate_family",
           "finetune", "table"]
