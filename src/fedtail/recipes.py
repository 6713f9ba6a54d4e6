"""The methods of the papers, each a few parts put together. Their fields can be changed with `dataclasses.replace`.

All share one base: draw `cohort_size` clients uniformly, train locally with the settings of `LocalSGD` given as keywords,
average by weight, take the average as the new model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

from fedtail.aggregation import CorrelatedMean, CurvatureMean, DelayedMean, MeanOfModels, PrivateMean, WeightedMean
from fedtail.algorithm import Family, FederatedAlgorithm
from fedtail.budgeted_noise import QUANTILE_RATIO, method_from_budget, quantile_noise
from fedtail.divisors import FixedDivisor
from fedtail.iterates import AveragedIterate, Iterate
from fedtail.local import MAML, Dane, LocalSGD, MeanRegularised, Proximal
from fedtail.personal import Ditto, FineTuning, KeptByLocal
from fedtail.privacy import BufferedNoise, CorrelatedNoise, DiscreteNoise, GaussianNoise, Noise
from fedtail.privacy.minimum_cohort import minimum_cohort_for
from fedtail.private_optim.second_moments import RMSPropMoment, SecondMoment
from fedtail.quantiles import ExactQuantile, NoisyHistogram, Quantile
from fedtail.risk import (
    Ascent,
    Binned,
    GroupAscent,
    Hierarchical,
    Mean,
    PowerFair,
    Refreshed,
    Risk,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    TailFloor,
    Tilted,
)
from fedtail.risk.base import check_tail_fraction
from fedtail.sampling import CyclicCohorts, Everyone, Poisson, Uniform
from fedtail.server import SGD

Local = TypeVar("Local", LocalSGD, MAML)


def fedavg(cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedAvg: the mean over clients, `cohort_size` of them sampled uniformly each round.

    Keywords go to `LocalSGD` (learning_rate, batch_size, epochs, ...); raises TypeError for a name it does not have.
    """
    return FederatedAlgorithm(Uniform(cohort_size), _local_part(LocalSGD, local), Mean(), WeightedMean(), SGD(1.0))


def fedavg_sub(tail_fraction: float, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedAvg with theta * cohort_size clients a round (rounded, at least one): as many as Delta-FL has in its tail.

    Both then do the same work in a round. `tail_fraction` (theta) is Delta-FL's; keywords go to `LocalSGD`.
    """
    check_tail_fraction(tail_fraction)
    return fedavg(max(1, round(tail_fraction * cohort_size)), **local)


def fedprox(strength: float, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """FedProx: FedAvg in which each client adds the penalty strength / 2 |w - received|^2 to its loss.

    `strength` (mu) holds clients near the model they received. `cohort_size` clients are sampled uniformly each round; other
    keywords go to `LocalSGD`.
    """
    return fedavg(cohort_size, **local, penalty=Proximal(strength))


def ditto(strength: float = 0.1, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """Ditto: FedAvg, and beside it a model of each client's own, pulled towards the shared one by `strength` (lambda).

    Both are trained by the same steps, whose settings are keywords of `LocalSGD`. `cohort_size` clients are sampled uniformly
    each round. `fedtail.evaluate_personal` judges the personal models, which stay on the clients.
    """
    shared = fedavg(cohort_size, **local)
    return replace(shared, personal=Ditto(strength, _local_part(LocalSGD, local)))


def l2sgd(strength: float = 0.1, cohort_size: int = 100, **local: Any) -> FederatedAlgorithm:
    """L2SGD: models of clients' own, each pulled towards the mean of all by `strength` (lambda) [Li23, section 5.6.2].

    `cohort_size` clients, sampled uniformly, train theirs in a round and send how far they moved; the shared model is the mean of
    the models of all clients that have one. What is summed, and how this is mean-regularised multi-task learning with a cohort:
    `MeanRegularised`, `MeanOfModels`. Other keywords go to `LocalSGD`. `fedtail.evaluate_personal` judges the models.
    """
    own = MeanRegularised(strength, _local_part(LocalSGD, local))
    return replace(fedavg(cohort_size), local=own, aggregate=MeanOfModels(), personal=KeptByLocal())


def mean_regularised(strength: float = 0.1, **local: Any) -> FederatedAlgorithm:
    """Mean-regularised multi-task learning: min over all v_k of sum_k F_k(v_k) + strength / 2 sum_k |v_k - mean v|^2 (lambda).

    `l2sgd` with every client in each round. With full gradients and one step, `batch_size=None, local_steps=1`, a round is a
    gradient step on this objective. Keywords go to `LocalSGD`.
    """
    return replace(l2sgd(strength, **local), sample=Everyone())


def feddane(strength: float, cohort_size: int = 100, gradient_clients: int | None = None, **local: Any) -> FederatedAlgorithm:
    """FedDane: FedProx whose clients also correct their steps by the difference of a mean gradient and their own.

    `cohort_size` clients are sampled uniformly each round. With `gradient_clients`, so many of them are drawn for the mean
    gradient and the others train; by default all do both. `strength` (mu) is that of the proximal term; other keywords go to
    `LocalSGD`.
    """
    return fedavg(cohort_size, **local, penalty=Dane(strength, gradient_clients))


def delta_fl(tail_fraction: float, cohort_size: int = 100, form: Literal["exact", "filter", "smoothed"] = "exact",
             smoothing: float | None = None, quantile: Quantile | None = None, refresh_every: int = 1,
             least_contributors: int | None = None, **local: Any) -> FederatedAlgorithm:
    """Delta-FL: minimise the mean loss of the worst `tail_fraction` (theta) of the clients. theta = 1 is FedAvg.

    `cohort_size` clients are sampled uniformly each round. `form` is "exact" (weights of Algorithm 3, the default), "filter"
    (Algorithm 1), or "smoothed" by a divergence (eq. 14); `smoothing` (nu, 0.1 by default) is for the last one only. `quantile`
    finds the threshold of the first two, by default `ExactQuantile()`. With `refresh_every` above 1 the dual, and so the
    threshold, is found anew only every so many rounds; in between, as losses fall, fewer clients reach it. With
    `least_contributors` theta is raised in rounds with few clients, as where few are available, so that about so many contribute
    (`TailFloor`). Other keywords go to `LocalSGD`. Raises ValueError for an unknown form, and for a setting that does not belong
    to the form.
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
    risk = risk if least_contributors is None else TailFloor(risk, least_contributors)
    return replace(fedavg(cohort_size, **local), risk=risk if refresh_every == 1 else Refreshed(risk, refresh_every))


def q_ffl(power: float, cohort_size: int = 100, lipschitz: float | None = None, **local: Any) -> FederatedAlgorithm:
    """q-FFL: clients are weighted by their loss to the `power` (q), [Li23, eq. (4.1)]; power = 0 is FedAvg.

    The server's step needs no tuning for each q: its length follows from `lipschitz` (L), the Lipschitz constant of the clients'
    gradients. By default L is one over the round's local learning rate: tune that at q = 0, and keep it for all q. With epochs
    or steps of local work this is q-FedAvg (Algorithm 4), in which L may also be set apart from the learning rate. With one full
    gradient, `batch_size=None, local_steps=1`, it is q-FedSGD (Algorithm 3): leave out `lipschitz` then and write
    `learning_rate=1 / L`. `cohort_size` clients are sampled uniformly each round; other keywords go to `LocalSGD`.
    """
    return replace(fedavg(cohort_size, **local), risk=PowerFair(power), aggregate=CurvatureMean(lipschitz))


def q_maml(power: float, cohort_size: int = 10, lipschitz: float | None = None, **adaptation: Any) -> FederatedAlgorithm:
    """q-MAML: a start from which a few steps on a client's own examples lead to a good model, fairly; [Li23, Algorithm 5].

    q-FFL of the losses after adaptation, weighted by their `power` (q); power = 0 is MAML. `cohort_size` clients (tasks) are
    sampled uniformly each round. `lipschitz` (L) is by default one over `learning_rate`. Other keywords go to `MAML`
    (learning_rate, inner_learning_rate, inner_steps, first_order, support_fraction). Another risk makes another method:
    `replace(delta_fl(0.5), local=MAML())` is Delta-FL-MAML, `replace(term(1.0), local=MAML())` TERM-MAML.
    """
    return replace(fedavg(cohort_size), local=_local_part(MAML, adaptation), risk=PowerFair(power),
                   aggregate=CurvatureMean(lipschitz))


def per_fedavg(cohort_size: int = 100, first_order: bool = False, difference_step: float | None = 1e-3,
               **adaptation: Any) -> FederatedAlgorithm:
    """Per-FedAvg: a shared model from which a step or a few on a client's own examples lead to a good personal one.

    FedAvg whose clients take `local_steps` along the gradient of their loss after adaptation (`MAML`). Products with the Hessian
    are central differences of gradients with a `difference_step` (delta): Per-FedAvg (HF), [Li23, section 5.6.2]; None computes
    them exactly, and `first_order=True` leaves them out: Per-FedAvg (FO). Personal models are the shared one after `inner_steps`
    full-gradient steps with `inner_learning_rate` on all of a client's examples (`FineTuning`); for another adaptation replace
    `personal`. `cohort_size` clients are sampled uniformly each round. Other keywords go to `MAML`.
    """
    local = _local_part(MAML, {**adaptation, "first_order": first_order,
                               "difference_step": None if first_order else difference_step})
    adapt = LocalSGD(local.inner_learning_rate, batch_size=None, local_steps=local.inner_steps)
    return replace(fedavg(cohort_size), local=local, personal=FineTuning(adapt))


def term(tilt: float, cohort_size: int = 100, loss_bound: float | None = None, example_tilt: float | None = None,
         group_tilt: float | None = None, groups: int | None = None, **local: Any) -> FederatedAlgorithm:
    """TERM, tilted empirical risk over clients: the log-mean-exp of their losses with `tilt` (t); t = 0 is FedAvg.

    `cohort_size` clients are sampled uniformly each round. `loss_bound` is a public bound on the losses; without one each round
    first asks for the cohort's largest loss. Hierarchical: with `example_tilt` (tau) each client minimises the tilted loss of its
    examples, and with `group_tilt` the clients are tilted within the groups of `population.group`, whose number is `groups`, and
    the groups by `group_tilt`. Other keywords go to `LocalSGD`. Raises ValueError where one of `group_tilt` and `groups` is
    missing.
    """
    if (group_tilt is None) != (groups is None):
        raise ValueError(f"group_tilt={group_tilt} and groups={groups}: give both, the tilt across groups and their number, or "
                         "neither.")
    risk: Risk = Tilted(tilt, loss_bound)
    if group_tilt is not None:
        risk = Hierarchical(risk, Tilted(group_tilt), groups)
    inside = {} if example_tilt is None else {"example_risk": Tilted(example_tilt)}
    return replace(fedavg(cohort_size, **local, **inside), risk=risk)


def afl(step: float = 0.1, groups: int | None = None, cohort_size: int | None = None, iterate: Iterate = AveragedIterate(),
        **local: Any) -> FederatedAlgorithm:
    """Agnostic federated learning: weights of the clients, or of groups of clients, are learned by gradient ascent with `step`.

    Without `groups` each client has a weight, every client takes part in every round, and a `cohort_size` is refused with a
    ValueError. With `groups`, the number of groups in the population, each group has one, and `cohort_size` (100 by default)
    clients are sampled uniformly. `iterate` says which model a run returns: by default `AveragedIterate()`, the mean of the
    initial model and of those after each round, for which the guarantees of descent and ascent hold with convex losses; the last
    model is `LastIterate()`. Other keywords go to `LocalSGD`: `batch_size=None, local_steps=1` is the method of [Li23, chapter
    4], whose descent step is `learning_rate` (gamma_w) and ascent step `step` (gamma_lambda).
    """
    if groups is None and cohort_size is not None:
        raise ValueError(f"AFL by client asks everybody, got cohort_size={cohort_size}. Leave it out, or give groups=.")
    base = replace(fedavg(cohort_size or 100, **local), iterate=iterate)
    if groups is not None:
        return replace(base, risk=GroupAscent(groups, step))
    return replace(base, sample=Everyone(), risk=Ascent(step))


def dp_fedavg(population: int, clip_norm: float, noise_multiplier: float | None = None, cohort_size: int = 100,
              noise: Literal["gaussian", "discrete"] = "gaussian", planned_clients: int | None = None,
              epsilon: float | None = None, delta: float | None = None, rounds: int | None = None,
              **local: Any) -> FederatedAlgorithm:
    """DP-FedAvg: updates are clipped to norm `clip_norm`, noise is added to their sum, and cohorts are drawn by Poisson sampling.

    Each of the `population` clients is sampled with probability cohort_size / population and has mass one; the sum is divided by
    cohort_size, however many were sampled. Training on a population of another size is refused. How much noise: give a privacy
    budget, `epsilon` and `delta` for `rounds` rounds, for which the smallest noise is found and beyond which `train` stops, or
    `noise_multiplier` (z), the standard deviation of the noise over clip_norm. `noise` is added by the server ("gaussian", for
    simulation), or in integer shares by the clients ("discrete"); the latter relies on `planned_clients` of them, and rounds with
    smaller cohorts are skipped. Other keywords go to `LocalSGD`.
    """
    sample, noises = _poisson_sampler_and_noise(population, cohort_size, noise, planned_clients)

    def with_noise(z: float) -> FederatedAlgorithm:
        """The method whose updates get noise of multiplier z."""
        return replace(fedavg(cohort_size, **local), sample=sample,
                       aggregate=PrivateMean(clip_norm, noises(z), float(cohort_size)))

    return method_from_budget(with_noise, population, noise_multiplier, epsilon, delta, rounds)


def fed_adadps(population: int, clip_norm: float, noise_multiplier: float, divisor: Tensor, cohort_size: int = 100,
               noise: Literal["gaussian", "discrete"] = "gaussian", planned_clients: int | None = None,
               **local: Any) -> FederatedAlgorithm:
    """AdaDPS for clients [Li23, Algorithm 10]: `dp_fedavg` whose clients divide every step by a public vector, `divisor` (dim,).

    The update that a client sends is made of divided steps, and is clipped as it is. Noise is added once, to the sum; the paper
    prints it on every device, which is sqrt(cohort_size) times the noise that it accounts for. To divide updates in place of
    steps, give `dp_fedavg`'s `PrivateMean` a `divisor`. Other arguments are those of `dp_fedavg`.
    """
    return dp_fedavg(population, clip_norm, noise_multiplier, cohort_size, noise, planned_clients,
                     divisor=FixedDivisor(divisor), **local)


def fed_dp2(population: int, clip_norm: float, noise_multiplier: float, phase_rounds: int, delayed_clip_norm: float,
            cohort_size: int = 100, delayed_rate: float = 1.0, moment: SecondMoment = RMSPropMoment(), epsilon: float = 1e-3,
            noise: Literal["gaussian", "discrete"] = "gaussian", planned_clients: int | None = None,
            **local: Any) -> FederatedAlgorithm:
    """DP2 for clients [Li23, Algorithm 11]: `phase_rounds` of `dp_fedavg`, then as many with a preconditioner made of them.

    In the second phase updates are divided by the root of the second moment of what was released before, and clipped to
    `delayed_clip_norm`; their mean is multiplied by `delayed_rate`. A round costs what one of `dp_fedavg` costs, whose other
    arguments these are. `DelayedMean` has more settings.
    """
    sample, noises = _poisson_sampler_and_noise(population, cohort_size, noise, planned_clients)
    aggregate = DelayedMean(clip_norm, noises(noise_multiplier), float(cohort_size), phase_rounds, phase_rounds,
                            delayed_clip_norm, delayed_rate, moment, epsilon)
    return replace(fedavg(cohort_size, **local), sample=sample, aggregate=aggregate)


def dp_delta_fl(tail_fraction: float, population: int, clip_norm: float, noise_multiplier: float | None = None,
                quantile_noise_multiplier: float | None = None, loss_bound: float | None = None, cohort_size: int = 100,
                bins: int = 32, method: Literal["flat", "tree", "optimal"] = "optimal", smoothing: float | None = None,
                noise: Literal["gaussian", "discrete"] = "gaussian", planned_clients: int | None = None,
                epsilon: float | None = None, delta: float | None = None, rounds: int | None = None,
                quantile_ratio: float = QUANTILE_RATIO, **local: Any) -> FederatedAlgorithm:
    """DP-Delta-FL: the worst `tail_fraction` (theta) of the clients by a noisy histogram, [PLMH23, Algorithm 4].

    Each of the `population` clients is sampled with probability cohort_size / population. A round releases two sums over this
    cohort: a histogram of the losses in [0, loss_bound] with `bins` bins, measured by the strategy `method`; and the updates of
    the tail, clipped to `clip_norm`, divided by theta * cohort_size. How much noise: give a privacy budget, `epsilon` and `delta`
    for `rounds` rounds, for which the smallest noise is found and beyond which `train` stops, with a histogram that costs
    `quantile_ratio` (r) times as much as an update; or `noise_multiplier` (z_w) of the updates and `quantile_noise_multiplier`
    (z_q) of the histogram. With `smoothing` (nu) clients' weights change smoothly with their losses instead. `noise` is added by
    the server ("gaussian", for simulation), or in integer shares by the clients ("discrete"); the latter relies on
    `planned_clients` of them, and rounds with smaller cohorts are skipped. Other keywords go to `LocalSGD`. docs/departures.md
    says where this departs from the paper.
    """
    check_tail_fraction(tail_fraction)
    if loss_bound is None:
        raise TypeError("dp_delta_fl needs loss_bound, a public bound on the losses, beyond which they count as if at it. Write "
                        "loss_bound=4.0, say.")
    if (noise_multiplier is None) != (quantile_noise_multiplier is None):
        raise ValueError(f"noise_multiplier={noise_multiplier} and quantile_noise_multiplier={quantile_noise_multiplier}: give "
                         "both, or neither and a budget: epsilon=5.0, delta=1e-5, rounds=100.")
    sample, noises = _poisson_sampler_and_noise(population, cohort_size, noise, planned_clients)
    inner = Superquantile(tail_fraction) if smoothing is None else SmoothedSuperquantile(tail_fraction, smoothing)
    level = 1 - tail_fraction if tail_fraction < 1 and method == "optimal" else None

    def with_noise(z: float) -> FederatedAlgorithm:
        """The method whose updates get noise of multiplier z; that of the histogram is as given, or follows from z."""
        given = quantile_noise_multiplier
        histogram_noise = noises(quantile_noise(z, quantile_ratio) if given is None else given)
        histogram = NoisyHistogram(loss_bound, float(cohort_size), histogram_noise, bins, method, level)
        return replace(fedavg(cohort_size, **local), sample=sample, risk=Binned(inner, histogram),
                       aggregate=PrivateMean(clip_norm, noises(z), tail_fraction * cohort_size))

    return method_from_budget(with_noise, population, noise_multiplier, epsilon, delta, rounds)


def dp_ftrl(population: int, clip_norm: float, noise_multiplier: float, rounds: int, cohort_size: int = 100,
            bands: int | None = None, buffers: int | None = None, **local: Any) -> FederatedAlgorithm:
    """DP-FTRL: FedAvg with clipped updates and noise that is correlated over `rounds` rounds, by matrix factorisation.

    For fleets whose cohorts cannot be drawn by secret Poisson sampling: there is no amplification, and the server, which adds the
    noise, is trusted with the exact sums. The `population` clients take turns, in cohorts of about `cohort_size`, so that each
    participates once in population // cohort_size rounds. `noise_multiplier` (z) is that of all rounds together: their price is
    that of one Gaussian sum, `fedtail privacy --sampling none --rounds 1`. Noise of `bands` rounds cancels in part, by default
    as many as lie between two turns of a client, and at most 64 (`CorrelatedNoise`); with `buffers` noise of all rounds does, by
    so many running sums (`BufferedNoise`). Updates are clipped to norm `clip_norm`; their sum is divided by the expected size of
    a cohort. Other keywords go to `LocalSGD`.
    """
    _check_number_of_clients(population)
    if not 1 <= cohort_size <= population:
        raise ValueError(f"cohort_size={cohort_size} clients a round, of a population of {population}. Write at most "
                         f"cohort_size={population}.")
    if bands is not None and buffers is not None:
        raise ValueError(f"bands={bands} are of CorrelatedNoise, and buffers={buffers} of BufferedNoise. Give one of the two.")
    separation = population // cohort_size
    noise = CorrelatedNoise(noise_multiplier, rounds, separation, bands) if buffers is None \
        else BufferedNoise(noise_multiplier, rounds, separation, buffers)
    return replace(fedavg(cohort_size, **local), sample=CyclicCohorts(separation, population),
                   aggregate=CorrelatedMean(clip_norm, noise, population / separation))


def _poisson_sampler_and_noise(population: int, cohort_size: int, noise: str,
                               planned_clients: int | None) -> tuple[Poisson, Callable[[float], Noise]]:
    """A Poisson sampler with `cohort_size` of `population` clients on average, and a function from noise multiplier to noise.

    `noise` is "gaussian" or "discrete". Discrete noise relies on `planned_clients`, by default as many as nearly every cohort
    has. Raises ValueError where the settings contradict each other, TypeError where `population` is no number of clients.
    """
    _check_number_of_clients(population)
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
    return Poisson(rate, population), partial(
        DiscreteNoise, planned_clients=planned_clients or minimum_cohort_for(rate, population))


def _check_number_of_clients(population: Any) -> None:
    """Raise a TypeError unless `population` is a whole number, the number of clients, as a private recipe needs it."""
    if isinstance(population, int) and not isinstance(population, bool):
        return
    has = f" Write population=len(train), here {len(population)}." if hasattr(population, "num_examples") else ""
    raise TypeError("population is the number of clients that the model will be trained on, from which sampling and privacy "
                    f"follow, got a {type(population).__name__}.{has or ' Write population=1000, say.'}")


def _local_part(kind: type[Local], settings: dict[str, Any]) -> Local:
    """A part of local training, `kind`, with these settings; a TypeError, which suggests the nearest name, for one it lacks."""
    known = [f.name for f in fields(kind)]
    for name in settings:
        if name not in known:
            nearest = get_close_matches(name, known, 1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(known)}."
            raise TypeError(f"{name}={settings[name]!r} is not a setting of this recipe nor of {kind.__name__}. {hint}")
    return kind(**settings)


def delta_fl_family(tail_fractions: Sequence[float] = (1.0, 0.5, 0.1), cohort_size: int = 100, **settings: Any) -> Family:
    """A `Family` with one Delta-FL method for each of `tail_fractions` (theta), all on the same cohorts of `cohort_size` clients.

    `settings` go to `delta_fl`. `fedtail.choose` picks a model for each client.
    """
    return Family(tuple(delta_fl(theta, cohort_size, **settings) for theta in tail_fractions))


def q_ffl_family(powers: Sequence[float] = (0.0, 0.001, 0.01, 0.1, 1.0, 2.0, 5.0, 10.0), cohort_size: int = 100,
                 **settings: Any) -> Family:
    """A `Family` with one q-FFL method for each of `powers` (q), all on the same cohorts: device-specific q, [Li23, table 4.12].

    All members share one learning rate, and with it the step-size transfer of `q_ffl`, to which `settings` go; the powers are by
    default those of the thesis. `cohort_size` clients are sampled uniformly each round. Each client then picks its model by its
    own validation examples: `fedtail.choose`, and `fedtail.evaluate_family` for all of them.
    """
    return Family(tuple(q_ffl(power, cohort_size, **settings) for power in powers))
