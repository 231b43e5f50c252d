"""config.json of models whose images a SigLIP tower encodes, tile by tile, and a connector projects:
DeepSeek-VL, Aya Vision, Cohere's Command A Vision, Idefics 3 and SmolVLM. Torch-free."""

from typing import ClassVar, Literal

from msgspec import Struct, structs

from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation, contradiction, num_computed_layers
from runtime.models.config.gemma_vision_config import HfSiglip

# how images are prepared, and which tokens stand for one
Layout = Literal["aya_vision", "cohere2_vision", "deepseek_vl", "idefics3"]
# "mlp": two layers with GELU between them; "gated": half of what the first layer gives gates the other half;
# "linear": one layer without bias
Connector = Literal["mlp", "gated", "linear"]


class HfDeepSeekVl(Struct, frozen=True):
    """What DeepSeek-VL's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip()
    image_token_id: int = 100015


class HfAyaVision(Struct, frozen=True):
    """What Aya Vision's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip(1152, 4304, 26, 14, 384, 14)
    image_token_id: int | None = None
    image_token_index: int | None = None
    vision_feature_select_strategy: str = "full"
    vision_feature_layer: int | list[int] = -1
    downsample_factor: sizes.Width = 2
    adapter_layer_norm_eps: float = 1e-6
    alignment_intermediate_size: sizes.Width | None = None  # None: the text model's hidden_size


class HfCohere2Vision(Struct, frozen=True):
    """What Command A Vision's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip(1152, 3072, 27, 12, 512)
    image_token_id: int = 255036
    downsample_factor: sizes.Width = 2
    alignment_intermediate_size: sizes.Width = 36864


class HfIdefics3(Struct, frozen=True):
    """What Idefics 3's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip(1152, 3072, 12, 16, 224, 32)
    image_token_id: int = 128257
    scale_factor: sizes.Width = 2


class SiglipEncoder(Struct, frozen=True, kw_only=True):
    """A SigLIP tower over square tiles of an image, whose patches are projected to the size of the text
    model, one by one or in squares."""

    layout: Layout
    placeholder_id: int  # the token of a prompt that stands for an image, or for a row
    tower: ClipTower
    connector: Connector
    output_size: int  # hidden size of the text model
    inner_size: int = 0  # what the first layer of a connector of two gives
    merge_size: int = 1  # rows and columns of patches that become one row of the encoding
    merger_eps: float | None = None  # of a norm of what the connector is given; None: there is none
    has_last_norm: bool = True  # behind the tower's layers
    has_nearest_positions: bool = False  # positions are found by the distance from the image's edge
    kinds: frozenset[MediaKind] = frozenset({MediaKind.IMAGE})  # what it takes
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each

    @property
    def merged_size(self) -> int:
        """Numbers of a square of patches."""
        return self.tower.hidden_size * self.merge_size**2

    @property
    def num_rows(self) -> int:
        """Rows that a tile is encoded to."""
        return self.tower.num_patches // self.merge_size**2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        tower, size = self.tower, self.tower.hidden_size
        table = (3 * tower.patch_size**2 + 1 + tower.num_patches + 2 * self.has_last_norm) * size
        norm = 0 if self.merger_eps is None else 2 * self.merged_size
        if self.connector == "linear":
            connector = self.merged_size * self.output_size
        else:
            second = self.inner_size // 2 if self.connector == "gated" else self.inner_size
            connector = self.inner_size * (self.merged_size + 1) + self.output_size * (second + 1)
        return table + tower.num_layers * tower.layer_weights + norm + connector


def read_deepseek_vl(raw: bytes, hidden_size: int) -> SiglipEncoder:
    """DeepSeek-VL in transformers' layout, with one tower. Raises ModelError."""
    hf = decode(raw, HfDeepSeekVl, "config.json")
    return SiglipEncoder(
        layout="deepseek_vl",
        placeholder_id=hf.image_token_id,
        tower=tower_of(hf.vision_config, merge=1),
        connector="mlp",
        inner_size=hidden_size,
        output_size=hidden_size,
    )


def read_aya_vision(raw: bytes, hidden_size: int) -> SiglipEncoder:
    """Aya Vision. Raises ModelError."""
    hf = decode(raw, HfAyaVision, "config.json")
    vision = hf.vision_config
    if hf.vision_feature_select_strategy != "full":
        raise contradiction("vision_feature_select_strategy is not full")
    num_layers = num_computed_layers(hf.vision_feature_layer, vision.num_hidden_layers)
    placeholder_id = hf.image_token_index if hf.image_token_id is None else hf.image_token_id
    return SiglipEncoder(
        layout="aya_vision",
        placeholder_id=255036 if placeholder_id is None else placeholder_id,
        tower=tower_of(vision, merge=hf.downsample_factor, num_layers=num_layers),
        connector="gated",
        inner_size=hf.alignment_intermediate_size or hidden_size,
        output_size=hidden_size,
        merge_size=hf.downsample_factor,
        merger_eps=hf.adapter_layer_norm_eps,
        # transformers takes hidden states behind a layer, of which the last one's are normed
        has_last_norm=num_layers == vision.num_hidden_layers,
    )


def read_cohere2_vision(raw: bytes, hidden_size: int) -> SiglipEncoder:
    """Command A Vision. Raises ModelError."""
    hf = decode(raw, HfCohere2Vision, "config.json")
    return SiglipEncoder(
        layout="cohere2_vision",
        placeholder_id=hf.image_token_id,
        tower=tower_of(hf.vision_config, merge=hf.downsample_factor),
        connector="gated",
        inner_size=hf.alignment_intermediate_size,
        output_size=hidden_size,
        merge_size=hf.downsample_factor,
    )


def read_idefics3(raw: bytes, hidden_size: int) -> SiglipEncoder:
    """Idefics 3. Raises ModelError."""
    hf = decode(raw, HfIdefics3, "config.json")
    return SiglipEncoder(
        layout="idefics3",
        placeholder_id=hf.image_token_id,
        tower=tower_of(hf.vision_config, merge=hf.scale_factor),
        connector="linear",
        output_size=hidden_size,
        merge_size=hf.scale_factor,
        has_nearest_positions=True,
    )


def read_smolvlm(raw: bytes, hidden_size: int) -> SiglipEncoder:
    """SmolVLM: Idefics 3 with videos. Raises ModelError."""
    encoder = read_idefics3(raw, hidden_size)
    return structs.replace(encoder, kinds=encoder.kinds | {MediaKind.VIDEO})


def tower_of(vision: HfSiglip, *, merge: int, num_layers: int | None = None) -> ClipTower:
    """The tower of vision_config. `merge`: rows and columns of its patches that are joined; `num_layers`:
    that are computed, None: all. Raises ModelError."""
    check_activation("vision_config.hidden_act", vision.hidden_act)
    side = vision.image_size // vision.patch_size
    if vision.hidden_size % vision.num_attention_heads:
        raise contradiction(
            f"vision_config.hidden_size {vision.hidden_size} is no multiple of num_attention_heads "
            f"{vision.num_attention_heads}"
        )
    if not side or side % merge:
        raise contradiction(f"the {side} patches of a side are no multiple of {merge}, which are joined")
    return ClipTower(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers if num_layers is None else num_layers,
        num_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
    )
