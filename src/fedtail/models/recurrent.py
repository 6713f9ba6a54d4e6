"""Recurrent models of the papers: words to a sentiment, characters to the next one.

Sequences are padded at the end, (examples, time); `lengths` (examples,) says how much of each is real, all of it where
absent. What stands in the padding, and how much there is, changes neither outputs nor gradients: the networks read
forwards, and padding is blanked first, so that no number in it (not even NaN, not a token -1) can matter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as look_up


class LSTMClassifier(nn.Module):
    """Class scores from the last hidden state of an LSTM on word vectors, "Sent140 RNN" of [PLMH23, section 7].

    `embedding` is a table of word vectors (vocabulary, dimension), or that shape for a random table; sequences are then
    tokens. Frozen it is a buffer: saved with the module, neither trained nor sent. With `embedding=None` and a
    `dimension`, sequences are word vectors already, (examples, time, dimension). An empty one has hidden state zero.

    >>> model = LSTMClassifier((1000, 50))
    >>> model(torch.tensor([[4, 7, 9], [5, 0, 0]]), lengths=torch.tensor([3, 1])).shape
    torch.Size([2, 2])
    """

    embedding: Tensor | None

    def __init__(
        self, embedding: Tensor | tuple[int, int] | None = None, hidden: int = 50, classes: int = 2, layers: int = 1,
        frozen_embedding: bool = True, dimension: int | None = None,
    ) -> None:
        """Make an LSTM of `layers` layers with `hidden` units, and a linear layer to `classes` scores.

        `embedding` is a table of word vectors, or its shape, for a random one; it is a buffer that is not trained or, with
        `frozen_embedding=False`, a trained parameter. Without one, `dimension` is that of the vectors in the input. All but a
        given table is drawn from PyTorch's global generator, so seed that before. Raises ValueError where neither is given, or
        the two do not fit.
        """
        super().__init__()
        table = torch.randn(embedding) if isinstance(embedding, tuple) else embedding
        table = None if table is None else table.detach()
        width = _vector_dimension(table, dimension)
        if table is None or frozen_embedding:
            self.register_buffer("embedding", table)
        else:
            self.embedding = nn.Parameter(table.clone())
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.linear = nn.Linear(hidden, classes)

    def forward(self, sequence: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Class scores (examples, classes) of sequences that are padded at the end.

        They are tokens (examples, time) where the model has an embedding, else word vectors (examples, time, dimension).
        `lengths` (examples,) is how many positions are real; None means all. ValueError for word vectors of another shape.
        """
        sequence = _with_zeroed_padding(sequence, lengths)
        vectors = sequence if self.embedding is None else look_up(sequence, self.embedding)
        _check_word_vectors(vectors, self.lstm.input_size)
        states, _ = self.lstm(vectors)                       # (examples, time, hidden)
        return self.linear(_last_states(states, lengths))           # (examples, classes)


class CharacterGRU(nn.Module):
    """Scores of the next character: one-hot characters, a GRU, a linear layer; the Shakespeare model of [LPMH21].

    One prediction after the last character, (examples, vocabulary), or with `every_position` one after each,
    (examples, time, vocabulary).

    >>> CharacterGRU()(torch.zeros(5, 20, dtype=torch.long)).shape
    torch.Size([5, 53])
    """

    def __init__(self, vocabulary: int = 53, hidden: int = 128, every_position: bool = False) -> None:
        """Make a GRU with `hidden` units on one-hot characters, and a linear layer to `vocabulary` scores.

        With `every_position` there is a prediction after each character, else only after the last. Weights are PyTorch's default,
        drawn from its global generator: seed that before.
        """
        super().__init__()
        self.every_position = every_position
        self.gru = nn.GRU(vocabulary, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, vocabulary)

    def forward(self, sequence: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits of the next character: after the last real one, (examples, vocabulary); with `every_position` after each.

        Those after each position are (examples, time, vocabulary). `sequence` (examples, time) holds characters as integers,
        padded at the end; `lengths` (examples,) is how many are real, None all.
        """
        states, _ = self.gru(_one_hot(_with_zeroed_padding(sequence, lengths).long(), self.gru.input_size, self.linear.weight))
        return self.linear(states if self.every_position else _last_states(states, lengths))


def _one_hot(characters: Tensor, vocabulary: int, like: Tensor) -> Tensor:
    """One-hot vectors (examples, time, vocabulary) of the integers `characters` (examples, time), in the dtype of `like`.

    They are on the device of `like` too. Unlike `torch.nn.functional.one_hot` it does not read values, which `torch.func.vmap`
    forbids.
    """
    return look_up(characters, torch.eye(vocabulary, dtype=like.dtype, device=like.device))


def _vector_dimension(table: Tensor | None, dimension: int | None) -> int:
    """The dimension of a word vector: the second axis of `table`, or `dimension` where there is no table.

    Raises ValueError where neither is given, the table does not have two axes, or the two disagree.
    """
    if table is None and dimension is None:
        raise ValueError("LSTMClassifier needs word vectors: pass embedding (a table, or its shape), or dimension for "
                         "sequences that are embedded already.")
    if table is None:
        return int(dimension or 0)
    if table.dim() != 2 or dimension not in (None, table.shape[1]):
        raise ValueError(f"embedding must have shape (vocabulary, dimension), got {tuple(table.shape)} with "
                         f"dimension={dimension}. Leave dimension out when there is a table.")
    return table.shape[1]


def _check_word_vectors(vectors: Tensor, dimension: int) -> None:
    """Raise ValueError where `vectors` do not have the shape (examples, time, dimension)."""
    if vectors.dim() != 3 or vectors.shape[2] != dimension:
        raise ValueError(f"after embedding, sequences must have shape (examples, time, {dimension}), got "
                         f"{tuple(vectors.shape)}. Pass tokens with an embedding, word vectors without.")


def _with_zeroed_padding(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """A copy of the sequence with zeros from position `lengths` (examples,) on; the sequence itself if `lengths` is None."""
    if lengths is None:
        return sequence
    beyond = torch.arange(sequence.shape[1], device=sequence.device) >= lengths[:, None]      # (examples, time)
    return sequence.masked_fill(beyond.reshape(beyond.shape + (1,) * (sequence.dim() - 2)), 0)


def _last_states(states: Tensor, lengths: Tensor | None) -> Tensor:
    """The hidden state at each sequence's last real position, (examples, hidden), from those of all positions, `states`.

    `states` is (examples, time, hidden) and `lengths` (examples,). It is zero for a sequence of length 0; `lengths=None` takes
    the last position of all.
    """
    if lengths is None:
        return states[:, -1]
    place = (lengths - 1).clamp(min=0).long()[:, None, None].expand(-1, 1, states.shape[2])
    return states.gather(1, place)[:, 0].where(lengths[:, None] > 0, 0.0)
