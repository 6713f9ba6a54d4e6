"""Who exists: populations, the papers' data, and ways to deal one data set out to clients."""

from fedtail.data.arrays import sparse_rows
from fedtail.data.class_names import with_classes, with_number_targets
from fedtail.data.generators import (
    LinearClients,
    Splits,
    digits,
    label_shift,
    synthetic,
    synthetic_hybrid,
    synthetic_iid,
    synthetic_models,
    three_gaussians,
)
from fedtail.data.leaf import encode_characters
from fedtail.data.partition import by_column, dirichlet, label_shards, quantity_skew
from fedtail.data.population import Population, pad_sequences
from fedtail.data.scaling import Scaling
from fedtail.data.sets import as_sets

__all__ = [
    "LinearClients",
    "Population",
    "Scaling",
    "Splits",
    "as_sets",
    "by_column",
    "digits",
    "dirichlet",
    "encode_characters",
    "label_shards",
    "label_shift",
    "pad_sequences",
    "quantity_skew",
    "sparse_rows",
    "synthetic",
    "synthetic_hybrid",
    "synthetic_iid",
    "synthetic_models",
    "three_gaussians",
    "with_classes",
    "with_number_targets",
]
