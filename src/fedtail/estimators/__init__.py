"""Estimators of scikit-learn that minimise a tail risk: regression, classification and PCA, tilted or by the superquantile.

They work in pipelines and in grid search, take `sample_weight` and `groups`, and are imported only with `fedtail.estimators`.
"""

from fedtail.estimators.linear import (
    SuperquantileLinearRegression,
    SuperquantileLogisticRegression,
    TiltedLinearRegression,
    TiltedLogisticRegression,
)
from fedtail.estimators.pca import SuperquantilePCA, TiltedPCA

__all__ = [
    "SuperquantileLinearRegression", "SuperquantileLogisticRegression", "SuperquantilePCA", "TiltedLinearRegression",
    "TiltedLogisticRegression", "TiltedPCA",
]
