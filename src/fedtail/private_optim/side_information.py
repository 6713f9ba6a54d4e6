"""Side information for preconditioners: public numbers about features, spread over the parameters of a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedtail.modules import trainable_parameters


def frequency_divisor(module: nn.Module, frequencies: Tensor, epsilon: float = 1e-3) -> Tensor:
    """A divisor for every parameter of `module`, (dim,), that is the frequency of the parameter's feature plus `epsilon`.

    `frequencies`, (features,), are public: how often a token occurs, E|x_j|, or sqrt(E x_j^2) [Li23, section 6.2]. Rare features
    then take larger steps. See `feature_divisor` for which parameters have a feature.
    """
    if not bool((frequencies >= 0).all()):
        raise ValueError(f"frequencies must not be negative, got {frequencies.min().item():g}.")
    return feature_divisor(module, frequencies + epsilon)


def tfidf_divisor(module: nn.Module, scores: Tensor, epsilon: float = 1e-3) -> Tensor:
    """A divisor for every parameter of `module`, (dim,), inversely proportional to the TF-IDF score of its feature.

    It is 1 / (score + epsilon), with public `scores`, (features,), of 0 or more. [Li23, section 6.2] says proportional; its
    section 6.4.1 and its results are for the inverse, since gradients are divided by this vector.
    """
    if not bool((scores >= 0).all()):
        raise ValueError(f"TF-IDF scores must not be negative, got {scores.min().item():g}.")
    return feature_divisor(module, 1 / (scores + epsilon))


def feature_divisor(module: nn.Module, per_feature: Tensor) -> Tensor:
    """The divisor of every parameter of `module`, (dim,), where parameters belong to features, and 1 for all others.

    A parameter tensor of at least two axes whose last axis has as many entries as `per_feature`, (features,), is divided along
    it, as the weight (outputs, features) of a linear layer; biases and other tensors are not. Raises ValueError where none is.
    """
    parts, found = [], False
    for parameter in trainable_parameters(module):
        matches = parameter.ndim >= 2 and parameter.shape[-1] == len(per_feature)
        found |= matches
        whole = per_feature.to(parameter).expand(parameter.shape) if matches else torch.ones_like(parameter)
        parts.append(whole.detach().reshape(-1))
    if not found:
        raise ValueError(f"no parameter of {type(module).__name__} has a last axis of {len(per_feature)} features.")
    return torch.cat(parts)
