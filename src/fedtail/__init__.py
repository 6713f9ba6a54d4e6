"""fedtail: federated learning that serves every client.

The names below load when they are first used: `import fedtail` itself is instant, and the parts need torch and numpy only.
"""

# ruff: noqa: F401 (the names under TYPE_CHECKING are what type checkers and editors read)

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from fedtail.deprecated import object_of_old_name
from fedtail.version import __version__

if TYPE_CHECKING:
    from fedtail.aggregation import (
        AdaptiveClip,
        ClippedMean,
        CoordinateMedian,
        CorrelatedMean,
        CurvatureMean,
        DelayedMean,
        GeometricMedian,
        GeometricMedianOfRows,
        Krum,
        LossFilter,
        MinimumNormDirection,
        MultiKrum,
        NormFilter,
        PrivateMean,
        TrimmedMean,
        WeightedMean,
    )
    from fedtail.algorithm import Family, FederatedAlgorithm, State, run_round
    from fedtail.channel import IntegerChannel, PlainChannel, SecureChannel
    from fedtail.composition import SmallTailWarning
    from fedtail.data import Population
    from fedtail.divergence import AnswersLeftOutWarning, DivergedWarning, WorseThanConstantWarning
    from fedtail.divisors import FixedDivisor, NoDivisor
    from fedtail.engine import Engine
    from fedtail.evaluation import (
        Distribution,
        EarlyStopping,
        Evaluation,
        FederatedEvaluation,
        FederatedInexactness,
        GradientDissimilarity,
        Validation,
        choose,
        evaluate,
        evaluate_family,
        evaluate_personal,
        finetune,
        gradient_dissimilarity,
        inexactness,
        personal_module,
    )
    from fedtail.history import History
    from fedtail.iterates import AveragedIterate, LastIterate, RandomIterate
    from fedtail.local import (
        MAML,
        AdaptiveProximal,
        Constant,
        Cosine,
        Dane,
        Deadline,
        ExamplePrivateSGD,
        LocalSGD,
        Participants,
        Proximal,
        StepDecay,
        Stragglers,
        UntilInexact,
    )
    from fedtail.personal import Ditto, NoPersonalModels, PersonalModels, ValidatedDitto
    from fedtail.privacy import BufferedNoise, CorrelatedNoise, DiscreteNoise, GaussianNoise, Ledger, PrivacyBudget
    from fedtail.quantiles import ExactQuantile, MajoriseMinimise, NoisyHistogram, private_quantiles
    from fedtail.recipes import (
        afl,
        delta_fl,
        delta_fl_family,
        ditto,
        dp_delta_fl,
        dp_fedavg,
        dp_ftrl,
        fed_adadps,
        fed_dp2,
        fedavg,
        fedavg_sub,
        feddane,
        fedprox,
        l2sgd,
        mean_regularised,
        per_fedavg,
        q_ffl,
        q_ffl_family,
        q_maml,
        term,
    )
    from fedtail.reducers import RiskLoss, RunningTiltedLoss
    from fedtail.risk import (
        AlphaFair,
        Ascent,
        Binned,
        EntropicValueAtRisk,
        FencedSuperquantile,
        GroupAscent,
        Hierarchical,
        IntervalSuperquantile,
        InverseSuperquantile,
        Mean,
        PowerFair,
        QuadraticSuperquantile,
        Refreshed,
        Risk,
        SmoothedSuperquantile,
        Spectral,
        Superquantile,
        TailFilter,
        TailFloor,
        Tilted,
        TiltedValueAtRisk,
        ValueAtRisk,
        Worst,
    )
    from fedtail.sampling import (
        Available,
        ByMass,
        BySize,
        CyclicCohorts,
        Diurnal,
        EqualClients,
        Everyone,
        FirstArrivals,
        Poisson,
        Trace,
        Uniform,
        read_trace,
    )
    from fedtail.server import SGD, Adagrad, Adam, Yogi
    from fedtail.solvers import minimise, minimise_stochastic
    from fedtail.speeds import LogNormalSpeeds, SpeedTable, read_speeds
    from fedtail.task import Metric, Task
    from fedtail.trained import Progress, Trained
    from fedtail.training import BudgetSpentWarning, InterruptedWarning, NoContributionWarning, resume, train

_HOME = {
    "aggregation": ("AdaptiveClip", "ClippedMean", "CoordinateMedian", "CorrelatedMean", "CurvatureMean", "DelayedMean",
                    "GeometricMedian", "GeometricMedianOfRows", "Krum", "LossFilter", "MinimumNormDirection", "MultiKrum",
                    "NormFilter", "PrivateMean", "TrimmedMean", "WeightedMean"),
    "algorithm": ("FederatedAlgorithm", "Family", "State", "run_round"),
    "composition": ("SmallTailWarning",),
    "channel": ("IntegerChannel", "PlainChannel", "SecureChannel"),
    "data": ("Population",),
    "divergence": ("AnswersLeftOutWarning", "DivergedWarning", "WorseThanConstantWarning"),
    "divisors": ("FixedDivisor", "NoDivisor"),
    "engine": ("Engine",),
    "evaluation": ("Distribution", "EarlyStopping", "Evaluation", "FederatedEvaluation", "FederatedInexactness",
                   "GradientDissimilarity", "Validation", "choose", "evaluate", "evaluate_family", "evaluate_personal",
                   "finetune", "gradient_dissimilarity", "inexactness", "personal_module"),
    "history": ("History",),
    "iterates": ("AveragedIterate", "LastIterate", "RandomIterate"),
    "local": ("AdaptiveProximal", "Constant", "Cosine", "Dane", "Deadline", "ExamplePrivateSGD", "LocalSGD", "MAML",
              "Participants", "Proximal", "StepDecay", "Stragglers", "UntilInexact"),
    "personal": ("Ditto", "NoPersonalModels", "PersonalModels", "ValidatedDitto"),
    "privacy": ("BufferedNoise", "CorrelatedNoise", "DiscreteNoise", "GaussianNoise", "Ledger", "PrivacyBudget"),
    "quantiles": ("ExactQuantile", "MajoriseMinimise", "NoisyHistogram", "private_quantiles"),
    "recipes": ("afl", "delta_fl", "delta_fl_family", "ditto", "dp_delta_fl", "dp_fedavg", "dp_ftrl", "fed_adadps", "fed_dp2",
                "fedavg", "fedavg_sub", "feddane", "fedprox", "l2sgd", "mean_regularised", "per_fedavg", "q_ffl",
                "q_ffl_family", "q_maml", "term"),
    "reducers": ("RiskLoss", "RunningTiltedLoss"),
    "risk": ("AlphaFair", "Ascent", "Binned", "EntropicValueAtRisk", "FencedSuperquantile", "GroupAscent", "Hierarchical",
             "IntervalSuperquantile", "InverseSuperquantile", "Mean", "PowerFair", "QuadraticSuperquantile", "Refreshed",
             "Risk", "SmoothedSuperquantile", "Spectral", "Superquantile", "TailFilter", "TailFloor", "Tilted",
             "TiltedValueAtRisk", "ValueAtRisk", "Worst"),
    "sampling": ("Available", "ByMass", "BySize", "CyclicCohorts", "Diurnal", "EqualClients", "Everyone", "FirstArrivals",
                 "Poisson", "Trace", "Uniform", "read_trace"),
    "server": ("SGD", "Adagrad", "Adam", "Yogi"),
    "solvers": ("minimise", "minimise_stochastic"),
    "speeds": ("LogNormalSpeeds", "SpeedTable", "read_speeds"),
    "task": ("Metric", "Task"),
    "trained": ("Progress", "Trained"),
    "training": ("BudgetSpentWarning", "InterruptedWarning", "NoContributionWarning", "resume", "train"),
}
_ROOM_OF = {name: room for room, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_ROOM_OF)]


def __getattr__(name: str) -> Any:
    """The object of a public name, imported from its module at first use and stored here, so that later uses skip this function.

    A submodule is given by its name too, and a deprecated name gives its object with a DeprecationWarning. Raises
    AttributeError for any other name.
    """
    if name not in _ROOM_OF and name in _submodules():
        return importlib.import_module(f"fedtail.{name}")
    if name not in _ROOM_OF:
        return object_of_old_name("fedtail", name)
    value = getattr(importlib.import_module(f"fedtail.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and the names of the submodules, sorted; none of them is imported."""
    return sorted({*__all__, *_submodules()})


def _submodules() -> list[str]:
    """The names of the package's modules and subpackages, without those that begin with "_"; none of them is imported."""
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
