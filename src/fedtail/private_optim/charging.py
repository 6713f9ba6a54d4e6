"""What a step of a private optimiser costs, as events of the ledger. The unit of privacy is one example."""

from __future__ import annotations

from fedtail.privacy.events import GaussianRelease, NonPrivateRelease, Release, RoundEvent, Sampling
from fedtail.private_optim.methods import PrivateMethod

MEAN = "mean of clipped gradients"
RAW = "mean of gradients without noise"
EXACT = "exact gradient for the preconditioner"
CHANNEL = "the optimiser sees the gradients of all examples"


def step_event(method: PrivateMethod, step: int, sampling: Sampling) -> RoundEvent:
    """All that step number `step` of `method` releases, about a batch that was drawn by `sampling`; the unit is an example.

    Events of equal cost are equal, whatever they are computed from: a step of DP2 is one of DP-SGD.
    """
    exact = (NonPrivateRelease(EXACT),) if method.transform.declares.reads_exact else ()
    return example_event((*exact, *(mean_release(method),) * method.transform.noisy_means(step)), sampling)


def mean_release(method: PrivateMethod) -> Release:
    """The release of one noisy mean of `method`; one without noise is not private."""
    return GaussianRelease(method.noise_multiplier, 2.0, MEAN) if method.noise_multiplier else NonPrivateRelease(RAW)


def example_event(releases: tuple[Release, ...], sampling: Sampling) -> RoundEvent:
    """A round of `releases` about a batch of examples that was drawn by `sampling`, for the unit of one example."""
    return RoundEvent(releases, sampling, unit="example")
