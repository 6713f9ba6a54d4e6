"""What can be fetched: where it is, how long it is, what it must hash to, and who says so."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class PublicFile:
    """One file on the web. `checked_by` says who published the checksum; `instead` is what else may be handed over."""

    file: str
    urls: tuple[str, ...]
    size: int
    sha256: str
    checked_by: str
    instead: tuple[str, ...]

    @property
    def accepted_files(self) -> str:
        """The files that a user may give instead of a download, as text for a sentence: "a, b or c"."""
        first = (self.file, *self.instead[:-1])
        return f"{', '.join(first)} or {self.instead[-1]}"


@dataclass(frozen=True)
class PublicSet:
    """A public data set: its name, source and licence, what it `becomes` here, and the counts (`holds`) of the published file."""

    name: str
    about: str
    source: PublicFile
    licence: str
    becomes: str
    holds: tuple[tuple[str, int], ...]
    disk: int                                  # bytes needed while it is prepared


_LEAF = "a folder of LEAF's json files"
_TFF = "https://storage.googleapis.com/tff-datasets-public"

FEMNIST = PublicSet(
    "femnist", "handwritten characters of 62 classes by writer: LEAF's FEMNIST as TensorFlow Federated serves it",
    PublicFile("emnist_all.sqlite.lzma", (f"{_TFF}/emnist_all.sqlite.lzma",), 170_507_172,
               "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
               "one public repository that uses it, not by its makers", ("emnist_all.sqlite", _LEAF)),
    "NIST Special Database 19 is in the public domain; LEAF's preparation is BSD-2. Cite Cohen et al. 2017, Caldas et al. 2018.",
    "a population of writers: images (28, 28) float32 in [0, 1], 1 is paper; digits 0-9, capitals 10-35, small letters 36-61",
    (("clients", 3_400), ("examples", 749_068)), 9_600_000_000)

SHAKESPEARE = PublicSet(
    "shakespeare", "the plays by role: LEAF's Shakespeare as TensorFlow Federated serves it",
    PublicFile("shakespeare.sqlite.lzma", (f"{_TFF}/shakespeare.sqlite.lzma",), 1_329_828,
               "d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4",
               "FedJAX, from the same company, in its tests", ("shakespeare.sqlite", _LEAF)),
    "The text is in the public domain; LEAF's preparation is BSD-2. Cite Caldas et al. 2018.",
    "a population of roles: windows of 20 characters and the next one, in 53 classes (a-z, A-Z, other)",
    (("clients", 715), ("snippets", 18_424)), 500_000_000)

SENT140 = PublicSet(
    "sent140", "tweets by account with a positive or negative label: Sentiment140",
    PublicFile("trainingandtestdata.zip", ("https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
                                           "http://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip"), 81_363_704,
               "004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57",
               "CorpusLoaders.jl and others, not by its makers",
               ("training.1600000.processed.noemoticon.csv", _LEAF)),
    "Offered for research without a licence; tweets fall under Twitter's terms, so keep what is made of them to yourself. "
    "No text and no account names are stored. Cite Go, Bhayani, Huang 2009.",
    "two populations of accounts with 50 tweets or more: means, the average word vector of a tweet; words, its first 25 words as "
    "numbers, with their vectors",
    (("tweets", 1_600_000), ("accounts", 659_775)), 1_500_000_000)

GLOVE = PublicSet(
    "glove", "word vectors of 400,000 words: GloVe 6B",
    PublicFile("glove.6B.zip", ("https://nlp.stanford.edu/data/glove.6B.zip", "https://downloads.cs.stanford.edu/nlp/data/glove.6B.zip",
                                "https://huggingface.co/stanfordnlp/glove/resolve/main/glove.6B.zip"), 862_182_613,
               "617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
               "torchtext, Embeddings.jl and others, not by its makers", ("glove.6B.50d.txt",)),
    "Public Domain Dedication and License 1.0. Cite Pennington, Socher, Manning 2014.",
    "words.txt, a word a line, and vectors.npy (words, 50) float32; `sent140` is built on it",
    (("words", 400_000),), 1_200_000_000)

CATALOGUE = (FEMNIST, SHAKESPEARE, SENT140, GLOVE)


def find_public_set(name: str) -> PublicSet:
    """The entry of the catalogue called `name`; raises ValueError, which suggests the nearest name, where there is none."""
    for public in CATALOGUE:
        if public.name == name:
            return public
    near = difflib.get_close_matches(name, [public.name for public in CATALOGUE], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no public set called {name!r}; there are {', '.join(public.name for public in CATALOGUE)}.{hint}")
