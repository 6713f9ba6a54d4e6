"""Tables and claims of Ditto beside other personal models: table 5.2 of [Li23], and table 4 of [PLMH23] with Ditto.

Cells are those of `personalised`: by column, what benign devices have with every method and strength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedtail_studies.ditto.devices import HIDDEN, SIDE
from fedtail_studies.ditto.personalised import AVERAGED, COLUMNS, TAILED, PersonalPlan, cells
from fedtail_studies.ditto.printed import PERSONAL
from fedtail_studies.emnist.writers import FEMNIST
from fedtail_studies.judging import Difference, all_of, difference, lower, not_above, within
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Cost, Finding, Numbers, Study
from fedtail_studies.tables import Printed, Row, Table

OTHERS = ("fine-tuning", "L2SGD", "EWC", "SKL", "Per-FedAvg", "mapper", "APFL")
AS_GOOD = 1.0                                          # points of accuracy, and of deviation
CLOSE = {"test": 1.0, "p90": 2.0}                      # points of the mean and the 90th percentile; table 4 has 0.01 and 0.02


def best_of(found: Mapping[str, Numbers], method: str) -> Numbers:
    """The numbers of a method: of its variants ("EWC, lambda 10"), those with the best validation accuracy."""
    variants = [numbers for name, numbers in found.items() if name == method or name.startswith(f"{method}, ")]
    return max(variants, key=lambda numbers: numbers["validation"])


def values(results: Results, column: str, method: str, key: str = "test") -> list[float]:
    """A number of a method in a column, or of Delta-FL's variant of it in the column `TAILED`, for each seed."""
    made = []
    for seed in results.seeds:
        found = {name: numbers for cell, one in results.cells[seed].items() if cell == column or cell.startswith(f"{column}: ")
                 for name, numbers in one["numbers"].items()}
        made.append(best_of(found, method)[key])
    return made


def tables(results: Results) -> list[Table]:
    """Table 5.2 with what is printed, and FedAvg beside Delta-FL before and after personalisation."""
    names = ["global", "local", *OTHERS, "Ditto"]
    made = []
    for key, title, place in (("test", "Test accuracy of benign devices, %", 0),
                              ("std", "Standard deviation over benign devices, points", 1)):
        rows = [Row(name, {column: values(results, column, name, key) for column in COLUMNS},
                    {column: Printed(PERSONAL[name][column][place]) for column in COLUMNS}) for name in names]
        made.append(Table(title, COLUMNS, tuple(rows), "[Li23, table 5.2]", digits=1))
    kinds = {"before": "global", "after fine-tuning": "fine-tuning", "with Ditto": "Ditto"}
    rows = [Row(method, {f"{what}, {when}": [100 - one if key == "test" else one for one in values(results, column, name, key)]
                         for key, what in (("test", "mean"), ("p90", "90th percentile")) for when, name in kinds.items()})
            for method, column in ((AVERAGED, "clean"), (TAILED, TAILED))]
    return [*made, Table("Error over devices before and after personalisation, %", tuple(rows[0].ours), tuple(rows), digits=1)]


def as_accurate(results: Results, other: str) -> Finding:
    """Whether Ditto is at least as accurate as another method, to `AS_GOOD` points, in both columns."""
    return all_of(*(not_above(difference(values(results, column, other), values(results, column, "Ditto")), AS_GOOD,
                              results.papers_data, f"accuracy, {column}, {other} less Ditto,") for column in COLUMNS))


def as_uniform(results: Results) -> Finding:
    """Whether Ditto's accuracy varies no more over devices than any other method's, to `AS_GOOD` points, without attacks."""
    own = values(results, "clean", "Ditto", "std")
    return all_of(*(not_above(difference(own, values(results, "clean", other, "std")), AS_GOOD, results.papers_data,
                              f"deviation, clean, Ditto less {other},") for other in OTHERS))


def is_below(results: Results, column: str, method: str, other: str) -> Finding:
    """Whether a method is less accurate than another."""
    printed = Printed(PERSONAL[method][column].mean - PERSONAL[other][column].mean)
    return lower(difference(values(results, column, method), values(results, column, other)), results.papers_data, printed,
                 f"accuracy, {column}, {method} less {other},")


def tail_difference(results: Results, name: str, key: str) -> Difference:
    """Delta-FL less FedAvg in mean accuracy or 90th percentile of errors, both personalised in one way."""
    return difference(values(results, TAILED, name, key), values(results, "clean", name, key))


def close_after(results: Results, name: str) -> Finding:
    """Whether FedAvg and Delta-FL are close after personalisation, in the mean and in the 90th percentile."""
    what = {"test": "mean accuracy", "p90": "90th percentile of errors"}
    return all_of(*(within(tail_difference(results, name, key), reach, results.papers_data,
                           f"{what[key]}, {name}, Delta-FL less FedAvg,") for key, reach in CLOSE.items()))


def notes(results: Results) -> Sequence[str]:
    """What differs from the papers."""
    plan = results.plan
    return [
        f"Writers, network and rounds as in `ditto_femnist`: {plan['devices']} writers, {SIDE} x {SIDE} pixels, one hidden layer "
        f"of {HIDDEN} units, {plan['rounds']} rounds of {plan['cohort']} writers. Strengths are chosen among those of the plan; "
        "Per-FedAvg has one learning rate and adapts by a step or by epochs, whichever validates better.",
        "Personal models beside FedAvg are all trained in one run. Mapper's shared model is FedAvg's, and APFL has alpha 0.5.",
        "Delta-FL's table 4, on test writers and with a ConvNet, is in `emnist_convnet`; here are training writers, and Ditto "
        "beside fine-tuning.",
        "The claims and their rules were fixed before any result was seen. CelebA's columns are not run: the data are not at "
        "hand.",
    ]


FULL = PersonalPlan()
DITTO_PERSONAL = Study(
    name="ditto_personal", paper="Li23", item="table 5.2 (FEMNIST); PLMH23, table 4", title="Ditto and other personal models",
    cost=Cost(80, 8), full=FULL, quick=replace(FULL, seeds=2, rounds=8, tuning_epochs=5, mean_strengths=(1.0,)), data=FEMNIST,
    cells=cells, tables=tables, notes=notes,
    claims=(
        *(Claim(f"Ditto is at least as accurate as {other}, to {AS_GOOD:g} point, without attacks and with half of the labels "
                "poisoned.", "[Li23, table 5.2]", partial(as_accurate, other=other)) for other in OTHERS),
        Claim(f"Ditto's accuracy varies no more over devices than any other's, to {AS_GOOD:g} point.", "[Li23, section 5.3.4]",
              as_uniform),
        Claim("Ditto is more accurate than the global model without attacks.", "[Li23, table 5.2]",
              partial(is_below, column="clean", method="global", other="Ditto")),
        Claim("Ditto is more accurate than local models without attacks.", "[Li23, table 5.2]",
              partial(is_below, column="clean", method="local", other="Ditto")),
        Claim("With half of the labels poisoned Per-FedAvg is less accurate than the global model.", "[Li23, table 5.2]",
              partial(is_below, column="A1 50%", method="Per-FedAvg", other="global")),
        *(Claim(f"FedAvg and Delta-FL are close after {way}: {CLOSE['test']:g} point of the mean, {CLOSE['p90']:g} of the 90th "
                "percentile.", source, partial(close_after, name=name))
          for way, name, source in (("fine-tuning", "fine-tuning", "[PLMH23, table 4]"),
                                    ("Ditto", "Ditto", "[PLMH23, table 4, for fine-tuning]"))),
    ),
)
