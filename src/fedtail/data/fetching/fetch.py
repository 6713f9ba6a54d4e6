"""Fetch a public set: find or download its file, prepare it, say what came of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.data.fetching.catalogue import GLOVE, PublicSet, named
from fedtail.data.fetching.downloading import Progress, check_file, download, sha256_of

Note = Callable[[str], None]
RECORD = "source.json"
_LEAST = {"sent140": 50}                       # examples of a client, as in the papers; elsewhere all clients are kept


@dataclass(frozen=True)
class Wishes:
    """What a user may want otherwise: a file at hand, another address or checksum, larger clients, wider windows."""

    file: Path | None = None
    url: str | None = None
    sha256: str | None = None
    at_least: int | None = None
    window: int = 20                           # characters before the one to predict: shakespeare
    dimension: int = 50                        # of word vectors: glove, and by it sent140
    vectors: Path | None = None                # a folder that `fetch glove` wrote: sent140
    again: bool = False


@dataclass(frozen=True)
class Fetching:
    """One set on its way: what is wanted, where it goes, where downloads are kept, who is notified."""

    public: PublicSet
    out: Path
    wishes: Wishes
    cache: Path
    progress: Progress
    note: Note

    @property
    def work(self) -> Path:
        """For what is too large for memory while it is prepared; removed afterwards."""
        return self.out.with_name(f".{self.out.name}.preparing")

    @property
    def at_least(self) -> int:
        """The least number of examples of a client that is kept: the user's, or the papers'."""
        return _LEAST.get(self.public.name, 1) if self.wishes.at_least is None else self.wishes.at_least

    def file(self) -> Path:
        """The file handed over, or else downloaded, with the checksum it must have."""
        source, wishes = self.public.source, self.wishes
        if wishes.file is None:
            source = source if wishes.url is None else replace(source, urls=(wishes.url,))
            return download(source, self.cache, self.progress, wishes.sha256)
        if not wishes.file.exists():
            raise FileNotFoundError(f"there is nothing at {wishes.file}. Pass {source.forms}.")
        if wishes.file.is_file() and (wishes.sha256 or wishes.file.name == source.file):
            check_file(wishes.file, source, wishes.sha256)
        return wishes.file


def default_cache() -> Path:
    """Where downloads are kept: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtail"


def fetch(
    name: str, out: Path | None = None, wishes: Wishes = Wishes(), cache: Path | None = None,
    progress: Progress = lambda done, total: None, note: Note = lambda text: None,
) -> dict[str, Any]:
    """Fetch and prepare a set; the record that is also written to `source.json`: folders, counts, and the file's checksum.

    A folder that has been prepared is left alone unless `wishes.again`.
    """
    public = named(name)
    place = Path(os.path.abspath(out or Path("data") / name))
    going = Fetching(public, place, wishes, cache or default_cache(), progress, note)
    if (place / RECORD).exists() and not wishes.again:
        raise FileExistsError(f"{place} holds {name} already. Use it, or pass --again to prepare it anew.")
    if place.exists() and any(place.iterdir()) and not (place / RECORD).exists():
        raise FileExistsError(f"{place} holds other files. Choose another folder with --out.")
    _check_room(going)
    file = going.file()
    shutil.rmtree(going.work, ignore_errors=True)
    going.work.mkdir(parents=True)
    try:
        made = _PREPARE[name](going, file)
        record = {"set": name, **made, "file": file.name, "sha256": sha256_of(file) if file.is_file() else None,
                  "source": public.source.urls[0], "licence": public.licence}
        _note_counts(going, record["holds"])
        (going.work / "ready" / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _put_in_place(going)
    finally:
        shutil.rmtree(going.work, ignore_errors=True)
    return {**record, "folder": str(place)}


def _femnist(going: Fetching, file: Path) -> dict[str, Any]:
    from fedtail.data.fetching.femnist import read_femnist

    population, holds = read_femnist(file, going.work, going.at_least)
    population.save(going.work / "ready")
    return {"clients": len(population), "examples": population.num_examples, "populations": ["."], "holds": holds}


def _shakespeare(going: Fetching, file: Path) -> dict[str, Any]:
    from fedtail.data.fetching.shakespeare import read_shakespeare

    population, holds = read_shakespeare(file, going.work, going.at_least, going.wishes.window)
    population.save(going.work / "ready")
    return {"clients": len(population), "examples": population.num_examples, "populations": ["."], "holds": holds,
            "window": going.wishes.window}


def _sent140(going: Fetching, file: Path) -> dict[str, Any]:
    from fedtail.data.fetching.sent140 import read_sent140

    forms, known, holds = read_sent140(file, _vectors(going), going.at_least)
    for form, population in forms.items():
        population.save(going.work / "ready" / form)
    known.save(going.work / "ready")
    means = forms["means"]
    return {"clients": len(means), "examples": means.num_examples, "populations": list(forms), "holds": holds,
            "words": len(known.words) - 1, "dimension": known.vectors.shape[1]}


def _glove(going: Fetching, file: Path) -> dict[str, Any]:
    from fedtail.data.fetching.words import WordVectors

    read = WordVectors.read_glove(file, going.wishes.dimension)
    read.save(going.work / "ready")
    return {"words": len(read.words), "dimension": going.wishes.dimension, "populations": [], "holds": {"words": len(read.words)}}


_PREPARE: dict[str, Callable[[Fetching, Path], dict[str, Any]]] = {
    "femnist": _femnist, "shakespeare": _shakespeare, "sent140": _sent140, "glove": _glove}


def _vectors(going: Fetching) -> Any:
    """The word vectors named, or those beside the set, fetched first if they are not there."""
    from fedtail.data.fetching.words import WordVectors

    folder = going.wishes.vectors or going.out.with_name(GLOVE.name)
    if going.wishes.vectors is None and not (folder / RECORD).exists():
        going.note(f"sent140 is built on word vectors, which go to {folder} first.")
        try:
            fetch(GLOVE.name, folder, Wishes(dimension=going.wishes.dimension), going.cache, going.progress, going.note)
        except ConnectionError as reason:
            raise ConnectionError(f"{reason}\nThese are the word vectors. With a file at hand: fedtail data fetch glove --from "
                                  f"FILE --out {folder}, then sent140 again; or name a folder of them with --vectors.") from None
    return WordVectors.open(folder)


def _check_room(going: Fetching) -> None:
    """The published file needs so much; one at hand may be smaller."""
    going.out.parent.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(going.out.parent).free, going.public.disk
    if free < needed:
        text = f"{going.out.parent} has {free / 1e9:.1f} GB free; preparing {going.public.name} takes {needed / 1e9:.1f} GB."
        if going.wishes.file is None:
            raise OSError(f"{text} Choose another place with --out.")
        going.note(text)


def _note_counts(going: Fetching, holds: dict[str, int]) -> None:
    """What a file holds beside what the published one does: all there is to go by where a checksum is not known."""
    for what, count in going.public.holds:
        if what in holds and holds[what] != count:
            going.note(f"this file holds {holds[what]:,} {what}, the published one {count:,}.")


def _put_in_place(going: Fetching) -> None:
    """Prepared beside its place and then renamed: a crash leaves the old folder or none, never half of one."""
    old = going.work / "old"
    if going.out.exists():
        going.out.rename(old)
    try:
        (going.work / "ready").rename(going.out)
    except OSError:
        if old.exists():
            old.rename(going.out)
        raise
