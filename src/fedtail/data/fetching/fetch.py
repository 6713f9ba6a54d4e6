"""Fetch a public set: find or download its file, prepare it, say what came of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.data.fetching.catalogue import GLOVE, PublicSet, find_public_set
from fedtail.data.fetching.downloading import Progress, check_sha256, download, file_sha256

Note = Callable[[str], None]
RECORD = "source.json"
_LEAST = {"sent140": 50}                       # examples of a client, as in the papers; elsewhere all clients are kept


@dataclass(frozen=True)
class Wishes:
    """What a user wants other than the defaults.

    `file` is a file or folder at hand to use instead of a download, `url` another address, `sha256` another checksum, and
    `at_least` the fewest examples of a client that is kept; `again` prepares a set anew.
    """

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
    """One set that is being fetched: what is wanted, the folder `out` it goes to, the `cache` of downloads, and two callbacks.

    `progress` is called with the bytes so far and in all, `note` with sentences for the user.
    """

    public: PublicSet
    out: Path
    wishes: Wishes
    cache: Path
    progress: Progress
    note: Note

    @property
    def work_folder(self) -> Path:
        """The path of the hidden folder beside `out` in which the set is prepared; `fetch` deletes it afterwards."""
        return self.out.with_name(f".{self.out.name}.preparing")

    @property
    def fewest_examples(self) -> int:
        """The fewest examples of a client that is kept: the user's wish, by default 50 for sent140, as in the papers, else 1."""
        return _LEAST.get(self.public.name, 1) if self.wishes.at_least is None else self.wishes.at_least

    def obtain_file(self) -> Path:
        """The path of the file to prepare: the user's own (`wishes.file`), else the download, which is made if missing.

        A download is checked against its checksum; a given file only where it has the published name or the user gave a
        checksum. Raises FileNotFoundError where a given file is not there, WrongFile for another checksum, ConnectionError
        where the download fails.
        """
        source, wishes = self.public.source, self.wishes
        if wishes.file is None:
            source = source if wishes.url is None else replace(source, urls=(wishes.url,))
            return download(source, self.cache, self.progress, wishes.sha256)
        if not wishes.file.exists():
            raise FileNotFoundError(f"there is nothing at {wishes.file}. Pass {source.accepted_files}.")
        if wishes.file.is_file() and (wishes.sha256 or wishes.file.name == source.file):
            check_sha256(wishes.file, source, wishes.sha256)
        return wishes.file


def default_cache_folder() -> Path:
    """The folder where downloads are kept: `fedtail` in $XDG_CACHE_HOME or, where that is not set, in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtail"


def fetch(
    name: str, out: Path | None = None, wishes: Wishes = Wishes(), cache: Path | None = None,
    progress: Progress = lambda done, total: None, note: Note = lambda text: None,
) -> dict[str, Any]:
    """Fetch the public set `name` and prepare it in `out` (default: `data/NAME`); returns its record, a dict.

    The record has `set`, the counts of what was prepared, `populations` (folders), `holds` (counts of the whole file), `file`,
    `sha256`, `source` and `licence`, and is written to `source.json` in `out`; what is returned also has `folder`. A set that is
    there already is refused (FileExistsError) unless `wishes.again`; so is a folder with other files. Downloads are kept in
    `cache`. `progress` is called with the bytes so far and in all, `note` with sentences for the user. Raises ValueError for an
    unknown name, OSError where the disk is too small, ConnectionError where the download fails.
    """
    public = find_public_set(name)
    place = Path(os.path.abspath(out or Path("data") / name))
    fetching = Fetching(public, place, wishes, cache or default_cache_folder(), progress, note)
    if (place / RECORD).exists() and not wishes.again:
        raise FileExistsError(f"{place} holds {name} already. Use it, or pass --again to prepare it anew.")
    if place.exists() and any(place.iterdir()) and not (place / RECORD).exists():
        raise FileExistsError(f"{place} holds other files. Choose another folder with --out.")
    _check_disk_space(fetching)
    file = fetching.obtain_file()
    shutil.rmtree(fetching.work_folder, ignore_errors=True)
    fetching.work_folder.mkdir(parents=True)
    try:
        made = _PREPARE[name](fetching, file)
        record = {"set": name, **made, "file": file.name, "sha256": file_sha256(file) if file.is_file() else None,
                  "source": public.source.urls[0], "licence": public.licence}
        _note_differing_counts(fetching, record["holds"])
        (fetching.work_folder / "ready" / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _move_ready_folder(fetching)
    finally:
        shutil.rmtree(fetching.work_folder, ignore_errors=True)
    return {**record, "folder": str(place)}


def _prepare_femnist(fetching: Fetching, file: Path) -> dict[str, Any]:
    """Read FEMNIST from `file` and save it as one population of writers, in `ready` in the work folder of `fetching`.

    Returns entries of the record: `clients`, `examples`, `populations` (folders) and `holds`, the counts of the whole file.
    """
    from fedtail.data.fetching.femnist import read_femnist

    population, holds = read_femnist(file, fetching.work_folder, fetching.fewest_examples)
    population.save(fetching.work_folder / "ready")
    return {"clients": len(population), "examples": population.num_examples, "populations": ["."], "holds": holds}


def _prepare_shakespeare(fetching: Fetching, file: Path) -> dict[str, Any]:
    """Read Shakespeare from `file` and save it as one population of roles, in `ready` in the work folder of `fetching`.

    Returns entries of the record: `clients`, `examples`, `populations` (folders), `window`, and `holds`, the counts of the whole
    file.
    """
    from fedtail.data.fetching.shakespeare import read_shakespeare

    population, holds = read_shakespeare(file, fetching.work_folder, fetching.fewest_examples, fetching.wishes.window)
    population.save(fetching.work_folder / "ready")
    return {"clients": len(population), "examples": population.num_examples, "populations": ["."], "holds": holds,
            "window": fetching.wishes.window}


def _prepare_sent140(fetching: Fetching, file: Path) -> dict[str, Any]:
    """Read Sentiment140 from `file` and save two populations of accounts, and word vectors, in `ready` in the work folder.

    The work folder is that of `fetching`. Fetches GloVe's word vectors where they are missing. Returns entries of the record:
    `clients`, `examples`, `populations` (folders), `words`, `dimension`, and `holds`, the counts of the whole file.
    """
    from fedtail.data.fetching.sent140 import read_sent140

    forms, known, holds = read_sent140(file, _open_word_vectors(fetching), fetching.fewest_examples)
    for form, population in forms.items():
        population.save(fetching.work_folder / "ready" / form)
    known.save(fetching.work_folder / "ready")
    means = forms["means"]
    return {"clients": len(means), "examples": means.num_examples, "populations": list(forms), "holds": holds,
            "words": len(known.words) - 1, "dimension": known.vectors.shape[1]}


def _prepare_glove(fetching: Fetching, file: Path) -> dict[str, Any]:
    """Read GloVe from `file` and save its words and vectors in `ready` in the work folder of `fetching`.

    Returns entries of the record: `words`, `dimension`, an empty list of `populations`, and `holds`, the counts of the file.
    """
    from fedtail.data.fetching.words import WordVectors

    read = WordVectors.read_glove(file, fetching.wishes.dimension)
    read.save(fetching.work_folder / "ready")
    words = len(read.words)
    return {"words": words, "dimension": fetching.wishes.dimension, "populations": [], "holds": {"words": words}}


_PREPARE: dict[str, Callable[[Fetching, Path], dict[str, Any]]] = {
    "femnist": _prepare_femnist, "shakespeare": _prepare_shakespeare, "sent140": _prepare_sent140, "glove": _prepare_glove}


def _open_word_vectors(fetching: Fetching) -> Any:
    """The `WordVectors` in the folder that the user named or, by default, in the folder `glove` beside `fetching.out`.

    In the second case they are fetched first if missing, which may download them (ConnectionError where that fails). Raises
    FileNotFoundError where a folder that the user named holds none.
    """
    from fedtail.data.fetching.words import WordVectors

    folder = fetching.wishes.vectors or fetching.out.with_name(GLOVE.name)
    if fetching.wishes.vectors is None and not (folder / RECORD).exists():
        fetching.note(f"sent140 is built on word vectors, which go to {folder} first.")
        try:
            wishes = Wishes(dimension=fetching.wishes.dimension)
            fetch(GLOVE.name, folder, wishes, fetching.cache, fetching.progress, fetching.note)
        except ConnectionError as reason:
            raise ConnectionError(f"{reason}\nThese are the word vectors. With a file at hand: fedtail data fetch glove --from "
                                  f"FILE --out {folder}, then sent140 again; or name a folder of them with --vectors.") from None
    return WordVectors.open(folder)


def _check_disk_space(fetching: Fetching) -> None:
    """Raise OSError where the disk of `fetching.out` has less free space than preparing the published file takes.

    For a file that the user gave, which may be smaller, only a note is sent. Creates the parent folder of `out`.
    """
    fetching.out.parent.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(fetching.out.parent).free, fetching.public.disk
    if free < needed:
        text = (f"{fetching.out.parent} has {free / 1e9:.1f} GB free; preparing {fetching.public.name} takes "
                f"{needed / 1e9:.1f} GB.")
        if fetching.wishes.file is None:
            raise OSError(f"{text} Choose another place with --out.")
        fetching.note(text)


def _note_differing_counts(fetching: Fetching, holds: dict[str, int]) -> None:
    """Send the user a note for each count in `holds` that differs from that of the published file of `fetching.public`.

    `holds` are the counts of the file that was read, by name. For a file without a checksum this is the only check.
    """
    for what, count in fetching.public.holds:
        if what in holds and holds[what] != count:
            fetching.note(f"this file holds {holds[what]:,} {what}, the published one {count:,}.")


def _move_ready_folder(fetching: Fetching) -> None:
    """Rename the prepared folder `ready`, in the work folder of `fetching`, to its `out`.

    A folder already there is moved to the work folder, and back if the rename fails. So a crash leaves the old folder or none at
    `out`, never half of one.
    """
    old = fetching.work_folder / "old"
    if fetching.out.exists():
        fetching.out.rename(old)
    try:
        (fetching.work_folder / "ready").rename(fetching.out)
    except OSError:
        if old.exists():
            old.rename(fetching.out)
        raise
