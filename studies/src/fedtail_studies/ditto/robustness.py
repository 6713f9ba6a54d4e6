"""What is said of every data set of tables 5.7 to 5.12 in [Li23]: tables and claims of methods under attack.

Rows are methods, columns are attacks with their share of corrupted devices; accuracies are those of benign devices, in percent.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fedtail_studies.ditto.attacked import CLEAN, FINE_TUNED, ditto_name
from fedtail_studies.ditto.printed import BEST, DYNAMIC, Rows
from fedtail_studies.judging import all_of, difference, lower, not_above, within
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Finding, Numbers, Verdict
from fedtail_studies.tables import Printed, Row, Table

DYNAMIC_REACH = 3.0                                    # points between dynamic and best lambda; 1.4 are printed for Vehicle
NO_BETTER = 2.0                                        # points by which a rule that "does not help" may exceed the global model
ATTACKS = {"A1": "label poisoning", "A2": "random updates", "A3": "model replacement"}
COMPARED = ("median", "Krum", "multi-Krum", "clipping", "k-norm", "k-loss")      # figure 5.5
POWERLESS = ("median", "multi-Krum", "clipping", "k-norm")      # printed near or below global with 80% of labels poisoned


# reading


def methods_in(results: Results, seed: int, column: str) -> dict[str, Numbers]:
    """What was found in a column for one seed, by method."""
    cells = results.cells[seed]
    return {name: numbers for cell, found in cells.items() if cell.startswith(f"{column}: ")
            for name, numbers in found["numbers"].items()}


def best_strength(results: Results, seed: int, column: str, suffix: str = "") -> str:
    """The strength with the highest validation accuracy of benign devices, as a name: what only who knows them can choose."""
    there = methods_in(results, seed, column)
    names = [f"{ditto_name(one)}{suffix}" for one in results.plan["strengths"]]
    return max(names, key=lambda name: there[name]["validation"])


def values(results: Results, column: str, method: str, key: str = "test") -> list[float]:
    """One number of a method in a column for each seed; NaN where it was not finite. `BEST` is the best strength of a seed."""
    made = []
    for seed in results.seeds:
        name = best_strength(results, seed, column, method.removeprefix(BEST)) if method.startswith(BEST) else method
        found = methods_in(results, seed, column)[name][key]
        made.append(float("nan") if found is None else float(found))
    return made


def averages(results: Results, columns: Sequence[str], method: str, key: str = "test") -> list[float]:
    """The mean of a number over some columns, for each seed."""
    return [statistics.fmean(found) for found in zip(*(values(results, one, method, key) for one in columns), strict=True)]


def columns_of(results: Results, attack: str) -> list[str]:
    """The columns of an attack, or those of all attacks for ""."""
    return [one for one in results.plan["columns"] if one != CLEAN and one.startswith(attack)]


def methods_of(results: Results) -> list[str]:
    """All methods that are in every column, and best and dynamic lambda, in the order of the tables."""
    there = [set(methods_in(results, results.seeds[0], column)) for column in results.plan["columns"]]
    first = [name for column in results.plan["columns"] for name in methods_in(results, results.seeds[0], column)]
    kept = [name for name in dict.fromkeys(first) if name != DYNAMIC and all(name in one for one in there)]
    ditto = [name for name in kept if name.startswith("Ditto")]
    bests = [BEST, DYNAMIC, *(f"{BEST} + {rule}" for rule in results.plan["with_ditto"])]
    return [*(name for name in kept if name not in ditto), *(name for name in ditto if "+" not in name), *bests]


# tables


def accuracy_tables(results: Results, printed: Rows, source: str) -> list[Table]:
    """Accuracies and deviations over benign devices: ours, then the printed ones in tables of their own.

    Methods that are run without attacks and with poisoned labels only come last.
    """
    columns, names = tuple(results.plan["columns"]), methods_of(results)
    shown = [column for column in columns if column == CLEAN or column.startswith("A1")]
    some = [name for name in methods_in(results, results.seeds[0], shown[-1]) if name not in names and " + " not in name
            and all(name in methods_in(results, results.seeds[0], column) for column in shown)]
    made = []
    for key, title, place in (("test", "Test accuracy of benign devices, %", 0),
                              ("std", "Standard deviation over benign devices, points", 1)):
        ours = [Row(name, {column: values(results, column, name, key) for column in columns}) for name in names]
        ours += [Row(name, {column: values(results, column, name, key) for column in shown}) for name in some]
        theirs = [Row(name, {column: [found[place]] for column, found in row.items() if column in columns})
                  for name, row in printed.items()]
        made += [Table(title, columns, tuple(ours), digits=1),
                 Table(f"{title}, as printed", columns, tuple(theirs), source, digits=1)]
    return made


# claims


@dataclass(frozen=True)
class Comparison:
    """One method against another, averaged over columns; the printed difference is averaged over those that are printed."""

    printed: Rows

    def said(self, columns: Sequence[str], method: str, other: str, place: int) -> Printed | None:
        """The printed difference of two methods, averaged over columns; None where one of them is not printed."""
        rows = self.printed.get(method), self.printed.get(other)
        if None in rows or not all(column in row for row in rows if row is not None for column in columns):
            return None
        first, second = (statistics.fmean(row[column][place] for column in columns) for row in rows if row is not None)
        return Printed(first - second)

    def below(self, results: Results, columns: Sequence[str], method: str, other: str, key: str = "test") -> Finding:
        """Whether a method has a lower accuracy, or a smaller deviation, than another."""
        found = difference(averages(results, columns, method, key), averages(results, columns, other, key))
        what = "accuracy" if key == "test" else "deviation"
        where = columns[0] if len(columns) == 1 else f"{columns[0]} to {columns[-1]}"
        return lower(found, results.papers_data, self.said(columns, method, other, 0 if key == "test" else 1),
                     f"{what}, {where}, {method} less {other},")


def beats_global(results: Results, printed: Rows, attack: str) -> Finding:
    """Whether Ditto is more accurate than the global model under an attack, averaged over shares."""
    return Comparison(printed).below(results, columns_of(results, attack), "global", DYNAMIC)


def beats_rules(results: Results, printed: Rows) -> Finding:
    """Whether Ditto is more accurate than the best of the robust rules, averaged over all attacks."""
    columns = columns_of(results, "")
    best = max(results.plan["rules"], key=lambda rule: statistics.fmean(averages(results, columns, rule)))
    return Comparison(printed).below(results, columns, best, DYNAMIC)


def less_robust_or_less_fair(results: Results) -> Finding:
    """Whether no rule is both more accurate and more uniform than the global model where labels are poisoned."""
    columns, verdicts, texts = columns_of(results, "A1"), [], []
    for rule in (one for one in COMPARED if one in results.plan["rules"]):
        accuracy = difference(averages(results, columns, rule), averages(results, columns, "global"))
        spread = difference(averages(results, columns, rule, "std"), averages(results, columns, "global", "std"))
        better, worse = accuracy.sign > 0 and spread.sign < 0, accuracy.sign < 0 or spread.sign > 0
        verdicts.append(Verdict.DISAGREES if better else Verdict.AGREES if worse else Verdict.NOT_TESTABLE)
        texts.append(Finding(verdicts[-1], f"{rule}: accuracy {accuracy}, deviation {spread}"))
    return all_of(*texts)


def dynamic_is_near(results: Results) -> Finding:
    """Whether devices that choose lambda themselves lose little against the best lambda, averaged over all columns."""
    columns = results.plan["columns"]
    found = difference(averages(results, columns, DYNAMIC), averages(results, columns, BEST))
    return within(found, DYNAMIC_REACH, results.papers_data, "accuracy, all columns, dynamic less best lambda,")


def below_local(results: Results, printed: Rows) -> Finding:
    """Whether the global model is below models that devices train alone, where attacks are strongest."""
    strongest = ("A1 80%", columns_of(results, "A3")[-1])
    return all_of(*(Comparison(printed).below(results, (column,), "global", "local") for column in strongest
                    if column in results.plan["columns"]))


def powerless(results: Results) -> Finding:
    """Whether robust rules are no better than the mean with 80% of the devices' labels poisoned."""
    rules = [one for one in POWERLESS if one in results.plan["rules"]]
    return all_of(*(not_above(difference(values(results, "A1 80%", rule), values(results, "A1 80%", "global")), NO_BETTER,
                              results.papers_data, f"accuracy, A1 80%, {rule} less global,") for rule in rules))


def claim(text: str, source: str, printed: Rows, method: str, other: str, columns: str, key: str = "test") -> Claim:
    """The claim that a method is below another in the columns of an attack ("A1"), in one ("clean") or under all attacks ("")."""
    def judge(results: Results) -> Finding:
        """Average over the columns and compare."""
        chosen = [columns] if columns in results.plan["columns"] else columns_of(results, columns)
        return Comparison(printed).below(results, chosen, method, other, key)
    return Claim(text, source, judge)


def claims_of_all(printed: Rows, table: str) -> tuple[Claim, ...]:
    """The claims of sections 5.3 and 5.7 that the printed numbers of every data set bear out."""
    one = partial(claim, printed=printed)
    source = f"[Li23, {table}]"
    return (
        *(Claim(f"Under {attack} ({text}) Ditto is more accurate on benign devices than the global model.", source,
                partial(beats_global, printed=printed, attack=attack)) for attack, text in ATTACKS.items()),
        Claim("Averaged over all attacks Ditto is more accurate than every robust rule.", "[Li23, section 5.3.1]",
              partial(beats_rules, printed=printed)),
        one("Without attacks Ditto's accuracy varies less over devices than the global model's.", "[Li23, table 5.1]",
            method=DYNAMIC, other="global", columns=CLEAN, key="std"),
        one("Without attacks Ditto is more accurate than TERM, t = 1.", "[Li23, section 5.3.2]", method="TERM 1", other=DYNAMIC,
            columns=CLEAN),
        one("Without attacks Ditto's accuracy varies less over devices than TERM's.", "[Li23, section 5.3.2]", method=DYNAMIC,
            other="TERM 1", columns=CLEAN, key="std"),
        one("Where labels are poisoned TERM is less accurate than the global model.", "[Li23, figure 5.4]", method="TERM 1",
            other="global", columns="A1"),
        one("Under model replacement Krum is more accurate than the mean.", source, method="global", other="Krum", columns="A3"),
        Claim("Where attacks are strongest the global model is below local ones.", source, partial(below_local, printed=printed)),
        one("Under model replacement lambda = 0.1 is more accurate than 1.", source, method="Ditto 1", other="Ditto 0.1",
            columns="A3"),
    )


def powerless_claim(table: str) -> Claim:
    """The claim that with most devices poisoned no robust rule helps; table 5.9 does not bear it out."""
    return Claim("With 80% of the devices poisoned median, multi-Krum, clipping and k-norm do not help: at most "
                 f"{NO_BETTER:g} points above the global model.", f"[Li23, {table}]", powerless)


def stronger_pull_claim(printed: Rows, table: str) -> Claim:
    """The claim that without attacks the stronger pull is better; table 5.10 says the opposite of skewed FEMNIST."""
    return claim("Without attacks lambda = 1 is more accurate than 0.1.", f"[Li23, {table}]", printed, "Ditto 0.1", "Ditto 1",
                 CLEAN)


def dynamic_claim() -> Claim:
    """The claim that devices choose lambda nearly as well as who knows the benign ones."""
    return Claim(f"Devices that choose lambda themselves are within {DYNAMIC_REACH:g} points of the best lambda on average.",
                 "[Li23, table 5.5]", dynamic_is_near)


def common_claims(printed: Rows, table: str) -> tuple[Claim, ...]:
    """The claims that are made of each data set with writers or sensors of their own."""
    one = partial(claim, printed=printed)
    return (
        *claims_of_all(printed, table),
        one("Where labels are poisoned TERM is less accurate with t = 5 than with t = 1.", "[Li23, figure 5.4]",
            method="TERM 5", other="TERM 1", columns="A1"),
        Claim("Where labels are poisoned each robust rule is less accurate or less uniform than the global model.",
              "[Li23, figure 5.5]", less_robust_or_less_fair),
        powerless_claim(table),
        stronger_pull_claim(printed, table),
        dynamic_claim(),
        one("Pulled towards a model made with clipping, Ditto is more accurate under attacks than it is else.",
            "[Li23, tables 5.3 and 5.6]", method=BEST, other=f"{BEST} + clipping", columns=""),
        one("Ditto with clipping is more accurate under attacks than clipping alone.", "[Li23, tables 5.3 and 5.6]",
            method="clipping", other=f"{BEST} + clipping", columns=""),
    )


def fine_tuning_claim(printed: Rows, table: str) -> Claim:
    """The claim that Ditto with its best lambda is above fine-tuning under attacks."""
    return claim("Averaged over all attacks Ditto is more accurate than fine-tuning the global model.", f"[Li23, {table}]",
                 printed, FINE_TUNED, BEST, "")
