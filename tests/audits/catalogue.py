"""Every audit: which release, in which setting, how it is observed, and how it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

import fedtail
from fedtail import AdaptiveClip, DelayedMean, DiscreteNoise, Family, GaussianNoise, IntegerChannel, PlainChannel
from fedtail.privacy import Attack, guarantee
from fedtail.private_optim import (
    AutomaticClip,
    ClippedGradient,
    GradientDescent,
    PrivateMethod,
    adadps,
    dp2,
    dp2_extra_query,
    dp_adam,
    dp_sgd,
)

from audits.canaries import CLIP, Canaries, Observations, channel_for, observe
from audits.correlated import observe_correlated
from audits.curve import epsilon_by_curve
from audits.damage import less_noise, longer_rows
from audits.nodes import observe_nodes
from audits.optimisers import observe_inside_client, observe_steps
from audits.targets import observe_evaluation, observe_histogram, observe_quantiles

CONFIDENCE = 1 - 1e-6             # of every bound: a sound release is accused once in a million audits
DELTA = 1e-9                      # so small that what accountants add to integer noise is less than a tenth of noise that is missing
Method = Literal["threshold", "curve", "t"]
Damage = tuple[str, Callable[[], AbstractContextManager[None]]]


@dataclass(frozen=True)
class Audit:
    """One release: `observe(wanted, seed)` gives scores of so many canaries or targets of either kind.

    `method` is how scores become a lower bound on epsilon. "threshold": mu of a Gaussian sum, by Clopper and Pearson's bounds on
    the errors of one threshold. "curve": the size of the noise, by the same two errors, for rounds over Poisson cohorts.
    "t": mu by a noncentral t distribution, for normal scores. The claim may be `tightness` times the bound. `quick` of them
    are observed in the quick form, 0 where that leaves the audit out, and the damage is then `quick_damage`.
    """

    name: str
    release: str
    setting: str
    observe: Callable[[int, int | None], Observations]
    wanted: int
    quick: int
    method: Method = "threshold"
    training: bool = False
    damage: Damage | None = None
    adjacency: Literal["zero-out", "replace-one"] = "zero-out"

    @property
    def tightness(self) -> float:
        """How many times the bound the claim may be: 1.5 for sums, 3 for training."""
        return 3.0 if self.training else 1.5

    @property
    def full_damage(self) -> Damage:
        """What must be caught: noise 1.1 times too small in sums, 1.25 times in training."""
        factor = 1.25 if self.training else 1.1
        return self.damage or (f"noise / {factor:g}", partial(less_noise, factor))

    @property
    def quick_damage(self) -> Damage:
        """What must be caught with the few observations of the quick form."""
        return "noise / 1.6", partial(less_noise, 1.6)

    def claim(self, observed: Observations) -> float:
        """The epsilon that is stated for the rounds that the ledger was charged for."""
        return guarantee(observed.charged, DELTA, self.adjacency).epsilon

    def bound(self, observed: Observations) -> float:
        """The lower bound on epsilon."""
        attack = Attack(observed.without, observed.present, CONFIDENCE)
        if self.method == "curve":
            return epsilon_by_curve(attack, observed.charged, DELTA)
        return attack.epsilon_if_normal(DELTA) if self.method == "t" else attack.epsilon(DELTA)


LOCAL = {"learning_rate": 1.0, "batch_size": None}
CROWD, FEW = 500, 100                        # canaries, and shares that integer noise relies on
BINS, FILLERS = 64, 400                      # of Delta-FL: canaries of a bin each, and clients below the tail


def dp_fedavg(noise: str, multiplier: float, rate: float, clients: int = CROWD) -> fedtail.FederatedAlgorithm:
    """The recipe over canaries; integer noise relies on 100 clients."""
    planned = {"planned_clients": FEW} if noise == "discrete" else {}
    return fedtail.dp_fedavg(clients, CLIP, multiplier, cohort_size=round(rate * clients), noise=noise, **planned, **LOCAL)


def observe_training(noise: str, rate: float, rounds: int, multiplier: float, wanted: int, seed: int | None) -> Observations:
    """Runs of DP-FedAvg."""
    return observe(dp_fedavg(noise, multiplier, rate), Canaries(CROWD), channel_for(noise), wanted, seed, rounds=rounds, rate=rate)


def observe_adaptive_clip(noise: str, rate: float, rounds: int, multiplier: float, wanted: int, seed: int | None) -> Observations:
    """Runs of DP-FedAvg whose clip norm follows the norms of the updates."""
    method = dp_fedavg(noise, multiplier, rate)
    method = replace(method, aggregate=AdaptiveClip(CLIP, method.aggregate.noise, method.aggregate.total))
    return observe(method, Canaries(CROWD), channel_for(noise), wanted, seed, rounds=rounds, rate=rate)


def observe_delayed_mean(noise: str, rate: float, rounds: int, multiplier: float, wanted: int, seed: int | None) -> Observations:
    """Runs of DP2 over clients, of two rounds without preconditioner and then with one."""
    method = dp_fedavg(noise, multiplier, rate)
    aggregate = DelayedMean(CLIP, method.aggregate.noise, method.aggregate.total, 2, 2, 2 * CLIP, epsilon=1e-6)
    return observe(replace(method, aggregate=aggregate), Canaries(CROWD), channel_for(noise), wanted, seed, rounds=rounds, rate=rate)


def observe_family(noise: str, rate: float, multiplier: float, wanted: int, seed: int | None) -> Observations:
    """One round of a family of three models: three sums over one cohort."""
    return observe(Family((dp_fedavg(noise, multiplier, rate, 300),) * 3), Canaries(300), channel_for(noise), wanted, seed, rate=rate)


def observe_tail_training(noise: str, rate: float, rounds: int, smoothing: float | None, wanted: int, seed: int | None) -> Observations:
    """Runs of DP-Delta-FL: a histogram of the losses and the updates of the tail, which holds all canaries, in every round."""
    clients, planned = BINS - 1 + FILLERS, {"planned_clients": FEW} if noise == "discrete" else {}
    method = fedtail.dp_delta_fl(0.3, clients, CLIP, 1.0, 1.5, float(BINS), cohort_size=round(rate * clients), bins=BINS, method="flat",
                                 smoothing=smoothing, noise=noise, **planned, **LOCAL)
    return observe(method, Canaries(BINS - 1, FILLERS), channel_for(noise), wanted, seed, rounds=rounds, rate=rate)


EVERYBODY, SAMPLED = "everybody", "Poisson sampling, q = 0.5"
ALL = "all examples"
SERVER, SHARES = "Gaussian noise", "discrete noise"
LONG = ("clip norm x 1.1", partial(longer_rows, 1.1))

AUDITS = (
    Audit("sum_gaussian", f"sum of updates, {SERVER}", f"{EVERYBODY}, z = 0.5", partial(observe_training, "gaussian", 1.0, 1, 0.5), 50_000, 4000),
    Audit("sum_gaussian_clip", f"sum of updates, {SERVER}", f"{EVERYBODY}, z = 0.5", partial(observe_training, "gaussian", 1.0, 1, 0.5), 50_000, 0,
          damage=LONG),
    Audit("sum_gaussian_sampled", f"sum of updates, {SERVER}", f"{SAMPLED}, z = 0.5", partial(observe_training, "gaussian", 0.5, 1, 0.5),
          100_000, 10_000, "curve"),
    Audit("sum_discrete", f"sum of updates, {SHARES}", f"{EVERYBODY}, z = 0.5", partial(observe_training, "discrete", 1.0, 1, 0.5), 100_000, 4000),
    Audit("sum_discrete_sampled", f"sum of updates, {SHARES}", f"{SAMPLED}, z = 0.5", partial(observe_training, "discrete", 0.5, 1, 0.5),
          200_000, 10_000, "curve"),
    Audit("sum_discrete_masked", f"sum of updates, {SHARES}", "three nodes, secure sums, against a curious node, z = 0.25",
          partial(observe_nodes, "discrete", True, 1, 0.25), 8000, 0, "t"),
    Audit("adaptive_gaussian", f"sum with adaptive clipping, {SERVER}", f"{EVERYBODY}, z = 0.5",
          partial(observe_adaptive_clip, "gaussian", 1.0, 1, 0.5), 60_000, 4000),
    Audit("adaptive_gaussian_sampled", f"sum with adaptive clipping, {SERVER}", f"{SAMPLED}, z = 0.5",
          partial(observe_adaptive_clip, "gaussian", 0.5, 1, 0.5), 150_000, 0, "curve"),
    Audit("family_gaussian_sampled", f"family of three models, {SERVER}", f"{SAMPLED}, z = 0.9", partial(observe_family, "gaussian", 0.5, 0.9),
          100_000, 0, "curve"),
    Audit("family_discrete", f"family of three models, {SHARES}", f"{EVERYBODY}, z = 0.45",
          partial(observe_family, "discrete", 1.0, 0.45), 12_000, 1000, "t"),
    *(Audit(f"histogram_{method}_gaussian", f"histogram of losses, {method}, {SERVER}", f"{EVERYBODY}, z = 0.25",
            partial(observe_histogram, method, GaussianNoise(0.25), PlainChannel()), 4000, 200 * (method == "flat"), "t")
      for method in ("flat", "tree", "optimal")),
    *(Audit(f"histogram_{method}_discrete", f"histogram of losses, {method}, {SHARES}", f"{EVERYBODY}, z = 0.25",
            partial(observe_histogram, method, DiscreteNoise(0.25, 5), IntegerChannel()), 6000, 200 * (method == "optimal"), "t")
      for method in ("flat", "tree", "optimal")),
    *(Audit(f"quantiles_{method}_{adjacency}", f"private quantiles, {method}, {SHARES}", f"{adjacency}, five clients",
            partial(observe_quantiles, method, adjacency), 12_000, 500 * (method == "optimal"), "t", adjacency=adjacency)
      for method, adjacency in (("flat", "zero-out"), ("tree", "replace-one"), ("optimal", "zero-out"), ("optimal", "replace-one"))),
    Audit("evaluation_gaussian", f"evaluation by clients, {SERVER}", f"{EVERYBODY}, z = 0.25",
          partial(observe_evaluation, GaussianNoise(0.25), PlainChannel()), 4000, 0, "t"),
    Audit("evaluation_discrete", f"evaluation by clients, {SHARES}", f"{EVERYBODY}, z = 0.25",
          partial(observe_evaluation, DiscreteNoise(0.25, 5), IntegerChannel()), 6000, 200, "t"),
    Audit("fedavg_gaussian", f"DP-FedAvg, {SERVER}", f"3 rounds, {EVERYBODY}, z = 1", partial(observe_training, "gaussian", 1.0, 3, 1.0),
          10_000, 0, training=True),
    Audit("fedavg_gaussian_sampled", f"DP-FedAvg, {SERVER}", f"3 rounds, {SAMPLED}, z = 0.75", partial(observe_training, "gaussian", 0.5, 3, 0.75),
          20_000, 0, "curve", training=True),
    Audit("fedavg_discrete", f"DP-FedAvg, {SHARES}", f"3 rounds, {EVERYBODY}, z = 1", partial(observe_training, "discrete", 1.0, 3, 1.0),
          10_000, 2000, training=True),
    Audit("fedavg_discrete_sampled", f"DP-FedAvg, {SHARES}", f"3 rounds, {SAMPLED}, z = 0.75", partial(observe_training, "discrete", 0.5, 3, 0.75),
          20_000, 0, "curve", training=True),
    Audit("adaptive_discrete", f"DP-FedAvg with adaptive clipping, {SHARES}", f"3 rounds, {EVERYBODY}, z = 1",
          partial(observe_adaptive_clip, "discrete", 1.0, 3, 1.0), 10_000, 0, training=True),
    Audit("tail_gaussian", f"DP-Delta-FL, {SERVER}", f"3 rounds, {EVERYBODY}, z = 1 and 1.5", partial(observe_tail_training, "gaussian", 1.0, 3, None),
          6000, 1000, training=True),
    Audit("tail_gaussian_sampled", f"DP-Delta-FL, {SERVER}", f"3 rounds, {SAMPLED}, z = 1 and 1.5",
          partial(observe_tail_training, "gaussian", 0.5, 3, None), 10_000, 0, "curve", training=True),
    Audit("tail_discrete", f"DP-Delta-FL, {SHARES}", f"3 rounds, {EVERYBODY}, z = 1 and 1.5", partial(observe_tail_training, "discrete", 1.0, 3, None),
          6000, 0, training=True),
    Audit("tail_smoothed", f"DP-Delta-FL smoothed, {SERVER}", f"3 rounds, {EVERYBODY}, z = 1 and 1.5",
          partial(observe_tail_training, "gaussian", 1.0, 3, 0.1), 6000, 0, training=True),
    Audit("ftrl_gaussian", "DP-FTRL, Gaussian noise correlated over rounds", "8 rounds, cohorts of three turns, z = 1",
          partial(observe_correlated, 8, 3, 1.0, None), 10_000, 2000, training=True),
    Audit("ftrl_buffered", "DP-FTRL, Gaussian noise of buffers over all rounds", "8 rounds, cohorts of three turns, z = 1",
          partial(observe_correlated, 8, 3, 1.0, 2), 10_000, 2000, training=True),
    Audit("delayed_gaussian", f"DP2 over clients, {SERVER}", f"4 rounds, {EVERYBODY}, z = 1", partial(observe_delayed_mean, "gaussian", 1.0, 4, 1.0),
          10_000, 2000, training=True),
    Audit("delayed_discrete", f"DP2 over clients, {SHARES}", f"4 rounds, {EVERYBODY}, z = 1", partial(observe_delayed_mean, "discrete", 1.0, 4, 1.0),
          10_000, 0, training=True),
    Audit("step_dp_sgd", "mean of gradients, DP-SGD", f"one step, {ALL}, z = 0.5", partial(observe_steps, dp_sgd(1e-9, 0.5, 0.5), 1, 1.0, CROWD),
          50_000, 4000),
    Audit("step_dp_sgd_clip", "mean of gradients, DP-SGD", f"one step, {ALL}, z = 0.5", partial(observe_steps, dp_sgd(1e-9, 0.5, 0.5), 1, 1.0, CROWD),
          50_000, 0, damage=LONG),
    Audit("step_automatic", "mean of normalised gradients, automatic clipping", f"one step, {ALL}, z = 0.5",
          partial(observe_steps, PrivateMethod(ClippedGradient(AutomaticClip(0.5)), GradientDescent(1e-9), 0.5), 1, 1.0, CROWD), 50_000, 4000),
    Audit("step_adadps", "mean of preconditioned gradients, AdaDPS", f"one step, {ALL}, z = 0.5",
          partial(observe_steps, adadps(1e-9, 0.5, 0.5, torch.linspace(0.1, 3.0, CROWD)), 1, 1.0, CROWD), 50_000, 4000),
    Audit("steps_dp_sgd_sampled", "DP-SGD", f"3 steps, {SAMPLED}, z = 0.75", partial(observe_steps, dp_sgd(1e-9, 0.5, 0.75), 3, 0.5, CROWD),
          20_000, 0, "curve", training=True),
    Audit("steps_dp_adam", "DP-Adam", f"3 steps, {ALL}, z = 1", partial(observe_steps, dp_adam(1e-9, 0.5, 1.0), 3, 1.0, CROWD), 10_000, 2000, training=True),
    Audit("steps_dp2", "DP2", f"4 steps, {ALL}, z = 1", partial(observe_steps, dp2(1e-9, 0.5, 1.0, 2, 1e-9, 2.0), 4, 1.0, CROWD), 10_000, 2000,
          training=True),
    Audit("steps_dp2_extra_query", "DP2 with an extra query", f"3 steps, {ALL}, z = 1.2",
          partial(observe_steps, dp2_extra_query(1e-9, 0.5, 1.2, 3, 1e-9, 2.0), 3, 1.0, CROWD), 10_000, 2000, training=True),
    Audit("inside_clients", "update of a client, DP-SGD inside it", "2 passes, z = 1", partial(observe_inside_client, 1.0, 2, CROWD), 20_000, 4000,
          training=True),
    Audit("nodes_gaussian", f"DP-FedAvg over nodes, {SERVER}", "3 rounds, three nodes in the clear, against a curious node, z = 0.75",
          partial(observe_nodes, "gaussian", False, 3, 0.75), 8000, 1000, training=True),
    Audit("nodes_discrete", f"DP-FedAvg over nodes, {SHARES}", "3 rounds, three nodes in the clear, against a curious node, z = 0.75",
          partial(observe_nodes, "discrete", False, 3, 0.75), 8000, 0, training=True),
    Audit("nodes_masked", f"DP-FedAvg over nodes, {SHARES}", "3 rounds, three nodes, secure sums, against a curious node, z = 0.75",
          partial(observe_nodes, "discrete", True, 3, 0.75), 8000, 1000, training=True),
)
