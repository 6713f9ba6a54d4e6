"""The papers' synthetic data, and a small real data set, as populations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedtail.data.partition import dirichlet
from fedtail.data.population import Population
from fedtail.draws import named_generator
from fedtail.errors import FieldError

Sizes = Literal["power_law", "moderate"] | Sequence[int]
Spread = Literal["std", "variance"]
_FEATURES, _CLASSES = 60, 10                                   # Synthetic(alpha, beta)


class Splits(NamedTuple):
    """Three sets of clients: to train on, to choose settings with, to report."""

    train: Population
    validation: Population
    test: Population


class LinearClients(NamedTuple):
    """What Synthetic(alpha, beta) draws for each client: a linear model and the centre of its inputs."""

    weight: np.ndarray                                         # (clients, classes, features), W_k
    bias: np.ndarray                                           # (clients, classes), b_k
    centre: np.ndarray                                         # (clients, features), v_k


def label_shift(
    seed: int = 0, train_clients: int = 2500, validation_clients: int = 500, test_clients: int = 500,
    examples_per_client: int = 100, train_concentration: float = 0.5, test_concentration: float = 0.01,
    pool_size: int = 500_000,
) -> Splits:
    """Ten classes in twenty features, where test clients hold fewer labels than training clients [PLMH23, section D.2].

    Returns the populations `train`, `validation` and `test`, with as many clients as the arguments say and `examples_per_client`
    each. All examples come from one pool of `pool_size`, always the same (scikit-learn's `make_classification`, random_state
    2345); `seed` drives what clients get. A client draws label proportions from Dir(`train_concentration`) or, for validation and
    test clients, Dir(`test_concentration`), then its labels, then examples of those labels. No example is given out twice in all
    three sets. Features are not standardised. Most of the time goes into the pool. Raises ValueError where the pool is too small,
    or a number is not positive.

    >>> label_shift(train_clients=20, validation_clients=5, test_clients=5, pool_size=10_000).train
    Population(20 clients, 2000 examples)
    """
    from sklearn.datasets import make_classification

    x, y = make_classification(
        n_samples=pool_size, n_features=20, n_informative=15, n_redundant=2, n_repeated=0, n_classes=10,
        n_clusters_per_class=1, class_sep=5.0, hypercube=False, random_state=2345)
    mixed = named_generator(seed, "label shift pool").permutation(pool_size)
    by_label = mixed[np.argsort(y[mixed], kind="stable")]
    held = np.bincount(y, minlength=10)
    wanted = (("train", train_clients, train_concentration), ("validation", validation_clients, test_concentration),
             ("test", test_clients, test_concentration))
    counts = [_label_counts(seed, *one, examples_per_client) for one in wanted]
    _check_pool_suffices(held, sum(count.sum(0) for count in counts))
    first, parts = held.cumsum() - held, []
    for count in counts:
        taken = np.concatenate([by_label[a:a + n] for a, n in zip(first, count.sum(0), strict=True)])
        client = np.concatenate([np.repeat(np.arange(len(count)), column) for column in count.T])
        parts.append(Population.from_arrays(x[taken].astype(np.float32), y[taken].astype(np.int64), client))
        first = first + count.sum(0)
    return Splits(*parts)


def synthetic(
    alpha: float, beta: float, clients: int = 30, seed: int = 0, sizes: Sizes = "power_law", spread: Spread = "std"
) -> Population:
    """Synthetic(alpha, beta): clients that differ in their model (alpha) and inputs (beta) [Li23, section 3.4.1].

    Client k has u_k ~ N(0, alpha), B_k ~ N(0, beta); W_k and b_k with entries N(u_k, 1); v_k with entries N(B_k, 1); inputs x ~
    N(v_k, diag(j^-1.2)) in 60 features, float32; the label is the index of the largest of the 10 entries of W_k x + b_k. `seed`
    fixes all draws.

    `spread` says what alpha and beta are: "std", standard deviations, as in the authors' code, or "variance", as in the text; at
    0 and 1 they agree. `sizes` is "power_law", floor(LogNormal(4, 2)) + 50 (chapter 3); "moderate", 50 + LogNormal(4.02, 0.80)
    rounded, whose mean 127 and deviation 73 are those of chapter 4's table; or a list of one number for each client. Raises
    FieldError for other values.

    >>> synthetic(1.0, 1.0, clients=3, sizes=[5, 6, 7])
    Population(3 clients, 18 examples)
    """
    return _labelled_population(synthetic_models(alpha, beta, clients, seed, spread), _client_sizes(sizes, clients, seed), seed)


def synthetic_iid(clients: int = 30, seed: int = 0, sizes: Sizes = "power_law") -> Population:
    """Clients with one common distribution: a shared linear model W, b ~ N(0, 1), and inputs centred at 0 [Li23, section 3.7.1].

    Inputs are x ~ N(0, diag(j^-1.2)) in 60 features; the label is the index of the largest of the 10 entries of W x + b. `sizes`
    gives the clients' numbers of examples: "power_law", floor(LogNormal(4, 2)) + 50; "moderate", 50 + LogNormal(4.02, 0.80)
    rounded; or a list of one number for each client. All is drawn by `seed`. Raises FieldError for other `sizes`.
    """
    return _labelled_population(_shared_model(clients, seed), _client_sizes(sizes, clients, seed), seed)


def synthetic_hybrid(
    alpha: float, beta: float, clients: int = 100, seed: int = 0, sizes: Sizes = "moderate", spread: Spread = "std"
) -> Population:
    """Half of the clients share one distribution (`synthetic_iid`), the others differ (`synthetic`) [Li23, Fig. 4.10].

    The first `clients // 2` are the ones that share; `group` is 0 for them and 1 for the others. The others differ by `alpha` in
    their models and by `beta` in their inputs; `spread` says whether these are standard deviations ("std") or variances
    ("variance"). `sizes` gives the clients' numbers of examples: "power_law", floor(LogNormal(4, 2)) + 50; "moderate", 50 +
    LogNormal(4.02, 0.80) rounded; or a list of one number for each client. All is drawn by `seed`. Raises FieldError for other
    values.
    """
    alike, different = _shared_model(clients, seed), synthetic_models(alpha, beta, clients, seed, spread)
    group = (np.arange(clients) >= clients // 2).astype(np.int64)
    models = LinearClients(*(np.where(group.reshape(-1, *[1] * (b.ndim - 1)) == 1, b, a)
                             for a, b in zip(alike, different, strict=True)))
    return _labelled_population(models, _client_sizes(sizes, clients, seed), seed, group)


def synthetic_models(
    alpha: float, beta: float, clients: int = 30, seed: int = 0, spread: Spread = "std"
) -> LinearClients:
    """Draw a linear model W_k, b_k and an input centre v_k for each of `clients` clients: a `LinearClients` of float64 arrays.

    Their shapes are (clients, 10, 60), (clients, 10) and (clients, 60). Client k has u_k ~ N(0, alpha), B_k ~ N(0, beta); the
    entries of W_k and b_k are N(u_k, 1), those of v_k N(B_k, 1). `spread` says what alpha and beta are: "std", standard
    deviations, or "variance". `seed` fixes the draws, so `synthetic` with equal arguments labels its inputs x by these models:
    the index of the largest entry of W_k x + b_k. Raises FieldError for an unknown `spread`, and for an alpha or beta that is
    negative or infinite.
    """
    if spread not in ("std", "variance"):
        raise FieldError("spread", '"std" or "variance"', spread, "The authors' code uses \"std\".")
    if not (0 <= alpha < np.inf and 0 <= beta < np.inf):
        field, came = ("beta", beta) if 0 <= alpha < np.inf else ("alpha", alpha)
        raise FieldError(field, "at least 0", came,
                         text=f"alpha and beta must be at least 0, got {alpha} and {beta}. Write 1.0, 1.0 for a strong "
                              "difference between clients, 0.0, 0.0 for the mildest.")
    model_std, input_std = (alpha, beta) if spread == "std" else (np.sqrt(alpha), np.sqrt(beta))
    random = named_generator(seed, "synthetic models")
    model_mean = model_std * random.standard_normal((clients, 1, 1))             # u_k
    input_mean = input_std * random.standard_normal((clients, 1))                # B_k
    weight = model_mean + random.standard_normal((clients, _CLASSES, _FEATURES))
    bias = model_mean[:, 0] + random.standard_normal((clients, _CLASSES))
    return LinearClients(weight, bias, input_mean + random.standard_normal((clients, _FEATURES)))


def three_gaussians(
    examples_per_client: int = 1000, means: Sequence[Sequence[float]] = ((0.0, 0.0), (1.0, 0.4), (3.0, 0.0)),
    seed: int = 0,
) -> Population:
    """Clients that each draw samples from a Gaussian of identity covariance, one client for each of `means` [LPMH21, Fig. 3].

    The task is to find one point w; the loss of a sample xi is |xi - w|^2. `x` and `y` are both the sample, float32, so that a
    model which ignores its input and answers w has this as its squared error. The default means form an obtuse triangle: for the
    superquantile with tail fraction 2/3 the best point is then the midpoint of the longest side, which an acute triangle does not
    give. `seed` fixes the draws. Raises ValueError for means that are not a list of points, and for fewer than one example per
    client.

    >>> three_gaussians(examples_per_client=5)
    Population(3 clients, 15 examples)
    """
    centre = np.asarray(means, dtype=np.float64)
    if centre.ndim != 2 or not centre.size or examples_per_client < 1:
        raise ValueError(f"means must hold one point for each client and examples_per_client be at least 1, got shape "
                         f"{centre.shape} and {examples_per_client}. For two clients write means=((0, 0), (1, 0)).")
    client = np.repeat(np.arange(len(centre)), examples_per_client)
    noise = named_generator(seed, "three gaussians").standard_normal((len(client), centre.shape[1]))
    sample = (centre[client] + noise).astype(np.float32)
    return Population.from_arrays(sample, sample, client)


def digits(clients: int = 100, concentration: float = 0.5, seed: int = 0) -> Population:
    """Scikit-learn's 1797 handwritten digits, 64 pixels (8 x 8, flat) in [0, 1], dealt out to clients by `dirichlet`.

    No download. `concentration` is that of the clients' label proportions, drawn by `seed`: small values give clients with few
    digits, large ones clients that are alike. Raises FieldError where it is not positive, or there are more clients than
    examples.

    >>> digits(clients=10)
    Population(10 clients, 1797 examples)
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Population.from_arrays((x / 16).astype(np.float32), y, dirichlet(y, clients, concentration, seed))


def _label_counts(seed: int, part: str, clients: int, concentration: float, examples: int) -> np.ndarray:
    """Draw how many examples of each label each client holds, (clients, 10) int64; each row sums to `examples`.

    A client's label proportions are drawn from Dir(`concentration`), then its labels. The draw depends on `seed` and the name of
    the `part` ("train", say). Raises ValueError for numbers that are not positive.
    """
    if clients < 1 or examples < 1 or not 0 < concentration < np.inf:
        raise ValueError(f"{part} needs at least one client, one example for each and a positive concentration, got "
                         f"{clients}, {examples} and {concentration}.")
    random = named_generator(seed, f"label shift {part}")
    return random.multinomial(examples, random.dirichlet([concentration] * 10, clients))


def _check_pool_suffices(held: np.ndarray, needed: Any) -> None:
    """Raise ValueError where the pool holds fewer examples of a label than the clients need.

    `held` and `needed` are these counts by label, (10,).
    """
    for label in np.flatnonzero(needed > held)[:1]:
        raise ValueError(f"the pool holds {held[label]} examples of label {label}, the clients need {needed[label]}. "
                         f"Raise pool_size={held.sum()}, or ask for fewer clients or examples_per_client.")


def _client_sizes(sizes: Sizes, clients: int, seed: int) -> np.ndarray:
    """How many examples each client holds, (clients,) integers: drawn by `seed`, or `sizes` itself where it is a list.

    "power_law" is floor(LogNormal(4, 2)) + 50, "moderate" LogNormal(4.02, 0.80) rounded + 50. Raises FieldError for another
    word, and for a list that is not one whole number from 1 for each client.
    """
    random = named_generator(seed, "synthetic sizes")
    if isinstance(sizes, str):
        if sizes == "power_law":
            return np.floor(random.lognormal(4.0, 2.0, clients)).astype(np.int64) + 50
        if sizes == "moderate":
            return np.rint(random.lognormal(4.02, 0.80, clients)).astype(np.int64) + 50
        raise FieldError("sizes", '"power_law", "moderate" or one number for each client', sizes)
    size = np.asarray(sizes)
    if size.shape != (clients,) or size.dtype.kind not in "iu" or size.min() < 1:
        raise FieldError("sizes", f"a whole number from 1 for each of {clients} clients", sizes,
                         text=f"sizes must hold a whole number from 1 for each of {clients} clients, got {sizes!r}.")
    return size


def _shared_model(clients: int, seed: int) -> LinearClients:
    """A `LinearClients` in which all `clients` clients have one linear model, drawn by `seed`, and inputs centred at zero.

    Weights are (clients, 10, 60), biases (clients, 10) and centres (clients, 60), as broadcast views of one client's.
    """
    random = named_generator(seed, "synthetic shared model")
    weight, bias = random.standard_normal((_CLASSES, _FEATURES)), random.standard_normal(_CLASSES)
    parts = (weight, bias, np.zeros(_FEATURES))
    return LinearClients(*(np.broadcast_to(part, (clients, *part.shape)) for part in parts))


def _labelled_population(models: LinearClients, size: np.ndarray, seed: int, group: np.ndarray | None = None) -> Population:
    """A population in which client k draws `size[k]` inputs around its centre, by `seed`, and its linear model gives the labels.

    The label is the index of the largest score, computed from the inputs after rounding to float32, as they are stored. `group`,
    a number for each client or None, becomes the population's.
    """
    deviation = np.arange(1, _FEATURES + 1) ** -0.6                              # Sigma = diag(j^-1.2)
    parts = []
    for k, count in enumerate(size):
        noise = named_generator(seed, f"synthetic inputs {k}").standard_normal((count, _FEATURES))
        x = (models.centre[k] + deviation * noise).astype(np.float32)
        parts.append((x, (x @ models.weight[k].T + models.bias[k]).argmax(1)))
    return Population.from_clients(parts, group=group)
