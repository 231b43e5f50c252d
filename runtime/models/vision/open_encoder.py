"""Encoders of images and sounds by their configuration. A new one is a case of `open_encoder`, and a row of
READERS in models/config/media_config.py."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Weight
from runtime.messages.media import MediaValues
from runtime.models.audio.qwen_audio import QwenAudio
from runtime.models.audio.whisper_encoder import WholeSoundEncoder
from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.deepseek_hybrid_config import DeepSeekHybridEncoder
from runtime.models.config.deepseek_ocr_config import DeepSeekOcrEncoder
from runtime.models.config.dual_config import DualImages
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.glm_vision_config import GlmVisionEncoder
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.kimi_vision_config import KimiEncoder
from runtime.models.config.llama4_vision_config import Llama4Encoder
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.minicpmv_config import MiniCpmVEncoder
from runtime.models.config.omni_config import OmniEncoder
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.qwen3_vl_config import Qwen3VlEncoder
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.config.renames import Renames
from runtime.models.config.siglip_config import SiglipEncoder
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.models.vision.deepseek_hybrid import DeepSeekHybrid
from runtime.models.vision.deepseek_ocr import DeepSeekOcr
from runtime.models.vision.dual_images import DualImageEncoder
from runtime.models.vision.gemma_vision import Gemma3Vision
from runtime.models.vision.glm_vision import GlmVision
from runtime.models.vision.internvl import InternVl
from runtime.models.vision.llama4_vision import Llama4Vision
from runtime.models.vision.llava import Llava
from runtime.models.vision.minicpmv import MiniCpmV
from runtime.models.vision.moonvit import MoonVit
from runtime.models.vision.omni import Omni
from runtime.models.vision.onevision import OneVision
from runtime.models.vision.pixtral import Pixtral
from runtime.models.vision.qwen3_vl import Qwen3Vl
from runtime.models.vision.qwen_vl import QwenVl
from runtime.models.vision.siglip import Siglip
from runtime.models.vision.slices import Slices


class MediaEncoder(Protocol):
    """The part of a model that makes embeddings of images or sounds: a layer named `media_encoder` below the
    model. Every rank that embeds tokens has all of it."""

    renames: Renames  # from a checkpoint's names to those of the layers
    dtype: torch.dtype  # of rows
    # numbers of a row: as many as the text model's hidden size, and what is added behind its first layers
    output_size: int

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """See Layer.children."""
        ...

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Encodes images or sounds of one shape together, and stops behind each layer. -> of each its rows,
        [rows, hidden]"""
        ...


def open_encoder(device: Device, dtype: torch.dtype, config: MediaConfig) -> MediaEncoder:
    """The encoder, without weights."""
    match config:
        case Gemma3Encoder():
            return Gemma3Vision(device, dtype, config)
        case GlmVisionEncoder():
            return GlmVision(device, dtype, config)
        case OmniEncoder():
            return Omni(device, dtype, config)
        case OneVisionEncoder():
            return OneVision(device, dtype, config)
        case DualImages():
            return DualImageEncoder(device, dtype, config)
        case InternVlEncoder():
            return InternVl(device, dtype, config)
        case DeepSeekHybridEncoder():
            return DeepSeekHybrid(device, dtype, config)
        case DeepSeekOcrEncoder():
            return DeepSeekOcr(device, dtype, config)
        case KimiEncoder():
            return MoonVit(device, dtype, config)
        case Llama4Encoder():
            return Llama4Vision(device, dtype, config)
        case MiniCpmVEncoder():
            return MiniCpmV(device, dtype, config)
        case SiglipEncoder():
            return Siglip(device, dtype, config)
        case PixtralEncoder():
            return Pixtral(device, dtype, config)
        case LlavaEncoder():
            return Llava(device, dtype, config)
        case Qwen3VlEncoder():
            return Qwen3Vl(device, dtype, config)
        case QwenVlEncoder():
            return QwenVl(device, dtype, config)
        case QwenAudioEncoder():
            return QwenAudio(device, dtype, config)
        case WhisperEncoder():
            return WholeSoundEncoder(device, dtype, config)
