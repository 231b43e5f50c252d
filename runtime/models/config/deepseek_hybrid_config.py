"""config.json of DeepSeek-VL with two towers (7B) as transformers writes it: its encoder of images.
Torch-free."""

from typing import ClassVar

from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.deepseek_ocr_config import HfSam, SamTower, sam_tower
from runtime.models.config.encoder_parts import check_activation, contradiction
from runtime.models.config.gemma_vision_config import HfSiglip
from runtime.models.config.siglip_config import tower_of


class HfDeepSeekHybrid(Struct, frozen=True):
    """What config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip()
    high_res_vision_config: HfSam = HfSam()
    image_token_id: int = 100015


class DeepSeekHybridEncoder(Struct, frozen=True, kw_only=True):
    """The encoder of DeepSeek-VL 7B: SigLIP over an image and SAM over a larger version of it, whose patches
    are projected together."""

    placeholder_id: int  # the token of a prompt that stands for an image
    tower: ClipTower
    sam: SamTower
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def side(self) -> int:
        """Rows and columns of patches of the smaller version."""
        return self.tower.image_size // self.tower.patch_size

    @property
    def num_rows(self) -> int:
        """Rows that an image is encoded to."""
        return self.side**2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        tower, size, out = self.tower, self.tower.hidden_size, self.output_size
        siglip = (3 * tower.patch_size**2 + 1 + tower.num_patches + 2) * size
        siglip += tower.num_layers * tower.layer_weights
        channels, last = self.sam.channels[0], self.sam.channels[2]
        neck = channels * self.sam.hidden_size + 9 * channels * channels + 4 * channels
        aligner = out // 2 * (size + 1 + last + 1) + out * (out + 1)
        return siglip + self.sam.num_weights + neck + 1 + aligner


def read_deepseek_hybrid(raw: bytes, hidden_size: int) -> DeepSeekHybridEncoder:
    """DeepSeek-VL with two towers. Raises ModelError."""
    hf = decode(raw, HfDeepSeekHybrid, "config.json")
    vision = hf.high_res_vision_config
    check_activation("high_res_vision_config.hidden_act", vision.hidden_act)
    if vision.hidden_size % vision.num_attention_heads or hidden_size % 2:
        raise contradiction("high_res_vision_config has heads that do not divide its hidden_size")
    if not 0 <= min(vision.global_attn_indexes, default=-1) < vision.num_hidden_layers:
        raise contradiction("high_res_vision_config.global_attn_indexes names no layer")
    neck = vision.output_channels
    return DeepSeekHybridEncoder(
        placeholder_id=hf.image_token_id,
        tower=tower_of(hf.vision_config, merge=1),
        sam=sam_tower(vision, (2 * neck, 4 * neck)),
        output_size=hidden_size,
    )
