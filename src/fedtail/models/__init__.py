"""The papers' models, as plain modules: linear ones, a small convolutional one, recurrent ones."""

from fedtail.models.convnet import ConvNet
from fedtail.models.linear_models import LeastSquares, LogisticRegression, SoftmaxRegression, SparseLinear
from fedtail.models.recurrent import CharacterGRU, LSTMClassifier

__all__ = ["CharacterGRU", "ConvNet", "LSTMClassifier", "LeastSquares", "LogisticRegression", "SoftmaxRegression",
           "SparseLinear"]
