"""How results decide on what chapter 3 says of stragglers and of the proximal term."""

from __future__ import annotations

from collections.abc import Sequence

from fedtail_studies.judging import all_of, lower, within
from fedtail_studies.prox.methods import BEST, DROPS, KEEPS, LEVELS, run_name
from fedtail_studies.results import Results
from fedtail_studies.study import Finding

WORDS = {"loss": "loss", "rough": "mean rise of the loss", "early": "loss of the first half", "accuracy": "accuracy",
         "variance": "gradient variance"}


def smaller(results: Results, first: str, second: str, path: str) -> Finding:
    """Whether a number of one run is below that of another."""
    return lower(results.difference(first, second, path), results.papers_data, what=f"{WORDS[path]}, {versus(first, second)},")


def versus(first: str, second: str) -> str:
    """Two runs of a difference; what is the same of their names is said once.

    >>> versus("MNIST: FedProx, mu 0, 90% stragglers", "MNIST: FedAvg, 90% stragglers"), versus("IID: mu 0", "(1,1): mu 0")
    ('MNIST, 90% stragglers: FedProx, mu 0 less FedAvg', 'IID: mu 0 less (1,1): mu 0')
    """
    (where, one), (also, two) = (name.split(": ", 1) for name in (first, second))
    if where != also:
        return f"{first} less {second}"
    ones, twos = one.split(", "), two.split(", ")
    same = 0
    while same < min(len(ones), len(twos)) - 1 and ones[-1 - same] == twos[-1 - same]:
        same += 1
    kept = [where, *ones[len(ones) - same :]]
    return f"{', '.join(kept)}: {', '.join(ones[: len(ones) - same])} less {', '.join(twos[: len(twos) - same])}"


def larger_accuracy(results: Results, first: str, second: str) -> Finding:
    """Whether the accuracy of one run is above that of another, in points."""
    return lower(results.difference(second, first, "accuracy"), results.papers_data,
                 what=f"points of accuracy, {versus(second, first)},")


def worse_with_stragglers(results: Results, where: str, low: float, high: float, epochs: int = 20) -> Finding:
    """FedAvg ends with a larger loss when it drops a share `high` of stragglers than with a share `low`."""
    return smaller(results, run_name(where, DROPS, low, epochs), run_name(where, DROPS, high, epochs), "loss")


def keeping_helps(results: Results, where: str, path: str, level: float, epochs: int = 20) -> Finding:
    """With mu = 0, keeping the partial work of stragglers gives a smaller number than dropping them."""
    return smaller(results, run_name(where, KEEPS, level, epochs), run_name(where, DROPS, level, epochs), path)


def penalty_helps(results: Results, where: str, path: str, levels: Sequence[float] = LEVELS) -> Finding:
    """The best mu gives a smaller number than mu = 0, at all these shares of stragglers."""
    return all_of(*(smaller(results, run_name(where, BEST, level), run_name(where, KEEPS, level), path) for level in levels))


def penalty_is_more_accurate(results: Results, where: str, level: float = 0.9) -> Finding:
    """FedProx with the best mu is more accurate than FedAvg, which drops the stragglers."""
    return larger_accuracy(results, run_name(where, BEST, level), run_name(where, DROPS, level))


def dropping_changes_little(results: Results, where: str, level: float, reach: float) -> Finding:
    """FedAvg that drops stragglers and FedAvg without stragglers have accuracies within `reach` points of each other."""
    return within(results.difference(run_name(where, DROPS, level), run_name(where, DROPS, 0.0), "accuracy"), reach,
                  results.papers_data, f"points of accuracy, {where}, FedAvg with {level:.0%} stragglers less without,")


def keeping_changes_little(results: Results, where: str, level: float, reach: float) -> Finding:
    """Keeping the work of stragglers and dropping it give accuracies within `reach` points of each other."""
    return within(results.difference(run_name(where, KEEPS, level), run_name(where, DROPS, level), "accuracy"), reach,
                  results.papers_data, f"points of accuracy, {where}, {level:.0%} stragglers, keeping less dropping,")
