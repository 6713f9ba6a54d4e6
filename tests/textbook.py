"""Federated training as the papers print it: one client after the other, one batch after the other, in float64.

An oracle for `fuzz_core.py`. Nothing of the package computes here: risks are solved by sorting and by bisection on their own
equations, gradients are autograd's on the user's module, sums are Python loops. Methods come as plain names and numbers, ("Superquantile",
{"tail_fraction": 0.3}), never as the package's parts. Shared are the data, and the hashed draws (`fedtail.draws`): with the same
seed both see the same cohorts and batches, and how draws become cohorts and batches is written out here once more.

With `Noise` the same computation is done with rounding errors put in on purpose, which shows how far rounding alone may move it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.draws import hash_bits, random_permutations, uniform_integers, uniform_numbers

Part = tuple[str, dict[str, Any]]
Method = dict[str, Part]
ROUNDING = 1e-12      # theta times the total mass is rounded: a client is not cut in two for that


@dataclass(frozen=True)
class Client:
    """Somebody with data; `key` names the random streams."""

    key: int
    mass: float
    group: int
    inputs: Any
    targets: Tensor

    @property
    def size(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Problem:
    """Clients, a module in float64 and the kind of its loss; numbers beyond `largest` count as infinite."""

    clients: list[Client]
    module: nn.Module
    loss: str
    largest: float


# Losses


def example_losses(kind: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """One number per example."""
    if kind == "classes":
        return outputs.logsumexp(1) - outputs[torch.arange(len(targets)), targets]
    if kind == "one logit":
        logit = outputs.reshape(len(targets))
        return torch.logaddexp(torch.zeros_like(logit), logit) - targets * logit
    if kind == "numbers":
        return (outputs.reshape(len(targets), -1) - targets.reshape(len(targets), -1)).pow(2).sum(1)
    rows = []
    for scores, labels in zip(outputs, targets, strict=True):                # sequences, padded by -100
        places = [t for t in range(len(labels)) if labels[t] != -100]
        each = [scores[t].logsumexp(0) - scores[t, labels[t]] for t in places]
        rows.append(sum(each) / len(each) if each else 0 * scores.sum())
    return torch.stack(rows)


def outputs_of(module: nn.Module, inputs: Any) -> Tensor:
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def take(inputs: Any, rows: Tensor) -> Any:
    return {name: values[rows] for name, values in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def put(module: nn.Module, model: Tensor) -> None:
    """Write a flat vector into the module's parameters."""
    at = 0
    with torch.no_grad():
        for parameter in parameters_of(module):
            parameter.copy_(model[at:at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


def client_loss(problem: Problem, client: Client, model: Tensor, noise: Noise) -> float:
    """The mean over the client's examples, rounded once to float32."""
    put(problem.module, model)
    problem.module.eval()
    with torch.no_grad():
        each = example_losses(problem.loss, outputs_of(problem.module, noise.inputs(client.inputs)), client.targets)
    if not bool((each.abs() <= problem.largest).all()):
        return math.inf
    return rounded(noise.number(math.fsum(each.tolist()) / client.size))


def rounded(loss: float) -> float:
    return float(torch.tensor(loss, dtype=torch.float64).float())


# Who takes part


def cohort(sampler: Part, clients: list[Client], seed: int, round: int) -> dict[int, float]:
    """Positions of the clients drawn, and what a unit of their mass stands for."""
    name, settings = sampler
    everyone = range(len(clients))
    if name == "Everyone":
        return dict.fromkeys(everyone, 1.0)
    if name == "ByMass":
        bits = hash_bits(seed, "cohort", round, torch.arange(settings["cohort_size"]))
        by_key, drawn = sorted(everyone, key=lambda k: clients[k].key), []
        for u in uniform_numbers(bits).tolist():
            left = u * math.fsum(c.mass for c in clients)
            for k in by_key:
                left -= clients[k].mass
                if left < 0:
                    break
            drawn.append(k)
        return {k: drawn.count(k) / clients[k].mass for k in sorted(set(drawn))}
    bits = hash_bits(seed, "cohort", round, torch.tensor([c.key for c in clients]))
    if name == "Poisson":
        return {k: 1.0 for k in everyone if float(uniform_numbers(bits[k])) < settings["rate"]}
    clocks = [-math.log1p(-float(uniform_numbers(bits[k]))) / clients[k].mass for k in everyone]
    ranked = sorted(everyone, key=lambda k: clocks[k] if name == "BySize" else int(bits[k]))
    equal = name == "EqualClients" or (name == "BySize" and not settings["weighted"])
    return {k: 1 / clients[k].mass if equal else 1.0 for k in sorted(ranked[:settings["cohort_size"]])}


# Risks: a dual from all losses, a density from one loss


def superquantile_dual(settings: dict, losses: list[float], mass: list[float]) -> tuple[float, float, float]:
    """Walk from the largest loss down until theta of the mass is spent: (start and end of the boundary, the share of it that counts)."""
    tail, spent = settings["tail_fraction"] * math.fsum(mass), 0.0
    cell = coarse_cell if settings.get("quantile") else lambda loss: (loss, loss)
    cells = sorted({cell(loss) for loss, m in zip(losses, mass, strict=True) if m > 0}, reverse=True)
    for low, high in cells:
        inside = math.fsum(m for loss, m in zip(losses, mass, strict=True) if low <= loss <= high)
        if spent + inside > tail + ROUNDING * math.fsum(mass) or low == cells[-1][0]:
            share = min(max((tail - spent) / inside, 0.0), 1.0)
            return low, high, share if share > ROUNDING or not spent else 0.0
        spent += inside
    raise AssertionError("the walk ends at the smallest loss")


def coarse_cell(loss: float) -> tuple[float, float]:
    """All numbers that share sign, exponent and three bits of the mantissa: an eighth of a power of two."""
    if loss == 0:
        return 0.0, 0.0
    mantissa, exponent = math.frexp(loss)                          # in [1/2, 1)
    low = math.floor(mantissa * 16) / 16
    return math.ldexp(low, exponent), math.nextafter(math.ldexp(low + 1 / 16, exponent), -math.inf)


def bisect(function: Callable[[float], float], low: float, high: float, target: float) -> float:
    """Where a falling function crosses the target."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) >= target else (low, middle)
    return low


def weighted(mass: list[float], values: list[float]) -> float:
    return math.fsum(m * v for m, v in zip(mass, values, strict=True)) / math.fsum(mass)


def clipped(value: float, low: float = 0.0, high: float = 1.0) -> float:
    return min(max(value, low), high)


def kl_counted(settings: dict, loss: float, level: float) -> float:
    """theta min(1/theta, exp((F - c)/nu))."""
    exponent = (loss - level) / settings["smoothing"] + math.log(settings["tail_fraction"])
    return math.exp(min(exponent, 0.0))


def quadratic_counted(settings: dict, loss: float, threshold: float) -> float:
    return clipped((loss - threshold) / settings["smoothing"])


def dual_of(risk: Part, losses: list[float], mass: list[float]) -> Any:
    """What all losses together decide; a client without mass decides nothing."""
    name, settings = risk
    losses, mass = [f for f, m in zip(losses, mass, strict=True) if m > 0], [m for m in mass if m > 0]
    if name in ("Superquantile", "TailFilter"):
        return superquantile_dual(settings, losses, mass)
    if name in ("SmoothedSuperquantile", "QuadraticSuperquantile"):
        counted = kl_counted if name == "SmoothedSuperquantile" else quadratic_counted
        theta, nu = settings["tail_fraction"], settings["smoothing"]
        low = min(losses) - nu + nu * math.log(theta)
        return bisect(lambda dual: weighted(mass, [counted(settings, f, dual) for f in losses]), low, max(losses), theta)
    if name == "Tilted":
        bound = settings.get("loss_bound")
        if bound is not None:
            return bound if settings["tilt"] > 0 else 0.0
        return max(losses) if settings["tilt"] > 0 else min(losses)
    return max(losses)


def density(risk: Part, loss: float, dual: Any) -> float:
    """How much of its mass a client with this loss counts."""
    name, settings = risk
    if name == "Superquantile":
        low, high, share = dual
        return 1.0 if loss > high else share if loss >= low else 0.0
    if name == "TailFilter":
        return float(loss >= dual[0])
    if name == "SmoothedSuperquantile":
        return kl_counted(settings, loss, dual)
    if name == "QuadraticSuperquantile":
        return quadratic_counted(settings, loss, dual)
    if name == "Tilted":
        return math.exp(min(settings["tilt"] * (loss - dual), 0.0))
    if name == "PowerFair":
        return (clipped(loss, 0.0, dual) / dual if dual > 0 else 1.0) ** settings["power"]
    if name == "AlphaFair":
        least, left = (max(settings["loss_bound"] - f, 1e-10) for f in (dual, loss))
        return min(least / left, 1.0) ** settings["alpha"]
    if name == "Worst":
        return float(loss >= dual)
    return 1.0      # Mean


def slope(risk: Part, loss: float, dual: Any) -> float:
    """The derivative of the density in the loss; where it is capped, beyond a bound or a stale dual, it is constant."""
    name, settings = risk
    counted = density(risk, loss, dual)
    if name == "PowerFair":
        return settings["power"] * counted / loss if counted > 0 and 0 < loss <= dual else 0.0
    if name == "AlphaFair":
        left = settings["loss_bound"] - loss
        return settings["alpha"] * counted / left if loss <= dual and left > 1e-10 else 0.0
    if name == "Tilted":
        return settings["tilt"] * counted if settings["tilt"] * (loss - dual) <= 0 else 0.0
    if name == "SmoothedSuperquantile":
        return counted / settings["smoothing"] if counted < 1 else 0.0
    return 0.0


def weights_of(risk: Part, losses: list[float], mass: list[float]) -> list[float]:
    """Normalised weights of these losses."""
    if risk[0] in ("Ascent", "GroupAscent"):
        return projected([1 / len(losses) + risk[1]["step"] * f for f in losses], 1.0)
    dual = dual_of(risk, losses, mass)
    counted = [m * density(risk, f, dual) for f, m in zip(losses, mass, strict=True)]
    return [c / math.fsum(counted) for c in counted]


def value_of(risk: Part, losses: list[float], mass: list[float]) -> float:
    """The risk itself, by its definition."""
    name, settings = risk
    if name in ("Worst", "Ascent", "GroupAscent"):
        return max(f for f, m in zip(losses, mass, strict=True) if m > 0)
    share = [m / math.fsum(mass) for m in mass]
    if name == "Tilted":
        tilt, top = settings["tilt"], max(losses, key=lambda f: settings["tilt"] * f)
        return top + math.log(weighted(mass, [math.exp(tilt * (f - top)) for f in losses])) / tilt
    if name == "PowerFair":
        power = settings["power"]
        return weighted(mass, [f ** (power + 1) for f in losses]) / (power + 1)
    if name == "AlphaFair":
        alpha, left = settings["alpha"], [max(settings["loss_bound"] - f, 1e-10) for f in losses]
        if alpha == 1:
            return settings["loss_bound"] - math.exp(weighted(mass, [math.log(x) for x in left]))
        return settings["loss_bound"] - weighted(mass, [x ** (1 - alpha) for x in left]) ** (1 / (1 - alpha))
    if name == "QuadraticSuperquantile":
        theta, nu, eta = settings["tail_fraction"], settings["smoothing"], dual_of(risk, losses, mass)
        hinge = [nu / 2 if f <= eta else (f - eta) ** 2 / (2 * nu) + nu / 2 if f <= eta + nu else f - eta for f in losses]
        return eta + weighted(mass, hinge) / theta
    weights = weights_of(risk, losses, mass)
    value = math.fsum(w * f for w, f in zip(weights, losses, strict=True))
    if name == "SmoothedSuperquantile":
        value -= settings["smoothing"] * math.fsum(w * math.log(w / s) for w, s in zip(weights, share, strict=True) if w > 0)
    return value


def projected(values: list[float], total: float) -> list[float]:
    """The nearest point of the simplex of this total, by bisection on the shift."""
    if not values:
        return []
    shift = bisect(lambda shift: math.fsum(max(v - shift, 0.0) for v in values), min(values) - total, max(values), total)
    return [max(v - shift, 0.0) for v in values]


# What a client does


def rate_of(local: dict[str, Any], round: int) -> float:
    name, settings = local.get("schedule", ("Constant", {}))
    if name == "StepDecay":
        factor = settings["factor"] ** (round // settings["every"])
    elif name == "Cosine":
        done, final = min(round / settings["num_rounds"], 1.0), settings.get("final", 0.0)
        factor = final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    else:
        factor = 1.0
    return local["learning_rate"] * factor


def steps_of(local: dict[str, Any], client: Client, seed: int, round: int) -> int:
    """How many steps a client takes: all, or fewer as a straggler."""
    epoch = math.ceil(client.size / (local["batch_size"] or client.size))
    full = local.get("local_steps") or (local.get("epochs") or 1) * epoch
    name, settings = local.get("work", ("FullWork", {}))
    key = torch.tensor(client.key)
    if name == "FullWork" or float(uniform_numbers(hash_bits(seed, "straggler", round, key))) >= settings["fraction"]:
        return full
    if settings["drop"]:
        return 0
    piece = epoch if full > epoch else 1                          # whole epochs; of a single one, batches
    managed = int(uniform_integers(hash_bits(seed, "straggler work", round, key), 1, math.ceil(full / piece) + 1))
    return min(managed * piece, full)


def batches(local: dict[str, Any], client: Client, steps: int, seed: int, round: int) -> list[Tensor]:
    """The examples of each step: every epoch in an order of its own, the last batch of an epoch smaller."""
    if local["batch_size"] is None:
        return [torch.arange(client.size)] * steps
    found: list[Tensor] = []
    for epoch in range(steps):
        bits = hash_bits(seed, "batches", round, torch.tensor([client.key]), epoch)
        found += random_permutations(bits, torch.tensor([client.size]))[0].split(local["batch_size"])
        if len(found) >= steps:
            break
    return found[:steps]


def local_update(problem: Problem, client: Client, start: Tensor, local: dict[str, Any], seed: int, round: int,
                 noise: Noise) -> Tensor | None:
    """w_k - w after local training; None where it is not finite."""
    rate, model, velocity = rate_of(local, round), start.clone(), torch.zeros_like(start)
    strength = local["penalty"][1]["strength"] if "penalty" in local else 0.0
    inputs = noise.inputs(client.inputs)
    problem.module.train()
    for rows in batches(local, client, steps_of(local, client, seed, round), seed, round):
        put(problem.module, model)
        losses = example_losses(problem.loss, outputs_of(problem.module, take(inputs, rows)), client.targets[rows])
        found = torch.autograd.grad(losses.mean(), parameters_of(problem.module), allow_unused=True, materialize_grads=True)
        gradient = noise.gradient(flat(found), take(inputs, rows))
        if not bool((losses.abs() <= problem.largest).all() & (gradient.abs() <= problem.largest).all()):
            return None
        velocity = local.get("momentum", 0.0) * velocity + gradient + strength * (model - start)
        model = noise.vector((1 - rate * local.get("weight_decay", 0.0)) * model - rate * velocity)
        if not bool((model.abs() <= problem.largest).all()):
            return None
    return model - start


# What the server does


def server_step(server: Part, model: Tensor, update: Tensor, kept: dict[str, Tensor]) -> Tensor:
    name, settings = server
    rate = settings["learning_rate"]
    if name == "SGD":
        kept["velocity"] = settings.get("momentum", 0.0) * kept.get("velocity", torch.zeros_like(model)) + update
        return model + rate * kept["velocity"]
    decay, second_decay, tau = settings["first_decay"], settings["second_decay"], settings["adaptivity"]
    first = decay * kept.get("first", torch.zeros_like(model)) + (1 - decay) * update
    second = kept.get("second", torch.full_like(model, tau**2))
    for j, u in enumerate(update.tolist()):
        square, before = u * u, float(second[j])
        if name == "Adam":
            after = second_decay * before + (1 - second_decay) * square
        elif name == "Yogi":
            after = before - (1 - second_decay) * square * ((before > square) - (before < square))
        else:
            after = before + square
        second[j] = after
    kept["first"], kept["second"] = first, second
    return model + rate * first / (second.sqrt() + tau)


def result_of(iterate: Part, models: list[Tensor], seed: int) -> Tensor:
    """The model handed out, from all models w^(0), ..., w^(T)."""
    name, settings = iterate
    if name == "AveragedIterate":
        contraction = settings["contraction"]
        beta = [contraction ** (len(models) - 1 - j) for j in range(len(models))]      # contraction^-(1+j), up to a factor
        return sum(b * w for b, w in zip(beta, models, strict=True)) / math.fsum(beta)
    if name == "RandomIterate" and len(models) > 1:
        drawn = models[0]
        for t in range(1, len(models)):                           # w^(t-1) joins with probability 1/t
            drawn = models[t - 1] if float(uniform_numbers(hash_bits(seed, "iterate", t))) * t < 1 else drawn
        return drawn
    return models[-1]


# Rounding, on purpose


@dataclass
class Noise:
    """Rounding errors of relative size `rounding`; `of_weights` is what a risk's own search leaves, `grain` what integers do to sums."""

    rounding: float = 0.0
    of_weights: float = 0.0
    grain: float = 0.0
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.random, dtype=torch.float64)

    def vector(self, values: Tensor) -> Tensor:
        return values + self.rounding * float(values.abs().max()) * self.draw(values) if self.rounding else values

    def gradient(self, values: Tensor, inputs: Any) -> Tensor:
        """Products of residuals up to one and inputs are rounded, also where they cancel."""
        if not self.rounding:
            return values
        floats = [v.abs().max() for v in (inputs.values() if isinstance(inputs, dict) else [inputs]) if v.is_floating_point()]
        size = float(values.abs().max()) + max([1.0, *map(float, floats)])
        return values + self.rounding * size * self.draw(values)

    def inputs(self, inputs: Any) -> Any:
        if not self.rounding:
            return inputs
        if isinstance(inputs, dict):
            return {name: self.inputs(values) for name, values in inputs.items()}
        return inputs * (1 + self.rounding * self.draw(inputs)) if inputs.is_floating_point() else inputs

    def number(self, value: float) -> float:
        return value * (1 + 4 * self.rounding * float(self.draw(torch.zeros(())))) if self.rounding else value

    def weight(self, value: float) -> float:
        error = self.of_weights + 4 * self.rounding
        return value * max(1 + error * float(self.draw(torch.zeros(()))), 0.0) if self.rounding else value

    def sum(self, values: Tensor, size: float) -> Tensor:
        return values + self.grain * size * self.draw(values) if self.grain else values


# A run


@dataclass
class Played:
    """What one round did."""

    cohort: list[int]
    counted: set[int]
    left_out: set[int]
    losses: list[float]
    mass: list[float]
    weights: dict[int, float]
    largest: float                  # entry of an update
    lost: bool = False              # too few contribute


@dataclass
class Run:
    """Where one method stands, and all it remembers."""

    problem: Problem
    method: Method
    seed: int
    noise: Noise = field(default_factory=Noise)
    fewest: int = 1                                               # smaller cohorts are not asked
    hides: int = 0                                                # with fewer contributors the round is lost, and nothing is remembered
    models: list[Tensor] = field(default_factory=list)            # w^(0), w^(1), ...
    rounds: list[Played] = field(default_factory=list)
    server: dict[str, Tensor] = field(default_factory=dict)
    lambdas: dict[int, float] = field(default_factory=dict)       # AFL: of a client, relative to equal; of a group
    stale: tuple[int, Any] | None = None                          # rounds since the dual was fitted, and the dual

    def __post_init__(self) -> None:
        self.problem = replace(self.problem, module=copy.deepcopy(self.problem.module).double())
        self.models.append(flat(parameters_of(self.problem.module)))

    def go(self, rounds: int) -> Run:
        for _ in range(rounds):
            self.rounds.append(self.round(len(self.rounds)))
        return self

    @property
    def result(self) -> Tensor:
        return result_of(self.method.get("iterate", ("LastIterate", {})), self.models, self.seed)

    def round(self, number: int) -> Played:
        clients, model, local = self.problem.clients, self.models[-1], self.method["local"][1]
        drawn = cohort(self.method["sample"], clients, self.seed, number)
        if len(drawn) < self.fewest:
            self.models.append(model)
            return Played([], set(), set(), [], [], {}, 0.0)
        mass = {k: clients[k].mass * importance for k, importance in drawn.items()}
        losses, left_out = dict.fromkeys(drawn, 0.0), set()
        if self.method["risk"][0] != "Mean":
            losses = {k: client_loss(self.problem, clients[k], model, self.noise) for k in drawn}
            left_out = {k for k in drawn if not math.isfinite(losses[k])}
        here = [k for k in drawn if k not in left_out]
        before = dict(self.lambdas)
        weight, slopes = self.weights(here, losses, mass)
        if sum(weight[k] > 0 and steps_of(local, clients[k], self.seed, number) > 0 for k in here) < self.hides:
            self.stale, self.lambdas = None, before
            self.models.append(model)
            return Played(list(drawn), set(), left_out, [losses[k] for k in here], [mass[k] for k in here], weight, 0.0, lost=True)
        largest, counted, total = 0.0, set(), Total(model, self.method, rate_of(local, number))
        for k in here:
            if weight[k] > 0 and steps_of(local, clients[k], self.seed, number) > 0:
                update = local_update(self.problem, clients[k], model, local, self.seed, number, self.noise)
                if update is None:
                    left_out.add(k)
                else:
                    counted.add(k)
                    largest = max(largest, float(update.abs().max()))
                    total.add(self.noise.weight(weight[k]), mass[k] * slopes[k], update)
        update = total.ratio(self.noise, len(drawn), max(mass.values()))
        if update is None:
            self.stale = None
            self.models.append(model)
        else:
            self.models.append(self.noise.vector(server_step(self.method["server"], model, update, self.server)))
        return Played(list(drawn), counted, left_out, [losses[k] for k in here], [mass[k] for k in here], weight, largest)

    def weights(self, here: list[int], losses: dict[int, float], mass: dict[int, float]) -> tuple[dict, dict]:
        """How much every client of the cohort weighs, and the slope of its density; what is remembered moves on."""
        risk, none = self.method["risk"], dict.fromkeys(here, 0.0)
        if not here:
            return none, none
        if risk[0] == "Ascent":
            weight = {k: self.lambdas.get(k, 1.0) for k in here}
            climbed = [weight[k] + risk[1]["step"] * len(here) * losses[k] for k in here]
            self.lambdas |= zip(here, projected(climbed, math.fsum(weight.values())), strict=True)
            return weight, none
        if risk[0] == "GroupAscent":
            return self.by_group(here, losses, mass), none
        inner, every = (risk[1]["risk"], risk[1]["every"]) if risk[0] == "Refreshed" else (risk, 1)
        if self.stale is None or self.stale[0] + 1 >= every:
            self.stale = (0, dual_of(inner, [losses[k] for k in here], [mass[k] for k in here]))
        else:
            self.stale = (self.stale[0] + 1, self.stale[1])
        dual = self.stale[1]
        return ({k: mass[k] * density(inner, losses[k], dual) for k in here},
                {k: slope(inner, losses[k], dual) for k in here})

    def by_group(self, here: list[int], losses: dict[int, float], mass: dict[int, float]) -> dict[int, float]:
        settings, group = self.method["risk"][1], {k: self.problem.clients[k].group for k in mass}
        drawn = list(group.values())
        here = [k for k in here if drawn.count(group[k]) >= self.hides]              # others are as if absent
        present = sorted({group[k] for k in here})
        old = {g: self.lambdas.get(g, 1 / settings["groups"]) for g in present}
        of_group = {g: math.fsum(mass[k] for k in here if group[k] == g) for g in present}
        loss = {g: math.fsum(mass[k] * losses[k] for k in here if group[k] == g) / of_group[g] for g in present}
        climbed = projected([old[g] + settings["step"] * loss[g] for g in present], math.fsum(old.values()))
        self.lambdas |= zip(present, climbed, strict=True)
        return dict.fromkeys(mass, 0.0) | {k: old[group[k]] * mass[k] / of_group[group[k]] for k in here}


class Total:
    """The weighted mean of updates, or q-FedAvg's step, client after client."""

    def __init__(self, model: Tensor, method: Method, rate: float):
        name, settings = method["aggregate"]
        self.curved = name == "CurvatureMean"
        self.lipschitz = (settings.get("lipschitz") or 1 / max(rate, 1e-30)) if self.curved else 1.0
        self.over, self.under, self.model = torch.zeros_like(model), 0.0, model

    def add(self, weight: float, slope: float, update: Tensor) -> None:
        """D_k = weight L update, h_k = slope |L update|^2 + L weight; without curvature L = 1 and slope = 0."""
        steep = self.lipschitz * update
        self.over = self.over + weight * steep
        self.under += (slope * float(steep.dot(steep)) if self.curved else 0.0) + self.lipschitz * weight

    def ratio(self, noise: Noise, clients: int, mass: float) -> Tensor | None:
        if not self.under > 0:
            return None
        size = self.lipschitz * clients * mass
        under = noise.sum(torch.tensor(self.under, dtype=torch.float64), size * (1024.0 if self.curved else 1e-3))
        return noise.vector(noise.sum(self.over, size) / under)
