"""What is said of every data set of table 4.1 in [Li23]: tables, claims and figures of q-FFL beside q = 0 and uniform weights.

The cells of such a study are objectives ("q = 0", "q = 1", "uniform"), each with statistics of `train` and `test` accuracies in
percent, `rounds`, and a `course`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.fair.printed import FULL, TITLES, Rows
from fedtail_studies.judging import all_of, at_most, interval, lower, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Figure, Finding, Verdict
from fedtail_studies.tables import Row, Table

KEPT = 2.0                                             # points of accuracy; table 4.1 itself loses 1.8 on Synthetic
COMPARABLE = 2.0                                       # times the rounds of q = 0
NEAR_BEST = 2.0                                        # points below the highest accuracy: where a run has arrived


@dataclass(frozen=True)
class Published:
    """The rows of one data set in the thesis, and which q it chose."""

    test: Rows
    train: Rows
    chosen: str                                        # "q = 1"


# tables


def accuracy_tables(results: Results, part: str, names: Sequence[str], printed: Rows, where: str, source: str,
                    more: Mapping[str, Mapping[str, Sequence[float]]] | None = None) -> list[Table]:
    """Two tables of the accuracies of devices, an objective a row: in percent, and the angle and KL divergence to equal ones.

    `more` are rows that are no cells: by name, values by statistic. The average over devices is that of table 4.7.
    """
    def row(name: str, keys: Sequence[str]) -> Row:
        """What an objective has, and what is printed of it."""
        ours = {key: (more or {})[name][key] if name in (more or {}) else results.values(name, f"{part}.{key}") for key in keys}
        return Row(name, {TITLES[key]: found for key, found in ours.items()},
                   {TITLES[key]: value for key, value in printed.get(name, {}).items()})

    percent = (*FULL[:4], *(("devices",) if part == "test" else ()))
    made = ((f"{where} accuracy over devices, %", percent, 1), (f"How uniform {where.lower()} accuracies are", FULL[4:], 3))
    return [Table(title, tuple(TITLES[key] for key in keys), tuple(row(name, keys) for name in (*names, *(more or ()))), source,
                  digits=digits, head="objective") for title, keys, digits in made]


def rounds_table(results: Results, names: Sequence[str]) -> Table:
    """How many rounds each objective was trained for, and in how many seeds the rule ended the run."""
    made = [Row(name, {"rounds": results.values(name, "rounds"),
                       "seeds that the rule ended": [float(sum(results.values(name, "stopped")))]}) for name in names]
    return Table("Rounds", ("rounds", "seeds that the rule ended"), tuple(made), digits=0, head="objective")


# claims


def raises_worst(results: Results, published: Published, part: str = "test", baseline: str = "q = 0") -> Finding:
    """Whether the chosen q has a higher accuracy of the worst 10% of devices than the baseline."""
    printed = getattr(published, part)
    said = printed[baseline]["worst"].less(printed[published.chosen]["worst"])
    return lower(results.difference(baseline, published.chosen, f"{part}.worst"), results.papers_data, said,
                 f"{part}, worst 10%, {baseline} less {published.chosen},")


def lowers(results: Results, published: Published, keys: Sequence[str], part: str = "test", baseline: str = "q = 0") -> Finding:
    """Whether the chosen q has smaller measures of spread over devices than the baseline."""
    printed = getattr(published, part)
    return all_of(*(lower(results.difference(published.chosen, baseline, f"{part}.{key}"), results.papers_data,
                          printed[published.chosen][key].less(printed[baseline][key]),
                          f"{part}, {TITLES[key]}, {published.chosen} less {baseline},") for key in keys))


def keeps(results: Results, published: Published, key: str) -> Finding:
    """Whether the average test accuracy of the chosen q is at most `KEPT` points below that of q = 0."""
    return not_above(results.difference("q = 0", published.chosen, f"test.{key}"), KEPT, results.papers_data,
                     f"{TITLES[key]}, q = 0 less {published.chosen},")


def arrival(results: Results, name: str, seed: int) -> float:
    """The first round after which the test accuracy is within `NEAR_BEST` points of the highest that the run has."""
    course = results.numbers(name, seed)["course"]
    accuracy = np.asarray(course["average"])
    return float(course["round"][int(np.argmax(accuracy >= accuracy.max() - NEAR_BEST))])


def comparable_speed(results: Results, published: Published) -> Finding:
    """Whether the chosen q arrives at its own highest accuracy in at most `COMPARABLE` times the rounds of q = 0."""
    ratios = [arrival(results, published.chosen, seed) / arrival(results, "q = 0", seed) for seed in results.seeds]
    return not_above(interval(ratios), COMPARABLE, results.papers_data,
                     f"rounds until the accuracy is within {NEAR_BEST:g} points of its highest, {published.chosen} over q = 0,")


def row_is_a_draw(results: Results, published: Published, name: str, part: str, keys: Sequence[str]) -> Finding:
    """Whether a printed row, which is of one draw of the devices, is within two deviations over draws of our mean."""
    if len(results.seeds) < 2:
        return Finding(Verdict.NOT_TESTABLE, "one draw has no deviation")
    findings = []
    for key in keys:
        printed, found = getattr(published, part)[name][key], results.values(name, f"{part}.{key}")
        mean, spread = statistics.mean(found), max(statistics.stdev(found), 1e-9)
        what = f"{part}, {TITLES[key]}, {mean:.1f} ± {spread:.1f} over draws, printed {printed.mean:g}, apart in these deviations"
        findings.append(at_most(abs(mean - printed.mean) / spread, 2.0, what))
    return all_of(*findings)


def common_claims(published: Published, uniform: bool = True) -> tuple[Claim, ...]:
    """The claims of sections 4.3.2, 4.3.3 and 4.7 that are made of each data set."""
    q = published.chosen
    made = [
        Claim(f"{q} raises the test accuracy of the worst 10% of devices over q = 0.", "[Li23, table 4.1]",
              lambda results: raises_worst(results, published)),
        Claim(f"{q} has a smaller variance of test accuracies than q = 0.", "[Li23, table 4.1]",
              lambda results: lowers(results, published, ("variance",))),
        Claim(f"{q} is also more uniform by the angle and by the KL divergence.", "[Li23, table 4.5]",
              lambda results: lowers(results, published, ("angle", "kl"))),
        Claim(f"The average test accuracy with {q} stays as it is with q = 0, to {KEPT:g} points.", "[Li23, table 4.1]",
              lambda results: keeps(results, published, "average")),
        Claim(f"So does the average over devices, to {KEPT:g} points.", "[Li23, table 4.7]",
              lambda results: keeps(results, published, "devices")),
        Claim(f"Training accuracies too have a smaller variance and a higher worst 10% with {q}.", "[Li23, table 4.6]",
              lambda results: all_of(lowers(results, published, ("variance",), "train"),
                                     raises_worst(results, published, "train"))),
        Claim(f"{q} does not need many more rounds than q = 0: at most twice as many.", "[Li23, figure 4.8]",
              lambda results: comparable_speed(results, published))]
    if uniform:
        made.append(Claim(f"{q} has a smaller variance of test accuracies than uniform weights.", "[Li23, table 4.9]",
                          lambda results: lowers(results, published, ("variance",), baseline="uniform")))
    return tuple(made)


# figures


def curve(results: Results, name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies of devices in increasing order, mean over seeds, beside the share of devices in percent."""
    found = np.mean(np.sort(np.asarray(results.lists(name, f"{part}.sorted")), axis=1), axis=0)
    return 100 * (np.arange(len(found)) + 0.5) / len(found), found


def draw_distributions(results: Results, path: Path, names: Sequence[str]) -> Figure:
    """Accuracies of devices in increasing order, training beside test: figures 4.2, 4.3, 4.6 and 4.7."""
    with drawn(path, columns=2) as axes:
        for axis, (part, title) in zip(axes, (("test", "test accuracy"), ("train", "training accuracy")), strict=True):
            for name, colour in zip(names, COLOURS, strict=False):
                axis.plot(*curve(results, name, part), color=colour, label=name)
            axis.set(xlabel="devices, the worst first, %", ylabel=f"{title}, %, mean over seeds", ylim=(-3, 103))
            axis.legend()
    return Figure(path.name, "Accuracies of the devices in increasing order, as figures 4.2 and 4.3 (test), 4.6 and 4.7 "
                             "(training) have them as densities. A flat line is fair.")


def draw_course(results: Results, path: Path, names: Sequence[str]) -> Figure:
    """Average test accuracy and its variance over devices by round: figure 4.8, mean over the seeds that are still running."""
    with drawn(path, columns=2) as axes:
        for name, colour in zip(names, COLOURS, strict=False):
            for axis, key in zip(axes, ("average", "variance"), strict=True):
                rounds, found = mean_course(results, name, key)
                axis.plot(rounds, found, color=colour, label=name)
        axes[0].set(xlabel="rounds", ylabel="test accuracy, %")
        axes[1].set(xlabel="rounds", ylabel="variance of test accuracies over devices")
        axes[0].legend()
    return Figure(path.name, "Test accuracy, and its variance over devices, round by round, as figure 4.8: mean over the seeds "
                             "that have not stopped.")


def mean_course(results: Results, name: str, key: str) -> tuple[list[float], list[float]]:
    """Rounds that were read, and the mean of what was read over the seeds that got so far."""
    by_round: dict[float, list[float]] = {}
    for seed in results.seeds:
        course = results.numbers(name, seed)["course"]
        for at, value in zip(course["round"], course[key], strict=True):
            by_round.setdefault(at, []).append(value)
    return list(by_round), [float(np.mean(values)) for values in by_round.values()]
