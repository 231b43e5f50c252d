"""config.json of models that take images or sounds: the encoder of each family whose encoder this runtime
has. Torch-free; model_config.py calls it. Wrappers without a row in READERS are served as the text models
that they contain (wrappers.py).
"""

from collections.abc import Callable
from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.audio_config import QwenAudioEncoder, read_qwen2_audio
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.deepseek_hybrid_config import DeepSeekHybridEncoder, read_deepseek_hybrid
from runtime.models.config.deepseek_ocr_config import DeepSeekOcrEncoder, read_deepseek_ocr
from runtime.models.config.dual_config import DualImages
from runtime.models.config.encoder_parts import check_activation, num_computed_layers
from runtime.models.config.gemma_vision_config import Gemma3Encoder, read_gemma3
from runtime.models.config.glm_vision_config import GlmVisionEncoder, read_glm4v
from runtime.models.config.internvl_config import InternVlEncoder, read_internvl, read_internvl_chat
from runtime.models.config.kimi_vision_config import KimiEncoder, read_kimi
from runtime.models.config.llama4_vision_config import Llama4Encoder, read_llama4
from runtime.models.config.minicpmv_config import MiniCpmVEncoder, read_minicpmv
from runtime.models.config.omni_config import (
    OmniEncoder,
    read_omni3,
    read_omni25,
    read_thinker3,
    read_thinker25,
)
from runtime.models.config.onevision_config import OneVisionEncoder, read_onevision
from runtime.models.config.pixtral_config import PixtralEncoder, read_mistral3, read_pixtral_llava
from runtime.models.config.qwen3_vl_config import Qwen3VlEncoder, read_qwen3_vl, read_qwen35
from runtime.models.config.qwen_vl_config import QwenVlEncoder, read_qwen2_vl, read_qwen25_vl
from runtime.models.config.siglip_config import (
    SiglipEncoder,
    read_aya_vision,
    read_cohere2_vision,
    read_deepseek_vl,
    read_idefics3,
    read_smolvlm,
)
from runtime.models.config.transformers_config import has_media
from runtime.models.config.transformers_media import TransformersEncoder, read_transformers_media
from runtime.models.config.whisper_config import WHISPER, WhisperEncoder, read_whisper

KEPT_BYTES = 256 << 20  # of encodings that the ranks keep
NUMBER_BYTES = 4  # of a number in a row, at most


class HfClip(Struct, frozen=True):
    """vision_config of a CLIP vision tower, with the defaults of transformers."""

    hidden_size: sizes.Width = 768
    intermediate_size: sizes.Width = 3072
    num_hidden_layers: sizes.Layers = 12
    num_attention_heads: sizes.Heads = 12
    image_size: sizes.Width = 224
    patch_size: sizes.Width = 32
    layer_norm_eps: float = 1e-5
    hidden_act: str = "quick_gelu"


# of files without a vision_config: the tower of LLaVA 1.5
LLAVA_CLIP = HfClip(1024, 4096, 24, 16, 336, 14)


class HfLlava(Struct, frozen=True):
    """What LLaVA's config.json says of images, with the defaults of transformers."""

    vision_config: HfClip = LLAVA_CLIP
    image_token_index: int | None = None
    image_token_id: int | None = None
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_layer: int | list[int] = -2
    vision_feature_select_strategy: str = "default"


class HfTower(Struct, frozen=True):
    """vision_config as far as it names the tower."""

    model_type: str = "clip_vision_model"


class HfAnyLlava(Struct, frozen=True):
    """LLaVA's config.json as far as it names the vision tower."""

    vision_config: HfTower = HfTower()


class LlavaEncoder(Struct, frozen=True, kw_only=True):
    """LLaVA's encoder of images: patches of a CLIP tower, projected to the size of the text model."""

    placeholder_id: int  # the token of a prompt that stands for an image
    tower: ClipTower
    output_size: int  # hidden size of the text model
    activation: str  # of the projector, one of ACTIVATIONS
    has_bias: bool  # of the projector
    keeps_class: bool  # the class embedding's vector goes before those of the patches
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def num_rows(self) -> int:
        """Rows that an image is encoded to."""
        return self.tower.num_patches + self.keeps_class

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        tower, size = self.tower, self.tower.hidden_size
        table = (tower.num_patches + 2 + 3 * tower.patch_size**2 + 2) * size
        projector = self.output_size * (size + self.output_size) + 2 * self.has_bias * self.output_size
        return table + tower.num_layers * tower.layer_weights + projector


MediaConfig = (
    DeepSeekHybridEncoder
    | DeepSeekOcrEncoder
    | DualImages
    | Gemma3Encoder
    | GlmVisionEncoder
    | InternVlEncoder
    | KimiEncoder
    | Llama4Encoder
    | LlavaEncoder
    | MiniCpmVEncoder
    | OmniEncoder
    | OneVisionEncoder
    | PixtralEncoder
    | Qwen3VlEncoder
    | QwenAudioEncoder
    | QwenVlEncoder
    | SiglipEncoder
    | TransformersEncoder
    | WhisperEncoder
)
"""The encoder of a model that takes images or sounds."""


def encoder_bytes(encoder: MediaConfig | None, item: int) -> int:
    """Bytes of an encoder's weights, of `item` bytes a number; None: there is no encoder."""
    return 0 if encoder is None else encoder.num_weights * item


def with_encoder(encoding: str, decoder: int, encoder: int) -> int:
    """Bytes of the weights that a rank loads, of those of the decoder and the encoder. `encoding`: as
    StartRank.encoding."""
    return {"alone": encoder, "elsewhere": decoder}.get(encoding, decoder + encoder)


def num_kept_rows(encoder: MediaConfig) -> int:
    """Rows that the ranks keep of what was encoded (scheduling/encodings.py), at least one."""
    return max(KEPT_BYTES // (NUMBER_BYTES * encoder.output_size), 1)


def kept_bytes(encoder: MediaConfig | None, item: int) -> int:
    """Bytes of the rows that the ranks keep, of `item` bytes a number; None: there is no encoder."""
    return 0 if encoder is None else num_kept_rows(encoder) * encoder.output_size * item


def sees_whole_images(encoder: MediaConfig | None) -> bool:
    """Whether the tokens of an image attend to all of them, those behind them as well."""
    if isinstance(encoder, TransformersEncoder):
        return encoder.is_prompt_wide
    return isinstance(encoder, Gemma3Encoder)


def num_deepstack(encoder: MediaConfig | None) -> int:
    """Layers of the text model behind which features of images are added to hidden states."""
    return encoder.num_deepstack if isinstance(encoder, Qwen3VlEncoder | OmniEncoder) else 0


def slot_bytes(encoder: MediaConfig | None, item: int, num_ranks: int) -> int:
    """Bytes that each slot of a rank has for the sound that its sequence attends to, of `item` bytes a
    number; 0: sequences attend to their tokens alone. `num_ranks`: that share the heads."""
    if not isinstance(encoder, WhisperEncoder):
        return 0
    return 2 * encoder.decoder_layers * encoder.output_size * item // num_ranks


def read_llava(raw: bytes, hidden_size: int) -> LlavaEncoder | PixtralEncoder | None:
    """Models of LLaVA's layout; None: the vision tower is another than CLIP's and Pixtral's. Raises
    ModelError."""
    match decode(raw, HfAnyLlava, "config.json").vision_config.model_type:
        case "clip_vision_model":
            return read_clip_llava(raw, hidden_size)
        case "pixtral":
            return read_pixtral_llava(raw, hidden_size)
    return None


def read_clip_llava(raw: bytes, hidden_size: int) -> LlavaEncoder:
    """LLaVA 1.5 and models of its layout. Raises ModelError."""
    hf = decode(raw, HfLlava, "config.json")
    vision = hf.vision_config
    placeholder_id = hf.image_token_index if hf.image_token_id is None else hf.image_token_id
    check_activation("hidden_act", vision.hidden_act)
    check_activation("projector_hidden_act", hf.projector_hidden_act)
    if hf.vision_feature_select_strategy not in ("default", "full"):
        raise ModelError(
            f"config.json: vision_feature_select_strategy {hf.vision_feature_select_strategy} is neither "
            "default nor full; restore the file from the model's source"
        )
    if vision.hidden_size % vision.num_attention_heads:
        raise ModelError(
            f"config.json: vision_config.hidden_size {vision.hidden_size} is not a multiple of "
            f"num_attention_heads {vision.num_attention_heads}; restore the file from the model's source"
        )
    return LlavaEncoder(
        placeholder_id=32000 if placeholder_id is None else placeholder_id,
        tower=ClipTower(
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_layers=num_computed_layers(hf.vision_feature_layer, vision.num_hidden_layers),
            num_heads=vision.num_attention_heads,
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            eps=vision.layer_norm_eps,
            activation=vision.hidden_act,
        ),
        output_size=hidden_size,
        activation=hf.projector_hidden_act,
        has_bias=hf.multimodal_projector_bias,
        keeps_class=hf.vision_feature_select_strategy == "full",
    )


# architecture of the wrapper -> (its config.json, hidden size of the text model) -> its encoder; None: text
# alone is served
READERS: dict[str, Callable[[bytes, int], MediaConfig | None]] = {
    "AyaVisionForConditionalGeneration": read_aya_vision,
    "Cohere2VisionForConditionalGeneration": read_cohere2_vision,
    "DeepseekOcr2ForConditionalGeneration": read_deepseek_ocr,
    "DeepseekVLForConditionalGeneration": read_deepseek_vl,
    "DeepseekVLHybridForConditionalGeneration": read_deepseek_hybrid,
    "Gemma3ForConditionalGeneration": read_gemma3,
    "Glm4vForConditionalGeneration": read_glm4v,
    "Glm4vMoeForConditionalGeneration": read_glm4v,
    "Idefics3ForConditionalGeneration": read_idefics3,
    "InternVLChatModel": read_internvl_chat,
    "InternVLForConditionalGeneration": read_internvl,
    "KimiK25ForConditionalGeneration": read_kimi,
    "KimiVLForConditionalGeneration": read_kimi,
    "Kimi_K25ForConditionalGeneration": read_kimi,
    "Llama4ForConditionalGeneration": read_llama4,
    "LlavaForConditionalGeneration": read_llava,
    "LlavaOnevisionForConditionalGeneration": read_onevision,
    "MiniCPMV4_6ForConditionalGeneration": read_minicpmv,
    "Mistral3ForConditionalGeneration": read_mistral3,
    "Qwen2AudioForConditionalGeneration": read_qwen2_audio,
    "Qwen2VLForConditionalGeneration": read_qwen2_vl,
    "Qwen2_5OmniForConditionalGeneration": read_omni25,
    "Qwen2_5OmniModel": read_omni25,
    "Qwen2_5OmniThinkerForConditionalGeneration": read_thinker25,
    "Qwen2_5_VLForConditionalGeneration": read_qwen25_vl,
    "Qwen3_5ForConditionalGeneration": read_qwen35,
    "Qwen3_5MoeForConditionalGeneration": read_qwen35,
    "Qwen3OmniMoeForConditionalGeneration": read_omni3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": read_thinker3,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3_vl,
    "SmolVLMForConditionalGeneration": read_smolvlm,
    WHISPER: read_whisper,
}


def read_media(
    architecture: str, raw: bytes, hidden_size: int, *, wanted: bool, fields: JsonDict | None = None
) -> MediaConfig | None:
    """The encoder of an architecture, if it is wanted or the model is nothing without; None: text alone is
    served. `fields`: config.json of a model that transformers computes. Raises ModelError."""
    if fields is not None:
        is_encoded = wanted and has_media(architecture, fields)
        return read_transformers_media(architecture, fields, hidden_size) if is_encoded else None
    reader = READERS.get(architecture) if wanted or architecture == WHISPER else None
    return None if reader is None else reader(raw, hidden_size)
