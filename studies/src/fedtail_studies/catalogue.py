"""Every study there is. A new one is a module of this package and its name in `STUDIES`."""

from __future__ import annotations

from fedtail.errors import nearest_hint
from fedtail_studies.adaptive_private.delayed_words import DP2_WORDS
from fedtail_studies.adaptive_private.federated import ADADPS_FEDERATED
from fedtail_studies.adaptive_private.images import ADADPS_MNIST
from fedtail_studies.adaptive_private.movielens import DP2_MOVIELENS
from fedtail_studies.adaptive_private.side_information import ADADPS_WORDS
from fedtail_studies.adaptive_private.toy import ADADPS_TOY
from fedtail_studies.adaptive_private.without_sampling import FTRL_AMPLIFIED
from fedtail_studies.ditto.femnist import DITTO_FEMNIST
from fedtail_studies.ditto.mnist import DITTO_MNIST
from fedtail_studies.ditto.optimal_strength import DITTO_THEORY
from fedtail_studies.ditto.personal_pages import DITTO_PERSONAL
from fedtail_studies.ditto.solver_pages import DITTO_SOLVERS
from fedtail_studies.ditto.vehicle import DITTO_VEHICLE
from fedtail_studies.emnist.convnet import EMNIST_CONVNET
from fedtail_studies.emnist.linear import TABLE2
from fedtail_studies.fair.adult import FAIR_ADULT
from fedtail_studies.fair.draws import FAIR_DRAWS
from fedtail_studies.fair.efficiency import FAIR_EFFICIENCY
from fedtail_studies.fair.heterogeneity import FAIR_HETEROGENEITY
from fedtail_studies.fair.meta import FAIR_META
from fedtail_studies.fair.sent140 import FAIR_SENT140
from fedtail_studies.fair.synthetic import FAIR_SYNTHETIC
from fedtail_studies.fair.vehicle import FAIR_VEHICLE
from fedtail_studies.inference.coverage import INTERVAL_COVERAGE
from fedtail_studies.private.quantiles import PRIVATE_QUANTILES
from fedtail_studies.private.search import PRIVATE_SEARCH
from fedtail_studies.private.training import PRIVATE_TRAINING
from fedtail_studies.prox.dane import PROX_DANE
from fedtail_studies.prox.datasets import PROX_DATASETS
from fedtail_studies.prox.heterogeneity import PROX_HETEROGENEITY
from fedtail_studies.prox.stragglers import PROX_SYNTHETIC
from fedtail_studies.questions.corrupted_tails import CORRUPTED_TAILS
from fedtail_studies.questions.family import FAMILY, FAMILY_FEMNIST
from fedtail_studies.questions.flipped_labels import FLIPPED_LABELS, FLIPPED_LABELS_FEMNIST
from fedtail_studies.questions.interpolation import INTERPOLATION
from fedtail_studies.questions.private_cost import PRIVATE_COST
from fedtail_studies.questions.where_not import WHERE_NOT
from fedtail_studies.study import Study
from fedtail_studies.text.sent140 import SENT140_LINEAR, SENT140_LSTM
from fedtail_studies.text.shakespeare import SHAKESPEARE
from fedtail_studies.theory.bias import BIAS
from fedtail_studies.theory.gaussians import GAUSSIANS
from fedtail_studies.theory.theorem4 import THEOREM4
from fedtail_studies.theory.theorem5 import THEOREM5
from fedtail_studies.tilted.classes_compound import HIV_COMPOUND
from fedtail_studies.tilted.classes_hiv import HIV_CLASSES
from fedtail_studies.tilted.classes_mnist import MNIST_IMBALANCE
from fedtail_studies.tilted.classes_noise import MNIST_ANNOTATORS, MNIST_COMPOUND, MNIST_NOISE
from fedtail_studies.tilted.fairness_femnist import TERM_FEMNIST
from fedtail_studies.tilted.fairness_pca import FAIR_PCA
from fedtail_studies.tilted.fairness_vehicle import VEHICLE
from fedtail_studies.tilted.figures_chernoff import FIGURES_CHERNOFF
from fedtail_studies.tilted.figures_noise import FIGURES_NOISE
from fedtail_studies.tilted.figures_risks import FIGURES_RISKS
from fedtail_studies.tilted.figures_shapes import FIGURES_SHAPES
from fedtail_studies.tilted.figures_toys import FIGURES_TOYS
from fedtail_studies.tilted.meta_sine import SINE
from fedtail_studies.tilted.regression_outliers import REGRESSION_ABALONE, REGRESSION_HOUSING
from fedtail_studies.tilted.regression_qsar import REGRESSION_QSAR

STUDIES: tuple[Study, ...] = (
    TABLE2,
    EMNIST_CONVNET,
    SENT140_LINEAR,
    SENT140_LSTM,
    SHAKESPEARE,
    PRIVATE_QUANTILES,
    PRIVATE_TRAINING,
    PRIVATE_SEARCH,
    INTERPOLATION,
    FAMILY,
    FAMILY_FEMNIST,
    FLIPPED_LABELS,
    FLIPPED_LABELS_FEMNIST,
    WHERE_NOT,
    CORRUPTED_TAILS,
    PRIVATE_COST,
    BIAS,
    THEOREM4,
    THEOREM5,
    GAUSSIANS,
    PROX_SYNTHETIC,
    PROX_DATASETS,
    PROX_HETEROGENEITY,
    PROX_DANE,
    HIV_CLASSES,
    HIV_COMPOUND,
    MNIST_IMBALANCE,
    MNIST_NOISE,
    MNIST_ANNOTATORS,
    MNIST_COMPOUND,
    FAIR_PCA,
    VEHICLE,
    TERM_FEMNIST,
    SINE,
    REGRESSION_QSAR,
    REGRESSION_ABALONE,
    REGRESSION_HOUSING,
    FIGURES_TOYS,
    FIGURES_SHAPES,
    FIGURES_RISKS,
    FIGURES_NOISE,
    FIGURES_CHERNOFF,
    FAIR_SYNTHETIC,
    FAIR_DRAWS,
    FAIR_HETEROGENEITY,
    FAIR_EFFICIENCY,
    FAIR_ADULT,
    FAIR_VEHICLE,
    FAIR_SENT140,
    FAIR_META,
    DITTO_THEORY,
    DITTO_VEHICLE,
    DITTO_FEMNIST,
    DITTO_MNIST,
    DITTO_SOLVERS,
    DITTO_PERSONAL,
    ADADPS_TOY,
    ADADPS_WORDS,
    ADADPS_MNIST,
    DP2_WORDS,
    DP2_MOVIELENS,
    ADADPS_FEDERATED,
    FTRL_AMPLIFIED,
    INTERVAL_COVERAGE,
)


def study_called(name: str) -> Study:
    """The study of that name; refused with the nearest one."""
    names = [study.name for study in STUDIES]
    if name not in names:
        raise ValueError(f"there is no study {name!r}. {nearest_hint(name, names)} `fedtail reproduce list` shows them all.")
    return STUDIES[names.index(name)]
