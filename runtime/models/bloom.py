"""BLOOM (BigScience, 2022): a layer norm behind the embedding, and linear biases by distance in place of
positions."""

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.norm import NORMS, NoNorm, Norm
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama


class Bloom(Llama):
    """See GenerativeModel."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        self.embed_norm: Norm = (
            NORMS[config.norm](device, dtype, config.hidden_size, config.rms_norm_eps)
            if self.stage.is_first
            else NoNorm()
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> normed embeddings [T, hidden]."""
        return self.embed_norm.forward(super().embed(token_ids))
