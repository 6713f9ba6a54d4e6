"""Sentiment140: tweets by account."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedtail.data.fetching.words import WordVectors, open_zip_member_or_file, split_words
from fedtail.data.leaf import leaf_files, read_users
from fedtail.data.population import Population

MEMBER = "training.1600000.processed.noemoticon.csv"
LENGTH = 25                                    # words of a tweet that are kept, as in LEAF
Tweet = tuple[str, int, str]                   # account, 1 where positive, text


def read_sent140(path: Path, vectors: WordVectors, at_least: int) -> tuple[dict[str, Population], WordVectors, dict[str, int]]:
    """Read Sentiment140 as populations of the accounts with at least `at_least` tweets: (populations, vectors, counts).

    `path` is the archive, its training file, or a folder of LEAF's json files; it is read twice. The populations are `means`,
    the average word vector of a tweet, and `words`, its first 25 words as row numbers of the returned vectors, which hold
    only words that occur. Words without a vector are left out; accounts are numbered, not named. `counts` has the `tweets`
    and `accounts` of the whole file. Raises ValueError where no account is left.
    """
    counts = Counter(account for account, _, _ in read_tweets(path))
    number = {account: place for place, account in enumerate(sorted(name for name, count in counts.items() if count >= at_least))}
    if not number:
        raise ValueError(f"no account has {at_least} tweets. Lower --at-least.")
    kept = [(number[account], label, split_words(text)) for account, label, text in read_tweets(path) if account in number]
    client, y = (np.array(side) for side in zip(*((who, label) for who, label, _ in kept), strict=True))
    known = vectors.select_words(word for *_, words in kept for word in words)
    tokens, lengths = _word_numbers([words for *_, words in kept], known)
    words = {"sequence": tokens[:, :LENGTH].copy(), "lengths": lengths.clip(max=LENGTH)}
    population = {"means": Population.from_arrays(_mean_vectors(tokens, lengths, known.vectors), y, client),
              "words": Population.from_arrays(words, y, client)}
    return population, known, {"tweets": sum(counts.values()), "accounts": len(counts)}


def read_tweets(path: Path) -> Iterator[Tweet]:
    """Iterate over all tweets with a positive or negative label, as (account, 1 where positive else 0, text).

    `path` is the archive, its training file, or a folder of LEAF's json files. Neutral tweets are left out, as is the archive's
    test file, which has few accounts. Raises ValueError where a row is not Sentiment140's.
    """
    if path.is_dir():
        for file in leaf_files(path):
            for account, x, y in read_users(file):
                yield from ((account, int(label), row[-1]) for row, label in zip(x, y, strict=True))
        return
    with open_zip_member_or_file(path, MEMBER) as table, io.TextIOWrapper(table, encoding="latin-1", newline="") as lines:
        for place, row in enumerate(csv.reader(lines), 1):
            if len(row) != 6 or row[0] not in ("0", "2", "4"):
                raise ValueError(f"{path.name}, row {place}: six columns are needed, the first 0, 2 or 4, got {row[:2]} and "
                                 f"{len(row)} columns. Is it Sentiment140?")
            if row[0] != "2":
                yield row[4], int(row[0] == "4"), row[5]


def _word_numbers(texts: list[list[str]], known: WordVectors) -> tuple[np.ndarray, np.ndarray]:
    """Each tweet's words as row numbers in `known`, (tweets, width) int32 padded with 0, and how many they are, (tweets,).

    `texts` holds each tweet's words in order. The width is that of the longest tweet, at least 25. Words that `known` lacks are
    left out.
    """
    row = {word: place for place, word in enumerate(known.words) if place}
    numbers = [[row[word] for word in words if word in row] for words in texts]
    lengths = np.array([len(words) for words in numbers])
    tokens = np.zeros((len(texts), max(LENGTH, lengths.max())), np.int32)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = [number for words in numbers for number in words]
    return tokens, lengths


def _mean_vectors(tokens: np.ndarray, lengths: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """The average vector of each tweet's words, (tweets, dimension) float32; a zero vector for a tweet without words.

    `tokens` are row numbers of `vectors`, padded with 0, whose vector must be zero; `lengths` says how many are words.
    """
    means = np.empty((len(tokens), vectors.shape[1]), np.float32)
    for begin in range(0, len(tokens), 4096):
        block = slice(begin, begin + 4096)
        means[block] = vectors[tokens[block]].sum(1) / lengths[block].clip(min=1)[:, None]      # padding has the empty vector
    return means
