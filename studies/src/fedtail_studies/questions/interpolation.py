"""theta goes from FedAvg (theta = 1) to the worst client (theta towards 0) [PLMH23, section 7.3].

On the generated clients of appendix D.2, where the limits are at hand: theta = 1 must be FedAvg, theta m <= 1 the largest loss of
the cohort. The paper's stand-in for AFL, q-FFL with q = 10, is beside them.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

import fedtail
from fedtail_studies.compared.methods import quiet_about_small_tails
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, at_most, lower
from fedtail_studies.questions import settings
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Numbers, Study
from fedtail_studies.tables import Row, Table

TAIL_FRACTIONS = (1.0, 0.8, 0.5, 0.25, 0.1, 0.05, 0.01)
ENDS = ("FedAvg", "worst client")
AFL = "AFL, as q-FFL 10"


def name(theta: float) -> str:
    return f"theta {theta:g}"


def measured(cell: Cell, method: str | float) -> Numbers:
    """Train, look at the test clients; how far the model is from those at the two ends."""
    where = settings.generated_clients(cell)
    base = fedtail.fedavg(where.cohort, **where.local)
    special = {"FedAvg": base, "worst client": fedtail.delta_fl(1 / (2 * where.cohort), where.cohort, **where.local),
               AFL: fedtail.q_ffl(10.0, where.cohort, **where.local)}
    algorithm = special[method] if isinstance(method, str) else fedtail.delta_fl(method, where.cohort, **where.local)
    with quiet_about_small_tails():
        trained = cell.train(algorithm, where.task, where.train, where.rounds)
    params = trained.state.params.double()
    found = {"test": settings.percent(fedtail.evaluate(trained, where.test, engine=fedtail.Engine(device=cell.device)).error)}
    if method in ENDS:
        return {**found, "params": params.tolist()}
    return {**found, "distance": {end: _distance(params, cell.numbers(end)["params"]) for end in ENDS}}


def _distance(params: torch.Tensor, other: list[float]) -> float:
    return float((params.cpu() - torch.tensor(other, dtype=torch.float64)).norm())


def cells(plan: settings.Plan, seed: int) -> dict:
    methods: tuple[str | float, ...] = (*ENDS, *TAIL_FRACTIONS, AFL)
    return {m if isinstance(m, str) else name(m): partial(measured, method=m) for m in methods}


def tables(results: Results) -> list[Table]:
    def row(method: str) -> Row:
        ours = {settings.TITLES[s]: results.values(method, f"test.{s}") for s in settings.STATISTICS}
        if method not in ENDS:
            ours |= {f"distance to {end}": results.values(method, f"distance.{end}") for end in ENDS}
        return Row(method, ours)
    order = ("FedAvg", *map(name, TAIL_FRACTIONS), "worst client", AFL)
    return [Table("Error of test clients, %, and how far the parameters are from those at the ends",
                  (*settings.TITLES.values(), *(f"distance to {end}" for end in ENDS)), tuple(row(m) for m in order), digits=3)]


def _is(results: Results, theta: float, end: str) -> Finding:
    return at_most(max(results.values(name(theta), f"distance.{end}")), 1e-3, f"theta {theta:g}, distance to {end}")


def _leaves_fedavg(results: Results) -> Finding:
    """Each smaller theta is farther from FedAvg and nearer to the worst client."""
    findings = []
    for larger, smaller in pairwise(TAIL_FRACTIONS[1:-1]):
        away = results.difference(name(larger), name(smaller), "distance.FedAvg")
        near = results.difference(name(smaller), name(larger), "distance.worst client")
        findings += [lower(away, True, what=f"distance to FedAvg, theta {larger:g} less {smaller:g},"),
                     lower(near, True, what=f"to the worst client, theta {smaller:g} less {larger:g},")]
    return all_of(*findings)


def _tail_falls(results: Results, down_to: float) -> Finding:
    return all_of(*(lower(results.difference(name(b), name(a), "test.worst10"), True, what=f"worst 10%, theta {b:g} less {a:g},")
                    for a, b in pairwise(TAIL_FRACTIONS) if b >= down_to))


def _mean_rises(results: Results) -> Finding:
    return all_of(*(lower(results.difference(name(a), name(b), "test.mean"), True, what=f"mean, theta {a:g} less {b:g},")
                    for a, b in ((1.0, 0.1), (0.1, 0.01))))


def figures(results: Results, folder: Path) -> list[Figure]:
    with drawn(folder / "interpolation.png") as axis:
        for statistic, colour in zip(settings.STATISTICS, COLOURS, strict=False):
            means = [results.mean(name(theta), f"test.{statistic}") for theta in TAIL_FRACTIONS]
            axis.semilogx(TAIL_FRACTIONS, means, "o-", color=colour, label=settings.TITLES[statistic])
            for end, place in (("FedAvg", 1.25), ("worst client", 0.008), (AFL, 0.0065)):
                value = results.mean(end, f"test.{statistic}")
                if math.isfinite(value):
                    axis.plot(place, value, marker="*" if end == AFL else "D", color=colour, markersize=8 if end == AFL else 5)
        axis.invert_xaxis()
        axis.set(xlabel="θ (diamonds: FedAvg and worst client; stars: q-FFL, q = 10)", ylabel="error of test clients, %")
        axis.legend()
    return [Figure("interpolation.png", "Error over test clients as theta falls from FedAvg to the worst client of a cohort.")]


INTERPOLATION = Study(
    name="interpolation", paper="PLMH23", item="section 7.3, theta between FedAvg and AFL",
    title="theta between FedAvg and the worst client", cost=Cost(1000, 5), full=settings.GENERATED,
    quick=settings.GENERATED_QUICK, cells=cells, tables=tables, figures=figures,
    claims=(
        Claim("theta = 1 is FedAvg.", "[PLMH23, section 4.1]", partial(_is, theta=1.0, end="FedAvg")),
        Claim("theta towards 0 is the worst client.", "[PLMH23, section 4.1]",
              partial(_is, theta=TAIL_FRACTIONS[-1], end="worst client")),
        Claim("In between, each smaller theta is farther from FedAvg and nearer to the worst client.", "[PLMH23, section 7.3]",
              _leaves_fedavg),
        Claim("The tail error falls with theta down to 0.5.", "[PLMH23, section 7.3]", partial(_tail_falls, down_to=0.5)),
        Claim("It goes on falling down to 0.25.", "[PLMH23, section 7.7, theta = 0.25]", partial(_tail_falls, down_to=0.25)),
        Claim("The mean pays for it at small theta.", "[PLMH23, section 7.3]", _mean_rises),
    ),
)
