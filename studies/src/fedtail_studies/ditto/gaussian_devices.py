"""Devices whose models are Gaussian about a common one [Li23, section 5.2.1]: draws of them, and Algorithm 7 on their losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedtail.theory import DittoProblem, ditto_step_size

POINTS = DittoProblem(clients=10, examples=5, noise=1.0, spread=0.5)
PROBLEMS = {
    "point estimation": POINTS,
    "point estimation, 3 adversaries": replace(POINTS, adversaries=3, adversary_spread=3.0),
    "linear regression": DittoProblem(clients=10, examples=12, noise=1.0, spread=0.5, dim=3, gram=6.0),
    "linear regression, 3 adversaries": DittoProblem(clients=10, examples=12, noise=1.0, spread=0.5, adversaries=3,
                                                     adversary_spread=2.0, dim=3, gram=6.0),
}


def true_models(problem: DittoProblem, draws: int, random: np.random.Generator) -> np.ndarray:
    """Models of the devices about theta = 0, (draws, devices, dim); the last `adversaries` are corrupted."""
    spread = np.full(problem.clients, problem.spread)
    if problem.adversaries:
        spread[-problem.adversaries:] = problem.adversary_spread
    return spread[:, None] * random.standard_normal((draws, problem.clients, problem.dim))


def estimated_models(problem: DittoProblem, models: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """What each device finds alone, by least squares on its noisy samples, (draws, devices, dim).

    For point estimation it is the mean of n samples. For regression inputs with orthogonal columns of squared length beta are
    drawn and the normal equations are solved.
    """
    if problem.gram is None:
        samples = models[:, :, None] + problem.noise * random.standard_normal((*models.shape[:2], problem.examples, problem.dim))
        return samples.mean(2)
    inputs = np.linalg.qr(random.standard_normal((*models.shape[:2], problem.examples, problem.dim)))[0] * problem.gram**0.5
    targets = inputs @ models[..., None] + problem.noise * random.standard_normal((*models.shape[:2], problem.examples, 1))
    gram = np.swapaxes(inputs, 2, 3) @ inputs
    return np.linalg.solve(gram, np.swapaxes(inputs, 2, 3) @ targets)[..., 0]


def squared_errors(problem: DittoProblem, strengths: list[float], draws: int, seed: int) -> dict[float, np.ndarray]:
    """Squared errors of benign devices' personal models at each strength (lambda), (draws, benign devices).

    A personal model solves (curvature + lambda) v = curvature * own estimate + lambda * mean of all estimates; for an infinite
    lambda it is that mean.
    """
    random = np.random.default_rng(seed)
    models = true_models(problem, draws, random)
    own = estimated_models(problem, models, random)
    mean, benign, found = own.mean(1, keepdims=True), problem.clients - problem.adversaries, {}
    for strength in strengths:
        pull = 1.0 if np.isinf(strength) else strength / (problem.curvature + strength)
        found[strength] = np.square((1 - pull) * own + pull * mean - models)[:, :benign].sum(2)
    return found


def bayes_estimates(problem: DittoProblem, own: np.ndarray) -> np.ndarray:
    """The posterior means of the devices' models given all estimates, theta being unknown, without adversaries: shape of `own`.

    They are found from the joint Gaussian of models and estimates about an unknown mean, by the linear system of the best linear
    unbiased predictor, and not by a formula of the thesis.
    """
    devices, tau, sigma = problem.clients, problem.spread**2, problem.estimate_variance
    covariance = tau * np.eye(devices) + sigma * np.eye(devices)
    system = np.block([[covariance, np.ones((devices, 1))], [np.ones((1, devices)), np.zeros((1, 1))]])
    right = np.concatenate([tau * np.eye(devices), np.ones((1, devices))])
    weights = np.linalg.solve(system, right)[:devices]                    # column k: what device k takes of each estimate
    return np.einsum("jk,djm->dkm", weights, own)


def gaps_by_round(rounds: int, devices: int, participation: float, strength: float, repeats: int, seed: int,
                  read: list[int]) -> tuple[list[float], list[float]]:
    """Mean squared distances to the optima of the shared and of the personal models after the rounds in `read`.

    Devices hold the losses (w - x)^2 / 2 of noisy samples x about a centre of their own, and take part independently with
    probability `participation`. In a round each takes one stochastic gradient step on the shared model, of size 1 / (t + 1) and
    divided by the participation, and one on its own with the step of Lemma 20; means are over devices and `repeats` runs.
    """
    random = np.random.default_rng(seed)
    centres = random.standard_normal((repeats, devices))
    best = centres.mean(1)
    best_own = (centres + strength * best[:, None]) / (1 + strength)
    shared, own = np.zeros(repeats), np.zeros((repeats, devices))
    gaps: tuple[list[float], list[float]] = ([], [])
    for t in range(rounds):
        samples = centres + random.standard_normal((repeats, devices))
        taking = random.random((repeats, devices)) < participation
        step = ditto_step_size(t, 1.0, strength, participation)
        own -= step * taking * (own - samples + strength * (own - shared[:, None]))
        shared = shared - (taking * (shared[:, None] - samples)).mean(1) / participation / (t + 1)
        if t + 1 in read:
            gaps[0].append(float(np.square(shared - best).mean()))
            gaps[1].append(float(np.square(own - best_own).mean()))
    return gaps
