"""The numbers that chapter 4 of [Li23] prints: tables 4.1 to 4.12, in percent, with deviations over five splits.

Errata are applied: the deviation of Shakespeare's KL is .005, and those of Synthetic's training averages in table 4.8 are .2.
"""

from __future__ import annotations

from fedtail_studies.tables import Printed

# What is said of the accuracies of devices, by the name it has in results; the first six are the columns of table 4.5.
TITLES = {"average": "average", "worst": "worst 10%", "best": "best 10%", "variance": "variance", "angle": "angle",
          "kl": "KL to uniform", "devices": "average over devices"}
FULL = tuple(TITLES)[:6]

Rows = dict[str, dict[str, Printed]]


def rows(*lines: str) -> Rows:
    """Rows of a table from lines "objective: mean ± std, mean ± std, ...", whose columns are those of table 4.5.

    >>> rows("q = 0: 80.8 ± .9, 18.8 ± 5")["q = 0"]["worst"]
    Printed(mean=18.8, std=5.0)
    """
    made = {}
    for line in lines:
        name, _, text = line.partition(": ")
        pairs = [cell.split("±") for cell in text.split(",")]
        made[name] = {key: Printed(float(mean), float(std)) for key, (mean, std) in zip(FULL, pairs, strict=False)}
    return made


def with_devices(table: Rows, **averages: tuple[float, float]) -> Rows:
    """The rows with table 4.7's average over devices, by objective; an objective's name is its keyword, q0 for "q = 0"."""
    named = {"q0": "q = 0", "q": next(name for name in table if name not in ("q = 0", "uniform"))}
    return {**table, **{named[key]: {**table[named[key]], "devices": Printed(*pair)} for key, pair in averages.items()}}


# Tables 4.1, 4.5, 4.7, 4.9, 4.11 and 4.12: test accuracy.
SYNTHETIC_TEST = with_devices(rows(
    "q = 0: 80.8 ± .9, 18.8 ± 5.0, 100 ± 0, 724 ± 72, 19.5 ± 1.1, .083 ± .013",
    "q = 1: 79.0 ± 1.2, 31.1 ± 1.8, 100 ± 0, 472 ± 14, 16.0 ± .5, .049 ± .003",
    "q = 0.1: 81.1 ± .8, 22.1 ± .8, 100 ± 0, 666 ± 56, 18.4 ± .8, .070 ± .009",
    "q = 2: 74.7 ± 1.3, 32.2 ± 2.1, 99.9 ± .2, 410 ± 23, 15.6 ± .7, .044 ± .005",
    "q = 5: 67.2 ± .9, 30.0 ± 4.8, 94.3 ± 1.4, 369 ± 51, 16.3 ± 1.2, .048 ± .010",
    "uniform: 82.2 ± 1.1, 30.0 ± .4, 100 ± 0, 525 ± 47, 15.6 ± .8, .048 ± .007"), q0=(77.3, 0.6), q=(76.3, 1.7))
VEHICLE_TEST = with_devices(rows(
    "q = 0: 87.3 ± .5, 43.0 ± 1.0, 95.7 ± 1.0, 291 ± 18, 11.3 ± .3, .031 ± .003",
    "q = 5: 87.7 ± .7, 69.9 ± .6, 94.0 ± .9, 48 ± 5, 4.6 ± .2, .003 ± .000",
    "uniform: 86.8 ± .3, 45.4 ± .3, 95.4 ± .7, 267 ± 7, 10.8 ± .1, .028 ± .001",
    "multiple q: 88.5 ± .3, 70.0 ± 2.0, 95.8 ± .6, 52 ± 7, 4.7 ± .3, .004 ± .000"), q0=(85.6, 0.4), q=(86.5, 0.7))
SENT140_TEST = with_devices(rows(
    "q = 0: 65.1 ± 4.8, 15.9 ± 4.9, 100 ± 0, 697 ± 132, 22.4 ± 3.3, .104 ± .034",
    "q = 1: 66.5 ± .2, 23.0 ± 1.4, 100 ± 0, 509 ± 30, 18.8 ± .5, .067 ± .006",
    "uniform: 66.6 ± 2.6, 21.1 ± 1.9, 100 ± 0, 560 ± 19, 19.8 ± .7, .076 ± .006"), q0=(64.6, 4.5), q=(66.2, 0.2))
SHAKESPEARE_TEST = with_devices(rows(
    "q = 0: 51.1 ± .3, 39.7 ± 2.8, 72.9 ± 6.7, 82 ± 41, 9.8 ± 2.7, .014 ± .006",
    "q = 0.001: 52.1 ± .3, 42.1 ± 2.1, 69.0 ± 4.4, 54 ± 27, 7.9 ± 2.3, .009 ± .005",
    "uniform: 50.9 ± .4, 41.0 ± 3.7, 70.6 ± 5.4, 71 ± 38, 9.1 ± 2.8, .012 ± .006",
    "multiple q: 52.0 ± 1.5, 41.0 ± 4.3, 72.0 ± 4.8, 72 ± 32, 10.1 ± .7, .017 ± .000"), q0=(61.4, 2.7), q=(60.0, 0.5))

# Tables 4.6 and 4.8: training accuracy.
SYNTHETIC_TRAIN = rows(
    "q = 0: 81.7 ± .3, 23.6 ± 1.1, 100 ± 0, 597 ± 10, 17.5 ± .3, .061 ± .002",
    "q = 1: 78.9 ± .2, 41.8 ± 1.0, 96.8 ± .5, 292 ± 11, 12.5 ± .2, .027 ± .001",
    "uniform: 83.5 ± .2, 42.6 ± 1.4, 100 ± 0, 366 ± 17, 13.4 ± .3, .031 ± .002")
VEHICLE_TRAIN = rows(
    "q = 0: 87.5 ± .2, 49.5 ± 10.2, 94.9 ± .7, 237 ± 97, 10.2 ± 2.4, .025 ± .011",
    "q = 5: 87.8 ± .5, 71.3 ± 2.2, 93.1 ± 1.4, 37 ± 12, 4.0 ± .7, .003 ± .001",
    "uniform: 87.3 ± .3, 46.6 ± .8, 94.8 ± .5, 261 ± 10, 10.7 ± .2, .027 ± .001")
SENT140_TRAIN = rows(
    "q = 0: 69.8 ± .8, 36.9 ± 3.1, 94.4 ± 1.1, 278 ± 44, 13.6 ± 1.1, .032 ± .006",
    "q = 1: 68.2 ± .6, 46.0 ± .3, 88.8 ± .8, 143 ± 4, 10.0 ± .1, .017 ± .000",
    "uniform: 69.1 ± .5, 42.2 ± 1.1, 91.0 ± 1.3, 188 ± 19, 11.3 ± .5, .022 ± .002")
SHAKESPEARE_TRAIN = rows(
    "q = 0: 72.7 ± .8, 46.4 ± 1.4, 79.7 ± .9, 116 ± 8, 9.9 ± .3, .015 ± .001",
    "q = 0.001: 66.7 ± 1.2, 48.0 ± .4, 71.2 ± 1.9, 56 ± 9, 7.1 ± .5, .008 ± .001",
    "uniform: 57.7 ± 1.5, 54.1 ± 1.7, 72.4 ± 3.2, 32 ± 7, 5.2 ± .5, .004 ± .001")

# Table 4.10: test accuracy by data set and number of devices.
HETEROGENEITY = {
    ("IID", 100): rows("q = 0: 89.2 ± .6, 70.9 ± 3, 100 ± 0, 85 ± 15", "q = 1: 89.0 ± .5, 70.3 ± 3, 100 ± 0, 88 ± 19"),
    ("IID", 50): rows("q = 0: 87.1 ± 1.5, 66.5 ± 3, 100 ± 0, 107 ± 14", "q = 1: 86.8 ± .8, 66.5 ± 2, 100 ± 0, 109 ± 13"),
    ("(1, 1)", 100): rows("q = 0: 83.0 ± .9, 36.8 ± 2, 100 ± 0, 452 ± 22", "q = 1: 82.7 ± 1.3, 43.5 ± 5, 100 ± 0, 362 ± 58"),
    ("(1, 1)", 50): rows("q = 0: 84.5 ± .3, 43.3 ± 2, 100 ± 0, 370 ± 37", "q = 1: 85.1 ± .8, 47.3 ± 3, 100 ± 0, 317 ± 41"),
    ("(2, 2)", 100): rows("q = 0: 82.6 ± 1.1, 25.5 ± 8, 100 ± 0, 618 ± 117", "q = 1: 82.2 ± .7, 31.9 ± 6, 100 ± 0, 484 ± 79"),
    ("(2, 2)", 50): rows("q = 0: 85.9 ± 1.0, 36.8 ± 7, 100 ± 0, 421 ± 85", "q = 1: 85.9 ± 1.4, 39.1 ± 6, 100 ± 0, 396 ± 76"),
}

# Table 4.2: test accuracy on Adult; average, PhD, non-PhD.
ADULT = {name: {key: Printed(*pair) for key, pair in zip(("average", "PhD", "non-PhD"), pairs, strict=True)} for name, pairs in {
    "q = 0": ((83.2, 0.1), (69.9, 0.4), (83.3, 0.1)), "AFL": ((82.5, 0.5), (73.0, 2.2), (82.6, 0.5)),
    "q = 0.01": ((82.6, 0.1), (74.1, 0.6), (82.7, 0.1)), "q = 2": ((82.3, 0.1), (74.4, 0.9), (82.4, 0.1))}.items()}

# Table 4.3: accuracy of meta-test tasks on Omniglot.
OMNIGLOT = rows("q = 0: 79.1 ± 9.8, 61.2 ± 3.2, 94.0 ± .5, 93 ± 23", "q = 0.1: 79.3 ± 9.6, 62.5 ± 5.3, 93.8 ± .9, 86 ± 28")
