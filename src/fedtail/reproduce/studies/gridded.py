"""Every method of [PLMH23, section 7.2] with its tuning, on any clients and model: what the ConvNet and Sent140 share.

As printed the power of q-FFL, the tilt and the fraction of FedAvg-Sub are chosen on test clients; so every value is run to the
end, and beside it on half of the training clients, judged on the other half, by which they should be chosen. lambda and mu are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fedtail
from fedtail.clients import Broadcast, Shard
from fedtail.data import Population
from fedtail.engine.choice import evaluating_kernel, kernel_for
from fedtail.evaluation import Distribution
from fedtail.evaluation.evaluate import client_values
from fedtail.reproduce.results import Results
from fedtail.reproduce.studies import courses
from fedtail.reproduce.studies.courses import Sides
from fedtail.reproduce.studies.emnist_linear import (
    PERSONAL_EPOCHS,
    best_rate,
    best_strength,
    get,
    methods,
    percent,
    powers,
    recipe,
    score,
    subs,
    tails,
    tilts,
    tuning,
)
from fedtail.reproduce.studies.table2_rows import GRIDS, validated
from fedtail.reproduce.study import Cell, Measure, Numbers
from fedtail.training import Method, Trained

SIDE_BY_SIDE = 60                                # test clients that are personalised at once


@dataclass(frozen=True)
class Plan:
    """`visits` is how often a training client takes part on average."""

    seeds: int = 5
    visits: float = 100.0
    cohort: int = 100
    batch: int = 10
    learning_rates: tuple[float, ...] = (0.1,)
    decay: float = 1.0                           # of the rate, every so often
    decay_every: float = 1.0                     # share of the rounds
    tail_fractions: tuple[float, ...] = (0.8, 0.5, 0.1)
    powers: tuple[float, ...] = (0.1, 1.0, 10.0)               # q-FFL; the last is also AFL
    tilts: tuple[float, ...] = (0.1, 1.0, 5.0)
    proximal: tuple[float, ...] = (1.0, 0.1, 0.01)             # mu
    lambdas: tuple[float, ...] = ()                            # l2 regularisation, for linear models
    periods: tuple[int, ...] = ()                              # rounds between two thresholds at theta = 0.5, T_eta
    tuning_share: float = 0.25                                 # of the visits, when settings are chosen
    clients: int = 865                                         # to train on and to test on, at most
    looks: int = 20                                            # at a run on its way


@dataclass(frozen=True)
class Field:
    """Where methods are compared: the clients of a cell, the model, whose clients are kept one by one, whether to personalise."""

    sides: Callable[[Cell], Sides]
    task: Callable[[Cell], fedtail.Task]
    drawn: tuple[str, ...]
    personal: bool = False

    def cells(self, plan: Plan, seed: int) -> dict[str, Measure]:
        """The learning rate, for the first seed; for every seed its tuning on half of the training clients, then every method."""
        made: dict[str, Measure] = {}
        if seed == 0:
            made |= {f"learning rate {rate:g}": partial(try_rate, self, rate=rate) for rate in plan.learning_rates}
        made |= {tuning(name, "lambda", decay): partial(tune, self, method=name, decay=decay)
                 for name in ("FedAvg", *tails(plan)) for decay in plan.lambdas}
        made |= {tuning("FedProx", "mu", mu): partial(tune, self, method="FedProx", strength=mu) for mu in plan.proximal}
        made |= {f"tuning {name}": partial(tune, self, method=name) for name in (*powers(plan), *tilts(plan), *subs(plan))}
        return made | {name: partial(final, self, method=name) for name in (*methods(plan), *periods(plan))}


def periods(plan: Any) -> tuple[str, ...]:
    return tuple(f"Delta-FL 0.5, every {period} rounds" for period in get(plan, "periods"))


def made_by(name: str, cohort: int, settings: dict[str, Any], strength: float = 0.0) -> Method:
    """A method by its name: those of the tables, and theta = 0.5 with a threshold that is kept for some rounds."""
    if ", every " not in name:
        return recipe(name, cohort, settings, strength)
    return fedtail.delta_fl(0.5, cohort, form="filter", refresh_every=int(name.split()[-2]), **settings)


def rounds_of(plan: Plan, clients: int, cohort: int, share: float = 1.0) -> int:
    return max(1, round(share * plan.visits * clients / cohort))


def local(plan: Plan, rate: float, rounds: int, decay: float = 0.0) -> dict[str, Any]:
    schedule = fedtail.StepDecay(plan.decay, max(1, round(plan.decay_every * rounds)))
    return {"learning_rate": rate, "batch_size": plan.batch, "schedule": schedule, "weight_decay": decay}


def try_rate(at: Field, cell: Cell, rate: float) -> Numbers:
    train = at.sides(cell).train
    cohort = min(cell.plan.cohort, len(train))
    rounds = rounds_of(cell.plan, len(train), cohort, cell.plan.tuning_share)
    return courses.last_loss(cell, recipe("FedAvg", cohort, local(cell.plan, rate, rounds)), at.task(cell), train, rounds)


def tune(at: Field, cell: Cell, method: str, decay: float | None = None, strength: float = 0.0) -> Numbers:
    """Train on one half of the training clients, look at the error on the other [PLMH23, section C.2]."""
    train, held = at.sides(cell).train.split((0.5, 0.5), cell.seed)
    cohort = min(-(-cell.plan.cohort // 2), len(train))
    rounds = rounds_of(cell.plan, len(train), cohort, cell.plan.tuning_share)
    decay = best_decay(cell, "FedAvg") if decay is None else decay
    algorithm = made_by(method, cohort, local(cell.plan, best_rate(cell), rounds, decay), strength)
    with courses.quiet_about_small_tails():
        trained = cell.train(algorithm, at.task(cell), train, rounds)
    error = fedtail.evaluate(trained, held, device=cell.device).error
    return {"validation": percent(error, ("p90", "mean"))}


def final(at: Field, cell: Cell, method: str) -> Numbers:
    """Train with the chosen settings, look at the test clients, on the way too."""
    sides, rate, decay = at.sides(cell), best_rate(cell), best_decay(cell, method)
    strength = best_strength(cell) if method == "FedProx" else 0.0
    cohort = min(cell.plan.cohort, len(sides.train))
    rounds = rounds_of(cell.plan, len(sides.train), cohort)
    algorithm = made_by(method, cohort, local(cell.plan, rate, rounds, decay), strength)
    trained, course = courses.followed(cell, algorithm, at.task(cell), sides, rounds, max(1, rounds // cell.plan.looks))
    settings = {"learning_rate": rate, "lambda": decay, "mu": strength, "rounds": rounds}
    found = {"settings": settings, "course": course, **courses.described(cell, trained, sides, method in at.drawn)}
    if at.personal and (method == "FedAvg" or method in tails(cell.plan)):
        found["personal"] = personal(trained, sides.test, cell, rounds)
    return found


def best_decay(cell: Cell, method: str) -> float:
    """lambda of FedAvg, and of Delta-FL by theta; other methods take FedAvg's."""
    if not cell.plan.lambdas:
        return 0.0
    name = method.partition(",")[0]
    name = name if name in tails(cell.plan) else "FedAvg"
    return min(cell.plan.lambdas, key=lambda decay: score(cell, tuning(name, "lambda", decay)))


def personal(trained: Trained, test: Population, cell: Cell, rounds: int) -> Numbers:
    """Ten epochs at the last rate on half of a client's examples, judged on the other half [PLMH23, section 7.5].

    As `fedtail.finetune`, but with many clients side by side, as a GPU wants it.
    """
    own, held = test.to("cpu").split_examples(0.5, cell.seed)
    task = replace(trained.task, module=trained.module)
    params = task.params().to(cell.device)
    learning = kernel_for(task, params.device, params.dtype, own)
    judging = evaluating_kernel(task, params.device, params.dtype, held)
    shard = Shard(own, torch.ones(len(own), dtype=torch.float64), Broadcast(0, cell.seed, params[None]), learning, params[None])
    way = trained.algorithm.members[0].local
    way = replace(way, learning_rate=way.rate(rounds - 1), schedule=fedtail.Constant(), epochs=PERSONAL_EPOCHS)
    after: list[torch.Tensor] = []
    for clients in torch.arange(len(own)).split(min(SIDE_BY_SIDE, learning.stack)):
        begin, end = int(clients[0]), int(clients[-1]) + 1
        for k, update in enumerate(way.updates(shard.clients(begin, end)), start=begin):
            after.append(client_values(judging, params + update, held.select([k]), task.all_metrics)["error"])
    before = client_values(judging, params, held, task.all_metrics)["error"]
    return {"before": percent(Distribution(before.cpu()), ("mean", "p90")),
            "after": percent(Distribution(torch.cat(after).cpu()), ("mean", "p90"))}


def chosen(results: Results, printed: str) -> Sequence[str]:
    """Notes for a page: how long was trained, and which settings were taken."""
    plan, first = results.plan, results.numbers("FedAvg", results.seeds[0])["settings"]
    rate = courses.with_edge(first["learning_rate"], plan["learning_rates"])
    tried = ", ".join(f"{rate:g} (training loss {courses.text(results.numbers(f'learning rate {rate:g}', 0)['loss'])})"
                      for rate in plan["learning_rates"])
    picked = "; ".join(f"{kind}: {', '.join(validated(results, kind).values())}" for kind in GRIDS)
    decays = f", lambda {plan['lambdas']}" if plan["lambdas"] else ""
    strengths = ", ".join(f"{results.numbers('FedProx', seed)['settings']['mu']:g}" for seed in results.seeds)
    return [f"{first['rounds']} rounds of {plan['cohort']}: each training client takes part {plan['visits']:g} times on average. "
            f"Printed are {printed}.",
            f"Learning rate {rate} for all methods, as in the paper chosen for FedAvg, here with a share "
            f"{plan['tuning_share']:g} of the visits; tried were {tried}. The paper's grid is not printed.",
            f"Grids are shorter than printed: q {plan['powers']}, tilt {plan['tilts']}, mu {plan['proximal']}{decays}. mu was "
            f"{strengths} for the seeds in turn.",
            f"Chosen on validation clients, seed by seed: {picked}."]
