"""Sent140: tweets by account, as word vectors; and how far a draw of it can test what the paper says.

From LEAF's files or the archive with GloVe, from the folder that `fedtail data fetch sent140` makes, or from arrays of tokens and
vectors. The paper keeps accounts with 50 tweets; where hardly any has so many, those with three are kept, and the page says so.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from fedtail.data import Population
from fedtail.data.fetching.sent140 import read_sent140
from fedtail.data.fetching.words import WordVectors
from fedtail_studies.compared.courses import Sides
from fedtail_studies.study import Data, Needs

ACCOUNTS, AT_LEAST, FEW, LENGTH, WIDTH = 877, 50, 3, 25, 50      # of the paper, but for FEW: tweets where accounts are thin
POOR = 100                                                     # tweets, [PLMH23, section C.4]
ADVICE = ("Write --data DIR: a folder made by `fedtail data fetch sent140`; one with LEAF's json files and glove.6B.50d.txt; or "
          "one with sent140.npz (x tokens, length, y, client) and glove100.npz (vectors, has_vector).")


def read_tweets(place: Path) -> Data:
    """Accounts with 50 tweets or more, or with three where fewer than a hundred accounts have so many."""
    people = _population(place)
    thin = int((people.size >= AT_LEAST).sum()) < 100
    people = people.at_least(FEW if thin else AT_LEAST)
    if len(people) < 4:
        raise ValueError(f"{place} holds {len(people)} accounts with {FEW} tweets or more; four are needed. {ADVICE}")
    papers = not thin and abs(len(people) - ACCOUNTS) <= 10
    return Data(f"Sent140, {len(people)} accounts", people, papers, _about(people, thin))


def _about(people: Population, thin: bool) -> str:
    text = (f"They are {len(people)} accounts with {FEW if thin else AT_LEAST} tweets or more, median "
            f"{int(people.size.median())}, at most {int(people.size.max())}; the paper has {ACCOUNTS} with {AT_LEAST} or more, "
            "median 69.")
    few = " With so few tweets an account's error is one of a few fractions: percentiles of it say little."
    return text + few if thin else text


def _population(place: Path) -> Population:
    if (place / "words" / "population.json").is_file():
        return _of_vectors(Population.open(place / "words"), np.asarray(WordVectors.open(place).vectors))
    tokens = _first(place, "sent140.npz", "sent140_by_user/sent140.npz")
    vectors = _first(place, "glove100.npz", "glove_subset/glove100.npz", "../glove_subset/glove100.npz")
    if tokens and vectors:
        return _from_tokens(tokens, vectors)
    glove = _first(place, "glove.6B.50d.txt", "glove.6B.zip")
    leaf = next((folder for folder in (place, place / "sent140", place / "all_data") if any(folder.glob("*.json"))), None)
    if not (glove and leaf):
        raise FileNotFoundError(f"there is no Sent140 with word vectors in {place}. {ADVICE}")
    people, known, _ = read_sent140(leaf, WordVectors.read_glove(glove, WIDTH), AT_LEAST)
    return _of_vectors(people["words"], known.vectors)


def _first(place: Path, *names: str) -> Path | None:
    return next((place / name for name in names if (place / name).is_file()), None)


def _of_vectors(people: Population, vectors: np.ndarray) -> Population:
    """The clients of a population with their words as vectors, (examples, 25, 50)."""
    owner, rows = people.example_clients_and_rows()
    assert isinstance(people.inputs, dict)
    tokens, lengths = (people.inputs[name][rows].numpy() for name in ("sequence", "lengths"))
    inputs = {"sequence": vectors[tokens].astype(np.float32), "lengths": lengths}
    return Population.from_arrays(inputs, people.targets[rows], owner)


def _from_tokens(tokens: Path, vectors: Path) -> Population:
    """Words without a vector are left out; 100 dimensions become 50 by principal components."""
    with np.load(vectors, allow_pickle=False) as arrays:
        table, known = arrays["vectors"].astype(np.float32), arrays["has_vector"]
    with np.load(tokens, allow_pickle=False) as arrays:
        x, y, client, length = (arrays[name] for name in ("x", "y", "client", "length"))
    often = np.bincount(client)[client] >= FEW
    x, y, client, length = x[often].astype(np.int64), y[often].astype(np.int64), client[often], length[often]
    words = known[x] & (np.arange(x.shape[1]) < length[:, None])
    order = (~words).argsort(axis=1, kind="stable")                       # those with a vector first
    x = np.where(np.take_along_axis(words, order, 1), np.take_along_axis(x, order, 1), 0)[:, :LENGTH]
    narrow = principal(table, known, WIDTH)
    inputs = {"sequence": narrow[x], "lengths": words.sum(1).clip(max=LENGTH)}
    return Population.from_arrays(inputs, y, client)


def principal(table: np.ndarray, known: np.ndarray, width: int) -> np.ndarray:
    """The first principal components of the vectors; words without one stay zero."""
    if table.shape[1] <= width:
        return table
    centred = table[known] - table[known].mean(0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    narrow = np.zeros((len(table), width), np.float32)
    narrow[known] = centred @ directions[:, ::-1][:, :width]
    return narrow


@lru_cache(maxsize=2)
def accounts(data: Data, most: int, means: bool, device: str) -> Sides:
    """The two halves, the same for every seed as in the paper; tweets as words, or as the mean of their words."""
    share = min(most, len(data.population) // 2) / len(data.population)
    train, test = ((mean_vectors(half) if means else half) for half in data.population.split((share, share), 0))
    return Sides(train, test, POOR).to(device)


def mean_vectors(people: Population) -> Population:
    """The clients with every tweet as the mean of its word vectors, (examples, width)."""
    owner, rows = people.example_clients_and_rows()
    assert isinstance(people.inputs, dict)
    words, lengths = people.inputs["sequence"][rows], people.inputs["lengths"][rows]
    within = torch.arange(words.shape[1]) < lengths[:, None]
    means = (words * within[..., None]).sum(1) / lengths.clamp(min=1)[:, None]
    return Population.from_arrays(means, people.targets[rows], owner)


SENT140 = Needs("Sent140", read_tweets, ADVICE)
