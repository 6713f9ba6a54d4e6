"""The papers' tables and figures, and figures of ours, one study each: run it, and get a page with a verdict on every claim.

    fedtail reproduce list
    fedtail reproduce bias --quick
    fedtail reproduce table2 --data DIR --out experiments/table2

How a study is written
----------------------
A study is one module of this package that ends in a frozen `Study`; `catalogue.py` lists it. It says

- `name`, `paper`, `item`, `title`: the word on the command line, the key of `docs/references.md` ("PLMH23"), what of it
  ("table 2"), and one line in words. A study of a question of ours has an empty `paper`.
- `data`: a `Needs`, which reads the data from the folder the user names and gives a `Data`; None where the study generates its
  own. `Data.name` is what the page is called ("FEMNIST, 360 writers"); `Data.papers` is whether it is what the paper used. Where
  it is not, the page never compares values, and no claim gets a better verdict than "agrees in direction".
- `cost`: rounds, minutes on two cores and on a GPU.
- `full`, `quick`: two plans of one frozen dataclass of the study's own, which must have a field `seeds`. `quick` tests the same
  claims in less than five minutes on two cores. Everything that changes numbers belongs in the plan: results of another plan are
  not mixed in.
- `cells(plan, seed)`: what there is to do for a seed, in order: {name: measure}. A name is a method ("FedAvg", "Delta-FL 0.5")
  or a step of tuning. `measure(cell)` gives a dict of numbers, nested as you like, that JSON can hold (no dots in its names). A
  cell that is finished is saved at once and never run again, so keep cells to a few minutes. A `Cell` has `.plan`, `.seed`,
  `.data`, `.device`; `.train(algorithm, task, population, rounds)` trains with the seed, the device, a progress bar and Ctrl-C;
  `.steps(n)` counts other work; `.numbers(name, seed=None)` are those of a cell before it.
- `tables(results)`: the tables of the page. A `Row` has for each column our values, one for each seed, and what is `Printed`.
- `claims`: what the paper says, in our words, with its source, and a function of the results that gives a `Finding`: a verdict
  and its reason. Never typed in: `judging` has the usual rules (`lower`, `not_above`, `within`, `at_most`, `all_of`).
- `figures(results, folder)`: PNG files, by `drawing`; gives their names and captions. May be None.
- `notes(results)`: sentences for the page: what was reduced, which settings were chosen.

`Results` is what the last four are given: `.values(method, "test.p90")`, one number for each seed; `.difference(a, b, path)`,
paired by seed, with a 95% interval; `.plan`, `.data`, `.seeds`. Only seeds of which every cell is there are in it.

A test runs every study once with a tiny plan on generated data, and judges committed results anew: `tests/test_reproduce.py`.
"""

# ruff: noqa: F401 (the names under TYPE_CHECKING are what type checkers and editors read)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtail_studies.judging import Difference, all_of, at_most, lower, not_above, within
    from fedtail_studies.results import Results
    from fedtail_studies.running import Stopped, reproduce
    from fedtail_studies.study import Cell, Claim, Cost, Data, Figure, Finding, Needs, Study, Verdict
    from fedtail_studies.tables import Printed, Row, Table

_HOME = {                                             # loaded when first used: `fedtail --help` imports no tensor
    "judging": ("Difference", "all_of", "at_most", "lower", "not_above", "within"),
    "results": ("Results",),
    "running": ("Stopped", "reproduce"),
    "study": ("Cell", "Claim", "Cost", "Data", "Figure", "Finding", "Needs", "Study", "Verdict"),
    "tables": ("Printed", "Row", "Table"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedtail_studies' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedtail_studies.{_MODULE_OF[name]}"), name)
