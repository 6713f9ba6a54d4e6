"""What [PLMH23, section 7.7] and [PLMH22q, section 5] say of private training, and how results decide on it."""

from __future__ import annotations

import statistics
from functools import partial

from fedtail_studies.judging import Difference, all_of, difference, interval, lower, within
from fedtail_studies.private.cells import FIRST, OTHER_DELTA, THETAS, cell_name, method_name
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Finding
from fedtail_studies.tables import Printed


def gap(
    results: Results, theta: float, other: float, path: str, epsilon: float | None = FIRST, delta: float | None = None,
) -> Difference:
    """One method less another at the same budget."""
    return results.difference(cell_name(theta, epsilon, delta), cell_name(other, epsilon, delta), path)


def _tail_is_lower(theta: float, other: float, printed: float, results: Results) -> Finding:
    return lower(gap(results, theta, other, "p90"), True, Printed(printed), f"{method_name(theta)} less {method_name(other)}:")


def _at_every_budget(theta: float, results: Results, delta: float | None = None) -> Finding:
    epsilons = results.plan["other_delta_at" if delta else "epsilons"]
    return all_of(*(lower(gap(results, theta, 1.0, "p90", epsilon, delta), True, what=f"epsilon {epsilon:g}:")
                    for epsilon in epsilons))


def _at_the_other_delta(results: Results) -> Finding:
    findings = [_at_every_budget(theta, results, OTHER_DELTA) for theta in THETAS[1:]]
    return all_of(*(finding._replace(reason=f"{method_name(theta)}: {finding.reason}")
                    for theta, finding in zip(THETAS[1:], findings, strict=True)))


def _mean_is_near(results: Results) -> Finding:
    return all_of(*(within(gap(results, 0.5, 1.0, "mean", epsilon), deviation(results, cell_name(1.0, epsilon), "mean"), True,
                           f"epsilon {epsilon:g}:") for epsilon in results.plan["epsilons"]))


def deviation(results: Results, cell: str, path: str) -> float:
    values = results.values(cell, path)
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mean_is_worse(results: Results) -> Finding:
    found = difference(results.values(cell_name(1.0, FIRST), "mean"), results.values(cell_name(0.25, FIRST), "mean"))
    return lower(found, True, Printed(-0.6), "mean of FedAvg less that of Delta-FL 0.25:")


def _suffers_more(results: Results) -> Finding:
    """What the tail loses from epsilon 10 to 3: FedAvg less Delta-FL 0.5."""
    def loss(theta: float) -> list[float]:
        pairs = zip(results.values(cell_name(theta, 3.0), "p90"), results.values(cell_name(theta, 10.0), "p90"), strict=True)
        return [strict - loose for strict, loose in pairs]

    said = ", ".join(f"{method_name(theta)} {interval(loss(theta))}" for theta in THETAS)
    finding = lower(difference(loss(1.0), loss(0.5)), True, Printed(0.2 - 1.64), "loss of FedAvg less that of Delta-FL 0.5:")
    return finding._replace(reason=f"{finding.reason}. Losses: {said}")


def _near_without_noise(results: Results) -> Finding:
    found = results.difference(cell_name(0.25, FIRST), cell_name(0.25), "p90")
    return within(found, 1.0, True, "Delta-FL 0.25 at epsilon 5 less the same without noise:")


def _better_than_fedavg_without_noise(results: Results) -> Finding:
    found = results.difference(cell_name(0.25, FIRST), cell_name(1.0), "p90")
    return lower(found, True, what="Delta-FL 0.25 less FedAvg without noise:")


def _means_differ_little(results: Results) -> Finding:
    return all_of(*(within(gap(results, 0.25, 1.0, "mean", epsilon), 0.4, True, f"epsilon {epsilon:g}:")
                    for epsilon in results.plan["epsilons"]))


def _histograms_are_alike(results: Results) -> Finding:
    flat, tree = (cell_name(0.25, FIRST, None, kind) for kind in ("flat", "tree"))
    reach = max(deviation(results, name, "p90") for name in (flat, tree))
    return within(results.difference(flat, tree, "p90"), reach, True, "90th percentile, flat less tree,")


_LONG, _SHORT = "[PLMH23, section 7.7]", "[PLMH22q, section 5]"
CLAIMS = (
    Claim("At epsilon 5 the 90th percentile is 3.1 points lower for theta = 0.5 than for FedAvg.", _LONG,
          partial(_tail_is_lower, 0.5, 1.0, -3.1)),
    Claim("And 4.3 points lower for theta = 0.25.", f"{_LONG}, {_SHORT}", partial(_tail_is_lower, 0.25, 1.0, -4.3)),
    Claim("Theta = 0.25 is 1.2 points lower than 0.5.", _LONG, partial(_tail_is_lower, 0.25, 0.5, -1.2)),
    Claim("The mean at theta = 0.5 is within one standard deviation of FedAvg's, at every epsilon.", _LONG, _mean_is_near),
    Claim("At theta = 0.25 the mean is 0.6 points worse.", _LONG, _mean_is_worse),
    Claim("From epsilon 10 to 3 the tail loses more at theta = 0.5 (1.64 points) than for FedAvg (0.2).", _LONG, _suffers_more),
    Claim("The tail at theta = 0.5 is below FedAvg's at every epsilon, down to 3.", _LONG, partial(_at_every_budget, 0.5)),
    Claim("So is that at theta = 0.25.", _SHORT, partial(_at_every_budget, 0.25)),
    Claim("At epsilon 5 the private tail at theta = 0.25 is within 1 point of that without noise.", _SHORT, _near_without_noise),
    Claim("It is below the tail of FedAvg without noise.", _SHORT, _better_than_fedavg_without_noise),
    Claim("The means of private theta = 0.25 and private FedAvg differ by 0.4 points at most.", _SHORT, _means_differ_little),
    Claim("Flat and tree histograms are equal up to a standard deviation.", _SHORT, _histograms_are_alike),
    Claim("At delta = 1e-5 the tails of theta = 0.5 and 0.25 are below FedAvg's too.", "[ours]", _at_the_other_delta),
)
