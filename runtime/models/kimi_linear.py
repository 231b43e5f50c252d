"""Kimi Linear (Moonshot AI, 2025): Kimi's delta rule in most layers, and latent attention without positions
in the others. Checkpoints have both under one name."""

import torch

from runtime.devices.base import Device
from runtime.layers.weight import PackedModules
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import mixer_renames
from runtime.models.deepseek import DeepSeek, MlaSelfAttention
from runtime.models.fused_tensors import equal_parts
from runtime.models.hybrid import HybridDecoder, recurrent_of


class KimiLinear(HybridDecoder):
    """See GenerativeModel."""

    attention_class = MlaSelfAttention
    packed_modules: PackedModules = {
        **HybridDecoder.packed_modules,
        **DeepSeek.packed_modules,
        **{f"low_{part}": ("low_proj", part) for part in ("f", "g", "b")},
    }

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        # as transformers writes it; published checkpoints have the three apart
        self.fused_modules = {"conv1d": equal_parts("q_conv1d", "k_conv1d", "v_conv1d")}
        self.renames = (*mixer_renames(recurrent_of(config)), *self.renames)
