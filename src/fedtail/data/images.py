"""Columns of encoded images as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

_LARGEST = {"b1": 1, "u1": 255, "u2": 65535}            # value of a pixel, by type


def read_pixels(column: Any, image: Any, name: str) -> np.ndarray:
    """Images as float32 in [0, 1], (examples, height, width) where grey, else (examples, channels, height, width).

    `column` is an arrow column of encoded images, `image` the `datasets.Image` that decodes a cell.
    """
    if column.null_count:
        raise ValueError(f"column {name!r} lacks {column.null_count} of {len(column)} images. Drop those examples first.")
    first = _decoded(column[0], image, name)
    pixels = np.empty((len(column), *first.shape), np.float32)
    for place, cell in enumerate(column):
        values = _decoded(cell, image, name)
        if values.shape != first.shape:
            raise ValueError(f"image {place} of column {name!r} has shape {values.shape}, image 0 has {first.shape}. Bring them "
                             'to one size and mode first: dataset.map with image.resize(...).convert("RGB").')
        pixels[place] = values
    return pixels


def _decoded(cell: Any, image: Any, name: str) -> np.ndarray:
    picture = image.decode_example(cell.as_py())
    if picture.mode == "P":                             # a palette's numbers mean nothing by themselves
        picture = picture.convert("RGB")
    values = np.asarray(picture)
    largest = _LARGEST.get(values.dtype.str[1:])
    if largest is None:
        raise TypeError(f"column {name!r} has images of mode {picture.mode} ({values.dtype}), whose largest value is unknown. "
                        'Convert them first: image.convert("L") or image.convert("RGB").')
    return (np.moveaxis(values, 2, 0) if values.ndim == 3 else values) / np.float32(largest)
