"""`fedtail demo`: FedAvg next to Delta-FL on clients whose labels shift."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

TAIL_FRACTIONS = (None, 0.5, 0.25)
COLUMNS = (("mean", "mean"), ("90th percentile", "p90"), ("worst 10%", "worst10"))


def demo(
    rounds: int = typer.Option(1000, min=0, help="Rounds of training."),
    seed: int = typer.Option(0, help="Drives the clients' data, the cohorts and the training."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Train FedAvg and Delta-FL on 2500 clients with shifted labels, and compare 500 unseen clients.

    The synthetic setting of the Delta-FL paper (appendix D) without privacy: 100 clients a round, one full-gradient step of
    0.1, a linear model. All methods see the same cohorts.
    """
    rows = compare(rounds, seed, quiet=as_json or not sys.stderr.isatty())
    if as_json:
        typer.echo(json.dumps({"rows": rows}))
        return
    show(rows, rounds)


def compare(rounds: int, seed: int, quiet: bool) -> list[dict[str, Any]]:
    """Error over the test clients, in percent, for each method."""
    import fedtail
    from fedtail.data import label_shift
    from fedtail.models import SoftmaxRegression

    data = label_shift(seed=seed)
    base = fedtail.fedavg(100, learning_rate=0.1, batch_size=None)
    tails = [fedtail.delta_fl(theta, 100, learning_rate=0.1, batch_size=None) for theta in TAIL_FRACTIONS if theta]
    task = fedtail.Task(SoftmaxRegression(20, 10))
    with progress(rounds, quiet) as advance:
        trained = fedtail.train(fedtail.Family((base, *tails)), task, data.train, rounds=rounds, seed=seed, on_round=advance)
    errors = [fedtail.evaluate(module, data.test).error.summary() for module in trained.modules]
    return [{"method": "Delta-FL" if theta else "FedAvg", "tail_fraction": theta, **{key: 100 * error[key] for _, key in COLUMNS}}
            for theta, error in zip(TAIL_FRACTIONS, errors, strict=True)]


@contextmanager
def progress(rounds: int, quiet: bool) -> Iterator[Callable[[Any], None] | None]:
    """Gives a callback for `on_round`: a bar with rounds per second, or nothing when quiet."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        job = bars.add_task("three models, one cohort", total=rounds, speed="")

        def advance(done: Any) -> None:
            speed = bars.tasks[0].speed
            bars.update(job, completed=done.round, speed=f"{speed:.0f} rounds/s" if speed else "")

        yield advance


def show(rows: list[dict[str, Any]], rounds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    output = Table(title=f"Error on 500 unseen clients after {rounds} rounds, %", title_justify="left")
    output.add_column("method")
    for title, _ in COLUMNS:
        output.add_column(title, justify="right")
    for row in rows:
        theta = row["tail_fraction"]
        name = f"{row['method']}, worst {theta:.0%} of clients" if theta else row["method"]
        output.add_row(name, *(f"{row[key]:.2f}" for _, key in COLUMNS))
    Console().print(output)
