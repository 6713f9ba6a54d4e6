"""Linear models that start at zero, as in the papers. Their gradients have a closed form, which the kernels use."""

from __future__ import annotations

from torch import Tensor, nn

from fedtail.errors import FieldError


class SoftmaxRegression(nn.Module):
    """Scores of `classes` linear in the features; EMNIST linear of [PLMH23] is `SoftmaxRegression(784, 62)`.

    Inputs of more than two dimensions (images) are flattened.

    >>> import torch
    >>> SoftmaxRegression(784, 62)(torch.zeros(5, 28, 28)).shape
    torch.Size([5, 62])
    """

    def __init__(self, features: int, classes: int, bias: bool = True) -> None:
        """Make the linear layer from `features` to `classes`, with a bias unless `bias` is False.

        All parameters are zero, and nothing is drawn. Raises FieldError for fewer than one feature or class.
        """
        super().__init__()
        self.linear = _zero_linear(features, classes, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores (examples, classes) of inputs (examples, ...), which are flattened."""
        return self.linear(inputs.flatten(1))                # (examples, classes)


class LogisticRegression(nn.Module):
    """One score, the log-odds of the positive class; Sent140 linear of [PLMH23] is `LogisticRegression(50)`.

    >>> import torch
    >>> LogisticRegression(50)(torch.zeros(5, 50))
    tensor([0., 0., 0., 0., 0.], grad_fn=<SqueezeBackward1>)
    """

    def __init__(self, features: int, bias: bool = True) -> None:
        """Make the linear layer from `features` to one score, with a bias unless `bias` is False.

        All parameters are zero, and nothing is drawn. Raises FieldError for fewer than one feature.
        """
        super().__init__()
        self.linear = _zero_linear(features, 1, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Log-odds of the positive class, (examples,), of inputs (examples, ...), which are flattened."""
        return self.linear(inputs.flatten(1)).squeeze(1)     # (examples,)


class LeastSquares(nn.Module):
    """Predictions linear in the features, one number per example, or `outputs` of them.

    >>> import torch
    >>> LeastSquares(3)(torch.ones(5, 3)).shape, LeastSquares(3, outputs=2)(torch.ones(5, 3)).shape
    (torch.Size([5]), torch.Size([5, 2]))
    """

    def __init__(self, features: int, outputs: int = 1, bias: bool = True) -> None:
        """Make the linear layer from `features` to `outputs`, with a bias unless `bias` is False.

        All parameters are zero, and nothing is drawn. Raises FieldError for fewer than one feature or output.
        """
        super().__init__()
        self.linear = _zero_linear(features, outputs, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions of inputs (examples, ...), which are flattened: (examples,) for one output, else (examples, outputs)."""
        predicted = self.linear(inputs.flatten(1))
        return predicted.squeeze(1) if self.linear.out_features == 1 else predicted


class SparseLinear(nn.Module):
    """Scores linear in features of which few are not zero, such as counts of words: for inputs of `fedtail.data.sparse_rows`.

    >>> import torch
    >>> SparseLinear(50_000, 4)(columns=torch.tensor([[7, 12]]), values=torch.tensor([[1.0, 0.5]])).shape
    torch.Size([1, 4])
    """

    def __init__(self, features: int, outputs: int) -> None:
        """Make the weights from `features` to `outputs`, and the biases; all are zero, and nothing is drawn.

        Raises FieldError for fewer than one feature or output.
        """
        super().__init__()
        self.linear = _zero_linear(features, outputs, True)

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        """Scores (examples, outputs) of the numbers `values` in the features `columns`, both (examples, longest).

        One output is (examples,), a log-odds or a number.
        """
        rows = nn.functional.embedding(columns, self.linear.weight.T)                        # (examples, longest, outputs)
        scores = (rows * values[..., None]).sum(-2) + self.linear.bias
        return scores.squeeze(-1) if scores.shape[-1] == 1 else scores


def _zero_linear(features: int, outputs: int, bias: bool) -> nn.Linear:
    """An `nn.Linear` with all parameters zero, with a bias where `bias`, made without random draws.

    Raises FieldError for fewer than one of `features` or `outputs`.
    """
    if features < 1 or outputs < 1:
        text = f"a linear model needs at least one feature and one output, got {features} and {outputs}."
        raise FieldError("features" if features < 1 else "", "at least 1", min(features, outputs), text=text)
    linear = nn.utils.skip_init(nn.Linear, features, outputs, bias=bias)    # draws nothing: the start is zero
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear
