"""`fedtail data fetch`: public data sets, downloaded and prepared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.errors import told
from fedtail.cli.tables import print_json


@told
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
        print_json({"sets": [_entry(public) for public in CATALOGUE]}) if as_json else _show(CATALOGUE)
        return
    wishes = Wishes(file, url, sha256, at_least, window, dimension, vectors, again)
    with _bar() as progress:
        record = fetched(name, out, wishes, cache, progress, lambda text: typer.echo(text, err=True))
    if as_json:
        print_json(record)
    else:
        _report(record)


def _report(record: dict[str, Any]) -> None:
    place = Path(record["folder"])
    if record["populations"]:
        typer.echo(f"Wrote {place}: {record['clients']:,} clients, {record['examples']:,} examples. Look: fedtail data describe "
                   f"{place / record['populations'][0]}")
    else:
        typer.echo(f"Wrote {place}: {record['words']:,} words in {record['dimension']} dimensions.")
    typer.echo(f"From {record['file']}" + (f", SHA-256 {record['sha256']}." if record["sha256"] else "."))
    typer.echo(f"Licence: {record['licence']}")


def _entry(public: Any) -> dict[str, Any]:
    source = public.source
    return {"name": public.name, "about": public.about, "file": source.file, "urls": list(source.urls), "size": source.size,
            "sha256": source.sha256, "checked_by": source.checked_by, "licence": public.licence, "becomes": public.becomes,
            "instead": list(source.instead), "disk": public.disk}


def _show(catalogue: Any) -> None:
    for public in catalogue:
        source = public.source
        typer.echo(f"{public.name}: {public.about}\n"
                   f"  source    {source.urls[0]}, {source.size / 1e6:,.1f} MB; with --from also {' or '.join(source.instead)}\n"
                   f"  checksum  SHA-256 {source.sha256}, published by {source.checked_by}\n"
                   f"  becomes   {public.becomes}; up to {public.disk / 1e9:.1f} GB of disk while it is prepared\n"
                   f"  licence   {public.licence}\n")
    typer.echo("fedtail data fetch NAME downloads and prepares one.")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal; elsewhere a line for every tenth."""
    if not sys.stderr.isatty():
        yield _Tenths()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("downloading", style="bold"), BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bars:
        task = bars.add_task("", total=None, visible=False)
        yield lambda done, total: bars.update(task, completed=done, total=total or None, visible=done < total or not total)


class _Tenths:
    """Tells of a download without a terminal."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if tenth != self._last:
            typer.echo(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB", err=True)
            self._last = tenth
