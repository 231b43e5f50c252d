"""The encoder of Whisper (Radford et al., 2022): two convolutions over a mel spectrogram, positions, and a
transformer with norms before attention and feed-forward.

Every rank has all of its weights and encodes every sound.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import (
    ReplicatedEmbedding,
    ReplicatedLinear,
    ReplicatedQkv,
    replicated_weight,
)
from runtime.layers.weight import Layer
from runtime.models.config.audio_config import STRIDE, QwenAudioEncoder
from runtime.models.config.omni_config import OmniAudio
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.models.vision.activations import activate
from runtime.models.vision.slices import Slices, through

WhisperConfig = QwenAudioEncoder | WhisperEncoder
LayerConfig = WhisperConfig | OmniAudio
EPS = 1e-5
KERNEL = 3  # frames that a convolution sees


class Convolution(Layer):
    """A convolution along time of three frames, with a bias."""

    def __init__(self, device: Device, dtype: torch.dtype, inputs: int, outputs: int, stride: int) -> None:
        self.stride = stride
        self.weight = replicated_weight(device, dtype, outputs, inputs, KERNEL)
        self.bias = replicated_weight(device, dtype, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, L] -> [B, outputs, ceil(L / stride)]."""
        return conv1d(x, self.weight.tensor, self.bias.tensor, stride=self.stride, padding=KERNEL // 2)


class WhisperAttention(Layer):
    """Attention of all positions of a sound to all of them. Whisper's keys have no bias."""

    def __init__(self, device: Device, dtype: torch.dtype, config: LayerConfig) -> None:
        size = config.hidden_size
        self.attend = tower_attention(device)
        self.num_heads = config.num_heads
        self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=True, key_bias=config.has_key_bias)
        self.out_proj = ReplicatedLinear(device, dtype, size, size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv_proj.forward(x).chunk(3, dim=-1)
        )
        return self.out_proj.forward(self.attend(q, k, v).transpose(1, 2).flatten(2))


class WhisperLayer(Layer):
    """One block."""

    def __init__(self, device: Device, dtype: torch.dtype, config: LayerConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.self_attn_layer_norm = LayerNorm(device, dtype, size, EPS)
        self.self_attn = WhisperAttention(device, dtype, config)
        self.final_layer_norm = LayerNorm(device, dtype, size, EPS)
        self.fc1 = ReplicatedLinear(device, dtype, size, inner, bias=True)
        self.fc2 = ReplicatedLinear(device, dtype, inner, size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        x = x + self.self_attn.forward(self.self_attn_layer_norm.forward(x))
        inner = self.fc1.forward(self.final_layer_norm.forward(x))
        return x + self.fc2.forward(activate(self.activation, inner))


class WhisperTower(Layer):
    """The encoder up to its last block; no norm follows that."""

    def __init__(self, device: Device, dtype: torch.dtype, config: WhisperConfig) -> None:
        size = config.hidden_size
        self.conv1 = Convolution(device, dtype, config.num_mels, size, 1)
        self.conv2 = Convolution(device, dtype, size, size, STRIDE)
        self.embed_positions = ReplicatedEmbedding(device, dtype, config.num_positions, size)
        self.layers = [WhisperLayer(device, dtype, config) for _ in range(config.num_layers)]

    def slices(self, mels: Tensor, count: int) -> Slices[Tensor]:
        """Spectrograms [B, mels, frames] -> their first positions [B, count, size]. Frames behind those that
        `count` positions see are not looked at."""
        x = gelu(self.conv2.forward(gelu(self.conv1.forward(mels))))
        x = x[:, :, :count].transpose(1, 2) + self.embed_positions.weight.tensor[:count]
        return (yield from through(self.layers, x))
