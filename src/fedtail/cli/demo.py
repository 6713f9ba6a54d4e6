"""`fedtail demo`: FedAvg next to Delta-FL on clients whose labels shift."""

from __future__ import annotations

from typing import Any

import typer

from fedtail.cli.terminal import INTERRUPTED, Watcher, exit_with_message, print_json

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
    rows, answers = train_and_evaluate(rounds, seed, quiet=as_json)
    if as_json:
        print_json({"rows": rows, "answers": answers})
        return
    show_errors(rows, rounds)
    from fedtail.runs.answer_words import confidence_words

    for one in answers:
        typer.secho(one["sentence"], bold=True)
    told = confidence_words(answers[0]["confidence"], answers[0]["compared"])
    typer.echo(f"In brackets: {told} for new clients and these models; observed error of clients of 100 examples.")


def train_and_evaluate(rounds: int, seed: int, quiet: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train FedAvg and two Delta-FL models for `rounds` rounds; returns a row for each, and an answer for each against FedAvg.

    All see the same cohorts; `seed` draws the data and drives the training. The keys of a row are `method`, `tail_fraction` (None
    for FedAvg), `mean`, `p90` and `worst10`, the last three of the error over test clients in percent; answers are those of
    `answer_from_values`. `quiet` shows no progress bar. After a Ctrl-C it raises `typer.Exit` with code 130.
    """
    import fedtail
    from fedtail.data import label_shift
    from fedtail.models import SoftmaxRegression
    from fedtail.runs.answers import answer_from_values
    from fedtail.runs.values_by_client import ByClient

    data = label_shift(seed=seed)
    base = fedtail.fedavg(100, learning_rate=0.1, batch_size=None)
    tails = [fedtail.delta_fl(theta, 100, learning_rate=0.1, batch_size=None) for theta in TAIL_FRACTIONS if theta]
    task = fedtail.Task(SoftmaxRegression(20, 10))
    with Watcher(quiet=quiet).show_progress() as watcher:
        watcher.begin("three models, one cohort", seed, 0, rounds)
        trained = fedtail.train(fedtail.Family((base, *tails)), task, data.train, rounds=rounds, seed=seed,
                                progress=False, on_round=watcher.advance)
    if watcher.stop:
        exit_with_message("interrupted; a demo keeps nothing.", INTERRUPTED)
    found = [fedtail.evaluate(module, data.test).error for module in trained.modules]
    rows = [{"method": "Delta-FL" if theta else "FedAvg", "tail_fraction": theta,
             **{key: 100 * error.statistic(key) for _, key in COLUMNS}}
            for theta, error in zip(TAIL_FRACTIONS, found, strict=True)]
    by_client: list[ByClient] = [dict(enumerate(error.values.tolist())) for error in found]
    others = zip(rows[1:], by_client[1:], strict=True)
    return rows, [answer_from_values(model_name(row), [mine], by_client[:1], compared=len(tails)) for row, mine in others]


def model_name(row: dict[str, Any]) -> str:
    """The name of a model of the demo: "FedAvg", or "Delta-FL, worst 50% of clients"."""
    return f"{row['method']}, worst {row['tail_fraction']:.0%} of clients" if row["tail_fraction"] else row["method"]


def show_errors(rows: list[dict[str, Any]], rounds: int) -> None:
    """Print the demo's table: mean, 90th percentile and worst tenth of the error over test clients, one line for each model.

    `rows` are those of `train_and_evaluate`, `rounds` is only for the title.
    """
    from fedtail.cli.terminal import show_table

    cells = [[model_name(row), *(f"{row[key]:.2f}" for _, key in COLUMNS)] for row in rows]
    show_table(f"Error on 500 unseen clients after {rounds} rounds, %", ["method", *(title for title, _ in COLUMNS)], cells)
