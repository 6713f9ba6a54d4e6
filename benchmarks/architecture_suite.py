"""Fifteen architectures that users bring, each as published with dropout and norms in it, and data of its shape.

`benchmarks/architectures.py` times them, `tests/test_architectures.py` compares every kernel with a plain loop on small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Examples = Tensor | dict[str, Tensor]
CLASSES = 5


def perceptron(numbers: int, width: int, second: int, *between: nn.Module) -> nn.Sequential:
    """Three linear layers with ReLU, and these layers after each ReLU."""
    return nn.Sequential(nn.Linear(numbers, width), nn.ReLU(), *between, nn.Linear(width, second), nn.ReLU(), *between,
                         nn.Linear(second, CLASSES))


class TextCNN(nn.Module):
    """Convolutions of several widths over embedded words, the largest value of each, dropout."""

    def __init__(self, words: int, width: int, filters: int):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, size, padding=size // 2) for size in (3, 4, 5))
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(3 * filters, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.table(x).transpose(1, 2)
        return self.out(self.drop(torch.cat([part(embedded).relu().amax(2) for part in self.convolutions], 1)))


class Bag(nn.Module):
    """The mean of embedded words and a linear layer, as fastText."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bag(x))


class Recurrent(nn.Module):
    """Embedded tokens, two recurrent layers with dropout between them, packed by length, and a linear layer on the last state."""

    def __init__(self, cell: type[nn.RNNBase], words: int, width: int, hidden: int):
        super().__init__()
        self.table, self.cell = nn.Embedding(words, width), cell(width, hidden, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(hidden, CLASSES)

    def forward(self, sequence: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(sequence), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.out(states[torch.arange(len(states)), lengths - 1])


class PaddedRecurrent(nn.Module):
    """Embedded tokens of one length, one recurrent layer, a linear layer on the last state."""

    def __init__(self, cell: type[nn.RNNBase], words: int, width: int, hidden: int):
        super().__init__()
        self.table, self.cell = nn.Embedding(words, width), cell(width, hidden, batch_first=True)
        self.out = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.table(x))[0][:, -1])


class Transformer(nn.Module):
    """Embedded tokens with learned positions, encoder layers with dropout, the mean over positions."""

    def __init__(self, words: int, width: int, length: int, layers: int = 2, dropout: float = 0.1):
        super().__init__()
        self.table, self.position = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.table(x) + self.position).mean(1))


class VisionTransformer(nn.Module):
    """Patches by a strided convolution, a class token, learned positions, encoder layers with norm first and dropout."""

    def __init__(self, size: int, patch: int, width: int, layers: int = 2):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.drop, self.encoder = nn.Dropout(0.1), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        states = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
        return self.out(self.encoder(self.drop(states))[:, 0])


def separable(before: int, after: int, stride: int) -> nn.Sequential:
    """A block of MobileNet with group norm: a convolution of each channel, then one of each pixel."""
    return nn.Sequential(nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False), nn.GroupNorm(4, before), nn.ReLU6(),
                         nn.Conv2d(before, after, 1, bias=False), nn.GroupNorm(4, after), nn.ReLU6())


def mobile_net(width: int) -> nn.Sequential:
    """A small MobileNet for colour images, group norm in place of batch norm, dropout before the last layer."""
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU6(),
                         separable(width, 2 * width, 1), separable(2 * width, 4 * width, 2), separable(4 * width, 4 * width, 1),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, CLASSES))


class ResidualBlock(nn.Module):
    """Two convolutions with group norm, and the input added, through a convolution of single pixels where shapes differ."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(2, after), nn.ReLU(),
                                  nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(2, after))
        self.around: nn.Module = nn.Identity()
        if before != after or stride > 1:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(2, after))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.around(x)).relu()


def res_net(width: int, blocks: int = 2) -> nn.Sequential:
    """ResNet for 32 x 32 images with group norm: four stages of `blocks` blocks; ResNet-18 with width 64 and 2 blocks."""
    stages, before = [], width
    for stage in range(4):
        for block in range(blocks):
            stages.append(ResidualBlock(before, width * 2**stage, 2 if stage and block == 0 else 1))
            before = width * 2**stage
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(2, width), nn.ReLU(), *stages,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES))


class UNet(nn.Module):
    """Two levels down and up again with skips and group norm, then the mean over pixels of the class scores."""

    def __init__(self, width: int):
        super().__init__()
        def block(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(2, after), nn.ReLU())

        self.down, self.middle, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up, self.last = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join, self.end, self.out = block(4 * width, 2 * width), block(2 * width, width), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        second = self.middle(F.max_pool2d(first, 2))
        third = self.join(torch.cat([self.up(self.bottom(F.max_pool2d(second, 2))), second], 1))
        return self.out(self.end(torch.cat([self.last(third), first], 1))).mean((2, 3))


class Tabular(nn.Module):
    """Numbers beside categories that are embedded, layers with layer norm and dropout."""

    def __init__(self, numbers: int, levels: tuple[int, ...], width: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(level, 4) for level in levels)
        self.body = nn.Sequential(nn.Linear(numbers + 4 * len(levels), width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1),
                                  nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1),
                                  nn.Linear(width, CLASSES))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        return self.body(torch.cat([numbers, *embedded], 1))


def sensor_net(channels: int, width: int) -> nn.Sequential:
    """1-D convolutions over the readings of a few sensors, with dropout of whole channels."""
    return nn.Sequential(nn.Conv1d(channels, width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout1d(0.1),
                         nn.Conv1d(width, 2 * width, 5, padding=2), nn.GroupNorm(2, 2 * width), nn.ReLU(),
                         nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width, CLASSES))


class LowRank(nn.Module):
    """LoRA: a frozen linear layer, and beside it a trained product of two thin matrices, with dropout of its input."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up, self.drop = nn.Parameter(torch.zeros(base.out_features, rank)), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(self.drop(x), self.down), self.up)


class AdaptedLayer(nn.Module):
    """An encoder layer whose attention is frozen and whose feed-forward layers have low-rank products beside them."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.requires_grad_(False)
        self.drop = nn.Dropout(0.1)
        self.forth, self.back = LowRank(nn.Linear(width, 4 * width), rank), LowRank(nn.Linear(4 * width, width), rank)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.drop(self.attention(x, x, x, need_weights=False)[0]))
        return self.norms[1](x + self.drop(self.back(self.drop(self.forth(x).relu()))))


class AdaptedTransformer(nn.Module):
    """Frozen embeddings and encoder layers, trained low-rank products beside them, and a trained head."""

    def __init__(self, words: int, width: int, length: int, rank: int, layers: int = 2):
        super().__init__()
        self.table = nn.Embedding(words, width).requires_grad_(False)
        self.position = nn.Parameter(0.02 * torch.randn(length, width), requires_grad=False)
        self.layers = nn.Sequential(*(AdaptedLayer(width, rank) for _ in range(layers)))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.table(x) + self.position).mean(1))


@dataclass(frozen=True)
class Architecture:
    """A module in its usual and in a small size, and inputs of as many examples as asked in both."""

    module: Callable[[bool], nn.Module]
    inputs: Callable[[bool, int], Examples]
    size: int = 50                       # examples of a client when it is timed, in batches of 10
    clients: int = 50

    def data(self, small: bool, clients: int, sizes: list[int]) -> list[tuple[Examples, Tensor]]:
        """Inputs and labels of each client, drawn from a fixed seed."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return [(self.inputs(small, sizes[k % len(sizes)]), torch.randint(CLASSES, (sizes[k % len(sizes)],)))
                    for k in range(clients)]

    def build(self, small: bool, seed: int = 0) -> nn.Module:
        """The module with weights drawn from a seed."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return self.module(small)


def vectors(width: int, small: int) -> Callable[[bool, int], Tensor]:
    return lambda little, count: torch.randn(count, small if little else width)


def tokens(words: int, length: int, few: int, short: int) -> Callable[[bool, int], Tensor]:
    return lambda little, count: torch.randint(few if little else words, (count, short if little else length))


def ragged(words: int, length: int, few: int, short: int) -> Callable[[bool, int], Examples]:
    return lambda little, count: {"sequence": torch.randint(few if little else words, (count, short if little else length)),
                                  "lengths": torch.randint(1, (short if little else length) + 1, (count,))}


def images(channels: int, size: int, small: int) -> Callable[[bool, int], Tensor]:
    return lambda little, count: torch.randn(count, channels, *[small if little else size] * 2)


def table(little: bool, count: int) -> Examples:
    return {"numbers": torch.randn(count, 3 if little else 20), "categories": torch.randint(4, (count, 2 if little else 6))}


ARCHITECTURES = {
    "MLP": Architecture(lambda s: perceptron(*(6, 8, 7) if s else (100, 64, 32)), vectors(100, 6)),
    "MLP, dropout": Architecture(lambda s: perceptron(*(6, 8, 7) if s else (100, 64, 32), nn.Dropout(0.2)), vectors(100, 6)),
    "embedding bag": Architecture(lambda s: Bag(20, 4) if s else Bag(5000, 32), tokens(5000, 30, 20, 4)),
    "text CNN": Architecture(lambda s: TextCNN(20, 4, 3) if s else TextCNN(2000, 32, 32), tokens(2000, 30, 20, 7)),
    "GRU": Architecture(lambda s: PaddedRecurrent(nn.GRU, 20, 4, 5) if s else PaddedRecurrent(nn.GRU, 2000, 64, 64),
                        tokens(2000, 30, 20, 5)),
    "GRU, packed": Architecture(lambda s: Recurrent(nn.GRU, 20, 4, 5) if s else Recurrent(nn.GRU, 2000, 32, 64),
                                ragged(2000, 30, 20, 5)),
    "LSTM, packed": Architecture(lambda s: Recurrent(nn.LSTM, 20, 4, 5) if s else Recurrent(nn.LSTM, 2000, 32, 64),
                                 ragged(2000, 30, 20, 5)),
    "transformer": Architecture(lambda s: Transformer(20, 8, 5) if s else Transformer(2000, 64, 32), tokens(2000, 32, 20, 5)),
    "vision transformer": Architecture(lambda s: VisionTransformer(8, 4, 8, 1) if s else VisionTransformer(32, 4, 64, 4),
                                       images(3, 32, 8)),
    "MobileNet": Architecture(lambda s: mobile_net(4 if s else 16), images(3, 32, 8)),
    "ResNet-18": Architecture(lambda s: res_net(2, 1) if s else res_net(64), images(3, 32, 8), size=20, clients=4),
    "U-Net": Architecture(lambda s: UNet(2 if s else 16), images(1, 32, 8), size=20, clients=20),
    "tabular": Architecture(lambda s: Tabular(3, (4, 4), 8) if s else Tabular(20, (4,) * 6, 64), table),
    "sensors": Architecture(lambda s: sensor_net(2, 4) if s else sensor_net(6, 32),
                            lambda s, count: torch.randn(count, 2, 12) if s else torch.randn(count, 6, 128)),
    "LoRA transformer": Architecture(lambda s: AdaptedTransformer(*(20, 8, 5, 2) if s else (2000, 128, 32, 8, 4)),
                                     tokens(2000, 32, 20, 5)),
}
