"""The methods of the papers, each a few parts put together. Their fields can be changed with `dataclasses.replace`.

All share one base: draw `cohort_size` clients uniformly, train locally by `local` or by its keywords, average by weight,
take the average as the new model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from fedtail.aggregation import CurvatureMean, WeightedMean
from fedtail.algorithm import Family, FederatedAlgorithm
from fedtail.local import LocalSGD, Proximal
from fedtail.quantiles import ExactQuantile, Quantile
from fedtail.risk import (
    Ascent,
    GroupAscent,
    Mean,
    PowerFair,
    Refreshed,
    Risk,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    Tilted,
)
from fedtail.sampling import Everyone, Uniform
from fedtail.server import SGD


def fedavg(cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedAvg: the mean over clients. Keywords go to `LocalSGD` (learning_rate, batch_size, epochs, ...)."""
    return FederatedAlgorithm(Uniform(cohort_size), _local(local), Mean(), WeightedMean(), SGD(1.0))


def fedavg_sub(tail_fraction: float, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedAvg with as many clients a round as Delta-FL keeps in its tail: theta * m of them."""
    return fedavg(max(1, round(tail_fraction * cohort_size)), **local)


def fedprox(strength: float, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedProx: clients are held near the model they received by strength (mu) / 2 |w - received|^2."""
    return fedavg(cohort_size, **local, penalty=Proximal(strength))


def delta_fl(tail_fraction: float, cohort_size: int = 100, form: Literal["exact", "filter", "smoothed"] = "exact",
             smoothing: float = 0.1, quantile: Quantile = ExactQuantile(), refresh_every: int = 1,
             **local: Any) -> FederatedAlgorithm:
    """Delta-FL: the worst `tail_fraction` (theta) of the clients. theta = 1 is FedAvg.

    `form`: "exact" weights (Algorithm 3, the default), the "filter" of Algorithm 1, or "smoothed" by a divergence (eq. 14).
    `refresh_every` finds the threshold anew every so many rounds only.
    """
    forms: dict[str, Risk] = {
        "exact": Superquantile(tail_fraction, quantile),
        "filter": TailFilter(tail_fraction, quantile),
        "smoothed": SmoothedSuperquantile(tail_fraction, smoothing),
    }
    if form not in forms:
        raise ValueError(f"form must be one of {', '.join(forms)}, got {form!r}.")
    risk = forms[form] if refresh_every == 1 else Refreshed(forms[form], refresh_every)
    return replace(fedavg(cohort_size, **local), risk=risk)


def q_ffl(power: float, cohort_size: int = 100, lipschitz: float | None = None, **local: Any) -> FederatedAlgorithm:
    """q-FFL by q-FedAvg: clients count by loss to the `power` (q); power = 0 is FedAvg."""
    return replace(fedavg(cohort_size, **local), risk=PowerFair(power), aggregate=CurvatureMean(lipschitz))


def term(tilt: float, cohort_size: int = 100, loss_bound: float | None = None, **local: Any) -> FederatedAlgorithm:
    """Tilted empirical risk over clients: log-mean-exp with `tilt` (t); t -> 0 is FedAvg."""
    return replace(fedavg(cohort_size, **local), risk=Tilted(tilt, loss_bound))


def afl(step: float = 0.1, groups: int | None = None, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """Agnostic federated learning: by client (everybody takes part), or by group with `groups` of them (any cohort)."""
    if groups is None:
        return replace(fedavg(**local), sample=Everyone(), risk=Ascent(step))
    return replace(fedavg(cohort_size, **local), risk=GroupAscent(groups, step))


def _local(settings: dict[str, Any]) -> LocalSGD:
    known = [f.name for f in fields(LocalSGD)]
    for name in settings:
        if name not in known:
            nearest = get_close_matches(name, known, 1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(known)}."
            raise TypeError(f"{name}={settings[name]!r} is not a setting of this recipe nor of LocalSGD. {hint}")
    return LocalSGD(**settings)


def delta_fl_family(tail_fractions: Sequence[float] = (1.0, 0.5, 0.1), cohort_size: int = 100, **settings: Any) -> Family:
    """One model for each tail fraction, all on the same cohorts; a client then picks its own with `fedtail.choose`."""
    return Family(tuple(delta_fl(theta, cohort_size, **settings) for theta in tail_fractions))
