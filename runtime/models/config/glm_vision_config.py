"""config.json of GLM-4.1V and GLM-4.5V: their encoder of images and videos. Torch-free."""

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import MomentMarks
from runtime.models.config.qwen_vl_config import QwenVlEncoder, check_output, checked


class HfGlmVision(Struct, frozen=True):
    """vision_config of GLM-4.1V, with the defaults of transformers."""

    depth: sizes.Layers = 24
    hidden_size: sizes.Width = 1536
    hidden_act: str = "silu"
    attention_bias: bool = False
    num_heads: sizes.Heads = 12
    image_size: sizes.Width = 336
    patch_size: sizes.Width = 14
    rms_norm_eps: float = 1e-5
    spatial_merge_size: sizes.Width = 2
    temporal_patch_size: sizes.Width = 2
    out_hidden_size: sizes.Width = 4096
    intermediate_size: sizes.Width = 13696


class HfGlm4v(Struct, frozen=True):
    """What GLM-4.1V's config.json says of images, with the defaults of transformers."""

    vision_config: HfGlmVision = HfGlmVision()
    image_token_id: int = 151343
    video_token_id: int = 151344
    image_start_token_id: int = 151339
    image_end_token_id: int = 151340


class GlmVisionEncoder(QwenVlEncoder, frozen=True, kw_only=True):
    """The encoder of GLM-4.1V and GLM-4.5V."""

    merger_size: int  # inner size of the merger's feed-forward
    table_side: int  # rows and columns of the table of learned positions

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner, output = self.hidden_size, self.intermediate_size, self.output_size
        patches = size * (3 * self.num_frames * self.patch_size**2 + 1)
        layer = 3 * size * (size + self.has_qkv_bias) + size * size + 3 * size * inner + 2 * size
        downsample = output * (size * self.merge_size**2 + 1)
        merger = output * (output + 2 + 3 * self.merger_size)
        tables = size * (self.table_side**2 + 2)
        return patches + tables + self.num_layers * layer + downsample + merger


def read_glm4v(raw: bytes, hidden_size: int) -> GlmVisionEncoder:
    """GLM-4.1V and GLM-4.5V. Raises ModelError."""
    hf = decode(raw, HfGlm4v, "config.json")
    vision = hf.vision_config
    check_output("out_hidden_size", vision.out_hidden_size, hidden_size)
    if vision.image_size < vision.patch_size:
        raise ModelError(
            f"config.json: vision_config.image_size {vision.image_size} is smaller than a patch of "
            f"{vision.patch_size} pixels; restore the file from the model's source"
        )
    return checked(
        GlmVisionEncoder(
            placeholder_id=hf.image_token_id,
            video_placeholder_id=hf.video_token_id,
            hidden_size=vision.hidden_size,
            intermediate_size=vision.out_hidden_size,
            num_layers=vision.depth,
            num_heads=vision.num_heads,
            patch_size=vision.patch_size,
            num_frames=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            activation=vision.hidden_act,
            output_size=hidden_size,
            is_gated=True,
            eps=vision.rms_norm_eps,
            has_qkv_bias=vision.attention_bias,
            has_bias=False,
            has_patch_bias=True,
            spanning=frozenset({MediaKind.IMAGE, MediaKind.VIDEO}),
            video_bounds=(112 * 112, 28 * 28 * 2 * 30000),
            moments=MomentMarks(
                row_id=hf.image_token_id,
                start_id=hf.image_start_token_id,
                end_id=hf.image_end_token_id,
                form="{:.0f}",
                time_first=False,
                replaces_own=False,
            ),
            merger_size=vision.intermediate_size,
            table_side=vision.image_size // vision.patch_size,
        )
    )
