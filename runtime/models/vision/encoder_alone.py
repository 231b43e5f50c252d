"""The encoder of a model without its decoder (--encoder-only)."""

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.weight import Layer, PackedModules
from runtime.messages.ranks import StartRank
from runtime.models.base import Model
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.renames import Renames
from runtime.models.llama import Llama
from runtime.models.vision.open_encoder import open_encoder


def maker(start: StartRank, dtype: torch.dtype, config: ModelConfig) -> Callable[[Device], Model] | None:
    """What makes the model of an encoder server; None: the model is that of `config`."""
    return partial(EncoderAlone, dtype=dtype, config=config) if start.encoding == "alone" else None


class EncoderAlone(Layer):
    """A model that takes no steps. See Model."""

    packed_modules: PackedModules = Llama.packed_modules  # of towers as of decoders
    attentions: Sequence[Attention | MlaAttention] = []

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        """Raises ModelError for a model without an encoder."""
        if config.media is None:
            raise ModelError(
                "--encoder-only is for models whose images or sounds this runtime encodes "
                "(docs/multimodal_models.md); leave it out"
            )
        self.layers: Sequence[Layer] = []
        self.media_encoder = open_encoder(device, dtype, config.media)
        self.renames: Renames = self.media_encoder.renames
        own = "|".join(re.escape(stored) for stored, _ in self.renames)
        self.ignored_weights: tuple[str, ...] = (f"^(?!.*({own}))",)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Not called: there are no steps."""
        raise AssertionError("an encoder takes no steps")

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Not called: there are no steps."""
        raise AssertionError("an encoder takes no steps")
