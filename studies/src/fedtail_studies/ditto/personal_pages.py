"""Tables and claims of Ditto beside other personal models: table 5.2 of [Li23], and table 4 of [PLMH23] with Ditto.

Cells are those of `personalised`: by column, what benign devices have with every method and strength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedtail_studies.ditto.attack_notes import participation_note
from fedtail_studies.ditto.devices import FEMNIST, HIDDEN, SIDE, THEIRS
from fedtail_studies.ditto.personalised import AVERAGED, COLUMNS, PersonalPlan, cells, tail_name
from fedtail_studies.ditto.printed import PERSONAL
from fedtail_studies.emnist.printed import TABLE4
from fedtail_studies.judging import Difference, all_of, difference, lower, not_above, within
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Cost, Finding, Numbers, Study
from fedtail_studies.tables import Printed, Row, Table

OTHERS = ("fine-tuning", "L2SGD", "EWC", "SKL", "Per-FedAvg", "mapper", "APFL")
AS_GOOD = 1.0                                          # points of accuracy, and of deviation
WHAT = {"test": "mean", "p90": "90th percentile"}      # of errors over devices
CLOSE = {"test": 1.0, "p90": 2.0}                      # points; table 4 has 0.15 at most
NEAR_FEDAVG = ("Delta-FL 0.8", "Delta-FL 0.5")         # after personalisation, in table 4; theta = 0.1 is 0.7 points behind


def best_of(found: Mapping[str, Numbers], method: str) -> Numbers:
    """The numbers of a method: of its variants ("EWC, lambda 10"), those with the best validation accuracy."""
    variants = [numbers for name, numbers in found.items() if name == method or name.startswith(f"{method}, ")]
    return max(variants, key=lambda numbers: numbers["validation"])


def values(results: Results, column: str, method: str, key: str = "test") -> list[float]:
    """A number of a method in a column, or beside Delta-FL where the column is its name, for each seed."""
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
    return [*made, *tail_tables(results)]


def errors(results: Results, column: str, name: str, key: str) -> list[float]:
    """The mean error or its 90th percentile over devices, in percent, for each seed."""
    found = values(results, column, name, key)
    return [100 - one for one in found] if key == "test" else found


def tail_tables(results: Results) -> list[Table]:
    """FedAvg and Delta-FL before and after personalisation, and what table 4 of [PLMH23] prints."""
    kinds = {"before": "global", "after fine-tuning": "fine-tuning", "with Ditto": "Ditto"}
    runs = {AVERAGED: "clean", **{tail_name(one): tail_name(one) for one in results.plan["tail_fractions"]}}
    rows = [Row(method, {f"{what}, {when}": errors(results, column, name, key) for key, what in WHAT.items()
                         for when, name in kinds.items()}) for method, column in runs.items()]
    said = {f"{what}, {when}": f"{when}.{'mean' if key == 'test' else key}" for key, what in WHAT.items()
            for when in ("before", "after")}
    theirs = [Row(method, {title: [row[key].mean] for title, key in said.items()}) for method, row in TABLE4.items()]
    title = "Error over devices before and after personalisation, %"
    return [Table(title, tuple(rows[0].ours), tuple(rows), digits=1),
            Table(f"{title}, as printed for test writers", tuple(said), tuple(theirs), "[PLMH23, table 4]", digits=2)]


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


def tail_difference(results: Results, method: str, name: str, key: str) -> Difference:
    """Delta-FL less FedAvg in mean error or 90th percentile of errors, both personalised in one way."""
    return difference(errors(results, method, name, key), errors(results, "clean", name, key))


def close_after(results: Results, name: str) -> Finding:
    """Whether FedAvg and Delta-FL are close after personalisation, in the mean and in the 90th percentile."""
    return all_of(*(within(tail_difference(results, method, name, key), reach, results.papers_data,
                           f"{WHAT[key]}, {name}, {method} less FedAvg,")
                    for method in NEAR_FEDAVG for key, reach in CLOSE.items()))


def personalisation_helps(results: Results, name: str) -> Finding:
    """Whether personal models lower the mean error and the 90th percentile, of FedAvg and of Delta-FL."""
    runs = {AVERAGED: "clean", **{method: method for method in NEAR_FEDAVG}}
    return all_of(*(lower(difference(errors(results, column, name, key), errors(results, column, "global", key)),
                          results.papers_data, what=f"{what}, {method}, {name} less before,")
                    for method, column in runs.items() for key, what in WHAT.items()))


def notes(results: Results) -> Sequence[str]:
    """What differs from the papers."""
    plan = results.plan
    return [
        f"{plan['devices']} writers, drawn anew for every seed (the thesis: {THEIRS}), {SIDE} x {SIDE} pixels, one hidden layer "
        f"of {HIDDEN} units (the thesis: a CNN), {plan['rounds']} rounds of {plan['cohort']} writers.",
        participation_note(results),
        "Strengths are chosen among those of the plan by validation accuracy of benign devices; so are the learning rate of "
        "Per-FedAvg, and whether it adapts by a step or by epochs.",
        "Personal models beside FedAvg are all trained in one run. Mapper's shared model is FedAvg's, and APFL has alpha 0.5.",
        "Delta-FL's table 4, on test writers and with a ConvNet, is in `emnist_convnet`; here are images of the training writers "
        f"that were not trained on, and Ditto beside fine-tuning for {plan['tuning_epochs']} epochs (table 4: 10). Of a "
        f"cohort of {plan['cohort']}, theta = 0.1 lets one device contribute.",
        "The claims and their rules were fixed before any result was seen. CelebA's columns are not testable here: the data are "
        "not at hand.",
        "A first run was thrown away. EWC had the strengths 10 and 1000, with which its steps diverge, and a device whose EWC "
        "model was not finite lost its fine-tuned and SKL models too, so that all of them came out as the shared model. Now a "
        "model that diverges leaves the others alone, and EWC has strengths with which none did on a seed that is not shown.",
    ]


FULL = PersonalPlan()
DITTO_PERSONAL = Study(
    name="ditto_personal", paper="Li23", item="table 5.2 (FEMNIST); PLMH23, table 4", title="Ditto and other personal models",
    cost=Cost(100, 5), full=FULL, data=FEMNIST, cells=cells, tables=tables, notes=notes,
    quick=replace(FULL, seeds=2, rounds=8, tuning_epochs=5, mean_strengths=(1.0,), meta_rates=(0.1,)),
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
        *(Claim(f"FedAvg and Delta-FL, theta = 0.8 and 0.5, are close after {way}: {CLOSE['test']:g} point of the mean, "
                f"{CLOSE['p90']:g} of the 90th percentile.", source, partial(close_after, name=name))
          for way, name, source in (("fine-tuning", "fine-tuning", "[PLMH23, table 4]"),
                                    ("Ditto", "Ditto", "[PLMH23, table 4, for fine-tuning]"))),
        *(Claim(f"{way} lowers the mean error and the 90th percentile of FedAvg and of Delta-FL, theta = 0.8 and 0.5.", source,
                partial(personalisation_helps, name=name))
          for way, name, source in (("Fine-tuning", "fine-tuning", "[PLMH23, table 4]"),
                                    ("Ditto", "Ditto", "[PLMH23, table 4, for fine-tuning]"))),
    ),
)
