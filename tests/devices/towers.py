"""Encoders of images and sounds, tiny, which devices with attention of their own are tested with."""

from collections.abc import Sequence

import numpy as np
import torch

from runtime.layers.weight import named_weights
from runtime.messages.media import MediaValues
from runtime.models.vision.open_encoder import MediaEncoder
from tests.models.towers import TOWERS


def media_of(name: str) -> list[MediaValues]:
    """A file for a tower."""
    _, shape, grid = TOWERS[name]
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).ravel()
    return [MediaValues(id=0, values=values, shape=shape, grid=grid, num_rows=0)]


def give_weights(encoders: Sequence[MediaEncoder]) -> None:
    """Gives all of these encoders equal weights, drawn at random."""
    torch.manual_seed(0)
    weights = [named_weights(one) for one in encoders]  # type: ignore[arg-type]
    first, *others = ([weight for _, weight in one] for one in weights)
    for weight, *rest in zip(first, *others, strict=True):
        weight.tensor.normal_(0, 0.2)
        for other in rest:
            other.tensor.copy_(weight.tensor)
