"""What [PLMH22q, section 4] and [PLMH23, section 7.6] say of private quantiles, and how results decide on it."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import partial

from fedtail_studies.judging import all_of, at_most, difference, lower
from fedtail_studies.private.quantile_cells import (
    at_epsilon,
    batches,
    cases,
    near_scale,
    over_runs,
    printed_epsilons,
    widest,
    wrap_name,
)
from fedtail_studies.private.quantile_releases import KINDS, METHODS
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Finding, Verdict

FLAT, EXACT, TREE = METHODS[:3]                  # what the paper plots; the rest is ours
TEN_RUNS = math.sqrt(10)                         # both papers average ten
ROUNDING = 0.005


def _as_printed(mean: float, deviation: float, printed: float, what: str) -> Finding:
    """Whether a mean of ten runs could be what is printed: within two of its deviations, and rounding."""
    reach = 2 * deviation / TEN_RUNS + ROUNDING
    return Finding(Verdict.AGREES if abs(mean - printed) <= reach else Verdict.DISAGREES,
                   f"{what}: {mean:.3f} ± {deviation:.3f} over runs, printed {printed:g}; a mean of ten is within {reach:.3f}")


def _panel(flat: float, hierarchical: float, results: Results) -> str:
    """The case nearest to a panel: the text does not say which n and b it has."""
    place = at_epsilon(results, 1.0)

    def away(case: str) -> float:
        printed = ((FLAT, flat), (TREE, hierarchical))
        return sum(abs(over_runs(results, case, method, "worst", place)[0] - value) for method, value in printed)

    return min(cases(results), key=away)


def _panel_values(flat: float, hierarchical: float, results: Results) -> Finding:
    case, place = _panel(flat, hierarchical, results), at_epsilon(results, 1.0)
    return all_of(*(_as_printed(*over_runs(results, case, method, "worst", place), printed, f"{case}, {method}")
                    for method, printed in ((FLAT, flat), (TREE, hierarchical))))


def _below_a_hundredth(results: Results) -> Finding:
    """In whichever case it is smallest."""
    place = at_epsilon(results, 5.0)
    case = min(cases(results), key=lambda case: over_runs(results, case, FLAT, "worst", place)[0])
    smallest = over_runs(results, case, FLAT, "worst", place)[0]
    finding = at_most(smallest, 0.01, f"the smallest worst error at epsilon 5 is that of {case}")
    average = statistics.mean(batches(results, case, FLAT, "average", place))
    return finding._replace(reason=f"{finding.reason}; the average over levels is {average:.3f}")


def _beats(better: str, worse: str, epsilon: float, results: Results) -> Finding:
    place = at_epsilon(results, epsilon)
    return all_of(*(lower(difference(*(batches(results, case, method, "worst", place) for method in (better, worse))), True,
                          what=f"{case}:") for case in cases(results)))


def _alike_at_large_epsilon(results: Results) -> Finding:
    """Whether all three are within one deviation of a run of each other, wherever epsilon is 10 or more."""
    far, looked = [], list(itertools.product(cases(results), (epsilon for epsilon in results.plan["epsilons"] if epsilon >= 10)))
    for case, epsilon in looked:
        place = at_epsilon(results, epsilon)
        found = {method: over_runs(results, case, method, "worst", place) for method in (FLAT, EXACT, TREE)}
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        if found[high][0] - found[low][0] > max(found[low][1], found[high][1]):
            far.append(f"{case}, epsilon {epsilon:g}: {low} {found[low][0]:.3f}, {high} {found[high][0]:.3f}")
    return Finding(Verdict.DISAGREES if far else Verdict.AGREES, f"not so in {len(far)} of {len(looked)} cases. {'; '.join(far)}")


def _optimal_is_best(results: Results) -> Finding:
    place, findings = at_epsilon(results, 1.0), []
    for case in cases(results):
        means = {method: over_runs(results, case, method, "worst", place)[0] for method in (FLAT, EXACT, TREE)}
        best = min(means, key=means.__getitem__)
        found = difference(*(batches(results, case, method, "worst", place) for method in ("optimal", best)))
        findings.append(lower(found, True, what=f"{case}, less {best}:"))
    return all_of(*findings)


def _wrap_value(epsilon: float, printed: float, results: Results) -> Finding:
    cell = wrap_name("uniform", 64)
    place = near_scale(results, cell, epsilon)
    return _as_printed(*over_runs(results, cell, widest(results), "average", place), printed,
                       f"epsilon {printed_epsilons(results, cell)[place]:.2f}, {widest(results)}")


def _ten_bits_wrap(results: Results) -> Finding:
    """Uniform values, 64 bins: the widest ring against ten bits from epsilon 5 on; at the smallest epsilon they are the same."""
    cell, findings = wrap_name("uniform", 64), []
    for place, epsilon in enumerate(printed_epsilons(results, cell)):
        free, narrow = (batches(results, cell, name, "average", place) for name in (widest(results), "10 bits"))
        if epsilon >= 5:
            findings.append(lower(difference(free, narrow), True, what=f"epsilon {epsilon:.2f}, {widest(results)} less 10 bits:"))
        elif place == 0:
            same = narrow == free
            findings.append(Finding(Verdict.AGREES if same else Verdict.DISAGREES,
                                    f"epsilon {epsilon:.2f}: {'the same' if same else 'not the same'}"))
    return all_of(*findings)


def _more_bins_than_clients(results: Results) -> Finding:
    findings, most = [], max(results.plan["wrap_bins"])
    for kind, epsilon in itertools.product(KINDS, (2.0, 5.0)):
        pair = [batches(results, cell, widest(results), "average", near_scale(results, cell, epsilon))
                for cell in (wrap_name(kind, 64), wrap_name(kind, most))]
        findings.append(lower(difference(*pair), True, what=f"{KINDS[kind]}, epsilon near {epsilon:g}, b 64 less b {most}:"))
    return all_of(*findings)


_SHORT, _LONG = "[PLMH22q, section 4]", "[PLMH23, section 7.6]"
CLAIMS = (
    Claim("At epsilon 1 the flat histogram with an estimated count has a smaller error than the tree.", _SHORT,
          partial(_beats, FLAT, TREE, 1.0)),
    Claim("Left panel, epsilon 1: 0.03 flat, 0.09 tree.", _SHORT, partial(_panel_values, 0.03, 0.09)),
    Claim("Right panel, epsilon 1: 0.10 flat, 0.26 tree.", _SHORT, partial(_panel_values, 0.10, 0.26)),
    Claim("In the left panel the error is below 0.01 at epsilon 5.", _SHORT, _below_a_hundredth),
    Claim("From epsilon 10 on all methods are within one standard deviation of each other.", _SHORT, _alike_at_large_epsilon),
    Claim("For n = 256, b = 64 and uniform values the error of the tree is 0.14 at epsilon near 1.", _LONG,
          partial(_wrap_value, 1.0, 0.14)),
    Claim("It falls to 0.03 at epsilon near 5 at large bit widths.", _LONG, partial(_wrap_value, 5.0, 0.03)),
    Claim("At ten bits sums wrap around from epsilon 5 on.", _LONG, _ten_bits_wrap),
    Claim("The error is higher where there are more bins than clients.", _LONG, _more_bins_than_clients),
    Claim("Flat with an estimated count beats flat with the exact one at epsilon 1.", "[ours]",
          partial(_beats, FLAT, EXACT, 1.0)),
    Claim("The optimal rows beat every method of the paper at epsilon 1.", "[ours]", _optimal_is_best),
)
