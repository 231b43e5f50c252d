"""Encoders of images and sounds, tiny, which devices with attention of their own are tested with."""

from collections.abc import Sequence

import numpy as np
import torch
from runtime.models.vision.open_encoder import MediaEncoder

from runtime.layers.weight import named_weights
from runtime.messages.media import MediaValues
from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.kimi_vision_config import KimiEncoder
from runtime.models.config.llama4_vision_config import Llama4Encoder
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.qwen3_vl_config import Qwen3VlEncoder
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.config.siglip_config import SiglipEncoder

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2}
CLIP = ClipTower(**SIZES, image_size=28, patch_size=7, eps=1e-5, activation="quick_gelu")
WINDOWS = {"is_gated": True, "window_patches": 4, "full_layers": (1,), "activation": "silu"}
# a configuration, and the shape and the grid of one of its files
TOWERS: dict[str, tuple[MediaConfig, tuple[int, ...], tuple[int, int, int]]] = {
    "clip": (
        LlavaEncoder(
            placeholder_id=0, tower=CLIP, output_size=64, activation="gelu", has_bias=True, keeps_class=False
        ),
        (3, 28, 28),
        (1, 1, 1),
    ),
    "windows": (
        QwenVlEncoder(
            **SIZES,
            placeholder_id=0,
            video_placeholder_id=1,
            patch_size=4,
            num_frames=2,
            merge_size=2,
            output_size=64,
            **WINDOWS,
        ),
        (48, 3, 4, 4),
        (1, 6, 8),
    ),
    "kimi": (
        KimiEncoder(
            **SIZES,
            placeholder_id=0,
            patch_size=4,
            table_side=5,
            merge_size=2,
            theta=10000.0,
            activation="gelu_pytorch_tanh",
            projector_eps=1e-5,
            output_size=64,
        ),
        (24, 3, 4, 4),
        (1, 4, 6),
    ),
    "llama 4": (
        Llama4Encoder(
            **SIZES,
            row_id=0,
            image_size=16,
            patch_size=4,
            theta=10000.0,
            merge_size=2,
            adapter_size=40,
            adapter_output=48,
            output_size=64,
        ),
        (3, 3, 16, 16),
        (1, 1, 1),
    ),
    "pixtral": (
        PixtralEncoder(
            **SIZES,
            placeholder_id=0,
            patch_size=4,
            theta=10000.0,
            activation="silu",
            projector_activation="gelu",
            has_bias=False,
            merge_size=2,
            merger_eps=1e-5,
            output_size=64,
        ),
        (3, 16, 24),
        (1, 1, 1),
    ),
    "internvl": (
        InternVlEncoder(
            **SIZES,
            placeholder_id=0,
            image_size=16,
            patch_size=4,
            merge_size=2,
            eps=1e-6,
            activation="gelu",
            projector_activation="gelu",
            has_bias=True,
            has_head_norms=False,
            has_rms_norms=False,
            has_last_norm=False,
            output_size=64,
        ),
        (2, 3, 16, 16),
        (1, 1, 1),
    ),
    "gemma 3": (
        Gemma3Encoder(placeholder_id=0, row_id=1, end_id=2, tower=CLIP, pooled_side=2, output_size=64),
        (3, 28, 28),
        (1, 1, 1),
    ),
    "siglip": (
        SiglipEncoder(
            layout="idefics3", placeholder_id=0, tower=CLIP, connector="linear", output_size=64, merge_size=2
        ),
        (2, 3, 28, 28),
        (1, 1, 1),
    ),
    "learned positions, outputs of two layers": (
        Qwen3VlEncoder(
            **SIZES,
            placeholder_id=0,
            video_placeholder_id=1,
            patch_size=4,
            num_frames=2,
            merge_size=2,
            output_size=128,
            is_gated=False,
            activation="gelu_pytorch_tanh",
            text_size=64,
            deepstack_layers=(0,),
            table_side=5,
        ),
        (48, 3, 4, 4),
        (1, 6, 8),
    ),
    "sounds": (
        QwenAudioEncoder(
            **SIZES, placeholder_id=0, num_mels=20, num_positions=50, activation="gelu", output_size=64
        ),
        (20, 40),
        (38, 1, 1),
    ),
}


def media_of(name: str) -> list[MediaValues]:
    """A file for a tower."""
    _, shape, grid = TOWERS[name]
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).ravel()
    return [MediaValues(id=0, values=values, shape=shape, grid=grid, num_rows=0)]


def give_weights(encoders: Sequence[MediaEncoder]) -> None:
    """The same random weights for each."""
    torch.manual_seed(0)
    first, *others = (
        [weight for _, weight in named_weights(one)]  # type: ignore[arg-type]
        for one in encoders
    )
    for weight, *rest in zip(first, *others, strict=True):
        weight.tensor.normal_(0, 0.2)
        for other in rest:
            other.tensor.copy_(weight.tensor)
