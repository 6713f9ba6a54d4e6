"""`fedtail data describe` and `fedtail data fetch`: who the clients of a file are, and public data sets."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.plain_help import PlainCommand
from fedtail.cli.terminal import print_errors_as_sentences, print_json

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Describe data by client, fetch public sets.")
_BAR = 40            # characters of the longest bar
_LARGE = 1e9         # from here on, numbers are written with exponents
_SHOWN_CLASSES = 8   # columns of a table of clients


@data.command("describe", cls=PlainCommand)
@print_errors_as_sentences
def describe(
    path: Path = typer.Argument(..., metavar="FILE", show_default=False,
                                help=".npz, .parquet, .csv, or a folder: LEAF, a saved population, a data set."),
    x: list[str] | None = options.X,
    y: str | None = options.Y,
    client: str | None = options.CLIENT,
    as_json: bool = options.JSON,
) -> None:
    """Say who the clients of a file are: how many, how large, how different, and what might go wrong."""
    from fedtail.data.describe import describe as described
    from fedtail.data.opening import open_any_data

    found = described(open_any_data(path, options.name_or_names(x), y, client), path.name)
    if as_json:
        print_json(found)
        return
    from rich.console import Console

    Console(highlight=False).print(render_description(found))


def render_description(description: dict[str, Any]) -> Any:
    """A `rich` Group to print for a description of data, the dict that `fedtail.data.describe` returns.

    It holds the name, facts, a histogram of examples per client or, for fewer than 20, each client by name, and warnings in
    yellow.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for title, value in _description_rows(description):
        facts.add_row(title, Text(value))
    sizes = _size_table(description) if description["by_client"] is None else _client_table(description)
    title = "examples per client, and how many clients hold that many" if description["by_client"] is None else "every client"
    heading = [Text(description["name"], style="bold underline")] if description["name"] else []
    warnings = [Text(f"! {warning}", style="yellow") for warning in description["warnings"]]
    return Group(*heading, facts, Text(f"\n{title}", style="bold"), sizes, *([Text()] if warnings else []), *warnings)


def _size_table(about: dict[str, Any]) -> Any:
    """A `rich` Table of the histogram of examples per client in a description of data."""
    from rich.table import Table

    sizes = Table.grid(padding=(0, 2))
    sizes.add_column(justify="right")
    sizes.add_column(style="cyan", no_wrap=True)
    sizes.add_column(justify="right")
    for span, bar, clients in _size_bars(about["sizes"]["histogram"]):
        sizes.add_row(span, bar, clients)
    return sizes


def _client_table(about: dict[str, Any]) -> Any:
    """A `rich` Table of each of few clients: name, examples, and how many of each class, or the mean of its numbers."""
    from rich.table import Table
    from rich.text import Text

    targets, rows = about["targets"], about["by_client"]
    labels = _class_names(targets) if len(targets.get("counts", ())) <= _SHOWN_CLASSES else {}
    heads = ["mean of y"] if targets["kind"] == "numbers" else list(labels.values()) or ["classes"]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in range(1 + len(heads)):
        table.add_column(justify="right")
    table.add_row(*(Text(str(head), style="dim") for head in ("client", "examples", *heads)))
    for row in rows:
        own = [_mean_text(row["mean"], targets["std"])] if targets["kind"] == "numbers" else \
            [f"{row['counts'][label]:,}" for label in labels] or [f"{row['classes']:,} of {targets['count']:,}"]
        table.add_row(Text(row["name"]), f"{row['examples']:,}", *own)
    return table


def _class_names(targets: dict[str, Any]) -> dict[str, str]:
    """What the classes are called, by their label as text, in a description's entry on targets."""
    names = targets.get("names", ())
    return {label: names[int(label)] if 0 <= int(label) < len(names) else f"class {label}" for label in targets.get("counts", ())}


def _mean_text(mean: Any, deviation: float) -> str:
    """The mean of a client's numbers as text, several for several outputs, to a tenth of their deviation; "-" where it has none.

    >>> _mean_text(546881.3, 21233.0), _mean_text([0.5, None], 0.3)
    ('546,881', '0.50, -')
    """
    each = mean if isinstance(mean, list) else [mean]
    digits = min(6, max(0, 1 - math.floor(math.log10(deviation)))) if deviation > 0 else 2
    shown = ["-" if one is None else f"{one:,.{digits}f}" if abs(one) < _LARGE else f"{one:.5g}" for one in each[:_SHOWN_CLASSES]]
    return ", ".join([*shown, *(["..."] if len(each) > _SHOWN_CLASSES else [])])


def _description_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts of `about`, a description of data, as pairs (title, text): clients, examples, inputs, targets, and more.

    They end with how clients differ, and the suggested model.
    """
    sizes, largest, few = about["sizes"], about["largest"], about["by_client"]
    shares = f", 10th and 90th percentile {sizes['p10']:,g} and {sizes['p90']:,g}" if few is None else ""
    rows = [
        ("clients", f"{about['clients']:,}"),
        ("examples", f"{about['examples']:,}"),
        ("per client", f"{sizes['min']:,} to {sizes['max']:,}, mean {sizes['mean']:,.1f}, median {sizes['median']:,g}{shares}"),
        ("largest client", f"{largest['name']} with {largest['share']:.2%} of the examples"),
        *((f"input {name}", _input_text(part)) for name, part in about["inputs"].items()),
        ("targets", _targets_text(about["targets"])),
        ("clients differ", _difference_text(about["difference"], few)),
        *((f"in {name}", _features_text(found)) for name, found in about["features"].items() if found is not None),
        *(("to conclude", sentence) for sentence in about["needs"]["sentences"]),
    ]
    if about["groups"] is not None:
        rows.append(("groups", f"{len(about['groups'])}, of {_counts_text(about['groups'])} clients"))
    return [*rows, ("start from", _suggested_call(about["suggested"]))]


def _input_text(part: dict[str, Any]) -> str:
    """Shape, dtype and range of one input as text, such as "8 x 8, float32, from 0 to 16"; "one number" for an empty shape.

    `part` is the entry on that input in a description of data.
    """
    shape = " x ".join(map(str, part["shape"])) or "one number"
    return f"{shape}, {part['dtype']}, from {part['min']:g} to {part['max']:g}"


def _targets_text(targets: dict[str, Any]) -> str:
    """The entry `targets` of a description as text: numbers with mean, deviation and range, or the classes with their counts.

    For sequences of classes, their average length as well.
    """
    if targets["kind"] == "numbers":
        each = "numbers" if targets["outputs"] == 1 else f"{targets['outputs']} numbers for each example"
        return f"{each}, mean {targets['mean']:g}, deviation {targets['std']:g}, from {targets['min']:g} to {targets['max']:g}"
    what = f"{targets['count']:,} classes" if targets["kind"] == "classes" else (
        f"sequences of {targets['length']['mean']:.1f} positions on average, {targets['count']:,} classes")
    few, many = (targets[name]["examples"] for name in ("rarest", "commonest"))
    counts = _counts_text(list(targets["counts"].values())) if "counts" in targets else f"{few:,} to {many:,}"
    names = targets.get("names", ())
    shown = ", ".join(names) if 0 < len(names) <= 5 else f"{names[0]} to {names[-1]}" if names else \
        f"{targets['min']} to {targets['max']}"
    return f"{what} ({shown}), {counts} of each"


def _difference_text(difference: dict[str, Any], few: list[dict[str, Any]] | None) -> str:
    """How much clients differ in their targets, as text: total variation of label distributions for classes.

    For numbers, the share of the variance that lies between clients, or "all targets are equal". `difference` is the entry of
    that name in a description of data, `few` its list of clients where they are few: those with one label are named.
    """
    if "total_variation" in difference:
        distance, shuffled, single = (difference[name] for name in ("total_variation", "if_shuffled", "single_label"))
        return (f"labels are {distance:.3f} from everybody's in total variation ({shuffled:.3f} if they were shuffled); "
                f"{_single_label_text(single, few)}")
    between, correlation = difference["variance_between"], difference["intraclass_correlation"]
    if between is None:
        return "all targets are equal"
    estimate = "" if correlation is None else f" (intraclass correlation {correlation:.3f})"
    return f"{between:.1%} of the variance of targets lies between clients{estimate}"


def _single_label_text(share: float, few: list[dict[str, Any]] | None) -> str:
    """Which clients have one label only: their share, or their names where there are few."""
    if few is None:
        return f"{share:.1%} of clients have one label"
    names = [row["name"] for row in few if row["classes"] == 1]
    return f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} one label only" if names else "each has several labels"


def _features_text(found: dict[str, Any]) -> str:
    """How much clients differ in the features of one input, as text; `found` is its entry under `features` of a description.

    The features that differ most are shown with how much that is beyond chance, by which they are ordered.
    """
    several = found["features"] > 1
    of_all = f" of {found['features']:,}" if found["compared"] < found["features"] else ""
    over = f", mean over {found['compared']:,}{of_all} features" if several else ""
    beyond = [f"{one['feature']} ({one['total_variation'] - one['if_shuffled']:.3f})" for one in found["most"] if several]
    most = f"; beyond that most in feature {', '.join(beyond)}" if beyond else ""
    return (f"features are {found['total_variation']:.3f} from everybody's in total variation over ten bins{over} "
            f"({found['if_shuffled']:.3f} if they were shuffled){most}")


def _suggested_call(suggested: dict[str, Any] | None) -> str:
    """The suggested model as a Python call, "SoftmaxRegression(features=64, classes=10)"; a sentence where it is None.

    None means that no built-in model fits the data.
    """
    if suggested is None:
        return "a module of your own: no linear model or image model of fedtail fits these inputs and targets"
    settings = ", ".join(f"{name}={value}" for name, value in suggested.items() if name != "part")
    return f"{suggested['part']}({settings})"


def _counts_text(counts: list[int]) -> str:
    """Up to five counts as a list, "10, 20, 30"; more as their range, "10 to 300"."""
    return ", ".join(f"{count:,}" for count in counts) if len(counts) <= 5 else f"{min(counts):,} to {max(counts):,}"


def _size_bars(histogram: list[dict[str, int]]) -> list[tuple[str, str, str]]:
    """For each bin of a histogram of client sizes the texts (range of sizes, bar, number of clients).

    The longest bar has 40 characters; bars are rounded up, so that only an empty bin has none.
    """
    most = max(part["clients"] for part in histogram)
    spans = [f"{part['from']:,}" if part["from"] == part["to"] else f"{part['from']:,}-{part['to']:,}" for part in histogram]
    return [(span, "█" * -(-_BAR * part["clients"] // most), f"{part['clients']:,}")
            for span, part in zip(spans, histogram, strict=True)]


@data.command("fetch", cls=PlainCommand)
@print_errors_as_sentences
def fetch(
    name: str | None = typer.Argument(None, metavar="NAME", help="femnist, shakespeare, sent140 or glove.", show_default=False),
    out: Path | None = typer.Option(None, "--out", metavar="DIR", show_default=False,
                                    help="Where it goes; by default data/NAME."),
    file: Path | None = typer.Option(None, "--from", metavar="FILE", show_default=False,
                                     help="The file, if you have it: as published, unpacked, or a folder of LEAF's json files."),
    at_least: int | None = typer.Option(None, "--at-least", metavar="N", min=1, show_default=False,
                                        help="Keep clients with so many examples; by default 50 for sent140, else all."),
    window: int = typer.Option(20, "--window", metavar="N", min=1, help="shakespeare: characters before the one to predict."),
    dimension: int = typer.Option(50, "--dimension", metavar="N", help="glove: 50, 100, 200 or 300 numbers to a word."),
    vectors: Path | None = typer.Option(None, "--vectors", metavar="DIR", show_default=False,
                                        help="sent140: a folder of word vectors; by default `glove` beside it, fetched first."),
    url: str | None = typer.Option(None, "--url", metavar="URL", help="Another address of the same file.", show_default=False),
    sha256: str | None = typer.Option(None, "--sha256", metavar="DIGEST", show_default=False,
                                      help="The checksum the file must have, in place of the published one."),
    cache: Path | None = typer.Option(None, "--cache", metavar="DIR", show_default=False,
                                      help="Where downloads are kept; by default fedtail in the user's cache folder."),
    again: bool = typer.Option(False, "--again", help="Prepare anew what is there."),
    show: bool = typer.Option(False, "--list", help="Show what there is: source, size, licence, what it becomes."),
    as_json: bool = options.JSON,
) -> None:
    """Download a public data set and prepare it by client. A download that was cut goes on where it ended."""
    from fedtail.data.fetching import CATALOGUE, Wishes
    from fedtail.data.fetching import fetch as fetched

    if show or name is None:
        print_json({"sets": [_catalogue_entry(public) for public in CATALOGUE]}) if as_json else _show_catalogue(CATALOGUE)
        return
    wishes = Wishes(file, url, sha256, at_least, window, dimension, vectors, again)
    with _download_bar() as progress:
        record = fetched(name, out, wishes, cache, progress, lambda text: typer.echo(text, err=True))
    if as_json:
        print_json(record)
    else:
        _show_fetch_record(record)


def _show_fetch_record(record: dict[str, Any]) -> None:
    """Print what `record`, that of a fetched data set, says: where it is, what it holds, its file and checksum, its licence."""
    place = Path(record["folder"])
    if record["populations"]:
        typer.echo(f"Wrote {place}: {record['clients']:,} clients, {record['examples']:,} examples. Look: fedtail data describe "
                   f"{place / record['populations'][0]}")
    else:
        typer.echo(f"Wrote {place}: {record['words']:,} words in {record['dimension']} dimensions.")
    typer.echo(f"From {record['file']}" + (f", SHA-256 {record['sha256']}." if record["sha256"] else "."))
    typer.echo(f"Licence: {record['licence']}")


def _catalogue_entry(public: Any) -> dict[str, Any]:
    """A public data set of the catalogue as a dict of plain values, for `--list --json`.

    Its keys are `name`, `about`, `file`, `urls`, `size`, `sha256`, `checked_by` (who published the checksum), `licence`,
    `becomes`, `instead` (other accepted files) and `disk` (the bytes it needs).
    """
    source = public.source
    return {"name": public.name, "about": public.about, "file": source.file, "urls": list(source.urls), "size": source.size,
            "sha256": source.sha256, "checked_by": source.checked_by, "licence": public.licence, "becomes": public.becomes,
            "instead": list(source.instead), "disk": public.disk}


def _show_catalogue(catalogue: Any) -> None:
    """Print each public data set of the catalogue: source, checksum, what it becomes, disk space, and licence."""
    for public in catalogue:
        source = public.source
        typer.echo(f"{public.name}: {public.about}\n"
                   f"  source    {source.urls[0]}, {source.size / 1e6:,.1f} MB; with --from also {' or '.join(source.instead)}\n"
                   f"  checksum  SHA-256 {source.sha256}, published by {source.checked_by}\n"
                   f"  becomes   {public.becomes}; up to {public.disk / 1e9:.1f} GB of disk while it is prepared\n"
                   f"  licence   {public.licence}\n")
    typer.echo("fedtail data fetch NAME downloads and prepares one.")


@contextmanager
def _download_bar() -> Iterator[Callable[[int, int], None]]:
    """A context that gives a function to call with (bytes so far, all bytes or 0) while a download goes on.

    The function draws a bar on stderr where that is a terminal; elsewhere it prints a line for every tenth.
    """
    if not sys.stderr.isatty():
        yield _DownloadProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("downloading", style="bold"), BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bars:
        task = bars.add_task("", total=None, visible=False)
        yield lambda done, total: bars.update(task, completed=done, total=total or None, visible=done < total or not total)


class _DownloadProgress:
    """Prints the progress of a download to stderr, one line for every tenth of it."""

    def __init__(self) -> None:
        """Begin with no line printed: the first call prints one."""
        self._last = -1

    def __call__(self, done: int, total: int) -> None:
        """Print `done` and `total` (bytes) to stderr whenever another tenth of the download is reached.

        Where the size is unknown, `total` is 0 and only the first call prints.
        """
        tenth = 10 * done // total if total else 0
        if tenth != self._last:
            typer.echo(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB", err=True)
            self._last = tenth
