"""What the analysis of Delta-FL, FedProx, q-FFL, Ditto and tilted losses says in numbers: bias, steps, uniformity, tails.

Everything here is exact or certified and nothing here trains: the functions check a run, or choose its constants, by
the results of [PLMH23] (section 5.1 and appendix A) and [Li23] (chapters 3, 4, 5 and 7). Symbols: `smoothness` (L), `lipschitz`
(G), `strength` (lambda, or mu for a proximal term or a Moreau envelope), `local_steps` (tau), `num_rounds` (T), `cohort_size`
(m; K for FedProx), `num_clients` (n), `tail_fraction` (theta), `smoothing` (nu), `learning_rate` (gamma), `tilt` (t), `power`
(q), `dissimilarity` (B).
"""

from fedtail.theory.chernoff import chernoff_bound, classic_chernoff_bound
from fedtail.theory.cohort_bias import (
    bias_bound,
    expected_minibatch_superquantile,
    expected_minibatch_weights,
    variance_bound,
)
from fedtail.theory.ditto import (
    DittoProblem,
    PersonalError,
    ditto_error,
    ditto_step_size,
    ditto_step_size_for_rate,
    ditto_strength,
)
from fedtail.theory.fairness import (
    Uniformity,
    entropy_derivative,
    mixture_bound,
    mixture_factor,
    power_entropy,
    power_fair_smoothness,
    power_mean,
    power_mean_log_derivative,
    uniformity,
)
from fedtail.theory.fedprox import ProximalChoice, convex_proximal_strength, dissimilarity_bound, fedprox_decrease
from fedtail.theory.moreau import moreau_gradient
from fedtail.theory.steps import StepSize, averaging_contraction, convex_step_size, nonconvex_step_size, tilted_step_size

__all__ = [
    "DittoProblem", "PersonalError", "ProximalChoice", "StepSize", "Uniformity", "averaging_contraction", "bias_bound",
    "chernoff_bound", "classic_chernoff_bound", "convex_proximal_strength", "convex_step_size", "dissimilarity_bound",
    "ditto_error", "ditto_step_size", "ditto_step_size_for_rate", "ditto_strength", "entropy_derivative",
    "expected_minibatch_superquantile", "expected_minibatch_weights", "fedprox_decrease", "mixture_bound", "mixture_factor",
    "moreau_gradient", "nonconvex_step_size", "power_entropy", "power_fair_smoothness", "power_mean",
    "power_mean_log_derivative", "tilted_step_size", "uniformity", "variance_bound",
]
