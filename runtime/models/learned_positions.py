"""Decoders whose positions are a learned table: GPT-2 (Radford et al., 2019), GPT-Neo, StarCoder 1, OPT."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.weight import WeightOnly
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama


class PositionedDecoder(Llama):
    """Adds a row of a table to each token's embedding. Every rank has the whole table. See
    GenerativeModel."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        assert config.positions is not None, "read_config gives positions"
        self.offset = config.positions.offset
        rows = replicated_weight(device, dtype, config.positions.count, config.hidden_size)
        self.embed_positions = WeightOnly(rows)

    def inputs(self, batch: ForwardBatch) -> Tensor:
        """Embeddings of tokens and of their positions, [T, hidden]; behind the first stage hidden states."""
        x = super().inputs(batch)
        if not self.stage.is_first:
            return x
        return x + embedding(batch.positions + self.offset, self.embed_positions.weight.tensor)
