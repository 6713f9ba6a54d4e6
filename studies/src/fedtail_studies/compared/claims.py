"""What [PLMH23, sections 7.3 to 7.5 and C.4] says of its comparison, decided by the results of one."""

from __future__ import annotations

import statistics
from itertools import pairwise

import numpy as np

from fedtail_studies.compared.courses import counts
from fedtail_studies.compared.methods import tails
from fedtail_studies.compared.printed import PrintedTable, less
from fedtail_studies.compared.rows import COLUMNS, afl, at, rows
from fedtail_studies.judging import all_of, difference, lower, not_above, within
from fedtail_studies.results import Results
from fedtail_studies.study import Finding, Verdict

BOTH = (("test.mean", "mean"), ("test.p90", "90th percentile"))
HALF = "Delta-FL 0.5"
STEADY = 0.5                                     # change of a count, as a share of its mean, that is still called stable


def p90_falls(results: Results, method: str, printed: PrintedTable) -> Finding:
    return lower(results.difference(method, "FedAvg", "test.p90"), results.papers_data, less(printed, method, "FedAvg", "p90"),
                 f"90th percentile, {method} less FedAvg,")


def smallest_p90(results: Results) -> Finding:
    """The best theta against the best of the others, all as the table has them."""
    values = {row.name: row.ours["90th percentile"] for row in rows(results, COLUMNS)}
    ours = {name: statistics.mean(found) for name, found in values.items() if name.startswith("Delta-FL")}
    others = {name: statistics.mean(found) for name, found in values.items() if name not in ours}
    best, rival = min(ours, key=lambda name: ours[name]), min(others, key=lambda name: others[name])
    return lower(difference(values[best], values[rival]), results.papers_data, None,
                 f"{best} has {ours[best]:.2f}, {rival} {others[rival]:.2f}; difference")


def mean_stays_close(results: Results) -> Finding:
    """The change of the mean and that of the 90th percentile, added up, are below zero."""
    mean, tail = (results.difference(HALF, "FedAvg", path) for path, _ in BOTH)

    def total(name: str) -> list[float]:
        return [a + b for a, b in zip(results.values(name, "test.mean"), results.values(name, "test.p90"), strict=True)]
    return lower(difference(total(HALF), total("FedAvg")), results.papers_data, None,
                 f"theta 0.5 less FedAvg: mean {mean.mean:+.2f}, 90th percentile {tail.mean:+.2f}, their sum")


def small_theta_loses(results: Results, printed: PrintedTable) -> Finding:
    return all_of(*(lower(results.difference(HALF, "Delta-FL 0.1", path), results.papers_data,
                          less(printed, HALF, "Delta-FL 0.1", path.removeprefix("test.")), f"{what}, theta 0.5 less theta 0.1,")
                    for path, what in BOTH))


def afl_is_last(results: Results) -> Finding:
    """Every other row is below it: the nearest one decides."""
    findings = []
    for path, what in BOTH:
        others = {row.name: row.ours[what] for row in rows(results, COLUMNS) if not row.name.startswith("AFL")}
        nearest = max(others, key=lambda name: statistics.mean(others[name]))
        found = difference(others[nearest], results.values(afl(results), path))
        findings.append(lower(found, results.papers_data, None, f"{what}, {nearest} (the next highest) less AFL,"))
    return all_of(*findings)


def between_fedavg_and_afl(results: Results) -> Finding:
    """In table 6 the 10th percentile rises all the way from FedAvg over theta 0.8, 0.5, 0.1 to AFL."""
    order = ["FedAvg", *tails(results.plan), afl(results)]
    return all_of(*(lower(results.difference(a, b, "test.p10"), results.papers_data, None, f"10th percentile, {a} less {b},")
                    for a, b in pairwise(order)))


def thinner_tail(results: Results) -> Finding:
    return all_of(*(lower(results.difference(HALF, "FedAvg", path), results.papers_data, None, f"{what}, theta 0.5 less FedAvg,")
                    for path, what in (("test.std", "deviation over clients"), ("test.worst10", "worst 10%"))))


def loss_tail_falls(results: Results) -> Finding:
    return lower(results.difference(HALF, "FedAvg", "train.p90"), results.papers_data, None,
                 "90th percentile of the training loss, theta 0.5 less FedAvg,")


def poor_gain_most(results: Results) -> Finding:
    """The gain of theta = 0.5 over FedAvg on clients with few images, less that on the others."""
    def gain(group: str) -> list[float]:
        return [at(results, HALF, seed, f"{group}.mean") - at(results, "FedAvg", seed, f"{group}.mean") for seed in results.seeds]
    poor, rich = gain("poor"), gain("rich")
    return lower(difference(poor, rich), results.papers_data, None,
                 f"theta 0.5 less FedAvg: {statistics.fmean(poor):+.2f} on data-poor clients, "
                 f"{statistics.fmean(rich):+.2f} on the others; difference")


def poor_vary_less(results: Results) -> Finding:
    return lower(results.difference(HALF, "FedAvg", "poor.std"), results.papers_data, None,
                 "deviation over data-poor clients, theta 0.5 less FedAvg,")


def close_after_personalisation(results: Results) -> Finding:
    """Within FedAvg's own deviation over seeds; the printed claim is about the ConvNet, so a direction at most."""
    before, after = (results.difference(HALF, "FedAvg", f"personal.{when}.p90") for when in ("before", "after"))
    values = results.values("FedAvg", "personal.after.p90")
    if len(values) < 2:
        return Finding(Verdict.NOT_TESTABLE, "one seed has no deviation to be within")
    found = within(after, statistics.stdev(values), False, "90th percentile after, theta 0.5 less FedAvg,")
    return found._replace(reason=f"{found.reason}, FedAvg's deviation over seeds; before {before.mean:+.2f}")


def loss_varies_less(results: Results) -> Finding:
    return lower(results.difference(HALF, "FedAvg", "train.std"), results.papers_data, None,
                 "deviation of the training loss over clients, theta 0.5 less FedAvg,")


def as_fast(results: Results, reach: float) -> Finding:
    """The 90th percentile of the error, averaged over the second half of the rounds: not higher by more than `reach`."""
    def average(name: str) -> list[float]:
        return [float(np.mean(course[len(course) // 2 :])) for course in results.lists(name, "course.error_p90")]

    what = "90th percentile over the second half of the rounds"
    return all_of(*(not_above(difference(average(f"Delta-FL {theta}"), average("FedAvg")), reach, results.papers_data,
                              f"{what}, theta {theta} less FedAvg,")
                    for theta in ("0.8", "0.5")))


def stable_count(results: Results) -> Finding:
    """How much the number of clients that count changes from a look to the next, as a share of its mean."""
    reasons, worst = [], 0.0
    for theta in results.plan["tail_fractions"]:
        mean, low, high = counts(results, f"Delta-FL {theta:g}")
        reasons.append(f"theta {theta:g}: {mean.mean():.1f}, from {low.min():.0f} to {high.max():.0f}")
        worst = max(worst, float(np.ptp(mean.mean(0)) / mean.mean()))
    reasons.append(f"averages between two looks change by {worst:.0%} at most")
    return Finding(Verdict.AGREES if worst <= STEADY else Verdict.DISAGREES, "clients that count, " + "; ".join(reasons))
