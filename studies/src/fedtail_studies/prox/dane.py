"""FedDane against FedProx on four synthetic sets: figure 3.4 of [Li23]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fedtail
from fedtail_studies.judging import all_of, within
from fedtail_studies.prox import claims
from fedtail_studies.prox.courses import followed
from fedtail_studies.prox.methods import local_settings
from fedtail_studies.prox.networks import BEST, SETS, Network, synthetic_network
from fedtail_studies.prox.pages import HOW, Panels, caption, course_grid, course_table, diverged
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Table

IID, *MIXED = SETS
PROX, FEW, ALL = "FedProx, 10 devices", "FedDane, 10 devices", "FedDane, all 30 devices"
METHODS = (PROX, FEW, ALL)
NEAR = 0.1                                       # of the loss: "similarly"


@dataclass(frozen=True)
class Plan:
    """Printed are 10 of 30 devices and larger samples; rounds, mu and the sizes of devices are not."""

    seeds: int = 5
    rounds: int = 30
    devices: int = 30
    cohort: int = 10
    epochs: int = 20
    most: int = 500                              # samples of a device, at most
    strength: float = BEST                       # mu of both methods


def run(where: str, method: str) -> str:
    """How a run is called."""
    return f"{where}: {method}"


def algorithm(network: Network, method: str, plan: Plan) -> fedtail.FederatedAlgorithm:
    """FedProx with ten devices; FedDane with ten that train and ten others that give the gradient, or with all doing both."""
    local = local_settings(network, plan.epochs)
    del local["penalty"]
    if method == PROX:
        return fedtail.fedprox(plan.strength, plan.cohort, **local)
    if method == FEW:
        return fedtail.feddane(plan.strength, 2 * plan.cohort, plan.cohort, **local)
    return fedtail.feddane(plan.strength, plan.devices, **local)


def measured(cell: Cell, where: str, method: str) -> Numbers:
    """One method on one set."""
    network = synthetic_network(cell, where)
    return followed(cell, algorithm(network, method, cell.plan), network, cell.plan.rounds)


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """All methods on all sets."""
    return {run(where, method): partial(measured, where=where, method=method) for where in SETS for method in METHODS}


def tables(results: Results) -> list[Table]:
    """What each run ends with, set by set."""
    return [course_table(results, where, [run(where, method) for method in METHODS]) for where in SETS]


def drawn(results: Results, folder: Path) -> Sequence[Figure]:
    """Loss against rounds, set by set."""
    panels = [(where, {name: run(where, name) for name in METHODS}) for where in SETS]
    course_grid(results, folder / "dane.png", [Panels("course.loss", "training loss", panels)], log=True)
    return [Figure("dane.png", caption("Training loss on a logarithmic scale", "figure 3.4"))]


def alike_on_iid(results: Results) -> Finding:
    """On identically distributed data both end with about the same loss."""
    return within(results.difference(run(IID, FEW), run(IID, PROX), "loss"), NEAR, results.papers_data,
                  "loss on Synthetic-IID, FedDane less FedProx,")


def worse(results: Results, method: str, path: str) -> Finding:
    """FedDane has a larger number than FedProx with ten devices on all heterogeneous sets; with how often it diverged."""
    found = all_of(*(claims.smaller(results, run(where, PROX), run(where, method), path) for where in MIXED))
    apart = ", ".join(f"{where} {diverged(results, run(where, method))}" for where in MIXED)
    return found._replace(reason=f"{found.reason}; seeds of {len(results.seeds)} that diverge by the thesis's rule: {apart}")


def more_devices_help(results: Results) -> Finding:
    """FedDane with all devices ends with a smaller loss than with ten, on the heterogeneous sets."""
    return all_of(*(claims.smaller(results, run(where, ALL), run(where, FEW), "loss") for where in MIXED))


def notes(results: Results) -> Sequence[str]:
    """What was chosen and reduced."""
    plan = results.plan
    return [HOW,
            f"{plan['rounds']} rounds, {plan['epochs']} epochs, mu = {plan['strength']:g} for both: the thesis does not say "
            "which mu figure 3.4 has. Sizes of devices are 50 and a lognormal number with parameters 4 and 2, cut at "
            f"{plan['most']} samples.",
            "The thesis gives no formula for FedDane: here a device minimises its loss plus the inner product of the model with "
            "the mean gradient of other devices less its own, plus FedProx's penalty. With ten devices, ten train and ten "
            "others give the gradient (the thesis: two independent samples, which may overlap); with thirty all do both, and "
            "the gradient is exact.",
            "Claims were split by share of stragglers, by measure (loss or stability) and by data set after first results, and a "
            "few were added; intervals do not account for it."]


PROX_DANE = Study(
    name="prox_dane", paper="Li23", item="figure 3.4", title="FedDane against FedProx", cost=Cost(30, 4), full=Plan(),
    quick=Plan(seeds=2, rounds=15, most=80), cells=cells, tables=tables, figures=drawn, notes=notes,
    claims=(
        Claim("FedDane performs like FedProx on identically distributed data.", "[Li23, figure 3.4]", alike_on_iid),
        Claim("With ten devices of thirty FedDane ends with a larger loss than FedProx on heterogeneous data.",
              "[Li23, figure 3.4]", partial(worse, method=FEW, path="loss")),
        Claim("With ten devices of thirty FedDane is less stable than FedProx on heterogeneous data.", "[Li23, figure 3.4]",
              partial(worse, method=FEW, path="rough")),
        Claim("Sampling more devices helps FedDane to some extent.", "[Li23, figure 3.4]", more_devices_help),
        Claim("With all devices FedDane still ends with a larger loss than FedProx with ten on heterogeneous data.",
              "[Li23, figure 3.4]", partial(worse, method=ALL, path="loss")),
        Claim("With all devices FedDane is still less stable than FedProx with ten on heterogeneous data.", "[Li23, figure 3.4]",
              partial(worse, method=ALL, path="rough")),
    ),
)
