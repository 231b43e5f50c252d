"""Encoders of images by their configuration. A new one is a row of ENCODERS, and one of READERS in
models/config/media_config.py."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Weight
from runtime.messages.media import MediaValues
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.renames import Renames
from runtime.models.vision.llava import Llava


class MediaEncoder(Protocol):
    """The part of a model that makes embeddings of images: a layer named `media_encoder` below the model.
    Every rank that embeds tokens has all of it."""

    renames: Renames  # from a checkpoint's names to those of the layers

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """See Layer.children."""
        ...

    def encode(self, media: Sequence[MediaValues]) -> list[Tensor]:
        """Encodes images of one shape together. -> of each its rows, [rows, hidden]"""
        ...


ENCODERS = {LlavaEncoder: Llava}


def open_encoder(device: Device, dtype: torch.dtype, config: MediaConfig) -> Llava:
    """The encoder, without weights."""
    return ENCODERS[type(config)](device, dtype, config)
