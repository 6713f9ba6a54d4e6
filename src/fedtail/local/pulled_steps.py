"""Local steps that are pulled towards the model received: what Ditto and mean-regularised models share."""

from __future__ import annotations

import math
from dataclasses import replace

from fedtail.local.penalties import NoPenalty, Proximal
from fedtail.local.sgd import LocalSGD


def pulled_steps(local: LocalSGD, strength: float) -> LocalSGD:
    """`local` with a proximal penalty of this strength."""
    return replace(local, penalty=Proximal(strength))


def check_pull(strength: float, local: LocalSGD) -> None:
    """Raise ValueError where the strength (lambda) is negative or not finite, or `local` has a penalty of its own.

    Also where its learning rate times the strength is 1 or more: steps would then overshoot the model that is pulled towards.
    Raises TypeError where `local` is not a `LocalSGD`.
    """
    check_sgd(local)
    if not 0 <= strength < math.inf:
        raise ValueError(f"strength (lambda) must be at least 0 and finite, got {strength:g}. 0 trains on a client's own data "
                         "alone.")
    if not isinstance(local.penalty, NoPenalty):
        raise ValueError(f"the personal model has the penalty of its strength; local has {local.penalty} beside it. "
                         "Leave it out.")
    check_no_server_half(local)
    if local.learning_rate * strength >= 1:
        raise ValueError(f"learning_rate * strength must be below 1, got {local.learning_rate:g} * {strength:g}: every step "
                         "would overshoot the shared model. Lower one of them.")


def check_sgd(local: object) -> None:
    """Raise TypeError unless `local` is a `LocalSGD`, whose steps can be pulled or mixed."""
    if not isinstance(local, LocalSGD):
        raise TypeError(f"local must be a LocalSGD, whose steps the client's own model takes, got {type(local).__name__}. Write "
                        "LocalSGD(0.1), or use FineTuning for other local training.")


def check_no_server_half(local: LocalSGD) -> None:
    """Raise ValueError where `local` needs the server to prepare its rounds: personal models are trained by the client alone.

    That is so where its work reads the cohort (`Stragglers(exact=True)`, `Participants`), or its penalty asks questions.
    """
    declared = local.declares
    if declared.reads_cohort or declared.mean_updates or declared.releases:
        raise ValueError(f"personal models are trained by the client alone, and {local.penalty} or {local.work} needs the server "
                         "in every round. Use parts that do not: Proximal, Stragglers without exact=True.")
