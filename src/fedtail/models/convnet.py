"""The convolutional model of the EMNIST experiments."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d

SIDE = 28              # EMNIST images are 28 x 28
FLAT = 64 * 4 * 4      # 28 -> 24 -> 12 -> 8 -> 4


class ConvNet(nn.Module):
    """Two convolutions (5 x 5, valid, 32 and 64 channels), each pooled by 2 and rectified, one linear layer.

    The "EMNIST ConvNet" of [PLMH23, section 7] and [LPMH21]; the channel counts are those of the authors' code. Takes
    images (examples, channels, 28, 28), and (examples, 28, 28) where there is one channel. Starts at PyTorch's default,
    from its global generator: seed that before. Pooling before the rectifier gives the same values for less work.

    >>> import torch
    >>> ConvNet()(torch.zeros(5, 28, 28)).shape
    torch.Size([5, 62])
    """

    def __init__(self, classes: int = 62, channels: int = 1) -> None:
        """Make the layers for images of `channels` channels and scores of `classes` classes.

        Weights are PyTorch's default, drawn from its global generator: seed that before.
        """
        super().__init__()
        self.first = nn.Conv2d(channels, 32, kernel_size=5)
        self.second = nn.Conv2d(32, 64, kernel_size=5)
        self.linear = nn.Linear(FLAT, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (examples, classes) of images (examples, channels, 28, 28); (examples, 28, 28) is taken as one channel.

        Raises ValueError for images of another shape.
        """
        images = images.unsqueeze(1) if images.dim() == 3 else images
        if images.shape[1:] != (self.first.in_channels, SIDE, SIDE):
            raise ValueError(f"ConvNet needs images of shape (examples, {self.first.in_channels}, {SIDE}, {SIDE}), "
                             f"got {tuple(images.shape)}. Resize them, or set channels.")
        hidden = max_pool2d(self.first(images), 2).relu()          # (examples, 32, 12, 12)
        hidden = max_pool2d(self.second(hidden), 2).relu()         # (examples, 64, 4, 4)
        return self.linear(hidden.flatten(1))                      # (examples, classes)
