"""Tables and notes that the pages of a comparison share."""

from __future__ import annotations

from collections.abc import Sequence

from fedtail_studies.compared.methods import models, periods
from fedtail_studies.compared.printed import PrintedTable, beside
from fedtail_studies.compared.rows import COLUMNS, FURTHER, GRIDS, at, rows, rows_of, validated
from fedtail_studies.results import Results
from fedtail_studies.tables import Row, Table

GRID = {"mean": "test.mean", "90th percentile": "test.p90"}
BY_SIZE = {"data-poor: mean": "poor.mean", "data-poor: deviation": "poor.std", "the others: mean": "rich.mean",
           "the others: deviation": "rich.std"}
PERSONAL = {"mean before": "before.mean", "mean after": "after.mean", "90th percentile before": "before.p90",
            "90th percentile after": "after.p90"}
AT_FIRST_RATE = {"mean after, first rate": "first_rate.mean", "90th percentile after, first rate": "first_rate.p90"}
LOSS = {"mean": "train.mean", "deviation over clients": "train.std", "90th percentile": "train.p90",
        "95th percentile": "train.p95"}
KEPT = {"mean": "test.mean", "90th percentile": "test.p90", "training loss, 90th percentile": "train.p90"}


def errors(results: Results, clients: str, printed: PrintedTable, source: str) -> list[Table]:
    return [Table(f"Error of test {clients}, %", tuple(COLUMNS), beside(rows(results, COLUMNS), printed, COLUMNS), source),
            Table("More statistics of the same errors, %", tuple(FURTHER), tuple(rows(results, FURTHER)))]


def grids(results: Results) -> Table:
    names = [name for kind in GRIDS for name in GRIDS[kind](results.plan)]
    return Table("Every value of the grids, %", tuple(GRID), rows_of(results, names, GRID))


def losses(results: Results, clients: str, names: Sequence[str]) -> Table:
    return Table(f"Loss of training {clients}, by mass", tuple(LOSS), rows_of(results, names, LOSS), digits=4)


def kept(results: Results) -> Table:
    return Table("theta = 0.5 with a threshold that is found every so many rounds", tuple(KEPT),
                 rows_of(results, periods(results.plan), KEPT), head="threshold")


def by_size(results: Results) -> Table:
    def row(name: str) -> Row:
        return Row(name, {column: [at(results, name, seed, path) for seed in results.seeds] for column, path in BY_SIZE.items()})
    below = " or ".join(map(str, sorted({results.numbers("FedAvg", seed)["poor_below"] for seed in results.seeds})))
    return Table(f"Error by the size of the client, %; data-poor is fewer than {below} images (200 in the paper)", tuple(BY_SIZE),
                 tuple(map(row, models(results.plan))))


def personal(results: Results, printed: PrintedTable, source: str, other_model: bool) -> Table:
    there = "first_rate" in results.numbers("FedAvg", results.seeds[0])["personal"]
    columns = PERSONAL | (AT_FIRST_RATE if there else {})

    def row(name: str) -> Row:
        return Row(name, {column: results.values(name, f"personal.{path}") for column, path in columns.items()},
                   {column: printed[name][path] for column, path in columns.items() if path in printed.get(name, {})})
    return Table("Personalised by ten epochs on half of a client's images, judged on the other half, %", tuple(columns),
                 tuple(map(row, models(results.plan))), source, other_model=other_model)


def chosen(results: Results, printed: str) -> Sequence[str]:
    """Notes: how long was trained, and which settings were taken."""
    plan, first = results.plan, results.numbers("FedAvg", results.seeds[0])["settings"]
    rate = with_edge(first["learning_rate"], plan["learning_rates"])
    tried = ", ".join(f"{rate:g} (training loss {text(results.numbers(f'learning rate {rate:g}', 0)['loss'])})"
                      for rate in plan["learning_rates"])
    picked = "; ".join(f"{kind}: {', '.join(validated(results, kind).values())}" for kind in GRIDS)
    made = [f"{first['rounds']} rounds of {plan['cohort']}: each training client takes part {plan['visits']:g} times on average. "
            f"Printed are {printed}.",
            f"Learning rate {rate} for all methods, as in the paper chosen for FedAvg, {_share(plan['rate_share'])}; tried were "
            f"{tried}. The paper's grid is not printed.",
            f"Grids: q {plan['powers']} (printed 0.001 to 10), tilt {plan['tilts']} (printed 0.1 to 200), mu {plan['proximal']} "
            f"(printed 1 to 0.001); {_share(plan['tuning_share'])}. mu, seed by seed: {settings_of(results, 'FedProx', 'mu')}.",
            f"Chosen on validation clients, seed by seed: {picked}."]
    if plan["lambdas"]:
        found = "; ".join(f"{name} {settings_of(results, name, 'lambda')}" for name in models(plan))
        made.append(f"lambda of {plan['lambdas']} (printed 1e-3 to 1e-8), seed by seed: {found}. Other methods take FedAvg's.")
    return made


def _share(share: float) -> str:
    return "with all visits" if share == 1 else f"with a share {share:g} of the visits"


def settings_of(results: Results, name: str, setting: str) -> str:
    return ", ".join(f"{results.numbers(name, seed)['settings'][setting]:g}" for seed in results.seeds)


def text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def with_edge(rate: float, tried: Sequence[float]) -> str:
    """A chosen rate, and whether a larger one might have been better still.

    >>> with_edge(0.3, [0.1, 0.3])
    '0.3 (the largest that was tried)'
    """
    return f"{rate:g} (the largest that was tried)" if len(tried) > 1 and rate == max(tried) else f"{rate:g}"
