"""Word vectors: GloVe's text files as an array, and the words of a tweet."""

from __future__ import annotations

import html
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

_ELSEWHERE = re.compile(r"https?://\S+|www\.\S+|@\w+")                 # addresses and accounts: GloVe 6B has no word for them
_WORD = re.compile(r"[a-z]+(?=n't)|n't|'[a-z]+|[a-z]+|[0-9]+|[^\w\s]")


def split_words(text: str) -> list[str]:
    """The tokens of a tweet, `text`, in order: lower-case words, numbers and single punctuation marks.

    Contractions are split as in GloVe's corpus; web addresses, @accounts and letters other than a-z are dropped; HTML
    entities are decoded.

    >>> split_words("@you I can't &amp; won't, see http://x.y 2morrow")
    ['i', 'ca', "n't", '&', 'wo', "n't", ',', 'see', '2', 'morrow']
    """
    return _WORD.findall(_ELSEWHERE.sub(" ", html.unescape(text).lower()))


@dataclass(frozen=True)
class WordVectors:
    """Words and a vector for each."""

    words: list[str]
    vectors: np.ndarray                        # (words, dimension) float32

    @classmethod
    def read_glove(cls, path: Path, dimension: int) -> WordVectors:
        """Read all words and vectors from the file at `path`: a GloVe text file, or the archive glove.6B.zip.

        Of the archive, `glove.6B.{dimension}d.txt` is read. Raises ValueError where a line does not have `dimension` numbers, the
        file is empty, or the archive lacks that file.
        """
        words: list[str] = []
        rows: list[np.ndarray] = []
        with open_zip_member_or_file(path, f"glove.6B.{dimension}d.txt") as lines:
            for line in lines:
                word, _, numbers = line.decode("utf-8").rstrip("\n").partition(" ")
                row = np.array(numbers.split(" "), np.float32)
                if len(row) != dimension:
                    raise ValueError(f"{path.name}, line {len(words) + 1}: {len(row)} numbers for {word!r}, {dimension} are "
                                     "needed. Pass the file of that dimension, or another --dimension.")
                words.append(word)
                rows.append(row)
        if not rows:
            raise ValueError(f"{path.name} holds no word vectors.")
        return cls(words, np.stack(rows))

    @classmethod
    def open(cls, folder: Path) -> WordVectors:
        """The words and vectors that `save` wrote to a folder; the vectors are memory-mapped, read only.

        Raises FileNotFoundError where a file is missing, ValueError where there are not as many vectors as words.
        """
        try:
            words = (folder / "words.txt").read_text(encoding="utf-8").split("\n")[:-1]
            vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as reason:
            raise FileNotFoundError(f"there are no word vectors in {folder}: it lacks {Path(reason.filename).name}. Write them "
                                    "with fedtail data fetch glove.") from None
        if len(words) != len(vectors):
            raise ValueError(f"{folder} holds {len(words)} words and {len(vectors)} vectors. Fetch them again.")
        return cls(words, vectors)

    def save(self, folder: Path) -> None:
        """Write `words.txt`, one word a line, and `vectors.npy` into a folder, which is created.

        Files of these names are replaced.
        """
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "vectors.npy", self.vectors, allow_pickle=False)
        (folder / "words.txt").write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8", newline="\n")

    def select_words(self, wanted: Iterable[str]) -> WordVectors:
        """A copy with only the words in `wanted`, in their order here, after an empty word with a zero vector, for padding.

        Words in `wanted` without a vector are left out.
        """
        wanted = set(wanted)
        rows = [row for row, word in enumerate(self.words) if word in wanted]
        empty = np.zeros((1, self.vectors.shape[1]), np.float32)
        return WordVectors(["", *(self.words[row] for row in rows)], np.concatenate([empty, self.vectors[rows]]))


@contextmanager
def open_zip_member_or_file(path: Path, member: str) -> Iterator[IO[bytes]]:
    """A context manager that opens a file for reading bytes: `member` of it where `path` is a zip archive, else the file itself.

    Raises ValueError where the archive lacks `member`.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        if member not in archive.namelist():
            raise ValueError(f"{path.name} has no {member}; it holds {', '.join(archive.namelist())}.")
        with archive.open(member) as file:
            yield file
