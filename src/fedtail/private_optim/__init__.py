"""Private optimisers: gradient transforms that compose, for training loops of one's own. The unit of privacy is one example."""

from fedtail.private_optim.clipping import AutomaticClip, ClippingRule, FlatClip, LayerClip, NoClip
from fedtail.private_optim.closed_form import ClosedFormGradients, has_closed_form
from fedtail.private_optim.delayed import DelayedMoment
from fedtail.private_optim.gradient_rows import GivenGradients, RecordGradients
from fedtail.private_optim.methods import (
    PrivateMethod,
    adadps,
    adas,
    dp2,
    dp2_extra_query,
    dp_adagrad,
    dp_adam,
    dp_adam_pub,
    dp_r_pub,
    dp_rmsprop,
    dp_sgd,
    dp_yogi,
    ideal_adadps,
    pda_dpmd,
    without_privacy,
)
from fedtail.private_optim.optimizer import PrivateOptimizer
from fedtail.private_optim.per_example import AutogradGradients, MicroBatchGradients
from fedtail.private_optim.poisson_batches import PoissonBatches
from fedtail.private_optim.preconditioners import FixedPreconditioner, GradientPreconditioner, NoPreconditioner, Preconditioner
from fedtail.private_optim.public_data import PublicData, warm_start
from fedtail.private_optim.queries import ExactGradient, NoisyMean, Preconditioning, PublicGradient
from fedtail.private_optim.rules import AdaptiveRule, GradientDescent, PublicAdam, PublicMixing, PublicScaling, Rule
from fedtail.private_optim.second_moments import AdaGradMoment, RMSPropMoment, SecondMoment, YogiMoment
from fedtail.private_optim.side_information import feature_divisor, frequency_divisor, tfidf_divisor
from fedtail.private_optim.transforms import ClippedGradient, DelayedGradient, ExtraQueryGradient, GradientTransform

__all__ = [
    "AdaGradMoment", "AdaptiveRule", "AutogradGradients", "AutomaticClip", "ClippedGradient", "ClippingRule",
    "ClosedFormGradients", "DelayedGradient", "DelayedMoment", "ExactGradient", "ExtraQueryGradient", "FixedPreconditioner",
    "FlatClip", "GivenGradients", "GradientDescent", "GradientPreconditioner", "GradientTransform", "LayerClip",
    "MicroBatchGradients", "NoClip", "NoPreconditioner", "NoisyMean", "PoissonBatches", "Preconditioner", "Preconditioning",
    "PrivateMethod", "PrivateOptimizer", "PublicAdam", "PublicData", "PublicGradient", "PublicMixing", "PublicScaling",
    "RMSPropMoment", "RecordGradients", "Rule", "SecondMoment", "YogiMoment", "adadps", "adas", "dp2", "dp2_extra_query",
    "dp_adagrad", "dp_adam", "dp_adam_pub", "dp_r_pub", "dp_rmsprop", "dp_sgd", "dp_yogi", "feature_divisor",
    "frequency_divisor", "has_closed_form", "ideal_adadps", "pda_dpmd", "tfidf_divisor", "warm_start", "without_privacy",
]
