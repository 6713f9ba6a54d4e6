"""Tables, claims and figures of the two solvers for Ditto: figures 5.6 to 5.8 and table 5.10 of [Li23].

Cells are those of `solvers`: of every column, by stop, the accuracies of benign devices with each method.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedtail_studies.ditto.attacked import ditto_name
from fedtail_studies.ditto.devices import FEMNIST, HIDDEN, SIDE
from fedtail_studies.ditto.printed import SKEWED
from fedtail_studies.ditto.solvers import ATTACKED, CLEAN, PLAIN, PULLED, SolverPlan, cells, pulled_name
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import difference, lower, not_above
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Cost, Figure, Finding, Study
from fedtail_studies.tables import Printed, Row, Table

AS_GOOD = 1.0                                          # points of accuracy
STOPS = {"training loss": ("loss", min), "validation accuracy": ("validation", max)}      # what a server could stop by


def at_stop(results: Results, column: str, name: str, stop: int | None = None) -> list[float]:
    """A test accuracy at a stop, by default the last, for each seed: global, a personal model, or a way of fine-tuning."""
    found = [results.numbers(column, seed)[str(stop or max(results.plan["stops"]))] for seed in results.seeds]
    return [one["global"] if name == "global" else {**one["joint"], **one["tuned"]}[name] for one in found]


def accuracies(results: Results, column: str, name: str) -> list[float]:
    """The test accuracy of a method of table 5.10 in the last round, for each seed."""
    return results.values(f"{column}: {name}", "test") if name in ("median", "clipping") else at_stop(results, column, name)


def best_epochs(results: Results, stop: int | None = None) -> list[float]:
    """Fine-tuning on Ditto's objective with the number of epochs that is best for benign devices, as the thesis picks it."""
    found = [at_stop(results, ATTACKED, pulled_name(one), stop) for one in results.plan["epochs"]]
    return [max(each) for each in zip(*found, strict=True)]


def best_stops(results: Results) -> list[float]:
    """Fine-tuning from the stop that is best for benign devices in the mean over the other seeds, for each seed.

    A stop that were chosen by the accuracy it is then reported with could not be worse than any other. One seed alone has no
    others, and takes its own.
    """
    found = [best_epochs(results, stop) for stop in results.plan["stops"]]
    made = []
    for place in range(len(results.seeds)):
        others = [k for k in range(len(results.seeds)) if k != place] or [place]
        means = [statistics.fmean(one[k] for k in others) for one in found]
        made.append(found[means.index(max(means))][place])
    return made


def chosen_stops(results: Results, by: str) -> list[float]:
    """Fine-tuning from the stop that a server would choose by what it sees of all devices, for each seed."""
    key, best = STOPS[by]
    made = []
    for place, seed in enumerate(results.seeds):
        found = results.numbers(ATTACKED, seed)
        stop = best(results.plan["stops"], key=lambda one: found[str(one)][key])
        made.append(best_epochs(results, stop)[place])
    return made


def tables(results: Results) -> list[Table]:
    """Rows of table 5.10, as printed too, and both solvers by stop."""
    plan, columns = results.plan, tuple(results.plan["columns"])
    names = ["global", "local", "median", "clipping", PLAIN, *map(ditto_name, plan["strengths"])]
    rows = [Row(name, {column: accuracies(results, column, name) for column in columns}) for name in names]
    theirs = [Row(name, {column: [SKEWED[name][column].mean] for column in columns if column in SKEWED[name]}) for name in names
              if name in SKEWED]
    by_stop = [Row(str(stop), {"global": at_stop(results, ATTACKED, "global", stop),
                               "Ditto, joint": at_stop(results, ATTACKED, ditto_name(plan["pull"]), stop),
                               PULLED: best_epochs(results, stop), PLAIN: at_stop(results, ATTACKED, PLAIN, stop),
                               **{by: [results.numbers(ATTACKED, seed)[str(stop)][key] for seed in results.seeds]
                                  for by, (key, _) in STOPS.items()}}) for stop in plan["stops"]]
    title = "Test accuracy of benign devices, %"
    return [Table(title, columns, tuple(rows), digits=1),
            Table(f"{title}, as printed", columns, tuple(theirs), "[Li23, table 5.10]", digits=1),
            Table(f"Both solvers under {ATTACKED}, by the round at which the shared model stops", tuple(by_stop[0].ours),
                  tuple(by_stop), digits=2, head="round")]


def is_below(results: Results, column: str, method: str, other: str) -> Finding:
    """Whether a method is less accurate than another in a column."""
    printed = [SKEWED.get(name, {}).get(column) for name in (method, other)]
    said = None if printed[0] is None or printed[1] is None else Printed(printed[0].mean - printed[1].mean)
    found = difference(accuracies(results, column, method), accuracies(results, column, other))
    return lower(found, results.papers_data, said, f"accuracy, {column}, {method} less {other},")


def below(text: str, source: str, method: str, other: str, column: str) -> Claim:
    """The claim that a method is less accurate than another in a column."""
    return Claim(text, source, partial(is_below, column=column, method=method, other=other))


def median_fails(results: Results) -> Finding:
    """Whether the median has at most half of the global model's accuracy without attacks."""
    half = [one / 2 for one in accuracies(results, CLEAN, "global")]
    return not_above(difference(accuracies(results, CLEAN, "median"), half), 0.0, results.papers_data,
                     "accuracy, clean, median less half of global,")


def joint_wins(results: Results) -> Finding:
    """Whether joint training is above fine-tuning from the last shared model."""
    joint = at_stop(results, ATTACKED, ditto_name(results.plan["pull"]))
    return lower(difference(best_epochs(results), joint), results.papers_data, what="accuracy, fine-tuning less joint,")


def tuning_helps(results: Results) -> Finding:
    """Whether fine-tuning on Ditto's objective is above the shared model it starts from."""
    return lower(difference(at_stop(results, ATTACKED, "global"), best_epochs(results)), results.papers_data,
                 what="accuracy, global less fine-tuning,")


def early_stop_is_as_good(results: Results) -> Finding:
    """Whether fine-tuning from the best early stop is as good as joint training, to `AS_GOOD` points."""
    joint = at_stop(results, ATTACKED, ditto_name(results.plan["pull"]))
    return not_above(difference(joint, best_stops(results)), AS_GOOD, results.papers_data, "accuracy, joint less best stop,")


def late_is_worse(results: Results) -> Finding:
    """Whether fine-tuning from the last round is below fine-tuning from the best stop."""
    return lower(difference(best_epochs(results), best_stops(results)), results.papers_data,
                 what="accuracy, last round less best stop,")


def stop_is_hidden(results: Results, by: str) -> Finding:
    """Whether the stop that is chosen by what is seen of all devices is below the best one."""
    return lower(difference(chosen_stops(results, by), best_stops(results)), results.papers_data,
                 what=f"accuracy, stop by {by} less best stop,")


def figures(results: Results, folder: Path) -> list[Figure]:
    """Accuracy by stop (figures 5.6 and 5.7), and what a server sees (figure 5.8)."""
    stops = results.plan["stops"]
    lines = {"global": [at_stop(results, ATTACKED, "global", stop) for stop in stops],
             "Ditto, joint": [at_stop(results, ATTACKED, ditto_name(results.plan["pull"]), stop) for stop in stops],
             "stop, then fine-tune": [best_epochs(results, stop) for stop in stops]}
    with drawn(folder / "stops.png", columns=3, width=4.2) as axes:
        for (name, found), colour in zip(lines.items(), COLOURS, strict=False):
            axes[0].plot(stops, [statistics.fmean(one) for one in found], "o-", color=colour, label=name)
        axes[0].set(xlabel="rounds", ylabel="test accuracy of benign devices, %")
        axes[0].legend()
        for axis, (by, (key, _)) in zip(axes[1:], STOPS.items(), strict=True):
            axis.plot(stops, [statistics.fmean(results.numbers(ATTACKED, seed)[str(stop)][key] for seed in results.seeds)
                              for stop in stops], "o-", color=COLOURS[4])
            axis.set(xlabel="rounds", ylabel=f"{by} of all devices")
    return [Figure("stops.png", "Model replacement by a fifth of the devices, mean over seeds. Left: as figures 5.6 and 5.7. "
                                "Middle and right: what is seen of all devices, as figure 5.8.")]


def notes(results: Results) -> Sequence[str]:
    """What differs from the thesis."""
    plan = results.plan
    last = all(chosen_stops(results, by) == best_epochs(results) for by in STOPS)
    same = ["Training loss and validation accuracy both choose the last round in every seed, so that the last three claims rest "
            "on one and the same difference."] if last else []
    return [
        *same,
        f"{plan['devices']} devices (the thesis: 100), each with {plan['each_class']} images of each of five classes, dealt out "
        f"anew for every seed; {SIDE} x {SIDE} pixels and one hidden layer of {HIDDEN} units instead of a CNN; {plan['rounds']} "
        f"rounds of {plan['cohort']} devices, {plan['local_steps']} batches of {plan['batch']} with step "
        f"{plan['learning_rate']:g}. The thesis's figures go to round 5,000, and do not name their data.",
        "Figures 5.6 to 5.8 are not printed as numbers. Fine-tuning is on the benign devices' best of "
        f"{', '.join(map(str, plan['epochs']))} epochs with lambda = {plan['pull']:g}, as in the thesis; plain fine-tuning has "
        f"{max(plan['epochs'])} epochs and no pull.",
        "The claims were fixed before any result was seen. One rule was changed afterwards: the best stop of a seed was that "
        "with the highest test accuracy of that same seed, so that no other could be above it and three claims could not fail. "
        "It is now the best in the mean over the other seeds. The number of epochs is still the best for the seed's own benign "
        "devices, as the thesis picks it, which favours fine-tuning.",
    ]


FULL = SolverPlan()
DITTO_SOLVERS = Study(
    name="ditto_solvers", paper="Li23", item="table 5.10, figures 5.6 to 5.8 (skewed FEMNIST)",
    title="Two solvers for Ditto", cost=Cost(80, 8), full=FULL,
    quick=replace(FULL, seeds=2, rounds=8, stops=(2, 4, 8), epochs=(2, 5)), data=FEMNIST, cells=cells, tables=tables,
    figures=figures, notes=notes,
    claims=(
        below("On skewed data local models are more accurate than the global one.", "[Li23, table 5.10]", "global", "local",
              CLEAN),
        below("Ditto is more accurate than both: the global model.", "[Li23, table 5.10]", "global", "Ditto 0.1", CLEAN),
        below("Ditto is more accurate than both: local models.", "[Li23, table 5.10]", "local", "Ditto 0.1", CLEAN),
        below("lambda = 0.1 is more accurate than 1 without attacks.", "[Li23, table 5.10]", "Ditto 1", "Ditto 0.1", CLEAN),
        Claim("The median fails without attacks: at most half of the global model's accuracy.", "[Li23, table 5.10]",
              median_fails),
        below("Under model replacement lambda = 0.01 is more accurate than 1.", "[Li23, table 5.10]", "Ditto 1", "Ditto 0.01",
              ATTACKED),
        below("Under model replacement Ditto, lambda = 0.01, is more accurate than fine-tuning.", "[Li23, table 5.10]", PLAIN,
              "Ditto 0.01", ATTACKED),
        Claim("Under model replacement joint training is more accurate than fine-tuning on Ditto's objective.",
              "[Li23, figure 5.6]", joint_wins),
        Claim("Fine-tuning on Ditto's objective improves on the global model.", "[Li23, figure 5.6]", tuning_helps),
        Claim(f"Fine-tuning from the best early stop is as good as joint training, to {AS_GOOD:g} point.", "[Li23, figure 5.7]",
              early_stop_is_as_good),
        Claim("Fine-tuning from the last round is worse than from the best early stop.", "[Li23, figure 5.7]", late_is_worse),
        *(Claim(f"The {by} of all devices does not show where to stop: fine-tuning from its best round is worse than from the "
                "best stop.", "[Li23, figure 5.8]", partial(stop_is_hidden, by=by)) for by in STOPS),
    ),
)
