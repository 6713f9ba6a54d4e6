"""A noisy AdaGrad whose gradients and preconditioner are made private separately: the comparison of [Li23, figure 6.18].

After the diagonal form of Kairouz et al., as [Li23, section 6.13.6] describes it. A step has two releases, each with noise of its
own: the gradient to step along, and one for the preconditioner, which is projected onto a subspace found on public data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedtail.private_optim import FlatClip, GradientDescent, NoClip, PrivateMethod
from fedtail.private_optim.queries import Asking, Direction, NoisyMean, TransformState
from fedtail.private_optim.transforms import TransformDeclaration
from fedtail_studies.adaptive_private.training import Problem
from fedtail_studies.adaptive_private.tuning import Settings

DIRECTIONS = 50                                        # of the subspace, as in the released code


@dataclass(frozen=True, eq=False)
class ProjectedAdaGrad:
    """Steps along one noisy mean, divided by sqrt(v) + epsilon, where v sums the squares of another, projected onto `basis`.

    `basis` is (dim, directions) with orthonormal columns.
    """

    clip: FlatClip | NoClip
    basis: Tensor
    epsilon: float

    @property
    def declares(self) -> TransformDeclaration:
        """One clipping rule, for both releases."""
        return TransformDeclaration((self.clip,))

    def start(self, params: Tensor) -> TransformState:
        """The sum of squares, zeros in the shape of `params`, (dim,)."""
        return (torch.zeros_like(params),)

    def without_clipping(self) -> ProjectedAdaGrad:
        """This transform with `NoClip()`."""
        return replace(self, clip=NoClip())

    def noisy_means(self, step: int) -> int:
        """2 in every step."""
        return 2

    def direction(self, state: TransformState, step: int) -> Asking:
        """A generator that asks for two noisy means and returns the first, divided by what comes of the second."""
        gradient = (yield NoisyMean(self.clip)).gradient
        other = (yield NoisyMean(self.clip)).gradient
        second = state[0] + (self.basis @ (self.basis.T @ other)).square()
        return Direction(gradient / (second.sqrt() + self.epsilon), (second,))


def public_basis(problem: Problem, directions: int = DIRECTIONS) -> Tensor:
    """Orthonormal columns that span the top of sum_i g_i g_i^T over public documents at the first model, (dim, directions).

    For logistic regression at zero weights the gradient of a document is (1/2 - y) times its counts and a one for the bias.
    """
    assert problem.public is not None
    inputs = torch.as_tensor(problem.public.inputs)
    rows = (0.5 - problem.public.targets.float())[:, None] * torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
    return torch.linalg.svd(rows, full_matrices=False).Vh[:directions].T.contiguous()


def projected_adagrad(settings: Settings, noise: float, problem: Problem) -> PrivateMethod:
    """The optimiser with these settings."""
    transform = ProjectedAdaGrad(FlatClip(settings["clip"]), public_basis(problem), settings["epsilon"])
    return PrivateMethod(transform, GradientDescent(settings["rate"]), noise)
