"""Tiny encoders of images and sounds, one of each kind, and what they are given."""

from typing import Any

from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.deepseek_hybrid_config import DeepSeekHybridEncoder
from runtime.models.config.deepseek_ocr_config import DeepSeekOcrEncoder, SamTower
from runtime.models.config.dual_config import DualImages
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.glm_vision_config import GlmVisionEncoder
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.kimi_vision_config import KimiEncoder
from runtime.models.config.llama4_vision_config import Llama4Encoder
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.minicpmv_config import MiniCpmVEncoder
from runtime.models.config.omni_config import OmniAudio, OmniEncoder
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.qwen3_vl_config import Qwen3VlEncoder
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.config.siglip_config import SiglipEncoder
from runtime.models.config.whisper_config import WhisperEncoder

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2}
CLIP = ClipTower(**SIZES, image_size=28, patch_size=7, eps=1e-5, activation="quick_gelu")
WINDOWS: dict[str, Any] = {"is_gated": True, "window_patches": 4, "full_layers": (1,), "activation": "silu"}
Tower = tuple[MediaConfig, tuple[int, ...], tuple[int, int, int]]
# a configuration, and the shape and the grid of one of its files
TOWERS: dict[str, Tower] = {
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

VISION: dict[str, Any] = {
    **SIZES,
    "placeholder_id": 0,
    "video_placeholder_id": 1,
    "patch_size": 4,
    "num_frames": 2,
    "merge_size": 2,
    "output_size": 64,
}
SAM = SamTower(
    **SIZES,
    image_size=64,
    patch_size=8,
    window=3,
    global_layers=(1,),
    channels=(16, 24, 32),
    eps=1e-6,
    activation="gelu",
    has_qkv_bias=True,
    has_positions=True,
    has_relative_positions=True,
)
SOUNDS: dict[str, Any] = {**SIZES, "num_mels": 16, "activation": "gelu", "text_size": 64, "part_frames": 20}
DUAL: dict[str, Any] = {"placeholder_id": 0, "tower": CLIP, "output_size": 32}
OMNI_25 = OmniEncoder(
    vision=QwenVlEncoder(**VISION, **WINDOWS),
    audio=OmniAudio(**SOUNDS),
    audio_placeholder_id=2,
    audio_marks=None,
    chunk_positions=50,
)
OMNI_3 = OmniEncoder(
    vision=Qwen3VlEncoder(
        **VISION | {"output_size": 128},
        is_gated=False,
        activation="gelu_pytorch_tanh",
        text_size=64,
        deepstack_layers=(0,),
        table_side=5,
    ),
    audio=OmniAudio(**SOUNDS, num_channels=4, window_parts=2),
    audio_placeholder_id=2,
    audio_marks=None,
    chunk_positions=0,
)
# encoders whose attention no other device has as an operator of its own, or whose layers are those of others
MORE_TOWERS: dict[str, Tower] = {
    "glm": (
        GlmVisionEncoder(**VISION, is_gated=True, activation="silu", merger_size=48, table_side=5),
        (48, 3, 4, 4),
        (1, 6, 8),
    ),
    "deepseek ocr": (
        DeepSeekOcrEncoder(
            **SIZES,
            placeholder_id=0,
            sam=SAM,
            num_kv_heads=1,
            activation="silu",
            eps=1e-6,
            theta=10000.0,
            output_size=64,
        ),
        (3, 64, 64),
        (2, 1, 1),
    ),
    "deepseek hybrid": (
        DeepSeekHybridEncoder(placeholder_id=0, tower=CLIP, sam=SAM, output_size=64),
        (3 * (64**2 + 28**2),),
        (1, 1, 1),
    ),
    "onevision": (
        OneVisionEncoder(
            placeholder_id=0,
            video_placeholder_id=1,
            tower=CLIP,
            output_size=64,
            activation="gelu",
            has_bias=True,
            pinpoints=((28, 56), (56, 56)),
            max_tiles=9,
        ),
        (3, 3, 28, 28),
        (3, 28, 56),
    ),
    "minicpm-v": (
        MiniCpmVEncoder(
            placeholder_id=0, video_placeholder_id=None, tower=CLIP, joined_layer=0, output_size=64
        ),
        (32, 3, 7, 7),
        (1, 4, 8),
    ),
    "clip's vector": (DualImages(**DUAL, is_siglip=False), (3, 28, 28), (1, 1, 1)),
    "siglip's vector": (DualImages(**DUAL, is_siglip=True), (3, 28, 28), (1, 1, 1)),
    "naflex's vector": (DualImages(**DUAL, is_siglip=True, is_naflex=True), (12, 3 * 49), (1, 3, 4)),
    "whisper": (
        WhisperEncoder(
            **SIZES, placeholder_id=0, num_mels=20, num_positions=30, activation="gelu", decoder_layers=1
        ),
        (20, 60),
        (60, 1, 1),
    ),
    "omni 2.5, images": (OMNI_25, (48, 3, 4, 4), (1, 6, 8)),
    "omni 2.5, sounds": (OMNI_25, (16, 54), (54, 1, 1)),
    "omni 3, videos": (OMNI_3, (96, 3, 2, 4, 4), (2, 6, 8)),
    "omni 3, sounds": (OMNI_3, (16, 94), (94, 1, 1)),
}
