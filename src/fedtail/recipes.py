"""The methods of the papers, each a few parts put together. Their fields can be changed with `dataclasses.replace`.

All share one base: draw `cohort_size` clients uniformly, train locally with the settings of `LocalSGD` given as keywords,
average by weight, take the average as the new model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from fedtail.aggregation import CurvatureMean, PrivateMean, WeightedMean
from fedtail.algorithm import Family, FederatedAlgorithm
from fedtail.local import LocalSGD, Proximal
from fedtail.privacy import DiscreteNoise, GaussianNoise, Noise
from fedtail.privacy.minimum_cohort import minimum_for
from fedtail.quantiles import ExactQuantile, NoisyHistogram, Quantile
from fedtail.risk import (
    Ascent,
    Binned,
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
from fedtail.risk.base import check_tail_fraction
from fedtail.sampling import Everyone, Poisson, Uniform
from fedtail.server import SGD


def fedavg(cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedAvg: the mean over clients, `cohort_size` of them sampled uniformly each round.

    Keywords go to `LocalSGD` (learning_rate, batch_size, epochs, ...); a TypeError for a name it does not have.
    """
    return FederatedAlgorithm(Uniform(cohort_size), _local_sgd(local), Mean(), WeightedMean(), SGD(1.0))


def fedavg_sub(tail_fraction: float, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedAvg with as many clients a round as Delta-FL has in its tail, theta * m (at least one): equal work per round."""
    check_tail_fraction(tail_fraction)
    return fedavg(max(1, round(tail_fraction * cohort_size)), **local)


def fedprox(strength: float, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedProx: clients are held near the model they received by the penalty strength (mu) / 2 |w - received|^2."""
    return fedavg(cohort_size, **local, penalty=Proximal(strength))


def delta_fl(tail_fraction: float, cohort_size: int = 100, form: Literal["exact", "filter", "smoothed"] = "exact",
             smoothing: float | None = None, quantile: Quantile | None = None, refresh_every: int = 1,
             **local: Any) -> FederatedAlgorithm:
    """Delta-FL: the worst `tail_fraction` (theta) of the clients. theta = 1 is FedAvg.

    `form`: "exact" weights (Algorithm 3, the default), the "filter" of Algorithm 1, or "smoothed" by a divergence (eq. 14) with
    `smoothing` (nu, 0.1). `quantile` finds the threshold of the first two (`ExactQuantile()`). `refresh_every` finds it anew
    every so many rounds only; in between, as losses fall, fewer clients reach it.
    """
    if form not in ("exact", "filter", "smoothed"):
        raise ValueError(f"form must be one of exact, filter, smoothed, got {form!r}.")
    if form == "smoothed":
        if quantile is not None:
            raise ValueError(f"form='smoothed' has no threshold to find by {quantile}. Leave it out, or use form='exact'.")
        risk: Risk = SmoothedSuperquantile(tail_fraction, 0.1 if smoothing is None else smoothing)
    else:
        if smoothing is not None:
            raise ValueError(f"smoothing={smoothing:g} is for form='smoothed', got form={form!r}.")
        kind = Superquantile if form == "exact" else TailFilter
        risk = kind(tail_fraction, quantile or ExactQuantile())
    return replace(fedavg(cohort_size, **local), risk=risk if refresh_every == 1 else Refreshed(risk, refresh_every))


def q_ffl(power: float, cohort_size: int = 100, lipschitz: float | None = None, **local: Any) -> FederatedAlgorithm:
    """q-FFL by q-FedAvg: clients are weighted by their loss to the `power` (q); power = 0 is FedAvg.

    `lipschitz` (L) is by default one over the round's local learning rate.
    """
    return replace(fedavg(cohort_size, **local), risk=PowerFair(power), aggregate=CurvatureMean(lipschitz))


def term(tilt: float, cohort_size: int = 100, loss_bound: float | None = None, **local: Any) -> FederatedAlgorithm:
    """Tilted empirical risk over clients: log-mean-exp of their losses with `tilt` (t); t -> 0 is FedAvg.

    `loss_bound` is a public bound on the losses; without one each round asks first for the cohort's largest loss.
    """
    return replace(fedavg(cohort_size, **local), risk=Tilted(tilt, loss_bound))


def afl(step: float = 0.1, groups: int | None = None, cohort_size: int | None = None, **local: Any) -> FederatedAlgorithm:
    """Agnostic federated learning, client weights by ascent with `step`: by client, everybody every round, or by group.

    `groups` is the number of groups of the population's clients; only then may a `cohort_size` (100) be given.
    """
    if groups is not None:
        return replace(fedavg(cohort_size or 100, **local), risk=GroupAscent(groups, step))
    if cohort_size is not None:
        raise ValueError(f"AFL by client asks everybody, got cohort_size={cohort_size}. Leave it out, or give groups=.")
    return replace(fedavg(**local), sample=Everyone(), risk=Ascent(step))


def dp_fedavg(population: int, clip_norm: float, noise_multiplier: float, cohort_size: int = 100,
              noise: Literal["gaussian", "discrete"] = "gaussian", planned_clients: int | None = None,
              **local: Any) -> FederatedAlgorithm:
    """DP-FedAvg: updates clipped to norm `clip_norm`, noise on their sum, cohorts by Poisson sampling.

    Every one of the `population` clients takes part with probability cohort_size / population, each of mass one, and the sum is
    divided by cohort_size, whoever came; a population of another size is refused. `noise_multiplier` (z) is the deviation of the
    noise over clip_norm; `fedtail privacy` says which one a budget needs. `noise` is added by the server ("gaussian", for
    simulation), or in integer shares by the clients ("discrete"), of which `planned_clients` are relied on: rounds with
    smaller cohorts are not held.
    """
    sample, noises = _poisson_and_noise(population, cohort_size, noise, planned_clients)
    return replace(fedavg(cohort_size, **local), sample=sample,
                   aggregate=PrivateMean(clip_norm, noises(noise_multiplier), float(cohort_size)))


def dp_delta_fl(tail_fraction: float, population: int, clip_norm: float, noise_multiplier: float,
                quantile_noise_multiplier: float, loss_bound: float, cohort_size: int = 100, bins: int = 32,
                method: Literal["flat", "tree", "optimal"] = "optimal", smoothing: float | None = None,
                noise: Literal["gaussian", "discrete"] = "gaussian", planned_clients: int | None = None,
                **local: Any) -> FederatedAlgorithm:
    """DP-Delta-FL: the worst `tail_fraction` (theta) of the clients by a noisy histogram, [PLMH23, Algorithm 4].

    A round releases two sums over one Poisson cohort: a histogram of the losses in [0, loss_bound], with noise of
    `quantile_noise_multiplier` (z_q), and the clipped updates of the tail, with noise of `noise_multiplier` (z_w), divided by
    theta * cohort_size. With `smoothing` (nu) clients contribute smoothly instead. Sampling and noise are those of
    `dp_fedavg`; docs/departures.md says where this departs from the paper.
    """
    check_tail_fraction(tail_fraction)
    sample, noises = _poisson_and_noise(population, cohort_size, noise, planned_clients)
    inner = Superquantile(tail_fraction) if smoothing is None else SmoothedSuperquantile(tail_fraction, smoothing)
    histogram = NoisyHistogram(loss_bound, float(cohort_size), noises(quantile_noise_multiplier), bins, method,
                               1 - tail_fraction if tail_fraction < 1 and method == "optimal" else None)
    return replace(fedavg(cohort_size, **local), sample=sample, risk=Binned(inner, histogram),
                   aggregate=PrivateMean(clip_norm, noises(noise_multiplier), tail_fraction * cohort_size))


def _poisson_and_noise(population: int, cohort_size: int, noise: str,
                       planned_clients: int | None) -> tuple[Poisson, Callable[[float], Noise]]:
    """A Poisson sampler with `cohort_size` clients on average, and a function from noise multipliers to the kind of noise.

    Discrete noise relies on `planned_clients`, by default as many as nearly every cohort has. A ValueError where the settings
    contradict each other.
    """
    if not 1 <= cohort_size <= population:
        raise ValueError(f"cohort_size={cohort_size} clients a round on average, of a population of {population}. Write at most "
                         f"cohort_size={population}.")
    rate = cohort_size / population
    if noise == "gaussian":
        if planned_clients is not None:
            raise ValueError(f"planned_clients={planned_clients} is for noise='discrete', whose shares come from the clients.")
        return Poisson(rate, population), GaussianNoise
    if noise != "discrete":
        raise ValueError(f"noise must be gaussian or discrete, got {noise!r}.")
    return Poisson(rate, population), partial(DiscreteNoise, planned_clients=planned_clients or minimum_for(rate, population))


def _local_sgd(settings: dict[str, Any]) -> LocalSGD:
    """A `LocalSGD` with these settings; a TypeError, with the nearest name, for one that it does not have."""
    known = [f.name for f in fields(LocalSGD)]
    for name in settings:
        if name not in known:
            nearest = get_close_matches(name, known, 1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(known)}."
            raise TypeError(f"{name}={settings[name]!r} is not a setting of this recipe nor of LocalSGD. {hint}")
    return LocalSGD(**settings)


def delta_fl_family(tail_fractions: Sequence[float] = (1.0, 0.5, 0.1), cohort_size: int = 100, **settings: Any) -> Family:
    """A `Family` of one Delta-FL model for each tail fraction, all on the same cohorts; `fedtail.choose` picks a client's.

    Keywords go to `delta_fl`.
    """
    return Family(tuple(delta_fl(theta, cohort_size, **settings) for theta in tail_fractions))
